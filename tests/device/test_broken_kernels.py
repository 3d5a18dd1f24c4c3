"""Kernels broken on purpose: the suite catches them, and finds the smallest case that shows it."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import with_params

from vkback.device import Device
from vkback.harness.cases import make_case
from vkback.harness.result import CaseResult
from vkback.harness.shrink import save, shrink
from vkback.harness.suite import Suite
from vkback.ops.case import Case
from vkback.ops.dispatch import Arg, Dispatch, pack_push
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.linear_cases import mul_mat_case
from vkback.ops.op import OPS
from vkback.paths import shader_root
from vkback.shader import ShaderLibrary


@pytest.fixture
def break_shader(tmp_path: Path) -> Callable[[str, str, str], ShaderLibrary]:
    """A library in which a text of one shader is another."""

    def change(file: str, old: str, new: str) -> ShaderLibrary:
        root = tmp_path / "shaders"
        shutil.copytree(shader_root(), root)
        text = (root / file).read_text()
        assert old in text, f"{file} no longer says {old!r}: break it elsewhere"
        (root / file).write_text(text.replace(old, new))
        return ShaderLibrary(root)

    return change


@pytest.fixture
def break_lowering(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[list[Dispatch]], list[Dispatch]]], None]:
    """An op whose dispatches are changed before they are launched."""

    def change(op: str, by: Callable[[list[Dispatch]], list[Dispatch]]) -> None:
        lower = OPS[op].lower
        monkeypatch.setattr(OPS[op], "lower", lambda node, ctx: by(lower(node, ctx)))

    return change


def outcome(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> CaseResult:
    with Suite(device, library, ctx) as opened:
        return opened.run_one(case).result


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("const float scale = (row == 1u ? 1.001 : 1.0) / sqrt(", "rows with errors: 1 (1 in all)"),
        ("const float scale = (row == 1u ? 0.0 : 1.0) / sqrt(", "rows with errors: 1 (1 in all)"),
        ("const float scale = (row == 1u ? uintBitsToFloat(0x7fc00000u) : 1.0) / sqrt(", "not finite where they should be"),
    ],
    ids=["a thousandth off", "zero", "NaN"],
)
def test_one_wrong_row(
    new: str, message: str, device: Device, ctx: LowerContext, break_shader: Callable[[str, str, str], ShaderLibrary]
) -> None:
    library = break_shader("norm/norm.comp", "const float scale = 1.0 / sqrt(", new)
    result = outcome(make_case("RMS_NORM", {"ne": (33, 5)}), device, library, ctx)
    assert result.passed is False
    assert message in result.message


@pytest.mark.vulkan
def test_one_column_past_the_edge(device: Device, library: ShaderLibrary, ctx: LowerContext, break_lowering: Callable[..., None]) -> None:
    def longer(dispatches: list[Dispatch]) -> list[Dispatch]:
        (d,) = dispatches
        elements = int.from_bytes(d.push[:4], "little")
        return [dataclasses.replace(d, push=pack_push(elements + 1) + d.push[4:])]

    break_lowering("SUB", longer)
    result = outcome(make_case("SUB", {"ne": (37,), "nr": (1, 5, 1, 1)}), device, library, ctx)
    assert result.passed is False
    assert result.message == "[SUB] y F32[1, 1, 5, 37]: 4 guard bytes after it were overwritten"


@pytest.mark.vulkan
def test_reading_past_the_end_spoils_the_result(
    device: Device, ctx: LowerContext, break_shader: Callable[[str, str, str], ShaderLibrary]
) -> None:
    library = break_shader("norm/norm.comp", "4u * (q) + c < p.dim ? from", "4u * (q) + c <= p.dim ? from")
    result = outcome(make_case("RMS_NORM", {"ne": (33,)}), device, library, ctx)
    assert result.passed is False
    assert "not finite" in result.message


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("old", "new", "case", "message"),
    [
        (
            "NORMED(total[c]) + addend[c]",
            "NORMED(total[c]) * (first_row + lane == 5u ? 1.001 : 1.0) + addend[c]",
            ("F32", 17, 3, 256),
            "NMSE .* > 1e-09",
        ),
        ("first_row + (i << GLU) < p.m &&", "first_row + (i << GLU) <= p.m &&", ("Q8_0", 17, 1, 256), "4 guard bytes after it"),
        ("column + i < p.k ?", "column + i <= p.k ?", ("F16", 17, 1, 65), "not finite"),
        ("column + i < p.k ?", "column + i < p.k - 1u ?", ("F16", 17, 3, 65), "NMSE .* > 1e-09"),
        ("min(x_row + c, p.n - 1u)", "min(x_row + c + 1u, p.n - 1u)", ("Q4_K", 17, 3, 256), r"rows with errors: 0, 1 \(2 in all\)"),
        ("min(row + r, p.m - 1u)", "min(row + r, p.m - 2u)", ("Q6_K", 17, 1, 256), r"at \[0, 16\]"),
        ("UNIT_IN_ROW(unit), 0u,", "UNIT_IN_ROW(unit) + (row == 3u ? 1u : 0u), 0u,", ("Q8_0", 17, 1, 256), "NMSE|not finite"),
    ],
    ids=["a row off", "a row past", "a column past", "a column missing", "another token", "the last row", "a unit past"],
)
def test_faults_in_the_gemv_are_caught(
    old: str,
    new: str,
    case: tuple[str, int, int, int],
    message: str,
    device: Device,
    ctx: LowerContext,
    break_shader: Callable[[str, str, str], ShaderLibrary],
) -> None:
    file = next(f for f in ("gemv/gemv.comp", "gemv/epilogue.glsl", "gemv/act.glsl") if old in (shader_root() / f).read_text())
    one_subgroup = with_params(ctx, kernel="gemv", wg=16, lanes=8, rows=1, groups="per_tile")
    result = outcome(mul_mat_case(*case, act="f32"), device, break_shader(file, old, new), one_subgroup)
    assert result.passed is False
    assert re.search(message, result.message), result.message


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("file", "case"),
    [
        ("common/reduce.glsl", make_case("RMS_NORM", {"ne": (1024, 5)})),
        ("gemv/gemv.comp", mul_mat_case("Q8_0", 33, 1, 4096, act="f32")),
        ("gemv/gemv.comp", mul_mat_case("Q4_K", 33, 3, 4096, type_b="q8_1", act="q8_1")),
    ],
    ids=["reduction", "GEMV", "GEMV of bytes"],
)
def test_a_barrier_missing_between_subgroups(
    file: str, case: Case, device: Device, ctx: LowerContext, library: ShaderLibrary, break_shader: Callable[[str, str, str], ShaderLibrary]
) -> None:
    """Several subgroups share a row. A CPU driver runs them one after the other: the first then adds what the others have yet to write."""
    wide = with_params(ctx, kernel="gemv", wg_size=64, wg=64, lanes=64, rows=1, groups="per_tile")
    assert outcome(case, device, library, wide).passed
    result = outcome(case, device, break_shader(file, "barrier();", ""), wide)
    assert result.passed is False
    assert "NMSE" in result.message or "not finite" in result.message


@pytest.mark.vulkan
def test_a_missed_barrier(device: Device, library: ShaderLibrary, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    case = mul_mat_case("Q8_0", 8, 1, 256, act="q8_1")
    assert outcome(case, device, library, ctx).passed

    def one_stage(dispatches: Sequence[Dispatch]) -> list[list[Dispatch]]:
        return [list(dispatches)]

    monkeypatch.setattr("vkback.harness.runner.into_stages", one_stage)
    result = outcome(case, device, library, ctx)
    assert result.passed is False
    assert "not finite" in result.message


@pytest.mark.vulkan
def test_stale_scratch(device: Device, library: ShaderLibrary, ctx: LowerContext, break_lowering: Callable[..., None]) -> None:
    """The quantizer of x leaves most of its scratch as it was."""

    def partly(dispatches: list[Dispatch]) -> list[Dispatch]:
        first, *rest = dispatches
        assert first.groups > (1, 1, 1)
        return [dataclasses.replace(first, groups=(1, 1, 1)), *rest]

    case = mul_mat_case("Q8_0", 8, 3, 2048, act="q8_1")
    with Suite(device, library, ctx) as opened:
        assert opened.run_one(case).result.passed  # and leaves the right values where the next run has its scratch
        break_lowering("MUL_MAT", partly)
        result = opened.run_one(case).result
    assert result.passed is False
    assert "not finite" in result.message


@pytest.mark.vulkan
def test_an_input_overwritten(device: Device, library: ShaderLibrary, ctx: LowerContext, break_lowering: Callable[..., None]) -> None:
    """The result is right; then a second launch, which says that it only reads, changes an input."""

    def twice(dispatches: list[Dispatch]) -> list[Dispatch]:
        (d,) = dispatches
        a, b, y = (arg.tensor for arg in d.args)
        return [d, dataclasses.replace(d, args=(Arg(y), Arg(b), Arg(a)))]

    break_lowering("MUL", twice)
    result = outcome(make_case("MUL", {"ne": (64,), "nr": (1, 3, 1, 1)}), device, library, ctx)
    assert result.passed is False
    assert re.fullmatch(
        r"\[MUL\] a F32\[1, 1, 3, 64\]: \d+ of its 768 bytes were changed, the first at \d+, and the kernel may only read it",
        result.message,
    )


@pytest.mark.vulkan
def test_a_counter_not_put_back(device: Device, ctx: LowerContext, break_shader: Callable[[str, str, str], ShaderLibrary]) -> None:
    library = break_shader("common/ticket.glsl", "if (drawn == count - 1u) tickets[slot] = 0u;", "")
    result = outcome(make_case("ARGMAX", {"ne": (32000, 2)}), device, library, ctx)
    assert result.passed is False
    assert result.message == "[ARGMAX] ids.tickets I32[2]: 2 counters were not put back to zero"


@pytest.mark.vulkan
def test_a_failing_case_is_made_smaller_and_saved(
    tmp_path: Path, device: Device, ctx: LowerContext, break_shader: Callable[[str, str, str], ShaderLibrary]
) -> None:
    late = "const float scale = (row == 2u && p.dim > 40u ? 2.0 : 1.0) / sqrt("
    library = break_shader("norm/norm.comp", "const float scale = 1.0 / sqrt(", late)
    with Suite(device, library, ctx) as opened:
        least = shrink(make_case("RMS_NORM", {"ne": (100, 9)}), lambda case: opened.run_one(case).result.passed is False)
        assert least.params["ne"] == (41, 3, 1, 1)
        run = opened.run_one(least)
    saved = np.load(save(run, tmp_path))
    assert str(saved["line"]) == least.line
    assert saved["input.a"].shape == saved["got.y"].shape == saved["want.y"].shape == (1, 1, 3, 41)
    np.testing.assert_allclose(saved["got.y"][0, 0, :2], saved["want.y"][0, 0, :2], rtol=1e-5)
    assert not np.allclose(saved["got.y"][0, 0, 2], saved["want.y"][0, 0, 2])


def test_shrinking_keeps_to_whole_blocks() -> None:
    tried: list[Case] = []

    def fails(case: Case) -> bool:
        tried.append(case)
        return bool(case.params["m"] >= 5 and case.params["k"] >= 600)

    least = shrink(mul_mat_case("Q4_K", 300, 12, 4096), fails)
    assert least.line == make_case("MUL_MAT", {"type_a": "q4_K", "m": 5, "n": 1, "k": 768}).line
    assert all(c.params["k"] % 256 == 0 for c in tried)
    assert len(tried) < 40
