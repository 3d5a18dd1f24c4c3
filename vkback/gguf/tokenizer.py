"""Text to token ids and back, from the vocabulary inside a GGUF file.

Byte-level BPE ("gpt2") runs on the `tokenizers` library, SentencePiece-style merging ("llama") on vkback/gguf/spm.py.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vkback.errors import VkbackError
from vkback.gguf.file import GgufFile, quoted
from vkback.gguf.hparams import NO_TEXT_VOCABULARY
from vkback.gguf.spm import SPACE, SpmEncoder


class TokenizerError(VkbackError):
    """A file without a usable vocabulary, or an id that is not in it."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_LINES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
_LLAMA3 = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_LINES}"
_QWEN2 = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_LINES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:{_CONTRACTIONS})?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:{_CONTRACTIONS})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
)


# Cased letters, punctuation with letters among it, Chinese and Korean, digits one by one.
_DEEPSEEK = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before BPE: each pattern cuts the pieces that the one before left.

    ignore_merges  a piece that is a token as a whole is taken as it is
    add_bos        what holds when the file does not say
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_PLAIN = PreTokenizer((_GPT2,))
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_STYLE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_STYLE = PreTokenizer((_QWEN2,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais", "mpt"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3_STYLE),
    **dict.fromkeys(("smaug-bpe", "dbrx"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2_STYLE),
    "deepseek-llm": PreTokenizer(_DEEPSEEK),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), PreTokenizer(_DEEPSEEK3)),
    "gpt-4o": PreTokenizer((_O200K,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
}
"""Ways to cut text by `tokenizer.ggml.pre`. The patterns are those of the models' own published tokenizers."""

NO_TEXT = (
    "the file has no vocabulary, so a text cannot be read; give token ids: --tokens 1,2,3 (vkback run, perplexity), a list of ids in "
    "Python and in /v1/completions"
)
"""What a file without vocabulary says to a text."""

_END_NAMES = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "</s>",
    "<|return|>",
    "<|call|>",
)
"""Control tokens that end a turn in the models that have them, whatever the file's eos id is."""


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
    """How one kind of vocabulary encodes plain text and spells its tokens."""

    @abstractmethod
    def encode(self, text: str, *, start: bool) -> list[int]:
        """Ids of text without special tokens. `start`: nothing or a special token stands before it."""

    @abstractmethod
    def spell(self, token: str) -> bytes:
        """The bytes a normal token stands for."""


class BpeVocabulary(Vocabulary):
    """Byte-level BPE with the file's merges."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[str], pre: PreTokenizer) -> None:
        pairs = [(m[:cut], m[cut + 1 :]) for m in merges if (cut := m.find(" ", 1)) > 0]
        import tokenizers
        from tokenizers import Regex, models, pre_tokenizers

        bpe = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs, ignore_merges=pre.ignore_merges)
        self._tokenizer = tokenizers.Tokenizer(bpe)
        cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns]
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def encode(self, text: str, *, start: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def spell(self, token: str) -> bytes:
        letters = _letter_bytes()
        if all(c in letters for c in token):
            return bytes(letters[c] for c in token)
        return token.encode("utf-8")


class SpmVocabulary(Vocabulary):
    """Scored pieces, with spaces as SPACE and a byte token for every byte."""

    def __init__(self, tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, unknown: int, space_prefix: bool) -> None:
        byte_ids = {int(t[3:5], 16): i for i, t in enumerate(tokens) if types[i] == TokenType.BYTE and _BYTE_TOKEN.fullmatch(t)}
        complete = [byte_ids[b] for b in range(256)] if len(byte_ids) == 256 else []
        self._encoder = SpmEncoder({t: i for i, t in enumerate(tokens)}, scores, complete, unknown)
        self._space_prefix = space_prefix

    def encode(self, text: str, *, start: bool) -> list[int]:
        prefix = " " if start and self._space_prefix else ""
        return self._encoder.encode((prefix + text).replace(" ", SPACE))

    def spell(self, token: str) -> bytes:
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace(SPACE, " ").encode("utf-8")


class NoVocabulary(Vocabulary):
    """Ids without text."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def encode(self, text: str, *, start: bool) -> list[int]:
        raise TokenizerError(f"[tokenizer] {self._path}: {NO_TEXT}")

    def spell(self, token: str) -> bytes:
        return b""


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Text to ids and back.

    bos        id put before a text, None when the vocabulary has none
    eos_ids    ids that end a text or a turn; eos_id is the one that the file names first
    add_bos    whether `encode` puts it there by default
    special    text -> id of control and user-defined tokens
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
    ) -> None:
        self._vocabulary = vocabulary
        self._tokens = tokens
        self._types = types
        self._strip_space = strip_space
        self.bos = bos
        self.add_bos = add_bos and bos is not None
        by_text = {t: i for i, t in enumerate(tokens) if types[i] in (TokenType.CONTROL, TokenType.USER_DEFINED)}
        self.special = by_text
        ends = tuple(eos_ids)
        self.eos_id = ends[0] if ends else None
        # Where a turn ends with <|return|>, <|end|> ends one of its several messages.
        named = (by_text[t] for t in _END_NAMES if t in by_text and not (t == "<|end|>" and "<|return|>" in by_text))
        self.eos_ids = frozenset((*ends, *named))

    @classmethod
    def from_gguf(cls, f: GgufFile) -> Tokenizer:
        """Raises TokenizerError when the file has no text vocabulary, one of another kind, or a broken one."""
        return _Reader(f).read()

    @classmethod
    def of_ids(cls, path: Path, n_vocab: int) -> Tokenizer:
        """That of a file without vocabulary: every id is a token without text, and a text that is not empty is refused by `encode`."""
        types = [TokenType.NORMAL] * n_vocab
        return cls(NoVocabulary(path), [""] * n_vocab, types, bos=None, eos_ids=(), add_bos=False, strip_space=False)

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

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = False) -> list[int]:
        """Ids of `text`. User-defined tokens in it are always taken as such, control tokens (`<|eot_id|>`) only with parse_special."""
        if not isinstance(text, str):
            raise TokenizerError(f"[tokenizer] {quoted(text)} ({type(text).__name__}) is no text; expected a str")
        add = self.add_bos if add_bos is None else add_bos
        ids = [self.bos] if add and self.bos is not None else []
        # A lone surrogate, from an argument that is no UTF-8, has no encoding.
        text = text.encode("utf-8", "replace").decode("utf-8")
        pattern = self._all_special if parse_special else self._user_defined
        start = True
        for piece in pattern.split(text) if pattern else [text]:
            if pattern and piece in self.special and pattern.fullmatch(piece):
                ids.append(self.special[piece])
                start = True
            elif piece:
                ids.extend(self._vocabulary.encode(piece, start=start))
                start = False
        return ids

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
            return token.encode("utf-8") if special else b""
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


