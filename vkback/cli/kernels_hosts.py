"""vkback kernels by workers: each kind of device and driver compiles all kernels, its workers share them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkback.cli.hosts import Where, journal_of
from vkback.cli.listed_work import KindResults, ListedWork

if TYPE_CHECKING:
    from vkback.cluster.worker import Station, Tell

PARTS = 8
"""Units of a kind of device: enough that workers end together, few since each plans all."""


def compile_part(station: Station, args: Mapping[str, Any], tell: Tell) -> list[dict[str, Any]]:
    """On a worker: figures of each PARTS-th kernel, from args["part"] on, with the place of each among all."""
    from vkback.cli.kernels import chosen_dispatches, compiled
    from vkback.device import Device
    from vkback.ops.lowering import LowerContext
    from vkback.tuning.lookup import Tuning

    def opened(stack: ExitStack) -> Device:
        return stack.enter_context(Device.open(station.device or None, statistics=True, compile_only=True))

    device = station.kept("kernels", opened)
    ctx = LowerContext(device.caps, Tuning.for_device(device.caps), args["act"])
    dispatches = chosen_dispatches(args["case"], args["every"], args["model"], args["shape"], args["tokens"], ctx)
    different = list({(d.kernel, len(d.args), len(d.push)): d for d in dispatches}.values())
    places = range(args["part"], len(different), PARTS)
    found = compiled(device, [different[i] for i in places], code=args["code"])
    return [{"place": i, **figures.as_data()} for i, figures in zip(places, found, strict=True)]


def kernels_by_workers(where: Where, journal: Path | None, args: Mapping[str, Any]) -> list[tuple[KindResults, list[Any]]]:
    """Figures of each kind of device, in the order in which one device alone would list them."""
    from vkback.cluster.pull import Unit
    from vkback.compilers.kernel_figures import Figures

    units = [Unit(f"part {i + 1} of {PARTS}", "vkback.cli.kernels_hosts:compile_part", {**args, "part": i}) for i in range(PARTS)]
    kinds = ListedWork(units, journal_of(journal, command="kernels", **args), "parts").run(where)
    found = []
    for kind in kinds:
        listed = sorted((values for part in kind.values.values() for values in part), key=lambda values: values["place"])
        found.append((kind, [Figures(**{name: v for name, v in values.items() if name != "place"}) for values in listed]))
    return found
