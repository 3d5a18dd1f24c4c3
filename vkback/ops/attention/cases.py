"""Cases of FLASH_ATTN_EXT and ATTN_DECODE."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from vkback.graph import Node, Tensor
from vkback.ops.attention.paged import physical_rows
from vkback.ops.cache import cache_kinds, cache_params, stored_cache
from vkback.ops.case import Array, Case, Problem, Shape
from vkback.ops.case_line import CaseLineError
from vkback.ops.op import OPS, Op
from vkback.ops.rope import angles as rope_angles


def first_row(p: int, window: int, chunked: bool) -> int:
    """The first row that a token at position p sees."""
    if not window:
        return 0
    return max(0, p // window * window if chunked else p + 1 - window)


def random_cache(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    pos: Sequence[int] | None,
    window: int = 0,
    first: Sequence[int] = (),
    chunked: bool = False,
) -> Array:
    """F16 cache with normal values in the rows that tokens at these positions see and NaN in all others; None: zeros everywhere. first: the
    first row of each, where they are given."""
    if pos is None:
        return np.zeros(shape, np.float16)
    cache = np.full(shape, np.nan, np.float16)
    for i, p in enumerate(pos):
        begin = first[i] if first else first_row(p, window, chunked)
        cache[:, begin : p + 1] = 0.0
    seen = np.isfinite(cache)
    cache[seen] = rng.standard_normal(int(seen.sum())).astype(np.float16)
    return cache


def paged_cache(
    rng: np.random.Generator,
    cache: Tensor,
    pages: Array,
    page: int,
    seen: Sequence[tuple[int, int]],
    window: int = 0,
    chunked: bool = False,
) -> Array:
    """F16 values of a cache in pages: normal in the rows that are seen, NaN in all others. seen: (slot, position) of each token."""
    heads, _, dim = cache.shape
    values = np.full(cache.shape, np.nan, np.float16)
    for slot in range(len(pages)):
        own = random_cache(rng, (heads, pages.shape[1] * page, dim), [p for s, p in seen if s == slot], window, (), chunked)
        values[:, physical_rows(pages, slot, own.shape[1], page)] = own
    return values


def random_pages(rng: np.random.Generator, n_slots: int, max_pages: int) -> Array:
    """A page table of sequences that lie in each other's gaps, and one page that nobody has."""
    return rng.permutation(n_slots * max_pages + 1)[: n_slots * max_pages].reshape(n_slots, max_pages).astype(np.int32)


def checked_softcap(softcap: float) -> None:
    """Raises CaseLineError for one that caps nothing."""
    if not 0.0 <= softcap < math.inf:
        raise CaseLineError(f"softcap={softcap}: expected a number from 0, which is none")


def checked_chunks(window: int, chunked: bool) -> None:
    """Raises CaseLineError for chunks without a length."""
    if chunked and window < 1:
        raise CaseLineError(f"chunked=1,window={window}: expected the length of a chunk as the window")


MANY_SPLITS: tuple[dict[str, Any], ...] = (
    {"kernel": "decode", "wg_size": 32, "lanes": 4, "steps": 1, "queries": 2, "groups": 64, "rows_per_split": 32},
    {"kernel": "decode", "wg_size": 32, "lanes": 8, "steps": 2, "queries": 4, "groups": 64, "rows_per_split": 32},
)
"""Tuning of cases with more than two splits and workgroups of several subgroups. The second keeps its scores in registers where a row of V
takes 8 lanes and subgroups allow it, the first passes them through shared memory."""


LONG_CHUNKS: dict[str, Any] = {
    "kernel": "decode",
    "wg_size": 128,
    "lanes": 8,
    "steps": 8,
    "queries": 4,
    "groups": 16,
    "rows_per_split": 256,
}
"""Chunks of 128 rows, of which the last one of a split may have few: its kernel skips the steps without rows."""


BY_MATRICES: tuple[dict[str, Any], ...] = (
    {"kernel": "decode_matrix", "warps": 2, "groups": 64, "rows_per_split": 32},
    {"kernel": "decode_matrix", "warps": 4, "groups": 4, "rows_per_split": 64},
)
"""Tuning of cases for few tokens by matrices: many splits of two subgroups each, one split of four."""


