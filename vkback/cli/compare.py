"""vkback compare: a model's nodes on a device beside those of numpy, of another device, of another setting, or of a saved run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkback.cli.loading import ActOption, FlashAttnOption
from vkback.cli.shell import (
    DeviceOption,
    ModelOption,
    UsageError,
    act_of,
    bars,
    flash_attn_of,
    model_path,
    one_of,
    output_file,
    picture_file,
)
from vkback.cli.terminal import fit, progress_bar

if TYPE_CHECKING:
    from vkback.evaluate.node_compare import Comparison
    from vkback.evaluate.node_run import Batch
    from vkback.models.registry import Model
    from vkback.ops.lowering import LowerContext

FUSIONS = ("all", "none")

TOKENS = 4
"""Tokens without a prompt: enough that attention has rows to weigh."""


def compare(
    model: ModelOption = None,
    against: Annotated[
        str, typer.Option(help='numpy; a file of --save; a device; act=f32; fusion=none; fa=0; or "FAMILY KEY=VALUE : PARAMETER=VALUE".')
    ] = "numpy",
    device: DeviceOption = None,
    fused: Annotated[bool, typer.Option("--fused/--unfused", help="Compare at the outputs of fusions, or op by op.")] = True,
    flash_attn: FlashAttnOption = "auto",
    step: Annotated[bool, typer.Option("--step", help="Give each node's reference the device's own inputs: its own error shows.")] = False,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="Text whose tokens are run [default: a few random ones].")] = None,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=1, help="How many random tokens.")] = TOKENS,
    at_once: Annotated[bool, typer.Option("--at-once", help="All tokens at once, as a prompt, instead of one by one.")] = False,
    ctx: Annotated[int | None, typer.Option("-c", "--ctx", min=1, help="Rows of the KV cache [default: as the tokens need].")] = None,
    act: ActOption = "auto",
    save: Annotated[Path | None, typer.Option(help="Keep this run in a file, for --against.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the errors as a picture: svg, png or pdf.")] = None,
    brief: Annotated[bool, typer.Option("--brief", help="Only nodes outside the band.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of lines.")] = False,
) -> None:
    """Run tokens on a device, the last of them node by node beside a reference, and name the first node whose error is more than the
    rounding of activations explains. Exit code 1 when there is one."""
    from vkback.device import Device
    from vkback.evaluate import node_compare as nodes
    from vkback.evaluate.node_run import context_on, run_nodes
    from vkback.harness.doctor_model import faulty
    from vkback.models.registry import Model
    from vkback.shader import ShaderLibrary

    if step and against != "numpy":
        raise UsageError("--step compares each node with its own reference; leave out --against")
    if step and save:
        raise UsageError("--step has no run to --save: leave one of them out")
    if against.endswith(".npz") and not Path(against).is_file():
        raise UsageError(f"--against {against}: no such file. Write one with --save")
    # A run takes minutes: whether its results can be written is known before it.
    if save is not None:
        output_file(save, "--save")
    if plot is not None:
        picture_file(plot, "--plot")
    opened = Model.open(model_path(model))
    batch = batch_of(opened, prompt, tokens, at_once, ctx)
    fusion = "all" if fused else "none"
    about = {"model": opened.description, "tokens": list(batch.tokens), "at once": batch.n}
    library = ShaderLibrary()
    flash = bool(flash_attn_of(flash_attn))

    runs: dict[str, Any] = {}

    def one(chosen: str | None, change: Callable[[LowerContext], LowerContext], label: str, fusion: str) -> Any:
        with Device.open(chosen) as here:
            context = change(replace(context_on(here, library, act_of(act)), flash=flash))
            alone = None
            run = runs[label] = run_nodes(opened, here, library, context, batch, fusion=fusion, progress=bars(not as_json))
            label = f"{here.caps.name}{label}"
        # Outside the block above: references take much memory, and a CPU driver's buffers are free again.
        if step or against == "numpy":
            with bar(len(run.nodes), "references", not as_json) as tick:
                alone = nodes.compare_steps(opened, run, batch, label, tick)
        if step:
            return alone, None, None
        with bar(len(run.nodes) * len(batch.steps), "numpy", not as_json) as tick:
            return alone, *nodes.sides(run, nodes.walked(opened, run, batch, tick), batch, label, about)

    shown = f"{'' if act == 'auto' else f', act={act}'}{'' if fused else ', unfused'}{'' if flash else ', -fa 0'}"
    alone, mine, exact = one(device, lambda c: c, shown, fusion)
    if save:
        nodes.save(save, mine)
    if step:
        comparison = alone
    elif against == "numpy":
        comparison = nodes.with_own(nodes.compare(mine, exact), alone)
    else:
        comparison = nodes.compare(mine, _other(against, device, fusion, one, about))
    if plot is not None:
        from vkback.report.node_plot import draw

        draw(comparison, plot, f"{opened.heading}: {comparison.device} against {comparison.against}")
    common, line = faulty(alone if alone is not None else comparison, runs[shown])
    if as_json:
        print(json.dumps({**about, **comparison.as_data(), "in_common": common, "alone": line}, indent=1))
    else:
        said = [*fit(f"in common: {common}")] * bool(common) + [f"alone: vkback test-ops '{line}'"] * bool(line)
        print("\n".join([*listing(comparison, opened, batch, brief), *said]))
    if comparison.first:
        raise typer.Exit(1)


def _other(against: str, device: str | None, fusion: str, one: Callable[..., Any], about: dict[str, Any]) -> Any:
    """The side that --against names."""
    from vkback.device import NoDevice
    from vkback.evaluate import node_compare as nodes
    from vkback.tuning.lookup import with_overrides

    if Path(against).is_file():
        return nodes.load(Path(against), about)
    key, equals, value = against.partition("=")
    if equals and key == "act":
        act = act_of(value)
        return one(device, lambda c: replace(c, act=act), f", {against}", fusion)[1]
    if equals and key == "fusion":
        return one(device, lambda c: c, f", {against}", one_of(value, FUSIONS, "--against fusion="))[1]
    if equals and key == "fa":
        other = bool(flash_attn_of(value))
        return one(device, lambda c: replace(c, flash=other), f", {against}", fusion)[1]
    if ":" in against:
        return one(device, lambda c: replace(c, tuning=with_overrides(c.tuning, against)), f", {against}", fusion)[1]
    try:
        return one(against, lambda c: c, "", fusion)[1]
    except NoDevice as e:
        known = "numpy, a file of --save, act=f32, fusion=none, fa=0, FAMILY : PARAMETER=VALUE, or a device"
        raise UsageError(f"--against {against}: expected {known}: {e}") from e


def batch_of(model: Model, prompt: str | None, count: int, at_once: bool, ctx: int | None) -> Batch:
    """The tokens to run: those of a text, or random ones, always the same. Raises UsageError for more of these than the context has."""
    import numpy as np

    from vkback.evaluate.node_run import Batch

    most = ctx or model.hp.n_ctx_train
    if not prompt and count > most:
        raise UsageError(f"-n {count}: the context has {most} tokens; give fewer, or a larger --ctx")
    ids = model.tokenizer.encode(prompt) if prompt else np.random.default_rng(1).integers(0, model.hp.n_vocab, count).tolist()
    return Batch(tuple(map(int, ids)), len(ids) if at_once else 1, ctx or -(-len(ids) // 64) * 64)


@contextmanager
def bar(total: int, what: str, shown: bool) -> Iterator[Callable[[], object]]:
    """A progress bar on a terminal; gives what moves it on by one."""

    with progress_bar(shown=shown) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def listing(c: Comparison, model: Model, batch: Batch, brief: bool) -> list[str]:
    """A line a node, below it what is wrong with it; the growth by layer; the verdict."""
    from vkback.evaluate.node_compare import growth_lines

    how = f"{batch.n} tokens at once" if batch.n > 1 else f"token {len(batch.tokens)} of {len(batch.tokens)}"
    lines = list(fit(f"{model.heading}, {how}: {c.device} against {c.against}"))
    for row in c.rows:
        if row.outside or not brief:
            lines.append(row.line)
        if row.outside:
            lines += fit(f"  outside: {row.outside}")
    if not c.step:
        lines += ["", *growth_lines(c.rows)]
    return [*lines, "", *(part for note in c.notes for part in fit(f"note: {note}")), *fit(c.verdict)]
