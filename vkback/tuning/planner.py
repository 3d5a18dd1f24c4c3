"""The planner's own families of tables: what they decide for the whole schedule of a graph, and for the length of submits."""

from __future__ import annotations

from vkback.ops.family import CountOr, declare

ROUTERS = ("gemv", "experts", "stage")
"""Who chooses the experts: the last workgroup of the router's GEMV, every workgroup of the experts' GEMV, or a stage of its own."""

ROPERS = ("attention", "product", "stage")
"""Who turns Q and K and stores K and V: attention of one token, products of Q, K and V of several (vkback/plan/passes/heads.py), or a stage
of its own; which it is wherever that one cannot."""

declare(
    "schedule",
    match={"n": "number", "n_expert": "number"},
    params={
        "norm": ("prologue", "stage"),
        "rope": ROPERS,
        "quantize": ("producer", "attention", "stage"),
        "router": ROUTERS,
        "pack": ("producer", "gemm", "stage"),  # of prompts (vkback/plan/passes/pack.py)
        "sync": ("barrier", "sentinel"),
    },
)

declare(
    "low_rates",
    match={"device_type": "word"},
    params={  # what a device surely reaches, to bound the length of a submit before anything is measured
        "gb_s": "positive",
        "gflops": "positive",
        "gb_s_per_gib": CountOr("none"),  # of a device's own memory; the larger of both counts
        "gflops_per_gib": CountOr("none"),
    },
)
