"""What the tests of commands share: an engine that computes nothing, and a command run as the shell does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from vkback.api import LoadedModel
from vkback.cli import run as generate
from vkback.cli import vkbench, vkbench_batch
from vkback.device import Device
from vkback.engine.drafts import DraftCounts
from vkback.engine.engine import Engine
from vkback.engine.expert_cache import ExpertCounts
from vkback.engine.load_options import LoadOptions
from vkback.ops.matmul.gemm_problem import GemmKernel
from vkback.program import CompileTotals

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing opens a device."""

    def opened(*_: object, **__: object) -> None:
        raise AssertionError("a device is opened")

    monkeypatch.setattr(Device, "open", opened)


class FakeTokenizer:
    """One token a byte of UTF-8."""

    eos_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_end: bool = True) -> list[int]:
        return list(text.encode())

    def stream(self) -> FakeStream:
        return FakeStream()


class FakeStream:
    """Holds everything back until it is whole."""

    def __init__(self) -> None:
        self.held = b""

    def feed(self, id: int) -> str:
        self.held += bytes([id])
        try:
            text = self.held.decode()
        except UnicodeDecodeError:
            return ""
        self.held = b""
        return text

    def flush(self) -> str:
        return self.held.decode(errors="replace")


class FakeEngine:
    """Notes what it is asked for; generates the bytes of a fixed text."""

    description = "llama 0.1B Q4_0"
    size_bytes = 2**20
    n_params = 2_000_000
    bytes_per_token = 1_000_000
    ubatch = 512
    tuning = "0123456789ab"
    tables = "default.toml"
    fusion = "all"
    n_ctx = 512
    model = SimpleNamespace(
        hp=SimpleNamespace(n_vocab=256),
        has_text=True,
        file=SimpleNamespace(metadata={}, path=Path("fake.gguf")),
        tokenizer=FakeTokenizer(),
        lora=None,
        adapters=(),
    )
    device = SimpleNamespace(
        caps=SimpleNamespace(
            name="Test GPU",
            device_type="cpu",
            software=True,
            driver_name="testdrv",
            driver_info="1.2",
            summary_line=lambda: "vkback: 0 = Test GPU",
        ),
        forked=False,
        require_own_process=lambda: None,
    )
    devices = (device,)
    host_weights = SimpleNamespace(expert_layers=0, shown_layers=99)

    def __init__(self, text: str = "né, " * 50) -> None:
        self.tokenizer = FakeTokenizer()
        self.text = text.encode()
        self.calls: list[tuple[Any, ...]] = []
        self.loaded: list[tuple[Any, ...]] = []
        self.prepared: list[tuple[bool, bool, bool]] = []
        self.draft_counts = DraftCounts()
        self.compiled = CompileTotals()
        self.n_past = 0
        self.lora: tuple[Any, ...] = ()
        self.closed = False

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.closed = True

    def compile(self, *, prompt: int | Sequence[int] = 0, logits: bool = False, sampler: Any = None) -> None:
        assert prompt is not None

    def close(self) -> None:
        self.closed = True

    def prepare(self, *, prompt: int | Sequence[int] = 0, logits: bool = False, sampler: Any = None, constrained: bool = False) -> None:
        self.prepared.append((bool(prompt), logits, sampler is not None))

    def reset(self) -> None:
        self.calls.append(("reset",))

    def check_caches(self) -> None:
        pass

    expert_counts = ExpertCounts()

    def count_experts(self) -> ExpertCounts:
        return self.expert_counts

    def after_text(self) -> None:
        pass

    def use_adapters(self, scales: Sequence[float]) -> None:
        assert not scales

    def prompt_flops(self, tokens: int, n_past: int = 0) -> int:
        return 2_000_000 * tokens + 1000 * n_past

    def prompt_kernel(self, tokens: int) -> GemmKernel | None:
        return "coop_mat" if tokens > 16 else "int_dot"

    def resize(self, n_ctx: int) -> None:
        self.calls.append(("resize", n_ctx))

    def prompt(self, tokens: Sequence[int]) -> None:
        self.calls.append(("prompt", len(tokens)))

    def generate(
        self, first: int, n: int, *, sampler: Any, stop_at_eos: bool, on_logits: Any = None, constraint: Any = None, drafts: Any = None
    ) -> Generator[int, None, None]:
        self.sampler = sampler
        self.calls.append(("generate", n, stop_at_eos))
        yield from self.text[:n]

    def decode_logits(self, token: int) -> np.ndarray:
        self.calls.append(("decode_logits",))
        return np.zeros(256, np.float32)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()

    def load(path: Path, device: str | None, options: LoadOptions) -> FakeEngine:
        fake.n_ctx = options.ctx or FakeEngine.n_ctx
        ubatch, exact = options.ubatch, options.exact
        fake.loaded.append(
            (path.name, device, options.ctx, options.act, *([] if ubatch is None else [ubatch]), *(["exact"] if exact else []))
        )
        fake.ubatch = ubatch or FakeEngine.ubatch
        fake.lora = options.lora
        return fake

    def load_model(path: Path, device: str | None, options: LoadOptions, *, meanwhile: Callable[[Any], object]) -> LoadedModel:
        engine = load(path, device, options)
        meanwhile(engine)
        return LoadedModel(cast(Engine, engine))

    monkeypatch.setattr(vkbench, "load_engine", load)
    monkeypatch.setattr(vkbench_batch, "load_engine", load)
    monkeypatch.setattr(generate, "load_model", load_model)
    monkeypatch.setattr(vkbench, "measured_read_rate", lambda device: 200.0)
    monkeypatch.setattr(vkbench, "measured_math_rate", lambda device, kernel: {"coop_mat": 0.5, "int_dot": 0.25}[kernel])
    monkeypatch.setattr("vkback.cli.vkbench_run.make_sampler", lambda **kwargs: kwargs)
    return fake


def call(monkeypatch: pytest.MonkeyPatch, entry: Any, *args: str) -> int:
    """Run a command's entry point as the shell does; its exit code."""
    monkeypatch.setattr(sys, "argv", ["prog", *args])
    with pytest.raises(SystemExit) as e:
        entry()
    return int(e.value.code or 0)
