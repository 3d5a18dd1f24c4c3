#!/usr/bin/env python3
"""Fuzz test of model files: damaged GGUF files must open, or be refused with one line that names the file and what is wrong with it.

    tools/fuzz_gguf.py [--count 10000] [--seed 0]   damage so many files; exit code 1 when one crashes, hangs or raises anything else
    tools/fuzz_gguf.py --only I [--keep FILE]       only number I, with its traceback; the damaged file is written to FILE

The files are the tiny models of `vkback synth`, of every architecture, and the built-in models, which have a vocabulary. Number I of a seed
is always the same file: one to three mutations of header, metadata or tensor table, some of values and some of bytes. Each goes the way of
a load up to the plan: tables, hyperparameters, tensors, vocabulary, graph, plan for a device. Weights are a hole in the file, for nothing
on that way reads them. Worker processes do it, with a limit of time for each file and of memory beyond what the process had before.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import multiprocessing
import os
import re
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

if sys.platform != "win32":
    import resource

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vkback.device import Capabilities  # noqa: E402
from vkback.engine.sampler import add_sampler  # noqa: E402
from vkback.errors import VkbackError  # noqa: E402
from vkback.models import ARCHITECTURES, Model  # noqa: E402
from vkback.models.synth import SHAPES, write_outline  # noqa: E402
from vkback.ops.lowering import LowerContext, PlanError  # noqa: E402
from vkback.paths import builtin_models  # noqa: E402
from vkback.plan.planner import plan  # noqa: E402
from vkback.tuning.lookup import Tuning  # noqa: E402

LIMIT_S = 10.0
"""Of one file: a hundred times what a sound one takes."""
LIMIT_BYTES = 256 << 20
"""Address space that one file may take beyond what the process had; the largest file and its plan take a tenth."""
LONGEST_ERROR = 1200
"""Characters. The list of all tensor types has 600; more is the file's text, not ours."""
PROFILES = ("nvidia_h200_linux", "llvmpipe_mesa_22_debian12", "amd_rx_7900_xtx_radv", "intel_hd_620_anv")
LARGEST = 64 << 20
"""Bytes of the weights that mutations make."""
PROMPT = 32
"""Tokens of the second plan."""

Rng = np.random.Generator
T = TypeVar("T")

# -- files as tables

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ALIGNMENT = 32


@dataclass(frozen=True)
class Key:
    """A metadata key: its name, value type and the bytes of the value."""

    name: bytes
    type: int
    value: bytes


