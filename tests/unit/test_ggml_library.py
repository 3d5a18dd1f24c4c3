"""Another backend by ggml's C interface: what nodes are said as, what its memory holds, and what is told of libraries that are none.

With VKBACK_GGML=FILE, a backend of ggml, cases also run on it.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vkback.cli import main
from vkback.graph import Tensor
from vkback.harness.cases import find_case, quick_cases
from vkback.harness.ggml_library import GgmlSuite, LibraryError, allowed, distinct, from_bytes, picked, raw_bytes
from vkback.harness.ggml_ops import BUILDERS, FUNCTIONS, axes_of, outputs_of, shape4
from vkback.ops.case import Problem, Tolerance
from vkback.ops.lowering import PlanError
from vkback.ops.view import View, laid_out


class Noted:
    """In place of a library: what is built on what, in words."""

    def __init__(self) -> None:
        self.library = SimpleNamespace(ggml_soft_max_add_sinks=lambda y, sinks: None, ggml_flash_attn_ext_add_sinks=lambda y, sinks: None)

    def leaf(self, tensor: Tensor, values: Any) -> str:
        assert len(raw_bytes(tensor, values)) > 0
        return f"{tensor.type}{shape4(tensor.shape)}"

    def empty(self, tensor: Tensor) -> str:
        return f"new {tensor.type}{shape4(tensor.shape)}"

    def view(self, tensor: str, type: str, view: View) -> str:
        return f"view{list(reversed(view.four().shape))} of {tensor}"

    def op(self, name: str, *arguments: Any) -> str:
        signature = FUNCTIONS[f"ggml_{name}"]
        assert len(arguments) == len(signature), name
        kinds: dict[str, tuple[type, ...]] = {
            "T": (str, type(None)),
            "f": (float, int),
            "i": (int,),
            "b": (bool,),
            "l": (int,),
            "s": (list,),
        }
        for argument, kind in zip(arguments, signature, strict=True):
            assert isinstance(argument, kinds.get(kind, (int,))), f"{name}: {argument} is not of kind {kind}"
        return f"{name}({', '.join(map(str, arguments))})"


def said(line: str) -> str:
    problem = find_case(line).build()
    return str(outputs_of(problem.node, problem.values, Noted()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("MUL_MAT(type_a=q4_K,m=96,n=2,k=512)", "mul_mat(Q4_K[512, 96, 1, 1], F32[512, 2, 1, 1])"),
        (
            "MUL_MAT_ID(type_a=q8_0,type_b=f32,n_mats=4,n_used=2,b=0,m=32,n=5,k=256)",
            "mul_mat_id(Q8_0[256, 32, 4, 1], F32[256, 2, 5, 1], I32[2, 5, 1, 1])",
        ),
        ("RMS_NORM(type=f32,ne=[64,2,1,1],v=0,eps=0.000001,inplace=0)", "rms_norm(F32[64, 2, 1, 1], 1e-06)"),
        (
            "CPY(type_src=F32,type_dst=F16,ne=[3,5,32],order=[1,0,2],seed=29)",
            "cpy(view[32, 5, 3, 1] of F32[32, 3, 5, 1], new F16[32, 5, 3, 1])",
        ),
        ("ARGSORT(type=f32,ne=[60,2,3,1],order=1)", "argsort(F32[60, 2, 3, 1], 1)"),
        ("SWIGLU(type=f32,ne_a=[8192,1,1,1],v=0,swapped=0)", "glu(F32[8192, 1, 1, 1], 2, False)"),
        # Rows of the cache that a token sees, and heads before tokens.
        (
            "FLASH_ATTN_EXT(n_head=8,n_head_kv=2,hd=64,n_ctx=300,pos=[40,299],y=F32,window=0,sinks=0,seed=2)",
            "flash_attn_ext(F32[64, 2, 8, 1], view[64, 300, 2, 1] of F16[64, 300, 2, 1], view[64, 300, 2, 1] of F16[64, 300, 2, 1], "
            "F16[300, 2, 1, 1], 0.125, 0.0, 0.0)",
        ),
    ],
)
def test_nodes_in_ggml_s_words(line: str, expected: str) -> None:
    assert said(line) == expected


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("QUANTIZE_Q8_1(ne=[1,32])", "is not an op of ggml"),
        ("SWIGLU(type=f32,ne_a=[4096,1,1,1],v=0,split,out=Q8_1)", "a Q8_1 output is vkback's own"),
        ("SET_ROWS(ne=[4,1,6],pos=[15,-1,2,16],seed=19)", "positions outside of the cache"),
        ("ARGMAX(type=f32,ne=[2050,3,1,1],kind=nan)", "no finite numbers"),
    ],
)
def test_what_ggml_has_not_is_no_fault_of_its_backends(line: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        said(line)


def test_every_op_of_the_table_is_said_in_some_case_of_the_quick_suite() -> None:
    told: set[str] = set()
    for case in quick_cases():
        if case.op in BUILDERS and case.op not in told:
            problem = case.build()
            try:
                outputs_of(problem.node, problem.values, Noted())  # type: ignore[arg-type]
            except PlanError:
                continue
            told.add(case.op)
    assert set(BUILDERS) - told <= {"ATTENTION", "ROPE_EXT"}  # what cases of FLASH_ATTN_EXT and ROPE make where llama.cpp's lines say more


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_axes_of_a_view(order: tuple[int, ...]) -> None:
    """Permuting ggml's view back gives the shape of ours."""
    shape = (2, 3, 5, 7)
    _, view = laid_out(shape, order)
    slow_to_fast, places = axes_of(view)
    assert slow_to_fast == order
    ne = [view.shape[axis] for axis in reversed(slow_to_fast)]
    permuted = [0] * 4
    for n, place in zip(ne, places, strict=True):  # axis i of ggml_permute's operand becomes axis places[i]
        permuted[place] = n
    assert permuted == list(reversed(shape))
    with pytest.raises(PlanError, match="without neighbours"):
        axes_of(View(0, (1, 1, 2, 3), (0, 0, 12, 2)))


