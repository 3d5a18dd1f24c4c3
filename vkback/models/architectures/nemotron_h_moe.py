"""The `nemotron_h_moe` architecture: Nemotron 3 Nano and Super.

As nemotron_h, but a feed-forward is a mixture of experts with squared ReLU and without a gate, beside one expert that works on every token.
The router is a sigmoid of each logit with a bias for the choice. Where `moe_latent_size` is above 0, experts read and make vectors of that
width, with a matrix before and behind them.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.models.architecture import register
from vkback.models.architectures.nemotron_h import SQUARED_RELU, TINY, NemotronH, layers_of
from vkback.models.blocks import routed
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.mamba import SSM
from vkback.models.shape import ModelShape, Tensors

SHARED, LATENT = "expert_shared_feed_forward_length", "moe_latent_size"
PUBLISHED: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 8, "expert_gating_func": 2}
NANO_30B = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


@register
class NemotronHMoe(NemotronH):
    name = "nemotron_h_moe"
    keys = SSM | EXPERTS | {SHARED, LATENT}
    settled: ClassVar = {"expert_gating_func": 2, "expert_shared_count": 1}
    sizes: ClassVar = {52: "31B.A3.5B"}
    shapes: ClassVar = {
        "nemotron-3-nano-30b": ModelShape(
            "nemotron_h_moe",
            52,
            2688,
            1856,
            32,
            2,
            128,
            131072,
            262144,
            10000.0,
            n_expert=128,
            n_expert_used=6,
            n_ff_expert=1856,
            layers=tuple(layers_of(NANO_30B, 32, 2, 1856)),
            metadata={
                **PUBLISHED,
                "ssm.inner_size": 4096,
                "ssm.time_step_rank": 64,
                SHARED: 3712,
                "expert_weights_norm": True,
                "expert_weights_scale": 2.5,
            },
        ),
        "tiny-nemotron_h_moe": ModelShape(
            "nemotron_h_moe",
            5,
            96,
            64,
            4,
            2,
            24,
            331,
            256,
            10000.0,
            n_expert=6,
            n_expert_used=2,
            n_ff_expert=64,
            layers=tuple(layers_of("ME*ME", 4, 2, 64)),
            metadata={**TINY, "expert_gating_func": 2, SHARED: 96, "expert_weights_norm": True, "expert_weights_scale": 2.5},
        ),
        "tiny-nemotron_h_moe-latent": ModelShape(
            "nemotron_h_moe",
            4,
            96,
            64,
            4,
            2,
            24,
            331,
            256,
            10000.0,
            n_expert=6,
            n_expert_used=3,
            n_ff_expert=64,
            layers=tuple(layers_of("EM*E", 4, 2, 64)),
            metadata={**TINY, "expert_gating_func": 2, SHARED: 96, LATENT: 32, "expert_weights_norm": True, "expert_weights_scale": 2.5},
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.n_ff_shared = self.metadata.count(SHARED, 0, least=0)
        self.n_latent = self.metadata.count(LATENT, 0, least=0)

    def feed(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        if not self.hp.n_expert or self.hp.has_weight(f"blk.{il}.ffn_up.weight"):
            return super().feed(b, x, il)
        y = self._experts(b, x, il)
        if not self.n_ff_shared:
            return y
        return b.add(self._shared(b, x, il), y, f"ffn_shared-{il}")

    def _experts(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        hp, g, n, block = self.hp, b.graph, x.shape[0], f"blk.{il}"
        logits = b.linear(x, f"{block}.ffn_gate_inp", hp.n_expert, f"ffn_moe_logits-{il}")
        weights = Tensor(f"ffn_moe_weights-{il}", "F32", (n, hp.n_expert_used))
        ids = Tensor(f"ffn_moe_topk-{il}", "I32", (n, hp.n_expert_used))
        bias = hp.weight(f"{block}.exp_probs_b.bias", (hp.n_expert,))
        g.add("TOPK_MOE", (logits, bias), (weights, ids), n_used=hp.n_expert_used, norm=hp.norm_w, gating="sigmoid", scale=hp.expert_scale)
        width = self.n_latent or hp.n_embd
        if self.n_latent:
            x = b.linear(x, f"{block}.ffn_latent_down", width, f"ffn_latent_down-{il}")
        y = routed(b, b.view(x, (n, 1, width)), ids, f"{block}.ffn_up_exps", hp.n_ff_expert, f"ffn_moe_up-{il}")
        for op in SQUARED_RELU:
            y = g.emit(op, f"ffn_moe_{op.lower()}-{il}", "F32", y.shape, (y,))
        y = routed(b, y, ids, f"{block}.ffn_down_exps", width, f"ffn_moe_down-{il}")
        y = g.emit("MOE_REDUCE", f"ffn_moe_out-{il}", "F32", (n, width), (y, weights))
        return b.linear(y, f"{block}.ffn_latent_up", hp.n_embd, f"ffn_latent_up-{il}") if self.n_latent else y

    def _shared(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        y = b.linear(x, f"blk.{il}.ffn_up_shexp", self.n_ff_shared, f"ffn_shexp_up-{il}")
        for op in SQUARED_RELU:
            y = b.graph.emit(op, f"ffn_shexp_{op.lower()}-{il}", "F32", y.shape, (y,))
        return b.linear(y, f"blk.{il}.ffn_down_shexp", self.hp.n_embd, f"ffn_shexp-{il}")

    @classmethod
    def feed_tensors(cls, s: ModelShape) -> Tensors:
        width, shared = int(s.metadata.get(LATENT, s.n_embd)), int(s.metadata[SHARED])
        yield "ffn_gate_inp.weight", (s.n_expert, s.n_embd)
        yield "exp_probs_b.bias", (s.n_expert,)
        yield "ffn_down_exps.weight", (s.n_expert, width, s.n_ff_expert)
        yield "ffn_up_exps.weight", (s.n_expert, s.n_ff_expert, width)
        yield "ffn_down_shexp.weight", (s.n_embd, shared)
        yield "ffn_up_shexp.weight", (shared, s.n_embd)
        if LATENT in s.metadata:
            yield "ffn_latent_down.weight", (width, s.n_embd)
            yield "ffn_latent_up.weight", (s.n_embd, width)
