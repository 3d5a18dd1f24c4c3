"""The graph of a model as a short intermediate representation: a line a step, numbered within its layer.

    L0 N1 LINEAR_QKV     outputs=[L0:N1:0] inputs=[L0:N0]

Steps are made from the nodes of the graph by these rules, first match first; layers only, IN is what goes into the layer:
- ATTENTION: an attention node with all that lies between its projections and itself (norms and RoPE of heads, stores), and the product with
  the output weight. The three products that make its queries, keys and values from one tensor are LINEAR_QKV, otherwise each is LINEAR.
- A product of a gate and one of an up weight with the same tensor, which one gated unit reads, are one LINEAR and a SPLIT.
- A norm with its weight and bias is RMSNORM or LAYERNORM, a product with a weight and its bias LINEAR; a view is the value it shows.
- Any other node is a step by itself, under the name of its op.
Inputs are those made in the layer or before it, in the order in which they were made; weights, caches and positions are not shown.

The backward listing has the same steps from the last to the first:

    L0 N8 LINEAR_BWD     outputs=[L0:N8:0] inputs=[L0:N9:1] saved=[L0:N7] grads=[ffn_down.weight]

Here outputs are the gradients that the step makes, one for each value that its forward step reads, in their order; inputs are the gradients
of what the forward step made, one from each step that reads it (several are added up; OUT comes from behind the layer). saved: values of
the forward pass that the step reads again. grads: weights of the layer of which it makes the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vkback.gguf.hparams import HParams
from vkback.graph import Graph, Node, Tensor
from vkback.ops.glu import GLU
from vkback.plan.cost.liveness import layer_of
from vkback.plan.training import TrainingGraph

NORMS = {"RMS_NORM": "RMSNORM", "NORM": "LAYERNORM", "RMS_NORM_MUL": "RMSNORM", "NORM_MUL_ADD": "LAYERNORM"}
ATTENTION = ("FLASH_ATTN_EXT", "FLASH_ATTN_LSE")


@dataclass(frozen=True)
class Step:
    """One line: its name, results in their order, the values it reads, and the nodes that it is made of."""

    name: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    nodes: tuple[Node, ...] = ()


def forward(hp: HParams, graph: Graph, n_ctx: int, first: int = 0, last: int | None = None) -> Iterator[str]:
    """The lines of layers first to last - 1, below the model's sizes."""
    yield "=== Forward IR ==="
    yield _sizes(hp, n_ctx)
    layers = _layers(graph)
    for layer in range(first, hp.n_layer if last is None else last):
        place: dict[str, tuple[int, int]] = {}
        for number, step in enumerate(steps(layers.get(layer, []))):
            places = sorted(place.get(name, (-1, 0)) for name in step.inputs)
            inputs = [f"L{layer}:N{at}" if at >= 0 else "IN" for at, _ in dict.fromkeys(places)]
            outputs = [f"L{layer}:N{number}:{index}" for index in range(len(step.outputs))]
            place |= {name: (number, index) for index, name in enumerate(step.outputs)}
            yield f"  L{layer} N{number} {step.name:14} outputs=[{','.join(outputs)}] inputs=[{','.join(inputs)}]"


