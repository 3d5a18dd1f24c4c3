"""Keys and values beyond the range of a cache's type: every way through a model ends in one error that names layer and type, the session
goes on, and an F32 cache holds them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for
from make_gguf import llama_metadata, llama_tensors, write_gguf
from typer.testing import CliRunner

from vkback.api import LoadedModel
from vkback.cli import vkbench
from vkback.cli.main import app as vkback_app
from vkback.device import Device
from vkback.engine.batch.batch import Batch, Request
from vkback.engine.engine import Engine, EngineError
from vkback.errors import VkbackError
from vkback.evaluate.judge import nmse
from vkback.graph import Node, Tensor
from vkback.models import GgufFile, Model
from vkback.models.builder import CacheTypes
from vkback.models.cache_range import BEYOND_F16, beyond_range, judge, overflow_message
from vkback.models.synth import synthesize
from vkback.ops.op import OPS
from vkback.plan.planner import plan

TOKENS = np.random.default_rng(6).integers(3, 250, 24).tolist()
LOUD = 29
"""The token of `loud` whose key is beyond f16."""


def scaled(shape: str, folder: Path, factors: Mapping[str, float], layer: int) -> Path:
    """A tiny model as F32 where the tensors of a layer whose names end so are multiplied."""
    plain = folder / f"{shape}.gguf"
    synthesize(f"tiny-{shape}-F32", plain)
    f = GgufFile.open(plain)
    keys = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in f.metadata.items() if k != "general.architecture"}
    tensors = {}
    for name, t in f.tensors.items():
        factor = next((x for end, x in factors.items() if name == f"blk.{layer}.{end}.weight"), 1.0)
        tensors[name] = ("F32", np.ascontiguousarray(t.data).view(np.float32).reshape(t.shape) * np.float32(factor))
    return write_gguf(folder / f"{shape}-scaled.gguf", f.arch, keys, tensors)


def loud(path: Path) -> Path:
    """A llama with a vocabulary of letters, of which one token, "z", has a key of 10^6 in layer 0; all others are as usual."""
    tensors = llama_tensors(tied=False)
    embedding, keys = tensors["token_embd.weight"][1], tensors["blk.0.attn_k.weight"][1]
    embedding[:, 0] = 0.0
    embedding[LOUD] = 0.0
    embedding[LOUD, 0] = 1.0
    keys[:, 0] = 1e6
    letters = ["<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyz", "C", "."]
    vocabulary: dict[str, Any] = {"model": "llama", "tokens": letters, "scores": [-1.0] * 32, "token_type": [2, 3, 3, *[1] * 29]}
    vocabulary |= {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": False}
    return write_gguf(path, "llama", llama_metadata() | {f"tokenizer.ggml.{key}": v for key, v in vocabulary.items()}, tensors)


OF_LOUD = re.escape(
    'layer 0: keys are beyond 65504, the range of a cache of f16; load with --cache-type-k f32 (Python: cache_type_k="f32")'
)


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("shape", "factors", "layer", "k", "v", "exact", "says"),
    [
        ("llama", {"attn_k": 3e5}, 1, "f16", "f16", False, "layer 1: keys are beyond 65504, the range of a cache of f16; load with "),
        ("llama", {"attn_v": 1e9}, 2, "f16", "q8_0", True, "layer 2: values are beyond 8319008, the range of a cache of q8_0; load "),
        ("qwen3", {"attn_k_norm": 3e5}, 0, "f16", "f16", True, "layer 0: keys are beyond 65504, the range of a cache of f16; load with "),
        ("gemma3", {"attn_v": 3e6}, 5, "f16", "f16", False, "layer 5: values are beyond 65504, the range of a cache of f16; load with "),
        ("deepseek2", {"attn_kv_a_norm": 1e8}, 1, "q4_0", "f16", False, "layer 1: keys are beyond 524032, the range of a cache of q4_0"),
        ("phi3", {"attn_qkv": 3e5}, 1, "f16", "f16", False, "keys are beyond 65504 and values are beyond 65504, the range "),
    ],
)
def test_no_way_through_a_model_gives_a_number(
    shape: str, factors: dict[str, float], layer: int, k: str, v: str, exact: bool, says: str, tmp_path: Path, device: Device
) -> None:
    """Prompts with and without logits, single tokens, the token loop; the caches alone."""
    path = scaled(shape, tmp_path, factors, layer)
    with Engine.load(path, device, n_ctx=64, progress=False, cache_type_k=k, cache_type_v=v, exact=exact) as engine:

        def told_by(run: Callable[[], object]) -> str:
            engine.reset()
            with pytest.raises(EngineError) as error:
                run()
            return str(error.value)

        def prompted(then: Callable[[], object]) -> Callable[[], object]:
            def run() -> object:
                engine.prompt(TOKENS)
                return then()

            return run

        runs: tuple[Callable[[], object], ...] = (
            lambda: engine.prompt_logits(TOKENS),
            lambda: engine.decode_logits(TOKENS[0]),
            lambda: list(engine.generate(TOKENS[0], 20, stop_at_eos=False)),
            prompted(lambda: list(engine.generate(TOKENS[0], 4, stop_at_eos=False))),
            prompted(engine.check_caches),
        )
        for run in runs:
            message = told_by(run)
            assert message.startswith(f"[engine] {path}: layer ") and says in message, message
            assert "--cache-type-" in message and "damaged" not in message


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("shape", "factors"),
    [
        ("llama", {"attn_k": 2.0**24, "attn_q": 2.0**-24}),
        ("llama", {"attn_v": 2.0**24, "attn_output": 2.0**-24}),
        ("gemma3", {"attn_k_norm": 2.0**24, "attn_q_norm": 2.0**-24}),
    ],
)
def test_an_f32_cache_holds_them(shape: str, factors: dict[str, float], tmp_path: Path, device: Device) -> None:
    """Scales that cancel: the logits are those of the model without them."""
    path = scaled(shape, tmp_path, factors, 1)
    found = []
    for file in (tmp_path / f"{shape}.gguf", path):
        with Engine.load(file, device, n_ctx=64, act="f32", progress=False, cache_type_k="f32", cache_type_v="f32") as engine:
            found.append(np.concatenate([engine.prompt_logits(TOKENS[:20]), *(engine.decode_logits(t)[None] for t in TOKENS[20:])]))
    assert nmse(found[1], found[0]) < 1e-9


@pytest.mark.vulkan
def test_a_session_goes_on(tmp_path: Path, device: Device) -> None:
    """Rows that hold no numbers are left behind in the caches: no later text may see them."""
    path, text = loud(tmp_path / "loud.gguf"), [5, 6, 7, 8, 9, 10, 11, 12]
    with Engine.load(path, device, n_ctx=32, progress=False) as engine:
        want = [engine.decode_logits(t) for t in text]
        engine.reset()
        with pytest.raises(EngineError, match=OF_LOUD):
            engine.prompt_logits([5, 6, LOUD, 8, 9, 10, 11, 12, 13, 14])
        engine.reset()
        assert np.array_equal([engine.decode_logits(t) for t in text], want)
        engine.rewind(4)
        with pytest.raises(EngineError, match=OF_LOUD):
            engine.decode_logits(LOUD)
        with pytest.raises(EngineError, match=OF_LOUD):
            engine.check_caches()
        assert engine.rewind(4)
        engine.check_caches()
        assert np.array_equal([engine.decode_logits(t) for t in text[4:]], want[4:])


@pytest.mark.vulkan
def test_python_and_the_commands_say_so(tmp_path: Path, device: Device) -> None:
    path, text = loud(tmp_path / "loud.gguf"), tmp_path / "text.txt"
    text.write_text("abcdefghizklmnop" * 8)
    with LoadedModel(Engine.load(path, device, n_ctx=32, progress=False)) as model:
        runs: tuple[Callable[[], object], ...] = (
            lambda: model.logits("abzab"),
            lambda: model.perplexity("abcz" * 40),
            lambda: model.generate("abz", max_tokens=3),
        )
        for run in runs:
            with pytest.raises(VkbackError, match=OF_LOUD):
                run()
        session = model.session()
        with pytest.raises(VkbackError, match=OF_LOUD):
            session.generate("abz", max_tokens=3)
        assert np.isfinite(model.logits("abcab")).all()
        assert model.generate("abc", max_tokens=3).text == model.session().generate("abc", max_tokens=3).text
    for app, arguments in (
        (vkback_app, ["perplexity", "-m", str(path), "-f", str(text), "-c", "16"]),
        (vkbench.app, ["-m", str(path), "-p", "16", "-n", "0", "-r", "1", "--no-warmup", "--read-rate", "0", "--math-rate", "0"]),
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code != 0 and re.search(OF_LOUD, str(done.exception)), (done.output, done.exception)
        assert "perplexity " not in done.stdout and "pp16" not in done.stdout


def test_the_first_layer_with_the_cause_is_named() -> None:
    halves = {"numbers": [1.0, 65504.0], "nan": [1.0, np.nan], "beyond": [1.0, np.inf]}
    assert {judge(np.array(x, np.float16).view(np.uint16)) for x in halves.values()} == set(halves)
    assert judge(np.array([0, BEYOND_F16], np.uint16)) == judge(np.array([0x8000 | BEYOND_F16], np.uint16)) == "beyond"
    names = ["cache_k_l10", "cache_v_l10", "cache_k_l2", "cache_v_l2"]
    assert beyond_range(names, lambda n: "beyond" if n == "cache_v_l2" else "nan" if "10" in n else "numbers") == ["cache_v_l2"]
    assert beyond_range(names, lambda n: "nan" if "l2" in n else "beyond") == [], "what came in was no number already"
    assert beyond_range(names, lambda n: "numbers") == []
    assert overflow_message([("cache_k_l2", "Q8_0"), ("cache_v_l2", "F16")]) == (
        "layer 2: keys are beyond 8319008 and values are beyond 65504, the range of a cache of q8_0 and f16; load with --cache-type-k f32 "
        '--cache-type-v f32 (Python: cache_type_k="f32", cache_type_v="f32")'
    )


@pytest.mark.parametrize("profile", ["nvidia_h200_linux", "amd_rx_7900_xtx_radv", "broadcom_v3d_7_1_pi5"])
def test_an_f32_cache_is_planned_without_f16(profile: str, models: Callable[[str], Model]) -> None:
    opened, ctx = models("demo-dense"), planned_for(profile)
    for n in (1, 8, 64):
        schedule = plan(opened.graph(n, 256, head="last", cache=CacheTypes("F32", "F32")), ctx)
        readers = [d for d in schedule.dispatches() if d.op in ("FLASH_ATTN_EXT", "ATTN_DECODE")]
        assert {d.kernel.source for d in readers} <= {"attention/decode/attention.comp", "attention/prompt/prompt.comp"}
        assert {t.type for d in readers for t in (a.tensor for a in d.args[:4]) if t.kind == "state"} == {"F32"}


def test_padding_is_no_case_of_it() -> None:
    """The reference: a NaN that a token does not see is none of its scores."""
    q, k, v = (np.ones((2, 1, 8)), np.full((1, 4, 8), np.nan), np.ones((1, 4, 8)))
    k[0, 0] = 1.0
    node = Node("FLASH_ATTN_EXT", (Tensor("q", "F32", (2, 1, 8)),), (Tensor("y", "F32", (2, 8)),), {"scale": 1.0})
    (out,) = OPS["FLASH_ATTN_EXT"].reference([q, k, v, np.array([0, 1])], node.params)
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


@pytest.mark.vulkan
@pytest.mark.parametrize("cache_type", ["f16", "f32"])
def test_a_text_of_a_batch_beyond_the_range_ends_alone(cache_type: str, tmp_path: Path, device: Device) -> None:
    """Its error names sequence and layer, and no later text begins with its pages. An F32 cache holds it."""
    with Engine.load(loud(tmp_path / "loud.gguf"), device, n_ctx=96, cache_type_k=cache_type) as engine:
        quiet, beyond = tuple(range(4, 24)), (*range(4, 22), LOUD, 5, 6)
        alone, both = (
            served_by(engine, [Request(tokens, 6, stop_at_eos=False) for tokens in asked]) for asked in ([quiet], [quiet, beyond, quiet])
        )
    assert both[0] == both[2] == alone[0] and not isinstance(alone[0], VkbackError)
    if cache_type == "f32":
        assert not isinstance(both[1], VkbackError)
    else:
        assert re.search(
            r"^\[batch\] .*loud\.gguf: sequence \d: layer 0: keys are beyond 65504, the range of a cache of f16; load with", str(both[1])
        )


def served_by(engine: Engine, wanted: list[Request]) -> list[list[int] | Exception]:
    """What a batch makes of requests, and that its pages come back."""
    with Batch(engine, sequences=2, page=16, rows=320) as batch:
        found: dict[int, list[int] | Exception] = {batch.add(request): [] for request in wanted}
        for made in batch.run():
            text = found[made.id]
            if made.error is not None:
                found[made.id] = made.error
            elif isinstance(text, list):
                text += made.tokens
        known = len(batch.prefixes)
        batch.prefixes.clear()
        assert batch.pool.free == batch.pool.n_pages and known <= 1
        return list(found.values())
