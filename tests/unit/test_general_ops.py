"""Lines of test-backend-ops that ops for any operand run: what they make, and what they refuse. No device needed."""

import numpy as np
import pytest
from kernel_paths import planned_for

from vkback.harness.cases import make_case
from vkback.harness.runner import reference
from vkback.ops.attention.general import slopes
from vkback.ops.case_line import CaseLineError, parse_line
from vkback.ops.copies import encode
from vkback.ops.ggml_only.rope import sector_of
from vkback.ops.ggml_words import type_word
from vkback.ops.lowering import PlanError
from vkback.ops.op import OPS
from vkback.quants.registry import WEIGHT_TYPES

ATTENTION = "FLASH_ATTN_EXT(hsk=64,hsv=64,nh=2,nr23=[3,2],kv=33,nb=5,mask=1,sinks=0,max_bias=0.000000,type_K=f16,permute={})"


def test_permuted_and_plain_caches_give_the_same_attention() -> None:
    made = []
    for permute in ("[0,1,2,3]", "[0,2,1,3]"):
        problem = make_case(*parse_line(ATTENTION.format(permute))).build()
        q, k, v = problem.node.inputs[:3]
        views = problem.node.params["views"]
        rng = np.random.default_rng(3)
        for i, t in enumerate((q, k, v)):
            kind = np.float16 if t.type == "F16" else np.float32
            problem.values[t.name] = np.full(t.shape, np.nan, kind)
            views[i].of(problem.values[t.name])[...] = rng.uniform(-1, 1, views[i].shape)
        made.append(reference(problem)["y"])
    assert np.isfinite(made[0]).all()
    np.testing.assert_array_equal(made[0], made[1])


def test_alibi_slopes_beyond_a_power_of_two_lie_between_the_others() -> None:
    got = slopes(6, 8.0)
    np.testing.assert_allclose(got, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])


def test_sections_of_positions() -> None:
    mrope = {"mode": "mrope", "sections": (2, 1, 1, 0)}
    assert [sector_of(i, mrope) for i in range(6)] == [(0, 0), (0, 1), (1, 2), (2, 3), (0, 4), (0, 5)]
    vision = {"mode": "vision", "sections": (2, 2, 0, 0)}
    assert [sector_of(i, vision) for i in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]
    imrope = {"mode": "imrope", "sections": (2, 2, 1, 0)}
    assert [sector_of(i, imrope)[0] for i in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("FLASH_ATTN_EXT(hsk=64,hsv=64,nh=4,nr23=[1,1],kv=64,nb=1,mask=0,max_bias=8.0)", "ALiBi needs mask=1"),
        ("FLASH_ATTN_EXT(hsk=64,hsv=64,nh=4,nr23=[1,1],kv=64,nb=1,permute=[1,0,2,3])", "the first at its place"),
        ("ROPE(type=f32,ne_a=[128,4,2,1],n_dims=129,mode=0)", "expected even n_dims"),
        ("ROPE(type=f32,ne_a=[128,4,2,1],n_dims=128,mode=1)", "expected one of 0"),
        ("CPY(type_src=f32,type_dst=q4_K,ne_src=[96,2,3,4])", "no multiple of the q4_K block"),
        ("CPY(type_src=f32,type_dst=f32,ne_src=[6,2,3,4],permute_src=[0,0,2,3])", "in some order"),
        ("SET_ROWS(type_src=f32,type_dst=f16,type_idx=i64,ne=[256,5,1,3],nr23=[1,1],r=7,v=0)", "at most the target's 5 rows"),
        ("SET_ROWS(type_src=f32,type_dst=f16,type_idx=f32,ne=[256,5,1,3])", "expected i32 or i64"),
        ("TRI(type=f32,ne=[10,10,4,3],tri_type=4)", "expected 0 to 3"),
        ("GATED_DELTA_NET(type=f32,head_count=4,head_size=16,n_seq_tokens=1,n_seqs=1,v_repeat=0)", "expected both from 1"),
        ("RWKV_WKV6(type=f32,head_count=4,head_size=0,n_seq_tokens=1,n_seqs=1)", "expected all sizes from 1"),
        ("DSV4_HC_COMB(n_tokens=1,n_iter=0,eps=0.000001)", "expected numbers from 1"),
        ("MUL_MAT_HADAMARD(type_a=f32,type_b=f32,m=96,n=1,k=96)", "a power of two"),
    ],
)
def test_what_makes_no_sense_is_refused(line: str, says: str) -> None:
    with pytest.raises(CaseLineError, match=says):
        make_case(*parse_line(line))


