"""Every example of README and docs/ runs here, or by the test of its page.

Python of README, docs/python.md and docs/training.md as it stands there, each in an interpreter's namespace of its own; docs/server.md's
against a server (test_server.py); the how-to pages in a copy of the tree (tests/pages.py); lines quoted from a source must be in it.
Commands that take seconds run; those that measure a model for minutes are read by their own command line, as one that is typed: a command,
an option or a choice that there is not is an error. Every command has its section in docs/commands.md; every relative link leads somewhere.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from pages import ROOT, run

from tools.documents import COMMAND, FENCE, FOLLOWED, blocks, commands, words
from tools.documents import PAGES as PAGES_OF_ALL
from vkback import paths
from vkback.api import device as device_module
from vkback.api import model as model_module
from vkback.cli import main as main_cli
from vkback.cli import vkbench as bench_cli
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.timing.read_rate import measure_read_rate
from vkback.tuning.lookup import known_families
from vkback.tuning.table import parse_table

PYTHON = re.compile(r"^```(?P<kind>python|glsl)(?: (?P<name>\S+))?\n(?P<text>.*?)^```$", re.M | re.S)
PAGES = ("README.md", "docs/python.md", "docs/training.md", "docs/several_devices.md")
BLOCKS = [(page, block) for page in PAGES for block in PYTHON.finditer((ROOT / page).read_text(encoding="utf-8"))]
FILES = {block["name"]: block["text"] for _, block in BLOCKS if block["kind"] == "glsl"}
EXAMPLES = [(page, block["text"]) for page, block in BLOCKS if block["kind"] == "python"]


class _Kept:
    """An engine that outlives the example that loaded it, with kernels that other tests compile, too: that is most of an example's time."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.engines: dict[tuple[Any, ...], Engine] = {}

    def open(self, path: Path, device: Any, options: LoadOptions, **others: Any) -> Engine:
        options = dataclasses.replace(options, act="f32")
        if isinstance(device, list):
            return Engine.open(path, [0, 0], options, **others)
        key = (path, options)
        if key not in self.engines:
            self.engines[key] = Engine.open(path, self.device, options, **others)
            self.engines[key].close = lambda: None  # type: ignore[method-assign]
        return self.engines[key]


@pytest.fixture(scope="module")
def kept(device: Device) -> Iterator[_Kept]:
    kept = _Kept(device)
    yield kept
    for engine in kept.engines.values():
        Engine.close(engine)


def test_there_are_examples() -> None:
    assert {page for page, _ in EXAMPLES} == set(PAGES) and FILES


@pytest.mark.vulkan
@pytest.mark.parametrize(("page", "text"), EXAMPLES, ids=[f"{page}-{i}" for i, (page, _) in enumerate(EXAMPLES)])
def test_an_example_runs(
    page: str, text: str, kept: _Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_module, "Engine", kept)
    monkeypatch.setattr(device_module, "measure_read_rate", lambda device, library: measure_read_rate(device, library, 1 << 20))
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(text, page, "exec"), names)
    assert "print(" not in text or capsys.readouterr().out.strip()
    for thing in names.values():
        if hasattr(thing, "close") and type(thing).__module__.startswith("vkback.api"):
            thing.close()


# --- all other blocks

SHOWN = {
    "docs/architecture.md": ("model.gguf ->", "cli      ", "shaders/<family>/"),
    "docs/comparing_nodes.md": ("NMSE =",),
    "docs/models.md": ("absorbed  ",),
    "docs/tuning.md": ("Q4_K 4096x14336:", "search    "),
    "bench/README.md": ("<date>_<device>",),
}
"""What is no example: layouts, formulas, lines of output. By the beginning of the block."""

RUN = (
    ("README.md", "vkback devices"),
    ("README.md", "vkback run -p"),
    ("docs/commands.md", "vkback chat --system"),
    ("docs/graph_listing.md", "vkback graph --shape"),
    ("docs/commands.md", "vkback explain"),
)
"""Commands that end within seconds, by their page and beginning; `chat` has the end of its input at once."""


@cache
def printed_by(*command: str) -> str:
    """One that two tests look at is run once."""
    return run(list(command), ROOT)


