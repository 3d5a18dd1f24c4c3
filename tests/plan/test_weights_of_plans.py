"""Programs use the weights that are loaded: those of the plans of one token and of the smallest prompt (`Engine._tensors`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from kernel_paths import planned_for
from tiny_models import ENCODERS, TINY, of_a_kind

from vkback.graph import Node, Tensor
from vkback.models import Model
from vkback.models.builder import Head
from vkback.models.synth import outline
from vkback.models.texts import POOLINGS, Texts, ranks
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.linear_node import weight
from vkback.ops.op import OPS
from vkback.plan.exact import exact_context
from vkback.plan.planner import plan
from vkback.program import Program

PROFILES = of_a_kind(
    ("nvidia_h200_linux", "llvmpipe_mesa_22_debian12", "amd_rx_7900_xtx_radv"), ("nvidia_h200_linux", "llvmpipe_mesa_22_debian12")
)
"""With matrices and without."""


def weights(model: Model, ctx: LowerContext, n: int, head: Head) -> set[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the weights that a program uses."""
    tensors = plan(model.graph(n, 64, head=head), ctx).tensors().values()
    return {(t.name, t.shape) for t in tensors if t.kind == "weight"}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("shape", of_a_kind(TINY))
def test_programs_of_any_size_use_the_weights_that_are_loaded(shape: str, profile: str, exact: bool) -> None:
    model, ctx = Model.of(outline(f"{shape}-Q8_0")), planned_for(profile)
    ctx = exact_context(ctx) if exact else ctx
    loaded = weights(model, ctx, 1, "last") | weights(model, ctx, 2, "none")
    for n, head in ((2, "last"), (2, "all"), (8, "none"), (16, "all"), (17, "all"), (64, "last"), (512, "none")):
        assert weights(model, ctx, n, cast(Head, head)) <= loaded, (n, head)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("shape", [*ENCODERS, "tiny-llama", "tiny-qwen3", "tiny-deepseek2", "tiny-gemma3", "tiny-qwen3moe", "tiny-gpt2"])
def test_programs_of_whole_texts_use_the_weights_that_are_loaded(shape: str, profile: str) -> None:
    model, ctx = Model.of(outline(f"{shape}-Q8_0")), planned_for(profile)

    def of_texts(n: int, texts: Texts) -> set[tuple[str, tuple[int, ...]]]:
        tensors = plan(model.text_graph(n, 64, texts), ctx).tensors().values()
        return {(t.name, t.shape) for t in tensors if t.kind == "weight"}

    loaded = {weight for texts in model.text_kinds() for weight in of_texts(16, texts)}
    if model.architecture.causal:
        loaded |= weights(model, ctx, 1, "last") | weights(model, ctx, 16, "none")
    for pooling in [p for p in POOLINGS if p != "rank" or ranks(model.hp)]:
        for n, texts in ((16, 1), (64, 64), (512, 1), (512, 64)):
            assert of_texts(n, Texts(texts, pooling)) <= loaded, (n, texts, pooling)


def test_a_weight_that_was_not_loaded_is_named() -> None:
    w, x, y = weight("blk.0.other.weight", "Q8_0", (32, 64)), Tensor("x", "F32", (1, 64), "input"), Tensor("y", "F32", (1, 32))
    dispatches = OPS["MUL_MAT"].lower(Node("MUL_MAT", (w, x), (y,)), planned_for("nvidia_h200_linux"))
    program: Any = SimpleNamespace(_weights={}, _ranges={})
    (bound,) = (a for a in dispatches[-1].args if a.tensor.kind == "weight")
    with pytest.raises(PlanError, match=r"blk\.0\.other\.weight Q8_0\[32, 64\]: not among the weights that were loaded; expected a plan"):
        Program._bind(program, bound)
