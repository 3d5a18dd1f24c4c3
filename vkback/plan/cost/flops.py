"""Floating-point operations of a prompt, and how its kernels multiply.

Products with weights and attention are counted, as far as the plan has them: what nobody reads (in the last layer, if no logits are wanted)
is neither planned nor counted. Padding, packing, split-K sums, and cache rows that a kernel reads beyond what a token sees do not count:
they are work of a kernel, not of the model. A multiply-add counts 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from vkback.graph import Graph, Node, live
from vkback.ops.dispatch import Dispatch
from vkback.ops.matmul.gemm_problem import GemmKernel
from vkback.ops.matmul.gemv import GemvConfig

KERNELS: dict[str, GemmKernel] = {
    "gemm/coop_mat.comp": "coop_mat",
    "gemm/int_dot.comp": "int_dot",
    "gemm/f32.comp": "f32",
    "attention/prompt/prompt_matrix.comp": "coop_mat",
    "attention/prompt/prompt.comp": "f32",
    "attention/decode/attention.comp": "f32",
}
"""How kernels multiply, by source file; GEMVs say it in their config."""


def prompt_flops(one_token: Graph, tokens: int, n_past: int) -> int:
    """Operations of a prompt of `tokens` tokens after `n_past` others.

    one_token  the model's graph for one token, with the head that the prompt has
    """
    return sum(_node_flops(node, tokens, n_past) for node in live(one_token.nodes, one_token.outputs))


def _node_flops(node: Node, tokens: int, n_past: int) -> int:
    """Operations of a one-token node for so many tokens."""
    if node.op in ("MUL_MAT", "MUL_MAT_ID"):
        return 2 * tokens * node.inputs[0].shape[-1] * node.outputs[0].elements
    if node.op == "FLASH_ATTN_EXT":
        q, cache_k, cache_v = node.inputs[:3]
        return 2 * q.shape[1] * (cache_k.shape[-1] + cache_v.shape[-1]) * seen_rows(tokens, n_past, int(node.params.get("window", 0)))
    return 0


def seen_rows(tokens: int, n_past: int, window: int = 0) -> int:
    """Rows of the cache that a prompt's tokens see, summed over the tokens: the one at position p sees rows 0..p,
    at most the last `window` of them."""
    if not window:
        return tokens * n_past + tokens * (tokens + 1) // 2
    growing = min(tokens, max(0, window - n_past))  # tokens that see fewer rows than the window has
    return growing * n_past + growing * (growing + 1) // 2 + (tokens - growing) * window


def kernel_of(dispatch: Dispatch) -> GemmKernel | None:
    """How a kernel multiplies; None for one that is neither a product with a weight nor attention."""
    if isinstance(dispatch.config, GemvConfig):
        return "int_dot" if dispatch.config.path == "int" else "f32"
    return KERNELS.get(dispatch.kernel.source)


def main_kernel(dispatches: Iterable[Dispatch]) -> GemmKernel | None:
    """The kernel that makes most of the operations; None if there are none."""
    flops: Counter[GemmKernel] = Counter()
    for dispatch in dispatches:
        kernel = kernel_of(dispatch)
        if kernel is not None and dispatch.flops:
            flops[kernel] += dispatch.flops
    return flops.most_common(1)[0][0] if flops else None
