"""Ways to send a case down another path of its kernels: other tuning parameters, a device that lacks something."""

from __future__ import annotations

import dataclasses
from typing import Any

from vkback.device import Capabilities
from vkback.ops.lowering import LowerContext
from vkback.plan.tuning import Overrides, Tuning


def with_params(ctx: LowerContext, **params: Any) -> LowerContext:
    """The context with these tuning parameters, whatever the tables say."""
    return dataclasses.replace(ctx, tuning=Overrides.everywhere(ctx.tuning, params, "test"))


def without_subgroups(ctx: LowerContext) -> LowerContext:
    """The context of a device without subgroup arithmetic and shuffles."""
    return dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, subgroup_ops=("basic",)))


def planned_for(profile: str) -> LowerContext:
    """A context for a device that is not there, by the id of its profile."""
    caps = Capabilities.from_profile(profile)
    return LowerContext(caps, Tuning.for_device(caps))
