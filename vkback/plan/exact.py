"""Batch-invariant plans (`--exact`): a token's values have the same bits, however many tokens are processed together.

A value keeps its bits if the same operations make it in the same order. So nodes of several tokens run in the kernels of one token: tuning
tables are queried as for one token, and choices that exist only for one token, or only for many, are avoided.

- Products use the GEMV kernels, up to 16 tokens per read of the weights. Lanes, units per lane and the order in which their sums are
  added do not depend on the number of columns; experts are summed in the order of their choice.
- Attention has separate workgroups for each token. Where the rows of the cache are split depends on the token's position only.
- Delta nets and Mamba-2 scans go token by token: chunks of tokens add in another order.
- Norm, RoPE and store are separate stages for one token, too: in a GEMV's prologue a norm rounds differently, and attention that stores
  its own row adds it in another order.
- A program that makes no logits is fused as if it made them: `without_logits`.
- All stages have barriers: a spin-wait takes one float from the values that may be stored (shaders/common/sentinel.glsl).
- No driver may fuse or reorder arithmetic, which it might do differently in each variant of a kernel (vkback/shader/contraction.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vkback.graph import Graph
from vkback.ops.dispatch import Dispatch
from vkback.ops.family import Choice, Chooser
from vkback.ops.lowering import LowerContext

TOKEN_KEYS = ("n", "rows")
"""Match keys that count tokens, or rows of all tokens."""

STAGES: Mapping[str, Mapping[str, Any]] = {
    "schedule": {"norm": "stage", "rope": "stage", "router": "stage", "sync": "barrier"},
    "gemm": {"kernel": "gemv"},
    "attention": {"kernel": "decode"},
    "delta_net": {"kernel": "scan"},
    "ssm_scan": {"kernel": "scan"},
}
"""Parameters that stay the same for any number of tokens, whatever the tables say."""


@dataclass(frozen=True)
class OneToken:
    """Tuning tables that are queried as for one token."""

    tables: Chooser

    def pick(self, family: str, **query: Any) -> Choice:
        asked = query | {key: 1 for key in TOKEN_KEYS if key in query}
        choice = self.tables.pick(family, **asked)
        return Choice({**choice.params, **STAGES[family]}, f"--exact, {choice.source}") if family in STAGES else choice


def exact_context(ctx: LowerContext) -> LowerContext:
    """The context for batch-invariant plans."""
    return dataclasses.replace(ctx, tuning=OneToken(ctx.tuning), exact=True)


def without_logits(graph: Graph) -> Graph:
    """A graph that makes logits, for a program that only fills the caches. It is fused as it is, and what nobody reads is removed
    afterwards. If the last layer's queries were removed before, other kernels would norm, rotate and store its keys."""
    return dataclasses.replace(graph, outputs=())


def arithmetic_as_written(dispatches: Sequence[Dispatch]) -> list[Dispatch]:
    """The same kernels, with arithmetic that no driver fuses or reorders."""
    return [dataclasses.replace(d, kernel=dataclasses.replace(d.kernel, as_written=True)) for d in dispatches]
