"""What `vkback tune` can tune: jobs and tunables of each family of kernels, from weight shapes, cases or a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from vkback.cli.shell import UsageError, model_path
from vkback.cli.tune_show import nothing, show_crossings, show_mat_muls, show_mat_vecs, told

if TYPE_CHECKING:
    from vkback.autotune.driver import Watcher
    from vkback.autotune.mat_mul_points import MatMulPoint
    from vkback.autotune.mat_mul_sweep import MatMuls
    from vkback.autotune.own_table import OwnTable
    from vkback.autotune.points import Job
    from vkback.autotune.problem import MatVecProblem
    from vkback.autotune.tunable import Tunable, TuneResult
    from vkback.device import Device
    from vkback.ops.lowering import LowerContext

Paths = Literal["auto", "int", "float", "both"]

DEFAULT_QUANTS = "Q4_0,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_XS,MXFP4,F16"
MAT_MUL_QUANTS = "Q4_K,Q6_K,Q8_0,MXFP4"
"""Of products of several tokens: their tiles depend on the type less than mat-vecs do."""
MAT_MUL_TOKENS = (2, 4, 8, 16, 32, 64, 512)
"""Of weight shapes, so that the tokens are found from which on a mat-mat is quicker than the mat-vec kernels."""


@dataclasses.dataclass(frozen=True)
class Asked:
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
class Part:
    """Jobs of one tunable.

    noun   what they are
    about  said beside their number
    make   the tunable, once the parts before are done
    watch  what is told of them otherwise than by the bar
    show   prints results, all at the end, of this run and from the journal
    """

    noun: str
    jobs: Sequence[Any]
    make: Callable[[LowerContext], Tunable[Any, Any]]
    show: Callable[[Sequence[TuneResult[Any]], OwnTable], None]
    about: str = ""
    watch: Callable[[Watcher], Watcher] = lambda watcher: watcher


# -- mat-vecs


def _mat_vec_parts(device: Device, asked: Asked, ctx: LowerContext) -> list[Part]:
    """Mat-vecs in a token's program where it has barrier-free stages, the others in chains."""
    from vkback.autotune.chain_sweep import ChainMatVecs
    from vkback.autotune.points import jobs_for
    from vkback.autotune.program_sweep import ProgramMatVecs
    from vkback.models.registry import Model
    from vkback.ops.mat_vec_config import MAX_COLUMNS
    from vkback.shader import ShaderLibrary
    from vkback.timing.token_program import Tokens

    tokens = [n for n in asked.tokens or (1,) if n <= MAX_COLUMNS or asked.model is None]
    inside = _in_program(asked.model, ctx) if asked.model is not None and tokens == [1] else []
    # Where a program has barrier-free stages, rows about chains with barriers say nothing of any of its mat-vecs.
    chain = [] if inside and asked.paths == "auto" else jobs_for(_problems(asked, tokens, DEFAULT_QUANTS, ctx), ctx, asked.paths)
    library = ShaderLibrary()

    def in_program(ctx: LowerContext) -> ProgramMatVecs:
        assert asked.model is not None
        return ProgramMatVecs(partial(Tokens, Model.open(model_path(asked.model)), device, library, ctx), ctx)

    return [
        Part("mat-vecs", inside, in_program, show_mat_vecs, f", {len(inside)} of them in the program of a token"),
        Part("mat-vecs", chain, lambda ctx: ChainMatVecs(device, library, ctx), show_mat_vecs),
    ]


def _in_program(model: str, ctx: LowerContext) -> list[Job]:
    """The mat-vecs of a model's decode schedule if its stages are barrier-free, to be tuned in the program of a token."""
    from vkback.autotune.points import jobs_for
    from vkback.models.registry import Model
    from vkback.timing.token_program import is_barrier_free

    path = model_path(model)
    if not is_barrier_free(Model.open(path), ctx):
        return []
    barrier_free = dataclasses.replace(ctx, sync="sentinel")
    return jobs_for(of_model(model, 1, barrier_free), barrier_free, program=path.stem)


def _problems(asked: Asked, tokens: Iterable[int], default: str, ctx: LowerContext) -> Iterator[tuple[MatVecProblem, int]]:
    """The products asked for, with how often each comes in a model. default: weight types, where none were named."""
    from vkback.autotune.problem import MatVecProblem

    if asked.cases is not None:
        for text in asked.cases:
            yield MatVecProblem.parse(text), 1
        return
    for n in tokens:
        if asked.model is not None:
            yield from of_model(asked.model, n, ctx)
            continue
        for name in (asked.quants or default).split(","):
            for size in asked.shapes.split(","):
                m, cross, k = size.strip().partition("x")
                if not (cross and m.isdigit() and k.isdigit()):
                    raise UsageError(f"--shape {size}: expected rows x columns, as 4096x14336")
                yield MatVecProblem.parse(f"MUL_MAT(type_a={name.strip()},m={m},n={n},k={k})"), 1


