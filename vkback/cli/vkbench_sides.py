"""The two sides of `vkbench --against`: builds, tuning tables, settings or programs (vkback/cli/vkbench_against.py runs them in turn).

Each side is a process. One of a vkback that knows how keeps its model loaded (vkback/cli/vkbench_turns.py); any other program is started
anew for each run, as llama-bench with its options, and prints its JSON.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import vkback
from vkback import paths
from vkback.cli.shell import UsageError
from vkback.cli.vkbench_tests import BenchTest
from vkback.errors import VkbackError

ROOT = Path(vkback.__file__).resolve().parent.parent
"""What Python imports this vkback from."""

REPETITIONS = 3
"""Of a program that is started anew for each run, and does not warm a GPU up for long enough: the last counts."""

CHANGEABLE = {
    "--act": "act",
    "--cache-type-k": "type_k",
    "-ctk": "type_k",
    "--cache-type-v": "type_v",
    "-ctv": "type_v",
    "--ubatch-size": "ubatch",
    "--ubatch": "ubatch",
    "-ub": "ubatch",
    "--feed": "feed",
    "--fusion": "fusion",
    "-fa": "flash_attn",
    "--flash-attn": "flash_attn",
    "--device": "device",
    "-dev": "device",
    "--tensor-split": "tensor_split",
    "-ts": "tensor_split",
    "--n-cpu-moe": "n_cpu_moe",
    "-ncmoe": "n_cpu_moe",
    "--expert-cache": "expert_cache",
    "--n-gpu-layers": "n_gpu_layers",
    "--gpu-layers": "n_gpu_layers",
    "-ngl": "n_gpu_layers",
}
"""Options that --against may have otherwise, by the field of `How`."""


class AgainstError(VkbackError):
    """A side that could not be run, with what it said."""


@dataclass(frozen=True)
class How:
    """How one side runs a model. Fields as the options of vkbench."""

    model: Path
    act: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    ubatch: str = ""
    feed: str = "self"
    fusion: str = "all"
    exact: bool = False
    device: str = ""
    tensor_split: str = ""
    n_cpu_moe: str = ""
    """A number, or "all"."""
    flash_attn: str = ""
    expert_cache: str = ""
    n_gpu_layers: str = ""

    def options(self) -> list[str]:
        """Of vkbench."""
        found = ["-m", str(self.model), "--act", self.act, "-ctk", self.type_k, "-ctv", self.type_v, "--feed", self.feed]
        found += ["-ub", self.ubatch] * bool(self.ubatch) + ["--device", self.device] * bool(self.device)
        found += ["-ts", self.tensor_split] * bool(self.tensor_split) + ["--exact"] * self.exact
        found += ["--cpu-moe"] if self.n_cpu_moe == "all" else ["--n-cpu-moe", self.n_cpu_moe] * bool(self.n_cpu_moe)
        found += ["-fa", self.flash_attn] if self.flash_attn else []
        found += ["--expert-cache", self.expert_cache] * bool(self.expert_cache) + ["-ngl", self.n_gpu_layers] * bool(self.n_gpu_layers)
        return found + (["--fusion", self.fusion] if self.fusion != "all" else [])

    def of_llama_bench(self, given: Sequence[str] = ()) -> list[str]:
        """Of llama-bench, what means the same there. Quantized values need flash attention in it.

        given  options that its command has already: those win, since llama-bench would run each value of an option given twice
        """
        plain = (self.type_k, self.type_v) == ("f16", "f16")
        found = {
            "type_k": ["-ctk", self.type_k] * (not plain),
            "type_v": ["-ctv", self.type_v] * (not plain),
            "flash_attn": ["-fa", self.flash_attn or "1"] if self.flash_attn or not plain else [],
            "n_gpu_layers": ["-ngl", self.n_gpu_layers] * self.n_gpu_layers.isdecimal(),
            "ubatch": ["-ub", self.ubatch] * bool(self.ubatch),
        }
        theirs = {CHANGEABLE.get(word) for word in given}
        return ["-m", str(self.model), *(word for name, words in found.items() if name not in theirs for word in words)]


class Side(Protocol):
    """One of two that are compared."""

    name: str
    stays: bool
    """Its model stays loaded between runs."""

    def run(self, test: int, warm: bool) -> dict[str, Any]:
        """The result of one repetition as a record of llama-bench's JSON, with `samples_ts`. Raises AgainstError."""

    def close(self) -> None: ...


