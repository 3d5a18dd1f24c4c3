"""Times the stages between the GEMVs as a token pays for them: one launch after the other, each with its own layer's KV cache.

    python bench/stages.py [--op ATTN_DECODE] [--model 8b,qwen3moe,gpt-oss] [--context 1,128,512] [--n-ctx 32768] [--layers 32] [--sweep]

One line a point: kernel parameters, microseconds a launch (median of 5 recordings), bytes of the rows a token sees per second.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

import numpy as np

from vkback.device import BufferRange, Device
from vkback.ops.attention.flash import AttnDecode, FlashAttnExt
from vkback.ops.case import Case, Problem
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.moe.reduce import MoeReduce
from vkback.ops.moe.topk import Argmax, TopkMoe
from vkback.ops.op import OPS
from vkback.ops.sampling.sample import Sample
from vkback.ops.storage import nbytes
from vkback.plan.schedule import into_stages
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.launches import span_us, warm_up
from vkback.tuning.lookup import Overrides, Tuning


@dataclasses.dataclass(frozen=True)
class Model:
    """What these stages see of a model."""

    n_head: int
    n_head_kv: int
    head_dim: int
    mode: str
    norm: bool
    vocab: int
    n_embd: int = 0
    n_expert: int = 0
    n_used: int = 0
    gating: str = "softmax"


MODELS = {
    "demo": Model(4, 2, 64, "neox", True, 4096, 256, 16, 4),
    "8b": Model(32, 8, 128, "normal", False, 128256),
    "1b": Model(32, 8, 64, "normal", False, 128256),
    "qwen3moe": Model(32, 4, 128, "neox", True, 151936, 2048, 128, 8),
    "gpt-oss": Model(64, 8, 64, "neox", False, 201088, 2880, 32, 4, "softmax_weight"),
}


def cases(op: str, name: str, args: argparse.Namespace) -> Iterator[tuple[str, Case, int]]:
    """(label, case, bytes a token must move) for one op and model."""
    m = MODELS[name]
    if op in ("ATTN_DECODE", "FLASH_ATTN_EXT"):
        for rows in map(int, args.context.split(",")):
            moved = 4 * m.n_head_kv * m.head_dim * rows
            if op == "ATTN_DECODE":
                case = AttnDecode().build_case(
                    m.n_head, m.n_head_kv, m.head_dim, args.n_ctx, rows - 1, m.mode, m.norm, False, args.y, seed=1, garbage=False
                )
            else:
                case = FlashAttnExt().build_case(m.n_head, m.n_head_kv, m.head_dim, args.n_ctx, (rows - 1,), args.y, seed=1, garbage=False)
            yield f"{name} context {rows}", case, moved
    elif op == "TOPK_MOE" and m.n_expert:
        yield name, TopkMoe().build_case(1, m.n_expert, m.n_used, True, m.gating, 1.0, False, 1), 4 * m.n_expert
    elif op == "MOE_REDUCE" and m.n_expert:
        yield name, MoeReduce().build_case(1, m.n_used, m.n_embd, False, 1), 4 * m.n_used * m.n_embd
    elif op == "ARGMAX":
        yield name, Argmax().build_case(ne=(m.vocab,), seed=1), 4 * m.vocab
    elif op == "SAMPLE":
        for greedy in (True, False):
            case = Sample().build_case(m.vocab, 0.0 if greedy else 0.8, 40, 0.95, 0.05, 1, greedy=greedy, seed=1)
            yield f"{name} {'greedy' if greedy else 'sampled'}", case, 4 * m.vocab


class Stand:
    """One problem in device memory, its caches once for every layer."""

    def __init__(self, device: Device, library: ShaderLibrary, problem: Problem, layers: int) -> None:
        self.device, self.library, self.problem = device, library, problem
        node = problem.node
        self.tensors = {t.name: t for t in (*node.inputs, *node.outputs)}
        caches = {name for name, t in self.tensors.items() if t.kind == "state"}
        self.layers = layers if caches else 1
        room = sum((self.layers if n in caches else 1) * (nbytes(t) + 256) for n, t in self.tensors.items())
        self._arena = device.arena("stages", room + (64 << 20), "device")
        self._ranges: dict[tuple[str, int], BufferRange] = {}
        for name, t in self.tensors.items():
            for layer in range(self.layers if name in caches else 1):
                block = self._ranges[name, layer] = self._arena.alloc(nbytes(t), name)
                value = problem.values.get(name)
                if value is not None and layer == 0:
                    device.upload(block, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
                elif value is not None:
                    rec = device.recorder("copy")
                    rec.copy(self._ranges[name, 0], block)
                    device.run(rec)

    def _bind(self, name: str, size: int, layer: int, counter: bool) -> BufferRange:
        for key in ((name, layer % self.layers), (name, 0)):
            if key in self._ranges:
                return self._ranges[key]
        block = self._ranges[name, 0] = self._arena.alloc(size, name)
        if counter:
            self.device.upload(block, np.zeros(size, np.uint8))
        return block

    def time(self, ctx: LowerContext, launches: int) -> float:
        """Microseconds a launch, median of five replays of a recording, with the clocks up."""
        stages = into_stages(OPS[self.problem.node.op].lower(self.problem.node, ctx))
        kernels = compile_kernels(self.device, self.library, [d for stage in stages for d in stage])
        rec = self.device.recorder("stages", timestamps=2)
        rec.barrier()
        rec.timestamp("start")
        for i in range(launches):
            for stage in stages:
                rec.barrier()
                for d in stage:
                    ranges = [self._bind(a.tensor.name, nbytes(a.tensor), i, a.tensor.kind == "counter") for a in d.args]
                    rec.dispatch(kernels[d.kernel, len(d.args), len(d.push)], ranges, d.push, d.groups)
        rec.timestamp("end")
        commands = rec.finish()
        warm_up(self.device, commands, 0.02)
        times = [span_us(self.device, commands) / launches for _ in range(5)]
        commands.destroy()
        return float(np.median(times))

    def close(self) -> None:
        self._arena.destroy()


def grid(op: str) -> tuple[str, Iterator[dict[str, int]]]:
    """The family of an op and the points of its sweep."""
    family = {
        "ATTN_DECODE": "attention",
        "FLASH_ATTN_EXT": "attention",
        "ARGMAX": "argmax",
        "TOPK_MOE": "topk_moe",
        "MOE_REDUCE": "moe_reduce",
        "SAMPLE": "sample",
    }

    def points() -> Iterator[dict[str, int]]:
        if family[op] == "attention":
            for wg_size in (64, 128, 256, 512):
                for lanes in (2, 4, 8):
                    for steps in (1, 2):
                        for queries in (2, 4, 8):
                            for rows in (32, 64, 128, 256):
                                for groups in (128, 264, 528):
                                    point = {"wg_size": wg_size, "lanes": lanes, "steps": steps, "queries": queries}
                                    yield point | {"rows_per_split": rows, "groups": groups}
        elif family[op] in ("argmax", "sample"):
            for wg_size in (128, 256, 512, 1024):
                for per_thread in (1, 2, 4, 8):
                    yield {"wg_size": wg_size, "per_thread": per_thread}
        elif family[op] == "topk_moe":
            for wg_size in (32, 64, 128, 256):
                for block in (32, 64, 128, 256):
                    yield {"wg_size": wg_size, "block": block}
        else:
            for wg_size in (32, 64, 128, 256):
                yield {"wg_size": wg_size}

    return family[op], points()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="ATTN_DECODE,FLASH_ATTN_EXT,TOPK_MOE,MOE_REDUCE,ARGMAX,SAMPLE")
    parser.add_argument("--model", default="8b,qwen3moe,gpt-oss")
    parser.add_argument("--context", default="1,128,512,4096,16384")
    parser.add_argument("--n-ctx", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--launches", type=int, default=256)
    parser.add_argument("--y", default="Q8_1", choices=("F32", "Q8_1"))
    parser.add_argument("--sweep", action="store_true", help="every point of the grid, the ten fastest shown")
    args = parser.parse_args()
    library = ShaderLibrary()
    with Device.open() as device:
        tables = Tuning.for_device(device.caps)
        ctx = LowerContext(device.caps, tables)
        for op in args.op.split(","):
            for name in args.model.split(","):
                for label, case, moved in cases(op, name, args):
                    stand = Stand(device, library, case.build(), args.layers)
                    results: list[tuple[float, str]] = []
                    family, points = grid(op)
                    for params in points if args.sweep else [{}]:
                        try:
                            us = stand.time(dataclasses.replace(ctx, tuning=Overrides(tables, {family: params}, "sweep")), args.launches)
                        except PlanError:
                            continue
                        results.append((us, str(params or "tables")))
                    for us, params_shown in sorted(results)[:10]:
                        print(f"{op} {label}  {us:8.2f} us  {moved / us / 1e3:8.1f} GB/s  {params_shown}", flush=True)
                    stand.close()


if __name__ == "__main__":
    main()
