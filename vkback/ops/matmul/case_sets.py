"""The cases of MUL_MAT, MUL_MAT_ID and LINEAR: what every build runs, the full set, and what is timed.

Kernels are built for types, columns and k, not for m, tokens or experts, so the sets vary the latter freely and the former with care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

from vkback import quants
from vkback.ops.case import Case
from vkback.ops.matmul.linear_cases import MATRICES, REGISTERS, ROUTES, fused_case, mul_mat_case, mul_mat_id_case, with_sentinels
from vkback.ops.matmul.linear_node import INT_QUANTS, QUANTS

LAYER_NORM = ("norm", "norm_bias")
POST_NORM = ("norm", "post_norm", "post_residual")
POST_ALONE = ("post_norm", "post_residual")
"""Roles of a fused layer norm, of a fused post-norm + residual + norm, and of the same without the norm."""


def quick_fused() -> Iterator[Case]:
    for quant in ("Q4_K", "Q6_K", "Q8_0", "MXFP4"):
        whole = quant in ("Q4_K", "MXFP4")  # the others' kernels of several tokens differ from these in the decoder alone
        for n in (1, 3) if whole else (1,):
            yield fused_case(quant, 96, 512, n, ("residual",))
            yield fused_case(quant, 96, 512, n, ("bias",))
            yield fused_case(quant, 128, 512, n, (), glu=True)
            yield fused_case(quant, 128, 512, n, ("bias",), glu=True)
            yield fused_case(quant, 128, 512, n, (), glu=True, out="Q8_1")
            yield fused_case(quant, 64, 512, n, ("ids",), glu=True)
            yield fused_case(quant, 64, 512, n, ("ids",), glu=True, out="Q8_1")
            yield fused_case(quant, 100, 256, n, ("ids", "expert_weights"))
            yield fused_case(quant, 100, 256, n, ("ids", "expert_weights", "residual"))
            yield fused_case(quant, 100, 256, n, ("bias", "ids", "expert_weights", "residual"))
            yield fused_case(quant, 64, 512, n, ("bias", "ids"), glu=True, oai=True, out="Q8_1")
        yield fused_case(quant, 128, 512, 1, ("norm",))
        yield fused_case(quant, 128, 1024, 1, ("norm",), glu=True, out="Q8_1")
        yield fused_case(quant, 64, 512, 1, ("logits",), glu=True, out="Q8_1")
        yield fused_case(quant, 64, 512, 1, ("norm", "bias", "logits"), glu=True, ties=True)
        yield fused_case(quant, 100, 512, 1, (*LAYER_NORM, "bias"))
        yield fused_case(quant, 100, 512, 1, POST_NORM)
        yield fused_case(quant, 128, 512, 1, POST_NORM, glu=True, gelu=True, out="Q8_1")
        yield fused_case(quant, 100, 512, 1, POST_ALONE)
        yield fused_case(quant, 96, 512, 1, (*POST_ALONE, "multiplier"), gelu=True, out="Q8_1", multiplier_at=64)
        for n in (1, 3, 35) if whole else (1,):
            yield fused_case(quant, 100, 256, n, ("bias",), gelu=True)
            yield fused_case(quant, 128, 256, n, ("bias",), gelu=True, out="Q8_1")
            yield fused_case(quant, 100, 256, n, (), glu=True, gelu=True)
    yield fused_case("F16", 100, 1600, 1, (*LAYER_NORM, "bias"), gelu=True)
    yield fused_case("Q6_K", 100, 512, 1, POST_NORM, softcap=1.5)
    yield fused_case("F16", 33, 80, 1, ("bias",), softcap=0.5)
    yield fused_case("Q4_K", 128, 512, 1, ("norm",), squared_relu=True, out="Q8_1")
    yield fused_case("Q6_K", 96, 256, 1, ("bias", "ids"), squared_relu=True)
    yield fused_case("Q4_K", 130, 1280, 1, POST_NORM).where(range=50_000)  # shards, of which the first stores the sum
    yield fused_case("MXFP4", 192, 2880, 1, ("norm", "bias", "ids"), glu=True, oai=True, out="Q8_1")
    yield fused_case("MXFP4", 192, 2880, 1, ("norm", "bias", "logits"), glu=True, oai=True, out="Q8_1", gating="softmax_weight")
    yield fused_case("MXFP4", 100, 256, 2, (), glu=True, oai=True)
    for n in (1, 3):
        yield fused_case("Q4_K", 100, 256, n, ("bias",), split=(64, 33, 3))
        yield fused_case("Q8_0", 192, 256, n, ("residual",), out="Q8_1", split=(64, 32, 96))
    yield fused_case("Q8_0", 100, 96, 2, ("ids", "expert_weights"))
    yield with_sentinels(fused_case("Q4_K", 100, 512, 1, ("residual",))).where(sync="sentinel")
    yield from prompts_fused()
    for quant, roles, glu, out in (
        ("Q4_K", ("norm",), True, "Q8_1"),
        ("Q8_0", ("ids", "expert_weights", "residual"), False, "F32"),
        ("MXFP4", ("norm", "bias", "logits"), True, "Q8_1"),
        ("Q4_K", POST_NORM, True, "Q8_1"),
        ("Q4_K", POST_ALONE, True, "Q8_1"),
        ("Q4_K", (*LAYER_NORM, "bias"), False, "F32"),
        ("F16", ("bias",), False, "F32"),
        ("F16", ("ids", "expert_weights", "residual"), False, "F32"),
        ("F32", ("ids",), True, "F32"),
    ):
        yield fused_case(quant, 64, 512, 1, roles, glu=glu, out=out).where(sync="sentinel")


def each_kernel(case: Callable[..., Case]) -> Iterator[Case]:
    """A case of many tokens by each kind of GEMM. case: given `act`."""
    yield case(act="f32")
    yield case(act="q8_1")
    yield case(act="auto").where(**MATRICES)


def scaled_sums() -> Iterator[Case]:
    """Scales of sums, not of weights: a bias for a unit, for each half, none with signed bytes, offset levels; several tokens; and levels
    looked up."""
    for quant, n in (("Q4_K", 1), ("Q6_K", 1), ("Q8_0", 1), ("MXFP4", 1), ("Q5_K", 3)):
        yield mul_mat_case(quant, 33, n, 512, act="f32").where(kernel="gemv", scales="sums", unroll=1)
    yield mul_mat_case("MXFP4", 33, 2, 512, act="f32").where(kernel="gemv", scales="levels", unroll=1)
    yield mul_mat_case("MXFP4", 33, 1, 512, act="f32").where(kernel="gemv", scales="levels_bfe", unroll=1)


def by_subnormals(quant: str) -> Iterator[Case]:
    """Weights decoded by way of subnormal f16, in both kernels; odd rows and columns."""
    yield mul_mat_case(quant, 45, 7, 512).where(subnormals=True, **REGISTERS)
    yield mul_mat_case(quant, 45, 19, 512).where(subnormals=True, **MATRICES)


def prompts_mul_mat() -> Iterator[Case]:
    """Odd rows and columns that fill no tile; a row that ends within a unit; shards; values that f16 does not hold."""
    yield from each_kernel(partial(mul_mat_case, "Q4_K", 45, 19, 512))
    yield from each_kernel(partial(mul_mat_case, "Q8_0", 131, 35, 96))
    yield mul_mat_case("F16", 33, 19, 80).where(**MATRICES)
    for quant, k in (("F16", 80), ("Q4_K", 512), ("Q8_0", 96), ("MXFP4", 512)):  # several columns, which some tables give to a GEMM
        yield mul_mat_case(quant, 33, 3, k, act="f32").where(kernel="gemv")
    yield mul_mat_case("Q4_K", 33, 5, 512, act="q8_1").where(kernel="gemv")
    yield mul_mat_case("Q8_0", 33, 19, 256, act="f16", amax=10 * HUGE).where(**MATRICES)
    yield mul_mat_case("F32", 11, 6, 132, act="f32").where(tiles="shared")  # factors of low rank
    yield mul_mat_case("F32", 132, 11, 9, act="f32").where(tiles="shared")
    yield mul_mat_case("Q4_K", 203, 18, 256).where(range=20_000)
    yield mul_mat_case("Q4_K", 203, 18, 256).where(range=20_000, **{**MATRICES, "split_k": 2})
    for amax in (HUGE, 10 * HUGE):
        yield mul_mat_case("Q8_0", 33, 19, 256, amax=amax).where(**MATRICES)
        yield mul_mat_case("Q8_0", 33, 5, 256, amax=amax).where(**REGISTERS)
    yield mul_mat_case("Q8_0", 45, 7, 96).where(**REGISTERS)
    yield from by_subnormals("Q4_K")
    yield from by_subnormals("Q6_K")
    yield from by_subnormals("MXFP4")


def prompts_mul_mat_id() -> Iterator[Case]:
    """Experts with no token, with some, and with all of them."""
    for ids in ROUTES:
        yield from each_kernel(partial(mul_mat_id_case, "Q8_0", 6, 2, 45, 21, 96, shared=ids != "last", ids=ids))
    yield mul_mat_id_case("Q8_0", 5, 1, 33, 19, 96, shared=True, amax=HUGE).where(**MATRICES)
    for ids in ROUTES:
        yield mul_mat_id_case("Q8_0", 6, 2, 45, 11, 96, shared=ids != "last", ids=ids).where(**REGISTERS)
    yield mul_mat_id_case("Q4_K", 6, 2, 45, 5, 256, shared=True).where(**REGISTERS)
    yield mul_mat_id_case("MXFP4", 6, 2, 45, 5, 1088, shared=True).where(tiles_each=2, **REGISTERS)
    yield mul_mat_id_case("MXFP4", 6, 2, 45, 5, 1088, shared=True).where(subnormals=True, **REGISTERS)
    yield mul_mat_id_case("Q8_0", 5, 1, 33, 7, 96, shared=True, amax=HUGE).where(**REGISTERS)


def prompts_fused() -> Iterator[Case]:
    """What is fused around a GEMM."""
    for roles, glu, oai, out in (
        (("bias", "residual"), False, False, "F32"),
        (("bias", "ids"), True, True, "Q8_1"),
        (("ids", "expert_weights", "residual"), False, False, "F32"),
    ):
        yield from each_kernel(partial(fused_case, "Q8_0", 90 if out == "F32" else 128, 96, 19, roles, glu=glu, oai=oai, out=out))
    by_experts: tuple[tuple[tuple[str, ...], bool, bool], ...] = (
        (("bias", "ids"), True, True),
        (("ids",), True, False),
        (("bias", "ids", "expert_weights", "residual"), False, False),
    )
    for fused, glu, oai in by_experts:
        yield fused_case("Q8_0", 90, 96, 11, fused, glu=glu, oai=oai).where(**REGISTERS)
    yield fused_case("Q8_0", 90, 96, 19, ("residual",), split=(64, 26), act="f32")


BASE = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "MXFP4", "NVFP4", "IQ2_XXS")
"""Types that get the whole cross product of the fused families; the others a part of it."""

FLOAT: dict[str, Any] = {"act": "f32"}
INT: dict[str, Any] = {"type_b": "q8_1", "act": "q8_1"}
INT_FROM_F32: dict[str, Any] = {"act": "q8_1"}

HUGE = 1e5
"""Activations beyond what F16 holds: they pass through one scaled, or not at all."""


def paths(quant: str) -> list[dict[str, Any]]:
    """Arithmetic that this type has, as parameters of a case: floats, and the integer dot of activations that come as Q8_1."""
    return [FLOAT, INT] if quant in INT_QUANTS else [FLOAT]


def block(quant: str) -> int:
    """Weights of a block: k must be a multiple of it."""
    return quants.QUANTS[quant].block_values


def full_mul_mat() -> Iterator[Case]:
    for quant in QUANTS:
        unit = block(quant)
        for path in paths(quant):
            for n, m in product(range(1, 17), (16, 67)):
                yield mul_mat_case(quant, m, n, 256, **path)
            for n in (17, 20, 24, 31, 32, 33):
                yield mul_mat_case(quant, 16, n, 256, **path)
            for m in (1, 2, 3, 5, 31, 33, 127, 129):
                yield mul_mat_case(quant, m, 1, 256, **path)
            for n in (2, 5, 9, 16, 64, 512):
                yield mul_mat_case(quant, 1, n, 256, **path)
            for k, n in product((1792, 2048, 2304, 3840, 4096, 4352), (1, 8)):
                yield mul_mat_case(quant, 33, n, k, **path)
            for k, n in product((unit, 3 * unit), (1, 3)):
                yield mul_mat_case(quant, 17, n, -(-k // 32) * 32 if quant in ("F32", "F16", "BF16") else k, **path)
            if 2880 % unit == 0:
                for n in (1, 4, 8):
                    yield mul_mat_case(quant, 131, n, 2880, **path)
            yield mul_mat_case(quant, 64, 1, 14336, **path)
            for n in (1, 3):
                yield mul_mat_case(quant, 33, n, 256, amax=HUGE, **path)
        yield from each_kernel(partial(mul_mat_case, quant, 45, 19, 512))
        for n in (2, 9, 16, 32):
            yield mul_mat_case(quant, 67, n, 512).where(exact=True)
        if quants.quant(quant).step_factor:
            yield from by_subnormals(quant)
        for n in (1, 8):
            yield mul_mat_case(quant, 1023, n, 4096)
        if quant in INT_QUANTS:
            for n, k in product((1, 4, 9), (256, 2048)):
                yield mul_mat_case(quant, 35, n, k, **INT_FROM_F32)
            for n in (1, 3):
                yield mul_mat_case(quant, 35, n, 256, type_b="q8_1", act="f32")
    for quant, k, n in product(("F32", "F16", "BF16"), (1, 2, 31, 33, 63, 65, 80, 588), (1, 2, 9)):
        yield mul_mat_case(quant, 17, n, k)
    for m in (6271, 6272, 6273):
        yield mul_mat_case("Q4_K", m, 1, 256)
    for quant in ("Q8_0", "Q4_0"):
        yield mul_mat_case(quant, 1_100_003, 1, 32)  # more tiles than workgroups along one axis


def full_mul_mat_id() -> Iterator[Case]:
    pairs = ((4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8), (32, 4), (128, 8))
    for quant in QUANTS:
        for path in paths(quant):
            for (experts, used), (n, shared) in product(pairs, ((1, True), (4, False), (17, True))):
                yield mul_mat_id_case(quant, experts, used, 32, n, 256, shared=shared, **path)
            for ids, n in product(("one", "last", "repeat"), (5, 32)):
                yield mul_mat_id_case(quant, 8, 2, 32, n, 256, shared=True, ids=ids, **path)
            for m in (1, 5, 67):
                yield mul_mat_id_case(quant, 8, 2, m, 3, 256, shared=False, **path)
            for k, n in product((768, 2048, 2304, 4096), (1, 5)):
                yield mul_mat_id_case(quant, 8, 2, 33, n, k, shared=True, **path)
            yield mul_mat_id_case(quant, 4, 2, 32, 129, 256, shared=True, **path)
            for n in (9, 12, 16, 24, 31):
                yield mul_mat_id_case(quant, 8, 2, 40, n, 256, shared=n % 2 == 0, **path)
            yield mul_mat_id_case(quant, 512, 8, 8, 2, 256, shared=True, **path)
            if 2880 % block(quant) == 0:
                yield mul_mat_id_case(quant, 32, 4, 96, 1, 2880, shared=True, **path)
                yield mul_mat_id_case(quant, 32, 4, 96, 4, 2880, shared=False, **path)
        if quant in INT_QUANTS:
            for n in (1, 4):
                yield mul_mat_id_case(quant, 8, 4, 40, n, 256, shared=n == 1, **INT_FROM_F32)
        for n in (2, 9, 32):
            yield mul_mat_id_case(quant, 8, 2, 40, n, 256, shared=True).where(exact=True)
        for ids in ROUTES:
            yield from each_kernel(partial(mul_mat_id_case, quant, 6, 2, 45, 21, 256, shared=ids != "last", ids=ids))
            yield mul_mat_id_case(quant, 6, 2, 45, 21, 512, shared=ids != "last", ids=ids).where(**REGISTERS)
        for path in paths(quant):
            yield mul_mat_id_case(quant, 8, 2, 32, 3, 256, shared=False, amax=HUGE, **path)
    for quant, k, n in product(("F32", "F16", "BF16"), (1, 31, 63, 65, 80), (1, 5)):
        yield mul_mat_id_case(quant, 8, 2, 33, n, k, shared=n == 1)


PLAIN_FUSIONS: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("residual",), False),
    (("bias",), False),
    (("bias", "residual"), False),
    ((), True),
    (("bias",), True),
)
EXPERT_FUSIONS: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("ids",), True),
    (("bias", "ids"), False),
    (("bias", "ids"), True),
    (("ids", "expert_weights"), False),
    (("residual", "ids", "expert_weights"), False),
    (("bias", "residual", "ids", "expert_weights"), False),
)
NORM_FUSIONS: tuple[tuple[tuple[str, ...], bool], ...] = ((("norm",), False), (("norm",), True), (("norm", "bias"), False))
"""Roles beside w and x, and whether there is a GLU."""
CHOICE_FUSIONS: tuple[tuple[tuple[str, ...], str, bool], ...] = (
    (("logits",), "F32", False),
    (("norm", "logits"), "Q8_1", False),
    (("norm", "bias", "logits"), "F32", True),
    (("bias", "logits"), "Q8_1", True),
)
"""Roles, type of the output, and whether the GLU is SWIGLU_OAI."""


def full_fused() -> Iterator[Case]:
    for quant in QUANTS:
        for act in ("f32", "q8_1") if quant in INT_QUANTS else ("f32",):
            for (roles, glu), n in product((*PLAIN_FUSIONS, *EXPERT_FUSIONS), (1, 2, 4, 8) if quant in BASE else (1, 4)):
                yield fused_case(quant, 100, 256, n, roles, glu=glu, act=act)
            for m in (2, 4, 8):  # many tokens: a few values may be small by chance, and their NMSE large
                yield fused_case(quant, m, 256, 16, ("bias",), glu=True, act=act)
            for roles, glu in NORM_FUSIONS:
                yield fused_case(quant, 130, 512, 1, roles, glu=glu, act=act)
            for roles, n in product(((), ("ids",)), (1, 3)):
                yield fused_case(quant, 128, 256, n, roles, glu=True, out="Q8_1", act=act)
            for roles, n in product(((), ("bias",), ("bias", "ids")), (1, 3)):
                yield fused_case(quant, 100, 256, n, roles, glu=True, oai=True, act=act)
            for roles in (LAYER_NORM, (*LAYER_NORM, "bias"), POST_NORM, (*POST_NORM, "bias"), POST_ALONE):
                yield fused_case(quant, 130, 512, 1, roles, act=act)
                yield fused_case(quant, 128, 512, 1, roles, glu=True, gelu=True, out="Q8_1", act=act)
            for n, out in product((1, 4), ("F32", "Q8_1")):
                yield fused_case(quant, 128, 256, n, ("bias",), gelu=True, out=out, act=act)
                yield fused_case(quant, 128, 256, n, (), glu=True, gelu=True, out=out, act=act)
                if n == 1:
                    yield fused_case(quant, 128, 256, n, ("norm",), squared_relu=True, out=out, act=act)
            for n in (1, 3):
                yield fused_case(quant, 96, 256, n, ("multiplier",), gelu=True, act=act)
                yield fused_case(quant, 96, 256, n, ("residual",), out="Q8_1", act=act)
                yield fused_case(quant, 101, 256, n, ("bias",), split=(32, 32, 37), act=act)  # fewer values may miss the bound by chance
            yield fused_case(quant, 128, 512, 1, ("norm",), glu=True, out="Q8_1", act=act)
            yield fused_case(quant, 64, 256, 2, ("ids", "expert_weights"), experts=64, used=8, act=act)
    yield from _full_choosing()


def _full_choosing() -> Iterator[Case]:
    """Those that choose their experts, by as many as there are models of; of few rows, since every expert has them."""
    for quant in QUANTS:
        for act in ("f32", "q8_1") if quant in INT_QUANTS else ("f32",):
            for roles, out, oai in CHOICE_FUSIONS:
                yield fused_case(quant, 64, 256, 1, roles, glu=True, oai=oai, out=out, experts=20, used=3, act=act)
    for (experts, used), (gating, norm_w), ties in product(
        ((8, 2), (8, 8), (16, 1), (32, 4), (60, 4), (128, 8), (256, 8), (512, 10)),
        (("softmax", False), ("softmax", True), ("softmax_weight", False), ("sigmoid", False), ("sigmoid", True)),
        (False, True),
    ):
        yield fused_case(
            "Q4_K", 16, 256, 1, ("norm", "logits"), glu=True, experts=experts, used=used, act="f32", gating=gating, norm_w=norm_w, ties=ties
        )


def perf_mul_mat() -> Iterator[Case]:
    for quant in QUANTS:
        form: dict[str, Any] = {"type_b": "q8_1"} if quant in INT_QUANTS else {}
        for m, k, columns in ((4096, 14336, (16, 8, 7, 6, 5, 4, 3, 2, 1)), (14336, 4096, (4, 1)), (4096, 4096, (1,))):
            for n in columns:
                yield mul_mat_case(quant, m, n, k, **form)
    for quant in QUANTS:  # a prompt's gate and up of 8B
        yield mul_mat_case(quant, 28672, 512, 4096)
    for quant in ("Q4_K", "Q6_K", "Q8_0", "MXFP4"):
        for (m, k), n in product(((4096, 14336), (6144, 4096)), (512, 64, 32, 16, 8, 4, 2)):
            yield mul_mat_case(quant, m, n, k)
    for quant, n in product(("Q4_K", "Q8_0"), (512, 32)):  # 1B; within reach of a CPU driver
        yield mul_mat_case(quant, 2048, n, 2048)


def perf_mul_mat_id() -> Iterator[Case]:
    for quant in (q for q in QUANTS if q not in ("F32", "BF16")):
        form: dict[str, Any] = {"type_b": "q8_1"} if quant in INT_QUANTS else {}
        for (experts, used, m, k), n in product(((128, 8, 768, 2048), (32, 4, 1792, 2048)), (32, 8, 4, 1)):
            yield mul_mat_id_case(quant, experts, used, m, n, k, shared=True, **form)
    for quant, n in product(("MXFP4", "Q4_0", "Q8_0"), (4, 1)):
        yield mul_mat_id_case(quant, 32, 4, 2880, n, 2880, shared=True, type_b="q8_1")
    for quant in ("Q2_K", "Q4_K", "Q8_0", "MXFP4"):  # prompts of qwen3moe 30B and gpt-oss 20B
        yield mul_mat_id_case(quant, 128, 8, 1536, 512, 2048, shared=True)
        yield mul_mat_id_case(quant, 128, 8, 2048, 512, 768, shared=False)
    yield mul_mat_id_case("MXFP4", 32, 4, 5760, 512, 2880, shared=True)


def perf_fused() -> Iterator[Case]:
    for quant in ("Q4_K", "Q6_K", "Q8_0", "MXFP4"):
        yield fused_case(quant, 28672, 4096, 1, ("norm",), glu=True, out="Q8_1")
        yield fused_case(quant, 1536, 2048, 1, ("ids",), glu=True, out="Q8_1", experts=128, used=8)
        yield fused_case(quant, 1536, 2048, 1, ("norm", "ids"), glu=True, out="Q8_1", experts=128, used=8)
        yield fused_case(quant, 1536, 2048, 1, ("norm", "logits"), glu=True, out="Q8_1", experts=128, used=8)
        yield fused_case(quant, 2048, 768, 1, ("residual", "ids", "expert_weights"), experts=128, used=8)
    yield fused_case("Q4_K", 20480, 2560, 1, POST_NORM, glu=True, gelu=True, out="Q8_1")  # gemma3 4B
    yield fused_case("F16", 6400, 1600, 1, (*LAYER_NORM, "bias"), gelu=True)  # GPT-2 XL
    yield fused_case("Q8_0", 5120, 2880, 1, ("norm", "bias"))  # from here gpt-oss 20B
    yield fused_case("Q8_0", 2880, 4096, 1, ("bias", "residual"))
    yield fused_case("MXFP4", 5760, 2880, 1, ("norm", "bias", "ids"), glu=True, oai=True, out="Q8_1", experts=32, used=4)
    yield fused_case("MXFP4", 5760, 2880, 1, ("norm", "bias", "logits"), glu=True, oai=True, out="Q8_1", experts=32, used=4)
    yield fused_case("MXFP4", 2880, 2880, 1, ("bias", "residual", "ids", "expert_weights"), experts=32, used=4)
