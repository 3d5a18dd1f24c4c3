"""The command line with an engine that computes nothing, so that what is tested is what commands ask for and print."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vkback.cli import bench, generate, main, shell
from vkback.cli import test_ops as ops_command
from vkback.cli.bench_run import WARMUP_TOKENS, measure
from vkback.cli.bench_tests import BenchTest, parse_name, parse_values, plan_tests
from vkback.cli.shell import UsageError
from vkback.device import Capabilities, Device
from vkback.errors import VkbackError
from vkback.plan.tuning import device_table

REPOSITORY = Path(__file__).resolve().parent.parent


class FakeTokenizer:
    """One token a byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def stream(self) -> FakeStream:
        return FakeStream()


class FakeStream:
    """Holds everything back until it is whole."""

    def __init__(self) -> None:
        self.held = b""

    def feed(self, id: int) -> str:
        self.held += bytes([id])
        try:
            text = self.held.decode()
        except UnicodeDecodeError:
            return ""
        self.held = b""
        return text

    def flush(self) -> str:
        return self.held.decode(errors="replace")


class FakeEngine:
    """Notes what it is asked for; generates the bytes of a fixed text."""

    description = "llama 0.1B Q4_0"
    size_bytes = 2**20
    n_params = 2_000_000
    bytes_per_token = 1_000_000
    model = SimpleNamespace(hp=SimpleNamespace(n_vocab=256))
    device = SimpleNamespace(
        caps=SimpleNamespace(
            name="Test GPU", device_type="cpu", driver_name="testdrv", driver_info="1.2", summary_line=lambda: "vkback: 0 = Test GPU"
        )
    )

    def __init__(self, text: str = "né, " * 50) -> None:
        self.tokenizer = FakeTokenizer()
        self.text = text.encode()
        self.calls: list[tuple[Any, ...]] = []
        self.loaded: list[tuple[Any, ...]] = []
        self.n_past = 0
        self.closed = False

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.closed = True

    def reset(self) -> None:
        self.calls.append(("reset",))

    def resize(self, n_ctx: int) -> None:
        self.calls.append(("resize", n_ctx))

    def prompt(self, tokens: Sequence[int]) -> None:
        self.calls.append(("prompt", len(tokens)))

    def generate(self, first: int, n: int, *, sampler: Any, stop_at_eos: bool) -> Iterator[int]:
        self.calls.append(("generate", n, stop_at_eos))
        yield from self.text[:n]

    def decode_logits(self, token: int) -> np.ndarray:
        self.calls.append(("decode_logits",))
        return np.zeros(256, np.float32)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()

    def load(path: Path, device: str | None, *, n_ctx: int | None, act: str = "auto", progress: bool = True) -> FakeEngine:
        fake.loaded.append((path.name, device, n_ctx, act))
        return fake

    for module in (bench, generate):
        monkeypatch.setattr(module, "load_engine", load)
    monkeypatch.setattr(bench, "measured_read_rate", lambda device: 200.0)
    for target in ("vkback.cli.bench_run.make_sampler", "vkback.cli.generate.make_sampler"):
        monkeypatch.setattr(target, lambda **kwargs: kwargs)
    return fake


def call(monkeypatch: pytest.MonkeyPatch, entry: Any, *args: str) -> int:
    """Run a command's entry point as the shell does; its exit code."""
    monkeypatch.setattr(sys, "argv", ["prog", *args])
    with pytest.raises(SystemExit) as e:
        entry()
    return int(e.value.code or 0)


# --- what is to be measured


@pytest.mark.parametrize(
    ("text", "values"),
    [("512", [512]), ("1,2 , 3", [1, 2, 3]), ("2-5", [2, 3, 4, 5]), ("0-8192+4096", [0, 4096, 8192]), ("1-9*2,7", [1, 2, 4, 8, 7])],
)
def test_value_notation(text: str, values: list[int]) -> None:
    assert parse_values([text], "-p") == values


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "5-2", "1-8*1", "0-8*2", "1-8+0"])
def test_value_notation_refuses_with_option_and_text(text: str) -> None:
    with pytest.raises(UsageError) as e:
        parse_values([text], "-p")
    assert str(e.value).startswith(f"-p {text}: ")


