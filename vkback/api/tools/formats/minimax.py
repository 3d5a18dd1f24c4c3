"""MiniMax M2: <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>, with line ends
between."""

from vkback.api.tools.format import Parameters, Spelling
from vkback.api.tools.tagged import Tagged, Tags


class MiniMax(Tagged):
    name = "minimax-m2"
    signs = ("<minimax:tool_call>",)
    tags = Tags(
        "<minimax:tool_call>", ('<invoke name="', '">'), ('<parameter name="', '">'), "</parameter>", "</invoke>", "</minimax:tool_call>"
    )
    opens = ("<minimax:tool_call>",)
    spelling = Spelling(
        "<minimax:tool_call>\n",
        '<invoke name="{name}">\n',
        "</invoke>\n",
        "</minimax:tool_call>",
        "",
        Parameters('<parameter name="{key}">', "</parameter>\n"),
    )
