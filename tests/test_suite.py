"""The op suite itself: its cases, and that it catches kernels broken on purpose."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import planned_for, with_params

from vkback.cli.test_ops import compared
from vkback.device import Device
from vkback.errors import VkbackError
from vkback.graph import Node
from vkback.harness import generators, suite
from vkback.harness.case_line import CaseLineError, parse_line, split_lines
from vkback.harness.factories import ROUTES, make_case, product_case, routed_case
from vkback.harness.judge import judge, peer_limit
from vkback.harness.output import About, Console, Csv, Json, Printer, Sql, perf_line, samples_by_line
from vkback.harness.perf import groups, with_tokens
from vkback.harness.result import CaseResult
from vkback.harness.runner import prepare
from vkback.harness.shrink import save, shrink
from vkback.harness.suite import Suite, find_case, run_in_processes
from vkback.harness.support import support_of, support_table
from vkback.harness.unfused import UNFUSED, unfused, unfused_tolerance
from vkback.ops.base import OPS, Arg, Case, Dispatch, LowerContext, Problem, Tolerance, pack_push
from vkback.ops.mat_vec import QUANTS
from vkback.ops.mat_vec_node import INT_QUANTS
from vkback.paths import shader_root
from vkback.shader import ShaderLibrary

FULL = list(generators.full_cases())
PERF = list(generators.perf_cases())
H200 = planned_for("nvidia_h200_linux")


# -- the cases


def test_the_full_set_is_large_and_names_each_case_once() -> None:
    lines = [case.line for case in FULL]
    assert len(set(lines)) == len(lines) >= 6000
    assert {case.op for case in FULL} == set(OPS)


def test_every_type_runs_with_one_to_sixteen_tokens_on_every_path() -> None:
    found = Counter((c.params["type_a"], c.params.get("act"), c.params["n"]) for c in FULL if c.op == "MUL_MAT")
    for quant in QUANTS:
        for act in ("f32", "q8_1") if quant in INT_QUANTS else ("f32",):
            assert all(found[quant, act, n] for n in range(1, 17)), (quant, act)


def test_batches_are_broadcast_permuted_and_views() -> None:
    cases = [c for c in FULL if c.op == "MUL_MAT" and "bs" in c.params]
    for quant in QUANTS:
        own = [c.params for c in cases if c.params["type_a"] == quant]
        assert {p["nr"] for p in own} >= {(1, 1), (1, 2), (2, 1), (2, 2)}, quant
        assert {p.get("order") for p in own} >= {None, *generators.ORDERS}, quant
        assert any(p.get("gap") for p in own), quant
    held = [c.params for c in cases if c.params.get("plain")]
    assert {(p["type_a"], p["type_b"]) for p in held} == {(a, b) for a in ("F32", "F16") for b in ("f32", "f16")}
    assert {p.get("order") for p in held} >= set(generators.TRANSPOSED)


def test_copies_go_between_all_types() -> None:
    found = {(c.op, c.params["type_src"], c.params["type_dst"]) for c in FULL if c.op in ("CPY", "SET_ROWS") and "type_src" in c.params}
    floats = [(a, b) for a in ("F32", "F16") for b in ("F32", "F16")]
    assert found >= {("CPY", *pair) for pair in (*floats, ("I32", "I32"), *((q, b) for q in QUANTS for b in ("F32", "F16")))}
    assert found >= {("SET_ROWS", *pair) for pair in floats if pair != ("F32", "F16")}  # which their lines leave out
    assert {c.params["type"] for c in FULL if c.op == "GET_ROWS"} == {*QUANTS, "I32"}


def test_experts_are_chosen_in_every_way() -> None:
    cases = [c for c in FULL if c.op == "MUL_MAT_ID"]
    assert {c.params.get("ids", "shuffled") for c in cases} == set(ROUTES)
    assert {c.params["n_mats"] for c in cases} >= {4, 8, 128, 512}
    assert {c.params["n_used"] for c in cases} >= {1, 2, 4, 8}
    values = routed_case("Q4_K", 8, 2, 4, 3, 256, shared=True, ids="last").build().values["ids"]
    np.testing.assert_array_equal(values, [[6, 7]] * 3)
    assert len(set(map(tuple, routed_case("Q4_K", 8, 2, 4, 3, 256, shared=True, ids="one").build().values["ids"]))) == 1


def test_a_line_makes_its_case() -> None:
    looked_up = [c for c in generators.quick_cases() if c.op == "GET_ROWS"]  # their lines do not name the rows
    for case in [c for c in FULL if c not in looked_up] + PERF:
        assert make_case(*parse_line(case.line)).line == case.line
    for case in looked_up:
        assert find_case(case.line).line == case.line


@pytest.mark.parametrize("case", FULL[:: len(FULL) // 60], ids=lambda c: c.line)
def test_a_line_makes_the_same_values(case: Case) -> None:
    first, second = case.build(), find_case(case.line).build()
    assert first.node == second.node
    for name, value in first.values.items():
        np.testing.assert_array_equal(value, second.values[name])


def test_another_seed_changes_the_values_alone() -> None:
    line = "MUL_MAT(type_a=Q4_K,type_b=f32,m=16,n=1,k=256,seed=7)"
    assert line in suite.known_cases()
    other = find_case(line.replace("seed=7", "seed=8"))
    assert other.line == line.replace("seed=7", "seed=8")
    assert other.build().node == find_case(line).build().node
    assert (other.build().values["x"] != find_case(line).build().values["x"]).any()


def test_a_line_of_no_set_makes_a_case() -> None:
    assert find_case("MUL_MAT(type_a=Q6_K,m=4097,n=1,k=512)").line == "MUL_MAT(type_a=Q6_K,type_b=f32,m=4097,n=1,k=512,seed=7)"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("MUL_MAT", "MUL_MAT: not a case; a case is written OP(key=value,...), as a run prints it"),
        ("MUL_MAT(m)", "MUL_MAT(m): 'm' is not key=value"),
        ("MUL_MAT(type_a=Q4_K,m=1,n=1)", "MUL_MAT: parameter k is missing; give it, or a whole line as a run prints it"),
        ("MUL_MAT_ID(type_a=Q4_K,n_mats=4,n_used=1,m=1,n=1,k=256,ids=all)", "ids=all: expected one of shuffled, one, last, repeat"),
        ("FLASH_ATTN_EXT(n_head=1,n_head_kv=1,hd=64,kv=2,nb=3,y=F32)", "nb=3: more tokens than the 2 rows of the cache"),
    ],
)
def test_a_line_that_makes_no_case_says_why(line: str, message: str) -> None:
    with pytest.raises(CaseLineError) as e:
        find_case(line)
    assert str(e.value) == message


def test_unknown_op_names_the_known() -> None:
    with pytest.raises(CaseLineError, match=r"^XYZ: no such op; known are ABS, ADD, "):
        find_case("XYZ(m=1)")


def test_commas_inside_a_case_do_not_split() -> None:
    assert split_lines("ADD, SILU(ne=[1,4096],seed=4),MUL") == ["ADD", "SILU(ne=[1,4096],seed=4)", "MUL"]


def test_chunks_shrink_and_cover_all() -> None:
    lines = [str(i) for i in range(1000)]
    chunks = list(suite._chunks(lines, 4))
    assert [line for chunk in chunks for line in chunk] == lines
    assert max(map(len, chunks)) == 100
    assert len(chunks[-1]) == 1


def test_perf_cases_that_share_weights_stand_together() -> None:
    assert len({c.line for c in PERF}) == len(PERF)
    made = list(groups(PERF))
    assert sum(map(len, made)) == len(PERF)
    first = made[0]
    assert [c.params["n"] for c in first] == [16, 8, 7, 6, 5, 4, 3, 2, 1]
    node = product_case("Q4_K", 8, 4, 256, type_b="q8_1").build().node
    assert [t.shape for t in (*with_tokens(node, 2).inputs, *with_tokens(node, 2).outputs)] == [(8, 256), (2, 256), (2, 8)]


# -- fused and unfused


@pytest.mark.parametrize("op", sorted(UNFUSED))
def test_chains_make_the_outputs_of_the_fused_op_and_can_be_planned(op: str) -> None:
    chains = 0
    for case in [c for c in FULL if c.op == op][::7]:
        problem = case.build()
        nodes = unfused(problem.node)
        chains += bool(nodes)
        if nodes:
            made = {t.name: t for n in nodes for t in n.outputs}
            assert all(made[t.name].type == t.type and made[t.name].shape == t.shape for t in problem.node.outputs)
            assert all(n.op != op for n in nodes)
            assert prepare(problem, H200, nodes).outputs == problem.node.outputs
    assert chains


def test_fused_and_unfused_must_agree_better_than_eight_bits() -> None:
    node = make_case("MAT_VEC", parse_line("X(type_a=Q4_K,m=64,n=1,k=256,fused=residual)")[1]).build().node
    eight = dataclasses.replace(H200, act="q8_1")
    assert unfused_tolerance(node, unfused(node), eight).nmse < OPS["MAT_VEC"].tolerance(node, eight).nmse / 10


def test_plain_ops_have_no_chain() -> None:
    assert unfused(product_case("Q4_K", 8, 1, 256).build().node) == []


# -- kernels broken on purpose


@pytest.fixture
def break_shader(tmp_path: Path) -> Callable[[str, str, str], ShaderLibrary]:
    """A library in which a text of one shader is another."""

    def change(file: str, old: str, new: str) -> ShaderLibrary:
        root = tmp_path / "shaders"
        shutil.copytree(shader_root(), root)
        text = (root / file).read_text()
        assert old in text, f"{file} no longer says {old!r}: break it elsewhere"
        (root / file).write_text(text.replace(old, new))
        return ShaderLibrary(root)

    return change


@pytest.fixture
def break_lowering(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[list[Dispatch]], list[Dispatch]]], None]:
    """An op whose dispatches are changed before they are launched."""

    def change(op: str, by: Callable[[list[Dispatch]], list[Dispatch]]) -> None:
        lower = OPS[op].lower
        monkeypatch.setattr(OPS[op], "lower", lambda node, ctx: by(lower(node, ctx)))

    return change


def outcome(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> CaseResult:
    with Suite(device, library, ctx) as opened:
        return opened.run_one(case).result


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("const float scale = (row == 1u ? 1.001 : 1.0) / sqrt(", "rows with errors: 1 (1 in all)"),
        ("const float scale = (row == 1u ? 0.0 : 1.0) / sqrt(", "rows with errors: 1 (1 in all)"),
        ("const float scale = (row == 1u ? uintBitsToFloat(0x7fc00000u) : 1.0) / sqrt(", "not finite where they should be"),
    ],
    ids=["a thousandth off", "zero", "NaN"],
)
def test_one_wrong_row(
    new: str, message: str, device: Device, ctx: LowerContext, break_shader: Callable[[str, str, str], ShaderLibrary]
) -> None:
    library = break_shader("norm/norm.comp", "const float scale = 1.0 / sqrt(", new)
    result = outcome(make_case("RMS_NORM", {"ne": (5, 33)}), device, library, ctx)
    assert result.passed is False
    assert message in result.message


@pytest.mark.vulkan
def test_one_column_past_the_edge(
    device: Device, library: ShaderLibrary, ctx: LowerContext, break_lowering: Callable[..., None]
) -> None:
    def longer(dispatches: list[Dispatch]) -> list[Dispatch]:
        (d,) = dispatches
        elements = int.from_bytes(d.push[:4], "little")
        return [dataclasses.replace(d, push=pack_push(elements + 1) + d.push[4:])]

    break_lowering("SUB", longer)
    result = outcome(make_case("SUB", {"ne": (5, 37), "b": (37,)}), device, library, ctx)
    assert result.passed is False
    assert result.message == "[SUB] y F32[5, 37]: 4 guard bytes after it were overwritten"


@pytest.mark.vulkan
def test_reading_past_the_end_spoils_the_result(
    device: Device, ctx: LowerContext, break_shader: Callable[[str, str, str], ShaderLibrary]
) -> None:
    library = break_shader("norm/norm.comp", "4u * (q) + c < p.dim ? from", "4u * (q) + c <= p.dim ? from")
    result = outcome(make_case("RMS_NORM", {"ne": (1, 33)}), device, library, ctx)
    assert result.passed is False
    assert "not finite" in result.message


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("old", "new", "case", "message"),
    [
        (
            "NORMED(total[c]) + addend[c]", "NORMED(total[c]) * (first_row + lane == 5u ? 1.001 : 1.0) + addend[c]", ("F32", 17, 3, 256),
            "NMSE .* > 1e-09",
        ),
        ("first_row + (i << GLU) < p.m &&", "first_row + (i << GLU) <= p.m &&", ("Q8_0", 17, 1, 256), "4 guard bytes after it"),
        ("column + i < p.k ?", "column + i <= p.k ?", ("F16", 17, 1, 65), "not finite"),
        ("column + i < p.k ?", "column + i < p.k - 1u ?", ("F16", 17, 3, 65), "NMSE .* > 1e-09"),
        ("min(x_row + c, p.n - 1u)", "min(x_row + c + 1u, p.n - 1u)", ("Q4_K", 17, 3, 256), r"rows with errors: 0, 1 \(2 in all\)"),
        ("min(row + r, p.m - 1u)", "min(row + r, p.m - 2u)", ("Q6_K", 17, 1, 256), r"at \[0, 16\]"),
        ("WITHIN_ROW(unit), 0u,", "WITHIN_ROW(unit) + (row == 3u ? 1u : 0u), 0u,", ("Q8_0", 17, 1, 256), "NMSE|not finite"),
    ],
    ids=["a row off", "a row past", "a column past", "a column missing", "another token", "the last row", "a unit past"],
)
def test_faults_in_the_product_are_caught(
    old: str, new: str, case: tuple[str, int, int, int], message: str, device: Device, ctx: LowerContext,
    break_shader: Callable[[str, str, str], ShaderLibrary],
) -> None:  # fmt: skip
    file = next(f for f in ("mat_vec/mat_vec.comp", "mat_vec/epilogue.glsl", "mat_vec/act.glsl") if old in (shader_root() / f).read_text())
    one_subgroup = with_params(ctx, wg=16, lanes=8, rows=1, groups=0)
    result = outcome(product_case(*case, act="f32"), device, break_shader(file, old, new), one_subgroup)
    assert result.passed is False
    assert re.search(message, result.message), result.message


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("file", "case"),
    [
        ("common/reduce.glsl", make_case("RMS_NORM", {"ne": (5, 1024)})),
        ("mat_vec/mat_vec.comp", product_case("Q8_0", 33, 1, 4096, act="f32")),
        ("mat_vec/mat_vec.comp", product_case("Q4_K", 33, 3, 4096, type_b="q8_1", act="q8_1")),
    ],
    ids=["reduction", "product", "product of bytes"],
)
def test_a_barrier_missing_between_subgroups(
    file: str, case: Case, device: Device, ctx: LowerContext, library: ShaderLibrary, break_shader: Callable[[str, str, str], ShaderLibrary]
) -> None:
    """Several subgroups share a row. A CPU driver runs them one after the other: the first then adds what the others have yet to write."""
    wide = with_params(ctx, wg_size=64, wg=64, lanes=64, rows=1, groups=0)
    assert outcome(case, device, library, wide).passed
    result = outcome(case, device, break_shader(file, "barrier();", ""), wide)
    assert result.passed is False
    assert "NMSE" in result.message or "not finite" in result.message


@pytest.mark.vulkan
def test_a_missed_barrier(device: Device, library: ShaderLibrary, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    case = product_case("Q8_0", 8, 1, 256, act="q8_1")
    assert outcome(case, device, library, ctx).passed

    def one_stage(dispatches: Sequence[Dispatch]) -> list[list[Dispatch]]:
        return [list(dispatches)]

    monkeypatch.setattr("vkback.harness.runner.into_stages", one_stage)
    result = outcome(case, device, library, ctx)
    assert result.passed is False
    assert "not finite" in result.message


@pytest.mark.vulkan
def test_stale_scratch(device: Device, library: ShaderLibrary, ctx: LowerContext, break_lowering: Callable[..., None]) -> None:
    """The quantizer of x leaves most of its scratch as it was."""

    def partly(dispatches: list[Dispatch]) -> list[Dispatch]:
        first, *rest = dispatches
        assert first.groups > (1, 1, 1)
        return [dataclasses.replace(first, groups=(1, 1, 1)), *rest]

    case = product_case("Q8_0", 8, 3, 2048, act="q8_1")
    with Suite(device, library, ctx) as opened:
        assert opened.run_one(case).result.passed  # and leaves the right values where the next run has its scratch
        break_lowering("MUL_MAT", partly)
        result = opened.run_one(case).result
    assert result.passed is False
    assert "not finite" in result.message


@pytest.mark.vulkan
def test_an_input_overwritten(device: Device, library: ShaderLibrary, ctx: LowerContext, break_lowering: Callable[..., None]) -> None:
    """The result is right; then a second launch, which says that it only reads, changes an input."""

    def twice(dispatches: list[Dispatch]) -> list[Dispatch]:
        (d,) = dispatches
        a, b, y = (arg.tensor for arg in d.args)
        return [d, dataclasses.replace(d, args=(Arg(y), Arg(b), Arg(a)))]

    break_lowering("MUL", twice)
    result = outcome(make_case("MUL", {"ne": (3, 64), "b": (64,)}), device, library, ctx)
    assert result.passed is False
    assert re.fullmatch(
        r"\[MUL\] a F32\[3, 64\]: \d+ of its 768 bytes were changed, the first at \d+, and the kernel may only read it", result.message
    )


@pytest.mark.vulkan
def test_a_counter_not_put_back(device: Device, ctx: LowerContext, break_shader: Callable[[str, str, str], ShaderLibrary]) -> None:
    library = break_shader("common/ticket.glsl", "if (drawn == count - 1u) tickets[slot] = 0u;", "")
    result = outcome(make_case("ARGMAX", {"n": 2, "vocab": 32000, "kind": "normal", "seed": 1}), device, library, ctx)
    assert result.passed is False
    assert result.message == "[ARGMAX] ids.tickets I32[2]: 2 counters were not put back to zero"


@pytest.mark.vulkan
def test_a_fusion_that_differs_from_its_chain_within_the_op_s_tolerance(
    device: Device, library: ShaderLibrary, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain that leaves out the addition of a small residual: 8-bit tolerance against numpy would hide it."""
    usual = make_case("MAT_VEC", parse_line("X(type_a=Q8_0,m=64,n=1,k=2048,fused=residual,act=q8_1)")[1])

    def small(rng: np.random.Generator) -> Problem:
        problem = usual.make(rng)
        return Problem(problem.node, {**problem.values, "residual": np.float32(0.1) * problem.values["residual"]})

    case = dataclasses.replace(usual, make=small)
    assert outcome(case, device, library, ctx).passed

    def without_residual(node: Node) -> list[Node]:
        by = dict(zip(node.params["roles"], node.inputs, strict=True))
        return [Node("MUL_MAT", (by["w"], by["x"]), node.outputs)]

    monkeypatch.setitem(UNFUSED, "MAT_VEC", without_residual)
    result = outcome(case, device, library, ctx)
    assert result.passed is False
    assert result.message.startswith("[MAT_VEC] y against the unfused run: NMSE ")
    assert "y: NMSE" in result.detail and "<=" in result.detail


