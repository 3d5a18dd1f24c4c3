"""Whole layers in memory of the host, read there by the kernels: the bits, which layers, and the automatic choice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from cli_kit import call
from drafter_kit import N_CTX, text_of
from model_files import hollow
from test_host_memory import what_it_makes
from test_lora import several
from test_split import OPTIONS
from tiny_models import TINY, of_a_kind, tiny, with_mtp_block
from typer.testing import CliRunner

import vkback
from vkback.checks import OptionError
from vkback.cli import vkbench
from vkback.cli.main import app
from vkback.device import Capabilities, Device, OutOfDeviceMemory, memory
from vkback.engine.drafts import Drafts
from vkback.engine.engine import Engine
from vkback.engine.host_weights import (
    Forecast,
    HostRule,
    HostWeights,
    LayersOnDevice,
    Placement,
    fitting,
    forecast_line,
    host_weights,
    lookup_tables,
)
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler
from vkback.engine.weights import device_bytes
from vkback.graph import Recipe, Tensor
from vkback.models import Model
from vkback.models.synth import SHAPES, synthesize
from vkback.ops.lowering import LowerContext
from vkback.plan.planner import plan
from vkback.tuning.lookup import Tuning

HOW: dict[str, Any] = {"ctx": 64, "ubatch": 16, "act": "f32"}

OF_A_KIND = ("tiny-llama", "tiny-gemma3", "tiny-deepseek2", "tiny-qwen35")
"""Dense; windows and an embedding that is the output weight; a latent (MLA); recurrent states."""

ALL = of_a_kind(TINY, OF_A_KIND)

LAYER = re.compile(r"blk\.(\d+)\.")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layers") / "llama.gguf"
    synthesize("tiny-llama-Q8_0", path)
    return path


def in_host(engine: Engine) -> set[str]:
    """Names of weights that lie in memory of the host."""
    found = {name for name, ranges in engine.weights.items() if ranges.shards[0].arena.kind == "host"}
    assert found == engine.host_weights.names
    return found


def layers_of(names: Iterable[str]) -> set[int]:
    return {int(m[1]) for name in names if (m := LAYER.match(name))}


def makes(engine: Engine) -> list[np.ndarray]:
    """Bits of logits, texts, a batch, a text with drafts, and of a state that is taken up again."""
    found = what_it_makes(engine)
    engine.reset()
    engine.prompt([3, 5, 3, 5, 3])
    drafts = engine.possible_drafts(Drafts(pinned=4)) if engine.max_columns >= 4 else None
    found.append(np.array(list(engine.generate(5, 10, stop_at_eos=False, drafts=drafts))))
    state = engine.snapshot()
    engine.reset()
    engine.restore(state)
    return [*found, engine.decode_logits(7).view(np.uint32)]


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return len(found) == len(expected) and all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.vulkan
@pytest.mark.parametrize("name", ALL)
def test_layers_in_host_memory_have_the_bits_of_those_on_the_device(name: str, tmp_path: Path, device: Device) -> None:
    """As in llama.cpp: of N layers on the device the first is the output layer, then those from the last on."""
    synthesize(f"{name}-Q8_0", path := tmp_path / "model.gguf")
    how = LoadOptions(**HOW, spec_pinned=4)
    with Engine.open(path, device, how) as engine:
        assert not in_host(engine) and engine.host_weights.shown_layers == 99
        expected, layers = makes(engine), engine.model.hp.n_layer
        matrices = {name for name, t in engine.schedule().tensors().items() if t.kind == "weight" and len(t.shape) > 1}
    for n in (layers - 1, 0):
        with Engine.open(path, device, replace(how, n_gpu_layers=n)) as engine:
            there = in_host(engine)
            assert layers_of(there) == {layer for layer in layers_of(matrices) if layer < layers + 1 - n}
            output = "output.weight" if "output.weight" in matrices else "token_embd.weight"
            assert (output in there) == (n == 0) and (n or matrices <= there)
            assert engine.host_weights.shown_layers == n
            assert same(makes(engine), expected)


@pytest.mark.vulkan
@pytest.mark.parametrize("repack", ["host", "device"])
def test_adapters_stay_on_the_device(repack: Any, llama: Path, tmp_path: Path, device: Device) -> None:
    adapters = tuple(several(llama, tmp_path))
    for switched in (False, True):
        how = LoadOptions(**HOW, lora=adapters, lora_switched=switched, repack=repack)
        with Engine.open(llama, device, how) as engine:
            expected = what_it_makes(engine)
        with Engine.open(llama, device, replace(how, n_gpu_layers=1)) as engine:
            there = in_host(engine)
            assert there and not any("lora" in name for name in there)
            assert same(what_it_makes(engine), expected)
            if switched:
                engine.load_adapters(adapters[:1])
                one = what_it_makes(engine)
    with Engine.open(llama, device, LoadOptions(**HOW, lora=adapters[:1], lora_switched=True, repack=repack)) as engine:
        assert same(one, what_it_makes(engine))


@pytest.mark.vulkan
def test_layers_of_several_devices_are_counted_over_the_model(llama: Path, device: Device) -> None:
    with Engine.open(llama, device, OPTIONS) as engine:
        expected = engine.prompt_logits(list(range(40)))
    halves = replace(OPTIONS, tensor_split=(2, 1))
    wanted: tuple[tuple[LayersOnDevice, tuple[bool, bool]], ...] = ((3, (True, False)), (1, (True, True)), ("all", (False, False)))
    for n, there in wanted:
        with Device.open(device.index) as second, Engine.open(llama, [device, second], replace(halves, n_gpu_layers=n)) as engine:
            assert tuple("weights in host memory" in each.memory_use().purposes for each in (device, second)) == there
            assert np.array_equal(engine.prompt_logits(list(range(40))), expected)


@pytest.mark.vulkan
def test_what_drafts_lies_where_it_is_best(llama: Path, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's own block for drafts counts to the output layer; a draft model is placed by itself, whatever was asked of its target."""
    path = with_mtp_block(tiny("qwen35", tmp_path), like=1)
    how = LoadOptions(ctx=N_CTX, act="f32", spec_type="draft-mtp", spec_pinned=4)
    texts = []
    for n in (99, 1, 0):
        with Engine.open(path, device, replace(how, n_gpu_layers=n)) as engine:
            block = {name for name in in_host(engine) if name.startswith(f"blk.{engine.model.hp.n_layer}.")}
            assert bool(block) == (n == 0)
            texts.append(text_of(engine, Sampler(), Drafts(3, pinned=4, model=True)))
    assert texts[0] == texts[1] == texts[2]
    opened: list[Engine] = []
    open_engine = Engine.open

    def noted(*args: Any, **more: Any) -> Engine:
        opened.append(open_engine(*args, **more))
        return opened[-1]

    monkeypatch.setattr(Engine, "open", noted)
    with vkback.load(llama, device.index, 64, model_draft=llama, n_gpu_layers=0):
        assert [each.host_weights.shown_layers for each in opened] == [0, 99]


