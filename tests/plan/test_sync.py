"""Barrier-free stages: which stages are, where the tensors lie that they spin on, and that nothing but time depends on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for, with_params
from model_files import BUILT_IN
from plan_kit import LARGE, check_device_limits, schedule
from tiny_models import of_a_kind

from vkback.device import Capabilities, Device, profile_ids
from vkback.device.spirv import inspect
from vkback.engine.engine import Engine, cache_types
from vkback.engine.load_options import LoadOptions
from vkback.engine.plans import Plans
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.graph import Tensor
from vkback.harness.runner import Workbench, prepare
from vkback.models import Model
from vkback.ops.cooperative_matrix import matrix_shapes
from vkback.ops.dispatch import Arg, Dispatch, SpinWaits
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.linear_cases import fused_case
from vkback.ops.storage import nbytes
from vkback.paths import builtin_model, shader_root
from vkback.plan.cost.forecast import Costs, Wait, predicted_us, waits
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.plan.sync import ARRIVALS, SENTINEL, STATE, without_barriers
from vkback.program import Program
from vkback.shader import ShaderLibrary, Variant
from vkback.timing.stages import loaded
from vkback.tuning.lookup import Overrides, Tuning, device_table

GRAPHS = (*BUILT_IN, *(f"{large}:4" for large in (*LARGE, "gpt-oss-20b-MXFP4")))
N_CTX = 64

A, B, C = (Tensor(name, "F32", (8,)) for name in "abc")


def sentinel(profile: str, router: str = "gemv") -> LowerContext:
    return with_params(planned_for(profile), sync="sentinel", router=router)


# --- which stages are barrier-free ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", ["gemv", "experts"])
@pytest.mark.parametrize("name", GRAPHS)
def test_all_stages_of_a_token_are_barrier_free_but_the_ends(name: str, router: str, models: Callable[[str], Model]) -> None:
    """Memory is filled beside the embedding and the angles, so nobody can spin on them; and the sampler has no spin-waits."""
    s = schedule(models(name), sentinel("nvidia_h200_linux", router), "greedy")
    assert s.barrier_free == set(range(2, len(s.stages) - 1))
    rounding = sum(d.op == "QUANTIZE_Q8_1" for d in s.dispatches())
    assert len(s.barrier_free) == (6 if models(name).hp.n_expert else 5) * models(name).hp.n_layer + rounding
    for i, stage in enumerate(s.stages):
        for d in stage:
            defines = dict(d.kernel.defines)
            assert defines.get("SPINS", 0) == int(i in s.barrier_free)
            assert defines.get("SYNC_SENTINEL", 0) == int(i in s.barrier_free or i + 1 in s.barrier_free)
            assert (defines.get("BIND_SYNC_STATE") is not None) == (i in s.barrier_free)
            if i in s.barrier_free:
                assert d.args[int(defines["BIND_SYNC_STATE"])].tensor == STATE


@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_spun_on_lies_apart(name: str, models: Callable[[str], Model]) -> None:
    s = schedule(models(name), sentinel("nvidia_h200_linux"), "greedy")
    end = s.sentinel_range.offset + s.sentinel_range.size
    assert end == s.activation_bytes
    apart = {n: s.slots[n] for n in s.sentinel_tensors}
    assert sum(slot.size for slot in apart.values()) == s.sentinel_range.size
    for slot in apart.values():
        assert s.sentinel_range.offset <= slot.offset and slot.offset + slot.size <= end
    assert all(slot.offset + slot.size <= s.sentinel_range.offset for n, slot in s.slots.items() if n not in apart)
    assert all(a.offset + a.size <= b.offset or b.offset + b.size <= a.offset for a, b in combinations(apart.values(), 2))
    spun_on = {n for i in s.barrier_free for d in s.stages[i] if d.waits for n in (*d.waits.whole, *d.waits.part, *d.waits.own)}
    assert spun_on <= apart.keys()
    assert all(s.slots[t.name].size >= nbytes(t) for t in s.tensors().values() if t.name in apart)


@pytest.mark.parametrize("kind", ["greedy", "prompt"])
@pytest.mark.parametrize("name", GRAPHS)
def test_memory_is_reused_behind_a_barrier(name: str, kind: Any, models: Callable[[str], Model]) -> None:
    """Between two barriers stages of one branch may run beside later ones of another."""
    s = schedule(models(name), sentinel("nvidia_h200_linux"), kind)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    runs = np.cumsum([i not in s.barrier_free for i in range(len(s.stages))]).tolist()
    for i, stage in enumerate(s.stages):
        for tensor in (a.tensor.name for d in stage for a in d.args if a.tensor.name in s.slots):
            first.setdefault(tensor, runs[i])
            last[tensor] = runs[i]
    order = sorted(first, key=lambda tensor: s.slots[tensor].offset)
    for i, a in enumerate(order):
        for b in order[i + 1 :]:
            if s.slots[b].offset >= s.slots[a].offset + s.slots[a].size:
                break
            assert last[a] < first[b] or last[b] < first[a], (a, b)


@pytest.mark.parametrize("name", BUILT_IN)
def test_long_prompts_and_single_ops_keep_their_barriers(name: str, models: Callable[[str], Model]) -> None:
    ctx = sentinel("nvidia_h200_linux")
    prompt = models(name).graph(128, N_CTX, head="none")
    assert plan(prompt, ctx) == plan(prompt, with_params(ctx, sync="barrier"))
    alone = schedule(models(name), ctx, "greedy", n_ctx=N_CTX, fusion="none")
    assert not alone.barrier_free and not alone.sentinel_tensors and not alone.sentinel_range.size


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_all_stages_of_a_few_tokens_are_barrier_free_but_the_ends(n: int, models: Callable[[str], Model]) -> None:
    """As the tables have it: two stages, then five a layer and the head. Products wait for the arrivals of the stage that stores their
    activations, attention for those of the products of Q with K and of V together, which store the rows of its caches; or, where RoPE and
    store are a stage, for those of that, which spins on the words of Q, K and V."""
    model, tables = models("llama-8b-Q4_K_S:4"), planned_for("nvidia_h200_linux")
    for ctx, stages in ((tables, 5), (with_params(tables, rope="stage"), 6)):
        s = plan(model.graph(n, 4096, head="all"), ctx)
        assert s.barrier_free == set(range(2, len(s.stages))) and len(s.stages) == stages * 4 + 3
        check_arrivals(s)


def check_arrivals(s: Schedule) -> None:
    """Five dispatches a layer of four layers, and one ahead of them, are waited for, each by the arrivals that make the tensors."""
    writers = {a.tensor.name: d for d in s.dispatches() for a in d.args if "w" in a.access and not a.tensor.name.endswith(ARRIVALS)}
    counters = {name for name in s.tensors() if name.endswith(ARRIVALS)}
    assert len(counters) == 5 * 4 + 1 and counters <= s.sentinel_tensors
    assert not s.sentinel_tensors & s.counted_tensors
    for number in s.barrier_free:
        for d in s.stages[number]:
            assert d.waits is not None
            expected = dict(d.kernel.spec).get("EXPECTED") or dict(d.kernel.defines).get("EXPECTED")
            made = {id(writers[name]): writers[name].waits for name in d.waits.counted}
            assert expected == sum(w.arrives for w in made.values() if w) if made else d.waits.shares


def test_what_is_counted_lies_apart_and_is_not_filled(models: Callable[[str], Model]) -> None:
    s = plan(models("llama-8b-Q4_K_S:4").graph(8, 4096, head="all"), planned_for("nvidia_h200_linux"))
    slots = [s.slots[name] for name in s.counted_tensors]
    assert all(slot.offset + slot.size <= s.sentinel_range.offset for slot in slots)
    others = [slot for name, slot in s.slots.items() if name not in s.counted_tensors]
    assert all(a.offset + a.size <= b.offset or b.offset + b.size <= a.offset for a in slots for b in [*others, *slots] if a is not b)


def test_a_stage_of_its_own_for_the_norm_is_barrier_free(models: Callable[[str], Model]) -> None:
    """The norm spins on the product before it, the GEMVs after it on the norm: only what cannot, and what is beside it, has barriers."""
    s = schedule(models("demo-dense"), with_params(sentinel("nvidia_h200_linux"), sync="sentinel", norm="stage"), "greedy")
    cannot = {i for i, stage in enumerate(s.stages) if any(d.waits is None for d in stage)}
    norms = {i for i, stage in enumerate(s.stages) if any(d.op == "RMS_NORM_MUL" for d in stage)}
    assert len(norms) > 12 and len(norms - s.barrier_free) <= 1 and len(cannot) <= 2
    assert s.barrier_free == {i for i in range(2, len(s.stages)) if not {i - 1, i} & cannot}


OF_FEW = (
    "llama-8b-Q4_K_S",
    "gemma4-e4b-Q4_K_M",
    "gemma3n-e4b-Q4_K_M",
    "qwen35moe-35b-a3b-Q4_K_M",
    "nemotron-nano-9b-Q4_K_M",
    "gpt-oss-20b-MXFP4",
)


@pytest.mark.parametrize("columns", [1, 4, 16])
@pytest.mark.parametrize("name", OF_FEW)
def test_nobody_waits_for_what_a_later_stage_makes(name: str, columns: int, models: Callable[[str], Model]) -> None:
    """Layers of gemma4 that read the rows of an earlier one's cache once shared its counter: it waited for all of them, and timed out."""
    model = models(name)
    plans = Plans(model, planned_for("nvidia_h200_linux"), 1024, fusion="all", cache=cache_types(model, LoadOptions(ctx=1024)), slots=17)
    s = plans.token("greedy") if columns == 1 else plans.drafts(columns, "greedy")
    made: dict[str, int] = {}
    for i, d in ((i, d) for i, stage in enumerate(s.stages) for d in stage):
        made |= {a.tensor.name: i for a in d.args if "w" in a.access and a.tensor.kind in ("node", "counter")}
    waiting = [
        (i, name)
        for i in s.barrier_free
        for d in s.stages[i]
        for a in d.args
        if (name := a.tensor.name).endswith(ARRIVALS) and a.access == "r"
    ]
    waiting += [(i, name) for i in s.barrier_free for d in s.stages[i] if d.waits for name in d.waits.words if name not in d.waits.own]
    assert len(waiting) > model.hp.n_layer and all(made[name] < i for i, name in waiting)


