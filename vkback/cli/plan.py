"""vkback plan: what a device is going to run, how long that should take, and on request how long it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from vkback.cli.loading import ActOption, FlashAttnOption, GpuLayersOption, RowsOption, load_options
from vkback.cli.shell import (
    CompileOnlyOption,
    DeviceOption,
    ModelOption,
    ShapeOption,
    UsageError,
    act_of,
    bars,
    cache_rows,
    described_model,
    flash_attn_of,
    model_path,
    one_of,
)
from vkback.cli.terminal import TABLE, brief_kernel_text, defines_text, fit, shortened, unknown_data, unknown_lines
from vkback.terminal import columns
from vkback.units import counted, size_text

if TYPE_CHECKING:
    from vkback.device import Capabilities
    from vkback.engine.host_weights import Placement
    from vkback.models.registry import Model
    from vkback.plan.cost.forecast import Costs, Wait
    from vkback.plan.schedule import Schedule
    from vkback.timing.stages import StageTimes

FUSIONS = ("all", "none")
HEADS = ("last", "none", "all")

NAMED = 4
"""Most tensors named of those a stage waits for."""

NODE = 18
"""Columns for a node's name."""


def plan(
    model: ModelOption = None,
    shape: ShapeOption = None,
    device: DeviceOption = None,
    profile: Annotated[str | None, typer.Option(help="Plan for a recorded device instead, as nvidia_h200_linux, or a file.")] = None,
    tokens: Annotated[int, typer.Option("-t", "--tokens", min=1, help="Tokens of the batch.")] = 1,
    ctx: RowsOption = None,
    depth: Annotated[int, typer.Option("-d", "--depth", min=0, help="Rows of the cache in use before the batch.")] = 0,
    head: Annotated[str, typer.Option(help="Logits of the last token, none or all.")] = "last",
    fusion: Annotated[str, typer.Option(help="all or none.")] = "all",
    flash_attn: FlashAttnOption = "auto",
    act: ActOption = "auto",
    n_gpu_layers: GpuLayersOption = None,
    compile_only: CompileOnlyOption = False,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option("--diff", metavar="A B", help="Choices that differ between builds, tables or recorded devices, over all of these."),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Load the model and time every stage.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="The op, the reason and all defines of each kernel.")] = False,
) -> None:
    """List the dispatches of a model on a device, stage by stage: node, kernel with the parameters that matter, workgroups, bytes, the time
    that bytes and barriers should take, and what the stage waits for. Without --measure nothing of the model is run."""
    from vkback.device import Capabilities, Device
    from vkback.ops.lowering import LowerContext
    from vkback.plan import planner
    from vkback.shader import ShaderLibrary
    from vkback.timing.stages import device_costs, measure_stages, profile_costs
    from vkback.tuning.lookup import Tuning, identity

    if diff is not None:
        from vkback.cli.plan_diff import diff as print_diff

        if device is not None or measure:
            raise UsageError("--diff excludes --device and --measure: it plans for recorded devices (--profile takes one of them)")
        if model is not None and shape is not None:
            raise UsageError("--shape and --model exclude each other: one is the shape of a model, the other a file")
        planned = shape or (str(model_path(model).absolute()) if model else None)
        print_diff(diff, device=profile, model=planned, tokens=tokens, as_json=as_json, verbose=verbose)
        return
    if device is not None and profile is not None:
        raise UsageError("--device and --profile exclude each other: one is a device that is here, the other one that was recorded")
    if measure and profile is not None:
        raise UsageError("--measure and --profile exclude each other: a recorded device cannot be measured")
    if measure and compile_only:
        raise UsageError("--measure and --compile-only exclude each other: what is only compiled takes no time")
    placement = load_options(n_gpu_layers=n_gpu_layers).placement if n_gpu_layers is not None else None
    wanted = cast(Literal["last", "none", "all"], one_of(head, HEADS, "--head"))
    one_of(fusion, FUSIONS, "--fusion")
    flash = bool(flash_attn_of(flash_attn))
    if measure and shape is not None:
        raise UsageError("--measure and --shape exclude each other: a shape has no weights; vkback synth writes some")
    with ExitStack() as stack:
        opened, name = stack.enter_context(described_model(model, shape))
        here = stack.enter_context(Device.open(device, compile_only=not measure and (compile_only or "auto"))) if profile is None else None
        caps = here.caps if here else Capabilities.from_profile(profile or "")
        nodes = opened.graph(tokens, cache_rows(opened, ctx, tokens, depth), head=wanted)
        tables = Tuning.for_device(caps)
        schedule = planner.plan(nodes, LowerContext(caps, tables, act_of(act), flash=flash), fusion=fusion)
        library = ShaderLibrary()
        costs = device_costs(here, library) if here and not here.compile_only else profile_costs(profile, caps)
        there = in_host_memory(opened, schedule, caps, placement, costs.read_gb_s) if placement is not None else None
        times = measure_stages(opened, here, library, schedule, depth=depth, progress=bars(not as_json)) if here and measure else None
    heading = [part for line in unknown_lines(caps) for part in fit(line)]
    if as_json:
        about = {"device": caps.name, "unknown": unknown_data(caps), "model": name, "tuning": identity(tables)}
        print(json.dumps({**about, **as_data(schedule, costs, tokens, depth, times, caps), "host": there}, indent=1))
        return
    placed = fit(there["text"]) if there is not None else []
    print("\n".join([*fit(caps.summary_line()), *heading, *listing(schedule, costs, tokens, depth, times, verbose, caps), *placed]))


