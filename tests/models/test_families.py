"""What sets families apart that share their layers: scales, temperatures, where norms stand, blocks of a file that stay unread.
tests/models/test_references.py compares their logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for
from make_gguf import write_gguf
from tiny_models import changed

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.weight_rows import gather_rows
from vkback.evaluate.judge import nmse
from vkback.evaluate.node_walk import items_of
from vkback.evaluate.twin import NumpyTwin
from vkback.gguf.file import GgufFile, GgufTensor
from vkback.gguf.hparams import Metadata
from vkback.graph import Node
from vkback.models import Model
from vkback.models.architectures.gemma3n import STREAMS
from vkback.models.architectures.gemma4 import scales_so_far
from vkback.models.delta_net import recurrent_layers
from vkback.models.synth import SHAPES, outline, synthesize
from vkback.models.temperature import TEMPERATURE, TEMPERATURES
from vkback.ops.lowering import PlanError
from vkback.plan.passes.fuse import fuse
from vkback.plan.planner import plan
from vkback.plan.training import training_graph
from vkback.timing.modules import shares

Tiny = Callable[[str], Path]
TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 331, 20)]


def nodes_of(path: Path, n: int = 1, n_ctx: int = 32) -> dict[str, Node]:
    """Nodes by name of a graph of `n` tokens."""
    return {node.name: node for node in Model.open(path).graph(n, n_ctx, head="last").nodes}


def test_granite_s_scales_are_in_the_embedding_the_norms_and_the_last_weight(tiny: Tiny) -> None:
    model = Model.open(tiny("tiny-granite"))
    nodes = nodes_of(tiny("tiny-granite"))
    assert nodes["inp_scaled"].params["scale"] == pytest.approx(1.5 / 0.5)
    assert nodes["attn_rms-0"].params["eps"] == pytest.approx(1e-5 / 0.25)
    assert nodes["kqv_out-0"].params["scale"] == pytest.approx(0.2)
    recipe = model.hp.weights["output_norm.weight"].recipe
    assert recipe is not None and recipe.scale == pytest.approx(1 / 6)
    assert sum(n.op == "SCALE" for n in nodes.values()) == 1, "no other scale is a node"
    without = changed(tiny("tiny-granite"), metadata={"rope.scaling.finetuned": False})
    assert not any(n.op == "ROPE" for n in nodes_of(without).values())


def test_temperatures_of_mistral3_begin_behind_the_first_context(tiny: Tiny) -> None:
    path = tiny("tiny-mistral3")
    model = Model.open(path)
    assert TEMPERATURE not in nodes_of(path, n_ctx=10) and TEMPERATURE in nodes_of(path, n_ctx=11)
    table = model.file.tensors[TEMPERATURES].data.view(np.float32)[:, 0]
    assert table[:10].tolist() == [1.0] * 10 and table[10] == pytest.approx(1 + 0.3 * np.log(2))
    rope = nodes_of(path)["Qcur_rope-0"].params
    assert rope["attn_factor"] * (1 + 0.1 * np.log(16)) == pytest.approx(1.0)
    own = changed(path, metadata={"attention.temperature_length": 20})
    assert TEMPERATURE not in nodes_of(own, n_ctx=20) and TEMPERATURE in nodes_of(own, n_ctx=21)


def test_sections_of_rope_are_ordinary_rope_for_text(tiny: Tiny) -> None:
    nodes = nodes_of(tiny("tiny-qwen3vl"))
    plain = nodes_of(changed(tiny("tiny-qwen3vl"), metadata={"rope.dimension_sections": None, "n_deepstack_layers": None}))
    assert {name: n.params for name, n in nodes.items()} == {name: n.params for name, n in plain.items()}


def test_layers_of_qwen35_are_delta_nets_but_one_of_an_interval_or_as_an_array_says(tiny: Tiny) -> None:
    def recurrent(**metadata: object) -> list[bool]:
        keys = {key.replace("__", "."): value for key, value in metadata.items()}
        f = GgufFile.open(changed(tiny("tiny-qwen35"), metadata={"block_count": 8} | keys))
        m = Metadata(f)
        return list(recurrent_layers(m, 7, 8))

    assert recurrent(full_attention_interval=None) == [True, True, True, False] * 1 + [True, True, True]
    assert recurrent(full_attention_interval=3) == [True, True, False, True, True, False, True]
    assert recurrent(attention__recurrent_layers=[False, True] * 4) == [False, True] * 3 + [False]


def test_delta_nets(tiny: Tiny) -> None:
    nodes = nodes_of(tiny("tiny-qwen35"), n=4)
    assert [nodes["delta_net-0"].params[key] for key in ("n_group", "tiled")] == [2, True]
    assert nodes_of(tiny("tiny-qwen3next"))["delta_net-0"].params["tiled"] is False
    assert nodes["delta_net_rms-0"].params["eps"] == pytest.approx(1e-3) and nodes["delta_net_rms-0"].inputs[0].shape == (4, 6, 16)
    assert nodes["final_output-0"].inputs[0].name == "z-0", "z is the gate, the norm is multiplied"
    assert nodes["attn_gated-1"].inputs[0].name == "gate-1" and nodes["Qcur_rope-1"].params["n_dims"] == 20


def test_the_blocks_of_qwen35moe_that_predict_further_tokens_stay_unread(tiny: Tiny) -> None:
    """Here the block with attention, whose attn_q stays whole, unless it has what drafts (vkback/models/mtp.py)."""
    model = Model.open(changed(tiny("tiny-qwen35moe"), metadata={"nextn_predict_layers": 1}))
    assert model.hp.n_layer == 1 and {name.split(".")[1] for name in model.architecture.unused_tensors} == {"1"}
    assert model.architecture.mtp_block is None and "blk.1.attn_q.weight" in model.file.tensors
    extra = {"blk.1.nextn.eh_proj.weight": model.file.tensors["blk.0.attn_qkv.weight"]}
    again = Model.of(replace(model.file, tensors={**model.file.tensors, **extra}))
    assert "blk.1.nextn.eh_proj.weight" in again.architecture.unused_tensors and again.architecture.mtp_block == 1
    assert [n.name for n in again.graph(1, 32, head="last").nodes if n.op == "FLASH_ATTN_EXT"] == []


def test_query_and_gate_take_turns_in_attn_q(tiny: Tiny) -> None:
    path = tiny("tiny-qwen35")
    rows = GgufFile.open(path).tensors["blk.1.attn_q.weight"].data.reshape(4, 2, 40, -1)
    model = Model.open(path)
    for place, name in enumerate(("attn_q", "attn_q_gate")):
        weight = model.hp.weights[f"blk.1.{name}.weight"]
        assert weight.shape == (160, 96)
        assert np.array_equal(gather_rows(model.file, weight, 0, 160), rows[:, place].reshape(160, -1))
        assert np.array_equal(gather_rows(model.file, weight, 35, 125), rows[:, place].reshape(160, -1)[35:125])


def test_weights_of_rows_that_take_turns_are_told_apart_in_comparisons_and_profiles(tiny: Tiny) -> None:
    """By their own names, not as the parts that the file has."""
    model = Model.open(tiny("tiny-qwen3next"))
    graph, ctx = model.graph(1, 32, head="last"), planned_for("nvidia_h200_linux")
    made = {item.name for item in items_of(fuse(graph, ctx), graph)}
    assert {"linear_attn_qkv_mixed-0", "z-0", "alpha-0", "beta-0", "Qcur-1", "Kcur-1", "Vcur-1", "gate-1"} <= made
    sizes = {name: t.nbytes for name, t in model.file.tensors.items()}
    found = [shares(d, sizes)[0] for d in plan(graph, ctx).dispatches()]
    assert all(sum(s.part for s in each) == pytest.approx(1.0) for each in found)
    matrices = {s.matrix for each in found for s in each}
    assert {"blk.0.ssm_beta.weight", "blk.1.attn_q_gate.weight"} < matrices and not any("#" in name for name in matrices)


def test_older_files_of_qwen3next_have_one_matrix_by_groups(tiny: Tiny, tmp_path: Path) -> None:
    """ssm_in: of each group q, k, the v of its heads and their z."""
    path = tiny("tiny-qwen3next")
    f = GgufFile.open(path)
    raw = {name: (t.type, np.ascontiguousarray(t.data).reshape(*t.shape[:-1], -1)) for name, t in f.tensors.items()}
    arrays: dict[str, tuple[str, Any]] = {n: (type, data.view(np.float32) if type == "F32" else data) for n, (type, data) in raw.items()}
    qkv, z = (arrays.pop(f"blk.0.{name}.weight")[1] for name in ("attn_qkv", "attn_gate"))
    parts = [part.reshape(2, -1, qkv.shape[1]) for part in (qkv[:40], qkv[40:80], qkv[80:], z)]
    arrays["blk.0.ssm_in.weight"] = ("Q8_0", np.concatenate(parts, axis=1).reshape(-1, qkv.shape[1]))
    keys = {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in f.metadata.items() if key != "general.architecture"}
    older = write_gguf(tmp_path / "older.gguf", "qwen3next", keys, arrays)
    assert np.array_equal(NumpyTwin(older, n_ctx=32).logits(TOKENS), NumpyTwin(path, n_ctx=32).logits(TOKENS))


def test_the_gate_of_a_shared_expert_may_be_a_row_of_a_matrix(tiny: Tiny) -> None:
    f = Model.open(tiny("tiny-qwen35moe")).file
    row = {name: replace(t, shape=(1, *t.shape)) for name, t in f.tensors.items() if name.endswith("ffn_gate_inp_shexp.weight")}
    assert len(row) == 2
    Model.of(replace(f, tensors={**f.tensors, **row})).graph(1, 32, head="last")


def test_the_blocks_of_glm4moe_that_predict_further_tokens_stay_unread(tiny: Tiny, tmp_path: Path) -> None:
    f = Model.open(changed(tiny("tiny-glm4moe"), metadata={"nextn_predict_layers": 1})).file
    extra = {f"blk.2.nextn.{name}.weight": f.tensors["blk.2.attn_norm.weight"] for name in ("enorm", "hnorm", "shared_head_norm")}
    model = Model.of(replace(f, tensors={**f.tensors, **extra}))
    assert model.hp.n_layer == 2 and {name.split(".")[1] for name in model.architecture.unused_tensors} == {"2"}
    assert extra.keys() < model.architecture.unused_tensors
    graph = model.graph(1, 32, head="last")
    assert not any(t.name.startswith("blk.2.") for n in graph.nodes for t in n.inputs)
    shorter = {name: t for name, t in f.tensors.items() if not name.startswith("blk.2.")}
    two = Model.of(replace(f, tensors=shorter, metadata={**f.metadata, "glm4moe.block_count": 2, "glm4moe.nextn_predict_layers": 0}))
    assert graph.nodes == two.graph(1, 32, head="last").nodes


def test_ernie_has_experts_in_every_other_layer_and_may_lack_the_bias(tiny: Tiny) -> None:
    path = tiny("tiny-ernie4-5-moe")
    nodes = nodes_of(path)
    assert [f"ffn_moe_topk-{il}" in {t.name for n in nodes.values() for t in n.outputs} for il in range(4)] == [False, True, False, True]
    route = nodes["ffn_moe_weights-1"]
    assert route.params["gating"] == "softmax" and route.params["norm"] and route.inputs[1].name == "blk.1.exp_probs_b.bias"
    without = changed(path, without=["blk.1.exp_probs_b.bias", "blk.3.exp_probs_b.bias"])
    assert len(nodes_of(without)["ffn_moe_weights-1"].inputs) == 1
    counted = changed(path, metadata={"expert_shared_feed_forward_length": None})
    assert nodes_of(counted)["ffn_shexp_gate-1"].outputs[0].shape == (1, 192)


@pytest.mark.vulkan
def test_glm4moe_runs_without_its_last_block(tiny: Tiny, device: Device) -> None:
    path = changed(tiny("tiny-glm4moe"), metadata={"nextn_predict_layers": 1})
    with Engine.load(path, device, n_ctx=32, act="f32", progress=False) as engine:
        assert nmse(engine.prompt_logits(TOKENS), NumpyTwin(path, n_ctx=32).logits(TOKENS)) < 1e-6


def test_norms_of_all_heads_are_not_taken_for_norms_of_each(tiny: Tiny) -> None:
    nodes = nodes_of(tiny("tiny-olmo2"))
    assert nodes["Kcur_normed-0"].inputs[1].shape == (32,) and nodes["Qcur_normed-0"].inputs[1].shape == (96,)
    assert nodes["attn_post_norm-0"].inputs[1].name == "blk.0.post_attention_norm.weight"
    assert nodes["Qcur-0"].inputs[1].name == "inp_embd" and nodes["ffn_gate-0"].inputs[1].name == "ffn_inp-0"
    fused = fuse(Model.open(tiny("tiny-olmo2")).graph(1, 64, head="last"), planned_for("nvidia_h200_linux"))
    assert [n.params.get("norm_all") for n in fused if n.op == "ATTN_DECODE"] == [True] * 3
    prompt = fuse(Model.open(tiny("tiny-olmo2")).graph(8, 64, head="last"), planned_for("nvidia_h200_linux"))
    assert [n.params["has_norm"] for n in prompt if n.op == "QKV_ROPE_SET_ROWS"] == [False] * 3


def test_windows_of_olmo3_and_exaone4_and_cohere2(tiny: Tiny) -> None:
    for name, whole, local in (("olmo3", (0.125, 1.0), (1.0, 0.0)), ("exaone4-window", None, (1.0, 0.0)), ("cohere2", None, (1.0, 0.0))):
        nodes = nodes_of(tiny(f"tiny-{name}"))
        assert [nodes[f"kqv_out-{il}"].params.get("window", 0) for il in range(5)] == [9, 9, 9, 0, 9], name
        ropes = [nodes.get(f"Qcur_rope-{il}") for il in range(5)]
        found = [(r.params["freq_scale"], r.params["ext_factor"]) if r is not None else None for r in ropes]
        assert found == [local, local, local, whole, local], name
    turned = changed(tiny("tiny-olmo3"), metadata={"attention.sliding_window_pattern": [False, True, True, True, True]})
    assert [nodes_of(turned)[f"kqv_out-{il}"].params.get("window", 0) for il in range(5)] == [0, 9, 9, 9, 9]


def test_gemma2_caps_scores_and_logits(tiny: Tiny) -> None:
    path = tiny("tiny-gemma2")
    nodes = nodes_of(path)
    assert [nodes[f"kqv_out-{il}"].params.get("window", 0) for il in range(5)] == [9, 0, 9, 0, 9]
    assert all(nodes[f"kqv_out-{il}"].params["softcap"] == 2.0 for il in range(5)) and nodes["result_output"].params["scale"] == 12.0
    token = fuse(Model.open(path).graph(1, 64, head="last"), planned_for("nvidia_h200_linux"))
    assert [n.params["softcap"] for n in token if n.op in ("FLASH_ATTN_EXT", "ATTN_DECODE")] == [2.0] * 5
    trained = training_graph(Model.open(path).graph(8, 8, head="all")).forward.nodes
    assert [n.params["softcap"] for n in trained if n.op == "FLASH_ATTN_LSE"] == [2.0] * 5
    caps = ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window")
    old = nodes_of(changed(path, metadata=dict.fromkeys(caps)))
    assert old["kqv_out-0"].params == {"scale": 0.25, "window": 4096, "softcap": 50.0} and old["result_output"].params["scale"] == 30.0
    wide = Model.of(outline("gemma2-27b-Q8_0"))
    assert wide.hp.attn_scale == pytest.approx((4608 / 32) ** -0.5) and wide.description == "gemma2 27B Q8_0"


def test_gemma4_has_two_kinds_of_layers(tiny: Tiny) -> None:
    path = tiny("tiny-gemma4")
    model, nodes = Model.open(path), nodes_of(path)
    assert [nodes[f"kqv_out-{il}"].params.get("window", 0) for il in range(6)] == [9, 9, 0, 9, 9, 0]
    assert [nodes[f"Kcur-{il}"].outputs[0].shape[1] for il in range(6)] == [2 * 24, 2 * 24, 40, 2 * 24, 2 * 24, 40]
    ropes = [nodes[f"Qcur_rope-{il}"] for il in (1, 2)]
    assert [(r.params["n_dims"], r.params["freq_base"], len(r.inputs)) for r in ropes] == [(24, 10000.0, 2), (40, 1000000.0, 3)]
    assert "blk.2.attn_v.weight" not in GgufFile.open(path).tensors, "V of layers that see all is what K is made from"
    assert np.array_equal(model.file.tensors["blk.2.attn_v.weight"].data, model.file.tensors["blk.2.attn_k.weight"].data)
    unscaled = nodes_of(
        changed(path, metadata={"attention.scale": None}, without=[f"blk.{il}.layer_output_scale.weight" for il in range(6)])
    )
    assert unscaled["kqv_out-0"].params["scale"] == 1.0 and unscaled["attn_rms-1"].params["eps"] == pytest.approx(1e-6)


def test_scales_of_gemma4_s_layers_are_in_the_norms(tiny: Tiny) -> None:
    path = tiny("tiny-gemma4")
    model, nodes = Model.open(path), nodes_of(path)
    own = [float(model.file.tensors[f"blk.{il}.layer_output_scale.weight"].data.view(np.float32)[0, 0]) for il in range(6)]
    recipe = model.hp.weights["blk.3.post_ffw_norm.weight"].recipe
    assert recipe is not None and recipe.scale == pytest.approx(1 / (own[0] * own[1] * own[2]))
    assert nodes["ffn_rms-3"].params["eps"] == pytest.approx(1e-6 * recipe.scale**2)
    assert nodes["result_rms"].params["eps"] == pytest.approx(1e-6 / np.prod(own) ** 2)
    assert not any(n.op == "SCALE" and n.name.startswith("out") for n in nodes.values())
    so_far, rescaled = scales_so_far([0.001, 0.001, 0.001, 2.0])
    assert so_far == [1.0, 0.001, 0.001**2, 1.0, 2.0] and rescaled == [1.0, 1.0, 0.001**3, 1.0]


def test_gemma4_s_last_layers_attend_to_rows_that_others_stored(tiny: Tiny) -> None:
    path = tiny("tiny-gemma4-ple")
    nodes = nodes_of(path)
    assert [nodes[f"kqv_out-{il}"].inputs[1].name for il in range(6)] == [f"cache_k_l{il}" for il in (0, 1, 2, 1, 2, 1)]
    assert not any(f"blk.{il}.attn_k.weight" in {t.name for n in nodes.values() for t in n.inputs} for il in (3, 4, 5))
    assert [nodes[f"ffn_up-{il}"].outputs[0].shape[1] for il in range(6)] == [96] * 3 + [192] * 3
    filling = Model.open(path).graph(4, 32, head="none").nodes
    assert not any("-3" in n.name or "-5" in n.name for n in filling), "nothing of a prompt's beginning reaches beyond the rows"


@pytest.mark.parametrize("profile", ["nvidia_h200_linux", "apple_m1_honeykrisp"])
def test_rows_are_stored_before_the_first_layer_that_reads_them(profile: str, tiny: Tiny) -> None:
    """Before, a layer without K that came before an unfused one could have taken the store of a layer before into its own kernel."""
    for n in (1, 8):
        model = Model.open(tiny("tiny-gemma4-ple"))
        graph = model.graph(n, 64, head="last")
        graph.nodes = [
            replace(node, params={**node.params, "freq_base": 2.0}) if node.name == "Qcur_rope-1" else node for node in graph.nodes
        ]
        stored: set[str] = set()
        for node in fuse(graph, planned_for(profile)):
            read = {t.name for t in node.inputs if t.kind == "state"} - {t.name for t in node.outputs}
            assert read <= stored, node.name
            stored |= {t.name for t in node.outputs if t.kind == "state"}


@pytest.mark.vulkan
@pytest.mark.parametrize("streams", [2, 3, 5])
def test_gemma3n_with_other_numbers_of_streams(streams: int, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their coefficients are read value by value, not as rows of planes, which are 32 wide."""
    s = SHAPES["tiny-gemma3n"]
    monkeypatch.setitem(SHAPES, "tiny-streams", replace(s, metadata={**s.metadata, STREAMS: streams}))
    path = tmp_path / "model.gguf"
    synthesize("tiny-streams-Q8_0", path)
    want = NumpyTwin(path, n_ctx=32).logits(TOKENS)
    with Engine.load(path, device, n_ctx=32, act="f32", progress=False) as engine:
        got = np.vstack([engine.prompt_logits(TOKENS[:-1]), engine.decode_logits(TOKENS[-1])[None]])
    assert nmse(got, want) < 1e-6


