"""SSM_CONV and SSM_SCAN as ggml has them: several sequences at once, whose past comes with them (shaders/ssm/*_sequences.comp).

What models run here are the forms of ssm_conv and ssm_scan, which keep their state on the device by position. A node of this form says so
in its param `sequences`.

    SSM_CONV  x [sequences, channels, tokens + taps - 1], w [channels, taps] -> y [sequences, tokens, channels]
    SSM_SCAN  s [sequences, heads, dim, n_state], x [sequences, tokens, heads, dim], dt [sequences, tokens, heads], a [heads, 1 or n_state],
              b and c [sequences, tokens, groups, n_state] -> y as x, and the states after the last token; with `snapshots` K above 1
              [K, ...], the states after the last K tokens, the newest first
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.general import bytes_moved, is_general, lower_general
from vkback.ops.ggml_words import ne_of, one_of_types, shape_of, sized
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.ops.view import View

TOLERANCE = Tolerance(1e-10, 1e-4, "f32: up to 300 tokens of a recurrence, sums of up to 256 products, exp within 3 + 2|x| ulp")


def convolved(x: Array, w: Array) -> Array:
    """Reference of SSM_CONV."""
    taps = w.shape[-1]
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(x, np.float64), taps, axis=-1)
    y: Array = np.einsum("sctj,cj->stc", windows, np.asarray(w, np.float64))
    return y


def scanned(inputs: Sequence[Array], snapshots: int = 1) -> list[Array]:
    """Reference of SSM_SCAN."""
    s, x, dt, a, b, c = (np.asarray(i, np.float64) for i in inputs)
    share = x.shape[2] // b.shape[2]
    states, ys = [s], []
    for t in range(x.shape[1]):
        step = np.logaddexp(0.0, dt[:, t])[..., None, None]
        own_b, own_c = (np.repeat(v[:, t], share, axis=1)[:, :, None] for v in (b, c))
        states.append(states[-1] * np.exp(step * a[:, None]) + own_b * x[:, t][..., None] * step)
        ys.append((states[-1] * own_c).sum(axis=-1))
    after = np.stack(states[: -1 - snapshots : -1])
    return [np.stack(ys, axis=1), after if snapshots > 1 else after[0]]


def lower(node: Node, ctx: LowerContext) -> list[Dispatch]:
    """One launch, after copies of what is a view."""
    if is_general(node):
        return lower_general(OPS[node.op], node, ctx)
    if node.op == "SSM_CONV":
        x, w = node.inputs
        sequences, tokens, channels = node.outputs[0].shape
        file, threads = "conv_sequences", sequences * tokens * channels
        push: tuple[int, ...] = (sequences, tokens, channels, w.shape[-1])
    else:
        s, x, _, a, b, _ = node.inputs
        sequences, heads, dim, n_state = s.shape
        file, threads = "scan_sequences", sequences * heads * dim
        push = (sequences, x.shape[1], heads, dim, n_state, b.shape[2], a.shape[-1], node.params.get("snapshots", 1))
    last = node.outputs[-1]
    return [
        by_threads(
            node,
            ctx,
            f"ssm/{file}.comp",
            (*map(Arg, node.inputs), *(Arg(t, "rw" if t is last and node.op == "SSM_SCAN" else "w") for t in node.outputs)),
            push,
            threads,
            moved=bytes_moved(*node.inputs, *node.outputs),
        )
    ]


def conv_case(type: str = "f32", ne_a: Shape = (4, 1536, 1, 1), ne_b: Shape = (4, 1536, 1, 1), seed: int = 31) -> Case:
    """ne_a: tokens and the past that the taps reach, channels, sequences; ne_b: taps, channels."""
    one_of_types(type, ("F32",))
    outer, sequences, channels, length = shape_of(ne_a, "ne_a")
    *ones, of_w, taps = shape_of(ne_b, "ne_b")
    if outer != 1 or ones != [1, 1] or of_w != channels or length < taps:
        raise CaseLineError("SSM_CONV: expected ne_a=[tokens + taps - 1, channels, sequences] and ne_b=[taps, channels]")

    def make(rng: np.random.Generator) -> Problem:
        inputs = (Tensor("x", "F32", (sequences, channels, length), "input"), Tensor("w", "F32", (channels, taps), "input"))
        y = Tensor("y", "F32", (sequences, length - taps + 1, channels))
        values: dict[str, Array] = {t.name: rng.standard_normal(t.shape, np.float32) for t in inputs}
        return Problem(Node("SSM_CONV", inputs, (y,), {"sequences": True}), values)

    shown = {"type": type.lower(), "ne_a": ne_of((sequences, channels, length)), "ne_b": ne_of((channels, taps)), "seed": seed}
    return Case("SSM_CONV", shown, make, seed)


def scan_case(
    type: str = "f32",
    d_state: int = 32,
    head_dim: int = 1,
    n_head: int = 32,
    n_group: int = 1,
    n_seq_tokens: int = 32,
    n_seqs: int = 32,
    xbc_overlap: int = 0,
    K: int = 1,  # noqa: N803
    weak_decay: int = 0,
    seed: int = 37,
) -> Case:
    """xbc_overlap: x, b and c are views of one tensor; K: states that are kept.

    Values normal, a in -16..-1, with weak_decay in -0.01..-0.001; of heads of one value a has one for each state, as Mamba-1 has.
    """
    one_of_types(type, ("F32",))
    if min(d_state, head_dim, n_head, n_group, n_seq_tokens, n_seqs, K) < 1 or n_head % n_group:
        raise CaseLineError("SSM_SCAN: expected all sizes from 1, and heads that are a multiple of the groups")
    if xbc_overlap not in (0, 1) or weak_decay not in (0, 1):
        raise CaseLineError(f"SSM_SCAN: xbc_overlap={xbc_overlap}, weak_decay={weak_decay}: expected 0 or 1")
    if xbc_overlap and head_dim > d_state:
        raise CaseLineError(f"SSM_SCAN: xbc_overlap=1, head_dim={head_dim}: expected at most d_state={d_state}, a row of the shared tensor")
    if n_seq_tokens < K:
        raise PlanError(f"K={K} with n_seq_tokens={n_seq_tokens}: states are kept of tokens that there are")
    states = (n_seqs, n_head, head_dim, d_state)
    sized((K, *states))
    tokens = (n_seqs, n_seq_tokens)
    sized((*tokens, n_head, max(head_dim, d_state)))

    def make(rng: np.random.Generator) -> Problem:
        shapes: dict[str, Shape] = {
            "s": states,
            "x": (*tokens, n_head, head_dim),
            "dt": (*tokens, n_head),
            "a": (n_head, d_state if head_dim == 1 else 1),
            "b": (*tokens, n_group, d_state),
            "c": (*tokens, n_group, d_state),
        }
        tensors = {name: Tensor(name, "F32", shape, "input") for name, shape in shapes.items()}
        views: dict[int, View] = {}
        if xbc_overlap:
            both = (2 * n_seqs, n_seq_tokens, n_head, d_state)
            at, half = View.whole(both).strides, n_seqs * n_seq_tokens * n_head * d_state
            views = {1: View(0, shapes["x"], at), 4: View(half, shapes["b"], at), 5: View(half - d_state, shapes["c"], at)}
            tensors |= dict.fromkeys("xbc", Tensor("xbc", "F32", both, "input"))
        inputs = tuple(tensors[name] for name in shapes)
        values: dict[str, Array] = {t.name: rng.standard_normal(t.shape, np.float32) for t in dict.fromkeys(inputs)}
        values["a"] = -rng.uniform(*((0.001, 0.01) if weak_decay else (1.0, 16.0)), shapes["a"]).astype(np.float32)
        outputs = Tensor("y", "F32", shapes["x"]), Tensor("after", "F32", (K, *states) if K > 1 else states)
        params = {"sequences": True} | ({"snapshots": K} if K > 1 else {}) | ({"views": views} if views else {})
        return Problem(Node("SSM_SCAN", inputs, outputs, params), values)

    shown: dict[str, Any] = {
        "type": type.lower(),
        "d_state": d_state,
        "head_dim": head_dim,
        "n_head": n_head,
        "n_group": n_group,
        "n_seq_tokens": n_seq_tokens,
        "n_seqs": n_seqs,
        "xbc_overlap": xbc_overlap,
        "K": K,
        "weak_decay": weak_decay,
        "seed": seed,
    }
    return Case("SSM_SCAN", shown, make, seed)


def conv_cases() -> Iterator[Case]:
    for ne_a, taps in (((3, 40, 1), 3), ((12, 33, 4), 4), ((17, 40, 2), 9)):
        yield conv_case(ne_a=ne_a, ne_b=(taps, ne_a[1]))


def scan_cases() -> Iterator[Case]:
    yield scan_case(d_state=16, head_dim=1, n_head=40, n_seq_tokens=5, n_seqs=2)
    yield scan_case(d_state=33, head_dim=8, n_head=6, n_group=2, n_seq_tokens=7, n_seqs=3, K=3, weak_decay=1)
    yield scan_case(d_state=16, head_dim=8, n_head=4, n_group=2, n_seq_tokens=5, n_seqs=2, xbc_overlap=1)
