"""A product's case has one builder: what tuning and explain read of a line is the node that the suite runs."""

from __future__ import annotations

import pytest

from vkback.autotune.problem import LinearProblem
from vkback.ops.case import Case
from vkback.ops.matmul.linear_node import FUSED_ROLES
from vkback.ops.op import OPS

CASES = [
    case
    for case in OPS["LINEAR"].cases()
    if not {"logits", "post_norm"} & set(case.params["fused"].split("+")) and "split" not in case.params
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.line)
def test_tuning_builds_the_node_of_the_suite(case: Case) -> None:
    """Apart from parameters that tuning does not tell apart: the kind of GLU, the choice of experts, whether a sum is stored."""
    problem = case.build()
    mine = LinearProblem.of(problem.node).node()
    assert (mine.inputs, mine.outputs, mine.params["roles"]) == (problem.node.inputs, problem.node.outputs, problem.node.params["roles"])
    assert list(mine.params["roles"][2:]) == [role for role in FUSED_ROLES if role in mine.params["roles"]]
