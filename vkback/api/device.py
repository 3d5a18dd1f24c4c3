"""A device for authors of kernels: tensors, ops, GLSL files, and times.

dev = vkback.Device()
x, y = dev.tensor(np.ones(1 << 20, np.float32)), dev.empty((1 << 20,))
scale = dev.compile("scale.comp", {"WG_SIZE": 256})
scale(x, y, push=[x.elements, 2.0], groups=x.elements // 256)
print(dev.time(scale, x, y, push=[x.elements, 2.0], groups=x.elements // 256))
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import prod
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, Self, TypeAlias

import numpy as np
import numpy.typing as npt

import vkback.ops  # registers every op  # noqa: F401
from vkback import quants
from vkback.api import given
from vkback.api.errors import ModelError
from vkback.api.ops import WRONG, Params, misuse, op_called, signature
from vkback.api.push import Push, packed
from vkback.device import Arena, BufferRange, Capabilities, Commands, Kernel, inspect, list_devices
from vkback.device import Device as VulkanDevice
from vkback.graph import Graph, Node, Tensor
from vkback.ops.copies.encode import ENCODED
from vkback.ops.f16_range import rescaled
from vkback.ops.lowering import ACTS, Act, LowerContext
from vkback.ops.storage import shards
from vkback.plan.planner import plan
from vkback.plan.schedule import aligned
from vkback.plan.weight_layout import stored_type
from vkback.program import Program, WeightRanges
from vkback.program.values import decoded, stored_bytes
from vkback.shader import ShaderLibrary, Variant
from vkback.timing.launches import span_us, stamp, summarize, warm_up
from vkback.timing.read_rate import measure_read_rate
from vkback.tuning.lookup import Tuning

Array = npt.NDArray[Any]
Operand: TypeAlias = "DeviceTensor | npt.ArrayLike"
"""Of arithmetic with a tensor."""

Groups = int | np.integer[Any] | Sequence[int]

STEADY_US = 2000.0
"""Launches of one measurement take about so long together, so that clocks and timestamps are steady."""

MAX_LAUNCHES = 1000


def real(array: npt.ArrayLike) -> Array:
    """An array of numbers. Raises ModelError for one of something else, complex numbers among it."""
    if isinstance(array, DeviceTensor):
        return array.numpy()
    try:
        values = np.asarray(array)
    except (ValueError, TypeError) as e:
        raise ModelError(f"[device] {str(array)[:40]} is no array: {e}") from e
    if values.dtype.kind not in "fiub":
        raise ModelError(f"[device] an array of {values.dtype}; expected one of real numbers, as float32 or int32")
    return values


def require_held(values: Array, kind: str) -> None:
    """Raises ModelError for values that I32 does not hold, and finite ones that F32 does not."""
    if kind == "I32" and values.dtype.itemsize >= 4 and values.dtype != np.int32 and values.size:
        low, high = int(values.min()), int(values.max())
        if low < -(2**31) or high >= 2**31:
            raise ModelError(
                f"[device] an array of {values.dtype} from {low} to {high}; the device keeps whole numbers as I32, -2**31 to 2**31 - 1. "
                "Give floats, or bits as they are: array.view(np.int32)"
            )
    if kind == "F32" and values.dtype.itemsize > 4:
        with np.errstate(over="ignore"):
            lost = np.isinf(values.astype(np.float32)) & np.isfinite(values)
        if lost.any():
            raise ModelError(f"[device] an array of {values.dtype} with {values[lost].flat[0]:g}, which F32 does not hold: scale it")


def shape_of(name: str, shape: Any) -> tuple[int, ...]:
    """A shape in numpy order, given as its axes or one number. Raises ModelError."""
    expected = "a whole number, 1 or more, or several for several axes"
    axes = shape if isinstance(shape, list | tuple) else (shape,)
    return tuple(given.whole(name, axis, expected, 1, "device") for axis in axes)


def _give_back(arena: Arena) -> None:
    if arena.alive:
        arena.destroy()


def devices() -> list[Capabilities]:
    """What each Vulkan device can do, in the order of their indices: `vkback.Device(0)` opens the first. Raises NoDevice where there is no
    loader or no driver."""
    return list_devices()


class DeviceTensor:
    """An array in memory of a device, which goes back with it; `numpy()` brings it to the host. Made by `Device.tensor`, `Device.empty` and
    `Device.run_op`.

    type   as in `vkback.graph.Tensor`: F32, I32, F16, or a type of weights ("Q4_K"), whose bytes are in the device's own layout
    shape  in numpy order
    """

    def __init__(self, device: Device, tensor: Tensor, ranges: tuple[BufferRange, ...], of: DeviceTensor | None = None) -> None:
        """ranges: one, or one a shard of a weight. of: the tensor whose memory it is, in another shape."""
        self.device, self.tensor, self.ranges = device, tensor, ranges
        self._of = of
        if of is None:
            weakref.finalize(self, _give_back, ranges[0].arena)

    @property
    def type(self) -> str:
        return self.tensor.type

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of what `numpy()` gives."""
        return np.dtype(np.int32 if self.type == "I32" else np.float32)

    @property
    def elements(self) -> int:
        return self.tensor.elements

    @property
    def nbytes(self) -> int:
        """In the device's memory."""
        return sum(r.size for r in self.ranges)

    def numpy(self) -> Array:
        """The values: float32, or int32 of an I32 tensor; of quantized weights what their blocks mean."""
        if self.tensor.kind != "weight" or len(self.shape) == 1:
            return decoded(self.tensor, self.device.raw.download(self.ranges[0]), self.device.raw.caps)
        return quants.decode(self.type, self.file_rows()).reshape(self.shape)

    def file_rows(self) -> npt.NDArray[np.uint8]:
        """Weights in the order that a file has: uint8 [rows with experts flattened, bytes of a row]."""
        rows, k = prod(self.shape[:-1]), self.shape[-1]
        out = np.empty((rows, quants.row_bytes(self.type, k)), np.uint8)
        stored = stored_type(self.type, k, self.device.raw.caps)
        for shard, where in zip(shards(self.tensor, self.device.raw.caps), self.ranges, strict=True):
            planes = [
                raw.reshape(shard.rows, p.row_bytes)
                for p, raw in ((p, self.device.raw.download(where.slice(p.offset, shard.rows * p.row_bytes))) for p in shard.layout.planes)
            ]
            out[shard.row0 : shard.row0 + shard.rows] = quants.unpack(stored, planes, k)
        return out

    def __getitem__(self, index: Any) -> Any:
        """A part of the values, on the host."""
        return self.numpy()[index]

    def __setitem__(self, index: Any, values: npt.ArrayLike) -> None:
        """Change a part of the values, by way of the host; not of weights, which are quantized or laid out as kernels read them."""
        if self.tensor.kind == "weight":
            raise ModelError(f"[device] {self!r} = ...: weights stay as they are; make others with dev.tensor(array, {self.type!r})")
        whole = self.numpy().copy()
        whole[index] = values
        require_held(whole, self.type)
        self.device.raw.upload(self.ranges[0], stored_bytes(self.tensor, whole, self.device.raw.caps)[0])

    def __len__(self) -> int:
        return self.shape[0]

    def __add__(self, other: Operand) -> DeviceTensor:
        """Value by value, on the device, as the other three: with a number, or a tensor or array that is repeated to this one's shape."""
        return self._with("ADD", other)

    def __sub__(self, other: Operand) -> DeviceTensor:
        return self._with("SUB", other)

    def __mul__(self, other: Operand) -> DeviceTensor:
        return self._with("MUL", other)

    def __truediv__(self, other: Operand) -> DeviceTensor:
        return self._with("DIV", other)

    def __radd__(self, other: float) -> DeviceTensor:
        return self._with("ADD", other)

    def __rmul__(self, other: float) -> DeviceTensor:
        return self._with("MUL", other)

    def _with(self, op: str, other: Operand) -> DeviceTensor:
        return self.device.run_op(op, self, np.full(1, other, np.float32) if isinstance(other, Real) else other)

    def __dlpack__(self, **options: Any) -> Any:
        """The values on the host, for `torch.from_dlpack` and the like."""
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = np.empty(0).__dlpack_device__()
        return int(kind), int(number)

    def __matmul__(self, x: DeviceTensor | Array) -> DeviceTensor:
        """w @ x of weights [m, k] and activations [k] or [n, k] (each row a token): [m] or [n, m]."""
        return self.device.matmul(self, x)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        values = self.numpy()
        return values if dtype is None else values.astype(dtype)

    def __repr__(self) -> str:
        return f"<{self.type} {list(self.shape)} on {self.device.name}>"


