"""What faulty cases or nodes have in common that right ones have not: type, kernel, shape; and the suite's line of a node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vkback.errors import VkbackError
from vkback.evaluate.node_run import NodeRun
from vkback.evaluate.node_walk import items_of
from vkback.graph import Node
from vkback.ops.case_line import parse_line
from vkback.ops.matmul.linear_cases import fused_case, mul_mat_case, mul_mat_id_case
from vkback.plan.schedule import Schedule

Facts = Mapping[str, str]
"""What is known of a case: its op, its parameters, its kernel."""

TELLING = 0.5
"""Of the right ones at most so many may share a fact that explains something."""

SHOWN = 4

FEWEST = 2
"""So many right ones at least: one alone tells nothing."""

UNTOLD = ("seed", "bs", "nr", "per", "k_v", "o", "src_overlap", "m_v", "pad", "amax")
"""Parameters that nearly all cases have alike."""


def facts_of_line(line: str, kernel: str = "") -> Facts:
    """Of a case's line."""
    op, params = parse_line(line)
    facts = {"op": op, **{key: str(value) for key, value in params.items() if key not in UNTOLD}}
    if isinstance(n := params.get("n"), int) and "type_a" in params:
        facts["tokens"] = "1" if n == 1 else "2 to 16" if n <= 16 else "over 16"
    if "type_a" in facts:
        facts["type_a"] = facts["type_a"].upper()
    return {**facts, "kernel": kernel} if kernel else facts


def in_common(wrong: Sequence[Facts], right: Sequence[Facts]) -> str:
    """`all 5 wrong have type_a = Q6_K, as 0 of 40 right ones; kernel = gemv, as 12 of 40`; "" where nothing tells them apart."""
    if not wrong or len(right) < FEWEST:
        return ""
    shared = [(key, value) for key, value in wrong[0].items() if all(each.get(key) == value for each in wrong)]
    counted = [(sum(each.get(key) == value for each in right), key, value) for key, value in shared]
    telling = sorted((count, key, value) for count, key, value in counted if count <= TELLING * len(right))[:SHOWN]
    if not telling:
        return ""
    said = "; ".join(f"{key} = {value}, as {count} of {len(right)} right" for count, key, value in telling)
    return f"all {len(wrong)} wrong have {said}" if len(wrong) > 1 else f"the wrong one has {said}"


def common_lines(wrong: Iterable[tuple[str, str]], right: Iterable[tuple[str, str]]) -> str:
    """`in_common` of cases, each a line with the names of its kernels."""
    return in_common([facts_of_line(*each) for each in wrong], [facts_of_line(*each) for each in right])


def kernel_names(schedule: Schedule) -> str:
    """Kernels of a plan, with the path of GEMVs."""
    names = [kernel_name(d.kernel.source, dict(d.kernel.defines)) for d in schedule.dispatches()]
    return " + ".join(dict.fromkeys(names))


def kernel_name(source: str, defines: Mapping[str, Any]) -> str:
    """As "gemv int", "coop_mat"."""
    path = {"1": " int", "0": " float"}.get(str(defines.get("PATH_INT")), "")
    return source.removesuffix(".comp").rpartition("/")[2] + path


def node_facts(nodes: Iterable[Node], schedule: Schedule) -> list[Facts]:
    """Of each of a model's nodes: op, type and shape of its weights, tokens, kernels."""
    kernels: dict[str, list[str]] = {}
    for d in schedule.dispatches():
        kernels.setdefault(d.label, []).append(kernel_name(d.kernel.source, dict(d.kernel.defines)))
    found: list[Facts] = []
    for node in nodes:
        facts = {"op": node.op}
        weights = [t for t in node.inputs if t.kind == "weight" and len(t.shape) > 1]
        if weights:
            facts |= {"type_a": " + ".join(dict.fromkeys(t.type for t in weights))}
            facts |= {"weights": " + ".join(dict.fromkeys("x".join(map(str, t.shape)) for t in weights))}
        if made := kernels.get(node.name):
            facts["kernel"] = " + ".join(dict.fromkeys(made))
        found.append({**facts, "output": node.outputs[0].type})
    return found


def of_items(run: NodeRun) -> dict[str, tuple[Node, Facts]]:
    """The node and what is known of it, by the names that a comparison of nodes has: the products that share an output have one each."""
    facts = node_facts(run.nodes, run.schedule)
    return {i.name: (run.nodes[i.node], facts[i.node]) for i in items_of(run.nodes, run.graph)}


def line_of_node(node: Node) -> str:
    """The suite's line of a product with the node's type, shape and fusions; "" where the node is none, or no line says it."""
    weights = [t for t in node.inputs if t.kind == "weight" and len(t.shape) > 1]
    if node.op not in ("MUL_MAT", "MUL_MAT_ID", "LINEAR") or len(weights) != 1:
        return ""
    w, p = weights[0], node.params
    x = node.inputs[p["roles"].index("x")] if "roles" in p else node.inputs[1]
    *_, m, k = w.shape
    n = x.shape[0]
    kind = "q8_1" if x.type == "Q8_1" else "f32"
    try:
        if node.op == "MUL_MAT":
            return mul_mat_case(w.type, m, n, k, type_b=kind).line
        if node.op == "MUL_MAT_ID":
            return mul_mat_id_case(w.type, w.shape[0], node.inputs[2].shape[1], m, n, k, shared=x.shape[1] == 1, type_b=kind).line
        roles = tuple(r for r in p["roles"] if r not in ("w", "x"))
        experts: dict[str, Any] = {"experts": w.shape[0], "used": _used(node, roles)} if len(w.shape) == 3 else {}
        out = node.outputs[0].type
        return fused_case(w.type, m, k, n, roles, glu=bool(p.get("glu")), out=out, type_b=kind, **experts).line
    except (VkbackError, ValueError, KeyError):
        return ""


def _used(node: Node, roles: Sequence[str]) -> int:
    """Experts that a token uses."""
    if "ids" in roles:
        return int(node.inputs[node.params["roles"].index("ids")].shape[1])
    return int(node.params["n_used"])
