"""Blocks of a layer: norms, attention with its KV cache, dense and mixture-of-experts feed-forward. Each is a function of a builder and a
tensor. An architecture's file puts them together, and has what only it needs in functions of the same kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Heads, HParams, Rope
from vkback.graph import Tensor
from vkback.models.builder import GraphBuilder
from vkback.models.texts import DISTANCES
from vkback.ops.view import View


@dataclass(frozen=True)
class Glu:
    """A gated linear unit: op and params (vkback/ops/glu.py)."""

    op: str
    params: Mapping[str, float] = field(default_factory=dict)


SWIGLU = Glu("SWIGLU")


class Norm(Protocol):
    """A norm over the last axis with the weights `stem`.weight and, where it has one, `stem`.bias. `plain`: name of the value before
    these come in."""

    def __call__(self, b: GraphBuilder, x: Tensor, stem: str, name: str, *, plain: str) -> Tensor: ...


def rms_norm(b: GraphBuilder, x: Tensor, stem: str, name: str, *, plain: str, eps: float = 0.0) -> Tensor:
    """RMS norm times `stem`.weight. eps: 0: hp's."""
    w = b.hp.weight(f"{stem}.weight", x.shape[-1:])
    y = b.graph.emit("RMS_NORM", plain, "F32", x.shape, (x,), eps=eps or b.hp.rms_eps)
    return b.graph.emit("MUL", name, "F32", x.shape, (y, w))


def layer_norm(b: GraphBuilder, x: Tensor, stem: str, name: str, *, plain: str, bias: str = "") -> Tensor:
    """Layer norm times `stem`.weight plus `stem`.bias, or a bias of another name."""
    w, shift = (b.hp.weight(weight, x.shape[-1:]) for weight in (f"{stem}.weight", bias or f"{stem}.bias"))
    prefix, dash, layer = name.partition("-")
    y = b.graph.emit("NORM", plain, "F32", x.shape, (x,), eps=b.hp.rms_eps)
    y = b.graph.emit("MUL", f"{prefix}_weighted{dash}{layer}", "F32", x.shape, (y, w))
    return b.graph.emit("ADD", name, "F32", x.shape, (y, shift))


ZERO_BIAS = "zero_bias"


def with_zero_bias(f: GgufFile, width: int) -> GgufFile:
    """The file with a bias of zeros for `bare_layer_norm`, which so is what kernels know a layer norm as."""
    return f.with_made(ZERO_BIAS, np.zeros(width, np.float32))


def bare_layer_norm(b: GraphBuilder, x: Tensor, stem: str, name: str, *, plain: str) -> Tensor:
    """Layer norm times `stem`.weight, of a file `with_zero_bias`."""
    return layer_norm(b, x, stem, name, plain=plain, bias=ZERO_BIAS)


def attention_norm(b: GraphBuilder, x: Tensor, il: int) -> Tensor:
    """RMS norm before attention."""
    return rms_norm(b, x, f"blk.{il}.attn_norm", f"attn_norm-{il}", plain=f"attn_rms-{il}")


def feed_forward_norm(b: GraphBuilder, x: Tensor, il: int) -> Tensor:
    """RMS norm before the feed-forward."""
    return rms_norm(b, x, f"blk.{il}.ffn_norm", f"ffn_norm-{il}", plain=f"ffn_rms-{il}")


Projection = Callable[[GraphBuilder, Tensor, int, Heads], tuple[Tensor, Tensor, Tensor]]
"""Q, K and V of a layer from its normed input [n, n_embd]: [n, heads * head width] each."""


QkNormOf = Literal["head", "all heads", "rotated head"]
"""What the norm of Q and K is over: each head, before it is rotated; all heads at once; each head once it is rotated."""


