"""Hyperparameters, read from GGUF metadata with the defaults of the format."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from vkback.gguf.file import GgufError, GgufFile, quoted
from vkback.graph import Recipe, Tensor

RopeMode = Literal["normal", "neox"]
RopeScaling = Literal["none", "linear", "yarn", "longrope"]
RopeParams = dict[str, Any]

RMS_EPS = "attention.layer_norm_rms_epsilon"
"""The key of the epsilon of RMS norms."""

LAYER_EPS = "attention.layer_norm_epsilon"
"""The key of the epsilon of layer norms."""

LARGE = 1e6
"""Beyond it, and below its inverse, no model has a scale: such a number is damaged."""

NO_TEXT_VOCABULARY = "no_vocab"
"""`tokenizer.ggml.model` of a file that knows token ids only."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    mode         "normal": pairs of neighbours; "neox": value i with value i + n_dims/2
    n_dims       values of a head that are rotated, the rest pass unchanged
    freq_scale   positions are multiplied by it: 1/factor
    ext_factor   share of YaRN's extrapolation, 0 without YaRN
    n_ctx_orig   context the model was trained on before it was stretched
    factors      weight F32 [n_dims / 2] that divides the frequency of each pair, where the file has one of that name
    """

    mode: RopeMode
    n_dims: int
    freq_base: float
    scaling: RopeScaling
    freq_scale: float
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float
    n_ctx_orig: int
    factors: str = "rope_freqs.weight"

    @property
    def params(self) -> RopeParams:
        """Params of a ROPE node."""
        names = ("mode", "n_dims", "freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow", "n_ctx_orig")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Heads:
    """Heads of an attention layer: n of Q, n_kv of K and V; widths of a head of K (and Q) and of V."""

    n: int
    n_kv: int
    dim_k: int
    dim_v: int


@dataclass(frozen=True)
class HParams:
    """What graphs depend on, as nearly all architectures have it. What only one has is an attribute of its Architecture.

    n_ff          width of a dense feed-forward layer
    head_dim_k/v  width of a head of K (and Q) and of V
    n_expert      0 for a dense model; n_expert_used of them work on a token, each n_ff_expert wide
    norm_w        weights of the chosen experts are divided by their sum
    expert_scale  by which they are multiplied then
    attn_scale    of the dot products of Q and K
    softcap       c of the logits c tanh(x / c); 0: they are x
    window        rows that a token sees in the layers which have a sliding window, 0 without
    weights       every tensor of the file by name
    files         of a split model, the file of each
    """

    path: Path
    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_vocab: int
    n_ctx_train: int
    rms_eps: float
    attn_scale: float
    window: int
    rope: Rope
    n_expert: int
    n_expert_used: int
    n_ff_expert: int
    norm_w: bool
    expert_scale: float
    softcap: float
    weights: Mapping[str, Tensor] = field(compare=False, hash=False, repr=False)
    files: Mapping[str, Path] = field(compare=False, hash=False, repr=False, default_factory=dict)

    @property
    def heads(self) -> Heads:
        return Heads(self.n_head, self.n_head_kv, self.head_dim_k, self.head_dim_v)

    def has_weight(self, name: str) -> bool:
        return name in self.weights

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The weight `name`, whose shape must be `shape`. Raises GgufError when it is missing or shaped otherwise."""
        found = self.weights.get(name)
        if found is None:
            raise self.missing(name)
        if found.shape != shape:
            path = self.files.get(name, self.path)
            raise GgufError(f"[gguf] {path}: tensor {name} has shape {list(found.shape)}, the hyperparameters say {list(shape)}")
        return found

    def with_scaled(self, scales: Mapping[str, float]) -> HParams:
        """The same with weights of one axis times a constant, where there are weights of these names."""
        made = {name: replace(w, recipe=Recipe("plain", (name,), scales[name])) for name, w in self.weights.items() if name in scales}
        return replace(self, weights={**self.weights, **made})

    def missing(self, name: str, instead: str = "") -> GgufError:
        """instead: other tensors that could be there in its place."""
        others = f", and so are {instead} in its place" if instead else ""
        return GgufError(
            f"[gguf] {self.path}: tensor {name} is missing{others}; {self.arch} with {self.n_layer} layers needs it "
            f"({len(self.weights)} tensors in the file)"
        )


def _weights(f: GgufFile) -> dict[str, Tensor]:
    """Every tensor of a file, and the weights that parts of tensors make."""
    weights = {name: Tensor(name, t.type, t.shape, "weight", Recipe("plain", (name,))) for name, t in f.tensors.items()}
    for name, parts in f.joined.items():
        first = f.tensors[parts[0]]
        rows = sum(f.tensors[part].shape[0] for part in parts)
        weights[name] = Tensor(name, first.type, (rows, *first.shape[1:]), "weight", Recipe("concat", parts))
    return weights


