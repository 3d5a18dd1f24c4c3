"""Attention as nodes of its own (`-fa 0`): kq, kq_soft_max, kqv, beside flash attention over every kind of mask, head and cache that tiny
models have. The ops have cases of their own (vkback/ops/attention/unfused.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TINY, tiny_in_whole_units

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.evaluate.judge import nmse
from vkback.paths import builtin_model

N_CTX = 64
TOKENS = np.random.default_rng(7).integers(0, 300, 36).tolist()
PROMPT = 29
FLOAT_NMSE = 1e-6
"""As of tests/models/test_references.py."""
MARGIN = 0.05
"""Between the largest logit and the next: where it is narrower, rounding may choose the other token."""

KINDS = (
    ("tiny-gpt-oss", "f16", "f16"),  # sinks, windows
    ("tiny-gemma2", "q8_0", "q4_0"),  # softcap, windows
    ("tiny-deepseek2", "f32", "f32"),  # one latent row is K and V
    ("tiny-llama4", "f16", "f16"),  # chunks
)
ALL = [
    pytest.param(name, k, v, marks=() if (name, k, v) in KINDS else pytest.mark.exhaustive)
    for name in TINY
    for k, v in (("f16", "f16"), ("q8_0", "q4_0"), ("f32", "f32"))
]


def logits(engine: Engine) -> np.ndarray:
    """Of TOKENS: a prompt in two pieces, then token by token."""
    return np.concatenate([engine.prompt_logits(TOKENS[:PROMPT]), *(engine.decode_logits(t)[None] for t in TOKENS[PROMPT:])])


@pytest.mark.vulkan
@pytest.mark.parametrize(("name", "type_k", "type_v"), ALL)
def test_logits_are_those_of_flash_attention(name: str, type_k: str, type_v: str, tmp_path: Path, device: Device) -> None:
    path = tiny_in_whole_units(name, tmp_path / "model.gguf")
    found = []
    for flash in (True, False):
        how: Any = {"ctx": N_CTX, "act": "f32", "ubatch": 16, "cache_type_k": type_k, "cache_type_v": type_v, "flash_attn": flash}
        with Engine.open(path, device, LoadOptions(**how)) as engine:
            found.append(logits(engine))
    if {type_k, type_v} <= {"f16", "f32"}:
        assert nmse(found[1], found[0]) <= FLOAT_NMSE
        return
    # A value may go to the next level of the cache's type, and that may choose another expert for a token: one of 36 was seen.
    beyond = [i for i, (one, two) in enumerate(zip(found[1], found[0], strict=True)) if nmse(one, two) > 1e-3]
    assert len(beyond) <= bool(engine.model.hp.n_expert), f"rows {beyond}"


@pytest.mark.vulkan
@pytest.mark.parametrize("fusion", ["all", "none"])
def test_text_is_that_of_flash_attention_until_a_margin_is_narrow(fusion: str, device: Device) -> None:
    texts, steps = [], 0
    for flash in (True, False):
        with Engine.open(builtin_model("demo-dense"), device, LoadOptions(ctx=N_CTX, fusion=fusion, flash_attn=flash)) as engine:
            ids = engine.tokenizer.encode("It was a dark and stormy night")
            engine.prompt(ids[:-1])
            texts.append(list(engine.generate(ids[-1], 24, stop_at_eos=False)))
            if flash:
                continue
            engine.reset()
            engine.prompt(ids[:-1])
            for token, mine, other in zip([ids[-1], *texts[0]], texts[1], texts[0], strict=False):
                second, first = np.sort(engine.decode_logits(token))[-2:]
                if first - second < MARGIN:
                    break
                assert mine == other
                steps += 1
    assert steps >= 12, "margins so narrow that hardly a step was compared"