def as_data(
    schedule: Schedule, costs: Costs, tokens: int, depth: int, times: StageTimes | None, caps: Capabilities | None = None
) -> dict[str, Any]:
    """The plan as plain values; times in microseconds, null where nothing was measured."""
    from vkback.plan.cost.forecast import moved_bytes, predicted_us, waits

    stages: list[dict[str, Any]] = [
        {
            "stage": number,
            "predicted_us": predicted_us(stage, costs, depth + tokens, number in schedule.barrier_free),
            "measured_us": times.stages[number] if times else None,
            "barrier_free": number in schedule.barrier_free,
            "waits_for": [{"stage": w.stage, "tensor": w.tensor, "after": w.after, "spins": w.spins} for w in waited],
            "dispatches": [
                {
                    "op": d.op,
                    "node": d.label,
                    "kernel": d.kernel.name,
                    "groups": list(d.groups),
                    "bytes": moved_bytes(d, depth + tokens),
                    "flops": d.flops,
                    "reason": d.reason,
                }
                for d in stage
            ],
        }
        for number, (stage, waited) in enumerate(zip(schedule.stages, waits(schedule), strict=True))
    ]
    dispatches = list(schedule.dispatches())
    predicted = sum(s["predicted_us"] for s in stages)
    summary: dict[str, Any] = {
        "stages": len(stages),
        "barrier_free": len(schedule.barrier_free),
        "dispatches": len(dispatches),
        "kernels": len({d.kernel for d in dispatches}),
        "bytes": sum(moved_bytes(d, depth + tokens) for d in dispatches),
        "activation_bytes": schedule.activation_bytes,
        "memory": memory_of(schedule, caps),
        "predicted_us": predicted,
        "predicted_tokens_per_s": 1e6 * tokens / predicted,
        "measured_us": sum(times.stages) if times else None,
        "measured_together_us": times.whole if times else None,
        "measured_tokens_per_s": 1e6 * tokens / times.whole if times else None,
    }
    known = {"read_gb_s": costs.read_gb_s, "stage_us": costs.stage_us, "barrier_free_us": costs.barrier_free_us, "source": costs.source}
    choices = [{"node": name, "kernel": c.kernel, "rounds": c.rounds, "source": c.source, "text": str(c)} for name, c in schedule.choices]
    return {"tokens": tokens, "depth": depth, "costs": known, "stages": stages, "choices": choices, "summary": summary}


