"""vkback kernels: what a driver's compiler makes of the kernels that the tables choose, without running them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkback.cli.hosts import DevicesOption, HostsOption, JournalOption, SchedulerOption, WorkersOption, workers_of
from vkback.cli.loading import ActOption
from vkback.cli.shell import ShapeOption, UsageError, act_of, bars, described_model, read_text
from vkback.cli.terminal import fit, shortened

if TYPE_CHECKING:
    from vkback.cli.hosts import Where
    from vkback.compilers.kernel_figures import Figures
    from vkback.device import Device
    from vkback.events import Report
    from vkback.ops.dispatch import Dispatch
    from vkback.ops.lowering import LowerContext

NODE, KERNEL = 16, 18
"""Columns for a node and for a kernel."""

COMPARED = ("registers", "spills", "scratch", "waves", "code_bytes", "per_32")


def kernels(
    model: Annotated[
        list[str] | None, typer.Option("-m", "--model", help="GGUF file or built-in model [default: demo-dense]; any number.")
    ] = None,
    shape: ShapeOption = None,
    every: Annotated[bool, typer.Option("--all", help="The kernels of all timed cases of the suite instead of a model's.")] = False,
    case: Annotated[
        list[str] | None, typer.Option("--case", help='Of this case instead, as "MUL_MAT(type_a=q4_K,m=4096,n=1,k=14336)".')
    ] = None,
    device: DevicesOption = None,
    scheduler: SchedulerOption = None,
    hosts: HostsOption = None,
    workers: WorkersOption = None,
    journal: JournalOption = None,
    tokens: Annotated[int, typer.Option("-t", "--tokens", min=1, help="Tokens of the batch.")] = 1,
    act: ActOption = "auto",
    code: Annotated[bool, typer.Option("--code/--no-code", help="Count instructions in the machine code, too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    against: Annotated[Path | None, typer.Option("--against", help="An earlier --json: show what changed.")] = None,
) -> None:
    """Compile the kernels of a model's token and show what became of them: registers, spills, scratch memory, subgroups in flight and the
    most possible, size of the code; of GEMVs the instructions for 32 weights and what should bound their speed. Nothing is run, so any
    driver will do, also one without hardware. Exit code 1 when a kernel spills or uses scratch memory."""
    from vkback.compilers.kernel_figures import print_machine_code
    from vkback.device import Device
    from vkback.ops.lowering import LowerContext
    from vkback.tuning.lookup import Tuning

    if every and (case or model or shape):
        raise UsageError("--all excludes --case, --model and --shape: it stands for the suite's cases")
    before = _read(against) if against else {}
    where = workers_of(device, scheduler, hosts, workers, journal)
    if where is not None:
        args = {"case": case, "every": every, "model": model, "shape": shape, "tokens": tokens, "act": act_of(act), "code": code}
        if _by_workers(where, journal, args, as_json, before):
            raise typer.Exit(1)
        return
    if code:
        print_machine_code()
    with Device.open(device, statistics=True, compile_only=True) as opened:
        ctx = LowerContext(opened.caps, Tuning.for_device(opened.caps), act_of(act))
        dispatches = chosen_dispatches(case, every, model, shape, tokens, ctx)
        found = compiled(opened, dispatches, code=code, progress=bars(not as_json))
        device_is = {"device": opened.caps.name, "driver": opened.caps.driver_info}
        heading = f"{opened.caps.name} ({opened.caps.driver_name} {opened.caps.driver_info})"
    if as_json:
        print(json.dumps({**device_is, "kernels": [f.as_data() for f in found]}, indent=1))
    else:
        print("\n".join([*fit(heading), *table(found), *changes(found, before)]))
    if any(f.spills_or_scratch for f in found):
        raise typer.Exit(1)


def chosen_dispatches(
    case: Sequence[str] | None, every: bool, model: Sequence[str] | None, shape: str | None, tokens: int, ctx: LowerContext
) -> list[Dispatch]:
    """What the options name: cases, all timed cases of the suite, or models."""
    return _of_cases(case, ctx) if case else _of_suite(ctx) if every else _of_models(model, shape, tokens, ctx)


def _by_workers(
    where: Where, journal: Path | None, args: Mapping[str, Any], as_json: bool, before: Mapping[str, Mapping[str, Any]]
) -> bool:
    """Compile by workers and print, a table for each kind of device. Whether a kernel spills or uses scratch memory."""
    from vkback.cli.kernels_hosts import kernels_by_workers

    kinds = kernels_by_workers(where, journal, args)
    data = [
        {"device": kind.about["device"], "driver": kind.about["driver"], "kernels": [f.as_data() for f in found]} for kind, found in kinds
    ]
    if as_json:
        print(json.dumps(data[0] if len(data) == 1 else data, indent=1))
    else:
        for kind, found in kinds:
            print("\n".join([*fit(kind.name), *table(found), *changes(found, before)]))
    return any(f.spills_or_scratch for _, found in kinds for f in found)


def _of_models(models: Sequence[str] | None, shape: str | None, tokens: int, ctx: LowerContext) -> list[Dispatch]:
    from vkback.plan.planner import plan

    found: list[Dispatch] = []
    for model in models or (None,):
        with described_model(model, shape) as (opened, _):
            found += plan(opened.graph(tokens, opened.default_n_ctx, head="last"), ctx).dispatches()
    return found


def _of_cases(cases: Iterable[str], ctx: LowerContext) -> list[Dispatch]:
    from vkback.cli.explain import context_for, node_of
    from vkback.ops.op import OPS

    return [d for case in cases for node in (node_of(case),) for d in OPS[node.op].lower(node, context_for(case, ctx))]


def _of_suite(ctx: LowerContext) -> list[Dispatch]:
    """Those of all timed cases that the device can run, whichever way activations enter."""
    import dataclasses

    from vkback.harness.cases import context_of, perf_cases
    from vkback.ops.lowering import PlanError
    from vkback.ops.op import OPS

    found: list[Dispatch] = []
    for case in perf_cases():
        node = case.build().node
        for act in ("f32", "q8_1"):
            try:
                found += OPS[node.op].lower(node, context_of(case, dataclasses.replace(ctx, act=act)))
            except PlanError:
                continue
    return found


def compiled(device: Device, dispatches: Iterable[Dispatch], *, code: bool = True, progress: Report | None = None) -> list[Figures]:
    """Figures of the different kernels of dispatches, in their order; compiled in parallel where the driver's code is not on stderr."""
    from vkback.compilers.chips import chip_of
    from vkback.compilers.kernel_figures import figures, prints_to_stderr
    from vkback.engine.kernels import reported_kernels
    from vkback.program import dispatch_spec
    from vkback.shader import ShaderLibrary

    library = ShaderLibrary()
    different = list({(d.kernel, len(d.args), len(d.push)): d for d in dispatches}.values())
    chip = chip_of(device.caps, os.environ.get("NOUVEAU_CHIPSET", ""))
    with reported_kernels(progress, lambda: len(different)) as on_kernel:

        def one(dispatch: Dispatch) -> Figures:
            spec_of = partial(dispatch_spec, library=library)
            made = figures(device, spec_of(dispatch), dispatch, chip, code=code, spec_of=spec_of)
            on_kernel()
            return made

        library.compile_many([d.kernel for d in different])
        with ThreadPoolExecutor(1 if prints_to_stderr(device.caps) else os.cpu_count() or 1) as pool:
            return list(pool.map(one, different))


