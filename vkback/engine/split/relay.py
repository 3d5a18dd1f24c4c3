"""Tokens that go from device to device: each one's work is submitted to all of them at once, and the host lets a device begin when the one
before has finished.

What a device does for a token waits in its queue for a `Gate`, so that a transfer takes the host a look and a signal, not a submit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from vkback.device import Commands, Device, DeviceError, DeviceLost, Gate, Ticket

SPIN_S = 0.02
"""How long the host stays awake for a device: longer than a token takes. To wake up takes as long as a transfer."""


def on_device(error: DeviceError, at: int, count: int, device: Device) -> DeviceError:
    """The same error, with the device that it is of."""
    return type(error)(f"[split] device {at + 1} of {count}, {device.caps.name}: {error}", call=error.call, result=error.result)


class Flight:
    """A token on its way; `wait` as of a Ticket."""

    def __init__(self, relay: Relay, tickets: Sequence[Ticket], values: Sequence[int]) -> None:
        """values: that the devices' gates are opened with."""
        self._relay, self.tickets, self.values = relay, tickets, values
        self.at = 0  # the device that works on it, or will be the first to

    @property
    def done(self) -> bool:
        """Whether all devices have finished; never waits."""
        return self.at == len(self.tickets)

    def wait(self) -> None:
        """Hand the token over from device to device until the last one has finished. Raises DeviceLost, Timeout."""
        self._relay.wait(self)


class Relay:
    """Tokens of one text over several devices, in order."""

    def __init__(self, devices: Sequence[Device], carry: Callable[[int], object]) -> None:
        """carry: called with the number of a device that has finished, before the next one begins, or the first one with the
        next token."""
        self._devices, self._carry = devices, carry
        self._gates: list[Gate] = []
        self._flying: deque[Flight] = deque()
        self._broken: DeviceError | None = None
        for device in devices:
            self._gates.append(device.gate())
        self._spin_s = 0.0 if any(device.caps.software for device in devices) else SPIN_S

    def submit(self, work: Sequence[Sequence[Commands]]) -> Flight:
        """Queue a token: for each device what it does. It begins when the one before has ended."""
        if self._broken is not None:
            raise self._broken
        tickets: list[Ticket] = []
        values = []
        try:
            for device, gate, commands in zip(self._devices, self._gates, work, strict=True):
                values.append(gate.next())
                tickets.append(device.submit(commands, gate))
        except DeviceError as error:
            raise self._fail(error, len(tickets)) from error
        flight = Flight(self, tickets, values)
        self._flying.append(flight)
        if len(self._flying) == 1:
            self._gates[0].open(values[0])
        return flight

    def wait(self, flight: Flight) -> None:
        """Until a token has ended, and those before it."""
        while not flight.done:
            if self._broken is not None:
                raise self._broken
            self._advance()

    def _advance(self) -> None:
        """Wait for the device that works, and let the next one begin. Ctrl-C may come anywhere in it: it is called again then."""
        head = self._flying[0]
        at = head.at
        try:
            self._gates[at].open(head.values[at])
            head.tickets[at].wait(spin_s=self._spin_s)
            self._carry(at)
            if at + 1 < len(self._gates):
                self._gates[at + 1].open(head.values[at + 1])
                head.at = at + 1
                return
            if len(self._flying) > 1:
                self._gates[0].open(self._flying[1].values[0])
            self._flying.popleft()
            head.at = at + 1
        except DeviceError as error:
            raise self._fail(error, at) from error

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
            except DeviceLost:
                continue

    def close(self) -> None:
        """Nothing may be in flight that somebody waits for."""
        self._release()
        for device, gate in zip(self._devices, self._gates, strict=True):
            device.settle()
            gate.destroy()
        self._gates.clear()
