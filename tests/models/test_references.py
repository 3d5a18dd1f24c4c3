"""Every architecture against an independent reference: the logits of its tiny models by a class of `transformers` in float64, stored by
tools/references.py. Where torch and transformers are installed, the references run once more."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TINY, of_a_kind

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.snapshot import read_state, write_state
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.models.architecture import ARCHITECTURES
from vkback.models.synth import SHAPES, synthesize
from vkback.ops.op import OPS
from vkback.ops.quantize import rounded_rows

DATA = Path(__file__).parents[1] / "references" / "data"
N_CTX = 96

FLOAT_NMSE = 1e-6
"""Float path: keys and values rounded to F16 are the largest difference to a reference that has them in float64, 1e-7 to 4e-7."""

INT_DOT_NMSE = 1e-3
"""Activations rounded to 8 bits, 1e-5 to 4e-5 a product (vkback/ops/matmul/linear.py), a dozen products in a row."""

BY_ROUNDING = {"tiny-lfm2": 1.2e-3, "tiny-ernie4-5-moe": 1.2e-3}
"""In the place of INT_DOT_NMSE, where rounding alone, in float64, makes more: 1.15e-3 and, the median of a token, 1.16e-3 in the worst of
12 runs that differ by roundings to F16 before. An H200 has 1.04e-3 and 1.02e-3 of them."""


@dataclass(frozen=True)
class Stored:
    """What tools/references.py stored for a tiny model, and its file made anew."""

    path: Path
    tokens: list[int]
    logits: np.ndarray
    greedy: list[int]
    margins: np.ndarray
    source: dict[str, str]

    def wide(self, bound: float) -> np.ndarray:
        """Steps of the greedy text whose margin is beyond what logits with an NMSE of `bound` can turn: five standard deviations of the
        difference of two of them."""
        return np.asarray(self.margins > 5.0 * np.sqrt(2.0 * bound * np.mean(np.square(self.logits))))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stored]:
    known: dict[str, Stored] = {}

    def get(name: str) -> Stored:
        if name not in known:
            path = tmp_path_factory.mktemp("tiny") / f"{name}.gguf"
            synthesize(f"{name}-Q8_0", path)
            file = DATA / f"{name.removeprefix('tiny-').replace('-', '_')}.npz"
            with np.load(file) as f:
                ids = [[int(t) for t in f[key]] for key in ("tokens", "greedy")]
                known[name] = Stored(path, ids[0], f["logits"], ids[1], f["margins"], json.loads(str(f["source"])))
        return known[name]

    return get


@pytest.fixture(scope="module")
def engines(device: Device, stored: Callable[[str], Stored]) -> Iterator[Callable[..., Engine]]:
    loaded: dict[tuple[str, str, str], Engine] = {}

    def get(name: str, act: Any, fusion: str) -> Engine:
        if (name, act, fusion) not in loaded:
            loaded[name, act, fusion] = Engine.load(stored(name).path, device, n_ctx=N_CTX, act=act, fusion=fusion, progress=False)
        loaded[name, act, fusion].reset()
        return loaded[name, act, fusion]

    yield get
    for engine in loaded.values():
        engine.close()


@pytest.fixture(params=TINY)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def may_route_otherwise(name: str, bound: float) -> bool:
    """Whether roundings may choose other experts for a token now and then: two router logits are nearer to each other than what eight bits
    leave (a spread of 3 % of theirs) in about one of thirty choices. The token, and those that see it, then have other logits for good
    reason. The float path rounds a thousand times finer."""
    return SHAPES[name].n_expert > 0 and bound > FLOAT_NMSE


def check_logits(got: np.ndarray, reference: Stored, name: str, bound: float) -> None:
    """Over all tokens; where experts may be chosen otherwise, of most tokens each."""
    bound = BY_ROUNDING.get(name, bound) if bound == INT_DOT_NMSE else bound
    if not may_route_otherwise(name, bound):
        assert nmse(got, reference.logits) <= bound
        return
    errors = [nmse(a, b) for a, b in zip(got, reference.logits, strict=True)]
    assert np.median(errors) <= bound
    assert nmse(got, reference.logits) <= 0.1, "other experts for a few tokens do not explain this"


def check_greedy(chosen: np.ndarray, reference: Stored, name: str, bound: float) -> None:
    """Choices along the reference's text are its own wherever its margin is wide, and enough of them are; where experts may be chosen
    otherwise, nine of ten."""
    wide = reference.wide(bound)
    assert wide.sum() >= 16, "margins so narrow that hardly a step was compared"
    same = chosen[wide] == np.array(reference.greedy)[wide]
    assert same.mean() >= 0.9 if may_route_otherwise(name, bound) else same.all()


@pytest.mark.parametrize("arch", [name for name, known in ARCHITECTURES.items() if known.causal])
def test_every_architecture_has_a_reference(arch: str) -> None:
    assert any(SHAPES[shape].arch == arch for shape in TINY), f"{arch} has no shape called tiny-{arch}"


def test_stored_logits_are_of_today_s_tiny_model(name: str, stored: Callable[[str], Stored]) -> None:
    found = stored(name)
    digest = hashlib.sha256(found.path.read_bytes()).hexdigest()
    assert found.source["sha256"] == digest, f"vkback synth {name}-Q8_0 writes another file than before: run tools/references.py {name}"


def test_the_twin_is_exact(name: str, stored: Callable[[str], Stored]) -> None:
    found = stored(name)
    twin = NumpyTwin(found.path, n_ctx=N_CTX)
    assert nmse(twin.logits(found.tokens), found.logits) <= FLOAT_NMSE
    logits = twin.logits([*found.tokens, *found.greedy[:-1]], len(found.tokens) - 1)
    check_greedy(logits.argmax(axis=1), found, name, FLOAT_NMSE)


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("act", "fusion", "bound"), [("f32", "all", FLOAT_NMSE), ("f32", "none", FLOAT_NMSE), ("q8_1", "all", INT_DOT_NMSE)]
)
def test_prompt_and_decode_on_a_device(
    name: str, act: str, fusion: str, bound: float, stored: Callable[[str], Stored], engines: Callable[..., Engine]
) -> None:
    found = stored(name)
    engine = engines(name, act, fusion)
    check_logits(engine.prompt_logits(found.tokens), found, name, bound)
    engine.reset()
    check_logits(np.stack([engine.decode_logits(t) for t in found.tokens]), found, name, bound)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BY_ROUNDING)
def test_rounding_alone_makes_as_much(name: str, stored: Callable[[str], Stored], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product's x is rounded to F16, up or down by chance, and to Q8_1; all else is float64."""
    found, errors, rng = stored(name), [], np.random.default_rng(0)
    for op in ("MUL_MAT", "MUL_MAT_ID"):
        plain = OPS[op].reference

        def rounding(inputs: Sequence[Any], params: Mapping[str, Any], plain: Callable[..., Any] = plain) -> Any:
            w, x, *ids = inputs
            return plain([w, rounded_rows(x * (1 + 2**-11 * rng.uniform(-1, 1, x.shape))), *ids], params)

        monkeypatch.setattr(OPS[op], "reference", rounding)
    for _ in range(12):
        logits = NumpyTwin(found.path, n_ctx=N_CTX).logits(found.tokens)
        per_token = [nmse(a, b) for a, b in zip(logits, found.logits, strict=True)]
        errors.append(float(np.median(per_token)) if may_route_otherwise(name, INT_DOT_NMSE) else nmse(logits, found.logits))
    assert np.median(errors) < INT_DOT_NMSE < max(errors)


