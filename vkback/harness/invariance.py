"""Batch invariance of one op: row i of a result of n rows has the bits of the result that row i gives alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from vkback.evaluate.judge import Verdict
from vkback.graph import Tensor
from vkback.ops.case import Array, Problem
from vkback.ops.lowering import PlanError

SAME = "rows as of one alone"
"""What such a verdict is about."""


def one_by_one(problem: Problem) -> list[Problem]:
    """A problem of n tokens as n problems of one: each input that the host writes has a row for every token, and so has the output.

    Raises PlanError for one that has no such rows.
    """
    node = problem.node
    n = node.outputs[0].shape[0]
    by_token = {t.name for t in node.inputs if t.kind == "input" and t.shape[0] == n}
    whole = {t.name for t in node.inputs if t.kind == "input"} - by_token
    if n < 2 or not by_token or whole or problem.parts or node.params.get("views"):
        raise PlanError(f"[{node.op}] exact=1: expected inputs with a row for each of several tokens")

    def one(t: Tensor) -> Tensor:
        return replace(t, shape=(1, *t.shape[1:]))

    inputs = tuple(one(t) if t.name in by_token else t for t in node.inputs)
    alone = replace(node, inputs=inputs, outputs=tuple(map(one, node.outputs)))

    def rows(name: str, i: int) -> Array:
        values = problem.values[name]
        return values[i : i + 1] if name in by_token else values

    return [Problem(alone, {name: rows(name, i) for name in problem.values}) for i in range(n)]


def same_bits(together: Mapping[str, Array], alone: Sequence[Mapping[str, Array]]) -> dict[str, Verdict]:
    """Whether the rows of each output are those of the single results."""
    found = {}
    for name, rows in together.items():
        single = np.concatenate([each[name] for each in alone])
        wrong = [i for i in range(len(rows)) if rows[i].tobytes() != single[i].tobytes()]
        text = "the same bits" if not wrong else f"other bits in rows {', '.join(map(str, wrong[:8]))} ({len(wrong)} of {len(rows)})"
        found[f"{name} {SAME}"] = Verdict(not wrong, 0.0, 0.0, text)
    return found
