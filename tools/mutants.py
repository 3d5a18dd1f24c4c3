#!/usr/bin/env python3
"""Mutation test of the quick suite: each fault of tests/mutants.toml is planted in a copy of the sources, and a case must fail.

    tools/mutants.py [NAME]...      plant these faults, default all; -j processes; exit code 1 when one survives
    tools/mutants.py --list         names, files and what each fault models

The cases are those of the quick suite (the ops' own cases and vkback/harness/token_cases.py) that a fault can reach: of a shader the cases
with a kernel whose SPIR-V changes, of the planner and the ops' Python the cases and tokens that are planned otherwise. They run until one
fails. A fault of a kernel that no case of a CPU driver runs names a test instead, and whether that needs cooperative matrices.
Nothing in the working tree changes: every process runs on a copy of vkback/, shaders/ and tuning/.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vkback.device import Device
    from vkback.ops.case import Case
    from vkback.ops.lowering import LowerContext
    from vkback.shader import ShaderLibrary, Variant

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutants.toml"
TIMEOUT_S = 600.0
LINKED = ("builtin", "profiles")
"""Folders of data that no fault is planted in: linked, not copied."""
SKIPPED = "not planted on this device"
AT_ONCE = 8
"""Cases whose kernels are compared at once."""
TYPE_DEFINES = ("QUANT_FILE", "CODEBOOK_LITERALS")
"""Defines by which the type of the weights enters a kernel."""
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|(\w+))', re.MULTILINE)


class MutantError(Exception):
    """A fault that cannot be planted, or a table that cannot be read."""


@dataclass(frozen=True)
class Mutant:
    """One fault: `old`, which `file` (relative to the checkout) holds exactly once, becomes `new`; `models` says what it stands for.

    test      pytest's name of what must fail instead of a case, "" for the quick suite
    matrices  that test needs a device with cooperative matrices
    """

    name: str
    file: str
    old: str
    new: str
    models: str
    test: str = ""
    matrices: bool = False

    def planted(self, root: Path = ROOT) -> str:
        """The text of the file with the fault. Raises MutantError when its line is not there exactly once."""
        try:
            text = (root / self.file).read_text(encoding="utf-8")
        except OSError as e:
            raise MutantError(f"{self.name}: cannot read {self.file}: {e.strerror}") from e
        if (count := text.count(self.old)) != 1:
            raise MutantError(f"{self.name}: {self.file} holds {self.old!r} {count} times, expected once")
        before, after = self.old.split("\n"), self.new.split("\n")
        if len(before) != len(after) or sum(a != b for a, b in zip(before, after, strict=True)) != 1:
            raise MutantError(f"{self.name}: expected `new` to be `old` with one line changed")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Fate:
    """What became of a fault.

    by     the case that failed, "" when it survived
    error  what was wrong; SKIPPED where the fault was not planted
    cases  how many ran
    cpu_s, seconds  time of the processor, of all its cores, and by the clock
    """

    by: str
    error: str
    cases: int
    cpu_s: float = 0.0
    seconds: float = 0.0


def load(table: Path = TABLE) -> list[Mutant]:
    """The faults of a table. Raises MutantError for one that is incomplete or has the name of another."""
    entries = tomllib.loads(table.read_text(encoding="utf-8"))["mutant"]
    try:
        mutants = [Mutant(**entry) for entry in entries]
    except TypeError as e:
        raise MutantError(f"{table.name}: {e}; a mutant has name, file, old, new and models") from e
    names = [m.name for m in mutants]
    if twice := {n for n in names if names.count(n) > 1}:
        raise MutantError(f"{table.name}: two mutants are called {', '.join(sorted(twice))}")
    return mutants


# -- the parent: copies of the sources, a process for each fault


def copy_sources(to: Path) -> Path:
    """A copy of what a process of vkback reads; large data is linked."""
    for name in ("vkback", "shaders", "tuning"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", *LINKED))
    for name in LINKED:
        for folder in (ROOT / "vkback").glob(f"**/{name}"):
            (to / folder.relative_to(ROOT)).symlink_to(folder, target_is_directory=True)
    return to


@contextmanager
def planted(mutant: Mutant, copy: Path) -> Iterator[None]:
    """The fault in a copy of the sources, as long as the context lasts."""
    target = copy / mutant.file
    text = mutant.planted(copy)
    target.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        shutil.copy2(ROOT / mutant.file, target)


def child(copy: Path, *args: str, write_bytecode: bool = False) -> subprocess.CompletedProcess[str]:
    """This script with vkback from a copy of the sources. Bytecode is written only while the copy is as the original."""
    own = {"PYTHONPATH": str(copy), "PYTHONHASHSEED": "0", "VKBACK_TUNING": os.devnull, "VKBACK_CACHE": str(copy / "cache")}
    env = {"GALLIVM_PERF": "nopt", **os.environ, **own}  # llvmpipe compiles faster without LLVM's optimizer
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    if not write_bytecode:
        env["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, str(Path(__file__).resolve()), *args]
    return subprocess.run(command, env=env, cwd=copy, encoding="utf-8", capture_output=True, timeout=TIMEOUT_S, check=False)


def run_test(copy: Path, test: str) -> Fate:
    """A test of the checkout on the vkback of a copy."""
    own = {"PYTHONPATH": str(copy), "VKBACK_CACHE": str(copy / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-q", "-x", "-rfE", "-p", "no:cacheprovider", "-o", f"pythonpath={copy}", "--rootdir", str(ROOT)]
    command = [sys.executable, "-m", "pytest", *options, str(ROOT / test)]
    env = {"GALLIVM_PERF": "nopt", **os.environ, **own}
    done = subprocess.run(command, env=env, cwd=copy, encoding="utf-8", capture_output=True, timeout=TIMEOUT_S, check=False)
    said = [line for line in done.stdout.splitlines() if line.strip()] or [done.stderr]
    if done.returncode == 1:
        errors = [line for line in said if line.startswith("E ")] or said[-1:]
        return Fate(test, errors[0], 1)
    return Fate("", f"its test did not fail: {said[-1]}", 1)


class Farm:
    """Copies of the sources, one for each process that runs at once, and what the quick suite plans without a fault."""

    def __init__(self, folder: Path, processes: int) -> None:
        self._cache = user_cache()
        self.copies = [copy_sources(folder / str(i)) for i in range(processes)]
        with ThreadPoolExecutor(processes) as pool:
            parts = [folder / f"plans.{i}" for i in range(processes)]
            futures = [
                pool.submit(child, copy, "--plans", str(part), str(i), str(processes), write_bytecode=True)
                for i, (copy, part) in enumerate(zip(self.copies, parts, strict=True))
            ]
            for future in futures:
                done = future.result()
                if done.returncode:
                    raise MutantError(f"the quick suite cannot be planned:\n{done.stderr}")
        plans = [record for part in parts for record in pickle.loads(part.read_bytes())]
        self.plans = folder / "plans"
        self.plans.write_bytes(pickle.dumps(sorted(plans)))
        self.matrices = has_matrices()
        self._free: SimpleQueue[Path] = SimpleQueue()
        for copy in self.copies:
            self._free.put(copy)

    def fate(self, mutant: Mutant) -> Fate:
        """Plant a fault and run the cases it can reach until one fails."""
        if mutant.matrices and not self.matrices:
            return Fate("", f"{SKIPPED}, which has no cooperative matrices", 0)
        copy, begin = self._free.get(), time.monotonic()
        try:
            with planted(mutant, copy):
                if mutant.test:
                    return dataclasses.replace(run_test(copy, mutant.test), seconds=time.monotonic() - begin)
                done = child(copy, "--one", mutant.file, str(self.plans), str(ROOT / "shaders"), str(self._cache))
        except subprocess.TimeoutExpired:
            return Fate("", f"no end within {TIMEOUT_S:.0f} s", 0, seconds=TIMEOUT_S)
        finally:
            self._free.put(copy)
        seconds = time.monotonic() - begin
        if done.returncode < 0:
            return Fate("the process", f"died of signal {-done.returncode}", 0, seconds=seconds)
        try:
            return Fate(**json.loads(done.stdout.splitlines()[-1]), seconds=seconds)
        except (ValueError, IndexError, TypeError):
            said = [line for line in done.stderr.splitlines() if line.strip()]
            return Fate("", f"no result: {said[-1] if said else 'nothing was said'}", 0, seconds=seconds)


def user_cache() -> Path:
    """Where this user's compiled shaders lie."""
    sys.path.insert(0, str(ROOT))
    from vkback.paths import cache_dir

    return cache_dir()


