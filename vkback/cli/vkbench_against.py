"""vkbench --against: two builds, tuning tables, settings or programs, run by run in turn, with one verdict for each test."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

from vkback.cli.shell import UsageError, one_of, output_file, write_output
from vkback.cli.terminal import StatusLine
from vkback.cli.vkbench_sides import How, Side, other_side, own_side
from vkback.cli.vkbench_tests import BenchTest
from vkback.report import compare as report
from vkback.report import tables
from vkback.report.bench_table import deviation
from vkback.report.pairs import FALSE_ALARM, in_turn, least_pairs, paired_verdict
from vkback.units import params_text, size_text, with_size

FORMATS = ("md", "csv", "json", "html")


def refuse(option: str, why: str) -> NoReturn:
    raise UsageError(f"{option} and --against exclude each other: {why}")


def compare_in_turn(
    against: str, hows: Sequence[How], tests: Sequence[BenchTest], pairs: int, output: str, save: Sequence[Path], command: str
) -> None:
    """Measure and print. hows: how this build runs each model; all sides run all tests of a model, pair by pair.

    What was measured is printed and saved also where the rest is interrupted.
    """
    one_of(output, FORMATS, "-o")
    forms = [(output_file(path, "--save", *(how.model for how in hows)), _form(path)) for path in save]
    if pairs < (least := least_pairs(len(hows) * len(tests))):
        print(f"vkbench: {pairs} pairs of runs cannot tell; -r {least} and more can", file=sys.stderr)
    found: list[report.Difference] = []
    labels = (_label(against), "this")
    head = ""
    try:
        for how in hows:
            with closing(own_side(how, tests)) as own, other_side(against, how, tests, own) as other:
                head = head or own.hello["device"]
                for number, test in enumerate(tests):
                    found.append(_one_test(other, own, how, number, test, pairs, len(hows) * len(tests)))
    finally:
        if found:
            shown = report.Comparison(found, [], [], labels)
            print(_text(shown, output, head))
            for path, form in forms:
                write_output(
                    path, "--save", f"    {command}\n\n{_text(shown, form, head)}\n" if form == "md" else _text(shown, form, head) + "\n"
                )


def _form(path: Path) -> str:
    return one_of(path.suffix.lstrip("."), FORMATS, f"--save {path}, ending")


def _label(against: str) -> str:
    name = Path(against).name if "/" in against and " " not in against else against
    return name if len(name) <= 24 else name[:22] + "~"


def _one_test(other: Side, own: Side, how: How, number: int, test: BenchTest, pairs: int, tests: int) -> report.Difference:
    sides = (other, own)
    speeds: tuple[list[float], list[float]] = ([], [])
    records: list[dict[str, Any]] = [{}, {}]
    with StatusLine() as status:
        for turn, pair in enumerate(in_turn(pairs, secrets.randbits(64)), 1):
            status.say(f"vkbench: {how.model.name} {test.name}: pair {turn}/{pairs}")
            for which in pair:
                records[which] = sides[which].run(number, warm=not sides[1 - which].stays)
                speeds[which].append(records[which]["samples_ts"][0])
    verdict = paired_verdict(*speeds, tests)
    before, after = (report.Speed(sum(each) / len(each), deviation(each), len(each)) for each in speeds)
    first, second = records
    return report.Difference(
        model=with_size(str(second["model_type"]), second["model_n_params"]),
        size=size_text(second["model_size"]),
        params=params_text(second["model_n_params"]),
        backend=str(second["backends"]),
        ngl=str(second["n_gpu_layers"]),
        settings=_unlike(first, second),
        test=test.name,
        before=before,
        after=after,
        change=report.Change(verdict.different, verdict.text),
        ratio=1 + verdict.percent / 100,
        detail={
            "low_percent": verdict.low,
            "high_percent": verdict.high,
            "confidence": verdict.confidence,
            "p": verdict.p,
            "pairs": verdict.pairs,
            **{f"{side}_samples_ts": each for side, each in zip(("before", "after"), speeds, strict=True)},
            **{f"{side}_{name}": each.get(name, "") for side, each in zip(("before", "after"), records, strict=True) for name in TOLD},
            "against": other.name,
        },
    )


TOLD = (
    "build_commit",
    "tuning",
    "tables",
    "gpu_info",
    "driver_info",
    "act",
    "type_k",
    "type_v",
    "n_ubatch",
    "exact",
    "feed",
    "fusion",
    "flash_attn",
)
"""What results say of each side."""


def _unlike(first: dict[str, Any], second: dict[str, Any]) -> dict[str, str]:
    """Settings that the sides have otherwise, as both know them."""
    names = ("gpu_info", "act", "type_k", "type_v", "n_ubatch", "exact", "feed", "fusion", "flash_attn")
    return {name: f"{first[name]} -> {second[name]}" for name in names if name in first and name in second and first[name] != second[name]}


def _text(shown: report.Comparison, form: str, head: str) -> str:
    if form == "md":
        return "\n".join([head, report.markdown(shown), "", *legend(shown)])
    if form == "html":
        return report.html(shown, f"{shown.labels[0]} and {shown.labels[1]}, run by run in turn")
    return tables.machine(report.records(shown), form)


def legend(shown: report.Comparison) -> list[str]:
    """What the verdicts mean, and what the sides are."""
    detail = shown.differences[0].detail
    pairs = detail["pairs"]
    return [
        f"{pairs} pairs of runs in turn, in an order by chance; diff is the median of their ratios (signed-rank test), with its interval "
        f"of {100 * detail['confidence']:.4g} %. Equal sides are called different in one of {1 / FALSE_ALARM:.0f} such commands.",
        "",
        *(f"- {name}: {_side(detail, side)}" for name, side in zip(shown.labels, ("before", "after"), strict=True)),
    ]


def _side(detail: Any, side: str) -> str:
    said = {"build": "build_commit", "device": "gpu_info", "driver": "driver_info", "tables": "tables"}
    return "; ".join(f"{word} {detail[f'{side}_{name}']}" for word, name in said.items() if detail[f"{side}_{name}"])