@pytest.mark.parametrize("name", ["pp512", "tg128", "pp512+tg128", "tg128 @ d4096"])
def test_the_name_in_a_table_runs_the_test(name: str) -> None:
    assert parse_name(name).name == name


def test_names_that_are_none() -> None:
    for text in ("", "tg", "tg0", "xx512", "@d4"):
        with pytest.raises(UsageError, match="is not a test; expected a name as pp512"):
            parse_name(text)


def test_tests_are_planned_in_llama_bench_s_order() -> None:
    tests = plan_tests([], ["8,16"], ["4"], ["8,4"], ["0,32"])
    assert [t.name for t in tests] == [
        "pp8", "pp16", "tg4", "pp8+tg4",
        "pp8 @ d32", "pp16 @ d32", "tg4 @ d32", "pp8+tg4 @ d32",
    ]  # fmt: skip


def test_defaults_names_and_zeros() -> None:
    assert [t.name for t in plan_tests([], [], [], [], [])] == ["pp512", "tg128"]
    assert [t.name for t in plan_tests([], ["0"], [], [], [])] == ["tg128"]
    assert [t.name for t in plan_tests(["tg32"], [], [], [], [])] == ["tg32"]
    assert [t.name for t in plan_tests(["tg32"], ["64"], [], [], [])] == ["tg32", "pp64"]
    with pytest.raises(UsageError, match="nothing to measure"):
        plan_tests([], ["0"], ["0"], [], [])
    with pytest.raises(UsageError, match="-pg 5: expected prompt and generated tokens"):
        plan_tests([], [], [], ["5"], [])


# --- how it is measured


def test_generation_is_measured_on_an_empty_cache_after_a_warm_up(engine: FakeEngine) -> None:
    samples = measure(engine, BenchTest(0, 128), 2)
    assert len(samples) == 2
    once = [("reset",), ("generate", 128, False)]
    assert engine.calls == [("reset",), ("generate", WARMUP_TOKENS, False), *once, *once]


def test_prompt_comes_before_generation_in_one_time(engine: FakeEngine) -> None:
    measure(engine, BenchTest(16, 4), 1, warmup=False)
    assert engine.calls == [("reset",), ("prompt", 16), ("generate", 4, False)]


def test_depth_is_filled_outside_the_time(engine: FakeEngine) -> None:
    now = iter(range(0, 1000, 10))
    events: list[str] = []

    def clock() -> int:
        events.append(f"clock after {engine.calls[-1][0]} {engine.calls[-1][1:]}")
        return next(now)

    assert measure(engine, BenchTest(0, 4, 64), 1, warmup=False, clock=clock) == (10,)
    assert events == ["clock after prompt (64,)", "clock after generate (4, False)"]


def test_random_feed_decodes_token_by_token(engine: FakeEngine) -> None:
    measure(engine, BenchTest(0, 3), 1, warmup=False, feed="random")
    assert engine.calls == [("reset",), *[("decode_logits",)] * 3]


# --- vkbench