def backward(hp: HParams, training: TrainingGraph, n_ctx: int) -> Iterator[str]:
    """The lines of all layers, the last first, below the model's sizes."""
    yield "=== Backward IR ==="
    yield _sizes(hp, n_ctx)
    layers = _layers(training.forward)
    made: dict[int, list[Node]] = {}
    for node, origin in zip(training.backward.nodes, training.backward.origins, strict=True):
        made.setdefault(id(origin), []).append(node)
    passed = {id(node) for node in training.backward.through}
    for layer in reversed(range(hp.n_layer)):
        found = steps(layers.get(layer, []))
        values = {name: f"L{layer}:N{number}" for number, step in enumerate(found) for name in step.outputs}
        known = {t.name: values[step.outputs[0]] for step in found for node in step.nodes for t in node.outputs} | values
        readers: dict[str, list[str]] = {}
        place = {name: (number, index) for number, step in enumerate(found) for index, name in enumerate(step.outputs)}
        for number, step in enumerate(found):
            for index, name in enumerate(sorted(step.inputs, key=lambda name: place.get(name, (-1, 0)))):
                readers.setdefault(name, []).append(f"L{layer}:N{number}:{index}")
        for number, step in reversed(list(enumerate(found))):
            nodes = [b for node in step.nodes for b in made.get(id(node), [])]
            if step.nodes and not any(id(node) in passed for node in step.nodes):
                continue
            inputs = dict.fromkeys(r for name in step.outputs for r in readers.get(name, ["OUT"]))
            outputs = [f"L{layer}:N{number}:{index}" for index in range(len(step.inputs))]
            line = f"  L{layer} N{number} {step.name + '_BWD':14} outputs=[{','.join(outputs)}] inputs=[{','.join(inputs)}]"
            read = dict.fromkeys(t.name for node in nodes for t in node.inputs)
            saved = dict.fromkeys(known.get(name, "IN") for name in read if name in known or name in step.inputs)
            weights = dict.fromkeys(t.name for node in nodes for t in node.outputs if t.kind == "state")
            short = [name.removeprefix("grad ").removeprefix(f"blk.{layer}.") for name in weights]
            yield line + (f" saved=[{','.join(saved)}]" if saved else "") + (f" grads=[{','.join(short)}]" if short else "")


def _sizes(hp: HParams, n_ctx: int) -> str:
    return (
        f"Graph: layers={hp.n_layer}, hidden_size={hp.n_embd}, intermediate_size={hp.n_ff}, heads={hp.n_head}, kv_heads={hp.n_head_kv}, "
        f"vocab={hp.n_vocab}, ctx={n_ctx}, eps={hp.rms_eps:g}, rope_theta={hp.rope.freq_base:g}"
    )


def _layers(graph: Graph) -> dict[int, list[Node]]:
    """Nodes by layer."""
    layers: dict[int, list[Node]] = {}
    for node in graph.nodes:
        layer = layer_of(node)
        if layer is not None:
            layers.setdefault(layer, []).append(node)
    return layers


def steps(nodes: Sequence[Node]) -> list[Step]:
    """The steps of one layer's nodes; see the module's text."""
    layer = _Layer(nodes)
    for node in nodes:
        if node.op in ATTENTION:
            layer.attention(node)
    for node in nodes:
        if node.op in GLU and len(node.inputs) == 2:
            layer.gated(node)
    for node in nodes:
        if node.op in NORMS:
            layer.chain(node, NORMS[node.op], ("MUL", "ADD"))
        elif node.op in ("MUL_MAT", "MUL_MAT_ID"):
            layer.chain(node, "LINEAR" if node.op == "MUL_MAT" else "LINEAR_ID", ("ADD", "ADD_ID"))
        elif node.op != "VIEW":
            layer.take(node.op, [node])
    return layer.in_order()


