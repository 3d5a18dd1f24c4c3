"""The GLSL compiler that comes with vkback: the SPIR-V of Debian 12's, errors, threads, damage, and which compiler is chosen."""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from vkback.paths import cache_dir, shader_root
from vkback.shader import CompileError, ShaderLibrary, Variant, compiler
from vkback.shader.errors import GlslError
from vkback.shader.prebuilt import FOLDER as PREBUILT
from vkback.shader.prebuilt import source_hash
from vkback.shader.shipped import ORDINARY, read_archive
from vkback.shader.source import expand
from vkback.shader.wasm import FOLDER, MANIFEST, MODULE, ShadercModule, on_large_stack

pytest.importorskip("wasmtime", reason="wasmtime has no wheel for this system")

PLAIN = "#version 450\nlayout(local_size_x = 64) in;\nlayout(set = 0, binding = 0) buffer A { uint a[]; };\nvoid main() { a[0] = 1u; }\n"


@pytest.fixture(scope="module")
def own() -> ShadercModule:
    return ShadercModule()


@pytest.mark.parametrize("archive", ["norm-norm.xz", "moe-moe_reduce.xz", "quantize-quantize.xz", "topk-argmax.xz", "load-repack.xz"])
def test_its_spirv_is_what_ships(archive: str, own: ShadercModule) -> None:
    """Which Debian 12's glslc made: byte for byte."""
    shipped = read_archive(shader_root() / PREBUILT / ORDINARY / archive)
    assert shipped is not None
    fresh = [v for v, known in shipped.hashes.items() if source_hash(expand(shader_root(), v).text) == known]
    if not fresh:
        pytest.skip(f"all modules of {archive} are stale: make prebuilt-ordinary")
    for variant in fresh[:2]:
        assert own.compile_into_spirv(expand(shader_root(), variant).text) == shipped.spirv[shipped.hashes[variant]], variant.name


def test_faults_have_their_lines_and_leave_it_whole(own: ShadercModule) -> None:
    made = own.compile_batch([PLAIN, PLAIN.replace("1u", "x"), PLAIN], optimize=False)
    assert made[0] == made[2] and isinstance(made[0], bytes) and made[0] != own.compile_into_spirv(PLAIN)
    assert isinstance(made[1], GlslError) and str(made[1]).startswith("shader:4: error: 'x' : undeclared identifier")


def test_threads_compile_side_by_side(own: ShadercModule) -> None:
    sources = [PLAIN.replace("1u", f"{n}u") for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(own.compile_into_spirv, sources)) == [own.compile_into_spirv(s) for s in sources]


def test_expressions_that_nest_deep_need_no_large_stack_of_the_caller(own: ShadercModule) -> None:
    deep = PLAIN.replace("1u", "+".join(["a[1]"] * 3000))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(own.compile_into_spirv, deep, optimize=False).result()


def test_a_stack_is_given_back_and_errors_come_through() -> None:
    import threading

    def fail() -> bytes:
        raise GlslError("no")

    before = threading.stack_size()
    with pytest.raises(GlslError, match="no"):
        on_large_stack(fail)
    assert threading.stack_size() == before