D, E = Tensor("d", "F32", (8,)), Tensor("e", "F32", (8,))


def step(made: Tensor, *read: Tensor, whole: Sequence[Tensor] = (), part: Sequence[Tensor] = ()) -> Dispatch:
    """A launch that can spin on what it reads."""
    waits = SpinWaits(tuple(t.name for t in whole), tuple(t.name for t in part))
    args = (*map(Arg, dict.fromkeys((*read, *whole, *part))), Arg(made, "w"))
    return Dispatch(Variant("none.comp"), args, b"", (1, 1, 1), "TEST", made.name, waits=waits)


def planned(stages: list[list[Dispatch]], max_bindings: int = 8) -> Schedule:
    return without_barriers(Schedule(stages), max_bindings)


def start() -> list[list[Dispatch]]:
    """Two stages that always keep their barriers; the second makes a."""
    return [[], [step(A)]]


def test_a_chain_is_barrier_free() -> None:
    s = planned([*start(), [step(B, whole=[A])], [step(C, A, whole=[B])], [step(D, A, B, whole=[C])]])
    assert s.barrier_free == {2, 3, 4}
    assert s.sentinel_tensors == {"a", "b", "c"}
    assert all(w.spins == ("whole" if w.stage == i - 1 else "") for i, found in enumerate(waits(s)) for w in found)


