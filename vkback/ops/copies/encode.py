"""Encoding on the device (shaders/encode): rows of floats into rows of a quantized tensor, for SET_ROWS and CPY."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Tolerance
from vkback.ops.codebooks import in_pairs, layout_defines
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push, spread
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.storage import nbytes, weight_push
from vkback.ops.workgroup import workgroup_size
from vkback.quants.iq import IQ4_ORDER
from vkback.quants.mx import E2M1_ORDER
from vkback.shader import Variant

_UNITS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4")


def _ordered(order: Sequence[int]) -> dict[str, str | int]:
    """Defines for the device's order of codes, eight of four bits a word."""
    return {
        f"ORDER_{part}": f"0x{sum(code << 4 * i for i, code in enumerate(order[first : first + 8])):08x}u"
        for part, first in (("LOW", 0), ("HIGH", 8))
    }


_E2M1, _IQ4 = _ordered(E2M1_ORDER), _ordered(IQ4_ORDER)
_DEFINES: dict[str, dict[str, str | int]] = {
    "Q4_0": {},
    "Q4_1": {"LEVELS": "16.0"},
    "Q5_0": {"LEVELS": "32.0"},
    "Q5_1": {"LEVELS": "32.0"},
    "Q8_0": {},
    "IQ4_NL": _IQ4,
    "MXFP4": _E2M1,
    "NVFP4": _E2M1,
    "Q2_K": {"GROUPS": "16u", "MAX_LEVEL": "3.0", "MAX_SCALE": "15.0", "SPREADS": 19, "SPREAD_FIRST": "-0.9"},
    "Q3_K": {"GROUPS": "16u", "MIN_SCALE": "-32.0", "ZERO": "4.0"},
    "Q4_K": {"GROUPS": "8u", "MAX_LEVEL": "15.0", "MAX_SCALE": "63.0", "SPREADS": 25, "SPREAD_FIRST": "-1.5"},
    "Q5_K": {"GROUPS": "8u", "MAX_LEVEL": "31.0", "MAX_SCALE": "63.0", "SPREADS": 25, "SPREAD_FIRST": "-1.5"},
    "Q6_K": {"GROUPS": "16u", "MIN_SCALE": "-128.0", "ZERO": "32.0"},
    "IQ4_XS": {"GROUPS": "8u", "MIN_SCALE": "-32.0", **_IQ4},
    "TQ1_0": {},
    "TQ2_0": {},
    "Q1_0": {},
    "Q2_0": {},
}


def _codebook(
    groups: int, step: float, level: str, ratio: tuple[float, float], *, even: bool = False, max_scale: int = 15
) -> dict[str, str | int]:
    """Defines of shaders/encode/codebooks.glsl. step: of the scales d * (SCALE_OFFSET + SCALE_STEP * s), whose offset is half of it; ratio:
    first target and ratio."""
    return {
        "GROUPS": f"{groups}u",
        "SCALE_OFFSET": repr(step / 2),
        "SCALE_STEP": repr(step),
        "MAX_SCALE": f"{max_scale}.0",
        "LEVEL(C)": level,
        "EVEN": int(even),
        "TARGETS": "14u",
        "TARGET_FIRST": repr(ratio[0]),
        "TARGET_RATIO": repr(ratio[1]),
        "EITHER": 0,
    }


_IQ2_LEVEL, _IQ2_TARGETS = "float(8u + 17u * (C) + ((C) >> 1))", (7.0, 1.18)
_CODEBOOKS: dict[str, dict[str, str | int]] = {
    "IQ1_S": _codebook(8, 2.0, "(float(C) - 1.0)", (0.9, 1.1), max_scale=7),
    "IQ1_M": _codebook(16, 2.0, "(float(C) - 1.0)", (0.9, 1.1), max_scale=7) | {"EITHER": 1},
    "IQ2_XXS": _codebook(8, 0.25, _IQ2_LEVEL, _IQ2_TARGETS, even=True),
    "IQ2_XS": _codebook(16, 0.25, _IQ2_LEVEL, _IQ2_TARGETS, even=True),
    "IQ2_S": _codebook(16, 0.25, _IQ2_LEVEL, _IQ2_TARGETS),
    "IQ3_XXS": _codebook(8, 0.5, "float(4u + 8u * (C) + ((C) == 7u ? 2u : 0u))", (3.5, 1.27), even=True),
    "IQ3_S": _codebook(8, 2.0, "float(1u + 2u * (C))", (0.9, 1.27)),
}
ENCODED = (*_DEFINES, *_CODEBOOKS)
"""Types that the device encodes."""

