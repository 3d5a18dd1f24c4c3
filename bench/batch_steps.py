"""Times a step of a batch: one token of each of many sequences, whose caches lie in pages, behind as many rows each.

    python bench/batch_steps.py MODEL.gguf [-n 8,32] [--rows 512] [--rounds 2] [--stages] [--registers] [VARIANT...]

A VARIANT is rows of tuning tables, as for bench/steps.py; "@unordered" runs a program without any barrier, whose results are wrong. All
programs take turns. A line each, the tables' own first: microseconds a step by the device's clock without sampling, stages and how many
are barrier-free, the NMSE of the logits against the tables', and whether a spin-wait timed out. Then what the bytes of a step ask at the
read rate.

--stages     a line for each kind of stage: microseconds of all layers together, how many, and of one, with barriers between all stages
--registers  and what the driver makes of one kernel of each kind
--experts    columns by the same experts in all layers as the tables': how many, and the NMSE of their logits and of the others'. A column
             of other experts, where two of a router's logits lie closer than rounding moves them, is off by 1e-2
--only TEXT  variants get no lines of stages but those of kinds that have the text
"""

from __future__ import annotations

import argparse
import re
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from steps import UNORDERED, Step, family, step_schedule

from vkback.device import Device
from vkback.engine.batch.steps import CLASSES
from vkback.errors import VkbackError
from vkback.evaluate.judge import nmse
from vkback.graph import Tensor
from vkback.models.builder import Paging
from vkback.models.registry import Model
from vkback.ops.case import Array
from vkback.ops.lowering import LowerContext
from vkback.plan.schedule import Schedule
from vkback.program import compile_kernels, dispatch_spec
from vkback.shader import ShaderLibrary
from vkback.timing.read_rate import measure_read_rate
from vkback.timing.stages import loaded
from vkback.tuning.lookup import Tuning

PAGE = 64


def texts_behind(rows: int, n: int, paging: Paging) -> dict[str, Array]:
    """Inputs of a step of one token of each of n sequences, behind `rows` rows each."""
    pages = np.arange(paging.n_slots * paging.max_pages).reshape(paging.n_slots, -1)
    physical = pages[:n, rows // PAGE] * PAGE + rows % PAGE
    return {"tokens": np.arange(7, 7 + n), "pos": np.full(n, rows), "rows": physical, "slots": np.arange(n), "pages": pages.ravel()}


class BatchStep(Step):
    """A program of a step whose columns are of one sequence each."""

    def experts(self) -> Array:
        """The experts of each column, sorted, I32 [layers, n, n_used]: memory is used again later, so of runs up to each choice."""
        found = []
        for i, stage in enumerate(self.schedule.stages):
            for tensor in (a.tensor for d in stage for a in d.args if "w" in a.access and re.fullmatch(r"ffn_moe_topk-\d+", a.tensor.name)):
                until = self.program.record("experts", part=range(i + 1), barriers=True)
                self.device.submit([self.spoil, until]).wait()
                ids = self.device.download(self.program.range(tensor.name), np.int32)[: tensor.elements]
                found.append(np.sort(ids.reshape(tensor.shape), axis=-1))
        return np.array(found)

    def nbytes(self) -> int:
        """What a step reads at least, as its dispatches forecast it."""
        return sum(d.nbytes for d in self.schedule.dispatches())


def show_experts(step: BatchStep, tables: BatchStep) -> None:
    same = (step.experts() == tables.experts()).all(axis=(0, 2))
    logits, wanted = (s.logits().reshape(len(same), -1) for s in (step, tables))
    sides = [f"{which.sum()} NMSE {nmse(logits[which], wanted[which]):.1e}" if which.any() else "none" for which in (same, ~same)]
    print(f"    columns by the same experts as the tables': {sides[0]}; the others: {sides[1]}")


def show_kinds(step: BatchStep, only: str = "") -> None:
    kinds = step.kinds()
    print(f"    with barriers {sum(us for us, _ in kinds.values()):9.1f} us, {sum(n for _, n in kinds.values())} stages")
    for kind, (us, count) in sorted(kinds.items(), key=lambda item: -item[1][0]):
        if only in kind and us >= 3.0:
            print(f"    {us:9.1f} us {count:4} of {us / count:7.2f}  {kind[:110]}")


def show_registers(device: Device, library: ShaderLibrary, schedule: Schedule) -> None:
    shown: set[str] = set()
    for stage in schedule.stages:
        for d in stage:
            kind = family([(d.label, d.kernel.source)])
            if kind in shown or len(shown) > 14:
                continue
            shown.add(kind)
            found = {s.name: s.value for s in device.kernel_statistics(dispatch_spec(d, library))}
            print(f"    {kind[:70]} {'x'.join(map(str, d.groups))}: " + ", ".join(f"{k} {v}" for k, v in found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("variants", nargs="*", metavar="VARIANT")
    parser.add_argument("-n", "--sequences", default="8,32")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--registers", action="store_true")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--only", help="show stages of variants, too: of kinds with this text")
    args = parser.parse_intermixed_args()
    model, library = Model.open(args.model), ShaderLibrary()
    numbers = [int(n) for n in args.sequences.split(",")]
    pages = args.rows // PAGE + 1
    most = max(numbers)
    assert most <= CLASSES[-1]
    paging = Paging(PAGE, most * pages, most, pages)
    with Device.open(statistics=args.registers) as device, ExitStack() as stack:
        ctx = LowerContext(device.caps, Tuning.for_device(device.caps))
        schedules: dict[tuple[int, str], Schedule] = {}
        for n in numbers:
            for text in ("", *args.variants):
                try:
                    graph = model.graph(n, paging.page * paging.max_pages, head="all", paging=paging)
                    schedules[n, text] = step_schedule(graph, ctx, text)
                except VkbackError as e:
                    print(f"{n} sequences, {text}: {e}")
        tensors: dict[str, Tensor] = {}
        for schedule in schedules.values():
            tensors |= {name: t for name, t in schedule.tensors().items() if t.kind in ("weight", "state")}
        compile_kernels(device, library, [d for schedule in schedules.values() for d in schedule.dispatches()])
        weights, ranges = loaded(model, tensors, device, stack)
        steps = {
            (n, text): BatchStep(device, library, schedule, texts_behind(args.rows, n, paging), ranges, weights, stack)
            for (n, text), schedule in schedules.items()
        }
        for _ in range(args.rounds):
            for step in steps.values():
                step.time()
        rate = measure_read_rate(device, library).gb_s
        print(f"== {args.model.name}, {device.caps.name}, {args.rows} rows a sequence, read rate {rate:.0f} GB/s")
        for (n, text), step in steps.items():
            us = float(np.median(step.times))
            error = nmse(step.logits(), steps[n, ""].logits())
            free = f"{len(step.schedule.stages)} stages, {len(step.schedule.barrier_free)} barrier-free"
            timed_out = " TIMED OUT" if step.program.timed_out else ""
            print(f"{n:3} sequences {us:9.1f} us, {free}, NMSE {error:7.1e}{timed_out}  {text or 'tables'}", flush=True)
            if text.startswith(UNORDERED):
                continue
            if args.experts and text:
                show_experts(step, steps[n, ""])
            if args.stages and not text:
                print(f"    bytes of all stages {step.nbytes() / 1e9:.2f} GB, {step.nbytes() / rate / 1e3:.0f} us")
                show_kinds(step)
            elif args.only:
                show_kinds(step, args.only)
            if args.registers and not text:
                show_registers(device, library, step.schedule)


if __name__ == "__main__":
    main()
