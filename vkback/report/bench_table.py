"""Results of vkbench in the formats of llama-bench: md, csv, json, jsonl, sql.

Fields, their order, column widths and alignment are llama-bench's: tables can be laid side by side, and readers of its files take ours.
What llama-bench does not have comes last: of generation bytes read per token, GB/s, the device's measured read rate and the part of it
reached; of prompts their operations, TFLOPS, the device's measured math rate and the part of it reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean, stdev
from typing import Any

from vkback.report.markdown import Column
from vkback.report.result_table import ResultTable
from vkback.units import params_text, size_text, with_size


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """One test of one model on one device.

    Fields with defaults describe settings vkback does not have; they carry the value under which llama-bench would do the same.
    model_size     bytes of all tensors in the file
    test_time      RFC 3339, UTC, when the test began
    samples_ns     time of each repetition
    bytes_per_token, read_rate_gb_s   None where not known; GB = 1e9 bytes
    tuning          tells the tuning tables and overrides that it was made with from others (vkback/tuning/lookup.py); "": not known
    tables          the files of these tables, the strongest first, and the overrides
    prompt_flops    operations of the test's prompt (vkback/plan/cost/flops.py); None where not known
    math_way        by what most of them are made, "coop_mat", "int_dot" or "f32", and math_rate_tflops: what the device was measured to
                    reach by it in registers (vkback/timing/math_rate.py); "" and None where not known
    watts           drawn by the device meanwhile (vkback/timing/power.py); None where not known
    """

    build_commit: str
    build_number: int
    cpu_info: str
    gpu_info: str
    backends: str = "Vulkan"
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 1
    cpu_mask: str = "0x0"
    cpu_strict: bool = False
    poll: int = 50
    type_k: str = "f16"
    type_v: str = "f16"
    n_gpu_layers: int = 99
    n_cpu_moe: int = 0
    split_mode: str = "layer"
    main_gpu: int = 0
    no_kv_offload: bool = False
    flash_attn: int = -1
    devices: str = "auto"
    tensor_split: str = "0.00"
    tensor_buft_overrides: str = "none"
    load_mode: str = "auto"
    lazy_mode: str = "auto"
    embeddings: bool = False
    no_op_offload: int = 0
    no_host: bool = False
    repack: bool = True
    fit_target: str = "off"
    fit_min_ctx: int = 0
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    samples_ns: tuple[int, ...]
    driver_info: str = ""
    command: str = ""
    act: str = "auto"
    exact: bool = False
    feed: str = "self"
    fusion: str = "all"
    tuning: str = ""
    tables: str = ""
    bytes_per_token: int | None = None
    read_rate_gb_s: float | None = None
    prompt_flops: int | None = None
    math_way: str = ""
    math_rate_tflops: float | None = None
    watts: float | None = None

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second of each repetition; prompt and generated tokens count alike."""
        return [1e9 * (self.n_prompt + self.n_gen) / ns for ns in self.samples_ns]

    @property
    def avg_ns(self) -> int:
        return round(fmean(self.samples_ns))

    @property
    def stddev_ns(self) -> int:
        return round(deviation(self.samples_ns))

    @property
    def avg_ts(self) -> float:
        return fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return deviation(self.samples_ts)

    @property
    def gb_s(self) -> float | None:
        """Weight bytes read per second while generating; None for tests with a prompt, where one read serves many tokens."""
        if self.bytes_per_token is None or self.n_prompt or not self.n_gen:
            return None
        return self.bytes_per_token * self.avg_ts / 1e9

    @property
    def percent_of_read(self) -> float | None:
        """`gb_s` in percent of the rate at which the device was measured to read."""
        if self.gb_s is None or not self.read_rate_gb_s:
            return None
        return 100 * self.gb_s / self.read_rate_gb_s

    @property
    def tflops(self) -> float | None:
        """Operations of the prompt a second, 10^12; None for tests that generate, where the time of neither part is known."""
        if self.prompt_flops is None or self.n_gen or not self.n_prompt:
            return None
        return self.prompt_flops / self.n_prompt * self.avg_ts / 1e12

    @property
    def percent_of_math(self) -> float | None:
        """`tflops` in percent of the rate at which the device was measured to multiply."""
        if self.tflops is None or not self.math_rate_tflops:
            return None
        return 100 * self.tflops / self.math_rate_tflops

    @property
    def ts_per_watt(self) -> float | None:
        """Tokens per second and watt: tokens per joule."""
        return self.avg_ts / self.watts if self.watts else None

    @property
    def test(self) -> str:
        return test_name(self.n_prompt, self.n_gen, self.n_depth)

    def row(self) -> dict[str, Any]:
        """All fields but the samples, by name, in the order of the machine formats."""
        values: dict[str, Any] = {}
        for f in fields(self):
            if f.name == "samples_ns":
                for name in ("avg_ns", "stddev_ns", "avg_ts", "stddev_ts"):
                    values[name] = getattr(self, name)
            else:
                values[f.name] = getattr(self, f.name)
        ours = ("gb_s", "percent_of_read", "tflops", "percent_of_math", "ts_per_watt")
        return {**values, **{name: getattr(self, name) for name in ours}}

    def samples(self) -> dict[str, list[Any]]:
        return {"samples_ns": list(self.samples_ns), "samples_ts": self.samples_ts}