def has_matrices() -> bool:
    """Whether the device has cooperative matrices."""
    from vkback.device import Device
    from vkback.ops.cooperative_matrix import matrix_shapes

    with Device.open() as device:
        return bool(matrix_shapes(device.caps))


# -- the child: runs on a copy of the sources, which a fault may have been planted in

Record = tuple[int, str, tuple[Any, ...], str]
"""Number of a case in the quick set (tokens after the ops' cases), its line, the variants of its kernels, a digest of its plan."""


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def record_of(number: int, case: Case, ctx: LowerContext) -> Record:
    """How a case of an op is planned."""
    from vkback.errors import VkbackError
    from vkback.harness.cases import context_of
    from vkback.harness.runner import scheduled

    try:
        dispatches = list(scheduled(case.build(), context_of(case, ctx)).dispatches())
    except VkbackError as e:
        return number, case.line, (), digest(str(e))
    return number, case.line, tuple(dict.fromkeys(d.kernel for d in dispatches)), digest(dispatches)


def write_plans(path: Path, part: int, parts: int) -> None:
    """How every parts-th case is planned, and by the first process how the tokens are."""
    from vkback.device import Device
    from vkback.harness import token_cases
    from vkback.harness.cases import quick_cases
    from vkback.models.registry import Model
    from vkback.ops.lowering import LowerContext
    from vkback.paths import builtin_model
    from vkback.tuning.lookup import Tuning

    records: list[Record] = []
    with Device.open() as device:
        ctx = LowerContext(device.caps, Tuning.for_device(device.caps))
        cases = list(quick_cases())
        records += [record_of(i, cases[i], ctx) for i in range(part, len(cases), parts)]
        for i, token in enumerate(token_cases.CASES if part == 0 else ()):
            schedule = token_cases.planned(token, Model.open(builtin_model(token.model)), device)
            variants = tuple(dict.fromkeys(d.kernel for d in schedule.dispatches()))
            records.append((len(cases) + i, token.line, variants, digest(schedule)))
    path.write_bytes(pickle.dumps(records))


