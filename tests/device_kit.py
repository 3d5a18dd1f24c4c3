"""What the tests of the device layer share: shaders, their SPIR-V, an arena, small helpers."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vkback.api.device import Device as ApiDevice
from vkback.api.device import DeviceTensor
from vkback.device import Arena, BufferRange, Capabilities, Device
from vkback.graph import Tensor
from vkback.shader import ShaderLibrary, Variant

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

SHADERS = {
    # c[i] = a[i] + SCALE * b[i] for i < n
    "add": """#version 450
layout(local_size_x_id = 1, local_size_x = 64) in;
layout(constant_id = 0) const uint SCALE = 1;
layout(set = 0, binding = 0) readonly buffer A { float a[]; };
layout(set = 0, binding = 1) readonly buffer B { float b[]; };
layout(set = 0, binding = 2) writeonly buffer C { float c[]; };
layout(push_constant) uniform Push { uint n; };
void main() {
    uint i = gl_GlobalInvocationID.x;
    if (i < n) c[i] = a[i] + float(SCALE) * b[i];
}
""",
    "nothing": """#version 450
layout(local_size_x = 1) in;
void main() {}
""",
    # word 0 counts the runs
    "count": """#version 450
layout(local_size_x = 1) in;
layout(set = 0, binding = 0) buffer A { uint a[]; };
void main() { a[0] = a[0] + gl_NumWorkGroups.x; }
""",
    # x = 3x + 1, a chain that shows any missing or doubled step
    "step": """#version 450
layout(local_size_x = 1) in;
layout(set = 0, binding = 0) readonly buffer A { uint a[]; };
layout(set = 0, binding = 1) writeonly buffer B { uint b[]; };
void main() { b[0] = 3 * a[0] + 1; }
""",
    # four signed bytes each
    "dot": """#version 450
#extension GL_EXT_spirv_intrinsics : require
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int sdot(int a, int b, spirv_literal int packed_format);
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer A { int a[]; };
layout(set = 0, binding = 1) readonly buffer B { int b[]; };
layout(set = 0, binding = 2) writeonly buffer C { int c[]; };
void main() {
    uint i = gl_GlobalInvocationID.x;
    c[i] = sdot(a[i], b[i], 0);
}
""",
    "shared": """#version 450
layout(local_size_x = 64) in;
struct Pair { vec4 a; uvec2 b; };
shared Pair pairs[3][8];
shared uint word;
layout(set = 0, binding = 0) buffer A { float a[]; };
void main() {
    const uint i = gl_LocalInvocationID.x;
    pairs[i & 1][i & 7] = Pair(vec4(a[i]), uvec2(i));
    if (i == 0) word = i;
    barrier();
    a[i] = pairs[0][i & 7].a.x + float(pairs[1][i & 7].b.y + word);
}
""",
    # seconds of work
    "busy": """#version 450
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) buffer A { uint a[]; };
layout(push_constant) uniform Push { uint n; };
void main() {
    uint x = a[0] + gl_GlobalInvocationID.x;
    for (uint i = 0; i < n; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
    }
    a[gl_LocalInvocationID.x] = x;
}
""",
    "subgroup": """#version 450
#extension GL_KHR_shader_subgroup_basic : require
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) writeonly buffer A { uint a[]; };
void main() { if (gl_LocalInvocationID.x == 0) a[0] = gl_SubgroupSize; }
""",
    "half": """#version 450
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_KHR_shader_subgroup_clustered : require
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) buffer A { float a[]; };
void main() { a[0] = subgroupClusteredAdd(a[1], 4) + float(float16_t(a[2]) * float16_t(a[3])); }
""",
}


@pytest.fixture(scope="session")
def spirv(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("shaders")
    for name, source in SHADERS.items():
        (root / f"{name}.comp").write_text(source)
    variants = {name: Variant(f"{name}.comp") for name in SHADERS}
    built = ShaderLibrary(root).compile_many(variants.values())
    return {name: built[v] for name, v in variants.items()}


@pytest.fixture
def arena(device: Device) -> Iterator[Arena]:
    with device.arena("test", 4 * MiB, "device") as made:
        yield made


def word(value: int) -> bytes:
    return struct.pack("<I", value)


def hidden(r: BufferRange) -> BufferRange:
    """The range as on a GPU whose memory the host does not see: transfers take the staged way."""
    return dataclasses.replace(r, address=0)


def profile(name: str, **changes: Any) -> Capabilities:
    return dataclasses.replace(Capabilities.from_profile(name), **changes)


def driver_of(device: Device) -> Any:
    """What calls Vulkan for a device."""
    return device._driver


def lose(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver say from here on that it has lost the device. Nothing is truly in flight then."""
    device._queue.last.wait()
    monkeypatch.setattr(device._queue, "_completed", 0)
    for call in ("vkWaitSemaphores", "vkGetSemaphoreCounterValue", "vkQueueSubmit"):
        monkeypatch.setattr(driver_of(device).fn, call, lambda *_: -4)  # VK_ERROR_DEVICE_LOST


def upload_weight(device: ApiDevice, weight: Tensor, blocks: np.ndarray) -> DeviceTensor:
    """A weight in the device's layout, from its blocks as a file has them."""
    return device._stored(weight, blocks)
