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
        found = self._ready.get((variant.source, variant.defines))
        return self.compile_many([variant])[variant] if found is None else found

    def compile_many(self, variants: Iterable[Variant]) -> dict[Variant, bytes]:
        """SPIR-V of each variant, compiled in as many batches as there are processors. Raises one CompileError that holds all faults."""
        wanted = list(dict.fromkeys(variants))
        faults: list[str] = []
        missing: list[tuple[Variant, Expanded]] = []
        for variant in {(v.source, v.defines): v for v in wanted if (v.source, v.defines) not in self._ready}.values():
            try:
                source = expand(self.root, variant)
            except CompileError as error:
                faults.append(str(error))
                continue
            found = self._cached(source)
            if found is None:
                missing.append((variant, source))
            else:
                self._ready[variant.source, variant.defines] = found
        faults += self._compile(missing)
        if faults:
            raise CompileError("\n\n".join(sorted(faults)))
        return {v: self._ready[v.source, v.defines] for v in wanted}

    def _compile(self, sources: list[tuple[Variant, Expanded]]) -> list[str]:
        """Compile and keep; the faults."""
        if not sources:
            return []
        compiler = self.compiler
        if compiler is None:
            raise NoCompiler(f"[shader] {sources[0][0].name} is not in the cache and there is no GLSL compiler. {INSTALL_HINT}")
        count = min(len(sources), os.cpu_count() or 1)
        batches = [sources[i::count] for i in range(count)]
        with ThreadPoolExecutor(count) as pool:
            results = list(pool.map(lambda batch: compiler.compile_batch([source.text for _, source in batch]), batches))
        faults = []
        for batch, made in zip(batches, results, strict=True):
            for (variant, source), spirv in zip(batch, made, strict=True):
                if isinstance(spirv, GlslError):
                    faults.append(explain(variant, source, str(spirv)))
                    continue
                self._ready[variant.source, variant.defines] = spirv
                write_atomic(self._folder(source) / f"{identity_key(compiler)}.spv", hashlib.sha256(spirv).digest() + spirv)
        return faults

    def _folder(self, source: Expanded) -> Path:
        identity = "\0".join((CACHE_FORMAT, TARGET, source.text))
        return self._cache / hashlib.sha256(identity.encode()).hexdigest()[:40]

    def _cached(self, source: Expanded) -> bytes | None:
        """What this compiler made of a source before; without a compiler, what any made."""
        compiler = self.compiler
        folder = self._folder(source)
        files = sorted(folder.glob("*.spv")) if compiler is None else [folder / f"{identity_key(compiler)}.spv"]
        return next((found for f in files if (found := read_cached(f))), None)


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
