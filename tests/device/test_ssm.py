"""SSM_CONV, SSM_SCAN and SHORT_CONV: their references by hand, their kernels on other shapes, and states that outlive a token."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_paths import planned_for, with_params, without_subgroups

from vkback.device import Device
from vkback.evaluate.judge import nmse
from vkback.graph import Node, Tensor
from vkback.harness.runner import run_case, run_problem
from vkback.ops.case import Case, Problem
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary

SCANS = [c for name in ("SSM_SCAN", "SSM_CONV_SCAN") for c in OPS[name].cases()]


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
    outcome = run_case(device, library, case, with_params(ctx, lanes=lanes, rows=rows))
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
@pytest.mark.parametrize("name", ["SSM_CONV", "SHORT_CONV", "SSM_SCAN", "SSM_CONV_SCAN"])
def test_position_0_reads_no_state(name: str, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """What another sequence, or fresh memory, left in the states is never seen: not even as NaN times zero."""
    op = OPS[name]
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
@pytest.mark.parametrize("cut", [1, 7, 16])
def test_a_sequence_in_pieces(cut: int, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """20 tokens at once, and in two batches, the first with padding at its end: the same outputs and the same state."""
    op = OPS["SSM_SCAN"]
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


def test_sizes_that_are_refused() -> None:
    ctx = planned_for("nvidia_h200_linux")
    scan = OPS["SSM_SCAN"].build_case(1, 3, 8, 6).build().node
    with pytest.raises(PlanError, match="a d_state that is a multiple of 4"):
        OPS["SSM_SCAN"].lower(scan, ctx)
    conv = OPS["SSM_CONV"].build_case(1, 32).build().node
    with pytest.raises(PlanError, match="as many channels in a row of x"):
        OPS["SSM_CONV"].lower(Node(conv.op, conv.inputs, conv.outputs, {"offset": 30}), ctx)
