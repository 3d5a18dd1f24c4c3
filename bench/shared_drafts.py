"""What drafts gain several texts of a batch at once, at made acceptance.

    python bench/shared_drafts.py MODEL.gguf [SEQUENCES ...]

Texts of one batch are made without drafts, then once more with drafts by position that are all right, of which two of three are, and that
are all wrong.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vkback.engine.batch.batch import Batch, Request
from vkback.engine.drafts import DraftCounts, Drafts
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions

PROMPT, TOKENS, REPEATED = 64, 256, 3


def run(batch: Batch, requests: Sequence[Request]) -> tuple[float, list[list[int]], DraftCounts]:
    """Tokens a second of all together without compiling, the best of several; their texts, and drafts."""
    best, texts, counts = 0.0, list[list[int]](), DraftCounts()
    for _ in range(REPEATED + 1):
        ids = [batch.add(request) for request in requests]
        found: dict[int, list[int]] = {id: [] for id in ids}
        before = batch.counters.drafts
        batch.read_prompts()
        begun, compiled = time.perf_counter(), batch.engine.compiled.seconds
        for update in batch.run():
            found[update.id] += update.tokens
        seconds = time.perf_counter() - begun - (batch.engine.compiled.seconds - compiled)
        best, texts = max(best, sum(map(len, found.values())) / seconds), list(found.values())
        after = batch.counters.drafts
        counts = DraftCounts(after.steps - before.steps, after.drafted - before.drafted, after.accepted - before.accepted)
    return best, texts, counts


def main(path: Path, sequences: Sequence[int]) -> None:
    rows = ["| sequences | drafts | t/s | plain t/s | gain | drafted | accepted |", "|---:|---|---:|---:|---:|---:|---:|"]
    with Engine.open(path, None, LoadOptions(ctx=1024)) as engine:
        print(f"{engine.device.caps.summary_line()}, {engine.description}", flush=True)
        vocab = engine.model.hp.n_vocab
        rng = np.random.default_rng(1)
        for n in sequences:
            with Batch(engine, sequences=n, prompt_share=1, reuse=False, max_step_tokens=64, prefill=0) as batch:
                prompts = [tuple(rng.integers(vocab, size=PROMPT).tolist()) for _ in range(n)]
                plain, texts, _ = run(batch, [Request(prompt, TOKENS, stop_at_eos=False) for prompt in prompts])
                for what, every in {"all right": 0, "two of three right": 3, "all wrong": 1}.items():
                    known = [
                        (*prompt, *((t + 1) % vocab if every and i % every == every - 1 else t for i, t in enumerate(text)))
                        for prompt, text in zip(prompts, texts, strict=True)
                    ]
                    both = zip(prompts, known, strict=True)
                    asked = [Request(prompt, TOKENS, stop_at_eos=False, drafts=Drafts(known=row)) for prompt, row in both]
                    found, made, counts = run(batch, asked)
                    same = sum(a == b for a, b in zip(made, texts, strict=True))
                    rows.append(
                        f"| {n} | {what}, {same} texts alike | {found:.0f} | {plain:.0f} | {found / plain:.2f} | {counts.drafted} | "
                        f"{counts.accepted} |"
                    )
                    print(rows[-1], flush=True)
    print("\n".join(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("sequences", type=int, nargs="*", default=[2, 4, 8, 16])
    given = parser.parse_args()
    main(given.model, given.sequences)
