"""Benchmark tables against llama-bench's own lines, machine formats against their readers, and the comparison's arithmetic."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from bench_samples import LLAMA_8B

from vkback.report import compare
from vkback.report.bench_table import BENCH, BenchResult, tflops_text
from vkback.report.build import build_info
from vkback.report.compare import Speed, change_between, two_sided_p
from vkback.report.result_table import MarkdownWriter, ReportError
from vkback.units import params_text, size_text

LLAMA_BENCH_FIELDS = (
    "build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params n_batch n_ubatch "
    "n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers n_cpu_moe split_mode main_gpu no_kv_offload flash_attn devices "
    "tensor_split tensor_buft_overrides load_mode lazy_mode embeddings no_op_offload no_host repack fit_target fit_min_ctx n_prompt "
    "n_gen n_depth test_time avg_ns stddev_ns avg_ts stddev_ts"
)
"""llama-bench's fields in their order."""

SEED_HEAD = "| model                          |       size |     params | backend    | ngl |            test |                  t/s |"
SEED_DASHES = "| ------------------------------ | ---------: | ---------: | ---------- | --: | --------------: | -------------------: |"
"""The two head lines llama-bench prints with default flags."""


def written(fmt: str, *results: BenchResult, extra: tuple[str, ...] = (), device: str = "") -> str:
    out = io.StringIO()
    writer = BENCH.open_writer(fmt, out, extra)
    writer.header(device)
    for r in results:
        writer.row(r)
    writer.footer(("5d8bb900b", 6910))
    return out.getvalue()


def without_ours(line: str, cells: int = 1) -> str:
    """A line without the last cells, which llama-bench does not have."""
    return " |".join(line.split(" |")[: -cells - 1]) + " |"


def test_markdown_lines_are_llama_bench_s() -> None:
    lines = written("md", LLAMA_8B, device="vkback: 0 = a device").splitlines()
    assert lines[0] == "vkback: 0 = a device"
    assert without_ours(lines[1]) == SEED_HEAD
    assert without_ours(lines[2]) == SEED_DASHES
    assert without_ours(lines[3]) == (
        "| llama 8B Q4_K - Medium         |   4.58 GiB |     8.03 B | Vulkan     |  99 |           tg128 |       288.00 ± 45.25 |"
    )
    assert lines[4:] == ["", "build: 5d8bb900b (6910)"]


def test_our_columns_follow_t_s() -> None:
    lines = written("md", replace(LLAMA_8B, read_rate_gb_s=1600.0), extra=("% read",)).splitlines()
    assert lines[0].endswith("|                  t/s |       GB/s |     % read |")
    assert lines[1].endswith("| -------------------: | ---------: | ---------: |")
    assert lines[2].endswith("|       288.00 ± 45.25 |    1296.00 |       81.0 |")


def test_a_long_model_name_keeps_its_row_whole() -> None:
    name = "qwen3moe 235B.A22B Q4_K - Medium"
    row = written("md", replace(LLAMA_8B, model_type=name)).splitlines()[2]
    assert row.startswith(f"| {name} |   4.58 GiB |")


def test_parameter_columns_come_when_asked_for() -> None:
    head = written("md", replace(LLAMA_8B, flash_attn=1, act="f32"), extra=("flash_attn", "act")).splitlines()
    assert "| ngl |  fa | act        |            test |" in head[0]
    assert "| --: | --: | ---------- | --------------: |" in head[1]
    assert "|  99 |   1 | f32        |           tg128 |" in head[2]


@pytest.mark.parametrize(
    ("sizes", "name"), [((512, 0, 0), "pp512"), ((0, 128, 0), "tg128"), ((512, 128, 0), "pp512+tg128"), ((0, 128, 4096), "tg128 @ d4096")]
)
def test_test_names(sizes: tuple[int, int, int], name: str) -> None:
    assert replace(LLAMA_8B, n_prompt=sizes[0], n_gen=sizes[1], n_depth=sizes[2]).test == name


def test_size_and_params_text() -> None:
    assert size_text(573_046_784) == "546.50 MiB"
    assert size_text(2**30 - 1) == "1024.00 MiB"
    assert size_text(2**30) == "1.00 GiB"
    assert params_text(6_950_144) == "6.95 M"
    assert params_text(1_235_814_432) == "1.24 B"


