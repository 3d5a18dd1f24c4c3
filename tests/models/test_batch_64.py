"""64 greedy texts at once against each of them alone: every architecture, over every type of cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_batch import MARGIN, PAGE, judged
from tiny_models import TINY

from vkback.device import Device
from vkback.engine.batch.batch import Batch, Request
from vkback.engine.engine import Engine
from vkback.models.shape import ModelShape
from vkback.models.synth import SHAPES, synthesize

SEQUENCES, MADE, N_CTX = 64, 12, 64

MARGINS = {"f16": MARGIN, "q8_0": 0.02, "q4_0": 0.05}
"""As in test_batch.py: a value on the edge between two levels may go to the other, which moves a logit by a share of what rounding does."""

QUICK = [("tiny-llama", "f16"), ("tiny-qwen3moe", "q8_0"), ("tiny-qwen35", "q4_0")]

BLOCK = 32
"""Values of a quantized block, of which heads of a quantized cache have whole ones."""


def wide(s: ModelShape) -> ModelShape:
    """A shape whose heads have whole blocks."""

    def whole(n: int) -> int:
        return -(-n // BLOCK) * BLOCK

    metadata = {key: whole(value) if key.endswith("_swa") and "length" in key else value for key, value in s.metadata.items()}
    if "rope.dimension_count_swa" in metadata:
        metadata["rope.dimension_count_swa"] = metadata["attention.key_length_swa"]
    head_dim = whole(s.head_dim)
    if rope := s.metadata.get("rope.dimension_count"):  # MLA: a head is a part without RoPE and one with it
        more = whole(rope) - rope
        metadata["rope.dimension_count"], head_dim = rope + more, s.head_dim + more
        metadata |= {key: s.metadata[key] + more for key in ("attention.key_length", "attention.key_length_mla") if key in s.metadata}
    if sections := s.metadata.get("rope.dimension_sections"):
        metadata["rope.dimension_sections"] = ((s.rope_dims or head_dim) // 2 - sum(sections[1:]), *sections[1:])
    n_embd = s.n_head * head_dim if s.arch == "deci" else s.n_embd  # some of its layers have a matrix in place of attention
    return replace(s, n_embd=n_embd, head_dim=head_dim, metadata=metadata)


CASES = [(shape, cache) for shape in TINY for cache in MARGINS]


@pytest.mark.vulkan
@pytest.mark.parametrize(("shape", "cache"), [c if c in QUICK else pytest.param(*c, marks=pytest.mark.exhaustive) for c in CASES])
def test_64_texts_are_those_of_each_alone(shape: str, cache: str, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    if cache != "f16":
        monkeypatch.setitem(SHAPES, shape, wide(SHAPES[shape]))
    synthesize(f"{shape}-Q8_0", path)
    with Engine.load(path, device, n_ctx=N_CTX, act="f32", cache_type_k=cache, cache_type_v=cache) as engine:
        rng = np.random.default_rng(5)
        start = rng.integers(0, engine.model.hp.n_vocab, 40)
        wanted = []
        for i in range(SEQUENCES):
            prompt = rng.integers(0, engine.model.hp.n_vocab, 2 + i % 39)
            if i % 3 == 0:
                prompt[: len(prompt) // 2] = start[: len(prompt) // 2]
            wanted.append(Request(tuple(prompt.tolist()), MADE, stop_at_eos=False, client=f"{i % 5}"))
        with Batch(engine, sequences=SEQUENCES, page=PAGE, prompt_share=1) as batch:
            ids = [batch.add(request) for request in wanted]
            batch.read_prompts()
            texts: dict[int, list[int]] = {id: [] for id in ids}
            for made in batch.run():
                texts[made.id] += made.tokens
            assert batch.counters.columns > 30 * batch.counters.steps, "they ran beside each other"
            batch.prefixes.clear()
            assert batch.pool.free == batch.pool.n_pages
        for request, id in zip(wanted, ids, strict=True):
            judged(engine, request, texts[id], MARGINS[cache])
