"""The cases of the suite: the quick set is what the ops name themselves, the full set crosses the parameters of each family.

Kernels are built for types, columns and k, not for m, tokens or experts, so the sets vary the latter freely and the former with care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import vkback.ops  # noqa: F401  registers every op
from vkback import quants
from vkback.harness.factories import (
    attention_case,
    batched_product_case,
    fused_product_case,
    get_rows_case,
    make_case,
    product_case,
    routed_case,
)
from vkback.ops.attention import AttnDecode
from vkback.ops.base import OPS, Case
from vkback.ops.elementwise import BINARY, UNARY
from vkback.ops.glu import GLU
from vkback.ops.mat_vec import QUANTS
from vkback.ops.mat_vec_node import INT_QUANTS
from vkback.ops.sample import Params, Sample

Cases = Iterator[Case]

BASE = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "MXFP4", "NVFP4", "IQ2_XXS")
"""Types that get the whole cross product of the fused families; the others a part of it."""

FLOAT: dict[str, Any] = {"act": "f32"}
INT: dict[str, Any] = {"type_b": "q8_1", "act": "q8_1"}
INT_FROM_F32: dict[str, Any] = {"act": "q8_1"}


HUGE = 1e5
"""Activations beyond what F16 holds: none may pass through one."""


def block(quant: str) -> int:
    """Weights of a block: k must be a multiple of it."""
    return quants.QUANTS[quant].block_values


def paths(quant: str) -> list[dict[str, Any]]:
    """Ways to compute a product of this type, as parameters of a case: floats, and the integer dot of activations that come as Q8_1."""
    return [FLOAT, INT] if quant in INT_QUANTS else [FLOAT]


def _products() -> Cases:
    for quant in QUANTS:
        unit = block(quant)
        for path in paths(quant):
            for n, m in product(range(1, 17), (16, 67)):
                yield product_case(quant, m, n, 256, **path)
            for n in (17, 33):
                yield product_case(quant, 16, n, 256, **path)
            for m in (1, 2, 3, 5, 31, 33, 127, 129):
                yield product_case(quant, m, 1, 256, **path)
            for n in (2, 5, 9, 16, 64, 512):
                yield product_case(quant, 1, n, 256, **path)
            for k, n in product((1792, 2048, 2304, 3840, 4096, 4352), (1, 8)):
                yield product_case(quant, 33, n, k, **path)
            for k, n in product((unit, 3 * unit), (1, 3)):
                yield product_case(quant, 17, n, -(-k // 32) * 32 if quant in ("F32", "F16", "BF16") else k, **path)
            if 2880 % unit == 0:
                for n in (1, 4, 8):
                    yield product_case(quant, 131, n, 2880, **path)
            yield product_case(quant, 64, 1, 14336, **path)
            for n in (1, 3):
                yield product_case(quant, 33, n, 256, amax=HUGE, **path)
        for n in (1, 8):
            yield product_case(quant, 1023, n, 4096)
        if quant in INT_QUANTS:
            for n, k in product((1, 4, 9), (256, 2048)):
                yield product_case(quant, 35, n, k, **INT_FROM_F32)
            for n in (1, 3):
                yield product_case(quant, 35, n, 256, type_b="q8_1", act="f32")
    for quant, k, n in product(("F32", "F16", "BF16"), (1, 2, 31, 33, 63, 65, 80, 588), (1, 2, 9)):
        yield product_case(quant, 17, n, k)
    for m in (6271, 6272, 6273):
        yield product_case("Q4_K", m, 1, 256)
    for quant in ("Q8_0", "Q4_0"):
        yield product_case(quant, 1_100_003, 1, 32)  # more tiles than workgroups along one axis


ORDERS = ((0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3))
"""Of four axes, rows and batches exchanged; the values of a row stay together."""
TRANSPOSED = ((0, 1, 3, 2), (3, 2, 1, 0))
"""Here they do not."""


def _batches() -> Cases:
    """As attention multiplies by its cache, and more: every type in a few shapes, base types in many."""
    repeats = ((1, 1), (1, 2), (2, 1), (2, 2))
    for quant in QUANTS:
        for path in paths(quant):
            for bs, nr, n in product(((1, 1), (1, 3), (2, 3)), repeats, (1, 4, 8, 16) if quant in BASE else (2,)):
                yield batched_product_case(quant, 16, n, 256, bs, nr, **path)
        for order, n in product(ORDERS, (1, 8, 16) if quant in BASE else (2,)):
            yield batched_product_case(quant, 16, n, 256, (3, 2), (1, 1), order=order)
        for n, k in product((1, 4), (256, 768)):
            yield batched_product_case(quant, 19, n, k, (1, 2), (1, 2), gap=256)
    for quant, x_type, n in product(("F32", "F16"), ("f32", "f16"), (1, 2, 8)):
        for m, k, nr in product((127, 128, 129, 1056), (64, 65, 128), ((1, 1), (1, 4))):
            if m < 1000 or k == 128:
                yield batched_product_case(quant, m, n, k, (1, 2), nr, plain=True, type_b=x_type)
        for order, gap, k in product((*ORDERS, *TRANSPOSED), (0, 64), (32, 80)):
            yield batched_product_case(quant, 40, n, k, (2, 3), (1, 2), order=order, gap=gap, plain=True, type_b=x_type)
    for quant in BASE:
        yield batched_product_case(quant, 8, 2, 256, (1, 1536), (1, 1))


def _routed() -> Cases:
    pairs = ((4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8), (32, 4), (128, 8))
    for quant in QUANTS:
        for path in paths(quant):
            for (experts, used), (n, shared) in product(pairs, ((1, True), (4, False), (17, True))):
                yield routed_case(quant, experts, used, 32, n, 256, shared=shared, **path)
            for ids, n in product(("one", "last", "repeat"), (5, 32)):
                yield routed_case(quant, 8, 2, 32, n, 256, shared=True, ids=ids, **path)
            for m in (1, 5, 67):
                yield routed_case(quant, 8, 2, m, 3, 256, shared=False, **path)
            for k, n in product((768, 2048, 2304, 4096), (1, 5)):
                yield routed_case(quant, 8, 2, 33, n, k, shared=True, **path)
            yield routed_case(quant, 4, 2, 32, 129, 256, shared=True, **path)
            yield routed_case(quant, 512, 8, 8, 2, 256, shared=True, **path)
            if 2880 % block(quant) == 0:
                yield routed_case(quant, 32, 4, 96, 1, 2880, shared=True, **path)
                yield routed_case(quant, 32, 4, 96, 4, 2880, shared=False, **path)
        if quant in INT_QUANTS:
            for n in (1, 4):
                yield routed_case(quant, 8, 4, 40, n, 256, shared=n == 1, **INT_FROM_F32)
        for path in paths(quant):
            yield routed_case(quant, 8, 2, 32, 3, 256, shared=False, amax=HUGE, **path)
    for quant, k, n in product(("F32", "F16", "BF16"), (1, 31, 63, 65, 80), (1, 5)):
        yield routed_case(quant, 8, 2, 33, n, k, shared=n == 1)


PLAIN_FUSIONS: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("residual",), False), (("bias",), False), (("bias", "residual"), False), ((), True), (("bias",), True),
)  # fmt: skip
EXPERT_FUSIONS: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("ids",), True), (("bias", "ids"), False), (("bias", "ids"), True), (("ids", "expert_weights"), False),
    (("residual", "ids", "expert_weights"), False), (("bias", "residual", "ids", "expert_weights"), False),
)  # fmt: skip
NORM_FUSIONS: tuple[tuple[tuple[str, ...], bool], ...] = ((("norm",), False), (("norm",), True), (("norm", "bias"), False))
"""Roles beside w and x, and whether there is a GLU."""
CHOICE_FUSIONS: tuple[tuple[tuple[str, ...], str, bool], ...] = (
    (("logits",), "F32", False), (("norm", "logits"), "Q8_1", False), (("norm", "bias", "logits"), "F32", True),
    (("bias", "logits"), "Q8_1", True),
)  # fmt: skip
"""Roles, type of the output, and whether the GLU is SWIGLU_OAI."""


def _fused_products() -> Cases:
    for quant in QUANTS:
        for act in ("f32", "q8_1") if quant in INT_QUANTS else ("f32",):
            for (roles, glu), n in product((*PLAIN_FUSIONS, *EXPERT_FUSIONS), (1, 2, 4, 8) if quant in BASE else (1, 4)):
                yield fused_product_case(quant, 100, n, 256, roles, glu=glu, act=act)
            for m in (2, 4, 8):  # many tokens: a few values may be small by chance, and their NMSE large
                yield fused_product_case(quant, m, 16, 256, ("bias",), glu=True, act=act)
            for roles, glu in NORM_FUSIONS:
                yield fused_product_case(quant, 130, 1, 512, roles, glu=glu, act=act)
            for roles, n in product(((), ("ids",)), (1, 3)):
                yield fused_product_case(quant, 128, n, 256, roles, glu=True, out="Q8_1", act=act)
            for roles, n in product(((), ("bias",), ("bias", "ids")), (1, 3)):
                yield fused_product_case(quant, 100, n, 256, roles, glu=True, oai=True, act=act)
            for n in (1, 3):
                yield fused_product_case(quant, 96, n, 256, ("residual",), out="Q8_1", act=act)
                yield fused_product_case(quant, 101, n, 256, ("bias",), split=(64, 32, 5), act=act)
            yield fused_product_case(quant, 128, 1, 512, ("norm",), glu=True, out="Q8_1", act=act)
            yield fused_product_case(quant, 64, 2, 256, ("ids", "expert_weights"), experts=64, used=8, act=act)


def _choosing_products() -> Cases:
    """Products that choose their experts, by as many as there are models of; of few rows, since every expert has them."""
    for quant in QUANTS:
        for act in ("f32", "q8_1") if quant in INT_QUANTS else ("f32",):
            for roles, out, oai in CHOICE_FUSIONS:
                yield fused_product_case(quant, 64, 1, 256, roles, glu=True, oai=oai, out=out, experts=20, used=3, act=act)
    for (experts, used), (gating, norm_w), ties in product(
        ((8, 2), (8, 8), (16, 1), (32, 4), (60, 4), (128, 8), (256, 8), (512, 10)),
        (("softmax", False), ("softmax", True), ("softmax_weight", False), ("sigmoid", False), ("sigmoid", True)), (False, True),
    ):  # fmt: skip
        yield fused_product_case(
            "Q4_K", 16, 1, 256, ("norm", "logits"), glu=True, experts=experts, used=used, act="f32", gating=gating, norm_w=norm_w, ties=ties
        )


def _rows() -> Cases:
    for quant in QUANTS:
        for k, (r, ids) in product((256, 768, 4096), ((1, "spread"), (7, "spread"), (33, "one"), (8, "outside"))):
            yield get_rows_case(quant, 100, k, r, ids=ids)
        if quant in ("F32", "F16", "BF16"):
            for k in (1, 33, 70, 80):
                yield get_rows_case(quant, 9, k, 4)
    for k, (r, ids) in product((1, 32, 33, 70, 256, 4096), ((1, "spread"), (7, "spread"), (8, "outside"))):
        for kind in ("F32", "F16", "I32"):
            yield get_rows_case(kind, 100, k, r, ids=ids, kind="input")
    for heads, dim, pos in product(
        (1, 2, 8), (2, 6, 40, 64, 80, 128, 256), ((0,), (15,), (3, 4, 5), (9, -1, 2), (16, 1), tuple(range(15, -1, -1)))
    ):
        yield make_case("SET_ROWS", {"ne": (len(pos), heads, dim), "pos": pos})
    for types, dim, pos in product((("F32", "F32"), ("F16", "F16"), ("F16", "F32")), (2, 64, 80, 128), ((15,), (9, -1, 2), (16, 1))):
        yield make_case("SET_ROWS", {"ne": (len(pos), 2, dim), "pos": pos, "type_src": types[0], "type_dst": types[1]})


def _copies() -> Cases:
    shapes = ((2,), (1, 4096), (3, 5, 32), (5, 7, 11, 2), (128, 2, 2, 2), (7, 6), (1, 64, 1, 3), (2, 3, 1000), (33, 34), (4, 262144))
    for op, shape, a, b in product(("CPY", "CONT"), shapes, ("F32", "F16"), ("F32", "F16")):
        yield make_case(op, {"ne": shape, "type_src": a, "type_dst": b})
    for op, shape in product(("CPY", "CONT"), ((1,), (3, 5, 7), (5, 7, 11, 13))):
        yield make_case(op, {"ne": shape, "type_src": "F32", "type_dst": "F32"})
    for shape in (*shapes, (1,), (3, 5, 7)):
        yield make_case("CPY", {"ne": shape, "type_src": "I32", "type_dst": "I32"})
    types = (("F32", "F32"), ("F32", "F16"), ("F16", "F32"), ("F16", "F16"), ("I32", "I32"))
    for (a, b), shape, order in product(types, ((2, 3, 4, 32), (6, 8, 10, 12), (3, 5, 7, 32), (10, 10, 10, 2)), (*ORDERS, *TRANSPOSED)):
        lies = {"ne": shape, "type_src": a, "type_dst": b}
        yield make_case("CPY", {**lies, "order": order})
        yield make_case("CPY", {**lies, "order": order, "gap": 6})
        yield make_case("CONT", {**lies, "order": order})
    for (a, b), shape, to in product(types, ((3, 5, 32), (6, 8, 10)), ((0, 1, 2), (1, 0, 2))):
        yield make_case("CPY", {"ne": shape, "type_src": a, "type_dst": b, "to": to, "gap": 4})
        yield make_case("CPY", {"ne": shape, "type_src": a, "type_dst": b, "order": (0, 2, 1), "to": to, "gap": 4})
    for quant, target in product(QUANTS, ("F32", "F16")):
        for shape in ((1, 256), (5, 768)):
            yield make_case("CPY", {"ne": shape, "type_src": quant, "type_dst": target, "weight": 1})
        yield make_case("CPY", {"ne": (2, 3, 256), "type_src": quant, "type_dst": target, "order": (1, 0, 2), "gap": 512, "weight": 1})
    repeats = ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 3), (2, 2, 2, 2), (1, 1, 1, 5))
    for small, times in product(((5, 4, 3), (1, 33), (7,), (2, 3, 5, 10)), repeats):
        big = tuple(s * t for s, t in zip(small, times[4 - len(small) :], strict=True))
        for type in ("F32", "I32"):
            yield make_case("REPEAT", {"ne": ("x".join(map(str, small)),), "out": big, "type": type, "shape": big})
    for base, axis, other in product(((11, 12, 13, 14), (3, 64), (5,)), (0, 1, 2, 3), (1, 7, 12)):
        if axis < len(base):
            second = tuple(other if i == axis else s for i, s in enumerate(base))
            out = tuple(s + other if i == axis else s for i, s in enumerate(base))
            both = "x".join(map(str, base)), "x".join(map(str, second))
            for type in ("F32", "I32"):
                yield make_case("CONCAT", {"ne": both, "out": out, "type": type, "axis": axis})
    for base, grow in product(((5,), (3, 512), (2, 3, 33), (5, 7, 11, 13)), ((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 3, 1), (1, 2, 3, 4))):
        big = tuple(s + g for s, g in zip(base, grow[4 - len(base) :], strict=True))
        yield make_case("PAD", {"ne": ("x".join(map(str, base)),), "out": big, "shape": big})
    four = ((0, 2, 1, 3), (0, 1, 3, 2), (0, 3, 2, 1), (3, 2, 1, 0), (1, 0, 2, 3), (2, 3, 0, 1), (0, 1, 2, 3))
    orders = [*product(((2, 3, 4, 32), (5, 7, 11, 13), (1, 64, 3, 8)), four), *product(((33, 65), (1, 128), (512, 4)), ((1, 0), (0, 1)))]
    for shape, axes in orders:
        yield make_case("PERMUTE", {"ne": ("x".join(map(str, shape)),), "out": tuple(shape[a] for a in axes), "axes": axes})


YARN: tuple[dict[str, float], ...] = (
    {}, {"freq_base": 1e6}, {"freq_scale": 1.4245}, {"attn_factor": 1.4245}, {"freq_scale": 1.4245, "attn_factor": 1.4245},
    {"ext_factor": 0.7465, "freq_scale": 1.4245}, {"ext_factor": 0.7465, "freq_scale": 1.4245, "attn_factor": 1.4245},
    {"freq_base": 150000.0, "freq_scale": 0.03125, "ext_factor": 1.0},
)  # fmt: skip


def _ropes() -> Cases:
    for mode in ("normal", "neox"):
        for (dim, n_dims), heads, n in product(
            ((64, 64), (64, 32), (80, 80), (80, 20), (96, 96), (128, 128), (128, 64), (256, 256), (256, 64)), (1, 8, 32), (1, 3)
        ):
            yield make_case("ROPE", {"mode": mode, "ne": (n, heads, dim), "n_dims": n_dims, "pos": 30})
        for yarn, fast, pos in product(YARN, (0, 1.0, 1.08), (0, 511, 131069)):
            yield make_case("ROPE", {"mode": mode, "ne": (2, 4, 128), "n_dims": 128, "pos": pos, "ff": fast, **yarn})
        for n, packed, norm, ff, (heads, kv, dim) in product(
            (1, 3), (0, 1), (0, 1), (0, 1), ((4, 2, 64), (7, 1, 64), (8, 8, 80), (12, 2, 96), (32, 8, 128), (4, 1, 256))
        ):
            shape = {"n": n, "n_head": heads, "n_head_kv": kv, "head_dim": dim}
            if dim in (64, 128) or norm == ff:
                yield make_case("QKV_ROPE_SET_ROWS", {"mode": mode, **shape, "packed": packed, "norm": norm, "ff": ff})
    for positions, n_dims, fast, yarn in product(((0,), (4095,), (131072, 3, -1)), (32, 64, 128, 256), (0, 1), YARN):
        yield make_case("ROPE_ANGLES", {"pos": positions, "n_dims": n_dims, "ff": fast, **yarn})


WIDTHS = (1, 2, 31, 32, 33, 64, 100, 511, 512, 1023, 1024, 1025, 2048, 2880, 4096, 5120, 8192, 14336, 16896)


def _norms() -> Cases:
    for op in ("RMS_NORM", "NORM", "RMS_NORM_MUL", "ADD_RMS_NORM_MUL"):
        for dim, rows in product(WIDTHS, (1, 2, 5, 33)):
            if rows * dim <= 70000 and not (op == "NORM" and dim == 1):  # the variance of one value is nothing but rounding
                yield make_case(op, {"ne": (rows, dim)})
        for eps in (1e-12, 1e-5, 0.1, 10.0):
            yield make_case(op, {"ne": (2, 3, 64), "eps": eps})
        if op.endswith("_MUL"):
            for dim, rows in product(WIDTHS[2:], (1, 2)):
                yield make_case(op, {"ne": (rows, dim), "out": "Q8_1"})
    for shape in ((1, 1), (1, 32), (2, 33), (4, 1, 128), (7, 1024), (3, 4096), (2, 16, 1000), (1, 151936), (1, 643251), (5, 4, 3, 70)):
        for mask in (0, 1):
            yield make_case("SOFT_MAX", {"ne": shape, "mask": mask})
        yield make_case("SUM_ROWS", {"ne": shape})
    for shape in ((1, 32), (1, 64), (1, 4096), (1, 14336), (17, 64), (2, 2880), (3, 33), (5, 1), (2, 3, 4, 96), (16, 4096), (70000, 1)):
        yield make_case("QUANTIZE_Q8_1", {"ne": shape})


def _attentions() -> Cases:
    for hd, ratio, kv, nb in product((64, 128), (1, 4, 8, 12, 16, 20, 32), (113, 512, 1024), (1, 3, 32, 75)):
        yield attention_case(ratio, 1, hd, kv, nb)
    for hd, ratio, kv, nb in product((40, 72, 80, 96, 192, 256), (1, 4, 8, 16), (113, 1024), (1, 32)):
        yield attention_case(ratio, 1, hd, kv, nb)
    for hd in (320, 512, 576):
        for ratio, kv, nb in ((1, 113, 1), (4, 113, 1), (16, 1024, 1), (4, 113, 3)):
            yield attention_case(ratio, 1, hd, kv, nb)
    for hd, ratio, nb in product((64, 128, 256), (1, 4, 7), (1, 3, 32)):
        yield attention_case(4 * ratio, 4, hd, 513, nb)
    for hd, ratio, kv, nb in product((32, 64, 96, 128, 192, 256), (1, 8), (113, 1024), (1, 3, 32)):
        yield attention_case(2 * ratio, 2, hd, kv, nb, "Q8_1")
    for hd, (window, sinks), kv, nb, y in product(
        (64, 128), ((0, True), (128, False), (128, True), (16, True)), (113, 512), (1, 3, 32), ("F32", "Q8_1")
    ):
        yield attention_case(8, 2, hd, kv, nb, y, window=window, sinks=sinks)
    for hd, kv, nb in ((128, 8192, 1), (64, 8192, 2), (128, 32768, 1), (128, 16, 16), (64, 1, 1), (65 * 8, 64, 1)):
        yield attention_case(8, 2, hd, kv, nb)
    decode = AttnDecode()
    for mode, (heads, kv, hd), (n_ctx, pos) in product(
        ("normal", "neox"), ((4, 1, 64), (7, 1, 64), (8, 8, 80), (12, 2, 96), (32, 8, 128), (16, 1, 128), (4, 1, 256)),
        ((64, 0), (113, 112), (1024, 511), (4096, 4095)),
    ):  # fmt: skip
        yield decode.case(heads, kv, hd, n_ctx, pos, mode, False, False, "F32", seed=1)
    for mode, norm, ff, y, sinks, window in product(
        ("normal", "neox"), (False, True), (False, True), ("F32", "Q8_1"), (False, True), (0, 128)
    ):
        yield decode.case(8, 2, 64, 600, 300, mode, norm, ff, y, seed=2, sinks=sinks, window=window)


def _values() -> Cases:
    shapes = ((1,), (3,), (1, 33), (7, 1), (1, 4096), (128, 2, 2, 2), (5, 7, 11, 13), (2, 14336), (3, 70001))
    for op, shape in product(UNARY, shapes):
        yield make_case(op, {"ne": shape})
    for shape in ((10, 10), (5, 7, 11, 13)):
        for scale, bias in ((2.0, 0.0), (2.0, 1.0), (0.0, -1.0), (-1e-3, 0.0)):
            yield make_case("SCALE", {"ne": shape, "scale": scale, "bias": bias})
        for least, most in ((-0.25, 0.25), (0.0, 4.0), (1.0, 1.0)):
            yield make_case("CLAMP", {"ne": shape, "min": least, "max": most})
        for slope in (0.0, 1.0, -0.5):
            yield make_case("LEAKY_RELU", {"ne": shape, "negative_slope": slope})
    times = (
        (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (2, 2, 1, 1), (1, 2, 2, 1), (1, 1, 2, 2), (2, 1, 1, 2), (2, 2, 2, 2),
    )  # fmt: skip
    for op, small, repeat in product(BINARY, ((3, 4, 5, 10), (1, 2, 16, 32)), times):
        yield make_case(op, {"ne": tuple(s * t for s, t in zip(small, repeat, strict=True)), "b": small})
    pairs = (
        ((1, 1, 8, 1), (1, 1, 8, 1)), ((16, 10, 9), (16, 10, 9)), ((16, 10, 9), (10, 9)), ((16, 10, 9), (9,)), ((16, 10, 9), (1,)),
        ((16, 10, 8), (16, 10, 1)), ((16, 10, 9), (16, 1, 1)), ((4, 16, 10, 32), (16, 1, 1)), ((5, 7, 11, 13), (7, 11, 13)),
        ((5, 7, 11, 13), (1, 1, 1, 13)), ((5, 7, 11, 13), (1, 7, 1, 1)), ((1, 1), (1, 1)), ((1, 2880), (2880,)), ((33, 4096), (4096,)),
        ((1000, 13), (13,)), ((4100, 13), (4100, 13)), ((2, 3, 70001), (1,)), ((8_400_000,), (1,)), ((8_400_001,), (1,)),
    )  # fmt: skip
    for op, (a, b) in product(BINARY, pairs):
        yield make_case(op, {"ne": a, "b": b})
    for op, shape in product(GLU, ((1,), (1, 33), (5, 7, 11, 13), (128, 2, 2, 2), (1, 14336), (3, 2880), (33, 768), (2, 96))):
        forms: tuple[dict[str, Any], ...] = ({}, {"packed": 1}, {"packed": 1, "swapped": 1}, {"size": 60.0}, {"out": "Q8_1"})
        for form in forms:
            yield make_case(op, {"ne": shape, **form})


def _choices() -> Cases:
    for n, vocab, kind in product((1, 2, 7), (1, 2, 31, 33, 1000, 32000, 151936), ("normal", "ties", "negative", "zeros")):
        yield make_case("ARGMAX", {"n": n, "vocab": vocab, "kind": kind})
    lists = ((1,), (2,), (1, 7), (16, 10, 10), (60, 10, 10), (1, 512), (1, 1025), (3, 2047), (2, 8192))
    for order, shape in product(("asc", "desc"), lists):
        yield make_case("ARGSORT", {"ne": shape, "order": order})
    for shape in lists:
        for k in sorted({1, 2, 40, shape[-1] // 2, shape[-1] - 1, shape[-1]}):
            if 1 <= k <= shape[-1]:
                yield make_case("TOP_K", {"ne": shape, "k": k})
    experts = (
        (8, 2), (8, 8), (16, 1), (31, 3), (32, 4), (60, 4), (64, 6), (72, 6), (128, 8), (160, 6), (256, 8), (288, 8), (512, 10), (160, 160),
    )  # fmt: skip
    for (n_expert, used), n, (gating, norm), ties in product(
        experts, (1, 4, 22), (("softmax", 0), ("softmax", 1), ("softmax_weight", 0), ("sigmoid", 0), ("sigmoid", 1)), (0, 1)
    ):
        scale = 2.0 if n == 4 else 1.0
        yield make_case(
            "TOPK_MOE",
            {"n": n, "n_expert": n_expert, "n_used": used, "norm": norm, "gating": gating, "scale": scale, "ties": ties, "seed": 1},
        )
    for (n_expert, used), k, (gating, norm), bias in product(
        ((8, 2), (9, 9), (32, 4), (128, 8), (256, 8), (512, 10)), (256, 2048, 2880),
        (("softmax", 0), ("softmax", 1), ("softmax_weight", 0), ("sigmoid", 1)), (0, 1),
    ):  # fmt: skip
        yield make_case("MOE_ROUTER", {"n_expert": n_expert, "k": k, "n_used": used, "norm": norm, "gating": gating, "bias": bias})
    for n, used, m in product((1, 3, 33), (1, 4), (1, 33, 768, 2880)):
        yield make_case("ADD_ID", {"n_expert": 32, "n_used": used, "m": m, "n": n})
    for n, used, m, residual in product((1, 3, 33), (1, 2, 8, 32), (1, 33, 768, 2880), (0, 1)):
        yield make_case("MOE_REDUCE", {"n": n, "n_used": used, "m": m, "residual": residual})
    sampler = Sample()
    for temp, top_k, top_p, min_p in product((0.5, 1.0), (0, 1, 40), (0.8, 1.0), (0.0, 0.05)):
        for vocab, seed in ((1000, 1), (5003, 2), (32000, 3)):
            yield sampler.case(vocab, Params(temp, top_k, top_p, min_p, seed, ()), seed=seed)


FAMILIES: tuple[Callable[[], Cases], ...] = (
    _products, _batches, _routed, _fused_products, _choosing_products, _attentions, _ropes, _norms, _rows, _copies, _values, _choices,
)  # fmt: skip


def quick_cases() -> Cases:
    """What every build runs: the ops' own cases."""
    return (case for op in OPS.values() for case in op.cases())


