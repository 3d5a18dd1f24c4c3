"""Frequencies of RoPE and YaRN as shaders/rope/rope.glsl takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.ops.case_line import CaseLineError

MODES = {"normal": 0, "neox": 1}
"""Rotation by neighbouring dimensions, or by dimension i and i + n_dims / 2."""

DEFAULTS: Mapping[str, Any] = {
    "mode": "normal", "freq_base": 10000.0, "freq_scale": 1.0, "ext_factor": 0.0, "attn_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "n_ctx_orig": 4096,
}
"""Parameters of a model without YaRN; n_dims comes with the heads."""

PARAMS = ("n_dims", *DEFAULTS)
"""Params of ROPE, and of every op that rotates heads or makes the angles for it."""


def checked_mode(mode: str) -> str:
    """The mode. Raises CaseLineError where it is none."""
    if mode not in MODES:
        raise CaseLineError(f"mode={mode}: expected one of {', '.join(MODES)}")
    return mode


def frequencies(params: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """Radians a position for every pair, float64 [n_dims / 2], frequency factors not yet applied.

    params  n_dims, freq_base, freq_scale, ext_factor, beta_fast, beta_slow, n_ctx_orig
    YaRN (ext_factor > 0) leaves pairs that turn more than beta_fast times within n_ctx_orig alone, scales those that turn less than
    beta_slow times by freq_scale, and goes over linearly between.
    """
    n_dims = int(params["n_dims"])
    pair = np.arange(n_dims // 2, dtype=np.float64)
    base = float(params["freq_base"])
    plain = base ** (-2.0 * pair / n_dims)
    scale, ext = float(params["freq_scale"]), float(params["ext_factor"])
    if ext == 0.0:
        return plain * scale

    def dim_of(turns: float) -> float:
        return n_dims * math.log(float(params["n_ctx_orig"]) / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(0.0, math.floor(dim_of(float(params["beta_fast"]))))
    high = min(n_dims - 1.0, math.ceil(dim_of(float(params["beta_slow"]))))
    keep = ext * (1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0))
    return plain * (scale * (1.0 - keep) + keep)


def mscale(params: Mapping[str, Any]) -> float:
    """Factor on cosine and sine: attn_factor, times YaRN's 1 + 0.1 ln(1 / freq_scale) where ext_factor > 0."""
    factor = float(params["attn_factor"])
    if float(params["ext_factor"]) != 0.0:
        factor *= 1.0 + 0.1 * math.log(1.0 / float(params["freq_scale"]))
    return factor


def fixed_point(params: Mapping[str, Any]) -> list[int]:
    """Frequencies in turns a position, as 64-bit fractions of a turn."""
    return [round(float(f) / (2 * math.pi) * 2**64) % 2**64 for f in frequencies(params)]


def defines(params: Mapping[str, Any]) -> dict[str, str]:
    """The defines of shaders/rope/rope.glsl. params: those of `frequencies`, and mode ("normal" or "neox") and attn_factor."""
    table = fixed_point(params)
    return {
        "ROPE_PAIRS": str(len(table)),
        "ROPE_FREQUENCIES": ",".join(f"uvec2({t >> 32}u,{t & 0xFFFFFFFF}u)" for t in table),
        "ROPE_MSCALE": repr(np.float32(mscale(params)).item()),
        "ROPE_NEOX": str(MODES[params["mode"]]),
    }
