"""The `qwen3moe` architecture: Qwen3 30B-A3B, 235B-A22B.

As llama, but every head of Q and K is RMS-normed before RoPE, RoPE pairs value i with value i + n_dims/2, and every feed-forward layer is
a mixture of experts.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import experts, pre_norm_layer, rms_norm
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.shape import ModelShape, Tensors, attention_tensors, expert_tensors, qk_norm_tensors


@register
class Qwen3Moe(Architecture):
    name = "qwen3moe"
    rope_mode = "neox"
    vocabulary = "qwen2"
    keys = EXPERTS
    settled: ClassVar = {"expert_gating_func": 1}
    required = ("expert_count",)
    sizes: ClassVar = {48: "30B.A3B", 94: "235B.A22B"}
    shapes: ClassVar = {
        "qwen3moe-30b-a3b": ModelShape(
            "qwen3moe", 48, 2048, 6144, 32, 4, 128, 151936, 40960, 1000000.0, 1e-6, n_expert=128, n_expert_used=8, n_ff_expert=768
        ),
        "tiny-qwen3moe": ModelShape(
            "qwen3moe", 3, 96, 224, 4, 2, 40, 331, 128, 1000000.0, 1e-6, n_expert=7, n_expert_used=3, n_ff_expert=96
        ),
    }

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return pre_norm_layer(b, x, il, rope=self.hp.rope, qk_norm=rms_norm, feed=experts)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from attention_tensors(s)
        yield from qk_norm_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        yield from expert_tensors(s)