class FlashCases(Op):
    """Cases of FLASH_ATTN_EXT."""

    def cases(self) -> Iterator[Case]:
        # (n_head, n_head_kv, hd, n_ctx, positions): one row, one short of and one past a chunk, several splits, padding, many tokens
        shapes: tuple[tuple[int, int, int, int, tuple[int, ...]], ...] = (
            (4, 1, 128, 64, (0,)),
            (8, 2, 128, 300, (299,)),
            (8, 2, 64, 300, (65,)),
            (7, 1, 64, 130, (128, 3)),
            (4, 4, 80, 70, (33, -1, 0)),
            (6, 2, 96, 70, (31, 69)),
            (2, 1, 256, 40, (36,)),
            (3, 1, 40, 50, (49, 17)),
            (8, 1, 32, 600, (599, 64, 63, -1)),
            (4, 2, 64, 96, (*range(20, 41), -1, -1)),
            (8, 1, 128, 48, tuple(range(17))),
        )
        for seed, (n_head, n_head_kv, hd, n_ctx, pos) in enumerate(shapes, 1):
            for y in ("F32", "Q8_1"):
                if y == "F32" or hd % 32 == 0:
                    yield self.build_case(n_head, n_head_kv, hd, n_ctx, pos, y, seed=seed)
        yield self.build_case(8, 2, 64, 300, (299, 40), "F32", seed=20, sinks=True)
        yield self.build_case(8, 2, 64, 300, (299, 40, 127, 128), "F32", seed=21, window=128)
        yield self.build_case(8, 2, 64, 80, tuple(range(40, 60)), "Q8_1", seed=22, window=16, sinks=True)
        for shape in MANY_SPLITS:
            yield self.build_case(8, 2, 64, 600, (599, 255, 31, -1), "F32", seed=23).where(**shape)
        for shape in MANY_SPLITS:  # four tokens of a workgroup, which split nothing
            several = {**shape, "queries": 8, "rows_per_split": 4096}
            yield self.build_case(4, 2, 64, 96, (*range(20, 41), -1, -1), "F32", seed=28).where(**several)
        yield self.build_case(8, 2, 64, 600, (599, 131, 300, 160, 40, -1), "F32", seed=26).where(**LONG_CHUNKS)
        yield self.build_case(8, 2, 64, 300, (299, 170), "F32", seed=27, window=150, sinks=True).where(**LONG_CHUNKS)
        yield self.build_case(8, 2, 32, 300, (299, 90), "F32", seed=24, window=200, sinks=True).where(**MANY_SPLITS[0])
        yield self.build_case(4, 2, 80, 300, (299,), "F32", seed=25).where(**MANY_SPLITS[0])
        yield from self.unequal_cases()
        yield from self.beyond_cases()
        yield from self.prompt_cases()
        yield from self.quantized_cases()
        yield from self.paged_cases()
        yield from self.softcap_cases()
        yield from self.chunk_cases()
        yield from self.span_cases()
        yield from self.few_by_matrices()
        yield from self.positions_in_any_order()

    def positions_in_any_order(self) -> Iterator[Case]:
        """Few tokens, not one after another, with rows between them that none sees, before the first one's and behind it: windows, chunks,
        spans, padding, sinks, softcaps, types, two and four heads of a kv head."""
        far = (290, 8, -1, 131, 130, 64, 0)
        yield self.build_case(4, 2, 64, 300, far, seed=300, window=5)
        yield self.build_case(4, 1, 64, 300, far, "Q8_1", seed=301, window=20, sinks=True)
        yield self.build_case(4, 2, 64, 300, far, seed=302, window=10, chunked=True, softcap=1.5)
        yield self.build_case(4, 2, 64, 300, far, seed=303, type_k="q8_0", type_v="q4_0", window=7)
        yield self.build_case(4, 2, 40, 300, far, seed=304, type_k="f32", type_v="f32", window=3)
        yield self.build_case(4, 2, 64, 300, (290, 8, -1, 131), seed=305, first=(280, 3, 0, 131))

    def few_by_matrices(self) -> Iterator[Case]:
        """Few tokens by matrices: one row, blocks that are not full, splits, padding, heads of 64 to 256, one to twelve heads of a kv head,
        windows, chunks, sinks, softcaps, keys that are no numbers; sequences in pages, several tokens of one."""
        for seed, shape in enumerate(BY_MATRICES, 210):
            yield self.build_case(8, 2, 64, 600, (599, 255, 0, 31, -1), seed=seed).where(**shape)
            yield self.build_case(8, 1, 128, 300, (299, 17), seed=seed + 10).where(**shape)
            yield self.build_case(12, 1, 64, 300, (299, 48), seed=seed + 20, window=128, sinks=True).where(**shape)
            yield self.build_case(3, 3, 256, 80, (79, 15, 16), seed=seed + 30, softcap=1.5).where(**shape)
            yield self.build_case(8, 2, 64, 600, (599, 255, 256, -1), seed=seed + 40, window=100, chunked=True).where(**shape)
            paged = self.build_case(8, 2, 64, 640, (599, 131, 300, 160, 40, -1), seed=seed + 50, page=64, slots=(0, 1, 2, 3, 0, 2))
            yield paged.where(**shape)
            yield self.build_case(8, 2, 128, 320, (299, 90, 200), seed=seed + 60, page=32, window=100, sinks=True).where(**shape)
            yield self.build_case(8, 2, 64, 100, (99, 65), seed=seed + 70, nan_rows=1).where(**shape)
            yield self.build_case(8, 2, 64, 100, (99, 65), seed=seed + 80, inf_rows=1).where(**shape)
            yield self.build_case(8, 1, 64, 300, (299,), "Q8_1", seed=seed + 90).where(**shape)
            yield self.build_case(16, 2, 128, 700, (640,), "Q8_1", seed=seed + 100, window=600, sinks=True).where(**shape)

    def chunk_cases(self) -> Iterator[Case]:
        """Windows of chunks: the first, the last and a middle row of one, splits, padding, sinks, types, pages, prompts over several."""
        yield self.build_case(8, 2, 64, 300, (299, 128, 127, 40), seed=200, window=64, chunked=True)
        for seed, shape in enumerate(MANY_SPLITS, 201):
            yield self.build_case(8, 2, 64, 600, (599, 255, 256, -1), seed=seed, window=128, chunked=True).where(**shape)
        yield self.build_case(6, 2, 96, 70, (31, 69), "Q8_1", seed=203, type_k="q4_0", type_v="f32", window=30, sinks=True, chunked=True)
        yield self.build_case(8, 2, 64, 320, (299, 40, -1, 65), seed=204, page=16, slots=(0, 1, 1, 2), window=50, chunked=True)
        yield self.build_case(4, 2, 128, kv=170, nb=133, seed=205, window=40, chunked=True)
        yield self.build_case(2, 2, 64, 64, (*range(3, 22), -1, -1, *range(22, 50)), seed=206, window=9, sinks=True, chunked=True)

    def softcap_cases(self) -> Iterator[Case]:
        """Caps that scores reach, which spread over +-3: few tokens with scores in registers and through shared memory, splits, padding,
        windows, sinks, MLA, types, pages, prompts; keys that are no numbers stay so."""
        for seed, shape in enumerate(MANY_SPLITS, 150):
            yield self.build_case(8, 2, 64, 600, (599, 255, 31, -1), seed=seed, softcap=1.5).where(**shape)
            yield self.build_case(8, 2, 64, 100, (99, 65), seed=seed + 2, inf_rows=1, softcap=1.5).where(**shape)
        yield self.build_case(4, 2, 80, 300, (299, 3), "F32", seed=154, window=100, sinks=True, softcap=0.7)
        yield self.build_case(6, 2, 96, 70, (31, 69), "Q8_1", seed=155, type_k="q4_0", type_v="f32", softcap=2.0)
        yield self.build_case(16, 1, 72, 300, (299, 40), seed=156, vd=64, v_view=True, softcap=1.0)
        yield self.build_case(4, 1, 96, 300, tuple(range(100, 140)), seed=157, vd=64, v_view=True, softcap=1.0)
        yield self.build_case(8, 2, 64, 320, (299, 40, -1, 65), seed=158, page=16, slots=(0, 1, 1, 2), softcap=1.5)
        for seed, (hd, depth, n, y, window) in enumerate(
            ((64, 3, 64, "F32", 0), (128, 100, 33, "Q8_1", 20), (256, 5, 34, "F32", 0), (80, 3, 35, "F32", 9)), 160
        ):
            yield self.build_case(4, 2, hd, y=y, kv=depth + n, nb=n, seed=seed, window=window, softcap=1.5)
        yield self.build_case(4, 2, 64, kv=67, nb=37, seed=164, nan_rows=1, softcap=1.5)

    def span_cases(self) -> Iterator[Case]:
        """Tokens that see the rows of their own text, those after them too: texts side by side, windows that look both ways, padding, one
        row; few tokens and many, splits, scores in registers and through shared memory, sinks, types, MLA."""

        def texts(*lengths: int, window: int = 0, padding: int = 0) -> dict[str, Any]:
            """Texts of so many tokens one after another. window: rows that a token sees before and after it, 0: all."""
            first, last, at = [], [], 0
            for n in lengths:
                for i in range(n):
                    first.append(at + (max(0, i - window) if window else 0))
                    last.append(at + (min(n - 1, i + window) if window else n - 1))
                at += n
            return {"pos": (*last, *[-1] * padding), "first": (*first, *[0] * padding), "n_ctx": at + 3}

        yield self.build_case(4, 4, 64, **texts(1, 2), seed=180)
        yield self.build_case(4, 2, 32, **texts(5, 1, 7, padding=3), seed=181, y="Q8_1")
        yield self.build_case(3, 3, 64, **texts(40, 13, 1, padding=10), seed=182)
        yield self.build_case(3, 1, 32, **texts(100, 27, padding=1), seed=183, y="Q8_1")
        yield self.build_case(4, 4, 64, **texts(70, 50, window=8, padding=8), seed=184)
        yield self.build_case(2, 2, 96, **texts(33, 60, 3, window=20), seed=185, sinks=True)
        yield self.build_case(4, 2, 80, **texts(37, 12, padding=15), seed=186, type_k="f32", type_v="f32")
        yield self.build_case(4, 2, 64, **texts(37, 12, window=5), seed=187, type_k="q8_0", type_v="q4_0")
        yield self.build_case(4, 1, 96, **texts(20, 15), seed=188, vd=64, v_view=True, rot=32, q_width=64)
        yield self.build_case(4, 1, 256, **texts(50, 14, window=9), seed=189)
        few: dict[str, Any] = {"n_ctx": 640, "pos": (599, 255, 310, -1), "first": (11, 0, 300, 0)}
        for shape in MANY_SPLITS:
            yield self.build_case(8, 2, 64, **few, seed=190).where(**shape)
        yield self.build_case(8, 2, 64, **few, seed=191, sinks=True).where(**LONG_CHUNKS)

    def paged_cases(self) -> Iterator[Case]:
        """Tokens of several sequences: one of each, several of one, holes; scores in registers and through shared memory, splits, windows,
        sinks, MLA, types; pages smaller than a chunk of rows and larger."""
        few = ((299, 40, -1, 65), (0, 1, 1, 2))
        for seed, page in enumerate((16, 64), 140):
            yield self.build_case(8, 2, 64, 320, few[0], "Q8_1", seed=seed, page=page, slots=few[1])
            for shape in MANY_SPLITS:
                yield self.build_case(8, 2, 64, 640, (599, 255, 31, -1), seed=seed, page=page, slots=(2, 0, 1, 1)).where(**shape)
        yield self.build_case(4, 1, 128, 128, (70, 71, 72, 5), seed=142, page=32, slots=(1, 1, 1, 0))
        yield self.build_case(8, 2, 32, 320, (299, 90, 200), seed=143, page=32, window=100, sinks=True).where(**MANY_SPLITS[0])
        yield self.build_case(8, 2, 64, 640, (599, 131, 300, 160, 40, -1), seed=144, page=64, slots=(0, 1, 2, 3, 0, 2)).where(**LONG_CHUNKS)
        yield self.build_case(16, 1, 576, 320, (299, 40), seed=145, vd=512, v_view=True, rot=64, q_width=512, page=32)
        yield self.build_case(6, 2, 96, 96, (31, 69), "Q8_1", seed=146, page=16, type_k="q4_0", type_v="q8_0", window=40, sinks=True)
        yield self.build_case(4, 2, 80, 96, (33, -1, 0), seed=147, page=32, type_k="f32", type_v="f32")
        yield self.build_case(8, 1, 64, 160, tuple(range(100, 120)), seed=148, page=32, slots=tuple(i % 5 for i in range(20)))

    def unequal_cases(self) -> Iterator[Case]:
        """V narrower than K, in a cache of its own or as the first part of K's rows (MLA): decode, few tokens, splits, prompts."""
        for seed, (n_head, n_head_kv, hd, vd, pos, y, v_view) in enumerate(
            (
                (16, 1, 576, 512, (299,), "F32", True),
                (16, 1, 576, 512, (299, 40), "Q8_1", True),
                (6, 1, 72, 64, (130, -1, 3), "F32", True),
                (3, 3, 192, 128, (299,), "Q8_1", False),
                (4, 2, 40, 24, (33, -1, 0), "F32", False),
                (4, 1, 96, 64, tuple(range(100, 140)), "F32", True),
                (2, 2, 192, 128, tuple(range(35)), "F32", False),
                (16, 1, 576, 512, tuple(range(250, 283)), "F32", True),
            ),
            60,
        ):
            yield self.build_case(n_head, n_head_kv, hd, 300, pos, y, seed=seed, vd=vd, v_view=v_view)
        for seed, (n_head, n_head_kv, hd, vd, rot, q_width, pos) in enumerate(
            (
                (16, 1, 576, 512, 64, 512, (299,)),
                (4, 1, 72, 64, 8, 64, tuple(range(40, 60))),
                (3, 3, 192, 128, 64, 192, (299, 3)),
                (4, 1, 96, 64, 32, 64, tuple(range(100, 140))),
                (2, 2, 48, 32, 16, 48, tuple(range(35))),
            ),
            80,
        ):
            yield self.build_case(n_head, n_head_kv, hd, 300, pos, seed=seed, vd=vd, v_view=n_head_kv == 1, rot=rot, q_width=q_width)
        split = self.build_case(8, 1, 72, 600, (599, 255, 31, -1), seed=70, vd=64, v_view=True, sinks=True, window=300)
        yield split.where(**MANY_SPLITS[0])

    def beyond_cases(self) -> Iterator[Case]:
        """Keys that are no numbers, in some or all rows that a token sees, or so large that their scores are infinite: no output may be a
        number. Scores in registers and through shared memory, splits, prompts, types."""
        for seed, shape in enumerate(MANY_SPLITS, 130):
            yield self.build_case(8, 2, 64, 600, (599, 255, 31), seed=seed, nan_rows=1).where(**shape)
            yield self.build_case(8, 2, 64, 100, (99, 65), seed=seed + 2, inf_rows=1).where(**shape)
        yield self.build_case(8, 2, 64, 80, (0, 1), seed=134, nan_rows=2)
        yield self.build_case(6, 2, 32, 80, (0, 1), seed=135, nan_rows=2, type_k="q8_0", type_v="q8_0")
        yield self.build_case(4, 2, 64, kv=67, nb=37, seed=136, nan_rows=1)
        yield self.build_case(4, 1, 32, kv=64, nb=37, seed=137, nan_rows=64, type_k="q4_0", type_v="f16")
        yield self.build_case(4, 2, 64, kv=67, nb=37, seed=138, nan_rows=1, type_k="f32", type_v="f32")

    def prompt_cases(self) -> Iterator[Case]:
        """Prompts: one, four and eight heads of a kv head, at several depths, blocks and tiles that are not full."""
        shapes: tuple[tuple[int, int, int, int, int, str], ...] = (
            (4, 1, 64, 0, 17, "F32"),
            (4, 1, 64, 3, 64, "F32"),
            (8, 1, 64, 1000, 100, "Q8_1"),
            (2, 2, 32, 0, 512, "F32"),
            (4, 2, 80, 3, 35, "F32"),
            (4, 2, 128, 1000, 33, "F32"),
            (2, 1, 256, 5, 34, "F32"),
        )
        for seed, (n_head, n_head_kv, hd, depth, n, y) in enumerate(shapes, 30):
            yield self.build_case(n_head, n_head_kv, hd, y=y, kv=depth + n, nb=n, seed=seed)
        yield self.build_case(8, 1, 64, kv=1100, nb=100, seed=40, sinks=True)
        yield self.build_case(4, 1, 64, kv=250, nb=100, seed=41, window=50)
        yield self.build_case(6, 2, 64, y="Q8_1", kv=67, nb=67, seed=42, window=16, sinks=True)
        padded = (*range(3, 22), -1, -1, -1, *range(22, 50), -1)
        yield self.build_case(4, 2, 64, 64, padded, seed=43)
        yield self.build_case(2, 2, 64, 64, padded, seed=44, window=9, sinks=True)

    def quantized_cases(self) -> Iterator[Case]:
        """K and V of either type or of two: decode, splits, scores in registers and through shared memory, windows, sinks, MLA, prompts."""
        yield self.build_case(8, 2, 32, 100, (99, 65), seed=100, type_k="f16", type_v="q4_0")
        yield self.build_case(6, 2, 96, 70, (31, 69), "Q8_1", seed=101, type_k="q4_0", type_v="q8_0", window=40, sinks=True)
        for seed, (type_k, type_v) in enumerate((("q8_0", "q4_0"), ("q4_0", "q8_0"))):
            few = self.build_case(8, 2, 64, 600, (599, 255, 31, -1), seed=110 + seed, type_k=type_k, type_v=type_v)
            yield few.where(**MANY_SPLITS[seed])
            yield self.build_case(2, 1, 32, kv=70, nb=37, seed=112 + seed, type_k=type_k, type_v=type_v, window=20, sinks=True)
        yield self.build_case(4, 1, 96, 300, tuple(range(100, 140)), seed=120, type_k="q4_0", type_v="q4_0", vd=64, v_view=True)
        yield self.build_case(4, 1, 128, y="Q8_1", kv=70, nb=37, seed=121, type_k="q8_0", type_v="q8_0")
        yield self.build_case(8, 2, 32, 100, (99, 65), seed=122, type_k="f32", type_v="f16")
        yield self.build_case(6, 2, 96, 70, (31, 69), "Q8_1", seed=123, type_k="q4_0", type_v="f32", window=40, sinks=True)
        yield self.build_case(4, 2, 40, kv=70, nb=37, seed=124, type_k="f32", type_v="f32")
        yield self.build_case(16, 1, 576, 300, (299, 40), seed=125, type_k="f32", type_v="f32", vd=512, v_view=True)
        for seed, shape in enumerate(MANY_SPLITS, 126):
            yield self.build_case(8, 2, 64, 600, (599, 255, 31, -1), seed=seed, type_k="f32", type_v="f32").where(**shape)

    def full_cases(self) -> Iterator[Case]:
        for hd, ratio, kv, nb in product((64, 128), (1, 4, 8, 12, 16, 20, 32), (113, 512, 1024), (1, 3, 32, 75)):
            yield self.full_cache(ratio, 1, hd, kv, nb)
        kinds = (("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"), ("f32", "f32"))
        for (type_k, type_v), hd, ratio, nb in product(kinds, (32, 64, 96, 128, 256), (1, 4, 7), (1, 3, 35)):
            for window, sinks in ((0, False), (50, True)):
                yield self.build_case(2 * ratio, 2, hd, kv=300, nb=nb, type_k=type_k, type_v=type_v, window=window, sinks=sinks)
        for hd, ratio, kv, nb in product((40, 72, 80, 96, 192, 256), (1, 4, 8, 16), (113, 1024), (1, 32)):
            yield self.full_cache(ratio, 1, hd, kv, nb)
        for hd in (320, 512, 576):
            for ratio, kv, nb in ((1, 113, 1), (4, 113, 1), (16, 1024, 1), (4, 113, 3)):
                yield self.full_cache(ratio, 1, hd, kv, nb)
        unequal = ((576, 512, True), (192, 128, False), (80, 64, True))
        for (hd, vd, view), ratio, kv, nb in product(unequal, (4, 16), (113, 1024), (1, 3, 32)):
            kv_heads = 1 if view else ratio
            yield self.build_case(ratio, kv_heads, hd, kv=kv, nb=nb, vd=vd, v_view=view)
        yield self.build_case(128, 1, 576, kv=512, nb=1, vd=512, v_view=True)
        for hd, ratio, nb in product((64, 128, 256), (1, 4, 7), (1, 3, 32)):
            yield self.full_cache(4 * ratio, 4, hd, 513, nb)
        for hd, ratio, kv, nb in product((32, 64, 96, 128, 192, 256), (1, 8), (113, 1024), (1, 3, 32)):
            yield self.full_cache(2 * ratio, 2, hd, kv, nb, "Q8_1")
        views = ((0, True), (128, False), (128, True), (16, True))
        for hd, (window, sinks), kv, nb, y in product((64, 128), views, (113, 512), (1, 3, 32), ("F32", "Q8_1")):
            yield self.full_cache(8, 2, hd, kv, nb, y, window, sinks)
        for hd, kv, nb in ((128, 8192, 1), (64, 8192, 2), (128, 32768, 1), (128, 16, 16), (64, 1, 1), (65 * 8, 64, 1)):
            yield self.full_cache(8, 2, hd, kv, nb)

    def perf_cases(self) -> Iterator[Case]:
        for hd, ratio, kv, nb in product((64, 128, 256), (1, 4, 8), (512, 4096, 16384), (1, 4)):
            yield self.full_cache(8 * ratio, 8, hd, kv, nb)
        for kv in (512, 4096, 16384):
            yield self.build_case(16, 1, 576, kv=kv, nb=1, vd=512, v_view=True)
            yield self.build_case(128, 1, 576, kv=kv, nb=1, vd=512, v_view=True)
            yield self.build_case(16, 16, 192, kv=kv, nb=1, vd=128)
        for kind, kv, nb in product(("q8_0", "q4_0"), (4096, 16384), (1, 512)):
            yield self.build_case(32, 8, 128, kv=kv, nb=nb, type_k=kind, type_v=kind)

    def full_cache(
        self, n_head: int, n_head_kv: int, hd: int, kv: int, nb: int, y: str = "F32", window: int = 0, sinks: bool = False
    ) -> Case:
        return self.build_case(n_head, n_head_kv, hd, y=y, window=window, sinks=sinks, kv=kv, nb=nb)

    def build_case(
        self,
        n_head: int,
        n_head_kv: int,
        hd: int,
        n_ctx: int = 0,
        pos: Shape = (),
        y: str = "F32",
        window: int = 0,
        sinks: bool = False,
        kv: int = 0,
        nb: int = 0,
        garbage: bool = True,
        seed: int = 1,
        vd: int = 0,
        v_view: bool = False,
        rot: int = 0,
        q_width: int = 0,
        type_k: str = "f16",
        type_v: str = "f16",
        nan_rows: int = 0,
        inf_rows: int = 0,
        page: int = 0,
        slots: Shape = (),
        softcap: float = 0.0,
        first: Shape = (),
        chunked: bool = False,
    ) -> Case:
        """Tokens at positions pos over a cache of n_ctx rows, or the last nb tokens of a full cache of kv rows.

        The cache holds NaN in every row that no token sees (garbage False: zeros everywhere, made quickly). vd: width of a row of V, 0: as
        K; v_view: V is the first part of K's rows. rot: that many last values of a head of Q are a tensor of their own; the others are in
        rows of q_width values. type_k, type_v: of the caches. nan_rows: that many first rows of K hold NaN in the first kv head; inf_rows:
        of F16, they hold one infinity. page: the caches hold several sequences in pages of so many rows, n_ctx being the most of one;
        slots: that of each token, else each has its own. softcap: of scores, 0: none. chunked: the window is one of chunks. first: the
        first row that each token sees, pos being the last one.
        """
        checked_softcap(softcap)
        checked_chunks(window, chunked)
        vd = vd or hd
        kinds = cache_kinds(type_k, type_v, hd, vd)
        if v_view and kinds[0] != kinds[1]:
            raise CaseLineError(f"type_v={type_v}: a view of K's rows has their type, {type_k}")
        if vd > hd and v_view:
            raise CaseLineError(f"vd={vd}: a view of K's rows has at most their {hd} values")
        if kv:
            if nb > kv:
                raise CaseLineError(f"nb={nb}: more tokens than the {kv} rows of the cache")
            n_ctx, pos = kv, tuple(range(kv - nb, kv))
        if not n_ctx or not pos:
            raise CaseLineError(f"{self.name}: which tokens? expected n_ctx and pos as n_ctx=300,pos=[299,40], or kv and nb as kv=512,nb=1")

        slots = (slots or tuple(range(len(pos)))) if page else ()
        if page and (n_ctx % page or len(slots) != len(pos) or min(slots) < 0 or nan_rows or inf_rows):
            raise CaseLineError(
                f"page={page}: expected n_ctx={n_ctx} in whole pages, a slot for each of {len(pos)} tokens, rows of numbers"
            )
        if first and (len(first) != len(pos) or min(first) < 0 or page or window or nan_rows or inf_rows):
            raise CaseLineError(f"first={list(first)}: expected a row for each of {len(pos)} tokens, no pages, no window, rows of numbers")
        n_rows = (max(slots) + 1) * n_ctx + page if page else n_ctx

        def make(rng: np.random.Generator) -> Problem:
            n = len(pos)
            pages = random_pages(rng, max(slots) + 1, n_ctx // page) if page else np.zeros((1, 1), np.int32)
            q = Tensor("q", "F32", (n, n_head, q_width or hd), "input")
            cache_k = Tensor("cache_k", kinds[0], (n_head_kv, n_rows, hd), "state")
            cache_v = cache_k if v_view else Tensor("cache_v", kinds[1], (n_head_kv, n_rows, vd), "state")
            places = np.array(list(zip(first, pos, strict=True)) if first else pos, np.int32)
            inputs = [q, cache_k, cache_v, Tensor("pos", "I32", places.shape, "input")]
            values: dict[str, Array] = {"q": rng.standard_normal(q.shape, np.float32), "pos": places}
            for c in (cache_k, cache_v):
                if page:
                    rows = paged_cache(rng, c, pages, page, list(zip(slots, pos, strict=True)), window, chunked)
                else:
                    rows = random_cache(rng, c.shape, pos if garbage else None, window, first, chunked)
                if c is cache_k:
                    rows[0, :nan_rows] = np.nan
                    rows[0, :inf_rows, 0] = np.inf
                values[c.name] = stored_cache(c.type, rows)
            if sinks:
                inputs.append(Tensor("sinks", "F32", (n_head,), "weight"))
                values["sinks"] = rng.uniform(-3, 6, n_head).astype(np.float32)
            params = {"scale": 1 / math.sqrt(hd)} | ({"window": window} if window else {}) | ({"v_dim": vd} if v_view else {})
            params |= ({"softcap": softcap} if softcap else {}) | ({"chunked": True} if chunked else {})
            if rot:
                inputs.append(Tensor("q_pe", "F32", (n, n_head, rot), "input"))
                values["q_pe"] = rng.standard_normal((n, n_head, rot), np.float32)
                params |= {"split_q": True}
            if page:
                inputs += [Tensor("slots", "I32", (n,), "input"), Tensor("pages", "I32", pages.shape, "input")]
                values |= {"slots": np.array(slots, np.int32), "pages": pages}
                params |= {"page": page}
            return Problem(Node("FLASH_ATTN_EXT", tuple(inputs), (Tensor("kqv_out", y, (n, n_head * vd)),), params), values)

        shown: dict[str, Any] = {"n_head": n_head, "n_head_kv": n_head_kv, "hd": hd}
        shown |= {} if kv else {"n_ctx": n_ctx, "pos": pos}
        shown |= {"y": y, "window": window, "sinks": sinks}
        shown |= {"kv": kv, "nb": nb} if kv else {}
        shown |= {"vd": vd} if vd != hd else {}
        shown |= {"v_view": True} if v_view else {}
        shown |= {"rot": rot, "q_width": q_width} if rot else {}
        shown |= {"nan_rows": nan_rows} if nan_rows else {}
        shown |= {"inf_rows": inf_rows} if inf_rows else {}
        shown |= {"type_k": type_k, "type_v": type_v} if (type_k, type_v) != ("f16", "f16") else {}
        shown |= {"page": page, "slots": slots} if page else {}
        shown |= {"softcap": softcap} if softcap else {}
        shown |= {"chunked": True} if chunked else {}
        shown |= {"first": first} if first else {}
        shown |= {} if garbage else {"garbage": False}
        return Case(self.name, {**shown, "seed": seed}, make, seed)


class DecodeCases(Op):
    """Cases of ATTN_DECODE."""

    def cases(self) -> Iterator[Case]:
        for seed, (heads, kv, hd, n_ctx, pos, mode, norm, ff, y) in enumerate(
            (
                (4, 1, 128, 64, 0, "normal", False, False, "F32"),
                (8, 2, 128, 300, 299, "normal", False, True, "Q8_1"),
                (8, 2, 64, 300, 130, "neox", True, False, "Q8_1"),
                (7, 1, 64, 200, 64, "neox", False, False, "F32"),
                (4, 4, 80, 70, 33, "neox", True, False, "F32"),
                (4, 2, 96, 5000, 4095, "normal", False, False, "Q8_1"),
                (2, 1, 256, 40, 36, "normal", True, True, "F32"),
                (4, 2, 64, 40, -1, "normal", False, False, "Q8_1"),
            ),
            1,
        ):
            yield self.build_case(heads, kv, hd, n_ctx, pos, mode, norm, ff, y, seed=seed)
        short: dict[str, Any] = {"freq_scale": 0.25, "ext_factor": 1.0, "n_ctx_orig": 64}
        yield self.build_case(4, 2, 64, 300, 200, "neox", False, False, "F32", seed=20, n_dims=32, **short)
        yield self.build_case(8, 1, 64, 300, 200, "neox", False, False, "Q8_1", seed=21, sinks=True, window=128)
        # gpt-oss: sinks and YaRN, every other layer with a window; one that is not yet full, one that is, and rows that take several splits
        yarn: dict[str, Any] = {"freq_base": 150000.0, "freq_scale": 1 / 32, "ext_factor": 1.0, "n_ctx_orig": 4096}
        yield self.build_case(16, 2, 64, 600, 50, "neox", False, False, "Q8_1", seed=22, sinks=True, window=128, **yarn)
        yield self.build_case(16, 2, 64, 600, 599, "neox", False, False, "Q8_1", seed=23, sinks=True, window=128, **yarn)
        yield self.build_case(16, 2, 64, 2000, 1500, "neox", False, False, "F32", seed=24, sinks=True, **yarn)
        yield self.build_case(4, 2, 64, 300, 200, "normal", False, False, "Q8_1", seed=26, n_dims=-1)
        yield self.build_case(4, 2, 80, 70, 33, "neox", True, False, "F32", seed=27, n_dims=-1, sinks=True)
        yield self.build_case(4, 2, 64, 40, 33, "neox", True, False, "F32", seed=30, type_k="q4_0", type_v="q8_0")
        for seed, (type_k, type_v) in enumerate((("q8_0", "q4_0"), ("f16", "q8_0")), 40):
            few = self.build_case(6, 2, 96, 300, 200, "normal", False, False, "Q8_1", 0, 128, True, seed=seed, type_k=type_k, type_v=type_v)
            yield few.where(**MANY_SPLITS[0])
        yield self.build_case(4, 2, 64, 600, 500, "neox", False, False, "F32", seed=45, type_k="q4_0", type_v="q4_0").where(
            sync="sentinel", **MANY_SPLITS[1]
        )
        wide = (("f32", "f32", ""), ("f16", "f32", "k"), ("q8_0", "f16", "v"), ("q4_0", "q4_0", "k"))
        for seed, (type_k, type_v, beyond) in enumerate(wide, 50):
            yield self.build_case(4, 2, 64, 300, 200, "neox", False, False, "F32", seed=seed, type_k=type_k, type_v=type_v, beyond=beyond)
        yield self.build_case(4, 1, 64, 40, 0, "neox", False, False, "F32", seed=54, beyond="k")
        few = self.build_case(4, 2, 64, 600, 500, "normal", False, False, "F32", seed=55, beyond="k")
        yield few.where(sync="sentinel", **MANY_SPLITS[0])
        split = self.build_case(8, 2, 64, 600, 500, "neox", True, False, "F32", seed=25)
        yield split.where(**MANY_SPLITS[0])
        yield split.where(sync="sentinel", **MANY_SPLITS[0])
        yield split.where(sync="sentinel", **MANY_SPLITS[1])
        for seed, shape in enumerate(MANY_SPLITS, 70):
            capped = self.build_case(8, 2, 64, 600, 500, "neox", False, False, "F32", seed=seed, softcap=1.5)
            yield capped.where(**shape)
            yield capped.where(sync="sentinel", **shape)
        yield self.build_case(4, 2, 80, 70, 33, "neox", True, False, "F32", seed=72, softcap=0.7, window=20)
        yield self.build_case(4, 2, 64, 320, 0, "normal", False, False, "Q8_1", seed=73, softcap=1.0, page=32)
        yield self.build_case(4, 1, 64, 40, 0, "neox", False, False, "F32", seed=74, beyond="k", softcap=1.5)
        for seed, pos in enumerate((128, 127, 200), 75):
            yield self.build_case(8, 2, 64, 300, pos, "normal", True, False, "Q8_1", seed=seed, window=64, chunked=True)
        yield self.build_case(8, 2, 64, 320, 299, "normal", False, False, "F32", seed=78, n_dims=-1, window=100, page=32, chunked=True)
        norms: tuple[dict[str, Any], ...] = ({"norm_all": True}, {"norm_v": True}, {"norm_all": True, "norm_v": True})
        for seed, given in enumerate(norms, 80):
            normed = self.build_case(8, 2, 64, 600, 500, "neox", True, False, "Q8_1", seed=seed, **given)
            yield normed
            yield normed.where(sync="sentinel", **MANY_SPLITS[0])
        yield self.build_case(4, 2, 80, 70, 33, "neox", False, False, "F32", seed=83, norm_v=True)
        yield self.build_case(32, 32, 128, 40, 33, "normal", True, False, "F32", seed=84, norm_all=True, type_k="q8_0", type_v="q8_0")
        yield from self.shared_cases()
        for y in ("F32", "Q8_1"):
            gated = self.build_case(8, 2, 64, 600, 500, "neox", True, False, y, seed=98, n_dims=32, gated=True)
            yield gated
            yield gated.where(sync="sentinel", **MANY_SPLITS[0])
        yield self.build_case(8, 2, 64, 320, 200, "neox", True, False, "F32", seed=99, page=32, sinks=True, gated=True)
        for seed, (pos, page, kind) in enumerate(
            ((300, 64, "f16"), (64, 64, "q8_0"), (0, 32, "q4_0"), (-1, 32, "f16"), (95, 16, "f32")), 60
        ):
            yield self.build_case(8, 2, 64, 320, pos, "neox", True, False, "F32", seed=seed, page=page, type_k=kind, type_v=kind)
        paged = self.build_case(8, 2, 64, 640, 500, "normal", False, False, "Q8_1", seed=65, page=64, window=300, sinks=True)
        for shape in MANY_SPLITS:
            yield paged.where(**shape)
            yield paged.where(sync="sentinel", **shape)

    def shared_cases(self) -> Iterator[Case]:
        """K and V of a layer before: norms or none, RoPE or none, splits, windows, types of caches, pages, padding."""
        for seed, (n_head, kv, hd, n_ctx, pos, mode, norm, ff, y) in enumerate(
            (
                (8, 2, 64, 300, 299, "neox", True, False, "Q8_1"),
                (4, 1, 128, 64, 0, "normal", False, False, "F32"),
                (4, 4, 80, 70, 33, "neox", True, True, "F32"),
                (8, 2, 256, 40, -1, "neox", True, False, "Q8_1"),
            ),
            90,
        ):
            yield self.build_case(n_head, kv, hd, n_ctx, pos, mode, norm, ff, y, seed=seed, shared_kv=True)
        long = self.build_case(8, 2, 64, 600, 500, "neox", True, False, "Q8_1", seed=94, shared_kv=True, window=300)
        for shape in MANY_SPLITS:
            yield long.where(**shape)
            yield long.where(sync="sentinel", **shape)
        kinds: dict[str, Any] = {"type_k": "q8_0", "type_v": "q4_0", "sinks": True}
        yield self.build_case(6, 2, 96, 300, 200, "normal", False, False, "F32", seed=95, shared_kv=True, **kinds)
        yield self.build_case(8, 2, 64, 320, 200, "neox", True, False, "F32", seed=96, shared_kv=True, page=32, window=64, chunked=True)
        yield self.build_case(4, 2, 64, 70, 33, "neox", False, False, "F32", seed=97, shared_kv=True, n_dims=-1)

    def full_cases(self) -> Iterator[Case]:
        heads = ((4, 1, 64), (7, 1, 64), (8, 8, 80), (12, 2, 96), (32, 8, 128), (16, 1, 128), (4, 1, 256))
        for mode, (n_head, kv, hd), (n_ctx, pos) in product(("normal", "neox"), heads, ((64, 0), (113, 112), (1024, 511), (4096, 4095))):
            yield self.build_case(n_head, kv, hd, n_ctx, pos, mode, False, False, "F32", seed=1)
        both = (False, True)
        for mode, norm, ff, y, sinks, window in product(("normal", "neox"), both, both, ("F32", "Q8_1"), both, (0, 128)):
            yield self.build_case(8, 2, 64, 600, 300, mode, norm, ff, y, seed=2, sinks=sinks, window=window)
        kinds = (("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0"), ("f16", "q4_0"), ("f32", "f32"))
        for (type_k, type_v), mode, hd, ratio, pos in product(kinds, ("normal", "neox"), (32, 64, 128, 256), (1, 7), (0, 511)):
            yield self.build_case(2 * ratio, 2, hd, 600, pos, mode, False, False, "F32", type_k=type_k, type_v=type_v)

    def perf_cases(self) -> Iterator[Case]:
        for kv in (512, 4096, 16384):
            yield self.build_case(32, 8, 128, kv, kv - 1, "normal", False, False, "Q8_1", seed=1)
            for window in (0, 128):
                yield self.build_case(64, 8, 64, kv, kv - 1, "neox", False, False, "Q8_1", seed=1, sinks=True, window=window)
            for kind in ("q8_0", "q4_0"):
                yield self.build_case(32, 8, 128, kv, kv - 1, "normal", False, False, "Q8_1", seed=1, type_k=kind, type_v=kind)

    def build_case(
        self,
        n_head: int,
        n_head_kv: int,
        hd: int,
        n_ctx: int,
        pos: int,
        mode: str,
        norm: bool,
        ff: bool,
        y: str,
        n_dims: int = 0,
        window: int = 0,
        sinks: bool = False,
        garbage: bool = True,
        seed: int = 1,
        type_k: str = "f16",
        type_v: str = "f16",
        beyond: str = "",
        page: int = 0,
        softcap: float = 0.0,
        chunked: bool = False,
        norm_all: bool = False,
        norm_v: bool = False,
        shared_kv: bool = False,
        gated: bool = False,
        **rope: Any,
    ) -> Case:
        """A case whose cache holds NaN in row pos and beyond (garbage False: zeros everywhere, made quickly).

        n_dims  0: the head size; -1: nothing is rotated
        beyond  "k", "v": the new row of the first kv head is beyond the range of its cache's type
        page    the caches hold two sequences in pages of so many rows, of which the token's is the second
        softcap of scores, 0: none; chunked: the window is one of chunks
        norm_all  with norm: of all heads of Q or K at once; norm_v: V is normed, too
        shared_kv  queries alone: the caches hold row pos
        gated   the attention is multiplied by the sigmoid of a gate
        """
        checked_softcap(softcap)
        checked_chunks(window, chunked)
        if norm_all and not norm:
            raise CaseLineError("norm_all=1: expected norm=1")
        if shared_kv and (norm_all or norm_v or beyond):
            raise CaseLineError(
                f"shared_kv=1,norm_all={norm_all:d},norm_v={norm_v:d},beyond={beyond}: expected no key and no value of the token"
            )
        rope_angles.checked_mode(mode)
        kinds = cache_kinds(type_k, type_v, hd)
        if page and n_ctx % page:
            raise CaseLineError(f"page={page}: expected n_ctx={n_ctx} in whole pages")
        n_rows = 2 * n_ctx + page if page else n_ctx

        def make(rng: np.random.Generator) -> Problem:
            pages = random_pages(rng, 2, n_ctx // page) if page else np.zeros((1, 1), np.int32)
            qkv = Tensor("qkv", "F32", (1, (n_head + (0 if shared_kv else 2 * n_head_kv)) * hd))
            names = ("cache_k", "cache_v")
            caches = tuple(Tensor(name, kind, (n_head_kv, n_rows, hd), "state") for name, kind in zip(names, kinds, strict=True))
            stored = pos - first_row(pos, window, True) if chunked else max(window - 1, 0)
            before = (pos - 1,) if stored or not chunked else ()
            if shared_kv:
                stored, before = window, (pos,)

            def cached(c: Tensor) -> Array:
                chunks = shared_kv and chunked
                if page:
                    return paged_cache(rng, c, pages, page, [(1, p) for p in before], stored, chunks)
                return random_cache(rng, c.shape, before if garbage else None, stored, (), chunks)

            rotated = max(n_dims, 0) if n_dims else hd
            wide_q, wide_k = (hd * n_head, hd * n_head_kv) if norm_all else (hd, hd)
            norms = [("q_norm", wide_q), *([] if shared_kv else [("k_norm", wide_k)])] if norm else []
            weights = [*norms, *([("sinks", n_head)] if sinks else [])]
            position, angles = Tensor("pos", "I32", (1,), "input"), Tensor("angles", "F32", (1, rotated // 2, 2), "input")
            inputs = (qkv, position, *caches, *([angles] if rotated else []))
            inputs += tuple(Tensor(name, "F32", (size,), "weight") for name, size in weights)
            values: dict[str, Array] = {
                "qkv": rng.standard_normal(qkv.shape, np.float32),
                "pos": np.array([pos], np.int32),
                **{c.name: stored_cache(c.type, cached(c)) for c in caches},
                **{name: rng.uniform(0.5, 1.5, size).astype(np.float32) for name, size in weights},
            }
            if beyond:
                first = (n_head + n_head_kv * "kv".index(beyond)) * hd
                values["qkv"][:, first : first + hd] *= 1e9
            factors = (rng.uniform(0.5, 1.5, rotated // 2).astype(np.float32),) if ff else ()
            params = {
                **rope_angles.DEFAULTS,
                **rope,
                "mode": mode,
                "n_dims": rotated,
                "n_head": n_head,
                "n_head_kv": n_head_kv,
                "head_dim": hd,
                "scale": 1 / math.sqrt(hd),
                "has_norm": norm,
                "has_ff": ff,
                "window": window,
            }
            params |= cache_params(kinds) | ({"softcap": softcap} if softcap else {}) | ({"chunked": True} if chunked else {})
            params |= {key: True for key, given in (("norm_all", norm_all), ("norm_v", norm_v), ("shared_kv", shared_kv)) if given}
            if norm or norm_v:
                params["eps"] = 1e-6
            if gated:
                inputs += (Tensor("gate", "F32", (1, n_head * hd), "input"),)
                values["gate"] = 2 * rng.standard_normal((1, n_head * hd), np.float32)
                params["gated"] = True
            if page:
                inputs += (Tensor("slots", "I32", (1,), "input"), Tensor("pages", "I32", pages.shape, "input"))
                values |= {"slots": np.ones(1, np.int32), "pages": pages}
                params["page"] = page
            if rotated:
                reference = OPS["ROPE_ANGLES"].reference([values["pos"], *factors], params)
                values["angles"] = reference[0].astype(np.float32)
            out = Tensor("kqv_out", y, (1, n_head * hd))
            return Problem(Node("ATTN_DECODE", inputs, (out, *(() if shared_kv else caches)), params), values)

        shown: dict[str, Any] = {
            "n_head": n_head,
            "n_head_kv": n_head_kv,
            "hd": hd,
            "n_ctx": n_ctx,
            "pos": pos,
            "mode": mode,
            "norm": norm,
            "ff": ff,
            "y": y,
            "n_dims": n_dims or hd,
            "window": window,
            "sinks": sinks,
            **rope,
        }
        shown |= {"type_k": type_k, "type_v": type_v} if (type_k, type_v) != ("f16", "f16") else {}
        shown |= {"beyond": beyond} if beyond else {}
        shown |= {"page": page} if page else {}
        shown |= {"softcap": softcap} if softcap else {}
        shown |= {"chunked": True} if chunked else {}
        shown |= {key: True for key, given in (("norm_all", norm_all), ("norm_v", norm_v), ("shared_kv", shared_kv)) if given}
        shown |= {"gated": True} if gated else {}
        shown |= {} if garbage else {"garbage": False}
        return Case(self.name, {**shown, "seed": seed}, make, seed)
