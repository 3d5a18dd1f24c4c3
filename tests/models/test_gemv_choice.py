"""Products that choose their experts themselves, by the router's logits (role "logits"), and the pass that makes them."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for, with_params, without_subgroups
from validation_kit import use, validated

from vkback.autotune.problem import LinearProblem
from vkback.cli.tune_families import of_model
from vkback.device import Device, profile_ids
from vkback.engine import engine as engine_module
from vkback.engine.engine import Engine
from vkback.engine.sampler import Sampler
from vkback.graph import Node, Tensor
from vkback.harness.runner import run_case, run_problem
from vkback.models.registry import Model
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.gemv import choice_problem
from vkback.ops.matmul.linear_cases import fused_case
from vkback.ops.moe.topk import TOPK_PARAMS, topk_params
from vkback.ops.op import OPS
from vkback.paths import builtin_model
from vkback.plan.passes.router import fuse_choice
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Overrides, Tuning
from vkback.tuning.planner import ROUTERS

GLU: dict[str, Any] = {"glu": True}
Q8_1: dict[str, Any] = {"glu": True, "out": "Q8_1"}
OAI: dict[str, Any] = {"glu": True, "oai": True, "out": "Q8_1"}


def choosing(quant: str, experts: int, used: int, *roles: str, m: int = 64, k: int = 256, **given: Any) -> Case:
    return fused_case(quant, m, k, 1, (*roles, "logits"), experts=experts, used=used, **given)


@pytest.mark.vulkan
@pytest.mark.parametrize(("gating", "norm_w"), [("softmax", False), ("softmax_weight", True), ("sigmoid", False), ("sigmoid", True)])
@pytest.mark.parametrize(("experts", "used"), [(8, 2), (9, 9), (60, 4), (128, 8), (512, 10)])
def test_any_choice(experts: int, used: int, gating: str, norm_w: bool, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    for ties in (False, True):
        outcome = run_case(device, library, choosing("Q8_0", experts, used, m=8, k=32, gating=gating, norm_w=norm_w, ties=ties), ctx)
        assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize("act", ["f32", "q8_1"])
@pytest.mark.parametrize("quant", ["F16", "Q4_K", "Q6_K", "Q8_0", "MXFP4", "IQ2_XS"])
def test_whatever_is_fused_with_it(quant: str, act: Any, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    for roles, given in (((), {}), (("norm",), GLU), (("bias",), Q8_1), (("norm", "bias"), OAI)):
        outcome = run_case(device, library, choosing(quant, 20, 3, *roles, act=act, **given), dataclasses.replace(ctx, act=act))
        assert outcome.ok, f"{roles}: {outcome.text}"


@pytest.mark.vulkan
@pytest.mark.parametrize("shared", [False, True], ids=["subgroup", "shared"])
@pytest.mark.parametrize(
    "shape",
    [
        {"wg": 8, "lanes": 8, "rows": 2, "unroll": 1, "prefetch": "none", "groups": "per_tile", "block": 128},
        {"wg": 128, "lanes": 4, "rows": 2, "unroll": 2, "prefetch": "weights", "groups": "per_tile", "block": 16},
        {"wg": 256, "lanes": 16, "rows": 4, "unroll": 1, "prefetch": "weights", "groups": "per_tile", "block": 128, "x_in_shared": True},
        {"wg": 32, "lanes": 8, "rows": 2, "unroll": 1, "prefetch": "none", "groups": 6, "block": 64, "x_in_shared": True},
        {"wg": 64, "lanes": 64, "rows": 4, "unroll": 1, "prefetch": "none", "groups": 6, "block": 16},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_any_shape(shape: dict[str, int], shared: bool, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """From a thread for many experts to eight threads for one, one tile a workgroup or several, counted in one block or in blocks."""
    fixed = with_params(dataclasses.replace(without_subgroups(ctx) if shared else ctx, act="q8_1"), **shape)
    for case in (
        choosing("Q4_K", 30, 3, "norm", m=192, **Q8_1),
        choosing("Q8_0", 70, 5, m=192, gating="softmax", norm_w=False, ties=True, **Q8_1),
    ):
        outcome = run_case(device, library, case, fixed)
        assert outcome.ok, f"{case.line}: {outcome.text}"


@pytest.mark.vulkan
def test_nan_among_the_logits_chooses_different_experts(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Ids stay within the experts, so that nothing is read past them; the NaN shows in the weights."""
    problem = choosing("Q8_0", 16, 4, "norm", **GLU).build()
    for where in ([5], [0, 15], range(16)):
        logits = problem.values["logits"].copy()
        logits[0, list(where)] = np.nan
        got = run_problem(device, library, dataclasses.replace(problem, values={**problem.values, "logits": logits}), ctx)
        assert len(set(got["ids"][0]) & set(range(16))) == 4
        assert set(got["ids"][0][: len(list(where))]) <= set(where)
        assert np.isnan(got["weights"]).any()


