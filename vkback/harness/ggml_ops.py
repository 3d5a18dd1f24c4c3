"""Nodes of vkback as ops of ggml: how each is said in ggml's C interface.

A builder gets the tensors of a node's inputs, in ggml's order of axes, and makes the op on them. What ggml says otherwise, or what vkback
alone has, raises PlanError, which is no fault of the other library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array
from vkback.ops.lowering import PlanError
from vkback.ops.view import View

if TYPE_CHECKING:
    from vkback.harness.ggml_library import Building

Handle = Any
"""A `struct ggml_tensor *`."""

UNARY = {
    name.upper(): name
    for name in (
        *("silu", "sigmoid", "gelu", "gelu_erf", "gelu_quick", "relu", "tanh", "exp", "elu", "softplus", "hardsigmoid", "hardswish"),
        *("neg", "abs", "sgn", "step", "floor", "ceil", "round", "trunc", "expm1", "sqr", "sqrt", "log", "sin", "cos"),
        *("sum", "sum_rows", "mean", "cumsum", "argmax"),
    )
}
"""Ops of one tensor without parameters, by what ggml calls them."""

BINARY = {"ADD": "add", "SUB": "sub", "MUL": "mul", "DIV": "div"}

GLU = {"REGLU": 0, "GEGLU": 1, "SWIGLU": 2, "GEGLU_ERF": 4, "GEGLU_QUICK": 5}

NORMS = {"RMS_NORM": "rms_norm", "NORM": "norm", "L2_NORM": "l2_norm"}

ROPE_MODES = {"normal": 0, "neox": 2, "mrope": 8, "vision": 24, "imrope": 40}

FUNCTIONS = {
    **{f"ggml_{name}": "T" for name in (*UNARY.values(), "cont")},
    **{f"ggml_{name}": "TT" for name in (*BINARY.values(), "mul_mat", "get_rows", "cpy", "glu_split")},
    **{f"ggml_{name}": "Tf" for name in NORMS.values()},
    "ggml_glu_split": "TTi",
    "ggml_glu": "Tib",
    "ggml_swiglu_oai": "TTff",
    "ggml_scale_bias": "Tff",
    "ggml_clamp": "Tff",
    "ggml_leaky_relu": "Tfb",
    "ggml_concat": "TTi",
    "ggml_repeat_4d": "Tllll",
    "ggml_argsort": "Ti",
    "ggml_diag_mask_inf": "Ti",
    "ggml_solve_tri": "TTbbb",
    "ggml_add_id": "TTT",
    "ggml_mul_mat_id": "TTT",
    "ggml_set_rows": "TTT",
    "ggml_soft_max_ext": "TTff",
    "ggml_rope_ext": "TTTiiiffffff",
    "ggml_rope_multi": "TTTisiiffffff",
    "ggml_flash_attn_ext": "TTTTfff",
    "ggml_view_4d": "Tllllzzzz",
    "ggml_permute": "Tiiii",
}
"""Signatures: T a tensor, f float, i int, b bool, l int64_t, z size_t, s int[4]. Each takes a context first and gives a tensor."""


def outputs_of(node: Node, values: Mapping[str, Array], build: Building) -> Handle:
    """The op on new tensors that hold the node's values. Raises PlanError where ggml has none like it."""
    maker = BUILDERS.get(node.op)
    if maker is None:
        raise PlanError(f"[{node.op}] is not an op of ggml, or not written in its interface yet (vkback/harness/ggml_ops.py)")
    if len({t.name for t in node.outputs}) != 1:
        raise PlanError(f"[{node.op}] several outputs, which ggml's op has not")
    if odd := [t.name for t in node.inputs if t.kind != "state" and (node.op, t.name) not in UNREAD and _odd(values[t.name])]:
        raise PlanError(f"[{node.op}] {', '.join(odd)}: values that are no finite numbers, of which ggml promises nothing")
    if node.outputs[0].type == "Q8_1":
        raise PlanError(f"[{node.op}] a Q8_1 output is vkback's own")
    if odd := [name for name in ("within", "part", "slots", "page", "first", "split_q", "chunked", "scales") if node.params.get(name)]:
        raise PlanError(f"[{node.op}] {', '.join(odd)}: not written in ggml's interface yet")
    return maker(node, values, build)


UNREAD = {("SOFT_MAX", "mask"), ("ATTENTION", "mask"), ("SOLVE_TRI", "l")}
"""Inputs that may hold what is no finite number: masks, and the other half of a triangle."""


def _odd(values: Array) -> bool:
    return bool(np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all())


def inputs(node: Node, values: Mapping[str, Array], build: Building) -> list[Handle]:
    """Tensors of a node's inputs, those that are views as views."""
    views: dict[int, View] = dict(node.params.get("views", {}))
    for index, name in enumerate(("w_view", "x_view")):
        if node.params.get(name):
            views[index] = node.params[name]
    if node.params.get("view"):
        views[0] = node.params["view"]
    made = [build.leaf(t, values[t.name]) for t in node.inputs]
    return [build.view(made[i], t.type, views[i]) if i in views else made[i] for i, t in enumerate(node.inputs)]


