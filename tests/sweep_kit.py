"""What the tests of sweeps share: results, a clock that sets what a point takes, shaders with a fault, the command."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typer.testing import CliRunner

from vkback.autotune.chain_trial import ChainFamily, TokenSetting
from vkback.autotune.tunable import Setting, Tuned, TuneResult
from vkback.cli import main as cli
from vkback.graph import Node
from vkback.ops.lowering import LowerContext
from vkback.paths import shader_root
from vkback.shader import ShaderLibrary
from vkback.timing.launches import Measurement

H200 = "nvidia_h200_linux"
CARD = "Card, driver 1"
S = TypeVar("S", bound=Setting)
P = TypeVar("P", bound=TokenSetting)


def tune_result(task: Tuned, before: S, after: S, **values: Any) -> TuneResult[S]:
    """What a task came to: 9 us where it took 10, but for `values`."""
    found = TuneResult(
        key=task.key,
        line=task.line,
        match=task.match,
        sizes=task.sizes,
        before=before,
        source="a row",
        latency_before=10.0,
        throughput_before=9.0,
        after=after,
        latency=9.0,
        throughput=7.0,
        noise=0.1,
        nbytes=28_000_000,
        read_rate=4000.0,
        tried=9,
        refused=3,
        wrong=(),
        date="2026-11-21",
    )
    return dataclasses.replace(found, **values)


def assert_planned_as_they_stand(
    family: type[ChainFamily[Any, P]],
    node: Node,
    ctx: LowerContext,
    guesses: Iterable[P],
    neighbours: Callable[[P], Iterable[P]],
    dispatches: Mapping[str, int],
) -> None:
    """Points of a recurrence that are not refused lead to themselves; the guesses have all of its kernels. dispatches: of each kernel."""
    starts = list(dict.fromkeys(family.actual(node, family.with_point(ctx, guess)) for guess in guesses))
    assert {point.params["kernel"] for point in starts} == set(dispatches)
    tried = {point for start in starts for point in neighbours(start) if not family.why_not(node, point, ctx)}
    assert len(tried) >= 10
    for point in (*starts, *tried):
        assert not family.why_not(node, point, ctx)
        assert len(family.lowered(node, point, ctx)) == dispatches[point.params["kernel"]]


def set_clock(monkeypatch: pytest.MonkeyPatch, trial: type, method: str, time_us: Callable[..., float]) -> None:
    """Has `method` of a trial, which measures a point, give the time of `time_us(trial, point)`. The kernels still run once, to be
    checked."""
    monkeypatch.setattr(trial, method, lambda self, point, *_: Measurement(time_us(self, point), 0.0))


def shaders_with(folder: Path, file: str, old: str, new: str) -> ShaderLibrary:
    """The shaders with a text of a file replaced."""
    root = folder / "shaders"
    shutil.copytree(shader_root(), root)
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new, 1))
    return ShaderLibrary(root, folder / "cache")


def tune(*arguments: str) -> tuple[int, str]:
    """Exit code of `vkback tune`, and what it printed; with the error, where there was one."""
    ran = CliRunner().invoke(cli.app, ["tune", *arguments])
    return ran.exit_code, ran.output + ("" if ran.exception is None else f"{type(ran.exception).__name__}: {ran.exception}")
