"""Packing of a prompt's activations (vkback/plan/passes/pack.py): what plans of recorded devices have, and logits of
the built-in models."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for
from model_files import hollow

from vkback.device import Device
from vkback.evaluate.judge import judge
from vkback.evaluate.twin import NumpyTwin
from vkback.graph import Tensor
from vkback.harness import token_cases
from vkback.harness.token_cases import TokenCase
from vkback.models import Model
from vkback.models.builder import Paging
from vkback.ops.case import Array, Tolerance
from vkback.ops.cooperative_matrix import matrix_shape
from vkback.ops.dispatch import Dispatch
from vkback.ops.family import Choice
from vkback.ops.lowering import LowerContext
from vkback.paths import builtin_model
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.shader import ShaderLibrary, interface
from vkback.tuning.lookup import Overrides

H200 = "nvidia_h200_linux"
N = 512

DENSE, EXPERTS, BIASED = "llama-8b-Q4_K_S:2", "qwen3moe-30b-a3b-Q2_K:2", "gpt-oss-20b-MXFP4:2"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Models of full size with two layers, by name; their weights are not there."""
    folder = tmp_path_factory.mktemp("pack")
    opened: dict[str, Model] = {}

    def find(name: str) -> Model:
        if name not in opened:
            opened[name] = Model.open(hollow(name, folder / f"{len(opened)}.gguf"))
        return opened[name]

    return find


def scheduled(model: Model, *, profile: str = H200, n: int = N, **schedule: str) -> Schedule:
    """A prompt's plan, with these parameters of [[schedule]]."""
    ctx = planned_for(profile)
    tuning = Overrides(ctx.tuning, {"schedule": schedule}, "test") if schedule else ctx.tuning
    return plan(model.graph(n, 1024, head="none"), dataclasses.replace(ctx, tuning=tuning))


def kernels(dispatches: list[Dispatch]) -> Counter[str]:
    """How many dispatches of each kernel."""
    return Counter(Path(d.kernel.source).stem for d in dispatches)


def layer(schedule: Schedule, first: str, after: str) -> list[list[Dispatch]]:
    """The stages from the one with node `first` up to that with node `after`."""
    numbers = {name: i for i, stage in reversed([*enumerate(schedule.stages)]) for d in stage for name in [d.label]}
    return schedule.stages[numbers[first] : numbers[after]]


def specialized(dispatch: Dispatch, constant: str) -> int | float:
    return dict(dispatch.kernel.spec)[constant]


def bound(dispatch: Dispatch, buffer: str) -> Tensor:
    """The tensor bound as a buffer that the shader declares."""
    return dispatch.args[interface(dispatch.kernel.source).binding(buffer)].tensor


def of(schedule: Schedule, label: str, kernel: str) -> Dispatch:
    (found,) = [d for d in schedule.dispatches() if d.label == label and Path(d.kernel.source).stem == kernel]
    return found


@pytest.mark.parametrize(("n", "free"), [(8, False), (32, True)])
def test_stages_of_a_step_of_many_sequences_through_experts(n: int, free: bool, large: Callable[[str], Model]) -> None:
    """Attention of pages by matrices; norm, router, choice and route are one stage, and so are the sum of experts, the norm behind it and
    its packing. Products by experts wait for the route first, by the counter of the one workgroup that made it."""
    ctx = planned_for(H200)
    ctx = dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, {"topk_moe": {"experts_each": 8}}, "test"))
    paging = Paging(page=64, n_pages=n * 10, n_slots=n, max_pages=10)
    schedule = plan(large(BIASED).graph(n, 640, head="all", paging=paging), ctx)
    numbers = {d.label: i for i, stage in enumerate(schedule.stages) for d in stage}
    first, last = numbers["Qcur_rope-1.qkv"], numbers["result_norm.units"]
    stages = ["coop_reg_heads", "matrix", "coop_reg", "norm_route", "coop_reg_experts", "coop_reg_experts", "pack_units"]
    assert [sorted(kernels(stage)) for stage in schedule.stages[first : last + 1]] == [[name] for name in stages]
    with_barriers = [i for i in range(first, last + 1) if i not in schedule.barrier_free]
    assert with_barriers == ([] if free else [numbers["ffn_moe_swiglu_oai-1.f16"]])
    gate, down = (dict(schedule.stages[last - i][0].kernel.spec) for i in (2, 1))
    waits = [(spec.get("EXPECTED_FIRST", 0), spec.get("EXPECTED", 0) > 0) for spec in (gate, down)]
    assert waits == ([(1, False), (1, True)] if free else [(0, False), (0, True)])


