"""The Python interface: models, sessions, and a device for authors of kernels. `import vkback` has all of it."""

from vkback.api.adapters import LoadedAdapter
from vkback.api.chat_template import ChatTemplateError
from vkback.api.device import CompiledKernel, Device, DeviceTensor, KernelTiming, devices
from vkback.api.errors import ModelError
from vkback.api.messages import Message
from vkback.api.model import LoadedModel, load
from vkback.api.options import GenerateOptions
from vkback.api.result import Chunk, FinishReason, Result, Timings, TokenLogprob
from vkback.api.score import Score
from vkback.api.session import Session
from vkback.api.stream import Stream
from vkback.api.trainer import Trainer
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
    "Progress",
    "Result",
    "Score",
    "Session",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Trainer",
    "devices",
    "load",
]
