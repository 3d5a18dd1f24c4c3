"""Tokens of thousands of generated texts against other libraries.

tiktoken and sentencepiece are other programs; pipelines of `tokenizers` are written as models publish them.
"""

from __future__ import annotations

import importlib
import json
import random
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from make_gguf import llama_metadata, llama_tensors, write_gguf

from vkback.gguf.pre_tokenizers import PRE_TOKENIZERS
from vkback.gguf.tokenizer import KINDS
from vkback.gguf.vocabularies import byte_letters
from vkback.models import GgufFile, Tokenizer

BOOK = (Path(__file__).parents[1] / "data" / "war_of_the_worlds.txt").read_text(encoding="utf-8")
COUNT = 5000
"""Texts for each."""

ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789" * 3 + "²½Ⅷ٣४",
    " \n\t\r" * 4 + "   \u00a0\u3000\u2028",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "éàüßñçøĀžŁÆŒﬁ" + "абвгдежзАБВГ" + "αβγδΑΒΩώἄ",
    "你好世界国語日本人ひらがなカタカナ한국어말씀",
    "ابتثجشہ" + "हिन्दीक" + "ไทยภาษา" + "বাংলা",
    "e\u0301a\u0308o\u0302\u0327\u0931\u093c\u1100\u1161\u11a8",
    "😀👍🏽🇩🇪👩\u200d💻\ufeff\u200b",
    "…。\uff0c、।\u06d4،「」\uff01\uff1f“”\u2018\u2019—\uff1a\uff1b‽«»€£§©",
    "\u01bb\u01c5\u0294\u02b0\u1c80\u10a0\u13a0\uab70\U00010400\U000104b0\uff21\uff71\uff9e\u00aa\u3105\u3131\ufe30\u2f00\u1780",
)
WORDS = [
    "I'm",
    "you'll",
    "HE'S",
    "it's",
    "We'Ve",
    "fooBar",
    "don't",
    "\n\n",
    "  ",
    "\r\n",
    "   x",
    "1234567",
    "12,345.67",
    "x=1;//",
    "#include <a>",
    "\n\n\n",
    "\r\n\r\n",
    ");\n\n",
    " " * 40,
    "\t" * 9,
    "<sentinel:12>",
    "IMGIMGABCZ",
    "٣٤٥٦٧",
]


@cache
def generated(seed: int, count: int = COUNT) -> Sequence[str]:
    """Words of a book, words of code, and runs of characters of one kind, side by side."""
    rng = random.Random(seed)
    words = BOOK.split(" ")
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 6)):
            kind = rng.random()
            if kind < 0.3:
                at = rng.randrange(len(words))
                parts.append(" ".join(words[at : at + rng.randint(1, 3)]))
            elif kind < 0.45:
                parts.append(rng.choice(WORDS))
            else:
                parts.append("".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 5))))
            parts.append(rng.choice(("", "", " ")))
        texts.append("".join(parts))
    return texts


def tokenizer_of(path: Path, **keys: Any) -> Tokenizer:
    metadata = llama_metadata() | {f"tokenizer.ggml.{k}": v for k, v in keys.items()}
    for key in ("bos_token_id", "eos_token_id"):
        metadata.pop(f"tokenizer.ggml.{key}", None) if key not in keys else None
    return Tokenizer.from_gguf(GgufFile.open(write_gguf(path / "t.gguf", "llama", metadata, llama_tensors())))


def require_equal(own: Tokenizer, other: Any, seed: int, count: int = COUNT) -> None:
    """other: text -> ids. Says the first text that differs."""
    for text in generated(seed, count):
        ids, expected = own.encode(text, add_bos=False), list(other(text))
        assert ids == expected, (text, own.pieces(ids), own.pieces(expected))


# --- byte-level BPE

DIGITS = [run for n in (3, 4) for i in range(7) if len(run := "1234567"[i : i + n]) == n]


