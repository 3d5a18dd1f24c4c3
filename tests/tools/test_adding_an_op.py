"""docs/adding_an_op.md, followed in a copy of the tree; its op is loaded here, too, for a closer look."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import BLOCK, ROOT, copy_tree, follow, run

from vkback.device import Device
from vkback.evaluate.judge import ggml_limit, judge
from vkback.harness import cases
from vkback.harness.runner import Workbench, prepare, run_case
from vkback.harness.suite import Suite
from vkback.harness.support import support_of, support_table
from vkback.ops.case import Problem
from vkback.ops.case_line import CaseLineError
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.plan.planner import plan
from vkback.shader import ShaderLibrary

PAGE = "adding_an_op.md"
BLOCKS = list(BLOCK.finditer((ROOT / "docs" / PAGE).read_text(encoding="utf-8")))
FILES = sorted(block["path"] for block in BLOCKS if block["path"])
(GRAPH,) = (block["text"] for block in BLOCKS if block["kind"] == "python" and not block["path"])


def forget() -> None:
    cases.known_cases.cache_clear()


@dataclass(frozen=True)
class Followed:
    """A tree with the page's files, and the page's commands."""

    tree: Path
    commands: list[list[str]]

    @property
    def shaders(self) -> Path:
        return self.tree / "shaders"


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    """The page's op, registered in this process, too."""
    tree = copy_tree(tmp_path_factory.mktemp("page") / "tree")
    commands = follow(PAGE, tree)
    before = dict(OPS)
    spec = importlib.util.spec_from_file_location("vkback.ops.softsign", tree / "vkback/ops/softsign.py")
    assert spec and spec.loader
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    forget()
    yield Followed(tree, commands)
    for name in OPS.keys() - before.keys():
        del OPS[name]
    forget()


def test_the_change_is_one_python_file_and_one_shader(followed: Followed) -> None:
    assert FILES == ["shaders/softsign/softsign.comp", "vkback/ops/softsign.py"]
    assert "diff" not in {block["kind"] for block in BLOCKS}
    assert "SOFTSIGN" in OPS


def test_the_reference(followed: Followed) -> None:
    (y,) = OPS["SOFTSIGN"].reference([np.array([-3.0, 0.0, 1.0])], {})
    np.testing.assert_allclose(y, [-0.75, 0.0, 0.5])


def test_the_sets_of_cases_have_it(followed: Followed, ctx: LowerContext) -> None:
    own = [c for c in cases.full_cases() if c.op == "SOFTSIGN"]
    assert len(own) == 14
    assert all(cases.find_case(c.line).line == c.line for c in own)
    table = support_table(own, list(support_of(own, ctx)))
    assert table[1].split() == ["SOFTSIGN", "14", "of", "14"]
    assert ggml_limit("SOFTSIGN") == 1e-7


@pytest.mark.vulkan
def test_the_suite_judges_it(followed: Followed, device: Device, ctx: LowerContext) -> None:
    with Suite(device, ShaderLibrary(followed.shaders), ctx) as suite:
        results = list(suite.run(c for c in cases.full_cases() if c.op == "SOFTSIGN"))
    assert [r.message for r in results if not r.passed] == []


@pytest.mark.vulkan
def test_a_fault_of_its_shader_is_caught(followed: Followed, tmp_path: Path, device: Device, ctx: LowerContext) -> None:
    broken = shutil.copytree(followed.shaders, tmp_path / "shaders") / "softsign/softsign.comp"
    broken.write_text(broken.read_text().replace("i < p.elements", "i + 1u < p.elements"))
    outcome = run_case(device, ShaderLibrary(tmp_path / "shaders"), next(iter(OPS["SOFTSIGN"].cases())), ctx)
    assert not outcome.ok


@pytest.mark.vulkan
def test_the_commands_of_the_page(followed: Followed) -> None:
    full, line, explain = followed.commands
    assert "  14/14 tests passed" in run(full, followed.tree)
    assert "  1/1 tests passed" in run(line, followed.tree)
    assert "kernel softsign " in run(explain, followed.tree)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"size": 2.0}, "SOFTSIGN: parameter ne is missing; known are ne, size, seed; a whole case is SOFTSIGN(ne=[1,4096],"),
        ({"ne": (1,), "sise": 2.0}, "SOFTSIGN: no parameter is called sise; known are ne, size, seed; a whole case is SOFTSIGN("),
        ({"ne": (1,), "size": "big"}, "SOFTSIGN: size=big: expected a number; a whole case is SOFTSIGN(ne=[1,4096],size=4.000000,seed=1)"),
        ({"ne": (1, "x")}, "SOFTSIGN: ne=(1, 'x'): expected a list of whole numbers, as [1,2]; a whole case is SOFTSIGN("),
    ],
)
def test_a_line_that_makes_no_case_says_why(params: dict[str, Any], message: str, followed: Followed) -> None:
    with pytest.raises(CaseLineError, match="^" + re.escape(message)):
        OPS["SOFTSIGN"].case(params)


@pytest.mark.vulkan
def test_a_graph_on_the_twin_and_on_the_device(followed: Followed, device: Device, ctx: LowerContext) -> None:
    made: dict[str, Any] = {}
    exec(compile(GRAPH, PAGE, "exec"), made)
    graph, inputs, values = made["graph"], made["inputs"], made["values"]
    x = inputs["x"].astype(np.float64)
    np.testing.assert_allclose(values["y"], x / (1 + np.abs(x)))
    np.testing.assert_allclose(values["z"], x * x / (1 + np.abs(x)))
    assert [d.op for d in plan(graph, ctx).dispatches()] == ["SOFTSIGN", "MUL"]
    with Workbench(device, ShaderLibrary(followed.shaders)) as bench:
        got = bench.run(prepare(Problem(graph.nodes[-1], inputs), ctx, graph.nodes))
    verdict = judge(got["z"], values["z"], OPS["SOFTSIGN"].tolerance(graph.nodes[0], ctx))
    assert verdict.ok, verdict.text
