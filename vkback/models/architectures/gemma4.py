"""The `gemma4` architecture: Gemma 4, text part.

As gemma3, with norm weights as they are and an attention scale of 1. Layers with a sliding window have heads and a RoPE of their own; those
that see all tokens may make V from the product that makes K, and RoPE does not turn most of their pairs (divisors of 1e30). V is
RMS-normed without a weight. The last `attention.shared_kv_layers` layers have no K and V and attend to those of the last layer of their
kind before them. The output of all layers may have a scale; it costs no stage, since the graph's stream is the published one divided by the
scales so far (`scales_so_far`).

Mixture of experts: beside the dense feed-forward, on norms of their own; the router reads the same sum, normed without a weight, times
`ffn_gate_inp.scale` / sqrt(n_embd), and an expert's part has a scale (`ffn_down_exps.scale`).

With per-layer embeddings (vkback/models/per_layer.py) a layer ends with what these add.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from vkback.gguf.file import GgufError, GgufFile
from vkback.gguf.hparams import Heads, HParams, Metadata, Rope
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import Glu, attention, experts, feed_forward, rms_norm, with_scales_by_expert
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.per_layer import (
    PER_LAYER,
    PER_LAYER_SCALES,
    outer_per_layer_tensors,
    per_layer_part,
    per_layer_tensors,
    per_layer_vectors,
)
from vkback.models.shape import LayerShape, ModelShape, Tensors
from vkback.models.shared_kv import SHARED, kv_sources

PATTERN = "attention.sliding_window_pattern"
LOCAL_BASE = 10000.0
"""RoPE base of layers with a window, unless `rope.freq_base_swa` says otherwise."""
GEGLU = Glu("GEGLU")
OUTPUT_SCALE = "layer_output_scale.weight"
SMALLEST = 1e-6
"""Scale of a layer's output, at least, and one divided by the largest."""
FARTHEST = 2.0**20
"""What the graph's stream may be of the published one: squares of it are to be floats."""


def layers(period: int, kv: tuple[int, int], n_head: int, n_ff: tuple[int, ...]) -> tuple[LayerShape, ...]:
    """Layers of which the last of every `period` sees all tokens. kv: heads of K and V with a window and without; n_ff: of each layer."""
    return tuple(LayerShape(n_head, kv[il % period == period - 1], width) for il, width in enumerate(n_ff))


def windows(n_layer: int, period: int) -> tuple[bool, ...]:
    return tuple(il % period != period - 1 for il in range(n_layer))


def published(head: int, n_layer: int, period: int, **more: Any) -> dict[str, Any]:
    """Keys of a model. head: width of a head in layers with a window."""
    lengths = {f"attention.{which}_length_swa": head for which in ("key", "value")}
    known = {PATTERN: windows(n_layer, period), "rope.dimension_count_swa": head, "rope.freq_base_swa": LOCAL_BASE}
    return {**lengths, **known, "final_logit_softcapping": 30.0, **more}


SMALL = {"attention.scale": 0.2}
"""Of tiny models: norms of random weights make scores larger than those of trained ones, and a cache's rounding with them."""


@dataclass(frozen=True)
class Kind:
    """Of a layer.

    rope, heads, window  as `attention` takes them
    source               the layer whose K and V it attends to; None: its own
    """

    rope: Rope
    heads: Heads
    window: int
    source: int | None


