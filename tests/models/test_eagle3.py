"""EAGLE-3 heads as drafters: what they compute, that they change no text, that a fitted one is right, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafter_kit import N_CTX, PROMPT, SAMPLERS, check_rows, check_texts, text_of
from eagle3_kit import EPS, Floats, Head, write_head
from tiny_models import TINY, changed, tiny

import vkback
from vkback import quants
from vkback.checks import OptionError
from vkback.device import Commands, Device, Ticket
from vkback.engine.drafts import Drafts
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler
from vkback.engine.split.layers import SplitError
from vkback.evaluate.twin import NumpyTwin
from vkback.gguf.file import GgufError, GgufFile
from vkback.models.eagle3 import with_head
from vkback.models.mtp import HIDDEN
from vkback.models.registry import Model
from vkback.models.synth import head_names, planned_tensors, synthesize
from vkback.paths import builtin_model
from vkback.plan.planner import plan
from vkback.tuning.lookup import device_table

DATA = Path(__file__).parents[1] / "data"

IDS = np.random.default_rng(3).permutation(331)[:100].astype(np.int64)
"""Of the tokens that a head's output layer knows."""


def opened(target: Path, head: Path, device: Device, pinned: int = 4, **more: Any) -> Engine:
    return Engine.open(
        target, device, LoadOptions(ctx=N_CTX, act="f32", spec_type="draft-eagle3", model_draft=head, spec_pinned=pinned, **more)
    )


def table_of(path: Path) -> Floats:
    """A target's embedding."""
    f = GgufFile.open(path)
    t = f.tensors["token_embd.weight"]
    return quants.decode(t.type, np.asarray(t.data)).reshape(t.shape).astype(np.float64)


def layer_inputs(path: Path, tokens: tuple[int, ...], layers: tuple[int, ...]) -> Floats:
    """What goes into layers of a target, side by side [n, 3 n_embd], in float64."""
    names = ["inp_embd" if il == 0 else f"l_out-{il - 1}" for il in layers]
    found = NumpyTwin(path, n_ctx=N_CTX).forward(tokens, wanted=names)
    return np.concatenate([found[name] for name in names], axis=1)


def nmse(found: Floats, expected: Floats) -> float:
    return float(np.square(found - expected).sum() / np.square(expected).sum())


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ids": {"ids": IDS, "layers": (2, 0, 1)},
    "norms": {
        "metadata": {"norm_before_residual": True, "norm_before_fc": True},
        "made": {"enc.output_norm.weight": np.linspace(0.5, 1.5, 3 * 96, dtype=np.float32)},
    },
    "own": {
        "n_embd": 64,
        "heads": (4, 2, 16),
        "made": {
            "token_embd.weight": np.random.default_rng(7).standard_normal((331, 64)).astype(np.float32),
            "rope_freqs.weight": np.linspace(1, 4, 8, dtype=np.float32),
            "blk.0.attn_q.bias": np.linspace(-1, 1, 64, dtype=np.float32),
        },
    },
}
"""Kinds of heads: of tokens by other ids, with further norms, with all that a head may have of its own."""


@pytest.mark.vulkan
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_a_head_are_those_of_numpy(variant: str, tmp_path: Path, device: Device) -> None:
    """The first draft reads what the target has kept of its prompt, the others what the head gave before. float32 sums of some hundred
    values against float64, keys and values rounded to F16 by the target: an NMSE of 1e-6."""
    target = tiny("llama", tmp_path)
    how = VARIANTS[variant]
    path = write_head(tmp_path / "head.gguf", target, **how)
    head = Head(path, table_of(target))
    g = head.rows(layer_inputs(target, PROMPT, tuple(how.get("layers", (0, 1, 2)))))
    for at, token in enumerate(PROMPT[1:-1]):
        head.entry(token, g[at])
    with opened(target, path, device, cache_type_k="f32", cache_type_v="f32") as engine:
        engine.prompt(PROMPT[:-1])
        kept = np.asarray(engine.snapshot().arrays[HIDDEN], np.float64)[0, : len(PROMPT) - 1]
        assert nmse(kept, g[:-1]) < 1e-6
        arena = device.arena("a token", 512, "device")
        one = {"tokens": arena.alloc(4, "tokens"), "pos": arena.alloc(4, "pos")}
        graph = engine.model.head_graph(N_CTX, engine.cache_types)
        program = engine.bind(plan(graph, engine.ctx, fusion=engine.fusion), one)
        token, row = PROMPT[-1], g[len(PROMPT) - 2]
        for place in range(4):
            expected, row = head.entry(token, row)
            device.upload(one["tokens"], np.array([token], np.int32))
            device.upload(one["pos"], np.array([len(PROMPT) - 1 + place], np.int32))
            device.submit(program.record("a draft")).wait()
            found = device.download(program.range("result_output"), np.float32)[: len(expected)].astype(np.float64)
            assert nmse(found, expected) < 1e-6, place
            token = head.id_of(int(np.argmax(expected)))
        program.close()
        arena.destroy()


