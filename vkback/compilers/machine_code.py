"""Machine code of compiled kernels, for those who want to see what a driver makes of a shader: NVIDIA alone.

NVIDIA's pipeline caches hold, compressed by zstd, the code of each kernel; nvdisasm, which comes with CUDA, prints it. The format is
documented nowhere. Seen with driver 580 on Hopper; how code ends on Turing, Ampere, Ada and Blackwell is taken from what nvcc 13 makes for
them. What does not look like it is refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vkback.device import Capabilities
from vkback.errors import VkbackError
from vkback.paths import on_path

INSTALL = "pip install zstandard nvidia-cuda-nvdisasm"

ARCHITECTURES = {
    "pascal": "SM61",
    "volta": "SM70",
    "turing": "SM75",
    "turing_no_tensor": "SM75",
    "ampere": "SM86",
    "ada": "SM89",
    "hopper": "SM90",
    "blackwell": "SM120",
}

TIMEOUT_S = 60

ZSTD_FRAME = bytes.fromhex("28b52ffd")

# Beginnings of instructions of 16 bytes. Code ends with a branch to itself, which may follow a subroutine, and NOPs that fill it up. The
# branch of Turing to Ada, and of Hopper and Blackwell.
BRANCHES_TO_ITSELF = bytes.fromhex("47790000f0ffffff"), bytes.fromhex("4779fc00fcffffff")
NOTHING = bytes.fromhex("1879")
INSTRUCTION = 16

CODE_ENDS = re.compile(b"|".join(map(re.escape, BRANCHES_TO_ITSELF)))

INSTRUCTION_LINE = re.compile(r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9]*)(?P<rest>.*)")
BRANCH_TARGET = re.compile(r"\b0x([0-9a-f]+)\s*;")


class MachineCodeError(VkbackError):
    """Code that cannot be found or printed."""


@dataclass(frozen=True)
class Loop:
    """Instructions from a backward branch's target to the branch, those of loops inside it included.

    begin, end  addresses of its first instruction and of the branch
    opcodes     how often each occurs, without its modifiers
    """

    begin: int
    end: int
    opcodes: Counter[str]

    @property
    def text(self) -> str:
        most = ", ".join(f"{n} {opcode}" for opcode, n in self.opcodes.most_common(8))
        return f"{self.begin:#06x} to {self.end:#06x}, {self.opcodes.total()} instructions: {most}"


def nvidia_code(cache: bytes, size: int) -> bytes:
    """The code in the pipeline cache of one kernel.

    size  of the code in bytes, as the driver's statistics say ("Binary Size")
    Raises MachineCodeError where there is none.
    """
    for at in (m.start() for m in re.finditer(re.escape(ZSTD_FRAME), cache)):
        held = _decompressed(cache[at:])
        for last in (m.start() for m in CODE_ENDS.finditer(held)):
            end = last + INSTRUCTION
            while held[end : end + 2] == NOTHING:
                end += INSTRUCTION
            if end >= size:
                return held[end - size : end]
    raise MachineCodeError(f"[code] no code of {size} bytes in {len(cache)} bytes of pipeline cache: this driver keeps it in another form")


def _decompressed(data: bytes) -> bytes:
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        raise MachineCodeError(f"[code] pipeline caches are compressed by zstd; {INSTALL}") from None
    try:
        return bytes(zstandard.ZstdDecompressor().decompressobj().decompress(data))
    except zstandard.ZstdError:
        return b""  # bytes that happen to look like the beginning of a frame


def disassembled(code: bytes, caps: Capabilities) -> list[str]:
    """A line an instruction, as nvdisasm prints it. Raises MachineCodeError where it is missing or does not know the code."""
    architecture = ARCHITECTURES.get(caps.architecture)
    if architecture is None:
        raise MachineCodeError(f"[code] {caps.name} ({caps.architecture}): code of {', '.join(ARCHITECTURES)} can be printed")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code.bin"
        path.write_bytes(code)
        try:
            done = subprocess.run(
                [_nvdisasm(), "-b", architecture, path], capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            raise MachineCodeError(f"[code] nvdisasm did not run: {e}") from e
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if INSTRUCTION_LINE.search(line)]
    if done.returncode or not lines:
        raise MachineCodeError(f"[code] nvdisasm does not take this for code of {architecture}: {done.stderr.strip()[:200]}")
    return lines


def _nvdisasm() -> str:
    found = on_path("nvdisasm")
    if found is None:
        nvidia = importlib.util.find_spec("nvidia")
        folders = [Path(p) for p in (nvidia.submodule_search_locations or ())] if nvidia else []
        found = next((str(p) for folder in folders for p in sorted(folder.glob("*/bin/nvdisasm"))), None)
    if found is None:
        raise MachineCodeError(f"[code] nvdisasm is missing: it comes with CUDA, or {INSTALL}")
    return found


def loops(lines: Sequence[str]) -> list[Loop]:
    """The loops of a listing, in the order of their ends."""
    parsed = [m for m in map(INSTRUCTION_LINE.search, lines) if m]
    found = []
    for branch in parsed:
        target = BRANCH_TARGET.search(branch["rest"])
        end = int(branch["address"], 16)
        if branch["opcode"] == "BRA" and target and (begin := int(target[1], 16)) < end:
            inside = (m["opcode"] for m in parsed if begin <= int(m["address"], 16) <= end)
            found.append(Loop(begin, end, Counter(inside)))
    return found
