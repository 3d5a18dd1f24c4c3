"""Attention of many tokens tuned in chains of its own launches: which kernel, and how it cuts queries and cache.

The cache is as full as after a prompt of so many tokens at a depth. Results are compared for tokens drawn all over the prompt. Size of the
cache and rows in use change the time, but hardly which point is best: rows say nothing of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from vkback.autotune.chain_trial import NO_EFFECT, ChainFamily, passed_over, worth_it
from vkback.device import Capabilities
from vkback.graph import Node
from vkback.ops.attention.choice import prompt_shape
from vkback.ops.attention.flash import DECODE_TOKENS
from vkback.ops.case import Array, Problem
from vkback.ops.cooperative_matrix import matrix_shape
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS

CHECKED_TOKENS = 48
"""Tokens whose results are compared: the first, the last, and others drawn at random, all heads of each."""


class PromptPoint(NamedTuple):
    """A setting of the parameters of [[attention]] for many tokens; for kernel "decode" the others have no effect."""

    kernel: Literal["decode", "plain", "matrix"]
    tile_q: int = NO_EFFECT
    tile_kv: int = NO_EFFECT
    warps: int = NO_EFFECT

    @property
    def text(self) -> str:
        return (
            self.kernel if self.kernel == "decode" else f"{self.kernel} {self.tile_q} queries x {self.tile_kv} rows, {self.warps} subgroups"
        )

    @property
    def params(self) -> dict[str, Any]:
        """What a row says: the parameters that have an effect."""
        return {"kernel": self.kernel} if self.kernel == "decode" else self._asdict()


@dataclass(frozen=True)
class PromptTask:
    """Attention of n tokens after `depth` others, by what the tables tell apart, and a window and sinks if the layer has them."""

    n: int
    n_head: int
    n_head_kv: int
    head_dim: int
    depth: int = 0
    window: int = 0
    sinks: bool = False

    @property
    def key(self) -> str:
        return json.dumps(["prompt attention", *dataclasses.astuple(self)])

    @property
    def line(self) -> str:
        return f"attention of {self.n} tokens, {self.n_head}/{self.n_head_kv} heads of {self.head_dim}, depth {self.depth}"

    @property
    def match(self) -> dict[str, Any]:
        return {"n_head": self.n_head, "n_head_kv": self.n_head_kv, "head_dim": self.head_dim}

    @property
    def sizes(self) -> dict[str, int]:
        return {"n": self.n}

    def build(self) -> Problem:
        """The node, the last n tokens of a full cache, with made-up values."""
        rows = self.depth + self.n
        case = OPS["FLASH_ATTN_EXT"].build_case(
            self.n_head, self.n_head_kv, self.head_dim, window=self.window, sinks=self.sinks, kv=rows, nb=self.n
        )
        return case.build()

    def node(self) -> Node:
        """The node alone; its values, which are many, are made once, in `build`."""
        small = dataclasses.replace(self, n=1, depth=0).build().node
        q, cache_k, cache_v, pos, *sinks = small.inputs
        caches = (dataclasses.replace(c, shape=(self.n_head_kv, self.depth + self.n, self.head_dim)) for c in (cache_k, cache_v))
        inputs = (dataclasses.replace(q, shape=(self.n, *q.shape[1:])), *caches, dataclasses.replace(pos, shape=(self.n,)), *sinks)
        (out,) = small.outputs
        return Node(small.op, inputs, (dataclasses.replace(out, shape=(self.n, *out.shape[1:])),), small.params)


def tasks_for(nodes: Iterable[Node], depth: int, ctx: LowerContext) -> tuple[list[PromptTask], list[str]]:
    """A task for each shape of attention among the nodes of a prompt, and texts about those that are passed over. Of layers that tables
    cannot tell apart one without a window, if there is one."""
    tasks: dict[str, PromptTask] = {}
    for node in nodes:
        if node.op != "FLASH_ATTN_EXT":
            continue
        (n, n_head, head_dim), n_head_kv = node.inputs[0].shape, node.inputs[1].shape[0]
        task = PromptTask(n, n_head, n_head_kv, head_dim, depth, int(node.params.get("window", 0)), len(node.inputs) > 4)
        known = tasks.get(json.dumps([task.match, task.sizes]))
        if known is None or known.window:
            tasks[json.dumps([task.match, task.sizes])] = task
    return worth_it(tasks.values(), lambda task: _passed_over(task, ctx))


def _passed_over(task: PromptTask, ctx: LowerContext) -> str:
    return f"up to {DECODE_TOKENS} tokens take the kernel of generation" if task.n <= DECODE_TOKENS else passed_over(task, ctx)


def axes(caps: Capabilities) -> dict[str, tuple[int, ...]]:
    """Values to try of each parameter. CPU drivers take long to compile large tiles."""
    if caps.software:
        return {"tile_q": (8, 16, 32), "tile_kv": (4, 8, 16), "warps": (1, 2)}
    return {"tile_q": (16, 32, 64, 128, 256), "tile_kv": (8, 16, 32, 64, 128), "warps": (1, 2, 4, 8)}


def neighbours(point: PromptPoint, caps: Capabilities) -> Iterator[PromptPoint]:
    """Points that differ in one parameter, and those where two change together or against each other."""
    if point.kernel == "decode":
        return
    for name, values in axes(caps).items():
        for value in values:
            changed: dict[str, Any] = {name: value}
            yield point._replace(**changed)
    yield point._replace(tile_q=2 * point.tile_q, warps=2 * point.warps)
    yield point._replace(tile_q=point.tile_q // 2, warps=max(1, point.warps // 2))
    for up, down in itertools.permutations(("tile_q", "tile_kv", "warps"), 2):
        yield point._replace(**{up: 2 * getattr(point, up), down: max(1, getattr(point, down) // 2)})


def guesses(caps: Capabilities) -> Iterator[PromptPoint]:
    """Points of each kernel that have won somewhere."""
    yield PromptPoint("decode")
    if caps.software:
        yield from (PromptPoint("plain", 16, 8, 1), PromptPoint("plain", 8, 4, 1))
        if matrix_shape(caps) is not None:
            yield PromptPoint("matrix", 16, 8, 2)
        return
    if matrix_shape(caps) is not None:
        yield from (PromptPoint("matrix", q, kv, warps) for q, kv, warps in ((64, 64, 4), (64, 32, 4), (32, 32, 2), (128, 64, 8)))
    yield from (PromptPoint("plain", q, kv, 4) for q, kv in ((64, 16), (64, 32), (32, 16)))


class PromptAttention(ChainFamily[PromptTask, PromptPoint]):
    """Attention of prompts as a `Tunable`."""

    journal = "prompt attention"
    families = ("attention",)
    least = DECODE_TOKENS + 1

    @classmethod
    def point(cls, values: Iterable[Any]) -> PromptPoint:
        return PromptPoint(*values)

    @classmethod
    def actual(cls, node: Node, ctx: LowerContext) -> PromptPoint:
        shape = prompt_shape(node, ctx)
        return PromptPoint("decode") if shape is None else PromptPoint(shape.kernel, shape.tile_q, shape.tile_kv, shape.warps)

    def guesses(self) -> Iterable[PromptPoint]:
        return guesses(self.ctx.caps)

    def query(self, task: PromptTask) -> Mapping[str, Any]:
        return {**super().query(task), "n_ctx": task.depth + task.n}

    def neighbours(self, point: PromptPoint) -> Iterator[PromptPoint]:
        return neighbours(point, self.ctx.caps)

    def sample(self, problem: Problem) -> tuple[npt.NDArray[np.intp], Array]:
        return sample(problem)


def sample(problem: Problem) -> tuple[npt.NDArray[np.intp], Array]:
    """Some tokens, and the reference's output for them, float64."""
    node = problem.node
    n, rng = node.inputs[0].shape[0], np.random.default_rng(11)
    tokens = np.unique(np.concatenate([[0, n - 1], rng.choice(n, min(n, CHECKED_TOKENS), replace=False)]))
    inputs = [np.asarray(v, np.float64) if v.dtype.kind == "f" else v for v in (problem.values[t.name] for t in node.inputs)]
    cut = [inputs[0][tokens], *inputs[1:3], inputs[3][tokens], *inputs[4:]]
    (out,) = OPS[node.op].reference(cut, node.params)
    return tokens, out.reshape(len(tokens), -1)