def test_the_first_two_stages_keep_their_barriers() -> None:
    s = planned([[step(A)], [step(B, whole=[A])], [step(C, whole=[B])]])
    assert s.barrier_free == {2}
    assert s.sentinel_tensors == {"b"}


def test_a_tensor_without_a_happens_before_order_needs_a_barrier() -> None:
    """d is made beside b; to see b says nothing of d."""
    s = planned([*start(), [step(B, whole=[A]), step(D, whole=[A])], [step(C, D, whole=[B])]])
    assert s.barrier_free == {2}


def test_a_part_does_not_order_the_whole() -> None:
    stages = [*start(), [step(B, part=[A])], [step(C, A, whole=[B])]]
    assert planned(stages).barrier_free == {2}


def test_a_residual_is_spun_on_only_where_nothing_says_that_it_is_complete() -> None:
    """d reads what was made beside b, and b: it waits for words of both. Where b comes after it, or a barrier, it reads it."""

    def ends(*before: list[Dispatch]) -> tuple[bool, dict[str, str | int], tuple[str, ...]]:
        last = step(D, C, whole=[B])
        assert last.waits is not None
        last = dataclasses.replace(last, waits=dataclasses.replace(last.waits, also_part=("c",)))
        s = planned([*start(), *before, [last]])
        found = s.stages[-1][0]
        assert found.waits is not None
        return len(s.stages) - 1 in s.barrier_free, dict(found.kernel.defines), found.waits.part

    beside = [step(B, whole=[A]), step(C, whole=[A])]
    free, defines, part = ends(beside)
    assert free and defines["SPINS_ON_PARTS"] == 1 and part == ("c",)
    free, defines, part = ends([step(C, whole=[A])], [step(B, whole=[C])])
    assert free and "SPINS_ON_PARTS" not in defines and not part
    blind = dataclasses.replace(step(B, A), waits=None)
    free, defines, part = ends([step(C, whole=[A])], [blind])
    assert not free and "SPINS_ON_PARTS" not in defines and not part


