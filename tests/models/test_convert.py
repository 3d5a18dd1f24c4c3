"""vkback convert: folders of tiny models become files whose tensors are those of the source, and whose logits are those that
transformers' classes made of the same weights (tests/references/data)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_kit import call
from hf_folder import CLASSES, LUT, trained_tokenizer, write_folder, write_safetensors
from tiny_models import tiny

from vkback import quants
from vkback.cli.main import main
from vkback.errors import VkbackError
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.gguf.file import GgufFile
from vkback.gguf.safetensors import FolderError, read_folder
from vkback.models.convert import convert
from vkback.models.quantize import Recipe, plan_quantize, quantize
from vkback.models.registry import Model
from vkback.models.synth import synthesize

DATA = Path(__file__).parents[1] / "references" / "data"
N_CTX = 96


@pytest.mark.parametrize("name", CLASSES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    source = write_folder(name, tiny(name, tmp_path), tmp_path / "folder", parts=1 + (name == "qwen3moe"))
    out = tmp_path / "out.gguf"
    convert(tmp_path / "folder", out, "F32")
    made = GgufFile.open(out)
    assert made.tensors.keys() == source.tensors.keys()
    for t in source.tensors.values():
        got = np.asarray(made.tensors[t.name].data).view(np.float32).reshape(t.shape)
        want = quants.decode(t.type, np.asarray(t.data)).reshape(t.shape)
        # One is taken of Gemma's norms and added again, divisors of RoPE are computed anew: a step of f32 in some.
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7 if "norm" in t.name else 0)
    with np.load(DATA / f"{name.replace('-', '_')}.npz") as f:
        tokens, logits = [int(t) for t in f["tokens"]], f["logits"]
    assert nmse(NumpyTwin(out, n_ctx=N_CTX).logits(tokens), logits) < 1e-6  # keys and values are F16 in a cache


def test_blocks_of_mxfp4_come_along_as_they_are(tmp_path: Path) -> None:
    """gpt-oss as it was published. Published bytes stand for what transformers makes of them, and files for the same."""
    synthesize("tiny-gpt-oss-F32", tmp_path / "F32.gguf")
    quantize(plan_quantize(GgufFile.open(tmp_path / "F32.gguf"), Recipe("MXFP4_MOE")), tmp_path / "source.gguf")
    source = write_folder("gpt-oss", tmp_path / "source.gguf", tmp_path / "folder", blocks=True)
    assert convert(tmp_path / "folder", tmp_path / "out.gguf")[0] == "MXFP4_MOE"
    made = GgufFile.open(tmp_path / "out.gguf")
    name = "blk.1.ffn_up_exps.weight"
    for t in source.tensors.values():
        if t.type == "MXFP4":
            assert made.tensors[t.name].type == "MXFP4" and np.array_equal(made.tensors[t.name].data, t.data), t.name
    assert made.tensors.keys() == source.tensors.keys() and source.tensors[name].type == "MXFP4"
    assert made.metadata["general.file_type"] == source.metadata["general.file_type"]
    published = read_folder(tmp_path / "folder")
    blocks, scales = (published[f"model.layers.1.mlp.experts.gate_up_proj_{which}"] for which in ("blocks", "scales"))
    bytes = np.asarray(blocks.raw).reshape(blocks.shape)
    values = np.stack([LUT[bytes & 15], LUT[bytes >> 4]], axis=-1).reshape(*blocks.shape[:-1], 32)
    exponents = np.asarray(scales.raw).reshape(scales.shape).astype(int) - 127
    wanted = np.ldexp(values, exponents[..., None]).reshape(*blocks.shape[:2], -1)[:, 1::2]
    assert np.array_equal(quants.decode("MXFP4", np.asarray(made.tensors[name].data)).reshape(wanted.shape), wanted)
    convert(tmp_path / "folder", tmp_path / "BF16.gguf", "BF16")
    half = GgufFile.open(tmp_path / "BF16.gguf").tensors[name]
    assert half.type == "BF16" and np.array_equal(quants.decode("BF16", np.asarray(half.data)).reshape(wanted.shape), wanted)


def test_layers_that_files_cannot_say_are_refused(tmp_path: Path) -> None:
    for name, change in (("olmo3", {"layer_types": ["full_attention"] * 5}), ("gpt-oss", {"swiglu_limit": 3.0})):
        folder = tmp_path / name
        write_folder(name, tiny(name, tmp_path), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(FolderError, match=next(iter(change))):
            convert(folder, tmp_path / "out.gguf")


@pytest.mark.parametrize(("outtype", "type"), [("F16", "F16"), ("BF16", "BF16"), ("Q8_0", "Q8_0"), ("auto", "F32")])
def test_types_of_matrices(outtype: str, type: str, tmp_path: Path) -> None:
    write_folder("llama", tiny("llama", tmp_path), tmp_path / "folder")
    out = tmp_path / "out.gguf"
    found, size, params = convert(tmp_path / "folder", out, outtype)
    made = GgufFile.open(out)
    assert (found, size, params) == (type, made.size_bytes, made.n_params)
    assert made.tensors["blk.0.attn_q.weight"].type == type and made.tensors["blk.0.attn_norm.weight"].type == "F32"
    assert Model.open(out).hp.n_layer == made.metadata["llama.block_count"]


def test_rope_of_llama_3_by_its_rule(tmp_path: Path) -> None:
    """With the numbers of Llama 3.2's config.json: the first pair keeps its frequency, the last is slowed 32 times."""
    source = write_folder("llama", tiny("llama", tmp_path), tmp_path / "folder")
    path = tmp_path / "folder" / "config.json"
    config = json.loads(path.read_text())
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config["rope_scaling"], config["rope_theta"] = rope | {"original_max_position_embeddings": 8192}, 500000.0
    del config["rope_parameters"]
    path.write_text(json.dumps(config))
    convert(tmp_path / "folder", tmp_path / "out.gguf")
    found = np.asarray(GgufFile.open(tmp_path / "out.gguf").tensors["rope_freqs.weight"].data).view(np.float32).ravel()
    assert found[0] == 1 and found[-1] == 32 and (np.diff(found) >= 0).all()
    assert len(found) == source.get("llama.rope.dimension_count", int) // 2


