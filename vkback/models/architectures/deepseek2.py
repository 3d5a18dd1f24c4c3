"""The `deepseek2` architecture: DeepSeek-V2, V2-Lite, V3, R1 and models of their shape, with multi-head latent attention (MLA).

K and V of a token are made from one latent vector, kv_lora_rank wide, and a key of rope.dimension_count values that all heads share and
that alone is rotated. A head of Q has as many rotated values behind those that are not. Files have one of two forms:

    absorbed  attn_k_b and attn_v_b, a matrix for each head. Q goes through k_b, so that attention works on latent vectors: one kv head,
              whose rows of K are the normed latent and the rotated key; V is the first part of the same rows. v_b comes behind attention.
    legacy    attn_kv_b makes K and V of all heads from the latent, and the cache holds these.

Q may have a low rank, too (attn_q_a, attn_q_b). The first leading_dense_block_count layers have a dense feed-forward, the others experts
beside shared ones, which work on every token. The router is a softmax over all experts, or sigmoids with a bias that takes part in the
choice alone; experts may come in groups. With YaRN the attention scale has mscale squared, from which RoPE's own magnitude is taken away.
Q grows with the position where the file says so (vkback/models/temperature.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from vkback import constants
from vkback.gguf.file import GgufError, GgufFile
from vkback.gguf.hparams import HParams, Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import attention_norm, experts, feed_forward, feed_forward_norm, rms_norm, shared_expert
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.shape import ModelShape, Tensors, expert_tensors, feed_forward_tensors, shared_expert_tensors
from vkback.models.temperature import TEMPERATURE_LENGTH, TEMPERATURE_SCALE, TEMPERATURES, tempered, with_temperatures
from vkback.ops.moe.topk import groups_problem
from vkback.ops.view import View

GATINGS = {0: "softmax", 1: "softmax", 2: "sigmoid"}
"""By `expert_gating_func`; files made before the key have none."""

V2_LITE: dict[str, Any] = {
    "attention.kv_lora_rank": 512,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "rope.dimension_count": 64,
    "rope.scaling.yarn_log_multiplier": 0.0707,
    "leading_dense_block_count": 1,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": False,
    "expert_gating_func": 1,
}

TINY: dict[str, Any] = {
    **V2_LITE,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 96,
    "attention.value_length": 64,
    "attention.key_length_mla": 64,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 32,
    "expert_weights_scale": 0.5,
}
LEGACY: dict[str, Any] = {
    **{key: value for key, value in TINY.items() if not key.endswith("_mla")},
    "attention.key_length": 48,
    "attention.value_length": 32,
    "rope.dimension_count": 16,
}
SIGMOID: dict[str, Any] = {
    **TINY,
    "attention.key_length": 80,
    "attention.key_length_mla": 48,
    "rope.dimension_count": 16,
    "attention.q_lora_rank": 64,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.25,
    "expert_weights_norm": True,
    "expert_shared_count": 1,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "rope.scaling.yarn_log_multiplier": 0.03,
}


@dataclass(frozen=True)
class Latent:
    """Widths of MLA.

    rank    of the latent vector; q_rank: of Q's, 0: Q is made by one matrix
    nope    values of a head of Q and K that are not rotated; rot: that are
    dim_v   values of a head of V
    """

    rank: int
    q_rank: int
    nope: int
    rot: int
    dim_v: int

    @property
    def dim_k(self) -> int:
        """Values of a head of Q."""
        return self.nope + self.rot

    @property
    def row(self) -> int:
        """Values of a token's row: latent and rotated key."""
        return self.rank + self.rot


