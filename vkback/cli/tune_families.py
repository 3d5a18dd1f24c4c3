"""What `vkback tune` can tune: tasks and tunables of each family of kernels, from weight shapes, cases or a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from vkback.cli.shell import UsageError, model_path
from vkback.cli.tune_show import nothing, printing, show_crossings, show_gemms, show_gemvs

if TYPE_CHECKING:
    from vkback.autotune.chain_trial import ChainFamily
    from vkback.autotune.device_table import DeviceTable
    from vkback.autotune.driver import Watcher
    from vkback.autotune.gemm_points import GemmPoint
    from vkback.autotune.gemm_sweep import Gemms
    from vkback.autotune.points import Task
    from vkback.autotune.problem import LinearProblem
    from vkback.autotune.tunable import Tunable, TuneResult
    from vkback.device import Device
    from vkback.graph import Node
    from vkback.ops.lowering import LowerContext

Paths = Literal["auto", "int", "float", "both"]

DEFAULT_QUANTS = "Q4_0,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_XS,MXFP4,F16"
GEMM_QUANTS = "Q4_K,Q6_K,Q8_0,MXFP4"
"""Of products of several tokens: their tiles depend on the type less than GEMVs do."""
GEMM_TOKENS = (2, 4, 8, 16, 32, 64, 512)
"""Of weight shapes, so that the tokens are found from which on a GEMM is quicker than the GEMV kernels."""


@dataclasses.dataclass(frozen=True)
class TuneRequest:
    """What to tune: cases, or a model's kernels, or all of some types and shapes. tokens: () for each family's own."""

    cases: Sequence[str] | None
    model: str | None
    quants: str | None
    shapes: str
    tokens: tuple[int, ...]
    paths: Paths
    n_ctx: int | None
    depth: int | None


@dataclasses.dataclass
class FamilyTasks:
    """Tasks of one tunable.

    noun   what they are
    about  said beside their number
    make   the tunable, once the families before are tuned
    watch  prints what the bar does not show of them
    show   prints results, all at the end, of this run and from the journal
    """

    noun: str
    tasks: Sequence[Any]
    make: Callable[[LowerContext], Tunable[Any, Any]]
    show: Callable[[Sequence[TuneResult[Any]], DeviceTable], None]
    about: str = ""
    watch: Callable[[Watcher], Watcher] = lambda watcher: watcher


# -- GEMVs


def _gemv_tasks(device: Device, request: TuneRequest, ctx: LowerContext) -> list[FamilyTasks]:
    """GEMVs in a token's program where it has barrier-free stages, the others in chains."""
    from vkback.autotune.chain_sweep import ChainGemvs
    from vkback.autotune.points import tasks_for
    from vkback.autotune.program_sweep import ProgramGemvs
    from vkback.models.registry import Model
    from vkback.ops.matmul.gemv import MAX_COLUMNS
    from vkback.shader import ShaderLibrary
    from vkback.timing.token_program import Tokens

    tokens = [n for n in request.tokens or (1,) if n <= MAX_COLUMNS or request.model is None]
    inside = _in_program(request.model, ctx) if request.model is not None and tokens == [1] else []
    # Where a program has barrier-free stages, rows about chains with barriers say nothing of any of its GEMVs.
    chain = [] if inside and request.paths == "auto" else tasks_for(_problems(request, tokens, DEFAULT_QUANTS, ctx), ctx, request.paths)
    library = ShaderLibrary()

    def in_program(ctx: LowerContext) -> ProgramGemvs:
        assert request.model is not None
        return ProgramGemvs(partial(Tokens, Model.open(model_path(request.model)), device, library, ctx), ctx)

    return [
        FamilyTasks("GEMVs", inside, in_program, show_gemvs, f", {len(inside)} of them in the program of a token"),
        FamilyTasks("GEMVs", chain, lambda ctx: ChainGemvs(device, library, ctx), show_gemvs),
    ]


def _in_program(model: str, ctx: LowerContext) -> list[Task]:
    """The GEMVs of a model's decode schedule if its stages are barrier-free, to be tuned in the program of a token."""
    from vkback.autotune.points import tasks_for
    from vkback.models.registry import Model
    from vkback.timing.token_program import is_barrier_free

    path = model_path(model)
    if not is_barrier_free(Model.open(path), ctx):
        return []
    barrier_free = dataclasses.replace(ctx, sync="sentinel")
    return tasks_for(of_model(model, 1, barrier_free), barrier_free, program=path.stem)


def _problems(request: TuneRequest, tokens: Iterable[int], default: str, ctx: LowerContext) -> Iterator[tuple[LinearProblem, int]]:
    """The requested products, with how often each comes in a model. default: weight types, where none were named."""
    from vkback.autotune.problem import LinearProblem

    if request.cases is not None:
        for text in request.cases:
            yield LinearProblem.parse(text), 1
        return
    for n in tokens:
        if request.model is not None:
            yield from of_model(request.model, n, ctx)
            continue
        for name in (request.quants or default).split(","):
            for size in request.shapes.split(","):
                m, cross, k = size.strip().partition("x")
                if not (cross and m.isdigit() and k.isdigit()):
                    raise UsageError(f"--shape {size}: expected rows x columns, as 4096x14336")
                yield LinearProblem.parse(f"MUL_MAT(type_a={name.strip()},m={m},n={n},k={k})"), 1


