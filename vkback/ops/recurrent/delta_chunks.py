"""DELTA_NET of many tokens in chunks (shaders/ssm/delta_chunk_ut.comp, delta_chunk_state.comp): small matrices instead of a scan.

In a chunk the updates u of the state solve a triangular system whose matrix depends on q, k, decays and shares alone. The first dispatch
inverts it for all chunks and heads at once. The second goes from chunk to chunk, with three products of matrices each; rows of the state
are independent, so workgroups share a head's.

Source: the chunked form of Gated DeltaNet (arXiv 2412.06464), which has the UT transform of arXiv 2406.06484.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkback.device import Capabilities
from vkback.graph import Node, Tensor
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push
from vkback.ops.recurrent.delta_heads import LENGTH_EPS, Heads
from vkback.ops.recurrent.ssm_conv import kept_defines
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import Defines, power_of_two
from vkback.shader import Variant

SLICE = 8
"""Quads of a row of k, q or a matrix that lie in shared memory at once, at most."""
MIN_ROWS = 4
"""Of a workgroup: a thread has four."""
MAX_PARTS = 4
"""Of four rows and four keys of the state in the registers of a thread, at most."""


@dataclass(frozen=True)
class ChunkShape:
    """chunk: tokens; rows: of a head in a workgroup; tokens: of a thread."""

    chunk: int
    rows: int
    tokens: int

    @property
    def slice(self) -> int:
        return min(SLICE, self.chunk // 4)

    @property
    def threads(self) -> int:
        return self.chunk // self.tokens * self.rows // 4

    @property
    def ut_tokens(self) -> int:
        """Of a thread in the first dispatch, which has as many threads as there are four columns for 16 rows."""
        return self.chunk // 16

    @property
    def ut_threads(self) -> int:
        return 4 * self.chunk

    @property
    def state_defines(self) -> Defines:
        return {"WG_SIZE": self.threads, "ROWS": self.rows, "TOKENS": self.tokens}

    @property
    def ut_defines(self) -> Defines:
        return {"WG_SIZE": self.ut_threads, "TOKENS": self.ut_tokens}

    def shared_bytes(self, heads: Heads) -> int:
        """Of the larger of the two kernels."""
        of_slice = 2 * self.chunk * (self.slice + 1)
        state_pitch = ceil_div(heads.key // 4, self.slice) * self.slice + 1
        state = of_slice + self.rows * state_pitch + self.chunk * self.rows // 4 + 1
        ut = max(of_slice, 2 * self.chunk * (self.chunk // 4 + 1)) + 7 * self.chunk // 4
        return 16 * max(state, ut)

    def why_not(self, heads: Heads, caps: Capabilities) -> str:
        """What the device or the kernel lacks for this shape; "" where it runs."""
        threads, shared = max(self.threads, self.ut_threads), self.shared_bytes(heads)
        if threads > min(caps.max_workgroup_invocations, caps.max_workgroup_size[0]):
            return f"they need {threads} threads"
        if shared > caps.max_shared_memory:
            return f"they need {shared} bytes of shared memory"
        if self.rows // 4 > 2 * (self.slice + 1):
            return f"updates of {self.rows} rows are more than a slice"  # whose place they take
        if ceil_div(self.rows // 4 * (heads.key // 4), self.threads) > MAX_PARTS:
            return f"a thread would hold more than {16 * MAX_PARTS} values of the state"
        return ""


def chunk_shape(params: Mapping[str, Any], heads: Heads, caps: Capabilities) -> ChunkShape | str:
    """The shape that the tables want, with fewer rows, or fewer tokens of a thread, where heads or device ask for it; else why no chunks
    are possible. Chunks of fewer tokens than wanted were not found faster than the scan, so they are not tried."""
    if heads.dim % 4 or heads.channels % 4:
        return f"rows of {heads.channels} values, heads of {heads.dim} are not whole quads"
    most, tokens = max(MIN_ROWS, min(int(params["rows"]), power_of_two(heads.dim))), int(params["tokens"])
    shapes = [
        ChunkShape(int(params["chunk"]), rows, each)
        for rows in (most, most // 2, most // 4)
        if rows >= MIN_ROWS
        for each in (tokens, 2, 1)
        if each <= tokens
    ]
    faults = [shape.why_not(heads, caps) for shape in shapes]
    return next((shape for shape, fault in zip(shapes, faults, strict=True) if not fault), faults[-1])


def lower_chunks(node: Node, heads: Heads, shape: ChunkShape, source: str) -> list[Dispatch]:
    """Both dispatches. node: a DELTA_NET whose shapes are checked."""
    qkv, alpha, beta, a, dt_bias, pos, state = node.inputs
    y, n, c = node.outputs[0], qkv.shape[0], shape.chunk
    chunks = ceil_div(n, c)
    matrices = Tensor(f"{node.name}.matrices", "F32", (chunks, heads.n, 2 * c, c))
    factors = Tensor(f"{node.name}.factors", "F32", (chunks, heads.n, c, 4))
    defines: Defines = {
        "CHUNK": c,
        "SLICE": shape.slice,
        "N_HEAD": heads.n,
        "DIM": heads.dim,
        "KEY": heads.key,
        "N_GROUP": heads.n_group,
        "TILED": int(node.params["tiled"]),
    }
    made, gates = nbytes(matrices) + nbytes(factors), (alpha, beta, a, dt_bias)
    keys = 8 * n * heads.n_group * heads.key
    return [
        Dispatch(
            kernel=Variant.of("ssm/delta_chunk_ut.comp", {**defines, **shape.ut_defines}),
            args=(*map(Arg, (qkv, *gates, pos)), Arg(matrices, "w"), Arg(factors, "w")),
            push=pack_push(n, LENGTH_EPS, heads.key**-0.5),
            groups=(chunks, heads.n, 1),
            op=node.op,
            label=node.name,
            reason=f"chunks of {c} tokens, {shape.ut_threads} threads: {source}",
            nbytes=keys + sum(map(nbytes, gates)) + made,
            # q and k by k, the inverse of a triangle and a product of two triangles.
            flops=chunks * heads.n * c * c * (4 * heads.key + 2 * c // 3),
        ),
        Dispatch(
            kernel=Variant.of("ssm/delta_chunk_state.comp", {**defines, **shape.state_defines, **kept_defines(state, None, 0, False)}),
            args=(*map(Arg, (qkv, matrices, factors, pos)), Arg(state, "rw"), Arg(y, "w")),
            push=pack_push(n),
            groups=(ceil_div(heads.dim, shape.rows), heads.n, 1),
            op=node.op,
            label=node.name,
            reason=f"chunks of {c} tokens, {shape.threads} threads, {shape.tokens} tokens a thread, {shape.rows} rows: {source}",
            nbytes=nbytes(qkv) + made + 2 * heads.state_bytes + nbytes(y),
            flops=chunks * c * heads.inner * (6 * heads.key + 4 * c),
        ),
    ]
