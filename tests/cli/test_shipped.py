"""Ordinary kernels that come as SPIR-V: archives, what is stale, and models that run without a GLSL compiler."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from plain_numpy import plain_numpy
from processes import run_program

from tools import prebuilt, shipped_coverage
from vkback.device import Capabilities
from vkback.errors import VkbackError
from vkback.models import Model
from vkback.models.synth import SHAPES, outline
from vkback.ops.lowering import LowerContext
from vkback.paths import builtin_model, shader_root
from vkback.shader import NoCompiler, ShaderLibrary, Variant
from vkback.shader import library as library_module
from vkback.shader.prebuilt import module_name, stale, write
from vkback.shader.shipped import groups, pack, read_archive, shipped_variants
from vkback.tuning.lookup import Tuning

FILL = """#version 450
#include QUANT_FILE
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) writeonly buffer A { uint a[]; };
void main() { a[gl_GlobalInvocationID.x] = value() + ADDED; }
"""
ONE, TWO, OTHER = (
    Variant("fill/fill.comp", (("QUANT_FILE", f'"quant/{quant}.glsl"'), ("ADDED", n))) for quant, n in (("one", 1), ("one", 2), ("two", 1))
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shaders = tmp_path / "shaders"
    for folder in ("fill", "quant"):
        (shaders / folder).mkdir(parents=True)
    (shaders / "fill" / "fill.comp").write_text(FILL)
    for number, quant in enumerate(("one", "two"), 1):
        (shaders / "quant" / f"{quant}.glsl").write_text(f"uint value() {{ return {number}u; }}\n")
    prebuilt.build_ordinary(shaders, [ONE, TWO, OTHER])
    return shaders


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "find_compiler", lambda: None)


def archives(root: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in (root / "prebuilt" / "ordinary").iterdir()}


def test_an_archive_for_each_shader_file_and_weight_type() -> None:
    assert {file: len(members) for file, members in groups([ONE, TWO, OTHER, Variant("norm/norm.comp")]).items()} == {
        "fill-fill-one.xz": 2,
        "fill-fill-two.xz": 1,
        "norm-norm.xz": 1,
    }


def test_archives_keep_modules_and_have_the_same_bytes_every_time(root: Path) -> None:
    (file,) = (root / "prebuilt" / "ordinary").glob("*-one.xz")
    archive = read_archive(file)
    assert archive is not None and set(archive.hashes) == {ONE, TWO}
    plain = ShaderLibrary(root, root / "cache", shipped=False)
    made = {v: (archive.hashes[v], plain.spirv(v)) for v in (TWO, ONE)}
    assert {v: archive.spirv[archive.hashes[v]] for v in (ONE, TWO)} == {v: spirv for v, (_, spirv) in made.items()}
    assert pack(archive.compiler, made) == file.read_bytes()


def test_modules_serve_without_a_compiler_as_long_as_their_source_stands(root: Path, without_compiler: None, tmp_path: Path) -> None:
    bare = ShaderLibrary(root, tmp_path / "empty")
    assert set(bare.compile_many([ONE, TWO, OTHER])) == {ONE, TWO, OTHER}
    assert not bare.compiled
    (root / "quant" / "one.glsl").write_text("uint value() { return 7u; }\n")
    bare = ShaderLibrary(root, tmp_path / "empty")
    assert bare.spirv(OTHER)
    said = (
        r"^\[shader\] fill/fill \(2 kernels\) does not come with vkback as SPIR-V, .* there is no GLSL compiler\. Install wasmtime with pip"
    )
    with pytest.raises(NoCompiler, match=said):
        bare.compile_many([ONE, TWO, OTHER])


def test_a_stale_or_damaged_module_is_compiled(root: Path, tmp_path: Path) -> None:
    (root / "quant" / "one.glsl").write_text("uint value() { return 7u; }\n")
    (root / "prebuilt" / "ordinary" / "fill-fill-two.xz").write_bytes(b"not an archive")
    library, plain = ShaderLibrary(root, tmp_path / "cache"), ShaderLibrary(root, tmp_path / "other", shipped=False)
    for variant in (ONE, OTHER):
        assert library.spirv(variant) == plain.spirv(variant)
    assert len(library.compiled) == 2


def test_a_module_of_the_manifest_whose_file_is_missing_is_stale(root: Path) -> None:
    write(root, [ONE, TWO], ShaderLibrary(root, root / "cache", shipped=False))
    assert stale(root, [ONE, TWO]) == []
    (root / "prebuilt" / module_name(TWO)).unlink()
    assert stale(root, [ONE, TWO]) == [TWO.name]
    assert ShaderLibrary(root, root / "cache", shipped=False).spirv(TWO)


def test_modules_of_a_shader_that_has_moved_are_stale(root: Path) -> None:
    (root / "quant" / "one.glsl").unlink()
    assert set(prebuilt.stale_ordinary(root)) == {ONE, TWO}


def test_the_check_names_what_is_stale_and_one_command_rebuilds_that_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prebuilt, "matrix_variants", list)
    monkeypatch.setattr(prebuilt, "planned_variants", lambda: [ONE, TWO])
    assert prebuilt.check(root, release=True) == 0
    before = archives(root)
    (root / "quant" / "one.glsl").write_text("uint value() { return 7u; }\n")
    capsys.readouterr()
    assert prebuilt.check(root, release=False) == 0
    assert prebuilt.check(root, release=True) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "stale: ordinary/fill-fill-one.xz: 2 modules"
    assert said[1] == "ordinary modules: 3, of them 2 stale"
    assert said[2].endswith("before a release run: make prebuilt-ordinary")
    prebuilt.build_ordinary(root, [ONE, TWO, OTHER])
    after = archives(root)
    assert {name for name in after if after[name] != before[name]} == {"fill-fill-one.xz"}
    assert prebuilt.check(root, release=True) == 0
    prebuilt.build_ordinary(root, [OTHER])
    assert set(archives(root)) == {"fill-fill-two.xz"}
    assert (prebuilt.check(root, release=False), prebuilt.check(root, release=True)) == (0, 1)
    assert "missing: ordinary/fill-fill-one.xz: 2 modules" in capsys.readouterr().out


def test_building_needs_a_compiler(root: Path, without_compiler: None) -> None:
    with pytest.raises(VkbackError, match="no GLSL compiler: pip install wasmtime"):
        prebuilt.build_ordinary(root, [ONE])


def test_kernels_of_a_batch_are_planned() -> None:
    """Attention over pages of every class, sampling of columns, copies of pages, edits of the state."""
    found = prebuilt.planned_variants(["llvmpipe_mesa_22_debian12"])
    paged = {v.source for v in found if {"PAGE", "COLUMNS"} & dict(v.defines).keys()}
    assert paged >= {"attention/decode/attention.comp", "sample/draw.comp"}
    assert {v.source for v in found} >= {"copy/pages.comp", "copy/write_words.comp"}


def test_archives_stay_small() -> None:
    sizes = [f.stat().st_size for f in (shader_root() / "prebuilt" / "ordinary").iterdir()]
    assert 0 < sum(sizes) < 10e6


def test_unoptimized_kernels_are_cached_apart(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ShaderLibrary(root, tmp_path / "cache", shipped=False).spirv(ONE)
    monkeypatch.setattr(library_module, "SLOW_TO_OPTIMIZE", ("fill/fill.comp",))
    assert ShaderLibrary(root, tmp_path / "cache", quick=True).spirv(ONE) != plain
    assert len(list((tmp_path / "cache").rglob("*.spv"))) == 2


@pytest.mark.vulkan
@pytest.mark.parametrize("processor", ["this processor", "any processor"])
@pytest.mark.parametrize("command", [["run", "-p", "It was", "-n", "2"], ["bench", "tg4", "pp16", "-r", "1"]], ids=lambda c: c[0])
def test_a_first_start_without_a_compiler(command: list[str], processor: str, tmp_path: Path) -> None:
    """In a process that has no compiler, not even the one that comes with vkback, and an empty cache."""
    if stale := prebuilt.stale_ordinary(shader_root()):
        pytest.skip(f"{len(stale)} of {len(shipped_variants(shader_root()))} ordinary modules are stale: make prebuilt-ordinary")
    arguments = [*command[command[0] == "bench" :], "--device", "llvmpipe", "-m", str(builtin_model("demo-dense"))]
    program = (
        "import sys\n"
        "import vkback.shader.compiler as c; c.LIBRARIES, c.own_compiler = (), lambda: None; c.ctypes.util.find_library = lambda n: None\n"
        "from vkback.cli import vkbench, main\n"
        f"sys.argv = ['vkback', *{arguments!r}]\n"
        f"{'vkbench' if command[0] == 'bench' else 'main'}.main()\n"
    )
    own = {"PATH": str(tmp_path), "VKBACK_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env = os.environ | own | (plain_numpy() if processor == "any processor" else {})
    ran = run_program([sys.executable, "-c", program], env=env)
    if "no device" in ran.stderr.lower():
        pytest.skip("llvmpipe is not among the devices")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("It was") if command[0] == "run" else "tg4" in ran.stdout
    assert not list((tmp_path / "cache").rglob("*.spv")), "something was compiled"


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_of_every_shape_are_counted(shape: str) -> None:
    """Of its first layers, as tools/shipped_coverage.py plans it; gemma4's first layers all have a window, bert makes no text."""
    name = next(name for name in shipped_coverage.usual_names() if name.rpartition("-")[0] == shape)
    model = Model.of(outline(name, layers=min(prebuilt.LAYERS, SHAPES[shape].n_layer)))
    caps = Capabilities.from_profile("nvidia_h200_linux")
    first = next(prebuilt.schedules(model, LowerContext(caps, Tuning.for_device(caps))))
    assert list(first.dispatches())


def test_processes_count_what_one_counts() -> None:
    names, profiles = ["tiny-llama-F32", "tiny-gpt-oss-F32"], ["llvmpipe_mesa_26", "amd_rx_570_radv"]
    alone, shared = (list(shipped_coverage.side_by_side(names, profiles, n)) for n in (1, 2))
    assert alone == shared and all(len(found) == 2 and min(map(len, found)) > 5 for found in alone)


def test_parts_are_all_of_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    missing = {("fill/fill.comp", (("N", n),)) for n in range(7)}
    compiled: list[Variant] = []

    def compile_each(_: ShaderLibrary, variants: Iterable[Variant]) -> Iterator[tuple[Variant, bytes]]:
        for variant in variants:
            compiled.append(variant)
            yield variant, b"spirv"

    monkeypatch.setattr(ShaderLibrary, "compile_each", compile_each)
    for part in range(3):
        shipped_coverage.compile_missing(missing, 3, part)
    assert len(compiled) == 7 and {(v.source, v.defines) for v in compiled} == missing
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["3", "2", "2"]
