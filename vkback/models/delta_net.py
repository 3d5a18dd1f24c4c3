"""The gated delta net: one matrix makes q, k and v of a token, others its gate z, decay and share; a causal convolution of q, k and v, the
delta rule, an RMS norm of each head, the gate, and a matrix back. Layers with it and layers with attention take turns."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.builder import GraphBuilder
from vkback.models.mamba import SSM
from vkback.models.shape import ModelShape, Tensors

INTERVAL, RECURRENT = "full_attention_interval", "attention.recurrent_layers"

KEYS = SSM | {INTERVAL, RECURRENT}
"""Keys of the sizes, and of which layers are delta nets."""


@dataclass(frozen=True)
class DeltaNet:
    """Sizes: n_head heads of v, dim values each; n_group heads of q and k, key values each. tiled: v's head h goes with head h % n_group,
    else with h / (n_head / n_group)."""

    n_head: int
    dim: int
    key: int
    n_group: int
    taps: int
    tiled: bool

    @property
    def inner(self) -> int:
        return self.n_head * self.dim

    @property
    def channels(self) -> int:
        """Of the convolution: q, k, v."""
        return self.inner + 2 * self.n_group * self.key

    @property
    def each(self) -> int:
        """Heads of v for one of k."""
        return self.n_head // self.n_group


def delta_net_sizes(m: Metadata, *, tiled: bool) -> DeltaNet:
    """Raises GgufError naming a size that does not go with the others."""
    inner, n_head, n_group = m.count("ssm.inner_size"), m.count("ssm.time_step_rank"), m.count("ssm.group_count")
    if inner % n_head:
        raise m.fail("ssm.time_step_rank", n_head, f"a number of heads that divides ssm.inner_size, {inner}")
    if n_head % n_group:
        raise m.fail("ssm.group_count", n_group, f"a divisor of the {n_head} heads")
    key = m.count("ssm.state_size")
    if key % 4:
        raise m.fail("ssm.state_size", key, "a multiple of 4")
    return DeltaNet(n_head, inner // n_head, key, n_group, m.count("ssm.conv_kernel", least=2), tiled)


def recurrent_layers(m: Metadata, n_layer: int, n_blocks: int) -> tuple[bool, ...]:
    """Which layers are delta nets: as an array of booleans says, one for each block of the file, else all but the last of every four, or of
    as many as the interval says. n_blocks: of the file, with those that predict tokens beyond the next one."""
    stated = m.array(RECURRENT)
    if stated is not None:
        if stated.shape != (n_blocks,) or stated.dtype.kind not in "biu":
            raise m.fail(RECURRENT, f"{stated.size} values of {stated.dtype}", f"one boolean for each of {n_blocks} blocks")
        return tuple(bool(v) for v in stated[:n_layer])
    interval = m.count(INTERVAL, 4)
    return tuple((il + 1) % interval != 0 for il in range(n_layer))


def delta_net(b: GraphBuilder, x: Tensor, il: int, s: DeltaNet) -> Tensor:
    """The delta net of layer `il` over the normed input x [n, n_embd] -> [n, n_embd]."""
    g, n, block = b.graph, b.n, f"blk.{il}"
    qkv = b.linear(x, f"{block}.attn_qkv", s.channels, f"linear_attn_qkv_mixed-{il}")
    z = b.linear(x, f"{block}.attn_gate", s.inner, f"z-{il}")
    beta = b.linear(x, f"{block}.ssm_beta", s.n_head, f"beta-{il}")
    alpha = b.linear(x, f"{block}.ssm_alpha", s.n_head, f"alpha-{il}")
    conv, state = b.recurrent_states(il, s.taps, s.channels, (s.n_head, s.dim, s.key))
    w = replace(b.hp.weight(f"{block}.ssm_conv1d.weight", (s.channels, s.taps)), shape=(s.channels * s.taps,))
    a, dt_bias = (b.hp.weight(f"{block}.{name}", (s.n_head,)) for name in ("ssm_a", "ssm_dt.bias"))
    norm = b.hp.weight(f"{block}.ssm_norm.weight", (s.dim,))
    params = {"n_group": s.n_group, "tiled": s.tiled}
    y = Tensor(f"final_output-{il}", "F32", (n, s.inner))
    if b.paging:  # a token of each sequence: all in one op, which finds the states
        sequences, has = b.sequences
        inputs = (qkv, alpha, beta, z, w, a, dt_bias, norm, b.pos, conv, state, *sequences)
        g.add("CONV_DELTA_NET", inputs, (y, conv, state), **params, eps=b.hp.rms_eps, **has)
    else:
        convolution, made = Tensor(f"conv_output_silu-{il}", "F32", qkv.shape), Tensor(f"delta_net-{il}", "F32", (n, s.inner))
        g.add("SSM_CONV", (qkv, w, b.pos, conv), (convolution, conv), offset=0)
        g.add("DELTA_NET", (convolution, alpha, beta, a, dt_bias, b.pos, state), (made, state), **params, **b.keeps_each)
        heads = b.view(made, (n, s.n_head, s.dim))
        heads = g.emit("RMS_NORM", f"delta_net_rms-{il}", "F32", heads.shape, (heads,), eps=b.hp.rms_eps)
        heads = g.emit("MUL", f"delta_net_norm-{il}", "F32", heads.shape, (heads, norm))
        g.add("SWIGLU", (z, b.view(heads, z.shape)), (y,))
    return b.linear(y, f"{block}.ssm_out", b.hp.n_embd, f"linear_attn_out-{il}")


def delta_net_tensors(s: ModelShape, gates: Tensors) -> Tensors:
    """A delta net and the norm before it. gates: the weights that make decay and share."""
    sizes = {key: int(s.metadata[f"ssm.{key}"]) for key in ("inner_size", "time_step_rank", "state_size", "group_count", "conv_kernel")}
    inner, n_head, key, n_group, taps = sizes.values()
    d = DeltaNet(n_head, inner // n_head, key, n_group, taps, True)
    yield "attn_gate.weight", (d.inner, s.n_embd)
    yield "attn_norm.weight", (s.n_embd,)
    yield "attn_qkv.weight", (d.channels, s.n_embd)
    yield "ssm_a", (d.n_head,)
    yield "ssm_conv1d.weight", (d.channels, d.taps)
    yield "ssm_dt.bias", (d.n_head,)
    yield "ssm_norm.weight", (d.dim,)
    yield "ssm_out.weight", (s.n_embd, d.inner)
    yield from gates
