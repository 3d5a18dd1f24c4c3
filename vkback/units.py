"""Sizes in words, as llama-bench writes them."""

from __future__ import annotations


def counted(n: int, one: str, many: str = "") -> str:
    """`1 kernel`, `2 kernels`. many: the plural, where it is not made by an s."""
    return f"{n} {one if n == 1 else many or f'{one}s'}"


def size_text(nbytes: int) -> str:
    """`546.50 MiB`, `4.58 GiB`."""
    return f"{nbytes / 2**20:.2f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.2f} GiB"


UNKNOWN_SIZE = "?B"
"""What llama-bench calls a size that is none of its classes."""


def with_size(model_type: str, n_params: int) -> str:
    """llama-bench's label of a model, with the number of parameters where it does not know the size: `llama 122.61B Q4_K - Medium`."""
    return model_type.replace(UNKNOWN_SIZE, params_text(n_params).replace(" ", ""), 1)


def params_text(n: int) -> str:
    """`134.52 M`, `8.03 B`."""
    return f"{n / 1e6:.2f} M" if n < 1e9 else f"{n / 1e9:.2f} B"