@dataclass(frozen=True)
class Info:
    """A tensor info, dimensions in the file's order."""

    name: bytes
    dims: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class Tables:
    """All that a file holds but its weights, of which only the size is known."""

    source: str
    keys: tuple[Key, ...]
    infos: tuple[Info, ...]
    data_bytes: int
    version: int = 3

    @classmethod
    def read(cls, path: Path) -> Tables:
        """Of a sound file."""
        data, at = path.read_bytes(), 24
        version, n_infos, n_keys = struct.unpack_from("<IQQ", data, 4)

        def take(form: str) -> tuple[Any, ...]:
            nonlocal at
            at += struct.calcsize("<" + form)
            return struct.unpack_from("<" + form, data, at - struct.calcsize("<" + form))

        def string() -> bytes:
            return bytes(take(f"{take('Q')[0]}s")[0])

        def skip(type: int) -> None:
            if type == STRING:
                string()
            elif type == ARRAY:
                kind, n = take("IQ")
                for _ in range(n):
                    skip(kind)
            else:
                take(SCALARS[type])

        keys, infos = [], []
        for _ in range(n_keys):
            name, (type,) = string(), take("I")
            begin = at
            skip(type)
            keys.append(Key(name, type, data[begin:at]))
        for _ in range(n_infos):
            name, (n_dims,) = string(), take("I")
            infos.append(Info(name, take(f"{n_dims}Q"), *take("IQ")))
        return cls(path.name, tuple(keys), tuple(infos), len(data) - -(-at // ALIGNMENT) * ALIGNMENT, version)

    def encode(self) -> Encoded:
        out = Encoded(self.data_bytes)
        out.add("magic", b"GGUF").add("version", struct.pack("<I", self.version))
        out.add("count", struct.pack("<Q", len(self.infos))).add("count", struct.pack("<Q", len(self.keys)))
        for key in self.keys:
            out.add("length", struct.pack("<Q", len(key.name))).add("name", key.name).add("type", struct.pack("<I", key.type))
            if key.type == STRING:
                out.add("length", key.value[:8]).add("text", key.value[8:])
            elif key.type == ARRAY:
                out.add("type", key.value[:4]).add("length", key.value[4:12]).add("elements", key.value[12:])
            else:
                out.add("value", key.value)
        for info in self.infos:
            out.add("length", struct.pack("<Q", len(info.name))).add("name", info.name).add("n_dims", struct.pack("<I", len(info.dims)))
            for dim in info.dims:
                out.add("dim", struct.pack("<Q", dim % 2**64))
            out.add("type", struct.pack("<I", info.type % 2**32)).add("offset", struct.pack("<Q", info.offset % 2**64))
        return out


@dataclass
class Encoded:
    """Bytes up to the weights, with the place of every field, and how many bytes of zeros follow, once padded."""

    data_bytes: int
    head: bytearray = field(default_factory=bytearray)
    fields: list[tuple[str, int, int]] = field(default_factory=list)
    cut: int | None = None

    def add(self, kind: str, data: bytes) -> Encoded:
        self.fields.append((kind, len(self.head), len(self.head) + len(data)))
        self.head += data
        return self

    def write(self, path: Path) -> None:
        path.write_bytes(self.head)
        size = -(-len(self.head) // ALIGNMENT) * ALIGNMENT + self.data_bytes
        os.truncate(path, size if self.cut is None else min(self.cut, size))


# -- mutations of tables

INTEGERS = (0, 1, 2, 3, 5, 31, 255, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, -1.0, 1e-45, 1e-30, 1e-8, 1.0, 1e8, 1e30, 3.4e38, math.inf, -math.inf, math.nan, 1e-300, 1e300)
TEXTS = (b"", b"\0", b"a\nb", b"\xff\xfe", b"yarn", b"longrope", b"none", b"no_vocab", b"gpt2", b"llama", b"[r]", b"x" * 70000)


def pick(rng: Rng, of: Sequence[T]) -> T:
    return of[int(rng.integers(len(of)))]


def scalar(rng: Rng, type: int, near: int = 1) -> bytes:
    """A value that somebody may stumble over, or one near another, of a type that has any."""
    form = SCALARS[type]
    if form in "fd":
        value = pick(rng, FLOATS)
        return struct.pack("<" + form, value if form == "d" or not abs(value) > 3.4e38 else math.copysign(math.inf, value))
    value, size = int(pick(rng, (*INTEGERS, near + 1, near - 1, 2 * near, near // 2, -near))), struct.calcsize("<" + form)
    return (value % (1 << 8 * size)).to_bytes(size, "little")


def value(rng: Rng, type: int, near: int = 1, depth: int = 0) -> bytes:
    """The bytes of a value of any type."""
    if type == STRING:
        text = pick(rng, (*TEXTS, *(name.encode() for name in ARCHITECTURES)))
        return struct.pack("<Q", len(text)) + text
    if type != ARRAY:
        return scalar(rng, type, near)
    inner = int(pick(rng, (*SCALARS, STRING, ARRAY) if depth < 5 else (4,)))
    n = int(pick(rng, (0, 1, 2, 3, 4, 5, 8, 300)))
    if inner == ARRAY:
        n = min(n, 2)
    same = value(rng, inner, near, depth + 1)
    parts = [same if rng.random() < 0.7 else value(rng, inner, near, depth + 1) for _ in range(n)]
    return struct.pack("<IQ", inner, n) + b"".join(parts)


def number(key: Key) -> int:
    """An integer's value, else 1."""
    return int(struct.unpack("<" + SCALARS[key.type], key.value)[0]) if SCALARS.get(key.type, "f") not in "fd" else 1


def change(t: Tables, i: int, **what: Any) -> Tables:
    return replace(t, keys=(*t.keys[:i], replace(t.keys[i], **what), *t.keys[i + 1 :]))


def retable(t: Tables, i: int, **what: Any) -> Tables:
    return replace(t, infos=(*t.infos[:i], replace(t.infos[i], **what), *t.infos[i + 1 :]))


def placed(t: Tables, infos: Sequence[Info]) -> Tables:
    """The file with other tensors, one behind the other, with room for any type; as it was where they would make it large."""
    offsets = [0, *accumulate(-(-4 * math.prod(info.dims) // ALIGNMENT) * ALIGNMENT for info in infos)]
    if offsets[-1] > LARGEST:
        return t
    return replace(t, infos=tuple(replace(info, offset=at) for info, at in zip(infos, offsets, strict=False)), data_bytes=offsets[-1])


def value_of_a_key(rng: Rng, t: Tables) -> Tables:
    i = int(rng.integers(len(t.keys)))
    key = t.keys[i]
    return change(t, i, value=value(rng, key.type, number(key)))


def type_of_a_key(rng: Rng, t: Tables) -> Tables:
    i, type = int(rng.integers(len(t.keys))), int(pick(rng, (*SCALARS, STRING, ARRAY)))
    return change(t, i, type=type, value=value(rng, type, number(t.keys[i])))


def array_for_a_key(rng: Rng, t: Tables) -> Tables:
    """One value for each layer, as some files have it, with one that differs."""
    i, layers = int(rng.integers(len(t.keys))), len({name.split(b".")[1] for name in (x.name for x in t.infos) if name.startswith(b"blk.")})
    type = int(pick(rng, tuple(SCALARS)))
    parts = [scalar(rng, type, number(t.keys[i]))] * layers
    if rng.random() < 0.5:
        parts[-1] = scalar(rng, type)
    return change(t, i, type=ARRAY, value=struct.pack("<IQ", type, layers) + b"".join(parts))


def key_left_out(rng: Rng, t: Tables) -> Tables:
    i = int(rng.integers(len(t.keys)))
    return replace(t, keys=t.keys[:i] + t.keys[i + 1 :])


def key_twice(rng: Rng, t: Tables) -> Tables:
    return replace(t, keys=(*t.keys, pick(rng, t.keys)))


def name_of_a_key(rng: Rng, t: Tables) -> Tables:
    return change(t, int(rng.integers(len(t.keys))), name=pick(rng, (pick(rng, t.keys).name, *TEXTS)))


KEYS = (
    "attention.layer_indices",
    "attention.scale",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "embedding_scale",
    "expert_count",
    "expert_gating_func",
    "expert_group_count",
    "expert_group_used_count",
    "expert_shared_count",
    "expert_used_count",
    "expert_weights_norm",
    "expert_weights_scale",
    "logit_scale",
    "residual_scale",
    "rope.dimension_count",
    "rope.freq_base_swa",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_log_multiplier",
    "ssm.group_count",
    "vocab_size",
)
"""Keys that few files have."""


def key_put_in(rng: Rng, t: Tables) -> Tables:
    type = int(pick(rng, (*SCALARS, STRING, ARRAY)))
    arch = t.keys[0].value[8:]
    name = pick(rng, (*(arch + b"." + k.encode() for k in KEYS), b"general.alignment", b"tokenizer.ggml.model", b"tokenizer.ggml.tokens"))
    return replace(t, keys=(*(k for k in t.keys if k.name != name), Key(name, type, value(rng, type))))


def tensor_left_out(rng: Rng, t: Tables) -> Tables:
    i = int(rng.integers(len(t.infos)))
    return replace(t, infos=t.infos[:i] + t.infos[i + 1 :])


def tensor_twice(rng: Rng, t: Tables) -> Tables:
    return replace(t, infos=(*t.infos, pick(rng, t.infos)))


def tensor_put_in(rng: Rng, t: Tables) -> Tables:
    """One behind the others."""
    like = pick(rng, t.infos)
    name = pick(rng, (b"blk.0.attn_q.bias", b"blk.1.attn_sinks.weight", b"output.bias", b"rope_freqs.weight", *TEXTS))
    return placed(t, [*t.infos, replace(like, name=name)])


def name_of_a_tensor(rng: Rng, t: Tables) -> Tables:
    return retable(t, int(rng.integers(len(t.infos))), name=pick(rng, (pick(rng, t.infos).name, *TEXTS)))


def dimension(rng: Rng, t: Tables) -> Tables:
    i = int(rng.integers(len(t.infos)))
    dims = list(t.infos[i].dims) or [1]
    at = int(rng.integers(len(dims)))
    dims[at] = int.from_bytes(scalar(rng, 10, dims[at]), "little")
    return retable(t, i, dims=tuple(dims))


def shape(rng: Rng, t: Tables) -> Tables:
    """As many values, arranged otherwise, or another tensor's shape."""
    i = int(rng.integers(len(t.infos)))
    dims = t.infos[i].dims
    others = (dims[::-1], (math.prod(dims),), (*dims, 1), (1, *dims), (*dims, 1, 1), pick(rng, t.infos).dims, ())
    return retable(t, i, dims=pick(rng, others))


def type_of_a_tensor(rng: Rng, t: Tables) -> Tables:
    return retable(t, int(rng.integers(len(t.infos))), type=int(pick(rng, (*range(42), 77, 2**31, 2**32 - 1))))


def type_of_all_tensors(rng: Rng, t: Tables) -> Tables:
    """All of one type get another that fits, with room for it."""
    old, new = pick(rng, t.infos).type, int(rng.integers(42))
    return placed(t, [replace(info, type=new if info.type == old else info.type) for info in t.infos])


def size_everywhere(rng: Rng, t: Tables) -> Tables:
    """An integer of the metadata and every dimension that equals it become another: what is left is consistent, and may be of any size."""
    counts = [i for i, key in enumerate(t.keys) if key.type == 4 and 1 < number(key) <= 4096]
    if not counts:
        return t
    i = pick(rng, counts)
    old = number(t.keys[i])
    new = int(pick(rng, (1, 2, 3, 7, 32, 33, 64, 255, 256, 288, 1000, old + 1, 2 * old, 3 * old, old + 32)))
    infos = [replace(info, dims=tuple(new if dim == old else dim for dim in info.dims)) for info in t.infos]
    return placed(change(t, i, value=struct.pack("<I", new)), infos)


def offset(rng: Rng, t: Tables) -> Tables:
    i = int(rng.integers(len(t.infos)))
    near = pick(rng, (t.infos[i].offset, pick(rng, t.infos).offset, t.data_bytes))
    return retable(t, i, offset=int(pick(rng, (near, near + ALIGNMENT, near - ALIGNMENT, near + 1, *INTEGERS))))


def tensors_in_another_order(rng: Rng, t: Tables) -> Tables:
    return replace(t, infos=tuple(t.infos[i] for i in rng.permutation(len(t.infos))))


TABLE_MUTATIONS: tuple[Callable[[Rng, Tables], Tables], ...] = (
    value_of_a_key,
    value_of_a_key,
    value_of_a_key,
    type_of_a_key,
    array_for_a_key,
    key_left_out,
    key_twice,
    name_of_a_key,
    key_put_in,
    key_put_in,
    tensor_left_out,
    tensor_twice,
    tensor_put_in,
    name_of_a_tensor,
    dimension,
    dimension,
    shape,
    type_of_a_tensor,
    type_of_all_tensors,
    size_everywhere,
    size_everywhere,
    size_everywhere,
    offset,
    tensors_in_another_order,
)

# -- mutations of bytes


def region(rng: Rng, e: Encoded) -> tuple[int, int]:
    """Bytes of the head to damage: its first kilobyte, its last four, or all. A vocabulary between them would take all the damage."""
    n = len(e.head)
    return pick(rng, ((0, min(n, 1024)), (max(0, n - 4096), n), (0, n)))


def bits(rng: Rng, e: Encoded) -> None:
    for at in rng.integers(*region(rng, e), int(rng.integers(1, 5))):
        e.head[at] ^= 1 << int(rng.integers(8))


def some_bytes(rng: Rng, e: Encoded) -> None:
    begin = int(rng.integers(*region(rng, e)))
    n = min(int(rng.integers(1, 9)), len(e.head) - begin)
    e.head[begin : begin + n] = pick(rng, (rng.bytes(n), bytes(n), b"\xff" * n))


def bytes_left_out(rng: Rng, e: Encoded) -> None:
    begin = int(rng.integers(*region(rng, e)))
    del e.head[begin : begin + int(rng.integers(1, 65))]


def bytes_put_in(rng: Rng, e: Encoded) -> None:
    begin = int(rng.integers(*region(rng, e)))
    e.head[begin:begin] = rng.bytes(int(rng.integers(1, 65)))


def one_field(rng: Rng, e: Encoded) -> None:
    """A length, count, type, number of dimensions, dimension or offset."""
    numbers = [f for f in e.fields if f[0] in ("version", "count", "length", "type", "n_dims", "dim", "offset", "value")]
    kind = pick(rng, sorted({f[0] for f in numbers}))
    _, begin, end = pick(rng, [f for f in numbers if f[0] == kind])
    near, size = int.from_bytes(e.head[begin:end], "little"), end - begin
    e.head[begin:end] = (int(pick(rng, (*INTEGERS, near + 1, near - 1, near * 2, near << 8))) % 2 ** (8 * size)).to_bytes(size, "little")


def truncation(rng: Rng, e: Encoded) -> None:
    n = len(e.head)
    e.cut = int(rng.integers(*pick(rng, ((0, 64), (0, n), (max(0, n - 200), n + ALIGNMENT), (n, n + 1 + e.data_bytes)))))


BYTE_MUTATIONS: tuple[Callable[[Rng, Encoded], None], ...] = (
    bits,
    bits,
    some_bytes,
    bytes_left_out,
    bytes_put_in,
    one_field,
    one_field,
    one_field,
    truncation,
)


@dataclass(frozen=True)
class Damaged:
    """A damaged file: which it was, what was done to it, and how to write it."""

    source: str
    mutations: tuple[str, ...]
    encoded: Encoded


def damaged(files: Sequence[Tables], seed: int, number: int) -> Damaged:
    """File `number` of a seed."""
    rng = np.random.default_rng([seed, number])
    tables, done = files[number % len(files)], []
    times = int(pick(rng, (1, 1, 2, 3)))
    of_tables = int(rng.integers(times + 1)) if times > 1 else int(rng.random() < 0.6)
    for _ in range(of_tables):
        mutation = pick(rng, TABLE_MUTATIONS)
        if tables.keys and tables.infos:
            tables = mutation(rng, tables)
            done.append(mutation.__name__)
    encoded = tables.encode()
    for _ in range(times - of_tables):
        harm = pick(rng, BYTE_MUTATIONS)
        harm(rng, encoded)
        encoded.fields = encoded.fields if harm in (bits, some_bytes, one_field, truncation) else encoded.fields[:4]
        done.append(harm.__name__)
    return Damaged(tables.source, tuple(done), encoded)


def sources(folder: Path) -> list[Tables]:
    """Tables of the tiny models, which are written into `folder`, and of the built-in ones."""
    paths = list(builtin_models())
    for name in SHAPES:
        if name.startswith("tiny-"):
            paths.append(folder / f"{name}.gguf")
            write_outline(f"{name}-Q8_0", paths[-1])
    return [Tables.read(path) for path in paths]


# -- judging


class Defect(Exception):  # noqa: N818  what the report calls it
    """An error of the wrong form."""


@cache
def context(profile: str) -> LowerContext:
    caps = Capabilities.from_profile(profile)
    return LowerContext(caps, Tuning.for_device(caps))


def load(path: Path, profile: str) -> None:
    """What a load does up to the plan, as the device of a profile plans. Raises VkbackError."""
    model = Model.open(path)
    n_ctx = model.default_n_ctx
    if model.has_text:
        model.tokenizer.decode(model.tokenizer.encode("It was a dark night\n", parse_special=True))
    assert model.description
    token = model.graph(1, n_ctx, head="last")
    add_sampler(token, greedy=False)
    plan(token, context(profile))
    plan(model.graph(min(PROMPT, n_ctx), n_ctx, head="none"), context(profile))


def judge(path: Path, number: int) -> str:
    """ "" where the file loads, else why it is refused, without the file's name. Raises Defect where that says too little."""
    try:
        load(path, PROFILES[number % len(PROFILES)])
    except VkbackError as e:
        text = str(e)
        if not text.isprintable() or len(text) > LONGEST_ERROR:
            raise Defect(f"not one line of at most {LONGEST_ERROR} characters: {text[:300]!r}") from e
        if not isinstance(e, PlanError) and str(path) not in text:
            raise Defect(f"does not name the file: {text}") from e
        return text.replace(str(path), "FILE")
    return ""


# -- worker processes


@dataclass(frozen=True)
class Result:
    """What came of one file. `refusal` as of `judge`; `defect`: what was wrong, empty where nothing was."""

    number: int
    mutations: tuple[str, ...]
    refusal: str = ""
    defect: str = ""


@dataclass(frozen=True)
class Limits:
    seconds: float = LIMIT_S
    nbytes: int = LIMIT_BYTES


Judge = Callable[[Path, int], str]


def limit_memory(more: int | None) -> None:
    """Let this process take so many bytes beside what it has, or as many as it likes. Only Linux counts them."""
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        has = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (hard if more is None else has + more, hard))


def work(files: Sequence[Tables], seed: int, numbers: Sequence[int], judge: Judge, limits: Limits, folder: Path, out: Connection) -> None:
    """In a worker process: a Result for each number, and the number before it begins, so that a crash has one."""
    crash = (folder / f"crash-{os.getpid()}.txt").open("w")
    faulthandler.enable(crash)
    path = folder / f"damaged-{os.getpid()}.gguf"
    for number in numbers:
        out.send(number)
        made = damaged(files, seed, number)
        made.encoded.write(path)
        limit_memory(limits.nbytes + path.stat().st_size)
        faulthandler.dump_traceback_later(limits.seconds, exit=True, file=crash)
        refusal = defect = ""
        try:
            refusal = judge(path, number)
        except BaseException as e:
            limit_memory(None)
            where = "".join(traceback.format_exception(e)[-3:])
            defect = f"more than {limits.nbytes >> 20} MiB of memory: {where}" if isinstance(e, MemoryError) else where
        faulthandler.cancel_dump_traceback_later()
        limit_memory(None)
        out.send(Result(number, made.mutations, refusal, defect))
    out.send(None)


def fuzz(
    files: Sequence[Tables], seed: int, numbers: Sequence[int], *, processes: int = 1, judge: Judge = judge, limits: Limits = Limits()
) -> Iterator[Result]:
    """Results in no order."""
    forking = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="vkback-fuzz-") as folder:
        running: dict[Connection, tuple[Any, list[int]]] = {}

        def start(todo: list[int]) -> None:
            here, there = forking.Pipe(duplex=False)
            process = forking.Process(target=work, args=(files, seed, todo, judge, limits, Path(folder), there))
            process.start()
            there.close()
            running[here] = process, todo

        for part in range(processes):
            start(list(numbers[part::processes]))
        current: dict[Connection, int] = {}
        try:
            while running:
                for end in wait(list(running)):
                    assert isinstance(end, Connection)
                    process, todo = running[end]
                    try:
                        said = end.recv()
                    except EOFError:
                        process.join()
                        number = current[end]
                        trace = (Path(folder) / f"crash-{process.pid}.txt").read_text(encoding="utf-8")
                        ended = f"the process ended, exit code {process.exitcode}"
                        what = f"more than {limits.seconds:g} s" if trace.startswith("Timeout") else ended
                        yield Result(number, damaged(files, seed, number).mutations, defect=f"{what}:\n{trace}")
                        start(todo[todo.index(number) + 1 :])
                        said = None
                    if isinstance(said, int):
                        current[end] = said
                    elif said is not None:
                        yield said
                    else:
                        process.join()
                        del running[end]
                        end.close()
        finally:
            for process, _ in running.values():
                process.kill()


# -- the command


def kind(refusal: str) -> str:
    """A refusal without what is the file's: names and numbers."""
    text = re.sub(r"FILE: ", "", refusal)
    text = re.sub(r'"(?:[^"\\]|\\.)*"', "_", text)
    text = re.sub(r"'(?:[^'\\]|\\.)*'|\b[\w-]+\.[\w.-]+\b|\[[\d, ]+\]|b\"[^\"]*\"", "_", text)
    return re.sub(r"-?\d+", "0", text)[:70]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10000, help="damaged files (default 10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, help="processes, default one a core")
    parser.add_argument("--only", type=int, metavar="I", help="only this number, in this process")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="with --only: where to write the damaged file")
    parser.add_argument("-v", "--verbose", action="store_true", help="show how often each kind of refusal came")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        files = sources(Path(folder))
        if args.only is not None:
            return one(damaged(files, args.seed, args.only), args.only, args.keep or Path(folder) / "damaged.gguf")
        begin = time.monotonic()
        by_mutation: dict[str, Counter[str]] = {}
        kinds: dict[str, list[int]] = {}
        defects = []
        for r in fuzz(files, args.seed, range(args.count), processes=min(args.j, args.count)):
            fate = "defects" if r.defect else "refused" if r.refusal else "sound"
            for name in {*r.mutations, "total"}:
                by_mutation.setdefault(name, Counter())[fate] += 1
            if r.refusal:
                kinds.setdefault(kind(r.refusal), []).append(r.number)
            if r.defect:
                defects.append(r.number)
                source = files[r.number % len(files)].source
                print(f"--- number {r.number}, {source}: {', '.join(r.mutations)}\n{r.defect}", flush=True)
        columns = ("sound", "refused", "defects")
        print(f"{'mutation':26}" + "".join(f"{c:>9}" for c in columns))
        for name, counts in sorted(by_mutation.items(), key=lambda item: (item[0] == "total", item[0])):
            print(f"{name:26}" + "".join(f"{counts[c]:9}" for c in columns))
        if args.verbose:
            print(f"{'times':>6} {'as':>6}  refusal")
            print("\n".join(f"{len(n):6} {min(n):6}  {text}" for text, n in sorted(kinds.items(), key=lambda item: -len(item[1]))))
        took = f"{len(kinds)} kinds of refusal; {time.monotonic() - begin:.0f} s"
        print(f"{args.count} damaged copies of {len(files)} files, seed {args.seed}: {len(defects)} defects, {took}")
    return int(bool(defects))


def one(made: Damaged, number: int, path: Path) -> int:
    """One file in this process, without limits."""
    made.encoded.write(path)
    print(f"{path}, from {made.source}: {', '.join(made.mutations)}")
    print(judge(path, number) or "loads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
