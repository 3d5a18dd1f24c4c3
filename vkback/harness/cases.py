"""The sets of cases, and the case that a line or its parameters name. What there is to know of an op is in its own file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np

import vkback.ops  # noqa: F401  registers every op
from vkback.errors import nearest
from vkback.ops.case import Case, Problem
from vkback.ops.case_line import NO_CASE, CaseLineError, parse_line
from vkback.ops.family import FAMILIES
from vkback.ops.ggml_words import ABSENT
from vkback.ops.lowering import LowerContext, PlanError, Sync
from vkback.ops.op import OPS
from vkback.plan.exact import exact_context
from vkback.tuning.lookup import Overrides, fault_anywhere


def quick_cases() -> Iterator[Case]:
    """What every build runs."""
    return (case for op in OPS.values() for case in op.cases())


GGML_LINES = Path(__file__).with_name("ggml_cases.txt")
"""Lines of llama.cpp's test-backend-ops: of those of each op, every sixteenth."""


def ggml_cases() -> Iterator[Case]:
    """The cases of GGML_LINES, as far as this project has their ops."""
    for line in GGML_LINES.read_text(encoding="utf-8").splitlines():
        if line.partition("(")[0] in OPS:
            yield find_case(line)


MUST_PASS = Path(__file__).with_name("must_pass.txt")
"""Lines of the quick set that a driver must get right for models to run: of every op of inference each type, products of one, few and many
tokens."""


def must_pass_cases() -> Iterator[Case]:
    """The cases of MUST_PASS."""
    return (find_case(line) for line in MUST_PASS.read_text(encoding="utf-8").splitlines())


def full_cases() -> Iterator[Case]:
    """The quick set, then the cross product of each op's parameters, then lines of test-backend-ops; each line once."""
    seen: set[str] = set()
    for source in (quick_cases(), *(op.full_cases() for op in OPS.values()), ggml_cases()):
        for case in source:
            line = case.line
            if line not in seen:
                seen.add(line)
                yield case


def perf_cases() -> Iterator[Case]:
    """Cases worth timing, ops with most of them first."""
    for own in sorted(([*op.perf_cases()] for op in OPS.values()), key=len, reverse=True):
        yield from own


def context_of(case: Case, ctx: LowerContext) -> LowerContext:
    """The context a case runs in: its own parameters act, sync, range, exact and tuning decide where it has them (`Case.where`)."""
    params = case.params
    if "act" in params:
        ctx = dataclasses.replace(ctx, act=params["act"])
    if "sync" in params:
        ctx = dataclasses.replace(ctx, sync=params["sync"])
    if "exact" in params:
        ctx = exact_context(ctx)
    if "range" in params:
        ctx = dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, max_storage_buffer_range=params["range"]))
    if "tuning" in params:
        own = _tuning(case.op, params["tuning"])
        ctx = dataclasses.replace(ctx, tuning=Overrides.everywhere(ctx.tuning, own, "the case's own parameters"))
    return ctx


def _tuning(op: str, words: Sequence[object]) -> dict[str, Any]:
    """Tuning parameters from `name:value`, values as a table has them. Raises CaseLineError for one that no family of tables takes."""
    found: dict[str, Any] = {}
    for word in map(str, words):
        name, _, text = word.partition(":")
        value = {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)
        if fault := fault_anywhere(name, value, FAMILIES.values()):
            raise CaseLineError(f"{op}: tuning=[{word}]: {fault}; a list of parameters is written [lanes:16,unroll:2]")
        found[name] = value
    return found


CONDITIONS = ("tuning", "sync", "range", "exact")
"""Parameters of `Case.where`, which a case of any op may have."""


def make_case(op: str, params: Mapping[str, Any]) -> Case:
    """The case of an op with these parameters. Raises CaseLineError for an unknown op and for parameters that are unknown, missing or do
    not fit. What makes sense but cannot run here makes a case that raises PlanError when it is built."""
    seed = params.get("seed", 0)
    if not isinstance(seed, int) or seed < 0:
        raise CaseLineError(f"{op}: seed={seed}: expected a whole number from 0")
    if op not in OPS:
        if op in ABSENT:
            return unsupported(op, params, f"[{op}] this project has no such op")
        raise CaseLineError(f"{op}: no such op; of {len(OPS)} the nearest are {nearest(op, OPS)}. --list-ops shows all")
    try:
        case = OPS[op].case({k: v for k, v in params.items() if k not in CONDITIONS})
    except PlanError as e:
        return unsupported(op, params, str(e) if str(e).startswith("[") else f"[{op}] {e}")
    conditions = {k: params[k] for k in CONDITIONS if k in params}
    if not isinstance(conditions.get("tuning", ()), tuple):
        raise CaseLineError(f"{op}: tuning={conditions['tuning']}: expected a list, as [lanes:16,unroll:2]")
    if conditions.get("sync", "barrier") not in get_args(Sync):
        raise CaseLineError(f"{op}: sync={conditions['sync']}: expected one of {', '.join(get_args(Sync))}")
    if not isinstance(conditions.get("range", 1), int) or conditions.get("range", 1) < 1:
        raise CaseLineError(f"{op}: range={conditions['range']}: expected a number of bytes")
    if conditions.get("exact", 1) != 1:
        raise CaseLineError(f"{op}: exact={conditions['exact']}: expected 1, or nothing")
    tuning = _tuning(op, conditions.pop("tuning", ()))
    case = dataclasses.replace(case, make=_checked(case))
    return case.where(**{**conditions, "exact": "exact" in conditions}, **tuning) if conditions or tuning else case


def _checked(case: Case) -> Callable[[np.random.Generator], Problem]:
    """The case's `make`, which raises CaseLineError where values that nobody reckoned with make no tensors."""

    def make(rng: np.random.Generator) -> Problem:
        try:
            problem = case.make(rng)
        except NO_CASE as e:
            raise CaseLineError(f"{case.line}: these parameters make no case: {e}") from e
        for tensor in (*problem.node.inputs, *problem.node.outputs):
            if any(n < 1 for n in tensor.shape):
                raise CaseLineError(f"{case.line}: {tensor} has no values")
        return problem

    return make


def unsupported(op: str, params: Mapping[str, Any], why: str) -> Case:
    """A case that raises PlanError when it is built."""

    def make(rng: np.random.Generator) -> Problem:
        raise PlanError(why)

    return Case(op, dict(params), make, int(params.get("seed", 0)))


@cache
def known_cases() -> dict[str, Case]:
    """Every case of the full set by its line."""
    return {case.line: case for case in full_cases()}


def find_case(line: str) -> Case:
    """The case that a line names. Raises CaseLineError."""
    return make_case(*parse_line(line))
