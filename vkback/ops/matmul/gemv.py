"""The kernel that a GEMV gets: what the tuning tables say, within the limits of the device and the needs of the node.

`configure` makes a `GemvConfig`, a typed value in the words of the tables. Code that needs to know what was chosen reads it: `explain`, the
sweep, the launch. The defines of shaders/gemv are made from it, last of all, by `shader_defines`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from vkback import quants
from vkback.device import Capabilities
from vkback.graph import Node
from vkback.ops.codebooks import decoder, in_pairs
from vkback.ops.codebooks import shared_bytes as codebook_bytes
from vkback.ops.dispatch import ceil_div
from vkback.ops.family import Adjustment, Choice, CountOr, declare
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.choice import choice_of
from vkback.ops.matmul.linear_node import INT_QUANTS, Experts, LinearNode, Path
from vkback.ops.moe.topk import ExpertChoice, expert_choice
from vkback.ops.workgroup import Defines, power_of_two

Prologue = Literal["none", "norm", "copy"]
"""x as it is in memory; x normed into shared memory by every workgroup; a Q8_1 x, or in a barrier-free stage any, copied there."""
Prefetch = Literal["none", "weights", "weights+x"]
"""Software prefetch into registers: as soon as a unit is used, its registers are loaded with that of the next chunk."""
Scales = Literal["weights", "sums", "levels", "levels_bfe"]
"""Float path. "weights": scale each weight; "sums": accumulate in integers, scale the sum; "levels": the same with numbers looked up in
shared memory; "levels_bfe": by codes that are bit fields, not bytes."""
BitSwap = Literal["xor", "differences", "masks"]
"""How a step of turning planes of bits into bytes selects bits; number i is word i of SWAP_BITS in shaders/quant/bit_planes.glsl."""
LaneOrder = Literal["strided", "blocked"]
"""The units that a lane takes at once are LANES apart, or neighbours."""

SHADER_WORDS: Mapping[str, tuple[str, ...]] = {"PROLOGUE": get_args(Prologue), "EXPERTS": get_args(Experts), "PREFETCH": get_args(Prefetch)}
"""Defines that stand for words: number i is word i, and a named constant of shaders/gemv/gemv.comp (PROLOGUE_NORM is 1)."""

LOOKED_UP = frozenset({"MXFP4"})
"""Types whose decoder can look its levels up (LEVEL_TABLE)."""

LEVEL_TABLES: Mapping[str, int] = {"levels": 1, "levels_bfe": 2}
"""LEVEL_TABLE of each method of looking levels up."""

BIT_PLANES = frozenset({"IQ4_NL", "IQ4_XS"})
"""Types that shaders/quant/bit_planes.glsl turns into bytes."""

PAIR_BYTES = 1024
"""Of a copy of the table of pairs of levels; MAX_PAIR_LANES lanes of a subgroup have one each (shaders/quant/iq4_pairs.glsl)."""

MAX_PAIR_LANES = 32

MAX_COLUMNS = 16
"""Tokens of a workgroup at most; more go along the grid."""

EXACT_SUMS = 64
"""Sums of a lane at most in batch-invariant plans, whose rows are those of one token's kernel: more tokens spill registers."""

MAX_ROWS = 16
"""Rows of a row group at most: each keeps its sums and its loads in registers."""

PER_TILE: Literal["per_tile"] = "per_tile"
"""`groups`: a workgroup for each tile."""
DEFAULT_SUBGROUP: Literal["default"] = "default"
"""`subgroup`: the device's default size."""


def _never() -> tuple[dict[str, frozenset[str]], ...]:
    """Pairs of match values that contradict each other."""
    floats = {"quant": frozenset(quants.QUANTS) - INT_QUANTS, "path": frozenset({"int"})}
    by_decoder: dict[str, set[str]] = {}
    for name, t in quants.QUANTS.items():
        by_decoder.setdefault(t.decoder, set()).add(name)
    return floats, *({"quant": frozenset(quants.QUANTS) - names, "decoder": frozenset({d})} for d, names in by_decoder.items())


