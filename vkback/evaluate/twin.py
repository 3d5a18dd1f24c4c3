"""A model run in float64 numpy: what every device is measured against, and readable as a definition of the graph's meaning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.errors import VkbackError
from vkback.graph import Graph, Node, Tensor
from vkback.models.builder import F16_CACHE, CacheTypes, Head
from vkback.models.registry import Model, text_inputs
from vkback.models.texts import Pooling, Texts
from vkback.ops.case import Tolerance
from vkback.ops.op import OPS

FLOAT = Tolerance(1e-7, 0.02, "f32 throughout; a key on the edge between two F16 moves all logits after it by an NMSE of up to 2e-9")
"""How far logits of a float path may be from the twin's."""

Array = npt.NDArray[Any]

_CACHE_TYPES = {"F16": np.float16, "F32": np.float32, "Q8_0": np.float32, "Q4_0": np.float32}
"""Quantized ones hold what their blocks mean."""


class TwinError(VkbackError):
    """Tokens that the twin's context cannot hold, or a value that the graph does not have."""


class NumpyTwin:
    """A model with a KV cache of n_ctx rows, rounded to its type (F16 by default) like a device's.

    Decoded weights are kept up to `keep_bytes`; the rest are decoded anew at each use, so that a model larger than memory still runs.
    """

    def __init__(
        self, model: Model | Path | str, *, n_ctx: int | None = None, keep_bytes: int = 4 << 30, cache: CacheTypes = F16_CACHE
    ) -> None:
        self.cache = cache
        self.model = model if isinstance(model, Model) else Model.open(model)
        self.n_ctx = n_ctx or self.model.hp.n_ctx_train
        self._room = keep_bytes
        self._kept: dict[str, Array] = {}
        self._states: dict[str, Array] = {}
        self._graphs: dict[tuple[int, Head], Graph] = {}

    def reset(self) -> None:
        """Forget all tokens."""
        self._states.clear()

    def forward(self, tokens: Sequence[int], pos0: int = 0, *, head: Head = "all", wanted: Sequence[str] = ()) -> dict[str, Array]:
        """Run tokens at positions pos0, pos0 + 1, ...; the cache must hold those before.

        ->  the values called `wanted` and the graph's outputs (`result_output` [n or 1, n_vocab]) by name, float64

        Raises TwinError when a token or a position is out of range, or a wanted value is not in the graph.
        """
        n, n_vocab = len(tokens), self.model.hp.n_vocab
        if n == 0 or pos0 < 0 or pos0 + n > self.n_ctx:
            raise TwinError(f"[twin] {n} tokens at position {pos0} do not fit a context of {self.n_ctx}; expected at least 1")
        bad = next((t for t in tokens if not 0 <= t < n_vocab), None)
        if bad is not None:
            raise TwinError(f"[twin] token id {bad} is outside the vocabulary of {n_vocab}")
        inputs = {
            "tokens": np.array(tokens, np.int32),
            "pos": np.arange(pos0, pos0 + n, dtype=np.int32),
            "out_ids": np.array([n - 1], np.int32),
        }
        graph = self._graph(n, head)
        return self.run(graph, inputs, (*wanted, *(t.name for t in graph.outputs)))

    def embed(self, texts: Sequence[Sequence[int]], pooling: Pooling, segments: Sequence[Sequence[int]] | None = None) -> Array:
        """Vectors of texts, float64 [texts, width]; of every token for the pooling "none". One text goes through at a time. segments:
        those of their tokens."""
        found = []
        for i, text in enumerate(texts):
            self.reset()
            graph = self.model.text_graph(len(text), self.n_ctx, Texts(1, pooling), self.cache)
            given = text_inputs(self.model.architecture, graph, [text], len(text), pooling, segments[i : i + 1] if segments else None)
            (output,) = graph.outputs
            found.append(self.run(graph, given, [output.name])[output.name])
        return np.concatenate(found)

    def run(self, graph: Graph, inputs: dict[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        """Run any graph of this model's weights. Values are dropped after their last use unless wanted."""
        known = graph.tensors()
        missing = next((name for name in wanted if name not in known), None)
        if missing is not None:
            raise TwinError(f"[twin] the graph has no value called {missing}; a layer's values are called like ffn_out-0")
        last_use = {t.name: i for i, node in enumerate(graph.nodes) for t in node.inputs}
        values = dict(inputs)
        for i, node in enumerate(graph.nodes):
            for tensor, value in zip(node.outputs, self._compute(node, values), strict=True):
                (self._states if tensor.kind == "state" else values)[tensor.name] = value
            for t in node.inputs:
                if last_use[t.name] == i and t.name not in wanted and t.name not in inputs:
                    values.pop(t.name, None)
        return {name: self._value(known[name], values) for name in wanted}

    def logits(self, tokens: Sequence[int], first: int = 0) -> Array:
        """Logits [len(tokens) - first, n_vocab] of tokens first.. of a fresh context: what `perplexity` asks for."""
        self.reset()
        return self.forward(tokens)["result_output"][first:]

    def generate_greedy(self, prompt: Sequence[int], n: int, stop: Sequence[int] = ()) -> tuple[list[int], list[float]]:
        """The n most likely next tokens, one after another, or fewer when one of `stop` comes (and is returned last).

        ->  ids, and at each step the logit's margin over the second best
        """
        self.reset()
        ids: list[int] = []
        margins: list[float] = []
        fed: Sequence[int] = prompt
        pos = 0
        while len(ids) < n:
            logits = self.forward(fed, pos, head="last")["result_output"][-1]
            pos += len(fed)
            second, best = np.partition(logits, -2)[-2:]
            ids.append(int(OPS["ARGMAX"].reference([logits[None]], {})[0][0]))
            margins.append(float(best - second))
            if ids[-1] in stop:
                break
            fed = ids[-1:]
        return ids, margins

    def _graph(self, n: int, head: Head) -> Graph:
        key = (n, head)
        if key not in self._graphs:
            self._graphs[key] = self.model.graph(n, self.n_ctx, head=head, cache=self.cache)
        return self._graphs[key]

    def _compute(self, node: Node, values: dict[str, Array]) -> list[Array]:
        if node.op == "VIEW":  # its input under another shape
            results = [self._value(node.inputs[0], values)]
        elif node.op == "GET_ROWS" and node.inputs[0].kind == "weight":
            # Decodes the wanted rows, not a table of a hundred thousand.
            rows = self.model.file.tensor(node.inputs[0].name).data[values[node.inputs[1].name]]
            table = quants.decode(node.inputs[0].type, rows)
            results = OPS[node.op].reference([table, np.arange(len(rows))], node.params)
        else:
            results = OPS[node.op].reference([self._value(t, values) for t in node.inputs], node.params)
        return [result.reshape(t.shape) for t, result in zip(node.outputs, results, strict=True)]

    def _value(self, tensor: Tensor, values: dict[str, Array]) -> Array:
        if tensor.kind == "weight":
            return self._weight(tensor)
        if tensor.kind == "state":
            if tensor.name not in self._states:
                self._states[tensor.name] = np.zeros(tensor.shape, _CACHE_TYPES[tensor.type])
            return self._states[tensor.name]
        return values[tensor.name]

    def _weight(self, tensor: Tensor) -> Array:
        kept = self._kept.get(tensor.name)
        if kept is not None:
            return kept
        found = [self.model.file.tensor(name) for name in self.model.file.joined.get(tensor.name, (tensor.name,))]
        parts = [quants.decode(t.type, t.data).astype(np.float64) for t in found]
        decoded = (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(tensor.shape)
        if tensor.recipe is not None:
            decoded *= tensor.recipe.scale
        if decoded.nbytes <= self._room:
            self._room -= decoded.nbytes
            self._kept[tensor.name] = decoded
        return decoded
