"""Weight decoders of the codebook, ternary and NVFP4 types: every entry and every bit pattern, to the bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_paths import planned_for

from vkback import quants
from vkback.device import Device
from vkback.harness.runner import run_case, run_problem
from vkback.ops.case import Problem
from vkback.ops.codebooks import BYTE_SHIFTS, CODEBOOK_TYPES, code_words, shared_bytes
from vkback.ops.copies.rows import GetRows
from vkback.ops.lowering import Act, LowerContext
from vkback.ops.matmul.gemv import PROLOGUE_SHARED, prologue_problem
from vkback.ops.matmul.linear_cases import fused_case
from vkback.shader import ShaderLibrary

ROWS, K = 80, 2048
"""640 blocks of 256: 20480 look-ups at random meet each of IQ1's 2048 entries about ten times."""


def table(quant: str, rows: int, k: int) -> Problem:
    """All rows of a table of any quants that a file may hold."""
    problem = GetRows().build_case(quant, k, rows, rows, ids="spread").build()
    problem.values["ids"] = np.arange(rows, dtype=np.int32)
    raw = problem.values["table"]
    rng = np.random.default_rng(5)
    if quant == "NVFP4":
        raw[...] = rng.integers(0, 256, raw.shape, dtype=np.uint8)
    if quant == "TQ2_0":
        blocks = raw.reshape(-1, 66)
        blocks[:, :64] = rng.integers(0, 256, (len(blocks), 64), dtype=np.uint8)
    return problem


@pytest.mark.parametrize("quant", CODEBOOK_TYPES)
def test_code_words_hold_the_codebook(quant: str) -> None:
    grid = quants.codebook(quant)
    levels = np.unique(grid)
    words = np.array(code_words(quant), np.uint32)
    entries = np.stack([words & 0xFFFF, words >> 16], axis=1).ravel()
    bits = 2 if grid.shape[1] == 8 else 3
    shifts = [s + 2 * four for four in range(grid.shape[1] // 4) for s in BYTE_SHIFTS]
    np.testing.assert_array_equal(levels[entries[:, None] >> shifts & (1 << bits) - 1], grid)


def test_iq1_m_has_the_codebook_of_iq1_s() -> None:
    np.testing.assert_array_equal(quants.codebook("IQ1_M"), quants.codebook("IQ1_S"))


@pytest.mark.vulkan
@pytest.mark.parametrize("quant", [*CODEBOOK_TYPES, "IQ1_M", "TQ1_0", "TQ2_0", "NVFP4"])
def test_every_weight_is_decoded_to_the_bit(quant: str, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """d has 11 bits, scale and level 10 more at most: products and differences are exact in f32, whatever the order."""
    problem = table(quant, ROWS, K)
    got = run_problem(device, library, problem, ctx)["y"]
    np.testing.assert_array_equal(got, quants.decode(quant, problem.values["table"]))


@pytest.mark.vulkan
@pytest.mark.parametrize("quant", ["IQ2_XXS", "IQ3_XXS"])
def test_codebook_as_a_gpu_gets_it(quant: str, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """From the constant array, where CPU drivers otherwise have literals; the small books only, for the compiler's sake."""
    gpu = dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, device_type="discrete"))
    problem = table(quant, 8, K)
    got = run_problem(device, library, problem, gpu)["y"]
    np.testing.assert_array_equal(got, quants.decode(quant, problem.values["table"]))


@pytest.mark.parametrize(("quant", "gpu", "cpu"), [("IQ1_M", 8192, 4096), ("IQ2_S", 8192, 2048), ("IQ3_XXS", 1024, 512), ("Q4_K", 0, 0)])
def test_shared_memory_of_a_codebook_counts_in_the_prologue(quant: str, gpu: int, cpu: int) -> None:
    """A Q4_K product just fits its x into the H200's shared memory; a codebook beside it would not."""
    h200 = planned_for("nvidia_h200_linux")
    software = dataclasses.replace(h200.caps, device_type="cpu")
    assert (shared_bytes(quant, h200.caps), shared_bytes(quant, software)) == (gpu, cpu)
    room = h200.caps.max_shared_memory - PROLOGUE_SHARED
    k = room // 128 * 32
    said = prologue_problem(quant, k, 1, "float", h200)
    needs = f"{quant} with k = {k} needs {4 * k + gpu} bytes of shared memory, {h200.caps.name} has {h200.caps.max_shared_memory}"
    assert said == (needs if gpu else "")


@pytest.mark.vulkan
@pytest.mark.parametrize("act", ["f32", "q8_1"])
def test_codebook_beside_a_prologue(act: Act, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    case = fused_case("IQ2_XXS", 64, 512, 1, ("norm",), glu=True)
    outcome = run_case(device, library, case, dataclasses.replace(ctx, act=act))
    assert outcome.ok, outcome.text
