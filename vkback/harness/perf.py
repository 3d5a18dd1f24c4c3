"""Perf mode: cases timed with cold weights, their kernels compiled and their weights made while others are timed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby

from vkback.device import Device
from vkback.errors import VkbackError
from vkback.graph import Node
from vkback.harness.case_line import unseeded
from vkback.harness.factories import context_of
from vkback.harness.result import Result
from vkback.harness.suite import Kernels
from vkback.harness.timing import COLD_BYTES, Bench
from vkback.ops.base import OPS, Case, LowerContext, PlanError, Problem
from vkback.shader import ShaderLibrary

AHEAD = 2
"""Groups made ready ahead of the one that is timed; their weights stay in host memory until then."""

CPU_COLD_BYTES = 32 << 20
"""Weights in rotation on a CPU driver, whose kernels are bound by arithmetic: a figure within a minute is worth more than a cold cache."""

SHARING = ("MUL_MAT", "MUL_MAT_ID")
"""Ops of which cases that differ in tokens alone use the same weights."""


def with_tokens(node: Node, n: int) -> Node:
    """A product of the first n tokens of x."""
    w, *rest = node.inputs
    cut = [replace(t, shape=(n, *t.shape[1:])) for t in (*rest, *node.outputs)]
    return Node(node.op, (w, *cut[: len(rest)]), tuple(cut[len(rest) :]), node.params)


def groups(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Neighbours that share their weights, together."""

    def key(case: Case) -> str:
        same = {k: v for k, v in unseeded(case.params).items() if k != "n"}
        return f"{case.op} {same}" if case.op in SHARING else case.line

    return (list(group) for _, group in groupby(cases, key))


@dataclass(frozen=True)
class _Ready:
    """A group's problem, that of most tokens, and each case with its node."""

    problem: Problem
    nodes: list[tuple[Case, Node]]


def _tokens(case: Case) -> int:
    return int(case.params["n"])


def _make_ready(group: list[Case], ctx: LowerContext, kernels: Kernels) -> _Ready:
    if len(group) == 1:
        problem = group[0].build()
        nodes = [(group[0], problem.node)]
    else:
        problem = max(group, key=_tokens).build()
        nodes = [(case, with_tokens(problem.node, _tokens(case))) for case in group]
    for case, node in nodes:
        kernels.start(OPS[node.op].lower(node, context_of(case, ctx)))
    return _Ready(problem, nodes)


def time_cases(
    device: Device, library: ShaderLibrary, cases: Iterable[Case], ctx: LowerContext, read_rate_gb_s: float, *, repetitions: int = 9
) -> Iterator[Result]:
    """Results in the order of the cases."""
    kernels = Kernels(device, library, os.cpu_count() or 1)
    with ThreadPoolExecutor(1) as maker:
        waiting: deque[tuple[list[Case], Future[_Ready]]] = deque()
        try:
            for group in groups(cases):
                waiting.append((group, maker.submit(_make_ready, group, ctx, kernels)))
                if len(waiting) > AHEAD:
                    yield from _time_group(device, library, *waiting.popleft(), ctx, read_rate_gb_s, repetitions)
            while waiting:
                yield from _time_group(device, library, *waiting.popleft(), ctx, read_rate_gb_s, repetitions)
        finally:
            for _, future in waiting:
                future.cancel()
            kernels.close()


def _time_group(
    device: Device, library: ShaderLibrary, group: list[Case], future: Future[_Ready], ctx: LowerContext, rate: float, repetitions: int
) -> Iterator[Result]:
    try:
        ready = future.result()
        cold = CPU_COLD_BYTES if device.caps.device_type == "cpu" else COLD_BYTES
        with Bench(device, library, ready.problem, ctx, cold_bytes=cold) as bench:
            for case, node in ready.nodes:
                here = context_of(case, ctx)
                kernel = "; ".join(d.reason for d in OPS[node.op].lower(node, here))
                t = bench.time(here, repetitions=repetitions, node=node)
                yield Result(
                    op=case.op, line=case.line, mode="perf", time_us=t.throughput_us, spread_us=t.throughput_spread_us,
                    latency_us=t.latency_us, latency_spread_us=t.latency_spread_us, samples_us=t.samples_us, nbytes=t.nbytes, flops=t.flops,
                    n_runs=t.launches * repetitions, read_rate_gb_s=rate, kernel=kernel,
                )  # fmt: skip
    except PlanError as e:
        for case in group:
            yield Result(op=case.op, line=case.line, mode="perf", supported=False, message=str(e))
    except VkbackError as e:
        for case in group:
            yield Result(op=case.op, line=case.line, mode="perf", passed=False, message=str(e))
