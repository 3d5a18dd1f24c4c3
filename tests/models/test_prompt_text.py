"""Greedy text after a long prompt is that after the same tokens one by one, where margins allow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_gguf import gpt_oss_metadata, gpt_oss_tensors, write_gguf
from prompt_kernels import KERNEL_NMSE, engine_of, skip_without

from vkback.device import Device
from vkback.evaluate.prompt_text import MARGIN, check_text, compared
from vkback.ops.matmul.gemm_problem import GemmKernel

PROMPT, ON_A_CPU, STEPS = 2000, 1100, 24
"""Tokens of a prompt, and of one on a CPU driver: still several programs of the largest size and a window that was left behind."""


@pytest.mark.vulkan
@pytest.mark.parametrize("kernel", ["f32", "coop_mat", pytest.param("int_dot", marks=pytest.mark.exhaustive)])
def test_text_after_a_long_prompt(kernel: GemmKernel, tmp_path: Path, device: Device) -> None:
    """A model with windows, sinks and experts, in weights of eight and four bits."""
    skip_without(kernel, device.caps)
    path = write_gguf(tmp_path / "long.gguf", "gpt-oss", gpt_oss_metadata(context_length=2100), gpt_oss_tensors())
    ids = [int(i) for i in np.random.default_rng(2).integers(160, size=ON_A_CPU if device.caps.software else PROMPT)]
    with engine_of(path, device, kernel, n_ctx=len(ids) + STEPS) as engine:
        found = check_text(engine, ids, STEPS)
    assert not found.wrong, found.text
    assert found.counted > STEPS / 2, found.text
    assert found.nmse <= KERNEL_NMSE[kernel], found.text


def test_only_steps_with_a_margin_count() -> None:
    rng = np.random.default_rng(0)
    want = rng.standard_normal((50, 200))
    want[:, 7] = 9.0
    got = want + 1e-3 * rng.standard_normal(want.shape)
    found = compared(got, want)
    assert (found.steps, found.counted, found.wrong) == (50, 50, ())
    assert found.rms == pytest.approx(1e-3, rel=0.05)
    want[3, 8], want[4, 8] = 9.0 - 0.5 * MARGIN * 1e-3, 9.0 - 2 * MARGIN * 1e-3
    got = want + 1e-3 * rng.standard_normal(want.shape)
    got[3, 8] = got[4, 8] = 9.02
    found = compared(got, want)
    assert (found.counted, found.wrong) == (49, (4,))