def test_where_the_optimizer_ends_the_shader_is_compiled_without_it(own: ShadercModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it finds no more memory."""
    import wasmtime

    compile_one = own.compile_once

    def failing(make: Any, raw: bytes, optimize: bool) -> bytes:
        if optimize:
            raise wasmtime.WasmtimeError("wasm trap: wasm `unreachable` instruction executed")
        return compile_one(make, raw, optimize)

    plain = own.compile_into_spirv(PLAIN, optimize=False)
    monkeypatch.setattr(own, "compile_once", failing)
    assert own.compile_into_spirv(PLAIN) == plain
    monkeypatch.setattr(own, "compile_once", lambda make, raw, optimize: failing(make, raw, True))
    with pytest.raises(GlslError, match="the compiler failed: wasm trap"):
        own.compile_into_spirv(PLAIN)


def test_machine_code_is_kept_and_damage_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: ShadercModule) -> None:
    own.compile_into_spirv(PLAIN)
    digest = json.loads((FOLDER / MANIFEST).read_text(encoding="utf-8"))["sha256"][:16]
    kept = cache_dir() / "compilers" / f"shaderc-{digest}-wasmtime-{version('wasmtime')}.bin"
    monkeypatch.setenv("VKBACK_CACHE", str(tmp_path))
    copy = tmp_path / "compilers" / kept.name
    copy.parent.mkdir()
    shutil.copyfile(kept, copy)
    with copy.open("r+b") as file:
        file.seek(100_000)
        file.write(b"damage")
    assert ShadercModule().compile_into_spirv(PLAIN) == own.compile_into_spirv(PLAIN)
    raw = copy.read_bytes()
    assert hashlib.sha256(raw[32:]).digest() == raw[:32]


def test_a_damaged_module_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACK_CACHE", str(tmp_path / "cache"))
    shutil.copytree(FOLDER, tmp_path / "shaderc")
    (tmp_path / "shaderc" / MODULE).write_bytes(lzma.compress(b"another"))
    with pytest.raises(CompileError, match=r"is not the file that manifest\.json beside it names; reinstall vkback"):
        ShadercModule(tmp_path / "shaderc").compile_into_spirv(PLAIN)
    (tmp_path / "shaderc" / MODULE).write_bytes(b"nothing")
    with pytest.raises(CompileError, match="is damaged"):
        ShadercModule(tmp_path / "shaderc").compile_into_spirv(PLAIN)


class Named:
    def __init__(self, identity: str) -> None:
        self.identity = identity


@pytest.mark.parametrize(
    ("system", "wasmtime", "chosen"),
    [
        ("glslc shaderc 2023.2-1 spirv-tools 2022.4", True, "system"),
        ("libshaderc.so.1 spv 0x10600.1", True, "own"),
        ("", True, "own"),
        ("libshaderc.so.1 spv 0x10600.1", False, "system"),
        ("", False, "none"),
    ],
)
def test_which_compiler_is_taken(system: str, wasmtime: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_system: Any = Named(system) if system else None
    monkeypatch.setattr(compiler, "system_compiler", lambda: of_system)
    if not wasmtime:
        monkeypatch.setitem(sys.modules, "wasmtime", None)
    compiler.own_compiler.cache_clear()
    try:
        found: Any = compiler.find_compiler.__wrapped__()
    finally:
        compiler.own_compiler.cache_clear()
    assert ("system" if found is of_system and found else "own" if isinstance(found, ShadercModule) else "none") == chosen


def test_sources_with_cooperative_matrices_go_to_the_systems_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: ShadercModule
) -> None:
    from vkback.shader import library as library_module

    other = Named("newer")
    monkeypatch.setattr(library_module, "find_compiler", lambda: own)
    monkeypatch.setattr(library_module, "system_compiler", lambda: other)
    library = ShaderLibrary(shader_root(), tmp_path)
    chosen: Any = library.compiler_of("#extension GL_KHR_cooperative_matrix : require")
    assert chosen is other
    assert library.compiler_of(PLAIN) is own


def test_kernels_that_do_not_ship_are_compiled_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: ShadercModule) -> None:
    from vkback.shader import library as library_module

    monkeypatch.setattr(library_module, "find_compiler", lambda: own)
    (tmp_path / "shaders").mkdir()
    (tmp_path / "shaders" / "fill.comp").write_text(PLAIN)
    library = ShaderLibrary(tmp_path / "shaders", tmp_path / "cache")
    assert library.spirv(Variant("fill.comp")) == own.compile_into_spirv(PLAIN) and library.compiled
    assert ShaderLibrary(tmp_path / "shaders", tmp_path / "cache").spirv(Variant("fill.comp"))
