"""SSM_CONV (shaders/ssm/conv.comp): the causal convolution in front of a Mamba-2 recurrence, channel by channel, with bias and SiLU.

    SSM_CONV  x F32 [n, width], w F32 [channels * taps] [, bias F32 [channels]], pos I32 [n], state F32 [ring, channels]
              -> y F32 [n, channels], state
              params: offset (first of the channels in a row of x)

Row p % ring of the state is the input of the token at position p. A token needs the inputs of taps - 1 tokens before it; those at positions
below 0 are zeros, whatever the state holds. Padding (pos -1) stands at the end of a batch, gives zeros and is not stored. A ring of more
rows than taps keeps inputs to go back to: a text can go on from any of the last ring - taps + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError, call_with
from vkback.ops.cost import Cost, times, total
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push
from vkback.ops.ggml_only import ssm as ssm_sequences
from vkback.ops.glu import SIGMOID_COST, sigmoid
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import Defines, workgroup_size
from vkback.shader import Variant


def depthwise(x: Array, w: Array, pos: Array, state: Array) -> tuple[Array, Array]:
    """The convolution [n, channels] of x [n, channels], and the state after it; float64."""
    ring, channels = state.shape
    w = np.asarray(w, np.float64).reshape(channels, -1)
    taps = w.shape[1]
    x, state = np.asarray(x, np.float64), np.array(state, np.float64)
    before = np.zeros((taps - 1, channels))
    for back in range(1, taps):
        if pos[0] >= back:
            before[taps - 1 - back] = state[(pos[0] - back) % ring]
    seen = np.concatenate([before, x])
    y = np.zeros(x.shape)
    for j in range(taps):
        y = y + seen[j : j + len(x)] * w[:, j]
    for t in np.flatnonzero(pos >= 0):
        state[pos[t] % ring] = x[t]
    return y, state


def convolved(x: Array, w: Array, bias: Array | None, pos: Array, state: Array) -> tuple[Array, Array]:
    """silu(convolution) [n, channels] of x [n, channels], and the state after it; float64."""
    y, state = depthwise(x, w, pos, state)
    y = y if bias is None else y + np.asarray(bias, np.float64)
    return np.where(pos[:, None] >= 0, y * sigmoid(y), 0.0), state


def positions(n: int, pos0: int, padding: int) -> Array:
    """n positions from pos0 on, the last `padding` of them -1."""
    pos = np.arange(pos0, pos0 + n, dtype=np.int32)
    pos[n - padding :] = -1
    return pos


def kept_defines(state: Tensor, conv: Tensor | None, taps: int, keep: bool) -> Defines:
    """What kernels of a recurrence need to know of states that hold more than the latest: slots of a state, rows of the ring of a
    convolution with so many taps, and whether each token of a batch stores its own."""
    slots = state.shape[-4]
    return {
        **({"SLOTS": slots} if slots != 2 else {}),
        **({"RING": conv.shape[-2]} if conv is not None and conv.shape[-2] != taps else {}),
        **({"KEEP": 1} if keep else {}),
    }


def drafts_defines(bind: int, state: Tensor) -> Defines:
    """What kernels of a recurrence need to know of steps in which sequences have drafts: the binding of `draws`, and the most tokens of a
    sequence, for that many states are kept beside the one that is read."""
    return {"BIND_DRAWS": bind, "MAX_OWN": state.shape[-4] - 1}


def in_order(slots: Array, draws: Array | None) -> list[int]:
    """Columns, those of a sequence in the order of its tokens: its last one, then its drafts."""
    return sorted(range(len(slots)), key=lambda t: 0 if draws is None else int(draws[t]))


def columns_with_drafts(slots: Shape, drafts: Shape) -> tuple[list[int], list[int]]:
    """Slots and draws of a case's columns: its sequences, each with as many drafts. The first columns are those of last tokens, in order;
    then come first drafts, second ones, from the last sequence to the first."""
    columns = [(slot, 1) for slot in slots]
    for i in range(1, max(drafts, default=0) + 1):
        columns += [(slot, 1 + i) for slot, count in reversed(list(zip(slots, drafts, strict=True))) if count >= i]
    return [slot for slot, _ in columns], [draw for _, draw in columns]


def places_with_drafts(slots: Sequence[int], draws: Sequence[int], pos0: int, hole: int | None) -> Array:
    """Positions of these columns: the last token of a sequence is at pos0 and how manyeth sequence it is; a sequence's are holes."""
    order = list(dict.fromkeys(slots))
    return np.array(
        [-1 if slot == hole else pos0 + order.index(slot) + draw - 1 for slot, draw in zip(slots, draws, strict=True)], np.int32
    )


def check_slots(slots: int, keep: bool, n: int) -> None:
    """Raises CaseLineError for a state that cannot keep what n tokens store."""
    if slots < 2 or (keep and n >= slots):
        raise CaseLineError(f"slots={slots}, keep={keep}, n={n}: expected two slots or more, with keep more than tokens")


