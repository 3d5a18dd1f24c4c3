"""GEMVs by what tuning tells apart: read from the text of a case or from a node, and built with made-up values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vkback.graph import Node
from vkback.ops.case import Problem
from vkback.ops.case_line import CaseLineError, parse_line
from vkback.ops.matmul.linear_cases import layout_params, linear_node, made_up
from vkback.ops.matmul.linear_node import FUSED_ROLES, Experts
from vkback.ops.op import OPS

LINEAR_ROLES = tuple(r for r in FUSED_ROLES if r not in ("logits", "selection_bias"))
"""Roles that tuning tells apart: a GEMV that chooses its experts counts as one that is given their ids."""

OPS_WITH_SHAPE = ("MUL_MAT", "MUL_MAT_ID", "LINEAR")


@dataclass(frozen=True)
class LinearProblem:
    """A GEMV by what tuning tells apart.

    m        weight rows (of one expert); with `glu` twice the output rows
    roles    further inputs, in the order of LINEAR_ROLES
    x        type of the activations: F32, or Q8_1 where their producer stores them so
    n_expert, n_used  how many experts there are and how many a token uses, with the role "ids"
    """

    quant: str
    m: int
    k: int
    n: int = 1
    roles: tuple[str, ...] = ()
    glu: bool = False
    out: str = "F32"
    x: str = "F32"
    n_expert: int = 0
    n_used: int = 0

    def __post_init__(self) -> None:
        if self.n_expert and not 1 <= self.n_used <= self.n_expert:
            raise CaseLineError(f"[case] {self.line}: a token uses {self.n_used} of {self.n_expert} experts; expected 1 to {self.n_expert}")

    @classmethod
    def of(cls, node: Node) -> LinearProblem:
        """The GEMV that a LINEAR node carries out, or a MUL_MAT or MUL_MAT_ID of a weight and its tokens."""
        by = dict(zip(node.params.get("roles", ("w", "x", "ids")), node.inputs, strict=False))
        w, x = by["w"], by["x"]
        if "logits" in by:
            by["ids"] = node.outputs[2]
        return cls(
            quant=w.type,
            m=w.shape[-2],
            k=w.shape[-1],
            n=x.shape[0],
            roles=tuple(r for r in LINEAR_ROLES if r in by),
            glu=bool(node.params.get("glu")),
            out=node.outputs[0].type,
            x=x.type,
            n_expert=w.shape[0] if "ids" in by else 0,
            n_used=by["ids"].shape[-1] if "ids" in by else 0,
        )

    @classmethod
    def parse(cls, text: str) -> LinearProblem:
        """From a case of MUL_MAT, MUL_MAT_ID or LINEAR, as MUL_MAT(type_a=q4_K,m=4096,n=1,k=14336), of one token where it does not say n.

        Keys that do not tell GEMVs apart (b, oai, gelu, how its values are made) have no effect; activations of F16 come as F32. Raises
        CaseLineError, also for operands that do not lie as a weight and its tokens do, and PlanError for rows of no whole blocks.
        """
        op, params = parse_line(text)
        if op not in OPS_WITH_SHAPE:
            raise CaseLineError(f"[case] {text}: expected one of {', '.join(OPS_WITH_SHAPE)}")
        if moved := layout_params(params):
            raise CaseLineError(f"[case] {text}: {moved[0]}: expected a weight of two axes times some tokens, as they lie")
        if str(params.get("type_b")).lower() == "f16":
            params = {**params, "type_b": "f32"}
        return cls.of(OPS[op].case(params).node())

    @property
    def experts(self) -> Experts:
        """Whose rows it takes, in the word of the tables."""
        return "none" if "ids" not in self.roles else "summed" if "expert_weights" in self.roles else "each"

    @property
    def line(self) -> str:
        """The case as the suite and `parse` read it."""
        parts: dict[str, Any] = {"type_a": self.quant, "m": self.m, "n": self.n, "k": self.k}
        if self.n_expert:
            parts |= {"n_mats": self.n_expert, "n_used": self.n_used}
        if self.roles:
            parts["fused"] = "+".join(self.roles)
        parts |= {"glu": 1} if self.glu else {}
        parts |= {"out": self.out} if self.out != "F32" else {}
        parts |= {"type_b": self.x.lower()} if self.x != "F32" else {}
        return f"LINEAR({','.join(f'{k}={v}' for k, v in parts.items())})"

    def with_x(self, type: str) -> LinearProblem:
        return replace(self, x=type)

    def node(self) -> Node:
        """A LINEAR node of it, its tensors named after their roles."""
        return linear_node(
            self.quant,
            self.m,
            self.k,
            self.n,
            self.roles,
            glu=self.glu,
            out=self.out,
            x_type=self.x,
            experts=self.n_expert,
            used=self.n_used,
        )

    def build(self, seed: int = 7) -> Problem:
        """The node with made-up values."""
        node = self.node()
        return Problem(node, made_up(node, np.random.default_rng(seed)))