@pytest.fixture
def small(llama: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The same chip, with memory for about two thirds of the weights of llama."""
    with Device.open(device.index) as alone, Engine.open(llama, alone, LoadOptions(**HOW)):  # other tests may have left memory on `device`
        weights, _ = alone.memory_use().purposes["weights"]
        others = alone.memory_use().nbytes - weights
    monkeypatch.setenv("VKBACK_DEVICE_MB", str((others + 0.75 * weights) / 1e6))
    with Device.open(device.index) as opened:
        yield opened


@pytest.mark.vulkan
def test_a_dense_model_larger_than_the_memory_gets_its_first_layers_to_the_host(
    llama: Path, device: Device, small: Device, caplog: pytest.LogCaptureFixture
) -> None:
    def made(engine: Engine) -> list[np.ndarray]:
        return [engine.prompt_logits(list(range(40))), np.array(list(engine.generate(5, 8, stop_at_eos=False)))]

    with Engine.open(llama, device, LoadOptions(**HOW)) as engine:
        expected = made(engine)
    assert not caplog.records
    with Engine.open(llama, small, LoadOptions(**HOW)) as engine:
        first = engine.host_weights.rule.layers
        assert 0 < first <= 3 and in_host(engine)
        assert same(made(engine), expected)
    (record,) = caplog.records
    said = (
        rf".*gguf does not fit the [\d.]+ MiB that .* has left: the first {first} of 3 layers in host memory \([\d.]+ MiB\), forecast "
        r"about [\d.]+ t/s \(.*\)\. -ngl N keeps N layers on the device$"
    )
    assert re.match(said, record.getMessage())
    said = r"^memory check failed: .* KiB free, for weights\. -ngl N keeps the weights of N layers there, and -ngl auto as many as fit"
    with pytest.raises(OutOfDeviceMemory, match=said):
        Engine.open(llama, small, LoadOptions(**HOW, n_gpu_layers="all"))
    with pytest.raises(OutOfDeviceMemory):
        Engine.open(llama, small, LoadOptions(**HOW, n_cpu_moe=0))


@pytest.mark.vulkan
def test_a_host_without_memory_refuses_before_anything_is_taken(llama: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    before = device.live_objects()
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(OutOfDeviceMemory, match=r"^\[memory\] weights in host memory: [\d.]+ KiB of the host's memory asked, 1000 B are"):
        Engine.open(llama, device, LoadOptions(**HOW, n_gpu_layers=1))
    assert device.live_objects() == before


def weight(*sources: str, shape: tuple[int, ...] = (32, 32)) -> Tensor:
    return Tensor("+".join(sources), "Q8_0", shape, "weight", Recipe("plain", sources))


def test_a_rule_tells_weights_by_their_layers() -> None:
    tables = frozenset({"token_embd.weight"})
    rule = HostRule(32, tables, layers=13)
    assert weight("blk.12.attn_q.weight", "blk.12.attn_k.weight") in rule and weight("blk.13.attn_q.weight") not in rule
    assert weight("token_embd.weight") in rule and weight("output.weight") not in rule
    assert weight("blk.1.attn_norm.weight", shape=(32,)) not in rule and weight("blk.1.attn_q.weight.lora_a") not in rule
    assert weight("blk.32.nextn.eh_proj.weight") not in rule and weight("blk.32.nextn.eh_proj.weight") in HostRule(32, tables, layers=33)
    assert weight("token_embd.weight") not in HostRule(32, layers=32) and weight("token_embd.weight") in HostRule(32, layers=33), "tied"
    assert weight("token_embd.weight") in HostRule(32, tables, lookups=True)
    assert weight("blk.9.ffn_down_exps.weight", shape=(4, 32, 32)) in HostRule(32, experts=10)
    assert weight("blk.9.ffn_down_shexp.weight") not in HostRule(32, experts=10)
    assert (rule.on_device, rule.cached, HostRule(32, layers=3, experts=9).cached) == (20, 13, 9)


def test_what_may_go_to_the_host_goes_in_the_order_of_its_price() -> None:
    rule = HostRule(2, frozenset({"token_embd.weight"}))

    def order(asked: Placement, *with_experts: int) -> list[tuple[bool, int, int]]:
        return [(each.lookups, each.experts, each.layers) for each in asked.choices(rule, with_experts)]

    nothing = (False, 0, 0)
    assert order(Placement()) == [nothing, (True, 0, 0), (True, 0, 1), (True, 0, 2), (True, 0, 3)]
    assert order(Placement(), 0, 1) == [nothing, (True, 0, 0), (True, 1, 0), (True, 2, 0), (True, 2, 1), (True, 2, 2), (True, 2, 3)]
    assert order(Placement("all"), 0, 1) == [nothing, (False, 1, 0), (False, 2, 0)]
    assert order(Placement(2), 0, 1) == [(False, 0, 1), (False, 1, 1), (False, 2, 1)] and order(Placement(2, 1), 0, 1) == [(False, 1, 1)]
    assert order(Placement("auto", 1), 0, 1)[:3] == [(False, 1, 0), (True, 1, 0), (True, 1, 1)]
    assert order(Placement(99, 0), 0, 1) == [nothing]


def test_options_are_read_as_llama_cpp_reads_them() -> None:
    def asked(**given: Any) -> Placement:
        return LoadOptions(**given).placement

    assert asked() == asked(n_gpu_layers="auto") == asked(n_gpu_layers=-1) == Placement("auto", None)
    assert asked(n_gpu_layers="12") == asked(n_gpu_layers=np.int64(12)) == Placement(12, None) and asked(n_gpu_layers=0) == Placement(
        0, None
    )
    assert asked(n_cpu_moe=3) == Placement("all", 3) and asked(n_cpu_moe=3, n_gpu_layers="auto") == Placement("auto", 3)
    for wrong in ("many", -2, 1.5, True, "-3", ""):
        with pytest.raises(OptionError, match=r"n_gpu_layers is .*, expected a whole number, 0 or more, auto or all"):
            asked(n_gpu_layers=wrong)


def placed(name: str, path: Path, card: str, size: int) -> tuple[HostWeights, Forecast, int]:
    """Where weights of a model of 4096 tokens of context lie on a recorded card with so many bytes free; the forecast, where it reads 800
    GB/s of its own memory and 25 of the host's; bytes of weights on the device."""
    caps, model = Capabilities.from_profile(card), Model.open(hollow(name, path))
    ctx = LowerContext(caps, Tuning.for_device(caps))
    plans = [plan(model.graph(n, 4096, head="last"), ctx) for n in (1, 512)]
    tensors = {t.name: t for each in plans for t in each.tensors().values()}
    weights = {name: t for name, t in tensors.items() if t.kind == "weight"}
    caches = sum(2 * int(np.prod(t.shape)) for t in tensors.values() if t.kind == "state")
    rule = HostRule(model.hp.n_layer, lookup_tables(model.whole_graphs()))
    found = fitting(weights, rule, Placement(), caps, size, plans, caches)
    whole = sum(device_bytes(w, caps) for w in weights.values())
    if found.rule.layers:
        fewer = host_weights(weights, replace(found.rule, layers=found.rule.layers - 1), caps)
        assert whole - found.nbytes + caches <= size < whole - fewer.nbytes + caches + sum(p.activation_bytes for p in plans) + (1 << 30)
    return found, Forecast.of(plans[0], found.names, 800.0, 25.0), whole - found.nbytes


LLAMA_70B = {"llama-70b": replace(SHAPES["llama-8b"], n_layer=80, n_embd=8192, n_ff=28672, n_head=64)}


def test_a_70b_on_a_card_of_24_gb(tmp_path: Path) -> None:
    """Of 37.6 GiB about 21 stay, which take 28 ms a token, and the rest, read at 25 GB/s, 0.7 s."""
    with patch.dict(SHAPES, LLAMA_70B):
        there, forecast, nbytes = placed("llama-70b-Q4_K_S", tmp_path / "model.gguf", "amd_rx_7900_xtx_radv", 24 << 30)
    assert 20 << 30 < nbytes < 24 << 30
    assert 30 < there.rule.layers < 45 and there.rule.layers + there.rule.on_device == 81
    assert (
        layers_of(there.names) == set(range(there.rule.layers))
        and "token_embd.weight" in there.names
        and "output.weight" not in there.names
    )
    assert 1 < forecast.tokens_per_s < 2
    line = forecast_line(there, forecast, "model.gguf does not fit")
    assert line.startswith(f"model.gguf does not fit: the first {there.rule.layers} of 80 layers in host memory (1"), line


def test_experts_go_before_layers_and_tables_before_both(tmp_path: Path) -> None:
    experts, forecast, _ = placed("qwen3moe-30b-a3b-Q8_0:24", tmp_path / "moe.gguf", "nvidia_rtx_2070_linux", 8 << 30)
    assert 0 < experts.rule.experts <= 24 and not experts.rule.layers and experts.rule.lookups and 0 < forecast.host < forecast.own
    line = forecast_line(experts, forecast, "x")
    assert "experts of " in line and "-ngl" not in line
    tables, forecast, nbytes = placed("gemma3n-e4b-Q8_0", tmp_path / "gemma.gguf", "nvidia_rtx_2070_linux", 6 << 30)
    assert tables.names == {"per_layer_token_embd.weight"} and tables.rule.lookups and forecast.host < forecast.own / 1000
    assert forecast_line(tables, forecast, "x").startswith("x: embedding tables in host memory")
    assert tables.nbytes > 2 << 30 and nbytes < 6 << 30


@pytest.mark.vulkan
def test_commands_take_the_option_of_llama_cpp(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ["run", "-m", str(llama), "--tokens", "1,2,3", "-n", "2", "--ctx", "64", "--json"]
    made = [CliRunner().invoke(app, [*run, *option]) for option in ([], ["-ngl", "99"], ["--gpu-layers", "2"], ["--n-gpu-layers=0"])]
    assert [each.exit_code for each in made] == [0] * 4
    assert len({str(json.loads(each.stdout)["tokens"]) for each in made}) == 1
    (tmp_path / "ids").write_text(",".join(map(str, range(1, 33))), encoding="utf-8")
    score = ["perplexity", "-m", str(llama), "--tokens", str(tmp_path / "ids"), "-c", "16", "--json", "--act", "f32"]
    values = [json.loads(CliRunner().invoke(app, [*score, *option]).stdout)["perplexity"] for option in ([], ["-ngl", "1"])]
    assert values[0] == values[1]
    with vkback.load(llama, ctx=64, n_gpu_layers=3) as model:
        assert model.engine.host_weights.rule.layers == 1


@pytest.mark.vulkan
def test_vkbench_shows_the_layers_on_the_device(llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-m", str(llama), "-p", "0", "-n", "2", "-r", "1"]
    assert call(monkeypatch, vkbench.main, *options, "-ngl", "0-2*2,99", "-o", "json") == 2
    assert "-ngl 0-2*2: the range does not go up" in capsys.readouterr().err
    assert call(monkeypatch, vkbench.main, *options, "-ngl", "0,2,99,auto", "-o", "json") == 0
    said = capsys.readouterr()
    assert [row["n_gpu_layers"] for row in json.loads(said.out)] == [0, 2, 99, 99] and "means nothing" not in said.err
    assert call(monkeypatch, vkbench.main, *options, "--n-gpu-layers", "2") == 0
    head, _, row = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = dict(zip(*([cell.strip() for cell in line.split("|")] for line in (head, row)), strict=True))
    assert cells["ngl"] == "2"
    batch = ["batch", "-m", str(llama), "-npp", "8", "-ntg", "2", "-npl", "2", "-r", "1", "-ngl", "2", "-o", "jsonl"]
    assert call(monkeypatch, vkbench.main, *batch) == 0
    assert json.loads(capsys.readouterr().out)["n_gpu_layers"] == 2