def full_cases() -> Cases:
    """The quick set, then all families, each line once."""
    seen: set[str] = set()
    for source in (quick_cases, *FAMILIES):
        for case in source():
            line = case.line
            if line not in seen:
                seen.add(line)
                yield case


def perf_cases() -> Cases:
    """Cases worth timing: sizes of real models, activations as Q8_1 where the type has an integer dot.

    Cases that differ in n alone stand together, the largest n first: they share their weights.
    """
    for quant in QUANTS:
        form: dict[str, Any] = {"type_b": "q8_1"} if quant in INT_QUANTS else {}
        for m, k, columns in ((4096, 14336, (16, 8, 7, 6, 5, 4, 3, 2, 1)), (14336, 4096, (4, 1)), (4096, 4096, (1,))):
            for n in columns:
                yield product_case(quant, m, n, k, **form)
    for quant in (q for q in QUANTS if q not in ("F32", "BF16")):
        form = {"type_b": "q8_1"} if quant in INT_QUANTS else {}
        for (experts, used, m, k), n in product(((128, 8, 768, 2048), (32, 4, 1792, 2048)), (32, 8, 4, 1)):
            yield routed_case(quant, experts, used, m, n, k, shared=True, **form)
    for quant, n in product(("MXFP4", "Q4_0", "Q8_0"), (4, 1)):
        yield routed_case(quant, 32, 4, 2880, n, 2880, shared=True, type_b="q8_1")
    for quant in ("Q4_K", "Q6_K", "Q8_0", "MXFP4"):
        yield fused_product_case(quant, 28672, 1, 4096, ("norm",), glu=True, out="Q8_1")
        yield fused_product_case(quant, 1536, 1, 2048, ("ids",), glu=True, out="Q8_1", experts=128, used=8)
        yield fused_product_case(quant, 1536, 1, 2048, ("norm", "ids"), glu=True, out="Q8_1", experts=128, used=8)
        yield fused_product_case(quant, 1536, 1, 2048, ("norm", "logits"), glu=True, out="Q8_1", experts=128, used=8)
        yield fused_product_case(quant, 2048, 1, 768, ("residual", "ids", "expert_weights"), experts=128, used=8)
    yield fused_product_case("Q8_0", 5120, 1, 2880, ("norm", "bias"))  # from here gpt-oss 20B
    yield fused_product_case("Q8_0", 2880, 1, 4096, ("bias", "residual"))
    yield fused_product_case("MXFP4", 5760, 1, 2880, ("norm", "bias", "ids"), glu=True, oai=True, out="Q8_1", experts=32, used=4)
    yield fused_product_case("MXFP4", 5760, 1, 2880, ("norm", "bias", "logits"), glu=True, oai=True, out="Q8_1", experts=32, used=4)
    yield fused_product_case("MXFP4", 2880, 1, 2880, ("bias", "residual", "ids", "expert_weights"), experts=32, used=4)
    for quant in ("Q4_K", "Q6_K", "F16"):
        yield get_rows_case(quant, 32000, 4096, 1)
    for hd, ratio, kv, nb in product((64, 128, 256), (1, 4, 8), (512, 4096, 16384), (1, 4)):
        yield attention_case(8 * ratio, 8, hd, kv, nb)
    for kv in (512, 4096, 16384):
        yield AttnDecode().case(32, 8, 128, kv, kv - 1, "normal", False, False, "Q8_1", seed=1)
        for window in (0, 128):
            yield AttnDecode().case(64, 8, 64, kv, kv - 1, "neox", False, False, "Q8_1", seed=1, sinks=True, window=window)
    for op, rows in product(("RMS_NORM", "RMS_NORM_MUL", "ADD_RMS_NORM_MUL"), (1, 512)):
        yield make_case(op, {"ne": (rows, 4096)})
    for op, y in (("SWIGLU", "F32"), ("GEGLU", "F32"), ("SWIGLU", "Q8_1")):
        yield make_case(op, {"ne": (1, 14336), "out": y})
    for n in (1, 512):
        yield make_case("ROPE", {"mode": "normal", "ne": (n, 32, 128), "n_dims": 128, "pos": 30})
        yield make_case("QUANTIZE_Q8_1", {"ne": (n, 4096)})
        yield make_case("ADD", {"ne": (n, 4096), "b": (n, 4096)})
        yield make_case("CPY", {"ne": (n, 4096), "type_src": "F32", "type_dst": "F16"})
        yield make_case("TOPK_MOE", {"n": n, "n_expert": 128, "n_used": 8, "norm": 1, "gating": "softmax", "scale": 1.0, "ties": 0})
    yield make_case("SOFT_MAX", {"ne": (32, 4096), "mask": 0})
    for vocab in (32000, 151936):
        yield make_case("ARGMAX", {"n": 1, "vocab": vocab, "kind": "normal"})
