"""docs/adding_an_architecture.md, followed in a copy of the tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import copy_tree, follow, run


@pytest.mark.vulkan
def test_the_page_adds_an_architecture_that_runs(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    tests, synth, graph, plan = follow("adding_an_architecture.md", tree)
    assert "failed" not in run(tests, tree)
    run(synth, tree)
    said = run(graph, tree)
    assert "GEGLU" in said and "attn_residual-5" in said
    assert "l_out-5" in run(plan, tree)
    description = run(["python", "-c", "from vkback.models import Model; print(Model.open('parallel.gguf').description)"], tree)
    assert description == "parallel 2M Q8_0\n"
