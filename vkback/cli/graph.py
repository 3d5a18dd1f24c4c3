"""vkback graph: the nodes of a model, before any device is asked."""

from __future__ import annotations

from typing import Annotated

import typer

from vkback.cli.shell import model_path


def graph(
    model: Annotated[str | None, typer.Option("-m", "--model", help="GGUF file or built-in model [default: demo-dense].")] = None,
    tokens: Annotated[int, typer.Option("-t", "--tokens", min=1, help="Tokens of the batch.")] = 1,
    ctx: Annotated[int | None, typer.Option("-c", "--ctx", min=1, help="Rows of the KV cache [default: as trained, at most 4096].")] = None,
) -> None:
    """List the nodes of a model: op, result, and what it is made from."""
    from vkback.models.registry import Model

    opened = Model.open(model_path(model))
    for i, node in enumerate(opened.graph(tokens, ctx or opened.default_n_ctx, head="last").nodes):
        print(f"{i:4} {node.op:16} {', '.join(map(str, node.outputs)):40} <- {', '.join(map(str, node.inputs))}")
