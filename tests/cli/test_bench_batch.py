"""vkbench batch with a timer that makes its times up: what is tested is what it asks for, prints, keeps and compares."""

from __future__ import annotations

import io
import json
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from cli_kit import FakeEngine, call, engine  # noqa: F401

from vkback.cli import main, vkbench, vkbench_batch
from vkback.cli.vkbench_batch import BatchTest, measure, planned
from vkback.report.batch_table import BATCH, BatchResult
from vkback.report.result_table import ReportError


class Times(NamedTuple):
    t_pp: float
    t_tg: float
    n_kv: int


@dataclass
class FakeTimer:
    """Prompts at 1000 t/s whatever is at once; a generated token of all sequences takes 10 ms. factor: of the times, one after another."""

    asked: list[tuple[int, int, int, bool, int]] = field(default_factory=list)
    opened: list[tuple[str, int, int]] = field(default_factory=list)
    factor: Callable[[int], float] = lambda number: 1.0
    closed: bool = False

    def close(self) -> None:
        self.closed = True

    def time(self, pp: int, tg: int, pl: int, *, shared: bool, depth: int) -> Times:
        self.asked.append((pp, tg, pl, shared, depth))
        read = pp if shared else pl * pp
        slower = self.factor(len(self.asked))
        return Times(read / 1000 * slower, tg / 100 * slower, read + pl * (tg + depth))


@pytest.fixture
def timer(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeTimer:  # noqa: F811
    """The timer of a build that has one."""
    timer = FakeTimer()

    def open_timer(of: FakeEngine, max_sequences: int, n_kv_max: int) -> FakeTimer:
        timer.opened.append((of.description, max_sequences, n_kv_max))
        return timer

    monkeypatch.setitem(sys.modules, vkbench_batch.TIMER, SimpleNamespace(open_timer=open_timer))
    return timer


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], timer: FakeTimer) -> Callable[..., str]:
    """What the command prints on stdout."""

    def printed(line: str, *more: str) -> str:
        assert call(monkeypatch, vkbench.main, "batch", "-m", "demo-dense", *line.split(), *more) == 0
        return capsys.readouterr().out

    return printed


# --- the table

HEAD = "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |"
"""That of llama-batched-bench."""


def test_the_table_is_that_of_llama_batched_bench(printed: Callable[..., str], timer: FakeTimer, engine: FakeEngine) -> None:  # noqa: F811
    lines = printed("-npp 128,512 -ntg 100 -npl 1,4 -r 1").splitlines()
    assert lines[:2] == [
        "vkback: 0 = Test GPU",
        "llama 0.1B Q4_0: n_kv_max = 2448, n_batch = 2048, n_ubatch = 512, flash_attn = -1, is_pp_shared = 0, n_gpu_layers = 99, "
        "n_threads = 1, n_threads_batch = 1",
    ]
    assert lines[2] == HEAD
    assert lines[3:8] == [
        "| ----: | -----: | ---: | -----: | -------: | -------: | -------: | -------: | -------: | -------: |",
        "|   128 |    100 |    1 |    228 |    0.128 |  1000.00 |    1.000 |   100.00 |    1.128 |   202.13 |",
        "|   128 |    100 |    4 |    912 |    0.512 |  1000.00 |    1.000 |   400.00 |    1.512 |   603.17 |",
        "|   512 |    100 |    1 |    612 |    0.512 |  1000.00 |    1.000 |   100.00 |    1.512 |   404.76 |",
        "|   512 |    100 |    4 |   2448 |    2.048 |  1000.00 |    1.000 |   400.00 |    3.048 |   803.15 |",
    ]
    assert lines[-1].startswith("build: ")
    assert timer.opened == [("llama 0.1B Q4_0", 4, 2448)] and timer.closed, "as much as the largest row needs"
    assert engine.loaded == [("demo-dense-Q4_K_M.gguf", None, 612, "auto")], "a sequence's rows"
    assert timer.asked == [(pp, 100, pl, False, 0) for pp in (128, 512) for pl in (1, 4) for _ in range(2)], "a warm-up and a run"


