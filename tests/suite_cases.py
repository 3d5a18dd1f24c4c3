"""The cases that every build runs, by who runs them."""

from __future__ import annotations

from vkback.ops.lowering import Act
from vkback.ops.op import OPS

WITH_SEVERAL_KERNELS = {"MUL_MAT", "MUL_MAT_ID", "LINEAR", "MOE_REDUCE"}
"""Ops whose own tests run every case on more than one path or shape."""

CASES = [c for name, op in OPS.items() if name not in WITH_SEVERAL_KERNELS for c in op.cases()]
"""Of all other ops."""

PRODUCTS = [c for name in ("MUL_MAT", "MUL_MAT_ID", "LINEAR") for c in OPS[name].cases()]


PATHS: tuple[Act, ...] = ("f32", "q8_1")


RUNS = [(case, act) for case in PRODUCTS for act in ((case.params["act"],) if "act" in case.params else PATHS)]
"""A case that says its path is run on that one alone."""
