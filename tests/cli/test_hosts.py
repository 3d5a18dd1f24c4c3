"""Work by workers on Dask distributed: what they are given, and that nothing is lost when one, or the scheduler, is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vkback.cli.hosts import device_list
from vkback.cluster.connect import host_lines
from vkback.cluster.errors import ClusterError
from vkback.cluster.journal import UnitJournal

psutil = pytest.importorskip("psutil", reason="the extra vkback[hosts] is not installed")

ABOUT = {"device": "card", "driver": "driver 1", "build": "b", "host": "h", "uuid": "u", "name": "h/0"}
KIND = ("card", "driver 1", "b")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("0,1", ["0", "1"]),
        ("0, 0", ["0", "0"]),
        ("0", None),
        (None, None),
        ("llvmpipe (LLVM 15.0.6, 256 bits)", None),
        ("00000000-0000-0000-0000-000000000001,1", ["00000000-0000-0000-0000-000000000001", "1"]),
    ],
)
def test_devices_are_a_list_where_there_are_several(text: str | None, want: list[str] | None) -> None:
    assert device_list(text) == want


def test_hosts_of_a_file() -> None:
    first, second = host_lines("# mine\nme@one:2222 python=/opt/bin/python devices=0,1\n\ntwo  # slow\n", "hosts")
    assert (first.name, first.options, first.python, first.devices) == (
        "one",
        {"username": "me", "port": 2222},
        "/opt/bin/python",
        ("0", "1"),
    )
    assert (second.name, second.options, second.python, second.devices) == ("two", {}, None, ())


@pytest.mark.parametrize("text", ["", "# none\n", "one:port", "one gpu=1", "one python="])
def test_a_wrong_file_of_hosts_is_named(text: str) -> None:
    with pytest.raises(ClusterError, match=r"hosts\.txt.*expected a line|hosts\.txt, line 1.*expected"):
        host_lines(text, "hosts.txt")


def test_a_journal_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "j"
    UnitJournal(path, {"command": "c"}).keep(ABOUT, KIND, "one", 1)
    with path.open("a") as file:
        file.write('{"kind": ["card"')
    again = UnitJournal(path, {"command": "c"})
    assert again.known(KIND, "one") == 1
    assert again.known(("card", "driver 2", "b"), "one") is None
    assert {name: again.records[0][name] for name in ABOUT} == ABOUT
    with pytest.raises(ClusterError, match="of another run"):
        UnitJournal(path, {"command": "other"})


def test_a_journal_goes_on_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    UnitJournal(path, {"command": "c"}).keep(ABOUT, KIND, "one", 1)
    with path.open("a") as file:
        file.write('{"kind": ["card"')
    UnitJournal(path, {"command": "c"}).keep(ABOUT, KIND, "two", 2)
    assert UnitJournal(path, {"command": "c"}).known(KIND, "two") == 2


# -- with workers

OPS = "SCALE,SQR,ADD,MUL,CLAMP,COS,CPY,SUM_ROWS"


def environment() -> dict[str, str]:
    return {**os.environ, "LP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def started(*args: str, module: str = "vkback") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )


def wait_for(what: Callable[[], Any], seconds: float = 90.0) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come")


def keys(journal: Path) -> list[str]:
    if not journal.exists():
        return []
    return [json.loads(line)["key"] for line in journal.read_text().splitlines()[1:] if line.endswith("}")]


def workers_below(process: subprocess.Popen[str]) -> list[Any]:
    return [p for p in psutil.Process(process.pid).children(recursive=True) if "vkback.cluster" in p.cmdline()]


def lines_of_ops() -> list[str]:
    from vkback.harness.cases import quick_cases

    return [case.line for case in quick_cases() if case.op in OPS.split(",")]


@contextmanager
def ended(*processes: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.vulkan
def test_a_killed_worker_loses_no_case(tmp_path: Path) -> None:
    journal = tmp_path / "j"
    run = started("test-ops", "-o", OPS, "--device", "0,0", "--journal", str(journal))
    with ended(run):
        wait_for(lambda: keys(journal))
        os.kill(workers_below(run)[0].pid, signal.SIGKILL)
        said, _ = run.communicate(timeout=180)
        assert run.returncode == 0, said
    assert sorted(keys(journal)) == sorted(lines_of_ops())
    assert "ended by signal 9; it is started again" in said
    assert f"{len(lines_of_ops())}/" in said.replace(" tests passed", "/")


@pytest.mark.exhaustive
@pytest.mark.vulkan
def test_a_killed_scheduler_loses_no_case(tmp_path: Path) -> None:
    journal = tmp_path / "j"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"

    def scheduler() -> subprocess.Popen[str]:
        return started("--host", "127.0.0.1", "--port", str(port), "--no-dashboard", module="distributed.cli.dask_scheduler")

    first, workers = scheduler(), started("worker", "--scheduler", address, "--workers", "2")
    run = started("test-ops", "-o", OPS, "--scheduler", address, "--journal", str(journal))
    with ended(run, workers, first):
        wait_for(lambda: keys(journal))
        first.kill()
        first.wait()
        before = len(keys(journal))
        with ended(again := scheduler()):
            said, _ = run.communicate(timeout=180)
            assert run.returncode == 0, said
            assert again.poll() is None
    assert before < len(lines_of_ops()), "it was killed too late"
    assert "the scheduler at" in said
    assert sorted(keys(journal)) == sorted(lines_of_ops())


@pytest.mark.exhaustive
@pytest.mark.vulkan
def test_a_run_again_does_what_is_missing(tmp_path: Path) -> None:
    journal = tmp_path / "j"
    wanted = ["test-ops", "-o", "SCALE,SQR", "--workers", "1", "--journal", str(journal)]
    run = started(*wanted)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    whole = journal.read_text().splitlines()
    journal.write_text("\n".join(whole[:-1]) + "\n")
    run = started(*wanted)
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert [json.loads(line)["key"] for line in journal.read_text().splitlines()[1:]] == [json.loads(x)["key"] for x in whole[1:]]
    assert f"{len(whole) - 1}/{len(whole) - 1} tests passed" in said


def test_without_the_packages_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from vkback.cluster.errors import require_distributed

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ClusterError, match=r"pip install 'vkback\[hosts\]'"):
        require_distributed()