def test_vkbench_prints_a_table(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, bench.main, "tg8", "-r", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vkback: 0 = Test GPU"
    assert lines[1].startswith("| model                          |       size |     params | backend    | ngl |            test |")
    assert lines[3].startswith("| llama 0.1B Q4_0                |   1.00 MiB |     2.00 M | Vulkan     |  99 |             tg8 |")
    assert len(lines) == 7
    assert lines[6].startswith("build: ")
    assert [entry[0] for entry in engine.loaded] == ["demo-dense-Q4_K_M.gguf", "demo-moe-MXFP4_MOE.gguf"]
    assert engine.closed


def test_each_test_has_a_cache_of_its_own_size(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in llama-bench: kernels are chosen by the cache's size, so that a result would else depend on the tests beside it."""
    assert call(monkeypatch, bench.main, "tg8", "tg8@d100", "pp16", "-r", "1", "-m", "demo-dense") == 0
    assert [c[1] for c in engine.calls if c[0] == "resize"] == [8, 108, 16]
    assert [loaded[2] for loaded in engine.loaded] == [108], "loaded once, for the largest"


def test_vkbench_takes_llama_bench_s_flags(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "r.jsonl"
    args = shlex.split("-m demo-moe -p 16,32 -n 0 -pg 8,4 -d 0,64 -r 1 -o json -oe csv --no-warmup -dev 0 --act f32,q8_1")
    assert call(monkeypatch, bench.main, *args, "--save", str(saved)) == 0
    out, err = capsys.readouterr()
    results = json.loads(out)
    names = [(r["act"], r["n_prompt"], r["n_gen"], r["n_depth"]) for r in results]
    sizes = [(16, 0, 0), (32, 0, 0), (8, 4, 0), (16, 0, 64), (32, 0, 64), (8, 4, 64)]
    assert names == [(act, *s) for act in ("f32", "q8_1") for s in sizes]
    assert engine.loaded == [("demo-moe-MXFP4_MOE.gguf", "0", 96, act) for act in ("f32", "q8_1")]
    assert len(err.splitlines()) == 13
    assert [json.loads(text) for text in saved.read_text().splitlines()] == results
    first = results[0]
    assert (first["gpu_info"], first["driver_info"], first["model_type"]) == ("Test GPU", "testdrv 1.2", "llama 0.1B Q4_0")
    assert first["command"].startswith("vkbench -m demo-moe")


def test_logits_to_host_is_feeding_random_tokens(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, bench.main, "tg3", "-r", "1", "-m", "demo-dense", "--no-warmup", "--logits-to-host", "-oe", "jsonl") == 0
    out, err = capsys.readouterr()
    assert json.loads(err)["feed"] == "random"
    assert "feed" in out.splitlines()[1]
    assert [name for name, *_ in engine.calls].count("decode_logits") == 3


def test_kept_tables_say_when_where_and_how(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table, machine = tmp_path / "r.md", tmp_path / "r.json"
    assert call(monkeypatch, bench.main, "tg8", "-r", "1", "-m", "demo-dense", "--save", str(table), "--save", str(machine)) == 0
    lines = table.read_text(encoding="utf-8").splitlines()
    (result,) = json.loads(machine.read_text())
    assert lines[0] == f"    {result['command']}"
    assert lines[2] == f"{result['test_time'][:10]}, Test GPU, driver testdrv 1.2"
    assert lines[4:] == capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("args", "rate"), [([], 200.0), (["--read-rate", "100"], 100.0), (["--read-rate", "0"], None)])
def test_vkbench_shows_the_share_of_the_read_rate(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], rate: float | None
) -> None:
    assert call(monkeypatch, bench.main, "tg8", "-r", "1", "-m", "demo-dense", "-oe", "jsonl", *args) == 0
    out, err = capsys.readouterr()
    assert ("% read" in out) == (rate is not None)
    result = json.loads(err)
    assert result["read_rate_gb_s"] == rate
    assert result["percent_of_read"] == (None if rate is None else pytest.approx(100 * result["gb_s"] / rate))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tg"], "vkbench: error: 'tg' is not a test; expected a name as pp512, tg128, pp512+tg128 or tg128@d4096"),
        (
            ["-m", "none.gguf"],
            "vkbench: error: model none.gguf: no such file. Give the path of a GGUF file, or a built-in model: demo-dense",
        ),
        (["-o", "xml"], "vkbench: error: 'xml' is not an output format; expected one of md, csv, json, jsonl, sql"),
        (["--save", "results.xlsx"], "vkbench: error: --save results.xlsx, ending xlsx: expected one of md, csv, json, jsonl, sql"),
        (["--save", "/nonexistent/r.json"], "vkbench: error: /nonexistent/r.json: cannot be written: No such file or directory"),
        (["--feed", "x"], "vkbench: error: --feed x: expected one of self, random"),
        (["--act", "auto,f16"], "vkbench: error: --act f16: expected one of auto, f32, q8_1"),
    ],
)
def test_vkbench_user_errors_are_one_line(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert call(monkeypatch, bench.main, *args) == 1
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_an_error_of_the_engine_is_one_line_too(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: FakeEngine, tokens: Sequence[int]) -> None:
        raise VkbackError("[engine] the context is full")

    monkeypatch.setattr(FakeEngine, "prompt", fail)
    assert call(monkeypatch, bench.main, "pp8", "-m", "demo-dense") == 1
    assert capsys.readouterr().err == "vkbench: error: [engine] the context is full\n"
    assert engine.closed


# --- vkback


def test_run_streams_text_and_tells_speed(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "run", "-p", "Once", "-n", "10", "--device", "0", "--ctx", "64") == 0
    out, err = capsys.readouterr()
    assert out == "Once" + "né, né, " + "\n"
    assert [text.split()[:3] for text in err.splitlines()] == [["prompt", "3", "tokens"], ["generation", "10", "tokens"]]
    assert engine.calls == [("prompt", 3), ("generate", 10, True)]
    assert engine.loaded == [("demo-dense-Q4_K_M.gguf", "0", 64, "auto")]


def test_run_refuses_an_empty_prompt(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "run", "-p", "") == 1
    assert capsys.readouterr().err.startswith("vkback: error: -p is empty; give a text to continue")


def test_compare_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: FakeEngine, tmp_path: Path) -> None:
    for name in ("old.json", "new.csv"):
        assert call(monkeypatch, bench.main, "tg8", "-r", "3", "-m", "demo-dense", "--save", str(tmp_path / name)) == 0
    capsys.readouterr()
    files = [str(tmp_path / "old.json"), str(tmp_path / "new.csv")]
    assert call(monkeypatch, main.main, "compare", *files) == 0
    assert "t/s (before) |          t/s (after) |     diff | beats the noise" in capsys.readouterr().out
    assert call(monkeypatch, main.main, "compare", *files, "-o", "json") == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["test"], record["model"]) == ("tg8", "llama 0.1B Q4_0")
    assert call(monkeypatch, main.main, "compare", *files, "-o", "csv") == 0
    assert capsys.readouterr().out.startswith("model,size,params,backend,ngl,test,before_ts,")
    assert call(monkeypatch, main.main, "compare", *files, "-o", "xml") == 1
    assert capsys.readouterr().err == "vkback: error: -o xml: expected one of md, csv, json\n"


