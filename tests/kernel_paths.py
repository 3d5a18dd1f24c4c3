"""Ways to send a case down another path of its kernels: other tuning parameters, a device that lacks something."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from vkback.device import Capabilities
from vkback.ops.lowering import LowerContext
from vkback.tuning.lookup import Overrides, Tuning, device_table


def with_params(ctx: LowerContext, **params: Any) -> LowerContext:
    """The context with these tuning parameters, whatever the tables say."""
    return dataclasses.replace(ctx, tuning=Overrides.everywhere(ctx.tuning, params, "test"))


def with_pairs(ctx: LowerContext, folder: Path, monkeypatch: pytest.MonkeyPatch) -> LowerContext:
    """The context of a device whose IQ4 weights lie in pairs, by a table of its user's in this folder, until the patch is undone."""
    row = '[[weight_layout]]\nset = { codes = "pairs" }\nmeasured = "test"\n'
    (folder / device_table(ctx.caps)).write_text(row, encoding="utf-8")
    monkeypatch.setenv("VKBACK_TUNING", str(folder))
    return dataclasses.replace(ctx, tuning=Tuning.for_device(ctx.caps))


def without_subgroups(ctx: LowerContext) -> LowerContext:
    """The context of a device without subgroup arithmetic and shuffles."""
    return dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, subgroup_ops=("basic",)))


def planned_for(profile: str) -> LowerContext:
    """A context for a device that is not there, by the id of its profile."""
    caps = Capabilities.from_profile(profile)
    return LowerContext(caps, Tuning.for_device(caps))
