"""Experts in memory of the host, read there by the kernels: the bits, the automatic choice, and what is said when nothing fits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_kit import call
from test_server import Served
from tiny_models import TINY, of_a_kind
from typer.testing import CliRunner

import vkback
from vkback.checks import OptionError
from vkback.cli import vkbench, vkbench_hosts
from vkback.cli.main import app
from vkback.device import Capabilities, Device, FeatureMissing, HostPages, OutOfDeviceMemory, memory
from vkback.device.host_memory import LimitError, available_bytes, device_limit
from vkback.device.memory import MemoryPool
from vkback.engine.batch.batch import Batch, Request
from vkback.engine.engine import Engine
from vkback.engine.expert_cache import ExpertCacheError, ExpertCounts
from vkback.engine.host_weights import Forecast
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler
from vkback.engine.weights import Repack
from vkback.graph import Recipe, Tensor
from vkback.models import Model
from vkback.models.synth import SHAPES, synthesize
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.lowering import LowerContext
from vkback.paths import builtin_model
from vkback.plan.passes.experts import layer_of
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.server.app import Limits
from vkback.shader import Variant
from vkback.tuning.lookup import Tuning

TOKENS = np.random.default_rng(7).integers(0, 300, 40).tolist()
HOW: dict[str, Any] = {"ctx": 64, "ubatch": 16, "act": "f32"}


@pytest.fixture(scope="module")
def qwen3moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "qwen3moe.gguf"
    synthesize("tiny-qwen3moe-Q8_0", path)
    return path


def what_it_makes(engine: Engine) -> list[np.ndarray]:
    """Bits of logits, a text and texts of a batch."""
    found = [engine.prompt_logits(TOKENS).view(np.uint32), engine.decode_logits(5).view(np.uint32)]
    found.append(np.array(list(engine.generate(TOKENS[3], 8, stop_at_eos=False))))
    engine.reset()
    with Batch(engine, sequences=3) as batch:
        ids = [batch.add(Request(tuple(TOKENS[i : i + 9]), 5, Sampler(), stop_at_eos=False)) for i in range(3)]
        updates = batch.run()
        found += [np.array([token for update in updates if update.id == id for token in update.tokens]) for id in ids]
    return found


@pytest.mark.vulkan
@pytest.mark.parametrize("repack", ["host", "device"])
def test_experts_in_host_memory_have_the_bits_of_those_on_the_device(qwen3moe: Path, device: Device, repack: Repack) -> None:
    with Engine.open(qwen3moe, device, LoadOptions(**HOW, repack=repack)) as engine:
        assert not engine.host_weights.names
        expected = what_it_makes(engine)
    for options, layers in (({"n_cpu_moe": 2}, 2), ({"cpu_moe": True}, 3)):
        with Engine.open(qwen3moe, device, LoadOptions(**HOW, repack=repack, **options)) as engine:
            assert engine.host_weights.expert_layers == layers and len(engine.host_weights.with_experts) == 3
            there = {name for name, found in engine.weights.items() if found.shards[0].arena.kind == "host"}
            assert there == engine.host_weights.names and len(there) >= 2 * layers
            assert all(name.startswith("blk.") and "exps" in name for name in there)
            found = what_it_makes(engine)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def small(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The same chip, of whose memory so much may be used that experts of some layers of qwen3moe do not fit."""
    monkeypatch.setenv("VKBACK_DEVICE_MB", "0.95")
    with Device.open(device.index) as opened:
        yield opened


