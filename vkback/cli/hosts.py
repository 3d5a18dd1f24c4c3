"""What commands that run on several devices or machines have in common: their options, and the run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkback.cli.shell import UsageError, output_file
from vkback.cli.terminal import CLEARED, StatusLine
from vkback.terminal import redraws

if TYPE_CHECKING:
    from vkback.cluster.journal import UnitJournal
    from vkback.cluster.pull import Pull, Work

DevicesOption = Annotated[
    str | None,
    typer.Option("--device", "-dev", help="Device by index, part of its name, or UUID; several as 0,1: a worker for each shares the work."),
]
SchedulerOption = Annotated[
    str | None, typer.Option("--scheduler", metavar="ADDRESS", help="Workers of this Dask scheduler do the work, as tcp://HOST:8786.")
]
HostsOption = Annotated[
    Path | None, typer.Option("--hosts", metavar="FILE", help="Workers are started over SSH on the hosts in this file, one a line.")
]
WorkersOption = Annotated[int | None, typer.Option("--workers", min=1, max=256, help="So many workers of this machine do the work.")]
JournalOption = Annotated[
    Path | None,
    typer.Option("--journal", metavar="FILE", help="With workers: keep what comes back here; the same command again does what is missing."),
]


def device_list(device: str | None) -> list[str] | None:
    """Selectors of several devices, as 0,1; None for one. Without any, VKBACK_DEVICE is read."""
    from vkback.device import selectors

    found = [str(each) for each in selectors(device) if each is not None]
    return found if len(found) > 1 else None


@dataclass(frozen=True)
class Where:
    """Workers that do the work of a command."""

    devices: list[str] | None
    scheduler: str | None
    hosts: Path | None
    workers: int | None


def workers_of(
    device: str | None, scheduler: str | None, hosts: Path | None, workers: int | None, journal: Path | None = None
) -> Where | None:
    """Where a command runs; None: in its own process, on one device. Raises UsageError where options exclude each other, and ClusterError
    where what they need is not installed."""
    listed = device_list(device)
    given = {"--scheduler": scheduler, "--hosts": hosts, "--workers": workers}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} exclude each other: each says which workers do the work")
    if not named and listed is None:
        if journal is not None:
            raise UsageError("--journal is for work by workers; expected --device 0,1, --workers, --scheduler or --hosts beside it")
        return None
    if named and named[0] != "--workers" and device is not None:
        raise UsageError(f"--device {device}: which devices work, {named[0]} says; give it to `vkback worker` there")
    from vkback.cluster.errors import require_distributed

    require_distributed()
    if journal is not None and not journal.exists():
        output_file(journal, "--journal")
    return Where(listed or ([device] if device is not None else None), scheduler, hosts, workers)


def say(line: str) -> None:
    """A line of what happens to workers, on stderr, in the place of a status line."""
    print(f"{CLEARED if redraws(sys.stderr) else ''}vkback: {line}", file=sys.stderr, flush=True)


def run_on(
    where: Where, work: Work, progress: Callable[[Pull], str], *, kernels: bool = False, flush: Callable[[], None] = lambda: None
) -> Pull:
    """Do the work by workers. progress: a text for the status line; kernels: refuse workers whose kernels are others than this command's;
    flush: called now and then. Raises ClusterError."""
    from vkback.autotune.journal import kernel_identity
    from vkback.cluster.connect import connected
    from vkback.cluster.pull import Pull
    from vkback.shader import ShaderLibrary

    own = kernel_identity(ShaderLibrary()) if kernels else None
    with (
        StatusLine(wanted=True) as status,
        connected(scheduler=where.scheduler, hosts=where.hosts, devices=where.devices, workers=where.workers, told=say) as cluster,
    ):

        def each(pull: Pull) -> None:
            flush()
            status.say(f"vkback: {pull.workers} workers, {progress(pull)}")

        pull = Pull(cluster, work, say, kernels=own)
        pull.run(each)
        return pull


def journal_of(path: Path | None, **what: Any) -> UnitJournal:
    from vkback.cluster.journal import UnitJournal

    return UnitJournal(path, what)