@cache
def byte_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges, in which each token may be made of any two that it is made of: then merges and ranks of tokens say the same.

    Beside what is trained there are runs of line breaks and of digits, so that tokens tell where those are cut.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=list(byte_letters()), show_progress=False, max_token_length=16)
    library.train_from_iterator([BOOK, *generated(1, 4000)], trainer)
    trained = json.loads(library.to_str())["model"]
    letters = dict(enumerate(byte_letters()))
    runs = [*["\n\n", "\n\n\n", "\r\n", "\r\n\r\n"], " \n", ".\n", ";\n", ";\n\n", "/\n", *(f"{i:02d}" for i in range(100)), *DIGITS]
    spelled = ["".join(letters[b] for b in run.encode()) for run in runs]
    tokens = list(dict.fromkeys([*sorted(trained["vocab"], key=trained["vocab"].__getitem__), *spelled]))
    known = set(tokens)
    merges = [f"{t[:i]} {t[i:]}" for t in tokens if len(t) > 1 for i in range(1, len(t)) if t[:i] in known and t[i:] in known]
    return tokens, merges


@cache
def whole_words() -> list[str]:
    """Tokens that no merge makes."""
    space, known = byte_letters()[ord(" ")], set(byte_vocabulary()[0])
    words = dict.fromkeys(f"{space}{word}" for word in BOOK.split() if len(word) > 5 and word.isascii() and word.isalpha())
    return [word for word in words if word not in known][:400]


def byte_level(path: Path, pre: str, more: Sequence[str] = ()) -> Tokenizer:
    tokens, merges = byte_vocabulary()
    return tokenizer_of(path, model="gpt2", pre=pre, tokens=[*tokens, *more], merges=merges)


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CL100K.replace("{1,3}", "")
O200K = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{CONTRACTIONS}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}&&[^\p{{Han}}]]*[{LOWER}&&[^\p{{Han}}]]+{CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}&&[^\p{{Han}}]]+[{LOWER}&&[^\p{{Han}}]]*{CONTRACTIONS}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+")
TEKKEN = O200K.replace(f"{CONTRACTIONS}?", "").replace("{1,3}", "")
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
SPACES_OF_JAIS2 = r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
JAIS2 = CL100K.replace(r"\s+(?!\S)|\s+", rf"{SPACES_OF_JAIS2}|\s{{1,2}}(?!\S)|\s{{1}}")
SEED = QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")

RANKED: Mapping[str, str] = {
    "gpt-2": GPT2,
    "llama-bpe": CL100K,
    "dbrx": CL100K,
    "qwen2": QWEN2,
    "qwen35": QWEN35,
    "hunyuan": QWEN2,
    "seed-coder": SEED,
    "gpt-4o": O200K,
    "granite-embed-multi-97m": O200K,
    "kimi-k2": KIMI,
    "tekken": TEKKEN,
    "ufakzeka": QWEN2.removeprefix(f"{CONTRACTIONS}|"),
    "bailingmoe": BAILING,
    "jais-2": JAIS2,
}
"""`pre` -> the pattern that the model's maker has published, for tiktoken."""


@pytest.mark.parametrize("pre", RANKED)
def test_tokens_equal_those_of_tiktoken(tmp_path: Path, pre: str) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    letters = {c: b for b, c in enumerate(byte_letters())}
    ranks = {bytes(letters[c] for c in token): i for i, token in enumerate(byte_vocabulary()[0])}
    other = tiktoken.Encoding("t", pat_str=RANKED[pre], mergeable_ranks=ranks, special_tokens={})
    nfc = pre.startswith("qwen")
    require_equal(byte_level(tmp_path, pre), lambda text: other.encode_ordinary(unicodedata.normalize("NFC", text) if nfc else text), 2)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORDS_OF_BYTES = BYTES | {"use_regex": True}
DIGIT = {"type": "Digits", "individual_digits": True}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


DEEPSEEK3_WORDS = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
CHINESE_JAPANESE = "[一-龥\u3040-ゟ\u30a0-ヿ]+"
CHINESE_KOREAN = "[一-龥ࠀ-一가-\ud7ff]+"
DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbe"
    "ῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ\uff21-\uff3a\uff41-\uff5a"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
SCRIPTS_OF_AFMOE = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f"
    "\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
