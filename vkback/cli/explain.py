"""vkback explain: which kernel a device would run for a case, and why."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkback.cli.loading import ActOption
from vkback.cli.shell import DeviceOption, JsonOption, UsageError, act_of, sync_of
from vkback.cli.terminal import defines_text, fit, kernel_text, unknown_data, unknown_lines

if TYPE_CHECKING:
    from vkback.device import Capabilities, Device
    from vkback.graph import Node
    from vkback.ops.dispatch import Dispatch
    from vkback.ops.family import Choice, Chooser
    from vkback.ops.lowering import LowerContext
    from vkback.ops.op import KernelChoice
    from vkback.shader import ShaderLibrary
    from vkback.tuning.lookup import Tuning


def explain(
    case: Annotated[str, typer.Argument(metavar="CASE", help='As "MUL_MAT(type_a=q4_K,m=4096,n=1,k=14336)"; else as test-ops prints it.')],
    device: DeviceOption = None,
    profile: Annotated[str | None, typer.Option(help="A recorded device instead, as nvidia_h200_linux, or a file.")] = None,
    act: ActOption = "auto",
    sync: Annotated[str, typer.Option(help="barrier, or sentinel: as in a token whose stages run barrier-free.")] = "barrier",
    statistics: Annotated[bool, typer.Option("--statistics", help="What the driver says of the kernel: registers, code, spills.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="All defines of the kernel.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what the tuning tables say about a case on a device: path, shape, the row that wins with its evidence, the rows behind it, what
    the device's limits made of it, and the kernel. Nothing is run; with --statistics it is compiled."""
    from vkback.device import Capabilities, Device
    from vkback.ops.lowering import LowerContext
    from vkback.shader import ShaderLibrary
    from vkback.tuning.lookup import Tuning, identity

    if device is not None and profile is not None:
        raise UsageError("--device and --profile exclude each other: one is a device that is here, the other one that was recorded")
    if statistics and profile is not None:
        raise UsageError("--statistics and --profile exclude each other: only a driver that is here compiles kernels")
    node, library = node_of(case), ShaderLibrary()

    def lines(caps: Capabilities, here: Device | None) -> str:
        tables = Tuning.for_device(caps)
        ctx = context_for(case, LowerContext(caps, tables, act_of(act), sync_of(sync)))
        if as_json:
            about = {"case": case.strip(), "device": caps.name, "unknown": unknown_data(caps), "tuning": identity(tables)}
            return json.dumps({**about, **as_data(node, ctx, tables, library, here), "own_rule": own_rule(node, ctx)}, indent=1)
        made = explanation(node, ctx, tables, library, here, verbose)
        heading = f"{case.strip()} on {caps.name} ({caps.vendor} {caps.architecture})"
        fitted = [part for line in (heading, *unknown_lines(caps), *made) for part in fit(line)]
        return "\n".join([*fitted, "", *own_rule_lines(own_rule(node, ctx))])

    if profile is not None:
        print(lines(Capabilities.from_profile(profile), None))
        return
    with Device.open(device, statistics=statistics, compile_only=True) as opened:
        print(lines(opened.caps, opened if statistics else None))


def node_of(case: str) -> Node:
    """The node of a case. Raises CaseLineError for an unknown op and for parameters that make no case, PlanError for one that this project
    cannot run."""
    from vkback.harness.cases import find_case

    return find_case(case).node()


def context_for(case: str, ctx: LowerContext) -> LowerContext:
    """The context that a case runs in, where its line says something of that."""
    from vkback.harness.cases import CONDITIONS, context_of, make_case
    from vkback.ops.case_line import parse_line

    name, params = parse_line(case)
    return context_of(make_case(name, params), ctx) if params.keys() & {"act", *CONDITIONS} else ctx


