"""Whole models and a case of every op under the Khronos validation layer and its synchronization checks: not one message."""

from __future__ import annotations

from functools import partialmethod
from itertools import islice
from typing import Any

import pytest
from validation_kit import use, validated

from vkback.device import Recorder
from vkback.engine import prompts as prompt_module
from vkback.engine.engine import Engine
from vkback.engine.weights import Repack
from vkback.harness.cases import find_case
from vkback.harness.runner import prepare
from vkback.harness.suite import Suite
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS
from vkback.paths import builtin_models
from vkback.program import Program
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Tuning

pytestmark = pytest.mark.vulkan


@pytest.mark.parametrize("path", builtin_models(), ids=lambda p: p.stem)
@pytest.mark.parametrize("mode", [True, "sync"], ids=["core", "sync"])
def test_a_model_runs_without_a_message(mode: Any, path: Any) -> None:
    with validated(mode) as device:
        loads: tuple[tuple[str, Repack], ...] = (("all", "host"), ("none", "device"))
        for fusion, repack in loads:
            with Engine.load(
                path, device, n_ctx=96, fusion=fusion, progress=False, repack=repack, meanwhile=lambda engine: engine.compile(logits=True)
            ) as engine:
                use(engine)
    assert device.live_objects() == {}
    assert [str(m) for m in device.validation_messages] == []


@pytest.mark.parametrize("mode", [True, "sync"], ids=["core", "sync"])
def test_a_token_without_barriers_runs_without_a_message(mode: Any, barrier_free: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The synchronization checks know no order but that of barriers: for them those are recorded, too, that are left out in use."""

    if mode == "sync":
        monkeypatch.setattr(Program, "record", partialmethod(Program.record, barriers=True))
        monkeypatch.setattr(Program, "record_parts", lambda self, name, begins, copies=(): [self.record(name, copies=copies)])
        monkeypatch.setattr(Engine, "_try_sync", lambda self: None)
    with validated(mode) as device, Engine.load(builtin_models()[-1], device, n_ctx=96, progress=False) as engine:
        assert engine.schedule().barrier_free
        use(engine)
        assert engine.schedule().barrier_free
    assert [str(m) for m in device.validation_messages] == []


def test_a_prompt_cut_into_many_submits_runs_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within each submit: the layer does not look across them; tests/models/test_ubatch.py looks at the barriers between."""
    monkeypatch.setattr(prompt_module, "LONGEST_SUBMIT_US", 1.0)
    monkeypatch.setattr(prompt_module.Prompts, "_why_not", lambda *_: "")
    with validated("sync") as device, Engine.load(builtin_models()[-1], device, n_ctx=96, ubatch=64, progress=False) as engine:
        use(engine)
        assert min(len(recording.parts) for recording in engine.prompts.recordings.values()) > 20
    assert [str(m) for m in device.validation_messages] == []


def sample(ctx: LowerContext) -> list[Case]:
    """A case of every op, the one with most launches, and others that take several stages."""
    lines = (
        "MUL_MAT(type_a=Q8_0,type_b=f32,m=8,n=3,k=256,act=q8_1)",
        "MUL_MAT_ID(type_a=Q4_K,n_mats=4,n_used=2,m=8,n=3,k=256,act=q8_1)",
        "MUL_MAT(type_a=Q4_K,type_b=f32,m=17,n=2,k=256,bs=[2,3],nr=[2,1],per=[0,2,1,3],k_v=512)",
        "LINEAR(type_a=Q4_K,m=100,n=3,k=256,fused=bias,split=[64,33,3])",
        "ARGMAX(ne=[32000,2])",
    )
    chosen = [find_case(line) for line in lines]
    for op in OPS.values():
        cases = list(islice(op.cases(), 8))
        chosen.append(max(cases, key=lambda c: len(list(prepare(c.build(), ctx).schedule.dispatches()))))
    return chosen


def test_the_suite_runs_without_a_message() -> None:
    """Launches of all ops, fused and not, with the copies in and out around them."""
    with validated("sync") as device:
        ctx = LowerContext(device.caps, Tuning.for_device(device.caps))
        with Suite(device, ShaderLibrary(), ctx) as suite:
            results = list(suite.run(sample(ctx)))
    assert [r.message for r in results if not r.passed] == []
    general = {"ATTENTION", "ROPE_EXT"}  # whose lines are those of FLASH_ATTN_EXT and ROPE
    assert {r.op for r in results} == set(OPS) - general
    assert [str(m) for m in device.validation_messages] == []


def test_a_barrier_missing_between_launches_of_a_case_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkback.harness.runner.into_stages", lambda dispatches: [list(dispatches)[::-1]])
    device = validated("sync")
    ctx = LowerContext(device.caps, Tuning.for_device(device.caps))
    with Suite(device, ShaderLibrary(), ctx) as suite:
        result = suite.run_one(find_case("MUL_MAT(type_a=Q8_0,type_b=f32,m=8,n=3,k=256,act=q8_1)")).result
    device.close(check_validation=False)
    assert result.passed, "recorded in order, so a CPU driver gives the right result all the same"
    assert any("SYNC-HAZARD-READ-AFTER-WRITE" in str(m) for m in device.validation_messages)


def test_a_missing_barrier_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The synchronization checks do see the buffers of our dispatches."""
    device = validated("sync")
    with Engine.load(builtin_models()[0], device, n_ctx=96, progress=False) as engine:
        monkeypatch.setattr(Recorder, "barrier", lambda self: None)
        engine.decode_logits(1)
    device.close(check_validation=False)
    assert any("SYNC-HAZARD-READ-AFTER-WRITE" in str(m) for m in device.validation_messages)
