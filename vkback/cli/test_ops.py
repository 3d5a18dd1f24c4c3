"""vkback test-ops: every op against its numpy reference on a device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from vkback.cli.shell import ActOption, DeviceOption, UsageError, act_of
from vkback.errors import VkbackError

if TYPE_CHECKING:
    from vkback.ops.base import Case

_OUTSIDE_PARENTHESES = re.compile(r",(?![^(]*\))")


def test_ops(
    wanted: Annotated[list[str] | None, typer.Argument(metavar="CASE", help="Whole cases, as a run prints them, to rerun.")] = None,
    ops: Annotated[str | None, typer.Option("-o", help="Op names or whole cases, with commas.")] = None,
    params: Annotated[str | None, typer.Option("-p", help="Only cases whose parameters match this regular expression.")] = None,
    device: DeviceOption = None,
    act: ActOption = "auto",
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show the error and its bound for cases that pass, too.")] = False,
    list_ops: Annotated[bool, typer.Option("--list-ops", help="List the ops with their number of cases.")] = False,
) -> None:
    """Run the seeded cases of ops on a device and judge each against the op's numpy reference. Exit code 1 when one fails."""
    import vkback.ops  # noqa: F401  registers every op
    from vkback.device import Device
    from vkback.harness.runner import run_case
    from vkback.ops.base import OPS, LowerContext, PlanError
    from vkback.plan.tuning import Tuning
    from vkback.shader import ShaderLibrary

    if list_ops:
        for name, op in sorted(OPS.items()):
            print(f"{name:24} {sum(1 for _ in op.cases()):5} cases")
        return
    names = [*(wanted or []), *(_OUTSIDE_PARENTHESES.split(ops) if ops else [])]
    cases = list(select((case for op in OPS.values() for case in op.cases()), names, params))
    failed: list[str] = []
    skipped = 0
    with Device.open(device) as opened:
        print(opened.caps.summary_line())
        context = LowerContext(opened.caps, Tuning.for_device(opened.caps), act_of(act))
        library = ShaderLibrary()
        for case in cases:
            try:
                outcome = run_case(opened, library, case, context)
                ok, text = outcome.ok, outcome.text if outcome.ok else f"[{case.op}] {outcome.text}"
            except PlanError as e:
                print(f"  {case.line}: not supported [{e}]", flush=True)
                skipped += 1
                continue
            except VkbackError as e:
                ok, text = False, str(e)
            if ok:
                typer.echo(f"  {case.line}: {typer.style('OK', fg='green')}{f'  {text}' if verbose else ''}")
            else:
                failed.append(case.line)
                typer.echo(f"{text}\n  {case.line}: {typer.style('FAIL', fg='red')}")
    ran = len(cases) - skipped
    print(f"  {ran - len(failed)}/{ran} tests passed" + (f", {skipped} not supported" if skipped else ""))
    if failed:
        print("\nFailing tests:", *(f"  {line}" for line in failed), sep="\n")
        raise typer.Exit(1)


def select(cases: Iterable[Case], names: Sequence[str], params: str | None) -> Iterator[Case]:
    """Cases of the named ops or with the given lines; of those, the ones whose parameters match.

    Raises UsageError for a name that is neither an op nor a case, for a bad expression, and when nothing is left.
    """
    try:
        pattern = re.compile(params or "")
    except re.error as e:
        raise UsageError(f"-p {params}: not a regular expression: {e}") from e
    names = [n.strip() for n in names]
    unmatched = set(names)
    found = False
    for case in cases:
        keys = {case.op, case.line} & set(names)
        unmatched -= keys
        if (keys or not names) and pattern.search(case.line.partition("(")[2]):
            found = True
            yield case
    if unmatched:
        raise UsageError(f"no op and no case is called {', '.join(sorted(unmatched))}; --list-ops shows the ops")
    if not found:
        raise UsageError(f"-p {params}: no case matches")
