"""The `llama` architecture: Llama 1 to 3, Mistral, Mixtral, SmolLM and everything converted to their shape.

Per layer: RMS norm, attention with grouped K and V heads and RoPE over neighbouring pairs, residual, RMS norm, SwiGLU or (Mixtral) a
mixture of SwiGLU experts, residual. Output tied to the embedding, biases and RoPE frequency factors as the file has them.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import experts, feed_forward, pre_norm_layer
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.shape import ModelShape
from vkback.units import UNKNOWN_SIZE

MIXTRAL_SIZES = {32: "8x7B", 56: "8x22B"}


@register
class Llama(Architecture):
    name = "llama"
    keys = EXPERTS
    settled: ClassVar = {"expert_gating_func": 1}
    sizes: ClassVar = {16: "1B", 22: "1B", 26: "3B", 28: "3B", 30: "256M", 36: "8B", 40: "13B", 48: "34B", 60: "30B"}
    shapes: ClassVar = {
        "llama-1b": ModelShape("llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 500000.0, tied=True, rope_stretch=32.0),
        "llama-3b": ModelShape("llama", 28, 3072, 8192, 24, 8, 128, 128256, 131072, 500000.0, tied=True, rope_stretch=32.0),
        "llama-8b": ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 500000.0, rope_stretch=8.0),
        "llama2-7b": ModelShape("llama", 32, 4096, 11008, 32, 32, 128, 32000, 4096, 10000.0, vocabulary="spm"),
        "smollm-135m": ModelShape("llama", 30, 576, 1536, 9, 3, 64, 49152, 2048, 10000.0, tied=True, vocabulary="smollm"),
        "mistral-small-24b": ModelShape("llama", 40, 5120, 32768, 32, 8, 128, 131072, 32768, 100000000.0, vocabulary="tekken"),
        "mistral-22b": ModelShape("llama", 56, 6144, 16384, 48, 8, 128, 32000, 65536, 1000000.0, vocabulary="spm"),
        "mistral-large-123b": ModelShape("llama", 88, 12288, 28672, 96, 8, 128, 32768, 131072, 1000000.0, vocabulary="spm"),
        "mixtral-8x7b": ModelShape(
            "llama", 32, 4096, 14336, 32, 8, 128, 32000, 32768, 1000000.0, n_expert=8, n_expert_used=2, n_ff_expert=14336, vocabulary="spm"
        ),
        "tiny-llama": ModelShape("llama", 3, 96, 160, 3, 1, 32, 331, 128, 500000.0, rope_stretch=8.0),
        "tiny-mixtral": ModelShape(
            "llama", 3, 96, 160, 6, 2, 16, 331, 128, 1000000.0, tied=True, n_expert=5, n_expert_used=2, n_ff_expert=160
        ),
    }

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return pre_norm_layer(b, x, il, rope=self.hp.rope, feed=experts if self.hp.n_expert else feed_forward)

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        layers = metadata.stated("block_count")
        if metadata.stated("expert_count") == 8:
            return MIXTRAL_SIZES.get(layers, UNKNOWN_SIZE)
        if layers == 32:
            vocab = metadata.stated_vocabulary()
            return "3B" if vocab == 49152 else "7B" if vocab < 40000 else "8B"
        if layers == 80:
            heads = metadata.stated("attention.head_count")
            return "65B" if metadata.stated("attention.head_count_kv", heads) == heads else "70B"
        return super().size_class(metadata)
