"""Grammars of calls in the language of llguidance (Lark), and what holds a reply to them: from its first token where a call must come, else
from where one begins.

Tokens that are no text stand in a grammar by their ids; `spelled` writes a text so.
"""

from __future__ import annotations

import codecs
import copy
import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback.api.reasoning import Marks, ReplyReader
from vkback.api.tools.call import Tool
from vkback.api.tools.format import Format, Spelling, takes_text
from vkback.engine.constraint import SPACE, Ahead, ConstraintError, JsonGrammar, SchemaConstraint, closed

ANY_TEXT = "/(.|\\n)*/"
GAP = "/[ \\n]{0,4}/"
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

ANALYSIS, AFTER_ANALYSIS = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"


def calls_grammar(
    format: Format, tools: Sequence[Tool], make: JsonGrammar, *, parallel: bool, marks: Marks, begun: str = "", schema: str | None = None
) -> str:
    """Of a reply that must be calls, or JSON of a schema, if there is one; thoughts of the family may stand in front. begun: what the
    prompt has of it."""
    spelling = _spelling(format)
    openings = [_opening(spelling, tool).removeprefix(begun) for tool in tools]
    lines = _rules(spelling, tools, openings, make, again=parallel and not marks.channels)
    what = "calls"
    if schema is not None:
        lines.append(f"json: %json {_with_space(closed(json.loads(schema)))}")
        what = "(calls | json)"
    start = what
    if marks.channels:
        lines += [f"thought: {make.spelled(ANALYSIS)} thoughts", *_text_up_to("thoughts", AFTER_ANALYSIS, make)]
        start = f"thought? {what}"
    elif marks.inside:
        lines += [f"thought: thoughts {GAP}", *_text_up_to("thoughts", marks.inside, make)]
        start = f"thought {what}"
    elif marks.pairs:
        begin, end = marks.pairs[-1]
        lines += [f"thought: {make.spelled(begin)} thoughts {GAP}", *_text_up_to("thoughts", end, make)]
        start = f"thought? {what}"
    return "\n".join(["%llguidance {}", f"start: {start}", *lines, ""])


def rest_of_call(format: Format, tools: Sequence[Tool], make: JsonGrammar, *, parallel: bool, trigger: str, written: str) -> str:
    """Of a section of calls of which this is written, from its trigger on; "" where it is none of these tools'."""
    spelling = _spelling(format)
    openings = []
    for tool in tools:
        opening = _opening(spelling, tool)
        opening = opening[opening.index(trigger.replace("{name}", tool.name)) :]
        openings.append(opening[len(written) :] if opening.startswith(written) else None)
    if openings.count(None) == len(openings):
        return ""
    again = parallel and bool(spelling.begin)  # sections of one call begin with a trigger each
    return "\n".join(["%llguidance {}", "start: calls", *_rules(spelling, tools, openings, make, again=again), ""])


def trigger_of(format: Format) -> str:
    """The part of a spelled call by which its grammar begins to hold."""
    spelling = _spelling(format)
    spelled = spelling.begin + spelling.call_begin
    return format.trigger or max((mark for mark in (*format.opens, *format.at_start) if spelled.startswith(mark)), key=len)


def _spelling(format: Format) -> Spelling:
    if format.spelling is None:
        raise ConstraintError(f"[tools] calls of this model's format, {format.name}, cannot be held to a grammar; use tool_choice auto")
    return format.spelling


def _opening(spelling: Spelling, tool: Tool) -> str:
    return spelling.begin + spelling.call_begin.replace("{name}", tool.name)


def _rules(spelling: Spelling, tools: Sequence[Tool], openings: Sequence[str | None], make: JsonGrammar, *, again: bool) -> list[str]:
    """`calls`, of which the first ones begin with these openings, where those are there."""
    first = " | ".join(f"first_{i}" for i, opening in enumerate(openings) if opening is not None)
    lines = [f"calls: ({first}){f' ({make.spelled(spelling.separator)} call)*' if again else ''} {make.spelled(spelling.end)}"]
    if again:
        lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, (tool, opening) in enumerate(zip(tools, openings, strict=True)):
        end = make.spelled(spelling.call_end)
        if opening is not None:
            lines.append(f"first_{i}: {make.spelled(opening)} arguments_{i} {end}")
        if again:
            lines.append(f"call_{i}: {make.spelled(spelling.call_begin.replace('{name}', tool.name))} arguments_{i} {end}")
        if again or opening is not None:
            lines += _arguments(f"arguments_{i}", tool, spelling, make)
    return lines


