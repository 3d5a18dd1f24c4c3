"""How a model is loaded: one value from command line, server and Python to the engine, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vkback import checks
from vkback.engine.weights import REPACKS, Repack
from vkback.events import Report
from vkback.models.adapter import Given, given
from vkback.ops.cache import CACHE_WORDS
from vkback.ops.lowering import ACTS, Act
from vkback.plan.passes.fuse import FUSIONS


@dataclass(frozen=True)
class LoadOptions:
    """Raises OptionError for a value of a wrong kind, AdapterError for adapters that are none.

    ctx     tokens of the context, rows of the KV cache; None: as trained, at most 4096
    act     "auto", "f32" (float path) or "q8_1" (integer dot wherever there is a kernel)
    ubatch  tokens of a prompt that go through the weights at once, at most; None: 512, on CPU drivers 64
    cache_type_k, cache_type_v  "f16", "f32", "q8_0" or "q4_0", in any case: what keys and values are kept as
    exact   the logits of a token have the same bits however many tokens went with it (vkback/plan/exact.py)
    sequences  texts of a batch that run at once, at most; None: as many as pay (vkback/api/model.py)
    lora    adapter files (vkback/models/adapter.py)
    fusion  "all" or "none"
    repack  who brings weights into the device's layout, "device" or "host"; None: what is faster (vkback/engine/weights.py)
    progress  called with how far loads, compiles and prompts are (vkback/events.py), from any thread
    """

    ctx: int | None = None
    act: Act = "auto"
    ubatch: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    exact: bool = False
    sequences: int | None = None
    lora: tuple[Given, ...] = ()
    fusion: str = "all"
    repack: Repack | None = None
    progress: Report | None = None

    def __post_init__(self) -> None:
        for name in ("ctx", "ubatch", "sequences"):
            value = getattr(self, name)
            self._set(name, None if value is None else checks.whole(name, value, "a whole number, 1 or more, or None", 1))
        for name in ("cache_type_k", "cache_type_v"):
            value = getattr(self, name)
            self._set(name, checks.choice(name, value.lower() if isinstance(value, str) else value, CACHE_WORDS))
        checks.choice("act", self.act, ACTS)
        checks.choice("fusion", self.fusion, FUSIONS)
        if self.repack is not None:
            checks.choice("repack", self.repack, REPACKS)
        self._set("exact", checks.flag("exact", self.exact))
        self._set("lora", given(self.lora))
        if self.progress is not None and not callable(self.progress):
            raise checks.wrong("progress", self.progress, "a function, or None")

    def _set(self, name: str, value: Any) -> None:
        """The value as it is kept: numpy's numbers as Python's, words in lower case."""
        object.__setattr__(self, name, value)
