"""Calls in replies, as each family writes them: read whole, and cut into pieces anywhere; what is no call stays text, in full."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from vkback.api.tools.call import Tool, ToolCall
from vkback.api.tools.format import Format
from vkback.api.tools.formats.deepseek import CALL, CALL_END, CALLS, CALLS_END, DSML, SEP
from vkback.api.tools.known import FORMATS, GENERAL, format_of
from vkback.api.tools.reader import CallReader

WEATHER = Tool(
    "get_weather",
    "What the weather is.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["C", "F"]},
            "at": {"type": "array", "items": {"type": "number"}},
            "where": {"$ref": "#/$defs/Place"},
        },
        "required": ["city"],
        "$defs": {"Place": {"type": "object", "properties": {"name": {"type": "string"}}}},
    },
)
TIME = Tool("now", "What time it is.", {"type": "object", "properties": {}})
PYTHON = Tool("python", "Runs code.", {"type": "object", "properties": {"code": {"type": "string"}}})
TOOLS = {tool.name: tool for tool in (WEATHER, TIME, PYTHON)}
BY_NAME: dict[str, Format] = {format.name: format for format in (*FORMATS, GENERAL)}

PARIS = ("get_weather", {"city": "Paris"})
ODD = ("get_weather", {"city": 'A "b" {c}\n</x>', "days": 2})
NOW: tuple[str, dict[str, Any]] = ("now", {})
ODD_JSON = json.dumps(ODD[1])

CASES: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    # format, reply, the text in it, the calls
    ("hermes", 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "Let me see.", [PARIS]),
    (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {ODD_JSON}}}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>\n',
        "",
        [ODD, NOW],
    ),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}', "", [NOW]),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}\n</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb"}}</tool_call>x', "x", [("get_weather", {"city": "a\nb"})]),
    ("general", '{"name": "get_weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
    ("general", '```json\n[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "now"}]\n```\n', "", [PARIS, NOW]),
    ("general", 'So:\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "So:", [NOW]),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3", '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3", '{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Paris"}}', "", [NOW, PARIS]),
    ("llama3", '<|python_tag|>get_weather.call(city="Paris")', "", [PARIS]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        "",
        [PARIS, NOW],
    ),
    ("mistral-args", f"Sure.[TOOL_CALLS]get_weather[ARGS]{ODD_JSON}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{{}}", "Sure.", [ODD, NOW]),
    ("mistral-args", '[TOOL_CALLS]get_weather{"city": "Paris"}', "", [PARIS]),
    (
        "harmony",
        '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        "",
        [PARIS],
    ),
    ("harmony", "It is.<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}", "It is.", [NOW]),
    (
        "qwen-coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "I look.",
        [PARIS, NOW],
    ),
    (
        "qwen-coder",
        "<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
        "<parameter=at>\n[1, 2.5]\n</parameter>\n<parameter=units>\nC\n</parameter>\n"
        '<parameter=where>\n{"name": "x"}\n</parameter>\n</function>',
        "",
        [("get_weather", {"city": "12", "days": 12, "at": [1, 2.5], "units": "C", "where": {"name": "x"}})],
    ),
    (
        "seed-oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        "",
        [PARIS],
    ),
    (
        "minimax-m2",
        'Well.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        '<invoke name="now">\n'
        "</invoke>\n</minimax:tool_call>",
        "Well.",
        [PARIS, NOW],
    ),
    (
        "glm-4.5",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call><tool_call>now</tool_call>",
        "",
        [("get_weather", {"city": "Paris", "days": 3}), NOW],
    ),
    (
        "deepseek-v3",
        f'{CALLS}{CALL}function{SEP}get_weather\n```json\n{{"city": "Paris"}}\n```{CALL_END}\n{CALL}function{SEP}now\n```json\n{{}}\n```'
        f"{CALL_END}{CALLS_END}",
        "",
        [PARIS, NOW],
    ),
    ("deepseek-v3.1", f"Yes.{CALLS}{CALL}get_weather{SEP}{ODD_JSON}{CALL_END}{CALL}now{SEP}{{}}{CALL_END}{CALLS_END}", "Yes.", [ODD, NOW]),
    (
        "deepseek-v3.2",
        f'<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n<{DSML}parameter name="city" string="true">Paris</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>',
        "",
        [("get_weather", {"city": "Paris", "days": 3})],
    ),
    (
        "kimi-k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [PARIS, NOW],
    ),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Paris, {so}<|"|>,days:2,at:[1,2.5],where:{name:<|"|>x<|"|>}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "",
        [("get_weather", {"city": "Paris, {so}", "days": 2, "at": [1, 2.5], "where": {"name": "x"}}), NOW],
    ),
    ("functiongemma", "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>", "", [PARIS]),
    ("gemma3", '```tool_code\nget_weather(city="Paris")\n```', "", [PARIS]),
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', "", [NOW]),
    ("nemotron", '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>', "", [PARIS]),
    ("firefunction", 'functools[{"name": "now", "arguments": {}}]', "", [NOW]),
    ("functionary-3.1", '<function=get_weather>{"city": "Paris"}</function><function=now>{}</function>', "", [PARIS, NOW]),
    ("functionary-3.2", '>>>all\nI look.\n>>>get_weather\n{"city": "Paris"}\n>>>now\n{}', "I look.", [PARIS, NOW]),
    ("functionary-3.2", ">>>python\nprint(1)\n", "", [("python", {"code": "print(1)"})]),
    (
        "command-r7b",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}\n]<|END_ACTION|>',
        "",
        [PARIS],
    ),
    ("command-r", 'Action: ```json\n[\n    {"tool_name": "get_weather", "parameters": {"city": "Paris"}}\n]```', "", [PARIS]),
    ("command-r", 'Action:```json\n[{"tool_name": "directly-answer", "parameters": {}}]```Yes.', "Yes.", []),
    ("apertus", '<|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"now": {}}]<|tools_suffix|>', "", [PARIS, NOW]),
    ("lfm2", '<|tool_call_start|>[get_weather(city="Paris"), now()]<|tool_call_end|>Wait.', "Wait.", [PARIS, NOW]),
    ("llama4", '[get_weather(city="Paris]", at=[1, -2.5]), now()]', "", [("get_weather", {"city": "Paris]", "at": [1, -2.5]}), NOW]),
    (
        "olmo3",
        '<function_calls>\nget_weather("Paris", days=None)\nnow()\n</function_calls>',
        "",
        [("get_weather", {"city": "Paris", "days": None}), NOW],
    ),
]


def read(format: Format, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    reader = CallReader(format, TOOLS)
    told = [reader.feed(piece) for piece in pieces] + [reader.flush()]
    assert not reader.holds and reader.calls == [call for _, calls in told for call in calls]
    return "".join(text for text, _ in told), reader.calls


def plain(calls: list[ToolCall]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.values) for call in calls]


def cuts(text: str, rng: random.Random) -> list[list[str]]:
    """The whole, in characters, in two at each place, and in random pieces."""
    found = [[text], list(text)] + [[text[:at], text[at:]] for at in range(1, len(text))]
    for _ in range(20):
        at = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(1, 9))))
        found.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    return found


@pytest.mark.parametrize(("name", "reply", "text", "calls"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_calls_are_read_however_the_reply_is_cut(name: str, reply: str, text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    for pieces in cuts(reply, random.Random(reply)):
        found, made = read(BY_NAME[name], pieces)
        assert (found, plain(made)) == (text, calls), pieces


def test_each_format_has_a_case() -> None:
    assert {case[0] for case in CASES} == BY_NAME.keys()


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_no_call_stays_text_and_is_the_same_however_it_is_cut(name: str) -> None:
    """Replies of the family with a character taken out, doubled or changed, or cut off: either calls are read, or all is there."""
    rng = random.Random(name)
    replies = [case[1] for case in CASES if case[0] == name]
    for _ in range(150):
        reply = rng.choice(replies)
        at = rng.randrange(len(reply))
        damaged = rng.choice([reply[:at], reply[:at] + reply[at + 1 :], reply[:at] + rng.choice('<{"}x\n') + reply[at:], reply[at:]])
        text, calls = read(BY_NAME[name], [damaged])
        if not calls and name not in ("functionary-3.2", "command-r"):  # their marks of plain text are dropped
            assert text == damaged
        for pieces in [list(damaged), *rng.sample(cuts(damaged, rng), 5)] if damaged else []:
            again, made = read(BY_NAME[name], pieces)
            assert (again, plain(made)) == (text, plain(calls)), (damaged, pieces)


@pytest.mark.parametrize("name", BY_NAME)
def test_text_without_calls_comes_as_it_is(name: str) -> None:
    text = "  Plain text, with {braces}, [brackets], `code` and a < b.\n\n"
    for pieces in cuts(text, random.Random(1)):
        assert read(BY_NAME[name], pieces) == (text, [])


def test_text_is_not_held_longer_than_a_mark_may_begin_in_it() -> None:
    reader = CallReader(BY_NAME["hermes"], TOOLS)
    assert [reader.feed(piece)[0] for piece in ("Let", " us", " <", "b>", " <tool", "_cal", "m>")] == [
        "Let",
        " us",
        "",
        " <b>",
        "",
        "",
        " <tool_calm>",
    ]


def test_a_long_call_takes_no_longer_than_its_length() -> None:
    reader = CallReader(BY_NAME["hermes"], TOOLS)
    reader.feed('<tool_call>{"name": "python", "arguments": {"code": "')
    for _ in range(20_000):
        assert reader.feed("x = 1; ") == ("", [])
    ((call,),) = [reader.feed('"}}</tool_call>')[1]]
    assert len(call.values["code"]) == 140_000


SIGNS = {
    '{%- for tool in tools %}<tool_call>\n{"name": <function-name>}': "hermes",
    "<tool_call>\n<function=example>\n<parameter=a>\n": "qwen-coder",
    "<seed:tool_call><function=a><parameter=b>": "seed-oss",
    "<tool_call>{{ name }}<arg_key>": "glm-4.5",
    "<|start_header_id|>ipython<|end_header_id|>": "llama3",
    "<|python_tag|>": "llama3",
    "[AVAILABLE_TOOLS][TOOL_CALLS]": "mistral",
    "[TOOL_CALLS]{{ name }}[ARGS]": "mistral-args",
    "<|channel|>analysis<|message|>": "harmony",
    f"{CALLS}{CALL}function{SEP}```json": "deepseek-v3",
    f"{CALLS}{CALL}{SEP}": "deepseek-v3.1",
    "<minimax:tool_call>": "minimax-m2",
    "<|tool_call>call:": "gemma4",
    "<|tool_call|>": "granite",
    ">>>all\n": "functionary-3.2",
    "<function=name>{}</function>": "functionary-3.1",
    "<|START_ACTION|>": "command-r7b",
    "Action: ```json": "command-r",
    "{{ tools }}": "general",
}


@pytest.mark.parametrize("template", SIGNS)
def test_the_format_is_found_from_the_template(template: str) -> None:
    assert format_of(template).name == SIGNS[template]