def _arguments(rule: str, tool: Tool, spelling: Spelling, make: JsonGrammar) -> list[str]:
    schema: Mapping[str, Any] = closed(tool.parameters)
    if not make.knows(schema):
        schema = tool.parameters
    if not make.knows(schema):
        if tool.strict:
            make.constraint(schema)  # raises what is wrong with it
        schema = ANY_OBJECT
    if spelling.arguments is None:
        return [f"{rule}: %json {_with_space(schema)}"]
    parts, lines = [], []
    for i, (key, own) in enumerate((schema.get("properties") or {}).items()):
        part, text = f"{rule}_{i}", takes_text(own, schema)
        begin = spelling.arguments.begin.replace("{key}", key).replace("{is_text}", "true" if text else "false")
        end = make.spelled(spelling.arguments.end)
        parts.append(part + ("" if key in schema.get("required", ()) else "?"))
        lines.append(f"{part}: {make.spelled(begin)} {part}_value")
        values = own.get("enum") if isinstance(own, Mapping) else None
        if text and isinstance(values, list) and all(isinstance(v, str) for v in values):
            lines.append(f"{part}_value: ({' | '.join(make.spelled(v) for v in values)}) {end}")
        elif text:
            lines += _text_up_to(f"{part}_value", spelling.arguments.end, make)
        else:
            inner = {**own, "$defs": schema.get("$defs", {})} if isinstance(own, Mapping) else own
            lines += [f"{part}_value: {part}_json {end}", f"{part}_json: %json {_with_space(inner)}"]
    return [f"{rule}: {' '.join(parts) or make.spelled('')}", *lines]


def _with_space(schema: Any) -> str:
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": SPACE}} if isinstance(schema, Mapping) else schema)


def _text_up_to(rule: str, end: str, make: JsonGrammar) -> list[str]:
    """Rules of any text and an end."""
    first, *rest = make.spelled_parts(end)
    if first.startswith("<["):  # a token that no text has
        return [f"{rule}: {rule}_text {' '.join((first, *rest))}", f"{rule}_text: {ANY_TEXT}"]
    return [f"{rule}: {' '.join((f'{rule}_text', *rest))}", f"{rule}_text[lazy]: {ANY_TEXT} {first}"]


class TriggeredConstraint:
    """A reply that is free until a call begins, and again behind it; see Constraint. once: it ends with the first call."""

    def __init__(self, format: Format, tools: Sequence[Tool], make: JsonGrammar, *, once: bool, marks: Marks) -> None:
        """Raises ConstraintError for what no grammar can be made of."""
        self._format, self._tools, self._make, self._once = format, tools, make, once
        trigger = trigger_of(format)
        self._triggers = {trigger.replace("{name}", tool.name): trigger for tool in tools}
        self._at_start = trigger in format.at_start
        self._white = string.whitespace + format.between
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._reader = None if marks.channels else ReplyReader(marks)
        self._free = make.all_tokens()
        self._inner: SchemaConstraint | None = None
        self._tail, self._came = "", False  # the end of the text, in which a trigger may begin; whether text stands before it
        make.of_lark(rest_of_call(format, tools, make, parallel=not once, trigger=trigger, written=""))

    @property
    def ended(self) -> bool:
        return self._inner is not None and (self._inner.ended or (self._once and self._inner.may_end))

    def mask(self) -> npt.NDArray[np.int32]:
        return self._free if self._inner is None else self._inner.mask()

    def ahead(self, tokens: Sequence[int], most: int) -> Ahead:
        if self._inner is not None:
            return self._inner.ahead(tokens, most, to_end=False)
        found = Ahead(masks=[self._free])
        if guessed := tokens[:most]:
            text = self._copy()
            for token in guessed:
                if text._begins(token) is not None:
                    break  # what comes behind it has a grammar
                found.tokens.append(token)
                found.masks.append(self._free)
        return found

    def _copy(self) -> TriggeredConstraint:
        """Of a reply in which no call has begun: what it has read so far."""
        found = copy.copy(self)
        found._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        found._decoder.setstate(self._decoder.getstate())
        found._reader = copy.deepcopy(self._reader)
        return found

    def take(self, token: int) -> None:
        if self._inner is None:
            if (found := self._begins(token)) is not None:
                trigger, written = found
                grammar = rest_of_call(self._format, self._tools, self._make, parallel=not self._once, trigger=trigger, written=written)
                self._inner = self._make.of_lark(grammar) if grammar else None
                self._tail, self._came = "", True
            return
        self._inner.take(token)
        if self._inner.may_end and not self._once:
            self._inner, self._tail, self._came = None, "", False

    def _begins(self, token: int) -> tuple[str, str] | None:
        """A token of free text: the trigger with which a call has begun, and what is written of the call."""
        text = self._decoder.decode(self._make.bytes_of(token))
        self._tail += text if self._reader is None else self._reader.feed(text)[1]
        if self._at_start and not self._came:
            self._tail = self._tail.lstrip(self._white)
        if self._at_start and self._came:
            found = None
        elif self._at_start:
            found = next(((0, trigger) for trigger in self._triggers if self._tail.startswith(trigger)), None)
        else:
            found = min(((at, trigger) for trigger in self._triggers if (at := self._tail.find(trigger)) >= 0), default=None)
        if found is not None:
            return self._triggers[found[1]], self._tail[found[0] :]
        self._came = self._came or bool(self._tail.strip(self._white))
        longest = max(map(len, self._triggers))
        self._tail = self._tail[1 - longest :] if longest > 1 else ""
        return None
