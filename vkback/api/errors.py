"""Errors of the Python interface."""

from vkback.errors import VkbackError


class ModelError(VkbackError):
    """A call that a model cannot carry out: it is closed, in use by another thread, or was given what it cannot act on."""
