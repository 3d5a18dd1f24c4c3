"""The `granitehybrid` architecture: IBM Granite 4.0 H.

Most layers are Mamba-2 (vkback/models/mamba.py). A layer whose `attention.head_count_kv` is above 0 has attention instead, with RoPE where
`rope.scaling.finetuned` says so. Feed-forward: SwiGLU, dense or a mixture of experts beside a shared one that works on every token. Four
scales (vkback/models/scaled.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.architecture import register
from vkback.models.blocks import attention, attention_norm, experts, feed_forward, feed_forward_norm, shared_expert
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.mamba import SSM, mamba2, recurrence, recurrence_tensors
from vkback.models.scaled import SCALES, Scaled
from vkback.models.shape import ModelShape, Tensors, attention_tensors, expert_tensors, feed_forward_tensors, shared_expert_tensors
from vkback.units import UNKNOWN_SIZE

SIZES = {768: "350M", 2048: "3B", 2560: "3B", 4096: "32B.A9B"}
"""By embedding width; 1536 is "1B", with experts 512 wide "7B.A1B"."""


PUBLISHED = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 1,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention.scale": 0.0078125,
    "logit_scale": 6.0,
    "rope.scaling.finetuned": False,
}
"""Of the models of 1B and 7B, beside sizes."""


@register
class GraniteHybrid(Scaled):
    name = "granitehybrid"
    recurrent = True
    vocabulary = "dbrx"
    keys = EXPERTS | SCALES | SSM | {"expert_shared_feed_forward_length", "rope.scaling.finetuned"}
    settled: ClassVar = {"expert_gating_func": 1}
    varying = frozenset({"attention.head_count_kv"})
    shapes: ClassVar = {
        "granite-4-h-1b": ModelShape(
            "granitehybrid",
            40,
            1536,
            4096,
            12,
            4,
            128,
            100352,
            1048576,
            10000.0,
            tied=True,
            attention=frozenset({5, 15, 25, 35}),
            metadata={**PUBLISHED, "ssm.inner_size": 3072, "ssm.time_step_rank": 48},
        ),
        "granite-4-h-tiny": ModelShape(
            "granitehybrid",
            40,
            1536,
            512,
            12,
            4,
            128,
            100352,
            1048576,
            10000.0,
            tied=True,
            attention=frozenset({5, 15, 25, 35}),
            n_expert=64,
            n_expert_used=6,
            n_ff_expert=512,
            metadata={**PUBLISHED, "ssm.inner_size": 3072, "ssm.time_step_rank": 48, "expert_shared_feed_forward_length": 1024},
        ),
        "tiny-granitehybrid": ModelShape(
            "granitehybrid",
            4,
            96,
            160,
            3,
            1,
            32,
            333,
            256,
            10000.0,
            tied=True,
            attention=frozenset({2}),
            metadata={
                **PUBLISHED,
                "ssm.inner_size": 192,
                "ssm.time_step_rank": 12,
                "ssm.state_size": 20,
                "ssm.group_count": 2,
                "attention.scale": 0.15,
            },
        ),
        "tiny-granitehybrid-moe": ModelShape(
            "granitehybrid",
            3,
            64,
            96,
            2,
            1,
            32,
            300,
            256,
            10000.0,
            attention=frozenset({1}),
            n_expert=6,
            n_expert_used=2,
            n_ff_expert=96,
            metadata={
                **PUBLISHED,
                "ssm.inner_size": 128,
                "ssm.time_step_rank": 4,
                "ssm.state_size": 16,
                "attention.scale": 0.2,
                "rope.scaling.finetuned": True,
                "expert_shared_feed_forward_length": 64,
            },
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        m = self.metadata
        self.ssm = mamba2(m)
        self.n_head_kv = m.of_layers("attention.head_count_kv", self.hp.n_layer)
        self.n_ff_shared = m.count("expert_shared_feed_forward_length", 0, least=0) if self.hp.n_expert else 0

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        normed = attention_norm(b, x, il)
        if self.n_head_kv[il]:
            heads = replace(self.hp.heads, n_kv=self.n_head_kv[il])
            mixed = attention(b, normed, il, rope=self.rope, heads=heads)
        else:
            mixed = recurrence(b, normed, il, self.ssm, eps=self.eps)
        x = b.last_token(b.add(mixed, x, f"ffn_inp-{il}"), il)
        normed = feed_forward_norm(b, x, il)
        if not self.hp.n_expert:
            return b.add(feed_forward(b, normed, il), x, f"l_out-{il}")
        if self.n_ff_shared:
            x = b.add(shared_expert(b, normed, il, self.n_ff_shared), x, f"ffn_shared-{il}")
        return b.add(experts(b, normed, il), x, f"l_out-{il}")

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        width = metadata.stated("embedding_length")
        if width == 1536:
            return "7B.A1B" if metadata.stated("feed_forward_length") == 512 else "1B"
        return SIZES.get(width, UNKNOWN_SIZE)

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        yield from attention_tensors(s) if s.attention is None or il in s.attention else recurrence_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        if not s.n_expert:
            yield from feed_forward_tensors(s)
            return
        yield from expert_tensors(s)
        yield from shared_expert_tensors(s, int(s.metadata["expert_shared_feed_forward_length"]))
