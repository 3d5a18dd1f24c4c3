"""The `granitehybrid` architecture: IBM Granite 4.0 H.

Most layers are Mamba-2: one matrix makes gate z, convolution's input (x, B, C) and dt of a token; a causal convolution, the recurrence, the
gate, an RMS norm (by groups), and a matrix back. A layer whose `attention.head_count_kv` is above 0 has attention instead, with RoPE where
`rope.scaling.finetuned` says so. Feed-forward: SwiGLU, dense or a mixture of experts beside a shared one that works on every token.

Four scales: of the embedding (`embedding_scale`, e), of the dot products of attention, of what each block adds to the residual stream
(`residual_scale`, r), and `logit_scale`, which divides the logits. The graph's stream is the published one divided by r: it begins with
e / r times the embedding, and blocks add to it unscaled. They only see it normed, and a norm of x / r with eps / r^2 is the norm of x with
eps. `logit_scale` is in the weights of the last norm. So the scales cost no stage of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from vkback.gguf.file import GgufFile
from vkback.gguf.hparams import Metadata
from vkback.graph import Recipe, Tensor
from vkback.models.architecture import UNKNOWN_SIZE, Architecture, register
from vkback.models.blocks import attention, attention_norm, experts, feed_forward, feed_forward_norm, shared_expert
from vkback.models.builder import GraphBuilder
from vkback.models.keys import EXPERTS
from vkback.models.shape import ModelShape, Tensors, attention_tensors, expert_tensors, feed_forward_tensors, shared_expert_tensors

SIZES = {768: "350M", 2048: "3B", 2560: "3B", 4096: "32B.A9B"}
"""By embedding width; 1536 is "1B", with experts 512 wide "7B.A1B"."""


PUBLISHED = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 1,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention.scale": 0.0078125,
    "logit_scale": 6.0,
    "rope.scaling.finetuned": False,
}
"""Of the models of 1B and 7B, beside sizes."""


@dataclass(frozen=True)
class Mamba2:
    """Sizes of a Mamba-2 block: heads of dim values with a state of d_state each; n_group groups of heads share B and C."""

    n_head: int
    dim: int
    d_state: int
    n_group: int
    taps: int

    @property
    def inner(self) -> int:
        return self.n_head * self.dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B, C."""
        return self.inner + 2 * self.n_group * self.d_state

    @property
    def width(self) -> int:
        """Rows of ssm_in: z, x, B, C, dt."""
        return self.inner + self.channels + self.n_head


