"""The Python interface for authors of kernels: tensors, ops and kernels on a device, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import vkback
from vkback import quants
from vkback.api import device as device_module
from vkback.api.errors import ModelError
from vkback.ops.lowering import PlanError
from vkback.shader import CompileError

pytestmark = pytest.mark.vulkan

SCALE = """#version 450
#include "common/workgroup_of_scale.glsl"
layout(push_constant) uniform Push { uint elements; float factor; } p;
layout(binding = 0) readonly buffer InX { float x[]; };
layout(binding = 1) writeonly buffer OutY { float y[]; };
void main() {
    const uint i = gl_GlobalInvocationID.x;
    if (i < p.elements) y[i] = p.factor * x[i];
}
"""


@pytest.fixture(scope="module")
def dev() -> Iterator[vkback.Device]:
    with vkback.Device(act="f32") as opened:
        yield opened


@pytest.fixture
def scale(dev: vkback.Device, tmp_path: Path) -> vkback.CompiledKernel:
    (tmp_path / "common").mkdir()
    (tmp_path / "common/workgroup_of_scale.glsl").write_text("layout(local_size_x = WG_SIZE) in;\n")
    (tmp_path / "scale.comp").write_text(SCALE)
    return dev.compile(tmp_path / "scale.comp", {"WG_SIZE": 8})


@pytest.mark.parametrize("type", ["Q4_K", "Q8_0", "F16", "F32"])
def test_weights_come_back_as_their_blocks_mean(type: str, dev: vkback.Device) -> None:
    values = np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32)
    w = dev.tensor(values, type)
    want = quants.decode(type, quants.encode(type, values)).reshape(5, 256)
    np.testing.assert_array_equal(w.numpy(), want)
    np.testing.assert_array_equal(np.asarray(w), want)
    assert (w.type, w.shape, w.elements) == (type, (5, 256), 1280)


def test_plain_arrays_come_back(dev: vkback.Device) -> None:
    for values in (np.arange(6, dtype=np.float32).reshape(2, 3), np.array([[1, -2]], np.int32)):
        found = dev.tensor(values).numpy()
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, values)
    assert dev.tensor([1.5, 2.5]).numpy().tolist() == [1.5, 2.5] and dev.empty(3).shape == (3,)


def test_products_are_numpy_s(dev: vkback.Device) -> None:
    rng = np.random.default_rng(2)
    w = dev.tensor(rng.standard_normal((64, 256)), "Q4_K")
    for shape in ((256,), (3, 256)):
        x = rng.standard_normal(shape).astype(np.float32)
        # Sums of 256 products in f32.
        np.testing.assert_allclose((w @ x).numpy(), x @ w.numpy().T, atol=1e-3)
        np.testing.assert_allclose((w @ dev.tensor(x)).numpy(), x @ w.numpy().T, atol=1e-3)


def test_a_kernel_of_one_s_own_runs_and_is_timed(
    dev: vkback.Device, scale: vkback.CompiledKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "measure_read_rate", lambda *_: type("Rate", (), {"gb_s": 2.0})())
    x, y = dev.tensor(np.arange(100, dtype=np.float32)), dev.empty((100,))
    scale(x, y, push=[100, 0.5], groups=13)
    np.testing.assert_array_equal(y.numpy(), 0.5 * np.arange(100))
    found = dev.time(scale, x, y, push=[100, 0.5], groups=(13, 1), repetitions=3)
    assert found.us > 0 and found.nbytes == 800
    assert found.share == pytest.approx(800 / found.us / 1e3 / 2.0)
    assert "of the 2.0 GB/s that the device reads" in str(found)
    assert dev.time(scale, x, y, push=[100, 0.5], groups=13, nbytes=8, repetitions=3).nbytes == 8


def test_what_a_device_refuses(dev: vkback.Device, scale: vkback.CompiledKernel, tmp_path: Path) -> None:
    w, x = dev.tensor(np.ones((32, 32)), "Q8_0"), dev.tensor(np.ones(31, np.float32))
    for call, kind, text in (
        (lambda: w @ x, ModelError, r"w is \[32, 32\], so x must be \[32\] or \[n, 32\], got \[31\]"),
        (lambda: x @ x, ModelError, "the left side must be weights, made with a type"),
        (lambda: dev.tensor(np.ones((2, 31)), "Q8_0"), quants.QuantShapeError, "31"),
        (lambda: dev.tensor(np.ones((2, 32)), "Q9"), quants.UnknownQuant, "Q9"),
        (lambda: dev.tensor(np.ones(32), "Q8_0"), ModelError, r"weights have at least two axes, \[m, k\], got \[32\]"),
        (lambda: dev.tensor([]), ModelError, "has no elements"),
        (lambda: dev.run_op("NOTHING", x), ModelError, "no op is called NOTHING; there are ABS, "),
        (lambda: dev.run_op("ADD", x, np.ones(2, np.float32)), PlanError, "cannot be repeated to fill"),
        (lambda: scale(np.ones(3)), ModelError, "binding 0 is ndarray, expected a tensor of the device"),  # type: ignore[arg-type]
        (lambda: dev.compile(tmp_path / "nothing.comp"), ModelError, "no such file"),
        (lambda: dev.compile(tmp_path / "scale.comp"), CompileError, "WG_SIZE"),
    ):
        with pytest.raises(kind, match=text):
            call()


def test_memory_goes_back_with_its_tensor(dev: vkback.Device) -> None:
    before = dev.raw.live_objects().get("Arena", 0)
    w = dev.tensor(np.ones((32, 32)), "Q8_0")
    y = w @ np.ones(32, np.float32)
    assert dev.raw.live_objects().get("Arena", 0) == before + 2
    del w
    assert y.numpy().shape == (32,)
    del y
    assert dev.raw.live_objects().get("Arena", 0) == before


def test_a_closed_device_says_so() -> None:
    dev = vkback.Device()
    w = dev.tensor(np.ones(3, np.float32))
    dev.close()
    for call in (lambda: dev.tensor([1.0]), w.numpy):
        with pytest.raises(vkback.VkbackError, match="this Device is closed"):
            call()
