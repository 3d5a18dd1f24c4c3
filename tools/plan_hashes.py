"""A hash of every plan, to see that a change of the planner changes none: no device is needed.

    python tools/plan_hashes.py --out before.json [--profiles nvidia_h200_linux,...] [--models tiny-llama-Q4_K_S,...] [--quick]
    ... change the planner ...
    python tools/plan_hashes.py --compare before.json [the same options]

Plans the built-in models and every synthetic shape (of large ones the first layers) for recorded devices: tokens and prompts of 1 to 512
tokens, with and without logits and --exact, other activations, training steps. Then the quick cases of the ops that multiply or attend. A
hash covers stages, dispatches (kernel, defines, specialization, buffers, constants, grids, reasons), memory and tolerances. Exit code 1
where a plan differs from the file's, with the names of those that do.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vkback.device import Capabilities, profile_ids
from vkback.engine.plans import Plans
from vkback.errors import VkbackError
from vkback.graph import Node, Tensor
from vkback.harness.cases import context_of, quick_cases
from vkback.models import ARCHITECTURES, Model
from vkback.models.builder import F16_CACHE, CacheTypes
from vkback.models.synth import SHAPES, outline, synthetic_names
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.paths import builtin_models
from vkback.plan.exact import exact_context
from vkback.plan.passes.lora import Lora
from vkback.plan.planner import fused_nodes, plan
from vkback.plan.training import training_graph
from vkback.tuning.lookup import Tuning

LAYERS = 4
"""Of a model at most: with fewer, models of several kinds of layers have only one."""

ONE_TYPE = ("Q4_K_M", "MXFP4", "F16", "Q8_0")
"""Of a shape the first of these that it has; of those below more."""

MORE_TYPES = {"llama-8b": ("Q2_K", "Q4_K_M", "Q8_0", "IQ4_XS", "F32"), "tiny-llama": ("Q8_0", "F32")}

TOKENS = (2, 4, 8, 16, 17, 33, 64, 512)

QUICK = ("nvidia_h200_linux", "llvmpipe_mesa_22_debian12", "amd_rx_7900_xtx_radv", "apple_m1_honeykrisp", "broadcom_v3d_7_1_pi5")

OPS_HASHED = ("MUL_MAT", "MUL_MAT_ID", "LINEAR", "LINEAR_HEADS", "LINEAR_ROPE_SET_ROWS", "MOE_ROUTER", "FLASH_ATTN_EXT", "ATTN_DECODE")


def fields_of(d: Dispatch) -> tuple[Any, ...]:
    """All of a dispatch but the typed value of what its kernel was built for, which its defines repeat."""
    return tuple(getattr(d, f.name) for f in dataclasses.fields(d) if f.name != "config")


def digest(*parts: object) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(repr(part).encode())
    return h.hexdigest()[:16]


def tolerances(nodes: list[Node], ctx: LowerContext) -> list[object]:
    return [OPS[node.op].tolerance(node, ctx) for node in nodes]


def hash_or_error(make: Any) -> str:
    try:
        return str(make())
    except VkbackError as e:
        return f"{type(e).__name__}: {e}"


def plan_hash(graph: Any, ctx: LowerContext, fusion: str = "all") -> str:
    s = plan(graph, ctx, fusion=fusion)
    stages = [[fields_of(d) for d in stage] for stage in s.stages]
    nodes, with_sync = fused_nodes(graph, ctx, fusion=fusion)
    memory = sorted(s.slots.items()), s.activation_bytes, sorted(s.barrier_free), s.sentinel_range
    return digest(stages, memory, tolerances(nodes, with_sync))


def of_model(model: Model, ctx: LowerContext, quick: bool) -> Iterator[tuple[str, str]]:
    """(name, hash) of a model's plans on one device."""
    n_ctx = model.default_n_ctx
    for exact in (False, True):
        plans = Plans(model, exact_context(ctx) if exact else ctx, n_ctx, fusion="all", cache=F16_CACHE)
        suffix = " exact" if exact else ""

        def of(n: int, head: Any, ctx: LowerContext = plans.ctx, plans: Plans = plans) -> str:
            return hash_or_error(lambda: plan_hash(plans.graph(n, head), ctx))

        yield f"n=1 last{suffix}", of(1, "last")
        for n in TOKENS:
            for head in ("all",) if quick else ("all", "none"):
                yield f"n={n} {head}{suffix}", of(n, head)
    for act in ("f32", "q8_1", "f16"):
        other = dataclasses.replace(ctx, act=act)
        for n in (1, 16) if quick else (1, 8, 16, 64):
            yield f"n={n} act={act}", hash_or_error(lambda n=n, other=other: plan_hash(model.graph(n, n_ctx, head="all"), other))
    cache = CacheTypes("Q8_0", "Q8_0")
    for n in (1, 16):
        yield f"n={n} q8_0 cache", hash_or_error(lambda n=n: plan_hash(model.graph(n, n_ctx, head="all", cache=cache), ctx))
    for f32, act in ((True, "f32"), (False, "f16")):
        adapted = [t.name for node in model.graph(64, 64, head="all").nodes for t in node.inputs if _adaptable(t)]
        lora = None if f32 else Lora(dict.fromkeys(adapted, 8), 16.0)

        def step(f32: bool = f32, act: Any = act, lora: Lora | None = lora) -> str:
            graph = training_graph(model.graph(64, 64, head="all"), f32=f32, lora=lora).graph
            return plan_hash(graph, dataclasses.replace(ctx, act=act), "training")

        yield f"training act={act}", hash_or_error(step)


