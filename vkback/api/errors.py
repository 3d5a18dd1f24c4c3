"""Errors of the Python interface."""

from vkback.errors import ModelError

__all__ = ["ContextLengthError", "ModelError"]


class ContextLengthError(ModelError):
    """A text that is longer than the context. tokens: of the text, at least so many; n_ctx: that the context has."""

    def __init__(self, message: str, tokens: int, n_ctx: int) -> None:
        super().__init__(message)
        self.tokens, self.n_ctx = tokens, n_ctx


def too_long(tokens: int, n_ctx: int, about: str = "") -> ContextLengthError:
    """The error for a text of so many tokens; about: "at least ", where they were not counted."""
    return ContextLengthError(
        f"[session] the text would have {about}{tokens} tokens, the context has {n_ctx}. Nothing was read: shorten it, or load with a "
        "larger ctx",
        tokens,
        n_ctx,
    )
