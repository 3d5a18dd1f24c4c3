"""One case of MUL_MAT, MUL_MAT_ID or LINEAR from its parameters; vkback/ops/matmul/case_sets.py has the sets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any, Literal

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Shape
from vkback.ops.case_line import CaseLineError, call_with
from vkback.ops.ggml_words import one_of_types, type_word
from vkback.ops.glu import SWIGLU_OAI
from vkback.ops.matmul.linear_node import FUSED_ROLES, QUANTS, LinearParams, inputs_by_role, weight

Change = Callable[[Problem], Problem]

DEFAULT_EXPERTS = (6, 3)
"""Experts, and how many a token uses, where the line of a LINEAR does not say."""

UNSAID: dict[str, Any] = {"n": 1}
"""Parameters that a line of MUL_MAT and LINEAR need not have: one token."""

UNSAID_OF_EXPERTS: dict[str, Any] = {**UNSAID, "n_mats": DEFAULT_EXPERTS[0], "n_used": DEFAULT_EXPERTS[1]}
"""The same of MUL_MAT_ID."""

ROUTES = ("shuffled", "one", "last", "repeat")
"""Which experts the tokens of a case choose: any; all tokens the same; only the last ones, so that others are never chosen; one expert in
every slot of a token."""

MATRICES: dict[str, Any] = {"kernel": "coop_mat", "tile_m": 64, "tile_n": 16, "step_k": 32, "warp_m": 16, "warp_n": 16, "split_k": 1}
"""Tuning parameters that choose cooperative matrices, of any shape, where the device has them; else integer dot products or floats."""

REGISTERS: dict[str, Any] = {"kernel": "coop_reg", "tile_m": 16, "tile_n": 8, "warp_m": 8, "slice_k": 2}
"""The same with weights decoded in registers, where the order of rows is known."""

LAYOUT_DEFAULTS = {"bs": (1, 1), "nr": (1, 1), "per": (0, 1, 2, 3), "k_v": 0, "o": 1, "src_overlap": 0, "m_v": 0, "pad": 0}
"""Parameters of MUL_MAT and MUL_MAT_ID that say how operands lie in memory, with the values that GEMVs of models have."""


def layout_params(params: Mapping[str, Any]) -> list[str]:
    """Parameters that give the operands a non-default memory layout."""
    return [key for key, value in params.items() if value != {**LAYOUT_DEFAULTS, "plain": 0}.get(key, value)]


# -- parameters that all of them have


def _amended(case: Case, changes: list[Change], **shown: Any) -> Case:
    """A case whose problem goes through `changes`; `shown` joins its parameters."""

    def make(rng: np.random.Generator) -> Problem:
        problem = case.make(rng)
        for change in changes:
            problem = change(problem)
        return problem

    params = {k: v for k, v in {**case.params, **shown}.items() if k != "seed"} | {"seed": case.seed}
    return dataclasses.replace(case, params=params, make=make)


def _quantized_x(problem: Problem) -> Problem:
    """x as Q8_1 bytes: the reference then sees what the kernel sees."""
    node = problem.node
    x = node.inputs[1]
    data = quants.q8_1_quantize(problem.values[x.name].reshape(-1, x.shape[-1]))
    return Problem(_of_q8_1(node), {**problem.values, x.name: data})


def _of_q8_1(node: Node) -> Node:
    w, x, *rest = node.inputs
    return Node(node.op, (w, dataclasses.replace(x, type="Q8_1"), *rest), node.outputs, node.params)


def with_x(case: Case, type_b: str, act: str, changes: list[Change], **shown: Any) -> Case:
    """The case with x of a type and on a path, where they are not the usual ones; `changes` and `shown` as in `_amended`."""
    for name, value, known in (("type_b", type_b, ("f32", "f16", "q8_1")), ("act", act, ("auto", "f32", "f16", "q8_1"))):
        if value not in known:
            raise CaseLineError(f"{name}={value}: expected one of {', '.join(known)}")
    if type_b == "q8_1":
        changes = [_quantized_x, *changes]
        if plain := case.bare:
            case = dataclasses.replace(case, bare=lambda: _of_q8_1(plain()))
        shown["type_b"] = type_b
    if act != "auto":
        shown["act"] = act
    return _amended(case, changes, **shown) if shown else case


def _scaled(case: Case, amax: float) -> Case:
    """x from -amax to amax instead of -1 to 1."""

    def change(problem: Problem) -> Problem:
        x = problem.node.inputs[1].name
        return dataclasses.replace(problem, values={**problem.values, x: np.float32(amax) * problem.values[x]})

    return case if amax == 1.0 else _amended(case, [change], amax=amax)


def known_type(name: str) -> str:
    """The name of a weight type, given in any case. Raises CaseLineError, PlanError for a type that weights do not have here."""
    return one_of_types(name, QUANTS, "type_a")


# -- one case


def mul_mat_case(quant: str, m: int, n: int, k: int, *, type_b: str = "f32", act: str = "auto", amax: float = 1.0, seed: int = 7) -> Case:
    """MUL_MAT. type_b: "f32", or "q8_1" for activations that come quantized; amax: the largest of them."""

    def node() -> Node:
        w, x = weight("w", quant, (m, k)), Tensor("x", "F32", (n, k), "input")
        return Node("MUL_MAT", (w, x), (Tensor("y", "F32", (n, m)),))

    def make(rng: np.random.Generator) -> Problem:
        w = quants.random_blocks(quant, m, k, rng, std=0.5)
        return Problem(node(), {"w": w, "x": rng.uniform(-1, 1, (n, k)).astype(np.float32)})

    params = {"type_a": type_word(quant), "type_b": "f32", "m": m, "n": n, "k": k, **LAYOUT_DEFAULTS, "seed": seed}
    return with_x(_scaled(Case("MUL_MAT", params, make, seed, node), amax), type_b, act, [])


def mul_mat_id_case(
    quant: str,
    experts: int,
    used: int,
    m: int,
    n: int,
    k: int,
    *,
    shared: bool,
    type_b: str = "f32",
    ids: str = "shuffled",
    act: str = "auto",
    amax: float = 1.0,
    seed: int = 7,
) -> Case:
    """MUL_MAT_ID. shared: one x for all experts of a token; ids: one of ROUTES; type_b, amax as for MUL_MAT."""
    if ids not in ROUTES:
        raise CaseLineError(f"ids={ids}: expected one of {', '.join(ROUTES)}")

    x_shape = (n, 1 if shared else used, k)

    def node() -> Node:
        w, x = weight("w", quant, (experts, m, k)), Tensor("x", "F32", x_shape, "input")
        chosen = Tensor("ids", "I32", (n, used), "input")
        return Node("MUL_MAT_ID", (w, x, chosen), (Tensor("y", "F32", (n, used, m)),))

    def make(rng: np.random.Generator) -> Problem:
        return Problem(
            node(),
            {
                "w": quants.random_blocks(quant, experts * m, k, rng, std=0.5),
                "x": rng.uniform(-1, 1, x_shape).astype(np.float32),
                "ids": np.stack([rng.permutation(experts)[:used] for _ in range(n)]).astype(np.int32),
            },
        )

    def route(problem: Problem) -> Problem:
        chosen = problem.values["ids"].copy()
        if ids == "one":
            chosen[:] = chosen[0]
        elif ids == "last":
            chosen[:] = np.arange(experts - used, experts)
        elif ids == "repeat":
            chosen[:] = chosen[:, :1]
        return Problem(problem.node, {**problem.values, "ids": chosen})

    params = {"type_a": type_word(quant), "type_b": "f32", "n_mats": experts, "n_used": used, "b": shared, "m": m, "n": n, "k": k}
    params |= {"amax": 1.0, "m_v": 0, "seed": seed}
    case = _scaled(Case("MUL_MAT_ID", params, make, seed, node), amax)
    return with_x(case, type_b, act, [route], **({} if ids == "shuffled" else {"ids": ids}))


def linear_node(
    quant: str,
    m: int,
    k: int,
    n: int,
    roles: Collection[str],
    *,
    glu: bool = False,
    out: str = "F32",
    x_type: str = "F32",
    experts: int = 0,
    used: int = 0,
    params: Mapping[str, Any] | None = None,
) -> Node:
    """A LINEAR of n tokens by a weight of m rows (of one expert), tensors named after their roles; with "ids" or "logits" by `used` of so
    many experts. params: further ones; with `sum` it stores what the post-norm and its residual make of x. Raises
    QuantShapeError where k values are no whole blocks."""
    quants.row_bytes(quant, k)
    more = dict(params or {})
    routed, summed = not {"ids", "logits"}.isdisjoint(roles), "expert_weights" in roles
    w = weight("w", quant, (experts, m, k) if routed else (m, k))
    x = Tensor("x", x_type, (n, used if summed else 1, k) if routed else (n, k), "input")
    y = Tensor("y", out, (n, used, m >> glu) if routed and not summed else (n, m >> glu))
    extra = {
        **{role: Tensor(role, "F32", (k,), "weight") for role in ("norm", "norm_bias", "post_norm")},
        "post_residual": Tensor("post_residual", "F32", x.shape, "input"),
        "bias": Tensor("bias", "F32", (experts * m if routed else m,), "weight"),
        "multiplier": Tensor("multiplier", "F32", (1, 2 * y.elements) if more.get("multiplier_at") else y.shape, "input"),
        "residual": Tensor("residual", "F32", y.shape, "input"),
        "ids": Tensor("ids", "I32", (n, used), "input"),
        "logits": Tensor("logits", "F32", (n, experts), "input"),
        "expert_weights": Tensor("expert_weights", "F32", (n, used), "input"),
    }
    named = tuple(r for r in FUSED_ROLES if r in roles)
    outs = [y]
    if "logits" in roles:
        outs += [Tensor("weights", "F32", (n, used)), Tensor("ids", "I32", (n, used))]
    if more.get("sum"):
        outs.append(Tensor("sum", "F32", x.shape))
    return Node("LINEAR", (w, x, *(extra[r] for r in named)), tuple(outs), {"roles": ("w", "x", *named), "glu": glu, "eps": 1e-5, **more})


def made_up(node: Node, rng: np.random.Generator, *, first_expert: int = 0, ties: bool = False) -> dict[str, Array]:
    """Values of a LINEAR: weights of random blocks, all else uniform in -1..1, experts from `first_expert` on drawn without repeats,
    logits normal (whole numbers with `ties`), a Q8_1 x quantized."""
    by = inputs_by_role(node)
    w, x = by["w"], by["x"]
    values: dict[str, Array] = {w.name: quants.random_blocks(w.type, prod(w.shape[:-1]), w.shape[-1], rng, std=0.5)}
    for t in node.inputs[1:]:
        values[t.name] = rng.uniform(-1, 1, t.shape).astype(np.float32)
    if "ids" in by:
        n, used = by["ids"].shape
        values["ids"] = np.stack([rng.permutation(np.arange(first_expert, w.shape[0]))[:used] for _ in range(n)]).astype(np.int32)
    if "logits" in by:
        logits = 3 * rng.standard_normal(by["logits"].shape, np.float32)
        values["logits"] = np.round(logits) if ties else logits
    if x.type == "Q8_1":
        values[x.name] = quants.q8_1_quantize(values[x.name].reshape(-1, x.shape[-1]))
    return values


def fused_case(
    quant: str,
    m: int,
    k: int,
    n: int,
    roles: tuple[str, ...],
    *,
    glu: bool = False,
    oai: bool = False,
    gelu: bool = False,
    squared_relu: bool = False,
    softcap: float = 0.0,
    multiplier_at: int = 0,
    out: str = "F32",
    experts: int = 6,
    used: int = 3,
    gating: str = "softmax",
    norm_w: bool = True,
    ties: bool = False,
    split: Shape = (),
    type_b: str = "f32",
    act: str = "auto",
    seed: int = 7,
) -> Case:
    """LINEAR. type_b as of MUL_MAT. With ids: `experts` experts of which each token uses `used` (expert 0 is never chosen); oai: the GLU is
    SWIGLU_OAI, gelu: GEGLU, without GLU gelu is applied, or squared_relu; softcap: of what comes out, 0: none; multiplier_at: where the
    multiplier begins in twice as many values; with post_norm the sum behind it is a further output; with logits: gating and norm_w as
    TOPK_MOE's gating and norm, ties: the logits are whole numbers; split: rows of the nodes that share the output."""
    if type_b == "q8_1" and "norm" in roles:
        raise CaseLineError(f"type_b=q8_1 with fused={'+'.join(roles)}: a norm takes activations as they are; expected type_b=f32")
    choosing = "logits" in roles
    choice = {"gating": gating, "norm_w": norm_w, "ties": ties} if choosing else {}

    def node() -> Node:
        more: dict[str, Any] = dict(SWIGLU_OAI) if oai else {}
        more |= {name: True for name, there in (("gelu", gelu), ("squared_relu", squared_relu), ("sum", "post_norm" in roles)) if there}
        more |= {key: value for key, value in (("softcap", softcap), ("multiplier_at", multiplier_at)) if value}
        if choosing:
            more |= {"n_used": used, "norm": norm_w, "gating": gating, "scale": 1.5}
        return linear_node(quant, m, k, n, roles, glu=glu, out=out, experts=experts, used=used, params=more)

    def make(rng: np.random.Generator) -> Problem:
        whole = node()
        return Problem(whole, made_up(whole, rng, first_expert=1, ties=ties))

    params = {"type_a": quant, "m": m, "n": n, "k": k, "fused": "+".join(roles) or "none", "glu": glu, "out": out}
    activation = ({"oai": True} if oai else {}) | ({"gelu": True} if gelu else {}) | ({"softcap": softcap} if softcap else {})
    activation |= {"squared_relu": True} if squared_relu else {}
    activation |= {"multiplier_at": multiplier_at} if multiplier_at else {}
    case = Case("LINEAR", params | activation | choice | {"seed": seed}, make, seed, node)
    case = with_x(case, type_b, act, [], **({} if (experts, used) == DEFAULT_EXPERTS else {"n_mats": experts, "n_used": used}))
    return split_case(case, split) if split else case


