"""The first run on a machine: progress while kernels compile, compile time told apart, and in no speed."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from cli_kit import REPOSITORY, FakeEngine, call
from processes import new_terminal, run_program
from waiting import PATIENCE_S

from vkback.cli import main, vkbench
from vkback.cli.vkbench_run import measure
from vkback.cli.vkbench_tests import BenchTest
from vkback.device import Device
from vkback.engine import kernels as kernels_module
from vkback.engine.engine import Engine, EngineError
from vkback.engine.sampler import Sampler
from vkback.ops.lowering import LowerContext
from vkback.paths import builtin_model
from vkback.plan.planner import plan
from vkback.program import CompileTotals, compile_kernels, kernel_keys
from vkback.shader import ShaderLibrary
from vkback.shader import library as library_module
from vkback.shader.compiler import find_compiler

COMMAND = [sys.executable, "-m", "vkback.cli.main", "run", "-m", "demo-dense", "-c", "32", "-p", "It was a dark", "-n", "3", "--temp", "0"]
PREPARED = re.compile(r"prepared (\d+) kernels in ([\d.]+) s, (\w+) compiled from GLSL$")
SPEED = re.compile(r"(prompt|generation) +(\d+) tokens in +([\d.]+) s, +([\d.]+) t/s$")


def kernels_prepared(lines: Sequence[str]) -> tuple[int, float]:
    """Kernels made ready, whether from GLSL or SPIR-V, and the seconds it took, from the one line that tells."""
    (found,) = filter(None, map(PREPARED.match, lines))
    return int(found[1]), float(found[2])


def cold(folder: Path) -> dict[str, str]:
    """An environment whose caches, ours and Mesa's, lie in a folder."""
    return os.environ | {"VKBACK_CACHE": str(folder / "vkback"), "MESA_SHADER_CACHE_DIR": str(folder / "mesa"), "TERM": "xterm"}


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run from an empty cache, and the folder that holds the caches after it."""
    folder = tmp_path_factory.mktemp("cold")
    ran = run_program(COMMAND, cwd=REPOSITORY, env=cold(folder), timeout=600)
    assert ran.returncode == 0, ran.stderr
    return folder, ran


@pytest.mark.vulkan
def test_the_first_run_says_what_it_does_and_keeps_compile_time_out_of_its_speeds(
    first_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    lines = first_run[1].stderr.splitlines()
    (announced,) = (line for line in lines if line.startswith("vkback: preparing "))
    kernels, seconds = kernels_prepared(lines)
    speeds = {m[1]: m for m in map(SPEED.match, lines) if m}
    assert set(speeds) == {"prompt", "generation"}
    assert announced == f"vkback: preparing {kernels} kernels"
    assert kernels > 10
    # Compiling, if only by the driver, takes seconds, a prompt of a few tokens through a model of 4 MB some 20 ms.
    assert float(speeds["prompt"][3]) < seconds / 4
    assert float(speeds["generation"][3]) < seconds / 4
    assert float(speeds["prompt"][4]) > 4 * int(speeds["prompt"][2]) / seconds


@pytest.mark.vulkan
def test_on_a_terminal_there_is_a_bar(first_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Also: a second run compiles nothing and says so."""
    folder, ran = first_run
    with new_terminal() as (ours, theirs):
        again = run_program(COMMAND, cwd=REPOSITORY, env=cold(folder), stderr=theirs, timeout=600)
        theirs.close()
        shown = b"".join(iter(lambda: _read(ours), b"")).decode()
    assert again.returncode == 0, shown
    assert again.stdout == ran.stdout
    kernels, _ = kernels_prepared(ran.stderr.splitlines())
    assert re.search(rf"{kernels}/{kernels}", shown), "kernels ready of all"
    assert "vkback: preparing" not in shown
    assert re.search(rf"prepared {kernels} kernels in [\d.]+ s, none compiled from GLSL", shown)


def _read(terminal: IO[bytes]) -> bytes:
    try:
        return terminal.read(1 << 16)
    except OSError:  # Linux's way to say that the other side is closed
        return b""


