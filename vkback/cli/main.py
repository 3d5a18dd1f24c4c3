"""vkback: every command, each in a file of its own."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, NoReturn

import typer

from vkback.cli.llama_options import ChatCommand, LlamaCommand, RunCommand, ServeCommand
from vkback.cli.shell import Command, VersionOption, add_command, asked_for, new_app, run

COMMANDS = {
    "devices": ("devices:devices", "List the Vulkan devices; --report for a bug report."),
    "run": ("run:generate", "Continue a text."),
    "chat": ("chat:chat", "Talk to a model on the terminal."),
    "embed": ("embed:embed", "Vectors of texts, and how alike they are."),
    "serve": ("serve:serve", "Serve a model by the endpoints of OpenAI's API."),
    "perplexity": ("perplexity:perplexity", "Perplexity of a text; KL divergence between two runs."),
    "finetune": ("finetune:finetune", "Train adapters (LoRA) beside a model's weights."),
    "merge": ("merge:merge", "Add adapters to the weights of a model."),
    "train-parity": ("train_parity:train_parity", "Train on the device and in PyTorch, and compare."),
    "graph": ("graph:graph", "List a model's nodes, what they cost and how long they live."),
    "plan": ("plan:plan", "List the dispatches of a model on a device, with a forecast."),
    "explain": ("explain:explain", "Say which kernel a case gets, and which tuning row says so."),
    "kernels": ("kernels:kernels", "Show what the driver's compiler makes of the kernels."),
    "profile": ("profile:profile", "Time every kernel of a prompt and of the tokens behind it."),
    "tune": ("tune:tune", "Search kernel shapes and write this device's own table."),
    "test-ops": ("test_ops:test_ops", "Judge ops by their references, or time them."),
    "worker": ("worker:worker", "Give this machine's devices to a Dask scheduler's work."),
    "compare": ("compare:compare", "Compare a model node by node with a reference."),
    "doctor": ("doctor:doctor", "Find the setting that cures wrong results."),
    "state-check": ("state_check:state_check", "Save and restore a text's state, and compare the bits."),
    "pull": ("pull:pull", "Fetch a model of a Hugging Face repository."),
    "convert": ("convert:convert", "Write a folder of safetensors as a GGUF file."),
    "quantize": ("quantize:quantize", "Write a model in another type, as Q4_K_M."),
    "imatrix": ("imatrix:imatrix", "Gather importances of weights, for quantize --imatrix."),
    "synth": ("synth:synth", "Write a model of a real shape with random weights."),
    "cache": ("cache:cache", "Show what is kept between runs, or remove it."),
    "compare-bench": ("compare_bench:compare", "Compare two benchmark results with their noise."),
    "history": ("history:history", "Show what a store of benchmark results holds, by build."),
}
"""The file of each command in this folder and its function, and what `vkback --help` says of it, in its order: 62 characters at most."""

OF_LLAMA: dict[str, type[Command]] = {
    "run": RunCommand,
    "chat": ChatCommand,
    "serve": ServeCommand,
    **dict.fromkeys(("embed", "perplexity", "imatrix"), LlamaCommand),
}
"""Those that take command lines of llama.cpp's programs."""


def top(ctx: typer.Context, version: VersionOption = False) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def app_of(asked: str | None = None) -> typer.Typer:
    """A command line with all commands; where one is named, only that one is imported: the others take longer than its own start."""
    app = new_app("GGUF models on any Vulkan device: run, inspect, compare, train. Speed is measured by vkbench.")
    app.callback(invoke_without_command=True)(top)
    for name, (place, summary) in COMMANDS.items():
        file, _, function = place.partition(":")
        wanted = asked in (None, name)
        command = getattr(import_module(f"vkback.cli.{file}"), function) if wanted else _listed
        add_command(app, command, name, summary, OF_LLAMA.get(name, Command))
    return app


def _listed() -> None:
    """A command of which --help says no more than its summary."""


def __getattr__(name: str) -> Any:
    """`app`, which has all commands."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return app_of()


def main() -> NoReturn:
    if sys.argv[1:2] == ["help"]:
        sys.argv[1:] = [*sys.argv[2:3], "--help"]
    if sys.argv[1:2] == ["bench"]:
        from vkback.cli import vkbench

        del sys.argv[1]
        vkbench.main()

    def app(**how: Any) -> Any:
        return app_of(asked_for(sys.argv, "vkback"))(**how)

    run(app, "vkback")


if __name__ == "__main__":
    main()
