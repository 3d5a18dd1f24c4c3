"""DELTA_NET and CONV_DELTA_NET (shaders/ssm/delta_net.comp): the gated delta rule, with its state. Many tokens may go in chunks
(delta_chunks.py).

    DELTA_NET       qkv F32 [n, channels] (SSM_CONV), alpha, beta F32 [n, n_head], a, dt_bias F32 [n_head], pos I32 [n],
                    state F32 [slots, n_head, dim, key] -> y F32 [n, inner], state
    CONV_DELTA_NET  qkv F32 [1, channels], alpha, beta, z F32 [1, inner], w F32 [channels * taps], a, dt_bias, norm F32 [dim], pos I32 [1],
                    conv_state F32 [ring, channels], state -> y F32 or Q8_1 [1, inner], conv_state, state: SSM_CONV, DELTA_NET, an RMS norm
                    of each head and SWIGLU with z as the gate, for one token, in one dispatch.
                    packed: qkv, z, alpha and beta are one tensor F32 [1, channels + inner + 2 n_head], in this order.
                    With slots I32 [n] last, for n tokens of as many sequences, whose states are number slots[t] of conv_state
                    [n_slots, ring, channels] and state [n_slots, slots, ...]; the others then have n rows
    params: n_group, tiled [, keep]; CONV_DELTA_NET also eps (of the norm) [, packed, has_slots, has_draws]

inner = n_head * dim, channels = inner + 2 * n_group * key: q and k of n_group heads, v of n_head. Head h shares q and k with the others
of its group: h % n_group where tiled, else h / (n_head / n_group). With q and k of length 1 (q / sqrt(q . q + 1e-6)), q times key^-0.5, of
head h

    S = exp(a softplus(alpha + dt_bias)) S      S = S + sigmoid(beta) (v - S k) k^T      y = S q

Slot p % slots of the state is the state after the token at position p; a batch whose first token has position 0 begins with zeros. `keep`:
the state after each token is stored, not that after the last one alone; of fewer tokens than slots a text can go on from any. The slot that
is read stays as it is when those tokens are run, and of two slots for an odd number, so a single token may run twice. Padding (pos -1)
stands at the end of a batch, gives zeros and changes no state. Source: Gated DeltaNet (arXiv 2412.06464).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from vkback.device import Capabilities
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost, times, total
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, ceil_div, pack_push
from vkback.ops.family import Choice
from vkback.ops.ggml_words import one_of_types, type_word
from vkback.ops.glu import sigmoid
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS, Op, register
from vkback.ops.quantize import Q8_1_TOLERANCE
from vkback.ops.recurrent.delta_chunks import ChunkShape, chunk_shape, lower_chunks
from vkback.ops.recurrent.delta_heads import LENGTH_EPS, Heads
from vkback.ops.recurrent.ssm_conv import (
    check_slots,
    columns_with_drafts,
    convolved,
    drafts_defines,
    in_order,
    kept_defines,
    places_with_drafts,
    positions,
)
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import Defines, power_of_two, reduction
from vkback.shader import Variant

TILE = 16
"""Tokens whose q, k and v lie in shared memory at once."""

KEEPING = "the state after each token is kept"
"""Why chunks, which have the states between them alone, cannot be taken."""


@dataclass(frozen=True)
class ScanShape:
    """How a workgroup shares a head: rows in all, of a thread, and lanes of a row."""

    rows: int
    per_thread: int
    lanes: int

    @property
    def threads(self) -> int:
        return self.rows // self.per_thread * self.lanes


def scan_shape(params: Mapping[str, Any], heads: Heads, caps: Capabilities, *, whole: bool) -> ScanShape:
    """whole: a workgroup has a whole head, and a thread for each four of its rows at least."""
    most = min(caps.max_workgroup_invocations, caps.max_workgroup_size[0])
    # A lane holds four values of a row, so more lanes than that would be idle.
    lanes = min(int(params["lanes"]), 1 << ((heads.key // 4).bit_length() - 1))
    rows = power_of_two(heads.dim) if whole else min(int(params["rows"]), power_of_two(heads.dim))
    per_thread = min(int(params["per_thread"]), rows)
    while rows // per_thread * lanes > most:
        per_thread, lanes = (2 * per_thread, lanes) if per_thread < rows else (per_thread, lanes // 2)
    while whole and per_thread > 4 * lanes:
        per_thread //= 2
    return ScanShape(rows, per_thread, lanes)


def _choice(ctx: LowerContext, heads: Heads, n: int) -> Choice:
    return ctx.tuning.pick("delta_net", n=n, n_head=heads.n, dim=heads.dim, key=heads.key)


def shape_for(node: Node, ctx: LowerContext) -> tuple[ScanShape | ChunkShape, str]:
    """How a DELTA_NET is run by the tables of a context, and why not in chunks where these want them."""
    heads, why = Heads.of(node.outputs[1], node.params), ""
    choice = _choice(ctx, heads, node.outputs[0].shape[0])
    if choice["kernel"] == "chunks":
        chunks = KEEPING if node.params.get("keep") else chunk_shape(choice.params, heads, ctx.caps)
        if isinstance(chunks, ChunkShape):
            return chunks, ""
        why = chunks
    return scan_shape(choice.params, heads, ctx.caps, whole=False), why


def delta_rule(
    qkv: Array, alpha: Array, beta: Array, a: Array, dt_bias: Array, pos: Array, state: Array, n_group: int, tiled: bool, keep: bool
) -> tuple[Array, Array]:
    """y [n, inner] and the states, float64."""
    slots, n_head, dim, key = state.shape
    n, state = len(qkv), np.array(state, np.float64)
    q, k, v = np.split(np.asarray(qkv, np.float64), [n_group * key, 2 * n_group * key], axis=1)
    group = np.arange(n_head) % n_group if tiled else np.arange(n_head) // (n_head // n_group)
    q, k = (part.reshape(n, n_group, key)[:, group] for part in (q, k))
    q, k = (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + LENGTH_EPS) for x in (q, k))
    v = v.reshape(n, n_head, dim)
    decay = np.exp(np.asarray(a, np.float64) * np.logaddexp(0.0, np.asarray(alpha, np.float64) + np.asarray(dt_bias, np.float64)))
    share = sigmoid(np.asarray(beta, np.float64))
    s = state[(pos[0] - 1) % slots].copy() if pos[0] > 0 else np.zeros_like(state[0])
    y = np.zeros((n, n_head, dim))
    for t in np.flatnonzero(pos >= 0):
        s = decay[t][:, None, None] * s
        update = share[t][:, None] * (v[t] - np.einsum("hrk,hk->hr", s, k[t]))
        s = s + update[:, :, None] * k[t][:, None, :]
        y[t] = np.einsum("hrk,hk->hr", s, q[t]) / np.sqrt(key)
        if keep or pos[t] == pos.max():
            state[pos[t] % slots] = s
    return y.reshape(n, n_head * dim), state


F32_TOLERANCE = Tolerance(
    1e-9,
    1e-3,
    "f32: a state of slow decay remembers about a hundred steps, whose exp within 3 + 2|x| ulp may all err alike: "
    "100 * 3 * 2^-24 of a state are 1.8e-5, NMSE 3e-10; sums of unlike signs are that much off their terms, not themselves",
)


class _DeltaNet(Op):
    """What both ops share."""

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return F32_TOLERANCE

    def _heads(self, node: Node, spun_on: tuple[Tensor, ...], state: Tensor) -> Heads:
        """Sizes, once all shapes go together. Raises PlanError."""
        heads, y, n = Heads.of(state, node.params), node.outputs[0], spun_on[0].shape[0]
        if len(spun_on) == 1:
            fits = spun_on[0].shape == (n, heads.width)
        else:
            fits = spun_on[0].shape == (n, heads.channels) and spun_on[1].elements == spun_on[2].elements == n * heads.n
        if not fits or heads.n % heads.n_group or heads.key % 4 or y.elements != n * heads.inner:
            raise PlanError(
                f"[{self.name}] {node.name}: {', '.join(map(str, spun_on[:3]))}, {state}, {heads.n_group} groups to {y}: expected rows of "
                f"{heads.channels} and {heads.n}, heads a multiple of the groups, and a key that is a multiple of 4"
            )
        return heads

    def _dispatch(
        self,
        node: Node,
        ctx: LowerContext,
        spun_on: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        pos: Tensor,
        state: Tensor,
        conv: Tensor | None = None,
        slots: Tensor | None = None,
        draws: Tensor | None = None,
    ) -> Dispatch:
        """spun_on: what products made, in the order of the kernel's bindings. conv: the convolution's state where it is part of the op.
        slots: the tokens' sequences; draws: which of its tokens they are."""
        heads, caps = self._heads(node, spun_on, state), ctx.caps
        keep = bool(node.params.get("keep")) or draws is not None
        y, n, packed = node.outputs[0], spun_on[0].shape[0], len(spun_on) == 1
        if conv is not None and heads.dim % (32 if y.type == "Q8_1" else 4):
            raise PlanError(
                f"[{self.name}] {node.name}: {y}: expected heads of whole quads, for Q8_1 of whole units of 32, got {heads.dim}"
            )
        # A workgroup of CONV_DELTA_NET has one token, however many sequences there are.
        choice = _choice(ctx, heads, n if conv is None else 1)
        shape = scan_shape(choice.params, heads, caps, whole=conv is not None)
        # Tokens of a tile wait in shared memory while the state stays in registers.
        tile = 1 if conv is not None else min(n, TILE)
        while tile > 1 and 4 * tile * (shape.rows + 2 * heads.key + 6) + 8 * shape.threads > caps.max_shared_memory:
            tile //= 2
        reduce, subgroup = reduction(caps, shape.threads, lanes=max(shape.lanes, 8 if y.type == "Q8_1" else 1))
        defines: Defines = {
            **reduce,
            "ROWS": shape.rows,
            "PER_THREAD": shape.per_thread,
            "LANES": shape.lanes,
            "TILE": tile,
            "N_HEAD": heads.n,
            "DIM": heads.dim,
            "KEY": heads.key,
            "N_GROUP": heads.n_group,
            "TILED": int(node.params["tiled"]),
            "CONV": int(conv is not None),
            "PACKED": int(packed),
            "TAPS": weights[0].elements // heads.channels if conv else 1,
            "OUT_Q8_1": int(y.type == "Q8_1"),
            **kept_defines(state, conv, weights[0].elements // heads.channels if conv else 0, keep),
        }
        states = (state,) if conv is None else (state, conv)
        args = [*map(Arg, (*spun_on, *weights, pos)), *(Arg(t, "rw") for t in states), Arg(y, "w")]
        if slots is not None:
            defines["BIND_SLOTS"] = len(args)
            args.append(Arg(slots))
        if draws is not None:
            defines |= drafts_defines(len(args), state)
            args.append(Arg(draws))
        sequences = n if slots else 1
        ring = 4 * sequences * heads.channels * int(defines["TAPS"]) if conv else 0
        return Dispatch(
            kernel=Variant.of("ssm/delta_net.comp", defines, subgroup_size=subgroup),
            args=tuple(args),
            push=pack_push(n, LENGTH_EPS, heads.key**-0.5, float(node.params.get("eps", 0.0))),
            groups=(ceil_div(heads.dim, shape.rows), heads.n, sequences),
            op=node.op,
            label=node.name,
            reason=f"{shape.threads} threads, {shape.lanes} lanes a row, {shape.per_thread} of {shape.rows} rows a thread: {choice.source}",
            nbytes=(1 + (n if keep and not slots else 1)) * sequences * heads.state_bytes
            + ring
            + sum(map(nbytes, (*spun_on, *weights, y))),
            flops=n * heads.inner * (7 * heads.key + 8),
            waits=SpinWaits(part=tuple(t.name for t in spun_on)) if conv is not None and draws is None else None,
        )


@register
class DeltaNet(_DeltaNet):
    """See the module's text."""

    name = "DELTA_NET"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Of an element of the state the decay, the product with k, the update and the product with q; of a value of y difference and
        share; of q and k their lengths; of a head's gates softplus, decay and sigmoid."""
        y, state = node.outputs
        heads, n = Heads.of(state, node.params), y.shape[0]
        per_value: Cost = {"fmul": 4 * heads.key + 1, "fadd": 1}
        per_length: Cost = {"fmul": 2 * heads.key, "fdiv": 1, "sqrt": 1}
        per_gate: Cost = {"fmul": 1, "fadd": 3, "fexp": 4, "fdiv": 1}
        return total((times(per_value, y.elements), times(per_length, 2 * n * heads.n_group), times(per_gate, n * heads.n)))

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Of the state one of its slots."""
        return nbytes(tensor) // (tensor.shape[0] if tensor.kind == "state" else 1)

    def stored_bytes(self, node: Node, n_kv: int) -> int:
        state = node.inputs[-1]
        return nbytes(state) // state.shape[0] * (node.outputs[0].shape[0] if node.params.get("keep") else 1)

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        qkv, alpha, beta, a, dt_bias, pos, state = inputs
        keep = bool(params.get("keep"))
        return list(delta_rule(qkv, alpha, beta, a, dt_bias, pos, state, params["n_group"], params["tiled"], keep))

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        qkv, alpha, beta, a, dt_bias, pos, state = node.inputs
        heads = self._heads(node, (qkv, alpha, beta), state)
        shape, why = shape_for(node, ctx)
        if isinstance(shape, ChunkShape):
            return lower_chunks(node, heads, shape, _choice(ctx, heads, qkv.shape[0]).source)
        scan = self._dispatch(node, ctx, (qkv, alpha, beta), (a, dt_bias), pos, state)
        return [dataclasses.replace(scan, reason=f"{scan.reason}; no chunks: {why}") if why else scan]

    def cases(self) -> Iterator[Case]:
        for n, pos0, padding in ((1, 0, 0), (1, 8, 0), (2, 7, 0), (5, 1, 0), (16, 0, 3), (17, 12, 0), (40, 33, 23), (4, 9, 4)):
            yield self.build_case(n, 3, 8, 16, pos0=pos0, padding=padding)
        yield self.build_case(3, 4, 20, 20, n_group=2, pos0=1)
        yield self.build_case(3, 6, 12, 36, n_group=2, tiled=False, pos0=2)
        yield self.build_case(33, 4, 128, 128, n_group=2, pos0=5, padding=1)
        for n, pos0, padding in ((4, 0, 0), (4, 6, 0), (8, 30, 5), (1, 9, 0)):
            yield self.build_case(n, 4, 20, 16, n_group=2, pos0=pos0, padding=padding, slots=9, keep=True)
        yield self.build_case(40, 4, 20, 16, n_group=2, pos0=3, slots=9)
        # Chunks that end within padding, with the last token, and behind it; rows and keys that no thread's share divides.
        chunks = partial(Case.where, kernel="chunks")
        yield chunks(self.build_case(40, 3, 8, 16, pos0=33, padding=23), chunk=16, rows=16, tokens=1)
        yield chunks(self.build_case(64, 6, 12, 36, n_group=2, tiled=False), chunk=32, rows=16, tokens=2)
        yield chunks(self.build_case(70, 4, 20, 20, n_group=2, pos0=2), chunk=64, rows=8, tokens=4)
        yield chunks(self.build_case(33, 4, 128, 128, n_group=2, pos0=5, padding=1), chunk=32, rows=32, tokens=2)
        yield chunks(self.build_case(17, 4, 20, 16, n_group=2, pos0=4, slots=9), chunk=16, rows=32, tokens=2)

    def full_cases(self) -> Iterator[Case]:
        for n, (n_head, dim, key, n_group, tiled), pos0 in product(
            (1, 2, 15, 64, 512), ((1, 1, 4, 1, True), (4, 12, 8, 4, True), (6, 33, 36, 3, False), (8, 64, 128, 2, True)), (0, 3)
        ):
            yield self.build_case(n, n_head, dim, key, n_group, tiled, pos0, padding=n // 3)
        for n, (n_head, dim, key, n_group, tiled), chunk, (rows, tokens) in product(
            (15, 100), ((4, 12, 8, 4, True), (6, 36, 36, 3, False), (8, 64, 128, 2, True)), (16, 32, 64), ((8, 1), (32, 2), (32, 4))
        ):
            case = self.build_case(n, n_head, dim, key, n_group, tiled, 3, padding=n // 7)
            yield case.where(kernel="chunks", chunk=chunk, rows=rows, tokens=tokens)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(512, 32, 128, 128, n_group=16, pos0=512)

    def build_case(
        self,
        n: int,
        n_head: int,
        dim: int,
        key: int,
        n_group: int = 1,
        tiled: bool = True,
        pos0: int = 0,
        padding: int = 0,
        slots: int = 2,
        keep: bool = False,
        seed: int = 47,
    ) -> Case:
        """Values normal, but for a and dt_bias, which make decays of 0.01 to 0.999. slots: of the state; keep: a token stores its own."""
        check_slots(slots, keep, n)

        def node() -> Node:
            heads = Heads(n_head, dim, key, n_group)
            qkv, alpha, beta, a, dt_bias, pos, state = _inputs(n, heads)
            state = dataclasses.replace(state, shape=(slots, *state.shape[1:]))
            params = {"n_group": n_group, "tiled": tiled} | ({"keep": True} if keep else {})
            return Node(self.name, (qkv, alpha, beta, a, dt_bias, pos, state), (Tensor("y", "F32", (n, heads.inner)), state), params)

        def make(rng: np.random.Generator) -> Problem:
            return Problem(made := node(), _values(made, rng, pos0, padding))

        sizes = {"n": n, "n_head": n_head, "dim": dim, "key": key, "n_group": n_group, "tiled": tiled}
        sizes |= {"pos0": pos0, "padding": padding} | ({"slots": slots, "keep": keep} if slots != 2 else {})
        return Case(self.name, {**sizes, "seed": seed}, make, seed, node)


@register
class ConvDeltaNet(_DeltaNet):
    """SSM_CONV, DELTA_NET and the gated norm of one token; see the module's text."""

    name = "CONV_DELTA_NET"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        if params.get("has_slots"):
            return self._by_sequence(inputs, params)
        *rows, w, a, dt_bias, norm, pos, conv_state, state = inputs
        if params.get("packed"):
            inner, n_head = state.shape[1] * state.shape[2], state.shape[1]
            qkv, z, alpha, beta = np.split(rows[0], np.cumsum([conv_state.shape[1], inner, n_head]), axis=1)
        else:
            qkv, alpha, beta, z = rows
        convolution, conv_state = convolved(qkv, w, None, pos, conv_state)
        y, state = delta_rule(convolution, alpha, beta, a, dt_bias, pos, state, params["n_group"], params["tiled"], False)
        by_head = y.reshape(len(y), -1, state.shape[-2])
        (y,) = OPS["RMS_NORM_MUL"].reference([by_head, norm], {"eps": params["eps"]})
        return [*OPS["SWIGLU"].reference([z, y.reshape(np.shape(z))], {}), conv_state, state]

    def _by_sequence(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        """Token by token, each with the states of its own sequence."""
        draws = inputs[-1] if params.get("has_draws") else None
        *rows, w, a, dt_bias, norm, pos, conv_states, states, slots = inputs if draws is None else inputs[:-1]
        conv_states, states = np.array(conv_states, np.float64), np.array(states, np.float64)
        plain = {key: value for key, value in params.items() if key not in ("has_slots", "has_draws")}
        y = np.zeros((len(slots), states.shape[2] * states.shape[3]))
        for t in in_order(slots, draws):
            slot = slots[t]
            one = [*(x[t : t + 1] for x in rows), w, a, dt_bias, norm, pos[t : t + 1], conv_states[slot], states[slot]]
            y[t : t + 1], conv_states[slot], states[slot] = self.reference(one, plain)
        return [y, conv_states, states]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        if node.outputs[0].type == "Q8_1":
            # As of SWIGLU: the product of two values has wider tails than either. A value is off by half a step at most, 1/254 of the
            # largest of its unit: a normed value of a head of 256 is 16 rms at most, and what it is multiplied by has its own tail. 34 rms
            # were seen.
            return Tolerance(3e-4, 0.2, Q8_1_TOLERANCE.reason)
        return super().tolerance(node, ctx)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        inputs = list(node.inputs)
        draws = inputs.pop() if node.params.get("has_draws") else None
        slots = inputs.pop() if node.params.get("has_slots") else None
        *rows, w, a, dt_bias, norm, pos, conv_state, state = inputs
        if pos.shape != (slots.shape if slots else (1,)):
            raise PlanError(f"[CONV_DELTA_NET] {node.name}: it takes one token, or one of each sequence, got {pos}")
        return [self._dispatch(node, ctx, tuple(rows), (w, a, dt_bias, norm), pos, state, conv_state, slots, draws)]

    def unfused(self, node: Node) -> list[Node]:
        """None with slots, since the plain ops have one sequence, and none of a packed tensor, which several products make."""
        if node.params.get("has_slots") or node.params.get("packed"):
            return []
        qkv, alpha, beta, z, w, a, dt_bias, norm, pos, conv_state, state = node.inputs
        heads, y = Heads.of(state, node.params), node.outputs[0]
        convolution, made = Tensor(f"{node.name}.qkv", "F32", qkv.shape), Tensor(f"{node.name}.y", "F32", (1, heads.inner))
        normed = Tensor(f"{node.name}.normed", "F32", (heads.n, heads.dim))
        params = {key: node.params[key] for key in ("n_group", "tiled")}
        return [
            Node("SSM_CONV", (qkv, w, pos, conv_state), (convolution, conv_state), {"offset": 0}),
            Node("DELTA_NET", (convolution, alpha, beta, a, dt_bias, pos, state), (made, state), params),
            Node("RMS_NORM_MUL", (dataclasses.replace(made, shape=normed.shape), norm), (normed,), {"eps": node.params["eps"]}),
            Node("SWIGLU", (z, dataclasses.replace(normed, shape=z.shape)), (y,)),
        ]

    def cases(self) -> Iterator[Case]:
        for pos in (0, 1, 3, 8, 4095):
            yield self.build_case(3, 8, 16, pos=pos)
        yield self.build_case(4, 20, 20, n_group=2, taps=3, pos=2)
        yield self.build_case(6, 12, 36, n_group=2, tiled=False, pos=5)
        yield self.build_case(4, 128, 128, n_group=2, pos=5)
        yield self.build_case(4, 128, 128, n_group=2, pos=6).where(sync="sentinel")
        yield self.build_case(4, 32, 64, n_group=2, pos=6, out="q8_1")
        yield self.build_case(2, 12, 32, pos=-1)
        yield self.build_case(4, 20, 20, n_group=2, pos=23, kept=9)
        yield self.build_case(4, 64, 64, n_group=2, slots=(2, 0, 3, 1), pos=5)
        yield self.build_case(4, 20, 20, n_group=2, taps=3, slots=(1, 4))
        yield self.build_case(4, 64, 64, n_group=2, slots=(2, 0), pos=1).where(sync="sentinel")
        yield self.build_case(3, 12, 20, packed=True, pos=2)
        yield self.build_case(4, 32, 64, n_group=2, packed=True, pos=6, out="q8_1").where(sync="sentinel")
        yield self.build_case(4, 20, 20, n_group=2, packed=True, slots=(1, 4, 2), pos=3)
        yield self.build_case(4, 20, 20, n_group=2, taps=3, slots=(1, 4, 0), drafts=(3, 0, 2), kept=5, pos=4)
        yield self.build_case(4, 64, 64, n_group=2, packed=True, slots=(2, 0, 3), drafts=(7, 2, 0), kept=9, pos=0, out="q8_1")

    def full_cases(self) -> Iterator[Case]:
        for (n_head, dim, key, n_group, tiled), taps, pos in product(
            ((1, 4, 4, 1, True), (4, 12, 8, 4, True), (6, 36, 36, 3, False), (8, 64, 128, 2, True)), (2, 4), (0, 2, 31)
        ):
            yield self.build_case(n_head, dim, key, n_group, tiled, taps, pos)
        yield self.build_case(8, 256, 128, 4, out="q8_1")

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(32, 128, 128, n_group=16, pos=100)

    def build_case(
        self,
        n_head: int,
        dim: int,
        key: int,
        n_group: int = 1,
        tiled: bool = True,
        taps: int = 4,
        pos: int = 0,
        out: str = "",
        packed: bool = False,
        slots: Shape = (),
        drafts: Shape = (),
        kept: int = 2,
        seed: int = 53,
    ) -> Case:
        """As for DELTA_NET. pos -1: the token is padding. out: q8_1, a quantized output. slots: the sequence of each of several tokens,
        which are at positions pos, pos + 1 ..., and the last a hole where there are more than two. drafts: how many each of these sequences
        has, in columns behind those. kept: slots of a state."""
        check_slots(kept, bool(drafts), max(drafts, default=0) + 1)
        columns, draws = columns_with_drafts(slots, drafts)
        if len(set(slots)) != len(slots) or any(s < 0 for s in slots):
            raise CaseLineError(f"slots={slots}: expected the numbers of different sequences")
        kind = one_of_types(out, ("F32", "Q8_1"), "out") if out else "F32"

        def make(rng: np.random.Generator) -> Problem:
            heads = Heads(n_head, dim, key, n_group)
            n = len(columns) or 1
            qkv, alpha, beta, a, dt_bias, at, state = _inputs(n, heads)
            n_slots = (max(slots) + 1,) if slots else ()
            state = dataclasses.replace(state, shape=(*n_slots, kept, *state.shape[1:]))
            sequences = [Tensor("slots", "I32", (n,), "input")] if slots else []
            sequences += [Tensor("draws", "I32", (n,), "input")] if drafts else []
            z = Tensor("z", "F32", (n, heads.inner), "input")
            w = Tensor("w", "F32", (heads.channels * taps,), "weight")
            norm = Tensor("norm", "F32", (dim,), "weight")
            conv_state = Tensor("conv_state", "F32", (*n_slots, taps + kept - 2, heads.channels), "state")
            outputs = (Tensor("y", kind, (n, heads.inner)), conv_state, state)
            params = {"n_group": n_group, "tiled": tiled, "eps": 1e-6} | ({"has_slots": True} if slots else {})
            params |= ({"packed": True} if packed else {}) | ({"has_draws": True} if drafts else {})
            rows = [Tensor("qkv", "F32", (n, heads.width), "input")] if packed else [qkv, alpha, beta, z]
            node = Node(self.name, (*rows, w, a, dt_bias, norm, at, conv_state, state, *sequences), outputs, params)
            values = _values(node, rng, max(pos, 0), int(pos < 0 or n > 2))
            values |= {"slots": np.array(columns, np.int32)} if slots else {}
            if drafts:
                at_hole = slots[-1] if len(slots) > 2 else None
                values |= {"draws": np.array(draws, np.int32), "pos": places_with_drafts(columns, draws, pos, at_hole)}
            return Problem(node, values)

        params: dict[str, Any] = {"n_head": n_head, "dim": dim, "key": key, "n_group": n_group, "tiled": tiled, "taps": taps, "pos": pos}
        params |= {"out": type_word(kind)} if out else {}
        params |= {"packed": True} if packed else {}
        params |= ({"slots": slots} if slots else {}) | ({"drafts": drafts} if drafts else {}) | ({"kept": kept} if kept != 2 else {})
        return Case(self.name, {**params, "seed": seed}, make, seed)


def _inputs(n: int, heads: Heads) -> tuple[Tensor, ...]:
    """qkv, alpha, beta, a, dt_bias, pos, state."""
    gates = (Tensor(name, "F32", (n, heads.n), "input") for name in ("alpha", "beta"))
    per_head = (Tensor(name, "F32", (heads.n,), "weight") for name in ("a", "dt_bias"))
    state = Tensor("state", "F32", (2, heads.n, heads.dim, heads.key), "state")
    return Tensor("qkv", "F32", (n, heads.channels), "input"), *gates, *per_head, Tensor("pos", "I32", (n,), "input"), state


def _values(node: Node, rng: np.random.Generator, pos0: int, padding: int) -> dict[str, Array]:
    values: dict[str, Array] = {t.name: rng.standard_normal(t.shape, np.float32) for t in node.inputs if t.name not in ("pos", "slots")}
    n_head = values["a"].size
    values["a"] = -np.exp(rng.uniform(0, np.log(16), n_head)).astype(np.float32)
    values["dt_bias"] = np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(0.3), n_head)))).astype(np.float32)
    return values | {"pos": positions(len(values["qkv"]), pos0, padding)}
