"""Frequencies of RoPE and YaRN as shaders/rope/rope.glsl takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback import constants
from vkback.ops.case_line import CaseLineError

MODES = {"normal": 0, "neox": 1}
"""Rotation by neighbouring dimensions, or by dimension i and i + n_dims / 2."""

DEFAULTS: Mapping[str, Any] = {
    "mode": "normal",
    "freq_base": 10000.0,
    "freq_scale": 1.0,
    "ext_factor": 0.0,
    "attn_factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "n_ctx_orig": 4096,
}
"""Parameters of a model without YaRN; n_dims comes with the heads."""

PARAMS = ("n_dims", *DEFAULTS)
"""Params of ROPE, and of every op that rotates heads or makes the angles for it."""

NARROWEST = Decimal("0.001")
"""Pairs that YaRN goes over within, at least."""


def checked_mode(mode: str) -> str:
    """The mode. Raises CaseLineError where it is none."""
    if mode not in MODES:
        raise CaseLineError(f"mode={mode}: expected one of {', '.join(MODES)}")
    return mode


def frequencies(params: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    """Radians a position for every pair, float64 [n_dims / 2], frequency factors not yet applied.

    params  n_dims, freq_base, freq_scale, ext_factor, beta_fast, beta_slow, n_ctx_orig
    """
    return np.array([float(f) for f in _exact(params, _powers(params))])


def _powers(params: Mapping[str, Any]) -> range:
    return range(int(params["n_dims"]) // 2)


def _exact(params: Mapping[str, Any], powers: Sequence[int]) -> tuple[Decimal, ...]:
    """Radians a position for every pair; powers: of freq_base ^ (-2 / n_dims), one a pair."""
    return _table(tuple(powers), int(params["n_dims"]), int(params["n_ctx_orig"]), *(float(params[name]) for name in _OF_TABLE))


_OF_TABLE = ("freq_base", "freq_scale", "ext_factor", "beta_fast", "beta_slow")


@lru_cache(256)
def _table(
    powers: tuple[int, ...], n_dims: int, n_ctx_orig: int, base: float, freq_scale: float, ext_factor: float, fast: float, slow: float
) -> tuple[Decimal, ...]:
    """YaRN (ext_factor > 0) leaves pairs that turn more than beta_fast times within n_ctx_orig alone, scales those that turn less than
    beta_slow times by freq_scale, and goes over linearly between. Kept, since every layer of a plan asks for the same one."""
    plain = [constants.power(base, -2 * power, n_dims) for power in powers]
    with constants.exact():
        scale = Decimal(freq_scale)
        if ext_factor == 0.0:
            return tuple(f * scale for f in plain)

        def dim_of(turns: float) -> Decimal:
            return n_dims * (n_ctx_orig / (Decimal(turns) * 2 * constants.PI)).ln() / (2 * Decimal(base).ln())

        low, width = Decimal(0), NARROWEST
        if n_ctx_orig:  # within a context of nothing no pair turns
            low = max(low, dim_of(fast).to_integral_value(ROUND_FLOOR))
            high = min(Decimal(n_dims - 1), dim_of(slow).to_integral_value(ROUND_CEILING))
            width = max(NARROWEST, high - low)
        keep = [Decimal(ext_factor) * (1 - min(Decimal(1), max(Decimal(0), (pair - low) / width))) for pair in range(len(powers))]
        return tuple(f * (scale * (1 - k) + k) for f, k in zip(plain, keep, strict=True))


def mscale(params: Mapping[str, Any]) -> float:
    """Factor on cosine and sine: attn_factor, times YaRN's 1 + 0.1 ln(1 / freq_scale) where ext_factor > 0."""
    with constants.exact():
        factor = Decimal(float(params["attn_factor"]))
        if float(params["ext_factor"]) != 0.0:
            factor *= 1 - constants.log(float(params["freq_scale"])) / 10
        return float(factor)


def fixed_point(params: Mapping[str, Any], powers: Sequence[int] | None = None) -> list[int]:
    """Frequencies in turns a position, as 64-bit fractions of a turn. powers: of freq_base ^ (-2 / n_dims), one a pair; without them pair i
    has power i."""
    table = _exact(params, _powers(params) if powers is None else powers)
    with constants.exact():
        return [int((f / (2 * constants.PI) * 2**64).to_integral_value()) % 2**64 for f in table]


def table_defines(table: Sequence[int]) -> dict[str, str | int]:
    """The defines ROPE_PAIRS and ROPE_FREQUENCIES of shaders/rope/rope.glsl for such a table."""
    return {"ROPE_PAIRS": len(table), "ROPE_FREQUENCIES": ",".join(f"uvec2({t >> 32}u,{t & 0xFFFFFFFF}u)" for t in table)}
