"""vkback imatrix: sums of squared activations against the float64 twin, of experts by expert; files joined; errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli_kit import call
from make_gguf import llama_metadata, llama_tensors, write_gguf
from tiny_models import tiny_with_text

from vkback.cli.main import main
from vkback.device import Device
from vkback.evaluate.importances import ImportancesError, chunks_of, gather_importances, met_by_weights
from vkback.evaluate.twin import NumpyTwin
from vkback.gguf.imatrix import read_imatrix
from vkback.models.registry import Model


def plain_sums(model: Model, chunks: list[np.ndarray], weight: str) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts of one weight by the twin, token by token."""
    size = len(chunks[0])
    (met,) = (each for each in met_by_weights(model, model.graph(size, size, head="all"), with_output=True) if each.weight == weight)
    sums, counts = np.zeros((met.n_mat, met.x.shape[-1])), np.zeros(met.n_mat)
    twin = NumpyTwin(model, n_ctx=size)
    for chunk in chunks:
        twin.reset()
        values = twin.forward(list(chunk), wanted=[t.name for t in met.kept])
        x = values[met.source.name].reshape(met.x.shape)
        ids = values[met.ids.name].reshape(met.ids.shape) if met.ids is not None else np.zeros((size, 1), int)
        for token in range(size):
            for i, expert in enumerate(ids[token]):
                row = x[token] if x.ndim == 2 else x[token, min(i, x.shape[1] - 1)]
                sums[expert] += row**2
                counts[expert] += 1
    return sums, counts


@pytest.mark.vulkan
@pytest.mark.parametrize("experts", [0, 4])
def test_sums_are_those_of_the_twin(experts: int, tmp_path: Path, device: Device) -> None:
    more = {"expert_count": experts, "expert_used_count": 2} if experts else {}
    metadata = llama_metadata(**more) | {"tokenizer.ggml.model": "no_vocab"}
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, llama_tensors(experts=experts, tied=False))
    model = Model.open(path)
    chunks = chunks_of(np.random.default_rng(0).integers(0, 32, 60).tolist(), 24, None, 1)
    assert len(chunks) == 2 and all(chunk[0] == 1 for chunk in chunks)
    done: list[int] = []
    found = gather_importances(model, device, chunks, out=tmp_path / "i.gguf", text="t", on_chunk=done.append)
    assert done == [1, 2] and (found.chunks, found.chunk_size, found.datasets) == (2, 24, ("t",))
    assert "output.weight" not in found.weights
    for weight in ("blk.0.attn_q.weight", "blk.1.attn_output.weight", f"blk.1.ffn_{'down_exps' if experts else 'down'}.weight"):
        sums, counts = plain_sums(model, chunks, weight)
        assert np.array_equal(found.weights[weight].counts, counts)
        np.testing.assert_allclose(found.weights[weight].sums, sums, rtol=2e-3, atol=1e-3 * sums.max())  # keys of F16, activations of F32


@pytest.mark.vulkan
def test_the_command_writes_joins_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model, text = tiny_with_text(tmp_path / "m.gguf"), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 4, encoding="utf-8")
    one, both = tmp_path / "one.gguf", tmp_path / "both.gguf"
    given = ["imatrix", "-m", str(model), "-f", str(text), "-c", "16", "--chunks", "2", "--process-output"]
    assert call(monkeypatch, main, *given, "-o", str(one), "--json") == 0
    assert json.loads(capsys.readouterr().out)["chunks"] == 2
    assert call(monkeypatch, main, *given, "-o", str(both), "--in-file", str(one)) == 0
    a, b = read_imatrix(one), read_imatrix(both)
    assert (b.chunks, b.datasets) == (4, ("text.txt",)) and "token_embd.weight" in b.weights
    for name, each in a.weights.items():
        assert np.array_equal(b.weights[name].counts, 2 * each.counts)
        np.testing.assert_allclose(b.weights[name].sums, 2 * each.sums, rtol=1e-6)
    assert call(monkeypatch, main, "imatrix", "--in-file", str(one), "--in-file", str(one), "-o", str(tmp_path / "joined.gguf")) == 0
    assert read_imatrix(tmp_path / "joined.gguf").chunks == 4
    out = tmp_path / "q.gguf"
    assert call(monkeypatch, main, "quantize", str(model), str(out), "Q4_0", "--imatrix", str(both), "--no-kl") == 0


def test_a_text_too_short_is_named() -> None:
    with pytest.raises(ImportancesError, match=r"the text has 3 tokens, one chunk takes 4; give a longer text, or a smaller --ctx"):
        chunks_of([1, 2, 3], 4, None, None)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_device: None) -> None:
    assert call(monkeypatch, main, "imatrix", "-m", "demo-dense") == 2
    assert "imatrix needs a text, as -f FILE, or files to join" in capsys.readouterr().err
    assert call(monkeypatch, main, "imatrix", "--in-file", str(tmp_path / "none.gguf")) == 2
    assert "none.gguf: cannot be read" in capsys.readouterr().err
