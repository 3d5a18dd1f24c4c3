"""Attention of prompts (shaders/attention/prompt): every kernel, several cuts, and faults in the kernels that the cases must catch."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import planned_for, with_params

from vkback.device import Device
from vkback.device.capabilities import MatrixShape
from vkback.evaluate.judge import judge
from vkback.graph import Node, Tensor
from vkback.harness.runner import Workbench, prepare, reference, run_case, run_problem
from vkback.ops.attention import prompt as attention_prompt
from vkback.ops.attention.choice import prompt_shape
from vkback.ops.attention.flash import FlashAttnExt
from vkback.ops.case import Case, Problem
from vkback.ops.cooperative_matrix import matrix_shape
from vkback.ops.lowering import LowerContext, PlanError
from vkback.paths import shader_root
from vkback.shader import ShaderLibrary

OP = FlashAttnExt()
CASES = list(OP.prompt_cases())
KERNELS = {
    "plain": {"kernel": "plain", "tile_q": 16, "tile_kv": 8, "warps": 1},
    "matrix": {"kernel": "matrix", "tile_q": 64, "tile_kv": 32, "warps": 4},
}
OTHER_CUTS = (
    ("plain", {"tile_q": 8, "tile_kv": 4}),
    ("plain", {"tile_q": 24, "tile_kv": 4}),
    ("matrix", {"tile_q": 8, "tile_kv": 8, "warps": 1}),
    ("matrix", {"tile_q": 64, "tile_kv": 16, "warps": 2}),
    ("matrix", {"tile_q": 32, "tile_kv": 64, "warps": 4}),
)
SPREAD = [c for c in CASES if c.params["hd"] == 64 and c.params["y"] == "F32"]
WITHOUT_SINKS = [c for c in SPREAD if not c.params["sinks"]]
QUICK = {"plain": {"tile_q": 8, "tile_kv": 4}, "matrix": {"tile_q": 16, "tile_kv": 16, "warps": 2}}
"""Cuts that a CPU driver compiles quickly."""


@pytest.fixture(scope="module")
def kernels() -> ShaderLibrary:
    return ShaderLibrary()


def kernel_of(kernel: str, ctx: LowerContext, device: Device, **cut: int) -> LowerContext:
    """Tables that choose a kernel; skips where the device cannot run it."""
    if kernel == "matrix" and matrix_shape(device.caps) is None:
        pytest.skip(f"{device.caps.name} has no cooperative matrices")
    return with_params(ctx, **{**KERNELS[kernel], **cut})


@pytest.mark.vulkan
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.line)
def test_prompt(case: Case, kernel: str, device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    wide = case.params["hd"] > 64 or case.params["y"] != "F32"
    heavy = wide and device.caps.software  # fewer values at once, or a CPU driver compiles for long
    use = kernel_of(kernel, ctx, device, **({"tile_q": 8, "tile_kv": 4 if kernel == "plain" else 8, "warps": 1} if heavy else {}))
    shape = prompt_shape(case.build().node, use)
    assert shape is not None and shape.kernel == kernel
    outcome = run_case(device, kernels, case, use)
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize(("kernel", "cut"), OTHER_CUTS, ids=str)
def test_other_cuts(kernel: str, cut: dict[str, int], device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    use = kernel_of(kernel, ctx, device, **cut)
    for case in WITHOUT_SINKS:
        outcome = run_case(device, kernels, case, use)
        assert outcome.ok, f"{case.line}: {outcome.text}"


@pytest.mark.vulkan
def test_through_shared_memory(device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """How GPUs without matrices run `plain`: several subgroups, threads that share a query, several queries a thread."""
    caps = dataclasses.replace(device.caps, device_type="discrete")
    use = dataclasses.replace(with_params(ctx, kernel="plain", tile_q=32, tile_kv=4, warps=4), caps=caps)
    for case in WITHOUT_SINKS:
        shape = prompt_shape(case.build().node, use)
        assert shape is not None and not shape.use_shuffles and shape.lanes > 1 and shape.warps > 1
        outcome = run_case(device, kernels, case, use)
        assert outcome.ok, f"{case.line}: {outcome.text}"


@pytest.mark.vulkan
def test_matrices_of_unknown_order(device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """Maxima and weights through shared memory, as where the check at the start found no order that suits."""
    use = dataclasses.replace(kernel_of("matrix", ctx, device, **QUICK["matrix"]), row_lanes=0)
    for case in SPREAD:
        shape = prompt_shape(case.build().node, use)
        assert shape is not None and shape.kernel == "matrix" and not shape.row_lanes
        outcome = run_case(device, kernels, case, use)
        assert outcome.ok, f"{case.line}: {outcome.text}"


@pytest.mark.vulkan
@pytest.mark.parametrize("case", list(OP.positions_in_any_order()), ids=lambda c: c.line)
def test_positions_in_any_order(case: Case, device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """Rows between those of its tokens may be no numbers for `plain` on a CPU driver, whose tables take it for few tokens."""
    if not device.caps.software:
        pytest.skip(f"{device.caps.name}: kernels of prompts take positions in order, few tokens another kernel")
    use = kernel_of("plain", ctx, device, **QUICK["plain"])
    shape = prompt_shape(case.build().node, use)
    assert shape is not None and shape.use_shuffles
    outcome = run_case(device, kernels, case, use)
    assert outcome.ok, outcome.text


def test_a_block_has_as_many_rows_as_a_word_has_bits() -> None:
    node = OP.build_case(4, 2, 64, kv=512, nb=8, garbage=False).build().node
    shape = prompt_shape(node, with_params(planned_for("llvmpipe_mesa_22_debian12"), kernel="plain", tile_kv=128))
    assert shape is not None and shape.use_shuffles and shape.tile_kv == 32


LATENT = [c for c in OP.unequal_cases() if c.params.get("v_view") and len(c.params["pos"]) > 16 and c.params["hd"] < 128]
"""Prompts over rows that hold K and V: Q in one tensor and in two."""


def latent_cut(ctx: LowerContext, device: Device, monkeypatch: pytest.MonkeyPatch) -> LowerContext:
    """Matrices, and queries that subgroups share, though their heads are small."""
    monkeypatch.setattr(attention_prompt, "PART_VALUES", 24)
    return kernel_of("matrix", ctx, device, tile_q=16, tile_kv=16, warps=4)


@pytest.mark.vulkan
@pytest.mark.parametrize("case", LATENT, ids=lambda c: c.line)
def test_rows_that_hold_k_and_v(
    case: Case, device: Device, kernels: ShaderLibrary, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = latent_cut(ctx, device, monkeypatch)
    shape = prompt_shape(case.build().node, use)
    assert shape is not None and shape.kernel == "matrix" and shape.parts == 4
    outcome = run_case(device, kernels, case, use)
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_token_does_not_depend_on_its_company(kernel: str, device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """Tiles and blocks begin elsewhere where tokens are fewer; the bits are the same."""
    use = kernel_of(kernel, ctx, device, **QUICK[kernel])
    for window in (0, 50):
        together = OP.build_case(4, 1, 64, kv=250, nb=100, seed=41, window=window).build()
        want = run_problem(device, kernels, together, use)["kqv_out"]
        q, cache_k, cache_v, pos = together.node.inputs
        some = slice(37, 72)
        inputs = (dataclasses.replace(q, shape=(35, *q.shape[1:])), cache_k, cache_v, dataclasses.replace(pos, shape=(35,)))
        node = Node("FLASH_ATTN_EXT", inputs, (Tensor("kqv_out", "F32", (35, want.shape[1])),), together.node.params)
        values = {**together.values, "q": together.values["q"][some], "pos": together.values["pos"][some]}
        np.testing.assert_array_equal(run_problem(device, kernels, Problem(node, values), use)["kqv_out"], want[some])


@pytest.mark.vulkan
@pytest.mark.parametrize("kernel", KERNELS)
def test_f16_output_is_what_gemms_take(kernel: str, device: Device, kernels: ShaderLibrary, ctx: LowerContext) -> None:
    """Rows in K order: of every four neighbours the middle two are swapped."""
    use = kernel_of(kernel, ctx, device, **QUICK[kernel])
    problem = CASES[1].build()
    want = reference(problem)["kqv_out"]
    node = dataclasses.replace(problem.node, outputs=(dataclasses.replace(problem.node.outputs[0], type="F16"),))
    with Workbench(device, kernels) as bench:
        got = bench.run(prepare(Problem(node, problem.values), use))["kqv_out"]
    in_order = got.reshape(*want.shape[:-1], -1, 4)[..., [0, 2, 1, 3]].reshape(want.shape)
    assert judge(in_order, want, OP.tolerance(node, use)).ok


FAULTS = {
    "last block lost": ("base < hi; base += ROWS", "base + ROWS < hi; base += ROWS"),
    "a row too many": ("base + r < visible[t].y", "base + r <= visible[t].y"),
    "a row too few": ("base + r < visible[t].y", "base + r + 1u < visible[t].y"),
    "window too narrow": ("base + r >= visible[t].x", "base + r > visible[t].x"),
    "sums not rescaled": ("sum[t][j] *= rescale", "sum[t][j] *= 1.0"),
    "weights not rescaled": ("weight_sum[t] *= rescale", "weight_sum[t] *= 1.0"),
    "no sink": ("if (HAS_SINKS != 0)", "if (HAS_SINKS > 1)"),
}
MATRIX_FAULTS = {
    "last block lost": ("base < hi; base += ROWS", "base + ROWS < hi; base += ROWS"),
    "a row too many": ("row < rows.y ?", "row <= rows.y ?"),
    "window too narrow": ("row >= rows.x &&", "row > rows.x &&"),
    "sums not rescaled": (", rescale = exp2(old_max - new_max);", ", rescale = 1.0;"),
    "block taken for full": ("base + ROWS > every.y", "base > every.y"),
}


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("kernel", "fault"), [*(("plain", f) for f in FAULTS), *(("matrix", f) for f in MATRIX_FAULTS)], ids=lambda v: v.replace(" ", "-")
)
def test_faults_are_caught(kernel: str, fault: str, device: Device, ctx: LowerContext, tmp_path: Path) -> None:
    use = kernel_of(kernel, ctx, device, **QUICK[kernel])
    right, wrong = (FAULTS if kernel == "plain" else MATRIX_FAULTS)[fault]
    shutil.copytree(shader_root(), tmp_path / "shaders", ignore=shutil.ignore_patterns("prebuilt"))
    found = 0
    shader = {"plain": "prompt.comp", "matrix": "prompt_matrix.comp"}[kernel]
    for name in (shader, "prompt_iface.glsl", "prompt_blocks.glsl", "softmax_registers.glsl"):
        file = tmp_path / "shaders" / "attention" / "prompt" / name
        text = file.read_text(encoding="utf-8")
        found += text.count(right)
        file.write_text(text.replace(right, wrong), encoding="utf-8")
    assert found == 1
    broken = ShaderLibrary(tmp_path / "shaders", tmp_path / "cache")
    cases = [c for c in SPREAD if c.params["sinks"]] if "sink" in fault else WITHOUT_SINKS
    assert any(not run_case(device, broken, c, use).ok for c in cases)


LATENT_FAULTS = {
    "a part of the scores lost": ("i < PARTS; i++", "i + 1 < PARTS; i++"),
    "the first quad of q_pe for all": (" + i - NOPE / 4]", "]"),
    "columns of another part": ("+ (part() * NO + o) * (FN / 8)", "+ o * (FN / 8)"),
}


@pytest.mark.vulkan
@pytest.mark.parametrize("fault", LATENT_FAULTS, ids=lambda v: v.replace(" ", "-"))
def test_faults_where_rows_hold_k_and_v(
    fault: str, device: Device, ctx: LowerContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = latent_cut(ctx, device, monkeypatch)
    shutil.copytree(shader_root(), tmp_path / "shaders", ignore=shutil.ignore_patterns("prebuilt"))
    file = tmp_path / "shaders" / "attention" / "prompt" / "prompt_latent.comp"
    text = file.read_text(encoding="utf-8")
    assert text.count(LATENT_FAULTS[fault][0]) == 1
    file.write_text(text.replace(*LATENT_FAULTS[fault]), encoding="utf-8")
    broken = ShaderLibrary(tmp_path / "shaders", tmp_path / "cache")
    assert any(not run_case(device, broken, c, use).ok for c in LATENT if "rot" in c.params)


NO_SHAPES = planned_for("nvidia_h200_linux")
SHAPES = tuple(MatrixShape(16, 16, 16, "f16", "f16", sums, sums, False, "subgroup") for sums in ("f16", "f32"))
H200 = dataclasses.replace(NO_SHAPES, caps=dataclasses.replace(NO_SHAPES.caps, cooperative_matrix_shapes=SHAPES))


def test_cuts_fit_the_device() -> None:
    """Matrices where there are any; else, or where shared memory is short, less at a time."""
    for hd in (40, 64, 80, 128, 256):
        node = OP.build_case(8, 2, hd, kv=512, nb=512, garbage=False).build().node
        shape = prompt_shape(node, with_params(H200, **KERNELS["matrix"]))
        assert shape is not None and shape.kernel == "matrix" and shape.matrix == matrix_shape(H200.caps)
        assert attention_prompt.matrix_shared(shape, hd) <= H200.caps.max_shared_memory
        old = dataclasses.replace(H200.caps, cooperative_matrix=False, max_shared_memory=16 << 10)
        shape = prompt_shape(node, dataclasses.replace(with_params(H200, **KERNELS["matrix"]), caps=old))
        assert shape is not None and shape.kernel == "plain" and 8 * shape.tile_kv * hd <= 16 << 10
        plain = dataclasses.replace(old, subgroup_ops=("basic",))
        assert prompt_shape(node, dataclasses.replace(with_params(H200, **KERNELS["matrix"]), caps=plain)) is None


def test_what_is_refused() -> None:
    node = OP.build_case(3, 1, 40, kv=64, nb=64, garbage=False).build().node
    node = dataclasses.replace(node, outputs=(dataclasses.replace(node.outputs[0], type="F16"),))
    with pytest.raises(PlanError, match="whole units of 32"):
        OP.lower(node, with_params(H200, **KERNELS["matrix"]))


def test_tables_choose_by_tokens() -> None:
    cpu = planned_for("llvmpipe_mesa_22_debian12")
    for n, kernel in ((2, "plain"), (16, "plain"), (31, "plain"), (32, "plain"), (512, "plain")):
        node = OP.build_case(4, 2, 64, kv=512, nb=n, garbage=False).build().node
        shape = prompt_shape(node, cpu)
        assert (shape and shape.kernel) == kernel
    assert math.prod(OP.lower(node, cpu)[0].groups) == 512 * 4 // 16
