"""Recorded spaces in the files of Kernel Tuner: its cache, and the T1 (input) and T4 (results) formats that it shares with other tuners.

So its strategies can be replayed on our spaces (`simulation_mode`), and ours on others'. Times are milliseconds there. Formats: schemas of
kernel_tuner 1.5 (T1 and T4 1.0.0), github.com/odgaard/TuningSchema; the cache as its documentation describes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vkback.autotune.search import SweepError
from vkback.autotune.spaces import Invalidity, Space, Values, invalidity
from vkback.paths import reason, write_atomic

SCHEMA = "1.0.0"

OURS = "vkback"
"""The key of a cache file under which what Kernel Tuner has no place for stands."""

FAILED: Mapping[Invalidity, str] = {
    "constraints": "InvalidConfig",
    "compile": "CompilationFailedConfig",
    "runtime": "RuntimeFailedConfig",
    "correctness": "RuntimeFailedConfig",
}
"""What a cache has in the place of a time."""


def cache_key(point: Values) -> str:
    return ",".join(map(str, point))


def to_cache(space: Space) -> dict[str, Any]:
    """A cache file of Kernel Tuner: `tune_kernel(..., cache=FILE, simulation_mode=True)` replays it. Other points were refused."""
    entries: dict[str, Any] = {}
    for point, (us, spread) in space.times.items():
        times = [(us - spread) / 1e3, us / 1e3, (us + spread) / 1e3]
        entries[cache_key(point)] = {**dict(zip(space.names, point, strict=True)), "time": us / 1e3, "times": times, **NOT_TIMED}
    for point, why in space.invalid.items():
        entries[cache_key(point)] = {**dict(zip(space.names, point, strict=True)), "time": FAILED[why], "times": [], **NOT_TIMED}
    ours = {"driver": space.driver, "kernels": space.kernels, "starts": space.starts, "caps": space.caps}
    return {
        "device_name": space.device,
        "kernel_name": space.family,
        "problem_size": space.line,
        "tune_params_keys": list(space.names),
        "tune_params": space.parameters,
        "objective": "time",
        OURS: ours,
        "cache": entries,
    }


NOT_TIMED = {"compile_time": 0, "verification_time": 0, "benchmark_time": 0, "strategy_time": 0, "framework_time": 0}
"""Kernel Tuner adds these up; we time points alone."""


def from_cache(text: str, named: str) -> Space:
    """The space of a cache file, also of one that Kernel Tuner has left open at its end. Raises SweepError naming what is missing."""
    try:
        data = json.loads(text)
    except ValueError:
        try:
            data = json.loads(text.rstrip().rstrip(",") + "}\n}")
        except ValueError as e:
            raise SweepError(f"[tune] {named}: no JSON: {e}; expected a cache file of Kernel Tuner, or T4 results") from e
    missing = [key for key in ("device_name", "kernel_name", "tune_params_keys", "cache") if not isinstance(data, dict) or key not in data]
    if missing:
        raise SweepError(f"[tune] {named}: {missing[0]} is missing; expected a cache file of Kernel Tuner, or T4 results")
    names, ours = tuple(data["tune_params_keys"]), data.get(OURS) or {}
    space = Space(
        data["device_name"],
        ours.get("driver", ""),
        ours.get("kernels", ""),
        data["kernel_name"],
        str(data.get("problem_size", "")),
        names,
        tuple(tuple(point) for point in ours.get("starts", ())),
        caps=ours.get("caps") or {},
    )
    for key, entry in data["cache"].items():
        try:
            point, took = tuple(entry[name] for name in names), entry["time"]
        except (KeyError, TypeError) as e:
            raise SweepError(f"[tune] {named}: the entry {key!r} lacks {e}; expected a value for each parameter, and a time") from e
        if isinstance(took, (int, float)):
            samples = [1e3 * t for t in entry.get("times") or ()]
            space.times[point] = 1e3 * took, (max(samples) - min(samples)) / 2 if samples else 0.0
        else:
            space.invalid[point] = next((ours for ours, theirs in FAILED.items() if theirs == took), "runtime")
    return space


def to_t4(space: Space) -> dict[str, Any]:
    """T4 results. The metadata beside them say what was measured on."""
    return {
        "schema_version": SCHEMA,
        "metadata": {
            "timeunit": "milliseconds",
            "device": space.device,
            "driver": space.driver,
            "kernel": space.family,
            "problem": space.line,
            "kernels": space.kernels,
        },
        "results": list(_t4_results(space)),
    }


def _t4_results(space: Space) -> Iterator[dict[str, Any]]:
    for point, (us, spread) in space.times.items():
        yield {
            "configuration": dict(zip(space.names, point, strict=True)),
            "objectives": ["time"],
            "times": {"runtimes": [us / 1e3]},
            "invalidity": "correct",
            "correctness": 1,
            "measurements": [
                {"name": "time", "value": us / 1e3, "unit": "ms"},
                {"name": "time_spread", "value": spread / 1e3, "unit": "ms"},
            ],
        }
    for point, why in space.invalid.items():
        yield {
            "configuration": dict(zip(space.names, point, strict=True)),
            "objectives": ["time"],
            "times": {"runtimes": []},
            "invalidity": why,
            "correctness": int(why != "correctness"),
            "measurements": [],
        }


def from_t4(text: str, named: str) -> Space:
    """The space of T4 results. Raises SweepError naming what is missing."""
    try:
        data = json.loads(text)
        about, results = data.get("metadata") or {}, data["results"]
        names = tuple(results[0]["configuration"])
        space = Space(
            about.get("device", ""),
            about.get("driver", ""),
            about.get("kernels", ""),
            about.get("kernel", ""),
            about.get("problem", ""),
            names,
        )
        for result in results:
            point = tuple(result["configuration"][name] for name in names)
            if result["invalidity"] != "correct":
                space.invalid[point] = invalidity(result["invalidity"])
                continue
            measured = {m["name"]: m["value"] for m in result["measurements"]}
            factor = 1e6 if about.get("timeunit") == "seconds" else 1e3
            space.times[point] = factor * measured["time"], factor * measured.get("time_spread", 0.0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        raise SweepError(f"[tune] {named}: {type(e).__name__} {e}; expected T4 results, with a configuration and a time each") from e
    return space


TYPES = {bool: "bool", int: "int", float: "float", str: "string"}


def to_t1(space: Space) -> dict[str, Any]:
    """T1 input: the parameters and their values, and how the kernel is launched as far as the format has a word for it. Which points are
    legal no condition says: our planner does, so that a cache of the space has those alone."""
    parameters = []
    for name, values in space.parameters.items():
        kinds = {type(value) for value in values}
        kind = TYPES.get(kinds.pop(), "string") if len(kinds) == 1 else "string"
        parameters.append({"Name": name, "Type": kind, "Values": repr(values if kind != "string" else [str(value) for value in values])})
    threads = next((name for name in ("wg", "wg_size") if name in space.names), "1")
    return {
        "ConfigurationSpace": {"TuningParameters": parameters, "Conditions": []},
        "General": {"FormatVersion": 1, "TimeUnit": "Milliseconds", "OutputFormat": "JSON"},
        "KernelSpecification": {
            "Language": "Vulkan",
            "GlobalSizeType": "Vulkan",
            "KernelName": space.family,
            "KernelFile": f"shaders/{space.family}",
            "Device": {"Name": space.device},
            "GlobalSize": {"X": "1"},
            "LocalSize": {"X": threads},
            "SimulationInput": space.line,
        },
    }


FORMS = {".cache.json": to_cache, ".t1.json": to_t1, ".t4.json": to_t4}


def write(space: Space, folder: Path, stem: str) -> list[Path]:
    """All three files of a space. Raises SweepError where one cannot be written."""
    written = []
    for ending, form in FORMS.items():
        path = folder / f"{stem}{ending}"
        if not write_atomic(path, (json.dumps(form(space), indent=1) + "\n").encode()):
            raise SweepError(f"[tune] {path} cannot be written; expected a folder that can be")
        written.append(path)
    return written


def read(path: Path) -> Space:
    """A space from a cache file or T4 results. Raises SweepError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise SweepError(f"[tune] {path}: {reason(e)}") from e
    except UnicodeDecodeError as e:
        raise SweepError(f"[tune] {path}: no text: {e}; expected a cache file of Kernel Tuner, or T4 results") from e
    is_t4 = '"results"' in text and '"tune_params_keys"' not in text
    return from_t4(text, str(path)) if is_t4 else from_cache(text, str(path))
