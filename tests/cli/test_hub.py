"""-hf and vkback pull against a local server that speaks as much of Hugging Face's API as a download needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hf_hub import Hub, hub_environment, served_hub
from tiny_models import tiny_with_text
from waiting import PATIENCE_S

from vkback.cli.shell import hub_marked
from vkback.gguf.hub import HubError, HubUsage, chosen_file, fetched, parts_of

pytest.importorskip("huggingface_hub", reason="models of Hugging Face need vkback[hub]")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with served_hub() as made:
        yield made


def vkback(hub_url: str, home: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own: the package reads its variables when it is imported."""
    environment = {**os.environ, **hub_environment(hub_url, home), **more}
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        environment.pop(name, None) if name not in more else None
    line = [sys.executable, "-m", "vkback", *words]
    return subprocess.run(line, capture_output=True, encoding="utf-8", env=environment, timeout=PATIENCE_S, check=False)


FILES = ["README.md", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-IQ4_XS.gguf", "mmproj-m-F16.gguf"]


def test_which_file() -> None:
    assert chosen_file("u/r", FILES) == "m-Q4_K_M.gguf"
    assert chosen_file("u/r", FILES, "q8_0") == "m-Q8_0.gguf"
    assert chosen_file("u/r", ["b-F16.gguf", "a-BF16.gguf"]) == "a-BF16.gguf"
    assert chosen_file("u/r", ["b-F16.gguf", "a-BF16.gguf"], "F16") == "b-F16.gguf"
    with pytest.raises(HubError, match=r"no GGUF file of type Q2_K; there are m-IQ4_XS.gguf, m-Q4_K_M.gguf, m-Q8_0.gguf"):
        chosen_file("u/r", FILES, "Q2_K")
    with pytest.raises(HubError, match=r"has no GGUF file"):
        chosen_file("u/r", ["model.safetensors", "mmproj-F16.gguf"])


def test_parts_of_a_split_model() -> None:
    parts = [f"Q4_K_M/m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    assert chosen_file("u/r", parts[::-1]) == parts[0]
    assert parts_of(parts[0], parts, "u/r") == parts
    with pytest.raises(HubError, match=r"lacks Q4_K_M/m-00002-of-00003.gguf, one of 3 files"):
        parts_of(parts[0], [parts[0], parts[2]], "u/r")


@pytest.mark.parametrize("name", ["model", "a/b/c", "u/r:", "u r/x"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(HubUsage, match="expected USER/REPO"):
        fetched(name)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubUsage, match=r"pip install 'vkback\[hub\]'"):
        fetched("u/r")


def test_options_mark_what_follows() -> None:
    assert hub_marked(["-hf", "u/r:Q8_0", "-n", "4"]) == ["-hf", "hf:u/r:Q8_0", "-n", "4"]
    assert hub_marked(["--hf-repo=u/r", "-m", "x"]) == ["--hf-repo=hf:u/r", "-m", "x"]
    assert hub_marked(["--", "-hf", "u/r"]) == ["--", "-hf", "u/r"]


def test_a_model_comes_once_and_is_there_without_a_network(hub: Hub, tmp_path: Path) -> None:
    model = tiny_with_text(tmp_path / "m.gguf").read_bytes()
    hub.repos["u/r"] = {"README.md": b"#", "m-Q8_0.gguf": b"another", "m-Q4_K_M.gguf": model}
    first = vkback(hub.url, tmp_path / "home", "pull", "u/r")
    assert first.returncode == 0, first.stderr
    assert Path(first.stdout.strip()).read_bytes() == model
    fetches = sum("resolve" in path for path in hub.gets)
    assert vkback(hub.url, tmp_path / "home", "pull", "u/r").stdout == first.stdout
    assert sum("resolve" in path for path in hub.gets) == fetches, "it is in the cache"
    nowhere = "http://127.0.0.1:9"
    assert vkback(nowhere, tmp_path / "home", "pull", "u/r").stdout == first.stdout
    graph = vkback(nowhere, tmp_path / "home", "graph", "-hf", "u/r:Q4_K_M", HF_HUB_OFFLINE="1")
    assert graph.returncode == 0 and "result_output" in graph.stdout, graph.stderr


NO_LINKS = """
import os, sys
def symlink(source, link, *_, **__):
    if sys.argv[1] == "refused":
        raise OSError(1314, "A required privilege is not held by the client", link)
os.symlink = symlink
from vkback.gguf.hub import fetched
print(fetched("u/r"))
"""
"""A system that makes no symbolic links: it refuses, or it says that it made one, as Wine does."""


@pytest.mark.parametrize("how", ["refused", "nothing made"])
def test_a_model_comes_where_there_are_no_symbolic_links(hub: Hub, tmp_path: Path, how: str) -> None:
    hub.repos["u/r"] = {"m-Q4_K_M.gguf": b"a model"}
    environment = {**os.environ, **hub_environment(hub.url, tmp_path)}
    for _ in range(2):  # fetched, then of the cache
        line = [sys.executable, "-c", NO_LINKS, how]
        done = subprocess.run(line, capture_output=True, encoding="utf-8", env=environment, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert Path(done.stdout.strip()).read_bytes() == b"a model"
    whole = [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"a model"]
    assert len(whole) == 1, "it takes its bytes once"
    assert sum("resolve" in path for path in hub.gets) == 1


def test_all_parts_come(hub: Hub, tmp_path: Path) -> None:
    hub.repos["u/r"] = {f"Q8_0/m-{i:05}-of-00002.gguf": bytes([i]) for i in (1, 2)}
    done = vkback(hub.url, tmp_path / "home", "pull", "u/r:Q8_0")
    first = Path(done.stdout.strip())
    assert first.name == "m-00001-of-00002.gguf" and first.with_name("m-00002-of-00002.gguf").read_bytes() == b"\2"


def test_what_goes_wrong_is_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.repos["u/r"] = {"m-Q8_0.gguf": b"x"}
    for url, name, said in (
        (hub.url, "u/none", "[hub] u/none: no such repository, or a private one"),
        (hub.url, "u/r:Q2_K", "no GGUF file of type Q2_K; there are m-Q8_0.gguf"),
        ("http://127.0.0.1:9", "u/r", "http://127.0.0.1:9 cannot be reached"),
    ):
        done = vkback(url, tmp_path / "empty", "pull", name)
        assert done.returncode == 1 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
