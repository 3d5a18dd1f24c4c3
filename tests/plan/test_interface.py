"""Constants and buffers of shaders by name: GLSL declares them, Python and tests name them (vkback/shader/interface.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_paths import planned_for

from vkback.models import Model
from vkback.paths import shader_root
from vkback.plan.planner import plan
from vkback.shader import CompileError, ShaderLibrary, Variant, interface

SHADER = """#version 450
#include "parts/shapes.glsl"
layout(constant_id = 7) const uint TILE_N = 16;  // layout(constant_id = 8) const uint GHOST = 1;
layout(constant_id = 9) const float EPS = 0.0;
#define BIND_STATE 3
layout(std430, set = 0, binding = 0) readonly buffer X { uint x[]; };
layout(std430, set = 0, binding = 0) readonly buffer XQuads { uvec4 x4[]; };
layout(std430, set = 0, binding = BIND_STATE) coherent volatile buffer State { uint state; };
void main() {}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "shapes.glsl").write_text("layout(constant_id = 0) const uint WG = 64;\n", "utf-8")
    (tmp_path / "sum.comp").write_text(SHADER, "utf-8")
    return tmp_path


def test_what_a_shader_and_its_includes_declare(root: Path) -> None:
    found = interface("sum.comp", root)
    assert {name: (c.id, c.type) for name, c in found.constants.items()} == {"TILE_N": (7, "uint"), "EPS": (9, "float"), "WG": (0, "uint")}
    assert found.bindings == {"X": 0, "XQuads": 0, "State": 3} and found.buffers == 4


def test_values_by_name_become_words_by_number(root: Path) -> None:
    variant = Variant.of("sum.comp", spec={"WG": 128, "EPS": 1.0, "TILE_N": 8})
    assert ShaderLibrary(root, shipped=False).specialization(variant) == ((0, 128), (7, 8), (9, 0x3F800000))


def test_a_constant_that_is_set_and_not_declared_is_an_error(root: Path) -> None:
    with pytest.raises(CompileError, match=r"sum\.comp declares no specialization constant GHOST\. It declares: TILE_N, EPS, WG"):
        interface("sum.comp", root).words([("GHOST", 1)])
    with pytest.raises(CompileError, match=r"uint TILE_N: 0\.5 is no whole number"):
        interface("sum.comp", root).words([("TILE_N", 0.5)])


def test_buffers_by_name(root: Path) -> None:
    found = interface("sum.comp", root)
    assert found.bound({"State": "state", "XQuads": "x"}, "unused") == ("x", "unused", "unused", "state")
    assert found.bound({"State": None}, "unused") == ("unused",) * 4
    with pytest.raises(CompileError, match=r"declares no buffer Y\. It declares: X, XQuads, State"):
        found.bound({"Y": "y"}, "unused")
    with pytest.raises(CompileError, match="X and XQuads are the same buffer, binding 0"):
        found.bound({"X": "x", "XQuads": "x"}, "unused")


def test_two_constants_of_one_name_are_an_error(root: Path) -> None:
    (root / "sum.comp").write_text(SHADER.replace("TILE_N = 16", "WG = 16"), "utf-8")
    with pytest.raises(CompileError, match="WG is constant 7 and constant 0"):
        interface("sum.comp", root)


def test_no_two_constants_of_a_shader_have_one_number() -> None:
    """Nor do two buffers that are not the same memory share a binding: their names then begin alike."""
    for file in sorted(shader_root().rglob("*.comp")):
        found = interface(str(file.relative_to(shader_root())))
        numbers = [c.id for c in found.constants.values()]
        assert len(numbers) == len(set(numbers)), file


@pytest.mark.parametrize("device", ["nvidia_h200_linux", "nvidia_rtx_2070_linux", "amd_rx_7900_xtx_radv", "intel_arc_a770_anv"])
@pytest.mark.parametrize("name", ["llama-8b-Q4_K_S:1", "gpt-oss-20b-MXFP4:1"])
def test_plans_set_what_shaders_declare(models: Callable[[str], Model], device: str, name: str) -> None:
    """All constants of all kernels are declared, and every kernel that has constants binds as many buffers as its shader declares."""
    library, ctx = ShaderLibrary(), planned_for(device)
    for n in (1, 8, 64, 512):
        for d in plan(models(name).graph(n, 1024, head="all" if n <= 8 else "last"), ctx).dispatches():
            if d.kernel.spec:
                assert len(library.specialization(d.kernel)) == len(d.kernel.spec)
                assert len(d.args) == interface(d.kernel.source).buffers, d.kernel.name
