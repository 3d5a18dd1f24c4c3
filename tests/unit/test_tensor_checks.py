"""Files of every architecture with a tensor missing, of another shape, or with weights that are no numbers: each is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from kernel_paths import planned_for
from tiny_models import ALL_TINY

from tools.fuzz_gguf import Tables, placed
from vkback.device import Device
from vkback.engine.weights import load_weights
from vkback.graph import Tensor
from vkback.models import GgufError, Model
from vkback.models.synth import write_outline
from vkback.plan.planner import plan

OPTIONAL = {
    "output.weight": "the embedding table serves",
    "rope_freqs.weight": "nothing in a file tells that Llama 3 made it",
    "token_types.weight": "models without segments have none",
    "dense_3.weight": "vectors may be of any width",
    "cls.output.bias": "a classifier may have no bias",
    "cls.bias": "nor its first matrix",
}


FREE_ROWS = {"token_types.weight", "dense_2.weight", "dense_3.weight", "cls.weight", "cls.output.weight", "blk.5.laurel_l.weight"}
"""Tensors whose number of rows only they say: segments, widths, labels, ranks."""


class NoDevice:
    """Where weights go that nobody runs: takes all, keeps nothing."""

    def __init__(self) -> None:
        self.caps = planned_for("nvidia_h200_linux").caps

    def arena(self, *_: Any) -> NoDevice:
        return self

    uploader = arena

    alloc = arena
    host_visible = False

    def write(self, *_: Any) -> None: ...

    finish = destroy = write


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tables]:
    def get(name: str) -> Tables:
        path = tmp_path_factory.mktemp("tiny") / f"{name}.gguf"
        write_outline(f"{name}-Q8_0", path)
        return Tables.read(path)

    return get


def last_of_each(names: list[str]) -> list[str]:
    """Tensors outside layers, and of every kind within one the last."""
    return list({name.split(".", 2)[-1] if name.startswith("blk.") else name: name for name in names}.values())


def opened(tables: Tables, path: Path) -> Model:
    tables.encode().write(path)
    return Model.open(path)


@pytest.mark.parametrize("name", ALL_TINY)
def test_a_tensor_that_is_missing_or_misshaped_is_named(name: str, tables: Callable[[str], Tables], tmp_path: Path) -> None:
    whole, path = tables(name), tmp_path / "m.gguf"
    # K and V of layers that take those of others may be there, and nobody reads them.
    unread = opened(whole, path).architecture.unused_tensors if name == "tiny-gemma3n" else ()
    for tensor in last_of_each([info.name.decode() for info in whole.infos if info.name.decode() not in unread]):
        others = tuple(info for info in whole.infos if info.name != tensor.encode())
        if tensor in OPTIONAL:
            opened(replace(whole, infos=others), path)
        else:
            with pytest.raises(GgufError, match=rf"m\.gguf: tensor {tensor} is missing"):
                opened(replace(whole, infos=others), path)
        if tensor in FREE_ROWS:
            continue
        infos = [replace(i, dims=(*i.dims[:-1], i.dims[-1] - 1 or 2)) if i.name == tensor.encode() else i for i in whole.infos]
        with pytest.raises(GgufError, match=rf"m\.gguf: tensor {tensor} has shape .*, the hyperparameters say "):
            opened(placed(whole, infos), path)


@pytest.mark.parametrize("name", ALL_TINY)
def test_weights_that_are_no_numbers_are_named(name: str, tables: Callable[[str], Tables], tmp_path: Path) -> None:
    model = opened(tables(name), tmp_path / "m.gguf")
    causal = model.architecture.causal
    graphs = [model.graph(1, 32, head="last")] if causal else [model.text_graph(16, 32, texts) for texts in model.text_kinds()]
    tensors = {t.name: t for g in graphs for t in plan(g, planned_for("nvidia_h200_linux")).tensors().values()}
    weights = [t for t in tensors.values() if t.kind == "weight"]
    weights += [model.hp.weights[n] for n in model.architecture.by_context if n in model.hp.weights.keys() - {w.name for w in weights}]
    users: dict[str, Tensor] = {source: w for w in weights for source in (w.recipe.sources if w.recipe else (w.name,))}
    by_host = model.architecture.unused_tensors  # in tiny models those alone that the architecture reads itself, as numbers
    assert sorted([*users, *by_host]) == sorted(model.file.tensors)
    device = cast(Device, NoDevice())
    nobody_s = name == "tiny-gemma3n"  # K and V of layers that take those of others
    for tensor in [*last_of_each(list(users)), *(() if nobody_s else sorted(by_host)[:1])]:
        found = model.file.tensors[tensor]
        damaged = np.array(found.file[found.offset : found.offset + found.nbytes])
        # The last value is NaN: of F32 itself, of a Q8_0 block its scale.
        at = found.nbytes - (34 if found.type == "Q8_0" else 4)
        damaged[at : at + 4] = np.frombuffer(b"\x00\x7e\x00\x00" if found.type == "Q8_0" else b"\x00\x00\xc0\x7f", np.uint8)
        file = replace(model.file, tensors={**model.file.tensors, tensor: replace(found, offset=0, file=damaged)})
        if tensor in by_host:
            with pytest.raises(GgufError, match=rf"m\.gguf: tensor {tensor} holds nan, expected a number"):
                type(model.architecture)(file)
            continue
        where = "it" if len(found.shape) == 1 else r"row \d+"
        with pytest.raises(GgufError, match=rf"m\.gguf: tensor {found.name} \({found.type} .*\): {where} holds weights that are NaN"):
            load_weights(file, {tensor: users[tensor]}, device, progress=False, repack="host")
        load_weights(model.file, {tensor: users[tensor]}, device, progress=False, repack="host")
