"""The `gemma3n` architecture: Gemma 3n E2B and E4B, text part.

There are `altup.num_inputs` residual streams (vkback/ops/altup.py), which products of the embedding begin and products of each end; all are
made as long as the first. Attention and feed-forward of a layer work on the first alone, between two steps that mix all streams; a router
of that stream says how. Beside attention a product of low rank (Laurel) reads the same normed input. Attention has a scale of 1 and QK
norms, V is RMS-normed without a weight, and four layers of five see a sliding window with a RoPE base of their own. The last
`attention.shared_kv_layers` layers attend to K and V of a layer before them. In the first layers most values of the gate are cut off
(GAUSSIAN_TOPK), as `activation_sparsity_scale` says. A layer ends with what per-layer embeddings add to all streams but the first
(vkback/models/per_layer.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import Glu, attention, attention_norm, feed_forward, feed_forward_norm, rms_norm
from vkback.models.builder import GraphBuilder
from vkback.models.per_layer import (
    PER_LAYER,
    PER_LAYER_SCALES,
    outer_per_layer_tensors,
    per_layer_part,
    per_layer_tensors,
    per_layer_vectors,
)
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors, post_norm_tensors, qk_norm_tensors
from vkback.models.shared_kv import SHARED, kv_sources
from vkback.ops.altup import MAX_STREAMS
from vkback.ops.view import View

BEGIN, END = "altup_proj", "altup_unembd_proj"
PATTERN, STREAMS, SPARSITY = "attention.sliding_window_pattern", "altup.num_inputs", "activation_sparsity_scale"
WITH_KV, SPARSE = 20, 10
"""Layers with K and V of their own, and layers with a cutoff, unless the file says otherwise."""
CUTOFF = 1.6448533535003662
"""What such a layer's cutoff is above the mean, in standard deviations: of a normal distribution 95 % lie below it."""
LOCAL_BASE = 10000.0
LAUREL_RANK = 64
OTHERS = "altup_corrected_others"
"""All streams but the first, behind a layer; with no number before the first one."""
SOFTCAP = 30.0
HALF = math.sqrt(0.5)
"""Of the sum of attention and Laurel, in each of its parts: norms have it in their weights."""
GEGLU = Glu("GEGLU")
LENGTH_EPS = 1e-12
"""Of the mean square of a stream before it gets another length."""


def published(n_layer: int, period: int, kv: int, sparse: int, **more: Any) -> dict[str, Any]:
    """Keys of a model. kv: layers with K and V of their own; sparse: layers with a cutoff."""
    return {
        PATTERN: tuple(il % period != period - 1 for il in range(n_layer)),
        SPARSITY: tuple(CUTOFF if il < sparse else -math.inf for il in range(n_layer)),
        SHARED: n_layer - kv,
        STREAMS: 4,
        PER_LAYER: 256,
        "rope.freq_base_swa": LOCAL_BASE,
        **more,
    }


