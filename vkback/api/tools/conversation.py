"""Calls and their results in a conversation, in the form that its template takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vkback.api.tools.call import ID_CHARS, ID_LENGTH, Tool, written
from vkback.api.tools.formats.general import instructions, written_call, written_result

Messages = Sequence[Mapping[str, Any]]
Tried = Callable[[Messages, Mapping[str, Any]], str | None]
"""What a template makes of messages and variables; None where it fails."""

NEEDLE, KEY, VALUE, RESULT = "vkback_asks_this", "asked_key", "asked_value", "asked result"
CALL_ID = "abcdefghi"


@dataclass(frozen=True)
class Takes:
    """What a template has a place for.

    tools      what there is to be called
    calls      an assistant's calls; arguments: as objects, else as JSON; bare: where the content is null alone
    results    messages of the role "tool"
    """

    tools: bool
    calls: bool
    objects: bool = True
    bare: bool = False
    results: bool = True


def takes(tried: Tried) -> Takes:
    """Of a template, by what comes out of it."""
    user = {"role": "user", "content": "Hello"}
    tool = Tool(NEEDLE, "Does it.", {"type": "object", "properties": {KEY: {"type": "string", "description": VALUE}}, "required": [KEY]})
    text = tried([user], {"tools": [tool.plain()]})
    has_tools = text is not None and NEEDLE in text
    result = {"role": "tool", "content": RESULT, "tool_call_id": CALL_ID, "name": NEEDLE}
    for bare in (False, True):
        for objects in (True, False):
            arguments: Any = {KEY: VALUE}
            call = {
                "id": CALL_ID,
                "type": "function",
                "function": {"name": NEEDLE, "arguments": arguments if objects else written(arguments)},
            }
            said = {"role": "assistant", "content": None if bare else "", "tool_calls": [call]}
            for rest in ([result], [result, {"role": "assistant", "content": "Done."}, user], []):
                text = tried([user, said, *rest], {"tools": [tool.plain()]} if has_tools else {})
                if text is not None and _has_call(text):
                    return Takes(has_tools, True, objects, bare, RESULT in text)
    return Takes(has_tools, False, results=False)


def _has_call(text: str) -> bool:
    """Whether the call stands in it, behind what tells of the tool: neither as Python writes a dict, nor as JSON in JSON."""
    after = text[text.rindex("Hello") :] if "Hello" in text else text
    return NEEDLE in after and f"'{KEY}'" not in after and f'\\"{KEY}' not in after


def adapted(conversation: Messages, tools: Sequence[Tool], has: Takes, template: str) -> list[Mapping[str, Any]]:
    """Messages as the template takes them: what it has no place for is text, calls and results in their messages, tools in the system's."""
    names = {call.get("id"): _function(call).get("name") for m in conversation for call in m.get("tool_calls") or ()}
    short_ids = "length != 9" in template or "length == 9" in template
    found: list[Mapping[str, Any]] = []
    for message in conversation:
        if message.get("tool_calls"):
            found += _with_calls(message, has, short_ids)
        elif message["role"] == "tool":
            result = {"name": names.get(message.get("tool_call_id")) or "", **message}
            if short_ids and isinstance(id := message.get("tool_call_id"), str):
                result["tool_call_id"] = short(id)
            if not has.results:
                text = written_result(message["content"])
                if found and found[-1].get("of_tools"):
                    text = f"{found.pop()['content']}\n{text}"
                result = {"role": "user", "content": text, "of_tools": True}
            found.append(result)
        else:
            found.append(message)
    found = [{k: v for k, v in message.items() if k != "of_tools"} for message in found]
    if tools and not has.tools:
        said = instructions(tools)
        if found[0]["role"] in ("system", "developer"):
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{said}" if found[0]["content"] else said}
        else:
            found.insert(0, {"role": "system", "content": said})
    return found


def _with_calls(message: Mapping[str, Any], has: Takes, short_ids: bool) -> list[Mapping[str, Any]]:
    content, calls = message["content"], message["tool_calls"]
    if not has.calls:
        spelled = [written_call(str(_function(call).get("name")), _text(_function(call).get("arguments"))) for call in calls]
        rest = {k: v for k, v in message.items() if k != "tool_calls"}
        return [{**rest, "content": "\n".join([content, *spelled] if content else spelled)}]
    told = [_rewritten(call, has, short_ids) for call in calls]
    if has.bare:
        said = [{k: v for k, v in message.items() if k != "tool_calls"}] if content else []
        return [*said, {**message, "content": None, "tool_calls": told}]
    return [{**message, "tool_calls": told}]


def _rewritten(call: Mapping[str, Any], has: Takes, short_ids: bool) -> dict[str, Any]:
    own = _function(call)
    arguments = own.get("arguments")
    function = {**own, "arguments": _object(arguments) if has.objects else _text(arguments)}
    id = call.get("id")
    return {"type": "function", **call, "function": function} | ({"id": short(id)} if short_ids and isinstance(id, str) else {})


def short(id: str) -> str:
    """An id of a call as templates of Mistral take it: that itself, or another that is always the same."""
    if len(id) == ID_LENGTH and all(c in ID_CHARS for c in id):
        return id
    number = int.from_bytes(hashlib.sha256(id.encode()).digest()[:8], "little")
    return "".join(ID_CHARS[number // len(ID_CHARS) ** i % len(ID_CHARS)] for i in range(ID_LENGTH))


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    found = call.get("function", call)
    return found if isinstance(found, Mapping) else {}


def _object(arguments: Any) -> Any:
    """Arguments as an object; a text that is no JSON as it is."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else written(arguments or {})
