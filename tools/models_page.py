#!/usr/bin/env python3
"""docs/models.md, made from the architectures' files: what each is, the shapes that `vkback synth` writes, what its logits were compared
with, and the speeds in bench/results.

    tools/models_page.py             write it
    tools/models_page.py --check     write nothing; exit code 1 where it is not what would be written
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from vkback.models import Model  # noqa: E402
from vkback.models.architecture import ARCHITECTURES, Architecture  # noqa: E402
from vkback.models.shape import ModelShape  # noqa: E402
from vkback.models.synth import TINY, outline, synthetic_names, synthetic_size  # noqa: E402
from vkback.ops.lowering import PlanError  # noqa: E402
from vkback.plan.training import training_graph  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
WIDTH = 150
"""Characters of its lines."""
RESULTS = ROOT / "bench" / "results"
REFERENCES = ROOT / "tests" / "references"

HEAD = """# Models

Made by `tools/models_page.py` from the files that it names; change those.

A file runs where its `general.architecture` is one of these, in every weight type of the format. Tests go through all of them with
prompts whole and in pieces, single tokens, caches of F16, Q8_0 and Q4_0, states that are saved and restored, batches of sequences,
`--exact` and adapters (tests/models). Other names are refused in one line that says what is lacking (vkback/models/unsupported.py).

Compared: logits of tiny models with random weights and odd sizes, by a class of the `transformers` package in float64. In the float path
NMSE is at most 1e-6, with activations of 8 bits 1e-3, and 64 greedy tokens agree wherever margins allow (tests/models/test_references.py).

Sizes are those of `vkback synth NAME-TYPE`, in GiB. Speeds are tokens a second on an NVIDIA H200, where bench/results has them.
"""

SPEEDS = ("tg128", "pp512")


@dataclass(frozen=True)
class Speed:
    """A row of a table in bench/results: the model as llama-bench names it, values by column, file."""

    model: str
    values: tuple[str, ...]
    file: str


def speeds() -> dict[str, Speed]:
    """The newest measurement of each model, by its name."""
    found: dict[str, Speed] = {}
    for path in sorted(RESULTS.glob("*_h200_*.md")):
        for header, rows in tables(path.read_text(encoding="utf-8")):
            if header[0] == "model" and all(column in header for column in SPEEDS):
                columns = [header.index(column) for column in SPEEDS]
                for row in rows:
                    found[row[0]] = Speed(row[0], tuple(row[c] for c in columns), path.name)
    return found


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Header and rows of every table of a page."""
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        if len(rows) > 2 and set("".join(rows[1])) <= set("-: "):
            yield rows[0], [row for row in rows[2:] if len(row) == len(rows[0])]


def section(name: str, cls: type[Architecture], measured: dict[str, Speed]) -> str:
    """What the page says of an architecture."""
    module = sys.modules[cls.__module__]
    lines = [f"## {name}", "", prose(module.__doc__ or ""), ""]
    published = {shape: s for shape, s in cls.shapes.items() if not shape.startswith(TINY)}
    if published:
        lines += ["| shape | llama-bench | layers | width | parameters | Q4_K_M | Q8_0 |", "|---|---|---:|---:|---:|---:|---:|"]
        lines += [shape_row(shape, s) for shape, s in published.items()] + [""]
    lines += [
        reference(cls),
        "",
        f"Keys beside those of every architecture: {', '.join(f'`{key}`' for key in sorted(cls.keys)) or 'none'}.",
    ]
    lines += ["", f"Training: {training(cls)}. File: vkback/models/architectures/{Path(module.__file__ or '').name}."]
    rows = [s for model, s in measured.items() if model.split()[0] == name]
    if rows:
        lines += ["", "| measured | tg128 | pp512 | in bench/results |", "|---|---:|---:|---|"]
        lines += [f"| {s.model} | {' | '.join(s.values)} | {s.file} |" for s in rows]
    return "\n".join(lines)


def prose(doc: str) -> str:
    """A module's text without the name that the heading has."""
    first, _, rest = doc.strip().partition("\n")
    models = re.sub(r"^The `[^`]+` architecture: ", "", first)
    return f"{models}\n{rest}".strip()


def shape_row(name: str, s: ModelShape) -> str:
    sizes = []
    for type in ("Q4_K_M", "Q8_0"):
        known = f"{name}-{type}" in synthetic_names()
        sizes.append(f"{synthetic_size(f'{name}-{type}')[0] / 2**30:.2f}" if known else "")
    whole = next(n for n in synthetic_names() if n.startswith(f"{name}-"))
    described = Model.of(outline(whole)).description.split()
    bench = " ".join(described[: 2 + (len(described) > 2 and described[2].startswith("("))])
    return f"| `{name}` | {bench} | {s.n_layer} | {s.n_embd} | {synthetic_size(whole)[1] / 1e9:.2f} B | {' | '.join(sizes)} |"


def reference(cls: type[Architecture]) -> str:
    """What the tiny shapes were compared with."""
    module = cls.name.replace("-", "_")
    path = REFERENCES / f"{module}.py"
    if not path.exists():
        return "Compared: see its tests; `transformers` has no class of it."
    doc = re.search(r'^"""(.*?)\n*"""', path.read_text(encoding="utf-8"), re.S)
    said = " ".join((doc[1] if doc else "").split("\n\n")[0].split())
    shapes = [shape for shape in cls.shapes if shape.startswith(TINY)]
    versions = set()
    for shape in shapes:
        with np.load(REFERENCES / "data" / f"{shape.removeprefix(TINY).replace('-', '_')}.npz") as stored:
            versions.add(str(json.loads(str(stored["source"])).get("transformers", "")))
    by = re.sub(r"^`[^`]+` by ", "", said).rstrip(".")
    return f"Compared: {', '.join(f'`{shape}`' for shape in shapes)}, by {by}; transformers {', '.join(sorted(versions))}."


def training(cls: type[Architecture]) -> str:
    """Whether the tiny shapes can be trained, or why not."""
    shape = next((shape for shape in cls.shapes if shape.startswith(TINY)), None)
    if shape is None:
        return "not known"
    if not cls.causal:
        return "no (it makes vectors of texts)"
    try:
        training_graph(Model.of(outline(f"{shape}-F32")).graph(4, 4, head="all"))
    except PlanError as e:
        op, _, why = str(e).partition("] ")
        why = why.partition(": ")[2].partition(";")[0]
        return f"no ({why if op == '[training' else f'{op[1:]} has no gradient'})"
    return "yes"


def page() -> str:
    importlib.import_module("vkback.models.architectures")
    measured = speeds()
    listed = ", ".join(f"[{name}](#{name.lower()})" for name in ARCHITECTURES)
    text = "\n\n".join([HEAD + f"\n{listed}", *(section(name, cls, measured) for name, cls in ARCHITECTURES.items())])
    return "\n".join(wrapped(line) for line in text.split("\n")) + "\n"


def wrapped(line: str) -> str:
    """In lines that an editor shows whole; rows of tables stay."""
    short = len(line) <= WIDTH or line.startswith("|")
    return line if short else textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page is not up to date")
    args = parser.parse_args()
    text = page()
    if not args.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not what the files say; run tools/models_page.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
