"""Steps of few tokens through mixtures of experts: the kernels of before against those that group a step's tokens by expert.

    python bench/moe_steps.py [-m NAME_OR_FILE ...] [-t 1,2,4,8,16,32,64] [--at 8,32] [--rounds 2] [--folder DIR] [--variants FILE]

Without -m two synthetic models (`vkback synth`), written to the folder where they are missing. For each:

    steps      microseconds by the device's clock for each number of tokens: tables of before (experts by GEMV, from 17 tokens by coop_mat),
               coop_reg for experts in one cut, both as a multiple of one token; experts chosen in a layer, and what their bytes ask for
    cuts       at the numbers of --at: tiles, subgroups and columns, gate and up first, then down, in the best so far
    families   at the numbers of --at: microseconds of each kind of stage, all layers together, with a barrier behind every stage

NMSE is that of the logits against the tables of before (their activations are rounded to 8 bits, those of coop_reg to f16).
--variants FILE: lines of rows of tables, as for bench/steps.py, to time at the numbers of --at in place of the cuts.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from steps import WARM_S, Step, step_schedule

from vkback.device import Device
from vkback.errors import VkbackError
from vkback.evaluate.judge import nmse
from vkback.models.registry import Model
from vkback.models.synth import synthesize
from vkback.ops.lowering import LowerContext
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.launches import warm_up
from vkback.timing.stages import loaded
from vkback.tuning.lookup import Tuning

MODELS = ("qwen3moe-30b-a3b-Q4_K_S", "gpt-oss-20b-MXFP4")
FIRST_CUT = (32, 8, 2)
CUTS = ((16, 8, 4), (16, 8, 2), (32, 8, 1), (32, 8, 4), (64, 8, 1), (64, 8, 2), (32, 16, 2))
"""tile_m, tile_n, slice_k; a subgroup has 16 rows."""
MANY = 17
"""From so many tokens on the tables of before took coop_mat."""


def before(n: int) -> str:
    """Rows that choose the kernels of before for a step of n tokens."""
    coop_mat = "kernel=coop_mat tile_m=128 tile_n=64 step_k=64 warp_m=64 warp_n=32"
    return "; ".join(f"gemm experts={e} : {coop_mat if n >= MANY else 'kernel=gemv'}" for e in ("each", "summed"))


def grouped(up: tuple[int, int, int], down: tuple[int, int, int]) -> str:
    """Rows that choose coop_reg, cut so, for gate and up, and for down."""
    rows = []
    for experts, (tile_m, tile_n, slice_k) in (("each", up), ("summed", down)):
        cut = f"tile_m={tile_m} tile_n={tile_n} warp_m=16 slice_k={slice_k} subnormals=true"
        rows.append(f"gemm experts={experts} : kernel=coop_reg {cut}")
    return "; ".join(rows)


def family(stage: Iterable[tuple[str, str]]) -> str:
    """What kind of stage it is: names of its nodes without their layer, and their shaders."""
    parts = sorted({f"{re.sub(r'-[0-9]+', '', label).split('.')[0]} [{Path(source).stem}]" for label, source in stage})
    return ", ".join(parts)


class Bench:
    """A model's weights on the device, and programs that are timed in turns."""

    def __init__(self, model: Model, device: Device, library: ShaderLibrary, ctx: LowerContext, depth: int, stack: ExitStack) -> None:
        self.model, self.device, self.library, self.ctx, self.depth, self.stack = model, device, library, ctx, depth, stack
        n_ctx = model.default_n_ctx
        self.vocab = model.graph(1, n_ctx, head="all").outputs[0].shape[-1]
        tensors = {n: t for n, t in step_schedule(model, 1, n_ctx, ctx, "").tensors().items() if t.kind in ("weight", "state")}
        more = {n: t for n, t in step_schedule(model, 8, n_ctx, ctx, "").tensors().items() if t.kind in ("weight", "state")}
        self.weights, self.ranges = loaded(model, tensors | more, device, stack)

    def schedule(self, n: int, rows: str) -> Schedule | None:
        try:
            return step_schedule(self.model, n, self.model.default_n_ctx, self.ctx, rows)
        except VkbackError as e:
            print(f"{n} tokens, {rows}: {e}")
            return None

    def step(self, schedule: Schedule, n: int, stack: ExitStack) -> Step:
        return Step(self.device, self.library, schedule, n, self.depth, self.ranges, self.weights, stack)

    def timed(self, wanted: list[tuple[int, str]], rounds: int) -> dict[tuple[int, str], tuple[float, np.ndarray, bool, Schedule]]:
        """Microseconds, logits, whether a spin-wait timed out, and the schedule, for each number of tokens and rows."""
        schedules = {key: s for key in dict.fromkeys(wanted) if (s := self.schedule(*key))}
        compile_kernels(self.device, self.library, [d for s in schedules.values() for d in s.dispatches()])
        with ExitStack() as stack:
            steps = {key: self.step(s, key[0], stack) for key, s in schedules.items()}
            for _ in range(rounds):
                for step in steps.values():
                    step.time()
            found = {}
            for key, step in steps.items():
                logits = step.logits()[: key[0] * self.vocab]  # a range of memory ends later
                found[key] = float(np.median(step.times)), logits, step.program.timed_out, step.schedule
            return found

    def families(self, n: int, rows: str) -> dict[str, float]:
        """Microseconds of each kind of stage, with barriers between all stages."""
        schedule, found = self.schedule(n, rows), defaultdict[str, float](float)
        if schedule is None:
            return found
        with ExitStack() as stack:
            step = self.step(schedule, n, stack)
            stamped = step.program.record("stages", timestamps=True)
            warm_up(self.device, stamped, WARM_S)
            runs = []
            for _ in range(5):
                self.device.submit(stamped).wait()
                runs.append(np.diff([ns for _, ns in stamped.timestamps()]) / 1e3)
            for us, stage in zip(np.median(runs, axis=0), schedule.stages, strict=True):
                found[family((d.label, d.kernel.source) for d in stage)] += float(us)
        return found

    def experts_chosen(self, n: int) -> float:
        """Experts that the n tokens of a step choose in a layer, in the mean."""
        graph = self.model.graph(n, self.model.default_n_ctx, head="all")
        ids = [node.outputs[1] for node in graph.nodes if node.op == "TOPK_MOE"]
        schedule = plan(dataclasses.replace(graph, outputs=(*graph.outputs, *ids)), self.ctx)
        compile_kernels(self.device, self.library, list(schedule.dispatches()))
        with ExitStack() as stack:
            step = self.step(schedule, n, stack)
            self.device.submit([step.one]).wait()
            found = [self.device.download(step.program.range(t.name), np.int32)[: t.elements] for t in ids]
        return float(np.mean([len(np.unique(values)) for values in found]))


