"""What units have come to, with device, driver and build, in a file of JSON lines: a run that names it again does what is missing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vkback.cluster.errors import ClusterError
from vkback.paths import reason

FORMAT = 1


class UnitJournal:
    """Results by kind of device and key. path: None to keep them in memory alone.

    what  the command that the results are of, and what its units depend on: a file of another one is refused
    Raises ClusterError where the file is another one's or cannot be written.
    """

    def __init__(self, path: Path | None, what: Mapping[str, Any]) -> None:
        self.path, self.records = path, list[dict[str, Any]]()
        self._head = {"format": FORMAT, **what}
        self._known: dict[tuple[tuple[str, ...], str], Any] = {}
        if path is None:
            return
        events = list(self._lines(path)) if path.exists() else []
        if events and events[0] != json.loads(json.dumps(self._head)):
            raise ClusterError(f"[hosts] --journal {path} is of another run: {json.dumps(events[0])}; expected {json.dumps(self._head)}")
        if not events:
            self._append(self._head)
        elif not path.read_bytes().endswith(b"\n"):
            self._write("\n")  # behind a line that was cut short
        for event in events[1:]:
            self._take(event)

    def _lines(self, path: Path) -> Iterator[dict[str, Any]]:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as e:
            raise ClusterError(f"[hosts] --journal {path}: {reason(e)}") from e
        for line in text.splitlines():
            try:
                event = json.loads(line)
            except ValueError:  # cut short with the run that wrote it
                continue
            if isinstance(event, dict):
                yield event

    def _take(self, event: dict[str, Any]) -> None:
        self.records.append(event)
        self._known[(tuple(event["kind"]), event["key"])] = event["result"]

    def known(self, kind: tuple[str, ...], key: str) -> Any:
        """What a unit came to on a kind of device; None where it did not yet."""
        return self._known.get((kind, key))

    def keep(self, about: Mapping[str, Any], kind: tuple[str, ...], key: str, result: Any) -> None:
        """about: of the worker."""
        event = {"kind": list(kind), "key": key, "result": result, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        event |= {name: about[name] for name in ("device", "driver", "build", "host", "uuid", "name")}
        self._take(event)
        if self.path is not None:
            self._append(event)

    def _append(self, event: Mapping[str, Any]) -> None:
        self._write(json.dumps(event) + "\n")

    def _write(self, text: str) -> None:
        assert self.path is not None
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as e:
            raise ClusterError(f"[hosts] --journal {self.path} cannot be written: {reason(e)}") from e
