"""ROPE_EXT and ROPE_BACK (shaders/rope/general.comp): RoPE of every mode, for lines of test-backend-ops about ROPE and ROPE_BACK.

    ROPE_EXT  x of any float type [batches, n, heads, dim], pos I32 [n], or [4 n] with several positions a token
              [, factors F32 [pairs]] -> x rotated
              params: mode, n_dims, first, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow, n_ctx_orig
              [, sections, within, back]

    mode    normal: pair i is values 2i and 2i + 1        neox: i and i + n_dims / 2
            mrope: as neox; a pair takes the position (time, height, width, other) of the section it is in, `sections` being counts of
            pairs that repeat        imrope: as mrope, but sections take every third pair in turn, up to three times their count
            vision: pairs i and i + n_dims, n_dims of them, and every section begins with the fastest frequency
    first   value of a head from which on n_dims of them are rotated
    within  View of x that is rotated in place, the output being x
    back    rotates the other way, as the gradient does

ROPE of rope.py is what models run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Problem, Tolerance
from vkback.ops.case_line import CaseLineError, call_with
from vkback.ops.cost import Cost
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.general import copy_dispatch, is_general, lower_general, rounded_to, stored_tolerance, view_in
from vkback.ops.ggml_words import Four, ne_of, one_of_types, shape_of, sized, type_word
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS, Op, register
from vkback.ops.rope import angles as rope_angles
from vkback.ops.training.gradients import Gradient, Scalar, against
from vkback.ops.view import View

MODES = {0: "normal", 2: "neox", 8: "mrope", 24: "vision", 40: "imrope"}
"""By ggml's numbers."""


def pairs_of(params: Mapping[str, Any]) -> int:
    """Pairs of a head that are rotated."""
    return int(params["n_dims"]) // (1 if params["mode"] == "vision" else 2)


def sector_of(pair: int, params: Mapping[str, Any]) -> tuple[int, int]:
    """Number of the position that a pair takes, and of the pair within the section."""
    mode = params["mode"]
    if mode in ("normal", "neox"):
        return 0, pair
    sections = params["sections"]
    sector = pair % sum(sections)
    if mode == "imrope":
        third = sector % 3
        return (third if sector < 3 * sections[third] else 3), pair
    starts = np.cumsum([0, *sections])
    number = int(np.searchsorted(starts, sector, side="right")) - 1
    return number, (sector - int(starts[number]) if mode == "vision" else pair)


def ramp(params: Mapping[str, Any]) -> Array:
    """YaRN: how much of its own frequency each pair keeps, 0 where ext_factor is 0. For the reference alone."""
    pairs, n_dims = pairs_of(params), int(params["n_dims"])
    ends = []
    for turns, whole in ((params["beta_fast"], math.floor), (params["beta_slow"], math.ceil)):
        if not params["n_ctx_orig"]:  # a context of nothing: no pair turns within it
            ends.append(-math.inf)
            continue
        wave = params["n_ctx_orig"] / (turns * 2 * math.pi)
        ends.append(whole(n_dims * math.log(wave) / (2 * math.log(params["freq_base"]))))
    low, high = max(0.0, ends[0]), min(n_dims - 1.0, ends[1])
    rising = (np.arange(pairs) - low) / max(0.001, high - low)
    return np.asarray(params["ext_factor"] * (1.0 - np.clip(rising, 0.0, 1.0)))


