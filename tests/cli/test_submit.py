"""vkbench --submit, and the table of cards that is made of such files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from device_kit import profile
from typer.testing import CliRunner

from vkback.autotune.share import share
from vkback.cli import vkbench, vkbench_submit
from vkback.report import tables
from vkback.report.community import CARDS_LEFT, cards, read, submission
from vkback.report.result_table import ReportError
from vkback.tuning.lookup import device_table

CAPS = profile("amd_rx_7900_xtx_radv", uuid="00000000-0000-0000-0000-00000000000a")
ROW = {
    "build_commit": "abc1234",
    "model_filename": "/home/somebody/models/m.gguf",
    "model_type": "llama 8B Q4_K - Medium",
    "model_size": 1,
    "test": "tg128",
    "avg_ts": 100.0,
    "stddev_ts": 1.0,
    "ts_per_watt": 0.5,
    "test_time": "2026-11-27T00:00:00Z",
    "driver_info": "RADV 26",
    "command": "vkbench -m /home/somebody/models/m.gguf",
}
SUITE = {"right": 300, "wrong": 1, "not_supported": 2, "failing": ["ADD(ne=[1,1,1,1],seed=1)"]}
REPORT = "compiler: /home/somebody/bin/glslc\nuuid: 00000000-0000-0000-0000-00000000000a\n"


def test_a_file_tells_the_card_and_nobody_s_name() -> None:
    text = json.dumps(submission(CAPS, REPORT, "[[gemv]]", [ROW], SUITE))
    assert "somebody" not in text and "00000000-0000" not in text and "m.gguf" in text
    assert CAPS.name in text and "[[gemv]]" in text and "abc1234" in text


def test_files_become_a_table_of_cards(tmp_path: Path) -> None:
    for name, speed in (("b", 50.0), ("a", 100.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps(submission(CAPS, REPORT, "", [{**ROW, "avg_ts": speed}], SUITE)))
    found = cards(sorted(tmp_path.glob("*.json")))
    assert list(found["t/s"]) == ["100.00 ± 1.00", "50.00 ± 1.00"]
    assert set(found["device"]) == {CAPS.name} and set(found["suite"]) == {"300/301"} and set(found["t/s/W"]) == {"0.5"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 9}, "format 9, expected 1"),
        ({"device": {}}, "device: "),
        ({"bench": [{"avg_ts": 1}]}, "result 1: build_commit"),
        ({"bench": [{**ROW, "model_filename": "m", "command": "", "avg_ts": 0}]}, "avg_ts 0, expected tokens per second above 0"),
        ({"report": "/home/somebody/x"}, "a folder that tells a name"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({**submission(CAPS, "", "", [], SUITE), **change}))
    with pytest.raises(ReportError) as e:
        read(file)
    assert said in str(e.value) and str(file) in str(e.value)


def test_what_tuning_shares_is_read_and_tells_nobody_s_name(tmp_path: Path) -> None:
    table = tmp_path / device_table(CAPS)
    table.write_text("[[gemv]]  # from /home/somebody/tuned\n", encoding="utf-8")
    line = {"task": "MUL_MAT", "from": "/home/somebody/x", "uuid": CAPS.uuid}
    table.with_suffix(".journal").write_text(json.dumps(line) + "\n{cut", encoding="utf-8")
    file = tmp_path / "shared.json"
    share(CAPS, REPORT, tmp_path, file)
    text = file.read_text(encoding="utf-8")
    assert "somebody" not in text and CAPS.uuid not in text and "[[gemv]]" in text
    found = read(file)
    assert found["journal"] == [{"task": "MUL_MAT", "from": "~", "uuid": ""}] and found["device"]["name"] == CAPS.name
    assert cards([file]).empty, "without results there is no row"


def test_the_page_of_cards_holds_what_the_files_say() -> None:
    """docs/cards.md has the table that bench/community/cards.py prints."""
    root = Path(__file__).parents[2]
    files = sorted((root / "bench/community").glob("*.json"))
    page = (root / "docs/cards.md").read_text(encoding="utf-8")
    held = [line for line in page.splitlines() if line.startswith("|")]
    assert held == (tables.markdown(cards(files), CARDS_LEFT) if files else []), "run: python bench/community/cards.py"
    assert ("Nobody has sent one yet" in page) is not bool(files)


@pytest.mark.vulkan
def test_the_command_writes_a_file_that_passes_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vkbench_submit, "suite_verdict", lambda device: SUITE)
    file = tmp_path / "card.json"
    options = ["-m", "demo-dense", "-p", "0", "-n", "2", "-r", "1", "--read-rate", "0", "--submit", str(file)]
    ran = CliRunner().invoke(vkbench.app, options)
    assert ran.exit_code == 0, ran.exception
    assert "Put it into bench/community/ of the repository" in ran.stderr
    (row,) = read(file)["bench"]
    assert row["test"] == "tg2" and row["model_filename"].endswith(".gguf") and "/" not in row["model_filename"]
