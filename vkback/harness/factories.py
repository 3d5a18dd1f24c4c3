"""Cases from parameters: what a printed line, a generator, or the search for a smaller failing case makes a case from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from vkback import quants
from vkback.graph import Node
from vkback.harness.case_line import CaseLineError
from vkback.ops import argsort, attention, copy, elementwise, glu, norm, quantize, rope, rows, sample, soft_max, topk
from vkback.ops.add_id import AddId
from vkback.ops.base import OPS, Case, LowerContext, Problem
from vkback.ops.mat_vec import fused_case, mul_mat_case, mul_mat_id_case, split_case
from vkback.ops.moe_reduce import MoeReduce
from vkback.ops.mul_mat import batched_case
from vkback.ops.router import router_case

Params = Mapping[str, Any]
Change = Callable[[Problem], Problem]

ROUTES = ("shuffled", "one", "last", "repeat")
"""Which experts the tokens of a case choose: any; all tokens the same; only the last ones, so that others are never chosen; one expert in
every slot of a token."""


def context_of(case: Case, ctx: LowerContext) -> LowerContext:
    """The context a case runs in: its own parameter `act` decides where it has one."""
    return dataclasses.replace(ctx, act=case.params["act"]) if "act" in case.params else ctx


def reseeded(case: Case, seed: int) -> Case:
    """The same case with other values."""
    return dataclasses.replace(case, seed=seed, params={**case.params, "seed": seed})


def _amended(case: Case, changes: list[Change], **shown: Any) -> Case:
    """A case whose problem goes through `changes`; `shown` joins its parameters, None takes one away."""

    def make(rng: np.random.Generator) -> Problem:
        problem = case.make(rng)
        for change in changes:
            problem = change(problem)
        return problem

    merged = {**case.params, **shown}
    params = {k: v for k, v in merged.items() if k != "seed" and v is not None} | {"seed": case.seed}
    return dataclasses.replace(case, params=params, make=make)


def _quantized_x(problem: Problem) -> Problem:
    """x as Q8_1 bytes: the reference then sees what the kernel sees."""
    node = problem.node
    w, x, *rest = node.inputs
    data = quants.q8_1_quantize(problem.values[x.name].reshape(-1, x.shape[-1]))
    x8 = dataclasses.replace(x, type="Q8_1")
    return Problem(Node(node.op, (w, x8, *rest), node.outputs, node.params), {**problem.values, x.name: data})


def _with_x(case: Case, type_b: str, act: str, changes: list[Change], **shown: Any) -> Case:
    if type_b == "q8_1":
        changes = [_quantized_x, *changes]
        shown["type_b"] = type_b
    if act != "auto":
        shown["act"] = act
    return _amended(case, changes, **shown) if shown else case


def _scaled(amax: float) -> Change:
    """x from -amax to amax instead of -1 to 1."""

    def change(problem: Problem) -> Problem:
        x = problem.node.inputs[1].name
        return dataclasses.replace(problem, values={**problem.values, x: np.float32(amax) * problem.values[x]})

    return change


def product_case(
    quant: str, m: int, n: int, k: int, *, type_b: str = "f32", act: str = "auto", amax: float = 1.0, seed: int = 7
) -> Case:
    """MUL_MAT. type_b: "f32", or "q8_1" for activations that come quantized; amax: the largest of them."""
    case = mul_mat_case(quant, m, n, k, seed=seed)
    case = _amended(case, [_scaled(amax)], amax=amax) if amax != 1.0 else case
    return _with_x(case, type_b, act, [])


def routed_case(
    quant: str, experts: int, used: int, m: int, n: int, k: int, *, shared: bool, type_b: str = "f32", ids: str = "shuffled",
    act: str = "auto", amax: float = 1.0, seed: int = 7,
) -> Case:
    """MUL_MAT_ID. shared: one x for all experts of a token; ids: one of ROUTES; amax: largest activation."""

    def route(problem: Problem) -> Problem:
        chosen = problem.values["ids"].copy()
        if ids == "one":
            chosen[:] = chosen[0]
        elif ids == "last":
            chosen[:] = np.arange(experts - used, experts)
        elif ids == "repeat":
            chosen[:] = chosen[:, :1]
        return Problem(problem.node, {**problem.values, "ids": chosen})

    if ids not in ROUTES:
        raise CaseLineError(f"ids={ids}: expected one of {', '.join(ROUTES)}")
    case = mul_mat_id_case(quant, experts, used, m, n, k, shared=shared, seed=seed)
    case = _amended(case, [_scaled(amax)], amax=amax) if amax != 1.0 else case
    return _with_x(case, type_b, act, [route], **({} if ids == "shuffled" else {"ids": ids}))


def fused_product_case(
    quant: str, m: int, n: int, k: int, roles: tuple[str, ...], *, glu: bool = False, oai: bool = False, out: str = "F32",
    experts: int = 6, used: int = 3, split: tuple[int, ...] = (), act: str = "auto", seed: int = 7, **choice: Any,
) -> Case:
    """MAT_VEC; with ids, `used` of `experts` experts a token; split: rows of the nodes that fill the output between them; choice: gating,
    norm_w, ties of `fused_case`."""
    case = fused_case(quant, m, k, n, roles, glu=glu, oai=oai, out=out, experts=experts, used=used, seed=seed, **choice)
    case = split_case(case, split) if split else case
    shown = {} if (experts, used) == (6, 3) else {"n_mats": experts, "n_used": used}
    return _with_x(case, "f32", act, [], **shown)


def get_rows_case(quant: str, m: int, k: int, r: int, *, ids: str = "spread", kind: str = "weight", seed: int = 23) -> Case:
    """GET_ROWS of r rows. ids: "spread" over all m rows, "one" row again and again, or some of them "outside" the table."""
    chosen = {
        "spread": [round(i * (m - 1) / max(r - 1, 1)) for i in range(r)][::-1],
        "one": [m - 1] * r,
        "outside": [(-1, m, 0, m - 1)[i % 4] for i in range(r)],
    }
    if ids not in chosen:
        raise CaseLineError(f"ids={ids}: expected one of {', '.join(chosen)}")
    return _amended(rows.GetRows().case(quant, m, k, tuple(chosen[ids]), kind=kind, seed=seed), [], ids=ids)


def attention_case(
    n_head: int, n_head_kv: int, hd: int, kv: int, nb: int, y: str = "F32", *, window: int = 0, sinks: bool = False, seed: int = 1
) -> Case:
    """FLASH_ATTN_EXT of the last nb tokens of a full cache of kv rows."""
    if nb > kv:
        raise CaseLineError(f"nb={nb}: more tokens than the {kv} rows of the cache")
    case = attention.FlashAttnExt().case(n_head, n_head_kv, hd, kv, range(kv - nb, kv), y, seed=seed, window=window, sinks=sinks)
    return _amended(case, [], n_ctx=None, pos=None, kv=kv, nb=nb)


def batched_product_case(
    quant: str, m: int, n: int, k: int, bs: tuple[int, int], nr: tuple[int, int], *, type_b: str = "f32", act: str = "auto",
    order: tuple[int, ...] = (), gap: int = 0, plain: bool = False, seed: int = 7,
) -> Case:
    """MUL_MAT of a batch, bs matrices each for nr slices of x; order, gap, plain as in `batched_case`; type_b also f16."""
    x_type = "F16" if type_b == "f16" else "F32"
    case = batched_case(quant, m, n, k, bs, nr, order=order, gap=gap, plain=plain, x_type=x_type, seed=seed)
    return _with_x(case, type_b, act, [])


def _mul_mat(p: Params) -> Case:
    if "bs" in p:
        return batched_product_case(
            p["type_a"], p["m"], p["n"], p["k"], p["bs"], p["nr"], type_b=p.get("type_b", "f32"), act=p.get("act", "auto"),
            order=p.get("order", ()), gap=p.get("gap", 0), plain=bool(p.get("plain", 0)), seed=p.get("seed", 7),
        )  # fmt: skip
    return product_case(
        p["type_a"], p["m"], p["n"], p["k"], type_b=p.get("type_b", "f32"), act=p.get("act", "auto"), amax=p.get("amax", 1.0),
        seed=p.get("seed", 7),
    )  # fmt: skip


def _mul_mat_id(p: Params) -> Case:
    return routed_case(
        p["type_a"], p["n_mats"], p["n_used"], p["m"], p["n"], p["k"], shared=bool(p.get("b", 1)), type_b=p.get("type_b", "f32"),
        ids=p.get("ids", "shuffled"), act=p.get("act", "auto"), amax=p.get("amax", 1.0), seed=p.get("seed", 7),
    )  # fmt: skip


def _mat_vec(p: Params) -> Case:
    roles = () if p["fused"] == "none" else tuple(p["fused"].split("+"))
    return fused_product_case(
        p["type_a"], p["m"], p["n"], p["k"], roles, glu=bool(p.get("glu", 0)), oai=bool(p.get("oai", 0)), out=p.get("out", "F32"),
        experts=p.get("n_mats", 6), used=p.get("n_used", 3), split=p.get("split", ()), act=p.get("act", "auto"), seed=p.get("seed", 7),
        **({"gating": p["gating"], "norm_w": bool(p["norm_w"]), "ties": bool(p["ties"])} if "logits" in roles else {}),
    )  # fmt: skip


def _get_rows(p: Params) -> Case:
    return get_rows_case(p["type"], p["m"], p["n"], p["r"], ids=p["ids"], kind=p.get("kind", "weight"), seed=p.get("seed", 23))


def _set_rows(p: Params) -> Case:
    n, heads, dim = p["ne"]
    types = p.get("type_src", "F32"), p.get("type_dst", "F16")
    return rows.SetRows().case(n, heads, dim, p["pos"], types=types, seed=p.get("seed", 19))


def _convert(op: str, p: Params) -> Case:
    return cast("copy.Convert", OPS[op]).case(
        p["ne"], p["type_src"], p["type_dst"], order=p.get("order", ()), to=p.get("to", ()), gap=p.get("gap", 0),
        weight=bool(p.get("weight", 0)), seed=p.get("seed", 29),
    )  # fmt: skip


def _boxed(op: str, p: Params) -> Case:
    rest = {k: v for k, v in p.items() if k not in ("ne", "out", "seed")}
    shapes = [tuple(map(int, str(s).split("x"))) for s in p["ne"]]
    return cast("copy.Boxed", OPS[op]).case(shapes, p["out"], seed=p.get("seed", 31), **rest)


def _norm(op: str, p: Params) -> Case:
    return cast("norm.Norm", OPS[op]).case(
        p["ne"], eps=p.get("eps", 1e-6), out=p.get("out", "F32"), scale=p.get("scale", 1.0), seed=p.get("seed", 11)
    )


def _glu(op: str, p: Params) -> Case:
    return cast("glu.Glu", OPS[op]).case(
        p["ne"], packed=bool(p.get("packed", 0)), swapped=bool(p.get("swapped", 0)), size=p.get("size", 3.0), out=p.get("out", "F32"),
        seed=p.get("seed", 5),
    )  # fmt: skip


def _unary(op: str, p: Params) -> Case:
    given = {name: float(p[name]) for name, _ in elementwise.UNARY[op].params if name in p}
    return cast("elementwise.Unary", OPS[op]).case(p["ne"], seed=p.get("seed", 4), **given)


def _binary(op: str, p: Params) -> Case:
    return cast("elementwise.Binary", OPS[op]).case(p["ne"], p["b"], seed=p.get("seed", 2))


def _rope(p: Params) -> Case:
    given = {k: v for k, v in p.items() if k not in ("mode", "ne", "pos", "ff", "seed")}
    fast = p.get("ff", 0)
    return rope.Rope().case(
        p["mode"], p["ne"], first=p["pos"], factors=bool(fast), fast_factor=fast or 1.0, seed=p.get("seed", 13), **given
    )


def _qkv(p: Params) -> Case:
    shown = ("mode", "n", "n_head", "n_head_kv", "head_dim", "packed", "norm", "ff", "seed")
    given = {k: v for k, v in p.items() if k not in shown}
    return rope.QkvRopeSetRows().case(
        p["mode"], p["n"], p["n_head"], p["n_head_kv"], p["head_dim"], packed=bool(p["packed"]), norm=bool(p["norm"]),
        factors=bool(p["ff"]), seed=p.get("seed", 17), **given,
    )  # fmt: skip


def _flash_attn(p: Params) -> Case:
    window, sinks, seed = p.get("window", 0), bool(p.get("sinks", 0)), p.get("seed", 1)
    if "nb" in p:
        return attention_case(p["n_head"], p["n_head_kv"], p["hd"], p["kv"], p["nb"], p["y"], window=window, sinks=sinks, seed=seed)
    return attention.FlashAttnExt().case(
        p["n_head"], p["n_head_kv"], p["hd"], p["n_ctx"], p["pos"], p["y"], seed=seed, window=window, sinks=sinks
    )


def _attn_decode(p: Params) -> Case:
    shown = ("n_head", "n_head_kv", "hd", "n_ctx", "pos", "mode", "norm", "ff", "y", "n_dims", "window", "sinks", "seed")
    given = {k: v for k, v in p.items() if k not in shown}
    return attention.AttnDecode().case(
        p["n_head"], p["n_head_kv"], p["hd"], p["n_ctx"], p["pos"], p["mode"], bool(p["norm"]), bool(p["ff"]), p["y"],
        seed=p.get("seed", 1), n_dims=p["n_dims"], window=p.get("window", 0), sinks=bool(p.get("sinks", 0)), **given,
    )  # fmt: skip


def _rope_angles(p: Params) -> Case:
    given = {k: v for k, v in p.items() if k not in ("pos", "n_dims", "ff", "seed")}
    return rope.RopeAngles().case(p["pos"], p["n_dims"], factors=bool(p.get("ff", 0)), seed=p.get("seed", 5), **given)


def _sample(p: Params) -> Case:
    sampler = sample.Params(p["temp"], p["top_k"], p["top_p"], p["min_p"], p["rng"], ())
    return sample.Sample().case(p["vocab"], sampler, greedy=bool(p["greedy"]), kind=p["kind"], seed=p["seed"])


def _topk_moe(p: Params) -> Case:
    return topk.TopkMoe().case(
        p["n"], p["n_expert"], p["n_used"], bool(p["norm"]), p["gating"], float(p["scale"]), bool(p["ties"]), p.get("seed", 1)
    )


FACTORIES: dict[str, Callable[[Params], Case]] = {
    "MUL_MAT": _mul_mat,
    "MUL_MAT_ID": _mul_mat_id,
    "MAT_VEC": _mat_vec,
    "GET_ROWS": _get_rows,
    "SET_ROWS": _set_rows,
    "ROPE": _rope,
    "QKV_ROPE_SET_ROWS": _qkv,
    "FLASH_ATTN_EXT": _flash_attn,
    "ATTN_DECODE": _attn_decode,
    "ROPE_ANGLES": _rope_angles,
    "SAMPLE": _sample,
    "TOPK_MOE": _topk_moe,
    "MOE_ROUTER": lambda p: router_case(
        p["n_expert"], p["k"], p["n_used"], bool(p["norm"]), p["gating"], bool(p["bias"]), p.get("seed", 1)
    ),
    "SOFT_MAX": lambda p: soft_max.SoftMax().case(p["ne"], bool(p.get("mask", 0)), seed=p.get("seed", 37)),
    "SUM_ROWS": lambda p: soft_max.SumRows().case(p["ne"], seed=p.get("seed", 41)),
    "ARGSORT": lambda p: argsort.ArgSort().case(p["ne"], p["order"], seed=p.get("seed", 43)),
    "TOP_K": lambda p: argsort.TopK().case(p["ne"], p["k"], seed=p.get("seed", 47)),
    "ARGMAX": lambda p: topk.Argmax().case(p["n"], p["vocab"], p["kind"], p.get("seed", 1)),
    "ADD_ID": lambda p: AddId().case(p["n_expert"], p["n_used"], p["m"], p["n"], seed=p.get("seed", 47)),
    "MOE_REDUCE": lambda p: MoeReduce().case(p["n"], p["n_used"], p["m"], bool(p["residual"]), p.get("seed", 1)),
    "QUANTIZE_Q8_1": lambda p: quantize.quantize_case(p["ne"], seed=p.get("seed", 3)),
}
"""The case of each op that has these parameters."""


def _add(names: Mapping[str, Any] | tuple[str, ...], make: Callable[[str, Params], Case]) -> None:
    for name in names:
        FACTORIES[name] = lambda p, name=name: make(name, p)  # type: ignore[misc]


_add(("CPY", "CONT"), _convert)
_add(("REPEAT", "CONCAT", "PAD", "PERMUTE"), _boxed)
_add(("RMS_NORM", "NORM", "RMS_NORM_MUL", "ADD_RMS_NORM_MUL"), _norm)
_add(glu.GLU, _glu)
_add(elementwise.UNARY, _unary)
_add(elementwise.BINARY, _binary)


def make_case(op: str, params: Params) -> Case:
    """The case of an op with these parameters. Raises CaseLineError for an unknown op and for parameters that are missing or do not fit."""
    factory = FACTORIES.get(op)
    if factory is None:
        raise CaseLineError(f"{op}: no such op; known are {', '.join(sorted(FACTORIES))}")
    try:
        return factory(params)
    except KeyError as e:
        raise CaseLineError(f"{op}: parameter {e.args[0]} is missing; give it, or a whole line as a run prints it") from e
    except (TypeError, ValueError, AttributeError) as e:
        raise CaseLineError(f"{op}: these parameters make no case: {e}") from e
