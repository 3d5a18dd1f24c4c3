"""SHORT_CONV (shaders/ssm/short_conv.comp): the gated short convolution of LFM2, channel by channel.

    SHORT_CONV  bcx F32 [n, 3 channels], w F32 [channels * taps], pos I32 [n], state F32 [ring, channels]
                -> y F32 or, of one token or with slots, Q8_1 [n, channels], state
                With slots I32 [n] last, for n tokens of as many sequences, whose states are number slots[t] of state
                [n_slots, ring, channels]. With draws I32 [n] behind slots a sequence has its last token (draws 1) and drafts (draws
                1 + i) in any columns
    params: [has_slots] [has_draws]

A row of bcx is what one matrix makes of a token: B, C and x, `channels` values each. y = C * convolution(B * x), the last tap on the
token itself. Row p % ring of the state is B * x of the token at position p; what lies before position 0 is zeros, whatever the state
holds. Padding (pos -1) stands at the end of a batch, gives zeros and is not stored. A ring of more rows than taps keeps inputs to go back
to, as of SSM_CONV. Source: LFM2 (Liquid AI), as `transformers` has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.cost import Cost, times
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits, ceil_div, pack_push
from vkback.ops.ggml_words import one_of_types
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.recurrent.ssm_conv import columns_with_drafts, depthwise, in_order, places_with_drafts, positions
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import Defines, reduction, workgroup_size
from vkback.shader import Variant


def taps_of(node: Node) -> int:
    """Weights of a channel."""
    return node.inputs[1].elements // node.outputs[1].shape[-1]


@register
class ShortConv(Op):
    """See the module's text."""

    name = "SHORT_CONV"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Of a value a product for each tap, B x, and C."""
        return times({"fmul": taps_of(node) + 2}, node.outputs[0].elements)

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Of a state the inputs before the first token's."""
        if tensor.kind != "state":
            return nbytes(tensor)
        return 4 * (taps_of(node) - 1) * tensor.shape[-1] * self._sequences(node)

    def stored_bytes(self, node: Node, n_kv: int) -> int:
        """Of each sequence the last tokens' inputs, as many as a state has rows."""
        ring, channels = node.outputs[1].shape[-2:]
        n = node.outputs[0].shape[0]
        return 4 * channels * (n if node.params.get("has_slots") else min(ring, n))

    @staticmethod
    def _sequences(node: Node) -> int:
        return node.outputs[0].shape[0] if node.params.get("has_slots") else 1

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        draws = inputs[-1] if params.get("has_draws") else None
        bcx, w, pos, states, *slots = inputs if draws is None else inputs[:-1]
        b, c, x = np.split(np.asarray(bcx, np.float64), 3, axis=1)
        if not slots:
            y, state = depthwise(b * x, w, pos, states)
            return [np.where(pos[:, None] >= 0, c * y, 0.0), state]
        states, made = np.array(states, np.float64), np.zeros(b.shape)
        for t in in_order(slots[0], draws):
            y, states[slots[0][t]] = depthwise((b * x)[t : t + 1], w, pos[t : t + 1], states[slots[0][t]])
            if pos[t] >= 0:
                made[t : t + 1] = c[t : t + 1] * y
        return [made, states]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        bcx, w, pos, state, *slots = node.inputs
        y = node.outputs[0]
        n, taps, (ring, channels) = bcx.shape[0], taps_of(node), state.shape[-2:]
        if bcx.shape != (n, 3 * channels) or w.shape != (channels * taps,) or ring < taps or y.shape != (n, channels):
            raise PlanError(
                f"[SHORT_CONV] {node.name}: {bcx}, {w} and {state} to {y}: expected rows of {3 * channels}, at most {ring} "
                f"weights of a channel, and an output [{n}, {channels}]"
            )
        one, q8 = n == 1 or bool(slots), y.type == "Q8_1"
        if q8 and (not one or channels % 32):
            raise PlanError(
                f"[SHORT_CONV] {node.name}: {y} of {n} tokens: expected a Q8_1 output of one token, of whole units of 32 channels"
            )
        choice = ctx.tuning.pick("elementwise", elements=n * channels)
        threads = channels // 4 if q8 else channels
        wg = max(workgroup_size(ctx.caps, choice["wg_size"], threads), 8 if q8 else 1)
        reduce, subgroup = reduction(ctx.caps, wg, lanes=8) if q8 else ({}, None)
        push, across = pack_push(n, channels), ceil_div(threads, wg)
        reason = f"{wg} threads: {choice.source}"

        def dispatch(store: int, args: tuple[Arg, ...], rows: int, moved: int) -> Dispatch:
            defines: Defines = {"WG_SIZE": wg, "TAPS": taps, "STORE": store, "ONE": int(one)}
            defines |= {"RING": ring} if ring != taps else {}
            defines |= {**reduce, "OUT_Q8_1": 1} if q8 else {}
            for bind, tensor in zip(("BIND_SLOTS", "BIND_DRAWS"), slots, strict=False):
                defines[bind] = len(args)
                args = (*args, Arg(tensor))
            if "BIND_DRAWS" in defines:
                defines["MAX_OWN"] = ring - taps + 1
            return Dispatch(
                Variant.of("ssm/short_conv.comp", defines, subgroup_size=subgroup),
                args,
                push,
                (across, rows, 1),
                node.op,
                node.name,
                reason,
                nbytes=moved,
                flops=(2 * taps + 2) * n * channels * (1 - store),
                waits=SpinWaits(part=(bcx.name,)) if one and len(slots) < 2 else None,
            )

        moved = nbytes(bcx) + nbytes(y) + nbytes(w) + self.read_bytes(node, state, 0)
        inputs = (Arg(bcx), Arg(w), Arg(pos))
        if one:
            return [dispatch(0, (*inputs, Arg(state, "rw"), Arg(y, "w")), n, moved + 4 * n * channels)]
        rows = min(n, ring)
        return [
            dispatch(0, (*inputs, Arg(state), Arg(y, "w")), n, moved),
            dispatch(1, (Arg(bcx), Arg(pos), Arg(state, "rw")), rows, 12 * rows * channels),
        ]

    def cases(self) -> Iterator[Case]:
        for n, pos0, padding in ((1, 0, 0), (1, 9, 0), (1, 1, 0), (2, 1, 0), (3, 3, 0), (16, 0, 3), (16, 6, 14), (5, 70, 0), (4, 5, 4)):
            yield self.build_case(n, 96, pos0=pos0, padding=padding)
        yield self.build_case(1, 2048, pos0=4095).where(sync="sentinel")
        yield self.build_case(33, 37, taps=4, pos0=1)
        yield self.build_case(64, 2048, pos0=100, padding=5)
        yield self.build_case(1, 96, ring=7, pos0=9)
        yield self.build_case(12, 96, ring=7, pos0=5, padding=2)
        yield self.build_case(4, 96, pos0=5, slots=(2, 0, 3, 1))
        yield self.build_case(2, 37, taps=4, slots=(1, 4))
        yield self.build_case(3, 37, ring=5, pos0=6, slots=(1, 4, 0))
        yield self.build_case(2, 2048, pos0=1, slots=(2, 0)).where(sync="sentinel")
        yield self.build_case(1, 96, pos0=9, out="q8_1")
        yield self.build_case(1, 2048, out="q8_1").where(sync="sentinel")
        yield self.build_case(3, 160, ring=5, pos0=6, slots=(1, 4, 0), out="q8_1")
        yield self.build_case(8, 96, ring=7, pos0=4, slots=(1, 4, 0), drafts=(4, 0, 1))
        yield self.build_case(7, 37, taps=4, ring=8, pos0=0, slots=(3, 1), drafts=(1, 4))
        yield self.build_case(6, 160, ring=7, pos0=5, slots=(1, 4), drafts=(3, 1), out="q8_1")

    def full_cases(self) -> Iterator[Case]:
        for n, (channels, taps), pos0 in product((1, 2, 7, 128), ((1, 3), (33, 2), (260, 5), (1536, 3)), (0, 1, 1000)):
            yield self.build_case(n, channels, taps=taps, pos0=pos0, padding=n // 4)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(1, 2048, pos0=512)
        yield self.build_case(512, 2048, pos0=512)

    def build_case(
        self,
        n: int,
        channels: int,
        taps: int = 3,
        pos0: int = 0,
        padding: int = 0,
        ring: int = 0,
        slots: Shape = (),
        out: str = "f32",
        drafts: Shape = (),
        seed: int = 43,
    ) -> Case:
        """Values normal, the state too, even where position 0 makes it void. slots: the sequence of each token, which are at positions
        pos0, pos0 + 1 ..., and the last a hole where there are more than two. drafts: how many each of these sequences has, in columns
        behind those. ring: rows of the state, 0: taps."""
        columns, draws = columns_with_drafts(slots, drafts)
        if ring and ring < taps:
            raise CaseLineError(f"ring={ring}: expected at least the {taps} taps")
        if slots and (len(columns) != n or len(set(slots)) != len(slots) or any(s < 0 for s in slots)):
            raise CaseLineError(f"slots={slots}, drafts={drafts}: expected the numbers of different sequences, {n} tokens in all")
        if drafts and max(drafts) > (ring or taps) - taps:
            raise CaseLineError(f"ring={ring}, drafts={drafts}: expected a row more than taps for each draft of a sequence")

        y_type = one_of_types(out, ("F32", "Q8_1"), "out")

        def make(rng: np.random.Generator) -> Problem:
            bcx, y = Tensor("bcx", "F32", (n, 3 * channels), "input"), Tensor("y", "F32", (n, channels))
            w, pos = Tensor("w", "F32", (channels * taps,), "weight"), Tensor("pos", "I32", (n,), "input")
            y = dataclasses.replace(y, type=y_type)
            n_slots = (max(slots) + 1,) if slots else ()
            state = Tensor("state", "F32", (*n_slots, ring or taps, channels), "state")
            names = ("slots", "draws") if drafts else ("slots",) if slots else ()
            sequences = [Tensor(name, "I32", (n,), "input") for name in names]
            params = {f"has_{name}": True for name in names}
            node = Node(self.name, (bcx, w, pos, state, *sequences), (y, state), params)
            values: dict[str, Array] = {t.name: rng.standard_normal(t.shape, np.float32) for t in (bcx, w, state)}
            values["pos"] = positions(n, pos0, max(padding, int(len(slots) > 2)))
            values |= {"slots": np.array(columns, np.int32)} if slots else {}
            if drafts:
                at_hole = slots[-1] if len(slots) > 2 else None
                values |= {"draws": np.array(draws, np.int32), "pos": places_with_drafts(columns, draws, pos0, at_hole)}
            return Problem(node, values)

        params: dict[str, Any] = {"n": n, "channels": channels, "taps": taps, "pos0": pos0, "padding": padding}
        params |= ({"ring": ring} if ring else {}) | ({"slots": slots} if slots else {}) | ({"drafts": drafts} if drafts else {})
        params |= {"out": out} if y_type != "F32" else {}
        return Case(self.name, {**params, "seed": seed}, make, seed)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        if node.outputs[0].type == "Q8_1":
            return Tolerance(4e-4, 0.2, "outputs are rounded to 8 bits; a product of four normal values is up to twenty times their rms")
        return Tolerance(
            1e-12, 1e-5, "a handful of f32 products and additions, 2^-24 each; sums of unlike signs are that much off their terms"
        )
