"""Systems other than this one, as far as Linux can show them: what Windows lacks is asked for first, and open files are left alone."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from processes import run_program

from vkback import paths
from vkback.cli import main, shell
from vkback.cli.shell import run
from vkback.models import Model
from vkback.models.synth import outline, synthesize, write_outline
from vkback.report.result_table import ReportError
from vkback.report.store import Store
from vkback.shader.compiler import program_path

ROOT = Path(__file__).parents[2]
LACKS: dict[str, Any] = json.loads((ROOT / "tests/data/not_on_windows.json").read_text(encoding="utf-8"))
MODULES = ("os", "signal", "time", "socket")
GUARDS = re.compile(r"sys\.platform|os\.name|ImportError|AttributeError|hasattr")


def unguarded(text: str, tree: ast.Module | None = None) -> Iterator[str]:
    """Names that Windows lacks and a file uses: where no `if`, `try` or `suppress` around the use asks about them, and the file has no
    hasattr of the name."""
    tree = tree or ast.parse(text)
    above: dict[ast.AST, ast.AST] = {}
    for node in ast.walk(tree):
        used: list[str] = []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES:
            used = [f"{node.value.id}.{node.attr}"] if node.attr in LACKS[node.value.id] else []
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            used = [f"{node.module}.{a.name}" for a in node.names if a.name in LACKS[node.module]]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            used = [f"import {name}" for name in names if name in LACKS["modules"]]
        if used and not above:
            above |= {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for name in used:
            module, _, attribute = name.partition(".")
            asked = (f"hasattr({module}, {quote}{attribute}{quote})" for quote in "'\"")
            if not (any(part in text for part in asked) or is_guarded(node, above)):
                yield f"{getattr(node, 'lineno', 0)}: {name}"


def is_guarded(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    while node in above:
        node = above[node]
        asked: list[ast.AST] = []
        if isinstance(node, ast.If | ast.IfExp):
            asked = [node.test]
        elif isinstance(node, ast.Try):
            asked = [h.type for h in node.handlers if h.type]
        elif isinstance(node, ast.With):
            asked = [item.context_expr for item in node.items]
        elif isinstance(node, ast.FunctionDef):  # left at once where the system lacks it
            asked = [part.test for part in node.body if isinstance(part, ast.If) and isinstance(part.body[-1], ast.Return | ast.Raise)]
        if any(GUARDS.search(ast.unparse(part)) for part in asked):
            return True
    return False


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nos.pwrite(1, b'', 0)", ["2: os.pwrite"]),
        ("from signal import SIGHUP, SIGINT", ["1: signal.SIGHUP"]),
        ("def f():\n    import readline", ["2: import readline"]),
        ("import os\nif hasattr(os, 'fork'):\n    os.fork()", []),
        ('import os\nx = hasattr(os, "fork")\ndef f():\n    os.fork()', []),
        ("import os\ndef f():\n    if not hasattr(os, 'fork'):\n        return\n    os.fork()\n    os.wait()", []),
        ("import sys\nif sys.platform != 'win32':\n    import fcntl", []),
        ("try:\n    import resource\nexcept ImportError:\n    resource = None", []),
        ("import os\nos.write(1, b'')\nos.path.join('a')", []),
    ],
)
def test_what_the_check_finds(text: str, found: list[str]) -> None:
    assert list(unguarded(text)) == found


@cache
def found_in_files() -> dict[str, list[str]]:
    """What each of the rules below finds wrong. Files are parsed once for all of them."""
    found: dict[str, list[str]] = {"unguarded": [], "at import": [], "pipes": [], "files": []}
    for folder in ("vkback", "bench", "tests", "tools"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            name, text = file.relative_to(ROOT), file.read_text("utf-8")
            tree = ast.parse(text)
            if folder == "vkback":
                found["unguarded"] += [f"{name}:{use}" for use in unguarded(text, tree)]
            else:
                found["at import"] += [f"{name}: {use}" for use in unguarded("\n".join(map(ast.unparse, run_at_import(tree))))]
            for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
                if unnamed_in_a_pipe(call):
                    found["pipes"].append(f"{name}:{call.lineno}")
                if folder != "tests" and unnamed_in_a_file(call):
                    found["files"].append(f"{name}:{call.lineno}")
    return found


def run_at_import(tree: ast.Module) -> Iterator[ast.AST]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from node.decorator_list
        elif not isinstance(node, ast.Expr):
            yield node


def unnamed_in_a_pipe(call: ast.Call) -> bool:
    given = {k.arg for k in call.keywords}
    return bool(given & {"text", "universal_newlines"}) and "encoding" not in given and "subprocess" in ast.unparse(call.func)


def unnamed_in_a_file(call: ast.Call) -> bool:
    if not (isinstance(call.func, ast.Attribute) and call.func.attr in ("read_text", "write_text")):
        return False
    return not (any(k.arg in ("encoding", None) for k in call.keywords) or len(call.args) > (call.func.attr == "write_text"))


def test_vkback_asks_before_it_uses_what_windows_lacks() -> None:
    assert not found_in_files()["unguarded"]


def test_tests_and_scripts_can_be_imported_on_windows() -> None:
    """Their functions may need more than Windows has, and skip; what runs at their import may not."""
    assert not found_in_files()["at import"]


def test_what_programs_print_is_read_in_a_named_encoding() -> None:
    """Else it is that of the system's code page: `make lint` looks at files that are opened, this at pipes."""
    assert not found_in_files()["pipes"]


