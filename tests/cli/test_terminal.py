"""Every command on a terminal of 80 columns: what it prints fits, has no colour in a pipe, and can be had as JSON."""

from __future__ import annotations

import json
import re
import sqlite3

import pytest
import typer.main
from typer.testing import CliRunner

from vkback.cli import main, vkbench
from vkback.cli.terminal import WIDTH
from vkback.plan.cost.forecast import Costs
from vkback.timing import profile_model
from vkback.timing.math_rate import MathRate

H200 = ("--profile", "nvidia_h200_linux")
CASE = "MUL_MAT(type_a=q4_K,m=4096,n=1,k=14336)"
SMALL = ("-o", "SQR(type=f32,ne=[10,5,4,3])")

WITHOUT_JSON = {
    "chat": "a conversation: there is nothing to tell but its text",
    "serve": "it answers in JSON, to clients",
    "worker": "it runs until it is ended; results go to whoever asked",
}
"""Commands that have no --json, and why."""

RUNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "devices": ((),),
    "run": (("-p", "The", "-n", "4", "-c", "64"),),
    "perplexity": (("-f", "TEXT", "-c", "64", "--chunks", "1"),),
    "embed": (("--pooling", "mean", "-c", "64", "The", "sea"),),
    "synth": (("--list",),),
    "graph": (("-m", "demo-moe"), ("-m", "demo-dense", "-f", "list"), ("-m", "demo-dense", "-f", "ir")),
    "plan": tuple((*H200, "-m", m, "-c", "512", *more) for m in ("demo-dense", "demo-moe") for more in ((), ("-v",), ("-t", "512"))),
    "profile": (("--prompt-tokens", "16", "-n", "2", "-b", "0", "-c", "64"),),
    "test-ops": (SMALL, ("support", "-o", "MUL_MAT,FLASH_ATTN_EXT"), ("--list-ops",)),
    "compare": (("-m", "demo-moe", "-n", "1", "--brief"),),
    "compare-bench": (("BEFORE", "AFTER"),),
    "history": (("STORE",),),
    "doctor": (SMALL,),
    "state-check": (("--prompt-tokens", "4", "-n", "4", "-c", "64"),),
    "cache": ((), ("--part", "pipelines")),
    "explain": ((CASE, *H200), (CASE, *H200, "-v", "--sync", "sentinel")),
    "kernels": (),
    "tune": (),
    "train-parity": (),
    "finetune": (),
    "merge": (),
    "quantize": (),
    "imatrix": (),
    "convert": (),
    "pull": (),
}
"""Arguments of each command that has a table. `kernels` needs a driver with statistics, `tune` and those of training minutes: tests of
their own look at what they print."""

DOCUMENTED = re.compile(
    r"^nmse = "  # lines of `compare` and
    r"|^[ |<>-]*( +(costs|[xyz]): |\S+: )"  # of `graph`, as other tools print them
    r"|^(Graph|Inputs|Outputs|=== |  \w)"  # the IR form
    r"|^ +\d+ [A-Z_]+ "  # a node a line
    r"|^vkback: \d+ = "  # a device
    r"|^  [A-Z][A-Z0-9_]+\(.*\): "  # a case, to be pasted
    r"|^\S+(, kept under|: your own tuning tables)"  # a folder of the user's, however deep
)
"""Lines whose form others have given, wider than a terminal where that is."""


def commands() -> dict[str, set[str]]:
    """Options of each command."""
    click = typer.main.get_command(main.app)
    assert hasattr(click, "commands")
    return {name: {o for p in command.params for o in p.opts} for name, command in click.commands.items()}


def test_every_command_can_answer_in_json() -> None:
    without = {name for name, options in commands().items() if "--json" not in options}
    assert without == set(WITHOUT_JSON)
    more = typer.main.get_command(vkbench.app_of("batch"))
    assert hasattr(more, "commands")
    for command in (typer.main.get_command(vkbench.app), *more.commands.values()):
        assert any("--json" in p.opts for p in command.params)


def test_every_command_is_looked_at() -> None:
    assert set(commands()) == {*RUNS, *WITHOUT_JSON}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What commands read."""
    tmp_path = tmp_path_factory.mktemp("files")
    text = tmp_path / "text.txt"
    text.write_text("The time traveller was expounding a recondite matter to us. " * 8)
    before, after, store = (str(tmp_path / name) for name in ("before.json", "after.json", "store.sqlite"))
    runner = CliRunner()
    arguments = ["-m", "demo-dense", "-p", "0", "-n", "2", "-r", "2", "--read-rate", "1", "--save", before, "--save", after]
    ran = runner.invoke(vkbench.app, [*arguments, "--store", store])
    assert ran.exit_code == 0, ran.output
    with sqlite3.connect(store) as opened:
        assert opened.execute("select count(*) from sqlite_master").fetchone()[0] > 0
    return {"TEXT": str(text), "BEFORE": before, "AFTER": after, "STORE": store}


@pytest.mark.vulkan
def test_what_commands_print_fits_and_has_no_colour(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(profile_model, "device_costs", lambda device, library: Costs(1.0, 2.0, 1.0, "made up"))
    monkeypatch.setattr(profile_model, "measure_math_rate", lambda device, library, kernel: MathRate(kernel, 1e11, "made up"))
    runner = CliRunner()
    for name, runs in RUNS.items():
        for arguments in runs if name != "run" else ():  # whose stdout is a model's text
            ran = runner.invoke(main.app, [name, *(files.get(a, a) for a in arguments)])
            assert ran.exit_code == 0, (name, arguments, ran.output, ran.exception)
            assert "\x1b" not in ran.output, (name, arguments)
            wide = [line for line in ran.stdout.splitlines() if len(line) > WIDTH and not DOCUMENTED.match(line)]
            assert wide == [], (name, arguments)


@pytest.mark.vulkan
def test_json_is_all_there_is_on_stdout(files: dict[str, str]) -> None:
    runner = CliRunner()
    for name in ("run", "perplexity", "embed", "test-ops", "doctor", "cache", "explain"):  # tests of their own read what the others print
        ran = runner.invoke(main.app, [name, *(files.get(a, a) for a in RUNS[name][0]), "--json"])
        assert ran.exit_code == 0, (name, ran.output, ran.exception)
        found = json.loads(ran.stdout)
        record = found[0] if isinstance(found, list) else found
        assert set(record) >= FIELDS[name], name


FIELDS = {
    "run": {"prompt", "prompt_tokens", "text", "tokens", "prompt_s", "generation_s", "compile_s"},
    "perplexity": {"perplexity", "error", "tokens", "chunks", "chunk", "against"},
    "embed": {"object", "model", "data"},
    "test-ops": {"op_name", "op_params", "passed", "nmse", "tolerance_nmse"},
    "doctor": {"ran", "failures", "switches", "cures", "verdict", "device", "driver"},
    "cache": {"folder", "limit_bytes", "parts", "tuning"},
    "explain": {"case", "device", "choices", "dispatches"},
}
"""Some of what is in the JSON of each."""
