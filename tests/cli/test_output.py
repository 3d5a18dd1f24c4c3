"""Verdicts, and what is printed of them: console, csv, sql, json, the support table."""

from __future__ import annotations

import dataclasses
import json
import re
import sqlite3
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import planned_for

from vkback.cli.test_ops import compared
from vkback.errors import VkbackError
from vkback.evaluate.judge import ggml_limit, judge
from vkback.harness.cases import make_case
from vkback.harness.output import About, Console, Csv, Json, Printer, Sql, perf_line, samples_by_line
from vkback.harness.result import CaseResult
from vkback.harness.support import support_of, support_table
from vkback.ops.case import Tolerance
from vkback.ops.matmul.linear_cases import mul_mat_case

H200 = planned_for("nvidia_h200_linux")


def test_figures_of_a_verdict() -> None:
    verdict = judge(np.array([[1.0, 2.0], [3.0, 4.1]], np.float32), np.array([[1.0, 2.0], [3.0, 4.0]]), Tolerance(1e-6, 1e-3, ""))
    assert not verdict.ok
    assert verdict.text.endswith("at [1, 1]: 4.1, expected 4; rows with errors: 1 (1 in all)")
    assert (ggml_limit("MUL_MAT"), ggml_limit("RMS_NORM"), ggml_limit("ARGMAX")) == (5e-4, 1e-7, 0.0)


ABOUT = About("Vulkan0", "Example GPU", "example 1.2", "0123456", "2026-01-02T03:04:05Z")
TESTED = CaseResult(
    op="MUL_MAT",
    line="MUL_MAT(type_a=Q4_K,m=1,seed=7)",
    mode="test",
    passed=False,
    message="[MUL_MAT] it's wrong",
    detail="y: NMSE 1",
    nmse=float("inf"),
    worst=1.5,
    tolerance_nmse=1e-9,
    tolerance_worst=0.002,
    peer_limit=5e-4,
)
TIMED = CaseResult(
    op="MUL_MAT",
    line="MUL_MAT(type_a=Q4_K,m=2,seed=7)",
    mode="perf",
    time_us=10.0,
    spread_us=0.1,
    latency_us=12.0,
    samples_us=(9.9, 10.0, 10.1),
    nbytes=20_000_000,
    flops=40_000_000,
    n_runs=300,
    read_rate_gb_s=4000.0,
)
REFUSED = CaseResult(op="ADD", line="ADD(ne=[1],seed=2)", mode="test", supported=False, message="[ADD] no")


def printed(make: Callable[[StringIO], Printer], *results: CaseResult) -> str:
    out = StringIO()
    printer = make(out)
    for result in results:
        printer.add(result)
    printer.finish()
    return out.getvalue()


def test_console() -> None:
    passed = dataclasses.replace(TESTED, passed=True, message="", line="MUL_MAT(type_a=Q4_K,m=3,seed=7)")
    text = printed(lambda out: Console(out, ABOUT, verbose=True, style=lambda text, colour: text), passed, TESTED, REFUSED)
    assert text.splitlines() == [
        "  MUL_MAT(type_a=Q4_K,m=3,seed=7): OK  y: NMSE 1; llama.cpp allows NMSE 5e-04",
        "[MUL_MAT] it's wrong",
        "  MUL_MAT(type_a=Q4_K,m=1,seed=7): FAIL  y: NMSE 1; llama.cpp allows NMSE 5e-04",
        "  ADD(ne=[1],seed=2): not supported [[ADD] no]",
        "  1/2 tests passed, 1 not supported",
        "",
        "Failing tests:",
        "  MUL_MAT(type_a=Q4_K,m=1,seed=7)",
    ]


def test_perf_line() -> None:
    assert perf_line(TIMED) == (
        "  MUL_MAT(type_a=Q4_K,m=2,seed=7):           300 runs -    10.00 us/run ±1.0 % -  40.00 MFLOP/run -   4.00 TFLOPS - 2000.00 GB/s "
        "(50.0 % of read rate), latency 12.00 us"
    )
    assert perf_line(dataclasses.replace(TIMED, barrier_free_us=11.25)) == perf_line(TIMED) + ", barrier-free 11.25 us"


