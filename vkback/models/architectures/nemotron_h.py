"""The `nemotron_h` architecture: Nemotron-H and Nemotron Nano 2.

A layer is one part, behind an RMS norm and with a residual: a feed-forward with squared ReLU where `feed_forward_length` is above 0,
attention without RoPE where `attention.head_count_kv` is, else a Mamba-2 block (vkback/models/mamba.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import attention, attention_norm, feed_forward_plain
from vkback.models.builder import GraphBuilder
from vkback.models.mamba import SSM, mamba2, recurrence, recurrence_tensors
from vkback.models.shape import LayerShape, ModelShape, Tensors, attention_tensors, plain_feed_forward_tensors

SQUARED_RELU = ("RELU", "SQR")


def layers_of(pattern: str, n_head: int, n_head_kv: int, n_ff: int) -> Iterator[LayerShape]:
    """Of a pattern as the makers write it: M is Mamba-2, * attention, - and E a feed-forward."""
    for kind in pattern:
        yield LayerShape(n_head, n_head_kv if kind == "*" else 0, n_ff if kind in "-E" else 0)


TINY: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.time_step_rank": 8, "ssm.state_size": 20, "ssm.group_count": 2}
NANO: dict[str, Any] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 10240,
    "ssm.time_step_rank": 128,
    "ssm.state_size": 128,
    "ssm.group_count": 8,
}
NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"


@register
class NemotronH(Architecture):
    name = "nemotron_h"
    recurrent = True
    vocabulary = "llama-bpe"
    keys = SSM
    biases = ("ssm_conv1d",)
    varying = frozenset({"attention.head_count", "attention.head_count_kv", "feed_forward_length"})
    sizes: ClassVar = {56: "9B"}
    shapes: ClassVar = {
        "nemotron-nano-9b": ModelShape(
            "nemotron_h",
            56,
            4480,
            15680,
            40,
            8,
            128,
            131072,
            131072,
            10000.0,
            layers=tuple(layers_of(NANO_9B, 40, 8, 15680)),
            metadata=NANO,
        ),
        "tiny-nemotron_h": ModelShape(
            "nemotron_h", 6, 96, 160, 4, 2, 24, 331, 256, 10000.0, layers=tuple(layers_of("M-*MM-", 4, 2, 160)), metadata=TINY
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.ssm = mamba2(self.metadata)
        self.n_head_kv = self.metadata.of_layers("attention.head_count_kv", self.hp.n_layer)
        self.n_ff = self.metadata.of_layers("feed_forward_length", self.hp.n_layer)

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        normed = attention_norm(b, x, il)
        if self.n_ff[il]:
            x, normed = b.last_token(x, il), b.last_token(normed, il, "attn_norm_last")
            return b.add(self.feed(b, normed, il), x, f"l_out-{il}")
        attends = self.n_head_kv[il] > 0
        y = attention(b, normed, il, rope=None) if attends else recurrence(b, normed, il, self.ssm, eps=self.hp.rms_eps)
        return b.last_token(b.add(y, x, f"l_out-{il}"), il, "l_out_last")

    def feed(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        """The feed-forward of a layer that is one."""
        return feed_forward_plain(b, x, il, width=self.n_ff[il], functions=SQUARED_RELU)

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        own = s.layers[il]
        if own.n_ff:
            yield "attn_norm.weight", (s.n_embd,)
            yield from cls.feed_tensors(s)
        elif own.n_head_kv:
            yield from attention_tensors(s)
        else:
            yield from recurrence_tensors(s)

    @classmethod
    def feed_tensors(cls, s: ModelShape) -> Tensors:
        """Those of a feed-forward."""
        yield from plain_feed_forward_tensors(s)
