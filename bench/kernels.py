"""What the driver makes of the kernels of a model's token: registers, size of the code, spills, and on NVIDIA the machine code.

    python bench/kernels.py MODEL.gguf [--ctx 4224] [-t 1] [--only attention/] [--code FOLDER] [VARIANT...]

A VARIANT is as for bench/one_token.py. A line a kernel; with --code a file each, and its loops with what they consist of.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from vkback.compilers.machine_code import MachineCodeError, disassembled, loops, nvidia_code
from vkback.device import Device
from vkback.models.registry import Model
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext
from vkback.plan.planner import plan
from vkback.program import dispatch_spec
from vkback.shader import ShaderLibrary
from vkback.timing.token_program import token_graph
from vkback.tuning.lookup import Tuning, with_overrides


def show(device: Device, library: ShaderLibrary, d: Dispatch, number: int, folder: Path | None) -> None:
    spec = dispatch_spec(d, library)
    statistics = {s.name: s.value for s in device.kernel_statistics(spec)}
    print(f"  {d.label} {d.kernel.source} {'x'.join(map(str, d.groups))}: " + ", ".join(f"{k} {v}" for k, v in statistics.items()))
    if folder is None:
        return
    if "Binary Size" not in statistics:
        raise MachineCodeError(f"[code] {device.caps.name}: the driver does not tell how much code there is; --code is for NVIDIA's")
    lines = disassembled(nvidia_code(device.kernel_cache_data(spec), int(statistics["Binary Size"])), device.caps)
    path = folder / (re.sub(r"\W+", "-", f"{number} {d.label}") + ".sass")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"    {path}")
    for loop in loops(lines):
        print(f"    loop {loop.text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", default=[""])
    parser.add_argument("--ctx", type=int, help="rows of the cache, default as the engine's")
    parser.add_argument("-t", "--tokens", type=int, default=1, help="of a step; more than one with all logits")
    parser.add_argument("--only", default="", help="kernels whose source begins so")
    parser.add_argument("--code", type=Path, metavar="FOLDER")
    args = parser.parse_intermixed_args()
    if args.code:
        args.code.mkdir(parents=True, exist_ok=True)
    library, model, shown = ShaderLibrary(), Model.open(args.model), 0
    several = args.tokens > 1
    graph = model.graph(args.tokens, args.ctx or model.default_n_ctx, head="all") if several else token_graph(model, args.ctx)
    with Device.open(statistics=True) as device:
        tables = Tuning.for_device(device.caps)
        for variant in args.variants:
            print(variant or "tables")
            schedule = plan(graph, LowerContext(device.caps, with_overrides(tables, variant)))
            for d in {d.kernel: d for d in reversed(list(schedule.dispatches()))}.values():
                if d.kernel.source.startswith(args.only):
                    show(device, library, d, shown, args.code)
                    shown += 1


if __name__ == "__main__":
    main()
