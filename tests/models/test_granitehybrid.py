"""The granitehybrid architecture: its graph and stages, states across prompts, generation and rewinding, broken files."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.sampler import add_sampler
from vkback.evaluate.judge import nmse
from vkback.evaluate.twin import NumpyTwin
from vkback.gguf.file import GgufFile
from vkback.models import GgufError, Model
from vkback.models.registry import architecture
from vkback.models.synth import planned_tensors, synthesize, synthetic_size
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.units import params_text, size_text

FLOAT_NMSE = 1e-6
"""Float path, as in test_engine.py."""

NAMES = ("tiny-granitehybrid", "tiny-granitehybrid-moe")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("granite") / f"{name}.gguf" for name in NAMES}
    for name, path in made.items():
        synthesize(f"{name}-Q8_0", path)
    return made


def tokens(n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(0).integers(0, 300, n)]


# --- graph and plan -----------------------------------------------------------------------------------------------------------------


def test_layers(paths: dict[str, Path]) -> None:
    graph = Model.open(paths["tiny-granitehybrid"]).graph(2, 32, head="all")
    assert [n.name for n in graph.nodes if n.name.endswith("-1")] == [
        "attn_rms-1",
        "attn_norm-1",
        "zxBCdt-1",
        "xBC-1",
        "ssm_scan-1",
        "ssm_rms-1",
        "ssm_norm-1",
        "mamba_out-1",
        "ffn_inp-1",
        "ffn_rms-1",
        "ffn_norm-1",
        "ffn_gate-1",
        "ffn_up-1",
        "ffn_swiglu-1",
        "ffn_out-1",
        "l_out-1",
    ]
    by_name = {n.name: n for n in graph.nodes}
    assert by_name["kqv_out-2"].params["scale"] == pytest.approx(0.15)
    assert not any(n.op == "ROPE" for n in graph.nodes), "rope.scaling.finetuned is false"
    assert by_name["inp_scaled"].params["scale"] == pytest.approx(12 / 0.22)
    assert by_name["attn_rms-1"].params["eps"] == pytest.approx(1e-5 / 0.22**2)
    assert by_name["ssm_rms-1"].params["eps"] == pytest.approx(1e-5)
    assert {t.name: t.shape for t in graph.tensors().values() if t.kind == "state"} == {
        **{f"cache_conv_l{il}": (4, 272) for il in (0, 1, 3)},
        **{f"cache_ssm_l{il}": (2, 12, 16, 20) for il in (0, 1, 3)},
        "cache_k_l2": (1, 32, 32),
        "cache_v_l2": (1, 32, 32),
    }


def decode_schedule(model: Model, profile: str) -> Schedule:
    graph = model.graph(1, 4096, head="last")
    add_sampler(graph, greedy=True)
    return plan(graph, planned_for(profile))


@pytest.mark.parametrize(
    ("name", "description", "size", "params", "labels"),
    [
        (
            "granite-4-h-1b-Q4_K_S",
            "granitehybrid 1B Q4_K - Small",
            "828.80 MiB",
            "1.46 B",
            [["zxBCdt-1"], ["ssm_scan-1"], ["ffn_inp-1"], ["ffn_swiglu-1"], ["l_out-1"]],
        ),
        (
            "granite-4-h-tiny-Q4_K_S",
            "granitehybrid 7B.A1B Q4_K - Small",
            "3.72 GiB",
            "6.94 B",
            [
                ["zxBCdt-1"],
                ["ssm_scan-1"],
                ["ffn_inp-1"],
                ["ffn_shexp_swiglu-1", "ffn_moe_logits-1"],
                ["ffn_shexp_swiglu-1.q8_1", "ffn_moe_swiglu-1"],
                ["ffn_shared-1", "ffn_moe_swiglu-1.q8_1"],
                ["l_out-1"],
            ],
        ),
    ],
)
def test_stages_of_a_published_model(
    name: str, description: str, size: str, params: str, labels: list[list[str]], models: Callable[[str], Model]
) -> None:
    model = models(name)
    assert model.description == description
    nbytes, elements = synthetic_size(name)
    assert (size_text(nbytes), params_text(elements)) == (size, params)
    s = decode_schedule(model, "nvidia_h200_linux")
    begin = next(i for i, stage in enumerate(s.stages) if stage[0].label == "zxBCdt-1")
    assert [[d.label for d in stage] for stage in s.stages[begin : begin + len(labels)]] == labels
    assert Counter(d.op for d in s.dispatches())["SSM_CONV_SCAN"] == 36
    assert {d.kernel.source for d in s.dispatches() if d.label == "zxBCdt-1"} == {"gemv/gemv.comp"}
    spun = {d.label for i in s.barrier_free for d in s.stages[i]}
    assert {"ssm_scan-1", "ffn_inp-1"} <= spun, "the recurrence needs no barrier before or after it"


@pytest.mark.parametrize("profile", ["llvmpipe_mesa_22_debian12", "broadcom_v3d_7_1_pi5", "apple_m1_honeykrisp", "nvidia_h200_linux"])
@pytest.mark.parametrize("name", NAMES)
def test_the_tiny_models_plan_for_any_device(profile: str, name: str, paths: dict[str, Path]) -> None:
    ops = Counter(d.op for d in decode_schedule(Model.open(paths[name]), profile).dispatches())
    fused = planned_for(profile).caps.max_storage_bindings > 8
    assert ops["SSM_CONV_SCAN" if fused else "SSM_SCAN"] == {"tiny-granitehybrid": 3, "tiny-granitehybrid-moe": 2}[name]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ssm.time_step_rank", 7, r"ssm\.time_step_rank is 7, expected a number of heads that divides ssm\.inner_size, 192"),
        ("ssm.group_count", 5, r"ssm\.group_count is 5, expected a divisor of the 12 heads"),
        ("ssm.state_size", 18, r"ssm\.state_size is 18, expected a multiple of 4"),
        ("ssm.state_size", None, r"ssm\.state_size is missing"),
        ("ssm.conv_kernel", 1, r"ssm\.conv_kernel is 1, expected at least 2"),
        ("residual_scale", -1.0, r"residual_scale is -1\.0, expected a positive number"),
        ("attention.head_count_kv", np.array([0, 0, 1]), r"head_count_kv is 3 values of int64 from 0, expected 4 integers, at least 0"),
        ("attention.head_count_kv", np.array([0, 0, 1, 1]), r"tensor blk\.3\.attn_q\.weight is missing"),
        ("ssm.state_size", 24, r"tensor blk\.0\.ssm_in\.weight has shape \[476, 96\], the hyperparameters say \[492, 96\]"),
    ],
)
def test_broken_metadata_is_named(key: str, value: Any, message: str, paths: dict[str, Path]) -> None:
    f = GgufFile.open(paths["tiny-granitehybrid"])
    metadata = {**f.metadata, f"granitehybrid.{key}": value}
    broken = dataclasses.replace(f, metadata={k: v for k, v in metadata.items() if v is not None})
    with pytest.raises(GgufError, match=message):
        architecture(broken).graph(1, 8, head="all")


@pytest.mark.parametrize(
    ("width", "n_ff", "size"), [(768, 2048, "350M"), (1536, 4096, "1B"), (1536, 512, "7B.A1B"), (2048, 8192, "3B"), (4096, 768, "32B.A9B")]
)
def test_size_classes(width: int, n_ff: int, size: str, paths: dict[str, Path]) -> None:
    f = GgufFile.open(paths["tiny-granitehybrid"])
    changed = {"granitehybrid.embedding_length": width, "granitehybrid.feed_forward_length": n_ff}
    found = Model(dataclasses.replace(f, metadata={**f.metadata, **changed}), architecture(f))
    assert found.description == f"granitehybrid {size} Q8_0"


def test_small_tensors_of_a_recurrence_are_f32() -> None:
    types = {t.name: t.type for t in planned_tensors("granite-4-h-1b-Q4_K_S", layers=1)}
    f32 = {"ssm_a", "ssm_d", "ssm_dt.bias", "ssm_conv1d.bias", "ssm_conv1d.weight"}
    f32 |= {"ssm_norm.weight", "attn_norm.weight", "ffn_norm.weight"}
    assert {name.removeprefix("blk.0.") for name, type in types.items() if type == "F32"} == {*f32, "output_norm.weight"}


# --- on a device --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(paths: dict[str, Path], device: Device) -> Iterator[Engine]:
    with Engine.load(paths["tiny-granitehybrid"], device, n_ctx=128, act="f32", ubatch=32, progress=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def twin(paths: dict[str, Path]) -> NumpyTwin:
    return NumpyTwin(paths["tiny-granitehybrid"], n_ctx=128)


@pytest.mark.vulkan
def test_a_prompt_of_several_programs_and_then_tokens(engine: Engine, twin: NumpyTwin) -> None:
    """75 tokens in programs of 32, 32 and 16 with padding, then tokens, then a second prompt of an even and one of an odd length."""
    ids = tokens(100)
    want = twin.logits(ids)
    engine.reset()
    got = [engine.prompt_logits(ids[:75]), *(engine.decode_logits(t)[None] for t in ids[75:80])]
    got += [engine.prompt_logits(ids[80:90]), engine.prompt_logits(ids[90:97]), *(engine.decode_logits(t)[None] for t in ids[97:])]
    assert nmse(np.concatenate(got), want) <= FLOAT_NMSE


@pytest.mark.vulkan
@pytest.mark.parametrize("when", [(0,), (2,), (2, 3)])
def test_tokens_that_run_again_find_the_states_of_those_before(
    when: tuple[int, ...], paths: dict[str, Path], device: Device, twin: NumpyTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an overflow of f16, in which run of a program it may be, one of the repeated ones, too."""
    text = tokens(40)
    with Engine.load(paths["tiny-granitehybrid"], device, n_ctx=64, act="f32", progress=False, ubatch=16) as engine:
        found = iter([{"x.overflow": 1e5} if run in when else {} for run in range(100)])
        monkeypatch.setattr(engine._prompts, "_overflowed", lambda recording: next(found))
        engine.prompt(text[:16])
        got = engine.prompt_logits(text[16:])
        assert engine.n_past == len(text) and engine.ctx.f16_scales
        assert nmse(got, twin.logits(text)[16:]) <= FLOAT_NMSE


