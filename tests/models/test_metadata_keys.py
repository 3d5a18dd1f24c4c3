"""Metadata keys of an architecture: which it knows, which it refuses, and what those say that change the mathematics."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import Keys
from make_gguf import llama_metadata, llama_tensors, write_gguf
from tiny_models import changed, tiny

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.gguf.hparams import Metadata
from vkback.models import GgufError, GgufFile, Model
from vkback.models.architecture import ARCHITECTURES
from vkback.models.keys import ABOUT_FILES, COMMON, NO_PART
from vkback.models.registry import architecture
from vkback.models.synth import SHAPES, write_outline

DATA = Path(__file__).parents[1] / "references" / "data"
FLOAT_NMSE = 1e-6
"""As tests/models/test_references.py has it: keys and values rounded to F16."""

TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, 331, 20)]
PREFIX = "{arch}."


def format_keys() -> list[str]:
    """Every key of the format that stands under an architecture's prefix, without it."""
    groups = [group for group in vars(Keys).values() if isinstance(group, type)]
    found = [key for group in groups for key in vars(group).values() if isinstance(key, str) and key.startswith(PREFIX)]
    return [key.removeprefix(PREFIX).replace("{dense}", "dense_2") for key in found]


def known_to(arch: str) -> frozenset[str]:
    return COMMON | ARCHITECTURES[arch].keys | {ARCHITECTURES[arch].norm_eps}


@pytest.fixture(scope="module")
def outlines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[GgufFile]]:
    """Files of the tiny shapes of an architecture, without weights."""
    made: dict[str, list[GgufFile]] = {}

    def get(arch: str) -> list[GgufFile]:
        if arch not in made:
            folder = tmp_path_factory.mktemp("outlines")
            names = [name for name, shape in SHAPES.items() if name.startswith("tiny-") and shape.arch == arch]
            for name in names:
                write_outline(f"{name}-Q8_0", folder / name)
            made[arch] = [GgufFile.open(folder / name) for name in names]
        return made[arch]

    return get


def with_keys(f: GgufFile, **values: Any) -> GgufFile:
    """The same file with other metadata under its prefix, "__" for a dot; None removes a key."""
    named = {f"{f.arch}.{key.replace('__', '.')}": value for key, value in values.items()}
    return dataclasses.replace(f, metadata={key: value for key, value in (dict(f.metadata) | named).items() if value is not None})


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_key_of_the_format_is_known_refused_or_named(arch: str, outlines: Callable[[str], list[GgufFile]]) -> None:
    f = outlines(arch)[0]
    walked = format_keys()
    assert len(walked) > 90 and "final_logit_softcapping" in walked
    for key in (*walked, "a_key_of_tomorrow"):
        if key in known_to(arch) | ABOUT_FILES:
            continue
        for value in (7, 7.5):
            file = with_keys(f, **{key: value})
            if key in NO_PART:
                assert architecture(file).unused_keys == (f"{arch}.{key}",)
            else:
                with pytest.raises(GgufError, match=rf"{arch}\.{key} \({value}\)") as error:
                    architecture(file)
                assert "\n" not in str(error.value)