def test_speeds_of_run_leave_out_what_is_compiled_late(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Barrier-free stages that fail are planned and compiled anew in the midst of generation."""

    def prepare(self: FakeEngine, **what: Any) -> None:
        self.compiled = CompileTotals(7, 5, 2.5)

    def generate(self: FakeEngine, first: int, n: int, **how: Any) -> Iterator[int]:
        time.sleep(0.05)
        self.compiled += CompileTotals(3, 3, 1000.0)
        yield from self.text[:n]

    monkeypatch.setattr(FakeEngine, "prepare", prepare)
    monkeypatch.setattr(FakeEngine, "generate", generate)
    clock = itertools.accumulate(itertools.repeat(2000.5))
    monkeypatch.setattr("vkback.api.stream.time.perf_counter", lambda: next(clock))
    assert call(monkeypatch, main.main, "run", "-p", "Once", "-n", "10") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "prepared 10 kernels in 1002.5 s, 8 compiled from GLSL"
    assert (SPEED.match(lines[1]) or [])[3] == "2000.50"
    assert float((SPEED.match(lines[2]) or [])[3]) == 11 * 2000.5 - 1000.0, "ten tokens and the end of them"


def test_vkbench_compiles_before_it_measures(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --no-warmup too. stderr says so, unless it carries a table."""

    def prepare(self: FakeEngine, **what: Any) -> None:
        self.calls.append(("prepare",))
        self.compiled += CompileTotals(4, 4, 1.25)

    def clock() -> int:
        engine.calls.append(("clock",))
        return 0

    monkeypatch.setattr(FakeEngine, "prepare", prepare)
    measure(engine, BenchTest(8, 4, 16), 1, warmup=False, clock=clock)
    assert [name for name, *_ in engine.calls] == ["prepare", "reset", "prompt", "clock", "prompt", "generate", "clock"]
    arguments = ("tg8", "-r", "1", "-m", "demo-dense", "--no-warmup")
    assert call(monkeypatch, vkbench.main, *arguments) == 0
    prepared = "prepared 4 kernels in 1.2 s, all compiled from GLSL"
    assert capsys.readouterr().err == f"vkbench: demo-dense-Q4_K_M.gguf tg8: {prepared}, not part of the speed\n"
    assert call(monkeypatch, vkbench.main, *arguments, "-oe", "csv") == 0
    assert "compiled" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("test", "feed", "prepared"),
    [
        (BenchTest(8, 0), "self", (True, False, False)),
        (BenchTest(0, 4), "self", (False, False, True)),
        (BenchTest(0, 4), "random", (False, True, False)),
        (BenchTest(0, 4, 32), "self", (True, False, True)),
    ],
)
def test_vkbench_prepares_what_a_test_needs(engine: FakeEngine, test: BenchTest, feed: Any, prepared: tuple[bool, ...]) -> None:
    measure(engine, test, 1, feed=feed, warmup=False)
    assert engine.prepared == [prepared]


def test_compile_time_in_words() -> None:
    assert str(CompileTotals(41, 41, 9.84)) == "prepared 41 kernels in 9.8 s, all compiled from GLSL"
    assert str(CompileTotals(41, 0, 0.4)) == "prepared 41 kernels in 0.4 s, none compiled from GLSL"
    assert CompileTotals(3, 2, 1.0) + CompileTotals(1, 1, 0.5) - CompileTotals(1, 0, 0.25) == CompileTotals(3, 3, 1.25)


# --- with a device ------------------------------------------------------------------------------------------------------------------


@pytest.mark.vulkan
def test_what_was_prepared_compiles_nothing_later_and_leaves_no_trace(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(temp=0.8, seed=3)

    def texts(loaded: Engine) -> list[Any]:
        loaded.prompt([1, 2, 3])
        made = list(loaded.generate(4, 12, sampler=sampler, stop_at_eos=False))
        if prepared:
            loaded.prepare(prompt=3, logits=True, sampler=sampler)
        return [made, loaded.decode_logits(5).tolist()]

    found = []
    for prepared in (False, True):
        with Engine.load(builtin_model("demo-moe"), device, n_ctx=32, progress=False) as loaded:
            if prepared:
                loaded.prepare(prompt=3, logits=True, sampler=sampler)
                assert loaded.n_past == 0
                before = loaded.compiled
                assert before.kernels > 10
                monkeypatch.setattr(kernels_module, "compile_kernels", None)
            found.append(texts(loaded))
            if prepared:
                assert loaded.compiled.kernels == before.kernels
    assert found[0] == found[1]


@pytest.mark.vulkan
def test_an_engine_that_is_full_can_be_prepared(device: Device) -> None:
    with Engine.load(builtin_model("demo-dense"), device, n_ctx=16, progress=False) as loaded:
        loaded.prompt(range(16))
        loaded.prepare(logits=True, sampler=Sampler())
        assert loaded.n_past == 16
        with pytest.raises(EngineError, match="prompt of 1 tokens after 16 does not fit the context of 16"):
            loaded.prepare(prompt=1)


class Slow:
    """A compiler that tells when each of its calls begins and ends."""

    def __init__(self) -> None:
        found = find_compiler()
        assert found is not None
        self._inner = found
        self.identity = found.identity
        self.log: list[str] = []
        self._two = threading.Barrier(2)

    def compile_into_spirv(self, source: str) -> bytes:
        return self._inner.compile_into_spirv(source)

    def compile_batch(self, sources: Sequence[str], *, optimize: bool = True) -> Any:
        self.log.append("begin")
        if self.log.count("begin") <= 2:
            self._two.wait(PATIENCE_S)  # two at a time
        made = self._inner.compile_batch(sources, optimize=optimize)
        time.sleep(0.2)
        self.log.append("end")
        return made


@pytest.mark.vulkan
def test_shaders_compile_beside_each_other_and_pipelines_beside_shaders(
    device: Device, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = Slow()
    monkeypatch.setattr(library_module, "find_compiler", lambda: compiler)
    monkeypatch.setattr(library_module, "BATCH", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(ShaderLibrary, "compilers", 2)
    schedule = plan(model_graph(), ctx)
    keys = kernel_keys(schedule.dispatches())
    library = ShaderLibrary(cache_dir=tmp_path, shipped=False)
    ready: list[int] = []
    found = compile_kernels(device, library, schedule.dispatches(), lambda: ready.append(compiler.log.count("end")))
    assert list(found) == keys
    assert len(ready) == len(keys)
    assert compiler.log[:2] == ["begin", "begin"], "two at a time"
    assert min(ready) < len(library.compiled), "a kernel was ready before the last shader was"
    assert {(v.source, v.defines) for v, _, _ in keys} == library.compiled
    assert compile_kernels(device, ShaderLibrary(cache_dir=tmp_path, shipped=False), schedule.dispatches()) == found


def model_graph() -> Any:
    from vkback.models import Model

    return Model.open(builtin_model("demo-dense")).graph(1, 32, head="last")