def test_statistics_of_samples() -> None:
    assert LLAMA_8B.samples_ts == [256.0, 320.0]
    assert LLAMA_8B.avg_ts == 288.0
    assert LLAMA_8B.stddev_ts == pytest.approx(sqrt(2) * 32)
    assert (LLAMA_8B.avg_ns, LLAMA_8B.stddev_ns) == (450_000_000, 70_710_678)
    assert replace(LLAMA_8B, samples_ns=(5,)).stddev_ts == 0.0


def test_gb_s_is_for_generation_only() -> None:
    assert LLAMA_8B.gb_s == 1296.0
    assert replace(LLAMA_8B, n_prompt=512).gb_s is None
    assert replace(LLAMA_8B, n_prompt=512, n_gen=0).gb_s is None
    assert replace(LLAMA_8B, bytes_per_token=None).gb_s is None
    assert LLAMA_8B.percent_of_read is None


def test_machine_formats_begin_with_llama_bench_s_fields() -> None:
    names = list(LLAMA_8B.row())
    assert " ".join(names).startswith(LLAMA_BENCH_FIELDS + " ")
    assert names[-6:] == ["watts", "gb_s", "percent_of_read", "tflops", "percent_of_math", "ts_per_watt"]


PROMPT = replace(
    LLAMA_8B,
    n_prompt=512,
    n_gen=0,
    samples_ns=(500_000_000, 500_000_000),
    prompt_flops=8_000_000_000_000,
    math_way="coop_mat",
    math_rate_tflops=64.0,
)
"""512 tokens in 0.5 s, 8e12 operations: 16 TFLOPS, a quarter of 64."""


def test_tflops_are_for_prompts_only() -> None:
    assert (PROMPT.tflops, PROMPT.percent_of_math) == (16.0, 25.0)
    assert (PROMPT.gb_s, PROMPT.percent_of_read) == (None, None)
    assert replace(PROMPT, math_rate_tflops=None).percent_of_math is None
    assert replace(PROMPT, n_gen=128).tflops is None, "the time of the prompt alone is not known"
    assert (LLAMA_8B.tflops, LLAMA_8B.percent_of_math) == (None, None)
    assert [tflops_text(v) for v in (331.6, 16.0, 1.2345, 0.0105, 0.000123, 0.0)] == ["332", "16.0", "1.23", "0.0105", "0.000123", "0.00"]


def test_prompts_have_their_columns_and_fields_in_every_format() -> None:
    lines = written("md", LLAMA_8B, PROMPT, extra=("% read", "TFLOPS", "% math")).splitlines()
    assert lines[0].endswith("|       GB/s |     % read |     TFLOPS |     % math |")
    assert lines[2].endswith("|    1296.00 |            |            |            |")
    assert lines[3].endswith("|            |            |       16.0 |       25.0 |")
    (row,) = csv.DictReader(written("csv", PROMPT).splitlines())
    ours = ("prompt_flops", "math_way", "math_rate_tflops", "tflops", "percent_of_math")
    assert [row[name] for name in ours] == ["8000000000000", "coop_mat", "64.0", "16.0", "25.0"]
    for text in (json.dumps(json.loads(written("json", PROMPT))[0]), written("jsonl", PROMPT)):
        read = json.loads(text)
        assert [read[name] for name in ours] == [8_000_000_000_000, "coop_mat", 64.0, 16.0, 25.0]
    db = sqlite3.connect(":memory:")
    db.executescript(written("sql", PROMPT, LLAMA_8B))
    query = f"SELECT {', '.join(ours)} FROM llama_bench"
    assert db.execute(query).fetchall() == [(8_000_000_000_000, "coop_mat", 64.0, 16.0, 25.0), (None, "", None, None, None)]
    types = {name: kind for _, name, kind, *_ in db.execute("PRAGMA table_info(llama_bench)")}
    assert [types[name] for name in ours] == ["INTEGER", "TEXT", "REAL", "REAL", "REAL"]


