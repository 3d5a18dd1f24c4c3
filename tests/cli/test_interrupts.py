"""Ctrl-C and other signals that end a command: at once, with their exit code, without a traceback and without a child left behind."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_kit import REPOSITORY, call
from processes import free_port, new_terminal, run_program, signals_as_usual
from waiting import PATIENCE_S, wait_until

from vkback.api import LoadedModel
from vkback.autotune.driver import Sweep
from vkback.cli import chat, interrupts, main
from vkback.cli.interrupts import interruptible, own_interrupts
from vkback.cli.shell import run
from vkback.device import Device, KernelSpec
from vkback.device.queue import Ticket
from vkback.engine.engine import Engine
from vkback.harness.output import Console
from vkback.harness.result import CaseResult
from vkback.harness.suite import run_in_processes
from vkback.paths import builtin_model, new_file
from vkback.program.compile import Kernels, compile_kernels
from vkback.shader import CompileError, ShaderLibrary, Variant, compiler

pytestmark = pytest.mark.usefixtures("usual_signals")

unix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals that a test could send")


@pytest.fixture
def usual_signals() -> Iterator[None]:
    with signals_as_usual():
        yield


def ended(app: Callable[..., Any]) -> int:
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as e:
        run(app, "vkback")
    return int(e.value.code or 0)


@unix
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_command_that_closes_what_it_has_open(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    closed = []

    def app(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGINT)  # an impatient user
            closed.append(True)

    monkeypatch.setattr(main, "app_of", lambda asked: app)
    assert call(monkeypatch, main.main, "run") == 128 + number
    assert closed and capsys.readouterr() == ("", "") and signal.getsignal(number) is before


@unix
def test_a_command_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    codes: list[int] = []
    over = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        over.set()

    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.01)
    monkeypatch.setattr(os, "_exit", end)

    def app(**_: object) -> None:
        with new_file(tmp_path / "file") as part:
            part.touch()
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                assert over.wait(PATIENCE_S), "as a driver that runs a kernel for minutes"
                assert not part.exists()

    assert ended(app) == 143 and codes == [143]
    monkeypatch.setattr(interrupts, "PATIENCE_S", 60)
    threads = set(threading.enumerate())
    assert ended(lambda **_: signal.raise_signal(signal.SIGTERM)) == 143 and codes == [143]
    assert set(threading.enumerate()) <= threads, "others may end meanwhile"


@unix
def test_a_signal_that_the_caller_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ended(lambda **_: signal.raise_signal(signal.SIGHUP)) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@unix
def test_a_conversation_outlives_ctrl_c_at_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    ended_with: list[int] = []
    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.0)
    monkeypatch.setattr(os, "_exit", ended_with.append)
    with interruptible() as came:
        with own_interrupts():
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
        assert came == [] and ended_with == []
        monkeypatch.setattr(interrupts, "PATIENCE_S", 60)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert came == [signal.SIGINT]
    assert ended_with == []


@unix
def test_the_exit_code_stands_where_more_signals_come() -> None:
    """As users press Ctrl-C again: the interpreter takes the handlers away at its end, and was ended by the signal itself."""
    code = (
        "import atexit, os, signal, sys\n"
        "from vkback.cli import main, start\n"
        "def app(**_): signal.raise_signal(signal.SIGINT)\n"
        "main.app_of = lambda asked: app\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT): kill(pid, number)\n"
        "sys.modules['last'] = Last()\n"
        "atexit.register(signal.raise_signal, signal.SIGINT)\n"
        "start.vkback()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, encoding="utf-8", timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")


@unix
def test_ctrl_c_is_noted_but_where_the_user_has_the_word(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    ended_with: list[int] = []
    monkeypatch.setattr(os, "_exit", ended_with.append)
    before = signal.getsignal(signal.SIGINT)
    with interrupts.NotedInterrupts() as noted:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert noted.came and capfd.readouterr().err == "\nvkback: ending the reply\n"
        with pytest.raises(KeyboardInterrupt), noted.waiting():
            assert not noted.came
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert not ended_with
        monkeypatch.setattr(interrupts, "PATIENCE_S", -1.0)
        signal.raise_signal(signal.SIGINT)
        assert ended_with == [130], "a device that does not come to its end"
    assert signal.getsignal(signal.SIGINT) is before


@unix
@pytest.mark.vulkan
def test_an_interrupt_while_a_stream_ends_is_an_exception(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not printed as one that was ignored, which the finalizer of a generator makes of it."""
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    with LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=256, progress=False)) as model:
        stream = model.stream("Hello", temperature=0)
        next(stream)
        wait = Ticket.wait

        def interrupted(self: Ticket, *more: float) -> None:
            monkeypatch.setattr(Ticket, "wait", wait)
            raise KeyboardInterrupt

        monkeypatch.setattr(Ticket, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.close()
        assert not lost
        assert len(model.generate("Hello", max_tokens=4, temperature=0).tokens) == 4


def test_lines_that_come_from_a_program_end_with_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, readline=interrupted))
    with pytest.raises(KeyboardInterrupt):
        next(chat.messages(interrupts.NotedInterrupts()))


