"""A text of a batch that runs while no other does: by the engine's own loop over its own cache, which has drafts (docs/drafts.md).

The scheduler knows nothing of it: a step of it makes as many tokens as a step of columns would. Its rows are in the engine's cache, and go
into its pages when another text comes, or it ends.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import islice
from typing import Protocol

from vkback.engine.batch.caches import PagedCaches
from vkback.engine.batch.scheduler import Text
from vkback.engine.drafts import Drafts
from vkback.engine.engine import Engine
from vkback.engine.sampler import Sampler


class RunsAlone(Protocol):
    """Of a request, what its steps need to know."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def stop_at_eos(self) -> bool: ...

    @property
    def drafts(self) -> Drafts | None: ...

    @property
    def adapters(self) -> tuple[float, ...]: ...


class Solo:
    """Runs `text`, whose rows so far are in its pages."""

    def __init__(self, engine: Engine, caches: PagedCaches, text: Text, how: RunsAlone) -> None:
        self.text = text
        self._engine, self._caches = engine, caches
        rows, page = text.length - 1, caches.paging.page
        self._stored = rows  # rows that the pages have
        engine.use_adapters(how.adapters)
        if engine.tokens != tuple(text.tokens[:rows]):
            pages = -(-rows // page)
            engine.reset()
            if engine.has_draft_head:  # pages do not have its rows
                engine.prompt(text.tokens[:rows])
            else:
                caches.stage(text.pages[:pages], range(pages))
                engine.assume(text.tokens[:rows])
        self._tokens: Generator[int, None, None] = engine.generate(
            text.tokens[-1], text.limit - len(text.made), sampler=how.sampler, stop_at_eos=how.stop_at_eos, drafts=how.drafts
        )

    def take(self, count: int) -> list[int]:
        """The next tokens, fewer only where the text ends. Raises what `Engine.generate` raises."""
        return list(islice(self._tokens, count))

    def close(self) -> None:
        """Stop; its rows are lost."""
        self._tokens.close()

    def leave(self) -> None:
        """Bring its rows into its pages; it goes on by steps of the batch."""
        self._tokens.close()
        page, rows = self._caches.paging.page, self._engine.n_past
        first, last = self._stored // page, -(-rows // page)
        last = min(last, len(self.text.pages))  # of a text that was cancelled
        if first < last:
            self._caches.store(range(first, last), self.text.pages[first:last])
