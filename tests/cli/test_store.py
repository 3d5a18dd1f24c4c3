"""Results that last: the store, its history, and comparisons out of it; the published before/after tables out of one command."""

from __future__ import annotations

import io
import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from bench_samples import LLAMA_8B
from cli_kit import FakeEngine, call, engine  # noqa: F401

from vkback.cli import main, vkbench
from vkback.harness.output import About, fields_of
from vkback.harness.result import CaseResult
from vkback.report import tables
from vkback.report.bench_table import BENCH, BenchResult
from vkback.report.result_table import ReportError
from vkback.report.store import VERSION, Store, is_store

DATA = Path(__file__).parents[1] / "data"

DEVICE = {"gpu_info": "NVIDIA GeForce RTX 5090", "driver_info": "NVIDIA 580.10"}


def run(commit: str, day: int, seconds: tuple[float, ...], **given: object) -> BenchResult:
    samples = tuple(round(1e9 * s) for s in seconds)
    time = f"2026-11-{day:02}T12:00:00Z"
    return replace(LLAMA_8B, build_commit=commit, test_time=time, samples_ns=samples, **{**DEVICE, **given})  # type: ignore[arg-type]


SLOW, FAST = (0.5, 0.51, 0.49), (0.4, 0.41, 0.39)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two builds of one test on one card, one of them on another card, and a prompt."""
    path = tmp_path / "results.sqlite"
    with Store(path) as opened:
        opened.add_bench(run("aaaa11112", 20, SLOW))
        opened.add_bench(run("bbbb22223", 21, FAST))
        opened.add_bench(run("bbbb22223", 21, SLOW, gpu_info="Radeon", driver_info="RADV 26"))
        opened.add_bench(run("bbbb22223", 22, (1.0,), n_prompt=512, n_gen=0, act="f32"))
    return path


def test_what_is_stored_is_what_was_measured(store: Path) -> None:
    with Store(store) as opened:
        rows = opened.bench()
    first = rows.iloc[0]
    assert first["samples_ts"] == pytest.approx([256.0, 128 / 0.51, 128 / 0.49])
    assert (first["model_type"], first["avg_ts"]) == ("llama 8B Q4_K - Medium", pytest.approx(run("a", 1, SLOW).avg_ts))
    assert list(rows["build_commit"]) == ["aaaa11112", "bbbb22223", "bbbb22223", "bbbb22223"]
    with closing(sqlite3.connect(store)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (VERSION,)
        assert set(BENCH.field_types()) < {name for _, name, *_ in db.execute("PRAGMA table_info(llama_bench)")}


def test_fields_of_a_later_vkback_are_added_and_its_schema_is_refused(store: Path) -> None:
    with closing(sqlite3.connect(store)) as db:
        db.execute("ALTER TABLE llama_bench DROP COLUMN math_way")
    with Store(store) as opened:
        assert opened.bench()["math_way"].isna().all()
        opened.add_bench(run("cccc", 23, SLOW, math_way="coop_mat"))
        assert opened.bench()["math_way"].iloc[-1] == "coop_mat"
    with closing(sqlite3.connect(store)) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    with pytest.raises(ReportError, match=rf"a newer vkback wrote it \(schema {VERSION + 1}"):
        Store(store)


@pytest.mark.parametrize("content", [b"text", b"SQLite format 3\0" + bytes(84)])
def test_other_files_are_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.sqlite"
    path.write_bytes(content)
    assert not is_store(path)
    with pytest.raises(ReportError, match="not a store of results"):
        Store(path)
    assert path.read_bytes() == content
    with pytest.raises(ReportError, match=r"nowhere[/\\]r\.sqlite: there is no folder .*nowhere; make it"):
        Store(tmp_path / "nowhere" / "r.sqlite")


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert call(monkeypatch, main.main, *args) == code
    shown = capsys.readouterr()
    return shown.err if code else shown.out


def test_history_by_device_and_build(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(monkeypatch, capsys, "history", str(store)).splitlines()
    assert max(map(len, lines)) <= 80
    assert [" ".join(line.split()) for line in lines[:6]] == [
        "NVIDIA GeForce RTX 5090, NVIDIA 580.10",
        "date build test t/s change",
        "llama 8B Q4_K - Medium",
        "2026-11-20 aaaa11112 tg128 256.07 ± 5.12",
        "2026-11-21 bbbb22223 tg128 320.13 ± 8.01 +25.0% *",
        "2026-11-22 bbbb22223 pp512 act f32 512.00 ± 0.00",
    ]
    assert "Radeon, RADV 26" in lines
    assert "\x1b" not in "".join(lines)

    def rows(*options: str) -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads(printed(monkeypatch, capsys, "history", str(store), "--json", *options))
        return found

    assert [r["commit"] for r in rows("--device", "rtx", "--test", "tg")] == ["aaaa11112", "bbbb22223"]
    assert [r["beats_noise"] for r in rows("--device", "rtx", "--test", "tg")] == [None, True]
    assert len(rows("--since", "2026-11-22")) == 1 and len(rows("--commit", "aaaa")) == 1 and len(rows("--driver", "radv")) == 1
    assert len(rows("--last", "1")) == 3
    assert printed(monkeypatch, capsys, "history", str(store), "-o", "csv").startswith("date,commit,device,driver,what,test,unit,mean,")
    assert printed(monkeypatch, capsys, "history", str(store), "-o", "md").startswith("| where ")
    assert "<td class=left>Radeon, RADV 26</td>" in printed(monkeypatch, capsys, "history", str(store), "-o", "html")
    error = printed(monkeypatch, capsys, "history", str(store), "-m", "gemma", code=1)
    assert "no result matches what gemma; the store has 4 points" in error
    assert "no such file; vkbench --store" in printed(monkeypatch, capsys, "history", "nowhere.sqlite", code=2)


def test_builds_of_a_store_can_be_compared(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def compared(old: str, new: str, *options: str, code: int = 0) -> str:
        return printed(monkeypatch, capsys, "compare-bench", f"{store}{old}", f"{store}{new}", *options, code=code)

    (record,) = json.loads(compared("@aaaa", "@bbbb", "--json"))
    assert record["beats_noise"] is True and record["before_ts"] == pytest.approx(run("a", 1, SLOW).avg_ts)
    assert record["after_ts"] == pytest.approx(run("a", 1, FAST).avg_ts)  # that of the same card
    assert "holds results of 2 builds; say which, as results.sqlite@bbbb22223 (there are aaaa11112, bbbb22223)" in compared("", "", code=1)
    assert "no build is called dddd; there are aaaa11112, bbbb22223" in compared("@aaaa", "@dddd", code=1)


def test_tuning_tables_of_one_build_are_points_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.sqlite"
    with Store(path) as opened:
        opened.add_bench(run("aaaa11112", 20, SLOW, tuning="111111111111"))
        opened.add_bench(run("aaaa11112", 21, FAST, tuning="222222222222"))
        opened.add_bench(run("aaaa11112", 21, FAST, tuning="222222222222"))
    lines = [" ".join(line.split()) for line in printed(monkeypatch, capsys, "history", str(path)).splitlines()]
    assert lines[3:5] == ["2026-11-20 aaaa11112 111111 tg128 256.07 ± 5.12", "2026-11-21 aaaa11112 222222 tg128 320.13 ± 7.16 +25.0% *"]
    records = json.loads(printed(monkeypatch, capsys, "history", str(path), "--json"))
    assert [(r["tuning"], r["n"]) for r in records] == [("111111111111", 3), ("222222222222", 6)]
    names = [f"{path}@aaaa@{tuning}" for tuning in ("1", "2222")]
    (record,) = json.loads(printed(monkeypatch, capsys, "compare-bench", *names, "--json"))
    assert record["diff_percent"] == pytest.approx(25.02, abs=0.01)
    error = printed(monkeypatch, capsys, "compare-bench", f"{path}@aaaa", names[1], code=1)
    assert "holds results of 2 sets of tuning tables; say which, as results.sqlite@aaaa11112@222222222222 (there are" in error
    assert "no set of tuning tables is called 3" in printed(monkeypatch, capsys, "compare-bench", f"{path}@aaaa@3", names[1], code=1)


def test_a_setting_of_one_build_is_shown_in_its_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it is called: n_threads is none of those that vkback has."""
    path = tmp_path / "results.sqlite"
    with Store(path) as opened:
        for seconds, threads in ((SLOW, 1), (FAST, 8), (FAST, 8)):
            opened.add_bench(run("aaaa11112", 20, seconds, n_threads=threads))
    shown = printed(monkeypatch, capsys, "history", str(path))
    assert "tg128 n_threads 1 " in shown and re.search(r"tg128 +320\.13", shown)


