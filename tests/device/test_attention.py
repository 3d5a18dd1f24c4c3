"""Attention over the cache, split and whole, plain and fused."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from kernel_paths import planned_for, with_params, without_subgroups

from vkback.device import BufferRange, Device
from vkback.graph import Node, Tensor
from vkback.harness.runner import run_case, run_problem
from vkback.ops.attention.flash import AttnDecode, FlashAttnExt
from vkback.ops.case import Array, Case, Problem
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.ops.storage import nbytes
from vkback.plan.exact import exact_context
from vkback.plan.schedule import Schedule, allocate, into_stages
from vkback.program import Program
from vkback.shader import ShaderLibrary

PLAIN = FlashAttnExt()
FUSED = AttnDecode()
PROMPTS = {c.line for c in PLAIN.prompt_cases()}  # tests/device/test_attention_prompt.py has these
CASES = [c for op in (PLAIN, FUSED) for c in op.cases() if "tuning" not in c.params and c.line not in PROMPTS]
FUSED_CASES = sum(c.op == FUSED.name for c in CASES)

# Where the wanted threads are fewer than a row of V needs, the kernel takes more; splits appear only where rows_per_split allows. With 16
# lanes a row of K has as many as one of V up to head size 128, if the subgroup is as wide.
SHAPES = (
    {"kernel": "decode", "wg_size": 32, "lanes": 4, "steps": 1, "queries": 8, "groups": 64, "rows_per_split": 32},
    {"kernel": "decode", "wg_size": 64, "lanes": 8, "steps": 2, "queries": 2, "groups": 16, "rows_per_split": 50},
    {"kernel": "decode", "wg_size": 128, "lanes": 2, "steps": 1, "queries": 4, "groups": 1, "rows_per_split": 64},
    {"kernel": "decode", "wg_size": 64, "lanes": 16, "steps": 4, "queries": 4, "groups": 16, "rows_per_split": 32},
    {"kernel": "decode", "wg_size": 128, "lanes": 16, "steps": 2, "queries": 1, "groups": 64, "rows_per_split": 32},
)
SPREAD = [CASES[i] for i in (1, 3, 7, 8, 13, 16, 21, 25, 29)]


@pytest.mark.vulkan
@pytest.mark.parametrize("case", SPREAD, ids=lambda c: c.line)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_shapes(case: Case, shape: dict[str, int], device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, with_params(ctx, **shape))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize("case", [CASES[3], CASES[6], CASES[25]], ids=lambda c: c.line)
def test_without_subgroups(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    for shape in (SHAPES[0], SHAPES[3]):
        outcome = run_case(device, library, case, without_subgroups(with_params(ctx, **shape)))
        assert outcome.ok, outcome.text


@pytest.mark.vulkan
def test_little_shared_memory_goes_in_rounds(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    use = with_params(ctx, wg_size=128, lanes=4, steps=1, queries=8)
    case = PLAIN.build_case(8, 1, 128, 64, (40,), "F32", seed=1)
    rounds = []
    for kib in (48, 20):
        limited = dataclasses.replace(use, caps=dataclasses.replace(use.caps, max_shared_memory=kib << 10))
        rounds.append(dict(PLAIN.lower(case.build().node, limited)[0].kernel.defines)["MERGE_QUERIES"])
    assert rounds == [8, 2]
    outcome = run_case(device, library, case, limited)
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
def test_replay_gives_the_same_bits(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """The last workgroup to arrive differs from run to run; the result and the counters must not show it."""
    problem = PLAIN.build_case(8, 2, 64, 600, (599, 64, 300), "F32", seed=1).build()
    stages = into_stages(PLAIN.lower(problem.node, with_params(ctx, **SHAPES[0])))
    assert int(dict(stages[0][0].kernel.defines)["SPLITS"]) > 4
    slots, size = allocate(stages, [problem.node.name])
    with device.arena("replay", 4 << 20, "device") as arena:
        ranges: dict[str, BufferRange] = {}
        for t in problem.node.inputs:
            ranges[t.name] = arena.alloc(nbytes(t), t.name)
            device.upload(ranges[t.name], np.ascontiguousarray(problem.values[t.name]).reshape(-1).view(np.uint8))
        program = Program(device, library, Schedule(stages, slots, size), ranges, {})
        once, many = program.record("once"), program.record("many", repeat=20)
        results = []
        for commands in (once, many, once):
            device.submit(commands).wait(60)
            results.append(device.download(program.range(problem.node.name)))
        program.close()
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.vulkan
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_a_token_does_not_depend_on_its_company(shape: dict[str, int], device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    use = with_params(ctx, **shape)
    together = PLAIN.build_case(4, 2, 64, 400, (10, 399, 130, -1), "F32", seed=1).build()
    want = run_problem(device, library, together, use)["kqv_out"]
    for i in range(3):
        q, cache_k, cache_v, pos = together.node.inputs
        inputs = (dataclasses.replace(q, shape=(1, *q.shape[1:])), cache_k, cache_v, dataclasses.replace(pos, shape=(1,)))
        node = Node("FLASH_ATTN_EXT", inputs, (Tensor("kqv_out", "F32", (1, want.shape[1])),), together.node.params)
        values = {**together.values, "q": together.values["q"][i : i + 1], "pos": together.values["pos"][i : i + 1]}
        got = run_problem(device, library, Problem(node, values), use)["kqv_out"]
        np.testing.assert_array_equal(got[0], want[i])


UNCHAINED = {"sinks", "ff", "page", "norm_v", "norm_all", "shared_kv", "gated"}


@pytest.mark.vulkan
@pytest.mark.parametrize(
    "case",
    [c for c in CASES[-FUSED_CASES:] if c.params["pos"] >= 0 and not UNCHAINED & {k for k, v in c.params.items() if v}],
    ids=lambda c: c.line,
)
def test_fused_matches_the_chain_on_the_device(case: Case, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Cache rows to the bit, whatever their type; over F16 caches the output, too, to the rounding of one dot product, or one 8-bit step
    where a value lay on an edge. Norms of V and over all heads, K of another layer and gates have no chain of
    this kind: the suite judges them."""
    fused = case.build()
    p, out = fused.node.params, fused.node.outputs[0]
    qkv, pos, cache_k, cache_v, *norms = fused.node.inputs
    if p["n_dims"]:
        angles = norms.pop(0)
        fused.values.update(run_problem(device, library, Problem(Node("ROPE_ANGLES", (pos,), (angles,), p), fused.values), ctx))
    q = Tensor("q_out", "F32", (1, p["n_head"], p["head_dim"]))
    store = Node("QKV_ROPE_SET_ROWS", (qkv, pos, cache_k, cache_v, *norms), (q, cache_k, cache_v), {**p, "packed": True})
    stored = run_problem(device, library, Problem(store, fused.values), ctx)
    got = run_problem(device, library, fused, ctx)
    for name in ("cache_k", "cache_v"):
        np.testing.assert_array_equal(got[name], stored[name])
    if {cache_k.type, cache_v.type} != {"F16"}:
        return
    scores = {key: p[key] for key in ("scale", "window", "chunked", "softcap") if key in p}
    attend = Node("FLASH_ATTN_EXT", (q, cache_k, cache_v, pos), (out,), scores)
    chained = run_problem(device, library, Problem(attend, {**stored, "pos": fused.values["pos"]}), ctx)[out.name]
    step = float(np.abs(chained).max()) / 127 if out.type == "Q8_1" else 0.0
    np.testing.assert_allclose(got[out.name], chained, rtol=0, atol=max(1.01 * step, 2e-6 * float(np.abs(chained).max())))


