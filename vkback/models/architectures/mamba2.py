"""The `mamba2` architecture: Mamba-2 130M to 2.7B, Codestral Mamba.

Every layer is an RMS norm and a Mamba-2 block (vkback/models/mamba.py), added to the residual stream: neither attention nor feed-forward.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.architecture import Architecture, register
from vkback.models.blocks import attention_norm
from vkback.models.builder import GraphBuilder
from vkback.models.mamba import SSM, mamba2, recurrence, recurrence_tensors
from vkback.models.shape import ModelShape, Tensors
from vkback.units import UNKNOWN_SIZE

SIZES = {(24, 768): "0.1B", (48, 1024): "0.4B", (48, 1536): "0.8B", (48, 2048): "1.5B", (64, 2560): "3B", (64, 4096): "7B"}
"""By layers and width."""

PUBLISHED: dict[str, Any] = {"ssm.conv_kernel": 4, "ssm.group_count": 1, "ssm.state_size": 128}


@register
class Mamba2Model(Architecture):
    name = "mamba2"
    recurrent = True
    attends = False
    vocabulary = "olmo"
    keys = SSM
    shapes: ClassVar = {
        "mamba2-130m": ModelShape(
            "mamba2",
            24,
            768,
            0,
            0,
            0,
            0,
            50288,
            1048576,
            10000.0,
            tied=True,
            metadata={**PUBLISHED, "ssm.inner_size": 1536, "ssm.time_step_rank": 24},
        ),
        "tiny-mamba2": ModelShape(
            "mamba2",
            4,
            96,
            0,
            0,
            0,
            0,
            331,
            256,
            10000.0,
            tied=True,
            metadata={"ssm.conv_kernel": 4, "ssm.inner_size": 192, "ssm.time_step_rank": 12, "ssm.state_size": 20, "ssm.group_count": 2},
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        self.ssm = mamba2(self.metadata)

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        y = recurrence(b, attention_norm(b, x, il), il, self.ssm, eps=self.hp.rms_eps)
        return b.last_token(b.add(y, x, f"l_out-{il}"), il, "l_out_last")

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        return SIZES.get((metadata.stated("block_count"), metadata.stated("embedding_length")), UNKNOWN_SIZE)

    @classmethod
    def layer_tensors(cls, s: ModelShape) -> Tensors:
        yield from recurrence_tensors(s)
