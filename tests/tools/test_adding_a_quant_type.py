"""docs/adding_a_quant_type.md, followed in a copy of the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import copy_tree, follow, run


@pytest.mark.vulkan
def test_the_page_adds_a_type_that_runs(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    tests, floats, ints = follow("adding_a_quant_type.md", tree)

    said = run([*tests, "-vv"], tree)
    assert "failed" not in said and "test_device_layout_holds" in said, said

    for command, path, count in ((floats, "float", 5), (ints, "int", 4)):
        said = run([*command, "-v"], tree)
        assert re.search(rf"\b{count}/{count} ", said), f"{path}: {said}"
