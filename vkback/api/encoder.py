"""Encoding of weights on a device (shaders/encode), in the order of a file: for `vkback quantize`."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.api.device import Device
from vkback.ops.copies.encode import ENCODED, SAME_RULE

U8 = npt.NDArray[np.uint8]


class DeviceEncoder:
    """Encodes rows of floats by the search of the device's encoders. Types without a search are left to the host, which rounds as the
    reference does to the bit and is as fast as memory. Use as a context manager."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.types = frozenset(ENCODED) - SAME_RULE

    def __call__(self, type: str, x: npt.NDArray[np.float32]) -> U8 | None:
        """[rows, k] -> uint8 [rows, bytes of a row]; None for a type that it leaves."""
        if type not in self.types:
            return None
        nbytes = max(x.nbytes, quants.layout(type, *x.shape).nbytes)
        if nbytes > self._device.caps.max_storage_buffer_range and len(x) > 1:
            half = len(x) // 2
            first, second = self(type, x[:half]), self(type, x[half:])
            assert first is not None and second is not None
            return np.concatenate([first, second])
        out = self._device.empty(x.shape, type)
        self._device.run_op("CPY", np.ascontiguousarray(x), out=out)
        return out.file_rows()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._device.close()