class Metadata:
    """Metadata of one file under its architecture's prefix: `count("block_count")` is `llama.block_count`, checked.

    Readers raise GgufError naming the key that is missing, of another type or out of range.
    """

    def __init__(self, f: GgufFile, varying: Collection[str] = (), keys: Collection[str] = ()) -> None:
        """varying: integers that may differ from layer to layer; `count` gives the largest. keys: `Architecture.keys`; without those of
        experts and of windows, `hparams` has none."""
        self._f = f
        self._arch = f.arch
        self._varying = varying
        self._keys = keys

    def hparams(self, rope_mode: RopeMode, norm_eps: str = RMS_EPS, *, attends: bool = True, dense: bool = True) -> HParams:
        """What nearly all architectures have. attends: whether this one has attention and a feed-forward; else their sizes may be 0. dense:
        whether a layer may have a dense feed-forward; else its width may be missing."""
        n_embd, least = self.count("embedding_length"), int(attends)
        n_head = self.count("attention.head_count", None if attends else 0, least=least)
        n_head_kv = (
            self.count("attention.head_count_kv", n_head, least=0 if "attention.head_count_kv" in self._varying else least) or n_head
        )
        if n_head_kv and n_head % n_head_kv:
            raise self.fail("attention.head_count_kv", n_head_kv, f"a divisor of the {n_head} heads")
        head_dim = n_embd // n_head if n_head else 0
        head_dim_k = self.count("attention.key_length", head_dim, least=least)
        n_ff = self.count("feed_forward_length", None if attends and dense else 0, least=least if dense else 0)
        moe = "expert_count" in self._keys
        n_expert = self.count("expert_count", 0, least=0) if moe else 0
        n_expert_used = self.count("expert_used_count", 0 if n_expert == 0 else None, least=min(n_expert, 1)) if moe else 0
        if n_expert_used > n_expert:
            raise self.fail("expert_used_count", n_expert_used, f"at most expert_count, {n_expert}")
        return HParams(
            path=self._f.path,
            arch=self._arch,
            n_layer=self.layers(),
            n_embd=n_embd,
            n_ff=n_ff,
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim_k=head_dim_k,
            head_dim_v=self.count("attention.value_length", head_dim, least=least),
            n_vocab=self.vocabulary(),
            n_ctx_train=self.count("context_length"),
            rms_eps=self.epsilon(norm_eps),
            attn_scale=self.positive_or("attention.scale", 1.0 / math.sqrt(max(head_dim_k, 1)), most=LARGE),
            window=self.count("attention.sliding_window", 0, least=0) if "attention.sliding_window" in self._keys else 0,
            rope=self.rope(rope_mode, head_dim_k, least=least),
            n_expert=n_expert,
            n_expert_used=n_expert_used,
            n_ff_expert=self.count("expert_feed_forward_length", n_ff, least=0) or n_ff if n_expert else 0,
            norm_w=self._f.get(self.key("expert_weights_norm"), bool, True) if moe else True,
            expert_scale=self.positive_or("expert_weights_scale", 1.0, most=LARGE) if moe else 1.0,
            softcap=self.positive_or("final_logit_softcapping", 0.0, most=LARGE),
            weights=_weights(self._f),
            files={name: self._f.where(name) for name in self._f.tensors} if len(self._f.files) > 1 else {},
        )

    def key(self, name: str) -> str:
        return f"{self._arch}.{name}"

    def fail(self, name: str, value: object, expected: str) -> GgufError:
        return GgufError(f"[gguf] {self._f.path}: metadata key {self.key(name)} is {value}, expected {expected}")

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer; an array of one value for every layer serves when all layers agree."""
        key = self.key(name)
        value = self._f.metadata.get(key)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            if (value != value[0]).any() and name not in self._varying:
                raise self.fail(name, f"different from layer to layer ({value.min()} to {value.max()})", "one value for all layers")
            value = int(value.max())
        else:
            value = self._f.get(key, int, default)
        if value < least:
            raise self.fail(name, value, f"at least {least}")
        return value

    def layers(self) -> int:
        """How many layers there are: no more than tensors, so that nothing made of a wrong number is larger than the file."""
        n_layer, n_tensors = self.count("block_count"), len(self._f.tensors)
        if n_layer > n_tensors:
            raise self.fail("block_count", n_layer, f"at most as many layers as the file has tensors, {n_tensors}")
        return n_layer

    def of_layers(self, name: str, n_layer: int) -> tuple[int, ...]:
        """An integer for each layer: an array of as many, or one value for all. n_layer: of `hparams`, which knows the file has as many."""
        value = self._f.metadata.get(self.key(name))
        if not isinstance(value, np.ndarray):
            return (self.count(name, least=0),) * n_layer
        if value.shape != (n_layer,) or value.dtype.kind not in "iu" or value.min() < 0:
            stated = f"{value.size} values of {value.dtype} from {value.min(initial=0)}"
            raise self.fail(name, stated, f"{n_layer} integers, at least 0")
        return tuple(int(v) for v in value)

    def positive(self, name: str, default: float | None = None, *, most: float = 1e30) -> float:
        """A number from 1 / most to most: what is made of it should be a float32 too."""
        value = self._f.get(self.key(name), float, default)
        if not value > 0:
            raise self.fail(name, value, "a positive number")
        if not 1.0 / most <= value <= most:
            raise self.fail(name, value, f"a number from {1.0 / most:g} to {most:g}")
        return value

    def positive_or(self, name: str, default: float, *, most: float = 1e30) -> float:
        """The same where 0 in a file stands for the default, as no key does."""
        return self.positive(name, most=most) if self._f.get(self.key(name), float, 0.0) != 0.0 else default

    def epsilon(self, name: str) -> float:
        """What a norm adds to a mean of squares: above 0, at most 1."""
        value = self.positive(name)
        if value > 1.0:
            raise self.fail(name, value, "a number up to 1")
        return value

    def share(self, name: str, default: float) -> float:
        """A number from 0 to 1; below 0 it stands for the default."""
        value = self._f.get(self.key(name), float, default)
        if not value <= 1.0:
            raise self.fail(name, value, "a number from 0 to 1, or below 0 for the default")
        return value if value >= 0.0 else default

    def pattern(self, name: str, n_layer: int, period: int, *, first: bool = False) -> tuple[bool, ...]:
        """Which layers see all tokens: the last of every `period` (first: the first), or of as many as the key says (0: none); or as its
        array of booleans says, one a layer, true for a sliding window."""
        value = self._f.metadata.get(self.key(name))
        if isinstance(value, np.ndarray):
            if value.shape != (n_layer,):
                raise self.fail(name, f"{value.size} values", f"one for each of {n_layer} layers")
            return tuple(not bool(v) for v in value)
        period = self.count(name, period, least=0)
        return tuple(period > 0 and il % period == (0 if first else period - 1) for il in range(n_layer))

    def sections(self, name: str, pairs: int) -> None:
        """Checks that the sections of RoPE, where a file has them, are of all its pairs and of no more."""
        value = self._f.metadata.get(self.key(name))
        if value is not None and (not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or int(value.sum()) != pairs):
            shown = value.tolist() if isinstance(value, np.ndarray) and value.size <= 8 else quoted(value)
            raise self.fail(name, shown, f"integers whose sum is the {pairs} pairs that RoPE turns")

    def array(self, name: str) -> npt.NDArray[Any] | None:
        """A value that has several, None where it is missing or one alone."""
        value = self._f.metadata.get(self.key(name))
        return value if isinstance(value, np.ndarray) else None

    def stated(self, name: str, default: int = 0) -> int:
        """An integer of a file that need not be sound; the default where it has none."""
        value = self._f.metadata.get(self.key(name), default)
        return value if isinstance(value, int) else default

    def vocabulary(self) -> int:
        """Rows of the output: the vocabulary's tokens, or `vocab_size` where the file has no text vocabulary."""
        return self._n_tokens() or self.count("vocab_size")

    def stated_vocabulary(self) -> int:
        """The same of a file that need not be sound, 0 where it does not say."""
        return self._n_tokens() or self.stated("vocab_size")

    def _n_tokens(self) -> int:
        tokens = self._f.metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if isinstance(tokens, list) else 0

    def rope(self, mode: RopeMode, head_dim: int, *, least: int = 1) -> Rope:
        n_dims = self.count("rope.dimension_count", head_dim, least=least)
        if n_dims % 2 or n_dims > head_dim:
            raise self.fail("rope.dimension_count", n_dims, f"an even number, at most the head size {head_dim}")
        scaling = self._f.get(self.key("rope.scaling.type"), str, "linear") or "none"
        base = self.freq_base("rope.freq_base", 10000.0)
        long_rope = scaling == "longrope" and "rope_factors_long.weight" in self._f.tensors
        if scaling not in ("none", "linear", "yarn") and not long_rope:
            raise self.fail("rope.scaling.type", quoted(scaling), "none, linear or yarn")
        return Rope(
            mode=mode,
            n_dims=n_dims,
            freq_base=base,
            scaling=cast(RopeScaling, scaling),
            freq_scale=1.0 if scaling in ("none", "longrope") else 1.0 / self.scaling_factor(),
            ext_factor=self.share("rope.scaling.yarn_ext_factor", 1.0 if scaling == "yarn" else 0.0),
            attn_factor=self.positive_or("rope.scaling.attn_factor", 1.0, most=LARGE)
            * self.positive_or("rope.scaling.yarn_attn_factor", 1.0, most=LARGE),
            beta_fast=self.positive("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=self.positive("rope.scaling.yarn_beta_slow", 1.0),
            n_ctx_orig=self.count("rope.scaling.original_context_length", 0, least=0) or self.count("context_length"),
        )

    def freq_base(self, name: str, default: float) -> float:
        """A base of RoPE; 0 stands for the default."""
        base = self.positive_or(name, default)
        if base <= 1.0:
            raise self.fail(name, base, "a number above 1")
        return base

    def scaling_factor(self) -> float:
        """`rope.scaling.factor`, or `rope.scale_linear` of older files; 0 stands for none."""
        return self.positive_or("rope.scaling.factor", self.positive_or("rope.scale_linear", 1.0, most=LARGE), most=LARGE)
