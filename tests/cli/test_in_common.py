"""What faulty cases and nodes have in common, the suite's line of a node, must-pass, a model's own nodes, and saved states."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for
from typer.testing import CliRunner

from vkback import quants
from vkback.cli import main as cli
from vkback.cli.state_check import where_different
from vkback.device import Device
from vkback.engine.snapshot import Snapshot
from vkback.harness.cases import find_case, must_pass_cases, quick_cases
from vkback.harness.common import common_lines, in_common, line_of_node, node_facts
from vkback.harness.output import About, Console
from vkback.harness.result import CaseResult
from vkback.models import Model
from vkback.ops.op import OPS
from vkback.paths import builtin_model
from vkback.plan.planner import fused_nodes, plan


def test_the_type_that_only_faulty_cases_have_is_named() -> None:
    wrong = [(f"MUL_MAT(type_a=q6_K,m={m},n=1,k=256,seed=7)", "gemv int") for m in (64, 96, 128)]
    right = [(f"MUL_MAT(type_a={t},m=64,n=1,k=256,seed=7)", "gemv int") for t in ("q4_K", "q5_K", "q8_0", "q4_0")]
    said = common_lines(wrong, right)
    assert said.startswith("all 3 wrong have type_a = Q6_K, as 0 of 4 right")
    assert "kernel" not in said and "seed" not in said, "what right cases have, too, explains nothing"
    assert in_common([], []) == ""
    assert common_lines([("ADD(ne=[4,1,1,1],seed=1)", "")], [("ADD(ne=[4,1,1,1],seed=2)", "")]) == ""


def test_a_run_of_cases_ends_with_what_the_failing_ones_share() -> None:
    out = io.StringIO()
    printer = Console(out, About("Vulkan0", "d", "d", "c", "t"), verbose=False, style=lambda text, colour: text)
    for quant, passed in (("q6_K", False), ("q6_K", False), ("q4_K", True), ("q5_K", True)):
        line = f"MUL_MAT(type_a={quant},m=64,n=1,k=256,seed=7)"
        printer.add(CaseResult(op="MUL_MAT", line=line, mode="test", passed=passed, message="wrong", kernel="gemv int"))
    printer.finish()
    assert "In common: all 2 wrong have type_a = Q6_K, as 0 of 2 right" in out.getvalue()


def test_products_of_a_model_have_lines_that_make_the_same_node() -> None:
    found = 0
    for name in ("demo-dense", "demo-moe"):
        model = Model.open(builtin_model(name))
        ctx = planned_for("nvidia_h200_linux")
        graph = model.graph(1, 64, head="last")
        nodes, _ = fused_nodes(graph, ctx)
        facts = node_facts(nodes, plan(graph, ctx))
        for node, fact in zip(nodes, facts, strict=True):
            if not (line := line_of_node(node)):
                continue
            found += 1
            made = find_case(line).node()
            weights = [t for t in node.inputs if t.kind == "weight" and len(t.shape) > 1]
            assert (made.inputs[0].type, made.inputs[0].shape) == (weights[0].type, weights[0].shape), line
            assert made.outputs[0].type == node.outputs[0].type
            assert fact["type_a"] == weights[0].type
    assert found > 20


def test_the_must_pass_list_is_of_the_quick_suite_and_has_every_type() -> None:
    lines = [case.line for case in must_pass_cases()]
    assert len(lines) == len(set(lines)) <= 600
    assert set(lines) <= {case.line for case in quick_cases()}
    types = {str(find_case(line).params["type_a"]).upper() for line in lines if line.startswith("MUL_MAT(")}
    assert {name for name in quants.QUANTS if name != "Q8_1"} <= types
    inference = {
        "LINEAR",
        "MUL_MAT_ID",
        "ATTN_DECODE",
        "FLASH_ATTN_EXT",
        "ROPE",
        "GET_ROWS",
        "SET_ROWS",
        "SAMPLE",
        "TOPK_MOE",
        "RMS_NORM_MUL",
    }
    assert inference <= {line.partition("(")[0] for line in lines} <= set(OPS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-m", "demo-dense", "-o", "ADD"), "-m judges a model's own nodes"),
        (("perf", "--must-pass"), "--must-pass is a set of cases of its own"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: tuple[str, ...], said: str) -> None:
    assert said in str(CliRunner().invoke(cli.app, ["test-ops", *arguments]).exception)


@pytest.mark.vulkan
def test_a_model_s_own_nodes_are_judged(device: Device) -> None:
    ran = CliRunner().invoke(cli.app, ["test-ops", "-m", "demo-dense", "-p", "LINEAR.*n=1", "--json"])
    assert ran.exit_code == 0, (ran.output, ran.exception)
    found = json.loads(ran.stdout)
    assert found and all(r["passed"] for r in found)
    assert sum(int(r["line"].rpartition("nodes=")[2].removesuffix(")")) for r in found) > 20


def snapshot(**arrays: Any) -> Snapshot:
    return Snapshot((1, 2, 3), arrays)


def test_the_first_cache_that_differs_is_named_with_its_row() -> None:
    model = Model.open(builtin_model("demo-dense"))

    class Opened:
        n_ctx = 64

    Opened.model = model  # type: ignore[attr-defined]
    rows = {f"cache_{kind}_l{layer}": np.zeros((2, 3, 4), np.float16) for layer in (0, 1) for kind in "kv"}
    other = {name: array.copy() for name, array in rows.items()}
    assert where_different(Opened, snapshot(**rows), snapshot(**other), "now") == ""  # type: ignore[arg-type]
    other["cache_v_l1"][0, 0, 0] = 1
    other["cache_k_l1"][1, 2, 3] = 1
    said = where_different(Opened, snapshot(**rows), snapshot(**other), "right after the restore")  # type: ignore[arg-type]
    assert "cache_k_l1, first in row 2" in said and said.endswith("right after the restore")


@pytest.mark.vulkan
def test_a_restored_state_goes_on_with_the_same_bits() -> None:
    ran = CliRunner().invoke(cli.app, ["state-check", "--prompt-tokens", "8", "-n", "8", "-c", "64", "--json"])
    assert ran.exit_code == 0, ran.exception
    assert json.loads(ran.stdout)["verdict"].startswith("the same bits after save and restore (11 tokens")
