"""Every architecture that makes vectors of texts against an independent reference: its tiny models by a class of `transformers` in float64,
stored by tools/references.py. Where torch and transformers are installed, the references run once more."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import ENCODERS

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.models import Model
from vkback.models.architecture import ARCHITECTURES
from vkback.models.synth import SHAPES, synthesize
from vkback.models.texts import Pooling

DATA = Path(__file__).parents[1] / "references" / "data"

FLOAT_NMSE = 1e-6
"""Float path: keys and values rounded to F16 are the largest difference to a reference that has them in float64, 1e-9 to 1e-8."""

INT_DOT_NMSE = 1e-3
"""Activations rounded to 8 bits, 1e-5 to 4e-5 a product (vkback/ops/matmul/linear.py), a dozen products in a row."""


@dataclass(frozen=True)
class Stored:
    """What tools/references.py stored for a tiny model, and its file made anew."""

    path: Path
    texts: list[list[int]]
    segments: list[list[int]]
    hidden: np.ndarray
    vectors: np.ndarray
    pooling: Pooling
    source: dict[str, str]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stored]:
    known: dict[str, Stored] = {}

    def get(name: str) -> Stored:
        if name not in known:
            path = tmp_path_factory.mktemp("tiny") / f"{name}.gguf"
            synthesize(f"{name}-Q8_0", path)
            pooling = Model.open(path).architecture.pooling
            assert pooling is not None
            with np.load(DATA / f"{name.removeprefix('tiny-').replace('-', '_')}.npz") as f:
                texts, segments = ([part.tolist() for part in np.split(f[key], [24])] for key in ("tokens", "segments"))
                known[name] = Stored(path, texts, segments, f["hidden"], f["vectors"], pooling, json.loads(str(f["source"])))
        return known[name]

    return get


@pytest.mark.parametrize("arch", [name for name, known in ARCHITECTURES.items() if not known.causal])
def test_every_encoder_has_a_reference(arch: str) -> None:
    assert any(SHAPES[shape].arch == arch for shape in ENCODERS), f"{arch} has no shape called tiny-{arch}"


@pytest.mark.parametrize("name", ENCODERS)
def test_the_twin_is_exact_and_of_today_s_tiny_model(name: str, stored: Callable[[str], Stored]) -> None:
    found = stored(name)
    digest = hashlib.sha256(found.path.read_bytes()).hexdigest()
    assert found.source["sha256"] == digest, f"vkback synth {name}-Q8_0 writes another file than before: run tools/references.py {name}"
    twin = NumpyTwin(found.path, n_ctx=64)
    assert nmse(twin.embed(found.texts, "none", found.segments), found.hidden) <= FLOAT_NMSE
    assert nmse(twin.embed(found.texts, found.pooling, found.segments), found.vectors) <= FLOAT_NMSE


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("act", "fusion", "bound"), [("f32", "all", FLOAT_NMSE), ("f32", "none", FLOAT_NMSE), ("q8_1", "all", INT_DOT_NMSE)]
)
@pytest.mark.parametrize("name", ENCODERS)
def test_texts_on_a_device(name: str, act: Any, fusion: str, bound: float, stored: Callable[[str], Stored], device: Device) -> None:
    """Two texts at once, each token and each text."""
    found = stored(name)
    with Engine.load(found.path, device, n_ctx=64, act=act, fusion=fusion, progress=False) as engine:
        tokens = np.concatenate(list(engine.vectors(found.texts, "none", found.segments)))
        assert nmse(tokens, found.hidden) <= bound
        vectors = np.stack(list(engine.vectors(found.texts, found.pooling, found.segments)))
        assert nmse(vectors, found.vectors) <= bound


@pytest.mark.parametrize("name", ENCODERS)
def test_references_say_the_same_today(name: str, stored: Callable[[str], Stored]) -> None:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install vkback[references]); the stored vectors are compared without it")
    found = stored(name)
    reference = importlib.import_module(found.source["reference"])
    live = [reference.vectors(found.path, *text) for text in zip(found.texts, found.segments, strict=True)]
    assert nmse(np.concatenate([hidden for hidden, _ in live]), found.hidden) <= 1e-10
    assert nmse(np.stack([vector for _, vector in live]), found.vectors) <= 1e-10
