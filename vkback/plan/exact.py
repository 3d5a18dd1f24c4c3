"""Batch-invariant plans (`--exact`): a token's values have the same bits, however many tokens go through at once.

A value keeps its bits where the same operations make it in the same order. So every node of several tokens runs in the kernels of one
token: the tables are asked as for one, and what they have for one token alone, or for many, is left out.

- Products go through the mat-vec kernels, up to 16 tokens to a read of the weights. Lanes, units of a lane and the order in which their
  sums are added do not depend on the number of columns; experts are summed in the order of their choice.
- Attention has workgroups of its own for each token. Where the rows of the cache are split depends on the token's position.
- Norm, RoPE and store are stages of their own also for one token: in a mat-vec's prologue a norm rounds otherwise, and attention that
  stores its own row adds it in another order.
- A program that makes no logits is fused as if it made them: `without_logits`.
- All stages have barriers: a spin-wait takes one float from the values that may be stored (shaders/common/sentinel.glsl).
- No driver may fuse or reorder arithmetic, which it might do otherwise in each variant of a kernel (vkback/shader/contraction.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vkback.graph import Graph
from vkback.ops.base import Choice, Chooser, Dispatch, LowerContext

TOKEN_KEYS = ("n", "rows")
"""Match keys that count tokens, or rows of all tokens."""

STAGES: Mapping[str, Mapping[str, Any]] = {
    "schedule": {"norm": "stage", "rope": "stage", "router": "stage", "sync": "barrier"},
    "mat_mul": {"kernel": "mat_vec"},
    "attention": {"way": "decode"},
}
"""Parameters that are the same for any number of tokens, whatever the tables say."""


@dataclass(frozen=True)
class OneToken:
    """Tables that are asked as for one token."""

    tables: Chooser

    def pick(self, family: str, **query: Any) -> Choice:
        asked = query | {key: 1 for key in TOKEN_KEYS if key in query}
        choice = self.tables.pick(family, **asked)
        return Choice({**choice.params, **STAGES[family]}, f"--exact, {choice.source}") if family in STAGES else choice


def exact_context(ctx: LowerContext) -> LowerContext:
    """The same for batch-invariant plans."""
    return dataclasses.replace(ctx, tuning=OneToken(ctx.tuning), exact=True)


def without_logits(graph: Graph) -> Graph:
    """A graph that makes logits, for a program that only fills the caches. It is fused as it stands, and what nobody reads is left out
    behind that. Where the last layer's queries are left out before, its keys are normed, turned and stored by other kernels."""
    return dataclasses.replace(graph, outputs=())


def arithmetic_as_written(dispatches: Sequence[Dispatch]) -> list[Dispatch]:
    """The same kernels, with arithmetic that no driver fuses or reorders."""
    return [dataclasses.replace(d, kernel=dataclasses.replace(d.kernel, as_written=True)) for d in dispatches]
