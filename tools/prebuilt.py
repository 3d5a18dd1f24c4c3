"""Builds shaders/prebuilt: the SPIR-V that comes with vkback.

    python tools/prebuilt.py [matrix|ordinary]   compile what is missing or older than its source; both without a word
    python tools/prebuilt.py ordinary --device llvmpipe_mesa_22_debian12    only what that device takes, beside what is there and fresh
    python tools/prebuilt.py --check             only say what is missing or stale; status 1 if cooperative-matrix kernels are
    python tools/prebuilt.py --check --release   the same, status 1 also for ordinary kernels that are stale or missing

matrix    kernels that need a GLSL compiler with GL_KHR_cooperative_matrix (shaderc 2024 or newer): shaders/prebuilt/*.spv
ordinary  what the plans of MODELS on DEVICES take: shaders/prebuilt/ordinary/*.xz, by the compiler that comes with vkback, or another of
          its release (VERIFIED in vkback/shader/compiler.py). A module is compiled again only when its source or the compiler has changed.
          A stale one costs users a compile and nothing else, so commits between releases need not rebuild them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from vkback.api.model import CPU_SEQUENCES
from vkback.device import Capabilities
from vkback.device.capabilities import profile_ids
from vkback.engine.batch.batch import PAGE, SEQUENCES
from vkback.engine.batch.caches import COPY_KINDS, cache_tensors, copy_graph
from vkback.engine.batch.state import edit_graph
from vkback.engine.batch.steps import CLASSES, Kind, step_graph
from vkback.engine.prompts import default_ubatch, program_sizes, with_barriers
from vkback.engine.sampler import add_sampler
from vkback.engine.weight_stream import REPACK
from vkback.errors import VkbackError
from vkback.models import Model
from vkback.models.builder import F16_CACHE, Paging
from vkback.models.synth import outline
from vkback.ops.attention import decode_matrix
from vkback.ops.attention import prompt as attention_prompt
from vkback.ops.attention import train as attention_train
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul import gemm
from vkback.paths import builtin_models, shader_root, tuning_root
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.shader import CompileError, NoCompiler, ShaderLibrary, Variant
from vkback.shader.compiler import VERIFIED
from vkback.shader.prebuilt import FOLDER, source_hash, stale, write
from vkback.shader.shipped import ORDINARY, SUFFIX, groups, pack, read_archive, shipped_variants
from vkback.shader.source import expand
from vkback.timing.math_rate import dot_variants
from vkback.timing.read_rate import read_variants
from vkback.tuning.lookup import Tuning

DEVICES = (
    "llvmpipe_mesa_22_debian12",
    "nvidia_h200_linux",
    "nvidia_rtx_2070_linux",
    "nvidia_rtx_4090_windows",
    "amd_rx_7900_xtx_radv",
    "amd_rx_6800_xt_windows",
    "intel_arc_a770_anv",
    "apple_m1_moltenvk",
)
"""Recorded devices, of each vendor those whose plans differ: RTX 20 to 50, RDNA 2 and 3, Arc and Iris Xe share most kernels."""

MODELS = ("llama-1b-Q4_K_M", "llama-8b-Q4_K_M", "llama-8b-Q8_0", "qwen3moe-30b-a3b-Q4_K_M", "gpt-oss-20b-MXFP4")
"""Beside the built-in ones. Kernels of other shapes and types are compiled where they are used."""

LAYERS = 2
"""Of each: a layer of the finer type of a mix and one of the coarser."""

CONTEXTS = (128, 512)
"""Rows of the cache beside the default of a model: those of `vkbench tg128` and `pp512`."""


def matrix_variants() -> list[Variant]:
    return [
        *gemm.prebuilt_variants(),
        *decode_matrix.prebuilt_variants(),
        *attention_prompt.prebuilt_variants(),
        *attention_train.prebuilt_variants(),
    ]


def planned_variants(devices: Sequence[str] = DEVICES) -> list[Variant]:
    """Ordinary kernels that MODELS take on recorded devices: the load, decode with and without a sampler, every program of a prompt, steps
    of a batch and its copies, and the probes of vkbench."""
    apart = {(v.source, v.defines) for v in matrix_variants()}
    found = dict.fromkeys([REPACK, *read_variants(), *dot_variants()])
    for model in _models():
        for device in devices:
            caps = Capabilities.from_profile(device)
            tables = Tuning.for_device(caps, tuning_root())  # not the tables that vkback tune made on this machine
            for schedule in schedules(model, LowerContext(caps, tables)):
                found |= dict.fromkeys(Variant(d.kernel.source, d.kernel.defines) for d in schedule.dispatches())
    return [v for v in found if (v.source, v.defines) not in apart]


def _models() -> list[Model]:
    return [*map(Model.open, builtin_models()), *(Model.of(outline(name, layers=LAYERS)) for name in sorted(MODELS))]


def schedules(model: Model, ctx: LowerContext) -> Iterator[Schedule]:
    """The schedules of the engine, but for those that the device's limits do not allow."""
    prompt = with_barriers(ctx, "a prompt")
    if not model.architecture.causal:
        for tokens in program_sizes(default_ubatch(ctx.caps), model.default_n_ctx):
            for texts in model.text_kinds():
                with suppress(PlanError):
                    yield plan(model.text_graph(tokens, tokens, texts), prompt, fusion="all")
        return
    wanted = [(prompt, "none", tokens, model.default_n_ctx) for tokens in program_sizes(default_ubatch(ctx.caps), model.default_n_ctx)]
    rows = dict.fromkeys((model.default_n_ctx, *(n for n in CONTEXTS if n <= model.default_n_ctx)))
    wanted += [(ctx, kind, 1, n_ctx) for kind in ("logits", "greedy", "sample") for n_ctx in rows]
    for context, kind, tokens, n_ctx in wanted:
        graph = model.graph(tokens, n_ctx, head="none" if kind == "none" else "last")
        if kind in ("greedy", "sample"):
            add_sampler(graph, greedy=kind == "greedy")
        with suppress(PlanError):
            yield plan(graph, context, fusion="all")
    yield from _batch_schedules(model, ctx)


