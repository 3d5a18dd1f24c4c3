"""Which format a template is of."""

from __future__ import annotations

from vkback.api.tools.format import Format
from vkback.api.tools.formats.apertus import Apertus
from vkback.api.tools.formats.command_r import CommandR, CommandR7B
from vkback.api.tools.formats.deepseek import DeepSeek, DeepSeekDsml, DeepSeekV3, KimiK2
from vkback.api.tools.formats.firefunction import FireFunction
from vkback.api.tools.formats.functionary import Functionary31, Functionary32
from vkback.api.tools.formats.gemma import FunctionGemma, Gemma4
from vkback.api.tools.formats.general import General
from vkback.api.tools.formats.glm import Glm
from vkback.api.tools.formats.granite import Granite
from vkback.api.tools.formats.harmony import Harmony
from vkback.api.tools.formats.hermes import Hermes
from vkback.api.tools.formats.llama3 import Llama3
from vkback.api.tools.formats.minimax import MiniMax
from vkback.api.tools.formats.mistral import Mistral, MistralArgs
from vkback.api.tools.formats.nemotron import Nemotron
from vkback.api.tools.formats.pythonic import Gemma3, Lfm2, Llama4, Olmo3
from vkback.api.tools.formats.qwen_coder import QwenCoder, SeedOss

GENERAL = General()

FORMATS: tuple[Format, ...] = (
    Harmony(),
    DeepSeekDsml(),
    DeepSeekV3(),
    DeepSeek(),
    KimiK2(),
    MiniMax(),
    SeedOss(),
    QwenCoder(),
    Glm(),
    MistralArgs(),
    Mistral(),
    CommandR7B(),
    CommandR(),
    Gemma4(),
    FunctionGemma(),
    Gemma3(),
    Apertus(),
    Nemotron(),
    Granite(),
    Lfm2(),
    Olmo3(),
    FireFunction(),
    Functionary32(),
    Functionary31(),
    Llama4(),
    Hermes(),
    Llama3(),
)
"""The first that a template is of is its format: those that others' signs are a part of stand behind them."""


def format_of(template: str) -> Format:
    """Of a template that knows tools; the general one where it is of none."""
    return next((format for format in FORMATS if format.is_of(template)), GENERAL)
