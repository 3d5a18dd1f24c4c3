"""The words of llama.cpp's test-backend-ops in a case line: types, and sizes whose first axis is the fastest.

An op takes them on by its `build_case`: parameters named and ordered as test-backend-ops (ggml 0.25) prints them, with the values that
it leaves unsaid as defaults, then what it has no word for (`act`, `seed`...). A type comes through `tensor_type` (or `one_of_types`), sizes
through `shape_of`; the case prints `type_word` and `ne_of`. What the line asks for and this project lacks raises PlanError: the case is
then not supported, for that reason. What makes no sense raises CaseLineError.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

from vkback import quants
from vkback.graph import Tensor
from vkback.ops.case import Shape
from vkback.ops.case_line import CaseLineError
from vkback.ops.lowering import PlanError
from vkback.ops.storage import VALUE_BYTES

WITHOUT_CODEC = ("F64", "Q8_K")
"""Types of ggml 0.25 that this project cannot read."""

MAX_VALUES = 1 << 29
"""In one tensor of a case: beyond it a case is not run."""

FLOATS = ("F32", "F16", "BF16")
"""Types that an op on floats takes."""

Four = tuple[int, int, int, int]

ABSENT = frozenset(
    {
        "ABS_BACK",
        "ADD1",
        "COL2IM_1D",
        "CONV_2D",
        "CONV_2D_DW",
        "CONV_3D",
        "CONV_TRANSPOSE_1D",
        "CONV_TRANSPOSE_2D",
        "DIAG_MASK_ZERO",
        "GROUP_NORM",
        "IM2COL",
        "IM2COL_3D",
        "IM2COL_BACK",
        "PAD_REFLECT_1D",
        "POOL_1D",
        "POOL_2D",
        "TIMESTEP_EMBEDDING",
        "UPSCALE",
    }
)
"""Ops of test-backend-ops that `OPS` may lack: a line of one that does is not supported rather than wrong."""


def tensor_type(word: str, key: str = "type") -> str:
    """The name that tensors have ("Q4_K", "F32", "I64") of a type spelled as ggml does, or in any other case. Raises CaseLineError
    for no type, PlanError for one that only ggml has."""
    name = word.upper()
    if name in VALUE_BYTES or name in quants.QUANTS:
        return name
    if name in WITHOUT_CODEC:
        raise PlanError(f"type {type_word(name)}: no codec and no kernel for it")
    known = sorted({*VALUE_BYTES, *quants.QUANTS, *WITHOUT_CODEC})
    raise CaseLineError(f"{key}={word}: expected one of {', '.join(map(type_word, known))}")


def one_of_types(word: str, takes: Collection[str], key: str = "type") -> str:
    """As `tensor_type`, of those that an op takes. Raises PlanError for another."""
    name = tensor_type(word, key)
    if name not in takes:
        raise PlanError(f"{key}={type_word(name)} is not supported, but {', '.join(map(type_word, takes))}")
    return name


def type_word(name: str) -> str:
    """A type as ggml spells it: f32, q4_K, iq2_xxs."""
    return f"{name[:-1].lower()}K" if name.endswith("_K") else name.lower()


def shape_of(ne: Sequence[int], key: str = "ne") -> Shape:
    """The shape, last axis fastest and always of four axes, of sizes whose first is the fastest. Raises CaseLineError for sizes below 1,
    PlanError for more values than a case may have."""
    if not 1 <= len(ne) <= 4 or any(n < 1 for n in ne):
        raise CaseLineError(f"{key}=[{','.join(map(str, ne))}]: expected one to four sizes above 0, the fastest axis first")
    return sized((*ne, *(1,) * (4 - len(ne)))[::-1])


def sized(shape: Shape) -> Shape:
    """The shape. Raises CaseLineError for sizes below 1, PlanError for more values than a case may have."""
    if any(n < 1 for n in shape):
        raise CaseLineError(f"sizes {list(shape)}: expected all above 0")
    if prod(shape) > MAX_VALUES:
        raise PlanError(f"{prod(shape)} values in one tensor; a case may have {MAX_VALUES}")
    return shape


def ne_of(shape: Shape) -> Shape:
    """The sizes of a shape as ggml prints them: four, the fastest axis first."""
    return (*shape[::-1], *(1,) * (4 - len(shape)))


def operand(name: str, type: str, shape: Shape) -> Tensor:
    """An operand that a case makes: a stored weight where the type is quantized, else an input."""
    return Tensor(name, type, shape, "input" if type in VALUE_BYTES else "weight")
