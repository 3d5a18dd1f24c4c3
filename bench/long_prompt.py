"""A long prompt: its speed, and how long its longest submit took, which must stay below half a second lest a driver takes it for a hang.

    python bench/long_prompt.py MODEL.gguf [--tokens 30000] [--ubatch 512]
    python bench/long_prompt.py MODEL.gguf --tokens 2000 --text 48      # and whether greedy text goes on as after token-by-token decode

MODEL is a file or the name of a built-in model; the cache has as many rows as needed, beyond the trained context, too. A submit's time is
from the end of the one before, or from its own beginning, to its end, on the host's clock. Status 1 when a submit took over 0.5 s or the
text differs.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from vkback.cli.shell import model_path
from vkback.engine.engine import Engine
from vkback.engine.prompts import LONGEST_SUBMIT_US
from vkback.evaluate.prompt_text import check_text
from vkback.report.bars import Bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--ubatch", type=int, help="tokens of a program, default as the engine's")
    parser.add_argument("--text", type=int, default=0, metavar="N", help="compare N tokens after the prompt")
    parser.add_argument("--act", choices=("auto", "f32", "q8_1"), default="auto")
    parser.add_argument("--device")
    args = parser.parse_args()
    n_ctx = args.tokens + args.text + 1
    with Engine.load(
        model_path(args.model), args.device, n_ctx=n_ctx, act=args.act, ubatch=args.ubatch, progress=Bars(prompts=True)
    ) as engine:
        ids = np.random.default_rng(0).integers(engine.model.hp.n_vocab, size=args.tokens).tolist()
        print(f"{engine.device.caps.name}, {engine.description}")
        engine.prepare(prompt=len(ids), logits=bool(args.text))
        begun = time.perf_counter()
        engine.prompt(ids)
        took = time.perf_counter() - begun
        longest, allowed = engine.longest_submit_s, LONGEST_SUBMIT_US / 1e6
        print(f"{len(ids)} tokens in {took:.2f} s, {len(ids) / took:.0f} t/s; longest submit {longest:.3f} s of {allowed:g} allowed")
        good = longest <= allowed
        if args.text:
            found = check_text(engine, ids, args.text)
            print(found.text)
            good = good and not found.wrong
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
