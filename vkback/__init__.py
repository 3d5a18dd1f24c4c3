"""vkback: GGUF models on Vulkan, with hand-written GLSL kernels, judged and tuned from Python.

    model = vkback.load("model.gguf")          # or the name of a built-in model
    print(model.generate("Once upon a time", max_tokens=64).text)

    dev = vkback.Device()                      # the level below: tensors, ops, your own kernels
    y = (dev.tensor(w, "Q4_K") @ x).numpy()

Names are imported when they are first used, so that `import vkback` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vkback.api import (
        ChatTemplateError,
        Chunk,
        CompiledKernel,
        Device,
        DeviceTensor,
        FinishReason,
        GenerateOptions,
        KernelTiming,
        LoadedAdapter,
        LoadedModel,
        Message,
        ModelError,
        Result,
        Score,
        Session,
        Stream,
        Timings,
        TokenLogprob,
        Trainer,
        devices,
        load,
    )
    from vkback.errors import VkbackError
    from vkback.evaluate.perplexity import Perplexity
    from vkback.events import Progress

__all__ = [
    "ChatTemplateError",
    "Chunk",
    "CompiledKernel",
    "Device",
    "DeviceTensor",
    "FinishReason",
    "GenerateOptions",
    "KernelTiming",
    "LoadedAdapter",
    "LoadedModel",
    "Message",
    "ModelError",
    "Perplexity",
    "Progress",
    "Result",
    "Score",
    "Session",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Trainer",
    "VkbackError",
    "__version__",
    "devices",
    "load",
]

_ELSEWHERE = {"Perplexity": "vkback.evaluate.perplexity", "Progress": "vkback.events", "VkbackError": "vkback.errors"}


if not TYPE_CHECKING:  # else every name that there is not would have a type

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'vkback' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_ELSEWHERE.get(name, "vkback.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
