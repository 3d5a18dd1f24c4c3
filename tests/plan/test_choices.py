"""Kernels chosen once: a plan asks the tables at most once for each product, and passes keep what was chosen."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
from kernel_paths import planned_for, with_params

from vkback.graph import Node, Tensor
from vkback.models import Model
from vkback.ops.family import Choice, Chooser
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import batched, gemm, linear, linear_heads
from vkback.ops.matmul import choice as product_choice
from vkback.ops.matmul.choice import ProductChoice, choose
from vkback.ops.matmul.gemm_problem import Gemm, default_shape
from vkback.ops.matmul.linear_node import LinearNode, weight
from vkback.ops.matmul.pack import packed
from vkback.paths import builtin_model
from vkback.plan.planner import fused_nodes, plan

PRODUCTS = ("LINEAR", "LINEAR_HEADS", "MUL_MAT", "MUL_MAT_ID")


class Counting:
    """Tables that count what they are asked, by family."""

    def __init__(self, tables: Chooser) -> None:
        self.tables, self.asked = tables, Counter[str]()

    def pick(self, family: str, **query: Any) -> Choice:
        self.asked[family] += 1
        return self.tables.pick(family, **query)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the products that a kernel was chosen for."""
    found: list[str] = []

    def counted(node: LinearNode, ctx: LowerContext) -> ProductChoice:
        found.append(node.node.name)
        return choose(node, ctx)

    for module in (product_choice, linear, linear_heads, batched):
        monkeypatch.setattr(module, "choose", counted)
    return found


@pytest.mark.parametrize(("n", "products"), [(1, 27), (16, 27), (512, 27)])
@pytest.mark.parametrize("profile", ["nvidia_h200_linux", "llvmpipe_mesa_22_debian12", "amd_rx_7900_xtx_radv"])
def test_a_plan_chooses_each_product_once(n: int, products: int, profile: str, made: list[str]) -> None:
    """demo-dense: in each of 6 layers Q with K and V (two types: two products in some layers), output, gate with up, down; and the head."""
    ctx = planned_for(profile)
    tables = Counting(ctx.tuning)
    plan(Model.open(builtin_model("demo-dense")).graph(n, 64, head="last"), dataclasses.replace(ctx, tuning=tables))
    assert len(made) == products
    assert tables.asked["gemm"] <= (products if n > 1 else 0)
    assert tables.asked["gemv_path"] <= products
    assert tables.asked["attention"] == 6


@pytest.mark.parametrize("n", [1, 4, 512])
def test_a_schedule_holds_every_choice(n: int) -> None:
    """Of products that became one node with a store, too, and of the router."""
    ctx, graph = planned_for("nvidia_h200_linux"), Model.open(builtin_model("demo-moe")).graph(n, 64, head="all")
    tables = Counting(ctx.tuning)
    schedule = plan(graph, dataclasses.replace(ctx, tuning=tables))
    kernels = Counter(choice.kernel for _, choice in schedule.choices)
    products = sum(op in {"gemv", "coop_mat", "coop_reg", "int_dot", "f32"} for op in kernels.elements())
    assert products >= tables.asked["gemv_path"] > 0
    assert kernels.total() - products == tables.asked["attention"]
    assert all(str(choice).endswith(choice.source) for _, choice in schedule.choices)


@pytest.mark.parametrize("model", ["demo-dense", "demo-moe"])
@pytest.mark.parametrize("n", [1, 8, 64])
def test_what_was_chosen_stays_right(model: str, n: int) -> None:
    """Queried anew about the nodes that the last pass has made, the tables say the same."""
    ctx = planned_for("nvidia_h200_linux")
    nodes, ctx = fused_nodes(Model.open(builtin_model(model)).graph(n, 64, head="all"), ctx)
    seen = [node for node in nodes if node.op in PRODUCTS]
    assert seen
    for node in seen:
        assert node.choice is not None, node.name
        again = choose(LinearNode.of(node), ctx)
        assert isinstance(node.choice, ProductChoice)
        assert (node.choice.kernel, node.choice.shape, node.choice.path) == (again.kernel, again.shape, again.path), node.name


