"""The vocabulary of a synthetic model: as many tokens as the real one, of its kind, and made up.

Every byte is a token, so any text can be encoded and decoded; of WordPiece every letter and figure is one. The others are made-up words,
of which those of one and two letters come out of text, too; two mark where a text begins and ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, product
from string import ascii_lowercase, digits

from gguf import GGUFWriter

from vkback.gguf.spm import SPACE
from vkback.gguf.token_types import TokenType
from vkback.gguf.vocabularies import byte_letters

SPM = "spm"
"""The kind that is SentencePiece."""

WORD_PIECE = "bert"
"""The kind that is WordPiece, of letters and figures alone; all others are byte-level BPE with a pre-tokenizer of that name."""

MERGED = 2
"""Letters of the longest words that BPE has merges for."""

BPE_ENDS = ("<|begin_of_text|>", "<|end_of_text|>")
SPM_SPECIAL = ("<unk>", "<s>", "</s>")
WORD_PIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class MadeVocabulary:
    """Tokens with their types and, of SPM, scores; merges of BPE; ids of the beginning and the end of a text."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    bos: int
    eos: int


def made_vocabulary(kind: str, n_vocab: int) -> MadeVocabulary:
    """Raises ValueError where n_vocab has no room for all bytes."""
    made = {SPM: _spm, WORD_PIECE: _word_piece}.get(kind, _bpe)(n_vocab)
    if len(made.tokens) != n_vocab:
        raise ValueError(f"a vocabulary of {n_vocab} tokens, expected at least {len(made.tokens)}")
    return made


def add_vocabulary(writer: GGUFWriter, kind: str, n_vocab: int) -> None:
    """Add it to the metadata of a file."""
    made = made_vocabulary(kind, n_vocab)
    writer.add_tokenizer_model({SPM: "llama", WORD_PIECE: "bert"}.get(kind, "gpt2"))
    writer.add_token_list(made.tokens)
    writer.add_token_types(made.types)
    if kind == SPM:
        writer.add_token_scores(made.scores)
        writer.add_unk_token_id(0)
    elif kind == WORD_PIECE:
        writer.add_unk_token_id(WORD_PIECE_SPECIAL.index("[UNK]"))
        writer.add_sep_token_id(made.eos)
    else:
        writer.add_tokenizer_pre(kind)
        writer.add_token_merges(made.merges)
    writer.add_bos_token_id(made.bos)
    writer.add_eos_token_id(made.eos)


def _words() -> Iterator[str]:
    """a to z, aa to zz, aaa and so on: whatever a word begins with is a word before it."""
    return ("".join(letters) for length in count(1) for letters in product(ascii_lowercase, repeat=length))


def _bpe(n_vocab: int) -> MadeVocabulary:
    letters = byte_letters()
    space = letters[ord(" ")]
    words = list(islice(_words(), max(0, n_vocab - len(letters) - len(BPE_ENDS))))
    merged = (word for word in words if len(word) <= MERGED)
    tokens = [*letters, *(space + word for word in words), *BPE_ENDS]
    types = [TokenType.NORMAL] * (len(tokens) - 2) + [TokenType.CONTROL] * 2
    merges = [f"{space}{word[:-1]} {word[-1]}" for word in merged]
    return MadeVocabulary(tokens, [int(t) for t in types], [], merges, len(tokens) - 2, len(tokens) - 1)


def _word_piece(n_vocab: int) -> MadeVocabulary:
    letters = [*digits, *ascii_lowercase]
    fixed = [*WORD_PIECE_SPECIAL, *letters, *(SPACE + letter for letter in letters)]
    words = (SPACE + word for word in _words() if len(word) > 1)
    tokens = fixed + list(islice(words, max(0, n_vocab - len(fixed))))
    special = len(WORD_PIECE_SPECIAL)
    types = [TokenType.CONTROL] * special + [TokenType.NORMAL] * (len(tokens) - special)
    return MadeVocabulary(tokens, [int(t) for t in types], [], [], 2, 3)


def _spm(n_vocab: int) -> MadeVocabulary:
    fixed = [*SPM_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *ascii_lowercase]
    tokens = fixed + [SPACE + word for word in islice(_words(), max(0, n_vocab - len(fixed)))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * (len(tokens) - len(types))
    return MadeVocabulary(tokens, [int(t) for t in types], [-float(i) for i in range(len(tokens))], [], 1, 2)
