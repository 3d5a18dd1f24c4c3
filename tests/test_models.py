"""Graphs of the architectures, op references, the numpy twin against llama.cpp, perplexity, synthetic files."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from make_gguf import llama_metadata, llama_tensors, write_gguf

from vkback import quants
from vkback.graph import Graph, Tensor
from vkback.models import GgufError, Model, synth
from vkback.models.perplexity import PerplexityError, perplexity
from vkback.models.synth import SynthError, planned_tensors, synthesize, synthetic_names, synthetic_size
from vkback.models.twin import NumpyTwin, TwinError
from vkback.ops.reference import REFERENCES, rope_angles
from vkback.ops.rope_angles import frequencies, mscale
from vkback.paths import builtin_model
from vkback.units import params_text, size_text

DATA = Path(__file__).parent / "data"
PEER = json.loads((DATA / "peer_cpu.json").read_text())


@pytest.fixture(scope="module")
def twins() -> dict[str, NumpyTwin]:
    return {name: NumpyTwin(builtin_model(name)) for name in PEER}


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
        ("RMS_NORM", "attn_rms-0"), ("MUL", "attn_norm-0"), ("MUL_MAT", "Qcur-0"), ("MUL_MAT", "Kcur-0"), ("MUL_MAT", "Vcur-0"),
        ("VIEW", "Kcur-0 (reshaped)"), ("ROPE", "Kcur_rope-0"), ("VIEW", "Vcur-0 (reshaped)"), ("SET_ROWS", "cache_k_l0"),
        ("SET_ROWS", "cache_v_l0"), ("VIEW", "Qcur-0 (reshaped)"), ("ROPE", "Qcur_rope-0"), ("FLASH_ATTN_EXT", "kqv_out-0"),
        ("MUL_MAT", "attn_out-0"), ("ADD", "ffn_inp-0"), ("RMS_NORM", "ffn_rms-0"), ("MUL", "ffn_norm-0"), ("MUL_MAT", "ffn_gate-0"),
        ("MUL_MAT", "ffn_up-0"), ("SWIGLU", "ffn_swiglu-0"), ("MUL_MAT", "ffn_out-0"), ("ADD", "l_out-0"),
    ]  # fmt: skip
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
        "attn_rms-2", "attn_norm-2", "Qcur-2", "Kcur-2", "Vcur-2", "Kcur_rms-2", "Kcur_normed-2", "Kcur_rope-2", "Qcur_rms-2",
        "Qcur_normed-2", "Qcur_rope-2", "kqv_out-2", "attn_out-2", "ffn_inp-2", "ffn_rms-2", "ffn_norm-2", "ffn_moe_logits-2",
        "ffn_moe_weights-2", "ffn_moe_gate-2", "ffn_moe_up-2", "ffn_moe_swiglu-2", "ffn_moe_down-2", "ffn_moe_out-2", "l_out-2",
    ]  # fmt: skip
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
        "Qcur_bias-1", "Kcur_bias-1", "Vcur_bias-1", "attn_out_bias-1", "ffn_gate_bias-1", "ffn_up_bias-1", "ffn_out_bias-1",
    ]  # fmt: skip
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
    return REFERENCES[op]([np.asarray(x) for x in inputs], params)


ROPE = {
    "mode": "normal", "n_dims": 8, "freq_base": 100.0, "freq_scale": 1.0, "ext_factor": 0.0, "attn_factor": 1.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "n_ctx_orig": 4096,
}  # fmt: skip


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

    def turned(x: np.ndarray, pos: int, **changes: Any) -> np.ndarray:
        return ref("ROPE", x, np.array([pos]), **(ROPE | changes))[0]

    one = np.array([[[1.0, 0, 0, 0, 1.0, 0, 0, 0, 5.0, 6.0]]])
    # Position 2: pair 0 turns by 2 radians, pair 2 by 2 / 100^(4/8) = 0.2; values 8 and 9 are not rotated.
    np.testing.assert_allclose(turned(one, 2)[0, 0], [math.cos(2), math.sin(2), 0, 0, math.cos(0.2), math.sin(0.2), 0, 0, 5, 6])
    # neox: value 0 pairs with 4, so both ones belong to pair 0
    c, s = math.cos(2), math.sin(2)
    np.testing.assert_allclose(turned(one, 2, mode="neox")[0, 0], [c - s, 0, 0, 0, s + c, 0, 0, 0, 5, 6], atol=1e-15)
    for mode in ("normal", "neox"):
        near = (turned(q, 3, mode=mode) * turned(k, 1, mode=mode)).sum()
        far = (turned(q, 103, mode=mode) * turned(k, 101, mode=mode)).sum()
        np.testing.assert_allclose(near, far)
    factors = np.array([2.0, 2.0, 2.0, 2.0])
    np.testing.assert_allclose(ref("ROPE", q, [6], factors, **ROPE)[0], turned(q, 3))
    np.testing.assert_allclose(turned(q, 6, freq_scale=0.5), turned(q, 3))


@pytest.mark.parametrize("ext", [0.0, 0.7, 1.0])
def test_yarn_of_the_reference_equals_that_of_the_shaders(ext: float) -> None:
    """Two formulations written apart; and YaRN's ends: the fastest pair keeps its frequency, the slowest is stretched."""
    params = ROPE | {"n_dims": 128, "freq_base": 10000.0, "freq_scale": 0.25, "ext_factor": ext, "attn_factor": 1.1}
    angles, magnitude = rope_angles(np.array([1]), None, params)
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


