"""Token ids on the command line, in the place of a text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from vkback.cli.shell import UsageError, read_text

TokensOption = Annotated[
    str | None, typer.Option("--tokens", metavar="IDS", help="Token ids in place of a text, as 1,2,3, or a file of them.")
]

IDS = re.compile(r"\s*[0-9]+(?:[\s,]+[0-9]+)*[\s,]*")


def token_ids(given: str) -> list[int]:
    """The ids of `--tokens`, separated by commas or white space, or those of a file. Raises UsageError for anything else."""
    text, named = given, f"--tokens {given}"
    if IDS.fullmatch(given) is None and Path(given).is_file():
        text, named = read_text(Path(given), "--tokens"), f"--tokens {given}: the file"
    if IDS.fullmatch(text) is None:
        raise UsageError(f"{named}: expected token ids, as 1,2,3, or a file of them")
    return [int(id) for id in re.findall("[0-9]+", text)]


def check_ids(ids: list[int], n_vocab: int) -> None:
    """Raises UsageError for an id that the vocabulary does not have."""
    for i, id in enumerate(ids):
        if id >= n_vocab:
            raise UsageError(f"--tokens: token {i} is {id}, expected an id in 0..{n_vocab - 1}")
