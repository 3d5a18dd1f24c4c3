"""What drivers tell about kernels: read through the structs of the real binding, from a driver made up here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from vkback.cli import main as cli
from vkback.device import Device, DeviceError, FeatureMissing, KernelSpec
from vkback.device.driver import ffi, vk
from vkback.device.statistics import EXTENSION, CompiledText, Statistic, read_statistics, read_texts

FORMATS = {kind: getattr(vk, f"VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_{kind}_KHR") for kind in ("BOOL32", "INT64", "UINT64", "FLOAT64")}
TOLD: dict[str, list[tuple[str, str, str, Any]]] = {
    "SIMD16": [("Spills", "values that found no register", "INT64", 0), ("Dispatch", "", "BOOL32", True)],
    "SIMD32": [("Registers", "of a thread", "UINT64", 64), ("Cycles", "as estimated", "FLOAT64", 1234.5)],
}


class Teller:
    """Answers in the two-call idiom."""

    def vkGetPipelineExecutablePropertiesKHR(self, device: Any, info: Any, count: Any, items: Any) -> int:  # noqa: N802
        assert info.pipeline == ffi.cast("VkPipeline", 7)
        count[0] = len(TOLD)
        for i, name in enumerate(TOLD if items else ()):
            items[i].name = name.encode()
        return 0

    def vkGetPipelineExecutableStatisticsKHR(self, device: Any, info: Any, count: Any, items: Any) -> int:  # noqa: N802
        told = list(TOLD.values())[info.executableIndex]
        count[0] = len(told)
        for i, (name, description, kind, value) in enumerate(told if items else ()):
            items[i].name, items[i].description, items[i].format = name.encode(), description.encode(), FORMATS[kind]
            setattr(items[i].value, {"BOOL32": "b32", "INT64": "i64", "UINT64": "u64", "FLOAT64": "f64"}[kind], value)
        return 0

    def vkGetPipelineExecutableInternalRepresentationsKHR(self, device: Any, info: Any, count: Any, items: Any) -> int:  # noqa: N802
        code = f"mov r{info.executableIndex}, 1".encode()
        count[0] = 2
        for i, (name, is_text) in enumerate((("Assembly", 1), ("Binary", 0)) if items else ()):
            items[i].name, items[i].isText = name.encode(), is_text
            if items[i].pData == ffi.NULL:
                items[i].dataSize = len(code) + 1
            else:
                ffi.memmove(items[i].pData, code + b"\0", items[i].dataSize)
        return 0


def test_the_code_is_read_as_far_as_it_is_text() -> None:
    fn = Teller()
    driver: Any = SimpleNamespace(device=ffi.NULL, fn=fn, call=lambda name, *args, about: getattr(fn, name)(*args))
    assert read_texts(driver, ffi.cast("VkPipeline", 7)) == [CompiledText(form, "Assembly", f"mov r{i}, 1") for i, form in enumerate(TOLD)]


def test_every_form_of_a_kernel_and_every_kind_of_figure_is_read() -> None:
    driver: Any = SimpleNamespace(device=ffi.NULL, fn=Teller())
    got = read_statistics(driver, ffi.cast("VkPipeline", 7))
    assert got == [Statistic(form, name, value, about) for form, told in TOLD.items() for name, about, _, value in told]
    assert [type(s.value) for s in got] == [int, bool, int, float]


@pytest.mark.vulkan
def test_a_device_is_opened_for_statistics_or_says_why_not(device: Device) -> None:
    with pytest.raises(DeviceError, match=r"statistics of kernels were not asked for; open the device with statistics=True"):
        device.kernel_statistics(KernelSpec(b"", "none", 0, 0))
    if EXTENSION in device.caps.extensions:
        code, said = explain_statistics()
        assert code == 0
        assert "kernel gemv " in said
        return
    with pytest.raises(FeatureMissing, match=rf"statistics of kernels need {EXTENSION}, which .* does not offer\. Do without them, or use"):
        Device.open(statistics=True)
    assert explain_statistics()[0] == 1


def explain_statistics(*arguments: str) -> tuple[int, str]:
    ran = CliRunner().invoke(cli.app, ["explain", "MUL_MAT(type_a=q8_0,m=64,n=1,k=256)", "--statistics", *arguments])
    return ran.exit_code, ran.output + ("" if ran.exception is None else str(ran.exception))


def test_statistics_of_a_recorded_device_are_refused() -> None:
    code, said = explain_statistics("--profile", "nvidia_h200_linux")
    assert code == 1
    assert "--statistics and --profile exclude each other" in said
