"""vkbench --against: what each side is started as, that runs take turns, and what is said of the result."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_kit import call
from waiting import PATIENCE_S

from vkback.cli import vkbench, vkbench_against, vkbench_sides
from vkback.cli.shell import UsageError
from vkback.cli.vkbench_sides import AgainstError, How, changed, other_side, sizes
from vkback.cli.vkbench_tests import BenchTest, parse_name
from vkback.paths import builtin_model
from vkback.report.pairs import least_pairs

HOW = How(builtin_model("demo-dense"))
TG8 = [BenchTest(0, 8)]

RECORD = {
    "model_type": "llama 1B Q8_0",
    "model_size": 2**30,
    "model_n_params": 10**9,
    "backends": "Vulkan",
    "n_gpu_layers": 99,
    "build_commit": "0c1e570",
}


class FakeSide:
    """Speeds that follow the runs of the whole machine: it becomes slower with every run, the other as much as this."""

    runs: int = 0
    order: str = ""

    def __init__(self, name: str, factor: float = 1.0, stays: bool = True) -> None:
        self.name, self.factor, self.stays = name, factor, stays
        self.hello = {"device": "vkback: 0 = Test GPU", "table": "device_test_gpu.toml"}
        self.warm: list[bool] = []

    def run(self, test: int, warm: bool) -> dict[str, Any]:
        FakeSide.runs += 1
        FakeSide.order += self.name[0]
        self.warm.append(warm)
        return {**RECORD, "act": self.name, "tables": "default.toml", "samples_ts": [self.factor * 1000 / (50 + FakeSide.runs)]}

    def close(self) -> None:
        pass


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> list[FakeSide]:
    """A build that is 5 % faster than the other."""
    from contextlib import nullcontext

    made = [FakeSide("other", stays=False), FakeSide("this", 1.05)]
    monkeypatch.setattr(FakeSide, "order", "")
    monkeypatch.setattr(vkbench_against, "own_side", lambda *_: made[1])
    monkeypatch.setattr(vkbench_against, "other_side", lambda *_: nullcontext(made[0]))
    monkeypatch.setattr("secrets.randbits", lambda bits: 1)
    return made


def test_runs_take_turns_and_the_change_is_found_though_both_became_slower(
    sides: list[FakeSide], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "pairs.json"
    assert call(monkeypatch, vkbench.main, "tg8", "-m", "demo-dense", "--against", "--act f32", "-r", "20", "--save", str(saved)) == 0
    lines = capsys.readouterr().out.splitlines()
    pairs = [FakeSide.order[i : i + 2] for i in range(0, 40, 2)]
    assert sorted(pairs) == ["ot"] * 10 + ["to"] * 10
    assert sides[1].warm == [True] * 20, "the device idles while a program loads its model"
    assert sides[0].warm == [False] * 20
    assert lines[0] == "vkback: 0 = Test GPU"
    assert "t/s (--act f32)" in lines[1] and "t/s (this)" in lines[1]
    cells = [c.strip() for c in lines[3].strip("|").split(" | ")]
    assert cells[5:7] == ["other -> this", "tg8"] and cells[-1].startswith("yes (+3.") and cells[-1].endswith(" %)")
    assert 4.5 < float(cells[-2].rstrip("%")) < 5.5
    assert lines[5].startswith("20 pairs of runs in turn")
    assert lines[7:] == ["- --act f32: build 0c1e570; tables default.toml", "- this: build 0c1e570; tables default.toml"]
    (found,) = json.loads(saved.read_text())
    assert found["beats_noise"] is True and len(found["before_samples_ts"]) == 20 and found["p"] < 1e-4
    assert (found["before_act"], found["after_act"], found["after_tables"]) == ("other", "this", "default.toml")


def test_few_pairs_are_said_to_tell_nothing(
    sides: list[FakeSide], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, vkbench.main, "tg8", "-m", "demo-dense", "--against", "llama-bench", "-r", "4") == 0
    out, err = capsys.readouterr()
    assert f"-r {least_pairs()} and more can" in err
    assert "unknown (4 pairs cannot tell)" in out


def test_the_store_and_a_comparison_exclude_each_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, vkbench.main, "--against", "--act f32", "--store", "x.sqlite") == 2
    assert "--store and --against exclude each other" in capsys.readouterr().err


def program(folder: Path, body: str, name: str = "llama-bench") -> Path:
    """A program that notes its arguments in a file beside it."""
    path = folder / name
    note = folder / "arguments.txt"
    path.write_text(f"#!{sys.executable}\nimport json, sys\nopen({str(note)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n{body}\n")
    path.chmod(0o755)
    return path


ANSWER = "print(json.dumps([{'n_prompt': 0, 'n_gen': 8, 'n_depth': 0, 'samples_ts': [1.0, 2.0, 3.0], 'build_commit': 'abc'}]))"


@pytest.mark.skipif(sys.platform == "win32", reason="scripts begin with #!")
def test_llama_bench_in_path_runs_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "print('ggml_vulkan: 0 = Test GPU', file=sys.stderr)\n" + ANSWER)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    how = How(HOW.model, type_k="q8_0", type_v="q8_0", ubatch="64")
    with other_side("llama-bench -ngl 99", how, TG8, FakeSide("this")) as side:  # type: ignore[arg-type]
        assert side.run(0, True)["samples_ts"] == [3.0], "the last: the first may have met an idle card"
        assert not side.stays
    asked = (tmp_path / "arguments.txt").read_text().strip()
    assert asked == f"-ngl 99 -m {HOW.model} -ctk q8_0 -ctv q8_0 -fa 1 -ub 64 -p 0 -n 8 -r 3 -o json"


def test_llama_bench_has_no_option_twice() -> None:
    """It would run each of the values."""
    how = How(HOW.model, type_k="q8_0", type_v="q8_0", ubatch="64", n_gpu_layers="12")
    for given, left in (
        ("", "-ctk q8_0 -ctv q8_0 -fa 1 -ngl 12 -ub 64"),
        ("-ngl 99", "-ctk q8_0 -ctv q8_0 -fa 1 -ub 64"),
        ("--n-gpu-layers 99 -fa 0 -ub 512", "-ctk q8_0 -ctv q8_0"),
    ):
        assert how.of_llama_bench(shlex.split(given)) == ["-m", str(HOW.model), *shlex.split(left)]


@pytest.mark.skipif(sys.platform == "win32", reason="scripts begin with #!")
def test_a_commit_is_taken_before_a_program_or_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """libwww-perl installs /usr/bin/HEAD."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    path = program(tmp_path, ANSWER, "HEAD")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(vkbench_sides, "ROOT", tmp_path)
    monkeypatch.setattr(vkbench_sides, "_build", lambda folder, name, *_: FakeSide(f"build of {name} in {folder.name}"))
    with other_side("HEAD", HOW, TG8, FakeSide("this")) as side:  # type: ignore[arg-type]
        assert isinstance(side, FakeSide), "the program was taken"
        assert side.name == f"build of HEAD in {vkbench_sides.commit_of('HEAD')[:9]}"
    with other_side(str(path), HOW, TG8, FakeSide("this")) as side:  # type: ignore[arg-type]
        assert side.run(0, False)["build_commit"] == "abc", "a program by its path"
    (tmp_path / "HEAD").unlink()
    (tmp_path / "HEAD" / "vkback").mkdir(parents=True)
    (tmp_path / "HEAD" / "vkback" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    commit = vkbench_sides.commit_of("HEAD")
    with other_side("HEAD", HOW, TG8, FakeSide("this")) as side:  # type: ignore[arg-type]
        assert side.name == f"build of HEAD in {commit[:9]}"
    assert capsys.readouterr().err == f"vkback: HEAD is the commit {commit[:9]}; the folder is ./HEAD\n"
    with other_side("./HEAD", HOW, TG8, FakeSide("this")) as side:  # type: ignore[arg-type]
        assert side.name == "build of ./HEAD in HEAD"
    assert capsys.readouterr().err == ""
    program(tmp_path, ANSWER, "of-mine")
    with other_side("of-mine", HOW, TG8, FakeSide("this")) as side:  # type: ignore[arg-type]
        assert side.run(0, False)["build_commit"] == "abc", "no commit is called so"
    monkeypatch.setattr("vkback.paths.on_path", lambda _: None)
    assert vkbench_sides.commit_of("HEAD") == "", "without git"


@pytest.mark.skipif(sys.platform == "win32", reason="scripts begin with #!")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("print('error: failed to load', file=sys.stderr); sys.exit(1)", "ended with exit code 1: error: failed to load"),
        ("print('hello')", "expected the JSON of llama-bench with tg8, it printed hello"),
        ("print('[]')", "expected the JSON of llama-bench with tg8"),
    ],
)
def test_a_program_that_fails_is_named_with_its_last_words(tmp_path: Path, body: str, said: str) -> None:
    path = program(tmp_path, body)
    with other_side(str(path), HOW, TG8, FakeSide("this")) as side, pytest.raises(AgainstError) as e:  # type: ignore[arg-type]
        side.run(0, True)
    assert str(e.value).startswith(f"{path}: ") and said in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("against", "said"),
    [
        ("no-such-thing", "expected a folder with a build, a commit of this checkout"),
        ("llama-bench-of-mine", "not in PATH"),
        ("--flash yes", "--flash: expected one of --act, --cache-type-k"),
        ("--act", "--act: expected a value"),
        ("gemv : warp=3", "gemv"),
    ],
)
def test_what_is_no_side_is_refused_with_what_is(against: str, said: str) -> None:
    from vkback.errors import VkbackError

    with pytest.raises(VkbackError) as e, other_side(against, HOW, TG8, FakeSide("this")):  # type: ignore[arg-type]
        pass
    assert said in str(e.value)