@pytest.mark.vulkan
@pytest.mark.parametrize("arch", ["llama", "qwen35", *(pytest.param(a, marks=pytest.mark.exhaustive) for a in ("gemma3", "gpt-oss"))])
def test_a_head_changes_no_text_and_the_target_keeps_its_rows(arch: str, tmp_path: Path, device: Device) -> None:
    """Random weights, whose drafts are wrong, of a target with attention alone and of one with recurrent states."""
    target = tiny(arch, tmp_path)
    layers = [min(il, Model.open(target).hp.n_layer - 1) for il in range(3)]
    with opened(target, write_head(tmp_path / "head.gguf", target, ids=IDS, layers=layers), device) as engine:
        text = check_texts(engine, SAMPLERS)
        sampler = [*SAMPLERS.values()][-1]
        assert text_of(engine, sampler, Drafts(3, pinned=4, model=True)) == text
        drafted = engine.draft_counts.drafted
        assert text_of(engine, sampler, Drafts(3, pinned=4, model=True, p_min=0.9)) == text
        assert engine.draft_counts.drafted < drafted / 2, "random logits are not that sure"
        check_rows(engine, text, engine.model.hp.n_layer)


@pytest.mark.vulkan
@pytest.mark.parametrize("variant", ["plain", "norms"])
def test_barrier_free_drafts_are_the_same(
    variant: str, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stages of a draft, and of the step that accepts it, with spin-waits: as many drafts are right as with barriers, of the same text."""
    target = tiny("llama", tmp_path)
    path = write_head(tmp_path / "head.gguf", target, **VARIANTS[variant])
    found = []
    for sync in ("barrier", "sentinel"):
        (tmp_path / device_table(device.caps)).write_text(
            f'[[schedule]]\nset = {{ sync = "{sync}" }}\nmeasured = "a test"\n', encoding="utf-8"
        )
        monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
        with opened(target, path, device) as engine:
            planned = plan(engine.model.head_graph(N_CTX, engine.cache_types), engine.ctx, fusion=engine.fusion)
            assert (len(planned.barrier_free) > 4) == (sync == "sentinel")
            text = check_texts(engine, {"greedy": Sampler()})
            assert text_of(engine, Sampler(), Drafts(3, pinned=4, model=True)) == text
            found.append((text, engine.draft_counts))
    assert found[0] == found[1] and not caplog.text


ALIKE = 40.0
"""Length of Q and K of a head of 1 value, where all tokens have the same: scores beside that of an entry with itself are next to none."""


def for_itself(dim: int, n_embd: int) -> dict[str, np.ndarray]:
    """Q and K, the same for all tokens, by which an entry attends to itself alone: turned by RoPE they agree nowhere else."""
    one = np.full(n_embd, ALIKE / np.sqrt(dim), np.float32)
    zero = np.zeros((n_embd, 2 * n_embd), np.float32)
    return {f"blk.0.attn_{kind}.{part}": zero if part == "weight" else one for kind in "qk" for part in ("weight", "bias")}


@pytest.mark.vulkan
def test_a_head_that_knows_what_comes_is_always_right(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target whose layers add nothing: a token alone says which is next, and the head reads it by its embedding. What stands for hidden
    rows is left out by a norm of zeros."""
    source = tiny("llama", tmp_path)
    file = GgufFile.open(source)
    adds = [name for name in file.tensors if name.endswith(("attn_output.weight", "ffn_down.weight"))]
    target = changed(source, extra={name: ("F32", np.zeros(file.tensors[name].shape, np.float32)) for name in adds})
    n = int(file.metadata["llama.embedding_length"])
    made: dict[str, np.ndarray | None] = {
        **for_itself(32, n),
        "blk.0.attn_norm.weight": np.ones(n, np.float32),
        "blk.0.attn_norm_2.weight": np.zeros(n, np.float32),
        "blk.0.attn_v.weight": np.concatenate([np.eye(n), np.zeros((n, n))], axis=1).astype(np.float32),
        "blk.0.attn_output.weight": np.eye(n, dtype=np.float32),
        "blk.0.ffn_down.weight": np.zeros((n, 160), np.float32),
        "output_norm.weight": file.tensors["output_norm.weight"].data.reshape(-1).view(np.float32),
    }
    made["output.weight"] = None
    head = write_head(tmp_path / "head.gguf", target, heads=(3, 3, 32), made=made, metadata={"norm_before_residual": True})
    with opened(target, head, device) as engine:
        text = text_of(engine, Sampler(), Drafts(pinned=4, known=(-1,)))
        assert text_of(engine, Sampler(), Drafts(3, pinned=4, model=True)) == text
        counts = engine.draft_counts
        assert counts.accepted == counts.drafted and counts.steps == -(-len(text) // 4)
        submits = 0

        def counted(commands: Commands) -> Ticket:
            nonlocal submits
            submits += 1
            return submit(commands)

        submit = device.submit
        with monkeypatch.context() as patch:
            patch.setattr(device, "submit", counted)
            longer = text_of(engine, Sampler(), Drafts(3, pinned=4, model=True), n=64)
        assert longer[: len(text)] == text and submits < engine.draft_counts.steps / 2, "several steps a submit"
    with vkback.load(target, device.index, N_CTX, act="f32", model_draft=head, draft_max=2) as model:
        result = model.generate(list(PROMPT), max_tokens=40, temperature=0.0)
        assert result.timings.draft_accepted == result.timings.draft_tokens > 0


def unit_rms(x: Floats) -> Floats:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS))


