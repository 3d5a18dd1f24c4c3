"""Layers that attend to K and V of a layer before them, and so have none of their own (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from vkback.gguf.hparams import Metadata

SHARED = "attention.shared_kv_layers"
"""How many layers at the end of a model have no K and V."""


def kv_sources(m: Metadata, sees_all: tuple[bool, ...], default: int = 0) -> list[int | None]:
    """Of each layer the one whose K and V it attends to, the last of its kind that has some; None: its own.

    sees_all  of each layer, whether it has no window
    default   of SHARED
    Raises GgufError where there is no such layer.
    """
    n_layer = len(sees_all)
    first = n_layer - m.count(SHARED, default, least=0)
    last = {kind: il for il, kind in enumerate(sees_all[: max(first, 0)])}
    if not set(sees_all[max(first, 0) :]) <= last.keys():
        expected = f"so few that both kinds of attention are among the layers before the last so many of {n_layer}"
        raise m.fail(SHARED, n_layer - first, expected)
    return [None if il < first else last[kind] for il, kind in enumerate(sees_all)]
