"""SSM_CONV, SSM_SCAN and SHORT_CONV: their references by hand, their kernels on other shapes, and states that outlive a token."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for, with_params, without_subgroups

from vkback.device import Device
from vkback.evaluate.judge import nmse
from vkback.graph import Node, Tensor
from vkback.harness.runner import run_case, run_problem
from vkback.ops.case import Case, Problem
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.plan.exact import exact_context
from vkback.shader import ShaderLibrary

SCANS = [c for name in ("SSM_SCAN", "SSM_CONV_SCAN") for c in OPS[name].cases() if "tuning" not in c.params]

SCAN: dict[str, Any] = {"kernel": "scan"}
CHUNKS: dict[str, Any] = {"kernel": "chunks", "chunk": 16, "rows": 8, "columns": 16, "tokens": 1}


def test_the_convolution_by_hand() -> None:
    """Two channels, three taps; the token at position 4 needs positions 2 and 3, which the ring keeps in rows 2 and 0."""
    x, w = np.array([[9.0, 1.0, 2.0, 9.0]]), np.array([1.0, 10.0, 100.0, 2.0, 20.0, 200.0])
    state = np.array([[3.0, 4.0], [np.nan, np.nan], [5.0, 6.0]])
    y, after = OPS["SSM_CONV"].reference([x, w, np.array([4]), state], {"offset": 1})
    sums = np.array([5.0 + 30.0 + 100.0, 12.0 + 80.0 + 400.0])
    np.testing.assert_allclose(y, [sums / (1 + np.exp(-sums))])
    assert after.tolist() == [[3.0, 4.0], [1.0, 2.0], [5.0, 6.0]]


def test_a_sequence_begins_without_a_past() -> None:
    """At position 1 the state holds one input that counts, whatever else lies there."""
    state = np.full((3, 1), np.nan)
    state[0] = 7.0
    y, _ = OPS["SSM_CONV"].reference([np.array([[2.0]]), np.array([1.0, 1.0, 1.0]), np.array([1]), state], {"offset": 0})
    np.testing.assert_allclose(y, [[9.0 / (1 + np.exp(-9.0))]])


def test_the_recurrence_by_hand() -> None:
    """One head of two rows, a state of four; two tokens from position 3 on, then padding."""
    x, b, c = np.array([1.0, -2.0]), np.array([1.0, 0.0, 2.0, 0.0]), np.array([3.0, 1.0, 1.0, 1.0])
    xbc = np.tile(np.concatenate([x, b, c]), (3, 1))
    z, dt = np.array([0.5, 4.0]), 0.3
    zx = np.tile(np.concatenate([z, np.full(10, np.nan), [dt]]), (3, 1))
    a, d, dt_bias = np.array([-2.0]), np.array([0.25]), np.array([-1.0])
    state = np.full((2, 1, 2, 4), np.nan)
    state[0] = [[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 1.0]]
    y, after = OPS["SSM_SCAN"].reference([xbc, zx, a, d, dt_bias, np.array([3, 4, -1]), state], {"n_group": 1})
    step = np.log1p(np.exp(dt - 1.0))
    h = state[0, 0]
    for token in range(2):
        h = np.exp(-2.0 * step) * h + step * np.outer(x, b)
        np.testing.assert_allclose(y[token], (h @ c + 0.25 * x) * z / (1 + np.exp(-z)))
    np.testing.assert_allclose(after[0, 0], h)
    assert not y[2].any() and np.isnan(after[1]).all(), "position 4 is in slot 0; slot 1 is left alone"


@pytest.mark.vulkan
@pytest.mark.parametrize("case", SCANS, ids=lambda c: c.line)
@pytest.mark.parametrize(("lanes", "rows"), [(1, 1), (4, 16), (32, 2)])
def test_other_shapes(case: Case, lanes: int, rows: int, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, with_params(ctx, kernel="scan", lanes=lanes, rows=rows))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize("case", SCANS[-4:], ids=lambda c: c.line)
def test_without_subgroups(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, without_subgroups(with_params(ctx, lanes=8, rows=4)))
    assert outcome.ok, outcome.text


def with_void(problem: Problem, *names: str) -> Problem:
    """The same with NaN in these tensors."""
    return Problem(problem.node, problem.values | {name: np.full_like(problem.values[name], np.nan) for name in names})


def test_the_short_convolution_by_hand() -> None:
    """One channel, three taps, two tokens at positions 4 and 5: B x of position 3 is in row 0 of the ring, of position 2 in row 2."""
    bcx, w = np.array([[2.0, 10.0, 3.0], [1.0, -1.0, 7.0]]), np.array([1.0, 10.0, 100.0])
    y, after = OPS["SHORT_CONV"].reference([bcx, w, np.array([4, 5]), np.array([[4.0], [np.nan], [5.0]])], {})
    assert y.tolist() == [[10.0 * (5.0 + 40.0 + 600.0)], [-1.0 * (4.0 + 60.0 + 700.0)]]
    assert after.tolist() == [[4.0], [6.0], [7.0]]


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("name", "params"), [("SSM_CONV", {}), ("SHORT_CONV", {}), ("SSM_SCAN", SCAN), ("SSM_SCAN", CHUNKS), ("SSM_CONV_SCAN", {})]
)
def test_position_0_reads_no_state(name: str, params: dict[str, Any], device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """What another sequence, or fresh memory, left in the states is never seen: not even as NaN times zero."""
    op, ctx = OPS[name], with_params(ctx, **params)
    case = (
        op.build_case(3, 8, 16, pos=0)
        if name == "SSM_CONV_SCAN"
        else op.build_case(5, *((64,) if name in ("SSM_CONV", "SHORT_CONV") else (3, 8, 16)))
    )
    problem = case.build()
    states = [t.name for t in problem.node.inputs if t.kind == "state"]
    y = problem.node.outputs[0].name
    want = run_problem(device, library, problem, ctx)[y]
    assert np.array_equal(run_problem(device, library, with_void(problem, *states), ctx)[y], want)


@pytest.mark.vulkan
def test_one_token_runs_twice_with_the_same_result(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    problem = OPS["SSM_CONV_SCAN"].build_case(4, 20, 20, n_group=2, pos=6).build()
    first = run_problem(device, library, problem, ctx)
    again = run_problem(device, library, Problem(problem.node, problem.values | {n: first[n] for n in ("state", "conv_state")}), ctx)
    assert all(np.array_equal(first[n], again[n]) for n in first)


@pytest.mark.vulkan
@pytest.mark.parametrize("params", [SCAN, CHUNKS], ids=["scan", "chunks"])
@pytest.mark.parametrize("cut", [1, 7, 16])
def test_a_sequence_in_pieces(cut: int, params: dict[str, Any], device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """20 tokens at once, and in two batches, the first with padding at its end: the same outputs and the same state. Chunks of both begin
    at other tokens, so their sums differ in the last bits: 2^-24 of a value is an NMSE of 4e-15."""
    op, ctx = OPS["SSM_SCAN"], with_params(ctx, **params)
    whole = op.build_case(20, 3, 8, 16).build()
    want = run_problem(device, library, whole, ctx)
    outputs, state = [], whole.values["state"]
    for first, last, padding in ((0, cut, 3), (cut, 20, 0)):
        rows = {n: whole.values[n][first:last] for n in ("xbc", "zx")}
        values = {n: np.concatenate([v, np.zeros((padding, v.shape[1]), np.float32)]) for n, v in rows.items()}
        pos = np.concatenate([np.arange(first, last), np.full(padding, -1)]).astype(np.int32)
        shapes = {**{n: v.shape for n, v in values.items()}, "pos": pos.shape, "y": (pos.size, 24)}
        node = whole.node

        def resized(tensors: tuple[Tensor, ...], shapes: dict[str, tuple[int, ...]] = shapes) -> tuple[Tensor, ...]:
            return tuple(Tensor(t.name, t.type, shapes.get(t.name, t.shape), t.kind) for t in tensors)

        cut_node = Node(node.op, resized(node.inputs), resized(node.outputs), node.params)
        piece = Problem(cut_node, whole.values | values | {"pos": pos, "state": state})
        got = run_problem(device, library, piece, ctx)
        state = got["state"]
        outputs.append(got["y"][: last - first])
    assert nmse(np.concatenate(outputs), want["y"]) < 1e-13
    assert nmse(state[1], want["state"][1]) < 1e-13


@pytest.mark.vulkan
def test_strong_and_weak_decays_in_one_chunk(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Steps of 100 and 0.001 in turns of 16 tokens: what the strong ones leave is 0, the weak ones forget next to nothing.

    Logarithms of the decays sum to -10000, so that a difference of two sums in f32 would be off by 1e-3, an NMSE of 1e-6; products of 64
    decays are off by 64 * 2^-23 at most, an NMSE of 6e-11, and by less where errors do not add up."""
    problem = OPS["SSM_SCAN"].build_case(128, 4, 16, 16, pos0=3).build()
    zx = problem.values["zx"].copy()
    zx[:, -4:] = np.where(np.arange(128) // 16 % 2 == 0, 100.0, -7.0)[:, None] - problem.values["dt_bias"]
    problem = Problem(problem.node, problem.values | {"zx": zx})
    params = {"kernel": "chunks", "chunk": 64, "rows": 16, "columns": 16, "tokens": 4}
    got = run_problem(device, library, problem, with_params(ctx, **params))
    inputs = [problem.values[t.name] for t in problem.node.inputs]
    want = dict(zip(("y", "state"), OPS["SSM_SCAN"].reference(inputs, problem.node.params), strict=True))
    weak = np.arange(128) // 16 % 2 == 1
    assert nmse(got["y"], want["y"]) < 1e-11 and nmse(got["y"][weak], want["y"][weak]) < 1e-11 and nmse(got["state"], want["state"]) < 1e-11


def test_chunks_are_taken_where_they_fit() -> None:
    """Else the scan, whose reason says why."""
    wanted = {"kernel": "chunks", "chunk": 64, "rows": 64, "columns": 64, "tokens": 4}
    h200 = with_params(planned_for("nvidia_h200_linux"), **wanted)
    op = OPS["SSM_SCAN"]

    def lowered(case: Case, ctx: LowerContext = h200) -> list[Dispatch]:
        return op.lower(case.build().node, ctx)

    def limited(**caps: Any) -> LowerContext:
        return dataclasses.replace(h200, caps=dataclasses.replace(h200.caps, **caps))

    large = op.build_case(130, 16, 64, 128, n_group=2)
    made = lowered(large)
    assert [d.kernel.source for d in made] == [f"ssm/scan_chunk_{part}.comp" for part in ("products", "states", "output")]
    assert [d.groups for d in made] == [(3, 2, 1), (2, 16, 1), (1, 16, 3)]
    assert not made[1].reads & made[0].writes, "the first two are of one stage"
    assert made[2].reads >= made[0].writes and "64 rows" in made[2].reason
    assert [d.groups for d in lowered(large, limited(max_shared_memory=32 << 10))] == [(3, 2, 1), (4, 16, 1), (2, 16, 3)], "half the rows"
    assert dict(lowered(op.build_case(130, 16, 64, 128, slots=9))[1].kernel.defines)["SLOTS"] == 9
    for case, ctx, why in (
        (large, limited(max_workgroup_invocations=128), "they need 256 threads"),
        (large, limited(max_shared_memory=9 << 10), r"they need \d+ bytes of shared memory"),
        (op.build_case(64, 4, 6, 8), h200, "heads of 6 are not whole quads"),
        (op.build_case(64, 4, 4, 8), with_params(h200, **{**wanted, "tokens": 1}), ""),
        (op.build_case(8, 4, 64, 128, slots=9, keep=True), h200, "the state after each token is kept"),
    ):
        first = lowered(case, ctx)[0]
        if not why:
            assert first.kernel.source == "ssm/scan_chunk_products.comp"
        else:
            assert first.kernel.source == "ssm/scan.comp" and re.search(f"; no chunks: .*{why}$", first.reason), first.reason
    (scan,) = lowered(large, exact_context(h200))
    assert scan.kernel.source == "ssm/scan.comp" and "no chunks" not in scan.reason
    plain = planned_for("nvidia_h200_linux")
    assert [d.kernel.source for d in lowered(large, plain)] == [d.kernel.source for d in made], "on where a GPU has timed it"
    (scan,) = lowered(op.build_case(32, 16, 64, 128, n_group=2), plain)
    assert scan.kernel.source == "ssm/scan.comp", "too few tokens"


def test_sizes_that_are_refused() -> None:
    ctx = planned_for("nvidia_h200_linux")
    scan = OPS["SSM_SCAN"].build_case(1, 3, 8, 6).build().node
    with pytest.raises(PlanError, match="a d_state that is a multiple of 4"):
        OPS["SSM_SCAN"].lower(scan, ctx)
    conv = OPS["SSM_CONV"].build_case(1, 32).build().node
    with pytest.raises(PlanError, match="as many channels in a row of x"):
        OPS["SSM_CONV"].lower(Node(conv.op, conv.inputs, conv.outputs, {"offset": 30}), ctx)
