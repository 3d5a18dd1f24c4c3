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

from vkback.gguf.pre_tokenizers import PRE_TOKENIZERS
from vkback.gguf.spm import SPACE, SpmEncoder
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
    tokens = ["<unk>", "<s>", "</s>", SPACE, "a"]
    types = [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL]
    tokenizer = from_keys(tmp_path, model="llama", tokens=tokens, token_type=types, scores=[0.0, 0.0, 0.0, -1.0, -1.0])
    assert tokenizer.encode("aé") == [1, 3, 4, 0]


def test_spm_has_the_usual_ids_where_the_file_names_none(tmp_path: Path) -> None:
    tokenizer = spm(tmp_path, {SPACE: -9, "a": -9}, bos_token_id=None, eos_token_id=None, unknown_token_id=None)
    assert (tokenizer.bos, tokenizer.eos_id) == (1, 2) and tokenizer.encode("a")[0] == 1
    few = from_keys(tmp_path, model="llama", tokens=["a"], token_type=[NORMAL], scores=[0.0], bos_token_id=None, eos_token_id=None)
    assert few.bos is None and few.eos_id is None and few.encode("a") == [0, 0]


def test_an_end_is_put_behind_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = spm(tmp_path, {SPACE: -9, "a": -9}, add_eos_token=True)
    assert texts(tokenizer, tokenizer.encode("a")) == ["<s>", " ", "a", "</s>"] and tokenizer.add_end
    assert texts(tokenizer, tokenizer.encode("a", add_bos=False)) == [" ", "a"]
    assert texts(tokenizer, tokenizer.encode("a", add_bos=False, add_end=True)) == [" ", "a", "</s>"]
    assert texts(tokenizer, tokenizer.encode("a", add_end=False)) == ["<s>", " ", "a"]
    assert spm(tmp_path, {SPACE: -9, "a": -9}).encode("a") == [1, 259, 260]


def test_the_unknown_token_may_be_named(tmp_path: Path) -> None:
    tokenizer = spm(tmp_path, {SPACE: -9, "a": -9}, add_space_prefix=False)
    assert tokenizer.encode("a<unk>a", add_bos=False, parse_special=True) == [260, 0, 260]
    assert 0 not in tokenizer.encode("a<unk>a", add_bos=False)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("Phi-3-mini-4k-instruct", "llama"), ("Phi 3.5 Mini Instruct", "llama"), ("microsoft_phi3", "llama"), ("finetuned", "phi3")],
)
def test_phi_3_s_special_tokens_take_white_space_on_their_right(tmp_path: Path, name: str, architecture: str) -> None:
    extra = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"]
    pieces = {SPACE: -9.0, "H": -9.0, "i": -9.0, "\n": -9.0, f"{SPACE}H": -1.0, f"{SPACE}Hi": -0.5}
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces, *extra]
    keys: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), *[CONTROL] * 4],
        "scores": [0.0] * 259 + list(pieces.values()) + [0.0] * 4,
    }
    metadata = llama_metadata() | {f"tokenizer.ggml.{k}": v for k, v in keys.items()} | {"general.name": name}
    tokenizer = Tokenizer.from_gguf(GgufFile.open(write_gguf(tmp_path / "t.gguf", architecture, metadata, llama_tensors())))

    def read(text: str) -> list[str]:
        return texts(tokenizer, tokenizer.encode(text, add_bos=False, parse_special=True))

    assert read("<|user|>\nHi<|end|>\n<|assistant|>\n") == ["<|user|>", " Hi", "<|end|>", "<|assistant|>"]
    assert read("</s> \u3000\t Hi") == ["</s>", " Hi"]
    assert read("<|endoftext|>\n") == ["<|endoftext|>", " ", "\n"], "takes none, nor do <s> and <unk>"
    assert read("Hi \n<|end|>")[-2:] == ["\n", "<|end|>"], "none on the left"