def test_a_shared_prompt_is_read_once(printed: Callable[..., str], timer: FakeTimer) -> None:
    (row,) = json.loads(printed("-npp 128 -ntg 100 -npl 4 -pps -r 1 --json --no-warmup"))
    assert timer.asked == [(128, 100, 4, True, 0)]
    assert (row["n_kv"], row["is_pp_shared"], row["speed_pp"]) == (128 + 4 * 100, 1, 1000.0)
    assert row["speed"] == pytest.approx((128 + 400) / 1.128)


def test_depths_have_a_column_of_their_own(printed: Callable[..., str], timer: FakeTimer) -> None:
    lines = printed("-npp 8 -ntg 10 -npl 2 -d 0,64 -r 1 --no-warmup").splitlines()
    assert lines[2].endswith("|    S t/s |  depth |")
    assert [line.split("|")[4].strip() for line in lines[4:6]] == ["36", "164"]
    assert [line.split("|")[-2].strip() for line in lines[4:6]] == ["0", "64"]
    rates = {line.split("|")[10] for line in lines[4:6]}
    assert len(rates) == 1, "rows that were there before do not count as tokens"
    assert [asked[-1] for asked in timer.asked] == [0, 64]


FIELDS = (
    "n_kv_max n_batch n_ubatch flash_attn is_pp_shared n_gpu_layers n_threads n_threads_batch pp tg pl n_kv t_pp speed_pp t_tg speed_tg t "
    "speed"
)
"""llama-batched-bench's, in its order."""


def test_machine_formats_have_its_fields_and_ours(printed: Callable[..., str], timer: FakeTimer) -> None:
    timer.factor = lambda number: float(number)
    line = "-npp 100 -ntg 100 -npl 2 -r 2 --no-warmup -ub 64 -o"
    (row,) = map(json.loads, printed(f"{line} jsonl").splitlines())
    assert " ".join(row).startswith(FIELDS + " ")
    assert (row["t_pp"], row["speed_pp"]) == (pytest.approx(0.3), pytest.approx(200 / 0.3)), "mean of 0.2 and 0.4 s"
    assert (row["samples_t_pp"], row["samples_t_tg"]) == ([0.2, 0.4], [1.0, 2.0])
    assert row["stddev_speed_tg"] == pytest.approx(50 * 2**0.5), "of 200 and 100 t/s"
    assert (row["gpu_info"], row["driver_info"], row["tuning"], row["n_ubatch"]) == ("Test GPU", "testdrv 1.2", FakeEngine.tuning, 64)
    assert row["test_time"].endswith("Z") and row["command"].startswith("vkbench batch -m demo-dense")
    (same,) = json.loads(printed(f"{line} json"))
    assert same.keys() == row.keys()
    header, values = printed(f"{line} csv").splitlines()
    assert header.startswith(FIELDS.replace(" ", ",")) and values.startswith('"400","2048","64","-1","0"')
    db = sqlite3.connect(":memory:")
    db.executescript(printed(f"{line} sql"))
    assert db.execute("SELECT pl, tg, model_type FROM llama_batched_bench").fetchall() == [(2, 100, "llama 0.1B Q4_0")]
    types = {name: kind for _, name, kind, *_ in db.execute("PRAGMA table_info(llama_batched_bench)")}
    assert [types[name] for name in ("pl", "t_pp", "stddev_speed", "act")] == ["INTEGER", "REAL", "REAL", "TEXT"]
    db.close()


def test_kept_tables_say_when_where_and_how(printed: Callable[..., str], tmp_path: Path) -> None:
    table = tmp_path / "r.md"
    out = printed("-npp 8 -ntg 8 -npl 2 -r 1", "--save", str(table))
    lines = table.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("    vkbench batch -m demo-dense") and lines[2].endswith(", Test GPU, driver testdrv 1.2")
    assert lines[4:] == out.splitlines()


