"""Compilers: the module that comes with vkback (wasm.py), libshaderc of the system, or its glslc program. All of them wrap glslang."""

from __future__ import annotations

import ctypes.util
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, Protocol

from vkback.events import log
from vkback.paths import cache_dir, on_path, write_cache
from vkback.shader.errors import CompileError, GlslError
from vkback.shader.wasm import ShadercModule

LIBRARIES = ("libshaderc.so.1", "libshaderc_shared.so.1", "libshaderc_shared.so", "libshaderc_shared.dylib", "shaderc_shared.dll")
TARGET = "vulkan1.2"
VERIFIED = "shaderc 2023.2"
"""The release whose kernels were measured; what comes with vkback is of it. Those of shaderc 2026 are as fast (H200, driver 580.159, a
token of 8B Q4_K_S: 1426 us, 1427 by shaderc 2023; qwen3moe 30B: 1164 and 1189)."""
TIMEOUT_S = 120
"""For one run of glslc; the largest shader takes a few seconds."""

SLICE_S = 10.0
"""Of the wait for it."""

STOPPED_BY = (signal.SIGINT, signal.SIGTERM)
"""Signals by which somebody stops it. Others end a compiler that fails."""

_TARGET_ENV_VULKAN = 0
_ENV_VERSION_VULKAN_1_2 = (1 << 22) | (2 << 12)
_GLSL_COMPUTE_SHADER = 2
_OPTIMIZE_ZERO, _OPTIMIZE_PERFORMANCE = 0, 2
_STATUS_SUCCESS = 0

_C_API = """
typedef struct shaderc_compiler *shaderc_compiler_t;
typedef struct shaderc_compile_options *shaderc_compile_options_t;
typedef struct shaderc_compilation_result *shaderc_compilation_result_t;
shaderc_compiler_t shaderc_compiler_initialize(void);
void shaderc_compiler_release(shaderc_compiler_t);
shaderc_compile_options_t shaderc_compile_options_initialize(void);
void shaderc_compile_options_release(shaderc_compile_options_t);
void shaderc_compile_options_set_optimization_level(shaderc_compile_options_t, int level);
void shaderc_compile_options_set_target_env(shaderc_compile_options_t, int target, uint32_t version);
shaderc_compilation_result_t shaderc_compile_into_spv(const shaderc_compiler_t, const char *source, size_t size, int kind,
                                                      const char *file, const char *entry, const shaderc_compile_options_t);
void shaderc_result_release(shaderc_compilation_result_t);
size_t shaderc_result_get_length(const shaderc_compilation_result_t);
const char *shaderc_result_get_bytes(const shaderc_compilation_result_t);
int shaderc_result_get_compilation_status(const shaderc_compilation_result_t);
const char *shaderc_result_get_error_message(const shaderc_compilation_result_t);
void shaderc_get_spv_version(unsigned int *version, unsigned int *revision);
"""


class Compiler(Protocol):
    """GLSL compute shader in, SPIR-V out."""

    identity: str
    """Program or library and its version: part of the cache key."""

    def compile_into_spirv(self, source: str, *, optimize: bool = True) -> bytes:
        """Raises GlslError."""

    def compile_batch(self, sources: Sequence[str], *, optimize: bool = True) -> list[bytes | GlslError]:
        """Several shaders in one go; in the place of each its module or its fault. optimize: run the SPIR-V optimizer."""


