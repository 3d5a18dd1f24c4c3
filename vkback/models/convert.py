"""Published models (folders of safetensors) as GGUF files, for the families whose logits tests compare with transformers'.

Names of tensors come from the gguf package's maps; what a family does beside them is a `Family`. Rows of Q and K of the llama kind are
brought into the order of files, in which the two values that RoPE turns together are neighbours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.gguf.hf_vocabulary import vocabulary_keys
from vkback.gguf.safetensors import BYTES, FolderError, Stored, read_folder, read_json
from vkback.gguf.write import GgufWriter, entry
from vkback.models.naming import file_type
from vkback.models.quantize import PIECE, QuantizeError, checked_finite
from vkback.models.type_choice import file_order, fitting, is_matrix
from vkback.paths import new_file_or, unwritable

OUT_TYPES = ("auto", "F32", "F16", "BF16", "Q8_0")

Config = Mapping[str, Any]
Floats = npt.NDArray[np.float32]
Keys = dict[str, Any]

IGNORED = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")
VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""Tensors that the text model of a larger one does not have."""


@dataclass(frozen=True)
class Family:
    """A class of transformers.

    arch      general.architecture
    permuted  Q and K are brought into the order of llama files
    offset    what is added to the weights of norms
    whole_magnitude  `rope.scaling.attn_factor` is all that YaRN multiplies by, not what comes beside its own
    interleaved  experts have a matrix with inputs first, in which gate and up take turns
    more      keys beside those of all, under the architecture's prefix; raises FolderError for a configuration that GGUF cannot say
    """

    arch: str
    permuted: bool = False
    offset: float = 0.0
    whole_magnitude: bool = False
    interleaved: bool = False
    more: Callable[[Config], Keys] = lambda _: {}


@dataclass(frozen=True)
class OutTensor:
    """A tensor of the new file. rows(first, end) gives float32 rows, experts flattened: [end - first, k]; packed the bytes of the same rows
    in the type `stored`, where that is a quantized one."""

    name: str
    shape: tuple[int, ...]
    stored: str
    rows: Callable[[int, int], Floats]
    packed: Callable[[int, int], npt.NDArray[np.uint8]] | None = None


def _scaled(c: Config) -> Keys:
    return {
        "embedding_scale": float(c["embedding_multiplier"]),
        "residual_scale": float(c["residual_multiplier"]),
        "attention.scale": float(c["attention_multiplier"]),
        "logit_scale": float(c["logits_scaling"]),
    }


def _experts(count: str) -> Callable[[Config], Keys]:
    def more(c: Config) -> Keys:
        if not c.get("norm_topk_prob", True):
            raise FolderError("[convert] config.json: norm_topk_prob is false, which files cannot say of this architecture; expected true")
        if c.get("mlp_only_layers") or c.get("decoder_sparse_step", 1) != 1:
            raise FolderError("[convert] config.json: some layers have no experts (mlp_only_layers); expected experts in all")
        keys: Keys = {"expert_count": int(c.get(count, c.get("num_local_experts", 0))), "expert_used_count": int(c["num_experts_per_tok"])}
        return keys | ({"expert_feed_forward_length": int(c["moe_intermediate_size"])} if "moe_intermediate_size" in c else {})

    return more


def _gemma(c: Config) -> Keys:
    keys: Keys = {"attention.sliding_window": int(c["sliding_window"])}
    for theirs, ours in (("attn_logit_softcapping", "attn_logit_softcapping"), ("final_logit_softcapping", "final_logit_softcapping")):
        if c.get(theirs):
            keys[ours] = float(c[theirs])
    if (scalar := c.get("query_pre_attn_scalar")) and scalar != c["head_dim"]:
        keys["attention.scale"] = float(scalar) ** -0.5
    return keys