def features(record: Record, types: bool) -> frozenset[object]:
    """What sets a case apart: op and names of its parameters, source and each define of its kernels; without `types` no weight type."""
    named = {(v.source, *define) for v in record[2] for define in v.defines if types or define[0] not in TYPE_DEFINES}
    return frozenset({*re.findall(r"[A-Z_0-9]+(?=\()|\w+(?==)", record[1]), *(v.source for v in record[2]), *named})


def newest_first(records: Iterable[Record], types: bool) -> Iterator[Record]:
    """Each time the case with the most features that no case before it had: few cases go through most of what kernels can be.

    A case's number of new features only falls, so that one whose number still holds when it comes to the top is the best there is.
    """
    own = {r[0]: features(r, types) for r in records}
    by_number = {r[0]: r for r in records}
    seen: set[object] = set()
    heap = [(-len(found), number) for number, found in own.items()]
    heapify(heap)
    while heap:
        count, number = heappop(heap)
        now = -len(own[number] - seen)
        if now != count:
            heappush(heap, (now, number))
            continue
        seen |= own[number]
        yield by_number[number]


class Reached:
    """The cases that a fault in a shader can reach: a kernel includes the file, and its SPIR-V is another."""

    def __init__(self, file: str, original: ShaderLibrary, mutated: ShaderLibrary) -> None:
        self._file, self._original, self._mutated = file, original, mutated
        self._known: dict[Variant, bool] = {}
        self._includes: dict[str, list[tuple[str, str]]] = {}

    def includes(self, record: Record) -> bool:
        """Whether a kernel of the case includes the file, perhaps where its defines leave it out."""
        return any(self._file in self._files(v) for v in record[2])

    def differing(self, records: Iterable[Record]) -> Iterator[Record]:
        """Cases of which a kernel is another. A compiler's start costs as much as several shaders, so some cases compile at once."""
        left = iter(records)
        while some := list(islice(left, AT_ONCE)):
            new = {v for r in some for v in r[2] if v not in self._known}
            touched = [v for v in new if self._file in self._files(v)]
            mutated, original = self._mutated.compile_many(touched), self._original.compile_many(touched)
            self._known |= dict.fromkeys(new, False) | {v: mutated[v] != original[v] for v in touched}
            yield from (r for r in some if any(self._known[v] for v in r[2]))

    def _files(self, variant: Variant) -> set[str]:
        defines = {name: str(value).strip('"') for name, value in variant.defines}
        found: set[str] = set()
        todo = [variant.source]
        while todo:
            name = todo.pop()
            if name and name not in found:
                found.add(name)
                todo += [path or defines.get(macro, "") for path, macro in self._included_by(name)]
        return found

    def _included_by(self, name: str) -> list[tuple[str, str]]:
        """(path, "") or ("", macro) of each include of a file; of one made at run time none."""
        if name not in self._includes:
            path = self._original.root / name
            self._includes[name] = INCLUDE.findall(path.read_text(encoding="utf-8")) if path.is_file() else []
        return self._includes[name]


