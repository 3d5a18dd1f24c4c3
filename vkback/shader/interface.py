"""What a shader declares, by name: its specialization constants and its buffers.

GLSL is the one place where a constant has its number and a buffer its binding. Python names them:

    layout(constant_id = 6) const uint TILE_N = 16;                            Variant.of(..., spec={"TILE_N": 32})
    layout(std430, set = 0, binding = 1) readonly buffer X { uvec4 x4[]; };    interface(source).bound({"X": Arg(x)}, unused)

A name that the shader does not declare is an error. Declarations are read from the file and from what it includes by path; whether the
preprocessor keeps a line is not looked at, so that a kernel's declarations do not depend on its defines.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from vkback.paths import shader_root
from vkback.shader.errors import CompileError
from vkback.shader.source import COMMENT, INCLUDE

CONSTANT = re.compile(r"layout\s*\(\s*constant_id\s*=\s*(\d+)\s*\)\s*const\s+(uint|int|float|bool)\s+(\w+)")
BUFFER = re.compile(r"layout\s*\(([^)]*\bbinding\s*=\s*(\w+)[^)]*)\)[\w\s]*?\bbuffer\s+(\w+)")
DEFINE = re.compile(r"^\s*#\s*define\s+(\w+)\s+(\d+)\s*$", re.MULTILINE)

T = TypeVar("T")


@dataclass(frozen=True)
class Constant:
    """A specialization constant: its number in SPIR-V, and "uint", "int", "float" or "bool"."""

    id: int
    type: str

    def word(self, value: int | float) -> int:
        """The 32 bits of a value. Raises ValueError for a fraction where the constant is a whole number."""
        if self.type == "float":
            return int.from_bytes(struct.pack("<f", value), "little")
        if value != int(value):
            raise ValueError(f"{value} is no whole number")
        return int(value) & 0xFFFFFFFF


@dataclass(frozen=True)
class Interface:
    """Constants and buffers of a shader by name. Several names may share a binding: one buffer, read as different types."""

    source: str
    constants: Mapping[str, Constant]
    bindings: Mapping[str, int]

    def words(self, spec: Iterable[tuple[str, int | float]]) -> tuple[tuple[int, int], ...]:
        """Specialization constants (number, 32 bits) in order of their numbers, from values by name.

        Raises CompileError for a name that the shader does not declare, and for a value that its type cannot hold.
        """
        found = []
        for name, value in spec:
            constant = self.constants.get(name)
            if constant is None:
                known = ", ".join(self.constants) or "none"
                raise CompileError(f"[shader] {self.source} declares no specialization constant {name}. It declares: {known}")
            try:
                found.append((constant.id, constant.word(value)))
            except ValueError as error:
                raise CompileError(f"[shader] {self.source}: {constant.type} {name}: {error}") from error
        return tuple(sorted(found))

    @property
    def buffers(self) -> int:
        """Bindings, up to the last."""
        return max(self.bindings.values()) + 1

    def binding(self, name: str) -> int:
        """Raises CompileError for a buffer that the shader does not declare."""
        if name not in self.bindings:
            known = ", ".join(self.bindings) or "none"
            raise CompileError(f"[shader] {self.source} declares no buffer {name}. It declares: {known}")
        return self.bindings[name]

    def bound(self, buffers: Mapping[str, T | None], unused: T) -> tuple[T, ...]:
        """What is bound, in order of the bindings: `unused` for those that `buffers` leaves out or gives as None.

        Raises CompileError for a name that the shader does not declare, and for two names of one binding.
        """
        args = [unused] * self.buffers
        taken: dict[int, str] = {}
        for name, buffer in buffers.items():
            at = self.binding(name)
            if buffer is None:
                continue
            if at in taken:
                raise CompileError(f"[shader] {self.source}: {taken[at]} and {name} are the same buffer, binding {at}; bind one of them")
            taken[at] = name
            args[at] = buffer
        return tuple(args)


@lru_cache(256)
def interface(source: str, root: Path | None = None) -> Interface:
    """The interface of a shader, a file relative to the folder of shaders (root, default vkback's own); read once.

    Raises CompileError for a file that cannot be read, and for a constant that is declared twice with different numbers.
    """
    root = root or shader_root()
    constants: dict[str, Constant] = {}
    buffers: dict[str, str] = {}
    defines: dict[str, int] = {}
    for text in _texts(source, root, set()):
        for id, type, name in CONSTANT.findall(text):
            declared = Constant(int(id), type)
            if constants.setdefault(name, declared) != declared:
                raise CompileError(f"[shader] {source}: {name} is constant {constants[name].id} and constant {id}")
        buffers |= {name: at for _, at, name in BUFFER.findall(text)}
        defines |= {name: int(value) for name, value in DEFINE.findall(text)}
    bindings = {name: int(at) if at.isdecimal() else defines.get(at) for name, at in buffers.items()}
    return Interface(source, constants, {name: at for name, at in bindings.items() if at is not None})


def _texts(name: str, root: Path, seen: set[str]) -> list[str]:
    """The file and what it includes by path, without comments; each once."""
    if name in seen:
        return []
    seen.add(name)
    file = root / name if (root / name).exists() else shader_root() / name
    try:
        text = COMMENT.sub(" ", file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CompileError(f"[shader] cannot read {file}: {error.strerror}") from error
    included = [match[1] for line in text.splitlines() if (match := INCLUDE.match(line)) and match[1]]
    return [text, *(t for i in included if not i.startswith("generated/") for t in _texts(i, root, seen))]
