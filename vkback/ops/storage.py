"""How tensors lie in the device's memory (docs/weight_layout.md): their bytes, and weights cut into shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from vkback import quants
from vkback.device import Capabilities
from vkback.graph import Tensor
from vkback.ops.dispatch import ceil_div
from vkback.ops.lowering import PlanError

VALUE_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8, "I16": 2, "I8": 1}
"""Types whose values lie one after the other, with the bytes of one; a tensor of them takes whole words of 32 bits."""


def in_planes(tensor: Tensor) -> bool:
    """Whether it lies in the planes of docs/weight_layout.md: quantized, or a stored weight of several axes."""
    return (tensor.kind == "weight" and len(tensor.shape) > 1) or (tensor.type in quants.WEIGHT_TYPES and tensor.type not in VALUE_BYTES)


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor in device memory, in the layouts of docs/weight_layout.md (weights as one shard)."""
    if tensor.type in VALUE_BYTES and tensor.kind != "weight":
        return 4 * ceil_div(VALUE_BYTES[tensor.type] * tensor.elements, 4)
    k = tensor.shape[-1]
    if tensor.type == "Q8_1":
        return prod(tensor.shape[:-1]) * quants.q8_1_stride(k)
    if tensor.kind == "weight" and tensor.type in ("F32", "I32") and len(tensor.shape) == 1:
        return 4 * k
    return quants.layout(tensor.type, prod(tensor.shape[:-1]), k).nbytes


@dataclass(frozen=True)
class Shard:
    """Rows row0 .. row0 + rows of a weight (experts flattened), with the planes of those rows alone."""

    row0: int
    rows: int
    layout: quants.DeviceLayout


def shards(weight: Tensor, caps: Capabilities) -> tuple[Shard, ...]:
    """Cut a weight so that each shard fits the device's storage-buffer range.

    A matrix is cut by rows; a stack of experts between experts, since a dispatch must find any expert in one binding.
    Raises PlanError when one row (or the experts together) exceeds the range.
    """
    rows, k = prod(weight.shape[:-1]), weight.shape[-1]
    whole = quants.layout(weight.type, rows, k)
    limit = caps.max_storage_buffer_range
    if whole.nbytes <= limit:
        return (Shard(0, rows, whole),)
    if len(weight.shape) > 2:
        raise PlanError(f"[plan] {weight}: its experts take {whole.nbytes} bytes, the device binds at most {limit} bytes at once")
    step = rows * limit // whole.nbytes // 64 * 64
    while step and quants.layout(weight.type, step, k).nbytes > limit:
        step -= 64
    if step <= 0:
        raise PlanError(f"[plan] {weight}: 64 rows exceed the {limit} bytes the device binds at once")
    return tuple(Shard(r, min(step, rows - r), quants.layout(weight.type, min(step, rows - r), k)) for r in range(0, rows, step))


def weight_push(quant: str, layout: quants.DeviceLayout, k: int) -> list[int]:
    """The `Weights` block of shaders/quant/weights.glsl, in 16-byte words: units, part, plane[4]."""
    stem = layout.planes[0].name.rstrip("0123456789")
    parts = sum(p.name.rstrip("0123456789") == stem for p in layout.planes)
    others = [p.offset // 16 for p in layout.planes[parts:]]
    return [ceil_div(k, 32), layout.part_stride // 16, *others, *([0] * (4 - len(others)))]
