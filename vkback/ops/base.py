"""What an op is: a float64 reference, a lowering to dispatches, seeded cases, a tolerance, and the chain that a fusion stands for.

Lowering is pure: it turns a node into `Dispatch` values that name tensors, never buffers, so that a schedule can be planned, printed and
tested with the capability profile of a GPU that is not there.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.device import Capabilities
from vkback.errors import VkbackError
from vkback.graph import Node, Tensor
from vkback.ops.case_line import call_with, line_of
from vkback.ops.cost import Cost, total
from vkback.shader import Variant

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Access = Literal["r", "w", "rw"]
Act = Literal["auto", "f32", "f16", "q8_1"]
"""How activations enter mat-vecs: as the tables say, as floats, or rounded to Q8_1."""
Sync = Literal["barrier", "sentinel"]
"""What orders the stages of a token: pipeline barriers, or spin-waits on a sentinel value (vkback/plan/sync.py)."""

VALUE_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8, "I16": 2, "I8": 1}
"""Types whose values lie one after the other, with the bytes of one; a tensor of them takes whole words of 32 bits."""

MAX_GROUPS_X = 65535
"""Groups along x that every Vulkan device takes (maxComputeWorkGroupCount is at least this); beyond it a grid spills to y or z."""


class PlanError(VkbackError):
    """A node that cannot be lowered for this device, with the node, the limit and the way out."""


@dataclass(frozen=True)
class Arg:
    """A tensor bound to a dispatch.

    shard  which shard of a weight that exceeds the device's storage-buffer range
    part   a name for the piece of the tensor this dispatch touches: two parts never overlap, so they are no hazard to each other;
           "" means the whole tensor
    """

    tensor: Tensor
    access: Access = "r"
    shard: int = 0
    part: str = ""


@dataclass(frozen=True)
class SpinWaits:
    """What the workgroups of a kernel with shaders/common/sentinel.glsl or shaders/common/arrivals.glsl wait for, by tensor names.

    whole   every workgroup waits for all of it
    part    every workgroup waits for some of it
    shares  every workgroup waits for some of it, all together for all of it
    also    every workgroup waits for all of it where it was made since the last barrier (define SPINS_ALSO), else reads it
    own     partial results that workgroups of this dispatch wait for from each other
    counted   every workgroup waits until all workgroups of the dispatches that make these have arrived, where they were made since the
              last barrier
    arrives   of its workgroups so many can count their arrivals, all that store something; 0: it cannot
    constants  of a kernel without defines: the first of the specialization constants that stand for SYNC_SENTINEL, SPINS, ARRIVES and
              EXPECTED. Its last three args stand for the buffers of arrivals, of those expected, and of the state of spin-waits
    """

    whole: tuple[str, ...] = ()
    part: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    arrives: int = 0
    constants: int | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """What its workgroups spin on by its words."""
        return (*self.whole, *self.part, *self.shares, *self.own)


@dataclass(frozen=True)
class Adjustment:
    """A parameter that a kernel has otherwise than the tables say. why: the device's limit or the node's need behind it."""

    name: str
    wanted: int | str | bool
    got: int | str | bool
    why: str

    def __str__(self) -> str:
        return f"{self.name} {table_word(self.wanted)} -> {table_word(self.got)}: {self.why}"


class KernelConfig(Protocol):
    """What a kernel is built for, as a typed value of its family (`MatVecConfig`)."""

    @property
    def adjustments(self) -> tuple[Adjustment, ...]:
        """Where it differs from what the tables say."""


@dataclass(frozen=True)
class Dispatch:
    """One kernel launch.

    kernel  the variant to compile (source, defines, specialization, subgroup size)
    args    bound to set 0, bindings 0.. in order
    push    push constants, at most 128 bytes
    groups  workgroups along x, y, z
    op      the op or fusion it carries out, `label` the node's name
    waits   what its kernel can spin-wait on (vkback/plan/sync.py); None: the kernel needs barriers around it
    reason  why this variant: the tuning row that won, or what the device lacks
    nbytes  bytes it must move through memory, each operand once; flops: multiply-adds count 2
    weight_bytes  of `nbytes`, those of weight matrices: all rows, of experts those of the experts used, of an embedding the rows looked up
    config  what the kernel was built for, in families that have a typed value of it
    """

    kernel: Variant
    args: tuple[Arg, ...]
    push: bytes
    groups: tuple[int, int, int]
    op: str
    label: str
    reason: str = ""
    nbytes: int = 0
    flops: int = 0
    weight_bytes: int = 0
    waits: SpinWaits | None = None
    config: KernelConfig | None = None

    @property
    def reads(self) -> frozenset[tuple[str, str]]:
        """(tensor name, part) of everything read."""
        return frozenset((a.tensor.name, a.part) for a in self.args if "r" in a.access)

    @property
    def writes(self) -> frozenset[tuple[str, str]]:
        """(tensor name, part) of everything written."""
        return frozenset((a.tensor.name, a.part) for a in self.args if "w" in a.access)


@dataclass(frozen=True)
class Choice:
    """What the tuning tables say for one query: the parameters and the row they came from."""

    params: Mapping[str, Any]
    source: str

    def __getitem__(self, key: str) -> Any:
        return self.params[key]


@dataclass(frozen=True)
class CountOr:
    """A kind of parameter: any whole number above 0, or `word`."""

    word: str


MatchKind = tuple[Any, ...] | Literal["word", "number"]
"""Of a match key: all words or booleans it can hold, any word, or any whole number from 0."""
ParameterKind = tuple[Any, ...] | Literal["positive"] | CountOr
"""Of a parameter: its legal values, or any whole number above 0 (or one word)."""


def is_one_of(value: Any, legal: Sequence[Any]) -> bool:
    """Whether a value is among some of the same type: True is not 1."""
    return any(type(value) is type(one) and value == one for one in legal)


def table_word(value: Any) -> str:
    """A value as tables spell it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Family:
    """What a family's rows may contain: `match` keys with their kind, `set` keys with their kind, `never` what nobody asks for."""

    match: Mapping[str, MatchKind]
    set: Mapping[str, ParameterKind]
    never: tuple[Mapping[str, Collection[Any]], ...] = ()

    def why_illegal(self, parameter: str, value: Any) -> str:
        """What a value of a parameter should have been; "" when it is legal."""
        kind = self.set[parameter]
        if isinstance(kind, tuple):
            return "" if is_one_of(value, kind) else f"{table_word(value)} is not legal, expected one of {', '.join(map(table_word, kind))}"
        count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if isinstance(kind, CountOr):
            return "" if count or value == kind.word else f"{table_word(value)}, expected an integer from 1, or {kind.word!r}"
        return "" if count else f"{table_word(value)}, expected an integer from 1"


POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

FAMILIES: dict[str, Family] = {}
"""Known families; every op file declares its own with `declare`."""


def declare(
    name: str,
    *,
    match: Mapping[str, MatchKind],
    params: Mapping[str, ParameterKind],
    never: Sequence[Mapping[str, Collection[Any]]] = (),
) -> None:
    """Make a family known. match: keys with their kind, the key that tells most first; params: parameters with their kind; never:
    combinations of match values that do not occur.

    What is not a quantity is a word or a boolean, never a number that stands for one.
    """
    FAMILIES[name] = Family(dict(match), dict(params), tuple(never))


class Chooser(Protocol):
    """Tuning tables, as ops see them."""

    def pick(self, family: str, **query: Any) -> Choice: ...


@dataclass(frozen=True)
class LowerContext:
    """All that a lowering may depend on.

    act  "auto": tables choose between float and integer-dot path; "f32": float path only; "q8_1": integer dot wherever a kernel has it;
         "f16", of training: as f32, but where the device has cooperative matrices of f16, these multiply by stored weights other than F32,
         forward and backward, and every row of activations or gradients is packed times a power of two of its own
    sync "sentinel": stages run barrier-free where they can
    fragments  the driver lays a cooperative matrix out over lanes in one way in all kernels (vkback/program/fragments.py checks it)
    row_lanes  neighbouring lanes that share a row of a cooperative matrix, in the order of shaders/mat_mul/matrix.glsl (checked too);
               0: in no such order; None: not checked, what is known of the driver counts
    f16_scales  what activations are multiplied by when they are packed as f16, by name of the F16 tensor; 1 for the others
               (vkback/ops/f16_range.py)
    beyond_f16  names of weights that f16 cannot hold: no kernel that makes f16 of weights takes them
    exact  a token's values have the same bits however many tokens go through at once (vkback/plan/exact.py)
    """

    caps: Capabilities
    tuning: Chooser
    act: Act = "auto"
    sync: Sync = "barrier"
    fragments: bool = True
    row_lanes: int | None = None
    f16_scales: Mapping[str, float] = field(default_factory=dict)
    beyond_f16: frozenset[str] = frozenset()
    exact: bool = False

    def f16_scale(self, packed: Tensor) -> float:
        """What the values of an F16 tensor are multiplied by."""
        return self.f16_scales.get(packed.name, 1.0)