def separate_qkv(b: GraphBuilder, x: Tensor, il: int, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """A Projection with a weight each."""
    q = b.linear(x, f"blk.{il}.attn_q", heads.n * heads.dim_k, f"Qcur-{il}")
    k = b.linear(x, f"blk.{il}.attn_k", heads.n_kv * heads.dim_k, f"Kcur-{il}")
    v = b.linear(x, f"blk.{il}.attn_v", heads.n_kv * heads.dim_v, f"Vcur-{il}")
    return q, k, v


def qkv_cuts(f: GgufFile, hp: HParams) -> dict[str, dict[str, int]]:
    """Cuts (`GgufFile.cut`) of the layers' tensors that hold Q, K and V, where the file has such."""
    rows = {"attn_q": hp.n_head * hp.head_dim_k, "attn_k": hp.n_head_kv * hp.head_dim_k, "attn_v": hp.n_head_kv * hp.head_dim_v}
    whole = [f"blk.{il}.attn_qkv.{kind}" for il in range(hp.n_layer) for kind in ("weight", "bias")]
    return {name: {name.replace("attn_qkv", part): n for part, n in rows.items()} for name in whole if name in f.tensors}


def gate_up_cuts(f: GgufFile, hp: HParams) -> dict[str, dict[str, int]]:
    """Cuts of the layers' tensors that hold gate and up of a dense feed-forward, gate first: `ffn_up` where there is no `ffn_gate`. Raises
    GgufError where there is neither."""
    whole = [f"blk.{il}.ffn_up.weight" for il in range(hp.n_layer) if f"blk.{il}.ffn_gate.weight" not in f.tensors]
    for name in whole:
        if name not in f.tensors:
            raise hp.missing(name)
    return {name: {name.replace("ffn_up", part): hp.n_ff for part in ("ffn_gate", "ffn_up")} for name in whole}


def attention(
    b: GraphBuilder,
    x: Tensor,
    il: int,
    *,
    rope: Rope | None,
    heads: Heads | None = None,
    qkv: Projection = separate_qkv,
    qk_norm: Norm | None = None,
    qk_norm_of: QkNormOf = "head",
    v_norm: bool = False,
    sinks: bool = False,
    window: int = 0,
    chunked: bool = False,
    softcap: float = 0.0,
    gated: bool = False,
    kv_of: int | None = None,
) -> Tensor:
    """Causal attention of layer `il` over the normed input x [n, n_embd] -> [n, n_embd].

    rope     how Q and K are rotated; None: not at all
    heads    those of this layer; default: hp's
    qk_norm  the norm of Q and K, of what qk_norm_of says
    v_norm   each head of V is RMS-normed, without a weight
    sinks    every head has an attention sink
    window   rows that a token sees; 0: all so far
    chunked  the text is in chunks as long as the window, of which a token sees its own
    softcap  c of the scores c tanh(s / c); 0: they are s
    gated    what it gives is multiplied by the sigmoid of attn_q_gate of x, value by value
    kv_of    the layer before whose K and V these tokens attend to; None: their own
    """
    heads = heads or b.hp.heads

    def placed(x: Tensor, count: int, value: str, weight: str) -> Tensor:
        """Q or K cut into heads, normed and rotated: [n, count, dim_k]."""

        def normed(x: Tensor, of: QkNormOf) -> Tensor:
            if qk_norm is None or of != qk_norm_of:
                return x
            return qk_norm(b, x, f"blk.{il}.{weight}", f"{value}_normed-{il}", plain=f"{value}_rms-{il}")

        x = normed(b.view(normed(x, "all heads"), (b.n, count, heads.dim_k)), "head")
        return normed(b.rope(x, f"{value}_rope-{il}", rope) if rope else x, "rotated head")

    if kv_of is None:
        q, k, v = qkv(b, x, il, heads)
        k = placed(k, heads.n_kv, "Kcur", "attn_k_norm")
        v = b.view(v, (b.n, heads.n_kv, heads.dim_v))
        if v_norm:
            v = b.graph.emit("RMS_NORM", f"Vcur_normed-{il}", "F32", v.shape, (v,), eps=b.hp.rms_eps)
        cache_k, cache_v = b.store(k, f"cache_k_l{il}"), b.store(v, f"cache_v_l{il}")
    else:
        q = b.linear(x, f"blk.{il}.attn_q", heads.n * heads.dim_k, f"Qcur-{il}")
        cache_k, cache_v = (
            b.cache_of(f"cache_k_l{kv_of}", heads.n_kv, heads.dim_k),
            b.cache_of(f"cache_v_l{kv_of}", heads.n_kv, heads.dim_v),
        )
    q = placed(q, heads.n, "Qcur", "attn_q_norm")
    weights = (b.hp.weight(f"blk.{il}.attn_sinks.weight", (heads.n,)),) if sinks else ()
    params: dict[str, int | float] = {"window": window} if window else {}
    params |= ({"chunked": True} if chunked else {}) | ({"softcap": softcap} if softcap else {})
    out = b.attend(q, cache_k, cache_v, *weights, width=heads.n * heads.dim_v, il=il, **params)
    if gated:
        gate = b.linear(x, f"blk.{il}.attn_q_gate", heads.n * heads.dim_v, f"gate-{il}")
        out = b.graph.emit("SIGMOID_GLU", f"attn_gated-{il}", "F32", out.shape, (gate, out))
    return b.linear(out, f"blk.{il}.attn_output", b.hp.n_embd, f"attn_out-{il}")


FeedForward = Callable[[GraphBuilder, Tensor, int], Tensor]
"""Of layer `il` over its normed input [n, n_embd] -> [n, n_embd]."""


def feed_forward(b: GraphBuilder, x: Tensor, il: int, *, width: int = 0, glu: Glu = SWIGLU, gate_cutoff: float = -math.inf) -> Tensor:
    """Dense, with a gate: down(glu(gate(x), up(x))).

    width        of gate and up, default hp's
    gate_cutoff  what a value of the gate must be above their mean to count, in standard deviations (GAUSSIAN_TOPK); -inf: all count
    """
    width = width or b.hp.n_ff
    gate = b.linear(x, f"blk.{il}.ffn_gate", width, f"ffn_gate-{il}")
    if gate_cutoff > -math.inf:
        gate = b.graph.emit("GAUSSIAN_TOPK", f"ffn_gate_sparse-{il}", "F32", gate.shape, (gate,), scale=gate_cutoff)
    up = b.linear(x, f"blk.{il}.ffn_up", width, f"ffn_up-{il}")
    act = b.graph.emit(glu.op, f"ffn_{glu.op.lower()}-{il}", "F32", gate.shape, (gate, up), **glu.params)
    return b.linear(act, f"blk.{il}.ffn_down", b.hp.n_embd, f"ffn_out-{il}")


def pre_norm_layer(
    b: GraphBuilder,
    x: Tensor,
    il: int,
    *,
    rope: Rope | None,
    qkv: Projection = separate_qkv,
    qk_norm: Norm | None = None,
    qk_norm_of: QkNormOf = "head",
    window: int = 0,
    feed: FeedForward = feed_forward,
    n_ff_shared: int = 0,
    second_norm: str = "ffn_norm",
) -> Tensor:
    """Layer `il` as most architectures have it: RMS norm, attention, residual, RMS norm, feed-forward, residual.

    feed         `feed_forward`, or `experts`
    n_ff_shared  width of a shared expert beside it, 0 without
    second_norm  name of the second norm's weight
    The rest as of `attention`.
    """
    y = attention(b, attention_norm(b, x, il), il, rope=rope, qkv=qkv, qk_norm=qk_norm, qk_norm_of=qk_norm_of, window=window)
    x = b.last_token(b.add(y, x, f"ffn_inp-{il}"), il)
    normed = rms_norm(b, x, f"blk.{il}.{second_norm}", f"ffn_norm-{il}", plain=f"ffn_rms-{il}")
    if n_ff_shared:
        x = b.add(shared_expert(b, normed, il, n_ff_shared), x, f"ffn_shared-{il}")
    return b.add(feed(b, normed, il), x, f"l_out-{il}")


def post_norm_layer(
    b: GraphBuilder, x: Tensor, il: int, *, rope: Rope | None, qk_norm_of: QkNormOf = "head", window: int = 0, glu: Glu = SWIGLU
) -> Tensor:
    """Layer `il` whose attention and feed-forward read the residual stream as it is and are RMS-normed before they are added to it."""
    y = attention(b, x, il, rope=rope, qk_norm=rms_norm, qk_norm_of=qk_norm_of, window=window)
    y, x = b.last_token(y, il, "attn_out_last"), b.last_token(x, il, "attn_inp_last")
    y = rms_norm(b, y, f"blk.{il}.post_attention_norm", f"attn_post_norm-{il}", plain=f"attn_post_rms-{il}")
    x = b.add(y, x, f"ffn_inp-{il}")
    y = feed_forward(b, x, il, glu=glu)
    y = rms_norm(b, y, f"blk.{il}.post_ffw_norm", f"ffn_post_norm-{il}", plain=f"ffn_post_rms-{il}")
    return b.add(y, x, f"l_out-{il}")


def pre_post_norm_layer(
    b: GraphBuilder, x: Tensor, il: int, *, rope: Rope | None, qk_norm: Norm | None = None, window: int = 0, softcap: float = 0.0, glu: Glu
) -> Tensor:
    """Layer `il` whose attention and feed-forward read the RMS-normed residual stream and are normed once more before they are added."""
    y = attention(b, attention_norm(b, x, il), il, rope=rope, qk_norm=qk_norm, window=window, softcap=softcap)
    y, x = b.last_token(y, il, "attn_out_last"), b.last_token(x, il, "attn_inp_last")
    y = rms_norm(b, y, f"blk.{il}.post_attention_norm", f"attn_post_norm-{il}", plain=f"attn_post_rms-{il}")
    x = b.add(y, x, f"sa_out-{il}")
    y = feed_forward(b, feed_forward_norm(b, x, il), il, glu=glu)
    y = rms_norm(b, y, f"blk.{il}.post_ffw_norm", f"ffn_post_norm-{il}", plain=f"ffn_post_rms-{il}")
    return b.add(y, x, f"l_out-{il}")


def parallel_layer(
    b: GraphBuilder,
    x: Tensor,
    il: int,
    *,
    rope: Rope | None,
    norm: Norm,
    feed: FeedForward = feed_forward,
    qk_norm: Norm | None = None,
    window: int = 0,
) -> Tensor:
    """Layer `il` whose attention and feed-forward read one normed input; both are added to the residual stream."""
    normed = norm(b, x, f"blk.{il}.attn_norm", f"attn_norm-{il}", plain=f"attn_centered-{il}")
    y = attention(b, normed, il, rope=rope, qk_norm=qk_norm, window=window)
    x = b.last_token(b.add(y, x, f"attn_residual-{il}"), il)
    return b.add(feed(b, b.last_token(normed, il, "attn_norm_last"), il), x, f"l_out-{il}")


def feed_forward_plain(b: GraphBuilder, x: Tensor, il: int, *, width: int = 0, functions: Sequence[str] = ("GELU",)) -> Tensor:
    """Dense, without a gate: down(f(up(x))), f being one function after the other. width: of up, default hp's."""
    x = b.linear(x, f"blk.{il}.ffn_up", width or b.hp.n_ff, f"ffn_up-{il}")
    for op in functions:
        x = b.graph.emit(op, f"ffn_{op.lower()}-{il}", "F32", x.shape, (x,))
    return b.linear(x, f"blk.{il}.ffn_down", b.hp.n_embd, f"ffn_out-{il}")


def alibi_attention(b: GraphBuilder, x: Tensor, il: int, *, max_bias: float, qk_norm: Norm | None = None) -> Tensor:
    """Attention of layer `il` of a model that makes vectors of texts alone, over x [n, n_embd] -> [n, n_embd]: of each score the distance
    of the two tokens is taken off, times a slope of its head (ALiBi). qk_norm: of Q and K, over all heads at once."""
    heads = b.hp.heads
    q, k, v = separate_qkv(b, x, il, heads)
    if qk_norm is not None:
        q = qk_norm(b, q, f"blk.{il}.attn_q_norm", f"Qcur_normed-{il}", plain=f"Qcur_rms-{il}")
        k = qk_norm(b, k, f"blk.{il}.attn_k_norm", f"Kcur_normed-{il}", plain=f"Kcur_rms-{il}")

    def by_head(x: Tensor, count: int, dim: int) -> Tensor:
        view = View(0, (1, count, b.n, dim), (b.n * count * dim, dim, count * dim, 1))
        return b.graph.emit("CONT", f"{x.name} (by head)", "F32", view.shape, (x,), view=view)

    q, k, v = by_head(q, heads.n, heads.dim_k), by_head(k, heads.n_kv, heads.dim_k), by_head(v, heads.n_kv, heads.dim_v)
    params = {"scale": b.hp.attn_scale, "has_mask": True, "has_sinks": False, "max_bias": max_bias}
    mask = Tensor(DISTANCES, "F16", (1, 1, b.n, b.n), "input")
    y = b.graph.emit("ATTENTION", f"kqv_out-{il}", "F32", (1, b.n, heads.n, heads.dim_v), (q, k, v, mask), **params)
    return b.linear(b.view(y, (b.n, heads.n * heads.dim_v)), f"blk.{il}.attn_output", b.hp.n_embd, f"attn_out-{il}")


def encoder_layer(
    b: GraphBuilder,
    x: Tensor,
    il: int,
    *,
    rope: Rope | None,
    qk_norm: Norm | None = None,
    feed: FeedForward = feed_forward,
    max_bias: float = 0.0,
) -> Tensor:
    """Layer `il` of BERT and its kind: what attention and feed-forward add to the residual stream is layer-normed with it, together.
    max_bias: of ALiBi, in the place of RoPE; 0 without."""
    if max_bias:
        y = alibi_attention(b, x, il, max_bias=max_bias, qk_norm=qk_norm)
    else:
        y = attention(b, x, il, rope=rope, qk_norm=qk_norm, qk_norm_of="all heads")
    x = b.add(y, x, f"attn_residual-{il}")
    x = layer_norm(b, x, f"blk.{il}.attn_output_norm", f"attn_output_norm-{il}", plain=f"attn_output_centered-{il}")
    x = b.add(feed(b, x, il), x, f"ffn_residual-{il}")
    return layer_norm(b, x, f"blk.{il}.layer_output_norm", f"l_out-{il}", plain=f"layer_output_centered-{il}")


def shared_expert(b: GraphBuilder, x: Tensor, il: int, width: int) -> Tensor:
    """The gated layer beside the routed experts that works on every token. width: of gate and up."""
    gate = b.linear(x, f"blk.{il}.ffn_gate_shexp", width, f"ffn_shexp_gate-{il}")
    up = b.linear(x, f"blk.{il}.ffn_up_shexp", width, f"ffn_shexp_up-{il}")
    act = b.graph.emit(SWIGLU.op, f"ffn_shexp_{SWIGLU.op.lower()}-{il}", "F32", gate.shape, (gate, up), **SWIGLU.params)
    return b.linear(act, f"blk.{il}.ffn_down_shexp", b.hp.n_embd, f"ffn_shexp-{il}")


def gated_shared_expert(b: GraphBuilder, x: Tensor, il: int, width: int) -> Tensor:
    """`shared_expert` times the sigmoid of one value, which the row ffn_gate_inp_shexp makes of the token."""
    name, n_embd = f"blk.{il}.ffn_gate_inp_shexp.weight", b.hp.n_embd
    flat = b.hp.has_weight(name) and len(b.hp.weights[name].shape) == 1
    w = replace(b.hp.weight(name, (n_embd,) if flat else (1, n_embd)), shape=(1, n_embd))
    y = shared_expert(b, x, il, width)
    gate = b.graph.emit("MUL_MAT", f"shared_expert_gate-{il}", "F32", (x.shape[0], 1), (w, x))
    gate = b.graph.emit("SIGMOID", f"shared_expert_gate_sigmoid-{il}", "F32", gate.shape, (gate,))
    return b.graph.emit("MUL", f"ffn_shexp_gated-{il}", "F32", y.shape, (y, gate))


def with_scales_by_expert(f: GgufFile) -> GgufFile:
    """The file with what scales its experts as tables [n_expert, 1], which `experts` reads rows of."""
    scales = {name: t for name, t in f.tensors.items() if name.endswith("_exps.scale")}
    return replace(f, tensors={**f.tensors, **{name: replace(t, shape=(*t.shape, 1)) for name, t in scales.items()}})


def experts(
    b: GraphBuilder,
    x: Tensor,
    il: int,
    *,
    glu: Glu = SWIGLU,
    gating: str = "softmax",
    groups: tuple[int, int] = (1, 1),
    route: Tensor | None = None,
    weighs_input: bool = False,
) -> Tensor:
    """Mixture of experts: the router picks n_expert_used of n_expert gated layers for every token; their weighted sum. A file may have gate
    and up of an expert in one matrix, gate first, and a scale for what each expert makes (`with_scales_by_expert`).

    gating  how the router weighs the experts it chose (TOPK_MOE); unless the softmax is over these alone, the file may have a bias for the
            choice, exp_probs_b
    groups  (of how many groups of experts, how many count)
    route   what the router reads [n, n_embd]; default x
    weighs_input  the weight of a token's one expert is multiplied into what it reads
    """
    hp, g, n = b.hp, b.graph, x.shape[0]
    logits = b.linear(x if route is None else route, f"blk.{il}.ffn_gate_inp", hp.n_expert, f"ffn_moe_logits-{il}")
    weights = Tensor(f"ffn_moe_weights-{il}", "F32", (n, hp.n_expert_used))
    ids = Tensor(f"ffn_moe_topk-{il}", "I32", (n, hp.n_expert_used))
    bias = f"blk.{il}.exp_probs_b.bias"
    sources = (logits, *([hp.weight(bias, (hp.n_expert,))] if gating != "softmax_weight" and hp.has_weight(bias) else []))
    grouped = {"n_group": groups[0], "n_group_used": groups[1]} if groups[0] > 1 else {}
    g.add("TOPK_MOE", sources, (weights, ids), n_used=hp.n_expert_used, norm=hp.norm_w, gating=gating, scale=hp.expert_scale, **grouped)
    if weighs_input:
        x = g.emit("MUL", f"ffn_moe_weighted-{il}", "F32", x.shape, (x, weights))
    shared = b.view(x, (n, 1, hp.n_embd))
    both = f"blk.{il}.ffn_gate_up_exps"
    stems = {"gate": f"blk.{il}.ffn_gate_exps", "up": f"blk.{il}.ffn_up_exps"}
    if hp.has_weight(f"{both}.weight"):
        parts = [routed(b, shared, ids, both, 2 * hp.n_ff_expert, f"ffn_moe_gate_up-{il}")]
    elif not any(hp.has_weight(f"{stem}.weight") for stem in stems.values()):
        raise hp.missing(f"{both}.weight", "ffn_gate_exps.weight and ffn_up_exps.weight")
    else:
        parts = [routed(b, shared, ids, stem, hp.n_ff_expert, f"ffn_moe_{part}-{il}") for part, stem in stems.items()]
    act = g.emit(glu.op, f"ffn_moe_{glu.op.lower()}-{il}", "F32", (n, hp.n_expert_used, hp.n_ff_expert), tuple(parts), **glu.params)
    scale = f"blk.{il}.ffn_down_exps.scale"
    if hp.has_weight(scale):
        table = hp.weight(scale, (hp.n_expert, 1))
        flat = b.view(ids, (n * hp.n_expert_used,))
        scales = g.emit("GET_ROWS", f"ffn_moe_scales-{il}", "F32", (n * hp.n_expert_used, 1), (table, flat))
        weights = g.emit("MUL", f"ffn_moe_weights_scaled-{il}", "F32", weights.shape, (weights, b.view(scales, weights.shape)))
    down = routed(b, act, ids, f"blk.{il}.ffn_down_exps", hp.n_embd, f"ffn_moe_down-{il}")
    if weighs_input:
        return b.view(down, (n, hp.n_embd))
    return g.emit("MOE_REDUCE", f"ffn_moe_out-{il}", "F32", (n, hp.n_embd), (down, weights))


def experts_by_sigmoid(b: GraphBuilder, x: Tensor, il: int) -> Tensor:
    """`experts` whose router is a sigmoid of each logit, with a bias for the choice that the file must have."""
    b.hp.weight(f"blk.{il}.exp_probs_b.bias", (b.hp.n_expert,))
    return experts(b, x, il, gating="sigmoid")


def routed(b: GraphBuilder, x: Tensor, ids: Tensor, stem: str, rows: int, name: str) -> Tensor:
    """`stem` of each token's experts times x [n, 1 or n_used, cols], plus the experts' biases where the file has them."""
    hp = b.hp
    w = hp.weight(f"{stem}.weight", (hp.n_expert, rows, x.shape[-1]))
    y = b.graph.emit("MUL_MAT_ID", name, "F32", (*ids.shape, rows), (w, x, ids))
    if not hp.has_weight(f"{stem}.bias"):
        return y
    bias = hp.weight(f"{stem}.bias", (hp.n_expert, rows))
    bias = replace(bias, shape=(hp.n_expert * rows,))
    return b.graph.emit("ADD_ID", name.replace("-", "_biased-"), "F32", y.shape, (y, bias, ids))
