"""The GEMM kernels (shaders/gemm) against numpy: every weight type, ragged edges, experts with no, one and all tokens."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chain_kit import Array, nmse, run_chain

from vkback import quants
from vkback.device import Device
from vkback.graph import Node, Tensor
from vkback.ops.attention import prompt as attention_prompt
from vkback.ops.attention.flash import FlashAttnExt, prompt_problem
from vkback.ops.cooperative_matrix import matrix_shape, row_lanes
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import gemm
from vkback.ops.matmul import pack as gemm_pack
from vkback.ops.matmul import route as gemm_route
from vkback.ops.matmul.gemm_problem import Gemm, GemmKernel, GemmShape, default_shape
from vkback.ops.matmul.linear_node import QUANTS, weight
from vkback.ops.matmul.pack_nodes import LOWER, route_node, with_route
from vkback.ops.quantize import quantize_dispatch
from vkback.ops.workgroup import lanes_for
from vkback.paths import shader_root
from vkback.program.fragments import fragments_alike, lanes_of_row, row_lanes_found
from vkback.shader import ShaderLibrary
from vkback.shader.prebuilt import stale

BOUNDS = {"f32": 1e-10, "int_dot": 2e-4, "coop_mat": 2e-6}
"""NMSE. f32: sums of a few hundred products, each rounded to 2^-24: about k * 2^-50. int_dot: x in steps of amax/127 a unit, 1.5e-5 on
uniform values, four times that for one unlucky unit, and twice for a Q8_1 output. coop_mat: x and w rounded to f16, 2^-24 / 3 each by
energy (half a step of 2^-11), scales and biases of blocks rounded as well, which are up to five times as large as the weights that they
add up to."""

GLU_FACTOR = 6
"""silu passes a gate's error on at up to twice its size, by energy four times, and the errors of up and of the output come on top."""

OAI = {"alpha": 1.702, "limit": 1.0}


@pytest.fixture(scope="module")
def library() -> ShaderLibrary:
    return ShaderLibrary()


@dataclass(frozen=True)
class Spec:
    """A product. ids: "" dense; "spread": experts by chance; "one": all tokens take the same; "few": one expert has a single token.
    narrow: on a CPU driver with tiles of eight columns instead of 16, which it compiles in half the time."""

    kernel: GemmKernel
    quant: str
    m: int
    n: int
    k: int
    ids: str = ""
    used: int = 2
    experts: int = 5
    shared: bool = True
    bias: bool = False
    residual: bool = False
    glu: str = ""
    out: str = "F32"
    narrow: bool = False

    def __str__(self) -> str:
        parts = [self.kernel, self.quant, f"{self.m}x{self.n}x{self.k}", self.ids and f"{self.ids}-{self.experts}-{self.used}"]
        parts += [] if self.shared else ["own-x"]
        return "-".join(p for p in (*parts, "bias" * self.bias, "residual" * self.residual, self.glu, self.out * (self.out != "F32")) if p)