@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("n", [4, 24, 512])
@pytest.mark.parametrize("profile", ["nvidia_h200_linux", "llvmpipe_mesa_22_debian12", "apple_m1_honeykrisp"])
def test_an_output_as_q8_1_is_what_would_be_chosen_for_it(glu: bool, n: int, profile: str) -> None:
    ctx = planned_for(profile)

    def product(y: str) -> LinearNode:
        w, x = weight("w", "Q4_K", (512, 256)), Tensor("x", "F32", (n, 256))
        return LinearNode.of(Node("LINEAR", (w, x), (Tensor("y", y, (n, 512 >> glu)),), {"roles": ("w", "x"), "glu": glu}))

    plain, q8_1 = choose(product("F32"), ctx), choose(product("Q8_1"), ctx)
    got = plain.storing(product("Q8_1").node, ctx)
    assert (got.kernel, got.shape, got.rounds) == (q8_1.kernel, q8_1.shape, q8_1.rounds)


@pytest.mark.parametrize(
    ("cut", "why"),
    [
        ({"warp_m": 40}, "parts are no multiples of matrices"),
        ({"tile_m": 192}, "tiles are no multiples of parts"),
        ({"step_k": 48}, "steps of 48 along K"),
        ({"warp_m": 8 * 16, "warp_n": 8 * 16, "tile_m": 4 * 128, "step_k": 32}, "81936 bytes of shared memory, NVIDIA H200 has 49152"),
        ({"tile_m": 64 * 16, "tile_n": 16, "warp_m": 16, "warp_n": 16}, "2048 threads, NVIDIA H200 has 1024"),
        ({}, ""),
    ],
    ids=["matrices", "parts", "steps", "memory", "threads", "fits"],
)
def test_tables_and_callers_cut_a_gemm_by_one_rule(cut: dict[str, int], why: str) -> None:
    """Of a shape that does not fit the device the planner makes a GEMV, and the lowering of a GEMM refuses it, with the reason."""
    params: dict[str, Any] = {
        "kernel": "coop_mat",
        "tile_m": 128,
        "tile_n": 128,
        "step_k": 64,
        "warp_m": 64,
        "warp_n": 64,
        "split_k": 1,
        **cut,
    }
    if "tile_m" in cut and "warp_m" not in cut:
        params["warp_m"] = 128
    ctx = planned_for("nvidia_h200_linux")
    w, x, y = weight("w", "Q4_K", (512, 256)), Tensor("x", "F32", (512, 256)), Tensor("y", "F32", (512, 512))
    chosen = choose(LinearNode.of(Node("LINEAR", (w, x), (y,), {"roles": ("w", "x")})), with_params(ctx, **params))
    assert chosen.kernel == ("gemv" if why else "coop_mat")
    subgroups = params["tile_m"] // params["warp_m"] * (params["tile_n"] // params["warp_n"])
    sizes = {name: params[name] for name in ("tile_m", "tile_n", "step_k", "warp_m", "warp_n")}
    shape = dataclasses.replace(default_shape("coop_mat", 512, ctx.caps), subgroups=subgroups, **sizes)
    product = Gemm(w, packed("x_f16", 512, 256, shape), y, 512)
    with pytest.raises(PlanError, match=re.escape(why)) if why else nullcontext():
        gemm.lower(product, shape, ctx.caps)


def test_a_choice_can_be_printed() -> None:
    ctx = planned_for("nvidia_h200_linux")
    nodes, ctx = fused_nodes(Model.open(builtin_model("demo-dense")).graph(512, 512, head="all"), ctx)
    texts = {str(node.choice) for node in nodes if node.op == "LINEAR"}
    (attention,) = {str(node.choice) for node in nodes if node.op == "FLASH_ATTN_EXT"}
    assert re.match(r"matrix \d+x\d+ for \d/\d heads of \d+, 512 tokens, rounds q to F16: nvidia\.toml", attention), attention
    said = re.compile(r"coop_mat \d+x\d+x64 for Q4_K 512x256, 512 tokens, .*rounds x to F16: nvidia\.toml")
    assert any(map(said.match, texts)), texts
