"""The vocabulary of a published model as keys of a GGUF file: from tokenizer.json, or tokenizer.model (SentencePiece)."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vkback.gguf.pre_tokenizers import GPT2, PRE_TOKENIZERS, Cut
from vkback.gguf.safetensors import FolderError, read_json
from vkback.gguf.token_types import TokenType

Keys = dict[str, Any]

NEVER_MERGED = -1e6
"""Score of a SentencePiece token that no merge of tokenizer.json makes."""


def vocabulary_keys(folder: Path, n_vocab: int, pre: str = "") -> Keys:
    """`tokenizer.*` keys of a folder; those of a model without vocabulary where it has none.

    n_vocab  rows of the embedding; tokens that the vocabulary lacks are filled in as unused
    pre      tokenizer.ggml.pre; "": the name of the known way of cutting text that tokenizer.json describes
    Raises FolderError for a vocabulary that is of none of the kinds here.
    """
    described = read_json(folder / "tokenizer.json")
    pieces = folder / "tokenizer.model"
    if pieces.is_file() and not _is_byte_level(described):
        keys = _of_pieces(pieces, described)
    elif described:
        keys = _of_json(folder / "tokenizer.json", described, pre)
    else:
        return {"tokenizer.ggml.model": "no_vocab"}
    tokens: list[str] = keys["tokenizer.ggml.tokens"]
    if len(tokens) > n_vocab:
        raise FolderError(f"[convert] {folder}: the vocabulary has {len(tokens)} tokens, the embedding {n_vocab} rows")
    for i in range(len(tokens), n_vocab):
        tokens.append(f"[PAD{i}]")
        keys["tokenizer.ggml.token_type"].append(int(TokenType.UNUSED))
        if "tokenizer.ggml.scores" in keys:
            keys["tokenizer.ggml.scores"].append(NEVER_MERGED)
    return keys | _special_keys(folder, described, n_vocab)


def _special_keys(folder: Path, described: Mapping[str, Any], n_vocab: int) -> Keys:
    """Ids of the ends and what is added at them, and the chat template, as gguf finds them."""
    from gguf.vocab import SpecialVocab

    logging.getLogger("gguf.vocab").setLevel(logging.ERROR)
    found = SpecialVocab(folder, n_vocab=n_vocab)
    keys: Keys = {}
    for kind, number in found.special_token_ids.items():
        name = {"unk": "unknown", "sep": "seperator", "pad": "padding"}.get(kind, kind)
        keys[f"tokenizer.ggml.{name}_token_id"] = int(number)
    for kind, added in found.add_special_token.items():
        keys[f"tokenizer.ggml.add_{kind}_token"] = bool(added)
    if isinstance(found.chat_template, str):
        keys["tokenizer.chat_template"] = found.chat_template
    return keys


def _is_byte_level(described: Mapping[str, Any]) -> bool:
    return bool(described) and any(step.get("type") == "ByteLevel" for step in _steps(described.get("pre_tokenizer")))


def _steps(described: Any) -> Iterator[Mapping[str, Any]]:
    """A pre-tokenizer or normalizer, or those of a sequence."""
    if isinstance(described, Mapping):
        inner = described.get("pretokenizers", described.get("normalizers"))
        if isinstance(inner, list):
            for each in inner:
                yield from _steps(each)
        else:
            yield described


def _of_json(path: Path, described: Mapping[str, Any], pre: str) -> Keys:
    model = described.get("model", {})
    vocabulary = model.get("vocab")
    if model.get("type", "BPE") != "BPE" or not isinstance(vocabulary, Mapping):
        raise FolderError(f"[convert] {path}: a vocabulary of kind {model.get('type')}; expected BPE, or tokenizer.model of SentencePiece")
    added = {int(each["id"]): each for each in described.get("added_tokens", [])}
    by_id = {int(number): str(token) for token, number in vocabulary.items()} | {i: str(each["content"]) for i, each in added.items()}
    size = max(by_id) + 1
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    types = [
        int(TokenType.UNUSED if i not in by_id else TokenType.NORMAL if i not in added else _added_type(added[i])) for i in range(size)
    ]
    merges = [each if isinstance(each, str) else " ".join(each) for each in model.get("merges", [])]
    keys: Keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    if _is_byte_level(described):
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre or _pre_name(path, described),
            **keys,
            "tokenizer.ggml.merges": merges,
        }
    if not model.get("byte_fallback"):
        raise FolderError(f"[convert] {path}: BPE of neither bytes nor SentencePiece; expected one of them")
    ranks = {each.replace(" ", "", 1): -float(i) for i, each in enumerate(merges)}
    for i, token in enumerate(tokens):
        if types[i] == TokenType.NORMAL and len(token) == 6 and token.startswith("<0x"):
            types[i] = int(TokenType.BYTE)
        elif token == model.get("unk_token"):
            types[i] = int(TokenType.UNKNOWN)
    scores = [ranks.get(token, NEVER_MERGED) for token in tokens]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", **keys, "tokenizer.ggml.scores": scores}


def _added_type(token: Mapping[str, Any]) -> TokenType:
    return TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED


def _pre_name(path: Path, described: Mapping[str, Any]) -> str:
    """The first known way of cutting text that has the same steps."""
    steps: list[str | Cut] = []
    for step in _steps(described.get("pre_tokenizer")):
        kind = step.get("type")
        if kind == "Split":
            pattern = step.get("pattern", {})
            steps.append(str(pattern.get("Regex", pattern.get("String", ""))))
        elif kind == "Digits":
            steps.append(Cut.DIGIT if step.get("individual_digits") else Cut.DIGITS)
        elif kind == "Punctuation":
            steps.append(Cut.PUNCTUATION)
        elif kind == "ByteLevel" and step.get("use_regex", True):
            steps.append(GPT2)
    nfc = any(step.get("type") == "NFC" for step in _steps(described.get("normalizer")))
    whole = bool(described.get("model", {}).get("ignore_merges"))
    same = [name for name, known in PRE_TOKENIZERS.items() if known.steps == tuple(steps) and known.nfc == nfc and known.bytes]
    exact = [name for name in same if PRE_TOKENIZERS[name].ignore_merges == whole]
    if not exact and not same:
        raise FolderError(f"[convert] {path}: cuts text in a way that has no name here; give its tokenizer.ggml.pre, as --pre qwen2")
    return (exact or same)[0]


def _of_pieces(path: Path, described: Mapping[str, Any]) -> Keys:
    """The pieces of a SentencePiece model: of field 1 text (1), score (2) and type (3)."""
    try:
        pieces = [_piece(value) for field, value in _fields(path.read_bytes()) if field == 1 and isinstance(value, bytes)]
    except (OSError, IndexError, struct.error, UnicodeDecodeError) as e:
        raise FolderError(f"[convert] {path}: no model of SentencePiece, or damaged: {e}. Fetch it again") from e
    if not pieces:
        raise FolderError(f"[convert] {path}: has no pieces. Fetch it again")
    tokens, scores, types = ([each[i] for each in pieces] for i in range(3))
    for each in described.get("added_tokens", []):
        number, text, kind = int(each["id"]), str(each["content"]), int(_added_type(each))
        while len(tokens) <= number:
            tokens.append(f"[PAD{len(tokens)}]")
            scores.append(NEVER_MERGED)
            types.append(int(TokenType.UNUSED))
        if types[number] in (TokenType.NORMAL, TokenType.UNUSED):
            tokens[number], types[number] = text, kind
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
    }


def _piece(raw: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, 1
    for field, value in _fields(raw):
        if field == 1 and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif field == 2 and isinstance(value, bytes):
            score = float(struct.unpack("<f", value)[0])
        elif field == 3 and isinstance(value, int):
            kind = value
    return text, score, kind


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a message of protocol buffers: numbers as ints, all else as bytes."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(raw):
        key = number()
        kind = key & 7
        if kind == 0:
            yield key >> 3, number()
            continue
        size = {1: 8, 5: 4}[kind] if kind in (1, 5) else number()
        if kind not in (1, 2, 5) or at + size > len(raw):
            raise IndexError(f"a field ends beyond byte {len(raw)}")
        yield key >> 3, raw[at : at + size]
        at += size
