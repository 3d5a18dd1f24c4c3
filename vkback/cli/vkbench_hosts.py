"""vkbench by workers: tests of models as units, each run by one device alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkback.cli.hosts import Where, journal_of
from vkback.cli.listed_work import KindResults, ListedWork
from vkback.cli.vkbench_tests import BenchTest
from vkback.report.bench_table import BenchResult

if TYPE_CHECKING:
    from vkback.cli.vkbench import Settings, Variant
    from vkback.cluster.worker import Station, Tell


def run_test(station: Station, args: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """On a worker: one test of a model. The model stays loaded for the next one."""
    from vkback.cli import vkbench
    from vkback.cli.shell import load_engine, measured_read_rate

    variant = vkbench.Variant(args["act"], args["ubatch"], tuple(args["cache"]), args["flash_attn"], args["n_gpu_layers"])
    settings = vkbench.Settings(
        **{**args["settings"], "flash_attn": variant.flash_attn, "build": tuple(args["settings"]["build"]), "device": station.device}
    )
    path, how = Path(args["path"]), vkbench.loading(variant, args["n_ctx"], settings)

    def loaded(stack: ExitStack) -> tuple[Any, float | None, dict[Any, float]]:
        engine = stack.enter_context(load_engine(path, station.device or None, how))
        rate = measured_read_rate(engine.device) if settings.read_rate is None else settings.read_rate
        return engine, rate or None, {}

    engine, rate, math_rates = station.kept(("vkbench", str(path), variant, args["n_ctx"], args["settings"]), loaded)
    test = BenchTest(**args["test"])
    engine.resize(test.n_ctx)
    return dataclasses.asdict(vkbench.measured_test(engine, test, path, variant.act, variant.cache, settings, rate, math_rates))


def bench_by_workers(
    where: Where, journal: Path | None, files: Sequence[Path], variants: Sequence[Variant], tests: Sequence[BenchTest], settings: Settings
) -> list[tuple[KindResults, list[BenchResult]]]:
    """Results of each kind of device, in the order in which one device alone would give them."""
    from vkback.cli.vkbench import LOADED_BY
    from vkback.cluster.pull import Unit

    n_ctx, plain = max(t.n_ctx for t in tests), dataclasses.asdict(settings)
    units = []
    for path, (act, ubatch, cache, flash, layers), test in product(files, variants, tests):
        args = {"path": str(path.absolute()), "act": act, "ubatch": ubatch, "cache": list(cache), "test": dataclasses.asdict(test)}
        key = f"{path.name} {test.name} act {act} ubatch {ubatch} cache {cache[0]}, {cache[1]}" + f" fa {flash}" * (flash >= 0)
        key += f" ngl {layers}" * (layers is not None)
        units.append(
            Unit(
                key,
                "vkback.cli.vkbench_hosts:run_test",
                {**args, "flash_attn": flash, "n_gpu_layers": layers, "n_ctx": n_ctx, "settings": plain},
            )
        )
    of = {name: plain[name] for name in ("repetitions", "feed", "warmup", *LOADED_BY)}
    kinds = ListedWork(units, journal_of(journal, command="vkbench", n_ctx=n_ctx, **of), "tests").run(where)
    return [(kind, [_result(kind.values[unit.key]) for unit in units]) for kind in kinds]


def _result(values: Mapping[str, Any]) -> BenchResult:
    return BenchResult(**{**values, "samples_ns": tuple(values["samples_ns"])})
