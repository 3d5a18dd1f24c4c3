"""SSM_SCAN and SSM_CONV_SCAN (shaders/ssm/scan.comp): the recurrence of Mamba-2, gated, with its state. Many tokens may go in chunks
(scan_chunks.py).

    SSM_SCAN       xbc F32 [n, channels] (SSM_CONV), zx F32 [n, inner + channels + n_head], a, d, dt_bias F32 [n_head], pos I32 [n],
                   state F32 [slots, n_head, head_dim, d_state] -> y F32 [n, inner], state
    SSM_CONV_SCAN  zx F32 [1, ...], w F32 [channels * taps] [, bias F32 [channels]], a, d, dt_bias, pos I32 [1],
                   conv_state F32 [ring, channels], state -> y, conv_state, state: both ops for one token, in one dispatch.
                   With slots I32 [n] last, for n tokens of as many sequences, whose states are number slots[t] of conv_state
                   [n_slots, ring, channels] and state [n_slots, slots, ...]; zx and pos then have n rows. With draws I32 [n] behind
                   slots a sequence has its last token (draws 1) and drafts (draws 1 + i) in any columns; the state after each is kept
    params: n_group [, keep] [, has_slots] [, has_draws]

inner = n_head * head_dim, channels = inner + 2 * n_group * d_state. A row of zx is what one matrix makes of a token: z [inner], the
convolution's input [channels] (x, B and C), dt [n_head]. With dt = softplus(dt + dt_bias), head h and its group g:

    state[h] = exp(dt[h] * a[h]) * state[h] + dt[h] * x[h] B[g]^T      y[h] = (state[h] C[g] + d[h] * x[h]) * silu(z[h])

Slot p % slots of the state is the state after the token at position p; a batch whose first token has position 0 begins with zeros. `keep`:
the state after each token is stored, not that after the last one alone; of fewer tokens than slots a text can go on from any. The slot that
is read stays as it is when those tokens are run, and of two slots for an odd number, so a single token may run twice. Padding (pos -1)
stands at the end of a batch, gives zeros and changes no state.
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
from vkback.ops.case_line import CaseLineError, call_with
from vkback.ops.cost import Cost, times, total
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, ceil_div, pack_push
from vkback.ops.family import Choice
from vkback.ops.ggml_only import ssm as ssm_sequences
from vkback.ops.glu import SIGMOID_COST, sigmoid
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.recurrent.scan_chunks import ChunkShape, chunk_shape, lower_chunks
from vkback.ops.recurrent.scan_heads import Heads
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
"""Tokens whose B, C and factors lie in shared memory at once."""

KEEPING = "the state after each token is kept"
"""Why chunks, which have the states between them alone, cannot be taken."""


def _choice(ctx: LowerContext, heads: Heads, n: int) -> Choice:
    return ctx.tuning.pick("ssm_scan", n=n, n_head=heads.n, head_dim=heads.dim, d_state=heads.d_state)


@dataclass(frozen=True)
class ScanShape:
    """How a workgroup shares a head: rows in all, and lanes of a row."""

    rows: int
    lanes: int

    @property
    def threads(self) -> int:
        return self.rows * self.lanes


def scan_shape(params: Mapping[str, Any], heads: Heads, caps: Capabilities) -> ScanShape:
    """The shape that the tables want, with fewer rows or lanes where heads or device ask for it."""
    # A lane holds four values of the state, so more lanes than that would be idle.
    lanes = min(int(params["lanes"]), 1 << ((heads.d_state // 4).bit_length() - 1))
    rows = min(int(params["rows"]), power_of_two(heads.dim))
    while rows * lanes > min(caps.max_workgroup_invocations, caps.max_workgroup_size[0]):
        rows, lanes = (rows // 2, lanes) if rows > 1 else (rows, lanes // 2)
    return ScanShape(rows, lanes)


def shape_for(node: Node, ctx: LowerContext) -> tuple[ScanShape | ChunkShape, str]:
    """How an SSM_SCAN is run by the tables of a context, and why not in chunks where these want them."""
    heads, why = Heads.of(node.outputs[1], node.params), ""
    choice = _choice(ctx, heads, node.outputs[0].shape[0])
    if choice["kernel"] == "chunks":
        chunks = KEEPING if node.params.get("keep") else chunk_shape(choice.params, heads, ctx.caps)
        if isinstance(chunks, ChunkShape):
            return chunks, ""
        why = chunks
    return scan_shape(choice.params, heads, ctx.caps), why


def scanned(
    xbc: Array, zx: Array, a: Array, d: Array, dt_bias: Array, pos: Array, state: Array, n_group: int, keep: bool = False
) -> tuple[Array, Array]:
    """y [n, inner] and the states, float64."""
    slots, n_head, head_dim, d_state = state.shape
    inner, n = n_head * head_dim, len(zx)
    xbc, zx, state = np.asarray(xbc, np.float64), np.asarray(zx, np.float64), np.array(state, np.float64)
    x = xbc[:, :inner].reshape(n, n_head, head_dim)
    b, c = (np.repeat(part.reshape(n, n_group, d_state), n_head // n_group, axis=1) for part in np.split(xbc[:, inner:], 2, axis=1))
    dt = np.logaddexp(0.0, zx[:, -n_head:] + np.asarray(dt_bias, np.float64))
    h = state[(pos[0] - 1) % slots].copy() if pos[0] > 0 else np.zeros_like(state[0])
    y = np.zeros((n, n_head, head_dim))
    for t in np.flatnonzero(pos >= 0):
        h = np.exp(dt[t] * a)[:, None, None] * h + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
        y[t] = np.einsum("hps,hs->hp", h, c[t]) + np.asarray(d, np.float64)[:, None] * x[t]
        if keep or pos[t] == pos.max():
            state[pos[t] % slots] = h
    z = zx[:, :inner]
    return y.reshape(n, inner) * z * sigmoid(z), state


class _Scan(Op):
    """What both ops share."""

    ggml_nmse = 2e-7  # of its SSM_SCAN

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(
            1e-9,
            1e-3,
            "f32: a state of slow decay remembers about a hundred steps, whose exp within 3 + 2|x| ulp may all err alike: "
            "100 * 3 * 2^-24 of a state are 1.8e-5, NMSE 3e-10; sums of unlike signs are that much off their terms, not themselves",
        )

    def _heads(self, node: Node, zx: Tensor, state: Tensor) -> Heads:
        """Sizes, once all shapes go together. Raises PlanError."""
        heads, y, n = Heads.of(state, node.params), node.outputs[0], zx.shape[0]
        if zx.shape != (n, heads.width) or heads.n % heads.n_group or heads.d_state % 4 or y.elements != n * heads.inner:
            raise PlanError(
                f"[{self.name}] {node.name}: {zx}, {state}, {heads.n_group} groups to {y}: expected rows of {heads.width}, heads a "
                "multiple of the groups, and a d_state that is a multiple of 4"
            )
        return heads

    def _dispatch(
        self,
        node: Node,
        ctx: LowerContext,
        zx: Tensor,
        pos: Tensor,
        state: Tensor,
        conv: Tensor | None,
        rest: tuple[Tensor, ...],
        slots: Tensor | None = None,
        draws: Tensor | None = None,
    ) -> Dispatch:
        """rest: what stands between zx and pos. conv: the convolution's state where it is part of the op. slots: the tokens' sequences;
        draws: which of its tokens they are."""
        heads, keep = self._heads(node, zx, state), bool(node.params.get("keep")) or draws is not None
        y, n = node.outputs[0], zx.shape[0]
        choice, caps = _choice(ctx, heads, n), ctx.caps
        shape = scan_shape(choice.params, heads, caps)
        rows, lanes = shape.rows, shape.lanes
        # Tokens of a tile wait in shared memory while the state stays in registers.
        tile = 1 if slots else min(n, TILE)
        while tile > 1 and 4 * tile * (rows + 2 * heads.d_state + 2) + 8 * shape.threads > caps.max_shared_memory:
            tile //= 2
        reduce, subgroup = reduction(caps, shape.threads, lanes=lanes)
        defines: Defines = {
            **reduce,
            "ROWS": rows,
            "LANES": lanes,
            "TILE": tile,
            "N_HEAD": heads.n,
            "HEAD_DIM": heads.dim,
            "STATE": heads.d_state,
            "N_GROUP": heads.n_group,
            "CONV": int(conv is not None),
            "BIAS": int(len(rest) == 5),
            "TAPS": rest[0].elements // heads.channels if conv else 1,
            **kept_defines(state, conv, rest[0].elements // heads.channels if conv else 0, keep),
        }
        states = (state,) if conv is None else (state, conv)
        args = [Arg(zx), *map(Arg, rest), Arg(pos), *(Arg(t, "rw") for t in states), Arg(y, "w")]
        if slots is not None:
            defines["BIND_SLOTS"] = len(args)
            args.append(Arg(slots))
        if draws is not None:
            defines |= drafts_defines(len(args), state)
            args.append(Arg(draws))
        sequences = n if slots else 1
        states_bytes = (1 + (n if keep and not slots else 1)) * sequences * heads.state_bytes
        weights = sum(nbytes(t) for t in rest if t.kind == "weight")
        return Dispatch(
            kernel=Variant.of("ssm/scan.comp", defines, subgroup_size=subgroup),
            args=tuple(args),
            push=pack_push(n, heads.width),
            groups=(ceil_div(heads.dim, rows), heads.n, sequences),
            op=node.op,
            label=node.name,
            reason=f"{shape.threads} threads, {lanes} lanes a row, {rows} rows: {choice.source}",
            nbytes=states_bytes
            + nbytes(zx)
            + nbytes(y)
            + weights
            + (4 * sequences * heads.channels * int(defines["TAPS"]) if conv else 4 * n * heads.channels),
            flops=n * heads.inner * (5 * heads.d_state + 8),
            waits=SpinWaits(part=(zx.name,)) if conv is not None and draws is None else None,
        )


@register
class SsmScan(_Scan):
    """See the module's text."""

    name = "SSM_SCAN"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Of an element of the state decay, input and output, a product each; of a value of y dt x, d x, the gate's silu and its product;
        of a head the softplus of dt and the decay."""
        y, state = node.outputs
        _, n_head, _, d_state = state.shape
        per_value = total(({"fmul": 3 * d_state}, {"fmul": 3}, SIGMOID_COST))
        per_head = {"fmul": 1, "fadd": 2, "fexp": 3}
        return total((times(per_value, y.elements), times(per_head, y.shape[0] * n_head)))

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Of the state one of its slots."""
        return nbytes(tensor) // (tensor.shape[0] if tensor.kind == "state" else 1)

    def stored_bytes(self, node: Node, n_kv: int) -> int:
        state = node.inputs[-1]
        return nbytes(state) // state.shape[0] * (node.outputs[0].shape[0] if node.params.get("keep") else 1)

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        if "sequences" in params:
            return ssm_sequences.scanned(inputs, params.get("snapshots", 1))
        xbc, zx, a, d, dt_bias, pos, state = inputs
        return list(scanned(xbc, zx, a, d, dt_bias, pos, state, params["n_group"], bool(params.get("keep"))))

    def case(self, params: Mapping[str, Any]) -> Case:
        """A line of test-backend-ops, which has `n_seqs`, is one of several sequences."""
        if "n_seqs" not in params:
            return super().case(params)
        return call_with(ssm_sequences.scan_case, params, op=self.name, extra_keys=(), example=lambda: ssm_sequences.scan_case().line)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return ssm_sequences.TOLERANCE if "sequences" in node.params else super().tolerance(node, ctx)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if "sequences" in node.params:
            return ssm_sequences.lower(node, ctx)
        xbc, zx, a, d, dt_bias, pos, state = node.inputs
        heads = self._heads(node, zx, state)
        shape, why = shape_for(node, ctx)
        if isinstance(shape, ChunkShape):
            return lower_chunks(node, heads, shape, _choice(ctx, heads, zx.shape[0]).source)
        scan = self._dispatch(node, ctx, zx, pos, state, None, (xbc, a, d, dt_bias))
        return [dataclasses.replace(scan, reason=f"{scan.reason}; no chunks: {why}") if why else scan]

    def cases(self) -> Iterator[Case]:
        for n, pos0, padding in ((1, 0, 0), (1, 8, 0), (2, 7, 0), (5, 1, 0), (16, 0, 3), (17, 12, 0), (40, 33, 23), (4, 9, 4)):
            yield self.build_case(n, 3, 8, 16, pos0=pos0, padding=padding)
        yield self.build_case(3, 4, 20, 20, n_group=2, pos0=1)
        yield self.build_case(6, 6, 64, 128, n_group=3, pos0=5, padding=1)
        for n, pos0, padding in ((4, 0, 0), (4, 6, 0), (8, 30, 5), (1, 9, 0)):
            yield self.build_case(n, 4, 20, 16, n_group=2, pos0=pos0, padding=padding, slots=9, keep=True)
        yield self.build_case(40, 4, 20, 16, n_group=2, pos0=3, slots=9)
        # Chunks that end within padding, with the last token, and behind it; rows and columns that no thread's share divides.
        chunks = partial(Case.where, kernel="chunks")
        yield chunks(self.build_case(40, 3, 8, 16, pos0=33, padding=23), chunk=16, rows=16, columns=16, tokens=1)
        yield chunks(self.build_case(64, 6, 12, 36, n_group=2), chunk=32, rows=16, columns=32, tokens=2)
        yield chunks(self.build_case(70, 4, 20, 20, n_group=2, pos0=2), chunk=64, rows=8, columns=16, tokens=2)
        yield chunks(self.build_case(33, 6, 64, 128, n_group=3, pos0=5, padding=1), chunk=32, rows=16, columns=64, tokens=4)
        yield chunks(self.build_case(130, 2, 128, 256, n_group=1), chunk=64, rows=32, columns=64, tokens=4)
        yield chunks(self.build_case(17, 4, 20, 16, n_group=2, pos0=4, slots=9), chunk=16, rows=32, columns=16, tokens=4)
        yield from ssm_sequences.scan_cases()

    def full_cases(self) -> Iterator[Case]:
        for n, (n_head, head_dim, d_state, n_group), pos0 in product(
            (1, 2, 15, 64, 512), ((1, 1, 4, 1), (4, 12, 8, 4), (2, 33, 36, 1), (8, 16, 128, 1), (2, 64, 256, 2)), (0, 3)
        ):
            yield self.build_case(n, n_head, head_dim, d_state, n_group, pos0, padding=n // 3)
        for n, (n_head, head_dim, d_state, n_group), chunk, (rows, columns, tokens) in product(
            (15, 100),
            ((4, 12, 8, 4), (2, 36, 36, 1), (8, 16, 128, 1), (2, 64, 256, 2)),
            (16, 32, 64),
            ((8, 16, 1), (32, 32, 4), (64, 128, 8)),
        ):
            case = self.build_case(n, n_head, head_dim, d_state, n_group, 3, padding=n // 7)
            yield case.where(kernel="chunks", chunk=chunk, rows=rows, columns=columns, tokens=tokens)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(512, 48, 64, 128, pos0=512)

    def build_case(
        self,
        n: int,
        n_head: int,
        head_dim: int,
        d_state: int,
        n_group: int = 1,
        pos0: int = 0,
        padding: int = 0,
        slots: int = 2,
        keep: bool = False,
        seed: int = 37,
    ) -> Case:
        """Values normal, a in -16..-1 by its logarithm, dt from 0.001 to some 5, as trained models have them. slots: of the state;
        keep: each token stores its own."""
        check_slots(slots, keep, n)

        def make(rng: np.random.Generator) -> Problem:
            heads = Heads(n_head, head_dim, d_state, n_group)
            *others, state = _inputs(n, heads)
            state = dataclasses.replace(state, shape=(slots, *state.shape[1:]))
            inputs = (Tensor("xbc", "F32", (n, heads.channels), "input"), *others, state)
            params = {"n_group": n_group} | ({"keep": True} if keep else {})
            node = Node(self.name, inputs, (Tensor("y", "F32", (n, heads.inner)), state), params)
            return Problem(node, _values(node, rng, pos0, padding))

        shown = {"n": n, "n_head": n_head, "head_dim": head_dim, "d_state": d_state, "n_group": n_group, "pos0": pos0, "padding": padding}
        return Case(self.name, {**shown, **({"slots": slots, "keep": keep} if slots != 2 else {}), "seed": seed}, make, seed)


@register
class SsmConvScan(_Scan):
    """SSM_CONV and SSM_SCAN of one token; see the module's text."""

    name = "SSM_CONV_SCAN"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        if params.get("has_slots"):
            return self._by_sequence(inputs, params)
        zx, w, *bias, a, d, dt_bias, pos, conv_state, state = inputs
        channels = conv_state.shape[1]
        inner = state.shape[1] * state.shape[2]
        xbc, conv_state = convolved(zx[:, inner : inner + channels], w, bias[0] if bias else None, pos, conv_state)
        y, state = scanned(xbc, zx, a, d, dt_bias, pos, state, params["n_group"])
        return [y, conv_state, state]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        inputs = list(node.inputs)
        draws = inputs.pop() if node.params.get("has_draws") else None
        slots = inputs.pop() if node.params.get("has_slots") else None
        zx, *rest, pos, conv_state, state = inputs
        if pos.shape != (slots.shape if slots else (1,)):
            raise PlanError(f"[SSM_CONV_SCAN] {node.name}: it takes one token, or one of each sequence, got {pos}")
        return [self._dispatch(node, ctx, zx, pos, state, conv_state, tuple(rest), slots, draws)]

    def _by_sequence(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        """Token by token, each with the states of its own sequence."""
        draws = inputs[-1] if params.get("has_draws") else None
        zx, *weights, pos, conv_states, states, slots = inputs if draws is None else inputs[:-1]
        conv_states, states = np.array(conv_states, np.float64), np.array(states, np.float64)
        plain = {"n_group": params["n_group"]}
        y = np.zeros((len(slots), states.shape[2] * states.shape[3]))
        for t in in_order(slots, draws):
            slot = slots[t]
            one = [zx[t : t + 1], *weights, pos[t : t + 1], conv_states[slot], states[slot]]
            y[t : t + 1], conv_states[slot], states[slot] = self.reference(one, plain)
        return [y, conv_states, states]

    def unfused(self, node: Node) -> list[Node]:
        """None with slots: the plain ops have one sequence."""
        if node.params.get("has_slots"):
            return []
        zx, w, *bias, a, d, dt_bias, pos, conv_state, state = node.inputs
        heads = Heads.of(state, node.params)
        xbc = Tensor(f"{node.name}.xbc", "F32", (1, heads.channels))
        return [
            Node("SSM_CONV", (zx, w, *bias, pos, conv_state), (xbc, conv_state), {"offset": heads.inner}),
            Node("SSM_SCAN", (xbc, zx, a, d, dt_bias, pos, state), (node.outputs[0], state), node.params),
        ]

    def cases(self) -> Iterator[Case]:
        for pos in (0, 1, 3, 8, 4095):
            yield self.build_case(3, 8, 16, pos=pos)
        yield self.build_case(4, 20, 20, n_group=2, taps=3, pos=2, bias=False)
        yield self.build_case(6, 64, 128, n_group=3, pos=5)
        yield self.build_case(6, 64, 128, n_group=3, pos=6).where(sync="sentinel")
        yield self.build_case(2, 12, 32, pos=-1)
        yield self.build_case(4, 20, 20, n_group=2, pos=23, kept=9)
        yield self.build_case(6, 64, 128, n_group=3, slots=(2, 0, 3, 1), pos=5)
        yield self.build_case(4, 20, 20, n_group=2, taps=3, bias=False, slots=(1, 4))
        yield self.build_case(6, 64, 128, n_group=3, slots=(2, 0), pos=1).where(sync="sentinel")
        yield self.build_case(4, 20, 20, n_group=2, taps=3, slots=(1, 4, 0), drafts=(3, 0, 2), kept=5, pos=4)
        yield self.build_case(6, 64, 128, n_group=3, slots=(2, 0, 3), drafts=(7, 2, 0), kept=9, pos=0)

    def full_cases(self) -> Iterator[Case]:
        for (n_head, head_dim, d_state, n_group), taps, pos in product(
            ((1, 1, 4, 1), (4, 12, 8, 4), (2, 33, 36, 1), (8, 16, 128, 1), (2, 64, 256, 2)), (2, 4), (0, 2, 31)
        ):
            yield self.build_case(n_head, head_dim, d_state, n_group, taps, pos)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(48, 64, 128, pos=100)

    def build_case(
        self,
        n_head: int,
        head_dim: int,
        d_state: int,
        n_group: int = 1,
        taps: int = 4,
        pos: int = 0,
        bias: bool = True,
        slots: Shape = (),
        drafts: Shape = (),
        kept: int = 2,
        seed: int = 41,
    ) -> Case:
        """As for SSM_SCAN. pos -1: the token is padding. slots: the sequence of each of several tokens, which are at positions pos, pos + 1
        ..., and the last a hole where there are more than two. drafts: how many each of these sequences has, in columns behind those.
        kept: slots of a state."""
        check_slots(kept, bool(drafts), max(drafts, default=0) + 1)
        columns, draws = columns_with_drafts(slots, drafts)
        if len(set(slots)) != len(slots) or any(s < 0 for s in slots):
            raise CaseLineError(f"slots={slots}: expected the numbers of different sequences")

        def make(rng: np.random.Generator) -> Problem:
            heads = Heads(n_head, head_dim, d_state, n_group)
            n = len(columns) or 1
            zx, *others, at, state = _inputs(n, heads)
            n_slots = (max(slots) + 1,) if slots else ()
            state = dataclasses.replace(state, shape=(*n_slots, kept, *state.shape[1:]))
            sequences = [Tensor("slots", "I32", (n,), "input")] if slots else []
            sequences += [Tensor("draws", "I32", (n,), "input")] if drafts else []
            conv = [Tensor("w", "F32", (heads.channels * taps,), "weight")]
            conv += [Tensor("bias", "F32", (heads.channels,), "weight")] if bias else []
            conv_state = Tensor("conv_state", "F32", (*n_slots, taps + kept - 2, heads.channels), "state")
            outputs = (Tensor("y", "F32", (n, heads.inner)), conv_state, state)
            params = {"n_group": n_group} | ({"has_slots": True} if slots else {}) | ({"has_draws": True} if drafts else {})
            node = Node(self.name, (zx, *conv, *others, at, conv_state, state, *sequences), outputs, params)
            values = _values(node, rng, max(pos, 0), int(pos < 0 or n > 2))
            values |= {"slots": np.array(columns, np.int32)} if slots else {}
            if drafts:
                at_hole = slots[-1] if len(slots) > 2 else None
                values |= {"draws": np.array(draws, np.int32), "pos": places_with_drafts(columns, draws, pos, at_hole)}
            return Problem(node, values)

        params: dict[str, Any] = {"n_head": n_head, "head_dim": head_dim, "d_state": d_state, "n_group": n_group, "taps": taps}
        params |= {"pos": pos, "bias": bias}
        params |= ({"slots": slots} if slots else {}) | ({"drafts": drafts} if drafts else {}) | ({"kept": kept} if kept != 2 else {})
        return Case(self.name, {**params, "seed": seed}, make, seed)


def _inputs(n: int, heads: Heads) -> tuple[Tensor, ...]:
    """zx, a, d, dt_bias, pos, state."""
    per_head = (Tensor(name, "F32", (heads.n,), "weight") for name in ("a", "d", "dt_bias"))
    state = Tensor("state", "F32", (2, heads.n, heads.dim, heads.d_state), "state")
    return Tensor("zx", "F32", (n, heads.width), "input"), *per_head, Tensor("pos", "I32", (n,), "input"), state


def _values(node: Node, rng: np.random.Generator, pos0: int, padding: int) -> dict[str, Array]:
    values: dict[str, Array] = {t.name: rng.standard_normal(t.shape, np.float32) for t in node.inputs if t.name not in ("pos", "slots")}
    n_head = values["a"].size
    values["a"] = -np.exp(rng.uniform(0, np.log(16), n_head)).astype(np.float32)
    values["dt_bias"] = np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(0.3), n_head)))).astype(np.float32)
    return values | {"pos": positions(len(values["zx"]), pos0, padding)}
