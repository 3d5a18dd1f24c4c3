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
from vkback.harness.cases import context_of
from vkback.harness.result import CaseResult
from vkback.ops.case import Case, Problem
from vkback.ops.case_line import unseeded
from vkback.ops.ggml_words import tensor_type
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.linear_cases import LAYOUT_DEFAULTS, layout_params
from vkback.ops.matmul.linear_node import INT_QUANTS
from vkback.ops.op import OPS
from vkback.plan.cost.flops import main_kernel
from vkback.program.compile import Kernels
from vkback.quants import QUANTS
from vkback.shader import ShaderLibrary
from vkback.timing.dependent import DependentChain, DependentTiming
from vkback.timing.launches import COLD_BYTES, Bench, too_long
from vkback.timing.math_rate import MathRates

AHEAD = 2
"""Groups made ready ahead of the one that is timed; their weights stay in host memory until then."""

CPU_COLD_BYTES = 32 << 20
"""Weights in rotation on a CPU driver, whose kernels are bound by arithmetic: a figure within a minute is worth more than a cold cache."""


def with_tokens(node: Node, n: int) -> Node:
    """The same weights times the first n tokens of x."""
    w, *rest = node.inputs
    cut = [replace(t, shape=(n, *t.shape[1:])) for t in (*rest, *node.outputs)]
    return Node(node.op, (w, *cut[: len(rest)]), tuple(cut[len(rest) :]), node.params)


