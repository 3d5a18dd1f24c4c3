"""Files that options name to be read: one line that names the file and what is wrong with it, before a device is opened."""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_kit import call

from vkback.arrays import read_arrays
from vkback.cli import main, shell, vkbench
from vkback.cli.chat import template_text
from vkback.cli.sampling import logit_bias
from vkback.cli.shell import UsageError
from vkback.device import Capabilities, DeviceError, NoDevice
from vkback.device.capabilities import PROFILE_DIR
from vkback.device.instance import select
from vkback.evaluate import node_compare
from vkback.gguf.file import GgufFile, NotGguf
from vkback.models.adapter import AdapterError, given
from vkback.models.synth import UnknownShape, write_outline
from vkback.records import read_objects
from vkback.report import compare, compare_ops
from vkback.report.result_table import ReportError
from vkback.report.store import Store
from vkback.train.finetune import FineTune, Plan, Record
from vkback.train.trainer import TrainError

A_FOLDER = "(Is a directory|Permission denied)"
TOO_LONG = "(File name too long|Invalid argument|No such file or directory|File not found)"
"""In the words of Linux, of Windows and of Wine."""

CONTENTS = {
    "empty": b"",
    "junk": bytes(range(256)) * 4,
    "number": b"3",
    "list": b"[1, 2]",
    "object": b"{}",
    "null": b"null",
    "deep": b"[" * 100_000,
    "zip": b"PK\x03\x04" + b"x" * 100,
    "sqlite": b"SQLite format 3\0" + b"\xff" * 4000,
}

OPTIONS = {
    "plan --profile": "[capabilities] {}: ",
    "kernels --against": "--against {}: ",
    "test-ops perf --baseline": "--baseline {}: ",
    "test-ops --from": "",
    "perplexity -f TEXT --kl-base": "[kl] {}: ",
    "compare-bench RESULT": "{}: ",
    "history": "{}: ",
    "run -p x -m": "",
    "run -p x --lora": "[lora] adapter {}: ",
    "merge -o OUT --lora": "[lora] adapter {}: ",
}
"""Commands that end in an option, and how their error begins where the file is there."""

RESULT = "bench/results/2026-11-21_h200_580-159-04_llama-8b-qwen3moe.json"


pytestmark = pytest.mark.usefixtures("no_device")


@pytest.mark.parametrize("command", OPTIONS)
def test_a_file_of_another_kind_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("text")
    sqlite3.connect(tmp_path / "other.sqlite").execute("CREATE TABLE other (a)")
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    names = {"TEXT": str(tmp_path / "text"), "OUT": str(tmp_path / "out"), "RESULT": RESULT}
    before = sorted(tmp_path.iterdir())
    for path in [*before, Path(os.devnull), tmp_path / "none", tmp_path / "none" / "x", tmp_path / ("x" * 300)]:
        assert call(monkeypatch, main.main, *(names.get(word, word) for word in command.split()), str(path)) in (1, 2)
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1 and str(path.name) in shown.err
        begins = OPTIONS[command].format(path)
        assert shown.err.startswith(f"vkback: error: {begins}") or path.parent != tmp_path or path.name not in CONTENTS, shown.err
        assert ("Errno" not in shown.err and "object is not" not in shown.err) or path.name in ("number", "null")
    assert sorted(tmp_path.iterdir()) == before


def test_a_profile_that_lacks_a_value(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"schema": 1, "device": {}}')
    with pytest.raises(DeviceError, match=r"p\.json: lacks a value, or has one of another kind: .*; see docs/device_profiles\.md"):
        Capabilities.from_profile(path)
    whole = json.loads((PROFILE_DIR / "nvidia_h200_linux.json").read_text(encoding="utf-8"))
    path.write_text(json.dumps(whole | {"name": 3}))
    with pytest.raises(DeviceError, match=r"p\.json: lacks a value, or has one of another kind: name is 3; see"):
        Capabilities.from_profile(path)


