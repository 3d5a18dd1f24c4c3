"""Tools from Python functions and dicts, and how a conversation has calls and results in templates of every kind."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest

from vkback.api.chat_template import CHATML, compose, takes_of
from vkback.api.errors import ModelError
from vkback.api.tools.call import ToolCall
from vkback.api.tools.conversation import Takes, short
from vkback.api.tools.functions import run, tool_of
from vkback.api.tools.use import tool_use

pydantic = pytest.importorskip("pydantic", reason="vkback[serve] is not installed")


class Unit(enum.Enum):
    C = "C"
    F = "F"


class Place(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    """Where."""

    name: str
    title: str | None = None


def get_weather(city: str, days: int = 1, unit: Unit = Unit.C, where: Place | None = None, mode: Literal["now", "then"] = "now") -> str:
    """What the weather is
    in a city.

    Args:
        city: its name, in English
        days (int): how many days
    Returns:
        text
    """
    return f"{city}, {days}, {unit.value}, {where.name if where else '-'}, {mode}"


def noted(a: Annotated[int, "the first one"], b: float = 0.5) -> Any:
    """Adds.

    :param b: the other
    """
    return {"sum": a + b}


# --- from Python


def test_a_function_s_schema_is_of_its_type_hints_and_docstring() -> None:
    tool = tool_of(get_weather)
    assert (tool.name, tool.description, tool.strict) == ("get_weather", "What the weather is in a city.", False)
    properties = tool.parameters["properties"]
    assert list(properties) == ["city", "days", "unit", "where", "mode"] and tool.parameters["required"] == ["city"]
    assert properties["city"] == {"type": "string", "description": "its name, in English"}
    assert properties["days"] == {"type": "integer", "default": 1, "description": "how many days"}
    assert properties["mode"]["enum"] == ["now", "then"] and tool.parameters["additionalProperties"] is False
    assert tool.parameters["$defs"]["Place"]["properties"]["title"]["default"] is None
    assert tool_of(noted).parameters["properties"] == {
        "a": {"type": "integer", "description": "the first one"},
        "b": {"type": "number", "default": 0.5, "description": "the other"},
    }
    assert tool_of(Place).parameters["properties"]["name"] == {"type": "string"}


def test_a_call_gets_values_of_the_types_that_the_function_has() -> None:
    functions: dict[str, Callable[..., Any]] = {"get_weather": get_weather, "noted": noted}

    def called(name: str, **arguments: Any) -> str:
        return run(functions, ToolCall(name, json.dumps(arguments), "1"))

    assert called("get_weather", city="Rome", unit="F", where={"name": "x"}) == "Rome, 1, F, x, now"
    assert called("noted", a=1) == '{"sum":1.5}'
    assert called("noted", a="x") == (
        "error: the arguments do not fit: a: Input should be a valid integer, unable to parse string as an integer"
    )
    assert "Extra inputs" in called("noted", a=1, c=2)
    assert called("other") == "error: there is no function 'other'; there are get_weather, noted"


def bad_arguments(*rest: int) -> None: ...


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        ([bad_arguments], "auto", r"bad_arguments: parameter \*rest"),
        ("get_weather", "auto", "expected a list of functions"),
        ([5], "auto", "tool 0 is 5"),
        ([int], "auto", "expected a function, a class of pydantic"),
        ([get_weather, get_weather], "auto", "two tools are called 'get_weather'"),
        ([get_weather], "other", "there is no tool 'other', expected auto, none, required, get_weather"),
        ([], "required", "there are no tools"),
        ([{"type": "custom", "custom": {}}], "auto", "of type 'custom'"),
        ([{"name": "a b"}], "auto", "called 'a b'"),
        ([{"name": "a", "parameters": {"type": "array"}}], "auto", "expected a JSON schema of an object"),
    ],
)
def test_what_no_tool_can_be_made_of(tools: Any, choice: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        tool_use(tools, choice)


def test_choices() -> None:
    def chosen(choice: Any) -> Any:
        use = tool_use([get_weather, noted], choice)
        return use and (use.choice, use.allowed, use.parallel)

    both = ("get_weather", "noted")
    assert chosen("auto") == chosen(None) == ("auto", both, True)
    assert chosen("none") is None and tool_use([]) is None and tool_use(None) is None
    assert chosen("required") == chosen("any") == ("required", both, True)
    named = ("required", ("noted",), False)
    assert (
        chosen("noted") == chosen({"type": "function", "function": {"name": "noted"}}) == chosen({"type": "tool", "name": "noted"}) == named
    )
    listed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "noted"}}]}
    assert chosen({"type": "allowed_tools", "allowed_tools": listed}) == ("auto", ("noted",), True)


# --- in conversations

CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
]

QWEN = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_ARGUMENTS = QWEN.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
NULL_CONTENT = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}<|tool|>{{ c.function.name }}"
    "{{ c['function']['arguments'] + '' }}{% endfor %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids') }}"
    "{% endif %}[TOOL_CALLS]{{ c.function.name }} {{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}{% if m.role == 'tool' %}"
    "[{{ m.tool_call_id }} {{ m.name }}]{% endif %}{{ m.content }}{% endfor %}"
)


def test_what_a_template_has_a_place_for() -> None:
    assert takes_of(QWEN) == Takes(True, True)
    assert takes_of(TEXT_ARGUMENTS) == Takes(True, True, objects=False)
    assert takes_of(NULL_CONTENT) == Takes(False, True, objects=False, bare=True)
    assert takes_of(NINE) == Takes(False, True)
    assert takes_of(CHATML) == Takes(False, False, results=False)


def text_of(template: str) -> str:
    use = tool_use([get_weather])
    assert use is not None
    return compose(template, CONVERSATION, model="m", tools=list(use.tools.values())).text


def test_calls_and_results_as_templates_take_them() -> None:
    qwen = text_of(QWEN)
    assert '{"type": "function", "function": {"name": "get_weather", "description": "What the weather is in a city.", "parameters"' in qwen
    assert qwen.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nRain<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text_of(TEXT_ARGUMENTS) == qwen
    assert text_of(NULL_CONTENT).endswith('[user]Weather?<|tool|>get_weather{"city": "Rome"}[tool]Rain')
    id = short("call_1")
    assert text_of(NINE).endswith(f'[TOOL_CALLS]get_weather {id}{{"city": "Rome"}}[{id} get_weather]Rain') and len(id) == 9
    assert short("abcdefghi") == "abcdefghi" and short("call_2") != id


def test_a_template_without_a_place_for_tools_has_them_as_text() -> None:
    assert text_of(CHATML).startswith("<|im_start|>system\nYou may call functions")
    assert text_of(CHATML).endswith(
        'assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nRain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    users = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    said = compose(users, [*CONVERSATION, {"role": "tool", "tool_call_id": "2", "content": "Sun"}], model="m").text
    assert said.endswith("[user]<tool_response>\nRain\n</tool_response>\n<tool_response>\nSun\n</tool_response>")
