"""Engines whose prompts go through one kind of GEMM, whatever the tables say; prompts in several pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vkback.device import Capabilities, Device
from vkback.engine import engine as engine_module
from vkback.engine.engine import Engine
from vkback.ops.cooperative_matrix import matrix_shape
from vkback.ops.lowering import Act
from vkback.ops.matmul.gemm_problem import GemmKernel, default_shape
from vkback.tuning.lookup import Overrides, Tuning

ACTS: dict[GemmKernel, Act] = {"f32": "f32", "coop_mat": "auto", "coop_reg": "auto", "int_dot": "q8_1"}

KERNEL_NMSE: dict[GemmKernel, float] = {"f32": 1e-6, "coop_mat": 1e-4, "coop_reg": 3e-4, "int_dot": 3e-4}
"""Prompt logits against float64.

f32: sums leave 1e-14 to 1e-11; a key or value on the edge between two F16 falls the other way now and then, up to 2e-9.

coop_mat: weights and activations are rounded to f16, each by 2^-24 / 3 of its energy at most (half a step is 2^-11 of the value where
values are small in their binade, less elsewhere), 4e-8 a product. What a block adds to the residual stream has gone through three products
in a row (norm to q and k to attention, or gate and up to GLU to down). Softmax passes the error of a logit on times the logit's size: at
logits of 10 rms, its square is 100 times as large. silu(gate) * up: six times (tests/device/test_gemm.py). So a block is off by
(100 + 6) * 4e-8 = 4e-6, and of the residual stream, to which all blocks add, the errors are in the same proportion as long as blocks are
independent. The last norm and head add 4e-8. What is left to 1e-4 is for depth, where errors pass through later blocks: 24 times. Measured
here 6e-8 to 6e-7.

coop_reg: as coop_mat. What no GEMM in registers takes goes through the GEMV kernels, which round activations to 8 bits where they can.

int_dot: activations in 8 bits, an NMSE of 1.5e-5 to 4e-5 of each product (vkback/ops/matmul/linear.py), some thirty in a row, each diluted
in the residual stream."""


def kernel_params(kernel: GemmKernel, caps: Capabilities) -> dict[str, dict[str, Any]]:
    """Tuning parameters by family that choose a kernel for programs of any size."""
    if kernel == "coop_mat":
        s = default_shape(kernel, 64, caps)
        cut = {"tile_m": s.tile_m, "tile_n": s.tile_n, "step_k": s.step_k, "warp_m": s.warp_m, "warp_n": s.warp_n, "split_k": 1}
        return {"gemm": {"kernel": kernel, **cut}, "attention": {"kernel": "matrix", "tile_q": 16, "tile_kv": 16, "warps": 2}}
    if kernel == "coop_reg":
        rows, columns, _ = default_shape("coop_mat", 64, caps).matrix
        cut = {"tile_m": 2 * rows, "tile_n": columns, "warp_m": rows, "slice_k": 2}
        return {"gemm": {"kernel": kernel, **cut}, "attention": {"kernel": "plain"}}
    return {"gemm": {"kernel": kernel}}


def skip_without(kernel: GemmKernel, caps: Capabilities) -> None:
    """Skips the test where the device cannot run this kernel."""
    if kernel in ("coop_mat", "coop_reg") and matrix_shape(caps) is None:
        pytest.skip(f"{caps.name} has no cooperative matrices of f16 with f32 sums")
    if kernel == "int_dot" and not caps.int_dot:
        pytest.skip(f"{caps.name} has no integer dot product")


@contextmanager
def engine_of(path: Path, device: Device, kernel: GemmKernel, *, n_ctx: int, ubatch: int = 512, **gemm: Any) -> Iterator[Engine]:
    """An engine all of whose prompts go through one kernel, with more parameters of GEMMs; what takes part in it, its plans show."""

    def tables(caps: Capabilities) -> Overrides:
        params = kernel_params(kernel, caps)
        return Overrides(Tuning.for_device(caps), {**params, "gemm": {**params["gemm"], **gemm}}, "test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "Tuning", SimpleNamespace(for_device=tables))
        loaded = Engine.load(path, device, n_ctx=n_ctx, act=ACTS[kernel], progress=False, ubatch=ubatch)
    with loaded:
        yield loaded


def kernels_of(engine: Engine, tokens: int) -> set[str]:
    """Source files of the kernels that a program of so many tokens of a prompt runs."""
    return {d.kernel.source for _, schedule in engine.prompt_schedules(tokens) for d in schedule.dispatches()}


def logits_after(engine: Engine, pieces: Sequence[Sequence[int]]) -> np.ndarray:
    """Logits of the last token, the others prompted piece by piece; from an empty cache."""
    engine.reset()
    for piece in pieces[:-1]:
        engine.prompt(piece)
    engine.prompt(pieces[-1][:-1])
    return engine.decode_logits(pieces[-1][-1])