def test_a_template_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match=r"latin: not UTF-8 text: unexpected end of data at byte 3$"):
        template_text(str(tmp_path / "latin"))
    with pytest.raises(UsageError, match=rf"cannot be read: {A_FOLDER}$"):
        template_text(str(tmp_path))
    with pytest.raises(UsageError, match=rf"neither plain nor chatml nor a file that can be read: {TOO_LONG}$"):
        template_text("{{ messages }}" * 100)
    assert template_text("chatml") == "chatml" and template_text(None) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (".", r"model \.: a folder\. `vkback convert \. model\.gguf` writes a folder of safetensors as a GGUF file"),
        ("https://x/y.gguf", r"no such file\. Download the file first, or give -hf USER/REPO"),
    ],
)
def test_a_model_that_is_no_file_is_told_how_to_become_one(given: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        shell.model_path(given)
    (tmp_path / "model.safetensors").write_bytes(bytes(64))
    with pytest.raises(NotGguf, match=r"`vkback convert` writes its folder as one"):
        GgufFile.open(tmp_path / "model.safetensors")
    with pytest.raises(UnknownShape, match=r"llama-8b is a shape without a type; expected one behind it, as llama-8b-\w+: "):
        write_outline("llama-8b", tmp_path / "x.gguf")


def test_an_empty_name_is_no_part_of_others() -> None:
    with pytest.raises(UsageError, match=r"^model : the name is empty\. Give the path of a GGUF file, or a built-in model: demo-dense"):
        shell.model_path("")
    gpu = SimpleNamespace(caps=SimpleNamespace(name="GPU", uuid="a-1"))
    assert select([gpu], "gp") is gpu and select([gpu], "a1") is gpu  # type: ignore[comparison-overlap, list-item]
    with pytest.raises(NoDevice, match=r"no device fits ''"):
        select([gpu], "")  # type: ignore[list-item]


# -- arrays


def test_arrays_that_are_broken(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, a=np.arange(4), about=np.array("{}"))
    read = read_arrays(path)
    assert read["a"].tolist() == [0, 1, 2, 3] and str(read["about"]) == "{}"
    whole = path.read_bytes()
    for content, why in (
        (b"", r"begins with b''"),
        (b"\x80\x04junk", r"it begins with b'\\x80\\x04ju', expected b'PK\\x03\\x04'"),
        (whole[:-40], r"it is damaged or cut short: File is not a zip file"),
        (whole[:60] + b"\xff\xff\xff" + whole[63:], r"it is damaged or cut short: "),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=why):
            read_arrays(path)
        with pytest.raises(node_compare.CompareError, match=rf"a\.npz: no saved run of vkback compare \(.*{why}.*\); write one with"):
            node_compare.load(path, {})
        with pytest.raises(TrainError, match=rf"a\.npz: no state of a run that can be read \(.*{why}.*\); begin anew without --resume"):
            FineTune.resume(SimpleNamespace(), path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"^{A_FOLDER}$"):
        read_arrays(tmp_path)
    for about in ("[1]", "3"):
        np.savez(path, about=np.array(about))
        with pytest.raises(TrainError, match=r"a\.npz: no state of a run"):
            FineTune.resume(SimpleNamespace(), path)  # type: ignore[arg-type]
        with pytest.raises(node_compare.CompareError, match=r"a\.npz: no saved run"):
            node_compare.load(path, {})


# -- results


def test_a_baseline_without_times(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    for records in ([], [{"mode": "test", "line": "ABS", "samples_us": None}]):
        path.write_text(json.dumps(records))
        assert call(monkeypatch, main.main, "test-ops", "perf", "-o", "RMS_NORM", "--baseline", str(path)) == 2
        assert "b.json: holds no timed case; expected what vkback test-ops perf --json prints\n" in capsys.readouterr().err
    assert call(monkeypatch, main.main, "test-ops", "-o", "RMS_NORM", "--baseline", str(path)) == 2
    assert "--baseline compares times: expected vkback test-ops perf, not test\n" in capsys.readouterr().err


def test_records_of_others() -> None:
    whole = [{"a": 1, "b": [1, "x"], "c": {"d": None}, "samples_us": [1, 2.5], "samples_ns": None}]
    assert read_objects(json.dumps(whole)) == [whole[0] | {"b": '[1, "x"]', "c": '{"d": null}'}]
    assert read_objects('{"a": 1}\n\n{"a": 2}\n') == [{"a": 1}, {"a": 2}]
    for samples in (3, "x", [None], [0], [math.nan], [math.inf], {"a": 1}):
        with pytest.raises(ValueError, match=r"^result 2: samples_us is .*, expected a list of numbers above 0$"):
            read_objects(json.dumps([{}, {"samples_us": samples}]))
    with pytest.raises(ValueError, match=r"^it is nested too deeply$"):
        read_objects("[" * 100_000)


def test_timed_cases_that_lack_something(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    timed = {"op_name": "ABS", "op_params": "", "time_us": 1.5, "spread_us": 0.1}
    path.write_text(json.dumps([timed, timed | {"time_us": None}]))
    assert list(compare_ops.load(path)["time_us"]) == [1.5]
    for change, why in (
        ({"time_us": 0}, "a time is not above 0"),
        ({"time_us": "x"}, "could not convert string to float: 'x'"),
        ({"spread_us": [1]}, r"could not convert string to float: '\[1\]'"),
    ):
        path.write_text(json.dumps([timed | change]))
        with pytest.raises(ReportError, match=rf"r\.json: not a result of vkback test-ops perf \(.*\): {why}$"):
            compare_ops.load(path)
    path.write_text('[{"op_name": "ABS"}]')
    with pytest.raises(ReportError, match=r": it lacks op_params, time_us$"):
        compare_ops.load(path)


def test_results_that_are_folders(tmp_path: Path) -> None:
    for load, of in ((compare.load, "vkbench or llama-bench"), (compare_ops.load, "vkback test-ops perf")):
        with pytest.raises(ReportError, match=rf"^{re.escape(str(tmp_path))}: is a folder; expected a result of {of} \("):
            load(tmp_path)


def test_a_store_that_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.sqlite"
    record: dict[str, Any] = {"op_name": "ABS"}
    with Store(path) as store:
        store.add_op(record, [1.0])
    before = path.read_bytes()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with Store(path) as store:
        assert list(store.ops()["op_name"]) == ["ABS"]
        with pytest.raises(ReportError, match=r"s\.sqlite: the result could not be stored: the file may only be read$"):
            store.add_op(record, [2.0])
    assert path.read_bytes() == before


# -- numbers


def test_numbers_that_are_none(tmp_path: Path) -> None:
    for wrong in ("5=nan", "5=inf"):
        with pytest.raises(UsageError, match=rf"^--logit-bias {wrong}: expected ID=VALUE"):
            logit_bias([wrong])
    for name, value in (("lr", math.inf), ("lr", math.nan), ("weight_decay", math.inf)):
        with pytest.raises(TrainError, match=rf"^\[finetune\] {name} is {value}, expected a number of 0 or more$"):
            Plan(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match=r"a: times nan, expected a number \(--lora-scale\)$"):
        given(tmp_path / "a", math.nan)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("vkback test-ops --seed -1", "Invalid value for '--seed': "),
        ("vkback test-ops -j 100000", "Invalid value for '-j': "),
        ("vkback test-ops -o ,", "-o ',' names no op; give some, as -o MUL_MAT,ROPE, or leave it out for all"),
        ("vkback compare -n 99999999999", "-n 99999999999: the context has 512 tokens; give fewer, or a larger --ctx"),
        ("vkbench -p 1-99999999999", "-p 1-99999999999: more than 10000 values; give steps, as 1-8192+512 or 1-8192*2"),
    ],
)
def test_numbers_that_are_too_large_or_small(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prog, *arguments = command.split()
    assert call(monkeypatch, vkbench.main if prog == "vkbench" else main.main, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{prog}: error: {said}") and err.count("\n") == 1


def test_a_training_that_diverges_keeps_what_it_wrote_before(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    losses = iter([4.0, 3.0, math.nan])
    run = FineTune.__new__(FineTune)
    run.plan, run.record = Plan(steps=10, eval_every=1), Record()
    run.trainer = SimpleNamespace(t=0, gradients=lambda tokens, targets: 1.0, update=lambda lr: None)  # type: ignore[assignment]
    monkeypatch.setattr(run, "batch_at", lambda step: np.zeros((1, 2), np.int32))
    monkeypatch.setattr(run, "evaluate", lambda: next(losses))
    with pytest.raises(TrainError, match=r"the held-back loss after step 2 is nan: lower the learning rate \(0\.001\) or --max-norm$"):
        run.run(on_evaluation=lambda step, loss: written.append(step))
    assert written == [0, 1] and run.record.best == (1, 3.0)


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def app(**_: object) -> None:
        np.empty(2**60, np.uint8)

    with pytest.raises(SystemExit) as e:
        shell.run(app, "vkback")
    assert e.value.code == 1
    assert capsys.readouterr().err.startswith("vkback: error: the memory of this machine does not suffice: Unable to allocate ")
