"""Times the GEMM kernels with weights that rotate through more than the last cache, beside the device's math rate.

    python bench/gemm.py [--quant Q4_K,Q8_0] [--shape 28672x512x4096] [--kernel coop_mat] [--cut 128x128x32/64x64x4+f/2,...] [--ids 128x8]

A --cut is TILE_M x TILE_N x STEP_K, the part of a subgroup, with +f activations as fragments, and the parts of a split-K product; of
coop_reg TILE_M x TILE_N x 32 / WARP_M x SLICE_K. One line a point: microseconds with a barrier after each launch (the best and the
median of the repetitions), TFLOPS, share of the device's math
rate, and the NMSE of some rows against numpy. --ids EXPERTSxUSED times a grouped product without its route, every expert as likely as
another. --overlap times launches without barriers between them: what is left of a launch where others run beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.device import Arena, BufferRange, Device, DeviceError
from vkback.graph import Tensor
from vkback.ops.codebooks import in_pairs
from vkback.ops.cooperative_matrix import matrix_shape, row_lanes
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import gemm, gemm_reg
from vkback.ops.matmul import pack as gemm_pack
from vkback.ops.matmul import route as gemm_route
from vkback.ops.matmul.gemm_problem import Gemm, GemmKernel, GemmShape, default_shape
from vkback.ops.matmul.linear_node import weight
from vkback.ops.quantize import quantize_dispatch
from vkback.ops.storage import nbytes
from vkback.plan.weight_layout import stored_type
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.launches import span_us, warm_up
from vkback.timing.math_rate import MathRate, measure_math_rate
from vkback.tuning.lookup import Tuning

COLD_BYTES = 256 << 20
CHECKED_ROWS = 96
"""Rows of the weight that are compared with numpy, from its end."""

CUT = re.compile(r"(\d+)x(\d+)x(\d+)(?:/(\d+)x(\d+))?(\+f)?(?:/(\d+))?$")


def cut_of(text: str, kernel: GemmKernel, device: Device) -> GemmShape:
    """A shape from its short form."""
    match = CUT.match(text)
    if not match:
        raise PlanError(f"[bench] cut {text!r}: expected TILE_MxTILE_NxSTEP_K[/WARP_MxWARP_N][+f][/SPLIT_K]")
    m, n, k, warp_m, warp_n = (int(g or 0) for g in match.groups()[:5])
    if kernel == "coop_reg":
        lanes = row_lanes(LowerContext(device.caps, Tuning.for_device(device.caps)))
        shape = gemm_reg.shape_of(m, n, warp_m, warp_n, lanes, device.caps)
        if shape is None:
            raise PlanError(f"[bench] cut {text}: {device.caps.name} cannot run it")
        return shape
    split = int(match[7] or 1)
    if kernel != "coop_mat":
        return GemmShape(kernel, m, n, k, 1 if device.caps.software else max(1, 128 // device.caps.subgroup_size))
    matrix = matrix_shape(device.caps)
    if matrix is None:
        raise PlanError(f"[bench] {device.caps.name} has no cooperative matrices")
    subgroups = m // max(warp_m, 1) * (n // max(warp_n, 1))
    return GemmShape(kernel, m, n, k, subgroups, split, warp_m, warp_n, matrix, bool(match[6]))


@dataclasses.dataclass
class Point:
    """A measured shape. us: best and median of a launch."""

    quant: str
    shape: str
    cut: str
    kernel: str
    us: float
    median_us: float
    tflops: float
    nmse: float

    def line(self, math: MathRate) -> str:
        return (
            f"{self.quant:8s} {self.shape:18s} {self.kernel} {self.cut:28s} {self.us:9.1f} us ({self.median_us:9.1f}) "
            f"{self.tflops:7.2f} TFLOPS, {100 * self.tflops / math.tflops:4.1f} % of {math.name}, NMSE {self.nmse:.1e}"
        )


class Product:
    """Operands of one product on the device, the weight in several copies."""

    def __init__(self, device: Device, library: ShaderLibrary, quant: str, m: int, n: int, k: int, experts: int, used: int) -> None:
        self.device, self.library, self.m, self.n, self.k = device, library, m, n, k
        self.experts, self.used = experts, used
        rng = np.random.default_rng(3)
        self.w = weight("w", quant, (experts, m, k) if experts else (m, k))
        rows = prod(self.w.shape[:-1])
        some = quants.random_blocks(quant, min(rows, 512), k, rng, std=0.5).reshape(min(rows, 512), -1)
        self.raw = np.resize(some, (rows, some.shape[1]))
        data = quants.to_device(stored_type(quant, k, device.caps), self.raw, k)
        self.x_values = rng.uniform(-1, 1, (n, k)).astype(np.float32)
        self.copies = 1 if device.caps.software else max(1, -(-COLD_BYTES // data.nbytes))
        slots = n * max(used, 1)
        room = self.copies * (data.nbytes + 512) + 64 * slots * (m + k) + (1 << 24)
        self.arena: Arena = device.arena("GEMM", room, "device")
        self.weights = [self.arena.alloc(data.nbytes, f"w{i}") for i in range(self.copies)]
        for w in self.weights:
            device.upload(w, data)
        self.x = Tensor("x", "F32", (n, k), "input")
        self.y = Tensor("y", "F32", (slots, m))
        self.ranges: dict[str, BufferRange] = {t.name: self.arena.alloc(nbytes(t), t.name) for t in (self.x, self.y)}
        device.upload(self.ranges["x"], self.x_values)
        if experts:
            self.ids = np.stack([rng.permutation(experts)[:used] for _ in range(n)]).astype(np.int32)
            self.ranges["ids"] = self.arena.alloc(self.ids.nbytes, "ids")
            device.upload(self.ranges["ids"], self.ids)

    def close(self) -> None:
        self.arena.destroy()

    def dispatches(self, shape: GemmShape, ctx: LowerContext) -> tuple[list[Dispatch], list[Dispatch]]:
        """What prepares the operands, and the product."""
        caps, slots = self.device.caps, self.y.shape[0]
        problem = Gemm(self.w, self.x, self.y, slots, pairs=in_pairs(self.w.type, self.k, ctx.tuning))
        before: list[Dispatch] = []
        if self.experts:
            routes = gemm_route.route_tensor(f"route{shape.tile_n}", slots, self.experts, shape.tile_n)
            ids = Tensor("ids", "I32", (self.n, self.used), "input")
            before.append(gemm_route.route(ids, routes, self.experts, shape.tile_n, caps))
            problem = dataclasses.replace(problem, route=routes, x_shared=self.used)
        if shape.kernel == "coop_mat":
            x = gemm_pack.packed(f"x16 {shape.tile_n} {shape.fragments}", slots, self.k, shape, self.experts)
            before.append(gemm_pack.pack_f16(self.x, x, slots, shape, caps, routes=problem.route, x_shared=problem.x_shared))
            problem = dataclasses.replace(problem, x=x)
        elif shape.kernel == "coop_reg":
            x = gemm_reg.packed_units(f"xu {shape.tile_n}", slots, self.k, shape)
            before.append(gemm_reg.pack_units(self.x, x, slots, shape, caps))
            return before, gemm_reg.lower(dataclasses.replace(problem, x=x), shape, caps)
        elif shape.kernel == "int_dot":
            x = Tensor("x8", "Q8_1", self.x.shape)
            before += quantize_dispatch(self.x, x, ctx)
            problem = dataclasses.replace(problem, x=x)
        return before, gemm.lower(problem, shape, caps)

    def bind(self, arg: Arg, launch: int) -> BufferRange:
        if arg.tensor.kind == "weight":
            return self.weights[launch % self.copies]
        if arg.tensor in (self.x, self.y) or arg.tensor.name == "ids":
            return self.ranges[arg.tensor.name]
        key = str(arg.tensor)  # scratch: its size depends on the cut
        if key not in self.ranges:
            self.ranges[key] = self.arena.alloc(nbytes(arg.tensor), key)
        return self.ranges[key]

    def time(self, shape: GemmShape, ctx: LowerContext, repetitions: int, overlap: bool = False) -> tuple[float, float, float]:
        """Best and median microseconds of a launch, and the NMSE."""
        before, product = self.dispatches(shape, ctx)
        kernels = compile_kernels(self.device, self.library, [*before, *product])

        def record(name: str, parts: Sequence[Sequence[Dispatch]], barriers: bool = True) -> object:
            rec = self.device.recorder(name, timestamps=2)
            rec.timestamp("start")
            for launch, part in enumerate(parts):
                for d in part:
                    rec.dispatch(kernels[d.kernel, len(d.args), len(d.push)], [self.bind(a, launch) for a in d.args], d.push, d.groups)
                    if barriers:
                        rec.barrier()
            rec.barrier()
            rec.timestamp("end")
            return rec.finish()

        first = record("before", [before, product])
        span_us(self.device, first)  # type: ignore[arg-type]
        wrong = self.nmse()
        launches = 1 if self.device.caps.software else max(self.copies, 8)
        commands = record("product", [product] * launches, not overlap)
        warm_up(self.device, commands, 0.3)  # type: ignore[arg-type]
        times = [span_us(self.device, commands) / launches for _ in range(repetitions)]  # type: ignore[arg-type]
        first.destroy()  # type: ignore[attr-defined]
        commands.destroy()  # type: ignore[attr-defined]
        return min(times), statistics.median(times), wrong

    def nmse(self) -> float:
        want = self.expected()
        got = self.device.download(self.ranges["y"], np.float32).reshape(self.y.shape)[:, -want.shape[1] :].astype(np.float64)
        return float(np.square(got - want).sum() / np.square(want).sum())

    @cache  # noqa: B019  a few products in all
    def expected(self) -> npt.NDArray[np.float64]:
        """The last rows of the product."""
        rows = min(CHECKED_ROWS, self.m)
        decoded = quants.decode(self.w.type, self.raw.reshape(-1, self.m, self.raw.shape[-1])[:, -rows:])
        weights = np.asarray(decoded.reshape(-1, rows, decoded.shape[-1]), np.float64)[..., : self.k]
        if self.experts:
            return np.stack([weights[e] @ self.x_values[s // self.used].astype(np.float64) for s, e in enumerate(self.ids.reshape(-1))])
        return np.asarray(self.x_values.astype(np.float64) @ weights[0].T)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", default="Q4_K")
    parser.add_argument("--shape", default="28672x512x4096,4096x512x14336,6144x512x4096")
    parser.add_argument("--kernel", default="coop_mat", choices=("coop_mat", "coop_reg", "int_dot", "f32"))
    parser.add_argument("--cut", default="")
    parser.add_argument("--ids", default="")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device")
    args = parser.parse_args()
    if args.kernel == "coop_reg" and not args.cut:
        parser.error("--kernel coop_reg needs a --cut, such as --shape 28672x8x4096 --cut 16x8x32/16x4")
    library = ShaderLibrary()
    points: list[Point] = []
    with Device.open(args.device) as device:
        ctx = LowerContext(device.caps, Tuning.for_device(device.caps))
        math = measure_math_rate(device, library, args.kernel)
        print(f"{device.caps.name}, driver {device.caps.driver_info}: {math.name} {math.tflops:.4g} TFLOPS", flush=True)
        experts, used = map(int, args.ids.split("x")) if args.ids else (0, 0)
        for quant in args.quant.split(","):
            for text in args.shape.split(","):
                m, n, k = map(int, text.split("x"))
                product = Product(device, library, quant, m, n, k, experts, used)
                for cut in args.cut.split(",") if args.cut else [""]:
                    try:
                        shape = cut_of(cut, args.kernel, device) if cut else default_shape(args.kernel, n, device.caps)
                        us, median, wrong = product.time(shape, ctx, args.repetitions, args.overlap)
                    except (PlanError, DeviceError) as error:
                        print(f"{quant} {text} {cut}: {error}", flush=True)
                        continue
                    flops = 2 * m * n * max(used, 1) * k
                    points.append(Point(quant, text, cut or "default", args.kernel, us, median, flops / us / 1e6, wrong))
                    print(points[-1].line(math), flush=True)
                product.close()
        if args.json:
            found = {"device": device.caps.name, "rate": math.tflops, "points": [vars(p) for p in points]}
            args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
