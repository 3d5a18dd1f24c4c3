"""Pages of a batch's KV cache: which are free, who holds them, and which hold the beginning of a text that may come again.

A page is a run of rows in the caches of all layers. Here it is a number: nothing touches a device. A PagePool hands pages out and counts
references. A PrefixCache holds one reference to every full page of past texts, so that a text that begins like one of them takes those
pages instead of computing them. When the pool runs short, it takes back pages that nobody but the prefix cache holds.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vkback.checks import whole
from vkback.errors import ModelError


class PageError(ModelError):
    """Pages that are not there, or a page whose references are counted wrongly."""


class PagePool:
    """n_pages physical pages of `page` rows each, reference-counted. Every operation costs O(1) a page."""

    def __init__(self, n_pages: int, page: int) -> None:
        """Raises OptionError where a number is no whole number of at least 1."""
        self.n_pages = whole("n_pages", n_pages, "a whole number of pages, at least 1", 1, "pages")
        self.page = whole("page", page, "a whole number of rows, at least 1", 1, "pages")
        self._free = list(range(n_pages - 1, -1, -1))
        self._references = [0] * n_pages
        self._cache: PrefixCache | None = None

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that `take` can give: the free ones and those that only the prefix cache holds."""
        return len(self._free) + (self._cache.idle if self._cache is not None else 0)

    def references(self, page: int) -> int:
        """How often a page is held; 0: it is free."""
        return self._references[self._checked(page)]

    def pages_for(self, rows: int) -> int:
        """Pages that `rows` rows need."""
        return -(-rows // self.page)

    def take(self, count: int) -> list[int]:
        """`count` pages with one reference each. Where too few are free, the prefix cache forgets some first. Raises PageError where fewer
        are available, and then takes none."""
        if count > len(self._free) and self._cache is not None:
            self._cache.reclaim(count)
        if count > len(self._free):
            raise PageError(
                f"[pages] {count} pages are needed, {len(self._free)} of {self.n_pages} are free; "
                "expected no more than are available; release some first"
            )
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page. Raises PageError for a free one."""
        for page in pages:
            held = self.references(page)
            if not held:
                raise PageError(f"[pages] page {page} is free; expected one that is held; take it instead of sharing it")
            self._references[page] = held + 1
            if held == 1 and self._cache is not None:
                self._cache.in_use(page)

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each page; without any it is free. Raises PageError for a free one."""
        for page in pages:
            held = self.references(page)
            if not held:
                raise PageError(f"[pages] page {page} is free already; expected one that is held; release each reference once")
            self._references[page] = held - 1
            if held == 1:
                self._free.append(page)
            elif held == 2 and self._cache is not None:
                self._cache.out_of_use(page)

    def _attach(self, cache: PrefixCache) -> None:
        if self._cache is not None:
            raise PageError("[pages] the pool has a prefix cache; expected none; use that one, or a pool of its own")
        self._cache = cache

    def _checked(self, page: int) -> int:
        if not 0 <= page < self.n_pages:
            raise PageError(f"[pages] there is no page {page}; expected 0 to {self.n_pages - 1}")
        return page


@dataclass(eq=False, slots=True)
class _Node:
    """A full page of a text. serial: never used twice. key: serial of the node before it (of a first page its text's root), tokens of the
    page as bytes.
    last_use: a count that grows with every use."""

    serial: int
    key: tuple[int, bytes]
    parent: _Node | None
    page: int
    children: int = 0
    last_use: int = 0
    known: bool = True


class PrefixCache:
    """Full pages of texts, each known by the page before it and its own tokens. A dictionary finds it by the hash of both and compares
    both, so that texts whose hashes are equal are never taken for each other.

    A page that only this cache holds is idle. A page that no known page follows is a leaf. When the pool runs short, idle leaves go, the
    least recently used one first; then the page before it may be a leaf. Every operation costs O(log n) a page at most.

    Texts whose rows depend on more than tokens (adapters) have roots of their own and share no page with others. A root is 0 or below.

    Counters: lookups, hits (lookups that found a page), tokens_reused, evictions (pages).
    """

    def __init__(self, pool: PagePool) -> None:
        """Raises PageError where the pool has a prefix cache already."""
        pool._attach(self)
        self._pool = pool
        self.nodes: dict[tuple[int, bytes], _Node] = {}
        """Full pages that are known, by what is before them and their tokens."""
        self.by_page: dict[int, _Node] = {}
        self.leaves: list[tuple[int, int, _Node]] = []
        """A heap of (last_use, serial, node); an entry that is no longer true is passed over."""
        self._serial = 0
        self._uses = 0
        self.idle = 0
        """Pages that only this cache holds."""
        self.lookups = self.hits = self.tokens_reused = self.evictions = 0

    def __len__(self) -> int:
        """Pages that are known."""
        return len(self.nodes)

    def match(self, tokens: Sequence[int], count: bool = True, root: int = 0) -> list[int]:
        """Pages of the longest run of full pages, from the first token on, that hold these tokens; the caller has a reference to each and
        releases it. count=False leaves the counters as they are, for a caller that does not know yet whether it uses them."""
        found: list[int] = []
        serial = root
        for part in self.full_pages(tokens):
            node = self.nodes.get((serial, part))
            if node is None:
                break
            found.append(node.page)
            serial = node.serial
        self._pool.share(found)
        if count:
            self.count(len(found))
        return found

    def count(self, pages: int) -> None:
        """Counts a lookup that found so many pages."""
        self.lookups += 1
        self.hits += pages > 0
        self.tokens_reused += pages * self._pool.page

    def insert(self, tokens: Sequence[int], pages: Sequence[int], root: int = 0) -> None:
        """Registers the full pages of a text, whose row r holds tokens[r], and keeps a reference to each that was not known. Where equal
        tokens are known in another page, that one stays. Raises PageError where there are fewer pages than the tokens fill."""
        if len(pages) < len(tokens) // self._pool.page:
            raise PageError(
                f"[pages] {len(tokens)} tokens fill {len(tokens) // self._pool.page} pages; expected as many pages, not {len(pages)}"
            )
        parent: _Node | None = None
        for part, page in zip(self.full_pages(tokens), pages, strict=False):
            key = (parent.serial if parent else root, part)
            node = self.nodes.get(key)
            if node is None:
                if page in self.by_page:
                    raise PageError(f"[pages] page {page} holds other tokens already; expected a page that was filled once")
                self._pool.share([page])
                self._serial += 1
                node = self.nodes[key] = self.by_page[page] = _Node(self._serial, key, parent, page)
                if parent:
                    parent.children += 1
            self._used(node)
            parent = node

    def reclaim(self, free: int) -> None:
        """Forgets idle pages until the pool has so many free, or until none is idle."""
        while self.idle and self._pool.free < free:
            node = self._oldest()
            if node:
                self.evictions += 1
                self._forget(node)
            else:
                self._uncover()

    def clear(self) -> None:
        """Forgets all pages; those that nobody else holds are free afterwards."""
        for node in list(self.nodes.values()):
            self._forget(node)
        self.leaves.clear()

    def in_use(self, page: int) -> None:
        """The pool: somebody takes a page that one held."""
        self.idle -= page in self.by_page

    def out_of_use(self, page: int) -> None:
        """The pool: one reference to a page is left."""
        if node := self.by_page.get(page):
            self.idle += 1
            self._used(node)

    def full_pages(self, tokens: Sequence[int]) -> Iterable[bytes]:
        page = self._pool.page
        return (array("q", tokens[at : at + page]).tobytes() for at in range(0, len(tokens) - page + 1, page))

    def _is_idle(self, node: _Node) -> bool:
        return self._pool.references(node.page) == 1

    def _used(self, node: _Node) -> None:
        self._uses += 1
        node.last_use = self._uses
        self._offer(node)

    def _offer(self, node: _Node) -> None:
        """Puts a node among the leaves that may go, if it is one."""
        if node.children or not self._is_idle(node):
            return
        heapq.heappush(self.leaves, (node.last_use, node.serial, node))
        if len(self.leaves) > 2 * len(self.nodes) + 64:
            self.leaves = [entry for entry in self.leaves if self._true(entry)]
            heapq.heapify(self.leaves)

    def _true(self, entry: tuple[int, int, _Node]) -> bool:
        last_use, _, node = entry
        return node.known and not node.children and last_use == node.last_use and self._is_idle(node)

    def _oldest(self) -> _Node | None:
        while self.leaves:
            entry = heapq.heappop(self.leaves)
            if self._true(entry):
                return entry[2]
        return None

    def _forget(self, node: _Node) -> None:
        node.known = False
        del self.nodes[node.key], self.by_page[node.page]
        self.idle -= self._is_idle(node)
        self._pool.release([node.page])
        if parent := node.parent:
            parent.children -= 1
            if parent.known:
                self._offer(parent)

    def _uncover(self) -> None:
        """Makes leaves of idle pages where none is a leaf: a text holds pages that follow them, but has the rows of their tokens in pages
        of its own, since it computed them anew. Forgets those leaves of the text; it keeps the pages."""
        for node in [n for n in self.nodes.values() if not n.children]:
            before = node.parent
            while before and not self._is_idle(before):
                before = before.parent
            if before:
                self._forget(node)
