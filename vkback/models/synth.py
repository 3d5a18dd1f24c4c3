"""Synthetic models: real shapes, real type of every tensor, random weights, a made-up vocabulary.

Speed does not depend on what the weights say, so a file made here in seconds times like the real one, and llama-bench prints the same name,
size and parameter count for it. Which tensor of which layer has which type is in type_mixes.json, as llama-quantize has chosen, or follows
from its rules (vkback/models/type_choice.py); shapes are those the models' makers publish.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType

from vkback import quants
from vkback.errors import VkbackError, did_you_mean, nearest
from vkback.gguf.file import DEFAULT_ALIGNMENT, GgufFile, tensor_bytes
from vkback.gguf.hparams import NO_TEXT_VOCABULARY, RMS_EPS
from vkback.models import eagle3
from vkback.models.architecture import ARCHITECTURES
from vkback.models.naming import file_type
from vkback.models.shape import ModelShape
from vkback.models.synth_vocabulary import add_vocabulary
from vkback.models.type_choice import SYNTHETIC, Counts, choose_types
from vkback.paths import new_file_or, unwritable

CHUNK_BYTES = 4 << 20
"""Bytes that one worker fills at a time: enough to fill a write, little enough that many workers need little memory."""

UNIFORM = "Q8_0"
"""The type of tiny models: llama-quantize gives all matrices this one type."""

TINY = "tiny-"
"""What their names begin with."""


OF_THE_LAST = ("attention.shared_kv_layers",)
"""Keys that say of how many layers at the end something holds; the first layers of a model have as many fewer as are missing."""

WHOLE = "F32"
"""Every shape can also be written with all its tensors of this type: models to train."""


class SynthError(VkbackError):
    """An unknown model or type, or a file that cannot be written."""


class UnknownShape(SynthError):  # noqa: N818  what it says is enough
    """A name that is none of `synthetic_names`, or layers that its shape has not."""

    exit_code = 2


RECURRENT = ("ssm_a", "ssm_d", "ssm_conv1d", "conv")
"""Small tensors of a Mamba-2 block, and the taps of a short convolution. A decays states within a token to some hundreds, by dt and its
bias, as trained models have them."""

MIXING = ("altup_correct_coef", "altup_correct_scale", "altup_predict_coef")
"""Small tensors of AltUp."""

FLOATS = (*MIXING, "attn_sinks", "ffn_gate_inp", "ffn_gate_inp_shexp", "layer_output_scale", "position_embd", "token_types", *RECURRENT)
"""What is F32 in every file, beside norms, biases and frequencies."""

KEPT = ("altup_proj", "altup_router", "altup_unembd_proj", "laurel_l", "laurel_r", "per_layer_model_proj")
"""What llama-quantize leaves as it is."""

SHAPES: dict[str, ModelShape] = {name: shape for known in ARCHITECTURES.values() for name, shape in known.shapes.items()}
"""Shapes by name, of all architectures."""

HEAD = "-eagle3"
"""Behind the name of a shape: the EAGLE-3 head (vkback/models/eagle3.py) of such a model."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written; shape in numpy order."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.type, self.shape)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def synthetic_names() -> list[str]:
    """Every name `synthesize` takes, as `llama-8b-Q4_K_S`."""
    return [f"{shape}-{type}" for shape in SHAPES for type in _types(shape)]


def head_names() -> list[str]:
    """Names of EAGLE-3 heads that `synthesize` takes, as `llama-8b-eagle3-Q4_K_S`: for each dense model that makes text."""
    return [f"{shape}{HEAD}-{type}" for shape in SHAPES if _has_head(shape) for type in _types(f"{shape}{HEAD}")]


def _has_head(shape_name: str) -> bool:
    """Whether there is a head for models of a shape."""
    s = SHAPES.get(shape_name)
    return s is not None and not s.n_expert and not s.layers and ARCHITECTURES[s.arch].causal and not ARCHITECTURES[s.arch].recurrent


