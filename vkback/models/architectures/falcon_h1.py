"""The `falcon-h1` architecture: Falcon-H1 0.5B to 34B.

As llama, but a Mamba-2 block (vkback/models/mamba.py) reads the same normed input as attention, beside it, and both are added to the
residual stream. RoPE pairs value i with value i + n_dims/2. The published multipliers are in the weights of a file.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vkback.gguf.file import GgufFile
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import attention, attention_norm, feed_forward, feed_forward_norm
from vkback.models.builder import GraphBuilder
from vkback.models.mamba import SSM, mamba2, recurrence, recurrence_tensors
from vkback.models.shape import ModelShape, Tensors, attention_tensors, feed_forward_tensors

PUBLISHED: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.group_count": 1, "ssm.state_size": 128}
TINY: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.time_step_rank": 8, "ssm.state_size": 20, "ssm.group_count": 1}


@register
class FalconH1(Architecture):
    name = "falcon-h1"
    rope_mode = "neox"
    recurrent = True
    keys = SSM
    sizes: ClassVar = {24: "1.5B", 32: "3B", 36: "0.5B", 44: "7B", 66: "1B", 72: "34B"}
    shapes: ClassVar = {
        "falcon-h1-0.5b": ModelShape(
            "falcon-h1",
            36,
            1024,
            2048,
            8,
            2,
            64,
            32784,
            16384,
            100000000000.0,
            metadata={**PUBLISHED, "ssm.inner_size": 1536, "ssm.time_step_rank": 24},
        ),
        "tiny-falcon-h1": ModelShape("falcon-h1", 3, 96, 160, 3, 1, 32, 331, 256, 100000000000.0, tied=True, metadata=TINY),
        "tiny-falcon-h1-normed": ModelShape(
            "falcon-h1", 3, 96, 160, 4, 2, 24, 331, 256, 100000000000.0, metadata={**TINY, "ssm.group_count": 2}
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.ssm = mamba2(self.metadata)

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        normed = attention_norm(b, x, il)
        by_groups = self.hp.has_weight("blk.0.ssm_norm.weight")
        y = recurrence(b, normed, il, self.ssm, eps=self.hp.rms_eps, normed=by_groups)
        x = b.add(y, x, f"ssm_residual-{il}")
        x = b.last_token(b.add(attention(b, normed, il, rope=self.hp.rope), x, f"ffn_inp-{il}"), il)
        return b.add(feed_forward(b, feed_forward_norm(b, x, il), il), x, f"l_out-{il}")

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from recurrence_tensors(s, normed=s.metadata["ssm.group_count"] > 1)
        yield from (t for t in attention_tensors(s) if t[0] != "attn_norm.weight")
        yield "ffn_norm.weight", (s.n_embd,)
        yield from feed_forward_tensors(s)
