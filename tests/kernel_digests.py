"""What names and fills kernels, as a digest for each case of the quick suite and each synthetic shape.

python kernel_digests.py LOCALE prints them as JSON. A digest covers every launch in order: shader, defines, specialization constants, push
constants and the text with its includes. tests/unit/test_constants.py runs this in processes of other environments and compares.
"""

from __future__ import annotations

import hashlib
import json
import locale
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache

from vkback.device import Capabilities
from vkback.engine.sampler import add_sampler
from vkback.harness.cases import context_of, quick_cases
from vkback.models import Model
from vkback.models.synth import SHAPES, outline
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.paths import shader_root, tuning_root
from vkback.plan.planner import plan
from vkback.shader.source import Variant, expand
from vkback.tuning.lookup import Tuning

DEVICES = ("nvidia_h200_linux", "llvmpipe_mesa_22_debian12")
TOKENS = (1, 16)


def layers(shape: str) -> int | None:
    """How many of a shape's layers are planned, None: all."""
    if shape.startswith("tiny-"):
        return None
    return 6 if SHAPES[shape].arch == "gemma4" else 2  # the sixth sees all tokens, and divides RoPE by its tensor


@cache
def text(kernel: Variant) -> bytes:
    """With its includes. Files are read once, since opening one takes long on some systems."""
    return expand(shader_root(), kernel).text.encode()


def digest(dispatches: Iterable[Dispatch]) -> str:
    """The beginning of a SHA-256."""
    found = hashlib.sha256()
    for d in dispatches:
        found.update(f"{d.kernel!r}{d.push.hex()}{d.groups}".encode())
        found.update(text(d.kernel))
    return found.hexdigest()[:16]


def digests() -> Iterator[tuple[str, str]]:
    """Pairs of what was planned, as "device: case", and its digest."""
    models = {shape: Model.of(outline(f"{shape}-F32", layers=layers(shape))) for shape in SHAPES}
    for device in DEVICES:
        caps = Capabilities.from_profile(device)
        ctx = LowerContext(caps, Tuning.for_device(caps, tuning_root()))
        for case in quick_cases():
            with suppress(PlanError):
                problem, own = case.build(), context_of(case, ctx)
                yield f"{device}: {case.line}", digest(d for n in problem.parts or (problem.node,) for d in OPS[n.op].lower(n, own))
        for shape, model in models.items():
            for tokens in TOKENS:
                if model.architecture.causal:
                    graphs = [model.graph(tokens, 128, head="last")]
                else:
                    graphs = [model.text_graph(tokens, 128, texts) for texts in model.text_kinds()]
                if tokens == 1 and model.architecture.causal:
                    add_sampler(graphs[0], greedy=False)
                with suppress(PlanError):
                    made = [d for graph in graphs for d in plan(graph, ctx, fusion="all").dispatches()]
                    yield f"{device}: {shape} of {tokens} tokens", digest(made)


if __name__ == "__main__":
    locale.setlocale(locale.LC_ALL, sys.argv[1])
    json.dump(dict(digests()), sys.stdout)