def json_of(path: Path, *rows: dict[str, object]) -> str:
    path.write_text(json.dumps([{**LLAMA_8B.row(), "samples_ts": [], **row} for row in rows]), encoding="utf-8")
    return str(path)


def test_rows_that_differ_in_any_setting_are_not_pooled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """228.5 and 165.0 of one test, which differ in a column of a later llama-vkbench, became 196.75."""
    two: list[dict[str, object]] = [{"avg_ts": 228.5, "stddev_ts": 1.0, "later": "on"}, {"avg_ts": 165.0, "stddev_ts": 1.0, "later": "off"}]
    one = json_of(tmp_path / "one.json", {"avg_ts": 200.0, "stddev_ts": 1.0})
    on = json_of(tmp_path / "on.json", {"avg_ts": 200.0, "stddev_ts": 1.0, "later": "on"})
    both = json_of(tmp_path / "both.json", *two)

    def compared(*args: str, code: int = 0) -> str:
        return printed(monkeypatch, capsys, "compare-bench", *args, *(() if code else ("--json",)), code=code)

    error = compared(one, one, "--beside", f"CUDA={both}", code=1)
    assert "--beside CUDA: results of one test differ in later (on, off), which the others do not tell apart; keep those of one" in error
    (record,) = json.loads(compared(on, on, "--beside", f"CUDA={both}"))
    assert record["CUDA_ts"] == 228.5
    records = json.loads(compared(both, both, "--beside", f"CUDA={both}"))
    assert [(r["later"], r["before_ts"], r["CUDA_ts"]) for r in records] == [("on", 228.5, 228.5), ("off", 165.0, 165.0)]
    builds = json_of(tmp_path / "builds.json", {"build_commit": "aaaa"}, {"build_commit": "bbbb"})
    assert "holds results of 2 builds; say which, as builds.json@bbbb" in compared(builds, one, code=1)


