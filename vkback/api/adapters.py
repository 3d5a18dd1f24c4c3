"""Adapters beside the weights of a loaded model, which are switched while it runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from vkback.api import given
from vkback.api.errors import ModelError
from vkback.engine.adapter_scales import whole_scales


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter file beside the weights of one model; made by `LoadedModel.load_adapter`.

    id     its number among those of the model, from 0 on
    path   the file
    """

    id: int
    path: Path
    _scale: float

    @property
    def scale(self) -> float:
        """What texts multiply it by that do not choose for themselves (`lora=`); may be set, also while texts run, and holds for those that
        begin then. 0: it is off."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = scale_of("scale", value)

    def __repr__(self) -> str:
        return f"<adapter {self.id}, {self.path.name} times {self._scale:g}>"


LoraChoice = Any
"""Of a text: adapters (or their numbers), each alone or as (adapter, scale), one or a list; a dict, adapter -> scale; [] for none."""

Chosen = tuple[tuple[int, float], ...]
"""The number of each adapter that is on, and what it is multiplied by."""

EXPECTED = "an adapter of `load_adapter` or its number, (adapter, scale), a list of these, or [] for none"


def scale_of(name: str, value: Any) -> float:
    """Raises ModelError for what is no number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise given.wrong(name, value, "a number, 0 for off")
    return float(value)


def chosen(name: str, value: LoraChoice) -> Chosen | None:
    """What `lora=` stands for; None: the model's own choice. Raises ModelError."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        pairs: Iterable[Any] = value.items()
    elif isinstance(value, LoadedAdapter | int) or (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], float)):
        pairs = (value,)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        pairs = value
    else:
        raise given.wrong(name, value, EXPECTED)
    found: dict[int, float] = {}
    for each in pairs:
        one, scale = each if isinstance(each, tuple) and len(each) == 2 else (each, 1.0)
        id = one.id if isinstance(one, LoadedAdapter) else one
        if isinstance(id, bool) or not isinstance(id, int) or id < 0:
            raise given.wrong(name, value, EXPECTED)
        if id in found:
            raise given.wrong(name, value, f"adapter {id} once")
        found[id] = scale_of(f"{name}: the scale of adapter {id}", scale)
    return tuple(sorted(found.items()))


def scales_of(wanted: Chosen | None, adapters: Iterable[LoadedAdapter], model: str) -> tuple[float, ...]:
    """What each adapter of a model is multiplied by, those behind the last that is on left out. Raises ModelError for one that there is
    not."""
    known = list(adapters)
    if wanted is None:
        return whole_scales(adapter.scale for adapter in known)
    scales = [0.0] * len(known)
    for id, scale in wanted:
        if id >= len(known):
            there = ", ".join(f"{adapter.id} ({adapter.path.name})" for adapter in known) or "none"
            raise ModelError(f"[lora] {model}: has no adapter {id}; there are: {there}. Load it by load_adapter (vkback serve --lora)")
        scales[id] = scale
    return whole_scales(scales)