Maker = Callable[[Node, Mapping[str, Array], "Building"], Handle]


def _plain(name: str, *params: Any) -> Maker:
    def make(node: Node, values: Mapping[str, Array], build: Building) -> Handle:
        arguments = [*inputs(node, values, build), *(p(node) if callable(p) else p for p in params)]
        if len(arguments) != len(FUNCTIONS[f"ggml_{name}"]):
            raise PlanError(f"[{node.op}] {len(node.inputs)} inputs, which ggml's op has not")
        return build.op(name, *arguments)

    return make


def _param(name: str, default: Any = 0.0) -> Callable[[Node], Any]:
    return lambda node: node.params.get(name, default)


def _glu(node: Node, values: Mapping[str, Array], build: Building) -> Handle:
    tensors = inputs(node, values, build)
    if len(tensors) == 2:
        return build.op("glu_split", *tensors, GLU[node.op])
    return build.op("glu", *tensors, GLU[node.op], bool(node.params.get("swapped", False)))


def _mul_mat(node: Node, values: Mapping[str, Array], build: Building) -> Handle:
    if len(node.inputs) != 2:
        raise PlanError(f"[{node.op}] {len(node.inputs)} inputs")
    return build.op("mul_mat", *inputs(node, values, build))


def _soft_max(node: Node, values: Mapping[str, Array], build: Building) -> Handle:
    tensors = dict(zip((t.name for t in node.inputs), inputs(node, values, build), strict=True))
    if "mask" in tensors and np.isneginf(values["mask"]).all(axis=-1).any():
        raise PlanError(f"[{node.op}] rows that are masked as a whole, of which ggml promises nothing")
    y = build.op("soft_max_ext", tensors["x"], tensors.get("mask"), node.params["scale"], node.params.get("max_bias", 0.0))
    if "sinks" in tensors:
        build.library.ggml_soft_max_add_sinks(y, tensors["sinks"])
    return y


def _rope(node: Node, values: Mapping[str, Array], build: Building) -> Handle:
    p = node.params
    tensors = inputs(node, values, build)
    x, pos, factors = (*tensors, None)[:3]
    mode = ROPE_MODES[p["mode"]]
    rest = [p[name] for name in ("freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")]
    if p.get("sections"):
        return build.op("rope_multi", x, pos, factors, p["n_dims"], list(p["sections"]), mode, p["n_ctx_orig"], *rest)
    return build.op("rope_ext", x, pos, factors, p["n_dims"], mode, p["n_ctx_orig"], *rest)


def _get_rows(node: Node, values: Mapping[str, Array], build: Building) -> Handle:
    table, ids = node.inputs
    if values[ids.name].min() < 0 or values[ids.name].max() >= table.shape[-2]:
        raise PlanError(f"[{node.op}] ids outside of the table, which ggml does not allow")
    if node.params.get("scale", 1.0) != 1.0:
        raise PlanError(f"[{node.op}] a scale is vkback's own")
    return build.op("get_rows", *inputs(node, values, build))


def _set_rows(node: Node, values: Mapping[str, Array], build: Building) -> Handle:
    x, pos, cache = node.inputs
    if values[pos.name].min() < 0 or values[pos.name].max() >= cache.shape[-2]:
        raise PlanError(f"[{node.op}] positions outside of the cache, which ggml does not allow")
    if len(x.shape) == 3:  # as models have it: [tokens, heads, values], which ggml takes as [heads, tokens, values]
        turned = np.ascontiguousarray(values[x.name].transpose(1, 0, 2))
        source = build.leaf(Tensor(x.name, x.type, turned.shape, "input"), turned)
        return build.op("set_rows", build.leaf(cache, values[cache.name]), source, build.leaf(pos, values[pos.name]))
    source, ids, target = inputs(node, values, build)
    return build.op("set_rows", target, source, ids)


def _cpy(node: Node, values: Mapping[str, Array], build: Building) -> Handle:
    if len(node.inputs) != 1:
        raise PlanError(f"[{node.op}] {len(node.inputs)} inputs, which ggml's op has not")
    (source,) = inputs(node, values, build)
    return build.op("cpy", source, build.empty(node.outputs[0]))


def _concat(node: Node, values: Mapping[str, Array], build: Building) -> Handle:
    x, *others = inputs(node, values, build)
    for other in others:
        x = build.op("concat", x, other, len(node.inputs[0].shape) - 1 - int(node.params["axis"]))
    return x


def _repeat(node: Node, values: Mapping[str, Array], build: Building) -> Handle:
    (x,) = inputs(node, values, build)
    shape = [1] * (4 - len(node.params["shape"])) + list(node.params["shape"])
    return build.op("repeat_4d", x, *reversed(shape))