@dataclass
class Resident:
    """A vkback that keeps its model loaded. Raises AgainstError where it cannot, `NotKnown` where it does not know how."""

    name: str
    command: Sequence[str]
    where: Path
    variables: Mapping[str, str]
    hello: dict[str, Any] = field(default_factory=dict)
    stays: bool = True

    def __post_init__(self) -> None:
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  until `close`
        self._process = subprocess.Popen(
            [*self.command, "--turns"],
            cwd=self.where,
            env={**os.environ, **self.variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            encoding="utf-8",
        )
        try:
            self.hello = self._answer()
        except BaseException:
            self.close()
            raise

    def run(self, test: int, warm: bool) -> dict[str, Any]:
        assert self._process.stdin
        with suppress(OSError):  # it is gone, and its last words say why
            print(json.dumps({"test": test, "warm": warm}), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if line.startswith("{"):
            return dict(json.loads(line))
        self._process.kill()
        self._process.wait()
        self._said.seek(0)
        said = self._said.read()
        if "No such option: --turns" in said:
            raise NotKnown
        raise AgainstError(f"{self.name}: {_last_line(said) or 'ended without a word'}")

    def close(self) -> None:
        if self._process.stdin:
            with suppress(OSError):
                self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._said.close()


class NotKnown(Exception):  # noqa: N818  no fault
    """A vkback of before there was --against."""


@dataclass
class Started:
    """A program that is started anew for each run. options: of each test."""

    name: str
    command: Sequence[str]
    tests: Sequence[BenchTest]
    options: Callable[[BenchTest], Sequence[str]]
    where: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    stays: bool = False

    def run(self, test: int, warm: bool) -> dict[str, Any]:
        wanted = self.tests[test]
        command = [*self.command, *self.options(wanted)]
        try:
            ran = subprocess.run(
                command,
                cwd=self.where,
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as e:
            raise AgainstError(f"{self.name}: {shlex.join(command)}: cannot be started: {paths.reason(e)}") from e
        if ran.returncode:
            said = _last_line(ran.stderr) or _last_line(ran.stdout) or "without a word"
            raise AgainstError(f"{self.name}: {shlex.join(command)} ended with exit code {ran.returncode}: {said}")
        try:
            found = json.loads(ran.stdout[ran.stdout.index("[") :])
            record = next(r for r in found if (r["n_prompt"], r["n_gen"], r["n_depth"]) == (wanted.n_prompt, wanted.n_gen, wanted.n_depth))
            return {**record, "samples_ts": [float(record["samples_ts"][-1])]}
        except (ValueError, LookupError, StopIteration, TypeError) as e:
            shown = _last_line(ran.stdout) or "nothing"
            raise AgainstError(
                f"{self.name}: {shlex.join(command)}: expected the JSON of llama-bench with {wanted.name}, it printed {shown}"
            ) from e

    def close(self) -> None:
        pass


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip().removeprefix("vkbench: error: ") if lines else ""


def sizes(test: BenchTest) -> list[str]:
    """A test in the options of llama-bench."""
    both = test.n_prompt and test.n_gen
    one = ["-p", "0", "-n", "0", "-pg", f"{test.n_prompt},{test.n_gen}"] if both else ["-p", str(test.n_prompt), "-n", str(test.n_gen)]
    return [*one, "-d", str(test.n_depth)] if test.n_depth else one


def python_command() -> list[str]:
    """This Python, running the vkbench of the folder that it is started in."""
    return [sys.executable, "-m", "vkback", "bench"]


def own_side(how: How, tests: Sequence[BenchTest], name: str = "this", variables: Mapping[str, str] | None = None) -> Resident:
    """This vkback, with other variables of the environment."""
    return Resident(name, [*python_command(), *(t.name.replace(" ", "") for t in tests), *how.options()], ROOT, _kept(variables or {}))


def _kept(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that runs in another folder."""
    tables = os.environ.get("VKBACK_TUNING")
    return {**({"VKBACK_TUNING": str(Path(tables).absolute())} if tables else {}), "PYTHONPATH": "", **variables}


def is_llama_bench(against: str) -> bool:
    """Whether it is measured as llama-bench measures."""
    words = _words(against)
    return bool(words) and Path(words[0]).stem.startswith("llama-bench")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return []


@contextmanager
def other_side(against: str, how: How, tests: Sequence[BenchTest], own: Resident) -> Iterator[Side]:
    """The side that --against names: a folder with a build or with tables, a table, a commit, overrides, options, or a program.

    Raises UsageError where it is none of them.
    """
    with ExitStack() as stack:
        path = Path(against)
        words = _words(against)
        side: Side
        if against.startswith("-"):
            side = own_side(changed(how, words, against), tests, against)
        elif commit := commit_by_name(against):
            side = _build(stack.enter_context(checkout(commit)), against, how, tests)
        elif path.is_dir() and (path / "vkback" / "__init__.py").is_file():
            side = _build(path.absolute(), against, how, tests)
        elif path.is_dir():
            side = own_side(how, tests, against, {"VKBACK_TUNING": str(_folder_of_tables(path))})
        elif path.suffix == ".toml" and path.is_file():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vkbench-")))
            shutil.copyfile(path, folder / own.hello["table"])
            side = own_side(how, tests, against, {"VKBACK_TUNING": str(folder)})
        elif words and (program := _program(words[0])):
            options = how.of_llama_bench(words[1:])
            side = Started(against, [program, *words[1:]], tests, lambda t: [*options, *sizes(t), "-r", str(REPETITIONS), "-o", "json"])
        elif ":" in against:
            from vkback.tuning.overrides import override_rows

            override_rows(against)
            before = os.environ.get("VKBACK_OVERRIDES", "")
            side = own_side(how, tests, against, {"VKBACK_OVERRIDES": ";".join(filter(None, (before, against)))})
        else:
            raise UsageError(
                f"--against {against}: expected a folder with a build, a commit of this checkout, a table (FILE.toml or its folder), "
                "overrides as 'gemv : wg=512', options as '--act f32', or a program as llama-bench that is in PATH or a file"
            )
        try:
            yield side
        finally:
            side.close()


def changed(how: How, words: Sequence[str], text: str) -> How:
    """Other options. Raises UsageError for those that are not the model's or not known."""
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--exact" and not equals:
            how = replace(how, exact=True)
            continue
        if name not in CHANGEABLE:
            known = ", ".join([*dict.fromkeys(n for n in CHANGEABLE if n.startswith("--")), "--exact"])
            raise UsageError(f"--against '{text}': {name}: expected one of {known}")
        value = value if equals else next(rest, "")
        if not value:
            raise UsageError(f"--against '{text}': {name}: expected a value")
        given: dict[str, Any] = {CHANGEABLE[name]: value}
        how = replace(how, **given)
    return how


def _python_of(folder: Path) -> str:
    own = folder / ".venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    return str(own) if own.is_file() else sys.executable


def run_build(folder: Path, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> tuple[str, int, str]:
    """Run the Python of a checkout with these arguments, and its vkback: what it prints, its exit code, and its last line on stderr. This
    build's Python is the one that runs. variables: beside those of this process."""
    ran = subprocess.run(
        [sys.executable if folder == ROOT else _python_of(folder), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **(variables or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    return ran.stdout, ran.returncode, (ran.stderr.strip().splitlines() or ["ended without a word"])[-1]


def _build(folder: Path, name: str, how: How, tests: Sequence[BenchTest]) -> Side:
    """The vkback of a checkout, by the Python of its own .venv if it has one."""
    python = [_python_of(folder), "-m", "vkback", "bench"]
    variables = _kept({})
    try:
        return Resident(name, [*python, *(t.name.replace(" ", "") for t in tests), *how.options()], folder, variables)
    except NotKnown:
        return Started(name, [*python, *how.options()], tests, lambda t: [*sizes(t), "-r", "1", "-o", "json"], folder, variables)


def _folder_of_tables(path: Path) -> Path:
    if (path / "default.toml").is_file():
        raise UsageError(f"--against {path}: all tables of a build; give the folder of its checkout")
    if not any(path.glob("*.toml")):
        raise UsageError(f"--against {path}: neither a build (no vkback/ in it) nor tuning tables (no *.toml)")
    return path.absolute()


def _program(word: str) -> str | None:
    if word.partition("=")[0] != word:
        return None
    path = Path(word)
    if path.is_file() and os.access(path, os.X_OK):
        return str(path.absolute())
    found = paths.on_path(word) if path.parent == Path() else None
    if found is None and path.stem.startswith("llama-bench"):
        raise UsageError(f"--against {word}: {'not in PATH' if path.parent == Path() else 'no such program'}; give its whole path")
    return found


def commit_of(text: str) -> str:
    """The hash of a commit of this checkout; "" where it is none, or where there is no git."""
    if not (ROOT / ".git").exists() or paths.on_path("git") is None:
        return ""
    ran = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--quiet", "--verify", "--end-of-options", f"{text}^{{commit}}"],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )
    return ran.stdout.strip() if ran.returncode == 0 else ""


def commit_by_name(text: str) -> str:
    """The hash of a commit of this checkout that a word names; "" where it is none. A word without / is a commit before it is a folder, a
    file or a program (PATH may have one that is called HEAD): these are then ./NAME, as stderr says where there is one. Where a ref has
    a /, as origin/main, a folder or file of that name comes first."""
    path = Path(text)
    bare = text == path.name
    if not bare and path.exists():
        return ""
    commit = commit_of(text)
    if commit and path.exists():
        print(f"vkback: {text} is the commit {commit[:9]}; the {'folder' if path.is_dir() else 'file'} is ./{text}", file=sys.stderr)
    return commit


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A working tree of a commit, until it is no longer used."""
    with tempfile.TemporaryDirectory(prefix="vkbench-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder) / commit[:9]
        ran = subprocess.run(
            ["git", "-C", str(ROOT), "worktree", "add", "--detach", "--quiet", str(tree), commit],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        if ran.returncode:
            raise AgainstError(f"--against {commit[:9]}: git cannot make a working tree of it: {_last_line(ran.stderr)}")
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)], capture_output=True)