def memory_of(schedule: Schedule, caps: Capabilities | None) -> dict[str, int] | None:
    """Bytes of the device's memory that a plan's weights, caches and activations take, and in how many buffers at least; "device": of its
    largest heap, 0 where that is not known."""
    from vkback.ops.storage import nbytes, shards
    from vkback.plan.schedule import aligned

    if caps is None:
        return None
    found = schedule.tensors().values()
    weights = sum(
        sum(aligned(s.layout.nbytes) for s in shards(t, caps)) if len(t.shape) > 1 else aligned(4 * t.shape[0])
        for t in found
        if t.kind == "weight"
    )
    caches = sum(aligned(nbytes(t)) for t in found if t.kind == "state")
    own = {"weights": weights, "caches": caches, "activations": schedule.activation_bytes}
    limit = max(1, caps.largest_buffer)
    return {
        **own,
        "bytes": sum(own.values()),
        "buffers": sum(-(-size // limit) for size in own.values()),
        "device": max((heap.size for heap in caps.heaps if heap.device_local), default=0),
    }


def in_host_memory(model: Model, schedule: Schedule, caps: Capabilities, placement: Placement, own_gb_s: float) -> dict[str, Any]:
    """What -ngl puts in memory of the host, as plain values: that in words, its bytes, those of weights on the device, layers with all
    weights there, and tokens a second. "auto" fits what the schedule needs into all memory of the device; where that is
    not known, and of a CPU driver, nothing goes to the host. own_gb_s: how fast the device reads its own memory."""
    from vkback.engine.host_weights import Forecast, HostRule, fitting, guessed_rates, host_weights, lookup_tables, named
    from vkback.engine.weights import device_bytes

    weights = {name: t for name, t in schedule.tensors().items() if t.kind == "weight"}
    rule, memory = HostRule(model.hp.n_layer, lookup_tables(model.whole_graphs())), memory_of(schedule, caps)
    assert memory is not None
    found = host_weights(weights, placement.rule(rule), caps)
    if memory["device"] and not caps.software:
        found = fitting(weights, rule, placement, caps, memory["device"], [schedule], memory["caches"])
    own, host = guessed_rates(caps, own_gb_s)
    forecast, stay = Forecast.of(schedule, found.names, own, host), sum(device_bytes(w, caps) for w in weights.values()) - found.nbytes
    told_of_host = f"{named(found)}; forecast {forecast.text}; the host's rate is a guess" if found.names else "nothing in host memory"
    text = f"weights: {size_text(stay)} on the device, {told_of_host}"
    told = {"bytes": found.nbytes, "device_bytes": stay, "n_gpu_layers": found.rule.on_device}
    return {"text": text, **told, "tokens_per_s": forecast.tokens_per_s}


def listing(
    schedule: Schedule,
    costs: Costs,
    tokens: int,
    depth: int,
    times: StageTimes | None,
    verbose: bool = False,
    caps: Capabilities | None = None,
) -> list[str]:
    """A line a dispatch, below those of a stage what it waits for and how, and lines of totals; none is wider than a terminal.

    Times stand beside the first dispatch of a stage; dispatches with the same stage number do not depend on each other.
    verbose  below each dispatch its op, the reason for its kernel, and all defines; in the end what was chosen for each product and each
             attention
    """
    from vkback.plan.cost.forecast import waits

    data = as_data(schedule, costs, tokens, depth, times, caps)
    heads = f"{'us':>7} {'measured':>8}" if times else f"{'us':>7}"
    lines = [_row("stage", "node", "kernel, its threads", "" if times else "groups", "kB", heads)]
    for dispatches, stage, waited in zip(schedule.stages, data["stages"], waits(schedule), strict=True):
        figures = f"{stage['predicted_us']:7.2f}" + (f" {stage['measured_us']:8.2f}" if times else "")
        for dispatch, d in zip(dispatches, stage["dispatches"], strict=True):
            groups = "x".join(map(str, d["groups"])).removesuffix("x1").removesuffix("x1")
            kilobytes = f"{d['bytes'] / 1e3:.{1 if d['bytes'] < 1e8 else 0}f}"
            figures = figures or " " * (16 if times else 7)
            kernel = brief_kernel_text(dispatch.kernel)
            lines.append(_row(str(stage["stage"]), d["node"], kernel, "" if times else groups, kilobytes, figures))
            if verbose:
                lines += fit(f"      {d['op']} {d['node']}, {groups} workgroups" + (f": {d['reason']}" if d["reason"] else ""))
                lines += fit(f"      {defines_text(dispatch.kernel)}")
            figures = ""
        if stage["barrier_free"]:
            lines += fit(f"      barrier-free: spins on {_spun_on(waited)}")
        elif waited:
            lines += fit(f"      barrier: waits for {_named(waited)}")
    if verbose:
        lines += [part for name, choice in schedule.choices for part in fit(f"{name}: {choice}")]
    return lines + [part for line in _totals(data["summary"], costs, times) for part in fit(line)]


def _row(stage: str, node: str, kernel: str, groups: str, kilobytes: str, figures: str) -> str:
    """A line as wide as a terminal, what the figures leave for the kernel; workgroups, where they are wanted, beside them."""
    end = (f" {groups:>7}" if groups else "") + f" {kilobytes:>7} {figures}"
    room = min(columns(), TABLE) - 5 - 1 - NODE - 1 - len(end)
    kernel = kernel if len(kernel) <= room else kernel[: room - 1] + "~"
    return f"{stage:>5} {shortened(node, NODE):{NODE}} {kernel:{room}}{end}".rstrip()


def _totals(s: Mapping[str, Any], costs: Costs, times: StageTimes | None) -> Iterator[str]:
    """What the stages come to: the summary of `as_data` in words."""
    memory, held = s["memory"], ""
    if memory:
        held = (
            f"; weights {size_text(memory['weights'])}, caches {size_text(memory['caches'])}: {size_text(memory['bytes'])} of memory in "
            f"{counted(memory['buffers'], 'buffer')} or more" + (f", of {size_text(memory['device'])}" if memory["device"] else "")
        )
    barrier_free = f" ({s['barrier_free']} barrier-free)" if s["barrier_free"] else ""
    yield (
        f"{s['stages']} stages{barrier_free}, {s['dispatches']} dispatches, {s['kernels']} kernels; "
        f"{s['bytes'] / 1e6:.3f} MB moved; activations {s['activation_bytes'] / 1024:.1f} KiB" + held
    )
    yield (
        f"predicted: {s['predicted_us']:.1f} us, {s['predicted_tokens_per_s']:.1f} t/s, by {costs.read_gb_s:.1f} GB/s and "
        f"{costs.stage_us:.2f} us a stage ({costs.source})"
        + (f", {costs.barrier_free_us:.2f} a barrier-free one (a third of it, as on an H200)" if s["barrier_free"] else "")
    )
    if times:
        yield (
            f"measured: {s['measured_us']:.1f} us stage by stage{' with barriers before all' if s['barrier_free'] else ''}; "
            f"{s['measured_together_us']:.1f} us together{' as planned' if s['barrier_free'] else ''}, "
            f"{s['measured_tokens_per_s']:.1f} t/s"
        )


def _spun_on(waited: list[Wait]) -> str:
    """What the kernels of a barrier-free stage spin on, and what needs no spin-wait because it happened before."""
    before = [w for w in waited if not w.spins]
    return _named([w for w in waited if w.spins]) + (f"; happened before: {_named(before)}" if before else "")


def _named(waited: list[Wait]) -> str:
    """Tensors with the stage that touched them last, the nearest first."""
    shown = [
        f"{'part of ' if w.spins == 'part' else ''}{w.tensor} ({'written' if w.after == 'write' else 'read'} by {w.stage})"
        for w in waited[:NAMED]
    ]
    more = f" and {len(waited) - NAMED} more" if len(waited) > NAMED else ""
    return ", ".join(shown) + more
