"""Layers of a model on two devices: two logical devices of the same chip, so that texts have the bits of one device."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cli_kit import call
from device_kit import driver_of, lose
from processes import run_program
from tiny_models import TINY, of_a_kind

import vkback
from vkback.api import GenerateOptions
from vkback.cli import main, vkbench
from vkback.device import Device, DeviceError, DeviceLost, FeatureMissing, HostPages, list_devices
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler
from vkback.engine.split.layers import SplitError
from vkback.graph import Part, cuttable
from vkback.models import Model
from vkback.models.synth import synthesize

TOKENS = np.random.default_rng(5).integers(0, 300, 40).tolist()
OPTIONS = LoadOptions(ctx=64, ubatch=16, act="f32")
HALVES = LoadOptions(ctx=64, ubatch=16, act="f32", tensor_split=(1, 1))

OF_A_KIND = ("tiny-llama", "tiny-gpt-oss", "tiny-gemma3", "tiny-gemma4-ple", "tiny-lfm2", "tiny-qwen35moe")
"""Dense, experts with sinks, windows, several values that cross and layers that read others' rows, short convolutions, a delta net."""

UNCUT = ("tiny-gemma3n",)
"""Four streams that all layers have, and values for all of them: no one row crosses."""

ALL = of_a_kind([name for name in TINY if name not in UNCUT], OF_A_KIND)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("split") / "llama.gguf"
    synthesize("tiny-llama-Q8_0", path)
    return path


@pytest.fixture
def second(device: Device) -> Iterator[Device]:
    """The same chip once more."""
    with Device.open(device.index) as opened:
        yield opened


@contextmanager
def stopped(device: Device) -> Iterator[None]:
    """The driver says that it has lost the device, which ends meanwhile what is in flight."""
    with pytest.MonkeyPatch.context() as patch:
        for call in ("vkWaitSemaphores", "vkGetSemaphoreCounterValue", "vkQueueSubmit"):
            patch.setattr(driver_of(device).fn, call, lambda *_: -4)  # VK_ERROR_DEVICE_LOST
        yield
    device.wait_idle()


def what_it_makes(engine: Engine) -> tuple[list[list[int]], list[np.ndarray]]:
    """Texts, and bits of logits, of an engine: prompts in pieces, greedy and drawn tokens, a state that is saved and restored."""
    engine.prompt(TOKENS[:30])
    texts = [list(engine.generate(TOKENS[30], 12, stop_at_eos=False))]
    state = engine.snapshot()
    texts.append(list(engine.generate(texts[0][-1], 6, sampler=Sampler(temp=1.0, seed=3), stop_at_eos=False)))
    engine.reset()
    logits = [engine.prompt_logits(TOKENS), engine.decode_logits(5)]
    engine.restore(state)
    texts.append(list(engine.generate(texts[0][-1], 6, sampler=Sampler(temp=1.0, seed=3), stop_at_eos=False)))
    assert texts[1] == texts[2]
    return texts, [each.view(np.uint32) for each in logits]