def test_lfm2_has_a_window_where_the_file_says_so(tiny: Tiny) -> None:
    path = tiny("tiny-lfm2")
    windowed = nodes_of(changed(path, metadata={"attention.sliding_window": 9}))
    assert [nodes[f"kqv_out-{il}"].params.get("window", 0) for nodes in (nodes_of(path), windowed) for il in (1, 3)] == [0, 0, 9, 9]
    assert {name for name, node in windowed.items() if node.op == "SHORT_CONV"} == {"conv_gated-0", "conv_gated-2"}


def test_llama4_sees_chunks_in_three_layers_of_four(tiny: Tiny) -> None:
    path = tiny("tiny-llama4")
    nodes = nodes_of(path)
    assert [nodes[f"kqv_out-{il}"].params.get("window", 0) for il in range(5)] == [9, 9, 9, 0, 9]
    assert [nodes[f"kqv_out-{il}"].params.get("chunked", False) for il in range(5)] == [True, True, True, False, True]
    assert [f"Qcur_rope-{il}" in nodes for il in range(5)] == [True, True, True, False, True]
    assert "q_tempered-3" in nodes and TEMPERATURE not in nodes_of(path, n_ctx=9)
    table = Model.open(path).file.tensors[TEMPERATURES].data.view(np.float32)[:, 0]
    assert table[:9].tolist() == [1.0] * 9 and table[9] == pytest.approx(1 + 0.3 * np.log(2))
    assert nodes["ffn_moe_gate-1"].inputs[1].name == "ffn_moe_weighted-1 (reshaped)" and "ffn_gate-2" in nodes
    bare = changed(
        path, metadata=dict.fromkeys(("attention.sliding_window", "attention.temperature_length", "attention.temperature_scale"))
    )
    assert nodes_of(bare)["kqv_out-0"].params["window"] == 8192 and TEMPERATURE not in nodes_of(bare)
    maverick = Model.of(outline("llama4-maverick-Q8_0", layers=4)).graph(1, 32, head="last")
    assert not any(n.op == "RMS_NORM" and n.name.startswith("Qcur") for n in maverick.nodes)
    with pytest.raises(PlanError, match="cannot be trained"):
        training_graph(Model.open(path).graph(8, 8, head="all"))