def report_steps(bench: Bench, tokens: list[int], rounds: int) -> None:
    new = grouped(FIRST_CUT, FIRST_CUT)
    wanted = [(n, rows) for n in tokens for rows in (("",) if n == 1 else (before(n), new))]
    found = bench.timed(wanted, rounds)
    one = next((found[n, rows][0] for n, rows in wanted if n == 1), float("nan"))
    print("tokens  before us  x one  coop_reg us  x one     NMSE  experts  stages (barrier-free) before, coop_reg")
    for n in tokens:
        if n == 1:
            print(f"{n:6} {one:10.1f}")
            continue
        old_us, old_logits, _, old = found[n, before(n)]
        if (n, new) not in found:
            print(f"{n:6} {old_us:10.1f} {old_us / one:6.2f}")
            continue
        us, logits, timed_out, schedule = found[n, new]
        stages = ", ".join(f"{len(s.stages)} ({len(s.barrier_free)})" for s in (old, schedule))
        error, chosen = nmse(logits, old_logits), bench.experts_chosen(n)
        late = "  TIMED OUT" if timed_out else ""
        print(f"{n:6} {old_us:10.1f} {old_us / one:6.2f} {us:12.1f} {us / one:6.2f} {error:8.1e} {chosen:8.1f}  {stages}{late}")


