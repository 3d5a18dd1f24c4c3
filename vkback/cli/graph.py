"""vkback graph: the nodes of a model with what they cost and how long their values live, before any device is asked."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from vkback.cli.loading import RowsOption
from vkback.cli.shell import ModelOption, ShapeOption, UsageError, cache_rows, described_model, one_of

FORMATS = ("text", "list", "ir", "dot", "json", "html")
GRANULARITIES = ("elementary", "built")


def graph(
    model: ModelOption = None,
    shape: ShapeOption = None,
    tokens: Annotated[int, typer.Option("-t", "--tokens", "--n-tokens", min=1, help="Tokens of the batch.")] = 1,
    ctx: RowsOption = None,
    depth: Annotated[int, typer.Option("-d", "--depth", min=0, help="Rows of the cache in use before the batch.")] = 0,
    layers: Annotated[str | None, typer.Option("--layers", metavar="A:B", help="List layers A to B-1 alone.")] = None,
    nodes: Annotated[
        str,
        typer.Option("--nodes", help="elementary: attention, gated units, stores as ggml builds them without fused ops; built: as vkback."),
    ] = "elementary",
    format: Annotated[str, typer.Option("-f", "--format", help=", ".join(FORMATS))] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="The same as -f json.")] = False,
) -> None:
    """List the nodes of a model: operands, shapes (contiguous axis first), bytes, cost by kind, temporary storage alive, the values'
    lifelines in the margin; totals first. docs/graph_listing.md says what counts as what."""
    one_of(format, FORMATS, "--format")
    one_of(nodes, GRANULARITIES, "--nodes")
    format = "json" if as_json else format
    with described_model(model, shape) as (opened, name):
        _print(opened, name, tokens, ctx, depth, layers, nodes, format)


def _print(model: Any, name: str, tokens: int, ctx: int | None, depth: int, layers: str | None, granularity: str, format: str) -> None:
    from vkback.ops.attention.chain import padded
    from vkback.plan.cost.elementary import elementary
    from vkback.plan.cost.liveness import listing
    from vkback.report import graph_formats, graph_ir, graph_text

    n_ctx = cache_rows(model, ctx, tokens, depth)
    first, last = _layers(layers, model.hp.n_layer)
    built = model.graph(tokens, n_ctx, head="last")
    n_kv = min(n_ctx, padded(depth + tokens))
    if format == "ir":
        lines = graph_ir.forward(model.hp, built, n_ctx, first, last)
    else:
        whole = listing(elementary(built, n_kv) if granularity == "elementary" and format != "list" else built, n_kv)
        shown = whole if layers is None else whole.of_layers(first, last)
        facts = {"model": name, "description": model.heading, "n_tokens": tokens, "n_ctx": n_ctx, "n_kv": n_kv, "nodes_as": granularity}
        if format == "json":
            lines = iter([json.dumps(graph_formats.as_data(facts, whole, shown), indent=1)])
        elif format == "html":
            lines = graph_formats.html(facts, whole, shown)
        elif format == "dot":
            lines = graph_formats.dot(facts, shown)
        elif format == "list":
            lines = graph_formats.brief(shown)
        else:
            lines = graph_text.text(whole, None if layers is None else shown)
    for line in lines:
        print(line)


def _layers(text: str | None, n_layer: int) -> tuple[int, int]:
    """The first layer and the one behind the last, of "a:b" with either left out."""
    if text is None:
        return 0, n_layer
    first, colon, last = text.partition(":")
    try:
        a, b = int(first or 0), int(last or n_layer)
    except ValueError:
        a = b = -1
    if not colon or not 0 <= a < b <= n_layer:
        raise UsageError(f"--layers {text}: expected A:B with 0 <= A < B <= {n_layer}, the model's layers")
    return a, b