def _rows_of(node: Node, row0: int, rows: int) -> Node:
    """The part of a LINEAR node that makes some rows of its output."""
    glu, total = int(LinearParams.of(node.params).glu), node.outputs[0].shape[-1]

    def cut(role: str, t: Tensor) -> Tensor:
        return dataclasses.replace(t, name=f"{t.name}.{row0}", shape=(rows << glu, *t.shape[1:])) if role in ("w", "bias") else t

    inputs = tuple(cut(role, t) for role, t in zip(node.params["roles"], node.inputs, strict=True))
    return Node("LINEAR", inputs, node.outputs, {**node.params, "row0": row0, "rows_total": total})


def split_case(case: Case, split: tuple[int, ...]) -> Case:
    """A LINEAR case without ids of which nodes make so many output rows each, all into one tensor."""

    def make(rng: np.random.Generator) -> Problem:
        whole = case.make(rng)
        node, glu = whole.node, int(LinearParams.of(whole.node.params).glu)
        parts, values, row0 = [], dict(whole.values), 0
        for rows in split:
            part = _rows_of(node, row0, rows)
            parts.append(part)
            for t, old in zip(part.inputs, node.inputs, strict=True):
                if t.name != old.name:
                    values[t.name] = whole.values[old.name][row0 << glu : (row0 + rows) << glu]
            row0 += rows
        if row0 != node.outputs[0].shape[-1]:
            raise CaseLineError(f"split={split}: expected parts of {node.outputs[0].shape[-1]} rows in all")
        return Problem(node, values, tuple(parts))

    params = {k: v for k, v in case.params.items() if k != "seed"} | {"split": split, "seed": case.seed}
    return dataclasses.replace(case, params=params, make=make)


