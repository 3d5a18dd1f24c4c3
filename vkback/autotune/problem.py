"""GEMVs by what tuning tells apart: read from the text of a case or from a node, and built with made-up values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.graph import Node
from vkback.ops.case import Problem
from vkback.ops.case_line import CaseLineError, parse_line
from vkback.ops.matmul.linear_cases import LAYOUT_DEFAULTS, layout_params, linear_node
from vkback.ops.matmul.linear_node import FUSED_ROLES, Experts

Array = npt.NDArray[Any]

LINEAR_ROLES = tuple(r for r in FUSED_ROLES if r != "logits")
"""Roles that tuning tells apart: a GEMV that chooses its experts counts as one that is given their ids."""

OPS_WITH_SHAPE = ("MUL_MAT", "MUL_MAT_ID", "LINEAR")

TYPES_OF_X = ("f32", "f16", "q8_1")
"""What type_b may be. A GEMV gets activations of F16 as F32."""

MADE_UP = ("amax", "gating", "norm_w", "ties", "seed")
"""Keys of a case that only say how its values are made."""

KEYS = ("type_a", "type_b", "m", "n", "k", "n_mats", "n_used", "b", "fused", "glu", "oai", "gelu", "out", *MADE_UP)


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
        """The GEMV that a LINEAR node carries out."""
        by = dict(zip(node.params["roles"], node.inputs, strict=True))
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
        """From MUL_MAT(type_a=q4_K,m=4096,n=1,k=14336), MUL_MAT_ID(... n_mats=128,n_used=8) or LINEAR(... fused=norm+bias,glu=1,out=Q8_1).

        Keys that do not tell GEMVs apart (b, oai, gelu, and those of MADE_UP) are passed over. Raises CaseLineError, also for operands
        that do not lie as a weight and its tokens do.
        """
        op, params = parse_line(text)
        if moved := layout_params(params):
            raise CaseLineError(f"[case] {text}: {moved[0]}: expected a weight of two axes times some tokens, as they lie")
        params = {key: value for key, value in params.items() if key not in LAYOUT_DEFAULTS}
        given = {key: str(value) for key, value in params.items()}
        wrong = [key for key in given if key not in KEYS]
        if op not in OPS_WITH_SHAPE:
            raise CaseLineError(f"[case] {text}: expected one of {', '.join(OPS_WITH_SHAPE)}")
        if wrong:
            raise CaseLineError(f"[case] {text}: unknown key {wrong[0]!r}, expected some of {', '.join(KEYS)}")
        missing = [key for key in ("type_a", "m", "k") if key not in given]
        if missing:
            raise CaseLineError(f"[case] {text}: {missing[0]} is missing; write it as {op}(type_a=q4_K,m=4096,n=1,k=14336)")
        quant = next((q for q in quants.QUANTS if q.lower() == given["type_a"].lower()), None)
        if quant is None:
            raise CaseLineError(f"[case] {text}: unknown type_a {given['type_a']!r}, expected one of {', '.join(quants.QUANTS)}")
        fused = tuple("ids" if r == "logits" else r for r in given.get("fused", "none").split("+") if r != "none")
        if op == "MUL_MAT_ID":
            fused = ("ids", *fused)
        unknown = [r for r in fused if r not in LINEAR_ROLES]
        if unknown:
            raise CaseLineError(f"[case] {text}: unknown fused input {unknown[0]!r}, expected some of {'+'.join(FUSED_ROLES)}")
        type_b = given.get("type_b", "f32").lower()
        if type_b not in TYPES_OF_X:
            raise CaseLineError(f"[case] {text}: type_b={given['type_b']}: expected one of {', '.join(TYPES_OF_X)}")

        def whole(key: str, otherwise: int) -> int:
            value = given.get(key, str(otherwise))
            if not value.isdigit() or (not int(value) and key != "glu"):
                raise CaseLineError(f"[case] {text}: {key} = {value!r}, expected a whole number above 0")
            return int(value)

        ids = "ids" in fused
        return cls(
            quant=quant,
            m=whole("m", 1),
            k=whole("k", 1),
            n=whole("n", 1),
            roles=tuple(r for r in LINEAR_ROLES if r in fused),
            glu=bool(whole("glu", 0)),
            out=given.get("out", "F32").upper(),
            x="Q8_1" if type_b == "q8_1" else "F32",
            n_expert=whole("n_mats", 6) if ids else 0,
            n_used=whole("n_used", 3) if ids else 0,
        )

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
        """The node with made-up values: weights of random blocks, activations uniform in -1..1, experts drawn without repeats."""
        rng = np.random.default_rng(seed)
        node = self.node()
        values: dict[str, Array] = {}
        for role, tensor in zip(node.params["roles"], node.inputs, strict=True):
            if role == "w":
                values[tensor.name] = quants.random_blocks(self.quant, prod(tensor.shape[:-1]), self.k, rng, std=0.5)
            elif role == "ids":
                values[tensor.name] = np.stack([rng.permutation(self.n_expert)[: self.n_used] for _ in range(self.n)]).astype(np.int32)
            else:
                value = rng.uniform(-1, 1, tensor.shape).astype(np.float32)
                values[tensor.name] = quants.q8_1_quantize(value.reshape(-1, self.k)) if tensor.type == "Q8_1" else value
        return Problem(node, values)
