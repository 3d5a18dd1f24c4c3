"""Support mode: what a device runs, and why not the rest. Nothing is computed on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vkback import quants
from vkback.harness.cases import context_of
from vkback.harness.output import with_reasons
from vkback.harness.result import CaseResult
from vkback.harness.runner import check_bound
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.linear_node import QUANTS
from vkback.ops.op import OPS
from vkback.paths import shader_root

MAX_REASONS = 3


def support_of(cases: Iterable[Case], ctx: LowerContext) -> Iterator[CaseResult]:
    """Whether each case can be planned."""
    for case in cases:
        try:
            problem = case.build()
            dispatches = [d for n in problem.parts or (problem.node,) for d in OPS[n.op].lower(n, context_of(case, ctx))]
            check_bound(dispatches, context_of(case, ctx))
        except PlanError as e:
            yield CaseResult(op=case.op, line=case.line, mode="support", supported=False, message=str(e))
        else:
            yield CaseResult(op=case.op, line=case.line, mode="support", kernel="; ".join(d.reason for d in dispatches))


def row_of(case: Case) -> tuple[str, str]:
    """Op and weight type of a case, the row it counts in."""
    key = OPS[case.op].weight_type
    return case.op, str(case.params.get(key, "")) if key else ""


def support_table(cases: Sequence[Case], results: Sequence[CaseResult]) -> list[str]:
    """Lines: op, type of the weights, cases that run, cases in all, and why the others do not."""
    found: dict[tuple[str, str], list[CaseResult]] = {}
    for case, result in zip(cases, results, strict=True):
        found.setdefault(row_of(case), []).append(result)
    width = max((len(f"{op} {kind}") for op, kind in found), default=2)
    lines = [f"{'op':{width}}  {'runs':>5} of cases"]
    for (op, kind), rows in found.items():
        refused = [r.message for r in rows if not r.supported]
        reasons = list(dict.fromkeys(refused))
        more = f"; and {len(reasons) - MAX_REASONS} other reasons" if len(reasons) > MAX_REASONS else ""
        why = f"not the rest: {'; '.join(reasons[:MAX_REASONS])}{more}" if reasons else ""
        lines += with_reasons(f"{f'{op} {kind}':{width}}  {len(rows) - len(refused):5} of {len(rows):5}", why)
    missing = [q for q in QUANTS if not (shader_root() / quants.quant(q).shader).is_file()]
    lines.append(f"weight types without a kernel: {', '.join(missing) or 'none'}")
    return lines
