"""The gemma3 architecture: its graph, its stages, its faults. tests/models/test_references.py compares its logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import planned_for
from tiny_models import changed, tiny

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.sampler import add_sampler
from vkback.models import GgufError, Model
from vkback.plan.planner import plan

TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 331, 20)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("gemma3", tmp_path_factory.mktemp("gemma3"))


def test_layers_in_ggml_names(path: Path) -> None:
    graph = Model.open(path).graph(3, 32, head="last")
    named = {n.name: n for n in graph.nodes}
    assert named["inp_scaled"].params["scale"] == math.sqrt(96)
    assert [named[f"kqv_out-{il}"].params.get("window", 0) for il in range(7)] == [9, 9, 9, 9, 9, 0, 9]
    ropes = [named[f"Qcur_rope-{il}"].params for il in (4, 5, 6)]
    assert [(p["freq_base"], p["freq_scale"]) for p in ropes] == [(10000.0, 1.0), (1000000.0, 0.125), (10000.0, 1.0)]
    assert {n.params["scale"] for n in graph.nodes if n.op == "FLASH_ATTN_EXT"} == {0.25}
    assert [t.name for t in named["sa_out-0"].inputs] == ["attn_post_norm-0", "inp_scaled"]
    assert [t.name for t in named["l_out-6"].inputs] == ["ffn_post_norm-6", "sa_out-6"] and named["sa_out-6"].outputs[0].shape == (1, 96)
    assert named["ffn_geglu-1"].op == "GEGLU"
    assert named["result_output"].inputs[0].name == "token_embd.weight"


def test_keys_say_otherwise(path: Path) -> None:
    model = Model.open(changed(path, metadata={"attention.sliding_window_pattern": 2, "rope.freq_base_swa": 5000.0}))
    graph = model.graph(1, 32, head="all")
    params = {n.name: n.params for n in graph.nodes}
    assert [params[f"kqv_out-{il}"].get("window", 0) for il in range(4)] == [9, 0, 9, 0]
    assert params["Qcur_rope-0"]["freq_base"] == 5000.0
    as_list = changed(path, metadata={"attention.sliding_window_pattern": [True, False, False, True, True, True, True]})
    windows = [n.params.get("window", 0) for n in Model.open(as_list).graph(1, 32, head="all").nodes if n.op == "FLASH_ATTN_EXT"]
    assert windows == [9, 0, 0, 9, 9, 9, 9]
    assert Model.open(changed(path, metadata={"attention.scale": None})).hp.attn_scale == 1 / math.sqrt(40)


def test_files_that_lack_something_are_refused(path: Path) -> None:
    with pytest.raises(GgufError, match=r"gemma3\.attention\.sliding_window is 0 or missing"):
        Model.open(changed(path, metadata={"attention.sliding_window": None}))
    with pytest.raises(GgufError, match=r"tensor blk\.2\.post_ffw_norm\.weight is missing"):
        Model.open(changed(path, without=["blk.2.post_ffw_norm.weight"]))
    with pytest.raises(GgufError, match=r"tensor blk\.1\.attn_q\.weight has shape \[159, 96\], the hyperparameters say \[160, 96\]"):
        Model.open(changed(path, cut="blk.1.attn_q.weight"))
    with pytest.raises(GgufError, match=r"sliding_window_pattern is 2 values, expected one for each of 7 layers"):
        Model.open(changed(path, metadata={"attention.sliding_window_pattern": [True, False]}))


@pytest.mark.parametrize("name", ["gemma3-1b-Q4_K_M", "gemma3-4b-Q4_K_M"])
def test_a_token_takes_five_stages_a_layer(name: str, models: Callable[[str], Model]) -> None:
    """Embedding and angles, then five a layer; in the end output and argmax. The post-norms and what is added to them are in the
    prologues of the products behind them, of which the first stores the sum."""
    model = models(name)
    graph = model.graph(1, 4096, head="last")
    add_sampler(graph, greedy=True)
    s = plan(graph, planned_for("nvidia_h200_linux"))
    layers = model.hp.n_layer
    assert len(s.stages) == 1 + 5 * layers + 2
    assert {d.op for d in s.dispatches()} == {"GET_ROWS", "ROPE_ANGLES", "LINEAR", "ATTN_DECODE", "SAMPLE"}
    written = [a.tensor.name for d in s.dispatches() for a in d.args if "w" in a.access]
    stored = Counter(name for name in written if name.startswith(("sa_out", "l_out")))
    assert stored == {name: 1 for il in range(layers - 1) for name in (f"sa_out-{il}", f"l_out-{il}")} | {f"sa_out-{layers - 1}": 1}
    # All but the first stages run barrier-free: who reads a sum spins on it, too.
    assert len(s.barrier_free) == len(s.stages) - 3
    waits = {d.label: d.waits for stage in s.stages for d in stage}
    assert waits["ffn_geglu-3"] is not None and waits["ffn_geglu-3"].whole == ("attn_out-3", "l_out-2")


def test_a_prompt_norms_and_adds_in_one_stage(models: Callable[[str], Model]) -> None:
    s = plan(models("gemma3-1b-Q4_K_M").graph(64, 4096, head="last"), planned_for("nvidia_h200_linux"))
    ops = Counter(d.op for d in s.dispatches())
    assert ops["RMS_NORM_MUL_ADD"] == 2 * 26 and not {"ADD", "MUL", "GEGLU"} & ops.keys()


@pytest.mark.vulkan
def test_barrier_free_stages_change_no_bit(barrier_free: None, path: Path, device: Device) -> None:
    def decoded(engine: Engine) -> np.ndarray:
        return np.stack([engine.decode_logits(t) for t in TOKENS])

    with Engine.load(path, device, n_ctx=64, act="q8_1", progress=False) as engine:
        assert engine.schedule().barrier_free
        found = decoded(engine)
        assert engine.schedule().barrier_free
        engine._use_barriers("test")
        engine.reset()
        assert not engine.schedule().barrier_free
        assert np.array_equal(decoded(engine), found)
