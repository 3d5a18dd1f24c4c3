"""vkback quantize: types, sizes and bytes as llama-quantize has them (tests/peer_quantize.py); importances; errors."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import peer_quantize as peer
import pytest
from make_gguf import llama_metadata, llama_tensors, write_gguf

from vkback import paths, quants
from vkback.errors import VkbackError
from vkback.evaluate.twin import NumpyTwin
from vkback.gguf.file import GgufFile
from vkback.gguf.imatrix import COUNTS, SUMS, Imatrix, Sums, read_imatrix, write_imatrix
from vkback.gguf.write import GgufWriter, entry
from vkback.models import quantize as module
from vkback.models.quantize import QuantizeError, Recipe, plan_quantize, quantize
from vkback.models.synth import write_outline

SAID = json.loads(peer.STORED.read_text(encoding="utf-8"))
CHOSEN = [(shape, type) for shape, types in SAID["types"].items() for type in types]


@pytest.fixture(scope="module")
def outlines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufFile]:
    """By name of a shape, models without weights."""
    folder, found = tmp_path_factory.mktemp("outlines"), {}
    for shape in peer.SHAPES:
        write_outline(f"{shape}-F32", folder / f"{shape}.gguf")
        found[shape] = GgufFile.open(folder / f"{shape}.gguf")
    return found


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return peer.small_model(tmp_path)


@pytest.mark.parametrize("shape", SAID["types"])
def test_types_and_their_order_are_those_of_llama_quantize(shape: str, outlines: dict[str, GgufFile], tmp_path: Path) -> None:
    name, _, how = shape.partition(" with ")
    f = outlines[name]
    imatrix = peer.importances(f, tmp_path / "imatrix.gguf") if how else None
    said = SAID["types"][shape]
    assert len(said) > 25
    assert {type: peer.digest(peer.planned(f, type, imatrix)) for type in said} == said


@pytest.mark.parametrize("type", peer.EXACT)
def test_files_equal_those_of_llama_quantize(type: str, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    quantize(plan_quantize(GgufFile.open(small), Recipe(type, pure=True)), out)
    assert peer.file_digest(out) == SAID["files"][type]


@pytest.mark.parametrize("type", peer.EXACT_WIDE)
def test_files_of_wide_rows_equal_those_of_llama_quantize(type: str, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    quantize(plan_quantize(GgufFile.open(peer.wide_model(tmp_path, experts=4)), Recipe(type, pure=type != "MXFP4_MOE")), out)
    assert peer.file_digest(out) == SAID["files"][type]


@pytest.mark.parametrize("type", ["Q4_K_M", "IQ4_XS", "MXFP4_MOE", "Q1_0", "TQ1_0"])
def test_sizes_and_values_of_a_mix(type: str, tmp_path: Path) -> None:
    f, out = GgufFile.open(peer.wide_model(tmp_path)), tmp_path / "out.gguf"
    plan = plan_quantize(f, Recipe(type))
    quantize(plan, out)
    made = GgufFile.open(out)
    assert made.size_bytes == plan.size_bytes
    assert made.n_params == f.n_params
    assert list(made.tensors) == [step.source.name for step in plan.steps]
    for step in plan.steps:
        t = made.tensors[step.source.name]
        source = np.asarray(step.source.data).view(np.float32)
        assert t.type == step.type
        assert np.array_equal(np.asarray(t.data), quants.encode(t.type, source) if step.changes else np.asarray(step.source.data))


def test_metadata_is_copied_to_the_byte_and_names_the_type(small: Path, tmp_path: Path) -> None:
    f, out = GgufFile.open(small), tmp_path / "out.gguf"
    quantize(plan_quantize(f, Recipe("Q8_0")), out)
    made = GgufFile.open(out)
    assert [made.entry(key) for key in f.entries] == [f.entry(key) for key in f.entries]
    assert (made.metadata["general.quantization_version"], made.metadata["general.file_type"]) == (2, 7)


@pytest.mark.parametrize(
    ("recipe", "types"),
    [
        (Recipe("Q8_0", tensors=(("attn_[qk]", "q4_0"), ("attn", "q5_0"))), {"blk.1.attn_q": "Q4_0", "blk.1.attn_v": "Q5_0"}),
        (Recipe("Q4_0", output="Q8_0", embeddings="f16"), {"output": "Q8_0", "token_embd": "F16"}),
        (Recipe("Q4_0", leave_output=True), {"output": "F32", "token_embd": "Q4_0"}),
        (Recipe("Q4_K_M", pure=True), {"output": "Q4_K", "blk.0.attn_v": "Q4_K"}),
        (Recipe("q4_k"), {"output": "Q6_K", "blk.1.ffn_down": "Q6_K", "blk.1.attn_k": "Q4_K"}),
        (Recipe("F16"), {"output": "F16", "blk.1.attn_k": "F16"}),
    ],
)
def test_recipes(recipe: Recipe, types: dict[str, str], tmp_path: Path) -> None:
    plan = plan_quantize(GgufFile.open(peer.wide_model(tmp_path)), recipe)
    found = {step.source.name: step.type for step in plan.steps}
    assert {name: found[f"{name}.weight"] for name in types} == types


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe("Q4_K_X"), r"Q4_K_X: no such type. Did you mean .*There are Q2_K"),
        (Recipe("Q4_0", tensors=(("attn[", "Q8_0"),)), r"--tensor-type attn\[: no regular expression"),
        (Recipe("Q4_0", output="Q9"), r"--output-tensor-type Q9: no such type"),
    ],
)
def test_wrong_recipes(recipe: Recipe, said: str, small: Path) -> None:
    with pytest.raises(QuantizeError, match=said) as e:
        plan_quantize(GgufFile.open(small), recipe)
    assert e.value.exit_code == 2


def test_a_quantized_source_is_refused_unless_asked_for(small: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.gguf", tmp_path / "twice.gguf"
    quantize(plan_quantize(GgufFile.open(small), Recipe("Q8_0")), once)
    with pytest.raises(QuantizeError, match=r"is Q8_0 already, and rounding twice loses more.*--allow-requantize"):
        plan_quantize(GgufFile.open(once), Recipe("Q4_0"))
    quantize(plan_quantize(GgufFile.open(once), Recipe("Q4_0", requantize=True)), twice)
    assert GgufFile.open(twice).tensors["output.weight"].type == "Q8_0"  # its rows are no whole blocks of Q6_K


def test_a_weight_that_is_no_number_leaves_no_file(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["blk.1.attn_q.weight"][1][3, 5] = np.nan
    source = write_gguf(tmp_path / "nan.gguf", "llama", llama_metadata(), tensors)
    out = tmp_path / "out.gguf"
    with pytest.raises(QuantizeError, match=r"blk\.1\.attn_q\.weight: a weight is NaN or infinite"):
        quantize(plan_quantize(GgufFile.open(source), Recipe("Q4_0")), out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["nan.gguf"]


def test_many_pieces_and_processes_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f, out, other = GgufFile.open(peer.wide_model(tmp_path)), tmp_path / "out.gguf", tmp_path / "other.gguf"
    told: list[int] = []
    quantize(plan_quantize(f, Recipe("Q4_K_M")), out, on_weights=told.append)
    assert sum(told) == f.n_params
    monkeypatch.setattr(module, "PIECE", 1 << 14)
    monkeypatch.setattr(module, "FEW", 0)
    quantize(plan_quantize(f, Recipe("Q4_K_M")), other, threads=2)
    assert out.read_bytes() == other.read_bytes()


# -- importances


def test_importances_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    sums = {"blk.0.ffn_down_exps.weight": Sums(np.array([[2.0, 4.0], [9.0, 9.0]], np.float32), np.array([2.0, 0.0], np.float32))}
    write_imatrix(path, Imatrix(path, sums, ("a.txt",), 3, 512))
    found = read_imatrix(path)
    assert (found.datasets, found.chunks, found.chunk_size) == (("a.txt",), 3, 512)
    assert found.weights["blk.0.ffn_down_exps.weight"].importances.tolist() == [[1.0, 2.0], [1.0, 1.0]], "an expert without tokens: ones"
    both = found.joined(found)
    assert (both.chunks, both.datasets) == (6, ("a.txt",))
    assert both.weights["blk.0.ffn_down_exps.weight"].counts.tolist() == [4.0, 0.0]


def old_file(path: Path, weights: dict[str, list[float]], calls: int) -> Path:
    parts = [struct.pack("<i", len(weights))]
    for name, values in weights.items():
        parts.append(struct.pack(f"<i{len(name)}sii{len(values)}f", len(name), name.encode(), calls, len(values), *values))
    path.write_bytes(b"".join([*parts, struct.pack("<ii5s", 7, 5, b"a.txt")]))
    return path


def test_old_files_of_importances(tmp_path: Path) -> None:
    found = read_imatrix(old_file(tmp_path / "imatrix.dat", {"blk.0.attn_q.weight": [2.0, 8.0]}, 4))
    assert found.weights["blk.0.attn_q.weight"].importances.tolist() == [[0.5, 2.0]]
    assert (found.chunks, found.datasets, found.entries) == (7, ("a.txt",), 1)


@pytest.mark.parametrize("cut", [1, 5, 20, 30])
def test_broken_files_of_importances(cut: int, tmp_path: Path) -> None:
    whole = old_file(tmp_path / "imatrix.dat", {"blk.0.attn_q.weight": [2.0, 8.0]}, 4)
    whole.write_bytes(whole.read_bytes()[:cut])
    with pytest.raises(VkbackError, match=r"imatrix\.dat"):
        read_imatrix(whole)


def test_a_model_is_no_matrix_of_importances(small: Path) -> None:
    with pytest.raises(VkbackError, match=r"has no tensor NAME\.in_sum2, so it is no importance matrix"):
        read_imatrix(small)


def test_importances_move_the_error_to_where_it_matters_less(tmp_path: Path) -> None:
    f = GgufFile.open(peer.wide_model(tmp_path))
    heavy = np.ones((1, 256), np.float32)
    heavy[:, ::4] = 100
    names = [t.name for t in f.tensors.values() if t.name.startswith("blk.")]
    imatrix = Imatrix(tmp_path / "i.gguf", {name: Sums(heavy, np.ones(1, np.float32)) for name in names}, ("t",), 2, 512, len(names))
    errors = {}
    for how, given in (("without", None), ("with", imatrix)):
        out = tmp_path / f"{how}.gguf"
        quantize(plan_quantize(f, Recipe("Q4_K_S"), given), out)
        made = GgufFile.open(out).tensors["blk.1.ffn_up.weight"]
        off = quants.decode(made.type, np.asarray(made.data)) - np.asarray(f.tensors["blk.1.ffn_up.weight"].data).view(np.float32)
        errors[how] = float(np.square(off)[:, ::4].mean()), float(np.square(off)[:, 1::4].mean())
    assert errors["with"][0] < 0.9 * errors["without"][0]
    assert errors["with"][1] > errors["without"][1]
    assert GgufFile.open(tmp_path / "with.gguf").metadata["quantize.imatrix.chunks_count"] == 2


@pytest.mark.parametrize(
    ("change", "said"), [({"blk.9.attn_q.weight": 256}, "names no tensor of wide.gguf"), ({"blk.1.attn_q.weight": 32}, "has 32 values")]
)
def test_importances_of_another_model(change: dict[str, int], said: str, tmp_path: Path) -> None:
    f = GgufFile.open(peer.wide_model(tmp_path))
    sums = {name: Sums(np.ones((1, k), np.float32), np.ones(1, np.float32)) for name, k in change.items()}
    with pytest.raises(VkbackError, match=said):
        plan_quantize(f, Recipe("Q4_K_M"), Imatrix(tmp_path / "i.gguf", sums))


def test_low_types_say_that_they_need_importances(outlines: dict[str, GgufFile]) -> None:
    assert "without importances IQ2_XXS is poor" in plan_quantize(outlines["llama-8b"], Recipe("IQ2_XXS")).notes[0]


# -- the file


def test_a_writer_counts_its_bytes(tmp_path: Path) -> None:
    tensors = [("a", "F32", (3,)), ("b", "F32", (0, 4)), ("c", "F32", (1,))]
    path = tmp_path / "w.gguf"
    with GgufWriter(path, [entry("general.architecture", "llama")], tensors) as writer:
        writer.write(bytes(12), bytes(4))
    assert path.stat().st_size % 32 == 0
    with pytest.raises(ValueError, match="1 tensors are not written"), GgufWriter(path, [], tensors) as writer:
        writer.write(bytes(12))
    with pytest.raises(ValueError, match="more bytes"), GgufWriter(path, [], tensors) as writer:
        writer.write(bytes(20))


def test_entries_are_read_as_they_are_written(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "a": True,
        "b": 7,
        "c": -7,
        "d": 0.5,
        "e": ["x", "é"],
        "f": [1, 2],
        "g": [0.5],
        "h": 1 << 20,
    }
    path = tmp_path / "e.gguf"
    with GgufWriter(path, [entry(key, value) for key, value in values.items()], []):
        pass
    f = GgufFile.open(path)
    assert {key: list(f.metadata[key]) if isinstance(value, list) else f.metadata[key] for key, value in values.items()} == values


def test_names_of_an_importance_matrix() -> None:
    assert (SUMS, COUNTS) == (".in_sum2", ".counts")


def test_the_built_in_models_can_be_outlined() -> None:
    for path in paths.builtin_models():
        plan = plan_quantize(GgufFile.open(path), Recipe("Q8_0", requantize=True))
        assert plan.bits_per_weight == pytest.approx(8.5, abs=0.1)


def test_tensors_without_values_change_nothing(small: Path, tmp_path: Path) -> None:
    f, path, out = GgufFile.open(small), tmp_path / "spare.gguf", tmp_path / "out.gguf"
    tables = [(t.name, t.type, t.shape) for t in f.tensors.values()]
    spare = ("blk.0.spare.weight", "F32", (0, 64))
    with GgufWriter(path, [f.entry(key) for key in f.entries], [*tables[:3], spare, *tables[3:]]) as writer:
        writer.write(*(np.asarray(t.data).reshape(-1) for t in f.tensors.values()))
    opened = GgufFile.open(path)
    assert opened.tensors[spare[0]].data.shape == (0, 0) and opened.n_params == f.n_params
    tokens = [1, 5, 9]
    assert np.array_equal(NumpyTwin(path, n_ctx=8).logits(tokens), NumpyTwin(small, n_ctx=8).logits(tokens))
    quantize(plan_quantize(opened, Recipe("Q8_0")), out)
    assert GgufFile.open(out).tensors[spare[0]].shape == (0, 64)