class Noting:
    """Tables that keep note of what they were asked."""

    def __init__(self, tables: Chooser) -> None:
        self.tables = tables
        self.asked: list[tuple[str, Mapping[str, Any], Choice]] = []

    def pick(self, family: str, **query: Any) -> Choice:
        choice = self.tables.pick(family, **query)
        if not any(known[:2] == (family, query) for known in self.asked):
            self.asked.append((family, query, choice))
        return choice


TableQuery = tuple[str, Mapping[str, Any], "Choice"]
"""A family of tables, what was asked of it, and what it chose."""


def lowered(node: Node, ctx: LowerContext) -> tuple[list[TableQuery], KernelChoice | None, list[Dispatch]]:
    """What a node asks of the tables, the kernel that is chosen for it, where that is a value, and the dispatches that it comes to."""
    from vkback.ops.op import OPS
    from vkback.plan.sync import synchronized

    noting = Noting(ctx.tuning)
    ctx = dataclasses.replace(ctx, tuning=noting)
    choice = OPS[node.op].choose(node, ctx)
    dispatches = OPS[node.op].lower(dataclasses.replace(node, choice=choice), ctx)
    if ctx.sync == "sentinel":
        dispatches = [synchronized(d, True) if d.waits else d for d in dispatches]
    return noting.asked, choice, dispatches


def as_data(node: Node, ctx: LowerContext, tables: Tuning, library: ShaderLibrary, device: Device | None = None) -> dict[str, Any]:
    """What `explanation` says, as plain values: choices with the rows that matched, the winner first, and dispatches."""
    from vkback.ops.family import table_word
    from vkback.program import dispatch_spec

    asked, kernel, dispatches = lowered(node, ctx)
    return {
        "kernel": None if kernel is None else {"kernel": kernel.kernel, "rounds": kernel.rounds, "text": str(kernel)},
        "choices": [
            {
                "family": family,
                "for": {key: table_word(value) for key, value in query.items()},
                "chosen": {key: table_word(value) for key, value in choice.params.items()},
                "rows": [
                    {"where": r.where, "matches": r.about, "set": {k: table_word(v) for k, v in r.set.items()}, "measured": r.measured}
                    for r in tables.rows(family, query)
                ],
            }
            for family, query, choice in asked
        ],
        "dispatches": [
            {
                "kernel": d.kernel.source.removesuffix(".comp"),
                "defines": dict(d.kernel.defines),
                "subgroup_size": d.kernel.subgroup_size,
                "groups": list(d.groups),
                "buffers": len(d.args),
                "push_bytes": len(d.push),
                "bytes": d.nbytes,
                "flops": d.flops,
                "reason": d.reason,
                "adjusted": [str(a) for a in d.config.adjustments] if d.config is not None else [],
                "statistics": [dataclasses.asdict(s) for s in device.kernel_statistics(dispatch_spec(d, library))] if device else [],
            }
            for d in dispatches
        ],
    }


def own_rule(node: Node, ctx: LowerContext) -> dict[str, Any]:
    """Where a rule of one's own for this case goes: the file that the device reads, a row for each family of tables that was asked, which
    sets what is chosen now, and the tables of that folder that the device does not read."""
    from vkback.ops.family import FAMILIES
    from vkback.paths import user_tuning_root
    from vkback.tuning.lookup import device_table, user_tables
    from vkback.tuning.table import row_lines

    asked, _, _ = lowered(node, ctx)
    folder, name = user_tuning_root(), device_table(ctx.caps)
    kept = {family: (query, choice) for family, query, choice in asked if not FAMILIES[family].fixed}
    rows = {
        family: row_lines(family, {key: query[key] for key in OWN_KEYS if key in query} or query, dict(choice.params), "what you measured")
        for family, (query, choice) in kept.items()
    }
    others = [path.name for path in user_tables(folder) if path.name != name]
    return {"file": str(folder / name) if folder else name, "rows": rows, "not_read": others}


OWN_KEYS = ("quant", "experts", "n", "m", "k", "n_head", "head_dim", "n_ctx")
"""Match keys of a rule for one case, as far as its family has them."""


