"""AMD's compiler without AMD's cards: RADV's null device, which Debian 12's driver opens by itself, compiles what the tables choose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_files import BUILT_IN, hollow
from processes import run_program

FAMILIES = ("polaris10", "vega10", "navi10", "navi21", "gfx1100")
"""Generations gcn4, gcn5, rdna1, rdna2, rdna3."""

DRIVER = next(iter(sorted(Path("/usr/share/vulkan/icd.d").glob("radeon_icd*.json"))), None)

pytestmark = pytest.mark.skipif(DRIVER is None, reason="no RADV here: /usr/share/vulkan/icd.d/radeon_icd*.json (mesa-vulkan-drivers)")

SPILLING = """
#version 450
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) buffer Data { uvec4 data[]; };
void main() {
    const uint t = gl_GlobalInvocationID.x;
    uvec4 live[64];
    for (uint i = 0; i < 64; i++) live[i] = data[t + 64 * i];
    barrier();
    for (uint i = 0; i < 64; i++) data[t + 64 * i] = live[63 - i] * live[(i * 7) % 64] + live[(i * 11 + 3) % 64];
}
"""
"""A quarter of a kilobyte of registers a thread and more, all of them wanted to the end."""

PLANTED = """
import sys
from pathlib import Path
from vkback.device import Device, KernelSpec
from vkback.ops.dispatch import Dispatch
from vkback.shader import Variant
from vkback.compilers.kernel_figures import figures

with Device.open(statistics=True, compile_only=True) as device:
    spec = KernelSpec(Path(sys.argv[1]).read_bytes(), "planted", 1, 0)
    print(figures(device, spec, Dispatch(Variant("planted.comp", ()), (), b"", (1, 1, 1), "TEST", "planted")).spills_or_scratch)
"""


def on_null_device(family: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    null = {"RADV_FORCE_FAMILY": family, "VK_ICD_FILENAMES": str(DRIVER), "VK_DRIVER_FILES": str(DRIVER)}
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | null
    return run_program([sys.executable, *arguments], env=env)


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hollow("llama-8b-Q4_K_S:2", tmp_path_factory.mktemp("hollow") / "llama-8b.gguf")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_kernel_of_a_token_fails_or_spills(family: str, llama_8b: Path) -> None:
    models = [part for m in (*BUILT_IN, str(llama_8b)) for part in ("-m", m)]
    ran = on_null_device(family, "-m", "vkback.cli.main", "kernels", "--json", "--no-code", *models)
    assert ran.returncode == 0, ran.stderr + ran.stdout[-2000:]
    found = json.loads(ran.stdout)
    assert "Null hardware" in found["device"] and len(found["kernels"]) > 20
    assert {k["spills"] for k in found["kernels"]} == {k["scratch"] for k in found["kernels"]} == {0}
    assert all(k["registers"] and k["code_bytes"] and 0 < k["waves"] <= k["most_waves"] for k in found["kernels"])


@pytest.mark.parametrize(("family", "n", "k", "out"), [("polaris10", 8, 256, "F32"), ("gfx1100", 4, 4096, "Q8_1")])
def test_gate_and_up_of_few_tokens_do_not_spill(family: str, n: int, k: int, out: str) -> None:
    """They hold most: two rows a thread at least, each with a sum for every token."""
    case = f"LINEAR(type_a=Q4_K,m=2048,n={n},k={k},fused=none,glu=1,out={out})"
    ran = on_null_device(family, "-m", "vkback.cli.main", "kernels", "--json", "--no-code", "--case", case)
    assert ran.returncode == 0, ran.stderr + ran.stdout[-2000:]
    (found,) = [k for k in json.loads(ran.stdout)["kernels"] if k["quant"] == "Q4_K"]
    assert (found["spills"], found["scratch"]) == (0, 0)


def test_a_planted_spill_is_caught(tmp_path: Path) -> None:
    source, spirv = tmp_path / "planted.comp", tmp_path / "planted.spv"
    source.write_text(SPILLING.lstrip())
    glslc = run_program(["glslc", "--target-env=vulkan1.2", source, "-o", spirv])
    assert glslc.returncode == 0, glslc.stderr
    ran = on_null_device("navi21", "-c", PLANTED, str(spirv))
    assert ran.stdout.split() == ["True"], ran.stderr
