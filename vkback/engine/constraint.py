"""Texts that must be JSON of a schema, or of a grammar: before each token a mask of those that may come.

The grammar is that of the `llguidance` package (the extra `vkback[json]`); the mask goes to the device, where PENALTIES takes the other
tokens out (vkback/ops/sampling/penalties.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vkback.errors import VkbackError
from vkback.gguf.token_types import TokenType
from vkback.gguf.tokenizer import Tokenizer
from vkback.ops.sampling.penalties import mask_words

SPACE = r" |\n {0,24}|\n\t{0,8}"
"""White space between two tokens of JSON: enough for indentation. Models that may write any number of line ends never stop."""

NOT_TEXT = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED)


class Gbnf(str):
    """A grammar in llama.cpp's language (vkback/engine/gbnf.py), where else a JSON schema stands."""


class ConstraintError(VkbackError):
    """A schema or grammar that cannot be compiled, or a text that cannot go on within it."""


@dataclass(frozen=True)
class Ahead:
    """Tokens that may come, and masks: that of the next token, and the one after each of these; no masks where there is no constraint."""

    tokens: list[int] = field(default_factory=list)
    masks: list[npt.NDArray[np.int32]] = field(default_factory=list)


def only_token(mask: npt.NDArray[np.int32]) -> int:
    """The one that a mask leaves, -1 where it leaves several."""
    (words,) = np.nonzero(mask)
    if len(words) != 1:
        return -1
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return 32 * int(words[0]) + word.bit_length() - 1 if word & (word - 1) == 0 else -1


class Constraint(Protocol):
    """What a generation asks before each token, and tells afterwards."""

    @property
    def ended(self) -> bool:
        """Nothing may come after what has come."""

    def mask(self) -> npt.NDArray[np.int32]:
        """Which tokens may come next: bit id % 32 of word id / 32."""

    def take(self, token: int) -> None:
        """This one came."""

    def ahead(self, tokens: Sequence[int], most: int) -> Ahead:
        """What may come now, and at most so many drafts, each with what may come after it: of these tokens, or where one alone may come
        that one. Changes nothing."""


NEEDS = "[json] JSON by schema, or a text by grammar, needs llguidance, which is not installed: pip install 'vkback[json]'"


def check_form(form: str | Mapping[str, Any]) -> None:
    """Raises ConstraintError for a JSON schema, or a Gbnf, that no text of any vocabulary could be held to, or where llguidance is not
    installed: before a model is loaded."""
    try:
        from llguidance import LLMatcher
    except ImportError as e:
        raise ConstraintError(NEEDS) from e
    if wrong := " ".join(LLMatcher.validate_grammar(_grammar_of(form)).split()):
        raise ConstraintError(f"[json] the {'grammar' if isinstance(form, Gbnf) else 'schema'} cannot be compiled: {wrong}")


def _grammar_of(form: str | Mapping[str, Any]) -> str:
    """In llguidance's own form. Objects of a schema have no properties but those that it names, unless it says so. Raises
    ConstraintError, which of a Gbnf names the line."""
    from llguidance import LLMatcher

    from vkback.engine.gbnf import GbnfError, to_lark

    if isinstance(form, Gbnf):
        try:
            return LLMatcher.grammar_from_lark(to_lark(form))
        except GbnfError as e:
            raise ConstraintError(str(e)) from e
    text = form if isinstance(form, str) else json.dumps(form)
    with suppress(ValueError, RecursionError, TypeError):
        text = json.dumps(closed(json.loads(text)))
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": SPACE})
    except ValueError as e:
        raise ConstraintError(f"[json] the schema cannot be read: {e}") from e


class JsonGrammar:
    """A vocabulary, ready for schemas. Making one takes 3 us a token of the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        """n_vocab: rows of the model's logits. Raises ConstraintError where llguidance is not installed."""
        try:
            from llguidance import LLTokenizer
        except ImportError as e:
            raise ConstraintError(NEEDS) from e
        self._words = mask_words(n_vocab)
        self._vocabulary = _Vocabulary(tokenizer, n_vocab)
        vocabulary: Any = self._vocabulary
        names = sorted(self._vocabulary.named, key=len, reverse=True)
        self._no_text = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._tokenizer = LLTokenizer(vocabulary, eos_token=sorted(tokenizer.eos_ids) or n_vocab)

    def constraint(self, schema: str | Mapping[str, Any]) -> SchemaConstraint:
        """A text of this schema, from its first token on; objects have no properties but those that it names, unless it says so. Raises
        ConstraintError saying what in the schema cannot be had."""
        return self._compiled(_grammar_of(schema), "schema")

    def of_gbnf(self, grammar: str) -> SchemaConstraint:
        """A text of a grammar in llama.cpp's language. Raises ConstraintError, which names the line."""
        return self._compiled(_grammar_of(Gbnf(grammar)), "grammar")

    def knows(self, schema: Mapping[str, Any]) -> bool:
        """Whether a text can be held to a schema."""
        try:
            self.constraint(schema)
        except ConstraintError:
            return False
        return True

    def of_lark(self, grammar: str) -> SchemaConstraint:
        """A text of a grammar in llguidance's language. Raises ConstraintError."""
        from llguidance import LLMatcher

        return self._compiled(LLMatcher.grammar_from_lark(grammar), "grammar")

    def spelled(self, text: str) -> str:
        """A text in that language, its parts with spaces between: tokens that are no text by their ids, the rest in quotes."""
        return " ".join(self.spelled_parts(text)) or '""'

    def spelled_parts(self, text: str) -> list[str]:
        """The same, part by part."""
        parts = self._no_text.split(text) if self._no_text is not None else [text]
        return [f"<[{self._vocabulary.named[part]}]>" if i % 2 else json.dumps(part) for i, part in enumerate(parts) if part]

    def bytes_of(self, token: int) -> bytes:
        """Of a token, special or not."""
        return self._vocabulary.tokens[token]

    def all_tokens(self) -> npt.NDArray[np.int32]:
        """The mask that leaves everything as it is."""
        return np.full(self._words, -1, np.int32)

    def _compiled(self, grammar: str, what: str) -> SchemaConstraint:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a schema that nothing fits is found here
        if matcher.is_error():
            raise ConstraintError(f"[json] the {what} cannot be compiled: {_reason(matcher)}")
        return SchemaConstraint(matcher, self._words)


