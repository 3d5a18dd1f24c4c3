"""SentencePiece-style tokenizing as the GGUF model "llama" means it: characters are merged pairwise, best score first.

This is not the Unigram model of the `tokenizers` library, which looks for the likeliest split of the whole text and ends elsewhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

SPACE = "\u2581"
"""Stands for a space in the vocabulary."""


class SpmEncoder:
    """Encodes text with scored tokens; what is in no token falls back to bytes.

    ids     token text -> id
    scores  score of every id
    bytes   id of each of the 256 byte tokens, empty when the vocabulary has none
    """

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float], byte_ids: Sequence[int], unknown: int) -> None:
        self._ids = ids
        self._scores = scores
        self._byte_ids = byte_ids
        self._unknown = unknown

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, in which spaces are already SPACE."""
        out: list[int] = []
        for piece in self._merge(text):
            found = self._ids.get(piece)
            if found is not None:
                out.append(found)
            elif self._byte_ids:
                out.extend(self._byte_ids[b] for b in piece.encode("utf-8"))
            else:
                out.append(self._unknown)
        return out

    def _merge(self, text: str) -> list[str]:
        """Merge the neighbouring pair whose token has the highest score, of equals the leftmost, until no pair is a token."""
        pieces = list(text)
        before = list(range(-1, len(pieces) - 1))
        after = [*range(1, len(pieces)), -1]
        queue: list[tuple[float, int, str]] = []

        def consider(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                pair = pieces[left] + pieces[right]
                found = self._ids.get(pair)
                if found is not None:
                    heapq.heappush(queue, (-float(self._scores[found]), left, pair))

        for i in range(len(pieces) - 1):
            consider(i, i + 1)
        while queue:
            _, left, pair = heapq.heappop(queue)
            right = after[left]
            # An entry is stale once either side has been merged away.
            if not pieces[left] or right < 0 or pieces[left] + pieces[right] != pair:
                continue
            pieces[left] = pair
            pieces[right] = ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            consider(before[left], left)
            consider(left, after[left])
        return [p for p in pieces if p]
