"""Times the GEMV kernels with cold weights, as the tables choose them or over a grid of workgroup shapes.

    python bench/gemv.py [--quant Q4_K,Q6_K] [--shape 4096x14336] [--ids 128x8] [--sweep] [--act q8_1]

One line a point: kernel shape, microseconds a launch back to back (throughput) and one after the other (latency), GB/s, share of the read
rate. Before them what a launch takes that only reads as many bytes. With --sweep only points that no other beats in both figures.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from vkback.device import Device
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.linear_cases import fused_case, mul_mat_case, mul_mat_id_case
from vkback.ops.op import OPS
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.launches import Bench
from vkback.timing.read_rate import MIN_READ, measure_read_rate, plain_read_us
from vkback.tuning.lookup import Overrides, Tuning


def grid(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Points of a sweep. A prologue wants many threads a workgroup and several tiles each; without one, small workgroups start quicker."""
    axes: dict[str, tuple[Any, ...]]
    if args.norm or args.glu:
        axes = {
            "wg": (128, 256, 512, 1024),
            "lanes": (16, 32, 64),
            "rows": (1, 2, 4),
            "unroll": (1, 2, 4),
            "prefetch": ("none",),
            "groups": ("per_tile", 132, 264, 528),
        }
    else:
        axes = {
            "wg": (64, 128, 256, 512),
            "lanes": (16, 32, 64, 128),
            "rows": (1, 2, 4, 8),
            "unroll": (1, 2, 4),
            "prefetch": ("none", "weights", "weights+x"),
            "lane_order": ("strided", "blocked"),
            "groups": ("per_tile",),
        }
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        without_effect = point["unroll"] == 1 and point.get("lane_order") == "blocked"
        if point["lanes"] <= point["wg"] and point["unroll"] * point["rows"] <= 8 and not without_effect:
            yield point


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for quant in args.quant.split(","):
        for shape in args.shape.split(","):
            m, k = map(int, shape.split("x"))
            if args.glu or args.norm:
                yield fused_case(quant, m, k, 1, ("norm",) if args.norm else (), glu=args.glu, out="Q8_1" if args.glu else "F32")
            elif args.ids:
                experts, used = map(int, args.ids.split("x"))
                yield mul_mat_id_case(quant, experts, used, m, args.n, k, shared=True)
            else:
                yield mul_mat_case(quant, m, args.n, k)


def compile_all(bench: Bench, ctx: LowerContext, tables: Tuning, args: argparse.Namespace) -> None:
    """Compile every point of a sweep in parallel."""
    dispatches = []
    for params in grid(args) if args.sweep else []:
        with contextlib.suppress(PlanError):
            use = dataclasses.replace(ctx, tuning=Overrides(tables, {"gemv": params}, "sweep"))
            dispatches += OPS[bench.problem.node.op].lower(bench.problem.node, use)
    compile_kernels(bench.device, bench.library, dispatches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", default="Q4_K")
    parser.add_argument("--shape", default="4096x14336,14336x4096,4096x4096")
    parser.add_argument("--n", type=int, default=1)
    parser.add_argument("--ids", default="")
    parser.add_argument("--glu", action="store_true")
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--act", default="auto")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--device")
    args = parser.parse_args()
    with Device.open(args.device) as device:
        library = ShaderLibrary()
        tables = Tuning.for_device(device.caps)
        roof = measure_read_rate(device, library).gb_s
        print(f"{device.caps.name}, driver {device.caps.driver_info}: read rate {roof:.0f} GB/s")
        for case in cases(args):
            ctx = LowerContext(device.caps, tables, args.act)
            problem = case.build()
            if problem.node.inputs[1].type == "F32" and args.act != "f32" and not args.norm:
                x = dataclasses.replace(problem.node.inputs[1], type="Q8_1")
                node = dataclasses.replace(problem.node, inputs=(problem.node.inputs[0], x, *problem.node.inputs[2:]))
                problem = dataclasses.replace(problem, node=node, values={k: v for k, v in problem.values.items() if k != "x"})
            with Bench(device, library, problem, ctx) as bench:
                compile_all(bench, ctx, tables, args)
                points = []
                for params in grid(args) if args.sweep else [None]:
                    use = ctx if params is None else dataclasses.replace(ctx, tuning=Overrides(tables, {"gemv": params}, "sweep"))
                    try:
                        t = bench.time(use, repetitions=3)
                    except PlanError:
                        continue
                    points.append((t, params))
            nbytes = max((t.nbytes for t, _ in points), default=0)
            floor = f"{plain_read_us(device, library, nbytes):.2f} us" if nbytes >= MIN_READ else "too little to tell"
            print(f"{case.line}: a plain read of {nbytes / 1e6:.1f} MB takes {floor}")
            for t, params in sorted(points, key=lambda p: p[0].throughput_us):
                if not any(o.throughput_us <= t.throughput_us and o.latency_us < t.latency_us for o, _ in points):
                    rate = f"{t.gb_s:.0f} GB/s, {100 * t.gb_s / roof:.0f} % of read rate"
                    print(f"  {t.throughput_us:.2f} us ({rate}), latency {t.latency_us:.2f} us {params or ''}")


if __name__ == "__main__":
    main()
