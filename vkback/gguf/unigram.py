"""SentencePiece's Unigram model, the GGUF model "t5": the likeliest split of the whole text, after the normalization that the file has.

The split runs on the `tokenizers` library. The normalization is a table of the file (`tokenizer.ggml.precompiled_charsmap`): a trie of byte
strings, each with what replaces it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vkback.gguf.spm import SPACE


class CharacterMap:
    """SentencePiece's table: at each place the longest string that the trie has is replaced.

    The trie is a double array as darts-clone writes it, one 32-bit unit a node: bits 0..7 the byte that leads here, bit 8 whether a string
    ends here (its value is then in the unit at `offset`), bits 10.. the offset to the children, in units of 256 where bit 9 is set.
    """

    def __init__(self, data: bytes) -> None:
        """data: 4 bytes length of the trie, the trie, then texts that end with a zero byte. Raises ValueError where it is none."""
        if len(data) < 4 or (size := struct.unpack_from("<I", data)[0]) + 4 > len(data) or size % 4 or not size:
            raise ValueError("is no table of SentencePiece: its trie does not fit")
        self._units: list[int] = np.frombuffer(data, "<u4", size // 4, 4).tolist()
        self._texts = data[4 + size :]
        self._root = _offset(self._units[0])

    def apply(self, text: str) -> str:
        data, at, out = text.encode("utf-8"), 0, []
        while at < len(data):
            length, value = self._longest(data, at)
            if length:
                out.append(self._texts[value : self._texts.find(b"\0", value)])
            else:
                length = _utf8_length(data[at])
                out.append(data[at : at + length])
            at += length
        return b"".join(out).decode("utf-8", "replace")

    def _longest(self, data: bytes, at: int) -> tuple[int, int]:
        """Bytes of the longest string of the trie that stands here (0: none), and its value."""
        units, node, best = self._units, self._root, (0, 0)
        for i in range(at, len(data)):
            node ^= data[i]
            if node >= len(units) or (unit := units[node]) & 0x800000FF != data[i]:
                break
            node ^= _offset(unit)
            if unit >> 8 & 1 and node < len(units):
                best = (i - at + 1, units[node] & 0x7FFFFFFF)
        return best


def _offset(unit: int) -> int:
    return unit >> 10 << (unit >> 6 & 8)


def _utf8_length(first: int) -> int:
    return 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


class UnigramEncoder:
    """Ids of text.

    space_prefix  a space is put before it
    trim          spaces at its ends are dropped, and several within are one
    """

    def __init__(
        self,
        tokens: Sequence[str],
        scores: npt.ArrayLike,
        *,
        unknown: int,
        matched: Sequence[bool],
        map_: CharacterMap | None,
        space_prefix: bool,
        trim: bool,
    ) -> None:
        """matched: whether a token may be found in plain text."""
        from tokenizers import Tokenizer, models

        listed = [(t if ok else f"\0{i}", float(s)) for i, (t, s, ok) in enumerate(zip(tokens, np.asarray(scores), matched, strict=True))]
        self._tokenizer = Tokenizer(models.Unigram(listed, unk_id=unknown, byte_fallback=False))
        self._map, self._space_prefix, self._trim = map_, space_prefix, trim

    def encode(self, text: str) -> list[int]:
        if self._map is not None:
            text = self._map.apply(text)
        if self._trim:
            text = re.sub(" +", " ", text.strip(" "))
        if not text:
            return []
        prefix = SPACE if self._space_prefix else ""
        ids: list[int] = self._tokenizer.encode(prefix + text.replace(" ", SPACE), add_special_tokens=False).ids
        return ids