# --- twin ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PEER)
def test_logits_are_those_of_llama_cpp(name: str, twins: dict[str, NumpyTwin]) -> None:
    """Its CPU rounds activations to 8 bits before every product, an error of up to 1 part in 254 of the largest of 32. Through the layers
    of these models that moved logits by 0.085 at most; their standard deviation is about 3."""
    for prompt in PEER[name]["prompts"]:
        logits = twins[name].forward(prompt["ids"], head="last")["result_output"][0]
        for token, theirs in prompt["top10"]:
            assert abs(logits[token] - theirs) < 0.12
        assert len(np.flatnonzero(logits > prompt["top10"][-1][1] + 0.12)) < 10


@pytest.mark.parametrize("name", PEER)
def test_greedy_text_is_that_of_llama_cpp_until_a_margin_is_narrow(name: str, twins: dict[str, NumpyTwin]) -> None:
    steps = 0
    for prompt in PEER[name]["prompts"]:
        narrow = next((i for i, m in enumerate(prompt["margin_to_second"]) if m < 0.1), 48)
        ids, margins = twins[name].generate_greedy(prompt["ids"], narrow)
        assert ids == prompt["greedy"][:narrow]
        assert len(margins) == narrow
        steps += narrow
    assert steps > 25, "margins so narrow that hardly a step was compared"


@pytest.mark.parametrize("name", PEER)
def test_every_step_along_the_text_of_llama_cpp_has_its_margin(name: str, twins: dict[str, NumpyTwin]) -> None:
    """240 steps with its own text fed, so that one narrow margin does not end the comparison."""
    differences = []
    for prompt in PEER[name]["prompts"]:
        twins[name].reset()
        logits = twins[name].forward(prompt["ids"] + prompt["greedy"][:-1])["result_output"][len(prompt["ids"]) - 1 :]
        for row, best, theirs in zip(logits, prompt["greedy"], prompt["margin_to_second"], strict=True):
            mine = row[best] - np.delete(row, best).max()
            assert mine > 0 or theirs < 0.1
            differences.append(mine - theirs)
    # Measured 0.045 (dense) and 0.033 (experts); a margin is the difference of two logits that each move by a few hundredths.
    assert np.std(differences) < 0.06