def test_results_from_before_and_with_math_are_compared(tmp_path: Path) -> None:
    for fmt in ("json", "jsonl", "csv", "sql"):
        old, new = tmp_path / f"old.{fmt}", tmp_path / f"new.{fmt}"
        text = written("jsonl", PROMPT)
        without = {k: v for k, v in json.loads(text).items() if "math" not in k and "flops" not in k}
        (tmp_path / "old.json").write_text(json.dumps([without]))
        new.write_text(written(fmt, replace(PROMPT, samples_ns=(250_000_000, 250_000_000))))
        old = tmp_path / "old.json" if fmt != "json" else tmp_path / "older.jsonl"
        if fmt == "json":
            old.write_text(json.dumps(without))
        (difference,) = compare.compare(compare.load(old), compare.load(new)).differences
        assert difference.percent == pytest.approx(100.0)


def test_csv_has_a_bare_header_and_quoted_values() -> None:
    text = written("csv", replace(LLAMA_8B, model_filename='a "b".gguf'))
    header, row = text.splitlines()
    assert header.startswith("build_commit,build_number,cpu_info")
    assert row.startswith('"5d8bb900b","6910","a processor"')
    (read,) = csv.DictReader(text.splitlines())
    assert read["model_filename"] == 'a "b".gguf'
    assert (read["avg_ts"], read["cpu_strict"], read["percent_of_read"]) == ("288.0", "0", "")


def test_json_is_one_array_with_samples() -> None:
    first, second = json.loads(written("json", LLAMA_8B, replace(LLAMA_8B, n_gen=64)))
    assert first["samples_ns"] == [500_000_000, 400_000_000]
    assert first["samples_ts"] == [256.0, 320.0]
    assert first["cpu_strict"] is False
    assert second["n_gen"] == 64
    assert json.loads(written("json")) == []


def test_jsonl_has_one_object_a_line() -> None:
    lines = written("jsonl", LLAMA_8B, LLAMA_8B).splitlines()
    assert [json.loads(text)["n_gen"] for text in lines] == [128, 128]


def test_sql_fills_a_table() -> None:
    db = sqlite3.connect(":memory:")
    db.executescript(written("sql", LLAMA_8B))
    assert db.execute("SELECT model_filename, n_gen, avg_ts, percent_of_read FROM llama_bench").fetchall() == [
        ("it's.gguf", 128, 288.0, None)
    ]


def test_unknown_format_names_those_there_are() -> None:
    with pytest.raises(ReportError, match="'xml' is not an output format; expected one of md, csv, json, jsonl, sql"):
        BENCH.open_writer("xml", io.StringIO())


def test_default_columns() -> None:
    writer = BENCH.open_writer("md", io.StringIO())
    assert isinstance(writer, MarkdownWriter)
    assert [c.header for c in writer.columns] == ["model", "size", "params", "backend", "ngl", "test", "t/s", "GB/s"]


def test_build_info_names_a_commit_or_a_version() -> None:
    commit, number = build_info()
    assert commit
    assert number >= 0


# Student's t, two-sided, from printed tables of critical values.
@pytest.mark.parametrize(
    ("t", "freedom", "p"), [(12.706, 1, 0.05), (2.776, 4, 0.05), (4.604, 4, 0.01), (2.042, 30, 0.05), (1.960, 1e7, 0.05)]
)
def test_two_sided_p_against_printed_tables(t: float, freedom: float, p: float) -> None:
    # The tables give t to three decimals, which moves p by less than a part in a hundred.
    assert two_sided_p(t, freedom) == pytest.approx(p, rel=0.01)


def test_p_of_no_difference_is_one() -> None:
    assert two_sided_p(0.0, 3.0) == pytest.approx(1.0)


def test_welch_by_hand() -> None:
    # Means 100 and 103, deviations 1 and 2, five runs each: standard error sqrt(1/5 + 4/5) = 1, so t = 3;
    # freedom = 1 / (0.04/4 + 0.64/4) = 5.88, for which |t| >= 3 has p between 0.02 and 0.03.
    change = change_between(Speed(100, 1, 5), Speed(103, 2, 5))
    assert change.beats_noise is False
    assert 0.02 < float(change.reason.removeprefix("p = ")) < 0.03
    assert change_between(Speed(100, 1, 5), Speed(110, 2, 5)).beats_noise is True


