"""Ops of many tokens tuned in chains of their own launches: a trial on the device, and rows by numbers of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from vkback.autotune.gemv_rows import edges
from vkback.autotune.search import RELATIVE_NOISE
from vkback.autotune.tunable import Setting, TuneResult
from vkback.device import Device
from vkback.evaluate.judge import judge
from vkback.graph import Node
from vkback.ops.case import Array
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary
from vkback.timing.launches import WARM_S, Bench, Measurement
from vkback.tuning.lookup import Tuning
from vkback.tuning.row import Row
from vkback.tuning.table import row_lines

SOFTWARE_LAUNCHES = 2


class TokenSetting(Setting, Protocol):
    """A setting, some of whose parameters may have no effect."""

    @property
    def params(self) -> Mapping[str, Any]:
        """What a row says: the parameters that have an effect."""


P = TypeVar("P", bound=TokenSetting)


class ChainTrial(Generic[P]):
    """A node in a chain of launches. seen: its tokens that are compared; want: the reference's first output for them."""

    def __init__(self, bench: Bench, ctx: LowerContext, seen: npt.NDArray[np.intp], want: Array) -> None:
        self.bench, self.ctx, self._seen, self._want = bench, ctx, seen, want

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.bench.__exit__()

    @property
    def node(self) -> Node:
        return self.bench.problem.node

    def with_point(self, point: P) -> LowerContext:
        """The context that leads to a point."""
        raise NotImplementedError

    def compile(self, points: Iterable[P]) -> None:
        """Kernels of points that are not refused."""
        raise NotImplementedError

    def wrong(self, point: P) -> str:
        got = self.bench.outputs(self.with_point(point))[self.node.outputs[0].name]
        if not np.isfinite(got).all():
            return f"{int((~np.isfinite(got)).sum())} of {got.size} values are not finite"
        verdict = judge(got[self._seen], self._want, OPS[self.node.op].tolerance(self.node, self.ctx))
        return "" if verdict.ok else verdict.text

    def measure(self, point: P, repetitions: int) -> Measurement:
        return self.measured(point, True, repetitions)

    def throughput(self, point: P) -> float:
        return self.measured(point, False, 5).us

    def measured(self, point: P, chained: bool, repetitions: int) -> Measurement:
        launches = SOFTWARE_LAUNCHES if self.ctx.caps.software else None
        return self.bench.measure(self.with_point(point), chained=chained, launches=launches, repetitions=repetitions, warm_s=WARM_S)

    def nbytes(self, point: P) -> int:
        return sum(d.nbytes for d in OPS[self.node.op].lower(self.node, self.with_point(point)))


class ChainFamily(Generic[P]):
    """What the `Tunable`s of such ops share. families: the one family that they tune; least: the fewest tokens of a row."""

    families: ClassVar[tuple[str, ...]]
    least: ClassVar[int]
    relative_noise = RELATIVE_NOISE

    def __init__(self, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
        self.device, self.library, self.ctx = device, library, ctx

    def opened(self) -> AbstractContextManager[None]:
        return nullcontext()

    def learn(self, tables: Tuning) -> None:
        """Nothing: a chain of launches holds one op."""

    @classmethod
    def rows(cls, results: Sequence[TuneResult[P]], present: Sequence[Row], card: str) -> list[list[str]]:
        """From the journal alone, beside rows that choose no kernel (by hand, or about generation), which stay."""
        stays = [row_lines(r.family, r.match, r.set, r.measured) for r in present if "kernel" not in r.set]
        return stays + list(rows_by_tokens(cls.families[0], results, cls.least, card))


def rows_by_tokens(family: str, results: Sequence[TuneResult[P]], least: int, card: str) -> Iterator[list[str]]:
    """A row for each number of tokens, by its newest result, where that beat the shipped tables. least: the fewest tokens of a row."""
    forms: dict[str, dict[int, TuneResult[P]]] = {}
    for result in results:
        forms.setdefault(json.dumps(result.match), {})[result.sizes["n"]] = result
    for form in forms.values():
        ranges = edges(form)
        for n, result in form.items():
            if result.kept:
                low, high = ranges[n]
                was = f"was {result.latency_before:.2f} ({result.before.text}; {result.source}, noise {result.noise:.2f})"
                evidence = f"{result.date} {card}, {result.line}: latency {result.latency:.2f} us, {was}"
                tokens = {"min": max(least, low), "max": high}
                yield row_lines(family, {"n": tokens, **result.match}, result.after.params, evidence)
