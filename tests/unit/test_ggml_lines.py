"""Case lines of llama.cpp's test-backend-ops: what is read is printed alike, what cannot run says why, what cannot be read is an error."""

from __future__ import annotations

import csv
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from cli_kit import call
from kernel_paths import planned_for

from tools.fuzz_lines import fuzz
from vkback.cli import main
from vkback.device import Device
from vkback.graph import Node, Tensor
from vkback.harness.cases import find_case, full_cases, quick_cases
from vkback.harness.lines import case_lines, cases_of
from vkback.harness.output import About, Csv, op_table
from vkback.harness.result import CaseResult
from vkback.harness.suite import Suite
from vkback.harness.support import support_of
from vkback.ops.case_line import CaseLineError
from vkback.ops.general import NUMBERS, copy_dispatch, lower_general, permuted, rounded_to
from vkback.ops.ggml_words import type_word
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary

H200 = planned_for("nvidia_h200_linux")

SMALL = (
    "ADD(type=bf16,ne=[10,5,4,3],nr=[1,2,1,1],nf=1,perm1=1,src_overlap=0,type_b=f32)",
    "SUB(type=f32,ne=[10,5,4,6],nr=[1,1,1,1],nf=1,perm1=0,src_overlap=1)",
    "SCALE(type=f32,ne=[10,10,10,10],scale=2.000000,bias=1.000000,inplace=1)",
    "FLOOR(type=f16,ne=[7,1,5,3])",
    "ELU(type=f16,ne_a=[5,7,11,13],v=1)",
    "REGLU(type=bf16,ne_a=[128,2,2,2],v=1,swapped=1)",
    "GEGLU(type=f16,ne_a=[128,2,2,2],v=0,split)",
    "SWIGLU_CLAMP(type=f32,ne_a=[128,2,2,2],v=1,limit=2.000000)",
    "NORM(type=f32,ne=[33,5,4,3],v=0,eps=0.000001,noncontig_rows=1)",
    "L2_NORM(type=f32,ne=[64,5,4,3],eps=0.100000,v=1,noncontig_rows=0)",
    "RMS_NORM(type=f32,ne=[64,5,4,3],v=0,eps=0.000001,inplace=1)",
    "SOFT_MAX(type=f32,ne=[15,15,2,3],mask=1,sinks=1,m_prec=f16,nr23=[3,1],scale=0.100000,max_bias=8.000000,inplace=0)",
    "SUM_ROWS(type=f32,ne=[16,5,6,3],permute=1,slice=1)",
    "ARGSORT(type=f32,ne=[4097,2,1,1],order=1)",
    "TOP_K(type=f32,ne=[128,3,1,1],k=100,ties=1)",
    "ARGMAX(type=f32,ne=[100,10,1,1])",
    "ADD_ID(type_a=f32,type_b=f32,n_embd=129,n_experts=4,n_experts_used=2,n_token=3)",
    "CONT(type=i32,ne=[2,3,5,7],use_view_slice=1,permute=[0,0,0,0])",
    "CONT(type=bf16,ne=[33,5,7,1],use_view_slice=0,permute=[1,2,0,3])",
    "REPEAT(type=i16,ne=[5,3,2,1],nr=[1,2,1,2])",
    "CONCAT(type=i64,ne_a=[11,3,2,2],ne_b_d=7,dim=1,v=3)",
    "CONCAT(type=q5_1,ne_a=[64,3,2,1],ne_b_d=32,dim=0,v=12)",
    "PAD(type=f32,ne_a=[11,5,3,2],lp0=1,rp0=2,lp1=3,rp1=4,lp2=5,rp2=6,lp3=7,rp3=8,tfrm=1,circular=1)",
    "PAD(type=f32,ne_a=[33,2,1,1],pad_0=1,pad_1=0,circular=0)",
    "GET_ROWS(type=bf16,n=256,m=5,r=4,be1=7,be2=1,v=1,vs0=1,offset_cols=0)",
    "GET_ROWS(type=q4_0,n=256,m=5,r=4,be1=2,be2=3,v=1,vs0=1,offset_cols=32)",
    "MUL_MAT(type_a=f16,type_b=f32,m=8,n=16,k=64,bs=[8,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,src_overlap=0,m_v=16,pad=16)",
    "MUL_MAT(type_a=bf16,type_b=bf16,m=16,n=3,k=64,bs=[2,3],nr=[2,1],per=[0,3,2,1],k_v=0,o=1,src_overlap=0,m_v=0,pad=0)",
    "MUL_MAT(type_a=f32,type_b=f32,m=32,n=4,k=96,bs=[3,2],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,src_overlap=1,m_v=0,pad=0)",
    "MUL_MAT(type_a=q4_0,type_b=f16,m=16,n=3,k=64,bs=[3,2],nr=[1,2],per=[0,1,2,3],k_v=128,o=2,src_overlap=0,m_v=0,pad=0)",
    "MUL_MAT_ID(type_a=f16,type_b=f32,n_mats=4,n_used=2,b=0,m=8,n=16,k=64,amax=1.000000,m_v=64)",
    "SSM_CONV(type=f32,ne_a=[12,33,4,1],ne_b=[4,33,1,1])",
    "SSM_SCAN(type=f32,d_state=16,head_dim=8,n_head=4,n_group=2,n_seq_tokens=5,n_seqs=2,xbc_overlap=0,K=1,weak_decay=1)",
)
"""As test-backend-ops prints them; every key that our ops take from it occurs with another value than its default."""


