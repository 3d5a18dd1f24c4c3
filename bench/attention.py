"""Times attention of prompts: the kernel of decoding against the blocked ones, with random queries and caches.

    python bench/attention.py [--heads 32x8x128,64x8x64] [--n 128,512] [--depth 0,4096] [--window 0] [--sinks]
                              [--kernel decode,plain,matrix] [--cut 64x32/4,...] [--json FILE]

--heads N_HEADxN_HEAD_KVxHEAD_DIM. --depth: rows of the cache in use before the prompt. A --cut is TILE_QxTILE_KV/WARPS of plain and matrix;
without one the tables say. One line a point: microseconds a launch (the best and the median of the repetitions, a barrier after each
launch), TFLOPS of the rows that are seen (4 x head_dim for each query and row), and the NMSE of some queries against numpy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vkback.device import BufferRange, Commands, Device, DeviceError
from vkback.graph import Node, Tensor
from vkback.ops.attention.flash import FlashAttnExt
from vkback.ops.case import Array
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.storage import nbytes
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.launches import span_us, warm_up
from vkback.tuning.lookup import Overrides, Tuning

CUT = re.compile(r"(\d+)x(\d+)/(\d+)$")
CHECKED = 48
"""Queries compared with numpy, spread over tokens and heads."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is computed."""

    n_head: int
    n_head_kv: int
    hd: int
    n: int
    depth: int
    window: int
    sinks: bool

    @property
    def n_ctx(self) -> int:
        return -(-(self.depth + self.n) // 256) * 256

    @property
    def flops(self) -> int:
        """Of the rows that are seen."""
        rows = [min(self.depth + t + 1, self.window or self.depth + t + 1) for t in range(self.n)]
        return 4 * self.n_head * self.hd * sum(rows)

    def __str__(self) -> str:
        extra = f" window {self.window}" * bool(self.window) + " sinks" * self.sinks
        return f"{self.n_head}/{self.n_head_kv}x{self.hd} n {self.n} depth {self.depth}{extra}"


@dataclasses.dataclass
class Point:
    """A measured kernel. us: best and median of a launch."""

    shape: str
    kernel: str
    us: float
    median_us: float
    tflops: float
    nmse: float

    def line(self) -> str:
        times = f"{self.us:10.1f} us ({self.median_us:10.1f})"
        return f"{self.shape:34s} {times} {self.tflops:8.3f} TFLOPS  NMSE {self.nmse:.1e}  {self.kernel}"


class Operands:
    """Tensors of one shape on the device."""

    def __init__(self, device: Device, shape: Shape) -> None:
        self.device, self.shape = device, shape
        rng = np.random.default_rng(7)
        q = Tensor("q", "F32", (shape.n, shape.n_head, shape.hd), "input")
        caches = [Tensor(name, "F16", (shape.n_head_kv, shape.n_ctx, shape.hd), "state") for name in ("cache_k", "cache_v")]
        pos = Tensor("pos", "I32", (shape.n,), "input")
        self.values: dict[str, Array] = {
            "q": rng.standard_normal(q.shape, np.float32),
            "pos": np.arange(shape.depth, shape.depth + shape.n, dtype=np.int32),
            **{c.name: rng.standard_normal(c.shape, np.float32).astype(np.float16) for c in caches},
        }
        inputs = [q, *caches, pos]
        if shape.sinks:
            inputs.append(Tensor("sinks", "F32", (shape.n_head,), "weight"))
            self.values["sinks"] = rng.uniform(-3, 6, shape.n_head).astype(np.float32)
        self.y = Tensor("y", "F32", (shape.n, shape.n_head * shape.hd))
        params = {"scale": 1 / math.sqrt(shape.hd)} | ({"window": shape.window} if shape.window else {})
        self.node = Node("FLASH_ATTN_EXT", tuple(inputs), (self.y,), params)
        room = sum(nbytes(t) + 4096 for t in (*inputs, self.y)) + (64 << 20)
        self.arena = device.arena("attention", room, "device")
        self.ranges: dict[str, BufferRange] = {}
        for t in inputs:
            self.ranges[t.name] = self.arena.alloc(nbytes(t), t.name)
            device.upload(self.ranges[t.name], np.ascontiguousarray(self.values[t.name]).reshape(-1).view(np.uint8))
        self.picks = [
            (int(t), int(h))
            for t, h in zip(np.linspace(0, shape.n - 1, CHECKED).astype(int), rng.integers(0, shape.n_head, CHECKED), strict=True)
        ]
        self.want = np.stack([self._expected(t, h) for t, h in self.picks])

    def close(self) -> None:
        self.arena.destroy()

    def _expected(self, token: int, head: int) -> Array:
        s = self.shape
        end = s.depth + token + 1
        rows, kv = slice(max(0, end - s.window) if s.window else 0, end), head * s.n_head_kv // s.n_head
        scores = self.values["cache_k"][kv, rows].astype(np.float64) @ self.values["q"][token, head].astype(np.float64) / math.sqrt(s.hd)
        sink = float(self.values["sinks"][head]) if s.sinks else -math.inf
        weights = np.exp(scores - max(scores.max(), sink))
        total = weights.sum() + math.exp(sink - max(scores.max(), sink))
        found: Array = weights / total @ self.values["cache_v"][kv, rows].astype(np.float64)
        return found

    def nmse(self) -> float:
        got = self.device.download(self.ranges["y"], np.float32).reshape(self.shape.n, self.shape.n_head, self.shape.hd)
        mine = np.stack([got[t, h] for t, h in self.picks]).astype(np.float64)
        return float(np.square(mine - self.want).sum() / np.square(self.want).sum())

    def bind(self, tensor: Tensor) -> BufferRange:
        if tensor.name not in self.ranges:
            self.ranges[tensor.name] = self.arena.alloc(nbytes(tensor), tensor.name)
            self.device.upload(self.ranges[tensor.name], np.zeros(nbytes(tensor), np.uint8))
        return self.ranges[tensor.name]

    def record(self, d: Dispatch, kernel: Any, launches: int) -> Commands:
        rec = self.device.recorder("attention", timestamps=2)
        rec.timestamp("start")
        for _ in range(launches):
            rec.dispatch(kernel, [self.bind(a.tensor) for a in d.args], d.push, d.groups)
            rec.barrier()
        rec.timestamp("end")
        return rec.finish()

    def time(self, library: ShaderLibrary, ctx: LowerContext, seconds: float) -> Point:
        """Runs the kernel that the tables of ctx choose for `seconds`, at least three times."""
        (d,) = FlashAttnExt().lower(self.node, ctx)
        kernel = compile_kernels(self.device, library, [d])[d.kernel, len(d.args), len(d.push)]
        self.device.upload(self.bind(self.y), np.full(self.y.elements, np.nan, np.float32).view(np.uint8))
        once = self.record(d, kernel, 1)
        span_us(self.device, once)
        wrong = self.nmse()
        first = span_us(self.device, once)
        launches = 1 if self.device.caps.software else max(1, min(50, round(10_000 / first)))
        commands = self.record(d, kernel, launches)
        warm_up(self.device, commands, 0.1)
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < 3 or (time.perf_counter() - begin < seconds and len(times) < 30):
            times.append(span_us(self.device, commands) / launches)
        once.destroy()
        commands.destroy()
        us = min(times)
        return Point(str(self.shape), d.reason, us, statistics.median(times), self.shape.flops / us / 1e6, wrong)


def variants(args: argparse.Namespace, tables: Tuning) -> Iterator[tuple[str, Overrides]]:
    """Ways and cuts with the tables that choose them."""
    for kernel in args.kernel.split(","):
        for cut in args.cut.split(",") if args.cut and kernel != "decode" else [""]:
            params: dict[str, Any] = {"kernel": kernel}
            if cut:
                match = CUT.match(cut)
                if not match:
                    raise PlanError(f"[bench] cut {cut!r}: expected TILE_QxTILE_KV/WARPS")
                params |= dict(zip(("tile_q", "tile_kv", "warps"), map(int, match.groups()), strict=True))
            yield f"{kernel} {cut}".strip(), Overrides(tables, {"attention": params}, f"{kernel} {cut}".strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="32x8x128")
    parser.add_argument("--n", default="128,512")
    parser.add_argument("--depth", default="0,4096")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--sinks", action="store_true")
    parser.add_argument("--kernel", default="decode,plain,matrix")
    parser.add_argument("--cut", default="")
    parser.add_argument("--seconds", type=float, default=0.3, help="of repetitions for each point")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device")
    args = parser.parse_args()
    library = ShaderLibrary()
    points: list[Point] = []
    with Device.open(args.device) as device:
        tables = Tuning.for_device(device.caps)
        print(f"{device.caps.name}, driver {device.caps.driver_info}", flush=True)
        for heads in args.heads.split(","):
            n_head, n_head_kv, hd = map(int, heads.split("x"))
            for n in map(int, args.n.split(",")):
                for depth in map(int, args.depth.split(",")):
                    shape = Shape(n_head, n_head_kv, hd, n, depth, args.window, args.sinks)
                    operands = Operands(device, shape)
                    for label, use in variants(args, tables):
                        try:
                            points.append(operands.time(library, LowerContext(device.caps, use), args.seconds))
                            print(points[-1].line(), flush=True)
                        except (PlanError, DeviceError) as error:
                            print(f"{shape} {label}: {error}", flush=True)
                    operands.close()
    if args.json:
        args.json.write_text(json.dumps([vars(p) for p in points], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
