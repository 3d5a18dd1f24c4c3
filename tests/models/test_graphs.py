"""What the layers of each architecture are: names, parameters and inputs of nodes, tensors that are cut, what fusion and plans make of
them. tests/models/test_architectures.py has what all have in common."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from kernel_paths import planned_for
from make_gguf import dense_metadata, gpt_oss_metadata, gpt_oss_tensors, llama_tensors, write_gguf
from tiny_models import changed

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.sampler import add_sampler
from vkback.graph import Graph, Node
from vkback.models import GgufError, GgufFile, Model
from vkback.ops.op import OPS
from vkback.plan.passes.fuse import fuse
from vkback.plan.planner import plan

H200 = "nvidia_h200_linux"
Tiny = Callable[[str], Path]


def named(graph: Graph) -> dict[str, Node]:
    return {n.name: n for n in graph.nodes}


def nodes_of(path: Path, n: int = 1, n_ctx: int = 32) -> dict[str, Node]:
    """Nodes by name of a graph of `n` tokens."""
    return named(Model.open(path).graph(n, n_ctx, head="last"))


def of_layer(nodes: dict[str, Node], il: int) -> str:
    return " ".join(name.removesuffix(f"-{il}") for name in nodes if name.endswith(f"-{il}"))


def windows(path: Path, layers: int) -> list[int]:
    nodes = nodes_of(path)
    return [nodes[f"kqv_out-{il}"].params.get("window") or 0 for il in range(layers)]


# --- llama, qwen2, qwen3, smollm3, phi3 ---------------------------------------------------------------------------------------------


def test_qwen2_has_biases_on_q_k_and_v(tiny: Tiny) -> None:
    nodes = nodes_of(tiny("tiny-qwen2"))
    assert [name for name in nodes if "bias" in name and name.endswith("-1")] == ["Qcur_bias-1", "Kcur_bias-1", "Vcur_bias-1"]
    assert nodes["Kcur_rope-2"].params["mode"] == "neox"


def test_qwen3_norms_heads_before_rope(tiny: Tiny) -> None:
    nodes = nodes_of(tiny("tiny-qwen3"))
    assert nodes["Qcur_rope-0"].inputs[0].name == "Qcur_normed-0" and nodes["Kcur_normed-1"].inputs[1].name == "blk.1.attn_k_norm.weight"
    assert nodes["Qcur_rope-0"].params["mode"] == "neox" and nodes["Qcur_rope-0"].outputs[0].shape == (1, 4, 40)
    fused = fuse(Model.open(tiny("tiny-qwen3")).graph(1, 64, head="last"), planned_for(H200))
    made = {node.outputs[0].name: node.outputs[0].type for node in fused}
    assert (made["kqv_out-0"], made["kqv_out-0.q8_1"]) == ("F32", "Q8_1"), "a head of 40 is no whole number of units of 32"


def test_every_fourth_layer_of_smollm3_has_no_rope(tiny: Tiny) -> None:
    nodes = nodes_of(tiny("tiny-smollm3"), 2)
    assert [f"Qcur_rope-{il}" in nodes for il in range(5)] == [True, True, True, False, True]
    assert nodes["Qcur_rope-0"].params["mode"] == "normal"
    assert nodes["kqv_out-3"].inputs[0].name == "Qcur-3 (reshaped)"


@pytest.mark.parametrize("n", [1, 7])
def test_heads_without_rope_are_stored_by_the_same_kernels(n: int, tiny: Tiny) -> None:
    nodes = fuse(Model.open(tiny("tiny-smollm3")).graph(n, 64, head="last"), planned_for(H200))
    ops = Counter(node.op for node in nodes)
    assert not {"SET_ROWS", "ROPE"} & ops.keys()
    if n == 1:
        assert (ops["ATTN_DECODE"], ops["ROPE_ANGLES"]) == (5, 1)
        (plain,) = (node for node in nodes if node.op == "ATTN_DECODE" and node.params["n_dims"] == 0)
        assert [t.name for t in plain.inputs] == ["Qcur-3.heads.qkv", "pos", "cache_k_l3", "cache_v_l3"]
    else:
        assert (ops["QKV_ROPE_SET_ROWS"], ops["FLASH_ATTN_EXT"]) == (5, 5)
        (plain,) = (node for node in nodes if node.op == "QKV_ROPE_SET_ROWS" and node.params["n_dims"] == 0)
        assert next(a for a in nodes if a.name == "kqv_out-3").inputs[0].name == plain.outputs[0].name == "Qcur-3.heads"
        assert OPS["QKV_ROPE_SET_ROWS"].unfused(plain) == []


def test_phi3_s_tensors_are_cut_by_rows(tiny: Tiny) -> None:
    model = Model.open(tiny("tiny-phi3"))
    raw = GgufFile.open(model.file.path)
    assert model.file.n_params == raw.n_params and model.file.size_bytes == raw.size_bytes
    q, k, v = (model.file.tensor(f"blk.1.attn_{x}.weight") for x in "qkv")
    assert np.array_equal(np.concatenate([q.data, k.data, v.data]), raw.tensor("blk.1.attn_qkv.weight").data)
    gate, up = (model.file.tensor(f"blk.2.ffn_{x}.weight") for x in ("gate", "up"))
    assert np.array_equal(np.concatenate([gate.data, up.data]), raw.tensor("blk.2.ffn_up.weight").data)
    assert (k.shape, k.name, k.row0) == ((32, 96), "blk.1.attn_qkv.weight", 96)


def test_phi3_files_with_tensors_apart_open_too(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "phi3", dense_metadata("phi3"), llama_tensors())
    names = [n.name for n in nodes_of(path, n_ctx=8).values() if n.op == "MUL_MAT" and n.name.endswith("-0")]
    assert names == ["Qcur-0", "Kcur-0", "Vcur-0", "attn_out-0", "ffn_gate-0", "ffn_up-0", "ffn_out-0"]


def test_long_rope_s_factors_follow_the_context(tiny: Tiny) -> None:
    path = tiny("tiny-phi3")
    factors = [nodes_of(path, n_ctx=n_ctx)["Qcur_rope-0"].inputs[2].name for n_ctx in (32, 256, 257)]
    assert factors == ["rope_factors_short.weight"] * 2 + ["rope_factors_long.weight"]
    nodes = nodes_of(path)
    assert nodes["kqv_out-0"].params["window"] == 9 and nodes["Qcur_rope-0"].params["n_dims"] == 24
    assert nodes["Qcur_rope-0"].params["attn_factor"] == pytest.approx(1.0606602)


@pytest.mark.vulkan
def test_a_resized_context_takes_the_other_factors(tiny: Tiny, device: Device) -> None:
    tokens = [3, 14, 159, 265, 35]
    with Engine.load(tiny("tiny-phi3"), device, n_ctx=32, act="f32", progress=False) as engine:
        short = engine.prompt_logits(tokens)
        engine.resize(300)
        resized = engine.prompt_logits(tokens)
    with Engine.load(tiny("tiny-phi3"), device, n_ctx=300, act="f32", progress=False) as engine:
        long = engine.prompt_logits(tokens)
    np.testing.assert_array_equal(resized, long)
    assert np.abs(long[1:] - short[1:]).max() > 1e-3


# --- gpt2 ---------------------------------------------------------------------------------------------------------------------------


def test_gpt2(tiny: Tiny) -> None:
    graph = Model.open(tiny("tiny-gpt2")).graph(2, 32, head="all")
    nodes = named(graph)
    assert [t.name for t in nodes["pos_embd"].inputs] == ["position_embd.weight", "pos"]
    assert [t.name for t in nodes["inpL"].inputs] == ["inp_embd", "pos_embd"]
    assert [n.op for n in graph.nodes if n.name in ("attn_centered-0", "attn_norm_weighted-0", "attn_norm-0")] == ["NORM", "MUL", "ADD"]
    assert nodes["Kcur-1"].inputs[0].shape == (96, 96) and nodes["Kcur_bias-1"].inputs[1].name == "blk.1.attn_k.bias"
    assert not any(n.op == "ROPE" for n in graph.nodes)
    assert nodes["ffn_gelu-2"].op == "GELU" and nodes["ffn_gelu-2"].inputs[0].name == "ffn_up_bias-2"
    assert nodes["result_output"].inputs[0].name == "token_embd.weight"


def test_gpt2_s_fused_tensor_is_cut_by_rows(tiny: Tiny) -> None:
    model = Model.open(tiny("tiny-gpt2"))
    whole = next(t for t in GGUFReader(model.file.path).tensors if t.name == "blk.0.attn_qkv.weight").data.tobytes()
    parts = [bytes(model.file.tensor(f"blk.0.attn_{part}.weight").data.tobytes()) for part in "qkv"]
    assert b"".join(parts) == whole and len({len(p) for p in parts}) == 1


@pytest.mark.vulkan
def test_a_context_beyond_gpt2_s_learned_positions_is_refused(tiny: Tiny, device: Device) -> None:
    with pytest.raises(GgufError, match=r"129 tokens, but gpt2 has learned the positions of 128; ask for at most that many \(--ctx 128\)"):
        Engine.load(tiny("tiny-gpt2"), device, n_ctx=129, progress=False)


# --- gemma3 -------------------------------------------------------------------------------------------------------------------------


def test_gemma3(tiny: Tiny) -> None:
    graph = Model.open(tiny("tiny-gemma3")).graph(3, 32, head="last")
    nodes = named(graph)
    assert nodes["inp_scaled"].params["scale"] == math.sqrt(96)
    assert windows(tiny("tiny-gemma3"), 7) == [9, 9, 9, 9, 9, 0, 9]
    ropes = [nodes[f"Qcur_rope-{il}"].params for il in (4, 5, 6)]
    assert [(p["freq_base"], p["freq_scale"]) for p in ropes] == [(10000.0, 1.0), (1000000.0, 0.125), (10000.0, 1.0)]
    assert {n.params["scale"] for n in graph.nodes if n.op == "FLASH_ATTN_EXT"} == {0.25}
    assert [t.name for t in nodes["sa_out-0"].inputs] == ["attn_post_norm-0", "inp_scaled"]
    assert [t.name for t in nodes["l_out-6"].inputs] == ["ffn_post_norm-6", "sa_out-6"] and nodes["sa_out-6"].outputs[0].shape == (1, 96)
    assert nodes["ffn_geglu-1"].op == "GEGLU"
    assert nodes["result_output"].inputs[0].name == "token_embd.weight"


def test_gemma3_s_keys_say_otherwise(tiny: Tiny) -> None:
    def other(**keys: Any) -> Path:
        return changed(tiny("tiny-gemma3"), metadata={key.replace("__", "."): value for key, value in keys.items()})

    path = other(attention__sliding_window_pattern=2, rope__freq_base_swa=5000.0)
    assert windows(path, 4) == [9, 0, 9, 0]
    assert nodes_of(path)["Qcur_rope-0"].params["freq_base"] == 5000.0
    assert windows(other(attention__sliding_window_pattern=[True, False, False, True, True, True, True]), 7) == [9, 0, 0, 9, 9, 9, 9]
    assert Model.open(other(attention__scale=None)).hp.attn_scale == 1 / math.sqrt(40)


@pytest.mark.parametrize("name", ["gemma3-1b-Q4_K_M", "gemma3-4b-Q4_K_M"])
def test_each_sum_of_gemma3_is_stored_once_by_the_product_behind_it(name: str, models: Callable[[str], Model]) -> None:
    model = models(name)
    graph = model.graph(1, 4096, head="last")
    add_sampler(graph, greedy=True)
    s = plan(graph, planned_for(H200))
    layers = model.hp.n_layer
    written = [a.tensor.name for d in s.dispatches() for a in d.args if "w" in a.access]
    stored = Counter(name for name in written if name.startswith(("sa_out", "l_out")))
    assert stored == {name: 1 for il in range(layers - 1) for name in (f"sa_out-{il}", f"l_out-{il}")} | {f"sa_out-{layers - 1}": 1}
    # A reader of a sum spins on it, too.
    waits = {d.label: d.waits for stage in s.stages for d in stage}
    assert waits["ffn_geglu-3"] is not None and waits["ffn_geglu-3"].whole == ("attn_out-3", "l_out-2")


def test_a_prompt_of_gemma3_norms_and_adds_in_one_stage(models: Callable[[str], Model]) -> None:
    s = plan(models("gemma3-1b-Q4_K_M").graph(64, 4096, head="last"), planned_for(H200))
    ops = Counter(d.op for d in s.dispatches())
    assert ops["RMS_NORM_MUL_ADD"] == 2 * 26 and not {"ADD", "MUL", "GEGLU"} & ops.keys()


# --- deci ---------------------------------------------------------------------------------------------------------------------------


def test_layers_of_deci_have_what_the_file_says(tiny: Tiny) -> None:
    graph = Model.open(tiny("tiny-deci")).graph(3, 32, head="last")
    names = {n.name for n in graph.nodes}
    found = [" ".join(part for part in ("kqv", "attn", "ffn") if f"{part}_out-{il}" in names) for il in range(8)]
    assert found == ["kqv attn ffn", "ffn", "attn ffn", "kqv attn", "", "kqv attn ffn", "attn", "ffn"]
    assert {name: t.shape for name, t in graph.tensors().items() if name.startswith("cache_k")} == {
        "cache_k_l0": (2, 32, 24),
        "cache_k_l3": (4, 32, 24),
        "cache_k_l5": (1, 32, 24),
    }
    # The row of the last token is taken where the last layer begins, for that has no attention.
    assert [t.name for n in graph.nodes if n.name == "ffn_inp_last-7" for t in n.inputs] == ["ffn_inp-6", "out_ids"]


# --- gpt-oss ------------------------------------------------------------------------------------------------------------------------


def test_gpt_oss(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "gpt-oss", gpt_oss_metadata(), gpt_oss_tensors())
    nodes = named(Model.open(path).graph(1, 64, head="all"))
    assert of_layer(nodes, 1) == (
        "attn_rms attn_norm Qcur Qcur_bias Kcur Kcur_bias Vcur Vcur_bias Kcur_rope Qcur_rope kqv_out attn_out attn_out_bias ffn_inp "
        "ffn_rms attn_post_norm ffn_moe_logits ffn_moe_logits_bias ffn_moe_weights ffn_moe_gate ffn_moe_gate_biased ffn_moe_up "
        "ffn_moe_up_biased ffn_moe_swiglu_oai ffn_moe_down ffn_moe_down_biased ffn_moe_out l_out"
    )
    assert windows(path, 2) == [8, 0]
    assert nodes["kqv_out-1"].inputs[4].name == "blk.1.attn_sinks.weight"
    assert dict(nodes["ffn_moe_weights-1"].params) == {"n_used": 4, "norm": True, "gating": "softmax_weight", "scale": 1.0}
    assert dict(nodes["ffn_moe_swiglu_oai-1"].params) == {"alpha": 1.702, "limit": 7.0}
    rope = nodes["Qcur_rope-1"].params
    assert (rope["mode"], rope["ext_factor"], rope["freq_scale"], rope["n_ctx_orig"]) == ("neox", 1.0, 0.25, 16)


def test_a_token_of_gpt_oss_has_weights_as_the_file_has_them(models: Callable[[str], Model]) -> None:
    s = plan(models("gpt-oss-20b-MXFP4").graph(1, 4096, head="last"), planned_for(H200))
    by_label = {d.label: d for d in s.dispatches()}
    gate_up = by_label["ffn_moe_swiglu_oai-1"]
    assert gate_up.args[2].tensor.type == "F32", "rounded by a stage of its own"
    assert "blk.1.ffn_gate_exps.bias+blk.1.ffn_up_exps.bias" in {a.tensor.name for a in gate_up.args}
    assert {d.args[0].tensor.type for d in s.dispatches() if d.op == "LINEAR"} == {"Q8_0", "F32", "MXFP4"}
    # A window of 128 rows is not worth splitting among workgroups, the whole context is.
    assert [dict(by_label[f"kqv_out-{il}"].kernel.defines)["SPLITS"] == 1 for il in (0, 1)] == [True, False]


# --- deepseek2 ----------------------------------------------------------------------------------------------------------------------


def test_deepseek2(tiny: Tiny) -> None:
    graph = Model.open(tiny("tiny-deepseek2")).graph(1, 64, head="all")
    nodes = named(graph)
    assert {"ffn_out-0", "ffn_moe_topk-1"} <= nodes.keys() | {t.name for n in graph.nodes for t in n.outputs}
    assert "ffn_shexp-0" not in nodes and "ffn_shexp-1" in nodes, "the first layer is dense"
    attention = nodes["kqv_out-1"]
    assert attention.inputs[1].name == attention.inputs[2].name == "cache_k_l1" and attention.params["v_dim"] == 64
    assert nodes["Kcur-1"].outputs[0].shape == (1, 1, 96) and nodes["Qcur-1"].outputs[0].shape == (1, 3, 96)
    legacy = nodes_of(tiny("tiny-deepseek2-legacy"), n_ctx=64)
    assert [t.shape for t in legacy["kqv_out-1"].inputs[1:3]] == [(3, 64, 48), (3, 64, 32)]


def test_products_by_heads_of_a_prompt_are_grouped_gemms(models: Callable[[str], Model]) -> None:
    """One route serves all layers, operands have the layouts of their neighbours: one copy is left, of the slice of Q before k_b."""
    s = plan(models("deepseek2-16b-Q4_K_M").graph(512, 512, head="none"), planned_for(H200))
    by_heads = [d.kernel.source for d in s.dispatches() if d.label in ("q_nope_absorbed-0", "kqv_decompressed-0")]
    assert by_heads == ["gemm/coop_mat.comp"] * 2
    copies = {d.label for d in s.dispatches() if d.kernel.source == "copy/box.comp" and not d.label.endswith("-26")}
    # The last layer of a prompt only fills its cache.
    assert copies == {f"q_nope_absorbed-{il}.x_heads" for il in range(26)}
    assert [d.kernel.source for d in s.dispatches() if d.op == "ROUTE" and "heads" in d.label] == ["gemm/route_heads.comp"]


# --- granitehybrid ------------------------------------------------------------------------------------------------------------------


def test_granitehybrid(tiny: Tiny) -> None:
    graph = Model.open(tiny("tiny-granitehybrid")).graph(2, 32, head="all")
    nodes = named(graph)
    assert of_layer(nodes, 1) == (
        "attn_rms attn_norm zxBCdt xBC ssm_scan ssm_rms ssm_norm mamba_out ffn_inp ffn_rms ffn_norm ffn_gate ffn_up ffn_swiglu ffn_out "
        "l_out"
    )
    assert nodes["kqv_out-2"].params["scale"] == pytest.approx(0.15)
    assert not any(n.op == "ROPE" for n in graph.nodes), "rope.scaling.finetuned is false"
    assert nodes["inp_scaled"].params["scale"] == pytest.approx(12 / 0.22)
    assert nodes["attn_rms-1"].params["eps"] == pytest.approx(1e-5 / 0.22**2)
    assert nodes["ssm_rms-1"].params["eps"] == pytest.approx(1e-5)
    assert {t.name: t.shape for t in graph.tensors().values() if t.kind == "state"} == {
        **{f"cache_conv_l{il}": (4, 272) for il in (0, 1, 3)},
        **{f"cache_ssm_l{il}": (2, 12, 16, 20) for il in (0, 1, 3)},
        "cache_k_l2": (1, 32, 32),
        "cache_v_l2": (1, 32, 32),
    }


@pytest.mark.parametrize("name", ["granite-4-h-1b-Q4_K_S", "granite-4-h-tiny-Q4_K_S"])
def test_the_recurrence_of_granitehybrid_needs_no_barrier_before_or_after_it(name: str, models: Callable[[str], Model]) -> None:
    s = plan(models(name).graph(1, 4096, head="last"), planned_for(H200))
    assert {"ssm_scan-1", "ffn_inp-1"} <= {d.label for i in s.barrier_free for d in s.stages[i]}
    assert {d.kernel.source for d in s.dispatches() if d.label == "zxBCdt-1"} == {"gemv/gemv.comp"}
