"""What a model thinks, told apart from what it answers."""

from __future__ import annotations

import pytest

from vkback.api.reasoning import PAIRS, Marks, ReplyReader, marks_of
from vkback.api.result import Chunk, Result, Timings

THINKING = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{% if '</think>' in content %}{% endif %}"
HARMONY = "{{ '<|start|>assistant<|channel|>final<|message|>' }}"
INSIDE = marks_of(THINKING, "<|im_start|>assistant\n<think>\n")
CHANNELS = marks_of(HARMONY, "<|start|>user<|message|>Hi<|end|><|start|>assistant")
G = "<|channel|>analysis<|message|>"

CASES = [
    (
        "thoughts first",
        marks_of(THINKING, "<|im_start|>assistant\n"),
        "<think>\nWe add.\n\n</think>\n\n4 = 2+2\n",
        ("We add.", "4 = 2+2\n"),
    ),
    ("none", marks_of(THINKING, "x"), "  4 <think>no</think>", ("", "  4 <think>no</think>")),
    ("empty ones", marks_of(THINKING, "x"), "<think>\n\n</think>\n\nYes", ("", "Yes")),
    ("begun by the prompt", INSIDE, "We\n add. \n</think>\nYes </think>", ("We\n add.", "Yes </think>")),
    ("not ended", INSIDE, "We add </thi", ("We add </thi", "")),
    ("a beginning alone", marks_of(THINKING, "x"), "<thi", ("", "<thi")),
    ("ended by the prompt", marks_of(THINKING, "assistant\n<think>\n\n</think>\n\n"), "Yes", ("", "Yes")),
    ("any template", marks_of("{{ messages }}", ""), "<think>a</think>b", ("a", "b")),
    ("channels", CHANNELS, f"{G}We greet.<|end|><|start|>assistant<|channel|>final<|message|>Hello!", ("We greet.", "Hello!")),
    ("the answer alone", CHANNELS, "<|channel|>final<|message|>Hello!\n", ("", "Hello!\n")),
    (
        "several messages",
        CHANNELS,
        f"{G}One.<|end|><|start|>assistant{G} two\n<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello!<|return|>",
        ("One.\n\n two", "I look.\n\nHello!"),
    ),
    ("a message that ends early", CHANNELS, f"{G}We", ("We", "")),
    ("a header alone", CHANNELS, "<|channel|>ana", ("", "")),
    ("no header", CHANNELS, "Hello!", ("", "Hello!")),
    (
        "a header of the prompt",
        marks_of(HARMONY, f"x<|start|>assistant{G}"),
        "We<|end|><|start|>assistant<|channel|>final<|message|>A",
        ("We", "A"),
    ),
    ("an answer that the prompt begins", marks_of(HARMONY, "x<|start|>assistant<|channel|>final<|message|>Hel", "Hel"), "lo", ("", "lo")),
    *((begin, marks_of(end, "x"), f"{begin}\na {end[:2]} b\n{end}\n\nc", (f"a {end[:2]} b", "c")) for begin, end in PAIRS),
]


@pytest.mark.parametrize(("marks", "text", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_thoughts_and_answer(marks: Marks, text: str, expected: tuple[str, str]) -> None:
    """In pieces of any length."""
    for size in (*range(1, 8), 1000):
        reader = ReplyReader(marks)
        told = [reader.feed(text[at : at + size]) for at in range(0, len(text), size)] + [reader.flush()]
        assert ("".join(t for t, _ in told), "".join(a for _, a in told)) == expected == (reader.thoughts, reader.answer), size


def test_pieces_come_as_soon_as_no_mark_can_begin_in_them() -> None:
    reader = ReplyReader(INSIDE)
    assert [reader.feed(piece) for piece in ("We", " add", "<", "b", " </th", "ink>", "\n", "Ye", "s")] == [
        ("We", ""),
        (" add", ""),
        ("", ""),
        ("<b", ""),
        ("", ""),
        ("", ""),
        ("", ""),
        ("", "Ye"),
        ("", "s"),
    ]


@pytest.mark.parametrize(
    ("prefill", "text", "expected"),
    [
        ("<think>\nWe", " add</think>4", (" add".strip(), "4")),
        ("<think>We</think>4", " = 2+2", ("", " = 2+2")),
        ("The answer", " is <think>", ("", " is <think>")),
        ("", "<think>a</think>b", ("a", "b")),
    ],
)
def test_a_reply_that_the_prompt_begins(prefill: str, text: str, expected: tuple[str, str]) -> None:
    reader = ReplyReader(marks_of(THINKING, f"<|im_start|>assistant\n{prefill}", prefill))
    reader.feed(text)
    reader.flush()
    assert (reader.thoughts, reader.answer) == expected


def test_chunks_and_results_keep_their_tokens() -> None:
    reader = ReplyReader(INSIDE)
    assert reader.chunk(Chunk("a</think>b", (1, 2))) == Chunk("b", (1, 2), (), "a")
    reader.flush()
    whole = reader.result(Result("a</think>b", (1, 2), "eos", Timings(), seed=5))
    assert (whole.text, whole.reasoning, whole.tokens, whole.seed) == ("b", "a", (1, 2), 5)
