"""Pages of a batch: references, and the prefix cache over them, against a plain model of both."""

from __future__ import annotations

import numpy as np
import pytest

from vkback.checks import OptionError
from vkback.engine.batch.pages import PageError, PagePool, PrefixCache


def cached(pool: PagePool, cache: PrefixCache, tokens: list[int]) -> list[int]:
    """A text that was computed, and whose pages only the prefix cache holds now."""
    pages = pool.take(pool.pages_for(len(tokens)))
    cache.insert(tokens, pages)
    pool.release(pages)
    return pages


def found(pool: PagePool, cache: PrefixCache, tokens: list[int]) -> list[int]:
    pages = cache.match(tokens)
    pool.release(pages)
    return pages


def test_pages_are_handed_out_once_and_come_back() -> None:
    pool = PagePool(4, 8)
    first, rest = pool.take(1), pool.take(3)
    assert sorted(first + rest) == [0, 1, 2, 3] and pool.free == 0
    pool.share(first)
    pool.release(first)
    assert pool.free == 0 and pool.references(first[0]) == 1
    pool.release(first + rest)
    assert pool.free == 4 == pool.available
    assert [pool.pages_for(rows) for rows in (0, 1, 8, 9)] == [0, 1, 1, 2]


def test_a_shortage_takes_no_page() -> None:
    pool = PagePool(3, 8)
    pool.take(1)
    with pytest.raises(PageError, match=r"3 pages are needed, 2 of 3 are free"):
        pool.take(3)
    assert pool.free == 2


def test_wrong_calls_are_named() -> None:
    pool = PagePool(2, 4)
    (page,) = pool.take(1)
    with pytest.raises(PageError, match=f"page {1 - page} is free; expected one that is held"):
        pool.share([1 - page])
    pool.release([page])
    with pytest.raises(PageError, match=f"page {page} is free already"):
        pool.release([page])
    with pytest.raises(PageError, match="there is no page 2; expected 0 to 1"):
        pool.release([2])
    with pytest.raises(PageError, match="there is no page -1"):
        pool.share([-1])
    with pytest.raises(OptionError, match=r"\[pages\] n_pages is 0"):
        PagePool(0, 4)
    cache = PrefixCache(pool)
    with pytest.raises(PageError, match="has a prefix cache"):
        PrefixCache(pool)
    with pytest.raises(PageError, match="9 tokens fill 2 pages; expected as many pages, not 1"):
        cache.insert(range(9), pool.take(1))


def test_the_longest_run_of_full_pages_is_found() -> None:
    pool = PagePool(8, 4)
    cache = PrefixCache(pool)
    pages = cached(pool, cache, list(range(10)))
    assert len(cache) == 2 == cache.idle and pool.free == 6 and pool.available == 8
    assert found(pool, cache, list(range(10))) == pages[:2]
    assert found(pool, cache, list(range(7))) == pages[:1]
    assert found(pool, cache, [0, 1, 2, 3, 9, 9, 9, 9]) == pages[:1]
    assert found(pool, cache, [9, *range(9)]) == []
    assert found(pool, cache, [4, 5, 6, 7]) == [], "a page is known with what comes before it only"
    assert (cache.lookups, cache.hits, cache.tokens_reused, cache.evictions) == (5, 3, 16, 0)
    pool.release(cache.match(list(range(10)), count=False))
    assert (cache.lookups, cache.hits, cache.tokens_reused) == (5, 3, 16)


def test_equal_hashes_are_no_equal_texts() -> None:
    pool = PagePool(8, 2)
    cache = PrefixCache(pool)

    class Same(bytes):
        def __hash__(self) -> int:
            return 1

    full = cache.full_pages
    cache.full_pages = lambda tokens: [Same(part) for part in full(tokens)]  # type: ignore[method-assign]
    pages = cached(pool, cache, [1, 2, 3, 4])
    other = cached(pool, cache, [3, 4, 1, 2])
    assert found(pool, cache, [1, 2, 3, 4]) == pages and found(pool, cache, [3, 4, 1, 2]) == other
    assert found(pool, cache, [1, 2, 1, 2]) == pages[:1] and found(pool, cache, [4, 3]) == []


def test_known_pages_are_not_registered_twice() -> None:
    pool = PagePool(8, 2)
    cache = PrefixCache(pool)
    first = cached(pool, cache, [1, 2, 3, 4])
    second = cached(pool, cache, [1, 2, 3, 4, 5, 6])
    assert len(cache) == 3 and pool.free == 5
    assert found(pool, cache, [1, 2, 3, 4, 5, 6]) == [*first, second[2]]