def test_steps_of_mistral4_s_temperatures_are_the_first_context(tiny: Tiny) -> None:
    path = tiny("tiny-mistral4")
    assert TEMPERATURE not in nodes_of(path, n_ctx=10) and TEMPERATURE in nodes_of(path, n_ctx=11)
    nodes = nodes_of(path)
    assert nodes["q_pe_rope-0"].params["attn_factor"] * (1 + 0.1 * np.log(4)) == pytest.approx(1.0)
    assert nodes["kqv_out-0"].params["scale"] == pytest.approx(48**-0.5 * (1 + 0.1 * np.log(4)) ** 2)
    assert nodes["ffn_moe_swiglu-1"].inputs[0].shape == (1, 2, 2 * 64)


def test_the_magnitude_of_olmo3_s_yarn_is_the_file_s(tiny: Tiny) -> None:
    own = nodes_of(tiny("tiny-olmo3"))["Qcur_rope-3"].params["attn_factor"]
    assert own * (1 + 0.1 * np.log(8)) == pytest.approx(1.3)
    plain = changed(tiny("tiny-olmo3"), metadata={"rope.scaling.attn_factor": None})
    assert nodes_of(plain)["Qcur_rope-3"].params["attn_factor"] == 1.0


def test_hunyuan_norms_what_is_rotated(tiny: Tiny) -> None:
    nodes = nodes_of(tiny("tiny-hunyuan-moe"))
    assert nodes["Qcur_rms-0"].inputs[0].name == "Qcur_rope-0" and nodes["Qcur_rope-0"].inputs[0].name == "Qcur-0 (reshaped)"
    graph = Model.open(tiny("tiny-hunyuan-moe")).graph(1, 64, head="last")
    for profile, fused in (("nvidia_h200_linux", True), ("apple_m1_honeykrisp", False)):  # eight bindings are one too few
        found = [n.params["has_norm"] for n in fuse(graph, planned_for(profile)) if n.op == "QKV_ROPE_SET_ROWS"]
        assert found == [fused] * 3, profile


