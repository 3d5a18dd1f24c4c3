"""The command line as people type it: help wherever it is asked for, prompts by any way, options that are none."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_kit import REPOSITORY, FakeEngine, call
from waiting import PATIENCE_S

from vkback.api import Timings
from vkback.cli import main, vkbench
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.models.registry import Model
from vkback.models.synth import outline
from vkback.paths import builtin_model

# --- help, and where the command is called from


@pytest.mark.parametrize(
    ("line", "usage"),
    [
        ("-h", "Usage: vkback [OPTIONS] COMMAND"),
        ("help", "Usage: vkback [OPTIONS] COMMAND"),
        ("run -h", "Usage: vkback run [OPTIONS]"),
        ("help run", "Usage: vkback run [OPTIONS]"),
        ("bench -h", "Usage: vkbench [OPTIONS]"),
        ("help bench", "Usage: vkbench [OPTIONS]"),
        ("bench batch -h", "Usage: vkbench batch [OPTIONS]"),
    ],
)
def test_help_is_shown_wherever_it_is_asked_for(
    line: str, usage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, main.main, *line.split()) == 0
    assert capsys.readouterr().out.startswith(usage)


def test_vkbench_s_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("-h", "help", "--help"):
        assert call(monkeypatch, vkbench.main, word) == 0
        assert capsys.readouterr().out.startswith("Usage: vkbench [OPTIONS] [TEST]...")


def test_help_of_what_vkbench_measures_besides(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in vkbench.COMMANDS:
        for words in (("help", name), (name, "-h")):
            assert call(monkeypatch, vkbench.main, *words) == 0
            assert capsys.readouterr().out.startswith(f"Usage: vkbench {name} [OPTIONS]")


def test_help_of_a_command_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "help", "runn") == 2
    assert capsys.readouterr().err == "vkback: error: No such command 'runn'. Did you mean 'run'? vkback --help tells more\n"


def test_bench_is_vkbench(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "bench", "tg4", "-m", "demo-dense", "-r", "1", "-o", "json") == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["n_gen"] == 4 and result["command"] == "vkbench tg4 -m demo-dense -r 1 -o json"


def test_the_package_can_be_executed() -> None:
    for words, usage in ((["run", "-h"], "Usage: vkback run "), (["bench", "-h"], "Usage: vkbench ")):
        line = [sys.executable, "-m", "vkback", *words]
        done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, encoding="utf-8", timeout=PATIENCE_S, check=True)
        assert done.stdout.startswith(usage)


@pytest.mark.parametrize(
    ("program", "typed", "offered"),
    [
        ("vkback", "vkback perp", ["perplexity"]),
        ("vkback", "vkback run --te", ["--temp", "--temperature", "--tensor-split"]),
        ("vkbench", "vkbench --warm", ["--warmup"]),
        ("vkbench", "vkbench batch --rep", ["--repetitions"]),
    ],
)
def test_shells_complete_commands_and_options(program: str, typed: str, offered: list[str]) -> None:
    asked = {f"_{program.upper()}_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    line = [sys.executable, "-c", f"import vkback.cli.start as s; s.{program}()"]
    done = subprocess.run(
        line, cwd=REPOSITORY, capture_output=True, encoding="utf-8", env={**os.environ, **asked}, timeout=PATIENCE_S, check=False
    )
    assert done.stdout.split() == offered, done.stderr


def test_completion_is_offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for entry in (main.main, vkbench.main):
        assert call(monkeypatch, entry, "--help") == 0
        assert "--install-completion" in capsys.readouterr().out


# --- options that are none


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run x -ngx 99", "No such option: -ngx. Did you mean -ngl? vkback run --help tells more"),
        ("devices -ngl=99", "No such option: -ngl; vkback devices --help tells more"),
        ("run x -ngl -2", "--n-gpu-layers -2: expected a whole number, 0 or more, auto or all"),
        ("run x -ctx 64", "No such option: -ctx. Did you mean --ctx? vkback run --help tells more"),
        ("run x -temp 0", "No such option: -temp. Did you mean --temp? vkback run --help tells more"),
        ("run x -mfoo.gguf", "No such option: -mfoo.gguf; a value stands apart from it: -m foo.gguf; vkback run --help tells more"),
        ("chat -nkvx 1", "No such option: -nkvx; vkback chat --help tells more"),
        ("run x -cnv", "-cnv: vkback chat holds conversations"),
        ("chat --no-conversation", "--no-conversation: vkback run continues a text"),
        ("serve --mmproj x.gguf", "--mmproj: images are not supported; leave it out"),
        (
            "run x -mu http://x",
            "-mu: models are local files on a device of this machine; give the model as -m FILE or -hf USER/REPO[:TYPE]",
        ),
        ("chat --reasoning-budget 64", "--reasoning-budget 64: vkback chat knows -1 alone; leave it out"),
        ("run x -sm", "-sm: expected a value, as in llama.cpp"),
        ("run x --temp inf", "Invalid value for '--temp': inf, expected a finite number; vkback run --help tells more"),
        ("finetune --data x -o y --lr inf", "Invalid value for '--lr': inf, expected a finite number; vkback finetune --help tells more"),
        (
            "run x --lora y --lora-scale nan",
            "Invalid value for '--lora-scale': nan, expected a finite number; vkback run --help tells more",
        ),
        (
            "run x --repeat-last-n -2",
            "Invalid value for '--repeat-last-n': Input should be greater than or equal to -1; vkback run --help tells more",
        ),
        ("run x --stop=", "--stop ['']: expected strings that are not empty"),
        ("run x --grammar root::=f", "--grammar: line 1, at 'f': there is no rule called f; expected a rule of that name"),
        ('run x --json-schema {"type":"objec"}', "--json-schema: the schema cannot be compiled: Invalid type: objec"),
        ("run -p a -p b", "-p/--prompt is given 2 times, expected once; vkback run --help tells more"),
        ("run x -n4 --n-predict 5", "-n/--n-predict/--predict is given 2 times, expected once; vkback run --help tells more"),
        ("run x -p y", "TEXT and -p exclude each other: each gives the text to continue"),
        ("run -p y -f z", "-p and -f exclude each other: each gives the text to continue"),
        ("run -f /nope", f"-f {Path('/nope')}: cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_option_is_named(line: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, *line.split()) == 2
    assert capsys.readouterr().err == f"vkback: error: {said}\n"


LLAMA_CLI = (
    "--threads 4 -tb 8 --split-mode none -mg 0 -b 512 --numa distribute -ot exps=CPU -fit on --keep 4 --mlock --no-mmap -nkvo "
    "--no-warmup --no-perf -no-cnv --jinja --color -v --log-disable --simple-io"
)
"""Options of llama-cli that mean nothing here, with values as people have them."""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"run -p Hi -n 2 -ngl -1 {LLAMA_CLI}", LLAMA_CLI),
        ("run Hi --predict 2 --ctx-size 64 --ubatch-size 8 --temperature 0 --typical-p 1 --top-n-sigma -1 --reverse-prompt X -fa on", ""),
        ("run -p Hi -n 2 -ngl=99 -t=99 -t 0", "-t"),
    ],
)
def test_command_lines_of_llama_cli_run_as_they_are(
    line: str, told: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, main.main, *line.split()) == 0
    out, err = capsys.readouterr()
    names = [word for word in told.split() if word.startswith("-") and word != "-1"]
    assert err.startswith(f"vkback: {', '.join(names)} mean{'s' * (len(names) == 1)} nothing here\n" if names else "prompt ")
    assert out.startswith("Hi") and engine.calls[-1] == ("generate", 2, True)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("chat", "-cnv --reasoning-format deepseek -ngl 99 -sys Short. --chat-template-file plain"),
        ("serve", "-np 2 -ngl 99 -fa on -cb --metrics --slots --threads-http 4 --cache-reuse 256 -a name --jinja --embeddings -to 60"),
        ("embed", "-ngl 99 -fa on -t 4"),
        ("perplexity", "-ngl 99 -fa 1 -b 512 -t 4"),
        ("imatrix", "-ngl 99 -fa on -t 4"),
    ],
)
def test_the_other_commands_take_those_of_theirs(
    command: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the model, which there is not: an option that is none would be named before."""
    text = {"embed": ["Hi"], "perplexity": ["--tokens", "1,2,3"], "imatrix": ["--tokens", "1,2,3", "-o", "x.gguf"]}.get(command, [])
    assert call(monkeypatch, main.main, command, *line.split(), "-m", "/nope.gguf", *text) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("vkback: ") and first.endswith(" mean nothing here")
    assert ("-ngl" in first) == (command in ("embed", "imatrix")), "the others obey it"
    assert second.startswith(f"vkback: error: model {Path('/nope.gguf')}: no such file.")