def closed(schema: Any) -> Any:
    """A schema in which objects have the properties that it names and no others, unless it says that they may: small models would go on and
    on with more. Whatever fits it fits the schema. One that puts objects together of several (allOf, $ref beside others) is as it was."""
    if isinstance(schema, Mapping) and _puts_together(schema):
        return schema
    return _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: {name: _closed(each) for name, each in own.items()} if _names(key, own) else own for key, own in schema.items()}
    for key in ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties"):
        if key in found:
            found[key] = _closed(found[key])
    names = found.get("properties")
    if not isinstance(names, Mapping) or any(key in found for key in OPEN) or any(name not in names for name in found.get("required", ())):
        return found
    return found | {"additionalProperties": False}


OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties", "anyOf", "oneOf", "minProperties")
"""With these in a schema, an object may have more properties than it names."""


def _names(key: str, own: Any) -> bool:
    """Whether the values of a keyword are schemas by names."""
    return key in ("properties", "$defs", "definitions") and isinstance(own, Mapping)


def _puts_together(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        several = "allOf" in schema or "if" in schema or ("$ref" in schema and "properties" in schema)
        return several or any(_puts_together(each) for each in schema.values())
    return isinstance(schema, list) and any(_puts_together(each) for each in schema)


class SchemaConstraint:
    """One text; see Constraint."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self._words = matcher, words

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_stopped())

    @property
    def may_end(self) -> bool:
        """Whether it is whole, though more may come."""
        return bool(self._matcher.is_accepting())

    def mask(self) -> npt.NDArray[np.int32]:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]
        self._require_sound()
        return mask

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._require_sound()

    def ahead(self, tokens: Sequence[int], most: int, *, to_end: bool = True) -> Ahead:
        """As Constraint. to_end: False: up to where the text is whole."""
        mask = self.mask()
        found, guessed = Ahead(masks=[mask]), list(tokens[:most])
        if not most or (not guessed and only_token(mask) < 0):
            return found
        matcher = self._matcher.deep_copy()
        while len(found.tokens) < most:
            at, token = len(found.tokens), only_token(mask)
            if token < 0:
                token = guessed[at] if at < len(guessed) else -1
            elif at < len(guessed) and guessed[at] != token:
                guessed = guessed[:at]  # what was to follow stood behind another one
            if token < 0 or not int(mask[token >> 5]) >> (token & 31) & 1:
                break
            matcher.consume_token(token)
            if matcher.is_error() or matcher.is_stopped() or (matcher.is_accepting() and not to_end):
                break
            mask = np.frombuffer(matcher.compute_bitmask(), np.int32)[: self._words]
            if matcher.is_error():
                break
            found.tokens.append(token)
            found.masks.append(mask)
        return found

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"[json] the text cannot go on within its schema: {_reason(self._matcher)}")


def _reason(matcher: Any) -> str:
    """In one line, without the parser's state."""
    return " ".join(matcher.get_error().partition("<state>")[0].split())


class _Vocabulary:
    """A tokenizer as LLTokenizer reads it. Rows of logits beyond the vocabulary are tokens that never come; so is, behind all, the end of
    a text where the vocabulary has none."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        known = min(n_vocab, tokenizer.n_vocab)
        self._encode = tokenizer.encode
        self.tokens = [tokenizer.token_bytes(i, special=True) for i in range(known)] + [b""] * (n_vocab - known)
        self.special_token_ids: Sequence[int] = [i for i in range(known) if tokenizer.type_of(i) in NOT_TEXT]
        self.named = {name: i for name, i in tokenizer.special.items() if tokenizer.type_of(i) in NOT_TEXT and i < known}
        if not tokenizer.eos_ids:
            self.tokens.append(b"<end>")
            self.special_token_ids = [*self.special_token_ids, n_vocab]
        self.eos_token_id = min(tokenizer.eos_ids, default=n_vocab)
        self.bos_token_id = tokenizer.bos

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"), add_bos=False)
