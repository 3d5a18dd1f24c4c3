"""Steps of few tokens through mixtures of experts: the kernels of before against those that group a step's tokens by expert.

    python bench/moe_steps.py [-m NAME_OR_FILE ...] [-t 1,2,4,8,16,32,64] [--at 8,32] [--rounds 2] [--folder DIR] [--variants FILE]

Without -m two synthetic models (`vkback synth`), written to the folder where they are missing. For each:

    steps      microseconds by the device's clock for each number of tokens, and how many times one token: the tables of before (experts by
               GEMV, from 17 tokens by coop_mat), coop_reg for experts in one cut, from 17 tokens also for dense products; experts that a
               layer chooses
    families   at the numbers of --at: microseconds of each kind of stage, all layers together, with a barrier behind every stage
    cuts       at the numbers of --at, as long as --budget lasts: tiles and subgroups, of gate and up first, then of down

NMSE is that of the logits against the tables of before (their activations are rounded to 8 bits, those of coop_reg to f16).
--variants FILE: lines of rows of tables, as for bench/steps.py, to time at the numbers of --at in place of the cuts.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from steps import Step, step_schedule, text_behind

from vkback.device import Device
from vkback.errors import VkbackError
from vkback.evaluate.judge import nmse
from vkback.graph import Graph, Tensor
from vkback.models.registry import Model
from vkback.models.synth import synthesize
from vkback.ops.lowering import LowerContext
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.stages import loaded
from vkback.tuning.lookup import Tuning

MODELS = ("qwen3moe-30b-a3b-Q4_K_S", "gpt-oss-20b-MXFP4")
FIRST_CUT = (32, 8, 2)
CUTS = ((16, 8, 2), (16, 8, 4), (32, 8, 1), (64, 8, 1), (64, 8, 2), (32, 16, 2))
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


def dense_too(n: int) -> str:
    """Rows that choose coop_reg for experts and, from 17 tokens on, for all dense products, without barriers where that is possible."""
    dense = f"tile_m=32 tile_n={16 if 33 <= n <= 48 else 32} warp_m=16 slice_k=4 subnormals=true"
    rows = f"gemm experts=none : kernel=coop_reg {dense}; schedule : sync=sentinel"
    return "; ".join((grouped(FIRST_CUT, FIRST_CUT), *([rows] if n >= MANY else [])))


class Bench:
    """A model's weights on the device, and programs that are timed in turns."""

    def __init__(self, model: Model, device: Device, library: ShaderLibrary, ctx: LowerContext, depth: int, stack: ExitStack) -> None:
        self.model, self.device, self.library, self.ctx, self.depth, self.stack = model, device, library, ctx, depth, stack
        tensors: dict[str, Tensor] = {}
        for n in (1, 8):
            tensors |= {name: t for name, t in step_schedule(self.graph(n), ctx, "").tensors().items() if t.kind in ("weight", "state")}
        self.weights, self.ranges = loaded(model, tensors, device, stack)

    def graph(self, n: int) -> Graph:
        return self.model.graph(n, self.model.default_n_ctx, head="all")

    def schedule(self, n: int, rows: str) -> Schedule | None:
        try:
            return step_schedule(self.graph(n), self.ctx, rows)
        except VkbackError as e:
            print(f"{n} tokens, {rows}: {e}")
            return None

    def step(self, schedule: Schedule, n: int, stack: ExitStack) -> Step:
        return Step(self.device, self.library, schedule, text_behind(self.depth, n), self.ranges, self.weights, stack)

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
                found[key] = float(np.median(step.times)), step.logits(), step.program.timed_out, step.schedule
            return found

    def families(self, n: int, rows: str) -> dict[str, float]:
        """Microseconds of each kind of stage, with barriers between all stages."""
        schedule = self.schedule(n, rows)
        if schedule is None:
            return {}
        with ExitStack() as stack:
            return {kind: us for kind, (us, _) in self.step(schedule, n, stack).kinds().items()}

    def experts_chosen(self, n: int) -> float:
        """Experts that the n tokens of a step choose in a layer, in the mean."""
        graph = self.graph(n)
        ids = [node.outputs[1] for node in graph.nodes if node.op == "TOPK_MOE"]
        schedule = plan(dataclasses.replace(graph, outputs=(*graph.outputs, *ids)), self.ctx)
        compile_kernels(self.device, self.library, list(schedule.dispatches()))
        with ExitStack() as stack:
            step = self.step(schedule, n, stack)
            self.device.submit([step.one]).wait()
            found = [self.device.download(step.program.range(t.name), np.int32)[: t.elements] for t in ids]
        return float(np.mean([len(np.unique(values)) for values in found]))


