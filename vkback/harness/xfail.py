"""Expected failures: cases that are known to fail on a driver, in a file, each with its reason.

    [[driver]]
    name = "llvmpipe Mesa 22"            # a part of what `vkback devices` or --library says of device and driver

    [[driver.xfail]]
    case = "ROPE(*pos=131069*)"          # a line of the suite; * stands for anything
    reason = "angles in f32"

A case that fails as expected is no failure of a run; one that passes though it is listed is told of, so that the list follows the driver.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkback.errors import VkbackError
from vkback.harness.result import CaseResult


class XfailError(VkbackError):
    """A file of expected failures that cannot be used, with what is wrong in it."""

    exit_code = 2


@dataclass(frozen=True)
class Xfail:
    """One entry. case: as written, a pattern of lines."""

    case: str
    reason: str

    def matches(self, line: str) -> bool:
        return re.fullmatch(".*".join(map(re.escape, self.case.split("*"))), line) is not None


def load(path: Path, driver: str) -> list[Xfail]:
    """The entries for a driver: those of every `[[driver]]` whose name is a part of `driver`, whatever the case. Raises XfailError."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise XfailError(f"--xfail {path}: cannot be read: {e}") from e
    drivers = data.pop("driver", [])
    if data or not isinstance(drivers, list):
        raise XfailError(f"--xfail {path}: {', '.join(data) or 'driver'}: expected entries written [[driver]]")
    found: list[Xfail] = []
    for number, entry in enumerate(drivers, 1):
        where = f"--xfail {path} [[driver]] {number}"
        _check(entry, {"name": str, "xfail": list}, where)
        for place, given in enumerate(entry["xfail"], 1):
            _check(given, {"case": str, "reason": str}, f"{where}, xfail {place}")
            if entry["name"].lower() in driver.lower():
                found.append(Xfail(given["case"], given["reason"]))
    return found


def _check(entry: Any, kinds: dict[str, type], where: str) -> None:
    if not isinstance(entry, dict):
        raise XfailError(f"{where}: expected a table with {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(entry.get(name), kind) or not entry[name]:
            raise XfailError(f"{where}: {name}: expected {'text' if kind is str else 'entries'}, which is not empty")
    if unknown := [name for name in entry if name not in kinds]:
        raise XfailError(f"{where}: {unknown[0]} is not known; expected {', '.join(kinds)}")


def expecting(results: Iterable[CaseResult], expected: Sequence[Xfail]) -> Iterator[CaseResult]:
    """Results, those that are listed with the reason of the first entry that matches."""
    for result in results:
        reason = next((each.reason for each in expected if each.matches(result.line)), "")
        yield dataclasses.replace(result, expected=reason) if reason else result
