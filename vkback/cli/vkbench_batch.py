"""vkbench batch: how fast many sequences run at once, in the table of llama-batched-bench."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from itertools import product
from typing import Annotated, Protocol, cast

import typer

from vkback.cli.bench_output import AsJsonOption, OutputErrOption, Outputs, SaveOption, StoreOption
from vkback.cli.hosts import device_list
from vkback.cli.loading import (
    ActOption,
    CacheTypeKOption,
    CacheTypeVOption,
    ExactRequestsOption,
    FlashAttnOption,
    GpuLayersOption,
    TensorSplitOption,
    UbatchOption,
    load_options,
    shares,
)
from vkback.cli.shell import DevicesOption, EngineLike, ModelOption, UsageError, act_of, bars, flash_attn_of, load_engine, model_path
from vkback.cli.terminal import StatusLine
from vkback.cli.vkbench_run import WARMUP_NS, cpu_name, device_names, driver_text, split_text, where_it_ran
from vkback.cli.vkbench_tests import parse_values
from vkback.errors import VkbackError
from vkback.report.batch_table import BATCH, BatchResult, settings_line
from vkback.report.build import build_info
from vkback.report.result_table import FORMATS

TIMER = "vkback.engine.batch.timer"


class BatchTimes(Protocol):
    """t_pp: seconds until all prompts were read; t_tg: from then until the last token of the last sequence; n_kv: rows of cache in use at
    the end. Compiling and filling the caches to a depth are not in the times."""

    @property
    def t_pp(self) -> float: ...

    @property
    def t_tg(self) -> float: ...

    @property
    def n_kv(self) -> int: ...


class BatchTimer(Protocol):
    """Runs sequences of random tokens, each time from empty caches."""

    def time(self, pp: int, tg: int, pl: int, *, shared: bool, depth: int) -> BatchTimes:
        """pl sequences behind `depth` rows each: every one reads pp tokens, then generates tg. shared: one prompt for all of them; their
        depth is 0."""

    def close(self) -> None: ...


class OpenTimer(Protocol):
    """Makes what times up to max_sequences at once on an engine's weights, in n_kv_max rows of cache for all of them."""

    def __call__(self, engine: EngineLike, max_sequences: int, n_kv_max: int) -> BatchTimer: ...


def timer_of_this_build() -> OpenTimer:
    """Raises VkbackError in a build without one."""
    try:
        return cast(OpenTimer, import_module(TIMER).open_timer)
    except ModuleNotFoundError as e:
        if e.name is None or not TIMER.startswith(e.name):
            raise
        raise VkbackError("[batch] this build of vkback runs one sequence at a time; batches come with a later one: update vkback") from e


@dataclass(frozen=True)
class BatchTest:
    """A row of the table: pl sequences behind `depth` rows each read pp tokens (shared: one prompt for all) and generate tg."""

    pp: int
    tg: int
    pl: int
    depth: int
    shared: bool

    @property
    def n_kv(self) -> int:
        """Rows of cache that it needs."""
        read = self.pp if self.shared else self.pl * self.pp
        return read + self.pl * (self.depth + self.tg)

    @property
    def n_ctx(self) -> int:
        """Rows of one sequence."""
        return self.depth + self.pp + self.tg

    @property
    def name(self) -> str:
        behind = f" @ d{self.depth}" if self.depth else ""
        return f"{self.pl} x pp{self.pp}+tg{self.tg}{behind}{' shared' * self.shared}"


