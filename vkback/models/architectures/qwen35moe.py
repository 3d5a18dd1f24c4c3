"""The `qwen35moe` architecture: Qwen3.5 and later, 35B-A3B to 397B-A17B, text part.

As qwen35, but every feed-forward is a mixture of experts beside a shared one, which is multiplied by the sigmoid of one value of the token.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.architecture import register
from vkback.models.architectures.qwen35 import PUBLISHED, TINY, Qwen35
from vkback.models.blocks import experts, gated_shared_expert
from vkback.models.builder import GraphBuilder
from vkback.models.delta_net import KEYS
from vkback.models.keys import EXPERTS, MTP, SECTIONS
from vkback.models.shape import ModelShape, Tensors, expert_tensors, shared_expert_tensors
from vkback.units import UNKNOWN_SIZE

SHARED = "expert_shared_feed_forward_length"


@register
class Qwen35Moe(Qwen35):
    name = "qwen35moe"
    dense = False
    keys = KEYS | EXPERTS | {MTP, SECTIONS, SHARED}
    settled: ClassVar = {"expert_gating_func": 1, "expert_shared_count": 1}
    required = ("expert_count",)
    sizes: ClassVar = {40: "35B.A3B", 48: "122B.A10B", 60: "397B.A17B"}
    shapes: ClassVar = {
        "qwen35moe-35b-a3b": ModelShape(
            "qwen35moe",
            40,
            2048,
            0,
            16,
            2,
            256,
            248320,
            262144,
            10000000.0,
            1e-6,
            rope_dims=64,
            n_expert=256,
            n_expert_used=8,
            n_ff_expert=512,
            metadata={**PUBLISHED, "ssm.inner_size": 4096, "ssm.time_step_rank": 32, "full_attention_interval": 4, SHARED: 512},
        ),
        "tiny-qwen35moe": ModelShape(
            "qwen35moe",
            2,
            96,
            0,
            4,
            1,
            40,
            331,
            128,
            10000000.0,
            1e-6,
            rope_dims=16,
            n_expert=7,
            n_expert_used=3,
            n_ff_expert=96,
            metadata={**TINY, SECTIONS: (3, 3, 2, 0), "full_attention_interval": 2, SHARED: 64},
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.n_ff_shared = self.metadata.count(SHARED, 0, least=0) or self.hp.n_ff_expert

    def feed(self, b: GraphBuilder, normed: Tensor, x: Tensor, il: int) -> Tensor:
        x = b.add(gated_shared_expert(b, normed, il, self.n_ff_shared), x, f"ffn_shared-{il}")
        return b.add(experts(b, normed, il), x, f"l_out-{il}")

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        return cls.sizes.get(metadata.stated("block_count") - metadata.stated(MTP), UNKNOWN_SIZE)

    @classmethod
    def feed_tensors(cls, s: ModelShape) -> Tensors:
        yield from expert_tensors(s)
        yield "ffn_gate_inp_shexp.weight", (s.n_embd,)
        yield from shared_expert_tensors(s, int(s.metadata[SHARED]))
