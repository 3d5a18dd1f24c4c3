"""Results of `vkbench batch`, many sequences at once, in the columns and fields of llama-batched-bench.

Columns, their widths and digits, and the first fields of the machine formats are llama-batched-bench's: tables can be laid side by side.
What it does not have comes last. For comparisons and stores, every result is three tests of one benchmark: prompts, generation, and both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import vkback.report.bench_table as bench
from vkback.report.markdown import Column
from vkback.report.result_table import ResultTable
from vkback.units import with_size


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """pl sequences that each read a prompt of pp tokens and generate tg.

    Fields with defaults describe settings vkback does not have; they carry the value under which llama-batched-bench would do the same.
    n_kv_max         rows of cache for all sequences together
    is_pp_shared     1: one prompt is read for all sequences
    n_kv             rows in use at the end
    samples_t_pp     seconds until all prompts were read, of each repetition; samples_t_tg: from then until the last token
    n_depth          rows that each sequence had before, outside the time
    tuning, tables   as of `BenchResult`
    """

    n_kv_max: int
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attn: int = -1
    is_pp_shared: int = 0
    n_gpu_layers: int = 99
    n_threads: int = 1
    n_threads_batch: int = 1
    pp: int
    tg: int
    pl: int
    n_kv: int
    samples_t_pp: tuple[float, ...]
    samples_t_tg: tuple[float, ...]
    n_depth: int = 0
    build_commit: str
    build_number: int
    cpu_info: str
    gpu_info: str
    driver_info: str
    backends: str = "Vulkan"
    devices: str = "auto"
    tensor_split: str = "0.00"
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    type_k: str = "f16"
    type_v: str = "f16"
    act: str = "auto"
    exact: bool = False
    tuning: str = ""
    tables: str = ""
    test_time: str
    command: str = ""

    @property
    def prompt_tokens(self) -> int:
        """All that are read: a shared prompt once."""
        return self.pp if self.is_pp_shared else self.pl * self.pp

    @property
    def t_pp(self) -> float:
        return fmean(self.samples_t_pp)

    @property
    def t_tg(self) -> float:
        return fmean(self.samples_t_tg)

    @property
    def t(self) -> float:
        return self.t_pp + self.t_tg

    @property
    def speed_pp(self) -> float:
        """Tokens per second of all sequences together, as the two below."""
        return self.prompt_tokens / self.t_pp

    @property
    def speed_tg(self) -> float:
        return self.pl * self.tg / self.t_tg

    @property
    def speed(self) -> float:
        return (self.prompt_tokens + self.pl * self.tg) / self.t

    def row(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if not name.startswith("samples_")}
        before = {name: values.pop(name) for name in [*values][: [*values].index("n_kv") + 1]}
        return {**before, **{name: getattr(self, name) for name in MEASURED}, **values, **self._deviations()}

    def samples(self) -> dict[str, list[Any]]:
        return {name: list(getattr(self, name)) for name in SAMPLES}

    def _deviations(self) -> dict[str, float]:
        """Of the three speeds, over the repetitions."""
        parts = parts_of(self.row_sizes(), {name: list(getattr(self, name)) for name in SAMPLES})
        return {f"stddev_{name}": bench.deviation(speeds) for name, (_, speeds) in zip(SPEEDS, parts, strict=True)}

    def row_sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in SIZES}


MEASURED = ("t_pp", "speed_pp", "t_tg", "speed_tg", "t", "speed")
SAMPLES = ("samples_t_pp", "samples_t_tg")
SPEEDS = ("speed_pp", "speed_tg", "speed")
SIZES = ("pp", "tg", "pl", "is_pp_shared", "n_depth")


def parts_of(sizes: Mapping[str, int], times: Mapping[str, list[float]]) -> Iterator[tuple[dict[str, int], list[float]]]:
    """The three tests of a result with the tokens per second of each repetition: all prompts, all generation, both.

    sizes  its SIZES
    times  its SAMPLES
    """
    pp, tg, pl, shared, depth = (sizes[name] for name in SIZES)
    read, made = (pp if shared else pl * pp), pl * tg
    t_pp, t_tg = (times[name] for name in SAMPLES)
    same = {"pl": pl, "is_pp_shared": shared}
    yield {"n_prompt": pp, "n_gen": 0, "n_depth": depth, **same}, [read / t for t in t_pp]
    yield {"n_prompt": 0, "n_gen": tg, "n_depth": depth + pp, **same}, [made / t for t in t_tg]
    yield {"n_prompt": pp, "n_gen": tg, "n_depth": depth, **same}, [(read + made) / (a + b) for a, b in zip(t_pp, t_tg, strict=True)]


def _seconds(name: str) -> tuple[Column, Callable[[BatchResult], str]]:
    return Column(f"{name.upper()} s", 8), lambda r: f"{getattr(r, name):.3f}"


def _speed(name: str) -> tuple[Column, Callable[[BatchResult], str]]:
    return Column(f"{name.upper().replace('SPEED', 'S')} t/s", 8), lambda r: f"{getattr(r, name):.2f}"


COLUMNS: dict[str, tuple[Column, Callable[[BatchResult], str]]] = {
    "pp": (Column("PP", 5), lambda r: str(r.pp)),
    "tg": (Column("TG", 6), lambda r: str(r.tg)),
    "pl": (Column("B", 4), lambda r: str(r.pl)),
    "n_kv": (Column("N_KV", 6), lambda r: str(r.n_kv)),
    **{name: (_speed if "speed" in name else _seconds)(name) for name in MEASURED},
    "n_depth": (Column("depth", 6), lambda r: str(r.n_depth)),
}

_PROBE = BatchResult(
    n_kv_max=1,
    pp=1,
    tg=1,
    pl=1,
    n_kv=2,
    samples_t_pp=(1.0,),
    samples_t_tg=(1.0,),
    build_commit="",
    build_number=0,
    cpu_info="",
    gpu_info="",
    driver_info="",
    model_filename="",
    model_type="",
    model_size=0,
    model_n_params=0,
    test_time="",
)

BATCH = ResultTable("llama_batched_bench", COLUMNS, (_PROBE, replace(_PROBE, n_depth=1)), frozenset({"n_depth"}))


def settings_line(result: BatchResult) -> str:
    """The model, and what llama-batched-bench says above its table."""
    names = ("n_kv_max", "n_batch", "n_ubatch", "flash_attn", "is_pp_shared", "n_gpu_layers", "n_threads", "n_threads_batch")
    return f"{with_size(result.model_type, result.model_n_params)}: " + ", ".join(f"{name} = {getattr(result, name)}" for name in names)
