"""WRITE_WORDS: what is refused, and what its reference does with pairs that write nothing. The suite runs its cases on the device."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_paths import planned_for

from vkback.graph import Node, Tensor
from vkback.ops.case_line import CaseLineError
from vkback.ops.copies.write_words import WriteWords
from vkback.ops.lowering import PlanError


@pytest.mark.parametrize(
    ("edits", "target"),
    [
        (Tensor("edits", "I32", (5, 3), "input"), Tensor("t", "I32", (9,), "input")),
        (Tensor("edits", "I32", (10,), "input"), Tensor("t", "I32", (9,), "input")),
        (Tensor("edits", "I32", (5, 2), "input"), Tensor("t", "F32", (9,), "input")),
    ],
    ids=["triples", "a row", "floats"],
)
def test_other_than_pairs_into_words_is_refused(edits: Tensor, target: Tensor) -> None:
    with pytest.raises(PlanError, match=r"expected pairs of I32, I32 \[m, 2\], into I32"):
        WriteWords().lower(Node("WRITE_WORDS", (edits, target), (target,)), planned_for("nvidia_h200_linux"))


def test_pairs_outside_write_nothing() -> None:
    target = np.arange(6, dtype=np.int32).reshape(2, 3)
    edits = np.array([[-1, 70], [4, 71], [6, 72], [2**31 - 1, 73], [0, -74]], np.int32)
    (got,) = WriteWords().reference([edits, target], {})
    assert got.tolist() == [[-74, 1, 2], [3, 71, 5]]
    assert target[0, 0] == 0, "the input stays"


def test_a_case_cannot_edit_more_words_than_there_are() -> None:
    with pytest.raises(CaseLineError, match="edited=7 of 8 pairs, 6 words"):
        WriteWords().build_case(8, (6,), 7).build()