def test_files_are_read_and_written_in_a_named_encoding() -> None:
    """`make lint` looks at paths that it can tell to be some; this at all that are read or written whole, outside of tests."""
    assert not found_in_files()["files"]


LACKING = """
import sys
for name in {modules!r}:
    sys.modules[name] = None
import concurrent.futures, multiprocessing.popen_spawn_posix, os, pathlib, shutil, signal, subprocess, tempfile
for name in ("pread", "preadv", "pwrite", "pwritev", "readv", "writev", "sendfile", "fork", "forkpty", "posix_fadvise", "sched_getaffinity",
             "getuid", "geteuid", "chown", "mkfifo", "posix_spawn"):
    delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGALRM", "SIGCHLD", "pthread_sigmask", "alarm"):
    delattr(signal, name)
from vkback.cli import main
sys.argv = ["vkback", *{arguments!r}]
main.main()
"""
"""A program on a system that has no more than Windows. The standard library is imported before, as its own way is that of this system."""

simulated = pytest.mark.skipif(sys.platform == "win32", reason="it takes away what Windows has not")


def without_posix(*arguments: str) -> subprocess.CompletedProcess[str]:
    modules = ("fcntl", "readline", "resource", "termios", "pty", "pwd", "grp", "syslog")
    program = LACKING.format(modules=modules, arguments=arguments)
    return run_program([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)})


@simulated
def test_synth_without_pwrite_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, other = tmp_path / "usual.gguf", tmp_path / "other.gguf"
    synthesize("tiny-llama-Q8_0", usual, threads=4)
    monkeypatch.delattr(os, "pwrite")
    synthesize("tiny-llama-Q8_0", other, threads=4)
    assert usual.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(("system", "name"), [("win32", "glslc.exe"), ("linux", "glslc")])
def test_programs_of_the_current_folder_are_not_taken(system: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / name).touch(0o755)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setenv("PATH", os.pathsep.join(("", str(tmp_path / "none"))))
    assert program_path() is None
    monkeypatch.setenv("PATH", os.pathsep.join(("", str(tmp_path / "none"), str(there))))
    assert program_path() == str(there / name)


