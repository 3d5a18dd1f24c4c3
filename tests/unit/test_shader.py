"""GLSL to SPIR-V: includes, defines, error texts, the cache, both compilers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from processes import run_program

from vkback.device.spirv import inspect
from vkback.shader import CompileError, NoCompiler, ShaderLibrary, Variant, register_include
from vkback.shader import library as library_module
from vkback.shader import source as source_module
from vkback.shader.compiler import GlslcProgram, ShadercLibrary, find_compiler, program_path, shared_library
from vkback.shader.errors import GlslError

COPY = """// copies words
#version 450
#include "parts/scale.glsl"
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer A { uint a[]; };
layout(set = 0, binding = 1) writeonly buffer B { uint b[]; };
void main() {
    uint i = gl_GlobalInvocationID.x;
    b[i] = scaled(a[i]);
}
"""
SCALE = """#ifndef SCALE_GLSL
#define SCALE_GLSL
#ifndef SCALE
#define SCALE 1
#endif
uint scaled(uint v) {
    return v * SCALE;
}
#endif
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "shaders"
    (folder / "parts").mkdir(parents=True)
    (folder / "copy.comp").write_text(COPY)
    (folder / "parts" / "scale.glsl").write_text(SCALE)
    return folder


@pytest.fixture
def library(root: Path, tmp_path: Path) -> ShaderLibrary:
    return ShaderLibrary(root, tmp_path / "cache")


def cached_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.spv"))


class Counting:
    """A compiler that counts what reaches it."""

    def __init__(self) -> None:
        found = find_compiler()
        assert found is not None
        self._inner = found
        self.identity = found.identity
        self.calls = 0

    def compile_into_spirv(self, source: str) -> bytes:
        self.calls += 1
        return self._inner.compile_into_spirv(source)

    def compile_batch(self, sources: Sequence[str]) -> list[bytes | GlslError]:
        self.calls += len(sources)
        return self._inner.compile_batch(sources)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    compiler = Counting()
    monkeypatch.setattr(library_module, "find_compiler", lambda: compiler)
    yield compiler


def test_names_are_readable_and_tell_variants_apart() -> None:
    assert Variant("norm/rms_norm.comp").name == "norm/rms_norm"
    full = Variant("gemv/gemv.comp", (("QUANT", "Q4_K"), ("ROWS", 2)), 32)
    assert full.name == "gemv/gemv[QUANT=Q4_K, ROWS=2, sg32]"
    assert len({full, full, Variant("gemv/gemv.comp")}) == 2


def test_equal_settings_are_one_variant_whatever_their_order() -> None:
    one = Variant.of("gemv/gemv.comp", {"ROWS": 2, "QUANT": "Q4_K"}, spec={"B": 1, "A": 2}, subgroup_size=32)
    other = Variant.of("gemv/gemv.comp", {"QUANT": "Q4_K", "ROWS": 2}, spec={"A": 2, "B": 1}, subgroup_size=32)
    assert one == other and one.defines == (("QUANT", "Q4_K"), ("ROWS", 2)) and one.spec == (("A", 2), ("B", 1))


def test_spirv_is_a_vulkan_1_2_module(library: ShaderLibrary) -> None:
    spirv = library.spirv(Variant("copy.comp"))
    assert spirv[:8] == bytes.fromhex("0302230700050100")  # magic number, SPIR-V 1.5
    assert inspect(spirv).workgroup_size({}) == (64, 1, 1)


def test_expanded_has_includes_in_place_and_defines_after_version(library: ShaderLibrary) -> None:
    lines = library.expanded(Variant("copy.comp", (("SCALE", 3), ("NAME", "x")))).splitlines()
    assert lines[:3] == ["#version 450", "#define SCALE 3", "#define NAME x"]
    assert "    return v * SCALE;" in lines
    assert not any("#include" in line for line in lines)


COMMENTED = """// Scales words.
#ifndef SCALE_GLSL  // once
#define SCALE_GLSL
/* The factor,
   which a define may set. // */
#ifndef SCALE
#define SCALE 1   // unless it is set
#endif

uint scaled(uint v) {

    // A comment of /* its own line.
    return v * /* the factor */ SCALE;
}
#endif
"""


