"""What every recorded device chooses for products of every type, and for what else models are made of (`vkback plan --diff`).

The text of this module also runs in other builds (vkback/cli/plan_diff.py), as the program of a process: it uses nothing that they may
lack but tables, cases and planner, prints JSON, and needs no file of its own.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vkback import quants
from vkback.device import Capabilities, profile_ids
from vkback.errors import VkbackError
from vkback.graph import Node
from vkback.harness.cases import find_case
from vkback.models.registry import Model
from vkback.models.synth import outline
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.plan import planner
from vkback.tuning.lookup import Tuning
from vkback.tuning.overrides import override_rows
from vkback.tuning.table import load_table, parse_table

LAYERS = (
    ("llama-8b-Q4_K_M", (1, 8, 512)),
    ("gemma3-1b-Q4_K_M", (1, 512)),
    ("qwen3moe-30b-a3b-Q4_K_M", (1, 8, 512)),
    ("gpt-oss-20b-MXFP4", (1, 512)),
    ("qwen35-9b-Q4_K_M", (1, 512)),
)
"""Shapes of which two layers are planned, for what is no product of a stored weight, and how many tokens at once."""

N_CTX = 4096
"""Rows of their caches."""

PRODUCTS = ("MUL_MAT", "MUL_MAT_ID", "LINEAR")


def product_lines(quant: str) -> Iterator[str]:
    """Cases of one type of weights: products of one token and of several, with gate and up, and of experts."""
    for n in (1, 2, 4, 8, 16, 32, 512):
        for m, k in ((4096, 4096), (4096, 14336), (128256, 4096))[: 3 if n == 1 else 2]:
            yield f"LINEAR(type_a={quant},m={m},n={n},k={k},fused=residual,seed=7)"
        yield f"LINEAR(type_a={quant},m=28672,n={n},k=4096,fused=none,glu=1,seed=7)"
    for n in (1, 4, 32, 512):
        yield f"MUL_MAT_ID(type_a={quant},type_b=f32,n_mats=128,n_used=8,b=1,m=1536,n={n},k=2048,seed=7)"


def tables_of(caps: Capabilities, spec: Mapping[str, str]) -> Tuning:
    """The tables of a device. spec: "root", the folder of all tables; "first", one that comes before them; "for", the only device table
    that this is; "overrides", rows of a command line."""
    tables = Tuning.for_device(caps, Path(spec["root"])) if spec.get("root") else Tuning.for_device(caps)
    first = list(override_rows(spec.get("overrides", "")))
    if file := spec.get("first"):
        path = Path(file)
        known = path.name.startswith("device_")
        first += load_table(path) if known else parse_table(path.read_text(encoding="utf-8"), "device_any.toml")
    return Tuning([rows for rows in (first, *tables.tables) if rows])


class Noting:
    """Tables that keep note of what they were asked, by family."""

    def __init__(self, tables: Any) -> None:
        self.tables = tables
        self.asked: dict[str, dict[str, Any]] = {}

    def pick(self, family: str, **query: Any) -> Any:
        choice = self.tables.pick(family, **query)
        self.asked[family] = dict(choice.params)
        return choice


def kernels(dispatches: Iterable[Any]) -> list[dict[str, Any]]:
    """What tells kernels apart: source, defines and the subgroup size demanded."""
    return [
        {"kernel": d.kernel.source.removesuffix(".comp"), "defines": dict(d.kernel.defines), "subgroup": d.kernel.subgroup_size}
        for d in dispatches
    ]


def chosen(node: Node, ctx: LowerContext) -> dict[str, Any]:
    """The choice of one node: what tables said, and the kernels that it comes to; or why there is none."""
    noting = Noting(ctx.tuning)
    ctx = dataclasses.replace(ctx, tuning=noting)
    try:
        choice = OPS[node.op].choose(node, ctx)
        found = kernels(OPS[node.op].lower(dataclasses.replace(node, choice=choice), ctx))
    except VkbackError as e:
        return {"tables": noting.asked, "kernels": [], "none": str(e)}
    return {"tables": noting.asked, "kernels": found}


def of_a_model(name: str, model: Model, tokens: int, tables: Tuning, caps: Capabilities, products: bool) -> Iterator[dict[str, Any]]:
    """Choices of a model's plan, by node, with the schedule that tables chose."""
    graph = model.graph(tokens, max(N_CTX, tokens), head="last")
    noting = Noting(tables)
    ctx = LowerContext(caps, noting)
    said = f"{name}, {tokens} token{'s' * (tokens > 1)}"
    try:
        dispatches = list(planner.plan(graph, ctx).dispatches())
    except VkbackError as e:
        yield {"type": "schedule", "case": said, "tables": {}, "kernels": [], "none": str(e)}
        return
    yield {"type": "schedule", "case": said, "tables": {"schedule": noting.asked.get("schedule", {})}, "kernels": []}
    nodes: dict[tuple[str, str], list[Any]] = {}
    for d in dispatches:
        nodes.setdefault((d.op, d.label), []).append(d)
    for (op, label), of_node in nodes.items():
        weights = [arg.tensor.type for d in of_node for arg in d.args if arg.tensor.kind == "weight" and len(arg.tensor.shape) > 1]
        is_product = op.startswith(PRODUCTS) and bool(weights)
        if products or not is_product:
            family = weights[0] if is_product else "attention" if "ATT" in op else "others"
            yield {"type": family, "case": f"{said}: {op} {label}", "tables": {}, "kernels": kernels(of_node)}


