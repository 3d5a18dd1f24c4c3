"""The deepseek2 architecture: its hyperparameters, graph and stages. tests/models/test_references.py compares its logits."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for
from prompt_kernels import kernel_params, skip_without

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.sampler import add_sampler
from vkback.evaluate.judge import nmse
from vkback.gguf.file import GgufFile
from vkback.harness.runner import run_case
from vkback.models import GgufError, Model
from vkback.models.registry import architecture
from vkback.models.synth import synthesize
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Overrides

TINY = ("tiny-deepseek2", "tiny-deepseek2-legacy", "tiny-deepseek2-sigmoid")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("deepseek2") / f"{name}.gguf"
            synthesize(f"{name}-Q8_0", made[name])
        return made[name]

    return get


def decode_schedule(model: Model, profile: str, fusion: str = "all") -> Schedule:
    graph = model.graph(1, 4096, head="last")
    add_sampler(graph, greedy=True)
    return plan(graph, planned_for(profile), fusion=fusion)


# --- hyperparameters ----------------------------------------------------------------------------------------------------------------


def opened(path: Path, **changes: Any) -> Any:
    """The architecture of a file whose metadata was changed; None removes a key."""
    f = GgufFile.open(path)
    named = {"deepseek2." + key.replace("__", "."): value for key, value in changes.items()}
    metadata = {key: value for key, value in (dict(f.metadata) | named).items() if value is not None}
    return architecture(dataclasses.replace(f, metadata=metadata))


def test_yarn_goes_into_the_attention_scale(path: Callable[[str], Path]) -> None:
    found = opened(path("tiny-deepseek2"))
    factor = 1 + 0.0707 * math.log(40)
    assert found.hp.attn_scale == pytest.approx(factor**2 / math.sqrt(64))
    assert found.hp.rope.attn_factor == pytest.approx(1 / (1 + 0.1 * math.log(40))), "cosine and sine keep their size"
    plain = opened(path("tiny-deepseek2"), rope__scaling__yarn_log_multiplier=None)
    assert (plain.hp.attn_scale, plain.hp.rope.attn_factor) == (pytest.approx(1 / 8), 1.0)
    assert opened(path("tiny-deepseek2"), rope__scaling__type="none").hp.attn_scale == pytest.approx(1 / 8)


def test_older_files_lack_keys_of_the_router(path: Callable[[str], Path]) -> None:
    keys = ("expert_gating_func", "expert_weights_scale", "expert_weights_norm")
    found = opened(path("tiny-deepseek2"), **dict.fromkeys(keys))
    assert (found.gating, found.hp.expert_scale, found.hp.norm_w, found.groups) == ("softmax", 1.0, False, (1, 1))
    sigmoid = opened(path("tiny-deepseek2-sigmoid"))
    assert (sigmoid.gating, sigmoid.hp.expert_scale, sigmoid.hp.norm_w, sigmoid.groups) == ("sigmoid", 1.25, True, (4, 2))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention__kv_lora_rank": None}, r"deepseek2\.attention\.kv_lora_rank is 0 or missing"),
        ({"attention__kv_lora_rank": 32}, r"attention\.key_length is 96 \(attention\.value_length 64\), expected .* = 64"),
        ({"attention__key_length_mla": None}, r"attention\.key_length_mla"),
        ({"attention__key_length_mla": 32}, r"attention\.key_length_mla is 32, expected more than the 32 rotated"),
        ({"attention__head_count_kv": 3}, r"attention\.head_count_kv is 3, expected 1"),
        ({"expert_gating_func": 3}, r"expert_gating_func is 3, expected 1 \(softmax\) or 2 \(sigmoid\)"),
        ({"expert_group_count": 3}, r"expert_group_count and expert_group_used_count: 1 of 3 groups of 7 experts"),
        ({"expert_weights_scale": -1.0}, r"expert_weights_scale is -1\.0, expected a positive number"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], said: str, path: Callable[[str], Path]) -> None:
    with pytest.raises(GgufError, match=said):
        opened(path("tiny-deepseek2"), **changes)


def test_the_legacy_form_needs_k_and_v_for_every_head(path: Callable[[str], Path]) -> None:
    with pytest.raises(GgufError, match=r"attention\.head_count_kv is 1, expected 3, as many as heads"):
        opened(path("tiny-deepseek2-legacy"), attention__head_count_kv=1)


def test_a_missing_tensor_is_named(path: Callable[[str], Path]) -> None:
    f = GgufFile.open(path("tiny-deepseek2"))
    f = dataclasses.replace(f, tensors={name: t for name, t in f.tensors.items() if name != "blk.1.attn_v_b.weight"})
    with pytest.raises(GgufError, match=r"tensor blk\.1\.attn_v_b\.weight is missing"):
        architecture(f).graph(1, 8, head="all")


# --- router -------------------------------------------------------------------------------------------------------------------------


def test_the_bias_takes_part_in_the_choice_alone() -> None:
    logits, bias = np.log([[1.0, 3.0, 1.0, 9.0]]), np.array([0.0, 0.0, 0.9, -0.9])
    params = {"n_used": 2, "norm": False, "gating": "sigmoid", "scale": 2.0}
    weights, ids = OPS["TOPK_MOE"].reference([logits, bias], params)
    assert ids.tolist() == [[2, 1]]
    np.testing.assert_allclose(weights, [[2 * 0.5, 2 * 0.75]])


def test_groups_are_chosen_by_their_best_or_their_two_best() -> None:
    share = np.array([[0.9, 0.1, 0.6, 0.6, 0.2, 0.2]])
    logits = np.log(share / (1 - share))
    params: dict[str, Any] = {"n_used": 2, "norm": False, "scale": 1.0, "n_group": 3, "n_group_used": 1}
    assert OPS["TOPK_MOE"].reference([logits], {**params, "gating": "sigmoid"})[1].tolist() == [[2, 3]], "0.6 + 0.6 beats 0.9 + 0.1"
    assert OPS["TOPK_MOE"].reference([logits], {**params, "gating": "softmax"})[1].tolist() == [[0, 1]]


# --- graph and plan -----------------------------------------------------------------------------------------------------------------


def test_layers_in_ggml_names(path: Callable[[str], Path]) -> None:
    graph = Model.open(path("tiny-deepseek2")).graph(1, 64, head="all")
    by_name = {n.name: n for n in graph.nodes}
    assert {"ffn_out-0", "ffn_moe_topk-1"} <= by_name.keys() | {t.name for n in graph.nodes for t in n.outputs}
    assert "ffn_shexp-0" not in by_name and "ffn_shexp-1" in by_name, "the first layer is dense"
    attention = by_name["kqv_out-1"]
    assert attention.inputs[1].name == attention.inputs[2].name == "cache_k_l1" and attention.params["v_dim"] == 64
    assert by_name["Kcur-1"].outputs[0].shape == (1, 1, 96) and by_name["Qcur-1"].outputs[0].shape == (1, 3, 96)
    legacy = {n.name: n for n in Model.open(path("tiny-deepseek2-legacy")).graph(1, 64, head="all").nodes}
    assert [t.shape for t in legacy["kqv_out-1"].inputs[1:3]] == [(3, 64, 48), (3, 64, 32)]


def test_a_token_of_the_16b_takes_nine_stages_a_layer(models: Callable[[str], Model]) -> None:
    """Two more than other models with experts: Q goes through k_b before attention, what comes out through v_b. The shared expert costs
    none."""
    model = models("deepseek2-16b-Q4_K_M")
    assert model.description == "deepseek2 16B Q4_K - Medium"
    s = decode_schedule(model, "nvidia_h200_linux")
    by_layer = [[[d.label for d in stage] for stage in s.stages if any(d.label.endswith(f"-{il}") for d in stage)] for il in (1, 2)]
    assert [sorted(stage) for stage in by_layer[0]] == [
        ["kv_cmpr_pe-1", "q-1"],
        ["q_nope_absorbed-1", "q_pe_rope-1"],
        ["kqv_out-1"],
        ["kqv_decompressed-1"],
        ["ffn_inp-1"],
        ["ffn_moe_logits-1", "ffn_shexp_swiglu-1"],
        ["ffn_moe_swiglu-1", "ffn_shexp_swiglu-1.q8_1"],
        ["ffn_moe_swiglu-1.q8_1", "ffn_shexp_out-1"],
        ["l_out-1"],
    ]
    assert len(by_layer[1]) == len(by_layer[0])
    counted = Counter(d.op for d in s.dispatches())
    assert counted["LINEAR_HEADS"] == 2 * 27 and counted["MLA_ROPE_SET_ROWS"] == counted["FLASH_ATTN_EXT"] == 27
    assert not counted.keys() & {"CONT", "CONCAT", "PERMUTE", "MUL_MAT", "ROPE", "SET_ROWS"}


def test_products_by_heads_of_a_prompt_are_grouped_mat_mats(models: Callable[[str], Model]) -> None:
    """One route serves all layers, what is read and made lies as its neighbours have it: one copy is left, of the part of Q before k_b."""
    graph = models("deepseek2-16b-Q4_K_M").graph(512, 512, head="none")
    s = plan(graph, planned_for("nvidia_h200_linux"))
    by_heads = [d.kernel.source for d in s.dispatches() if d.label in ("q_nope_absorbed-0", "kqv_decompressed-0")]
    assert Counter(by_heads) == {"gemm/coop_mat.comp": 2}
    copies = {d.label for d in s.dispatches() if d.kernel.source == "copy/box.comp" and not d.label.endswith("-26")}
    # The last layer of a prompt only fills its cache.
    assert copies == {f"q_nope_absorbed-{il}.x_heads" for il in range(26)}
    assert [d.kernel.source for d in s.dispatches() if d.op == "ROUTE" and "heads" in d.label] == ["gemm/route_heads.comp"]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("profile", ["llvmpipe_mesa_22_debian12", "broadcom_v3d_7_1_pi5", "apple_m1_honeykrisp", "nvidia_h200_linux"])
def test_tiny_models_plan_for_any_device(profile: str, name: str, path: Callable[[str], Path]) -> None:
    model = Model.open(path(name))
    fused = Counter(d.op for d in decode_schedule(model, profile).dispatches())
    assert fused["MLA_ROPE_SET_ROWS"] == 3 and not fused.keys() & {"CONCAT", "ROPE", "SET_ROWS", "RMS_NORM"}
    plain = Counter(d.op for d in decode_schedule(model, profile, fusion="none").dispatches())
    assert {"CONCAT", "ROPE", "SET_ROWS", "FLASH_ATTN_EXT", "TOPK_MOE"} <= plain.keys()
    assert plan(model.graph(40, 64, head="all"), planned_for(profile)).stages


# --- on a device --------------------------------------------------------------------------------------------------------------------


@pytest.mark.vulkan
@pytest.mark.parametrize("barrier_free", ["gemv", "experts"], indirect=True)
def test_barrier_free_stages_change_no_bit(barrier_free: None, path: Callable[[str], Path], device: Device) -> None:
    """Sigmoids, a bias and groups in the router's product and in the experts'."""
    ids = [int(t) for t in np.random.default_rng(0).integers(0, 331, 12)]
    logits = []
    for fusion in ("all", "none"):
        with Engine.load(path("tiny-deepseek2-sigmoid"), device, n_ctx=32, act="q8_1", fusion=fusion, progress=False) as engine:
            logits.append(np.stack([engine.decode_logits(t) for t in ids]))
            assert bool(engine.schedule().barrier_free) == (fusion == "all")
    assert nmse(logits[0], logits[1]) <= 3e-4, "activations rounded to 8 bits, as in test_engine.py"


@pytest.mark.vulkan
def test_products_by_heads_by_matrices(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    skip_without("coop_mat", device.caps)
    matrices = dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, kernel_params("coop_mat", device.caps), "test"))
    case = next(c for c in OPS["LINEAR_HEADS"].cases() if "n=37" in c.line)
    assert "gemm/coop_mat.comp" in {d.kernel.source for d in OPS["LINEAR_HEADS"].lower(case.build().node, matrices)}
    outcome = run_case(device, library, case, matrices)
    assert outcome.ok, outcome.text
