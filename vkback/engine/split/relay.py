"""Tokens that go from device to device: a device's work is queued before the one before it has finished, and the host lets it begin.

It waits in the queue for a `Gate`, so that a transfer takes the host a look and a signal, not a submit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from vkback.device import BufferRange, Commands, Device, DeviceError, Gate, Ticket

SPIN_S = 0.02
"""How long the host stays awake for a device: longer than a token takes. To wake up takes as long as a transfer."""

LOOKS = 16
"""At a mark, between two at the clock."""

POLL_S = 0.0002
"""Between two looks at devices that several texts wait for, on CPU drivers, which need the cores themselves."""


def on_device(error: DeviceError, at: int, count: int, device: Device) -> DeviceError:
    """The same error, with the device that it is of."""
    return type(error)(f"[split] device {at + 1} of {count}, {device.caps.name}: {error}", call=error.call, result=error.result)


class Flight:
    """A token on its way; `wait` as of a Ticket.

    at  the number of the device that works on it, or will be the first to
    """

    def __init__(self, relay: Relay, work: Sequence[Sequence[Commands]], number: int) -> None:
        """work: what each device does, which ends with the relay's mark of that number."""
        self._relay, self.work, self.number = relay, work, number
        self.opened = -1  # the last device that may have begun
        self.tickets: list[Ticket] = []
        self.values: list[int] = []  # that the gates are opened with
        self.at = 0
        self.begun = 0.0

    @property
    def done(self) -> bool:
        """Whether all devices have finished; never waits."""
        return self.at == len(self.work)

    def wait(self) -> None:
        """Hand the token over from device to device until the last one has finished. Raises DeviceLost, Timeout."""
        self._relay.wait(self)


