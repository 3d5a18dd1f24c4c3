"""Elementary steps of a graph: weights by name, linear layers, RoPE, the KV cache, the output. vkback/models/blocks.py puts blocks together
from them, an architecture a layer from blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vkback.gguf.hparams import HParams, Rope
from vkback.graph import Graph, Tensor, live
from vkback.models.texts import DENSE, Texts, spans_of

Head = Literal["none", "last", "all"]
"""What of the output is wanted: nothing (only the KV cache is filled), the logits of one token, or of every token."""


@dataclass(frozen=True)
class CacheTypes:
    """Types of K's and V's cache: F16, or another of CACHE_TYPES (vkback/ops/cache.py)."""

    k: str = "F16"
    v: str = "F16"


F16_CACHE = CacheTypes()


@dataclass(frozen=True)
class Paging:
    """Caches that hold rows of several sequences in pages (vkback/ops/attention/paged.py).

    page       rows of a page
    n_pages    pages of all sequences together
    n_slots    sequences
    max_pages  pages of one sequence, at most
    """

    page: int
    n_pages: int
    n_slots: int
    max_pages: int

    @property
    def rows(self) -> int:
        """Of all pages."""
        return self.page * self.n_pages


@dataclass(frozen=True)
class StateSlots:
    """Recurrent states that a text can go back to.

    slots  of a state: those after the last slots - 1 tokens can be gone back to
    each   a step stores the state after each of its tokens, else after its last one alone
    """

    slots: int = 2
    each: bool = False


TWO_SLOTS = StateSlots()


class GraphBuilder:
    """Adds nodes to `graph`. n tokens go through at once; `tokens` and `pos` are I32 [n]; `out_ids` I32 [1] says which of several
    tokens the logits are wanted of (head "last"). With `paging` tokens are of several sequences, `pos` counts rows of a token's own, and
    three inputs more say where these are: `rows` I32 [n], the row of the caches that a token is stored in; `slots` and `pages`, the page
    table. n_ctx is the most rows of one sequence. With `texts` whole texts go through, one after another in the `rows`; `pos` counts tokens
    of a text, `spans` say what a token sees, and the output is `pool` F32 [n, texts] times the last layer's, or logits of the tokens
    `out_ids` I32 [texts.logits] (vkback/models/texts.py).

    Names are ggml's where ggml has a name of its own for a value; the rest are made unique by what they hold (`Qcur_rope-0`). Whatever
    reads a weight raises GgufError when the file lacks it or has another shape.
    """

    def __init__(
        self,
        hp: HParams,
        n_tokens: int,
        n_ctx: int,
        head: Head,
        cache: CacheTypes = F16_CACHE,
        paging: Paging | None = None,
        texts: Texts | None = None,
        kept: StateSlots = TWO_SLOTS,
    ) -> None:
        self.hp = hp
        self.cache = cache
        self.n = n_tokens
        self.n_ctx = n_ctx
        self.head = head
        self.graph = Graph()
        self.tokens = Tensor("tokens", "I32", (n_tokens,), "input")
        self.pos = Tensor("pos", "I32", (n_tokens,), "input")
        self.out_ids = Tensor("out_ids", "I32", (texts.logits if texts and texts.logits else 1,), "input")
        self.paging = paging
        self.texts = texts
        self.kept = kept
        self.rows = Tensor("rows", "I32", (n_tokens,), "input") if paging or texts else self.pos
        self.cache_rows = paging.rows if paging else n_tokens if texts else n_ctx

    def embed(self) -> Tensor:
        """Rows of the embedding table: [n, n_embd]."""
        table = self.hp.weight("token_embd.weight", (self.hp.n_vocab, self.hp.n_embd))
        return self.graph.emit("GET_ROWS", "inp_embd", "F32", (self.n, self.hp.n_embd), (table, self.tokens))

    def linear(self, x: Tensor, stem: str, rows: int, name: str) -> Tensor:
        """`stem`.weight [rows, cols] times x [n, cols], plus `stem`.bias where the file has one."""
        w = self.hp.weight(f"{stem}.weight", (rows, x.shape[-1]))
        shape = (x.shape[0], rows)
        y = self.graph.emit("MUL_MAT", name, "F32", shape, (w, x))
        if self.hp.has_weight(f"{stem}.bias"):
            prefix, dash, layer = name.partition("-")
            y = self.graph.emit("ADD", f"{prefix}_bias{dash}{layer}", "F32", shape, (y, self.hp.weight(f"{stem}.bias", (rows,))))
        return y

    def add(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self.graph.emit("ADD", name, "F32", a.shape, (a, b))

    def view(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self.graph.emit("VIEW", f"{x.name} (reshaped)", x.type, shape, (x,))

    def rope(self, x: Tensor, name: str, rope: Rope) -> Tensor:
        """Rotate x [n, heads, head_dim] to its positions."""
        sources: tuple[Tensor, ...] = (x, self.pos)
        if self.hp.has_weight(rope.factors):
            sources = (*sources, self.hp.weight(rope.factors, (rope.n_dims // 2,)))
        return self.graph.emit("ROPE", name, "F32", x.shape, sources, **rope.params)

    def store(self, x: Tensor, cache: str) -> Tensor:
        """Write x [n, heads, head_dim] into the tokens' rows of a cache, K's or V's by its name; returns it, [heads, rows, head_dim]."""
        state = self.cache_of(cache, *x.shape[1:])
        self.graph.add("SET_ROWS", (x, self.rows, state), (state,), **({} if state.type == "F16" else {"type": state.type}))
        return state

    def cache_of(self, cache: str, heads: int, head_dim: int) -> Tensor:
        """A cache by its name, K's or V's: [heads, rows, head_dim]."""
        type = self.cache.v if cache.startswith("cache_v") else self.cache.k
        return Tensor(cache, type, (heads, self.cache_rows, head_dim), "state")

    def recurrent_states(self, il: int, taps: int, channels: int, state: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Of layer `il`: the last inputs of a convolution [taps or more, channels], and states of so many axes, [slots, ...]; with `paging`
        of each sequence."""
        sequences = (self.paging.n_slots,) if self.paging else ()
        conv = self.convolution_state(il, taps, channels)
        return conv, Tensor(f"cache_ssm_l{il}", "F32", (*sequences, self.kept.slots, *state), "state")

    def convolution_state(self, il: int, taps: int, channels: int) -> Tensor:
        """The first of `recurrent_states`, of a layer that has no other."""
        sequences = (self.paging.n_slots,) if self.paging else ()
        return Tensor(f"cache_conv_l{il}", "F32", (*sequences, taps + self.kept.slots - 2, channels), "state")

    @property
    def keeps_each(self) -> dict[str, bool]:
        """Parameters of a recurrence for that."""
        return {"keep": True} if self.kept.each and self.n > 1 else {}

    @property
    def sequences(self) -> tuple[tuple[Tensor, ...], dict[str, bool]]:
        """With `paging`, what a recurrence has behind its states: whose tokens they are, and where each is kept which of its sequence's;
        and the parameters that say so."""
        names = ("slots", "draws") if self.keeps_each else ("slots",)
        return tuple(Tensor(name, "I32", (self.n,), "input") for name in names), {f"has_{name}": True for name in names}

    def attend(self, q: Tensor, cache_k: Tensor, cache_v: Tensor, *weights: Tensor, width: int, il: int, **params: int | float) -> Tensor:
        """FLASH_ATTN_EXT of layer `il` over the tokens' own rows of two caches: [n, width]. weights: its sinks."""
        table: tuple[Tensor, ...] = ()
        if self.paging:
            pages = Tensor("pages", "I32", (self.paging.n_slots, self.paging.max_pages), "input")
            table = (Tensor("slots", "I32", (self.n,), "input"), pages)
            params = {**params, "page": self.paging.page}
        place = self.pos
        if self.texts:
            window = spans_of(int(params.get("window", 0)), bool(params.get("chunked", False)))
            place = Tensor(window, "I32", (self.n, 2), "input")
            params = {key: value for key, value in params.items() if key not in ("window", "chunked")}
        inputs = (q, cache_k, cache_v, place, *weights, *table)
        return self.graph.emit("FLASH_ATTN_EXT", f"kqv_out-{il}", "F32", (self.n, width), inputs, scale=self.hp.attn_scale, **params)

    def last_token(self, x: Tensor, il: int, name: str = "ffn_inp_last") -> Tensor:
        """In the last layer, where the logits of one token of several are wanted, or of some of whole texts, their rows of x; else x. All
        that other tokens' rows are needed for, the KV cache, comes before it."""
        some = self.texts.logits > 0 if self.texts else self.head == "last" and self.n > 1
        if some and il == self.hp.n_layer - 1:
            return self.graph.emit("GET_ROWS", f"{name}-{il}", "F32", (self.out_ids.shape[0], x.shape[-1]), (x, self.out_ids))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """The output layer, whose weight is the embedding table where the file has no other, plus output.bias where the file has one;
        softcapped where the file says so. Of texts x as it is pooled."""
        if self.texts and not self.texts.logits:
            return self._pooled(x, self.texts)
        hp, cap = self.hp, self.hp.softcap
        w = hp.weight("output.weight" if hp.has_weight("output.weight") else "token_embd.weight", (hp.n_vocab, hp.n_embd))
        bias = (hp.weight("output.bias", (hp.n_vocab,)),) if hp.has_weight("output.bias") else ()
        last = "result_linear" if cap else "result_output"
        y = self.graph.emit("MUL_MAT", "result_product" if bias else last, "F32", (x.shape[0], hp.n_vocab), (w, x))
        if bias:
            y = self.graph.emit("ADD", last, "F32", y.shape, (y, *bias))
        if not cap:
            return y
        y = self.graph.emit("SCALE", "result_scaled", "F32", y.shape, (y,), scale=1.0 / cap, bias=0.0)
        y = self.graph.emit("TANH", "result_tanh", "F32", y.shape, (y,))
        return self.graph.emit("SCALE", "result_output", "F32", y.shape, (y,), scale=cap, bias=0.0)

    def _pooled(self, x: Tensor, texts: Texts) -> Tensor:
        """The vector of each text [texts, n_embd], widened where the file says so; x where tokens keep theirs."""
        if texts.pooling == "none":
            return x
        pool = Tensor("pool", "F32", (self.n, texts.n), "input")
        y = self.graph.emit("OUT_PROD", "result_embd_pooled", "F32", (texts.n, self.hp.n_embd), (x, pool))
        wide = [] if texts.pooling == "rank" else [i for i, stem in enumerate(DENSE, 1) if self.hp.has_weight(f"{stem}.weight")]
        for stem in DENSE[: max(wide, default=0)]:
            if (w := self.hp.weights.get(f"{stem}.weight")) is None:
                raise self.hp.missing(f"{stem}.weight")
            y = self.linear(y, stem, w.shape[0], f"result_{stem}")
        return y

    def finish(self, logits: Tensor) -> Graph:
        """The graph, with the output that is wanted."""
        if self.head == "none":
            self.graph.nodes = live(self.graph.nodes, ())
        else:
            self.graph.outputs = (logits,)
        return self.graph