def _shape_of(name: str) -> ModelShape | None:
    """The shape of a model or head; None: there is none of this name."""
    base = name.removesuffix(HEAD)
    if base == name or not _has_head(base):
        return SHAPES.get(name)
    s = SHAPES[base]
    return eagle3.head_shape(s, s.vocabulary or ARCHITECTURES[s.arch].vocabulary)


def planned_tensors(name: str, *, layers: int | None = None) -> list[PlannedTensor]:
    """The tensors of a model, in the order of the file. Raises SynthError for an unknown name or number of layers."""
    shape_name, type = _split(name)
    tensors = _tensors(_first_layers(name, _known_shape(shape_name), layers))
    mix = _type_mixes().get(shape_name, {}).get(type)
    chosen = _chosen(shape_name, type) if mix is None and not shape_name.startswith(TINY) else {}
    return [PlannedTensor(t, WHOLE if type == WHOLE else _type_of(mix, t, chosen), dims) for t, dims in tensors]


def synthetic_size(name: str, *, layers: int | None = None) -> tuple[int, int]:
    """(bytes of all tensors, values of all tensors) without writing anything: what llama-bench prints as size and params."""
    tensors = planned_tensors(name, layers=layers)
    return sum(t.nbytes for t in tensors), sum(t.elements for t in tensors)


def synthesize(
    name: str,
    out: Path,
    *,
    layers: int | None = None,
    seed: int = 0,
    on_bytes: Callable[[int], None] | None = None,
    threads: int | None = None,
) -> None:
    """Write the model called `name` to `out`. The same name, layers and seed give the same bytes on any number of threads.

    layers    keep only the first so many, for tests
    on_bytes  called with the size of every piece once it is written, from any thread

    The file appears under its name only when it is whole. Raises SynthError for an unknown name, where nothing can be written, and when
    the disk has no room.
    """
    tensors = planned_tensors(name, layers=layers)
    offsets, size = _lay_out(tensors)
    if why := unwritable(out):
        raise SynthError(f"[synth] {out}: {why}")
    free = shutil.disk_usage(out.parent).free
    if free < size + CHUNK_BYTES:
        raise SynthError(f"[synth] {out}: {name} takes {size / 2**30:.2f} GiB, {out.parent} has {free / 2**30:.2f} GiB free")
    with new_file_or(SynthError, f"[synth] {out}:", out, durable=True) as part:
        start = _write_header(part, name, tensors, layers, text=True)
        with part.open("r+b") as f:
            f.truncate(start + size)
            pieces = _Pieces(_known_shape(_split(name)[0]), tensors, [start + o for o in offsets], seed)
            _write_all(f.fileno(), pieces, on_bytes, threads or os.cpu_count() or 1)


def outline(name: str, *, layers: int | None = None) -> GgufFile:
    """The file of `synthesize` in memory, with zeros for weights, which take none: enough to plan the model. Raises SynthError for unknown
    names."""
    tensors = planned_tensors(name, layers=layers)
    with tempfile.TemporaryDirectory() as folder:  # GGUFWriter writes files only
        file = Path(folder) / f"{name}.gguf"
        start = _write_header(file, name, tensors, layers)
        head = file.read_bytes()
    return GgufFile.outline(Path(file.name), head, start + _lay_out(tensors)[1])


def write_outline(name: str, out: Path, *, layers: int | None = None) -> None:
    """The file of `synthesize` with a hole where the weights would be, and without vocabulary: enough to plan the model. Raises SynthError
    for an unknown name."""
    tensors = planned_tensors(name, layers=layers)
    start = _write_header(out, name, tensors, layers)
    with out.open("r+b") as f:
        f.truncate(start + _lay_out(tensors)[1])


@cache
def _type_mixes() -> dict[str, Any]:
    mixes: dict[str, Any] = json.loads(Path(__file__).with_name("type_mixes.json").read_text(encoding="utf-8"))
    return mixes


