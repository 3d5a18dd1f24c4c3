"""Options of commands that generate text: how the next token is picked, and what ends the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from vkback.cli.gathered import gathered
from vkback.cli.shell import UsageError, read_text
from vkback.errors import VkbackError

if TYPE_CHECKING:
    from vkback.api import GenerateOptions

TempOption = Annotated[float, typer.Option("--temp", "--temperature", min=0.0, help="0 takes the most likely token.")]
TopKOption = Annotated[int, typer.Option(min=0, help="Choose among this many; 0 for all.")]
TopPOption = Annotated[float, typer.Option(min=0.0, max=1.0, help="Choose among the likeliest that make up this share.")]
MinPOption = Annotated[float, typer.Option(min=0.0, max=1.0, help="Drop tokens less likely than this share of the likeliest.")]
SeedOption = Annotated[int, typer.Option("-s", "--seed", min=-1, help="The same seed gives the same text; -1 for any.")]
RepeatOption = Annotated[float, typer.Option("--repeat-penalty", min=1e-3, help="Of tokens that the text has lately had; 1 for none.")]
PresenceOption = Annotated[float, typer.Option("--presence-penalty", help="Subtracted from their logits; 0 for none.")]
FrequencyOption = Annotated[float, typer.Option("--frequency-penalty", help="The same for each time they were there; 0 for none.")]
LastNOption = Annotated[int, typer.Option("--repeat-last-n", min=-1, help='How many tokens are "lately"; -1 for all.')]
BiasOption = Annotated[
    list[str] | None,
    typer.Option("-l", "--logit-bias", metavar="ID=VALUE", help="Added to the logit of a token; -inf bans it. May be given again."),
]
StopOption = Annotated[
    list[str] | None, typer.Option("-r", "--stop", "--reverse-prompt", help="Text that ends the generation. May be given again.")
]


def _number(default: float, name: str, help: str, *more: str, **bounds: Any) -> tuple[Any, Any]:
    return Annotated[float, typer.Option(name, *more, help=help, **bounds)], default


def _whole(default: int, name: str, help: str, **bounds: Any) -> tuple[Any, Any]:
    return Annotated[int, typer.Option(name, help=help, **bounds)], default


SAMPLERS = {
    "typical_p": _number(
        1.0, "--typical", "Keep the tokens of typical surprise that make up this share; 1 for all.", "--typical-p", min=0.0, max=1.0
    ),
    "top_n_sigma": _number(
        -1.0, "--top-nsigma", "Drop tokens more than so many standard deviations below the likeliest; -1 for none.", "--top-n-sigma"
    ),
    "xtc_probability": _number(0.0, "--xtc-probability", "Chance that the likeliest tokens are left out; 0 for never.", min=0.0, max=1.0),
    "xtc_threshold": _number(0.1, "--xtc-threshold", "How likely those are, of which the least likely stays.", min=1e-9, max=1.0),
    "dynatemp_range": _number(0.0, "--dynatemp-range", "Temperature by the entropy, so much lower and higher than --temp.", min=0.0),
    "dynatemp_exponent": _number(1.0, "--dynatemp-exp", "The power of the entropy in that.", min=0.0),
    "mirostat": _whole(0, "--mirostat", "1 or 2: hold the surprise of tokens, in place of all filters; 0 for none.", min=0, max=2),
    "mirostat_tau": _number(5.0, "--mirostat-ent", "The surprise in bits that mirostat holds.", min=0.0),
    "mirostat_eta": _number(0.1, "--mirostat-lr", "How fast it learns.", min=0.0),
    "dry_multiplier": _number(0.0, "--dry-multiplier", "What tokens lose that would lengthen a repetition; 0 for nothing.", min=0.0),
    "dry_base": _number(1.75, "--dry-base", "That grows by this for each token of the repetition.", min=1.0),
    "dry_allowed_length": _whole(2, "--dry-allowed-length", "Tokens of a repetition from which on it counts.", min=1),
    "dry_penalty_last_n": _whole(-1, "--dry-penalty-last-n", "How many of the last tokens are searched; -1 for all.", min=-1),
    "dry_sequence_breakers": (
        Annotated[
            list[str] | None,
            typer.Option(
                "--dry-sequence-breaker", help='Text that ends repetitions; may be given again, none for none [default: \\n : " *].'
            ),
        ],
        None,
    ),
    "samplers": (
        Annotated[
            str | None,
            typer.Option(
                "--samplers", help="Which run, in this order [default: penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature]."
            ),
        ],
        None,
    ),
    "sampling_seq": (
        Annotated[str | None, typer.Option("--sampling-seq", "--sampler-seq", help="The same by letters, as edskypmxt.")],
        None,
    ),
    "grammar": (
        Annotated[str | None, typer.Option("--grammar", metavar="GBNF", help="The text is of this grammar, in llama.cpp's language.")],
        None,
    ),
    "grammar_file": (Annotated[Path | None, typer.Option("--grammar-file", metavar="FILE", help="A file with it.")], None),
    "json_schema": (
        Annotated[str | None, typer.Option("-j", "--json-schema", metavar="JSON", help="The text is JSON of this schema.")],
        None,
    ),
    "json_schema_file": (Annotated[Path | None, typer.Option("-jf", "--json-schema-file", metavar="FILE", help="A file with it.")], None),
    "ignore_eos": (Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")], False),
}
"""Options that are off by default, by the names of GenerateOptions: samplers, and what the text is held to."""


def with_samplers(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: the command has these options, too, and gets those that are not at their defaults as `samplers`."""
    return gathered("samplers", SAMPLERS, lambda asked: _asked({n: v for n, v in asked.items() if v != SAMPLERS[n][1]}))(command)


