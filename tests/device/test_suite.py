"""The op suite: order of results, what is not supported, several processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from vkback import paths
from vkback.device import Device, KernelSpec
from vkback.harness import suite
from vkback.harness.cases import find_case, make_case
from vkback.harness.invariance import one_by_one, same_bits
from vkback.harness.result import CaseResult
from vkback.harness.suite import Suite, run_in_processes
from vkback.ops.case_line import CaseLineError
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.program.compile import Kernels, compile_kernels
from vkback.shader import CompileError, ShaderLibrary, Variant


def test_chunks_shrink_and_cover_all() -> None:
    lines = [str(i) for i in range(1000)]
    chunks = list(suite.chunks(lines, 4))
    assert [line for chunk in chunks for line in chunk] == lines
    assert max(map(len, chunks)) == 100
    assert len(chunks[-1]) == 1


@pytest.mark.vulkan
def test_results_come_in_order_and_say_what_is_not_supported(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    cases = [
        make_case("SILU", {"ne_a": (64,)}),
        make_case("FLASH_ATTN_EXT", {"n_head": 8, "n_head_kv": 2, "hd": 63, "kv": 8, "nb": 1, "y": "F32"}),
        make_case("ADD", {"ne": (64,), "nr": (1, 2, 1, 1)}),
    ]
    with Suite(device, library, ctx) as opened:
        results = list(opened.run(cases))
    assert [r.line for r in results] == [c.line for c in cases]
    assert [(r.supported, r.passed) for r in results] == [(True, True), (False, None), (True, True)]
    assert "multiple of 8" in results[1].message
    assert results[0].tolerance_nmse and results[0].nmse is not None and results[0].nmse <= results[0].tolerance_nmse


def test_kernels_are_compiled_as_a_program_compiles_them() -> None:
    """With their specialization and subgroup size; the fault of one shader is that of its kernel alone."""
    specs: list[KernelSpec] = []

    def each(users: Iterable[Variant], batch: int) -> Iterator[tuple[Variant, bytes]]:
        for variant in users:
            if variant.source == "bad.comp":
                raise CompileError(f"{variant.name} does not compile")
            yield variant, b"spirv"

    def make(wanted: Sequence[KernelSpec]) -> list[str]:
        specs.extend(wanted)
        return [spec.name for spec in wanted]

    def constants(variant: Variant) -> tuple[tuple[int, int], ...]:
        return tuple((60, int(value)) for _, value in variant.spec)

    variants = [Variant("a.comp", (("N", 1),), 32, (("SUBNORMALS", 1),)), Variant("bad.comp"), Variant("b.comp")]
    wanted: Any = [SimpleNamespace(kernel=v, args=(None, None), push=b"1234") for v in variants]
    device: Any = SimpleNamespace(kernels=make)
    library = cast(ShaderLibrary, SimpleNamespace(compile_each=each, specialization=constants))
    kernels = Kernels(device, library, 1)
    futures: Any = kernels.start(wanted)
    a, bad, b = futures
    try:
        assert [a.result(10), b.result(10)] == [variants[0].name, variants[2].name]
        with pytest.raises(CompileError, match="bad does not compile"):
            bad.result(10)
    finally:
        kernels.close()
    ahead, specs[:] = set(specs), []
    compile_kernels(device, library, [wanted[0], wanted[2]])
    assert ahead == set(specs)
    assert KernelSpec(b"spirv", variants[0].name, 2, 4, ((60, 1),), 32) in ahead


@pytest.mark.vulkan
def test_a_long_run_keeps_few_kernels(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Those of a CPU driver take megabytes each, and the full suite has thousands. One that was destroyed is compiled again."""
    cases = [make_case(op, {"ne_a": (64,)}) for op in ("SILU", "RELU", "TANH", "SILU")]
    with Device.open(device.index) as own, Suite(own, library, ctx, kept=1) as opened:
        for case in cases:
            assert [r.passed for r in opened.run([case])] == [True]
        assert own.live_objects()["Pipeline"] <= 2


