"""COPY_PAGES (shaders/copy/pages.comp): whole pages of rows from one KV cache to another, or within one.

    which I32 [m, 2], source [heads, rows, d], target [heads, other rows, d] -> target in place;  param page: rows of a page

Pair (a, b) copies rows a * page .. of all heads to rows b * page ..; a pair with a negative number copies nothing. Within one cache no page
may be both read and written. Rows are whole pages; any type of cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vkback import quants
from vkback.graph import Node, Tensor
from vkback.ops.cache import CACHE_TYPES, QUANTIZED, cache_kinds, stored_cache
from vkback.ops.case import Array, Case, Problem, Shape, Tolerance
from vkback.ops.case_line import CaseLineError
from vkback.ops.dispatch import Arg, Dispatch
from vkback.ops.launch import by_threads
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import Op, moves_values, register
from vkback.ops.storage import VALUE_BYTES

WORD = 16


def planes(cache: Tensor) -> list[tuple[int, int]]:
    """(offset, bytes of a row) of each plane of a cache, whose rows are those of all heads."""
    heads, rows, dim = cache.shape
    if cache.type in QUANTIZED:
        return [(p.offset, p.row_bytes) for p in quants.layout(cache.type, heads * rows, dim).planes]
    return [(0, VALUE_BYTES[cache.type] * dim)]


@register
class CopyPages(Op):
    """See the module's text."""

    name = "COPY_PAGES"
    arithmetic = moves_values

    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        which, source, target = inputs
        page, out = params["page"], np.array(target)
        for a, b in which:
            if a >= 0 and b >= 0:
                out[:, b * page : (b + 1) * page] = source[:, a * page : (a + 1) * page]
        return [out]

    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        which, source, target = node.inputs
        page = int(node.params["page"])
        heads, rows, dim = source.shape
        fits = source.type == target.type and target.shape[::2] == (heads, dim) and source.type in CACHE_TYPES
        if not fits or any(t.shape[1] % page for t in (source, target)) or which.shape[1:] != (2,):
            raise PlanError(
                f"[COPY_PAGES] {node.name}: {which} of {source} into {target}: expected like caches of whole pages of {page} rows"
            )
        found = []
        for (source_at, row_bytes), (target_at, _) in zip(planes(source), planes(target), strict=True):
            if page * row_bytes % WORD:
                raise PlanError(
                    f"[COPY_PAGES] {node.name}: {page} rows of {row_bytes} bytes are no whole words of {WORD}; take larger pages"
                )
            words = page * row_bytes // WORD
            count = which.shape[0] * heads * words
            at = [source_at // WORD, rows * row_bytes // WORD, target_at // WORD, target.shape[1] * row_bytes // WORD]
            args = (Arg(which), Arg(source), Arg(target, "rw"))
            found.append(by_threads(node, ctx, "copy/pages.comp", args, (count, heads, words, *at), count, moved=2 * WORD * count))
        return found

    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        return Tolerance(0.0, 0.0, "bytes are moved")

    def cases(self) -> Iterator[Case]:
        for seed, (kind, page, dim) in enumerate((("f16", 16, 64), ("q8_0", 16, 32), ("q4_0", 32, 96), ("f32", 4, 40))):
            yield self.build_case(kind, 3, page, dim, (5, 7), (0, 4, -1, 2, 3), (6, 0, 2, -1, 3), seed=seed)
        yield self.build_case("f16", 2, 8, 64, (6,), (0, 1, 1), (5, 3, 4), seed=9)

    def full_cases(self) -> Iterator[Case]:
        for kind in ("f16", "q8_0", "q4_0", "f32"):
            yield self.build_case(kind, 8, 64, 128, (64, 80), tuple(range(64)), tuple(range(79, 15, -1)))

    def build_case(self, kind: str, heads: int, page: int, dim: int, pages: Shape, read: Shape, written: Shape, seed: int = 1) -> Case:
        """pages: of source and target, or of the one cache that is both. read, written: the pages of each pair."""
        if len(read) != len(written) or not 1 <= len(pages) <= 2:
            raise CaseLineError(
                f"pages={pages}, read={read}, written={written}: expected one or two caches, and as many pages read as written"
            )
        (stored, _) = cache_kinds(kind, kind, dim)

        def make(rng: np.random.Generator) -> Problem:
            caches = [Tensor(name, stored, (heads, n * page, dim), "state") for name, n in zip(("source", "target"), pages, strict=False)]
            pairs = Tensor("which", "I32", (len(read), 2), "input")
            values: dict[str, Array] = {t.name: stored_cache(stored, rng.standard_normal(t.shape).astype(np.float16)) for t in caches}
            node = Node(self.name, (pairs, caches[0], caches[-1]), (caches[-1],), {"page": page})
            return Problem(node, values | {"which": np.stack([read, written], axis=1).astype(np.int32)})

        shown = {"kind": kind, "heads": heads, "page": page, "dim": dim, "pages": pages, "read": read, "written": written, "seed": seed}
        return Case(self.name, shown, make, seed)