declare(
    "gemv",
    match={
        "y": ("F32", "Q8_1"),
        "prologue": ("none", "norm"),
        "experts": get_args(Experts),
        "glu": (False, True),
        "n": "number",
        "quant": tuple(quants.QUANTS),
        "decoder": get_args(quants.Decoder),  # of the weight's type
        "path": get_args(Path),
        "m": "number",
        "k": "number",
        "sync": ("barrier", "sentinel"),  # sentinel: of a token whose stages run barrier-free where they can
    },
    params={
        "wg": (1, 2, 4, 8, 16, 32, 64, 128, 160, 256, 320, 384, 512, 640, 768, 896, 1024),  # threads of a workgroup
        "lanes": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),  # threads of a row group, which walk its rows together
        "rows": (1, 2, 4, 8, 16, 32),  # weight rows of a row group (register blocking)
        "unroll": (1, 2, 3, 4, 6, 8, 14, 16),  # units of a row that a lane takes at once
        "prefetch": get_args(Prefetch),
        "scales": get_args(Scales),
        "lane_order": get_args(LaneOrder),  # blocked where unroll is a power of two and the units of all lanes divide a row
        "x_in_shared": (False, True),  # every workgroup copies a Q8_1 x into shared memory
        "pairs_in_shared": (False, True),  # integer path, types in pairs: levels by a table of pairs, not by formulas
        "groups": CountOr(PER_TILE),  # workgroups at most, each looping over several tiles
        "subgroup": (DEFAULT_SUBGROUP, 8, 16, 32, 64, 128),  # size to require where the device has it
    },
    never=_never(),
)

declare("bit_planes", match={"quant": tuple(sorted(BIT_PLANES))}, params={"swap": get_args(BitSwap)})


@dataclass(frozen=True)
class GemvConfig:
    """A kernel of shaders/gemv.

    What it computes:
        quant, path, k        type of the weights, how they are multiplied, their columns
        x_width               values of a token's x: of all heads
        x, y                  types of activations and output, F32 or Q8_1
        roles                 optional inputs, in binding order
        experts, n_used       whose rows, and how many experts a token has
        glu, glu_clamp, gelu  whether rows are gate and up in turn; alpha and limit of SWIGLU_OAI; whether the activation is gelu
        squared_relu          without glu and gelu: the activation is that
        softcap               of y, 0: none
        stores_sum            whether a further output is what the post-norm and its residual make of x
        expert_choice         how it chooses experts, if it does; `last_chooses`: the last workgroup, by y; else every workgroup, by the
                              role "logits". choice_scale is a factor of their weights
    How:
        wg, lanes, rows, unroll, prefetch, lane_order, scales, pairs_in_shared   as in the tables
        prologue              what precedes the walk; "copy" is x_in_shared
        columns               tokens of a workgroup
        groups                workgroups at most, None: one a tile
        subgroup, required    subgroup size that the kernel relies on, 1: none is known; the size to require of the pipeline
        pairs                 the weight's codes lie in pairs
        bit_swap              how planes of bits become bytes, in types that have such
        reduce_subgroup       reductions over the workgroup use subgroup arithmetic
        loop_tiles, m_aligned  of a launch: a workgroup takes several tiles; the rows are a whole number of tiles

    source       the row of the tables that won
    adjustments  parameters that are not as the tables say
    """

    quant: str
    path: Path
    k: int
    x_width: int
    x: str
    y: str
    roles: tuple[str, ...]
    experts: Experts
    n_used: int
    glu: bool
    glu_clamp: tuple[float, float] | None
    wg: int
    lanes: int
    rows: int
    unroll: int
    prefetch: Prefetch
    lane_order: LaneOrder
    prologue: Prologue
    columns: int
    groups: int | None
    subgroup: int
    required: int | None
    reduce_subgroup: bool
    source: str
    expert_choice: ExpertChoice | None = None
    last_chooses: bool = False
    choice_scale: float = 1.0
    gelu: bool = False
    stores_sum: bool = False
    squared_relu: bool = False
    softcap: float = 0.0
    scales: Scales = "weights"
    pairs_in_shared: bool = False
    pairs: bool = False
    bit_swap: BitSwap = "xor"
    loop_tiles: bool = False
    m_aligned: bool = False
    adjustments: tuple[Adjustment, ...] = ()

    @property
    def k_units(self) -> int:
        """Units of 32 weights in a row."""
        return ceil_div(self.k, 32)

    @property
    def walk_units(self) -> int:
        """Units that a row group walks for one output row."""
        return self.k_units * (self.n_used if self.experts == "summed" else 1)

    @property
    def tile_rows(self) -> int:
        """Weight rows of a tile."""
        return self.wg // self.lanes * self.rows

    @property
    def shuffle_lanes(self) -> int:
        """Lanes whose sums are added by shuffles."""
        return min(self.subgroup, self.wg)

    @property
    def several_chunks(self) -> bool:
        """Whether a row group walks its rows in more than one step."""
        return self.lanes * self.unroll < self.walk_units

    @property
    def can_prefetch_x(self) -> bool:
        """Whether a lane can prefetch its units of x: of one row of Q8_1 in memory, walked in several chunks."""
        one_row = self.columns == 1 and self.experts != "summed"
        return self.several_chunks and self.path == "int" and one_row and self.prologue == "none"


