"""Fusion: rewrites a graph's nodes into fewer, larger ones. Every fused node names an op whose reference is the chain it replaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from vkback.graph import Graph, Node, Tensor
from vkback.ops.lowering import LowerContext
from vkback.plan.nodes import Index, Nodes, replace, rewrite, tokens_of
from vkback.plan.passes.altup import fuse_altup, fuse_altup_routers
from vkback.plan.passes.attention import (
    fuse_attention,
    fuse_latent,
    gates_into_attention,
    may_pack,
    pack_qkv,
    packing,
    queries_into_attention,
    without_flash,
)
from vkback.plan.passes.choose import choose_kernels
from vkback.plan.passes.experts import cache_experts
from vkback.plan.passes.linear import (
    as_linear,
    fuse_bias,
    fuse_experts,
    fuse_gelu,
    fuse_glu,
    fuse_multiplier,
    fuse_residual,
    fuse_softcap,
    fuse_squared_relu,
    norms_into_prologue,
    post_norms_into_prologue,
    quantize_activations,
)
from vkback.plan.passes.norm_pair import embeddings_into_pairs, fuse_norm_pairs, previous_into_angles
from vkback.plan.passes.router import fuse_choice, fuse_router, gates_as_experts
from vkback.plan.schedule_choice import schedule_choice

FUSIONS = ("all", "none")
"""Levels that a model may be loaded with."""


def fuse(graph: Graph, ctx: LowerContext, *, level: str = "all") -> Nodes:
    """Fused nodes of a graph for one device.

    level  "all"; "none": only views are resolved, each op runs by itself (the form that fused runs are compared with)
    """
    nodes = resolve_views(graph.nodes)
    if not ctx.flash:
        nodes = without_flash(nodes)
    outputs = [t.name for t in graph.outputs]
    if level == "none":
        return choose_kernels(nodes, ctx)
    n = tokens_of(nodes)
    choice = schedule_choice(nodes, ctx)
    nodes = gates_as_experts(as_linear(nodes), outputs)
    if n == 1 and not ctx.exact:
        nodes = fuse_ssm(nodes, outputs, ctx)
    nodes = fuse_altup(nodes, outputs, ctx)
    for step in (fuse_embedding, fuse_norms, fuse_latent):
        nodes = step(nodes, outputs)
    nodes = embeddings_into_pairs(fuse_norm_pairs(nodes, outputs, ctx), outputs, ctx)
    if n == 1 and not ctx.exact:
        nodes = fuse_altup_routers(fuse_delta_net(nodes, outputs, ctx), outputs, ctx)
    nodes = fuse_attention(nodes, outputs, bindings=ctx.caps.max_storage_bindings)
    for step in (fuse_bias, fuse_glu, fuse_gelu, fuse_experts, fuse_residual):
        nodes = step(nodes, outputs)
    if n == 1 and not ctx.exact:
        for step in (fuse_multiplier, fuse_softcap, fuse_squared_relu):
            nodes = step(nodes, outputs)
    into_attention = n == 1 and choice["rope"] == "attention"
    nodes = pack_qkv(pack_delta_net(nodes), into_attention)
    if into_attention:
        for into in (queries_into_attention, gates_into_attention):
            nodes = into(nodes, outputs, bindings=ctx.caps.max_storage_bindings)
    nodes = choose_kernels(previous_into_angles(nodes), ctx)
    if n == 1 and choice["norm"] == "prologue":
        nodes = norms_into_prologue(nodes, outputs, ctx)
        nodes = post_norms_into_prologue(nodes, outputs, ctx)
    nodes = fuse_router(nodes, outputs, ctx, of_one=choice["router"] != "gemv")
    nodes = quantize_activations(nodes, outputs, ctx, by=choice["quantize"])
    nodes = cache_experts(nodes, ctx)
    return fuse_choice(nodes, outputs, ctx) if choice["router"] == "experts" else nodes


def resolve_views(nodes: Sequence[Node]) -> Nodes:
    """A VIEW is its source under another shape: consumers get the source with the view's shape."""
    source: dict[str, Tensor] = {}
    out: Nodes = []
    for node in nodes:
        viewed = any(t.name in source for t in node.inputs)
        inputs = tuple(dataclasses.replace(source[t.name], shape=t.shape) if t.name in source else t for t in node.inputs)
        if node.op == "VIEW":
            source[node.outputs[0].name] = inputs[0]
        else:
            out.append(dataclasses.replace(node, inputs=inputs) if viewed else node)
    return out


