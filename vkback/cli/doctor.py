"""vkback doctor: does this device compute right, and if not, which setting cures it?"""

from __future__ import annotations

from typing import Annotated

import typer

from vkback.cli.shell import ActOption, DeviceOption, act_of


def doctor(
    ops: Annotated[str | None, typer.Option("-o", help="Op names or whole cases, with commas [default: all ops].")] = None,
    params: Annotated[str | None, typer.Option("-p", help="Only cases whose parameters match this regular expression.")] = None,
    per_op: Annotated[int, typer.Option("--cases", min=1, help="Cases of each op at most.")] = 12,
    full: Annotated[bool, typer.Option("--full", help="Choose them from the whole suite.")] = False,
    device: DeviceOption = None,
    act: ActOption = "auto",
) -> None:
    """Run a part of the op cases. Where some fail, switch integer dot, fusion, subgroup operations, row counts and more, one by one, and
    say which setting cures them. Ends in a text for a bug report; exit code 1 when something was wrong."""
    import vkback
    from vkback.cli.test_ops import select
    from vkback.device import Device
    from vkback.harness.cases import full_cases, quick_cases
    from vkback.harness.doctor import examine, report, spread
    from vkback.ops.base import LowerContext
    from vkback.plan.tuning import Tuning
    from vkback.report.build import build_info
    from vkback.shader import ShaderLibrary, find_compiler

    names = ops.split(",") if ops and "(" not in ops else [ops] if ops else []
    cases = spread(select(full_cases() if full else quick_cases(), names, params), per_op)
    commit, number = build_info()
    compiler = find_compiler()
    about = f"vkback {vkback.__version__}, build {commit} ({number}), shader compiler {compiler.identity if compiler else 'none'}"
    with Device.open(device) as opened:
        print(opened.caps.summary_line())
        print(f"{len(cases)} cases", flush=True)
        context = LowerContext(opened.caps, Tuning.for_device(opened.caps), act_of(act))
        diagnosis = examine(opened, ShaderLibrary(), context, cases, lambda line: print(line, flush=True))
    print()
    print("\n".join(report(diagnosis, opened.caps, about)))
    if not diagnosis.healthy:
        raise typer.Exit(1)