def mamba2(m: Metadata) -> Mamba2:
    """Raises GgufError naming a size that does not go with the others."""
    inner, n_head, n_group = m.count("ssm.inner_size"), m.count("ssm.time_step_rank"), m.count("ssm.group_count")
    if inner % n_head:
        raise m.fail("ssm.time_step_rank", n_head, f"a number of heads that divides ssm.inner_size, {inner}")
    if n_head % n_group:
        raise m.fail("ssm.group_count", n_group, f"a divisor of the {n_head} heads")
    d_state = m.count("ssm.state_size")
    if d_state % 4:
        raise m.fail("ssm.state_size", d_state, "a multiple of 4")
    return Mamba2(n_head, inner // n_head, d_state, n_group, m.count("ssm.conv_kernel", least=2))


@register
class GraniteHybrid(Architecture):
    name = "granitehybrid"
    recurrent = True
    vocabulary = "dbrx"
    keys = EXPERTS | {
        "embedding_scale",
        "expert_shared_feed_forward_length",
        "logit_scale",
        "residual_scale",
        "rope.scaling.finetuned",
        "ssm.conv_kernel",
        "ssm.group_count",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
    }
    settled: ClassVar = {"expert_gating_func": 1}
    varying = frozenset({"attention.head_count_kv"})
    shapes: ClassVar = {
        "granite-4-h-1b": ModelShape(
            "granitehybrid",
            40,
            1536,
            4096,
            12,
            4,
            128,
            100352,
            1048576,
            10000.0,
            tied=True,
            attention=frozenset({5, 15, 25, 35}),
            metadata={**PUBLISHED, "ssm.inner_size": 3072, "ssm.time_step_rank": 48},
        ),
        "granite-4-h-tiny": ModelShape(
            "granitehybrid",
            40,
            1536,
            512,
            12,
            4,
            128,
            100352,
            1048576,
            10000.0,
            tied=True,
            attention=frozenset({5, 15, 25, 35}),
            n_expert=64,
            n_expert_used=6,
            n_ff_expert=512,
            metadata={**PUBLISHED, "ssm.inner_size": 3072, "ssm.time_step_rank": 48, "expert_shared_feed_forward_length": 1024},
        ),
        "tiny-granitehybrid": ModelShape(
            "granitehybrid",
            4,
            96,
            160,
            3,
            1,
            32,
            333,
            256,
            10000.0,
            tied=True,
            attention=frozenset({2}),
            metadata={
                **PUBLISHED,
                "ssm.inner_size": 192,
                "ssm.time_step_rank": 12,
                "ssm.state_size": 20,
                "ssm.group_count": 2,
                "attention.scale": 0.15,
            },
        ),
        "tiny-granitehybrid-moe": ModelShape(
            "granitehybrid",
            3,
            64,
            96,
            2,
            1,
            32,
            300,
            256,
            10000.0,
            attention=frozenset({1}),
            n_expert=6,
            n_expert_used=2,
            n_ff_expert=96,
            metadata={
                **PUBLISHED,
                "ssm.inner_size": 128,
                "ssm.time_step_rank": 4,
                "ssm.state_size": 16,
                "attention.scale": 0.2,
                "rope.scaling.finetuned": True,
                "expert_shared_feed_forward_length": 64,
            },
        ),
    }

    def __init__(self, f: GgufFile) -> None:
        super().__init__(f)
        m = self.metadata
        self.ssm = mamba2(m)
        self.ssm_eps = self.hp.rms_eps
        self.n_head_kv = m.of_layers("attention.head_count_kv", self.hp.n_layer)
        self.rope = self.hp.rope if f.get(m.key("rope.scaling.finetuned"), bool, True) else None
        self.n_ff_shared = m.count("expert_shared_feed_forward_length", 0, least=0) if self.hp.n_expert else 0
        residual = m.positive_or("residual_scale", 1.0, most=1e3)
        self.embedding_scale = m.positive_or("embedding_scale", 1.0) / residual
        weights = dict(self.hp.weights)
        if "output_norm.weight" in weights:
            recipe = Recipe("plain", ("output_norm.weight",), 1.0 / m.positive_or("logit_scale", 1.0))
            weights["output_norm.weight"] = replace(weights["output_norm.weight"], recipe=recipe)
        self.hp = replace(self.hp, rms_eps=self.hp.rms_eps / (residual * residual), weights=weights)

    def embed(self, b: GraphBuilder) -> Tensor:
        x = b.embed()
        if self.embedding_scale == 1.0:
            return x
        return b.graph.emit("SCALE", "inp_scaled", "F32", x.shape, (x,), scale=self.embedding_scale, bias=0.0)

    def layer(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        normed = attention_norm(b, x, il)
        if self.n_head_kv[il]:
            heads = replace(self.hp.heads, n_kv=self.n_head_kv[il])
            mixed = attention(b, normed, il, rope=self.rope, heads=heads)
        else:
            mixed = self.recurrence(b, normed, il)
        x = b.last_token(b.add(mixed, x, f"ffn_inp-{il}"), il)
        normed = feed_forward_norm(b, x, il)
        if not self.hp.n_expert:
            return b.add(feed_forward(b, normed, il), x, f"l_out-{il}")
        if self.n_ff_shared:
            x = b.add(shared_expert(b, normed, il, self.n_ff_shared), x, f"ffn_shared-{il}")
        return b.add(experts(b, normed, il), x, f"l_out-{il}")

    def recurrence(self, b: GraphBuilder, x: Tensor, il: int) -> Tensor:
        """The Mamba-2 block of layer `il` over the normed input x [n, n_embd] -> [n, n_embd]."""
        s, g, n, block = self.ssm, b.graph, b.n, f"blk.{il}"
        zx = b.linear(x, f"{block}.ssm_in", s.width, f"zxBCdt-{il}")
        conv = Tensor(f"cache_conv_l{il}", "F32", (s.taps, s.channels), "state")
        state = Tensor(f"cache_ssm_l{il}", "F32", (2, s.n_head, s.dim, s.d_state), "state")
        w = replace(b.hp.weight(f"{block}.ssm_conv1d.weight", (s.channels, s.taps)), shape=(s.channels * s.taps,))
        bias = (b.hp.weight(f"{block}.ssm_conv1d.bias", (s.channels,)),) if b.hp.has_weight(f"{block}.ssm_conv1d.bias") else ()
        xbc = Tensor(f"xBC-{il}", "F32", (n, s.channels))
        g.add("SSM_CONV", (zx, w, *bias, b.pos, conv), (xbc, conv), offset=s.inner)
        a, d = (replace(b.hp.weight(f"{block}.{name}", (s.n_head, 1)), shape=(s.n_head,)) for name in ("ssm_a", "ssm_d"))
        dt_bias = b.hp.weight(f"{block}.ssm_dt.bias", (s.n_head,))
        y = Tensor(f"ssm_scan-{il}", "F32", (n, s.inner))
        g.add("SSM_SCAN", (xbc, zx, a, d, dt_bias, b.pos, state), (y, state), n_group=s.n_group)
        weight = b.hp.weight(f"{block}.ssm_norm.weight", (s.n_group, s.inner // s.n_group))
        y = b.view(y, (n, s.n_group, s.inner // s.n_group)) if s.n_group > 1 else y
        y = g.emit("RMS_NORM", f"ssm_rms-{il}", "F32", y.shape, (y,), eps=self.ssm_eps)
        y = b.view(y, (n, s.inner)) if s.n_group > 1 else y
        y = g.emit("MUL", f"ssm_norm-{il}", "F32", y.shape, (y, replace(weight, shape=(s.inner,))))
        return b.linear(y, f"{block}.ssm_out", b.hp.n_embd, f"mamba_out-{il}")

    @classmethod
    def size_class(cls, metadata: Metadata) -> str:
        width = metadata.stated("embedding_length")
        if width == 1536:
            return "7B.A1B" if metadata.stated("feed_forward_length") == 512 else "1B"
        return SIZES.get(width, UNKNOWN_SIZE)

    @classmethod
    def tensors_of_layer(cls, s: ModelShape, il: int) -> Tensors:
        yield from attention_tensors(s) if s.attention is None or il in s.attention else recurrence_tensors(s)
        yield "ffn_norm.weight", (s.n_embd,)
        if not s.n_expert:
            yield from feed_forward_tensors(s)
            return
        yield from expert_tensors(s)
        yield from shared_expert_tensors(s, int(s.metadata["expert_shared_feed_forward_length"]))


def recurrence_tensors(s: ModelShape) -> Tensors:
    """A Mamba-2 block and the norm before it."""
    sizes = {key: int(s.metadata[f"ssm.{key}"]) for key in ("inner_size", "time_step_rank", "state_size", "group_count", "conv_kernel")}
    inner, n_head, d_state, n_group, taps = sizes.values()
    m = Mamba2(n_head, inner // n_head, d_state, n_group, taps)
    yield "attn_norm.weight", (s.n_embd,)
    yield "ssm_a", (m.n_head, 1)
    yield "ssm_conv1d.bias", (m.channels,)
    yield "ssm_conv1d.weight", (m.channels, m.taps)
    yield "ssm_d", (m.n_head, 1)
    yield "ssm_dt.bias", (m.n_head,)
    yield "ssm_in.weight", (m.width, s.n_embd)
    yield "ssm_norm.weight", (m.n_group, m.inner // m.n_group)
    yield "ssm_out.weight", (s.n_embd, m.inner)