def test_a_norm_that_is_packed_for_prompts_kernels_stays_a_stage(large: Callable[[str], Model]) -> None:
    """Of 17 to 48 tokens the shared expert of GLM goes through other GEMMs, for which that dispatch packs rows and stores their factors."""
    for n in (17, 48):
        found = kernels([*scheduled(large("glm-4.5-air-Q4_K_S:2"), n=n).dispatches()])
        assert "norm_route" not in found and found["pack_f16"], n


def test_a_dense_layer_of_a_prompt(large: Callable[[str], Model]) -> None:
    """Norm with packing; Q with K, and V; their sums; rope; attention; output and its sum; norm; gate with up; down and its sum."""
    stages = layer(scheduled(large(DENSE)), "attn_norm-0.f16", "attn_norm-1.f16")
    assert [sorted(kernels(stage)) for stage in stages] == [
        ["pack_f16"],
        ["coop_mat"],
        ["split_sum"],
        ["rope"],
        ["prompt_matrix"],
        ["coop_mat"],
        ["split_sum"],
        ["pack_f16"],
        ["coop_mat"],
        ["coop_mat"],
        ["split_sum"],
    ]


def test_a_layer_of_experts_of_a_prompt(large: Callable[[str], Model]) -> None:
    """As a dense one up to the norm, whose rows router and experts share; then the route, once, and the experts' rows by it."""
    for name, norm, rms in ((EXPERTS, "attn_norm", "ffn_norm"), (BIASED, "attn_norm", "attn_post_norm")):
        schedule = scheduled(large(name))
        stages = layer(schedule, f"{norm}-0.f16", f"{norm}-1.f16")
        assert [sorted(kernels(stage)) for stage in stages] == [
            ["pack_f16"],
            ["coop_mat"],
            ["split_sum"],
            ["rope"],
            ["prompt_matrix"],
            ["coop_mat"],
            ["split_sum"],
            ["pack_f16"],
            ["coop_mat"],
            ["split_sum"],
            ["router"],
            ["route"],
            ["pack_f16"],
            ["coop_mat"],
            ["coop_mat"],
            ["moe_reduce"],
        ]
        once, again = of(schedule, f"{rms}-0.f16", "pack_f16"), of(schedule, f"{rms}-0.f16.ffn_moe_topk-0.route64", "pack_f16")
        assert (specialized(once, "FACTORS"), specialized(again, "FACTORS")) == (1, 2)
        assert bound(once, "Factors") == bound(again, "Factors") and bound(again, "Route").name == "ffn_moe_topk-0.route64"


def test_who_packs_is_up_to_the_tables(large: Callable[[str], Model]) -> None:
    """Each step takes dispatches out of a layer; what packs x of gate and up serves both, whichever kernel makes it."""
    ways = (("stage", "stage"), ("gemm", "stage"), ("producer", "stage"), ("producer", "prologue"))
    for name, stages in ((DENSE, (15, 14, 13, 11)), (EXPERTS, (20, 19, 18, 16))):
        for (pack, norm), expected in zip(ways, stages, strict=True):
            schedule = scheduled(large(name), pack=pack, norm=norm)
            suffix = ".f16" if norm == "prologue" else ""
            assert len(layer(schedule, f"attn_norm-0{suffix}", f"attn_norm-1{suffix}")) == expected, (pack, norm)


@pytest.mark.parametrize("n", [16, N])
def test_heads_are_packed_side_by_side(n: int, large: Callable[[str], Model]) -> None:
    """The values of all heads of a token are one row of what the output product reads."""
    schedule = scheduled(large("deepseek2-16b-Q4_K_M:2"), n=n)
    packs = [d for d in schedule.dispatches() if d.op == "PACK_F16" and d.args[0].tensor.name == "kqv_decompressed-0"]
    assert [d.args[1].tensor.shape[-1] for d in packs] == [2048]


