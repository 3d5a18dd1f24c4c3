"""gpt-oss: a message of the assistant to a recipient, <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>.
The recipient may stand before the channel. vkback/api/reasoning.py passes such messages on from their <|start|>."""

import re

from vkback.api.tools.call import ToolCall
from vkback.api.tools.cursor import Cursor, Malformed
from vkback.api.tools.format import Format, Spelling, Tools, call_of

START, CHANNEL, MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
TO = "to=functions."
ENDS = ("<|call|>", "<|end|>", "<|return|>")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z_][\w.\-]*)", re.ASCII)


class Harmony(Format):
    name = "harmony"
    opens = (START,)
    spelling = Spelling("", f"{CHANNEL}commentary {TO}{{name}} <|constrain|>json{MESSAGE}", "", "")
    trigger = TO

    def is_of(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        cursor.take(START)
        head, _ = cursor.until(MESSAGE)
        recipient = RECIPIENT.search(head)
        if recipient is None:
            raise Malformed
        found = call_of(recipient[1], cursor.json())
        cursor.close(*ENDS)
        return [found]
