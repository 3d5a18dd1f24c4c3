"""LINEAR_ROPE_SET_ROWS: the products of Q, K and V of few tokens, which turn Q and K and store K and V themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.copies.rows import cache_tolerance, set_rows
from vkback.ops.dispatch import Dispatch
from vkback.ops.ggml_words import type_word
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.choice import choice_of
from vkback.ops.matmul.gemm_lower import lower_node
from vkback.ops.matmul.gemm_problem import Heads
from vkback.ops.matmul.linear_cases import REGISTERS, known_type
from vkback.ops.matmul.linear_node import LinearNode, weight
from vkback.ops.op import OPS, Op, register
from vkback.ops.rope import angles as rope_angles
from vkback.ops.rope.rope import FREQUENCY, YARN, rotate_pairs


def stored_by_products(parts: Sequence[Node], store: Node, ctx: LowerContext) -> bool:
    """Whether the products `parts`, LINEAR that fill one packed tensor, can do what `store`, the QKV_ROPE_SET_ROWS of it, does: no norm of
    heads, F16 caches, weights decoded in registers; where pairs are not neighbours, whole heads in each product."""
    params = store.params
    caches = [t for t in store.inputs if t.kind == "state"]
    if params["has_norm"] or any(t.type != "F16" for t in caches):
        return False
    head_dim, pairs = store.inputs[2].shape[-1], params["n_dims"] // 2
    linears = [LinearNode.of(part) for part in parts]
    whole = all(node.m % head_dim == 0 == node.params.row0 % head_dim for node in linears)
    return (whole or not _neox(store)) and all(choice_of(node, ctx).stores_heads(head_dim, pairs) for node in linears)


def _neox(store: Node) -> bool:
    return bool(store.params["n_dims"]) and store.params["mode"] == "neox"


def fused(parts: Sequence[Node], store: Node, angles: Tensor | None) -> Node:
    """The node that stands for products and store. angles: those of `store`; None where it rotates nothing."""
    produced = {t.name for part in parts for t in part.outputs}
    read = {t.name: t for node in (*parts, store) for t in node.inputs if t.name not in produced}
    inputs = (*read.values(), *([angles] if angles is not None else []))
    return Node("LINEAR_ROPE_SET_ROWS", inputs, store.outputs, {"parts": tuple(parts), "store": store})


@register
class LinearRopeSetRows(Op):
    """LINEAR_ROPE_SET_ROWS(all that `parts` and `store` read [, angles F32 [n, n_dims / 2, 2]]) -> (q rotated F32 [n, heads, d], cache_k,
    cache_v).

    params  parts: the LINEAR nodes that fill one packed tensor with the heads of Q, K and V; store: the QKV_ROPE_SET_ROWS of it. The
            angles (ROPE_ANGLES) are its own, where its n_dims is not 0
    Falls back to the original products and QKV_ROPE_SET_ROWS if the kernel cannot fuse them.
    """

    name = "LINEAR_ROPE_SET_ROWS"
    extra_keys = FREQUENCY
    weight_type = "type_a"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        """Rotated by the angles, as the kernel does it."""
        parts, store = params["parts"], params["store"]
        n_dims, heads, kv, dim = (store.params[key] for key in ("n_dims", "n_head", "n_head_kv", "head_dim"))
        values = dict(zip(_read(params), inputs[: len(inputs) - bool(n_dims)], strict=True))
        rows = [OPS["LINEAR"].reference([values[t.name] for t in part.inputs], part.params)[0] for part in parts]
        q, k, v = np.split(np.concatenate(rows, axis=-1).reshape(len(rows[0]), heads + 2 * kv, dim), (heads, heads + kv), axis=1)
        if n_dims:
            cos, sin = np.moveaxis(np.asarray(inputs[-1], np.float64), -1, 0)
            q, k = (rotate_pairs(x, cos, sin, store.params["mode"]) for x in (q, k))
        pos, *caches = (values[t.name] for t in store.inputs[1:4])
        return [q, *(set_rows(x, pos, cache) for x, cache in zip((k, v), caches, strict=True))]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        parts, store = node.params["parts"], node.params["store"]
        if not stored_by_products(parts, store, ctx):
            return [d for n in self.unfused(node) for d in OPS[n.op].lower(n, ctx)]
        q, cache_k, cache_v = node.outputs
        angles = node.inputs[-1] if store.params["n_dims"] else None
        heads = Heads(q, (cache_k, cache_v), store.inputs[1], angles, neox=_neox(store))
        found = []
        for part in parts:
            gemv = LinearNode.of(part)
            found += lower_node(gemv, choice_of(gemv, ctx), ctx, heads)
        return found

    def unfused(self, node: Node) -> list[Node]:
        return [*node.params["parts"], node.params["store"]]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        """Turning adds nothing to speak of."""
        products = [OPS["LINEAR"].tolerance(part, ctx) for part in node.params["parts"]]
        return max(*products, cache_tolerance(node.params["store"]), key=lambda t: t.nmse)

    def cases(self) -> Iterator[Case]:
        yield self.build_case("F16", 5, 4, 2, 32, 64).where(**REGISTERS)
        yield self.build_case("F16", 5, 3, 1, 32, 64, split=True, bias=True, n_dims=16).where(**REGISTERS)
        yield self.build_case("F16", 5, 4, 2, 32, 64, n_dims=-1).where(sync="sentinel", **REGISTERS)
        yield self.build_case("F16", 5, 3, 1, 32, 64, mode="neox").where(**REGISTERS)
        yield self.build_case("F16", 5, 4, 2, 32, 64, split=True, bias=True, n_dims=16, mode="neox").where(**REGISTERS)

    def full_cases(self) -> Iterator[Case]:
        sizes = ((4, 2, 64, 256), (7, 1, 80, 768), (8, 8, 128, 512))
        for quant, n, split, (heads, kv, dim, k) in product(("Q4_K", "Q6_K", "Q8_0", "MXFP4"), (2, 9, 16), (False, True), sizes):
            case = self.build_case(quant, n, heads, kv, dim, k, split=split, bias=n == 9, n_dims=32 if n == 2 else 0)
            yield from (case, case.where(**REGISTERS))  # as the device's tables have it, too
        for quant, n, (heads, kv, dim, k) in product(("Q4_K", "MXFP4"), (2, 9, 16), sizes):
            neox = self.build_case(quant, n, heads, kv, dim, k, split=n == 2, bias=n == 9, n_dims=32 if n == 2 else 0, mode="neox")
            yield from (neox, neox.where(**REGISTERS))
        for yarn in YARN[1::3]:
            yield self.build_case("Q8_0", 3, 4, 2, 128, 64, **yarn).where(**REGISTERS)

    def build_case(
        self,
        type_a: str,
        n: int,
        n_head: int,
        n_head_kv: int,
        head_dim: int,
        k: int,
        split: bool = False,
        bias: bool = False,
        n_dims: int = 0,
        mode: str = "normal",
        seed: int = 19,
        **given: Any,
    ) -> Case:
        """Caches of 16 positions holding values already; tokens from position 1 on, the last of several being padding and the one before it
        behind the caches' end.

        split   the rows of Q are a product, those of K and V another
        n_dims  0: the head size, -1: nothing is rotated
        mode    of RoPE: "normal" or "neox"
        given   of FREQUENCY
        """
        quant = known_type(type_a)
        rope_angles.checked_mode(mode)
        q_rows, kv_rows = n_head * head_dim, 2 * n_head_kv * head_dim
        rows = [q_rows, kv_rows] if split else [q_rows + kv_rows]
        rotated = max(n_dims or head_dim, 0)

        def make(rng: np.random.Generator) -> Problem:
            x, pos = Tensor("x", "F32", (n, k), "input"), Tensor("pos", "I32", (n,), "input")
            packed = Tensor("qkv", "F32", (n, sum(rows)))
            caches = tuple(Tensor(f"cache_{c}", "F16", (n_head_kv, 16, head_dim), "state") for c in "kv")
            values: dict[str, Array] = {"x": rng.uniform(-1, 1, x.shape).astype(np.float32)}
            values |= {t.name: rng.uniform(-1, 1, t.shape).astype(np.float16) for t in caches}
            values["pos"] = np.arange(1, 1 + n, dtype=np.int32)
            if n > 2:
                values["pos"][-2:] = 16, -1
            parts = []
            for i, m in enumerate(rows):
                inputs = [weight(f"w{i}", quant, (m, k)), x]
                values[f"w{i}"] = quants.random_blocks(quant, m, k, rng, std=0.5)
                if bias:
                    inputs.append(Tensor(f"bias{i}", "F32", (m,), "weight"))
                    values[f"bias{i}"] = rng.uniform(-1, 1, m).astype(np.float32)
                roles = ("w", "x", "bias")[: len(inputs)]
                parts.append(Node("LINEAR", tuple(inputs), (packed,), {"roles": roles, "row0": sum(rows[:i]), "rows_total": sum(rows)}))
            params = {**rope_angles.DEFAULTS, **given, "mode": mode, "n_dims": rotated, "has_norm": False, "has_ff": False, "packed": True}
            params |= {"n_head": n_head, "n_head_kv": n_head_kv, "head_dim": head_dim}
            outputs = (Tensor("q_out", "F32", (n, n_head, head_dim)), *caches)
            store = Node("QKV_ROPE_SET_ROWS", (packed, pos, *caches), outputs, params)
            angles = Tensor("angles", "F32", (n, rotated // 2, 2), "input") if rotated else None
            if angles:
                values["angles"] = OPS["ROPE_ANGLES"].reference([values["pos"]], params)[0].astype(np.float32)
            return Problem(fused(parts, store, angles), values)

        shown: dict[str, Any] = {"type_a": type_word(quant), "n": n, "n_head": n_head, "n_head_kv": n_head_kv, "head_dim": head_dim, "k": k}
        shown |= {"split": split, "bias": bias, "n_dims": n_dims, **({"mode": mode} if mode != "normal" else {}), **given}
        return Case(self.name, {**shown, "seed": seed}, make, seed)


def _read(params: Mapping[str, Any]) -> list[str]:
    """Names of what parts and store read, in the order of the node's inputs."""
    return [t.name for t in fused(params["parts"], params["store"], None).inputs]
