"""Kernels of a plan as modules of the model: token_embd, blk.0.attn.q, blk.0.ffn_norm, output.

A kernel that holds several projections (q, k and v; gate and up) counts for each by its part of the weights' bytes. What is fused into a
projection without a matrix of its own (norm, bias, residual) counts for that projection; a kernel without weights for the module around it:
attention for blk.N.attn, the choice of experts for blk.N.ffn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from vkback.ops.dispatch import Dispatch

GROUPS = ("attn", "ffn", "ssm")

INPUTS = {"inp": "token_embd", "result": "output", "rope": "rope_angles"}
"""Modules of kernels outside the layers, by the first word of their node."""

Path = tuple[str, ...]


@dataclass
class Module:
    """A module: microseconds of its own kernels (self), and with its parts (total).

    calls       runs of its kernels, or of its parts' where it has none of its own
    fused_into  name of the kernel that it is a part of, where it has none of its own
    """

    name: str
    cpu_us: float = 0.0
    gpu_us: float = 0.0
    own_calls: int = 0
    fused_into: str = ""
    parts: dict[str, Module] = field(default_factory=dict)

    @property
    def total_cpu_us(self) -> float:
        return self.cpu_us + sum(m.total_cpu_us for m in self.parts.values())

    @property
    def total_gpu_us(self) -> float:
        return self.gpu_us + sum(m.total_gpu_us for m in self.parts.values())

    @property
    def calls(self) -> int:
        return self.own_calls or max((m.calls for m in self.parts.values()), default=0)

    def at(self, path: Path) -> Module:
        """The part of this path, made where it is missing."""
        found = self
        for name in path:
            found = found.parts.setdefault(name, Module(name))
        return found


def weight_path(name: str) -> Path:
    """The module of a tensor of the file."""
    words = name.removesuffix(".weight").removesuffix(".bias").split(".")
    if words[0] != "blk":
        return (".".join(words),)
    layer, leaf = words[1], ".".join(words[2:])
    group, _, rest = leaf.partition("_")
    if group in GROUPS and rest and rest not in ("norm", "norm_2"):
        return ("blk", layer, group, rest)
    return ("blk", layer, leaf)


def node_path(label: str) -> Path:
    """The module around a kernel without weights, from its node's name."""
    base, layer = label_parts(label)
    if layer is None:
        return (INPUTS.get(re.split(r"[_.]", base)[0], base),)
    if base.startswith(("kqv", "Q", "K", "V", "q_", "k_", "kv_", "attn", "kq")):
        return ("blk", layer, "attn")
    group = base.partition("_")[0]
    return ("blk", layer, group) if group in GROUPS else ("blk", layer)


def label_parts(label: str) -> tuple[str, str | None]:
    """A node's name without its layer, and the layer's number."""
    found = re.match(r"(.*?)-(\d+)(.*)$", label)
    return (found[1] + found[3], found[2]) if found else (label, None)


@dataclass(frozen=True)
class Share:
    """The part of a kernel that counts for a module. matrix: the file's tensor, "" for a kernel without weights."""

    path: Path
    part: float
    matrix: str = ""


OF_VECTORS = frozenset({"RMS_NORM", "RMS_NORM_MUL", "RMS_NORM_MUL_ADD", "RMS_NORM_PAIR", "NORM", "NORM_MUL_ADD", "PACK_F16", "MUL"})
"""Ops that count for the module of their weight, which is a vector."""


def shares(d: Dispatch, sizes: Mapping[str, int]) -> tuple[list[Share], list[str]]:
    """Modules that a kernel counts for, with parts that sum to 1, and tensors that are fused into them. sizes: of the file's tensors."""
    if d.op in ("SAMPLE", "SAMPLE_COLUMNS") or d.label in ("loop", "tokens"):
        return [Share(("sample",), 1.0)], []
    matrices: dict[str, tuple[str, ...]] = {}
    vectors: list[str] = []
    for arg in d.args:
        if arg.tensor.kind == "weight":
            found = arg.tensor.recipe.weights if arg.tensor.recipe else {arg.tensor.name: (arg.tensor.name,)}
            if len(arg.tensor.shape) > 1:
                matrices |= found
            else:
                vectors += [name for name in found if name not in vectors]
    base = label_parts(d.label)[0]
    if base.startswith("result") and "token_embd.weight" in matrices:  # tied: the embedding is the output's matrix
        return [Share(("output",), 1.0, "token_embd.weight")], vectors
    if not matrices and d.op in OF_VECTORS and vectors:
        return [Share(weight_path(vectors[0]), 1.0)], vectors[1:]
    if not matrices:
        return [Share(node_path(d.label), 1.0)], vectors
    bytes_of = {name: sum(sizes[source] for source in sources) for name, sources in matrices.items()}
    return [Share(weight_path(name), size / sum(bytes_of.values()), name) for name, size in bytes_of.items()], vectors