def fuse_embedding(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """GET_ROWS of a weight, SCALE -> GET_ROWS with a scale."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        rows = index.one_use_producer(node.inputs[0], "GET_ROWS") if node.op == "SCALE" and node.params["bias"] == 0.0 else None
        if rows is None or rows.inputs[0].kind != "weight" or "scale" in rows.params:
            return None
        return [rows, node], dataclasses.replace(rows, outputs=node.outputs, params={**rows.params, "scale": node.params["scale"]})

    return rewrite(nodes, outputs, match)


def fuse_norms(nodes: Nodes, outputs: Iterable[str]) -> Nodes:
    """RMS_NORM, MUL by a weight -> RMS_NORM_MUL, or of groups, whose weight is a row of all of them, RMS_NORM_MUL_GROUPS; with an ADD of
    another tensor behind it -> RMS_NORM_MUL_ADD. NORM, MUL by a weight, ADD of a bias -> NORM_MUL_ADD."""

    def rms(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        norm = index.one_use_producer(node.inputs[0], "RMS_NORM") if node.op == "MUL" and node.inputs[1].kind == "weight" else None
        if norm is None:
            return None
        w, dim = node.inputs[1], norm.inputs[0].shape[-1]
        if w.shape != (dim,) and (w.shape != node.outputs[0].shape[-1:] or w.elements % dim):
            return None
        name = "RMS_NORM_MUL" if w.shape == (dim,) else "RMS_NORM_MUL_GROUPS"
        return [norm, node], Node(name, (*norm.inputs, w), node.outputs, norm.params)

    def added(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        if node.op != "ADD" or node.inputs[1].kind == "weight" or node.inputs[0].elements != node.inputs[1].elements:
            return None
        for mine, other in (node.inputs, node.inputs[::-1]):
            norm = index.one_use_producer(mine, "RMS_NORM_MUL")
            if norm is not None:
                return [norm, node], Node("RMS_NORM_MUL_ADD", (*norm.inputs, other), node.outputs, norm.params)
        return None

    def layer_norm(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        weighted = index.one_use_producer(node.inputs[0], "MUL") if node.op == "ADD" and node.inputs[1].kind == "weight" else None
        norm = index.one_use_producer(weighted.inputs[0], "NORM") if weighted is not None and weighted.inputs[1].kind == "weight" else None
        if weighted is None or norm is None or weighted.inputs[1].shape != node.inputs[1].shape:
            return None
        fused = Node("NORM_MUL_ADD", (*norm.inputs, weighted.inputs[1], node.inputs[1]), node.outputs, norm.params)
        return [norm, weighted, node], fused

    for match in (rms, added, layer_norm):
        nodes = rewrite(nodes, outputs, match)
    return nodes


def fuse_ssm(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """SSM_CONV read by SSM_SCAN alone, of one token -> SSM_CONV_SCAN, where the device binds as many buffers."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        conv = index.one_use_producer(node.inputs[0], "SSM_CONV") if node.op == "SSM_SCAN" else None
        if conv is None or conv.inputs[0].name != node.inputs[1].name or conv.params["offset"] != node.outputs[0].shape[-1]:
            return None
        zx, *weights, pos, conv_state = conv.inputs
        *per_head, state = (*node.inputs[2:5], node.inputs[6])
        inputs = (zx, *weights, *per_head, pos, conv_state, state)
        if len(inputs) + 1 > ctx.caps.max_storage_bindings:
            return None
        return [conv, node], Node("SSM_CONV_SCAN", inputs, (node.outputs[0], conv_state, state), node.params)

    return rewrite(nodes, outputs, match)


def fuse_delta_net(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """SSM_CONV, DELTA_NET, RMS_NORM_MUL of each head and SWIGLU, each read by the next alone, of one token -> CONV_DELTA_NET, where the
    device binds as many buffers."""

    def match(node: Node, index: Index) -> tuple[list[Node], Node] | None:
        norm = index.one_use_producer(node.inputs[1], "RMS_NORM_MUL") if node.op == "SWIGLU" and len(node.inputs) == 2 else None
        delta = index.one_use_producer(norm.inputs[0], "DELTA_NET") if norm is not None else None
        conv = index.one_use_producer(delta.inputs[0], "SSM_CONV") if delta is not None else None
        if norm is None or delta is None or conv is None or len(conv.inputs) != 4 or conv.params["offset"]:
            return None
        qkv, w, pos, conv_state = conv.inputs
        _, alpha, beta, a, dt_bias, _, state = delta.inputs
        dim = state.shape[-2]
        if norm.inputs[1].shape != (dim,) or dim % 4 or qkv.shape[-1] != conv.outputs[0].shape[-1]:
            return None
        inputs = (qkv, alpha, beta, node.inputs[0], w, a, dt_bias, norm.inputs[1], pos, conv_state, state)
        if len(inputs) + 2 > ctx.caps.max_storage_bindings:
            return None
        params = {**delta.params, "eps": norm.params["eps"]}
        return [conv, delta, norm, node], Node("CONV_DELTA_NET", inputs, (node.outputs[0], conv_state, state), params)

    return rewrite(nodes, outputs, match)


def pack_delta_net(nodes: Nodes) -> Nodes:
    """The four products that CONV_DELTA_NET reads write one packed tensor; neighbours of one type become one product."""
    index = Index(nodes)
    for fused in [n for n in nodes if n.op == "CONV_DELTA_NET" and "packed" not in n.params]:
        index.update(nodes)
        (qkv, alpha, beta, z), rest = fused.inputs[:4], fused.inputs[4:]
        products = may_pack([index.producer.get(t.name) for t in (qkv, z, alpha, beta)], index)
        if products:
            width = sum(p.inputs[0].shape[0] for p in products)
            packed = Tensor(f"{qkv.name}.z", "F32", (qkv.shape[0], width))
            new = Node(fused.op, (packed, *rest), fused.outputs, {**fused.params, "packed": True})
            nodes = replace(nodes, [*products, fused], [*packing(products, packed), new])
    return nodes
