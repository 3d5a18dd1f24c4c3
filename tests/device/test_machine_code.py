"""Machine code out of pipeline caches, and the loops of a listing."""

from __future__ import annotations

import dataclasses

import pytest
import zstandard
from kernel_paths import planned_for

from vkback.compilers.machine_code import BRANCHES_TO_ITSELF, NOTHING, MachineCodeError, disassembled, loops, nvidia_code
from vkback.device import Device, KernelSpec
from vkback.shader import ShaderLibrary, Variant

LISTING = """\
/*0000*/ S2R R0, SR_TID.X ;
/*0010*/ @!P0 BRA 0x60 ;
/*0020*/ LDG.E.128.CONSTANT R4, [R0.U32+UR4] ;
/*0030*/ @P1 FFMA.FTZ R1, R2, R3, R1 ;
/*0040*/ FFMA.FTZ R1, R2, R3, R1 ;
/*0050*/ @!P2 BRA 0x20 ;
/*0060*/ EXIT ;
/*0070*/ BRA 0x70;
"""


def instruction(low: bytes) -> bytes:
    return low.ljust(16, b"\x01")


EXIT, RETURN = b"\x4d\x79", b"\x50\x79"
CODES = [b"".join(map(instruction, (b"\xaa\xbb", EXIT, b"\xcc\xdd", RETURN, end, NOTHING, NOTHING))) for end in BRANCHES_TO_ITSELF]
CODE = CODES[0]


def cache(held: bytes) -> bytes:
    """A cache of one kernel: a header in which a frame seems to begin, then the frame."""
    return b"header" + bytes.fromhex("28b52ffd") + b"\xff" * 8 + zstandard.ZstdCompressor().compress(held)


@pytest.mark.parametrize("code", CODES)
def test_the_code_ends_with_what_fills_it_up(code: bytes) -> None:
    """Behind its last exit may be a subroutine."""
    held = b"names and other things" + code + b"more"
    assert nvidia_code(cache(held), len(code)) == code


def test_caches_without_code_are_refused() -> None:
    for data in (b"", b"header", cache(b"no code at all"), cache(CODE)):
        with pytest.raises(MachineCodeError, match=r"no code of 4096 bytes in \d+ bytes of pipeline cache"):
            nvidia_code(data, 4096)


def test_a_loop_is_what_a_branch_goes_back_over() -> None:
    (loop,) = loops(LISTING.splitlines())
    assert (loop.begin, loop.end) == (0x20, 0x50), "neither the branch forward nor the one to itself"
    assert dict(loop.opcodes) == {"LDG": 1, "FFMA": 2, "BRA": 1}
    assert loop.text == "0x0020 to 0x0050, 4 instructions: 2 FFMA, 1 LDG, 1 BRA"


def test_devices_whose_code_nobody_prints_are_named() -> None:
    caps = dataclasses.replace(planned_for("nvidia_h200_linux").caps, architecture="rdna3", name="another card")
    with pytest.raises(MachineCodeError, match=r"another card \(rdna3\): code of .*hopper"):
        disassembled(CODE, caps)


def test_nvdisasm_that_is_missing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineCodeError, match="nvdisasm is missing: it comes with CUDA, or pip install"):
        disassembled(CODE, planned_for("nvidia_h200_linux").caps)


@pytest.mark.vulkan
def test_drivers_give_the_cache_of_one_kernel(device: Device, library: ShaderLibrary) -> None:
    kernel = Variant("probe/read.comp", (("UNROLL", 4), ("WG", 64)))
    spec = KernelSpec(library.spirv(kernel), "read", 2, 8)
    data = device.kernel_cache_data(spec)
    assert len(data) >= 32, "at least the header that Vulkan prescribes"
    with pytest.raises(MachineCodeError, match="no code"):
        nvidia_code(data[:32], 4096)
