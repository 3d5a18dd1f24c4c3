"""Profiles a loaded model: its load, a prompt, tokens, and a batch of tokens (vkback/timing/profile.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from vkback.device import BufferRange, MemoryUse
from vkback.engine.engine import Engine
from vkback.engine.prompts import with_barriers
from vkback.engine.sampler import Sampler, loop_state
from vkback.errors import VkbackError
from vkback.ops.case import Array
from vkback.ops.matmul.gemm_problem import GemmKernel
from vkback.plan.cost.forecast import Costs
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.timing.math_rate import MathRate, measure_math_rate
from vkback.timing.profile import WARM_S, Phase, measure_phase
from vkback.timing.stages import device_costs, zeroed

PROMPT_RUNS = 3

BATCH_RUNS = 10
"""Of the few milliseconds that a batch takes on a GPU: one pause of the host must not show. On CPU drivers a prompt's number."""

ROOM = 16
"""Rows of the cache beyond those that are measured: the engine makes several tokens a submit."""


class ProfileError(VkbackError):
    """A profile that cannot be made."""


@dataclass(frozen=True)
class Speeds:
    """The model as in use, without stamps: seconds.

    load_s      opening the file, memory, weights
    compile_s   kernels; kernels: how many, compiled: of them from GLSL
    load        parts of load_s by name, some of them at once: opening, memory and plans, reading, uploading
    ttft_s      from the prompt to its first token, prefill_s: the prompt alone; decode_s: the tokens behind the first
    """

    load_s: float
    compile_s: float
    kernels: int
    compiled: int
    prompt_tokens: int
    tokens: int
    ttft_s: float
    prefill_s: float
    decode_s: float
    load: Mapping[str, float] = field(default_factory=dict)

    @property
    def prefill_rate(self) -> float:
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_rate(self) -> float:
        return self.tokens / self.decode_s


@dataclass(frozen=True)
class Memory:
    """Device memory: free before the model was loaded and once it is profiled (None: not known), and what it is used for."""

    free_before: int | None
    free_after: int
    use: MemoryUse
    total: int


@dataclass(frozen=True)
class Profile:
    """All of it.

    model_bytes   of all tensors
    math          the rate of the prompt's main kernel
    tuning        what identifies the tuning tables
    """

    model: str
    device: str
    driver: str
    n_layer: int
    n_embd: int
    n_ctx: int
    act: str
    model_bytes: int
    speeds: Speeds
    phases: tuple[Phase, ...]
    costs: Costs
    math: MathRate | None
    tuning: str = ""
    memory: Memory | None = None


