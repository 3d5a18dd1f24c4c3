"""Tokenizer: ids against another program's, SentencePiece merging against its definition, spelling, streaming, special tokens."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_gguf import llama_metadata, llama_tensors, write_gguf

from vkback.gguf.spm import SPACE, SpmEncoder
from vkback.gguf.tokenizer import PRE_TOKENIZERS
from vkback.models import GgufFile, Tokenizer, TokenizerError
from vkback.paths import builtin_model

DATA = Path(__file__).parents[1] / "data"
LLAMA_CPP = json.loads((DATA / "llama_cpu.json").read_text())
BYTES = [f"<0x{b:02X}>" for b in range(256)]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def from_keys(tmp_path: Path, **keys: Any) -> Tokenizer:
    """The tokenizer of a file with these `tokenizer.ggml.` keys; None removes one."""
    metadata = llama_metadata() | {f"tokenizer.ggml.{k}": v for k, v in keys.items() if v is not None}
    return Tokenizer.from_gguf(GgufFile.open(write_gguf(tmp_path / "t.gguf", "llama", metadata, llama_tensors())))


def spm(tmp_path: Path, pieces: dict[str, float], **keys: Any) -> Tokenizer:
    """A SentencePiece vocabulary: <unk> 0, <s> 1, </s> 2, bytes 3..258, then `pieces` with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    base = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [0.0] * 259 + [float(s) for s in pieces.values()],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return from_keys(tmp_path, **base | keys)


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_bytes(i, special=True).decode("utf-8", "replace") for i in ids]


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_ids_and_text_equal_those_of_llama_cpp(name: str) -> None:
    tokenizer = Tokenizer.from_gguf(GgufFile.open(builtin_model(name)))
    for prompt in LLAMA_CPP[name]["prompts"]:
        assert tokenizer.encode(prompt["text"]) == prompt["ids"]
        assert tokenizer.decode(prompt["ids"]) == prompt["text"]
        assert tokenizer.decode(prompt["greedy"]) == prompt["greedy_text"]


@pytest.mark.parametrize("text", ["", " ", "  two  spaces ", "tab\tline\r\n\n", "naïve café", "日本語 😀", "It's 1,234.5!", "\x00\x7f"])
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = Tokenizer.from_gguf(GgufFile.open(builtin_model("demo-dense")))
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos == 0
    assert tokenizer.encode(text, add_bos=False) == ids[1:]
    assert tokenizer.decode(ids) == text


def test_a_lone_surrogate_is_replaced_not_fatal() -> None:
    tokenizer = Tokenizer.from_gguf(GgufFile.open(builtin_model("demo-dense")))
    assert tokenizer.decode(tokenizer.encode("a\udcffb")) == "a?b"


def test_streaming_holds_back_half_characters() -> None:
    tokenizer = Tokenizer.from_gguf(GgufFile.open(builtin_model("demo-dense")))
    ids = tokenizer.encode("A 😀 é.", add_bos=False)
    stream = tokenizer.stream()
    out = [stream.feed(i) for i in ids]
    assert "".join(out) + stream.flush() == "A 😀 é."
    assert "" in out and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in out)
    half = tokenizer.stream()
    assert half.feed(ids[next(i for i, piece in enumerate(out) if not piece)]) == ""
    assert half.flush() == "\N{REPLACEMENT CHARACTER}"


def test_spm_merges_the_best_score_first(tmp_path: Path) -> None:
    # Once "ab" is joined nothing joins it with "c".
    tokenizer = spm(tmp_path, {"a": -9, "b": -9, "c": -9, SPACE: -9, "ab": -1, "bc": -2})
    assert texts(tokenizer, tokenizer.encode("abc", add_bos=False)) == [" ", "ab", "c"]
    tokenizer = spm(tmp_path, {"a": -9, "b": -9, "c": -9, SPACE: -9, "ab": -2, "bc": -1})
    assert texts(tokenizer, tokenizer.encode("abc", add_bos=False)) == [" ", "a", "bc"]


