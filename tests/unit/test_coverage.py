"""The table of what the suite covers."""

from __future__ import annotations

import json

import pytest
from cli_kit import call

from vkback.cli import main
from vkback.harness.cases import find_case, full_cases
from vkback.harness.coverage import cells, coverage
from vkback.ops.matmul.linear_node import QUANTS


def test_cases_are_counted_by_op_type_tokens_and_conditions() -> None:
    line = "MUL_MAT(type_a=q4_K,m=96,n={n},k=512)"
    cases = [find_case(line.format(n=n)) for n in (1, 2, 16, 17)]
    cases += [cases[1].where(exact=True), cases[1].where(lanes=16), find_case("SILU(type=f32,ne_a=[4,1,1,1],v=0)")]
    found = coverage(cases)
    assert found.to_dict("records")[0] == {
        **{"op": "MUL_MAT", "type": "Q4_K", "cases": 6, "one": 1, "few": 4, "many": 1},
        **{"exact": 1, "sync": 0, "tuning": 1, "range": 0},
    }
    assert cells(found).iloc[1].tolist() == ["SILU", "F32", "1", "", "", "", "", "", "", ""]


def test_products_are_judged_with_every_type_for_one_few_and_many_tokens() -> None:
    found = coverage(case for case in full_cases() if case.op in ("MUL_MAT", "MUL_MAT_ID"))
    for op in ("MUL_MAT", "MUL_MAT_ID"):
        own = found[found["op"] == op].set_index("type")
        assert {name.upper() for name in QUANTS} <= set(own.index)
        lacking = own[(own[["one", "few", "many", "exact"]] == 0).any(axis=1)]
        assert not len(lacking.index.intersection([name.upper() for name in QUANTS])), lacking


def test_the_command_lists_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "test-ops", "-o", "ROPE", "--coverage") == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| ROPE | ")
    assert call(monkeypatch, main.main, "test-ops", "-o", "SILU", "--coverage", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["op"] == "SILU"
