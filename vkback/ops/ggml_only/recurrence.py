"""RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN and GATED_DELTA_NET (shaders/recurrence): linear attention as a recurrence, of several sequences.

Each head has a state S [key, value]. Inputs: the state before, r (what asks: RWKV's receptance, a query), k, v, the decay w, and what an op
has of its own, all F32; r, k, v, w [sequences, tokens, heads, dim]. Outputs: y as v, and the states after the last tokens
[snapshots, sequences, heads, dim, dim], the newest first. A state lies as [key, value] in RWKV_WKV6 and GATED_LINEAR_ATTN, as [value, key]
in the other two. Sources: RWKV-6 (arXiv 2404.05892), RWKV-7 (2503.14456), GLA (2312.06635), Gated DeltaNet (2412.06464), and Kimi Linear
(2510.26692) for a decay of each key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.general import is_general, lower_general
from vkback.ops.ggml_words import one_of_types, sized
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register
from vkback.ops.view import View, laid_out


class Recurrence(Op):
    """An op of recurrence.comp. function: its number there; own: names of its own inputs; by_value: whether states lie as [value, key]."""

    function = 0
    own: tuple[str, ...] = ()
    by_value = False

    def step(self, s: Array, r: Array, k: Array, v: Array, w: Array, own: Sequence[Array], scale: float) -> tuple[Array, Array]:
        """y and the state of one token, of arrays [sequences, heads, dim] and s [sequences, heads, key, value]."""
        raise NotImplementedError

    def of_token(self, own: Array, t: int) -> Array:
        """One of the op's own inputs at a token."""
        return np.asarray(own[:, t])

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        s, r, k, v, w, *own = (np.asarray(x, np.float64) for x in inputs)
        share = v.shape[2] // k.shape[2]
        r, k = np.tile(r, (1, 1, share, 1)), np.tile(k, (1, 1, share, 1))
        states, case_of = [s.swapaxes(-1, -2) if self.by_value else s], []
        for t in range(v.shape[1]):
            y, state = self.step(
                states[-1], r[:, t], k[:, t], v[:, t], w[:, t], [self.of_token(x, t) for x in own], params.get("scale", 1.0)
            )
            case_of.append(y)
            states.append(state)
        after = np.stack(states[: -1 - params.get("snapshots", 1) : -1])
        return [np.stack(case_of, axis=1), after.swapaxes(-1, -2) if self.by_value else after]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        if is_general(node):
            return lower_general(self, node, ctx)
        s, r, k, v, w, *_ = node.inputs
        y, after = node.outputs
        sequences, tokens, heads, dim = v.shape
        snapshots = node.params.get("snapshots", 1)
        fits = s.shape == (sequences, heads, dim, dim) and r.shape == k.shape == (sequences, tokens, k.shape[2], dim)
        fits &= heads % k.shape[2] == 0 and w.shape[:3] == v.shape[:3] and w.shape[3] in (1, dim)
        if not fits or y.shape != v.shape or after.shape != (snapshots, *s.shape) or snapshots > tokens:
            raise PlanError(f"[{self.name}] {node.name}: {', '.join(map(str, node.inputs))} to {y} and {after}: they do not fit")
        push = (sequences, tokens, heads, k.shape[2], dim, w.shape[3], snapshots, float(node.params.get("scale", 1.0)))
        args = (Arg(y, "w"), Arg(after, "rw"), *map(Arg, node.inputs))
        threads = sequences * heads * dim
        flops = 8 * tokens * threads * dim
        return [by_threads(node, ctx, "recurrence/recurrence.comp", args, push, threads, {"FUNCTION": self.function}, flops=flops)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(
            1e-10, 1e-4, "f32: hundreds of tokens of a recurrence that forgets, sums of up to 128 products, exp within 3 + 2|x| ulp"
        )

    def values(self, name: str, shape: Shape, rng: np.random.Generator) -> Array:
        """What an input of a case holds: normal values, keys of length 1."""
        x = rng.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True) if name == "k" else x

    def case_of(
        self,
        shown: Mapping[str, Any],
        heads: int,
        dim: int,
        tokens: int,
        sequences: int,
        seed: int,
        *,
        params: Mapping[str, Any],
        k_heads: int = 0,
        w_width: int = 0,
        order: Shape = (),
    ) -> Case:
        """order: axes of r, k and v in memory from the slowest to the fastest."""
        if min(heads, dim, tokens, sequences) < 1:
            raise CaseLineError(f"{self.name}: expected all sizes from 1")
        rows, keys = (sequences, tokens, heads, dim), (sequences, tokens, k_heads or heads, dim)
        shapes: dict[str, Shape] = {"s": (sequences, heads, dim, dim), "r": keys, "k": keys, "v": rows, "w": (*rows[:3], w_width or dim)}
        shapes |= {name: self.own_shape(name, rows) for name in self.own}
        after = (params.get("snapshots", 1), *shapes["s"])
        for shape in (*shapes.values(), after):
            sized(shape)
        views: dict[int, View] = {}
        in_memory = dict(shapes)
        if order:
            for i, name in ((1, "r"), (2, "k"), (3, "v")):
                in_memory[name], views[i] = laid_out(shapes[name], order)

        def make(rng: np.random.Generator) -> Problem:
            inputs = tuple(Tensor(name, "F32", shape, "input") for name, shape in in_memory.items())
            outputs = (Tensor("y", "F32", rows), Tensor("after", "F32", after))
            node = Node(self.name, inputs, outputs, {**params, "views": views} if views else params)
            return Problem(node, {t.name: self.values(t.name, t.shape, rng).astype(np.float32) for t in inputs})

        return Case(self.name, {**shown, "seed": seed}, make, seed)

    def own_shape(self, name: str, rows: Shape) -> Shape:
        """The shape of one of the op's own inputs, by v's."""
        return rows

    def plain_case(
        self, type: str, head_count: int, head_size: int, n_seq_tokens: int, n_seqs: int, seed: int, params: Mapping[str, Any] | None = None
    ) -> Case:
        one_of_types(type, ("F32",))
        shown = {"type": "f32", "head_count": head_count, "head_size": head_size, "n_seq_tokens": n_seq_tokens, "n_seqs": n_seqs}
        return self.case_of(shown, head_count, head_size, n_seq_tokens, n_seqs, seed, params=params or {})


