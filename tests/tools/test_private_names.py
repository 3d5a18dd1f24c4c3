"""How often tests reach for what an object keeps private. Each such place makes a change inside harder; the count may only fall."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]

CEILING = 58
"""Lower it when there are fewer. Where a test needs more, give the object a small public property, or test what it does."""

PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit", "_repr_html_"}
"""Names that Python documents: those of named tuples, `os._exit`, IPython's hook."""

SETTERS = {"setattr", "getattr", "delattr", "hasattr"}
"""Calls whose second argument names an attribute, pytest's monkeypatch among them."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def private_names(source: str) -> list[str]:
    """Private names outside `self` and `cls` that a file reads, sets or patches, one for each time."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                found.append(name)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[_, ast.Constant(value=of), *_]) if name in SETTERS:
                found += [str(of)] if is_private(of) else []
            case ast.ImportFrom(names=names):
                found += [alias.name for alias in names if is_private(alias.name)]
    return found


def test_what_counts() -> None:
    source = "a._x.b; self._y; t._replace(n=1); setattr(a, '_z', 1); patch.setattr(m, '_w', 1); patch.setattr(m, 'v', 1); a.__class__"
    assert sorted(private_names(source)) == ["_w", "_x", "_z"]
    assert private_names("from a import _b, c") == ["_b"]


def test_private_names_stay_few() -> None:
    counts = Counter({path.relative_to(TESTS): len(private_names(path.read_text("utf-8"))) for path in TESTS.rglob("*.py")})
    most = ", ".join(f"{count} in {path}" for path, count in counts.most_common(5))
    assert counts.total() <= CEILING, f"{counts.total()} private names in tests, {CEILING} are the most there may be: {most}"
