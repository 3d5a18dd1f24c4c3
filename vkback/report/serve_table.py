"""Results of `vkbench serve`: what clients of a server see, as tables and as records for machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from vkback.report.markdown import Column
from vkback.report.result_table import ResultTable

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class ServeResult:
    """So many clients at once, each of which sends its next request when the one before is done.

    url, model, device    the server, what it calls its model, and its device where it says so
    requests, errors      sent, and without a whole reply; the others are done, and only these count below
    n_prompt              tokens that prompts were to have, 0 where they come from a file; n_gen: tokens that a request asks for at most
    prompt_tokens, output_tokens   of all requests, as the server counts them (prompts: 0 where it does not)
    duration_s            from the beginning of the first request to the end of the last
    samples_ttft_ms       from a request to its first token (TTFT), of each request
    samples_tpot_ms       time per output token behind the first (TPOT), of each request with more than one
    itl_ms                times between two pieces of a stream (inter-token latency, ITL), of all requests together
    ignore_eos            texts do not end before n_gen tokens
    """

    url: str
    model: str
    device: str
    clients: int
    requests: int
    errors: int
    n_prompt: int
    n_gen: int
    prompt_tokens: int
    output_tokens: int
    duration_s: float
    samples_ttft_ms: tuple[float, ...]
    samples_tpot_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    chat: bool = False
    ignore_eos: bool = True
    prompts: str = ""
    seed: int = 0
    build_commit: str
    build_number: int
    cpu_info: str
    test_time: str
    command: str = ""

    @property
    def done(self) -> int:
        return self.requests - self.errors

    @property
    def output_ts(self) -> float:
        """Generated tokens per second, of all clients together."""
        return self.output_tokens / self.duration_s

    @property
    def total_ts(self) -> float:
        """The same with those of prompts."""
        return (self.prompt_tokens + self.output_tokens) / self.duration_s

    @property
    def requests_s(self) -> float:
        return self.done / self.duration_s

    @property
    def times(self) -> dict[str, tuple[float, ...]]:
        return {"ttft": self.samples_ttft_ms, "tpot": self.samples_tpot_ms, "itl": self.itl_ms}

    def row(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in (*SAMPLES, "itl_ms")}
        figures: dict[str, Any] = {name: getattr(self, name) for name in ("done", "output_ts", "total_ts", "requests_s")}
        for name, times in self.times.items():
            figures[f"{name}_mean_ms"] = fmean(times) if times else None
            figures |= {f"{name}_p{p}_ms": value for p, value in zip(PERCENTS, percentiles(times), strict=True)}
        settings = ("chat", "ignore_eos", "prompts", "seed", "build_commit", "build_number", "cpu_info", "test_time", "command")
        return {name: values.pop(name) for name in [*values] if name not in settings} | figures | values

    def samples(self) -> dict[str, list[Any]]:
        return {name: list(getattr(self, name)) for name in SAMPLES}


SAMPLES = ("samples_ttft_ms", "samples_tpot_ms")


def percentiles(times: Sequence[float]) -> list[float | None]:
    """Those of PERCENTS, between two values in proportion; None without any value."""
    import numpy as np

    return [float(v) for v in np.percentile(times, PERCENTS)] if len(times) else [None] * len(PERCENTS)


def _mean(total: int, count: int) -> str:
    return f"{total / count:.0f}" if count else ""


def _times(name: str) -> tuple[Column, Callable[[ServeResult], str]]:
    header = f"{name.upper()} ms {'/'.join(f'p{p}' for p in PERCENTS)}"
    return Column(header, 24), lambda r: "/".join(f"{v:.1f}" for v in percentiles(r.times[name]) if v is not None)


COLUMNS: dict[str, tuple[Column, Callable[[ServeResult], str]]] = {
    "clients": (Column("clients", 7), lambda r: str(r.clients)),
    "done": (Column("done", 6), lambda r: str(r.done)),
    "errors": (Column("errors", 6), lambda r: str(r.errors)),
    "prompt": (Column("prompt", 6), lambda r: _mean(r.prompt_tokens, r.done)),
    "output": (Column("output", 6), lambda r: _mean(r.output_tokens, r.done)),
    "t/s": (Column("t/s", 9), lambda r: f"{r.output_ts:.2f}"),
    "ttft": _times("ttft"),
    "tpot": _times("tpot"),
    "itl": _times("itl"),
}
"""prompt and output: tokens of a request, their mean."""

_PROBE = ServeResult(
    url="",
    model="",
    device="",
    clients=1,
    requests=1,
    errors=0,
    n_prompt=1,
    n_gen=1,
    prompt_tokens=1,
    output_tokens=1,
    duration_s=1.0,
    samples_ttft_ms=(1.0,),
    samples_tpot_ms=(1.0,),
    itl_ms=(1.0,),
    build_commit="",
    build_number=0,
    cpu_info="",
    test_time="",
)

SERVE = ResultTable("serve_bench", COLUMNS, (_PROBE, replace(_PROBE, chat=True)))
