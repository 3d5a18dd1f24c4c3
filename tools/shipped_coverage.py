"""Counts the kernels that plans take and that do not come with vkback as SPIR-V: what a machine without a GLSL compiler lacks.

    python tools/shipped_coverage.py                     the built-in models and every shape in its usual type, all recorded devices
    python tools/shipped_coverage.py --model llama-8b-Q4_K_M --profile nvidia_h200_linux    some of them; both may be repeated
    python tools/shipped_coverage.py --all-types         every synthetic model in every type (an hour and more)
    python tools/shipped_coverage.py --compile 100       and compile every 100th of what is missing, without the cache

A row for each device: models that run from what ships alone, the modules they take, how many of those do not ship. The last lines say how
many modules an archive of everything would have. Nothing is run on a device.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
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

Key = tuple[str, tuple[tuple[str, str | int], ...]]
"""Source and defines: what a module is made of."""


def usual_names() -> list[str]:
    known = set(synthetic_names())
    return [next(name for type in (*USUAL, "F32") if (name := f"{shape}-{type}") in known) for shape in SHAPES]


def taken(model: Model, profile: str) -> set[Key]:
    """The modules of every program of a model on a recorded device."""
    caps = Capabilities.from_profile(profile)
    ctx = LowerContext(caps, Tuning.for_device(caps, tuning_root()))
    found = {(REPACK.source, REPACK.defines)}
    for schedule in schedules(model, ctx):
        found |= {(d.kernel.source, d.kernel.defines) for d in schedule.dispatches()}
    return found


def count(models: Sequence[tuple[str, Model]], profiles: Iterable[str], shipped: set[Key]) -> set[Key]:
    """Print the table; the modules that are missing."""
    every: set[Key] = set()
    missing: set[Key] = set()
    print(f"{'device':34} {'models':>7} {'without a compiler':>19} {'modules':>8} {'missing':>8}", flush=True)
    for profile in profiles:
        of_device: set[Key] = set()
        whole = 0
        for _, model in models:
            modules = taken(model, profile)
            whole += modules <= shipped
            of_device |= modules
        print(f"{profile:34} {len(models):7} {whole:19} {len(of_device):8} {len(of_device - shipped):8}", flush=True)
        every |= of_device
        missing |= of_device - shipped
    print(f"all: {len(every)} modules, {len(missing)} of them do not ship")
    families: dict[str, int] = {}
    for source, _ in missing:
        families[source] = families.get(source, 0) + 1
    for source, number in sorted(families.items(), key=lambda item: -item[1]):
        print(f"  {source:44} {number:6}")
    return missing


def compile_missing(missing: Iterable[Key], every: int) -> None:
    """Compile every so manieth module from nothing. Raises CompileError with all faults."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vkback-") as folder:
        library = ShaderLibrary(cache_dir=Path(folder))
        made = library.compile_many(Variant(*key) for key in sorted(missing, key=repr)[::every])
    compiler = library.compiler.identity if library.compiler else "none"
    size = sum(map(len, made.values()))
    print(f"compiled {len(made)} modules, {size / 1e6:.1f} MB of SPIR-V, in {time.monotonic() - started:.0f} s by {compiler}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", metavar="NAME", choices=synthetic_names())
    parser.add_argument("--profile", action="append", metavar="PROFILE", choices=profile_ids())
    parser.add_argument("--all-types", action="store_true")
    parser.add_argument("--compile", type=int, metavar="N")
    args = parser.parse_args()
    names = args.model or (synthetic_names() if args.all_types else usual_names())
    models = [(p.stem, Model.open(p)) for p in builtin_models()] if not args.model else []
    models += [(name, Model.of(outline(name, layers=min(LAYERS, SHAPES[name.rpartition("-")[0]].n_layer)))) for name in names]
    root = shader_root()
    shipped: set[Key] = {(v.source, v.defines) for v in (*shipped_variants(root), *matrix_variants())}
    missing = count(models, args.profile or profile_ids(), shipped)
    if args.compile:
        compile_missing(missing, args.compile)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VkbackError as error:
        sys.exit(f"shipped_coverage: {error}")
