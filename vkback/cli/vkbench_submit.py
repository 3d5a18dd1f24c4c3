"""vkbench --submit: one file of a card, to send."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkback.cli.shell import write_output
from vkback.cli.terminal import StatusLine

if TYPE_CHECKING:
    from vkback.device import Device
    from vkback.report.bench_table import BenchResult

PER_OP = 3
"""Cases of each op that the verdict is of."""


def write_submission(file: Path, device: str | None, results: Sequence[BenchResult]) -> None:
    """Run a part of the suite, write the file, and say where to put it."""
    from vkback.cli.devices import bug_report
    from vkback.device import Device
    from vkback.paths import user_tuning_root
    from vkback.report.community import WHERE, submission
    from vkback.tuning.lookup import device_table, user_tables

    with Device.open(device.partition(",")[0] if device else None) as opened:
        suite = suite_verdict(opened)
        caps = opened.caps
    folder = user_tuning_root()
    table = folder / device_table(caps)
    text = table.read_text(encoding="utf-8") if table in user_tables(folder) else ""
    rows = [{**r.row(), "test": r.test, "samples_ts": r.samples_ts} for r in results]
    write_output(file, "--submit", json.dumps(submission(caps, bug_report(), text, rows, suite), indent=1) + "\n")
    print(f"vkbench: wrote {file}: {len(rows)} results, {suite['right']} cases right, {suite['wrong']} wrong. {WHERE}", file=sys.stderr)


def suite_verdict(device: Device) -> dict[str, Any]:
    """How many of a part of the quick suite are right, wrong and not supported, and the lines of the wrong ones."""
    from vkback.harness.cases import quick_cases
    from vkback.harness.doctor import spread
    from vkback.harness.suite import KEPT, Suite
    from vkback.ops.lowering import LowerContext
    from vkback.shader import ShaderLibrary
    from vkback.tuning.lookup import Tuning

    cases = spread(quick_cases(), PER_OP)
    found: dict[str, Any] = {"right": 0, "wrong": 0, "not_supported": 0, "failing": []}
    context = LowerContext(device.caps, Tuning.for_device(device.caps))
    with Suite(device, ShaderLibrary(quick=device.caps.software), context, kept=KEPT) as suite, StatusLine() as status:
        for number, result in enumerate(suite.run(cases), 1):
            status.say(f"vkbench: {number} of {len(cases)} cases of the suite")
            found["right" if result.passed else "wrong" if result.passed is False else "not_supported"] += 1
            found["failing"] += [result.line] if result.passed is False else []
    return found
