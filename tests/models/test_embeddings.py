"""Vectors of texts and scores of rerankers: Python, command line, server; texts at once and alone, exact mode, cache types, adapters."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from cli_kit import call
from test_server import Served
from tiny_models import changed

import vkback
from vkback.api import LoadedModel, ModelError
from vkback.api.errors import ContextLengthError
from vkback.api.vectors import pair_of
from vkback.cli.main import main
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.text_vectors import passes, program_tokens
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.gguf.file import GgufError
from vkback.gguf.tokenizer import Tokenizer
from vkback.models import Model
from vkback.models.texts import POOLINGS, pool_weights, spans, spans_of, window_of
from vkback.server.app import Limits

Tiny = Callable[[str], Path]
RNG = np.random.default_rng(3)
IDS = [[int(t) for t in RNG.integers(5, 331, n)] for n in (40, 1, 7, 64, 90, 3, 3)]
WORDS = ["hello there", "the world", "a b c d", "hello there"]
ALONE_NMSE = 1e-5
"""Between a text alone and beside others: it takes a program of fewer tokens, whose products may round otherwise. On a GPU with matrices of
F16 it was 3e-7."""


def test_what_a_token_sees() -> None:
    whole = spans([3, 2], 6, window=0, causal=False)
    assert whole.tolist() == [[0, 2], [0, 2], [0, 2], [3, 4], [3, 4], [0, -1]]
    assert spans([3, 2], 5, window=0, causal=True).tolist() == [[0, 0], [0, 1], [0, 2], [3, 3], [3, 4]]
    assert spans([5], 5, window=2, causal=False).tolist() == [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]]
    assert spans([4], 4, window=2, causal=True).tolist() == [[0, 0], [0, 1], [1, 2], [2, 3]]
    assert spans([4, 3], 7, window=2, causal=True, chunked=True).tolist() == [[0, 0], [0, 1], [2, 2], [2, 3], [4, 4], [4, 5], [6, 6]]
    assert [window_of(spans_of(*kind)) for kind in ((0, False), (9, False), (9, True))] == [(0, False), (9, False), (9, True)]


def test_what_a_token_counts() -> None:
    assert pool_weights([2, 1], 4, 2, "mean").tolist() == [[0.5, 0], [0.5, 0], [0, 1], [0, 0]]
    assert pool_weights([2, 1], 3, 3, "cls").tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]
    assert pool_weights([2, 1], 3, 2, "last").tolist() == [[0, 0], [1, 0], [0, 1]]


def test_texts_share_a_pass_as_far_as_there_is_room() -> None:
    assert list(passes([], 64, 8)) == []
    assert list(passes([10, 20, 34, 1, 100, 5, 5], 64, 8)) == [(0, 3), (3, 4), (4, 5), (5, 7)]
    assert list(passes([1] * 5, 64, 2)) == [(0, 2), (2, 4), (4, 5)]
    assert [program_tokens(n, 512) for n in (1, 16, 17, 300, 512, 513, 1100)] == [16, 16, 32, 512, 512, 1024, 1536]
    assert [program_tokens(n, 40) for n in (1, 33, 41)] == [16, 40, 80]


@pytest.mark.vulkan
@pytest.mark.parametrize("name", ["tiny-bert", "tiny-modern-bert", "tiny-qwen3", "tiny-gemma3", "tiny-deepseek2", "tiny-qwen3moe"])
def test_texts_at_once_are_those_of_the_twin_one_by_one(name: str, tiny: Tiny, device: Device) -> None:
    """Encoders and models that make text, several texts a pass, one longer than a pass; every pooling."""
    twin = NumpyTwin(tiny(name), n_ctx=96)
    with Engine.load(tiny(name), device, n_ctx=96, act="f32", ubatch=80, progress=False) as engine:
        for pooling in ("mean", "last", "cls"):
            found = np.stack(list(engine.vectors(IDS, pooling)))
            assert nmse(found, twin.embed(IDS, pooling)) < 1e-6, pooling
        tokens = np.concatenate(list(engine.vectors(IDS[:3], "none")))
        assert tokens.shape == (48, twin.model.hp.n_embd) and nmse(tokens, twin.embed(IDS[:3], "none")) < 1e-6


@pytest.mark.vulkan
@pytest.mark.parametrize("name", ["tiny-bert", "tiny-nomic-bert", "tiny-jina-bert-v2", "tiny-gemma-embedding"])
def test_exact_vectors_do_not_depend_on_the_other_texts(name: str, tiny: Tiny, device: Device) -> None:
    with Engine.load(tiny(name), device, n_ctx=96, exact=True, progress=False) as engine:
        together = list(engine.vectors(IDS, "mean"))
        for ids, vector in zip(reversed(IDS), reversed(together), strict=True):
            (alone,) = engine.vectors([ids], "mean")
            assert np.array_equal(alone.view(np.uint32), vector.view(np.uint32))


@pytest.mark.vulkan
@pytest.mark.parametrize(("k", "v", "bound"), [("f32", "f32", 1e-9), ("q8_0", "q8_0", 1e-3), ("q4_0", "q8_0", 3e-2)])
def test_keys_and_values_of_other_types(k: str, v: str, bound: float, tiny: Tiny, device: Device) -> None:
    """Bounds: f32 sums; 8 bits of 32 values are off by 1e-5, of 4 bits by 3e-3 of their energy, in each of three layers."""
    want = NumpyTwin(tiny("tiny-bert"), n_ctx=96).embed(IDS, "mean")
    with Engine.load(tiny("tiny-bert"), device, n_ctx=96, act="f32", cache_type_k=k, cache_type_v=v, progress=False) as engine:
        assert nmse(np.stack(list(engine.vectors(IDS, "mean"))), want) < max(bound, 2e-7)


@pytest.mark.vulkan
def test_what_a_session_holds_stays(tiny: Tiny, device: Device) -> None:
    with LoadedModel(Engine.load(tiny("tiny-qwen3"), device, n_ctx=96, act="f32", progress=False)) as model:
        plain = model.session()
        plain.generate(IDS[0], max_tokens=3, temperature=0.0)
        want = plain.generate([7], max_tokens=4, temperature=0.0).tokens
        mixed = model.session()
        mixed.generate(IDS[0], max_tokens=3, temperature=0.0)
        first = model.embed(IDS, pooling="last")
        assert mixed.generate([7], max_tokens=4, temperature=0.0).tokens == want
        assert np.array_equal(first, model.embed(IDS, pooling="last"))


@pytest.mark.vulkan
def test_embed_in_python(tiny: Tiny, device: Device) -> None:
    with LoadedModel(Engine.load(tiny("tiny-bert"), device, n_ctx=96, progress=False)) as model:
        rows = model.embed(WORDS)
        assert rows.shape == (4, 96) == (4, model.embedding_width) and rows.dtype == np.float32
        np.testing.assert_allclose((rows**2).sum(axis=1), 1.0, rtol=1e-6)
        assert rows[0] @ rows[3] > 0.99999 and abs(rows[0] @ rows[1]) < 0.999
        assert nmse(model.embed(WORDS[1]), rows[1]) < ALONE_NMSE
        raw = model.embed(np.array(model.tokenizer.encode(WORDS[0])), normalize=False)
        assert nmse(raw / np.linalg.norm(raw), rows[0]) < ALONE_NMSE
        assert model.embed([]).shape == (0, 96)
        assert model.embed_tokens("hello there").shape == (len(model.tokenizer.encode("hello there")), 96)
        assert model.embed([""]).shape == (1, 96), "BERT puts tokens around any text"
        wrong: tuple[Any, ...] = (["a", 7], [["x"]], 7)
        for texts in wrong:
            with pytest.raises(ModelError, match="texts"):
                model.embed(texts)
        with pytest.raises(ModelError, match=r"pooling is .rank. .str., expected one of mean, cls, last"):
            model.embed("a", pooling=cast(Any, "rank"))
        with pytest.raises(ContextLengthError, match=r"texts\[1\]: 130 tokens, the context has 96"):
            model.embed([[5], [5] * 130])
        with pytest.raises(ModelError, match="no classifier, so it cannot rank"):
            model.rank("a", ["b"])
        for generate in (model.generate, model.logits):
            with pytest.raises(GgufError, match="bert sees whole texts and makes none; expected a use of their vectors"):
                generate("a")


@pytest.mark.vulkan
def test_a_model_that_says_no_pooling_wants_it_said(tiny: Tiny, device: Device) -> None:
    with LoadedModel(Engine.load(tiny("tiny-qwen3"), device, n_ctx=96, progress=False)) as model:
        with pytest.raises(ModelError, match="does not say how a text becomes a vector"):
            model.embed("a")
        assert model.embed("a", pooling="mean").shape == (96,)
    by_last = changed(tiny("tiny-qwen3"), metadata={"pooling_type": POOLINGS.index("last")})
    with LoadedModel(Engine.load(by_last, device, n_ctx=96, progress=False)) as model:
        assert np.array_equal(model.embed(IDS), model.embed(IDS, pooling="last"))


@pytest.mark.vulkan
def test_a_model_of_states_makes_none(tiny: Tiny, device: Device) -> None:
    model = LoadedModel(Engine.load(tiny("tiny-mamba2"), device, n_ctx=96, progress=False))
    with model, pytest.raises(ModelError, match="recurrent states of mamba2 hold one text"):
        model.embed("a", pooling="mean")


@pytest.mark.vulkan
def test_rank_in_python(tiny: Tiny, device: Device) -> None:
    path = tiny("tiny-bert-reranker")
    with LoadedModel(Engine.load(path, device, n_ctx=96, act="f32", progress=False)) as model:
        scores = model.rank("the world", WORDS)
        pairs = [model.pair_ids("the world", text) for text in WORDS]
        want = NumpyTwin(path, n_ctx=96).embed([ids for ids, _ in pairs], "rank", [segments for _, segments in pairs])
        assert scores.shape == (4,) and nmse(scores[:, None], want) < 1e-6
        assert model.rank("the world", []).shape == (0,)
        with pytest.raises(ModelError, match="is a reranker"):
            model.embed("a")
        with pytest.raises(ModelError, match="documents"):
            model.rank("a", "b")


def test_a_pair_is_two_segments(tiny: Tiny) -> None:
    tokenizer = Tokenizer.from_gguf(Model.open(tiny("tiny-bert")).file)
    ids, segments = pair_of(tokenizer, "ab", "c", template=None, two_ends=False)
    assert tokenizer.pieces(ids) == ["[CLS]", " ab", "[SEP]", " c", "[SEP]"] and segments == [0, 0, 0, 1, 1]
    ids, _ = pair_of(tokenizer, "ab", "c", template=None, two_ends=True)
    assert tokenizer.pieces(ids) == ["[CLS]", " ab", "[SEP]", "[SEP]", " c", "[SEP]"]
    ids, segments = pair_of(tokenizer, "{document}", "d", template="a {query} b {document}", two_ends=False)
    assert tokenizer.decode(ids[1:2]) == " a" and tokenizer.decode(ids[-3:-1]) == " b d" and not any(segments)


def test_a_decoder_that_sees_all_has_other_vectors(tiny: Tiny) -> None:
    """A file of any architecture may say that its tokens see what comes after them."""
    both = changed(tiny("tiny-qwen3"), metadata={"attention.causal": False, "pooling_type": 1})
    plain, whole = (NumpyTwin(path, n_ctx=96).embed(IDS[:2], "none") for path in (tiny("tiny-qwen3"), both))
    assert nmse(whole[:39], plain[:39]) > 0.01 and nmse(whole[40:], plain[40:]) < 1e-12, "a text of one token has nothing else to see"


# --- the server


@pytest.fixture(scope="module")
def bert(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from vkback.models.synth import synthesize

    path = tmp_path_factory.mktemp("bert") / "tiny-bert-reranker.gguf"
    synthesize("tiny-bert-reranker-Q8_0", path)
    both = changed(path, metadata={"pooling_type": 1})
    served = Served(device, Limits(), path=both, strict=False)
    yield served
    served.close()


def of_reply(reply: Any) -> np.ndarray:
    assert reply.status_code == 200, reply.text
    return np.array([each["embedding"] for each in reply.json()["data"]], np.float32)


@pytest.mark.vulkan
def test_embeddings_of_the_server(bert: Served) -> None:
    rows = of_reply(bert.post("/v1/embeddings", input=WORDS))
    assert rows.shape == (4, 64) and rows[0] @ rows[3] > 0.99999
    body = bert.post("/v1/embeddings", input="hello there", model="any", user="me").json()
    ids = bert.worker.tokenizer.encode("hello there")
    assert (body["object"], body["model"]) == ("list", bert.worker.model_name)
    assert body["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    assert body["data"][0]["object"] == "embedding" and body["data"][0]["index"] == 0
    alone = np.array(body["data"][0]["embedding"])
    assert nmse(alone, rows[0]) < ALONE_NMSE
    for given in (ids, [ids]):
        np.testing.assert_allclose(of_reply(bert.post("/embeddings", input=given))[0], alone, atol=1e-5)
    text = bert.post("/v1/embeddings", input="hello there", encoding_format="base64").json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(text), "<f4"), alone, atol=1e-5)
    cut = of_reply(bert.post("/v1/embeddings", input="hello there", dimensions=16))[0]
    np.testing.assert_allclose(cut, alone[:16] / np.linalg.norm(alone[:16]), atol=1e-5)


@pytest.mark.vulkan
def test_requests_that_the_server_refuses(bert: Served) -> None:
    for path, asked, told in (
        ("/v1/embeddings", {}, "input: is missing"),
        ("/v1/embeddings", {"input": []}, "input: expected a text, token ids, or a list of these"),
        ("/v1/embeddings", {"input": [""]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions: 65; vectors of this model have 64 values"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, 'encoding_format: expected "float" or "base64"'),
        ("/v1/embeddings", {"input": [331]}, "expected an id in 0..330"),
        ("/v1/embeddings", {"input": [5] * 200}, "maximum context length is 128 tokens"),
        ("/v1/rerank", {"query": "a"}, "documents: is missing"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents: expected a list"),
        ("/v1/completions", {"prompt": "a"}, "makes vectors of texts and no text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "makes vectors of texts and no text"),
    ):
        reply = bert.post(path, **asked)
        assert reply.status_code == 400 and told in reply.json()["error"]["message"], (asked, reply.text)


@pytest.mark.vulkan
def test_rerank_of_the_server(bert: Served) -> None:
    asked = {"query": "the world", "documents": [*WORDS[:3], {"text": "zz"}]}
    body = bert.post("/v1/rerank", **asked).json()
    scores = [each["relevance_score"] for each in body["results"]]
    assert scores == sorted(scores, reverse=True) and sorted(each["index"] for each in body["results"]) == [0, 1, 2, 3]
    assert body["usage"]["total_tokens"] > 20
    few = bert.post("/rerank", **asked, top_n=2, return_documents=True).json()["results"]
    assert [each["index"] for each in few] == [each["index"] for each in body["results"][:2]]
    texts = [*WORDS[:3], "zz"]
    assert [each["document"]["text"] for each in few] == [texts[each["index"]] for each in few]


@pytest.mark.vulkan
def test_the_openai_client_gets_vectors(bert: Served) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{bert.port}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="any", input=WORDS)  # which asks for base64, and reads it
        rows = np.array([each.embedding for each in found.data], np.float32)
        assert rows.shape == (4, 64) and found.usage.total_tokens > 8
        np.testing.assert_allclose(rows, of_reply(bert.post("/v1/embeddings", input=WORDS)), atol=1e-6)
        plain = client.embeddings.create(model="any", input=WORDS[0], encoding_format="float", dimensions=8)
        assert len(plain.data[0].embedding) == 8
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="any", input="a", dimensions=1000)


@pytest.mark.vulkan
def test_vectors_beside_texts_that_run(device: Device, tiny: Tiny) -> None:
    """Of a model that makes text, with several requests at once: vectors in between change no text."""
    path = changed(tiny("tiny-qwen3"), metadata={"pooling_type": 3})
    served = Served(device, Limits(), path=path, parallel=2)
    try:
        want = served.text(prompt=IDS[0], max_tokens=40)["choices"][0]["text"]
        rows = of_reply(served.post("/v1/embeddings", input=IDS[:3]))
        events = served.client.stream(
            "POST", "/v1/completions", json={"prompt": IDS[0], "max_tokens": 40, "temperature": 0, "stream": True}
        )
        with events as reply:
            lines = reply.iter_lines()
            text = [next(lines)]
            np.testing.assert_allclose(of_reply(served.post("/v1/embeddings", input=IDS[:3])), rows, atol=1e-5)
            text += list(lines)
        pieces = [json.loads(line.removeprefix("data: ")) for line in text if line.startswith("data: {")]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == want
    finally:
        served.close()


# --- the command line


@pytest.mark.vulkan
def test_the_command(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tiny("tiny-bert"))
    with vkback.load(path) as model:
        want = model.embed(WORDS[:3])
        raw = model.embed(WORDS[0], normalize=False, pooling="mean")
    assert call(monkeypatch, main, "embed", "-m", path, *WORDS[:3]) == 0
    out = capfd.readouterr().out
    assert out.startswith("embedding 0:") and "cosine similarity matrix" in out
    (tmp_path / "texts").write_text("\n".join(WORDS[:3]) + "\n", encoding="utf-8")
    for given in (("-f", str(tmp_path / "texts")), ("-p", "|".join(WORDS[:3]), "--embd-separator", "|")):
        assert call(monkeypatch, main, "embed", "-m", path, *given, "--embd-output-format", "array") == 0
        np.testing.assert_allclose(json.loads(capfd.readouterr().out), want, atol=1e-5)
    assert call(monkeypatch, main, "embed", "-m", path, *WORDS[:2], "--embd-output-format", "json+") == 0
    body = json.loads(capfd.readouterr().out)
    assert [each["index"] for each in body["data"]] == [0, 1]
    assert body["cosineSimilarity"][0][1] == pytest.approx(float(want[0] @ want[1]), abs=1e-5)
    options = ("--pooling", "mean", "--embd-normalize", "-1", "--embd-output-format", "array")
    assert call(monkeypatch, main, "embed", "-m", path, WORDS[0], *options) == 0
    np.testing.assert_allclose(json.loads(capfd.readouterr().out)[0], raw, atol=1e-4)
    for wrong, told in (
        (["a", "-p", "b"], "one of these"),
        ([], "embed needs texts"),
        (["a", "--pooling", "rank"], "--pooling rank: expected mean, cls, last"),
        (["a", "--embd-output-format", "xml"], "--embd-output-format xml: expected text, json"),
        (["a", "--embd-normalize", "1"], "--embd-normalize 1: expected 2"),
    ):
        assert call(monkeypatch, main, "embed", "-m", path, *wrong) == 2
        assert told in capfd.readouterr().err
    assert call(monkeypatch, main, "run", "-m", path, "hello") == 1
    assert "makes none; expected a use of their vectors: vkback embed" in capfd.readouterr().err
