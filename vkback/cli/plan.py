"""vkback plan: what a device is going to run, without running it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from vkback.cli.shell import ActOption, DeviceOption, UsageError, act_of, model_path, one_of

if TYPE_CHECKING:
    from vkback.device import Capabilities
    from vkback.plan.schedule import Schedule

FUSIONS = ("all", "none")
HEADS = ("last", "none", "all")


def plan(
    model: Annotated[str | None, typer.Option("-m", "--model", help="GGUF file or built-in model [default: demo-dense].")] = None,
    device: DeviceOption = None,
    profile: Annotated[str | None, typer.Option(help="Plan for a recorded device instead, as nvidia_h200_linux, or a file.")] = None,
    tokens: Annotated[int, typer.Option("-t", "--tokens", min=1, help="Tokens of the batch.")] = 1,
    ctx: Annotated[int | None, typer.Option("-c", "--ctx", min=1, help="Rows of the KV cache [default: the model's own].")] = None,
    head: Annotated[str, typer.Option(help="Logits of the last token, none or all.")] = "last",
    fusion: Annotated[str, typer.Option(help="all or none.")] = "all",
    act: ActOption = "auto",
) -> None:
    """List the dispatches of a model on a device, stage by stage: kernel, grid, bytes, and why this kernel. Nothing is run."""
    from vkback.models.registry import Model
    from vkback.ops.base import LowerContext
    from vkback.plan import planner
    from vkback.plan.tuning import Tuning

    if device is not None and profile is not None:
        raise UsageError("--device and --profile exclude each other: one is a device that is here, the other one that was recorded")
    caps = _capabilities(device, profile)
    opened = Model.open(model_path(model))
    wanted = cast(Literal["last", "none", "all"], one_of(head, HEADS, "--head"))
    nodes = opened.graph(tokens, ctx or opened.hp.n_ctx_train, head=wanted)
    context = LowerContext(caps, Tuning.for_device(caps), act_of(act))
    schedule = planner.plan(nodes, context, fusion=one_of(fusion, FUSIONS, "--fusion"))
    print(caps.summary_line())
    print("\n".join(listing(schedule)))


def _capabilities(device: str | None, profile: str | None) -> Capabilities:
    from vkback.device import Capabilities, Device

    if profile is not None:
        return Capabilities.from_profile(profile)
    with Device.open(device) as opened:
        return opened.caps


def listing(schedule: Schedule) -> list[str]:
    """A line a dispatch and a line of totals. Dispatches with the same stage number do not depend on each other."""
    lines = [f"{'stage':>5} {'op':18} {'node':28} {'groups':>14} {'kB':>10}  kernel; reason"]
    for number, stage in enumerate(schedule.stages):
        for d in stage:
            groups = "x".join(map(str, d.groups))
            why = f"; {d.reason}" if d.reason else ""
            lines.append(f"{number:5} {d.op:18} {d.label:28} {groups:>14} {d.nbytes / 1e3:10.1f}  {d.kernel.name}{why}")
    dispatches = list(schedule.dispatches())
    lines.append(
        f"{len(schedule.stages)} stages, {len(dispatches)} dispatches, {len({d.kernel for d in dispatches})} kernels; "
        f"{sum(d.nbytes for d in dispatches) / 1e6:.3f} MB moved; activations {schedule.activation_bytes / 1024:.1f} KiB"
    )
    return lines
