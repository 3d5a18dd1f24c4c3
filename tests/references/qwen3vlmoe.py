"""`qwen3vlmoe` by Qwen3VLMoeTextModel, which rotates by three positions: those of a text are one."""

from __future__ import annotations

from pathlib import Path

from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel

from references.common import Checkpoint, Logits, attention, config, experts, fill, outer, qk_norms, run, with_output


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    given = config(
        f,
        num_experts=f.get("expert_count"),
        num_experts_per_tok=f.get("expert_used_count"),
        moe_intermediate_size=f.get("expert_feed_forward_length"),
        norm_topk_prob=True,
    )
    given["rope_parameters"] |= {"mrope_section": list(f.get("rope.dimension_sections"))[:3], "mrope_interleaved": True}
    state = outer(f)
    for il in range(f.get("block_count")):
        attention(f, state, il)
        qk_norms(f, state, il)
        experts(f, state, il)
    return run(fill(with_output(Qwen3VLMoeTextModel(Qwen3VLMoeTextConfig(**given))), f, state), tokens)
