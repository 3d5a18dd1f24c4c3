"""Activations beyond 65504 on the way through f16: they are scaled, or there is an error. Weights beyond it: they do not go that way.
Nothing is clamped unsaid."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import planned_for
from make_gguf import llama_metadata, llama_tensors, write_gguf
from prompt_kernels import KERNEL_NMSE, engine_of, kernel_params, kernels_of, skip_without

from vkback import quants
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.graph import Tensor
from vkback.harness import runner
from vkback.harness.runner import run_case
from vkback.harness.suite import Suite
from vkback.ops.attention.choice import prompt_shape
from vkback.ops.attention.flash import FlashAttnExt
from vkback.ops.case import Case, Problem
from vkback.ops.f16_range import MIN_SCALE, F16RangeError, is_overflow_word, overflow_word, rescaled
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.choice import choose
from vkback.ops.matmul.linear_cases import fused_case, mul_mat_case, mul_mat_id_case
from vkback.ops.matmul.linear_node import LinearNode
from vkback.ops.matmul.mul_mat import batched_case
from vkback.ops.op import OPS
from vkback.plan.passes.linear import as_linear
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Overrides

INF, NAN = float("inf"), float("nan")


# --- which scale --------------------------------------------------------------------------------------------------------------------


def test_scales_leave_headroom_and_round_nothing() -> None:
    for size in (65505.0, 1e5, 1e6, 3e7):
        (scale,) = rescaled({}, {"x.overflow": size}).values()
        assert np.frexp(scale)[0] == 0.5, "a power of two"
        assert 65504 / 16 <= size * scale <= 65504 / 8
    assert rescaled({"x": 0.5, "other": 0.25}, {"x.overflow": 65504.0})["other"] == 0.25


def test_a_second_overflow_counts_from_the_scale_that_was() -> None:
    assert rescaled({"x": 0.25}, {"x.overflow": 1e5}) == rescaled({}, {"x.overflow": 4e5})


def test_infinities_may_come_of_another_tensor_s_overflow() -> None:
    assert rescaled({}, {"a.overflow": INF, "b.overflow": 1e5, "c.overflow": NAN}).keys() == {"b"}
    for bad in (INF, NAN):
        with pytest.raises(F16RangeError, match=r"^\[f16\] a: activations are infinite or no numbers; .* `vkback test-ops`$"):
            rescaled({}, {"a.overflow": bad})


def test_what_no_scale_can_hold_is_an_error() -> None:
    assert rescaled({}, {"a.overflow": 6.7e7}) == {"a": MIN_SCALE}
    with pytest.raises(F16RangeError, match=r"^\[f16\] a: activations reach 1e\+09, .*; run with --act f32$"):
        rescaled({}, {"a.overflow": 1e9})
    with pytest.raises(F16RangeError, match=r"reach 1e\+09"):
        rescaled({"a": 2.0**-10}, {"a.overflow": 1e9 / 1024})


def test_overflow_words_are_told_from_counters() -> None:
    assert is_overflow_word(overflow_word(Tensor("x", "F16", (3, 32))))
    assert not is_overflow_word(Tensor("x.tickets", "I32", (3,), "counter"))


# --- cases --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def matrices(device: Device, ctx: LowerContext) -> LowerContext:
    """Tables that choose cooperative matrices; skips the test where there are none."""
    skip_without("coop_mat", device.caps)
    return dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, kernel_params("coop_mat", device.caps), "test"))


LARGE = [
    *(mul_mat_case("Q4_K", 45, 19, 256, amax=amax) for amax in (6e4, 1e5, 1e6)),
    mul_mat_case("F16", 33, 5, 80, amax=1e6),
    *(mul_mat_id_case("Q8_0", 5, 2, 40, 21, 256, shared=shared, amax=1e5) for shared in (True, False)),
    mul_mat_id_case("MXFP4", 8, 2, 32, 7, 256, shared=True, ids="one", amax=1e6),
]


@pytest.mark.vulkan
@pytest.mark.parametrize("case", LARGE, ids=lambda c: c.line)
def test_large_activations(case: Case, device: Device, library: ShaderLibrary, matrices: LowerContext) -> None:
    outcome = run_case(device, library, case, matrices)
    assert outcome.ok, outcome.text
    assert next(iter(outcome.verdicts.values())).nmse > 1e-9, "f16 had no part in it"


@pytest.mark.vulkan
def test_without_overflow_words_they_would_be_clamped(
    device: Device, library: ShaderLibrary, matrices: LowerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "overflowed", lambda prepared, after: {})
    for case in LARGE[1:]:
        assert not run_case(device, library, case, matrices).ok, case.line


@pytest.mark.vulkan
def test_a_large_value_of_one_token_leaves_the_others_their_precision(
    device: Device, library: ShaderLibrary, matrices: LowerContext
) -> None:
    """One token of 1e6, one of 1e-2, others of 1: judged token by token."""
    problem = mul_mat_case("Q8_0", 64, 20, 256).build()
    x = problem.values["x"].copy()
    x[3], x[4] = 1e6 * x[3], 1e-2 * x[4]
    problem = Problem(problem.node, {**problem.values, "x": x})
    got = runner.run_problem(device, library, problem, matrices)["y"].astype(np.float64)
    want = runner.reference(problem)["y"]
    errors = np.square(got - want).sum(axis=1) / np.square(want).sum(axis=1)
    # f16 weights and activations, as in tests/device/test_gemm.py. The scale is 2^-7: steps of 2^-17 are 2^-10.4 of 1e-2, squared over 12
    # and over the values' own third 1.4e-7.
    assert errors.max() < 2e-6


@pytest.mark.vulkan
def test_the_suite_says_what_it_cannot_hold(device: Device, library: ShaderLibrary, matrices: LowerContext) -> None:
    with Suite(device, library, matrices) as suite:
        assert suite.run_one(mul_mat_case("Q4_K", 45, 19, 256, amax=1e5)).result.passed
        assert suite.run_one(fused_case("Q8_0", 64, 256, 19, ("residual",))).result.passed
        found = suite.run_one(mul_mat_case("Q4_K", 45, 19, 256, amax=1e9)).result
    assert found.passed is False and "y.x_f16: activations reach 9.99e+08" in found.message


@pytest.mark.vulkan
@pytest.mark.parametrize("bad", [INF, NAN])
def test_infinities_are_not_turned_into_numbers(bad: float, device: Device, library: ShaderLibrary, matrices: LowerContext) -> None:
    problem = mul_mat_case("Q8_0", 64, 20, 256).build()
    problem.values["x"][5, 7] = bad
    with pytest.raises(F16RangeError, match=r"y\.x_f16: activations are infinite or no numbers"):
        runner.run_problem(device, library, problem, matrices)


@pytest.mark.vulkan
def test_queries_beyond_f16_are_not_rounded(device: Device, library: ShaderLibrary, matrices: LowerContext) -> None:
    """Attention then is that of plain floats."""
    op = FlashAttnExt()
    case = op.build_case(4, 2, 64, kv=40, nb=20, seed=3)
    problem = case.build()
    node = problem.node
    assert prompt_shape(node, matrices).kernel == "matrix"  # type: ignore[union-attr]
    large = Problem(node, {**problem.values, "q": np.float32(1e6) * problem.values["q"]})
    got = runner.run_problem(device, library, large, matrices)["kqv_out"]
    assert nmse(got, runner.reference(large)["kqv_out"]) < 1e-9
    plain = dataclasses.replace(matrices, f16_scales={"q.q_f16": 0.5})
    assert prompt_shape(node, plain).kernel == "plain"  # type: ignore[union-attr]


# --- weights ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quants.WEIGHT_TYPES)
def test_weights_that_f16_cannot_hold_are_seen(name: str) -> None:
    """With room for what kernels subtract of a quantized weight last."""
    limit = 65504.0 if name in ("F32", "F16", "BF16") else 16376.0
    seen = set()
    for std in (0.02, 1.0, 300.0, 3e3, 1e4, 1e6):
        raw = quants.random_blocks(name, 2, 512, np.random.default_rng(3), std=min(std, 2e4) if name == "F16" else std)
        beyond = quants.beyond_f16(name, raw)
        assert beyond == bool(np.abs(quants.decode(name, raw)).max() > limit), std
        seen.add(beyond)
    # No F16 is, and scales of NVFP4 end at 448.
    assert seen == ({False} if name in ("F16", "NVFP4") else {False, True})


@pytest.mark.parametrize(("quant", "kernel"), [("BF16", "f32"), ("MXFP4", "int_dot")])
def test_such_weights_take_no_matrices(quant: str, kernel: str) -> None:
    ctx = planned_for("nvidia_h200_linux")
    for n in (8, 512):
        (gemv,) = as_linear([mul_mat_case(quant, 64, n, 256).build().node])
        node = LinearNode.of(gemv)
        usual = choose(node, ctx).shape
        assert usual is not None and usual.kernel == ("coop_reg" if n == 8 else "coop_mat")
        found = choose(node, dataclasses.replace(ctx, beyond_f16=frozenset({node.w.name}))).shape
        assert found is None if n == 8 else found is not None and found.kernel == kernel


def test_matrices_of_the_device_s_own_making_take_none() -> None:
    node = batched_case("F32", 64, 40, 64, (1, 1), (1, 2), plain=True).build().node
    (*_, product) = OPS["MUL_MAT"].lower(node, planned_for("nvidia_h200_linux"))
    assert product.kernel.source == "gemm/f32.comp"


def large_weights(path: Path) -> Path:
    """A llama some of whose feed-forward weights reach 5e5, and others next to them are so small that its results are as usual."""
    tensors = llama_tensors(tied=False)
    for stem, factor in (("ffn_up", 2.0**20), ("ffn_gate", 2.0**-10)):
        tensors[f"blk.0.{stem}.weight"][1][3] *= np.float32(factor)
    tensors["blk.0.ffn_down.weight"][1][:, 3] *= np.float32(2.0**-10)
    return write_gguf(path, "llama", llama_metadata(context_length=96), tensors)


@pytest.mark.vulkan
def test_a_model_of_large_weights(
    tmp_path: Path, device: Device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("coop_mat", device.caps)
    path, ids = large_weights(tmp_path / "large.gguf"), some_ids(40)
    want = NumpyTwin(path).logits(ids)
    with engine_of(path, device, "coop_mat", n_ctx=96, ubatch=32) as engine:
        assert nmse(engine.prompt_logits(ids), want) <= KERNEL_NMSE["coop_mat"]
        (said,) = caplog.messages
        assert said.endswith("prompts take no matrices for them (blk.0.ffn_gate.weight+blk.0.ffn_up.weight)")
        assert {"gemm/f32.comp", "gemm/coop_mat.comp"} <= kernels_of(engine, 32)
    monkeypatch.setattr(quants, "beyond_f16", lambda *_: False)
    with engine_of(path, device, "coop_mat", n_ctx=96, ubatch=32) as engine:
        assert nmse(engine.prompt_logits(ids), want) > KERNEL_NMSE["coop_mat"], "clamped"


# --- a model ------------------------------------------------------------------------------------------------------------------------


def massive(path: Path, gain: float) -> Path:
    """A llama whose feed-forward activations reach some 30 times `gain`."""
    tensors = llama_tensors(tied=False)
    for il in range(2):
        for stem, factor in (("ffn_gate", 10.0), ("ffn_up", gain)):
            kind, values = tensors[f"blk.{il}.{stem}.weight"]
            tensors[f"blk.{il}.{stem}.weight"] = kind, np.float32(factor) * values
    return write_gguf(path, "llama", llama_metadata(context_length=96), tensors)


def some_ids(count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(4).integers(32, size=count)]


@pytest.fixture
def replans(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What overflow words held, each time that an engine had to run tokens again."""
    seen: list[dict[str, float]] = []
    own = Engine._rescale

    def noted(self: Engine, overflowed: dict[str, float], rows: int) -> Sequence[int]:
        seen.append(overflowed)
        return own(self, overflowed, rows)

    monkeypatch.setattr(Engine, "_rescale", noted)
    return seen