def test_a_byte_level_vocabulary_and_a_template_come_along(tmp_path: Path) -> None:
    source = write_folder("llama", tiny("llama", tmp_path), tmp_path / "folder")
    n_vocab = source.tensors["token_embd.weight"].shape[0]
    judge = trained_tokenizer(tmp_path / "folder", n_vocab)
    convert(tmp_path / "folder", tmp_path / "out.gguf")
    model = Model.open(tmp_path / "out.gguf")
    keys = model.file.metadata
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "llama-bpe")
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    assert len(keys["tokenizer.ggml.tokens"]) == n_vocab and keys["tokenizer.ggml.tokens"][-1].startswith("[PAD")
    for text in ("The Martians' 12345 machines!\n\n  It's late, naïve.", "  spaces   and\ttabs "):
        assert model.tokenizer.encode(text) == [judge.token_to_id("<|begin_of_text|>"), *judge.encode(text).ids]


def test_pieces_of_a_sentencepiece_model(tmp_path: Path) -> None:
    """A model as a message of protocol buffers: pieces of text, score and kind."""

    def piece(text: str, score: float, kind: int) -> bytes:
        raw = text.encode()
        inner = b"\x0a" + bytes([len(raw)]) + raw + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
        return b"\x0a" + bytes([len(inner)]) + inner

    source = write_folder("llama", tiny("llama", tmp_path), tmp_path / "folder")
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{i:02X}>", 0.0, 6) for i in range(256))]
    pieces += [("▁", -1.0, 1), ("a", -2.0, 1), ("b", -3.0, 1), ("▁a", -0.5, 1)]
    (tmp_path / "folder" / "tokenizer.model").write_bytes(b"".join(piece(*each) for each in pieces))
    convert(tmp_path / "folder", tmp_path / "out.gguf")
    model = Model.open(tmp_path / "out.gguf")
    tokens = model.file.metadata["tokenizer.ggml.tokens"]
    assert model.file.metadata["tokenizer.ggml.model"] == "llama" and tokens[262] == "▁a"
    assert len(tokens) == source.tensors["token_embd.weight"].shape[0]
    assert [tokens[i] for i in model.tokenizer.encode("ab")][-2:] == ["▁a", "b"]


def broken(folder: Path, how: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = folder / "model.safetensors"
    if how == "class":
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    elif how == "key":
        del config["rms_norm_eps"]
        (folder / "config.json").write_text(json.dumps(config))
    elif how == "rope":
        (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_type": "dynamic"}}))
    elif how == "config":
        (folder / "config.json").unlink()
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:-8])
    elif how == "part":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))
    elif how == "type":
        write_safetensors(weights, {"model.norm.weight": ("F8_E4M3", np.zeros(4, np.uint8))})
    elif how == "tensor":
        write_safetensors(folder / "more.safetensors", {"model.layers.0.extra.weight": ("F32", np.zeros((4, 4), np.float32))})


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("class", "a model of the class MambaForCausalLM; expected one of LlamaForCausalLM"),
        ("key", "config.json: has no 'rms_norm_eps'"),
        ("rope", "RoPE of type dynamic; expected default"),
        ("config", "config.json: no such file"),
        ("cut", "lies at .* the file has"),
        ("part", "model-00002-of-00002.safetensors: no such file, one of 1 that"),
        ("type", "tensor model.norm.weight is F8_E4M3; expected F32, F16 or BF16"),
        ("tensor", "tensor model.layers.0.extra.weight has no place"),
    ],
)
def test_what_is_refused_leaves_no_file(how: str, said: str, tmp_path: Path) -> None:
    write_folder("llama", tiny("llama", tmp_path), tmp_path / "folder")
    broken(tmp_path / "folder", how)
    with pytest.raises(VkbackError, match=said):
        convert(tmp_path / "folder", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists() and not list(tmp_path.glob(".*"))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder("llama", tiny("llama", tmp_path), tmp_path / "small")
    assert call(monkeypatch, main, "convert", str(tmp_path / "small"), "--outtype", "bf16", "--json") == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert said["out"] == str(tmp_path / "small" / "small-BF16.gguf") and said["type"] == "BF16"
    for words, wrong in ((("--outtype", "q4_k"), "other types come from vkback"), (("--pre", "nope"), "no such way of cutting text")):
        assert call(monkeypatch, main, "convert", str(tmp_path / "small"), *words) == 2
        assert wrong in capsys.readouterr().err
    assert call(monkeypatch, main, "convert", str(tmp_path / "none")) == 2
    assert "no such folder" in capsys.readouterr().err
