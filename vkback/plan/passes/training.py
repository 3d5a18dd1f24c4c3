"""Fusion of a training step's graph: sums are merged into the products before them, where kernels can add to their result.

ADD of MUL_MAT       -> LINEAR with a residual: an adapter's B a is added to the product with W, the residual stream to the latter
ADD of MUL_MAT_BACK  -> MUL_MAT_BACK with a third operand: gradients from several readers of a value

A product is fused if it goes by matrices or has a low-rank factor (vkback/ops/matmul/low_rank.py). The fused node replaces the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from vkback.graph import Node, Tensor
from vkback.ops.lowering import LowerContext
from vkback.ops.matmul import low_rank
from vkback.ops.matmul.choice import ProductChoice
from vkback.ops.training.mul_mat_back import adds
from vkback.plan.nodes import Index, Nodes, replace

ROLES = ("w", "x", "residual")

PACKING = "gemm/pack_f16.comp"
"""Packs activations or gradients; two products of one value ask for it twice."""


def fuse_training(nodes: Nodes, outputs: Iterable[str], ctx: LowerContext) -> Nodes:
    """The nodes with sums fused into products."""
    for add in [node for node in nodes if node.op == "ADD"]:
        index = Index(nodes, outputs)
        add = index.producer[add.name]
        found = _into_base(add, index, nodes, ctx) or _into_product(add, index, nodes, ctx)
        if found is not None:
            nodes = found
    return nodes


def _alike(add: Node) -> bool:
    """Whether a node is a sum of two tensors of equal shape, both made by nodes, into a third."""
    if add.op != "ADD" or add.params:  # a product has already taken the sum in
        return False
    a, b = add.inputs
    return a.shape == b.shape == add.outputs[0].shape and add.outputs[0].kind == "node"


def _into_product(add: Node, index: Index, nodes: Nodes, ctx: LowerContext) -> Nodes | None:
    """The sum as one product that adds the other operand. If there is a product with a low-rank factor, that one does it, since its operand
    is still being scaled while the product with the weight is made; else the later one."""
    if not _alike(add):
        return None
    numbers = {id(node): i for i, node in enumerate(nodes)}
    pairs = [(index.producer.get(mine.name), mine, other) for mine, other in (add.inputs, add.inputs[::-1])]
    fusable = [(node, other) for node, mine, other in pairs if node is not None and index.read_once(mine) and mine.name != other.name]
    for product, other in sorted(fusable, key=lambda pair: (not _of_factor(pair[0], ctx), -numbers[id(pair[0])])):
        if product.op == "MUL_MAT_BACK" and len(product.inputs) == 2 and adds(product, ctx):
            fused = dataclasses.replace(product, inputs=(*product.inputs, other), outputs=add.outputs)
            return replace(nodes, [product, add], [fused])
        if product.op == "MUL_MAT" and _takes_residual(product, ctx):
            return replace(nodes, [product, add], [_with_residual(product, other, add.outputs[0])])
    return None


def _of_factor(product: Node, ctx: LowerContext) -> bool:
    w = product.inputs[1 if product.op == "MUL_MAT_BACK" else 0]
    return product.op in ("MUL_MAT", "MUL_MAT_BACK") and low_rank.is_factor(w, product.outputs[0].shape[0], ctx)


def _into_base(add: Node, index: Index, nodes: Nodes, ctx: LowerContext) -> Nodes | None:
    """For y + h where y = W x + B a was fused already: W x adds h, if h exists before it."""
    if not _alike(add):
        return None
    numbers = {t.name: i for i, node in enumerate(nodes) for t in node.outputs}
    for mine, other in (add.inputs, add.inputs[::-1]):
        up = index.one_use_producer(mine, "LINEAR")
        if up is None or up.params["roles"] != ROLES:
            continue
        base = index.one_use_producer(up.inputs[2], "MUL_MAT")
        if base is None or not _takes_residual(base, ctx) or numbers.get(other.name, -1) > numbers[base.name]:
            continue
        summed = _with_residual(base, other, base.outputs[0])
        nodes = replace(nodes, [base], [summed])
        return replace(nodes, [up, add], [dataclasses.replace(up, outputs=add.outputs)])
    return None


def _with_residual(product: Node, residual: Tensor, y: Tensor) -> Node:
    return Node("LINEAR", (*product.inputs, residual), (y,), {"roles": ROLES}, product.choice)


def _takes_residual(product: Node, ctx: LowerContext) -> bool:
    """Whether a MUL_MAT can add a residual without a pass of its own."""
    if product.params or len(product.inputs) != 2 or len(product.outputs) != 1 or len(product.outputs[0].shape) != 2:
        return False
    w, x = product.inputs
    if w.kind != "weight" or len(w.shape) != 2:
        return False
    if low_rank.is_factor(w, x.shape[0], ctx):
        return not low_rank.makes_rank(w, back=False)
    return isinstance(product.choice, ProductChoice) and product.choice.kernel == "coop_mat"