@pytest.mark.vulkan
def test_a_model_of_massive_activations(
    tmp_path: Path, device: Device, replans: list[dict[str, float]], caplog: pytest.LogCaptureFixture
) -> None:
    skip_without("coop_mat", device.caps)
    path, ids = massive(tmp_path / "massive.gguf", 1e4), some_ids(80)
    want = NumpyTwin(path).logits(ids)
    with engine_of(path, device, "coop_mat", n_ctx=96, ubatch=32) as engine:
        got = engine.prompt_logits(ids)
        assert nmse(got, want) <= KERNEL_NMSE["coop_mat"]
        assert 1 <= len(replans) <= 4
        assert {name for seen in replans for name in seen} == {f"ffn_swiglu-{il}.f16.overflow" for il in (0, 1)}
        assert all(MIN_SCALE <= scale < 1 for scale in engine.ctx.f16_scales.values())
        count = len(replans)
        said = [line for line in caplog.messages if "beyond the range of f16" in line]
        assert len(said) == count and "(ffn_swiglu-0.f16: 0.0" in said[0]
        engine.reset()
        assert nmse(engine.prompt_logits(ids), want) <= KERNEL_NMSE["coop_mat"]
        engine.reset()
        engine.prompt(ids[:50])
        assert nmse(engine.decode_logits(ids[50]), want[50]) <= KERNEL_NMSE["coop_mat"]
        assert len(replans) == count, "scales stay"


