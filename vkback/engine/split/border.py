"""Host memory through which values go from one device to another, and what is copied to it and from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vkback.device import Arena, BufferRange, Device, FeatureMissing, HostPages
from vkback.graph import Tensor
from vkback.ops.storage import nbytes
from vkback.plan.schedule import aligned
from vkback.program import Program

Copies = list[tuple[BufferRange, BufferRange]]


class HostStaging:
    """Memory that one device writes and others read: one allocation of the host that all of them import, or, where one of them cannot,
    memory of each, between which the host copies.

    written  as the first device sees it
    read     as each of the others does
    shared   whether it is one allocation
    """

    def __init__(self, source: Device, targets: Sequence[Device], purpose: str, nbytes: int) -> None:
        self._arenas: list[Arena] = []
        self.shared = True
        try:
            try:
                pages = HostPages(nbytes)
                self._arenas = [source.import_host(purpose, pages)]
                for device in targets:
                    self._arenas.append(device.import_host(purpose, pages))
            except FeatureMissing:
                self.close()
                self.shared = False
                self._arenas = [source.arena(purpose, aligned(nbytes), "readback")]
                for device in targets:
                    self._arenas.append(device.arena(purpose, aligned(nbytes), "upload"))
            self.written, *self.read = (arena.alloc(nbytes, purpose) for arena in self._arenas)
        except BaseException:
            self.close()
            raise

    def carry(self, offset: int = 0, size: int | None = None) -> None:
        """After the first device has written: have the others see it."""
        if not self.shared:
            end = self.written.size if size is None else offset + size
            for target in self.read:
                target.map()[offset:end] = self.written.map()[offset:end]

    def close(self) -> None:
        """Give the memory back."""
        for arena in self._arenas:
            arena.destroy()
        self._arenas = []


class Border:
    """What goes from one device's layers to those of the next one: rows of the values that cross, through slots of host memory, into memory
    of the second device that its programs read.

    rows  of each slot
    """

    def __init__(self, source: Device, target: Device, token: Sequence[Tensor], piece: Sequence[Tensor], slots: Sequence[int]) -> None:
        """token, piece: values that cross, of graphs of one token and of a piece of a prompt, whose first axis are the tokens. slots: rows
        of each; one with a single row is of a token."""
        self.rows = list(slots)
        self._token, self._piece = ({t.name: nbytes(t) // t.shape[0] for t in each} for each in (token, piece))
        sizes = [sum(self._places(n).values()) for n in self.rows]
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._sizes = sizes
        self._staging = HostStaging(source, [target], "hidden rows between devices", sum(sizes))
        most = {name: max(n for n in self.rows if name in self._of(n)) for name in self._token | self._piece}
        size = {name: most[name] * row for name, row in (self._token | self._piece).items()}
        self._arena = target.arena("hidden rows of other layers", sum(map(aligned, size.values())), "device")
        self._inputs = {name: self._arena.alloc(each, name) for name, each in size.items()}
        rec = target.recorder("zero hidden rows")  # which prepared programs read before there are any
        for each in self._inputs.values():
            rec.fill(each, 0)
        target.run(rec)

    def _of(self, rows: int) -> Mapping[str, int]:
        """Bytes of a row of each value, of a program or a slot of so many rows."""
        return self._token if rows == 1 else self._piece

    @property
    def shared(self) -> bool:
        """Whether both devices see one allocation of the host."""
        return self._staging.shared

    def inputs(self, rows: int) -> dict[str, BufferRange]:
        """What programs of the second device read, by name."""
        return {name: self._inputs[name].slice(0, rows * size) for name, size in self._of(rows).items()}

    def stores(self, program: Program, slot: int, at: int, rows: int) -> Copies:
        """What copies a program's first rows into a slot, from row `at` on."""
        written = self._staging.written
        return [
            (program.range(name).slice(0, rows * size), written.slice(place + at * size, rows * size))
            for name, size, place in self._of_slot(slot)
        ]

    def loads(self, slot: int, at: int, rows: int) -> Copies:
        """What copies rows from a slot to where programs read them."""
        (read,) = self._staging.read
        return [
            (read.slice(place + at * size, rows * size), self._inputs[name].slice(0, rows * size))
            for name, size, place in self._of_slot(slot)
        ]

    def carry(self, slot: int) -> None:
        """After a slot was written: have the second device see it."""
        self._staging.carry(self._offsets[slot], self._sizes[slot])

    def close(self) -> None:
        """Give the memory back."""
        self._staging.close()
        self._arena.destroy()

    def _places(self, rows: int) -> Mapping[str, int]:
        return {name: aligned(size * rows) for name, size in self._of(rows).items()}

    def _of_slot(self, slot: int) -> list[tuple[str, int, int]]:
        """Name, bytes of a row and offset of each value."""
        found, at = [], self._offsets[slot]
        for name, place in self._places(self.rows[slot]).items():
            found.append((name, self._of(self.rows[slot])[name], at))
            at += place
        return found