def of_model(model: str, tokens: int, ctx: LowerContext) -> Iterator[tuple[LinearProblem, int]]:
    """The GEMVs of a model's schedule on a device, fused as they are there, with how often each comes."""
    from collections import Counter

    from vkback.autotune.problem import LinearProblem
    from vkback.graph import live
    from vkback.models.registry import Model
    from vkback.ops.moe.router import linear_of
    from vkback.plan.passes.fuse import fuse

    opened = Model.open(model_path(model))
    graph = opened.graph(tokens, opened.default_n_ctx, head="last")
    nodes = live(fuse(graph, ctx), graph.outputs)
    gemvs = (linear_of(n) if n.op == "MOE_ROUTER" else n for n in nodes)
    yield from Counter(LinearProblem.of(n) for n in gemvs if n.op == "LINEAR").items()


# -- products of several tokens


def _gemm_tasks(device: Device, request: TuneRequest, ctx: LowerContext) -> list[FamilyTasks]:
    from vkback.autotune.gemm_points import tasks_for
    from vkback.autotune.gemm_sweep import Gemms
    from vkback.engine.prompts import default_ubatch
    from vkback.shader import ShaderLibrary

    tokens = request.tokens or ((default_ubatch(device.caps),) if request.model is not None else GEMM_TOKENS)
    # Of a model's graph the last layer has one row, which is a GEMV's.
    problems = _problems(request, [n for n in tokens if n > 1], GEMM_QUANTS, ctx)
    tasks, said = tasks_for([(p, count) for p, count in problems if p.n > 1 or request.model is None], ctx)
    for text in said:
        print(text)
    library, made = ShaderLibrary(), list[Gemms]()

    def make(ctx: LowerContext) -> Gemms:
        made.append(Gemms(device, library, ctx, tasks))
        return made[-1]

    def show(results: Sequence[TuneResult[GemmPoint]], own: DeviceTable) -> None:
        show_gemms(results, made[-1].quickest, device)
        show_crossings(own, tasks)

    return [FamilyTasks("products of several tokens", tasks, make, show)]


# -- attention


def _attention_tasks(device: Device, request: TuneRequest, ctx: LowerContext) -> list[FamilyTasks]:
    """Attention of a model's token, in its program, and of its prompt, in chains of launches."""
    from vkback.autotune.attention import Attention, AttentionTask, attention_shapes
    from vkback.autotune.attention_prompts import PromptAttention, tasks_for
    from vkback.engine.prompts import default_ubatch
    from vkback.models.registry import Model
    from vkback.ops.attention.flash import DECODE_TOKENS
    from vkback.plan.passes.fuse import fuse
    from vkback.shader import ShaderLibrary
    from vkback.timing.token_program import DEPTH, Tokens, fitting_depth, token_graph

    assert request.model is not None
    opened, library = Model.open(model_path(request.model)), ShaderLibrary()
    tokens = request.tokens or (1, default_ubatch(device.caps))
    depth = fitting_depth(opened, request.n_ctx, DEPTH if request.depth is None else request.depth)
    families: list[FamilyTasks] = []
    for n in (n for n in tokens if 1 < n <= DECODE_TOKENS):
        print(f"attention of {n} tokens passed over: sweeps are of one token, or of prompts of more than {DECODE_TOKENS}")
    if 1 in tokens:
        tasks = [AttentionTask(shape, depth) for shape in attention_shapes(token_graph(opened, request.n_ctx), ctx)]

        def in_program(ctx: LowerContext) -> Attention:
            return Attention(partial(Tokens, opened, device, library, ctx, n_ctx=request.n_ctx, depth=depth), ctx)

        families.append(FamilyTasks("shapes of attention", tasks, in_program, nothing, watch=partial(printing, unit="us a token")))
    prompts: list[Any] = []
    for n in (n for n in tokens if n > DECODE_TOKENS):
        found, said = tasks_for(fuse(opened.graph(n, n, head="all"), ctx), request.depth or 0, ctx)
        prompts += found
        for text in said:
            print(text)
    watch = partial(printing, unit="us")
    families.append(FamilyTasks("attentions of a prompt", prompts, lambda ctx: PromptAttention(device, library, ctx), nothing, watch=watch))
    return families


# -- recurrences


def _delta_tasks(device: Device, request: TuneRequest, ctx: LowerContext) -> list[FamilyTasks]:
    from vkback.autotune.delta_nets import DeltaNets, tasks_for

    return [_recurrences("delta nets", DeltaNets, tasks_for, device, request, ctx)]


def _scan_tasks(device: Device, request: TuneRequest, ctx: LowerContext) -> list[FamilyTasks]:
    from vkback.autotune.ssm_scans import SsmScans, tasks_for

    return [_recurrences("Mamba-2 scans", SsmScans, tasks_for, device, request, ctx)]


def _recurrences(
    what: str,
    family: type[ChainFamily[Any, Any]],
    tasks_for: Callable[[Iterable[Node], LowerContext], tuple[list[Any], list[str]]],
    device: Device,
    request: TuneRequest,
    ctx: LowerContext,
) -> FamilyTasks:
    """Recurrences of a model's prompt, in chains of launches; none of a model without."""
    from vkback.engine.prompts import default_ubatch
    from vkback.models.registry import Model
    from vkback.shader import ShaderLibrary

    assert request.model is not None
    opened, library = Model.open(model_path(request.model)), ShaderLibrary()
    tokens = [n for n in request.tokens or (default_ubatch(device.caps),) if n >= family.least]
    tasks, said = tasks_for([node for n in tokens for node in opened.graph(n, n, head="all").nodes], ctx)
    for text in said:
        print(text)

    def make(ctx: LowerContext) -> Any:
        return family(device, library, ctx)

    return FamilyTasks(what, tasks, make, nothing, watch=partial(printing, unit="us"))


TASKS_OF: dict[str, Callable[[Device, TuneRequest, LowerContext], list[FamilyTasks]]] = {
    "gemv": _gemv_tasks,
    "gemm": _gemm_tasks,
    "attention": _attention_tasks,
    "delta_net": _delta_tasks,
    "ssm_scan": _scan_tasks,
}
