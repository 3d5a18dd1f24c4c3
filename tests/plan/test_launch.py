"""Launches that small ops have in common: grids, reasons and bytes, planned for a recorded device."""

from __future__ import annotations

from vkback.device import Capabilities
from vkback.graph import Node, Tensor
from vkback.ops.dispatch import MAX_GROUPS_X, Arg
from vkback.ops.family import Choice
from vkback.ops.launch import by_rows, by_threads
from vkback.ops.lowering import LowerContext
from vkback.tuning.lookup import Tuning

X, Y = Tensor("x", "F32", (3, 1000), "input"), Tensor("y", "F32", (3, 1000))
NODE = Node("TEST", (X,), (Y,))
CHOICE = Choice({"wg_size": 256}, "a row")


def context() -> LowerContext:
    caps = Capabilities.from_profile("nvidia_h200_linux")
    return LowerContext(caps, Tuning.for_device(caps))


def test_threads_fill_one_axis_or_the_first_of_a_grid() -> None:
    d = by_threads(NODE, context(), "a.comp", (Arg(X), Arg(Y, "w")), (3000, 0.5), 3000, {"WIDTH": 1}, choice=CHOICE, flops=7)
    assert d.kernel.defines == (("WG_SIZE", 256), ("WIDTH", 1)) and d.groups == (12, 1, 1) and len(d.push) == 8
    assert (d.op, d.reason, d.nbytes, d.flops) == ("TEST", "256 threads: a row", 24000, 7)
    assert by_threads(NODE, context(), "a.comp", (Arg(X),), (1,), 1000, choice=CHOICE, grid=(3, 2)).groups == (4, 3, 2)
    x, y, _ = by_threads(NODE, context(), "a.comp", (Arg(X),), (1,), 256 * (MAX_GROUPS_X + 1), choice=CHOICE).groups
    assert x <= MAX_GROUPS_X and y == 2 and x * y > MAX_GROUPS_X
    elementwise = by_threads(NODE, context(), "a.comp", (Arg(X),), (1,), 3000)
    assert context().tuning.pick("elementwise", elements=3000).source in elementwise.reason


def test_a_row_has_a_workgroup_with_its_reductions_defines() -> None:
    d = by_rows(NODE, context(), "a.comp", (Arg(X), Arg(Y, "rw")), (1,), 3, 128, CHOICE, {"MASK": 1}, how=" a row")
    assert dict(d.kernel.defines) == {"MASK": 1, "REDUCE_SUBGROUP": 1, "SUBGROUP_SIZE": 32, "WG_SIZE": 128} and d.kernel.subgroup_size == 32
    assert d.groups == (3, 1, 1) and d.reason == "128 threads a row: a row" and d.nbytes == 24000
    assert by_rows(NODE, context(), "a.comp", (Arg(X), Arg(X, "w")), (1,), 3, 128, CHOICE).nbytes == 24000