def test_folders_that_are_no_build(tmp_path: Path) -> None:
    for name, said in (("", "neither a build"), ("default.toml", "all tables of a build")):
        if name:
            (tmp_path / name).write_text("")
        with pytest.raises(UsageError, match=said), other_side(str(tmp_path), HOW, TG8, FakeSide("this")):  # type: ignore[arg-type]
            pass


def test_tables_and_overrides_reach_the_other_side_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    class Noted(FakeSide):
        def __init__(self, name: str, command: list[str], where: Path, variables: dict[str, str]) -> None:
            super().__init__(name)
            started.append(variables)
            tables = Path(variables.get("VKBACK_TUNING", "none"))
            self.found = sorted(p.name for p in tables.glob("*.toml"))

    monkeypatch.setattr(vkbench_sides, "Resident", Noted)
    monkeypatch.setenv("VKBACK_OVERRIDES", "gemv : wg=64")
    own: Any = FakeSide("this")
    table = tmp_path / "mine.toml"
    table.write_text("")
    with other_side(str(table), HOW, TG8, own) as side:
        assert isinstance(side, Noted) and side.found == ["device_test_gpu.toml"], "called as this device's table"
    with other_side(str(tmp_path), HOW, TG8, own):
        assert started[-1]["VKBACK_TUNING"] == str(tmp_path)
    with other_side("gemv : wg=128", HOW, TG8, own):
        assert started[-1]["VKBACK_OVERRIDES"] == "gemv : wg=64;gemv : wg=128"


