"""Values of tensors as bytes of the device, and back."""

from __future__ import annotations

from math import prod

import numpy as np

from vkback import quants
from vkback.device import Capabilities
from vkback.graph import Tensor
from vkback.ops.base import Array, nbytes, shards

NAN_WORD = 0x7FC0DEAD
"""What fills memory that has no value yet: NaN as F32, F16 and BF16."""


def q8_1_bytes(tensor: Tensor, value: Array) -> Array:
    """The bytes of a Q8_1 tensor whose value may be given in floats."""
    if value.dtype == np.uint8:
        return value.reshape(prod(tensor.shape[:-1]), -1)
    return quants.q8_1_quantize(value.reshape(-1, tensor.shape[-1]).astype(np.float32))


def stored_bytes(tensor: Tensor, value: Array | None, caps: Capabilities) -> list[Array]:
    """The bytes of a tensor as the device holds them, one array a shard; of one without a value NaN, of a counter zeros."""
    if tensor.kind == "weight" and len(tensor.shape) > 1:
        assert value is not None, f"{tensor} has no value"
        raw = value.reshape(prod(tensor.shape[:-1]), -1)
        return [quants.to_device(tensor.type, raw[s.row0 : s.row0 + s.rows], tensor.shape[-1]) for s in shards(tensor, caps)]
    if value is None and tensor.kind == "counter":
        return [np.zeros(nbytes(tensor), np.uint8)]
    if value is None:
        return [np.full(-(-nbytes(tensor) // 4), NAN_WORD, np.uint32).view(np.uint8)[: nbytes(tensor)]]
    if tensor.type == "Q8_1":
        return [np.ascontiguousarray(q8_1_bytes(tensor, value)).ravel()]
    dtype = {"F32": np.float32, "F16": np.float16, "I32": np.int32}[tensor.type]
    return [np.ascontiguousarray(value.astype(dtype)).ravel().view(np.uint8)]


def decoded(tensor: Tensor, raw: Array) -> Array:
    """A tensor's bytes as the host reads them: float32 (F32, F16, Q8_1) or int32 (I32), in its shape."""
    if tensor.type == "Q8_1":
        rows = raw[: nbytes(tensor)].reshape(prod(tensor.shape[:-1]), -1)
        return quants.q8_1_dequantize(rows, tensor.shape[-1]).reshape(tensor.shape)
    dtype = {"F32": np.float32, "F16": np.float16, "I32": np.int32}[tensor.type]
    return raw[: nbytes(tensor)].view(dtype).reshape(tensor.shape).astype(np.int32 if tensor.type == "I32" else np.float32)
