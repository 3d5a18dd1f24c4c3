"""What an op is: a float64 reference, a lowering to dispatches, seeded cases, a tolerance, and the chain that a fusion stands for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from vkback.graph import Node, Tensor
from vkback.ops.case import Array, Case, Rounded, Tolerance
from vkback.ops.case_line import call_with
from vkback.ops.cost import Cost, total
from vkback.ops.dispatch import Dispatch
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.storage import nbytes


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


@runtime_checkable
class KernelChoice(Protocol):
    """The kernel of a node, printable, as a plan keeps it (`Node.choice`): `Op.choose` makes it."""

    @property
    def kernel(self) -> str:
        """Which kernel it is."""

    @property
    def source(self) -> str:
        """The row of the tables that won, or what decided without one."""

    @property
    def rounds(self) -> str:
        """What the kernel rounds F32 activations to; "" where it takes them as they are."""

    def storing(self, node: Node, ctx: LowerContext) -> KernelChoice:
        """The choice for the node with another type of output than it was made for."""


class Op(ABC):
    """An op of the graph: all that is particular to it. docs/adding_an_op.md shows one.

    name            as the graph and the lines of cases have it
    ggml_nmse       NMSE that llama.cpp's test-backend-ops (ggml 0.25) allows the op
    extra_keys      names that `build_case` takes as **keywords
    keys            names of parameters that a line may have, where `build_case` serves several ops and takes more; empty: all that it takes
    weight_type     parameter of a case that holds the type of the op's weights; the support table counts each type apart
    shares_weights  it multiplies a stored weight by n tokens: cases that differ in the parameter n alone use the same weights
    formula         what listings print for it, with x, y, z for the operands; "" is the name
    """

    name: ClassVar[str]
    ggml_nmse: ClassVar[float] = 1e-7
    extra_keys: ClassVar[tuple[str, ...]] = ()
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

    def choose(self, node: Node, ctx: LowerContext) -> KernelChoice | None:
        """The kernel of a node; None where nothing but the lowering wants to know. A plan asks once, and all others read it there."""
        return None

    @abstractmethod
    def tolerance(self, node: Node, ctx: LowerContext) -> Tolerance:
        """How far the device may be from the reference on the path `ctx` leads to."""

    def tolerance_at(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Tolerance:
        """`tolerance` of these inputs, where the error depends on how they spread. Inputs as `reference` takes them."""
        return self.tolerance(node, ctx)

    def rounded(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> Rounded | None:
        """The reference of activations that the path `ctx` leads to rounds, rounded on the host as the device does it; None where it
        rounds none. Inputs as `reference` takes them."""
        return None

    def as_f16(self, inputs: Sequence[Array], node: Node, ctx: LowerContext) -> list[Array] | None:
        """The reference of operands that the path `ctx` leads to takes as F16, rounded so; None where it takes none. Inputs as `reference`
        takes them."""
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
        return call_with(self.build_case, params, op=self.name, extra_keys=self.extra_keys, only=self.keys, example=example)

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
