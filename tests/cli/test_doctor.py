"""vkback doctor, with shaders that are wrong only under one setting: it must name that setting."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kernel_paths import planned_for, with_params
from typer.testing import CliRunner

from vkback.cli import main as cli
from vkback.device import Capabilities, Device
from vkback.device.errors import DeviceLost
from vkback.harness import doctor
from vkback.harness.doctor import SWITCHES, Diagnosis, Tally, examine, report, spread
from vkback.harness.suite import Suite
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.linear_cases import fused_case, mul_mat_case
from vkback.ops.op import OPS
from vkback.paths import shader_root
from vkback.shader import ShaderLibrary, Variant

Break = Callable[[str, str, str], ShaderLibrary]


@pytest.fixture
def broken(tmp_path: Path) -> Break:
    """Shaders with one text in one file in the place of another."""

    def make(name: str, text: str, wrong: str) -> ShaderLibrary:
        root = tmp_path / "shaders"
        shutil.copytree(shader_root(), root)
        file = root / name
        assert text in file.read_text()
        file.write_text(file.read_text().replace(text, wrong))
        return ShaderLibrary(root, tmp_path / "cache")

    return make


CASES = [mul_mat_case("Q4_K", 32, 1, 256), mul_mat_case("F16", 32, 1, 256), fused_case("Q8_0", 32, 256, 1, ("residual",))]
SHAPE = {"wg": 32, "lanes": 8, "rows": 2, "unroll": 2, "prefetch": "weights", "groups": "per_tile", "subgroup": "default"}


def diagnose(device: Device, library: ShaderLibrary, ctx: LowerContext) -> tuple[Diagnosis, list[str]]:
    told: list[str] = []
    return examine(device, library, with_params(ctx, **SHAPE), CASES, told.append), told


@pytest.mark.vulkan
def test_a_wrong_integer_dot_is_named(device: Device, broken: Break, ctx: LowerContext) -> None:
    library = broken("common/int_dot.glsl", "int dot4(uint a, uint b) {", "int dot4(uint a, uint b) { b ^= 64u;")
    found, told = diagnose(device, library, ctx)
    assert [line for line, _ in found.failures] == [CASES[0].line, CASES[2].line]
    assert [s.name for s in found.cures] == ["integer dot off"]
    assert found.verdict == '2 of 3 cases wrong; "integer dot off" cures 2 of 2 examined. Meanwhile: --act f32'
    assert "integer dot off: cures 2" in told
    assert "fusion off: 1 still wrong, 1 with the same kernels" in told
    text = "\n".join(report(found, device.caps, "vkback 1"))
    assert "1/3 cases right" in text
    assert f"  {CASES[0].line}\n    [MUL_MAT] y: NMSE" in text
    assert f"verdict: {found.verdict}" in text


@pytest.mark.vulkan
def test_a_wrong_fusion_is_named(device: Device, broken: Break, ctx: LowerContext) -> None:
    library = broken("gemv/epilogue.glsl", "addend[c] += residual1[", "addend[c] -= residual1[")
    found, _ = diagnose(device, library, ctx)
    assert [line for line, _ in found.failures] == [CASES[2].line]
    assert [s.name for s in found.cures] == ["fusion off"]


@pytest.mark.vulkan
def test_a_shape_that_is_wrong_is_named(device: Device, broken: Break, ctx: LowerContext) -> None:
    library = broken("gemv/epilogue.glsl", "CAPPED(NORMED(total[c]) + addend[c])", "CAPPED(total[c] * (ROWS > 1 ? 1.5 : 1.0) + addend[c])")
    found, _ = diagnose(device, library, ctx)
    assert len(found.failures) == 3
    assert found.cures[0].name == "one row a row group"
    assert "a row [[gemv]] with set = { rows = 1 } in the device's own tuning table" in found.verdict


@pytest.mark.vulkan
def test_what_no_setting_cures_is_said(device: Device, broken: Break, ctx: LowerContext) -> None:
    found, _ = diagnose(device, broken("gemv/epilogue.glsl", "= not_sentinel(v);", "= not_sentinel(v + 9.0);"), ctx)
    assert found.verdict == "3 of 3 cases wrong; no setting cures any of them"


@pytest.mark.vulkan
def test_a_lost_device_ends_the_examination(
    device: Device, library: ShaderLibrary, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: Suite, cases: object) -> Iterator[object]:
        raise DeviceLost(f"{CASES[0].line}: gone", call="vkQueueSubmit", result="VK_ERROR_DEVICE_LOST")
        yield

    monkeypatch.setattr(Suite, "run", lost)
    found, _ = diagnose(device, library, ctx)
    assert not found.healthy
    assert found.verdict.startswith("the device stopped: ")
    assert CASES[0].line in found.verdict


def test_switches_name_what_tables_and_devices_have() -> None:
    assert len({s.name for s in SWITCHES}) == len(SWITCHES)
    ctx, node = planned_for("nvidia_h200_linux"), CASES[0].build().node

    def kernels(change: Callable[[LowerContext], LowerContext]) -> list[Variant]:
        return [d.kernel for d in OPS["MUL_MAT"].lower(node, change(ctx))]

    touched = {s.name for s in SWITCHES if s.change is not None and kernels(s.change) != kernels(lambda same: same)}
    assert {"integer dot off", "subgroup operations off", "workgroups of one subgroup"} <= touched


def test_the_cases_of_an_op_are_taken_evenly() -> None:
    cases = [mul_mat_case("Q4_K", m, 1, 256) for m in range(1, 11)] + [fused_case("Q8_0", 32, 256, 1, ("bias",))]
    assert [c.params["m"] for c in spread(cases, 4)] == [1, 4, 7, 10, 32]


def test_failures_are_examined_from_every_op() -> None:
    cases = [mul_mat_case("Q4_K", m, 1, 256) for m in range(1, 101)] + [fused_case("Q8_0", 32, 256, 1, ("bias",))]
    some = doctor._some(cases)
    assert len(some) == doctor.EXAMINED
    assert some[1].op == "LINEAR"


def test_the_narrowest_of_equal_cures_comes_first_and_few_lines_are_shown() -> None:
    tallies = {s.name: Tally(cured=["a"] if s.name in ("integer dot off", "prefetch off") else [], failing=["a"]) for s in SWITCHES}
    found = Diagnosis(20, 1, tuple((f"OP(m={i})", "wrong") for i in range(12)), 1, tallies)
    assert [s.name for s in found.cures] == ["prefetch off", "integer dot off"]
    lines = list(report(found, Capabilities.from_profile("nvidia_h200_linux"), "vkback 1\n"))
    assert "8/20 cases right, 1 not supported" in lines
    assert "  and 2 more" in lines


@pytest.mark.vulkan
def test_the_command_s_exit_code_says_whether_all_is_well(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    case = mul_mat_case("Q4_K", 16, 1, 256).line
    well = CliRunner().invoke(cli.app, ["doctor", "-o", case])
    assert well.exit_code == 0, well.output
    assert "verdict: all 1 cases right" in well.output
    library = broken("common/int_dot.glsl", "int dot4(uint a, uint b) {", "int dot4(uint a, uint b) { b ^= 64u;")
    monkeypatch.setattr("vkback.shader.library.shader_root", lambda: library.root)
    ill = CliRunner().invoke(cli.app, ["doctor", "-o", case])
    assert ill.exit_code == 1, ill.output
    assert '"integer dot off" cures 1 of 1 examined' in ill.output
