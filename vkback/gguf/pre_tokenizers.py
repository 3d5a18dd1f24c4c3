"""How text is cut before byte-level BPE, by the name in `tokenizer.ggml.pre`.

The patterns are those of the models' own published tokenizers, in their order, and run on the same library. Names are those of GGUF files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Cut(Enum):
    """Steps that are no pattern."""

    PUNCTUATION = "punctuation"
    """Runs of punctuation, Unicode's and ASCII's."""
    DIGITS = "digits"
    """Runs of digits."""
    DIGIT = "digit"
    """Digits one by one."""
    BYTES = "bytes"
    """From here on each byte is a letter. At the end, where a step list does not name it."""


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before BPE: each step cuts the pieces that the one before left.

    steps          patterns (a match is a piece of its own, so is what stands between two) and cuts of other kinds
    nfc            the text is brought into Unicode's normal form C first
    ignore_merges  a piece that is a token as a whole is taken as it is
    add_bos        what holds when the file does not say
    bytes          pieces are merged as letters of their bytes; False: as their own characters, with SPACE for a space and byte tokens for
                   what no token has
    """

    steps: tuple[str | Cut, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    bytes: bool = True


_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = rf"(?i:{_CONTRACTIONS})"
_SPACES = r"\s+(?!\S)|\s+"
GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LINES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
_LLAMA3 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}{{1,3}}|{_LINES}"
_QWEN2 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}|{_LINES}"
_QWEN35 = rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
_SEED = rf"{_ANY_CASE}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}"
_MINICPM5 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}+|{_LINES}"
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}"
_LETTER = r"\p{L}\p{M}*"
_EXAONE_MOE = (
    rf"{_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?(?:{_LETTER}(?: {_LETTER})*)+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}"
)
_JAIS2_SPACES = "|".join([*(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)", r"\s{1}"])
_JAIS2 = rf"{_ANY_CASE}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_JAIS2_SPACES}"

# Words that begin with a capital letter, and those that have only capital ones.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(suffix: str, digits: str, but: str = "") -> str:
    """but: an intersection that takes letters out."""
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    return rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{suffix}|{digits}"


_SLASHED = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
_TEKKEN = rf"{_cased('', chr(92) + 'p{N}')}|{_SLASHED}"
_O200K = rf"{_cased(f'{_ANY_CASE}?', chr(92) + 'p{N}{1,3}')}|{_SLASHED}"
_O200K_DIGIT = rf"{_cased(f'{_ANY_CASE}?', chr(92) + 'p{N}')}|{_SLASHED}"
_KIMI = rf"\p{{Han}}+|{_cased(f'{_ANY_CASE}?', chr(92) + 'p{N}{1,3}', '&&[^' + chr(92) + 'p{Han}]')}|{_LINES}"

# The letters that DeepSeek's tokenizer names one by one: those with case of Unicode 9 or so, which is less than \p{Lu}\p{Ll}\p{Lt}.
_LETTERS = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d"
    r"\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    r"\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    r"\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    r"\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126"
    r"\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    r"\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    r"\uff21-\uff3a\uff41-\uff5a\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}"
    r"\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_CHINESE_KOREAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_LETTERS}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CHINESE_KOREAN,
    Cut.DIGIT,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_KOREAN, Cut.DIGIT)
_CHINESE_JAPANESE = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3_WORDS = rf"{_ASCII_PUNCTUATION}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
_DEEPSEEK3 = (r"\p{N}{1,3}", _CHINESE_JAPANESE, _DEEPSEEK3_WORDS)
_SPARK = (r"\p{N}{1,3}", _CHINESE_JAPANESE, rf"{_ASCII_PUNCTUATION}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}", r"\p{N}")
_AFMOE = (
    r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?!\p{Nd}))",
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    r"\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _DEEPSEEK3_WORDS,
)
_YOUTU = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    rf"|[\u3105-\u312f]+|{_CHINESE_JAPANESE}",
    _O200K_DIGIT,
)
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_PLAIN = PreTokenizer((GPT2,))
_PLAIN_NFC = replace(_PLAIN, nfc=True)
_DIGITS = PreTokenizer((Cut.DIGIT, GPT2))
_LLAMA3_STYLE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_STYLE = PreTokenizer((_QWEN2,))
_O200K_STYLE = PreTokenizer((_O200K,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "jais", "gigachat", "a.x-4.0", "mellum", "exaone4", "trillion", "granite-docling"), _PLAIN),
    **dict.fromkeys(("roberta-bpe", "jina-v1-en", "jina-v2-code", "jina-v2-es", "jina-v2-de", "jina-es", "jina-de"), _PLAIN),
    **dict.fromkeys(("olmo", "mpt", "modern-bert"), _PLAIN_NFC),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS),
    "command-r": replace(_DIGITS, nfc=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"), _LLAMA3_STYLE
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "kormo", "f2llmv2"), replace(_QWEN2_STYLE, nfc=True)),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), _QWEN2_STYLE),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_LINES}",)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "deepseek-llm": PreTokenizer(_DEEPSEEK),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1", "hunyuan-dense", "joyai-llm", "hy_v4"), PreTokenizer(_DEEPSEEK3)),
    "spark2_5": PreTokenizer(_SPARK),
    "afmoe": PreTokenizer(_AFMOE),
    "youtu": PreTokenizer(_YOUTU, ignore_merges=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _O200K_STYLE),
    "granite-embed-multi-97m": replace(_O200K_STYLE, ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K))),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "seed-coder": PreTokenizer((_SEED,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _MINICPM5), ignore_merges=True),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer((_BAILING,))),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "jais-2": PreTokenizer((_JAIS2,)),
    "falcon": PreTokenizer((Cut.PUNCTUATION, GPT2, Cut.BYTES, Cut.DIGITS, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, Cut.DIGIT)),
    "chameleon": PreTokenizer(
        ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", Cut.DIGIT, r"[\p{P}!-/:-@\[-`{-~]", GPT2),
        add_bos=True,
    ),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), PreTokenizer((r"[^\n]+|[\n]+",), bytes=False, add_bos=True)),
    "sarvam-moe": PreTokenizer((r"[^\n]+|[\n]+",), bytes=False),
}
"""Ways to cut text by `tokenizer.ggml.pre`."""