@pytest.mark.parametrize("name", PEER)
def test_perplexity_is_that_of_llama_cpp(name: str, twins: dict[str, NumpyTwin]) -> None:
    theirs = PEER[name]["perplexity"]
    twin = twins[name]
    ids = twin.model.tokenizer.encode((DATA / "war_of_the_worlds.txt").read_text())[:4096]
    sofar: list[float] = []
    got = perplexity(ids, twin.logits, bos=twin.model.tokenizer.bos, on_chunk=sofar.append)
    assert got.tokens == theirs["tokens_scored"]
    # Measured 0.02 % and 0.03 %; rounding of activations moves single losses both ways.
    assert got.value == pytest.approx(theirs["ppl"], rel=0.005)
    assert sofar[-1] == got.value and len(sofar) == 8


def test_tokens_at_once_equal_tokens_one_by_one(twins: dict[str, NumpyTwin]) -> None:
    for name, twin in twins.items():
        tokens = PEER[name]["prompts"][0]["ids"]
        twin.reset()
        together = twin.forward(tokens)["result_output"]
        twin.reset()
        twin.forward(tokens[:4], head="none")
        apart = [twin.forward([t], 4 + i)["result_output"][0] for i, t in enumerate(tokens[4:])]
        # Both in float64; a value of the cache may round to F16 either way when its sums were ordered otherwise.
        np.testing.assert_allclose(together[4:], apart, atol=2e-3)
        twin.reset()
        np.testing.assert_allclose(twin.forward(tokens, head="last")["result_output"][0], together[-1], atol=2e-3)


def test_padding_changes_nothing(twins: dict[str, NumpyTwin]) -> None:
    twin = twins["demo-moe-MXFP4_MOE.gguf"]
    tokens = PEER["demo-moe-MXFP4_MOE.gguf"]["prompts"][2]["ids"]
    twin.reset()
    alone = twin.forward(tokens)["result_output"]
    twin.reset()
    padded = {"tokens": np.array([*tokens, 7, 7], np.int32), "pos": np.array([0, 1, 2, 3, -1, -1], np.int32)}
    graph = twin.model.graph(6, twin.n_ctx, head="all")
    np.testing.assert_allclose(twin.run(graph, padded, ["result_output"])["result_output"][:4], alone, atol=2e-3)


def test_wanted_values_and_weights_decoded_anew(twins: dict[str, NumpyTwin]) -> None:
    name = "demo-dense-Q4_K_M.gguf"
    twin = twins[name]
    twin.reset()
    values = twin.forward([0, 5], wanted=["inp_embd", "ffn_out-0", "cache_k_l0"])
    assert {k: v.shape for k, v in values.items()} == {
        "inp_embd": (2, 256), "ffn_out-0": (2, 256), "cache_k_l0": (2, 512, 64), "result_output": (2, 4096),
    }  # fmt: skip
    row = quants.decode("Q6_K", twin.model.file.tensors["token_embd.weight"].data[5])
    np.testing.assert_array_equal(values["inp_embd"][1], row)
    frugal = NumpyTwin(twin.model, keep_bytes=0).forward([0, 5])
    np.testing.assert_array_equal(frugal["result_output"], values["result_output"])


def test_twin_errors(twins: dict[str, NumpyTwin]) -> None:
    twin = twins["demo-dense-Q4_K_M.gguf"]
    with pytest.raises(TwinError, match="3 tokens at position 510 do not fit a context of 512"):
        twin.forward([1, 2, 3], 510)
    with pytest.raises(TwinError, match="0 tokens at position 0"):
        twin.forward([])
    with pytest.raises(TwinError, match="token id 4096 is outside the vocabulary of 4096"):
        twin.forward([1, 4096])
    with pytest.raises(TwinError, match="no value called ffn_out-99"):
        twin.forward([1], wanted=["ffn_out-99"])


def test_greedy_stops_at_a_stop_id(twins: dict[str, NumpyTwin]) -> None:
    prompt = PEER["demo-dense-Q4_K_M.gguf"]["prompts"][0]
    ids, _ = twins["demo-dense-Q4_K_M.gguf"].generate_greedy(prompt["ids"], 9, stop=[prompt["greedy"][2]])
    assert ids == prompt["greedy"][:3]


