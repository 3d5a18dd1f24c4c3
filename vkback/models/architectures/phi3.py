"""The `phi3` architecture: Phi-3 mini and medium, Phi-3.5 mini, Phi-4 mini.

As llama, but RoPE pairs value i with value i + n_dims/2, Q, K and V are one tensor of a file, gate and up another, and a file may have a
sliding window for all layers. The tensors are cut by rows when the file is opened, so the graph is llama's.

Long contexts come with long-rope: two sets of frequency factors. The long ones hold where the KV cache has more rows than the model was
trained on first, at all positions; else the short ones. RoPE's magnitude is the same for both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Metadata, Rope
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import pre_norm_layer
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors

LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


@register
class Phi3(Architecture):
    name = "phi3"
    rope_mode = "neox"
    vocabulary = "spm"
    keys = frozenset({"attention.sliding_window"})
    by_context = (LONG, SHORT)
    sizes: ClassVar = {24: "1B", 32: "3B", 40: "14B"}
    shapes: ClassVar = {
        "phi3-3b": ModelShape(
            "phi3",
            32,
            3072,
            8192,
            32,
            32,
            96,
            32064,
            131072,
            10000.0,
            window=262144,
            metadata={"rope.scaling.original_context_length": 4096, "rope.scaling.attn_factor": 1.1902381},
        ),
        "tiny-phi3": ModelShape(
            "phi3",
            3,
            96,
            160,
            3,
            1,
            32,
            331,
            512,
            10000.0,
            window=9,
            rope_dims=24,
            metadata={"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.0606602},
        ),
        "tiny-phi3-long": ModelShape(
            "phi3",
            3,
            96,
            160,
            4,
            4,
            24,
            331,
            128,
            10000.0,
            metadata={"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.3228757},
        ),
    }

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        hp = Metadata(f).hparams(cls.rope_mode)
        heads = {"attn_q": hp.n_head * hp.head_dim_k, "attn_k": hp.n_head_kv * hp.head_dim_k, "attn_v": hp.n_head_kv * hp.head_dim_v}
        for factors, others in ((LONG, SHORT), (SHORT, LONG)):
            if hp.has_weight(others):
                hp.weight(factors, (hp.rope.n_dims // 2,))
        cuts: dict[str, dict[str, int]] = {}
        for il in range(hp.n_layer):
            for whole, parts in (("attn_qkv", heads), ("ffn_up", {"ffn_gate": hp.n_ff, "ffn_up": hp.n_ff})):
                separate = f"blk.{il}.{next(iter(parts))}.weight" in f.tensors
                if not separate and not hp.has_weight(f"blk.{il}.{whole}.weight"):
                    raise hp.missing(f"blk.{il}.{whole}.weight")
                for kind in ("weight", "bias"):
                    if not separate and f"blk.{il}.{whole}.{kind}" in f.tensors:
                        cuts[f"blk.{il}.{whole}.{kind}"] = {f"blk.{il}.{part}.{kind}": rows for part, rows in parts.items()}
        return f.cut(cuts)

    def rope_for(self, n_ctx: int) -> Rope:
        """RoPE over a KV cache of n_ctx rows."""
        return replace(self.hp.rope, factors=LONG if n_ctx > self.hp.rope.n_ctx_orig else SHORT)

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        return pre_norm_layer(b, x, il, rope=self.rope_for(b.n_ctx), window=self.hp.window)

    @classmethod
    def outer_tensors(cls, s: ModelShape) -> Tensors:
        yield LONG, (s.n_rot // 2,)
        yield SHORT, (s.n_rot // 2,)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield "attn_norm.weight", (s.n_embd,)
        yield "attn_output.weight", (s.n_embd, s.n_head * s.head_dim)
        yield "attn_qkv.weight", ((s.n_head + 2 * s.n_head_kv) * s.head_dim, s.n_embd)
        yield "ffn_norm.weight", (s.n_embd,)
        yield "ffn_down.weight", (s.n_embd, s.n_ff)
        yield "ffn_up.weight", (2 * s.n_ff, s.n_embd)