def test_without_repetition_counts_only_what_holds_for_any_is_said() -> None:
    # The rows of a published before/after table: 71.40 -> 83.84 with deviations around 0.25 is no noise for two repetitions already; the
    # others were of ten, and real.
    assert change_between(Speed(71.40, 0.24, None), Speed(83.84, 0.26, None)) == compare.Change(True, "from 2 repetitions on")
    unknown = change_between(Speed(37.22, 0.54, None), Speed(41.86, 1.68, None))
    assert unknown.beats_noise is None and re.fullmatch(r"p = 0\.00\d+ if r = 5", unknown.reason)
    assert change_between(Speed(37.22, 0.54, 10), Speed(41.86, 1.68, 10)).beats_noise is True
    assert change_between(Speed(159.56, 1.25, None), Speed(159.13, 0.85, None)).beats_noise is None
    assert change_between(Speed(5, 1, None), Speed(5, 2, None)) == compare.Change(False, "no difference")
    assert change_between(Speed(1, 0, None), Speed(2, 0, None)) == compare.Change(None, "no deviation given")
    assert change_between(Speed(1, 0, 1), Speed(2, 0, 5)) == compare.Change(None, "one repetition")
    assert change_between(Speed(1, 0, 3), Speed(2, 0, 5)) == compare.Change(True, "no spread")


def saved(path: Path, fmt: str, *results: BenchResult) -> Path:
    path.write_text(written(fmt, *results), encoding="utf-8")
    return path


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(rows, dtype=object)


SLOWER = replace(LLAMA_8B, samples_ns=(500_000_000, 510_000_000, 490_000_000))
FASTER = replace(LLAMA_8B, samples_ns=(400_000_000, 410_000_000, 390_000_000))


@pytest.mark.parametrize("fmt", ["json", "jsonl", "csv", "sql"])
def test_every_machine_format_can_be_compared(tmp_path: Path, fmt: str) -> None:
    old, new = (compare.load(saved(tmp_path / name, fmt, r)) for name, r in (("old", SLOWER), ("new", FASTER)))
    (d,) = compare.compare(old, new).differences
    assert (d.model, d.size, d.params, d.backend, d.ngl, d.test) == (
        "llama 8B Q4_K - Medium",
        "4.58 GiB",
        "8.03 B",
        "Vulkan",
        "99",
        "tg128",
    )
    assert d.before.mean == pytest.approx(SLOWER.avg_ts)
    assert d.percent == pytest.approx(100 * (FASTER.avg_ts / SLOWER.avg_ts - 1))
    assert d.change.beats_noise is (True if fmt.startswith("json") else None)
    assert d.before.n == (3 if fmt.startswith("json") else None)


def test_sqlite_files_can_be_compared(tmp_path: Path) -> None:
    path = tmp_path / ("results #1%.sqlite" if sys.platform == "win32" else "results #1?.sqlite")
    with sqlite3.connect(path) as db:
        db.executescript(written("sql", SLOWER))
    db.close()
    (row,) = compare.load(path).to_dict("records")
    assert row["avg_ts"] == pytest.approx(SLOWER.avg_ts)


def test_comparison_table_reads_like_a_before_after_table() -> None:
    before = frame({**LLAMA_8B.row(), "avg_ts": 71.40, "stddev_ts": 0.24})
    after = frame({**LLAMA_8B.row(), "avg_ts": 83.84, "stddev_ts": 0.26})
    lines = compare.markdown(compare.compare(before, after)).splitlines()
    assert lines[0] == (
        "| model                          |       size |     params | backend    | ngl |            test |         t/s (before) |"
        "          t/s (after) |     diff | beats the noise             |"
    )
    assert lines[2] == (
        "| llama 8B Q4_K - Medium         |   4.58 GiB |     8.03 B | Vulkan     |  99 |           tg128 |         71.40 ± 0.24 |"
        "         83.84 ± 0.26 |   +17.4% | yes (from 2 repetitions on) |"
    )


def test_settings_that_vary_tell_rows_apart() -> None:
    rows = frame(*({**replace(LLAMA_8B, flash_attn=fa).row(), "samples_ts": [speed, speed + 1]} for fa, speed in ((0, 10.0), (1, 20.0))))
    comparison = compare.compare(rows, rows)
    assert [(d.settings, d.before.mean) for d in comparison.differences] == [({"flash_attn": "0"}, 10.5), ({"flash_attn": "1"}, 20.5)]
    assert "| ngl | fa |            test |" in compare.markdown(comparison)