@pytest.mark.vulkan
def test_a_new_sequence_forgets_the_old_one(engine: Engine) -> None:
    ids = tokens(20)
    engine.reset()
    want = [engine.decode_logits(t) for t in ids]
    engine.reset()
    assert np.array_equal(np.array([engine.decode_logits(t) for t in ids]), want)
    engine.reset()
    first = engine.prompt_logits(ids)
    engine.reset()
    assert np.array_equal(engine.prompt_logits(ids), first)


@pytest.mark.vulkan
def test_preparing_in_the_middle_of_a_text_changes_nothing(engine: Engine) -> None:
    """It runs a token at the first free position, and padding."""
    ids = tokens(12)
    engine.reset()
    want = [engine.decode_logits(t) for t in ids]
    engine.reset()
    got = [engine.decode_logits(t) for t in ids[:7]]
    engine.prepare(prompt=16, logits=True)
    assert np.array_equal(np.array([*got, *(engine.decode_logits(t) for t in ids[7:])]), want)


@pytest.mark.vulkan
def test_greedy_text_is_the_twin_s(engine: Engine, twin: NumpyTwin) -> None:
    ids = tokens(19)
    want, margins = twin.generate_greedy(ids, 40)
    sure = next((i for i, margin in enumerate(margins) if margin < 1e-3), 40)
    assert sure >= 10
    engine.reset()
    engine.prompt(ids[:-1])
    assert list(engine.generate(ids[-1], 40))[:sure] == want[:sure]


