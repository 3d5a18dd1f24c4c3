"""Picking tokens of several sequences at once: each column as SAMPLE picks it alone, and steps that go on without the host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from kernel_paths import planned_for, with_params, without_subgroups

from vkback.device import BufferRange, Device
from vkback.errors import VkbackError
from vkback.graph import Graph, Node, Tensor
from vkback.harness.runner import run_case, run_problem
from vkback.ops.case import Array, Case, Problem
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.ops.sampling.columns import KINDS, LOOP_LIMIT, STATUS_LENGTH, STATUS_NO_PAGE, SampleColumns
from vkback.ops.sampling.penalties import SEEN_COUNTS, Penalties, mask_words
from vkback.ops.sampling.sample import LOOP_RING, STATUS_EOS, Params
from vkback.ops.storage import nbytes
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule, allocate, into_stages
from vkback.program import Program
from vkback.shader import ShaderLibrary

COLUMNS = SampleColumns()
CASES = list(COLUMNS.cases())
PAGE, CAPACITY = 4, 8


@pytest.mark.vulkan
@pytest.mark.parametrize("case", [c for c in CASES if c.params["vocab"] <= 5003 and c.params["n"] > 2], ids=lambda c: c.line)
@pytest.mark.parametrize(("wg_size", "per_thread"), [(32, 4), (256, 2)])
def test_many_workgroups(case: Case, wg_size: int, per_thread: int, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, case, with_params(ctx, wg_size=wg_size, per_thread=per_thread))
    assert outcome.ok, outcome.text


@pytest.mark.vulkan
@pytest.mark.parametrize("kind", KINDS)
def test_without_subgroups(kind: str, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    outcome = run_case(device, library, COLUMNS.build_case(300, 3, False, kind), without_subgroups(ctx))
    assert outcome.ok, outcome.text


def flat_logits(n: int, vocab: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Where the choice is close: few values, most of them again and again, so that filters and draws decide among equals."""
    return np.round(4 * rng.standard_normal((n, vocab))).astype(np.float32) / np.float32(8)