def subgroup_for(ctx: LowerContext, wanted: int | str = DEFAULT_SUBGROUP) -> tuple[int, int | None]:
    """(size the shader may rely on, size to require): (1, None) when reductions must go through shared memory.

    wanted  the tables' size, taken where the device can be held to it; otherwise the device's default
    """
    caps = ctx.caps
    if "shuffle" not in caps.subgroup_ops:
        return 1, None
    if caps.subgroup_required_size:
        size = wanted if isinstance(wanted, int) and caps.subgroup_min <= wanted <= caps.subgroup_max else caps.subgroup_size
        return size, size
    if caps.subgroup_min == caps.subgroup_max:
        return caps.subgroup_size, None
    return 1, None


def legal_shape(choice: Choice, *, units: int, glu: bool, q8_out: bool, reduces: bool, ctx: LowerContext) -> tuple[int, int, int]:
    """(wg, lanes, rows): the tables' shape, adjusted to what this node and device need.

    Lanes beyond the `units` of a row would have nothing to do. A lane finishes at most one row of its row group, GLU has row pairs, a Q8_1
    output whole units. A workgroup that `reduces` (shaders/common/reduce.glsl) has a power of two of threads. The nearest shape wins: more
    rows, then fewer lanes, then more threads. Raises PlanError when none fits.
    """
    most = min(ctx.caps.max_workgroup_invocations, ctx.caps.max_workgroup_size[0])
    subgroup, required = subgroup_for(ctx, choice["subgroup"])
    # A required subgroup size may lower the largest workgroup.
    if required and ctx.caps.max_workgroup_subgroups:
        most = min(most, required * ctx.caps.max_workgroup_subgroups)
    # Rows that a workgroup must finish together: a unit of Q8_1 output, and both rows of a GLU pair.
    tile = (32 if q8_out else 1) << glu
    wg = min(max(choice["wg"], 8 if q8_out else 1), most)
    if reduces:
        wg = _floor_power_of_two(wg)
    # Nearest shape first: the inner loop raises rows, then lanes fall, and only then do threads rise.
    while wg <= most:
        lanes = min(max(choice["lanes"], 1 << glu), _floor_power_of_two(wg), max(power_of_two(units), choice["rows"], 1 << glu))
        while lanes:
            rows = max(choice["rows"], 1 << glu)
            # Each lane finishes at most one row, and within a subgroup sums are added by its shuffles.
            max_rows = min(lanes, MAX_ROWS, subgroup if subgroup > 1 else MAX_ROWS)
            while rows <= max_rows:
                if wg % lanes == 0 and wg // lanes * rows % tile == 0:
                    return wg, lanes, rows
                rows *= 2
            lanes //= 2
        wg *= 2
    raise PlanError(f"[gemv] {choice.source}: no shape near {dict(choice.params)} makes tiles of {tile} rows on {ctx.caps.name}")


def _floor_power_of_two(n: int) -> int:
    """The largest power of two that is at most n, n at least 1."""
    return 1 << (n.bit_length() - 1)


