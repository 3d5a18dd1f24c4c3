"""A model in PyTorch, written against the GGUF file alone: what training on a device is compared with. Needs torch (CPU).

Nothing here comes from vkback's graphs: hyperparameters are read from the file's metadata, and the layers are PyTorch's own functions.
Weights have the names of the file, so that gradients are compared without any mapping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor as TorchTensor

from vkback import quants
from vkback.errors import VkbackError
from vkback.gguf.file import GgufFile
from vkback.models.registry import architecture

KNOWN = ("llama", "qwen2", "qwen3", "gemma3", "gpt2")


class TorchError(VkbackError):
    """A model that is not written in PyTorch here."""


class TorchModel:
    """`forward` gives logits; `weights` are parameters by the names of the file, float32."""

    def __init__(self, path: Path, lora: Mapping[str, Any] | None = None, lora_scale: float = 1.0, device: str = "cpu") -> None:
        """lora: values of adapters' A and B by name; they alone are then trained. device: PyTorch's name for it."""
        # `opened` cuts a tensor that holds Q, K and V: names of what is trained are those of the parts.
        f: GgufFile = architecture(GgufFile.open(path)).file
        if f.arch not in KNOWN:
            raise TorchError(f"[torch] {path}: architecture {f.arch} is not written in PyTorch here; there are {', '.join(KNOWN)}")
        self.arch = f.arch
        self._metadata = f.metadata
        self.weights: dict[str, TorchTensor] = {}
        for name, t in f.tensors.items():
            value = quants.decode(t.type, np.asarray(t.data)).reshape(t.shape)
            self.weights[name] = torch.from_numpy(np.array(value, np.float32)).to(device)
        self._scale = lora_scale
        self.adapters = {name: torch.from_numpy(np.array(value, np.float32)).to(device) for name, value in (lora or {}).items()}
        self.device = device
        self.trained = self.adapters or {name: w for name, w in self.weights.items() if not name.startswith("rope_freqs")}
        for w in self.trained.values():
            w.requires_grad_()
        self._layers = int(self._get("block_count"))
        self._heads = int(self._get("attention.head_count"))
        self._kv_heads = int(self._get("attention.head_count_kv", self._heads))
        self._width = int(self._get("attention.key_length", self._get("embedding_length") // self._heads))
        self._eps = float(self._get("attention.layer_norm_epsilon" if self.arch == "gpt2" else "attention.layer_norm_rms_epsilon"))

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self.arch}.{key}", default)

    def _linear(self, x: TorchTensor, stem: str) -> TorchTensor:
        y = F.linear(x, self.weights[f"{stem}.weight"], self.weights.get(f"{stem}.bias"))
        a = self.adapters.get(f"{stem}.weight.lora_a")
        if a is None:
            return y
        return y + self._scale * F.linear(F.linear(x, a), self.adapters[f"{stem}.weight.lora_b"])

    def _norm(self, x: TorchTensor, stem: str) -> TorchTensor:
        w = self.weights[f"{stem}.weight"]
        if self.arch == "gpt2":
            return F.layer_norm(x, w.shape, w, self.weights[f"{stem}.bias"], self._eps)
        return F.rms_norm(x, w.shape, w, self._eps)

    def _angles(self, n: int, il: int) -> TorchTensor:
        """[n, width / 2], in float64: positions times frequencies."""
        dims = int(self._get("rope.dimension_count", self._width))
        base, factor = float(self._get("rope.freq_base", 10000.0)), 1.0
        if self._get("rope.scaling.type", "none") == "linear":
            factor = float(self._get("rope.scaling.factor", 1.0))
        if self._sees_window(il):
            base, factor = float(self._get("rope.freq_base_swa", 10000.0)), 1.0
        frequency = base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims) / factor
        if "rope_freqs.weight" in self.weights:
            frequency = frequency / self.weights["rope_freqs.weight"].double().cpu()
        return (torch.arange(n, dtype=torch.float64)[:, None] * frequency).to(self.device)

    def _turn(self, x: TorchTensor, angles: TorchTensor) -> TorchTensor:
        """x [batch, n, heads, width] by RoPE."""
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
        if self.arch == "llama":  # neighbours are a pair
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def _sees_window(self, il: int) -> bool:
        if self.arch != "gemma3":
            return False
        period = int(self._get("attention.sliding_window_pattern", 6))
        return il % period != period - 1

    def _attention(self, x: TorchTensor, il: int) -> TorchTensor:
        batch, n, _ = x.shape
        q, k, v = (
            self._linear(x, f"blk.{il}.attn_{which}").view(batch, n, heads, self._width)
            for which, heads in (("q", self._heads), ("k", self._kv_heads), ("v", self._kv_heads))
        )
        if f"blk.{il}.attn_q_norm.weight" in self.weights:
            q, k = self._norm(q, f"blk.{il}.attn_q_norm"), self._norm(k, f"blk.{il}.attn_k_norm")
        if self.arch != "gpt2":
            angles = self._angles(n, il)
            q, k = self._turn(q, angles), self._turn(k, angles)
        place = torch.arange(n, device=self.device)
        seen = place[None, :] <= place[:, None]
        if self._sees_window(il):
            seen &= place[None, :] > place[:, None] - int(self._get("attention.sliding_window"))
        scale = float(self._get("attention.scale", self._width**-0.5))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=seen, scale=scale, enable_gqa=True)
        return self._linear(y.transpose(1, 2).reshape(batch, n, -1), f"blk.{il}.attn_output")

    def _feed_forward(self, x: TorchTensor, il: int) -> TorchTensor:
        up = self._linear(x, f"blk.{il}.ffn_up")
        if self.arch == "gpt2":
            return self._linear(F.gelu(up, approximate="tanh"), f"blk.{il}.ffn_down")
        gate = self._linear(x, f"blk.{il}.ffn_gate")
        act = F.gelu(gate, approximate="tanh") if self.arch == "gemma3" else F.silu(gate)
        return self._linear(act * up, f"blk.{il}.ffn_down")

    def forward(self, tokens: TorchTensor) -> TorchTensor:
        """Logits [batch, n, n_vocab] of tokens [batch, n]."""
        x = F.embedding(tokens, self.weights["token_embd.weight"])
        if self.arch == "gpt2":
            x = x + self.weights["position_embd.weight"][: tokens.shape[1]]
        if self.arch == "gemma3":
            x = x * float(self._get("embedding_length")) ** 0.5
        post = self.arch == "gemma3"
        for il in range(self._layers):
            y = self._attention(self._norm(x, f"blk.{il}.attn_norm"), il)
            x = x + (self._norm(y, f"blk.{il}.post_attention_norm") if post else y)
            y = self._feed_forward(self._norm(x, f"blk.{il}.ffn_norm"), il)
            x = x + (self._norm(y, f"blk.{il}.post_ffw_norm") if post else y)
        x = self._norm(x, "output_norm")
        return F.linear(x, self.weights["output.weight" if "output.weight" in self.weights else "token_embd.weight"])


class TorchTrainer:
    """Steps of a TorchModel, float32 on the CPU: the same calls as of vkback's Trainer."""

    def __init__(
        self,
        model: TorchModel,
        optimizer: str,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.model = model
        given = list(model.trained.values())
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(given, lr, weight_decay=weight_decay)
            if optimizer == "sgd"
            else torch.optim.AdamW(given, lr, betas=betas, eps=eps, weight_decay=weight_decay)
        )

    def step(self, tokens: Sequence[Sequence[int]] | Any, targets: Sequence[Sequence[int]] | Any) -> float:
        """The loss of tokens [batch, n] before the step. targets [batch, n]; a negative one does not count."""
        self._optimizer.zero_grad()
        fed, wanted = (torch.as_tensor(np.asarray(ids, np.int64), device=self.model.device) for ids in (tokens, targets))
        logits, wanted = self.model.forward(fed), wanted.flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), torch.where(wanted < 0, -100, wanted), ignore_index=-100)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def grads(self) -> dict[str, Any]:
        """Gradients of the last step by name."""
        return {name: w.grad.cpu().numpy() for name, w in self.model.trained.items() if w.grad is not None}

    def weights(self) -> dict[str, Any]:
        """Weights after the last step by name."""
        return {name: w.detach().cpu().numpy() for name, w in self.model.trained.items()}