def test_spm_takes_the_leftmost_of_equal_scores(tmp_path: Path) -> None:
    tokenizer = spm(tmp_path, {"a": -9, SPACE: -9, "aa": -1})
    assert texts(tokenizer, tokenizer.encode("aaa", add_bos=False)) == [" ", "aa", "a"]


def test_spm_space_prefix_bos_and_byte_fallback(tmp_path: Path) -> None:
    pieces = {SPACE: -9.0, "a": -9.0, f"{SPACE}a": -1.0}
    tokenizer = spm(tmp_path, pieces)
    assert texts(tokenizer, tokenizer.encode("a a")) == ["<s>", " a", " a"]
    ids = tokenizer.encode("aé", add_bos=False)
    assert ids == [259 + 2, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(ids) == "aé"
    assert tokenizer.encode("") == [1]
    stream = tokenizer.stream()
    assert [stream.feed(i) for i in ids] == [" a", "", "é"]
    bare = spm(tmp_path, pieces, add_space_prefix=False, add_bos_token=False)
    assert texts(bare, bare.encode("a a")) == ["a", " a"]
    assert bare.decode(bare.encode("a a")) == "a a"


def test_gemma_s_vocabulary(tmp_path: Path) -> None:
    """Of the SentencePiece kind: no space before a text, line breaks and runs of spaces as tokens of their own, turns that end."""
    pieces = {SPACE: -9.0, "a": -9.0, f"{SPACE}a": -1.0, "\n\n": 0.0, "  ": 0.0, "<start_of_turn>": 0.0, "<end_of_turn>": 0.0}
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 3, USER_DEFINED, USER_DEFINED, CONTROL, CONTROL]
    tokenizer = spm(tmp_path, pieces, tokens=tokens, token_type=types, add_space_prefix=False)
    ids = tokenizer.encode("a a\n\n  a\n")
    assert texts(tokenizer, ids) == ["<s>", "a", " a", "\n\n", "  ", "a", "\n"]
    assert tokenizer.decode(ids) == "a a\n\n  a\n"
    assert texts(tokenizer, tokenizer.encode("<start_of_turn>a", parse_special=True)) == ["<s>", "<start_of_turn>", "a"]
    assert tokenizer.eos_ids == {2, len(tokens) - 1}


def test_gpt2_adds_no_bos(tmp_path: Path) -> None:
    tokenizer = byte_level(
        tmp_path, pre="gpt-2", extra=["<|endoftext|>"], token_type=[NORMAL] * 257 + [CONTROL], bos_token_id=257, eos_token_id=257
    )
    assert texts(tokenizer, tokenizer.encode("ab")) == ["ab"]
    assert tokenizer.eos_ids == {257} and tokenizer.decode([257]) == ""


def test_spm_without_byte_tokens_gives_unknown(tmp_path: Path) -> None:
    keys = {"model": "llama", "tokens": ["<unk>", SPACE, "a"], "token_type": [UNKNOWN, NORMAL, NORMAL], "scores": [0.0, -1.0, -1.0]}
    tokenizer = from_keys(tmp_path, **keys)
    assert tokenizer.encode("aé") == [1, 2, 0]
    assert tokenizer.bos is None


