"""Weights repacked on the device: bit for bit what the host makes of them, in pieces of any size; and what goes wrong on the way."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from device_kit import lose
from kernel_paths import with_pairs
from rich.console import Console

from vkback import quants
from vkback.api.model import _compile_ahead
from vkback.device import Capabilities, Device, DeviceLost, OutOfDeviceMemory
from vkback.engine import weight_stream
from vkback.engine import weights as weights_module
from vkback.engine.engine import Engine
from vkback.engine.sampler import Sampler
from vkback.engine.weights import Repack, WeightLoad, load_weights, repacks
from vkback.events import Reported
from vkback.gguf.file import SplitFile
from vkback.graph import Recipe, Tensor
from vkback.models import GgufError, GgufFile, GgufTensor, Model
from vkback.models.synth import synthesize
from vkback.ops.lowering import LowerContext
from vkback.ops.storage import shards
from vkback.paths import builtin_model
from vkback.quants.registry import codec
from vkback.quants.word_moves import word_moves
from vkback.report.bars import Bars
from vkback.shader import ShaderLibrary

Bytes = npt.NDArray[np.uint8]

K = {"F32": (32, 33, 5), "F16": (96, 37), "BF16": (64, 31)}
"""Columns; of other types one block and three."""

KINDS = (("plain", 1), ("concat", 3), ("interleave", 2))


def columns(type: str) -> Sequence[int]:
    block = max(quants.quant(type).block_values, 32)
    return K.get(type, (block, 3 * block))


def file_of(tensors: dict[str, tuple[str, tuple[int, ...], Bytes]], path: Path) -> GgufFile:
    """A file of tensors, mapped as one that was opened is."""
    data = np.concatenate([raw.reshape(-1) for _, _, raw in tensors.values()])
    path.write_bytes(data.tobytes())
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    found: dict[str, GgufTensor] = {}
    at = 0
    for name, (type, shape, raw) in tensors.items():
        found[name] = GgufTensor(name, type, shape, at, raw.nbytes, mapped)
        at += raw.nbytes
    stat = path.stat()
    return GgufFile(path, 3, 1, {}, found, (SplitFile(path, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns), mapped),))


def weight_of(how: Any, count: int, type: str, rows: int, k: int, path: Path) -> tuple[GgufFile, Tensor]:
    rng = np.random.default_rng(rows * k)
    lengths = [rows + (i if how == "concat" else 0) for i in range(count)]
    tensors: dict[str, tuple[str, tuple[int, ...], Bytes]] = {
        f"t{i}": (type, (n, k), quants.random_blocks(type, n, k, rng)) for i, n in enumerate(lengths)
    }
    return file_of(tensors, path), Tensor("w", type, (sum(lengths), k), "weight", Recipe(how, tuple(tensors)))


def planes_on(device: Device, library: ShaderLibrary, file: GgufFile, weight: Tensor, repack: Repack) -> list[Bytes]:
    loaded = load_weights(file, {weight.name: weight}, device, library, progress=False, repack=repack)
    with loaded.arena:
        found = []
        for shard, where in zip(shards(weight, device.caps), loaded.ranges[weight.name].shards, strict=True):
            raw = device.download(where)
            found += [raw[p.offset : p.offset + shard.rows * p.row_bytes] for p in shard.layout.planes]
        return found


def same(device: Device, library: ShaderLibrary, file: GgufFile, weight: Tensor) -> None:
    got, want = (planes_on(device, library, file, weight, repack) for repack in ("device", "host"))
    assert len(got) == len(want) and all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)), weight


@pytest.mark.parametrize("type", [*quants.WEIGHT_TYPES, *quants.PAIRED.values()])
def test_the_table_of_a_layout_says_what_repack_does(type: str) -> None:
    """The table read as the shader reads it, over random bytes, also with bits that no quantizer sets."""
    moves, t = word_moves(type), codec(type).type
    table = moves.table.tolist()
    k = moves.blocks * max(t.block_values, 32)
    raw = np.random.default_rng(1).integers(0, 256, (3, t.row_bytes(k)), np.uint8)
    want = [plane.view(np.uint32) for plane in quants.repack(type, raw, k)]
    words = raw.view(np.uint32).astype(np.uint64)
    for plane in range(table[1]):
        length, entries, *names = table[4 + 4 * plane : 8 + 4 * plane]
        new = np.array([names[n // 8] >> 4 * (n % 8) & 15 for n in range(16)], np.uint64)
        renamed = sum((new[words >> np.uint64(4 * at) & np.uint64(15)] << np.uint64(4 * at) for at in range(8)), np.zeros_like(words))
        for w in range(length):
            begin, end, flip = table[entries + 3 * w : entries + 3 * w + 3]
            made = np.full(3, flip, np.uint64)
            for source, mask in zip(table[begin:end:2], table[begin + 1 : end : 2], strict=True):
                x, left = renamed[:, source & 0xFFFF], source >> 16
                made ^= (x << np.uint64(left) | x >> np.uint64(32 - left)) & np.uint64(mask)
            assert np.array_equal(made & np.uint64(0xFFFFFFFF), want[plane][:, w]), (plane, w)


@pytest.mark.parametrize("type", [t for t in quants.WEIGHT_TYPES if t != "MXFP4"])  # whose largest powers of two overflow by themselves
def test_limits_are_what_the_decoder_says(type: str) -> None:
    """Among random blocks, those of which `unsound` says that all weights are numbers decode to numbers."""
    c = codec(type)
    raw = np.random.default_rng(2).integers(0, 256, (4096, c.type.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(c.decode(raw)).all(axis=1)
    assert not (~finite & ~c.unsound(raw)).any()
    if c.unsound_limits():
        assert (~finite & c.unsound(raw)).any()


@pytest.mark.vulkan
@pytest.mark.parametrize("type", quants.WEIGHT_TYPES)
def test_the_device_repacks_as_the_host_does(type: str, device: Device, library: ShaderLibrary, tmp_path: Path) -> None:
    for (how, count), k, rows in product(KINDS, columns(type), (1, 3, 70)):
        same(device, library, *weight_of(how, count, type, rows, k, tmp_path / f"{how}{k}x{rows}"))


@pytest.mark.vulkan
@pytest.mark.parametrize("type", quants.PAIRED)
def test_a_device_that_takes_pairs_repacks_to_pairs(
    type: str, device: Device, library: ShaderLibrary, ctx: LowerContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_pairs(ctx, tmp_path, monkeypatch)
    file, weight = weight_of("plain", 1, type, 70, 256, tmp_path / type)
    same(device, library, file, weight)
    want = quants.repack(quants.PAIRED[type], file.tensors["t0"].data.reshape(70, -1), 256)
    got = planes_on(device, library, file, weight, "host")
    assert all(np.array_equal(a, b.reshape(-1)) for a, b in zip(got, want, strict=True))


@pytest.mark.vulkan
@pytest.mark.parametrize(("type", "k"), [("Q6_K", 256), ("MXFP4", 288), ("F16", 33), ("Q4_K", 512)])
def test_pieces_and_shards_of_any_size(
    type: str, k: int, device: Device, library: ShaderLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many chunks, many reads of a piece, shards, and memory that host and device do not share."""
    monkeypatch.setattr(weight_stream, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(weight_stream, "READ_BYTES", 777)
    monkeypatch.setattr(device, "caps", dataclasses.replace(device.caps, uma=False, max_storage_buffer_range=1 << 15))
    for how, count in KINDS:
        file, weight = weight_of(how, count, type, 303, k, tmp_path / how)
        assert len(shards(weight, device.caps)) > 1
        same(device, library, file, weight)


@pytest.mark.vulkan
def test_memory_that_the_system_does_not_write_into(
    device: Device, library: ShaderLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(fd: int, buffers: object, at: int) -> int:
        asked.append(at)
        raise OSError(errno.EFAULT, "Bad address")

    monkeypatch.setattr(os, "preadv", refuse)
    same(device, library, *weight_of("plain", 1, "Q4_K", 9, 512, tmp_path / "m"))
    assert asked == [0]


@pytest.mark.vulkan
def test_tensors_of_another_file_are_read_from_that(device: Device, library: ShaderLibrary, tmp_path: Path) -> None:
    """As those of an adapter beside a model."""
    base, weight = weight_of("interleave", 2, "Q4_0", 8, 64, tmp_path / "base")
    other, _ = weight_of("plain", 1, "Q4_0", 9, 64, tmp_path / "other")
    tensors = {**base.tensors, "t1": dataclasses.replace(other.tensors["t0"], name="t1", shape=(8, 64), nbytes=8 * 36)}
    same(device, library, dataclasses.replace(base, tensors=tensors), weight)


@pytest.mark.vulkan
def test_a_type_without_a_table_is_repacked_by_the_host_beside_others(
    device: Device, library: ShaderLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {type: quants.random_blocks(type, 24, 256, np.random.default_rng(3)) for type in ("Q4_K", "Q6_K")}
    file = file_of({type: (type, (24, 256), data) for type, data in raw.items()}, tmp_path / "m")
    weights = {type: Tensor(type, type, (24, 256), "weight", Recipe("plain", (type,))) for type in raw}
    monkeypatch.setattr(weights_module, "moves_words", lambda type: type != "Q6_K")
    loaded = load_weights(file, weights, device, library, progress=False, repack="device")
    with loaded.arena:
        for type, data in raw.items():
            assert np.array_equal(device.download(loaded.ranges[type].shards[0]), quants.to_device(type, data, 256)), type


@pytest.fixture(scope="module")
def dense() -> Model:
    return Model.open(builtin_model("demo-dense"))


@pytest.mark.vulkan
def test_a_model_loaded_either_way_says_the_same(device: Device) -> None:
    path = builtin_model("demo-dense")
    logits = []
    ways: tuple[Repack, ...] = ("device", "host")
    for repack in ways:
        with Engine.load(path, device, n_ctx=32, progress=False, repack=repack) as engine:
            assert (engine.load_times.total_s > 0) == (repack == "device")
            logits.append(engine.decode_logits(5))
    assert np.array_equal(logits[0], logits[1])


def with_halves(file: GgufFile, name: str, block: int, bits: int) -> GgufFile:
    """The file with the f16 scales of a Q8_0 tensor's block changed."""
    t = file.tensors[name]
    data = np.array(t.data.reshape(-1))
    data.reshape(-1, 34)[block, :2].view(np.uint16)[:] = bits
    return dataclasses.replace(file, tensors={**file.tensors, name: dataclasses.replace(t, offset=0, file=data)})


@pytest.mark.vulkan
@pytest.mark.parametrize("repack", ["device", "host"])
def test_scales_that_are_no_numbers_or_too_large_are_found(repack: Repack, device: Device, library: ShaderLibrary, tmp_path: Path) -> None:
    file, weight = weight_of("interleave", 2, "Q8_0", 40, 96, tmp_path / "m")

    def load(file: GgufFile) -> frozenset[str]:
        loaded = load_weights(file, {"w": weight}, device, library, progress=False, repack=repack)
        loaded.arena.destroy()
        return loaded.beyond_f16

    before = device.live_objects()
    assert load(file) == frozenset()
    for bits in (0x7C00, 0xFC00, 0x7E01):
        with pytest.raises(GgufError, match=r"tensor t1 \(Q8_0 \[40, 96\]\): row 17 holds weights that are NaN or infinite"):
            load(with_halves(file, "t1", 3 * 17 + 2, bits))
    assert load(with_halves(file, "t1", 119, 0x7BFF)) == {"w"}  # 65504 times up to 127
    assert load(with_halves(file, "t0", 0, 0x4000)) == frozenset()  # 2 times up to 127 is looked at, and is small
    assert {k: n for k, n in device.live_objects().items() if k != "Pipeline"} == {k: n for k, n in before.items() if k != "Pipeline"}


@pytest.mark.vulkan
def test_a_file_that_changes_or_ends_is_refused_and_leaves_nothing(
    device: Device, library: ShaderLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    synthesize("tiny-llama-Q8_0", path)
    model = Model.open(path)
    weights = {n: t for n, t in model.graph(1, 32, head="last").tensors().items() if t.kind == "weight"}

    def alive() -> dict[str, int]:
        return {k: n for k, n in device.live_objects().items() if k in ("Arena", "Buffer", "Memory", "Commands", "DescriptorPool")}

    load_weights(model.file, weights, device, library, progress=False, repack="device").arena.destroy()
    before, handles = alive(), len(list(Path("/proc/self/fd").iterdir()))
    with path.open("r+b") as f:
        f.seek(path.stat().st_size - 1)
        f.write(b"x")
    with pytest.raises(GgufError, match=r"m\.gguf: the file has changed since it was opened"):
        load_weights(model.file, weights, device, library, progress=False, repack="device")
    assert alive() == before

    model = Model.open(path)
    os.truncate(path, path.stat().st_size - 100)
    monkeypatch.setattr(SplitFile, "reopened", lambda self: os.open(self.path, os.O_RDONLY))  # as if it had become shorter only now
    with pytest.raises(GgufError, match=r"m\.gguf: tensor .*: the file ends at byte \d+ now, it was longer"):
        load_weights(model.file, weights, device, library, progress=False, repack="device")
    assert alive() == before
    assert len(list(Path("/proc/self/fd").iterdir())) <= handles


@pytest.mark.vulkan
def test_no_memory_leaves_nothing(device: Device, library: ShaderLibrary, dense: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {n: t for n, t in dense.graph(1, 32, head="last").tensors().items() if t.kind == "weight"}
    before = device.live_objects()
    real = device.arena

    def arena(purpose: str, *arguments: Any) -> Any:
        if purpose == "repacking of weights":
            raise OutOfDeviceMemory("memory check failed: for repacking of weights")
        return real(purpose, *arguments)

    monkeypatch.setattr(device, "arena", arena)
    with pytest.raises(OutOfDeviceMemory, match="for repacking of weights"):
        load_weights(dense.file, weights, device, library, progress=False, repack="device")
    assert {**device.live_objects(), "Pipeline": 0} == {**before, "Pipeline": 0}


@pytest.mark.vulkan
def test_what_fails_meanwhile_stops_the_load(device: Device) -> None:
    before = device.live_objects().get("Arena", 0)

    def fail(engine: Engine) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Engine.load(builtin_model("demo-dense"), device, n_ctx=32, progress=False, repack="device", meanwhile=fail)
    assert device.live_objects().get("Arena", 0) == before


@pytest.mark.vulkan
def test_a_device_lost_in_a_load_is_said_and_can_be_closed(dense: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "CHUNK_BYTES", 1 << 20)
    weights = {n: t for n, t in dense.graph(1, 32, head="last").tensors().items() if t.kind == "weight"}
    device = Device.open(0)
    load = WeightLoad(dense.file, weights, device, repack="device")

    def step(what: str) -> None:
        if what == "uploading" and not hasattr(step, "done"):
            step.done = True  # type: ignore[attr-defined]
            lose(device, monkeypatch)

    with pytest.raises(DeviceLost, match=r"VK_ERROR_DEVICE_LOST: the device stopped; .*weights.* Close this Device"), load:
        load.run(lambda _: None, step)
    device.close()
    assert device.live_objects() == {}


def test_a_gpu_gets_the_kernels_of_decode_while_weights_come() -> None:
    asked: list[Sampler] = []
    for software, text, causal in product((True, False), repeat=3):
        caps = SimpleNamespace(software=software)
        model = SimpleNamespace(has_text=text, architecture=SimpleNamespace(causal=causal))
        engine = SimpleNamespace(device=SimpleNamespace(caps=caps), model=model)
        engine.compile = lambda sampler: asked.append(sampler)
        asked.clear()
        _compile_ahead(cast(Engine, engine))
        assert [sampler.greedy for sampler in asked] == ([False] if text and causal and not software else [])


def test_who_repacks() -> None:
    found = {id: repacks(Capabilities.from_profile(id)) for id in ("nvidia_h200_linux", "intel_arc_a770_anv", "llvmpipe_mesa_22_debian12")}
    assert list(found.values()) == ["device", "device", "host"]


def test_the_bar_names_what_is_waited_for() -> None:
    bars = Bars(console=Console(file=io.StringIO(), force_terminal=True))
    with Reported(bars, "load", 3 * 10**9, "reading") as load:
        load.waits_for("uploading")
        with Reported(bars, "compile") as kernels:
            assert bars.texts == ["uploading weights", "planning"]
            load.advance(10**9)
            kernels.expect(2)
            assert bars.texts == ["uploading weights 1.0/3.0 GB", "preparing kernels 0/2"]
            kernels.advance()
            assert bars.texts[1] == "preparing kernels 1/2"
    assert not bars.texts
    with Reported(bars, "load", 5_700_000, "reading") as load:
        load.advance(2_800_000)
        assert bars.texts == ["reading weights 3/6 MB"], "a small model"
