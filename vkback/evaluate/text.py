"""A text to compare models on: the beginning of H. G. Wells, The War of the Worlds (1898), which is in the public domain."""

from __future__ import annotations

from pathlib import Path


def text_of_novel() -> str:
    """Some 14 000 characters, about 3 200 tokens of usual vocabularies."""
    return Path(__file__).with_name("novel.txt").read_text(encoding="utf-8")