def of_model(model: str, tokens: int, ctx: LowerContext) -> Iterator[tuple[MatVecProblem, int]]:
    """The mat-vecs of a model's schedule on a device, fused as they are there, with how often each comes."""
    from collections import Counter

    from vkback.autotune.problem import MatVecProblem
    from vkback.graph import live
    from vkback.models.registry import Model
    from vkback.ops.router import mat_vec_of
    from vkback.plan.fuse import fuse

    opened = Model.open(model_path(model))
    graph = opened.graph(tokens, opened.default_n_ctx, head="last")
    nodes = live(fuse(graph, ctx), graph.outputs)
    mat_vecs = (mat_vec_of(n) if n.op == "MOE_ROUTER" else n for n in nodes)
    yield from Counter(MatVecProblem.of(n) for n in mat_vecs if n.op == "MAT_VEC").items()


# -- products of several tokens


def _mat_mul_parts(device: Device, asked: Asked, ctx: LowerContext) -> list[Part]:
    from vkback.autotune.mat_mul_points import jobs_for
    from vkback.autotune.mat_mul_sweep import MatMuls
    from vkback.models.prompt import default_ubatch
    from vkback.shader import ShaderLibrary

    tokens = asked.tokens or ((default_ubatch(device.caps),) if asked.model is not None else MAT_MUL_TOKENS)
    # Of a model's graph the last layer has one row, which is a mat-vec's.
    problems = _problems(asked, [n for n in tokens if n > 1], MAT_MUL_QUANTS, ctx)
    jobs, said = jobs_for([(p, count) for p, count in problems if p.n > 1 or asked.model is None], ctx)
    for text in said:
        print(text)
    library, made = ShaderLibrary(), list[MatMuls]()

    def make(ctx: LowerContext) -> MatMuls:
        made.append(MatMuls(device, library, ctx, jobs))
        return made[-1]

    def show(results: Sequence[TuneResult[MatMulPoint]], own: OwnTable) -> None:
        show_mat_muls(results, made[-1].quickest, device)
        show_crossings(own, jobs)

    return [Part("products of several tokens", jobs, make, show)]


# -- attention


def _attention_parts(device: Device, asked: Asked, ctx: LowerContext) -> list[Part]:
    """Attention of a model's token, in its program, and of its prompt, in chains of launches."""
    from vkback.autotune.attention import Attention, AttentionJob, attention_shapes
    from vkback.autotune.attention_prompts import PromptAttention, jobs_for
    from vkback.models.prompt import default_ubatch
    from vkback.models.registry import Model
    from vkback.ops.attention import DECODE_TOKENS
    from vkback.plan.fuse import fuse
    from vkback.shader import ShaderLibrary
    from vkback.timing.token_program import DEPTH, Tokens, fitting_depth, token_graph

    assert asked.model is not None
    opened, library = Model.open(model_path(asked.model)), ShaderLibrary()
    tokens = asked.tokens or (1, default_ubatch(device.caps))
    depth = fitting_depth(opened, asked.n_ctx, DEPTH if asked.depth is None else asked.depth)
    parts: list[Part] = []
    for n in (n for n in tokens if 1 < n <= DECODE_TOKENS):
        print(f"attention of {n} tokens passed over: sweeps are of one token, or of prompts of more than {DECODE_TOKENS}")
    if 1 in tokens:
        jobs = [AttentionJob(shape, depth) for shape in attention_shapes(token_graph(opened, asked.n_ctx), ctx)]

        def in_program(ctx: LowerContext) -> Attention:
            return Attention(partial(Tokens, opened, device, library, ctx, n_ctx=asked.n_ctx, depth=depth), ctx)

        parts.append(Part("shapes of attention", jobs, in_program, nothing, watch=partial(told, unit="us a token")))
    prompts: list[Any] = []
    for n in (n for n in tokens if n > DECODE_TOKENS):
        found, said = jobs_for(fuse(opened.graph(n, n, head="all"), ctx), asked.depth or 0, ctx)
        prompts += found
        for text in said:
            print(text)
    watch = partial(told, unit="us")
    parts.append(Part("attentions of a prompt", prompts, lambda ctx: PromptAttention(device, library, ctx), nothing, watch=watch))
    return parts


PARTS: dict[str, Callable[[Device, Asked, LowerContext], list[Part]]] = {
    "mat_vec": _mat_vec_parts,
    "mat_mul": _mat_mul_parts,
    "attention": _attention_parts,
}