# -- the tests' own kit


@unix
def test_tests_know_no_signals_that_their_shell_ignores() -> None:
    """As under `nohup make test &`."""
    said = "from signal import *; print(getsignal(SIGINT) is default_int_handler, getsignal(SIGHUP) is SIG_DFL)"
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.pthread_sigmask(signal.SIG_BLOCK, before)
    try:
        with signals_as_usual():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert run_program([sys.executable, "-c", said], check=True).stdout.split() == ["True", "True"]
        killed = run_program([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGHUP)"])
        assert killed.returncode == -signal.SIGHUP
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
        for number, handler in before.items():
            signal.signal(number, handler)


@unix
def test_a_machine_without_terminals_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> tuple[int, int]:
        raise OSError(errno.ENOENT, "out of pty devices")

    monkeypatch.setattr("pty.openpty", refuse)
    with pytest.raises(pytest.skip.Exception, match=r"no pseudo-terminal can be opened here: .*out of pty devices"), new_terminal():
        pass
    monkeypatch.setitem(sys.modules, "pty", None)
    with pytest.raises(pytest.skip.Exception, match="this system has no pseudo-terminals"), new_terminal():
        pass


# -- compilers


@unix
def test_a_compiler_that_is_stopped_is_not_started_again(tmp_path: Path) -> None:
    glslc = tmp_path / "glslc"
    glslc.write_text(f'#!/bin/sh\necho started >> {tmp_path}/log\n[ "$1" = --version ] || exec sleep 60\n')
    glslc.chmod(0o755)
    program = compiler.GlslcProgram(str(glslc))
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(program.compile_batch, ["a", "b"])
        wait_until(lambda: compiler.running)
        interrupts.stop_compilers()
        with pytest.raises(CompileError, match=r"glslc was stopped by signal 15; run the command again$"):
            made.result(PATIENCE_S)
    assert not compiler.running and (tmp_path / "log").read_text().count("started") <= 2, "for its version, and once"


@unix
def test_a_compiler_that_cannot_be_run_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Called past the caches, which would keep what the first call found."""
    glslc = tmp_path / "glslc"
    monkeypatch.setattr(compiler, "shared_library", lambda: None)
    monkeypatch.setattr(compiler, "program_path", lambda: str(glslc))
    monkeypatch.setattr(compiler, "own_compiler", lambda: None)
    monkeypatch.setattr(compiler, "system_compiler", compiler.system_compiler.__wrapped__)
    monkeypatch.setenv("VKBACK_CACHE", str(tmp_path))
    for text, why in (("#!/bin/sh\necho no library >&2\nexit 127\n", "exit status 127: no library"), ("junk", "Exec format error")):
        glslc.write_text(text)
        glslc.chmod(0o755)
        assert compiler.find_compiler.__wrapped__() is None
        assert caplog.messages[-1] == f"{glslc} is not used, for it cannot be run: {why}"


def test_the_wait_for_a_compiler_is_counted_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stood still for an hour, as its user's machine did, gets the rest of its time."""
    waits: list[float] = []

    class Busy:
        returncode = 0

        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> Busy:
            return self

        def __exit__(self, *_: object) -> None: ...

        def communicate(self, given: bytes | None, timeout: float) -> tuple[bytes, bytes]:
            waits.append(timeout)
            raise subprocess.TimeoutExpired("glslc", 3600)

        def kill(self) -> None:
            waits.append(0)

    monkeypatch.setattr(subprocess, "Popen", Busy)
    with pytest.raises(CompileError, match=r"glslc has not finished after 120 s"):
        compiler.run_program(["glslc"], 120)
    assert waits == [10.0] * 12 + [0]


@unix
def test_a_compiler_that_takes_several_slices_gets_its_source_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "SLICE_S", 0.05)
    assert compiler.run_program(["sh", "-c", "sleep 0.2; exec cat"], 60, b"source") == (0, b"source", b"")


