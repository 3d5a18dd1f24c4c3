"""The commands of vkback but plan, with an engine that computes nothing: what is tested is what they ask for and print."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer
from cli_kit import REPOSITORY, FakeEngine, call
from device_kit import profile
from processes import run_program

from vkback.cli import main, shell, vkbench
from vkback.cli import test_ops as ops_command
from vkback.cli.shell import UsageError
from vkback.errors import VkbackError
from vkback.harness.runner import Prepared, Workbench
from vkback.models.adapter import Given
from vkback.report.build import build_info

# --- vkback


def test_run_streams_text_and_tells_speed(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "run", "-p", "Once", "-n", "10", "--device", "0", "--ctx", "64") == 0
    out, err = capsys.readouterr()
    assert out == "Once" + "né, né, " + "\n"
    assert [text.split()[:3] for text in err.splitlines()] == [["prompt", "4", "tokens"], ["generation", "10", "tokens"]]
    assert engine.calls == [("reset",), ("prompt", 3), ("generate", 10, True)]
    assert engine.loaded == [("demo-dense-Q4_K_M.gguf", "0", 64, "auto")]
    assert call(monkeypatch, main.main, "run", "-p", "Once", "-n", "1", "-ub", "256") == 0
    assert engine.loaded[-1] == ("demo-dense-Q4_K_M.gguf", None, None, "auto", 256)
    capsys.readouterr()
    assert call(monkeypatch, main.main, "run", "x", "-n", "1") == 0
    assert capsys.readouterr().err.startswith("prompt         1 token  read with the first one made\n"), "no rate of no time"


def test_closing_speaks_below_the_text(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """As that nothing can be kept in the cache."""
    monkeypatch.setattr(engine, "close", lambda: print("<closed>", flush=True))
    assert call(monkeypatch, main.main, "run", "x", "-n", "1") == 0
    assert capfd.readouterr().out == "xn\n<closed>\n"


def test_run_takes_every_adapter_with_its_scale(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a, b, c = (tmp_path / f"{name}.gguf" for name in "abc")
    for path in (a, b, c):
        path.touch()
    for options, wanted in (
        (("--lora", str(a), "--lora", str(b)), (Given(a), Given(b))),
        (("--lora", f"{a},{b}", "--lora-scale", "0.5"), (Given(a, 0.5), Given(b, 0.5))),
        (("--lora", str(a), "--lora-scaled", f"{b}:-2", "--lora-scaled", f"{c}:0.25"), (Given(a), Given(b, -2.0), Given(c, 0.25))),
    ):
        assert call(monkeypatch, main.main, "run", "-p", "x", "-n", "1", *options) == 0
        assert engine.lora == wanted


def test_run_refuses_an_empty_prompt(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "run", "-p", "") == 2
    assert capsys.readouterr().err.startswith("vkback: error: -p is empty; give a text to continue")


def test_compare_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: FakeEngine, tmp_path: Path) -> None:
    for name in ("old.json", "new.csv"):
        assert call(monkeypatch, vkbench.main, "tg8", "-r", "3", "-m", "demo-dense", "--save", str(tmp_path / name)) == 0
    capsys.readouterr()
    files = [str(tmp_path / "old.json"), str(tmp_path / "new.csv")]
    assert call(monkeypatch, main.main, "compare-bench", *files) == 0
    assert capsys.readouterr().out.split()[:5] == ["test", "before", "after", "diff", "llama"]
    assert call(monkeypatch, main.main, "compare-bench", *files, "-o", "md") == 0
    assert re.search(r"t/s \(before\) \| +t/s \(after\) \| +diff \| beats the noise", capsys.readouterr().out)
    assert call(monkeypatch, main.main, "compare-bench", *files, "-o", "json") == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["test"], record["model"]) == ("tg8", "llama 0.1B Q4_0")
    assert call(monkeypatch, main.main, "compare-bench", *files, "-o", "csv") == 0
    assert capsys.readouterr().out.startswith("model,size,params,backend,ngl,test,before_ts,")
    assert call(monkeypatch, main.main, "compare-bench", *files, "-o", "xml") == 2
    assert capsys.readouterr().err == "vkback: error: -o xml: expected one of table, md, csv, html, json\n"


def test_synth_lists_names_and_writes_a_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call(monkeypatch, main.main, "synth", "--list") == 0
    row = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("llama-8b-Q4_K_M "))
    assert row.split() == ["llama-8b-Q4_K_M", "4.58", "GiB", "8.03", "B"]
    assert call(monkeypatch, main.main, "synth", "--list", "llama-8b") == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert "llama-8b-Q4_K_M" in listed and all("llama-8b" in each for each in listed)
    assert call(monkeypatch, main.main, "synth", "--list", "laama-8b-Q4_K_M") == 2
    assert "synth --list laama-8b-Q4_K_M: no name has that in it. Did you mean llama-8b-Q4_K_M?" in capsys.readouterr().err
    assert call(monkeypatch, main.main, "synth", "--list", "--json", "mistral-large") == 0
    sizes = {entry["name"]: entry["params"] for entry in json.loads(capsys.readouterr().out)}
    assert sizes["mistral-large-123b-Q4_K"] == 122_610_069_504
    assert call(monkeypatch, main.main, "synth", "llama-1b-Q4_K_M") == 2
    assert capsys.readouterr().err.startswith("vkback: error: synth needs a name and a file")
    assert call(monkeypatch, main.main, "synth", "nothing-Q4_0", str(tmp_path / "x.gguf")) == 2
    assert capsys.readouterr().err.startswith("vkback: error: [synth] no model is called 'nothing-Q4_0'")


def test_graph_lists_nodes_in_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "graph", "-t", "3", "-c", "32", "-f", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "0 GET_ROWS inp_embd F32[3, 256] <- token_embd.weight Q6_K[4096, 256], tokens I32[3]"
    assert lines[-1].split()[:3] == [str(len(lines) - 1), "MUL_MAT", "result_output"]


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
        (["DIFF", "ADD"], None, "no op and no case is called DIFF. --list-ops shows the ops"),
        (["MUL_MATT"], None, "no op and no case is called MUL_MATT. Did you mean MUL_MAT? --list-ops shows the ops"),
        (["ROPE"], None, "ROPE has no case of this kind; --list-ops shows how many each op has"),
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
    case = "SILU(type=f32,ne_a=[4096,1,1,1],v=0,seed=4)"
    assert lines[1:] == ["[SILU] guard bytes were overwritten", f"  {case}: FAIL", "  0/1 tests passed", "", "Failing tests:", f"  {case}"]


@pytest.mark.vulkan
def test_records_are_whole_where_a_run_is_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = Workbench.run
    ran: list[Prepared] = []

    def interrupted(self: Workbench, prepared: Prepared) -> Any:
        if ran:
            raise KeyboardInterrupt
        ran.append(prepared)
        return run(self, prepared)

    monkeypatch.setattr(Workbench, "run", interrupted)
    assert call(monkeypatch, main.main, "test-ops", "-o", "SILU", "--json") == 130
    (first,) = json.loads(capsys.readouterr().out)
    assert first["op_name"] == "SILU" and first["passed"]


@pytest.mark.vulkan
def test_devices_lists_what_device_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "devices", "--json") == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert first["index"] == 0 and first["subgroup_size"] > 0
    assert call(monkeypatch, main.main, "devices") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    named = [text for text in lines if not text.startswith(" ")]  # what a device has stands behind, indented
    assert all(text.startswith(f"vkback: {i} = ") for i, text in enumerate(named))


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
        "    signal.raise_signal(signal.SIGINT)\n"
        "shell.run(app, 'vkback')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = run_program([sys.executable, "-c", code], env=environment)
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
    with pytest.raises(UsageError, match=r"model demo-dens3: no such file\. Did you mean demo-dense\? Give the path"):
        shell.model_path("demo-dens3")
    with pytest.raises(UsageError, match="a folder"):
        shell.model_path(str(tmp_path))


@pytest.mark.vulkan
def test_test_ops_stands_alone() -> None:
    """In a process of its own, where nothing else has imported what it needs."""
    command = [sys.executable, "-m", "vkback.cli.main", "test-ops", "-o", "SILU", "-p", "4096"]
    done = run_program(command, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("  1/1 tests passed\n")


@pytest.mark.parametrize(
    ("needs", "others"),
    [
        (
            "from vkback.cli import main, run, vkbench; import vkback.engine.engine, vkback.gguf.tokenizer",
            "pandas gguf yaml jinja2 rich matplotlib vkback.api vkback.autotune vkback.cli.tune vkback.harness vkback.train",
        ),
        ("from vkback.cli import main; main.app_of('devices'); from vkback.device import list_devices", "numpy vkback.shader"),
        ("from vkback.cli import main; main.app_of('')", "numpy vulkan vkback.shader vkback.cli.devices"),
        ("import vkback.cli.compare_bench, vkback.cli.history", "pandas numpy"),
        ("from vkback.report import compare, compare_ops, history", "vulkan vkback.ops vkback.timing"),
    ],
    ids=["token", "devices", "help", "results --help", "results"],
)
def test_starting_up_imports_no_more_than_is_needed(needs: str, others: str) -> None:
    """Imports are half of a second start on a GPU. What tables, templates, adapters and other commands need is imported there."""
    code = f"import sys\n{needs}\nprint(*sorted({set(others.split())} & sys.modules.keys()))"
    done = run_program([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
    assert done.stdout == "\n"


def test_garbage_is_collected_as_usual_once_a_model_is_loaded() -> None:
    code = (
        "import gc\nfrom vkback.cli import shell\nusual = gc.get_threshold()\n"
        "def app(prog_name, standalone_mode):\n"
        "    print(gc.get_threshold() > usual, shell._loaded(7), gc.get_threshold() == usual, gc.get_freeze_count())"
        "\nshell.run(app, '')"
    )
    done = run_program([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
    assert re.fullmatch("True 7 True [1-9][0-9]+\n", done.stdout)


def test_each_command_is_imported_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[dict[str | None, object]] = []
    made = main.app_of

    def noted(asked: str) -> Callable[..., None]:
        ran.append({c.name: c.callback for c in made(asked).registered_commands})
        return lambda **_: None

    monkeypatch.setattr(main, "app_of", noted)
    for arguments, alone in (["devices", "--json"], ["devices"]), (["--", "devices"], ["devices"]), (["--help"], []), ([], []), (["x"], []):
        monkeypatch.setattr(sys, "argv", ["vkback", *arguments])
        with pytest.raises(SystemExit):
            main.main()
        commands = ran.pop()
        assert [*commands] == [*main.COMMANDS], "--help lists all"
        assert [name for name, function in commands.items() if function is not main._listed] == alone
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["vkback", "devices", "--help"])
    with pytest.raises(SystemExit):
        main.main()
    assert "Usage: vkback devices [OPTIONS]" in capsys.readouterr().out, "a command alone keeps its name"


def test_a_status_line_is_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: FakeEngine) -> None:
    assert call(monkeypatch, vkbench.main, "tg8", "-r", "2", "-m", "demo-dense") == 0
    assert "\x1b" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert call(monkeypatch, vkbench.main, "tg8", "-r", "2", "-m", "demo-dense") == 0
    err = capsys.readouterr().err
    assert re.search("\r\x1b\\[2Kvkbench: demo-dense.*tg8: run 2/2\r\x1b\\[2K$", err)


def test_an_option_that_is_given_twice_is_added_up_or_refused() -> None:
    """Every option of every command, by each of its names: of two values none is dropped."""
    several = {f"vkbench {name}": one for name, one in cast(Any, typer.main.get_command(vkbench.app_of("batch"))).commands.items()}
    found = {"vkbench": typer.main.get_command(vkbench.app), **several, **cast(Any, typer.main.get_command(main.app_of())).commands}
    refused = 0
    for name, command in found.items():
        for param in command.params:
            if param.param_type_name != "option" or param.is_eager:
                continue
            flag = getattr(param, "is_flag", False)
            for spelled in (*param.opts, *param.secondary_opts):
                given = [spelled] if flag else [spelled, *["1"] * param.nargs]
                context = command.context_class(command, info_name=name)
                if getattr(param, "multiple", False):
                    _, _, order = command.make_parser(context).parse_args(args=given * 2)
                    assert sum(other is param for other in order) == 2, f"{name} {spelled}"
                    continue
                with pytest.raises(UsageError, match=f"{re.escape('/'.join(param.opts))} is given 2 times, expected once; {name} --help"):
                    command.parse_args(context, given * 2)
                refused += 1
    assert refused > 300


@pytest.mark.vulkan
def test_every_op_of_a_repeated_option_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "test-ops", "support", "-o", "ARGMAX", "-o", "SUM,MEAN") == 0
    out = capsys.readouterr().out
    assert all(any(line.startswith(f"{op} ") for line in out.splitlines()) for op in ("ARGMAX", "SUM", "MEAN"))


@pytest.mark.vulkan
def test_the_report_for_bugs_is_json_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, main.main, "devices", "--json", "--report") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["build"] == build_info()[0] and told["packages"]["numpy"] and told["devices"][0]["name"] and told["cache"]
    assert call(monkeypatch, main.main, "devices", "--report") == 0
    assert f"build: {told['build']} ({told['build_number']})" in capsys.readouterr().out


def test_devices_tell_which_products_are_emulated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    caps = profile("nvidia_h200_linux")
    emulating = profile("nvidia_h200_linux", int_dot_accelerated=False)
    monkeypatch.setattr("vkback.device.list_devices", lambda: [caps, emulating])
    monkeypatch.setattr("vkback.device.instance.free_memory", lambda: [None, None])
    assert call(monkeypatch, main.main, "devices") == 0
    _, own, _, other = capsys.readouterr().out.splitlines()
    assert other == f"{own}; integer dot products are emulated"
