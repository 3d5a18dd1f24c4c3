"""The kernel of an attention over a KV cache: which one the tables, the device and the heads lead to, as one value.

`choose` asks the tables, once for each attention of a plan (vkback/plan/passes/choose.py): the value stays on the node. Packing, lowering,
tolerances and the comparison of nodes read it there.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from vkback.device import Capabilities
from vkback.graph import Node, Tensor
from vkback.ops.attention import decode_matrix
from vkback.ops.attention import prompt as attention_prompt
from vkback.ops.attention.paged import page_of, rows_of
from vkback.ops.cache import CACHE_TYPES, QUANTIZED
from vkback.ops.family import POWERS, Choice, declare
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.matmul.gemm_problem import GemmShape
from vkback.ops.storage import nbytes
from vkback.quants import UNIT

HEAD_SIZE_MULTIPLE = 8

TABLED_TOKENS = 16
"""Tokens up to which tables choose among shapes of the kernel for few tokens."""

declare(
    "attention",
    match={"n": "number", "n_head": "number", "n_head_kv": "number", "head_dim": "number", "n_ctx": "number"},
    params={
        "wg_size": POWERS,  # threads of a workgroup
        "lanes": (1, 2, 4, 8, 16, 32),  # threads that share a row of K
        "steps": (1, 2, 4, 8),  # rows of K a thread holds at once
        "queries": (1, 2, 4, 8, 16),  # (head, token) pairs that share the reads of a workgroup, at most
        "tokens": (1, 2, 4, 8, 16),  # tokens of a workgroup at most, where there are few
        "groups": "positive",  # workgroups wanted for one token when the context is full
        "rows_per_split": "positive",  # rows below which a split is not worth its own workgroup
        **attention_prompt.PARAMS,
    },
)


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel of one FLASH_ATTN_EXT or ATTN_DECODE.

    problem  the attention in words
    shape    of the kernels for prompts; None: the kernel for few tokens, whose shape depends on all that is fused (flash.shape_for)
    params   what the tables say, and the row that won
    heads    queries' heads, those of them that share one of K, values of a head
    packs    the output may be packed as f16: V is as wide as K
    latent   V is the first part of each row of K
    width    values of a token's output
    few      of the kernel for few tokens by matrices; None: another one
    """

    problem: str
    shape: attention_prompt.PromptShape | None
    params: Choice
    heads: tuple[int, int, int]
    packs: bool
    latent: bool
    width: int
    few: decode_matrix.DecodeMatrixShape | None = None

    @property
    def kernel(self) -> Literal["decode", "decode_matrix", "plain", "matrix"]:
        """Which kernel it is."""
        if self.few is not None:
            return "decode_matrix"
        return "decode" if self.shape is None else self.shape.kernel

    @property
    def source(self) -> str:
        """The row of the tables that won."""
        return self.params.source

    @property
    def rounds(self) -> Literal["", "F16"]:
        """What it rounds F32 queries to."""
        return "F16" if self.kernel in ("matrix", "decode_matrix") else ""

    def stores_packed(self, reader: GemmShape, caps: Capabilities) -> bool:
        """Whether it can leave its output packed for a GEMM of shape `reader` (param `fragments` says in which order)."""
        n_head, group, hd = self.heads
        return self.shape is not None and self.packs and attention_prompt.packs(self.shape, group, hd, n_head, reader, caps)

    def stores_units(self, reader: GemmShape) -> bool:
        """Whether it can leave its output in unit order for a product of shape `reader` (param `units`), of whole blocks a token."""
        return self.shape is None and self.width % (UNIT * reader.row_lanes) == 0

    def storing(self, node: Node, ctx: LowerContext) -> AttentionChoice:
        """The choice for the node with another type of output. The kernel for latent rows by matrices makes F32 alone, the one for few
        tokens by matrices Q8_1 of one token alone."""
        other = (self.latent and node.outputs[0].type != "F32") or (self.few is not None and node.outputs[0].type == "Q8_1")
        return choose(node, ctx) if other else self

    def __str__(self) -> str:
        """Like `matrix 64x64 for 32/8 heads of 128, 512 tokens, rounds q to F16: nvidia.toml [[attention]] row 3`."""
        cut = "" if self.shape is None else f" {self.shape.tile_q}x{self.shape.tile_kv}"
        return f"{self.kernel}{cut} for {self.problem}{', rounds q to F16' if self.rounds else ''}: {self.source}"


def choice_of(node: Node, ctx: LowerContext) -> AttentionChoice:
    """The choice that a plan has made for a node; of a node outside a plan it is made here."""
    return node.choice if isinstance(node.choice, AttentionChoice) else choose(node, ctx)