class ShadercLibrary:
    """libshaderc through cffi. One compiler object serves all threads: its compile call takes it const."""

    def __init__(self, path: str) -> None:
        """Raises OSError when the library cannot be opened."""
        ctypes.CDLL(path)  # where it cannot be opened, cffi need not parse the declarations to find that out
        import cffi

        self._ffi: Any = cffi.FFI()
        self._ffi.cdef(_C_API)
        self._lib: Any = self._ffi.dlopen(path)
        self._compiler = self._ffi.gc(self._lib.shaderc_compiler_initialize(), self._lib.shaderc_compiler_release)
        self._options = {True: self._make_options(_OPTIMIZE_PERFORMANCE), False: self._make_options(_OPTIMIZE_ZERO)}
        version, revision = self._ffi.new("unsigned int *"), self._ffi.new("unsigned int *")
        self._lib.shaderc_get_spv_version(version, revision)
        # libshaderc does not tell its own version; the file it was loaded from does as well.
        self.identity = f"{Path(path).name} spv {version[0]:#x}.{revision[0]} {_file_stamp(path)}"

    def _make_options(self, level: int) -> Any:
        options = self._ffi.gc(self._lib.shaderc_compile_options_initialize(), self._lib.shaderc_compile_options_release)
        self._lib.shaderc_compile_options_set_target_env(options, _TARGET_ENV_VULKAN, _ENV_VERSION_VULKAN_1_2)
        self._lib.shaderc_compile_options_set_optimization_level(options, level)
        return options

    def compile_into_spirv(self, source: str, *, optimize: bool = True) -> bytes:
        lib, raw, options = self._lib, source.encode(), self._options[optimize]
        result = lib.shaderc_compile_into_spv(self._compiler, raw, len(raw), _GLSL_COMPUTE_SHADER, b"shader", b"main", options)
        try:
            if lib.shaderc_result_get_compilation_status(result) != _STATUS_SUCCESS:
                raise GlslError(self._ffi.string(lib.shaderc_result_get_error_message(result)).decode("utf-8", "replace"))
            return bytes(self._ffi.buffer(lib.shaderc_result_get_bytes(result), lib.shaderc_result_get_length(result)))
        finally:
            lib.shaderc_result_release(result)

    def compile_batch(self, sources: Sequence[str], *, optimize: bool = True) -> list[bytes | GlslError]:
        return [_attempt(self, source, optimize) for source in sources]


class GlslcProgram:
    """The glslc program of shaderc or the Vulkan SDK."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.identity = "glslc " + _version(path)

    def compile_into_spirv(self, source: str, *, optimize: bool = True) -> bytes:
        command = [self._path, "-fshader-stage=compute", f"--target-env={TARGET}", _level(optimize), "-o", "-", "-"]
        status, out, said = run_program(command, TIMEOUT_S, source.encode())
        if status:
            raise GlslError(said.decode("utf-8", "replace").replace("<stdin>", "shader"))
        return out

    def compile_batch(self, sources: Sequence[str], *, optimize: bool = True) -> list[bytes | GlslError]:
        """In one process: glslc needs 70 to 90 ms to start. Parsing takes 10 ms a shader; the optimizer 10 to 30 ms for most, 300 for a
        GEMV and over a second for a GEMM."""
        if len(sources) < 2:
            return [_attempt(self, source, optimize) for source in sources]
        with tempfile.TemporaryDirectory(prefix="vkback-") as name:
            folder = Path(name)
            files = [folder / f"{i}.comp" for i in range(len(sources))]
            for file, source in zip(files, sources, strict=True):
                file.write_text(source, encoding="utf-8")
            command = [self._path, f"--target-env={TARGET}", _level(optimize), "-c", *(f.name for f in files)]
            run_program(command, TIMEOUT_S * len(files), folder=folder)
            made = [folder / f"{f.name}.spv" for f in files]
            # What is missing is compiled again by itself, for a fault that names no file of ours.
            return [m.read_bytes() if m.exists() else _attempt(self, s, optimize) for m, s in zip(made, sources, strict=True)]


running: set[subprocess.Popen[bytes]] = set()


def stop_programs() -> None:
    """End every glslc that runs: threads that wait for its shaders get CompileError."""
    for program in tuple(running):
        program.terminate()


def run_program(command: Sequence[str], timeout_s: float, given: bytes = b"", folder: Path | None = None) -> tuple[int, bytes, bytes]:
    """Exit status, stdout and stderr of a compiler. Raises CompileError where it was stopped, and where it takes longer than `timeout_s`,
    counted in slices: a process that stood still for an hour has not waited for one."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder) as program:
        running.add(program)
        try:
            for slice_number in range(ceil(timeout_s / SLICE_S)):
                with suppress(subprocess.TimeoutExpired):
                    # After a timeout communicate() goes on with what it was given, and refuses to be given it again.
                    out, said = program.communicate(given if slice_number == 0 else None, SLICE_S)
                    break
            else:
                raise CompileError(f"[shader] {command[0]} has not finished after {timeout_s} s; is the machine busy, or out of memory?")
        except BaseException:
            program.kill()
            raise
        finally:
            running.discard(program)
    if -program.returncode in STOPPED_BY:
        raise CompileError(f"[shader] {command[0]} was stopped by signal {-program.returncode}; run the command again")
    return program.returncode, out, said


