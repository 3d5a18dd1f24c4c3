"""Times a token under tuning overrides, in the token's own program, so that stages wait for each other as in use.

    python bench/one_token.py MODEL.gguf [--ctx 4352] [--depth 4096] [--rounds 3] VARIANT...

A variant is rows of a tuning table that come before all others (vkback/tuning/overrides.py):

    "attention : wg_size=512 steps=2"      "gemv experts=each : wg=512 x_in_shared=true; schedule : sync=barrier"

The variants take turns. A line each, the tables' own first: microseconds a token by the device's clock, what that makes of a second, the
NMSE of the logits against the tables' (median of three tokens), and whether a spin-wait timed out.
"""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from vkback.autotune.program_sweep import CHECKED_TOKENS
from vkback.device import Device
from vkback.errors import VkbackError
from vkback.evaluate.judge import nmse
from vkback.models.registry import Model
from vkback.ops.lowering import LowerContext
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.program import compile_kernels
from vkback.shader import ShaderLibrary
from vkback.timing.launches import warm_up
from vkback.timing.token_program import TokenProgram, Tokens
from vkback.tuning.lookup import Tuning, with_overrides

WARM_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("variants", nargs="*", metavar="VARIANT")
    parser.add_argument("--ctx", type=int, help="rows of the cache, default as the engine's")
    parser.add_argument("--depth", type=int, default=128, help="tokens that the timed one sees; beyond 128 their keys and values are zeros")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_intermixed_args()
    model, library = Model.open(args.model), ShaderLibrary()
    with Device.open() as device, ExitStack() as stack:
        tables = Tuning.for_device(device.caps)
        ctx = LowerContext(device.caps, tables)
        tokens = stack.enter_context(Tokens(model, device, library, ctx, n_ctx=args.ctx, depth=args.depth))
        schedules: dict[str, Schedule] = {}
        for text in ("", *args.variants):
            try:
                schedules[text] = plan(tokens.graph, dataclasses.replace(ctx, tuning=with_overrides(tables, text)))
            except VkbackError as e:
                print(f"{text}: {e}")
        compile_kernels(device, library, [d for schedule in schedules.values() for d in schedule.dispatches()])
        programs = {text: stack.enter_context(TokenProgram(tokens, schedule)) for text, schedule in schedules.items()}
        times: dict[str, list[float]] = {text: [] for text in programs}
        for _ in range(args.rounds):
            for text, program in programs.items():
                warm_up(device, program.commands, WARM_S)
                times[text] += [program.time_us() for _ in range(3)]
        want = programs[""].logits(CHECKED_TOKENS)
        for text, program in programs.items():
            us = float(np.median(times[text]))
            change = 100 * (us / float(np.median(times[""])) - 1)
            error = float(np.median([nmse(got, right) for got, right in zip(program.logits(CHECKED_TOKENS), want, strict=True)]))
            timed_out = " TIMED OUT" if program.timed_out else ""
            print(f"{us:9.1f} us {1e6 / us:8.1f} t/s {change:+6.1f} % {error:9.1e}{timed_out}  {text or 'tables'}")


if __name__ == "__main__":
    main()
