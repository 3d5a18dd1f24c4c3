"""Functionary. 3.1: <function=NAME>{...}</function>. 3.2: a reply is sections, >>>NAME and a line of JSON, or >>>all and text; the prompt
ends with the first >>>. Code for `python` stands as it is."""

from vkback.api.tools.call import ToolCall
from vkback.api.tools.cursor import Cursor, Malformed
from vkback.api.tools.format import Format, Spelling, Tools, call_of

SECTION, ALL, PYTHON = ">>>", "all", "python"


class Functionary31(Format):
    name = "functionary-3.1"
    opens = ("<function=",)
    spelling = Spelling("", "<function={name}>", "</function>", "")

    def is_of(self, template: str) -> bool:
        return "<function=" in template and "</function>" in template and "<parameter=" not in template

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        cursor.take("<function=")
        call = call_of(cursor.name(">"), cursor.json())
        cursor.close("</function>")
        return [call]


class Functionary32(Format):
    name = "functionary-3.2"
    signs = (f"{SECTION}{ALL}",)
    opens = (SECTION,)
    begun = (SECTION,)
    spelling = Spelling("", f"{SECTION}{{name}}\n", "", "", "\n")
    trigger = f"{SECTION}{{name}}\n"

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        cursor.take(SECTION)
        name = cursor.name("\n")
        if name == ALL:
            return []
        if name not in tools:
            raise Malformed
        cursor.skip()
        if name == PYTHON and not cursor.ended and not cursor.maybe("{"):
            return [call_of(name, {"code": self._code(cursor)})]
        if name == PYTHON and not cursor.ended:
            cursor.at -= 1
        return [call_of(name, cursor.json())]

    def _code(self, cursor: Cursor) -> str:
        """Up to the next section, or the end."""
        end = cursor.text.find(SECTION, cursor.at)
        if end < 0 and not cursor.last:
            raise cursor.more()
        code = cursor.text[cursor.at : end if end >= 0 else None]
        cursor.at += len(code)
        return code.rstrip()
