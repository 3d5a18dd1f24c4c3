"""Counts the kernels that plans take and that do not come with vkback as SPIR-V: what a machine without a GLSL compiler lacks.

    python tools/shipped_coverage.py                     the built-in models and every shape in its usual type, all recorded devices
    python tools/shipped_coverage.py --model llama-8b-Q4_K_M --profile nvidia_h200_linux    some of them; both may be repeated
    python tools/shipped_coverage.py --all-types         every synthetic model in every type (an hour and more)
    python tools/shipped_coverage.py --compile 100       and compile every 100th of what is missing, without the cache
    python tools/shipped_coverage.py --compile 100 --part 1    the same from the second on: parts 0 to 99 are all of them
    python tools/shipped_coverage.py -j 32               by so many processes, and so many compilers at once

A row for each device: models that run from what ships alone, the modules they take, how many of those do not ship. The last lines say how
many modules an archive of everything would have. Nothing is run on a device.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

from tools.prebuilt import LAYERS, matrix_variants, schedules
from vkback.device import Capabilities
from vkback.device.capabilities import profile_ids
from vkback.engine.weight_stream import REPACK
from vkback.errors import VkbackError
from vkback.models import Model
from vkback.models.synth import SHAPES, outline, synthetic_names
from vkback.ops.lowering import LowerContext
from vkback.paths import builtin_models, shader_root, tuning_root
from vkback.shader import ShaderLibrary, Variant
from vkback.shader.shipped import shipped_variants
from vkback.tuning.lookup import Tuning

USUAL = ("Q4_K_M", "MXFP4", "Q8_0")
"""The type that a shape is counted in: the first of these that it has."""

MODELS_OF_A_TASK = 8
"""With `-j`: few enough that 46 devices keep a hundred processors busy."""

Key = tuple[str, tuple[tuple[str, str | int], ...]]
"""Source and defines: what a module is made of."""


def usual_names() -> list[str]:
    known = set(synthetic_names())
    return [next(name for type in (*USUAL, "F32") if (name := f"{shape}-{type}") in known) for shape in SHAPES]


@cache
def opened(name: str) -> Model:
    """A built-in model by its file, a synthetic one by its name, cut to a few layers and without weights."""
    if name.endswith(".gguf"):
        return Model.open(Path(name))
    return Model.of(outline(name, layers=min(LAYERS, SHAPES[name.rpartition("-")[0]].n_layer)))


@cache
def context(profile: str) -> LowerContext:
    caps = Capabilities.from_profile(profile)
    return LowerContext(caps, Tuning.for_device(caps, tuning_root()))


def taken(names: Sequence[str], profile: str) -> list[set[Key]]:
    """For each model the modules of every program of it on a recorded device."""
    of_models = []
    for name in names:
        found = {(REPACK.source, REPACK.defines)}
        for schedule in schedules(opened(name), context(profile)):
            found |= {(d.kernel.source, d.kernel.defines) for d in schedule.dispatches()}
        of_models.append(found)
    return of_models


def side_by_side(names: Sequence[str], profiles: Sequence[str], processes: int) -> Iterator[list[set[Key]]]:
    """What `taken` makes of each profile, in their order."""
    if processes == 1:
        yield from (taken(names, profile) for profile in profiles)
        return
    parts = [names[i : i + MODELS_OF_A_TASK] for i in range(0, len(names), MODELS_OF_A_TASK)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        tasks = [[pool.submit(taken, part, profile) for part in parts] for profile in profiles]
        for of_profile in tasks:
            yield [found for task in of_profile for found in task.result()]


def count(names: Sequence[str], profiles: Sequence[str], shipped: set[Key], processes: int = 1) -> set[Key]:
    """Print the table; the modules that are missing."""
    every: set[Key] = set()
    missing: set[Key] = set()
    print(f"{'device':34} {'models':>7} {'without a compiler':>19} {'modules':>8} {'missing':>8}", flush=True)
    for profile, of_models in zip(profiles, side_by_side(names, profiles, processes), strict=True):
        of_device = set().union(*of_models)
        whole = sum(modules <= shipped for modules in of_models)
        print(f"{profile:34} {len(names):7} {whole:19} {len(of_device):8} {len(of_device - shipped):8}", flush=True)
        every |= of_device
        missing |= of_device - shipped
    print(f"all: {len(every)} modules, {len(missing)} of them do not ship")
    families: dict[str, int] = {}
    for source, _ in missing:
        families[source] = families.get(source, 0) + 1
    for source, number in sorted(families.items(), key=lambda item: -item[1]):
        print(f"  {source:44} {number:6}")
    return missing


def compile_missing(missing: Iterable[Key], every: int, part: int = 0) -> None:
    """Compile every so manieth module from nothing, from number `part` on. Raises CompileError with all faults."""
    started = time.monotonic()
    wanted = [Variant(*key) for key in sorted(missing, key=repr)[part::every]]
    made = size = 0
    with tempfile.TemporaryDirectory(prefix="vkback-") as folder:
        library = ShaderLibrary(cache_dir=Path(folder))
        for _, spirv in library.compile_each(wanted):
            made, size = made + 1, size + len(spirv)
            if made % 500 == 0:
                print(f"  {made} of {len(wanted)} in {time.monotonic() - started:.0f} s", flush=True)
    compiler = library.compiler.identity if library.compiler else "none"
    print(f"compiled {made} modules, {size / 1e6:.1f} MB of SPIR-V, in {time.monotonic() - started:.0f} s by {compiler}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", metavar="NAME", choices=synthetic_names())
    parser.add_argument("--profile", action="append", metavar="PROFILE", choices=profile_ids())
    parser.add_argument("--all-types", action="store_true")
    parser.add_argument("--compile", type=int, metavar="N")
    parser.add_argument("--part", type=int, default=0, metavar="I")
    parser.add_argument("-j", "--processes", type=int, metavar="J", help="processes (one), compilers at once (one a processor)")
    args = parser.parse_args()
    names = args.model or [*map(str, builtin_models()), *(synthetic_names() if args.all_types else usual_names())]
    ShaderLibrary.compilers = args.processes or os.cpu_count() or 1
    root = shader_root()
    shipped: set[Key] = {(v.source, v.defines) for v in (*shipped_variants(root), *matrix_variants())}
    missing = count(names, args.profile or profile_ids(), shipped, args.processes or 1)
    if args.compile:
        compile_missing(missing, args.compile, args.part)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VkbackError as error:
        sys.exit(f"shipped_coverage: {error}")
