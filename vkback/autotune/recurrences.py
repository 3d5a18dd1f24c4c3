"""What tasks of recurrences have in common, delta nets and Mamba-2 scans of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from vkback.graph import Node
from vkback.ops.case import Case, Problem

MIN_TOKENS = 17
"""Of a task: with fewer a recurrence runs in steps, whose states may be kept."""


@dataclass(frozen=True)
class RecurrenceTask:
    """A recurrence of n tokens."""

    n: int

    @property
    def sizes(self) -> dict[str, int]:
        return {"n": self.n}

    @property
    def case(self) -> Case:
        """The first n tokens of a text, so that a launch leaves no state to the next one."""
        raise NotImplementedError

    def build(self) -> Problem:
        return self.case.build()

    def node(self) -> Node:
        return self.case.node()