def choose(node: Node, ctx: LowerContext) -> AttentionChoice:
    """The kernel for a FLASH_ATTN_EXT or ATTN_DECODE. Raises PlanError where none fits the heads, or the device cannot bind a cache."""
    fused = node.op == "ATTN_DECODE"
    cache_k, cache_v = node.inputs[2:4] if fused else node.inputs[1:3]
    n, n_head = (1, int(node.params["n_head"])) if fused else node.inputs[0].shape[:2]
    n_head_kv, _, hd = cache_k.shape
    check(node, ctx, cache_k, cache_v, n_head)
    decode = fused or page_of(node)  # no kernel for prompts reads pages
    few = min(n, TABLED_TOKENS) if decode else n  # rows of tables for more tokens are for those kernels
    params = ctx.tuning.pick("attention", n=few, n_head=n_head, n_head_kv=n_head_kv, head_dim=hd, n_ctx=rows_of(node))
    vd = v_dim(node, cache_v)
    latent = not fused and cache_k.name == cache_v.name
    return AttentionChoice(
        f"{n_head}/{n_head_kv} heads of {hd}, {n} token{'s' * (n > 1)}",
        None if decode else _prompt_shape(node, params, ctx, latent and node.outputs[0].type == "F32"),
        params,
        (n_head, n_head // n_head_kv, hd),
        vd == hd,
        latent,
        node.outputs[0].shape[-1],
        None if fused else _few_by_matrices(node, params, ctx),
    )


def _few_by_matrices(node: Node, params: Choice, ctx: LowerContext) -> decode_matrix.DecodeMatrixShape | None:
    """The shape of the kernel for few tokens by matrices; None where the tables choose another, or it cannot be. It rounds queries and
    weights to f16, which one token alone does not: never where sums must be the same for any number of tokens."""
    q, cache_k, cache_v, pos = node.inputs[:4]
    caches = {cache_k.type, cache_v.type} == {"F16"} and cache_k.name != cache_v.name and v_dim(node, cache_v) == cache_k.shape[2]
    plain = caches and cache_v.shape[2] == cache_k.shape[2] and len(pos.shape) == 1 and not node.params.get("split_q")
    rounds = ctx.act not in ("f32", "f16") and not ctx.exact and attention_prompt.queries_f16(q).name not in ctx.f16_scales
    q8_1 = node.outputs[0].type == "Q8_1"
    if params["kernel"] != "decode_matrix" or not plain or not rounds or (q8_1 and not _stores_q8_1(q, ctx)):
        return None
    return decode_matrix.shape_for(params, q.shape[1], cache_k.shape[0], cache_k.shape[2], page_of(node), ctx)


def _stores_q8_1(q: Tensor, ctx: LowerContext) -> bool:
    """Whether the kernel for few tokens by matrices can store Q8_1, as products of one token read it: whole units, of eight lanes each."""
    return q.shape[0] == 1 and q.shape[2] % UNIT == 0 and ctx.caps.subgroup_size >= 8


def prompt_shape(node: Node, ctx: LowerContext) -> attention_prompt.PromptShape | None:
    """The shape of the kernel for prompts, where the tables choose it for a FLASH_ATTN_EXT and the device can run it."""
    return choice_of(node, ctx).shape


def _prompt_shape(node: Node, params: Choice, ctx: LowerContext, latent: bool) -> attention_prompt.PromptShape | None:
    # --act f32 keeps floats whole: no f16 in matrices. Nor for queries or F32 caches, which f16 may not hold.
    f32_cache = "F32" in {t.type for t in node.inputs[1:3]}
    # Nor does the kernel for latent rows know a softcap.
    beyond = f32_cache or (latent and softcap_of(node) > 0.0) or attention_prompt.queries_f16(node.inputs[0]).name in ctx.f16_scales
    caps = ctx.caps if ctx.act not in ("f32", "f16") and not beyond else dataclasses.replace(ctx.caps, cooperative_matrix=False)
    cache_k, cache_v = node.inputs[1:3]
    ctx = dataclasses.replace(ctx, caps=caps)
    return attention_prompt.shape_for(params, cache_k.shape[2], ctx, v_dim(node, cache_v), latent)


def v_dim(node: Node, cache_v: Tensor) -> int:
    """Values of a row of V."""
    return int(node.params.get("v_dim", cache_v.shape[2]))


CHUNK_BIT = 1 << 31
"""Of shaders/attention/window.glsl."""


def window_of(node: Node) -> tuple[int, int]:
    """Rows that a token sees at most, 0 for all, and the same as kernels take it."""
    window = int(node.params.get("window", 0))
    return window, window | CHUNK_BIT if node.params.get("chunked") else window


def softcap_of(node: Node) -> float:
    """The softcap of scores, 0 without."""
    return float(node.params.get("softcap", 0.0))


def check(node: Node, ctx: LowerContext, cache_k: Tensor, cache_v: Tensor, n_head: int) -> None:
    """Raises PlanError where no kernel fits the heads, or the device cannot bind a cache."""
    n_head_kv, _, hd = cache_k.shape
    vd, pitch = v_dim(node, cache_v), cache_v.shape[2]
    if hd % HEAD_SIZE_MULTIPLE or vd % HEAD_SIZE_MULTIPLE or pitch % HEAD_SIZE_MULTIPLE or not 0 < vd <= pitch:
        raise PlanError(
            f"[attention] {node.name}: {cache_k} and {vd} values a row of {cache_v}; expected head sizes, each a "
            f"multiple of {HEAD_SIZE_MULTIPLE}"
        )
    for cache in (cache_k, cache_v):
        if cache.type not in CACHE_TYPES or (cache.type in QUANTIZED and (cache.shape[2] % UNIT or hd % UNIT or vd % UNIT)):
            kinds = " or ".join(QUANTIZED)
            raise PlanError(f"[attention] {node.name}: {cache}; expected F16, F32, or {kinds} and heads of whole units of {UNIT}")
    if cache_v.shape[:2] != cache_k.shape[:2] or n_head % n_head_kv:
        raise PlanError(
            f"[attention] {node.name}: {n_head} heads over {cache_k} and {cache_v}; expected as many rows and kv heads in either, and "
            "heads a multiple of kv heads"
        )
    if node.outputs[0].type == "Q8_1" and vd % 32:
        raise PlanError(f"[attention] {node.name}: Q8_1 output needs a head size that is a multiple of 32, got {vd}; make the output F32")
    for cache in (cache_k, cache_v):
        if nbytes(cache) > ctx.caps.max_storage_buffer_range:
            raise PlanError(
                f"[attention] {cache}: {nbytes(cache)} bytes, {ctx.caps.name} binds at most {ctx.caps.max_storage_buffer_range} "
                "at once. Use a smaller context"
            )