def test_pages_in_use_are_not_evicted() -> None:
    pool = PagePool(4, 2)
    cache = PrefixCache(pool)
    cached(pool, cache, [1, 2, 3, 4])
    held = cache.match([1, 2])
    assert pool.available == 3
    with pytest.raises(PageError, match="4 pages are needed"):
        pool.take(4)
    assert cache.evictions == 1 and len(cache) == 1 and pool.references(held[0]) == 2
    pool.release(held)
    assert pool.available == 4


def test_least_recently_used_leaves_go_first() -> None:
    pool = PagePool(6, 2)
    cache = PrefixCache(pool)
    first, second = cached(pool, cache, [1, 1, 2, 2])
    _, third = cached(pool, cache, [1, 1, 3, 3])
    other = cached(pool, cache, [4, 4, 5, 5, 6, 6])
    assert pool.free == 0 and len(cache) == 6
    found(pool, cache, [1, 1, 2, 2])
    order = [pool.take(1)[0] for _ in range(6)]
    assert order == [third, *reversed(other), second, first], "a page is a leaf when what followed it is gone"
    assert cache.evictions == 6 and pool.available == 0


def test_pages_before_a_leaf_in_use_can_be_had() -> None:
    """A text that computed a known beginning anew holds the page after it, and not the known page itself."""
    pool = PagePool(4, 2)
    cache = PrefixCache(pool)
    cached(pool, cache, [1, 1])
    own = pool.take(2)
    cache.insert([1, 1, 2, 2], own)
    assert len(cache) == 2 and cache.idle == 1 and pool.free == 1 and pool.available == 2
    assert len(pool.take(2)) == 2
    assert pool.references(own[0]) == 1 == pool.references(own[1]) and len(cache) == 0 == pool.available


def test_clearing_frees_what_nobody_holds() -> None:
    pool = PagePool(4, 2)
    cache = PrefixCache(pool)
    cached(pool, cache, [1, 2, 3, 4, 5, 6])
    held = cache.match([1, 2])
    cache.clear()
    assert pool.free == 3 and len(cache) == 0 == cache.idle and cache.match([1, 2]) == []
    pool.release(held)
    assert pool.free == 4


def test_random_uses_agree_with_a_plain_model() -> None:
    """The model knows every text by its tokens, and the time of last use of each page; it scans where the cache does not."""
    rng = np.random.default_rng(41)
    pool = PagePool(24, 2)
    cache = PrefixCache(pool)
    held: list[list[int]] = []
    contents: dict[int, tuple[int, ...]] = {}
    for _ in range(4000):
        draw = rng.random()
        if held and draw < 0.5:
            pool.release(held.pop(int(rng.integers(len(held)))))
        else:
            tokens = rng.integers(0, 2, int(rng.integers(1, 12))).tolist()
            before = {node.page: node for node in cache.nodes.values()}
            pages = cache.match(tokens)
            for index, page in enumerate(pages):
                assert contents[page] == tuple(tokens[: 2 * index + 2])
            missing = pool.pages_for(len(tokens)) - len(pages)
            if missing > pool.available:
                pool.release(pages)
                continue
            idle_leaves = [n for n in cache.nodes.values() if not n.children and pool.references(n.page) == 1]
            one_too_few = missing == pool.free + 1 and idle_leaves
            oldest = min(idle_leaves, key=lambda n: n.last_use).page if one_too_few else None
            pages += pool.take(missing)
            if oldest is not None:
                assert oldest in pages
            for page in pages[len(pages) - missing :]:
                assert page not in before or page not in cache.by_page
                contents.pop(page, None)
            for index, page in enumerate(pages[: len(tokens) // 2]):
                contents[page] = tuple(tokens[: 2 * index + 2])
            cache.insert(tokens, pages)
            held.append(pages)
        references = np.bincount([p for pages in [*held, list(cache.by_page)] for p in pages], minlength=24)
        assert [pool.references(p) for p in range(24)] == references.tolist()
        assert pool.free == int((references == 0).sum())
        assert cache.idle == sum(references[p] == 1 for p in cache.by_page)
        assert len(cache.leaves) <= 2 * len(cache) + 65
    assert cache.evictions > 100 and cache.hits > 100
    for pages in held:
        pool.release(pages)
    cache.clear()
    assert pool.free == 24
