"""The deepseek2 architecture: its hyperparameters, router, products by heads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prompt_kernels import kernel_params, skip_without

from vkback.device import Device
from vkback.gguf.file import GgufFile
from vkback.harness.runner import run_case
from vkback.models.registry import architecture
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Overrides

# --- hyperparameters ----------------------------------------------------------------------------------------------------------------


def opened(path: Path, **changes: Any) -> Any:
    """The architecture of a file whose metadata was changed; None removes a key."""
    f = GgufFile.open(path)
    named = {"deepseek2." + key.replace("__", "."): value for key, value in changes.items()}
    metadata = {key: value for key, value in (dict(f.metadata) | named).items() if value is not None}
    return architecture(dataclasses.replace(f, metadata=metadata))


def test_yarn_goes_into_the_attention_scale(tiny: Callable[[str], Path]) -> None:
    found = opened(tiny("tiny-deepseek2"))
    factor = 1 + 0.0707 * math.log(40)
    assert found.hp.attn_scale == pytest.approx(factor**2 / math.sqrt(64))
    assert found.hp.rope.attn_factor == pytest.approx(1 / (1 + 0.1 * math.log(40))), "cosine and sine keep their size"
    plain = opened(tiny("tiny-deepseek2"), rope__scaling__yarn_log_multiplier=None)
    assert (plain.hp.attn_scale, plain.hp.rope.attn_factor) == (pytest.approx(1 / 8), 1.0)
    assert opened(tiny("tiny-deepseek2"), rope__scaling__type="none").hp.attn_scale == pytest.approx(1 / 8)


def test_older_files_lack_keys_of_the_router(tiny: Callable[[str], Path]) -> None:
    keys = ("expert_gating_func", "expert_weights_scale", "expert_weights_norm")
    found = opened(tiny("tiny-deepseek2"), **dict.fromkeys(keys))
    assert (found.gating, found.hp.expert_scale, found.hp.norm_w, found.groups) == ("softmax", 1.0, False, (1, 1))
    sigmoid = opened(tiny("tiny-deepseek2-sigmoid"))
    assert (sigmoid.gating, sigmoid.hp.expert_scale, sigmoid.hp.norm_w, sigmoid.groups) == ("sigmoid", 1.25, True, (4, 2))


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


# --- on a device --------------------------------------------------------------------------------------------------------------------


@pytest.mark.vulkan
def test_products_by_heads_by_matrices(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    skip_without("coop_mat", device.caps)
    matrices = dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, kernel_params("coop_mat", device.caps), "test"))
    case = next(c for c in OPS["LINEAR_HEADS"].cases() if "n=37" in c.line)
    assert "gemm/coop_mat.comp" in {d.kernel.source for d in OPS["LINEAR_HEADS"].lower(case.build().node, matrices)}
    outcome = run_case(device, library, case, matrices)
    assert outcome.ok, outcome.text