@cache
def _chosen(shape_name: str, type: str) -> dict[str, str]:
    """The type of every matrix as the rules of llama-quantize choose it; of none for WHOLE."""
    s = _known_shape(shape_name)
    if type == WHOLE:
        return {}
    tensors = _tensors(s)
    is_70b = s.arch in ARCHITECTURES and ARCHITECTURES[s.arch].sizes.get(s.n_layer) == "70B"
    counts = Counts.of(tensors, s.n_layer, s.n_expert, s.n_head // s.n_head_kv if s.n_head_kv else 1, is_70b)
    return choose_types(type, tensors, counts)


def _types(shape: str) -> list[str]:
    """Types that a shape can be written in: those of its mixes, or all that there are rules for, and WHOLE."""
    rules = (UNIFORM,) if shape.startswith(TINY) else SYNTHETIC
    return [*_type_mixes().get(shape, rules), WHOLE]


def _known_shape(name: str) -> ModelShape:
    """Of a name that `_split` gave."""
    found = _shape_of(name)
    assert found is not None
    return found


def _split(name: str) -> tuple[str, str]:
    shape, _, type = name.rpartition("-")
    if _shape_of(shape) is None or type not in _types(shape):
        types = dict.fromkeys(type for shape in SHAPES for type in _types(shape))
        if _shape_of(name) is not None:
            types_of = _types(name)
            said = f"[synth] {name} is a shape without a type; expected one behind it, as {name}-{types_of[0]}: {', '.join(types_of)}"
            raise UnknownShape(said)
        near = did_you_mean(name, [*synthetic_names(), *head_names()])
        raise UnknownShape(
            f"[synth] no model is called {name!r}.{near} Names are a shape, a dash and a type: of "
            f"{len(SHAPES)} shapes the nearest are {nearest(shape or name, SHAPES)} (docs/models.md has all), types are {', '.join(types)}"
        )
    return shape, type


def _first_layers(name: str, shape: ModelShape, layers: int | None) -> ModelShape:
    """The shape of a model's first so many layers."""
    if layers is None:
        return shape
    if not 1 <= layers <= shape.n_layer:
        raise UnknownShape(f"[synth] {name} has {shape.n_layer} layers, {layers} were asked for")
    metadata = dict(shape.metadata)
    for key, value in metadata.items():
        if isinstance(value, tuple) and len(value) == shape.n_layer:
            metadata[key] = value[:layers]
        elif key in OF_THE_LAST:
            metadata[key] = max(value - (shape.n_layer - layers), 0)
    return replace(shape, n_layer=layers, layers=shape.layers[:layers], metadata=metadata)


_latest: list[tuple[ModelShape, Sequence[tuple[str, tuple[int, ...]]]]] = []
"""The last shape that was asked for, and its tensors: lists of names have all types of a shape behind one another."""


def _tensors(s: ModelShape) -> Sequence[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors."""
    known = _latest[:]
    if not known or known[0][0] != s:
        known = [(s, tuple(_shapes(s)))]
        _latest[:] = known
    return known[0][1]


def _shapes(s: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors."""
    if s.arch == eagle3.ARCH:
        yield from eagle3.head_tensors(s)
        return
    if not s.tied:
        yield "output.weight", (s.n_vocab, s.n_embd)
    yield "token_embd.weight", (s.n_vocab, s.n_embd)
    if norm := ARCHITECTURES[s.arch].output_norm:
        yield f"{norm}.weight", (s.n_embd,)
    yield from ARCHITECTURES[s.arch].outer_tensors(s)
    for il in range(s.n_layer):
        for name, dims in ARCHITECTURES[s.arch].tensors_of_layer(s, il):
            yield f"blk.{il}.{name}", dims


def _type_of(mix: dict[str, dict[str, str]] | None, name: str, chosen: Mapping[str, str]) -> str:
    """The type of a tensor: norms, biases, sinks, frequencies, positions, token types, routers and the small tensors of recurrences are
    F32 in every file, the rest as the mix says, else as the rules of llama-quantize chose, else UNIFORM."""
    if name == eagle3.IDS:
        return "I64"
    block, _, stem = name.removesuffix(".weight").rpartition(".")
    if "norm" in stem or stem in FLOATS or stem.startswith("rope_") or name.endswith((".bias", ".scale")):
        return "F32"
    if stem in KEPT:
        return "F16"
    if mix is None:
        return chosen.get(name, UNIFORM)
    layer = int(block.split(".")[1]) if block else None
    for type, where in mix[f"{stem}.weight"].items():
        if layer is None or where == "all" or layer in _ranges(where):
            return type
    raise SynthError(f"[synth] type_mixes.json has no type for {name}")


@cache
def _ranges(text: str) -> frozenset[int]:
    """ "0-3,6" -> {0, 1, 2, 3, 6}."""
    out: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        out.update(range(int(first), int(last or first) + 1))
    return frozenset(out)


def _lay_out(tensors: list[PlannedTensor]) -> tuple[list[int], int]:
    """Offsets from the start of the data, each aligned, and the size of the data."""
    offsets, at = [], 0
    for t in tensors:
        offsets.append(at)
        at += -(-t.nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    return offsets, at


def _write_header(path: Path, name: str, tensors: list[PlannedTensor], layers: int | None, *, text: bool = False) -> int:
    """Metadata, with a vocabulary where `text`, and tensor table; returns where the data begins."""
    shape_name, type = _split(name)
    s = _first_layers(name, _known_shape(shape_name), layers)
    known_arch = ARCHITECTURES.get(s.arch)
    writer = GGUFWriter(path, s.arch)
    writer.add_name(f"{name} with random weights")
    if (known := file_type(type)) is not None:
        writer.add_file_type(known)
    writer.add_quantization_version(2)
    writer.add_context_length(s.n_ctx)
    writer.add_embedding_length(s.n_embd)
    writer.add_block_count(s.n_layer)
    # Layers that differ give lists, as files of such models have them.
    writer.add_feed_forward_length(_alike([layer.n_ff for layer in s.layers], s.n_ff))
    writer.add_head_count(_alike([layer.n_head for layer in s.layers], s.n_head))
    if s.attention is None:
        writer.add_head_count_kv(_alike([layer.n_head_kv for layer in s.layers], s.n_head_kv))
    else:
        writer.add_head_count_kv([s.n_head_kv if il in s.attention else 0 for il in range(s.n_layer)])
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_rope_dimension_count(s.n_rot)
    writer.add_rope_freq_base(s.freq_base)
    if s.window:
        writer.add_sliding_window(s.window)
    if s.yarn != 1.0:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(s.yarn)
        writer.add_rope_scaling_orig_ctx_len(4096)
    _add_value(writer, f"{s.arch}.{known_arch.norm_eps if known_arch is not None else RMS_EPS}", s.rms_eps)
    writer.add_vocab_size(s.n_vocab)
    if s.n_expert:
        writer.add_expert_count(s.n_expert)
        writer.add_expert_used_count(s.n_expert_used)
        writer.add_expert_feed_forward_length(s.n_ff_expert)
    for key, value in s.metadata.items():
        # The shape's own metadata wins over what was written above.
        writer.kv_data[0].pop(f"{s.arch}.{key}", None)
        _add_value(writer, f"{s.arch}.{key}", value)
    if text:
        add_vocabulary(writer, s.vocabulary or (known_arch.vocabulary if known_arch is not None else ""), s.n_vocab)
    else:
        writer.add_tokenizer_model(NO_TEXT_VOCABULARY)
    for t in tensors:
        writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.nbytes, GGMLQuantizationType[t.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return -(-path.stat().st_size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _alike(values: list[int], default: int) -> list[int] | int:
    """A value for each layer, or the one that all have."""
    return values if len(set(values)) > 1 else next(iter(values), default)


def _add_value(writer: GGUFWriter, key: str, value: int | float | str | tuple[Any, ...]) -> None:
    if isinstance(value, tuple):
        writer.add_array(key, list(value))
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


@dataclass(frozen=True)
class _Pieces:
    """The file's data in pieces of whole rows. Each has a random generator of its own, so that their order does not matter."""

    shape: ModelShape
    tensors: list[PlannedTensor]
    offsets: list[int]
    seed: int

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """(index of the tensor, first row, rows) of every piece."""
        for index, t in enumerate(self.tensors):
            rows = math.prod(t.shape[:-1])
            step = max(1, CHUNK_BYTES // (t.nbytes // rows))
            for row0 in range(0, rows, step):
                yield index, row0, min(step, rows - row0)

    def make(self, index: int, row0: int, rows: int) -> tuple[int, npt.NDArray[np.uint8]]:
        """(offset in the file, bytes) of a piece. Weights keep the energy of what they multiply: logits stay finite at any depth."""
        t = self.tensors[index]
        k = t.shape[-1]
        rng = np.random.default_rng([self.seed, index, row0])
        if t.name == eagle3.IDS:
            data = np.sort(rng.choice(self.shape.n_vocab, k, replace=False)).astype(np.int64).view(np.uint8)
        elif t.name == "rope_freqs.weight":
            data = rope_divisors(self.shape).view(np.uint8)
        elif t.name.endswith("ssm_dt.bias"):
            step = np.exp(rng.uniform(math.log(1e-3), math.log(0.3), k))
            data = np.log(np.expm1(step)).astype(np.float32).view(np.uint8)
        elif t.name.endswith((".bias", "attn_sinks.weight")):
            data = (0.1 * rng.standard_normal((rows, k), np.float32)).view(np.uint8)
        elif t.name.endswith("ffn_gate_inp.scale"):  # what it is divided by, so that the router tells experts apart
            data = (math.sqrt(k) * (1.0 + 0.1 * rng.standard_normal(k, np.float32))).astype(np.float32).view(np.uint8)
        elif t.name.endswith("ssm_a"):
            data = -np.exp(rng.uniform(0.0, math.log(16.0), rows * k)).astype(np.float32).view(np.uint8)
        elif t.name.endswith("ffn_gate_inp_shexp.weight"):  # a row of a matrix, though it has one axis
            data = (rng.standard_normal(k, np.float32) / np.float32(math.sqrt(k))).view(np.uint8)
        elif len(t.shape) == 1 or t.name.endswith(("norm.weight", "ssm_d")):
            data = (1.0 + 0.1 * rng.standard_normal(rows * k, np.float32)).view(np.uint8)
        else:
            data = quants.random_blocks(t.type, rows, k, rng, std=1.0 / math.sqrt(k))
        return self.offsets[index] + row0 * (data.size // rows), data.reshape(-1)


def rope_divisors(s: ModelShape) -> npt.NDArray[np.float32]:
    """Llama 3's frequency divisors [head_dim/2]: pairs that turn fewer than once in 8192 positions are slowed by rope_stretch, those that
    turn more than four times are left alone. With rope_rotated the others are not rotated."""
    if s.rope_rotated:
        return np.where(np.arange(s.n_rot // 2) < s.rope_rotated, 1.0, 1e30).astype(np.float32)
    turns = 8192 * s.freq_base ** (-2.0 * np.arange(s.head_dim // 2) / s.head_dim) / (2 * np.pi)
    keep = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
    return (1.0 / (keep + (1.0 - keep) / s.rope_stretch)).astype(np.float32)


def _placed_writes(fd: int) -> Callable[[memoryview, int], int]:
    """Writes bytes at a place of a file, from any thread, and returns how many. Windows has no call that does both at once."""
    if hasattr(os, "pwrite"):
        return lambda data, at: os.pwrite(fd, data, at)
    lock = threading.Lock()

    def write(data: memoryview, at: int) -> int:
        with lock:
            os.lseek(fd, at, os.SEEK_SET)
            return os.write(fd, data)

    return write


def _write_all(fd: int, pieces: _Pieces, on_bytes: Callable[[int], None] | None, threads: int) -> None:
    """Make and write all pieces. The first failure stops the rest and is raised."""
    failed, write = threading.Event(), _placed_writes(fd)

    def fill(piece: tuple[int, int, int]) -> None:
        if failed.is_set():
            return
        try:
            at, data = pieces.make(*piece)
            done = 0
            while done < data.size:
                done += write(data[done:].data, at + done)
        except BaseException:
            failed.set()
            raise
        if on_bytes is not None:
            on_bytes(data.size)

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(fill, pieces.ranges()):
            pass