def test_options_of_one_side() -> None:
    how = changed(HOW, ["--act=f32", "-ctk", "q8_0", "--exact", "--fusion", "none"], "")
    assert (how.act, how.type_k, how.exact, how.fusion) == ("f32", "q8_0", True, "none")
    assert how.options()[2:] == ["--act", "f32", "-ctk", "q8_0", "-ctv", "f16", "--feed", "self", "--exact", "--fusion", "none"]
    assert sizes(parse_name("pp512+tg128@d64")) == ["-p", "0", "-n", "0", "-pg", "512,128", "-d", "64"]


def test_a_build_from_before_there_was_against_is_started_anew(tmp_path: Path) -> None:
    """Its vkbench refuses --turns, and prints JSON for one run."""
    package = tmp_path / "vkback"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import json, sys\nif '--turns' in sys.argv:\n    sys.exit('vkbench: error: No such option: --turns')\n" + ANSWER
    )
    with other_side(str(tmp_path), HOW, TG8, FakeSide("this")) as side:  # type: ignore[arg-type]
        assert side.run(0, False)["build_commit"] == "abc" and not side.stays


def test_a_side_that_cannot_load_its_model_says_why(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    with pytest.raises(AgainstError) as e:
        vkbench_sides.own_side(How(bad), TG8)
    assert str(e.value).startswith("this: ") and "bad.gguf" in str(e.value)


def test_two_settings_on_a_device(tmp_path: Path) -> None:
    """Both sides as processes, for as few pairs as can tell."""
    command = [
        sys.executable,
        "-m",
        "vkback",
        "bench",
        "tg2",
        "-m",
        "demo-dense",
        "--against",
        "--fusion none",
        "-r",
        str(least_pairs()),
        "--json",
    ]
    ran = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr
    (found,) = json.loads(ran.stdout)
    assert (found["fusion"], found["test"], found["pairs"]) == ("none -> all", "tg2", least_pairs())
    assert len(found["before_samples_ts"]) == len(found["after_samples_ts"]) == least_pairs()
    assert found["before_tables"] == found["after_tables"] and found["before_tables"].endswith("default.toml")
