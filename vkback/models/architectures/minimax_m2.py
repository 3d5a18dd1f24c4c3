"""The `minimax-m2` architecture: MiniMax M2 and M2.5.

As qwen3moe, but Q and K are RMS-normed over all their heads at once, RoPE turns a part of a head, and the router is a sigmoid of each
logit, with a bias for the choice alone.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import experts_by_sigmoid, pre_norm_layer, rms_norm
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.shape import ModelShape, Tensors, attention_tensors, expert_tensors, whole_qk_norm_tensors


@register
class MiniMaxM2(Architecture):
    name = "minimax-m2"
    rope_mode = "neox"
    keys = EXPERTS
    settled: ClassVar = {"expert_gating_func": 2}
    required = ("expert_count",)
    sizes: ClassVar = {62: "230B.A10B"}
    shapes: ClassVar = {
        "minimax-m2-230b-a10b": ModelShape(
            "minimax-m2",
            62,
            3072,
            1536,
            48,
            8,
            128,
            200064,
            196608,
            5000000.0,
            1e-6,
            rope_dims=64,
            n_expert=256,
            n_expert_used=8,
            n_ff_expert=1536,
        ),
        "tiny-minimax-m2": ModelShape(
            "minimax-m2", 2, 96, 96, 4, 2, 40, 331, 128, 5000000.0, 1e-6, rope_dims=24, n_expert=9, n_expert_used=5, n_ff_expert=96
        ),
    }

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return pre_norm_layer(b, x, il, rope=self.hp.rope, qk_norm=rms_norm, qk_norm_of="all heads", feed=experts_by_sigmoid)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from attention_tensors(s)
        yield from whole_qk_norm_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        yield from expert_tensors(s)
        yield "exp_probs_b.bias", (s.n_expert,)
