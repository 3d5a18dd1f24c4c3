"""One side of `vkbench --against`: a process that keeps its model loaded and runs a test whenever it is told to.

It reads a JSON object a line from stdin and answers each by one on stdout:

    (at the start)                     {"turns": 1, "device": "vkback: 0 = ...", "where": "...", "table": "device_NAME.toml"}
    {"test": 0, "warm": true}          the result as of `vkbench -o json`, with one sample

"warm": the device has idled since the last turn, so that a GPU is to be warmed up again. It ends with its input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from vkback.cli.shell import EngineLike
from vkback.cli.vkbench_run import Feed, TimedTest, where_it_ran
from vkback.cli.vkbench_tests import BenchTest
from vkback.report.bench_table import BenchResult

VERSION = 1
"""Of the protocol."""


def take_turns(engine: EngineLike, tests: Sequence[BenchTest], feed: Feed, result: Callable[[BenchTest, int], BenchResult]) -> None:
    """result: what is known of a test whose one repetition took so many nanoseconds."""
    from vkback.tuning.lookup import device_table

    caps: Any = engine.device.caps
    _say({"turns": VERSION, "device": caps.summary_line(), "where": where_it_ran(engine), "table": device_table(caps)})
    timed: TimedTest | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        test = tests[asked["test"]]
        if timed is None or timed.test is not test:
            engine.resize(test.n_ctx)
            timed = TimedTest(engine, test, feed=feed)
            timed.warm_up()
        elif asked["warm"]:
            timed.warm_up()
        made = result(test, timed.run())
        engine.check_caches()
        _say({**made.row(), **made.samples()})


def _say(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)