STEPS: dict[str, float] = {
    "Q4_0": 1 / 8,
    "Q4_1": 2 / 15,
    "Q5_0": 1 / 16,
    "Q5_1": 2 / 31,
    "Q8_0": 1 / 127,
    "IQ4_NL": 24 / 113,
    "MXFP4": 1 / 2,
    "NVFP4": 1 / 3,
    "TQ1_0": 1.0,
    "TQ2_0": 1.0,
    "Q1_0": 1.0,
    "Q2_0": 1.0,
    "Q2_K": 2 / 3,
    "Q3_K": 2 / 7,
    "Q4_K": 2 / 15,
    "Q5_K": 2 / 31,
    "Q6_K": 2 / 63,
    "IQ4_XS": 24 / 113,
    "IQ1_S": 0.85,
    "IQ1_M": 0.85,
    "IQ2_XXS": 0.8,
    "IQ2_XS": 0.8,
    "IQ2_S": 0.55,
    "IQ3_XXS": 0.7,
    "IQ3_S": 0.3,
}
"""Between neighbouring levels at most, for values in +-1; of vector codebooks, whose entries say several levels at once, the largest error
that vkback.quants makes."""
UNIFORM_NMSE: dict[str, float] = {
    "Q4_0": 4.3e-3,
    "Q4_1": 3.7e-3,
    "Q5_0": 9.8e-4,
    "Q5_1": 8.5e-4,
    "Q8_0": 1.4e-5,
    "IQ4_NL": 3.8e-3,
    "MXFP4": 2.1e-2,
    "NVFP4": 1.0e-2,
    "TQ1_0": 0.242,
    "TQ2_0": 0.242,
    "Q1_0": 0.25,
    "Q2_0": 0.24,
    "Q2_K": 4.6e-2,
    "Q3_K": 1.43e-2,
    "Q4_K": 2.9e-3,
    "Q5_K": 6.9e-4,
    "Q6_K": 1.6e-4,
    "IQ4_XS": 3.8e-3,
    "IQ1_S": 0.145,
    "IQ1_M": 0.129,
    "IQ2_XXS": 0.103,
    "IQ2_XS": 7.5e-2,
    "IQ2_S": 4.9e-2,
    "IQ3_XXS": 2.9e-2,
    "IQ3_S": 1.4e-2,
}
"""What vkback.quants reaches for uniform values: the squared error over the values' energy."""
SAME_RULE = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0"})
"""Types of which the device takes the levels that vkback.quants takes, but for a value on the edge between two."""


_REACHED = "vkback.quants encodes uniform values with NMSE {:.1e}"


@dataclass(frozen=True)
class RowIds:
    """Rows of the target by ids. tensor: I32 or I64; size: ids along three axes, fastest first; limit: rows that ids choose among."""

    tensor: Tensor
    size: tuple[int, int, int]
    limit: int


