"""vkbench: how fast a model runs, in the tables of llama-bench."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn, cast, get_args

import typer

from vkback import paths
from vkback.cli.bench_output import AsJsonOption, OutputErrOption, OutputOption, Outputs, SaveOption, StoreOption
from vkback.cli.hosts import HostsOption, JournalOption, SchedulerOption, WorkersOption, workers_of
from vkback.cli.llama_options import BenchCommand
from vkback.cli.loading import CpuMoeLayersOption, CpuMoeOption, ExactOption, ExpertCacheOption, TensorSplitOption, load_options, shares
from vkback.cli.shell import (
    ACTS,
    Command,
    DevicesOption,
    EngineLike,
    UsageError,
    VersionOption,
    act_of,
    add_command,
    asked_for,
    bars,
    flash_attn_of,
    load_engine,
    measured_math_rate,
    measured_read_rate,
    model_path,
    new_app,
    one_of,
    output_file,
    run,
)
from vkback.cli.terminal import StatusLine
from vkback.cli.vkbench_run import Feed, cpu_name, device_names, driver_text, measure, split_text, where_it_ran
from vkback.cli.vkbench_tests import BenchTest, parse_values, plan_tests
from vkback.report.bench_table import BENCH, BenchResult
from vkback.report.build import build_info
from vkback.report.pairs import PAIRS
from vkback.timing.power import Meter, PowerSource, power_source

if TYPE_CHECKING:
    from vkback.device import Capabilities
    from vkback.engine.host_weights import LayersOnDevice
    from vkback.engine.load_options import LoadOptions
    from vkback.events import Report
    from vkback.ops.matmul.gemm_problem import GemmKernel

FEEDS = get_args(Feed)
FUSIONS = ("all", "none")
REPETITIONS = 5
"""As of llama-bench."""


def print_devices(wanted: bool) -> None:
    """As vkback devices does, and nothing else, where the option was given."""
    if wanted:
        from vkback.cli.devices import devices

        devices()
        raise typer.Exit


app = new_app("How fast a model runs, in the tables of llama-bench.")


@dataclass(frozen=True)
class Settings:
    """All that applies to every test of a run.

    exact      batch-invariant
    fusion     "all" or "none"
    flash_attn  of this variant: 1, 0, or -1 where nothing was said
    read_rate  GB/s, None to measure it, 0 to do without
    math_rate  TFLOPS, likewise
    compile_line  whether stderr is free for a line about compile time
    """

    repetitions: int
    device: str | None
    tensor_split: tuple[float, ...] | None
    n_cpu_moe: int | None
    cpu_moe: bool
    expert_cache: int
    exact: bool
    fusion: str
    flash_attn: int
    feed: Feed
    read_rate: float | None
    math_rate: float | None
    warmup: bool
    delay_s: float
    progress: bool
    compile_line: bool
    power: bool
    command: str
    build: tuple[str, int]


class Variant(NamedTuple):
    """How a model is loaded: activations, tokens of a prompt processed at once (None: the engine's default), types of K and V,
    whether attention is one kernel (as Settings.flash_attn), and layers on the device (as of LoadOptions)."""

    act: str
    ubatch: int | None
    cache: tuple[str, str]
    flash_attn: int
    n_gpu_layers: LayersOnDevice | None


LOADED_BY = ("exact", "fusion", "tensor_split", "n_cpu_moe", "cpu_moe", "expert_cache")
"""Settings that say how a model is loaded, as LoadOptions names them."""

FLASH_WORDS = {-1: "", 0: "0", 1: "1"}
"""Of `How`."""


def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="TEST", help="pp512, tg128, pp512+tg128, tg128@d4096")] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "-m", "--model", "-hf", "--hf-repo", help="GGUF file, built-in model, or with -hf USER/REPO[:TYPE]; repeat for several."
        ),
    ] = None,
    prompts: Annotated[list[str] | None, typer.Option("-p", "--n-prompt", help="Prompt tokens: 512, 128,256 or 64-512*2.")] = None,
    gens: Annotated[list[str] | None, typer.Option("-n", "--n-gen", help="Generated tokens, same notation.")] = None,
    pairs: Annotated[list[str] | None, typer.Option("-pg", help="Prompt and generation in one time: 512,128.")] = None,
    depths: Annotated[list[str] | None, typer.Option("-d", "--n-depth", help="Tokens already in the cache, same notation.")] = None,
    ubatch: Annotated[
        list[str] | None, typer.Option("-ub", "--ubatch-size", "--ubatch", help="Prompt tokens processed at once, same notation.")
    ] = None,
    repetitions: Annotated[
        int | None,
        typer.Option("-r", "--repetitions", min=1, help=f"Times that each test is measured [default: 5; {PAIRS} with --against]."),
    ] = None,
    output: OutputOption = "md",
    as_json: AsJsonOption = False,
    output_err: OutputErrOption = "none",
    save: SaveOption = None,
    store: StoreOption = None,
    submit: Annotated[
        Path | None,
        typer.Option("--submit", metavar="FILE.json", help="One file to send: device, its table, results, the suite's verdict."),
    ] = None,
    device: DevicesOption = None,
    tensor_split: TensorSplitOption = None,
    n_gpu_layers: Annotated[
        list[str] | None,
        typer.Option(
            "--n-gpu-layers",
            "--gpu-layers",
            "-ngl",
            metavar="N|auto|all",
            help="N layers, the output layer and the last ones, have their weights on the device; same notation [default: auto].",
        ),
    ] = None,
    n_cpu_moe: CpuMoeLayersOption = None,
    cpu_moe: CpuMoeOption = False,
    expert_cache: ExpertCacheOption = 0,
    act: Annotated[str, typer.Option(help=f"Activations: {', '.join(ACTS)}; several with commas.")] = "auto",
    cache_type_k: Annotated[
        str, typer.Option("--cache-type-k", "-ctk", help="What keys are kept as: f16, f32, q8_0 or q4_0; several with commas.")
    ] = "f16",
    cache_type_v: Annotated[str, typer.Option("--cache-type-v", "-ctv", help="The same for values.")] = "f16",
    exact: ExactOption = False,
    fusion: Annotated[str, typer.Option(help="all or none.")] = "all",
    flash_attn: Annotated[
        list[str] | None,
        typer.Option("-fa", "--flash-attn", metavar="on|off|auto", help="off, or 0: attention as nodes of its own; several with commas."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="DIR|COMMIT|TABLE|PROGRAM",
            help="Run by run in turn with another build, table, 'FAMILY : KEY=VALUE', '--act f32' or llama-bench, with one verdict.",
        ),
    ] = None,
    feed: Annotated[
        str | None, typer.Option(help="self: generate as in use [default]; random: random tokens one by one, as llama-bench does.")
    ] = None,
    to_host: Annotated[
        bool, typer.Option("--logits-to-host", help="One submit a token and all its logits read back: the same as --feed random.")
    ] = False,
    read_rate: Annotated[
        float | None, typer.Option(min=0.0, help="GB/s that 100 % read stands for; without it measured, with 0 the column is left out.")
    ] = None,
    math_rate: Annotated[
        float | None, typer.Option(min=0.0, help="TFLOPS that 100 % math stands for; without it measured, with 0 the column is left out.")
    ] = None,
    warmup: Annotated[bool, typer.Option("--warmup/--no-warmup", help="Run each test once before it is measured.")] = True,
    delay: Annotated[float, typer.Option("--delay", min=0.0, help="Seconds to rest before each test.")] = 0.0,
    power: Annotated[
        bool, typer.Option("--power", help="Show watts and t/s per watt, where the driver tells what the device draws.")
    ] = False,
    progress: Annotated[bool, typer.Option("--progress", help="Say on stderr what is being run.")] = False,
    scheduler: SchedulerOption = None,
    hosts: HostsOption = None,
    workers: WorkersOption = None,
    journal: JournalOption = None,
    list_devices: Annotated[
        bool, typer.Option("--list-devices", callback=print_devices, is_eager=True, help="List the Vulkan devices, and end.")
    ] = False,
    turns: Annotated[bool, typer.Option("--turns", hidden=True)] = False,
    version: VersionOption = False,
) -> None:
    """Measure tokens per second: mean and deviation over repetitions. Without -m, both built-in models; without a test, pp512 and tg128.

    vkbench batch measures many sequences at once, vkbench spec drafts, vkbench serve a server with many clients; each has its own --help.
    """
    tests = plan_tests(names or [], prompts or [], gens or [], pairs or [], depths or [])
    files = [model_path(m) for m in models] if models else paths.builtin_models()
    acts = [act_of(a) for a in act.split(",")]
    ubatches: list[int] | list[None] = parse_values(ubatch, "-ub") if ubatch else [None]
    pairs_of_types = product(cache_type_k.split(","), cache_type_v.split(","))
    checked = [load_options(cache_type_k=k.strip(), cache_type_v=v.strip()) for k, v in pairs_of_types]
    caches = [(each.cache_type_k, each.cache_type_v) for each in checked]
    feed = "random" if to_host or (feed is None and measures_as_llama_bench(against)) else feed or "self"
    one_of(fusion, FUSIONS, "--fusion")
    flashes = [flash_attn_of(word) for text in flash_attn or ["auto"] for word in text.split(",")]
    settings = Settings(
        repetitions=repetitions or REPETITIONS,
        device=device,
        tensor_split=shares(tensor_split),
        n_cpu_moe=n_cpu_moe,
        cpu_moe=cpu_moe,
        expert_cache=expert_cache,
        exact=exact,
        fusion=fusion,
        flash_attn=flashes[0],
        feed=cast(Feed, one_of(feed, FEEDS, "--feed")),
        read_rate=read_rate,
        math_rate=math_rate,
        warmup=warmup,
        delay_s=delay,
        progress=progress,
        compile_line=output_err == "none",
        power=power,
        command=shlex.join(["vkbench", *sys.argv[1:]]),
        build=build_info(),
    )
    ngls = layers_on_device(n_gpu_layers)
    variants = [Variant(*each) for each in product(acts, ubatches, caches, flashes, ngls)]
    where = None if tensor_split is not None or turns else workers_of(device, scheduler, hosts, workers, journal)
    if where is not None and against is not None:
        raise UsageError("--against is of one device; leave out --scheduler, --hosts, --workers and several devices")
    if turns:
        _turns(files, variants, tests, settings)
        return
    if against is not None:
        from vkback.cli.vkbench_against import compare_in_turn, refuse
        from vkback.cli.vkbench_sides import How

        if submit is not None:
            refuse("--submit", "a card's file has speeds of one build")
        if store is not None:
            refuse("--store", "a store has speeds of one build; --save keeps the comparison")
        if output_err != "none":
            refuse("-oe", "the table is printed once; --save keeps it")
        layers = "all" if cpu_moe else "" if n_cpu_moe is None else str(n_cpu_moe)
        hows = [
            How(
                path.absolute(),
                a,
                *c,
                "" if u is None else str(u),
                feed,
                fusion,
                exact,
                device or "",
                tensor_split or "",
                layers,
                FLASH_WORDS[f],
                str(expert_cache or ""),
                "" if ngl is None else str(ngl),
            )
            for path in files
            for a, u, c, f, ngl in variants
        ]
        compare_in_turn(against, hows, tests, repetitions or PAIRS, "json" if as_json else output, save or [], settings.command)
        return
    columns = ["n_ubatch"] * (ubatches not in ([None], [BenchResult.n_ubatch]))
    columns += [f"type_{one}" for one, types in zip("kv", zip(*caches, strict=True), strict=True) if {*types} != {"f16"}]
    columns += (
        ["flash_attn"] * (flashes != [-1])
        + ["fusion"] * (fusion != "all")
        + ["exact"] * exact
        + ["act"] * (acts != ["auto"])
        + ["feed"] * (feed != "self")
        + ["% read"] * (read_rate != 0)
        + ["W", "t/s/W"] * power
    )
    if any(test.is_prompt for test in tests):
        columns += ["TFLOPS"] + ["% math"] * (math_rate != 0)
    outputs = Outputs(BENCH, output, as_json, output_err, save, store, extra=frozenset(columns), build=settings.build, inputs=files)
    if submit is not None:
        if where is not None:
            raise UsageError("--submit writes what one device of this machine did; leave out --hosts and the like")
        output_file(submit, "--submit", *files)
    if where is not None:
        from vkback.cli.vkbench_hosts import bench_by_workers

        with outputs:
            found = bench_by_workers(where, journal, files, variants, tests, replace(settings, device=None))
            outputs.begin("; ".join(kind.name for kind, _ in found), settings.command, "; ".join(kind.name for kind, _ in found))
            for result in (result for _, results in found for result in results):
                outputs.row(result)
        return
    with outputs:
        _measure_all(files, variants, tests, settings, outputs)
    if submit is not None:
        from vkback.cli.vkbench_submit import write_submission

        write_submission(submit, device, outputs.results)


def layers_on_device(given: Sequence[str] | None) -> list[LayersOnDevice | None]:
    """Those of -ngl: numbers as llama-bench has them, and llama.cpp's words."""
    found: list[LayersOnDevice | None] = []
    for word in (word for text in given or () for word in text.split(",")):
        if word.strip() in ("auto", "all", "-1"):
            found.append(load_options(n_gpu_layers=word.strip()).n_gpu_layers)
        else:
            found += parse_values([word], "-ngl")
    return found or [None]


def measures_as_llama_bench(against: str | None) -> bool:
    """Whether --against names a llama-bench."""
    if against is None:
        return False
    from vkback.cli.vkbench_sides import is_llama_bench

    return is_llama_bench(against)


def loading(variant: Variant, n_ctx: int, settings: Settings, progress: Report | None = None) -> LoadOptions:
    """How a model is loaded for its tests. Raises UsageError."""
    given = {name: getattr(settings, name) for name in LOADED_BY}
    k, v = variant.cache
    given |= {"ctx": n_ctx, "act": variant.act, "ubatch": variant.ubatch, "cache_type_k": k, "cache_type_v": v, "progress": progress}
    return load_options(**given, flash_attn=bool(variant.flash_attn), n_gpu_layers=variant.n_gpu_layers)


def _turns(files: Sequence[Path], variants: Sequence[Variant], tests: Sequence[BenchTest], settings: Settings) -> None:
    """One side of --against, for one model in one variant."""
    from vkback.cli.vkbench_turns import take_turns

    (path,), (variant,) = files, variants
    settings = replace(settings, flash_attn=variant.flash_attn)
    how = loading(variant, max(t.n_ctx for t in tests), settings)
    with load_engine(path, settings.device, how) as engine:
        begun = datetime.now(UTC)
        act, cache = variant.act, variant.cache
        take_turns(engine, tests, settings.feed, lambda test, ns: _result(engine, test, path, act, cache, settings, begun, (ns,)))


def _measure_all(
    files: Sequence[Path], variants: Sequence[Variant], tests: Sequence[BenchTest], settings: Settings, outputs: Outputs[BenchResult]
) -> None:
    """Each variant has the model loaded anew."""
    begun = False
    n_ctx = max(t.n_ctx for t in tests)
    rate = settings.read_rate
    math_rates: dict[GemmKernel, float] = {}
    for path, variant in product(files, variants):
        settings = replace(settings, flash_attn=variant.flash_attn)
        how = loading(variant, n_ctx, settings, bars(settings.progress or sys.stderr.isatty()))
        with load_engine(path, settings.device, how) as engine:
            if not begun:
                begun = True
                about = "\n".join(device.caps.summary_line() for device in engine.devices)
                outputs.begin(about, settings.command, where_it_ran(engine))
            if rate is None:
                rate = measured_read_rate(engine.device)
            for test in tests:
                time.sleep(settings.delay_s)
                engine.resize(test.n_ctx)  # kernels depend on the size of the cache, and a result must not on other tests
                outputs.row(measured_test(engine, test, path, variant.act, variant.cache, settings, rate or None, math_rates))


def measured_test(
    engine: EngineLike,
    test: BenchTest,
    path: Path,
    act: str,
    cache: tuple[str, str],
    settings: Settings,
    rate: float | None,
    math_rates: dict[GemmKernel, float],
) -> BenchResult:
    """One test on a loaded model. rate: the device's read rate, GB/s, where it is known; math_rates: measured so far, by kernel."""
    result = replace(_measure_one(engine, test, path, act, cache, settings), read_rate_gb_s=rate)
    return _with_flops(result, engine, test, settings.math_rate, math_rates) if test.is_prompt else result


def _with_flops(
    result: BenchResult, engine: EngineLike, test: BenchTest, rate: float | None, known: dict[GemmKernel, float]
) -> BenchResult:
    """A prompt's result with its operations and the math rate of the kernel that makes most of them.

    rate   TFLOPS that the user gave, None to measure it, 0 to do without
    known  rates measured so far, by kernel
    """
    kernel = engine.prompt_kernel(test.n_prompt)
    if rate is None and kernel is not None and kernel not in known:
        known[kernel] = measured_math_rate(engine.device, kernel)
    found = rate if rate is not None else known.get(kernel) if kernel is not None else None
    flops = engine.prompt_flops(test.n_prompt, test.n_depth)
    return replace(result, prompt_flops=flops, math_way=kernel or "", math_rate_tflops=found or None)


def _measure_one(engine: EngineLike, test: BenchTest, path: Path, act: str, cache: tuple[str, str], settings: Settings) -> BenchResult:
    begun, before = datetime.now(UTC), engine.compiled
    with StatusLine(wanted=not settings.progress and settings.compile_line) as status:

        def note(text: str) -> None:
            line = f"vkbench: {path.name} {test.name}: {text}"
            if settings.progress:
                print(line, file=sys.stderr, flush=True)
            else:
                status.say(line)

        meter = Meter(power_of(engine) if settings.power else None)
        samples = measure(engine, test, settings.repetitions, warmup=settings.warmup, feed=settings.feed, note=note, during=meter)
    made = engine.compiled - before
    if made.compiled and settings.compile_line:
        print(f"vkbench: {path.name} {test.name}: {made}, not part of the speed", file=sys.stderr, flush=True)
    return replace(_result(engine, test, path, act, cache, settings, begun, samples), watts=meter.watts)


@lru_cache
def _source(caps: Capabilities) -> PowerSource | None:
    source, why = power_source(caps)
    print(f"vkbench: power: {source.name if source else why}", file=sys.stderr, flush=True)
    return source


def power_of(engine: EngineLike) -> PowerSource | None:
    """Where the power of an engine's device is read; stderr says it once, or why it is not."""
    return _source(cast("Capabilities", engine.device.caps))


def _result(
    engine: EngineLike,
    test: BenchTest,
    path: Path,
    act: str,
    cache: tuple[str, str],
    settings: Settings,
    begun: datetime,
    samples: tuple[int, ...],
) -> BenchResult:
    return BenchResult(
        build_commit=settings.build[0],
        build_number=settings.build[1],
        cpu_info=cpu_name(),
        gpu_info=device_names(engine),
        model_filename=str(path),
        model_type=engine.description,
        model_size=engine.size_bytes,
        model_n_params=engine.n_params,
        n_batch=max(BenchResult.n_batch, engine.ubatch),
        n_ubatch=engine.ubatch,
        type_k=cache[0],
        type_v=cache[1],
        devices=settings.device or "auto",
        n_gpu_layers=engine.host_weights.shown_layers,
        n_cpu_moe=engine.host_weights.expert_layers,
        tensor_split=split_text(settings.tensor_split),
        flash_attn=settings.flash_attn,
        n_prompt=test.n_prompt,
        n_gen=test.n_gen,
        n_depth=test.n_depth,
        test_time=begun.strftime("%Y-%m-%dT%H:%M:%SZ"),
        samples_ns=samples,
        driver_info=driver_text(engine),
        command=settings.command,
        act=act,
        exact=settings.exact,
        feed=settings.feed,
        fusion=engine.fusion,
        tuning=engine.tuning,
        tables=engine.tables,
        bytes_per_token=engine.bytes_per_token,
    )


add_command(app, bench, cls=BenchCommand)

COMMANDS = {
    "batch": ("vkbench_batch:batch", "Many sequences at once, in the table of llama-batched-bench."),
    "spec": ("vkbench_spec:spec", "Drafts: tokens per second by kind of task, and at made acceptance."),
    "serve": ("vkbench_serve:serve", "Many clients of a server: tokens per second, and waiting times."),
}
"""As those of vkback/cli/main.py: what vkbench measures beside a model alone."""


def app_of(asked: str) -> typer.Typer:
    """The command line of what is asked for: one with COMMANDS, or that of a model alone, which takes names of tests."""
    if asked not in COMMANDS:
        return app
    found = new_app("Many sequences at once, drafts, and many clients.")
    for name, (place, summary) in COMMANDS.items():
        file, _, function = place.partition(":")
        command = getattr(import_module(f"vkback.cli.{file}"), function)
        add_command(found, command, name, summary, BenchCommand if name == "batch" else Command)
    return found


def main() -> NoReturn:
    if sys.argv[1:2] == ["help"]:
        sys.argv[1:] = [*sys.argv[2:3], "--help"]
    asked = asked_for(sys.argv, "vkbench")
    run(app_of(asked), "vkbench")


if __name__ == "__main__":
    main()
