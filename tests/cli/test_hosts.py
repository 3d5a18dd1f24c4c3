"""Work by workers on Dask distributed: what they are given, and that nothing is lost when one, or the scheduler, is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import free_port
from waiting import PATIENCE_S

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
        [sys.executable, "-m", module, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        env=environment(),
    )


def wait_for(what: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come")


def keys(journal: Path) -> list[str]:
    if not journal.exists():
        return []
    return [json.loads(line)["key"] for line in journal.read_text(encoding="utf-8").splitlines()[1:] if line.endswith("}")]


def workers_below(process: subprocess.Popen[str]) -> list[Any]:
    return [p for p in psutil.Process(process.pid).children(recursive=True) if "vkback.cluster" in p.cmdline()]


def lines_of_ops() -> list[str]:
    from vkback.harness.cases import quick_cases

    return [case.line for case in quick_cases() if case.op in OPS.split(",")]


def a_scheduler() -> tuple[str, Callable[[], subprocess.Popen[str]]]:
    """The address of a scheduler of this machine, and what starts it, as often as it is called."""
    port = free_port()
    wanted = ["--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
    return f"tcp://127.0.0.1:{port}", lambda: started(*wanted, module="distributed.cli.dask_scheduler")


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
        said, _ = run.communicate(timeout=PATIENCE_S)
        assert run.returncode == 0, said
    assert sorted(keys(journal)) == sorted(lines_of_ops())
    assert (
        len(re.findall(r"is gone \(its process was ended by signal 9; it is started again\) while it ran .*; another takes it", said)) == 1
    )
    assert said.count("signal 9") == 1, "one line"
    assert f"{len(lines_of_ops())}/" in said.replace(" tests passed", "/")


@pytest.mark.exhaustive
@pytest.mark.vulkan
def test_a_killed_scheduler_loses_no_case(tmp_path: Path) -> None:
    journal = tmp_path / "j"
    address, scheduler = a_scheduler()
    first, workers = scheduler(), started("worker", "--scheduler", address, "--workers", "2")
    run = started("test-ops", "-o", OPS, "--scheduler", address, "--journal", str(journal))
    with ended(run, workers, first):
        wait_for(lambda: keys(journal))
        first.kill()
        first.wait()
        before = len(keys(journal))
        with ended(again := scheduler()):
            said, _ = run.communicate(timeout=PATIENCE_S)
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
    said, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, said
    whole = journal.read_text().splitlines()
    journal.write_text("\n".join(whole[:-1]) + "\n")
    run = started(*wanted)
    said, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, said
    assert [json.loads(line)["key"] for line in journal.read_text().splitlines()[1:]] == [json.loads(x)["key"] for x in whole[1:]]
    assert f"{len(whole) - 1}/{len(whole) - 1} tests passed" in said


# -- sweeps of tune

SWEPT = ("tune", "--quant", "Q4_0,Q8_0", "--shape", "256x512,512x256", "--budget", "20")
TASKS = 4


class Sweep:
    """A journal of tune: how often each point of a task stands in it, and the points of each task's result."""

    def __init__(self, folder: Path) -> None:
        files = list(folder.glob("*.journal"))
        text = files[0].read_text(encoding="utf-8") if files else ""
        events = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        self.points = Counter((e["measured"], tuple(e["point"])) for e in events if "measured" in e)
        self.results = Counter(e["key"] for e in events if "result" in e)
        self.timed = {(e["key"], tuple(point)) for e in events if "result" in e for point, *_ in e["result"]["timed"]}

    def holds_all(self, before: Sweep) -> None:
        """Every task has one result, every point stands there once, and none of those from before is lost."""
        assert len(self.results) == TASKS and set(self.results.values()) == {1}
        assert set(self.points.values()) == {1}, "a point was timed again"
        assert before.points.keys() <= self.timed, "a point is in no result"


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the tables and the journal of a sweep are."""
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    return tmp_path


def in_the_middle(folder: Path) -> Sweep:
    """The sweep once it has some points of tasks that have no result."""

    def looked() -> Sweep | None:
        sweep = Sweep(folder)
        return sweep if len({key_and_point for key_and_point in sweep.points if key_and_point[0] not in sweep.results}) >= 3 else None

    found: Sweep = wait_for(looked)  # until programs are compiled
    return found


@pytest.mark.exhaustive
@pytest.mark.vulkan
def test_a_killed_worker_loses_no_point_of_a_sweep(swept: Path) -> None:
    run = started(*SWEPT, "--workers", "2")
    with ended(run):
        before = in_the_middle(swept)
        os.kill(workers_below(run)[0].pid, signal.SIGKILL)
        said, _ = run.communicate(timeout=PATIENCE_S)
        assert run.returncode == 0, said
    Sweep(swept).holds_all(before)
    assert len(re.findall(r"worker \S+ is gone \(.*signal 9.*\) while it ran LINEAR\(.*another takes it", said)) == 1, said
    assert said.count("signal 9") == 1, "one line"


@pytest.mark.exhaustive
@pytest.mark.vulkan
def test_a_killed_scheduler_loses_no_point_of_a_sweep(swept: Path) -> None:
    address, scheduler = a_scheduler()
    first, workers = scheduler(), started("worker", "--scheduler", address, "--workers", "2")
    run = started(*SWEPT, "--scheduler", address)
    with ended(run, workers, first):
        before = in_the_middle(swept)
        first.kill()
        first.wait()
        with ended(scheduler()):
            said, _ = run.communicate(timeout=PATIENCE_S)
            assert run.returncode == 0, said
    Sweep(swept).holds_all(before)
    assert said.count("the scheduler at") == 1, said


@pytest.mark.exhaustive
@pytest.mark.vulkan
def test_a_sweep_whose_command_was_killed_goes_on_from_its_journal(swept: Path) -> None:
    run = started(*SWEPT, "--workers", "2")  # the scheduler is in its process
    with ended(run):
        in_the_middle(swept)
        below = workers_below(run)
        run.kill()
        run.wait()
    before = Sweep(swept)
    wait_for(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in below))
    run = started(*SWEPT, "--workers", "2", "--resume")
    with ended(run):
        said, _ = run.communicate(timeout=PATIENCE_S)
        assert run.returncode == 0, said
    Sweep(swept).holds_all(before)


def test_without_the_packages_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from vkback.cluster.errors import require_distributed

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ClusterError, match=r"pip install 'vkback\[hosts\]'"):
        require_distributed()


@pytest.mark.exhaustive
@pytest.mark.vulkan
def test_perplexity_by_two_workers_is_that_of_one_device() -> None:
    text = Path(__file__).parents[1] / "data" / "war_of_the_worlds.txt"
    wanted = ["perplexity", "-m", "demo-dense", "-f", str(text), "-c", "32", "--chunks", "5", "-np", "1", "--json", "--device"]
    found = []
    for device in ("0", "0,0"):
        made = subprocess.run(
            [sys.executable, "-m", "vkback", *wanted, device], capture_output=True, text=True, encoding="utf-8", env=environment()
        )
        assert made.returncode == 0, made.stderr
        found.append(json.loads(made.stdout))
    assert found[1]["perplexity"] == pytest.approx(found[0]["perplexity"], rel=1e-9), "the same programs, so the same bits"
    assert {k: found[1][k] for k in ("tokens", "chunks", "model", "device")} == {
        k: found[0][k] for k in ("tokens", "chunks", "model", "device")
    }


@pytest.mark.exhaustive
@pytest.mark.vulkan
def test_vkbench_shares_its_tests() -> None:
    wanted = ["tg4", "pp8", "pp16", "-m", "demo-dense", "-r", "1", "--json", "--read-rate", "0", "--math-rate", "0", "--device", "0,0"]
    run = subprocess.run(
        [sys.executable, "-m", "vkback.cli.vkbench", *wanted], capture_output=True, text=True, encoding="utf-8", env=environment()
    )
    assert run.returncode == 0, run.stderr
    assert [(row["n_prompt"], row["n_gen"]) for row in json.loads(run.stdout)] == [(0, 4), (8, 0), (16, 0)]


# -- the loop that hands out work, without a cluster


class FakeFuture:
    """status: as a distributed.Future has it."""

    def __init__(self, key: str, status: str, value: Any = None) -> None:
        self.key, self.status, self._value = key, status, value

    def add_done_callback(self, call: Any) -> None:
        call(self)

    def result(self, timeout: float = 0) -> Any:
        return self._value

    def cancel(self) -> None:
        self.status = "cancelled"


class FakeClient:
    """A scheduler with one worker, which answers at once by `answer`."""

    status = "running"

    def __init__(self, answer: Callable[[dict[str, Any]], Any], about: dict[str, Any]) -> None:
        self._answer, self._about = answer, about

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        return {"workers": {"tcp://1": {}}}

    def submit(self, function: Any, *args: Any, key: str = "described", **how: Any) -> FakeFuture:
        return FakeFuture(key, "finished", self._answer(args[1]) if args else self._about)


def pulled(monkeypatch: pytest.MonkeyPatch, work: Any, answer: Callable[[dict[str, Any]], Any], **how: Any) -> list[str]:
    """What the loop says of a work that a worker answers so."""
    from vkback.cluster import pull
    from vkback.cluster.connect import Cluster

    said: list[str] = []
    monkeypatch.setattr(pull, "reach", lambda *args: FakeClient(answer, {**ABOUT, "kernels": "k"}))
    monkeypatch.setattr(pull, "LOOK_S", 0.01)
    pull.Pull(Cluster("tcp://s"), work, said.append, **how).run()
    return said


def listed(*keys: str) -> Any:
    from vkback.cli.listed_work import ListedWork
    from vkback.cluster.pull import Unit

    return ListedWork([Unit(key, "vkback.x:y", {"key": key}) for key in keys], UnitJournal(None, {}), "units")


def test_results_are_of_a_kind_of_device_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    work = listed("a", "b", "c")
    pulled(monkeypatch, work, lambda args: {"value": args["key"].upper()})
    assert list(work.kinds) == [KIND] and work.kinds[KIND].values == {"a": "A", "b": "B", "c": "C"}


def test_an_error_of_all_units_is_said_once_and_all_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    work = listed("a", "b", "c")
    said = pulled(monkeypatch, work, lambda args: {"error": "[x] no such thing", "lost": False})
    assert sum("no such thing" in line for line in said) == 1
    assert work.kinds[KIND].faults == dict.fromkeys("abc", "[x] no such thing")


def test_workers_with_other_kernels_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="no worker is at tcp://s"):
        pulled(monkeypatch, listed("a"), lambda args: {"value": 1}, kernels="other", patience_s=0.1)


@pytest.mark.exhaustive
def test_workers_over_ssh_end_with_their_scheduler() -> None:
    """What SSHCluster starts on a host is not ended by it: workers there must not wait for another scheduler."""
    from vkback.cluster.launch import Launcher, Placed

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Launcher(f"tcp://127.0.0.1:{port}", [Placed("0", "h/0", True)], lambda line: None, once=True) as launcher:
        wait_for(lambda: not launcher.look(), 60)