def batch(
    model: ModelOption = None,
    prompts: Annotated[list[str] | None, typer.Option("-npp", help="Prompt tokens of a sequence: 512, 128,256 or 64-512*2.")] = None,
    gens: Annotated[list[str] | None, typer.Option("-ntg", help="Generated tokens of a sequence, same notation.")] = None,
    parallel: Annotated[list[str] | None, typer.Option("-npl", help="Sequences at once, same notation.")] = None,
    shared: Annotated[bool, typer.Option("-pps", help="One prompt, which all sequences share.")] = False,
    depths: Annotated[list[str] | None, typer.Option("-d", "--n-depth", help="Rows that each sequence has before, same notation.")] = None,
    n_kv_max: Annotated[
        int | None, typer.Option("-c", "--ctx-size", "--ctx", min=1, help="Rows of cache of all sequences [default: those of the largest].")
    ] = None,
    ubatch: UbatchOption = None,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Times that each row is measured.")] = 3,
    output: Annotated[str, typer.Option("-o", "--output", "--output-format", help=f"On stdout: {', '.join(FORMATS)}.")] = "md",
    as_json: AsJsonOption = False,
    output_err: OutputErrOption = "none",
    save: SaveOption = None,
    store: StoreOption = None,
    device: DevicesOption = None,
    tensor_split: TensorSplitOption = None,
    n_gpu_layers: GpuLayersOption = None,
    flash_attn: FlashAttnOption = "auto",
    act: ActOption = "auto",
    cache_type_k: CacheTypeKOption = "f16",
    cache_type_v: CacheTypeVOption = "f16",
    exact: ExactRequestsOption = False,
    warmup: Annotated[bool, typer.Option("--warmup/--no-warmup", help="Run each row once before it is measured.")] = True,
    delay: Annotated[float, typer.Option("--delay", min=0.0, help="Seconds to rest before each row.")] = 0.0,
    progress: Annotated[bool, typer.Option("--progress", help="Say on stderr what is being run.")] = False,
) -> None:
    """Measure many sequences at once: how long their prompts take, and their generation. Without options, 1 to 64 sequences of prompts of
    128 and 512 tokens."""
    tests, n_kv_max = planned(prompts or ["128,512"], gens or ["128"], parallel or ["1-64*2"], depths or ["0"], shared, n_kv_max)
    if shared and device_list(device) is not None:
        raise UsageError(f"-pps and --device {device} exclude each other: over several devices each sequence has a cache of its own")
    path = model_path(model)
    build = build_info()
    how = load_options(
        ctx=max(t.n_ctx for t in tests),
        act=act_of(act),
        ubatch=ubatch,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        exact=exact and "requests",
        tensor_split=(split := shares(tensor_split)),
        n_gpu_layers=n_gpu_layers,
        flash_attn=bool(flash_attn_of(flash_attn)),
        progress=bars(progress or sys.stderr.isatty()),
    )
    command = shlex.join(["vkbench", *sys.argv[1:]])
    extra = ["n_depth"] * any(t.depth for t in tests)
    with ExitStack() as opened:
        outputs = opened.enter_context(Outputs(BATCH, output, as_json, output_err, save, store, extra=extra, build=build, inputs=[path]))
        open_timer = timer_of_this_build()
        engine = opened.enter_context(load_engine(path, device, how))
        timer = opened.enter_context(closing(open_timer(engine, max(t.pl for t in tests), n_kv_max)))
        common = BatchResult(
            n_kv_max=n_kv_max,
            n_batch=max(BatchResult.n_batch, engine.ubatch),
            n_ubatch=engine.ubatch,
            is_pp_shared=int(shared),
            pp=1,
            tg=1,
            pl=1,
            n_kv=0,
            samples_t_pp=(),
            samples_t_tg=(),
            build_commit=build[0],
            build_number=build[1],
            cpu_info=cpu_name(),
            gpu_info=device_names(engine),
            driver_info=driver_text(engine),
            devices=device or "auto",
            tensor_split=split_text(split),
            n_gpu_layers=engine.host_weights.shown_layers,
            model_filename=str(path),
            model_type=engine.description,
            model_size=engine.size_bytes,
            model_n_params=engine.n_params,
            type_k=cache_type_k,
            type_v=cache_type_v,
            act=act,
            exact=exact,
            flash_attn=flash_attn_of(flash_attn),
            tuning=engine.tuning,
            tables=engine.tables,
            test_time="",
            command=command,
        )
        summaries = "\n".join(each.caps.summary_line() for each in engine.devices)
        outputs.begin(f"{summaries}\n{settings_line(common)}", command, where_it_ran(engine))
        for test in tests:
            time.sleep(delay)
            begun, before = datetime.now(UTC), engine.compiled
            cpu = all(each.caps.device_type == "cpu" for each in engine.devices)
            with StatusLine(wanted=not progress and output_err == "none") as status:
                times = measure(timer, test, repetitions, warmup=warmup, cpu=cpu, note=_noting(progress, status))
            if (made := engine.compiled - before).compiled and output_err == "none":
                print(f"vkbench: {test.name}: {made}, not part of the speed", file=sys.stderr, flush=True)
            outputs.row(
                replace(
                    common,
                    pp=test.pp,
                    tg=test.tg,
                    pl=test.pl,
                    n_depth=test.depth,
                    n_kv=times[-1].n_kv,
                    samples_t_pp=tuple(t.t_pp for t in times),
                    samples_t_tg=tuple(t.t_tg for t in times),
                    test_time=begun.strftime("%Y-%m-%dT%H:%M:%SZ"),
                )
            )


