"""Variants, and their source: includes expanded, comments and blank lines left out, every line's origin kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath

from vkback.paths import shader_root
from vkback.shader.errors import CompileError

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|(\w+))\s*$')
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
VERSION = re.compile(r"^\s*#\s*version\b")
Spec = dict[str, int | float]
"""Values of specialization constants by name."""

Origin = tuple[str, int]
"""File and number of a line."""

Part = tuple[tuple[str, ...], tuple[Origin, ...], re.Match[str] | None]
"""Lines of a file that follow each other, their origins, and the include behind them; None at the end of the file."""

GENERATED = "generated/"
"""Includes below this name are text made at run time, not files."""

_generators: dict[str, Callable[[], str]] = {}


def register_include(name: str, make: Callable[[], str]) -> None:
    """Let `#include "generated/<name>"` mean the text that `make` gives; it is called once, when first included.

    The text enters the cache key as any source does. Raises ValueError when the name is taken.
    """
    path = GENERATED + name
    if path in _generators:
        raise ValueError(f"[shader] {path} is registered already")
    _generators[path] = cache(make)


@dataclass(frozen=True)
class Variant:
    """One build of a shader.

    source         file relative to the shaders folder, "norm/rms_norm.comp"
    defines        preprocessor names and values, in order
    subgroup_size  demanded of the device; None leaves it to the driver
    spec           specialization constants (name, value); applied when the pipeline is made, so they do not enter the SPIR-V
                   (vkback/shader/interface.py finds their numbers)
    as_written     the driver may neither fuse nor reorder float arithmetic (vkback/shader/contraction.py)
    """

    source: str
    defines: tuple[tuple[str, str | int], ...] = ()
    subgroup_size: int | None = None
    spec: tuple[tuple[str, int | float], ...] = ()
    as_written: bool = False

    @classmethod
    def of(
        cls,
        source: str,
        defines: Mapping[str, str | int] | None = None,
        *,
        spec: Mapping[str, int | float] | None = None,
        subgroup_size: int | None = None,
    ) -> Variant:
        """Defines and constants in alphabetical order, so that equal settings are one variant."""
        return cls(source, tuple(sorted((defines or {}).items())), subgroup_size, tuple(sorted((spec or {}).items())))

    @property
    def name(self) -> str:
        """Readable and unique: "norm/rms_norm[QUANT=2, TILE_N:64, sg32]"."""
        parts = [f"{k}={v}" for k, v in self.defines]
        parts += [f"{k}:{v}" for k, v in self.spec]
        if self.subgroup_size is not None:
            parts.append(f"sg{self.subgroup_size}")
        if self.as_written:
            parts.append("as written")
        stem = self.source.removesuffix(".comp")
        return f"{stem}[{', '.join(parts)}]" if parts else stem


@dataclass(frozen=True)
class Expanded:
    """Source ready for the compiler. origins: (file, line number) of each line of `text`.

    `text` has neither comments nor blank lines. Modules are known by it: an edit of prose leaves cached and prebuilt ones valid.
    """

    text: str
    origins: tuple[Origin, ...]


def expand(root: Path, variant: Variant) -> Expanded:
    """Put includes in place and the defines after #version. What another folder than vkback's own lacks is taken from that.

    Raises CompileError for a file that is missing, outside of `root` or includes itself, and for a source without #version.
    """
    lines: list[str] = []
    origins: list[Origin] = []
    _append(root, variant.source, (), lines, origins, variant)
    version = next((i for i, line in enumerate(lines) if VERSION.match(line)), None)
    if version is None:
        raise CompileError(f"[shader] {variant.name}: {variant.source} has no #version line")
    for k, (name, value) in enumerate(variant.defines):
        lines.insert(version + 1 + k, f"#define {name} {value}")
        origins.insert(version + 1 + k, ("defines", k + 1))
    return Expanded("\n".join(lines) + "\n", tuple(origins))


def _append(root: Path, name: str, chain: Sequence[str], lines: list[str], origins: list[Origin], variant: Variant) -> None:
    files = " <- ".join(reversed(chain))
    origin = f", included by {files}" if files else ""
    if name in chain:
        raise CompileError(f"[shader] {variant.name}: {name} includes itself, through {files}")
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise CompileError(f"[shader] {variant.name}: {name!r}{origin}: paths are relative to the shaders folder and stay in it")
    text = _generated(name, origin, variant) if name.startswith(GENERATED) else _read(root, name, origin, variant)
    for some, their_origins, include in _parts(name, text):
        lines += some
        origins += their_origins
        if include:
            _append(root, include[1] or _defined_path(include[2], name, variant), (*chain, name), lines, origins, variant)


def _read(root: Path, name: str, origin: str, variant: Variant) -> str:
    try:
        with suppress(FileNotFoundError):
            return _unchanged(root / name)
        return _unchanged(shader_root() / name)
    except OSError as error:
        raise CompileError(f"[shader] {variant.name}: cannot read {root / name}{origin}: {error.strerror}") from error


def _unchanged(file: Path) -> str:
    """The text of a file, which is read again when it has changed."""
    stat = file.stat()
    return _text_of(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(1024)
def _text_of(file: Path, _mtime: int, _size: int) -> str:
    return file.read_text(encoding="utf-8")


@lru_cache(1024)
def _parts(name: str, text: str) -> tuple[Part, ...]:
    """Of a file and its text. Kept, since a token's kernels include the same files hundreds of times."""
    parts, begin = list[Part](), 0
    lines, origins = _code(name, text)
    for i, include in enumerate(map(INCLUDE.match, lines)):
        if include:
            parts.append((tuple(lines[begin:i]), tuple(origins[begin:i]), include))
            begin = i + 1
    return (*parts, (tuple(lines[begin:]), tuple(origins[begin:]), None))


def _code(name: str, text: str) -> tuple[list[str], list[Origin]]:
    """The lines of a file that are more than comments and blanks, and where they stand. A blank line that ends a macro stays."""
    lines: list[str] = []
    origins: list[Origin] = []
    for number, line in enumerate(COMMENT.sub(_blank, text).splitlines(), 1):
        code = line.rstrip()
        if code or (lines and lines[-1].endswith("\\")):
            lines.append(code)
            origins.append((name, number))
    return lines, origins


def _blank(comment: re.Match[str]) -> str:
    """What stands for a comment: a space, or its line breaks."""
    return "\n" * comment[0].count("\n") or " "


def _generated(name: str, origin: str, variant: Variant) -> str:
    make = _generators.get(name)
    if make is None:
        known = ", ".join(sorted(_generators)) or "none"
        raise CompileError(f"[shader] {variant.name}: nothing makes {name}{origin}; see register_include. Known: {known}")
    return make()


def _defined_path(macro: str, file: str, variant: Variant) -> str:
    """The file that `#include MACRO` means: the variant's define of that name, a path in quotes."""
    value = dict(variant.defines).get(macro)
    if not isinstance(value, str) or not value.startswith('"'):
        raise CompileError(f"[shader] {variant.name}: {file} includes {macro}, which must be defined as a path in quotes, got {value!r}")
    return value.strip('"')