def _version(path: str) -> str:
    """What a program says of its version: kept with the caches as long as the file is the same, for glslc takes 70 to 90 ms to say it.

    Raises OSError or CompileError where it cannot be run.
    """
    stat = Path(path).resolve().stat()
    stamp = f"{Path(path).resolve()} {stat.st_size} {stat.st_mtime_ns}"
    kept = cache_dir() / "compilers" / f"{hashlib.sha256(stamp.encode()).hexdigest()[:32]}.txt"
    with suppress(OSError, UnicodeDecodeError):
        if said := kept.read_text(encoding="utf-8"):
            return said
    status, out, fault = run_program([path, "--version"], TIMEOUT_S)
    if status:
        raise CompileError(f"exit status {status}: {' '.join(fault.decode('utf-8', 'replace').split())}")
    said = " ".join(out.decode("utf-8", "replace").split())
    write_cache(kept, said.encode())
    return said


def _level(optimize: bool) -> str:
    return "-O" if optimize else "-O0"


def _attempt(compiler: Compiler, source: str, optimize: bool) -> bytes | GlslError:
    try:
        return compiler.compile_into_spirv(source, optimize=optimize)
    except GlslError as error:
        return error


def _file_stamp(library: str) -> str:
    """Which file the loader means by a library's name, by size and time; "" when it is not known."""
    for line in _loaded_libraries():
        if library in line:
            stat = Path(line).stat()
            return f"{stat.st_size} {stat.st_mtime_ns}"
    return ""


def _loaded_libraries() -> list[str]:
    try:
        return sorted({line.split()[-1] for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines() if "/" in line})
    except OSError:
        return []


def shared_library() -> ShadercLibrary | None:
    """libshaderc where it can be loaded: Debian 12's lacks glslang's symbols and cannot."""
    # On Linux that would run ldconfig and a C compiler, to find no name that is not among those above.
    found = None if sys.platform == "linux" else ctypes.util.find_library("shaderc_shared")
    for name in (*LIBRARIES, *([found] if found else [])):
        try:
            return ShadercLibrary(name)
        except OSError:
            continue
    return None


def program_path() -> str | None:
    """Where glslc is."""
    return on_path("glslc")


@cache
def system_compiler() -> Compiler | None:
    """libshaderc (a compile takes milliseconds), else glslc (a process each), else None. A glslc that cannot be run is a warning."""
    library = shared_library()
    if library is not None:
        return library
    path = program_path()
    try:
        return GlslcProgram(path) if path else None
    except (OSError, CompileError) as e:
        log.warning("%s is not used, for it cannot be run: %s", path, e.strerror if isinstance(e, OSError) else e)
        return None


@cache
def own_compiler() -> Compiler | None:
    """The one that comes with vkback; None where wasmtime, which runs it, is not there."""
    try:
        return ShadercModule()
    except (OSError, ImportError):
        return None


@cache
def find_compiler() -> Compiler | None:
    """What compiles kernels: the system's where that is of the release VERIFIED (the optimizer takes 0.6 of the time there, and gives the
    same bytes), else the one that comes with vkback, else the system's, else None."""
    of_system = system_compiler()
    if of_system is not None and VERIFIED in of_system.identity:
        return of_system
    return own_compiler() or of_system


def identity_key(compiler: Compiler, optimize: bool = True) -> str:
    """Short name of a compiler and version, fit for a file name; another one without the optimizer."""
    return hashlib.sha256((compiler.identity + ("" if optimize else " -O0")).encode()).hexdigest()[:16]
