"""GPU time of one generated token by kind of stage, from timestamps after every stage.

    python bench/profile_decode.py MODEL.gguf [--tokens 32] [--depth 0]

Timestamps keep neighbouring stages apart, so the sum is a little above the time of a token without them (printed beside).
"""

from __future__ import annotations

import argparse
import re
import time

import numpy as np
import pandas as pd

from vkback.engine.engine import Engine
from vkback.engine.sampler import Sampler, loop_state
from vkback.timing.launches import warm_up
from vkback.timing.read_rate import measure_read_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--device")
    args = parser.parse_args()
    with Engine.load(args.model, args.device, progress=False, n_ctx=args.depth + 512) as engine:
        roof = measure_read_rate(engine.device, engine.library).gb_s
        if args.depth:
            engine.prompt(np.random.default_rng(0).integers(engine.model.hp.n_vocab, size=args.depth).tolist())
        for _ in range(3):
            for _ in engine.generate(1, 128, stop_at_eos=False):
                pass
            engine.rewind(args.depth)
        start = time.perf_counter()
        for _ in engine.generate(1, 128, stop_at_eos=False):
            pass
        per_token = (time.perf_counter() - start) / 128
        engine.rewind(args.depth)
        programs = engine._token_programs
        program = programs.program("greedy")
        programs.set_input(1, engine.n_past)
        engine.device.upload(programs.inputs["loop"], loop_state(Sampler(), []))
        commands = program.record("profile", timestamps=True)
        warm_up(engine.device, commands, 0.3)
        stages = pd.DataFrame(
            {
                "kind": " | ".join(dict.fromkeys(re.sub(r"-\d+", "", d.label) for d in stage)),
                "nbytes": sum(d.nbytes for d in stage),
                "kernel": "; ".join(f"{d.groups} {d.reason.split(':')[1] if ':' in d.reason else ''}" for d in stage),
            }
            for stage in program.schedule.stages
        )
        runs = []
        for _ in range(args.tokens + 2):
            engine.device.submit(commands).wait()
            runs.append(np.diff([t for _, t in commands.timestamps()]) / 1e3)
        us_by_run = pd.DataFrame(np.array(runs[2:]).T).groupby(stages["kind"]).sum()  # the first two runs warm up
        kinds = stages.groupby("kind").agg(nbytes=("nbytes", "sum"), count=("kind", "size"), kernel=("kernel", "last"))
        kinds["us"] = us_by_run.median(axis=1)
        total = kinds["us"].sum()
        share = engine.bytes_per_token / per_token / 1e9 / roof * 100
        print(
            f"{engine.description}: {1 / per_token:.1f} t/s ({per_token * 1e6:.0f} us a token), {total:.0f} us with timestamps, "
            f"read rate {roof:.0f} GB/s, {share:.0f} % of it"
        )
        for kind, k in kinds.sort_values("us", ascending=False).iterrows():
            least = k["nbytes"] / k["count"] / roof / 1e3
            times = f"{k['us']:8.1f} us {100 * k['us'] / total:5.1f} %  {k['count']:3} x {k['us'] / k['count']:6.2f} us"
            print(f"{times}  roof {least:6.2f}  {kind}  {k['kernel']}")


if __name__ == "__main__":
    main()