@dataclass(frozen=True)
class KernelTiming:
    """Of launches that each wait for the one before.

    us         microseconds a launch, the median; spread_us: half the interquartile range
    nbytes     what a launch must move
    read_rate  GB/s that the device was measured to read
    Tensors that are smaller than a cache stay in it from launch to launch: then gb_s may exceed read_rate.
    """

    us: float
    spread_us: float
    nbytes: int
    read_rate: float
    flops: int = 0

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.us / 1e3

    @property
    def share(self) -> float:
        """Of the device's read rate."""
        return self.gb_s / self.read_rate

    def __str__(self) -> str:
        time = f"{self.us:.2f} +- {self.spread_us:.2f} us"
        return f"{time}, {self.gb_s:.1f} GB/s, {self.share:.0%} of the {self.read_rate:.1f} GB/s that the device reads"


class CompiledKernel:
    """A GLSL compute shader as built; call it to run it once. Made by `Device.compile`.

    Tensors are bound to set 0, bindings 0.. in order. push: the push constants, a number for each that the shader declares, whole where it
    has an int or uint, with a point where it has a float; or their bytes. groups: workgroups along x, or along x, y, z.
    """

    def __init__(self, device: Device, library: ShaderLibrary, variant: Variant) -> None:
        self.device, self.variant = device, variant
        self._spirv = library.spirv(variant)
        self._push = inspect(self._spirv).push
        self._takes_push = bool(self._push) or "push_constant" not in library.expanded(variant)
        self._spec = dict(library.specialization(variant))

    @property
    def name(self) -> str:
        return self.variant.name

    def __call__(self, *tensors: DeviceTensor, push: Push = (), groups: Groups = 1) -> None:
        rec = self.device.raw.recorder(self.name)
        self.dispatch(rec, tensors, push, groups)
        rec.host_barrier()
        self.device.raw.run(rec)

    def dispatch(self, rec: Any, tensors: Sequence[DeviceTensor], push: Push, groups: Groups) -> None:
        """Add a launch to a recording."""
        for i, t in enumerate(tensors):
            if not isinstance(t, DeviceTensor):
                raise ModelError(f"[device] {self.name}: binding {i} is {type(t).__name__}, expected a tensor of the device (dev.tensor)")
            if t.device is not self.device:
                raise ModelError(
                    f"[device] {self.name}: binding {i} is on another device, {t.device.name}; expected one of {self.device.name}, which "
                    "the kernel was compiled for"
                )
        # The compiler drops push constants that are declared and not used: whatever is given for them changes nothing.
        push_bytes = packed(self.name, self._push, push) if self._takes_push else b""
        kernel: Kernel = self.device.raw.kernel(
            self._spirv,
            name=self.name,
            bindings=len(tensors),
            push_bytes=len(push_bytes),
            spec=self._spec,
            subgroup_size=self.variant.subgroup_size,
        )
        rec.dispatch(kernel, [t.ranges[0] for t in tensors], push_bytes, grid(self.name, groups), self.name)

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"


