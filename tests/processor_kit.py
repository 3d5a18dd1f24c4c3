"""Texts whose tokens Python functions pick, beside those that the device picks: `logits_processor`."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback import LoadedModel, Result

PROMPT = "It was a dark and stormy night, and"
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def nothing(ids: Ids, logits: Floats) -> None:
    """Changes nothing."""


def judge_alone(model: LoadedModel, options: dict[str, Any]) -> None:
    """A function that changes nothing gives the text of the device."""
    own = model.generate(PROMPT, max_tokens=12, **options)
    by_host = model.generate(PROMPT, max_tokens=12, logits_processor=nothing, **options)
    assert (by_host.text, by_host.tokens, by_host.finish_reason) == (own.text, own.tokens, own.finish_reason)
    assert [t.token for t in by_host.logprobs] == [t.token for t in own.logprobs]
    assert by_host.timings.decode_tokens == own.timings.decode_tokens


def judge_in_a_batch(model: LoadedModel, options: dict[str, Any]) -> None:
    """Texts of a batch have functions of their own: beside a text that the device picks, and one with other functions."""

    def no_vowels(ids: Ids, logits: Floats) -> None:
        logits[:2000:7] = -np.inf

    async def side_by_side() -> list[Result]:
        functions: list[Any] = [nothing, None, no_vowels]
        asked = [model.agenerate(PROMPT, max_tokens=12, logits_processor=each, **options) for each in functions]
        return await asyncio.gather(*asked)

    own, other = (model.generate(PROMPT, max_tokens=12, logits_processor=each, **options) for each in (None, no_vowels))
    assert [each.tokens for each in asyncio.run(side_by_side())] == [own.tokens, own.tokens, other.tokens]
    found = model.batch([PROMPT], max_tokens=12, logits_processor=[nothing, no_vowels], **options)
    assert [(each.tokens, each.finish_reason, len(each.logprobs)) for each in found] == [
        (other.tokens, other.finish_reason, len(other.logprobs))
    ]