def can_block_lanes(unroll: int, lanes: int, k_units: int) -> bool:
    """Whether the units that a lane takes at once can be neighbours: they are a power of two, and those of all lanes divide a row."""
    return unroll > 1 and unroll == power_of_two(unroll) and k_units % (unroll * lanes) == 0


def configure(node: LinearNode, path: Path, ctx: LowerContext, *, routes: bool = False) -> GemvConfig:
    """The kernel that the tables and the device's limits lead to. Raises PlanError when it cannot be made to fit.

    routes  its last workgroup is to choose experts
    """
    norm = node.norms_x
    sync = ctx.sync if node.n == 1 else "barrier"  # of several tokens none runs barrier-free
    choice = ctx.tuning.pick(
        "gemv",
        quant=node.w.type,
        decoder=quants.quant(node.w.type).decoder,
        path=path,
        m=node.m,
        k=node.k,
        n=node.n,
        experts=node.experts,
        glu=node.glu,
        y=node.y.type,
        prologue="norm" if norm else "none",
        sync=sync,
    )
    q8_out = node.y.type == "Q8_1"
    # These add up or compare values over the whole workgroup.
    reduces = routes or norm or q8_out or bool(node.chosen)
    wg, lanes, rows = legal_shape(choice, units=node.walk_units, glu=node.glu, q8_out=q8_out, reduces=reduces, ctx=ctx)
    subgroup, required = subgroup_for(ctx, choice["subgroup"])
    # Not more units at once than a lane has in its row.
    unroll = min(choice["unroll"], ceil_div(node.walk_units, lanes))
    blocked = choice["lane_order"] == "blocked" and can_block_lanes(unroll, lanes, ceil_div(node.k, 32))
    # Batch-invariant plans keep the rows of one token's kernel, so a lane holds fewer tokens. Experts take one token at a time.
    columns = min(node.n, max(1, EXACT_SUMS // rows) if ctx.exact else MAX_COLUMNS, MAX_COLUMNS) if node.experts == "none" else 1
    # In shared memory x is read once per workgroup. Barrier-free kernels always copy it: only the copy spins on the sentinel.
    copies = (choice["x_in_shared"] or sync == "sentinel") and node.x.type == "Q8_1" and path == "int" and columns == 1
    copies |= sync == "sentinel" and node.x.type == "F32" and path == "float" and columns == 1 and not norm and node.k % 32 == 0
    pairs = in_pairs(node.w.type, node.k, ctx.tuning)
    params = node.params
    config = GemvConfig(
        quant=node.w.type,
        path=path,
        k=node.k,
        x_width=node.x.shape[-1],
        x=node.x.type,
        y=node.y.type,
        roles=tuple(node.extra),
        experts=node.experts,
        n_used=node.n_used,
        glu=node.glu,
        glu_clamp=(params.clamp["alpha"], params.clamp["limit"]) if node.glu and params.clamp else None,
        wg=max(wg, 8) if norm else wg,
        lanes=lanes,
        rows=rows,
        unroll=unroll,
        prefetch=choice["prefetch"],
        lane_order="blocked" if blocked else "strided",
        prologue="copy" if copies else "norm" if norm else "none",
        columns=columns,
        groups=None if choice["groups"] == PER_TILE else choice["groups"],
        subgroup=subgroup,
        required=required,
        reduce_subgroup=subgroup >= 8 and "arithmetic" in ctx.caps.subgroup_ops,
        source=choice.source,
        expert_choice=expert_choice(node.node, node.extra["logits"], ctx, bias=node.extra.get("selection_bias")) if node.chosen else None,
        choice_scale=float(params.choice["scale"]) if node.chosen else 1.0,
        gelu=node.gelu,
        stores_sum=node.summed is not None,
        squared_relu=params.squared_relu,
        softcap=params.softcap,
        scales=_scales(choice, node.w.type, path),
        pairs_in_shared=choice["pairs_in_shared"] and path == "int" and pairs,
        pairs=pairs,
        bit_swap=ctx.tuning.pick("bit_planes", quant=node.w.type)["swap"] if node.w.type in BIT_PLANES else "xor",
    )
    # Shared memory or bindings may not suffice: drop what costs least.
    config = _fitted(config, node.node.name, ctx)
    # x can be loaded ahead only where no prologue computes it.
    if config.prefetch == "weights+x" and not config.can_prefetch_x:
        config = dataclasses.replace(config, prefetch="weights")
    adjustments = (*_shape_adjustments(choice, config, ctx), *_other_adjustments(choice, config, node, ctx))
    return dataclasses.replace(config, adjustments=adjustments)


def _scales(choice: Choice, quant: str, path: Path) -> Scales:
    """The tables' `scales`, or the nearest mode this type supports."""
    wanted: Scales = choice.params.get("scales", "weights")
    if path != "float" or quant not in INT_QUANTS:
        return "weights"
    return "sums" if wanted in LEVEL_TABLES and quant not in LOOKED_UP else wanted


def _fitted(config: GemvConfig, name: str, ctx: LowerContext) -> GemvConfig:
    """With as many tokens a workgroup, x and a table of pairs in shared memory, as the device's shared memory has room for."""
    room = ctx.caps.max_shared_memory - codebook_bytes(config.quant, ctx.caps)
    while (need := shared_bytes(dataclasses.replace(config, loop_tiles=config.groups is not None))) > room:
        if config.pairs_in_shared:
            config = dataclasses.replace(config, pairs_in_shared=False)
        elif config.prologue == "copy":
            config = dataclasses.replace(config, prologue="none")
        elif config.columns > 1:
            config = dataclasses.replace(config, columns=ceil_div(config.columns, 2))
        else:
            raise PlanError(
                f"[gemv] {name}: {config.wg} threads of {config.rows} rows need {need} bytes of shared memory, "
                f"{ctx.caps.name} has {room} besides the codebook; {config.source} asks for too much"
            )
    return config


def shared_bytes(config: GemvConfig) -> int:
    """Shared memory of a kernel without its codebook, as shaders/gemv declares it."""
    buffers = 1 + config.loop_tiles
    rows, partials = config.columns * config.tile_rows, config.lanes // config.shuffle_lanes
    summed = config.n_used if config.experts == "summed" else 0
    total = 4 * buffers * rows * partials if partials > 1 else 0
    if config.prologue != "none":
        total += config.walk_units * (128 if config.path == "float" else 36 if config.pairs_in_shared else 40)
    total += PAIR_BYTES * min(MAX_PAIR_LANES, config.subgroup) * config.pairs_in_shared
    total += 8 * summed
    if config.y == "Q8_1":
        total += 4 * buffers * (rows >> config.glu)
    if config.expert_choice:
        total += config.expert_choice.shared_bytes
    sums = config.prologue == "norm" or (config.expert_choice is not None and config.expert_choice.sums_all)
    if (sums or config.y == "Q8_1") and not config.reduce_subgroup:
        total += 2 * 4 * config.wg
    elif sums and config.wg > (config.subgroup if config.subgroup > 1 else 0):
        total += 2 * 4 * ceil_div(config.wg, 4)
    return total


def shader_defines(config: GemvConfig, caps: Capabilities) -> Defines:
    """The defines of shaders/gemv/gemv.comp."""
    words = {"PROLOGUE": config.prologue, "EXPERTS": config.experts, "PREFETCH": config.prefetch}
    defines: Defines = {
        **decoder(config.quant, caps, config.pairs),
        **{name: SHADER_WORDS[name].index(word) for name, word in words.items()},
        "PATH_INT": int(config.path == "int"),
        "WG": config.wg,
        "LANES": config.lanes,
        "ROWS": config.rows,
        "UNROLL": config.unroll,
        "LANES_BLOCKED": int(config.lane_order == "blocked"),
        "K_UNITS": config.k_units,
        "K_TAIL": int(config.k % 32 != 0),
        "COLS": config.columns,
        "SUBGROUP": config.shuffle_lanes,
        "GLU": int(config.glu),
        "GELU": int(config.gelu),
        "X_TYPE": int(config.x == "Q8_1"),
        "Y_TYPE": int(config.y == "Q8_1"),
        "LOOP_TILES": int(config.loop_tiles),
        "M_ALIGNED": int(config.m_aligned),
        **{f"BIND_{role.upper()}": binding for binding, role in enumerate(config.roles, 3)},
    }
    # Left out at the shader's defaults: a new parameter then changes no hash of the kernels that do not use it.
    if config.bit_swap != "xor":
        defines["SWAP_BITS"] = get_args(BitSwap).index(config.bit_swap)
    if config.squared_relu:
        defines["SQUARED_RELU"] = 1
    if config.softcap:
        defines["SOFTCAP"] = repr(float(config.softcap))
    if config.pairs_in_shared:
        defines["PAIRS_IN_SHARED"] = 1
    if config.scales != "weights":
        defines["SCALE_SUMS"] = 1
    if config.scales in LEVEL_TABLES:
        defines["LEVEL_TABLE"] = LEVEL_TABLES[config.scales]
    if config.experts != "none":
        defines["N_USED"] = config.n_used
    if config.experts == "heads":
        defines["X_UNITS"] = config.x_width // 32
    if config.glu_clamp:
        defines |= {f"GLU_{name}": repr(float(value)) for name, value in zip(("ALPHA", "LIMIT"), config.glu_clamp, strict=True)}
    if config.prologue == "norm":
        defines["THREAD_QUADS"] = ceil_div(config.k // 4, config.wg)
    if config.expert_choice:
        defines |= {"TOPK" if config.last_chooses else "CHOOSE": 1, **config.expert_choice.defines}
        defines |= {"TOPK_SCALE": repr(config.choice_scale), "BIND_TOPK": 3 + len(config.roles)}
    if config.stores_sum:
        defines["BIND_SUM"] = 3 + len(config.roles)
    if config.prologue == "norm" or config.y == "Q8_1" or config.expert_choice:
        defines["REDUCE_SUBGROUP"] = int(config.reduce_subgroup)
        defines["SUBGROUP_SIZE"] = config.subgroup if config.subgroup > 1 else 0
    return defines


def _shape_adjustments(choice: Choice, config: GemvConfig, ctx: LowerContext) -> Iterator[Adjustment]:
    """Of threads, lanes, rows and unroll."""
    caps, q8_out = ctx.caps, config.y == "Q8_1"
    need = "GLU takes rows in pairs" if config.glu else "one row a lane at most"
    need = f"a Q8_1 output takes tiles of {32 << config.glu} rows" if q8_out else need
    limits = {
        f"maxComputeWorkGroupInvocations is {caps.max_workgroup_invocations}": caps.max_workgroup_invocations,
        f"maxComputeWorkGroupSize[0] is {caps.max_workgroup_size[0]}": caps.max_workgroup_size[0],
    }
    if config.required and caps.max_workgroup_subgroups:
        key = f"{caps.max_workgroup_subgroups} subgroups of {config.required} at most (maxComputeWorkgroupSubgroups)"
        limits[key] = config.required * caps.max_workgroup_subgroups
    units = config.walk_units
    fewer = min(limits, key=lambda limit: limits[limit])
    if config.wg < min(choice["wg"], *limits.values()):
        fewer = "a workgroup that reduces has a power of two of threads"
    few = f"a row has {units} units of 32 weights" if units <= config.lanes < choice["lanes"] else need
    reasons = {
        "wg": fewer if config.wg < choice["wg"] else need,
        "lanes": f"the workgroup has {config.wg} threads" if choice["lanes"] > config.wg else few,
        "rows": need,
        "unroll": f"{units} units of 32 weights are spread over {config.lanes} lanes",
    }
    for name, why in reasons.items():
        if choice[name] != getattr(config, name):
            yield Adjustment(name, choice[name], getattr(config, name), why)


def _other_adjustments(choice: Choice, config: GemvConfig, node: LinearNode, ctx: LowerContext) -> Iterator[Adjustment]:
    """Of how x and the weights are loaded, of subgroups and of tokens."""
    caps = ctx.caps
    if choice["prefetch"] != config.prefetch:
        why = "x is prefetched where it is one token's Q8_1, in memory, and a row takes several chunks"
        yield Adjustment("prefetch", choice["prefetch"], config.prefetch, why)
    if choice["lane_order"] != config.lane_order:
        if config.unroll > 1 and config.unroll == power_of_two(config.unroll):
            why = f"a row's {config.k_units} units of 32 weights are no multiple of {config.lanes * config.unroll}"
        else:
            why = f"a lane takes {config.unroll} units at once, no power of two above 1"
        yield Adjustment("lane_order", choice["lane_order"], config.lane_order, why)
    if choice["pairs_in_shared"] and not config.pairs_in_shared and config.path == "int" and config.pairs:
        yield Adjustment("pairs_in_shared", True, False, f"{caps.max_shared_memory} bytes of shared memory do not hold the table")
    copies = config.prologue == "copy"
    if choice["x_in_shared"] != copies:
        yield Adjustment("x_in_shared", choice["x_in_shared"], copies, _why_copied(config, node, ctx))
    if choice["subgroup"] not in (DEFAULT_SUBGROUP, config.required):
        why = f"sizes from {caps.subgroup_min} to {caps.subgroup_max}" if caps.subgroup_required_size else "no way to fix the size"
        got: int | str = config.subgroup if config.subgroup > 1 else "unknown"
        yield Adjustment("subgroup", choice["subgroup"], got, f"{caps.name} has {why}")
    if config.subgroup == 1:
        why = "its subgroup size is not known beforehand" if caps.has_subgroup_ops("shuffle") else "it has no shuffles"
        yield Adjustment("sums", "shuffles", "shared memory", why)
    tokens = min(node.n, MAX_COLUMNS, EXACT_SUMS // config.rows if ctx.exact else MAX_COLUMNS)
    if config.experts == "none" and config.columns < tokens:
        yield Adjustment("tokens", tokens, config.columns, f"{caps.max_shared_memory} bytes of shared memory hold the sums of no more")


def _why_copied(config: GemvConfig, node: LinearNode, ctx: LowerContext) -> str:
    """Why x goes through shared memory though the tables say no, or the other way round."""
    if config.prologue == "copy":
        return "a barrier-free stage spins on x while it copies it"
    if config.prologue == "norm":
        return "the norm in the prologue brings x there"
    if config.path != "int" or config.x != "Q8_1":
        return "with barriers, only a Q8_1 x of the integer path is copied"
    if node.experts == "none" and node.n > 1:
        return f"it takes one token, got {node.n}"
    return f"{ctx.caps.max_shared_memory} bytes of shared memory do not hold it"


PROLOGUE_SHARED = 8192 + 2048
"""Shared memory beside x: parts of a reduction over 1024 threads without subgroup operations, and the row sums."""


def choice_problem(node: Node, ctx: LowerContext) -> str:
    """Why a LINEAR node with the role "logits" must be given the experts' ids instead; "" when it can choose them."""
    gemv = LinearNode.of(node)
    if gemv.n != 1:
        return f"it takes one token, got {gemv.n}"
    if 5 + len(gemv.extra) > ctx.caps.max_storage_bindings:
        return f"it binds {5 + len(gemv.extra)} storage buffers, {ctx.caps.name} takes {ctx.caps.max_storage_bindings}"
    try:
        configure(gemv, choice_of(gemv, ctx).path, ctx)
    except PlanError as e:
        return str(e)
    return ""


def prologue_problem(quant: str, k: int, n: int, path: Path, ctx: LowerContext, buffers: int = 0) -> str:
    """Why x [n, k] cannot be brought into shared memory by every workgroup of a GEMV with such weights; "" when it can.

    buffers  storage buffers that the GEMV binds then
    """
    need = (k // 32 * 40 if path == "int" else 4 * k) + codebook_bytes(quant, ctx.caps)
    if n > 1:
        return f"it takes one token, got {n}"
    if k % 32:
        return f"k = {k} is not a multiple of 32"
    if buffers > ctx.caps.max_storage_bindings:
        return f"it binds {buffers} storage buffers, {ctx.caps.name} takes {ctx.caps.max_storage_bindings}"
    if need + PROLOGUE_SHARED > ctx.caps.max_shared_memory:
        return f"{quant} with k = {k} needs {need} bytes of shared memory, {ctx.caps.name} has {ctx.caps.max_shared_memory}"
    return ""
