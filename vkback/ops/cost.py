"""What a node costs, counted before any kernel is chosen. Each op has its own rule (`Op.arithmetic`, `Op.read_bytes`, `Op.stored_bytes`).

Kinds and their units:

    read   bytes from outside the graph's temporary storage: weights whole (rows looked up, experts used), caches as far as they are in
           use, inputs. What another node left in temporary storage counts nothing
    write  bytes into caches and states. Results in temporary storage count nothing
    fmul   multiplications. A multiply-add is one fmul: the additions of dot products and of sums of squares are in it
    fadd   other additions, subtractions and negations
    fdiv   divisions
    fexp   exponentials and logarithms
    fsin   sines with their cosines: turning a pair takes two
    sqrt   square roots
    fpow   powers

Decoding a quantized weight, comparing, sorting and moving values count nothing: they are a kernel's affair, and differ between kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

KINDS = ("read", "write", "fmul", "fadd", "fdiv", "fexp", "fsin", "sqrt", "fpow")

Cost = Mapping[str, int]
"""Counts by kind; a kind that is absent is 0."""


def times(cost: Cost, count: int) -> dict[str, int]:
    """The cost of `count` of a thing."""
    return {kind: count * n for kind, n in cost.items()}


def total(costs: Iterable[Cost]) -> dict[str, int]:
    """The sum of several, by kind in the order of KINDS."""
    sums = dict.fromkeys(KINDS, 0)
    for cost in costs:
        for kind, n in cost.items():
            sums[kind] += n
    return {kind: n for kind, n in sums.items() if n}