@pytest.mark.parametrize("line", SMALL)
def test_a_line_is_printed_as_it_was_read(line: str) -> None:
    printed = find_case(line).line
    assert printed.rpartition(",seed=")[0] + ")" == line


@pytest.mark.vulkan
def test_the_lines_run_and_are_right(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    with Suite(device, library, ctx) as suite:
        assert [(r.line, r.message) for r in suite.run(map(find_case, SMALL)) if not r.passed] == []


def test_every_key_changes_the_case_or_is_refused() -> None:
    """Each number of a line raised by one: another problem, or an error."""
    for line in SMALL:
        case = find_case(line)
        first = case.build()
        for key, value in case.params.items():
            if key in ("type", "seed") or not isinstance(value, int):
                continue
            other = line.replace(f",{key}={int(value)}", f",{key}={int(value) + 1}")
            try:
                second = find_case(other).build()
            except (CaseLineError, PlanError):
                continue
            same_values = all(n in second.values and np.array_equal(first.values[n], second.values[n]) for n in first.values)
            assert first.node != second.node or not same_values, (line, key)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("OUT_PROD_OF_NOBODY(m=1)", None),
        ("CONV_2D(ne_input=[1,2,3,4],type=f32)", "[CONV_2D] this project has no such op"),
        ("SILU(type=i8,ne_a=[5,1,1,1],v=0)", "[SILU] type=i8 is not supported, but f32, f16, bf16"),
        ("RMS_NORM(type=f16,ne=[5,1,1,1],v=0,eps=0.1,inplace=0)", "[RMS_NORM] type=f16 is not supported, but f32"),
        ("ADD(type=f32,ne=[65536,65536,1,1],nr=[1,1,1,1],nf=1)", "[ADD] 4294967296 values in one tensor; a case may have 536870912"),
    ],
)
def test_what_cannot_run_is_not_supported(line: str, why: str | None) -> None:
    if why is None:
        with pytest.raises(CaseLineError, match=r"^OUT_PROD_OF_NOBODY: no such op; of \d+ the nearest are OUT_PROD, "):
            find_case(line)
        return
    (result,) = support_of([find_case(line)], H200)
    assert not result.supported and result.message == why


