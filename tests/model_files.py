"""Models for tests that look at graphs and plans: the built-in ones, and synthetic ones whose weights are not written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vkback.models import synth

BUILT_IN = ("demo-dense", "demo-moe")


def hollow(name: str, path: Path) -> Path:
    """A synthetic model whose file has a hole where its weights would be; "name:4" has 4 layers."""
    name, _, layers = name.partition(":")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synth, "_write_all", lambda *_: None)
        patch.setattr(synth, "add_vocabulary", lambda writer, *_: writer.add_tokenizer_model("no_vocab"))  # seconds for a large one
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 62))
        synth.synthesize(name, path, layers=int(layers) if layers else None)
    return path
