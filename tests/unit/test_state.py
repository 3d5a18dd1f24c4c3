"""State files: what is refused, and that a save is all or nothing."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import run_program

from vkback.engine import snapshot as state
from vkback.engine.snapshot import Snapshot, StateError, differences, read_state, write_state
from vkback.gguf.fingerprint import fingerprint
from vkback.models import GgufFile
from vkback.paths import builtin_models

SNAPSHOT = Snapshot(
    (5, 6, 7), {"cache_k_l0": np.arange(24, dtype=np.float16).reshape(2, 3, 4), "cache_ssm_l1": np.linspace(0, 1, 6, dtype=np.float32)}
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_state(tmp_path / "state", SNAPSHOT, {"model": "x", "ctx": 96}, {"waiting": [9]})
    return tmp_path / "state"


def test_what_was_written_comes_back(file: Path) -> None:
    found, settings, extra = read_state(file)
    assert (found.tokens, settings, extra) == ((5, 6, 7), {"model": "x", "ctx": 96}, {"waiting": [9]})
    assert list(found.arrays) == list(SNAPSHOT.arrays) and found.nbytes == SNAPSHOT.nbytes
    for name, array in SNAPSHOT.arrays.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)


def test_every_flipped_byte_is_refused(file: Path) -> None:
    raw = file.read_bytes()
    assert len(raw) < 1000
    for i in range(len(raw)):
        file.write_bytes(raw[:i] + bytes([raw[i] ^ (1 << i % 8)]) + raw[i + 1 :])
        with pytest.raises(StateError, match=re.escape(str(file))):
            read_state(file)


def test_every_shortened_file_is_refused(file: Path) -> None:
    raw = file.read_bytes()
    for length in range(len(raw)):
        file.write_bytes(raw[:length])
        with pytest.raises(StateError):
            read_state(file)


def test_refusals_name_the_reason(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StateError, match=r"nothing: cannot be read: No such file"):
        read_state(file.with_name("nothing"))
    raw = file.read_bytes()
    for content, text in (
        (b"GGUF", "is no state of vkback, which begins with VKBSTATE"),
        (raw[:20], "ends after 20 bytes: the file is cut short"),
        (raw[:8] + b"\x02" + raw[9:], "has version 2, this vkback reads version 1"),
        (raw[:-1], "the checksum does not fit: the file is damaged or cut short"),
    ):
        file.write_bytes(content)
        with pytest.raises(StateError, match=text):
            read_state(file)


def test_a_save_that_fails_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = file.read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(StateError, match=r"state: \d+ bytes cannot be written: no space left, is the disk full\?"):
        write_state(file, SNAPSHOT, {}, {})
    assert file.read_bytes() == raw and list(file.parent.iterdir()) == [file]


SAVES = """
import os, random, signal, sys, time
import numpy as np
from pathlib import Path
from vkback.engine.snapshot import Snapshot, read_state, write_state
path, rng = Path(sys.argv[1]), random.Random(1)
snapshots = [Snapshot((n,), {"cache": np.full(1 << 17, n, np.float32)}) for n in range(2)]
write_state(path, snapshots[0], {}, {})
whole = cut = 0
turn = 0
while turn < 20 or cut < 4 and turn < 1000:  # a busy machine may kill most of them before they have begun
    turn += 1
    child = os.fork()
    if not child:
        for n in range(1, 1000):
            write_state(path, snapshots[n % 2], {}, {})
    time.sleep(rng.uniform(0.0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = read_state(path)[0]
    assert (found.arrays["cache"] == found.tokens[0]).all()
    cut += len(list(path.parent.iterdir())) > 1
    for left in path.parent.glob("*.tmp"):
        left.unlink()
print(cut)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes that are killed are forks")
def test_a_killed_save_leaves_a_whole_file(tmp_path: Path) -> None:
    """Twenty processes and more that save over and over are killed at some moment: the file is that of a save which came to its end."""
    done = run_program([sys.executable, "-c", SAVES, str(tmp_path / "state")])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 4, "kills between saves show nothing"


def test_differences_are_named() -> None:
    assert differences({"act": "f32", "ctx": 64}, {"act": "f32", "ctx": 96}) == ["ctx: 64, here 96"]
    assert differences({"a": 1}, {"a": 1, "b": 2}) == ["b: None, here 2"]


def test_models_have_fingerprints_of_their_own() -> None:
    files = [GgufFile.open(path) for path in builtin_models()]
    prints = [fingerprint(f) for f in files]
    assert len(set(prints)) == len(files) and prints == [fingerprint(f) for f in files]
    assert state.VERSION == 1