ELSEWHERE = {
    "temperature": "--temp",
    "penalty_last_n": "--repeat-last-n",
    "max_tokens": "-n",
    "typical_p": "--typical",
    "top_n_sigma": "--top-nsigma",
    "dynatemp_exponent": "--dynatemp-exp",
    "mirostat_tau": "--mirostat-ent",
    "mirostat_eta": "--mirostat-lr",
    "dry_sequence_breakers": "--dry-sequence-breaker",
}
"""Options of GenerateOptions that have another name on the command line."""


def generate_options(asked: Mapping[str, Any]) -> GenerateOptions:
    """How a text is made, as the user named it, before a model is loaded. Raises UsageError, which names the option."""
    from vkback.api.options import Options
    from vkback.checks import OptionError

    try:
        Options.of(asked)
    except OptionError as e:
        raise UsageError(f"{ELSEWHERE.get(e.name, '--' + e.name.replace('_', '-'))} {e.value}: expected {e.expected}") from e
    return cast("GenerateOptions", asked)


def _asked(options: dict[str, Any]) -> Mapping[str, Any]:
    """Checked as those of Python are. Raises UsageError."""
    from vkback.api.options import Options

    if "samplers" in options and "sampling_seq" in options:
        raise UsageError("--samplers and --sampling-seq exclude each other: each is the order of the samplers")
    if "sampling_seq" in options:
        options["samplers"] = options.pop("sampling_seq")
    if (breakers := options.get("dry_sequence_breakers")) is not None:
        options["dry_sequence_breakers"] = [] if breakers == ["none"] else [b.replace("\\n", "\n").replace("\\t", "\t") for b in breakers]
    for name in ("grammar", "json_schema"):
        option = f"--{name.replace('_', '-')}"
        if (file := options.pop(f"{name}_file", None)) is not None:
            if name in options:
                raise UsageError(f"{option} and {option}-file exclude each other: each gives the {name.rpartition('_')[2]}")
            options[name] = read_text(file, f"{option}-file")
    generate_options(options)
    option = ""
    try:
        form = Options.of(options).form
        if form is not None:
            from vkback.engine.constraint import check_form

            option = "--grammar: " if "grammar" in options else "--json-schema: "
            check_form(form)
    except VkbackError as e:
        raise UsageError(option + (str(e).partition("] ")[2] or str(e))) from e
    return options


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
