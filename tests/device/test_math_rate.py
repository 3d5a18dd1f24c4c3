"""The math rate of a device, operations of a prompt, and the share that kernels reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from kernel_paths import planned_for

from vkback.device import Device
from vkback.harness.perf import time_cases
from vkback.models import Model
from vkback.ops.cooperative_matrix import matrix_shape
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.linear_cases import mul_mat_case
from vkback.plan.cost.flops import kernel_of, main_kernel, prompt_flops, seen_rows
from vkback.plan.planner import plan
from vkback.shader import ShaderLibrary
from vkback.timing.launches import too_long
from vkback.timing.math_rate import MathRates, measure_math_rate

H200 = "nvidia_h200_linux"


# -- operations


@pytest.mark.parametrize(("tokens", "n_past", "window"), [(1, 0, 0), (7, 5, 0), (7, 5, 8), (7, 20, 8), (20, 0, 8), (3, 2, 64)])
def test_rows_that_tokens_see_are_those_before_them_and_in_the_window(tokens: int, n_past: int, window: int) -> None:
    want = sum(min(p + 1, window or p + 1) for p in range(n_past, n_past + tokens))
    assert seen_rows(tokens, n_past, window) == want


def test_operations_of_a_prompt_are_its_products_and_its_attention(models: Callable[[str], Model]) -> None:
    model = models("demo-dense")
    hp, one = model.hp, model.graph(1, 64, head="none")
    weights = {name: t for name, t in one.tensors().items() if t.kind == "weight" and len(t.shape) == 2 and name != "token_embd.weight"}
    last = f"blk.{hp.n_layer - 1}."
    # Nobody reads what the last layer makes of the tokens: its K and V alone are planned.
    planned = {n: t for n, t in weights.items() if not n.startswith((last, "output")) or n.startswith((f"{last}attn_k", f"{last}attn_v"))}
    products = 2 * sum(t.elements for t in planned.values())
    attention = 4 * hp.n_head * hp.head_dim_k * (hp.n_layer - 1)
    assert products > 0
    assert prompt_flops(one, 1, 0) == products + attention
    assert prompt_flops(one, 100, 7) == 100 * products + attention * (100 * 7 + 5050)
    everything = model.graph(1, 64, head="all")
    assert prompt_flops(everything, 1, 0) > prompt_flops(one, 1, 0), "the head and the last layer"


def test_experts_count_as_often_as_they_are_used(models: Callable[[str], Model]) -> None:
    model = models("demo-moe")
    one = model.graph(1, 64, head="all")
    stacks = [n for n in one.nodes if n.op == "MUL_MAT_ID"]
    used = sum(2 * n.outputs[0].elements * n.inputs[0].shape[-1] for n in stacks)
    assert stacks and all(n.outputs[0].shape[1] == model.hp.n_expert_used for n in stacks)
    assert used < prompt_flops(one, 1, 0) < 2 * used + sum(2 * n.inputs[0].elements for n in one.nodes if n.op == "MUL_MAT")


def test_the_kernel_of_a_prompt_is_that_of_most_operations(models: Callable[[str], Model]) -> None:
    graph = models("demo-dense").graph(512, 512, head="none")
    assert main_kernel(plan(graph, planned_for(H200)).dispatches()) == "coop_mat"
    f32 = dataclasses.replace(planned_for(H200), act="f32")
    assert main_kernel(plan(graph, f32).dispatches()) == "f32"
    assert main_kernel(plan(graph, planned_for("amd_rx_6900_xt_radv")).dispatches()) == "int_dot", "it has no matrices"
    token = plan(models("demo-dense").graph(1, 512, head="last"), planned_for(H200)).dispatches()
    assert main_kernel(token) == "int_dot", "GEMVs of the integer path"
    assert main_kernel([]) is None
    assert {kernel_of(d) for d in token if d.op in ("NORM", "GET_ROWS", "ROPE")} <= {None}


# -- on a device


@pytest.mark.vulkan
def test_every_kernel_of_the_device_has_a_rate(device: Device, library: ShaderLibrary) -> None:
    f32 = measure_math_rate(device, library, "f32")
    assert f32.tflops > 1e-4 and f32.name == "f32 rate" and f32.cut.endswith("threads")
    if device.caps.int_dot:
        assert measure_math_rate(device, library, "int_dot").tflops > 1e-4
    if matrix_shape(device.caps) is not None:
        found = measure_math_rate(device, library, "coop_mat")
        assert found.tflops > 1e-4 and found.name == "matrix rate"
    else:
        with pytest.raises(PlanError, match="has no cooperative matrices of f16 with f32 sums"):
            measure_math_rate(device, library, "coop_mat")


@pytest.mark.vulkan
def test_a_rate_is_measured_once(device: Device, library: ShaderLibrary) -> None:
    rates = MathRates(device, library)
    assert rates.of("f32") is rates.of("f32")


@pytest.mark.vulkan
def test_perf_says_the_share_of_products_of_many_tokens(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    cases = [mul_mat_case("Q8_0", 64, n, 256) for n in (32, 1)]
    many, one = time_cases(device, library, cases, ctx, 1.0, repetitions=1)
    assert many.math_way in ("f32", "coop_mat", "int_dot") and many.math_rate_tflops and many.time_us
    assert many.math_rate_percent == pytest.approx(100 * many.flops / many.time_us / 1e6 / many.math_rate_tflops)
    assert (one.math_way, one.math_rate_tflops, one.math_rate_percent) == ("", None, None), "a GEMV reads"


@pytest.mark.vulkan
def test_a_launch_that_may_take_too_long_is_not_timed(
    device: Device, library: ShaderLibrary, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vkback.timing.launches.SLOWEST_CPU_LAUNCH_US", 300.0)
    monkeypatch.setattr("vkback.timing.launches.LONGEST_SUBMIT_US", 300.0)
    cases = [mul_mat_case("Q8_0", 64, n, 256) for n in (64, 2)]
    long, short = time_cases(device, library, cases, ctx, 1.0, repetitions=1)
    if device.caps.software:
        assert not long.supported and "one launch may take 0.0 s on such a device, more than 0.0003 s" in long.message
    assert short.supported and short.time_us


def test_what_is_too_long_depends_on_the_device(models: Callable[[str], Model]) -> None:
    graph = models("llama-8b-Q4_K_S").graph(512, 512, head="none")
    slow, fast = planned_for("llvmpipe_mesa_22_debian12"), planned_for(H200)
    largest = max(plan(graph, slow).dispatches(), key=lambda d: d.flops)
    assert "a measurement would take minutes" in too_long([largest], slow.caps)
    assert too_long([max(plan(graph, fast).dispatches(), key=lambda d: d.flops)], fast.caps) == ""