LLAMA_BENCH_MD = """\
ggml_vulkan: 0 = NVIDIA GeForce RTX 5090 (NVIDIA) | uma: 0 | fp16: 1 | warp size: 32
| model                          |       size |     params | backend    | ngl | fa |            test |                  t/s |
| ------------------------------ | ---------: | ---------: | ---------- | --: | -: | --------------: | -------------------: |
| llama 8B Q4_K - Medium         |   4.58 GiB |     8.03 B | Vulkan     |  99 |  0 |           tg128 |        200.00 ± 1.00 |
| llama 8B Q4_K - Medium         |   4.58 GiB |     8.03 B | Vulkan     |  99 |  1 |           tg128 |        250.00 ± 1.50 |
| llama 8B Q4_K - Medium         |   4.58 GiB |     8.03 B | Vulkan     |  99 |  1 |   pp512 @ d4096 |      11000.00 ± 9.00 |

build: 0c1e570 (6910)
"""


def test_markdown_tables_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of llama-vkbench, with rows that differ in a setting, and of vkbench, in any document; other tables are refused."""
    theirs, ours, other = (tmp_path / name for name in ("before.md", "after.md", "other.md"))
    theirs.write_text(LLAMA_BENCH_MD, encoding="utf-8")
    ours.write_text(f"# Results\n\nThree runs:\n\n```\n{LLAMA_BENCH_MD.replace('250.00 ± 1.50', '300.00 ± 2.00')}```\n", encoding="utf-8")
    records = json.loads(printed(monkeypatch, capsys, "compare-bench", str(theirs), str(ours), "--json"))
    assert [(r["flash_attn"], r["test"], r["before_ts"], r["after_ts"]) for r in records] == [
        ("0", "tg128", 200.0, 200.0),
        ("1", "tg128", 250.0, 300.0),
        ("1", "pp512 @ d4096", 11000.0, 11000.0),
    ]
    assert [r["beats_noise"] for r in records] == [False, True, False]
    assert records[1]["reason"] == "from 2 repetitions on"
    records = json.loads(printed(monkeypatch, capsys, "compare-bench", str(theirs), str(ours), "-r", "5", "--json"))
    assert [r["beats_noise"] for r in records] == [False, True, False] and records[1]["reason"].startswith("p = ")
    table = io.StringIO()
    writer = BENCH.open_writer("md", table, ("% read",))
    writer.header("vkback: 0 = a device")
    writer.row(replace(LLAMA_8B, read_rate_gb_s=1600.0))
    writer.footer(("5d8bb900b", 6910))
    ours.write_text(table.getvalue(), encoding="utf-8")
    (record,) = json.loads(printed(monkeypatch, capsys, "compare-bench", str(ours), json_of(tmp_path / "same.json", {}), "--json"))
    assert (record["size"], record["params"], record["before_ts"], record["diff_percent"]) == ("4.58 GiB", "8.03 B", 288.0, 0.0)
    other.write_text("| op | us |\n|---|---|\n| ADD | 5 |\n", encoding="utf-8")
    error = printed(monkeypatch, capsys, "compare-bench", str(other), str(ours), code=2)
    assert "a markdown table without the columns model, size, params, test, t/s of vkbench and llama-bench" in error


def test_vkbench_appends_to_a_store(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: FakeEngine,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "results.sqlite"
    for _ in range(2):
        assert call(monkeypatch, vkbench.main, "tg8", "-r", "3", "-m", "demo-dense", "--store", str(path)) == 0
    with Store(path) as opened:
        rows = opened.bench()
    assert list(rows["n_gen"]) == [8, 8] and all(len(s) == 3 for s in rows["samples_ts"])
    assert set(rows["tuning"]) == {FakeEngine.tuning}, "a result tells its tables"


ABOUT = About("Vulkan0", "Radeon", "RADV 26", "aaaa11112", "2026-11-20T12:00:00Z")
CASE = CaseResult(
    op="MUL_MAT",
    line="MUL_MAT(type_a=Q4_K,m=4096,n=1,k=4096,seed=7)",
    mode="perf",
    supported=True,
    passed=None,
    time_us=10.0,
    spread_us=0.1,
    n_runs=5,
)


def test_timed_ops_have_a_history_and_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ops.sqlite"
    with Store(path) as opened:
        opened.add_op(fields_of(CASE, ABOUT), (10.0, 10.1, 9.9))
        other = replace(CASE, line=CASE.line.replace("seed=7", "seed=8"), time_us=8.0)
        opened.add_op(fields_of(other, replace(ABOUT, commit="bbbb22223", time="2026-11-21T12:00:00Z")), (8.0, 8.1, 7.9))
    out = printed(monkeypatch, capsys, "history", str(path), "--ops")
    assert max(map(len, out.splitlines())) <= 80
    assert [" ".join(line.split()) for line in out.splitlines()[:5]] == [
        "Radeon, RADV 26",
        "date build us change",
        "MUL_MAT(type_a=Q4_K,m=4096,n=1,k=4096)",
        "2026-11-20 aaaa11112 10.00 ± 0.10",
        "2026-11-21 bbbb22223 8.00 ± 0.10 +25.0% *",
    ]
    table = printed(monkeypatch, capsys, "compare-bench", f"{path}@aaaa", f"{path}@bbbb")
    assert "+25.0% *" in table and max(map(len, table.splitlines())) <= 80
    md = printed(monkeypatch, capsys, "compare-bench", f"{path}@aaaa", f"{path}@bbbb", "-o", "md")
    assert "| MUL_MAT(type_a=Q4_K,m=4096,n=1,k=4096) | 10.00 ± 0.10 | 8.00 ± 0.10 | +25.0% | yes (p = " in md


def test_acts_of_one_case_are_not_pooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ops.sqlite"
    with Store(path) as opened:
        for act, us in (("f32", 10.0), ("q8_1", 4.0)):
            opened.add_op(fields_of(replace(CASE, time_us=us), replace(ABOUT, act=act, tuning="1" * 12)), (us, us + 0.1, us - 0.1))
    records = json.loads(printed(monkeypatch, capsys, "compare-bench", str(path), str(path), "--json"))
    assert [r["before_us"] for r in records] == [10.0, 4.0]
    out = printed(monkeypatch, capsys, "history", str(path), "--ops")
    assert "k=4096,act=f32)" in out and "k=4096,act=q8_1)" in out


def published() -> list[tuple[str, list[list[str]]]]:
    """The published tables: device, and rows of model, size, params, fa, speeds in their order, and diff."""
    tables: list[tuple[str, list[list[str]]]] = []
    for line in (DATA / "before_after_tables.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            tables.append((line[2:], []))
        elif not line.startswith("model size"):
            found = re.fullmatch(r"(.+) ([\d.]+) GiB ([\d.]+) B 99 ([01]) tg128 (.+) ([+-][\d.]+%)", line)
            assert found, line
            tables[-1][1].append([*found.groups()])
    return tables


def saved(path: Path, rows: list[list[str]], column: int, backend: str) -> str:
    """One column of a table as a file of llama-vkbench."""
    speeds = [re.findall(r"[\d.]+ ± [\d.]+", row[4])[column].split(" ± ") for row in rows]
    results = [
        {
            **replace(
                LLAMA_8B,
                backends=backend,
                model_type=row[0],
                model_size=round(float(row[1]) * 2**30),
                flash_attn=int(row[3]),
                model_n_params=round(float(row[2]) * 1e9),
            ).row(),
            "avg_ts": float(mean),
            "stddev_ts": float(dev),
        }
        for row, (mean, dev) in zip(rows, speeds, strict=True)
    ]
    path.write_text(json.dumps(results), encoding="utf-8")
    return str(path)


def test_the_published_tables_come_out_of_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = published()
    assert sum(len(rows) for _, rows in tables) == 110
    exact = 0
    for number, (device, rows) in enumerate(tables):
        columns = len(re.findall("±", rows[0][4]))
        old, new = (saved(tmp_path / f"{column}.json", rows, column, "Vulkan") for column in range(columns - 2, columns))
        beside = ["--beside", f"ROCm={saved(tmp_path / 'beside.json', rows, 0, 'ROCm')}"] if columns == 3 else []
        md = printed(monkeypatch, capsys, "compare-bench", old, new, *beside, "-o", "md").splitlines()
        assert len(md) == 2 + len(rows)
        for line, (model, size, params, fa, speeds, diff) in zip(md[2:], rows, strict=True):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert cells[:3] == [model, f"{size} GiB", f"{params} B"]
            assert cells[5:7] == [fa, "tg128"]
            assert " ".join(cells[7:-2]) == speeds
            exact += cells[-2] == diff
            was, now = (float(text.split()[0]) for text in cells[-4:-2])
            # Theirs are of speeds that were not yet rounded to two digits: half a digit of diff, and that of both speeds.
            bound = 0.05 + 100 * 0.005 / was * (1 + now / was)
            assert abs(100 * (now / was - 1) - float(diff.rstrip("%"))) <= bound, f"{device}: {line}"
        if number == 0:
            table = printed(monkeypatch, capsys, "compare-bench", old, new, *beside).splitlines()
            assert max(map(len, table)) <= 80
            assert " ".join(table[2].split()) == "0 tg128 63.49 ± 0.20 71.40 ± 0.24 83.84 ± 0.26 +17.4% *"
            page = printed(monkeypatch, capsys, "compare-bench", old, new, *beside, "-o", "html")
            assert page.count("<tr>") == 1 + len(rows) and "http" not in page
            assert printed(monkeypatch, capsys, "compare-bench", old, new, *beside, "-o", "csv").count("\n") == 1 + len(rows)
    assert exact >= 100


def test_bars_of_a_comparison(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pictures are an optional extra: pip install vkback[pictures]")
    from matplotlib.image import imread

    file = tmp_path / "bars.png"
    printed(monkeypatch, capsys, "compare-bench", f"{store}@aaaa", f"{store}@bbbb", "--plot", str(file))
    assert imread(file).shape[1] == 1320


def test_bars_have_whole_names_and_all_columns(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are an optional extra: pip install vkback[pictures]")
    from vkback.report.bench_plot import BEFORE, BESIDE, SLOWER, Bar, draw

    case = "MUL_MAT_ID(type_a=q4_K,type_b=f32,n_mats=8,n_used=2,b=1,m=40,n=32,k=256,amax=1.000000,m_v=0,tuning=[wg:64],seed=7)"
    bars = [
        Bar(case, (100.0, 1.0), (90.0, 1.0), True, "10.00 → 9.00", {"CUDA (RTX 3090)": (130.0, 2.0)}),
        Bar("llama 8B tg128", (100.0, 1.0), (90.0, 1.0), True, "10.00 → 9.00"),
    ]
    file = tmp_path / "bars.svg"
    with pytest.MonkeyPatch.context() as patch:
        import matplotlib

        patch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text as text
        draw(bars, file, "title")
    text = file.read_text(encoding="utf-8")
    shown = "".join(re.findall(r"<text[^>]*>([^<]*)</text>", text)).replace(" ", "")
    assert case in shown and "CUDA(RTX3090)" in shown and "…" not in shown
    assert {shade: text.count(f"fill: {shade}") - 1 for shade in (BEFORE, SLOWER, BESIDE[0])} == {BEFORE: 2, SLOWER: 2, BESIDE[0]: 1}, (
        "bars, beside the legend's patch"
    )


def test_tables_fit_a_terminal() -> None:
    cells = pd.DataFrame([{"where": "a card " * 20, "model": "x" * 60, "test": "tg128", "t/s": "1.00 ± 0.10"}] * 2)
    lines = tables.terminal(cells, ["model", "test"], group="where")
    assert max(map(len, lines)) == 80
    assert lines[1].startswith("a card a card") and lines[2].startswith("    card a")
    assert lines[-1].endswith("x~  tg128  1.00 ± 0.10")
    assert tables.terminal(cells.drop(columns="where"), ["model"], width=200)[1].startswith("x" * 60)


PASTED = """@somebody
Some initial perf results:

