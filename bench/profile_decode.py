"""GPU time of one generated token by kind of stage, from timestamps after every stage.

    python bench/profile_decode.py MODEL.gguf [--tokens 32] [--depth 0]

Timestamps keep neighbouring stages apart, so the sum is a little above the time of a token without them (printed beside).
"""

from __future__ import annotations

import argparse
import re
import time
from collections import defaultdict

import numpy as np

from vkback.models.engine import Engine, Sampler, loop_state
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
            engine.n_past = args.depth
        start = time.perf_counter()
        for _ in engine.generate(1, 128, stop_at_eos=False):
            pass
        per_token = (time.perf_counter() - start) / 128
        engine.n_past = args.depth
        program = engine._program("greedy")
        engine._set_input([1], [engine.n_past])
        engine.device.upload(engine._inputs["loop"], loop_state(Sampler(), []))
        commands = program.record("profile", timestamps=True)
        warm_up(engine.device, commands, 0.3)
        totals: dict[str, list[float]] = defaultdict(list)
        sizes: dict[str, int] = defaultdict(int)
        counts: dict[str, int] = defaultdict(int)
        kernels: dict[str, str] = {}
        for i in range(args.tokens + 2):
            engine.device.submit(commands).wait()
            marks = [t for _, t in commands.timestamps()]
            sums: dict[str, float] = defaultdict(float)
            for k, stage in enumerate(program.schedule.stages):
                key = " | ".join(dict.fromkeys(re.sub(r"-\d+", "", d.label) for d in stage))
                sums[key] += (marks[k + 1] - marks[k]) / 1e3
                if i == 0:
                    sizes[key] += sum(d.nbytes for d in stage)
                    counts[key] += 1
                    kernels[key] = "; ".join(f"{d.groups} {d.reason.split(':')[1] if ':' in d.reason else ''}" for d in stage)
            if i > 1:
                for key, us in sums.items():
                    totals[key].append(us)
        total = sum(float(np.median(v)) for v in totals.values())
        share = engine.bytes_per_token / per_token / 1e9 / roof * 100
        print(f"{engine.description}: {1 / per_token:.1f} t/s ({per_token * 1e6:.0f} us a token), {total:.0f} us with timestamps, "
              f"read rate {roof:.0f} GB/s, {share:.0f} % of it")
        for key, values in sorted(totals.items(), key=lambda kv: -float(np.median(kv[1]))):
            us, count = float(np.median(values)), counts[key]
            least = sizes[key] / count / roof / 1e3
            print(f"{us:8.1f} us {100 * us / total:5.1f} %  {count:3} x {us / count:6.2f} us  roof {least:6.2f}  {key}  {kernels[key]}")


if __name__ == "__main__":
    main()
