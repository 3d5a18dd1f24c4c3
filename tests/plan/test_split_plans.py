"""Plans of layers on two devices beside those of all layers on one: which kernels differ where a model is cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kernel_paths import planned_for

from vkback.engine.engine import cache_types
from vkback.engine.load_options import LoadOptions
from vkback.engine.plans import Plans
from vkback.graph import Part
from vkback.models import Model
from vkback.ops.dispatch import Dispatch
from vkback.plan.schedule import Schedule

H200 = "nvidia_h200_linux"
NEW = {"ROPE_ANGLES"}
"""What each device computes for itself."""


def all_and_parts(model: Model, tokens: int) -> tuple[Schedule, list[Schedule]]:
    """The schedule of one device, and those of two halves."""
    n, ctx, options = model.hp.n_layer, planned_for(H200), LoadOptions(ctx=4608)
    found = []
    for part in (None, Part(0, n // 2, n), Part(n // 2, n, n)):
        plans = Plans(model, ctx, 4608, fusion="all", cache=cache_types(model, options), part=part)
        found.append(plans.token("logits") if tokens == 1 else plans.prompt(tokens, "none"))
    return found[0], found[1:]


def launched(d: Dispatch) -> tuple[Any, ...]:
    """All that a launch's bits depend on, by its node."""
    # Angles of RoPE are numbered as they come, and each device computes its own.
    names = ["rope_angles" if a.tensor.name.startswith("rope_angles.") else a.tensor.name for a in d.args]
    bound = tuple((name, a.tensor.type, a.tensor.shape, a.access, a.part) for name, a in zip(names, d.args, strict=True))
    return d.label, d.op, d.kernel, d.push, d.groups, bound


def differing(model: Model, tokens: int) -> set[str]:
    """Nodes whose kernels, launches or operands are not those of one device."""
    one, parts = all_and_parts(model, tokens)
    whole = Counter(launched(d) for d in one.dispatches())
    cut = Counter(launched(d) for part in parts for d in part.dispatches())
    return {label for label, op, *_ in ((whole - cut) + (cut - whole)) if op not in NEW}


@pytest.mark.parametrize("name", ["llama-8b-Q4_K_S", "gpt-oss-20b-MXFP4", "qwen35-9b-Q4_K_S", "gemma3-1b-Q4_K_S"])
def test_a_token_over_two_h200_has_the_kernels_of_one(name: str, models: Callable[[str], Model]) -> None:
    model = models(name)
    assert differing(model, 1) == set()
    one, (first, second) = all_and_parts(model, 1)
    barriers = [len(s.stages) - len(s.barrier_free) for s in (one, first, second)]
    assert len(set(barriers)) == 1 and all(stage for s in (one, first, second) for stage in s.stages)


def test_what_crosses_is_spun_on_and_is_never_the_sentinel(models: Callable[[str], Model]) -> None:
    """The second device's first product is the one that spin-waits, behind a barrier; the first device's last stores no SENTINEL."""
    _, (first, second) = all_and_parts(models("llama-8b-Q4_K_S"), 1)
    (last,) = [d for d in first.dispatches() if d.label == "l_out-15"]
    (reads,) = [d for d in second.dispatches() if d.label == "Qcur_rope-16.qkv"]
    assert dict(last.kernel.defines)["SYNC_SENTINEL"] == 1 and dict(reads.kernel.defines)["SPINS"] == 1
    assert 1 not in second.barrier_free and reads in second.stages[1] and "l_out-15" not in second.sentinel_tensors


@pytest.mark.parametrize("tokens", [512, 256, 128])
def test_a_prompt_over_two_h200_has_the_kernels_of_one(tokens: int, models: Callable[[str], Model]) -> None:
    assert differing(models("llama-8b-Q4_K_S"), tokens) == set()


@pytest.mark.parametrize("tokens", [64, 32, 16])
def test_few_tokens_differ_at_the_border_alone(tokens: int, models: Callable[[str], Model]) -> None:
    """The product before the border does not norm what the next one reads: a kernel of its own does, from the rows that cross."""
    assert differing(models("llama-8b-Q4_K_S"), tokens) == {"l_out-15", "attn_norm-16.units", "Qcur_rope-16.qkv"}