def table(found: Sequence[Figures]) -> Iterator[str]:
    """A line a kernel."""
    yield f"{'node':{NODE}} {'kernel':{KERNEL}} {'regs':>4} {'spill':>5} {'waves':>7} {'code':>6} {'in32':>6} bound, alu"
    for f in found:
        waves = "-" if f.waves is None else f"{f.waves}" + (f"/{f.most_waves}" if f.most_waves else "")
        spill = "-" if f.spills is None else f"{f.spills}" + (f"+{f.scratch}" if f.scratch else "")
        bound = f"{f.bound[:6]} {f.arithmetic:.0%}" if f.bound and f.arithmetic is not None else ""
        yield (
            f"{shortened(f.what, NODE):{NODE}} {shortened(_kernel(f), KERNEL):{KERNEL}} {_or_dash(f.registers):>4} {spill:>5} {waves:>7} "
            f"{_or_dash(f.code_bytes):>6} {f'{f.per_32:.1f}' if f.per_32 is not None else '-':>6} {bound}"
        ).rstrip()
    spilling = [f for f in found if f.spills_or_scratch]
    yield from fit(
        f"{len(found)} kernels, {len(spilling)} with spills or scratch memory"
        + (f": {', '.join(f'{f.what} ({_kernel(f)})' for f in spilling)}" if spilling else "")
    )


def _kernel(f: Figures) -> str:
    """As "gemv Q4_K int"."""
    return " ".join(part for part in (f.source.removesuffix(".comp").rpartition("/")[2], f.quant, f.path) if part)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    """Kernels of an earlier --json, by node and source."""
    text = read_text(path, "--against")
    try:
        return {_key(k): k for k in json.loads(text)["kernels"]}
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise UsageError(f"--against {path}: expected what vkback kernels --json wrote: {e}") from e


def _key(kernel: Mapping[str, Any]) -> str:
    return f"{kernel['what']} {kernel['source']} {kernel['quant']} {kernel['path']}"


def changes(found: Sequence[Figures], before: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line a kernel whose figures are not what they were."""
    for f in found:
        old = before.get(_key(f.as_data()))
        if old is None:
            continue
        moved = [f"{name} {old[name]} -> {getattr(f, name)}" for name in COMPARED if old[name] != getattr(f, name)]
        if moved:
            yield from fit(f"{f.what}: {', '.join(moved)}")
