"""Garbles case lines in every place: what is read must be a case that can be planned or is refused, all else an error of ours.

    python tools/fuzz_lines.py --count 10000 --seed 1 [--from FILE]

Lines come from the full set (or a file, as `vkback test-ops --from` reads it). Prints what became of them, and the first lines that ended
in any other exception; exit code 1 when there are such.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vkback.device import Capabilities
from vkback.errors import VkbackError
from vkback.harness.cases import find_case, full_cases
from vkback.harness.lines import case_lines
from vkback.harness.support import support_of
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext
from vkback.tuning.lookup import Tuning

PROFILE = "nvidia_h200_linux"
MAX_VALUES = 1 << 20
"""Cases whose sizes multiply to more are read, not built."""
MAX_SHOWN = 10

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_PART = re.compile(r"\w+=(?:\[[^\]]*\]|[^,()\[\]]*)")
ODD_NUMBERS = ("0", "-1", "1", "3", "7", "255", "1048577", "99999999999", "1e30", "inf", "nan", "0.5", "1.000000", "07", "2147483648", "x")
ODD_WORDS = ("", "q4_K", "Q9_Z", "f16", "i64", "bf16", "NONE", "[1,2]", "[[1]]", "[]", "[1,x]", "ü", "=", "a=b", "'", "%s", "None", "BARE")

Change = Callable[[random.Random, str], str]


def _character(rng: random.Random, line: str) -> str:
    at = rng.randrange(len(line))
    put = rng.choice("()[],=.- _\n\x00\t'\"é0aZ9%{}\\")
    return rng.choice((line[:at] + line[at + 1 :], line[:at] + put + line[at:], line[:at] + put + line[at + 1 :]))


def _number(rng: random.Random, line: str) -> str:
    found = list(_NUMBER.finditer(line))
    if not found:
        return _character(rng, line)
    match = rng.choice(found)
    return line[: match.start()] + rng.choice(ODD_NUMBERS) + line[match.end() :]


def _value(rng: random.Random, line: str) -> str:
    found = list(_PART.finditer(line))
    if not found:
        return _character(rng, line)
    match = rng.choice(found)
    key = match[0].partition("=")[0]
    return line[: match.start()] + f"{key}={rng.choice(ODD_WORDS)}" + line[match.end() :]


def _parts(rng: random.Random, line: str) -> str:
    """A part less, twice, elsewhere, without its value, or under another name."""
    op, _, rest = line.partition("(")
    parts = _PART.findall(rest)
    if not parts:
        return _character(rng, line)
    at = rng.randrange(len(parts))
    key, _, value = parts[at].partition("=")
    kind = rng.randrange(5)
    if kind == 0:
        del parts[at]
    elif kind == 1:
        parts.append(parts[at])
    elif kind == 2:
        rng.shuffle(parts)
    else:
        parts[at] = key if kind == 3 else f"{rng.choice(('n', 'k', 'v', 'ne', 'type', 'bs', 'zz', 'seed', 'tuning', 'range'))}={value}"
    return f"{op}({','.join(parts)})"


def _cut(rng: random.Random, line: str) -> str:
    return line[: rng.randrange(len(line))]


CHANGES: tuple[Change, ...] = (_character, _number, _value, _parts, _cut)


@dataclass
class Outcome:
    """What became of garbled lines, by kind, and (line, traceback) of each that ended in an exception that is not ours."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, str]] = field(default_factory=list)


def small(case: Case) -> bool:
    """Whether a case is quickly built."""
    sizes = [n for v in case.params.values() for n in (v if isinstance(v, tuple) else (v,)) if isinstance(n, int) and n > 1]
    return prod(sizes) <= MAX_VALUES


def fuzz(lines: Sequence[str], count: int, seed: int, ctx: LowerContext) -> Outcome:
    """Garble `count` lines, one to three times each, and read, build and plan what came of it."""
    rng, outcome = random.Random(seed), Outcome()
    for _ in range(count):
        line = rng.choice(lines)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            line = rng.choice(CHANGES)(rng, line) if line else "("
        try:
            case = find_case(line)
            if small(case):
                (result,) = support_of([case], ctx)
                outcome.counts["runs" if result.supported else "not supported"] += 1
            else:
                outcome.counts["large"] += 1
        except VkbackError:
            outcome.counts["refused"] += 1
        except Exception:
            outcome.faults.append((line, traceback.format_exc()))
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--from", dest="source", type=Path)
    args = parser.parse_args()
    lines = (
        [line for _, line in case_lines(args.source.read_text(encoding="utf-8"))] if args.source else [case.line for case in full_cases()]
    )
    caps = Capabilities.from_profile(PROFILE)
    outcome = fuzz(lines, args.count, args.seed, LowerContext(caps, Tuning.for_device(caps)))
    print(", ".join(f"{kind} {n}" for kind, n in outcome.counts.most_common()) + f", other exceptions {len(outcome.faults)}")
    for line, trace in outcome.faults[:MAX_SHOWN]:
        print(f"\n{line}\n{trace}")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
