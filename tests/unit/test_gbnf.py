"""Grammars in llama.cpp's language: texts that they take and texts that they do not, by llguidance over a vocabulary of bytes."""

from __future__ import annotations

from typing import Any

import pytest

from vkback.engine.gbnf import GbnfError, to_lark

llguidance = pytest.importorskip("llguidance", reason="vkback[json] is not installed")


class Bytes:
    """A vocabulary of all bytes, as LLTokenizer reads one."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return llguidance.LLTokenizer(Bytes(), eos_token=256)


def takes(tokenizer: Any, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(to_lark(grammar)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.try_consume_tokens([byte]) == 1 for byte in text.encode()) and bool(matcher.is_accepting())


SUMS = r"""
# Sums: what stands behind a number may be a line end, and so may what ends the line.
root    ::= (sum "=" gap number "\n")+
sum     ::= product ( [-+] gap product )*
product ::= value ( [*/] gap value )*
value   ::= number | name | "(" gap sum ")" gap
name    ::= [a-z] [a-z0-9_]* gap
number  ::= [0-9]+ gap
gap     ::= [ \t\n]*
"""

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") gap
object ::= "{" gap (string ":" gap value ("," gap string ":" gap value)*)? "}" gap
array  ::=
  "[" gap (
    value ("," gap value)*
  )? "]" gap
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})
  )* "\"" gap
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? gap
gap    ::= | " " | "\n" [ \t]{0,20}
"""

MOVES = r"""
root  ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move  ::= (piece | pawn | "O-O" "-O"?) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn  ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
"""

C = r"""
root       ::= function*
function   ::= type " " name "(" parameter? ")" "{" statement* "}"
type       ::= "int" | "float" | "char"
parameter  ::= type " " name
name       ::= [a-zA-Z_] [a-zA-Z_0-9]*
statement  ::= type " " name "=" sum ";" | name "=" sum ";" | "return " sum ";" |
               "while(" test ")" "{" statement* "}" | "//" [^\n]* "\n"
test       ::= sum ("<=" | "<" | "==") sum
sum        ::= term (("+" | "-") term)*
term       ::= name | [0-9]+ | name "(" (sum ("," sum)*)? ")" | "(" sum ")"
"""

CASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "sums": (SUMS, ("1+x*(2 + 3)=7\n", "a=1\n\n\nb = 2\n"), ("1+=2\n", "a=1", "=1\n")),
    "json": (
        JSON,
        ("{}", '{"a": [1, -2.5e+3, true], "b": {"c": "\\u00e9 \\n dé"}}', '{"a":null}\n  '),
        ('{"a"}', '{"a": 01}', '{"a": "\\q"}', "[]", '{"a": "b}'),
    ),
    "moves": (MOVES, ("1. e4 e5\n2. Nf3 Nc6\n", "1. O-O O-O-O+\n10. bxa8=Q# Rd1\n"), ("1. e4 e5\n", "1. e9 e5\n2. e4 e5\n")),
    "C": (C, ("", "int f(int x){return x+1;}", "char g(){while(a<=2){a=f(a,1);}// to\nint b=(3);}"), ("int (){}", "int f(){return 1}")),
    "letters": ('root ::= [a-z]* "b" x\nx ::= [a-z] x | "."', ("bz.", "aab.", "abbb."), ("aa.", "b")),
    "texts that begin alike": ('root ::= "ab" "c" | [a-z] "b" "d"  # a note\n\n', ("abc", "xbd", "abd"), ("xbc",)),
    "times": ('root ::= ("ab"){2,3} [0-9]{2} "c"{2,}', ("abab12cc", "ababab00cccc"), ("ab12cc", "abab1cc", "abab12c", "abababab12cc")),
    "lines": ('root ::= (\n  "a"\n  | "b" )\n  | "c" d\nd ::= "" | "d" d', ("a", "b", "c", "cdd"), ("d", "")),
    "characters": (r'root ::= [^a-c\]\-]+ "\x41\u00e9\U0001F600" .', ("xy日Aé😀\n",), ("aAé😀x", "-Aé😀x")),
    "a dash at the end": ("root ::= [a-]+", ("a-a",), ("b",)),
    "itself on its left": ('root ::= root "a" | "b"', ("b", "baa"), ("a", "bb")),
}


@pytest.mark.parametrize("case", CASES)
def test_it_takes_what_the_grammar_takes(case: str, tokenizer: Any) -> None:
    grammar, texts, others = CASES[case]
    assert [text for text in texts if not takes(tokenizer, grammar, text)] == []
    assert [text for text in others if takes(tokenizer, grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("root ::= foo", r"line 1, at 'foo': there is no rule called foo"),
        ('root ::= "a', "a text is open; expected its end"),
        ('a ::= "b"', "there is no rule called root"),
        ("root ::= [a", "a class of characters is open"),
        ("root ::= [z-a]", "the range 'z' to 'a' is empty"),
        ("root ::= []", "a class of no characters"),
        ('root ::= "a" )', r"at '\)': the rule does not end here"),
        (r'root ::= "\q"', "no escape"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3, .* the rule root is there already"),
        ("root", "no rule begins here; expected a name, ::="),
        ('root ::= ("a"', r"a group is open; expected \)"),
        ('root ::= "a"{3,1}', "no number of times"),
        ('root ::= "a"{99999}', "at most 2000"),
        ("", "there is no rule called root"),
    ],
)
def test_what_is_refused(grammar: str, says: str) -> None:
    with pytest.raises(GbnfError, match=says):
        to_lark(grammar)
