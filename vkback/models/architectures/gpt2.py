"""The `gpt2` architecture: GPT-2 and models trained in its shape.

Per layer: layer norm, attention without RoPE, residual, layer norm, gelu feed-forward without a gate, residual; all with biases. The
position of a token is a row of a learned table, which is added to its embedding: a context cannot be longer than the table. Q, K and V are
one tensor of a file, cut by rows when the file is opened.
"""

from __future__ import annotations

from typing import ClassVar

from vkback.gguf.file import GgufError, GgufFile
from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import attention, feed_forward_plain, layer_norm
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors, with_biases


@register
class Gpt2(Architecture):
    name = "gpt2"
    vocabulary = "gpt-2"
    norm_eps = "attention.layer_norm_epsilon"
    biases = ("attn_output", "ffn_up", "ffn_down")
    sizes: ClassVar = {12: "0.1B", 24: "0.4B", 36: "0.8B", 48: "1.5B"}
    shapes: ClassVar = {
        "tiny-gpt2": ModelShape("gpt2", 3, 96, 160, 3, 3, 32, 331, 128, 10000.0, tied=True),
        "gpt2": ModelShape("gpt2", 12, 768, 3072, 12, 12, 64, 50257, 1024, 10000.0, tied=True),
        "gpt2-xl": ModelShape("gpt2", 48, 1600, 6400, 25, 25, 64, 50257, 1024, 10000.0, tied=True),
    }

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        hp = Metadata(f).hparams(cls.rope_mode, cls.norm_eps)
        rows = {"attn_q": hp.n_head * hp.head_dim_k, "attn_k": hp.n_head_kv * hp.head_dim_k, "attn_v": hp.n_head_kv * hp.head_dim_v}
        return f.cut(
            {
                f"blk.{il}.attn_qkv.{kind}": {f"blk.{il}.{part}.{kind}": n for part, n in rows.items()}
                for il in range(hp.n_layer)
                for kind in ("weight", "bias")
            }
        )

    def embed(self, b: GraphBuilder) -> Tensor:
        hp = self.hp
        if b.n_ctx > hp.n_ctx_train:
            raise GgufError(
                f"[gguf] {hp.path}: a context of {b.n_ctx} tokens, but {self.name} has learned the positions of {hp.n_ctx_train}; "
                f"ask for at most that many (--ctx {hp.n_ctx_train})"
            )
        table = hp.weight("position_embd.weight", (hp.n_ctx_train, hp.n_embd))
        places = b.graph.emit("GET_ROWS", "pos_embd", "F32", (b.n, hp.n_embd), (table, b.pos))
        return b.add(super().embed(b), places, "inpL")

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        y = layer_norm(b, x, f"blk.{il}.attn_norm", f"attn_norm-{il}", plain=f"attn_centered-{il}")
        x = b.last_token(b.add(attention(b, y, il, rope=None), x, f"ffn_inp-{il}"), il)
        y = layer_norm(b, x, f"blk.{il}.ffn_norm", f"ffn_norm-{il}", plain=f"ffn_centered-{il}")
        return b.add(feed_forward_plain(b, y, il), x, f"l_out-{il}")

    def output(self, b: GraphBuilder, x: Tensor) -> Tensor:
        return b.logits(layer_norm(b, x, "output_norm", "result_norm", plain="result_centered"))

    @classmethod
    def outer_tensors(cls, s: ModelShape) -> Tensors:
        yield "output_norm.bias", (s.n_embd,)
        yield "position_embd.weight", (s.n_ctx, s.n_embd)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        for norm, matrices in (
            ("attn_norm", (("attn_qkv.weight", (3 * s.n_embd, s.n_embd)), ("attn_output.weight", (s.n_embd, s.n_embd)))),
            ("ffn_norm", (("ffn_up.weight", (s.n_ff, s.n_embd)), ("ffn_down.weight", (s.n_embd, s.n_ff)))),
        ):
            yield f"{norm}.weight", (s.n_embd,)
            yield f"{norm}.bias", (s.n_embd,)
            yield from with_biases(iter(matrices))