class _Reader:
    """The tokenizer keys of one file."""

    def __init__(self, f: GgufFile) -> None:
        self._file = f
        self._metadata = f.metadata

    def read(self) -> Tokenizer:
        model = self._file.get("tokenizer.ggml.model", str, NO_TEXT_VOCABULARY)
        if model == NO_TEXT_VOCABULARY:
            raise self.fail(NO_TEXT)
        if model not in ("gpt2", "llama"):
            known = "gpt2 (byte-level BPE) and llama (SentencePiece)"
            raise self.fail(f"vocabulary model {quoted(model)} is not supported; supported are {known}")
        tokens = self.strings("tokens")
        types = self.numbers("token_type", len(tokens), default=TokenType.NORMAL)
        ends = [self.id(f"{name}_token_id", len(tokens)) for name in ("eos", "eot", "eom")]
        bos = self.id("bos_token_id", len(tokens))
        if model == "gpt2":
            pre = self.pre_tokenizer()
            merges = self.strings("merges")
            try:
                vocabulary: Vocabulary = BpeVocabulary(tokens, merges, pre)
            except Exception as e:  # the library raises bare Exception when a merge is not in the vocabulary
                raise self.fail(f"the merges do not fit the vocabulary: {quoted(str(e))}") from e
            add_bos, strip = self.flag("add_bos_token", pre.add_bos), False
        else:
            strip = self.flag("add_space_prefix", True)
            scores = self.numbers("scores", len(tokens), default=0.0)
            unknown = self.id("unknown_token_id", len(tokens)) or 0
            vocabulary = SpmVocabulary(tokens, scores, types, unknown=unknown, space_prefix=strip)
            add_bos = self.flag("add_bos_token", True)
        return Tokenizer(vocabulary, tokens, types, bos=bos, eos_ids=[i for i in ends if i is not None], add_bos=add_bos, strip_space=strip)

    def fail(self, text: str) -> TokenizerError:
        return TokenizerError(f"[tokenizer] {self._file.path}: {text}")

    def value(self, name: str, default: Any) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def pre_tokenizer(self) -> PreTokenizer:
        name = self.value("pre", "default")
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
        if not isinstance(value, np.ndarray) or len(value) != n:
            has = f"{len(value)} values" if isinstance(value, np.ndarray) else type(value).__name__
            raise self.fail(f"tokenizer.ggml.{name} should be one number for each of {n} tokens, the file has {has}")
        numbers: list[Any] = value.tolist()
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
