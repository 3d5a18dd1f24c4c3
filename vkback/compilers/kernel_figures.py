"""What a driver's compiler made of a kernel, as figures to compare: registers, spills, waves, instructions per 32 weights, the bound.

Statistics have each driver's own names; machine code comes from vkback/compilers/listings.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vkback import quants
from vkback.compilers.chips import QUARTER_RATE, Chip
from vkback.compilers.listings import READERS, Listing, read_ir3, total
from vkback.device import Capabilities, Device, KernelSpec, Statistic
from vkback.ops.dispatch import Dispatch
from vkback.ops.matmul.gemv import GemvConfig

REGISTERS = ("VGPRs", "Number of GPRs", "Registers used", "GPRs", "Register Count")
SPILLS = ("Spilled VGPRs", "Spills to memory", "Spills", "STP Count", "Spill count", "Spilled SGPRs")
"""Spilled scalar registers go to vector registers first, but cost loads and stores of lanes all the same."""
SCRATCH = ("Scratch size", "SLM size", "Scratch", "Local Memory Size", "Scratch Memory Size")
CODE = ("Code size", "Code Size", "Binary Size")
INSTRUCTIONS = ("Instructions", "Instruction count", "Instruction Count")
WAVES = ("Subgroups per SIMD", "Max warps/SM", "Max Waves Per Core", "Threads")
"""Names of the statistics that mean the same, by driver: RADV, NVK, Turnip, Honeykrisp, NVIDIA, ANV."""

MAX_WAVES = {"gcn4": 10, "gcn5": 10, "rdna1": 20, "rdna2": 16, "rdna3": 16, "rdna3_5": 16, "rdna4": 16}
"""Waves of a SIMD at most (polaris: 8 of Mesa's count)."""

LATENCY_S = 600e-9
"""From a load to its data in a busy GPU: 500 to 800 ns are measured on cards of many kinds."""

DOTS = {"MXFP4": 16, "NVFP4": 16}
"""Dot products for 32 weights where they are not 8: E2M1 codes are two numbers each (shaders/quant/e2m1.glsl)."""

MEMORY_BOUND = 0.8
"""Arithmetic is out of the way of the loads up to this share of their time."""


@dataclass(frozen=True)
class Figures:
    """One kernel on one compiler. None: the driver does not tell, or nothing of the sort is known of the kernel.

    what               the node it is for
    source, variant    file of the kernel, and all that it was compiled with
    quant, path        of a GEMV: type of the weights, "int" or "float"; else ""
    waves, most_waves  subgroups in flight on a unit of the hardware, and the most it can hold
    code_bytes         size of the machine code
    instructions       as the driver counts them, each once
    loops              of its machine code
    executed           instructions by class that a thread issues for a tile (kernels of shaders/gemv)
    per_32             of these, how many for 32 weights
    cost_32            the same, quarter-rate ones four times
    bound              "memory", "arithmetic" or "latency"; share: the predicted part of the memory rate
    """

    what: str
    source: str
    quant: str
    path: str
    variant: str
    registers: int | None = None
    spills: int | None = None
    scratch: int | None = None
    waves: float | None = None
    most_waves: int | None = None
    code_bytes: int | None = None
    instructions: int | None = None
    loops: int | None = None
    executed: dict[str, int] = field(default_factory=dict)
    per_32: float | None = None
    cost_32: float | None = None
    bytes_32: float | None = None
    bound: str = ""
    arithmetic: float | None = None
    share: float | None = None

    def as_data(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def spills_or_scratch(self) -> bool:
        """Registers did not suffice: some values live in memory."""
        return bool(self.spills or self.scratch)


def first_of(statistics: Sequence[Statistic], names: Sequence[str]) -> int | None:
    """The sum over a kernel's executables of the first statistic that there is."""
    for name in names:
        found = [int(s.value) for s in statistics if s.name == name]
        if found:
            return max(found)
    return None


def spilled(statistics: Sequence[Statistic]) -> int | None:
    """All values that found no register, by any of the names."""
    found = [int(s.value) for s in statistics if s.name in SPILLS]
    return sum(found) if found else None


def listing_of(device: Device, spec: KernelSpec) -> Listing | None:
    """A kernel's machine code, where its driver prints it and there is a reader."""
    name, read = READERS.get(device.caps.driver_id, ("", None))
    if read is not None:
        texts = [t for t in device.kernel_texts(spec) if t.name == name]
        return read(texts[-1].text) if texts and texts[-1].text.strip() else None
    if prints_to_stderr(device.caps):
        with captured_stderr() as captured:
            device.kernel_texts(spec)
        parts = re.split(r"Native code for [^\n]*\n", captured.text)
        return read_ir3(parts[-1]) if len(parts) > 1 else None
    if device.caps.driver_id == "VK_DRIVER_ID_NVIDIA_PROPRIETARY":
        from vkback.compilers.listings import read_sass
        from vkback.compilers.machine_code import MachineCodeError, disassembled, nvidia_code

        size = first_of(device.kernel_statistics(spec), ("Binary Size",))
        try:
            return read_sass(disassembled(nvidia_code(device.kernel_cache_data(spec), size), device.caps)) if size else None
        except MachineCodeError:
            return None
    return None


def prints_to_stderr(caps: Capabilities) -> bool:
    """Whether machine code comes on stderr alone: Turnip's, for `print_machine_code`. Kernels are then compiled one at a time."""
    return caps.driver_id == "VK_DRIVER_ID_MESA_TURNIP"


def print_machine_code() -> None:
    """Have Turnip print the code of what it compiles, before a device is opened; `figures` catches it."""
    os.environ["IR3_SHADER_DEBUG"] = "cs"
    os.environ["MESA_SHADER_CACHE_DISABLE"] = "true"


@dataclass
class CapturedText:
    """What was written to stderr; whole when the context has ended."""

    text: str = ""


@contextlib.contextmanager
def captured_stderr() -> Iterator[CapturedText]:
    """Catch what the process, drivers included, writes to its stderr."""
    captured = CapturedText()
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield captured
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            captured.text = file.read().decode(errors="replace")


def stderr_caught(caps: Capabilities) -> contextlib.AbstractContextManager[object]:
    """For compiling on a device whose driver may print code that nobody wants to see."""
    return captured_stderr() if prints_to_stderr(caps) else contextlib.nullcontext()


def walked(config: GemvConfig) -> tuple[int, int]:
    """(units of 32 weights that a thread decodes for a tile, chunks of its walk)."""
    chunk = config.lanes * config.unroll
    chunks = math.ceil(config.walk_units / chunk)
    return chunks * config.unroll * config.rows, chunks


def executed_by(listing: Listing, config: GemvConfig) -> Counter[str]:
    """Instructions by class that a thread of a GEMV issues for a tile.

    The walk is the largest loop, or unrolled. On the integer path its dot products tell how often it iterates; on the float path the source
    does, unless the compiler unrolled all of it.
    """
    loop = listing.largest_loop()
    if loop is None:
        return listing.executed()
    units, chunks = walked(config)
    inside, once = listing.inside(loop)["dot"], listing.executed()["dot"]
    if config.path == "int" and inside:
        iterations = max(1, round((DOTS.get(config.quant, 8) * units - (once - inside)) / inside))
    else:
        iterations = chunks if config.prefetch == "none" else max(1, chunks - 1)
    return listing.executed(loop, iterations)


def short_walks(dispatch: Dispatch, config: GemvConfig) -> list[Dispatch]:
    """A GEMV's dispatch with rows of one chunk and of two, which compilers unroll: what a chunk costs is the difference."""
    found = []
    for chunks in (1, 2):
        units = chunks * config.lanes * config.unroll
        defines = tuple((name, units if name == "K_UNITS" else value) for name, value in dispatch.kernel.defines)
        found.append(replace(dispatch, kernel=replace(dispatch.kernel, defines=defines)))
    return found


def executed_by_difference(
    device: Device, dispatch: Dispatch, config: GemvConfig, spec_of: Callable[[Dispatch], KernelSpec]
) -> Counter[str] | None:
    """Instructions that a thread of a GEMV issues, in one class, from the totals of two shorter walks; None where they have loops."""
    if "K_UNITS" not in dict(dispatch.kernel.defines) or config.prologue == "norm" or config.experts == "summed":
        return None
    counts = []
    for short in short_walks(dispatch, config):
        statistics = device.kernel_statistics(spec_of(short))
        if first_of(statistics, ("Loops",)) != 0:
            return None
        counts.append(first_of(statistics, INSTRUCTIONS) or 0)
    return Counter(vector=counts[0] + (walked(config)[1] - 1) * (counts[1] - counts[0]))


def figures(
    device: Device,
    spec: KernelSpec,
    dispatch: Dispatch,
    chip: Chip | None = None,
    *,
    code: bool = True,
    spec_of: Callable[[Dispatch], KernelSpec] | None = None,
) -> Figures:
    """All that is known of a dispatch's kernel on an open device (`statistics=True`).

    code     read the machine code, too
    spec_of  compiles a dispatch's shader: for drivers that print no machine code, whose loops are seen by compiling shorter walks
    """
    caps = device.caps
    with stderr_caught(caps):
        statistics = device.kernel_statistics(spec)
    config = dispatch.config if isinstance(dispatch.config, GemvConfig) else None
    names = (dispatch.label, dispatch.kernel.source, config.quant if config else "", config.path if config else "", spec.name)
    listing = listing_of(device, spec) if code and config else None
    made: dict[str, Any] = {
        "registers": first_of(statistics, REGISTERS),
        "spills": spilled(statistics),
        "scratch": first_of(statistics, SCRATCH),
        "waves": first_of(statistics, WAVES),
        "most_waves": _max_waves(caps, spec),
        "code_bytes": _code_bytes(statistics, caps),
        "instructions": first_of(statistics, INSTRUCTIONS),
        "loops": len(listing.loops) if listing else None,
    }
    if config is None:
        return Figures(*names, **made)
    counts = executed_by(listing, config) if listing else None
    if counts is None and first_of(statistics, ("Loops",)) == 0 and made["instructions"]:
        counts = Counter({"vector": made["instructions"]})  # all that a thread issues, in classes that the driver does not tell
    if counts is None and code and spec_of is not None and listing is None:
        counts = executed_by_difference(device, dispatch, config, spec_of)
    if counts is None:
        return Figures(*names, **made)
    # By the units that there are: those past the end of a row are issued for nothing.
    real = config.walk_units * config.rows / config.lanes * config.columns
    per_32 = total(counts) / real
    cost_32 = per_32 + 3 * sum(counts[c] for c in QUARTER_RATE) / real
    kind = quants.quant(config.quant)
    bytes_32 = 32 * kind.block_bytes / kind.block_values / config.columns
    bound, arithmetic, share = predicted(cost_32, bytes_32, config, threads_of(caps, made["waves"]), chip)
    return Figures(
        *names,
        **made,
        executed=dict(counts),
        per_32=per_32,
        cost_32=cost_32,
        bytes_32=bytes_32,
        bound=bound,
        arithmetic=arithmetic,
        share=share,
    )


def predicted(
    cost_32: float, bytes_32: float, config: GemvConfig, threads: int, chip: Chip | None
) -> tuple[str, float | None, float | None]:
    """(what bounds it, arithmetic time over memory time, share of the memory rate) from a chip's published facts.

    threads  in flight on a unit
    """
    if chip is None:
        return "", None, None
    memory_s = bytes_32 / (chip.gb_s * 1e9)
    arithmetic = cost_32 / (chip.units * chip.lanes * chip.mhz * 1e6) / memory_s
    # Bytes in flight: what a thread loads before it first waits is a chunk's weights.
    in_flight = chip.units * threads * config.rows * config.unroll * bytes_32
    latency = chip.gb_s * 1e9 * LATENCY_S / in_flight
    worst = max(arithmetic, latency)
    if worst <= MEMORY_BOUND:
        return "memory", arithmetic, 1.0
    return ("arithmetic" if arithmetic >= latency else "latency"), arithmetic, min(1.0, 1.0 / worst)


def threads_of(caps: Capabilities, waves: int | None) -> int:
    """Threads in flight on a unit of the chip, from the driver's count: waves of 64 on one of GCN's four SIMDs, waves of 32 on one of
    RDNA's two, warps of a multiprocessor, threads of an Apple core. A quarter of what is usual where the driver does not count."""
    if waves is None:
        return 512
    if caps.vendor == "apple":
        return waves
    if caps.vendor == "amd":
        return waves * 256 if caps.architecture.startswith("gcn") else waves * 64
    return waves * 32


def _max_waves(caps: Capabilities, spec: KernelSpec) -> int | None:
    """RADV counts waves of 32 lanes from RDNA1 on."""
    most = MAX_WAVES.get(caps.architecture)
    if caps.driver_id != "VK_DRIVER_ID_MESA_RADV" or most is None:
        return None
    if caps.architecture == "gcn4":
        most = 8 if "POLARIS" in caps.name else most
    wide = (spec.subgroup_size or caps.subgroup_size) == 64
    return most * 2 if wide and caps.architecture.startswith("rdna") else most


def _code_bytes(statistics: Sequence[Statistic], caps: Capabilities) -> int | None:
    """Turnip counts words."""
    size = first_of(statistics, CODE)
    return size if size is None or caps.vendor != "qualcomm" else 4 * size