@register
class Gemma3n(Architecture):
    name = "gemma3n"
    rope_mode = "neox"
    vocabulary = "spm"
    keys = frozenset({SPARSITY, STREAMS, SHARED, "attention.sliding_window", PATTERN, PER_LAYER, "rope.freq_base_swa"})
    required = ("attention.sliding_window", PER_LAYER)
    varying = frozenset({"feed_forward_length"})
    sizes: ClassVar = {30: "E2B", 35: "E4B"}
    shapes: ClassVar = {
        f"gemma3n-{size}": ModelShape(
            "gemma3n",
            n_layer,
            2048,
            n_ff,
            8,
            2,
            256,
            262144,
            32768,
            1000000.0,
            1e-6,
            tied=True,
            window=512,
            metadata=published(n_layer, 5, WITH_KV, SPARSE),
        )
        for size, n_layer, n_ff in (("e2b", 30, 8192), ("e4b", 35, 16384))
    } | {
        "tiny-gemma3n": ModelShape(
            "gemma3n",
            6,
            96,
            160,
            4,
            2,
            24,
            331,
            128,
            1000000.0,
            1e-6,
            tied=True,
            window=9,
            metadata=published(6, 2, 4, 2, **{PER_LAYER: 32, "final_logit_softcapping": 12.0, "attention.scale": 0.2}),
        )
    }

    @classmethod
    def opened(cls, f: GgufFile) -> GgufFile:
        """What begins the streams is one product, what ends each a product of its own."""
        tensors, cuts = dict(f.tensors), {}
        streams = f.metadata.get(f"{f.arch}.{STREAMS}", 4)
        for name in (BEGIN, END):
            if (t := f.tensors.get(f"{name}.weight")) is not None and len(t.shape) == 3:
                n, rows, columns = t.shape
                tensors[t.name] = replace(t, shape=(n * rows, columns))
                if name == END:
                    ends = streams if isinstance(streams, int) and 1 < streams <= MAX_STREAMS else n + 1
                    cuts[t.name] = {f"{name}.{i}.weight": rows for i in range(1, ends)}
        return replace(f, tensors=tensors).cut(cuts)

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        m = self.metadata
        softcap = m.positive_or("final_logit_softcapping", SOFTCAP)
        hp = replace(self.hp, attn_scale=m.positive_or("attention.scale", 1.0), softcap=softcap)
        scales = {"altup_router_norm": 1.0 / hp.n_embd, "post_attention_norm": HALF, "laurel_post_norm": HALF}
        by_layer = {f"blk.{il}.{stem}.weight": scale for il in range(hp.n_layer) for stem, scale in scales.items()}
        self.hp = hp = hp.with_scaled(PER_LAYER_SCALES | by_layer)
        self.n_per_layer = m.count(PER_LAYER)
        self.n_streams = m.count(STREAMS, 4, least=2)
        if self.n_streams > MAX_STREAMS:
            raise m.fail(STREAMS, self.n_streams, f"at most {MAX_STREAMS}")
        self.n_ff = m.of_layers("feed_forward_length", hp.n_layer)
        self.local_rope = replace(hp.rope, freq_base=m.freq_base("rope.freq_base_swa", LOCAL_BASE))
        self.sees_all = m.pattern(PATTERN, hp.n_layer, 5)
        self.sources = kv_sources(m, self.sees_all, max(hp.n_layer - WITH_KV, 0))
        self.cutoffs = self.cutoffs_of_layers()
        shared = [f"blk.{il}.attn_{part}" for il, source in enumerate(self.sources) if source is not None for part in ("k", "v", "k_norm")]
        self.unused_tensors |= {f"{stem}.weight" for stem in shared} & f.tensors.keys()

    def cutoffs_of_layers(self) -> tuple[float, ...]:
        """Of each layer how far above the mean of its gate a value must be, in standard deviations; -inf: all count. Raises GgufError."""
        n_layer = self.hp.n_layer
        values = self.metadata.array(SPARSITY)
        if values is None:
            return tuple(CUTOFF if il < SPARSE else -math.inf for il in range(n_layer))
        if values.shape != (n_layer,) or values.dtype.kind not in "fiu" or np.isnan(values).any() or (values > 100).any():
            raise self.metadata.fail(SPARSITY, f"{values.size} values", f"a number up to 100, or -inf, for each of {n_layer} layers")
        return tuple(map(float, values))

    def embed(self, b: GraphBuilder) -> Tensor:
        """The first stream; the rest are OTHERS."""
        x = super().embed(b)
        per_layer_vectors(b, x, self.n_per_layer)
        x = b.graph.emit("SCALE", "inp_scaled", "F32", x.shape, (x,), scale=math.sqrt(self.hp.n_embd), bias=0.0)
        rest = self.n_streams - 1
        y = b.view(b.linear(x, BEGIN, rest * self.hp.n_embd, "altup_inp"), (b.n, rest, self.hp.n_embd))
        as_long(b, y, length(b, x, "inp"), OTHERS)
        return x

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        hp, g = self.hp, b.graph

        def mixed(op: str, name: str, x: Tensor, others: Tensor, coef: Tensor, read: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
            """The streams (x, others) as the router mixes them, which reads one of them. The outputs are called `name` and as OTHERS."""
            y = rms_norm(b, read, f"blk.{il}.altup_router_norm", f"{name}_norm-{il}", plain=f"{name}_rms-{il}")
            logits = b.linear(y, f"blk.{il}.altup_router", self.n_streams, f"{name}_logits-{il}")
            outputs = (replace(x, name=f"{name}-{il}", kind="node"), replace(others, name=f"{name}_others-{il}", kind="node"))
            g.add(op, (x, others, logits, coef, *more), outputs)
            return outputs

        n = self.n_streams
        others = Tensor(f"{OTHERS}-{il - 1}" if il else OTHERS, "F32", (b.n, n - 1, hp.n_embd))
        added = (Tensor(f"per_layer_embd_out-{il - 1}", "F32", x.shape),) if il else ()
        # As one axis, without planes: the kernels read it value by value.
        coef = replace(hp.weight(f"blk.{il}.altup_predict_coef.weight", (n * n, n)), shape=(n**3,))
        x, others = mixed("ALTUP_PREDICT", "altup_predicted", x, others, coef, x, *added)
        y = attention_norm(b, x, il)
        if not hp.has_weight(left := f"blk.{il}.laurel_l.weight"):
            raise hp.missing(left)
        low = b.linear(y, f"blk.{il}.laurel_l", hp.weights[left].shape[0], f"laurel_l-{il}")
        low = b.linear(low, f"blk.{il}.laurel_r", hp.n_embd, f"laurel_r-{il}")
        low = rms_norm(b, low, f"blk.{il}.laurel_post_norm", f"laurel_norm-{il}", plain=f"laurel_rms-{il}")
        before = b.add(x, y, f"attn_laurel_inp-{il}")
        before = g.emit("SCALE", f"attn_laurel_inp_scaled-{il}", "F32", x.shape, (before,), scale=HALF, bias=0.0)
        low = b.add(low, before, f"laurel_out-{il}")
        rope, window = (hp.rope, 0) if self.sees_all[il] else (self.local_rope, hp.window)
        y = attention(b, y, il, rope=rope, qk_norm=rms_norm, v_norm=True, window=window, kv_of=self.sources[il])
        y, x, low = (b.last_token(t, il, f"{name}_last") for t, name in ((y, "attn_out"), (x, "attn_inp"), (low, "laurel_out")))
        others = b.view(b.last_token(b.view(others, (b.n, (n - 1) * hp.n_embd)), il, "altup_others_last"), (x.shape[0], n - 1, hp.n_embd))
        y = rms_norm(b, y, f"blk.{il}.post_attention_norm", f"attn_post_norm-{il}", plain=f"attn_post_rms-{il}")
        both = b.add(y, low, f"attn_laurel-{il}")
        y = feed_forward(b, feed_forward_norm(b, both, il), il, width=self.n_ff[il], glu=GEGLU, gate_cutoff=self.cutoffs[il])
        y = rms_norm(b, y, f"blk.{il}.post_ffw_norm", f"ffn_post_norm-{il}", plain=f"ffn_post_rms-{il}")
        y = b.add(y, both, f"ffn_residual-{il}")
        coef = replace(hp.weight(f"blk.{il}.altup_correct_coef.weight", (n, n)), shape=(n * n,))
        x, others = mixed("ALTUP_CORRECT", "altup_corrected", x, others, coef, y, y)
        y = g.emit("MUL", f"altup_scaled-{il}", "F32", x.shape, (x, hp.weight(f"blk.{il}.altup_correct_scale.weight", (hp.n_embd,))))
        per_layer_part(b, y, il, self.n_per_layer)
        return x

    def normed(self, b: GraphBuilder, x: Tensor) -> Tensor:
        """Of the mean of all streams. Their sum does, with an epsilon to match."""
        il, rest, n_embd = self.hp.n_layer - 1, self.n_streams - 1, self.hp.n_embd
        if not self.hp.has_weight(f"{END}.1.weight"):
            raise self.hp.missing(f"{END}.weight")
        others = Tensor(f"{OTHERS}-{il}", "F32", (x.shape[0], rest, n_embd))
        added = b.view(Tensor(f"per_layer_embd_out-{il}", "F32", x.shape), (x.shape[0], 1, n_embd))
        others = b.add(others, added, "altup_unembd_inp")
        size = length(b, x, "result")
        total = x
        for i in range(1, rest + 1):
            view = View((i - 1) * n_embd, x.shape, (rest * n_embd, 1))
            y = b.graph.emit("CONT", f"altup_unembd_inp_{i}", "F32", x.shape, (others,), view=view)
            y = as_long(b, b.linear(y, f"{END}.{i}", n_embd, f"altup_unembd_{i}"), size, f"altup_unembd_scaled_{i}")
            total = b.add(total, y, f"altup_sum_{i}")
        return rms_norm(b, total, "output_norm", "result_norm", plain="result_rms", eps=self.hp.rms_eps * self.n_streams**2)

    @classmethod
    def outer_tensors(cls, s: ModelShape) -> Tensors:
        rest = s.metadata[STREAMS] - 1
        for name in (BEGIN, END):
            yield f"{name}.weight", (rest, s.n_embd, s.n_embd)
        yield from outer_per_layer_tensors(s, s.metadata[PER_LAYER])

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        n, rank = s.metadata[STREAMS], LAUREL_RANK if s.n_embd > LAUREL_RANK * 4 else s.n_embd // 3
        yield from attention_tensors(s)
        yield from qk_norm_tensors(s)
        yield "altup_correct_coef.weight", (n, n)
        yield "altup_correct_scale.weight", (s.n_embd,)
        yield "altup_predict_coef.weight", (n * n, n)
        yield "altup_router.weight", (n, s.n_embd)
        yield "altup_router_norm.weight", (s.n_embd,)
        yield "ffn_norm.weight", (s.n_embd,)
        yield from feed_forward_tensors(s)
        yield "laurel_l.weight", (rank, s.n_embd)
        yield "laurel_r.weight", (s.n_embd, rank)
        yield "laurel_post_norm.weight", (s.n_embd,)
        yield from post_norm_tensors(s)
        yield from per_layer_tensors(s, s.metadata[PER_LAYER])


def length(b: GraphBuilder, x: Tensor, name: str) -> Tensor:
    """The root of the mean square of each row of x [n, n_embd]: [n, 1]."""
    y = b.graph.emit("SQR", f"{name}_squares", "F32", x.shape, (x,))
    y = b.graph.emit("MEAN", f"{name}_mean_square", "F32", (x.shape[0], 1), (y,))
    return b.graph.emit("SQRT", f"{name}_length", "F32", y.shape, (y,))


def as_long(b: GraphBuilder, x: Tensor, size: Tensor, name: str) -> Tensor:
    """Rows of x, as long as `size` [n, 1] says of their token."""
    y = b.graph.emit("RMS_NORM", f"{name} (rms)", "F32", x.shape, (x,), eps=LENGTH_EPS)
    return b.graph.emit("MUL", name, "F32", x.shape, (y, b.view(size, (x.shape[0], *(1 for _ in x.shape[1:])))))