@pytest.mark.vulkan
@pytest.mark.parametrize("name", of_a_kind(TINY))
@pytest.mark.parametrize(("act", "bound"), [("f32", FLOAT_NMSE), ("q8_1", INT_DOT_NMSE)])
def test_greedy_tokens_on_a_device(
    name: str, act: str, bound: float, stored: Callable[[str], Stored], engines: Callable[..., Engine]
) -> None:
    """Along the reference's text, so that one narrow margin does not end the comparison; and its own text until the first one."""
    found = stored(name)
    engine = engines(name, act, "all")
    engine.prompt(found.tokens[:-1])
    fed = [found.tokens[-1], *found.greedy[:-1]]
    check_greedy(np.array([engine.decode_logits(t).argmax() for t in fed]), found, name, bound)
    if may_route_otherwise(name, bound):
        return
    engine.reset()
    engine.prompt(found.tokens[:-1])
    narrow = int(np.argmin(found.wide(bound))) if not found.wide(bound).all() else len(found.greedy)
    assert list(engine.generate(found.tokens[-1], len(found.greedy), stop_at_eos=False))[:narrow] == found.greedy[:narrow]


def test_references_say_the_same_today(name: str, stored: Callable[[str], Stored]) -> None:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install vkback[references]); the stored logits are compared without it")
    found = stored(name)
    if not found.source["reference"].startswith("references."):
        pytest.skip(f"{name}: made by {found.source['reference']}, which no Python package has")
    assert str(DATA.parents[1]) in sys.path
    live = importlib.import_module(found.source["reference"]).logits(found.path, found.tokens)
    versions = ", ".join(f"{p} {found.source[p]} (here {importlib.metadata.version(p)})" for p in ("torch", "transformers"))
    # Both in float64 but for single steps that transformers makes in float32: some 1e-13.
    error = nmse(live, found.logits)
    if error > 1e-10 and any(found.source[p] != importlib.metadata.version(p) for p in ("torch", "transformers")):
        pytest.skip(f"{name}: other versions compute otherwise, NMSE {error:.1e}; stored by {versions}")
    assert error <= 1e-10, f"stored by {versions}"