@register
class Deepseek2(Architecture):
    name = "deepseek2"
    vocabulary = "deepseek-llm"
    keys = EXPERTS | {
        "attention.key_length_mla",
        "attention.kv_lora_rank",
        "attention.q_lora_rank",
        TEMPERATURE_LENGTH,
        TEMPERATURE_SCALE,
        "attention.value_length_mla",
        "expert_gating_func",
        "expert_group_count",
        "expert_group_used_count",
        "expert_shared_count",
        "leading_dense_block_count",
        "rope.scaling.yarn_log_multiplier",
    }
    required = ("attention.kv_lora_rank",)
    by_context = (TEMPERATURES,)
    sizes: ClassVar = {27: "16B", 47: "30B.A3B", 60: "236B", 61: "671B"}
    shapes: ClassVar = {
        "deepseek2-16b": ModelShape(
            "deepseek2",
            27,
            2048,
            10944,
            16,
            1,
            192,
            102400,
            163840,
            10000.0,
            1e-6,
            n_expert=64,
            n_expert_used=6,
            n_ff_expert=1408,
            yarn=40.0,
            metadata=V2_LITE,
        ),
        "tiny-deepseek2": ModelShape(
            "deepseek2",
            3,
            96,
            160,
            3,
            1,
            64,
            331,
            128,
            10000.0,
            1e-6,
            n_expert=7,
            n_expert_used=3,
            n_ff_expert=64,
            yarn=40.0,
            metadata=TINY,
        ),
        "tiny-deepseek2-legacy": ModelShape(
            "deepseek2",
            3,
            96,
            160,
            3,
            3,
            48,
            331,
            128,
            10000.0,
            1e-6,
            n_expert=7,
            n_expert_used=3,
            n_ff_expert=64,
            yarn=40.0,
            metadata=LEGACY,
        ),
        "tiny-deepseek2-sigmoid": ModelShape(
            "deepseek2",
            3,
            96,
            160,
            4,
            1,
            48,
            331,
            128,
            10000.0,
            1e-6,
            n_expert=12,
            n_expert_used=3,
            n_ff_expert=64,
            yarn=40.0,
            metadata=SIGMOID,
        ),
    }

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        m = Metadata(f)
        return with_temperatures(f, m, cls.temperature_steps(m))

    @classmethod
    def temperature_steps(cls, m: Metadata) -> int:
        """Tokens of a step of the temperatures, 0 where the file does not say."""
        return m.count(TEMPERATURE_LENGTH, 0, least=0)

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        m, hp = self.metadata, self.hp
        self.absorbed = any(name.endswith((".attn_k_b.weight", ".attn_v_b.weight")) for name in hp.weights)
        self.mla = latent(m, hp, absorbed=self.absorbed)
        self.n_dense = m.count("leading_dense_block_count", 0, least=0) if hp.n_expert else hp.n_layer
        self.n_ff_shared = m.count("expert_shared_count", 0, least=0) * hp.n_ff_expert
        self.temperature_length = self.temperature_steps(m)
        gating = m.count("expert_gating_func", 0, least=0)
        if gating not in GATINGS:
            raise m.fail("expert_gating_func", gating, "1 (softmax) or 2 (sigmoid)")
        self.gating = GATINGS[gating]
        self.groups = m.count("expert_group_count", 1, least=0) or 1, m.count("expert_group_used_count", 1, least=0) or 1
        if hp.n_expert and (problem := groups_problem(hp.n_expert, hp.n_expert_used, *self.groups)):
            raise GgufError(f"[gguf] {f.path}: metadata keys {m.key('expert_group_count')} and expert_group_used_count: {problem}")
        rope, scale = hp.rope, 1.0 / math.sqrt(self.mla.dim_k)
        if rope.scaling == "yarn" and rope.freq_scale < 1.0:
            stretched = -float(constants.log(rope.freq_scale))
            multiplier = m.positive_or("rope.scaling.yarn_log_multiplier", 0.0, most=1e6)
            grown = 1.0 + multiplier * stretched
            scale *= grown * grown
            if multiplier:
                rope = replace(rope, attn_factor=rope.attn_factor / (1.0 + 0.1 * stretched))
        norm_w = f.get(m.key("expert_weights_norm"), bool, False)
        self.hp = replace(hp, rope=rope, attn_scale=m.positive_or("attention.scale", scale), norm_w=norm_w)

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        normed = attention_norm(b, x, il)
        q = self.queries(b, normed, il)
        kv = b.linear(normed, f"blk.{il}.attn_kv_a_mqa", self.mla.row, f"kv_cmpr_pe-{il}")
        x = b.last_token(b.add(self.attention(b, q, kv, il), x, f"ffn_inp-{il}"), il)
        normed = feed_forward_norm(b, x, il)
        if il < self.n_dense:
            return b.add(feed_forward(b, normed, il), x, f"l_out-{il}")
        if self.n_ff_shared:
            x = b.add(shared_expert(b, normed, il, self.n_ff_shared), x, f"ffn_shexp_out-{il}")
        routed = experts(b, normed, il, gating=self.gating, groups=self.groups)
        return b.add(routed, x, f"l_out-{il}")

    def queries(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        """Q of all heads, not yet rotated: [n, n_head * dim_k]."""
        rows = b.hp.n_head * self.mla.dim_k
        if not self.mla.q_rank:
            return tempered(b, b.linear(x, f"blk.{il}.attn_q", rows, f"q-{il}"), il, self.temperature_length)
        q = b.linear(x, f"blk.{il}.attn_q_a", self.mla.q_rank, f"q_a-{il}")
        q = rms_norm(b, q, f"blk.{il}.attn_q_a_norm", f"q_a_norm-{il}", plain=f"q_a_rms-{il}")
        return tempered(b, b.linear(q, f"blk.{il}.attn_q_b", rows, f"q-{il}"), il, self.temperature_length)

    def attention(self, b: GraphBuilder, q: Tensor, kv: Tensor, il: int) -> Tensor:
        """Attention of layer `il` from Q [n, n_head * dim_k] and the tokens' rows [n, rank + rot] -> [n, n_embd]."""
        s, g, n, heads = self.mla, b.graph, b.n, b.hp.n_head

        def part(x: Tensor, name: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
            return g.emit("CONT", f"{name}-{il}", "F32", shape, (x,), view=View(offset, shape, strides))

        latents = part(kv, "kv_cmpr", 0, (n, s.rank), (s.row, 1))
        latents = rms_norm(b, latents, f"blk.{il}.attn_kv_a_norm", f"kv_cmpr_norm-{il}", plain=f"kv_cmpr_rms-{il}")
        k_pe = b.rope(part(kv, "k_pe", s.rank, (n, 1, s.rot), (s.row, s.row, 1)), f"k_pe_rope-{il}", b.hp.rope)
        per_head = (heads * s.dim_k, s.dim_k, 1)
        q_pe = b.rope(part(q, "q_pe", s.nope, (n, heads, s.rot), per_head), f"q_pe_rope-{il}", b.hp.rope)
        if self.absorbed:
            k_b = b.hp.weight(f"blk.{il}.attn_k_b.weight", (heads, s.rank, s.nope))
            q_nope = each_head(b, k_b, q, s.dim_k, f"q_nope_absorbed-{il}")
            query = g.emit("CONCAT", f"Qcur-{il}", "F32", (n, heads, s.row), (q_nope, q_pe), axis=-1)
            key = g.emit("CONCAT", f"Kcur-{il}", "F32", (n, 1, s.row), (b.view(latents, (n, 1, s.rank)), k_pe), axis=-1)
            cache = b.store(key, f"cache_k_l{il}")
            out = b.attend(query, cache, cache, width=heads * s.rank, il=il, v_dim=s.rank)
            v_b = b.hp.weight(f"blk.{il}.attn_v_b.weight", (heads, s.dim_v, s.rank))
            out = b.view(each_head(b, v_b, out, s.rank, f"kqv_decompressed-{il}"), (n, heads * s.dim_v))
        else:
            both = s.nope + s.dim_v
            made = b.linear(latents, f"blk.{il}.attn_kv_b", heads * both, f"kv-{il}")
            k_nope = part(made, "k_nope", 0, (n, heads, s.nope), (heads * both, both, 1))
            value = part(made, "Vcur", s.nope, (n, heads, s.dim_v), (heads * both, both, 1))
            q_nope = part(q, "q_nope", 0, (n, heads, s.nope), per_head)
            query = g.emit("CONCAT", f"Qcur-{il}", "F32", (n, heads, s.dim_k), (q_nope, q_pe), axis=-1)
            shared = Tensor(f"k_pe_heads-{il}", "F32", (n, heads, s.rot))
            g.add("REPEAT", (k_pe,), (shared,), shape=shared.shape)
            key = g.emit("CONCAT", f"Kcur-{il}", "F32", (n, heads, s.dim_k), (k_nope, shared), axis=-1)
            caches = b.store(key, f"cache_k_l{il}"), b.store(value, f"cache_v_l{il}")
            out = b.attend(query, *caches, width=heads * s.dim_v, il=il)
        return b.linear(out, f"blk.{il}.attn_output", b.hp.n_embd, f"attn_out-{il}")

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        yield from latent_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        if il < int(s.metadata["leading_dense_block_count"]):
            yield from feed_forward_tensors(s)
            return
        yield from expert_tensors(s)
        if s.metadata["expert_gating_func"] == 2:
            yield "exp_probs_b.bias", (s.n_expert,)
        yield from shared_expert_tensors(s, int(s.metadata["expert_shared_count"]) * s.n_ff_expert)


def latent(m: Metadata, hp: HParams, *, absorbed: bool) -> Latent:
    """Widths of a file. Raises GgufError naming a key that is missing or does not go with the others."""
    rank, rot = m.count("attention.kv_lora_rank"), hp.rope.n_dims
    names = ("attention.key_length_mla", "attention.value_length_mla") if absorbed else ("attention.key_length", "attention.value_length")
    dim_k, dim_v = (m.count(name) for name in names)
    if absorbed and (hp.head_dim_k, hp.head_dim_v) != (rank + rot, rank):
        expected = f"kv_lora_rank + rope.dimension_count = {rank + rot}, and {rank} for attention.value_length"
        raise m.fail("attention.key_length", f"{hp.head_dim_k} (attention.value_length {hp.head_dim_v})", expected)
    if dim_k <= rot:
        raise m.fail(names[0], dim_k, f"more than the {rot} rotated values of a head")
    if hp.n_head_kv != (1 if absorbed else hp.n_head):
        expected = "1, for all heads read one row of K" if absorbed else f"{hp.n_head}, as many as heads"
        raise m.fail("attention.head_count_kv", hp.n_head_kv, expected)
    return Latent(rank, m.count("attention.q_lora_rank", 0, least=0), dim_k - rot, rot, dim_v)


def each_head(b: GraphBuilder, w: Tensor, x: Tensor, width: int, name: str) -> Tensor:
    """Every head's matrix of w [n_head, m, k] times the first k values of its part of x [n, n_head * width]: [n, n_head, m]."""
    heads, m, k = w.shape
    view = View(0, (heads, b.n, k), (width, heads * width, 1))
    stem, _, il = name.partition("-")
    y = b.graph.emit("MUL_MAT", f"{stem}_by_head-{il}", "F32", (heads, b.n, m), (w, x), x_view=view)
    return b.graph.emit("PERMUTE", name, "F32", (b.n, heads, m), (y,), axes=(1, 0, 2))


def latent_tensors(s: ModelShape) -> Tensors:
    """Attention of either form: `attention.key_length_mla` is a key of the absorbed one alone."""
    rank, rot, q_rank = (int(s.metadata.get(key, 0)) for key in ("attention.kv_lora_rank", "rope.dimension_count", "attention.q_lora_rank"))
    absorbed = "attention.key_length_mla" in s.metadata
    dim_k, dim_v = (int(s.metadata[f"attention.{name}_length{'_mla' if absorbed else ''}"]) for name in ("key", "value"))
    if absorbed:
        yield "attn_k_b.weight", (s.n_head, rank, dim_k - rot)
    yield "attn_kv_a_mqa.weight", (rank + rot, s.n_embd)
    yield "attn_kv_a_norm.weight", (rank,)
    if not absorbed:
        yield "attn_kv_b.weight", (s.n_head * (dim_k - rot + dim_v), rank)
    yield "attn_norm.weight", (s.n_embd,)
    yield "attn_output.weight", (s.n_embd, s.n_head * dim_v)
    if q_rank:
        yield "attn_q_a.weight", (q_rank, s.n_embd)
        yield "attn_q_a_norm.weight", (q_rank,)
        yield "attn_q_b.weight", (s.n_head * dim_k, q_rank)
    else:
        yield "attn_q.weight", (s.n_head * dim_k, s.n_embd)
    if absorbed:
        yield "attn_v_b.weight", (s.n_head, dim_v, rank)