CONSOLE = """Testing 2 devices
Backend 1/2: Vulkan0
  Device description: Example
  ABS(type=f16,ne_a=[128,2,2,2],v=0): \x1b[1;32mOK\x1b[0m
[MUL_MAT] NMSE = 0.1 > 0.0005 \x1b[0m  MUL_MAT(type_a=q4_K,type_b=f32,m=16,n=1,k=256,bs=[1,1]): \x1b[1;31mFAIL\x1b[0m
  SWIGLU(type=f32,ne_a=[128,2,2,2],v=0,split): not supported [Vulkan0]
Failing tests:
  MUL_MAT(type_a=q4_K,type_b=f32,m=16,n=1,k=256,bs=[1,1])
"""
CSV = """"build_commit","backend_name","op_name","op_params","test_mode"
"abc","Vulkan0","ABS","type=f16,ne_a=[128,2,2,2],v=0","test"
"abc","Vulkan0","MUL_MAT","type_a=q4_K,type_b=f32,m=16,n=1,k=256,bs=[1,1]","test"
"abc","Vulkan0","SWIGLU","type=f32,ne_a=[128,2,2,2],v=0,split","test"
"""
_SQL_ROWS = (
    ("it''s 1", "ABS", "type=f16,ne_a=[128,2,2,2],v=0"),
    ("2", "MUL_MAT", "type_a=q4_K,type_b=f32,m=16,n=1,k=256,bs=[1,1]"),
    ("3", "SWIGLU", "type=f32,ne_a=[128,2,2,2],v=0,split"),
)
SQL = "CREATE TABLE IF NOT EXISTS test_backend_ops (\n  op_name TEXT,\n  op_params TEXT\n);\n" + "\n".join(
    f"INSERT INTO test_backend_ops (test_time, op_name, op_params, supported) VALUES ('{time}', '{op}', '{params}', 1);"
    for time, op, params in _SQL_ROWS
)


@pytest.mark.parametrize("text", [CONSOLE, CSV, SQL], ids=["console", "csv", "sql"])
def test_lines_are_picked_from_what_ggml_prints(text: str) -> None:
    assert [line for _, line in case_lines(text)] == [
        "ABS(type=f16,ne_a=[128,2,2,2],v=0)",
        "MUL_MAT(type_a=q4_K,type_b=f32,m=16,n=1,k=256,bs=[1,1])",
        "SWIGLU(type=f32,ne_a=[128,2,2,2],v=0,split)",
    ]


def test_lines_that_make_no_case_are_named_with_their_place() -> None:
    text = "ABS(ne_a=[1])\nsome words (in brackets) f(x)\nABS(ne_a=[0])\nNOPE(a=1)\n"
    with pytest.raises(CaseLineError) as e:
        cases_of(text, "log.txt")
    first, second = str(e.value).splitlines()
    assert first == "log.txt:3: ne_a=[0]: expected one to four sizes above 0, the fastest axis first"
    assert second.startswith("log.txt:4: NOPE: no such op; of ")
    with pytest.raises(CaseLineError, match=r"^log\.txt: no case in it"):
        cases_of("nothing", "log.txt")


@pytest.mark.vulkan
def test_a_file_ends_in_a_table_and_a_garbled_one_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.txt"
    log.write_text("SQR(type=f32,ne=[10,5,4,3]): OK\nCOL2IM_1D(type=f32): OK\n")
    assert call(monkeypatch, main.main, "test-ops", "--from", str(log)) == 0
    shown = capsys.readouterr().out
    table = shown.partition("\n\n")[2].splitlines()
    assert re.match(r"[\d.]+ s; seconds of all processes: values and plan [\d.]+, reference", table[5])
    assert re.match(r"  [\d.]+ s: SQR\(type=f32,ne=\[10,5,4,3\]", table[-1])
    assert table[1:4] == [
        "COL2IM_1D       1      0      0              1  this project has no such op (1)",
        "SQR             1      1      1              0",
        "all             2      1      1              1",
    ]
    assert call(monkeypatch, main.main, "test-ops", "--from", str(log), "--output", "csv") == 0
    assert '"Vulkan0","SQR","type=f32,ne=[10,5,4,3]","test","1"' in capsys.readouterr().out
    log.write_text("SQR(type=f32,ne=[10,5,4,3],x=1)\n")
    assert call(monkeypatch, main.main, "test-ops", "--from", str(log)) == 2
    assert "log.txt:1: SQR: no parameter is called x; known are type, ne, seed;" in capsys.readouterr().err
    assert call(monkeypatch, main.main, "test-ops", "SQR(type=f32") == 2


