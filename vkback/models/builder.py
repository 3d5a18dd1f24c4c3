"""Building blocks of graphs of the llama family: linear layers, norms, attention with its KV cache, dense and mixture-of-experts
feed-forward. An architecture file puts them together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from vkback.graph import Graph, Tensor, live
from vkback.models.hparams import HParams

Head = Literal["none", "last", "all"]
"""What of the output is wanted: nothing (only the KV cache is filled), the logits of one token, or of every token."""


class GraphBuilder:
    """Adds nodes to `graph`. n tokens go through at once; `tokens` and `pos` are I32 [n]; `out_ids` I32 [1] says which of several
    tokens the logits are wanted of (head "last").

    Names are ggml's where ggml has a name of its own for a value; the rest are made unique by what they hold (`Qcur_rope-0`).
    qk_norm   every head of Q and K is normed before it is rotated
    sinks     every head has an attention sink
    ffn_norm  what the file calls the norm before the feed-forward layer, and its value's name in ggml
    gating    how the router weighs the experts it chose (TOPK_MOE)
    glu       op and params of the experts' gated linear unit
    """

    def __init__(
        self, hp: HParams, n_tokens: int, n_ctx: int, head: Head, *, qk_norm: bool = False, sinks: bool = False,
        ffn_norm: tuple[str, str] = ("ffn_norm", "ffn_norm"), gating: str = "softmax",
        glu: tuple[str, Mapping[str, float]] = ("SWIGLU", {}),
    ) -> None:
        self.hp = hp
        self.n = n_tokens
        self.n_ctx = n_ctx
        self.head = head
        self.qk_norm = qk_norm
        self.sinks = sinks
        self.ffn_norm = ffn_norm
        self.gating = gating
        self.glu = glu
        self.graph = Graph()
        self.tokens = Tensor("tokens", "I32", (n_tokens,), "input")
        self.pos = Tensor("pos", "I32", (n_tokens,), "input")
        self.out_ids = Tensor("out_ids", "I32", (1,), "input")

    def embed(self) -> Tensor:
        table = self.hp.weight("token_embd.weight", (self.hp.n_vocab, self.hp.n_embd))
        return self.graph.emit("GET_ROWS", "inp_embd", "F32", (self.n, self.hp.n_embd), (table, self.tokens))

    def norm(self, x: Tensor, weight: str, name: str, *, plain: str) -> Tensor:
        """RMS norm times `weight`, over the last axis. `plain` names the value before the multiplication."""
        w = self.hp.weight(weight, x.shape[-1:])
        y = self.graph.emit("RMS_NORM", plain, "F32", x.shape, (x,), eps=self.hp.rms_eps)
        return self.graph.emit("MUL", name, "F32", x.shape, (y, w))

    def linear(self, x: Tensor, stem: str, rows: int, name: str) -> Tensor:
        """`stem`.weight [rows, cols] times x [n, cols], plus `stem`.bias where the file has one."""
        w = self.hp.weight(f"{stem}.weight", (rows, x.shape[-1]))
        shape = (x.shape[0], rows)
        y = self.graph.emit("MUL_MAT", name, "F32", shape, (w, x))
        if self.hp.has_weight(f"{stem}.bias"):
            prefix, dash, layer = name.partition("-")
            y = self.graph.emit("ADD", f"{prefix}_bias{dash}{layer}", "F32", shape, (y, self.hp.weight(f"{stem}.bias", (rows,))))
        return y

    def view(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self.graph.emit("VIEW", f"{x.name} (reshaped)", x.type, shape, (x,))

    def rope(self, x: Tensor, name: str) -> Tensor:
        """Rotate x [n, heads, head_dim] to its positions."""
        sources: tuple[Tensor, ...] = (x, self.pos)
        if self.hp.has_weight("rope_freqs.weight"):
            sources = (*sources, self.hp.weight("rope_freqs.weight", (self.hp.rope.n_dims // 2,)))
        return self.graph.emit("ROPE", name, "F32", x.shape, sources, **self.hp.rope.params)

    def store(self, x: Tensor, cache: str) -> Tensor:
        """Write x [n, n_head_kv, head_dim] into the rows `pos` of a cache; returns the cache."""
        n_head_kv, head_dim = x.shape[1:]
        state = Tensor(cache, "F16", (n_head_kv, self.n_ctx, head_dim), "state")
        self.graph.add("SET_ROWS", (x, self.pos, state), (state,))
        return state

    def keys_values(self, x: Tensor, il: int) -> tuple[Tensor, Tensor]:
        """K and V of layer `il` from the normed input, stored: the two caches."""
        hp = self.hp
        k = self.linear(x, f"blk.{il}.attn_k", hp.n_head_kv * hp.head_dim_k, f"Kcur-{il}")
        v = self.linear(x, f"blk.{il}.attn_v", hp.n_head_kv * hp.head_dim_v, f"Vcur-{il}")
        k = self.rotated(k, hp.n_head_kv, "Kcur", f"blk.{il}.attn_k_norm.weight", il)
        v = self.view(v, (self.n, hp.n_head_kv, hp.head_dim_v))
        return self.store(k, f"cache_k_l{il}"), self.store(v, f"cache_v_l{il}")

    def rotated(self, x: Tensor, heads: int, stem: str, weight: str, il: int) -> Tensor:
        """Q or K cut into heads, normed where the architecture does so, and rotated: [n, heads, head_dim_k]."""
        x = self.view(x, (self.n, heads, self.hp.head_dim_k))
        if self.qk_norm:
            x = self.norm(x, weight, f"{stem}_normed-{il}", plain=f"{stem}_rms-{il}")
        return self.rope(x, f"{stem}_rope-{il}")

    def attention(self, x: Tensor, il: int, window: int) -> Tensor:
        """Causal attention of layer `il` over the normed input x [n, n_embd] -> [n, n_embd]. window: rows a token sees; 0: all so far."""
        hp = self.hp
        q = self.linear(x, f"blk.{il}.attn_q", hp.n_head * hp.head_dim_k, f"Qcur-{il}")
        cache_k, cache_v = self.keys_values(x, il)
        q = self.rotated(q, hp.n_head, "Qcur", f"blk.{il}.attn_q_norm.weight", il)
        sinks = (hp.weight(f"blk.{il}.attn_sinks.weight", (hp.n_head,)),) if self.sinks else ()
        out = self.graph.emit("FLASH_ATTN_EXT", f"kqv_out-{il}", "F32", (self.n, hp.n_head * hp.head_dim_v),
                              (q, cache_k, cache_v, self.pos, *sinks), scale=hp.attn_scale, **({"window": window} if window else {}))
        return self.linear(out, f"blk.{il}.attn_output", hp.n_embd, f"attn_out-{il}")

    def feed_forward(self, x: Tensor, il: int) -> Tensor:
        """Dense SwiGLU: down(silu(gate(x)) * up(x))."""
        hp = self.hp
        gate = self.linear(x, f"blk.{il}.ffn_gate", hp.n_ff, f"ffn_gate-{il}")
        up = self.linear(x, f"blk.{il}.ffn_up", hp.n_ff, f"ffn_up-{il}")
        act = self.graph.emit("SWIGLU", f"ffn_swiglu-{il}", "F32", gate.shape, (gate, up))
        return self.linear(act, f"blk.{il}.ffn_down", hp.n_embd, f"ffn_out-{il}")

    def experts(self, x: Tensor, il: int) -> Tensor:
        """Mixture of experts: the router picks n_expert_used of n_expert gated layers for every token; their weighted sum."""
        hp, g, n = self.hp, self.graph, x.shape[0]
        logits = self.linear(x, f"blk.{il}.ffn_gate_inp", hp.n_expert, f"ffn_moe_logits-{il}")
        weights = Tensor(f"ffn_moe_weights-{il}", "F32", (n, hp.n_expert_used))
        ids = Tensor(f"ffn_moe_topk-{il}", "I32", (n, hp.n_expert_used))
        g.add("TOPK_MOE", (logits,), (weights, ids), n_used=hp.n_expert_used, norm=hp.norm_w, gating=self.gating, scale=1.0)
        shared = self.view(x, (n, 1, hp.n_embd))
        gate = self.routed(shared, ids, "ffn_gate_exps", hp.n_ff_expert, f"ffn_moe_gate-{il}", il)
        up = self.routed(shared, ids, "ffn_up_exps", hp.n_ff_expert, f"ffn_moe_up-{il}", il)
        op, params = self.glu
        act = g.emit(op, f"ffn_moe_{op.lower()}-{il}", "F32", gate.shape, (gate, up), **params)
        down = self.routed(act, ids, "ffn_down_exps", hp.n_embd, f"ffn_moe_down-{il}", il)
        return g.emit("MOE_REDUCE", f"ffn_moe_out-{il}", "F32", (n, hp.n_embd), (down, weights))

    def routed(self, x: Tensor, ids: Tensor, stem: str, rows: int, name: str, il: int) -> Tensor:
        """`stem` of each token's experts times x [n, 1 or n_used, cols], plus the experts' biases where the file has them."""
        hp = self.hp
        w = hp.weight(f"blk.{il}.{stem}.weight", (hp.n_expert, rows, x.shape[-1]))
        y = self.graph.emit("MUL_MAT_ID", name, "F32", (*ids.shape, rows), (w, x, ids))
        if not hp.has_weight(f"blk.{il}.{stem}.bias"):
            return y
        bias = hp.weight(f"blk.{il}.{stem}.bias", (hp.n_expert, rows))
        bias = replace(bias, shape=(hp.n_expert * rows,))
        return self.graph.emit("ADD_ID", name.replace("-", "_biased-"), "F32", y.shape, (y, bias, ids))

    def add(self, a: Tensor, b: Tensor, name: str) -> Tensor:
        return self.graph.emit("ADD", name, "F32", a.shape, (a, b))

    def attention_half(self, x: Tensor, il: int, *, window: int = 0) -> Tensor:
        """First half of layer `il`, with the residual. The last layer goes on with the wanted token alone where only one is wanted."""
        normed = self.norm(x, f"blk.{il}.attn_norm.weight", f"attn_norm-{il}", plain=f"attn_rms-{il}")
        x = self.add(self.attention(normed, il, window), x, f"ffn_inp-{il}")
        if self.head == "last" and self.n > 1 and il == self.hp.n_layer - 1:
            x = self.graph.emit("GET_ROWS", f"ffn_inp_last-{il}", "F32", (1, self.hp.n_embd), (x, self.out_ids))
        return x

    def feed_forward_half(self, x: Tensor, il: int) -> Tensor:
        """Second half of layer `il`, with the residual."""
        stem, name = self.ffn_norm
        normed = self.norm(x, f"blk.{il}.{stem}.weight", f"{name}-{il}", plain=f"ffn_rms-{il}")
        y = self.experts(normed, il) if self.hp.n_expert else self.feed_forward(normed, il)
        return self.add(y, x, f"l_out-{il}")

    def finish(self, x: Tensor) -> Graph:
        """Last norm and output layer, whose weight is the embedding table where the file has no other. Returns the graph."""
        hp = self.hp
        x = self.norm(x, "output_norm.weight", "result_norm", plain="result_rms")
        stem = "output" if hp.has_weight("output.weight") else "token_embd"
        logits = self.linear(x, stem, hp.n_vocab, "result_output")
        if self.head == "none":
            self.graph.nodes = live(self.graph.nodes, ())
        else:
            self.graph.outputs = (logits,)
        return self.graph
