"""Text to token ids and back, from the vocabulary inside a GGUF file (vkback/gguf/vocabularies.py has its kinds)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vkback.gguf import special_tokens
from vkback.gguf.file import GgufFile, quoted
from vkback.gguf.hparams import NO_TEXT_VOCABULARY
from vkback.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from vkback.gguf.special_tokens import Strip
from vkback.gguf.token_types import TokenType
from vkback.gguf.unigram import CharacterMap, UnigramEncoder
from vkback.gguf.vocabularies import (
    BpeVocabulary,
    NoVocabulary,
    RwkvVocabulary,
    SpmVocabulary,
    TokenizerError,
    UnigramVocabulary,
    Vocabulary,
    WordPieceVocabulary,
)

NO_TEXT = (
    "the file has no vocabulary, so a text cannot be read; give token ids: --tokens 1,2,3 (vkback run, perplexity), a list of ids in "
    "Python and in /v1/completions"
)
"""What a file without vocabulary says to a text."""

WHITE = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
"""Unicode's white space."""


class Tokenizer:
    """Text to ids and back.

    bos        id put before a text, None when the vocabulary has none
    end        id put behind it: the end of text, BERT's separator
    eos_ids    ids that end a text or a turn; eos_id is the one that the file names first
    add_bos    whether `encode` puts bos there by default; add_end: so for end
    special    text -> id of tokens with a meaning of their own: control, user-defined and unknown ones
    shown      control tokens that are text all the same: marks in a reply
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        tokens: Sequence[str],
        types: Sequence[int],
        *,
        bos: int | None,
        eos_ids: Iterable[int],
        add_bos: bool,
        strip_space: bool,
        end: int | None = None,
        file_ends: Mapping[str, int] | None = None,
        strips: Mapping[int, Strip] | None = None,
    ) -> None:
        """end: given where it is to be put; file_ends: see special_tokens.ends; strips: white space that special tokens take."""
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._types = special_tokens.with_ends(tokens, types)
        self._strip_space = strip_space
        self._strips = strips or {}
        self.bos = bos
        self.add_bos = add_bos and bos is not None
        self.end = end
        self.special = special_tokens.by_name(tokens, self._types)
        given = tuple(eos_ids)
        self.eos_id = given[0] if given else None
        self.eos_ids = special_tokens.ends(self.special, given, file_ends or {})
        self.shown = special_tokens.shown(self.special)

    @classmethod
    def from_gguf(cls, f: GgufFile) -> Tokenizer:
        """Raises TokenizerError when the file has no text vocabulary, one of another kind, or a broken one."""
        return _Reader(f).read()

    @classmethod
    def of_ids(cls, path: Path, n_vocab: int) -> Tokenizer:
        """That of a file without vocabulary: every id is a token without text, and a text that is not empty is refused by `encode`."""
        types = [TokenType.NORMAL] * n_vocab
        nothing = NoVocabulary(f"[tokenizer] {path}: {NO_TEXT}")
        return cls(nothing, [""] * n_vocab, types, bos=None, eos_ids=(), add_bos=False, strip_space=False)

    @property
    def n_vocab(self) -> int:
        return len(self._tokens)

    @property
    def vocab_size(self) -> int:
        """n_vocab, as others call it."""
        return len(self._tokens)

    @property
    def bos_id(self) -> int | None:
        """bos, as others call it."""
        return self.bos

    def __len__(self) -> int:
        return len(self._tokens)

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token: n characters of text are at least n / longest tokens."""
        return max(1, *map(len, self._tokens))

    @property
    def add_end(self) -> bool:
        return self.end is not None

    def encode(self, text: str, *, add_bos: bool | None = None, add_end: bool | None = None, parse_special: bool = False) -> list[int]:
        """Ids of `text`. User-defined tokens in it are always taken as such, control tokens (`<|eot_id|>`) only with parse_special.

        add_end: where it is not given, as the file says if add_bos is not given either
        """
        if not isinstance(text, str):
            raise TokenizerError(f"[tokenizer] {quoted(text)} ({type(text).__name__}) is no text; expected a str")
        add = self.add_bos if add_bos is None else add_bos
        ids = [self.bos] if add and self.bos is not None else []
        # A lone surrogate, from an argument that is no UTF-8, has no encoding.
        text = text.encode("utf-8", "replace").decode("utf-8")
        pattern = self._all_special if parse_special else self._user_defined
        # Texts at even places, special tokens between them.
        parts = pattern.split(text) if pattern else [text]
        found = [self.special[part] for part in parts[1::2]]
        before: int | None = None
        for i, piece in enumerate(parts[::2]):
            after = found[i] if i < len(found) else None
            piece = self._stripped(piece, before, after)
            if piece:
                ids.extend(self._vocabulary.encode(piece, start=i == 0 or before is not None))
            if after is not None:
                ids.append(after)
            before = after
        if self.end is not None and (add_bos is None if add_end is None else add_end):
            ids.append(self.end)
        return ids

    def _stripped(self, piece: str, before: int | None, after: int | None) -> str:
        """Without the white space that the special tokens beside it take."""
        if not self._strips:
            return piece
        if before is not None and Strip.RIGHT in self._strips.get(before, Strip(0)):
            piece = piece.lstrip(WHITE)
        if after is not None and Strip.LEFT in self._strips.get(after, Strip(0)):
            piece = piece.rstrip(WHITE)
        return piece

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text of each id by itself, special ones by their names; bytes that are no UTF-8 become U+FFFD."""
        return [self.token_bytes(i, special=True).decode("utf-8", "replace") for i in ids]

    def decode(self, ids: int | Iterable[int], *, special: bool = False) -> str:
        """Text of ids, or of one. Control tokens are left out unless `special`; bytes that are no UTF-8 become U+FFFD."""
        several = ids if isinstance(ids, Iterable) else (ids,)
        data = b"".join(self.token_bytes(i, special=special) for i in several)
        if self._strip_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:
        """The bytes one id stands for. Raises TokenizerError for an id outside the vocabulary."""
        if not hasattr(id, "__index__"):
            raise TokenizerError(f"[tokenizer] {quoted(id)} ({type(id).__name__}) is no token id; expected a whole number")
        if not 0 <= id < len(self._tokens):
            raise TokenizerError(f"[tokenizer] token id {id} is outside the vocabulary of {len(self._tokens)}")
        token, kind = self._tokens[id], self._types[id]
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            return token.encode("utf-8") if special or id in self.shown else b""
        if kind == TokenType.USER_DEFINED:
            return token.encode("utf-8")
        return self._vocabulary.spell(token)

    def type_of(self, id: int) -> TokenType:
        """What the file says of an id in the vocabulary."""
        return TokenType(self._types[id])

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self)

    @cached_property
    def _all_special(self) -> re.Pattern[str] | None:
        return _any_of(self.special)

    @cached_property
    def _user_defined(self) -> re.Pattern[str] | None:
        return _any_of(t for t, i in self.special.items() if self._types[i] == TokenType.USER_DEFINED)


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of the texts, the longest first; None when there are none."""
    ordered = sorted((t for t in texts if t), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None


class StreamDecoder:
    """Text of ids that come one by one: a character whose bytes are spread over tokens comes out once it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, id: int) -> str:
        """The text that `id` completes, perhaps none."""
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


KINDS = {
    "gpt2": "byte-level BPE",
    "llama": "SentencePiece",
    "gemma4": "BPE of characters",
    "bert": "WordPiece",
    "t5": "Unigram",
    "rwkv": "longest match",
}
"""`tokenizer.ggml.model`."""

USUAL: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "sep": 102},
    "t5": {"eos": 1, "unknown": 2},
}
"""Ids that the keys of a file may leave out, as llama.cpp takes them then."""


class _Reader:
    """The tokenizer keys of one file."""

    def __init__(self, f: GgufFile) -> None:
        self._file = f
        self._metadata = f.metadata

    def read(self) -> Tokenizer:
        model = self._file.get("tokenizer.ggml.model", str, NO_TEXT_VOCABULARY)
        if model == NO_TEXT_VOCABULARY:
            raise self.fail(NO_TEXT)
        if model not in KINDS:
            known = ", ".join(f"{name} ({what})" for name, what in KINDS.items())
            raise self.fail(f"vocabulary model {quoted(model)} is not supported; supported are {known}")
        tokens = self.strings("tokens")
        types = self.numbers("token_type", len(tokens), default=TokenType.NORMAL)
        usual = USUAL.get(model, {})

        def id_of(name: str, *others: str) -> int | None:
            """By its key, or that of another name; else the usual one."""
            for key in (name, *others):
                if (found := self.id(f"{key}_token_id", len(tokens))) is not None:
                    return found
            default = usual.get(name)
            return default if default is not None and default < len(tokens) else None

        bos = id_of("bos", *(("cls",) if model == "bert" else ()))
        ends = [i for i in (id_of("eos"), id_of("eot"), id_of("eom")) if i is not None]
        pre = self.pre_tokenizer(model) if model in ("gpt2", "gemma4") else None
        space_prefix = self.flag("add_space_prefix", model in ("llama", "t5"))
        vocabulary = self.vocabulary(model, tokens, types, id_of("unknown") or 0, space_prefix, pre)
        add_bos = self.flag("add_bos_token", pre.add_bos if pre is not None else model in ("llama", "bert"))
        if model == "bert":
            end = id_of("sep", "seperator") if self.flag("add_sep_token", True) else None
        else:
            end = id_of("eos") if self.flag("add_eos_token", model == "t5") else None
        file_ends = {key: i for key in special_tokens.FILE_ENDS if (i := self.id(f"{key}_token_id", len(tokens))) is not None}
        special = special_tokens.by_name(tokens, special_tokens.with_ends(tokens, types))
        strips = special_tokens.strips(
            special,
            architecture=self._file.get("general.architecture", str, ""),
            name=self._file.get("general.name", str, ""),
            pre=self._file.get("tokenizer.ggml.pre", str, ""),
            pieces=model == "llama",
        )
        return Tokenizer(
            vocabulary,
            tokens,
            types,
            bos=bos,
            eos_ids=ends,
            add_bos=add_bos or model == "gemma4",
            strip_space=space_prefix and model in ("llama", "t5"),
            end=end,
            file_ends=file_ends,
            strips=strips,
        )

    def vocabulary(
        self, model: str, tokens: Sequence[str], types: Sequence[int], unknown: int, space_prefix: bool, pre: PreTokenizer | None
    ) -> Vocabulary:
        if pre is not None:
            merges = self.strings("merges")
            try:
                return BpeVocabulary(tokens, merges, pre)
            except Exception as e:  # the library raises bare Exception
                raise self.fail(f"the merges do not fit the vocabulary: {quoted(str(e))}") from e
        if model == "rwkv":
            return RwkvVocabulary(tokens)
        if model == "bert":
            lowercase = self.flag("normalizer.lowercase", True)
            return WordPieceVocabulary(
                tokens, unknown=unknown, lowercase=lowercase, strip_accents=self.flag("normalizer.strip_accents", lowercase)
            )
        scores = self.numbers("scores", len(tokens), default=0.0)
        if model == "llama":
            return SpmVocabulary(tokens, scores, types, unknown=unknown, space_prefix=space_prefix)
        encoder = UnigramEncoder(
            tokens,
            scores,
            unknown=unknown,
            matched=[t in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED) for t in types],
            map_=self.character_map(),
            space_prefix=space_prefix,
            trim=self.flag("remove_extra_whitespaces", False),
        )
        return UnigramVocabulary(encoder)

    def character_map(self) -> CharacterMap | None:
        value = self.value("precompiled_charsmap", None)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype not in (np.int8, np.uint8):
            raise self.fail(f"tokenizer.ggml.precompiled_charsmap should be bytes, the file has {type(value).__name__}")
        try:
            return CharacterMap(value.tobytes())
        except ValueError as e:
            raise self.fail(f"tokenizer.ggml.precompiled_charsmap {e}") from e

    def fail(self, text: str) -> TokenizerError:
        return TokenizerError(f"[tokenizer] {self._file.path}: {text}")

    def value(self, name: str, default: Any) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def pre_tokenizer(self, model: str) -> PreTokenizer:
        name = "gemma4" if model == "gemma4" else self.value("pre", "default") or "default"
        found = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
        if found is None:
            raise self.fail(f"pre-tokenizer {quoted(name)} is not supported; supported are {', '.join(sorted(PRE_TOKENIZERS))}")
        return found

    def strings(self, name: str) -> list[str]:
        value = self.value(name, None)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise self.fail(f"tokenizer.ggml.{name} should be a list of strings, the file has {type(value).__name__}")
        return value

    def numbers(self, name: str, n: int, default: float) -> list[Any]:
        value = self.value(name, None)
        if value is None:
            return [default] * n
        if not isinstance(value, np.ndarray) or len(value) < n:
            has = f"{len(value)} values" if isinstance(value, np.ndarray) else type(value).__name__
            raise self.fail(f"tokenizer.ggml.{name} should be one number for each of {n} tokens, the file has {has}")
        numbers: list[Any] = value[:n].tolist()  # files of models with more rows than tokens may have more
        return numbers

    def flag(self, name: str, default: bool) -> bool:
        return self._file.get(f"tokenizer.ggml.{name}", bool, default)

    def id(self, name: str, n: int) -> int | None:
        value = self.value(name, None)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < n:
            raise self.fail(f"tokenizer.ggml.{name} is {quoted(value)}, expected an id below {n}")
        return value
