"""`deci`, which `transformers` has no class of, by the modules of its llama: each layer has those that the file says, of its own sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from references.common import Checkpoint, Logits, State, config, fill, outer, run, unpermuted


class Linear(nn.Linear):  # type: ignore[misc]
    """A single matrix in the place of attention."""

    def forward(self, x: Any, **_: Any) -> Any:
        return super().forward(x), None


class Layer(nn.Module):  # type: ignore[misc]
    """Attention, a Linear or neither; a feed-forward or none."""

    def __init__(self, given: dict[str, Any], il: int, n_head: int, n_head_kv: int, n_ff: int) -> None:
        super().__init__()
        width = given["hidden_size"]
        own = LlamaConfig(**given | {"num_key_value_heads": n_head_kv or n_head or 1, "intermediate_size": n_ff or 1})
        self.self_attn = LlamaAttention(own, il) if n_head_kv else Linear(width, width, bias=False) if n_head else None
        self.mlp = LlamaMLP(own) if n_ff else None
        self.input_layernorm = LlamaRMSNorm(width, own.rms_norm_eps) if n_head else nn.Identity()
        self.post_attention_layernorm = LlamaRMSNorm(width, own.rms_norm_eps) if n_ff else nn.Identity()

    def forward(self, x: Any, angles: Any, mask: Any) -> Any:
        if self.self_attn is not None:
            x = x + self.self_attn(self.input_layernorm(x), position_embeddings=angles, attention_mask=mask)[0]
        return x if self.mlp is None else x + self.mlp(self.post_attention_layernorm(x))


class Deci(nn.Module):  # type: ignore[misc]
    """The whole model, its modules under the names that `transformers` gives those of llama."""

    def __init__(self, given: dict[str, Any], layers: list[tuple[int, int, int]]) -> None:
        super().__init__()
        width, self.config = given["hidden_size"], LlamaConfig(**given)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(given["vocab_size"], width)
        self.model.layers = nn.ModuleList([Layer(given, il, *sizes) for il, sizes in enumerate(layers)])
        self.model.norm = LlamaRMSNorm(width, self.config.rms_norm_eps)
        self.lm_head = nn.Linear(width, given["vocab_size"], bias=False)

    def forward(self, input_ids: Any, use_cache: bool) -> Any:
        assert not use_cache
        n = input_ids.shape[1]
        x = self.model.embed_tokens(input_ids)
        angles = LlamaRotaryEmbedding(self.config)(x, torch.arange(n)[None])
        mask = torch.full((n, n), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        for layer in self.model.layers:
            x = layer(x, angles, mask)
        return type("Output", (), {"logits": self.lm_head(self.model.norm(x))})


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    n_head, n_kv, n_ff = (f.get(key) for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"))
    given = config(_Largest(path))
    given["rope_parameters"] |= {
        "rope_type": "llama3",
        "factor": float(f["rope_freqs.weight"].max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    layers = list(zip(n_head, n_kv, n_ff, strict=True))
    state = outer(f)
    for il, sizes in enumerate(layers):
        _layer(f, state, il, *sizes)
    return run(fill(Deci(given, layers), f, state), tokens)


class _Largest(Checkpoint):
    """A file whose arrays of one value a layer are the largest of them."""

    def get(self, key: str, default: Any = None) -> Any:
        value = super().get(key, default)
        return max(value) if isinstance(value, list) else value


def _layer(f: Checkpoint, state: State, il: int, n_head: int, n_kv: int, n_ff: int) -> None:
    ours, theirs = f"blk.{il}", f"model.layers.{il}"
    if n_head:
        state[f"{theirs}.input_layernorm.weight"] = f[f"{ours}.attn_norm.weight"]
        state[f"{theirs}.self_attn.{'o_proj.' if n_kv else ''}weight"] = f[f"{ours}.attn_output.weight"]
    if n_kv:
        for which, heads in (("q", n_head), ("k", n_kv)):
            state[f"{theirs}.self_attn.{which}_proj.weight"] = unpermuted(f[f"{ours}.attn_{which}.weight"], heads)
        state[f"{theirs}.self_attn.v_proj.weight"] = f[f"{ours}.attn_v.weight"]
    if n_ff:
        state[f"{theirs}.post_attention_layernorm.weight"] = f[f"{ours}.ffn_norm.weight"]
        for which in ("gate", "up", "down"):
            state[f"{theirs}.mlp.{which}_proj.weight"] = f[f"{ours}.ffn_{which}.weight"]