def test_switches_lists_and_texts_are_refused(outlines: Callable[[str], list[GgufFile]]) -> None:
    for key, value, told in (
        ("use_parallel_residual", True, "True"),
        ("rope__dimension_sections", np.array([8, 12, 12, 0], np.int32), "4 values"),
        ("hidden_activation", "relu", "'relu'"),
    ):
        with pytest.raises(GgufError, match=rf"llama\.{key.replace('__', '.')} \({told}\)"):
            architecture(with_keys(outlines("llama")[0], **{key: value}))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_values_that_change_nothing_are_taken(arch: str, outlines: Callable[[str], list[GgufFile]]) -> None:
    """0 of every key that an architecture does not read, and what says the same as another key."""
    f = outlines(arch)[0]
    unread = [key for key in format_keys() if key not in known_to(arch)]
    for nothing in (0, 0.0, False, "", np.zeros(3, np.int32)):
        architecture(with_keys(f, **dict.fromkeys(unread, nothing)))
    same = {"attention.key_length_swa": "attention.key_length", "rope.dimension_count_swa": "rope.dimension_count"}
    architecture(with_keys(f, **{key: f.metadata[f"{arch}.{other}"] for key, other in same.items()}))
    off = ("attention.scale", "final_logit_softcapping", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
    found_causal = ARCHITECTURES[arch].causal
    found = architecture(with_keys(f, **dict.fromkeys(off, 0.0), rope__scaling__yarn_ext_factor=-1.0, attention__causal=found_causal))
    plain = architecture(with_keys(f, **dict.fromkeys(off)))
    assert dataclasses.replace(found.hp, path=plain.hp.path) == plain.hp


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_architecture_reads_the_keys_that_it_lists(
    arch: str, outlines: Callable[[str], list[GgufFile]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()
    own = Metadata.key

    def key(self: Metadata, name: str) -> str:
        read.add(name)
        return own(self, name)

    monkeypatch.setattr(Metadata, "key", key)
    for f in outlines(arch):
        architecture(f)
    # Found by the first of two names, or where YaRN or temperatures are on.
    assert read - known_to(arch) == set()
    assert known_to(arch) - read <= {"rope.scale_linear", "vocab_size"}


def test_a_refusal_names_all_keys_in_one_line(outlines: Callable[[str], list[GgufFile]]) -> None:
    f = with_keys(outlines("llama")[0], attn_logit_softcapping=50.0, attention__clamp_kqv=8.0)
    with pytest.raises(GgufError, match=r"^\[gguf\] .*: metadata that llama does not know") as error:
        architecture(f)
    assert "llama.attn_logit_softcapping (50.0), llama.attention.clamp_kqv (8.0); expected 0 or no such key" in str(error.value)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_that_sees_what_comes_makes_no_text(arch: str, outlines: Callable[[str], list[GgufFile]]) -> None:
    f = with_keys(outlines(arch)[0], attention__causal=False)
    if ARCHITECTURES[arch].recurrent:
        with pytest.raises(GgufError, match=rf"{arch}\.attention\.causal is False, expected true"):
            architecture(f)
        return
    model = Model.of(f)
    assert model.text_kinds() and not model.architecture.causal
    with pytest.raises(GgufError, match=r"sees whole texts and makes none; expected a use of their vectors: vkback embed"):
        model.graph(1, 32, head="last")


def test_an_encoder_that_calls_itself_causal_is_refused(outlines: Callable[[str], list[GgufFile]]) -> None:
    with pytest.raises(GgufError, match=r"bert\.attention\.causal is True, expected false: in bert a token sees all of its text"):
        architecture(with_keys(outlines("bert")[0], attention__causal=True))


def test_a_window_of_an_architecture_without_windows_is_refused(outlines: Callable[[str], list[GgufFile]]) -> None:
    with pytest.raises(GgufError, match=r"llama\.attention\.sliding_window \(4096\)"):
        architecture(with_keys(outlines("llama")[0], attention__sliding_window=4096))


def test_experts_of_a_dense_architecture_are_refused(outlines: Callable[[str], list[GgufFile]]) -> None:
    with pytest.raises(GgufError, match=r"qwen3\.expert_count \(8\), qwen3\.expert_used_count \(2\)"):
        architecture(with_keys(outlines("qwen3")[0], expert_count=8, expert_used_count=2))


def test_settled_values_are_taken_and_others_refused(outlines: Callable[[str], list[GgufFile]]) -> None:
    for arch, own in (("llama", 1), ("qwen3moe", 1), ("granitehybrid", 1), ("gpt-oss", 3)):
        architecture(with_keys(outlines(arch)[0], expert_gating_func=own))
        with pytest.raises(GgufError, match=rf"{arch}\.expert_gating_func \(2\)"):
            architecture(with_keys(outlines(arch)[0], expert_gating_func=2))


@pytest.mark.vulkan
def test_keys_without_a_part_are_named_at_the_load(tmp_path: Path, device: Device, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", llama_metadata(decoder_start_token_id=1), llama_tensors())
    Engine.load(path, device, progress=False).close()
    assert caplog.messages == [f"{path}: metadata without a part in the text is not used: llama.decoder_start_token_id"]


# --- keys that change the mathematics ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


def stored(name: str) -> tuple[list[int], np.ndarray]:
    """Tokens and logits of tools/references.py, of the same weights."""
    with np.load(DATA / f"{name}.npz") as f:
        assert json.loads(str(f["source"]))["sha256"]
        return [int(t) for t in f["tokens"]], f["logits"]


@pytest.fixture(scope="module", params=["gemma3", "qwen2"])
def capped(request: pytest.FixtureRequest, folder: Path) -> tuple[Path, list[int], np.ndarray]:
    """A file with a softcap of 2, tokens, and what transformers said without the cap, capped."""
    tokens, plain = stored(request.param)
    path = changed(tiny(request.param, folder), metadata={"final_logit_softcapping": 2.0})
    expected = 2.0 * np.tanh(plain / 2.0)
    assert nmse(expected, plain) > 1e-3, "the cap shows"
    return path, tokens, expected


def test_logits_are_softcapped(capped: tuple[Path, list[int], np.ndarray]) -> None:
    path, tokens, expected = capped
    assert nmse(NumpyTwin(path, n_ctx=96).logits(tokens), expected) <= FLOAT_NMSE


@pytest.mark.vulkan
def test_logits_are_softcapped_on_a_device(capped: tuple[Path, list[int], np.ndarray], device: Device) -> None:
    path, tokens, expected = capped
    with Engine.load(path, device, n_ctx=96, act="f32", progress=False) as engine:
        assert nmse(engine.prompt_logits(tokens), expected) <= FLOAT_NMSE
        engine.reset()
        assert nmse(np.stack([engine.decode_logits(t) for t in tokens]), expected) <= FLOAT_NMSE
        engine.reset()
        engine.prompt(tokens[:-1])
        assert next(engine.generate(tokens[-1], 1, stop_at_eos=False)) == expected[-1].argmax()


def test_layers_with_a_window_have_their_own_base_in_gpt_oss(folder: Path) -> None:
    """The only layer of the file has a window, so its own base is the file's."""
    path = tiny("gpt-oss", folder)
    later = [name for name in GgufFile.open(path).tensors if name.startswith(("blk.1", "blk.2"))]
    plain, own, whole = (
        changed(path, without=later, metadata={"block_count": 1} | more)
        for more in ({}, {"rope.freq_base_swa": 1000.0}, {"rope.freq_base": 1000.0})
    )
    logits = [NumpyTwin(p, n_ctx=32).logits(TOKENS) for p in (plain, own, whole)]
    assert np.array_equal(logits[1], logits[2]) and nmse(logits[0], logits[2]) > 1e-3
    graph = Model.open(changed(path, metadata={"rope.freq_base_swa": 1000.0})).graph(1, 32, head="all")
    ropes = [(n.params["freq_base"], n.params["ext_factor"], n.params["freq_scale"]) for n in graph.nodes if n.name.startswith("Qcur_rope")]
    assert ropes == [(1000.0, 1.0, 1 / 32), (150000.0, 1.0, 1 / 32), (1000.0, 1.0, 1 / 32)]


def test_gpt_oss_says_which_layers_have_a_window(folder: Path) -> None:
    path = changed(tiny("gpt-oss", folder), metadata={"attention.sliding_window_pattern": [True, True, False]})
    windows = [n.params.get("window", 0) for n in Model.open(path).graph(1, 32, head="all").nodes if n.op == "FLASH_ATTN_EXT"]
    assert windows == [8, 8, 0]


@pytest.fixture(scope="module", params=["deepseek2", "deepseek2-legacy", "deepseek2-sigmoid"])
def tempered(request: pytest.FixtureRequest, folder: Path) -> tuple[Path, np.ndarray]:
    """A file with temperatures that change every third token, and logits of the model without, token by token, each with the attention
    scale that the key's formula says for its position."""
    plain = tiny(request.param, folder)
    twin = NumpyTwin(plain, n_ctx=64)
    known = twin.model.architecture
    scale = known.hp.attn_scale
    rows = []
    for pos, token in enumerate(TOKENS):
        known.hp = dataclasses.replace(known.hp, attn_scale=scale * (1.0 + 0.7 * np.log(np.floor(pos / 3) + 1.0)))
        twin._graphs.clear()
        rows.append(twin.forward([token], pos)["result_output"][0])
    path = changed(plain, metadata={"attention.temperature_scale": 0.7, "attention.temperature_length": 3})
    assert nmse(np.stack(rows), NumpyTwin(plain, n_ctx=64).logits(TOKENS)) > 0.1, "temperatures show"
    return path, np.stack(rows)


def test_temperatures_of_deepseek2(tempered: tuple[Path, np.ndarray]) -> None:
    path, expected = tempered
    assert nmse(NumpyTwin(path, n_ctx=64).logits(TOKENS), expected) <= FLOAT_NMSE
    plain = GgufFile.open(path)
    opened = Model.open(path)
    assert (opened.file.size_bytes, opened.file.n_params) == (plain.size_bytes, plain.n_params), "the table is no part of the file"


@pytest.mark.vulkan
def test_temperatures_of_deepseek2_on_a_device(tempered: tuple[Path, np.ndarray], device: Device) -> None:
    path, expected = tempered
    with Engine.load(path, device, n_ctx=64, act="f32", progress=False) as engine:
        assert nmse(engine.prompt_logits(TOKENS), expected) <= FLOAT_NMSE
        engine.reset()
        assert nmse(np.stack([engine.decode_logits(t) for t in TOKENS]), expected) <= FLOAT_NMSE


def test_temperatures_need_a_length_and_end_with_the_trained_context(outlines: Callable[[str], list[GgufFile]]) -> None:
    f = outlines("deepseek2")[0]
    with pytest.raises(GgufError, match=r"attention\.temperature_length is 0, expected at least 1, since .*temperature_scale is 0\.5"):
        architecture(with_keys(f, attention__temperature_scale=0.5))
    known = architecture(with_keys(f, attention__temperature_scale=0.5, attention__temperature_length=16))
    with pytest.raises(GgufError, match=r"a context of 200 tokens, but .* trained context of 128"):
        known.graph(1, 200, head="last")
    beyond = architecture(with_keys(f, attention__temperature_scale=0.5, attention__temperature_length=128))
    assert not any(n.name.startswith("q_tempered") for n in beyond.graph(1, 128, head="last").nodes), "all are 1"


def test_yarn_s_factors(outlines: Callable[[str], list[GgufFile]]) -> None:
    f = outlines("llama")[0]
    rope = architecture(with_keys(f, rope__scaling__attn_factor=1.5, rope__scaling__yarn_attn_factor=2.0)).hp.rope
    assert (rope.attn_factor, rope.ext_factor) == (3.0, 0.0)
    yarn = architecture(with_keys(f, rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__yarn_ext_factor=0.5)).hp.rope
    assert (yarn.ext_factor, yarn.freq_scale) == (0.5, 0.25)
    with pytest.raises(GgufError, match=r"rope\.scaling\.yarn_ext_factor is 3\.0, expected a number from 0 to 1"):
        architecture(with_keys(f, rope__scaling__yarn_ext_factor=3.0))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attention__scale", 1e20, "from 1e-06 to 1e"),
        ("attention__layer_norm_rms_epsilon", 3.0, "up to 1"),
        ("expert_weights_scale", 1e25, "from 1e-06 to 1e"),
        ("final_logit_softcapping", 1e-20, "from 1e-06 to 1e"),
        ("final_logit_softcapping", -30.0, "a positive number"),
        ("rope__scaling__factor", 1e29, "from 1e-06 to 1e"),
        ("rope__scaling__attn_factor", float("nan"), "a positive number"),
        ("rope__freq_base", 0.5, "above 1"),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: float, expected: str, outlines: Callable[[str], list[GgufFile]]) -> None:
    with pytest.raises(GgufError, match=rf"llama\.{key.replace('__', '.')} is \S+, expected .*{expected}"):
        architecture(with_keys(outlines("llama")[0], **{key: value}))


def test_weights_of_experts_are_scaled_where_a_file_says_so(folder: Path) -> None:
    path = changed(tiny("qwen3moe", folder), metadata={"expert_weights_scale": 2.5})
    scales = [n.params["scale"] for n in Model.open(path).graph(1, 32, head="all").nodes if n.op == "TOPK_MOE"]
    assert scales == [2.5, 2.5, 2.5]