@register
class Gemma4(Architecture):
    name = "gemma4"
    rope_mode = "neox"
    vocabulary = "spm"
    keys = EXPERTS | {
        "attention.key_length_swa",
        SHARED,
        "attention.sliding_window",
        PATTERN,
        "attention.value_length_swa",
        PER_LAYER,
        "rope.dimension_count_swa",
        "rope.freq_base_swa",
    }
    required = ("attention.sliding_window",)
    varying = frozenset({"attention.head_count_kv", "feed_forward_length"})
    sizes: ClassVar = {30: "26B.A4B", 35: "E2B", 42: "E4B", 60: "31B"}
    shapes: ClassVar = {
        "gemma4-e2b": ModelShape(
            "gemma4",
            35,
            1536,
            12288,
            8,
            1,
            512,
            262144,
            131072,
            1000000.0,
            1e-6,
            tied=True,
            window=512,
            rope_rotated=64,
            layers=layers(5, (1, 1), 8, (6144,) * 15 + (12288,) * 20),
            metadata=published(256, 35, 5, **{SHARED: 20, PER_LAYER: 256}),
        ),
        "gemma4-e4b": ModelShape(
            "gemma4",
            42,
            2560,
            10240,
            8,
            2,
            512,
            262144,
            131072,
            1000000.0,
            1e-6,
            tied=True,
            window=512,
            rope_rotated=64,
            metadata=published(256, 42, 6, **{SHARED: 18, PER_LAYER: 256}),
        ),
        "gemma4-26b-a4b": ModelShape(
            "gemma4",
            30,
            2816,
            2112,
            16,
            8,
            512,
            262144,
            262144,
            1000000.0,
            1e-6,
            tied=True,
            window=1024,
            rope_rotated=64,
            n_expert=128,
            n_expert_used=8,
            n_ff_expert=704,
            layers=layers(6, (8, 2), 16, (2112,) * 30),
            metadata=published(256, 30, 6),
        ),
        "gemma4-31b": ModelShape(
            "gemma4",
            60,
            5376,
            21504,
            32,
            16,
            512,
            262144,
            262144,
            1000000.0,
            1e-6,
            tied=True,
            window=1024,
            rope_rotated=64,
            layers=layers(6, (16, 4), 32, (21504,) * 60),
            metadata=published(256, 60, 6),
        ),
        "tiny-gemma4": ModelShape(
            "gemma4",
            6,
            96,
            160,
            4,
            2,
            40,
            331,
            128,
            1000000.0,
            1e-6,
            tied=True,
            window=9,
            rope_rotated=5,
            layers=layers(3, (2, 1), 4, (160,) * 6),
            metadata=published(24, 6, 3, final_logit_softcapping=12.0, **SMALL),
        ),
        "tiny-gemma4-ple": ModelShape(
            "gemma4",
            6,
            96,
            192,
            4,
            2,
            48,
            331,
            128,
            1000000.0,
            1e-6,
            tied=True,
            window=9,
            rope_rotated=6,
            layers=layers(2, (2, 2), 4, (96,) * 3 + (192,) * 3),
            metadata=published(24, 6, 2, **{SHARED: 3, PER_LAYER: 32, "final_logit_softcapping": 12.0, **SMALL}),
        ),
        "tiny-gemma4-moe": ModelShape(
            "gemma4",
            4,
            96,
            64,
            4,
            2,
            32,
            331,
            128,
            1000000.0,
            1e-6,
            tied=True,
            window=9,
            rope_rotated=4,
            n_expert=7,
            n_expert_used=3,
            n_ff_expert=96,
            layers=layers(2, (2, 1), 4, (64,) * 4),
            metadata=published(16, 4, 2, final_logit_softcapping=12.0, **SMALL),
        ),
    }

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        """K's product is V's in the layers that see all tokens, unless one of them has a V."""
        m = Metadata(f, cls.varying, cls.keys)
        whole = [f"blk.{il}" for il, sees_all in enumerate(m.pattern(PATTERN, m.layers(), 0)) if sees_all]
        made = {f"{layer}.attn_v.weight": f.tensors[k] for layer in whole if (k := f"{layer}.attn_k.weight") in f.tensors}
        if made.keys() & f.tensors.keys():
            made = {}
        return with_scales_by_expert(replace(f, tensors={**f.tensors, **made}))

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        m = self.metadata
        self.n_per_layer = m.count(PER_LAYER, 0, least=0)
        self.has_scales = any(name.endswith(OUTPUT_SCALE) for name in f.tensors)
        own = output_scales(f, self.hp) if self.has_scales else [1.0] * self.hp.n_layer
        self.so_far, self.rescaled = scales_so_far(own)
        self.hp = hp = scaled(replace(self.hp, attn_scale=m.positive_or("attention.scale", 1.0)), self.so_far)
        self.unused_tensors |= {name for name in f.tensors if name.endswith(OUTPUT_SCALE)}
        self.n_ff = m.of_layers("feed_forward_length", hp.n_layer)
        n_kv = m.of_layers("attention.head_count_kv", hp.n_layer)
        for il, n in enumerate(n_kv):
            if n < 1 or hp.n_head % n:
                raise m.fail("attention.head_count_kv", f"{n} for layer {il}", f"a divisor of the {hp.n_head} heads")
        dim_k, dim_v = (m.count(f"attention.{which}_length_swa", own) for which, own in (("key", hp.head_dim_k), ("value", hp.head_dim_v)))
        n_dims = m.count("rope.dimension_count_swa", dim_k)
        if n_dims % 2 or n_dims > dim_k:
            raise m.fail("rope.dimension_count_swa", n_dims, f"an even number, at most the head size {dim_k}")
        local = replace(hp.rope, n_dims=n_dims, freq_base=m.freq_base("rope.freq_base_swa", LOCAL_BASE), factors="")
        sees_all = m.pattern(PATTERN, hp.n_layer, 0)
        sources = kv_sources(m, sees_all)
        self.kinds = [
            Kind(hp.rope, Heads(hp.n_head, n, hp.head_dim_k, hp.head_dim_v), 0, source)
            if whole
            else Kind(local, Heads(hp.n_head, n, dim_k, dim_v), hp.window, source)
            for whole, n, source in zip(sees_all, n_kv, sources, strict=True)
        ]

    def embed(self, b: GraphBuilder) -> Tensor:
        x = super().embed(b)
        scaled = b.graph.emit("SCALE", "inp_scaled", "F32", x.shape, (x,), scale=math.sqrt(self.hp.n_embd), bias=0.0)
        if self.n_per_layer:
            per_layer_vectors(b, x, self.n_per_layer)
        return scaled

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        kind, eps = self.kinds[il], self.eps(il)
        y = rms_norm(b, x, f"blk.{il}.attn_norm", f"attn_norm-{il}", plain=f"attn_rms-{il}", eps=eps)
        y = attention(b, y, il, rope=kind.rope, heads=kind.heads, qk_norm=rms_norm, v_norm=True, window=kind.window, kv_of=kind.source)
        y, x = b.last_token(y, il, "attn_out_last"), b.last_token(x, il, "attn_inp_last")
        y = rms_norm(b, y, f"blk.{il}.post_attention_norm", f"attn_post_norm-{il}", plain=f"attn_post_rms-{il}")
        x = b.add(y, x, f"sa_out-{il}")
        y = rms_norm(b, x, f"blk.{il}.ffn_norm", f"ffn_norm-{il}", plain=f"ffn_rms-{il}", eps=eps)
        y = feed_forward(b, y, il, width=self.n_ff[il], glu=GEGLU)
        if self.hp.n_expert:
            y = self.with_experts(b, x, y, il)
        y = rms_norm(b, y, f"blk.{il}.post_ffw_norm", f"ffn_post_norm-{il}", plain=f"ffn_post_rms-{il}")
        if self.n_per_layer:
            x = b.add(y, x, f"ffn_residual-{il}")
            y = per_layer_part(b, x, il, self.n_per_layer, self.so_far[il])
        x = b.add(y, x, f"l_out-{il}")
        if self.rescaled[il] == 1.0:
            return x
        return b.graph.emit("SCALE", f"out_scaled-{il}", "F32", x.shape, (x,), scale=self.rescaled[il], bias=0.0)

    def eps(self, il: int) -> float:
        """Of norms of the stream that goes into layer `il`."""
        return self.hp.rms_eps / (self.so_far[il] * self.so_far[il])

    def output(self, b: GraphBuilder, x: Tensor) -> Tensor:
        return b.logits(rms_norm(b, x, "output_norm", "result_norm", plain="result_rms", eps=self.eps(self.hp.n_layer)))

    def with_experts(self, b: GraphBuilder, x: Tensor, dense: Tensor, il: int) -> Tensor:
        """What the dense feed-forward made of x, and what the experts make of it, each normed."""
        dense = rms_norm(b, dense, f"blk.{il}.post_ffw_norm_1", f"ffn_mlp-{il}", plain=f"ffn_mlp_rms-{il}")
        route = b.graph.emit("RMS_NORM", f"ffn_route_rms-{il}", "F32", x.shape, (x,), eps=self.eps(il))
        scale = self.hp.weight(f"blk.{il}.ffn_gate_inp.scale", (self.hp.n_embd,))
        route = b.graph.emit("MUL", f"ffn_route_norm-{il}", "F32", x.shape, (route, scale))
        y = rms_norm(b, x, f"blk.{il}.pre_ffw_norm_2", f"ffn_norm_2-{il}", plain=f"ffn_rms_2-{il}", eps=self.eps(il))
        self.hp.weight(f"blk.{il}.ffn_down_exps.scale", (self.hp.n_expert, 1))
        y = experts(b, y, il, glu=GEGLU, route=route)
        y = rms_norm(b, y, f"blk.{il}.post_ffw_norm_2", f"ffn_moe-{il}", plain=f"ffn_moe_rms-{il}")
        return b.add(dense, y, f"ffn_moe_combined-{il}")

    @classmethod
    def outer_tensors(cls, s: ModelShape) -> Tensors:
        if not all(s.metadata[PATTERN][: s.n_layer]):  # divisors are of layers without a window, which the first few may all have
            yield from super().outer_tensors(s)
        if width := int(s.metadata.get(PER_LAYER, 0)):
            yield from outer_per_layer_tensors(s, width)

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        own = s.layers[il] if s.layers else LayerShape(s.n_head, s.n_head_kv, s.n_ff)
        windowed = s.metadata[PATTERN][il]
        dim = int(s.metadata["attention.key_length_swa"]) if windowed else s.head_dim
        per_layer = int(s.metadata.get(PER_LAYER, 0))
        yield "attn_norm.weight", (s.n_embd,)
        if il < s.n_layer - int(s.metadata.get(SHARED, 0)):
            yield "attn_k.weight", (own.n_head_kv * dim, s.n_embd)
            yield "attn_k_norm.weight", (dim,)
            if windowed or per_layer:
                yield "attn_v.weight", (own.n_head_kv * dim, s.n_embd)
        yield "attn_output.weight", (s.n_embd, own.n_head * dim)
        yield "attn_q.weight", (own.n_head * dim, s.n_embd)
        yield "attn_q_norm.weight", (dim,)
        yield "ffn_down.weight", (s.n_embd, own.n_ff)
        yield "ffn_gate.weight", (own.n_ff, s.n_embd)
        yield "ffn_up.weight", (own.n_ff, s.n_embd)
        yield "ffn_norm.weight", (s.n_embd,)
        yield "layer_output_scale.weight", (1,)
        yield "post_attention_norm.weight", (s.n_embd,)
        yield "post_ffw_norm.weight", (s.n_embd,)
        if s.n_expert:
            yield "ffn_gate_inp.weight", (s.n_expert, s.n_embd)
            yield "ffn_gate_inp.scale", (s.n_embd,)
            yield "ffn_gate_up_exps.weight", (s.n_expert, 2 * s.n_ff_expert, s.n_embd)
            yield "ffn_down_exps.weight", (s.n_expert, s.n_embd, s.n_ff_expert)
            yield "ffn_down_exps.scale", (s.n_expert,)
            yield "post_ffw_norm_1.weight", (s.n_embd,)
            yield "post_ffw_norm_2.weight", (s.n_embd,)
            yield "pre_ffw_norm_2.weight", (s.n_embd,)
        if per_layer:
            yield from per_layer_tensors(s, per_layer)


