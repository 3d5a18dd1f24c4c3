#!/usr/bin/env python3
"""Greedy texts of a model by llama.cpp's server, and how far each token was ahead: what tests compare vkback's text with.

    llama-server -m MODEL.gguf -ngl 0 -np 1 --port PORT
    tools/peer_text.py http://127.0.0.1:PORT MODEL.gguf OUT.json

OUT.json holds
    model    name of the file, sha256 of its bytes
    source   what the server calls its build
    texts    each with
        prompt    the text, or the messages of a chat
        ids       its tokens, as the server makes them
        greedy    the most likely tokens after it, until the end of the text or 48
        margins   the logarithm of how many times as likely each was as the second
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

PROMPTS = (
    "The capital of France is",
    "It was a dark and stormy night, and",
    "def fibonacci(n):\n    ",
    "Water boils at 100 \u00b0C. Water freezes at",
)
CHATS = (
    [{"role": "user", "content": "Name three primary colors."}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Is the sky blue?"}],
)
GREEDY = 48
LIST = re.compile(r"\[[-\d.,\s]+\]")
"""Of numbers, which stand in one line."""


def ask(server: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that a server answers with."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(server + path, data, {"Content-Type": "application/json"}), timeout=600) as answer:
        return json.loads(answer.read())


def text_of(server: str, prompt: str | list[dict[str, str]]) -> dict[str, Any]:
    """What the server makes of one prompt."""
    text = prompt if isinstance(prompt, str) else ask(server, "/apply-template", {"messages": prompt})["prompt"]
    ids = ask(server, "/tokenize", {"content": text, "add_special": isinstance(prompt, str), "parse_special": True})["tokens"]
    body = {"prompt": ids, "n_predict": GREEDY, "temperature": 0, "n_probs": 2, "return_tokens": True, "cache_prompt": False}
    steps = ask(server, "/completion", body)["completion_probabilities"]
    margins = [step["top_logprobs"][0]["logprob"] - step["top_logprobs"][1]["logprob"] for step in steps]
    return {"prompt": prompt, "ids": ids, "greedy": [step["id"] for step in steps], "margins": [round(m, 4) for m in margins]}


def main() -> int:
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        return 2
    server, model, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    found = {
        "model": {"name": model.name, "sha256": hashlib.sha256(model.read_bytes()).hexdigest()},
        "source": f"llama.cpp {ask(server, '/props')['build_info']}, CPU",
        "texts": [text_of(server, prompt) for prompt in (*PROMPTS, *CHATS)],
    }
    out.write_text(LIST.sub(lambda m: " ".join(m[0].split()), json.dumps(found, indent=1)) + "\n", encoding="utf-8")
    print(f"{out}: {len(found['texts'])} texts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
