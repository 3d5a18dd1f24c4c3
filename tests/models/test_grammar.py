"""Texts that are held to a grammar: in Python, by the command line and by the server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vkback import LoadedModel
from vkback.api.errors import ModelError
from vkback.api.options import Options
from vkback.device import Device
from vkback.engine.constraint import ConstraintError
from vkback.engine.engine import Engine
from vkback.paths import builtin_model

pytest.importorskip("llguidance", reason="vkback[json] is not installed")

DATES = r"""root ::= [1-9] [0-9]{3} "-" [0-1] [0-9] "-" [0-3] [0-9]"""
FORM = re.compile(r"[1-9][0-9]{3}-[01][0-9]-[0-3][0-9]")


@pytest.fixture(scope="module")
def model(device: Device) -> Iterator[LoadedModel]:
    with LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=256, act="f32", progress=False), sequences=2) as loaded:
        yield loaded


@pytest.mark.vulkan
def test_a_text_is_of_its_grammar(model: LoadedModel) -> None:
    texts = [model.generate("It was on ", max_tokens=40, grammar=DATES, seed=seed) for seed in range(2)]
    assert all(FORM.fullmatch(result.text) and result.finish_reason == "stop" for result in texts)
    assert FORM.fullmatch(model.chat("When?", grammar=DATES, max_tokens=40).text)
    for result in model.batch(["It was on "] * 2, max_tokens=40, grammar=DATES, mirostat=2):
        assert FORM.fullmatch(result.text)
    assert FORM.fullmatch(model.generate("On ", max_tokens=40, grammar=DATES, logits_processor=lambda ids, logits: None).text)


@pytest.mark.vulkan
def test_what_cannot_be(model: LoadedModel) -> None:
    with pytest.raises(ConstraintError, match=r"\[grammar\] line 1, at 'nothing': there is no rule called nothing"):
        model.generate("x", grammar="root ::= nothing")
    with pytest.raises(ModelError, match="json_schema and grammar exclude each other"):
        model.generate("x", grammar=DATES, json_schema={})
    with pytest.raises(ModelError, match="grammar and tools exclude each other"):
        model.chat("x", grammar=DATES, tools=[abs_of])
    wrong: list[dict[str, Any]] = [{"grammar": " "}, {"grammar": 5}]
    for options in wrong:
        with pytest.raises(ModelError, match=r"expected a grammar of llama\.cpp's"):
            Options.of(options)
    with pytest.raises(ModelError, match="expected False with grammar"):
        Options.of({"grammar": DATES, "ignore_eos": True})


def abs_of(x: int) -> int:
    """The number without its sign.

    Args:
        x: a number
    """
    return abs(x)


def test_the_options_of_commands(tmp_path: Path) -> None:
    from vkback.cli.sampling import _asked
    from vkback.cli.shell import UsageError

    file = tmp_path / "dates.gbnf"
    file.write_text(DATES)
    assert _asked({"grammar_file": file}) == {"grammar": DATES}
    assert _asked({"sampling_seq": "kt", "dry_sequence_breakers": ["\\n", "x"]}) == {"samplers": "kt", "dry_sequence_breakers": ["\n", "x"]}
    asked: list[tuple[dict[str, Any], str]] = [
        ({"grammar_file": file, "grammar": DATES}, "--grammar and --grammar-file exclude each other"),
        ({"samplers": "kt", "sampling_seq": "kt"}, "--samplers and --sampling-seq exclude each other"),
        ({"samplers": "foo"}, "--samplers foo: expected names with ; between"),
    ]
    for options, says in asked:
        with pytest.raises(UsageError, match=says):
            _asked(options)