@pytest.mark.vulkan
def test_infinite_and_zero_logits(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    problem = choosing("Q8_0", 8, 8, "norm", gating="sigmoid", norm_w=False, **GLU).build()
    logits = np.array([[-np.inf, -0.0, 0.0, np.inf, -np.inf, -1e-45, 1e-45, 3e38]], np.float32)
    got = run_problem(device, library, dataclasses.replace(problem, values={**problem.values, "logits": logits}), ctx)
    assert got["ids"].tolist() == [[3, 7, 6, 1, 2, 5, 0, 4]]
    np.testing.assert_allclose(got["weights"][0], [1.5, 1.5, 0.75, 0.75, 0.75, 0.75, 0, 0], rtol=1e-6)


# --- refusals -----------------------------------------------------------------------------------------------------------------------


def test_what_it_does_not_take_is_said() -> None:
    h200 = planned_for("nvidia_h200_linux")

    def refused(node: Node, **limits: Any) -> str:
        ctx = dataclasses.replace(h200, caps=dataclasses.replace(h200.caps, **limits))
        with pytest.raises(PlanError) as e:
            OPS["LINEAR"].lower(node, ctx)
        assert choice_problem(node, ctx)
        return str(e.value)

    node = choosing("Q4_K", 512, 8, "norm", k=2048, **Q8_1).build().node
    assert refused(fused_case("Q4_K", 64, 256, 2, ("logits",)).build().node).startswith(
        "[gemv] y: it cannot choose its experts: it takes one token, got 2; give TOPK_MOE a node of its own"
    )
    assert "it binds 7 storage buffers, NVIDIA H200 takes 6" in refused(node, max_storage_bindings=6)
    x_from_memory = choosing("Q4_K", 512, 8, **Q8_1).build().node
    short = refused(x_from_memory, max_shared_memory=2000)
    assert re.search(r"\d+ threads of \d rows need \d+ bytes of shared memory, NVIDIA H200 has 2000", short)
    wrong = dataclasses.replace(node, params={**node.params, "gating": "sqrtsoftplus"})
    assert "unknown gating 'sqrtsoftplus', expected one of sigmoid, softmax, softmax_weight" in refused(wrong)
    assert not choice_problem(node, h200)


# --- the pass -----------------------------------------------------------------------------------------------------------------------


def layer(n: int = 1) -> dict[str, Node]:
    """Choice, product of gate and up, product with the sum, as they are before the pass."""
    ids, weights = Tensor("ids", "I32", (n, 4)), Tensor("weights", "F32", (n, 4))
    logits, x, h, y = (Tensor(name, "F32", s) for name, s in (("logits", (n, 32)), ("x", (n, 1, 256)), ("h", (n, 4, 64)), ("y", (n, 256))))
    gate_up, down = (Tensor(name, "Q8_0", s, "weight") for name, s in (("gate_up", (32, 128, 256)), ("down", (32, 256, 64))))
    params = dict(zip(TOPK_PARAMS, (4, True, "softmax", 1.0), strict=False))
    return {
        "choice": Node("TOPK_MOE", (logits,), (weights, ids), params),
        "gate_up": Node("LINEAR", (gate_up, x, ids), (h,), {"roles": ("w", "x", "ids"), "glu": True}),
        "down": Node("LINEAR", (down, h, ids, weights), (y,), {"roles": ("w", "x", "ids", "expert_weights")}),
    }


def test_the_product_takes_the_choice_in() -> None:
    nodes = layer()
    fused = fuse_choice(list(nodes.values()), [], planned_for("nvidia_h200_linux"))
    assert [n.name for n in fused] == ["h", "y"]
    assert fused[0].params["roles"] == ("w", "x", "logits") and fused[0].params["glu"]
    assert [t.name for t in fused[0].inputs] == ["gate_up", "x", "logits"]
    assert [t.name for t in fused[0].outputs] == ["h", "weights", "ids"]
    assert topk_params(fused[0].params) == nodes["choice"].params
    assert fused[1] is nodes["down"]


def test_the_rounding_of_its_results_may_stand_between() -> None:
    nodes = layer()
    h = nodes["gate_up"].outputs[0]
    rounded = dataclasses.replace(h, name="h.q8_1", type="Q8_1")
    w, _, *chosen = nodes["down"].inputs
    down = dataclasses.replace(nodes["down"], inputs=(w, rounded, *chosen))
    before = [nodes["choice"], nodes["gate_up"], Node("QUANTIZE_Q8_1", (h,), (rounded,)), down]
    fused = fuse_choice(before, [], planned_for("nvidia_h200_linux"))
    assert [n.name for n in fused] == ["h", "h.q8_1", "y"] and "logits" in fused[0].params["roles"]


def two_products(nodes: dict[str, Node]) -> None:
    other = dataclasses.replace(nodes["gate_up"].inputs[0], name="other")
    inputs = (other, *nodes["gate_up"].inputs[1:])
    nodes["other"] = dataclasses.replace(nodes["gate_up"], inputs=inputs, outputs=(Tensor("o", "F32", (1, 4, 64)),))


def no_product(nodes: dict[str, Node]) -> None:
    del nodes["gate_up"]


def another_reads_the_weights(nodes: dict[str, Node]) -> None:
    nodes["other"] = Node("SCALE", (nodes["choice"].outputs[0],), (Tensor("o", "F32", (1, 4)),))


def a_sum_of_something_else(nodes: dict[str, Node]) -> None:
    """Nothing says that it comes after the product."""
    w, _, *chosen = nodes["down"].inputs
    nodes["down"] = dataclasses.replace(nodes["down"], inputs=(w, Tensor("z", "F32", (1, 4, 64)), *chosen))


@pytest.mark.parametrize("change", [two_products, no_product, another_reads_the_weights, a_sum_of_something_else])
def test_other_readers_keep_the_choice_apart(change: Callable[[dict[str, Node]], None]) -> None:
    nodes = layer()
    change(nodes)
    before = list(nodes.values())
    assert fuse_choice(before, [], planned_for("nvidia_h200_linux")) == before


def test_several_tokens_and_small_devices_keep_the_choice_apart() -> None:
    h200 = planned_for("nvidia_h200_linux")
    several, one = list(layer(3).values()), list(layer().values())
    assert fuse_choice(several, [], h200) == several
    small: tuple[dict[str, Any], ...] = ({"max_shared_memory": 100}, {"max_storage_bindings": 5})
    for limits in small:
        assert fuse_choice(one, [], dataclasses.replace(h200, caps=dataclasses.replace(h200.caps, **limits))) == one


# --- schedules of models ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.open(builtin_model("demo-moe"))


def planned(model: Model, profile: str, router: str, n: int = 1) -> Schedule:
    return plan(model.graph(n, 512, head="last"), with_params(planned_for(profile), router=router))


def test_it_takes_a_stage_less(model: Model) -> None:
    found = {router: planned(model, "amd_rx_7900_xtx_radv", router) for router in ROUTERS}
    ops = {router: Counter(d.op for d in s.dispatches()) for router, s in found.items()}
    layers, hp = model.hp.n_layer, model.hp
    assert len(found["stage"].stages) - len(found["experts"].stages) == layers
    assert ops["stage"] - ops["experts"] == Counter({"TOPK_MOE": layers})
    chosen = 4 * hp.n_expert + 8 * hp.n_expert_used  # logits, weights and ids, which then belong to the launch that reads the experts
    moved = {router: sum(d.nbytes for d in s.dispatches() if d.weight_bytes) for router, s in found.items()}
    assert moved["experts"] == moved["stage"] + layers * chosen
    assert found["experts"].weight_bytes == found["stage"].weight_bytes
    stage_of = {d.label: i for i, stage in enumerate(found["experts"].stages) for d in stage}
    choosers = [d for d in found["experts"].dispatches() if dict(d.kernel.defines).get("CHOOSE")]
    assert len(choosers) == layers
    for d in choosers:
        written = {name for name, _ in d.writes}
        readers = [r for r in found["experts"].dispatches() if written & {name for name, _ in r.reads}]
        assert len(written) == 3 and readers and all(stage_of[r.label] > stage_of[d.label] for r in readers)


def test_prompts_choose_in_a_stage(model: Model) -> None:
    ops = Counter(d.op for d in planned(model, "nvidia_h200_linux", "experts", n=4).dispatches())
    assert ops["TOPK_MOE"] == model.hp.n_layer - 1, "in the last layer only the last token is left"


@pytest.mark.parametrize("profile", profile_ids())
def test_every_device_has_a_plan(profile: str, model: Model) -> None:
    s = planned(model, profile, "experts")
    choosers = [d for d in s.dispatches() if dict(d.kernel.defines).get("CHOOSE")]
    alone = [d for d in s.dispatches() if d.op == "TOPK_MOE"]
    assert len(choosers) + len(alone) == model.hp.n_layer
    caps = planned_for(profile).caps
    assert all(len(d.args) <= caps.max_storage_bindings for d in choosers)


def test_it_is_tuned_like_any_other_product() -> None:
    found = {r: dict(of_model("demo-moe", 1, with_params(planned_for("amd_rx_7900_xtx_radv"), router=r))) for r in ("experts", "stage")}
    assert found["experts"] == found["stage"]
    line = choosing("Q4_K", 128, 8, "norm", **Q8_1).line
    assert LinearProblem.parse(line).roles == ("norm", "ids")
    node = choosing("Q4_K", 128, 8, "norm", **Q8_1).build().node
    assert LinearProblem.parse(line) == LinearProblem.of(node)
    bias = Tensor("selection_bias", "F32", (128,), "weight")
    biased = Node(node.op, (*node.inputs, bias), node.outputs, {**node.params, "roles": (*node.params["roles"], "selection_bias")})
    assert LinearProblem.of(biased) == LinearProblem.of(node) and LinearProblem.of(biased).node().params["roles"][-1] == "ids"


# --- models on a device -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine_with(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Loads engines whose schedule has the choice of experts somewhere."""
    loaded: list[Engine] = []

    def load(router: str, act: Any = "auto", on: Device = device) -> Engine:
        class Tables:
            @staticmethod
            def for_device(caps: Any) -> Overrides:
                return Overrides(Tuning.for_device(caps), {"schedule": {"router": router}}, "test")

        monkeypatch.setattr(engine_module, "Tuning", Tables)
        loaded.append(Engine.load(builtin_model("demo-moe"), on, n_ctx=96, act=act, progress=False))
        return loaded[-1]

    yield load
    for engine in loaded:
        engine.close()


@pytest.mark.vulkan
@pytest.mark.parametrize("act", ["f32", "q8_1"])
def test_tokens_are_the_same_wherever_the_choice_is_made(act: str, engine_with: Callable[..., Engine]) -> None:
    made, logits = {}, {}
    for router in ROUTERS:
        engine = engine_with(router, act)
        engine.prompt(range(3, 20))
        made[router] = list(engine.generate(7, 40, stop_at_eos=False))
        made[router] += engine.generate(made[router][-1], 9, sampler=Sampler(temp=0.8, seed=3), stop_at_eos=False)
        logits[router] = engine.decode_logits(made[router][-1])
    assert made["experts"] == made["stage"] == made["gemv"]
    # The same sums in the same order; only an exp of the weights may be compiled another way.
    np.testing.assert_allclose(logits["experts"], logits["stage"], rtol=0, atol=1e-3)


@pytest.mark.vulkan
def test_it_runs_without_a_message(engine_with: Callable[..., Engine]) -> None:
    with validated("sync") as device, engine_with("experts", on=device) as engine:
        use(engine)
    assert [str(m) for m in device.validation_messages] == []
