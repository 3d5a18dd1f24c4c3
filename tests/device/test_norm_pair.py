"""Two norms side by side (shaders/norm/norm_pair.comp) as products in registers take them, and what plans make of an EAGLE-3 head."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from chain_kit import run_chain
from kernel_paths import planned_for
from test_gemm_reg import unit_place

from vkback.device import Device
from vkback.engine.plans import Plans
from vkback.graph import Node, Tensor
from vkback.models.builder import F16_CACHE
from vkback.models.eagle3 import with_head
from vkback.models.registry import Model
from vkback.models.synth import outline, write_outline
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import gemm_reg
from vkback.ops.matmul.gemm_problem import GemmShape
from vkback.ops.norm_pair import RmsNormPair
from vkback.plan.schedule import Schedule
from vkback.shader import ShaderLibrary


@pytest.fixture(scope="module")
def kernels() -> ShaderLibrary:
    return ShaderLibrary()


def reg_shape(caps: Any) -> GemmShape:
    matrix, t = ((8, 8, 8), 8) if caps.subgroup_size == 8 else ((16, 16, 16), 4)
    return GemmShape("coop_reg", 16, 16, subgroups=1, warp_m=16, matrix=matrix, row_lanes=t)


@pytest.mark.vulkan
@pytest.mark.parametrize("fours", [False, True])
@pytest.mark.parametrize(("dim", "n", "factor"), [(32, 1, 1.0), (160, 5, 0.25), (1024, 18, 1.0)])
def test_in_unit_order(dim: int, n: int, factor: float, fours: bool, device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """Runs everywhere, as packing does. An odd number of blocks has zeros behind the row; a hidden row that is none is zeros.
    fours: four values of a column lie together, as on NVIDIA."""
    shape, rng = reg_shape(device.caps), np.random.default_rng(7)
    if fours and device.caps.subgroup_size == 8:
        shape = dataclasses.replace(shape, matrix=(8, 8, 16), row_lanes=4)
    y = gemm_reg.packed_units("y", n, 2 * dim, shape)
    a, table = Tensor("a", "F32", (n, dim), "input"), Tensor("table", "F32", (1, n + 3, dim), "state")
    wa, wb = (Tensor(name, "F32", (dim,), "input") for name in ("wa", "wb"))
    inputs = (a, wa, table, wb, Tensor("ids", "I32", (n,), "input"))
    values: dict[str, Any] = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in inputs[:4]}
    values["ids"] = np.arange(n, dtype=np.int32)[::-1] - (n > 1)  # the last one is -1
    params = {"eps": 1e-5, "eps_b": 1e-6, "keeps": "", "units": shape}
    ctx = dataclasses.replace(ctx, f16_scales={"y": factor})
    (d,) = RmsNormPair().lower(Node("RMS_NORM_PAIR", inputs, (y,), params), ctx)
    got = run_chain(device, kernels, ctx, [d], values, inputs, (y,))["y"].reshape(-1)
    full = np.zeros((n, y.shape[1]))
    full[:, : 2 * dim] = factor * RmsNormPair().reference([values[t.name] for t in inputs], params)[0]
    full = full.reshape(n, -1, 4)[..., [0, 2, 1, 3]].reshape(n, -1)  # K order
    stride = gemm_reg.units_stride(2 * dim, shape, device.caps)
    places = np.array([[unit_place(c, i, stride, shape, device.caps.subgroup_size) for i in range(y.shape[1])] for c in range(n)])
    np.testing.assert_allclose(got[places], full, rtol=1e-3, atol=1e-4)  # f16: 2^-11 of a value


def test_what_it_cannot_do(ctx: LowerContext) -> None:
    """Rows that are no whole units, or longer than a workgroup holds."""
    for dim, problem in ((48, "whole units of 32"), (1 << 20, "whole units of 32")):
        a, w, table = Tensor("a", "F32", (1, dim), "input"), Tensor("w", "F32", (dim,), "weight"), Tensor("t", "F32", (1, 2, dim), "state")
        inputs = (a, w, table, w, Tensor("ids", "I32", (1,), "input"))
        node = Node("RMS_NORM_PAIR", inputs, (Tensor("y", "F32", (1, 2 * dim)),), {"eps": 1e-5, "eps_b": 1e-5, "keeps": ""})
        with pytest.raises(PlanError, match=problem):
            RmsNormPair().lower(node, ctx)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    """Of a model with an EAGLE-3 head on an H200."""
    path = tmp_path_factory.mktemp("head") / "head.gguf"
    write_outline("llama-1b-eagle3-Q4_K_S", path)
    model = with_head(Model.of(outline("llama-1b-Q4_K_S")), path)
    return Plans(model, planned_for("nvidia_h200_linux"), 4096, fusion="all", cache=F16_CACHE, head=True)


def of_head(s: Schedule, kernel: str) -> list[int]:
    """Stages in which a kernel runs for the head."""
    return [i for i, stage in enumerate(s.stages) for d in stage if d.kernel.source == kernel]


def test_a_draft_has_two_barriers(plans: Plans) -> None:
    """Both norms beside the angles, Q with K and V, attention, its output, gate and up, down, the output layer beside the store of the
    hidden row, and the choice. Nobody spins on what stage 0 makes, and the sampler has no spin-waits."""
    s = plans.head_token("greedy")
    assert of_head(s, "norm/norm_pair_embedded.comp") == [0] and len(s.stages) == 8
    assert s.barrier_free == set(range(2, 7))
    (d,) = (d for d in s.stages[0] if d.op == "RMS_NORM_PAIR")
    assert [a.tensor.type for a in d.args if "w" in a.access] == ["Q8_1", "F32"]  # and the residual
    assert not {"GET_ROWS", "CONCAT", "RMS_NORM_MUL"} & {d.op for d in s.dispatches()}


def test_a_step_of_few_columns_has_the_barriers_of_one_without_a_head(plans: Plans) -> None:
    """Those around the embedding and the sampler. The head waits for what it reads: inputs of three layers, the hidden rows."""
    s = plans.drafts(4, "greedy")
    assert s.barrier_free == set(range(3, len(s.stages) - 2))
    (pair,) = of_head(s, "norm/norm_pair.comp")
    (d,) = [d for d in s.stages[pair] if d.kernel.source == "norm/norm_pair.comp"]
    assert d.waits is not None and d.waits.counted[0] == "cache_hidden"
    assert next(a.tensor.type for a in d.args if "w" in a.access) == "F16"
    stores = of_head(s, "rows/set_rows.comp")
    assert min(stores) == pair - 1 and len(stores) == 3  # the hidden rows, K and V