SCRIPTS_OF_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|"
    + CHINESE_JAPANESE
)
EXAONE_MOE = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
PIPELINES: Mapping[str, tuple[Sequence[Mapping[str, Any]], str | None]] = {
    "default": ([split("[\\p{P}\\$\\+<=>\\^~\\|]+"), split(GPT2), split("\\p{N}+"), split("[0-9][0-9][0-9]"), BYTES], None),
    "gpt-2": ([WORDS_OF_BYTES], None),
    "starcoder": ([DIGIT, WORDS_OF_BYTES], None),
    "command-r": ([DIGIT, WORDS_OF_BYTES], "NFC"),
    "olmo": ([WORDS_OF_BYTES], "NFC"),
    "falcon": (
        [
            {"type": "Punctuation", "behavior": "Contiguous"},
            WORDS_OF_BYTES,
            {"type": "Digits", "individual_digits": False},
            split("[0-9][0-9][0-9]"),
        ],
        None,
    ),
    "deepseek-llm": (
        [
            split("[\r\n]"),
            split(f"\\s?[{DEEPSEEK_LETTERS}]+"),
            split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
            split("\\s+$"),
            split(CHINESE_KOREAN),
            DIGIT,
            BYTES,
        ],
        None,
    ),
    "deepseek-coder": ([split("[\r\n]"), split("\\s?\\p{L}+"), split("\\s?\\p{P}+"), split(CHINESE_KOREAN), DIGIT, BYTES], None),
    "deepseek-v3": ([split("\\p{N}{1,3}"), split(CHINESE_JAPANESE), split(DEEPSEEK3_WORDS), BYTES], None),
    "spark2_5": (
        [
            split("\\p{N}{1,3}"),
            split(CHINESE_JAPANESE),
            split(DEEPSEEK3_WORDS.replace("+[\\r\\n]*|\\s*[\\r\\n]+", "+|[\\r\\n]")),
            DIGIT,
            BYTES,
        ],
        None,
    ),
    "afmoe": ([split("\\p{Nd}+"), split("(?=(\\p{Nd}{3})+(?!\\p{Nd}))"), split(SCRIPTS_OF_AFMOE), split(DEEPSEEK3_WORDS), BYTES], None),
    "youtu": ([split(SCRIPTS_OF_YOUTU), split(O200K.replace("{1,3}", "")), BYTES], None),
    "tiny_aya": ([split("\\d{1,3}(?=(?:\\d{3})*\\b)"), split(O200K), BYTES], None),
    "chameleon": (
        [
            split("<sentinel:[0-9]+>"),
            split("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
            split("([\\t\\n]|    |  )"),
            DIGIT,
            {"type": "Punctuation", "behavior": "Isolated"},
            WORDS_OF_BYTES,
        ],
        None,
    ),
    "laguna": ([split("[^\n]+|[\n]+"), split(QWEN2), BYTES], None),
    "exaone-moe": ([split(EXAONE_MOE), BYTES], None),
    **{pre: ([split(pattern), BYTES], None) for pre, pattern in RANKED.items() if pre not in ("gpt-2", "qwen35")},
    "qwen35": ([split(QWEN35), BYTES], "NFC"),
    "bloom": ([split(" ?[^(\\s|[.,!?…。\uff0c、।\u06d4،])]+"), BYTES], None),
    "viking": ([split(" ?[^(\\s|[.,!?…。\uff0c、।\u06d4،])]+"), DIGIT, BYTES], None),
    "superbpe": ([split("\\p{N}+"), split("(?=(\\d{3})+(?!\\d))"), BYTES], None),
    "minicpm5": ([split("\\p{N}{1,3}"), split(CL100K.replace("{1,3}", "+")), BYTES], None),
    "qwen2": ([split(QWEN2), BYTES], "NFC"),
}
"""`pre` -> the pre-tokenizers of a model's published tokenizer.json, and its normalizer."""
WHOLE = {"llama-bpe", "tekken", "minicpm5", "youtu", "granite-embed-multi-97m"}
"""Those whose model takes a piece that is a token as it is."""


@pytest.mark.parametrize("pre", PIPELINES)
def test_tokens_equal_those_of_a_published_pipeline(tmp_path: Path, pre: str) -> None:
    from tokenizers import Tokenizer as Library

    steps, normalizer = PIPELINES[pre]
    more = whole_words()
    tokens, merges = [*byte_vocabulary()[0], *more], byte_vocabulary()[1]
    published: dict[str, Any] = {
        "normalizer": {"type": normalizer} if normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges, "ignore_merges": pre in WHOLE},
        "added_tokens": [],
    }
    other = Library.from_str(json.dumps(published))
    require_equal(byte_level(tmp_path, pre, more), lambda text: other.encode(text, add_special_tokens=False).ids, 3)


