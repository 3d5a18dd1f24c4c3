"""Times a token with kernel parameters answered by hand, in the token's own program, so that stages wait for each other as in use.

    python bench/one_token.py MODEL.gguf [--ctx 4352] [--depth 4096] [--rounds 3] VARIANT...

A variant is `FAMILY key=value ... : parameter=value ...`, several joined by `;`: the parameters replace those of the tuning tables wherever
the family is asked for something with these keys.

    "attention : wg_size=512 steps=2"      "mat_vec ids=1 y=Q8_1 : wg=512 rows=2; schedule : handover=barrier"

The variants take turns. A line each, the tables' own first: microseconds a token by the device's clock, what that makes of a second, the
NMSE of the logits against the tables', and whether a stage gave up waiting for another.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vkback.device import Device
from vkback.errors import VkbackError
from vkback.harness.in_program import TokenProgram, Tokens
from vkback.harness.judge import nmse
from vkback.harness.timing import warm_up
from vkback.models.registry import Model
from vkback.ops.base import FAMILIES, Choice, Chooser, LowerContext
from vkback.plan.planner import plan
from vkback.plan.tuning import Tuning
from vkback.shader import ShaderLibrary

WARM_S = 0.02


@dataclass(frozen=True)
class Answer:
    """Parameters for a family wherever the query has these values."""

    family: str
    match: Mapping[str, Any]
    params: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Answer:
        keys, colon, params = text.partition(":")
        family, *match = keys.split()
        if not colon or not params.split():
            raise SystemExit(f"{text!r}: expected FAMILY key=value ... : parameter=value ...")
        known = FAMILIES.get(family)
        if known is None:
            raise SystemExit(f"{text!r}: no family is called {family}; there are {', '.join(sorted(FAMILIES))}")
        answer = cls(family, _pairs(match), _pairs(params.split()))
        for given, legal in ((answer.match, known.match), (answer.params, known.set)):
            wrong = sorted(given.keys() - legal.keys())
            if wrong:
                raise SystemExit(f"{text!r}: {family} has no {wrong[0]}, expected some of {', '.join(legal)}")
        for key, value in answer.params.items():
            values = known.set[key]
            if isinstance(values, tuple) and value not in values:
                raise SystemExit(f"{text!r}: {key} = {value}, expected one of {', '.join(map(str, values))}")
        return answer


def _pairs(words: list[str]) -> dict[str, Any]:
    pairs = [word.partition("=") for word in words]
    return {key: int(value) if value.lstrip("-").isdigit() else value for key, _, value in pairs}


@dataclass(frozen=True)
class ByHand:
    """Tables with answers in front of them."""

    tables: Chooser
    answers: tuple[Answer, ...]

    def pick(self, family: str, **query: Any) -> Choice:
        choice = self.tables.pick(family, **query)
        for answer in self.answers:
            if answer.family == family and all(query.get(k) == v for k, v in answer.match.items()):
                choice = Choice({**choice.params, **answer.params}, "by hand")
        return choice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("variants", nargs="*", metavar="VARIANT")
    parser.add_argument("--ctx", type=int, help="rows of the cache, default as the engine's")
    parser.add_argument("--depth", type=int, default=128, help="tokens that the timed one sees; beyond 128 their keys and values are zeros")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_intermixed_args()
    variants = {text: tuple(Answer.parse(part) for part in text.split(";") if part.strip()) for text in ("", *args.variants)}
    model, library = Model.open(args.model), ShaderLibrary()
    with Device.open() as device, ExitStack() as stack:
        ctx = LowerContext(device.caps, Tuning.for_device(device.caps))
        tokens = stack.enter_context(Tokens(model, device, library, ctx, n_ctx=args.ctx, depth=args.depth))
        programs: dict[str, TokenProgram] = {}
        for text, answers in variants.items():
            try:
                schedule = plan(tokens.graph, dataclasses.replace(ctx, tuning=ByHand(ctx.tuning, answers)))
                programs[text] = stack.enter_context(TokenProgram(tokens, schedule))
            except VkbackError as e:
                print(f"{text}: {e}")
        times: dict[str, list[float]] = {text: [] for text in programs}
        for _ in range(args.rounds):
            for text, program in programs.items():
                warm_up(device, program.commands, WARM_S)
                times[text] += [program.time_us() for _ in range(3)]
        want = programs[""].logits()
        for text, program in programs.items():
            us = float(np.median(times[text]))
            change = 100 * (us / float(np.median(times[""])) - 1)
            error = nmse(program.logits(), want)
            gave_up = " GAVE UP" if program.gave_up else ""
            print(f"{us:9.1f} us {1e6 / us:8.1f} t/s {change:+6.1f} % {error:9.1e}{gave_up}  {text or 'tables'}")


if __name__ == "__main__":
    main()
