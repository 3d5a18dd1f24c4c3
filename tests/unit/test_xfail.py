"""Expected failures of the suite: which cases a file names for a driver, and what a run says of them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from cli_kit import call

from vkback.cli import main
from vkback.harness.output import About, Console
from vkback.harness.result import CaseResult
from vkback.harness.xfail import Xfail, XfailError, expecting, load

LISTED = """
[[driver]]
name = "llvmpipe Mesa 22"

[[driver.xfail]]
case = "ROPE(*pos=[131069]*)"
reason = "angles in f32"

[[driver]]
name = "radv"

[[driver.xfail]]
case = "ADD(*)"
reason = "another driver's"
"""


def result(line: str, passed: bool) -> CaseResult:
    return CaseResult(op=line.partition("(")[0], line=line, mode="test", passed=passed, message="" if passed else "[ROPE] wrong")


def test_cases_of_a_driver(tmp_path: Path) -> None:
    path = tmp_path / "xfail.toml"
    path.write_text(LISTED)
    (entry,) = load(path, "llvmpipe (LLVM 15) LLVMPIPE MESA 22.3.6")
    assert entry == Xfail("ROPE(*pos=[131069]*)", "angles in f32")
    assert entry.matches("ROPE(ne=[3,2],pos=[131069],seed=1)") and not entry.matches("ROPE(ne=[3,2],pos=[1],seed=1)")
    assert load(path, "NVIDIA") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("case = 1", "case: expected entries written"),
        ("[[driver]]\nname = 3\nxfail = []", r"\[\[driver\]\] 1: name: expected text"),
        ("[[driver]]\nname = 'x'\n[[driver.xfail]]\ncase = 'ADD(*)'", "xfail 1: reason: expected text"),
        ("[[driver]]\nname = 'x'\n[[driver.xfail]]\ncase = 'ADD(*)'\nreason = 'y'\nwhy = 'z'", "why is not known; expected case, reason"),
        ("[[", "cannot be read"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "xfail.toml"
    path.write_text(text)
    with pytest.raises(XfailError, match=said):
        load(path, "x")


def test_failures_that_are_expected_do_not_count_and_drift_is_told() -> None:
    lines = ["ROPE(a=1)", "ROPE(a=2)", "ROPE(b=1)", "ROPE(b=2)"]
    ran = [result(line, passed) for line, passed in zip(lines, (False, True, False, True), strict=True)]
    out = io.StringIO()
    console = Console(out, About("Vulkan0", "a", "b", "c", "d"), verbose=False, style=lambda text, colour: text)
    for each in expecting(ran, [Xfail("ROPE(a=*)", "angles in f32")]):
        console.add(each)
    console.finish()
    assert console.tally.failed == ["ROPE(b=1)"]
    assert out.getvalue().splitlines() == [
        "  ROPE(a=1): XFAIL [angles in f32]",
        "  ROPE(a=2): XPASS [angles in f32]",
        "[ROPE] wrong",
        "  ROPE(b=1): FAIL",
        "  ROPE(b=2): OK",
        "  2/4 tests passed, 1 failed as expected",
        "",
        "Passing though expected to fail (take them off the list):",
        "  ROPE(a=2)",
        "",
        "Failing tests:",
        "  ROPE(b=1)",
    ]


def test_the_command_reads_the_file_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "xfail.toml"
    assert call(monkeypatch, main.main, "test-ops", "--xfail", str(path)) == 2
    assert "cannot be read" in capsys.readouterr().err
    path.write_text(LISTED)
    assert call(monkeypatch, main.main, "test-ops", "perf", "--xfail", str(path)) == 2
    assert "expected mode test or grad, not perf" in capsys.readouterr().err
    line = "ADD(type=f32,ne=[16,1,1,1],nr=[1,1,1,1])"
    path.write_text("[[driver]]\nname = 'e'\n[[driver.xfail]]\ncase = 'ADD(*)'\nreason = 'a test'")
    assert call(monkeypatch, main.main, "test-ops", line, "--xfail", str(path)) == 0
    assert "XPASS [a test]" in capsys.readouterr().out