# --- SentencePiece and its kin


def trained_pieces(path: Path, **options: Any) -> Any:
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    prefix = str(path / "s")
    lines = [line for line in BOOK.splitlines() if line.strip()] + [t.replace("\n", " ") for t in generated(4, 2000)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=prefix, vocab_size=1500, minloglevel=2, hard_vocab_limit=False, **options
    )
    return sentencepiece.SentencePieceProcessor(model_file=prefix + ".model")


def piece_keys(other: Any) -> dict[str, Any]:
    n = other.vocab_size()

    def kind(i: int) -> int:
        if other.is_unknown(i):
            return 2
        return 3 if other.is_control(i) else 6 if other.is_byte(i) else 1

    return {
        "tokens": [other.id_to_piece(i) for i in range(n)],
        "scores": [float(other.get_score(i)) for i in range(n)],
        "token_type": [kind(i) for i in range(n)],
    }


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_tokens_equal_those_of_sentencepiece(tmp_path: Path, byte_fallback: bool) -> None:
    other = trained_pieces(
        tmp_path,
        model_type="bpe",
        byte_fallback=byte_fallback,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.999,
    )
    own = tokenizer_of(tmp_path, model="llama", **piece_keys(other))
    assert own.bos == 1 and own.eos_id == 2, "the ids that a file without the keys has"

    def encode(text: str) -> list[int]:
        """Without byte tokens sentencepiece takes a run of unknown characters as one."""
        ids: list[int] = other.encode(text)
        return ids

    for text in generated(5):
        ids, expected = own.encode(text, add_bos=False), encode(text)
        if not byte_fallback:
            ids = [i for at, i in enumerate(ids) if i or not at or ids[at - 1]]
        assert ids == expected, (text, own.pieces(ids), own.pieces(expected))
        if byte_fallback:
            assert own.decode(ids) == text


@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc", "nmt_nfkc_cf"])
def test_tokens_equal_those_of_a_unigram_model(tmp_path: Path, rule: str) -> None:
    other = trained_pieces(tmp_path, model_type="unigram", normalization_rule_name=rule, unk_id=2, bos_id=-1, eos_id=1, pad_id=0)
    pytest.importorskip("google.protobuf", reason="protobuf, which sentencepiece reads its models with, is not installed")
    protocol: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    proto = protocol.ModelProto.FromString(other.serialized_model_proto())
    charsmap = proto.normalizer_spec.precompiled_charsmap
    keys = piece_keys(other) | ({"precompiled_charsmap": charsmap} if charsmap else {})
    own = tokenizer_of(tmp_path, model="t5", remove_extra_whitespaces=True, **keys)
    for text in generated(6):
        ids, expected = own.encode(text, add_bos=False), other.encode(text)
        # Two splits into the same tokens in another order score the same.
        assert ids == expected or sorted(ids) == sorted(expected), (text, own.pieces(ids), own.pieces(expected))
    assert own.encode("martian") == [*other.encode("martian"), 1], "a text ends with </s>"


@pytest.mark.parametrize(("lowercase", "strip_accents"), [(True, True), (False, False), (True, False)])
def test_tokens_equal_those_of_wordpiece(tmp_path: Path, lowercase: bool, strip_accents: bool) -> None:
    from tokenizers import BertWordPieceTokenizer

    other = BertWordPieceTokenizer(lowercase=lowercase, strip_accents=strip_accents)
    other.train_from_iterator([BOOK, *generated(7, 2000)], vocab_size=1200, show_progress=False)
    names = [other.id_to_token(i) for i in range(other.get_vocab_size())]
    special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    tokens = [t if t in special else t[2:] if t.startswith("##") else f"\u2581{t}" for t in names]
    own = tokenizer_of(
        tmp_path,
        model="bert",
        tokens=tokens,
        token_type=[3 if t in special else 1 for t in tokens],
        bos_token_id=names.index("[CLS]"),
        unknown_token_id=names.index("[UNK]"),
        seperator_token_id=names.index("[SEP]"),
        **{"normalizer.lowercase": lowercase, "normalizer.strip_accents": strip_accents},
    )
    require_equal(own, lambda text: other.encode(text, add_special_tokens=False).ids, 8)
    assert own.encode("the man")[0] == names.index("[CLS]") and own.encode("the man")[-1] == names.index("[SEP]")
    long = "a" * 101
    assert own.encode(long, add_bos=False) == other.encode(long, add_special_tokens=False).ids == [names.index("[UNK]")]


