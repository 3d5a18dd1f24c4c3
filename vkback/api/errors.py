"""Errors of the Python interface."""

from vkback.errors import VkbackError


class ModelError(VkbackError):
    """A call that a model cannot carry out: it is closed, in use by another thread, or was given what it cannot act on."""


class ContextLengthError(ModelError):
    """A text that is longer than the context. tokens: of the text, at least so many; n_ctx: that the context has."""

    def __init__(self, message: str, tokens: int, n_ctx: int) -> None:
        super().__init__(message)
        self.tokens, self.n_ctx = tokens, n_ctx
