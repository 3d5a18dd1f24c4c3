"""What the tables choose for GPUs that are not here: every case of the GEMV family stays within every recorded device's limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache

import pytest
from kernel_paths import planned_for, with_params
from shapes import product
from tiny_models import of_a_kind

from vkback.autotune.problem import LinearProblem
from vkback.device import Capabilities, profile_ids
from vkback.device.spirv import inspect
from vkback.graph import Node, Tensor
from vkback.ops.codebooks import shared_bytes as codebook_bytes
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.gemv import SHADER_WORDS, GemvConfig, choice_problem, prologue_problem, shared_bytes
from vkback.ops.matmul.linear_cases import fused_case
from vkback.ops.matmul.linear_node import QUANTS
from vkback.ops.op import OPS
from vkback.paths import shader_root
from vkback.plan.planner import check_limits
from vkback.shader import ShaderLibrary

UNKNOWN_BINDINGS = 4
"""What a profile is read as where nobody recorded the number: the least that Vulkan allows."""
MIN_BINDINGS = 8
"""The least that any device has been seen to report (V3D)."""


@cache
def small() -> tuple[tuple[str, Node], ...]:
    return tuple((case.line, case.build().node) for op in ("MUL_MAT", "MUL_MAT_ID", "LINEAR") for case in OPS[op].cases())


@cache
def real() -> tuple[tuple[str, Node], ...]:
    """Products of the sizes that models have, fused as their schedules have them."""

    def products(quant: str) -> Iterator[LinearProblem]:
        for n in (1, 4, 16):
            yield from (product("llama-8b", name, quant, n) for name in ("down", "gate_up"))
            # A quarter of its experts, so that any device binds them.
            yield from (product("qwen3moe-30b-a3b", f"{name}_exps", quant, n, n_expert=32, n_used=4) for name in ("gate_up", "down"))
        yield from (product("llama-8b", name, quant, roles=("norm",)) for name in ("head", "gate_up"))

    given = tuple((p.line, p.node()) for quant in QUANTS for p in products(quant))
    choosing = (choosing_product(quant, roles, 192, 2048, experts=128, used=8) for quant in QUANTS for roles in ((), ("norm", "bias")))
    return (*given, *choosing)


def choosing_product(quant: str, roles: tuple[str, ...], m: int, k: int, *, experts: int, used: int) -> tuple[str, Node]:
    """A product that chooses its experts; of as few rows as let any device bind all of them."""
    routed = LinearProblem(quant, m, k, 1, (*roles, "ids"), glu=True, out="Q8_1", n_expert=experts, n_used=used).node()
    logits, weights, ids = Tensor("logits", "F32", (1, experts)), Tensor("weights", "F32", (1, used)), routed.inputs[-1]
    params = {**routed.params, "roles": ("w", "x", *roles, "logits"), "n_used": used, "norm": True, "gating": "softmax", "scale": 1.0}
    return f"{quant} {roles}", Node("LINEAR", (*routed.inputs[:-1], logits), (*routed.outputs, weights, ids), params)


def faults(dispatch: Dispatch, caps: Capabilities) -> Iterator[str]:
    """What a device could not do of a GEMV dispatch."""
    check_limits(dispatch, caps)
    if not dispatch.kernel.source.startswith("gemv/"):
        return
    defines = {k: v for k, v in dispatch.kernel.defines if isinstance(v, int)}
    quant = str(dict(dispatch.kernel.defines)["QUANT_FILE"]).removeprefix('"quant/').removesuffix('.glsl"').upper()
    threads, subgroup, required = defines["WG"], defines["SUBGROUP"], dispatch.kernel.subgroup_size
    if threads > min(caps.max_workgroup_invocations, caps.max_workgroup_size[0]):
        yield f"{threads} threads"
    assert isinstance(dispatch.config, GemvConfig)
    shared = shared_bytes(dispatch.config) + codebook_bytes(quant, caps)
    if shared > caps.max_shared_memory:
        yield f"{shared} bytes of shared memory"
    if required is not None:
        if not (caps.subgroup_required_size and caps.subgroup_min <= required <= caps.subgroup_max):
            yield f"subgroup size {required}"
        if caps.max_workgroup_subgroups and threads > required * caps.max_workgroup_subgroups:
            yield f"{threads} threads in subgroups of {required}"
    elif subgroup > 1 and caps.subgroup_min != caps.subgroup_max:
        yield f"subgroups of {subgroup} are taken for granted"
    if subgroup > 1 and not caps.has_subgroup_ops("shuffle"):
        yield "shuffles"
    if defines.get("REDUCE_SUBGROUP") and not caps.has_subgroup_ops("arithmetic", "shuffle"):
        yield "subgroup arithmetic"
    if defines["PATH_INT"] and not caps.int_dot:
        yield "integer dot"
    if defines["LANES"] > threads or defines["ROWS"] > defines["LANES"] or threads % defines["LANES"]:
        yield f"{threads} threads, {defines['LANES']} lanes, {defines['ROWS']} rows"


def in_the_way(node: Node, ctx: LowerContext) -> bool:
    """Whether no planner asks for this node on this device: its norm stays a node of its own, or its experts do not fit a binding."""
    product = LinearProblem.of(node) if node.op == "LINEAR" else None
    if product is None:
        return False
    if "logits" in node.params["roles"] and choice_problem(node, ctx):
        return True
    normed = "norm" in product.roles and any(prologue_problem(product.quant, product.k, 1, path, ctx) for path in ("int", "float"))
    return normed or (product.n_expert > 0 and ctx.caps.max_storage_buffer_range < 1 << 28)


@pytest.mark.parametrize("profile", of_a_kind(profile_ids(), profile_ids()[::3]))
def test_every_case_keeps_to_the_limits_of_every_device(profile: str) -> None:
    ctx = planned_for(profile)
    if ctx.caps.max_storage_bindings == UNKNOWN_BINDINGS:
        ctx = dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, max_storage_bindings=MIN_BINDINGS))
    planned = 0
    for line, node in (*small(), *real()):
        for act in ("auto", "q8_1"):
            try:
                dispatches = OPS[node.op].lower(node, dataclasses.replace(ctx, act=act))
            except PlanError as e:
                assert in_the_way(node, ctx) or "codebook" in str(e), f"{line}: {e}"
                continue
            planned += 1
            found = [fault for d in dispatches for fault in faults(d, ctx.caps)]
            assert not found, f"{line} (--act {act}) on {ctx.caps.name}: {found}"
    assert planned > 500


@pytest.mark.parametrize("profile", ["nvidia_h200_linux", "apple_m1_moltenvk", "broadcom_v3d_4_2_pi4", "llvmpipe_mesa_22_debian12"])
def test_shared_memory_is_what_the_shader_declares(profile: str) -> None:
    """Of optimized modules: without the optimizer arrays that nobody reads count, too."""
    library, ctx = ShaderLibrary(quick=False), planned_for(profile)
    shapes = [
        ({"wg": 128, "lanes": 32, "rows": 2, "unroll": 1, "prefetch": "none", "groups": "per_tile"}, fused_case("Q4_K", 512, 1024, 5, ())),
        ({"wg": 64, "lanes": 64, "rows": 2, "unroll": 1, "prefetch": "none", "groups": 2}, fused_case("Q8_0", 512, 1024, 1, ("norm",))),
        (
            {"wg": 64, "lanes": 16, "rows": 4, "unroll": 1, "prefetch": "none", "groups": "per_tile"},
            fused_case("Q4_K", 512, 512, 2, (), glu=True, out="Q8_1"),
        ),
        (
            {"wg": 64, "lanes": 16, "rows": 4, "unroll": 1, "prefetch": "none", "groups": "per_tile", "block": 16},
            fused_case("Q4_K", 64, 512, 1, ("logits",), glu=True, experts=40, used=5, gating="softmax", norm_w=False),
        ),
        (
            {"wg": 64, "lanes": 16, "rows": 4, "unroll": 1, "prefetch": "none", "groups": "per_tile", "block": 64},
            fused_case("Q4_K", 64, 512, 1, ("norm", "logits"), glu=True, out="Q8_1", experts=40, used=5),
        ),
    ]
    for params, case in shapes:
        for dispatch in OPS["LINEAR"].lower(case.build().node, with_params(ctx, **params)):
            if dispatch.kernel.source.startswith("gemv/"):
                declared = inspect(library.spirv(dispatch.kernel)).shared_bytes
                assert isinstance(dispatch.config, GemvConfig)
                assert declared == shared_bytes(dispatch.config), dispatch.kernel.name


def test_the_words_of_a_config_are_constants_of_the_shader() -> None:
    text = (shader_root() / "gemv" / "gemv.comp").read_text()
    for define, words in SHADER_WORDS.items():
        for number, word in enumerate(words):
            assert f"#define {define}_{word.upper().replace('+', '_')} {number}\n" in text
