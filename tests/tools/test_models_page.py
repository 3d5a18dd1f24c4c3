"""docs/models.md is what tools/models_page.py makes of today's files."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
from pages import ROOT

from vkback.models.architecture import ARCHITECTURES


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "tools" / "models_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(tool: ModuleType) -> str:
    return str(tool.page())


def test_the_page_is_up_to_date(tool: ModuleType, page: str) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == page, "run tools/models_page.py"


def test_every_architecture_has_a_section_with_its_reference(page: str) -> None:
    for name, cls in ARCHITECTURES.items():
        part = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert all(shape in part for shape in cls.shapes if shape.startswith("tiny-")), name
        assert "Compared: " in part and "Training: " in part, name


def test_the_newest_speed_of_a_model_is_taken(tool: ModuleType) -> None:
    header, rows = next(tool.tables("| model | tg128 |\n|---|---:|\n| a | 1 |\n| b | 2 |\n"))
    assert header == ["model", "tg128"] and rows == [["a", "1"], ["b", "2"]]
    found = tool.speeds()["llama 8B Q4_K - Small"]
    assert found.file >= "2026-11-23" and float(found.values[0]) > 700
