"""What a SPIR-V module needs of a device: capabilities, bindings, threads, shared memory.

A driver need not refuse a module whose features it lacks; many crash or compute nonsense. So vkback checks first. Opcodes and enumerants
are from the SPIR-V specification.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from vkback.device.capabilities import Capabilities
from vkback.device.errors import DeviceError

MAGIC = 0x07230203
HEADER_WORDS = 5

OP_EXECUTION_MODE = 16
OP_CAPABILITY = 17
OP_TYPE_BOOL = 20
OP_TYPE_INT = 21
OP_TYPE_FLOAT = 22
OP_TYPE_VECTOR = 23
OP_TYPE_MATRIX = 24
OP_TYPE_ARRAY = 28
OP_TYPE_STRUCT = 30
OP_TYPE_POINTER = 32
OP_CONSTANT = 43
OP_CONSTANT_COMPOSITE = 44
OP_SPEC_CONSTANT = 50
OP_SPEC_CONSTANT_COMPOSITE = 51
OP_FUNCTION = 54
OP_VARIABLE = 59
OP_DECORATE = 71
OP_MEMBER_DECORATE = 72

EXECUTION_MODE_LOCAL_SIZE = 17
DECORATION_SPEC_ID = 1
DECORATION_ROW_MAJOR = 4
DECORATION_ARRAY_STRIDE = 6
DECORATION_MATRIX_STRIDE = 7
DECORATION_BUILT_IN = 11
DECORATION_BINDING = 33
DECORATION_OFFSET = 35
BUILT_IN_WORKGROUP_SIZE = 25
STORAGE_CLASS_WORKGROUP = 4
STORAGE_CLASS_PUSH_CONSTANT = 9

CAPABILITY_NEEDS: Mapping[int, tuple[str, str]] = {
    9: ("Float16", "fp16"),
    11: ("Int64", "int64"),
    22: ("Int16", "int16"),
    39: ("Int8", "int8"),
    4433: ("StorageBuffer16BitAccess", "storage_16bit"),
    4448: ("StorageBuffer8BitAccess", "storage_8bit"),
    5055: ("ShaderClockKHR", "shader_clock"),
    5116: ("BFloat16TypeKHR", "bf16"),
    5345: ("VulkanMemoryModel", "vulkan_memory_model"),
    5346: ("VulkanMemoryModelDeviceScope", "vulkan_memory_model_device_scope"),
    5347: ("PhysicalStorageBufferAddresses", "buffer_device_address"),
    6018: ("DotProductInput4x8BitPacked", "int_dot"),
    6019: ("DotProduct", "int_dot"),
    6022: ("CooperativeMatrixKHR", "cooperative_matrix"),
}
"""SPIR-V capability -> its name, and the field of Capabilities that must be true."""

SUBGROUP_NEEDS: Mapping[int, tuple[str, str]] = {
    61: ("GroupNonUniform", "basic"),
    62: ("GroupNonUniformVote", "vote"),
    63: ("GroupNonUniformArithmetic", "arithmetic"),
    64: ("GroupNonUniformBallot", "ballot"),
    65: ("GroupNonUniformShuffle", "shuffle"),
    66: ("GroupNonUniformShuffleRelative", "shuffle_relative"),
    67: ("GroupNonUniformClustered", "clustered"),
    68: ("GroupNonUniformQuad", "quad"),
    6026: ("GroupNonUniformRotateKHR", "rotate"),
}
"""SPIR-V capability -> its name, and the subgroup operation that must be there."""


@dataclass(frozen=True)
class PushConstant:
    """One number of the push constants. kind: "int", "uint" or "float"; width: its bits."""

    offset: int
    kind: str
    width: int

    def __str__(self) -> str:
        return self.kind if self.width == 32 else f"{self.kind}{self.width}_t"


@dataclass(frozen=True)
class Module:
    """What a module declares.

    local_size    (specialization constant id or None, value or default) along x, y, z
    shared_bytes  of its workgroup variables, arrays at their default sizes; a driver may round up
    push          numbers of its push constants, in the order of their declaration; none, too, where the compiler has found none in use
    """

    capabilities: frozenset[int]
    bindings: frozenset[int]
    local_size: tuple[tuple[int | None, int], ...]
    shared_bytes: int
    push: tuple[PushConstant, ...] = ()

    @property
    def push_bytes(self) -> int:
        """Up to the end of the last push constant."""
        return max((c.offset + c.width // 8 for c in self.push), default=0)

    def workgroup_size(self, spec: Mapping[int, int]) -> tuple[int, int, int]:
        """Threads of a workgroup along x, y, z under a specialization."""
        x, y, z = (value if constant is None else spec.get(constant, value) for constant, value in self.local_size)
        return x, y, z

    def missing(self, caps: Capabilities) -> list[str]:
        """SPIR-V capabilities that the device lacks."""
        plain = [name for c, (name, attr) in CAPABILITY_NEEDS.items() if c in self.capabilities and not getattr(caps, attr)]
        group = [name for c, (name, op) in SUBGROUP_NEEDS.items() if c in self.capabilities and op not in caps.subgroup_ops]
        return plain + group


@lru_cache(maxsize=1024)
def inspect(spirv: bytes) -> Module:
    """Raises DeviceError for bytes that are no SPIR-V module."""
    count = len(spirv) // 4
    if len(spirv) % 4 or count < HEADER_WORDS or struct.unpack_from("<I", spirv)[0] != MAGIC:
        raise DeviceError(f"[kernel] {len(spirv)} bytes that are no SPIR-V module (magic number {spirv[:4].hex()}, expected 03022307)")
    words = struct.unpack(f"<{count}I", spirv)
    capabilities: set[int] = set()
    bindings: set[int] = set()
    constants: dict[int, int] = {}
    composites: dict[int, tuple[int, ...]] = {}
    spec_ids: dict[int, int] = {}
    sizes: dict[int, int] = {}
    shared = 0
    types: dict[int, tuple[int, tuple[int, ...]]] = {}
    decorations: dict[tuple[int, int | None, int], int] = {}
    push_block = 0
    size_composite = 0
    local_size: tuple[tuple[int | None, int], ...] = ((None, 1), (None, 1), (None, 1))
    at = HEADER_WORDS
    while at < count:
        length, op = words[at] >> 16, words[at] & 0xFFFF
        if not length or op == OP_FUNCTION:  # declarations end where the first function begins
            break
        args = words[at + 1 : at + length]
        if OP_TYPE_INT <= op <= OP_TYPE_POINTER:
            types[args[0]] = op, args[1:]
        elif op == OP_DECORATE:
            decorations[args[0], None, args[1]] = args[2] if len(args) > 2 else 1
        elif op == OP_MEMBER_DECORATE:
            decorations[args[0], args[1], args[2]] = args[3] if len(args) > 3 else 1
        elif op == OP_VARIABLE and args[2] == STORAGE_CLASS_PUSH_CONSTANT:
            push_block = types[args[0]][1][1]
        if op == OP_CAPABILITY:
            capabilities.add(args[0])
        elif op == OP_EXECUTION_MODE and args[1] == EXECUTION_MODE_LOCAL_SIZE:
            local_size = tuple((None, v) for v in args[2:5])
        elif op == OP_DECORATE and args[1] == DECORATION_SPEC_ID:
            spec_ids[args[0]] = args[2]
        elif op == OP_DECORATE and args[1] == DECORATION_BINDING:
            bindings.add(args[2])
        elif op == OP_DECORATE and args[1] == DECORATION_BUILT_IN and args[2] == BUILT_IN_WORKGROUP_SIZE:
            size_composite = args[0]
        elif op in (OP_CONSTANT, OP_SPEC_CONSTANT):
            constants[args[1]] = args[2]
        elif op in (OP_CONSTANT_COMPOSITE, OP_SPEC_CONSTANT_COMPOSITE):
            composites[args[1]] = args[2:]
        elif op == OP_TYPE_BOOL:
            sizes[args[0]] = 4
        elif op in (OP_TYPE_INT, OP_TYPE_FLOAT):
            sizes[args[0]] = args[1] // 8
        elif op in (OP_TYPE_VECTOR, OP_TYPE_MATRIX):
            sizes[args[0]] = sizes[args[1]] * args[2]
        elif op == OP_TYPE_ARRAY:
            sizes[args[0]] = sizes.get(args[1], 0) * constants.get(args[2], 1)
        elif op == OP_TYPE_STRUCT:
            sizes[args[0]] = sum(sizes.get(member, 0) for member in args[1:])
        elif op == OP_TYPE_POINTER:
            sizes[args[0]] = sizes.get(args[2], 0) if args[1] == STORAGE_CLASS_WORKGROUP else 0
        elif op == OP_VARIABLE and args[2] == STORAGE_CLASS_WORKGROUP:
            shared += sizes[args[0]]
        at += length
    if size_composite in composites:  # overrides the execution mode
        local_size = tuple((spec_ids.get(c), constants[c]) for c in composites[size_composite])
    push = _numbers(push_block, 0, types, decorations, constants) if push_block else ()
    return Module(frozenset(capabilities), frozenset(bindings), local_size, shared, tuple(push))


def _numbers(
    type: int,
    offset: int,
    types: Mapping[int, tuple[int, tuple[int, ...]]],
    decorations: Mapping[tuple[int, int | None, int], int],
    constants: Mapping[int, int],
    member: tuple[int, int] | None = None,
) -> Iterator[PushConstant]:
    """The numbers that a type consists of, from an offset on. member: struct and number of the member that has this type."""
    op, args = types[type]

    def inside(type: int, offset: int) -> Iterator[PushConstant]:
        return _numbers(type, offset, types, decorations, constants, member)

    if op in (OP_TYPE_INT, OP_TYPE_FLOAT):
        yield PushConstant(offset, "float" if op == OP_TYPE_FLOAT else "int" if args[1] else "uint", args[0])
    elif op == OP_TYPE_VECTOR:
        for i in range(args[1]):
            yield from inside(args[0], offset + i * types[args[0]][1][0] // 8)
    elif op == OP_TYPE_MATRIX and member is not None:
        stride = decorations[(*member, DECORATION_MATRIX_STRIDE)]
        number, rows = types[args[0]][1]
        down, right = (stride, types[number][1][0] // 8) if (*member, DECORATION_ROW_MAJOR) in decorations else (0, stride)
        for column in range(args[1]):
            for row in range(rows):
                yield from inside(number, offset + column * right + row * (down or types[number][1][0] // 8))
    elif op == OP_TYPE_ARRAY:
        for i in range(constants[args[1]]):
            yield from inside(args[0], offset + i * decorations[type, None, DECORATION_ARRAY_STRIDE])
    elif op == OP_TYPE_STRUCT:
        for i, part in enumerate(args):
            at = offset + decorations[type, i, DECORATION_OFFSET]
            yield from _numbers(part, at, types, decorations, constants, (type, i))
    else:
        raise DeviceError(f"[kernel] push constants of SPIR-V type {op}; expected numbers, vectors, matrices, arrays and structs of these")
