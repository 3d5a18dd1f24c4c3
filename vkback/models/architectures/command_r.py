"""The `command-r` architecture: Cohere Command R and R+, Aya.

Per layer: layer norm without a bias, then attention and a SwiGLU feed-forward side by side, both added to the residual stream. In R+ every
head of Q and K has a layer norm with weights of its own. Logits are multiplied by `logit_scale`, which is in the weights of the last norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import LAYER_EPS, Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import bare_layer_norm, parallel_layer, with_zero_bias
from vkback.models.builder import GraphBuilder
from vkback.models.scaled import with_scaled_logits
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors


@register
class CommandR(Architecture):
    name = "command-r"
    vocabulary = "command-r"
    norm_eps = LAYER_EPS
    keys = frozenset({"logit_scale"})
    sizes: ClassVar = {40: "35B"}
    shapes: ClassVar = {
        "command-r-35b": ModelShape(
            "command-r", 40, 8192, 22528, 64, 64, 128, 256000, 131072, 8000000.0, tied=True, metadata={"logit_scale": 0.0625}
        ),
        "tiny-command-r": ModelShape("command-r", 3, 96, 160, 3, 3, 32, 331, 128, 8000000.0, tied=True, metadata={"logit_scale": 0.0625}),
        "tiny-command-r-plus": ModelShape("command-r", 3, 96, 160, 4, 2, 40, 331, 128, 8000000.0, tied=True, metadata={"logit_scale": 0.8}),
    }

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        return with_zero_bias(f, Metadata(f).count("embedding_length"))

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.hp = with_scaled_logits(self.hp, self.metadata.positive_or("logit_scale", 1.0))

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        qk_norm = norm_by_head if self.hp.has_weight("blk.0.attn_q_norm.weight") else None
        return parallel_layer(b, x, il, rope=self.hp.rope, norm=bare_layer_norm, qk_norm=qk_norm)

    def output(self, b: GraphBuilder, x: Tensor) -> Tensor:
        return b.logits(bare_layer_norm(b, x, "output_norm", "result_norm", plain="result_centered"))

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from attention_tensors(s)
        if s.n_head_kv < s.n_head:  # R+
            yield "attn_k_norm.weight", (s.n_head_kv, s.head_dim)
            yield "attn_q_norm.weight", (s.n_head, s.head_dim)
        yield from feed_forward_tensors(s)


def norm_by_head(b: GraphBuilder, x: Tensor, stem: str, name: str, *, plain: str) -> Tensor:
    """Layer norm of every head of x [n, heads, dim] times its row of `stem`.weight [heads, dim]."""
    n, heads, dim = x.shape
    w = b.hp.weight(f"{stem}.weight", (heads, dim))
    y = b.graph.emit("NORM", plain, "F32", x.shape, (x,), eps=b.hp.rms_eps)
    flat = b.view(y, (n, heads * dim))
    return b.view(b.graph.emit("MUL", name, "F32", flat.shape, (flat, replace(w, shape=(heads * dim,)))), x.shape)
