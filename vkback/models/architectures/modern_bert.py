"""The `modern-bert` architecture: ModernBERT and embedding models of its shape. It makes vectors of texts.

Layer norms without biases before attention and feed-forward, but none before the first attention; RoPE pairs value i with value i +
n_dims/2; the feed-forward is GEGLU with the exact gelu. Of three layers the first sees all of a text; the others see a window on either
side, and have a RoPE base of their own. Q, K and V are one tensor of a file, gate and up another, gate first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import LAYER_EPS, Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.architectures.bert import BY_MEAN
from vkback.models.blocks import Glu, attention, bare_layer_norm, feed_forward, with_zero_bias
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors
from vkback.models.texts import rows_of

PERIOD = 3
"""One layer of so many, the first of them, sees all tokens, unless `attention.sliding_window_pattern` says otherwise."""
LOCAL_BASE = 10000.0
"""RoPE base of the others, unless `rope.freq_base_swa` says otherwise."""


@register
class ModernBert(Architecture):
    name = "modern-bert"
    rope_mode = "neox"
    vocabulary = "gpt-2"
    norm_eps = LAYER_EPS
    causal = False
    rank_function = "GELU_ERF"
    rank_pooling = "mean"
    keys = frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"})
    required = ("attention.sliding_window",)
    sizes: ClassVar = {12: "47M", 22: "149M", 28: "395M"}
    shapes: ClassVar = {
        "tiny-modern-bert": ModelShape("modern-bert", 4, 96, 160, 3, 3, 32, 331, 128, 160000.0, tied=True, window=8, metadata=BY_MEAN),
        "modernbert-base": ModelShape(
            "modern-bert", 22, 768, 1152, 12, 12, 64, 50368, 8192, 160000.0, tied=True, window=128, metadata=BY_MEAN
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        base = self.metadata.freq_base("rope.freq_base_swa", LOCAL_BASE)
        self.local_rope = replace(self.hp.rope, freq_base=base)
        self.sees_all = self.metadata.pattern("attention.sliding_window_pattern", self.hp.n_layer, PERIOD, first=True)

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        hp = Metadata(f).hparams(cls.rope_mode, cls.norm_eps)
        q, kv = hp.n_head * hp.head_dim_k, hp.n_head_kv * hp.head_dim_k
        cuts: dict[str, dict[str, int]] = {}
        for block in (f"blk.{il}" for il in range(hp.n_layer)):
            cuts[f"{block}.attn_qkv.weight"] = {f"{block}.attn_{part}.weight": n for part, n in (("q", q), ("k", kv), ("v", kv))}
            cuts[f"{block}.ffn_up.weight"] = {f"{block}.ffn_gate.weight": hp.n_ff, f"{block}.ffn_up.weight": hp.n_ff}
        return with_zero_bias(f.cut(cuts), hp.n_embd)

    def embed(self, b: GraphBuilder) -> Tensor:
        return bare_layer_norm(b, super().embed(b), "token_embd_norm", "inp_norm", plain="inp_centered")

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        rope, window = (self.hp.rope, 0) if self.sees_all[il] else (self.local_rope, self.hp.window)
        normed = x if il == 0 else bare_layer_norm(b, x, f"blk.{il}.attn_norm", f"attn_norm-{il}", plain=f"attn_centered-{il}")
        x = b.add(attention(b, normed, il, rope=rope, window=window), x, f"ffn_inp-{il}")
        normed = bare_layer_norm(b, x, f"blk.{il}.ffn_norm", f"ffn_norm-{il}", plain=f"ffn_centered-{il}")
        return b.add(feed_forward(b, normed, il, glu=Glu("GEGLU_ERF")), x, f"l_out-{il}")

    def output(self, b: GraphBuilder, x: Tensor) -> Tensor:
        return b.logits(bare_layer_norm(b, x, self.output_norm, "result_norm", plain="result_centered"))

    def classify(self, b: GraphBuilder, x: Tensor) -> Tensor:
        rows = rows_of(self.hp, "cls")
        if rows and self.hp.has_weight("cls.norm.weight"):
            x = b.linear(x, "cls", rows, "result_cls")
            x = b.graph.emit(self.rank_function, "result_cls_act", "F32", x.shape, (x,))
            x = bare_layer_norm(b, x, "cls.norm", "result_cls_norm", plain="result_cls_centered")
            return b.linear(x, "cls.output", rows_of(self.hp, "cls.output"), "result_rank")
        return super().classify(b, x)

    @classmethod
    def outer_tensors(cls, s: ModelShape) -> Tensors:
        yield "token_embd_norm.weight", (s.n_embd,)

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        if il:
            yield "attn_norm.weight", (s.n_embd,)
        yield "attn_output.weight", (s.n_embd, s.n_head * s.head_dim)
        yield "attn_qkv.weight", ((s.n_head + 2 * s.n_head_kv) * s.head_dim, s.n_embd)
        yield "ffn_down.weight", (s.n_embd, s.n_ff)
        yield "ffn_norm.weight", (s.n_embd,)
        yield "ffn_up.weight", (2 * s.n_ff, s.n_embd)