class Relay:
    """Tokens of one text over several devices, in order. Relays of texts beside each other, over the same devices, look after all of them
    whichever is waited for; their tokens are queued when they may begin, so that none is in another's way."""

    def __init__(self, devices: Sequence[Device], carry: Callable[[int], object] | None, peers: list[Relay] | None = None) -> None:
        """carry: called with the number of a device that has finished, before the next one begins, or the first one with the next token;
        None where all memory between them is shared. peers: relays over the same devices, to which this one is added."""
        self._devices, self._carry = devices, carry
        self._gates: list[Gate] = []
        self._flying: deque[Flight] = deque()
        self._broken: DeviceError | None = None
        for device in devices:
            self._gates.append(device.gate())
        self._arenas = [device.arena("marks of devices", 4, "readback") for device in devices]
        self._marks = [arena.alloc(4, "mark") for arena in self._arenas]
        self._seen = [mark.map().view(np.uint32).data for mark in self._marks]  # a look takes a third of an array's
        self._software = any(device.caps.software for device in devices)
        self.peers = [] if peers is None else peers
        for peer in self.peers:
            peer.settle()
        self.peers.append(self)

    @property
    def single_text(self) -> bool:
        """Whether no other text has tokens on these devices."""
        return not any(peer._flying for peer in self.peers if peer is not self)

    def mark(self, at: int, number: int) -> tuple[BufferRange, int]:
        """What recordings of device `at` end with: the word that the host looks at. A queue's own semaphore shows 4 us later on an H200."""
        return self._marks[at], number + 1

    def submit(self, work: Sequence[Sequence[Commands]], number: int) -> Flight:
        """Queue a token: for each device what it does, with the mark of this number at its end. It begins when the one before has ended."""
        if self._broken is not None:
            raise self._broken
        flight = Flight(self, work, number)
        self._flying.append(flight)
        if self.single_text or len(self._flying) == 1:
            self._queue(flight)
        if len(self._flying) == 1:
            self._open(flight, 0)
        return flight

    def wait(self, flight: Flight) -> None:
        """Until a token has ended, and those before it."""
        while not flight.done:
            if self._broken is not None:
                raise self._broken
            if self.single_text:
                self._advance(spin_s=0.0 if self._software else SPIN_S)
            elif not any([peer.look() for peer in self.peers]) and self._software:
                time.sleep(POLL_S)

    def look(self) -> bool:
        """Do what can be done without waiting; whether there was anything. An error is raised where this relay's tokens are waited for."""
        if not self._flying or self._broken is not None:
            return False
        head = self._flying[0]
        try:
            if head.tickets and not self._marked(head) and not head.tickets[head.at].done:
                late = time.monotonic() - head.begun > head.tickets[head.at].queue.wait_s
                if not late:
                    return False
            self._advance(spin_s=0.0)
        except DeviceError:  # kept in _broken
            return False
        return True

    def quiet(self) -> None:
        """End what other texts have in the queues: what is submitted next, and waited for at once, must not stand behind a gate."""
        for peer in self.peers:
            if peer is not self:
                peer.settle()

    def settle(self) -> None:
        """End the tokens that are in the queues; none is queued."""
        try:
            while self._broken is None and self._flying and self._flying[0].tickets:
                self._advance(spin_s=0.0, queue=False)
        except DeviceError:  # kept in _broken
            return

    def _queue(self, flight: Flight) -> None:
        flight.begun = time.monotonic()
        try:
            for device, gate, commands in zip(self._devices, self._gates, flight.work, strict=True):
                flight.values.append(gate.next())
                flight.tickets.append(device.submit(commands, gate))
        except DeviceError as error:
            raise self._fail(error, len(flight.tickets)) from error

    def _advance(self, *, spin_s: float, queue: bool = True) -> None:
        """Wait for the device that works, and let the next one begin. Ctrl-C may come anywhere in it: it is called again then. queue: so
        may a token that is not in the queues yet."""
        head = self._flying[0]
        if not head.tickets:
            self._queue(head)
        at = head.at
        try:
            self._open(head, at)
            self._wait_for(head, spin_s)
            if self._carry is not None:
                self._carry(at)
            follower = self._flying[1] if len(self._flying) > 1 else None
            if at + 1 < len(self._gates):
                self._open(head, at + 1)
                head.at = at + 1
                # Behind the token of another text, which has this device now.
                if follower is not None and not follower.tickets and queue:
                    self._queue(follower)
                return
            if follower is not None and not follower.tickets and queue:
                self._queue(follower)
            if follower is not None and follower.tickets:
                self._open(follower, 0)
            self._flying.popleft()
            head.at = at + 1
        except DeviceError as error:
            if error is self._broken:
                raise
            raise self._fail(error, at) from error

    def _open(self, flight: Flight, at: int) -> None:
        """A device may work on a token, which nobody else of this text has then."""
        if flight.opened < at:
            self._seen[at][0] = 0
            flight.opened = at
        self._gates[at].open(flight.values[at])

    def _marked(self, flight: Flight) -> bool:
        """Whether the device that works on a token has written that it has finished."""
        return flight.opened == flight.at and self._seen[flight.at][0] == flight.number + 1

    def _wait_for(self, flight: Flight, spin_s: float) -> None:
        until = time.monotonic() + spin_s
        seen, mark = self._seen[flight.at], flight.number + 1
        while time.monotonic() < until:
            for _ in range(LOOKS):
                if seen[0] == mark:
                    return
        if not self._marked(flight):
            flight.tickets[flight.at].wait()

    def _fail(self, error: DeviceError, at: int) -> DeviceError:
        """The error to raise from here on. What the other devices have queued runs to its end, on values that nobody reads, so that they
        are closed as ever."""
        self._broken = on_device(error, at, len(self._devices), self._devices[at])
        self._release()
        return self._broken

    def _release(self) -> None:
        """Let all that is queued run."""
        for gate in self._gates:
            try:
                gate.open(gate.last_value)
            except DeviceError:
                continue

    def close(self) -> None:
        """Nothing may be in flight that somebody waits for."""
        self.quiet()
        self._release()
        for device, gate in zip(self._devices, self._gates, strict=True):
            device.settle()
            gate.destroy()
        self._gates.clear()
        self._flying.clear()
        for arena in self._arenas:
            arena.destroy()
        if self in self.peers:
            self.peers.remove(self)