def test_repeated_rows_of_one_test_are_pooled_and_the_first_repetition_can_go() -> None:
    rows = frame(*({**LLAMA_8B.row(), "samples_ts": s} for s in ([1.0, 10.0, 12.0], [2.0, 14.0, 16.0])))
    (d,) = compare.compare(rows, rows, skip_first=True).differences
    assert (d.before.mean, d.before.n) == (13.0, 4)
    (d,) = compare.compare(rows, rows).differences
    assert d.before.n == 6


def test_rows_without_samples_are_pooled_with_both_spreads() -> None:
    # Two rows 10 +- 3 and 18 +- 3: mean 14; inside them variance 9, between their means (4^2 + 4^2) / 1 = 32; together sqrt(41).
    rows = frame(*({**LLAMA_8B.row(), "avg_ts": mean, "stddev_ts": 3.0} for mean in (10.0, 18.0)))
    (d,) = compare.compare(rows, rows).differences
    assert d.before.mean == 14.0 and d.before.deviation == pytest.approx(sqrt(41)) and d.before.n is None


def of_means(means: Sequence[float]) -> pd.DataFrame:
    return frame(*({**LLAMA_8B.row(), "avg_ts": mean, "stddev_ts": 10.0} for mean in means))


def test_five_rows_without_samples_are_samples_themselves() -> None:
    """A model five times, ten repetitions each, as published: deviations of 24 t/s in them, and real all the same."""
    before, after = of_means([314.61, 323.84, 322.33, 319.46, 318.55]), of_means([332.0, 334.0, 336.0, 333.0, 335.0])
    (d,) = compare.compare(before, after).differences
    assert d.change.beats_noise is True and d.change.reason.endswith("of 5 and 5 rows")
    # All rows of one side above all of the other are never called noise, however few they are.
    (d,) = compare.compare(of_means([100.0, 101.0, 102.0]), of_means([103.0, 120.0, 140.0])).differences
    assert d.change.beats_noise is None
    (d,) = compare.compare(of_means([100.0, 101.0, 102.0]), of_means([101.0, 102.0, 99.0])).differences
    assert d.change.beats_noise is False


def test_first_repetition_cannot_go_without_samples() -> None:
    with pytest.raises(ReportError, match="tg128: no samples to leave the first out of"):
        compare.compare(frame(LLAMA_8B.row()), frame(LLAMA_8B.row()), skip_first=True)


def test_what_only_one_side_has_is_named() -> None:
    pp = replace(LLAMA_8B, n_prompt=512, n_gen=0)
    text = compare.markdown(compare.compare(frame(LLAMA_8B.row(), pp.row()), frame(LLAMA_8B.row())))
    assert text.splitlines()[-1] == "only before: llama 8B Q4_K - Medium pp512"


def test_backends_that_differ_are_both_shown() -> None:
    (d,) = compare.compare(frame(replace(LLAMA_8B, backends="ROCm").row()), frame(LLAMA_8B.row())).differences
    assert d.backend == "ROCm -> Vulkan"


def test_nothing_in_common_says_what_each_side_has() -> None:
    with pytest.raises(ReportError, match="share no test: the first has llama 8B Q4_K - Medium tg128, the second other tg128"):
        compare.compare(frame(LLAMA_8B.row()), frame(replace(LLAMA_8B, model_type="other").row()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds no result"),
        ("[1]", "expected one object a result"),
        ('[{"n_gen": 1}]', "result 1 lacks model_type, model_size, model_n_params, n_prompt, avg_ts, stddev_ts"),
        ("{broken", "not a result of vkbench or llama-bench"),
        ("", "holds no result"),
        ("CREATE TABLE x (a);", "no such table: llama_bench"),
    ],
)
def test_files_that_are_no_result(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(ReportError, match=message) as e:
        compare.load(path)
    assert str(e.value).startswith(str(path))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ReportError, match=r"nowhere\.json: no such file; expected a result of vkbench or llama-bench"):
        compare.load("nowhere.json")
