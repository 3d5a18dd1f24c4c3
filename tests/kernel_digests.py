"""What names and fills kernels, as a digest for each case of the quick suite and each synthetic shape.

python kernel_digests.py LOCALE all|most|NAMES.json prints them as JSON: of everything, of as much as has every constant, or of what a file
lists; and which of those have a kernel or a constant of one that none before had. A digest covers every launch in order: shader, defines,
specialization constants, push constants and the text with its includes. tests/unit/test_constants.py runs this in processes of other
environments and compares.
"""

from __future__ import annotations

import hashlib
import json
import locale
import struct
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from vkback.device import Capabilities
from vkback.engine.sampler import add_sampler
from vkback.graph import Graph
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


def constants(d: Dispatch) -> Iterator[Hashable]:
    """A kernel, and with it each of its constants that is not a number below 2^24, as bits of floats are not."""
    yield d.kernel.source
    for name, value in (*d.kernel.spec, *d.kernel.defines):
        if not isinstance(value, int) or abs(value) >= 1 << 24:
            yield d.kernel.source, name, value
    for i, (word,) in enumerate(struct.iter_unpack("<I", d.push[: len(d.push) // 4 * 4])):
        if word >= 1 << 24:
            yield d.kernel.source, i, word


def most(device: str, tokens: int | None) -> bool:
    """Cases (None) on one device, models of each number of tokens on one: has all the constants, and all but five kernels."""
    return device == DEVICES[tokens == 1]


def planned(wanted: Callable[[str, int | None, str], bool]) -> Iterator[tuple[str, list[Dispatch]]]:
    """Pairs of what is planned, as "device: case", and its launches. wanted: asked with the device, tokens of a model or None, and that
    name."""
    model = cache(lambda shape: Model.of(outline(f"{shape}-F32", layers=layers(shape))))
    for device in DEVICES:
        caps = Capabilities.from_profile(device)
        ctx = LowerContext(caps, Tuning.for_device(caps, tuning_root()))
        for case in quick_cases():
            if wanted(device, None, name := f"{device}: {case.line}"):
                with suppress(PlanError):
                    problem, own = case.build(), context_of(case, ctx)
                    yield name, [d for n in problem.parts or (problem.node,) for d in OPS[n.op].lower(n, own)]
        for shape in SHAPES:
            for tokens in TOKENS:
                if wanted(device, tokens, name := f"{device}: {shape} of {tokens} tokens"):
                    with suppress(PlanError):
                        yield name, [d for g in graphs(model(shape), tokens) for d in plan(g, ctx, fusion="all").dispatches()]


def graphs(model: Model, tokens: int) -> Sequence[Graph]:
    if not model.architecture.causal:
        return [model.text_graph(tokens, 128, texts) for texts in model.text_kinds()]
    graph = model.graph(tokens, 128, head="last")
    if tokens == 1:
        add_sampler(graph, greedy=False)
    return [graph]


def main(which: str) -> None:
    names = set(json.loads(Path(which).read_text(encoding="utf-8"))) if which.endswith(".json") else None
    digests: dict[str, str] = {}
    telling: list[str] = []
    seen: set[Hashable] = set()
    for name, dispatches in planned(lambda device, tokens, name: name in names if names else which == "all" or most(device, tokens)):
        digests[name] = digest(dispatches)
        if not seen.issuperset(new := {each for d in dispatches for each in constants(d)}):
            telling.append(name)
            seen |= new
    json.dump({"digests": digests, "telling": telling}, sys.stdout)


if __name__ == "__main__":
    locale.setlocale(locale.LC_ALL, sys.argv[1])
    main(sys.argv[2])
