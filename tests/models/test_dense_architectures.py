"""qwen2, qwen3, phi3, smollm3 and llama's larger shapes: graphs, names, stages, files that do not fit. tests/models/test_references.py has
their logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for
from make_gguf import llama_metadata, llama_tensors, write_gguf

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.sampler import add_sampler
from vkback.graph import Graph, Node
from vkback.models import GgufError, GgufFile, Model
from vkback.models.naming import model_description
from vkback.models.synth import synthesize
from vkback.ops.op import OPS
from vkback.plan.passes.fuse import fuse
from vkback.plan.planner import plan

H200 = "nvidia_h200_linux"


def metadata_of(arch: str, **changes: Any) -> dict[str, Any]:
    return {key.replace("llama.", f"{arch}."): value for key, value in llama_metadata(**changes).items()} | {
        "tokenizer.ggml.model": "no_vocab"
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    known: dict[str, Model] = {}

    def get(name: str) -> Model:
        if name not in known:
            path = tmp_path_factory.mktemp("tiny") / f"{name}.gguf"
            synthesize(f"{name}-Q8_0", path)
            known[name] = Model.open(path)
        return known[name]

    return get


def named(graph: Graph) -> dict[str, Node]:
    return {n.name: n for n in graph.nodes}


# --- layers -------------------------------------------------------------------------------------------------------------------------


def test_qwen2_has_biases_on_q_k_and_v(tiny: Callable[[str], Model]) -> None:
    nodes = named(tiny("tiny-qwen2").graph(1, 32, head="last"))
    assert [name for name in nodes if "bias" in name and name.endswith("-1")] == ["Qcur_bias-1", "Kcur_bias-1", "Vcur_bias-1"]
    assert nodes["Kcur_rope-2"].params["mode"] == "neox"


def test_qwen3_norms_heads_before_it_turns_them(tiny: Callable[[str], Model]) -> None:
    nodes = named(tiny("tiny-qwen3").graph(1, 32, head="last"))
    assert nodes["Qcur_rope-0"].inputs[0].name == "Qcur_normed-0" and nodes["Kcur_normed-1"].inputs[1].name == "blk.1.attn_k_norm.weight"
    assert nodes["Qcur_rope-0"].params["mode"] == "neox" and nodes["Qcur_rope-0"].outputs[0].shape == (1, 4, 40)


def test_every_fourth_layer_of_smollm3_has_no_rope(tiny: Callable[[str], Model]) -> None:
    nodes = named(tiny("tiny-smollm3").graph(2, 32, head="last"))
    assert [f"Qcur_rope-{il}" in nodes for il in range(5)] == [True, True, True, False, True]
    assert nodes["Qcur_rope-0"].params["mode"] == "normal"
    assert nodes["kqv_out-3"].inputs[0].name == "Qcur-3 (reshaped)"


def test_phi3_s_tensors_are_cut_by_rows(tiny: Callable[[str], Model]) -> None:
    model = tiny("tiny-phi3")
    raw = GgufFile.open(model.file.path)
    assert model.file.n_params == raw.n_params and model.file.size_bytes == raw.size_bytes
    q, k, v = (model.file.tensor(f"blk.1.attn_{x}.weight") for x in "qkv")
    assert np.array_equal(np.concatenate([q.data, k.data, v.data]), raw.tensor("blk.1.attn_qkv.weight").data)
    gate, up = (model.file.tensor(f"blk.2.ffn_{x}.weight") for x in ("gate", "up"))
    assert np.array_equal(np.concatenate([gate.data, up.data]), raw.tensor("blk.2.ffn_up.weight").data)
    assert (k.shape, k.name, k.row0) == ((32, 96), "blk.1.attn_qkv.weight", 96)


def test_long_rope_s_factors_follow_the_context(tiny: Callable[[str], Model]) -> None:
    model = tiny("tiny-phi3")
    factors = [named(model.graph(1, n_ctx, head="last"))["Qcur_rope-0"].inputs[2].name for n_ctx in (32, 256, 257)]
    assert factors == ["rope_factors_short.weight"] * 2 + ["rope_factors_long.weight"]
    nodes = named(model.graph(1, 32, head="last"))
    assert nodes["kqv_out-0"].params["window"] == 9 and nodes["Qcur_rope-0"].params["n_dims"] == 24
    assert nodes["Qcur_rope-0"].params["attn_factor"] == pytest.approx(1.0606602)


@pytest.mark.vulkan
def test_a_resized_context_takes_the_other_factors(tiny: Callable[[str], Model], device: Device) -> None:
    path = tiny("tiny-phi3").file.path
    tokens = [3, 14, 159, 265, 35]
    with Engine.load(path, device, n_ctx=32, act="f32", progress=False) as engine:
        short = engine.prompt_logits(tokens)
        engine.resize(300)
        resized = engine.prompt_logits(tokens)
    with Engine.load(path, device, n_ctx=300, act="f32", progress=False) as engine:
        long = engine.prompt_logits(tokens)
    np.testing.assert_array_equal(resized, long)
    assert np.abs(long[1:] - short[1:]).max() > 1e-3


def test_phi3_files_with_tensors_apart_open_too(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "phi3", metadata_of("phi3"), llama_tensors())
    names = [n.name for n in Model.open(path).graph(1, 8, head="last").nodes if n.op == "MUL_MAT" and n.name.endswith("-0")]
    assert names == ["Qcur-0", "Kcur-0", "Vcur-0", "attn_out-0", "ffn_gate-0", "ffn_up-0", "ffn_out-0"]


# --- stages and names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "description", "stages"),
    [
        ("mistral-small-24b-Q5_K_S:4", None, 5),
        ("mistral-large-123b-Q2_K:4", None, 5),
        ("mixtral-8x7b-Q4_K_M", "llama 8x7B Q4_K - Medium", 7),
        ("smollm-135m-Q8_0", "llama 256M Q8_0", 5),
        ("qwen2-7b-Q4_K_M", "qwen2 7B Q4_K - Medium", 5),
        ("qwen2-14b-Q4_K_M:4", None, 5),
        ("qwen3-0.6b-Q8_0", "qwen3 0.6B Q8_0", 5),
        ("phi3-3b-Q4_K_S", "phi3 3B Q4_K - Small", 5),
        ("smollm3-3b-Q4_K_M", "smollm3 3B Q4_K - Medium", 5),
    ],
)
def test_a_token_takes_as_many_stages_a_layer_as_llama_s(
    name: str, description: str | None, stages: int, models: Callable[[str], Model]
) -> None:
    model = models(name)
    assert description in (None, model.description)
    graph = model.graph(1, 4096, head="last")
    add_sampler(graph, greedy=True)
    s = plan(graph, planned_for(H200))
    assert len(s.stages) == 1 + stages * model.hp.n_layer + 2
    # In the one stage before the first layer: the embedding's row and the angles, which all layers share.
    assert Counter(d.op for d in s.stages[0]) == {"GET_ROWS": 1, "ROPE_ANGLES": 1}


@pytest.mark.parametrize(
    ("arch", "keys", "size"),
    [
        ("qwen2", {"block_count": 24, "embedding_length": 1024}, "0.5B"),
        ("qwen2", {"block_count": 24, "embedding_length": 896}, "1B"),
        ("qwen2", {"block_count": 28, "embedding_length": 1536}, "1.5B"),
        ("qwen2", {"block_count": 28, "embedding_length": 3584}, "7B"),
        ("qwen2", {"block_count": 40, "attention.head_count": 20}, "4B"),
        ("qwen2", {"block_count": 40, "attention.head_count": 40}, "13B"),
        ("qwen2", {"block_count": 36}, "3B"),
        ("qwen2", {"block_count": 64}, "32B"),
        ("qwen2", {"block_count": 29}, "?B"),
        ("qwen3", {"block_count": 28, "embedding_length": 1024}, "0.6B"),
        ("qwen3", {"block_count": 28, "embedding_length": 2048}, "1.7B"),
        ("qwen3", {"block_count": 36, "embedding_length": 2560}, "4B"),
        ("qwen3", {"block_count": 36, "embedding_length": 4096}, "8B"),
        ("qwen3", {"block_count": 64}, "32B"),
        ("phi3", {"block_count": 40}, "14B"),
        ("smollm3", {"block_count": 36}, "3B"),
        ("llama", {"block_count": 56, "expert_count": 8}, "8x22B"),
        ("llama", {"block_count": 88}, "?B"),
    ],
)
def test_sizes_are_llama_bench_s(arch: str, keys: dict[str, Any], size: str, tmp_path: Path) -> None:
    metadata = {f"{arch}.{key}": value for key, value in keys.items()} | {"general.file_type": 7}
    f = GgufFile.open(write_gguf(tmp_path / "m.gguf", arch, metadata, {"x": ("F32", np.ones(1, np.float32))}))
    assert model_description(f) == f"{arch} {size} Q8_0"


# --- fusion of what these need ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7])
def test_heads_that_are_not_turned_are_stored_by_the_same_kernels(n: int, tiny: Callable[[str], Model]) -> None:
    nodes = fuse(tiny("tiny-smollm3").graph(n, 64, head="last"), planned_for(H200))
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


def test_heads_of_odd_size_are_quantized_by_a_stage(tiny: Callable[[str], Model]) -> None:
    """A head of 40 is no whole number of units of 32, which attention would store as Q8_1."""
    nodes = fuse(tiny("tiny-qwen3").graph(1, 64, head="last"), planned_for(H200))
    made = {node.outputs[0].name: node.outputs[0].type for node in nodes}
    assert (made["kqv_out-0"], made["kqv_out-0.q8_1"]) == ("F32", "Q8_1")


# --- files that do not fit ----------------------------------------------------------------------------------------------------------


def phi3_tensors() -> dict[str, tuple[str, np.ndarray]]:
    tensors = llama_tensors()
    for il in range(2):
        parts = [tensors.pop(f"blk.{il}.attn_{x}.weight")[1] for x in "qkv"]
        tensors[f"blk.{il}.attn_qkv.weight"] = ("F32", np.concatenate(parts))
        gate, up = (tensors.pop(f"blk.{il}.ffn_{x}.weight")[1] for x in ("gate", "up"))
        tensors[f"blk.{il}.ffn_up.weight"] = ("F32", np.concatenate([gate, up]))
    return tensors


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("tensor", "index", "value", "where"),
    [
        ("blk.1.ffn_gate.weight", (5, 3), np.nan, "row 5"),
        ("blk.0.attn_v.weight", (31, 63), np.inf, "row 31"),
        ("token_embd.weight", (7, 0), -np.inf, "row 7"),
        ("blk.1.attn_norm.weight", (9,), np.nan, "it"),
    ],
)
def test_weights_that_are_not_numbers_are_named_at_the_load(
    tensor: str, index: tuple[int, ...], value: float, where: str, tmp_path: Path, device: Device
) -> None:
    tensors = llama_tensors()
    tensors[tensor][1][index] = value
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama"), tensors)
    with pytest.raises(GgufError, match=rf"m\.gguf: tensor {tensor} \(F32 \[.*\]\): {where} holds weights that are NaN or infinite"):
        Engine.load(path, device, progress=False)


@pytest.mark.vulkan
def test_a_part_of_a_cut_tensor_is_named_as_in_the_file(tmp_path: Path, device: Device) -> None:
    tensors = phi3_tensors()
    tensors["blk.1.ffn_up.weight"][1][100, 1] = np.nan
    path = write_gguf(tmp_path / "m.gguf", "phi3", metadata_of("phi3"), tensors)
    with pytest.raises(GgufError, match=r"tensor blk\.1\.ffn_up\.weight \(F32 \[96, 64\]\): row 100 holds"):
        Engine.load(path, device, progress=False)
