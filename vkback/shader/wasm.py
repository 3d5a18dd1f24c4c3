"""libshaderc as a WebAssembly module that comes with vkback: one file for every system and processor, run by wasmtime.

pip brings wasmtime where it has wheels of it (pyproject.toml says where). `packaging/shaderc/build.py` makes the module; its manifest names
the sources. wasmtime makes machine code of it at the first use, in some seconds, which is kept in the cache folder. Each thread that
compiles has an instance with memory of its own, so that shaders are compiled side by side.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vkback.paths import cache_dir, write_cache
from vkback.shader.errors import CompileError, GlslError

FOLDER = Path(__file__).resolve().parent / "shaderc"
MODULE, MANIFEST = "shaderc.wasm.xz", "manifest.json"
DIGEST_BYTES = 32
WASM_STACK_BYTES, THREAD_STACK_BYTES = 24 << 20, 32 << 20
"""glslang walks expressions by recursion, and long ones take more than the megabyte that a thread may have."""
MAX_PAGES = 8192
"""Of 64 KiB: an instance whose memory has grown over this is dropped after its shader. WebAssembly gives no memory back."""


@dataclass(frozen=True)
class Instance:
    """The module with memory of its own, for one thread at a time. call: an exported function by name."""

    store: Any
    memory: Any
    functions: dict[str, Any]

    def call(self, name: str, *values: int) -> int:
        return int(self.functions[name](self.store, *values) or 0)

    def text(self, at: int) -> str:
        """What stands at an address up to the zero byte."""
        end = at
        while self.memory.data_ptr(self.store)[end]:
            end += 1
        return bytes(self.memory.read(self.store, at, end)).decode("utf-8", "replace")


_stack_size = threading.Lock()


def on_large_stack(call: Callable[[], bytes]) -> bytes:
    """What `call` returns or raises, in a thread with THREAD_STACK_BYTES."""
    done: Future[bytes] = Future()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as e:
            done.set_exception(e)

    with _stack_size:
        before = threading.stack_size(THREAD_STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name="shaderc", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return done.result()


class ShadercModule:
    """The compiler that comes with vkback."""

    def __init__(self, folder: Path = FOLDER) -> None:
        """Reads the manifest alone. Raises OSError where it is missing, ImportError or OSError where there is no wasmtime."""
        self._folder = folder
        self._manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        import_module("wasmtime")
        self.identity = f"{self._manifest['compiler']} (with vkback, {self._manifest['sha256'][:12]})"
        self._lock = threading.Lock()
        self._idle: list[Instance] = []

    @cached_property
    def _make(self) -> Callable[[], Instance]:
        """What makes instances. Raises CompileError where the module is damaged."""
        import wasmtime

        config = wasmtime.Config()
        # An engine refuses a stack larger than that of calls that are suspended, which Python's face of it cannot set.
        import_module("wasmtime._bindings").wasmtime_config_async_stack_size_set(config.ptr(), WASM_STACK_BYTES)
        config.max_wasm_stack = WASM_STACK_BYTES
        engine = wasmtime.Engine(config)
        linker = wasmtime.Linker(engine)
        linker.define_wasi()
        module = self._module(wasmtime, engine)

        def make() -> Instance:
            store = wasmtime.Store(engine)
            store.set_wasi(wasmtime.WasiConfig())
            exports = linker.instantiate(store, module).exports(store)
            functions = {name: export for name, export in exports.items() if isinstance(export, wasmtime.Func)}
            made = Instance(store, exports["memory"], functions)
            made.call("_initialize")
            return made

        return make

    def _module(self, wasmtime: Any, engine: Any) -> Any:
        """The machine code of the module: from the cache, else made now and kept there."""
        try:
            release = version("wasmtime")
        except PackageNotFoundError:
            release = "?"
        kept = cache_dir() / "compilers" / f"shaderc-{self._manifest['sha256'][:16]}-wasmtime-{release}.bin"
        with suppress(OSError, wasmtime.WasmtimeError):
            raw = kept.read_bytes()
            if hashlib.sha256(raw[DIGEST_BYTES:]).digest() == raw[:DIGEST_BYTES]:
                return wasmtime.Module.deserialize(engine, raw[DIGEST_BYTES:])
        packed = self._folder / MODULE
        try:
            data = lzma.decompress(packed.read_bytes())
        except (OSError, lzma.LZMAError) as e:
            raise CompileError(f"[shader] {packed}: the compiler that comes with vkback is damaged ({e}); reinstall vkback") from e
        if hashlib.sha256(data).hexdigest() != self._manifest["sha256"]:
            raise CompileError(f"[shader] {packed} is not the file that {MANIFEST} beside it names; reinstall vkback")
        module = wasmtime.Module(engine, data)
        code = bytes(module.serialize())
        write_cache(kept, hashlib.sha256(code).digest() + code)
        return module

    @contextmanager
    def _instance(self, make: Callable[[], Instance]) -> Iterator[Instance]:
        """One that no other thread has. It is not used again after an error, nor when it has grown large."""
        with self._lock:
            instance = self._idle.pop() if self._idle else None
        instance = instance or make()
        yield instance
        if instance.memory.size(instance.store) <= MAX_PAGES:
            with self._lock:
                self._idle.append(instance)

    def compile_into_spirv(self, source: str, *, optimize: bool = True) -> bytes:
        """Raises GlslError; CompileError where the module is damaged."""
        with self._lock:
            make = self._make
        import wasmtime

        fault = ""
        # The optimizer ends where it finds no more memory: 4 GiB are all that there is in WebAssembly. Drivers optimize, too.
        for level in (True, False) if optimize else (False,):
            try:
                return on_large_stack(lambda level=level: self.compile_once(make, source.encode(), level))  # type: ignore[misc]
            except (wasmtime.Trap, wasmtime.WasmtimeError) as e:
                fault = str(e).strip().splitlines()[-1].strip()
        raise GlslError(f"shader: error: the compiler failed: {fault}")

    def compile_once(self, make: Callable[[], Instance], raw: bytes, optimize: bool) -> bytes:
        """In the thread that calls, whatever its stack. Raises GlslError, and what wasmtime raises where the compiler fails."""
        with self._instance(make) as instance:
            at = instance.call("reserve", len(raw))
            instance.memory.write(instance.store, raw, at)
            result = instance.call("compile", at, len(raw), int(optimize))
            fault = instance.text(instance.call("message", result)) if instance.call("status", result) else ""
            start, size = instance.call("bytes", result), instance.call("length", result)
            spirv = b"" if fault else bytes(instance.memory.read(instance.store, start, start + size))
            instance.call("done", result)
            instance.call("release", at)
        if fault:
            raise GlslError(fault)
        return spirv

    def compile_batch(self, sources: Sequence[str], *, optimize: bool = True) -> list[bytes | GlslError]:
        made: list[bytes | GlslError] = []
        for source in sources:
            try:
                made.append(self.compile_into_spirv(source, optimize=optimize))
            except GlslError as error:
                made.append(error)
        return made