def scales_so_far(own: Sequence[float]) -> tuple[list[float], list[float]]:
    """What the published stream into each layer, and behind the last, is of the graph's: the product of the output scales of the layers
    before; and by what a layer multiplies its output, 1 but where that product would go beyond FARTHEST: it begins with 1 again there."""
    so_far, rescaled = [1.0], []
    for value in own:
        product = so_far[-1] * value
        far = not 1.0 / FARTHEST <= product <= FARTHEST
        rescaled.append(product if far else 1.0)
        so_far.append(1.0 if far else product)
    return so_far, rescaled


def output_scales(f: GgufFile, hp: HParams) -> list[float]:
    """Of each layer, all of which must have one. A file without data (`outline`) has zeros for them, which count as 1."""
    own = [output_scale(f, hp, il) for il in range(hp.n_layer)]
    if not any(own):
        own = [1.0] * hp.n_layer
    for il, value in enumerate(own):
        if not SMALLEST <= value <= 1.0 / SMALLEST:
            expected = f"a number from {SMALLEST:g} to {1.0 / SMALLEST:g}"
            raise GgufError(f"[gguf] {f.path}: tensor blk.{il}.{OUTPUT_SCALE} holds {value:g}, expected {expected}")
    return own


def output_scale(f: GgufFile, hp: HParams, il: int) -> float:
    """The scale of a layer's output."""
    t = f.tensors[hp.weight(f"blk.{il}.{OUTPUT_SCALE}", (1,)).name]
    if t.type != "F32":
        raise GgufError(f"[gguf] {f.path}: tensor {t.name} is {t.type}, expected F32")
    return float(np.ascontiguousarray(t.data).view(np.float32)[0, 0])


def scaled(hp: HParams, so_far: Sequence[float]) -> HParams:
    """Hyperparameters with constant scales in weights of one axis: those of routers and per-layer embeddings, and what the stream is
    divided by in the norms of what is added to it."""
    scales = {f"blk.{il}.ffn_gate_inp.scale": 1.0 / math.sqrt(hp.n_embd) for il in range(hp.n_layer)}
    for il, whole in enumerate(so_far[:-1]):
        scales |= {f"blk.{il}.{norm}.weight": 1.0 / whole for norm in ("post_attention_norm", "post_ffw_norm", "post_norm") if whole != 1.0}
    scales |= PER_LAYER_SCALES
    return hp.with_scaled(scales)
