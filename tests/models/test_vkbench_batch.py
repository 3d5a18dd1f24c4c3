"""vkbench batch on a device, with the timer of this build; without one the command says so."""

from __future__ import annotations

import importlib.util
import json

import pytest
from cli_kit import call

from vkback.cli import vkbench, vkbench_batch


def has_timer() -> bool:
    """find_spec raises where a package on the way to a module is missing."""
    package, _, _ = vkbench_batch.TIMER.rpartition(".")
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(vkbench_batch.TIMER) is not None


@pytest.mark.vulkan
@pytest.mark.parametrize("line", ["", "-pps", "-d 5"])
def test_many_sequences_are_timed(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"batch -m demo-dense -npp 12 -ntg 6 -npl 1,3 -r 2 --no-warmup --json {line}".split()
    code = call(monkeypatch, vkbench.main, *words)
    out, err = capsys.readouterr()
    if not has_timer():
        assert (code, out) == (1, "")
        assert (
            err
            == "vkbench: error: [batch] this build of vkback runs one sequence at a time; batches come with a later one: update vkback\n"
        )
        return
    rows = json.loads(out)
    depth = 5 if "-d" in line else 0
    read = {1: 12, 3: 12 if "-pps" in line else 36}
    assert code == 0 and [(row["pl"], row["n_kv"]) for row in rows] == [(pl, read[pl] + pl * (6 + depth)) for pl in (1, 3)]
    for row in rows:
        assert all(t > 0 for t in (*row["samples_t_pp"], *row["samples_t_tg"])) and len(row["samples_t_pp"]) == 2
        assert row["speed_pp"] == pytest.approx(read[row["pl"]] / row["t_pp"]) and row["speed_tg"] == pytest.approx(
            6 * row["pl"] / row["t_tg"]
        )
