"""Batch-invariant mode: what plans for one and for many tokens have in common, and that a token's logits keep their bits however many go
with it, for every architecture. bench/exact.py does the same with any model, n = 1 to 16 and long prompts."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from kernel_paths import planned_for
from tiny_models import OF_A_KIND, TINY, of_a_kind

from vkback.api.model import LoadedModel
from vkback.api.options import GenerateOptions
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.snapshot import StateError
from vkback.models import Model
from vkback.models.synth import synthesize
from vkback.ops.dispatch import Dispatch
from vkback.paths import builtin_models
from vkback.plan.exact import exact_context, without_logits
from vkback.plan.planner import plan
from vkback.shader import ShaderLibrary, Variant
from vkback.shader.contraction import as_written, instructions

BUILT_IN = {p.stem: p for p in builtin_models()}
VARIETIES = ("tiny-deepseek2-legacy", "tiny-deepseek2-sigmoid", "tiny-phi3-long")
"""Shapes that differ from another of their architecture in what each token has by itself: plans of them are compared, but not run."""
N_CTX = 96

COUNTS_OF_TOKENS = {("gemv/gemv.comp", "COLS"), ("ssm/scan.comp", "TILE"), ("ssm/delta_net.comp", "TILE")}
COUNTS_OF_TOKENS |= {("ssm/short_conv.comp", "ONE"), ("ssm/short_conv.comp", "STORE")}
"""Columns of a GEMV, of which each has its own sums; tokens whose inputs a scan holds at once, one after the other; whether the kernel of a
short convolution stores a token's input itself, as that of one token does, or another stage. Its sum is the same."""

