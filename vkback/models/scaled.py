"""Four scales, which IBM's Granite models have, at no cost of a stage.

`embedding_scale` (e) multiplies the embedding, `attention.scale` the dot products of attention, `residual_scale` (r) what each block adds
to the residual stream, and `logit_scale` divides the logits. The graph's stream is the published one divided by r: it begins with e / r
times the embedding, and blocks add to it unscaled. They only see it normed, and a norm of x / r with eps / r^2 is the norm of x with eps.
`logit_scale` is in the weights of the last norm.
"""

from __future__ import annotations

from dataclasses import replace

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import HParams
from vkback.graph import Recipe, Tensor
from vkback.models.architecture import Architecture
from vkback.models.builder import GraphBuilder

SCALES = frozenset({"embedding_scale", "logit_scale", "residual_scale"})
"""Keys of the scales beside `attention.scale`, which every architecture reads."""


class Scaled(Architecture):
    """An architecture with scales; `keys` has SCALES and `rope.scaling.finetuned`.

    eps   of norms, as the file has it; hp's is the one of the stream divided by r
    rope  hp's, or None where `rope.scaling.finetuned` is false
    """

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        m = self.metadata
        self.eps = self.hp.rms_eps
        self.rope = self.hp.rope if f.get(m.key("rope.scaling.finetuned"), bool, True) else None
        residual = m.positive_or("residual_scale", 1.0, most=1e3)
        self.embedding_scale = m.positive_or("embedding_scale", 1.0) / residual
        hp = with_scaled_logits(self.hp, 1.0 / m.positive_or("logit_scale", 1.0))
        self.hp = replace(hp, rms_eps=hp.rms_eps / (residual * residual))

    def embed(self, b: GraphBuilder) -> Tensor:
        x = b.embed()
        if self.embedding_scale == 1.0:
            return x
        return b.graph.emit("SCALE", "inp_scaled", "F32", x.shape, (x,), scale=self.embedding_scale, bias=0.0)


def with_scaled_logits(hp: HParams, scale: float) -> HParams:
    """Hyperparameters with logits multiplied by `scale`, which goes into the weights of the last norm, one without a bias."""
    name = "output_norm.weight"
    if name not in hp.weights:
        return hp
    recipe = Recipe("plain", (name,), scale)
    return replace(hp, weights={**hp.weights, name: replace(hp.weights[name], recipe=recipe)})
