"""The `deci` architecture: models that a search cut from Llama layer by layer, as Llama-3.1-Nemotron-51B, Llama-3.3-Nemotron-Super-49B and
Llama-3.1-Nemotron-Ultra-253B.

As llama, but layers differ. Each has its own number of K and V heads and its own width of the feed-forward. A layer without heads has no
attention and no norm before it; one with heads, but no K and V heads, has a single linear layer in the place of attention; one with a width
of 0 has no feed-forward.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Heads
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import attention, attention_norm, feed_forward, feed_forward_norm
from vkback.models.builder import GraphBuilder
from vkback.models.shape import LayerShape, ModelShape, Tensors


def _layers(n_head: int, runs: tuple[tuple[int, int, int], ...]) -> tuple[LayerShape, ...]:
    """Runs of equal layers: how many, K and V heads (0: no attention), width of the feed-forward."""
    return tuple(LayerShape(n_head if n_head_kv else 0, n_head_kv, n_ff) for count, n_head_kv, n_ff in runs for _ in range(count))


NEMOTRON_SUPER = _layers(
    64,
    (
        (1, 8, 14336),
        (5, 8, 28672),
        (2, 0, 14336),
        (3, 8, 28672),
        (1, 0, 17920),
        (30, 8, 28672),
        (1, 0, 7168),
        (2, 0, 14336),
        (1, 0, 7168),
        (1, 0, 28672),
        (1, 0, 7168),
        (1, 0, 14336),
        (3, 0, 7168),
        (1, 8, 28672),
        (1, 0, 7168),
        (2, 0, 5632),
        (1, 0, 7168),
        (3, 0, 5632),
        (2, 0, 7168),
        (2, 0, 2816),
        (2, 0, 5632),
        (2, 0, 2816),
        (1, 0, 5632),
        (2, 0, 2816),
        (9, 8, 28672),
    ),
)
"""Of Llama-3.3-Nemotron-Super-49B-v1, by `block_configs` of its published config.json: 64 / n_heads_in_group K and V heads, and a width of
2/3 * 8192 * ffn_mult, rounded up to a multiple of 256."""

ODD = tuple(LayerShape(*given) for given in ((4, 2, 160), (0, 0, 96), (4, 0, 224), (4, 4, 0), (0, 0, 0), (4, 1, 64), (4, 0, 0), (0, 0, 32)))


@register
class Deci(Architecture):
    name = "deci"
    varying = frozenset({"attention.head_count", "attention.head_count_kv", "feed_forward_length"})
    sizes: ClassVar = {32: "7B", 80: "70B", 162: "405B"}
    shapes: ClassVar = {
        "tiny-deci": ModelShape("deci", len(ODD), 96, 224, 4, 4, 24, 331, 128, 500000.0, rope_stretch=8.0, layers=ODD),
        "deci-49b": ModelShape("deci", 80, 8192, 28672, 64, 8, 128, 128256, 131072, 500000.0, rope_stretch=8.0, layers=NEMOTRON_SUPER),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        hp, m = self.hp, self.metadata
        n_head, n_head_kv = (m.of_layers(f"attention.{key}", hp.n_layer) for key in ("head_count", "head_count_kv"))
        for il, (n, n_kv) in enumerate(zip(n_head, n_head_kv, strict=True)):
            if n_kv and (n == 0 or n % n_kv):
                raise m.fail("attention.head_count_kv", f"{n_kv} for layer {il}", f"0 or a divisor of its {n} heads")
        self.heads = [Heads(n, n_kv, hp.head_dim_k, hp.head_dim_v) for n, n_kv in zip(n_head, n_head_kv, strict=True)]
        self.n_ff = m.of_layers("feed_forward_length", hp.n_layer)

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        heads = self.heads[il]
        if heads.n:
            y = attention_norm(b, x, il)
            if heads.n_kv:
                y = attention(b, y, il, rope=self.hp.rope, heads=heads)
            else:
                y = b.linear(y, f"blk.{il}.attn_output", self.hp.n_embd, f"attn_out-{il}")
            x = b.add(y, x, f"ffn_inp-{il}")
        x = b.last_token(x, il)
        if self.n_ff[il]:
            x = b.add(feed_forward(b, feed_forward_norm(b, x, il), il, width=self.n_ff[il]), x, f"l_out-{il}")
        return x

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        layer = s.layers[il]
        if layer.n_head:
            yield "attn_norm.weight", (s.n_embd,)
            yield "attn_output.weight", (s.n_embd, layer.n_head * s.head_dim)
        if layer.n_head_kv:
            yield "attn_k.weight", (layer.n_head_kv * s.head_dim, s.n_embd)
            yield "attn_q.weight", (layer.n_head * s.head_dim, s.n_embd)
            yield "attn_v.weight", (layer.n_head_kv * s.head_dim, s.n_embd)
        if layer.n_ff:
            yield "ffn_norm.weight", (s.n_embd,)
            yield "ffn_down.weight", (s.n_embd, layer.n_ff)
            yield "ffn_gate.weight", (layer.n_ff, s.n_embd)
            yield "ffn_up.weight", (layer.n_ff, s.n_embd)
