"""Files that options name to be written: refused before any work where they cannot be, and there only when they are whole."""

from __future__ import annotations

import errno
import json
import os
import socket
import sqlite3
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
from cli_kit import FakeEngine, call

from vkback import paths
from vkback.arrays import read_arrays
from vkback.cli import main, serve, vkbench
from vkback.cli.shell import OutputError, UsageError, run, write_output
from vkback.cli.test_ops import _shrink
from vkback.cli.vkbench_run import measure
from vkback.cli.vkbench_tests import BenchTest
from vkback.harness.result import CaseResult
from vkback.harness.suite import Run
from vkback.report.result_table import ReportError
from vkback.report.store import Store

BENCH = "bench/results/2026-11-21_h200_580-159-04_llama-8b-qwen3moe.json"

OPTIONS = [
    ("vkbench", "--save", ".json"),
    ("vkbench", "--store", ""),
    ("vkbench batch", "--save", ".json"),
    ("vkbench batch", "--store", ""),
    ("vkbench serve", "--save", ".json"),
    ("profile", "--trace", ""),
    ("profile", "--html", ""),
    ("profile", "--save", ".json"),
    ("compare", "--save", ""),
    ("compare", "--plot", ".png"),
    (f"compare-bench {BENCH} {BENCH}", "--plot", ".png"),
    ("tune", "--picture", ".png"),
    ("tune", "--share", ""),
    ("test-ops perf", "--store", ""),
    ("perplexity -f INPUT", "--save-kl-base", ""),
    ("finetune --data INPUT", "-o", ""),
    ("merge --lora INPUT", "-o", ""),
    ("synth tiny-qwen2-F32", "OUT", ""),
]
"""Commands, what names the file, and the ending it has to have."""


pytestmark = pytest.mark.usefixtures("no_device")


@pytest.mark.parametrize(("command", "option", "ending"), OPTIONS, ids=[f"{c.split()[0]} {o}" for c, o, _ in OPTIONS])
def test_what_cannot_be_written_is_said_before_any_work(
    command: str, option: str, ending: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))  # pictures are refused without it
    given = tmp_path / "input"
    given.write_text("text")
    folder, missing = tmp_path / f"folder{ending}", tmp_path / "none"
    folder.mkdir()
    entry, *arguments = command.replace("INPUT", str(given)).split()
    arguments = arguments if entry == "vkbench" else [entry, *arguments]
    cases = [
        (folder, "is a folder; give the name of the file to write"),
        (missing / f"x{ending}", f"there is no folder {missing}; make it, or give another name"),
        (given / f"x{ending}", f"{given} is no folder"),
        (tmp_path / f"{'x' * 300}{ending}", "nothing can be written there: " + ("" if sys.platform == "win32" else "File name too long")),
    ]
    if "INPUT" in command:
        cases.append((given, "is an input, which is not overwritten; give another name"))
    before = sorted(tmp_path.rglob("*"))
    for path, why in cases:
        named = [str(path)] if option == "OUT" else [option, str(path)]
        assert call(monkeypatch, vkbench.main if entry == "vkbench" else main.main, *arguments, *named) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.startswith(f"{'vkbench' if entry == 'vkbench' else 'vkback'}: error: {option} {path}: ")
        said = why in shown.err if sys.platform == "win32" else shown.err.endswith(f"{why}\n")  # whose words for a long name differ
        assert said and shown.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before and given.read_text() == "text"


def test_a_file_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert paths.unwritable(path) == "may not be overwritten; give another name"
    assert paths.unwritable(tmp_path / "b") == ""

    def refused(self: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "touch", refused)
    assert paths.unwritable(tmp_path / "b") == "nothing can be written there: Permission denied"


def test_a_file_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    if not link.is_symlink():
        pytest.skip("no link was made")  # Wine says that it did
    mode = target.stat().st_mode & 0o777  # 0o640, but on Windows
    with pytest.raises(KeyboardInterrupt), paths.new_file(link) as part:
        part.write_text("half")
        assert target.read_text() == "old"
        raise KeyboardInterrupt
    assert target.read_text() == "old" and sorted(tmp_path.iterdir()) == [link, target]
    with paths.new_file(link, durable=True) as part:
        part.write_text("new")
    assert link.is_symlink() and target.read_text() == "new" and target.stat().st_mode & 0o777 == mode
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_what_is_no_file_is_written_itself() -> None:
    assert paths.unwritable(Path(os.devnull)) == ""
    write_output(Path(os.devnull), "--html", "text")
    assert Path(os.devnull).is_char_device()


@pytest.mark.skipif(sys.platform == "win32" or not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with pytest.raises(OutputError, match=r"^--html /dev/full: cannot be written: the disk is full$"):
        write_output(Path("/dev/full"), "--html", "text")


def test_a_store_for_which_there_is_no_room_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.sqlite"

    def full(self: Store) -> None:
        path.touch()
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Store, "_upgrade", full)
    with pytest.raises(ReportError, match=r"s\.sqlite: cannot be used as a store of results: database or disk is full$"):
        Store(path)
    assert not path.exists()