# --- perplexity ---------------------------------------------------------------------------------------------------------------------


def test_perplexity_of_known_distributions() -> None:
    seen: list[tuple[list[int], int]] = []

    def uniform(ids: Any, first: int) -> np.ndarray:
        seen.append((list(ids), first))
        return np.zeros((len(ids) - first, 50))

    got = perplexity(list(range(20)), uniform, bos=49, n_ctx=8)
    assert got.value == pytest.approx(50) and got.error == pytest.approx(0)
    assert got.tokens == 2 * 3, "of 8 positions those from 4 to 6 predict the next token; the rest of the text is left out"
    assert seen == [([49, *range(1, 8)], 4), ([49, *range(9, 16)], 4)]

    def half_sure(ids: Any, first: int) -> np.ndarray:
        # The right next token has probability 1/2: logit log(49) against 49 others with 0.
        logits = np.zeros((len(ids) - first, 50))
        for row, target in enumerate(ids[first + 1 :]):
            logits[row, target] = math.log(49)
        return logits

    assert perplexity(list(range(20)), half_sure, bos=None, n_ctx=8, n_chunks=1).value == pytest.approx(2)


def test_perplexity_of_a_short_text_is_refused() -> None:
    with pytest.raises(PerplexityError, match="the text has 3 tokens, one chunk takes 512"):
        perplexity([1, 2, 3], lambda ids, first: np.zeros((1, 1)), bos=0)


# --- synthetic files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "params"),
    [
        ("llama-1b-Q2_K", "546.50 MiB", "1.24 B"),
        ("llama-1b-Q3_K_S", "604.50 MiB", "1.24 B"),
        ("llama-3b-Q5_K_M", "2.16 GiB", "3.21 B"),
        ("llama-3b-Q8_0", "3.18 GiB", "3.21 B"),
        ("llama-8b-Q2_K", "2.95 GiB", "8.03 B"),
        ("llama-8b-Q3_K_S", "3.41 GiB", "8.03 B"),
        ("llama-8b-Q4_K_S", "4.36 GiB", "8.03 B"),
        ("llama-8b-Q4_K_M", "4.58 GiB", "8.03 B"),
        ("llama-8b-Q6_K", "6.14 GiB", "8.03 B"),
        ("llama2-7b-Q4_0", "3.56 GiB", "6.74 B"),
        ("mistral-small-24b-Q5_K_S", "15.18 GiB", "23.57 B"),
        ("mistral-22b-Q4_K_M", "12.42 GiB", "22.24 B"),
        ("qwen3moe-30b-a3b-Q2_K", "10.48 GiB", "30.53 B"),
        ("gpt-oss-20b-MXFP4", "11.27 GiB", "20.91 B"),
    ],
)
def test_sizes_are_what_llama_bench_prints_for_the_real_files(name: str, size: str, params: str) -> None:
    nbytes, elements = synthetic_size(name)
    assert (size_text(nbytes), params_text(elements)) == (size, params)


