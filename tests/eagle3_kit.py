"""EAGLE-3 heads for tests: files, and what they compute in plain numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from make_gguf import write_gguf

from vkback.models import GgufFile
from vkback.models.registry import Model

Floats = npt.NDArray[np.float64]

EPS, BASE = 1e-5, 10000.0


def head_tensors(
    n_embd: int, n_target: int, n_ff: int, heads: tuple[int, int, int], known: int, seed: int = 1
) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights. heads: of Q, of K and V, and their width; known: tokens of the output layer."""
    rng = np.random.default_rng(seed)
    n, n_kv, dim = heads

    def matrix(rows: int, cols: int) -> npt.NDArray[np.float32]:
        return np.asarray(rng.standard_normal((rows, cols)) / np.sqrt(cols), np.float32)

    out = {"fc.weight": matrix(n_embd, 3 * n_target), "output.weight": matrix(known, n_embd)}
    out |= {f"blk.0.attn_{kind}.weight": matrix(count * dim, 2 * n_embd) for kind, count in (("q", n), ("k", n_kv), ("v", n_kv))}
    out |= {"blk.0.attn_output.weight": matrix(n_embd, n * dim), "blk.0.ffn_down.weight": matrix(n_embd, n_ff)}
    out |= {f"blk.0.ffn_{kind}.weight": matrix(n_ff, n_embd) for kind in ("gate", "up")}
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm")
    return out | {f"{stem}.weight": rng.uniform(0.5, 1.5, n_embd).astype(np.float32) for stem in norms}


def write_head(
    path: Path,
    target: Path,
    *,
    layers: Sequence[int] = (0, 1, 2),
    n_embd: int = 0,
    heads: tuple[int, int, int] = (3, 1, 32),
    ids: npt.NDArray[np.int64] | None = None,
    metadata: Mapping[str, Any] | None = None,
    made: Mapping[str, npt.NDArray[Any] | None] | None = None,
    arch: str = "eagle3",
    seed: int = 1,
) -> Path:
    """A head for a target's file, with its vocabulary. ids: of the tokens that its output layer knows; made: tensors in the place of random
    ones, None: without; metadata: likewise, of keys under its prefix; another vocab_size leaves the vocabulary out."""
    model = Model.open(target)
    hp = model.hp
    n_embd, n_ff = n_embd or hp.n_embd, 160
    tensors: dict[str, npt.NDArray[Any] | None] = {
        **head_tensors(n_embd, hp.n_embd, n_ff, heads, hp.n_vocab if ids is None else len(ids), seed),
        **({} if ids is None else {"d2t": ids}),
        **(made or {}),
    }
    keys: dict[str, Any] = {
        "context_length": hp.n_ctx_train,
        "embedding_length": n_embd,
        "block_count": 1,
        "feed_forward_length": n_ff,
        "attention.head_count": heads[0],
        "attention.head_count_kv": heads[1],
        "attention.key_length": heads[2],
        "attention.value_length": heads[2],
        "attention.layer_norm_rms_epsilon": EPS,
        "rope.dimension_count": heads[2],
        "rope.freq_base": BASE,
        "vocab_size": hp.n_vocab,
        "target_hidden_size": hp.n_embd,
        "target_layers": list(layers),
    }
    keys |= metadata or {}
    kept = {name: t for name, t in tensors.items() if t is not None}
    types = {name: "I64" if t.dtype == np.int64 else "F32" for name, t in kept.items()}
    stated = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    stated |= {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in model.file.metadata.items()
        if key.startswith("tokenizer.ggml.") and model.has_text and "vocab_size" not in (metadata or {})
    }
    return write_gguf(path, arch, stated, {name: (types[name], t) for name, t in kept.items()})


class Head:
    """A head in float64, one entry after the other."""

    def __init__(self, path: Path, table: Floats) -> None:
        """table: the target's embedding."""
        f = GgufFile.open(path)
        self._w = {
            name: np.asarray(t.data).reshape(-1).view(np.int64 if t.type == "I64" else np.float32).reshape(t.shape).astype(np.float64)
            for name, t in f.tensors.items()
        }
        self._n, self._n_kv, self._dim = (
            int(f.metadata[f"eagle3.attention.{key}"]) for key in ("head_count", "head_count_kv", "key_length")
        )
        self._normed_row = bool(f.metadata.get("eagle3.norm_before_residual", False))
        self._normed_inputs = bool(f.metadata.get("eagle3.norm_before_fc", False))
        self._table = self._w.get("token_embd.weight", table)
        self._k: list[Floats] = []
        self._v: list[Floats] = []

    def _norm(self, x: Floats, stem: str) -> Floats:
        return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * self._w[f"{stem}.weight"])

    def rows(self, inputs: Floats) -> Floats:
        """Rows g of inputs [n, 3 n_target]."""
        return (self._norm(inputs, "enc.output_norm") if self._normed_inputs else inputs) @ self._w["fc.weight"].T

    def entry(self, token: int, g: Floats) -> tuple[Floats, Floats]:
        """The next entry: logits of the tokens that the output layer knows, and the row that stands for the next g."""
        w, at = self._w, len(self._k)
        normed = self._norm(g, "blk.0.attn_norm_2")
        x = np.concatenate([self._norm(self._table[token], "blk.0.attn_norm"), normed])
        q, k, v = (
            (w[f"blk.0.attn_{kind}.weight"] @ x + w.get(f"blk.0.attn_{kind}.bias", np.zeros(1))).reshape(-1, self._dim) for kind in "qkv"
        )
        self._k.append(self._turned(k, at))
        self._v.append(v)
        heads = []
        for i, row in enumerate(self._turned(q, at)):
            of = i * self._n_kv // self._n
            scores = np.array([row @ each[of] for each in self._k]) / np.sqrt(self._dim)
            odds = np.exp(scores - scores.max())
            heads.append(odds @ np.array([each[of] for each in self._v]) / odds.sum())
        y = (normed if self._normed_row else g) + w["blk.0.attn_output.weight"] @ np.concatenate(heads)
        z = self._norm(y, "blk.0.ffn_norm")
        gate = w["blk.0.ffn_gate.weight"] @ z
        y = y + w["blk.0.ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * (w["blk.0.ffn_up.weight"] @ z))
        return w["output.weight"] @ self._norm(y, "output_norm"), y

    def _turned(self, x: Floats, at: int) -> Floats:
        """Heads rotated to a position: pairs of neighbours."""
        angle = at * BASE ** (-np.arange(0, self._dim, 2) / self._dim) / self._w.get("rope_freqs.weight", np.ones(1))
        a, b = x[:, 0::2], x[:, 1::2]
        return np.stack([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1).reshape(x.shape)

    def id_of(self, place: int) -> int:
        return int(self._w["d2t"][place]) if "d2t" in self._w else place