def encoded(
    node: Node,
    ctx: LowerContext,
    x: Tensor,
    y: Tensor,
    counts: tuple[int, int, int],
    steps: tuple[int, int, int],
    first: int = 0,
    ids: RowIds | None = None,
) -> Dispatch:
    """One launch: row (i3, i2, i1) of x, F32 rows one after the other, to row first + i1 * steps[0] + i2 * steps[1] + i3 * steps[2] of y.

    counts  of i1, i2, i3. Raises PlanError for a type that is not encoded.
    """
    if y.type not in ENCODED:
        raise PlanError(f"[{node.op}] {node.name}: {y.type} is read, never written; types that are encoded are {', '.join(ENCODED)}")
    if first:
        raise PlanError(f"[{node.op}] {node.name}: {y}: a view of a quantized tensor must begin with its first row")
    k, rows = y.shape[-1], prod(counts)
    layout = quants.layout(y.type, prod(y.shape[:-1]), k)
    if layout.nbytes > ctx.caps.max_storage_buffer_range:
        limit = ctx.caps.max_storage_buffer_range
        raise PlanError(f"[{node.op}] {node.name}: {y} takes {layout.nbytes} bytes, the device binds at most {limit}")
    whole_group = y.type not in _UNITS
    block = {"Q1_0": 128, "Q2_0": 64}.get(y.type, 256 if whole_group else 32)
    blocks = rows * (k // block)
    choice = ctx.tuning.pick("copy", elements=blocks)
    # A group of 256 values searches scales for long: 16 threads share it. A smaller block is a thread's.
    wg = workgroup_size(ctx.caps, 16 if whole_group else min(choice["wg_size"], 64))
    defines = {
        "BLOCK": f"{block}u",
        "WHOLE_GROUP": int(whole_group),
        f"TYPE_{y.type}": 1,
        "WG_SIZE": wg,
        "ENCODE_FILE": f'"encode/{"codebooks" if y.type in _CODEBOOKS else "blocks" if whole_group else "units"}.glsl"',
        **layout_defines(in_pairs(y.type, y.shape[-1], ctx.tuning)),
        **(_of_codebook(y.type, ctx) if y.type in _CODEBOOKS else _DEFINES[y.type]),
    }
    words = 0 if ids is None else 2 if ids.tensor.type == "I64" else 1
    by_ids = (*ids.size, words, ids.limit) if ids else (1, 1, 1, 0, 0)
    return Dispatch(
        Variant.of("encode/encode.comp", defines),
        (Arg(x), Arg(y, "rw"), Arg(ids.tensor if ids else x)),
        pack_push(*weight_push(y.type, layout, k), k, rows, *counts[:2], *steps, *by_ids),
        spread(blocks if whole_group else ceil_div(blocks, wg)),
        node.op,
        node.name,
        f"{wg} threads, {'together a block' if whole_group else 'a unit each'}: {choice.source}",
        nbytes=nbytes(x) + rows * quants.row_bytes(y.type, k),
    )


def _of_codebook(kind: str, ctx: LowerContext) -> dict[str, str | int]:
    """Defines of a type with a vector codebook."""
    book = quants.quant(kind).codebook
    assert book is not None
    entries, values = book.grid().shape
    return {
        **_CODEBOOKS[kind],
        "ENTRIES": f"{entries}u",
        "PER_ENTRY": values,
        "CODEBOOK_LITERALS": int(ctx.caps.software),
        "CODES_FILE": f'"generated/{book.name.lower()}_codes.glsl"',
    }


def loose(kind: str) -> Tolerance:
    """How far encoded values may be from uniform ones that they were made of."""
    if kind in _CODEBOOKS:
        why = "the same search, of few values, gives 1.15 of that; 2.2 of its largest error, as a sign is wrong where seven stand for eight"
        return Tolerance(1.15 * UNIFORM_NMSE[kind], 2.2 * STEPS[kind], f"{_REACHED.format(UNIFORM_NMSE[kind])}; {why}")
    return Tolerance(
        1.4 * UNIFORM_NMSE[kind],
        (2.2 if kind in SAME_RULE else 3.5) * STEPS[kind],
        f"{_REACHED.format(UNIFORM_NMSE[kind])}, few values and a simpler search give 1.4 of that; "
        f"off by a step of {STEPS[kind]:.2g} of the range at most, which is two rms, and as much for scales in few bits",
    )


def tight(kind: str, source: str, elements: int) -> Tolerance:
    """How far values of a type `source` that the device encodes may be from those of vkback.quants."""
    share = 4 / elements + {"BF16": 1 / 400, "F16": 1 / 2000}.get(source, 0.0)
    why = "four values (of BF16 one in 400, of F16 one in 2000: many are halfway) may go to another level; F16 scales either way"
    return Tolerance(1e-6 + 4 * share * STEPS[kind] ** 2, 2.2 * STEPS[kind], why)


def as_encoded(kind: str, values: Array) -> Array:
    """Values as vkback.quants encodes and decodes them."""
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    return quants.decode(kind, quants.encode(kind, rows)).reshape(values.shape)
