"""The `ernie4_5-moe` architecture: ERNIE 4.5 21B-A3B and 300B-A47B.

As llama, but after the first `leading_dense_block_count` layers every `interleave_moe_layer_step`-th is a mixture of experts beside a
shared one: a softmax over all experts, with a bias for the choice alone, divided by the sum of those chosen.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import experts, feed_forward, pre_norm_layer
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.shape import ModelShape, Tensors, attention_tensors, expert_tensors, feed_forward_tensors, shared_expert_tensors

STEP = "interleave_moe_layer_step"

PUBLISHED: dict[str, Any] = {STEP: 1, "leading_dense_block_count": 1, "expert_shared_count": 2, "expert_shared_feed_forward_length": 3072}


@register
class Ernie45Moe(Architecture):
    name = "ernie4_5-moe"
    vocabulary = "spm"
    keys = EXPERTS | {STEP, "expert_shared_count", "expert_shared_feed_forward_length", "leading_dense_block_count"}
    settled: ClassVar = {"expert_gating_func": 1}
    required = ("expert_count",)
    sizes: ClassVar = {28: "21B.A3B", 54: "300B.A47B"}
    shapes: ClassVar = {
        "ernie-4.5-21b-a3b": ModelShape(
            "ernie4_5-moe",
            28,
            2560,
            12288,
            20,
            4,
            128,
            103424,
            131072,
            500000.0,
            tied=True,
            n_expert=64,
            n_expert_used=6,
            n_ff_expert=1536,
            metadata=PUBLISHED,
        ),
        "tiny-ernie4-5-moe": ModelShape(
            "ernie4_5-moe",
            4,
            96,
            160,
            4,
            1,
            40,
            331,
            128,
            500000.0,
            tied=True,
            n_expert=7,
            n_expert_used=3,
            n_ff_expert=96,
            metadata={STEP: 2, "leading_dense_block_count": 1, "expert_shared_count": 2, "expert_shared_feed_forward_length": 192},
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        m = self.metadata
        self.n_dense, self.step = m.count("leading_dense_block_count", 0, least=0), m.count(STEP, 1, least=0) or 1
        n_shared = m.count("expert_shared_count", 0, least=0)
        self.n_ff_shared = m.count("expert_shared_feed_forward_length", 0, least=0) or n_shared * self.hp.n_ff_expert

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        if is_dense(il, self.n_dense, self.step):
            return pre_norm_layer(b, x, il, rope=self.hp.rope, feed=feed_forward)
        return pre_norm_layer(b, x, il, rope=self.hp.rope, feed=experts, n_ff_shared=self.n_ff_shared)

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        yield from attention_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        if is_dense(il, int(s.metadata["leading_dense_block_count"]), int(s.metadata[STEP])):
            yield from feed_forward_tensors(s)
            return
        yield from expert_tensors(s)
        yield "exp_probs_b.bias", (s.n_expert,)
        yield from shared_expert_tensors(s, int(s.metadata["expert_shared_feed_forward_length"]))


def is_dense(il: int, n_dense: int, step: int) -> bool:
    """Whether layer `il` has no experts."""
    return il < n_dense or (il + 1) % step != 0
