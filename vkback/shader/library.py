"""Variant -> SPIR-V, with a disk cache."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vkback.paths import cache_dir as default_cache_dir
from vkback.paths import shader_root, write_atomic
from vkback.shader.compiler import TARGET, Compiler, GlslError, find_compiler, identity_key
from vkback.shader.errors import CompileError, NoCompiler
from vkback.shader.source import Expanded, Variant, expand

CACHE_FORMAT = "1"
"""Raise when this module changes what it gives the compiler or writes to the cache."""

FAULT = re.compile(r"^shader:(\d+): (.*)$")
CONTEXT_LINES = 3
INSTALL_HINT = "Install libshaderc or glslc (Debian and Ubuntu: apt install libshaderc1 or glslc; elsewhere the Vulkan SDK)"


class ShaderLibrary:
    """The shaders of one folder, compiled on demand.

    The cache holds one folder for each source (hash of the expanded text with its defines, the target and this module's version), and in it
    one file for each compiler; without a compiler any of them will do.
    """

    def __init__(self, root: Path | None = None, cache_dir: Path | None = None) -> None:
        """root: folder of the shaders, default vkback's own; cache_dir: default `shaders` in vkback's cache folder."""
        self.root = root or shader_root()
        self._cache = (cache_dir or default_cache_dir()) / "shaders"
        self._ready: dict[tuple[str, tuple[tuple[str, str | int], ...]], bytes] = {}

    @property
    def compiler(self) -> Compiler | None:
        """What compiles, or None."""
        return find_compiler()

    def expanded(self, variant: Variant) -> str:
        """The GLSL that the compiler gets."""
        return expand(self.root, variant).text

    def spirv(self, variant: Variant) -> bytes:
        """SPIR-V for Vulkan 1.2 of a variant; its specialization and subgroup size do not enter.

        Raises CompileError, or NoCompiler when there is none and the cache has nothing.
        """
        key = (variant.source, variant.defines)
        found = self._ready.get(key)
        if found is None:
            found = self._ready[key] = self._load_or_compile(variant)
        return found

    def compile_many(self, variants: Iterable[Variant]) -> dict[Variant, bytes]:
        """SPIR-V of each variant, compiled in parallel. Raises one CompileError that holds the faults of all."""
        wanted = list(dict.fromkeys(variants))
        unique = list({(v.source, v.defines): v for v in wanted}.values())
        faults: list[str] = []

        def build(variant: Variant) -> None:
            try:
                self.spirv(variant)
            except CompileError as error:
                faults.append(str(error))

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(build, unique))
        if faults:
            raise CompileError("\n\n".join(sorted(faults)))
        return {v: self.spirv(v) for v in wanted}

    def _load_or_compile(self, variant: Variant) -> bytes:
        source = expand(self.root, variant)
        identity = "\0".join((CACHE_FORMAT, TARGET, source.text))
        folder = self._cache / hashlib.sha256(identity.encode()).hexdigest()[:40]
        compiler = self.compiler
        if compiler is None:
            for file in sorted(folder.glob("*.spv")):
                if found := read_cached(file):
                    return found
            raise NoCompiler(f"[shader] {variant.name} is not in the cache and there is no GLSL compiler. {INSTALL_HINT}")
        file = folder / f"{identity_key(compiler)}.spv"
        if found := read_cached(file):
            return found
        try:
            spirv = compiler.compile_into_spirv(source.text)
        except GlslError as error:
            raise CompileError(explain(variant, source, str(error))) from error
        write_atomic(file, hashlib.sha256(spirv).digest() + spirv)
        return spirv


def read_cached(file: Path) -> bytes | None:
    """A cached module, or None when the file is missing or damaged."""
    try:
        raw = file.read_bytes()
    except OSError:
        return None
    spirv = raw[32:]
    return spirv if spirv and hashlib.sha256(spirv).digest() == raw[:32] else None


def explain(variant: Variant, source: Expanded, said: str) -> str:
    """The compiler's words with each fault put back into its file and shown among its lines."""
    defines = ", ".join(f"{k}={v}" for k, v in variant.defines) or "none"
    parts = [f"[shader] {variant.name} does not compile. Defines: {defines}"]
    lines = source.text.splitlines()
    shown: set[int] = set()
    for line in said.splitlines():
        match = FAULT.match(line)
        if not match:
            if line.strip():
                parts.append(line)
            continue
        number = min(int(match[1]), len(lines))
        file, own = source.origins[number - 1]
        parts.append(f"{file}:{own}: {match[2]}")
        if number not in shown:
            shown.add(number)
            parts += _around(lines, source, number)
    return "\n".join(parts)


def _around(lines: list[str], source: Expanded, number: int) -> list[str]:
    """Numbered lines around a line of the expanded text, as far as they come from the same file."""
    file, _ = source.origins[number - 1]
    out = []
    for i in range(max(0, number - 1 - CONTEXT_LINES), min(len(lines), number + CONTEXT_LINES)):
        origin, own = source.origins[i]
        if origin == file:
            out.append(f"  {'>' if i == number - 1 else ' '} {own:4} | {lines[i]}")
    return out
