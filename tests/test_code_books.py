"""Weight decoders of the code book, ternary and NVFP4 types: every entry and every bit pattern, to the bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from vkback import quants
from vkback.device import Device
from vkback.harness.runner import run_problem
from vkback.ops.base import LowerContext, Problem
from vkback.ops.code_books import BYTE_SHIFTS, CODED, code_words
from vkback.ops.rows import GetRows
from vkback.shader import ShaderLibrary

ROWS, K = 80, 2048
"""640 blocks of 256: 20480 look-ups at random meet each of IQ1's 2048 entries about ten times."""


def table(quant: str, rows: int, k: int) -> Problem:
    """All rows of a table of any quants that a file may hold."""
    problem = GetRows().case(quant, rows, k, tuple(range(rows))).build()
    raw = problem.values["table"]
    rng = np.random.default_rng(5)
    if quant == "NVFP4":
        raw[...] = rng.integers(0, 256, raw.shape, dtype=np.uint8)
    if quant == "TQ2_0":
        blocks = raw.reshape(-1, 66)
        blocks[:, :64] = rng.integers(0, 256, (len(blocks), 64), dtype=np.uint8)
    return problem


@pytest.mark.parametrize("quant", CODED)
def test_code_words_hold_the_code_book(quant: str) -> None:
    grid = quants.codebook(quant)
    levels = np.unique(grid)
    words = np.array(code_words(quant), np.uint32)
    entries = np.stack([words & 0xFFFF, words >> 16], axis=1).ravel()
    bits = 2 if grid.shape[1] == 8 else 3
    shifts = [s + 2 * four for four in range(grid.shape[1] // 4) for s in BYTE_SHIFTS]
    np.testing.assert_array_equal(levels[entries[:, None] >> shifts & (1 << bits) - 1], grid)


def test_iq1_m_has_the_code_book_of_iq1_s() -> None:
    np.testing.assert_array_equal(quants.codebook("IQ1_M"), quants.codebook("IQ1_S"))


@pytest.mark.vulkan
@pytest.mark.parametrize("quant", [*CODED, "IQ1_M", "TQ1_0", "TQ2_0", "NVFP4"])
def test_every_weight_is_decoded_to_the_bit(quant: str, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """d has 11 bits, scale and level 10 more at most: products and differences are exact in f32, whatever the order."""
    problem = table(quant, ROWS, K)
    got = run_problem(device, library, problem, ctx)["y"]
    np.testing.assert_array_equal(got, quants.decode(quant, problem.values["table"]))


@pytest.mark.vulkan
@pytest.mark.parametrize("quant", ["IQ2_XXS", "IQ3_XXS"])
def test_code_book_as_a_gpu_gets_it(quant: str, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """From the constant array, where CPU drivers otherwise have literals; the small books only, for the compiler's sake."""
    gpu = dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, device_type="discrete"))
    problem = table(quant, 8, K)
    got = run_problem(device, library, problem, gpu)["y"]
    np.testing.assert_array_equal(got, quants.decode(quant, problem.values["table"]))