@pytest.mark.vulkan
def test_position_beyond_the_cache_stores_nothing(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    problem = FUSED.build_case(4, 2, 64, 16, 15, "normal", False, False, "F32", seed=1, garbage=False).build()
    values: dict[str, Array] = {**problem.values, "pos": np.array([16], np.int32)}
    got = run_problem(device, library, Problem(problem.node, values), ctx)
    for name in ("cache_k", "cache_v"):
        np.testing.assert_array_equal(got[name], values[name].astype(np.float32))


def node(*, hd: int = 64, n_head: int = 4, kv: int = 2, y: str = "F32", n_ctx: int = 64) -> Node:
    cache = [Tensor(name, "F16", (kv, n_ctx, hd), "state") for name in ("cache_k_l0", "cache_v_l0")]
    inputs = (Tensor("q", "F32", (1, n_head, hd)), *cache, Tensor("pos", "I32", (1,), "input"))
    return Node("FLASH_ATTN_EXT", inputs, (Tensor("kqv_out-0", y, (1, n_head * hd)),), {"scale": 1 / math.sqrt(hd)})


H200 = planned_for("nvidia_h200_linux")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (node(hd=60), "multiple of 8"),
        (node(n_head=5), "heads a multiple of kv heads"),
        (node(hd=40, y="Q8_1"), "multiple of 32, got 40; make the output F32"),
        (node(hd=128, kv=2, n_ctx=1 << 24), "binds at most 4294967295 at once. Use a smaller context"),
    ],
)
def test_what_is_refused(wrong: Node, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        PLAIN.lower(wrong, H200)


def test_fused_takes_one_token() -> None:
    problem = FUSED.build_case(4, 2, 64, 16, 3, "normal", False, False, "F32", seed=1).build()
    inputs = (problem.node.inputs[0], Tensor("pos", "I32", (2,), "input"), *problem.node.inputs[2:])
    with pytest.raises(PlanError, match="takes one token"):
        FUSED.lower(dataclasses.replace(problem.node, inputs=inputs), H200)


@pytest.mark.parametrize(
    "profile", ["nvidia_h200_linux", "amd_rx_7900_xtx_radv", "intel_arc_a770_anv", "apple_m1_moltenvk", "qualcomm_adreno_740_turnip"]
)
@pytest.mark.parametrize("hd", [40, 64, 80, 96, 128, 256])
def test_every_head_size_can_be_planned(profile: str, hd: int) -> None:
    ctx = planned_for(profile)
    (d,) = PLAIN.lower(node(hd=hd, n_head=8, kv=2, n_ctx=8192, y="Q8_1" if hd % 32 == 0 else "F32"), ctx)
    defines = dict(d.kernel.defines)
    assert int(defines["WG_SIZE"]) >= hd // 8
    assert int(defines["WG_SIZE"]) <= ctx.caps.max_workgroup_invocations
    assert hd // 8 % int(defines["LANES"]) == 0


def test_little_shared_memory_and_few_bindings() -> None:
    wide = with_params(H200, wg_size=256, queries=4)
    small = dataclasses.replace(wide, caps=dataclasses.replace(H200.caps, max_shared_memory=8 << 10, max_storage_bindings=8))
    problem = FUSED.build_case(32, 4, 128, 4096, 3, "neox", True, True, "Q8_1", seed=1, garbage=False).build()
    (d,) = FUSED.lower(problem.node, small)
    defines = dict(d.kernel.defines)
    assert len(d.args) <= 8 and defines["SPLITS"] == 1
    assert 16 <= int(defines["WG_SIZE"]) < int(dict(FUSED.lower(problem.node, wide)[0].kernel.defines)["WG_SIZE"])
    tiny = dataclasses.replace(small, caps=dataclasses.replace(small.caps, max_shared_memory=2048))
    with pytest.raises(PlanError, match=r"bytes of shared memory, NVIDIA H200 has 2048; lower queries"):
        FUSED.lower(problem.node, tiny)


def test_long_context_fills_the_device_and_exact_splits_do_not_depend_on_tokens() -> None:
    one_token = node(n_head=32, kv=8, hd=128, n_ctx=16384)
    assert 132 * 0.9 < math.prod(PLAIN.lower(one_token, H200)[0].groups) <= 132
    many = FlashAttnExt().build_case(32, 8, 128, 16384, (1,) * 16, "F32", seed=1, garbage=False).build().node
    exact = exact_context(H200)
    assert PLAIN.lower(many, exact)[0].kernel == PLAIN.lower(one_token, exact)[0].kernel


def test_registered() -> None:
    assert {"FLASH_ATTN_EXT", "ATTN_DECODE"} <= set(OPS)
