"""SSM_SCAN of many tokens in chunks (shaders/ssm/scan_chunk_products.comp, scan_chunk_states.comp, scan_chunk_output.comp).

In a chunk what a token reads out of the tokens before it is a product of matrices, C B^T times decays and steps, times x; what it reads out
of the state before the chunk is another. So three dispatches in two stages: the products C B^T of each chunk and group, and the states from
chunk to chunk, which need no reduction and are split by rows and columns; then all outputs at once.

Source: state-space duality (arXiv 2405.21060).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkback.device import Capabilities
from vkback.graph import Node, Tensor
from vkback.ops.dispatch import Arg, Dispatch, ceil_div, pack_push
from vkback.ops.recurrent.scan_heads import Heads
from vkback.ops.recurrent.ssm_conv import kept_defines
from vkback.ops.storage import nbytes
from vkback.ops.workgroup import Defines, power_of_two
from vkback.shader import Variant

SLICE = 8
"""Quads of a row of B, C or a state that lie in shared memory at once."""
STATE_SLICE = 16
"""Tokens whose x and B lie in shared memory at once, where states go from chunk to chunk."""
MIN_ROWS = 4
"""Of a workgroup: a thread has four."""
MIN_COLUMNS = 4
EACH = 2
"""Quads of a row of the state in the registers of a thread, where the workgroup has as many columns."""


@dataclass(frozen=True)
class ChunkShape:
    """chunk: tokens; rows: of a head in a workgroup; columns: of its state in a workgroup; tokens: of a thread that makes outputs."""

    chunk: int
    rows: int
    columns: int
    tokens: int

    @property
    def products_threads(self) -> int:
        """Four columns a thread, and 16 rows of threads."""
        return 4 * self.chunk

    @property
    def each(self) -> int:
        return min(EACH, self.columns // 4)

    @property
    def state_threads(self) -> int:
        return self.rows // 4 * (self.columns // 4 // self.each)

    @property
    def output_threads(self) -> int:
        return self.rows // 4 * (self.chunk // self.tokens)

    @property
    def shared_bytes(self) -> int:
        """Of the largest of the three kernels."""
        products = 2 * self.chunk * (SLICE + 1)
        state = STATE_SLICE * (self.rows + self.columns) // 4 + 3 * self.chunk // 4 + 1
        matrix = max((self.chunk + self.rows) * (SLICE + 1), self.chunk * (self.chunk // 4 + 1))
        output = matrix + self.chunk * self.rows // 4 + 3 * self.chunk // 4
        return 16 * max(products, state, output)

    def why_not(self, caps: Capabilities) -> str:
        """What the device or the kernel lacks for this shape; "" where it runs."""
        if self.output_threads < self.chunk:
            return f"{self.rows} rows for {self.tokens} tokens a thread are fewer threads than a chunk has tokens"
        threads = max(self.products_threads, self.state_threads, self.output_threads)
        if threads > min(caps.max_workgroup_invocations, caps.max_workgroup_size[0]):
            return f"they need {threads} threads"
        if self.shared_bytes > caps.max_shared_memory:
            return f"they need {self.shared_bytes} bytes of shared memory"
        return ""


def chunk_shape(params: Mapping[str, Any], heads: Heads, caps: Capabilities) -> ChunkShape | str:
    """The shape that the tables want, with fewer rows or columns, or fewer tokens of a thread, where heads or device ask for it; else why
    no chunks are possible."""
    if heads.dim % 4:
        return f"heads of {heads.dim} are not whole quads"
    most, wanted = max(MIN_ROWS, min(int(params["rows"]), power_of_two(heads.dim))), int(params["tokens"])
    columns = max(MIN_COLUMNS, min(int(params["columns"]), power_of_two(heads.d_state)))
    shapes = [
        ChunkShape(int(params["chunk"]), rows, columns, tokens)
        for rows in (most, most // 2, most // 4)
        if rows >= MIN_ROWS
        for tokens in (wanted, wanted // 2, wanted // 4, wanted // 8)
        if tokens
    ]
    faults = [shape.why_not(caps) for shape in shapes]
    return next((shape for shape, fault in zip(shapes, faults, strict=True) if not fault), faults[-1])


def lower_chunks(node: Node, heads: Heads, shape: ChunkShape, source: str) -> list[Dispatch]:
    """All three dispatches; the first two do not depend on each other. node: an SSM_SCAN whose shapes are checked."""
    xbc, zx, a, d, dt_bias, pos, state = node.inputs
    y, n, c = node.outputs[0], zx.shape[0], shape.chunk
    chunks = ceil_div(n, c)
    products = Tensor(f"{node.name}.products", "F32", (chunks, heads.n_group, c, c))
    before = Tensor(f"{node.name}.before", "F32", (chunks, heads.n, heads.dim, heads.d_state))
    defines: Defines = {"CHUNK": c, "N_HEAD": heads.n, "HEAD_DIM": heads.dim, "STATE": heads.d_state, "N_GROUP": heads.n_group}
    of_products: Defines = {"WG_SIZE": shape.products_threads, "TOKENS": c // 16, "SLICE": SLICE}
    of_states: Defines = {"WG_SIZE": shape.state_threads, "ROWS": shape.rows, "COLUMNS": shape.columns, "EACH": shape.each}
    of_states |= {"SLICE": STATE_SLICE, **kept_defines(state, None, 0, False)}
    of_output: Defines = {"WG_SIZE": shape.output_threads, "ROWS": shape.rows, "TOKENS": shape.tokens, "SLICE": SLICE}
    row_blocks, groups_bytes = ceil_div(heads.dim, shape.rows), 4 * n * heads.n_group * heads.d_state
    per_head = nbytes(a) + nbytes(dt_bias)
    why = f"chunks of {c} tokens"
    return [
        Dispatch(
            kernel=Variant.of("ssm/scan_chunk_products.comp", {**defines, **of_products}),
            args=(Arg(xbc), Arg(products, "w")),
            push=pack_push(n),
            groups=(chunks, heads.n_group, 1),
            op=node.op,
            label=node.name,
            reason=f"{why}, {shape.products_threads} threads: {source}",
            nbytes=2 * groups_bytes + nbytes(products),
            flops=2 * chunks * heads.n_group * c * c * heads.d_state,
        ),
        Dispatch(
            kernel=Variant.of("ssm/scan_chunk_states.comp", {**defines, **of_states}),
            args=(*map(Arg, (xbc, zx, a, dt_bias, pos)), Arg(state, "rw"), Arg(before, "w")),
            push=pack_push(n, heads.width),
            groups=(row_blocks * ceil_div(heads.d_state, shape.columns), heads.n, 1),
            op=node.op,
            label=node.name,
            reason=f"{why}, {shape.state_threads} threads, {shape.rows} rows, {shape.columns} columns: {source}",
            nbytes=4 * n * (heads.inner + heads.n) + groups_bytes + per_head + 2 * heads.state_bytes + nbytes(before),
            flops=chunks * heads.inner * heads.d_state * (2 * c + 1),
        ),
        Dispatch(
            kernel=Variant.of("ssm/scan_chunk_output.comp", {**defines, **of_output}),
            args=(*map(Arg, (xbc, zx, a, d, dt_bias, pos, products, before)), Arg(y, "w")),
            push=pack_push(n, heads.width),
            groups=(row_blocks, heads.n, chunks),
            op=node.op,
            label=node.name,
            reason=f"{why}, {shape.output_threads} threads, {shape.tokens} tokens a thread, {shape.rows} rows: {source}",
            nbytes=4 * n * (2 * heads.inner + heads.n) + groups_bytes + per_head + nbytes(products) + nbytes(before) + nbytes(y),
            # A triangle is half of its square.
            flops=chunks * c * heads.inner * (2 * heads.d_state + c + 8),
        ),
    ]
