"""Graphs of the architectures, and op references."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_gguf import llama_metadata, llama_tensors, write_gguf

from vkback import quants
from vkback.evaluate.twin import NumpyTwin
from vkback.graph import Graph
from vkback.models import GgufError, Model
from vkback.ops.op import OPS
from vkback.ops.rope.angles import frequencies, mscale
from vkback.ops.rope.rope import reference_angles
from vkback.paths import builtin_model


def tiny(tmp_path: Path, *, metadata: dict[str, Any] | None = None, extra: dict[str, Any] | None = None, **tensors: Any) -> Model:
    """A llama of 2 layers in F32; `metadata` changes keys, `tensors` go to llama_tensors, `extra` are more tensors."""
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
    return Model.open(write_gguf(path, "llama", llama_metadata(**(metadata or {})), llama_tensors(**tensors) | (extra or {})))


# --- graphs -------------------------------------------------------------------------------------------------------------------------


def check_order(graph: Graph) -> None:
    """Every node follows its sources, and no two nodes have one name (caches apart)."""
    made: set[str] = set()
    for node in graph.nodes:
        for t in node.inputs:
            assert t.kind != "node" or t.name in made, f"{node.name} reads {t.name} before it is made"
        for t in node.outputs:
            assert t.kind == "state" or t.name not in made
            made.add(t.name)
    assert all(t.name in made for t in graph.outputs)


def test_llama_layer_in_ggml_names() -> None:
    graph = Model.open(builtin_model("demo-dense")).graph(3, 40, head="all")
    check_order(graph)
    layer = [(n.op, n.name) for n in graph.nodes if n.name.partition("-")[2].split(" ")[0] == "0" or n.name.endswith("_l0")]
    assert layer == [
        ("RMS_NORM", "attn_rms-0"),
        ("MUL", "attn_norm-0"),
        ("MUL_MAT", "Qcur-0"),
        ("MUL_MAT", "Kcur-0"),
        ("MUL_MAT", "Vcur-0"),
        ("VIEW", "Kcur-0 (reshaped)"),
        ("ROPE", "Kcur_rope-0"),
        ("VIEW", "Vcur-0 (reshaped)"),
        ("SET_ROWS", "cache_k_l0"),
        ("SET_ROWS", "cache_v_l0"),
        ("VIEW", "Qcur-0 (reshaped)"),
        ("ROPE", "Qcur_rope-0"),
        ("FLASH_ATTN_EXT", "kqv_out-0"),
        ("MUL_MAT", "attn_out-0"),
        ("ADD", "ffn_inp-0"),
        ("RMS_NORM", "ffn_rms-0"),
        ("MUL", "ffn_norm-0"),
        ("MUL_MAT", "ffn_gate-0"),
        ("MUL_MAT", "ffn_up-0"),
        ("SWIGLU", "ffn_swiglu-0"),
        ("MUL_MAT", "ffn_out-0"),
        ("ADD", "l_out-0"),
    ]
    tensors = graph.tensors()
    assert str(tensors["cache_k_l0"]) == "cache_k_l0 F16[2, 40, 64]"
    assert tensors["cache_k_l0"].kind == "state"
    assert str(tensors["Qcur_rope-0"]) == "Qcur_rope-0 F32[3, 4, 64]"
    assert str(tensors["kqv_out-0"]) == "kqv_out-0 F32[3, 256]"
    assert (tensors["tokens"].shape, tensors["pos"].kind) == ((3,), "input")
    assert str(graph.outputs[0]) == "result_output F32[3, 4096]"
    last = graph.nodes[-1]
    assert (last.op, last.inputs[0].name, last.inputs[0].type) == ("MUL_MAT", "token_embd.weight", "Q6_K")


def test_qwen3moe_layer_in_ggml_names() -> None:
    graph = Model.open(builtin_model("demo-moe")).graph(1, 40, head="all")
    check_order(graph)
    names = [n.name for n in graph.nodes if n.name.endswith("-2")]
    assert names == [
        "attn_rms-2",
        "attn_norm-2",
        "Qcur-2",
        "Kcur-2",
        "Vcur-2",
        "Kcur_rms-2",
        "Kcur_normed-2",
        "Kcur_rope-2",
        "Qcur_rms-2",
        "Qcur_normed-2",
        "Qcur_rope-2",
        "kqv_out-2",
        "attn_out-2",
        "ffn_inp-2",
        "ffn_rms-2",
        "ffn_norm-2",
        "ffn_moe_logits-2",
        "ffn_moe_weights-2",
        "ffn_moe_gate-2",
        "ffn_moe_up-2",
        "ffn_moe_swiglu-2",
        "ffn_moe_down-2",
        "ffn_moe_out-2",
        "l_out-2",
    ]
    by_name = {n.name: n for n in graph.nodes}
    router = by_name["ffn_moe_weights-2"]
    assert (router.op, [str(t) for t in router.outputs]) == ("TOPK_MOE", ["ffn_moe_weights-2 F32[1, 4]", "ffn_moe_topk-2 I32[1, 4]"])
    assert dict(router.params) == {"n_used": 4, "norm": True, "gating": "softmax", "scale": 1.0}
    assert [t.shape for t in by_name["ffn_moe_gate-2"].inputs] == [(16, 256, 256), (1, 1, 256), (1, 4)]
    assert [t.shape for t in by_name["ffn_moe_down-2"].inputs] == [(16, 256, 256), (1, 4, 256), (1, 4)]
    assert by_name["Qcur_rope-2"].params["mode"] == "neox"
    assert by_name["Qcur_normed-2"].inputs[1].name == "blk.2.attn_q_norm.weight"


def test_heads_of_a_graph() -> None:
    model = Model.open(builtin_model("demo-dense"))
    last, none, one = model.graph(5, 40, head="last"), model.graph(5, 40, head="none"), model.graph(1, 40, head="last")
    for graph in (last, none, one):
        check_order(graph)
    assert last.outputs[0].shape == (1, 4096)
    assert [(n.op, n.inputs[1].name) for n in last.nodes if n.name == "ffn_inp_last-5"] == [("GET_ROWS", "out_ids")]
    assert "out_ids" not in one.tensors()
    # Only the cache is wanted: of the last layer its keys and values, of the output nothing.
    assert none.outputs == () and none.nodes[-1].name == "cache_v_l5"
    assert not {"result_output", "Qcur-5", "kqv_out-5"} & none.tensors().keys()
    assert {"kqv_out-4", "l_out-4"} <= none.tensors().keys()


def test_optional_tensors_of_llama(tmp_path: Path) -> None:
    plain = tiny(tmp_path).graph(2, 8, head="all")
    assert not any(n.op == "ADD" and "bias" in n.name for n in plain.nodes)
    biased = tiny(tmp_path, biases=True).graph(2, 8, head="all")
    check_order(biased)
    assert [n.name for n in biased.nodes if "bias" in n.name and n.name.endswith("-1")] == [
        "Qcur_bias-1",
        "Kcur_bias-1",
        "Vcur_bias-1",
        "attn_out_bias-1",
        "ffn_gate_bias-1",
        "ffn_up_bias-1",
        "ffn_out_bias-1",
    ]
    untied = tiny(tmp_path, tied=False).graph(2, 8, head="all")
    assert untied.nodes[-1].inputs[0].name == "output.weight"
    factors = tiny(tmp_path, extra={"rope_freqs.weight": ("F32", np.ones(8, np.float32))}).graph(2, 8, head="all")
    assert all(n.inputs[2].name == "rope_freqs.weight" for n in factors.nodes if n.op == "ROPE")
    assert all(len(n.inputs) == 2 for n in plain.nodes if n.op == "ROPE")


def test_a_biased_model_adds_its_biases(tmp_path: Path) -> None:
    model = tiny(tmp_path, biases=True)
    values = NumpyTwin(model).forward([3, 1], wanted=["Qcur-0", "Qcur_bias-0"])
    bias = quants.decode("F32", model.file.tensors["blk.0.attn_q.bias"].data)
    np.testing.assert_allclose(values["Qcur_bias-0"] - values["Qcur-0"], np.broadcast_to(bias, (2, 64)), atol=1e-12)


def test_mixtral_style_experts_that_are_all_alike_equal_the_dense_layer(tmp_path: Path) -> None:
    """The weights of the used experts add up to 1, so equal experts must give what one of them gives alone."""
    dense = llama_tensors()
    moe = {name: t for name, t in dense.items() if not name.split(".")[-2].startswith(("ffn_gate", "ffn_up", "ffn_down"))}
    for il in range(2):
        moe[f"blk.{il}.ffn_gate_inp.weight"] = ("F32", np.random.default_rng(il).standard_normal((4, 64)).astype(np.float32))
        for stem in ("ffn_gate", "ffn_up", "ffn_down"):
            moe[f"blk.{il}.{stem}_exps.weight"] = ("F32", np.stack([dense[f"blk.{il}.{stem}.weight"][1]] * 4))
    a = Model.open(write_gguf(tmp_path / "dense.gguf", "llama", llama_metadata(), dense))
    b = Model.open(write_gguf(tmp_path / "moe.gguf", "llama", llama_metadata(expert_count=4, expert_used_count=2), moe))
    assert Counter(n.op for n in b.graph(1, 8, head="all").nodes)["MUL_MAT_ID"] == 6
    tokens = [5, 9, 2]
    # float64 throughout, but for the F16 caches: their rounding may fall either way.
    np.testing.assert_allclose(NumpyTwin(b).forward(tokens)["result_output"], NumpyTwin(a).forward(tokens)["result_output"], atol=1e-3)


def test_qwen3moe_without_experts_is_refused(tmp_path: Path) -> None:
    metadata = {key.replace("llama.", "qwen3moe."): value for key, value in llama_metadata().items()}
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", metadata, llama_tensors())
    with pytest.raises(GgufError, match=r"qwen3moe\.expert_count is 0 or missing"):
        Model.open(path)


# --- references ---------------------------------------------------------------------------------------------------------------------


def ref(op: str, *inputs: Any, **params: Any) -> list[np.ndarray]:
    return OPS[op].reference([np.asarray(x) for x in inputs], params)


ROPE = {
    "mode": "normal",
    "n_dims": 8,
    "freq_base": 100.0,
    "freq_scale": 1.0,
    "ext_factor": 0.0,
    "attn_factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "n_ctx_orig": 4096,
}


def test_simple_references_by_hand() -> None:
    assert ref("GET_ROWS", [[1.0, 2.0], [3.0, 4.0]], [1, 0, 1])[0].tolist() == [[3, 4], [1, 2], [3, 4]]
    # mean of squares 12.5, so x / 3.5355
    np.testing.assert_allclose(ref("RMS_NORM", [[3.0, 4.0]], eps=0.0)[0], [[3 / math.sqrt(12.5), 4 / math.sqrt(12.5)]])
    np.testing.assert_allclose(ref("RMS_NORM", [[0.0, 0.0]], eps=1e-5)[0], [[0.0, 0.0]])
    assert ref("MUL", [[1.0, 2.0], [3.0, 4.0]], [10.0, 100.0])[0].tolist() == [[10, 200], [30, 400]]
    assert ref("ADD", [[1.0, 2.0]], [10.0, 100.0])[0].tolist() == [[11, 102]]
    assert ref("MUL_MAT", [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [[1.0, 10.0]])[0].tolist() == [[21, 43, 65]]
    # silu(0) = 0, silu(1) = 1/(1 + 1/e); far out silu is 0 or the value itself, without overflow
    np.testing.assert_allclose(
        ref("SWIGLU", [0.0, 1.0, -1e4, 1e4], [2.0, 2.0, 2.0, 2.0])[0], [0, 2 / (1 + math.exp(-1)), 0, 2e4], atol=1e-12
    )
    assert ref("MOE_REDUCE", [[[1.0, 2.0], [10.0, 20.0]]], [[0.25, 0.5]])[0].tolist() == [[5.25, 10.5]]
    assert ref("ARGMAX", [[1.0, 7.0, 7.0], [3.0, 3.0, 2.0]])[0].tolist() == [1, 0]


def test_topk_moe_orders_ties_by_id_and_clamps_the_sum() -> None:
    logits = np.log([[1.0, 4.0, 2.0, 4.0]])
    weights, ids = ref("TOPK_MOE", logits, n_used=3, norm=False, gating="softmax", scale=1.0)
    assert ids.tolist() == [[1, 3, 2]] and ids.dtype == np.int32
    np.testing.assert_allclose(weights, [[4 / 11, 4 / 11, 2 / 11]])
    weights, _ = ref("TOPK_MOE", logits, n_used=3, norm=True, gating="softmax", scale=2.0)
    np.testing.assert_allclose(weights, [[0.8, 0.8, 0.4]])
    # 2^20 equal experts of which one is used: its probability 2^-20 is below the clamp 2^-14, so the weight is 2^-6
    weights, _ = ref("TOPK_MOE", np.zeros((1, 1 << 20)), n_used=1, norm=True, gating="softmax", scale=1.0)
    np.testing.assert_allclose(weights, [[2.0**-6]])


def test_mul_mat_id_with_own_and_shared_inputs() -> None:
    rng = np.random.default_rng(1)
    w, ids = rng.standard_normal((4, 5, 3)), np.array([[2, 0], [3, 3]], np.int32)
    for x in (rng.standard_normal((2, 1, 3)), rng.standard_normal((2, 2, 3))):
        got = ref("MUL_MAT_ID", w, x, ids)[0]
        for n in range(2):
            for j in range(2):
                np.testing.assert_allclose(got[n, j], w[ids[n, j]] @ x[n, j % x.shape[1]])


def test_rope_turns_pairs_and_depends_on_distance_alone() -> None:
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((1, 1, 10)), rng.standard_normal((1, 1, 10))

    def rotated(x: np.ndarray, pos: int, **changes: Any) -> np.ndarray:
        return ref("ROPE", x, np.array([pos]), **(ROPE | changes))[0]

    one = np.array([[[1.0, 0, 0, 0, 1.0, 0, 0, 0, 5.0, 6.0]]])
    # Position 2: pair 0 turns by 2 radians, pair 2 by 2 / 100^(4/8) = 0.2; values 8 and 9 are not rotated.
    np.testing.assert_allclose(rotated(one, 2)[0, 0], [math.cos(2), math.sin(2), 0, 0, math.cos(0.2), math.sin(0.2), 0, 0, 5, 6])
    # neox: value 0 pairs with 4, so both ones belong to pair 0
    c, s = math.cos(2), math.sin(2)
    np.testing.assert_allclose(rotated(one, 2, mode="neox")[0, 0], [c - s, 0, 0, 0, s + c, 0, 0, 0, 5, 6], atol=1e-15)
    for mode in ("normal", "neox"):
        near = (rotated(q, 3, mode=mode) * rotated(k, 1, mode=mode)).sum()
        far = (rotated(q, 103, mode=mode) * rotated(k, 101, mode=mode)).sum()
        np.testing.assert_allclose(near, far)
    factors = np.array([2.0, 2.0, 2.0, 2.0])
    np.testing.assert_allclose(ref("ROPE", q, [6], factors, **ROPE)[0], rotated(q, 3))
    np.testing.assert_allclose(rotated(q, 6, freq_scale=0.5), rotated(q, 3))


@pytest.mark.parametrize("ext", [0.0, 0.7, 1.0])
def test_yarn_of_the_reference_equals_that_of_the_shaders(ext: float) -> None:
    """Two formulations written apart; and YaRN's ends: the fastest pair keeps its frequency, the slowest is scaled."""
    params = ROPE | {"n_dims": 128, "freq_base": 10000.0, "freq_scale": 0.25, "ext_factor": ext, "attn_factor": 1.1}
    angles, magnitude = reference_angles(np.array([1]), None, params)
    np.testing.assert_allclose(angles[0], frequencies(params), rtol=1e-12)
    np.testing.assert_allclose(magnitude, mscale(params), rtol=1e-12)
    assert magnitude == pytest.approx(1.1 if ext == 0 else 1.1 * (1 + 0.1 * math.log(4)))
    assert angles[0, 0] == pytest.approx(0.25 + 0.75 * ext)
    assert angles[0, -1] == pytest.approx(0.25 * 10000.0 ** (-126 / 128))


