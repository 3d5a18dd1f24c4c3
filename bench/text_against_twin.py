"""Whether a device writes the text that numpy does: the device is fed the twin's greedy tokens, and the best token of each step compared.

    python bench/text_against_twin.py [MODEL...] [--tokens 16] [--prompt TEXT]

MODEL is a file or the name of a built-in model, by default both of these. Steps whose best logits are too close to tell do not count
(vkback/evaluate/prompt_text.py). Status 1 when a counted token differs.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from vkback.cli.shell import model_path
from vkback.engine.engine import Engine
from vkback.evaluate.prompt_text import TextCheck, compared
from vkback.evaluate.twin import NumpyTwin

BUILT_IN = ("demo-dense", "demo-moe")


def check(engine: Engine, ids: list[int], steps: int) -> TextCheck:
    """`steps` greedy tokens of the twin after the prompt `ids`, beside the logits of the device after the same tokens."""
    twin = NumpyTwin(engine.model, n_ctx=len(ids) + steps)
    logits = twin.forward(ids, head="last")["result_output"][-1]
    want = [logits]
    for at in range(len(ids), len(ids) + steps - 1):
        logits = twin.forward([int(logits.argmax())], at, head="last")["result_output"][-1]
        want.append(logits)
    text = [int(row.argmax()) for row in want]
    got = [engine.decode_logits(token) for token in (*ids, *text[:-1])][len(ids) - 1 :]
    return compared(np.stack(got).astype(np.float64), np.stack(want))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(BUILT_IN))
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt", default="It was a dark")
    parser.add_argument("--device")
    args = parser.parse_args()
    failed = False
    for name in args.models:
        with Engine.load(model_path(name), args.device, n_ctx=256) as engine:
            found = check(engine, engine.tokenizer.encode(args.prompt), args.tokens)
            failed |= bool(found.wrong)
            print(f"{name} on {engine.device.caps.name}: {found.text}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
