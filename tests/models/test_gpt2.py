"""The gpt2 architecture: its graph, its stages, its faults. tests/models/test_references.py compares its logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for
from tiny_models import changed, tiny

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.sampler import add_sampler
from vkback.models import GgufError, Model
from vkback.plan.planner import plan


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("gpt2", tmp_path_factory.mktemp("gpt2"))


def test_layers_in_ggml_names(path: Path) -> None:
    graph = Model.open(path).graph(2, 32, head="all")
    named = {n.name: n for n in graph.nodes}
    assert [t.name for t in named["pos_embd"].inputs] == ["position_embd.weight", "pos"]
    assert [t.name for t in named["inpL"].inputs] == ["inp_embd", "pos_embd"]
    assert [n.op for n in graph.nodes if n.name in ("attn_centered-0", "attn_norm_weighted-0", "attn_norm-0")] == ["NORM", "MUL", "ADD"]
    assert named["Kcur-1"].inputs[0].shape == (96, 96) and named["Kcur_bias-1"].inputs[1].name == "blk.1.attn_k.bias"
    assert not any(n.op == "ROPE" for n in graph.nodes)
    assert named["ffn_gelu-2"].op == "GELU" and named["ffn_gelu-2"].inputs[0].name == "ffn_up_bias-2"
    assert named["result_output"].inputs[0].name == "token_embd.weight"


def test_the_fused_tensor_is_cut_by_rows(path: Path) -> None:
    model = Model.open(path)
    whole = GgufRows(path, "blk.0.attn_qkv.weight")
    parts = [bytes(model.file.tensor(f"blk.0.attn_{part}.weight").data.tobytes()) for part in "qkv"]
    assert b"".join(parts) == whole.data and len({len(p) for p in parts}) == 1


class GgufRows:
    """The bytes of a tensor as they lie in a file."""

    def __init__(self, path: Path, name: str) -> None:
        from gguf import GGUFReader

        self.data = next(t for t in GGUFReader(path).tensors if t.name == name).data.tobytes()


def test_files_that_lack_something_are_refused(path: Path) -> None:
    with pytest.raises(GgufError, match=r"gpt2\.attention\.layer_norm_epsilon"):
        Model.open(changed(path, metadata={"attention.layer_norm_epsilon": None}))
    for name in ("position_embd.weight", "blk.1.attn_norm.bias", "blk.2.attn_qkv.weight", "output_norm.bias"):
        with pytest.raises(GgufError, match=rf"tensor {name} is missing".replace(".", r"\.")):
            Model.open(changed(path, without=[name]))
    with pytest.raises(GgufError, match=r"tensor blk\.0\.attn_qkv\.bias has shape \[287\], the hyperparameters say \[288\]"):
        Model.open(changed(path, cut="blk.0.attn_qkv.bias"))
    with pytest.raises(GgufError, match=r"tensor position_embd\.weight has shape \[127, 96\], the hyperparameters say \[128, 96\]"):
        Model.open(changed(path, cut="position_embd.weight"))


@pytest.mark.vulkan
def test_a_context_beyond_the_learned_positions_is_refused(path: Path, device: Device) -> None:
    with pytest.raises(GgufError, match=r"129 tokens, but gpt2 has learned the positions of 128; ask for at most that many \(--ctx 128\)"):
        Engine.load(path, device, n_ctx=129, progress=False)


@pytest.mark.parametrize("name", ["gpt2-F16", "gpt2-xl-F16", "gpt2-xl-Q8_0"])
def test_a_token_takes_five_stages_a_layer(name: str, models: Callable[[str], Model]) -> None:
    """Both embeddings, their sum, then five a layer, norms in prologues, gelu in an epilogue; in the end output and argmax."""
    model = models(name)
    graph = model.graph(1, 1024, head="last")
    add_sampler(graph, greedy=True)
    s = plan(graph, planned_for("nvidia_h200_linux"))
    assert len(s.stages) == 2 + 5 * model.hp.n_layer + 2
    # All but the first stages and the sampler run barrier-free, whether activations are floats or rounded.
    assert len(s.barrier_free) == len(s.stages) - 4
    assert Counter(d.op for d in s.dispatches()) == {
        "GET_ROWS": 2,
        "ADD": 1,
        "LINEAR": 4 * model.hp.n_layer + 1,
        "ATTN_DECODE": model.hp.n_layer,
        "SAMPLE": 1,
    }


@pytest.mark.vulkan
@pytest.mark.parametrize("act", ["f32", "q8_1"])
def test_barrier_free_stages_change_no_bit(act: Any, barrier_free: None, path: Path, device: Device) -> None:
    """Activations are spun on as floats, too."""
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 331, 20)]

    def decoded(engine: Engine) -> np.ndarray:
        return np.stack([engine.decode_logits(t) for t in tokens])

    with Engine.load(path, device, n_ctx=64, act=act, progress=False) as engine:
        found = decoded(engine)
        assert len(engine.schedule().barrier_free) >= 5 * 3 - 1
        engine._use_barriers("test")
        engine.reset()
        assert not engine.schedule().barrier_free
        assert np.array_equal(decoded(engine), found)


@pytest.mark.parametrize(("name", "described"), [("gpt2-F16", "gpt2 0.1B F16"), ("gpt2-xl-F16", "gpt2 1.5B F16")])
def test_names(name: str, described: str, models: Callable[[str], Model]) -> None:
    assert models(name).description == described