def test_a_mask_takes_white_space_on_its_left(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, pre="jina-v2-de", extra=["<mask>"], token_type=[NORMAL] * 257 + [CONTROL])
    assert texts(tokenizer, tokenizer.encode("a \n<mask> b", parse_special=True)) == ["a", "<mask>", " ", "b"]


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
        ("deepseek-coder", "a_b 12\n(x", ["a", "_", "b", " ", "1", "2", "\n", "(", "x"]),
        ("seed-coder", "a(){}\n12", ["a", "(){}", "\n", "1", "2"]),
        ("llama4", "fooBar'LL 1234/\n", ["foo", "Bar'LL", " ", "123", "4", "/\n"]),
        ("superbpe", "to be or 12345", ["to be or ", "12", "345"]),
        ("youtu", "ab 12", ["ab", " ", "1", "2"]),
        ("minicpm5", "x 12345", ["x", " ", "123", "45"]),
        ("falcon", "a-b 12345", ["a", "-", "b", " ", "123", "45"]),
        ("bloom", "to be, 12345.", ["to", " be", ",", " 12345", "."]),
        ("viking", "to 12", ["to", " ", "1", "2"]),
        ("bailingmoe", "I'LL\n\n x 12", ["I", "'LL", "\n", "\n", " x", " ", "1", "2"]),
        ("afmoe", "1234567", ["1", "234", "567"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("spark2_5", "a,\n\n1", ["a", ",", "\n", "\n", "1"]),
        ("exaone-moe", "to be 12", ["to be", " ", "1", "2"]),
        ("ufakzeka", "x'in", ["x", "'in"]),
        ("", "a-b 1234", ["a", "-", "b", " ", "123", "4"]),
    ],
)
def test_where_pre_tokenizers_cut(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    """With merges that join any two letters the tokens are the pieces: here each piece is a token, made by a chain of merges."""
    spelled = ["".join({" ": "Ġ", "\n": "Ċ"}.get(c, c) for c in p) for p in pieces if len(p) > 1]
    merges = list(dict.fromkeys(f"{p[:i]} {p[i]}" for p in spelled for i in range(1, len(p))))
    tokenizer = byte_level(tmp_path, pre=pre, merges=merges)
    assert texts(tokenizer, tokenizer.encode(text, add_bos=False)) == pieces


OTHER_NAMES = {
    "gpt-2": "phi-2 jais gigachat a.x-4.0 mellum exaone4 trillion granite-docling roberta-bpe jina-v1-en jina-v2-code jina-v2-es "
    "jina-v2-de jina-es jina-de",
    "olmo": "mpt modern-bert",
    "smollm": "starcoder refact codeshell exaone minerva-7b mellum2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "dbrx": "smaug-bpe glm4 chatglm-bpe",
    "qwen2": "deepseek-r1-qwen stablelm2 megrez kormo f2llmv2",
    "hunyuan": "solar-open grok-2",
    "deepseek-v3": "deepseek-r1 hunyuan-dense joyai-llm hy_v4",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "tiny_aya": "cohere2moe",
    "bailingmoe": "bailingmoe2 llada-moe",
    "bloom": "poro-chat gpt3-finnish",
    "gemma4": "granite-embed-multi-311m",
}
"""Names of `tokenizer.ggml.pre` that are other names of one way."""


def test_other_names_of_the_same_way() -> None:
    for name, others in OTHER_NAMES.items():
        for other in others.split():
            assert PRE_TOKENIZERS[other] == PRE_TOKENIZERS[name], other


@pytest.mark.parametrize(
    ("pre", "composed"), [("qwen2", True), ("qwen35", True), ("command-r", True), ("olmo", True), ("llama-bpe", False)]
)
def test_text_is_composed_where_the_model_s_own_tokenizer_does_so(tmp_path: Path, pre: str, composed: bool) -> None:
    tokenizer = byte_level(tmp_path, pre=pre)
    same = tokenizer.encode("cafe\u0301", add_bos=False) == tokenizer.encode("caf\u00e9", add_bos=False)
    assert same == composed


def test_merges_of_what_is_no_token(tmp_path: Path) -> None:
    """They are made all the same; what is no token in the end is its letters, of which those that are none are lost."""
    merges = ["a b", "ab c", "x y", "é ñ"]
    letters = [chr(b) for b in range(0x21, 0x7F)]
    tokenizer = byte_level(tmp_path, merges=merges, tokens=[*letters, "abc"])
    assert texts(tokenizer, tokenizer.encode("abc ab xy", add_bos=False)) == ["abc", "a", "b", "x", "y"]
    assert tokenizer.encode("é", add_bos=False) == []


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


@pytest.mark.parametrize(
    ("extra", "ends"),
    [
        (["<|eot_id|>", "<|end_of_text|>", "<|begin_of_text|>"], ["<|eot_id|>", "<|end_of_text|>"]),
        (["[EOT]", "[EOS]", "[BOS]"], ["[EOT]", "[EOS]"]),
        (["<end_of_utterance>", "_<EOT>"], ["<end_of_utterance>", "_<EOT>"]),
        (["<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"], ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]),
        (["<turn|>", "<|tool_response>", "</s>", "<eos>"], ["<turn|>", "<|tool_response>", "<eos>"]),
        (["<|end|>", "<|flush|>", "<|calls|>"], ["<|flush|>", "<|calls|>"]),
        (["<|end|>", "<|return|>"], ["<|end|>", "<|return|>"]),
        (["<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["], ["<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["]),
    ],
)
@pytest.mark.parametrize("kind", [CONTROL, NORMAL])
def test_what_ends_a_text_by_its_name(tmp_path: Path, extra: list[str], ends: list[str], kind: int) -> None:
    """Whatever type the file gives it."""
    tokenizer = byte_level(tmp_path, extra=extra, token_type=[NORMAL] * 257 + [kind] * len(extra), eos_token_id=None)
    assert sorted(texts(tokenizer, sorted(tokenizer.eos_ids))) == sorted(ends)
    assert all(tokenizer.decode([i]) == "" for i in tokenizer.eos_ids)