def _batch_schedules(model: Model, ctx: LowerContext) -> Iterator[Schedule]:
    """Those of a batch: every class of step that there is by default, greedy and sampled; copies of pages, and edits."""
    max_pages = -(-model.default_n_ctx // PAGE)
    paging = Paging(PAGE, SEQUENCES * max_pages, SEQUENCES, max_pages)
    recurrent = with_barriers(ctx, "recurrent states") if model.architecture.recurrent else ctx
    graphs = [edit_graph(1)]
    for columns in CLASSES:
        if columns <= (CPU_SEQUENCES if ctx.caps.software else SEQUENCES):
            # Kernels that sample are the same for any number of columns.
            graphs += [step_graph(model, F16_CACHE, columns, Kind(greedy=greedy), paging) for greedy in (True, False)[: 1 + (columns == 1)]]
    if caches := cache_tensors(graphs[1]):
        graphs += [copy_graph(kind, caches, PAGE * max_pages, PAGE) for kind in COPY_KINDS]
    for graph in graphs:
        with suppress(PlanError):
            yield plan(graph, recurrent, fusion="all")


def stale_ordinary(shaders: Path) -> dict[Variant, str]:
    """Shipped variants whose source has changed since, with the hash of what it is now: "" where it is no longer there."""

    def source_now(variant: Variant) -> str:
        try:
            return source_hash(expand(shaders, variant).text)
        except CompileError:
            return ""

    known = shipped_variants(shaders)
    now = {v: source_now(v) for v in known}
    return {v: text for v, text in now.items() if text != known[v]}


def build_ordinary(shaders: Path, variants: list[Variant]) -> None:
    """Compile what the archives lack, and rewrite those that change. Archives of other groups go."""
    library = ShaderLibrary(shaders, shipped=False)
    compiler = library.compiler
    if compiler is None:
        raise NoCompiler("[prebuilt] there is no GLSL compiler: pip install wasmtime")
    if VERIFIED not in compiler.identity:
        raise VkbackError(f"[prebuilt] the compiler is {compiler.identity}, but ordinary kernels ship as {VERIFIED} makes them")
    folder = shaders / FOLDER / ORDINARY
    folder.mkdir(parents=True, exist_ok=True)
    hashes = {v: source_hash(expand(shaders, v).text) for v in variants}
    grouped = groups(variants)
    made: dict[Variant, bytes] = {}
    for file, members in grouped.items():
        old = read_archive(folder / file)
        if old is not None and old.compiler == compiler.identity:
            made |= {v: old.spirv[hashes[v]] for v in members if hashes[v] in old.spirv}
    made |= library.compile_many(v for v in variants if v not in made)
    written = 0
    for file, members in grouped.items():
        data = pack(compiler.identity, {v: (hashes[v], made[v]) for v in members})
        if not (folder / file).is_file() or (folder / file).read_bytes() != data:
            (folder / file).write_bytes(data)
            written += 1
    for left in folder.glob(f"*{SUFFIX}"):
        if left.name not in grouped:
            left.unlink()
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"ordinary: {len(variants)} modules in {len(grouped)} archives, {size / 1e6:.2f} MB; {written} archives rewritten")


def check(shaders: Path, release: bool) -> int:
    """Print what is stale and what to run; the exit status."""
    matrix, ordinary = stale(shaders, matrix_variants()), stale_ordinary(shaders)
    for name in matrix:
        print(f"missing or stale: {name}")
    if matrix:
        print("run: make prebuilt, with a glslc of shaderc 2024 or newer")
    known = shipped_variants(shaders)
    missing = [v for v in planned_variants() if v not in known] if release else []
    for file, members in sorted(groups(ordinary).items()):
        print(f"stale: {ORDINARY}/{file}: {len(members)} modules")
    for file, members in sorted(groups(missing).items()):
        print(f"missing: {ORDINARY}/{file}: {len(members)} modules")
    if ordinary or missing:
        print(f"ordinary modules: {len(known)}, of them {len(ordinary)} stale" + (f"; {len(missing)} missing" if release else ""))
        print("users' machines compile those kernels, and need a compiler; before a release run: make prebuilt-ordinary")
    return int(bool(matrix) or (release and bool(ordinary or missing)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("matrix", "ordinary"))
    parser.add_argument("--device", action="append", choices=profile_ids(), metavar="PROFILE")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--release", action="store_true")
    args = parser.parse_args()
    shaders = shader_root()
    if args.check:
        return check(shaders, args.release)
    if args.what != "ordinary":
        write(shaders, matrix_variants(), ShaderLibrary())
        files = list((shaders / FOLDER).glob("*.spv"))
        print(f"matrix: {len(files)} modules, {sum(f.stat().st_size for f in files) / 1e6:.1f} MB")
    if args.what != "matrix":
        fresh = shipped_variants(shaders).keys() - stale_ordinary(shaders).keys() if args.device else set()
        build_ordinary(shaders, list(dict.fromkeys([*planned_variants(args.device or DEVICES), *fresh])))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VkbackError as error:
        sys.exit(f"prebuilt: {error}")