@register
class SsmConv(Op):
    """See the module's text."""

    name = "SSM_CONV"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Of a value a product for each tap, the bias and silu."""
        _, w, *bias, _, state = node.inputs
        per_value = [{"fmul": w.elements // state.shape[1]}, SIGMOID_COST, {"fadd": len(bias)}]
        return times(total(per_value), node.outputs[0].elements)

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Of the state the inputs before the first token's."""
        if tensor.kind != "state":
            return nbytes(tensor)
        taps = node.inputs[1].elements // tensor.shape[1]
        return nbytes(tensor) // tensor.shape[0] * (taps - 1)

    def stored_bytes(self, node: Node, n_kv: int) -> int:
        """The last tokens' inputs, as many as the state has rows."""
        state = node.inputs[-1]
        return nbytes(state) // state.shape[0] * min(state.shape[0], node.outputs[0].shape[0])

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        if "sequences" in params:
            return [ssm_sequences.convolved(*inputs)]
        x, w, *bias, pos, state = inputs
        channels = state.shape[1]
        y, state = convolved(x[:, params["offset"] :][:, :channels], w, bias[0] if bias else None, pos, state)
        return [y, state]

    def case(self, params: Mapping[str, Any]) -> Case:
        """A line of test-backend-ops, which has sizes `ne_a`, is one of several sequences."""
        if "ne_a" not in params:
            return super().case(params)
        return call_with(ssm_sequences.conv_case, params, op=self.name, extra_keys=(), example=lambda: ssm_sequences.conv_case().line)

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if "sequences" in node.params:
            return ssm_sequences.lower(node, ctx)
        x, w, *bias, pos, state = node.inputs
        y = node.outputs[0]
        (n, width), (ring, channels), offset = x.shape, state.shape, int(node.params["offset"])
        taps = w.elements // channels
        if w.shape != (channels * taps,) or ring < taps or y.shape != (n, channels) or offset + channels > width:
            raise PlanError(
                f"[SSM_CONV] {node.name}: {x} from channel {offset} on, {w} and {state} to {y}: expected weights "
                f"[{channels} * taps], at most {ring} taps, an output [{n}, {channels}], and as many channels in a row of x"
            )
        choice = ctx.tuning.pick("elementwise", elements=n * channels)
        wg = workgroup_size(ctx.caps, choice["wg_size"], channels)
        push = pack_push(n, width, offset, channels)
        reason = f"{wg} threads: {choice.source}"
        across = ceil_div(channels, wg)

        def dispatch(store: int, args: tuple[Arg, ...], rows: int, moved: int) -> Dispatch:
            defines = {"WG_SIZE": wg, "TAPS": taps, "BIAS": len(bias), "STORE": store, **({"RING": ring} if ring != taps else {})}
            return Dispatch(
                Variant.of("ssm/conv.comp", defines),
                args,
                push,
                (across, rows, 1),
                node.op,
                node.name,
                reason,
                nbytes=moved,
                flops=(2 * taps + 4) * n * channels * (1 - store),
            )

        rows = min(n, ring)
        return [
            dispatch(0, (Arg(x), *map(Arg, (w, *bias, pos, state)), Arg(y, "w")), n, 2 * nbytes(y) + nbytes(w) + nbytes(state)),
            dispatch(1, (Arg(x), Arg(pos), Arg(state, "rw")), rows, 8 * rows * channels),
        ]

    def cases(self) -> Iterator[Case]:
        for n, pos0, padding in ((1, 0, 0), (1, 9, 0), (1, 2, 0), (2, 1, 0), (3, 3, 0), (16, 0, 3), (16, 6, 14), (5, 70, 0), (4, 5, 4)):
            yield self.build_case(n, 96, pos0=pos0, padding=padding)
        yield self.build_case(33, 37, taps=3, pos0=1, bias=False)
        for n, pos0, padding in ((8, 5, 3), (1, 20, 0), (30, 0, 1)):
            yield self.build_case(n, 96, pos0=pos0, padding=padding, ring=11)
        yield self.build_case(64, 3328, taps=4, pos0=100, padding=5)
        yield from ssm_sequences.conv_cases()

    def full_cases(self) -> Iterator[Case]:
        for n, (channels, taps), pos0 in product((1, 2, 7, 128), ((1, 4), (33, 2), (260, 5), (1536, 4)), (0, 1, 1000)):
            yield self.build_case(n, channels, taps=taps, pos0=pos0, padding=n // 4)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(512, 3328, pos0=512)

    def build_case(
        self, n: int, channels: int, taps: int = 4, pos0: int = 0, padding: int = 0, bias: bool = True, ring: int = 0, seed: int = 31
    ) -> Case:
        """The channels lie in the middle of rows of x; values normal, the state too, even where position 0 makes it void. ring: rows of the
        state, 0: as many as there are taps."""
        if ring and ring < taps:
            raise CaseLineError(f"SSM_CONV: ring={ring}: expected at least as many rows as taps={taps}, or 0")

        def make(rng: np.random.Generator) -> Problem:
            x, y = Tensor("x", "F32", (n, channels + 24), "input"), Tensor("y", "F32", (n, channels))
            w = Tensor("w", "F32", (channels * taps,), "weight")
            biases = (Tensor("bias", "F32", (channels,), "weight"),) if bias else ()
            pos, state = Tensor("pos", "I32", (n,), "input"), Tensor("state", "F32", (ring or taps, channels), "state")
            node = Node(self.name, (x, w, *biases, pos, state), (y, state), {"offset": 8})
            values: dict[str, Array] = {t.name: rng.standard_normal(t.shape, np.float32) for t in node.inputs if t is not pos}
            return Problem(node, values | {"pos": positions(n, pos0, padding)})

        params = {"n": n, "channels": channels, "taps": taps, "pos0": pos0, "padding": padding, "bias": bias}
        params |= ({"ring": ring} if ring else {}) | {"seed": seed}
        return Case(self.name, params, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-12, 1e-5, "a handful of f32 products and additions, 2^-24 each, and exp within 3 + 2|x| ulp of |x| < 10")
