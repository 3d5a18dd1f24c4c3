"""What a file says of each token."""

from __future__ import annotations

from enum import IntEnum


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`. A number that is none of these is UNDEFINED: a token as the others."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6

    @classmethod
    def _missing_(cls, value: object) -> TokenType:
        return cls.UNDEFINED
