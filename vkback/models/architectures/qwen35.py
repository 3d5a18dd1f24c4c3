"""The `qwen35` architecture: Qwen3.5 and later, 0.8B to 27B, text part.

Of four layers three are a gated delta net (vkback/models/delta_net.py), the last has attention, unless the keys
`full_attention_interval` or `attention.recurrent_layers` say otherwise. There attn_q makes the query and a gate of each head in turn; every
head of Q and K is RMS-normed; RoPE turns a part of a head and pairs value i with value i + n_dims/2. Its sections are those of qwen3vl, of
no meaning to a text. The norm before the feed-forward is called post_attention_norm. Norm weights are in a file as they are multiplied by,
with the 1 that the makers add. The last `nextn_predict_layers` blocks predict tokens beyond the next one (MTP,
vkback/models/mtp.py); these have attention.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import attention, attention_norm, feed_forward, rms_norm
from vkback.models.builder import GraphBuilder
from vkback.models.delta_net import KEYS, delta_net, delta_net_sizes, delta_net_tensors, recurrent_layers
from vkback.models.keys import MTP, SECTIONS
from vkback.models.mtp import first_tensor
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors, qk_norm_tensors
from vkback.units import UNKNOWN_SIZE

PUBLISHED: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16, SECTIONS: (11, 11, 10, 0)}
"""Beside the heads of v."""

TINY: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.state_size": 20, "ssm.group_count": 2, "ssm.inner_size": 96, "ssm.time_step_rank": 6}


@register
class Qwen35(Architecture):
    """tiled: how heads of v go with heads of k in files (`DeltaNet`)."""

    name = "qwen35"
    rope_mode = "neox"
    vocabulary = "qwen35"
    recurrent = True
    tiled: ClassVar[bool] = True
    keys = KEYS | {MTP, SECTIONS}
    shapes: ClassVar = {
        "qwen35-9b": ModelShape(
            "qwen35",
            32,
            4096,
            12288,
            16,
            4,
            256,
            248320,
            262144,
            10000000.0,
            1e-6,
            rope_dims=64,
            metadata={**PUBLISHED, "ssm.inner_size": 4096, "ssm.time_step_rank": 32, "full_attention_interval": 4},
        ),
        "tiny-qwen35": ModelShape(
            "qwen35",
            2,
            96,
            160,
            4,
            2,
            40,
            331,
            128,
            10000000.0,
            1e-3,
            tied=True,
            rope_dims=20,
            metadata={**TINY, SECTIONS: (4, 3, 3, 0), "full_attention_interval": 2},
        ),
    }

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        """With the query and the gate of attn_q as weights of their own."""
        m = Metadata(f, cls.varying, cls.keys)
        hp = m.hparams(cls.rope_mode, dense=cls.dense)
        n_layer = hp.n_layer - m.count(MTP, 0, least=0)
        attends = [il for il, recurs in enumerate(recurrent_layers(m, n_layer, hp.n_layer)) if not recurs]
        attends += [n_layer] if first_tensor(n_layer) in f.tensors else []
        names = (f"blk.{il}.attn_q" for il in attends)
        width = hp.head_dim_k
        turns = {f"{q}.weight": (hp.n_head, ((f"{q}.weight", width), (f"{q}_gate.weight", width))) for q in names}
        return f.deinterleave({name: turn for name, turn in turns.items() if name in f.tensors})

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        m, n_blocks = self.metadata, self.hp.n_layer
        if SECTIONS in self.keys:
            m.sections(SECTIONS, self.hp.rope.n_dims // 2)
        self.without_mtp_blocks(m.count(MTP, 0, least=0))
        self.recurs = (*recurrent_layers(m, self.hp.n_layer, n_blocks), False)
        self.sizes_of_delta_net = delta_net_sizes(m, tiled=self.tiled)

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        normed = attention_norm(b, x, il)
        if self.recurs[il]:
            y = delta_net(b, normed, il, self.sizes_of_delta_net)
        else:
            y = attention(b, normed, il, rope=self.hp.rope, qk_norm=rms_norm, gated=True)
        x = b.last_token(b.add(y, x, f"attn_residual-{il}"), il)
        normed = rms_norm(b, x, f"blk.{il}.post_attention_norm", f"attn_post_norm-{il}", plain=f"attn_post_rms-{il}")
        return self.feed(b, normed, x, il)

    def feed(self, b: GraphBuilder, normed: Tensor, x: Tensor, il: int) -> Tensor:
        """x plus the feed-forward of x normed."""
        return b.add(feed_forward(b, normed, il), x, f"l_out-{il}")

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        layers, width = metadata.stated("block_count") - metadata.stated(MTP), metadata.stated("embedding_length")
        sizes = {24: "0.8B" if width == 1024 else "2B", 32: "4B" if width == 2560 else "9B", 64: "27B"}
        return sizes.get(layers, UNKNOWN_SIZE)

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        if (il + 1) % int(s.metadata["full_attention_interval"]):
            yield from delta_net_tensors(s, cls.gates(s))
        else:
            for name, (rows, *rest) in attention_tensors(s):
                yield name, (2 * rows if name == "attn_q.weight" else rows, *rest)
            yield from qk_norm_tensors(s)
        yield "post_attention_norm.weight", (s.n_embd,)
        yield from cls.feed_tensors(s)

    @classmethod
    def gates(cls, s: ModelShape) -> Tensors:
        """The weights that make decay and share."""
        yield "ssm_alpha.weight", (int(s.metadata["ssm.time_step_rank"]), s.n_embd)
        yield "ssm_beta.weight", (int(s.metadata["ssm.time_step_rank"]), s.n_embd)

    @classmethod
    def feed_tensors(cls, s: ModelShape) -> Tensors:
        yield from feed_forward_tensors(s)
