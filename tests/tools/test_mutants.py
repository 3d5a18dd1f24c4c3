"""The mutation test: its faults can be planted in the present sources, two of them are caught, and nothing in the working tree changes."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import run_program

from tools import mutants

FAULTS = mutants.load()


@pytest.mark.parametrize("mutant", FAULTS, ids=lambda m: m.name)
def test_it_can_be_planted(mutant: mutants.Mutant) -> None:
    assert mutant.planted() != (mutants.ROOT / mutant.file).read_text(encoding="utf-8")


def test_there_are_faults_of_every_part() -> None:
    folders = {m.file.rpartition("/")[0] for m in FAULTS}
    assert len(FAULTS) >= 24
    shaders = {f"shaders/{name}" for name in ("quant", "common", "gemv", "gemm", "attention")}
    assert folders >= {*shaders, "vkback/plan", "vkback/ops"}


ELSEWHERE = {
    "gemm/coop_mat",
    "gemm/coop_reg",
    "gemm/pack_f16",
    "gemm/route_heads",
    "gemm/split_sum",
    "attention/prompt/prompt_matrix",
    "attention/prompt/prompt_latent",
    "attention/train/train_matrix",
    "attention/train/train_pack",
    "gemm/element_map",
    "gemm/fragment_map",
    "probe/dot_rate",
    "probe/matrix_rate",
    "probe/read",
    "load/repack",
}
"""Kernels that no case of the suite on a CPU driver of today runs: those of cooperative matrices, which it does not have, and of plans with
them; probes, which measure and compute nothing that is judged; and the load's, whose bytes tests compare with the host's."""


def test_there_is_a_fault_of_every_kernel() -> None:
    shaders = mutants.ROOT / "shaders"
    kernels = {path.relative_to(shaders).with_suffix("").as_posix() for path in shaders.rglob("*.comp")}
    faulty = {m.file.removeprefix("shaders/").removesuffix(".comp") for m in FAULTS if m.file.endswith(".comp")}
    assert kernels - faulty == ELSEWHERE, "a new kernel needs a fault in tests/mutants.toml that a case catches"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"old": "no such text"}, "holds 'no such text' 0 times, expected once"),
        ({"old": ";", "new": ""}, r"holds ';' \d+ times, expected once"),
        ({"new": FAULTS[0].old}, "`old` with one line changed"),
        ({"new": "two\nlines"}, "`old` with one line changed"),
        ({"file": "shaders/none.comp"}, "cannot read shaders/none.comp"),
    ],
)
def test_what_cannot_be_planted_says_why(change: dict[str, Any], says: str) -> None:
    with pytest.raises(mutants.MutantError, match=says):
        dataclasses.replace(FAULTS[0], **change).planted()


def test_a_table_must_be_complete(tmp_path: Path) -> None:
    table = tmp_path / "mutants.toml"
    entry = "[[mutant]]\nname = 'a'\nfile = 'b'\nold = 'c'\nnew = 'd'\n"
    table.write_text(entry)
    with pytest.raises(mutants.MutantError, match="a mutant has name, file, old, new and models"):
        mutants.load(table)
    table.write_text(2 * (entry + "models = 'e'\n"))
    with pytest.raises(mutants.MutantError, match="two mutants are called a"):
        mutants.load(table)


@pytest.mark.vulkan
def test_two_are_caught_and_what_is_no_fault_survives(tmp_path: Path) -> None:
    by_name = {m.name: m for m in FAULTS}
    farm = mutants.Farm(tmp_path, 1)
    shader, planner = by_name["set_rows-head"], by_name["view-offset"]
    before = {m.file: (mutants.ROOT / m.file).read_bytes() for m in (shader, planner)}
    assert farm.fate(shader).by.partition("(")[0].endswith("SET_ROWS")
    assert farm.fate(planner).by.startswith(("CPY(", "CONT("))
    harmless = mutants.Mutant("harmless", "shaders/soft_max/soft_max.comp", "MASKED = -1e30;", "MASKED = -1.0e30;", "")
    fate = farm.fate(harmless)
    assert not fate.by and fate.error == "none of 0 cases failed"
    assert {name: (mutants.ROOT / name).read_bytes() for name in before} == before
    assert all((farm.copies[0] / name).read_bytes() == text for name, text in before.items())


@pytest.mark.vulkan
def test_a_planted_fault_is_said_by_what_wrong_cases_have_in_common(tmp_path: Path) -> None:
    """`vkback test-ops` on sources with a wrong decoder of Q3_K, among right cases of the other types."""
    copy = mutants.copy_sources(tmp_path / "copy")
    of = "type_b=f32,m={m},n=1,k=256,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,src_overlap=0,m_v=0,pad=0,seed=7)"
    lines = [f"MUL_MAT(type_a={quant},{of.format(m=m)}" for quant in ("q3_K", "q4_K", "q8_0") for m in (32, 64)]
    fault = next(m for m in FAULTS if m.name == "q3_k-scale-offset")
    with mutants.planted(fault, copy):
        env = {**os.environ, "PYTHONPATH": str(copy), "VKBACK_TUNING": os.devnull, "VKBACK_CACHE": str(copy / "cache"), "COLUMNS": "160"}
        ran = run_program([sys.executable, "-m", "vkback.cli.main", "test-ops", *lines], env=env, cwd=copy)
    assert ran.returncode == 1, ran.stderr
    assert "In common: all 2 wrong have type_a = Q3_K, as 0 of 4 right" in ran.stdout, ran.stdout


@pytest.mark.exhaustive
@pytest.mark.vulkan
def test_doctor_says_what_the_faulty_nodes_of_a_model_have_in_common(tmp_path: Path) -> None:
    """`vkback doctor -m` on sources with a wrong decoder of Q6_K, which six nodes of the built-in model read, and a line that fails alone.
    A minute and a half: a model's kernels under fourteen settings."""
    copy = mutants.copy_sources(tmp_path / "copy")
    with mutants.planted(next(m for m in FAULTS if m.name == "q6_k-lost-bit"), copy):
        env = {**os.environ, "PYTHONPATH": str(copy), "VKBACK_TUNING": os.devnull, "COLUMNS": "160"}
        ran = run_program([sys.executable, "-m", "vkback.cli.main", "doctor", "-m", "demo-dense"], env=env, cwd=copy)
    assert ran.returncode == 1, ran.stderr
    assert "in common: all 6 wrong have type_a = Q6_K, as 0 of 51 right" in ran.stdout, ran.stdout
    assert "alone: vkback test-ops 'LINEAR(type_a=Q6_K," in ran.stdout and "no setting cures it" in ran.stdout