ALL = blocks()
COMMANDS = commands()


def is_quoted(lines: list[str]) -> bool:
    """Whether a file of the ops has all of these lines."""
    sources = (path.read_text(encoding="utf-8") for path in sorted((ROOT / "vkback/ops").rglob("*.py")))
    return any(all(line.strip() in source for line in lines) for source in sources)


def test_every_block_is_an_example_that_a_test_has() -> None:
    for block in ALL:
        lines = block.text.strip().splitlines()
        if block.kind == "console" and block.page not in FOLLOWED:
            known = all(COMMAND.match(line) for line in lines if line.startswith("$ "))
        elif block.kind:
            known = block.page in FOLLOWED or (block.page in (*PAGES, "docs/server.md") and block.kind in ("python", "glsl"))
        elif block.page == "docs/tuning.md" and lines[0].startswith("[["):
            known = bool(parse_table(block.text, "amd.toml" if "rdna3" in block.text else "nvidia.toml"))
        else:
            known = bool(block.commands()) or lines[0].startswith(SHOWN.get(block.page, ("\0",))) or is_quoted(lines)
        assert known, f"{block.page}: no test runs this block:\n{block.text}"
    assert len(COMMANDS) > 30 and {"docs/adding_an_op.md"} <= FOLLOWED


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {command[:60]}" for page, command in COMMANDS])
def test_a_command_is_one_that_there_is(page: str, command: str) -> None:
    program, *args = words(command)
    match Path(program).name:
        case "vkback" | "vkbench" as name:
            root = typer.main.get_command(main_cli.app if name == "vkback" else bench_cli.app_of(args[0] if args else ""))
            while isinstance(root, click.Group):
                assert args and root.get_command(click.Context(root), args[0]), f"{page}: vkback has no command {args[:1]}"
                root, args = root.commands[args[0]], args[1:]
            root.make_context(name, args)  # raises UsageError naming what is wrong
        case "make":
            assert re.search(rf"^{args[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        case "pip" if args[0] == "install":
            extras = re.findall(r"vkback\[(\w+)\]", command)
            known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
            assert set(extras) <= known.keys() if extras else args[1:] == ["git+ADDRESS"], command
        case "python":
            script = (ROOT / args[0]).read_text(encoding="utf-8")
            assert all(f'"{arg}"' in script for arg in args if arg.startswith("--")), command
        case "cat":
            assert all(list(ROOT.glob(arg)) for arg in args), command
        case "curl":
            assert page == "docs/server.md", "test_server.py sends those of this page"


@pytest.mark.vulkan
@pytest.mark.parametrize(("page", "start"), RUN)
def test_a_command_runs(page: str, start: str) -> None:
    (command,) = {command for of, command in COMMANDS if of == page and command.removeprefix(".venv/bin/").startswith(start)}
    program, *args = words(command)
    assert printed_by(Path(program).name, *args).strip()


# --- the front page

FRONT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_front_page_is_short() -> None:
    assert len(FRONT.splitlines()) < 100


@pytest.mark.vulkan
def test_the_front_page_shows_what_run_prints() -> None:
    """The same lines in the same order on each stream; the text, the figures and whether there is a GPU depend on the machine."""
    (block,) = (block for block in ALL if block.page == "README.md" and block.kind == "console")
    command, *shown = block.text.splitlines()
    program, *args = words(command.removeprefix("$ "))
    printed = printed_by(program, *args)
    of_run = ("vkback: preparing", "prepared", "prompt", "generation")
    for text in ("\n".join(shown), printed):
        lines = [re.sub(r"\d+", "0", " ".join(line.split())) for line in text.splitlines()]
        kept = [re.sub(r"\(.*|, (none|all|0) compiled.*", "", line) for line in lines if line.startswith(of_run)]
        assert kept == [
            "vkback: preparing 0 kernels",
            "prepared 0 kernels in 0.0 s",
            "prompt 0 tokens in 0.0 s, 0.0 t/s",
            "generation 0 tokens in 0.0 s, 0.0 t/s",
        ]
        assert args[1 + args.index("-p")] in text


# --- docs/environment.md

READ = re.compile(
    r'(?:environ|environment|envvar)(?:\.get\(|\[|=)"(?P<got>[A-Z0-9_]+)"|"(?P<asked>[A-Z0-9_]+)" (?:not )?in os\.environ'
    r"|(?P<own>\b_?VKBACK_[A-Z0-9_]+)"
)


def test_every_environment_variable_is_on_its_page() -> None:
    """All that vkback reads, and vkback's own that tests and tools read."""
    page = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
    read: dict[str, Path] = {}
    for folder in ("vkback", "tests", "tools", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for match in READ.finditer(path.read_text(encoding="utf-8")) if path != Path(__file__).resolve() else ():
                if match["own"] or folder == "vkback":
                    read[match["got"] or match["asked"] or match["own"]] = path
    assert {"VKBACK_CACHE", "VKBACK_DEVICE", "VKBACK_API_KEY", "NO_COLOR", "TERMUX_VERSION"} <= read.keys()
    missing = [f"{name} ({path.relative_to(ROOT)})" for name, path in read.items() if not re.search(rf"\b{name}\b", page)]
    assert not missing, f"docs/environment.md: nothing of {missing}"
    unread = set(re.findall(r"`(VKBACK_[A-Z0-9_]+)`", page)) - read.keys()
    assert not unread, f"docs/environment.md: nothing reads {unread}"


@pytest.mark.parametrize(("platform", "row"), [("linux", "Linux"), ("win32", "Windows"), ("darwin", "macOS")])
def test_folders_are_those_of_the_page(platform: str, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path("/home/someone")
    for name in ("VKBACK_CACHE", "VKBACK_TUNING", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCALAPPDATA", "%LOCALAPPDATA%")
    monkeypatch.setenv("APPDATA", "%APPDATA%")
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setattr(sys, "platform", platform)
    (line,) = re.findall(rf"^\| {row}.*", (ROOT / "docs/environment.md").read_text(encoding="utf-8"), re.M)
    for folder in (paths.cache_dir(), paths.user_tuning_root()):
        shown = str(folder).replace(str(home), "~")
        assert f"`{shown}`" in line or "`{}`".format(shown.replace("/", "\\")) in line


# --- docs/commands.md and links

SECTION = re.compile(r"^### `(?P<command>[^`]+)`\n(?P<text>.*?)(?=^##|\Z)", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
LINKING = (*PAGES_OF_ALL, "CHANGELOG.md")


def test_every_command_has_its_section_and_an_example() -> None:
    sections = {match["command"]: match["text"] for match in SECTION.finditer((ROOT / "docs/commands.md").read_text(encoding="utf-8"))}
    others = {*(f"vkback {name}" for name in main_cli.COMMANDS), *(f"vkbench {name}" for name in bench_cli.COMMANDS)}
    assert sections.keys() == {"vkbench", *others}
    for command, text in sections.items():
        assert f"\n    {command} " in text, f"docs/commands.md: no example of {command}"


def test_the_front_page_names_every_command() -> None:
    table = FRONT[FRONT.index("## Commands") : FRONT.index("## Documentation")]
    named = {re.sub(r"^vkback ", "", name) for name in re.findall(r"`([^`]+)`", table)}
    assert {"vkbench", *main_cli.COMMANDS, *(f"vkbench {name}" for name in bench_cli.COMMANDS)} <= named


@pytest.mark.parametrize("family", ["gemv", "gemv_path", "gemm", "attention", "schedule"])
def test_the_tuning_page_names_every_key_and_parameter(family: str) -> None:
    page = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
    known = known_families()[family]
    missing = [name for name in (*known.match, *known.set) if f"`{name}`" not in page]
    assert not missing, f"docs/tuning.md: nothing of {missing} of family {family}"


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them: lower case, hyphens for spaces, without punctuation."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("page", LINKING)
def test_every_relative_link_leads_somewhere(page: str) -> None:
    for link in LINK.finditer(FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))):
        target = (ROOT / page).parent / link["path"] if link["path"] else ROOT / page
        assert target.exists(), f"{page}: {link[0]} leads nowhere"
        assert not link["anchor"] or link["anchor"] in anchors(target), f"{page}: {link[0]}: no such heading"