@dataclass(frozen=True)
class Tolerance:
    """nmse: error energy over the reference's energy; worst: largest |error| over the reference's rms. `reason` justifies both."""

    nmse: float
    worst: float
    reason: str


@dataclass(frozen=True)
class Rounded:
    """What an op must make of activations that its kernel rounds before it computes: `outputs` as of Op.reference, and the bound around
    them, which need not allow for that rounding."""

    outputs: list[Array]
    tolerance: Tolerance


@dataclass(frozen=True)
class Problem:
    """A node with values for its inputs: F32/I32/F16 arrays by tensor name, raw GGUF bytes [rows, row_bytes] for quantized weights.

    parts  nodes that fill the node's outputs between them, run in its place (`values` holds their inputs, too)
    """

    node: Node
    values: dict[str, Array]
    parts: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Case:
    """One seeded case. `line` reruns it: OP(key=value,...,seed=N)."""

    op: str
    params: Mapping[str, Any]
    make: Callable[[np.random.Generator], Problem] = field(compare=False, hash=False)
    seed: int = 0

    @property
    def line(self) -> str:
        return line_of(self.op, self.params)

    def build(self) -> Problem:
        return self.make(np.random.default_rng(self.seed))

    def where(self, *, sync: Sync | None = None, range: int | None = None, **tuning: int | str) -> Case:
        """The same case under other conditions, which stand in its line and hold on every device.

        tuning  parameters of the kernels, whatever the tables say: `tuning=[lanes:16,unroll:2]`
        sync    "sentinel": as in a barrier-free stage
        range   bytes that the device binds at most, so that a weight is cut into shards
        """
        shown: dict[str, Any] = {"tuning": tuple(f"{k}:{table_word(v)}" for k, v in tuning.items())} if tuning else {}
        shown |= {"sync": sync} if sync else {}
        shown |= {"range": range} if range else {}
        rest = {k: v for k, v in self.params.items() if k != "seed"}
        return replace(self, params={**rest, **shown, "seed": self.seed})

    def reseeded(self, seed: int) -> Case:
        """The same case with other values."""
        return replace(self, seed=seed, params={**self.params, "seed": seed})


