"""GGUF files: what is read from sound ones, and what is said about broken ones."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from make_gguf import llama_metadata, llama_tensors, write_gguf

from vkback.gguf.file import TENSOR_TYPES
from vkback.models import ARCHITECTURES, GgufError, GgufFile, Model, TokenizerError, model_description, read_hparams
from vkback.models.unsupported import LACKS
from vkback.paths import builtin_model, builtin_models
from vkback.units import params_text, size_text


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def key_u32(key: str, value: int) -> bytes:
    return string(key) + struct.pack("<II", 4, value)


def info(name: str, shape: tuple[int, ...], type: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type, offset)


def raw_file(keys: list[bytes], infos: list[bytes], data: int = 0, *, version: int = 3) -> bytes:
    """A file from its parts, with `data` zero bytes after the padding."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(keys)) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(data)


def says(tmp_path: Path, content: bytes, *parts: str) -> None:
    """Opening `content` raises a GgufError whose text names the file and holds all parts."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError) as e:
        GgufFile.open(path)
    for part in (f"[gguf] {path}: ", *parts):
        assert part in str(e.value)


@pytest.mark.parametrize("path", builtin_models(), ids=lambda p: p.stem)
def test_reads_the_same_as_the_gguf_package(path: Path) -> None:
    f, other = GgufFile.open(path), gguf.GGUFReader(path)
    assert list(f.tensors) == [t.name for t in other.tensors]
    for t in other.tensors:
        mine = f.tensors[t.name]
        assert (mine.type, mine.shape, mine.nbytes) == (t.tensor_type.name, tuple(int(d) for d in t.shape[::-1]), t.n_bytes)
        assert np.array_equal(mine.data.reshape(-1), t.data.reshape(-1).view(np.uint8))
    for key, value in f.metadata.items():
        theirs = other.fields[key].contents()
        assert value == theirs if not isinstance(value, np.ndarray) else value.tolist() == theirs


def test_shapes_are_in_numpy_order() -> None:
    f = GgufFile.open(builtin_model("demo-moe"))
    t = f.tensors["blk.0.ffn_gate_exps.weight"]
    assert (t.type, t.shape, t.data.shape) == ("MXFP4", (16, 256, 256), (16 * 256, 256 // 32 * 17))
    assert f.tensors["output_norm.weight"].data.shape == (1, 1024)
    assert f.n_params == sum(t.elements for t in f.tensors.values()) == 14437120


def test_every_value_type_and_nested_arrays(tmp_path: Path) -> None:
    scalars = [
        ("u8", 0, "B", 200),
        ("i8", 1, "b", -3),
        ("u16", 2, "H", 60000),
        ("i16", 3, "h", -300),
        ("u32", 4, "I", 1 << 31),
        ("i32", 5, "i", -1),
        ("f32", 6, "f", 0.5),
        ("bool", 7, "B", True),
        ("u64", 10, "Q", 1 << 40),
        ("i64", 11, "q", -7),
        ("f64", 12, "d", 0.25),
    ]
    keys = [string(key) + struct.pack(f"<I{code}", type, value) for key, type, code, value in scalars]
    keys += [
        string("str") + struct.pack("<I", 8) + string("é"),
        string("arr") + struct.pack("<IIQ3h", 9, 3, 3, 1, -2, 3),
        string("flags") + struct.pack("<IIQ2B", 9, 7, 2, 0, 1),
        string("nest") + struct.pack("<IIQ", 9, 9, 2) + 2 * (struct.pack("<IQ", 8, 1) + string("x")),
    ]
    path = tmp_path / "all.gguf"
    path.write_bytes(raw_file(keys, []))
    m = dict(GgufFile.open(path).metadata)
    assert (m.pop("arr").tolist(), m.pop("flags").tolist()) == ([1, -2, 3], [False, True])
    assert m == {key: value for key, _, _, value in scalars} | {"str": "é", "nest": [["x"], ["x"]]}
    assert m["bool"] is True


def test_header_errors(tmp_path: Path) -> None:
    says(tmp_path, b"", "the file is empty")
    says(tmp_path, b"PK\x03\x04" + bytes(40), "not a GGUF file", r"b'PK\x03\x04'")
    says(tmp_path, b"GGUF\x03", "truncated in header", "4 bytes expected at byte 4", "ends at byte 5")
    says(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian")
    says(tmp_path, raw_file([], [], version=1), "GGUF version 1, only 2 and 3")
    says(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "1152921504606846976 tensors", "hold at most 0")
    says(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 9), "9 metadata keys", "hold at most 0")
    with pytest.raises(GgufError, match="cannot be read: No such file"):
        GgufFile.open(tmp_path / "absent.gguf")
    with pytest.raises(GgufError, match=r"cannot be read: (Is a directory|Permission denied)"):
        GgufFile.open(tmp_path)


def test_metadata_errors(tmp_path: Path) -> None:
    says(tmp_path, raw_file([key_u32("a", 1), key_u32("a", 2)], []), "metadata key 'a' comes twice")
    says(tmp_path, raw_file([string("k") + struct.pack("<II", 77, 0)], []), "metadata key 'k' has value type 77", "known are 0 to 12")
    says(tmp_path, raw_file([string("k") + struct.pack("<IQ", 8, 1 << 50)], []), "metadata key 'k' says 1125899906842624 characters")
    says(tmp_path, raw_file([string("k") + struct.pack("<IIQ", 9, 4, 1 << 40)], []), "metadata key 'k' says 1099511627776 elements")
    deep = struct.pack("<I", 9) + 9 * struct.pack("<IQ", 9, 1)
    says(tmp_path, raw_file([string("k") + deep + bytes(64)], []), "arrays at most 4 deep")
    strings = string("k") + struct.pack("<IIQ", 9, 8, 2) + string("ab") + struct.pack("<Q", 999)
    says(tmp_path, raw_file([strings], []), "metadata key 'k'", "string 1 of 2", "Fetch it again")
    says(tmp_path, raw_file([key_u32("general.alignment", 24)], []), "general.alignment is 24, expected a power of two")


def test_tensor_errors(tmp_path: Path) -> None:
    says(tmp_path, raw_file([], [info("w", (8,), type=99)], 32), "tensor 'w' has type 99", "Q4_K (12)", "MXFP4 (39)")
    says(tmp_path, raw_file([], [info("w", (100,), type=12)], 999), "tensor 'w': 100 columns is not a multiple of the Q4_K block (256)")
    says(tmp_path, raw_file([], [info("w", (1, 1, 1, 1, 1))], 32), "tensor 'w' has 5 dimensions, expected 1 to 4")
    says(tmp_path, raw_file([], [info("w", (8,)), info("w", (8,), offset=32)], 64), "tensor 'w' comes twice")
    says(tmp_path, raw_file([], [info("w", (8,), offset=4)], 64), "offset 4, not a multiple of the alignment 32")
    says(
        tmp_path,
        raw_file([], [info("w", (8,)), info("v", (16,), offset=32), info("u", (8,), offset=64)], 128),
        "tensors 'v' and 'u' overlap",
        "ends at byte",
    )
    says(tmp_path, raw_file([], [info("a\nb", (8,))], 32), r"tensor info 0 of 1 has the name 'a\nb', expected at most 63 bytes that can be")
    says(tmp_path, raw_file([], [info(64 * "w", (8,))], 32), f"has the name '{64 * 'w'}', expected at most 63 bytes")
    says(tmp_path, raw_file([], [info(999 * "w", (8,))], 32), f"has the name '{80 * 'w'}...', expected at most 63 bytes")
    whole = raw_file([], [info("w", (8,))], 32)
    says(tmp_path, whole[:-1], "truncated: tensor 'w' (F32 [8])", f"ends at byte {len(whole)}, the file has {len(whole) - 1} bytes")
    says(tmp_path, raw_file([], [info("w", (1 << 40, 1 << 40))], 32), "truncated: tensor 'w'")


def test_every_truncation_of_a_header_is_noticed(tmp_path: Path) -> None:
    whole = raw_file([key_u32("a", 1), string("b") + struct.pack("<IIQ", 9, 8, 1) + string("xyz")], [info("w", (8,))], 32)
    path = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(GgufError):
            GgufFile.open(path)
    path.write_bytes(whole)
    assert list(GgufFile.open(path).tensors) == ["w"]


def refused(tmp_path: Path, *parts: str, arch: str = "llama", tensors: dict[str, object] | None = None, **changes: object) -> None:
    path = tmp_path / f"model{len(list(tmp_path.iterdir()))}.gguf"  # one that was refused may still be mapped
    write_gguf(path, arch, llama_metadata(**changes), llama_tensors() | (tensors or {}))  # type: ignore[arg-type]
    with pytest.raises(GgufError) as e:
        Model.open(path)
    for part in parts:
        assert part in str(e.value)


def test_what_is_said_to_be_unsupported_is_known_to_the_format_and_not_supported() -> None:
    newer = {"deepseek32", "deepseek4", "gemma4-assistant", "qwen4exp"}
    assert set(LACKS) - set(gguf.constants.MODEL_ARCH_NAMES.values()) <= newer, "names that are newer than the gguf package"
    assert not set(LACKS) & set(ARCHITECTURES), "supported by now: take it out of vkback/models/unsupported.py"


def test_hyperparameter_errors(tmp_path: Path) -> None:
    refused(
        tmp_path, "architecture 'mamba' is not supported: vkback has no models with the scan of Mamba-1 yet; supported are ", arch="mamba"
    )
    refused(tmp_path, "architecture 'xverse' is not supported: vkback has no graph of it yet (docs/", arch="xverse")
    refused(tmp_path, "architecture 'klingon' is not known; supported are ", arch="klingon")
    refused(tmp_path, "metadata key llama.embedding_length is missing", embedding_length=None)
    refused(tmp_path, "metadata key llama.block_count should be an integer, the file has a string", block_count="two")
    refused(tmp_path, "llama.attention.head_count is 0, expected at least 1", attention__head_count=0)
    refused(tmp_path, "llama.attention.head_count_kv is 3, expected a divisor of the 4 heads", attention__head_count_kv=3)
    refused(
        tmp_path,
        "llama.attention.layer_norm_rms_epsilon is nan, expected a positive number",
        attention__layer_norm_rms_epsilon=float("nan"),
    )
    refused(
        tmp_path,
        "llama.attention.layer_norm_rms_epsilon is inf, expected a number from 1e-30 to 1e+30",
        attention__layer_norm_rms_epsilon=math.inf,
    )
    refused(tmp_path, "llama.rope.freq_base is 1.0, expected a number above 1", rope__freq_base=1.0)
    refused(tmp_path, "llama.feed_forward_length should be an integer, the file has an array", feed_forward_length=[96.0, math.inf])
    refused(tmp_path, "llama.rope.scaling.factor should be a number, the file has an array", rope__scaling__factor=[1.0, 2.0])
    refused(tmp_path, "llama.rope.dimension_count is 17, expected an even number, at most the head size 16", rope__dimension_count=17)
    refused(tmp_path, "llama.rope.scaling.type is 'longrope', expected none, linear or yarn", rope__scaling__type="longrope")
    refused(tmp_path, "llama.feed_forward_length is different from layer to layer (96 to 97)", feed_forward_length=[96, 97])
    refused(tmp_path, "llama.expert_used_count is 5, expected at most expert_count, 4", expert_count=4, expert_used_count=5)
    refused(tmp_path, "metadata key llama.expert_used_count is missing", expert_count=4)


def test_tensor_set_errors(tmp_path: Path) -> None:
    refused(tmp_path, "tensor blk.2.attn_norm.weight is missing; llama with 3 layers needs it", block_count=3)
    refused(tmp_path, "llama.block_count is 2147483648, expected at most as many layers as the file has tensors, ", block_count=1 << 31)
    refused(tmp_path, "tensor blk.0.ffn_gate.weight has shape [96, 64], the hyperparameters say [128, 64]", feed_forward_length=128)
    refused(
        tmp_path,
        "tensor blk.0.attn_sinks.weight has no place in the llama architecture",
        tensors={"blk.0.attn_sinks.weight": ("F32", np.ones(4, np.float32))},
    )


def test_defaults_of_hyperparameters(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", "llama", llama_metadata(attention__head_count_kv=None, rope__scaling__factor=4.0), llama_tensors()
    )
    hp = read_hparams(GgufFile.open(path))
    assert (hp.n_head_kv, hp.head_dim_k, hp.head_dim_v, hp.rope.n_dims, hp.n_expert) == (4, 16, 16, 16, 0)
    assert (hp.attn_scale, hp.rope.freq_base, hp.rope.freq_scale, hp.rope.ext_factor) == (0.25, 10000.0, 0.25, 0.0)
    assert (hp.rope.n_ctx_orig, hp.rope.attn_factor, hp.rope.beta_fast, hp.rope.beta_slow) == (32, 1.0, 32.0, 1.0)


@pytest.mark.parametrize(
    ("arch", "layers", "extra", "file_type", "name"),
    [
        ("llama", 32, {"llama.vocab_size": 128256}, 15, "llama 8B Q4_K - Medium"),
        ("llama", 32, {"llama.vocab_size": 32000}, 2, "llama 7B Q4_0"),
        ("llama", 32, {"llama.vocab_size": 49152}, 1, "llama 3B F16"),
        ("llama", 32, {"llama.expert_count": 8}, 17, "llama 8x7B Q5_K - Medium"),
        ("llama", 30, {}, 7, "llama 256M Q8_0"),
        ("llama", 40, {}, 16, "llama 13B Q5_K - Small"),
        ("llama", 56, {}, 15, "llama ?B Q4_K - Medium"),
        ("llama", 80, {"llama.attention.head_count": 64, "llama.attention.head_count_kv": 8}, 10, "llama 70B Q2_K - Medium"),
        ("llama", 80, {"llama.attention.head_count": 64}, 999, "llama 65B unknown, may not work"),
        ("qwen3moe", 48, {}, 10, "qwen3moe 30B.A3B Q2_K - Medium"),
        ("qwen3moe", 94, {}, 38, "qwen3moe 235B.A22B MXFP4 MoE"),
        ("llama", 16, {}, None, "llama 1B (guessed) F16"),
        ("gemma3", 18, {}, 7, "gemma3 270M Q8_0"),
        ("gemma3", 26, {}, 15, "gemma3 1B Q4_K - Medium"),
        ("gemma3", 62, {}, 10, "gemma3 27B Q2_K - Medium"),
        ("gpt2", 36, {}, 1, "gpt2 0.8B F16"),
        ("deci", 80, {}, 14, "deci 70B Q4_K - Small"),
        ("deci", 162, {}, 14, "deci 405B Q4_K - Small"),
    ],
)
def test_model_names(tmp_path: Path, arch: str, layers: int, extra: dict[str, int], file_type: int | None, name: str) -> None:
    metadata = {f"{arch}.block_count": layers, **extra} | ({} if file_type is None else {"general.file_type": file_type})
    path = write_gguf(tmp_path / "m.gguf", arch, metadata, {"w": ("F16", np.zeros(4, np.float16))})
    assert model_description(GgufFile.open(path)) == name


def test_size_and_parameter_strings() -> None:
    assert [size_text(n) for n in (546 * 2**20 + 2**19, 2**30 - 1, 2**30, 4917000000)] == [
        "546.50 MiB",
        "1024.00 MiB",
        "1.00 GiB",
        "4.58 GiB",
    ]
    assert [params_text(n) for n in (134515008, 999999999, 8030261312)] == ["134.52 M", "1000.00 M", "8.03 B"]


def test_a_file_without_text_vocabulary_says_so_when_text_is_wanted(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata() | {"tokenizer.ggml.model": "no_vocab"}, llama_tensors())
    model = Model.open(path)
    assert model.hp.n_vocab == 32
    with pytest.raises(TokenizerError, match="the file has no vocabulary, so a text cannot be read; give token ids"):
        model.tokenizer.encode("Hello")


def test_tensor_lookup_names_what_is_missing() -> None:
    f = GgufFile.open(builtin_model("demo-dense"))
    lookup: Callable[[str], object] = f.tensor
    assert lookup("output_norm.weight") is f.tensors["output_norm.weight"]
    with pytest.raises(GgufError, match=r"tensor blk\.99\.attn_q\.weight is missing \(56 tensors in the file\)"):
        lookup("blk.99.attn_q.weight")


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    """But for Q8_1, to which gguf 0.19 gives 40 bytes: neither ggml's block (two f16 and 32 int8) nor any file's."""
    wanted = {int(t): (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    found = {number: (b.name, b.values, b.nbytes) for number, b in TENSOR_TYPES.items()}
    assert {n: found[n] for n in wanted if n != 9} == {n: w for n, w in wanted.items() if n != 9}
    assert found[9] == ("Q8_1", 32, 36)