def _gemma3(c: Config) -> Keys:
    kinds = c.get("layer_types") or []
    period = next((i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"), c.get("sliding_window_pattern", 6))
    expected = ["full_attention" if i % period == period - 1 else "sliding_attention" for i in range(len(kinds))]
    if list(kinds) != expected:
        raise FolderError(f"[convert] config.json: layer_types have no period: {kinds}; expected every {period}th to be full_attention")
    local = _rope(c, "sliding_attention").get("rope_theta", c.get("rope_local_base_freq", 10000.0))
    return _gemma(c) | {"attention.sliding_window_pattern": int(period), "rope.freq_base_swa": float(local)}


def _windows(c: Config, period: int) -> Keys:
    """A sliding window of all layers but one of `period`, the last of them."""
    kinds = c.get("layer_types") or []
    expected = ["full_attention" if i % period == period - 1 else "sliding_attention" for i in range(int(c["num_hidden_layers"]))]
    if kinds and list(kinds) != expected:
        raise FolderError(
            f"[convert] config.json: layer_types are {kinds}; expected every layer of {period} to be full_attention, which files say"
        )
    return {"attention.sliding_window": int(c["sliding_window"])}


def _gpt_oss(c: Config) -> Keys:
    if float(c.get("swiglu_limit", 7.0)) != 7.0 or not c.get("attention_bias", True):
        raise FolderError(
            "[convert] config.json: swiglu_limit is not 7 or attention_bias is false, which files cannot say of this architecture"
        )
    used = c.get("num_experts_per_tok", c.get("experts_per_token"))
    if used is None:
        raise KeyError("num_experts_per_tok")
    keys: Keys = {"expert_count": int(c["num_local_experts"]), "expert_used_count": int(used)}
    return keys | _windows(c, 2) | {"expert_feed_forward_length": int(c["intermediate_size"])}


def _phi3(c: Config) -> Keys:
    window = c.get("sliding_window")
    return {"attention.sliding_window": int(window)} if window else {}


def _smollm3(c: Config) -> Keys:
    used, n = c.get("no_rope_layers"), int(c["num_hidden_layers"])
    if used is not None and list(used) != [int(i % 4 != 3) for i in range(n)]:
        raise FolderError("[convert] config.json: no_rope_layers are not every fourth layer, which files cannot say of this architecture")
    return {}


def _no_window(c: Config) -> Keys:
    """A sliding window that is no longer than the context changes nothing."""
    window = c.get("sliding_window")
    if window and c.get("use_sliding_window", True) and window < c.get("max_position_embeddings", 0):
        raise FolderError(f"[convert] config.json: a sliding window of {window} tokens, which files of this architecture cannot say")
    return {}


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", permuted=True),
    "MistralForCausalLM": Family("llama", permuted=True, more=_no_window),
    "MixtralForCausalLM": Family("llama", permuted=True, more=lambda c: _experts("num_local_experts")(c) | _no_window(c)),
    "Qwen2ForCausalLM": Family("qwen2", more=_no_window),
    "Qwen3ForCausalLM": Family("qwen3", more=_no_window),
    "Qwen3MoeForCausalLM": Family("qwen3moe", more=_experts("num_experts")),
    "Gemma2ForCausalLM": Family("gemma2", offset=1.0, more=_gemma),
    "Gemma3ForCausalLM": Family("gemma3", offset=1.0, more=_gemma3),
    "Gemma3ForConditionalGeneration": Family("gemma3", offset=1.0, more=_gemma3),
    "Phi3ForCausalLM": Family("phi3", more=_phi3),
    "SmolLM3ForCausalLM": Family("smollm3", permuted=True, more=_smollm3),
    "GraniteForCausalLM": Family("granite", permuted=True, more=_scaled),
    "Olmo2ForCausalLM": Family("olmo2"),
    "Olmo3ForCausalLM": Family("olmo2", whole_magnitude=True, more=lambda c: _windows(c, 4)),
    "GptOssForCausalLM": Family("gpt-oss", interleaved=True, more=_gpt_oss),
}
"""By the class that config.json names."""


def _rope(c: Config, kind: str = "full_attention") -> Mapping[str, Any]:
    """RoPE's parameters; of layers of a kind, where those differ."""
    found = c.get("rope_parameters") or c.get("rope_scaling") or {}
    inner = found.get(kind)
    return inner if isinstance(inner, Mapping) else {} if kind != "full_attention" else found


def _keys(c: Config, family: Family, n_vocab: int) -> tuple[Keys, dict[str, Floats]]:
    """Keys under the architecture's prefix, and vectors that RoPE divides frequencies by."""
    heads, width = int(c["num_attention_heads"]), int(c["hidden_size"])
    head_dim = int(c.get("head_dim") or width // heads)
    rope = _rope(c)
    base = float(rope.get("rope_theta", c.get("rope_theta", 10000.0)))
    n_rot = int(head_dim * float(rope.get("partial_rotary_factor", c.get("partial_rotary_factor") or 1.0)))
    keys: Keys = {
        "context_length": int(c["max_position_embeddings"]),
        "embedding_length": width,
        "block_count": int(c["num_hidden_layers"]),
        "feed_forward_length": int(c["intermediate_size"]),
        "attention.head_count": heads,
        "attention.head_count_kv": int(c.get("num_key_value_heads") or heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(c["rms_norm_eps"]),
        "rope.freq_base": base,
        "rope.dimension_count": n_rot,
        "vocab_size": n_vocab,
    }
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    vectors: dict[str, Floats] = {}
    original = int(rope.get("original_max_position_embeddings") or c.get("original_max_position_embeddings") or keys["context_length"])
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        keys |= _yarn(rope, original, family) if kind == "yarn" else {}
    elif kind == "llama3":
        vectors["rope_freqs.weight"] = _llama3_factors(base, n_rot, rope)
    elif kind in ("longrope", "su"):
        for which in ("long", "short"):
            vectors[f"rope_factors_{which}.weight"] = np.array(rope[f"{which}_factor"], np.float32)
        factor = keys["context_length"] / original
        magnitude = rope.get("attention_factor") or (math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0)
        keys |= {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": float(magnitude)}
    elif kind != "default":
        raise FolderError(f"[convert] config.json: RoPE of type {kind}; expected default, linear, yarn, llama3 or longrope")
    return keys | family.more({**c, "head_dim": head_dim}), vectors


def _yarn(rope: Mapping[str, Any], original: int, family: Family) -> Keys:
    keys: Keys = {"rope.scaling.original_context_length": original}
    own = 1 + 0.1 * math.log(float(rope["factor"]))
    whole = float(rope.get("attention_factor") or own)
    if not math.isclose(whole, own, rel_tol=1e-6):
        keys["rope.scaling.attn_factor"] = whole if family.whole_magnitude else whole / own
    return keys | {f"rope.scaling.yarn_{key}": float(rope[key]) for key in ("beta_fast", "beta_slow") if rope.get(key) is not None}


def _llama3_factors(base: float, n_rot: int, rope: Mapping[str, Any]) -> Floats:
    """By Llama 3.1's rule: pairs with short waves keep their frequency, those with long ones are slowed by the factor, between the two it
    goes smoothly."""
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    waves = 2 * np.pi * np.power(base, np.arange(0, n_rot, 2) / n_rot)
    turns = float(rope["original_max_position_embeddings"]) / waves
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    found: Floats = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return found


def _family(config: Config, folder: Path) -> Family:
    named = config.get("architectures") or ["none"]
    family = FAMILIES.get(str(named[0]))
    if family is None:
        raise FolderError(f"[convert] {folder}: a model of the class {named[0]}; expected one of {', '.join(FAMILIES)}")
    return family


def convert(
    folder: Path, out: Path, outtype: str = "auto", *, pre: str = "", on_weights: Callable[[int], object] | None = None
) -> tuple[str, int, int]:
    """Write a folder's model as GGUF; the file appears when it is whole.

    outtype  of the matrices, one of OUT_TYPES; auto: as they are stored. Vectors and routers are F32
    pre      tokenizer.ggml.pre, where vkback does not know how the tokenizer cuts text
    ->  the type, bytes of all tensors, values
    Raises FolderError for what cannot be converted, naming the file or the tensor.
    """
    whole = read_json(folder / "config.json", missing="give the folder of a published model")
    family = _family(whole, folder)
    config = {**whole, **whole["text_config"]} if isinstance(whole.get("text_config"), Mapping) else whole
    if why := unwritable(out):
        raise QuantizeError(f"[convert] {out}: {why}")
    stored = read_folder(folder)
    try:
        tensors = _tensors(stored, config, family)
        n_vocab = next(t.shape[0] for t in tensors if t.name == "token_embd.weight")
        keys, vectors = _keys(config, family, n_vocab)
    except KeyError as e:
        raise FolderError(f"[convert] {folder / 'config.json'}: has no {e}; fetch it again") from e
    except StopIteration:
        raise FolderError(f"[convert] {folder}: has no embedding of tokens") from None
    tensors += [OutTensor(name, v.shape, "F32", lambda first, end, v=v: v[None]) for name, v in vectors.items()]  # type: ignore[misc]
    tensors.sort(key=lambda t: file_order(t.name))
    kinds = [t.stored for t in tensors if is_matrix(t.name, t.shape) and t.packed is None]
    base = max(set(kinds), key=kinds.count) if outtype == "auto" else outtype.upper()
    types = {t.name: fitting(base, t.shape[-1]) if is_matrix(t.name, t.shape) else "F32" for t in tensors}
    blocks = {t.name: t.stored for t in tensors if t.packed is not None and outtype == "auto"}
    types |= blocks
    base = "MXFP4_MOE" if blocks else base
    number = file_type(base)
    general: Keys = {"general.architecture": family.arch, "general.type": "model", "general.name": folder.resolve().name}
    general |= {"general.file_type": int(number)} if number is not None else {}
    general |= {"general.quantization_version": 2}
    entries = {**general, **{f"{family.arch}.{key}": value for key, value in keys.items()}, **vocabulary_keys(folder, n_vocab, pre)}
    tables = [(t.name, types[t.name], t.shape) for t in tensors]
    with (
        new_file_or(QuantizeError, f"[convert] {out}:", out, durable=True) as part,
        GgufWriter(part, [entry(key, value) for key, value in entries.items()], tables) as writer,
    ):
        for t in tensors:
            rows, step = prod(t.shape[:-1]), max(1, PIECE // t.shape[-1])
            for first in range(0, rows, step):
                if t.packed is not None and types[t.name] == t.stored:
                    last = min(first + step, rows)
                    writer.write(t.packed(first, last))
                    if on_weights is not None:
                        on_weights((last - first) * t.shape[-1])
                    continue
                x = np.ascontiguousarray(t.rows(first, min(first + step, rows)), np.float32).reshape(-1, t.shape[-1])
                checked_finite(t.name, x)
                writer.write(quants.encode(types[t.name], x))
                if on_weights is not None:
                    on_weights(x.size)
    size = sum(prod(t.shape[:-1]) * quants.row_bytes(types[t.name], t.shape[-1]) for t in tensors)
    return base, size, sum(prod(t.shape) for t in tensors)


EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
"""A tensor of one expert."""


def _tensors(stored: Mapping[str, Stored], config: Config, family: Family) -> list[OutTensor]:
    """The tensors of the new file. Raises FolderError for one that has no place in the family."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == family.arch)
    assert isinstance(arch, MODEL_ARCH)
    names = get_tensor_name_map(arch, int(config["num_hidden_layers"]))
    alone: dict[str, Stored] = {}
    experts: dict[str, dict[int, Stored]] = {}
    for name, t in stored.items():
        if name.startswith(VISION) or name.endswith(IGNORED):
            continue
        plain = name.replace("model.language_model.", "model.").removeprefix("language_model.")
        if plain == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        found = EXPERT.fullmatch(plain)
        if found:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = t
        else:
            alone[plain] = t
    made: list[OutTensor] = []
    for plain in [name for name in alone if name.endswith("_blocks")]:
        stem, blocks, scales = plain.removesuffix("_blocks"), alone.pop(plain), alone.pop(f"{plain.removesuffix('_blocks')}_scales", None)
        if scales is None or not family.interleaved or blocks.shape[:-1] != scales.shape or {blocks.type, scales.type} != {BYTES}:
            raise FolderError(f"[convert] {plain}: expected blocks of bytes and scales for each of them, of a family that has such experts")
        for which, begin, step in _halves(stem):
            made.append(_mxfp4(_named(names, which), blocks, scales, begin, step))
    if of_bytes := next((name for name, t in alone.items() if t.type == BYTES), None):
        raise FolderError(f"[convert] {of_bytes}: a quantized tensor; expected F32, F16 or BF16, so fetch the model that it was made of")
    for plain, t in alone.items():
        if family.interleaved and ".experts." in plain:
            for which, begin, step in _halves(plain):
                made.append(_turned(_named(names, which), t, begin, step))
        elif plain.endswith(".experts.gate_up_proj"):
            half = t.shape[1] // 2
            for which, begin in (("gate_proj", 0), ("up_proj", half)):
                made.append(_slab(_named(names, plain.replace("gate_up_proj", which) + ".weight"), t, begin, half))
        else:
            target = _named(names, plain if plain.endswith((".weight", ".bias")) else f"{plain}.weight")
            made.append(_single(target, t, config, family))
    for plain, of in experts.items():
        if sorted(of) != list(range(len(of))) or len({t.shape for t in of.values()}) > 1:
            raise FolderError(f"[convert] {plain}: experts {sorted(of)}, expected all of one shape from 0 on. Fetch the model again")
        made.append(_stacked(_named(names, plain), [of[i] for i in range(len(of))]))
    return made


def _halves(plain: str) -> list[tuple[str, int, int]]:
    """Of a tensor of interleaved experts: names of the tensors that it has, as the maps know them, and which of its outputs are theirs, as
    the first of them and the step to the next."""
    bias = plain.endswith("_bias")
    stem, end = plain.removesuffix("_bias"), ".bias" if bias else ".weight"
    if stem.endswith("gate_up_proj"):
        return [(stem.replace("gate_up_proj", f"{which}_proj") + end, begin, 2) for begin, which in enumerate(("gate", "up"))]
    return [(stem + end, 0, 1)]


def _turned(name: str, t: Stored, begin: int, step: int) -> OutTensor:
    """Some outputs of all experts: of matrices [experts, k, outputs], or of biases [experts, outputs]."""
    if len(t.shape) == 2:
        return OutTensor(name, (t.shape[0], t.shape[1] // step), t.type, lambda first, end: t.rows(slice(first, end))[:, begin::step])
    experts, k, outputs = t.shape
    rows = outputs // step

    @lru_cache(maxsize=1)  # whose rows come one after another
    def matrix(expert: int) -> Floats:
        found: Floats = t.rows(slice(expert, expert + 1))[0][:, begin::step].T
        return found

    def flat(first: int, end: int) -> Floats:
        parts = [matrix(e)[max(first - e * rows, 0) : end - e * rows] for e in range(first // rows, -(-end // rows))]
        return np.concatenate(parts)

    return OutTensor(name, (experts, rows, k), t.type, flat)


def _mxfp4(name: str, blocks: Stored, scales: Stored, begin: int, step: int) -> OutTensor:
    """Some outputs of all experts of blocks [experts, outputs, blocks of a row, 16] and scales [experts, outputs, blocks of a row].

    Both are MXFP4, the scale's byte first in a file. Published, a byte has two neighbours, the first of them low; in a file it has value j
    of a block, and value j + 16.
    """
    experts, outputs, units, _ = blocks.shape
    rows = outputs // step

    def packed(first: int, end: int) -> npt.NDArray[np.uint8]:
        numbers = np.arange(first, end)
        picked = (numbers // rows) * outputs + begin + step * (numbers % rows)
        pairs = blocks.raw.reshape(experts * outputs, units, 16)[picked]
        values = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(picked), units, 32)
        halves = values[..., :16] | values[..., 16:] << 4
        exponents = scales.raw.reshape(experts * outputs, units, 1)[picked]
        return np.concatenate([exponents, halves], axis=-1).reshape(len(picked), -1)

    def decoded(first: int, end: int) -> Floats:
        return quants.decode("MXFP4", packed(first, end)).reshape(end - first, -1)

    return OutTensor(name, (experts, rows, 32 * units), "MXFP4", decoded, packed)


def _named(names: Any, theirs: str) -> str:
    found = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise FolderError(f"[convert] tensor {theirs} has no place in a GGUF file of this architecture; the result would be wrong")
    return str(found)


def _single(name: str, t: Stored, config: Config, family: Family) -> OutTensor:
    shape = t.shape
    if len(shape) == 1:
        return OutTensor(
            name, shape, t.type, lambda first, end: (t.rows(_order(name, shape[0], config, family)) + _offset(name, family))[None]
        )
    order = _order(name, shape[0], config, family)
    if len(shape) == 2:
        return OutTensor(
            name, shape, t.type, lambda first, end: t.rows(slice(first, end) if isinstance(order, slice) else order[first:end])
        )
    return _slab(name, t, 0, shape[1])


def _offset(name: str, family: Family) -> np.float32:
    return np.float32(family.offset if name.endswith("norm.weight") else 0.0)


def _order(name: str, rows: int, config: Config, family: Family) -> Any:
    """Numbers of the rows of a tensor in the order of the file: of Q and K value i and i + d/2 of a head become neighbours."""
    stem = name.rpartition(".")[0].rpartition(".")[2]
    if not family.permuted or stem not in ("attn_q", "attn_k"):
        return slice(None)
    heads = int(config["num_attention_heads"] if stem == "attn_q" else config.get("num_key_value_heads") or config["num_attention_heads"])
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).ravel()


def _slab(name: str, t: Stored, begin: int, rows: int) -> OutTensor:
    """Some rows of every expert of a stack [experts, all rows, k]."""
    experts, every, k = t.shape

    def flat(first: int, end: int) -> Floats:
        numbers = np.arange(first, end)
        picked = (numbers // rows) * every + begin + numbers % rows
        return Stored(t.name, t.type, (experts * every, k), t.raw).rows(picked)

    return OutTensor(name, (experts, rows, k), t.type, flat)


def _stacked(name: str, of: Sequence[Stored]) -> OutTensor:
    rows, k = of[0].shape

    def flat(first: int, end: int) -> Floats:
        parts = []
        while first < end:
            expert, row = divmod(first, rows)
            last = min(rows, row + end - first)
            parts.append(of[expert].rows(slice(row, last)))
            first += last - row
        return np.concatenate(parts)

    return OutTensor(name, (len(of), rows, k), of[0].type, flat)
