"""`jina-bert-v2` by BERT with symmetric ALiBi and GEGLU in torch, from the formulas of arXiv 2310.19923 and 2108.12409.

The transformers package has no class of it, and code that comes with a model is not run here.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch.nn.functional import gelu, layer_norm, linear

from references.common import Checkpoint, Vectors, pooled


def slope(head: int, heads: int) -> float:
    """Of n heads, a power of two, 2^(-8/n), 2^(-16/n), ...; further ones have every second of those of twice as many."""
    n = 1 << (heads.bit_length() - 1)
    power = -8.0 * (head + 1) / n if head < n else -4.0 * (2 * (head - n) + 1) / n
    return math.exp2(power)


def vectors(path: Path, tokens: list[int], segments: list[int]) -> Vectors:
    """Of one text: what each token comes out as, and the vector of the text as the file pools it."""
    f = Checkpoint(path)
    eps, heads, width = f.get("attention.layer_norm_epsilon"), f.get("attention.head_count"), f.get("embedding_length")

    def normed(x: torch.Tensor, stem: str) -> torch.Tensor:
        return layer_norm(x, (width,), f[f"{stem}.weight"], f[f"{stem}.bias"], eps)

    def product(x: torch.Tensor, stem: str) -> torch.Tensor:
        return linear(x, f[f"{stem}.weight"], *([f[f"{stem}.bias"]] if f"{stem}.bias" in f else []))

    x = normed(f["token_embd.weight"][tokens] + f["token_types.weight"][segments], "token_embd_norm")
    place = torch.arange(len(tokens), dtype=torch.float64)
    distance = (place[:, None] - place).abs()
    bias = torch.stack([-slope(h, heads) * distance for h in range(heads)])
    for il in range(f.get("block_count")):
        q, k, v = (product(x, f"blk.{il}.attn_{which}").reshape(len(tokens), heads, -1).transpose(0, 1) for which in "qkv")
        weights = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias, dim=-1)
        y = product((weights @ v).transpose(0, 1).reshape(len(tokens), -1), f"blk.{il}.attn_output")
        x = normed(x + y, f"blk.{il}.attn_output_norm")
        y = gelu(product(x, f"blk.{il}.ffn_gate")) * product(x, f"blk.{il}.ffn_up")
        x = normed(x + product(y, f"blk.{il}.ffn_down"), f"blk.{il}.layer_output_norm")
    if f.unread:
        raise ValueError(f"left in the file {sorted(f.unread)}")
    return pooled(f, x.numpy())
