"""Mamba-2 scans of a prompt tuned in chains of launches: token by token or in chunks of tokens, and how a workgroup shares a head."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from vkback.autotune.chain_trial import NO_EFFECT, ChainFamily, differing, passed_over, worth_it
from vkback.autotune.recurrences import MIN_TOKENS, RecurrenceTask
from vkback.graph import Node
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext
from vkback.ops.recurrent.scan_chunks import ChunkShape
from vkback.ops.recurrent.scan_heads import Heads
from vkback.ops.recurrent.ssm_scan import SsmScan, shape_for

SSM_SCAN = SsmScan()

PARAMETERS = {"scan": ("lanes", "rows"), "chunks": ("chunk", "rows", "columns", "tokens")}


class ScanPoint(NamedTuple):
    """A setting of the parameters of [[ssm_scan]]; those of the other kernel are NO_EFFECT."""

    kernel: Literal["scan", "chunks"]
    rows: int
    lanes: int = NO_EFFECT
    chunk: int = NO_EFFECT
    tokens: int = NO_EFFECT
    columns: int = NO_EFFECT

    @property
    def text(self) -> str:
        if self.kernel == "scan":
            return f"scan, {self.lanes} lanes, {self.rows} rows"
        return f"chunks of {self.chunk} tokens, {self.rows} rows, {self.columns} columns, {self.tokens} tokens a thread"

    @property
    def params(self) -> dict[str, Any]:
        """What a row says: the parameters that have an effect."""
        return {"kernel": self.kernel} | {name: getattr(self, name) for name in PARAMETERS[self.kernel]}


@dataclass(frozen=True)
class ScanTask(RecurrenceTask):
    """A scan of n tokens."""

    heads: Heads

    @property
    def key(self) -> str:
        return json.dumps(["ssm scan", self.n, *dataclasses.astuple(self.heads)])

    @property
    def line(self) -> str:
        h = self.heads
        return f"scan of {self.n} tokens, {h.n} heads of {h.dim}, states of {h.d_state}, {h.n_group} groups"

    @property
    def match(self) -> dict[str, Any]:
        return {"n_head": self.heads.n, "head_dim": self.heads.dim, "d_state": self.heads.d_state}

    @property
    def case(self) -> Case:
        return SSM_SCAN.build_case(self.n, self.heads.n, self.heads.dim, self.heads.d_state, self.heads.n_group)


def tasks_for(nodes: Iterable[Node], ctx: LowerContext) -> tuple[list[ScanTask], list[str]]:
    """A task for each shape of scan among the nodes of a prompt, and texts about those that are passed over."""
    found = (ScanTask(n.outputs[0].shape[0], Heads.of(n.outputs[1], n.params)) for n in nodes if n.op == SSM_SCAN.name)
    return worth_it(found, partial(passed_over, ctx=ctx))


def neighbours(point: ScanPoint) -> Iterator[ScanPoint]:
    """Points of the same kernel."""
    return differing(point, PARAMETERS[point.kernel], "ssm_scan")


GUESSES = (
    ScanPoint("scan", 16, 8),
    ScanPoint("scan", 64, 1),
    ScanPoint("chunks", 64, chunk=64, tokens=4, columns=64),
    ScanPoint("chunks", 32, chunk=64, tokens=4, columns=64),
    ScanPoint("chunks", 32, chunk=32, tokens=4, columns=64),
)


class SsmScans(ChainFamily[ScanTask, ScanPoint]):
    """Mamba-2 scans of prompts as a `Tunable`."""

    journal = "ssm scan"
    families = ("ssm_scan",)
    least = MIN_TOKENS

    @classmethod
    def point(cls, values: Iterable[Any]) -> ScanPoint:
        return ScanPoint(*values)

    @classmethod
    def actual(cls, node: Node, ctx: LowerContext) -> ScanPoint:
        shape = shape_for(node, ctx)[0]
        if isinstance(shape, ChunkShape):
            return ScanPoint("chunks", shape.rows, chunk=shape.chunk, tokens=shape.tokens, columns=shape.columns)
        return ScanPoint("scan", shape.rows, shape.lanes)

    def guesses(self) -> Iterable[ScanPoint]:
        return GUESSES

    def neighbours(self, point: ScanPoint) -> Iterator[ScanPoint]:
        return neighbours(point)