SENTINEL_VALUE = np.array([0x80808080], np.uint32).view(np.float32)[0]
"""-1.18e-38, which no kernel of a barrier-free stage may store (shaders/common/sentinel.glsl)."""


def with_sentinels(case: Case) -> Case:
    """A case with a residual, whose outputs would be SENTINEL: x is zero, every third residual that number."""

    def change(problem: Problem) -> Problem:
        by = inputs_by_role(problem.node)
        residual = problem.values[by["residual"].name].copy()
        residual[..., ::3] = SENTINEL_VALUE
        values = {**problem.values, by["x"].name: np.zeros_like(problem.values[by["x"].name]), by["residual"].name: residual}
        return dataclasses.replace(problem, values=values)

    return _amended(case, [change], sentinels=True)


def fused_from(params: Mapping[str, Any]) -> Case:
    """The LINEAR of printed parameters; see `Op.case`."""

    def build(
        type_a: str,
        m: int,
        n: int,
        k: int,
        fused: str = "none",
        glu: bool = False,
        out: Literal["F32", "Q8_1", "f32", "q8_1"] = "F32",
        oai: bool = False,
        gelu: bool = False,
        squared_relu: bool = False,
        softcap: float = 0.0,
        multiplier_at: int = 0,
        gating: str = "softmax",
        norm_w: bool = True,
        ties: bool = False,
        split: Shape = (),
        n_mats: int = DEFAULT_EXPERTS[0],
        n_used: int = DEFAULT_EXPERTS[1],
        type_b: Literal["f32", "q8_1"] = "f32",
        act: str = "auto",
        sentinels: bool = False,
        seed: int = 7,
    ) -> Case:
        roles = () if fused == "none" else tuple(fused.split("+"))
        unknown = [r for r in roles if r not in FUSED_ROLES]
        if unknown:
            raise CaseLineError(f"fused={fused}: no input is called {unknown[0]}; expected some of {'+'.join(FUSED_ROLES)}, or none")
        if min(m, n, k) < 1 or not 1 <= n_used <= n_mats:
            raise CaseLineError(f"m={m}, n={n}, k={k}, n_mats={n_mats}, n_used={n_used}: expected sizes from 1, n_used up to n_mats")
        if not 0.0 <= softcap < math.inf or (softcap and (n > 1 or glu or gelu)):
            raise CaseLineError(f"softcap={softcap}: expected a number from 0, which is none, n=1 and neither glu nor gelu")
        if squared_relu and (n > 1 or glu or gelu or softcap):
            raise CaseLineError("squared_relu=1: expected n=1 and neither glu, gelu nor softcap")
        if multiplier_at and (n > 1 or "multiplier" not in roles or not 0 < multiplier_at <= m):
            raise CaseLineError(f"multiplier_at={multiplier_at}: expected fused=multiplier, n=1 and a number up to m={m}")
        if sentinels and "residual" not in roles:
            raise CaseLineError(f"sentinels=1 with fused={fused}: expected a residual among the inputs, which holds them")
        case = fused_case(
            known_type(type_a),
            m,
            k,
            n,
            roles,
            glu=glu,
            oai=oai,
            gelu=gelu,
            squared_relu=squared_relu,
            softcap=softcap,
            multiplier_at=multiplier_at,
            out=out.upper(),
            experts=n_mats,
            used=n_used,
            gating=gating,
            norm_w=norm_w,
            ties=ties,
            split=split,
            type_b=type_b,
            act=act,
            seed=seed,
        )
        return with_sentinels(case) if sentinels else case

    return call_with(
        build, UNSAID | dict(params), op="LINEAR", extra_keys=(), example=lambda: fused_case("Q4_K", 96, 512, 1, ("residual",)).line
    )
