"""vkback doctor: does this device compute right, and if not, which setting cures it?"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer

from vkback.cli.loading import ActOption
from vkback.cli.shell import DeviceOption, JsonOption, act_of, model_path
from vkback.cli.terminal import StatusLine, fit


def doctor(
    ops: Annotated[str | None, typer.Option("-o", help="Op names or whole cases, with commas [default: all ops].")] = None,
    params: Annotated[str | None, typer.Option("-p", help="Only cases whose parameters match this regular expression.")] = None,
    per_op: Annotated[int, typer.Option("--cases", min=1, help="Cases of each op at most.")] = 12,
    full: Annotated[bool, typer.Option("--full", help="Choose them from the whole suite.")] = False,
    model: Annotated[str | None, typer.Option("-m", "--model", help="Examine this model, node by node, instead of op cases.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to run it with [default: a few random tokens].")] = None,
    device: DeviceOption = None,
    act: ActOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Run a part of the op cases. Where some fail, switch integer dot, fusion, subgroup operations, row counts and more, one by one, and
    say which setting cures them. With -m the same for a model that gives wrong text, whose nodes are compared with numpy. Ends in a text
    for a bug report; exit code 1 when something was wrong."""
    import vkback
    from vkback.cli.test_ops import select
    from vkback.device import Device
    from vkback.harness.cases import full_cases, quick_cases
    from vkback.harness.doctor import examine, report, spread
    from vkback.ops.lowering import LowerContext
    from vkback.report.build import build_info
    from vkback.shader import ShaderLibrary, find_compiler
    from vkback.tuning.lookup import Tuning

    if model is not None:
        _examine_model(model, prompt, device, act, as_json)
        return
    names = ops.split(",") if ops and "(" not in ops else [ops] if ops else []
    cases = spread(select(full_cases() if full else quick_cases(), names, params), per_op)
    commit, number = build_info()
    compiler = find_compiler()
    about = f"vkback {vkback.__version__}, build {commit} ({number}), shader compiler {compiler.identity if compiler else 'none'}"
    with Device.open(device) as opened, StatusLine(wanted=not as_json) as status:

        def tell(line: str) -> None:
            status.clear()
            print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

        tell(opened.caps.summary_line())
        tell(f"{len(cases)} cases")
        context = LowerContext(opened.caps, Tuning.for_device(opened.caps), act_of(act))
        diagnosis = examine(opened, ShaderLibrary(), context, cases, tell, status.say)
    if as_json:
        about_device = {"vkback": about, "device": opened.caps.name, "driver": f"{opened.caps.driver_name} {opened.caps.driver_info}"}
        print(json.dumps({**about_device, **diagnosis.as_data()}, indent=1))
    else:
        print("\n" + "\n".join(part for line in report(diagnosis, opened.caps, about) for part in fit(line)))
    if not diagnosis.healthy:
        raise typer.Exit(1)


def _examine_model(name: str, prompt: str | None, device: str | None, act: str, as_json: bool) -> None:
    """Which node of a model is wrong first, and what cures it."""
    from vkback.cli.compare import TOKENS, batch_of
    from vkback.device import Device
    from vkback.evaluate.node_run import context_on
    from vkback.harness.doctor_model import examine_model
    from vkback.models.registry import Model
    from vkback.shader import ShaderLibrary

    opened = Model.open(model_path(name))
    batch = batch_of(opened, prompt, TOKENS, False, None)
    with Device.open(device) as here:
        out = sys.stderr if as_json else sys.stdout

        def tell(text: str) -> None:
            print("\n".join(part for line in text.splitlines() for part in fit(line)), file=out, flush=True)

        print(here.caps.summary_line(), file=out)
        tell(f"{opened.heading}, {len(batch.tokens)} tokens, the last of them node by node")
        library = ShaderLibrary()
        context = context_on(here, library, act_of(act))
        found = examine_model(opened, here, library, context, batch, tell)
    if as_json:
        own = [dataclasses.asdict(row) for row in found.own]
        first = dataclasses.asdict(found.first) if found.first else None
        cures = [{"setting": s.name, "remedy": s.remedy} for s in found.cures]
        made = {"model": opened.description, "device": here.caps.name, "nodes": found.nodes, "verdict": found.verdict}
        print(json.dumps({**made, "first": first, "own": own, "cures": cures}, indent=1))
    else:
        tell(f"verdict: {found.verdict}")
    if found.first is not None:
        raise typer.Exit(1)
