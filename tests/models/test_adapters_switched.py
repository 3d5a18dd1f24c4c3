"""Adapters that are switched while a model runs: each text is that of a model loaded with its adapters alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_lora import TOKENS, adapter_of
from tiny_models import tiny

import vkback
from vkback import paths
from vkback.api import LoadedAdapter, LoadedModel, ModelError
from vkback.engine.adapter_scales import AdapterScaleError
from vkback.engine.engine import Engine
from vkback.engine.snapshot import StateError
from vkback.evaluate.judge import nmse
from vkback.models import GgufFile, Model
from vkback.models.adapter import AdapterError, Given, write_adapter
from vkback.plan.passes.lora import adapters
from vkback.train.trainer import lora_of

PROMPT = "It was a dark and stormy night"
pytestmark = pytest.mark.vulkan


def made_up(out: Path, rank: int, seed: int) -> Path:
    """An adapter of all matrices of demo-dense that changes its texts."""
    model = Model.open(paths.builtin_model("demo-dense"))
    lora, rng = lora_of(model, rank), np.random.default_rng(seed)
    weights = [t for name in lora.ranks for t in adapters(model.hp.weights[name], rank)]
    values = {t.name: (0.06 * rng.standard_normal(t.shape)).astype(np.float32) for t in weights}
    write_adapter(out, model.file.arch, out.stem, lora.alpha, values)
    return out


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [made_up(folder / "a.gguf", 4, 1), made_up(folder / "b.gguf", 6, 2)]


def greedy(model: LoadedModel, **options: object) -> str:
    return str(model.generate(PROMPT, max_tokens=12, temperature=0, **options).text)  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def wanted_texts(files: list[Path]) -> list[str]:
    """Texts without an adapter, and with each adapter alone, given at the load."""
    found = []
    for lora in (None, *files):
        with vkback.load("demo-dense", ctx=256, act="f32", lora=lora) as model:
            found.append(greedy(model))
    assert len(set(found)) == 3
    return found


@pytest.fixture(scope="module")
def model(files: list[Path]) -> Iterator[LoadedModel]:
    with vkback.load("demo-dense", ctx=256, act="f32") as model:
        for file in files:
            model.load_adapter(file, scale=0)
        yield model


@pytest.fixture(autouse=True)
def all_off(request: pytest.FixtureRequest) -> None:
    if "model" in request.fixturenames:
        for each in request.getfixturevalue("model").adapters:
            each.scale = 0


def test_texts_are_those_of_a_model_loaded_with_the_adapter_alone(model: LoadedModel, wanted_texts: list[str]) -> None:
    a, b = model.adapters
    choices: list[Any] = [[], a, b, None]
    assert [greedy(model, lora=lora) for lora in choices] == [*wanted_texts, wanted_texts[0]]
    assert greedy(model, lora=0) == greedy(model, lora={a: 1.0}) == greedy(model, lora=[(a, 1.0)]) == wanted_texts[1]
    a.scale = 1
    assert greedy(model) == wanted_texts[1] and greedy(model, lora=[]) == wanted_texts[0]
    assert repr(a) == "<adapter 0, a.gguf times 1>" and isinstance(a, LoadedAdapter)


def test_several_at_once_and_scales_are_those_of_the_merged_model(model: LoadedModel, files: list[Path]) -> None:
    a, b = model.adapters
    a.scale, b.scale = 0.5, -0.25
    with vkback.load("demo-dense", ctx=256, act="f32", lora=[(files[0], 0.5), (files[1], -0.25)]) as wanted:
        assert nmse(model.logits(PROMPT), wanted.logits(PROMPT)) < 1e-9
        vectors = model.embed(PROMPT, pooling="mean")
        assert np.allclose(vectors, wanted.embed(PROMPT, pooling="mean"), atol=1e-4)
    a.scale = b.scale = 0
    assert not np.allclose(vectors, model.embed(PROMPT, pooling="mean"), atol=1e-4)


def test_texts_with_different_adapters_share_a_batch(model: LoadedModel, wanted_texts: list[str]) -> None:
    a, b = model.adapters

    choices: list[Any] = [[], a, b, a, []]

    async def side_by_side() -> list[str]:
        asked = [model.agenerate(PROMPT, lora=lora, max_tokens=12, temperature=0) for lora in choices]
        return [result.text for result in await asyncio.gather(*asked)]

    before = model.batched().paged.counters.steps
    assert asyncio.run(side_by_side()) == [wanted_texts[0], wanted_texts[1], wanted_texts[2], wanted_texts[1], wanted_texts[0]]
    assert model.batched().paged.counters.steps - before < 5 * 12, "they share steps"


def test_a_prefix_is_never_that_of_a_text_with_other_adapters(model: LoadedModel) -> None:
    a, b = model.adapters
    prompt = f"{PROMPT}. A prefix of its own. " * 10
    choices: list[Any] = [a, b, (b, 0.5), [], a, b]
    found = [model.batch([prompt], lora=lora, max_tokens=8, temperature=0)[0] for lora in choices]
    assert [each.timings.reused_tokens > 0 for each in found] == [False, False, False, False, True, True]
    assert found[4].text == found[0].text and found[5].text == found[1].text and len({each.text for each in found[:4]}) == 4


def test_a_session_reads_its_text_anew_where_its_adapters_change(model: LoadedModel, wanted_texts: list[str], tmp_path: Path) -> None:
    a, b = model.adapters
    session, other = model.session(lora=a), model.session(lora=b)
    result = session.generate(PROMPT, max_tokens=12, temperature=0)
    assert result.text == wanted_texts[1]
    assert other.generate(PROMPT, max_tokens=12, temperature=0).text == wanted_texts[2]  # the first one's state is on the host meanwhile
    more = session.generate(max_tokens=4, temperature=0)
    assert more.timings.reused_tokens > 0
    whole = model.generate(PROMPT, max_tokens=16, temperature=0, lora=a)
    assert result.tokens + more.tokens == whole.tokens
    fork = session.fork()
    changed = session.generate(max_tokens=4, temperature=0, lora=b)
    assert changed.timings.reused_tokens == 0
    assert changed.text == model.generate(list(fork.tokens), max_tokens=4, temperature=0, lora=b).text
    fork.save(tmp_path / "a.state")
    again = model.session(lora=a)
    again.load(tmp_path / "a.state")
    assert again.generate(max_tokens=4, temperature=0).text == fork.generate(max_tokens=4, temperature=0).text
    with pytest.raises(StateError, match=r"with a\.gguf .* times 1; this one is .* with b\.gguf"):
        model.session(lora=b).load(tmp_path / "a.state")


def test_a_stream_goes_on_with_its_own_while_others_run(model: LoadedModel, wanted_texts: list[str]) -> None:
    a, b = model.adapters
    text = ""
    with model.stream(PROMPT, max_tokens=12, temperature=0, lora=a) as stream:
        for i, piece in enumerate(stream):
            text += piece.text
            if i == 3:
                assert greedy(model, lora=b) == wanted_texts[2]
                model.embed("Another text", pooling="mean")
    assert text == wanted_texts[1]


def test_what_cannot_be_is_refused(model: LoadedModel, files: list[Path], tmp_path: Path, wanted_texts: list[str]) -> None:
    a, _ = model.adapters
    with pytest.raises(ModelError, match=r"has no adapter 7; there are: 0 \(a\.gguf\), 1 \(b\.gguf\)\. Load it by load_adapter"):
        model.generate(PROMPT, max_tokens=1, lora=7)
    with pytest.raises(ModelError, match="has no adapter 7"):
        model.session(lora=7)
    wrongs: list[Any] = ["a.gguf", -1, True, [a, a], [(a, "1")], {a: float("nan")}]
    for wrong in wrongs:
        with pytest.raises(ModelError, match="lora"):
            model.generate(PROMPT, max_tokens=1, lora=wrong)
    with pytest.raises(ModelError, match="scale"):
        a.scale = float("inf")
    (tmp_path / "no.gguf").write_bytes(b"GGUF")
    for file in (tmp_path / "no.gguf", tmp_path / "none.gguf"):
        with pytest.raises(AdapterError):
            model.load_adapter(file)
    assert len(model.adapters) == 2 and greedy(model, lora=a) == wanted_texts[1]
    with vkback.load("demo-dense", ctx=64, act="f32", lora=files[0]) as fixed:
        assert fixed.adapters == ()
        with pytest.raises(ModelError, match="stay as they are; bring them by load_adapter"):
            fixed.generate(PROMPT, max_tokens=1, lora=[0])
        second = fixed.load_adapter(files[1], scale=0)
        first, last = fixed.adapters  # type: ignore[misc]  # which were none
        assert (first.id, last.id, first.scale) == (0, 1, 1.0)
        assert (
            greedy(fixed) == wanted_texts[1] and greedy(fixed, lora=second) == wanted_texts[2] and greedy(fixed, lora=[]) == wanted_texts[0]
        )


def test_an_adapter_is_not_loaded_while_texts_of_a_batch_run(files: list[Path]) -> None:
    with vkback.load("demo-dense", ctx=256, sequences=2) as model:
        with model.batch_stream([PROMPT, PROMPT], max_tokens=200) as stream:
            next(stream)
            with pytest.raises(ModelError, match=r"texts of a batch run; load a\.gguf before they begin, or when they have ended"):
                model.load_adapter(files[0])
        model.texts.stop()


@pytest.mark.parametrize("arch", ["qwen3", "llama", "falcon-h1", "gpt2"])
def test_logits_are_those_of_adapters_in_the_graph(arch: str, tmp_path: Path) -> None:
    """Of several ranks, of weights that one or all have, of an embedding table, and of a tensor that several weights lie in."""
    path = tiny(arch, tmp_path)
    f = GgufFile.open(path)
    names = [n for n in ("blk.0.attn_q.weight", "blk.0.attn_qkv.weight", "blk.0.ffn_down.weight", "token_embd.weight") if n in f.tensors]
    loras = [
        Given(adapter_of(path, tmp_path / "a.gguf", names[:1], rank=4, seed=1), 0.5),
        Given(adapter_of(path, tmp_path / "b.gguf", names, rank=2, alpha=1.0, seed=2), -3.0),
        Given(adapter_of(path, tmp_path / "c.gguf", names[1:], rank=3, alpha=0.0, seed=3)),
    ]
    with Engine.load(path, n_ctx=64, act="f32", lora=loras) as engine:
        wanted = engine.prompt_logits(TOKENS)
        after = engine.decode_logits(5)
    with Engine.load(path, n_ctx=64, act="f32") as engine:
        plain = engine.prompt_logits(TOKENS)
        engine.load_adapters(loras[:2])
        engine.load_adapters(loras)
        assert engine.adapter_scales == (0.5, -3.0, 1.0)
        assert nmse(engine.prompt_logits(TOKENS), wanted) < 1e-8
        assert nmse(engine.decode_logits(5), after) < 1e-8
        engine.use_adapters([0.5, -3.0, 1.0, 0.0])
        assert engine.n_past == len(TOKENS) + 1, "nothing has changed"
        engine.use_adapters([])
        assert engine.n_past == 0 and nmse(engine.prompt_logits(TOKENS), plain) < 1e-8 < nmse(plain, wanted)
        with pytest.raises(AdapterScaleError, match="expected at most 3 of those loaded"):
            engine.use_adapters([1.0] * 4)
