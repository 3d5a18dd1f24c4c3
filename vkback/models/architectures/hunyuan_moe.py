"""The `hunyuan-moe` architecture: Hunyuan A13B.

As qwen3moe, but every head of Q and K is RMS-normed once it is rotated, and a shared expert works on every token.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import experts, pre_norm_layer, rms_norm
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.shape import ModelShape, Tensors, attention_tensors, expert_tensors, qk_norm_tensors, shared_expert_tensors


@register
class HunyuanMoe(Architecture):
    name = "hunyuan-moe"
    rope_mode = "neox"
    keys = EXPERTS | {"expert_shared_feed_forward_length"}
    settled: ClassVar = {"expert_gating_func": 1, "expert_shared_count": 1}
    required = ("expert_count",)
    sizes: ClassVar = {32: "A13B"}
    shapes: ClassVar = {
        "hunyuan-a13b": ModelShape(
            "hunyuan-moe",
            32,
            4096,
            3072,
            32,
            8,
            128,
            128167,
            262144,
            11158840.0,
            tied=True,
            n_expert=64,
            n_expert_used=8,
            n_ff_expert=3072,
            metadata={"expert_shared_feed_forward_length": 3072},
        ),
        "tiny-hunyuan-moe": ModelShape(
            "hunyuan-moe",
            3,
            96,
            96,
            4,
            2,
            40,
            331,
            128,
            11158840.0,
            tied=True,
            n_expert=7,
            n_expert_used=3,
            n_ff_expert=96,
            metadata={"expert_shared_feed_forward_length": 96},
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.n_ff_shared = self.metadata.count("expert_shared_feed_forward_length", 0, least=0) or self.hp.n_ff

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        rope, n_ff = self.hp.rope, self.n_ff_shared
        return pre_norm_layer(b, x, il, rope=rope, qk_norm=rms_norm, qk_norm_of="rotated head", feed=experts, n_ff_shared=n_ff)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from attention_tensors(s)
        yield from qk_norm_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        yield from expert_tensors(s)
        yield from shared_expert_tensors(s, int(s.metadata["expert_shared_feed_forward_length"]))
