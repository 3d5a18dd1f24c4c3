"""The `llama4` architecture: Llama 4 Scout and Maverick, text part.

As llama, but of four layers three see their own chunk of the text alone; the others see all of it, rotate neither Q nor K, and have a Q
that grows with the position (vkback/models/temperature.py). Where there are no 128 experts, heads of rotated layers are RMS-normed without
a weight; RoPE does not change what they are divided by, so that the norm may come first. Every `interleave_moe_layer_step`-th layer has
experts beside a shared one: the sigmoid of the best logit is multiplied into what that expert reads, not into what it makes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Heads, Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import attention, attention_norm, experts, feed_forward, feed_forward_norm, rms_norm, separate_qkv, shared_expert
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.shape import ModelShape, Tensors, attention_tensors, expert_tensors, feed_forward_tensors, shared_expert_tensors
from vkback.models.temperature import TEMPERATURE_LENGTH, TEMPERATURE_SCALE, TEMPERATURES, tempered, with_temperatures
from vkback.units import UNKNOWN_SIZE

STEP = "interleave_moe_layer_step"
PERIOD = 4
"""One layer of so many, the last of them, sees all tokens, unless `attention.sliding_window_pattern` says otherwise."""
CHUNK, LENGTH, SCALE = 8192, 8192, 0.1
"""Tokens of a chunk, of a step of the temperatures, and their scale, of files without keys."""
UNNORMED = 128
"""Experts of Maverick, whose heads are not normed."""
ONES = "attn_ones.weight"
"""The weight of norms without one."""

SCOUT: dict[str, Any] = {STEP: 1, "expert_weights_norm": False}


@register
class Llama4(Architecture):
    name = "llama4"
    vocabulary = "llama4"
    keys = EXPERTS | {STEP, "attention.sliding_window", "attention.sliding_window_pattern", TEMPERATURE_LENGTH, TEMPERATURE_SCALE}
    settled: ClassVar = {"expert_gating_func": 2, "expert_shared_count": 1}
    required = ("expert_count",)
    by_context = (TEMPERATURES,)
    shapes: ClassVar = {
        "llama4-scout": ModelShape(
            "llama4",
            48,
            5120,
            16384,
            40,
            8,
            128,
            202048,
            10485760,
            500000.0,
            rope_stretch=16.0,
            n_expert=16,
            n_expert_used=1,
            n_ff_expert=8192,
            metadata=SCOUT,
        ),
        "llama4-maverick": ModelShape(
            "llama4",
            48,
            5120,
            16384,
            40,
            8,
            128,
            202048,
            1048576,
            500000.0,
            n_expert=128,
            n_expert_used=1,
            n_ff_expert=8192,
            metadata={**SCOUT, STEP: 2},
        ),
        "tiny-llama4": ModelShape(
            "llama4",
            5,
            96,
            160,
            4,
            2,
            40,
            331,
            128,
            500000.0,
            window=9,
            n_expert=5,
            n_expert_used=1,
            n_ff_expert=96,
            metadata={**SCOUT, STEP: 2, TEMPERATURE_LENGTH: 10, TEMPERATURE_SCALE: 0.3},
        ),
    }

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        m = Metadata(f)
        n_head = m.count("attention.head_count")
        width = m.count("attention.key_length", m.count("embedding_length") // n_head)
        return with_temperatures(f, m, steps(m), default=SCALE, offset=1).with_made(ONES, np.ones(width, np.float32))

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        m, hp = self.metadata, self.hp
        if hp.n_expert_used != 1:
            raise m.fail("expert_used_count", hp.n_expert_used, "1: the weight of an expert is in what it reads")
        self.hp = hp = replace(hp, window=hp.window or CHUNK, norm_w=False)
        self.steps, self.scale = steps(m), m.positive_or(TEMPERATURE_SCALE, SCALE)
        self.every = m.count(STEP)
        self.sees_all = m.pattern("attention.sliding_window_pattern", hp.n_layer, PERIOD)
        if hp.n_expert == UNNORMED:
            self.unused_tensors |= {ONES}

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        hp = self.hp
        y = attention_norm(b, x, il)
        if self.sees_all[il]:
            y = attention(b, y, il, rope=None, qkv=self.qkv)
        else:
            norm = None if hp.n_expert == UNNORMED else ones_norm
            y = attention(b, y, il, rope=hp.rope, qk_norm=norm, window=hp.window, chunked=True)
        x = b.last_token(b.add(y, x, f"ffn_inp-{il}"), il)
        normed = feed_forward_norm(b, x, il)
        if (il + 1) % self.every:
            return b.add(feed_forward(b, normed, il), x, f"l_out-{il}")
        x = b.add(shared_expert(b, normed, il, hp.n_ff_expert), x, f"ffn_shared-{il}")
        return b.add(experts(b, normed, il, gating="sigmoid", weighs_input=True), x, f"l_out-{il}")

    def qkv(self, b: GraphBuilder, x: Tensor, il: int, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """A Projection whose Q has its temperature."""
        q, k, v = separate_qkv(b, x, il, heads)
        return tempered(b, q, il, self.steps, offset=1), k, v

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        return {16: "17Bx16E (Scout)", 128: "17Bx128E (Maverick)"}.get(metadata.stated("expert_count"), UNKNOWN_SIZE)

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        yield from attention_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        if (il + 1) % int(s.metadata[STEP]):
            yield from feed_forward_tensors(s)
            return
        yield from expert_tensors(s)
        yield from shared_expert_tensors(s, s.n_ff_expert)


def steps(m: Metadata) -> int:
    """Tokens of a step of the temperatures."""
    return m.count(TEMPERATURE_LENGTH, 0, least=0) or LENGTH


def ones_norm(b: GraphBuilder, x: Tensor, stem: str, name: str, *, plain: str) -> Tensor:
    """A Norm without a weight, in the form that kernels know."""
    return rms_norm(b, x, ONES.removesuffix(".weight"), name, plain=plain)
