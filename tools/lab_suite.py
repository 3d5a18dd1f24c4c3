"""The quick suite and the built-in models on drivers that execute, inside the lab's root: `tools/lab.py` calls it.

Cases run in slices, a process each, since a driver that compiles on the CPU keeps every kernel in memory. A slice without a line for
CASE_LIMIT seconds, or that ends early, is stopped, and those of its cases without a result run one by one, so that what hangs is named.
Every result is kept in a journal; a run that was stopped goes on where it ended, as long as the sources are the same.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

SLICE = 24
"""Cases of a process."""

CASE_LIMIT = 300.0
"""Seconds without a result after which a process is stopped."""

VERDICT = re.compile(r"^  ([A-Z0-9_]+\(.*\)): (OK|FAIL|not supported)(?: \[(.*)\])?$")

SECONDS = {"lavapipe": 0.3, "swiftshader": 0.4}
"""Of a case on two cores, for the estimate before the first one has run."""

LIST = "from vkback.harness.cases import quick_cases\nfor case in quick_cases(): print(case.line)"

Command = Callable[[Sequence[str]], list[str]]
"""Makes a command line that runs inside the root on the driver."""


def sources_digest(project: Path) -> str:
    """Of what results depend on: code, shaders and tables."""
    digest = hashlib.sha256()
    for folder in ("vkback", "shaders", "tuning"):
        for path in sorted((project / folder).rglob("*")):
            if path.suffix in (".py", ".comp", ".glsl", ".toml"):
                digest.update(f"{path.relative_to(project)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Result:
    """verdict: OK, FAIL, not supported or no result; note: why; sources: digest of the sources that it is about."""

    case: str
    verdict: str
    note: str
    sources: str

    @property
    def fine(self) -> bool:
        return self.verdict in ("OK", "not supported")


def read_journal(path: Path) -> dict[str, Result]:
    """The last result of each case; nothing where there is no journal. A line cut off by a stopped run is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            result = Result(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[result.case] = result
    return found


def run_slice(argv: Sequence[str], limit: float, on_result: Callable[[str, str, str], None]) -> str:
    """Run `vkback test-ops CASE...` and hand on each verdict as it is printed. -> why it ended early, "" where it did not."""
    lines: Queue[str | None] = Queue()
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace")
    errors: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    threads = [Thread(target=read), Thread(target=lambda: errors.extend(process.stderr or ()))]
    for thread in threads:
        thread.start()
    why, before = "", ""
    while True:
        try:
            line = lines.get(timeout=limit)
        except Empty:
            process.kill()
            why = f"no result in {limit:.0f} s"
            break
        if line is None:
            break
        if found := VERDICT.match(line.rstrip("\n")):
            case, verdict, note = found.groups()
            on_result(case, verdict, note or (before if verdict == "FAIL" else ""))
        before = line.strip()
    status = process.wait()
    for thread in threads:
        thread.join()
    if why or status in (0, 1):
        return why
    return f"ended with {status}: {errors[-1].strip() if errors else 'no message'}"


def listed_cases(command: Command) -> list[str]:
    done = subprocess.run(command(["python", "-c", LIST]), capture_output=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"cannot list the cases of the suite:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()


def run_suite(
    target: str,
    command: Command,
    journal: Path,
    sources: str,
    *,
    limit: float = CASE_LIMIT,
    stop_after: float | None = None,
    other_sources: bool = False,
    cases: Sequence[str] | None = None,
) -> list[Result | None]:
    """Results of all cases in their order, None for those that `stop_after` seconds did not reach.

    other_sources: results of other sources count, too
    """
    cases = cases if cases is not None else listed_cases(command)
    known = {c: r for c, r in read_journal(journal).items() if other_sources or r.sources == sources}
    missing = [c for c in cases if c not in known]
    begun, todo = time.monotonic(), len(missing)
    print(
        f"== {target}: {len(cases)} cases of the quick suite, {len(cases) - todo} in the journal; the rest take about "
        f"{minutes(todo * SECONDS.get(target, 1.0))} on two idle cores",
        flush=True,
    )
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as kept:

        def on_result(case: str, verdict: str, note: str) -> None:
            known[case] = Result(case, verdict, note, sources)
            kept.write(json.dumps(vars(known[case])) + "\n")
            kept.flush()
            if verdict == "FAIL":
                print(f"  {case}: FAIL: {note}", flush=True)

        def run(some: Sequence[str]) -> str:
            return run_slice(command(["vkback", "test-ops", *some]), limit, on_result)

        for at in range(0, todo, SLICE):
            some = missing[at : at + SLICE]
            if run(some):
                for case in [c for c in some if c not in known]:
                    why = run([case])
                    if case not in known:
                        print(f"  {case}: no result: {why}", flush=True)
                        on_result(case, "no result", why or "no line was printed for it")
            spent, done = time.monotonic() - begun, min(at + SLICE, todo)
            failed = sum(not r.fine for r in known.values())
            left = minutes(spent / done * (todo - done))
            print(f"  {done} of {todo} cases, {failed} failed, about {left} left", file=sys.stderr, flush=True)
            if stop_after is not None and spent > stop_after:
                break
    return [known.get(c) for c in cases]


def minutes(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds / 60:.0f} min" if seconds >= 60 else "1 min" if seconds > 0 else "0 min"


def summary(found: Iterable[tuple[str, Sequence[Result | None], bool | None]]) -> list[str]:
    """Markdown: a row a driver with its counts; then each reason for which cases are not supported, and each failure."""
    head = "| driver | cases | pass | fail | no result | not supported | not run | built-in models |"
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    rest: list[str] = []
    for target, results, models in found:
        counts = Counter("not run" if r is None else r.verdict for r in results)
        cells = [counts[v] for v in ("OK", "FAIL", "no result", "not supported", "not run")]
        text = "not run" if models is None else "as numpy" if models else "differ"
        lines.append(f"| {target} | {len(results)} | {' | '.join(map(str, cells))} | {text} |")
        reasons = Counter(r.note for r in results if r and r.verdict == "not supported")
        rest += [f"{target}: {count} not supported: {reason}" for reason, count in reasons.most_common()]
        rest += [f"{target}: {r.verdict}: {r.case}" for r in results if r and not r.fine]
    return [*lines, *rest]
