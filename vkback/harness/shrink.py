"""The smallest case that still fails, and its values in a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vkback import quants
from vkback.errors import VkbackError
from vkback.harness.cases import make_case
from vkback.harness.suite import Run
from vkback.ops.case import Case
from vkback.ops.ggml_words import tensor_type
from vkback.paths import new_file

FIXED = frozenset(
    {
        "seed",
        "act",
        "axis",
        "axes",
        "pos",
        "glu",
        "b",
        "packed",
        "norm",
        "ff",
        "sinks",
        "residual",
        "ties",
        "order",
        "to",
        "split",
        "per",
        "permute",
        "dim",
        "v",
        "tfrm",
        "perm1",
        "src_overlap",
        "o",
    }
)
"""Parameters that say what a case is, not how large."""

TYPE_AND_COLUMNS = (("type_a", "k"), ("type", "n"))
"""Weight type, and the parameter that must be a multiple of its block."""


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """A case of the same op of which no size can be lowered by a step without it passing; the case itself if its line makes no case.

    Every size is halved between what fails and what passes until the two are neighbours, and again while any of them gave way.
    """
    progress = True
    while progress:
        progress = False
        for key in _sizes(case.params):
            smaller = _least(case, key, fails)
            if smaller is not None:
                case, progress = smaller, True
    return case


def _sizes(params: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Whole numbers among the parameters, largest first: name, and the index in a tuple (-1 for a plain one)."""
    found: list[tuple[int, tuple[str, int]]] = []
    for name, value in params.items():
        if name in FIXED or isinstance(value, bool):
            continue
        if isinstance(value, int):
            found.append((value, (name, -1)))
        elif isinstance(value, tuple):
            found += [(v, (name, i)) for i, v in enumerate(value) if isinstance(v, int) and not isinstance(v, bool)]
    return [key for value, key in sorted(found, key=lambda f: -f[0]) if value > 1]


def _least(case: Case, key: tuple[str, int], fails: Callable[[Case], bool]) -> Case | None:
    name, index = key
    value = case.params[name] if index < 0 else case.params[name][index]
    step = next((_block(case.params[t]) for t, columns in TYPE_AND_COLUMNS if t in case.params and columns == name), 1)
    passing, failing, best = 0, value // step, None
    while failing - passing > 1:
        middle = (passing + failing) // 2
        candidate = _with(case, name, index, middle * step)
        if candidate is not None and fails(candidate):
            failing, best = middle, candidate
        else:
            passing = middle
    return best


def _block(type: str) -> int:
    known = quants.QUANTS.get(tensor_type(type))
    return known.block_values if known else 1


def _with(case: Case, name: str, index: int, value: int) -> Case | None:
    """The case with another size; None where there is no such case."""
    old = case.params[name]
    new: Any = value if index < 0 else (*old[:index], value, *old[index + 1 :])
    try:
        candidate = make_case(case.op, {**case.params, name: new})
        candidate.build()
    except (VkbackError, ValueError, IndexError, KeyError):
        return None
    return candidate


def save(run: Run, folder: Path) -> Path:
    """Write line, message, inputs, outputs ("got") and reference ("want") of a case that has run; the file's path. Raises OSError."""
    line = run.result.line
    path = folder / f"{run.result.op.lower()}_{hashlib.sha256(line.encode()).hexdigest()[:10]}.npz"
    arrays: dict[str, Any] = {"line": np.array(line), "message": np.array(run.result.message)}
    if run.problem is not None:
        arrays |= {f"input.{name}": value for name, value in run.problem.values.items()}
    for label, values in (("got", run.got), ("want", run.want)):
        arrays |= {f"{label}.{name}": value for name, value in (values or {}).items()}
    folder.mkdir(parents=True, exist_ok=True)
    with new_file(path) as part, part.open("wb") as file:
        np.savez_compressed(file, **arrays)
    return path