class _Plain(Recurrence):
    """One whose line has sizes only."""

    def build_case(
        self, type: str = "f32", head_count: int = 32, head_size: int = 64, n_seq_tokens: int = 32, n_seqs: int = 32, seed: int = 43
    ) -> Case:
        return self.plain_case(type, head_count, head_size, n_seq_tokens, n_seqs, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case("f32", 3, 16, 1, 2)
        yield self.build_case("f32", 2, 33, 5, 3)

    def full_cases(self) -> Iterator[Case]:
        for heads, dim, tokens, sequences in product((1, 5), (1, 64), (1, 70), (1, 3)):
            yield self.build_case("f32", heads, dim, tokens, sequences)


@register
class RwkvWkv6(_Plain):
    """RWKV_WKV6(s, r, k, v, w, u F32 [heads, dim]): w is the decay itself, u what a token's own key and value count for."""

    name = "RWKV_WKV6"
    own = ("u",)

    def step(self, s: Array, r: Array, k: Array, v: Array, w: Array, own: Sequence[Array], scale: float) -> tuple[Array, Array]:
        kv = k[..., None] * v[..., None, :]
        return np.einsum("shk,shkv->shv", r, s + own[0][..., None] * kv), w[..., None] * s + kv

    def of_token(self, own: Array, t: int) -> Array:
        return own

    def own_shape(self, name: str, rows: Shape) -> Shape:
        return rows[2:]

    def values(self, name: str, shape: Shape, rng: np.random.Generator) -> Array:
        """Decays exp(-exp(x)), x in -4..0."""
        return np.exp(-np.exp(rng.uniform(-4, 0, shape))) if name == "w" else super().values(name, shape, rng)


@register
class GatedLinearAttn(_Plain):
    """GATED_LINEAR_ATTN(s, r, k, v, w; scale): w is the decay itself."""

    name = "GATED_LINEAR_ATTN"
    function = 1

    def step(self, s: Array, r: Array, k: Array, v: Array, w: Array, own: Sequence[Array], scale: float) -> tuple[Array, Array]:
        s = w[..., None] * s + k[..., None] * v[..., None, :]
        return scale * np.einsum("shk,shkv->shv", r, s), s

    def values(self, name: str, shape: Shape, rng: np.random.Generator) -> Array:
        """Decays from 0.5 to 1."""
        return rng.uniform(0.5, 1.0, shape) if name == "w" else super().values(name, shape, rng)

    def build_case(
        self, type: str = "f32", head_count: int = 32, head_size: int = 64, n_seq_tokens: int = 32, n_seqs: int = 32, seed: int = 43
    ) -> Case:
        """scale is 1 / sqrt(head_size)."""
        scale = float(np.float32(1.0 / math.sqrt(max(head_size, 1))))
        return self.plain_case(type, head_count, head_size, n_seq_tokens, n_seqs, seed, {"scale": scale})


@register
class RwkvWkv7(_Plain):
    """RWKV_WKV7(s, r, k, v, w, a, b F32 as v): w is the decay itself; a finds in the state what b replaces."""

    name = "RWKV_WKV7"
    function = 2
    own = ("a", "b")
    by_value = True
    ggml_nmse = 5e-3

    def step(self, s: Array, r: Array, k: Array, v: Array, w: Array, own: Sequence[Array], scale: float) -> tuple[Array, Array]:
        a, b = own
        seen = np.einsum("shk,shkv->shv", a, s)
        s = w[..., None] * s + k[..., None] * v[..., None, :] + b[..., None] * seen[..., None, :]
        return np.einsum("shk,shkv->shv", r, s), s

    def values(self, name: str, shape: Shape, rng: np.random.Generator) -> Array:
        """Decays from exp(-0.6) to 1. a and b are of length 0.7 and their directions any, so that the state stays bounded."""
        if name == "w":
            return np.exp(-0.6 * rng.uniform(0, 1, shape))
        return 0.7 * super().values("k", shape, rng) if name in self.own else super().values(name, shape, rng)


@register
class GatedDeltaNet(Recurrence):
    """GATED_DELTA_NET(s, r, k, v, w [..., 1 or dim], beta F32 [sequences, tokens, heads, 1]; scale, snapshots): w is the decay's
    logarithm, of a head or of each of its keys; beta is how much of the difference to what k finds in the state goes into it. r and k may
    have fewer heads: head h takes h % k_heads."""

    name = "GATED_DELTA_NET"
    function = 3
    own = ("beta",)
    by_value = True

    def step(self, s: Array, r: Array, k: Array, v: Array, w: Array, own: Sequence[Array], scale: float) -> tuple[Array, Array]:
        s = np.exp(w)[..., None] * s
        delta = own[0] * (v - np.einsum("shk,shkv->shv", k, s))
        s = s + k[..., None] * delta[..., None, :]
        return scale * np.einsum("shk,shkv->shv", r, s), s

    def own_shape(self, name: str, rows: Shape) -> Shape:
        return (*rows[:3], 1)

    def values(self, name: str, shape: Shape, rng: np.random.Generator) -> Array:
        """Queries are of length 1, too; logarithms of decays from -2 to 0, beta from 0 to 1."""
        if name == "w":
            return rng.uniform(-2, 0, shape)
        return rng.uniform(0, 1, shape) if name == "beta" else super().values("k" if name == "r" else name, shape, rng)

    def build_case(
        self,
        type: str = "f32",
        head_count: int = 4,
        head_size: int = 16,
        n_seq_tokens: int = 1,
        n_seqs: int = 1,
        v_repeat: int = 1,
        permuted: bool = False,
        kda: bool = False,
        K: int = 1,  # noqa: N803
        seed: int = 43,
    ) -> Case:
        """v_repeat: heads of v for one of k; permuted: in memory a head's tokens lie together; kda: a decay of each key; K: states after
        the last tokens that are kept, the newest first."""
        one_of_types(type, ("F32",))
        if v_repeat < 1 or K < 1:
            raise CaseLineError(f"{self.name}: v_repeat={v_repeat}, K={K}: expected both from 1")
        if n_seq_tokens < K:
            raise PlanError(f"K={K} with n_seq_tokens={n_seq_tokens}: states are kept of tokens that there are")
        scale = float(np.float32(1.0 / math.sqrt(max(head_size, 1))))
        shown = {
            "type": "f32",
            "head_count": head_count,
            "head_size": head_size,
            "n_seq_tokens": n_seq_tokens,
            "n_seqs": n_seqs,
            "v_repeat": v_repeat,
            "permuted": int(permuted),
            "kda": int(kda),
            "K": K,
        }
        return self.case_of(
            shown,
            head_count * v_repeat,
            head_size,
            n_seq_tokens,
            n_seqs,
            seed,
            params={"scale": scale, "snapshots": K},
            k_heads=head_count,
            w_width=head_size if kda else 1,
            order=(0, 2, 1, 3) if permuted else (),
        )

    def cases(self) -> Iterator[Case]:
        yield self.build_case("f32", 3, 16, 1, 2)
        yield self.build_case("f32", 2, 33, 5, 2, v_repeat=2, permuted=True, kda=True, K=3)

    def full_cases(self) -> Iterator[Case]:
        for dim, tokens, repeat, permuted, kda in product((1, 64, 128), (1, 70), (1, 3), (False, True), (False, True)):
            yield self.build_case("f32", 3, dim, tokens, 2, repeat, permuted, kda, min(tokens, 4))
        yield self.build_case("f32", 1, 128, 512, 1)
