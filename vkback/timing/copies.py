"""Tensors in device memory in several copies. Launches that take them in turn read weights that no cache holds any more."""

from __future__ import annotations

from collections.abc import Iterable

from vkback.device import Arena, BufferRange, Capabilities, Device
from vkback.graph import Tensor
from vkback.ops.case import Array
from vkback.ops.storage import nbytes, shards
from vkback.plan.schedule import aligned
from vkback.program.values import stored_bytes

Blocks = tuple[BufferRange, ...]
"""Where a tensor is: a block a shard, one for what has no shards."""


def rotates(tensor: Tensor) -> bool:
    """Whether a tensor is what a model reads once a token: weights and caches."""
    return len(tensor.shape) > 1 and tensor.kind in ("weight", "state")


def block_sizes(tensor: Tensor, caps: Capabilities) -> list[int]:
    """Bytes of each block of a tensor."""
    if tensor.kind == "weight" and rotates(tensor):
        return [aligned(s.layout.nbytes) for s in shards(tensor, caps)]
    return [aligned(nbytes(tensor))]


def copied_bytes(tensors: Iterable[Tensor], caps: Capabilities) -> int:
    """Bytes of one copy of some tensors."""
    return sum(sum(block_sizes(t, caps)) for t in tensors)


def upload_copies(device: Device, arena: Arena, caps: Capabilities, tensor: Tensor, value: Array, copies: int) -> list[Blocks]:
    """A tensor so many times: uploaded once, then copied on the device. caps: those that say how it is cut into shards."""
    sizes = block_sizes(tensor, caps)
    made = [tuple(arena.alloc(size, tensor.name) for size in sizes) for _ in range(copies)]
    for block, data in zip(made[0], stored_bytes(tensor, value, caps), strict=True):
        device.upload(block, data)
    if copies > 1:
        rec = device.recorder("copies")
        for copy in made[1:]:
            for source, target in zip(made[0], copy, strict=True):
                rec.copy(source, target)
        device.run(rec)
    return made
