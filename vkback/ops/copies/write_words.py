"""WRITE_WORDS (shaders/copy/write_words.comp): single words of a state on the device, by pairs of where and what.

    edits I32 [m, 2], target I32 of any shape -> target in place

A pair is the index of a word, counted through all axes, and its new value. A pair whose index is negative or behind the end writes nothing,
so that a recorded dispatch serves fewer edits than it has room for. The indices of one dispatch are distinct.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, moves_values, register


@register
class WriteWords(Op):
    """See the module's text."""

    name = "WRITE_WORDS"
    arithmetic = moves_values

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        edits, target = (np.array(i) for i in inputs)
        real = edits[(edits[:, 0] >= 0) & (edits[:, 0] < target.size)]
        target.reshape(-1)[real[:, 0]] = real[:, 1]
        return [target]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        edits, target = node.inputs
        if len(edits.shape) != 2 or edits.shape[1] != 2 or {edits.type, target.type} != {"I32"}:
            raise PlanError(f"[WRITE_WORDS] {node.name}: {edits} into {target}; expected pairs of I32, I32 [m, 2], into I32")
        pairs = edits.shape[0]
        args = (Arg(edits), Arg(target, "rw"))
        return [by_threads(node, ctx, "copy/write_words.comp", args, (pairs, target.elements), pairs, moved=12 * pairs)]

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "words are copied")

    def cases(self) -> Iterator[Case]:
        yield self.build_case(1, (1,), 1)
        yield self.build_case(64, (5, 36), 40)
        yield self.build_case(100, (100,), 100)
        yield self.build_case(300, (16, 300), 0)

    def full_cases(self) -> Iterator[Case]:
        for m in (1, 2, 33, 1000, 4096):
            for edited in (0, 1, m):
                yield self.build_case(m, (m, 7), edited)

    def perf_cases(self) -> Iterator[Case]:
        yield self.build_case(64, (64, 2048), 64)
        yield self.build_case(4096, (64, 2048), 4096)

    def build_case(self, m: int, shape: Shape, edited: int, seed: int = 1) -> Case:
        """edited: pairs that write; the others' indices lie outside."""

        def make(rng: np.random.Generator) -> Problem:
            words = int(np.prod(shape))
            if not 0 <= edited <= min(m, words):
                raise CaseLineError(f"WRITE_WORDS: edited={edited} of {m} pairs, {words} words; expected no more than either")
            edits = rng.integers(-(2**31), 2**31, (m, 2)).astype(np.int32)
            edits[:, 0] = rng.choice([-1, -(2**31), words, 2**31 - 1], m)
            edits[rng.permutation(m)[:edited], 0] = rng.permutation(words)[:edited]
            values: dict[str, Array] = {"edits": edits, "target": rng.integers(-(2**31), 2**31, shape).astype(np.int32)}
            tensors = tuple(Tensor(name, "I32", v.shape, "input") for name, v in values.items())
            return Problem(Node(self.name, tensors, tensors[1:]), values)

        return Case(self.name, {"m": m, "shape": shape, "edited": edited, "seed": seed}, make, seed)
