"""Cases: nodes with seeded values, and how far from the reference their outputs may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from vkback.graph import Node, Tensor
from vkback.ops.case_line import line_of
from vkback.ops.family import table_word
from vkback.ops.lowering import PlanError, Sync
from vkback.quants import QuantShapeError

BuiltT = TypeVar("BuiltT")

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


def f16_values(x: Array) -> Array:
    """Values rounded to F16, float64."""
    return np.asarray(x).astype(np.float16).astype(np.float64)


@dataclass(frozen=True)
class Tolerance:
    """nmse: error energy over the reference's energy; worst: largest |error| over the reference's rms. `reason` justifies both."""

    nmse: float
    worst: float
    reason: str


@dataclass(frozen=True)
class Rounded:
    """What an op must make of activations that its kernel rounds before it computes: `outputs` as of Op.reference, and the bound around
    them, which need not allow for that rounding."""

    outputs: list[Array]
    tolerance: Tolerance


@dataclass(frozen=True)
class Problem:
    """A node with values for its inputs: F32/I32/F16 arrays by tensor name, raw GGUF bytes [rows, row_bytes] for quantized weights.

    parts  nodes that fill the node's outputs between them, run in its place (`values` holds their inputs, too)
    """

    node: Node
    values: dict[str, Array]
    parts: tuple[Node, ...] = ()


def inputs_of(values: Mapping[str, Array]) -> tuple[Tensor, ...]:
    """Inputs of a node for values of F32 and I32, by their names and in their order."""
    return tuple(Tensor(name, "F32" if v.dtype == np.float32 else "I32", v.shape, "input") for name, v in values.items())


@dataclass(frozen=True)
class Case:
    """One seeded case. `line` reruns it: OP(key=value,...,seed=N). bare: makes its node alone, where the values are many."""

    op: str
    params: Mapping[str, Any]
    make: Callable[[np.random.Generator], Problem] = field(compare=False, hash=False)
    seed: int = 0
    bare: Callable[[], Node] | None = field(default=None, compare=False, hash=False)

    @property
    def line(self) -> str:
        return line_of(self.op, self.params)

    def build(self) -> Problem:
        """Its node and values. Raises PlanError where there are none: rows of a quantized type that are no whole blocks."""
        return self._whole_blocks(lambda: self.make(np.random.default_rng(self.seed)))

    def node(self) -> Node:
        """Its node, without values where it can be made so. Raises PlanError as `build` does."""
        return self._whole_blocks(self.bare) if self.bare else self.build().node

    def _whole_blocks(self, make: Callable[[], BuiltT]) -> BuiltT:
        try:
            return make()
        except QuantShapeError as error:
            raise PlanError(f"{self.op}: {error}; give rows of whole blocks") from error

    def where(self, *, sync: Sync | None = None, range: int | None = None, exact: bool = False, **tuning: int | str) -> Case:
        """The same case under other conditions, which stand in its line and hold on every device.

        tuning  parameters of the kernels, whatever the tables say: `tuning=[lanes:16,unroll:2]`
        sync    "sentinel": as in a barrier-free stage
        range   bytes that the device binds at most, so that a weight is cut into shards
        exact   batch-invariant: each row of the result must have the bits that it has alone
        """
        shown: dict[str, Any] = {"tuning": tuple(f"{k}:{table_word(v)}" for k, v in tuning.items())} if tuning else {}
        shown |= {"sync": sync} if sync else {}
        shown |= {"range": range} if range else {}
        shown |= {"exact": 1} if exact else {}
        rest = {k: v for k, v in self.params.items() if k != "seed"}
        return replace(self, params={**rest, **shown, "seed": self.seed})

    def reseeded(self, seed: int) -> Case:
        """The same case with other values."""
        return replace(self, seed=seed, params={**self.params, "seed": seed})
