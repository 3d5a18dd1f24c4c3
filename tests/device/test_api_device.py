"""The Python interface for authors of kernels: tensors, ops and kernels on a device, and what it refuses."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkback
from vkback import quants
from vkback.api import device as device_module
from vkback.api.errors import ModelError
from vkback.api.ops import signature
from vkback.device import DeviceError
from vkback.ops.lowering import PlanError
from vkback.ops.op import OPS
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


def test_a_kernel_of_one_s_own_runs_and_is_timed(dev: vkback.Device, scale: vkback.CompiledKernel, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (lambda: dev.run_op("NOTHING", x), ModelError, r"no op is called NOTHING; of \d+ the nearest are "),
        (lambda: dev.run_op("ADD", x, np.ones(2, np.float32)), PlanError, "cannot be repeated to fill"),
        (lambda: scale(np.ones(3)), ModelError, "binding 0 is ndarray, expected a tensor of the device"),  # type: ignore[arg-type]
        (lambda: dev.compile(tmp_path / "nothing.comp"), ModelError, "no such file"),
        (lambda: dev.compile(tmp_path / "scale.comp"), CompileError, "WG_SIZE"),
    ):
        with pytest.raises(kind, match=text):
            call()


PUSHES = """#version 450
layout(local_size_x = 8) in;
struct Inner { float a; uint b; };
layout(push_constant) uniform Push { uint n; float f; mat2 m; layout(row_major) mat2 r; vec3 v; int q[2]; Inner s; } p;
layout(binding = 0) writeonly buffer OutY { float y[]; };
void main() {
    const float all[] = float[](
        float(p.n), p.f, p.m[0][0], p.m[0][1], p.m[1][0], p.m[1][1], p.r[0][0], p.r[0][1], p.r[1][0], p.r[1][1], p.v.x, p.v.y, p.v.z,
        float(p.q[0]), float(p.q[1]), p.s.a, float(p.s.b)
    );
    if (gl_LocalInvocationIndex == 0) for (int i = 0; i < 17; i++) y[i] = all[i];
}
"""


def test_push_constants_go_where_the_shader_has_them(dev: vkback.Device) -> None:
    kernel, y = dev.compile(source=PUSHES), dev.empty(17)
    values: list[Any] = [np.int64(1), np.float32(2), *map(float, range(3, 14)), -14, np.int8(15), np.float64(16), True]
    kernel(y, push=values, groups=np.int32(1))
    np.testing.assert_array_equal(y.numpy(), [*range(1, 14), -14, 15, 16, 1])


@pytest.mark.parametrize(
    ("push", "text"),
    [
        ((), r"scale: push has 0 values, the shader declares 2: uint, float\. Give one for each"),
        ([1], "push has 1 values, the shader declares 2"),
        ([1, 2.0, 3], "push has 3 values"),
        ([1, 2], r"push\[1\] is 2 \(int\), expected a float, as 2\.0: the shader has one there"),
        ([1.0, 2.0], r"push\[0\] is 1\.0 \(float\), expected a whole number: the shader has uint there"),
        ([np.float32(1), 2.0], r"push\[0\] is np\.float32\(1\.0\) \(float32\)"),
        ([-1, 2.0], r"push\[0\] is -1 \(int\), expected what uint holds"),
        ([2**32, 2.0], "expected what uint holds"),
        ([1, 1e300], r"push\[1\] is 1e\+300 \(float\), expected what a float holds"),
        ([1, None], r"push\[1\] is None"),
        (["1", 2.0], r"push\[0\] is '1' \(str\)"),
        (b"abcd", r"push has 4 bytes, the shader declares 8: uint, float"),
        ("abcdefgh", r"push is 'abcdefgh' \(str\), expected a list of numbers, or bytes"),
        (5, "push is 5"),
    ],
)
def test_push_constants_of_another_size_or_kind_are_refused(push: Any, text: str, dev: vkback.Device) -> None:
    kernel = dev.compile(source=SCALE.replace('#include "common/workgroup_of_scale.glsl"', "layout(local_size_x = 8) in;"))
    y = dev.empty(8)
    with pytest.raises(ModelError, match=text.replace("scale:", "source:")):
        kernel(y, y, push=push, groups=1)
    with pytest.raises(ModelError):
        dev.time(kernel, y, y, push=push)


def test_push_constants_as_bytes(dev: vkback.Device, scale: vkback.CompiledKernel) -> None:
    x, y = dev.tensor(np.ones(8, np.float32)), dev.empty(8)
    scale(x, y, push=struct.pack("<If", 8, 3.0), groups=1)
    assert y.numpy().tolist() == [3.0] * 8


def test_push_constants_that_nobody_uses_change_nothing(dev: vkback.Device) -> None:
    source = "#version 450\nlayout(local_size_x = 1) in;\n{}layout(binding = 0) buffer Y {{ float y[]; }};\nvoid main() {{ y[0] = 1.0; }}\n"
    y = dev.empty(1)
    dev.compile(source=source.format("layout(push_constant) uniform Push { uint n; } p;\n"))(y, push=[1])
    assert y.numpy().tolist() == [1.0]
    with pytest.raises(ModelError, match="push has 1 values, the shader declares 0: none"):
        dev.compile(source=source.format(""))(y, push=[1])


def test_a_kernel_is_given_no_fewer_push_constants_than_it_reads(dev: vkback.Device, scale: vkback.CompiledKernel) -> None:
    """Of any kernel, by the layer below."""
    with pytest.raises(DeviceError, match="declared with 4 bytes of push constants, but the shader reads 8"):
        dev.raw.kernel(scale._spirv, name="scale", bindings=2, push_bytes=4)


@pytest.mark.parametrize("groups", [(1, 1, 1, 7), (), 0, (1, 0), 2.0, "1", None, [1, 1, 1, 1], True])
def test_groups_that_are_none_are_refused(groups: Any, dev: vkback.Device, scale: vkback.CompiledKernel) -> None:
    y = dev.empty(8)
    with pytest.raises(ModelError, match=r"groups is .*expected a whole number of workgroups, 1 or more"):
        scale(y, y, push=[8, 1.0], groups=groups)


def test_arrays_that_the_device_does_not_hold_are_refused(dev: vkback.Device) -> None:
    for array, text in (
        (np.array([2**40]), r"an array of int64 from 1099511627776 to 1099511627776; the device keeps whole numbers as I32"),
        (np.array([-(2**31) - 1]), "from -2147483649"),
        (np.array([2**31], np.uint32), r"an array of uint32 .*array\.view\(np\.int32\)"),
        (np.array([2**63], np.uint64), "an array of uint64"),
        (np.array([1j]), r"an array of complex128; expected one of real numbers"),
        (["a"], "an array of <U1"),
        ([None], "an array of object"),
        (np.array(["2026-01-01"], "datetime64[D]"), "an array of datetime64"),
        ([1e300], r"an array of float64 with 1e\+300, which F32 does not hold"),
        ([[1], [2, 3]], r"\[\[1\], \[2, 3\]\] is no array"),
    ):
        with pytest.raises(ModelError, match=text):
            dev.tensor(array)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="an array of complex128"):
        dev.tensor(np.ones((2, 32), complex), "Q8_0")
    for held in (np.array([2**31 - 1, -(2**31)]), np.array([5], np.uint64), np.array([True])):
        assert dev.tensor(held).numpy().tolist() == held.astype(np.int32).tolist()
    assert np.isinf(dev.tensor([np.inf, 3.0]).numpy()[0])
    for shape in (0, -1, 2.5, (2, "3"), None, (2, 0)):
        with pytest.raises(ModelError, match=r"shape is .*expected a whole number, 1 or more, or several"):
            dev.empty(shape)  # type: ignore[arg-type]


def test_an_op_that_is_given_what_it_has_not_shows_an_example(dev: vkback.Device) -> None:
    x = np.ones((1, 8), np.float32)
    example = r"An example: dev\.run_op\('RMS_NORM', F32 \[[\d, ]+\], eps="
    for call, text in (
        (lambda: dev.run_op("RMS_NORM", x), rf"RMS_NORM: the parameter 'eps' is missing\. {example}"),
        (lambda: dev.run_op("RMS_NORM", x, eps="a"), rf"RMS_NORM: could not convert .*\. {example}"),
        (lambda: dev.run_op("RMS_NORM", x, eps=1e-5, epsilon=1), rf"nothing asks for the parameter epsilon\. {example}"),
        (lambda: dev.run_op("SQR", x, x), r"nothing reads the input 1, <F32 \[1, 8\]"),
        (lambda: dev.run_op("RMS_NORM", eps=1e-5), rf"give its inputs, tensors of the device or arrays\. {example}"),
        (lambda: dev.run_op("ROPE", x), r"ROPE: .*An example: dev\.run_op\('ROPE', F32 \[.*\], I32 \[.*\], mode="),
        (lambda: dev.run_op("ADD", x), r"ADD: .*An example: dev\.run_op\('ADD', F32"),
        (lambda: dev.run_op("rms_norm", x), r"no op is called rms_norm; of \d+ the nearest are RMS_NORM, "),
        (lambda: dev.reference("RMS_NORM")(x), rf"the parameter 'eps' is missing\. {example}"),
        (lambda: dev.reference("RMS_NORN"), r"no op is called RMS_NORN; of \d+ the nearest are RMS_NORM, "),
        (lambda: dev.time("RMS_NORM", x), "the parameter 'eps' is missing"),
        (lambda: dev.time("SQR", x, push=[1]), "an op takes neither push nor groups"),
        (lambda: dev.run_op("SQR", x, out="ab"), "out is 'ab'"),  # type: ignore[arg-type]
        (lambda: dev.matmul(x, x), r"the left side of @ is ndarray, expected weights of the device"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ModelError, match=text):
            call()


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_op_has_an_example(op: str) -> None:
    assert signature(op).startswith(f"dev.run_op({op!r}, ") and ") -> " in signature(op)


def test_a_reference_is_what_the_device_is_judged_by(dev: vkback.Device) -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((2, 256)).astype(np.float32), dev.tensor(rng.standard_normal((64, 256)), "Q4_K")
    want = dev.reference("RMS_NORM")(x, eps=1e-5)
    assert want.dtype == np.float64 and want.shape == x.shape
    np.testing.assert_allclose(dev.run_op("RMS_NORM", x, eps=1e-5).numpy(), want, rtol=1e-5)  # some ulps of f32
    product = dev.reference("MUL_MAT")(w, x)
    # Sums of 256 products in f32.
    np.testing.assert_allclose((w @ x).numpy(), product, atol=1e-3)


def test_tensors_are_arrays_to_others(dev: vkback.Device) -> None:
    x, ids = dev.tensor(np.arange(6, dtype=np.float32).reshape(2, 3)), dev.tensor([1, 2])
    assert np.from_dlpack(x).tolist() == x.numpy().tolist()
    assert (x[1, 2], x[0].tolist(), len(x)) == (5.0, [0.0, 1.0, 2.0], 2)
    assert x.dtype == np.float32 and ids.dtype == np.int32


def test_arithmetic_and_writing(dev: vkback.Device) -> None:
    a, b = np.arange(1, 13, dtype=np.float32).reshape(3, 4), np.array([2, 4, 8, 16], np.float32)
    x, y = dev.tensor(a), dev.tensor(b)
    for found, want in ((x + y, a + b), (x - b, a - b), (x * 2, a * 2), (2.0 * x, a * 2), (1 + x, a + 1), (x / y, a / b), (x + x, a + a)):
        assert isinstance(found, vkback.DeviceTensor)
        np.testing.assert_allclose(found.numpy(), want, rtol=1e-6)
    x[1] = 7
    x[:, 0] = [1, 2, 3]
    a[1], a[:, 0] = 7, [1, 2, 3]
    np.testing.assert_array_equal(x.numpy(), a)
    ids = dev.tensor(np.array([1, 2], np.int32))
    ids[0] = 5
    assert ids.numpy().tolist() == [5, 2]
    w = dev.tensor(np.ones((2, 256)), "q4_k")
    assert w.type == "Q4_K" and dev.empty(4, "f16").type == "F16"
    with pytest.raises(ModelError, match=r"weights stay as they are; make others with dev\.tensor\(array, 'Q4_K'\)"):
        w[0] = 1


def test_a_source_is_compiled_as_a_file_is(dev: vkback.Device) -> None:
    with pytest.raises(CompileError, match=r"source\.comp"):
        dev.compile(source="#version 450\nvoid main() { nothing(); }\n")
    for path, source in ((None, None), ("a.comp", "x")):
        with pytest.raises(ModelError, match="compile takes the path of a GLSL compute shader, or source=, its text: one of them"):
            dev.compile(path, source=source)
    with pytest.raises(ModelError, match="source is 5"):
        dev.compile(source=5)  # type: ignore[arg-type]


def test_devices_share_nothing(dev: vkback.Device, scale: vkback.CompiledKernel) -> None:
    with vkback.Device() as other:
        y = other.empty(8)
        for call, text in (
            (lambda: scale(y, y, push=[8, 1.0]), "binding 0 is on another device"),
            (lambda: other.time(scale, y, y, push=[8, 1.0]), "it was compiled for another device"),
            (lambda: dev.run_op("SQR", np.ones(8), out=y), "out is on another device"),
            (lambda: dev.run_op("SQR", y), "input 0 is on another device"),
        ):
            with pytest.raises(ModelError, match=text):
                call()
    assert [caps.name for caps in vkback.devices()].count(dev.name) >= 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"act": "int8"}, r"act is 'int8' \(str\), expected one of auto, f32, q8_1"),
        ({"act": "f16"}, "act is 'f16'"),
        ({"selector": 1.5}, r"selector is 1\.5 \(float\), expected an index"),
        ({"validation": "yes"}, 'validation is .yes., expected True, False, or "sync"|validation is .yes. '),
    ],
)
def test_what_opening_a_device_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        vkback.Device(**options)


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