# --- what is measured


def test_rows_that_do_not_fit_are_left_out_with_the_reason(
    timer: FakeTimer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "batch -m demo-dense -npp 128 -ntg 72 -npl 1-8*2 -c 900 -r 1 --no-warmup -o jsonl"
    assert call(monkeypatch, vkbench.main, *line.split()) == 0
    out, err = capsys.readouterr()
    assert [json.loads(text)["pl"] for text in out.splitlines()] == [1, 2, 4]
    assert err == "vkbench: 8 x pp128+tg72: left out: it needs 1600 rows of cache, and -c 900 has fewer\n"
    assert timer.opened == [("llama 0.1B Q4_0", 4, 900)]


def test_rows_come_in_llama_batched_bench_s_order() -> None:
    tests, most = planned(["128,512"], ["16,32"], ["1,2"], ["0"], False, None)
    assert [(t.pp, t.tg, t.pl) for t in tests] == [(pp, tg, pl) for pp in (128, 512) for tg in (16, 32) for pl in (1, 2)]
    assert most == 2 * (512 + 32)


def test_a_gpu_is_warmed_up_for_a_second() -> None:
    timer, now = FakeTimer(), iter(range(0, 10**12, 300_000_000))
    times = measure(timer, BatchTest(8, 4, 2, 0, False), 3, clock=lambda: next(now))
    assert len(times) == 3 and len(timer.asked) == 1 + 3 + 3, "once, for 1 s at 0.3 s each, and thrice"
    said: list[str] = []
    timer = FakeTimer()
    measure(timer, BatchTest(8, 4, 2, 0, True), 2, cpu=True, note=said.append)
    assert said == [f"2 x pp8+tg4 shared: {what}" for what in ("warm-up", "run 1/2", "run 2/2")]


def test_without_options_it_is_the_curve_of_1_to_64(printed: Callable[..., str], timer: FakeTimer) -> None:
    rows = json.loads(printed("--json -r 1 --no-warmup"))
    assert [(r["pp"], r["tg"], r["pl"]) for r in rows] == [(pp, 128, pl) for pp in (128, 512) for pl in (1, 2, 4, 8, 16, 32, 64)]


def test_a_command_line_of_llama_batched_bench_runs_as_it_is(
    timer: FakeTimer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "batch -m demo-dense -c 2048 -b 2048 -ub 512 -npp 8 -ntg 8 -npl 1,2 -ngl 99 -fa 1 --output-format jsonl -r 1"
    assert call(monkeypatch, vkbench.main, *line.split()) == 0
    out, err = capsys.readouterr()
    assert [(r["n_kv_max"], r["flash_attn"]) for r in map(json.loads, out.splitlines())] == [(2048, 1)] * 2
    assert err == "vkbench: -b means nothing here\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-npp 0", "-npp 0: expected at least 1; a sequence reads a token at least, and generates one"),
        ("-npl x", "-npl x: expected a number, a list as 128,256, or a range as 1-4, 0-8192+2048 or 1-512*2"),
        ("-npp 128 -ntg 72 -c 100", "-c 100: no row of the table fits, the smallest needs 200 rows of cache; raise -c"),
        ("-pps -d 0,64", "-pps and -d exclude each other: keys and values of a prompt depend on what stands before it in its sequence"),
        ("-o xml", "-o xml: expected one of md, csv, json, jsonl, sql"),
        ("-npz 5", "No such option: -npz. Did you mean -npp? vkbench batch --help tells more"),
    ],
)
def test_errors_are_one_line(
    line: str,
    said: str,
    timer: FakeTimer,
    engine: FakeEngine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, vkbench.main, "batch", "-m", "demo-dense", *line.split()) == 2
    assert capsys.readouterr().err == f"vkbench: error: {said}\n"
    assert engine.loaded == []


