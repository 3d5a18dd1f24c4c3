"""Delta nets of a prompt tuned in chains of launches: token by token or in chunks of tokens, and how a workgroup shares a head."""

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
from vkback.ops.recurrent.delta_chunks import ChunkShape
from vkback.ops.recurrent.delta_heads import Heads
from vkback.ops.recurrent.delta_net import DeltaNet, shape_for

DELTA_NET = DeltaNet()

PARAMETERS = {"scan": ("lanes", "rows", "per_thread"), "chunks": ("chunk", "rows", "tokens")}


class DeltaPoint(NamedTuple):
    """A setting of the parameters of [[delta_net]]; those of the other kernel are NO_EFFECT."""

    kernel: Literal["scan", "chunks"]
    rows: int
    lanes: int = NO_EFFECT
    per_thread: int = NO_EFFECT
    chunk: int = NO_EFFECT
    tokens: int = NO_EFFECT

    @property
    def text(self) -> str:
        if self.kernel == "scan":
            return f"scan, {self.lanes} lanes, {self.per_thread} of {self.rows} rows a thread"
        return f"chunks of {self.chunk} tokens, {self.rows} rows, {self.tokens} tokens a thread"

    @property
    def params(self) -> dict[str, Any]:
        """What a row says: the parameters that have an effect."""
        return {"kernel": self.kernel} | {name: getattr(self, name) for name in PARAMETERS[self.kernel]}


@dataclass(frozen=True)
class DeltaTask(RecurrenceTask):
    """A delta net of n tokens. tiled: which heads share keys."""

    heads: Heads
    tiled: bool = True

    @property
    def key(self) -> str:
        return json.dumps(["delta net", self.n, *dataclasses.astuple(self.heads), self.tiled])

    @property
    def line(self) -> str:
        h = self.heads
        return f"delta net of {self.n} tokens, {h.n} heads of {h.dim}, {h.n_group} of {h.key} for q and k"

    @property
    def match(self) -> dict[str, Any]:
        return {"n_head": self.heads.n, "dim": self.heads.dim, "key": self.heads.key}

    @property
    def case(self) -> Case:
        return DELTA_NET.build_case(self.n, self.heads.n, self.heads.dim, self.heads.key, self.heads.n_group, self.tiled)


def tasks_for(nodes: Iterable[Node], ctx: LowerContext) -> tuple[list[DeltaTask], list[str]]:
    """A task for each shape of delta net among the nodes of a prompt, and texts about those that are passed over."""
    found = (
        DeltaTask(n.outputs[0].shape[0], Heads.of(n.outputs[1], n.params), bool(n.params["tiled"])) for n in nodes if n.op == DELTA_NET.name
    )
    return worth_it(found, partial(passed_over, ctx=ctx))


def neighbours(point: DeltaPoint) -> Iterator[DeltaPoint]:
    """Points of the same kernel."""
    return differing(point, PARAMETERS[point.kernel], "delta_net")


GUESSES = (
    DeltaPoint("scan", 16, 8, 1),
    DeltaPoint("chunks", 32, chunk=32, tokens=2),
    DeltaPoint("chunks", 16, chunk=32, tokens=2),
    DeltaPoint("chunks", 16, chunk=16, tokens=1),
)


class DeltaNets(ChainFamily[DeltaTask, DeltaPoint]):
    """Delta nets of prompts as a `Tunable`."""

    journal = "delta net"
    families = ("delta_net",)
    least = MIN_TOKENS

    @classmethod
    def point(cls, values: Iterable[Any]) -> DeltaPoint:
        return DeltaPoint(*values)

    @classmethod
    def actual(cls, node: Node, ctx: LowerContext) -> DeltaPoint:
        shape = shape_for(node, ctx)[0]
        if isinstance(shape, ChunkShape):
            return DeltaPoint("chunks", shape.rows, chunk=shape.chunk, tokens=shape.tokens)
        return DeltaPoint("scan", shape.rows, shape.lanes, shape.per_thread)

    def guesses(self) -> Iterable[DeltaPoint]:
        return GUESSES

    def neighbours(self, point: DeltaPoint) -> Iterator[DeltaPoint]:
        return neighbours(point)
