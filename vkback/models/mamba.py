"""The Mamba-2 block: one matrix makes gate z, convolution's input (x, B, C) and dt of a token; a causal convolution, the recurrence, the
gate, an RMS norm by groups, where the file has one, and a matrix back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vkback.gguf.hparams import Metadata
from vkback.graph import Tensor
from vkback.models.builder import GraphBuilder
from vkback.models.shape import ModelShape, Tensors

SSM = frozenset({"ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"})
"""Keys of the block's sizes."""


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


def recurrence(b: GraphBuilder, x: Tensor, il: int, s: Mamba2, *, eps: float, normed: bool = True) -> Tensor:
    """The Mamba-2 block of layer `il` over the normed input x [n, n_embd] -> [n, n_embd]. eps: of the norm by groups; normed: whether
    there is one."""
    g, n, block = b.graph, b.n, f"blk.{il}"
    zx = b.linear(x, f"{block}.ssm_in", s.width, f"zxBCdt-{il}")
    conv, state = b.recurrent_states(il, s.taps, s.channels, (s.n_head, s.dim, s.d_state))
    w = replace(b.hp.weight(f"{block}.ssm_conv1d.weight", (s.channels, s.taps)), shape=(s.channels * s.taps,))
    bias = (b.hp.weight(f"{block}.ssm_conv1d.bias", (s.channels,)),) if b.hp.has_weight(f"{block}.ssm_conv1d.bias") else ()
    a, d = (replace(b.hp.weight(f"{block}.{name}", (s.n_head, 1)), shape=(s.n_head,)) for name in ("ssm_a", "ssm_d"))
    dt_bias = b.hp.weight(f"{block}.ssm_dt.bias", (s.n_head,))
    y = Tensor(f"ssm_scan-{il}", "F32", (n, s.inner))
    if b.paging:  # a token of each sequence: both in one op, which finds the states
        sequences, has = b.sequences
        inputs = (zx, w, *bias, a, d, dt_bias, b.pos, conv, state, *sequences)
        g.add("SSM_CONV_SCAN", inputs, (y, conv, state), n_group=s.n_group, **has)
    else:
        xbc = Tensor(f"xBC-{il}", "F32", (n, s.channels))
        g.add("SSM_CONV", (zx, w, *bias, b.pos, conv), (xbc, conv), offset=s.inner)
        g.add("SSM_SCAN", (xbc, zx, a, d, dt_bias, b.pos, state), (y, state), n_group=s.n_group, **b.keeps_each)
    if normed:
        y = _norm_by_groups(b, y, il, s, eps)
    return b.linear(y, f"{block}.ssm_out", b.hp.n_embd, f"mamba_out-{il}")


def _norm_by_groups(b: GraphBuilder, y: Tensor, il: int, s: Mamba2, eps: float) -> Tensor:
    weight = b.hp.weight(f"blk.{il}.ssm_norm.weight", (s.n_group, s.inner // s.n_group))
    y = b.view(y, (b.n, s.n_group, s.inner // s.n_group)) if s.n_group > 1 else y
    y = b.graph.emit("RMS_NORM", f"ssm_rms-{il}", "F32", y.shape, (y,), eps=eps)
    y = b.view(y, (b.n, s.inner)) if s.n_group > 1 else y
    return b.graph.emit("MUL", f"ssm_norm-{il}", "F32", y.shape, (y, replace(weight, shape=(s.inner,))))


def recurrence_tensors(s: ModelShape, *, normed: bool = True) -> Tensors:
    """A Mamba-2 block, with its norm where `normed`, and the norm before it."""
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
    if normed:
        yield "ssm_norm.weight", (m.n_group, m.inner // m.n_group)
    yield "ssm_out.weight", (s.n_embd, m.inner)