def _adaptable(t: Tensor) -> bool:
    return t.kind == "weight" and len(t.shape) == 2 and "blk." in t.name


def of_cases(ctx: LowerContext) -> Iterator[tuple[str, str]]:
    """(line, hash) of the quick cases of products and attention on one device."""
    for case in quick_cases():
        if case.op not in OPS_HASHED:
            continue

        def of(case: Any = case) -> str:
            node, own = case.build().node, context_of(case, ctx)
            return digest([fields_of(d) for d in OPS[node.op].lower(node, own)], tolerances([node], own))

        yield case.line, hash_or_error(of)


def _chosen_models(quick: bool) -> Iterator[str]:
    """Synthetic models to plan."""
    known = synthetic_names()
    for shape in (name for name, own in SHAPES.items() if ARCHITECTURES[own.arch].causal):  # the others make no text
        types = [name.removeprefix(f"{shape}-") for name in known if name.startswith(f"{shape}-")]
        types = [t for t in types if "-" not in t]  # of a shape whose name goes on
        types = list(MORE_TYPES.get(shape, (next((t for t in ONE_TYPE if t in types), types[0]),)))
        if quick:
            types = [types[1], types[3]] if shape == "llama-8b" else types if shape.startswith("tiny-") else []
        yield from (f"{shape}-{t}" for t in types)


def hashes(profiles: list[str], models: list[str], quick: bool) -> dict[str, str]:
    """By name every hash."""
    found: dict[str, str] = {}
    opened = [(path.stem, Model.open(path)) for path in builtin_models() if not models or path.stem in models]
    opened += [(name, _outlined(name)) for name in models or _chosen_models(quick) if name in synthetic_names()]
    for profile in profiles:
        begun = time.perf_counter()
        caps = Capabilities.from_profile(profile)
        ctx = LowerContext(caps, Tuning.for_device(caps))
        for name, model in opened:
            found |= {f"{profile} {name} {key}": value for key, value in of_model(model, ctx, quick)}
        if not models:
            found |= {f"{profile} {key}": value for key, value in of_cases(ctx)}
        print(f"{profile}: {len(found)} plans so far, {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    return found


def _outlined(name: str) -> Model:
    """The first layers of a synthetic model."""
    try:
        return Model.of(outline(name, layers=LAYERS))
    except VkbackError:  # it has fewer
        return Model.of(outline(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--profiles", default="")
    parser.add_argument("--models", default="")
    parser.add_argument("--quick", action="store_true", help="a few devices and tiny models")
    args = parser.parse_args()
    profiles = args.profiles.split(",") if args.profiles else list(QUICK) if args.quick else profile_ids()
    found = hashes(profiles, args.models.split(",") if args.models else [], args.quick)
    if args.out:
        args.out.write_text(json.dumps(found, indent=0), encoding="utf-8")
    if args.compare is None:
        return 0
    before = json.loads(args.compare.read_text(encoding="utf-8"))
    wrong = [key for key, value in found.items() if before.get(key) != value]
    for key in wrong:
        print(f"{key}: {before.get(key, 'not there before')} -> {found[key]}")
    print(f"{len(found)} plans, {len(wrong)} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
