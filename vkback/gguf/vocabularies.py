"""How each kind of vocabulary encodes plain text and spells its tokens.

Byte-level BPE ("gpt2"), BPE of characters ("gemma4") and WordPiece ("bert") run on the `tokenizers` library, SentencePiece-style merging
("llama") on vkback/gguf/spm.py, Unigram ("t5") on vkback/gguf/unigram.py, the longest match of bytes ("rwkv") here.
"""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from vkback.errors import VkbackError
from vkback.gguf.pre_tokenizers import Cut, PreTokenizer
from vkback.gguf.spm import SPACE, SpmEncoder
from vkback.gguf.token_types import TokenType
from vkback.gguf.unigram import UnigramEncoder


class TokenizerError(VkbackError):
    """A file without a usable vocabulary, or an id that is not in it."""


BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@cache
def byte_letters() -> tuple[str, ...]:
    """The letter that stands for each byte in a byte-level vocabulary: printable Latin-1 for itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, extra = [], 0x100
    for b in range(256):
        letters.append(chr(b) if b in printable else chr(extra))
        extra += b not in printable
    return tuple(letters)


@cache
def _letter_bytes() -> dict[str, int]:
    return {letter: b for b, letter in enumerate(byte_letters())}


class Vocabulary(ABC):
    """One kind."""

    @abstractmethod
    def encode(self, text: str, *, start: bool) -> list[int]:
        """Ids of text without special tokens. `start`: nothing or a special token stands before it."""

    @abstractmethod
    def spell(self, token: str) -> bytes:
        """The bytes a normal token stands for."""


class BpeVocabulary(Vocabulary):
    """BPE with the file's merges, of letters that stand for bytes, or of characters."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], pre: PreTokenizer) -> None:
        """A merge may make, or be made of, what is no token: its letters are tokens, those that are not are lost."""
        pairs = [(m[:cut], m[cut + 1 :]) for m in merges if (cut := m.find(" ", 1)) > 0]
        ids = {t: i for i, t in enumerate(tokens)}
        self._known, self._n_vocab = dict(ids), len(tokens)
        self._bytes = pre.bytes
        self._spelled_out: dict[int, list[int]] = {}
        for left, right in pairs:
            for part in (left, right, left + right):
                if part not in ids:
                    ids[part] = new = len(tokens) + len(self._spelled_out)
                    self._spelled_out[new] = self._letters(part)
        from tokenizers import Tokenizer, models

        fallback = {} if pre.bytes else {"byte_fallback": True, "fuse_unk": True}
        self._tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=pre.ignore_merges, **fallback))
        self._tokenizer.pre_tokenizer = cutting(pre)
        self._nfc = pre.nfc

    def encode(self, text: str, *, start: bool) -> list[int]:
        if self._nfc:
            text = unicodedata.normalize("NFC", text)
        if not self._bytes:
            return [i for piece in re.split("(\n+)", text.replace(" ", SPACE)) if piece for i in self._characters(piece)]
        return self._ids(text)

    def _characters(self, piece: str) -> list[int]:
        """Line breaks that are a token as they stand are that one."""
        whole = self._known.get(piece) if piece[0] == "\n" else None
        return self._ids(piece) if whole is None else [whole]

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._spelled_out and max(found, default=0) >= self._n_vocab:
            return [i for id in found for i in self._spelled_out.get(id, [id])]
        return found

    def _letters(self, part: str) -> list[int]:
        if self._bytes:
            return [self._known[c] for c in part if c in self._known]
        names = [[c] if c in self._known else [f"<0x{b:02X}>" for b in c.encode()] for c in part]
        return [self._known[name] for letters in names for name in letters if name in self._known]

    def spell(self, token: str) -> bytes:
        if not self._bytes:
            return spell_piece(token)
        letters = _letter_bytes()
        if all(c in letters for c in token):
            return bytes(letters[c] for c in token)
        return token.encode("utf-8")


def cutting(pre: PreTokenizer) -> Any:
    """The pre-tokenizer of the library."""
    from tokenizers import Regex, pre_tokenizers

    made: dict[Cut, Callable[[], Any]] = {
        Cut.PUNCTUATION: lambda: pre_tokenizers.Punctuation("contiguous"),
        Cut.DIGITS: lambda: pre_tokenizers.Digits(individual_digits=False),
        Cut.DIGIT: lambda: pre_tokenizers.Digits(individual_digits=True),
        Cut.BYTES: lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    }
    steps = pre.steps if Cut.BYTES in pre.steps or not pre.bytes else (*pre.steps, Cut.BYTES)
    return pre_tokenizers.Sequence([made[s]() if isinstance(s, Cut) else pre_tokenizers.Split(Regex(s), "isolated") for s in steps])