def report_cuts(bench: Bench, at: list[int], rounds: int, given: list[str]) -> dict[int, str]:
    """The best rows for each number of tokens."""
    best: dict[int, str] = {}
    for n in at:
        if given:
            found = bench.timed([(n, rows) for rows in given], rounds)
            for (_, rows), (us, _, late, _) in found.items():
                print(f"{n:3} tokens {us:9.1f} us{'  TIMED OUT' if late else ''}  {rows}")
            best[n] = min(found, key=lambda key: found[key][0])[1] if found else grouped(FIRST_CUT, FIRST_CUT)
            continue
        up = down = FIRST_CUT
        for part in ("gate and up", "down"):
            cuts = {cut: grouped(cut, down) if part == "gate and up" else grouped(up, cut) for cut in (FIRST_CUT, *CUTS)}
            found = bench.timed([(n, rows) for rows in cuts.values()], rounds)
            times = {cut: found[n, rows][0] for cut, rows in cuts.items() if (n, rows) in found}
            print(f"{n:3} tokens, {part}: " + ", ".join(f"{m}x{c} by {s}: {us:.0f}" for (m, c, s), us in times.items()))
            chosen = min(times, key=times.__getitem__)
            up, down = (chosen, down) if part == "gate and up" else (up, chosen)
        best[n] = grouped(up, down)
        print(f"{n:3} tokens, best: {best[n]}")
    return best


def report_families(bench: Bench, at: list[int], best: dict[int, str]) -> None:
    for n in at:
        old, new = bench.families(n, before(n)), bench.families(n, best.get(n, grouped(FIRST_CUT, FIRST_CUT)))
        print(
            f"{n} tokens, us of all layers together, a barrier behind every stage: before {sum(old.values()):.0f}, {sum(new.values()):.0f}"
        )
        for name, families in (("before", old), ("coop_reg", new)):
            for kind, us in sorted(families.items(), key=lambda item: -item[1])[:14]:
                print(f"    {name:8} {us:9.1f}  {kind[:150]}")


def opened(name: str, folder: Path) -> Model:
    """A model file, or a synthetic one, which is written where it is missing."""
    path = Path(name)
    if not path.exists():
        path = folder / f"{name}.gguf"
        if not path.exists():
            synthesize(name, path)
    return Model.open(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", action="append", help="a file, or the name of a synthetic model")
    parser.add_argument("-t", "--tokens", default="1,2,4,8,16,32,64")
    parser.add_argument("--at", default="8,32", help="numbers of tokens to look closer at")
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--variants", type=Path, help="a file of rows of tables, a variant a line")
    parser.add_argument("--no-cuts", action="store_true")
    args = parser.parse_args()
    tokens, at = ([int(n) for n in text.split(",") if n] for text in (args.tokens, args.at))
    given = [line for line in args.variants.read_text().splitlines() if line.strip()] if args.variants else []
    library = ShaderLibrary()
    for name in args.model or MODELS:
        begun = time.perf_counter()
        model = opened(name, args.folder)
        with Device.open() as device, ExitStack() as stack:
            ctx = LowerContext(device.caps, Tuning.for_device(device.caps))
            bench = Bench(model, device, library, ctx, args.depth, stack)
            print(f"== {name}, {device.caps.name}: loaded after {time.perf_counter() - begun:.0f} s")
            report_steps(bench, tokens, args.rounds)
            best = {} if args.no_cuts and not given else report_cuts(bench, at, args.rounds, given)
            report_families(bench, at, best)
            print(f"   {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