def of_device(
    profile: str, spec: Mapping[str, Any], nodes: Sequence[tuple[str, str, Node]], models: Sequence[tuple[str, Model, int]]
) -> Any:
    """All choices of one device: type, case, tables and kernels of each."""
    caps = Capabilities.from_profile(profile)
    tables = tables_of(caps, spec)
    sync = {n: tables.pick("schedule", n=n, n_expert=0)["sync"] for n in {int(node.outputs[0].shape[0]) for _, _, node in nodes}}
    found = []
    for quant, line, node in nodes:
        ctx = LowerContext(caps, tables, sync=sync[int(node.outputs[0].shape[0])] if node.op == "LINEAR" else "barrier")
        found.append({"type": quant, "case": line, **chosen(node, ctx)})
    for name, model, tokens in models:
        found += of_a_model(name, model, tokens, tables, caps, bool(spec.get("model")))
    return {"name": caps.name, "choices": found}


def all_choices(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Choices of devices, by profile. spec: as of `tables_of`, and "devices", profiles in place of all; "model" and "tokens", a shape of
    vkback synth or a file of which all nodes are planned in place of the usual cases."""
    nodes: list[tuple[str, str, Node]] = []
    models: list[tuple[str, Model, int]] = []
    unknown = []
    if given := spec.get("model"):
        model = Model.open(Path(given)) if Path(given).is_file() else Model.of(outline(given))
        models = [(Path(given).stem, model, spec["tokens"])]
    else:
        for quant in quants.QUANTS:
            for line in product_lines(quant):
                try:
                    nodes.append((quant, line, find_case(line).node()))
                except VkbackError:
                    unknown.append(line)
        for shape, counts in LAYERS:
            try:
                model = Model.of(outline(shape, layers=2))
            except VkbackError:
                unknown.append(shape)
                continue
            models += [(shape, model, tokens) for tokens in counts]
    return {"devices": {p: of_device(p, spec, nodes, models) for p in spec.get("devices") or profile_ids()}, "unknown": unknown}


if __name__ == "__main__":
    try:
        said = json.dumps(all_choices(json.loads(sys.argv[1])))
    except VkbackError as e:
        print(e, file=sys.stderr)
        sys.exit(1)
    sys.stdout.write(said)
