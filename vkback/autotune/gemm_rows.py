"""Rows of [[gemm]] that say what sweeps have found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from vkback.autotune.gemm_points import GemmPoint
from vkback.autotune.gemv_rows import Range, edges
from vkback.autotune.problem import LinearProblem
from vkback.autotune.tunable import TuneResult
from vkback.ops.matmul.gemm_problem import GemmKernel
from vkback.ops.matmul.gemv import MAX_COLUMNS
from vkback.timing.math_rate import MathRates
from vkback.tuning.table import row_lines

Result = TuneResult[GemmPoint]


def gemm_rows(results: Sequence[Result], card: str) -> list[list[str]]:
    """The lines of each row: one for each result that beat the shipped tables, for the sizes around its own. card: device and driver, for
    the evidence."""
    forms: dict[str, list[Result]] = {}
    for result in results:
        forms.setdefault(json.dumps(result.match, sort_keys=True), []).append(result)
    return [_lines(result, *ranges, card) for form in forms.values() for result, ranges in _cells(form) if result.kept]


def _cells(form: Sequence[Result]) -> Iterator[tuple[Result, tuple[Range, Range, Range]]]:
    """What a form has of each size, with the ranges of n, m and k that it speaks for: of k among all, of m among those of its k, of n among
    those of its weight, so that no two rows meet."""
    sizes = {(r.sizes["k"], r.sizes["m"], r.sizes["n"]): r for r in form}  # the newest of each
    ks = edges(k for k, _, _ in sizes)
    for (k, m, n), result in sorted(sizes.items()):
        ms = edges(other for at, other, _ in sizes if at == k)
        ns = edges(other for at, row, other in sizes if (at, row) == (k, m))
        yield result, (_tokens(result, ns[n]), ms[m], ks[k])


def _tokens(result: Result, ends: Range) -> Range:
    """Tokens that a row speaks for: from 2, since one token has GEMVs of its own. The GEMV kernels take MAX_COLUMNS at a time, so
    that their time rises by a whole pass beyond."""
    low, high = ends
    passes = -(-result.sizes["n"] // MAX_COLUMNS)
    return max(2, low), min(high, MAX_COLUMNS * passes) if result.after.kernel == "gemv" else high


def kernel_of(result: Result) -> GemmKernel:
    """How the kernel of a result multiplies."""
    kernel = result.after.kernel
    return kernel if kernel != "gemv" else "int_dot" if result.match["path"] == "int" else "f32"


def math_share(result: Result, rates: MathRates) -> float:
    """Operations a second of what a result came to over the device's math rate of its kernel."""
    return tflops(result, result.latency) / rates.of(kernel_of(result)).tflops


def tflops(result: Result, us: float) -> float:
    """10^12 operations a second of a result's product in a time."""
    p = LinearProblem.parse(result.line)
    return 2 * p.m * p.k * p.n * max(1, p.n_used) / us / 1e6


def _lines(result: Result, n: Range, m: Range, k: Range, card: str) -> list[str]:
    times = (
        f"latency {result.latency:.2f} us ({tflops(result, result.latency):.4g} TFLOPS), was {result.latency_before:.2f} "
        f"({result.before.text}; {result.source}, noise {result.noise:.2f})"
    )
    ranges = {name: {"min": low, "max": high} for name, (low, high) in (("n", n), ("m", m), ("k", k))}
    return row_lines("gemm", {**result.match, **ranges}, result.after.params, f"{result.date} {card}, {result.line}: {times}")
