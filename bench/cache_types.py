"""What the type of a KV cache changes: perplexity and Kullback-Leibler divergence at every pair of types, against the F16 cache.

    python bench/cache_types.py [-m demo-dense -m demo-moe] [-f TEXT] [--chunks N] [--act f32] [--device N]

Markdown on stdout. A change of perplexity is that of the mean log probability of the same tokens, so its error is that of the difference
and not of the two figures. Status 1 where a Q8_0 cache of K and V changes it by more than 0.1 %, beyond twice the error.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, cast

import vkback
from vkback import quants
from vkback.evaluate.kl import BaseReader, BaseWriter, Divergence, Divergences, describe_text
from vkback.evaluate.perplexity import Perplexity, count_chunks
from vkback.ops.lowering import Act

TEXT = Path(__file__).resolve().parents[1] / "tests/data/war_of_the_worlds.txt"
TYPES = ("f16", "q8_0", "q4_0")
MAX_CHANGE = 0.1
"""Per cent of perplexity that a Q8_0 cache may change."""


@dataclass(frozen=True)
class Row:
    """One pair of types; base is None for F16 and F16."""

    k: str
    v: str
    perplexity: Perplexity
    base: Divergence | None

    @property
    def bytes(self) -> float:
        """Of the F16 cache's."""
        return sum(_bits(t) for t in (self.k, self.v)) / (2 * _bits("f16"))

    @property
    def change(self) -> tuple[float, float]:
        """Per cent of perplexity, with its error."""
        if self.base is None:
            return 0.0, 0.0
        return 100 * math.expm1(self.base.log_ratio), 100 * self.base.log_ratio_error


def _bits(kind: str) -> float:
    """Of a value."""
    return quants.row_bytes(kind.upper(), quants.UNIT) * 8 / quants.UNIT


def measure(model: str, text: str, *, chunk: int, chunks: int | None, act: Act, device: str | None) -> tuple[str, list[Row]]:
    """The model in words, and a row for every pair."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        for k, v in product(TYPES, TYPES):
            begun = time.perf_counter()
            with vkback.load(model, device, ctx=chunk, act=act, cache_type_k=k, cache_type_v=v) as loaded:
                ids = loaded.ids(text, start=True)
                about = f"{loaded.name}, {loaded.engine.device.caps.name}, {loaded.engine.device.caps.driver_info}"
                same = describe_text(ids, chunk, count_chunks(ids, chunk, chunks), loaded.n_vocab)
                found = _score(loaded, ids, base, same, chunk, chunks, first=not rows)
            rows.append(Row(k, v, *found))
            print(f"{model} {k} {v}: {rows[-1].perplexity.value:.4f} in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    return about, rows


def _score(
    loaded: vkback.LoadedModel, ids: Sequence[int], base: Path, same: dict[str, Any], chunk: int, chunks: int | None, *, first: bool
) -> tuple[Perplexity, Divergence | None]:
    if first:
        with BaseWriter(base, same, {}) as writer:
            return loaded.perplexity(ids, chunk=chunk, n_chunks=chunks, on_scored=lambda logits, _: writer.add(logits)), None
    gathered = Divergences()
    with BaseReader(base) as reader:
        reader.check(same)
        value = loaded.perplexity(
            ids, chunk=chunk, n_chunks=chunks, on_scored=lambda logits, targets: gathered.add(reader.rows(len(targets)), logits, targets)
        )
    return value, gathered.result()


def table(rows: Sequence[Row]) -> str:
    lines = ["| K | V | bytes | perplexity | change | KL divergence, nats | same likeliest token |", "|---|---|---:|---:|---:|---:|---:|"]
    for row in rows:
        told = f"| {row.k} | {row.v} | {100 * row.bytes:.0f} % | {row.perplexity.value:.4f} |"
        if row.base is not None:
            change, error = row.change
            told += f" {change:+.3f} +- {error:.3f} % | {row.base.mean:.6f} +- {row.base.error:.6f} | {100 * row.base.same_top:.2f} % |"
        else:
            told += " | | |"
        lines.append(told)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", action="append", help="[default: both built-in models]")
    parser.add_argument("-f", "--file", type=Path, default=TEXT)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--act", default="f32", choices=("auto", "f32", "q8_1"))
    parser.add_argument("--device")
    args = parser.parse_args()
    text = args.file.read_text(encoding="utf-8")
    worst = 0.0
    for number, model in enumerate(args.model or ("demo-dense", "demo-moe")):
        about, rows = measure(model, text, chunk=args.chunk, chunks=args.chunks, act=cast(Act, args.act), device=args.device)
        tokens = rows[0].perplexity.tokens
        if not number:
            print(f"{datetime.now(UTC):%Y-%m-%d}. {args.file.name}, {tokens} tokens scored in chunks of {args.chunk}, act {args.act}.")
        print(f"\n## {about}\n\n{table(rows)}\n")
        change, error = next(row.change for row in rows if (row.k, row.v) == ("q8_0", "q8_0"))
        over = abs(change) - 2 * error > MAX_CHANGE
        verdict = "over" if over else "within"
        print(f"q8_0, q8_0 changes the perplexity by {change:+.3f} +- {error:.3f} %: {verdict} {MAX_CHANGE:g} %.", flush=True)
        worst = max(worst, float(over))
    sys.exit(bool(worst))


if __name__ == "__main__":
    main()
