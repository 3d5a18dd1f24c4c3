"""Ways to a scheduler: one that runs somewhere, one that is started for a command with workers of this machine, or one over SSH."""

from __future__ import annotations

import logging
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vkback.cluster.errors import ClusterError, require_distributed
from vkback.cluster.launch import Launcher, placed
from vkback.paths import reason

CONNECT_S = 5.0
PATIENCE_S = 120.0
"""How long a command waits for a scheduler, or for a first worker, before it ends."""


@dataclass
class Cluster:
    """A scheduler, and a connection to it that can be made anew.

    address   of the scheduler
    look      called now and then: starts workers of this machine anew
    expected  workers that will come without anybody's doing
    pids      of workers that this command started itself
    ends      why those have ended that are started again, by name, until somebody has said so
    """

    address: str
    look: Callable[[], object] = lambda: None
    expected: int = 1
    pids: Callable[[], list[int]] = list
    ends: dict[str, str] = field(default_factory=dict)
    topic: str = field(default_factory=lambda: f"vkback-{uuid.uuid4().hex}")
    _client: Any = None

    def client(self, on_message: Callable[[Any], None]) -> Any:
        """A distributed.Client, connected. Raises OSError or TimeoutError where nobody is there."""
        from distributed import Client

        self.drop()
        self._client = Client(self.address, timeout=CONNECT_S, set_as_default=False, name="vkback")
        self._client.subscribe_topic(self.topic, lambda event: on_message(event[1]))
        return self._client

    def drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):  # of a scheduler that is gone
                client.close(timeout=1)


def _quiet() -> None:
    """What distributed says of connections that end, this command says itself."""
    import dask
    import distributed  # sets the levels of its loggers

    del distributed
    for name in ("distributed", "tornado", "asyncio", "asyncssh"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    dask.config.set({"distributed.scheduler.allowed-failures": 1000, "distributed.comm.timeouts.connect": f"{CONNECT_S:.0f}s"})


@contextmanager
def connected(
    *, scheduler: str | None, hosts: Path | None, devices: Sequence[str] | None, workers: int | None, told: Callable[[str], None]
) -> Iterator[Cluster]:
    """A cluster for a command.

    scheduler  address of one that runs; else
    hosts      a file with a host a line (`host_lines`), on which workers are started over SSH; else this machine alone, with
    devices    a worker for each of these selectors, or
    workers    so many workers, dealt out over the devices
    told       gets a line for whatever happens to workers of this machine
    Raises ClusterError.
    """
    require_distributed()
    _quiet()
    if scheduler is not None:
        cluster = Cluster(scheduler)
        try:
            yield cluster
        finally:
            cluster.drop()
    elif hosts is not None:
        with _over_ssh(hosts) as cluster:
            yield cluster
    else:
        with _local(devices, workers, told) as cluster:
            yield cluster


@contextmanager
def _local(devices: Sequence[str] | None, workers: int | None, told: Callable[[str], None]) -> Iterator[Cluster]:
    from distributed import LocalCluster

    where = placed(devices, workers)
    with LocalCluster(n_workers=0, processes=False, protocol="tcp", host="127.0.0.1", scheduler_port=0, dashboard_address=None) as started:
        address = str(started.scheduler_address)
        ends: dict[str, str] = {}
        with Launcher(address, where, told, ended=ends.__setitem__) as launcher:
            cluster = Cluster(address, launcher.look, len(where), lambda: launcher.pids, ends)
            try:
                yield cluster
            finally:
                cluster.drop()


@dataclass(frozen=True)
class Host:
    """A line of a file of hosts. devices: selectors, () for all."""

    name: str
    options: dict[str, Any]
    python: str | None
    devices: tuple[str, ...]


def host_lines(text: str, named: str) -> list[Host]:
    """Hosts from lines `[USER@]HOST[:PORT] [python=PROGRAM] [devices=0,1]`; empty ones and what follows # are left out.

    Raises ClusterError naming the line.
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        user, _, where = words[0].rpartition("@")
        name, _, port = where.partition(":")
        settings = dict(word.partition("=")[::2] for word in words[1:])
        if not name or (port and not port.isdigit()) or settings.keys() - {"python", "devices"} or not all(settings.values()):
            raise ClusterError(
                f"[hosts] {named}, line {number}: {line.strip()!r}; expected [USER@]HOST[:PORT] [python=PROGRAM] [devices=0,1]"
            )
        options = {**({"username": user} if user else {}), **({"port": int(port)} if port else {})}
        found.append(Host(name, options, settings.get("python"), tuple(filter(None, settings.get("devices", "").split(",")))))
    if not found:
        raise ClusterError(f"[hosts] {named} names no host; expected a line [USER@]HOST[:PORT] for each")
    return found


@contextmanager
def _over_ssh(file: Path) -> Iterator[Cluster]:
    """The scheduler runs on the first host, and on every host a launcher of workers (vkback/cluster/remote.py)."""
    import sys

    from distributed import SSHCluster

    try:
        hosts = host_lines(file.read_text(encoding="utf-8"), str(file))
    except OSError as e:
        raise ClusterError(f"[hosts] --hosts {file}: {reason(e)}") from e
    chosen = {host.devices for host in hosts}
    if len(chosen) > 1:
        raise ClusterError(f"[hosts] {file}: devices= differ between lines; expected the same on all, or start `vkback worker` by hand")
    try:
        started = SSHCluster(
            [hosts[0].name, *(host.name for host in hosts)],
            connect_options=[hosts[0].options, *(host.options for host in hosts)],
            remote_python=[hosts[0].python or sys.executable, *(host.python or sys.executable for host in hosts)],
            worker_class="vkback.cluster.remote.HostWorkers",
            worker_options={"devices": list(hosts[0].devices)},
            scheduler_options={"port": 0, "dashboard": False},
        )
    except Exception as e:  # whatever SSH or a remote Python raises
        raise ClusterError(
            f"[hosts] --hosts {file}: {type(e).__name__}: {e}; expected hosts that `ssh HOST` reaches without a password, "
            "with vkback[hosts] installed at the same path, or python=PROGRAM on the line"
        ) from e
    with started:
        cluster = Cluster(str(started.scheduler_address), expected=len(hosts))
        try:
            yield cluster
        finally:
            cluster.drop()


def reach(cluster: Cluster, on_message: Callable[[Any], None], said: Callable[[str], None], patience_s: float = PATIENCE_S) -> Any:
    """A connection to the scheduler, waited for. Raises ClusterError when the time is up."""
    until, told = time.monotonic() + patience_s, False
    while True:
        try:
            return cluster.client(on_message)
        except (OSError, TimeoutError, ValueError) as e:
            if isinstance(e, ValueError):
                raise ClusterError(f"[hosts] --scheduler {cluster.address}: {e}; expected an address as tcp://HOST:8786") from e
            if time.monotonic() > until:
                raise ClusterError(
                    f"[hosts] no scheduler answers at {cluster.address}; start one with `dask scheduler`, then run this again: what has "
                    "come back is kept"
                ) from e
            if not told:
                said(f"no scheduler answers at {cluster.address}; waiting for one, {patience_s:.0f} s at most")
                told = True
            time.sleep(0.5)