def plain_spm(ids: dict[str, int], scores: list[float], text: str) -> list[str]:
    """The definition, pair by pair: join the neighbours whose token scores best, leftmost of equals, until none is a token."""
    pieces = list(text)
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not pairs:
            return pieces
        i = min(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def test_spm_heap_equals_the_definition() -> None:
    rng = random.Random(5)
    for _ in range(60):
        tokens = list("abc") + sorted({"".join(rng.choices("abc", k=rng.randint(2, 5))) for _ in range(25)})
        ids = {t: i for i, t in enumerate(tokens)}
        # Few distinct scores, so that ties are common.
        scores = [float(rng.randint(-6, 0)) for _ in tokens]
        text = "".join(rng.choices("abc", k=40))
        assert SpmEncoder(ids, scores, [], 0).encode(text) == [ids[p] for p in plain_spm(ids, scores, text)]


def byte_level(tmp_path: Path, *, pre: str = "gpt-2", merges: list[str] | None = None, extra: list[str] = (), **keys: Any) -> Tokenizer:  # type: ignore[assignment]
    """The 256 byte letters, the merged tokens, then `extra` tokens."""
    letters = [chr(b) for b in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]] + [chr(0x100 + i) for i in range(68)]
    merges = merges or ["a b"]
    tokens = [*letters, *(m.replace(" ", "", 1) for m in merges), *extra]
    return from_keys(tmp_path, **{"model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges} | keys)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'M x 12345 a  b", ["I", "'", "M", " x", " 12345", " a", " ", " b"]),
        ("llama-bpe", "I'M x 12345 a  b", ["I", "'M", " x", " ", "123", "45", " a", " ", " b"]),
        ("qwen2", "I'M x 12", ["I", "'M", " x", " ", "1", "2"]),
        ("smollm", "x 12", ["x", " ", "1", "2"]),
        ("dbrx", "I'M x 12345", ["I", "'M", " x", " ", "123", "45"]),
        ("tekken", "fooBar 12", ["foo", "Bar", " ", "1", "2"]),
        ("gpt-4o", "fooBar'LL 1234", ["foo", "Bar'LL", " ", "123", "4"]),
        ("deepseek-llm", "Hi you! 12", ["Hi", " you", "!", " ", "1", "2"]),
        ("deepseek-v3", "foo_bar 1234!\n", ["foo", "_bar", " ", "123", "4", "!\n"]),
        ("default", "a-b 1234", ["a", "-", "b", " ", "123", "4"]),
        ("llama-bpe", "!\n\n x", ["!\n\n", " x"]),
    ],
)
def test_where_pre_tokenizers_cut(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    """With merges that join any two letters the tokens are the pieces: here each piece is a token, made by a chain of merges."""
    spelled = ["".join({" ": "Ġ", "\n": "Ċ"}.get(c, c) for c in p) for p in pieces if len(p) > 1]
    merges = list(dict.fromkeys(f"{p[:i]} {p[i]}" for p in spelled for i in range(1, len(p))))
    tokenizer = byte_level(tmp_path, pre=pre, merges=merges)
    assert texts(tokenizer, tokenizer.encode(text, add_bos=False)) == pieces


def test_ignore_merges_takes_whole_pieces(tmp_path: Path) -> None:
    merges = ["a b", "c d"]
    whole = byte_level(tmp_path, pre="llama-bpe", merges=merges, extra=["abcd"])
    assert texts(whole, whole.encode("abcd")) == ["abcd"]
    merged = byte_level(tmp_path, pre="qwen2", merges=merges, extra=["abcd"])
    assert texts(merged, merged.encode("abcd")) == ["ab", "cd"]


def test_special_tokens(tmp_path: Path) -> None:
    types = [NORMAL] * 257 + [CONTROL, CONTROL, USER_DEFINED]
    tokenizer = byte_level(tmp_path, extra=["<|begin|>", "<|eot_id|>", "<tool>"], token_type=types, bos_token_id=257, eos_token_id=2)
    assert tokenizer.special == {"<|begin|>": 257, "<|eot_id|>": 258, "<tool>": 259}
    assert tokenizer.eos_ids == {2, 258}
    assert tokenizer.encode("a<tool>b") == [*tokenizer.encode("a"), 259, *tokenizer.encode("b")]
    assert 258 not in tokenizer.encode("a<|eot_id|>")
    assert tokenizer.encode("a<|eot_id|>", parse_special=True) == [*tokenizer.encode("a"), 258]
    assert tokenizer.encode("a", add_bos=True)[0] == 257
    assert tokenizer.decode([257, *tokenizer.encode("ab"), 259, 258]) == "ab<tool>"
    assert tokenizer.decode([257, *tokenizer.encode("ab")], special=True) == "<|begin|>ab"


def test_a_message_s_end_is_not_a_turn_s(tmp_path: Path) -> None:
    types = [NORMAL] * 257 + [CONTROL] * 3
    extra = ["<|end|>", "<|return|>", "<|call|>"]
    assert byte_level(tmp_path, pre="gpt-4o", extra=extra, token_type=types, eos_token_id=258).eos_ids == {258, 259}
    assert byte_level(tmp_path, extra=extra[:1], token_type=types[:258], eos_token_id=2).eos_ids == {2, 257}


def test_llama3_style_adds_bos_unless_told_otherwise(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"extra": ["<s>"], "token_type": [NORMAL] * 257 + [CONTROL], "bos_token_id": 257}
    assert byte_level(tmp_path, pre="llama-bpe", **keys).add_bos
    assert not byte_level(tmp_path, pre="llama-bpe", add_bos_token=False, **keys).add_bos
    assert not byte_level(tmp_path, pre="qwen2", **keys).add_bos


def test_errors(tmp_path: Path) -> None:
    def says(text: str, **keys: Any) -> None:
        with pytest.raises(TokenizerError, match=text):
            byte_level(tmp_path, **keys)

    says(r"t\.gguf: vocabulary model 't5' is not supported; supported are gpt2 .* and llama", model="t5")
    says(r"pre-tokenizer 'klingon' is not supported; supported are codeshell, command-r, ", pre="klingon")
    says(r"tokenizer\.ggml\.token_type should be one number for each of 257 tokens, the file has 3 values", token_type=[1, 1, 1])
    says(r"tokenizer\.ggml\.eos_token_id is 257, expected an id below 257", eos_token_id=257)
    says(r"tokenizer\.ggml\.tokens should be a list of strings, the file has ndarray", tokens=[1, 2])
    says(r"the merges do not fit the vocabulary: .*out of vocabulary", merges=["a b", "é ñ"], tokens=["a", "b", "ab"])
    tokenizer = byte_level(tmp_path)
    with pytest.raises(TokenizerError, match="token id 257 is outside the vocabulary of 257"):
        tokenizer.decode([257])
    assert set(PRE_TOKENIZERS) >= {"default", "gpt-2", "llama-bpe", "qwen2"}


def test_the_text_of_the_perplexity_data_is_cut_as_expected() -> None:
    tokenizer = Tokenizer.from_gguf(GgufFile.open(builtin_model("demo-dense")))
    text = (DATA / "war_of_the_worlds.txt").read_text()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) > 4096 and np.min(ids) >= 0


