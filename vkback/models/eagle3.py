"""EAGLE-3: a head in a file of its own, trained for one target, that predicts the token after the next one.

It reads hidden rows of the target: of each token what goes into three of its layers, side by side, through one matrix.

    g[p] = fc [into layer a, into layer b, into layer c]       (norm_before_fc: an RMS norm of all three before)

Its entry for the token at position p reads that token's embedding, and row g[p - 1]. It is one layer, Q, K and V of which read both:

    x = [attn_norm(embedding), attn_norm_2(g[p - 1])]
    y = g[p - 1] + attention(x)                                (norm_before_residual: the normed row in the place of the first)
    y = y + feed_forward(ffn_norm(y))
    logits of the token at p + 1 = output(output_norm(y))

y, without the norm, stands for g[p] while the target itself has made none, so the head predicts several tokens, one after the other. Its
output layer may know fewer tokens than the target: `d2t` has the target's id of each. Embedding and output layer are the target's where the
file has none.

The target keeps rows g and the head's KV cache by position, as for an MTP block (vkback/models/mtp.py). Positions of RoPE are one less than
the token's, which changes nothing.

Files are those of llama.cpp: general.architecture "eagle3"; keys target_layers, target_hidden_size, norm_before_residual, norm_before_fc;
tensors fc, enc.output_norm (of norm_before_fc), blk.0, output_norm, and perhaps output, token_embd, d2t (I64) and rope_freqs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.gguf.file import GgufError, GgufFile, GgufTensor, quoted
from vkback.gguf.hparams import RMS_EPS, HParams, Metadata
from vkback.graph import Graph, Recipe, Tensor
from vkback.models import mtp
from vkback.models.blocks import attention, feed_forward, feed_forward_norm, rms_norm
from vkback.models.builder import GraphBuilder
from vkback.models.keys import COMMON, unread_keys
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors

if TYPE_CHECKING:
    from vkback.models.registry import Model

ARCH = "eagle3"

LAYERS = 3
"""Of the target, whose inputs the head reads."""

KEYS = frozenset({"target_layers", "target_hidden_size", "norm_before_residual", "norm_before_fc"})

IDS = "d2t"
UNUSED = ("t2d",)
"""Tensors that some files have, and that drafting does not need."""

KNOWN = 32000
"""Tokens that the output layer of most published heads knows."""

Shapes = dict[str, tuple[int, ...]]
Fail = Callable[[str], GgufError]


def is_head(path: Path) -> bool:
    """Whether a GGUF file is such a head. Raises GgufError where it cannot be read."""
    return GgufFile.open(path).metadata.get("general.architecture") == ARCH


@dataclass(frozen=True)
class Eagle3Head:
    """A head that fits its target.

    path    its file
    il      number of its layer, behind the blocks of the target
    layers  of the target, whose inputs it reads
    hp      its hyperparameters, with its weights by the names that they have beside the target's
    """

    path: Path
    il: int
    layers: tuple[int, ...]
    hp: HParams
    norm_before_residual: bool
    norm_before_fc: bool

    @property
    def ids(self) -> Tensor | None:
        """The target's id of each token that its output layer knows, I32; None: they are the target's."""
        return self.hp.weights.get(named(IDS, self.il))

    def add_entries(self, b: GraphBuilder, inputs: Sequence[Tensor]) -> None:
        """Behind a target's own nodes: store rows g of its tokens, and their entries, whose caches alone are wanted.

        inputs  of `layers`, [n, n_embd] each
        """
        x = b.graph.emit("CONCAT", "eagle_inputs", "F32", (b.n, sum(t.shape[1] for t in inputs)), tuple(inputs), axis=1)
        m = self._builder(b)
        if self.norm_before_fc:
            x = rms_norm(m, x, named("enc.output_norm", self.il), "eagle_inputs_norm", plain="eagle_inputs_rms")
        mtp.keep(b, m.linear(x, named("fc", self.il), self.hp.n_embd, "eagle_fc"))
        self._entries(b, m)

    def graph(self, b: GraphBuilder) -> Graph:
        """The graph of the head alone: logits of the tokens after those of a builder of the target."""
        m = self._builder(b)
        y = self._entries(b, m)
        mtp.keep(b, y)
        normed = rms_norm(m, y, named("output_norm", self.il), "eagle_norm", plain="eagle_rms")
        own = self.hp.weights.get(named("output.weight", self.il))
        if own is None:
            return b.finish(b.logits(normed))
        return b.finish(b.graph.emit("MUL_MAT", "result_output", "F32", (b.n, own.shape[0]), (own, normed)))

    def _builder(self, b: GraphBuilder) -> GraphBuilder:
        """Of its own weights, in the graph of b."""
        m = copy(b)
        m.hp, m.head, m.cache_rows = self.hp, "all", b.n_ctx + mtp.ROOM
        return m

    def _entries(self, b: GraphBuilder, m: GraphBuilder) -> Tensor:
        """What its layer makes of the tokens [n, n_embd]."""
        il, n_embd = self.il, self.hp.n_embd
        m.pos = m.rows = b.graph.emit("PREVIOUS", "eagle_pos", "I32", (b.n,), (b.pos,))
        table = self.hp.weights.get(named("token_embd.weight", il))
        if table is not None:
            embedded = b.graph.emit("GET_ROWS", "eagle_embd", "F32", (b.n, n_embd), (table, b.tokens))
        else:  # of the target, which has them as they are already, whatever it makes of them
            there = (out for node in b.graph.nodes for out in node.outputs if node.op == "GET_ROWS" and out.name == "inp_embd")
            embedded = next(there, None) or b.embed()
        g = b.graph.emit("GET_ROWS", "eagle_hidden", "F32", (b.n, n_embd), (mtp.hidden_rows(b, n_embd), m.pos))
        token = rms_norm(m, embedded, f"blk.{il}.attn_norm", f"attn_norm-{il}", plain=f"attn_rms-{il}")
        text = rms_norm(m, g, f"blk.{il}.attn_norm_2", f"attn_norm_2-{il}", plain=f"attn_rms_2-{il}")
        both = b.graph.emit("CONCAT", f"eagle_concat-{il}", "F32", (b.n, 2 * n_embd), (token, text), axis=1)
        y = m.add(attention(m, both, il, rope=self.hp.rope), text if self.norm_before_residual else g, f"ffn_inp-{il}")
        return m.add(feed_forward(m, feed_forward_norm(m, y, il), il), y, f"l_out-{il}")


def head_shape(s: ModelShape, vocabulary: str) -> ModelShape:
    """Of a head for a dense model of a shape, as published ones are: its layer as wide as one of the model's."""
    layers = (min(2, s.n_layer - 1), s.n_layer // 2, max(s.n_layer - 3, 0))
    return ModelShape(
        ARCH,
        1,
        s.n_embd,
        s.n_ff,
        s.n_head,
        s.n_head_kv,
        s.head_dim,
        s.n_vocab,
        s.n_ctx,
        s.freq_base,
        s.rms_eps,
        vocabulary=vocabulary,
        metadata={"target_layers": layers, "target_hidden_size": s.n_embd},
    )


def head_tensors(s: ModelShape) -> Tensors:
    """The tensors of a synthetic head."""
    known = min(s.n_vocab, KNOWN)
    yield "output.weight", (known, s.n_embd)
    yield "output_norm.weight", (s.n_embd,)
    yield "fc.weight", (s.n_embd, LAYERS * s.n_embd)
    yield IDS, (known,)
    yield "blk.0.attn_norm_2.weight", (s.n_embd,)
    yield "blk.0.ffn_norm.weight", (s.n_embd,)
    for name, dims in attention_tensors(s):
        both = name in ("attn_q.weight", "attn_k.weight", "attn_v.weight")
        yield f"blk.0.{name}", (dims[0], 2 * s.n_embd) if both else dims
    for name, dims in feed_forward_tensors(s):
        yield f"blk.0.{name}", dims


def named(name: str, il: int) -> str:
    """What a tensor of the file, or its stem, is called beside the target's."""
    return name.replace("blk.0.", f"blk.{il}.", 1) if name.startswith("blk.0.") else f"{ARCH}.{name}"


def with_head(model: Model, path: Path) -> Model:
    """A model with the head of a file beside its weights. Raises GgufError naming what is wrong: no EAGLE-3 head, one for another target, a
    tensor that is missing or misshaped."""
    f = GgufFile.open(path)
    head, tensors = _read(f, model)
    known = copy(model.architecture)
    known.head = head
    beside = replace(model.file, tensors={**model.file.tensors, **tensors}, files=(*model.file.files, *f.files))
    return replace(model, architecture=known, file=beside)


def _read(f: GgufFile, model: Model) -> tuple[Eagle3Head, dict[str, GgufTensor]]:
    """The head of a file, and its tensors by the names that they have beside the target's."""
    target, name = model.hp, model.file.path.name

    def fail(why: str) -> GgufError:
        return GgufError(f"[drafts] {f.path}: {why}")

    if f.arch != ARCH:
        raise fail(f"architecture {quoted(f.arch)}; expected {ARCH} for draft-eagle3. Another model drafts with draft-simple")
    if not model.architecture.causal:
        raise fail(f"{name} makes no text, so there is nothing to draft; leave the head out")
    metadata = Metadata(f, keys=KEYS)
    unread_keys(f, COMMON | KEYS | {RMS_EPS}, {})
    hp = metadata.hparams("normal")
    layers = metadata.array("target_layers")
    if layers is None or layers.dtype.kind not in "iu" or layers.size != LAYERS:
        raise fail(f"{ARCH}.target_layers is {quoted(f.metadata.get(f'{ARCH}.target_layers'))}; expected {LAYERS} layers of its target")
    wrong = [
        (f"{what} {mine}", f"{name} has {theirs}")
        for what, mine, theirs in (
            ("a target of n_embd", metadata.count("target_hidden_size"), target.n_embd),
            ("a vocabulary of", hp.n_vocab, target.n_vocab),
        )
        if mine != theirs
    ]
    if int(layers.max()) >= target.n_layer or int(layers.min()) < 0:
        wrong.append((f"layers {', '.join(map(str, layers.tolist()))} of its target", f"{name} has {target.n_layer}"))
    if wrong:
        raise fail(
            "; ".join(f"the head is for {mine}, {theirs}" for mine, theirs in wrong) + ". Take the head that was made for this model"
        )
    if hp.n_layer != 1:
        raise fail(f"{ARCH}.block_count is {hp.n_layer}; expected 1")
    norm_before_fc = f.get(metadata.key("norm_before_fc"), bool, False)
    needed, others = _shapes(f, hp, target, norm_before_fc)
    _check(f, needed, others, fail)
    for own in ("token_embd.weight", "output.weight"):
        if own not in f.tensors and hp.n_embd != target.n_embd:
            raise fail(
                f"tensor {own} is missing: the head's n_embd is {hp.n_embd}, so that it cannot use that of {name}, of {target.n_embd}"
            )
    if IDS in f.tensors and "output.weight" not in f.tensors:
        raise fail(f"tensor output.weight is missing; with {IDS} the head needs its own")
    il = 1 + max((int(t.split(".")[1]) for t in model.file.tensors if t.startswith("blk.")), default=target.n_layer - 1)
    tensors = {new: replace(f.tensors[t], name=new, made=True) for t, new in _names(f, il)}
    if IDS in f.tensors:
        ids = _ids(f.tensors[IDS], target.n_vocab, fail)
        new = named(IDS, il)
        tensors[new] = GgufTensor(new, "I32", ids.shape, 0, ids.nbytes, ids.view(np.uint8), made=True)
    weights = {t.name: Tensor(t.name, t.type, t.shape, "weight", Recipe("plain", (t.name,))) for t in tensors.values()}
    factors = [weights[new] for own, new in _names(f, il) if own.endswith("rope_freqs.weight")]
    found = Eagle3Head(
        f.path,
        il,
        tuple(int(layer) for layer in layers),
        replace(hp, weights={**weights, **({hp.rope.factors: factors[0]} if factors else {})}, files={}),
        f.get(metadata.key("norm_before_residual"), bool, False),
        norm_before_fc,
    )
    return found, tensors


def _names(f: GgufFile, il: int) -> Iterator[tuple[str, str]]:
    """Tensors of weights, and their names beside the target's."""
    return ((t, named(t, il)) for t in f.tensors if t != IDS and t not in UNUSED)


def _shapes(f: GgufFile, hp: HParams, target: HParams, norm_before_fc: bool) -> tuple[Shapes, Shapes]:
    """Tensors that a head must have, and those that it may have."""
    n, heads, wide = hp.n_embd, hp.heads, LAYERS * target.n_embd
    known = f.tensors[IDS].elements if IDS in f.tensors else hp.n_vocab
    rows = {"attn_q": heads.n * heads.dim_k, "attn_k": heads.n_kv * heads.dim_k, "attn_v": heads.n_kv * heads.dim_v}
    needed: Shapes = {"fc.weight": (n, wide), "output_norm.weight": (n,)}
    needed |= {f"blk.0.{stem}.weight": (n,) for stem in ("attn_norm", "attn_norm_2", "ffn_norm")}
    needed |= {f"blk.0.{stem}.weight": (count, 2 * n) for stem, count in rows.items()}
    needed |= {"blk.0.attn_output.weight": (n, heads.n * heads.dim_v), "blk.0.ffn_down.weight": (n, hp.n_ff)}
    needed |= {f"blk.0.{stem}.weight": (hp.n_ff, n) for stem in ("ffn_gate", "ffn_up")}
    needed |= {"enc.output_norm.weight": (wide,)} if norm_before_fc else {}
    others: Shapes = {"output.weight": (known, n), "token_embd.weight": (hp.n_vocab, n), IDS: (known,)}
    others |= {f"{prefix}rope_freqs.weight": (hp.rope.n_dims // 2,) for prefix in ("", "blk.0.")}
    others |= {f"blk.0.{stem}.bias": (count,) for stem, count in (*rows.items(), ("attn_output", n))}
    return needed, others


def _check(f: GgufFile, needed: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]], fail: Fail) -> None:
    """Raises GgufError naming a tensor that is missing, misshaped, of a type without a kernel, or without a place."""
    for name in needed:
        if name not in f.tensors:
            raise fail(f"tensor {name} is missing; an EAGLE-3 head needs {', '.join(needed)}")
    expected = {**others, **needed}
    for name, t in f.tensors.items():
        if name in UNUSED:
            continue
        if name not in expected:
            raise fail(f"tensor {name} has no place in an EAGLE-3 head; the result would be wrong")
        if t.shape != expected[name]:
            raise fail(f"tensor {name} has shape {list(t.shape)}; expected {list(expected[name])} by its metadata and target")
        types = ("I64", "I32") if name == IDS else quants.WEIGHT_TYPES
        if t.type not in types:
            raise fail(f"tensor {name} is of type {t.type}; expected one of {', '.join(types)}")


def _ids(t: GgufTensor, n_vocab: int, fail: Fail) -> npt.NDArray[np.int32]:
    ids = np.asarray(t.data).reshape(-1).view(np.int64 if t.type == "I64" else np.int32)
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < n_vocab:
        raise fail(f"tensor {IDS} has ids from {ids.min()} to {ids.max()}; expected those of its target, 0 to {n_vocab - 1}")
    return np.ascontiguousarray(ids, np.int32)