def test_a_part_happens_after_what_all_its_writers_waited_for() -> None:
    """Two launches write c: one waited for a and b, one only for a. A part of c happens after a, the whole of c after both."""

    def barrier_free(*read: Tensor, **spun_on: Sequence[Tensor]) -> frozenset[int]:
        writers = [step(C, whole=[A, B]), step(C, whole=[A])]
        return planned([[], [step(A), step(B)], writers, [step(D, *read, **spun_on)]]).barrier_free

    assert barrier_free(A, part=[C]) == {2, 3}
    assert barrier_free(B, part=[C]) == {2}
    assert barrier_free(A, B, whole=[C]) == {2, 3}


def counting(made: Tensor, *read: Tensor, counted: Sequence[Tensor] = (), shares: Sequence[Tensor] = (), arrives: int = 3) -> Dispatch:
    """A launch that can count its arrivals, and wait for those of another."""
    d = step(made, *read, *counted, *shares)
    return dataclasses.replace(d, waits=SpinWaits(shares=names(shares), counted=names(counted), arrives=arrives))


def names(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(t.name for t in tensors)


def test_who_saw_all_arrive_knows_what_they_waited_for_together() -> None:
    """A word of b says nothing of the rest of a, of which its workgroups wait for shares; all arrivals say that a is complete."""
    s = planned([[], [counting(A)], [counting(B, shares=[A])], [counting(C, A, counted=[B])]])
    assert s.barrier_free == {2, 3}
    assert s.sentinel_tensors == {"a", "b.arrivals"} and s.counted_tensors == {"b"}
    made, reads = s.stages[2][0], s.stages[3][0]
    assert made.args[-2:] == (Arg(Tensor("b.arrivals", "I32", (16, 32)), "rw"), Arg(STATE, "rw"))
    assert dict(made.kernel.defines) == {"SYNC_SENTINEL": 1, "SPINS": 1, "ARRIVES": 1, "BIND_ARRIVALS": 2, "BIND_SYNC_STATE": 3}
    assert dict(reads.kernel.defines) == {"SYNC_SENTINEL": 1, "SPINS": 0, "EXPECTED": 3, "BIND_EXPECTED": 3, "BIND_SYNC_STATE": 4}
    assert planned([[], [counting(A)], [counting(B, shares=[A])], [step(C, A, part=[B])]]).barrier_free == {2}


def test_dispatches_that_are_waited_for_together_count_in_one_word() -> None:
    """All that make b and c."""

    def schedule_of(*makers: Dispatch, reads: Sequence[Tensor] = ()) -> Schedule:
        return planned([[], [counting(A), counting(E)], list(makers), [counting(D, *reads, counted=[B, C])]])

    def expected(s: Schedule) -> set[tuple[str, str | int]]:
        """The counter that the last stage waits for and its full count, and the counters of those that make b and c."""
        (last,) = s.stages[3]
        names = {(a.tensor.name, "") for d in s.stages[2] for a in d.args if a.tensor.name.endswith(ARRIVALS)}
        return names | {(a.tensor.name, dict(last.kernel.defines)["EXPECTED"]) for a in last.args if a.tensor.name.endswith(ARRIVALS)}

    both = dataclasses.replace(counting(B, shares=[A]), args=(Arg(A), Arg(B, "w"), Arg(C, "w")))
    assert schedule_of(both).barrier_free == {2, 3}
    apart = counting(B, shares=[A]), counting(C, shares=[E], arrives=5)
    for reads in ((), (A,), (E,)):
        assert schedule_of(*apart, reads=reads).barrier_free == {2, 3}
    assert expected(schedule_of(*apart)) == {("b.arrivals", ""), ("b.arrivals", 8)}
    assert expected(schedule_of(counting(B, shares=[A]), *apart)) == {("b.arrivals", ""), ("b.arrivals", 11)}
    assert schedule_of(counting(B, shares=[A], arrives=0), counting(C, shares=[A])).barrier_free == {2}


def test_consumers_of_other_dispatches_keep_their_own_counters() -> None:
    stages = [[], [counting(A)], [counting(B, shares=[A]), counting(C, shares=[A])], [counting(D, counted=[B]), counting(E, counted=[C])]]
    s = planned(stages)
    assert s.barrier_free == {2, 3}
    counters = [[a.tensor.name for a in d.args if a.tensor.name.endswith(ARRIVALS)] for d in (*s.stages[2], *s.stages[3])]
    assert counters == [["b.arrivals"], ["c.arrivals"], ["b.arrivals"], ["c.arrivals"]]


def test_arrivals_ahead_of_the_last_barrier_are_not_awaited() -> None:
    barrier = dataclasses.replace(step(E), waits=None)
    s = planned([[], [counting(A)], [barrier], [counting(B)], [counting(C, counted=[A], shares=[B])]])
    assert s.barrier_free == {4} and not s.counted_tensors
    assert "EXPECTED" not in dict(s.stages[4][0].kernel.defines)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_nobody_spins_on_a_tensor_written_twice(first: int) -> None:
    stages = [*start(), [step(B, whole=[A])], [step(C, whole=[B])], [step(E, whole=[C])], [step(D, whole=[E])]]
    stages[first] = [*stages[first], step(E)]
    s = planned(stages)
    assert not s.barrier_free & {4, 5}
    assert "e" not in s.sentinel_tensors


def test_nobody_spins_on_what_was_made_before_the_last_barrier() -> None:
    """It lies in memory that is not filled with SENTINEL, where that is a number like any other."""
    barrier = dataclasses.replace(step(B), waits=None)
    s = planned([*start(), [barrier], [step(C)], [step(D, whole=[C, A])]])
    assert not s.barrier_free
    s = planned([*start(), [barrier], [step(C)], [step(D, A, whole=[C])]])
    assert s.barrier_free == {4}


def test_a_kernel_without_room_for_the_state_keeps_its_barrier() -> None:
    stages = [*start(), [step(B, whole=[A])], [step(C, A, whole=[B])], [step(D, whole=[C])]]
    assert planned(stages, 4).barrier_free == {2, 3, 4}
    assert planned(stages, 3).barrier_free == {2, 4}


def test_many_layers_are_planned_quickly() -> None:
    """Each tensor has two writers, whose every path back must not be walked."""
    chain = [Tensor(f"t{i}", "F32", (8,)) for i in range(400)]
    stages = [[step(chain[i], whole=chain[max(i - 1, 0) : i]), step(chain[i], whole=chain[max(i - 1, 0) : i])] for i in range(400)]
    assert planned(stages).barrier_free == set(range(2, 400))


def test_a_barrier_free_stage_is_charged_less() -> None:
    costs = Costs(read_gb_s=100.0, stage_us=3.0, barrier_free_us=1.0, source="")
    stage = [dataclasses.replace(step(A), nbytes=200_000)]
    assert predicted_us(stage, costs, 1) == pytest.approx(5.0)
    assert predicted_us(stage, costs, 1, barrier_free=True) == pytest.approx(3.0)


def test_waits_tell_what_is_spun_on() -> None:
    s = planned([*start(), [step(B, part=[A])], [step(C, whole=[B])]])
    assert waits(s)[2:] == [[Wait(1, "a", "write", "part")], [Wait(2, "b", "write", "whole")]]


@pytest.mark.parametrize("profile", of_a_kind(profile_ids(), profile_ids()[::3]))
def test_every_recorded_device_plans_barrier_free_stages_within_its_limits(profile: str, models: Callable[[str], Model]) -> None:
    for name in (*BUILT_IN, "llama-8b-Q4_K_S:4", "gpt-oss-20b-MXFP4:4"):
        ctx = sentinel(profile)
        try:
            schedule(models(name), planned_for(profile), "greedy")
        except PlanError:  # a tensor beyond the device's range, whatever the stages do
            continue
        s = schedule(models(name), ctx, "greedy")
        check_device_limits(s, ctx.caps)
        assert all(d.waits for i in s.barrier_free for d in (*s.stages[i - 1], *s.stages[i]))


def test_kernels_that_spin_stay_within_the_poorest_devices(models: Callable[[str], Model], library: ShaderLibrary) -> None:
    """x goes through shared memory, as the compiled modules declare it."""
    caps = Capabilities.from_profile("broadcom_v3d_4_2_pi4")
    kernels = {d.kernel for name in BUILT_IN for d in schedule(models(name), sentinel("broadcom_v3d_4_2_pi4"), "greedy").dispatches()}
    for variant, spirv in library.compile_many(sorted(kernels, key=repr)).items():
        assert inspect(spirv).shared_bytes <= caps.max_shared_memory, variant.name


# --- on a device --------------------------------------------------------------------------------------------------------------------

RUNS = [("demo-dense", "gemv", "attention"), ("demo-moe", "gemv", "producer"), ("demo-moe", "experts", "attention")]
TOKENS = (1, 17, 300, 5)


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def engines(request: pytest.FixtureRequest, device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """The same model with barriers and without; beyond 8 rows attention splits KV among workgroups, several threads read a split."""
    name, router, quantize = request.param
    loaded = []
    for sync in ("barrier", "sentinel"):
        folder = tmp_path_factory.mktemp(sync)
        choices = f'sync = "{sync}", router = "{router}", quantize = "{quantize}"'
        schedule_row = f'[[schedule]]\nset = {{ {choices} }}\nmeasured = "a test"\n'
        attention_row = '[[attention]]\nset = { kernel = "decode", wg_size = 64, groups = 64, rows_per_split = 8 }\nmeasured = "a test"\n'
        (folder / device_table(device.caps)).write_text(schedule_row + attention_row)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VKBACK_TUNING", str(folder))
            loaded.append(Engine.load(builtin_model(name), device, n_ctx=N_CTX, progress=False))
    assert not loaded[0].schedule("greedy").barrier_free and len(loaded[1].schedule("greedy").barrier_free) > 20
    attention = [
        dict(d.kernel.defines) for d in loaded[1].schedule("greedy").dispatches() if d.kernel.source.startswith("attention/decode")
    ]
    assert all(int(defines["READERS"]) > 1 for defines in attention)
    assert any(name.endswith(".splits") for name in loaded[1].schedule("greedy").sentinel_tensors)
    yield loaded[0], loaded[1]
    for engine in loaded:
        engine.close()


def logits(engine: Engine) -> np.ndarray:
    """Of every token in turn, as bits."""
    engine.reset()
    return np.stack([engine.decode_logits(t) for t in TOKENS]).view(np.uint32)


def with_defines(d: Dispatch, **defines: int) -> Dispatch:
    changed = {**dict(d.kernel.defines), **defines}
    return dataclasses.replace(d, kernel=dataclasses.replace(d.kernel, defines=tuple(sorted(changed.items()))))


def token_program(engine: Engine, kind: str) -> Program:
    return engine._token_programs.program(kind)


def timed_out(device: Device, program: Program) -> int:
    return int(device.download(program.range(STATE.name)).view(np.uint32)[0])


@pytest.mark.vulkan
def test_logits_are_the_same_bits(engines: tuple[Engine, Engine], device: Device) -> None:
    plain, barrier_free = engines
    expected = logits(plain)
    np.testing.assert_array_equal(logits(barrier_free), expected)
    np.testing.assert_array_equal(logits(barrier_free), expected)
    program = token_program(barrier_free, "logits")
    for garbage in (0, 0x7FC0DEAD, 0x3F800000):
        for name in program.schedule.slots:
            block = program.range(name)
            device.upload(block, np.full(block.size // 4, garbage, np.uint32))
        np.testing.assert_array_equal(logits(barrier_free), expected)
    assert timed_out(device, program) == 0


@pytest.mark.vulkan
def test_tokens_are_the_same(engines: tuple[Engine, Engine], device: Device) -> None:
    def tokens(engine: Engine) -> list[int]:
        engine.reset()
        engine.prompt(TOKENS)
        return list(engine.generate(7, 20, stop_at_eos=False))

    plain, barrier_free = engines
    assert tokens(barrier_free) == tokens(barrier_free) == tokens(plain)
    assert timed_out(device, token_program(barrier_free, "greedy")) == 0


@pytest.mark.vulkan
def test_prompts_of_few_tokens_are_the_same_bits(engines: tuple[Engine, Engine], caplog: pytest.LogCaptureFixture) -> None:
    """Also where the check of a program's first run fails: then they go on with barriers."""

    def prompt_logits(engine: Engine) -> np.ndarray:
        engine.reset()
        return engine.prompt_logits(TOKENS).view(np.uint32)

    def barrier_free_stages() -> frozenset[int]:
        ((_, planned),) = barrier_free.prompt_schedules(len(TOKENS))
        return planned.barrier_free

    plain, barrier_free = engines
    expected = prompt_logits(plain)
    assert barrier_free_stages()
    for _ in range(2):
        np.testing.assert_array_equal(prompt_logits(barrier_free), expected)
    assert not caplog.text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "array_equal", lambda *_: False)
        barrier_free.prompts.close()
        got = prompt_logits(barrier_free)
    np.testing.assert_array_equal(got, expected)
    assert "a prompt's stages cannot run barrier-free (a prompt's values differ" in caplog.text
    assert not barrier_free_stages()


@pytest.mark.vulkan
@pytest.mark.parametrize(("before", "n"), [(0, 5), (40, 5), (0, 19)])
def test_products_in_registers_wait_for_arrivals(before: int, n: int, device: Device, library: ShaderLibrary) -> None:
    """Five tokens and padding, or 19 in three tiles of columns, all stages barrier-free: the same bits as with barriers, and where RoPE and
    store are a stage; as close to the twin where no stage packs or norms as where they do. Behind rows of earlier steps attention loads its
    first chunk ahead of the wait."""
    if not matrix_shapes(device.caps):
        pytest.skip(f"{device.caps.name} has no cooperative matrices")
    model = Model.open(builtin_model("demo-dense"))
    ids = (17 * np.arange(1, n + 2) % model.hp.n_vocab).astype(np.int32)
    twin = NumpyTwin(model, n_ctx=N_CTX).logits(ids[:n].tolist())
    cut: dict[str, Any] = {"kernel": "coop_reg", "tile_m": 16, "tile_n": 8, "warp_m": 8, "slice_k": 2}
    found = []
    with ExitStack() as stack:
        for sync, pack, rope in (
            ("barrier", "producer", "product"),
            ("sentinel", "producer", "product"),
            ("sentinel", "producer", "stage"),
            ("sentinel", "gemm", "product"),
        ):
            schedule_params = {"sync": sync, "pack": pack, "rope": rope}
            params: dict[str, dict[str, Any]] = {"gemm": cut, "schedule": schedule_params, "attention": {"kernel": "decode"}}
            ctx = LowerContext(device.caps, Overrides(Tuning.for_device(device.caps), params, "test"))
            s = plan(model.graph(n + 1, N_CTX, head="all"), ctx)
            assert s.barrier_free == (set(range(2, len(s.stages))) if sync == "sentinel" else set())
            attention = [dict(d.kernel.defines) for d in s.dispatches() if d.kernel.source.startswith("attention/decode")]
            chunks = [int(a["STEPS"]) * int(a["WG_SIZE"]) // int(a["LANES"]) for a in attention]
            assert before == 0 or max(chunks) <= before
            assert ("rope/rope.comp" in {d.kernel.source for d in s.dispatches()}) == (rope == "stage")
            weights, ranges = loaded(model, s.tensors(), device, stack)
            program = Program(device, library, s, ranges, weights)
            stack.callback(program.close)
            device.upload(ranges["tokens"], ids)
            device.upload(ranges["pos"], np.array([*range(before, before + n), -1], np.int32))
            for t in (t for t in s.tensors().values() if t.kind == "state"):
                device.upload(ranges[t.name], np.random.default_rng(7).standard_normal(t.shape).astype(np.float16))
            commands = program.record("few tokens")
            runs = []
            for _ in range(2):  # the second run finds the first one's values, which are right
                device.submit(commands).wait(600)
                runs.append(device.download(program.range("result_output"), np.float32)[: n * model.hp.n_vocab].reshape(n, -1))
            assert not program.timed_out
            np.testing.assert_array_equal(runs[0].view(np.uint32), runs[1].view(np.uint32))
            found.append(runs[0])
    for others in found[1:3]:
        np.testing.assert_array_equal(found[0].view(np.uint32), others.view(np.uint32))
    assert before or all(nmse(got, twin) < 1e-5 for got in found)  # f16 operands: as KERNEL_NMSE of tests/prompt_kernels.py says


@pytest.mark.vulkan
def test_a_spin_wait_that_cannot_end_times_out(engines: tuple[Engine, Engine], device: Device, library: ShaderLibrary) -> None:
    """Only the second of two barrier-free stages is recorded: nobody fills its input."""
    engine = engines[1]
    whole = engine.schedule("decode")
    impatient = [with_defines(d, MAX_SPINS=100) for d in whole.stages[3]]
    alone = dataclasses.replace(whole, stages=[[], impatient], barrier_free=frozenset())
    program = Program(device, library, alone, {}, engine.weights)
    try:
        commands = program.record("alone")
        device.submit(commands).wait()
        assert timed_out(device, program) == 1
    finally:
        program.close()


@pytest.mark.vulkan
@pytest.mark.parametrize(("sentinel_sync", "stored"), [(0, SENTINEL), (1, 0x80000000)])
def test_the_number_that_is_the_sentinel_is_stored_as_zero(
    sentinel_sync: int, stored: int, device: Device, library: ShaderLibrary, ctx: LowerContext
) -> None:
    problem = fused_case("Q8_0", 96, 512, 1, ("residual",)).build()
    inputs = dict(zip(problem.node.params["roles"], problem.node.inputs, strict=True))
    values = {
        **problem.values,
        inputs["x"].name: np.zeros((1, 512), np.float32),
        inputs["residual"].name: np.full((1, 96), SENTINEL, np.uint32).view(np.float32),
    }
    prepared = prepare(dataclasses.replace(problem, values=values), dataclasses.replace(ctx, act="f32"))
    (launch,) = prepared.schedule.dispatches()
    changed = Schedule([[with_defines(launch, SYNC_SENTINEL=sentinel_sync, SPINS=0)]])
    with Workbench(device, library) as bench:
        outputs = bench.run(dataclasses.replace(prepared, schedule=changed))
    (y,) = outputs.values()
    assert set(y.view(np.uint32).ravel().tolist()) == {stored}


def test_polled_buffers_are_not_readonly() -> None:
    """glslang of 2026 marks a readonly buffer's variable NonWritable, and NVIDIA's driver then reads it through a cache that stores of
    other workgroups do not reach: every spin-wait times out."""
    seen = 0
    for path in sorted(shader_root().rglob("*.[cg]*")):
        for line in path.read_text().splitlines():
            code = line.split("//")[0]
            polled = "volatile" in code or ("SYNC_INPUT" in code and not code.startswith("#define"))
            seen += polled
            assert not (polled and "readonly" in code), f"{path.name}: {line}"
    assert seen