@register
class RopeExt(Op):
    """RoPE of every mode; see the module's text."""

    name = "ROPE_EXT"

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        whole, pos = np.asarray(inputs[0], np.float64), np.asarray(inputs[1], np.float64)
        x = params["within"].of(whole) if params.get("within") else whole
        n_dims, n, first = params["n_dims"], x.shape[1], params["first"]
        positions = pos.reshape(-1, n)
        keep = ramp(params)
        magnitude = params["attn_factor"] * (1.0 + 0.1 * math.log(1.0 / params["freq_scale"]) if params["ext_factor"] else 1.0)
        pairs = pairs_of(params)
        out = x.copy()
        for pair in range(pairs):
            number, power = sector_of(pair, params)
            full = positions[number] * params["freq_base"] ** (-2.0 * power / n_dims)
            if len(inputs) > 2:
                full = full / float(inputs[2][pair])
            angle = full * (params["freq_scale"] * (1.0 - keep[pair]) + keep[pair])
            cos, sin = (magnitude * f(angle)[:, None] for f in (np.cos, np.sin))
            sin = -sin if params.get("back") else sin
            a, b = (2 * pair, 2 * pair + 1) if params["mode"] == "normal" else (pair, pair + pairs)
            a, b = a + first, b + first
            out[..., a] = x[..., a] * cos - x[..., b] * sin
            out[..., b] = x[..., a] * sin + x[..., b] * cos
        if not params.get("within"):
            return [out]
        whole = whole.copy()
        params["within"].of(whole)[...] = out
        return [whole]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        within = node.params.get("within")
        # The kernel takes rows one after the other: a view is copied out, rotated and copied back.
        if within is not None:
            x = node.inputs[0]
            before, after = (Tensor(f"{node.name}.{name}", "F32", within.shape) for name in ("taken", "rotated"))
            rest = {key: value for key, value in node.params.items() if key != "within"}
            rotated = self.lower(Node(node.op, (before, *node.inputs[1:]), (after,), rest), ctx)
            return [copy_dispatch(x, before, node, ctx, source=within), *rotated, copy_dispatch(after, x, node, ctx, target=within)]
        if is_general(node):
            return lower_general(self, node, ctx)
        x, pos, *factors = node.inputs
        params, y = node.params, node.outputs[0]
        pairs, (batches, n, heads, dim) = pairs_of(params), x.shape
        first = int(params["first"])
        several = params["mode"] in ("mrope", "imrope", "vision")
        if not 0 < first + 2 * pairs <= dim or pos.elements != n * (4 if several else 1) or y.shape != x.shape:
            raise PlanError(f"[{self.name}] {node.name}: {x} by {pos} to {y}: {2 * pairs} values from {first} on, {n} tokens")
        if factors and factors[0].elements < pairs:
            raise PlanError(f"[{self.name}] {node.name}: frequency factors {factors[0]}: expected {pairs}")
        # Positions may come in sectors (mrope): which of them a pair takes is fixed for the kernel.
        sectors = [sector_of(pair, params) for pair in range(pairs)]
        table = rope_angles.fixed_point(params, [power for _, power in sectors])
        threads = batches * n * heads * (dim - pairs)
        defines: dict[str, str | int] = {
            "INTERLEAVED": int(params["mode"] == "normal"),
            "PAIR_POSITION": ",".join(f"{number}u" for number, _ in sectors),
            "FACTORS": len(factors),
            **rope_angles.table_defines(table),
        }
        return [
            by_threads(
                node,
                ctx,
                "rope/general.comp",
                (Arg(x), Arg(pos), Arg(y, "w"), *map(Arg, factors)),
                (threads, dim, heads, n, first, float(rope_angles.mscale(params)), -1.0 if params.get("back") else 1.0),
                threads,
                defines,
                moved=8 * x.elements,
                flops=6 * x.elements,
            )
        ]

    def build_case(
        self,
        type: str = "f32",
        ne_a: Four = (10, 5, 3, 2),
        n_dims: int = 10,
        mode: int = 0,
        n_ctx: int = 512,
        fs: float = 1.0,
        ef: float = 0.0,
        af: float = 0.0,
        ff: bool = False,
        v: int = 0,
        inplace: bool = False,
        n_offs: int = 0,
        seed: int = 13,
        *,
        back: bool = False,
    ) -> Case:
        """Positions below n_ctx; fs, ef, af: freq_scale, ext_factor and attn_factor, YaRN's context being nothing, as ggml has it. ff:
        with frequency factors. v: x is a view of a larger tensor, of the first of its values (1) or between others (2). n_dims of vision
        counts all values that are rotated."""
        kind, shape = one_of_types(type, ("F32", "F16", "BF16")), shape_of(ne_a, "ne_a")
        if mode not in MODES:
            raise CaseLineError(f"mode={mode}: expected one of {', '.join(f'{number} ({name})' for number, name in MODES.items())}")
        if n_dims < 2 or n_dims % 2 or n_offs < 0 or n_dims + n_offs > shape[3] or v not in (0, 1, 2) or n_ctx < 1 or fs <= 0:
            given = f"n_dims={n_dims}, n_offs={n_offs}, v={v}, n_ctx={n_ctx}, fs={fs}"
            raise CaseLineError(f"{given}: expected even n_dims, with n_offs at most {shape[3]}, v from 0 to 2, the others above 0")
        if mode == 24 and n_dims % 4:
            raise CaseLineError(f"n_dims={n_dims}: vision takes a multiple of 4")
        half = n_dims // 2 if mode == 24 else n_dims
        sections = (half // 2, half // 2, 0, 0) if mode == 24 else (n_dims // 3, n_dims // 3, n_dims // 3, 0)
        inner, view = view_in(shape, (1, 1 if v == 2 else 2, 2, 2)) if v else (shape, View.whole(shape))
        if v == 2:
            view = View(shape[3], view.shape, view.strides)
        sized(inner)
        params: dict[str, Any] = {
            **rope_angles.DEFAULTS,
            "mode": MODES[mode],
            "n_dims": half,
            "first": n_offs,
            "freq_scale": fs,
            "ext_factor": ef,
            "attn_factor": af,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "n_ctx_orig": 0,
        }
        params |= {"sections": sections} if mode >= 8 else {}
        params |= {"back": True} if back else {}
        params |= {"within": view} if inplace and v else {"views": {0: view}} if v else {}

        def make(rng: np.random.Generator) -> Problem:
            n = shape[1]
            inputs = [Tensor("x", kind, inner, "input"), Tensor("pos", "I32", (n * (4 if mode >= 8 else 1),), "input")]
            values: dict[str, Array] = {"x": rounded_to(kind, rng.uniform(-1, 1, inner))}
            values["pos"] = rng.integers(0, n_ctx, inputs[1].shape).astype(np.int32)
            if ff:
                inputs.append(Tensor("factors", "F32", (pairs_of(params),), "input"))
                values["factors"] = rng.uniform(0.9, 1.1, inputs[2].shape).astype(np.float32)
            y = inputs[0] if inplace else Tensor("y", kind, shape)
            return Problem(Node(self.name, tuple(inputs), (y,), params), values)

        shown = {
            "type": type_word(kind),
            "ne_a": ne_of(shape),
            "n_dims": n_dims,
            "mode": mode,
            "n_ctx": n_ctx,
            "fs": fs,
            "ef": ef,
            "af": af,
            "ff": int(ff),
            "v": v,
            "inplace": int(inplace),
            "n_offs": n_offs,
            "seed": seed,
        }
        return Case("ROPE_BACK" if back else "ROPE", shown, make, seed)

    def cases(self) -> Iterator[Case]:
        yield self.build_case("f32", (24, 3, 5, 2), 20, 0, fs=1.4245, ef=0.7465, af=1.4245, ff=True, v=1)
        yield self.build_case("f16", (24, 3, 5, 2), 16, 2, af=1.0, n_offs=8, v=2, inplace=True)
        yield self.build_case("f32", (24, 3, 5, 2), 24, 8, af=1.0, inplace=True)
        yield self.build_case("bf16", (24, 3, 5, 2), 24, 24, af=1.0, ff=True)
        yield self.build_case("f32", (32, 3, 5, 2), 24, 40, af=1.0, v=2)

    def full_cases(self) -> Iterator[Case]:
        for mode, (dim, n_dims), ff, v in product(MODES, ((128, 128), (80, 80), (36, 24)), (False, True), (0, 1)):
            if mode != 24 or dim == n_dims:
                yield self.build_case("f32", (dim, 12, 7, 3), n_dims, mode, af=1.0, ff=ff, v=v)
        for mode, (fs, ef, af) in product(MODES, ((1.4245, 0.0, 1.0), (1.0, 0.7465, 1.4245), (1.4245, 0.7465, 1.4245))):
            yield self.build_case("f16", (36, 16, 57, 1), 36, mode, fs=fs, ef=ef, af=af, v=2)

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        exact = Tolerance(1e-11, 3e-5, "angles to 2^-32 of a turn, slow pairs divided by a factor in f32; polynomials and products in f32")
        return stored_tolerance(exact, node.outputs[0].type)


@register
class RopeBack(RopeExt, Gradient):
    """ROPE_BACK(dy, pos [, factors]): ROPE_EXT, or ROPE with dy [n, heads, head_dim] and its params, rotated back."""

    name = "ROPE_BACK"

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return OPS["ROPE"].arithmetic(node, n_kv)

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        dy, *rest = inputs
        whole = dy if "within" in params or dy.ndim == 4 else dy[None]
        (dx,) = super().reference([whole, *rest], {"first": 0, **params, "back": True})
        return [dx.reshape(dy.shape)]

    def scalar(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> Scalar:
        dy, *rest = inputs
        forward = {"first": 0, **params, "back": False}
        return against(dy if dy.ndim == 4 else dy[None], lambda x: RopeExt.reference(self, [x, *rest], forward)[0], np.zeros(dy.shape))

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        def four(t: Tensor) -> Tensor:
            return dataclasses.replace(t, shape=(1, *t.shape)) if len(t.shape) == 3 else t

        params = {"first": 0, **node.params, "back": True}
        return super().lower(Node(node.op, (four(node.inputs[0]), *node.inputs[1:]), tuple(map(four, node.outputs)), params), ctx)

    def case(self, params: Mapping[str, Any]) -> Case:
        def build(
            type: str = "f32",
            ne_a: Four = (10, 5, 3, 2),
            n_dims: int = 10,
            mode: int = 0,
            n_ctx: int = 512,
            fs: float = 1.0,
            ef: float = 0.0,
            af: float = 0.0,
            ff: bool = False,
            v: int = 0,
            inplace: bool = False,
            n_offs: int = 0,
            seed: int = 13,
        ) -> Case:
            return self.build_case(type, ne_a, n_dims, mode, n_ctx, fs, ef, af, ff, v, inplace, n_offs, seed, back=True)

        return call_with(build, params, op=self.name, extra_keys=(), example=lambda: next(self.cases()).line)

    def cases(self) -> Iterator[Case]:
        yield self.build_case("f32", (24, 3, 5, 2), 24, 24, af=1.0, ff=True, back=True)

    def full_cases(self) -> Iterator[Case]:
        for mode in MODES:
            yield self.build_case("f32", (36, 12, 7, 3), 36, mode, fs=1.4245, ef=0.7465, af=1.4245, ff=True, back=True)