CHARACTERS = {"gemma4": "gemma4", "granite-embed-multi-311m": "gpt2", "sarvam-moe": "gpt2"}
"""`pre` -> `tokenizer.ggml.model` of those that merge characters."""


@pytest.mark.parametrize("pre", CHARACTERS)
def test_tokens_equal_those_of_gemma4_s_pipeline(tmp_path: Path, pre: str) -> None:
    """BPE of characters, with a byte token for what no token has."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    library = Library(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Replace(" ", "\u2581")
    library.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=2500, special_tokens=["<pad>", "<eos>", "<bos>", "<unk>", *byte_tokens], limit_alphabet=200, show_progress=False
    )
    library.train_from_iterator([BOOK, *generated(9, 2000)], trainer)
    trained = json.loads(library.to_str())["model"]
    vocab = dict(trained["vocab"])
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in trained["merges"]]
    merges += [("\n", "\n"), ("\n\n", "\n")]
    for name in ("\n\n", "\n\n\n"):
        vocab[name] = len(vocab)
    other = Library(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    other.normalizer = normalizers.Replace(" ", "\u2581")
    names = sorted(vocab, key=vocab.__getitem__)
    types = [3] * 3 + [2] + [6] * 256 + [1] * (len(names) - 260)
    own = tokenizer_of(
        tmp_path,
        model=CHARACTERS[pre],
        pre=pre,
        tokens=names,
        token_type=types,
        merges=[" ".join(m) for m in merges],
        bos_token_id=2,
        eos_token_id=1,
        add_bos_token=False,
    )
    require_equal(own, lambda text: other.encode(text, add_special_tokens=False).ids, 10)
    if CHARACTERS[pre] == "gemma4":
        assert own.encode("a\n\n\nb") == [2, *own.encode("a\n\n\nb", add_bos=False)], "always begins a text, whatever the file says"
    assert own.decode(own.encode("Ünïcode 😀 tab\t\n")) == "Ünïcode 😀 tab\t\n"


def test_rwkv_takes_the_longest_token_at_each_place(tmp_path: Path) -> None:
    rng = random.Random(11)
    spelled: dict[bytes, None] = {bytes([b]): None for b in range(256)}
    for text in generated(12, 3000):
        data = text.encode()
        at = rng.randrange(len(data))
        spelled[data[at : at + rng.randint(2, 9)]] = None
    tokens = ["<s>", *(repr(b)[2:-1] for b in spelled)]
    own = tokenizer_of(tmp_path, model="rwkv", tokens=tokens, token_type=[3] + [1] * len(spelled))
    ids = {b: i + 1 for i, b in enumerate(spelled)}

    def encode(text: str) -> list[int]:
        data, out = text.encode(), []
        while data:
            best = max((b for n in range(1, 10) if (b := data[:n]) in ids), key=len)
            out.append(ids[best])
            data = data[len(best) :]
        return out

    require_equal(own, encode, 13)
    for text in generated(14, 500):
        assert own.decode(own.encode(text)) == text


# --- none is without a judge

JUDGES: Mapping[str, Any] = {
    "gpt2": test_tokens_equal_those_of_a_published_pipeline,
    "llama": test_tokens_equal_those_of_sentencepiece,
    "gemma4": test_tokens_equal_those_of_gemma4_s_pipeline,
    "bert": test_tokens_equal_those_of_wordpiece,
    "t5": test_tokens_equal_those_of_a_unigram_model,
    "rwkv": test_rwkv_takes_the_longest_token_at_each_place,
}
"""`tokenizer.ggml.model` -> the test that judges it."""


def test_every_supported_vocabulary_has_a_judge() -> None:
    assert JUDGES.keys() == KINDS.keys()


def test_every_way_to_cut_has_a_judge() -> None:
    """A name is judged by its own pipeline, or by that of a name that cuts the same way. Texts are judged without the token before them."""
    judged = {replace(PRE_TOKENIZERS[name], add_bos=False) for name in (*PIPELINES, *CHARACTERS)}
    assert [name for name, pre in PRE_TOKENIZERS.items() if replace(pre, add_bos=False) not in judged] == []
