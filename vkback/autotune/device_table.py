"""A device's own tuning table, and the journal that it is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from vkback.autotune.journal import Journal, kernel_identity
from vkback.autotune.search import SweepError
from vkback.autotune.tunable import RowMaker, S, TuneResult
from vkback.device import Capabilities
from vkback.paths import exclusive, reason, tuning_root, write_atomic
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Tuning, device_table
from vkback.tuning.table import load_table, parse_table, row_lines


@contextmanager
def table_lock(caps: Capabilities, folder: Path, waits: Callable[[str], object]) -> Iterator[None]:
    """Keep other runs from a device's own table and journal: each works on what it read of them at its start, and two at once would
    disturb each other's times. The lock goes with the process, however that ends.

    folder  where they are, the user's own
    waits   called once with what is waited for, where another run has the lock
    Raises SweepError where the lock's file cannot be written.
    """
    path = folder / device_table(caps)
    with ExitStack() as stack:
        try:
            busy = partial(waits, f"another run tunes {caps.name} and has {path}; waiting for its end")
            stack.enter_context(exclusive(path.with_suffix(".lock"), busy))
        except OSError as e:
            raise SweepError(f"[tune] {path} cannot be written: {reason(e)}; choose another folder with VKBACK_TUNING") from e
        yield


class DeviceTable:
    """The device's own table and journal. Runs that may meet others hold `table_lock`.

    folder  where both are, the user's own
    driver  as rows name it, by default the device's
    """

    def __init__(self, caps: Capabilities, library: ShaderLibrary, folder: Path, driver: str = "") -> None:
        self._caps, self._folder = caps, folder
        self.driver = driver or f"{caps.driver_name} {caps.driver_info}".strip()
        self.path = folder / device_table(caps)
        self.journal = Journal(
            self.path.with_suffix(".journal"), {"device": caps.name, "driver": self.driver, "kernels": kernel_identity(library)}
        )

    def results(self, family: str, point: Callable[[Iterable[Any]], S]) -> list[TuneResult[S]]:
        """Of a family, as the journal has them, newest last. point: makes a setting of its values."""
        return [TuneResult.from_json(values, point) for values in self.journal.results(family).values()]

    def tables(self) -> Tuning:
        """The tables that come with vkback, this one before them."""
        return Tuning.for_device(self._caps, tuning_root(), user=self._folder)

    def keep(self, tunable: RowMaker[S], result: TuneResult[S]) -> None:
        """Write down what a task came to, in the journal and in the table. The table is checked as any table before it takes the old
        one's place; rows of other families stay as they are.

        Raises SweepError when the table cannot be written.
        """
        self.journal.finish(tunable.journal, result.key, result.to_json())
        card = f"{self._caps.name}, {self.driver}"
        present = load_table(self.path)
        others = [row_lines(r.family, r.match, r.set, r.measured) for r in present if r.family not in tunable.families]
        mine = tunable.rows(self.results(tunable.journal, tunable.point), [r for r in present if r.family in tunable.families], card)
        text = table_text([*others, *mine], card)
        parse_table(text, self.path.name)
        if not write_atomic(self.path, text.encode()):
            raise SweepError(f"[tune] {self.path} cannot be written: choose another folder with VKBACK_TUNING")


def table_text(rows: Iterable[list[str]], card: str) -> str:
    """The table of a device, from the lines of each row."""
    lines = [
        f"# {card}. Made by `vkback tune`: each row it made beat the tables that come with vkback, beyond the noise.",
        "# Latency: a launch that waits for the one before; throughput: launches back to back. Edit or delete at will.",
    ]
    for row in rows:
        lines += ["", *row]
    return "\n".join(lines) + "\n"
