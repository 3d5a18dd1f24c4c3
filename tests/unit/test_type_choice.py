"""Types that llama-quantize gives tensors, by rules, against those of files that it made (vkback/models/type_mixes.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import vkback.models
from vkback.models.synth import SHAPES, planned_tensors, synthetic_names, synthetic_size
from vkback.models.type_choice import BASE, Counts, choose_types, fitting

MIXES = json.loads((Path(vkback.models.__file__).parent / "type_mixes.json").read_text(encoding="utf-8"))
MADE = [(shape, type) for shape, types in MIXES.items() for type in types if type in BASE]


@pytest.mark.parametrize(("shape", "type"), MADE, ids=[f"{shape}-{type}" for shape, type in MADE])
def test_rules_choose_what_llama_quantize_chose(shape: str, type: str) -> None:
    s = SHAPES[shape]
    made = {t.name: t for t in planned_tensors(f"{shape}-{type}")}
    tensors = [(name, t.shape) for name, t in made.items()]
    chosen = choose_types(type, tensors, Counts.of(tensors, s.n_layer, s.n_expert, s.n_head // s.n_head_kv, s.n_layer == 80))
    assert {n: chosen[n] for n, t in made.items() if t.type != "F32"} == {n: t.type for n, t in made.items() if t.type != "F32"}


def test_every_published_shape_can_be_written_in_usual_types() -> None:
    names = set(synthetic_names())
    for shape in SHAPES:
        if not shape.startswith("tiny-") and shape not in MIXES:
            assert {f"{shape}-{type}" for type in ("Q4_K_M", "Q6_K", "Q8_0")} <= names
    assert "tiny-gemma2-Q4_K_M" not in names, "rows of tiny models are no whole blocks"


@pytest.mark.parametrize(
    ("name", "gib"), [("gemma2-9b-Q4_K_M", 5.36), ("gemma2-27b-Q4_K_M", 15.50), ("olmo2-7b-Q4_K_M", 4.16), ("granite-3.3-8b-Q4_K_M", 4.6)]
)
def test_sizes_are_those_of_published_files(name: str, gib: float) -> None:
    """As the makers of such files list them, to the digits they give."""
    assert synthetic_size(name)[0] / 2**30 == pytest.approx(gib, rel=0.02)


def test_rows_that_are_no_whole_blocks_fall_back() -> None:
    assert [fitting(type, 1408) for type in ("Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q8_0")] == ["Q5_0", "Q5_1", "Q8_0", "Q4_0", "Q8_0"]
    assert fitting("Q4_K", 100) == "F16"
