"""Start-up checks: whether a driver distributes the elements of a matrix over lanes alike in all kernels, so that activations can
be packed in that order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vkback.device import Device, Kernel
from vkback.ops.cooperative_matrix import fragments_possible, matrix_shape, matrix_shapes, matrix_spec
from vkback.ops.workgroup import required_subgroup
from vkback.program.compile import kernel_of
from vkback.shader import ShaderLibrary, Spec, Variant

Shape = tuple[int, int, int]


def fragments_alike(device: Device, library: ShaderLibrary, matrix: Shape) -> bool:
    """Run shaders/gemm/fragment_map.comp: a matrix B written lane by lane by one kernel and read back by another must be the same
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
            kernel = _kernel(device, library, "gemm/fragment_map.comp", matrix_spec(1, matrix, device.caps) | {"BACK": back})
            rec.dispatch(kernel, [source, fragment, result], b"", (1, 1, 1), "fragment map")
            rec.barrier()
        device.run(rec)
        held = device.download(fragment, np.uint32)
        found = device.download(result, np.float32).reshape(columns, rows).T
    depth_seen = min(rows, depth)
    return bool(held[-1] == 8 and np.array_equal(found[:depth_seen], elements.reshape(depth, columns)[:depth_seen]))


def _kernel(device: Device, library: ShaderLibrary, source: str, spec: Spec) -> Kernel:
    variant = Variant.of(source, spec=spec, subgroup_size=required_subgroup(device.caps))
    return kernel_of(device, library, variant, 3, 0)


def row_lanes_found(device: Device, library: ShaderLibrary) -> int:
    """Number of neighbouring lanes that share a row of a matrix, in the layout that shaders/gemm/matrix.glsl describes, for all matrix
    shapes that kernels use on this device; 0 if the layout differs or there are no matrices."""
    found = {_row_lanes(device, library, shape) for shape in matrix_shapes(device.caps)}
    return found.pop() if len(found) == 1 else 0


def _row_lanes(device: Device, library: ShaderLibrary, matrix: Shape) -> int:
    rows, columns, depth = matrix
    lanes = device.caps.subgroup_size
    if max(rows * depth, depth * columns, rows * columns) > 16 * lanes:
        return 0
    numbers = np.arange(max(rows * depth, depth * columns, rows * columns))
    with device.arena("element map", 1 << 16, "device") as arena:
        f16, f32 = arena.alloc(2 * numbers.size, "f16"), arena.alloc(4 * numbers.size, "f32")
        out = arena.alloc(3 * 16 * 4 * lanes, "elements")
        device.upload(f16, numbers.astype(np.float16))  # whole numbers up to 2048 are exact
        device.upload(f32, numbers.astype(np.float32))
        kernel = _kernel(device, library, "gemm/element_map.comp", matrix_spec(1, matrix, device.caps))
        rec = device.recorder("element map")
        rec.dispatch(kernel, [f16, f32, out], b"", (1, 1, 1), "element map")
        rec.barrier()
        device.run(rec)
        held = device.download(out, np.float32).reshape(3, lanes, 16).astype(np.int64)
    return lanes_of_row(held, matrix)


def lanes_of_row(held: npt.NDArray[np.int64], matrix: Shape) -> int:
    """The T of shaders/gemm/matrix.glsl; 0 if the layout differs.

    held  [3, lanes, 16]: numbers (row-major) of the elements of A, B and sums that each lane holds; -1 after the last
    """
    rows, columns, depth = matrix
    lanes = held.shape[1]
    counts = [rows * depth // lanes, depth * columns // lanes, rows * columns // lanes]
    if any((h[:, :count] < 0).any() or (h[:, count:] >= 0).any() for h, count in zip(held, counts, strict=True)):
        return 0
    a, b, sums = (h[:, :count] for h, count in zip(held, counts, strict=True))
    lane = np.arange(lanes)[:, None]
    for t in (t for t in range(1, lanes + 1) if lanes % t == 0 and depth % t == 0 and columns % t == 0):
        group = lanes // t

        def lines(count: int, each: int, t: int = t, group: int = group) -> npt.NDArray[np.int64]:
            """Row (for B: column) of each element, with `each` elements of a row side by side."""
            return lane // t + group * (np.arange(count)[None, :] // max(each, 1))

        along_a, along_b, along_sums = a % depth, b // columns, sums % columns
        per_row = depth // t
        alike = (
            np.array_equal(a // depth, lines(a.shape[1], per_row))
            and np.array_equal(b % columns, lines(b.shape[1], per_row))
            and np.array_equal(sums // columns, lines(sums.shape[1], columns // t))
        )
        if not alike:
            continue
        slots = along_a[:t, :per_row]  # places along K of the lanes of a row
        here = slots[np.arange(lanes) % t]
        same = all(np.array_equal(along, np.tile(here, along.shape[1] // per_row)) for along in (along_a, along_b))
        if same and (columns != depth or np.array_equal(along_sums, along_a)):
            return t
    return 0


def fragments_hold(device: Device, library: ShaderLibrary) -> bool:
    """`fragments_alike` for the matrices that GEMMs use on this device; False if there are none."""
    matrix = matrix_shape(device.caps)
    return matrix is not None and fragments_alike(device, library, matrix)