def groups(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Neighbours that share their weights, together."""

    def key(case: Case) -> str:
        same = {k: v for k, v in unseeded(case.params).items() if k != "n"}
        return f"{case.op} {same}" if OPS[case.op].shares_weights and not layout_params(case.params) else case.line

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
) -> Iterator[CaseResult]:
    """Results in the order of the cases. Of those that are GEMMs the math rate is measured once per kernel, before the first of them."""
    kernels = Kernels(device, library, os.cpu_count() or 1)
    rounds, math_rates = RoundTimes(device, library), MathRates(device, library)
    with ThreadPoolExecutor(1) as maker:
        waiting: deque[tuple[list[Case], Future[_Ready]]] = deque()
        try:
            for group in groups(cases):
                waiting.append((group, maker.submit(_make_ready, group, ctx, kernels)))
                if len(waiting) > AHEAD:
                    yield from _time_group(device, library, rounds, math_rates, *waiting.popleft(), ctx, read_rate_gb_s, repetitions)
            while waiting:
                yield from _time_group(device, library, rounds, math_rates, *waiting.popleft(), ctx, read_rate_gb_s, repetitions)
        finally:
            for _, future in waiting:
                future.cancel()
            kernels.close()


ROUND_PARAMS = frozenset({"type_a", "type_b", "n_mats", "n_used", "b", "m", "n", "k", "amax", "seed", *LAYOUT_DEFAULTS})
"""A GEMV with others has a batch, a view, a route or a path of its own, which rounds do not have."""


def has_rounds(case: Case, ctx: LowerContext) -> bool:
    """Whether the GEMV of a case can be one of a dependent chain, and the tables make its stages barrier-free."""
    p = case.params
    usual = set(p) <= ROUND_PARAMS and not layout_params(p) and p.get("amax", 1.0) == 1.0 and not p.get("m_v")
    if not OPS[case.op].shares_weights or not usual or p.get("n") != 1 or tensor_type(p["type_a"]) not in INT_QUANTS:
        return False
    fits = p["m"] % max(32, QUANTS[tensor_type(p["type_a"])].block_values) == 0  # rounded to Q8_1, columns of the next GEMV
    return bool(fits and ctx.tuning.pick("schedule", n=1, n_expert=p.get("n_mats", 0))["sync"] == "sentinel")


class RoundTimes:
    """Times of rounds of dependent GEMVs. One round serves both of its GEMVs, so that each round is timed once."""

    def __init__(self, device: Device, library: ShaderLibrary) -> None:
        self._device, self._library = device, library
        self._known: dict[tuple[object, ...], tuple[DependentTiming, int]] = {}

    def of(self, case: Case, ctx: LowerContext) -> tuple[DependentTiming, int]:
        """The round that a case's GEMV is one of, and how many there are in it. Raises PlanError where the others cannot run here."""
        p = case.params
        m, k, experts, used = p["m"], p["k"], p.get("n_mats", 0), p.get("n_used", 0)
        if not experts:
            m, k = max(m, k), min(m, k)  # the same two GEMVs; the norm is where x is short, as in a feed-forward block
        quant = tensor_type(p["type_a"])
        key = (quant, m, k, experts, used, ctx.act)
        if key not in self._known:
            with DependentChain(self._device, self._library, quant, m, k, experts=experts, used=used) as chain:
                self._known[key] = chain.time(ctx), len(chain.nbytes)
        return self._known[key]


def with_barrier_free(rounds: RoundTimes, case: Case, ctx: LowerContext, result: CaseResult) -> CaseResult:
    """A timed case with the time of its GEMV in barrier-free rounds, if there are such; failed where these compute something else than
    with barriers."""
    if not has_rounds(case, ctx):
        return result
    try:
        found, gemvs = rounds.of(case, ctx)
    except PlanError:  # the GEMVs around it cannot run here
        return result
    except VkbackError as e:
        return replace(result, passed=False, message=str(e))
    if found.wrong:
        cure = "vkback doctor looks for the setting that cures it"
        return replace(result, passed=False, message=f"[perf] {case.line}: barrier-free among its neighbours: {found.wrong}; {cure}")
    return replace(result, barrier_free_us=found.barrier_free.us / gemvs) if found.barrier_free else result


def _time_group(
    device: Device,
    library: ShaderLibrary,
    rounds: RoundTimes,
    math_rates: MathRates,
    group: list[Case],
    future: Future[_Ready],
    ctx: LowerContext,
    rate: float,
    repetitions: int,
) -> Iterator[CaseResult]:
    try:
        ready = future.result()
        cold = CPU_COLD_BYTES if device.caps.device_type == "cpu" else COLD_BYTES
        late = {case.line: too_long(OPS[node.op].lower(node, context_of(case, ctx)), ctx.caps) for case, node in ready.nodes}
        results = {
            line: CaseResult(op=group[0].op, line=line, mode="perf", supported=False, message=f"[perf] {why}")
            for line, why in late.items()
            if why
        }
        nodes = [(case, node) for case, node in ready.nodes if case.line not in results]
        if nodes:
            with Bench(device, library, ready.problem, ctx, cold_bytes=cold) as bench:
                for case, node in nodes:
                    results[case.line] = _timed(bench, case, node, context_of(case, ctx), rate, math_rates, repetitions)
        for case, _ in ready.nodes:
            result = results[case.line]
            yield with_barrier_free(rounds, case, context_of(case, ctx), result) if result.supported else result
    except PlanError as e:
        for case in group:
            yield CaseResult(op=case.op, line=case.line, mode="perf", supported=False, message=str(e))
    except VkbackError as e:
        for case in group:
            yield CaseResult(op=case.op, line=case.line, mode="perf", passed=False, message=str(e))


def _timed(bench: Bench, case: Case, node: Node, ctx: LowerContext, rate: float, math_rates: MathRates, repetitions: int) -> CaseResult:
    dispatches = OPS[node.op].lower(node, ctx)
    kernel = "; ".join(d.reason for d in dispatches)
    gemm_kernel = main_kernel(dispatches) if any(d.kernel.source.startswith("gemm/") for d in dispatches) else None
    math = math_rates.of(gemm_kernel) if gemm_kernel is not None else None
    t = bench.time(ctx, repetitions=repetitions, node=node)
    return CaseResult(
        op=case.op,
        line=case.line,
        mode="perf",
        time_us=t.throughput_us,
        spread_us=t.throughput_spread_us,
        latency_us=t.latency_us,
        latency_spread_us=t.latency_spread_us,
        samples_us=t.samples_us,
        nbytes=t.nbytes,
        flops=t.flops,
        n_runs=t.launches * repetitions,
        read_rate_gb_s=rate,
        math_way=gemm_kernel or "",
        math_rate_tflops=math.tflops if math else None,
        kernel=kernel,
    )