def test_perf_line_of_a_mat_mat_has_the_share_of_its_math_rate() -> None:
    for kernel, name in (("coop_mat", "matrix rate"), ("int_dot", "integer dot rate"), ("f32", "f32 rate")):
        line = perf_line(dataclasses.replace(TIMED, math_way=kernel, math_rate_tflops=16.0))
        assert f"-   4.00 TFLOPS (25.0 % of {name}) - 2000.00 GB/s (50.0 % of read rate)" in line


def test_math_rate_is_in_the_fields_for_machines() -> None:
    timed = dataclasses.replace(TIMED, math_way="coop_mat", math_rate_tflops=16.0)
    db = sqlite3.connect(":memory:")
    db.executescript(printed(lambda out: Sql(out, ABOUT), timed, TIMED))
    query = "SELECT math_way, math_rate_tflops, math_rate_percent FROM test_backend_ops"
    assert db.execute(query).fetchall() == [("coop_mat", 16.0, 25.0), ("", None, None)]
    (read,) = json.loads(printed(lambda out: Json(out, ABOUT), timed))
    assert (read["math_way"], read["math_rate_tflops"], read["math_rate_percent"]) == ("coop_mat", 16.0, 25.0)


def test_csv() -> None:
    rows = printed(lambda out: Csv(out, ABOUT), TESTED).splitlines()
    assert rows[0].startswith('"backend_name","op_name","op_params","test_mode","supported","error_message","backend_reg_name","passed",')
    assert rows[1].startswith('"Vulkan0","MUL_MAT","type_a=Q4_K,m=1","test","1","[MUL_MAT] it\'s wrong","Vulkan","0",')


def test_sql_can_be_read() -> None:
    db = sqlite3.connect(":memory:")
    db.executescript(printed(lambda out: Sql(out, ABOUT), TESTED, TIMED, REFUSED))
    query = "SELECT op_params, supported, passed, error_message, time_us, bandwidth_gb_s, flops, nmse, seed FROM test_backend_ops"
    assert db.execute(query).fetchall() == [
        ("type_a=Q4_K,m=1", 1, 0, "[MUL_MAT] it's wrong", None, None, None, float("inf"), 7.0),
        ("type_a=Q4_K,m=2", 1, None, "", 10.0, 2000.0, 4e12, None, 7.0),
        ("ne=[1]", 0, None, "[ADD] no", None, None, None, None, 2.0),
    ]


def test_json_serves_as_baseline() -> None:
    text = printed(lambda out: Json(out, ABOUT), TIMED)
    assert json.loads(text)[0]["device_description"] == "Example GPU"
    before = samples_by_line(text)
    assert before == {TIMED.line: (9.9, 10.0, 10.1)}
    faster = dataclasses.replace(TIMED, samples_us=(4.9, 5.0, 5.1))
    assert compared(before, faster).startswith(", time -50.0 % against 10.00 us, beats the noise: yes (p = ")
    assert "beats the noise: no" in compared(before, dataclasses.replace(TIMED, samples_us=(9.8, 10.1, 10.3)))
    assert compared({}, TIMED) == ", not in the baseline"


def test_not_reading_a_baseline_says_why(tmp_path: Path) -> None:
    from vkback.cli.test_ops import _against

    file = tmp_path / "old.json"
    file.write_text("{")
    with pytest.raises(VkbackError, match=r"old\.json: not the json of a perf run: "):
        _against(file)


def test_support_table() -> None:
    cases = [
        mul_mat_case("Q4_K", 8, 1, 256),
        mul_mat_case("Q8_0", 8, 1, 256),
        make_case("FLASH_ATTN_EXT", {"n_head": 8, "n_head_kv": 2, "hd": 63, "kv": 8, "nb": 1, "y": "F32"}),
    ]
    results = list(support_of(cases, H200))
    assert [r.supported for r in results] == [True, True, False]
    lines = support_table(cases, results)
    assert lines[1].split() == ["MUL_MAT", "q4_K", "1", "of", "1"]
    assert re.match(r"FLASH_ATTN_EXT +0 of +1$", lines[3]), "what has no room beside a row stands below it"
    assert re.match(r" +not the rest: \[attention\] kqv_out: .* a multiple of 8", " ".join(lines[4:6]))
    assert lines[-1].startswith("weight types without a kernel: ")
