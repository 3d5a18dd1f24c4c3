"""A sweep by workers, without workers: points and results go into the journal and the table as they come back."""

from __future__ import annotations

import copy
import json
import pickle
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sweep_kit import H200, tune_result

from vkback.autotune.gemm_points import GemmPoint
from vkback.autotune.journal import Journal
from vkback.autotune.points import Point, Task
from vkback.autotune.problem import LinearProblem
from vkback.cli.tune_families import TuneRequest
from vkback.cli.tune_hosts import TuneWork, request_from
from vkback.cluster.pull import Member
from vkback.device import Capabilities
from vkback.device.capabilities import PROFILE_DIR
from vkback.tuning.table import load_table

BEFORE, AFTER = Point(64, 64, 2, 2), Point(128, 64, 2, 1)
REQUEST = TuneRequest(None, None, "Q4_K", "4096x4096", (1,), "auto", None, None)


def task(quant: str) -> Task:
    return Task(LinearProblem.parse(f"MUL_MAT(type_a={quant},m=4096,n=1,k=4096)").with_x("Q8_1"), "int")


TASKS = [task("Q4_K"), task("Q6_K")]
LISTED = [{"family": 0, "key": t.key, "line": t.line, "noun": "GEMVs"} for t in TASKS]


@pytest.fixture
def member() -> Member:
    caps = Capabilities.from_profile(f"{PROFILE_DIR}/{H200}.json")
    about = {"device": caps.name, "driver": "d 1", "build": "b", "host": "h", "uuid": caps.uuid, "name": "h/0", "caps": caps.to_dict()}
    return Member("tcp://h:1", about)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    return tmp_path


def work_of(stack: ExitStack, *, resume: bool = False) -> TuneWork:
    return TuneWork(["gemv"], REQUEST, 100.0, resume, False, stack, lambda: 2)


@pytest.mark.parametrize("point", [BEFORE, GemmPoint("coop_mat", 64, 64, 32)])
def test_points_are_pickled_and_copied_as_they_are(point: Any) -> None:
    for again in (pickle.loads(pickle.dumps(point)), copy.copy(point), copy.deepcopy(point)):
        assert again == point and type(again) is type(point) and again._asdict() == point._asdict()


def test_a_request_comes_back_from_plain_values() -> None:
    import dataclasses

    assert request_from(json.loads(json.dumps(dataclasses.asdict(REQUEST)))) == REQUEST


def test_results_of_several_tasks_become_rows(member: Member, folder: Path) -> None:
    with ExitStack() as stack:
        work = work_of(stack)
        assert work.begin(member) is not None
        units = work.units(member, LISTED)
        assert [u.key for u in units] == [t.line for t in TASKS] and units[0].args["budget_s"] == 100.0
        for unit, each in zip(units, TASKS, strict=True):
            value = {"journal": "gemv", "result": json.loads(json.dumps(tune_result(each, BEFORE, AFTER).to_json()))}
            assert work.done(member, unit, value) == []
        (kind,) = work.kinds.values()
        rows = load_table(kind.own.path)
    assert [(row.match["quant"], row.set["wg"]) for row in rows] == [("Q4_K", 128), ("Q6_K", 128)]


def test_points_come_into_the_journal_and_with_the_task_that_is_done_again(member: Member, folder: Path) -> None:
    with ExitStack() as stack:
        work = work_of(stack)
        work.begin(member)
        unit, other = work.units(member, LISTED)
        for message in ({"trying": list(BEFORE)}, {"tried": list(BEFORE)}, {"measured": list(BEFORE), "us": 10.0, "spread_us": 0.5}):
            work.on_message(member, unit, message)
        work.on_message(member, unit, {"trying": list(AFTER)})
        (again,) = work.lost(member, unit)
        assert again.args["known"] == [[list(BEFORE), 10.0, 0.5]] and again.args["suspects"] == [], "it may have been killed"
        work.on_message(member, again, {"trying": list(AFTER)})
        (again,) = work.lost(member, again)
        assert again.args["suspects"] == [list(AFTER)], "two workers have ended with it"
    with ExitStack() as stack:  # the command itself was killed, and runs again
        work = work_of(stack, resume=True)
        work.begin(member)
        unit, other = work.units(member, LISTED)
        assert unit.args["known"] == [[list(BEFORE), 10.0, 0.5]] and unit.args["suspects"] == [list(AFTER)]
        assert other.args["known"] == []
    with ExitStack() as stack:
        work = work_of(stack)
        work.begin(member)
        assert work.units(member, LISTED)[0].args["known"] == [], "without --resume all is measured anew"


def test_a_task_that_a_scheduler_took_with_it_begins_with_its_points(member: Member, folder: Path) -> None:
    with ExitStack() as stack:
        work = work_of(stack)
        work.begin(member)
        unit, _ = work.units(member, LISTED)
        for at in (BEFORE, AFTER):
            work.on_message(member, unit, {"trying": list(at)})
        work.on_message(member, unit, {"measured": list(BEFORE), "us": 10.0, "spread_us": 0.5})
        for _ in range(3):
            (again,) = work.again(member, unit)
            assert again.args["known"] == [[list(BEFORE), 10.0, 0.5]]
            assert again.args["suspects"] == [], "no worker has ended with a point"


def test_a_point_that_comes_late_is_kept_and_once(member: Member, folder: Path) -> None:
    with ExitStack() as stack:
        work = work_of(stack)
        work.begin(member)
        unit, _ = work.units(member, LISTED)
        (again,) = work.lost(member, unit)
        work.on_late_message(member, unit, {"trying": list(AFTER)})
        work.on_late_message(member, unit, {"measured": list(BEFORE), "us": 10.0, "spread_us": 0.5})
        work.on_message(member, again, {"measured": list(BEFORE), "us": 11.0, "spread_us": 0.5})
        (again,) = work.lost(member, again)
        assert again.args["known"] == [[list(BEFORE), 10.0, 0.5]] and again.args["suspects"] == [] and work.points == 1
        (kind,) = work.kinds.values()
        assert kind.own.journal.path.read_text(encoding="utf-8").count('"measured"') == 1


def test_points_of_other_kernels_are_not_taken_up(tmp_path: Path) -> None:
    one = Journal(tmp_path / "j", {"device": "d", "driver": "1", "kernels": "a"})
    one.measured("key", (1, "x"), 2.0, 0.1)
    assert Journal(tmp_path / "j", {"device": "d", "driver": "1", "kernels": "a"}).known("key") == {(1, "x"): (2.0, 0.1)}
    assert Journal(tmp_path / "j", {"device": "d", "driver": "1", "kernels": "b"}).known("key") == {}