def grid(name: str, groups: Groups) -> tuple[int, int, int]:
    """Workgroups along x, y, z. Raises ModelError."""
    expected = "a whole number of workgroups, 1 or more, or up to three along x, y, z"
    along = list(groups) if isinstance(groups, Sequence | np.ndarray) and not isinstance(groups, str | bytes) else [groups]
    if not 1 <= len(along) <= 3:
        raise given.wrong(f"{name}: groups", groups, expected, "device")
    x, y, z = (*(given.whole(f"{name}: groups", g, expected, 1, "device") for g in along), 1, 1)[:3]
    return x, y, z


class Device:
    """A Vulkan device with its tuning tables. Use as a context manager, or call `close`; everything made from it dies with it.

    raw  the `vkback.device.Device` below
    """

    def __reduce__(self) -> NoReturn:
        raise ModelError("[device] a device cannot be copied or sent to another process: open it in each process that uses it")

    def __init__(self, selector: str | int | None = None, *, act: Act = "auto", validation: bool = False) -> None:
        """selector: index, part of the name, or UUID; None: VKBACK_DEVICE, else the best GPU. act: how activations enter products.
        validation: under the Khronos validation layer. Raises NoDevice, or FeatureMissing."""
        act = given.choice("act", act, ACTS, "device")
        if not isinstance(validation, bool) and validation != "sync":
            raise given.wrong("validation", validation, 'True, False, or "sync"', "device")
        if isinstance(found := given.device("selector", selector, "device"), VulkanDevice):
            raise given.wrong("selector", selector, "an index, part of a name, a UUID, or None", "device")
        self.raw = VulkanDevice.open(found, validation=validation)
        self._library = ShaderLibrary()
        self._ctx = LowerContext(self.raw.caps, Tuning.for_device(self.raw.caps), act)
        self._number = count()

    @property
    def name(self) -> str:
        return self.raw.caps.name

    @property
    def caps(self) -> Capabilities:
        """What the device can do (`vkback.device.Capabilities`)."""
        return self.raw.caps

    @cached_property
    def read_rate(self) -> float:
        """GB/s that the device reads, measured at the first request."""
        return measure_read_rate(self.raw, self._library).gb_s

    # -- tensors

    def tensor(self, array: npt.ArrayLike, type: str | None = None) -> DeviceTensor:
        """Bring an array to the device.

        type  None: F32 or I32 by the array's dtype; a type of weights ("Q4_K", "F16", "MXFP4"...): the array [m, k], or [n_expert, m, k],
              is quantized and laid out as kernels read it
        Raises UnknownQuant, QuantShapeError where k does not fit the type's blocks, NoEncoder for a type that cannot be made from floats,
        QuantRangeError for a value that it cannot hold.
        """
        values = real(array)
        type = type.upper() if isinstance(type, str) else type
        if type is None:
            kind = "I32" if values.dtype.kind in "iub" else "F32"
            require_held(values, kind)
            return self._stored(Tensor(self._name(), kind, values.shape, "input"), values)
        if values.ndim < 2:
            raise ModelError(f"[device] weights have at least two axes, [m, k], got {list(values.shape)}; leave type out for a plain array")
        rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
        raw = quants.encode_weights(type, rows, f"tensor {list(values.shape)}")
        return self._stored(Tensor(self._name(), type, values.shape, "weight"), raw)

    def empty(self, shape: int | tuple[int, ...], type: str = "F32") -> DeviceTensor:
        """Memory for a kernel to write to, NaN as floats until it does. Of a type that `CPY` encodes ("Q4_K") it is weights, zeros until
        then."""
        type = type.upper()
        if type in ENCODED and len(axes := shape_of("shape", shape)) > 1:
            zeros = np.zeros((prod(axes[:-1]), quants.row_bytes(type, axes[-1])), np.uint8)
            return self._stored(Tensor(self._name(), type, axes, "weight"), zeros)
        if type not in ("F32", "F16", "I32"):
            raise ModelError(f"[device] type {type!r}: kernels write F32, F16 or I32, and encode rows [m, k] of {', '.join(ENCODED)}")
        return self._stored(Tensor(self._name(), type, shape_of("shape", shape), "input"), None)

    def _stored(self, tensor: Tensor, value: Array | None) -> DeviceTensor:
        if not tensor.elements:
            raise ModelError(f"[device] an array of shape {list(tensor.shape)} has no elements")
        parts = stored_bytes(tensor, value, self.raw.caps)
        arena = self.raw.arena(tensor.name, sum(aligned(p.nbytes) for p in parts), "device")
        ranges = tuple(arena.alloc(p.nbytes, tensor.name) for p in parts)
        for where, part in zip(ranges, parts, strict=True):
            self.raw.upload(where, part)
        return DeviceTensor(self, tensor, ranges)

    def _name(self) -> str:
        return f"tensor {next(self._number)}"

    # -- ops

    def matmul(self, w: DeviceTensor, x: DeviceTensor | Array) -> DeviceTensor:
        """See `DeviceTensor.__matmul__`."""
        if not isinstance(w, DeviceTensor):
            raise ModelError(f"[device] the left side of @ is {type(w).__name__}, expected weights of the device: dev.tensor(array, 'F32')")
        right = x if isinstance(x, DeviceTensor) else self.tensor(real(x).astype(np.float32))
        if w.tensor.kind != "weight":
            raise ModelError(f"[device] {w!r} @ x: the left side must be weights, made with a type: dev.tensor(array, 'F32')")
        if len(right.shape) not in (1, 2) or right.shape[-1] != w.shape[-1]:
            k = w.shape[-1]
            raise ModelError(f"[device] w @ x: w is {list(w.shape)}, so x must be [{k}] or [n, {k}], got {list(right.shape)}")
        one = len(right.shape) == 1
        y = self.run_op("MUL_MAT", w, self._reshaped(right, (1, *right.shape)) if one else right)
        return self._reshaped(y, y.shape[1:]) if one else y

    def _reshaped(self, t: DeviceTensor, shape: tuple[int, ...]) -> DeviceTensor:
        return DeviceTensor(self, replace(t.tensor, shape=shape), t.ranges, t)

    def run_op(
        self,
        op: str,
        *inputs: DeviceTensor | npt.ArrayLike,
        out: tuple[int, ...] | DeviceTensor | None = None,
        out_type: str = "F32",
        **params: Any,
    ) -> DeviceTensor:
        """Run one op of the graph (`vkback test-ops support` lists them), planned as in a model, and give its output.

        inputs  tensors, or arrays, in the op's order; vkback/ops has what each op takes and which parameters (`eps=1e-5`)
        out     shape of the output, or the tensor to write; None: of a product [n, m], of one by experts [n, n_used, m], of GET_ROWS
                [n, k], else that of the first input
        Raises PlanError for what the op cannot take, ModelError with its signature for operands that it has not.
        """
        tensors = self._operands(op, inputs)
        output = self._output(op, tensors, out, out_type)
        ctx = self._ctx
        while True:
            program = self._program(op, tensors, output, params, ctx)
            try:
                commands = program.record(op)
                self.raw.submit(commands).wait()
                held = None if program.overflow is None else self.raw.download(program.overflow, np.uint32)
                if held is None or not held.any():
                    return output
                # Activations beyond the range of f16: once more, with a scale that brings them into it.
                ctx = replace(ctx, f16_scales=rescaled(ctx.f16_scales, program.overflowed(held)))
            finally:
                program.close()

    def _operands(self, op: str, inputs: Sequence[DeviceTensor | npt.ArrayLike]) -> list[DeviceTensor]:
        op_called(op)
        if not inputs:
            raise ModelError(f"[device] {op}: give its inputs, tensors of the device or arrays. An example: {signature(op)}")
        tensors = [i if isinstance(i, DeviceTensor) else self.tensor(i) for i in inputs]
        for i, t in enumerate(tensors):
            if t.device is not self:
                raise ModelError(f"[device] {op}: input {i} is on another device, {t.device.name}; make it with this one's tensor()")
        return tensors

    def _output(
        self, op: str, tensors: Sequence[DeviceTensor], out: tuple[int, ...] | DeviceTensor | None, type: str = "F32"
    ) -> DeviceTensor:
        if isinstance(out, DeviceTensor):
            if out.device is not self:
                raise ModelError(f"[device] {op}: out is on another device, {out.device.name}; make it with this one's empty()")
            return out
        return self.empty(self._shape(op, tensors) if out is None else shape_of("out", out), type)

    @staticmethod
    def _shape(op: str, tensors: Sequence[DeviceTensor] | Sequence[Array]) -> tuple[int, ...]:
        first = tensors[0].shape
        if op == "MUL_MAT" and len(tensors) > 1 and len(first) == 2:
            return (*tensors[1].shape[:-1], first[0])
        if op == "MUL_MAT_ID" and len(tensors) > 2:
            return (*tensors[2].shape, first[1])
        if op == "GET_ROWS" and len(tensors) > 1:
            return (*tensors[1].shape, first[-1])
        return first

    def _program(
        self, op: str, tensors: Sequence[DeviceTensor], output: DeviceTensor, params: Mapping[str, Any], ctx: LowerContext
    ) -> Program:
        graph = Graph()
        asked = Params(params)
        graph.nodes.append(Node(op, tuple(t.tensor for t in tensors), (output.tensor,), asked))
        graph.outputs = (output.tensor,)
        try:
            schedule = plan(graph, ctx)
        except WRONG as e:
            raise misuse(op, e) from e
        if asked.unread:
            raise misuse(op, ValueError(f"nothing asks for the parameter {', '.join(sorted(asked.unread))}"))
        taken = schedule.tensors()
        for i, t in enumerate(tensors):
            if t.tensor.name not in taken:
                raise misuse(op, ValueError(f"nothing reads the input {i}, {t!r}"))
        every = {t.tensor.name: t for t in (*tensors, output)}
        ranges = {name: t.ranges[0] for name, t in every.items() if t.tensor.kind != "weight"}
        weights = {name: WeightRanges(t.ranges) for name, t in every.items() if t.tensor.kind == "weight"}
        return Program(self.raw, self._library, schedule, ranges, weights)

    def signature(self, op: str) -> str:
        """How an op is run, by an example of the suite: `dev.run_op('SQR', F32 [3, 4, 5, 10]) -> F32 [3, 4, 5, 10]`."""
        return signature(op)

    def reference(self, op: str) -> Callable[..., Array]:
        """An op in plain float64 numpy, which the device is judged by: takes arrays, or tensors, and parameters as `run_op`, and gives an
        array. `out` is the shape, where `run_op` needs it."""
        rules = op_called(op)

        def reference(*inputs: DeviceTensor | npt.ArrayLike, out: tuple[int, ...] | None = None, **params: Any) -> Array:
            if not inputs:
                raise ModelError(f"[device] {op}: give its inputs, tensors of the device or arrays. An example: {signature(op)}")
            arrays = [real(x) for x in inputs]
            asked = Params(params)
            try:
                found = rules.reference([a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays], asked)[0]
            except WRONG as e:
                raise misuse(op, e) from e
            if asked.unread:
                raise misuse(op, ValueError(f"nothing asks for the parameter {', '.join(sorted(asked.unread))}"))
            shape = self._shape(op, arrays) if out is None else shape_of("out", out)
            return found.reshape(shape) if found.size == prod(shape) else found

        return reference

    # -- kernels

    def compile(
        self,
        path: str | Path | None = None,
        defines: Mapping[str, str | int] | None = None,
        *,
        source: str | None = None,
        spec: Mapping[str, int | float] | None = None,
        subgroup_size: int | None = None,
    ) -> CompiledKernel:
        """Compile a GLSL compute shader. Includes are looked for beside it, then among vkback's own (`#include "common/reduce.glsl"`).

        path, source  a file, or the text of one
        spec  specialization constants by name, as the shader declares them
        Raises CompileError with the compiler's words at the lines of the file, NoCompiler where there is no compiler.
        """
        if (path is None) == (source is None):
            raise ModelError("[device] compile takes the path of a GLSL compute shader, or source=, its text: one of them")
        if source is not None:
            if not isinstance(source, str):
                raise given.wrong("source", source, "the text of a GLSL compute shader", "device")
            with TemporaryDirectory() as folder:
                file = Path(folder) / "source.comp"
                file.write_text(source, encoding="utf-8")
                return self.compile(file, defines, spec=spec, subgroup_size=subgroup_size)
        file = given.path("path", path, "device").resolve()
        if not file.is_file():
            raise ModelError(f"[device] {path}: no such file; give the path of a GLSL compute shader")
        variant = Variant.of(file.name, defines, spec=spec, subgroup_size=subgroup_size)
        return CompiledKernel(self, ShaderLibrary(file.parent, shipped=False), variant)

    def time(
        self,
        what: CompiledKernel | str,
        *tensors: DeviceTensor | npt.ArrayLike,
        push: Push = (),
        groups: Groups = 1,
        nbytes: int | None = None,
        repetitions: int = 7,
        out: tuple[int, ...] | DeviceTensor | None = None,
        **params: Any,
    ) -> KernelTiming:
        """Time a kernel, or an op by its name with what `run_op` takes, by timestamps of the device.

        nbytes  bytes that a launch must move; default: of a kernel all of its tensors once, of an op what its plan says
        """
        program: Program | None = None
        flops = 0
        given.whole("repetitions", repetitions, "a whole number, 1 or more", 1, "device")
        if isinstance(what, CompiledKernel):
            mine = [t for t in tensors if isinstance(t, DeviceTensor)]
            if len(mine) < len(tensors):
                raise ModelError(f"[device] time {what.name}: give tensors of the device (dev.tensor), not arrays")
            if what.device is not self:
                raise ModelError(f"[device] time {what.name}: it was compiled for another device, {what.device.name}")
            if params or out is not None:
                raise ModelError(f"[device] time {what.name}: a kernel takes push and groups, no {', '.join(params) or 'out'}")
            moved = sum(t.nbytes for t in mine)

            def record(launches: int) -> Commands:
                rec = self.raw.recorder(what.name)
                for _ in range(launches):
                    rec.barrier()
                    what.dispatch(rec, mine, push, groups)
                rec.barrier()
                return rec.finish()
        else:
            operands = self._operands(what, tensors)
            if len(push) or groups != 1:
                raise ModelError(f"[device] time {what}: an op takes neither push nor groups; those are of kernels")
            output = self._output(what, operands, out)
            program = self._program(what, operands, output, params, self._ctx)
            moved = sum(d.nbytes for d in program.schedule.dispatches())
            flops = sum(d.flops for d in program.schedule.dispatches())

            def record(launches: int) -> Commands:
                assert program is not None
                return program.record(str(what), repeat=launches)

        start, end = stamp(self.raw, "start"), stamp(self.raw, "end")
        try:
            one = record(1)
            warm_up(self.raw, one)
            launches = max(1, min(MAX_LAUNCHES, round(STEADY_US / max(span_us(self.raw, start, one, end), 1e-3))))
            many = record(launches)
            found = summarize([span_us(self.raw, start, many, end) / launches for _ in range(repetitions)])
            for commands in (one, many):
                commands.destroy()
        finally:
            start.destroy()
            end.destroy()
            if program is not None:
                program.close()
        return KernelTiming(found.us, found.spread_us, moved if nbytes is None else nbytes, self.read_rate, flops)

    # -- end

    def close(self) -> None:
        """Destroy everything that was made from this device. Raises DeviceError where the validation layer objected to something."""
        self.raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<vkback device {self.name}>"