def test_synth_lists_names_and_writes_a_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call(monkeypatch, main.main, "synth", "--list") == 0
    row = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("llama-8b-Q4_K_M "))
    assert row.split() == ["llama-8b-Q4_K_M", "4.58", "GiB", "8.03", "B"]
    assert call(monkeypatch, main.main, "synth", "llama-1b-Q4_K_M") == 1
    assert capsys.readouterr().err.startswith("vkback: error: synth needs a name and a file")
    assert call(monkeypatch, main.main, "synth", "nothing-Q4_0", str(tmp_path / "x.gguf")) == 1
    assert capsys.readouterr().err.startswith("vkback: error: [synth] no model is called 'nothing-Q4_0'")


def test_graph_lists_nodes_in_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "graph", "-t", "3", "-c", "32") == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "0 GET_ROWS inp_embd F32[3, 256] <- token_embd.weight Q6_K[4096, 256], tokens I32[3]"
    assert lines[-1].split()[:3] == [str(len(lines) - 1), "MUL_MAT", "result_output"]


def test_plan_is_made_for_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "plan", "--profile", "nvidia_h200_linux", "-c", "64") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("vkback: 0 = NVIDIA H200")
    stages = [int(text.split()[0]) for text in lines[2:-2] if not text.lstrip().startswith(("barrier:", "barrier-free:"))]
    assert stages == sorted(stages)
    assert "      barrier: waits for inp_embd (written by 0)" in lines
    assert lines[-2].startswith(f"{stages[-1] + 1} stages (30 barrier-free), {len(stages)} dispatches, ")
    assert lines[-1].startswith("predicted: ")
    assert " by 4560.0 GB/s and 3.00 us a stage (95% of the published 4800 GB/s; 3 us a stage as an H200 takes), " in lines[-1]


def test_plan_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "plan", "--profile", "nvidia_h200_linux", "-c", "64", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["device"] == "NVIDIA H200"
    assert made["summary"]["stages"] == len(made["stages"])
    assert made["summary"]["bytes"] == sum(d["bytes"] for s in made["stages"] for d in s["dispatches"])
    assert made["summary"]["predicted_us"] == pytest.approx(sum(s["predicted_us"] for s in made["stages"]))
    assert made["stages"][2]["waits_for"] == [
        {"stage": 1, "tensor": "Qcur_rope-0.qkv", "after": "write", "awaited": "part"},
        {"stage": 0, "tensor": "rope_angles.0", "after": "write", "awaited": ""},
    ]  # fmt: skip
    assert made["summary"]["measured_us"] is None