def test_set_rows_and_attention_with_padding() -> None:
    rng = np.random.default_rng(3)
    cache_k, cache_v = np.full((2, 6, 4), 9.0, np.float16), np.full((2, 6, 4), 9.0, np.float16)
    pos = np.array([0, 1, -1], np.int32)
    k, v = rng.standard_normal((3, 2, 4)), rng.standard_normal((3, 2, 4))
    new_k, new_v = ref("SET_ROWS", k, pos, cache_k)[0], ref("SET_ROWS", v, pos, cache_v)[0]
    assert (cache_k == 9).all(), "the old cache is left alone"
    assert new_k.dtype == np.float16 and (new_k[:, 2:] == 9).all()
    assert np.array_equal(new_k[1, 1], k[1, 1].astype(np.float16))
    q = rng.standard_normal((3, 4, 4))
    out = ref("FLASH_ATTN_EXT", q, new_k, new_v, pos, scale=0.5)[0].reshape(3, 4, 4)
    assert (out[2] == 0).all()
    for head in range(4):
        kv = head // 2
        # The first token sees only itself; the second weighs two rows.
        np.testing.assert_allclose(out[0, head], new_v[kv, 0].astype(np.float64))
        p = np.exp(0.5 * new_k[kv, :2].astype(np.float64) @ q[1, head])
        np.testing.assert_allclose(out[1, head], p / p.sum() @ new_v[kv, :2].astype(np.float64))