@pytest.mark.parametrize("name", ["tiny-phi2", "tiny-glm4"])
def test_q_k_and_v_in_one_tensor(name: str, tiny: Tiny) -> None:
    f = Model.open(tiny(name)).file
    kinds = [f"blk.{il}.attn_{{}}.{kind}" for il in range(3) for kind in ("weight", "bias")]
    joined = {}
    for kind in kinds:
        parts = [f.tensors[kind.format(part)] for part in "qkv"]
        data = np.concatenate([np.asarray(t.data).reshape(-1) for t in parts])
        shape = (sum(t.shape[0] for t in parts), *parts[0].shape[1:])
        joined[kind.format("qkv")] = GgufTensor(kind.format("qkv"), parts[0].type, shape, 0, data.nbytes, data)
    rest = {name: t for name, t in f.tensors.items() if not any(f".attn_{part}." in name for part in "qkv")}
    model = Model.of(replace(f, tensors={**rest, **joined}))
    assert model.graph(1, 32, head="last").nodes == Model.of(f).graph(1, 32, head="last").nodes
    for kind in kinds:
        for part in "qkv":
            assert np.array_equal(model.file.tensors[kind.format(part)].data, f.tensors[kind.format(part)].data)


def test_glm4_s_attention_may_have_no_biases(tiny: Tiny) -> None:
    """Those of GLM-4-32B-0414 have none."""
    f = Model.open(tiny("tiny-glm4")).file
    bare = Model.of(replace(f, tensors={name: t for name, t in f.tensors.items() if not name.endswith(".bias")}))
    nodes = {node.name: node for node in bare.graph(1, 32, head="last").nodes}
    assert nodes["Qcur_rope-0"].inputs[0].name == "Qcur-0 (reshaped)" and "Qcur_bias-0" not in nodes
    assert {name for name in outline("glm4-32b-Q4_K_M").tensors if name.endswith("bias")} == set()


def test_a_training_step_of_blocks_side_by_side_is_planned() -> None:
    """Products take both sums in, each where it stands: before, the second was looked for in a product that had already taken it."""
    model = Model.of(outline("tiny-phi2-F32"))
    graph = training_graph(model.graph(64, 64, head="all")).graph
    assert plan(graph, planned_for("llvmpipe_mesa_22_debian12"), fusion="training").stages