class SpmVocabulary(Vocabulary):
    """Scored pieces, with spaces as SPACE and a byte token for every byte."""

    def __init__(self, tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, unknown: int, space_prefix: bool) -> None:
        byte_ids = {int(t[3:5], 16): i for i, t in enumerate(tokens) if types[i] == TokenType.BYTE and BYTE_TOKEN.fullmatch(t)}
        complete = [byte_ids[b] for b in range(256)] if len(byte_ids) == 256 else []
        self._encoder = SpmEncoder({t: i for i, t in enumerate(tokens)}, scores, complete, unknown)
        self._space_prefix = space_prefix

    def encode(self, text: str, *, start: bool) -> list[int]:
        prefix = " " if start and self._space_prefix else ""
        return self._encoder.encode((prefix + text).replace(" ", SPACE))

    def spell(self, token: str) -> bytes:
        return spell_piece(token)


def spell_piece(token: str) -> bytes:
    """Of a vocabulary with SPACE for a space, and byte tokens."""
    if BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace(SPACE, " ").encode("utf-8")


class WordPieceVocabulary(Vocabulary):
    """Words cut into the longest tokens from the left, as BERT does: SPACE begins a word, and tokens without it go on with one."""

    def __init__(self, tokens: Sequence[str], *, unknown: int, lowercase: bool, strip_accents: bool) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        # The library's own form: "##" goes on with a word, and its beginning is bare. Both are made of tokens as GGUF has them.
        named: dict[str, int] = {}
        for i, token in enumerate(tokens):
            named[token[1:] if token.startswith(SPACE) and len(token) > 1 else f"##{token}"] = i
        named.setdefault(self.NO_WORD, unknown)
        self._unknown = unknown
        self._tokenizer = Tokenizer(models.WordPiece(vocab=named, unk_token=self.NO_WORD, max_input_chars_per_word=self.LONGEST_WORD))
        self._tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=strip_accents, lowercase=lowercase
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    NO_WORD = "\n"
    """No word is called so."""

    LONGEST_WORD = 100
    """Characters; a longer one is unknown as a whole, as in BERT."""

    def encode(self, text: str, *, start: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def spell(self, token: str) -> bytes:
        return token.replace(SPACE, " ").encode("utf-8")


class UnigramVocabulary(Vocabulary):
    """Scored pieces, with spaces as SPACE: the likeliest split."""

    def __init__(self, encoder: UnigramEncoder) -> None:
        self._encoder = encoder

    def encode(self, text: str, *, start: bool) -> list[int]:
        return self._encoder.encode(text)

    def spell(self, token: str) -> bytes:
        return spell_piece(token)


class RwkvVocabulary(Vocabulary):
    """The longest token of bytes at each place."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._ids: dict[bytes, int] = {}
        for i, token in enumerate(tokens):
            if (spelled := self.spell(token)) and (i or spelled != b"<s>"):
                self._ids.setdefault(spelled, i)
        self._longest: Mapping[bytes, int] = _longest_by_first_two(self._ids)

    def encode(self, text: str, *, start: bool) -> list[int]:
        data, at, out = text.encode("utf-8"), 0, []
        while at < len(data):
            for n in range(min(self._longest.get(data[at : at + 2], 1), len(data) - at), 0, -1):
                found = self._ids.get(data[at : at + n])
                if found is not None:
                    out.append(found)
                    break
            else:
                n = 1
                out.append(0)
            at += n
        return out

    def spell(self, token: str) -> bytes:
        """Tokens are written as Python writes strings, without the quotes: \\n, \\t, \\x1f for bytes, \\u00e9."""
        return _unescaped(token)


def _longest_by_first_two(ids: Mapping[bytes, int]) -> dict[bytes, int]:
    """First two bytes of a token -> the length of the longest that begins so."""
    found: dict[bytes, int] = {}
    for token in ids:
        found[token[:2]] = max(found.get(token[:2], 1), len(token))
    return found


_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {"t": b"\t", "n": b"\n", "r": b"\r"}


def _unescaped(token: str) -> bytes:
    out, at = b"", 0
    for m in _ESCAPE.finditer(token):
        out += token[at : m.start()].encode("utf-8")
        if m[1] is not None:
            out += bytes([int(m[1], 16)])
        elif m[2] is not None:
            out += chr(int(m[2], 16)).encode("utf-8", "replace")
        else:
            out += _ESCAPED.get(m[3], m[3].encode("utf-8"))
        at = m.end()
    return out + token[at:].encode("utf-8")


class NoVocabulary(Vocabulary):
    """Ids without text."""

    def __init__(self, error: str) -> None:
        self._error = error

    def encode(self, text: str, *, start: bool) -> list[int]:
        raise TokenizerError(self._error)

    def spell(self, token: str) -> bytes:
        return b""