@simulated
@pytest.mark.vulkan
def test_commands_without_what_windows_lacks(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    for arguments in (
        ("synth", "tiny-llama-Q8_0", str(file)),
        ("plan", "--shape", "tiny-llama-Q8_0", "--profile", "nvidia_h200_linux"),
        ("run", "-m", "demo-dense", "-p", "It was", "-n", "2", "--device", "llvmpipe"),
        ("test-ops", "ADD", "-j", "2", "--device", "llvmpipe"),
    ):
        ran = without_posix(*arguments)
        if "no device" in ran.stderr.lower():
            pytest.skip("llvmpipe is not among the devices")
        assert ran.returncode == 0, ran.stderr


@pytest.fixture
def open_files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that this process has open or mapped can be neither removed nor replaced, as on Windows."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc to see which files are open")

    def refusing(usual: Callable[..., Any], which: int) -> Callable[..., Any]:
        def call(*places: Any, **where: Any) -> Any:
            folder = Path() if where.get("dir_fd") is None else Path(f"/proc/self/fd/{where['dir_fd']}").readlink()
            if (folder / places[which]).resolve() in open_files():
                raise PermissionError(errno.EACCES, "The file is being used by another process", str(places[which]))
            return usual(*places, **where)

        return call

    for name, which in (("unlink", 0), ("remove", 0), ("replace", 1), ("rename", 1)):
        monkeypatch.setattr(os, name, refusing(getattr(os, name), which))


def open_files() -> set[Path]:
    found = {Path(line.split(maxsplit=5)[5]) for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if "/" in line}
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.add(fd.readlink())
        except OSError:
            continue
    return found


def test_the_rule_about_open_files(open_files_stay: None, tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    write_outline("tiny-llama-Q8_0", file)
    model = Model.open(file)
    with pytest.raises(PermissionError):
        file.unlink()
    del model
    file.unlink()


@pytest.mark.parametrize("command", ["plan", "graph"])
def test_shapes_are_planned_without_a_file_that_stays_mapped(
    command: str, open_files_stay: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = ["--profile", "nvidia_h200_linux"] if command == "plan" else []
    monkeypatch.setattr(sys, "argv", ["vkback", command, "--shape", "tiny-llama-Q8_0", *profile])
    with pytest.raises(SystemExit) as e:
        main.main()
    assert e.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", ["tiny-llama-Q8_0", "tiny-granitehybrid-moe-F32", "llama-8b-Q4_K_M"])
def test_an_outline_in_memory_is_that_of_a_file(name: str, tmp_path: Path) -> None:
    write_outline(name, tmp_path / f"{name}.gguf")
    there, here = Model.open(tmp_path / f"{name}.gguf"), Model.of(outline(name))
    assert here.graph(1, 64, head="last") == there.graph(1, 64, head="last")
    assert here.file.size_bytes == there.file.size_bytes and repr(here.file.metadata) == repr(there.file.metadata)
    assert not any(t.data[:1].any() for t in here.file.tensors.values())


def test_a_store_that_finds_no_room_leaves_no_file(open_files_stay: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    def full(self: Store) -> None:
        self._db.execute("pragma user_version")
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Store, "_upgrade", full)
    with pytest.raises(ReportError, match=r"r\.db: cannot be used as a store of results: database or disk is full"):
        Store(tmp_path / "r.db")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_file_that_another_process_reads_is_kept_without_a_warning(
    open_files_stay: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "warned_of_cache", [])
    file = tmp_path / "module.spv"
    paths.write_cache(file, b"spirv")
    with file.open("rb"):
        paths.write_cache(file, b"spirv")
        assert not caplog.records
        paths.write_cache(file, b"other")
    assert "nothing can be kept in the cache" in caplog.text and file.read_bytes() == b"spirv"


def test_a_closed_pipe_as_windows_tells_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def app(**_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    for gone, said in (({errno.EPIPE}, "vkback: error: Invalid argument\n"), ({errno.EPIPE, errno.EINVAL}, "")):
        monkeypatch.setattr(shell, "READER_GONE", gone)
        with pytest.raises(SystemExit) as e:
            run(app, "vkback")
        assert e.value.code == 1 and capsys.readouterr().err == said
