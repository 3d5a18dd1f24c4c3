"""`qwen35moe` by Qwen3_5MoeForCausalLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from references.common import Checkpoint, Logits, State, experts, fill, outer, run
from references.qwen35 import delta_net_config, delta_net_layers, mixer, zero_centered


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = _Experts(path)
    state = zero_centered(outer(f))
    for il, recurs in enumerate(delta_net_layers(f)):
        layer: State = {}
        mixer(f, layer, il, recurs)
        experts_and_shared(f, layer, il)
        state |= zero_centered(layer)
    return run(fill(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**experts_config(f))), f, state), tokens)


class _Experts(Checkpoint):
    """A file without dense layers need not say how wide they are."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, 0 if key == "feed_forward_length" else default)


def experts_config(f: Checkpoint) -> dict[str, Any]:
    """Sizes of experts beside those of a delta net."""
    return delta_net_config(
        f,
        num_experts=f.get("expert_count"),
        num_experts_per_tok=f.get("expert_used_count"),
        moe_intermediate_size=f.get("expert_feed_forward_length"),
        shared_expert_intermediate_size=f.get("expert_shared_feed_forward_length"),
    )


def experts_and_shared(f: Checkpoint, state: State, il: int) -> None:
    """Norm, router, experts, and the shared expert with its gate of one value."""
    experts(f, state, il, norm="post_attention_norm")
    ours, theirs = f"blk.{il}", f"model.layers.{il}.mlp"
    for which in ("gate", "up", "down"):
        f.linear(state, f"{theirs}.shared_expert.{which}_proj", f"{ours}.ffn_{which}_shexp")
    state[f"{theirs}.shared_expert_gate.weight"] = f[f"{ours}.ffn_gate_inp_shexp.weight"].reshape(1, -1)