def deviation(samples: Sequence[float]) -> float:
    """Sample standard deviation (n - 1); 0 for fewer than two samples."""
    return stdev(samples) if len(samples) > 1 else 0.0


def test_name(n_prompt: int, n_gen: int, n_depth: int = 0, pl: int | None = None, shared: bool = False) -> str:
    """`pp512`, `tg128`, `pp512+tg128`, each with ` @ d4096` at a depth; of many sequences at once (pl) `8 x tg128`, and ` shared` behind it
    where they share a prompt."""
    parts = [f"pp{n_prompt}"] * (n_prompt > 0) + [f"tg{n_gen}"] * (n_gen > 0)
    name = "+".join(parts) + (f" @ d{n_depth}" if n_depth else "")
    return name if pl is None else f"{pl} x {name}{' shared' * shared}"


def speed_text(mean: float, dev: float) -> str:
    return f"{mean:.2f} ± {dev:.2f}"


def tflops_text(value: float) -> str:
    """10^12 operations a second with three digits: a GPU makes hundreds of them in prompts, a CPU hundredths of one."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{max(0, min(digits, 6))}f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


COLUMNS: dict[str, tuple[Column, Callable[[BenchResult], str]]] = {
    "model": (Column("model", 30, left=True), lambda r: with_size(r.model_type, r.model_n_params)),
    "size": (Column("size", 10), lambda r: size_text(r.model_size)),
    "params": (Column("params", 10), lambda r: params_text(r.model_n_params)),
    "backend": (Column("backend", 10, left=True), lambda r: r.backends),
    "n_gpu_layers": (Column("ngl", 3), lambda r: str(r.n_gpu_layers)),
    "n_ubatch": (Column("n_ubatch", 8), lambda r: str(r.n_ubatch)),
    "type_k": (Column("type_k", 6), lambda r: r.type_k),
    "type_v": (Column("type_v", 6), lambda r: r.type_v),
    "flash_attn": (Column("fa", 3), lambda r: str(r.flash_attn)),
    "devices": (Column("dev", 12, left=True), lambda r: r.devices),
    "act": (Column("act", 10, left=True), lambda r: r.act),
    "exact": (Column("exact", 5, left=True), lambda r: "yes" if r.exact else "no"),
    "feed": (Column("feed", 10, left=True), lambda r: r.feed),
    "fusion": (Column("fusion", 6, left=True), lambda r: r.fusion),
    "test": (Column("test", 15), lambda r: r.test),
    "t/s": (Column("t/s", 20), lambda r: speed_text(r.avg_ts, r.stddev_ts)),
    "t/s/W": (Column("t/s/W", 8), lambda r: "" if r.ts_per_watt is None else f"{r.ts_per_watt:.3g}"),
    "W": (Column("W", 6), lambda r: _number(r.watts, 1)),
    "GB/s": (Column("GB/s", 10), lambda r: _number(r.gb_s, 2)),
    "% read": (Column("% read", 10), lambda r: _number(r.percent_of_read, 1)),
    "TFLOPS": (Column("TFLOPS", 10), lambda r: "" if r.tflops is None else tflops_text(r.tflops)),
    "% math": (Column("% math", 10), lambda r: _number(r.percent_of_math, 1)),
}
"""Every column of the markdown table in its order: how it looks and what it holds."""

OPTIONAL_COLUMNS = frozenset(COLUMNS) - {"model", "size", "params", "backend", "n_gpu_layers", "test", "t/s", "GB/s"}
"""They come when a parameter differs from its default, `% read` when the rate is known, `W` and `t/s/W` with --power, `TFLOPS` when a test
is a prompt, `% math` when the rate is known, too."""

_GENERATION = BenchResult(
    build_commit="",
    build_number=0,
    cpu_info="",
    gpu_info="",
    model_filename="",
    model_type="",
    model_size=0,
    model_n_params=0,
    n_prompt=0,
    n_gen=1,
    n_depth=0,
    test_time="",
    samples_ns=(1,),
    bytes_per_token=1,
    read_rate_gb_s=1.0,
    prompt_flops=1,
    math_rate_tflops=1.0,
    watts=1.0,
)

BENCH = ResultTable("llama_bench", COLUMNS, (_GENERATION, replace(_GENERATION, n_prompt=1, n_gen=0)), OPTIONAL_COLUMNS)
