"""The device layout, against the words of docs/weight_layout.md read one weight at a time, and the registry."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from vkback import quants
from vkback.quants import QUANTS, QuantShapeError, UnknownQuant

WEIGHT_TYPES = [name for name, t in QUANTS.items() if t.planes]
LAYOUTS = [*((name, name) for name in WEIGHT_TYPES), *quants.PAIRED.items()]
"""Types, and what repacking calls their layouts on the device."""
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_ORDER = (1, 3, 11, 10, 15, 14, 5, 7, 0, 9, 2, 13, 12, 4, 6, 8)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def f16(data: bytes, at: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", data, at)[0])


def nibble(qs: bytes, j: int) -> int:
    """Byte j holds value j low, value j + 16 high."""
    return qs[j] & 15 if j < 16 else qs[j - 16] >> 4


def flipped(qs: bytes, j: int) -> int:
    """As `nibble`, the top bit of the high one flipped."""
    return nibble(qs, j) ^ (8 if j >= 16 else 0)


def crumb(qs: bytes, j: int) -> int:
    """Word h, bits 8b + 2i hold value 16h + 4i + b."""
    word = struct.unpack_from("<I", qs, 4 * (j // 16))[0]
    i, b = j % 16 // 4, j % 4
    return int(word >> (8 * b + 2 * i) & 3)


def q2_crumb(qs: bytes, j: int) -> int:
    """Byte b of word w: values 8w + b, 16 + 8w + b, 8w + 4 + b, 16 + 8w + 4 + b at bits 0, 2, 4, 6."""
    half, i, b = j // 16, j % 16 // 4, j % 4
    return qs[4 * (i // 2) + b] >> (4 * (i % 2) + 2 * half) & 3


def q3_number(words: bytes, j: int) -> int:
    """Byte b of word w: values 4w + b, 16 + 4w + b at bits 0 and 3; 12 + b and 28 + b where the words have bits left."""
    half, i, b = j // 16, j % 16 // 4, j % 4
    if i < 3:
        return words[4 * i + b] >> 3 * half & 7
    return words[8 * half + b] >> 6 | (words[4 + b] >> (6 + half) & 1) << 2


def q5_number(words: bytes, j: int) -> int:
    """Byte b of word w: value 4w + b at bits 0..4; 20 + b, 24 + b and 28 + b where the five words have bits left."""
    i, b = divmod(j, 4)
    if i < 5:
        return words[4 * i + b] & 31
    if i < 7:
        first = 8 * (i - 5)
        return words[first + b] >> 5 | (words[first + 4 + b] >> 5 & 3) << 3
    return words[16 + b] >> 5 | words[4 + b] >> 7 << 3 | words[12 + b] >> 7 << 4


def q6_number(words: bytes, j: int) -> int:
    """Three words for each half: byte b of word w has value 4w + b at bits 0..5; two bits of 12 + b are at the top of each."""
    half, i, b = j // 16, j % 16 // 4, j % 4
    bytes_ = [words[12 * half + 4 * w + b] for w in range(3)]
    return bytes_[i] & 63 if i < 3 else sum(byte >> 6 << 2 * w for w, byte in enumerate(bytes_))


def e2m1(qs: bytes, j: int) -> float:
    """Bits b3 b2 b1 b0 of a nibble: 3 (b2^b1)(b1^b0) + (~b3)(b3^b2)(~b1)(b1^(b0&b2)) - 12."""
    b3, b2, b1, b0 = (nibble(qs, j) >> n & 1 for n in (3, 2, 1, 0))
    small = 2 * (b2 ^ b1) + (b1 ^ b0)
    large = 8 * (1 - b3) + 4 * (b3 ^ b2) + 2 * (1 - b1) + (b1 ^ b0 & b2)
    return float(3 * small + large - 12)


def iq4_code(qs: bytes, j: int) -> int:
    """The code of the file whose device code has bit k at bit 8b + i of word k, j = 4i + b."""
    return IQ4_ORDER.index(sum(bit(qs[4 * k : 4 * k + 4], j) << k for k in range(4)))


def iq4_paired_code(qs: bytes, j: int) -> int:
    """Byte 4w + 2h + p holds values 16h + 4w + p, low, and that + 2, high."""
    h, w, high, p = j // 16, j // 4 % 4, j // 2 % 2, j % 2
    return IQ4_ORDER.index(qs[4 * w + 2 * h + p] >> 4 * high & 15)


def bit(qh: bytes, j: int) -> int:
    """Bit 8b + i holds value 4i + b."""
    i, b = divmod(j, 4)
    return int(struct.unpack("<I", qh)[0] >> (8 * b + i) & 1)


def head_pair(head: bytes, j: int) -> tuple[int, int]:
    """Scale and min j of the 16-byte head of Q4_K and Q5_K."""
    _, *low, top = struct.unpack("<4I", head)
    scale, least = (low[j // 4] >> (16 * half + 4 * (j % 4)) & 15 | (top >> (16 * half + 2 * j) & 3) << 4 for half in (0, 1))
    return scale, least


def weight(name: str, unit: list[bytes], block: list[bytes], u: int, j: int) -> np.float32:
    """Value j of a unit. `unit`: the unit's bytes of each plane; `block`: those of its 256 weights; u: which unit of the 256."""
    one = np.float32
    match name:
        case "F32":
            return one(struct.unpack_from("<f", unit[j // 4], 4 * (j % 4))[0])
        case "F16":
            return f16(unit[j // 8], 2 * (j % 8))
        case "BF16":
            return one(struct.unpack("<f", b"\0\0" + unit[j // 8][2 * (j % 8) :][:2])[0])
        case "Q4_0":
            return f16(unit[1], 0) * one(flipped(unit[0], j) - 8)
        case "IQ4_NL" | "IQ4_NL_PAIRS":
            code = iq4_paired_code if name == "IQ4_NL_PAIRS" else iq4_code
            return f16(unit[1], 0) * one(IQ4_LEVELS[code(unit[0], j)])
        case "Q4_1":
            return f16(unit[1], 0) * one(flipped(unit[0], j)) + f16(unit[1], 2)
        case "Q5_0":
            return f16(unit[2], 0) * one((nibble(unit[0], j) | bit(unit[1], j) << 4) - 16)
        case "Q5_1":
            return f16(unit[2], 0) * one(nibble(unit[0], j) | bit(unit[1], j) << 4) + f16(unit[2], 2)
        case "Q8_0":
            return f16(unit[2], 0) * one(struct.unpack_from("b", unit[j // 16], j % 16)[0])
        case "Q2_K":
            s = unit[1][j // 16]
            return f16(block[2], 0) * one(s & 15) * one(q2_crumb(unit[0], j)) - f16(block[2], 2) * one(s >> 4)
        case "Q3_K":
            s = 2 * u + j // 16
            scale = block[2][s // 2] >> 4 * (s % 2) & 15 | (struct.unpack_from("<I", block[2], 8)[0] >> 2 * s & 3) << 4
            return f16(block[3], 0) * one(scale - 32) * one(q3_number(unit[0] + unit[1], j) - 4)
        case "Q4_K":
            scale, low = head_pair(block[1], u)
            return f16(block[1], 0) * one(scale) * one(flipped(unit[0], j)) - f16(block[1], 2) * one(low)
        case "Q5_K":
            scale, low = head_pair(block[2], u)
            return f16(block[2], 0) * one(scale) * one(q5_number(unit[0] + unit[1], j)) - f16(block[2], 2) * one(low)
        case "Q6_K":
            scale = struct.unpack_from("b", unit[2], j // 16)[0]
            return f16(block[3], 0) * one(scale) * one(q6_number(unit[0] + unit[1], j) - 32)
        case "MXFP4":
            return one(2.0 ** (unit[1][0] - 128)) * one(e2m1(unit[0], j))
        case "IQ4_XS" | "IQ4_XS_PAIRS":
            code = iq4_paired_code if name == "IQ4_XS_PAIRS" else iq4_code
            high, low = struct.unpack_from("<HI", block[1], 2)
            scale = low >> 4 * u & 15 | (high >> 2 * u & 3) << 4
            return f16(block[1], 0) * one(scale - 32) * one(IQ4_LEVELS[code(unit[0], j)])
        case "NVFP4":
            return one(ue4m3(unit[1][j // 16]) / 2) * one(e2m1(unit[0], j))
        case "TQ2_0":
            return f16(block[1], 0) * one(crumb(unit[0], j) - 1)
        case "Q1_0":
            return f16(block[1], 2 * (u // 4)) * one(2 * bit(unit[0], j) - 1)
        case "Q2_0":
            return f16(block[1], 2 * (u // 2)) * one(crumb(unit[0], j) - 1)
        case "TQ1_0":
            return f16(block[4], 0) * one(trit(block, 32 * u + j) - 1)
        case _:
            return codebook_weight(name, unit, block, u, j)


def test_a_type_without_a_case_is_named() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"add a case for Q9_9 to weight\(\) in test_quants_layout\.py"):
        weight("Q9_9", [], [], 0, 0)


def ue4m3(code: int) -> float:
    if code in (0, 0x7F):
        return 0.0
    exponent, fraction = code >> 3 & 15, code & 7
    return fraction / 512 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)


def trit(block: list[bytes], v: int) -> int:
    """Value v of the 256, 0..2: digit m of a byte, after m digits have been shifted out."""
    data = b"".join(block[:4])
    if v < 160:
        m, byte = divmod(v, 32)
    elif v < 240:
        m, byte = (v - 160) // 16, 32 + v % 16
    else:
        m, byte = (v - 240) // 4, 48 + v % 4
    return (int(data[byte]) * int(3**m) % 256) * 3 >> 8


def minus(signs: int, i: int) -> int:
    return -1 if signs >> i & 1 else 1


def even_sign(code: int, i: int) -> int:
    """Seven bits; the eighth makes the number of minus signs even."""
    return minus(code | (code.bit_count() & 1) << 7, i)


def codebook_weight(name: str, unit: list[bytes], block: list[bytes], u: int, j: int) -> np.float32:
    one = np.float32
    eight, i = divmod(j, 8)
    try:
        grid = quants.codebook(name)
    except quants.UnknownQuant:
        pytest.fail(f"add a case for {name} to weight() in {Path(__file__).name}: how a value lies in the units of its planes")
    match name:
        case "IQ2_XXS":
            word = struct.unpack_from("<I", unit[0], 4)[0]
            scale = f16(block[1], 0) * one(0.5 + (word >> 28)) * one(0.25)
            return scale * one(grid[unit[0][eight], i] * even_sign(word >> 7 * eight & 127, i))
        case "IQ2_XS":
            code = struct.unpack_from("<H", unit[0], 2 * eight)[0]
            scale = f16(block[2], 0) * one(0.5 + (unit[1][0] >> 4 * (j // 16) & 15)) * one(0.25)
            return scale * one(grid[code & 511, i] * even_sign(code >> 9, i))
        case "IQ2_S":
            index = unit[0][eight] | (unit[1][0] >> 2 * eight & 3) << 8
            scale = f16(block[2], 0) * one(0.5 + (unit[1][1] >> 4 * (j // 16) & 15)) * one(0.25)
            return scale * one(grid[index, i] * minus(unit[0][4 + eight], i))
        case "IQ3_XXS":
            word = struct.unpack("<I", unit[1])[0]
            scale = f16(block[2], 0) * one(0.5 + (word >> 28)) * one(0.5)
            return scale * one(grid[unit[0][j // 4], j % 4] * even_sign(word >> 7 * eight & 127, i))
        case "IQ3_S":
            index = unit[0][j // 4] | (unit[2][0] >> j // 4 & 1) << 8
            scale = f16(block[4], 0) * one(1 + 2 * (block[3][u // 2] >> 4 * (u % 2) & 15))
            return scale * one(grid[index, j % 4] * minus(unit[1][eight], i))
        case "IQ1_S":
            high = struct.unpack("<H", unit[1])[0]
            scale = f16(block[2], 0) * one(1 + 2 * (high >> 12 & 7))
            return scale * one(grid[unit[0][eight] | (high >> 3 * eight & 7) << 8, i] + minus(high, 15) * 0.125)
        case "IQ1_M":
            words = struct.unpack("<4H", block[2])
            d = struct.pack("<H", sum(w >> 12 << 4 * n for n, w in enumerate(words)))
            scale = f16(d, 0) * one(1 + 2 * (words[u // 2] >> 3 * (2 * (u % 2) + j // 16) & 7))
            high = unit[1][eight // 2] >> 4 * (eight % 2)
            return scale * one(grid[unit[0][eight] | (high & 7) << 8, i] + minus(high, 3) * 0.125)
    raise AssertionError(name)


def decode_device(name: str, layout: str, tensor: bytes, rows: int, k: int) -> np.ndarray:
    """A tensor of the device layout, weight by weight."""
    place = quants.layout(name, rows, k)
    planes = QUANTS[name].planes
    out = np.empty((rows, k), np.float32)
    for row in range(rows):
        for col in range(k):

            def piece(values: int, row: int = row, col: int = col) -> list[bytes]:
                pieces = []
                for plane, where in zip(planes, place.planes, strict=True):
                    nbytes = plane.nbytes * max(values // plane.values, 0)
                    at = where.offset + row * where.row_bytes + col // values * nbytes
                    pieces.append(tensor[at : at + nbytes])
                return pieces

            out[row, col] = weight(layout, piece(32), piece(256) if k % 256 == 0 else [], col // 32 % 8, col % 32)
    return out


def finite_blocks(name: str, rows: int, k: int, seed: int) -> np.ndarray:
    """Random bytes, with the blocks that decode to inf or nan zeroed."""
    t = QUANTS[name]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, t.row_bytes(k)), dtype=np.uint8)
    blocks = raw.reshape(-1, t.block_bytes)
    blocks[~np.isfinite(quants.decode(name, blocks)).all(axis=1)] = 0
    return raw


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_device_layout_holds_the_weights_where_the_document_says(name: str, layout: str) -> None:
    rows, k = 3, 512
    raw = finite_blocks(name, rows, k, seed=3)
    got = decode_device(name, layout, quants.to_device(layout, raw, k).tobytes(), rows, k)
    want = quants.decode(name, raw)
    assert want.any()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (5, 3), (700, 4)])
def test_unpack_undoes_repack(name: str, layout: str, rows: int, blocks: int) -> None:
    k = blocks * max(QUANTS[name].block_values, 32)
    raw = np.random.default_rng(rows).integers(0, 256, (rows, QUANTS[name].row_bytes(k)), dtype=np.uint8)
    planes = quants.repack(layout, raw, k)
    assert [p.shape for p in planes] == [(rows, p.row_bytes) for p in quants.layout(name, rows, k).planes]
    np.testing.assert_array_equal(quants.unpack(layout, planes, k), raw)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_rows_are_padded_with_zeros_to_a_unit(name: str) -> None:
    rows, k = 3, 45
    raw = np.random.default_rng(0).integers(1, 256, (rows, QUANTS[name].row_bytes(k)), dtype=np.uint8)
    planes = quants.repack(name, raw, k)
    wide = quants.unpack(name, planes, 64)
    np.testing.assert_array_equal(wide[:, : raw.shape[1]], raw)
    assert not wide[:, raw.shape[1] :].any()
    np.testing.assert_array_equal(quants.unpack(name, planes, k), raw)


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_rows_repacked_in_cuts_give_the_same_planes(name: str) -> None:
    raw = quants.random_blocks(name, 7, 512, np.random.default_rng(1))
    whole = quants.repack(name, raw, 512)
    pieces = [np.zeros_like(p) for p in whole]
    for cut in (slice(0, 2), slice(2, 7)):
        quants.repack(name, raw[cut], 512, out=[p[cut] for p in pieces])
    for a, b in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", WEIGHT_TYPES)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_planes_are_aligned_in_order_and_no_larger_than_the_file(name: str, rows: int) -> None:
    place = quants.layout(name, rows, 768)
    end = 0
    for plane in place.planes:
        assert plane.offset % 16 == 0
        assert end <= plane.offset < end + 16
        end = plane.offset + rows * plane.row_bytes
    assert place.nbytes % 16 == 0
    assert sum(p.row_bytes for p in place.planes) == quants.row_bytes(name, 768)
    assert place.nbytes < rows * quants.row_bytes(name, 768) + 16 * len(place.planes)


def test_part_stride_is_the_distance_of_the_16_byte_parts() -> None:
    assert quants.layout("Q8_0", 5, 96).part_stride == 5 * 3 * 16
    assert quants.layout("F32", 5, 96).part_stride == 5 * 3 * 16
    assert quants.layout("Q4_K", 5, 256).part_stride == 0


@pytest.mark.parametrize("name", ["Q6_K", "MXFP4", "Q8_0"])
def test_repack_takes_unaligned_and_strided_rows(name: str) -> None:
    raw = quants.random_blocks(name, 4, 512, np.random.default_rng(2))
    memory = np.zeros((4, raw.shape[1] + 1), np.uint8)
    memory[:, 1:] = raw
    want = quants.to_device(name, raw, 512)
    np.testing.assert_array_equal(quants.to_device(name, memory[:, 1:], 512), want)
    flat = np.concatenate([np.zeros(1, np.uint8), raw.ravel()])
    np.testing.assert_array_equal(quants.to_device(name, flat[1:].reshape(raw.shape), 512), want)


def test_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(UnknownQuant, match=r"unknown type 'Q7_K'; known: F32, F16, BF16, Q4_0, .*MXFP4"):
        quants.quant("Q7_K")


def test_row_of_a_broken_block_names_tensor_type_and_block() -> None:
    with pytest.raises(QuantShapeError, match=r"\[blk.3.ffn_down.weight\] 5000 columns is not a multiple of the Q4_K block \(256\)"):
        quants.row_bytes("Q4_K", 5000, "blk.3.ffn_down.weight")
    assert quants.row_bytes("Q4_K", 512) == 288


def test_wrong_row_width_says_what_was_expected() -> None:
    with pytest.raises(QuantShapeError, match=r"Q8_0 rows of 64 weights are uint8 \[rows, 68\], got uint8 \[2, 34\]"):
        quants.repack("Q8_0", np.zeros((2, 34), np.uint8), 64)
    with pytest.raises(QuantShapeError, match=r"plane d takes contiguous uint8 \[2, 4\], got uint8 \[2, 5\]"):
        quants.repack("Q8_0", np.zeros((2, 68), np.uint8), 64, out=[np.zeros((2, n), np.uint8) for n in (32, 32, 5)])
    with pytest.raises(QuantShapeError, match="Q8_1 has no device layout for weights"):
        quants.layout("Q8_1", 1, 32)