@pytest.mark.vulkan
def test_a_fault_of_one_op_does_not_end_the_run(
    device: Device, library: ShaderLibrary, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise IndexError("no such axis")

    monkeypatch.setattr(OPS["SILU"], "reference", broken)
    with Suite(device, library, ctx) as opened:
        bad, good = opened.run([make_case("SILU", {"ne_a": (64,)}), make_case("ABS", {"ne_a": (64,)})])
    assert (bad.passed, bad.message) == (False, "[SILU] IndexError: no such axis")
    assert good.passed


@pytest.mark.vulkan
def test_several_processes_give_the_same_results(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    cases = [c for op in ("ABS", "ADD", "SCALE") for c in OPS[op].cases()]
    with Suite(device, library, ctx) as opened:
        alone = list(opened.run(cases))
    together = list(run_in_processes([c.line for c in cases], 2, device.index, "auto"))
    assert [(r.line, r.passed, r.nmse) for r in together] == [(r.line, r.passed, r.nmse) for r in alone]


def _die(lines: Sequence[str]) -> list[CaseResult]:
    os._exit(3)


@pytest.mark.vulkan
def test_a_process_that_dies_fails_its_cases(device: Device) -> None:
    lines = [c.line for c in OPS["ABS"].cases()]
    results = list(run_in_processes(lines, 2, device.index, "auto", work=_die))
    assert results[0].passed is False
    assert results[0].message == "the process that ran this case or one beside it died"


def _none(lines: Sequence[str]) -> list[CaseResult]:
    return []


@pytest.mark.vulkan
def test_who_starts_processes_tells_of_a_cache_that_cannot_be_written(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What processes log is seen by nobody, and this one may have nothing to write."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("VKBACK_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(paths, "warned_of_cache", [])
    assert list(run_in_processes(["ABS(ne_a=[64])"], 1, device.index, "auto", work=_none)) == []
    (said,) = caplog.messages
    assert said.startswith(f"nothing can be kept in the cache {tmp_path / 'file'}: ")
    monkeypatch.setenv("VKBACK_CACHE", str(tmp_path / "good"))
    monkeypatch.setattr(paths, "warned_of_cache", [])
    assert list(run_in_processes(["ABS(ne_a=[64])"], 1, device.index, "auto", work=_none)) == []
    assert len(caplog.messages) == 1 and not list((tmp_path / "good").glob("*probe*"))


EXACT = "MUL_MAT(type_a=q4_K,m=67,n=32,k=512,exact=1)"


@pytest.mark.vulkan
def test_rows_of_a_batch_have_the_bits_of_one_alone(
    device: Device, library: ShaderLibrary, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels of --exact; with others, whose sums are of another order, the case says which rows have not."""
    with Suite(device, library, ctx) as opened:
        (right,) = opened.run([find_case(EXACT)])
        monkeypatch.setattr("vkback.harness.cases.exact_context", lambda given: given)
        (wrong,) = opened.run([find_case(EXACT)])
    assert right.passed and "y rows as of one alone: the same bits" in right.detail
    assert wrong.passed is False and "other bits in rows 0, " in wrong.message


def test_rows_one_by_one() -> None:
    problem = find_case("MUL_MAT_ID(type_a=q4_K,n_mats=4,n_used=2,b=1,m=32,n=3,k=256,exact=1)").build()
    alone = one_by_one(problem)
    assert [t.shape for t in alone[2].node.inputs] == [(4, 32, 256), (1, 1, 256), (1, 2)]
    assert (alone[2].values["ids"] == problem.values["ids"][2:]).all() and alone[0].values["w"] is problem.values["w"]
    rows = np.arange(6.0).reshape(3, 2)
    assert same_bits({"y": rows}, [{"y": rows[i : i + 1]} for i in range(3)])["y rows as of one alone"].ok
    other = [{"y": rows[i : i + 1] + (1e-12 if i == 1 else 0.0)} for i in range(3)]
    assert "other bits in rows 1 (1 of 3)" in same_bits({"y": rows}, other)["y rows as of one alone"].text
    with pytest.raises(PlanError, match="expected inputs with a row for each of several tokens"):
        one_by_one(find_case("MUL_MAT(type_a=q4_K,m=67,n=1,k=512)").build())
    with pytest.raises(CaseLineError, match="exact=2: expected 1"):
        find_case("MUL_MAT(type_a=q4_K,m=67,n=2,k=512,exact=2)")
