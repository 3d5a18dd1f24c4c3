"""DSV4_HC_COMB, DSV4_HC_PRE and DSV4_HC_POST (shaders/hyper_connections): the streams that DeepSeek V4 has in place of one residual.

A model with manifold-constrained hyper-connections (arXiv 2512.24880) keeps n_hc streams. A block reads their weighted sum (PRE); what it
makes goes back into each with a weight, and a matrix whose rows and columns add up to 1 mixes the streams (COMB, POST).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.ggml_words import sized
from vkback.ops.glu import sigmoid
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, register

STREAMS = 4
"""Of DSV4_HC_COMB and of lines of DSV4_HC_POST, which do not say."""


def _case(op: str, shown: Mapping[str, Any], shapes: Mapping[str, Shape], out: Shape, params: Mapping[str, Any], seed: int) -> Case:
    """Inputs in +-1."""
    for shape in (*shapes.values(), out):
        sized(shape)

    def make(rng: np.random.Generator) -> Problem:
        inputs = tuple(Tensor(name, "F32", shape, "input") for name, shape in shapes.items())
        values: dict[str, Array] = {t.name: rng.uniform(-1, 1, t.shape).astype(np.float32) for t in inputs}
        return Problem(Node(op, inputs, (Tensor("y", "F32", out),), params), values)

    return Case(op, {**shown, "seed": seed}, make, seed)


@register
class HcComb(Op):
    """DSV4_HC_COMB(mixes F32 [n, 24], scale F32 [3], base F32 [24]; n_iter, eps) -> F32 [n, 4 (from), 4 (to)].

    Of mixes the last 16 values, times scale[2], plus base: softmax over the streams that are written, plus eps; then sums over the streams
    that are read become 1, and n_iter - 1 times sums over those that are written and again over those that are read. Each division has eps
    added to the sum.
    """

    name = "DSV4_HC_COMB"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        mixes, scale, base = (np.asarray(x, np.float64) for x in inputs)
        eps = float(np.float32(params["eps"]))
        x = (mixes[:, 2 * STREAMS :] * scale[2] + base[2 * STREAMS :]).reshape(-1, STREAMS, STREAMS)
        e = np.exp(x - x.max(axis=2, keepdims=True))
        m = e / e.sum(axis=2, keepdims=True) + eps
        m = m / (m.sum(axis=1, keepdims=True) + eps)
        for _ in range(params["n_iter"] - 1):
            m = m / (m.sum(axis=2, keepdims=True) + eps)
            m = m / (m.sum(axis=1, keepdims=True) + eps)
        return [m]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        mixes, scale, base = node.inputs
        y, n = node.outputs[0], mixes.shape[0]
        if (mixes.shape, scale.shape, base.shape, y.shape) != ((n, 24), (3,), (24,), (n, STREAMS, STREAMS)):
            raise PlanError(f"[{self.name}] {node.name}: {mixes}, {scale}, {base} to {y}: they do not fit")
        args = (*map(Arg, node.inputs), Arg(y, "w"))
        push = (n, int(node.params["n_iter"]), float(node.params["eps"]))
        return [by_threads(node, ctx, "hyper_connections/comb.comp", args, push, n, flops=64 * n * node.params["n_iter"])]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-12, 1e-5, "f32: exp within 3 + 2|x| ulp; each division, 2.5 ulp, makes good the errors of sums before it")

    def build_case(self, n_tokens: int = 1, n_iter: int = 20, eps: float = 1e-6, seed: int = 47) -> Case:
        if min(n_tokens, n_iter) < 1 or n_iter > 10_000 or not 0 <= eps <= 1:
            raise CaseLineError(f"n_tokens={n_tokens}, n_iter={n_iter}, eps={eps}: expected numbers from 1, and eps from 0 to 1")
        shown = {"n_tokens": n_tokens, "n_iter": n_iter, "eps": eps}
        shapes: dict[str, Shape] = {"mixes": (n_tokens, 24), "scale": (3,), "base": (24,)}
        return _case(self.name, shown, shapes, (n_tokens, STREAMS, STREAMS), {"n_iter": n_iter, "eps": eps}, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(1, 1)
        yield self.build_case(70, 20, 1e-3)


class _Streams(Op):
    """An op of streams.comp."""

    def launch(self, node: Node, ctx: LowerContext, function: int, args: Sequence[Arg], n_hc: int) -> list[Dispatch]:
        y = node.outputs[0]
        push = (y.elements, y.shape[-1], n_hc, float(node.params.get("scale", 1.0)))
        defines = {"FUNCTION": function, "GATED": int(bool(node.params.get("gated")))}
        return [by_threads(node, ctx, "hyper_connections/streams.comp", args, push, y.elements, defines, flops=2 * n_hc * y.elements)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(1e-11, 1e-5, "f32 sums of a product for each stream, sigmoid within 8 ulp")


@register
class HcPre(_Streams):
    """DSV4_HC_PRE(streams F32 [n, n_hc, n_embd], weights F32 [n, n_hc]) -> F32 [n, n_embd], the weighted sum of the streams; with gated
    and scale, weights being F32 as the streams: scale times the sum of streams times sigmoid(weights)."""

    name = "DSV4_HC_PRE"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x, w = (np.asarray(i, np.float64) for i in inputs)
        return [params["scale"] * (x * sigmoid(w)).sum(axis=1) if params.get("gated") else (x * w[..., None]).sum(axis=1)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, w = node.inputs
        y, gated = node.outputs[0], bool(node.params.get("gated"))
        if w.shape != (x.shape if gated else x.shape[:2]) or y.shape != (x.shape[0], x.shape[2]):
            raise PlanError(f"[{self.name}] {node.name}: {x}, {w} to {y}: they do not fit")
        return self.launch(node, ctx, int(gated), (Arg(x), Arg(w), Arg(y, "w")), x.shape[1])

    def build_case(self, n_embd: int = 128, n_hc: int = 4, n_tokens: int = 17, gated: bool = False, seed: int = 47) -> Case:
        """With gates scale is 1 / n_hc, so that y is a mean."""
        if min(n_embd, n_hc, n_tokens) < 1:
            raise CaseLineError(f"n_embd={n_embd}, n_hc={n_hc}, n_tokens={n_tokens}: expected all from 1")
        streams = (n_tokens, n_hc, n_embd)
        params = {"gated": True, "scale": float(np.float32(1 / n_hc))} if gated else {}
        shown = {"n_embd": n_embd, "n_hc": n_hc, "n_tokens": n_tokens, "gated": int(gated)}
        shapes = {"streams": streams, "weights": streams if gated else streams[:2]}
        return _case(self.name, shown, shapes, (n_tokens, n_embd), params, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(31, 3, 17)
        yield self.build_case(31, 4, 17, gated=True)

    def full_cases(self) -> Iterator[Case]:
        for n_embd, n_hc, n_tokens, gated in product((1, 128, 4096), (1, 2, 8), (1, 33), (False, True)):
            yield self.build_case(n_embd, n_hc, n_tokens, gated)


@register
class HcPost(_Streams):
    """DSV4_HC_POST(x F32 [n, n_embd], streams F32 [n, n_hc, n_embd], post F32 [n, n_hc] [, comb F32 [n, n_hc (from), n_hc (to)]]) ->
    streams: of each x times its weight, plus the streams mixed by comb, or the stream itself. With gated and scale the weights are
    2 sigmoid(scale * post)."""

    name = "DSV4_HC_POST"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        x, streams, post, *comb = (np.asarray(i, np.float64) for i in inputs)
        mixed = np.einsum("nsi,nsd->ndi", streams, comb[0]) if comb else streams
        if params.get("gated"):
            post = 2 * sigmoid(params["scale"] * post)
        return [x[:, None] * post[..., None] + mixed]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        x, streams, post, *comb = node.inputs
        y, (n, n_hc, n_embd) = node.outputs[0], streams.shape
        fits = x.shape == (n, n_embd) and post.shape == (n, n_hc) and y.shape == streams.shape
        if not fits or any(c.shape != (n, n_hc, n_hc) for c in comb):
            raise PlanError(f"[{self.name}] {node.name}: {', '.join(map(str, node.inputs))} to {y}: they do not fit")
        args = (Arg(streams), Arg(post), Arg(y, "w"), Arg(x), *map(Arg, comb))
        return self.launch(node, ctx, 2 if comb else 3, args, n_hc)

    def build_case(
        self, n_embd: int = 128, n_tokens: int = 17, identity: bool = False, gated: bool = False, n_hc: int = STREAMS, seed: int = 47
    ) -> Case:
        """identity: without comb; gated: scale is 1 / n_hc."""
        if min(n_embd, n_hc, n_tokens) < 1:
            raise CaseLineError(f"n_embd={n_embd}, n_hc={n_hc}, n_tokens={n_tokens}: expected all from 1")
        streams = (n_tokens, n_hc, n_embd)
        shapes = {"x": (n_tokens, n_embd), "streams": streams, "post": streams[:2]} | ({} if identity else {"comb": (n_tokens, n_hc, n_hc)})
        shown = {"n_embd": n_embd, "n_tokens": n_tokens, "identity": int(identity), "gated": int(gated)}
        shown |= {"n_hc": n_hc} if n_hc != STREAMS else {}
        params = {"gated": True, "scale": float(np.float32(1 / n_hc))} if gated else {}
        return _case(self.name, shown, shapes, streams, params, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case(31, 17, gated=True)
        yield self.build_case(31, 17, identity=True)

    def full_cases(self) -> Iterator[Case]:
        for n_embd, n_hc, n_tokens, identity in product((1, 128, 4096), (1, 4, 8), (1, 33), (False, True)):
            yield self.build_case(n_embd, n_tokens, identity, n_hc=n_hc)
            yield self.build_case(n_embd, n_tokens, identity, True, n_hc)