def run_one(file: str, plans: Path, shaders: Path, cache: Path) -> Fate:
    """The fault in `file` of this copy against the cases that it can reach."""
    from vkback.device import Device
    from vkback.harness.cases import quick_cases
    from vkback.ops.lowering import LowerContext
    from vkback.shader import ShaderLibrary
    from vkback.tuning.lookup import Tuning

    records: list[Record] = pickle.loads(plans.read_bytes())
    cases = list(quick_cases())
    ops, tokens = [r for r in records if r[0] < len(cases)], [r for r in records if r[0] >= len(cases)]
    in_shader = file.startswith("shaders/")
    with Device.open() as device:
        if device.caps.software:  # as in the tests, whose modules are in the user's cache
            ShaderLibrary.quick = True
        # SPIR-V is compared with SPIR-V of the same compiler, so none that comes with vkback.
        library = ShaderLibrary(shipped=False) if in_shader else ShaderLibrary(cache_dir=cache)
        ctx = LowerContext(device.caps, Tuning.for_device(device.caps))
        wanted: Iterator[Record] = iter(())
        if in_shader:
            reached = Reached(file.removeprefix("shaders/"), ShaderLibrary(shaders, cache, shipped=False), library)
            wanted = reached.differing(newest_first([r for r in ops if reached.includes(r)], "/quant/" in file))
            tokens = []  # their kernels are those of the ops
        elif file.startswith("vkback/ops/"):
            wanted = (r for r in newest_first(ops, False) if record_of(r[0], cases[r[0]], ctx)[3] != r[3])
        fate = run_cases(device, library, ctx, (cases[r[0]] for r in wanted))
        return fate if fate.by else run_tokens(device, library, tokens, fate.cases)


def run_cases(device: Device, library: ShaderLibrary, ctx: LowerContext, cases: Iterable[Case]) -> Fate:
    """Cases of ops until one fails."""
    from vkback.harness.runner import run_case

    ran = 0
    for case in cases:
        ran += 1
        try:
            outcome = run_case(device, library, case, ctx)
        except Exception as e:  # whatever goes wrong without the fault does not
            return Fate(case.line, f"{type(e).__name__}: {e}", ran)
        if not outcome.ok:
            return Fate(case.line, "; ".join(f"{name}: {v.text}" for name, v in outcome.verdicts.items() if not v.ok), ran)
    return Fate("", f"none of {ran} cases failed", ran)