def test_a_failing_case_for_which_there_is_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = Run(CaseResult(op="ABS", line="ABS(ne_a=[64,1,1,1])", mode="test", passed=False, message="wrong"))
    suite = SimpleNamespace(run_one=lambda case: ran)
    monkeypatch.setattr("vkback.harness.shrink.shrink", lambda case, fails: case)

    def full(file: IO[bytes], **_: object) -> None:
        file.write(b"half")
        raise OSError("8 requested and 4 written")

    with monkeypatch.context() as m:
        m.setattr(np, "savez_compressed", full)
        with pytest.raises(OutputError, match=r"^--save-in .*cases: cannot be written: 8 requested and 4 written, is the disk full\?$"):
            _shrink(suite, [ran.result.line], tmp_path / "cases")
    assert list((tmp_path / "cases").iterdir()) == []
    _shrink(suite, [ran.result.line], tmp_path / "cases")
    (file,) = (tmp_path / "cases").iterdir()
    assert str(read_arrays(file)["message"]) == "wrong"


def test_a_folder_for_failing_cases_is_no_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        assert call(monkeypatch, main.main, "test-ops", "--shrink", "--save-in", str(folder)) == 2
        assert capsys.readouterr().err == f"vkback: error: --save-in {folder}: {file} is no folder\n"
    with pytest.raises(AssertionError, match="a device is opened"):
        call(monkeypatch, main.main, "test-ops", "--shrink", "--save-in", str(tmp_path / "new" / "cases"))
    assert [*tmp_path.iterdir()] == [file]


def test_an_address_that_is_taken_is_said_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"^--host 127\.0\.0\.1 --port {port}: .*in use.*; give another$"):
            serve.check_address("127.0.0.1", port)
    serve.check_address("127.0.0.1", port)


def written_to(file: IO[str], monkeypatch: pytest.MonkeyPatch, lines: int) -> int:
    """The exit code of a command that prints to a file, which holds back what is little."""
    monkeypatch.setattr(sys, "stdout", file)

    def app(**_: object) -> None:
        for _line in range(lines):
            print("line")

    with pytest.raises(SystemExit) as e:
        run(app, "vkback")
    file.flush()  # as the interpreter does at its end, which finds nothing left to write
    return int(e.value.code or 0)


@pytest.mark.skipif(sys.platform == "win32" or not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("lines", [1, 100_000])
def test_stdout_on_a_full_disk_is_one_line(lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        assert written_to(full, monkeypatch, lines) == 1
    assert capsys.readouterr().err == "vkback: error: stdout: the disk is full\n"


@pytest.mark.skipif(sys.platform == "win32" or not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_stderr_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def app(**_: object) -> None:
        raise UsageError("wrong")

    with Path("/dev/full").open("w", encoding="utf-8") as full, pytest.raises(SystemExit) as e:
        monkeypatch.setattr(sys, "stderr", full)
        run(app, "vkback")
    assert e.value.code == 2


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_is_gone_is_no_error(lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert written_to(os.fdopen(writer, "w"), monkeypatch, lines) == 1
    assert capsys.readouterr().err == ""


def test_streams_that_the_caller_closed_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def app(**_: object) -> int:
        print("text")
        said.append(sys.stdin.read())
        raise UsageError("wrong")

    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as e:
        run(app, "vkback")
    assert e.value.code == 2 and said == [""]


def test_a_benchmark_that_is_interrupted_keeps_what_it_measured(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "r.csv"

    def interrupted(engine: FakeEngine, test: BenchTest, repetitions: int, **_: Any) -> tuple[int, ...]:
        if test.n_gen == 3:
            raise KeyboardInterrupt
        return measure(engine, test, repetitions, warmup=False, feed="self", note=lambda _: None)

    monkeypatch.setattr(vkbench, "measure", interrupted)
    arguments = ("-m", "demo-dense", "-r", "2", "--read-rate", "1", "--save", str(path))
    assert call(monkeypatch, vkbench.main, "tg3", *arguments) == 130
    assert not path.exists()
    assert call(monkeypatch, vkbench.main, "tg2", "tg3", *arguments) == 130
    assert len(path.read_text().splitlines()) == 2, "a head and a row"
    capsys.readouterr()
    assert call(monkeypatch, vkbench.main, "tg2", "tg3", *arguments, "-o", "json") == 130
    (printed,) = json.loads(capsys.readouterr().out)
    assert printed["n_gen"] == 2
    assert call(monkeypatch, vkbench.main, "tg3", *arguments, "-o", "json") == 130
    assert json.loads(capsys.readouterr().out) == []