def word_table(folder: Path, caps: Capabilities) -> str:
    """A folder with a device's own table, by which its stages hand over word by word."""
    (folder / device_table(caps)).write_text('[[schedule]]\nset = { sync = "sentinel" }\nmeasured = "a test"\n')
    return str(folder)


def test_plan_tells_joined_stages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("VKBACK_TUNING", word_table(tmp_path, Capabilities.from_profile("nvidia_h200_linux")))
    assert call(monkeypatch, main.main, "plan", "--profile", "nvidia_h200_linux", "-c", "64") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "      barrier: waits for inp_embd (written by 0)" in lines
    assert "      barrier-free: spins on part of Qcur_rope-0.qkv (written by 1); by then there: rope_angles.0 (written by 0)" in lines
    assert lines[-2].startswith("32 stages (30 barrier-free), ")
    assert lines[-1].endswith(", 1.00 a barrier-free one (a third of it, as on an H200)")
    assert call(monkeypatch, main.main, "plan", "--profile", "nvidia_h200_linux", "-c", "64", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert [s["stage"] for s in made["stages"] if s["barrier_free"]] == list(range(2, 32))
    assert made["stages"][2]["waits_for"][0] == {"stage": 1, "tensor": "Qcur_rope-0.qkv", "after": "write", "awaited": "part"}
    assert made["summary"]["barrier_free"] == 30
    assert made["summary"]["predicted_us"] == pytest.approx(2 * 3 + 30 + made["summary"]["bytes"] / made["costs"]["read_gb_s"] / 1e3)


@pytest.mark.vulkan
def test_plan_measures_joined_stages_with_barriers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, device: Device
) -> None:
    monkeypatch.setenv("VKBACK_TUNING", word_table(tmp_path, device.caps))
    assert call(monkeypatch, main.main, "plan", "-m", "demo-moe", "-c", "64", "--measure") == 0
    assert " us stage by stage with barriers before all; " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.vulkan
def test_plan_measures_every_stage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "plan", "-m", "demo-moe", "-c", "64", "-d", "5", "--measure", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["costs"]["read_gb_s"] > 0
    assert made["costs"]["source"] == "both just measured"
    assert all(s["measured_us"] > 0 for s in made["stages"])
    assert made["summary"]["measured_us"] == pytest.approx(sum(s["measured_us"] for s in made["stages"]))
    assert made["summary"]["measured_tokens_per_s"] == pytest.approx(1e6 / made["summary"]["measured_together_us"])
    assert call(monkeypatch, main.main, "plan", "-m", "demo-moe", "-c", "64", "-d", "64", "--measure") == 1
    assert capsys.readouterr().err.strip().endswith(
        "vkback: error: [stages] 1 tokens after 64 do not fit a cache of 64 rows; lower --depth or raise --ctx"
    )


@pytest.mark.parametrize("other", ["--device 0", "--measure"])
def test_plan_refuses_a_device_that_is_and_is_not_here(
    other: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, main.main, "plan", "--profile", "nvidia_h200_linux", *other.split()) == 1
    assert capsys.readouterr().err.startswith(f"vkback: error: {' and '.join(sorted((other.split()[0], '--profile')))} exclude each other")


def cases(*lines: str) -> list[Any]:
    return [SimpleNamespace(op=text.partition("(")[0], line=text) for text in lines]


ADD, MUL_1, MUL_2 = "ADD(ne=[1,2],seed=1)", "MUL(ne=[1,2],seed=1)", "MUL(ne=[3,4],seed=1)"


@pytest.mark.parametrize(
    ("names", "params", "chosen"),
    [
        ([], None, [ADD, MUL_1, MUL_2]),
        (["MUL"], None, [MUL_1, MUL_2]),
        ([MUL_2, "ADD"], None, [ADD, MUL_2]),
        ([], r"ne=\[1,", [ADD, MUL_1]),
        (["MUL"], r"ne=\[1,", [MUL_1]),
    ],
)
def test_cases_are_chosen_by_op_line_and_parameters(names: list[str], params: str | None, chosen: list[str]) -> None:
    assert [c.line for c in ops_command.select(cases(ADD, MUL_1, MUL_2), names, params)] == chosen


