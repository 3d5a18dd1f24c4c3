"""The `qwen3next` architecture: Qwen3-Next 80B-A3B, Qwen3-Coder-Next.

As qwen35moe, but heads of v that share one of k are neighbours, RoPE has no sections, and one matrix makes shares and decays, group by
group of heads (ssm_ba). In older files one matrix makes q, k, v and z, group by group (ssm_in).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Metadata
from vkback.models.architecture import register
from vkback.models.architectures.qwen35 import PUBLISHED, TINY
from vkback.models.architectures.qwen35moe import SHARED, Qwen35Moe
from vkback.models.delta_net import KEYS, delta_net_sizes, recurrent_layers
from vkback.models.keys import EXPERTS, MTP, SECTIONS
from vkback.models.shape import ModelShape, Tensors


@register
class Qwen3Next(Qwen35Moe):
    name = "qwen3next"
    vocabulary = "qwen2"
    tiled = False
    keys = KEYS | EXPERTS | {MTP, SHARED}
    sizes: ClassVar = {48: "80B.A3B"}
    shapes: ClassVar = {
        "qwen3next-80b-a3b": ModelShape(
            "qwen3next",
            48,
            2048,
            5120,
            16,
            2,
            256,
            151936,
            262144,
            10000000.0,
            1e-6,
            rope_dims=64,
            n_expert=512,
            n_expert_used=10,
            n_ff_expert=512,
            metadata={
                **{key: value for key, value in PUBLISHED.items() if key != SECTIONS},
                "ssm.inner_size": 4096,
                "ssm.time_step_rank": 32,
                "full_attention_interval": 4,
                SHARED: 512,
            },
        ),
        "tiny-qwen3next": ModelShape(
            "qwen3next",
            2,
            96,
            160,
            4,
            2,
            40,
            331,
            128,
            10000000.0,
            1e-6,
            rope_dims=12,
            n_expert=6,
            n_expert_used=2,
            n_ff_expert=64,
            metadata={**TINY, "full_attention_interval": 2, SHARED: 96},
        ),
    }

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        """With the weights of ssm_ba, and of ssm_in, as weights of their own."""
        f = super().opened(f)
        m = Metadata(f, cls.varying, cls.keys)
        hp, s = m.hparams(cls.rope_mode, dense=cls.dense), delta_net_sizes(m, tiled=cls.tiled)
        n_layer = hp.n_layer - m.count(MTP, 0, least=0)
        values = s.each * s.dim
        cuts: dict[str, tuple[int, Sequence[tuple[str, int]]]] = {}
        for il in (il for il, recurs in enumerate(recurrent_layers(m, n_layer, hp.n_layer)) if recurs):
            block = f"blk.{il}"
            if f"{block}.ssm_ba.weight" not in f.tensors:
                raise hp.missing(f"{block}.ssm_ba.weight")
            qkv, z = f"{block}.attn_qkv.weight", f"{block}.attn_gate.weight"
            cuts[f"{block}.ssm_ba.weight"] = (s.n_group, ((f"{block}.ssm_beta.weight", s.each), (f"{block}.ssm_alpha.weight", s.each)))
            cuts[f"{block}.ssm_in.weight"] = (s.n_group, ((qkv, s.key), (qkv, s.key), (qkv, values), (z, values)))
        return f.deinterleave({name: cut for name, cut in cuts.items() if name in f.tensors})

    @classmethod
    def gates(cls, s: ModelShape) -> Tensors:
        yield "ssm_ba.weight", (2 * int(s.metadata["ssm.time_step_rank"]), s.n_embd)
