"""From a variant of a shader to SPIR-V: compiled in parallel, with a cache on disk."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path

from vkback.kept import bound
from vkback.paths import cache_dir as default_cache_dir
from vkback.paths import shader_root, write_cache
from vkback.shader.compiler import TARGET, Compiler, find_compiler, identity_key, system_compiler
from vkback.shader.contraction import as_written
from vkback.shader.errors import CompileError, GlslError, NoCompiler
from vkback.shader.interface import interface
from vkback.shader.prebuilt import Prebuilt
from vkback.shader.shipped import Shipped
from vkback.shader.source import Expanded, Variant, expand
from vkback.systems import how_to_get
from vkback.units import counted

CACHE_FORMAT = "1"
"""Raise when this module changes what it gives the compiler or writes to the cache."""

BATCH = 6
"""Shaders of one call of the compiler: glslc takes longer to start than for a small shader, but tells nothing before its last is done."""

LARGE_BATCH = 64
"""The same where nobody waits for single shaders."""

SLOW_TO_OPTIMIZE = (
    "gemv/gemv.comp",
    "gemm/f32.comp",
    "gemm/int_dot.comp",
    "gemm_f32/gemm_weight_lanes.comp",
    "attention/decode/attention.comp",
    "attention/prompt/prompt.comp",
    "attention/train/train_forward_lanes.comp",
    "attention/train/train_back_q_lanes.comp",
    "attention/train/train_back_kv_lanes.comp",
)
"""Sources that a quick library compiles without the SPIR-V optimizer: in 0.02 s each, with it in 0.15 (attention.comp) to 1.4 s. A CPU
driver takes as long for its own part either way. It takes longer for other shaders (ROPE: 2.5 times), which are quick to optimize. Speed
may suffer, and the last bits of sums may be others; so such sources pass over the modules that come with vkback, and all variants of one
are compiled alike."""

MATRICES = "GL_KHR_cooperative_matrix"
"""The extension that only compilers of 2024 and later know: sources that name it get the system's. Their modules come with vkback, so that
this matters to who changes them."""

SourceKey = tuple[str, tuple[tuple[str, str | int], ...]]
"""Source file and defines: what SPIR-V depends on of a variant."""

FAULT = re.compile(r"^shader:(\d+): (.*)$")
CONTEXT_LINES = 3
MAX_SHOWN = 60


class ShaderLibrary:
    """The shaders of one folder, compiled on demand.

    A module comes from shaders/prebuilt where that has one of exactly this source (`Prebuilt` and `Shipped`), else from the cache, else it
    is compiled. The cache holds one folder for each source (hash of the expanded text with its defines, the target and this module's
    version), and in it one file for each compiler; without a compiler any of them will do.
    """

    quick = False
    """What `quick` is where nobody says; the tests set it on CPU drivers (tests/conftest.py)."""
    compilers = os.cpu_count() or 1
    """Calls of the compiler at once. Each has a share of the shaders, so that more of them take more processor time; tests in several
    processes set it to one."""

    def __init__(self, root: Path | None = None, cache_dir: Path | None = None, *, shipped: bool = True, quick: bool | None = None) -> None:
        """root: folder of the shaders, default vkback's own; cache_dir: default `shaders` in vkback's cache folder; shipped: use modules
        of ordinary kernels that come with vkback; quick: where there is a compiler, leave the SPIR-V optimizer out for SLOW_TO_OPTIMIZE, as
        the suite does on CPU drivers."""
        self.root = root or shader_root()
        self._cache = (cache_dir or default_cache_dir()) / "shaders"
        self._prebuilt = Prebuilt.read(self.root)
        self._shipped = Shipped(self.root) if shipped else None
        quick = self.quick if quick is None else quick
        self._unoptimized = frozenset(SLOW_TO_OPTIMIZE if quick and find_compiler() is not None else ())
        self._ready: dict[SourceKey, bytes] = {}
        self._as_written: dict[SourceKey, bytes] = {}
        self.compiled: set[SourceKey] = set()
        """Sources and defines that this object had to compile, since the cache lacked them."""

    @property
    def compiler(self) -> Compiler | None:
        """What compiles, or None."""
        return find_compiler()

    def compiler_of(self, text: str) -> Compiler:
        """What compiles a source. Raises NoCompiler."""
        compiler = self.compiler
        if compiler is None:
            raise NoCompiler(f"[shader] there is no GLSL compiler. {how_to_get('compiler')}")
        return (system_compiler() if MATRICES in text else None) or compiler

    def expanded(self, variant: Variant) -> str:
        """The GLSL that the compiler gets."""
        return expand(self.root, variant).text

    def specialization(self, variant: Variant) -> tuple[tuple[int, int], ...]:
        """Specialization constants of a variant as (number, 32-bit value).

        Raises CompileError for one that the shader does not declare.
        """
        return interface(variant.source, self.root).words(variant.spec) if variant.spec else ()

    def spirv(self, variant: Variant) -> bytes:
        """SPIR-V for Vulkan 1.2 of a variant; its specialization and subgroup size do not enter.

        Raises CompileError, or NoCompiler when there is none and neither vkback nor the cache brings the module.
        """
        key = (variant.source, variant.defines)
        return self._module(variant, key) if key in self._ready else self.compile_many([variant])[variant]

    def compile_many(self, variants: Iterable[Variant]) -> dict[Variant, bytes]:
        """SPIR-V of each variant, compiled in parallel. Raises one CompileError that holds all faults."""
        wanted = list(dict.fromkeys(variants))
        made = dict(self.compile_each(wanted, LARGE_BATCH))
        return {v: made[v] for v in wanted}

    def compile_each(self, variants: Iterable[Variant], batch: int | None = None) -> Iterator[tuple[Variant, bytes]]:
        """Each variant with its SPIR-V as soon as it is there: first what the cache has, then what is compiled in parallel. batch: shaders
        of one call of the compiler, default BATCH.

        Raises one CompileError that holds all faults, after the variants that have none; NoCompiler where the cache lacks one.
        """
        users: dict[SourceKey, list[Variant]] = {}
        for variant in dict.fromkeys(variants):
            users.setdefault((variant.source, variant.defines), []).append(variant)
        if self._shipped is not None:
            self._shipped.read_ahead(same[0] for key, same in users.items() if key not in self._ready and self._optimizes(same[0]))
        faults: list[str] = []
        missing: list[tuple[Variant, Expanded]] = []
        for key, same in users.items():
            if key not in self._ready:
                try:
                    source = expand(self.root, same[0])
                except CompileError as error:
                    faults.append(str(error))
                    continue
                found = self._found(same[0], source)
                if found is None:
                    missing.append((same[0], source))
                    continue
                self._ready[key] = found
            yield from ((variant, self._module(variant, key)) for variant in same)
        for variant, fault in self._compile(missing, batch or BATCH):
            if fault is not None:
                faults.append(fault)
                continue
            key = (variant.source, variant.defines)
            yield from ((user, self._module(user, key)) for user in users[key])
        if faults:
            raise CompileError("\n\n".join(sorted(faults)))

    def _module(self, variant: Variant, key: SourceKey) -> bytes:
        """The module of a variant whose source is ready."""
        if not variant.as_written:
            return self._ready[key]
        if key not in self._as_written:
            self._as_written[key] = as_written(self._ready[key])
        return self._as_written[key]

    def _compile(self, sources: Sequence[tuple[Variant, Expanded]], size: int) -> Iterator[tuple[Variant, str | None]]:
        """Compile and keep, by as many compilers as there are processors; each variant as it is done, with its fault if it has one."""
        if not sources:
            return
        if self.compiler is None:
            families = list(dict.fromkeys(variant.source.removesuffix(".comp") for variant, _ in sources))
            of = f" and {counted(len(families) - 1, 'other family', 'other families')}" if len(families) > 1 else ""
            how_many = f" ({len(sources)} kernels)" if len(sources) > 1 else ""
            raise NoCompiler(
                f"[shader] {families[0]}{of}{how_many} does not come with vkback as SPIR-V, is not in the cache, and there is no GLSL "
                f"compiler. {how_to_get('compiler')}"
            )
        threads = min(len(sources), self.compilers)
        batches: list[Sequence[tuple[Variant, Expanded]]] = []
        for level, matrices in product((True, False), repeat=2):
            some = [s for s in sources if self._optimizes(s[0]) == level and (MATRICES in s[1].text) == matrices]
            # Without the optimizer all of them take less than another start.
            count = min(len(some), max(threads, ceil(len(some) / size))) if level else ceil(len(some) / LARGE_BATCH)
            batches += [some[i::count] for i in range(count)]
        with ThreadPoolExecutor(threads) as pool:
            running = {pool.submit(self._compile_batch, batch): batch for batch in batches if batch}
            try:
                for done in as_completed(running):
                    for (variant, source), spirv in zip(running[done], done.result(), strict=True):
                        if isinstance(spirv, GlslError):
                            yield variant, explain(variant, source, str(spirv))
                            continue
                        self._ready[variant.source, variant.defines] = spirv
                        self.compiled.add((variant.source, variant.defines))
                        file = self._folder(source) / f"{identity_key(self.compiler_of(source.text), self._optimizes(variant))}.spv"
                        write_cache(file, hashlib.sha256(spirv).digest() + spirv)
                        yield variant, None
                self._bound_cache()
            finally:  # nobody waits for the others, where this is left early
                pool.shutdown(wait=False, cancel_futures=True)

    def _bound_cache(self) -> None:
        """What was compiled has made the cache larger. Only vkback's own is bounded, not a folder that a caller has given."""
        if self._cache == default_cache_dir() / "shaders":
            bound()

    def _optimizes(self, variant: Variant) -> bool:
        return variant.source not in self._unoptimized

    def _compile_batch(self, batch: Sequence[tuple[Variant, Expanded]]) -> list[bytes | GlslError]:
        """A batch of one level of optimization and for one compiler."""
        compiler = self.compiler_of(batch[0][1].text)
        texts = [source.text for _, source in batch]
        return compiler.compile_batch(texts) if self._optimizes(batch[0][0]) else compiler.compile_batch(texts, optimize=False)

    def _folder(self, source: Expanded) -> Path:
        identity = "\0".join((CACHE_FORMAT, TARGET, source.text))
        return self._cache / hashlib.sha256(identity.encode()).hexdigest()[:40]

    def _found(self, variant: Variant, source: Expanded) -> bytes | None:
        """The module that comes with vkback, else what this compiler made of a source before; without a compiler, what any made."""
        ready = self._prebuilt.module(source.text)
        if ready is None and self._shipped is not None and self._optimizes(variant):
            ready = self._shipped.module(variant, source.text)
        if ready is not None:
            return ready
        folder = self._folder(source)
        if self.compiler is None:
            files = sorted(folder.glob("*.spv"))
        else:
            files = [folder / f"{identity_key(self.compiler_of(source.text), self._optimizes(variant))}.spv"]
        return next((found for f in files if (found := read_cached(f))), None)


def read_cached(file: Path) -> bytes | None:
    """A cached module, or None when the file is missing or damaged."""
    try:
        raw = file.read_bytes()
    except OSError:
        return None
    spirv = raw[32:]
    return spirv if spirv and hashlib.sha256(spirv).digest() == raw[:32] else None


def shortened(value: str) -> str:
    """The value of a define for an error: of a table no more than its beginning."""
    return value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}..."


def explain(variant: Variant, source: Expanded, said: str) -> str:
    """The compiler's words with each fault put back into its file and shown among its lines."""
    brief = replace(variant, defines=tuple((k, shortened(str(v))) for k, v in variant.defines))
    defines = ", ".join(f"{k}={v}" for k, v in brief.defines) or "none"
    parts = [f"[shader] {brief.name} does not compile. Defines: {defines}"]
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
