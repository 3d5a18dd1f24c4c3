"""Times the gated delta net of a prompt: token by token (scan), and in chunks of tokens, with random inputs.

    python bench/delta_net.py [--heads 32x16x128] [--n 16,64,128,512,2048] [--scan 8x16x1,...] [--chunks 64x32x2,...] [--json FILE]

--heads N_HEADxN_GROUPxSIZE: heads of v, of q and k, values of either. A point of --scan is LANESxROWSxPER_THREAD, of --chunks
CHUNKxROWSxTOKENS. One line for each number of tokens and point: microseconds a launch, a barrier after each dispatch (the best of the
repetitions), of chunks also of both dispatches by themselves; TFLOPS; and the NMSE of y and state against the first point of this number of
tokens, which up to 128 tokens is compared with numpy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vkback.device import BufferRange, Device, DeviceError
from vkback.evaluate.judge import nmse
from vkback.ops.case import Array, Problem
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.ops.recurrent.delta_net import DeltaNet
from vkback.ops.storage import nbytes
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.launches import span_us, warm_up
from vkback.tuning.lookup import Overrides, Tuning

SCAN = "8x16x1,8x8x1,16x8x1,4x16x1"
CHUNKS = "64x32x2,64x32x4,64x32x1,64x16x1,64x16x2,64x16x4,64x8x2,32x32x1,32x32x2,32x32x4,32x16x1,32x16x2,32x8x1,16x32x1,16x16x1"
NAMES = {"scan": ("lanes", "rows", "per_thread"), "chunks": ("chunk", "rows", "tokens")}
CHECKED = 128
"""Tokens up to which numpy judges."""
LONG_US = 1500
"""Of a scan, beyond which its first point says enough."""


@dataclasses.dataclass
class Point:
    """A measured kernel. us: of a launch; parts_us: of its dispatches by themselves."""

    n: int
    kernel: str
    us: float
    parts_us: list[float]
    tflops: float
    nmse: float
    state_nmse: float
    reason: str

    def line(self) -> str:
        parts = " + ".join(f"{us:.1f}" for us in self.parts_us)
        speed = f"{self.us:9.1f} us {parts:>17s} {self.tflops:7.2f} TFLOPS"
        return f"{self.n:5d} {self.kernel:15s} {speed}  NMSE {self.nmse:.1e} {self.state_nmse:.1e}"


class Stand:
    """One problem in device memory."""

    def __init__(self, device: Device, library: ShaderLibrary, problem: Problem) -> None:
        self.device, self.library, self.problem = device, library, problem
        tensors = {t.name: t for t in (*problem.node.inputs, *problem.node.outputs)}
        self._arena = device.arena("delta net", sum(nbytes(t) + 4096 for t in tensors.values()) + (256 << 20), "device")
        self._ranges = {name: self._arena.alloc(nbytes(t), name) for name, t in tensors.items()}
        for name in problem.values:
            self._upload(name)
        self.want: dict[str, Array] = {}

    def close(self) -> None:
        self._arena.destroy()

    def compile(self, ways: Sequence[LowerContext]) -> None:
        """All kernels at once."""
        node = self.problem.node
        compile_kernels(self.device, self.library, [d for ctx in ways for d in OPS[node.op].lower(node, ctx)])

    def _upload(self, name: str) -> None:
        self.device.upload(self._ranges[name], np.ascontiguousarray(self.problem.values[name]).reshape(-1).view(np.uint8))

    def _bind(self, name: str, size: int) -> BufferRange:
        if name not in self._ranges or self._ranges[name].size < size:
            self._ranges[name] = self._arena.alloc(size, name)
        return self._ranges[name]

    def _span(self, dispatches: Sequence[Dispatch], launches: int, repetitions: int = 3) -> float:
        """Microseconds of the dispatches, one after the other."""
        kernels = compile_kernels(self.device, self.library, dispatches)
        rec = self.device.recorder("delta net", timestamps=2)
        rec.barrier()
        rec.timestamp("start")
        for _ in range(launches):
            for d in dispatches:
                bound = [self._bind(a.tensor.name, nbytes(a.tensor)) for a in d.args]
                rec.dispatch(kernels[d.kernel, len(d.args), len(d.push)], bound, d.push, d.groups)
                rec.barrier()
        rec.timestamp("end")
        rec.host_barrier()
        commands = rec.finish()
        if launches > 1:
            warm_up(self.device, commands, 0.03)
        times = [span_us(self.device, commands) / launches for _ in range(repetitions)]
        commands.destroy()
        return min(times)

    def time(self, name: str, ctx: LowerContext) -> Point:
        node = self.problem.node
        dispatches = OPS[node.op].lower(node, ctx)
        self._upload("state")
        self._span(dispatches, 1, 1)
        y, state = node.outputs
        got = {t.name: self.device.download(self._ranges[t.name], np.float32)[: t.elements].reshape(t.shape) for t in (y, state)}
        if not self.want and y.shape[0] <= CHECKED:
            inputs = [self.problem.values[t.name] for t in node.inputs]
            self.want = dict(zip((y.name, state.name), OPS[node.op].reference(inputs, node.params), strict=True))
        self.want = self.want or got
        y_nmse, state_nmse = (nmse(got[t.name], self.want[t.name]) for t in (y, state))
        once = self._span(dispatches, 1, 2)
        launches = 1 if self.device.caps.software else max(2, min(60, round(6000 / once)))
        us = self._span(dispatches, launches)
        parts = [self._span([d], launches) for d in dispatches] if len(dispatches) > 1 else []
        flops = sum(d.flops for d in dispatches)
        return Point(y.shape[0], name, us, parts, flops / us / 1e6, y_nmse, state_nmse, dispatches[-1].reason)


def points(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for kernel, names in NAMES.items():
        for text in filter(None, getattr(args, kernel).split(",")):
            values = text.split("x")
            if len(values) != len(names) or not all(v.isdecimal() for v in values):
                raise PlanError(f"[bench] --{kernel} {text!r}: expected {'x'.join(names).upper()}")
            found.append((f"{kernel} {text}", {"kernel": kernel, **dict(zip(names, map(int, values), strict=True))}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="32x16x128")
    parser.add_argument("--n", default="16,64,128,512,2048")
    parser.add_argument("--scan", default=SCAN)
    parser.add_argument("--chunks", default=CHUNKS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device")
    args = parser.parse_args()
    library = ShaderLibrary()
    n_head, n_group, size = map(int, args.heads.split("x"))
    measured: list[Point] = []
    begin = time.perf_counter()
    with Device.open(args.device) as device:
        tables = Tuning.for_device(device.caps)
        print(f"{device.caps.name}, driver {device.caps.driver_info}, {n_head} heads, {n_group} groups, {size} values", flush=True)
        for n in map(int, args.n.split(",")):
            stand = Stand(device, library, DeltaNet().build_case(n, n_head, size, size, n_group=n_group, pos0=512).build())
            ways = [(name, LowerContext(device.caps, Overrides(tables, {"delta_net": params}, name))) for name, params in points(args)]
            stand.compile([ctx for _, ctx in ways])
            for name, ctx in ways:
                if name.startswith("scan") and measured and measured[-1].n == n and measured[-1].us > LONG_US:
                    continue
                try:
                    measured.append(stand.time(name, ctx))
                    print(measured[-1].line(), flush=True)
                except (PlanError, DeviceError) as error:
                    print(f"{n:5d} {name}: {error}", flush=True)
            stand.close()
    print(f"{time.perf_counter() - begin:.0f} s")
    if args.json:
        args.json.write_text(json.dumps([vars(p) for p in measured], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