@pytest.mark.vulkan
@pytest.mark.parametrize("name", ALL)
def test_two_devices_make_the_bits_of_one(name: str, tmp_path: Path, device: Device, second: Device) -> None:
    synthesize(f"{name}-Q8_0", path := tmp_path / "model.gguf")
    with Engine.open(path, device, OPTIONS) as engine:
        expected = what_it_makes(engine)
    with Engine.open(path, [device, second], HALVES) as engine:
        assert [part.begins for part in engine.parts] == [True, False] and len(engine.devices) == 2
        found = what_it_makes(engine)
    assert found[0] == expected[0]
    assert all(np.array_equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.vulkan
def test_three_devices_whose_stages_are_barrier_free(llama: Path, device: Device, second: Device, barrier_free: None) -> None:
    """Rows that cross are spun on: they are there before it begins."""
    with Engine.open(llama, device, OPTIONS) as engine:
        expected = what_it_makes(engine)
    how = LoadOptions(ctx=64, ubatch=16, act="f32", tensor_split=(1, 1, 1))
    with Device.open(device.index) as third, Engine.open(llama, [device, second, third], how) as engine:
        stages = engine.schedule().stages
        assert engine.schedule().barrier_free and any(("SPINS", 1) in d.kernel.defines for d in stages[1]), "behind the border"
        found = what_it_makes(engine)
        assert engine.schedule().barrier_free, "a stage has timed out, or made other bits than with barriers"
    assert found[0] == expected[0]
    assert all(np.array_equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.vulkan
@pytest.mark.parametrize("shared", [True, False])
def test_three_devices_with_and_without_memory_that_all_import(
    shared: bool, llama: Path, device: Device, second: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Device, purpose: str, pages: HostPages) -> None:
        raise FeatureMissing("[memory] none")

    with Engine.open(llama, device, OPTIONS) as engine:
        expected = what_it_makes(engine)
    if not shared:
        monkeypatch.setattr(Device, "import_host", refused)
    how = LoadOptions(ctx=64, ubatch=16, act="f32", tensor_split=(1, 1, 1))
    with Device.open(device.index) as third, Engine.open(llama, [device, second, third], how) as engine:
        assert [(part.first, part.end) for part in engine.parts] == [(0, 1), (1, 2), (2, 3)]
        found = what_it_makes(engine)
    assert found[0] == expected[0]
    assert all(np.array_equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.vulkan
def test_a_text_that_is_left_goes_on(llama: Path, device: Device, second: Device) -> None:
    with Engine.open(llama, device, OPTIONS) as engine:
        whole = list(engine.generate(7, 20, stop_at_eos=False))
    with Engine.open(llama, [device, second], HALVES) as engine:
        left = engine.generate(7, 20, stop_at_eos=False)
        begun = [next(left) for _ in range(5)]
        left.close()
        assert engine.n_past == 5
        assert begun + list(engine.generate(begun[-1], 15, stop_at_eos=False)) == whole


@pytest.mark.vulkan
def test_two_texts_over_two_devices_beside_each_other(llama: Path, device: Device, second: Device) -> None:
    starts = (7, 9, 11)
    with Engine.open(llama, device, OPTIONS) as engine:
        expected = []
        for start in starts:
            engine.reset()
            expected.append(list(engine.generate(start, 20, stop_at_eos=False)))
        engine.reset()
        logits = engine.prompt_logits(TOKENS)
    with Engine.open(llama, [device, second], HALVES) as engine, engine.beside() as other, engine.beside() as third:
        texts = [each.generate(start, 20, stop_at_eos=False) for each, start in zip((engine, other, third), starts, strict=True)]
        found: list[list[int]] = [[], [], []]
        for step in range(20):
            for text, made in zip(texts, found, strict=True):
                made.append(next(text))
            if step == 7:
                third.reset()  # a text that is left, in the middle of one that goes on, and a prompt beside it
                texts[2].close()
                assert np.array_equal(third.prompt_logits(TOKENS).view(np.uint32), logits.view(np.uint32))
                texts[2] = iter(expected[2][8:])  # type: ignore[call-overload]
        assert found == expected


@pytest.mark.vulkan
def test_texts_of_the_python_interface_over_two_devices(device: Device) -> None:
    prompts = ["Once upon a time", "The", "A long time ago in"]
    how: GenerateOptions = {"max_tokens": 12, "temperature": 0.0}
    with vkback.load("demo-dense", device.index, ctx=128) as model:
        expected = [model.generate(prompt, **how).text for prompt in prompts]
        grammar = model.generate("The", max_tokens=8, grammar='root ::= "yes" | "no"').text
    with vkback.load("demo-dense", [device.index, device.index], ctx=128, tensor_split=[1, 2]) as model:
        assert model.sequences == 2
        assert [model.generate(prompt, **how).text for prompt in prompts] == expected
        assert [result.text for result in model.generate(prompts, **how)] == expected  # a third one waits for the first to end
        assert model.generate("The", max_tokens=8, grammar='root ::= "yes" | "no"').text == grammar
        with pytest.raises(vkback.ModelError, match="tokens"):
            model.generate(["x " * 400, "The"], **how)
        session = model.session()
        assert session.generate(prompts[0], **how).text == expected[0]
        with pytest.raises(SplitError, match="a profile needs all layers on one device"):
            model.profile("The")


@pytest.mark.vulkan
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_device_is_one_error_and_the_tokens_so_far_stay(
    lost: int, llama: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Device.open(device.index) as first, Device.open(device.index) as last:
        engine = Engine.open(llama, [first, last], HALVES)
        text = engine.generate(7, 20, stop_at_eos=False)
        begun = [next(text) for _ in range(3)]
        with stopped([first, last][lost]):
            with pytest.raises(DeviceLost, match=rf"^\[split\] device {lost + 1} of 2, .*VK_ERROR_DEVICE_LOST") as found:
                begun += list(text)
            assert "\n" not in str(found.value)
            assert engine.tokens == (7, *begun[:-1])
            with pytest.raises(DeviceLost):
                engine.decode_logits(begun[-1])
        lose([first, last][lost], monkeypatch)
        engine.close()
    with Engine.open(llama, device, OPTIONS) as engine:
        assert list(engine.generate(7, 20, stop_at_eos=False))[: len(begun)] == begun


@pytest.mark.vulkan
@pytest.mark.parametrize("lost", [0, 1])
def test_a_device_lost_in_a_prompt_is_one_error(lost: int, llama: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with Device.open(device.index) as first, Device.open(device.index) as last:
        engine = Engine.open(llama, [first, last], HALVES)
        engine.prompt(TOKENS[:20])
        lost_so = pytest.raises(DeviceLost, match=rf"^\[split\] device {lost + 1} of 2, .*VK_ERROR_DEVICE_LOST")
        with stopped([first, last][lost]), lost_so:
            engine.prompt(TOKENS[20:])
        lose([first, last][lost], monkeypatch)
        engine.close()


@pytest.mark.vulkan
def test_what_one_device_holds_is_not_split_unless_shares_are_asked_for(llama: Path, device: Device, second: Device) -> None:
    with pytest.raises(SplitError, match=r"fit device 1 of 2, .* takes less time there \(forecast: .* ms, over all .* ms\).*-ts 1,1"):
        Engine.open(llama, [device, second], OPTIONS)


@pytest.mark.vulkan
def test_shares_and_options_that_cannot_be_are_refused_by_name(llama: Path, tmp_path: Path, device: Device, second: Device) -> None:
    def refused(match: str, devices: list[Device], path: Path = llama, **options: object) -> None:
        with pytest.raises(SplitError, match=match):
            Engine.open(path, devices, LoadOptions(ctx=64, **options))  # type: ignore[arg-type]

    refused(r"^\[split\] -ts 3,1,1 has 3 shares for 2 devices; expected one for each", [device, second], tensor_split=(3, 1, 1))
    refused(r"can be cut in 3 parts, for 4 devices; expected at most 3", [device, second] * 2, tensor_split=(1, 1, 1, 1))
    synthesize("tiny-gemma3n-Q8_0", whole := tmp_path / "whole.gguf")
    refused(r"gemma3n with \d+ layers can be cut in 1 parts, for 2 devices", [device, second], whole, tensor_split=(1, 1))
    refused(r"--spec-pinned: drafts are made on one device", [device, second], tensor_split=(1, 1), spec_pinned=4)
    refused(r"-ts is for several devices", [device], tensor_split=(1,))
    synthesize("tiny-bert-Q8_0", bert := tmp_path / "bert.gguf")
    refused(r"bert makes vectors of whole texts, on one device", [device, second], bert, tensor_split=(1, 1))


@pytest.mark.vulkan
def test_uses_that_need_all_layers_on_one_device_are_refused(llama: Path, device: Device, second: Device) -> None:
    from vkback.engine.batch.batch import Batch

    with Engine.open(llama, [device, second], HALVES) as engine:
        with pytest.raises(SplitError, match=r"llama.gguf: a batch of texts needs all layers on one device, they are on 2"):
            Batch(engine)
        with pytest.raises(SplitError, match=r"a vector of a text needs"):
            list(engine.vectors([[1, 2]], "mean"))


@pytest.mark.parametrize("name", TINY)
def test_every_family_can_be_cut_and_the_parts_are_the_whole(name: str, tmp_path: Path) -> None:
    synthesize(f"{name}-Q8_0", path := tmp_path / "model.gguf")
    model = Model.open(path)
    n = model.hp.n_layer
    graph = model.graph(3, 64, head="all")
    places = cuttable(graph, n, 3)
    assert bool(places) != (name in UNCUT)
    for place in places:
        parts = [Part(0, place, n).of(graph), Part(place, n, n).of(graph)]
        assert [node.name for part in parts for node in part.nodes] == [node.name for node in graph.nodes]
        inputs = {t.name for t in parts[1].tensors().values() if t.kind == "input"} - {"tokens", "pos"}
        assert inputs == {t.name for t in parts[0].outputs}


@pytest.mark.vulkan
def test_host_memory_that_two_devices_import(device: Device, second: Device) -> None:
    pages = HostPages(1000)
    try:
        with device.import_host("ours", pages) as ours, second.import_host("theirs", pages) as theirs:
            a, b = ours.alloc(1000, "a"), theirs.alloc(1000, "b")
            with device.arena("on the device", 1024, "device") as own, second.arena("on the other", 1024, "device") as other:
                values, target = own.alloc(1000, "values"), other.alloc(1000, "target")
                device.upload(values, np.arange(250, dtype=np.float32))
                rec = device.recorder("out")
                rec.copy(values, a)
                rec.host_barrier()
                device.run(rec)
                rec = second.recorder("in")
                rec.host_writes()
                rec.copy(b, target)
                commands, gate = rec.finish(), second.gate()
                value = gate.next()
                ticket = second.submit(commands, gate)
                assert not ticket.done
                gate.open(value)
                ticket.wait()
                assert np.array_equal(second.download(target, np.float32), np.arange(250, dtype=np.float32))
                commands.destroy()
                gate.destroy()
    except FeatureMissing as error:
        pytest.skip(str(error))


@pytest.mark.vulkan
def test_memory_that_cannot_be_imported_is_refused_with_the_other_way(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkback.device.memory.EXTERNAL_HOST", "VK_EXT_of_no_driver")
    with pytest.raises(DeviceError, match=r"cannot import memory of the host, it lacks VK_EXT_of_no_driver\. Copy through memory of kind"):
        device.import_host("rows", HostPages(1))


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "0,7", "-ts", "1,1"], r"^vkback: error: \[device\] no device has index 7\. There are: 0: .*$"),
        (["--device", "0,0"], r"^vkback: error: \[split\] .* fit device 1 of 2, .*-ts 1,1 .*$"),
        (
            ["--device", "0,0", "-ts", "1,x"],
            r"^vkback: error: --tensor-split 1,x: expected a share greater than 0 for each device, as 3,1$",
        ),
        (["--device", "0", "-ts", "1,1"], r"^vkback: error: \[split\] -ts is for several devices"),
    ],
)
def test_what_commands_say_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, main.main, "run", "Once", "-n", "2", *arguments) == 2
    err = capsys.readouterr().err
    assert re.search(said, err) and len(err.strip().splitlines()) == 1, err


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["batch", "-npp", "8", "-ntg", "4", "-npl", "3", "--device", "0,0", "-ts", "1,1"],
            r"^vkbench: error: \[split\] 3 sequences .* expected at most -npl 2, or one ",
        ),
        (["batch", "-npl", "2", "--device", "0,0"], r"^vkbench: error: \[split\] .* fit device 1 of 2, .*-ts 1,1 .*$"),
        (["batch", "-npl", "2", "-pps", "--device", "0,0"], r"^vkbench: error: -pps and --device 0,0 exclude each other: .*$"),
        (["spec", "--device", "0,0"], r"^vkbench: error: --device 0,0: drafts are made on one device, .*$"),
    ],
)
def test_what_vkbench_does_not_measure_over_several_devices_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, vkbench.main, *arguments, "-m", "demo-dense") == 2
    out, err = capsys.readouterr()
    assert re.search(said, err) and len(err.strip().splitlines()) == 1, err
    assert not out


