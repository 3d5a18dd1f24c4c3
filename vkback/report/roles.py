"""Kernels of a phase summed by name: those of each layer, or of all layers together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vkback.timing.profile import KernelCost


@dataclass(frozen=True)
class Total:
    """Kernels of one name: microseconds of all runs, bytes and flops of all runs."""

    name: str
    gpu_us: float
    predicted_us: float
    nbytes: int
    flops: int
    launches: int

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.gpu_us / 1e3 if self.gpu_us > 0 else 0.0


def totals(kernels: Sequence[KernelCost], *, layers: bool = True) -> list[Total]:
    """Kernels of one name together, the longest first. layers: those of each layer by themselves."""
    groups: dict[str, list[KernelCost]] = {}
    for k in kernels:
        groups.setdefault(k.name if layers else k.kind, []).append(k)
    found = [
        Total(
            name,
            sum(k.gpu_us for k in ks),
            sum(k.predicted_us for k in ks),
            sum(k.nbytes * k.runs for k in ks),
            sum(k.flops * k.runs for k in ks),
            sum(k.runs for k in ks),
        )
        for name, ks in groups.items()
    ]
    return sorted(found, key=lambda t: -t.gpu_us)
