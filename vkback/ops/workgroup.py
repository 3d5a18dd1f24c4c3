"""Workgroup sizes and the use of subgroups that a device allows."""

from __future__ import annotations

from vkback.device import Capabilities

Defines = dict[str, str | int]


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (and at least 1)."""
    return 1 << max(n - 1, 0).bit_length()


def workgroup_size(caps: Capabilities, wanted: int, work: int | None = None) -> int:
    """A power of two of threads: at most `wanted`, what the device allows, and what `work` items can occupy."""
    size = min(power_of_two(wanted), caps.max_workgroup_invocations, caps.max_workgroup_size[0])
    if caps.subgroup_required_size and caps.max_workgroup_subgroups:
        size = min(size, caps.subgroup_min * caps.max_workgroup_subgroups)
    if work is not None:
        size = min(size, power_of_two(work))
    return 1 << (size.bit_length() - 1)


def reduction(caps: Capabilities, wg_size: int, *, lanes: int = 1) -> tuple[Defines, int | None]:
    """Defines of shaders/common/reduce.glsl, and the subgroup size to require (None: whatever the driver takes).

    lanes  widest group_* of the shader, 1 if it has none. Shared memory takes over where a subgroup may be narrower or has no shuffles.
    """
    pinned: int | None = None
    known = caps.subgroup_size if caps.subgroup_min == caps.subgroup_max else 0
    least = caps.subgroup_min
    if caps.subgroup_required_size:
        # A group narrower than the usual subgroup is best served by one that it fills.
        pinned = known = least = min(caps.subgroup_size, max(caps.subgroup_min, wg_size))
    ops = ("arithmetic", "shuffle") if lanes > 1 else ("arithmetic",)
    subgroup = caps.has_subgroup_ops(*ops) and least >= lanes
    defines: Defines = {"WG_SIZE": wg_size, "REDUCE_SUBGROUP": int(subgroup), "SUBGROUP_SIZE": known if subgroup else 0}
    return defines, pinned if subgroup else None


def required_subgroup(caps: Capabilities) -> int | None:
    """The subgroup size to require: the device's own, where it could choose another."""
    return caps.subgroup_size if caps.subgroup_required_size else None


def lanes_for(caps: Capabilities) -> tuple[int, int | None, int]:
    """(subgroup size to count on, size to require, USE_SHUFFLES) of the kernels without shared memory (shaders/gemm/rows.glsl).

    Activations go from lane to lane where the device is a CPU: its loads take an instruction for every lane, its shuffles one for all.
    Narrower subgroups than eight count as eight: so many threads make a unit of Q8_1, which must lie within a workgroup.
    """
    if caps.software and caps.subgroup_size >= 8 and caps.has_subgroup_ops("shuffle"):
        if caps.subgroup_required_size:
            return caps.subgroup_size, caps.subgroup_size, 1
        if caps.subgroup_min == caps.subgroup_max:
            return caps.subgroup_size, None, 1
    return max(caps.subgroup_size, 8), None, 0
