"""What a lowering may depend on, and the error of a node that cannot be lowered.

Lowering is pure: the `Dispatch` values that it turns a node into depend on the node and its `LowerContext` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vkback.device import Capabilities
from vkback.errors import VkbackError
from vkback.graph import Tensor
from vkback.ops.family import Chooser

Act = Literal["auto", "f32", "f16", "q8_1"]
"""How activations enter GEMVs: as the tables say, as floats, or rounded to Q8_1."""
ACTS: tuple[Act, ...] = ("auto", "f32", "q8_1")
"""Those that a model may be loaded with, and an op run; f16 is for training alone."""
Sync = Literal["barrier", "sentinel"]
"""What orders the stages of a token: pipeline barriers, or spin-waits on a sentinel value (vkback/plan/sync.py)."""


class PlanError(VkbackError):
    """A node that cannot be lowered for this device, with the node, the limit and the way out."""


@dataclass(frozen=True)
class LowerContext:
    """All that a lowering may depend on.

    act  "auto": tables choose between float and integer-dot path; "f32": float path only; "q8_1": integer dot wherever a kernel has it;
         "f16", of training: as f32, but where the device has cooperative matrices of f16, these multiply by stored weights other than F32,
         forward and backward, and every row of activations or gradients is packed times a power of two of its own
    sync "sentinel": stages run barrier-free where they can
    fragments  the driver distributes a cooperative matrix over lanes alike in all kernels (vkback/program/fragments.py checks it)
    row_lanes  neighbouring lanes that share a row of a cooperative matrix, in the order of shaders/gemm/matrix.glsl (checked too);
               0: in no such order; None: not checked, what is known of the driver counts
    f16_scales  what activations are multiplied by when they are packed as f16, by name of the F16 tensor; 1 for the others
               (vkback/ops/f16_range.py)
    beyond_f16  names of weights that f16 cannot hold: no kernel that makes f16 of weights takes them
    coarse      names of weights whose quantization step is too large for kernels that decode by way of subnormal f16
    host_layers, expert_slots  experts of so many layers, from the first on, lie in memory of the host, and so many of each layer in a
               cache on the device (vkback/plan/passes/experts.py); 0 slots: there is none
    exact  a token's values have the same bits however many tokens go through at once (vkback/plan/exact.py)
    flash  False: attention is nodes of its own, kq, kq_soft_max and kqv (vkback/ops/attention/unfused.py)
    """

    caps: Capabilities
    tuning: Chooser
    act: Act = "auto"
    sync: Sync = "barrier"
    fragments: bool = True
    row_lanes: int | None = None
    f16_scales: Mapping[str, float] = field(default_factory=dict)
    beyond_f16: frozenset[str] = frozenset()
    coarse: frozenset[str] = frozenset()
    exact: bool = False
    flash: bool = True
    host_layers: int = 0
    expert_slots: int = 0

    def f16_scale(self, packed: Tensor) -> float:
        """What the values of an F16 tensor are multiplied by."""
        return self.f16_scales.get(packed.name, 1.0)
