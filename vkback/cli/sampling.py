"""Options of commands that generate text: how the next token is picked, and what ends the text."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Annotated

import typer

from vkback.cli.shell import UsageError

TempOption = Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")]
TopKOption = Annotated[int, typer.Option(min=0, help="Choose among this many; 0 for all.")]
TopPOption = Annotated[float, typer.Option(min=0.0, max=1.0, help="Choose among the likeliest that make up this share.")]
MinPOption = Annotated[float, typer.Option(min=0.0, max=1.0, help="Drop tokens less likely than this share of the likeliest.")]
SeedOption = Annotated[int, typer.Option("-s", "--seed", min=0, help="The same seed gives the same text.")]
RepeatOption = Annotated[float, typer.Option("--repeat-penalty", min=1e-3, help="Of tokens that the text has lately had; 1 for none.")]
PresenceOption = Annotated[float, typer.Option("--presence-penalty", help="Subtracted from their logits; 0 for none.")]
FrequencyOption = Annotated[float, typer.Option("--frequency-penalty", help="The same for each time they were there; 0 for none.")]
LastNOption = Annotated[int, typer.Option("--repeat-last-n", min=-1, help='How many tokens are "lately"; -1 for all.')]
BiasOption = Annotated[
    list[str] | None,
    typer.Option("-l", "--logit-bias", metavar="ID=VALUE", help="Added to the logit of a token; -inf bans it. May be given again."),
]
StopOption = Annotated[list[str] | None, typer.Option("-r", "--stop", help="Text that ends the generation. May be given again.")]


def logit_bias(given: Sequence[str] | None) -> tuple[tuple[int, float], ...]:
    """Token ids and what is added to their logits. Raises UsageError for what has not the form ID=VALUE."""
    found = []
    for text in given or ():
        token, equals, value = text.partition("=")
        try:
            added = float(value)
            if not equals or not added < inf:
                raise ValueError(text)
            found.append((int(token), added))
        except ValueError as e:
            raise UsageError(f"--logit-bias {text}: expected ID=VALUE, as 42=-1.5 or 42=-inf") from e
    return tuple(sorted(found))


def check_bias(bias: Sequence[tuple[int, float]], n_vocab: int) -> None:
    """Raises UsageError where --logit-bias names a token that the model has not."""
    for token, _ in bias:
        if not 0 <= token < n_vocab:
            raise UsageError(f"--logit-bias {token}: no token of this model, expected an id in 0..{n_vocab - 1}")