@pytest.mark.vulkan
@pytest.mark.parametrize("taken", [1, 8, 11])
def test_a_generation_left_early_is_rewound(taken: int, engine: Engine, twin: NumpyTwin) -> None:
    """The device is up to two submits ahead of the tokens that were taken: its states have seen tokens that the text does not have."""
    ids = tokens(9)
    engine.reset()
    engine.prompt(ids[:-1])
    text = engine.generate(ids[-1], 40)
    made = [next(text) for _ in range(taken)]
    text.close()
    assert engine.n_past == len(ids) - 1 + taken
    fed = [*ids, *made[:-1]]
    more = tokens(30)[20:]
    want = twin.logits([*fed, *more])[len(fed) :]
    assert nmse(np.stack([engine.decode_logits(t) for t in more]), want) <= FLOAT_NMSE


@pytest.mark.vulkan
@pytest.mark.parametrize("barrier_free", ["gemv"], indirect=True)
def test_barrier_free_stages_change_no_bit(barrier_free: None, paths: dict[str, Path], engine: Engine) -> None:
    ids = tokens(20)
    engine.reset()
    want = [engine.decode_logits(t) for t in ids]
    with Engine.load(paths["tiny-granitehybrid"], engine.device, n_ctx=128, act="f32", progress=False) as free:
        assert free.schedule().barrier_free
        assert np.array_equal([free.decode_logits(t) for t in ids], want)
        assert free.schedule().barrier_free
