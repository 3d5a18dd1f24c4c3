"""The deci architecture: layers of their own shapes. tests/models/test_references.py compares its logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_paths import planned_for
from tiny_models import changed, tiny

from vkback.engine.sampler import add_sampler
from vkback.models import GgufError, Model
from vkback.plan.planner import plan


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("deci", tmp_path_factory.mktemp("deci"))


def test_layers_have_what_the_file_says(path: Path) -> None:
    graph = Model.open(path).graph(3, 32, head="last")
    names = {n.name for n in graph.nodes}
    found = [{part for part in ("kqv_out", "attn_out", "ffn_out") if f"{part}-{il}" in names} for il in range(8)]
    attention, feed_forward = {"kqv_out", "attn_out"}, {"ffn_out"}
    assert found == [
        attention | feed_forward,
        feed_forward,
        {"attn_out", "ffn_out"},
        attention,
        set(),
        attention | feed_forward,
        {"attn_out"},
        feed_forward,
    ]
    tensors = graph.tensors()
    assert {name: t.shape for name, t in tensors.items() if name.startswith("cache_k")} == {
        "cache_k_l0": (2, 32, 24),
        "cache_k_l3": (4, 32, 24),
        "cache_k_l5": (1, 32, 24),
    }
    # The row of the last token is taken where the last layer begins, for that has no attention.
    assert [t.name for n in graph.nodes if n.name == "ffn_inp_last-7" for t in n.inputs] == ["ffn_inp-6", "out_ids"]


def test_files_that_contradict_themselves_are_refused(path: Path) -> None:
    def kv(*heads: int) -> Path:
        return changed(path, metadata={"attention.head_count_kv": list(heads)})

    with pytest.raises(GgufError, match=r"deci\.attention\.head_count_kv is 3 for layer 0, expected 0 or a divisor of its 4 heads"):
        Model.open(kv(3, 0, 0, 4, 0, 1, 0, 0))
    with pytest.raises(GgufError, match=r"deci\.attention\.head_count_kv is 1 for layer 1, expected 0 or a divisor of its 0 heads"):
        Model.open(kv(2, 1, 0, 4, 0, 1, 0, 0))
    with pytest.raises(GgufError, match=r"deci\.attention\.head_count_kv is 2 values"):
        Model.open(kv(2, 4))
    with pytest.raises(GgufError, match=r"tensor blk\.1\.attn_norm\.weight is missing"):
        Model.open(changed(path, metadata={"attention.head_count": [4] * 8}))
    with pytest.raises(GgufError, match=r"tensor blk\.0\.ffn_gate\.weight has shape \[160, 96\], the hyperparameters say \[96, 96\]"):
        Model.open(changed(path, metadata={"feed_forward_length": [96, 96, 224, 0, 0, 64, 0, 32]}))
    with pytest.raises(GgufError, match=r"tensor blk\.7\.ffn_norm\.weight has no place"):
        Model.open(changed(path, metadata={"feed_forward_length": [160, 96, 224, 0, 0, 64, 0, 0]}))


def test_a_token_takes_five_stages_a_layer_and_two_without_attention(models: Callable[[str], Model]) -> None:
    model = models("deci-49b-Q4_K_S")
    graph = model.graph(1, 4096, head="last")
    add_sampler(graph, greedy=True)
    s = plan(graph, planned_for("nvidia_h200_linux"))
    with_attention = sum(d.op == "ATTN_DECODE" for d in s.dispatches())
    assert (model.hp.n_layer, with_attention) == (80, 49)
    assert len(s.stages) == 1 + 5 * 49 + 2 * 31 + 2
    assert model.description == "deci 70B Q4_K - Small"