def least_squares(x: Floats, y: Floats) -> Floats:
    """W of y = x W, kept small."""
    return np.asarray(np.linalg.solve(x.T @ x + np.eye(x.shape[1]), x.T @ y))


def fitted_head(folder: Path, target: Path, layers: tuple[int, ...], chunks: list[list[int]], device: Device) -> Path:
    """A head that is fitted to a target's texts by least squares: rows g to hidden rows (of which logits tell all but the length), and what
    an entry adds of itself alone, which is linear in embedding and g, to the next hidden row. Where fc changes nothing, rows g are the
    layers' inputs. Q and K are fitted to be the same for all tokens, by which an entry attends to itself alone: llama.cpp's heads have no
    biases."""
    file, table = GgufFile.open(target), table_of(target)
    (vocab, n), wide = table.shape, 3 * table.shape[1]
    zeros = {"token_embd.weight": np.zeros((vocab, wide), np.float32), "output.weight": np.zeros((32, wide), np.float32)}
    probe = write_head(
        folder / "probe.gguf",
        target,
        layers=layers,
        n_embd=wide,
        ids=np.arange(32, dtype=np.int64),
        made={**zeros, "fc.weight": np.eye(wide, dtype=np.float32)},
    )
    inputs, hidden = [], []
    w = file.tensors.get("output.weight", file.tensors["token_embd.weight"])
    out = quants.decode(w.type, np.asarray(w.data)).reshape(w.shape).astype(np.float64)
    out = out * file.tensors["output_norm.weight"].data.reshape(-1).view(np.float32)
    with Engine.open(target, device, LoadOptions(ctx=256, act="f32", spec_type="draft-eagle3", model_draft=probe)) as engine:
        for chunk in chunks:
            engine.reset()
            hidden.append(engine.prompt_logits(chunk) @ np.linalg.pinv(out).T)
            inputs.append(np.asarray(engine.snapshot().arrays[HIDDEN], np.float64)[0, : len(chunk)])
    fc = least_squares(np.concatenate(inputs), np.concatenate(hidden))
    rows = [x @ fc for x in inputs]
    read = [np.concatenate([unit_rms(table[c[1:]]), unit_rms(g[:-1])], axis=1) for c, g in zip(chunks, rows, strict=True)]
    x = np.concatenate(read)
    adds = least_squares(x, np.concatenate([h[1:] - g[:-1] for h, g in zip(hidden, rows, strict=True)]))
    alike = least_squares(x, np.full((len(x), 1), ALIKE / np.sqrt(64))).T.repeat(n, axis=0).astype(np.float32)
    ones = {f"blk.0.{stem}.weight": np.ones(n, np.float32) for stem in ("attn_norm", "attn_norm_2")}
    made: dict[str, np.ndarray | None] = {**ones, "output_norm.weight": np.ones(n, np.float32)}
    made |= {"blk.0.attn_q.weight": alike, "blk.0.attn_k.weight": alike}
    made |= {"fc.weight": fc.T.astype(np.float32), "blk.0.attn_v.weight": adds.T.astype(np.float32)}
    made |= {"blk.0.attn_output.weight": np.eye(n, dtype=np.float32), "blk.0.ffn_down.weight": np.zeros((n, 160), np.float32)}
    return write_head(
        folder / "fitted.gguf", target, layers=layers, heads=(n // 64, n // 64, 64), made={**made, "output.weight": out.astype(np.float32)}
    )


@pytest.mark.vulkan
def test_a_fitted_head_is_right_more_often_than_chance(tmp_path: Path, device: Device) -> None:
    """The built-in model, and a head fitted to what it writes and two pages of a book. To draft the commonest token of the text again and
    again would be chance."""
    target = builtin_model("demo-dense")
    ids = Model.open(target).tokenizer.encode((DATA / "war_of_the_worlds.txt").read_text(encoding="utf-8"))
    prompt, n = ids[4000:4064], 96
    with vkback.load(target, device.index, 512, act="f32", spec_pinned=4) as model:
        text = model.generate(prompt, max_tokens=n, temperature=0.0, draft_max=0).tokens
    head = fitted_head(tmp_path, target, (2, 3, 5), [ids[:256], ids[256:512], [*prompt, *text]], device)
    with vkback.load(target, device.index, 512, act="f32", model_draft=head, spec_pinned=4) as model:
        assert model.generate(prompt, max_tokens=n, temperature=0.0).tokens == text
        (drafted, right), *behind = model.engine.draft_counts.by_place
        assert model.generate(prompt, max_tokens=n, temperature=0.0, draft_max=0).tokens == text, "pinned steps without drafts"
        assert model.engine.draft_counts.drafted == 0
    assert right / drafted > 2 * max(map(text.count, text)) / n
    assert sum(accepted for _, accepted in behind) > 0, "what stands for hidden rows is of use"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "n_embd": ({"metadata": {"target_hidden_size": 128}}, "the head is for a target of n_embd 128, llama.gguf has 96"),
    "vocabulary": (
        {"metadata": {"vocab_size": 330}, "made": {"output.weight": np.zeros((330, 96), np.float32)}},
        "the head is for a vocabulary of 330, llama.gguf has 331",
    ),
    "layers": ({"layers": (0, 1, 3)}, "the head is for layers 0, 1, 3 of its target, llama.gguf has 3"),
    "two layers": ({"layers": (0, 1)}, "target_layers is .0 1.; expected 3 layers of its target"),
    "blocks": ({"metadata": {"block_count": 2}}, "eagle3.block_count is 2; expected 1"),
    "missing": (
        {"made": {"blk.0.attn_norm_2.weight": None}},
        "tensor blk.0.attn_norm_2.weight is missing; an EAGLE-3 head needs fc.weight",
    ),
    "norm": ({"metadata": {"norm_before_fc": True}}, "tensor enc.output_norm.weight is missing"),
    "shape": (
        {"made": {"fc.weight": np.zeros((96, 96), np.float32)}},
        r"tensor fc.weight has shape .96, 96.; expected .96, 288. by its metadata and target",
    ),
    "more": (
        {"made": {"blk.0.attn_sinks.weight": np.zeros(3, np.float32)}},
        "tensor blk.0.attn_sinks.weight has no place in an EAGLE-3 head",
    ),
    "ids": ({"ids": np.arange(240, 340, dtype=np.int64)}, "tensor d2t has ids from 240 to 339; expected those of its target, 0 to 330"),
    "ids without output": (
        {"ids": IDS, "made": {"output.weight": None}},
        "tensor output.weight is missing; with d2t the head needs its own",
    ),
    "width": (
        {"n_embd": 64},
        "tensor token_embd.weight is missing: the head's n_embd is 64, so that it cannot use that of llama.gguf, of 96",
    ),
    "key": ({"metadata": {"rope.scaling.new": 2}}, "metadata that eagle3 does not know"),
    "architecture": ({"arch": "llama"}, "architecture 'llama'; expected eagle3 for draft-eagle3. Another model drafts with draft-simple"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_head_that_does_not_fit_is_refused(wrong: str, tmp_path: Path) -> None:
    target, (how, told) = tiny("llama", tmp_path), WRONG[wrong]
    with pytest.raises(GgufError, match=told):
        with_head(Model.open(target), write_head(tmp_path / "head.gguf", target, **how))


def test_what_a_head_needs_is_said(tmp_path: Path) -> None:
    target = tiny("llama", tmp_path)
    head = write_head(tmp_path / "head.gguf", target)
    with pytest.raises(GgufError, match=r"'eagle3' is an EAGLE-3 head, no model of its own; give it beside .*: -m MODEL -md HEAD"):
        Model.open(head)
    with pytest.raises(GgufError, match="makes no text, so there is nothing to draft"):
        with_head(Model.open(tiny("bert", tmp_path)), head)
    with pytest.raises(OptionError, match=r"spec_type is 'draft-eagle3' .str., expected draft-simple or draft-eagle3 with model_draft"):
        LoadOptions(spec_type="draft-eagle3")
    with pytest.raises(OptionError, match="expected draft-simple or draft-eagle3 with model_draft, and only then"):
        LoadOptions(spec_type="draft-mtp", model_draft=head)
    assert LoadOptions(model_draft=head).drafts(software=True) == Drafts(3, model=True)


@pytest.mark.vulkan
def test_a_head_needs_all_layers_on_one_device(tmp_path: Path, device: Device) -> None:
    target = tiny("llama", tmp_path)
    options = LoadOptions(ctx=N_CTX, spec_type="draft-eagle3", model_draft=write_head(tmp_path / "head.gguf", target))
    with pytest.raises(SplitError, match="an EAGLE-3 head needs all layers on one device, 2 are given"):
        Engine.open(target, [device, device], options)


@pytest.mark.parametrize("arch", [name.removeprefix("tiny-") for name in TINY])
def test_a_model_of_any_architecture_may_have_a_head(arch: str, tmp_path: Path) -> None:
    """The model's own part of the graph is as without."""
    target = tiny(arch, tmp_path)
    model = Model.open(target)
    layers = [min(il, model.hp.n_layer - 1) for il in range(3)]
    beside = with_head(model, write_head(tmp_path / "head.gguf", target, layers=layers))
    plain, kept = model.graph(4, N_CTX, head="all").nodes, beside.graph(4, N_CTX, head="all", with_head=True)
    assert [node for node in kept.nodes if node in plain] == plain
    states = {t for t in beside.head_graph(N_CTX).tensors().values() if t.kind == "state"}
    assert len(states) == 3 and states <= set(kept.tensors().values())


def test_a_synthetic_head_fits_its_model(tmp_path: Path) -> None:
    synthesize("tiny-llama-eagle3-Q8_0", tmp_path / "head.gguf")
    model = Model.open(tiny("llama", tmp_path))
    beside = with_head(model, tmp_path / "head.gguf")
    assert beside.file.size_bytes == model.file.size_bytes, "the model's own"
    assert beside.architecture.head is not None and beside.architecture.head.layers == (2, 1, 0)
    assert model.architecture.head is None
    assert "llama-8b-eagle3-Q4_K_S" in head_names() and "mixtral-8x7b-eagle3-Q4_K_S" not in head_names()
    by_name = {t.name: t.shape for t in planned_tensors("llama-8b-eagle3-Q4_K_S")}
    assert by_name["fc.weight"] == (4096, 3 * 4096) and by_name["blk.0.attn_k.weight"] == (1024, 2 * 4096) and by_name["d2t"] == (32000,)
