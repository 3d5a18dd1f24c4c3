"""Loads a model, generates, and closes it, over and over: nothing may be left of a cycle.

    python tools/cycles.py [-n 1000] [-m demo-dense | --tiny] [--ctx 32] [--every 20] [--no-prompt]

Every few cycles it looks at the process: Vulkan objects alive, open file handles, threads, Python objects, resident memory. Status 1 where
there are more objects, handles or threads at the end than after the first look, or where memory grows.

What counts of memory is the slope over the second half of the cycles, the median of those between any two looks: of what malloc has given
out ("in use"), and of what the process has resident, which is more where freed memory lies in one page with some that is not. All threads
share one heap here (MALLOC_ARENA_MAX): memory that threads fragment comes and goes by 30 MiB, and would hide a leak.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tiny_models import tiny_with_text  # noqa: E402

import vkback  # noqa: E402
from vkback.device import alive_objects  # noqa: E402

MAX_IN_USE_KIB, MAX_RESIDENT_KIB = 4.0, 24.0
"""A cycle takes 50 MiB. With Mesa 22's llvmpipe 0.1 KiB (--tiny) to 1.4 KiB (demo-dense) of it stay in use, in small blocks of which each
may keep its page of 4 KiB resident: generating again and again on one model leaves nothing, and hardly a quarter of that is left where a
device is opened and closed and its kernels are compiled but not run, which is when llvmpipe makes machine code of them."""

ARENA_KIB = 1024.0
"""Python takes memory for small objects in arenas of this size: one more may come at any time."""

MAX_OBJECTS_A_CYCLE = 0.9
"""A look itself leaves one, and there are fewer looks than cycles."""

ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Look:
    """The process after so many cycles. in_use: KiB that malloc has given out; resident: KiB that no file stands behind."""

    cycles: int
    in_use: float
    resident: int
    handles: int
    threads: int
    alive: int
    python: int


def look(cycles: int) -> Look:
    """Takes what nobody holds any more out of the count first: Python's cyclic garbage, and free pages of malloc."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    libc.malloc_trim(0)
    heap = libc.mallinfo2()
    anonymous = next(line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith("RssAnon"))
    return Look(
        cycles,
        (heap.uordblks + heap.hblkhd) / 1024,
        int(anonymous.split()[1]),
        _entries("/proc/self/fd"),
        _entries("/proc/self/task"),
        sum(alive_objects().values()),
        len(gc.get_objects()),
    )


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2. uordblks: bytes given out; hblkhd: and those of large blocks."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def _entries(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


def slope(looks: Sequence[Look], of: Callable[[Look], float]) -> float:
    """Growth a cycle: the median of the slopes between any two looks (Theil and Sen's), which single jumps do not move."""
    found = [(of(b) - of(a)) / (b.cycles - a.cycles) for a, b in itertools.combinations(looks, 2)]
    return statistics.median(found) if found else 0.0


def cycle(model: Path | str, ctx: int, number: int, *, prompt: bool = True) -> None:
    """One life of a model, with what most programs use of it. Without prompt each text begins with one token: no kernels of prompts."""
    with vkback.load(model, device=0, ctx=ctx) as loaded:
        loaded.generate(f"Chapter {number}" if prompt else [1], max_tokens=4, seed=number)
        session = loaded.session()
        session.generate("It was" if prompt else [1], max_tokens=2)
        session.fork().generate(max_tokens=1)


def left_over(looks: Sequence[Look]) -> list[str]:
    """What is more at the end than it was, in words."""
    first, last = looks[0], looks[-1]
    wrong = []
    if last.alive:
        wrong.append(f"Vulkan objects are alive: {alive_objects()}")
    for name, before, after in (("file handles", first.handles, last.handles), ("threads", first.threads, last.threads)):
        if after > before:
            wrong.append(f"{name}: {before} after {first.cycles} cycles, {after} after {last.cycles}")
    half = [one for one in looks if one.cycles >= last.cycles / 2]
    for name, grown, most in (
        ("in use", slope(half, lambda one: one.in_use), MAX_IN_USE_KIB),
        ("resident", slope(half, lambda one: one.resident), MAX_RESIDENT_KIB),
    ):
        if grown > most + (ARENA_KIB / (half[-1].cycles - half[0].cycles) if name == "resident" else 0.0):
            wrong.append(f"memory {name}: {grown:.2f} KiB more a cycle, at most {most:g} may be")
    if (objects := slope(half, lambda one: one.python)) > MAX_OBJECTS_A_CYCLE:
        wrong.append(f"Python objects: {objects:.2f} more a cycle")
    return wrong


def run(cycles: int, model: Path | str, ctx: int, every: int, *, prompt: bool = True, show: Callable[[str], object] = print) -> list[Look]:
    """The looks, the first of them after `every` cycles: by then caches are what they stay."""
    looks: list[Look] = []
    begun = time.perf_counter()
    show("cycles  seconds   in use, KiB  resident  handles  threads  Vulkan objects  Python objects")
    for number in range(1, cycles + 1):
        cycle(model, ctx, number, prompt=prompt)
        if number % every == 0:
            now = look(number)
            looks.append(now)
            seconds = time.perf_counter() - begun
            told = (now.handles, now.threads, now.alive, now.python)
            counts = "".join(f"{n:{width}}" for n, width in zip(told, (9, 9, 16, 16), strict=True))
            show(f"{number:6} {seconds:8.1f} {now.in_use:13.1f} {now.resident:9}{counts}")
    return looks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--cycles", type=int, default=1000)
    parser.add_argument("-m", "--model", default="demo-dense")
    parser.add_argument("--tiny", action="store_true", help="a model of two layers and 32 tokens instead")
    parser.add_argument("--no-prompt", action="store_true", help="texts begin with one token: half of a cycle's kernels")
    parser.add_argument("--ctx", type=int, default=32)
    parser.add_argument("--every", type=int, default=20)
    args = parser.parse_args()
    if args.cycles < 2 * args.every:
        parser.error(f"{args.cycles} cycles are too few for two looks; give -n {2 * args.every} or more, or a smaller --every")
    if any(os.environ.get(name) != value for name, value in ONE_HEAP.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ONE_HEAP)  # malloc reads it as a program begins
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_with_text(Path(folder) / "tiny.gguf") if args.tiny else args.model
        looks = run(args.cycles, model, args.ctx, args.every, prompt=not args.no_prompt)
    half = len(looks) // 2
    for name, part in (("first", looks[:half]), ("second", looks[half:])):
        in_use, resident = slope(part, lambda one: one.in_use), slope(part, lambda one: one.resident)
        print(f"memory a cycle in the {name} half: {in_use:+.2f} KiB in use, {resident:+.2f} KiB resident")
    wrong = left_over(looks)
    print("\n".join(wrong) or f"nothing is left of {args.cycles} cycles")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