def test_values_in_memory_and_back() -> None:
    values = np.array([[1.0, -2.5, 0.0, 3.0]], np.float32)
    for name in ("F32", "F16", "BF16", "I32"):
        data = raw_bytes(Tensor("x", name, (1, 4), "input"), values)
        assert len(data) == 4 * (4 if name.endswith("32") else 2)
        assert np.array_equal(from_bytes(name, data, (1, 4)), np.trunc(values) if name == "I32" else values)
    assert raw_bytes(Tensor("x", "BF16", (1, 4), "input"), values)[2:4] == b"\x20\xc0"  # -2.5 is 0xC020 in BF16
    with pytest.raises(PlanError, match="another form"):
        raw_bytes(Tensor("x", "Q4_0", (1, 32), "input"), values)


def test_places_are_judged_by_the_values_there() -> None:
    case = find_case("ARGSORT(type=f32,ne=[4,1,1,1],order=0)")
    x = np.array([[[[2.0, 1.0, 1.0, 3.0]]]], np.float32)
    node = case.build().node
    problem = Problem(node, {node.inputs[0].name: x})
    one, other = (picked(problem, np.array([[[places]]])) for places in ([1, 2, 0, 3], [2, 1, 0, 3]))
    assert np.array_equal(one, other) and one.tolist() == [[1.0, 1.0, 2.0, 3.0]]
    assert np.isnan(picked(problem, np.array([[[[1, 1, 0, 3]]]]))).all() and np.isnan(picked(problem, np.array([[[[1, 4, 0, 3]]]]))).any()


def test_bounds_are_the_wider_of_both_and_one_element_cannot_hide() -> None:
    bound = allowed("MUL_MAT", Tolerance(1e-9, 1e-3, ""))
    assert bound.nmse == 5e-4 and 0.2 < bound.worst < 0.3
    assert allowed("RMS_NORM", Tolerance(1e-3, 2.0, "")).worst == 2.0


def test_cases_that_differ_in_vkback_s_kernels_alone_are_one() -> None:
    line = "MUL_MAT(type_a=q4_K,m=96,n=2,k=512)"
    cases = [find_case(line), find_case(line).where(lanes=16), find_case(line).where(sync="sentinel"), find_case(line).reseeded(9)]
    assert len(distinct(cases)) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux's libraries")
def test_a_library_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match="no such file; expected a backend of ggml"):
        GgmlSuite(tmp_path / "libggml-cpu.so")
    text = tmp_path / "libggml-cpu.so"
    text.write_text("no library")
    with pytest.raises(LibraryError, match=r"libggml-cpu\.so: .*expected a backend of ggml"):
        GgmlSuite(text)
    name = ctypes.util.find_library("m")
    if name is None:
        pytest.skip("no libm is found")
    with pytest.raises(LibraryError, match="it has none of ggml_backend_init"):
        GgmlSuite(Path(name))


@pytest.mark.skipif(shutil.which("cc") is None or sys.platform != "linux", reason="no C compiler to make a library that ends its process")
def test_a_library_that_ends_its_process_is_told_of_with_its_last_words(tmp_path: Path) -> None:
    source, library = tmp_path / "x.c", tmp_path / "libggml-cpu.so"
    source.write_text(
        '#include <stdio.h>\n#include <stdlib.h>\nvoid *ggml_backend_init(void) { fputs("GGML_ASSERT(0) failed\\n", stderr); abort(); }\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    with pytest.raises(LibraryError, match=r"ended its process \(exit code -6\): GGML_ASSERT\(0\) failed"):
        GgmlSuite(library)


def test_the_command_refuses_what_means_vkback_s_own_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from cli_kit import call

    for more in (["perf"], ["--device", "0"], ["--act", "f32"]):
        assert call(monkeypatch, main.main, "test-ops", *more, "--library", "libggml-cpu.so") == 2
        assert "--library judges another program's backend" in capsys.readouterr().err


@pytest.mark.skipif("VKBACK_GGML" not in os.environ, reason="VKBACK_GGML names no library of ggml")
def test_cases_run_on_a_library() -> None:
    lines = ["MUL_MAT(type_a=q4_K,m=96,n=2,k=512)", "RMS_NORM(type=f32,ne=[64,2,1,1],v=0,eps=0.000001,inplace=0)"]
    with GgmlSuite(Path(os.environ["VKBACK_GGML"])) as suite:
        for line in lines:
            assert suite.run_one(find_case(line)).result.passed, line
