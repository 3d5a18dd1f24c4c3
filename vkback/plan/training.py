"""The graph of a training step, made from a model's own graph.

Attention reads the step's own queries, keys and values in F32 and keeps its log-sum-exp, so that the backward pass need not keep the n x n
weights; there is no KV cache. Norms include their weight. The logits are followed by the loss, then by the backward nodes
(vkback/plan/autodiff.py). The optimizer's nodes are a separate graph: gradients may be accumulated over several batches before it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from vkback.graph import Graph, Node, Tensor, live
from vkback.ops.lowering import PlanError
from vkback.ops.training.optimizers import adamw_params
from vkback.plan.autodiff import Backward, differentiate, gradient
from vkback.plan.cost.liveness import layer_of
from vkback.plan.passes.lora import Lora, adapted, is_adapter

Optimizer = Literal["sgd", "adamw"]
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "adamw")

TARGETS = "targets"
D_LOSS = "d_loss"
LOSS = "loss"
PARAMS = "optimizer"
"""Name of the input that holds the optimizer's parameters."""

N_PARAMS: Mapping[str, int] = {"sgd": 2, "adamw": 7}


@dataclass(frozen=True)
class TrainingGraph:
    """A step's graph in parts.

    forward   up to the loss [1], which is its output
    backward  the rest
    trained   weights that have gradients, in the order in which the forward reads them
    """

    forward: Graph
    backward: Backward
    trained: tuple[Tensor, ...]

    @property
    def graph(self) -> Graph:
        """Forward and backward as one graph."""
        return Graph([*self.forward.nodes, *self.backward.nodes], self.forward.outputs)

    @property
    def loss(self) -> Graph:
        """The forward part alone, without what only gradients need."""
        return Graph(live(self.forward.nodes, self.forward.outputs), self.forward.outputs)


def training_graph(
    model: Graph, *, sequences: int = 1, f32: bool = True, lora: Lora | None = None, accumulate: bool = False, checkpoint: bool = False
) -> TrainingGraph:
    """The training step of a model's graph with head "all", whose n tokens are `sequences` texts of equal length.

    f32      weights are F32, whatever the file has
    lora     adapters; only they are trained then, and the weights do not change
    accumulate  gradients are added to those that are kept
    checkpoint  keep of each layer only what later layers read, and compute the rest again in the backward pass: less memory, more time, the
                same bits
    Raises PlanError for a graph with an op that has no rule, or for a weight to train that is not F32.
    """
    nodes = _without_caches(_normed(model.nodes), sequences)
    if lora is not None:
        nodes = adapted(nodes, lora)
    if f32 and lora is None:
        nodes = [replace(node, inputs=tuple(map(_as_f32, node.inputs))) for node in nodes]
    (logits,) = model.outputs
    n = logits.shape[0]
    targets, d_loss = Tensor(TARGETS, "I32", (n,), "input"), Tensor(D_LOSS, "F32", (1,), "input")
    loss = Tensor(LOSS, "F32", (1,))
    nodes.append(Node("CROSS_ENTROPY_LOSS", (logits, targets), (loss, Tensor("loss_lse", "F32", (n,))), {"lse": True}))
    forward = Graph(nodes, (loss,))
    weights = {t.name: t for node in nodes for t in node.inputs if t.kind == "weight" and _is_trained(node, t)}
    if lora is not None:
        weights = {name: t for name, t in weights.items() if is_adapter(name)}
    for t in weights.values():
        if t.type != "F32":
            raise PlanError(f"[training] {t}: a quantized weight cannot be trained; train it as F32, or adapters beside it (LoRA)")
    wanted = tuple(weights.values())
    found = differentiate(forward, loss, d_loss, wanted, accumulate=accumulate)
    return TrainingGraph(forward, _made_again(forward.nodes, found) if checkpoint else found, wanted)


def optimizer_graph(trained: Iterable[Tensor], optimizer: Optimizer, max_norm: float = 0.0) -> Graph:
    """One step of the optimizer; each weight is updated in place. Its parameters are the input PARAMS,
    laid out as for OPT_STEP_* in vkback/ops.

    max_norm  gradients are scaled so that their total norm is at most this; 0: not scaled
    """
    graph = Graph()
    weights = list(trained)
    params = Tensor(PARAMS, "F32", (N_PARAMS[optimizer],), "input")
    scale: tuple[Tensor, ...] = ()
    if max_norm > 0:
        total = graph.emit("SUM_SQUARES", "grad_squares", "F32", (1,), tuple(map(gradient, weights)))
        scale = (Tensor("grad_scale", "F32", (1,)),)
        norm = Tensor("grad_norm", "F32", (1,))
        graph.add("CLIP_SCALE", (total,), (*scale, norm), max_norm=max_norm)
        graph.outputs = (norm,)
    for w in weights:
        if optimizer == "sgd":
            graph.add("OPT_STEP_SGD", (w, gradient(w), params, *scale), (w,))
        else:
            m, v = moments(w)
            graph.add("OPT_STEP_ADAMW", (w, gradient(w), m, v, params, *scale), (w, m, v))
    return graph


def moments(weight: Tensor) -> tuple[Tensor, Tensor]:
    """AdamW's running means of a weight's gradient and of its square."""
    m, v = (Tensor(f"{which} {weight.name}", "F32", weight.shape, "state") for which in ("adam_m", "adam_v"))
    return m, v


