"""Which card gets a request: the one whose KV cache knows most of its beginning, unless too many run there already.

The front (vkback/server/front.py) has no tokens: it compares the texts of requests, block by block, with those that it has sent to each
card. What a card has dropped from its cache since it does not know; then the card reads a prompt that another would have had to read, too.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BLOCK = 256
"""Characters of a block. A page of the KV cache has 64 tokens, about as much text."""
MAX_BLOCKS = 1 << 16
"""Blocks that are remembered of each card, the latest: 16 million characters."""
SHARE = 4
"""A card keeps its prefixes until it runs more requests than another by a `1 / SHARE` of its places."""

TEXTS = ("tools", "system", "instructions", "input_prefix", "input_extra", "messages", "prompt", "input", "query")
"""Fields that a prompt is made of, as it begins with them."""


def prompt_blocks(body: Mapping[str, Any]) -> list[bytes]:
    """Of a request's prompt: a digest for each whole block, of all text up to its end."""
    parts = []
    for name in TEXTS:
        value = body.get(name)
        values = value if isinstance(value, list) and not (value and isinstance(value[0], int)) else [] if value is None else [value]
        parts += [
            f"{name}:{json.dumps(each, sort_keys=True).rstrip(']')}" for each in values
        ]  # of ids, a longer list begins with a shorter one
    text, digest, found = "\n".join(parts), hashlib.blake2b(digest_size=16), []
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        digest.update(text[start : start + BLOCK].encode("utf-8", "surrogatepass"))
        found.append(digest.digest())
    return found


@dataclass
class Card:
    """places: requests that it runs at once, 0 while it is not there; running: requests that it has"""

    places: int = 0
    running: int = 0
    known: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def knows(self, blocks: Sequence[bytes]) -> int:
        """How many of the first blocks were sent here."""
        return next((i for i, block in enumerate(blocks) if block not in self.known), len(blocks))

    def learn(self, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            self.known[block] = None
            self.known.move_to_end(block)
        while len(self.known) > MAX_BLOCKS:
            self.known.popitem(last=False)

    @property
    def room(self) -> bool:
        return self.running < self.places


class Balance:
    """Cards, and where requests go."""

    def __init__(self, count: int) -> None:
        self.cards = [Card() for _ in range(count)]
        self.by_prefix = 0
        """Requests that went to a card for what it knows."""

    def pick(self, blocks: Sequence[bytes], without: Collection[int] = (), only: int | None = None) -> int | None:
        """The card for a request, which counts as running there from now; None where no card has room. without: cards that it must not
        have; only: the one that it must have."""
        able = [i for i, card in enumerate(self.cards) if card.room and i not in without and only in (None, i)]
        if not able:
            return None
        least = min(able, key=lambda i: self.cards[i].running)
        best = max(able, key=lambda i: (self.cards[i].knows(blocks), -self.cards[i].running))
        ahead = self.cards[best].running - self.cards[least].running
        if not self.cards[best].knows(blocks) or ahead > max(1, self.cards[best].places // SHARE):
            best = least
        self.by_prefix += self.cards[best].knows(blocks) > 0
        self.cards[best].running += 1
        self.cards[best].learn(blocks)
        return best

    def release(self, index: int) -> None:
        """A request has ended there."""
        self.cards[index].running -= 1

    def lose(self, index: int) -> None:
        """The card has no cache any more, and no place until somebody says how many."""
        card = self.cards[index]
        card.places = 0
        card.known.clear()
