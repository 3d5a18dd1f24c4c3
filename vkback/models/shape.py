"""Published shapes of models, and the tensors of a layer that most architectures have: what synthetic files are made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Tensors = Iterator[tuple[str, tuple[int, ...]]]
"""Names within a layer ("attn_q.weight") and shapes, in the order of a file."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer has where layers differ: heads, K and V heads, and the width of its feed-forward; 0: none."""

    n_head: int
    n_head_kv: int
    n_ff: int


@dataclass(frozen=True)
class ModelShape:
    """The published shape of a model.

    tied          the embedding table is the output weight too
    rope_stretch  Llama 3's factor by which slow RoPE pairs are stretched; 1 for none
    n_expert      0 for a dense model; an expert is n_ff_expert wide
    window        rows of the sliding window in the layers that have one, 0 without
    yarn          factor by which YaRN stretches the context of 4096 that the model was trained on first; 1 without
    rope_dims     values of a head that RoPE turns; 0: all
    rope_rotated  pairs of a head that RoPE rotates at all, the divisors of the others being 1e30; 0: without divisors
    layers        what every layer has, where they differ; n_head, n_head_kv and n_ff are then the largest
    attention     numbers of the layers with attention, where the others have none; None: all
    vocabulary    kind of it, where it is not the architecture's (`Architecture.vocabulary`)
    metadata      further keys of the architecture and their values: integers, floats, strings, booleans, or several of these; they hold
                  where a field says otherwise
    """

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    freq_base: float
    rms_eps: float = 1e-5
    tied: bool = False
    rope_stretch: float = 1.0
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_expert: int = 0
    window: int = 0
    yarn: float = 1.0
    rope_dims: int = 0
    rope_rotated: int = 0
    layers: tuple[LayerShape, ...] = ()
    attention: frozenset[int] | None = None
    vocabulary: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_rot(self) -> int:
        """Values of a head that RoPE turns."""
        return self.rope_dims or self.head_dim


def attention_tensors(s: ModelShape) -> Tensors:
    """Q, K, V and output, apart, and the norm before them."""
    yield "attn_k.weight", (s.n_head_kv * s.head_dim, s.n_embd)
    yield "attn_norm.weight", (s.n_embd,)
    yield "attn_output.weight", (s.n_embd, s.n_head * s.head_dim)
    yield "attn_q.weight", (s.n_head * s.head_dim, s.n_embd)
    yield "attn_v.weight", (s.n_head_kv * s.head_dim, s.n_embd)


def qk_norm_tensors(s: ModelShape) -> Tensors:
    """Norms of the heads of K and Q."""
    yield "attn_k_norm.weight", (s.head_dim,)
    yield "attn_q_norm.weight", (s.head_dim,)


def whole_qk_norm_tensors(s: ModelShape) -> Tensors:
    """Norms of K and Q over all their heads at once."""
    yield "attn_k_norm.weight", (s.n_head_kv * s.head_dim,)
    yield "attn_q_norm.weight", (s.n_head * s.head_dim,)


def post_norm_tensors(s: ModelShape) -> Tensors:
    """Norms of what attention and feed-forward add."""
    yield "post_attention_norm.weight", (s.n_embd,)
    yield "post_ffw_norm.weight", (s.n_embd,)


def feed_forward_tensors(s: ModelShape) -> Tensors:
    """A dense feed-forward with a gate."""
    yield "ffn_down.weight", (s.n_embd, s.n_ff)
    yield "ffn_gate.weight", (s.n_ff, s.n_embd)
    yield "ffn_up.weight", (s.n_ff, s.n_embd)


def plain_feed_forward_tensors(s: ModelShape) -> Tensors:
    """A dense feed-forward without a gate."""
    yield "ffn_down.weight", (s.n_embd, s.n_ff)
    yield "ffn_up.weight", (s.n_ff, s.n_embd)


def expert_tensors(s: ModelShape) -> Tensors:
    """A router and its experts."""
    yield "ffn_gate_inp.weight", (s.n_expert, s.n_embd)
    yield "ffn_down_exps.weight", (s.n_expert, s.n_embd, s.n_ff_expert)
    yield "ffn_gate_exps.weight", (s.n_expert, s.n_ff_expert, s.n_embd)
    yield "ffn_up_exps.weight", (s.n_expert, s.n_ff_expert, s.n_embd)


def fused_expert_tensors(s: ModelShape) -> Tensors:
    """A router and its experts, whose gate and up are one matrix, gate first."""
    yield "ffn_gate_inp.weight", (s.n_expert, s.n_embd)
    yield "ffn_down_exps.weight", (s.n_expert, s.n_embd, s.n_ff_expert)
    yield "ffn_gate_up_exps.weight", (s.n_expert, 2 * s.n_ff_expert, s.n_embd)


def shared_expert_tensors(s: ModelShape, width: int) -> Tensors:
    """The expert of every token, `width` wide."""
    yield "ffn_down_shexp.weight", (s.n_embd, width)
    yield "ffn_gate_shexp.weight", (width, s.n_embd)
    yield "ffn_up_shexp.weight", (width, s.n_embd)


def with_biases(tensors: Tensors, *, but: str = "") -> Tensors:
    """After every matrix its bias, `but` one."""
    for name, dims in tensors:
        yield name, dims
        if len(dims) > 1 and name != f"{but}.weight":
            yield f"{name.removesuffix('weight')}bias", dims[:-1]
