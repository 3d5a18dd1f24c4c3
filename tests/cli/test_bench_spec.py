"""vkbench spec: what it refuses, and a table of a small model on the device."""

from __future__ import annotations

import json
import sys

import pytest

from vkback.cli import vkbench, vkbench_spec
from vkback.device import Device


def call(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    monkeypatch.setattr(sys, "argv", ["vkbench", "spec", *line.split()])
    with pytest.raises(SystemExit) as ended:
        vkbench.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--task poem", "--task poem: expected code, extraction, summary, chat, copy or none"),
        ("--columns 5", "--columns 5: expected 4, 8 or 16"),
        ("--accept-len 0", "--accept-len 0: expected 1 and more"),
        ("-o csv", "-o csv: expected one of md, json"),
        ("--draft-max -1", "Invalid value for '--spec-draft-n-max'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, line) == 2
    assert message in capsys.readouterr().err


@pytest.mark.vulkan
def test_made_acceptance_is_as_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: Device) -> None:
    line = f"-m demo-dense --task none -n 32 -p 8 -r 1 --columns 4 --accept-len 2 --accept 1 -dev {device.index} -o json"
    assert call(monkeypatch, line) == 0
    rows = {row["test"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == [
        "nothing to draft",
        "one token again and again",
        "as if copied, none right",
        "no drafts",
        "2 tokens a step",
        "a draft is right at 1",
        "all drafts right",
    ]
    assert rows["as if copied, none right"]["accepted"] == 0
    assert (rows["no drafts"]["steps"], rows["no drafts"]["drafted"]) == (32, 0)
    assert (rows["2 tokens a step"]["steps"], rows["2 tokens a step"]["accepted"]) == (16, 16)
    assert rows["all drafts right"]["steps"] == rows["a draft is right at 1"]["steps"] == 8
    assert all(row["t_s"][0] > 0 and row["base_t_s"][0] > 0 for row in rows.values())


@pytest.mark.vulkan
def test_json_is_the_same_by_either_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: Device) -> None:
    row = vkbench_spec.SpecResult("copy", 4, 32, (2.0,), (1.0,), 8, 24, 24)
    monkeypatch.setattr(vkbench_spec.Bench, "rows", lambda self, *_: iter([row]))
    for option in ("--json", "-o json"):
        assert call(monkeypatch, f"-m demo-dense --task none -n 32 -dev {device.index} {option}") == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert (found["test"], found["t_s"], found["accepted"]) == ("copy", [2.0], 24)
