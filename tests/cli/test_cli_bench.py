"""vkbench with an engine that computes nothing: what is tested is what it asks for and prints."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_kit import FakeEngine, call

from vkback.cli import vkbench
from vkback.cli.shell import UsageError
from vkback.cli.vkbench_run import WARMUP_TOKENS, measure
from vkback.cli.vkbench_tests import BenchTest, parse_name, parse_values, plan_tests
from vkback.engine.load_options import LoadOptions
from vkback.errors import VkbackError

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
    assert [t.name for t in tests] == ["pp8", "pp16", "tg4", "pp8+tg4", "pp8 @ d32", "pp16 @ d32", "tg4 @ d32", "pp8+tg4 @ d32"]


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
    assert call(monkeypatch, vkbench.main, "tg8", "-r", "2") == 0
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
    assert call(monkeypatch, vkbench.main, "tg8", "tg8@d100", "pp16", "-r", "1", "-m", "demo-dense") == 0
    assert [c[1] for c in engine.calls if c[0] == "resize"] == [8, 108, 16]
    assert [loaded[2] for loaded in engine.loaded] == [108], "loaded once, for the largest"


def test_vkbench_takes_llama_bench_s_flags(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "r.jsonl"
    args = shlex.split("-m demo-moe -p 16,32 -n 0 -pg 8,4 -d 0,64 -r 1 -o json -oe csv --no-warmup -dev 0 --act f32,q8_1")
    assert call(monkeypatch, vkbench.main, *args, "--save", str(saved)) == 0
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


WITHOUT_MEANING = (
    "-b 2048 -t 8 -C 0x0 --cpu-strict 0 --poll 50 --numa distribute --prio 2 -sm none -mg 0 -nkvo 0 -mmp 0 "
    "-dio 0 -lm auto -lzm auto -embd 0 -ot x=CPU -nopo 0 --no-host 0 --repack 1 -fitt off -fitc 4096 -v --offline "
    "--batch-size 1 --threads 1 --split-mode layer --main-gpu 0 --no-kv-offload 1 "
    "--mmap 1 --embeddings 1 --verbose"
)
"""All options of llama-bench but those that vkbench obeys."""


def test_a_command_line_of_llama_bench_runs_as_it_is(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = shlex.split(f"-m demo-dense -p 8 {WITHOUT_MEANING} -b 512 -n 4 -r 1 --delay 0 -o json")
    assert call(monkeypatch, vkbench.main, *line) == 0
    out, err = capsys.readouterr()
    assert [(r["n_prompt"], r["n_gen"]) for r in json.loads(out)] == [(8, 0), (0, 4)]
    named = [word for word in WITHOUT_MEANING.split() if word.startswith("-")]
    assert err == f"vkbench: {', '.join(named)} mean nothing here\n", "each once, though -b came twice"
    assert call(monkeypatch, vkbench.main, "tg4", "-m", "demo-dense", "-r", "1", "-t=4", "-ngl=99") == 0
    assert capsys.readouterr().err == "vkbench: -t means nothing here\n"


def test_attention_as_nodes_of_its_own_by_llama_bench_s_option(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loads: list[bool] = []
    load: Callable[..., Any] = vars(vkbench)["load_engine"]

    def noted(path: Path, device: str | None, how: LoadOptions) -> Any:
        loads.append(how.flash_attn)
        return load(path, device, how)

    monkeypatch.setattr(vkbench, "load_engine", noted)
    assert call(monkeypatch, vkbench.main, *shlex.split("-m demo-dense -n 4 -p 0 -r 1 -fa 0,1 -o json")) == 0
    assert [r["flash_attn"] for r in json.loads(capsys.readouterr().out)] == [0, 1] and loads == [False, True]
    assert call(monkeypatch, vkbench.main, *shlex.split("-m demo-dense -n 4 -p 0 -r 1 --flash-attn off")) == 0
    head, _, row = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    cells = dict(zip(*([cell.strip() for cell in line.split("|")] for line in (head, row)), strict=True))
    assert cells["fa"] == "0"
    assert call(monkeypatch, vkbench.main, *shlex.split("-m demo-dense -n 4 -p 0 -r 1")) == 0
    assert "| fa" not in capsys.readouterr().out and loads == [False, True, False, True]
    assert call(monkeypatch, vkbench.main, *shlex.split("-m demo-dense -n 4 -fa maybe")) == 2
    assert capsys.readouterr().err == "vkbench: error: -fa maybe: expected one of on, off, auto, 1, 0, -1\n"


def test_options_of_llama_bench_that_cannot_be_obeyed(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for line, said in (
        ("-hfr ggml-org/x", "-hfr: models are local files on a device of this machine; give the model as -m FILE or -hf USER/REPO[:TYPE]"),
        ("-p 8 -sm", "-sm: expected a value, as in llama.cpp"),
        ("-ngx 5", "No such option: -ngx. Did you mean -ngl? vkbench --help tells more"),
        ("-p 8 -ngl many", "-ngl many: expected a number, a list as 128,256, or a range as 1-4, 0-8192+2048 or 1-512*2"),
        ("-ctk f16,q5_0", "--cache-type-k q5_0: expected one of f16, q8_0, q4_0, f32"),
    ):
        assert call(monkeypatch, vkbench.main, *line.split()) == 2
        assert capsys.readouterr().err == f"vkbench: error: {said}\n"
    assert engine.loaded == []


def test_vkbench_runs_each_cache_type(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, vkbench.main, "tg4", "-m", "demo-dense", "-r", "1", "-ctk", "f16,q8_0", "-ctv", "q4_0", "-o", "json") == 0
    assert [(r["type_k"], r["type_v"]) for r in json.loads(capsys.readouterr().out)] == [("f16", "q4_0"), ("q8_0", "q4_0")]


def test_vkbench_rests_before_tests(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr("time.sleep", rests.append)
    assert call(monkeypatch, vkbench.main, "tg4", "pp4", "-m", "demo-dense", "-r", "1", "--delay", "2") == 0
    assert rests == [2.0, 2.0]


@pytest.mark.vulkan
def test_vkbench_lists_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, vkbench.main, "--list-devices") == 0
    assert capsys.readouterr().out.startswith("vkback: 0 = ")


def test_vkbench_runs_each_ubatch(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, vkbench.main, "pp8", "-r", "1", "-m", "demo-dense", "-ub", "64,128", "-oe", "jsonl", "--read-rate", "0") == 0
    out, err = capsys.readouterr()
    assert [loaded[-1] for loaded in engine.loaded] == [64, 128]
    assert [json.loads(text)["n_ubatch"] for text in err.splitlines()] == [64, 128]
    assert out.splitlines()[1].startswith("| model                          |       size |     params | backend    | ngl | n_ubatch |")
    assert call(monkeypatch, vkbench.main, "pp8", "-r", "1", "-m", "demo-dense", "-ub", "512") == 0
    assert "n_ubatch" not in capsys.readouterr().out, "llama-bench's default"


def test_vkbench_tells_exact_results_apart(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("pp8", "-r", "1", "-m", "demo-dense", "-oe", "jsonl", "--read-rate", "0")
    assert call(monkeypatch, vkbench.main, *args, "--exact") == call(monkeypatch, vkbench.main, *args) == 0
    out, err = capsys.readouterr()
    assert [("exact" in loaded) for loaded in engine.loaded] == [True, False]
    assert [json.loads(text)["exact"] for text in err.splitlines()] == [True, False]
    heads = [line for line in out.splitlines() if line.startswith("| model ")]
    assert [("| exact |" in head) for head in heads] == [True, False]


def test_logits_to_host_is_feeding_random_tokens(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, vkbench.main, "tg3", "-r", "1", "-m", "demo-dense", "--no-warmup", "--logits-to-host", "-oe", "jsonl") == 0
    out, err = capsys.readouterr()
    assert json.loads(err)["feed"] == "random"
    assert "feed" in out.splitlines()[1]
    assert [name for name, *_ in engine.calls].count("decode_logits") == 3


def test_kept_tables_say_when_where_and_how(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table, machine = tmp_path / "r.md", tmp_path / "r.json"
    assert call(monkeypatch, vkbench.main, "tg8", "-r", "1", "-m", "demo-dense", "--save", str(table), "--save", str(machine)) == 0
    lines = table.read_text(encoding="utf-8").splitlines()
    (result,) = json.loads(machine.read_text())
    assert lines[0] == f"    {result['command']}"
    assert lines[2] == f"{result['test_time'][:10]}, Test GPU, driver testdrv 1.2"
    assert lines[4:] == capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("args", "rate"), [([], 200.0), (["--read-rate", "100"], 100.0), (["--read-rate", "0"], None)])
def test_vkbench_shows_the_share_of_the_read_rate(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], rate: float | None
) -> None:
    assert call(monkeypatch, vkbench.main, "tg8", "-r", "1", "-m", "demo-dense", "-oe", "jsonl", *args) == 0
    out, err = capsys.readouterr()
    assert ("% read" in out) == (rate is not None)
    result = json.loads(err)
    assert result["read_rate_gb_s"] == rate
    assert result["percent_of_read"] == (None if rate is None else pytest.approx(100 * result["gb_s"] / rate))


@pytest.mark.parametrize(("args", "rate"), [([], 0.5), (["--math-rate", "2"], 2.0), (["--math-rate", "0"], None)])
def test_vkbench_shows_the_share_of_the_math_rate(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], rate: float | None
) -> None:
    assert call(monkeypatch, vkbench.main, "pp32", "pp32@d64", "-r", "1", "-m", "demo-dense", "-oe", "jsonl", *args) == 0
    out, err = capsys.readouterr()
    assert "TFLOPS" in out
    assert ("% math" in out) == (rate is not None)
    first, deep = map(json.loads, err.splitlines())
    assert (first["prompt_flops"], deep["prompt_flops"]) == (64_000_000, 64_064_000), "depth counts in attention"
    assert (first["math_way"], first["math_rate_tflops"]) == ("coop_mat", rate)
    assert first["tflops"] == pytest.approx(first["prompt_flops"] / first["samples_ns"][0] / 1e3)
    assert first["percent_of_math"] == (None if rate is None else pytest.approx(100 * first["tflops"] / rate))


def test_the_math_rate_is_that_of_the_kernel_a_prompt_takes(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def measured(device: object, kernel: str) -> float:
        asked.append(kernel)
        return 1.0

    monkeypatch.setattr(vkbench, "measured_math_rate", measured)
    assert call(monkeypatch, vkbench.main, "pp8", "pp9", "pp32", "tg8", "pp8+tg8", "-r", "1", "-m", "demo-dense", "-oe", "jsonl") == 0
    results = [json.loads(text) for text in capsys.readouterr().err.splitlines()]
    assert [r["math_way"] for r in results] == ["int_dot", "int_dot", "coop_mat", "", ""]
    assert asked == ["int_dot", "coop_mat"], "each once"


def test_generation_alone_has_no_columns_of_prompts(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, vkbench.main, "tg8", "-r", "1", "-m", "demo-dense") == 0
    out = capsys.readouterr().out
    assert "TFLOPS" not in out and "% math" not in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tg"], "vkbench: error: 'tg' is not a test; expected a name as pp512, tg128, pp512+tg128 or tg128@d4096"),
        (
            ["-m", "none.gguf"],
            "vkbench: error: model none.gguf: no such file. Give the path of a GGUF file, or a built-in model: demo-dense",
        ),
        (["-o", "xml"], "vkbench: error: -o xml: expected one of md, csv, json, jsonl, sql"),
        (["--save", "results.xlsx"], "vkbench: error: --save results.xlsx, ending xlsx: expected one of md, csv, json, jsonl, sql"),
        (
            ["--save", "/nonexistent/r.json"],
            "vkbench: error: --save /nonexistent/r.json: there is no folder /nonexistent; make it, or give another name",
        ),
        (["--feed", "x"], "vkbench: error: --feed x: expected one of self, random"),
        (["--act", "auto,f16"], "vkbench: error: --act f16: expected one of auto, f32, q8_1"),
    ],
)
def test_vkbench_user_errors_are_one_line(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert call(monkeypatch, vkbench.main, *args) == 2
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_an_error_of_the_engine_is_one_line_too(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: FakeEngine, tokens: Sequence[int]) -> None:
        raise VkbackError("[engine] the context is full")

    monkeypatch.setattr(FakeEngine, "prompt", fail)
    assert call(monkeypatch, vkbench.main, "pp8", "-m", "demo-dense") == 1
    assert capsys.readouterr().err == "vkbench: error: [engine] the context is full\n"
    assert engine.closed
