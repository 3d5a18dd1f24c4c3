"""`qwen3vl` by Qwen3VLTextModel, which rotates by three positions: those of a text are one."""

from __future__ import annotations

from pathlib import Path

from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from references.common import Checkpoint, Logits, attention, config, feed_forward, fill, outer, qk_norms, run, with_output


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    given = config(f)
    given["rope_parameters"] |= {"mrope_section": list(f.get("rope.dimension_sections"))[:3], "mrope_interleaved": True}
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il)
        qk_norms(f, state, il)
        feed_forward(f, state, il)
    return run(fill(with_output(Qwen3VLTextModel(Qwen3VLTextConfig(**given))), f, state), tokens)
