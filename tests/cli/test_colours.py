"""Colours and bars are for terminals that know them, and for users who want them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import REPOSITORY
from waiting import PATIENCE_S

from vkback.cli.terminal import StatusLine
from vkback.terminal import colours_wanted, redraws

CASE = "SQR(type=f32,ne=[10,5,4,3])"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "set_to", "bars", "colours"),
    [
        (Terminal(), {}, True, True),
        (Terminal(), {"NO_COLOR": "1"}, True, False),
        (Terminal(), {"NO_COLOR": ""}, True, True),
        (Terminal(), {"TERM": "dumb"}, False, False),
        (io.StringIO(), {}, False, False),
    ],
    ids=["terminal", "NO_COLOR", "NO_COLOR empty", "dumb", "pipe"],
)
def test_who_gets_colours(stream: io.StringIO, set_to: dict[str, str], bars: bool, colours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    assert (redraws(stream), colours_wanted(stream)) == (bars, colours)
    monkeypatch.setattr(sys, "stderr", stream)
    with StatusLine() as line:
        line.say("1 of 2")
    assert ("\x1b" in stream.getvalue()) is bars


def on_a_terminal(*words: str, **variables: str) -> str:
    """What a command writes to a terminal that both of its outputs are."""
    if not hasattr(os, "openpty"):
        pytest.skip("this system has no pseudo terminals")
    try:
        ours, its = os.openpty()
    except OSError as e:
        pytest.skip(f"no pseudo terminal can be opened: {e}")
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "vkback", *words], cwd=REPOSITORY, stdout=its, stderr=its, env={**environment, "TERM": "xterm", **variables}
    ) as process:
        os.close(its)
        written = b""
        while True:
            try:
                some = os.read(ours, 4096)
            except OSError:  # how Linux says that the other end is closed
                break
            if not some:
                break
            written += some
        os.close(ours)
        assert process.wait(PATIENCE_S) == 0, written
    return written.decode()


@pytest.mark.vulkan
def test_no_command_colours_what_nobody_wants_coloured() -> None:
    line = ("test-ops", CASE)
    assert "\x1b[32mOK\x1b[0m" in on_a_terminal(*line)
    assert "\x1b[3" not in on_a_terminal(*line, NO_COLOR="1")
    assert "\x1b" not in on_a_terminal(*line, TERM="dumb")


@pytest.mark.vulkan
def test_a_dumb_terminal_gets_no_escape_sequence_of_a_bar(tmp_path: Path) -> None:
    written = on_a_terminal("run", "Hello", "-n", "1", "-c", "32", TERM="dumb")
    assert "\x1b" not in written and "vkback: preparing " in written
    assert "generation     1 token  in" in written
