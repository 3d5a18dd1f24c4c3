"""Nothing is left of a model that was loaded, used and closed: twenty cycles of `tools/cycles.py`, and that it sees what is left."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from processes import run_program

from tools.cycles import Look, left_over, slope
from vkback.device import Device, alive_objects

ROOT = Path(__file__).resolve().parents[2]
LOOKS = [Look(cycles=n, in_use=1000.0, resident=5000, handles=6, threads=2, alive=0, python=40000) for n in range(10, 101, 10)]


@pytest.mark.vulkan
def test_twenty_cycles_leave_nothing() -> None:
    """In a process of their own. A thousand: tools/cycles.py -n 1000 --tiny."""
    command = [sys.executable, "tools/cycles.py", "-n", "20", "--every", "2", "--tiny", "--no-prompt"]
    done = run_program(command, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing is left of 20 cycles"


@pytest.mark.vulkan
def test_objects_of_all_devices_and_instances_are_counted() -> None:
    before = alive_objects()
    opened = Device.open()
    arena = opened.arena("some", 1 << 12)
    now = alive_objects()
    for kind in ("Instance", "Device", "Arena", "Memory", "Buffer"):
        assert now[kind] == before.get(kind, 0) + 1, kind
    arena.destroy()
    opened.close()
    assert alive_objects() == before


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"handles": 7}, "file handles: 6 after 10 cycles, 7 after 100"),
        ({"threads": 3}, "threads: 2 after 10 cycles, 3 after 100"),
        ({"alive": 1}, "Vulkan objects are alive"),
    ],
)
def test_what_is_left_is_told(change: dict[str, int], what: str) -> None:
    assert left_over(LOOKS) == []
    (told,) = left_over([*LOOKS[:-1], dataclasses.replace(LOOKS[-1], **change)])
    assert told.startswith(what)


def test_growth_is_told_and_a_single_jump_is_not() -> None:
    grown = [dataclasses.replace(one, in_use=one.in_use + 5 * one.cycles) for one in LOOKS]
    assert slope(grown, lambda one: one.in_use) == pytest.approx(5)
    assert left_over(grown) == ["memory in use: 5.00 KiB more a cycle, at most 4 may be"]
    more = [dataclasses.replace(one, python=one.python + one.cycles) for one in LOOKS]
    assert left_over(more) == ["Python objects: 1.00 more a cycle"]
    steady = [dataclasses.replace(one, resident=one.resident + 60 * one.cycles) for one in LOOKS]
    assert left_over(steady) == ["memory resident: 60.00 KiB more a cycle, at most 24 may be"]
    jump = [dataclasses.replace(one, resident=one.resident + 3000 * (one.cycles > 90)) for one in LOOKS]
    assert left_over(jump) == []