def test_comments_and_blank_lines_are_no_part_of_a_source(library: ShaderLibrary, root: Path) -> None:
    plain = library.expanded(Variant("copy.comp"))
    (root / "parts" / "scale.glsl").write_text(COMMENTED)
    (root / "copy.comp").write_text(COPY.replace('.glsl"', '.glsl"  // scaled()').replace("    b[i]", "\n    // One word.\n    b[i]"))
    assert library.expanded(Variant("copy.comp")).replace("v *   SCALE", "v * SCALE") == plain


def test_a_blank_line_that_ends_a_macro_stays(library: ShaderLibrary, root: Path) -> None:
    (root / "parts" / "scale.glsl").write_text("#define scaled(v) (v + \\\n    1u) \\\n\nuint other;\n")
    lines = library.expanded(Variant("copy.comp")).splitlines()
    assert lines[1:5] == ["#define scaled(v) (v + \\", "    1u) \\", "", "uint other;"]
    assert library.spirv(Variant("copy.comp"))


def test_a_fault_among_comments_has_the_line_of_its_file(library: ShaderLibrary, root: Path) -> None:
    (root / "parts" / "scale.glsl").write_text(COMMENTED.replace("SCALE;", "SCAEL;"))
    with pytest.raises(CompileError) as caught:
        library.spirv(Variant("copy.comp"))
    said = str(caught.value)
    assert "parts/scale.glsl:13: error: 'SCAEL' : undeclared identifier" in said
    assert "      10 | uint scaled(uint v) {\n  >   13 |     return v *   SCAEL;\n" in said


def test_an_edit_of_prose_leaves_the_cache_valid(library: ShaderLibrary, counting: Counting, root: Path, tmp_path: Path) -> None:
    library.spirv(Variant("copy.comp"))
    (root / "copy.comp").write_text("// Other words.\n\n" + COPY)
    ShaderLibrary(root, tmp_path / "cache").spirv(Variant("copy.comp"))
    assert counting.calls == 1


def test_defines_change_the_module_and_specialization_does_not(library: ShaderLibrary) -> None:
    plain = library.spirv(Variant("copy.comp"))
    assert library.spirv(Variant("copy.comp", (("SCALE", 7),))) != plain
    assert library.spirv(Variant("copy.comp", (), 32)) == plain


def test_fault_in_an_include_is_shown_in_its_own_file_and_lines(library: ShaderLibrary, root: Path) -> None:
    (root / "parts" / "scale.glsl").write_text(SCALE.replace("v * SCALE", "v * SCAEL"))
    with pytest.raises(CompileError) as caught:
        library.spirv(Variant("copy.comp", (("SCALE", 2), ("OTHER", "Q4_K"))))
    said = str(caught.value)
    assert said.startswith("[shader] copy[SCALE=2, OTHER=Q4_K] does not compile. Defines: SCALE=2, OTHER=Q4_K")
    assert "parts/scale.glsl:7: error: 'SCAEL' : undeclared identifier" in said
    assert "  >    7 |     return v * SCAEL;" in said
    assert "       6 | uint scaled(uint v) {" in said


