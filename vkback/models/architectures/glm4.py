"""The `glm4` architecture: GLM-4-0414 9B and 32B, GLM-Z1.

As llama, but RoPE turns a part of each head, attention and feed-forward are normed once more before they are added, gate and up are one
tensor of a file, and Q, K and V may have biases, or be one tensor, too. Such tensors are cut by rows when the file is opened.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import SWIGLU, gate_up_cuts, pre_post_norm_layer, qkv_cuts
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, attention_tensors, post_norm_tensors, with_biases


@register
class Glm4(Architecture):
    name = "glm4"
    vocabulary = "glm4"
    sizes: ClassVar = {40: "9B", 61: "32B"}
    shapes: ClassVar = {
        "glm4-9b": ModelShape("glm4", 40, 4096, 13696, 32, 2, 128, 151552, 32768, 10000.0, rope_dims=64),
        "glm4-32b": ModelShape("glm4", 61, 6144, 23040, 48, 2, 128, 151552, 32768, 10000.0, rope_dims=64),
        "tiny-glm4": ModelShape("glm4", 3, 96, 160, 4, 2, 40, 331, 128, 10000.0, rope_dims=20),
    }

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        hp = Metadata(f).hparams(cls.rope_mode)
        return f.cut(qkv_cuts(f, hp) | gate_up_cuts(f, hp))

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return pre_post_norm_layer(b, x, il, rope=self.hp.rope, glu=SWIGLU)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from with_biases(attention_tensors(s), but="attn_output") if s.n_layer < 61 else attention_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        yield "ffn_down.weight", (s.n_embd, s.n_ff)
        yield "ffn_up.weight", (2 * s.n_ff, s.n_embd)
        yield from post_norm_tensors(s)
