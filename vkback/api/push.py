"""Push constants of a kernel of one's own, checked against what its SPIR-V declares."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vkback.api import given
from vkback.api.errors import ModelError
from vkback.device import PushConstant

Push = Sequence[int | float | np.number[Any]] | bytes
"""Numbers in the order of their declaration, or all bytes as they are."""

FORMATS = {"int": {8: "b", 16: "h", 32: "i", 64: "q"}, "uint": {8: "B", 16: "H", 32: "I", 64: "Q"}, "float": {16: "e", 32: "f", 64: "d"}}


def packed(kernel: str, declared: Sequence[PushConstant], push: Push) -> bytes:
    """The bytes of a launch. Raises ModelError for another count than declared, and a value that its constant does not hold."""
    size = max((c.offset + c.width // 8 for c in declared), default=0)
    if isinstance(push, bytes | bytearray):
        if len(push) != size:
            raise ModelError(f"[device] {kernel}: push has {len(push)} bytes, the shader declares {size}: {_shown(declared)}")
        return bytes(push).ljust(-(-size // 4) * 4, b"\0")
    if isinstance(push, str) or not isinstance(push, Iterable):
        raise given.wrong("push", push, "a list of numbers, or bytes", "device")
    values = list(push)
    if len(values) != len(declared):
        raise ModelError(
            f"[device] {kernel}: push has {len(values)} values, the shader declares {len(declared)}: {_shown(declared)}. Give one for "
            "each, in the order of their declaration"
        )
    found = bytearray(-(-size // 4) * 4)
    for i, (constant, value) in enumerate(zip(declared, values, strict=True)):
        found[constant.offset : constant.offset + constant.width // 8] = _bytes(f"{kernel}: push[{i}]", constant, value)
    return bytes(found)


def _bytes(name: str, constant: PushConstant, value: Any) -> bytes:
    form = f"<{FORMATS[constant.kind][constant.width]}"
    if constant.kind == "float":
        if not isinstance(value, float | np.floating):
            raise given.wrong(name, value, f"a {constant}, as 2.0: the shader has one there", "device")
        with np.errstate(over="ignore"):
            single = np.float64(value).astype(f"f{constant.width // 8}")
        if np.isinf(single) and np.isfinite(value):
            raise given.wrong(name, value, f"what a {constant} holds", "device")
        return struct.pack(form, float(single))
    plain = int(value) if isinstance(value, bool | np.bool_) else value
    number = given.whole(name, plain, f"a whole number: the shader has {constant} there", who="device")
    try:
        return struct.pack(form, number)
    except struct.error:
        raise given.wrong(name, value, f"what {constant} holds", "device") from None


def _shown(declared: Sequence[PushConstant]) -> str:
    return ", ".join(map(str, declared)) or "none"
