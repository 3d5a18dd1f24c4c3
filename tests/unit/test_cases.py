"""The sets of cases, and the lines that name them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from vkback import quants
from vkback.harness.cases import GGML_LINES, find_case, full_cases, known_cases, make_case, perf_cases, quick_cases
from vkback.harness.perf import groups, with_tokens
from vkback.ops.case import Case
from vkback.ops.case_line import CaseLineError, parse_line, split_lines
from vkback.ops.ggml_words import type_word
from vkback.ops.lowering import PlanError
from vkback.ops.matmul.linear_cases import ROUTES, mul_mat_case, mul_mat_id_case
from vkback.ops.matmul.linear_node import INT_QUANTS, QUANTS
from vkback.ops.op import OPS

FULL = list(full_cases())
PERF = list(perf_cases())


def test_the_full_set_is_large_and_names_each_case_once() -> None:
    lines = [case.line for case in FULL]
    assert len(set(lines)) == len(lines) >= 6000
    # Lines of FLASH_ATTN_EXT and ROPE as test-backend-ops has them are cases of these.
    assert {case.op for case in FULL} == set(OPS) - {"ATTENTION", "ROPE_EXT"}


def test_every_type_runs_with_one_to_sixteen_tokens_on_every_path() -> None:
    found = Counter((c.params["type_a"], c.params.get("act"), c.params["n"]) for c in FULL if c.op == "MUL_MAT")
    for quant in QUANTS:
        for act in ("f32", "q8_1") if quant in INT_QUANTS else ("f32",):
            assert all(found[type_word(quant), act, n] for n in range(1, 17)), (quant, act)


def test_batches_are_broadcast_permuted_and_views() -> None:
    cases = [c for c in FULL if c.op == "MUL_MAT"]
    rows_together, rows_apart = ((0, 2, 1, 3), (0, 1, 3, 2), (0, 3, 2, 1)), ((1, 0, 2, 3), (3, 2, 1, 0))
    for quant in QUANTS:
        own = [c.params for c in cases if c.params["type_a"] == type_word(quant)]
        assert {p["nr"] for p in own} >= {(1, 1), (1, 2), (2, 1), (2, 2)}, quant
        assert {p["per"] for p in own} >= {(0, 1, 2, 3), *rows_together}, quant
        assert any(p["k_v"] for p in own), quant
    held = [c.params for c in cases if c.params.get("plain")]
    assert {(p["type_a"], p["type_b"]) for p in held} == {(a, b) for a in ("f32", "f16") for b in ("f32", "f16")}
    assert {p["per"] for p in held} >= set(rows_apart)


def test_copies_go_between_all_types() -> None:
    found = {(c.op, c.params["type_src"], c.params["type_dst"]) for c in FULL if c.op in ("CPY", "SET_ROWS") and "type_src" in c.params}
    floats = [(a, b) for a in ("F32", "F16") for b in ("F32", "F16")]
    assert found >= {("CPY", *pair) for pair in (*floats, ("I32", "I32"), *((q, b) for q in QUANTS for b in ("F32", "F16")))}
    assert found >= {("SET_ROWS", *pair) for pair in floats if pair != ("F32", "F16")}  # which their lines leave out
    assert {c.params["type"] for c in FULL if c.op == "GET_ROWS"} == {*map(type_word, QUANTS), "i32"}


def test_experts_are_chosen_in_every_way() -> None:
    cases = [c for c in FULL if c.op == "MUL_MAT_ID"]
    assert {c.params.get("ids", "shuffled") for c in cases} == set(ROUTES)
    assert {c.params["n_mats"] for c in cases} >= {4, 8, 128, 512}
    assert {c.params["n_used"] for c in cases} >= {1, 2, 4, 8}
    values = mul_mat_id_case("Q4_K", 8, 2, 4, 3, 256, shared=True, ids="last").build().values["ids"]
    np.testing.assert_array_equal(values, [[6, 7]] * 3)
    assert len(set(map(tuple, mul_mat_id_case("Q4_K", 8, 2, 4, 3, 256, shared=True, ids="one").build().values["ids"]))) == 1


def test_a_line_makes_its_case() -> None:
    for case in FULL + PERF:
        assert make_case(*parse_line(case.line)).line == case.line
    for case in quick_cases():
        assert find_case(case.line).line == case.line


@pytest.mark.parametrize("op", ["SAMPLE_DRAFTS", "SAMPLE_DRAFTS_COLUMNS"])
def test_cases_of_drafts_find_choices_that_rounding_cannot_change(op: str) -> None:
    # One that finds none cannot be built, and would end the full suite.
    built = [case.build().node.op for case in FULL if case.op == op]
    assert len(built) > 50 and set(built) == {op}


@pytest.mark.parametrize("case", FULL[:: len(FULL) // 60], ids=lambda c: c.line)
def test_a_line_makes_the_same_values(case: Case) -> None:
    first, second = case.build(), find_case(case.line).build()
    assert first.node == second.node
    for name, value in first.values.items():
        np.testing.assert_array_equal(value, second.values[name])


AS_THEY_LIE = "bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1,src_overlap=0,m_v=0,pad=0"


def test_another_seed_changes_the_values_alone() -> None:
    line = f"MUL_MAT(type_a=q4_K,type_b=f32,m=16,n=1,k=256,{AS_THEY_LIE},seed=7)"
    assert line in known_cases()
    other = find_case(line.replace("seed=7", "seed=8"))
    assert other.line == line.replace("seed=7", "seed=8")
    assert other.build().node == find_case(line).build().node
    assert (other.build().values["x"] != find_case(line).build().values["x"]).any()


def test_a_line_of_no_set_makes_a_case() -> None:
    line = find_case("MUL_MAT(type_a=Q6_K,m=4097,n=1,k=512)").line
    assert line == f"MUL_MAT(type_a=q6_K,type_b=f32,m=4097,n=1,k=512,{AS_THEY_LIE},seed=7)"


MUL_MAT_EXAMPLE = f"MUL_MAT(type_a=f32,type_b=f32,m=16,n=1,k=256,{AS_THEY_LIE},seed=7)"
MUL_MAT_KNOWS = (
    "type_a, m, n, k, type_b, bs, nr, per, k_v, o, src_overlap, m_v, pad, plain, act, amax, seed; a whole case is " + MUL_MAT_EXAMPLE
)
SILU_EXAMPLE = "a whole case is SILU(type=f32,ne_a=[4096,1,1,1],v=0,seed=4)"
ROLES = "norm+norm_bias+post_norm+post_residual+bias+multiplier+residual+ids+logits+expert_weights+selection_bias"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("MUL_MAT", "MUL_MAT: not a case; a case is written OP(key=value,...), as a run prints it"),
        ("MUL_MAT(=1)", "MUL_MAT(=1): '=1' is not key=value"),
        ("MUL_MAT(m=1,m=2)", "MUL_MAT(m=1,m=2): m stands there twice"),
        ("SILU(ne_a)", f"SILU: ne_a: expected a value, as [1,2]; {SILU_EXAMPLE}"),
        ("MUL_MAT(type_a=Q4_K,m=1,n=1)", f"MUL_MAT: parameter k is missing; known are {MUL_MAT_KNOWS}"),
        ("MUL_MAT(type_a=Q4_K,m=1,n=1,k=256,q=1)", f"MUL_MAT: no parameter is called q; known are {MUL_MAT_KNOWS}"),
        ("MUL_MAT(type_a=Q4_K,m=a,n=1,k=256)", f"MUL_MAT: m=a: expected a whole number; a whole case is {MUL_MAT_EXAMPLE}"),
        ("SILU(ne_a=5)", f"SILU: ne_a=5: expected a list of numbers, as [1,2]; {SILU_EXAMPLE}"),
        ("LINEAR(type_a=Q4_K,m=1,n=1,k=256,fused=relu)", f"fused=relu: no input is called relu; expected some of {ROLES}, or none"),
        ("MUL_MAT_ID(type_a=Q4_K,n_mats=4,n_used=1,m=1,n=1,k=256,ids=all)", "ids=all: expected one of shuffled, one, last, repeat"),
        ("FLASH_ATTN_EXT(n_head=1,n_head_kv=1,hd=64,kv=2,nb=3,y=F32)", "nb=3: more tokens than the 2 rows of the cache"),
    ],
)
def test_a_line_that_makes_no_case_says_why(line: str, message: str) -> None:
    with pytest.raises(CaseLineError) as e:
        find_case(line)
    assert str(e.value) == message


def test_unknown_op_names_the_known() -> None:
    with pytest.raises(CaseLineError, match=r"^XYZ: no such op; of \d+ the nearest are "):
        find_case("XYZ(m=1)")


def test_commas_inside_a_case_do_not_split() -> None:
    assert split_lines("ADD, SILU(ne=[1,4096],seed=4),MUL") == ["ADD", "SILU(ne=[1,4096],seed=4)", "MUL"]


def test_perf_cases_that_share_weights_stand_together() -> None:
    assert len({c.line for c in PERF}) == len(PERF)
    made = list(groups(PERF))
    assert sum(map(len, made)) == len(PERF)
    first = made[0]
    assert [c.params["n"] for c in first] == [16, 8, 7, 6, 5, 4, 3, 2, 1]
    node = mul_mat_case("Q4_K", 8, 4, 256, type_b="q8_1").build().node
    assert [t.shape for t in (*with_tokens(node, 2).inputs, *with_tokens(node, 2).outputs)] == [(8, 256), (2, 256), (2, 8)]


def test_the_full_set_has_lines_of_ggml() -> None:
    """Of every op of it that there is, each as printed there."""
    listed = GGML_LINES.read_text(encoding="utf-8").splitlines()
    assert len(listed) == 503 and len({line.partition("(")[0] for line in listed}) > 90
    made = {line: find_case(line).line for line in listed if line.partition("(")[0] in OPS}
    assert len(made) > 490 and set(made.values()) <= {case.line for case in FULL}
    assert all(ours.startswith(line[:-1]) for line, ours in made.items())


def test_a_case_has_its_node_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """As explain and tune take it: a weight of 2 GB is not made up for them."""
    lines = [
        "MUL_MAT(type_a=Q4_K,m=96,n=3,k=512,type_b=q8_1,seed=7)",
        "MUL_MAT_ID(type_a=Q8_0,n_mats=6,n_used=3,m=96,n=2,k=256,b=0)",
        "LINEAR(type_a=Q4_K,m=96,n=1,k=256,fused=norm+logits,glu=1,out=q8_1)",
        "LINEAR(type_a=Q4_K,m=96,n=2,k=256,fused=norm+post_norm+post_residual)",
    ]
    assert find_case("MUL_MAT(type_a=Q4_K,m=8,k=256)") == find_case("MUL_MAT(type_a=Q4_K,m=8,n=1,k=256)"), "one token where it does not say"
    built = [find_case(line).build().node for line in lines]
    monkeypatch.setattr(quants, "random_blocks", None)
    assert [find_case(line).node() for line in lines] == built
    with pytest.raises(PlanError, match="give rows of whole blocks"):
        find_case("LINEAR(type_a=Q4_K,m=96,n=1,k=100)").node()


@pytest.mark.parametrize("line", ["LINEAR(type_a=Q4_K,m=0,n=1,k=256)", "LINEAR(type_a=Q4_K,m=8,n=1,k=256,fused=ids,n_mats=2,n_used=3)"])
def test_a_product_without_values_is_no_case(line: str) -> None:
    with pytest.raises(CaseLineError, match="expected sizes from 1, n_used up to n_mats"):
        find_case(line)
