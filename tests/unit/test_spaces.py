"""Recorded spaces of kernel shapes: Kernel Tuner's files there and back, searches replayed on them, and what a duel keeps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from vkback.autotune import kernel_tuner
from vkback.autotune.search import DUEL_ROUNDS, RELATIVE_NOISE, SweepError, duel
from vkback.autotune.simulate import Replay, simulate
from vkback.autotune.spaces import Space
from vkback.timing.launches import Measurement, summarize


def bowl() -> Space:
    """200 points: the time grows with the distance from (8, 4, "b"); two points fail."""
    times = {
        (wg, rows, kind): (100.0 + 10 * abs(i - 5) + 15 * abs(j - 2) + 20 * (kind != "b"), 0.5)
        for i, wg in enumerate((1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
        for j, rows in enumerate((1, 2, 4, 8, 16))
        for kind in ("a", "b", "c", "d")
    }
    del times[1, 1, "a"], times[32, 16, "d"]
    starts = ((1, 1, "b"), (32, 16, "b"))
    return Space(
        "card",
        "driver 1",
        "abc",
        "made up",
        "a task",
        ("wg", "rows", "kind"),
        starts,
        times,
        {(1, 1, "a"): "compile", (32, 16, "d"): "correctness"},
    )


@pytest.mark.parametrize("ending", [".cache.json", ".t4.json"])
def test_a_space_is_read_as_it_was_written(ending: str, tmp_path: Path) -> None:
    space = bowl()
    kernel_tuner.write(space, tmp_path, "task")
    again = kernel_tuner.read(tmp_path / f"task{ending}")
    assert again.times.keys() == space.times.keys()
    assert all(again.times[at] == pytest.approx(space.times[at]) for at in space.times)
    assert again.invalid.keys() == space.invalid.keys() and again.invalid[1, 1, "a"] == "compile"
    assert (again.device, again.driver, again.kernels, again.family, again.line) == ("card", "driver 1", "abc", "made up", "a task")
    assert again.names == space.names
    if ending == ".cache.json":
        assert again.starts == space.starts


def test_a_cache_that_was_left_open_is_read(tmp_path: Path) -> None:
    text = json.dumps(kernel_tuner.to_cache(bowl()), indent="").removesuffix("}\n}") + ","
    with pytest.raises(ValueError):
        json.loads(text)
    assert kernel_tuner.from_cache(text, "f").times.keys() == bowl().times.keys()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no JSON"),
        ("[1]", "device_name is missing"),
        ('{"device_name": "a", "kernel_name": "b", "tune_params_keys": ["x"]}', "cache is missing"),
        ('{"device_name": "a", "kernel_name": "b", "tune_params_keys": ["x"], "cache": {"1": {"time": 2}}}', "the entry '1' lacks 'x'"),
        ('{"results": [{"configuration": {"x": 1}}]}', "expected T4 results"),
        ('{"results": []}', "expected T4 results"),
    ],
)
def test_a_wrong_file_is_named(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(SweepError, match=r"f\.json") as raised:
        kernel_tuner.read(tmp_path / "f.json")
    assert what in str(raised.value)


def test_files_fit_the_schemas_of_kernel_tuner() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="the extra vkback[references] is not installed")
    files = pytest.importorskip("kernel_tuner.file_utils", reason="the extra vkback[references] is not installed")
    _, t1 = files.input_file_schema()
    _, t4 = files.output_file_schema("results")
    jsonschema.validate(kernel_tuner.to_t1(bowl()), t1)
    made = json.loads(json.dumps(kernel_tuner.to_t4(bowl())))
    jsonschema.validate(made, t4)
    made["results"][0]["invalidity"] = "no such word"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made, t4)


def test_kernel_tuner_replays_a_cache(tmp_path: Path) -> None:
    """Its own search, in simulation mode, finds the optimum of our file."""
    theirs = pytest.importorskip("kernel_tuner", reason="the extra vkback[references] is not installed")
    space = bowl()
    kernel_tuner.write(space, tmp_path, "task")
    results, _ = theirs.tune_kernel(
        space.family,
        "void k() {}",
        space.line,
        [],
        space.parameters,
        lang="C",
        cache=str(tmp_path / "task.cache.json"),
        simulation_mode=True,
        strategy="brute_force",
        verbose=False,
        quiet=True,
    )
    best = min((r for r in results if isinstance(r["time"], float)), key=lambda r: r["time"])
    assert best["time"] == pytest.approx(space.optimum / 1e3)
    assert len(results) >= len(space.times)


def test_searches_find_the_optimum_and_ours_soonest() -> None:
    found = {each.strategy: each for each in simulate(bowl(), runs=20)}
    assert list(found) == ["random search", "iterated local search", "annealing", "ours"]
    assert all(each.best[-1] >= 0.99 for each in found.values()), found
    assert found["random search"].spent == 200
    near = {name: each.needed[0] for name, each in found.items()}
    assert near["random search"] is not None and near["iterated local search"] is not None
    assert near["iterated local search"] < near["random search"]


def test_an_evaluation_is_a_point_that_was_not_seen() -> None:
    replay = Replay(bowl(), random.Random(0), 2)
    first = replay.time((8, 4, "b"))
    assert replay.time((8, 4, "b")) == first and replay.tried == 1
    assert first == 100.0
    assert replay.time((1, 1, "a")) == float("inf") and replay.tried == 2
    with pytest.raises(Exception) as raised:
        replay.time((8, 4, "a"))
    assert type(raised.value).__name__ == "_Spent"


def test_a_space_without_times_is_refused() -> None:
    space = bowl()
    space.times.clear()
    with pytest.raises(SweepError, match="no point has a time"):
        simulate(space)


class Noisy:
    """Points with a true time each, measured with noise."""

    def __init__(self, true: dict[str, float], noise: float, seed: int) -> None:
        self._true, self._noise, self._rng = true, noise, random.Random(seed)

    def measure(self, point: str, repetitions: int) -> Measurement:
        return summarize([self._true[point] * (1 + self._rng.gauss(0, self._noise)) for _ in range(repetitions)])


def winners(gain: float, noise: float, runs: int = 300) -> dict[str, int]:
    won: dict[str, int] = {"tables": 0, "new": 0}
    for seed in range(runs):
        trial: Any = Noisy({"tables": 100.0, "new": 100.0 * (1 - gain)}, noise, seed)
        won[duel(trial, "tables", ["new"], RELATIVE_NOISE)[0]] += 1
    return won


def test_the_row_of_the_tables_is_kept_unless_the_gain_beats_the_noise() -> None:
    """A challenger that is not better wins at most as often as chance lets one win all rounds and the noise besides; one that is better by
    less than RELATIVE_NOISE does not, however little noise there is."""
    assert DUEL_ROUNDS == 5
    for noise in (0.0, 0.002, 0.02, 0.2):
        assert winners(0.0, noise)["new"] <= 300 / 2**DUEL_ROUNDS, noise
    assert winners(RELATIVE_NOISE / 2, 0.0)["new"] == 0
    assert winners(0.5 * RELATIVE_NOISE, 0.001)["new"] <= 3
    assert winners(0.10, 0.005)["new"] >= 290
    assert winners(0.10, 0.2)["new"] <= 60
