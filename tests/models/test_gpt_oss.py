"""The gpt-oss architecture: its graph, its stages, a tiny model on a device against the numpy twin."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for
from make_gguf import gpt_oss_metadata, gpt_oss_tensors, write_gguf

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.sampler import add_sampler
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.models import GgufError, Model
from vkback.ops.op import OPS
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule

LAYERS = 2

FLOAT_NMSE = 1e-6
"""Float path, as in test_engine.py."""

Q8_1_NMSE = 3e-4
"""Activations rounded to 8 bits, as in test_engine.py."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gpt_oss") / "tiny.gguf", "gpt-oss", gpt_oss_metadata(), gpt_oss_tensors())


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights with a window longer than the context."""
    metadata = gpt_oss_metadata(attention__sliding_window=128)
    return write_gguf(tmp_path_factory.mktemp("gpt_oss") / "wide.gguf", "gpt-oss", metadata, gpt_oss_tensors())


def tokens(n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(0).integers(0, 160, n)]


# --- references by hand -------------------------------------------------------------------------------------------------------------


def ref(op: str, *inputs: Any, **params: Any) -> np.ndarray:
    return OPS[op].reference([np.asarray(x) for x in inputs], params)[0]


def test_the_clamped_unit_by_hand() -> None:
    gate, up = [0.0, 1.0, 9.0, -9.0], [3.0, -8.0, 8.0, 0.5]
    want = [0.0, -6.0 / (1 + np.exp(-1.702)), 7.0 / (1 + np.exp(-1.702 * 7)) * 8.0, -9.0 / (1 + np.exp(1.702 * 9)) * 1.5]
    np.testing.assert_allclose(ref("SWIGLU_OAI", gate, up, alpha=1.702, limit=7.0), want)


def test_biases_follow_their_experts() -> None:
    assert ref("ADD_ID", [[[1.0, 2.0], [3.0, 4.0]]], [10.0, 20.0, 30.0, 40.0, 50.0, 60.0], [[2, 0]]).tolist() == [[[51, 62], [13, 24]]]


def test_the_chosen_experts_alone_share_the_softmax() -> None:
    weights, ids = OPS["TOPK_MOE"].reference(
        [np.log([[1.0, 4.0, 2.0, 3.0]])], dict(n_used=2, norm=True, gating="softmax_weight", scale=1.0)
    )
    assert ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7]])


def test_a_sink_takes_its_share_and_a_window_hides_the_past() -> None:
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((1, 1, 4)), rng.standard_normal((1, 6, 4)), rng.standard_normal((1, 6, 4))
    sink = 0.7
    for window, first in ((0, 0), (9, 0), (2, 3)):
        p = np.exp(0.5 * k[0, first:5] @ q[0, 0])
        got = ref("FLASH_ATTN_EXT", q, k, v, np.array([4]), [sink], scale=0.5, window=window)[0]
        np.testing.assert_allclose(got, p / (p.sum() + np.exp(sink)) @ v[0, first:5])
        plain = ref("FLASH_ATTN_EXT", q, k, v, np.array([4]), scale=0.5, window=window)[0]
        np.testing.assert_allclose(plain, p / p.sum() @ v[0, first:5])


# --- graph and plan -----------------------------------------------------------------------------------------------------------------


def test_layers_in_ggml_names(path: Path) -> None:
    graph = Model.open(path).graph(1, 64, head="all")
    assert [n.name for n in graph.nodes if n.name.endswith("-1")] == [
        "attn_rms-1",
        "attn_norm-1",
        "Qcur-1",
        "Qcur_bias-1",
        "Kcur-1",
        "Kcur_bias-1",
        "Vcur-1",
        "Vcur_bias-1",
        "Kcur_rope-1",
        "Qcur_rope-1",
        "kqv_out-1",
        "attn_out-1",
        "attn_out_bias-1",
        "ffn_inp-1",
        "ffn_rms-1",
        "attn_post_norm-1",
        "ffn_moe_logits-1",
        "ffn_moe_logits_bias-1",
        "ffn_moe_weights-1",
        "ffn_moe_gate-1",
        "ffn_moe_gate_biased-1",
        "ffn_moe_up-1",
        "ffn_moe_up_biased-1",
        "ffn_moe_swiglu_oai-1",
        "ffn_moe_down-1",
        "ffn_moe_down_biased-1",
        "ffn_moe_out-1",
        "l_out-1",
    ]
    by_name = {n.name: n for n in graph.nodes}
    assert [by_name[f"kqv_out-{il}"].params.get("window") for il in range(LAYERS)] == [8, None]
    assert by_name["kqv_out-1"].inputs[4].name == "blk.1.attn_sinks.weight"
    assert dict(by_name["ffn_moe_weights-1"].params) == {"n_used": 4, "norm": True, "gating": "softmax_weight", "scale": 1.0}
    assert dict(by_name["ffn_moe_swiglu_oai-1"].params) == {"alpha": 1.702, "limit": 7.0}
    rope = by_name["Qcur_rope-1"].params
    assert (rope["mode"], rope["ext_factor"], rope["freq_scale"], rope["n_ctx_orig"]) == ("neox", 1.0, 0.25, 16)


@pytest.mark.parametrize("key", ["expert_count", "attention__sliding_window"])
def test_a_file_without_experts_or_window_is_refused(key: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {key: None} | ({"expert_used_count": None} if key == "expert_count" else {})
    broken = write_gguf(tmp_path / "m.gguf", "gpt-oss", gpt_oss_metadata(**changes), gpt_oss_tensors())
    with pytest.raises(GgufError, match=rf"gpt-oss\.{key.replace('__', '.')} is 0 or missing, expected at least 1"):
        Model.open(broken)


def decode_schedule(model: Model, profile: str, fusion: str = "all") -> Schedule:
    graph = model.graph(1, 4096, head="last")
    add_sampler(graph, greedy=True)
    return plan(graph, planned_for(profile), fusion=fusion)


def test_a_token_of_the_20b_takes_seven_stages_a_layer(models: Callable[[str], Model]) -> None:
    """As many as of any other model with experts: biases, sinks, window and clamp cost no stage, and no buffer but their own."""
    model = models("gpt-oss-20b-MXFP4")
    assert model.description == "gpt-oss 20B MXFP4 MoE"
    s = decode_schedule(model, "nvidia_h200_linux")
    assert len(s.stages) == 1 + 7 * 24 + 2
    assert Counter(d.op for d in s.dispatches()) == {
        "GET_ROWS": 1,
        "ROPE_ANGLES": 1,
        "LINEAR": 5 * 24 + 1,
        "ATTN_DECODE": 24,
        "QUANTIZE_Q8_1": 24,
        "SAMPLE": 1,
    }
    assert [[d.label for d in stage] for stage in s.stages[8:15]] == [
        ["Qcur_rope-1.qkv"],
        ["kqv_out-1"],
        ["ffn_inp-1"],
        ["ffn_moe_logits_bias-1"],
        ["ffn_moe_swiglu_oai-1"],
        ["ffn_moe_swiglu_oai-1.q8_1"],
        ["l_out-1"],
    ]
    by_label = {d.label: d for d in s.dispatches()}
    gate_up = by_label["ffn_moe_swiglu_oai-1"]
    assert gate_up.args[2].tensor.type == "F32", "rounded by a stage of its own"
    assert "blk.1.ffn_gate_exps.bias+blk.1.ffn_up_exps.bias" in {a.tensor.name for a in gate_up.args}
    assert {d.args[0].tensor.type for d in s.dispatches() if d.op == "LINEAR"} == {"Q8_0", "F32", "MXFP4"}
    # A window of 128 rows is not worth splitting among workgroups, the whole context is.
    assert [dict(by_label[f"kqv_out-{il}"].kernel.defines)["SPLITS"] == 1 for il in (0, 1)] == [True, False]


@pytest.mark.parametrize("profile", ["llvmpipe_mesa_22_debian12", "broadcom_v3d_7_1_pi5", "apple_m1_honeykrisp", "nvidia_h200_linux"])
def test_the_tiny_model_plans_for_any_device(profile: str, path: Path) -> None:
    model = Model.open(path)
    s = decode_schedule(model, profile)
    choice = planned_for(profile).tuning.pick("schedule", n=1, n_expert=model.hp.n_expert)
    alone = (choice["router"] == "stage") + (choice["quantize"] != "producer")
    assert len(s.stages) == 1 + (6 + alone) * LAYERS + 2
    plain = decode_schedule(Model.open(path), profile, fusion="none")
    assert {"ADD_ID", "SWIGLU_OAI", "FLASH_ATTN_EXT"} <= {d.op for d in plain.dispatches()}


# --- on a device --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twin(path: Path) -> NumpyTwin:
    return NumpyTwin(path, n_ctx=64)


@pytest.fixture(scope="module")
def engines(path: Path, device: Device) -> Iterator[Any]:
    """Engines of the tiny model by (act, fusion), empty at each ask."""
    loaded: dict[tuple[str, str], Engine] = {}

    def get(act: Any, fusion: str = "all") -> Engine:
        if (act, fusion) not in loaded:
            loaded[act, fusion] = Engine.load(path, device, n_ctx=64, act=act, fusion=fusion, progress=False)
        loaded[act, fusion].reset()
        return loaded[act, fusion]

    yield get
    for engine in loaded.values():
        engine.close()


PEER: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "peer_gpt_oss.json").read_text())

TO_PEER = 1e-3
"""Largest difference of a logit to llama.cpp, which computes in F32: measured 3e-4 to the twin."""


def differences_to_peer(logits: np.ndarray) -> np.ndarray:
    return np.array([[abs(row[token] - theirs) for token, theirs in top] for row, top in zip(logits, PEER["top4"], strict=True)])


def test_the_twin_s_logits_are_llama_cpp_s(twin: NumpyTwin) -> None:
    logits = twin.logits(PEER["ids"])
    assert differences_to_peer(logits).max() < TO_PEER
    assert logits.argmax(axis=1).tolist() == [top[0][0] for top in PEER["top4"]]


def decoded(engine: Engine, ids: list[int]) -> np.ndarray:
    engine.reset()
    return np.stack([engine.decode_logits(t) for t in ids])


@pytest.mark.vulkan
@pytest.mark.parametrize(("act", "bound"), [("f32", FLOAT_NMSE), ("q8_1", Q8_1_NMSE)])
def test_prompt_and_decode_are_the_twin_s(act: str, bound: float, engines: Any, twin: NumpyTwin) -> None:
    """40 tokens: five windows, three pieces of a prompt, past the context before it was stretched."""
    ids = tokens(40)
    want = twin.logits(ids)
    assert 0.3 < want.std() < 3, "logits of ordinary size"
    assert nmse(engines(act).prompt_logits(ids), want) <= bound
    assert nmse(decoded(engines(act), ids), want) <= bound


@pytest.mark.vulkan
def test_decoded_logits_are_llama_cpp_s(engines: Any) -> None:
    assert differences_to_peer(decoded(engines("f32"), PEER["ids"])).max() < TO_PEER


@pytest.mark.vulkan
def test_fused_is_unfused(engines: Any) -> None:
    ids = tokens(20)
    assert nmse(engines("f32").prompt_logits(ids), engines("f32", "none").prompt_logits(ids)) <= FLOAT_NMSE
    assert nmse(decoded(engines("f32"), ids), decoded(engines("f32", "none"), ids)) <= FLOAT_NMSE
    assert nmse(decoded(engines("q8_1"), ids), decoded(engines("q8_1", "none"), ids)) <= Q8_1_NMSE


@pytest.mark.vulkan
@pytest.mark.parametrize("barrier_free", ["gemv", "experts"], indirect=True)
def test_barrier_free_stages_change_no_bit(barrier_free: None, path: Path, engines: Any) -> None:
    """Sinks, windows, biases, and experts chosen by the router's product or by their own."""
    want = decoded(engines("q8_1"), tokens(20))
    with Engine.load(path, engines("q8_1").device, n_ctx=64, act="q8_1", progress=False) as engine:
        assert engine.schedule().barrier_free
        assert np.array_equal(decoded(engine, tokens(20)), want)
        assert engine.schedule().barrier_free


@pytest.mark.vulkan
def test_generation_after_a_prompt_is_the_twin_s(engines: Any, twin: NumpyTwin) -> None:
    engine, ids = engines("f32"), tokens(19)
    want, margins = twin.generate_greedy(ids, 30)
    assert min(margins) > 1e-3
    engine.prompt(ids[:-1])
    assert list(engine.generate(ids[-1], 30)) == want


@pytest.mark.vulkan
def test_a_window_longer_than_the_context_hides_nothing(wide: Path, device: Device, twin: NumpyTwin) -> None:
    ids = tokens(24)
    want = NumpyTwin(wide, n_ctx=64).logits(ids)
    np.testing.assert_allclose(want[:8], twin.logits(ids[:8]), rtol=1e-9)
    assert nmse(twin.logits(ids)[8:], want[8:]) > 1e-2, "the shorter window does hide something"
    with Engine.load(wide, device, n_ctx=64, act="f32", progress=False) as engine:
        assert nmse(engine.prompt_logits(ids), want) <= FLOAT_NMSE
        assert nmse(decoded(engine, ids), want) <= FLOAT_NMSE