def test_numbers_below_the_least_mean_what_llama_cpp_means(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """-n -1: as many as fit; -s -1: any seed, which the result tells."""
    assert call(monkeypatch, main.main, "run", "Hi", "-n", "-1", "-c", "64") == 0
    assert engine.calls[-1] == ("generate", 64 - len("Hi") + 1, True)
    capsys.readouterr()
    monkeypatch.setattr("secrets.randbits", lambda bits: 12345)
    assert call(monkeypatch, main.main, "run", "Hi", "-n", "2", "-s", "-1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 12345


@pytest.mark.parametrize(("asked", "rows"), [("0", 131072), ("64", 64)])
def test_a_context_of_0_is_the_trained_one(
    asked: str, rows: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["graph", "--shape", "llama-1b-Q4_K_S", "--layers", "0:1", "--format", "json", "-c", asked]
    assert call(monkeypatch, main.main, *line) == 0
    assert json.loads(capsys.readouterr().out)["n_ctx"] == rows
    shape = Model.of(outline("llama-1b-Q4_K_S"))
    assert [shape.context(given) for given in (int(asked), None)] == [rows, 4096]


def test_escapes_stand_for_characters_where_they_are_asked_for(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = r"a\nb\x41\xc3\xa9\\n\q"
    assert call(monkeypatch, main.main, "run", typed, "-n", "1", "-e") == 0
    assert capsys.readouterr().out == "a\nbA\u00e9\\n\\qn\n"
    assert call(monkeypatch, main.main, "run", typed, "-n", "1") == 0
    assert capsys.readouterr().out == typed + "n\n"
    assert call(monkeypatch, main.main, "run", typed, "-n", "1", "--no-display-prompt") == 0
    assert capsys.readouterr().out == "n\n"
    assert call(monkeypatch, main.main, "run", r"\xff", "-e") == 2
    assert "with --escape, the text b'\\xff': not UTF-8 text" in capsys.readouterr().err


def test_utf_8_is_text_where_the_system_s_encoding_is_ascii(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = "日本 ü".encode().decode("ascii", "surrogateescape")  # what Python makes of it under LC_ALL=POSIX
    assert call(monkeypatch, main.main, "run", typed, "-n", "1") == 0
    assert capsys.readouterr().out == "日本 ün\n"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes in folders, and seldom allows links")
def test_what_is_no_file_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "link.gguf").symlink_to("gone.gguf")
    for name, said in (("pipe.gguf", "a pipe or a device, expected a file"), ("link.gguf", "a link to gone.gguf, which is no file")):
        assert call(monkeypatch, main.main, "run", "x", "-m", str(tmp_path / name)) == 2
        assert f"{name}: {said}" in capsys.readouterr().err


def test_values_that_look_like_options_are_values(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, main.main, "run", "-p", "-ngl", "-n1", "-c64", "-r", "-mmp") == 0
    assert capsys.readouterr().out == "-ngl" + "n" + "\n"
    assert engine.loaded[-1] == ("demo-dense-Q4_K_M.gguf", None, 64, "auto")
    assert call(monkeypatch, main.main, "run", "--", "-ngl") == 0
    assert capsys.readouterr().out.startswith("-ngl")


WRONG = [
    ("run x --device 5", "[device] no device has index 5"),
    ("vkbench tg4 --device nonsense", "[device] no device fits 'nonsense'"),
    ("run x --lora FILE", "[lora] adapter FILE: not a GGUF file"),
    ("run x -m FILE", "[gguf] FILE: not a GGUF file"),
    ("merge --lora FILE -o OUT", "[lora] adapter FILE: not a GGUF file"),
    ("synth llama-8b-Q4_K_X OUT", "[synth] no model is called 'llama-8b-Q4_K_X'. Did you mean"),
    ("synth tiny-qwen2-F32 OUT --layers 99", "[synth] tiny-qwen2-F32 has 3 layers, 99 were asked for"),
    ("graph --shape nothing", "[synth] no model is called 'nothing'"),
    ("plan --profile nonsense", "[capabilities] no profile 'nonsense'"),
    ("compare --against FILE", "[compare] FILE: no saved run of vkback compare"),
    ("compare-bench FILE FILE", "FILE: not a result of vkbench or llama-bench"),
    ("compare-bench NONE NONE", "NONE: no such file; expected a result"),
    ("perplexity -f FILE -c 4 --kl-base FILE", "[kl] FILE: is no base of log probabilities"),
    ("profile -c 64 -n 100", "--ctx 64: 2 tokens of a prompt and 100 behind it need 119 rows; raise --ctx"),
    ("run x -c 64 -n 65", "-n 65: a prompt of 2 tokens leaves room for 63"),
]
"""Command lines that name what is not there, or is something else."""


@pytest.mark.vulkan
@pytest.mark.parametrize(("line", "said"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_command_line_ends_with_2(
    line: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "FILE"
    file.write_text("root:x:0:0 and other words, of which none is a result, a model or a run\n" * 4, encoding="utf-8")
    where = {name: str(tmp_path / name) for name in ("FILE", "OUT", "NONE")}
    words = [where.get(word, word) for word in line.split()]
    entry = vkbench.main if words[0] == "vkbench" else main.main
    assert call(monkeypatch, entry, *words[words[0] == "vkbench" :]) == 2
    errors = [text for text in capsys.readouterr().err.splitlines() if ": error: " in text]
    assert len(errors) == 1 and said.replace("FILE", where["FILE"]).replace("NONE", where["NONE"]) in errors[0]
    assert not Path(where["OUT"]).exists()


@pytest.mark.vulkan
def test_a_profile_s_prompt_fits_the_context(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "profile", "-c", "40", "-n", "2", "-b", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out)


# --- prompts


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (["Hello"], "Hello"),
        (["hello", "world"], "hello world"),
        (["-p", "-"], "Gr\u00fc\u00dfe\n"),
        (["-f", "-"], "Gr\u00fc\u00dfe\n"),
        (["-f", "FILE"], "a\nb"),
    ],
)
def test_a_prompt_by_any_way(
    line: list[str], text: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("a\nb\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Gr\u00fc\u00dfe\n\n".encode()), encoding="utf-8"))
    line = [str(tmp_path / "prompt.txt") if word == "FILE" else word for word in line]
    assert call(monkeypatch, main.main, "run", *line, "-n", "1") == 0
    out, err = capsys.readouterr()
    assert out == f"{text}n\n"
    assert err.split()[:3] == ["prompt", str(len(text.encode())), "tokens"], "all of its tokens, as in Python and the server"


def test_a_prompt_that_is_none(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    (tmp_path / "empty").touch()
    for line, named in ((["-p", "-"], "stdin"), (["-f", str(tmp_path / "empty")], f"-f {tmp_path / 'empty'}"), ([""], "TEXT")):
        assert call(monkeypatch, main.main, "run", *line) == 2
        assert capsys.readouterr().err.startswith(f"vkback: error: {named} is empty; give a text to continue")
    assert call(monkeypatch, main.main, "run", "a\udcff") == 2
    assert "not UTF-8 text" in capsys.readouterr().err


# --- tokens to make


def test_the_default_count_of_tokens_fits_the_context(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for ctx, count in ((64, 60), (5, 1), (1000, 128)):
        assert call(monkeypatch, main.main, "run", "-p", "hello", "-c", str(ctx)) == 0
        assert engine.calls[-1] == ("generate", count, True)
    capsys.readouterr()
    assert call(monkeypatch, main.main, "run", "-p", "hello", "-c", "64", "-n", "61") == 2
    assert "-n 61: a prompt of 5 tokens leaves room for 60 in the context of 64; give a smaller -n" in capsys.readouterr().err


def test_json_has_the_fields_of_a_result(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ran(*more: str) -> dict[str, object]:
        assert call(monkeypatch, main.main, "run", "hello", "--json", *more) == 0
        return dict(json.loads(capsys.readouterr().out))

    result = ran("-n", "6", "-s", "7")
    assert (result["finish_reason"], result["seed"], result["text"]) == ("length", 7, "n\u00e9, n")
    timings = result["timings"]
    assert isinstance(timings, dict)
    rates = {"prompt_tokens_per_s", "decode_tokens_per_s"}
    assert {*timings} == {*vars(Timings())} | rates
    assert (timings["prompt_tokens"], timings["decode_tokens"]) == (5, 6) and len(list(result["prompt_tokens"])) == 5  # type: ignore[call-overload]
    assert result["build_commit"]
    assert ran("-c", "8")["finish_reason"] == "context"
    assert ran("-r", "n")["finish_reason"] == "stop"
    monkeypatch.setattr(type(engine.tokenizer), "eos_ids", frozenset(b","))
    assert ran("-n", "4")["finish_reason"] == "eos"


def test_a_bias_of_a_token_that_there_is_not(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for token in (256, 9999999, -1):
        assert call(monkeypatch, main.main, "run", "-p", "x", "-l", f"{token}=1") == 2
        said = capsys.readouterr().err
        assert said == f"vkback: error: --logit-bias {token}: no token of this model, expected an id in 0..255\n"


@pytest.mark.vulkan
def test_prompt_tokens_are_counted_alike(device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from vkback.api import LoadedModel

    with LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=64, progress=False)) as model:
        count = model.generate("Hello there", max_tokens=1).timings.prompt_tokens
    assert call(monkeypatch, main.main, "run", "Hello there", "-c", "64", "-n", "1") == 0
    assert f"prompt     {count:5} tokens in" in capsys.readouterr().err
