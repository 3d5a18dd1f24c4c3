"""Times the recurrence of a prompt, the gated delta net's or that of Mamba-2: token by token (scan), and in chunks of tokens, with random
inputs.

    python bench/recurrences.py [--op delta_net] [--heads 32x16x128x128] [--n 16,64,512,2048] [--scan P,...] [--chunks P,...] [--json FILE]

--op delta_net or ssm_scan. --heads N_HEADxN_GROUPxROWSxCOLUMNS of a state: of a delta net heads of v, heads of q and k, values of v and of
k; of Mamba-2 heads, groups, head_dim and d_state. A point of --scan is LANESxROWS, of a delta net LANESxROWSxPER_THREAD; of --chunks
CHUNKxROWSxTOKENS, of Mamba-2 CHUNKxROWSxCOLUMNSxTOKENS.

One line for each number of tokens and point: microseconds a launch, a barrier between dispatches that depend on each other (the best of the
repetitions), of chunks also of each dispatch by itself; TFLOPS; and the NMSE of y and state against the first point of this number of
tokens, which up to 128 tokens is compared with numpy. The last lines name the fastest scan and the fastest chunks.
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
from vkback.ops.case import Array, Case, Problem
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.ops.recurrent.delta_net import DeltaNet
from vkback.ops.recurrent.ssm_scan import SsmScan
from vkback.ops.storage import nbytes
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.launches import span_us, warm_up
from vkback.tuning.lookup import Overrides, Tuning

NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "delta_net": {"scan": ("lanes", "rows", "per_thread"), "chunks": ("chunk", "rows", "tokens")},
    "ssm_scan": {"scan": ("lanes", "rows"), "chunks": ("chunk", "rows", "columns", "tokens")},
}
HEADS = {"delta_net": "32x16x128x128", "ssm_scan": "128x8x64x128"}
POINTS = {
    "delta_net": {
        "scan": "8x16x1,8x8x1,16x8x1,4x16x1",
        "chunks": "64x32x2,64x32x4,64x32x1,64x16x1,64x16x2,64x16x4,64x8x2,32x32x1,32x32x2,32x32x4,32x16x1,32x16x2,32x8x1,16x32x1,16x16x1",
    },
    "ssm_scan": {
        "scan": "8x16,8x32,4x16,16x16",
        "chunks": "64x64x64x4,64x64x64x8,64x32x64x4,64x32x128x4,64x32x32x4,64x64x128x4,64x16x64x4,32x32x64x4,32x64x64x4,32x32x32x2",
    },
}
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
        self._arena = device.arena("recurrence", sum(nbytes(t) + 4096 for t in tensors.values()) + (256 << 20), "device")
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
        rec = self.device.recorder("recurrence", timestamps=2)
        rec.barrier()
        rec.timestamp("start")
        for _ in range(launches):
            written: frozenset[tuple[str, str]] = frozenset()
            for d in dispatches:
                bound = [self._bind(a.tensor.name, nbytes(a.tensor)) for a in d.args]
                if d.reads & written:
                    rec.barrier()
                    written = frozenset()
                written |= d.writes
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


def built_case(op: str, n: int, heads: Sequence[int]) -> Case:
    n_head, n_group, rows, columns = heads
    build = DeltaNet().build_case if op == "delta_net" else SsmScan().build_case
    return build(n, n_head, rows, columns, n_group=n_group, pos0=512)


def points(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for kernel, names in NAMES[args.op].items():
        given: str | None = getattr(args, kernel)
        for text in filter(None, (POINTS[args.op][kernel] if given is None else given).split(",")):
            values = text.split("x")
            if len(values) != len(names) or not all(v.isdecimal() for v in values):
                raise PlanError(f"[bench] --{kernel} {text!r}: expected {'x'.join(names).upper()}")
            found.append((f"{kernel} {text}", {"kernel": kernel, **dict(zip(names, map(int, values), strict=True))}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="delta_net", choices=list(NAMES))
    parser.add_argument("--heads")
    parser.add_argument("--n", default="16,64,128,512,2048")
    parser.add_argument("--scan")
    parser.add_argument("--chunks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device")
    args = parser.parse_args()
    library = ShaderLibrary()
    heads = [int(part) for part in (args.heads or HEADS[args.op]).split("x")]
    measured: list[Point] = []
    begin = time.perf_counter()
    with Device.open(args.device) as device:
        tables = Tuning.for_device(device.caps)
        print(f"{device.caps.name}, driver {device.caps.driver_info}, {args.op}: heads, groups, rows, columns {heads}", flush=True)
        for n in map(int, args.n.split(",")):
            stand = Stand(device, library, built_case(args.op, n, heads).build())
            ways = [(name, LowerContext(device.caps, Overrides(tables, {args.op: params}, name))) for name, params in points(args)]
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
    for n in dict.fromkeys(p.n for p in measured):
        best = [
            min((p for p in measured if p.n == n and p.kernel.startswith(k)), key=lambda p: p.us, default=None) for k in ("scan", "chunks")
        ]
        print(f"{n:5d} tokens: " + "; ".join(f"{p.kernel} {p.us:.1f} us" for p in best if p is not None))
    print(f"{time.perf_counter() - begin:.0f} s")
    if args.json:
        args.json.write_text(json.dumps([vars(p) for p in measured], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
