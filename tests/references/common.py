"""What references share: a GGUF file's metadata and its tensors in float64, read by the `gguf` package alone, and their way into a model.

Nothing here or in the references beside it imports vkback: what they say is independent of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize

transformers.logging.set_verbosity_error()  # it warns of contexts as short as those of tiny models

Logits = npt.NDArray[np.float64]
Vectors = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]
"""Of a text: [tokens, n_embd] of its tokens, [width] of the whole."""
State = dict[str, Any]
"""Tensors of a model by their names in `transformers`."""


class Checkpoint:
    """A GGUF file. It knows which of its tensors were read, so that none is forgotten (`fill`)."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self._metadata = {key: f.contents() for key, f in reader.fields.items()}
        self._tensors = {t.name: t for t in reader.tensors}
        self.unread = set(self._tensors)
        self.replaced: dict[str, Any] = {}  # values for `get`, where those of the file differ from layer to layer
        self.arch = str(self._metadata["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value under the architecture's prefix. Raises KeyError when it is missing and there is no default."""
        value = self.replaced.get(key, self._metadata.get(f"{self.arch}.{key}", default))
        if value is None:
            raise KeyError(f"{self.arch}.{key}")
        return value

    @property
    def metadata_keys(self) -> set[str]:
        """Keys under the architecture's prefix, without it."""
        return {key.removeprefix(f"{self.arch}.") for key in self._metadata}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Any:
        """A tensor in float64. Raises KeyError when the file lacks it."""
        found = self._tensors[name]
        self.unread.discard(name)
        shape = tuple(int(n) for n in reversed(found.shape))
        return torch.from_numpy(dequantize(found.data, found.tensor_type).astype(np.float64).reshape(shape))

    def linear(self, state: State, target: str, source: str, *, permuted_heads: int = 0) -> None:
        """Put `source`.weight and, where the file has one, `source`.bias into `state`.

        permuted_heads  heads of Q or K whose rows lie as llama files have them (`unpermuted`); 0: they lie as in transformers
        """
        for kind in ("weight", "bias"):
            if f"{source}.{kind}" in self:
                t = self[f"{source}.{kind}"]
                state[f"{target}.{kind}"] = unpermuted(t, permuted_heads) if permuted_heads else t


def unpermuted(t: Any, n_head: int) -> Any:
    """Rows of Q or K in the order of transformers, which rotates value i of a head with value i + d/2; files of the llama architecture
    have such pairs side by side."""
    return t.reshape(n_head, t.shape[0] // n_head // 2, 2, *t.shape[1:]).transpose(1, 2).reshape(t.shape)


def config(f: Checkpoint, **more: Any) -> dict[str, Any]:
    """Arguments that nearly all configurations take. `rope_parameters` knows the base alone."""
    n_head = int(f.get("attention.head_count"))
    width = int(f.get("attention.key_length", f.get("embedding_length") // n_head))
    given = {
        "vocab_size": int(f.get("vocab_size")),
        "hidden_size": int(f.get("embedding_length")),
        "intermediate_size": int(f.get("feed_forward_length")),
        "num_hidden_layers": int(f.get("block_count")),
        "num_attention_heads": n_head,
        "num_key_value_heads": int(f.get("attention.head_count_kv", n_head)),
        "head_dim": width,
        "max_position_embeddings": int(f.get("context_length")),
        "rms_norm_eps": float(f.get("attention.layer_norm_rms_epsilon", 0.0)),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(f.get("rope.freq_base", 10000.0))},
        "tie_word_embeddings": "output.weight" not in f,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return given | more


def encoder_config(f: Checkpoint) -> dict[str, Any]:
    """Arguments that configurations of encoders take."""
    given = config(f)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    own = {name: given[name] for name in (*names, "attn_implementation", "bos_token_id", "eos_token_id")}
    rope = {"rope_parameters": given["rope_parameters"]} if f.arch != "bert" else {}
    return own | rope | {"pad_token_id": 0}


def vectors_of(f: Checkpoint, model: Any, tokens: Sequence[int], segments: Sequence[int] | None) -> Vectors:
    """What an encoder makes of one text, and that pooled as the file says: mean (1), first token (2) or last (3)."""
    kinds = {} if segments is None else {"token_type_ids": torch.tensor([list(segments)])}
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([list(tokens)]), **kinds).last_hidden_state[0].numpy()
    return pooled(f, hidden)


def pooled(f: Checkpoint, hidden: npt.NDArray[np.float64]) -> Vectors:
    """What tokens come out as, and the vector of their text: their mean (1), the first (2) or the last (3)."""
    return hidden, {1: hidden.mean(axis=0), 2: hidden[0], 3: hidden[-1]}.get(f.get("pooling_type"), hidden[0])


def layer_norm_config(f: Checkpoint, name: str) -> dict[str, Any]:
    """The epsilon of layer norms by the name that a configuration has for it."""
    return {name: float(f.get("attention.layer_norm_epsilon"))}


def outer(f: Checkpoint) -> State:
    """Embedding, last norm and output."""
    return {
        "model.embed_tokens.weight": f["token_embd.weight"],
        "model.norm.weight": f["output_norm.weight"],
        "lm_head.weight": f["output.weight" if "output.weight" in f else "token_embd.weight"],
    }


def llama3_rope(f: Checkpoint) -> dict[str, Any]:
    """Rope parameters of Llama 3 where the file has divisors: they are 1 for fast pairs; the slowest has the whole factor. transformers
    makes them all itself."""
    if "rope_freqs.weight" not in f:
        return {}
    return {
        "rope_type": "llama3",
        "factor": float(f["rope_freqs.weight"].max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def attention(f: Checkpoint, state: State, il: int, *, permuted: bool = False, norm: str = "attn_norm") -> None:
    """Norm, Q, K, V and output of a layer. permuted: Q and K as llama files have them. norm: "" without one."""
    ours, theirs = f"blk.{il}", f"model.layers.{il}"
    n_head = int(f.get("attention.head_count"))
    n_kv = int(f.get("attention.head_count_kv", n_head))
    if norm:
        f.linear(state, f"{theirs}.input_layernorm", f"{ours}.{norm}")
    f.linear(state, f"{theirs}.self_attn.q_proj", f"{ours}.attn_q", permuted_heads=n_head if permuted else 0)
    f.linear(state, f"{theirs}.self_attn.k_proj", f"{ours}.attn_k", permuted_heads=n_kv if permuted else 0)
    f.linear(state, f"{theirs}.self_attn.v_proj", f"{ours}.attn_v")
    f.linear(state, f"{theirs}.self_attn.o_proj", f"{ours}.attn_output")


def qk_norms(f: Checkpoint, state: State, il: int) -> None:
    """Norms of the heads of Q and K."""
    for which in ("q", "k"):
        state[f"model.layers.{il}.self_attn.{which}_norm.weight"] = f[f"blk.{il}.attn_{which}_norm.weight"]


def mamba_config(f: Checkpoint) -> dict[str, Any]:
    """Sizes of a Mamba-2 block."""
    inner, heads = int(f.get("ssm.inner_size")), int(f.get("ssm.time_step_rank"))
    return {
        "mamba_n_heads": heads,
        "mamba_n_groups": f.get("ssm.group_count"),
        "mamba_d_state": f.get("ssm.state_size"),
        "mamba_d_head": inner // heads,
        "mamba_d_conv": f.get("ssm.conv_kernel"),
        "mamba_chunk_size": 8,  # several chunks in a short text
    }


def mamba(f: Checkpoint, state: State, il: int, theirs: str) -> None:
    """A Mamba-2 block: files hold A, transformers log(-A); its convolution has an axis of length 1 in the middle."""
    ours = f"blk.{il}"
    state |= {
        f"{theirs}.A_log": torch.log(-f[f"{ours}.ssm_a"]).flatten(),
        f"{theirs}.D": f[f"{ours}.ssm_d"].flatten(),
        f"{theirs}.dt_bias": f[f"{ours}.ssm_dt.bias"],
        f"{theirs}.conv1d.weight": f[f"{ours}.ssm_conv1d.weight"].unsqueeze(1),
        f"{theirs}.conv1d.bias": f[f"{ours}.ssm_conv1d.bias"],
        f"{theirs}.in_proj.weight": f[f"{ours}.ssm_in.weight"],
        f"{theirs}.out_proj.weight": f[f"{ours}.ssm_out.weight"],
    }
    if f"{ours}.ssm_norm.weight" in f:
        state[f"{theirs}.norm.weight"] = f[f"{ours}.ssm_norm.weight"].flatten()


def post_norms(f: Checkpoint, state: State, il: int) -> None:
    """Norms of what attention and feed-forward add, in a layer that has no others."""
    ours, theirs = f"blk.{il}", f"model.layers.{il}"
    state[f"{theirs}.post_attention_layernorm.weight"] = f[f"{ours}.post_attention_norm.weight"]
    state[f"{theirs}.post_feedforward_layernorm.weight"] = f[f"{ours}.post_ffw_norm.weight"]


def gemma_norms(f: Checkpoint, state: State, il: int) -> None:
    """Norms of a Gemma layer beside the first: of what attention adds, before the feed-forward, of what that adds."""
    ours, theirs = f"blk.{il}", f"model.layers.{il}"
    state[f"{theirs}.post_attention_layernorm.weight"] = f[f"{ours}.post_attention_norm.weight"]
    state[f"{theirs}.pre_feedforward_layernorm.weight"] = f[f"{ours}.ffn_norm.weight"]
    state[f"{theirs}.post_feedforward_layernorm.weight"] = f[f"{ours}.post_ffw_norm.weight"]


def feed_forward(f: Checkpoint, state: State, il: int, *, norm: str = "ffn_norm") -> None:
    """Norm and the three matrices of a dense gated feed-forward. norm: its name in the file, "" without one."""
    ours, theirs = f"blk.{il}", f"model.layers.{il}"
    if norm:
        state[f"{theirs}.post_attention_layernorm.weight"] = f[f"{ours}.{norm}.weight"]
    for which in ("gate", "up", "down"):
        f.linear(state, f"{theirs}.mlp.{which}_proj", f"{ours}.ffn_{which}")


def experts(f: Checkpoint, state: State, il: int, *, norm: str = "ffn_norm") -> None:
    """Norm, router and experts: gate and up of an expert are one matrix, gate first."""
    ours, theirs = f"blk.{il}", f"model.layers.{il}"
    state[f"{theirs}.post_attention_layernorm.weight"] = f[f"{ours}.{norm}.weight"]
    f.linear(state, f"{theirs}.mlp.gate", f"{ours}.ffn_gate_inp")
    gate_up = [f[f"{ours}.ffn_{which}_exps.weight"] for which in ("gate", "up")]
    state[f"{theirs}.mlp.experts.gate_up_proj"] = torch.cat(gate_up, dim=1)
    state[f"{theirs}.mlp.experts.down_proj"] = f[f"{ours}.ffn_down_exps.weight"]


def with_output(model: Any) -> Any:
    """A text model of a class that makes no logits, with the output layer behind it."""
    whole: Any = torch.nn.Module()
    whole.model = model
    whole.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    whole.forward = lambda **given: SimpleNamespace(logits=whole.lm_head(model(**given).last_hidden_state))
    return whole


def fill(model: Any, f: Checkpoint, state: Mapping[str, Any]) -> Any:
    """The model in float64 with the weights of `state`. Raises ValueError when it lacks one, or a tensor of the file went unused."""
    model = model.double().eval()
    found = model.load_state_dict(state, strict=False)
    if found.missing_keys or found.unexpected_keys or f.unread:
        raise ValueError(f"missing {found.missing_keys}, unexpected {found.unexpected_keys}, left in the file {sorted(f.unread)}")
    return model


def run(model: Any, tokens: Sequence[int]) -> Logits:
    """Logits [len(tokens), n_vocab] of a fresh context."""
    with torch.no_grad():
        out = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return np.asarray(out.numpy(), np.float64)