def test_every_name_has_a_type_for_every_tensor() -> None:
    names = synthetic_names()
    assert len(names) == len(set(names)) >= 7 * 8
    for name in names:
        tensors = planned_tensors(name)
        assert all(t.shape[-1] % quants.quant(t.type).block_values == 0 for t in tensors)
        assert len(tensors) == len({t.name for t in tensors})


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in shapes with all layers, but narrow."""
    for name in ("llama-8b", "qwen3moe-30b-a3b", "gpt-oss-20b"):
        narrow = dataclasses.replace(
            synth.SHAPES[name], n_embd=256, n_ff=512, n_head=4, n_head_kv=2, head_dim=64, n_ff_expert=256, n_expert_used=2
        )
        experts = 4 if narrow.n_expert else 0
        monkeypatch.setitem(synth.SHAPES, name, dataclasses.replace(narrow, n_expert=experts, n_vocab=40960, n_ctx=64))


@pytest.mark.usefixtures("small_shapes")
@pytest.mark.parametrize(
    ("name", "description"),
    [("llama-8b-Q4_K_S", "llama 8B Q4_K - Small"), ("qwen3moe-30b-a3b-Q2_K", "qwen3moe 30B.A3B Q2_K - Medium"),
     ("gpt-oss-20b-MXFP4", "gpt-oss 20B MXFP4 MoE")],
)
def test_a_synthetic_file_opens_as_the_model_it_stands_for(tmp_path: Path, name: str, description: str) -> None:
    written: list[int] = []
    synthesize(name, tmp_path / "deep" / "m.gguf", on_bytes=written.append)
    model = Model.open(tmp_path / "deep" / "m.gguf")
    assert model.description == description
    assert (model.file.size_bytes, model.file.n_params) == synthetic_size(name)
    assert sum(written) == model.file.size_bytes
    assert {t.name: (t.type, t.shape) for t in model.file.tensors.values()} == {t.name: (t.type, t.shape) for t in planned_tensors(name)}


@pytest.mark.usefixtures("small_shapes")
@pytest.mark.parametrize("name", ["llama-8b-Q3_K_M", "qwen3moe-30b-a3b-Q5_K_M", "gpt-oss-20b-MXFP4"])
def test_synthetic_logits_are_finite_and_of_ordinary_size(tmp_path: Path, name: str) -> None:
    synthesize(name, tmp_path / "m.gguf", layers=4)
    logits = NumpyTwin(tmp_path / "m.gguf").forward([1, 2, 3])["result_output"]
    assert np.isfinite(logits).all() and 0.3 < logits.std() < 3


@pytest.mark.usefixtures("small_shapes")
def test_the_seed_alone_decides_the_bytes(tmp_path: Path) -> None:
    for out, seed, threads in (("a", 1, 1), ("b", 1, 5), ("c", 2, 5)):
        synthesize("llama-8b-Q4_K_M", tmp_path / out, layers=2, seed=seed, threads=threads)
    a, b, c = ((tmp_path / out).read_bytes() for out in "abc")
    assert a == b and len(a) == len(c) and a != c


def test_rope_divisors_of_llama3() -> None:
    """Published for 8B: 1 for the 29 fastest pairs, 8 from the 36th on, the smooth ramp between."""
    d = synth._rope_divisors(synth.SHAPES["llama-8b"])
    assert d.dtype == np.float32 and len(d) == 64
    assert (d[:29] == 1).all() and (d[35:] == 8).all() and (np.diff(d[28:36]) > 0).all()


@pytest.mark.usefixtures("small_shapes")
def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "m.gguf"

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SynthError, match=r"m\.gguf: cannot be written: the disk is full"):
        synthesize("llama-8b-Q4_K_S", out, layers=1)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    with pytest.raises(SynthError, match=r"llama-8b-Q4_K_S takes 4\.36 GiB, .* has 1\.00 GiB free"):
        synthesize("llama-8b-Q4_K_S", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_synth_names_and_layers_are_checked(tmp_path: Path) -> None:
    for name in ("llama-8b", "llama-9b-Q4_K_S", "llama-8b-Q9", ""):
        with pytest.raises(SynthError, match=r"no model is called .*; names are a shape \(llama-1b, .*\), a dash and a type"):
            planned_tensors(name)
    with pytest.raises(SynthError, match="llama-8b-Q4_K_S has 32 layers, 33 were asked for"):
        synthesize("llama-8b-Q4_K_S", tmp_path / "m.gguf", layers=33)


def test_hparams_hold_every_tensor_as_a_weight() -> None:
    model = Model.open(builtin_model("demo-dense"))
    weight = model.hp.weight("blk.0.ffn_down.weight", (256, 1024))
    assert isinstance(weight, Tensor) and weight.recipe is not None
    assert (weight.kind, weight.recipe.how, weight.recipe.sources) == ("weight", "plain", ("blk.0.ffn_down.weight",))