def test_support_is_counted_as_ggml_counts_it() -> None:
    """Its table of ops takes rows of mode "support", groups them by backend_reg_name and op_name, and reads "yes" in error_message."""
    lines = ("ABS(type=f16,ne_a=[128,2,2,2],v=0)", "SILU(type=i8,ne_a=[5,1,1,1],v=0)", "SILU(type=f32,ne_a=[5,1,1,1],v=0)")
    out = StringIO()
    printer = Csv(out, About("Vulkan0", "a device", "a driver", "abc", "2026-11-23T00:00:00Z"))
    for result in support_of(map(find_case, lines), H200):
        printer.add(result)
    printer.finish()
    rows = list(csv.DictReader(StringIO(out.getvalue())))
    expected = ["backend_name", "op_name", "op_params", "test_mode", "supported", "error_message", "backend_reg_name"]
    assert list(rows[0])[:7] == expected
    assert [(r["backend_reg_name"], r["test_mode"], r["op_name"], r["error_message"], r["supported"]) for r in rows] == [
        ("Vulkan", "support", "ABS", "yes", "1"),
        ("Vulkan", "support", "SILU", "no", "0"),
        ("Vulkan", "support", "SILU", "yes", "1"),
    ]
    assert [f"{r['op_name']}({r['op_params']})" for r in rows] == list(lines)
    assert rows[1]["reason"] == "[SILU] type=i8 is not supported, but f32, f16, bf16" and rows[0]["reason"] == ""


def test_the_table_counts_reasons() -> None:
    def result(passed: bool | None, why: str = "") -> CaseResult:
        return CaseResult(op="ADD", line="ADD()", mode="test", supported=passed is not None, passed=passed, message=why)

    rows = op_table([result(True), result(False, "wrong"), result(None, "[ADD] a"), result(None, "[ADD] a"), result(None, "[ADD] b")])
    assert rows[1].split() == ["ADD", "5", "2", "1", "3", "a", "(2);", "b", "(1)"]


def test_garbled_lines_end_in_errors_of_ours() -> None:
    outcome = fuzz([*SMALL, *(c.line for c in quick_cases())], 400, 3, H200)
    assert outcome.faults == []
    assert outcome.counts["refused"] > 200


def test_types_are_spelled_as_ggml_does() -> None:
    assert [type_word(t) for t in ("Q4_K", "IQ2_XXS", "MXFP4", "F16", "Q8_0")] == ["q4_K", "iq2_xxs", "mxfp4", "f16", "q8_0"]


def test_the_full_set_has_views_types_and_permutations() -> None:
    found = [c.params for c in full_cases()]
    assert {p.get("type") for p in found} >= {"f32", "f16", "bf16", "i32", "i16", "i8", "i64", "q4_0"}
    assert {p["per"] for p in found if "per" in p} >= {(0, 2, 1, 3), (0, 3, 2, 1), (1, 0, 2, 3)}
    assert any(p.get("src_overlap") for p in found) and any(p.get("inplace") for p in found) and any(p.get("m_v") for p in found)


@pytest.mark.parametrize("source", NUMBERS)
def test_the_general_copy_converts_every_pair(source: str) -> None:
    x = Tensor("x", source, (2, 3), "input")
    for target in NUMBERS:
        y = Tensor("y", target, (3, 2))
        dispatch = copy_dispatch(x, y, Node("CPY", (x,), (y,)), H200, source=permuted((1, 1, 2, 3), (1, 0, 2, 3)))
        assert dict(dispatch.kernel.defines)["TO_TYPE"] == NUMBERS[target]


def test_what_a_kernel_does_not_take_is_refused_once() -> None:
    x, y = Tensor("x", "I64", (4,), "input"), Tensor("y", "F32", (4,))
    with pytest.raises(PlanError, match=r"x I64\[4\]: expected a type of floats"):
        lower_general(OPS["SQR"], Node("SQR", (x,), (y,)), H200, ("F32",))


def test_values_are_rounded_as_their_type_holds_them() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.14159])
    np.testing.assert_array_equal(rounded_to("BF16", values), np.array([1.0, 1.0, 1.015625, -3.140625], np.float32))
    assert rounded_to("F16", values).dtype == np.float16