before:

C:\\build> llama-bench.exe -fa 1 -n 128 -p 0 -r 10 --prio 1 -m c:\\models\\gpt-oss-20b-mxfp4.gguf
ggml_vulkan: Found 1 Vulkan devices:
ggml_vulkan: 0 = NVIDIA GeForce RTX 4070 (NVIDIA) | uma: 0 | fp16: 1 | bf16: 1 | warp size: 32 | matrix cores: NV_coopmat2
| model                          |       size |     params | backend    | ngl | fa |            test |                  t/s |
| ------------------------------ | ---------: | ---------: | ---------- | --: | -: | --------------: | -------------------: |
| gpt-oss 20B MXFP4 MoE          |  11.27 GiB |    20.91 B | Vulkan     |  99 |  1 |           tg128 |         37.22 ± 0.54 |
| llama 3B Q8_0                  |   3.18 GiB |     3.21 B | Vulkan     |  99 |  1 |           tg128 |        125.48 ± 0.54 |

build: 5d8bb900b (6910)

after:

ggml_vulkan: 0 = NVIDIA GeForce RTX 4070 (NVIDIA) | uma: 0 | fp16: 1 | bf16: 1 | warp size: 32 | matrix cores: NV_coopmat2
| model                          |       size |     params | backend    | ngl | fa |            test |                  t/s |
| ------------------------------ | ---------: | ---------: | ---------- | --: | -: | --------------: | -------------------: |
| gpt-oss 20B MXFP4 MoE          |  11.27 GiB |    20.91 B | Vulkan     |  99 |  1 |           tg128 |         41.86 ± 1.68 |
| llama 3B Q8_0                  |   3.18 GiB |     3.21 B | Vulkan     |  99 |  1 |           tg128 |        125.95 ± 0.12 |