def _add_id(node: Node, values: Mapping[str, Array], build: Building) -> Handle:
    a, b, ids = node.inputs
    rows = (b.elements // a.shape[-1], a.shape[-1])
    table = build.leaf(Tensor(b.name, b.type, rows, b.kind), values[b.name].reshape(rows))
    return build.op("add_id", build.leaf(a, values[a.name]), table, build.leaf(ids, values[ids.name]))


def _attention(node: Node, values: Mapping[str, Array], build: Building) -> Handle:
    p = node.params
    if p.get("has_mask") is not None:
        tensors = inputs(node, values, build)
        q, k, v, *rest = tensors
        mask = rest.pop(0) if p["has_mask"] else None
        y = build.op("flash_attn_ext", q, k, v, mask, p["scale"], p.get("max_bias", 0.0), p.get("softcap", 0.0))
        if p.get("has_sinks"):
            build.library.ggml_flash_attn_ext_add_sinks(y, rest[0])
        return y
    q, k, v, pos, *more = node.inputs
    if len(pos.shape) != 1 or p.get("v_dim") or [t for t in more if t.name != "sinks"]:
        raise PlanError(f"[{node.op}] not written in ggml's interface yet")
    at = values[pos.name]
    if at.min() < 0:
        raise PlanError(f"[{node.op}] tokens without rows are vkback's own")
    rows = int(at.max()) + 1
    column = np.arange(rows)[None, :]
    seen = column <= at[:, None]
    if p.get("window"):
        seen &= column > at[:, None] - p["window"]
    turned = np.ascontiguousarray(values[q.name].transpose(1, 0, 2))
    caches = []
    for cache in (k, v):
        held = values[cache.name]
        if held.dtype != np.uint8:  # what no token sees may be NaN, which a mask does not take away
            held = held.copy()
            held[:, :rows][:, ~seen.any(axis=0)] = 0
            if _odd(held[:, :rows]):
                raise PlanError(f"[{node.op}] {cache.name}: values that are no finite numbers, of which ggml promises nothing")
        whole = build.leaf(cache, held)
        strides = View.whole(cache.shape).strides
        caches.append(build.view(whole, cache.type, View(0, (cache.shape[0], rows, cache.shape[2]), strides)))
    mask = np.where(seen, 0.0, -np.inf).astype(np.float16)
    tensors = [build.leaf(Tensor("q", "F32", turned.shape, "input"), turned), *caches]
    tensors.append(build.leaf(Tensor("mask", "F16", mask.shape, "input"), mask))
    y = build.op("flash_attn_ext", *tensors, p["scale"], 0.0, p.get("softcap", 0.0))
    if more:
        build.library.ggml_flash_attn_ext_add_sinks(y, build.leaf(more[0], values[more[0].name]))
    return y


BUILDERS: Mapping[str, Maker] = {
    **{op: _plain(name) for op, name in {**UNARY, **BINARY}.items()},
    **{op: _plain(name, _param("eps")) for op, name in NORMS.items()},
    **dict.fromkeys(GLU, _glu),
    "SWIGLU_OAI": _plain("swiglu_oai", _param("alpha"), _param("limit")),
    "SCALE": _plain("scale_bias", _param("scale"), _param("bias")),
    "CLAMP": _plain("clamp", _param("min"), _param("max")),
    "LEAKY_RELU": _plain("leaky_relu", _param("negative_slope"), False),
    "ARGSORT": _plain("argsort", lambda node: int(node.params["order"] == "desc")),
    "DIAG_MASK_INF": _plain("diag_mask_inf", _param("n_past", 0)),
    "SOLVE_TRI": _plain("solve_tri", True, True, False),
    "CONCAT": _concat,
    "REPEAT": _repeat,
    "ADD_ID": _add_id,
    "MUL_MAT": _mul_mat,
    "MUL_MAT_ID": _plain("mul_mat_id"),
    "SOFT_MAX": _soft_max,
    "ROPE": _rope,
    "ROPE_EXT": _rope,
    "GET_ROWS": _get_rows,
    "SET_ROWS": _set_rows,
    "CPY": _cpy,
    "CONT": _plain("cont"),
    "DUP": _cpy,
    "FLASH_ATTN_EXT": _attention,
    "ATTENTION": _attention,
}


def axes_of(view: View) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numpy axes of a view of four axes from the slowest to the fastest, as its values lie; and for each of ggml's axes of that order its
    place in the view. Raises PlanError where no axis has neighbours side by side."""
    order = sorted(range(4), key=lambda axis: (view.shape[axis] > 1, -view.strides[axis]))
    if view.shape[order[3]] > 1 and view.strides[order[3]] != 1:
        raise PlanError("a view without neighbours, which ggml has not")
    return tuple(order), tuple(3 - order[3 - place] for place in range(4))


def shape4(shape: Sequence[int]) -> list[int]:
    """A shape in ggml's order, of four axes."""
    if len(shape) > 4:
        shape = (prod(shape[:-3]), *shape[-3:])
    return [*reversed(shape), *[1] * (4 - len(shape))]