def test_a_table_among_the_defines_is_shown_by_its_beginning(library: ShaderLibrary, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequencies of RoPE take 1300 characters, and what to do stood behind them."""
    variant = Variant("copy.comp", (("SCALE", ", ".join(["uvec2(683565275u,2475755008u)"] * 32)),))
    (root / "copy.comp").write_text(COPY.replace("b[i] =", "c[i] ="))
    with pytest.raises(CompileError) as caught:
        library.spirv(variant)
    first = str(caught.value).splitlines()[0]
    assert first.startswith("[shader] copy[SCALE=uvec2(683565275u") and len(first) < 250
    monkeypatch.setattr(library_module, "find_compiler", lambda: None)
    with pytest.raises(NoCompiler) as missing:
        library.compile_many([variant, Variant("copy.comp", (("SCALE", 3),))])
    assert str(missing.value).startswith("[shader] copy (2 kernels) does not come with vkback as SPIR-V, is not in the cache")


def test_fault_after_an_include_keeps_the_line_number_of_the_file(library: ShaderLibrary, root: Path) -> None:
    (root / "copy.comp").write_text(COPY.replace("b[i] =", "c[i] ="))
    with pytest.raises(CompileError, match=r"copy\.comp:9: error: 'c' : undeclared identifier"):
        library.spirv(Variant("copy.comp", (("SCALE", 2),)))


def test_missing_files_say_who_included_them(library: ShaderLibrary, root: Path) -> None:
    with pytest.raises(CompileError, match=r"\[shader\] none: cannot read .*none\.comp: (No such file|File not found)"):
        library.spirv(Variant("none.comp"))
    (root / "parts" / "scale.glsl").write_text('#include "parts/gone.glsl"\n')
    with pytest.raises(CompileError, match=r"cannot read .*gone\.glsl, included by parts/scale\.glsl <- copy\.comp: \w+"):
        library.spirv(Variant("copy.comp"))


def test_include_circles_and_ways_out_of_the_folder_are_refused(library: ShaderLibrary, root: Path) -> None:
    (root / "parts" / "scale.glsl").write_text('#include "copy.comp"\n')
    with pytest.raises(CompileError, match=r"copy\.comp includes itself, through parts/scale\.glsl <- copy\.comp"):
        library.spirv(Variant("copy.comp"))
    (root / "parts" / "scale.glsl").write_text('#include "../../secret.glsl"\n')
    with pytest.raises(CompileError, match=r"paths are relative to the shaders folder and stay in it"):
        library.spirv(Variant("copy.comp"))


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_generators", {})


@pytest.mark.usefixtures("generated")
def test_generated_include_is_made_once_and_enters_the_cache_key(
    library: ShaderLibrary, counting: Counting, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "copy.comp").write_text(COPY.replace("parts/scale.glsl", "generated/scale.glsl"))
    asked: list[int] = []

    def make(scale: int) -> str:
        asked.append(scale)
        return SCALE.replace("SCALE 1", f"SCALE {scale}")

    register_include("scale.glsl", lambda: make(3))
    assert "#define SCALE 3" in library.expanded(Variant("copy.comp"))
    library.spirv(Variant("copy.comp"))
    assert asked == [3]
    monkeypatch.setattr(source_module, "_generators", {})
    register_include("scale.glsl", lambda: make(4))
    ShaderLibrary(root, tmp_path / "cache").spirv(Variant("copy.comp"))
    assert counting.calls == 2


@pytest.mark.usefixtures("generated")
def test_generated_include_without_a_maker_or_with_two(library: ShaderLibrary, root: Path) -> None:
    (root / "copy.comp").write_text(COPY.replace("parts/scale.glsl", "generated/scale.glsl"))
    said = r"\[shader\] copy: nothing makes generated/scale\.glsl, included by copy\.comp; see register_include\. Known: none"
    with pytest.raises(CompileError, match=said):
        library.spirv(Variant("copy.comp"))
    register_include("scale.glsl", lambda: SCALE)
    with pytest.raises(ValueError, match=r"\[shader\] generated/scale\.glsl is registered already"):
        register_include("scale.glsl", lambda: SCALE)


def test_source_without_version_is_refused(library: ShaderLibrary, root: Path) -> None:
    (root / "bare.comp").write_text("void main() {}\n")
    with pytest.raises(CompileError, match=r"bare\.comp has no #version line"):
        library.spirv(Variant("bare.comp"))


def test_compile_many_gives_all_faults_at_once(library: ShaderLibrary, root: Path) -> None:
    for name in ("bad1", "bad2"):
        (root / f"{name}.comp").write_text(f"#version 450\nvoid main() {{ {name} = 1; }}\n")
    with pytest.raises(CompileError) as caught:
        library.compile_many([Variant("bad1.comp"), Variant("copy.comp"), Variant("bad2.comp")])
    assert "bad1.comp:2: error: 'bad1'" in str(caught.value)
    assert "bad2.comp:2: error: 'bad2'" in str(caught.value)
    assert "[shader] copy" not in str(caught.value)


def test_compile_many_compiles_each_source_once(library: ShaderLibrary, counting: Counting) -> None:
    variants = [Variant("copy.comp", (("SCALE", s),), size) for s in (1, 2) for size in (None, 8, 32)]
    built = library.compile_many(variants)
    assert set(built) == set(variants)
    assert counting.calls == 2
    assert built[variants[0]] == built[variants[1]] != built[variants[-1]]


def test_a_second_library_reads_the_cache(library: ShaderLibrary, counting: Counting, root: Path, tmp_path: Path) -> None:
    first = library.spirv(Variant("copy.comp"))
    assert ShaderLibrary(root, tmp_path / "cache").spirv(Variant("copy.comp")) == first
    assert counting.calls == 1
    assert len(cached_files(tmp_path)) == 1


def test_changed_include_or_compiler_is_compiled_anew(library: ShaderLibrary, counting: Counting, root: Path, tmp_path: Path) -> None:
    library.spirv(Variant("copy.comp"))
    (root / "parts" / "scale.glsl").write_text(SCALE.replace("SCALE 1", "SCALE 5"))
    ShaderLibrary(root, tmp_path / "cache").spirv(Variant("copy.comp"))
    assert counting.calls == 2
    counting.identity = "another compiler"
    ShaderLibrary(root, tmp_path / "cache").spirv(Variant("copy.comp"))
    assert counting.calls == 3


@pytest.mark.parametrize("damage", [b"", b"short", bytes(64)])
def test_damaged_cache_file_is_compiled_anew(library: ShaderLibrary, counting: Counting, root: Path, tmp_path: Path, damage: bytes) -> None:
    spirv = library.spirv(Variant("copy.comp"))
    (file,) = cached_files(tmp_path)
    file.write_bytes(damage)
    assert ShaderLibrary(root, tmp_path / "cache").spirv(Variant("copy.comp")) == spirv
    assert counting.calls == 2
    assert file.read_bytes().endswith(spirv)


def test_cache_that_cannot_be_written_is_passed_over(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert ShaderLibrary(root, tmp_path / "file").spirv(Variant("copy.comp"))


def test_without_a_compiler_the_cache_serves_and_the_rest_says_what_to_install(
    library: ShaderLibrary, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spirv = library.spirv(Variant("copy.comp"))
    monkeypatch.setattr(library_module, "find_compiler", lambda: None)
    bare = ShaderLibrary(root, tmp_path / "cache")
    assert bare.spirv(Variant("copy.comp")) == spirv
    said = r"^\[shader\] copy does not come with vkback as SPIR-V, is not in the cache, and there is no GLSL compiler\. Install wasmtime"
    with pytest.raises(NoCompiler, match=said):
        bare.spirv(Variant("copy.comp", (("SCALE", 9),)))


def test_library_and_program_give_the_same_bytes(library: ShaderLibrary) -> None:
    in_process, path = shared_library(), program_path()
    if in_process is None or path is None:
        pytest.skip("needs libshaderc and glslc; Debian 12's libshaderc1 lacks symbols of glslang and cannot be loaded")
    source = library.expanded(Variant("copy.comp", (("SCALE", 3),)))
    assert in_process.compile_into_spirv(source) == GlslcProgram(path).compile_into_spirv(source)


def test_a_batch_gives_what_single_compiles_give_and_faults_in_their_places(library: ShaderLibrary) -> None:
    compiler = find_compiler()
    assert compiler is not None
    good = [library.expanded(Variant("copy.comp", (("SCALE", s),))) for s in (3, 4)]
    bad = "#version 450\nvoid main() { x = 1; }\n"
    first, fault, second = compiler.compile_batch([good[0], bad, good[1]])
    assert [first, second] == [compiler.compile_into_spirv(source) for source in good]
    assert isinstance(fault, GlslError) and str(fault).startswith("shader:2: error: 'x' : undeclared identifier")


@pytest.mark.parametrize("kind", ["library", "program"])
def test_each_compiler_reports_faults_by_line(kind: str) -> None:
    compiler: ShadercLibrary | GlslcProgram | None
    if kind == "library":
        compiler = shared_library()
    else:
        path = program_path()
        compiler = GlslcProgram(path) if path else None
    if compiler is None:
        pytest.skip(f"no shaderc {kind} that works here")
    with pytest.raises(GlslError, match=r"^shader:2: error: 'x' : undeclared identifier"):
        compiler.compile_into_spirv("#version 450\nvoid main() { x = 1; }\n")
    assert "shaderc" in compiler.identity


def test_no_compiler_anywhere_in_a_real_process(root: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; sys.modules['wasmtime'] = None\n"
        "import vkback.shader.compiler as c; c.LIBRARIES = (); c.ctypes.util.find_library = lambda name: None\n"
        "from vkback.shader import ShaderLibrary, Variant, NoCompiler\n"
        "try: ShaderLibrary(Path(sys.argv[1]), Path(sys.argv[2])).spirv(Variant('copy.comp'))\n"
        "except NoCompiler as e: print(e)\n"
    )
    env = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", program, str(root), str(tmp_path / "empty")]
    ran = run_program(command, env=env)
    said = (
        "[shader] copy does not come with vkback as SPIR-V, is not in the cache, and there is no GLSL compiler. Install wasmtime with pip"
    )
    assert ran.stdout.startswith(said), ran.stderr
