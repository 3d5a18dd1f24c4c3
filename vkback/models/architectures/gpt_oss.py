"""The `gpt-oss` architecture: OpenAI's gpt-oss 20B and 120B.

As llama, but RoPE pairs value i with value i + n_dims/2, every head has an attention sink, every other layer (the first, the third, ...)
sees a sliding window alone, where RoPE may have another base under the same YaRN, and every feed-forward layer is a mixture of experts,
whose router weighs the chosen ones by a softmax over them. Linear layers have biases, the router and the experts too. The experts' gated
unit is a clamped one (SWIGLU_OAI).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import Glu, attention, attention_norm, experts, rms_norm
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.shape import ModelShape, Tensors, attention_tensors, expert_tensors, with_biases
from vkback.ops.glu import SWIGLU_OAI

CLAMPED = Glu("SWIGLU_OAI", SWIGLU_OAI)
PERIOD = 2
"""One layer of so many, the last of them, sees all tokens, unless `attention.sliding_window_pattern` says otherwise."""


@register
class GptOss(Architecture):
    name = "gpt-oss"
    rope_mode = "neox"
    vocabulary = "gpt-4o"
    keys = EXPERTS | {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}
    settled: ClassVar = {"expert_gating_func": 3}
    biases = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    required = ("expert_count", "attention.sliding_window")
    sizes: ClassVar = {24: "20B", 36: "120B"}
    shapes: ClassVar = {
        "gpt-oss-20b": ModelShape(
            "gpt-oss",
            24,
            2880,
            2880,
            64,
            8,
            64,
            201088,
            131072,
            150000.0,
            n_expert=32,
            n_expert_used=4,
            n_ff_expert=2880,
            window=128,
            yarn=32.0,
        ),
        "tiny-gpt-oss": ModelShape(
            "gpt-oss", 3, 96, 96, 4, 2, 40, 331, 128, 150000.0, n_expert=5, n_expert_used=2, n_ff_expert=96, window=8, yarn=32.0
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        hp, m = self.hp, self.metadata
        self.sees_all = m.pattern("attention.sliding_window_pattern", hp.n_layer, PERIOD)
        self.local_rope = replace(hp.rope, freq_base=m.freq_base("rope.freq_base_swa", hp.rope.freq_base))

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        rope, window = (self.hp.rope, 0) if self.sees_all[il] else (self.local_rope, self.hp.window)
        y = attention(b, attention_norm(b, x, il), il, rope=rope, sinks=True, window=window)
        x = b.last_token(b.add(y, x, f"ffn_inp-{il}"), il)
        y = rms_norm(b, x, f"blk.{il}.post_attention_norm", f"attn_post_norm-{il}", plain=f"ffn_rms-{il}")
        return b.add(experts(b, y, il, glu=CLAMPED, gating="softmax_weight"), x, f"l_out-{il}")

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from with_biases(attention_tensors(s))
        yield "attn_sinks.weight", (s.n_head,)
        yield "post_attention_norm.weight", (s.n_embd,)
        yield from with_biases(expert_tensors(s))
