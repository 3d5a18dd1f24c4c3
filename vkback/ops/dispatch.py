"""Launches of kernels as values: what is bound, pushed and waited for, and grids within every device's limits.

A `Dispatch` names tensors, never buffers, so that a schedule can be planned, printed and tested with the capability profile of a GPU that
is not there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from vkback.graph import Tensor
from vkback.ops.family import Adjustment
from vkback.shader import Variant

Access = Literal["r", "w", "rw"]

FEW = 64
"""Tokens up to which kernels of small ops can spin-wait. The products of more have barriers around them."""

MAX_GROUPS_X = 65535
"""Groups along x that every Vulkan device takes (maxComputeWorkGroupCount is at least this); beyond it a grid spills to y or z."""


@dataclass(frozen=True)
class Arg:
    """A tensor bound to a dispatch.

    shard  which shard of a weight that exceeds the device's storage-buffer range
    part   a name for the piece of the tensor this dispatch touches: two parts never overlap, so they are no hazard to each other;
           "" means the whole tensor
    """

    tensor: Tensor
    access: Access = "r"
    shard: int = 0
    part: str = ""


def arg_of(tensor: Tensor | None, access: Access = "r") -> Arg | None:
    """A tensor that some launches of a kernel do not have."""
    return Arg(tensor, access) if tensor is not None else None


@dataclass(frozen=True)
class SpinWaits:
    """What the workgroups of a kernel with shaders/common/sentinel.glsl or shaders/common/arrivals.glsl wait for, by tensor names.

    whole   every workgroup waits for all of it
    part    every workgroup waits for some of it
    shares  every workgroup waits for some of it, all together for all of it
    also    every workgroup waits for all of it where it was made since the last barrier (define SPINS_ON_ALL), else reads it
    also_part  every workgroup waits for some of it where it was made since the last barrier and nothing else says that it is complete
              (define SPINS_ON_PARTS), else reads it
    own     partial results that workgroups of this dispatch wait for from each other
    counted   every workgroup waits until all workgroups of the dispatches that make these have arrived, where they were made since the
              last barrier
    first     the same, ahead of all other waits and by a counter of its own, for what a kernel needs early; of specialized kernels alone
    arrives   of its workgroups so many can count their arrivals, all that store something; 0: it cannot
    specialized  the kernel gets this in specialization constants, not in defines (vkback/plan/sync.py, CONSTANTS), and its shader declares
              the buffers of arrivals, of those expected, and of the state of spin-waits
    """

    whole: tuple[str, ...] = ()
    part: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    also_part: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    arrives: int = 0
    specialized: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """What its workgroups spin on by its words."""
        return (*self.whole, *self.part, *self.shares, *self.own)


class KernelConfig(Protocol):
    """What a kernel is built for, as a typed value of its family (`GemvConfig`)."""

    @property
    def adjustments(self) -> tuple[Adjustment, ...]:
        """Where it differs from what the tables say."""


@dataclass(frozen=True)
class Dispatch:
    """One kernel launch.

    kernel  the variant to compile (source, defines, specialization, subgroup size)
    args    bound to set 0, bindings 0.. in order
    push    push constants, at most 128 bytes
    groups  workgroups along x, y, z
    op      the op or fusion it carries out, `label` the node's name
    waits   what its kernel can spin-wait on (vkback/plan/sync.py); None: the kernel needs barriers around it
    reason  why this variant: the tuning row that won, or what the device lacks
    nbytes  bytes it must move through memory, each operand once; flops: multiply-adds count 2
    weight_bytes  of `nbytes`, those of weight matrices: all rows, of experts those of the experts used, of an embedding the rows looked up
    config  what the kernel was built for, in families that have a typed value of it
    """

    kernel: Variant
    args: tuple[Arg, ...]
    push: bytes
    groups: tuple[int, int, int]
    op: str
    label: str
    reason: str = ""
    nbytes: int = 0
    flops: int = 0
    weight_bytes: int = 0
    waits: SpinWaits | None = None
    config: KernelConfig | None = None

    @cached_property
    def reads(self) -> frozenset[tuple[str, str]]:
        """(tensor name, part) of everything read."""
        return frozenset((a.tensor.name, a.part) for a in self.args if "r" in a.access)

    @cached_property
    def writes(self) -> frozenset[tuple[str, str]]:
        """(tensor name, part) of everything written."""
        return frozenset((a.tensor.name, a.part) for a in self.args if "w" in a.access)


def pack_push(*values: int | float) -> bytes:
    """Push constants: ints as u32 (negative ones as i32), floats as f32."""
    return b"".join(struct.pack("<f", v) if isinstance(v, float) else struct.pack("<I", v & 0xFFFFFFFF) for v in values)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def spread(groups: int) -> tuple[int, int, int]:
    """A one-dimensional grid as (x, y, 1) within MAX_GROUPS_X; the shader computes `y * gl_NumWorkGroups.x + x` and checks the end."""
    if groups <= MAX_GROUPS_X:
        return (max(groups, 1), 1, 1)
    y = ceil_div(groups, MAX_GROUPS_X)
    return (ceil_div(groups, y), y, 1)