def chosen_ids(spec: Spec, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """Experts of each token; expert 0 is never taken."""
    others = np.arange(1, spec.experts)
    ids = np.stack([rng.permutation(others)[: spec.used] for _ in range(spec.n)])
    if spec.ids == "one":
        ids[:] = others[: spec.used]
    if spec.ids == "few":
        ids[:] = others[1 : spec.used + 1]
        ids[0] = others[: spec.used]
    return ids.astype(np.int32)


def glu(spec: Spec, y: Array) -> Array:
    gate, up = y[..., 0::2], y[..., 1::2]
    if spec.glu == "oai":
        gate = np.minimum(gate, OAI["limit"])
        return np.asarray(gate / (1 + np.exp(-OAI["alpha"] * gate)) * (np.clip(up, -OAI["limit"], OAI["limit"]) + 1))
    if spec.glu == "gelu":
        return np.asarray(0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up)
    return np.asarray(gate / (1 + np.exp(-gate)) * up)


def run_spec(spec: Spec, device: Device, library: ShaderLibrary, ctx: LowerContext, shape: GemmShape | None = None) -> float:
    """NMSE of a product."""
    rng = np.random.default_rng(zlib.crc32(str(spec).encode()))
    shape = shape or default_shape(spec.kernel, spec.n, device.caps)
    if spec.narrow and device.caps.software and spec.kernel != "coop_mat":
        shape = dataclasses.replace(shape, tile_n=8)
    if spec.out == "Q8_1":
        shape = dataclasses.replace(shape, tile_m=shape.subgroups * lanes_for(device.caps)[0] * (8 if spec.glu else 4))
    grouped = bool(spec.ids)
    w = weight("w", spec.quant, (spec.experts, spec.m, spec.k) if grouped else (spec.m, spec.k))
    slots = spec.n * spec.used if grouped else spec.n
    rows = spec.m // 2 if spec.glu else spec.m
    x = Tensor("x", "F32", (spec.n if spec.shared else slots, spec.k), "input")
    y = Tensor("y", spec.out, (slots, rows))
    raw = quants.random_blocks(spec.quant, prod(w.shape[:-1]), spec.k, rng, std=0.5)
    values: dict[str, npt.NDArray[Any]] = {"w": raw, "x": rng.uniform(-1, 1, x.shape).astype(np.float32)}
    inputs = [w, x]
    product = Gemm(w, x, y, slots, glu=spec.glu, **(OAI if spec.glu == "oai" else {}))  # type: ignore[arg-type]
    chain: list[Dispatch] = []
    if grouped:
        ids = Tensor("ids", "I32", (spec.n, spec.used), "input")
        values["ids"] = chosen_ids(spec, rng)
        inputs.append(ids)
        routes = gemm_route.route_tensor("route", slots, spec.experts, shape.tile_n)
        chain.append(gemm_route.route(ids, routes, spec.experts, shape.tile_n, device.caps))
        product = dataclasses.replace(product, route=routes, x_shared=spec.used if spec.shared else 1)
    for name in ("bias", "residual"):
        if getattr(spec, name):
            t = Tensor(name, "F32", (prod(w.shape[:-1]),) if name == "bias" else y.shape, "weight" if name == "bias" else "input")
            values[name] = rng.uniform(-1, 1, t.shape).astype(np.float32)
            inputs.append(t)
            product = dataclasses.replace(product, bias=t) if name == "bias" else dataclasses.replace(product, residual=t)
    if spec.kernel == "int_dot":
        x8 = Tensor("x8", "Q8_1", x.shape)
        chain += quantize_dispatch(x, x8, ctx)
        product = dataclasses.replace(product, x=x8)
    if spec.kernel == "coop_mat":
        experts = spec.experts if grouped else 0
        x16 = gemm_pack.packed("x16", slots, spec.k, shape, experts)
        chain.append(gemm_pack.pack_f16(x, x16, slots, shape, device.caps, routes=product.route, x_shared=product.x_shared))
        product = dataclasses.replace(product, x=x16)
    chain += gemm.lower(product, shape, device.caps)
    got = run_chain(device, library, ctx, chain, values, tuple(inputs), (y,))["y"]
    return nmse(got, expected(spec, values, w))


def expected(spec: Spec, values: dict[str, npt.NDArray[Any]], w: Tensor) -> Array:
    """The product in float64."""
    weights = quants.decode(spec.quant, values["w"]).reshape(w.shape).astype(np.float64)
    x = values["x"].astype(np.float64)
    bias = values["bias"].reshape(w.shape[:-1]) if spec.bias else np.zeros(w.shape[:-1])
    if spec.ids:
        ids = values["ids"].reshape(-1).astype(int)
        of = np.arange(len(ids)) // spec.used if spec.shared else np.arange(len(ids))
        want = np.stack([weights[e] @ x[r] + bias[e] for e, r in zip(ids, of, strict=True)])
    else:
        want = x @ weights.T + bias
    if spec.glu:
        want = glu(spec, want)
    return want + values["residual"] if spec.residual else want


def check(spec: Spec, device: Device, library: ShaderLibrary, ctx: LowerContext, shape: GemmShape | None = None) -> None:
    bound = BOUNDS[spec.kernel] * (GLU_FACTOR if spec.glu else 1)
    found = run_spec(spec, device, library, ctx, shape)
    assert found <= bound, f"NMSE {found:.2e}, bound {bound:.0e}"


def specs() -> Iterator[Spec]:
    """Every type both ways; then, for a few types, what a product may have around it."""
    for kernel in ("f32", "int_dot", "coop_mat"):
        for quant in QUANTS:
            if kernel != "int_dot" or quant not in ("F32", "F16", "BF16"):
                yield Spec(kernel, quant, 45, 19, 512, narrow=True)
        for quant in ("Q4_K", "MXFP4"):
            yield Spec(kernel, quant, 33, 1, 256)
            yield Spec(kernel, quant, 100, 7, 768, bias=True, residual=True)
            yield Spec(kernel, quant, 70, 21, 256, glu="silu", bias=True)
            yield Spec(kernel, quant, 70, 21, 256, glu="gelu")
            for ids in ("spread", "one", "few"):
                yield Spec(kernel, quant, 40, 21, 256, ids=ids, bias=True)
            yield Spec(kernel, quant, 34, 9, 256, ids="spread", shared=False, glu="oai", bias=True)
            yield Spec(kernel, quant, 40, 3, 256, ids="spread", used=3, residual=True)
    for k in (33, 65, 80):
        yield Spec("f32", "F16", 17, 9, k)
        yield Spec("coop_mat", "F16", 17, 9, k)
    for glu in ("", "silu"):
        yield Spec("int_dot", "Q8_0", 100, 9, 256, glu=glu, out="Q8_1")
        yield Spec("int_dot", "Q8_0", 64, 9, 256, ids="spread", glu=glu, out="Q8_1")


@pytest.mark.vulkan
@pytest.mark.parametrize("spec", list(specs()), ids=str)
def test_product(spec: Spec, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    if spec.kernel == "int_dot" and not device.caps.int_dot:
        pytest.skip(f"{device.caps.name} has no integer dot product")
    if spec.kernel == "coop_mat" and matrix_shape(device.caps) is None:
        pytest.skip(f"{device.caps.name} has no cooperative matrices")
    check(spec, device, library, ctx)


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("n", "used", "experts", "kind"), [(1, 1, 2, "spread"), (50, 4, 9, "spread"), (33, 2, 5, "one"), (40, 1, 200, "few")]
)
def test_route(n: int, used: int, experts: int, kind: str, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    spec = Spec("f32", "F32", 1, n, 1, ids=kind, used=used, experts=experts)
    ids = chosen_ids(spec, np.random.default_rng(5))
    source, tile_n = Tensor("ids", "I32", ids.shape, "input"), 16
    out = gemm_route.route_tensor("route", ids.size, experts, tile_n)
    dispatch = gemm_route.route(source, out, experts, tile_n, device.caps)
    made = run_chain(device, library, ctx, [dispatch], {"ids": ids}, (source,), (out,))["route"].astype(int)
    tiles, order = made[: -ids.size].reshape(-1, 4), made[-ids.size :]
    assert sorted(order) == list(range(ids.size))
    place = 0
    for expert, first, count, _ in tiles[tiles[:, 2] > 0]:
        assert first == place and 0 < count <= tile_n
        assert (ids.reshape(-1)[order[first : first + count]] == expert).all()
        place += count
    assert place == ids.size
    used_tiles = sum(-(-c // tile_n) for c in np.bincount(ids.reshape(-1), minlength=experts))
    assert np.count_nonzero(tiles[:, 2]) == used_tiles <= len(tiles)


def matrices(device: Device) -> GemmShape:
    """The shape that coop_mat takes by default; skips the test on devices without matrices."""
    if matrix_shape(device.caps) is None:
        pytest.skip(f"{device.caps.name} has no cooperative matrices")
    return default_shape("coop_mat", 64, device.caps)


@pytest.mark.vulkan
@pytest.mark.parametrize("ids", ["", "spread"])
@pytest.mark.parametrize(("step_k", "fragments"), [(32, False), (64, True), (64, False)])
def test_cuts_of_matrices(step_k: int, fragments: bool, ids: str, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    shape = dataclasses.replace(matrices(device), step_k=step_k, fragments=fragments)
    # Nine units: a step of two has one too many in the end.
    check(Spec("coop_mat", "Q8_0", 70, 21, 288, ids=ids, bias=True), device, library, ctx, shape)
    check(Spec("coop_mat", "F16", 70, 21, 80, ids=ids), device, library, ctx, shape)


@pytest.mark.vulkan
@pytest.mark.parametrize("around", [{}, {"bias": True, "residual": True}, {"glu": "silu"}], ids=str)
def test_split_k(around: dict[str, Any], device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    for parts in (2, 3):
        spec = Spec("coop_mat", "Q4_K", 70, 21, 512, **around)
        check(spec, device, library, ctx, dataclasses.replace(matrices(device), split_k=parts))


@pytest.mark.vulkan
@pytest.mark.parametrize("fragments", [True, False])
@pytest.mark.parametrize("ids", ["", "spread"])
@pytest.mark.parametrize("norm", [True, False])
def test_f16_output_is_the_next_input(
    norm: bool, ids: str, fragments: bool, device: Device, library: ShaderLibrary, ctx: LowerContext
) -> None:
    """A normed x, gate and up with their GLU, and down from what they leave in f16: 40 values a row, so that the last unit needs zeros."""
    shape = dataclasses.replace(matrices(device), fragments=fragments)
    rng = np.random.default_rng(11)
    n, k, inner, m, used, experts = 21, 96, 40, 33, 2, 5
    slots, stack = (n * used, (experts,)) if ids else (n, ())
    gate_up, down = weight("gate_up", "F16", (*stack, 2 * inner, k)), weight("down", "F16", (*stack, m, inner))
    x, scale = Tensor("x", "F32", (n, k), "input"), Tensor("norm", "F32", (k,), "weight")
    y = Tensor("y", "F32", (slots, m))
    values: dict[str, npt.NDArray[Any]] = {
        w.name: quants.random_blocks("F16", prod(w.shape[:-1]), w.shape[-1], rng, std=0.5) for w in (gate_up, down)
    }
    values |= {"x": rng.uniform(-1, 1, (n, k)).astype(np.float32), "norm": rng.uniform(0.5, 1.5, k).astype(np.float32)}
    inputs, chain, routes = [gate_up, down, x, scale], list[Dispatch](), None
    chosen = np.zeros((n, 1), np.int32)
    if ids:
        source = Tensor("ids", "I32", (n, used), "input")
        values["ids"] = chosen = chosen_ids(Spec("coop_mat", "F16", m, n, k, ids=ids, used=used, experts=experts), rng)
        routes = gemm_route.route_tensor("route", slots, experts, shape.tile_n)
        chain.append(gemm_route.route(source, routes, experts, shape.tile_n, device.caps))
        inputs.append(source)
    many = experts if ids else 0
    x16, inner16 = gemm_pack.packed("x16", slots, k, shape, many), gemm_pack.packed("inner16", slots, inner, shape, many)
    inner16 = dataclasses.replace(inner16, shape=(inner16.shape[0], 64))
    first = Gemm(gate_up, x16, inner16, slots, route=routes, x_shared=used if ids else 1, glu="silu", x_scale=0.5, out_scale=0.25)
    second = Gemm(down, inner16, y, slots, route=routes, x_scale=0.25)
    chain.append(
        gemm_pack.pack_f16(
            x,
            x16,
            slots,
            shape,
            device.caps,
            norm=scale if norm else None,
            eps=1e-5 if norm else None,
            routes=routes,
            x_shared=first.x_shared,
            scale=0.5,
        )
    )
    chain += gemm.lower(first, shape, device.caps) + gemm.lower(second, shape, device.caps)
    got = run_chain(device, library, ctx, chain, values, tuple(inputs), (y,))["y"]
    plain = values["x"].astype(np.float64)
    if norm:
        plain = plain / np.sqrt(np.square(plain).mean(-1, keepdims=True) + 1e-5) * values["norm"]
    w1, w2 = (quants.decode("F16", values[w.name]).reshape(-1, *w.shape[-2:]).astype(np.float64) for w in (gate_up, down))
    want = []
    for slot, e in enumerate(chosen.reshape(-1)):
        both = w1[e] @ plain[slot // used if ids else slot]
        want.append(w2[e] @ (both[0::2] / (1 + np.exp(-both[0::2])) * both[1::2]))
    assert nmse(got, np.stack(want)) < BOUNDS["coop_mat"]


@pytest.mark.vulkan
@pytest.mark.parametrize("fragments", [True, False])
@pytest.mark.parametrize(("heads", "taken"), [((4, 1), 4), ((6, 2), 1), ((8, 1), 4)], ids=str)
def test_attention_leaves_what_a_product_takes(
    heads: tuple[int, int], taken: int, fragments: bool, device: Device, library: ShaderLibrary, ctx: LowerContext
) -> None:
    """Attention in f16, packed, times the identity. A tile has whole matrices of tokens, of all heads of a kv head or of some."""
    reader = dataclasses.replace(matrices(device), fragments=fragments)
    rows, columns, _ = reader.matrix
    shape = attention_prompt.PromptShape("matrix", 4 * columns, 32, 1, matrix=reader.matrix)
    shape = dataclasses.replace(shape, warps=shape.tile_q // rows)
    n, hd = 4 * columns + 3, 32
    problem = FlashAttnExt().build_case(*heads, hd, kv=n + 20, nb=n).build()
    width = heads[0] * hd
    packed = gemm_pack.packed("kqv_out", n, width, reader)
    y, identity = Tensor("y", "F32", (n, width)), weight("one", "F16", (width, width))
    product = dataclasses.replace(prompt_problem(problem.node), y=packed, fragments=fragments)
    assert not fragments or attention_prompt.heads_of_fragments(shape, heads[0] // heads[1], hd, device.caps) == taken
    chain = [attention_prompt.lower(product, shape, device.caps), *gemm.lower(Gemm(identity, packed, y, n), reader, device.caps)]
    values = {**problem.values, "one": np.eye(width, dtype=np.float16).view(np.uint8)}
    got = run_chain(device, library, ctx, chain, values, (*problem.node.inputs, identity), (y,))["y"]
    (want,) = FlashAttnExt().reference([problem.values[t.name] for t in problem.node.inputs], problem.node.params)
    assert nmse(got, want) <= attention_prompt.tolerance(shape, packed).nmse


@pytest.mark.vulkan
def test_fragments_are_alike(device: Device, library: ShaderLibrary) -> None:
    assert fragments_alike(device, library, matrices(device).matrix)


@pytest.mark.vulkan
def test_rows_are_held_as_known(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    matrices(device)
    assert row_lanes_found(device, library) == row_lanes(ctx)


def held(lanes: int, t: int, matrix: tuple[int, int, int], along: Callable[[int, int], int]) -> npt.NDArray[np.int64]:
    """Elements that lanes hold where t of them share a row; along(lane of the row, number): place along K, or column of a sum."""
    rows, columns, depth = matrix
    out = np.full((3, lanes, 16), -1, np.int64)
    for lane in range(lanes):
        for i in range(rows * depth // lanes):
            row, k = lane // t + lanes // t * (i // (depth // t)), along(lane % t, i % (depth // t))
            out[0, lane, i] = row * depth + k
        for i in range(depth * columns // lanes):
            column, k = lane // t + lanes // t * (i // (depth // t)), along(lane % t, i % (depth // t))
            out[1, lane, i] = k * columns + column
        for i in range(rows * columns // lanes):
            row, column = lane // t + lanes // t * (i // (columns // t)), along(lane % t, i % (columns // t))
            out[2, lane, i] = row * columns + column
    return out


def test_order_of_rows_is_recognized() -> None:
    """NVIDIA's order and llvmpipe's, and two that no kernel can use."""
    pairs = held(32, 4, (16, 16, 16), lambda t, i: 2 * t + (i & 1) + 8 * (i >> 1))
    assert lanes_of_row(pairs, (16, 16, 16)) == 4
    assert lanes_of_row(held(32, 4, (16, 8, 16), lambda t, i: 2 * t + (i & 1) + 8 * (i >> 1)), (16, 8, 16)) == 4
    assert lanes_of_row(held(8, 8, (8, 8, 8), lambda t, i: t), (8, 8, 8)) == 8
    swapped = pairs.copy()
    swapped[1, :, [0, 1]] = swapped[1, :, [1, 0]]
    assert lanes_of_row(swapped, (16, 16, 16)) == 0
    assert lanes_of_row(np.roll(pairs, 1, axis=1), (16, 16, 16)) == 0


def test_prebuilt_modules_are_of_this_source() -> None:
    assert not stale(shader_root(), gemm.prebuilt_variants()), "run `make prebuilt` with a GLSL compiler that knows cooperative matrices"


def test_prebuilt_modules_serve_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShaderLibrary, "compiler", None)
    library = ShaderLibrary(cache_dir=tmp_path)
    for variant in gemm.prebuilt_variants():
        assert library.spirv(variant)[:4] == bytes.fromhex("03022307")


@pytest.mark.vulkan
def test_what_does_not_fit_is_refused(device: Device) -> None:
    w, x, y = weight("w", "Q4_K", (64, 256)), Tensor("x", "F32", (4, 256)), Tensor("y", "F32", (4, 64))
    shape = default_shape("f32", 4, device.caps)
    product = Gemm(w, x, y, 4)
    with pytest.raises(PlanError, match="takes x as Q8_1"):
        gemm.lower(product, dataclasses.replace(shape, kernel="int_dot"), device.caps)
    with pytest.raises(PlanError, match="no multiple"):
        gemm.lower(product, dataclasses.replace(shape, tile_m=shape.tile_m + 1), device.caps)
    with pytest.raises(PlanError, match="alternate gate and up"):
        dataclasses.replace(product, w=weight("w", "Q4_K", (63, 256)), glu="silu")


@pytest.mark.vulkan
@pytest.mark.parametrize(("n", "used", "experts"), [(1, 1, 2), (8, 4, 9), (33, 2, 5), (5, 8, 130)])
def test_route_by_the_choice_of_experts(n: int, used: int, experts: int, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """The dispatch that chooses the experts sorts them, too."""
    logits = np.random.default_rng(6).standard_normal((n, experts)).astype(np.float32)
    source, weights = Tensor("logits", "F32", logits.shape, "input"), Tensor("weights", "F32", (n, used))
    ids = Tensor("ids", "I32", (n, used))
    params = {"n_used": used, "norm": True, "gating": "softmax", "scale": 1.0}
    topk, made = Node("TOPK_MOE", (source,), (weights, ids), params), route_node(ids, experts, 8)
    (d,) = LOWER["TOPK_ROUTE"](with_route(topk, made), ctx)
    got = run_chain(device, library, ctx, [d], {"logits": logits}, (source,), (weights, ids, *made.outputs))
    chosen, found = got["ids"].astype(int).reshape(-1), got[made.outputs[0].name].astype(int)
    np.testing.assert_array_equal(chosen.reshape(n, used), np.argsort(-logits, axis=1, kind="stable")[:, :used])
    tiles, order = found[: -n * used].reshape(-1, 4), found[-n * used :]
    assert sorted(order) == list(range(n * used)) and tiles[:, 2].sum() == n * used
    for expert, first, count, _ in tiles:
        assert count <= 8 and (chosen[order[first : first + count]] == expert).all()
