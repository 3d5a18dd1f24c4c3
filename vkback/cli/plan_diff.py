"""vkback plan --diff: every kernel choice that differs between two builds, states of the tuning tables, or recorded devices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vkback
from vkback.cli.shell import UsageError
from vkback.cli.terminal import StatusLine, fit
from vkback.cli.vkbench_sides import ROOT, checkout, commit_by_name, run_build
from vkback.errors import VkbackError
from vkback.ops.family import table_word

THIS = ("this", ".")
"""This build with the tables that it has."""

SHOWN = 40
"""Changes listed at most without -v."""

DEVICES = 6
"""Devices named below a change at most without -v."""


class DiffError(VkbackError):
    """A side whose choices could not be made, with what it said."""


@dataclass(frozen=True)
class Side:
    """One side. folder: a build; spec: as of vkback/harness/choices.py."""

    name: str
    folder: Path
    spec: Mapping[str, Any]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Difference:
    """A case that a device answers otherwise. before, after: what tables and kernels say, in words."""

    device: str
    type: str
    case: str
    change: str


def diff(
    sides: tuple[str, str], *, device: str | None, model: str | None, tokens: int, as_json: bool, verbose: bool, width: int | None = None
) -> None:
    """Print what differs. device: only this recorded one; model: all nodes of this shape or file in place of the usual cases."""
    import pandas as pd

    from vkback.device import profile_ids

    known = profile_ids()
    with ExitStack() as stack:
        common: dict[str, Any] = {"devices": [device]} if device else {}
        common |= {"model": model, "tokens": tokens} if model else {}
        devices = [name in known for name in sides]
        if any(devices):
            if not all(devices) or device:
                other = sides[devices.index(False)] if not all(devices) else f"--profile {device}"
                raise UsageError(f"--diff {sides[0]} {sides[1]}: a recorded device is compared with another one, not with {other}")
            plans = [Side(name, ROOT, {**common, "devices": [name]}, {}) for name in sides]
        else:
            plans = [side(name, common, stack) for name in sides]
        with StatusLine() as status, ThreadPoolExecutor(2) as pool:
            status.say("vkback: choosing kernels for both sides")
            first, second = pool.map(choices, plans)
    if all(devices):
        pairs = [(f"{sides[0]} -> {sides[1]}", first["devices"][sides[0]], second["devices"][sides[1]])]
    else:
        pairs = [(name, found, second["devices"][name]) for name, found in first["devices"].items() if name in second["devices"]]
    found = [each for name, a, b in pairs for each in differences(name, a["choices"], b["choices"])]
    cases = len({c["case"] for _, a, _ in pairs for c in a["choices"]})
    if as_json:
        records = [{"device": d.device, "type": d.type, "case": d.case, "change": d.change} for d in found]
        print(json.dumps({"a": sides[0], "b": sides[1], "devices": len(pairs), "cases": cases, "differences": records}, indent=1))
        return
    frame = pd.DataFrame([(d.device, d.type, d.case, d.change) for d in found], columns=["device", "type", "case", "change"])
    print("\n".join(text(frame, len(pairs), cases, sides, verbose)))


def side(name: str, common: Mapping[str, Any], stack: ExitStack) -> Side:
    """What one word of --diff names. Raises UsageError for none of them."""
    path = Path(name)
    if name in THIS:
        return Side(name, ROOT, common, {})
    if commit := commit_by_name(name):
        return Side(name, stack.enter_context(checkout(commit)), common, {})
    if path.is_dir() and (path / "vkback" / "__init__.py").is_file():
        return Side(name, path.absolute(), common, {})
    if path.is_dir() and (path / "default.toml").is_file():
        return Side(name, ROOT, {**common, "root": str(path.absolute())}, {})
    if path.is_dir() and any(path.glob("*.toml")):
        return Side(name, ROOT, common, {"VKBACK_TUNING": str(path.absolute())})
    if path.suffix == ".toml" and path.is_file():
        return _table(path, name, common, stack)
    if ":" in name:
        from vkback.tuning.overrides import override_rows

        override_rows(name)
        return Side(name, ROOT, {**common, "overrides": name}, {})
    raise UsageError(
        f"--diff {name}: expected 'this', a folder with a build, a commit of this checkout, tuning tables (a folder or FILE.toml), "
        "overrides as 'gemv : wg=512', or the name of a recorded device"
    )


def _table(path: Path, name: str, common: Mapping[str, Any], stack: ExitStack) -> Side:
    """A table in place of the one of its name; any other comes before all tables, of every device or of the one that its name says."""
    import shutil
    import tempfile

    from vkback.device import Capabilities, profile_ids
    from vkback.paths import tuning_root
    from vkback.tuning.lookup import device_table

    if (tuning_root() / path.name).is_file():
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vkback-")))
        shutil.copytree(tuning_root(), folder, dirs_exist_ok=True)
        shutil.copyfile(path, folder / path.name)
        return Side(name, ROOT, {**common, "root": str(folder)}, {})
    if path.name.startswith("device_"):
        readers = [each for each in profile_ids() if device_table(Capabilities.from_profile(each)) == path.name]
        wanted = common.get("devices") or readers
        if not set(wanted) & set(readers):
            of = (
                f"that of {wanted[0]} is called {device_table(Capabilities.from_profile(wanted[0]))}"
                if wanted
                else "no recorded device reads it"
            )
            raise UsageError(f"--diff {name}: never read: {of}; any other name stands for a table of all devices")
        return Side(name, ROOT, {**common, "devices": [d for d in wanted if d in readers], "first": str(path.absolute())}, {})
    return Side(name, ROOT, {**common, "first": str(path.absolute())}, {})


def choices(plan: Side) -> dict[str, Any]:
    """What a side chooses, by a process of its build. Raises DiffError with what it said."""
    program = (Path(vkback.__file__).parent / "harness" / "choices.py").read_text(encoding="utf-8")
    found, status, last = run_build(plan.folder, ["-c", program, json.dumps(dict(plan.spec))], plan.variables)
    if status:
        old = "; this build may be older than what --diff asks of it" if last.startswith(("ImportError", "ModuleNotFoundError")) else ""
        raise DiffError(f"--diff {plan.name}: {last}{old}")
    return dict(json.loads(found))


def differences(device: str, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Iterator[Difference]:
    """Cases that both sides know and answer otherwise."""
    others = {each["case"]: each for each in after}
    for one in before:
        other = others.get(one["case"])
        if other and any(one.get(key) != other.get(key) for key in (("kernels", "none") if one["kernels"] else ("tables", "none"))):
            yield Difference(device, one["type"], one["case"], change(one, other))


def change(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What became of a choice: kernels, then parameters of tables, then defines."""
    if one.get("none") or other.get("none"):
        return f"{_brief(one)} -> {_brief(other)}"
    said = [] if _names(one) == _names(other) else [f"{_names(one)} -> {_names(other)}"]
    for family in sorted({*one["tables"], *other["tables"]}):
        old, new = one["tables"].get(family, {}), other["tables"].get(family, {})
        if said and not (old and new):
            continue  # the kernel says it
        said += [f"{key} {_word(old, key)} -> {_word(new, key)}" for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
    if said:
        return ", ".join(said)
    for first, second in zip(one["kernels"], other["kernels"], strict=False):
        old, new = ({**k["defines"], "subgroup size": k["subgroup"]} for k in (first, second))
        said += [f"{key} {_word(old, key)} -> {_word(new, key)}" for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
    return ", ".join(dict.fromkeys(said))


def _brief(one: Mapping[str, Any]) -> str:
    return f"none ({one['none']})" if one.get("none") else _names(one)


def _names(one: Mapping[str, Any]) -> str:
    """The kernels of a choice, with the path of a GEMV: it decides more than any parameter."""
    names = [k["kernel"].rpartition("/")[2] + (" int" if str(k["defines"].get("PATH_INT")) == "1" else "") for k in one["kernels"]]
    return " + ".join(name if names.count(name) == 1 else f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def _word(values: Mapping[str, Any], key: str) -> str:
    return table_word(values[key]) if key in values else "none"


def text(found: Any, devices: int, cases: int, sides: tuple[str, str], verbose: bool) -> Iterator[str]:
    """The table of devices x types, then every change with its cases and devices."""
    yield f"{sides[0]} -> {sides[1]}: {devices} device{'s' * (devices > 1)}, {cases} cases; choices that differ:"
    if found.empty:
        yield "none"
        return
    counts = found.pivot_table(index="device", columns="type", values="case", aggfunc="count", fill_value=0, observed=True)
    counts = counts[list(dict.fromkeys(found["type"]))]
    yield ""
    yield counts.map(lambda n: str(n) if n else ".").rename_axis(index=None, columns=None).to_string()
    if same := devices - len(counts):
        yield f"{same} device{'s' * (same > 1)} without a difference"
    groups = sorted(found.groupby(["type", "change"], sort=False), key=lambda each: -len(each[1]))
    for (kind, what), rows in groups[: None if verbose else SHOWN]:
        cases_of, devices_of = list(dict.fromkeys(rows["case"])), list(dict.fromkeys(rows["device"]))
        yield ""
        yield f"{kind}: {what}"
        yield from (f"    {case}" for case in cases_of[: None if verbose else 2])
        more = len(cases_of) - 2
        if more > 0 and not verbose:
            yield f"    and {more} more case{'s' * (more > 1)}"
        named = devices_of if verbose else devices_of[:DEVICES]
        rest = f" and {len(devices_of) - len(named)} more" if len(devices_of) > len(named) else ""
        yield from fit(f"    on {', '.join(named)}{rest}")
    if len(groups) > SHOWN and not verbose:
        yield f"\nand {len(groups) - SHOWN} more changes; -v lists all"
