"""Grammars of calls: what they let through is read as calls with arguments of the schema, in every format."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vkback.api.reasoning import Marks, marks_of
from vkback.api.tools.call import Tool, ToolCall
from vkback.api.tools.format import Format
from vkback.api.tools.grammar import TriggeredConstraint, calls_grammar
from vkback.api.tools.known import FORMATS, GENERAL
from vkback.api.tools.reader import CallReader
from vkback.api.tools.use import tool_use
from vkback.engine.constraint import Constraint, ConstraintError, JsonGrammar, closed
from vkback.gguf.file import GgufFile
from vkback.gguf.tokenizer import Tokenizer
from vkback.paths import builtin_model

pytest.importorskip("llguidance", reason="vkback[json] is not installed")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "sure": {"type": "boolean"},
        "at": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
    },
    "required": ["city", "sure"],
    "additionalProperties": False,
}
TOOLS = {
    name: Tool(name, "", schema, strict=True)
    for name, schema in (("get_weather", SCHEMA), ("now", {"type": "object", "properties": {}, "additionalProperties": False}))
}
SPELLED: dict[str, Format] = {format.name: format for format in (*FORMATS, GENERAL) if format.spelling is not None}
NO_MARKS = Marks(())


@pytest.fixture(scope="module")
def make() -> JsonGrammar:
    tokenizer = Tokenizer.from_gguf(GgufFile.open(builtin_model("demo-dense")))
    return JsonGrammar(tokenizer, tokenizer.n_vocab)


def bits(constraint: Constraint) -> list[int]:
    return list(np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")))


def walk(constraint: Constraint, make: JsonGrammar, rng: random.Random, most: int = 4000) -> str:
    """A text that the constraint lets through, which prefers its end."""
    text = b""
    for _ in range(most):
        allowed = bits(constraint)
        ends = [token for token in allowed if token == 1]
        token = 1 if ends else rng.choice(allowed)
        if ends or constraint.ended:
            return text.decode()
        text += make.bytes_of(token)
        constraint.take(token)
        if constraint.ended:
            return text.decode()
    raise AssertionError(f"no end: {text!r}")


def read(format: Format, text: str) -> tuple[str, list[ToolCall]]:
    if format.name == "harmony":
        text = f"<|start|>assistant{text}"
    reader = CallReader(format, TOOLS)
    told = reader.feed(text)[0] + reader.flush()[0]
    return told, reader.calls


def fits(call: ToolCall) -> bool:
    values = call.values
    if call.name == "now":
        return not values
    return (
        values.keys() <= SCHEMA["properties"].keys()
        and values["city"] in ("Rome", "Oslo")
        and isinstance(values["sure"], bool)
        and 1 <= values.get("days", 1) <= 9
        and set(values.get("at", [])) <= {1, 2}
    )


@pytest.mark.parametrize("name", SPELLED)
def test_a_reply_that_must_call_is_calls_of_the_schema(name: str, make: JsonGrammar) -> None:
    format, rng = SPELLED[name], random.Random(name)
    grammar = calls_grammar(format, list(TOOLS.values()), make, parallel=True, marks=NO_MARKS)
    for _ in range(6):
        text, calls = read(format, walk(make.of_lark(grammar), make, rng))
        assert calls and not text and all(map(fits, calls)), (text, calls)


def tokens(make: JsonGrammar, text: str) -> Iterator[int]:
    known = {make.bytes_of(i): i for i in range(3, 4096) if make.bytes_of(i)}
    data = text.encode()
    while data:
        piece = next(data[:n] for n in range(min(len(data), 12), 0, -1) if data[:n] in known)
        yield known[piece]
        data = data[len(piece) :]


@pytest.mark.parametrize("name", SPELLED)
def test_a_free_reply_is_held_from_where_a_call_begins(name: str, make: JsonGrammar) -> None:
    format, rng = SPELLED[name], random.Random(name)
    assert format.spelling is not None
    spelled = format.spelling.begin + format.spelling.call_begin.replace("{name}", "get_weather")
    constraint = TriggeredConstraint(format, list(TOOLS.values()), make, once=True, marks=NO_MARKS)
    before = "" if format.at_start and not format.opens else "Let me see. "
    before = "" if name == "llama3" else before
    data = b""
    for token in tokens(make, before + spelled):
        constraint.take(token)
        data += make.bytes_of(token)
    assert not constraint.ended and len(bits(constraint)) < 2000
    text = data.decode()
    told, calls = read(format, (text.partition("Let me see. ")[2] or text) + walk(constraint, make, rng))
    assert len(calls) == 1 and fits(calls[0]) and not told


def test_text_without_a_call_stays_free(make: JsonGrammar) -> None:
    constraint = TriggeredConstraint(SPELLED["llama3"], list(TOOLS.values()), make, once=False, marks=NO_MARKS)
    for token in tokens(make, 'Some {"name": "x"} <tool_call> text'):
        constraint.take(token)
    assert constraint.mask().all() and not constraint.ended


@pytest.mark.parametrize("name", SPELLED)
def test_free_text_is_drafted_up_to_where_a_call_begins(name: str, make: JsonGrammar) -> None:
    format = SPELLED[name]
    assert format.spelling is not None
    constraint = TriggeredConstraint(format, list(TOOLS.values()), make, once=False, marks=Marks((("<think>", "</think>"),)))
    call = format.spelling.begin + format.spelling.call_begin.replace("{name}", "get_weather")
    text = [*tokens(make, f"<think>{call} is what I know.</think>" + ("" if format.at_start else "Let me see, é. ") + call)]
    free = make.all_tokens()
    for i, token in enumerate(text):
        found = constraint.ahead(text[i:], 1000)
        assert found.tokens == text[i:][: len(found.tokens)] and len(found.masks) == len(found.tokens) + 1
        assert all(np.array_equal(mask, free) for mask in found.masks)
        constraint.take(token)
        begins = not np.array_equal(constraint.mask(), free)
        assert begins == (not found.tokens), "the one that is not drafted is the one that begins a call"
        if begins:
            break
    assert begins and i > 5


def test_behind_a_call_the_reply_is_free_again_and_thoughts_begin_none(make: JsonGrammar) -> None:
    marks = Marks((("<think>", "</think>"),))
    constraint = TriggeredConstraint(SPELLED["hermes"], list(TOOLS.values()), make, once=False, marks=marks)
    everything = make.all_tokens().size * 32
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for token in tokens(make, f"<think>I could write <tool_call>x</think>Well.{call}\n{call} So."):
        constraint.take(token)
    assert len(bits(constraint)) == everything and not constraint.ended


@pytest.mark.parametrize(
    ("template", "prompt", "reply"),
    [
        ("", "<|im_start|>assistant\n", '<think>hm</think>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
        ("", "<|im_start|>assistant\n<think>\n", 'hm\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
        ("", "<|im_start|>assistant\n", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
        (
            "<|channel|><|message|>",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.now "
            "<|constrain|>json<|message|>{}",
        ),
    ],
)
def test_thoughts_may_stand_in_front_of_a_call_that_must_come(template: str, prompt: str, reply: str, make: JsonGrammar) -> None:
    marks = marks_of(template, prompt)
    format = SPELLED["harmony" if template else "hermes"]
    constraint = make.of_lark(calls_grammar(format, list(TOOLS.values()), make, parallel=True, marks=marks))
    for token in tokens(make, reply):
        constraint.take(token)
    assert constraint.may_end


def test_json_or_a_call(make: JsonGrammar) -> None:
    use = tool_use([{"name": "now"}])
    assert use is not None
    for reply in ('{"a": 1}', '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'):
        constraint = use.constraint(lambda: make, NO_MARKS, json.dumps({"type": "object", "required": ["a"]}))
        assert constraint is not None
        for token in tokens(make, reply):
            constraint.take(token)


def test_what_needs_a_grammar_and_what_does_not(make: JsonGrammar) -> None:
    def constraint(choice: str, *, strict: bool = False, parallel: bool = True, schema: Any = SCHEMA) -> Any:
        use = tool_use([{"name": "f", "parameters": schema, "strict": strict}], choice, parallel=parallel)
        assert use is not None
        return use.constraint(lambda: make, NO_MARKS, None)

    assert constraint("auto") is None
    assert isinstance(constraint("auto", strict=True), TriggeredConstraint) and isinstance(
        constraint("auto", parallel=False), TriggeredConstraint
    )
    assert constraint("required") is not None
    unknown = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "x", "unevaluatedItems": 5}}}
    with pytest.raises(ConstraintError):
        constraint("required", strict=True, schema=unknown)
    assert constraint("required", schema=unknown) is not None


def test_tokens_that_are_no_text_are_written_by_their_ids() -> None:
    tokenizer = Tokenizer.from_gguf(GgufFile.open(builtin_model("demo-dense")))
    made = JsonGrammar(tokenizer, tokenizer.n_vocab)
    assert made.spelled_parts('a </s>"b') == ['"a "', "<[1]>", '"\\"b"'] and made.spelled("") == '""'


def test_a_function_has_no_more_arguments_than_it_has_parameters() -> None:
    inner = {"type": "object", "properties": {"properties": {"type": "string"}}}
    schema = {"type": "object", "properties": {"a": inner, "b": {"anyOf": [inner, {"type": "null"}]}}, "$defs": {"x": inner}}
    shut = inner | {"additionalProperties": False}
    assert closed(schema) == {
        "type": "object",
        "properties": {"a": shut, "b": {"anyOf": [shut, {"type": "null"}]}},
        "$defs": {"x": shut},
        "additionalProperties": False,
    }
    together = {"allOf": [inner, {"$ref": "#/$defs/x"}], "$defs": {"x": inner}}
    for own in (
        together,
        {"properties": {"a": True}, "required": ["b"]},
        {"type": "object"},
        {"properties": {}, "additionalProperties": True},
        {"properties": {}, "$ref": "#/$defs/x"},
        True,
    ):
        assert closed(own) == own
