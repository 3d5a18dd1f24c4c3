"""The documents' commands, each run once with a Windows code page in its streams and once with every warning an error (tools/smoke.py)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tools import smoke
from tools.documents import ROOT, commands
from tools.smoke import FailedError, LeftOutError, Shell, Step, cut, environment, judged, steps
from vkback.cli import main, vkbench

QUICK = ("vkback devices", "vkback run -p", "vkback explain", "vkback perplexity", "vkback plan", "vkback synth llama", "vkback serve")
"""Beginnings of commands that take seconds. Text of a model, a server, tables, a file."""
MODES = {"cp1252": (("--encoding", "cp1252"), ("cp1252", False)), "warnings": (("--strict",), (None, True))}

ALL = steps(commands())
CHOSEN = [next(step for step in ALL if step.shown.startswith(start)) for start in QUICK]


def python(mode: str) -> list[str]:
    return [sys.executable, *(["-W", "error"] if MODES[mode][1][1] else [])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("smoke")
    smoke.prepare(made)
    return made


@pytest.mark.vulkan
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", CHOSEN, ids=QUICK)
def test_a_quick_command(step: Step, mode: str, folder: Path) -> None:
    try:
        Shell(folder, python(mode), environment(folder, *MODES[mode][1])).run(step)
    except LeftOutError as e:
        pytest.skip(str(e))


@pytest.mark.vulkan
@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
def test_every_command(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.main(MODES[mode][0]) == 0, capsys.readouterr().out


def test_every_command_of_the_program_is_among_them() -> None:
    run = {step.argv[1] for step in ALL if step.argv[0] == "vkback"}
    assert run == set(main.COMMANDS)
    assert {step.argv[1] for step in ALL if step.argv[0] == "vkbench"} >= set(vkbench.COMMANDS)


def test_the_short_list_of_make_windows_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    windows = importlib.import_module("windows")
    for words in windows.COMMANDS:
        assert any(smoke.chosen(step, [words]) for step in ALL), words
    assert all((ROOT / name).is_file() for name in windows.KEY_TESTS)


def test_cuts_stand_in_the_place_of_a_documents_options() -> None:
    assert cut(["-m", "x", "-n", "512", "--json"], ["-n", "4"]) == ["-m", "x", "--json", "-n", "4"]


def test_files_are_written_before_they_are_read() -> None:
    at = {step.shown: i for i, step in enumerate(ALL)}
    for writes, reads in (
        ("vkback compare -m model.gguf --save a.npz", "vkback compare -m model.gguf --against a.npz"),
        ("vkback finetune --data text.txt --lr 3e-3 --steps 40 -o adapter.gguf", "vkback run --lora adapter.gguf"),
        ("vkback synth smollm-135m-F32 smollm.gguf", "vkback train-parity -m smollm.gguf"),
        ("vkbench batch -m model.gguf -npp 512", "vkback history results.sqlite"),
    ):
        (first,) = (i for shown, i in at.items() if shown.startswith(writes))
        assert all(first < i for shown, i in at.items() if shown.startswith(reads))
    assert ALL[-1].argv[1] == "cache"


def test_what_is_wrong_with_a_command() -> None:
    assert judged(0, b"\xc3\xbc", b"") == "\u00fc"
    with pytest.raises(FailedError, match="status 1\nvkback: error: x"):
        judged(1, b"", b"vkback: error: x")
    with pytest.raises(FailedError, match="status 0"):
        judged(0, b"", b"Traceback (most recent call last):\n  x")
    with pytest.raises(FailedError, match="stdout is not UTF-8"):
        judged(0, b"\xfc", b"")
    lacks = b"vkback: error: [device] statistics of kernels need VK_KHR_x, which y (z) does not offer. Do without"
    with pytest.raises(LeftOutError, match="statistics of kernels need VK_KHR_x"):
        judged(1, b"", lacks)
