"""GLM 4.5 and later: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>, with or without line ends between."""

from vkback.api.tools.call import ToolCall
from vkback.api.tools.cursor import Cursor
from vkback.api.tools.format import Format, Parameters, Spelling, Tools, call_of
from vkback.api.tools.tagged import argument_of

OPEN, CLOSE, KEY, VALUE = "<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>"


class Glm(Format):
    name = "glm-4.5"
    signs = (KEY,)
    opens = (OPEN,)
    spelling = Spelling("", f"{OPEN}{{name}}\n", CLOSE, "", "\n", Parameters(f"{KEY}{{key}}</arg_key>\n{VALUE}", "</arg_value>\n"))

    def read(self, cursor: Cursor, tools: Tools) -> list[ToolCall]:
        cursor.take(OPEN)
        name, mark = cursor.named(KEY, CLOSE)
        values = {}
        while mark == KEY:
            key = cursor.until("</arg_key>")[0].strip()
            cursor.skip()
            cursor.take(VALUE)
            text, _ = cursor.until("</arg_value>")
            values[key] = argument_of(key, text, tools.get(name))
            cursor.skip()
            mark = cursor.take(KEY, CLOSE)
        return [call_of(name, values)]
