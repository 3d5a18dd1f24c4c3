"""Times a step of several tokens, all logits wanted, against one of one token, under tuning overrides.

    python bench/steps.py MODEL.gguf [-t 1,2,4,8,16] [--depth 128] [--rounds 3] [--stages] VARIANT...

A variant is rows of a tuning table that come before all others (as for bench/one_token.py), of steps of more than one token. "@unordered"
before the rows, or alone, runs a program without any barrier, whose results are wrong: the time if no stage waited for another.

All programs take turns. A line each, the tables' own first: microseconds a step by the device's clock, how many times that of one token it
is, on a CPU driver milliseconds of a core a step (the least of all rounds, which other work on the machine hardly moves), stages and how
many of them are barrier-free, the NMSE of the logits against the tables' (of runs that begin with NaN in memory), and whether a spin-wait
timed out. With --stages a line for each dispatch of the tables' plan of a middle layer and of what follows the last: microseconds with all
barriers.

A recurrent model wants --depth 0, where a step begins without a state. Behind other tokens an even number of them stores the state over the
one that was read, so a step that runs again goes on from another, and its NMSE says nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from vkback.device import BufferRange, Device
from vkback.errors import VkbackError
from vkback.evaluate.judge import nmse
from vkback.graph import Graph, Tensor
from vkback.models.registry import Model
from vkback.ops.case import Array
from vkback.ops.lowering import LowerContext
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.program import Program, WeightRanges, compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.launches import span_us, stamp, warm_up
from vkback.timing.stages import loaded, zeroed
from vkback.tuning.lookup import Tuning, with_overrides

WARM_S = 0.02
REPEAT = 8
LOGITS = "result_output"
NAN_WORD = 0xFFFFFFFF
UNORDERED = "@unordered"


def step_schedule(graph: Graph, ctx: LowerContext, variant: str) -> Schedule:
    """The plan of a step under a variant."""
    rows = variant.removeprefix(UNORDERED)
    if rows != variant:
        rows = "; ".join(filter(str.strip, (rows, "schedule : sync=barrier")))  # kernels that wait for nothing
    tables = ctx.tuning
    assert isinstance(tables, Tuning)
    schedule = plan(graph, dataclasses.replace(ctx, tuning=with_overrides(tables, rows)))
    if variant.startswith(UNORDERED):
        schedule = dataclasses.replace(schedule, barrier_free=frozenset(range(1, len(schedule.stages))))
    return schedule


def text_behind(depth: int, n: int) -> dict[str, Array]:
    """Inputs of a step of n tokens of one text, behind `depth` rows."""
    return {"pos": np.arange(depth, depth + n), "tokens": np.arange(7, 7 + n)}


def family(stage: Iterable[tuple[str, str]]) -> str:
    """What kind of stage it is: names of its nodes without their layer, and their shaders."""
    parts = sorted({f"{re.sub(r'-[0-9]+', '', label).split('.')[0]} [{Path(source).stem}]" for label, source in stage})
    return ", ".join(parts)


class Step:
    """A program of some tokens behind rows of zeros. values: what its inputs hold, by name; all are I32."""

    def __init__(
        self,
        device: Device,
        library: ShaderLibrary,
        schedule: Schedule,
        values: Mapping[str, Array],
        ranges: dict[str, BufferRange],
        weights: dict[str, WeightRanges],
        stack: ExitStack,
    ) -> None:
        self.device, self.schedule, self.times, self.core_ms = device, schedule, list[float](), list[float]()
        inputs = zeroed(device, [t for t in schedule.tensors().values() if t.kind == "input"], stack)
        for name in inputs.keys() & values.keys():
            device.upload(inputs[name], values[name].astype(np.int32))
        self.program = Program(device, library, schedule, {**ranges, **inputs}, weights)
        stack.callback(self.program.close)
        self.start, self.end = (stamp(device, label) for label in ("start", "end"))
        self.repeat = 1 if device.caps.software else REPEAT
        self.commands = self.program.record("steps", repeat=self.repeat)
        self.one = self.program.record("step")
        recorder = device.recorder("spoil")
        recorder.barrier()
        for name in schedule.slots:
            recorder.fill(self.program.range(name), NAN_WORD)
        self.spoil = recorder.finish()
        stack.callback(self.spoil.destroy)

    def time(self) -> None:
        warm_up(self.device, self.commands, WARM_S)
        before = time.process_time()
        self.times += [span_us(self.device, self.start, self.commands, self.end) / self.repeat for _ in range(3)]
        self.core_ms.append((time.process_time() - before) * 1e3 / 3 / self.repeat)

    def logits(self) -> Array:
        """Of a run that finds no values of an earlier one, which would be right for a kernel that did not wait."""
        self.device.submit([self.spoil, self.one]).wait()
        count = self.schedule.tensors()[LOGITS].elements  # a range of memory ends later
        return self.device.download(self.program.range(LOGITS), np.float32)[:count]

    def stage_us(self) -> Array:
        """Microseconds of each stage, with a barrier behind every one."""
        stamped = self.program.record("stages", timestamps=True)
        warm_up(self.device, stamped, WARM_S)
        runs = []
        for _ in range(5):
            self.device.submit(stamped).wait()
            runs.append(np.diff([ns for _, ns in stamped.timestamps()]) / 1e3)
        return np.asarray(np.median(runs, axis=0))

    def kinds(self) -> dict[str, tuple[float, int]]:
        """Microseconds of all stages of a kind together, with a barrier behind every stage, and how many they are."""
        found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for us, stage in zip(self.stage_us(), self.schedule.stages, strict=True):
            kind = family((d.label, d.kernel.source) for d in stage)
            found[kind] = found[kind][0] + float(us), found[kind][1] + 1
        return found

    def stage_lines(self) -> list[str]:
        """Dispatches of the layer in the middle and of what comes behind the layers."""
        us = self.stage_us()
        lines = []
        for number, stage in enumerate(self.schedule.stages):
            names = ", ".join(f"{d.label} [{Path(d.kernel.source).name} {d.groups}]" for d in stage)
            if "-15" in names or number > len(us) - 4 or number < 2:
                lines.append(f"    {number:4} {us[number]:8.2f} us  {names[:200]}")
        return [*lines, f"    together {us.sum():8.1f} us"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("variants", nargs="*", metavar="VARIANT")
    parser.add_argument("-t", "--tokens", default="1,2,4,8,16", help="numbers of tokens, 1 among them or not")
    parser.add_argument("--depth", type=int, default=128, help="rows of the cache before the step, zeros")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", action="store_true")
    args = parser.parse_intermixed_args()
    model, library = Model.open(args.model), ShaderLibrary()
    with Device.open() as device, ExitStack() as stack:
        ctx = LowerContext(device.caps, Tuning.for_device(device.caps))
        schedules: dict[tuple[int, str], Schedule] = {}
        for n in map(int, args.tokens.split(",")):
            for text in ("", *(args.variants if n > 1 else ())):
                try:
                    schedules[n, text] = step_schedule(model.graph(n, model.default_n_ctx, head="all"), ctx, text)
                except VkbackError as e:
                    print(f"{n} tokens, {text}: {e}")
        kept = ("weight", "state")
        tensors: dict[str, Tensor] = {}
        for schedule in schedules.values():
            tensors |= {name: t for name, t in schedule.tensors().items() if t.kind in kept}
        compile_kernels(device, library, [d for schedule in schedules.values() for d in schedule.dispatches()])
        weights, ranges = loaded(model, tensors, device, stack)
        steps = {key: Step(device, library, s, text_behind(args.depth, key[0]), ranges, weights, stack) for key, s in schedules.items()}
        for _ in range(args.rounds):
            for step in steps.values():
                step.time()
        one = float(np.median(next((s.times for (n, _), s in steps.items() if n == 1), [np.nan])))
        for (n, text), step in steps.items():
            us = float(np.median(step.times))
            error = nmse(step.logits(), steps[n, ""].logits())
            stages = f"{len(step.schedule.stages)} stages, {len(step.schedule.barrier_free)} barrier-free"
            core = f", {min(step.core_ms):.2f} ms of a core" if device.caps.software else ""
            timed_out = " TIMED OUT" if step.program.timed_out else ""
            print(f"{n:3} tokens {us:9.1f} us {us / one:5.2f} times one{core}, {stages}, NMSE {error:7.1e}{timed_out}  {text or 'tables'}")
            if args.stages and not text.startswith(UNORDERED):
                print("\n".join(step.stage_lines()))


if __name__ == "__main__":
    main()