def profile(
    engine: Engine,
    load_s: float,
    prompt: Sequence[int],
    n: int,
    batch: int,
    tell: Callable[[str], object] = lambda _: None,
    *,
    free_before: int | None = None,
    load: Mapping[str, float] | None = None,
) -> Profile:
    """Profile a freshly loaded engine. prompt: at least 2 tokens; n: tokens behind it; batch: tokens of a batch, 0 for none. `tell` gets a
    line before each part. free_before: bytes of the device that were free before; load: parts of load_s.

    Raises ProfileError where the context is too small.
    """
    needed = len(prompt) + max(n + 1, batch) + ROOM
    if needed > engine.n_ctx:
        raise ProfileError(f"[profile] {len(prompt)} tokens of a prompt and {max(n, batch)} behind need {needed} rows; raise --ctx")
    caps = engine.device.caps
    tell("speeds")
    speeds = _speeds(engine, load_s, prompt, n, load or {})
    memory = Memory(free_before, engine.device.free_memory(), engine.device.memory_use(), _own_memory(engine))
    tell("read rate")
    costs = device_costs(engine.device, engine.library)
    kernel: GemmKernel | None = engine.prompt_kernel(len(prompt)) if prompt else None
    math = measure_math_rate(engine.device, engine.library, kernel) if kernel else None
    sizes = {name: t.nbytes for name, t in engine.model.file.tensors.items()}
    phases: list[Phase] = []

    def phase(name: str, schedule: Schedule, tokens: int, runs: int, inputs: Callable[[int], dict[str, Array]]) -> None:
        tell(name)
        with ExitStack() as stack:
            found = [t for t in schedule.tensors().values() if t.kind == "input"]
            ranges = zeroed(engine.device, found, stack)

            def begin(run: int) -> int:
                values = inputs(run)
                _upload(engine, ranges, values)
                return int(values["pos"].max()) + 1

            bind = lambda s: engine.bind(s, ranges)  # noqa: E731
            phases.append(measure_phase(name, tokens, engine.device, schedule, bind, begin, sizes, costs, runs))

    at = 0
    pieces = engine.prompt_schedules(len(prompt))
    for number, (size, schedule) in enumerate(pieces):
        part = np.full(size, -1, np.int32)
        ids = np.zeros(size, np.int32)
        here = list(prompt[at : at + size])
        ids[: len(here)] = here
        part[: len(here)] = np.arange(at, at + len(here))
        name = "prefill" if len(pieces) == 1 else f"prefill, part {number + 1} of {len(pieces)}"
        phase(f"{name} ({len(here)} tokens)", schedule, len(here), PROMPT_RUNS, lambda _, i=ids, p=part: {"tokens": i, "pos": p})  # type: ignore[misc]
        at += len(here)
    loop = loop_state(Sampler(), [])
    last = np.array(prompt[-1:] or [0], np.int32)
    phase(
        f"decode ({n} tokens)",
        engine.schedule("greedy"),
        1,
        n,
        lambda run: {"tokens": last, "pos": np.array([len(prompt) + run], np.int32), "loop": loop},
    )
    if batch:
        graph = engine.model.graph(batch, engine.n_ctx, head="all", cache=engine.cache_types)
        schedule = plan(graph, with_barriers(engine.ctx, "a batch"), fusion=engine.fusion)
        ids = np.resize(np.array(prompt or [0], np.int32), batch)
        pos = np.arange(len(prompt), len(prompt) + batch, dtype=np.int32)
        runs = PROMPT_RUNS if caps.software else BATCH_RUNS
        phase(f"batch of {batch} tokens", schedule, batch, runs, lambda _: {"tokens": ids, "pos": pos})
    hp = engine.model.hp
    return Profile(
        engine.model.heading,
        caps.name,
        f"{caps.driver_name} {caps.driver_info}",
        hp.n_layer,
        hp.n_embd,
        engine.n_ctx,
        engine.ctx.act,
        engine.size_bytes,
        speeds,
        tuple(phases),
        costs,
        math,
        engine.tuning,
        memory,
    )


def _own_memory(engine: Engine) -> int:
    """Bytes of the largest heap of the device's own."""
    return max((heap.size for heap in engine.device.caps.heaps if heap.device_local), default=0)


def _upload(engine: Engine, ranges: dict[str, BufferRange], values: dict[str, Array]) -> None:
    for name, value in values.items():
        if name in ranges:
            engine.device.upload(ranges[name], value)


def _speeds(engine: Engine, load_s: float, prompt: Sequence[int], n: int, load: Mapping[str, float]) -> Speeds:
    """Run the prompt and the tokens behind it as a user would, kernels ready and, on a GPU, clocks up. The last token of a prompt goes
    through the program of one token, which makes the first logits."""
    greedy = Sampler()
    engine.prepare(prompt=[len(prompt), len(prompt) - 1], sampler=greedy)
    deadline = time.perf_counter() + (0.0 if engine.device.caps.software else WARM_S)
    while time.perf_counter() < deadline:
        engine.reset()
        engine.prompt(prompt[:-1])
        for _ in engine.generate(prompt[-1], n, sampler=greedy, stop_at_eos=False):
            pass
    engine.reset()
    begun = time.perf_counter()
    engine.prompt(prompt)
    prefill_s = time.perf_counter() - begun
    engine.reset()
    begun = time.perf_counter()
    engine.prompt(prompt[:-1])
    (first,) = engine.generate(prompt[-1], 1, sampler=greedy, stop_at_eos=False)
    answered = time.perf_counter()
    made = sum(1 for _ in engine.generate(first, n, sampler=greedy, stop_at_eos=False))
    ended = time.perf_counter()
    totals = engine.compiled
    return Speeds(
        load_s,
        totals.seconds,
        totals.kernels,
        totals.compiled,
        len(prompt),
        made,
        answered - begun,
        prefill_s,
        ended - answered,
        dict(load),
    )
