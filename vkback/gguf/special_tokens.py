"""Tokens with a meaning of their own, by their names: which end a text, which are shown, which take white space beside them.

A file says it of few: end-of-text, end-of-turn. The rest is known by the names that the makers of models gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Flag

from vkback.gguf.token_types import TokenType

END_NAMES = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[e~[",
    )
)
"""End a turn in the models that have them, whatever the file's eos id and the token's type are."""

GEMMA4_END = "<|tool_response>"
"""Where this is a token, </s> is a piece of text."""

FILE_ENDS: Mapping[str, tuple[str, ...]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""What ends a piece of code filled in, since another file would follow: the key of its id without `_token_id`, and its names."""

CHANNEL_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""gpt-oss writes a reply as several messages, each in a channel."""

CALL_MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "\uff5cDSML\uff5c",
)
"""What families write around calls of tools (vkback/api/tools/formats)."""

SHOWN_NAMES = frozenset(
    (
        *CHANNEL_MARKS,
        *CALL_MARKS,
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<seed:think>",
        "</seed:think>",
        "<|inner_prefix|>",
        "<|inner_suffix|>",
        "<|channel>",
        "<channel|>",
    )
)
"""Tokens whose text is a part of what a model writes, though their type says that it is not: what stands between them is its reasoning, or
a call of a tool."""


class Strip(Flag):
    """White space that a token takes from the text beside it."""

    LEFT = 1
    RIGHT = 2


def by_name(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """Text -> id of the tokens that a text may name: control, user-defined and unknown ones."""
    named = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    return {t: i for i, t in enumerate(tokens) if t and types[i] in named}


def with_ends(tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    """Types, in which the tokens that end a text by their names are control tokens."""
    found = list(types)
    known = END_NAMES.union(*FILE_ENDS.values()) - ({"</s>"} if GEMMA4_END in tokens else set())
    for i, token in enumerate(tokens):
        if token in known:
            found[i] = TokenType.CONTROL
    return found


def ends(special: Mapping[str, int], given: Sequence[int], told: Mapping[str, int]) -> frozenset[int]:
    """Ids that end a text. given: by the file; told: ids that the file has for the keys of FILE_ENDS."""
    found = {special[name] for name in END_NAMES if name in special}
    for key, names in FILE_ENDS.items():
        found |= {told[key]} if key in told else {special[name] for name in names if name in special}
    # Where a turn ends with one of these, <|end|> ends one of its several messages.
    calls = bool({"<|call|>", "<|calls|>"} & special.keys())
    if calls and {"<|return|>", "<|flush|>"} & special.keys() and "<|end|>" in special:
        found.discard(special["<|end|>"])
    if {GEMMA4_END, "</s>"} <= special.keys():
        found.discard(special["</s>"])
    return frozenset((*given, *found))


def shown(special: Mapping[str, int]) -> frozenset[int]:
    """Ids of control tokens whose text is shown."""
    found = {i for name, i in special.items() if name in SHOWN_NAMES}
    if "<|channel|>" in special and "<|end|>" in special:
        found.add(special["<|end|>"])
    return frozenset(found)


PHI3_KEEPS = ("<unk>", "<s>", "<|endoftext|>")
"""The special tokens of Phi-3 that take no white space."""


def strips(special: Mapping[str, int], *, architecture: str, name: str, pre: str, pieces: bool) -> dict[int, Strip]:
    """Id -> what it takes, which no key of a file tells. name: `general.name`; pieces: the vocabulary is SentencePiece's."""
    plain = "".join(c for c in name.lower() if c.isalnum() or c == ".")
    if "phi3" in plain or (architecture == "phi3" and pieces):
        return {i: Strip.RIGHT for text, i in special.items() if text not in PHI3_KEEPS}
    if architecture in ("nomic-bert-moe", "jina-bert-v3") or pre.startswith("jina-v2"):
        mask = "<mask>"
    elif "modernbert" in plain:
        mask = "[MASK]"
    else:
        return {}
    return {special[mask]: Strip.LEFT} if mask in special else {}