def run_tokens(device: Device, library: ShaderLibrary, records: Sequence[Record], ran: int) -> Fate:
    """Tokens that are planned otherwise, or all where none is."""
    from vkback.errors import VkbackError
    from vkback.harness import token_cases
    from vkback.models.registry import Model
    from vkback.paths import builtin_model

    by_line = {case.line: case for case in token_cases.CASES}
    changed = []
    for record in records:
        case = by_line[record[1]]
        try:
            if digest(token_cases.planned(case, Model.open(builtin_model(case.model)), device)) != record[3]:
                changed.append(case)
        except VkbackError as e:
            return Fate(case.line, str(e), ran + 1)
    for case in changed or [by_line[r[1]] for r in records]:
        ran += 1
        try:
            verdict = token_cases.run(case, device, library)
        except VkbackError as e:
            return Fate(case.line, str(e), ran)
        if not verdict.ok:
            return Fate(case.line, verdict.text, ran)
    return Fate("", f"none of {ran} cases failed", ran)


# -- the command


def show(mutant: Mutant, fate: Fate) -> str:
    how = f"{fate.by}: {fate.error}" if fate.by else fate.error if fate.error.startswith(SKIPPED) else f"SURVIVED: {fate.error}"
    return f"{mutant.name:28} {mutant.file:38} {fate.seconds:5.1f} s {fate.cpu_s:5.1f} s  {' '.join(how.split())[:220]}"


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["--plans"]:
        write_plans(Path(args[1]), int(args[2]), int(args[3]))
        return 0
    if args[:1] == ["--one"]:
        fate = run_one(args[1], *map(Path, args[2:]))
        result = {"by": fate.by, "error": fate.error, "cases": fate.cases, "cpu_s": sum(os.times()[:4])}
        print("\n" + json.dumps(result), flush=True)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="show the faults, plant none")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, help="processes at once, default one a core")
    given = parser.parse_args(args)
    try:
        mutants = [m for m in load() if not given.names or m.name in given.names]
        if missing := set(given.names) - {m.name for m in mutants}:
            raise MutantError(f"no mutant is called {', '.join(sorted(missing))}; --list shows them")
        for mutant in mutants:
            mutant.planted()
        if given.list:
            print("\n".join(f"{m.name:28} {m.file:38} {m.models}" for m in mutants))
            return 0
        return run_all(mutants, given.j)
    except MutantError as e:
        print(f"mutants: error: {e}", file=sys.stderr)
        return 2


def run_all(mutants: Sequence[Mutant], processes: int) -> int:
    """Plant every fault; a line for each as it is known. 1 when one survives."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vkback-mutants-") as folder, ThreadPoolExecutor(processes) as pool:
        farm = Farm(Path(folder), processes)
        print(f"{len(mutants)} mutants, {processes} processes; plans of the quick suite in {time.monotonic() - begin:.0f} s", flush=True)
        print(f"{'mutant':28} {'file':38} {'clock':>7} {'CPU':>7}  caught by: error", flush=True)
        fates = []
        for mutant, fate in zip(mutants, pool.map(farm.fate, mutants), strict=True):
            print(show(mutant, fate), flush=True)
            fates.append(fate)
    skipped = sum(fate.error.startswith(SKIPPED) for fate in fates)
    survived = [m.name for m, fate in zip(mutants, fates, strict=True) if not fate.by and not fate.error.startswith(SKIPPED)]
    cpu_s = sum(fate.cpu_s for fate in fates)
    seconds = time.monotonic() - begin
    caught = len(mutants) - len(survived) - skipped
    print(f"{caught} of {len(mutants)} caught, {skipped} {SKIPPED}, in {seconds:.0f} s ({cpu_s:.0f} s of the processor)")
    if survived:
        print(f"survived: {', '.join(survived)}", file=sys.stderr)
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
