"""MLA_ROPE_SET_ROWS (shaders/rope/latent.comp): what multi-head latent attention does between its products and attention, as one kernel.

absorbed  (q F32 [n, heads, nope + rot], kv F32 [n, rank + rot], norm F32 [rank], pos I32 [n], cache_k F16 [1, n_ctx, rank + rot]
          [, factors F32 [rot / 2]] [, rows I32 [n]]) -> q_pe F32 [n, heads, rot], cache_k
          The latent is RMS-normed and stored with the rotated key that all heads share.
legacy    (q, kv, kv_heads F32 [n, heads * (nope + dim_v)], pos, cache_k F16 [heads, n_ctx, nope + rot],
          cache_v F16 [heads, n_ctx, dim_v] [, factors] [, rows]) -> q_pe, cache_k, cache_v
          A head's K is its own part, then the shared key; its V comes behind its part of K.

params    those of ROPE (mode "normal", n_dims = rot), legacy, has_ff; absorbed: eps; type_k, type_v: of caches that are not F16;
          has_rows: rows of the caches that tokens are stored in, instead of pos
q_pe is the rotated part of Q; attention takes the rest from where it is (FLASH_ATTN_EXT with split_q).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.cache import cache_kinds, cache_params, stored_cache
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.copies.rows import cache_tolerance, staged_rows, store_staged_rows, stored_rows, stores_of
from vkback.ops.dispatch import MAX_GROUPS_X, Arg, Dispatch, ceil_div, pack_push
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS, Op, register
from vkback.ops.rope import angles as rope_angles
from vkback.ops.rope.rope import FREQUENCY, frequency_factors, own_angles
from vkback.ops.storage import nbytes
from vkback.ops.view import View
from vkback.ops.workgroup import reduction, workgroup_size
from vkback.shader import Variant


@register
class MlaRopeSetRows(Op):
    """See the module's text."""

    name = "MLA_ROPE_SET_ROWS"
    extra_keys = FREQUENCY

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        q, kv, third, pos, *rest = inputs
        rows = rest.pop() if params.get("has_rows") else pos
        caches, factors = rest[: 1 + params["legacy"]], rest[1 + params["legacy"] :]
        rot, n, heads = params["n_dims"], len(q), q.shape[1]
        rope = OPS["ROPE"]
        (q_pe,) = rope.reference([np.asarray(q, np.float64)[:, :, -rot:], pos, *factors], params)
        (key,) = rope.reference([np.asarray(kv, np.float64)[:, None, -rot:], pos, *factors], params)
        if params["legacy"]:
            heads_kv = np.asarray(third, np.float64).reshape(n, heads, -1)
            nope = q.shape[2] - rot
            key = np.concatenate([heads_kv[:, :, :nope], np.repeat(key, heads, axis=1)], axis=-1)
            return [q_pe, *stored_rows(params, rows, (key, heads_kv[:, :, nope:]), caches)]
        (latent,) = OPS["RMS_NORM_MUL"].reference([np.asarray(kv, np.float64)[:, :-rot], third], params)
        return [q_pe, *stored_rows(params, rows, (np.concatenate([latent[:, None], key], axis=-1),), caches)]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        q, kv, third, pos, cache_k, *rest = node.inputs
        q_pe, params = node.outputs[0], node.params
        own_rows = rest.pop() if params.get("has_rows") else None
        legacy, (n, heads, dim_k), rot = bool(params["legacy"]), q.shape, int(params["n_dims"])
        nope, rank, n_ctx = dim_k - rot, kv.shape[-1] - rot, cache_k.shape[1]
        values = rest[0].shape[2] if legacy else 0
        factors = rest[legacy:]
        fits = q_pe.shape == (n, heads, rot) and min(nope, rank) > 0
        fits = fits and cache_k.shape[2] == (dim_k if legacy else rank + rot)
        fits = fits and third.elements == (n * heads * (nope + values) if legacy else rank) and len(factors) == bool(params["has_ff"])
        if not fits or any(size % 2 for size in (nope, rot, rank, values)) or params["mode"] != "normal":
            raise PlanError(
                f"[{self.name}] {node.name}: {q}, {kv}, {third} into {cache_k}: expected a rotated part of {rot} values behind the rest of "
                "a head and of a row, even widths, and mode normal"
            )
        # A legacy cache holds whole keys and values of every head, which threads of this launch copy, too.
        pairs = heads * rot // 2 + (heads * (dim_k + values) // 2 if legacy else 0)
        choice = ctx.tuning.pick("rope", n=n, heads=heads, head_dim=dim_k)
        wg = workgroup_size(ctx.caps, max(choice["wg_size"], 128))
        defines, subgroup = reduction(ctx.caps, wg)
        defines |= {"HEADS": heads, "NOPE": nope, "ROPE_DIM": rot, "RANK": rank, "V_DIM": values}
        caches = [cache_k, *rest[:legacy]]
        rows = staged_rows(f"{q_pe.name}.stored", n, caches)
        defines |= {"LEGACY": int(legacy), "STORE_F32": int(rows is not caches)}
        angles = own_angles(node, ctx, pos, factors)
        read = (q, kv, third, own_rows or pos, angles.args[1].tensor)
        args = [*map(Arg, read), Arg(q_pe, "w"), *(Arg(t, "w") for t in rows)]
        gz = ceil_div(n, MAX_GROUPS_X)
        return [
            angles,
            Dispatch(
                Variant.of("rope/latent.comp", defines, subgroup_size=subgroup),
                tuple(args),
                pack_push(n, n_ctx, float(params.get("eps", 0.0))),
                # One more workgroup norms the latent row.
                (ceil_div(pairs, wg) + (not legacy), ceil_div(n, gz), gz),
                node.op,
                node.name,
                f"{wg} threads: {choice.source}",
                nbytes=2 * nbytes(q_pe) + nbytes(kv) + nbytes(third) + 2 * n * sum(c.shape[0] * c.shape[2] for c in caches),
                flops=6 * n * (heads * rot + kv.shape[-1]),
            ),
            *store_staged_rows(rows, own_rows or pos, caches, ctx),
        ]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return cache_tolerance(node)

    def cases(self) -> Iterator[Case]:
        for legacy in (False, True):
            yield self.build_case(1, 16, 128, 64, 512, 128, legacy)
            yield self.build_case(3, 3, 32, 16, 64, 32, legacy, freq_scale=1 / 40, ext_factor=1.0)
            yield self.build_case(2, 5, 6, 12, 14, 2, legacy, ff=True)
            yield self.build_case(3, 3, 32, 32, 64, 64, legacy, type_k="q4_0", type_v="q8_0")
            yield self.build_case(3, 3, 32, 32, 64, 64, legacy, type_k="f32", type_v="f32")
            yield self.build_case(3, 3, 32, 16, 64, 32, legacy, ff=True, rows=True)

    def full_cases(self) -> Iterator[Case]:
        for legacy, n, heads, (nope, rot, rank, dim_v), ff in product(
            (False, True), (1, 3, 33), (1, 16, 128), ((128, 64, 512, 128), (32, 16, 64, 32), (64, 32, 256, 96)), (False, True)
        ):
            yield self.build_case(n, heads, nope, rot, rank, dim_v, legacy, ff)

    def perf_cases(self) -> Iterator[Case]:
        for n in (1, 512):
            yield self.build_case(n, 16, 128, 64, 512, 128, False)

    def build_case(
        self,
        n: int,
        n_head: int,
        nope: int,
        rot: int,
        rank: int,
        dim_v: int,
        legacy: bool,
        ff: bool = False,
        seed: int = 17,
        type_k: str = "f16",
        type_v: str = "f16",
        rows: bool = False,
        **given: Any,
    ) -> Case:
        """Caches of 16 positions (more for more tokens) holding values already; tokens from position 3 on, the last of several being
        padding. rows: tokens are stored in other rows than their positions. given: of FREQUENCY."""
        params = {**rope_angles.DEFAULTS, "n_dims": rot, "eps": 1e-6, "legacy": legacy, "has_ff": ff, **given}
        kinds = cache_kinds(type_k, type_v, *((nope + rot, dim_v) if legacy else (rank + rot,)))
        params |= cache_params(kinds) | ({"has_rows": True} if rows else {})

        def make(rng: np.random.Generator) -> Problem:
            n_ctx = max(16, n + 4)
            q, kv = Tensor("q", "F32", (n, n_head, nope + rot), "input"), Tensor("kv", "F32", (n, rank + rot), "input")
            third = Tensor("kv_heads", "F32", (n, n_head * (nope + dim_v)), "input") if legacy else Tensor("norm", "F32", (rank,), "weight")
            caches = [Tensor("cache_k", kinds[0], (n_head, n_ctx, nope + rot) if legacy else (1, n_ctx, rank + rot), "state")]
            caches += [Tensor("cache_v", kinds[1], (n_head, n_ctx, dim_v), "state")] if legacy else []
            inputs = [q, kv, third, Tensor("pos", "I32", (n,), "input"), *caches]
            values: dict[str, Array] = {t.name: rng.uniform(-1, 1, t.shape).astype(np.float32) for t in (q, kv, third)}
            values |= {t.name: stored_cache(t.type, rng.uniform(-1, 1, t.shape).astype(np.float16)) for t in caches}
            values["pos"] = np.arange(3, 3 + n, dtype=np.int32)
            if n > 1:
                values["pos"][-1] = -1
            if ff:
                inputs.append(Tensor("factors", "F32", (rot // 2,), "weight"))
                values["factors"] = frequency_factors(rot, 1.0)
            if rows:
                inputs.append(Tensor("rows", "I32", (n,), "input"))
                values["rows"] = np.where(values["pos"] < 0, -1, n_ctx - 1 - 2 * np.arange(n)).astype(np.int32)
            return Problem(Node(self.name, tuple(inputs), (Tensor("q_pe", "F32", (n, n_head, rot)), *caches), params), values)

        shown: dict[str, Any] = {"n": n, "n_head": n_head, "nope": nope, "rot": rot, "rank": rank, "dim_v": dim_v}
        shown |= {"legacy": legacy, "ff": ff}
        shown |= {"type_k": type_k, "type_v": type_v} if (type_k, type_v) != ("f16", "f16") else {}
        shown |= {"rows": True} if rows else {}
        return Case(self.name, {**shown, **given, "seed": seed}, make, seed)

    def unfused(self, node: Node) -> list[Node]:
        q, kv, third, pos, *rest = node.inputs
        own_rows = rest.pop() if node.params.get("has_rows") else pos
        legacy, (n, heads, dim_k), rot = bool(node.params["legacy"]), q.shape, node.params["n_dims"]
        caches, factors = rest[: 1 + legacy], rest[1 + legacy :]
        nope, row = dim_k - rot, kv.shape[-1]
        rope = {key: node.params[key] for key in rope_angles.PARAMS}
        chain: list[Node] = []

        def emit(op: str, name: str, shape: tuple[int, ...], *inputs: Tensor, **params: Any) -> Tensor:
            result = Tensor(f"{node.name}.{name}", "F32", shape)
            chain.append(Node(op, inputs, (result,), params))
            return result

        q_part = emit("CONT", "q", (n, heads, rot), q, view=View(nope, (n, heads, rot), (heads * dim_k, dim_k, 1)))
        chain.append(Node("ROPE", (q_part, pos, *factors), node.outputs[:1], rope))
        key = emit("CONT", "key", (n, 1, rot), kv, view=View(row - rot, (n, 1, rot), (row, row, 1)))
        key = emit("ROPE", "key_rotated", (n, 1, rot), key, pos, *factors, **rope)
        if legacy:
            both = third.elements // (n * heads)
            shape = (n, heads, rot)
            repeated = Tensor(f"{node.name}.keys", "F32", shape)
            chain.append(Node("REPEAT", (key,), (repeated,), {"shape": shape}))
            own = emit("CONT", "own", (n, heads, nope), third, view=View(0, (n, heads, nope), (heads * both, both, 1)))
            of_v = (n, heads, both - nope)
            value = emit("CONT", "value", of_v, third, view=View(nope, of_v, (heads * both, both, 1)))
            stored = emit("CONCAT", "k", (n, heads, dim_k), own, repeated, axis=-1)
            return [*chain, *stores_of((stored, value), own_rows, caches)]
        latent = emit("CONT", "latent", (n, 1, row - rot), kv, view=View(0, (n, 1, row - rot), (row, row, 1)))
        latent = emit("RMS_NORM_MUL", "normed", (n, 1, row - rot), latent, third, eps=node.params["eps"])
        stored = emit("CONCAT", "k", (n, 1, row), latent, key, axis=-1)
        return [*chain, *stores_of((stored,), own_rows, caches)]