def test_packed_values_agree_with_their_readers(large: Callable[[str], Model]) -> None:
    """Every F16 activation is read as it was stored: by the same route, in as many words a column."""
    for name in (DENSE, EXPERTS, BIASED):
        for n in (17, 40, 100, 512, 1000, 2048):
            schedule = scheduled(large(name), n=n)
            args = [(d, a) for d in schedule.dispatches() for a in d.args if a.tensor.type == "F16" and a.tensor.kind == "node"]
            made = {a.tensor.name: (d, a.tensor) for d, a in args if a.access == "w"}
            read = [(d, a.tensor) for d, a in args if a.access == "r"]
            assert {t.name for _, t in read} == set(made)
            for reader, tensor in read:
                producer, stored = made[tensor.name]
                assert stored == tensor
                nodes = {a.tensor for d in (producer, reader) for a in d.args if a.tensor.kind == "node" and a.tensor.type == "I32"}
                routes = {t.name for t in nodes if ".route" in t.name}
                assert len(routes) <= 1
                tile_n = int(specialized(reader, "TILE_N"))
                assert tensor.shape[0] % tile_n == 0 and tensor.shape[0] >= n


@pytest.mark.parametrize("profile", [H200, "amd_rx_7900_xtx_radv", "intel_arc_a770_anv", "llvmpipe_mesa_22_debian12"])
def test_few_tokens_are_planned_as_ever(profile: str, large: Callable[[str], Model]) -> None:
    """Up to 16 tokens nothing is packed as fragments, whatever the tables say of packing; nor in unit order where rows of matrices are not
    known to suit."""
    for n in (1, 2, 8, 16):
        plans = [scheduled(large(DENSE), profile=profile, n=n, pack=pack) for pack in ("producer", "stage")]
        assert not {"pack_f16", "route"} & set(kernels([*plans[0].dispatches()]))
        by_registers = profile == H200 and n > 1
        assert ("pack_units" in kernels([*plans[0].dispatches()])) == by_registers
        assert by_registers or plans[0].stages == plans[1].stages


def test_a_layer_of_few_tokens(large: Callable[[str], Model]) -> None:
    """Q with K, and V; attention; output; gate with up; down. The first turn and store what they make. Nobody packs or norms in between: a
    product that is normed next stores its rows times the norm's weight, and sums of their squares, by which those that read them divide."""
    for n in range(2, 17):
        schedule = scheduled(large(DENSE), n=n)
        assert [sorted(set(kernels(stage))) for stage in schedule.stages[2:8]] == [
            ["coop_reg_heads"],
            ["matrix" if n in (7, 8) else "attention"],
            ["coop_reg"],
            ["coop_reg"],
            ["coop_reg"],
            ["coop_reg"],
        ]
        rows = 4096 // 16
        out, gate = of(schedule, "ffn_inp-0", "coop_reg"), of(schedule, "ffn_swiglu-0.f16", "coop_reg")
        names = {a.tensor.name: a.tensor.shape for a in out.args if "w" in a.access and a.tensor.kind == "node"}
        assert names["ffn_inp-0"] == (n, 4096) and names["ffn_norm-0.squares"] == (n, rows) and "ffn_norm-0.units" in names
        assert (specialized(out, "NEXT_NORM"), specialized(out, "Y_SQUARES"), specialized(gate, "X_SQUARES")) == (1, rows, rows)
        assert bound(out, "NextNormWeight").name == "blk.0.ffn_norm.weight" and bound(gate, "X").name == "ffn_norm-0.units"


