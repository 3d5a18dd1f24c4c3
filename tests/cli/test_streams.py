"""stdin, stdout and stderr in any encoding: what goes into a pipe or a file is UTF-8, and no text ends a command in a traceback."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

from vkback import paths
from vkback.cli import chat
from vkback.cli.shell import UsageError, open_streams, unicode_text

REPOSITORY = Path(__file__).resolve().parents[2]
RULE = "\u2500"
TEXT = "Gr\u00fc\u00dfe \u65e5\u672c\u8a9e"


def command(*args: str, encoding: str, given: bytes = b"", out: Path | None = None, module: str = "main") -> tuple[bytes, str]:
    """What a command writes to stdout, a pipe or the file `out`, and to stderr."""
    program = f"import sys; from vkback.cli.{module} import main; main()"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    with (out or Path(os.devnull)).open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", program, *args],
            env=env,
            input=given,
            stdout=subprocess.PIPE if out is None else file,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_S,
            check=False,
        )
    said = done.stderr.decode()
    assert done.returncode == 0 and "Traceback" not in said, said
    return done.stdout if out is None else out.read_bytes(), said


WRITES = ("run", "-p", TEXT, "-n", "2", "--temp", "0")


@pytest.mark.vulkan
def test_run_writes_its_text_to_a_pipe_and_a_file(tmp_path: Path) -> None:
    out, _ = command(*WRITES, encoding="ascii")
    assert out.decode().startswith(TEXT)
    assert command(*WRITES, encoding="cp1252", out=tmp_path / "out")[0] == out


@pytest.mark.vulkan
@pytest.mark.exhaustive
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_run_writes_the_same_to_a_pipe_and_a_file(encoding: str, tmp_path: Path) -> None:
    out, _ = command(*WRITES, encoding=encoding)
    assert out.decode().startswith(TEXT)
    assert command(*WRITES, encoding=encoding, out=tmp_path / "out")[0] == out


@pytest.mark.vulkan
def test_tables_and_reports_are_utf_8(tmp_path: Path) -> None:
    out, _ = command("tg4", "-r", "2", "-m", "demo-dense", "--read-rate", "0", encoding="ascii", module="vkbench")
    assert "\u00b1" in out.decode()
    out, _ = command("profile", "--prompt-tokens", "4", "-n", "2", "-b", "0", encoding="cp1252", out=tmp_path / "profile")
    assert RULE in out.decode()


@pytest.mark.vulkan
def test_chat_reads_utf_8_whatever_the_encoding() -> None:
    """As 16 tokens, and not 20: "Gr\u00fc\u00dfe" is five characters, in cp1252 its bytes are seven."""
    given = f"{TEXT}\n/stats\n/exit\n".encode()
    args = ("chat", "--chat-template", "plain", "-n", "2", "--temp", "0")
    runs = [command(*args, encoding=encoding, given=given) for encoding in ("cp1252", "utf-8")]
    read = [next(line for line in said.splitlines() if line.startswith("prompt ")).split()[1] for _, said in runs]
    assert runs[0][0] == runs[1][0] and read[0] == read[1]


def test_streams_of_any_encoding_take_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {name: io.BytesIO("\u00fc\r\n".encode() + b"\xfc\n" if name == "stdin" else b"") for name in ("stdin", "stdout", "stderr")}
    for name, stream in raw.items():
        monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding="cp1252"))
    open_streams()
    print(f"{TEXT} \udcff", flush=True)
    print(TEXT, file=sys.stderr, flush=True)
    assert raw["stdout"].getvalue().decode().rstrip("\r\n") == f"{TEXT} \\udcff"
    assert raw["stderr"].getvalue().decode().rstrip("\r\n") == TEXT
    assert [sys.stdin.readline(), sys.stdin.readline()] == ["\u00fc\n", "\udcfc\n"]


def test_a_terminal_keeps_its_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    terminal = io.TextIOWrapper(raw, encoding="latin-1")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    open_streams()
    print("\u00fc \u2500", end="", flush=True)
    assert raw.getvalue() == b"\xfc \\u2500"


def test_what_is_no_text_is_refused() -> None:
    assert unicode_text(TEXT, "-p") == TEXT
    with pytest.raises(UsageError, match=r"-p b'a.xff': not UTF-8 text; convert it, as with iconv"):
        unicode_text("a\udcff", "-p")


def test_a_message_that_is_no_text_is_told_and_the_conversation_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = object.__new__(chat.Conversation)
    conversation.take("hall\udcfc")
    assert capsys.readouterr().err.startswith("vkback: error: this message b'hall\\xfc': not UTF-8 text")


# --- the cache ----------------------------------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(paths, "warned_of_cache", [])
    monkeypatch.setenv("VKBACK_CACHE", str(file / "none"))
    for name in ("a", "b"):
        paths.write_cache(file / "none" / "shaders" / name, b"")
    (said,) = caplog.messages
    why = "[^;]+" if sys.platform == "win32" else "Not a directory"  # Windows has words of its own
    assert re.match(rf"nothing can be kept in the cache {re.escape(str(file / 'none'))}: {why}; ", said)
    paths.write_cache(tmp_path / "good" / "a", b"a")
    assert (tmp_path / "good" / "a").read_bytes() == b"a" and len(caplog.messages) == 1


@pytest.mark.vulkan
def test_a_run_names_the_folder_of_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("VKBACK_CACHE", str(file))
    _, said = command("run", "-p", "Hello", "-n", "1", encoding="utf-8")
    assert [line for line in said.splitlines() if str(file) in line and "warning" in line], said
    assert said.count("warning") == 1


@pytest.mark.vulkan
def test_processes_of_one_command_tell_of_its_cache_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("VKBACK_CACHE", str(file))
    _, said = command("test-ops", "ADD", "-j", "2", encoding="utf-8")
    assert said.count(f"nothing can be kept in the cache {file}") == 1, said
