"""Every op of a model's graph in plain numpy: slow on purpose, float64, so that its own rounding never enters a verdict.

Each takes a list of arrays in the order of a node's inputs, and the node's params, and returns a list of outputs. n is the number of
tokens. Weights come decoded. A cache written in place is returned as a modified copy of its own type, so that an F16 cache rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Inputs = Sequence[Array]
Params = Mapping[str, Any]

LEAST_WEIGHT_SUM = 2.0**-14
"""Sums of expert weights are clamped to this, the smallest normal F16, before they divide."""


def _f64(x: Array) -> npt.NDArray[np.float64]:
    return np.asarray(x, np.float64)


def ref_get_rows(inputs: Inputs, params: Params) -> list[Array]:
    """table [rows, dim], ids int [n] -> [n, dim]."""
    table, ids = inputs
    return [_f64(table[ids])]


def ref_rms_norm(inputs: Inputs, params: Params) -> list[Array]:
    """x [..., dim], params eps -> x / sqrt(mean(x^2) + eps), over the last axis."""
    x = _f64(inputs[0])
    return [x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + params["eps"])]


def ref_mul(inputs: Inputs, params: Params) -> list[Array]:
    """a [..., dim], b broadcast over it -> a * b."""
    return [_f64(inputs[0]) * _f64(inputs[1])]


def ref_add(inputs: Inputs, params: Params) -> list[Array]:
    """a [..., dim], b broadcast over it -> a + b."""
    return [_f64(inputs[0]) + _f64(inputs[1])]


def ref_mul_mat(inputs: Inputs, params: Params) -> list[Array]:
    """w [m, k], x [n, k] -> [n, m]."""
    w, x = inputs
    return [_f64(x) @ _f64(w).T]


def ref_mul_mat_id(inputs: Inputs, params: Params) -> list[Array]:
    """w [n_expert, m, k], x [n, 1 or n_used, k] (1: shared by all experts of the token), ids int [n, n_used] -> [n, n_used, m]."""
    w, x, ids = inputs
    x = np.broadcast_to(_f64(x), (*ids.shape, x.shape[-1]))
    out = np.zeros((*ids.shape, w.shape[1]))
    for expert in np.unique(ids):
        chosen = ids == expert
        out[chosen] = x[chosen] @ _f64(w[expert]).T
    return [out]


def ref_moe_reduce(inputs: Inputs, params: Params) -> list[Array]:
    """y [n, n_used, m], weights [n, n_used] -> [n, m], the weighted sum over the used experts."""
    y, weights = inputs
    return [(_f64(y) * _f64(weights)[..., None]).sum(axis=1)]


def ref_swiglu(inputs: Inputs, params: Params) -> list[Array]:
    """gate, up of one shape -> silu(gate) * up."""
    gate, up = _f64(inputs[0]), _f64(inputs[1])
    with np.errstate(over="ignore"):  # exp(-gate) of a very negative gate is inf, and gate / inf is the right 0
        return [gate / (1.0 + np.exp(-gate)) * up]


def ref_swiglu_oai(inputs: Inputs, params: Params) -> list[Array]:
    """gate, up of one shape, params alpha, limit -> min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (up within +-limit, plus 1)."""
    gate, up = np.minimum(_f64(inputs[0]), params["limit"]), np.clip(_f64(inputs[1]), -params["limit"], params["limit"])
    with np.errstate(over="ignore"):  # as above
        return [gate / (1.0 + np.exp(-params["alpha"] * gate)) * (up + 1.0)]


def ref_add_id(inputs: Inputs, params: Params) -> list[Array]:
    """a [n, n_used, m], b [n_expert * m] (the experts' rows end to end), ids int [n, n_used] -> a plus the row of each one's expert."""
    a, b, ids = inputs
    return [_f64(a) + _f64(b).reshape(-1, a.shape[-1])[ids]]


def _softmax(x: Array) -> npt.NDArray[np.float64]:
    e = np.exp(_f64(x) - _f64(x).max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def ref_topk_moe(inputs: Inputs, params: Params) -> list[Array]:
    """logits [n, n_expert], params n_used, norm, gating, scale -> weights [n, n_used], ids int32 [n, n_used].

    The n_used largest, largest first and of equals the lower id first. gating "softmax": their share of the softmax over all experts,
    "softmax_weight": the softmax over the chosen, "sigmoid": the logistic function; norm divides by their sum.
    """
    logits = _f64(inputs[0])
    # Ordered by logits: two that differ may have one probability after rounding.
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, : params["n_used"]]
    chosen = np.take_along_axis(logits, ids, axis=-1)
    if params["gating"] == "softmax":
        weights = np.take_along_axis(_softmax(logits), ids, axis=-1)
    elif params["gating"] == "softmax_weight":
        weights = _softmax(chosen)
    elif params["gating"] == "sigmoid":
        weights = 1.0 / (1.0 + np.exp(-chosen))
    else:
        raise NotImplementedError(f"TOPK_MOE with gating {params['gating']!r}")
    if params["norm"]:
        weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), LEAST_WEIGHT_SUM)
    return [weights * params["scale"], ids.astype(np.int32)]


def rope_angles(pos: Array, factors: Array | None, params: Params) -> tuple[Array, float]:
    """Angles [n, n_dims/2] of every position and pair, and the magnitude of cosine and sine. With YaRN, fast pairs keep their
    frequency, slow ones are stretched by freq_scale, and a ramp leads from one to the other."""
    n_dims, base, scale, ext = params["n_dims"], params["freq_base"], params["freq_scale"], params["ext_factor"]
    freq = np.array([base ** (-2.0 * i / n_dims) for i in range(n_dims // 2)])
    if factors is not None:
        freq = freq / _f64(factors)
    stretched = freq * scale
    magnitude = float(params["attn_factor"])
    if ext != 0.0:
        first, last = (_yarn_pair(turns, params) for turns in (params["beta_fast"], params["beta_slow"]))
        first, last = max(0.0, math.floor(first)), min(n_dims - 1.0, math.ceil(last))
        ramp = np.array([1.0 - min(1.0, max(0.0, (i - first) / max(0.001, last - first))) for i in range(n_dims // 2)])
        stretched = stretched * (1.0 - ramp * ext) + freq * ramp * ext
        magnitude *= 1.0 + 0.1 * math.log(1.0 / scale)
    return _f64(pos)[:, None] * stretched, magnitude


def _yarn_pair(turns: float, params: Params) -> float:
    """The pair, as a real number, that makes `turns` full turns within the original context."""
    wavelength = params["n_ctx_orig"] / (turns * 2 * math.pi)
    return float(params["n_dims"] * math.log(wavelength) / (2 * math.log(params["freq_base"])))


def turn_pairs(x: Array, cos: Array, sin: Array, mode: str) -> Array:
    """x [n, heads, head_dim] with its first pairs, paired as `mode` says, turned by cos and sin [n, pairs]."""
    pairs = cos.shape[-1]
    a, b = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if mode == "normal" else (slice(0, pairs), slice(pairs, 2 * pairs))
    cos, sin = cos[:, None, :], sin[:, None, :]
    out = x.copy()
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., a] * sin + x[..., b] * cos
    return out


def ref_rope(inputs: Inputs, params: Params) -> list[Array]:
    """x [n, heads, head_dim], pos int [n] [, frequency divisors [n_dims/2]] -> x with its first n_dims values rotated.

    mode "normal" pairs values 2i and 2i + 1, "neox" i and i + n_dims/2.
    """
    x, pos = _f64(inputs[0]), inputs[1]
    angles, magnitude = rope_angles(pos, inputs[2] if len(inputs) > 2 else None, params)
    return [turn_pairs(x, np.cos(angles) * magnitude, np.sin(angles) * magnitude, params["mode"])]


def ref_set_rows(inputs: Inputs, params: Params) -> list[Array]:
    """x [n, n_head_kv, head_dim], pos int [n], cache [n_head_kv, n_ctx, head_dim] -> the cache with row pos[i] of every head from x[i].

    pos -1 is padding and stores nothing.
    """
    x, pos, cache = inputs
    out = cache.copy()
    real = pos >= 0
    out[:, pos[real]] = np.swapaxes(x[real], 0, 1)
    return [out]


def ref_flash_attn_ext(inputs: Inputs, params: Params) -> list[Array]:
    """q [n, n_head, head_dim_k], cache_k and cache_v [n_head_kv, n_ctx, head_dim], pos int [n] [, sinks [n_head]], params scale [, window]
    -> [n, n_head*head_dim_v].

    A token at position p sees rows max(0, p + 1 - window)..p (0..p without a window); padding (pos -1) sees nothing and gives zeros.
    A sink is a logit without a value: it takes its share of a head's softmax away from the rows.
    """
    q, cache_k, cache_v, pos = inputs[:4]
    sinks = _f64(inputs[4]) if len(inputs) > 4 else None
    q = _f64(q)
    n, n_head, _ = q.shape
    if params.get("window"):
        return [np.concatenate([_attention_in_window(inputs, t, params) for t in range(n)])]
    n_head_kv = cache_k.shape[0]
    out = np.zeros((n, n_head, cache_v.shape[-1]))
    rows = max(0, int(pos.max()) + 1)
    real = np.flatnonzero(pos >= 0)
    if not real.size:
        return [out.reshape(n, -1)]
    hidden = np.arange(rows)[None, :] > pos[real][:, None]
    for head in range(n_head):
        kv = head * n_head_kv // n_head
        scores = q[real, head] @ _f64(cache_k[kv, :rows]).T * params["scale"]
        scores[hidden] = -np.inf
        top = scores.max(axis=-1, keepdims=True) if sinks is None else np.maximum(scores.max(axis=-1, keepdims=True), sinks[head])
        p = np.exp(scores - top)
        all_shares = p.sum(axis=-1, keepdims=True) + (0.0 if sinks is None else np.exp(sinks[head] - top))
        out[real, head] = p / all_shares @ _f64(cache_v[kv, :rows])
    return [out.reshape(n, -1)]


def _attention_in_window(inputs: Inputs, token: int, params: Params) -> Array:
    """The reference's output for one token [1, n_head*head_dim_v], from the rows in its window alone."""
    q, cache_k, cache_v, pos = inputs[:4]
    seen = slice(max(0, int(pos[token]) + 1 - params["window"]), int(pos[token]) + 1)
    last = np.array([seen.stop - seen.start - 1])
    k, v = cache_k[:, seen], cache_v[:, seen]
    return ref_flash_attn_ext([q[token : token + 1], k, v, last, *inputs[4:]], {"scale": params["scale"]})[0]


def ref_argmax(inputs: Inputs, params: Params) -> list[Array]:
    """x [n, dim] -> int32 [n], the index of the largest value, of equals the lowest."""
    return [np.argmax(inputs[0], axis=-1).astype(np.int32)]


REFERENCES: dict[str, Callable[[Inputs, Params], list[Array]]] = {
    "GET_ROWS": ref_get_rows,
    "RMS_NORM": ref_rms_norm,
    "MUL": ref_mul,
    "ADD": ref_add,
    "MUL_MAT": ref_mul_mat,
    "MUL_MAT_ID": ref_mul_mat_id,
    "MOE_REDUCE": ref_moe_reduce,
    "ADD_ID": ref_add_id,
    "SWIGLU": ref_swiglu,
    "SWIGLU_OAI": ref_swiglu_oai,
    "TOPK_MOE": ref_topk_moe,
    "ROPE": ref_rope,
    "SET_ROWS": ref_set_rows,
    "FLASH_ATTN_EXT": ref_flash_attn_ext,
    "ARGMAX": ref_argmax,
}
"""The reference of every op but VIEW, which computes nothing."""
