"""Which columns of results are settings: what tells rows of one test apart, so that they are not taken together."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pandas as pd

from vkback.report.bench_table import test_name

MEASURED = frozenset(
    (
        "id",
        "test_time",
        "samples_ns",
        "samples_ts",
        "samples_us",
        "avg_ns",
        "stddev_ns",
        "avg_ts",
        "stddev_ts",
        "gb_s",
        "percent_of_read",
        "tflops",
        "percent_of_math",
        "read_rate_gb_s",
        "math_rate_tflops",
        "math_way",
        "bytes_per_token",
        "prompt_flops",
        "command",
        "build_commit",
        "build_number",
        "tuning",
        "tables",
        "repetitions",
    )
)
"""What was measured, when, and by which build and tables: rows may differ in it and be of one test. Results of two builds or tables
are taken apart by `of_commit` (vkback/report/compare.py)."""

TEST = frozenset(("model_type", "model_size", "model_n_params", "n_prompt", "n_gen", "n_depth", "pl", "is_pp_shared"))
"""What makes a test."""


def texts(rows: pd.DataFrame, name: str, unknown: str = "None") -> pd.Series[str]:
    """A column as text; `unknown` where the file does not say. A model's file goes by its name without folders."""
    if name not in rows:
        return pd.Series(unknown, rows.index)
    found = rows[name].map(str).where(rows[name].notna(), unknown)
    return found.str.replace(r"^.*[/\\\\]", "", regex=True) if name == "model_filename" else found


def test_names(rows: pd.DataFrame) -> list[str]:
    """What the test of each row is called."""
    many = rows.reindex(columns=["n_prompt", "n_gen", "n_depth", "pl", "is_pp_shared"]).itertuples(index=False)
    return [test_name(p, g, d) if pd.isna(pl) else test_name(p, g, d, pl, shared == 1) for p, g, d, pl, shared in many]


def unlike(groups: Iterable[pd.DataFrame], known: Collection[str] = ()) -> list[str]:
    """Settings beyond those known in which rows of a group differ."""
    found: dict[str, None] = {}
    for group in groups:
        for name in map(str, group.columns):
            if name not in known and name not in MEASURED and name not in TEST and name not in found and texts(group, name).nunique() > 1:
                found[name] = None
    return list(found)
