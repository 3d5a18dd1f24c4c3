"""Roots of other systems: what is mounted into them is found, so that no checkout is removed with one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.debian_root import is_mounted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the roots are for Linux")

MOUNTS = r"""/dev/vda / ext4 rw 0 0
proc /proc proc rw 0 0
/dev/vda /var/a\040root/vkback ext4 rw 0 0
"""


def test_a_folder_of_the_same_file_system_is_seen() -> None:
    assert is_mounted(Path("/proc"), MOUNTS)
    assert is_mounted(Path("/var/a root/vkback"), MOUNTS)
    assert not is_mounted(Path("/var/a root"), MOUNTS) and not is_mounted(Path("/var/a root/proc"), MOUNTS)


def test_a_folder_that_is_bound(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    for name in ("source", "place"):
        (tmp_path / name).mkdir()
    if subprocess.run(("mount", "--bind", "source", "place"), cwd=tmp_path, capture_output=True, check=False).returncode:
        pytest.skip("this container mounts nothing")
    try:
        assert is_mounted(tmp_path / "place") and not is_mounted(tmp_path / "source")
    finally:
        subprocess.run(("umount", "place"), cwd=tmp_path, check=True)
    assert not is_mounted(tmp_path / "place")
