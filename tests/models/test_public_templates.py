"""Public chat templates: what `render` makes of each is what transformers makes of it, or both refuse.

By command, since it asks a package registry: VKBACK_PUBLIC_TEMPLATES=1 pytest tests/models/test_public_templates.py. The templates are
those of the source package of llama-cpp-python, transformers goes into a folder of its own; neither becomes part of the repository.
VKBACK_TEMPLATES_SDIST names a package that is there already, VKBACK_TRANSFORMERS a Python that has transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vkback.api.chat_template import ChatTemplateError, render

pytestmark = pytest.mark.skipif(
    "VKBACK_PUBLIC_TEMPLATES" not in os.environ, reason="asks a package registry for templates: VKBACK_PUBLIC_TEMPLATES=1 runs it"
)

USER, THEN = {"role": "user", "content": "Hé <b>you</b> & I"}, {"role": "user", "content": " Then? \n"}
REPLY, SYSTEM = {"role": "assistant", "content": "So it is."}, {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2, "full": True}}}
    ],
}
TEXT_CALL = {
    **CALL,
    "tool_calls": [{"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": '{"rain": true}'}
THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see."}
MARKED = {"role": "assistant", "content": "<think>\nLet me see.\n</think>\n\nYes."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "What the weather is.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "a question": ([USER], {}),
    "without a prompt": ([USER], {"add_generation_prompt": False}),
    "two turns": ([USER, REPLY, THEN], {}),
    "two turns, no prompt": ([USER, REPLY], {"add_generation_prompt": False}),
    "four turns": ([USER, REPLY, THEN, REPLY, USER], {}),
    "system": ([SYSTEM, USER], {}),
    "system, two turns": ([SYSTEM, USER, REPLY, THEN], {}),
    "system alone": ([SYSTEM], {}),
    "two systems": ([SYSTEM, SYSTEM, USER], {}),
    "system in the middle": ([USER, REPLY, SYSTEM, THEN], {}),
    "empty system": ([{"role": "system", "content": ""}, USER], {}),
    "empty question": ([{"role": "user", "content": ""}], {}),
    "two questions": ([USER, THEN], {}),
    "reply first": ([REPLY, USER], {}),
    "reply alone": ([REPLY], {"add_generation_prompt": False}),
    "developer": ([{"role": "developer", "content": "Be brief."}, USER], {}),
    "an unknown role": ([{"role": "narrator", "content": "Once."}, USER], {}),
    "thinking on": ([USER], {"enable_thinking": True}),
    "thinking off": ([USER], {"enable_thinking": False}),
    "thinking": ([USER], {"thinking": True}),
    "effort": ([SYSTEM, USER], {"reasoning_effort": "high"}),
    "a thought": ([USER, THOUGHT, THEN], {}),
    "a thought last": ([USER, THOUGHT], {"add_generation_prompt": False}),
    "a marked thought": ([USER, MARKED, THEN], {}),
    "tools": ([USER], {"tools": TOOLS}),
    "system and tools": ([SYSTEM, USER], {"tools": TOOLS}),
    "a call": ([USER, CALL], {"tools": TOOLS, "add_generation_prompt": False}),
    "a call and its result": ([USER, CALL, RESULT], {"tools": TOOLS}),
    "a call, its result, a reply": ([SYSTEM, USER, CALL, RESULT, REPLY, THEN], {"tools": TOOLS}),
    "two results": ([USER, CALL, RESULT, CALL, RESULT], {"tools": TOOLS}),
    "a call as text": ([USER, TEXT_CALL, RESULT], {"tools": TOOLS}),
    "a call without tools": ([USER, CALL, RESULT], {}),
    "a call with a thought": ([USER, {**CALL, "reasoning_content": "Rain?"}, RESULT], {"tools": TOOLS}),
}

BY_TRANSFORMERS = """
import json, sys
from datetime import datetime
from transformers.utils.chat_template_utils import render_jinja_template
asked = json.load(sys.stdin)
found = {}
for name, template in asked["templates"].items():
    for what, (messages, variables) in asked["conversations"].items():
        variables = {"add_generation_prompt": True, **variables}
        tools = variables.pop("tools", None)
        try:
            made = render_jinja_template([messages], tools=tools, chat_template=template, bos_token="<s>", eos_token="</s>", **variables)
            made = made[0] if isinstance(made, tuple) else made
            found[f"{name}: {what}"] = made[0]
        except Exception as e:
            found[f"{name}: {what}"] = None
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sdist")
    sdist = os.environ.get("VKBACK_TEMPLATES_SDIST")
    if sdist is None:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "llama-cpp-python", "-d", str(folder)]
        subprocess.run(pip, check=True, timeout=600)
        sdist = str(next(folder.glob("*.tar.gz")))
    found = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = Path(member.name)
            if path.suffix == ".jinja" and path.parent.name == "templates" and (file := archive.extractfile(member)) is not None:
                found[path.stem] = file.read().decode("utf-8")
    return found


@pytest.fixture(scope="module")
def by_transformers(templates: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str | None]]:
    python, environment = os.environ.get("VKBACK_TRANSFORMERS"), dict(os.environ)
    if python is None:
        python, folder = sys.executable, tmp_path_factory.mktemp("transformers")
        subprocess.run([python, "-m", "pip", "install", "-q", "--target", str(folder), "transformers"], check=True, timeout=900)
        environment["PYTHONPATH"] = str(folder)
    asked = json.dumps({"templates": templates, "conversations": CONVERSATIONS})
    done = subprocess.run(
        [python, "-c", BY_TRANSFORMERS], input=asked, capture_output=True, encoding="utf-8", env=environment, check=True, timeout=900
    )
    yield json.loads(done.stdout)


def test_there_are_as_many_as_were_counted(templates: dict[str, str]) -> None:
    assert len(templates) >= 60 and len(CONVERSATIONS) == 33


def test_every_text_is_that_of_transformers_or_both_refuse(templates: dict[str, str], by_transformers: dict[str, str | None]) -> None:
    wrong: list[str] = []
    for name, template in templates.items():
        for what, (messages, variables) in CONVERSATIONS.items():
            try:
                own: str | None = render(template, messages, model=name, bos="<s>", eos="</s>", **variables)
            except ChatTemplateError as e:
                own, said = None, str(e)
            else:
                said = str(own)
            wanted = by_transformers[f"{name}: {what}"]
            if own != wanted:
                wrong.append(f"{name}: {what}: {said[:300]!r} is not {'refused' if wanted is None else repr(wanted[:300])}")
    assert not wrong, f"{len(wrong)} of {len(by_transformers)}:\n" + "\n".join(wrong)
