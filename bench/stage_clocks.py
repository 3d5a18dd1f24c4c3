"""When the workgroups of each stage of a token start, end their spin-waits, have made their sums and have stored them.

    python bench/stage_clocks.py MODEL.gguf [--ctx 4352] [--depth 4096] [VARIANT]

A VARIANT is as for bench/one_token.py. A line a kind of stage, medians over its layers, by the device's clock: how many, microseconds from
the end of the stage before to its own, and when after that the first, the middle and the last workgroup got to each point.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd

from vkback.device import Device
from vkback.models.registry import Model
from vkback.ops.lowering import LowerContext
from vkback.plan.planner import plan
from vkback.shader import ShaderLibrary
from vkback.timing.stage_clocks import POINTS, StageClock, measure_clocks
from vkback.timing.token_program import Tokens
from vkback.tuning.lookup import Tuning, with_overrides


def kind(clock: StageClock) -> tuple[str, int]:
    """What stages of different layers have in common."""
    return " ".join(dict.fromkeys(re.sub(r"-\d+", "", label) for label in clock.labels)), clock.workgroups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("variant", nargs="?", default="", metavar="VARIANT")
    parser.add_argument("--ctx", type=int, help="rows of the cache, default as the engine's")
    parser.add_argument("--depth", type=int, default=128, help="tokens that the timed one sees; beyond 128 their keys and values are zeros")
    args = parser.parse_intermixed_args()
    with Device.open() as device:
        tables = Tuning.for_device(device.caps)
        ctx = LowerContext(device.caps, with_overrides(tables, args.variant))
        with Tokens(Model.open(args.model), device, ShaderLibrary(), ctx, n_ctx=args.ctx, depth=args.depth) as tokens:
            clocks = measure_clocks(tokens, plan(tokens.graph, ctx))
    table = pd.DataFrame([(*kind(c), c.took_us, c) for c in clocks], columns=["stage", "groups", "took", "clock"])
    print(f"{'stage':36} {'groups':>6} {'times':>5} {'us':>8}  " + "  ".join(f"{point:^23}" for point in POINTS))
    for key, found in table.groupby(["stage", "groups"], sort=False):
        name, groups = cast(tuple[str, int], key)
        us = np.median([c.us for c in found["clock"]], axis=0)
        points = "  ".join("".join(f"{v:7.1f} " for v in row)[:-1] for row in us)
        print(f"{name[:36]:36} {groups:6} {len(found):5} {found['took'].median():8.2f}  {points}")


if __name__ == "__main__":
    main()
