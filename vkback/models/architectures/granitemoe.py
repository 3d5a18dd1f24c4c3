"""The `granitemoe` architecture: IBM Granite 3 1B-A400M and 3B-A800M.

As granite, with a mixture of experts in every layer, and beside it a shared one where `expert_shared_feed_forward_length` is above 0.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.models.architecture import register
from vkback.models.blocks import experts, pre_norm_layer
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.scaled import SCALES, Scaled
from vkback.models.shape import ModelShape, Tensors, attention_tensors, expert_tensors, shared_expert_tensors


@register
class GraniteMoe(Scaled):
    name = "granitemoe"
    vocabulary = "refact"
    keys = EXPERTS | SCALES | {"expert_shared_feed_forward_length", "rope.scaling.finetuned"}
    settled: ClassVar = {"expert_gating_func": 1}
    required = ("expert_count",)
    sizes: ClassVar = {32: "3B", 40: "3B"}
    shapes: ClassVar = {
        "granite-3.1-3b-a800m": ModelShape(
            "granitemoe",
            32,
            1536,
            512,
            24,
            8,
            64,
            49155,
            131072,
            10000000.0,
            1e-6,
            tied=True,
            n_expert=40,
            n_expert_used=8,
            n_ff_expert=512,
            metadata={"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.015625, "logit_scale": 6.0},
        ),
        "tiny-granitemoe": ModelShape(
            "granitemoe",
            3,
            96,
            96,
            6,
            2,
            16,
            331,
            128,
            10000.0,
            n_expert=7,
            n_expert_used=3,
            n_ff_expert=96,
            metadata={
                "embedding_scale": 3.0,
                "residual_scale": 0.5,
                "attention.scale": 0.15,
                "logit_scale": 0.5,
                "expert_shared_feed_forward_length": 64,
            },
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.n_ff_shared = self.metadata.count("expert_shared_feed_forward_length", 0, least=0)

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return pre_norm_layer(b, x, il, rope=self.rope, feed=experts, n_ff_shared=self.n_ff_shared)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from attention_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        yield from expert_tensors(s)
        if n_ff_shared := int(s.metadata.get("expert_shared_feed_forward_length", 0)):
            yield from shared_expert_tensors(s, n_ff_shared)
