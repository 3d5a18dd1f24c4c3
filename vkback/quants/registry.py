"""All types by name, and decode, encode and random blocks of any of them.

A new type is a codec in one of the modules of `FAMILIES`, or a module of its own and its name there: docs/adding_a_quant_type.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module

import numpy as np
import numpy.typing as npt

from vkback.quants.codec import F32, U8, Codec
from vkback.quants.iq import OTHER_LAYOUTS
from vkback.quants.quant_type import QuantRangeError, QuantShapeError, QuantType, UnknownQuant

FAMILIES = ("floats", "legacy", "k_quants", "iq", "mx", "codebooks", "ternary", "low_bit")
"""Modules of this package with codecs (`CODECS`), in the order in which types are listed."""

_CODECS: dict[str, Codec] = {c.type.name: c for family in FAMILIES for c in import_module(f"vkback.quants.{family}").CODECS}

QUANTS: dict[str, QuantType] = {name: c.type for name, c in _CODECS.items()}
"""Every known type by its GGUF name."""

PAIRED: dict[str, str] = {name: c.type.name for name, c in OTHER_LAYOUTS.items()}
"""Types with a second device layout, in which their codes lie in pairs: the name that repacking has for it."""

_CODECS |= {c.type.name: c for c in OTHER_LAYOUTS.values()}

WEIGHT_TYPES: tuple[str, ...] = tuple(name for name, t in QUANTS.items() if t.planes)
"""Types that weights on the device have: all but that of activations."""

_CHUNK_VALUES = 1 << 15
"""Weights handled at once: temporaries of a few times 128 KiB stay in a second-level cache."""


def codec(name: str) -> Codec:
    """Of a type, or of a second layout by the name that PAIRED has for it. Raises UnknownQuant."""
    return _CODECS.get(name) or _CODECS[quant(name).name]


def quant(name: str) -> QuantType:
    """The type called `name`. Raises UnknownQuant."""
    found = QUANTS.get(name)
    if found is None:
        raise UnknownQuant(f"[quants] unknown type {name!r}; known: {', '.join(QUANTS)}")
    return found


def codebook(name: str) -> npt.NDArray[np.int8]:
    """The codebook of a type, int8 [entries, 8] (IQ1, IQ2) or [entries, 4] (IQ3). Raises UnknownQuant for types without one."""
    book = QUANTS[name].codebook if name in QUANTS else None
    if book is None:
        having = sorted((len(t.codebook.grid()), name) for name, t in QUANTS.items() if t.codebook)
        raise UnknownQuant(f"[quants] {name!r} has no codebook; those that have: {', '.join(name for _, name in having)}")
    return book.grid()


def row_bytes(name: str, k: int, tensor: str = "") -> int:
    """Bytes of a row of k weights in the file. Raises QuantShapeError, naming `tensor`, when k does not divide into blocks."""
    return quant(name).row_bytes(k, tensor)


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def decode(name: str, raw: npt.NDArray[np.uint8]) -> F32:
    """Blocks of the file, uint8 [..., row_bytes], as float32 [..., k], bit for bit as ggml computes them."""
    c = codec(name)
    t = c.type
    if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % t.block_bytes:
        raise QuantShapeError(
            f"[quants] {name} takes uint8 rows of whole blocks ({t.block_bytes} bytes), got {raw.dtype} {list(raw.shape)}"
        )
    blocks = np.ascontiguousarray(raw).reshape(-1, t.block_bytes)
    out = np.empty((len(blocks), t.block_values), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # any bytes are valid, also scales of inf and nan
        for part in _chunks(len(blocks), max(1, _CHUNK_VALUES // t.block_values)):
            out[part] = c.decode(blocks[part])
    return out.reshape(*raw.shape[:-1], raw.shape[-1] // t.block_bytes * t.block_values)


def unsound_row(name: str, raw: npt.NDArray[np.uint8]) -> int | None:
    """The first of rows uint8 [rows, row_bytes] with a weight that is NaN or infinite, None when all are numbers. Costs little beside
    anything else that is done with them: of a quantized block it looks at the scales alone."""
    c = codec(name)
    blocks = raw.reshape(-1, c.type.block_bytes)
    for part in _chunks(len(blocks), max(1, 8 * _CHUNK_VALUES // c.type.block_values)):
        found = c.unsound(blocks[part])
        if found.any():
            block = int(part.start) + int(found.argmax())
            return int(block // (raw.shape[-1] // c.type.block_bytes))
    return None


def coarse(name: str, raw: npt.NDArray[np.uint8]) -> bool:
    """Whether rows uint8 [rows, row_bytes] have too large a quantization step to be decoded by way of subnormal f16 (`Codec.coarse`); as
    cheap as `unsound_row`."""
    c = codec(name)
    blocks = raw.reshape(-1, c.type.block_bytes)
    return any(c.coarse(blocks[part]) for part in _chunks(len(blocks), max(1, 8 * _CHUNK_VALUES // c.type.block_values)))


def beyond_f16(name: str, raw: npt.NDArray[np.uint8]) -> bool:
    """Whether kernels that make f16 of rows uint8 [rows, row_bytes] may overflow (`Codec.beyond_f16`); as cheap as `unsound_row`."""
    c = codec(name)
    blocks = raw.reshape(-1, c.type.block_bytes)
    return any(c.beyond_f16(blocks[part]) for part in _chunks(len(blocks), max(1, 8 * _CHUNK_VALUES // c.type.block_values)))


def encode(name: str, x: npt.NDArray[np.float32], importance: npt.NDArray[np.float32] | None = None) -> U8:
    """float32 [rows, k] -> blocks of the file, uint8 [rows, row_bytes].

    importance  weights > 0 of the squared error, [k] or [rows, k]; None weighs all alike. Floats and Q8 ignore it.
    Raises QuantShapeError when k does not divide into blocks. Values must be finite. Scales end at the largest f16, so that blocks never
    hold an infinite weight; what F16 or BF16 cannot hold becomes infinite, as by IEEE 754. `encode_weights` refuses either.
    """
    c = codec(name)
    t = c.type
    if x.dtype != np.float32 or x.ndim != 2:
        raise QuantShapeError(f"[quants] {name} encodes float32 [rows, k], got {x.dtype} {list(x.shape)}")
    width = t.row_bytes(x.shape[1])
    values = np.ascontiguousarray(x).reshape(-1, t.block_values)
    weights = None
    if importance is not None:
        if importance.shape not in (x.shape, x.shape[1:]):
            raise QuantShapeError(
                f"[quants] importance is float32 [{x.shape[1]}] or {list(x.shape)}, like the weights, got {list(importance.shape)}"
            )
        weights = np.ascontiguousarray(np.broadcast_to(importance.astype(np.float32), x.shape)).reshape(-1, t.block_values)
    out = np.empty((len(values), t.block_bytes), np.uint8)
    for part in _chunks(len(values), max(1, _CHUNK_VALUES // t.block_values)):
        out[part] = c.encode(values[part], None if weights is None else weights[part])
    return out.reshape(len(x), width)


def encode_weights(name: str, x: npt.NDArray[np.float32], tensor: str) -> U8:
    """`encode` for weights that are kept. Raises QuantRangeError, naming `tensor`, where one is no number, or is too large for the type.

    Next to its weights, the error of a type is the same however large they are, until its scales end: where they may, it is compared with
    that of the weights times a power of two that makes the largest about one.
    """
    largest = float(np.abs(x).max(initial=0.0))
    if not np.isfinite(largest):
        raise QuantRangeError(f"[quants] {tensor}: a weight is {'NaN' if np.isnan(largest) else 'infinite'}; expected numbers")
    with np.errstate(over="ignore", invalid="ignore"):  # sums of squares, where the answer is an error
        raw = encode(name, x)
        if largest > MIN_LIMIT:
            down = np.ldexp(np.float32(1), -int(np.log2(largest)))
            small = x * down
            found, possible = (
                float(np.sum(np.square(got.astype(np.float64) - small)))
                for got in (decode(name, raw) * down, decode(name, encode(name, small)))
            )
            if not found <= 1.1 * possible:
                raise QuantRangeError(
                    f"[quants] {tensor}: weights of up to {largest:.3g} are beyond what {name} holds; take a type of wider range, as F32"
                )
    return raw


MIN_LIMIT = 2688
"""Up to this every type holds weights: the largest of NVFP4, 448 * 6. Scales in f16 go to 65504 and further."""


def _random_chunk(c: Codec, rng: np.random.Generator, blocks: U8, scale: float) -> None:
    nbytes = blocks.size
    words = rng.integers(0, 1 << 64, -(-nbytes // 8), dtype=np.uint64)
    blocks.reshape(-1)[...] = words.view(np.uint8)[:nbytes]
    c.randomize(blocks, scale)


@cache
def _random_scale(name: str, std: float) -> float:
    """The scale for `randomize` that gives weights of standard deviation `std`: measured, since it is nearly proportional."""
    c = codec(name)
    rng = np.random.default_rng(0)
    blocks = np.empty((1 + (1 << 18) // c.type.block_values, c.type.block_bytes), np.uint8)
    scale = std
    for _ in range(3):
        _random_chunk(c, rng, blocks, scale)
        scale *= std / float(c.decode(blocks).std())
    return scale


def random_blocks(name: str, rows: int, k: int, rng: np.random.Generator, std: float = 0.02) -> U8:
    """Random weights made as blocks, uint8 [rows, row_bytes]: finite, mean about 0, standard deviation about `std`.

    Every bit pattern of the quants occurs; super-scales vary by half. Meant for models of real size without real weights.
    """
    c = codec(name)
    width = c.type.row_bytes(k)
    scale = _random_scale(name, std)
    out = np.empty((rows * (width // c.type.block_bytes), c.type.block_bytes), np.uint8)
    for part in _chunks(len(out), max(1, 8 * _CHUNK_VALUES // c.type.block_values)):
        _random_chunk(c, rng, out[part], scale)
    return out.reshape(rows, width)