def test_a_tokenizer_has_what_others_call_its_parts() -> None:
    tokenizer = Tokenizer.from_gguf(GgufFile.open(builtin_model("demo-dense")))
    assert tokenizer.vocab_size == tokenizer.n_vocab == len(tokenizer) == 4096
    assert tokenizer.bos_id == tokenizer.bos and tokenizer.eos_id in tokenizer.eos_ids
    ids = tokenizer.encode("It was", add_bos=False)
    assert "".join(tokenizer.pieces(ids)) == tokenizer.decode(ids) == "It was"
    assert tokenizer.decode(ids[0]) == tokenizer.pieces(ids)[0] == tokenizer.decode(np.array(ids)[:1])
    assert tokenizer.decode(np.array(ids)) == "It was"
    assert tokenizer.pieces([tokenizer.eos_id or 0]) == [tokenizer.token_bytes(tokenizer.eos_id or 0, special=True).decode()] != [""]


@pytest.mark.parametrize("id", ["5", 1.5, None, [1]])
def test_what_is_no_token_id_is_named(id: Any) -> None:
    tokenizer = Tokenizer.from_gguf(GgufFile.open(builtin_model("demo-dense")))
    for call in (tokenizer.token_bytes, tokenizer.stream().feed, lambda wrong: tokenizer.decode([wrong])):
        with pytest.raises(TokenizerError, match=r"is no token id; expected a whole number"):
            call(id)
    for text in (None, 5, b"It"):
        with pytest.raises(TokenizerError, match=r"is no text; expected a str"):
            tokenizer.encode(text)  # type: ignore[arg-type]