@pytest.mark.vulkan
@pytest.mark.parametrize(("n", "vocab"), [(1, 1000), (2, 5003), (5, 32000), (16, 1000), (64, 1000), (3, 151936)])
def test_a_column_picks_what_sample_picks(n: int, vocab: int, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Token for token, also where a choice is too close for the reference to tell: the bits are the same."""
    rng = np.random.default_rng(n)
    problem = COLUMNS.build_case(vocab, n, False, "runs").build()
    values = problem.values
    values["result_output"] = flat_logits(n, vocab, rng)
    for t, slot in enumerate(values["slots"]):
        temp, top_k = (0.0 if t % 7 == 6 else float(rng.uniform(0.2, 2.0))), int(rng.choice([0, 5, 40, 700]))
        sampler = Params(temp, top_k, float(rng.uniform(0.3, 1.2)), float(rng.choice([0.0, 0.1])), int(rng.integers(2**32)), ())
        values["loops"][slot, :LOOP_RING] = sampler.words(0)
    got = run_problem(device, library, problem, ctx)["tokens"]
    state = tuple(Tensor(name, "I32", (size,), "input") for name, size in (("loop", LOOP_RING + 5), ("tokens", 1), ("pos", 1)))
    node = Node("SAMPLE", (Tensor("result_output", "F32", (1, vocab)), *state), state, {"capacity": 5, "greedy": False})
    alone = []
    for t, slot in enumerate(values["slots"]):
        row = {name: values[name][t : t + 1] for name in ("result_output", "tokens", "pos")}
        alone.append(int(run_problem(device, library, Problem(node, {**row, "loop": values["loops"][slot]}), ctx)["tokens"][0]))
    assert got.tolist() == alone
    assert n == 1 or len(set(alone)) > 1


def columns_node(n: int, vocab: int, n_slots: int, max_pages: int, *, greedy: bool = False) -> Node:
    shapes = {"loops": (n_slots, LOOP_RING + CAPACITY), **{name: (n,) for name in ("tokens", "pos", "rows", "slots", "draws")}}
    state = tuple(Tensor(name, "I32", shape, "input") for name, shape in {**shapes, "pages": (n_slots, max_pages)}.items())
    logits = Tensor("logits", "F32", (n, vocab), "input")
    return Node("SAMPLE_COLUMNS", (logits, *state), state[:4], {"capacity": CAPACITY, "page": PAGE, "greedy": greedy})


def run_steps(
    device: Device, library: ShaderLibrary, ctx: LowerContext, nodes: list[Node], values: dict[str, Array], submits: list[int]
) -> dict[str, Array]:
    """The inputs after submits of so many steps each, all of the same logits."""
    stages = into_stages([d for node in nodes for d in OPS[node.op].lower(node, ctx)])
    inputs = {t.name: t for node in nodes for t in node.inputs if t.kind == "input"}
    slots, size = allocate(stages)
    with device.arena("columns", 1 << 20, "device") as arena:
        ranges: dict[str, BufferRange] = {}
        for t in inputs.values():
            ranges[t.name] = arena.alloc(nbytes(t), t.name)
            device.upload(ranges[t.name], np.ascontiguousarray(values[t.name]).reshape(-1).view(np.uint8))
        program = Program(device, library, Schedule(stages, slots, size), ranges, {})
        for repeat in submits:
            device.submit(program.record(f"x{repeat}", repeat=repeat)).wait(60)
        out = {t.name: device.download(ranges[t.name]).view(np.int32).reshape(t.shape) for t in inputs.values()}
        program.close()
    return out


def looped(samplers: list[Params], limits: list[int]) -> npt.NDArray[np.int32]:
    loops = np.stack([s.words(CAPACITY) for s in samplers])
    loops[:, LOOP_LIMIT] = limits
    return loops


@pytest.mark.vulkan
@pytest.mark.parametrize("greedy", [True, False])
def test_columns_end_one_by_one(greedy: bool, device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Eight steps: one column reaches its limit, one the end of its text, one the end of its pages, one goes on, one is a hole. What ended
    stays as it was, and neither the number of steps in a submit nor the others change a text."""
    n, vocab = 5, 200
    temp = 0.0 if greedy else 1.0
    node = columns_node(n, vocab, n, 4, greedy=greedy)
    logits = np.random.default_rng(3).standard_normal((n, vocab)).astype(np.float32)
    logits[1, 41] = 60.0
    samplers = [Params(temp, 0, 1.0, 0.0, seed, (41,) if seed == 1 else ()) for seed in range(n)]
    values: dict[str, Array] = {
        "logits": logits,
        "loops": looped(samplers, [3, 0, 0, 0, 0]),
        "tokens": np.full(n, 7, np.int32),
        "pos": np.array([1, 1, 2, 1, -1], np.int32),
        "rows": np.array([17, 33, 50, 65, -1], np.int32),
        "slots": np.array([0, 1, 2, 3, 3], np.int32),
        "draws": np.ones(n, np.int32),
        "pages": np.array([[4, 0, 1, 2], [8, 3, 5, 6], [12, 7, -1, -1], [16, 9, 30, 10], [0, 0, 0, 0]], np.int32),
    }
    got = run_steps(device, library, ctx, [node], values, [8])
    assert got["loops"][:, :2].tolist() == [[3, STATUS_LENGTH], [1, STATUS_EOS], [6, STATUS_NO_PAGE], [8, 0], [0, 0]]
    assert got["pos"].tolist() == [-1, -1, -1, 9, -1]
    assert got["rows"].tolist() == [-1, -1, -1, 30 * PAGE + 1, -1]
    assert got["tokens"][1] == 41 and got["tokens"][4] == 7
    assert got["loops"][2, LOOP_RING + 5] == got["tokens"][2], "the token that found no page is made all the same"
    one_by_one = run_steps(device, library, ctx, [node], values, [1, 3, 1, 1, 2])
    for name, state in got.items():
        np.testing.assert_array_equal(state, one_by_one[name], name)
    alone = {**values, "pos": np.array([-1, -1, -1, 1, -1], np.int32)}
    np.testing.assert_array_equal(run_steps(device, library, ctx, [node], alone, [8])["loops"][3], got["loops"][3])


@pytest.mark.vulkan
@pytest.mark.parametrize(("n", "vocab", "masked"), [(5, 1000, False), (16, 77, True), (3, 32000, True)])
def test_penalties_of_a_column_are_those_of_one_text(
    n: int, vocab: int, masked: bool, device: Device, library: ShaderLibrary, ctx: LowerContext
) -> None:
    """Bit for bit, logits as well as counts."""
    problem = OPS["PENALTIES_COLUMNS"].case({"vocab": vocab, "n": n, "masked": masked, "mixed": False}).build()
    values = problem.values
    got = run_problem(device, library, problem, ctx)
    for t, slot in enumerate(values["slots"]):
        own = {"result_output": values["result_output"][t : t + 1], "tokens": values["tokens"][t : t + 1], "pos": values["pos"][t : t + 1]}
        own |= {name: values[name][slot] for name in ("bias", "seen", "mask") if name in values} | {"loop": values["loops"][slot]}
        inputs = {name: Tensor(name, "F32" if v.dtype == np.float32 else "I32", v.shape, "input") for name, v in own.items()}
        names = ("result_output", "bias", "seen", "loop", "tokens", "pos", *(("mask",) if masked else ()))
        node = Node("PENALTIES", tuple(inputs[name] for name in names), (Tensor("y", "F32", (1, vocab)), inputs["seen"]))
        alone = run_problem(device, library, Problem(node, own), ctx)
        np.testing.assert_array_equal(got["y"][t], alone["y"][0])
        np.testing.assert_array_equal(got["seen"][slot], alone["seen"])


@pytest.mark.vulkan
def test_penalties_go_on_from_step_to_step(device: Device, library: ShaderLibrary, ctx: LowerContext) -> None:
    """Ten greedy steps of the same logits, sequences in other slots than columns: one may not repeat itself, one not what it said in its
    last three tokens, one has no penalties."""
    n, vocab, rows, slots = 3, 60, 24, [2, 0, 3]
    sample = columns_node(n, vocab, 4, 6, greedy=True)
    logits, loops, tokens, pos, _, of, draws, _ = sample.inputs
    bias = Tensor("bias", "F32", (4, vocab), "input")
    seen = Tensor("seen", "I32", (4, SEEN_COUNTS + vocab + rows), "input")
    penalized = Tensor("penalized", "F32", (n, vocab))
    penalties = Node("PENALTIES_COLUMNS", (logits, bias, seen, loops, tokens, pos, of, draws), (penalized, seen))
    used = [Penalties(1.0, 100.0, 0.0, rows), Penalties(1.0, 100.0, 0.0, 3), Penalties(1.0, 0.0, 0.0, 0)]
    words = np.zeros((4, SEEN_COUNTS + vocab + rows), np.int32)
    for slot, each in zip(slots, used, strict=True):
        words[slot] = each.words([5], vocab, rows)
    values: dict[str, Array] = {
        "logits": np.random.default_rng(4).standard_normal((n, vocab)).astype(np.float32),
        "bias": np.zeros((4, vocab), np.float32),
        "seen": words,
        "loops": looped([Params(0.0, 0, 1.0, 0.0, 0, ())] * 4, [7, 0, 0, 0]),
        "tokens": np.full(n, 9, np.int32),
        "pos": np.ones(n, np.int32),
        "rows": np.ones(n, np.int32),
        "slots": np.array(slots, np.int32),
        "draws": np.ones(n, np.int32),
        "pages": np.arange(24, dtype=np.int32).reshape(4, 6),
    }
    nodes = [penalties, replace(sample, inputs=(penalized, *sample.inputs[1:]))]
    got = run_steps(device, library, ctx, nodes, values, [2, 5])
    texts = [got["loops"][slot, LOOP_RING : LOOP_RING + 7].tolist() for slot in slots]
    best = [np.argsort(-row, kind="stable") for row in values["logits"]]
    allowed = [i for i in best[0].tolist() if i not in (5, 9)]
    assert texts[0] == allowed[:7]
    assert texts[2] == [int(best[2][0])] * 7
    for step in range(7):
        assert texts[1][step] not in [5, 9, *texts[1]][max(0, step - 1) : step + 2]
    assert got["loops"][slots[1], 1] == STATUS_LENGTH and got["pos"].tolist() == [8, -1, 8]
    assert got["seen"][slots[0], SEEN_COUNTS : SEEN_COUNTS + vocab].sum() == 8, "of nine tokens all but the last have been counted"
    assert not got["seen"][1].any(), "of a slot without a column"


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (columns_node(4, 2**18 + 1, 4, 2), "262145 tokens, sampling takes at most 262144; use temperature 0"),
        (replace(columns_node(4, 100, 4, 2), params={"capacity": 9, "page": 4}), "expected 41 words for a ring of 9"),
        (replace(columns_node(4, 100, 4, 2), params={"capacity": CAPACITY, "page": 0}), "at least one row in a page"),
        (
            replace(columns_node(4, 100, 4, 2), inputs=(Tensor("logits", "F32", (5, 100)), *columns_node(4, 100, 4, 2).inputs[1:])),
            "5 columns",
        ),
    ],
)
def test_what_is_refused(node: Node, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        COLUMNS.lower(node, planned_for("nvidia_h200_linux"))


def test_what_the_device_cannot_bind_is_refused() -> None:
    """300 columns of the largest vocabularies exceed the 128 MiB that every device binds."""
    ctx = planned_for("llvmpipe_mesa_22_debian12")
    small = replace(ctx, caps=replace(ctx.caps, max_storage_buffer_range=1 << 27))
    graph = Graph([columns_node(300, 151936, 300, 4, greedy=True)], ())
    with pytest.raises(VkbackError, match=r"logits.* takes 182323200 bytes, the device binds at most 134217728"):
        plan(graph, small, fusion="all")
    assert plan(graph, replace(small, caps=replace(ctx.caps, max_storage_buffer_range=1 << 28)), fusion="all").stages


def penalties_node(n: int, vocab: int, n_slots: int, rows: int, words: int | None = None) -> Node:
    """words: of each slot's mask."""
    shapes: dict[str, tuple[int, ...]] = {"bias": (n_slots, vocab), "seen": (n_slots, SEEN_COUNTS + vocab + rows)}
    shapes |= {"loops": (n_slots, LOOP_RING + CAPACITY), **{name: (n,) for name in ("tokens", "pos", "slots", "draws")}}
    shapes |= {"mask": (n_slots, words)} if words is not None else {}
    state = [Tensor(name, "F32" if name == "bias" else "I32", shape, "input") for name, shape in shapes.items()]
    return Node("PENALTIES_COLUMNS", (Tensor("logits", "F32", (n, vocab)), *state), (Tensor("y", "F32", (n, vocab)), state[1]))


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (penalties_node(4, 100, 5, 0), "and in seen 4 words, as many counts, and the text"),
        (penalties_node(4, 100, 5, 9, 3), "one mask of 5 times 4 words or none"),
        (
            replace(penalties_node(4, 100, 5, 9), inputs=(Tensor("logits", "F32", (5, 100)), *penalties_node(4, 100, 5, 9).inputs[1:])),
            "5 columns",
        ),
        (penalties_node(4, 151936, 128, 131072), "seen.*: 144902144 bytes, .* binds at most 134217728 .*; take fewer slots"),
        (penalties_node(256, 151936, 4, 4096), "logits.*: 155582464 bytes, .* binds at most 134217728 .*; take fewer columns"),
    ],
    ids=["no text", "mask", "columns", "slots beyond the range", "columns beyond the range"],
)
def test_penalties_that_are_refused(node: Node, text: str) -> None:
    ctx = planned_for("llvmpipe_mesa_22_debian12")
    with pytest.raises(PlanError, match=text):
        OPS[node.op].lower(node, replace(ctx, caps=replace(ctx.caps, max_storage_buffer_range=1 << 27)))
    fits = penalties_node(4, 100, 5, 9, mask_words(100))
    assert len(OPS[node.op].lower(fits, ctx)) == 1


def test_greedy_is_one_dispatch_and_all_columns_share_dispatches() -> None:
    ctx = planned_for("nvidia_h200_linux")
    for n in (1, 64):
        assert len(COLUMNS.lower(columns_node(n, 128256, n, 4, greedy=True), ctx)) == 1
        sampled = COLUMNS.lower(columns_node(n, 128256, n, 4), ctx)
        assert len(into_stages(sampled)) == 3 and {d.groups[1] for d in sampled} == {n}


def test_one_token_binds_no_more_than_before() -> None:
    """SAMPLE knows nothing of columns: neither defines nor buffers."""
    ctx = planned_for("nvidia_h200_linux")
    case = next(c for c in OPS["SAMPLE"].cases() if not c.params["greedy"])
    found = OPS["SAMPLE"].lower(case.build().node, ctx)
    assert [len(d.args) for d in found] == [7, 6, 7] and [len(d.push) for d in found] == [8, 8, 8]
    assert not any("COLUMNS" in dict(d.kernel.defines) for d in found)