def telling_pool(left: threading.Event) -> type[ThreadPoolExecutor]:
    """Pools that set `left` as soon as they are shut down and have dropped what they then drop. Work that waits for it until then does not
    run ahead of a thread that a busy machine has stopped."""

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            left.set()
            super().shutdown(wait)

    return Pool


def test_a_fault_leaves_the_batches_behind_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[str] = []
    left = threading.Event()

    def fail(self: ShaderLibrary, batch: Sequence[Any]) -> list[bytes]:
        begun.append(batch[0][0].name)
        if len(begun) > 1:
            assert left.wait(PATIENCE_S)
        raise CompileError("glslc was stopped")

    monkeypatch.setattr("vkback.shader.library.ThreadPoolExecutor", telling_pool(left))
    monkeypatch.setattr(ShaderLibrary, "_compile_batch", fail)
    monkeypatch.setattr("vkback.shader.library.find_compiler", lambda: SimpleNamespace(identity="none"))
    monkeypatch.setattr(ShaderLibrary, "compilers", 2)
    library = ShaderLibrary(cache_dir=tmp_path, quick=False)
    with pytest.raises(CompileError, match="glslc was stopped"):
        list(library._compile([(Variant("none.comp", (("N", i),)), SimpleNamespace(text="")) for i in range(50)], 1))  # type: ignore[misc]
    assert len(begun) <= 4, "one that failed, and what two threads had begun then"


def test_kernels_behind_one_that_fails_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bytes] = []
    left = threading.Event()

    def fail(specs: Sequence[KernelSpec]) -> None:
        begun.append(specs[0].spirv)
        if specs[0].spirv != b"0":
            assert left.wait(PATIENCE_S)
        raise CompileError("refused")

    monkeypatch.setattr("vkback.program.compile.ThreadPoolExecutor", telling_pool(left))
    variants = [Variant("none.comp", (("N", i),)) for i in range(100)]
    compiled = lambda users, batch: ((variant, b"%d" % variant.defines[0][1]) for variant in users)  # noqa: E731
    library = SimpleNamespace(compile_each=compiled, specialization=lambda _: ())
    dispatches = [SimpleNamespace(kernel=variant, args=(), push=b"") for variant in variants]
    with pytest.raises(CompileError, match="refused"):
        compile_kernels(SimpleNamespace(kernels=fail), library, dispatches)  # type: ignore[arg-type]
    assert len(begun) <= (os.cpu_count() or 1) + 1


# -- the op suite