def report_steps(bench: Bench, tokens: list[int], rounds: int) -> dict[int, str]:
    """The best rows for each number of tokens."""
    variants: dict[int, dict[str, str]] = {}
    for n in tokens:
        variants[n] = {} if n == 1 else {"before": before(n), "coop_reg": grouped(FIRST_CUT, FIRST_CUT)}
        variants[n] |= {"dense too": dense_too(n)} if n >= MANY else {}
    found = bench.timed([(n, rows) for n in tokens for rows in variants[n].values() or ("",)], rounds)
    one = found[1, ""][0] if (1, "") in found else float("nan")
    print("tokens                    us  x one     NMSE  experts  stages (barrier-free)")
    if (1, "") in found:
        print(f"     1 {'':12} {one:8.1f}")
    best: dict[int, str] = {}
    for n, named in variants.items():
        for name, rows in named.items():
            if (n, rows) not in found:
                continue
            us, logits, timed_out, schedule = found[n, rows]
            error = nmse(logits, found[n, before(n)][1]) if (n, before(n)) in found else float("nan")
            chosen = f"{bench.experts_chosen(n):8.1f}" if name == "before" else " " * 8
            stages = f"{len(schedule.stages)} ({len(schedule.barrier_free)})"
            late = "  TIMED OUT" if timed_out else ""
            print(f"{n:6} {name:12} {us:8.1f} {us / one:6.2f} {error:8.1e} {chosen}  {stages}{late}")
            if n not in best or us < found[n, best[n]][0]:
                best[n] = rows
    return best


def report_cuts(bench: Bench, at: list[int], rounds: int, given: list[str], until: float) -> None:
    """Other tiles, as long as there is time."""
    for n in at:
        if time.perf_counter() > until:
            print(f"{n:3} tokens: no time left for other cuts")
            continue
        if given:
            found = bench.timed([(n, rows) for rows in given], rounds)
            for (_, rows), (us, _, late, _) in found.items():
                print(f"{n:3} tokens {us:9.1f} us{'  TIMED OUT' if late else ''}  {rows}")
            continue
        up = down = FIRST_CUT
        for part in ("gate and up", "down"):
            cuts = {cut: grouped(cut, down) if part == "gate and up" else grouped(up, cut) for cut in (FIRST_CUT, *CUTS)}
            found = bench.timed([(n, rows) for rows in cuts.values()], rounds)
            times = {cut: found[n, rows][0] for cut, rows in cuts.items() if (n, rows) in found}
            print(f"{n:3} tokens, {part}: " + ", ".join(f"{m}x{c} by {s}: {us:.0f}" for (m, c, s), us in times.items()))
            chosen = min(times, key=times.__getitem__)
            up, down = (chosen, down) if part == "gate and up" else (up, chosen)
        print(f"{n:3} tokens, best: {grouped(up, down)}")


def report_families(bench: Bench, at: list[int], best: dict[int, str]) -> None:
    for n in at:
        both = {"before": bench.families(n, before(n)), "best": bench.families(n, best.get(n, grouped(FIRST_CUT, FIRST_CUT)))}
        totals = ", ".join(f"{name} {sum(families.values()):.0f}" for name, families in both.items())
        print(f"{n} tokens, us of all layers together, a barrier behind every stage: {totals}")
        for name, families in both.items():
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
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for a model after which no further cuts are tried")
    args = parser.parse_args()
    tokens, at = ([int(n) for n in text.split(",") if n] for text in (args.tokens, args.at))
    given = [line for line in args.variants.read_text(encoding="utf-8").splitlines() if line.strip()] if args.variants else []
    library = ShaderLibrary()
    for name in args.model or MODELS:
        begun = time.perf_counter()
        model = opened(name, args.folder)
        with Device.open() as device, ExitStack() as stack:
            ctx = LowerContext(device.caps, Tuning.for_device(device.caps))
            bench = Bench(model, device, library, ctx, args.depth, stack)
            print(f"== {name}, {device.caps.name}: loaded after {time.perf_counter() - begun:.0f} s")
            best = report_steps(bench, tokens, args.rounds)
            report_families(bench, at, best)
            if given or not args.no_cuts:
                report_cuts(bench, at, args.rounds, given, begun + args.budget)
            print(f"   {time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