@pytest.mark.vulkan
def test_a_failing_case_is_made_smaller_and_saved(
    tmp_path: Path, device: Device, ctx: LowerContext, break_shader: Callable[[str, str, str], ShaderLibrary]
) -> None:
    late = "const float scale = (row == 2u && p.dim > 40u ? 2.0 : 1.0) / sqrt("
    library = break_shader("norm/norm.comp", "const float scale = 1.0 / sqrt(", late)
    with Suite(device, library, ctx) as opened:
        least = shrink(make_case("RMS_NORM", {"ne": (9, 100)}), lambda case: opened.run_one(case).result.passed is False)
        assert least.params["ne"] == (3, 41)
        run = opened.run_one(least)
    saved = np.load(save(run, tmp_path))
    assert str(saved["line"]) == least.line
    assert saved["input.a"].shape == saved["got.y"].shape == saved["want.y"].shape == (3, 41)
    np.testing.assert_allclose(saved["got.y"][:2], saved["want.y"][:2], rtol=1e-5)
    assert not np.allclose(saved["got.y"][2], saved["want.y"][2])


def test_shrinking_keeps_to_whole_blocks() -> None:
    tried: list[Case] = []

    def fails(case: Case) -> bool:
        tried.append(case)
        return bool(case.params["m"] >= 5 and case.params["k"] >= 600)

    least = shrink(product_case("Q4_K", 300, 12, 4096), fails)
    assert least.line == "MUL_MAT(type_a=Q4_K,type_b=f32,m=5,n=1,k=768,seed=7)"
    assert all(c.params["k"] % 256 == 0 for c in tried)
    assert len(tried) < 40


