"""Steps of few tokens through experts, by the kernels of cooperative matrices, where no rounding can choose other experts: then logits are
those of the tables of any device. (Of other models they differ by whole experts wherever two of a router's logits lie closer together than
rounding moves them.)"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prompt_kernels import kernel_params, skip_without

from vkback.device import Device
from vkback.evaluate.judge import nmse
from vkback.evaluate.node_run import Batch, NodeRun, run_nodes
from vkback.models import Model, synth
from vkback.ops.case import Array
from vkback.ops.lowering import LowerContext
from vkback.ops.moe import norm_route
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Overrides

N = norm_route.FEW + 4
"""Tokens: products by experts then need no barrier ahead of them."""

SAME_EXPERTS_NMSE = 1e-5
"""Of logits. Activations as f16, and 8-bit blocks decoded to f16, add 4e-8 a product (tests/prompt_kernels.py), the queries and weights of
attention as much: some ten in a row. Measured 7e-7 to 1.3e-6; a token whose experts differ is off by 2e-2."""


def spread(experts: str, name: str, values: Array) -> Array:
    """Weights of a router [n_expert, k] for which rounding cannot matter, or can at every token: then experts are copies of one.

    experts  apart: logits are multiples of one, evenly spaced; alike: they differ by parts in a million
    """
    n = len(values)
    if experts == "alike":
        spaced: Array = values[0] + 1e-6 * (values - values[0])
    elif name.endswith("weight"):
        spaced = np.outer(4 / n * (np.arange(n) - (n - 1) / 2), values[0])
    else:
        spaced = np.zeros_like(values)
    return spaced


def model_with(experts: str, arch: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A tiny model whose experts rounding cannot choose otherwise, or whose experts are all alike, or all chosen."""
    chosen = {"n_expert": 8, "n_expert_used": 8} if experts == "all" else {"n_expert": 32, "n_expert_used": 4}
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 128, "n_head": 8, "head_dim": 64, **chosen}
    monkeypatch.setitem(synth.SHAPES, "tiny-ties", dataclasses.replace(synth.SHAPES[arch], **sizes))
    path = folder / "model.gguf"
    synth.synthesize("tiny-ties-Q8_0", path)
    tensors = list(Model.open(path).file.tensors.values())
    with path.open("r+b") as f:
        for t in tensors:
            values = np.array(t.data).reshape(t.shape[0], -1)
            if "_exps" in t.name and experts == "alike":
                values[:] = values[0]
            elif "ffn_gate_inp" in t.name and experts != "all":
                floats = values.view(np.float32).reshape(t.shape)
                values = spread(experts, t.name, floats).astype(np.float32).view(np.uint8)
            f.seek(t.offset)
            f.write(values.tobytes())
    return Model.open(path)


@pytest.mark.vulkan
@pytest.mark.parametrize("arch", ["tiny-gpt-oss", "tiny-qwen3moe"])
@pytest.mark.parametrize("experts", ["apart", "alike", "all"])
def test_logits_of_the_same_experts(
    experts: str, arch: str, device: Device, library: ShaderLibrary, ctx: LowerContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norm to route as one dispatch, the experts' sum, norm and packing as one, RoPE and store by the products of Q, K and V, attention by
    matrices: beside the tables' own kernels, and barrier-free bit for bit as with barriers."""
    skip_without("coop_reg", ctx.caps)
    model = model_with(experts, arch, tmp_path, monkeypatch)
    by_registers = kernel_params("coop_reg", ctx.caps) | {
        "topk_moe": {"experts_each": 8},
        "attention": {"kernel": "decode_matrix", "warps": 4, "groups": 4, "rows_per_split": 64},
    }

    def run(sync: str, params: dict[str, dict[str, Any]]) -> NodeRun:
        tuning = Overrides(ctx.tuning, params | {"schedule": {"sync": sync}}, "test")
        return run_nodes(model, device, library, dataclasses.replace(ctx, tuning=tuning), Batch(tuple(range(7, 7 + N)), N, 64))

    plain = run("barrier", {"gemm": {"kernel": "f32"}, "attention": {"kernel": "plain"}})
    ordered, free = (run(sync, by_registers) for sync in ("barrier", "sentinel"))
    used = {d.kernel.source for d in free.schedule.dispatches()}
    assert {"topk/norm_route.comp", "gemm/coop_reg_experts.comp", "attention/decode/matrix.comp"} <= used
    assert ("gemm/coop_reg_heads.comp" in used) == (arch == "tiny-gpt-oss")  # by pairs that are no neighbours; the other norms its heads
    assert free.schedule.barrier_free and not ordered.schedule.barrier_free and not free.timed_out
    logits = free.values["result_output"]
    np.testing.assert_array_equal(logits.view(np.uint32), ordered.values["result_output"].view(np.uint32))
    assert nmse(logits, plain.values["result_output"]) < SAME_EXPERTS_NMSE
    ids = [name for name in plain.values if name.startswith("ffn_moe_topk-")]
    assert len(ids) == 2
    same = [np.array_equal(np.sort(plain.values[name]), np.sort(free.values[name])) for name in ids]
    assert not all(same) if experts == "alike" else all(same)
