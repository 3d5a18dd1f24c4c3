"""vkback: every command, each in a file of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NoReturn

import typer

from vkback.cli.shell import new_app, run

COMMANDS = {
    "devices": "devices:devices",
    "run": "generate:generate",
    "chat": "chat:chat",
    "serve": "serve:serve",
    "perplexity": "perplexity:perplexity",
    "synth": "synth:synth",
    "graph": "graph:graph",
    "plan": "plan:plan",
    "profile": "profile:profile",
    "test-ops": "test_ops:test_ops",
    "compare": "compare_model:compare",
    "compare-bench": "compare:compare",
    "history": "history:history",
    "doctor": "doctor:doctor",
    "tune": "tune:tune",
    "explain": "explain:explain",
    "finetune": "finetune:finetune",
    "merge": "merge:merge",
    "train-parity": "train_parity:train_parity",
    "kernels": "kernels:kernels",
}
"""The file of each command in this folder, and its function, in the order in which `vkback --help` lists them."""


def app_of(commands: Iterable[str]) -> typer.Typer:
    """A command line with these commands."""
    app = new_app("GGUF models on any Vulkan device: run, inspect, compare. Speed is measured by vkbench.")
    app.callback()(lambda: None)  # one command alone would lose its name
    for name in commands:
        file, _, function = COMMANDS[name].partition(":")
        app.command(name)(getattr(import_module(f"vkback.cli.{file}"), function))
    return app


def __getattr__(name: str) -> Any:
    """`app`, which has all commands."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return app_of(COMMANDS)


def main() -> NoReturn:
    # Of the commands only the one that is asked for is imported: the others take longer than its own start.
    asked = sys.argv[1:2]
    run(app_of(asked if asked and asked[0] in COMMANDS else COMMANDS), "vkback")


if __name__ == "__main__":
    main()
