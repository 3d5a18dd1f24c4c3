"""Texts held to a JSON schema: masks of the grammar, tokens that the device takes with them, and schemas that are refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import vkback
from vkback.api import ModelError
from vkback.device import Device
from vkback.engine.constraint import ConstraintError, JsonGrammar
from vkback.engine.engine import Engine
from vkback.gguf.pre_tokenizers import PreTokenizer
from vkback.gguf.token_types import TokenType
from vkback.gguf.tokenizer import Tokenizer
from vkback.gguf.vocabularies import BpeVocabulary
from vkback.models import Model
from vkback.ops.sampling.penalties import Penalties, PenaltiesOp
from vkback.paths import builtin_model

pytest.importorskip("llguidance", reason="vkback[json] is not installed")

PROMPT = "The whale: "
PERSON: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "size"],
    "properties": {"name": {"enum": ["Moby", "Dick"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
}
NAMES = {"enum": ["Moby Dick", "Queequeg", "Ahab", 12, None]}


@pytest.fixture(scope="module")
def model(device: Device) -> Iterator[vkback.LoadedModel]:
    engine = Engine.load(builtin_model("demo-dense"), device, n_ctx=128, act="f32", progress=False)
    with vkback.LoadedModel(engine) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def grammar() -> JsonGrammar:
    opened = Model.open(builtin_model("demo-dense"))
    return JsonGrammar(opened.tokenizer, opened.hp.n_vocab)


def require_person(text: str) -> None:
    found = json.loads(text)
    assert found.keys() == {"name", "size"} and found["name"] in ("Moby", "Dick") and 1 <= found["size"] <= 99


@pytest.mark.vulkan
def test_a_text_is_of_its_schema_however_it_is_sampled(model: vkback.LoadedModel) -> None:
    result = model.generate(PROMPT, max_tokens=110, json_schema=PERSON, temperature=0)
    assert result.finish_reason == "stop", result.text
    require_person(result.text)
    for seed in range(3):
        sampled = model.generate(PROMPT, json_schema=NAMES, seed=seed, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0)
        assert sampled.finish_reason == "stop" and json.loads(sampled.text) in NAMES["enum"]
    again = model.generate(
        PROMPT, max_tokens=2, json_schema=json.dumps(NAMES), logprobs=1, seed=seed, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0
    )
    assert again.tokens == sampled.tokens[:2] and len(again.logprobs) == len(again.tokens)
    assert model.generate(PROMPT, max_tokens=2, temperature=0).text[:1] not in "{["


@pytest.mark.vulkan
def test_each_token_is_the_likeliest_that_may_come(model: vkback.LoadedModel) -> None:
    """Step by step by the float64 reference with the mask, on logits that the device makes."""
    got = model.generate(PROMPT, max_tokens=12, temperature=0, json_schema=PERSON, repeat_penalty=1.3, penalty_last_n=4)
    ids = model.tokenizer.encode(PROMPT)
    engine = model.engine
    engine.reset()
    engine.prompt(ids[:-1])
    constraint = model.constraint(PERSON)
    assert constraint is not None
    text = list(ids)
    for token in got.tokens:
        seen = Penalties(1.3, 0.0, 0.0, 4).words(text[:-1], model.n_vocab, 128)
        inputs = [
            engine.decode_logits(text[-1])[None],
            np.zeros(model.n_vocab, np.float32),
            seen,
            np.zeros(40, np.int32),
            np.array(text[-1:]),
            np.array([len(text) - 1]),
            constraint.mask(),
        ]
        x = PenaltiesOp().reference(inputs, {})[0][0]
        best, second = np.sort(x)[-1], np.sort(x)[-2]
        assert token == int(np.argmax(x)) or best - second < 1e-4
        constraint.take(token)
        text.append(token)


@pytest.mark.vulkan
def test_a_session_goes_on_after_it(model: vkback.LoadedModel) -> None:
    session = model.session()
    first = session.generate(PROMPT, temperature=0, json_schema=NAMES)
    assert first.finish_reason == "stop" and json.loads(first.text) in NAMES["enum"]
    held = len(session.tokens)
    assert session.generate(" The end", max_tokens=1, temperature=0).timings.reused_tokens == held - 1
    pieces = list(stream := session.stream(" And: ", temperature=0, json_schema=NAMES))
    assert json.loads("".join(p.text for p in pieces)) == json.loads(stream.result.text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "nonsense"}, "the schema cannot be compiled: Invalid type: nonsense"),
        ({"not": {}}, r'the schema cannot be compiled: Unimplemented keys: \["not"\]'),
        ({"type": "string", "pattern": "(?=a)b"}, "the schema cannot be compiled: regex parse error.*look-around"),
        ({"$ref": "#"}, "the schema cannot be compiled: "),
        ({"$ref": "http://127.0.0.1:9/x"}, "the schema cannot be compiled: Resource .* does not fetch"),
        ({"enum": []}, "the schema cannot be compiled: Unsatisfiable schema"),
        ("[]", "the schema cannot be read: Expecting object schema"),
        ("{", "the schema cannot be read: EOF"),
    ],
)
def test_schemas_that_cannot_be_are_one_line(schema: Any, text: str, grammar: JsonGrammar) -> None:
    with pytest.raises(ConstraintError, match=text) as error:
        grammar.constraint(schema)
    assert "\n" not in str(error.value)


def test_white_space_is_bounded(grammar: JsonGrammar) -> None:
    """The demo models, once they have begun a line, would go on with empty lines for ever."""
    opened = Model.open(builtin_model("demo-dense"))
    line = opened.tokenizer.encode("\n", add_bos=False)[0]
    constraint = grammar.constraint({"type": "object"})
    assert allows(constraint.mask(), opened.tokenizer.encode("{", add_bos=False)[0])
    constraint.take(opened.tokenizer.encode("{", add_bos=False)[0])
    assert allows(constraint.mask(), line)
    constraint.take(line)
    assert not allows(constraint.mask(), line)


def allows(mask: np.ndarray, token: int) -> bool:
    return bool(int(mask.view(np.uint32)[token // 32]) >> (token % 32) & 1)


def test_a_vocabulary_without_an_end_and_with_rows_to_spare() -> None:
    """The text ends where nothing more may come; rows of logits without a token are never let through."""
    letters = [bytes([b]).decode("latin-1") for b in range(0x21, 0x7F)]
    tokens = ["<s>", *letters]
    types = [TokenType.CONTROL, *[TokenType.NORMAL] * len(letters)]
    tokenizer = Tokenizer(
        BpeVocabulary(tokens, [], PreTokenizer((".",))), tokens, types, bos=0, eos_ids=[], add_bos=False, strip_space=False
    )
    constraint = JsonGrammar(tokenizer, 100).constraint({"const": [1]})
    for letter in "[1]":
        mask, token = constraint.mask(), tokens.index(letter)
        assert mask.shape == (4,) and allows(mask, token)
        assert not any(allows(mask, id) for id in (0, *range(len(tokens), 100)))
        assert not constraint.ended
        constraint.take(token)
    assert constraint.ended


def test_tokens_of_types_that_are_none_are_text() -> None:
    """Files have zeros there."""
    letters = list('{}":abcdefghijklmnopqrstuvwxyz')
    vocabulary = BpeVocabulary(letters, [], PreTokenizer((".",)))
    tokenizer = Tokenizer(vocabulary, letters, [0, 9] * 15, bos=None, eos_ids=[29], add_bos=False, strip_space=False)
    constraint = JsonGrammar(tokenizer, 30).constraint({"type": "object"})
    assert allows(constraint.mask(), 0) and not allows(constraint.mask(), 5)


def test_a_token_that_may_not_come_is_an_error(grammar: JsonGrammar) -> None:
    constraint = grammar.constraint({"type": "integer"})
    with pytest.raises(ConstraintError, match="the text cannot go on within its schema"):
        constraint.take(Model.open(builtin_model("demo-dense")).tokenizer.encode("{", add_bos=False)[0])


@pytest.mark.vulkan
def test_what_is_refused_leaves_the_session_as_it_was(model: vkback.LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    session = model.session()
    session.generate(PROMPT, max_tokens=1)
    before = session.tokens
    with pytest.raises(ConstraintError, match="Invalid type"):
        session.generate("x", json_schema={"type": "nonsense"})
    with pytest.raises(ModelError, match=r"ignore_eos is True \(bool\), expected False with json_schema"):
        session.generate("x", json_schema={}, ignore_eos=True)
    assert session.tokens == before
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConstraintError, match=r"pip install 'vkback\[json\]'"):
        JsonGrammar(model.tokenizer, model.n_vocab)
