"""vkback pull: a model of a Hugging Face repository, into the cache."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from vkback.cli.shell import JsonOption


def pull(
    name: Annotated[str, typer.Argument(metavar="USER/REPO[:TYPE]", help="The repository, and the type of the file.")],
    as_json: JsonOption = False,
) -> None:
    """Fetch a model's file and print its path: that of TYPE, else that of Q4_K_M, else the first. Every command takes the same as -hf."""
    from vkback.gguf.hub import fetched

    path = fetched(name)
    print(json.dumps({"path": str(path)}, indent=1) if as_json else path)
