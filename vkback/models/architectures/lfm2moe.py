"""The `lfm2moe` architecture: Liquid AI's LFM2 8B-A1B and 24B-A2B.

As lfm2, but after the first `leading_dense_block_count` layers the feed-forward is a mixture of experts: a sigmoid of each logit, with a
bias for the choice alone, divided by the sum of those chosen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.architecture import register
from vkback.models.architectures.lfm2 import Lfm2
from vkback.models.blocks import experts_by_sigmoid, feed_forward
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.shape import ModelShape, Tensors, expert_tensors, feed_forward_tensors
from vkback.models.short_conv import TAPS
from vkback.units import UNKNOWN_SIZE

DENSE = "leading_dense_block_count"


@register
class Lfm2Moe(Lfm2):
    name = "lfm2moe"
    keys = Lfm2.keys | EXPERTS | {DENSE}
    settled: ClassVar = {"expert_gating_func": 2}
    required = (TAPS, "expert_count")
    sizes: ClassVar = {24: "8B.A1B", 40: "24B.A2B"}
    shapes: ClassVar = {
        "lfm2-8b-a1b": ModelShape(
            "lfm2moe",
            24,
            2048,
            7168,
            32,
            8,
            64,
            65536,
            128000,
            1000000.0,
            tied=True,
            attention=frozenset({2, 6, 10, 14, 18, 21}),
            n_expert=32,
            n_expert_used=4,
            n_ff_expert=1792,
            metadata={TAPS: 3, DENSE: 2, "expert_gating_func": 2},
        ),
        "tiny-lfm2moe": ModelShape(
            "lfm2moe",
            3,
            96,
            160,
            4,
            2,
            40,
            331,
            256,
            10000.0,
            tied=True,
            attention=frozenset({1}),
            n_expert=7,
            n_expert_used=3,
            n_ff_expert=64,
            metadata={TAPS: 4, DENSE: 1, "expert_gating_func": 2},
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.hp = replace(self.hp, norm_w=f.get(self.metadata.key("expert_weights_norm"), bool, True))
        self.n_dense = self.metadata.count(DENSE, 0, least=0)

    def feed(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return (feed_forward if il < self.n_dense else experts_by_sigmoid)(b, x, il)

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        return cls.sizes.get(metadata.stated("block_count"), UNKNOWN_SIZE)

    @classmethod
    def feed_tensors(cls, s: ModelShape, il: int) -> Tensors:
        if il < int(s.metadata[DENSE]):
            yield from feed_forward_tensors(s)
            return
        yield from expert_tensors(s)
        yield "exp_probs_b.bias", (s.n_expert,)
