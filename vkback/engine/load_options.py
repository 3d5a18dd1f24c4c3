"""How a model is loaded: one value from command line, server and Python to the engine, checked when it is made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from vkback import checks
from vkback.engine.draft_model import DRAFTS
from vkback.engine.drafts import CLASSES, MOST, Drafts
from vkback.engine.host_weights import LayersOnDevice, Placement
from vkback.engine.weights import REPACKS, Repack
from vkback.events import Report
from vkback.models.adapter import Given, given
from vkback.ops.cache import CACHE_WORDS
from vkback.ops.lowering import ACTS, Act
from vkback.plan.passes.fuse import FUSIONS

SPEC_TYPES = ("none", "ngram-simple", "draft-simple", "draft-eagle3", "draft-mtp")

HEADS = ("draft-eagle3", "draft-mtp")
"""Those whose drafts are made by a block or head that reads the model's hidden rows."""

OF_A_FILE = ("draft-simple", "draft-eagle3")
"""Those whose drafts are made by what is in another file."""

ALL_LAYERS = 1 << 30
"""More than any model has."""

Exact = bool | Literal["requests"]
"""What has the same bits (docs/batch_invariance.md). "requests": a request, whoever else is served; True: the logits of a token, however
many go with it."""


@dataclass(frozen=True)
class LoadOptions:
    """Raises OptionError for a value of a wrong kind, AdapterError for adapters that are none.

    ctx     tokens of the context, rows of the KV cache; None: as trained, at most 4096; 0: as trained
    act     "auto", "f32" (float path) or "q8_1" (integer dot wherever there is a kernel)
    ubatch  tokens of a prompt that go through the weights at once, at most; None: 512, on CPU drivers 64
    cache_type_k, cache_type_v  "f16", "f32", "q8_0" or "q4_0", in any case: what keys and values are kept as
    exact   True: the logits of a token have the same bits however many tokens went with it (vkback/plan/exact.py); "requests": texts of a
            batch have, whoever else is served (vkback/engine/batch)
    sequences  texts of a batch that run at once, at most; None: as many as pay (vkback/api/model.py)
    lora    adapter files (vkback/models/adapter.py)
    lora_switched  their scales may change while texts are made, and differ between them
    spec_type  drafts of a text's next tokens (vkback/engine/drafts.py): "none", "ngram-simple" (copies of what stands in the text); None:
            the latter, but none on CPU drivers, which take seconds to compile a step of each width. "draft-mtp": those of the
            file's own block that predicts the token after the next one (vkback/models/mtp.py)
    model_draft  a file of a smaller model with the same vocabulary, whose tokens are the drafts (spec_type "draft-simple"), or of an
            EAGLE-3 head for the model ("draft-eagle3", vkback/models/eagle3.py); with spec_type None as the file is
    draft_max, draft_min  drafts of a step at most, and at least; None: as many as there is a step for, of a model 3
    draft_p_min  probability that a draft model, or a block, must give to a draft, 0 to 1: those of a step end before one that has less
    spec_pinned  columns of every step, so that a text has the same bits whatever is drafted; 0: the width that pays
    spec_earlier  drafts from earlier texts, too: these then have a part in how wide steps are, and so in how sums are rounded
    fusion  "all" or "none"
    flash_attn  False: attention is nodes of its own, kq, kq_soft_max and kqv (vkback/ops/attention/unfused.py): slower, to look into it
    tensor_split  shares of the layers, one for each of several devices; None: by their memory and how fast they read it
    n_gpu_layers  layers that keep their weights on the device, the output layer first, then from the last on; the others' matrices, and the
            tables that tokens are looked up in, lie in memory of the host (vkback/engine/host_weights.py). "all"; "auto": as many as fit;
            None: the latter, but with n_cpu_moe or cpu_moe all
    n_cpu_moe  layers, from the first on, whose experts lie in memory of the host; None: as many as must, where the model is larger than
            what the device has free
    cpu_moe  those of all layers
    expert_cache  experts of each such layer that a cache in the device's own memory holds (vkback/plan/passes/experts.py); 0: there is none
    repack  who brings weights into the device's layout, "device" or "host"; None: what is faster (vkback/engine/weights.py)
    progress  called with how far loads, compiles and prompts are (vkback/events.py), from any thread
    """

    ctx: int | None = None
    act: Act = "auto"
    ubatch: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    exact: Exact = False
    sequences: int | None = None
    lora: tuple[Given, ...] = ()
    lora_switched: bool = False
    spec_type: str | None = None
    model_draft: str | Path | None = None
    draft_max: int | None = None
    draft_min: int = 0
    draft_p_min: float = 0.0
    spec_pinned: int = 0
    spec_earlier: bool = False
    fusion: str = "all"
    flash_attn: bool = True
    tensor_split: tuple[float, ...] | None = None
    n_gpu_layers: LayersOnDevice | None = None
    n_cpu_moe: int | None = None
    cpu_moe: bool = False
    expert_cache: int = 0
    repack: Repack | None = None
    progress: Report | None = None

    def __post_init__(self) -> None:
        for name, least in (("ctx", 0), ("ubatch", 1), ("sequences", 1)):
            value, expected = getattr(self, name), f"a whole number, {least} or more, or None"
            self._set(name, None if value is None else checks.whole(name, value, expected, least))
        for name in ("cache_type_k", "cache_type_v"):
            value = getattr(self, name)
            self._set(name, checks.choice(name, value.lower() if isinstance(value, str) else value, CACHE_WORDS))
        for name in ("draft_max", "draft_min", "spec_pinned", "n_cpu_moe", "expert_cache"):
            value, may_be_none = getattr(self, name), name in ("draft_max", "n_cpu_moe")
            expected = "a whole number, 0 or more" + ", or None" * (name == "n_cpu_moe")
            self._set(name, None if value is None and may_be_none else checks.whole(name, value, expected, 0))
        self._set("draft_p_min", checks.number("draft_p_min", self.draft_p_min, "a number from 0 to 1", 0, 1))
        if self.draft_max is not None and self.draft_min > self.draft_max:
            raise checks.wrong("draft_min", self.draft_min, f"at most draft_max, {self.draft_max}")
        if self.spec_pinned and self.spec_pinned not in CLASSES:
            raise checks.wrong("spec_pinned", self.spec_pinned, f"{', '.join(map(str, CLASSES))}, or 0")
        if self.spec_type is not None:
            checks.choice("spec_type", self.spec_type, SPEC_TYPES)
        if (self.model_draft is not None) != (self.spec_type in OF_A_FILE) and (self.model_draft is None or self.spec_type is not None):
            raise checks.wrong("spec_type", self.spec_type, "draft-simple or draft-eagle3 with model_draft, and only then")
        self._set("spec_earlier", checks.flag("spec_earlier", self.spec_earlier))
        self._set("n_gpu_layers", _layers(self.n_gpu_layers))
        self._set("cpu_moe", checks.flag("cpu_moe", self.cpu_moe))
        if self.cpu_moe and self.n_cpu_moe is not None:
            raise checks.wrong("n_cpu_moe", self.n_cpu_moe, "None with cpu_moe, which takes the experts of all layers")
        if self.tensor_split is not None:
            self._set("tensor_split", _shares(self.tensor_split))
        checks.choice("act", self.act, ACTS)
        checks.choice("fusion", self.fusion, FUSIONS)
        self._set("flash_attn", checks.flag("flash_attn", self.flash_attn))
        if self.repack is not None:
            checks.choice("repack", self.repack, REPACKS)
        if not isinstance(self.exact, str):
            self._set("exact", checks.flag("exact", self.exact))
        elif self.exact != "requests":
            raise checks.wrong("exact", self.exact, 'True, False or "requests"')
        self._set("lora", given(self.lora))
        self._set("lora_switched", checks.flag("lora_switched", self.lora_switched))
        if self.progress is not None and not callable(self.progress):
            raise checks.wrong("progress", self.progress, "a function, or None")

    @property
    def placement(self) -> Placement:
        """Which weights were asked to lie in memory of the host. Who places experts leaves no choice, unless "auto" is asked for."""
        experts = ALL_LAYERS if self.cpu_moe else self.n_cpu_moe
        unasked: LayersOnDevice = "auto" if experts is None else "all"
        return Placement(unasked if self.n_gpu_layers is None else self.n_gpu_layers, experts)

    def drafts(self, *, software: bool) -> Drafts | None:
        """What texts may draft; software: on a CPU driver."""
        # How wide a step with drafts is depends on what pays, and so on the time that steps took.
        none = (software or self.exact == "requests") and not self.spec_pinned
        wanted = self.spec_type or ("draft-simple" if self.model_draft is not None else "none" if none else "ngram-simple")
        if wanted == "none" and not self.spec_pinned:
            return None
        model = wanted in (*OF_A_FILE, *HEADS)
        default = DRAFTS if model else MOST
        most = 0 if wanted == "none" else default if self.draft_max is None else min(self.draft_max, MOST)
        how: dict[str, Any] = {"pinned": self.spec_pinned, "earlier": self.spec_earlier, "model": model, "p_min": self.draft_p_min}
        return Drafts(most, min(self.draft_min, most), **how)

    def _set(self, name: str, value: Any) -> None:
        """The value as it is kept: numpy's numbers as Python's, words in lower case."""
        object.__setattr__(self, name, value)


def _layers(value: Any) -> LayersOnDevice | None:
    """Of a device: a number, also as a text and -1 as llama-bench has it, or one of llama.cpp's words."""
    if value is None or value == "auto" or value == "all":
        return cast("LayersOnDevice | None", value)
    if isinstance(value, str) and re.fullmatch("-?[0-9]+", value):
        value = int(value)
    return "auto" if value == -1 else checks.whole("n_gpu_layers", value, "a whole number, 0 or more, auto or all", 0)


def _shares(value: Any) -> tuple[float, ...]:
    """Of several devices, as numbers."""
    expected = "a share greater than 0 for each device, as (3, 1)"
    if not isinstance(value, list | tuple) or not value:
        raise checks.wrong("tensor_split", value, expected)
    found = tuple(checks.number("tensor_split", share, expected) for share in value)
    if not all(0 < share < float("inf") for share in found):
        raise checks.wrong("tensor_split", value, expected)
    return found
