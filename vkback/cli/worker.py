"""vkback worker: gives the devices of this machine to commands that run elsewhere, by a Dask scheduler."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vkback.cli.hosts import DevicesOption, device_list


def worker(
    scheduler: Annotated[str, typer.Option("--scheduler", metavar="ADDRESS", help="Of the Dask scheduler, as tcp://HOST:8786.")],
    device: DevicesOption = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, max=256, help="So many workers, dealt out over the devices [default: one a device].")
    ] = None,
) -> None:
    """Start a worker for each device of this machine, by its UUID: every GPU, or where there is none the CPU driver. They take work of
    vkback tune, test-ops, kernels and vkbench that name the same scheduler, and are started anew where a driver takes one with it or the
    scheduler goes away. Whoever reaches the scheduler can run programs as this user: for trusted networks only."""
    from vkback.cluster.errors import require_distributed
    from vkback.cluster.launch import Launcher, placed

    require_distributed()
    where = placed(device_list(device) or ([device] if device is not None else None), workers)

    def report(line: str) -> None:
        print(f"vkback worker: {line}", file=sys.stderr, flush=True)

    with Launcher(scheduler, where, report) as launcher:
        launcher.watch()
