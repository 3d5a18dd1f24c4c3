"""The `gemma-embedding` architecture: EmbeddingGemma. It makes vectors of texts.

Gemma 3, but a token sees all of its text, in layers with a window as far before it as after it. Two matrices may follow pooling.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vkback.gguf.file import GgufFile
from vkback.models.architecture import register
from vkback.models.architectures.gemma3 import Gemma3
from vkback.models.shape import ModelShape, Tensors
from vkback.models.texts import DENSE

WIDE = {f"{stem}_feat_{side}" for stem in DENSE for side in ("in", "out")}
"""Widths of the matrices behind pooling, which their tensors say as well."""
TINY: dict[str, Any] = {"pooling_type": 1, "attention.causal": False}


@register
class GemmaEmbedding(Gemma3):
    name = "gemma-embedding"
    causal = False
    keys = Gemma3.keys | WIDE
    sizes: ClassVar = {24: "0.3B"}
    shapes: ClassVar = {
        "tiny-gemma-embedding": ModelShape(
            "gemma-embedding", 7, 96, 160, 4, 1, 40, 331, 128, 1000000.0, 1e-6, tied=True, window=10, metadata=TINY
        ),
        "embeddinggemma-300m": ModelShape(
            "gemma-embedding", 24, 768, 1152, 3, 1, 256, 262144, 2048, 1000000.0, 1e-6, tied=True, window=512, metadata=TINY
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        for stem in DENSE:
            shape = self.hp.weights[f"{stem}.weight"].shape if self.hp.has_weight(f"{stem}.weight") else (0, 0)
            for side, width in (("out", shape[0]), ("in", shape[-1])):
                if (stated := self.metadata.count(f"{stem}_feat_{side}", width, least=0)) not in (0, width):
                    raise self.metadata.fail(f"{stem}_feat_{side}", stated, f"{width}, which {stem}.weight has")

    @classmethod
    def outer_tensors(cls, s: ModelShape) -> Tensors:
        yield "dense_2.weight", (4 * s.n_embd, s.n_embd)
        yield "dense_3.weight", (s.n_embd, 4 * s.n_embd)
