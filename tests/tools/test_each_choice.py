"""Which tests `make test` leaves out (tests/each_choice.py)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from each_choice import class_of, cover, kernels_in, parts, values_of
from suite_cases import CASES, RUNS

from vkback.harness.cases import find_case

WGS, KERNELS, TEXTS = (8, 16, 32), ("f32", "int_dot", "coop_mat"), (("a", 1), ("b", 1), ("a", 2))


def item(*marks: str, **params: Any) -> Any:
    """What is read of a collected test."""
    return SimpleNamespace(callspec=SimpleNamespace(params=params), iter_markers=lambda _: map(pytest.mark.parametrize, marks, marks))


def test_each_value_is_held_by_few_rows() -> None:
    rows = [frozenset({("a", a), ("b", b), ("c", c)}) for a, b, c in product(range(4), range(3), range(2))]
    chosen = cover(rows)
    assert frozenset.union(*(rows[i] for i in chosen)) == frozenset.union(*rows)
    assert len(chosen) == 4
    assert chosen == cover(rows)
    assert cover([]) == cover([frozenset()]) == set()


def test_a_case_has_the_values_of_its_line() -> None:
    found = set(parts(find_case("MUL_MAT(type_a=q4_K,type_b=f32,m=16,n=5,k=256,seed=7)")))
    assert {("MUL_MAT", "m", "of 4"), ("MUL_MAT", "k", "of 32"), ("MUL_MAT", "n", "other")} <= found
    assert ("MUL_MAT", "type_a", "'q4_K'") in found
    assert class_of((5, 7, 1, 64, -2, 0, True)) == ("other", "1", "of 32", "below 0", "0", "True")
    assert not any("seed" in str(part) for part in found)
    assert set(kernels_in(("tiny-llama", ("f32", 3)))) == {"f32"}


def test_every_op_stays_and_every_type_on_each_path() -> None:
    chosen = [CASES[i] for i in cover([frozenset(parts(case)) for case in CASES])]
    assert {case.op for case in chosen} == {case.op for case in CASES} and len(chosen) < len(CASES)
    runs = RUNS
    rows = [frozenset(values_of(item("case, act", case=case, act=act))) for case, act in runs]

    def paths(some: Iterable[int]) -> set[tuple[object, ...]]:
        return {(runs[i][0].params["type_a"], runs[i][0].params["n"] == 1, runs[i][1]) for i in some}

    assert paths(cover(rows)) == paths(range(len(runs)))
    assert {(runs[i][0].op, runs[i][0].params["type_a"]) for i in cover(rows)} == {(case.op, case.params["type_a"]) for case, _ in runs}


def test_rows_stay_whole_and_matrices_stand_in_for_nothing() -> None:
    names = ("wg", "way", "text", "size")
    crossed = [(wg, kernel, *row) for wg, kernel, row in product(WGS, KERNELS, TEXTS)]
    chosen = cover([frozenset(values_of(item("wg", "way", "text, size", **dict(zip(names, one, strict=True))))) for one in crossed])
    assert len(chosen) == 6 and {crossed[i][1] for i in chosen} == set(KERNELS)
    for matrices in (True, False):
        own = [crossed[i] for i in chosen if (crossed[i][1] == "coop_mat") == matrices]
        assert {one[0] for one in own} == set(WGS) and {one[2:] for one in own} == set(TEXTS)
    table = [*TEXTS, ("b", 2)]
    assert len(cover([frozenset(values_of(item("text, size", text=text, size=size))) for text, size in table])) == 4