@pytest.mark.parametrize(
    ("names", "params", "message"),
    [
        (["DIV", "ADD"], None, "no op and no case is called DIV; --list-ops shows the ops"),
        ([], "nothing", "-p nothing: no case matches"),
        ([], "(", "-p (: not a regular expression: missing ), unterminated subpattern at position 0"),
    ],
)
def test_choosing_no_case_says_why(names: list[str], params: str | None, message: str) -> None:
    with pytest.raises(UsageError) as e:
        list(ops_command.select(cases(ADD, MUL_1), names, params))
    assert str(e.value) == message


def test_list_ops(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "test-ops", "--list-ops") == 0
    assert any(text.split()[0] == "MUL_MAT" and text.endswith(" cases") for text in capsys.readouterr().out.splitlines())


@pytest.mark.vulkan
def test_ops_are_judged_and_a_printed_case_reruns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "test-ops", "-o", "SILU") == 0
    lines = capsys.readouterr().out.splitlines()
    line = lines[1].strip().removesuffix(": OK")
    assert lines[-1] == f"  {len(lines) - 2}/{len(lines) - 2} tests passed"
    assert call(monkeypatch, main.main, "test-ops", line, "--verbose") == 0
    out = capsys.readouterr().out
    assert f"  {line}: OK  y: NMSE " in out
    assert out.endswith("  1/1 tests passed\n")


@pytest.mark.vulkan
def test_a_failing_case_is_shown_and_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: object) -> None:
        raise VkbackError("[SILU] guard bytes were overwritten")

    monkeypatch.setattr("vkback.harness.runner.Workbench.run", fail)
    assert call(monkeypatch, main.main, "test-ops", "-o", "SILU", "-p", "4096") == 1
    lines = capsys.readouterr().out.splitlines()
    case = "SILU(ne=[1,4096],seed=4)"
    assert lines[1:] == [
        "[SILU] guard bytes were overwritten",
        f"  {case}: FAIL",
        "  0/1 tests passed",
        "",
        "Failing tests:",
        f"  {case}",
    ]


@pytest.mark.vulkan
def test_devices_lists_what_device_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "devices") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(text.startswith(f"vkback: {i} = ") for i, text in enumerate(lines))


@pytest.mark.vulkan
def test_devices_report_names_build_compiler_and_capabilities(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "devices", "--report") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("build: ")
    assert next(text for text in lines if text.startswith("shader compiler ")) != "shader compiler none found"
    assert any(text.strip().startswith("subgroup_size: ") for text in lines)


def test_wrong_usage_exits_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "nonsense") == 2
    assert "nonsense" in capsys.readouterr().err


def test_ctrl_c_leaves_cleanly() -> None:
    code = (
        "from vkback.cli import shell\n"
        "import os, signal, typer\n"
        "app = shell.new_app('')\n"
        "@app.command()\n"
        "def wait() -> None:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "shell.run(app, 'vkback')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGINT
    assert "Traceback" not in done.stderr


def test_model_path_knows_files_and_built_in_names(tmp_path: Path) -> None:
    own = tmp_path / "demo-dense.gguf"
    own.touch()
    assert shell.model_path(str(own)) == own
    assert shell.model_path("demo-moe").name == "demo-moe-MXFP4_MOE.gguf"
    assert shell.model_path(None).name == "demo-dense-Q4_K_M.gguf"
    with pytest.raises(UsageError, match="no such file"):
        shell.model_path(str(tmp_path / "demo-moe"))


@pytest.mark.vulkan
def test_test_ops_stands_alone() -> None:
    """In a process of its own, where nothing else has imported what it needs."""
    command = [sys.executable, "-m", "vkback.cli.main", "test-ops", "-o", "SILU", "-p", "4096"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("  1/1 tests passed\n")


def test_starting_up_leaves_pandas_alone() -> None:
    """It takes half a second to import; tables that need it import it where they are made."""
    code = "import sys; from vkback.cli import bench, main; assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=60)
