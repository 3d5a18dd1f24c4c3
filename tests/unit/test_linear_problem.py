"""A product's case has one builder: what tuning and explain read of a line is the node that the suite runs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vkback.autotune.problem import LinearProblem
from vkback.graph import Node, Tensor
from vkback.ops.case import Case
from vkback.ops.lowering import PlanError
from vkback.ops.matmul.linear_node import FUSED_ROLES, LinearNode, LinearParams
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


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            {"roles": ("w", "x"), "gleu": True},
            "LINEAR has no param 'gleu'; expected some of roles, glu, gelu, squared_relu, alpha, limit, eps, sum, row0",
        ),
        ({"roles": ("w", "x", "biases")}, "no input of LINEAR has the role 'biases'; expected some of w, x, norm"),
        ({"glu": True}, "lacks the param 'roles'"),
        ({"roles": ("w", "x", "norm")}, "LINEAR with inputs w, x, norm lacks the param 'eps'"),
        ({"roles": ("w", "x"), "rows_total": 64}, "lacks the param 'row0'"),
        ({"roles": ("w", "x", "logits"), "n_used": 2, "norm": True, "scale": 1.0}, "lacks the param 'gating'"),
    ],
)
def test_params_of_a_linear_are_read_by_name(params: dict[str, Any], said: str) -> None:
    """A misspelled param would change nothing, a missing one fail where it is needed, after other nodes were lowered."""
    inputs = tuple(Tensor(role, "F32", (64, 64)) for role in params.get("roles", ("w", "x")))
    node = Node("LINEAR", inputs, (Tensor("y", "F32", (1, 64)),), params)
    with pytest.raises(PlanError, match=re.escape(said)):
        LinearNode.of(node)


def test_params_of_a_linear_are_typed() -> None:
    of = LinearParams.of
    plain = of({"roles": ("w", "x")})
    assert (plain.activates, plain.clamp, plain.rows_total, plain.choice) == (False, {}, None, {})
    clamped = of({"roles": ("w", "x"), "glu": True, "alpha": 1.7, "limit": 7.0})
    assert (clamped.glu_op, clamped.clamp) == ("SWIGLU_OAI", {"alpha": 1.7, "limit": 7.0})
    assert [of({"roles": ("w", "x"), "glu": True, "gelu": gelu}).glu_op for gelu in (False, True)] == ["SWIGLU", "GEGLU"]
    choice = {"n_used": 2, "norm": True, "gating": "softmax", "scale": 1.5}
    assert of({"roles": ("w", "x", "logits"), **choice}).choice == choice