@pytest.mark.vulkan
def test_vkbench_batch_over_two_devices() -> None:
    """Each device with half of the layers; two texts take turns."""
    wanted = ["batch", "-npp", "8", "-ntg", "4", "-npl", "1,2", "-d", "4", "-m", "demo-dense", "-r", "2", "--device", "0,0", "-ts", "1,1"]
    done = run_program([sys.executable, "-m", "vkback.cli.vkbench", *wanted, "--json"])
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["pl"], row["n_kv"], row["n_depth"]) for row in rows] == [(1, 16, 4), (2, 32, 4)]
    for row in rows:
        assert row["tensor_split"] == "1.00/1.00" and row["devices"] == "0,0"
        assert len(row["samples_t_tg"]) == 2 and all(t > 0 for t in (*row["samples_t_pp"], *row["samples_t_tg"]))


@pytest.mark.vulkan
def test_a_card_that_the_loader_hides_is_one_line(tmp_path: Path) -> None:
    """VK_DRIVER_FILES leaves one driver, so that there is no device 1; and none, so that there is no device at all."""
    two = [sys.executable, "-m", "vkback", "run", "Once", "-n", "2", "--device", "0,1", "-ts", "1,1"]
    hidden = run_program(
        two, env={**os.environ, "VK_DRIVER_FILES": str(tmp_path / "none.json"), "VK_ICD_FILENAMES": str(tmp_path / "none.json")}
    )
    assert hidden.returncode and len(hidden.stderr.strip().splitlines()) == 1, hidden.stderr
    assert re.search(r"vkback: error: \[device\] the Vulkan loader (found no driver|lists no device)", hidden.stderr)
    if len(list_devices()) == 1:
        gone = run_program(two)
        assert gone.returncode == 2 and re.search(r"^vkback: error: \[device\] no device has index 1\. There are: 0: .*$", gone.stderr)
