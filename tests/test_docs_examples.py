"""Every Python example of README and docs/python.md runs as it stands there, each in an interpreter's namespace of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

from vkback.api import device as device_module
from vkback.api import model as model_module
from vkback.device import Device
from vkback.models.engine import Engine
from vkback.timing.read_rate import measure_read_rate

PYTHON = re.compile(r"^```(?P<kind>python|glsl)(?: (?P<name>\S+))?\n(?P<text>.*?)^```$", re.M | re.S)
PAGES = ("README.md", "docs/python.md")
BLOCKS = [(page, block) for page in PAGES for block in PYTHON.finditer((ROOT / page).read_text(encoding="utf-8"))]
FILES = {block["name"]: block["text"] for _, block in BLOCKS if block["kind"] == "glsl"}
EXAMPLES = [(page, block["text"]) for page, block in BLOCKS if block["kind"] == "python"]


class _Kept:
    """An engine that outlives the example that loaded it, with kernels that other tests compile, too: that is most of an example's time."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.engines: dict[tuple[Any, ...], Engine] = {}

    def load(self, path: Path, device: Any, *, n_ctx: int | None, **others: Any) -> Engine:
        key = (path, n_ctx, tuple(others.items()))
        if key not in self.engines:
            self.engines[key] = Engine.load(path, self.device, n_ctx=n_ctx, **{**others, "act": "f32"})
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