BY_VALUE = ("quantize/quantize.comp", "rows/get_rows.comp", "gemm_f32/slices.comp", "altup/altup.comp")
"""Kernels that add nothing up but over lanes of a unit, or the streams of a value: they may have more threads for more tokens."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("exact")

    def get(name: str) -> Path:
        if name in BUILT_IN:
            return BUILT_IN[name]
        path = folder / f"{name}.gguf"
        if not path.exists():
            synthesize(f"{name}-Q8_0", path)
        return path

    return get


def kernels(dispatches: Iterable[Dispatch]) -> dict[str, Variant]:
    """By node and source, less what a node of one token has no need of: copies of a part, and of a vector for each token."""
    moves = ("CONT", "CPY", "REPEAT", "CONCAT")
    return {f"{d.label} {d.kernel.source}": d.kernel for d in dispatches if d.op not in moves}


@pytest.mark.parametrize(
    "profile",
    [
        "nvidia_h200_linux",
        "amd_rx_7900_xtx_radv",
        "llvmpipe_mesa_22_debian12",
        pytest.param("broadcom_v3d_7_1_pi5", marks=pytest.mark.exhaustive),
    ],
)
def test_many_tokens_run_in_the_kernels_of_one(profile: str, paths: Callable[[str], Path]) -> None:
    ctx = exact_context(planned_for(profile))
    for name in (*(TINY if profile == "nvidia_h200_linux" else sorted(OF_A_KIND)), *BUILT_IN):
        model = Model.open(paths(name))
        graphs = [model.graph(n, N_CTX, head="all") for n in (1, 2, 16, 64)]
        one, *more = (kernels(plan(graph, ctx).dispatches()) for graph in (*graphs, without_logits(graphs[-1])))
        for number, many in enumerate(more):
            assert many.keys() == one.keys() if number < len(graphs) - 1 else many.keys() < one.keys(), name
            for key, kernel in many.items():
                assert kernel.as_written
                assert (kernel.source, kernel.subgroup_size, kernel.spec) == (one[key].source, one[key].subgroup_size, one[key].spec)
                mine, other = dict(kernel.defines), dict(one[key].defines)
                differ = {(kernel.source, define) for define in mine.keys() | other.keys() if mine.get(define) != other.get(define)}
                differ -= {(source, "WG_SIZE") for source in BY_VALUE}
                assert differ <= COUNTS_OF_TOKENS, f"{name}: {key}"


def test_arithmetic_is_decorated_once(library: ShaderLibrary) -> None:
    variant = Variant("norm/norm.comp", tuple(plan_defines()))
    plain = library.spirv(variant)
    written = library.spirv(Variant(variant.source, variant.defines, as_written=True))
    words = [struct.unpack(f"<{len(spirv) // 4}I", spirv) for spirv in (plain, written)]
    decorated = {words[1][at + 1] for at, op, _ in instructions(words[1]) if op == 71 and words[1][at + 2] == 42}
    sums = {words[1][at + 2] for at, op, _ in instructions(words[1]) if op in (129, 131, 133, 136, 142, 148)}
    assert len(sums) > 3 and sums <= decorated
    assert as_written(written) == written
    assert len(words[1]) == len(words[0]) + 3 * len(decorated)
    assert library.spirv(variant) == plain, "the plain module stays what it was"


def plan_defines() -> list[tuple[str, str | int]]:
    """Of a norm in the plan of a model."""
    schedule = plan(Model.open(BUILT_IN["demo-dense-Q4_K_M"]).graph(1, N_CTX, head="all"), exact_context(planned_for("nvidia_h200_linux")))
    return list(next(d.kernel.defines for d in schedule.dispatches() if d.kernel.source == "norm/norm.comp"))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.vulkan
@pytest.mark.parametrize("name", of_a_kind([name for name in TINY if name not in VARIETIES]))
def test_logits_do_not_depend_on_what_goes_with_a_token(name: str, paths: Callable[[str], Path], device: Device) -> None:
    """Tokens one at a time, two at a time with padding in the last two, and in other cuts after a state was restored."""
    with Engine.load(paths(name), device, n_ctx=N_CTX, progress=False, ubatch=2, exact=True) as engine:
        ids = np.random.default_rng(3).integers(engine.model.hp.n_vocab, size=11).tolist()
        alone = np.stack([engine.decode_logits(t) for t in ids])
        assert len(np.unique(alone, axis=0)) == len(ids)
        engine.reset()
        assert same_bits(engine.prompt_logits(ids), alone)
        engine.reset()
        engine.prompt(ids[:5])
        snapshot = engine.snapshot()
        engine.reset()
        engine.prompt(ids[::-1])
        engine.restore(snapshot)
        rest = [engine.decode_logits(ids[5])[None], engine.prompt_logits(ids[6:8]), engine.prompt_logits(ids[8:])]
        assert same_bits(np.concatenate(rest), alone[5:])


@pytest.mark.vulkan
@pytest.mark.parametrize("name", BUILT_IN)
def test_prompts_text_and_states_of_the_built_in_models(name: str, paths: Callable[[str], Path], device: Device, tmp_path: Path) -> None:
    """Programs of two tokens, one with padding; text after a prompt that was read at once, token by token, and from a state."""
    with Engine.load(paths(name), device, n_ctx=N_CTX, progress=False, ubatch=2, exact=True) as engine:
        ids = np.random.default_rng(4).integers(engine.model.hp.n_vocab, size=25).tolist()
        alone = np.stack([engine.decode_logits(t) for t in ids])
        engine.reset()
        assert same_bits(engine.prompt_logits(ids), alone)
        one = kernels(engine.schedule("decode").dispatches())
        for _, filling in engine.prompt_schedules(len(ids)):
            assert kernels(filling.dispatches()).keys() < one.keys(), "the last layer's keys are made as with logits"
        model = LoadedModel(engine)
        options: GenerateOptions = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
        text = model.generate(ids, **options).tokens
        session = model.session()
        # Other cuts of the same text: what was read is read no second time.
        session.generate(ids[:9], max_tokens=1, temperature=0.0, ignore_eos=True)
        cut = [*session.tokens, *ids]
        once = model.generate(cut, **options).tokens
        session.save(tmp_path / "state")
        fork = session.fork()
        assert session.generate(ids, **options).tokens == once == fork.generate(ids, **options).tokens
        restored = model.session()
        restored.load(tmp_path / "state")
        assert restored.generate(ids, **options).tokens == once
        assert model.generate(ids, **options).tokens == text
    plain = Engine.load(paths(name), device, n_ctx=N_CTX, progress=False)
    with LoadedModel(plain) as other, pytest.raises(StateError, match="exact: True, here False"):
        other.session().load(tmp_path / "state")
