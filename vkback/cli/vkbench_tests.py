"""What vkbench is asked to measure: lists of values in llama-bench's notation, and the tests they make."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from vkback.cli.shell import UsageError
from vkback.report.bench_table import test_name

MAX_VALUES = 10_000
"""Of an option: more tests than anybody waits for."""

_NAME = re.compile(r"(?:pp(?P<pp>\d+))?(?:\+?tg(?P<tg>\d+))?(?:\s*@\s*d?(?P<depth>\d+))?")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?:(?P<kind>[+*])(?P<step>\d+))?)?")


@dataclass(frozen=True)
class BenchTest:
    """n_prompt tokens processed, then n_gen generated, with n_depth tokens already in the cache."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def name(self) -> str:
        return test_name(self.n_prompt, self.n_gen, self.n_depth)

    @property
    def is_prompt(self) -> bool:
        """A prompt and no generation."""
        return bool(self.n_prompt) and not self.n_gen

    @property
    def n_ctx(self) -> int:
        return self.n_depth + self.n_prompt + self.n_gen


def parse_values(texts: Sequence[str], option: str) -> list[int]:
    """Numbers from `512`, `128,256`, `1-4` (each), `0-8192+2048` (steps), `1-512*2` (factors), in the order given."""
    values: list[int] = []
    for part in (p.strip() for text in texts for p in text.split(",")):
        values += islice(_one_range(part, option), MAX_VALUES + 1)
        if len(values) > MAX_VALUES:
            raise UsageError(f"{option} {part}: more than {MAX_VALUES} values; give steps, as 1-8192+512 or 1-8192*2")
    return values


def _one_range(text: str, option: str) -> Iterator[int]:
    match = _RANGE.fullmatch(text)
    if not match:
        raise UsageError(f"{option} {text}: expected a number, a list as 128,256, or a range as 1-4, 0-8192+2048 or 1-512*2")
    value = int(match["first"])
    last = int(match["last"] or value)
    step = int(match["step"] or 1)
    times = match["kind"] == "*"
    if last < value or step < (2 if times else 1) or (times and value == 0):
        raise UsageError(f"{option} {text}: the range does not go up from {value} to {last}")
    while value <= last:
        yield value
        value = value * step if times else value + step


def parse_pair(text: str) -> tuple[int, int]:
    """`512,128` -> (512, 128)."""
    match = re.fullmatch(r"(\d+)\s*,\s*(\d+)", text.strip())
    if not match:
        raise UsageError(f"-pg {text}: expected prompt and generated tokens, as -pg 512,128")
    return int(match[1]), int(match[2])


def parse_name(text: str) -> BenchTest:
    """`pp512`, `tg128`, `pp512+tg128`, each with `@d4096`: the name a table shows is the name that runs it."""
    match = _NAME.fullmatch(text.strip())
    n_prompt, n_gen = (int(match["pp"] or 0), int(match["tg"] or 0)) if match else (0, 0)
    if not match or not n_prompt + n_gen:
        raise UsageError(f"{text!r} is not a test; expected a name as pp512, tg128, pp512+tg128 or tg128@d4096")
    return BenchTest(n_prompt, n_gen, int(match["depth"] or 0))


def plan_tests(
    names: Sequence[str], prompts: Sequence[str], gens: Sequence[str], pairs: Sequence[str], depths: Sequence[str]
) -> list[BenchTest]:
    """Named tests first, then for each depth all prompts, all generations, all pairs; a size of 0 drops its test.

    Without names, -p and -n default to 512 and 128, as in llama-bench. Raises UsageError when nothing is left.
    """
    tests = [parse_name(n) for n in names]
    n_prompts = parse_values(prompts, "-p") if prompts else [] if names else [512]
    n_gens = parse_values(gens, "-n") if gens else [] if names else [128]
    for depth in parse_values(depths, "-d") if depths else [0]:
        tests += [BenchTest(n, 0, depth) for n in n_prompts if n]
        tests += [BenchTest(0, n, depth) for n in n_gens if n]
        tests += [BenchTest(*pair, depth) for pair in map(parse_pair, pairs) if any(pair)]
    if not tests:
        raise UsageError("nothing to measure: every test has size 0. Give one, as tg128 or -n 128")
    return tests