@pytest.mark.vulkan
def test_a_prompt_without_logits_is_run_again_too(tmp_path: Path, device: Device, replans: list[dict[str, float]]) -> None:
    skip_without("coop_mat", device.caps)
    path, ids = massive(tmp_path / "massive.gguf", 1e4), some_ids(50)
    with engine_of(path, device, "coop_mat", n_ctx=96, ubatch=32) as engine:
        engine.prepare(prompt=49)
        engine.prompt(ids[:-1])
        assert replans and engine.n_past == 49
        assert nmse(engine.decode_logits(ids[-1]), NumpyTwin(path).logits(ids)[-1]) <= KERNEL_NMSE["coop_mat"]


@pytest.mark.vulkan
def test_usual_models_are_never_run_again(device: Device, tmp_path: Path, replans: list[dict[str, float]]) -> None:
    skip_without("coop_mat", device.caps)
    with engine_of(massive(tmp_path / "usual.gguf", 10.0), device, "coop_mat", n_ctx=96, ubatch=32) as engine:
        engine.prompt(some_ids(80))
        assert any(is_overflow_word(t) for t in dict(engine.prompt_schedules(32))[32].tensors().values())
        assert not engine.ctx.f16_scales
    assert not replans


@pytest.mark.vulkan
def test_a_model_beyond_all_scales_is_an_error(tmp_path: Path, device: Device) -> None:
    skip_without("coop_mat", device.caps)
    tensors = llama_tensors(tied=False)
    tensors["blk.0.attn_norm.weight"] = "F32", np.full(64, 1e9, np.float32)
    path = write_gguf(tmp_path / "norm.gguf", "llama", llama_metadata(context_length=96), tensors)
    with (
        engine_of(path, device, "coop_mat", n_ctx=96, ubatch=32) as engine,
        pytest.raises(F16RangeError, match=r"activations reach .*; run with --act f32"),
    ):
        engine.prompt(some_ids(40))
