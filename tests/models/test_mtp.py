"""The MTP block of a file as a drafter: what it keeps of a text, what it drafts, and that it changes none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from drafter_kit import N_CTX, PROMPT, SAMPLERS, check_rows, check_texts, text_of
from tiny_models import changed, tiny, with_mtp_block

import vkback
from vkback.checks import OptionError
from vkback.device import Device
from vkback.engine.drafts import DraftError, Drafts
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler
from vkback.gguf.file import GgufFile
from vkback.models.registry import Model

LIKE = {"qwen35": 1, "qwen35moe": 1, "qwen3next": 1, "glm4moe": 2}
"""A block with attention of each architecture."""


def opened(path: Path, device: Device, pinned: int = 4) -> Engine:
    return Engine.open(path, device, LoadOptions(ctx=N_CTX, act="f32", spec_type="draft-mtp", spec_pinned=pinned))


@pytest.mark.vulkan
@pytest.mark.parametrize("arch", [a if a in ("qwen35", "glm4moe") else pytest.param(a, marks=pytest.mark.exhaustive) for a in LIKE])
def test_an_mtp_block_changes_no_text_and_keeps_its_rows(arch: str, tmp_path: Path, device: Device) -> None:
    path = with_mtp_block(tiny(arch, tmp_path), like=LIKE[arch])
    block = Model.open(path).hp.n_layer
    with opened(path, device) as engine:
        text = check_texts(engine, {**SAMPLERS, "bias": Sampler(logit_bias=((7, 2.0), (9, -np.inf)))})
        check_rows(engine, text, block)


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
        text = text_of(engine, Sampler(), Drafts(pinned=4, known=(-1,)))
        assert text_of(engine, Sampler(), Drafts(3, pinned=4, model=True)) == text
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