class _Layer:
    """Nodes of a layer that are put into steps one after the other; none goes into two."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._at = {id(node): i for i, node in enumerate(nodes)}
        self._made = {t.name: node for node in nodes for t in node.outputs if t.kind == "node"}
        self._readers: dict[str, list[Node]] = {}
        for node in nodes:
            for t in node.inputs:
                self._readers.setdefault(t.name, []).append(node)
        self._stores = {node.outputs[0].name: node for node in nodes if node.op == "SET_ROWS"}
        self._taken: set[int] = set()
        self._found: list[tuple[int, int, Step]] = []
        """By the place of a step's last node, and among those of one place."""

    def take(self, name: str, nodes: list[Node], outputs: tuple[str, ...] = ()) -> None:
        """A step of some nodes that are in none. outputs: its results, by default those of the last node."""
        if any(id(node) in self._taken for node in nodes):
            return
        self._taken |= {id(node) for node in nodes}
        inside = {t.name for node in nodes for t in node.outputs}
        read = (self._shown(t) for node in nodes for t in node.inputs if t.kind == "node")
        self._add(
            max(self._at[id(node)] for node in nodes),
            Step(
                name,
                outputs or tuple(t.name for t in nodes[-1].outputs if t.kind == "node") or (nodes[-1].name,),
                tuple(name for name in dict.fromkeys(read) if name not in inside),
                tuple(nodes),
            ),
        )

    def _add(self, at: int, step: Step) -> None:
        self._found.append((at, len(self._found), step))

    def in_order(self) -> list[Step]:
        return [step for _, _, step in sorted(self._found, key=lambda found: found[:2])]

    def _shown(self, tensor: Tensor) -> str:
        """The value that a tensor is, views taken off."""
        node = self._made.get(tensor.name)
        return self._shown(node.inputs[0]) if node is not None and node.op == "VIEW" else tensor.name

    def chain(self, node: Node, name: str, more: tuple[str, ...]) -> None:
        """A step of a node and what comes after it with a weight: `more`, each at most once."""
        self.take(name, self._with_weights(node, more))

    def _with_weights(self, node: Node, more: tuple[str, ...]) -> list[Node]:
        nodes = [node]
        for op in more:
            readers = self._readers.get(nodes[-1].name, [])
            if len(readers) == 1 and readers[0].op == op and any(t.kind == "weight" for t in readers[0].inputs):
                nodes.append(readers[0])
        return nodes

    def attention(self, node: Node) -> None:
        """LINEAR_QKV or LINEARs, and ATTENTION."""
        inside, projections = [node], []
        todo = [*node.inputs]
        while todo:
            tensor = todo.pop()
            maker = self._stores.get(tensor.name) if tensor.kind == "state" else self._made.get(tensor.name)
            if maker is None or maker in inside or maker in projections:
                continue
            if maker.op == "MUL_MAT" and maker.inputs[0].kind == "weight":
                projections.append(maker)
                continue
            inside.append(maker)
            todo += [t for t in maker.inputs if not (t.kind == "state" and maker.op == "SET_ROWS")]
        last = node
        while len(readers := self._readers.get(last.name, [])) == 1:
            last = readers[0]
            inside.append(last)
            if last.op == "MUL_MAT":
                inside += self._with_weights(last, ("ADD",))[1:]
                break
        projections.sort(key=lambda n: self._at[id(n)])
        biased = [self._with_weights(p, ("ADD",)) for p in projections]
        if len(projections) == 3 and len({p.inputs[1].name for p in projections}) == 1:
            nodes = [n for chain in biased for n in chain]
            inside = [n for n in inside if n not in nodes]
            self.take("LINEAR_QKV", nodes, (nodes[-1].name,))
            for chain in biased:  # q, k and v are one result
                self._made[chain[-1].name] = Node("VIEW", nodes[-1].outputs, chain[-1].outputs) if chain[-1] is not nodes[-1] else nodes[-1]
        inside.sort(key=lambda n: self._at[id(n)])
        self.take("ATTENTION", inside, (inside[-1].name,))

    def gated(self, node: Node) -> None:
        """LINEAR and SPLIT of a gated unit's gate and up."""
        gate, up = (self._made.get(t.name) for t in node.inputs)
        if gate is None or up is None or gate.op != "MUL_MAT" or up.op != "MUL_MAT" or gate.inputs[1] != up.inputs[1]:
            return
        both = f"{gate.name}+{up.name}"
        self.take("LINEAR", [gate, up], (both,))
        self._add(self._at[id(up)], Step("SPLIT", (gate.name, up.name), (both,)))


__all__ = ["Step", "backward", "forward", "steps"]