def planned(
    prompts: Sequence[str], gens: Sequence[str], parallel: Sequence[str], depths: Sequence[str], shared: bool, n_kv_max: int | None
) -> tuple[list[BatchTest], int]:
    """Rows of the table in llama-batched-bench's order, those of each depth together, and the rows of cache for all sequences. What does
    not fit is said on stderr and left out. Raises UsageError for what is no number above 0, and where nothing is left."""
    values = {"-npp": parse_values(prompts, "-npp"), "-ntg": parse_values(gens, "-ntg"), "-npl": parse_values(parallel, "-npl")}
    for option, given in values.items():
        if 0 in given:
            raise UsageError(f"{option} 0: expected at least 1; a sequence reads a token at least, and generates one")
    behind = parse_values(depths, "-d")
    if shared and any(behind):
        raise UsageError("-pps and -d exclude each other: keys and values of a prompt depend on what stands before it in its sequence")
    asked = [BatchTest(pp, tg, pl, d, shared) for d, pp, tg, pl in product(behind, *values.values())]
    most = n_kv_max or max(test.n_kv for test in asked)
    kept = [test for test in asked if test.n_kv <= most]
    if not kept:
        least = min(test.n_kv for test in asked)
        raise UsageError(f"-c {most}: no row of the table fits, the smallest needs {least} rows of cache; raise -c")
    for test in asked:
        if test.n_kv > most:
            print(f"vkbench: {test.name}: left out: it needs {test.n_kv} rows of cache, and -c {most} has fewer", file=sys.stderr)
    return kept, most


def measure(
    timer: BatchTimer,
    test: BatchTest,
    repetitions: int,
    *,
    warmup: bool = True,
    cpu: bool = False,
    note: Callable[[str], None] = lambda text: None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> list[BatchTimes]:
    """Times of each repetition. The warm-up is the row itself: once on a processor, on a GPU for WARMUP_NS."""

    def once() -> BatchTimes:
        return timer.time(test.pp, test.tg, test.pl, shared=test.shared, depth=test.depth)

    if warmup:
        note(f"{test.name}: warm-up")
        once()  # it may still record something while the GPU idles: it does not count
        begun = clock()
        while not cpu and clock() - begun < WARMUP_NS:
            once()
    return list(_repeated(once, test, repetitions, note))


def _repeated(once: Callable[[], BatchTimes], test: BatchTest, repetitions: int, note: Callable[[str], None]) -> Iterator[BatchTimes]:
    for i in range(repetitions):
        note(f"{test.name}: run {i + 1}/{repetitions}")
        yield once()


def _noting(progress: bool, status: StatusLine) -> Callable[[str], None]:
    def note(text: str) -> None:
        if progress:
            print(f"vkbench: {text}", file=sys.stderr, flush=True)
        else:
            status.say(f"vkbench: {text}")

    return note
