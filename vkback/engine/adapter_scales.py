"""Adapters that are switched: what each is multiplied by lies in memory of the device, and every program reads it there.

So one adapter is turned on and another off between two texts, by one upload, without programs made anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vkback.device import Arena, BufferRange, Device
from vkback.errors import VkbackError
from vkback.models.registry import Model
from vkback.plan.passes.lora import SCALES
from vkback.plan.schedule import aligned


class AdapterScaleError(VkbackError):
    """Scales for more adapters than can be switched."""


def whole_scales(scales: Iterable[float]) -> tuple[float, ...]:
    """The same without zeros at the end, so that equal ones are equal."""
    found = [float(scale) for scale in scales]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


class AdapterScales:
    """The scales of one model's adapters. They have none, and take no memory, before `allocate`."""

    def __init__(self, device: Device, model: Model) -> None:
        self._device, self._model = device, model
        self.arenas: list[Arena] = []
        """Memory that ends with the adapters. Who loads their weights adds that of these."""
        self.inputs: dict[str, BufferRange] = {}
        """By the name that graphs have for it."""
        self.current: tuple[float, ...] = ()
        """One for each adapter, the last that is off and those behind it left out."""

    def allocate(self) -> None:
        """Take memory, with the scales that the adapters were loaded with. Nothing for a model without adapters that are switched."""
        lora = self._model.lora
        if lora is None or not lora.switched:
            return
        self.current = whole_scales(adapter.scale for adapter in self._model.adapters)
        words = lora.switches(self.current)
        arena = self._device.arena("scales of adapters", aligned(words.nbytes), "device")
        self.arenas.append(arena)
        self.inputs[SCALES] = arena.alloc(words.nbytes, SCALES)
        self._device.upload(self.inputs[SCALES], words)

    def put(self, scales: Sequence[float]) -> None:
        """Programs that are submitted from here on go by these. Raises AdapterScaleError as `check` does."""
        wanted, lora = whole_scales(scales), self._model.lora
        if wanted != self.current:
            self.check(wanted)
            assert lora is not None
            self._device.upload(self.inputs[SCALES], lora.switches(wanted))
            self.current = wanted

    def check(self, scales: Sequence[float]) -> None:
        """Raises AdapterScaleError where there are not so many adapters that can be switched."""
        wanted, lora = whole_scales(scales), self._model.lora
        if wanted and (lora is None or not lora.switched or len(wanted) > len(lora.widths)):
            raise AdapterScaleError(
                f"[lora] {self._model.file.path}: scales {list(wanted)} of adapters; expected at most "
                f"{len(lora.widths) if lora is not None else 0} of those loaded to be switched"
            )

    def close(self) -> None:
        """Give the memory back, weights of the adapters included."""
        for arena in reversed(self.arenas):
            arena.destroy()
        self.arenas.clear()
