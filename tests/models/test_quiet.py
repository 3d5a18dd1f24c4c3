"""The library writes nothing to stderr by itself; its lines go to the logger "vkback", and commands print them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from cli_kit import call
from waiting import PATIENCE_S

import vkback
from vkback import paths
from vkback.cli import main
from vkback.events import log

USE = """
import logging
{configure}
import vkback

with vkback.load("demo-d", ctx=64) as model:
    assert len(model.generate("Once", max_tokens=3, temperature=0).tokens) == 3
    assert model.session().generate("Once upon", max_tokens=2).tokens
"""


def used(configure: str, cache: str) -> str:
    """stderr of a process that loads a model by the beginning of its name, on a CPU driver, with a cache that cannot be written."""
    env = os.environ | {"VKBACK_CACHE": cache, "VK_LOADER_DEBUG": "none"}
    env.pop("VKBACK_DEVICE", None)
    command = [sys.executable, "-c", USE.format(configure=configure)]
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.vulkan
def test_importing_and_using_vkback_writes_nothing_to_stderr() -> None:
    assert used("", os.devnull) == ""


@pytest.mark.vulkan
def test_lines_come_where_logging_is_configured() -> None:
    said = used("logging.basicConfig(level='INFO', format='%(levelname)s %(name)s: %(message)s')", os.devnull).splitlines()
    assert "INFO vkback: demo-d is the built-in model demo-dense-Q4_K_M" in said
    assert any(line.startswith("INFO vkback.progress: loading ") for line in said)
    assert any(line.startswith(f"WARNING vkback: nothing can be kept in the cache {os.devnull}: ") for line in said)


def test_commands_print_the_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Only while they run: one in the same process before or after does not print a line twice."""
    for _ in range(2):
        assert call(monkeypatch, main.main, "graph", "-m", "demo-d") == 0
        assert capsys.readouterr().err == "vkback: demo-d is the built-in model demo-dense-Q4_K_M\n"
    assert paths.builtin_model("demo-d").is_file()
    assert capsys.readouterr().err == ""
    assert [type(handler) for handler in log.handlers if type(handler).__module__ != "_pytest.logging"] == [logging.NullHandler]


@pytest.mark.vulkan
def test_progress_is_reported_to_a_function() -> None:
    """Of each work the events are in order and end; nothing of it is needed for a text."""
    events: list[vkback.Progress] = []
    with vkback.load("demo-dense", None, 64, progress=events.append) as model:
        assert model.generate("Once upon a time", max_tokens=3).tokens
    for work, total in (("load", None), ("compile", None), ("prompt", len(model.tokenizer.encode("Once upon a time")) - 1)):
        own = [event for event in events if event.work == work]
        assert own and own[-1].ended and own[-1].done == pytest.approx(own[-1].total), work
        assert total in (None, own[-1].total)
    with pytest.raises(vkback.ModelError, match=r"progress is 'yes' \(str\), expected True or False"):
        vkback.load("demo-dense", progress="yes")  # type: ignore[arg-type]