@pytest.mark.vulkan
def test_a_model_larger_than_the_memory_gets_its_experts_to_the_host(
    qwen3moe: Path, device: Device, small: Device, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine.open(qwen3moe, device, LoadOptions(**HOW)) as engine:
        expected = engine.prompt_logits(TOKENS), list(engine.generate(TOKENS[3], 8, stop_at_eos=False))
        use = device.memory_use().nbytes
    assert not caplog.records and use > small.free_memory()
    with Engine.open(qwen3moe, small, LoadOptions(**HOW)) as engine:
        assert 0 < engine.host_weights.expert_layers <= 3
        found = engine.prompt_logits(TOKENS), list(engine.generate(TOKENS[3], 8, stop_at_eos=False))
    assert np.array_equal(found[0], expected[0]) and found[1] == expected[1]
    (record,) = caplog.records
    said = r".*gguf does not fit the [\d.]+ MiB that .* has left: experts of 1 of 3 layers in host memory \([\d.]+ MiB\), forecast about "
    assert re.match(said, record.getMessage())
    with pytest.raises(OutOfDeviceMemory):
        Engine.open(qwen3moe, small, LoadOptions(**HOW, n_cpu_moe=0))


@pytest.mark.vulkan
def test_layers_of_several_devices_have_their_experts_in_host_memory(qwen3moe: Path, device: Device) -> None:
    with Engine.open(qwen3moe, device, LoadOptions(**HOW)) as engine:
        expected = engine.prompt_logits(TOKENS)
    halves = LoadOptions(**HOW, tensor_split=(1, 1), cpu_moe=True)
    with Device.open(device.index) as second, Engine.open(qwen3moe, [device, second], halves) as engine:
        purposes = [each.memory_use().purposes for each in (device, second)]
        found = engine.prompt_logits(TOKENS)
    assert all("weights in host memory" in each for each in purposes) and np.array_equal(found, expected)


@pytest.mark.vulkan
@pytest.mark.parametrize("slots", [3, 5])
def test_each_of_several_devices_keeps_a_cache_of_its_experts(slots: int, qwen3moe: Path, device: Device) -> None:
    """Of experts that a token uses alone, and of more. Texts beside each other share them."""

    def made(engine: Engine) -> list[np.ndarray]:
        found = [engine.prompt_logits(TOKENS).view(np.uint32), engine.decode_logits(5).view(np.uint32)]
        return [*found, np.array(list(engine.generate(TOKENS[3], 8, stop_at_eos=False)))]

    with Engine.open(qwen3moe, device, LoadOptions(**HOW)) as engine:
        expected = made(engine)
    how = LoadOptions(**HOW, tensor_split=(1, 1), cpu_moe=True, expert_cache=slots)
    with Device.open(device.index) as second, Engine.open(qwen3moe, [device, second], how) as engine:
        assert all("cache of experts" in each.memory_use().purposes for each in (device, second)) and engine.caches_experts
        assert all(np.array_equal(a, b) for a, b in zip(made(engine), expected, strict=True))
        engine.reset()
        before = engine.count_experts()
        list(engine.generate(TOKENS[3], 8, stop_at_eos=False))
        counts = engine.count_experts() - before
        assert counts.wanted >= 8 * 3 * 3 and 0 < counts.found < counts.wanted
        engine.resize(128)
        assert all(np.array_equal(a, b) for a, b in zip(made(engine), expected, strict=True))
        engine.reset()
        texts = [TOKENS[i : i + 9] for i in range(3)]
        with Engine.open(qwen3moe, device, LoadOptions(**{**HOW, "ctx": 128})) as one:
            alone = []
            for text in texts:
                one.reset()
                one.prompt(text[:-1])
                alone.append(list(one.generate(text[-1], 12, stop_at_eos=False)))
        with engine.beside() as other:
            assert other.caches_experts and any("EXPERT_CACHE" in d.op for d in other.schedule("decode").dispatches())
            for text, each in zip(texts, (engine, other, engine), strict=True):
                each.reset()
                each.prompt(text[:-1])
            both = [engine.generate(texts[2][-1], 12, stop_at_eos=False), other.generate(texts[1][-1], 12, stop_at_eos=False)]
            turns = [[next(text) for text in both] for _ in range(12)]
        assert [list(text) for text in zip(*turns, strict=True)] == [alone[2], alone[1]]


@pytest.mark.vulkan
def test_a_device_that_imports_nothing_takes_host_memory_of_its_driver(
    qwen3moe: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: MemoryPool, purpose: str, pages: HostPages) -> None:
        raise FeatureMissing("no import")

    with Engine.open(qwen3moe, device, LoadOptions(**HOW)) as engine:
        expected = engine.prompt_logits(TOKENS)
    monkeypatch.setattr(MemoryPool, "imported", refused)
    with Engine.open(qwen3moe, device, LoadOptions(**HOW, cpu_moe=True)) as engine:
        assert np.array_equal(engine.prompt_logits(TOKENS), expected)


@pytest.mark.vulkan
def test_a_host_without_memory_refuses_before_anything_is_taken(qwen3moe: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    before = device.live_objects()
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(
        OutOfDeviceMemory, match=r"^\[memory\] weights in host memory: [\d.]+ KiB of the host's memory asked, 1000 B are available\. End"
    ):
        Engine.open(qwen3moe, device, LoadOptions(**HOW, cpu_moe=True))
    assert device.live_objects() == before


FEW = ("tiny-qwen3moe", "tiny-gpt-oss", "tiny-qwen35moe")
"""Plain experts, experts with biases, a shared expert beside them and recurrent states."""

WITH_EXPERTS = of_a_kind([name for name in TINY if SHAPES[name].n_expert], FEW)


@pytest.mark.vulkan
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_cache_of_experts_changes_no_bit(name: str, tmp_path: Path, device: Device) -> None:
    """A cache of as many experts as a token uses: every token makes room in every layer, and steps of several columns choose more experts
    than there are slots. One of all experts: each is copied once."""
    synthesize(f"{name}-Q8_0", path := tmp_path / "model.gguf")
    used, experts = SHAPES[name].n_expert_used, SHAPES[name].n_expert
    with Engine.open(path, device, LoadOptions(**HOW)) as engine:
        expected = what_it_makes(engine)
        assert not engine.caches_experts and engine.count_experts() == ExpertCounts()
    found = {}
    for slots in (used, experts):
        with Engine.open(path, device, LoadOptions(**HOW, cpu_moe=True, expert_cache=slots)) as engine:
            made = what_it_makes(engine)
            found[slots] = engine.count_experts()
            layers = len(engine.host_weights.with_experts)
            engine.reset()
            list(engine.generate(TOKENS[3], 8, stop_at_eos=False))
            assert (engine.count_experts() - found[slots]).wanted >= 8 * used * layers
        assert all(np.array_equal(a, b) for a, b in zip(made, expected, strict=True))
    tiny, whole = found[used], found[experts]
    assert tiny.found < tiny.wanted and whole.wanted - whole.found <= experts * layers
    assert tiny.share <= whole.share or used == experts


def test_steps_of_several_columns_take_the_cache_where_it_holds_their_choices(qwen3moe: Path) -> None:
    """Those of two columns choose six experts, which fit six slots; those of four read the host's memory, but for the last layer, where the
    last token alone is needed."""
    caps, model = Capabilities.from_profile("nvidia_h200_linux"), Model.open(qwen3moe)
    counts = {}
    for slots in (0, 5, 6):
        ctx = LowerContext(caps, Tuning.for_device(caps), host_layers=3, expert_slots=slots)
        plans = [plan(model.graph(n, 64, head="last"), ctx) for n in (1, 2, 4)]
        counts[slots] = [[d.op for d in each.dispatches()].count("EXPERT_CACHE") for each in plans]
    assert counts == {0: [0, 0, 0], 5: [3, 1, 1], 6: [3, 3, 1]}
    ctx = LowerContext(caps, Tuning.for_device(caps), host_layers=2, expert_slots=5)
    assert [d.op for d in plan(model.graph(1, 64, head="last"), ctx).dispatches()].count("EXPERT_CACHE") == 2  # of three layers


@pytest.mark.vulkan
def test_a_text_and_a_command_tell_how_often_experts_were_there(qwen3moe: Path, device: Device) -> None:
    with vkback.load(qwen3moe, device.index, ctx=64, act="f32", cpu_moe=True, expert_cache=5) as model:
        ids = [1, 2, 3]
        timings = [model.generate(ids, max_tokens=6, temperature=0).timings for _ in range(2)]
    for each in timings:
        assert 0 < each.experts_found <= each.experts_wanted and each.experts_wanted % 9 == 0
    assert timings[0].experts_wanted >= 6 * 9
    run = CliRunner().invoke(
        app, ["run", "-m", str(qwen3moe), "--tokens", "1,2,3", "-n", "4", "--ctx", "64", "-cmoe", "--expert-cache", "4"]
    )
    assert run.exit_code == 0 and re.search(r"^experts +\d+ wanted, \d+ in the cache \(\d+%\)$", run.output, re.M), run.output


@pytest.mark.vulkan
@pytest.mark.parametrize("parallel", [1, 2])
def test_a_server_tells_how_often_experts_were_there(parallel: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    how = LoadOptions(ctx=128, act="f32", cpu_moe=True, expert_cache=16)
    monkeypatch.setattr(Engine, "load", lambda path, device, **_: Engine.open(path, device, how))
    served = Served(device, Limits(), parallel=parallel, path=builtin_model("demo-moe"))
    try:
        reply = served.text(max_tokens=6, temperature=0, ignore_eos=True)
        lines = served.client.get("/metrics").text.splitlines()
    finally:
        served.close()
    told = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}
    wanted, found = told["vkback_experts_wanted_total"], told["vkback_experts_found_total"]
    assert wanted > found > 0
    if parallel == 1:
        assert 0 < reply["timings"]["experts_found"] <= reply["timings"]["experts_wanted"] <= wanted


@pytest.mark.vulkan
def test_a_cache_that_holds_less_than_a_token_uses_is_refused(qwen3moe: Path, device: Device) -> None:
    before = device.live_objects()
    with pytest.raises(
        ExpertCacheError, match=r"^\[experts\] .*qwen3moe\.gguf: a cache of 2 experts a layer .* holds less than a token uses"
    ):
        Engine.open(qwen3moe, device, LoadOptions(**HOW, cpu_moe=True, expert_cache=2))
    assert device.live_objects() == before
    how = LoadOptions(**HOW, tensor_split=(1, 1), cpu_moe=True, expert_cache=2)
    with Device.open(device.index) as second, pytest.raises(ExpertCacheError, match=r"^\[experts\] .* a cache of 2 experts a layer"):
        Engine.open(qwen3moe, [device, second], how)
    assert device.live_objects() == before


def test_layers_are_told_by_the_names_of_their_tensors() -> None:
    def weight(*sources: str, shape: tuple[int, ...] = (4, 32, 32)) -> Tensor:
        return Tensor("w", "Q8_0", shape, "weight", Recipe("interleave", sources))

    assert layer_of(weight("blk.12.ffn_gate_exps.weight", "blk.12.ffn_up_exps.weight")) == 12
    assert layer_of(weight("blk.3.ffn_down_exps.weight")) == 3 and layer_of(weight("blk.3.ffn_gate_up_exps.weight")) == 3
    assert layer_of(weight("blk.3.ffn_down_shexp.weight", shape=(32, 32))) is None
    assert layer_of(weight("blk.3.ffn_down_exps.bias", shape=(128,))) is None


def test_the_forecast_counts_bytes() -> None:
    def product(name: str, nbytes: int) -> Dispatch:
        return Dispatch(
            Variant("x"), (Arg(Tensor(name, "Q8_0", (2, 32, 32), "weight")),), b"", (1, 1, 1), "LINEAR", name, weight_bytes=nbytes
        )

    mib = 1 << 20
    schedule = Schedule([[product("dense", 600 * mib)], [product("experts", 400 * mib)]])
    all_own = Forecast.of(schedule, frozenset(), 4000.0, 50.0)
    assert all_own.tokens_per_s == pytest.approx(4e12 / (1000 * mib))
    assert all_own.text == "about 3815 t/s (a token reads 1000.00 MiB of its own memory at 4000 GB/s)"
    there = Forecast.of(schedule, frozenset({"experts"}), 4000.0, 50.0)
    assert there.tokens_per_s == pytest.approx(1e9 / (600 * mib / 4000 + 400 * mib / 50))
    assert there.text == "about 117 t/s (a token reads 600.00 MiB of its own memory at 4000 GB/s and 400.00 MiB of the host's at 50)"
    slow = Forecast.of(schedule, frozenset({"experts"}), 40.0, 50.0)
    assert slow.tokens_per_s == pytest.approx(40e9 / (1000 * mib))  # the host's memory is no faster than the device's own


def test_wrong_values_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"n_cpu_moe is -1 \(int\), expected a whole number, 0 or more, or None"):
        LoadOptions(n_cpu_moe=-1)
    with pytest.raises(OptionError, match=r"n_cpu_moe is 3 \(int\), expected None with cpu_moe"):
        LoadOptions(n_cpu_moe=3, cpu_moe=True)
    for text in ("many", "0", "-3", "nan", "inf"):
        monkeypatch.setenv("VKBACK_DEVICE_MB", text)
        with pytest.raises(LimitError, match=rf"VKBACK_DEVICE_MB is '{text}'; expected a number of megabytes above 0"):
            device_limit()
    monkeypatch.setenv("VKBACK_DEVICE_MB", "1.5")
    assert device_limit() == 1500000


def test_the_host_tells_what_is_available() -> None:
    found = available_bytes()
    assert found is None or found > 1 << 20


@pytest.mark.vulkan
def test_commands_take_the_options_of_llama_cpp(qwen3moe: Path) -> None:
    for option in (["-ncmoe", "1"], ["--n-cpu-moe", "3"], ["-cmoe"], ["--cpu-moe"]):
        run = CliRunner().invoke(app, ["run", "-m", str(qwen3moe), "--tokens", "1,2,3", "-n", "2", "--ctx", "64", *option])
        assert run.exit_code == 0, run.output


@pytest.mark.vulkan
def test_vkbench_puts_experts_in_host_memory(qwen3moe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-p", "0", "-n", "2", "-r", "1", "-o", "json"]
    for option, layers in (["-ncmoe", "1"], 1), (["--n-cpu-moe=1"], 1), ([], 0):
        assert call(monkeypatch, vkbench.main, "-m", str(qwen3moe), *options, *option) == 0
        said = capsys.readouterr()
        assert [row["n_cpu_moe"] for row in json.loads(said.out)] == [layers] and "means nothing" not in said.err


@pytest.mark.vulkan
def test_workers_put_experts_in_host_memory(qwen3moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker is sent has all that says how a model is loaded."""
    sent: list[Any] = []

    class Listed:
        def __init__(self, units: list[Any], *_: object) -> None:
            sent.extend(units)

        def run(self, where: object) -> list[Any]:
            return []

    monkeypatch.setattr(vkbench_hosts, "ListedWork", Listed)
    monkeypatch.setattr(vkbench, "workers_of", lambda *_: object())
    options = ["-p", "0", "-n", "2", "-r", "1", "-ncmoe", "1", "--expert-cache", "4"]
    assert call(monkeypatch, vkbench.main, "-m", str(qwen3moe), *options) == 0
    (unit,) = sent
    with ExitStack() as stack:
        loaded: list[Any] = []

        def kept(key: object, load: Callable[[ExitStack], tuple[Any, ...]]) -> tuple[Any, ...]:
            loaded[:] = load(stack)
            return tuple(loaded)

        station: Any = SimpleNamespace(device="", kept=kept)
        found = vkbench_hosts.run_test(station, json.loads(json.dumps(unit.args)), lambda message: None)
        assert found["n_cpu_moe"] == 1 and loaded[0].caches_experts
