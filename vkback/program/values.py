"""Values of tensors as bytes in device memory, and back."""

from __future__ import annotations

from math import prod

import numpy as np

from vkback import quants
from vkback.device import Capabilities
from vkback.graph import Tensor
from vkback.ops.case import Array
from vkback.ops.general import DTYPES, INTEGERS
from vkback.ops.storage import VALUE_BYTES, in_planes, nbytes, shards
from vkback.plan.weight_layout import stored_type

NAN_WORD = 0x7FC0DEAD
"""Fills memory that has no value yet: NaN as F32, F16 and BF16."""


def plain_bytes(type: str, value: Array) -> Array:
    """Values of a type whose values are stored one after another, as bytes."""
    if type == "BF16":
        return quants.encode("BF16", np.ascontiguousarray(value, np.float32).reshape(1, -1)).ravel()
    raw: Array = np.ascontiguousarray(value.astype(DTYPES[type])).ravel().view(np.uint8)
    return raw


def q8_1_bytes(tensor: Tensor, value: Array) -> Array:
    """The bytes of a Q8_1 tensor; its value may be given as floats."""
    if value.dtype == np.uint8:
        return value.reshape(prod(tensor.shape[:-1]), -1)
    return quants.q8_1_quantize(value.reshape(-1, tensor.shape[-1]).astype(np.float32))


def stored_bytes(tensor: Tensor, value: Array | None, caps: Capabilities) -> list[Array]:
    """The bytes of a tensor as the device stores them, one array per shard. Without a value: NaN, or zeros for a counter."""
    if value is not None and in_planes(tensor):
        raw, stored = value.reshape(prod(tensor.shape[:-1]), -1), stored_type(tensor.type, tensor.shape[-1], caps)
        return [quants.to_device(stored, raw[s.row0 : s.row0 + s.rows], tensor.shape[-1]) for s in shards(tensor, caps)]
    if value is None and tensor.kind == "counter":
        return [np.zeros(nbytes(tensor), np.uint8)]
    if value is None:
        return [np.full(-(-nbytes(tensor) // 4), NAN_WORD, np.uint32).view(np.uint8)[: nbytes(tensor)]]
    if tensor.type == "Q8_1":
        return [np.ascontiguousarray(q8_1_bytes(tensor, value)).ravel()]
    raw = plain_bytes(tensor.type, value)
    return [np.pad(raw, (0, -raw.nbytes % 4))]


def decoded(tensor: Tensor, raw: Array, caps: Capabilities) -> Array:
    """A tensor's bytes as the host reads them, in its shape: float32 for every float type, integers unchanged."""
    if in_planes(tensor):
        n, k = prod(tensor.shape[:-1]), tensor.shape[-1]
        planes = [raw[p.offset :][: n * p.row_bytes].reshape(n, -1) for p in quants.layout(tensor.type, n, k).planes]
        weights: Array = quants.decode(tensor.type, quants.unpack(stored_type(tensor.type, k, caps), planes, k))
        return weights.reshape(tensor.shape)
    if tensor.type == "Q8_1":
        rows = raw[: nbytes(tensor)].reshape(prod(tensor.shape[:-1]), -1)
        return quants.q8_1_dequantize(rows, tensor.shape[-1]).reshape(tensor.shape)
    own = np.ascontiguousarray(raw[: VALUE_BYTES[tensor.type] * tensor.elements])
    if tensor.type == "BF16":
        return quants.decode("BF16", own).reshape(tensor.shape)
    values: Array = own.view(DTYPES[tensor.type]).reshape(tensor.shape)
    return values if tensor.type in INTEGERS else values.astype(np.float32)
