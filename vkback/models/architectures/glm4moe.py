"""The `glm4moe` architecture: GLM 4.5 to 4.7, Air.

As llama, but RoPE pairs value i with value i + n_dims/2 in a part of a head, Q, K and V have biases, every head of Q and K is RMS-normed
where the file has the norms, and the norm before the feed-forward is called post_attention_norm. The first `leading_dense_block_count`
layers are dense, the others a mixture of experts beside shared ones, with sigmoids for a router and a bias for the choice alone. A file's
last `nextn_predict_layers` blocks predict tokens beyond the next one (MTP, vkback/models/mtp.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import experts_by_sigmoid, feed_forward, pre_norm_layer, rms_norm
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS, MTP
from vkback.models.shape import (
    ModelShape,
    Tensors,
    attention_tensors,
    expert_tensors,
    feed_forward_tensors,
    qk_norm_tensors,
    shared_expert_tensors,
    with_biases,
)
from vkback.units import UNKNOWN_SIZE

AIR: dict[str, Any] = {"expert_shared_count": 1, "expert_weights_scale": 1.0, "expert_weights_norm": True, "leading_dense_block_count": 1}


@register
class Glm4Moe(Architecture):
    name = "glm4moe"
    rope_mode = "neox"
    keys = EXPERTS | {"expert_shared_count", "leading_dense_block_count", MTP}
    settled: ClassVar = {"expert_gating_func": 2}
    required = ("expert_count",)
    biases = ("attn_q", "attn_k", "attn_v")
    sizes: ClassVar = {46: "106B.A12B", 48: "102B.A12B", 92: "355B.A32B"}
    shapes: ClassVar = {
        "glm-4.5-air": ModelShape(
            "glm4moe",
            46,
            4096,
            10944,
            96,
            8,
            128,
            151552,
            131072,
            1000000.0,
            rope_dims=64,
            n_expert=128,
            n_expert_used=8,
            n_ff_expert=1408,
            metadata=AIR,
        ),
        "tiny-glm4moe": ModelShape(
            "glm4moe", 3, 96, 160, 4, 2, 40, 331, 128, 1000000.0, rope_dims=20, n_expert=7, n_expert_used=3, n_ff_expert=96, metadata=AIR
        ),
        "tiny-glm4moe-large": ModelShape(
            "glm4moe",
            3,
            96,
            160,
            3,
            1,
            32,
            331,
            128,
            1000000.0,
            rope_dims=16,
            n_expert=6,
            n_expert_used=2,
            n_ff_expert=64,
            metadata={**AIR, "expert_weights_scale": 2.5, "leading_dense_block_count": 2},
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        m = self.metadata
        self.without_mtp_blocks(m.count(MTP, 0, least=0))
        self.hp = replace(self.hp, norm_w=f.get(m.key("expert_weights_norm"), bool, False))
        self.n_dense = m.count("leading_dense_block_count", 0, least=0)
        self.n_ff_shared = m.count("expert_shared_count", 0, least=0) * self.hp.n_ff_expert

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        dense = il < self.n_dense
        return pre_norm_layer(
            b,
            x,
            il,
            rope=self.hp.rope,
            qk_norm=rms_norm if self.hp.has_weight("blk.0.attn_q_norm.weight") else None,
            feed=feed_forward if dense else experts_by_sigmoid,
            n_ff_shared=0 if dense else self.n_ff_shared,
            second_norm="post_attention_norm",
        )

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        return cls.sizes.get(metadata.stated("block_count") - metadata.stated(MTP), UNKNOWN_SIZE)

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        yield from with_biases(attention_tensors(s), but="attn_output")
        if s.metadata["leading_dense_block_count"] > 1:  # GLM 4.5 and later, not Air
            yield from qk_norm_tensors(s)
        yield "post_attention_norm.weight", (s.n_embd,)
        if il < int(s.metadata["leading_dense_block_count"]):
            yield from feed_forward_tensors(s)
            return
        yield from expert_tensors(s)
        yield "exp_probs_b.bias", (s.n_expert,)
        yield from shared_expert_tensors(s, int(s.metadata["expert_shared_count"]) * s.n_ff_expert)
