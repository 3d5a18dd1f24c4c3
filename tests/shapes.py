"""Products with the shapes of real models, for tests of plans, sweeps and kernels: from the shapes that vkback synthesizes.

of_layer("llama-8b", "Q4_K")["down"]      LinearProblem Q4_K 4096x14336, one token, with a residual
heads = [product("llama-8b", "head", quant) for quant in QUANTS]
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vkback.autotune.problem import LinearProblem
from vkback.models.synth import SHAPES


def of_layer(model: str, quant: str, n: int = 1) -> dict[str, LinearProblem]:
    """A layer's products and the head's, of n tokens, fused as a plan of few tokens has them. Of a model with experts also theirs."""
    s = SHAPES[model]
    q, kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    found = {
        "qkv": LinearProblem(quant, q + 2 * kv, s.n_embd, n),
        "attn_output": LinearProblem(quant, s.n_embd, q, n, ("residual",)),
        "gate_up": LinearProblem(quant, 2 * s.n_ff, s.n_embd, n, glu=True, out="Q8_1"),
        "down": LinearProblem(quant, s.n_embd, s.n_ff, n, ("residual",)),
        "head": LinearProblem(quant, s.n_vocab, s.n_embd, n),
    }
    if s.n_expert:
        experts: dict[str, Any] = {"n_expert": s.n_expert, "n_used": s.n_expert_used}
        roles = ("residual", "ids", "expert_weights")
        found["gate_up_exps"] = LinearProblem(quant, 2 * s.n_ff_expert, s.n_embd, n, ("ids",), glu=True, out="Q8_1", **experts)
        found["down_exps"] = LinearProblem(quant, s.n_embd, s.n_ff_expert, n, roles, **experts)
    return found


def product(model: str, name: str, quant: str, n: int = 1, **changed: Any) -> LinearProblem:
    """One of `of_layer`, with some fields changed."""
    return dataclasses.replace(of_layer(model, quant, n)[name], **changed)
