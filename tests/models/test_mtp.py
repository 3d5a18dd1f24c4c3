"""The MTP block of a file as a drafter: what it keeps of a text, what it drafts, and that it changes none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tiny_models import changed, tiny, with_mtp_block

import vkback
from vkback.checks import OptionError
from vkback.device import Device
from vkback.engine.drafts import DraftError, Drafts
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler
from vkback.gguf.file import GgufFile
from vkback.models.mtp import HIDDEN
from vkback.models.registry import Model

N_CTX = 96
PROMPT = (5, 6, 7, 5, 6, 8, 5, 6, 7)

SAMPLERS = {
    "greedy": Sampler(),
    "temperature": Sampler(temp=0.8, top_k=20, seed=3),
    "penalties": Sampler(temp=0.7, repeat_penalty=1.2, penalty_last_n=-1, seed=5),
    "bias": Sampler(logit_bias=((7, 2.0), (9, -np.inf))),
}

LIKE = {"qwen35": 1, "qwen35moe": 1, "qwen3next": 1, "glm4moe": 2}
"""A block with attention of each architecture."""


def made(engine: Engine, sampler: Sampler, drafts: Drafts | None, n: int = 30, prompt: Sequence[int] = PROMPT) -> list[int]:
    engine.reset()
    engine.prompt(prompt[:-1])
    return list(engine.generate(prompt[-1], n, sampler=sampler, stop_at_eos=False, drafts=drafts))


def opened(path: Path, device: Device, pinned: int = 4) -> Engine:
    return Engine.open(path, device, LoadOptions(ctx=N_CTX, act="f32", spec_type="draft-mtp", spec_pinned=pinned))


def kept(engine: Engine, block: int) -> dict[str, np.ndarray]:
    """What the block has of the text so far: hidden rows, K and V."""
    arrays = engine.snapshot().arrays
    return {name: np.asarray(arrays[name], np.float64) for name in (HIDDEN, f"cache_k_l{block}", f"cache_v_l{block}")}


@pytest.mark.vulkan
@pytest.mark.parametrize("arch", [a if a in ("qwen35", "glm4moe") else pytest.param(a, marks=pytest.mark.exhaustive) for a in LIKE])
def test_an_mtp_block_changes_no_text_and_keeps_its_rows(arch: str, tmp_path: Path, device: Device) -> None:
    path = with_mtp_block(tiny(arch, tmp_path), like=LIKE[arch])
    block = Model.open(path).hp.n_layer
    with opened(path, device) as engine:
        for name, sampler in SAMPLERS.items():
            text = made(engine, sampler, Drafts(pinned=4, known=(-1,)))
            assert made(engine, sampler, Drafts(3, pinned=4, model=True)) == text, name
            counts = engine.draft_counts
            assert counts.drafted >= 3 * (counts.steps - 2), "three a step"
            wrong = tuple((t + 1) % engine.model.hp.n_vocab for t in (*PROMPT, *text))
            assert made(engine, sampler, Drafts(pinned=4, known=wrong)) == text, name
        found = kept(engine, block)
        rows = engine.n_past
        engine.reset()
        engine.prompt([*PROMPT, *text][:rows])
        read = kept(engine, block)
        for key, values in read.items():
            same = values[:, : rows - (key != HIDDEN)]  # the last entry of the block is that of the last token
            here = found[key][:, : same.shape[1]]
            assert np.square(same - here).sum() < 1e-5 * np.square(same).sum(), key


@pytest.mark.vulkan
def test_a_block_that_knows_what_comes_is_always_right(tmp_path: Path, device: Device) -> None:
    """A model whose layers add nothing: a token alone says which is next, and the block reads it by its embedding."""
    source = tiny("qwen35", tmp_path)
    file = GgufFile.open(source)
    adds = [name for name in file.tensors if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight"))]
    source = changed(source, extra={name: ("F32", np.zeros(file.tensors[name].shape, np.float32)) for name in adds})
    n_embd = int(file.metadata["qwen35.embedding_length"])
    half = np.concatenate([np.eye(n_embd), np.zeros((n_embd, n_embd))], axis=1).astype(np.float32)
    norm = file.tensors["output_norm.weight"].data.reshape(-1).view(np.float32)
    path = with_mtp_block(source, like=1, eh_proj=half, enorm=np.ones(n_embd, np.float32), shared_head_norm=norm)
    with opened(path, device) as engine:
        text = made(engine, Sampler(), Drafts(pinned=4, known=(-1,)))
        assert made(engine, Sampler(), Drafts(3, pinned=4, model=True)) == text
        counts = engine.draft_counts
        assert counts.accepted == counts.drafted and counts.steps == -(-len(text) // 4)
    with vkback.load(path, device.index, N_CTX, act="f32", spec_type="draft-mtp", draft_max=2) as model:
        result = model.generate(list(PROMPT), max_tokens=40, temperature=0.0)
        assert result.timings.draft_accepted == result.timings.draft_tokens > 0


@pytest.mark.vulkan
def test_what_an_mtp_block_needs_is_said(tmp_path: Path, device: Device) -> None:
    path = tiny("qwen35", tmp_path)
    with pytest.raises(
        DraftError, match=r"qwen35 without a block of nextn tensors; expected a file with one for draft-mtp, or ngram-simple"
    ):
        opened(path, device)
    with pytest.raises(OptionError, match="expected one of none, ngram-simple, draft-simple, draft-eagle3, draft-mtp"):
        LoadOptions(spec_type="draft-dflash")