def test_an_end_of_code_that_the_file_names(tmp_path: Path) -> None:
    types = [NORMAL] * 257 + [CONTROL] * 2
    tokenizer = byte_level(tmp_path, extra=["<|fim_pad|>", "<pad>"], token_type=types, fim_pad_token_id=258, eos_token_id=None)
    assert tokenizer.eos_ids == {258}


def test_marks_of_channels_and_of_thinking_are_read(tmp_path: Path) -> None:
    extra = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<think>", "</think>"]
    tokenizer = byte_level(tmp_path, extra=extra, token_type=[NORMAL] * 257 + [CONTROL] * 8, eos_token_id=261)
    text = "<|channel|>a<|message|>b<|end|><|start|><think></think>"
    ids = tokenizer.encode(text, parse_special=True)
    assert len(ids) == 8 and tokenizer.decode(ids) == text and tokenizer.decode([261]) == ""
    assert len(tokenizer.encode("<|channel|>")) == 11, "in a text that may name none they are no marks"


def test_a_type_that_is_none(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, token_type=[0] * 128 + [17] * 129)
    assert tokenizer.type_of(0) == tokenizer.type_of(200) == 0 and tokenizer.decode(tokenizer.encode("ab é")) == "ab é"


def test_more_types_than_tokens(tmp_path: Path) -> None:
    assert byte_level(tmp_path, token_type=[NORMAL] * 300).n_vocab == 257


def test_llama3_style_adds_bos_unless_told_otherwise(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"extra": ["<s>"], "token_type": [NORMAL] * 257 + [CONTROL], "bos_token_id": 257}
    assert byte_level(tmp_path, pre="llama-bpe", **keys).add_bos
    assert not byte_level(tmp_path, pre="llama-bpe", add_bos_token=False, **keys).add_bos
    assert not byte_level(tmp_path, pre="qwen2", **keys).add_bos


def test_errors(tmp_path: Path) -> None:
    def says(text: str, **keys: Any) -> None:
        with pytest.raises(TokenizerError, match=text):
            byte_level(tmp_path, **keys)

    says(r"t\.gguf: vocabulary model 'plamo2' is not supported; supported are gpt2 .*, llama .*, rwkv ", model="plamo2")
    says(r"precompiled_charsmap is no table of SentencePiece", model="t5", precompiled_charsmap=bytes(9))
    says(r"precompiled_charsmap should be bytes, the file has str", model="t5", precompiled_charsmap="x")
    says(r"pre-tokenizer 'klingon' is not supported; supported are a\.x-4\.0, afmoe, bailingmoe, ", pre="klingon")
    says(r"tokenizer\.ggml\.token_type should be one number for each of 257 tokens, the file has 3 values", token_type=[1, 1, 1])
    says(r"tokenizer\.ggml\.eos_token_id is 257, expected an id below 257", eos_token_id=257)
    says(r"tokenizer\.ggml\.tokens should be a list of strings, the file has ndarray", tokens=[1, 2])
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