def test_who_turns_and_stores_few_tokens(large: Callable[[str], Model]) -> None:
    """The products of Q, K and V, each what it makes, by the angles of all layers; a stage where the tables say so, where heads are normed,
    and where many tokens take other kernels."""
    dispatches = list(scheduled(large(DENSE), n=8).dispatches())
    stored = [d for d in dispatches if {a.tensor.name for a in d.args} & {"cache_k_l0", "cache_v_l0"}]
    angles = next(d.args[1].tensor for d in dispatches if d.op == "ROPE_ANGLES")
    made = [{a.tensor.name for a in d.args if "w" in a.access and a.tensor.kind in ("node", "state")} for d in stored[:2]]
    assert made == [{"Qcur_rope-0", "Qcur_rope-0.arrivals", "cache_k_l0"}, {"Qcur_rope-0.arrivals", "cache_v_l0"}]
    assert [bound(d, "Angles").name for d in stored[:2]] == [angles.name] * 2
    assert stored[2].kernel.source == "attention/decode/matrix.comp"
    for name, n, rope, separate in (
        (DENSE, 2, "product", False),
        (DENSE, 16, "product", False),
        (DENSE, 48, "product", False),
        (DENSE, 8, "stage", True),
        (DENSE, 65, "product", True),
        (EXPERTS, 8, "product", True),
        (BIASED, 8, "product", False),
        (BIASED, 64, "product", False),
    ):
        ops = [d.op for d in scheduled(large(name), n=n, rope=rope).dispatches()]
        assert ("QKV_ROPE_SET_ROWS" in ops, ops.count("ROPE_ANGLES")) == (separate, 1), (name, n, rope)


def test_few_tokens_are_packed_where_they_are_made(large: Callable[[str], Model]) -> None:
    """By producers, unless the tables leave it to the products, or to stages."""
    for n in (3, 8, 16):
        stages = {pack: scheduled(large(DENSE), n=n, pack=pack) for pack in ("producer", "gemm", "stage")}
        packs = {pack: {d.label for d in s.dispatches() if d.kernel.source == "gemm/pack_units.comp"} for pack, s in stages.items()}
        assert packs["producer"] == {"attn_norm-0.units"}  # of the embedding
        assert packs["gemm"] == packs["producer"] | {"attn_norm-1.units", "ffn_norm-0.units", "kqv_out-0.units"}
        assert packs["stage"] == packs["gemm"] | {"ffn_swiglu-0.units"}
        assert len({len(s.stages) - len(packs[pack]) for pack, s in stages.items()}) == 1


# --- executed -----------------------------------------------------------------------------------------------------------------------

TOKENS = tuple(int(i) for i in np.random.default_rng(101).integers(3, 300, 40))
"""Of 40 draws each by seeds 0 to 116 those whose routers are the surest: in demo-moe the last chosen expert is at least 0.012 before the
next one, gate logits being 1.1 rms. Rounding to f16 moves them by some 0.001; where that takes another expert, all that follows is
another."""

F16 = Tolerance(
    4e-6, 0.02, "x and weights of some thirty products in a row are rounded to f16, each time 1.2e-7 by energy; 0.6e-6 to 1.2e-6 seen"
)


@dataclasses.dataclass(frozen=True)
class Prompt(TokenCase):
    """All of TOKENS at once, through matrices.

    pack       parameter of the [[schedule]] tables
    fragments  the driver's matrices are taken for alike in all kernels
    """

    pack: str = "producer"
    fragments: bool = True

    def context(self, device: Device) -> LowerContext:
        matrix = matrix_shape(device.caps)
        if matrix is None:
            pytest.skip(f"{device.caps.name} has no cooperative matrices")
        rows, columns, _ = matrix
        params: dict[str, dict[str, Any]] = {
            "schedule": {"pack": self.pack, "norm": self.norm, "router": "stage"},
            "gemm": {
                "kernel": "coop_mat",
                "tile_m": 8 * rows,
                "tile_n": 2 * columns,
                "step_k": 32,
                "warp_m": 4 * rows,
                "warp_n": columns,
                "split_k": 1,
            },
            "attention": {"kernel": "matrix", "tile_q": 8 * rows, "tile_kv": 32, "warps": 4},
        }
        ctx = super().context(device)
        return dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, params, "the case's own parameters"), fragments=self.fragments)


@pytest.fixture(scope="module")
def found(device: Device) -> Callable[[Prompt], Array]:
    """Logits of a prompt, worked out once."""
    library, kept = ShaderLibrary(), dict[Prompt, Array]()

    def logits(case: Prompt) -> Array:
        if case not in kept:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(token_cases, "TOKENS", TOKENS)
                kept[case], _ = token_cases.logits(case, Model.open(builtin_model(case.model)), device, library)
        return kept[case]

    return logits


