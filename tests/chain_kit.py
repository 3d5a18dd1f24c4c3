"""Chains of dispatches run on a device as if they were one op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.device import Device
from vkback.graph import Node, Tensor
from vkback.harness.runner import Workbench, prepare
from vkback.ops.case import Problem
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul.linear import Linear
from vkback.ops.op import OPS, Op
from vkback.shader import ShaderLibrary

Array = npt.NDArray[np.float64]


class _Chain(Op):
    """Runs the dispatches of a node's params, so that the harness's checks of memory hold for them."""

    name = "CHAIN"

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        return list(node.params["chain"])

    reference = Linear.reference
    cases = Linear.cases
    build_case = Linear.build_case
    tolerance = Linear.tolerance


@contextmanager
def chain_op() -> Iterator[None]:
    OPS["CHAIN"] = _Chain()
    try:
        yield
    finally:
        del OPS["CHAIN"]


def run_chain(
    device: Device,
    library: ShaderLibrary,
    ctx: LowerContext,
    chain: list[Dispatch],
    values: dict[str, npt.NDArray[Any]],
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
) -> dict[str, npt.NDArray[Any]]:
    """Outputs of dispatches by name. Scratch and outputs hold NaN before, and nothing else may change."""
    problem = Problem(Node("CHAIN", inputs, outputs, {"chain": chain}), values)
    with chain_op():
        ready = prepare(problem, ctx)
    with Workbench(device, library) as bench:
        return bench.run(ready)


def nmse(got: npt.NDArray[Any], want: Array) -> float:
    assert np.isfinite(got).all()
    return float(np.square(got.astype(np.float64) - want).sum() / np.square(want).sum())
