"""Whether a driver lays the elements of a matrix out over lanes in one way in all kernels, so that activations may be packed in that
order."""

from __future__ import annotations

import numpy as np

from vkback.device import Device
from vkback.ops.mat_mul import fragments_possible, matrix_shape
from vkback.shader import ShaderLibrary, Variant

Shape = tuple[int, int, int]


def fragments_alike(device: Device, library: ShaderLibrary, matrix: Shape) -> bool:
    """Run shaders/mat_mul/fragment_map.comp: a matrix B written lane by lane by one kernel and read back by another must be the same
    matrix.

    matrix  rows, columns and depth; the shape must be one of the device's
    """
    if not fragments_possible(matrix, device.caps):
        return False
    rows, columns, depth = matrix
    lanes = device.caps.subgroup_size
    elements = np.arange(depth * columns, dtype=np.float16)  # whole numbers up to 2048 are exact
    with device.arena("fragment map", 1 << 16, "device") as arena:
        source = arena.alloc(elements.nbytes, "matrix")
        fragment = arena.alloc(16 * lanes + 4, "fragment")
        result = arena.alloc(4 * rows * columns, "result")
        device.upload(source, elements)
        rec = device.recorder("fragment map")
        for back in (0, 1):
            kernel = device.kernel(
                library.spirv(Variant("mat_mul/fragment_map.comp")), name="mat_mul/fragment_map", bindings=3, push_bytes=0,
                spec={0: lanes, 1: lanes, 2: rows, 3: columns, 4: depth, 5: back},
                subgroup_size=lanes if device.caps.subgroup_required_size else None,
            )  # fmt: skip
            rec.dispatch(kernel, [source, fragment, result], b"", (1, 1, 1), "fragment map")
            rec.barrier()
        device.run(rec)
        held = device.download(fragment, np.uint32)
        found = device.download(result, np.float32).reshape(columns, rows).T
    depth_seen = min(rows, depth)
    return bool(held[-1] == 8 and np.array_equal(found[:depth_seen], elements.reshape(depth, columns)[:depth_seen]))


def fragments_hold(device: Device, library: ShaderLibrary) -> bool:
    """`fragments_alike` for the matrices that mat-mats take on this device; False where there are none."""
    matrix = matrix_shape(device.caps)
    return matrix is not None and fragments_alike(device, library, matrix)