### Intel A770

model\tsize\tparams\tngl\tfa\ttest\tt/s (before)\tt/s (after)\tdiff
llama 8B Q2_K - Medium\t2.95 GiB\t8.03 B\t99\t0\ttg128\t29.90 ± 0.32\t44.53 ± 0.74\t+48.9%
"""


def test_a_pasted_thread_gives_a_table_for_each_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "thread.txt"
    path.write_text(PASTED, encoding="utf-8")
    records = json.loads(printed(monkeypatch, capsys, "compare-bench", str(path), "--json"))
    assert [(r["device"], r["model"], r["before_ts"], r["after_ts"], r["beats_noise"]) for r in records] == [
        ("NVIDIA GeForce RTX 4070", "gpt-oss 20B MXFP4 MoE", 37.22, 41.86, True),  # r = 10, as the command line says
        ("NVIDIA GeForce RTX 4070", "llama 3B Q8_0", 125.48, 125.95, False),
        ("Intel A770", "llama 8B Q2_K - Medium", 29.9, 44.53, True),
    ]
    page = printed(monkeypatch, capsys, "compare-bench", str(path), "-o", "html")
    assert page.count("<h2>") == 2 and "white-space:nowrap" in page
    path.write_text("no table\n", encoding="utf-8")
    assert "no table with t/s (before) and t/s (after)" in printed(monkeypatch, capsys, "compare-bench", str(path), code=2)


def test_the_published_tables_come_out_of_their_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once, as they were pasted; what is said without repetitions is no less than what is known with them."""
    path = str(DATA / "before_after_tables.txt")
    md = printed(monkeypatch, capsys, "compare-bench", path, "-o", "md")
    assert [line[3:].partition(", table")[0] for line in md.splitlines() if line.startswith("## ")] == [device for device, _ in published()]
    assert sum(line.startswith("| ") for line in md.splitlines()) == 110 + 2 * len(published())
    without = json.loads(printed(monkeypatch, capsys, "compare-bench", path, "--json"))
    known = json.loads(printed(monkeypatch, capsys, "compare-bench", path, "-r", "5", "--json"))
    assert len(without) == len(known) == 110 and all(r["reason"].startswith("p = ") for r in known)
    assert not [r for r, k in zip(without, known, strict=True) if r["beats_noise"] is False and k["beats_noise"]]
    assert not [r for r, k in zip(without, known, strict=True) if r["beats_noise"] and not k["beats_noise"]]
    (rocm, *_) = known
    assert (rocm["ROCm_ts"], rocm["before_ts"], rocm["after_ts"]) == (63.49, 71.4, 83.84)