# -- running


@pytest.mark.vulkan
def test_results_come_in_order_and_say_what_is_not_supported(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    cases = [
        make_case("SILU", {"ne": (1, 64)}),
        make_case("FLASH_ATTN_EXT", {"n_head": 8, "n_head_kv": 2, "hd": 63, "kv": 8, "nb": 1, "y": "F32"}),
        make_case("ADD", {"ne": (2, 64), "b": (64,)}),
    ]
    with Suite(device, library, ctx) as opened:
        results = list(opened.run(cases))
    assert [r.line for r in results] == [c.line for c in cases]
    assert [(r.supported, r.passed) for r in results] == [(True, True), (False, None), (True, True)]
    assert "multiple of 8" in results[1].message
    assert results[0].tolerance_nmse and results[0].nmse is not None and results[0].nmse <= results[0].tolerance_nmse


@pytest.mark.vulkan
def test_a_fault_of_one_op_does_not_end_the_run(
    device: Device, library: ShaderLibrary, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise IndexError("no such axis")

    monkeypatch.setattr(OPS["SILU"], "reference", broken)
    with Suite(device, library, ctx) as opened:
        bad, good = opened.run([make_case("SILU", {"ne": (1, 64)}), make_case("ABS", {"ne": (1, 64)})])
    assert (bad.passed, bad.message) == (False, "[SILU] IndexError: no such axis")
    assert good.passed


@pytest.mark.vulkan
def test_several_processes_give_the_same_results(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    cases = [c for op in ("ABS", "ADD", "SCALE") for c in OPS[op].cases()]
    with Suite(device, library, ctx) as opened:
        alone = list(opened.run(cases))
    together = list(run_in_processes([c.line for c in cases], 2, device.index, "auto"))
    assert [(r.line, r.passed, r.nmse) for r in together] == [(r.line, r.passed, r.nmse) for r in alone]


def _die(lines: Sequence[str]) -> list[CaseResult]:
    os._exit(3)


@pytest.mark.vulkan
def test_a_process_that_dies_fails_its_cases(device: Device) -> None:
    lines = [c.line for c in OPS["ABS"].cases()]
    results = list(run_in_processes(lines, 2, device.index, "auto", work=_die))
    assert results[0].passed is False
    assert results[0].message == "the process that ran this case or one beside it died"


# -- judging and printing


def test_figures_of_a_verdict() -> None:
    verdict = judge(np.array([[1.0, 2.0], [3.0, 4.1]], np.float32), np.array([[1.0, 2.0], [3.0, 4.0]]), Tolerance(1e-6, 1e-3, ""))
    assert not verdict.ok
    assert verdict.text.endswith("at [1, 1]: 4.1, expected 4; rows with errors: 1 (1 in all)")
    assert (peer_limit("MUL_MAT"), peer_limit("RMS_NORM"), peer_limit("ARGMAX")) == (5e-4, 1e-7, 0.0)


ABOUT = About("Vulkan0", "Example GPU", "example 1.2", "0123456", "2026-01-02T03:04:05Z")
TESTED = CaseResult(
    op="MUL_MAT", line="MUL_MAT(type_a=Q4_K,m=1,seed=7)", mode="test", passed=False, message="[MUL_MAT] it's wrong", detail="y: NMSE 1",
    nmse=float("inf"), worst=1.5, tolerance_nmse=1e-9, tolerance_worst=0.002, peer_limit=5e-4,
)  # fmt: skip
TIMED = CaseResult(
    op="MUL_MAT", line="MUL_MAT(type_a=Q4_K,m=2,seed=7)", mode="perf", time_us=10.0, spread_us=0.1, latency_us=12.0,
    samples_us=(9.9, 10.0, 10.1), nbytes=20_000_000, flops=40_000_000, n_runs=300, read_rate_gb_s=4000.0,
)  # fmt: skip
REFUSED = CaseResult(op="ADD", line="ADD(ne=[1],seed=2)", mode="test", supported=False, message="[ADD] no")


def printed(make: Callable[[StringIO], Printer], *results: CaseResult) -> str:
    out = StringIO()
    printer = make(out)
    for result in results:
        printer.add(result)
    printer.finish()
    return out.getvalue()


def test_console() -> None:
    passed = dataclasses.replace(TESTED, passed=True, message="", line="MUL_MAT(type_a=Q4_K,m=3,seed=7)")
    text = printed(lambda out: Console(out, ABOUT, verbose=True, style=lambda text, colour: text), passed, TESTED, REFUSED)
    assert text.splitlines() == [
        "  MUL_MAT(type_a=Q4_K,m=3,seed=7): OK  y: NMSE 1; llama.cpp allows NMSE 5e-04",
        "[MUL_MAT] it's wrong",
        "  MUL_MAT(type_a=Q4_K,m=1,seed=7): FAIL  y: NMSE 1; llama.cpp allows NMSE 5e-04",
        "  ADD(ne=[1],seed=2): not supported [[ADD] no]",
        "  1/2 tests passed, 1 not supported",
        "",
        "Failing tests:",
        "  MUL_MAT(type_a=Q4_K,m=1,seed=7)",
    ]


def test_perf_line() -> None:
    assert perf_line(TIMED) == (
        "  MUL_MAT(type_a=Q4_K,m=2,seed=7):           300 runs -    10.00 us/run ±1.0 % -  40.00 MFLOP/run -   4.00 TFLOPS - 2000.00 GB/s "
        "(50.0 % of read rate), latency 12.00 us"
    )
    assert perf_line(dataclasses.replace(TIMED, barrier_free_us=11.25)) == perf_line(TIMED) + ", barrier-free 11.25 us"


def test_csv() -> None:
    rows = printed(lambda out: Csv(out, ABOUT), TESTED).splitlines()
    assert rows[0].startswith('"backend_name","op_name","op_params","test_mode","supported","error_message","backend_reg_name","passed",')
    assert rows[1].startswith('"Vulkan0","MUL_MAT","type_a=Q4_K,m=1,seed=7","test","1","[MUL_MAT] it\'s wrong","Vulkan","0",')


def test_sql_can_be_read() -> None:
    db = sqlite3.connect(":memory:")
    db.executescript(printed(lambda out: Sql(out, ABOUT), TESTED, TIMED, REFUSED))
    query = "SELECT op_params, supported, passed, error_message, time_us, bandwidth_gb_s, flops, nmse, seed FROM test_backend_ops"
    assert db.execute(query).fetchall() == [
        ("type_a=Q4_K,m=1,seed=7", 1, 0, "[MUL_MAT] it's wrong", None, None, None, float("inf"), 7.0),
        ("type_a=Q4_K,m=2,seed=7", 1, None, "", 10.0, 2000.0, 4e12, None, 7.0),
        ("ne=[1],seed=2", 0, None, "[ADD] no", None, None, None, None, 2.0),
    ]


def test_json_serves_as_baseline() -> None:
    text = printed(lambda out: Json(out, ABOUT), TIMED)
    assert json.loads(text)[0]["device_description"] == "Example GPU"
    before = samples_by_line(text)
    assert before == {TIMED.line: (9.9, 10.0, 10.1)}
    faster = dataclasses.replace(TIMED, samples_us=(4.9, 5.0, 5.1))
    assert compared(before, faster).startswith(", time -50.0 % against 10.00 us, beats the noise: yes (p = ")
    assert "beats the noise: no" in compared(before, dataclasses.replace(TIMED, samples_us=(9.8, 10.1, 10.3)))
    assert compared({}, TIMED) == ", not in the baseline"


def test_support_table() -> None:
    cases = [
        product_case("Q4_K", 8, 1, 256), product_case("Q8_0", 8, 1, 256),
        make_case("FLASH_ATTN_EXT", {"n_head": 8, "n_head_kv": 2, "hd": 63, "kv": 8, "nb": 1, "y": "F32"}),
    ]  # fmt: skip
    results = list(support_of(cases, H200))
    assert [r.supported for r in results] == [True, True, False]
    lines = support_table(cases, results)
    assert lines[1].split() == ["MUL_MAT", "Q4_K", "1", "of", "1"]
    assert re.match(r"FLASH_ATTN_EXT +0 of +1  not the rest: \[attention\] kqv_out: .* a multiple of 8", lines[3])
    assert lines[-1].startswith("weight types without a kernel: ")


def test_not_reading_a_baseline_says_why(tmp_path: Path) -> None:
    from vkback.cli.test_ops import _against

    file = tmp_path / "old.json"
    file.write_text("{")
    with pytest.raises(VkbackError, match=r"old\.json: not the json of a perf run: "):
        _against(file)
