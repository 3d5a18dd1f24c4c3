"""Grad mode: the reference of an op that makes a gradient against finite differences of what it differentiates, in float64, and the device
against the reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from vkback.errors import VkbackError
from vkback.harness.result import CaseResult
from vkback.harness.runner import Array, reference, reference_inputs
from vkback.ops.case import Case
from vkback.ops.op import OPS
from vkback.ops.training.gradients import Gradient, Scalar

STEP = 1e-3
"""Of a variable, in units of its rms (of 1 where that is 0): the five-point rule is then off by about STEP^4, and by 1e-13 of the scalar's
terms for float64's rounding."""

BOUND = 1e-6
"""Most that a derivative may differ, in units of the gradient's length: operands that follow from others, as y of SOFT_MAX_BACK from x, are
rounded to F32, 2^-24. A sign, a factor or a term that is wrong shows at 1e-2."""

DIRECTIONS = 3
"""Random ones through each variable."""


@dataclass(frozen=True)
class Difference:
    """The worst derivative of a variable by finite differences beside the reference's: error in units of the gradient's length."""

    output: str
    error: float

    @property
    def text(self) -> str:
        return f"{self.output}: finite differences off by {self.error:.1e} {'<=' if self.error <= BOUND else '>'} {BOUND:.0e}"


def is_gradient(case: Case) -> bool:
    """Whether grad mode has anything to check."""
    return isinstance(OPS.get(case.op), Gradient)


def derivative(scalar: Scalar, number: int, direction: Array) -> float:
    """Of the scalar along a direction of one of its variables, by the five-point rule."""
    at = scalar.at[number]
    size = float(np.sqrt(np.mean(np.square(at)))) or 1.0

    def value(step: float) -> float:
        moved = (*scalar.at[:number], at + step * direction, *scalar.at[number + 1 :])
        return scalar.value(*moved)

    h = STEP * size / max(float(np.abs(direction).max()), 1e-300)
    return (8.0 * (value(h) - value(-h)) - (value(2 * h) - value(-2 * h))) / (12.0 * h)


def differences(case: Case) -> list[Difference]:
    """One for each output of the case's op, whose reference must be the gradient. Raises PlanError where the case cannot be built."""
    op = OPS[case.op]
    assert isinstance(op, Gradient)
    problem = case.build()
    scalar = op.scalar(reference_inputs(problem), problem.node.params)
    rng = np.random.default_rng(case.seed)
    found = []
    for number, (name, gradient) in enumerate(reference(problem).items()):
        own = np.asarray(gradient, np.float64).reshape(scalar.at[number].shape)
        length = float(np.sqrt(np.sum(np.square(own)))) or 1.0
        directions = [rng.standard_normal(own.shape) for _ in range(DIRECTIONS)]
        steepest = np.zeros(own.shape)
        steepest.flat[int(np.abs(own).argmax())] = 1.0
        errors = [abs(derivative(scalar, number, d) - float(np.sum(own * d))) / length for d in (*directions, steepest)]
        found.append(Difference(name, max(errors)))
    return found


def graded(results: Iterable[CaseResult], cases: Iterable[Case]) -> Iterator[CaseResult]:
    """Results of a run of these cases, which also fail where finite differences say otherwise than the reference."""
    for result, case in zip(results, cases, strict=True):
        if not result.supported:
            yield replace(result, mode="grad")
            continue
        try:
            found = differences(case)
        except VkbackError as e:
            yield replace(result, mode="grad", passed=False, message=str(e))
            continue
        wrong = "; ".join(d.text for d in found if d.error > BOUND)
        message = "\n".join(text for text in (result.message, f"[{case.op}] {wrong}" if wrong else "") if text)
        detail = "; ".join((result.detail, *(d.text for d in found)))
        yield replace(result, mode="grad", passed=bool(result.passed) and not wrong, message=message, detail=detail)
