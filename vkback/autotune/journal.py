"""The journal of sweeps on a device: a run that was cut short goes on from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from vkback.autotune.search import SweepError
from vkback.paths import reason, write_atomic
from vkback.shader import ShaderLibrary

JOURNAL_FORMAT = 8


def kernel_identity(library: ShaderLibrary) -> str:
    """Changes when any shader does: results of other kernels are not taken up again."""
    digest = hashlib.sha256()
    for file in sorted(p for p in library.root.rglob("*") if p.suffix in (".comp", ".glsl")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


class Notes(Protocol):
    """Where a search writes down its points while it goes on, and what it begins with. Points are the values of their parameters."""

    def refusal(self, key: str, point: Iterable[Any]) -> str:
        """Why a point is not tried again; "" when it may be."""

    def trying(self, key: str, point: Iterable[Any]) -> AbstractContextManager[None]:
        """Around the trial of a point."""

    def measured(self, key: str, point: Iterable[Any], us: float, spread_us: float) -> None:
        """A point's result is right, and took so long."""

    def known(self, key: str) -> Mapping[tuple[Any, ...], tuple[float, float]]:
        """Points that an earlier search for the same task has measured: microseconds and their spread."""


class Journal:
    """Results by family and key, points of tasks that are not finished, and points whose trial never ended, in a file of JSON lines: a line
    is whole or it is not read. A Notes for searches.

    identity  device, driver and kernels: results of another device or driver are dropped; those of other kernels stay, but count as not
              finished
    Raises SweepError when the file cannot be written.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.identity = {"format": JOURNAL_FORMAT, **identity}
        self._results: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._suspects: set[tuple[str, tuple[Any, ...]]] = set()
        self._finished: set[str] = set()
        self._points: dict[str, dict[tuple[Any, ...], tuple[float, float]]] = {}
        for event in self._events():
            if "result" in event:
                self._put(event["family"], event["key"], event["result"])
                self._points.pop(event["key"], None)
                if event["kernels"] == self.identity["kernels"]:
                    self._finished.add(event["key"])
            elif "trying" in event:
                self._suspects.add((event["trying"], tuple(event["point"])))
            elif "tried" in event:
                self._suspects.discard((event["tried"], tuple(event["point"])))
            elif "measured" in event and event.get("kernels") == self.identity["kernels"]:
                self._points.setdefault(event["measured"], {})[tuple(event["point"])] = event["us"], event["spread_us"]
        self._write_whole()

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        events = []
        for line in lines:
            try:
                events.append(json.loads(line))
            except ValueError:  # cut short when the last run ended
                continue
        same = ("format", "device", "driver")
        events = [event for event in events if isinstance(event, dict)]
        if events and all(events[0].get(k) == self.identity[k] for k in same):
            yield from events[1:]

    def _put(self, family: str, key: str, result: Mapping[str, Any]) -> None:
        results = self._results.setdefault(family, {})
        results.pop(key, None)  # the newest is the last
        results[key] = result

    def results(self, family: str) -> dict[str, Mapping[str, Any]]:
        """What `finish` was given for a family, by key, newest last."""
        return self._results.get(family, {})

    def finished(self, key: str) -> bool:
        """Whether a run with these kernels and this driver came to a result."""
        return key in self._finished

    def suspected(self, key: str, point: Iterable[Any]) -> bool:
        """Whether an earlier run ended while it tried a point."""
        return (key, tuple(point)) in self._suspects

    def suspects(self, key: str) -> list[tuple[Any, ...]]:
        """All points of a task that are suspected."""
        return [point for of, point in self._suspects if of == key]

    def refusal(self, key: str, point: Iterable[Any]) -> str:
        """Why a point is not tried again; "" when it may be."""
        return "the last run ended while trying it" if self.suspected(key, point) else ""

    @contextmanager
    def trying(self, key: str, point: Iterable[Any]) -> Iterator[None]:
        """Around the trial of a point: one that a run ends with is suspected by the next."""
        self._append({"trying": key, "point": list(point)})
        yield
        self._append({"tried": key, "point": list(point)})

    def measured(self, key: str, point: Iterable[Any], us: float, spread_us: float) -> None:
        at = tuple(point)
        self._points.setdefault(key, {})[at] = us, spread_us
        self._append(self._measured(key, at))

    def known(self, key: str) -> Mapping[tuple[Any, ...], tuple[float, float]]:
        """Of a task that no run has finished with these kernels."""
        return self._points.get(key, {})

    def forget(self, key: str) -> None:
        """Its points are measured anew."""
        self._points.pop(key, None)

    def suspect(self, key: str, point: Iterable[Any]) -> None:
        """A point that processes have ended with: it is not tried again."""
        at = tuple(point)
        self._suspects.add((key, at))
        self._append({"trying": key, "point": list(at)})

    def _measured(self, key: str, point: tuple[Any, ...]) -> dict[str, Any]:
        us, spread_us = self._points[key][point]
        return {"measured": key, "point": list(point), "us": us, "spread_us": spread_us, "kernels": self.identity["kernels"]}

    def finish(self, family: str, key: str, result: Mapping[str, Any]) -> None:
        """Keep a result, plain JSON. Keys of different families differ."""
        self._put(family, key, result)
        self._finished.add(key)
        self._points.pop(key, None)
        self._append(self._event(family, key))

    def _event(self, family: str, key: str) -> dict[str, Any]:
        kernels = self.identity["kernels"] if key in self._finished else ""
        return {"result": self._results[family][key], "family": family, "key": key, "kernels": kernels}

    def _append(self, event: Mapping[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        except OSError as e:
            raise SweepError(f"[tune] {self.path}: cannot be written: {reason(e)}; --resume goes on once it can be") from e

    def _write_whole(self) -> None:
        events: list[Mapping[str, Any]] = [self.identity]
        events += [self._event(family, key) for family, results in self._results.items() for key in results]
        events += [self._measured(key, point) for key, points in self._points.items() for point in points]
        events += [{"trying": key, "point": point} for key, point in sorted(self._suspects)]
        if not write_atomic(self.path, "".join(json.dumps(e) + "\n" for e in events).encode()):
            raise SweepError(f"[tune] {self.path} cannot be written: choose another folder with VKBACK_TUNING")
