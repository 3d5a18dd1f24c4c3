"""Ways to send a case down another path of its kernels: other tuning parameters, a device that lacks something."""

from __future__ import annotations

import dataclasses
from typing import Any

from vkback.device import Capabilities
from vkback.ops.base import Choice, Chooser, LowerContext
from vkback.plan.tuning import Tuning


@dataclasses.dataclass(frozen=True)
class Overriding:
    """A chooser that puts some parameters in the place of what the tables say."""

    tables: Chooser
    params: dict[str, Any]

    def pick(self, op: str, **query: Any) -> Choice:
        choice = self.tables.pick(op, **query)
        return Choice({**choice.params, **{k: v for k, v in self.params.items() if k in choice.params}}, "test")


def with_params(ctx: LowerContext, **params: Any) -> LowerContext:
    """The context with these tuning parameters, whatever the tables say."""
    return dataclasses.replace(ctx, tuning=Overriding(ctx.tuning, params))


def without_subgroups(ctx: LowerContext) -> LowerContext:
    """The context of a device without subgroup arithmetic and shuffles."""
    return dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, subgroup_ops=("basic",)))


def planned_for(profile: str) -> LowerContext:
    """A context for a device that is not there, by the id of its profile."""
    caps = Capabilities.from_profile(profile)
    return LowerContext(caps, Tuning.for_device(caps))