def test_a_build_without_batches_says_so_before_it_loads_a_model(
    engine: FakeEngine,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(vkbench_batch, "TIMER", "vkback.engine.no_batch.timer")
    assert call(monkeypatch, vkbench.main, "batch", "-m", "demo-dense") == 1
    said = "[batch] this build of vkback runs one sequence at a time; batches come with a later one: update vkback"
    assert capsys.readouterr() == ("", f"vkbench: error: {said}\n")
    assert engine.loaded == []


def test_a_fault_inside_the_timer_is_no_missing_build(timer: FakeTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vkbench_batch, "TIMER", "broken_timer")

    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(vkbench_batch, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="other"):
        vkbench_batch.timer_of_this_build()


# --- comparisons and stores


def saved(printed: Callable[..., str], timer: FakeTimer, path: Path, slower: float, line: str) -> Path:
    timer.factor = lambda number: slower * (1 + 0.001 * (number % 3))
    printed(f"{line} -r 3 --no-warmup", "--save", str(path))
    return path


def compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    assert call(monkeypatch, main.main, "compare-bench", *args, "--json") == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "sql", "md"])
def test_results_are_compared_sequence_count_by_sequence_count(
    ending: str,
    printed: Callable[..., str],
    timer: FakeTimer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "-npp 128 -ntg 100 -npl 1,8"
    old, new = (saved(printed, timer, tmp_path / f"{s}.{ending}", s, line) for s in (2.0, 1.0))
    records = compared(monkeypatch, capsys, str(old), str(new))
    tests = ["pp128", "tg100 @ d128", "pp128+tg100"]
    assert [r["test"] for r in records] == [f"{pl} x {test}" for pl in (1, 8) for test in tests]
    assert all(r["diff_percent"] == pytest.approx(100, abs=1) for r in records)
    assert records[4]["before_ts"] == pytest.approx(8 * 100 / 2.0, rel=0.01)
    if ending.startswith("json"):
        assert all(r["beats_noise"] for r in records)


def test_counts_of_sequences_are_never_taken_together(
    printed: Callable[..., str], timer: FakeTimer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = saved(printed, timer, tmp_path / "old.json", 1.0, "-npp 8 -ntg 8 -npl 8")
    new = saved(printed, timer, tmp_path / "new.json", 1.0, "-npp 8 -ntg 8 -npl 16")
    assert call(monkeypatch, main.main, "compare-bench", str(old), str(new)) == 1
    assert "the two results share no test: the first has llama 0.1B Q4_0 8 x pp8" in capsys.readouterr().err
    shared = saved(printed, timer, tmp_path / "shared.json", 1.0, "-npp 8 -ntg 8 -npl 8 -pps")
    assert call(monkeypatch, main.main, "compare-bench", str(old), str(shared)) == 1
    assert "the second llama 0.1B Q4_0 8 x pp8 shared" in capsys.readouterr().err


LLAMA = {
    "n_kv_max": 4096,
    "n_batch": 2048,
    "n_ubatch": 512,
    "flash_attn": 1,
    "is_pp_shared": 0,
    "n_gpu_layers": 99,
    "n_threads": 8,
    "n_threads_batch": 8,
    "pp": 128,
    "tg": 100,
    "pl": 8,
    "n_kv": 1824,
    "t_pp": 2.048,
    "speed_pp": 500.0,
    "t_tg": 4.0,
    "speed_tg": 200.0,
    "t": 6.048,
    "speed": 301.6,
}
"""A line of llama-batched-bench's JSONL: it names no model."""

LLAMA_MD = """main: n_kv_max = 4096, n_batch = 2048, n_ubatch = 512, flash_attn = 1, is_pp_shared = 0, n_gpu_layers = 99

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |    100 |    8 |   1824 |    2.048 |   500.00 |    4.000 |   200.00 |    6.048 |   301.59 |
"""


@pytest.mark.parametrize("text", [json.dumps(LLAMA), LLAMA_MD], ids=["jsonl", "md"])
def test_results_of_llama_batched_bench_stand_beside_ours(
    text: str,
    printed: Callable[..., str],
    timer: FakeTimer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text(text)
    ours = saved(printed, timer, tmp_path / "ours.json", 1.0, "-npp 128 -ntg 100 -npl 1,8")
    records = compared(monkeypatch, capsys, str(theirs), str(ours))
    assert [(r["model"], r["test"], r["before_ts"]) for r in records] == [
        ("llama 0.1B Q4_0", "8 x pp128", 500.0),
        ("llama 0.1B Q4_0", "8 x tg100 @ d128", 200.0),
        ("llama 0.1B Q4_0", "8 x pp128+tg100", pytest.approx(301.6, abs=0.05)),
    ]
    assert call(monkeypatch, main.main, "compare-bench", str(theirs), str(ours), "-o", "md") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1, "columns line up"


@pytest.mark.parametrize("broken", [{"t_pp": 0}, {"pl": "x"}, {"tg": 0}, {"t_tg": None}])
def test_a_result_that_is_none_is_named(broken: dict[str, Any], tmp_path: Path) -> None:
    from vkback.report import compare

    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({**LLAMA, **broken}))
    with pytest.raises(ReportError, match=r"r\.jsonl: not a result of .*: result 1: "):
        compare.load(path)


def test_stores_keep_them_for_history_and_comparisons(
    printed: Callable[..., str], timer: FakeTimer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "r.sqlite")
    for commit, slower in (("aaaa11112", 2.0), ("bbbb22223", 1.0)):
        monkeypatch.setattr(vkbench_batch, "build_info", lambda commit=commit: (commit, 7))
        timer.factor = lambda number, slower=slower: slower * (1 + 0.001 * (number % 3))  # type: ignore[misc]
        printed("-npp 8 -ntg 100 -npl 4,8 -r 3 --no-warmup", "--store", store)
    with closing(sqlite3.connect(store)) as db:
        (times,) = db.execute("SELECT samples_t_tg FROM llama_batched_bench WHERE pl = 8 LIMIT 1").fetchone()
        assert len(json.loads(times)) == 3
    assert call(monkeypatch, main.main, "history", store, "--test", "8 x tg", "--json") == 0
    points = json.loads(capsys.readouterr().out)
    assert [(p["commit"], p["test"], p["n"], p["beats_noise"]) for p in points] == [
        ("aaaa11112", "8 x tg100 @ d8", 3, None),
        ("bbbb22223", "8 x tg100 @ d8", 3, True),
    ]
    assert len(compared(monkeypatch, capsys, f"{store}@aaaa", f"{store}@bbbb")) == 6
    # beside results of a model alone, which have no count of sequences
    assert call(monkeypatch, vkbench.main, "tg100", "-m", "demo-dense", "-r", "2", "--store", store) == 0
    capsys.readouterr()
    assert call(monkeypatch, main.main, "history", store, "--json") == 0
    assert {p["test"] for p in json.loads(capsys.readouterr().out)} == {
        "tg100",
        *(f"{pl} x {test}" for pl in (4, 8) for test in ("pp8", "tg100 @ d8", "pp8+tg100")),
    }


def test_a_store_of_an_earlier_vkback_takes_them(
    printed: Callable[..., str], timer: FakeTimer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(tmp_path / "r.sqlite")
    assert call(monkeypatch, vkbench.main, "tg4", "-m", "demo-dense", "-r", "1", "--store", store) == 0
    with closing(sqlite3.connect(store)) as db:
        db.execute("DROP TABLE llama_batched_bench")
    printed("-npp 8 -ntg 8 -npl 2 -r 1", "--store", store)
    with closing(sqlite3.connect(store)) as db:
        assert db.execute("SELECT count(*) FROM llama_batched_bench").fetchone() == (1,)


def test_fields_of_a_result_are_those_of_the_format() -> None:
    assert [*BATCH.field_types()] == [*BATCH.probes[0].row()]
    assert isinstance(BATCH.probes[0], BatchResult)
    with pytest.raises(ReportError, match="'xml' is not an output format"):
        BATCH.open_writer("xml", io.StringIO())
