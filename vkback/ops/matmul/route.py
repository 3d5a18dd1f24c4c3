"""The route of a grouped product: the slots in the order of their experts, so that every column tile has slots of one expert.

A slot is one used expert of one token; slot s belongs to token s // used.
"""

from __future__ import annotations

from vkback.device import Capabilities
from vkback.graph import Tensor
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push, spread
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import Defines
from vkback.shader import Variant


def max_tiles(slots: int, experts: int, tile_n: int) -> int:
    """Column tiles that slots of so many experts can fill: one for each expert that has any, and another for each tile_n of the slots
    that are not an expert's first."""
    chosen = min(experts, slots)
    return chosen + (slots - chosen) // tile_n


def route_tensor(name: str, slots: int, experts: int, tile_n: int) -> Tensor:
    """Where a route goes (shaders/gemm/route.comp)."""
    return Tensor(name, "I32", (4 * max_tiles(slots, experts, tile_n) + slots,))


def route(ids: Tensor, out: Tensor, experts: int, tile_n: int, caps: Capabilities) -> Dispatch:
    """The dispatch that makes the route of ids I32 [n, used] in `out` (see `route_tensor`), for products whose tiles have tile_n
    columns."""
    slots = ids.elements
    wg = min(256, caps.max_workgroup_invocations, caps.max_workgroup_size[0])
    defines: Defines = {"WG": wg, "EXPERTS": experts, "TILE_N": tile_n}
    return Dispatch(
        Variant.of("gemm/route.comp", defines),
        (Arg(ids), Arg(out, "w")),
        pack_push(slots, max_tiles(slots, experts, tile_n)),
        (1, 1, 1),
        "ROUTE",
        out.name,
        f"{wg} threads",
        nbytes=nbytes(ids) + nbytes(out),
    )


def route_heads(tokens: int, heads: int, out: Tensor, tile_n: int, caps: Capabilities) -> Dispatch:
    """The dispatch that makes the route of a product by heads: slot t * heads + h is head h of token t."""
    wg = min(256, caps.max_workgroup_invocations, caps.max_workgroup_size[0])
    slots = tokens * heads
    return Dispatch(
        Variant.of("gemm/route_heads.comp", {"WG": wg}),
        (Arg(out, "w"),),
        pack_push(tokens, heads, tile_n, max_tiles(slots, heads, tile_n)),
        spread(ceil_div(slots, wg)),
        "ROUTE",
        out.name,
        f"{wg} threads",
        nbytes=nbytes(out),
    )