def test_kernels_that_have_not_begun_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    left = threading.Event()

    def make(specs: Sequence[KernelSpec]) -> list[None]:
        made.extend(spec.name for spec in specs)
        assert left.wait(PATIENCE_S)
        return [None]

    monkeypatch.setattr("vkback.program.compile.ThreadPoolExecutor", telling_pool(left))
    library = SimpleNamespace(compile_each=lambda users, batch: ((variant, b"") for variant in users), specialization=lambda _: ())
    kernels = Kernels(SimpleNamespace(kernels=make), library, 1)  # type: ignore[arg-type]
    wanted = [SimpleNamespace(kernel=Variant("none.comp", (("N", i),)), args=(), push=b"") for i in range(100)]
    kernels.start(wanted)  # type: ignore[arg-type]
    wait_until(lambda: made)
    kernels.close()
    assert len(made) == 1


def _first_alone(lines: Sequence[str]) -> list[CaseResult]:
    if signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        os._exit(3)
    if not lines[0].endswith("0"):
        time.sleep(10 * PATIENCE_S)
    return [CaseResult(op="ABS", line=line, mode="test", passed=True) for line in lines]


@unix
@pytest.mark.vulkan
def test_processes_end_with_the_run(device: Device) -> None:
    """Ctrl-C reaches the process that started them alone, and leaving the results ends them, whatever they do."""
    results = run_in_processes(["ABS 0", "ABS 1"], 1, device.index, "auto", work=_first_alone)
    assert next(results).line == "ABS 0"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert multiprocessing.active_children()
    begun = time.monotonic()
    results.close()
    assert time.monotonic() - begun < PATIENCE_S and not multiprocessing.active_children()


SERVER = """
import asyncio, os, signal, sys, threading, time
from types import SimpleNamespace
from urllib.request import urlopen
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from vkback.server.run import run_app

async def impatient(request):
    for _ in range(3):
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0.2)
    return PlainTextResponse("all of it")

def ask():
    for _ in range(600):
        try:
            print(urlopen(f"http://127.0.0.1:{sys.argv[1]}/", timeout=60).read().decode(), flush=True)
            return
        except OSError:
            time.sleep(0.1)

client = threading.Thread(target=ask)
client.start()
try:
    run_app(Starlette(routes=[Route("/", impatient)]), SimpleNamespace(end=lambda: None), "127.0.0.1", int(sys.argv[1]))
except KeyboardInterrupt:
    print("ended")
client.join()
"""


@unix
def test_a_server_takes_one_ctrl_c_and_lets_replies_end() -> None:
    pytest.importorskip("uvicorn", reason="vkback[serve] is not installed")
    ran = run_program([sys.executable, "-c", SERVER, str(free_port())])
    assert sorted(ran.stdout.splitlines()) == ["all of it", "ended"] and ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr and "ERROR" not in ran.stderr, ran.stderr


@pytest.mark.vulkan
def test_what_was_stopped_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    print_case = Console.add
    counted: list[CaseResult] = []

    def stopped(self: Any, result: CaseResult) -> None:
        if len(counted) == 2:
            raise KeyboardInterrupt
        counted.append(result)
        print_case(self, result)

    monkeypatch.setattr(Console, "add", stopped)
    assert call(monkeypatch, main.main, "test-ops", "-o", "RMS_NORM") == 130
    err = capsys.readouterr().err
    assert re.search(r"vkback: stopped: 2 of \d+ cases ran, 0 failed\n", err), err

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "run", stop)
    assert call(monkeypatch, main.main, "tune", "--quant", "Q8_0", "--shape", "64x256") == 130
    assert "vkback: stopped: 0 of 1 GEMVs are finished; --resume goes on with the others" in capsys.readouterr().err


@pytest.mark.vulkan
def test_where_a_device_s_own_table_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    assert call(monkeypatch, main.main, "tune", "--where") == 0
    said = capsys.readouterr().out
    assert said.startswith(str(tmp_path / "device_")) and said.endswith(".toml (not there yet)\n")
    file = Path(said.removesuffix(" (not there yet)\n"))
    file.write_text("", encoding="utf-8")
    assert call(monkeypatch, main.main, "tune", "--where") == 0 and capsys.readouterr().out == f"{file}\n"
    assert call(monkeypatch, main.main, "tune", "--where", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"table": str(file), "exists": True}
