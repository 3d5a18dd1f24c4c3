"""The op suite: cases prepared by threads, kernels compiled ahead, each case run and judged, on one device or by several processes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from threading import Thread

from vkback.device import Device, Kernel
from vkback.device.errors import DeviceLost, OutOfDeviceMemory
from vkback.errors import VkbackError
from vkback.evaluate.judge import Verdict, ggml_limit, judge
from vkback.harness.cases import context_of, find_case
from vkback.harness.common import kernel_names
from vkback.harness.invariance import one_by_one, same_bits
from vkback.harness.result import CaseResult
from vkback.harness.runner import Array, Expected, Prepared, Workbench, expected, prepare, reference
from vkback.harness.unfused import unfused_tolerance
from vkback.ops.case import Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.paths import try_cache
from vkback.program.compile import Kernels
from vkback.shader import ShaderLibrary
from vkback.shader.compiler import stop_programs
from vkback.tuning.lookup import Tuning

AHEAD = 96
"""Cases prepared ahead of the one that runs: enough that the kernels of many compile at once."""

KEPT = 1000
"""Kernels that a long run keeps on its device: more than the cases prepared ahead have, and of a CPU driver's some 2 GB."""

CHUNK = 100
"""Most cases a process is given at once; near the end fewer, so that all finish together."""


@dataclass(frozen=True)
class Ready:
    """A case that only has to be run: its block, that of its unfused chain, the tokens one by one where
    a case is batch-invariant, what it must give, and the kernels on the way. seconds: for its
    values and plan, and for the reference."""

    case: Case
    problem: Problem
    fused: Prepared
    chain: Prepared | None
    alone: list[Prepared]
    expected: list[Expected]
    chain_tolerance: Tolerance | None
    kernels: list[Future[Kernel]]
    seconds: tuple[float, float]


@dataclass(frozen=True)
class Run:
    """A case that has run: its values and what came out."""

    result: CaseResult
    problem: Problem | None = None
    want: dict[str, Array] | None = None
    got: dict[str, Array] | None = None