def own_rule_lines(rule: Mapping[str, Any]) -> Iterator[str]:
    """The same in words, ready to be copied."""
    if not rule["rows"]:
        return
    yield f"a rule of your own goes to {rule['file']}:"
    for lines in rule["rows"].values():
        yield from (f"  {line}" for line in lines)
    if rule["not_read"]:
        yield f"this device does not read {', '.join(rule['not_read'])} beside it"


def explanation(
    node: Node, ctx: LowerContext, tables: Tuning, library: ShaderLibrary, device: Device | None = None, verbose: bool = False
) -> list[str]:
    """Lines about every choice that the lowering of a node asks for, and every dispatch it comes to.

    device   open for statistics: what its driver says of each kernel, too
    verbose  all defines of each kernel
    """
    asked, kernel, dispatches = lowered(node, ctx)
    lines: list[str] = []
    for family, query, choice in asked:
        lines += ["", *_chosen(family, query, choice, tables)]
    if kernel is not None:
        lines += ["", f"chosen: {kernel}"]
    for dispatch in dispatches:
        lines += ["", *_kernel(dispatch, ctx.caps, library, verbose)]
        if dispatch.config is not None:
            lines += [f"  adjusted: {adjustment}" for adjustment in dispatch.config.adjustments] or ["  shape as the tables say"]
        if device is not None:
            lines += [f"  {line}" for line in _statistics(dispatch, library, device)]
    return lines


def _statistics(dispatch: Dispatch, library: ShaderLibrary, device: Device) -> Iterator[str]:
    from vkback.program import dispatch_spec

    for s in device.kernel_statistics(dispatch_spec(dispatch, library)):
        yield f"{s.executable}: {s.name} {s.value}" + (f" ({s.description})" if s.description else "")


def _chosen(family: str, query: Mapping[str, Any], choice: Choice, tables: Tuning) -> Iterator[str]:
    """The choice, and the rows that matched, the winner first."""
    from vkback.ops.family import table_word

    yield f"{family} for {', '.join(f'{k} = {table_word(v)}' for k, v in query.items())}:"
    yield "  " + ", ".join(f"{k} = {table_word(v)}" for k, v in choice.params.items())
    origins = tables.origins(family, query)
    for place, row in enumerate(tables.rows(family, query), 1):
        gives = [key for key in row.set if origins[key] is row]
        over = [f"{key} {table_word(row.set[key])}" for key in row.set if key not in gives]
        says = f"gives {', '.join(gives)}" if gives else "gives nothing"
        yield f"  {place}. {row.where} ({row.about}): {says}" + (f"; behind: {', '.join(over)}" if over else "")
        yield f"     {row.measured}"


def _kernel(dispatch: Dispatch, caps: Capabilities, library: ShaderLibrary, verbose: bool) -> Iterator[str]:
    from vkback.device.spirv import inspect
    from vkback.shader import NoCompiler

    kernel = dispatch.kernel
    yield f"kernel {kernel_text(kernel)}"
    if verbose:
        yield f"  {defines_text(kernel)}"
    try:
        module = inspect(library.spirv(kernel))
        threads = "x".join(map(str, module.workgroup_size({})))
        memory = f"{module.shared_bytes} of {caps.max_shared_memory} bytes of shared memory"
        lacks = module.missing(caps)
        if lacks:
            memory += f"; THE DEVICE LACKS {', '.join(lacks)}"
    except NoCompiler:
        threads, memory = "?", "shared memory unknown without a shader compiler"
    subgroup = f"subgroups of {kernel.subgroup_size}" if kernel.subgroup_size else "any subgroup size"
    yield f"  grid {'x'.join(map(str, dispatch.groups))} workgroups of {threads} threads, {subgroup}, {memory}"
    yield (
        f"  {len(dispatch.args)} buffers, {len(dispatch.push)} of {caps.max_push_constants} bytes of push constants, "
        f"{dispatch.nbytes / 1e6:.3f} MB to move"
    )
