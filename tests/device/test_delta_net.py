"""DELTA_NET and CONV_DELTA_NET: the reference by hand, their kernels on other shapes, and states that outlive a token."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for, with_params, without_subgroups
from test_ssm import with_void

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

CASES = [
    c
    for name in ("DELTA_NET", "CONV_DELTA_NET")
    for c in OPS[name].cases()
    if (c.params["key"] in (20, 36) or "out" in c.params) and "tuning" not in c.params
]
"""Sizes that no power of two divides, heads in either order, a quantized output, slots."""

SCAN: dict[str, Any] = {"kernel": "scan"}
CHUNKS: dict[str, Any] = {"kernel": "chunks", "chunk": 16, "rows": 8, "tokens": 1}


def test_the_delta_rule_by_hand() -> None:
    """One head of two rows, keys of four; two tokens from position 3 on, then padding. What k finds is replaced by a share of v."""
    q, k, v = np.array([1.0, 2.0, 0.0, 2.0]), np.array([0.0, 3.0, 4.0, 0.0]), np.array([1.0, -2.0])
    qkv = np.tile(np.concatenate([q, k, v]), (3, 1))
    alpha, beta, a, dt_bias = np.full((3, 1), 0.3), np.full((3, 1), 0.5), np.array([-2.0]), np.array([-1.0])
    state = np.full((2, 1, 2, 4), np.nan)
    state[0] = [[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 1.0]]
    inputs = [qkv, alpha, beta, a, dt_bias, np.array([3, 4, -1]), state]
    y, after = OPS["DELTA_NET"].reference(inputs, {"n_group": 1, "tiled": True})
    s, share, decay = state[0, 0], 1 / (1 + np.exp(-0.5)), np.exp(-2.0 * np.log1p(np.exp(0.3 - 1.0)))
    for token in range(2):
        s = decay * s
        s = s + share * np.outer(v - s @ (k / 5.0), k / 5.0)
        np.testing.assert_allclose(y[token], s @ (q / 3.0) / 2.0, rtol=1e-6)
    np.testing.assert_allclose(after[0, 0], s, rtol=1e-6)
    assert not y[2].any() and np.isnan(after[1]).all(), "position 4 is in slot 0; slot 1 is left alone"


@pytest.mark.parametrize(("tiled", "group"), [(True, [0, 1, 0, 1]), (False, [0, 0, 1, 1])])
def test_which_heads_share_keys(tiled: bool, group: list[int]) -> None:
    qkv = np.concatenate([np.eye(4)[:2].ravel(), np.eye(4)[:2].ravel(), np.ones(4)])[None]
    half = np.zeros((1, 4))
    inputs = [qkv, half, half, np.full(4, -1.0), np.zeros(4), np.array([0]), np.zeros((2, 4, 1, 4))]
    _, state = OPS["DELTA_NET"].reference(inputs, {"n_group": 2, "tiled": tiled})
    assert state[0, :, 0].argmax(axis=-1).tolist() == group


@pytest.mark.vulkan
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.line)
@pytest.mark.parametrize(("lanes", "rows", "per_thread"), [(1, 1, 1), (4, 16, 8), (32, 2, 2)])
def test_other_shapes(
    case: Case, lanes: int, rows: int, per_thread: int, device: Device, library: ShaderLibrary, ctx: LowerContext
) -> None:
    outcome = run_case(device, library, case, with_params(ctx, lanes=lanes, rows=rows, per_thread=per_thread))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize("case", CASES[::2], ids=lambda c: c.line)
def test_without_subgroups(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, without_subgroups(with_params(ctx, lanes=8, rows=4, per_thread=2)))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize(("name", "params"), [("DELTA_NET", SCAN), ("DELTA_NET", CHUNKS), ("CONV_DELTA_NET", {})])
def test_position_0_reads_no_state(name: str, params: dict[str, Any], device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """What another sequence, or fresh memory, left in the states is never seen: not even as NaN times zero."""
    op, ctx = OPS[name], with_params(ctx, **params)
    problem = (op.build_case(5, 3, 8, 16) if name == "DELTA_NET" else op.build_case(3, 8, 16, pos=0)).build()
    states = [t.name for t in problem.node.inputs if t.kind == "state"]
    y = problem.node.outputs[0].name
    want = run_problem(device, library, problem, ctx)[y]
    assert np.array_equal(run_problem(device, library, with_void(problem, *states), ctx)[y], want)


@pytest.mark.vulkan
def test_one_token_runs_twice_with_the_same_result(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    problem = OPS["CONV_DELTA_NET"].build_case(4, 20, 20, n_group=2, pos=6).build()
    first = run_problem(device, library, problem, ctx)
    again = run_problem(device, library, Problem(problem.node, problem.values | {n: first[n] for n in ("state", "conv_state")}), ctx)
    assert all(np.array_equal(first[n], again[n]) for n in first)


@pytest.mark.vulkan
@pytest.mark.parametrize("params", [SCAN, CHUNKS], ids=["scan", "chunks"])
@pytest.mark.parametrize("cut", [1, 7, 16])
def test_a_sequence_in_pieces(cut: int, params: dict[str, Any], device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """20 tokens at once, and in two batches, the first with padding at its end: the same outputs and the same state."""
    whole, ctx = OPS["DELTA_NET"].build_case(20, 3, 8, 16).build(), with_params(ctx, **params)
    want = run_problem(device, library, whole, ctx)
    outputs, state = [], whole.values["state"]
    for first, last, padding in ((0, cut, 3), (cut, 20, 0)):
        rows = {n: whole.values[n][first:last] for n in ("qkv", "alpha", "beta")}
        values = {n: np.concatenate([v, np.zeros((padding, v.shape[1]), np.float32)]) for n, v in rows.items()}
        pos = np.concatenate([np.arange(first, last), np.full(padding, -1)]).astype(np.int32)
        shapes = {**{n: v.shape for n, v in values.items()}, "pos": pos.shape, "y": (pos.size, 24)}
        node = whole.node
        ins, outs = (tuple(Tensor(t.name, t.type, shapes.get(t.name, t.shape), t.kind) for t in ts) for ts in (node.inputs, node.outputs))
        piece = Problem(Node(node.op, ins, outs, node.params), whole.values | values | {"pos": pos, "state": state})
        got = run_problem(device, library, piece, ctx)
        state = got["state"]
        outputs.append(got["y"][: last - first])
    assert nmse(np.concatenate(outputs), want["y"]) < 1e-13
    assert nmse(state[1], want["state"][1]) < 1e-13


def test_chunks_are_taken_where_they_fit() -> None:
    """Else the scan, whose reason says why."""
    h200 = with_params(planned_for("nvidia_h200_linux"), kernel="chunks", chunk=32, rows=32, tokens=2)

    def lowered(case: Case, ctx: LowerContext = h200) -> list[Dispatch]:
        return OPS["DELTA_NET"].lower(case.node(), ctx)

    def limited(**caps: Any) -> LowerContext:
        return dataclasses.replace(h200, caps=dataclasses.replace(h200.caps, **caps))

    op = OPS["DELTA_NET"]
    large = op.build_case(64, 32, 128, 128, n_group=16)
    ut, state = lowered(large)
    assert (ut.kernel.source, ut.groups) == ("ssm/delta_chunk_ut.comp", (2, 32, 1))
    assert (state.kernel.source, state.groups) == ("ssm/delta_chunk_state.comp", (4, 32, 1))
    assert "chunks of 32 tokens, 128 threads, 2 tokens a thread, 32 rows" in state.reason
    assert [d.groups for d in lowered(large, limited(max_shared_memory=24 << 10))] == [(2, 32, 1), (8, 32, 1)], "half the rows"
    assert dict(lowered(op.build_case(64, 4, 128, 128, slots=9))[1].kernel.defines)["SLOTS"] == 9
    for case, ctx, why in (
        (large, limited(max_workgroup_invocations=64), "they need 128 threads"),
        (large, limited(max_workgroup_size=(64, 64, 64)), "they need 128 threads"),
        (large, limited(max_shared_memory=9 << 10), r"they need \d+ bytes of shared memory"),
        (op.build_case(64, 4, 6, 8), h200, "heads of 6 are not whole quads"),
        (op.build_case(8, 4, 128, 128, slots=9, keep=True), h200, "the state after each token is kept"),
        (op.build_case(64, 2, 32, 1024), limited(max_shared_memory=227 << 10), "a thread would hold more than 64 values of the state"),
    ):
        (scan,) = lowered(case, ctx)
        assert scan.kernel.source == "ssm/delta_net.comp" and re.search(f"; no chunks: .*{why}$", scan.reason), scan.reason
    (scan,) = lowered(large, exact_context(h200))
    assert scan.kernel.source == "ssm/delta_net.comp" and "no chunks" not in scan.reason


def test_sizes_that_are_refused() -> None:
    ctx = planned_for("nvidia_h200_linux")
    node = OPS["DELTA_NET"].build_case(1, 3, 8, 6).build().node
    with pytest.raises(PlanError, match="a key that is a multiple of 4"):
        OPS["DELTA_NET"].lower(node, ctx)
    for dim, out, want in ((6, "", "whole quads"), (16, "q8_1", "whole units of 32, got 16")):
        node = OPS["CONV_DELTA_NET"].build_case(2, dim, 8, out=out).build().node
        with pytest.raises(PlanError, match=want):
            OPS["CONV_DELTA_NET"].lower(node, ctx)
    node = OPS["CONV_DELTA_NET"].build_case(2, 8, 8, slots=(0, 1)).build().node
    with pytest.raises(PlanError, match="one token, or one of each sequence"):
        OPS["CONV_DELTA_NET"].lower(Node(node.op, node.inputs[:-1], node.outputs, {**node.params, "has_slots": False}), ctx)