@pytest.mark.vulkan
@pytest.mark.parametrize("name", of_a_kind(TINY))
def test_a_state_saved_in_the_middle_of_a_text_gives_the_rest_bit_for_bit(
    name: str, stored: Callable[[str], Stored], engines: Callable[..., Engine], tmp_path: Path
) -> None:
    """A generation left after 11 of 30 tokens, with submits of eight and of one: what was begun beyond must leave no trace, other text in
    between neither."""
    engine, ids = engines(name, "f32", "all"), stored(name).tokens
    engine.prompt(ids[:-1])
    whole = list(engine.generate(ids[-1], 30, stop_at_eos=False))
    last = engine.decode_logits(whole[-1])
    engine.reset()
    engine.prompt(ids[:-1])
    text = engine.generate(ids[-1], 30, stop_at_eos=False)
    made = [next(text) for _ in range(11)]
    text.close()
    write_state(tmp_path / "state", engine.snapshot(), {"any": 1}, {})
    engine.reset()
    engine.prompt(ids[::-1])
    snapshot, settings, _ = read_state(tmp_path / "state")
    assert settings == {"any": 1} and list(snapshot.tokens) == [*ids, *made[:-1]]
    engine.restore(snapshot)
    rest = list(engine.generate(made[-1], 19, stop_at_eos=False))
    assert made + rest == whole
    assert np.array_equal(engine.decode_logits(rest[-1]).view(np.uint32), last.view(np.uint32))
    # A fork goes on otherwise; neither sees what the other appends.
    engine.restore(snapshot)
    engine.decode_logits(ids[0])
    fork = engine.snapshot()
    want = engine.decode_logits(ids[1])
    engine.restore(snapshot)
    assert list(engine.generate(made[-1], 3, stop_at_eos=False)) == rest[:3]
    engine.restore(fork)
    assert np.array_equal(engine.decode_logits(ids[1]).view(np.uint32), want.view(np.uint32))
