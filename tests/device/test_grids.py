"""Grids of kernels within what every device takes: 65535 workgroups along an axis (maxComputeWorkGroupCount).

The quick cases are lowered as if an axis held only LIMIT workgroups. A grid that grows with a node's values has to spill to the next axis
then, and still has a workgroup for each that it had. On a device a few cases show that shaders read grids that have spilled.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from kernel_paths import planned_for

from vkback.device import Capabilities, Device
from vkback.graph import Node, Tensor
from vkback.harness.cases import context_of, find_case, quick_cases
from vkback.harness.runner import run_problem
from vkback.ops.case import Case, Problem
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Tuning

LIMIT = 2

TOKENS, VOCAB, ROW = "tokens at once", "32 ids each: two million", "32 values each of one row: two million"

BOUNDED = {
    "altup/routed.comp": {"x": ROW},
    "argsort/argsort.comp": {"x": ROW},
    "argsort/merge.comp": {"x": ROW},
    "attention/decode/attention.comp": {"x": "heads", "y": "splits of the rows", "z": TOKENS},
    "attention/decode/matrix.comp": {"x": "heads", "y": "splits of the rows", "z": TOKENS},
    "attention/general.comp": {"x": TOKENS, "y": "heads", "z": "sequences"},
    "attention/prompt/prompt.comp": {"y": "groups of heads"},
    "attention/prompt/prompt_matrix.comp": {"y": "groups of heads"},
    "attention/train/train_matrix.comp": {"y": "heads"},
    "attention/train/train_pack.comp": {"x": "heads"},
    "attention/unfused/kq.comp": {"x": "heads", "y": "rows of the cache, as many as threads each", "z": TOKENS},
    "attention/unfused/kqv.comp": {"x": "heads", "y": TOKENS},
    "gemm/coop_mat.comp": {"z": "parts of a row"},
    "gemm/pack_units.comp": {"x": TOKENS},
    "gemm/split_sum.comp": {"y": TOKENS},
    "gemv/gemv.comp": {"z": "tokens at once, times experts used"},
    "moe/expert_copy.comp": {"x": "8 KB and more of one expert: half a gigabyte", "y": "experts of a step"},
    "moe/moe_reduce.comp": {"x": ROW, "y": TOKENS},
    "gemm_f32/gemm.comp": {"z": "products of a batch"},
    "gemm_f32/low_rank_down.comp": {"y": "parts of a row"},
    "norm/gaussian_geglu.comp": {"x": ROW},
    "norm/weight_back.comp": {"y": "blocks of rows, at most 64"},
    "rope/latent.comp": {"x": "pairs of one token's heads"},
    "rope/rope.comp": {"x": "heads"},
    "rows/get_rows_back.comp": {"x": ROW},
    "sample/draw.comp": {"x": VOCAB, "y": "rows of logits"},
    "sample/dry.comp": {"y": "rows of logits"},
    "sample/histogram.comp": {"x": VOCAB, "y": "rows of logits"},
    "sample/lookup_columns.comp": {"x": "columns of a step, at most 64"},
    "sample/penalties.comp": {"x": VOCAB, "y": "rows of logits"},
    "ssm/conv.comp": {"x": "32 channels each", "y": TOKENS},
    "ssm/delta_chunk_state.comp": {"x": "rows of a head", "y": "heads"},
    "ssm/delta_chunk_ut.comp": {"x": TOKENS, "y": "heads"},
    "ssm/delta_net.comp": {"x": "rows of a head", "y": "heads", "z": TOKENS},
    "ssm/scan_chunk_output.comp": {"x": "rows of a head", "y": "heads", "z": TOKENS},
    "ssm/scan_chunk_products.comp": {"x": TOKENS, "y": "groups of heads"},
    "ssm/scan_chunk_states.comp": {"x": "rows and columns of a head's state", "y": "heads"},
    "ssm/scan.comp": {"x": "rows of a head", "y": "heads", "z": TOKENS},
    "ssm/short_conv.comp": {"x": "channels, as many as threads each", "y": TOKENS},
    "topk/argmax.comp": {"x": VOCAB, "y": "rows of logits"},
    "training/sum_squares.comp": {"x": "blocks of a tensor, at most 256"},
}
"""Axes that do not spill, and what there would have to be 65535 of. A plan with more is refused by name (`check_limits`)."""

REFUSING = {"FLASH_ATTN_EXT", "FLASH_ATTN_LSE", "FLASH_ATTN_BACK", "MUL_MAT_BACK", "OUT_PROD"}
"""Ops that say so themselves: 65535 heads, sequences or products of a batch, or tiles of 8 and more rows, columns or queries."""


def limit(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Plan as if an axis held so many workgroups."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vkback.ops.") and hasattr(module, "MAX_GROUPS_X"):
            monkeypatch.setattr(module, "MAX_GROUPS_X", most)


def lowered(case: Case, problem: Problem, ctx: LowerContext) -> list[Dispatch] | PlanError:
    try:
        return [d for node in problem.parts or (problem.node,) for d in OPS[node.op].lower(node, context_of(case, ctx))]
    except PlanError as e:
        return e


def test_what_grows_with_values_spills_to_the_next_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    caps = replace(Capabilities.from_profile("nvidia_h200_linux"), max_workgroup_invocations=128, max_workgroup_size=(128, 128, 64))
    contexts = [LowerContext(caps, Tuning.for_device(caps), act) for act in ("auto", "f16")]
    problems = [(case, problem, ctx) for case in quick_cases() for problem in (case.build(),) for ctx in contexts]
    limit(monkeypatch, 2**31)
    whole = [lowered(*each) for each in problems]
    limit(monkeypatch, LIMIT)
    stuck: dict[str, set[str]] = {}
    refusing = set()
    for (case, problem, ctx), before in zip(problems, whole, strict=True):
        after = lowered(case, problem, ctx)
        if isinstance(before, PlanError) or isinstance(after, PlanError):
            refusing |= {case.op} if not isinstance(before, PlanError) else set()
        elif [d.kernel for d in before] == [d.kernel for d in after]:  # else the limit made it take other kernels
            for old, new in zip(before, after, strict=True):
                assert prod(new.groups) >= prod(old.groups), f"{case.line}: {old.kernel.source}: {old.groups} became {new.groups}"
                for axis, most, got in zip("xyz", old.groups, new.groups, strict=True):
                    if most > 1 and got > LIMIT:
                        stuck.setdefault(new.kernel.source, set()).add(axis)
    assert stuck == {kernel: set(axes) for kernel, axes in BOUNDED.items()}
    assert refusing == REFUSING


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("line", "kernel", "most"),
    [
        ("REPEAT_BACK(type=f32,ne=[70,1,1,1],nr=[1,45,1,1],v=0,seed=31)", "sums/columns.comp", 2),  # three blocks, then their sum
        ("FLASH_ATTN_BACK(hsk=64,hsv=64,nh=2,nr=3,n=67)", "sums/columns.comp", 20),  # a sum for each key and head
        ("ROPE_ANGLES(pos=[0,1,4095],n_dims=128,ff=0,seed=5)", "rope/angles.comp", 5),
    ],
)
def test_a_spilled_grid_makes_the_same(
    line: str, kernel: str, most: int, device: Device, library: ShaderLibrary, ctx: LowerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = find_case(line)
    problem = case.build()
    found = []
    for axis in (most, 2**31):
        limit(monkeypatch, axis)
        made = lowered(case, problem, ctx)
        assert not isinstance(made, PlanError)
        assert any(d.groups[1] > 1 for d in made if d.kernel.source == kernel) == (axis == most)
        found.append(run_problem(device, library, problem, ctx))
    for name, value in found[1].items():
        np.testing.assert_array_equal(found[0][name], value)


def test_the_gradient_of_many_tokens_by_a_large_matrix_is_planned() -> None:
    """The parts of its sums are added up with a thread for each of 8 M values, on devices that take 65535 workgroups."""
    ctx = planned_for("nvidia_rtx_3090_partial")
    assert ctx.caps.max_workgroup_count == (65535, 65535, 65535)
    dy, w = Tensor("dy", "F32", (2048, 128256), "input"), Tensor("w", "Q6_K", (128256, 4096), "weight")
    dx = Tensor("dx", "F32", (2048, 4096))
    made = OPS["MUL_MAT_BACK"].lower(Node("MUL_MAT_BACK", (dy, w), (dx,)), ctx)
    (total,) = (d for d in made if d.kernel.source == "sums/columns.comp")
    assert max(total.groups) <= 65535 < prod(total.groups)
