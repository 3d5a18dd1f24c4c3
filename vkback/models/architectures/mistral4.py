"""The `mistral4` architecture: Mistral Small 4, text part.

As deepseek2, with a softmax for a router and gate and up of an expert in one matrix. Q grows with the position by steps as long as the
context before YaRN stretched it, unless `attention.temperature_length` says otherwise.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vkback.gguf.hparams import Metadata
from vkback.models.architecture import register
from vkback.models.architectures.deepseek2 import Deepseek2, latent_tensors
from vkback.models.shape import ModelShape, Tensors, feed_forward_tensors, fused_expert_tensors, shared_expert_tensors
from vkback.models.temperature import TEMPERATURE_SCALE, steps_of

SMALL: dict[str, Any] = {
    "attention.q_lora_rank": 1024,
    "attention.kv_lora_rank": 256,
    "attention.key_length": 320,
    "attention.value_length": 256,
    "attention.key_length_mla": 128,
    "attention.value_length_mla": 128,
    "rope.dimension_count": 64,
    "rope.scaling.original_context_length": 8192,
    "rope.scaling.yarn_log_multiplier": 0.1,
    TEMPERATURE_SCALE: 0.1,
    "leading_dense_block_count": 0,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    "expert_gating_func": 1,
}
TINY: dict[str, Any] = {
    **SMALL,
    "attention.q_lora_rank": 64,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 80,
    "attention.value_length": 64,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 16,
    "rope.scaling.original_context_length": 10,
    "leading_dense_block_count": 1,
}


@register
class Mistral4(Deepseek2):
    name = "mistral4"
    vocabulary = "tekken"
    sizes: ClassVar = {}
    shapes: ClassVar = {
        "mistral-small-4": ModelShape(
            "mistral4",
            36,
            4096,
            12288,
            32,
            1,
            128,
            131072,
            1048576,
            10000.0,
            1e-6,
            n_expert=128,
            n_expert_used=4,
            n_ff_expert=2048,
            yarn=128.0,
            metadata=SMALL,
        ),
        "tiny-mistral4": ModelShape(
            "mistral4", 2, 96, 160, 4, 1, 48, 331, 128, 10000.0, 1e-6, n_expert=5, n_expert_used=2, n_ff_expert=64, yarn=4.0, metadata=TINY
        ),
    }

    @classmethod
    def temperature_steps(cls, m: Metadata) -> int:
        return steps_of(m)

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        yield from latent_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        if il < int(s.metadata["leading_dense_block_count"]):
            yield from feed_forward_tensors(s)
            return
        yield from fused_expert_tensors(s)
        yield from shared_expert_tensors(s, int(s.metadata["expert_shared_count"]) * s.n_ff_expert)