@pytest.mark.parametrize("kind", [type_word(name) for name in WEIGHT_TYPES])
def test_rows_of_every_type_are_stored(kind: str) -> None:
    node = make_case(*parse_line(f"SET_ROWS(type_src=f32,type_dst={kind},type_idx=i64,ne=[256,5,1,1],nr23=[1,1],r=2,v=0)")).build().node
    assert OPS["SET_ROWS"].lower(node, planned_for("nvidia_h200_linux"))


def test_a_type_that_is_not_encoded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "ENCODED", ("Q4_0", "Q8_0"))
    node = make_case(*parse_line("SET_ROWS(type_src=f32,type_dst=iq2_xs,type_idx=i64,ne=[256,5,1,1],nr23=[1,1],r=2,v=0)")).build().node
    with pytest.raises(PlanError, match="IQ2_XS is read, never written; types that are encoded are Q4_0, Q8_0"):
        OPS["SET_ROWS"].lower(node, planned_for("nvidia_h200_linux"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("GATED_DELTA_NET(type=f32,head_count=4,head_size=16,n_seq_tokens=2,n_seqs=1,K=3)", "states are kept of tokens that there are"),
        ("SSM_SCAN(type=f32,d_state=16,head_dim=8,n_head=4,n_seq_tokens=2,n_seqs=1,K=3)", "states are kept of tokens that there are"),
        ("MUL_MAT_HADAMARD(type_a=f32,type_b=f32,m=64,n=1,k=64,k_v=128)", "k_v: here the matrix is no operand"),
        ("MUL_MAT_W4A8(type_a=q8_0,type_b=f32,m=32,n=1,k=256)", "type_a=q8_0 is not supported"),
    ],
)
def test_what_is_not_done_here_is_not_supported(line: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        make_case(*parse_line(line)).build()


def test_a_hadamard_transform_undoes_itself() -> None:
    x = np.random.default_rng(3).uniform(-1, 1, (3, 32))
    op = OPS["MUL_MAT_HADAMARD"]
    matrix = op.reference([np.eye(32)], {})[0] * np.sqrt(32)
    assert [row.count(-1) for row in np.rint(matrix).astype(int).tolist()] == [0] + [16] * 31
    assert matrix[3, 5] == pytest.approx(-1) and matrix[3, 6] == pytest.approx(-1) and matrix[3, 7] == pytest.approx(1)
    np.testing.assert_allclose(op.reference(op.reference([x], {}), {})[0], x, atol=1e-14)


def test_the_mixing_matrix_of_streams_is_doubly_stochastic() -> None:
    problem = make_case(*parse_line("DSV4_HC_COMB(n_tokens=5,n_iter=20,eps=0.000001)")).build()
    matrix = reference(problem)["y"]
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(matrix.sum(axis=2), 1.0, atol=1e-3)


def test_the_delta_rule_replaces_what_a_key_finds() -> None:
    """Without decay, with beta 1 and keys of length 1, the state answers a key with the value that was stored last."""
    rng = np.random.default_rng(5)
    problem = make_case(*parse_line("GATED_DELTA_NET(type=f32,head_count=2,head_size=8,n_seq_tokens=3,n_seqs=1)")).build()
    values = {**problem.values, "w": np.zeros_like(problem.values["w"]), "beta": np.ones_like(problem.values["beta"])}
    values |= {"r": problem.values["k"], "v": rng.uniform(-1, 1, problem.values["v"].shape)}
    y, _ = OPS["GATED_DELTA_NET"].reference([values[t.name] for t in problem.node.inputs], problem.node.params)
    np.testing.assert_allclose(y, values["v"] * problem.node.params["scale"], atol=1e-6)