def optimizer_params(
    optimizer: Optimizer, t: int, lr: float, betas: tuple[float, float], eps: float, decay: float
) -> npt.NDArray[np.float32]:
    """The value of the input PARAMS at step t, counted from 1."""
    return np.array([lr, decay], np.float32) if optimizer == "sgd" else adamw_params(t, lr, *betas, eps, decay)


def _made_again(nodes: Sequence[Node], backward: Backward) -> Backward:
    """The backward nodes, with copies of a layer's forward nodes before the first node that reads a value private to that layer. The last
    layer's values still exist when its gradients are made."""
    layers = {t.name: layer_of(node) for node in nodes for t in node.outputs}
    last = max((layer for layer in layers.values() if layer is not None), default=None)
    crossing = {t.name for node in nodes for t in node.inputs if layers.get(t.name) != layer_of(node)}
    again = {
        t.name: replace(t, name=f"{t.name} (again)")
        for node in nodes
        for t in node.outputs
        if layer_of(node) not in (None, last) and t.name not in crossing
    }

    def renamed(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return tuple(again.get(t.name, t) for t in tensors)

    wanted: dict[int, set[str]] = {}
    for node in backward.nodes:
        for t in node.inputs:
            if t.name in again:
                wanted.setdefault(layers[t.name] or 0, set()).add(t.name)
    out = replace(backward, nodes=[], origins=[])
    done: set[int] = set()
    for node, origin in zip(backward.nodes, backward.origins, strict=True):
        for layer in sorted({layers[t.name] or 0 for t in node.inputs if t.name in again} - done, reverse=True):
            done.add(layer)
            own = [n for n in nodes if layer_of(n) == layer and n.name in again]
            for copied in live(own, [Tensor(name, "F32", ()) for name in wanted[layer]]):
                out.nodes.append(replace(copied, inputs=renamed(copied.inputs), outputs=renamed(copied.outputs)))
                out.origins.append(None)
        out.nodes.append(replace(node, inputs=renamed(node.inputs)))
        out.origins.append(origin)
    return out


def _is_trained(node: Node, weight: Tensor) -> bool:
    """Whether a weight is a parameter: frequency factors of RoPE are not."""
    return not (node.op == "ROPE" and weight.name in {t.name for t in node.inputs[2:]})


def _as_f32(t: Tensor) -> Tensor:
    return replace(t, type="F32") if t.kind == "weight" else t


def _normed(nodes: Sequence[Node]) -> list[Node]:
    """Norms merged with the weights that follow them: of a norm, only its input is kept for the backward pass."""
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for t in node.inputs:
            readers.setdefault(t.name, []).append(node)

    def next_with_weight(node: Node, op: str) -> Node | None:
        found = readers.get(node.name, [])
        fits = len(found) == 1 and found[0].op == op and found[0].inputs[-1].kind == "weight" and len(found[0].inputs[-1].shape) == 1
        return found[0] if fits else None

    out: list[Node] = []
    taken: set[str] = set()
    for node in nodes:
        if node.name in taken:
            continue
        mul = next_with_weight(node, "MUL") if node.op in ("RMS_NORM", "NORM") else None
        add = next_with_weight(mul, "ADD") if mul is not None and node.op == "NORM" else None
        last = mul if node.op == "RMS_NORM" else add
        if mul is None or last is None:
            out.append(node)
            continue
        taken |= {mul.name, last.name}
        weights = (mul.inputs[-1], last.inputs[-1]) if add else (mul.inputs[-1],)
        op = "NORM_MUL_ADD" if add else "RMS_NORM_MUL"
        out.append(Node(op, (*node.inputs, *weights), last.outputs, node.params))
    return out


def _without_caches(nodes: Sequence[Node], sequences: int) -> list[Node]:
    """Attention over the step's own keys and values in place of a cache."""
    stored = {node.outputs[0].name: node.inputs[0] for node in nodes if node.op == "SET_ROWS"}
    out: list[Node] = []
    for node in nodes:
        if node.op == "SET_ROWS":
            continue
        if node.op != "FLASH_ATTN_EXT":
            out.append(node)
            continue
        q, cache_k, cache_v, _, *more = node.inputs
        if more or not {cache_k.name, cache_v.name} <= set(stored) or set(node.params) - {"scale", "window", "softcap"}:
            raise PlanError(
                f"[training] {node.name}: attention with sinks or chunks, or with queries or values in parts, cannot be trained"
            )
        k, v, y = stored[cache_k.name], stored[cache_v.name], node.outputs[0]
        n, heads = q.shape[:2]
        out_heads = Tensor(f"{y.name} (heads)", "F32", (n, heads, v.shape[-1]))
        lse = Tensor(f"{y.name} (lse)", "F32", (n, heads))
        params = {"scale": node.params["scale"], "window": node.params.get("window", 0), "sequences": sequences}
        params |= {"softcap": node.params["softcap"]} if "softcap" in node.params else {}
        out.append(Node("FLASH_ATTN_LSE", (q, k, v), (out_heads, lse), params))
        out.append(Node("VIEW", (out_heads,), (y,)))
    return out