def packing_of(schedule: Schedule) -> Counter[str]:
    """How many dispatches of each kernel store packed activations."""
    args = [(d, a) for d in schedule.dispatches() for a in d.args if a.tensor.type == "F16" and a.tensor.kind == "node"]
    return Counter(Path(d.kernel.source).stem for d, a in args if a.access == "w")


@pytest.mark.vulkan
@pytest.mark.parametrize("fragments", [True, False])
@pytest.mark.parametrize("model", ["demo-dense", "demo-moe"])
def test_logits_are_the_twins(model: str, fragments: bool, found: Callable[[Prompt], Array]) -> None:
    twin = NumpyTwin(Model.open(builtin_model(model)), n_ctx=token_cases.N_CTX).logits(TOKENS)
    verdict = judge(found(Prompt(model, len(TOKENS), "auto", fragments=fragments)), twin, F16)
    assert verdict.ok, verdict.text


@pytest.mark.vulkan
@pytest.mark.parametrize("fragments", [True, False])
@pytest.mark.parametrize("model", ["demo-dense", "demo-moe"])
def test_who_packs_changes_no_bit(model: str, fragments: bool, found: Callable[[Prompt], Array], device: Device) -> None:
    """The same values are rounded to f16, wherever that happens."""
    case = Prompt(model, len(TOKENS), "auto", norm="stage", fragments=fragments)
    packing = packing_of(token_cases.planned(case, Model.open(builtin_model(model)), device))
    assert packing["coop_mat"] > 0 and packing["prompt_matrix"] > 0
    plain = Prompt(model, len(TOKENS), "auto", norm="stage", pack="stage", fragments=fragments)
    for pack in ("gemm", "producer"):
        np.testing.assert_array_equal(found(dataclasses.replace(plain, pack=pack)), found(plain))


BY_EXPERTS: dict[str, Any] = {"kernel": "coop_reg", "tile_m": 32, "tile_n": 8, "warp_m": 16, "slice_k": 2}


def test_a_layer_of_experts_of_few_tokens(large: Callable[[str], Model]) -> None:
    """By registers: the router's kernel makes the route; gate with up takes x as the product before the norm left it, and stores for down;
    the sum of experts. Each expert chosen is read by as many tiles as its slots fill, whatever the number of tokens."""
    for name, n in ((EXPERTS, 2), (EXPERTS, 8), (EXPERTS, 16), (BIASED, 8)):
        ctx = planned_for(H200)
        experts = Overrides(ctx.tuning, {"gemm": BY_EXPERTS}, "test")

        class OfExperts:
            """The parameters for experts alone."""

            def pick(self, family: str, **query: Any) -> Choice:
                tables = experts if query.get("experts", "none") != "none" else ctx.tuning  # noqa: B023
                return tables.pick(family, **query)

        schedule = plan(large(name).graph(n, 1024, head="none"), dataclasses.replace(ctx, tuning=OfExperts()))
        up, down = (d for d in schedule.dispatches() if d.kernel.source == "gemm/coop_reg_experts.comp" and "-0" in d.label)
        topk = next(d for d in schedule.dispatches() if d.label == "ffn_moe_weights-0")
        op, at = ("NORM_ROUTE", 6) if n >= 6 else ("TOPK_ROUTE", 3)
        assert topk.op == op and bound(up, "Route") == bound(down, "Route") == topk.args[at].tensor
        assert bound(down, "X") == bound(up, "Y") and bound(up, "Y").type == "F16"
        used, all_experts = (8, 128) if name == EXPERTS else (4, 32)
        chosen = min(n * used, all_experts)
        rows = {True: 1536, False: 5760}[name == EXPERTS]
        assert up.groups[0] == rows // 32 * (chosen + (n * used - chosen) // 8)
        stage = next(i for i, s in enumerate(schedule.stages) if down in s)
        assert stage in schedule.barrier_free and not any(Path(d.kernel.source).stem == "route" for d in schedule.dispatches())
        if name == EXPERTS:
            assert bound(up, "X").name == "ffn_norm-0.units" and specialized(up, "X_FN") == (8 if n <= 8 else 16)
