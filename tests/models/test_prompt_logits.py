"""Prompt logits of each GEMM kernel against the numpy twin, by programs of 16 to 512 tokens, whole and padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from make_gguf import gpt_oss_metadata, gpt_oss_tensors, write_gguf
from prompt_kernels import KERNEL_NMSE, engine_of, kernels_of, skip_without

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.ops.matmul.gemm_problem import GemmKernel
from vkback.paths import builtin_models

pytestmark = pytest.mark.vulkan

BUILT_IN = {p.stem: p for p in builtin_models()}
NAMES = (*BUILT_IN, "tiny-gpt-oss")
N_CTX = 512

LENGTHS = (1, 16, 17, 31, 63, 100, 333, 512)
"""Programs of 16; of 32 with one and 15 tokens of padding; 64; 128 with 28; 256 + 64 + 16 with 3; 512."""

KERNEL = {"f32": "gemm/f32.comp", "coop_mat": "gemm/coop_mat.comp", "coop_reg": "gemm/coop_reg.comp", "int_dot": "gemm/int_dot.comp"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    oss = tmp_path_factory.mktemp("oss") / "tiny.gguf"
    return BUILT_IN | {"tiny-gpt-oss": write_gguf(oss, "gpt-oss", gpt_oss_metadata(context_length=N_CTX), gpt_oss_tensors())}


def ids(count: int, n_vocab: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(15).integers(n_vocab, size=count)]


@pytest.fixture(scope="module")
def wanted(paths: dict[str, Path]) -> Callable[[str], np.ndarray]:
    """Float64 logits after each of 512 tokens."""
    known: dict[str, np.ndarray] = {}

    def get(name: str) -> np.ndarray:
        if name not in known:
            twin = NumpyTwin(paths[name], n_ctx=N_CTX)
            known[name] = twin.logits(ids(N_CTX, twin.model.hp.n_vocab))
        return known[name]

    return get


@pytest.fixture(params=[(name, kernel) for kernel in KERNEL for name in NAMES], ids="-".join, scope="module")
def running(request: pytest.FixtureRequest, device: Device, paths: dict[str, Path]) -> Iterator[tuple[str, GemmKernel, Engine]]:
    name, kernel = request.param
    skip_without(kernel, device.caps)
    with engine_of(paths[name], device, kernel, n_ctx=N_CTX) as engine:
        yield name, kernel, engine


@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_logits_are_the_twin_s(length: int, running: tuple[str, GemmKernel, Engine], wanted: Callable[[str], np.ndarray]) -> None:
    name, kernel, engine = running
    want = wanted(name)[:length]
    engine.reset()
    got = engine.prompt_logits(ids(length, want.shape[1]))
    assert nmse(got, want) <= KERNEL_NMSE[kernel]
    # No token hides behind the others: a wrong one of 512 would add 2 / 512 at most.
    rows = np.square(got - want).sum(axis=1) / np.square(want).sum(axis=1)
    assert rows.max() <= 100 * KERNEL_NMSE[kernel], f"token {rows.argmax()}"


@pytest.mark.parametrize("length", [17, 333])
def test_a_token_after_a_prompt_is_the_twin_s(
    length: int, running: tuple[str, GemmKernel, Engine], wanted: Callable[[str], np.ndarray]
) -> None:
    """Through the programs that make no logits, whose rows of the cache the next token reads."""
    name, kernel, engine = running
    want = wanted(name)
    tokens = ids(N_CTX, want.shape[1])
    engine.reset()
    engine.prompt(tokens[:length])
    assert nmse(engine.decode_logits(tokens[length]), want[length]) <= KERNEL_NMSE[kernel]


def test_it_runs_that_kernel(running: tuple[str, GemmKernel, Engine]) -> None:
    _, kernel, engine = running
    for tokens in (16, 512):
        kernels = kernels_of(engine, tokens)
        assert KERNEL[kernel] in kernels
        others = {KERNEL[w] for w in KERNEL if w != kernel} - ({KERNEL["f32"]} if kernel == "int_dot" else set())  # F32 weights of a router
        assert not kernels & others
        assert ("attention/prompt/prompt_matrix.comp" in kernels) == (kernel == "coop_mat")
