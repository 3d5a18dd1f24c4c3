"""vkback tune --record, --export and --simulate: spaces of kernel shapes in Kernel Tuner's formats, and searches replayed on them."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkback.cli.shell import UsageError
from vkback.cli.terminal import StatusLine
from vkback.cli.tune_families import TASKS_OF, TuneRequest

if TYPE_CHECKING:
    from vkback.autotune.spaces import Space
    from vkback.device import Device
    from vkback.ops.lowering import LowerContext

SAVE_S = 5.0
"""A space that is being recorded is written this often."""


def stem_of(line: str) -> str:
    """A task's name as that of a file."""
    return re.sub(r"[^A-Za-z0-9]+", "_", line).strip("_").lower()[:120]


def folder_of(folder: Path, option: str) -> Path:
    """A folder to write into, made where it is not there. Raises UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(f"{option} {folder}: {e.strerror}; expected a folder to write into") from e
    return folder


def record_spaces(
    device: Device, ctx: LowerContext, ops: Sequence[str], request: TuneRequest, folder: Path, budget_s: float, told: dict[str, Any]
) -> bool:
    """Time every point of each task and write the spaces. Whether all is recorded. told: gets what was written."""
    from vkback.autotune.journal import kernel_identity
    from vkback.autotune.kernel_tuner import read, write
    from vkback.autotune.search import SweepError
    from vkback.autotune.spaces import Space, record
    from vkback.shader import ShaderLibrary

    caps = device.caps
    driver, kernels = f"{caps.driver_name} {caps.driver_info}".strip(), kernel_identity(ShaderLibrary())
    deadline, whole = time.monotonic() + budget_s, True
    written = told.setdefault("spaces", [])
    for family in (f for op in ops for f in TASKS_OF[op](device, request, ctx) if f.tasks):
        tunable = family.make(ctx)
        with tunable.opened(), StatusLine() as status:
            for task in family.tasks:
                stem, names = stem_of(task.line), tuple(tunable.chosen(task).incumbent._asdict())
                space = Space(caps.name, driver, kernels, tunable.journal, task.line, names, caps=caps.to_dict())
                file = folder / f"{stem}.cache.json"
                if file.exists():
                    before = read(file)
                    if (before.device, before.driver, before.kernels, before.names) != (caps.name, driver, kernels, names):
                        raise UsageError(
                            f"--record {file} is of {before.device}, {before.driver}, or of other kernels; expected another folder"
                        )
                    space.times, space.invalid = before.times, before.invalid
                saved = time.monotonic()

                def each(point: object, space: Space = space, stem: str = stem) -> None:
                    nonlocal saved
                    status.say(f"vkback: {space.line}: {len(space.times)} points timed, {len(space.invalid)} failed")
                    if time.monotonic() - saved > SAVE_S:
                        write(space, folder, stem)
                        saved = time.monotonic()

                try:
                    done = record(tunable, task, space, deadline, each)
                except SweepError as e:
                    print(e, file=sys.stderr)
                    done = False
                whole &= done
                if space.times:
                    write(space, folder, stem)
                status.clear()
                text = "all" if done else "not all: the same command goes on with the others"
                print(f"{file}: {len(space.times)} points timed, {len(space.invalid)} failed; {text}", flush=True)
                written.append({"file": str(file), "points": len(space.times), "failed": len(space.invalid), "whole": done})
    return whole


def export_spaces(device: Device, folder: Path, told: dict[str, Any]) -> None:
    """Write what earlier sweeps of a device have timed. Raises SweepError where there is nothing."""
    from vkback.autotune.device_table import DeviceTable
    from vkback.autotune.kernel_tuner import write
    from vkback.autotune.search import SweepError
    from vkback.autotune.spaces import TUNED, Space
    from vkback.paths import user_tuning_root
    from vkback.shader import ShaderLibrary

    own = DeviceTable(device.caps, ShaderLibrary(), user_tuning_root())
    kernels = str(own.journal.identity["kernels"])
    written = told.setdefault("spaces", [])
    for name, family in TUNED.items():
        for result in own.results(name, family.maker.point):
            names = tuple(result.before._asdict())
            times = {at: (us, spread) for at, us, spread in result.timed}
            if not times:  # of a journal that did not keep them
                continue
            starts = (tuple(result.before),)
            space = Space(device.caps.name, own.driver, kernels, name, result.line, names, starts, times, caps=device.caps.to_dict())
            files = write(space, folder, stem_of(result.line))
            print(f"{files[0]}: {len(times)} points", flush=True)
            written.append({"file": str(files[0]), "points": len(times)})
    if not written:
        raise SweepError(f"[tune] nothing to export: no sweep of {device.caps.name} has kept its points. Run vkback tune first")


def show_simulation(files: Sequence[Path], told: dict[str, Any]) -> None:
    """Replay the strategies on each space and print what they found."""
    from vkback.autotune.kernel_tuner import read
    from vkback.autotune.simulate import MARKS, RUNS, WITHIN, simulate

    paths = [p for file in files for p in (sorted(file.glob("*.cache.json")) if file.is_dir() else [file])]
    if not paths:
        raise UsageError(f"--simulate {files[0]}: a folder without *.cache.json; expected what --record or --export writes")
    spaces = [read(path) for path in paths]
    made = told.setdefault("spaces", [])
    for path, space in zip(paths, spaces, strict=True):
        found = simulate(space)
        print(f"\n{space.line or space.family} on {space.device}: {len(space.times)} points, the best {space.optimum:.2f} us")
        head = [f"{'search':22}", *(f"{f'to {100 * share:.0f} %':>7}" for share in WITHIN), *(f"{f'at {mark}':>7}" for mark in MARKS)]
        print(" ".join([*head, f"{'end':>7}", f"{'points':>7}"]))
        for each in found:
            needed = [f"{n:7.0f}" if n is not None else f"{'-':>7}" for n in each.needed]
            print(" ".join([f"{each.strategy:22}", *needed, *(f"{100 * best:6.1f}%" for best in each.best), f"{each.spent:7.0f}"]))
        made.append(
            {"file": str(path), "points": len(space.times), "optimum_us": space.optimum, "found": [dataclasses.asdict(f) for f in found]}
        )
    if len(spaces) > 1:
        print(f"\nall {len(spaces)} spaces, means of {RUNS} runs' medians")
        print(" ".join([f"{'search':22}", *(f"{f'at {mark}':>7}" for mark in MARKS), f"{'end':>7}", f"{'points':>7}"]))
        for name, rows in _by_strategy(made).items():
            best = [sum(row["best"][i] for row in rows) / len(rows) for i in range(len(MARKS) + 1)]
            spent = sum(row["spent"] for row in rows) / len(rows)
            print(" ".join([f"{name:22}", *(f"{100 * share:6.1f}%" for share in best), f"{spent:7.0f}"]))
    print(
        "\nto 5 %: evaluations until within 5 % of the best, in half of the runs; at 25: the best time over that found after 25 evaluations"
    )


def _by_strategy(made: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for space in made:
        for found in space["found"]:
            rows.setdefault(found["strategy"], []).append(found)
    return rows
