"""Irrational constants that reach a kernel, with the same bits on every machine.

pow, log and exp differ in the last bit between C libraries, and numpy takes its own where the processor has AVX-512. The digits of a
constant are part of a kernel's source, whose hash is the key of the SPIR-V that comes with vkback: with one other bit, the kernel must be
compiled. So such constants are computed with DIGITS decimal digits here, and rounded once, by `float` or to an integer. The four operations
and `math.sqrt` need no such care: IEEE 754 demands the nearest value of them.
"""

from __future__ import annotations

import decimal
from contextlib import AbstractContextManager
from decimal import Decimal
from functools import lru_cache

DIGITS = 60
"""Those of a double and more than as many again, so that a value halfway between two doubles is not met."""

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
LOG2_E = 1.4426950408889634
"""1 / ln 2: exp(x) is exp2(LOG2_E * x)."""


def exact() -> AbstractContextManager[decimal.Context]:
    """Within it, Decimals are computed with DIGITS digits, whatever the caller's context is."""
    return decimal.localcontext(decimal.Context(prec=DIGITS, rounding=decimal.ROUND_HALF_EVEN, Emin=-9999, Emax=9999))


@lru_cache(4096)
def power(base: float, exponent: float, divisor: float = 1) -> Decimal:
    """base ^ (exponent / divisor), base above 0; the quotient is not rounded to a float."""
    with exact():
        return Decimal(base) ** (Decimal(exponent) / Decimal(divisor))


def log(x: float) -> Decimal:
    """The natural logarithm of x, above 0."""
    with exact():
        return Decimal(x).ln()
