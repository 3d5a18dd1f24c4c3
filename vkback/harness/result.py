"""What one case came to, in any mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["test", "grad", "perf", "support"]

SPENT = ("values and plan", "reference", "waiting for kernels", "run", "judging")
"""What a case takes time for."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One case on one device.

    supported  the device can run it; else `message` says why not
    passed     None where nothing ran to be judged
    message    what was wrong
    detail     the errors and their bounds, outputs joined with "; "
    nmse, worst, tolerance_nmse, tolerance_worst   of the output that came nearest its bound; peer_limit: NMSE that llama.cpp allows the op
    time_us    throughput: independent launches back to back; latency_us: each launch waits for the one before; spreads: half the range
               between first and third quartile; samples_us: throughput of each repetition
    barrier_free_us  a GEMV of a chain in which each reads what the one before made, where the tables run such stages barrier-free
               (vkback/timing/dependent.py); None for everything else
    math_way   of a GEMM, by what it multiplies ("coop_mat", "int_dot", "f32"; "" for everything else), and math_rate_tflops: what the
               device was measured to reach by it in registers
    seconds    what the case took of one process, by SPENT; kernels that an earlier case had waited for take none
    expected   why it is expected to fail (vkback/harness/xfail.py); "" where it is not
    n_runs     launches timed in all; nbytes and flops of one launch; read_rate_gb_s: what the device was measured to read
    """

    op: str
    line: str
    mode: Mode
    supported: bool = True
    passed: bool | None = None
    message: str = ""
    detail: str = ""
    nmse: float | None = None
    worst: float | None = None
    tolerance_nmse: float | None = None
    tolerance_worst: float | None = None
    peer_limit: float | None = None
    time_us: float | None = None
    spread_us: float | None = None
    latency_us: float | None = None
    latency_spread_us: float | None = None
    barrier_free_us: float | None = None
    samples_us: tuple[float, ...] = ()
    n_runs: int = 0
    nbytes: int = 0
    flops: int = 0
    read_rate_gb_s: float | None = None
    math_way: str = ""
    math_rate_tflops: float | None = None
    kernel: str = ""
    seconds: tuple[float, ...] = ()
    expected: str = ""

    @property
    def params(self) -> str:
        """The line without the op's name and the parentheses."""
        return self.line.partition("(")[2].removesuffix(")")

    @property
    def gb_s(self) -> float | None:
        return self.nbytes / self.time_us / 1e3 if self.time_us else None

    @property
    def read_rate_percent(self) -> float | None:
        return 100 * self.gb_s / self.read_rate_gb_s if self.gb_s and self.read_rate_gb_s else None

    @property
    def math_rate_percent(self) -> float | None:
        if not self.time_us or not self.flops or not self.math_rate_tflops:
            return None
        return 100 * self.flops / self.time_us / 1e6 / self.math_rate_tflops