class Suite:
    """Runs cases on one open device. A context manager.

    compile_threads  kernels compiled at once, default one a core
    kept             kernels kept on the device, about; None: all. Only for a device that has no recordings but the suite's own
    """

    def __init__(
        self, device: Device, library: ShaderLibrary, ctx: LowerContext, *, compile_threads: int | None = None, kept: int | None = None
    ) -> None:
        self.ctx = ctx
        self._kept = kept
        self._bench = Workbench(device, library)
        self._kernels = Kernels(device, library, compile_threads or os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(2)

    def __enter__(self) -> Suite:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._kernels.close()
        self._bench.close()

    def run(self, cases: Iterable[Case]) -> Iterator[CaseResult]:
        """Results in the order of the cases. Raises DeviceLost, naming the case, when the device stops."""
        waiting: deque[tuple[Case, Future[Ready]]] = deque()
        for case in cases:
            waiting.append((case, self._threads.submit(self._prepare, case)))
            if len(waiting) > AHEAD:
                yield self._first_of(waiting)
        while waiting:
            yield self._first_of(waiting)

    def _first_of(self, waiting: deque[tuple[Case, Future[Ready]]]) -> CaseResult:
        if self._kept is not None:
            self._kernels.trim(self._kept)
        return self._finish(*waiting.popleft()).result

    def run_one(self, case: Case) -> Run:
        """One case with its values, for a closer look."""
        return self._finish(case, self._threads.submit(self._prepare, case))

    def _prepare(self, case: Case) -> Ready:
        begun = time.perf_counter()
        problem = case.build()
        ctx = context_of(case, self.ctx)
        chain_nodes = OPS[case.op].unfused(problem.node)
        fused = prepare(problem, ctx)
        chain = prepare(problem, ctx, chain_nodes) if chain_nodes else None
        alone = [prepare(each, ctx) for each in one_by_one(problem)] if case.params.get("exact") else []
        kernels = self._kernels.start([d for each in (fused, chain, *alone[:1]) if each for d in each.schedule.dispatches()])
        second = unfused_tolerance(problem.node, chain_nodes, ctx) if chain else None
        planned = time.perf_counter()
        want = expected(problem, ctx)
        return Ready(case, problem, fused, chain, alone, want, second, kernels, (planned - begun, time.perf_counter() - planned))

    def _finish(self, case: Case, future: Future[Ready]) -> Run:
        try:
            ready = future.result()
            marks = [time.perf_counter()]
            for kernel in ready.kernels:
                kernel.result()
            marks.append(time.perf_counter())
            got = self._bench.run(ready.fused)
            plain = self._bench.run(ready.chain) if ready.chain else None
            single = [self._bench.run(each) for each in ready.alone]
            marks.append(time.perf_counter())
            verdicts = {e.name: e.verdict(got) for e in ready.expected if not e.label}
            result = judged(case, verdicts, ready.expected[0].tolerance)
            if own := {e.name: e.verdict(got) for e in ready.expected if e.label}:
                result = _both(result, judged(case, own, ready.expected[-1].tolerance))
            if single:
                result = _both(result, judged(case, same_bits(got, single), ready.expected[0].tolerance))
            if plain is not None and ready.chain_tolerance:
                against = {f"{name} against the unfused run": judge(got[name], plain[name], ready.chain_tolerance) for name in got}
                result = _both(result, judged(case, against, ready.chain_tolerance))
            whole = [e for e in reversed(ready.expected) if e.rows is None]
            want = {e.output: e.values for e in whole} or reference(ready.problem)
            spent = [b - a for a, b in pairwise([*marks, time.perf_counter()])]
            names = kernel_names(ready.fused.schedule)
            return Run(dataclasses.replace(result, seconds=(*ready.seconds, *spent), kernel=names), ready.problem, want, got)
        except DeviceLost as e:
            raise DeviceLost(f"{case.line}: {e}", call=e.call, result=e.result) from e
        except CaseLineError:  # no case at all, and so no failed one
            raise
        except (PlanError, OutOfDeviceMemory) as e:
            return Run(CaseResult(op=case.op, line=case.line, mode="test", supported=False, message=str(e)))
        except VkbackError as e:
            return Run(CaseResult(op=case.op, line=case.line, mode="test", passed=False, message=str(e), peer_limit=ggml_limit(case.op)))
        except Exception as e:  # a fault of one op's Python must not take the other cases with it
            return Run(CaseResult(op=case.op, line=case.line, mode="test", passed=False, message=f"[{case.op}] {type(e).__name__}: {e}"))


def judged(case: Case, verdicts: dict[str, Verdict], tolerance: Tolerance) -> CaseResult:
    """The result of a case from the verdicts on its outputs."""
    failed = "; ".join(f"{name}: {v.text}" for name, v in verdicts.items() if not v.ok)
    return CaseResult(
        op=case.op,
        line=case.line,
        mode="test",
        passed=not failed,
        message=f"[{case.op}] {failed}" if failed else "",
        detail="; ".join(f"{name}: {v.text}" for name, v in verdicts.items()),
        nmse=max((v.nmse for v in verdicts.values()), default=0.0),
        worst=max((v.worst for v in verdicts.values()), default=0.0),
        tolerance_nmse=tolerance.nmse,
        tolerance_worst=tolerance.worst,
        peer_limit=ggml_limit(case.op),
    )


def _both(first: CaseResult, second: CaseResult) -> CaseResult:
    """A result that fails where either does; figures are those of the first."""
    texts = [m for m in (first.message, second.message) if m]
    passed = bool(first.passed and second.passed)
    return dataclasses.replace(first, passed=passed, message="\n".join(texts), detail=f"{first.detail}; {second.detail}")


# -- several processes

END_S = 0.2
"""In which the folders of compilers that were stopped are removed."""

_worker: Suite | None = None


def _end_with(parent: Connection) -> None:
    """End this process when its parent closes its end of a pipe, or has died."""
    with suppress(EOFError, OSError):
        parent.recv()
    stop_programs()
    time.sleep(END_S)
    os._exit(1)


def _open_worker(device: str | int | None, act: str, compile_threads: int, parent: Connection) -> None:
    global _worker
    Thread(target=_end_with, args=(parent,), daemon=True).start()
    stack = ExitStack()
    opened = stack.enter_context(Device.open(device))
    ctx = LowerContext(opened.caps, Tuning.for_device(opened.caps), act)  # type: ignore[arg-type]
    _worker = stack.enter_context(Suite(opened, ShaderLibrary(quick=opened.caps.software), ctx, compile_threads=compile_threads, kept=KEPT))
    Finalize(_worker, stack.close, exitpriority=1)  # pipelines are kept for the next run when the device is closed


def _run_lines(lines: Sequence[str]) -> list[CaseResult]:
    assert _worker is not None
    return list(_worker.run(map(find_case, lines)))


BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Read when numpy is first imported."""


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Processes that are started meanwhile multiply in one thread each, unless the user says otherwise: as many threads a process as there
    are cores wait in loops for each other, and references take many times as long."""
    missing = [name for name in BLAS_THREADS if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "1"))
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def run_in_processes(
    lines: Sequence[str],
    processes: int,
    device: str | int | None,
    act: str,
    *,
    work: Callable[[Sequence[str]], list[CaseResult]] = _run_lines,
) -> Generator[CaseResult, None, None]:
    """Results in the order of the lines, by processes that open the device each for itself.

    A process that dies, or loses its device, makes its cases fail and ends the run. Where the iterator is closed early the processes end,
    whatever they do; Ctrl-C reaches this process alone. A cache that cannot be written is logged here, by none of them.
    """
    try_cache()
    pieces = list(chunks(lines, processes))
    # Processes share the cores: each compiles on its part, and multiplies on one.
    threads = max(1, (os.cpu_count() or 1) // processes)
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        stack.enter_context(one_blas_thread())
        parent, ours = spawn.Pipe(duplex=False)
        stack.enter_context(parent)
        stack.enter_context(ours)
        pool = stack.enter_context(
            ProcessPoolExecutor(processes, mp_context=spawn, initializer=_open_worker, initargs=(device, act, threads, parent))
        )
        try:
            # The terminal sends Ctrl-C to the whole process group: workers ignore it, and end when their pipe to this process does.
            with blocked_interrupts():
                futures = [pool.submit(work, chunk) for chunk in pieces]
            for i, (chunk, future) in enumerate(zip(pieces, futures, strict=True)):
                try:
                    yield from future.result()
                except (BrokenProcessPool, DeviceLost) as e:
                    for later in futures[i + 1 :]:
                        later.cancel()
                    reason = "the process that ran this case or one beside it died" if isinstance(e, BrokenProcessPool) else str(e)
                    for line in chunk:
                        yield CaseResult(op=line.partition("(")[0], line=line, mode="test", passed=False, message=reason)
                    return
        except BaseException:
            ours.close()
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def blocked_interrupts() -> Iterator[None]:
    """Child processes start with SIGINT blocked; a Ctrl-C that arrives meanwhile is delivered afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def chunks(lines: Sequence[str], processes: int) -> Iterator[Sequence[str]]:
    """Runs of at most CHUNK lines, shrinking to what is left for each process."""
    start = 0
    while start < len(lines):
        size = max(1, min(CHUNK, (len(lines) - start) // (2 * processes)))
        yield lines[start : start + size]
        start += size
