"""Qwen3-Coder, Qwen 3.5, Nemotron 3: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, with line ends
between. Seed-OSS the same within <seed:tool_call>."""

from vkback.api.tools.format import Parameters, Spelling
from vkback.api.tools.tagged import Tagged, Tags


class QwenCoder(Tagged):
    name = "qwen-coder"
    tags = Tags("<tool_call>", ("<function=", ">"), ("<parameter=", ">"), "</parameter>", "</function>", "</tool_call>")
    opens: tuple[str, ...] = ("<tool_call>", "<function=")
    lines = True
    spelling = Spelling(
        "", "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", "", "\n", Parameters("<parameter={key}>\n", "\n</parameter>\n")
    )

    def is_of(self, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template


class SeedOss(QwenCoder):
    name = "seed-oss"
    tags = Tags("<seed:tool_call>", ("<function=", ">"), ("<parameter=", ">"), "</parameter>", "</function>", "</seed:tool_call>")
    opens = ("<seed:tool_call>",)
    lines = False
    spelling = Spelling(
        "",
        "<seed:tool_call>\n<function={name}>\n",
        "</function>\n</seed:tool_call>",
        "",
        "\n",
        Parameters("<parameter={key}>", "</parameter>\n"),
    )

    def is_of(self, template: str) -> bool:
        return "<seed:tool_call>" in template
