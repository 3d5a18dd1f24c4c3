"""A LINEAR node taken apart, and whether it runs in integers or floats.

`LINEAR` is a GEMV with what is fused around it. Its inputs carry roles:

    w               weight [m, k], or [n_expert, m, k] with ids
    x               F32 or Q8_1 [n, k]; with ids [n, 1 or n_used, k]; or F16 as gemm_pack.packed has it, which only GEMMs take
    norm            F32 [k]: x is RMS-normed and multiplied by it first (params: eps)
    norm_bias       F32 [k], with norm: the norm is a layer norm, and this is added behind it
    post_norm       F32 [k]: before that norm, or without one, x is RMS-normed, multiplied by this, and post_residual is added
    post_residual   F32, shape of x, with post_norm. With the param `sum` that sum, F32 of its shape, is a further output
    bias            F32 [m]; with ids [n_expert * m], the experts' rows end to end
    multiplier      F32, shape of the output, with gelu and without glu: multiplied into what gelu makes; of one token it may be longer
                    (param multiplier_at)
    residual        F32, shape of the output: added to it
    ids             I32 [n, n_used]: the experts of each token
    logits          F32 [1, n_expert], in the place of ids: the experts are chosen by them as TOPK_MOE does (its params, too); weights
                    F32 [1, n_used] and ids I32 [1, n_used] are further outputs
    expert_weights  F32 [n, n_used]: the experts' outputs are summed with these weights
    selection_bias  F32 [n_expert]: where it chooses experts, TOPK_MOE's bias
    units_norm      of a product of few tokens by matrices F32 [m]: its output in unit order, times this, and its sums of squares are
                    further outputs (gemm_problem.Gemm.units)
    squares         of such a product: what another left of x (with the param squares_eps)
    route           of a GEMM by experts: what a ROUTE node made of its ids (vkback/ops/matmul/pack_nodes.py); an F16 x and an F16 output
                    have their columns in its order

What its params mean is with `LinearParams`, which reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from vkback import quants
from vkback.graph import Node, Recipe, Tensor
from vkback.ops.dispatch import ceil_div
from vkback.ops.family import declare
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.gemm_problem import GemmShape
from vkback.ops.moe.topk import TOPK_PARAMS, topk_params

Path = Literal["int", "float"]
"""Integer dot products of 8-bit activations (MMVQ), or floats."""
Experts = Literal["none", "each", "summed", "heads"]
"""A dense GEMV; one output for each chosen expert; the weighted sum of the chosen experts' outputs; a matrix for each head times its
part of x (LINEAR_HEADS)."""

QUANTS = quants.WEIGHT_TYPES

INT_QUANTS = frozenset(name for name in QUANTS if quants.quant(name).int_dot)
"""Types with an integer-dot path (UNIT_INTS in shaders/quant)."""

FUSED_ROLES = (
    "norm",
    "norm_bias",
    "post_norm",
    "post_residual",
    "bias",
    "multiplier",
    "residual",
    "ids",
    "logits",
    "expert_weights",
    "selection_bias",
)
"""Optional inputs, in the order of their bindings. A route comes after them."""

ROLES = ("w", "x", *FUSED_ROLES, "route", "units_norm", "squares")
"""All roles of inputs."""

declare(
    "gemv_path",
    match={
        "accelerated": (False, True),  # the driver says that the device has integer dot as an instruction
        "experts": get_args(Experts),
        "n": "number",
        "quant": tuple(sorted(INT_QUANTS)),
        "m": "number",
        "k": "number",
    },
    params={"path": get_args(Path)},
)


@dataclass(frozen=True)
class LinearParams:
    """The params of a LINEAR node.

    roles        names of its inputs, in their order
    glu          rows of w alternate gate and up: y = silu(gate) * up
    gelu         with glu: gelu, its tanh form, in the place of silu; without: y = gelu of the sum with its bias
    squared_relu  of one token and without glu or gelu: y = max(sum with its bias, 0) squared
    alpha, limit  with glu: SWIGLU_OAI's, which it then is
    eps          of the norms in the prologue
    sum          what the post-norm and its residual make of x is a further output
    row0, rows_total  the output is rows row0.. of a tensor of so many, filled by several nodes; None: it is all of its tensor
    n            tokens, where x is F16; None: rows of x
    squares_eps  of the norm that the role "squares" is for
    x_shared     slots that share a row of x, where experts take it in unit order; None: as the shape of x says
    x_matrix_columns  of the matrices that such an x was packed for; 0: of its own kernel's
    gelu_scale   with a multiplier: of the sums that gelu takes
    multiplier_at  of one token: the first value of the multiplier that counts, as many as there are outputs
    softcap      c: of one token and without an activation y = c tanh(y / c), behind all else; 0: none
    units_eps    of the norm whose weight is units_norm, where experts are summed: the output behind the norm is packed, too, ..
    units_shape  .. for products of such a shape
    choice       params of TOPK_MOE, where it chooses its experts
    """

    roles: tuple[str, ...]
    glu: bool = False
    gelu: bool = False
    squared_relu: bool = False
    alpha: float | None = None
    limit: float | None = None
    eps: float = 0.0
    sum: bool = False
    row0: int = 0
    rows_total: int | None = None
    n: int | None = None
    squares_eps: float = 0.0
    x_shared: int | None = None
    x_matrix_columns: int = 0
    gelu_scale: float = 1.0
    multiplier_at: int = 0
    softcap: float = 0.0
    units_eps: float = 0.0
    units_shape: GemmShape | None = None
    choice: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> LinearParams:
        """Raises PlanError for a param or a role that no LINEAR has, and for one that is missing: unread it would change nothing."""
        own = {key: value for key, value in params.items() if key not in TOPK_PARAMS}
        roles = params.get("roles", ())
        if unknown := [key for key in own if key not in PARAM_NAMES]:
            raise PlanError(f"[linear] LINEAR has no param {unknown[0]!r}; expected some of {', '.join((*PARAM_NAMES, *TOPK_PARAMS))}")
        if unknown := [role for role in roles if role not in ROLES]:
            raise PlanError(f"[linear] no input of LINEAR has the role {unknown[0]!r}; expected some of {', '.join(ROLES)}")
        needed = ["roles"]
        needed += ["eps"] if "norm" in roles or "post_norm" in roles else []
        needed += ["squares_eps"] if "squares" in roles else []
        needed += ["row0"] if "rows_total" in own else []
        needed += ["n_used", "norm", "gating", "scale"] if "logits" in roles else []
        if missing := [key for key in needed if key not in params]:
            raise PlanError(f"[linear] LINEAR with inputs {', '.join(roles)} lacks the param {missing[0]!r}")
        return cls(**own, choice=topk_params(params))

    @property
    def clamp(self) -> dict[str, float]:
        """alpha and limit of SWIGLU_OAI, if it is that."""
        return {} if self.alpha is None or self.limit is None else {"alpha": self.alpha, "limit": self.limit}

    @property
    def glu_op(self) -> str:
        """The op that glu makes of gate and up."""
        return "SWIGLU_OAI" if self.clamp else "GEGLU" if self.gelu else "SWIGLU"

    @property
    def activates(self) -> bool:
        """Whether an activation is applied to its sums."""
        return self.glu or self.gelu or self.squared_relu


PARAM_NAMES = dict.fromkeys(f.name for f in fields(LinearParams) if f.name != "choice")


def inputs_by_role(node: Node) -> dict[str, Tensor]:
    """Inputs of a LINEAR, or of another node whose params name their roles."""
    return dict(zip(node.params["roles"], node.inputs, strict=True))


@dataclass(frozen=True)
class LinearNode:
    """A LINEAR node by what its inputs are for.

    params  its own, typed; LINEAR_HEADS has those of a LINEAR of w, x and route
    extra   the optional inputs by role, in binding order
    summed  what it writes of x, normed, and post_residual
    chosen  weights and ids that it writes where it chooses its experts
    route   as a node of its own made it
    units   what it leaves for products of its output normed with units_norm: units that are not normed yet, and squares for it; of summed
            experts normed units alone. squares: what another left for it
    """

    node: Node
    params: LinearParams
    w: Tensor
    x: Tensor
    y: Tensor
    extra: Mapping[str, Tensor]
    experts: Experts
    summed: Tensor | None = None
    chosen: tuple[Tensor, ...] = ()
    route: Tensor | None = None
    units: tuple[Tensor, ...] = ()
    units_norm: Tensor | None = None
    squares: Tensor | None = None

    @classmethod
    def of(cls, node: Node) -> LinearNode:
        return node.once(cls._of)

    @classmethod
    def _of(cls, node: Node) -> LinearNode:
        if node.op == "LINEAR_HEADS":
            w, x, *route = node.inputs
            params = LinearParams.of({**node.params, "roles": ("w", "x", "route")[: len(node.inputs)]})
            return cls(node, params, w, x, node.outputs[0], {}, "heads", route=route[0] if route else None)
        params, by = LinearParams.of(node.params), inputs_by_role(node)
        experts: Experts = "summed" if "expert_weights" in by else "each" if "ids" in by or "logits" in by else "none"
        extra = {role: by[role] for role in FUSED_ROLES if role in by}
        summed = node.outputs[1] if params.sum else None
        chosen = node.outputs[1:] if "logits" in by else ()
        w, x = by["w"], by["x"]
        if experts == "none" and len(x.shape) > 2:  # heads side by side
            x = replace(x, shape=(x.shape[0], w.shape[-1]))
        units = node.outputs[1:] if "units_norm" in by else ()
        return cls(
            node,
            params,
            w,
            x,
            node.outputs[0],
            extra,
            experts,
            summed,
            chosen,
            by.get("route"),
            units,
            by.get("units_norm"),
            by.get("squares"),
        )

    def with_x(self, x: Tensor) -> LinearNode:
        """The same with another x."""
        return replace(self, x=x)

    @property
    def norms_x(self) -> bool:
        """Whether it brings x into shared memory normed."""
        return bool({"norm", "post_norm"} & self.extra.keys())

    @property
    def glu(self) -> bool:
        """Whether rows of w alternate gate and up."""
        return self.params.glu

    @property
    def gelu(self) -> bool:
        """Whether the activation is gelu."""
        return self.params.gelu

    @property
    def m(self) -> int:
        """Weight rows of the matrix, or of one expert."""
        return self.w.shape[-2]

    @property
    def k(self) -> int:
        return self.w.shape[-1]

    @property
    def n(self) -> int:
        """Tokens."""
        return self.x.shape[0] if self.params.n is None else self.params.n

    @property
    def n_used(self) -> int:
        """Experts of a token, or heads; 1 for a dense GEMV."""
        if self.experts == "heads":
            return self.w.shape[0]
        return (self.chosen[1] if self.chosen else self.extra["ids"]).shape[-1] if self.experts != "none" else 1

    @property
    def walk_units(self) -> int:
        """Units of 32 weights that a row group walks for one output row."""
        return ceil_div(self.k, 32) * (self.n_used if self.experts == "summed" else 1)

    @property
    def rows_total(self) -> int:
        """Rows of the output tensor, which several nodes may fill."""
        own = (self.m >> self.glu) * (self.n_used if self.experts == "heads" else 1)
        return own if self.params.rows_total is None else self.params.rows_total

    def path(self, ctx: LowerContext) -> tuple[Path, str]:
        """("int" or "float", why), as `path_for` has it."""
        return path_for(self.w.type, self.m, self.k, self.n, self.experts, ctx)


def bindings(node: LinearNode) -> int:
    """Storage buffers that a launch binds; a stage that spins binds one more."""
    return 3 + len(node.extra) + len(node.chosen) + (node.summed is not None)


def path_for(quant: str, m: int, k: int, n: int, experts: Experts, ctx: LowerContext) -> tuple[Path, str]:
    """("int" or "float", why) for the GEMV of a [m, k] weight and n tokens."""
    if quant not in INT_QUANTS:
        return "float", f"{quant} has no integer-dot path"
    if not ctx.caps.int_dot:
        return "float", "device has no integer dot product"
    if k % 32:
        return "float", f"k = {k} is not a multiple of 32"
    if ctx.act != "auto":
        return ("int" if ctx.act == "q8_1" else "float"), f"--act {ctx.act}"
    choice = ctx.tuning.pick("gemv_path", accelerated=ctx.caps.int_dot_accelerated, experts=experts, n=n, quant=quant, m=m, k=k)
    return choice["path"], choice.source


def weight(name: str, quant: str, shape: tuple[int, ...]) -> Tensor:
    """A stored weight as a tensor."""
    return Tensor(name, quant, shape, "weight", Recipe("plain", (name,)))