def p_by_hand(before: tuple[float, float], after: tuple[float, float], n: int) -> float:
    """Of Welch's t-test on means and deviations of n samples each: Student's density summed up."""
    variances = [deviation**2 / n for _, deviation in (before, after)]
    freedom = sum(variances) ** 2 / sum(v**2 / (n - 1) for v in variances)
    t = np.linspace(0.0, 400.0, 400_001)
    density = (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    reached = np.cumsum(density) - (density[0] + density) / 2
    return float(1 - np.interp(abs(after[0] - before[0]) / sum(variances) ** 0.5, t, reached / reached[-1]))


def test_the_whole_thread_as_pasted_is_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine tables of both speeds, runs of two cards before and after, and some models again, five times each: twelve tables. Each verdict
    of a row with samples is that of a t-test."""
    path = tmp_path / "thread.txt"
    parts = [(DATA / name).read_text(encoding="utf-8") for name in ("before_after_runs.txt", "before_after_tables.txt")]
    path.write_text("\n".join(parts), encoding="utf-8")
    md = printed(monkeypatch, capsys, "compare-bench", str(path), "-r", "5", "-o", "md").splitlines()
    cards = ["NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 4070", "NVIDIA GeForce RTX 5090, table 2"]
    titles = [line[3:] for line in md if line.startswith("## ")]
    assert titles[:3] == cards and [title.partition(", table")[0] for title in titles[3:]] == [device for device, _ in published()]
    records = json.loads(printed(monkeypatch, capsys, "compare-bench", str(path), "-r", "5", "--json"))
    assert [sum(r["device"] == card for r in records) for card in cards] == [15, 13, 4] and len(records) == 110 + 32
    again = [r for r in records if r["device"] == cards[2]]
    assert [r["beats_noise"] for r in again] == [True, False, False, False], "as the author says: gpt-oss alone is real"
    for r in records:
        if r["device"] == cards[2] or 0.0 in (r["before_stddev_ts"], r["after_stddev_ts"]):
            continue
        before, after = ((r[f"{side}_ts"], r[f"{side}_stddev_ts"]) for side in ("before", "after"))
        p = p_by_hand(before, after, 10 if r["device"] in cards else 5)
        assert r["beats_noise"] == (p < 0.01) and float(r["reason"].removeprefix("p = ")) == pytest.approx(p, rel=0.06, abs=1e-5), r


def test_history_reads_a_pasted_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "thread.txt"
    path.write_text(PASTED, encoding="utf-8")
    records = json.loads(printed(monkeypatch, capsys, "history", str(path), "--json"))
    assert [(r["device"], r["what"], r["commit"], r["mean"], r["n"], r["beats_noise"]) for r in records] == [
        ("NVIDIA GeForce RTX 4070", "gpt-oss 20B MXFP4 MoE", "5d8bb900b", 37.22, 10, None),
        ("NVIDIA GeForce RTX 4070", "gpt-oss 20B MXFP4 MoE", "after", 41.86, 10, True),
        ("NVIDIA GeForce RTX 4070", "llama 3B Q8_0", "5d8bb900b", 125.48, 10, None),
        ("NVIDIA GeForce RTX 4070", "llama 3B Q8_0", "after", 125.95, 10, False),
        ("Intel A770", "llama 8B Q2_K - Medium", "before", 29.9, None, None),
        ("Intel A770", "llama 8B Q2_K - Medium", "after", 44.53, None, True),
    ]
    assert "+48.9% *" in printed(monkeypatch, capsys, "history", str(path), "--device", "A770")
    published_ones = json.loads(printed(monkeypatch, capsys, "history", str(DATA / "before_after_tables.txt"), "-r", "5", "--json"))
    assert sum(r["commit"] == "after" for r in published_ones) == sum(r["commit"] == "before" for r in published_ones) == 110
    assert all(r["n"] == 5 for r in published_ones), "rows of two tables were taken together"
    assert {r["device"] for r in published_ones} >= {"AMD Radeon Pro VII", "AMD Radeon Pro VII, ROCm"}
    path.write_text("no table\n", encoding="utf-8")
    assert "no table of llama-bench or vkbench in it" in printed(monkeypatch, capsys, "history", str(path), code=2)
    path.write_bytes(b"\xff\xfe")
    assert "not a text in UTF-8" in printed(monkeypatch, capsys, "history", str(path), code=2)
