"""Results of many sequences at once as tests of a benchmark, so that they can be compared and followed like others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import pandas as pd

from vkback.report.batch_table import MEASURED, SAMPLES, SIZES, SPEEDS, parts_of
from vkback.report.bench_table import deviation

UNKNOWN_MODEL = "unknown"
"""llama-batched-bench does not say what it runs."""

_NO_SETTINGS = frozenset((*MEASURED, *SAMPLES, *SIZES, *(f"stddev_{name}" for name in SPEEDS), "n_kv", "id"))

_HEADERS = {"PP": "pp", "TG": "tg", "B": "pl", "N_KV": "n_kv", "depth": "n_depth"} | {
    f"{name.upper().replace('SPEED', 'S')} {unit}": name for name in MEASURED for unit in ("s", "t/s")
}
"""What columns of the markdown table are called in other formats."""


def is_batch(names: Any) -> bool:
    """Whether columns, or fields, are those of `vkbench batch` or llama-batched-bench."""
    return {"pp", "tg", "pl", "t_pp", "t_tg"} <= {*names}


def of_markdown(row: Mapping[str, str]) -> dict[str, Any] | None:
    """The fields of a row of a markdown table; None of another table."""
    found: dict[str, Any] = {_HEADERS[name]: value for name, value in row.items() if name in _HEADERS}
    if not is_batch(found):
        return None
    pp, tg, pl, n_kv, depth = (int(found.get(name, 0)) for name in ("pp", "tg", "pl", "n_kv", "n_depth"))
    return {**found, "is_pp_shared": int(n_kv < pl * (depth + pp + tg))}


def bench_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Three rows of each: prompts, generation behind them, both. Raises ValueError for a row that is none."""
    records = [record for number, row in enumerate(rows.to_dict("records"), start=1) for record in _tests_of(number, row)]
    return pd.DataFrame(records, dtype=object)


def _tests_of(number: int, row: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    known = {str(name): value for name, value in row.items() if isinstance(value, (list, tuple)) or (pd.notna(value) and value != "")}
    try:
        sizes = {name: int(known.get(name, 0)) for name in SIZES}
        means = {sample: [float(known[sample.removeprefix("samples_")])] for sample in SAMPLES}
    except (KeyError, ValueError) as e:
        raise ValueError(f"result {number}: no sizes and times of sequences: {e}") from e
    sampled = all(isinstance(known.get(sample), list) and known[sample] for sample in SAMPLES)
    if sizes["pl"] < 1 or sizes["pp"] < 1 or sizes["tg"] < 1 or any(t <= 0 for (t,) in means.values()):
        raise ValueError(f"result {number}: sizes and times of sequences must be above 0")
    settings = {name: value for name, value in known.items() if name not in _NO_SETTINGS}
    if "model_type" not in settings:
        settings |= {"model_type": UNKNOWN_MODEL, "model_size": 0, "model_n_params": 0}
    times = {sample: known[sample] for sample in SAMPLES} if sampled else means
    for name, (test, speeds) in zip(SPEEDS, parts_of(sizes, times), strict=True):
        spread = deviation(speeds) if sampled else float(known.get(f"stddev_{name}", 0.0))
        row = {**settings, **test, "avg_ts": fmean(speeds), "stddev_ts": spread}
        yield {**row, "samples_ts": speeds} if sampled else row


def with_model(rows: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Rows that name no model with the one of the other result, where that has one alone."""
    fields = ["model_type", "model_size", "model_n_params"]
    if set(rows["model_type"]) != {UNKNOWN_MODEL} or len(models := other[fields].drop_duplicates()) != 1:
        return rows
    return rows.assign(**{name: models[name].iloc[0] for name in fields})