class Tape(Protocol):
    """The backward graph under construction, as rules see it (vkback/plan/autodiff.py).

    A rule asks with `wants` which operands' gradients are of use, adds nodes with `emit` or `add`, and returns a gradient for each operand.
    """

    def wants(self, tensor: Tensor) -> bool:
        """Whether the gradient of an operand leads to something that is trained."""

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor for (a part of) the gradient of an operand: F32, of its shape, with a name of its own."""

    def kept(self, tensor: Tensor) -> Tensor | None:
        """Where the gradient of a trained weight is kept, if it has a value there: an op that can may add to it and return it."""

    def emit(self, op: str, of: Tensor, inputs: tuple[Tensor, ...], **params: Any) -> Tensor:
        """Add a node with one output, which is (a part of) the gradient of `of`, and return that output."""

    def add(self, op: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], **params: Any) -> None:
        """Add a node with several outputs."""


class Op(ABC):
    """An op of the graph: all that is particular to it. docs/adding_an_op.md shows one.

    name            as the graph and the lines of cases have it
    peer_nmse       NMSE that llama.cpp's test-backend-ops (ggml 0.25) allows the op
    further         names that `build_case` takes as **keywords
    keys            names of parameters that a line may have, where `build_case` serves several ops and takes more; empty: all that it takes
    weight_type     parameter of a case that holds the type of the op's weights; the support table counts each type apart
    shares_weights  it multiplies a stored weight by n tokens: cases that differ in the parameter n alone use the same weights
    formula         what listings print for it, with x, y, z for the operands; "" is the name
    """

    name: ClassVar[str]
    peer_nmse: ClassVar[float] = 1e-7
    further: ClassVar[tuple[str, ...]] = ()
    keys: ClassVar[tuple[str, ...]] = ()
    weight_type: ClassVar[str] = ""
    shares_weights: ClassVar[bool] = False
    formula: ClassVar[str] = ""

    @abstractmethod
    def reference(self, inputs: Sequence[Array], params: Mapping[str, Any]) -> list[Array]:
        """The op in plain float64 numpy; weights come dequantized. In-place outputs are returned as modified copies. Callers give each
        output the shape of the node's."""

    @abstractmethod
    def lower(self, node: Node, ctx: LowerContext) -> list[Dispatch]:
        """Dispatches that compute the node, in order; hazards between them follow from what they read and write."""

    @abstractmethod
    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        """How far the device may be from the reference on the path `ctx` leads to."""

    def rounded(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Rounded | None:
        """The reference of activations that the path `ctx` leads to rounds, rounded on the host as the device does it; None where it
        rounds none. Inputs as `reference` takes them."""
        return None

    @abstractmethod
    def build_case(self, *args: Any, **kwargs: Any) -> Case:
        """The case of these parameters, which have the names that its line prints; annotated, so that `case` can check them."""

    @abstractmethod
    def cases(self) -> Iterator[Case]:
        """The quick set: seeded cases that every build runs."""

    def full_cases(self) -> Iterator[Case]:
        """The cross product of the parameters, beside the quick set. Kernels are compiled for what they are built with: vary that with
        care, and the rest freely."""
        return iter(())

    def perf_cases(self) -> Iterator[Case]:
        """Cases worth timing: sizes of real models. Cases that share their weights stand together, the largest n first."""
        return iter(())

    def case(self, params: Mapping[str, Any]) -> Case:
        """The case of parameters as its line prints them. Raises CaseLineError naming the parameter, what is known, and an example."""
        example = lambda: next(iter(self.cases())).line  # noqa: E731
        return call_with(self.build_case, params, op=self.name, further=self.further, only=self.keys, example=example)

    def unfused(self, node: Node) -> list[Node]:
        """The chain of plain nodes that makes the same outputs; empty where the op, or this node of it, is no fusion."""
        return []

    def backward(self, node: Node, dy: Tensor, tape: Tape) -> Sequence[Tensor | None]:
        """The rule of differentiation: from the gradient of the node's first output, nodes that make those of its operands.

        ->  a gradient for each operand, in their order; None for one that has none (ids, positions) or that nobody wants
        Raises PlanError for an op without a rule.
        """
        raise PlanError(f"[{self.name}] {node.name}: no rule says how it is differentiated; expected a method `backward` on its op")

    def elementary(self, node: Node, n_kv: int) -> list[Node]:
        """The chain of simpler nodes by which ggml makes the same outputs without fused ops; empty where the node is one of these.

        n_kv  rows of the caches that attention reads
        """
        return []

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        """Operations of a node by kind (vkback/ops/cost.py); by default those of the chain that it stands for. Raises PlanError for an op
        without a rule."""
        chain = self.elementary(node, n_kv) or self.unfused(node)
        if not chain:
            raise PlanError(f"[{self.name}] {node.name}: no rule says what it costs; expected a method `arithmetic` on its op")
        return total(cost_rule(n).arithmetic(n, n_kv) for n in chain)

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        """Bytes that a node reads of an operand outside temporary storage: a weight, a state or an input."""
        return nbytes(tensor)

    def stored_bytes(self, node: Node, n_kv: int) -> int:
        """Bytes that a node writes into states."""
        return sum(nbytes(t) for t in node.outputs if t.kind == "state")


OPS: dict[str, Op] = {}
"""Every op by name."""


def register(cls: type[Op]) -> type[Op]:
    """Class decorator: make an op known by its name."""
    OPS[cls.name] = cls()
    return cls


class Reshape:
    """The rules of VIEW, which is a tensor under another shape, or with the param `view` (vkback/ops/view.py) a part of it: no work."""

    def backward(self, node: Node, dy: Tensor, tape: Tape) -> Sequence[Tensor | None]:
        if "view" in node.params:
            raise PlanError(f"[VIEW] {node.name}: no rule says how a view of a part is differentiated; expected one of the whole")
        return [tape.emit("VIEW", node.inputs[0], (dy,))]

    def elementary(self, node: Node, n_kv: int) -> list[Node]:
        return []

    def arithmetic(self, node: Node, n_kv: int) -> Cost:
        return {}

    def read_bytes(self, node: Node, tensor: Tensor, n_kv: int) -> int:
        return 0

    def stored_bytes(self, node: Node, n_kv: int) -> int:
        return 0

    @staticmethod
    def shown(node: Node) -> str:
        return "view(x)" if "view" in node.params else "reshape(x)"


def cost_rule(node: Node) -> Op | Reshape:
    """What knows a node's cost: its op."""
    return Reshape() if node.op == "VIEW" else OPS[node.op]


def moves_values(self: Op, node: Node, n_kv: int) -> Cost:
    """The `Op.arithmetic` of an op that computes nothing."""
    return {}


def weight_push(quant: str, layout: quants.DeviceLayout, k: int) -> list[int]:
    """The `Weights` block of shaders/quant/weights.glsl, in 16-byte words: units, part, plane[4]."""
    stem = layout.planes[0].name.rstrip("0123456789")
    parts = sum(p.name.rstrip("0123456789") == stem for p in layout.planes)
    others = [p.offset // 16 for p in layout.planes[parts:]]
    return [ceil_div(k, 32), layout.part_stride // 16, *others, *([0] * (4 - len(others)))]


def is_coded(tensor: Tensor) -> bool:
    """Whether it lies in the planes of docs/architecture.md: quantized, or a stored weight of several axes."""
    return (tensor.kind == "weight" and len(tensor.shape) > 1) or (tensor.type in quants.WEIGHT_TYPES and tensor.type not in VALUE_BYTES)


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor in device memory, in the layouts of docs/architecture.md (weights as one shard)."""
    if tensor.type in VALUE_BYTES and tensor.kind != "weight":
        return 4 * ceil_div(VALUE_BYTES[tensor.type] * tensor.elements, 4)
    k = tensor.shape[-1]
    if tensor.type == "Q8_1":
        return prod(tensor.shape[:-1]) * quants.q8_1_stride(k)
    if tensor.kind == "weight" and tensor.type in ("F32", "I32") and len(tensor.shape) == 1:
        return 4 * k
    return quants.layout(tensor.type, prod(tensor.shape[:-1]), k).nbytes


@dataclass(frozen=True)
class Shard:
    """Rows row0 .. row0 + rows of a weight (experts flattened), with the planes of those rows alone."""

    row0: int
    rows: int
    layout: quants.DeviceLayout


def shards(weight: Tensor, caps: Capabilities) -> tuple[Shard, ...]:
    """Cut a weight so that each shard fits the device's storage-buffer range.

    A matrix is cut by rows; a stack of experts between experts, since a dispatch must find any expert in one binding.
    Raises PlanError when one row (or the experts together) exceeds the range.
    """
    rows, k = prod(weight.shape[:-1]), weight.shape[-1]
    whole = quants.layout(weight.type, rows, k)
    limit = caps.max_storage_buffer_range
    if whole.nbytes <= limit:
        return (Shard(0, rows, whole),)
    if len(weight.shape) > 2:
        raise PlanError(f"[plan] {weight}: its experts take {whole.nbytes} bytes, the device binds at most {limit} bytes at once")
    step = rows * limit // whole.nbytes // 64 * 64
    while step and quants.layout(weight.type, step, k).nbytes > limit:
        step -= 64
    if step <= 0:
        raise PlanError(f"[plan] {weight}: 64 rows exceed the {limit} bytes the device binds at once")
    return tuple(Shard(r, min(step, rows - r), quants.layout(weight.type, min(step, rows - r), k)) for r in range(0, rows, step))


def pack_push(*values: int | float) -> bytes:
    """Push constants: ints as u32 (negative ones as i32), floats as f32."""
    return b"".join(struct.pack("<f", v) if isinstance(v, float) else struct.pack("<I", v & 0xFFFFFFFF) for v in values)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def spread(groups: int) -> tuple[int, int, int]:
    """A one-dimensional grid as (x, y, 1) within MAX_GROUPS_X; the shader computes `y * gl_NumWorkGroups.x + x` and checks the end."""
    if groups <= MAX_GROUPS_X:
        return (max(groups, 1), 1, 1)
    y = ceil_div(groups, MAX_GROUPS_X)
    return (ceil_div(groups, y), y, 1)
