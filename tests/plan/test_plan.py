"""Schedules without a GPU: what fusion makes of both architectures, hazards, the memory plan, and the limits of every recorded device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for, with_params
from make_gguf import llama_metadata, llama_tensors, write_gguf
from model_files import BUILT_IN
from plan_kit import LARGE, Kind, check_device_limits, schedule

from vkback.device import Capabilities, profile_ids
from vkback.device.spirv import inspect
from vkback.graph import Graph, Node, Tensor, live
from vkback.models import Model
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.lowering import PlanError
from vkback.ops.storage import nbytes
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule, allocate, into_stages, with_side_results_late
from vkback.plan.sync import ARRIVALS, STATE
from vkback.shader import ShaderLibrary, Variant

# --- invariants of any schedule -----------------------------------------------------------------------------------------------------


def overlap(a: tuple[str, str], b: tuple[str, str]) -> bool:
    """Whether two (tensor, part) may be the same memory."""
    return a[0] == b[0] and (a[1] == b[1] or not a[1] or not b[1])


def conflict(a: Dispatch, b: Dispatch) -> bool:
    """Whether two dispatches must not run at once. Any of them may set the state word of the spin-waits, and count in one word."""
    touched = [*product(a.writes, b.writes | b.reads), *product(b.writes, a.reads)]
    return any(overlap(w, t) for w, t in touched if w[0] != STATE.name and not w[0].endswith(ARRIVALS))


def check_hazards(s: Schedule) -> None:
    """No two dispatches of a stage touch the same part with a write, and what a stage reads of a node an earlier one has written."""
    written: set[str] = set()
    for stage in s.stages:
        for a, b in combinations(stage, 2):
            assert not conflict(a, b), f"{a.label} and {b.label} run in one stage"
        for d in stage:
            for arg in d.args:
                if arg.access == "r" and arg.tensor.kind == "node":
                    assert arg.tensor.name in written, f"{d.label} reads {arg.tensor.name} before it is written"
        written |= {name for d in stage for name, _ in d.writes}


def check_memory(s: Schedule) -> None:
    """Every node has memory of its size, and no two that are alive in the same stage share any."""
    stages: dict[str, list[int]] = {}
    for i, stage in enumerate(s.stages):
        for d in stage:
            for arg in d.args:
                if arg.tensor.kind == "node":
                    stages.setdefault(arg.tensor.name, []).append(i)
                    slot = s.slots[arg.tensor.name]
                    assert slot.size >= nbytes(arg.tensor) and slot.offset % 256 == 0 and slot.offset + slot.size <= s.activation_bytes
    for a, b in combinations(stages, 2):
        if min(stages[a]) <= max(stages[b]) and min(stages[b]) <= max(stages[a]):
            x, y = s.slots[a], s.slots[b]
            assert x.offset + x.size <= y.offset or y.offset + y.size <= x.offset, f"{a} and {b} are alive together and overlap"


# --- fusion -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("fusion", ["all", "none"])
@pytest.mark.parametrize("kind", ["greedy", "sample", "prompt"])
def test_schedules_have_no_hazard_and_no_overlap(name: str, kind: Kind, fusion: str, models: Callable[[str], Model]) -> None:
    for profile in ("nvidia_h200_linux", "llvmpipe_mesa_22_debian12", "broadcom_v3d_7_1_pi5"):
        s = schedule(models(name), planned_for(profile), kind, fusion=fusion)
        check_hazards(s)
        check_memory(s)


def test_a_token_of_the_dense_model_takes_five_stages_a_layer(models: Callable[[str], Model]) -> None:
    """Embedding and angles, then products of Q, K and V, attention, its output, gate with up, down; in the end output and argmax."""
    s = schedule(models("demo-dense"), planned_for("nvidia_h200_linux"), "greedy")
    assert len(s.stages) == 1 + 5 * 6 + 2
    # V has a type of its own in two of the layers; there Q with K and V are two dispatches of one stage.
    assert Counter(d.op for d in s.dispatches()) == {
        "GET_ROWS": 1,
        "ROPE_ANGLES": 1,
        "LINEAR": 4 * 6 + 2 + 1,
        "ATTN_DECODE": 6,
        "SAMPLE": 1,
    }
    layers = [[d.label for stage in s.stages[first : first + 5] for d in stage] for first in (1, 11)]
    assert layers[0] == ["Qcur_rope-0.qkv", "kqv_out-0", "ffn_inp-0", "ffn_swiglu-0", "l_out-0"]
    assert layers[1] == ["Qcur_rope-2.qkv", "Qcur_rope-2.qkv", "kqv_out-2", "ffn_inp-2", "ffn_swiglu-2", "l_out-2"]
    assert s.tensors()["blk.1.ffn_gate.weight+blk.1.ffn_up.weight"].shape == (2 * models("demo-dense").hp.n_ff, 256)


def test_biases_cost_no_stage(tmp_path: Path) -> None:
    """A bias on every product, gate and up included, changes nothing of the five stages a layer."""
    path = write_gguf(tmp_path / "biased.gguf", "llama", llama_metadata(), llama_tensors(biases=True))
    s = schedule(Model.open(path), planned_for("nvidia_h200_linux"), "greedy", n_ctx=32)
    assert len(s.stages) == 1 + 5 * 2 + 2
    assert {"blk.0.ffn_gate.bias+blk.0.ffn_up.bias", "blk.0.attn_q.bias+blk.0.attn_k.bias+blk.0.attn_v.bias"} <= s.tensors().keys()


def test_a_token_of_the_expert_model_takes_seven_stages_a_layer(models: Callable[[str], Model]) -> None:
    """Embedding and angles, then products of Q, K and V, attention, its output, router logits, gate with up of the experts it chooses,
    the rounding of their results, down with the sum; in the end output and argmax."""
    s = schedule(models("demo-moe"), planned_for("nvidia_h200_linux"), "greedy")
    layers = models("demo-moe").hp.n_layer
    assert len(s.stages) == 1 + 7 * layers + 2
    assert Counter(d.op for d in s.dispatches()) == {
        "GET_ROWS": 1,
        "ROPE_ANGLES": 1,
        "LINEAR": 5 * layers + 1,
        "ATTN_DECODE": layers,
        "QUANTIZE_Q8_1": layers,
        "SAMPLE": 1,
    }


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_prompt_s_stages_do_not_grow_with_its_tokens(name: str, models: Callable[[str], Model]) -> None:
    """By matrices, where packing activations takes a stage of its own and experts of few tokens go by GEMV, and by GEMV alone."""
    ctx = planned_for("nvidia_h200_linux")
    for rows_known, counts in ((None, (6, 16)), (0, (2, 16))):
        use = dataclasses.replace(ctx, row_lanes=rows_known)
        sizes = [plan(models(name).graph(n, 64, head="none"), use) for n in counts]
        assert len(sizes[0].stages) == len(sizes[1].stages)
    # Norms, RoPE with the cache stores and the quantization of what several products read have stages of their own there.
    ops = Counter(d.op for d in sizes[1].dispatches())
    layers = models(name).hp.n_layer
    assert ops["FLASH_ATTN_EXT"] == layers - 1 and ops["QKV_ROPE_SET_ROWS"] == layers - 1
    # The last layer only fills its cache.
    assert [d.label for d in sizes[1].stages[-1]] == [f"cache_k_l{layers - 1}"]


@pytest.mark.parametrize("name", LARGE)
def test_real_shapes_take_the_same_stages_a_layer(name: str, models: Callable[[str], Model]) -> None:
    model = models(name)
    s = schedule(model, planned_for("nvidia_h200_linux"), "greedy")
    assert len(s.stages) == 1 + (6 if model.hp.n_expert else 5) * model.hp.n_layer + 2
    # Activations of one token, and what attention's workgroups leave for each other in each layer, are small beside the weights.
    assert s.activation_bytes < 16 << 20
    # Every weight of the file is read once, experts as many as are used; the embedding is a row.
    layer = [d for d in s.dispatches() if d.op == "LINEAR" and ("-5" in d.label)]
    assert {a.tensor.type for d in layer for a in d.args if a.tensor.kind == "weight"} <= {"Q4_K", "Q5_K", "Q6_K", "F32"}


@pytest.mark.parametrize(("by", "attention", "glu"), [("producer", "Q8_1", "Q8_1"), ("attention", "Q8_1", "F32"), ("stage", "F32", "F32")])
def test_the_tables_say_who_rounds_activations(by: str, attention: str, glu: str, models: Callable[[str], Model]) -> None:
    ctx = with_params(planned_for("nvidia_h200_linux"), quantize=by)
    made = {d.label: d.args for d in schedule(models("demo-dense"), ctx, "greedy").dispatches()}
    assert made["kqv_out-0"][4].tensor.type == attention
    assert made["ffn_swiglu-0"][2].tensor.type == glu
    assert ("kqv_out-0.q8_1" in made, "ffn_swiglu-0.q8_1" in made) == (attention == "F32", glu == "F32")


def test_without_fusion_each_node_is_an_op_of_the_graph(models: Callable[[str], Model]) -> None:
    graph = models("demo-moe").graph(1, 64, head="last")
    s = plan(graph, planned_for("nvidia_h200_linux"), fusion="none")
    assert {d.op for d in s.dispatches()} - {"QUANTIZE_Q8_1", "ROPE_ANGLES"} == {n.op for n in graph.nodes} - {"VIEW"}
    assert not any(a.tensor.name.count(".weight") > 1 for d in s.dispatches() for a in d.args)


# --- devices ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", profile_ids())
def test_every_recorded_device_runs_the_models_within_its_limits(profile: str, models: Callable[[str], Model]) -> None:
    ctx = planned_for(profile)
    for name in (*BUILT_IN, *(f"{large}:4" for large in LARGE)):
        for kind in ("greedy", "sample", "prompt"):
            if name.startswith("qwen3moe-30b") and ctx.caps.max_storage_buffer_range < 256 << 20:
                with pytest.raises(PlanError, match=r"its experts take \d+ bytes, the device binds at most 134217728 bytes at once"):
                    schedule(models(name), ctx, kind)
                continue
            s = schedule(models(name), ctx, kind)
            check_hazards(s)
            check_device_limits(s, ctx.caps)


STRICT = ("broadcom_v3d_4_2_pi4", "arm_mali_g57_arm", "apple_m1_moltenvk", "apple_m1_kosmickrisp")
"""Where shared memory, threads or subgroup operations are scarcest, and where a driver makes Metal of SPIR-V."""


def test_shaders_stay_within_what_strict_devices_have(models: Callable[[str], Model], library: ShaderLibrary) -> None:
    """Threads, shared memory and features as the compiled modules declare them."""
    wanted: dict[Variant, set[str]] = {}
    for profile in STRICT:
        for name in BUILT_IN:
            for kind in ("greedy", "prompt"):
                for d in schedule(models(name), planned_for(profile), kind).dispatches():
                    wanted.setdefault(d.kernel, set()).add(profile)
    for variant, spirv in library.compile_many(wanted).items():
        module = inspect(spirv)
        for profile in wanted[variant]:
            caps = Capabilities.from_profile(profile)
            threads = module.workgroup_size({})
            assert np.prod(threads) <= caps.max_workgroup_invocations, (profile, variant.name)
            assert all(t <= most for t, most in zip(threads, caps.max_workgroup_size, strict=True)), (profile, variant.name)
            assert module.missing(caps) == [], (profile, variant.name)
            assert module.shared_bytes <= caps.max_shared_memory, (profile, variant.name)


def test_limits_are_said_with_node_and_cure(models: Callable[[str], Model]) -> None:
    ctx = planned_for("llvmpipe_mesa_22_debian12")
    with pytest.raises(PlanError, match=r"cache_k_l0 F16\[2, 600000, 64\].* 153600000 bytes.*binds at most 134217728 .*a smaller context"):
        schedule(models("demo-dense"), ctx, "greedy", n_ctx=600000)

    def refused(n_ctx: int = 64, **changes: Any) -> str:
        with pytest.raises(PlanError) as e:
            schedule(models("demo-dense"), dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, **changes)), "greedy", n_ctx=n_ctx)
        return str(e.value).partition(": ")[2]

    assert refused(max_storage_bindings=2) == "3 storage buffers, the device takes 2 (maxPerStageDescriptorStorageBuffers)"
    assert refused(max_push_constants=8).endswith("bytes of push constants, the device takes 8")
    limit = "workgroups, the device takes (8, 8, 8) (maxComputeWorkGroupCount)"
    assert refused(max_workgroup_count=(8, 8, 8)).endswith(f"{limit}; take fewer tokens at once")
    assert "64 rows exceed the 4096 bytes" in refused(n_ctx=16, max_storage_buffer_range=4096), "a cache that fits"


def test_weights_beyond_the_range_are_cut_into_shards(models: Callable[[str], Model]) -> None:
    ctx = planned_for("llvmpipe_mesa_22_debian12")
    small = dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, max_storage_buffer_range=200_000))
    s = schedule(models("demo-dense"), small, "greedy", n_ctx=64)
    check_hazards(s)
    check_memory(s)
    check_device_limits(s, small.caps)
    # 4096 rows of 256 Q6_K weights: 860 kB in five pieces, whose rows of the logits do not overlap and so share a stage.
    logits = [d for d in s.dispatches() if d.label == "result_output"]
    assert len(logits) == 5 and len({a.part for d in logits for a in d.args if a.tensor.name == "result_output"}) == 5
    assert logits == s.stages[-2]


# --- stages and memory on their own -------------------------------------------------------------------------------------------------


def random_dispatches(rng: np.random.Generator, count: int) -> Iterator[Dispatch]:
    """Dispatches over few tensors, so that every kind of hazard comes up; some touch parts."""
    for i in range(count):
        args = tuple(
            Arg(Tensor(f"t{t}", "F32", (int(rng.integers(1, 300)),)), str(rng.choice(["r", "w", "rw"])), 0, str(rng.choice(["", "a", "b"])))  # type: ignore[arg-type]
            for t in rng.choice(6, 3, replace=False)
        )
        yield Dispatch(Variant("none.comp"), args, b"", (1, 1, 1), "TEST", f"d{i}")


@pytest.mark.parametrize("seed", range(20))
def test_stages_keep_the_order_of_everything_that_touches(seed: int) -> None:
    dispatches = list(random_dispatches(np.random.default_rng(seed), 40))
    stages = into_stages(dispatches)
    stage_of = {id(d): i for i, stage in enumerate(stages) for d in stage}
    assert len(stage_of) == len(dispatches)
    for a, b in combinations(dispatches, 2):
        if conflict(a, b):
            assert stage_of[id(a)] < stage_of[id(b)]
    # And none later than it must: it waits for something in the stage before.
    for d in dispatches:
        before = [e for e in dispatches[: dispatches.index(d)] if conflict(e, d)]
        assert stage_of[id(d)] == max((stage_of[id(e)] + 1 for e in before), default=0)


@pytest.mark.parametrize("seed", range(20))
def test_what_leads_to_no_output_runs_as_late_as_it_may(seed: int) -> None:
    dispatches = list(random_dispatches(np.random.default_rng(seed), 40))
    stages = into_stages(dispatches)
    late = with_side_results_late(stages, ["t0"])
    before, after = ({id(d): i for i, stage in enumerate(s) for d in stage} for s in (stages, late))
    assert len(stages) == len(late) and before.keys() == after.keys()
    for a, b in combinations(dispatches, 2):
        if conflict(a, b):
            assert after[id(a)] < after[id(b)]
    wanted, needed = {"t0"}, set()
    for d in (d for stage in reversed(stages) for d in stage):
        if any(name in wanted for name, _ in d.writes):
            needed.add(id(d))
            wanted |= {name for name, _ in d.reads}
    for i, d in enumerate(dispatches):
        if id(d) in needed:
            assert after[id(d)] == before[id(d)]
        else:
            behind = [after[id(e)] for e in dispatches[i + 1 :] if conflict(d, e)]
            assert after[id(d)] == min(behind, default=len(stages)) - 1


@pytest.mark.parametrize("seed", range(20))
def test_tensors_alive_together_lie_apart(seed: int) -> None:
    stages = into_stages(list(random_dispatches(np.random.default_rng(seed), 12)))
    slots, size = allocate(stages, ["t0"])
    check_memory(Schedule(stages, slots, size))
    kept = slots["t0"]
    first = min(i for i, stage in enumerate(stages) for d in stage for a in d.args if a.tensor.name == "t0")
    later = {a.tensor.name for stage in stages[first:] for d in stage for a in d.args} - {"t0"}
    assert all(slots[n].offset + slots[n].size <= kept.offset or kept.offset + kept.size <= slots[n].offset for n in later)


def test_memory_is_given_again() -> None:
    """A chain of tensors of one size needs two of them at a time."""
    chain = [Tensor(f"t{i}", "F32", (100,)) for i in range(9)]
    dispatches = [Dispatch(Variant("none.comp"), (Arg(a), Arg(b, "w")), b"", (1, 1, 1), "TEST", b.name) for a, b in pairwise(chain)]
    _, size = allocate(into_stages(dispatches))
    assert size == 2 * 512


def test_nodes_nobody_needs_are_dropped() -> None:
    x, state = Tensor("x", "F32", (4,), "input"), Tensor("cache", "F16", (4,), "state")
    a, b, c = (Tensor(n, "F32", (4,)) for n in "abc")
    nodes = [Node("SILU", (x,), (a,)), Node("SILU", (a,), (b,)), Node("SILU", (x,), (c,)), Node("SET_ROWS", (c, state), (state,))]
    assert [n.name for n in live(nodes, [a])] == ["a", "c", "cache"]
    assert [n.name for n in live(nodes, ())] == ["c", "cache"]
    assert [n.name for n in live(nodes, [b])] == ["a", "b", "c", "cache"]


def test_an_unknown_op_is_named() -> None:
    graph = Graph()
    y = graph.emit("WARP", "y", "F32", (4,), (Tensor("x", "F32", (4,), "input"),))
    graph.outputs = (y,)
    with pytest.raises(PlanError, match=r"\[plan\] y: op WARP has no kernel; known are ABS, ACC, ADD, "):
        plan(graph, planned_for("nvidia_h200_linux"))


def test_activations_lie_in_blocks_of_the_largest_buffer() -> None:
    """No tensor lies in two blocks, tensors that live at once nowhere share a byte, and blocks hold all of them."""
    tensors = [Tensor(f"t{i}", "F32", (n,)) for i, n in enumerate((700, 500, 900, 100, 800, 300))]
    made = [[Dispatch(Variant("norm/norm.comp"), (Arg(t, "w"),), b"", (1, 1, 1), "X", t.name)] for t in tensors]
    readers = [Dispatch(Variant("norm/norm.comp"), tuple(Arg(t) for t in tensors), b"", (1, 1, 1), "X", "last")]
    slots, size = allocate([*made, readers], block=4096)
    assert all(s.offset // 4096 == (s.offset + s.size - 1) // 4096 for s in slots.values())
    ordered = sorted(slots.values(), key=lambda s: s.offset)
    assert all(a.offset + a.size <= b.offset for a, b in pairwise(ordered))
    assert Schedule([], slots, size, block_bytes=4096).blocks == [4096] * (size // 4096) + [size % 4096] * (size % 4096 > 0)
    assert size > 4096
