"""Our GEMV kernels beside llama.cpp's, as the compiler at hand makes them; nothing runs. `make lab` calls it for every chip.

    python bench/vendor_kernels.py [--peer FOLDER] [--only Q4_K,Q6_K] > chip.json

FOLDER holds llama.cpp's SPIR-V of ggml 0.25.3, as its build leaves it in ggml/src/ggml-vulkan/vulkan-shaders.spv. Which of its modules a
device gets, with how many rows, threads and lanes, follows ggml-vulkan.cpp of that version. Its figures are those of its inner loop alone;
ours are all that a thread issues, prologue and sums included.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vkback.cli.explain import node_of
from vkback.cli.kernels import compiled
from vkback.compilers import kernel_figures
from vkback.compilers.listings import total
from vkback.device import Capabilities, Device, DeviceError, KernelSpec
from vkback.device.spirv import inspect
from vkback.ops.lowering import Act, LowerContext, PlanError
from vkback.ops.matmul.linear_node import INT_QUANTS
from vkback.ops.op import OPS
from vkback.tuning.lookup import Tuning

QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4", "Q4_0", "IQ4_XS")
DENSE = "MUL_MAT(type_a={},m=4096,n=1,k=14336)"
EXPERTS = "MUL_MAT_ID(type_a={},m=768,n=1,k=2048,n_mats=128,n_used=8)"
TOKENS = ",".join(map(str, range(64)))
OTHERS = {
    "attention": "FLASH_ATTN_EXT(n_head=32,n_head_kv=8,hd=128,n_ctx=4096,pos=[4095],y=F32,window=0,sinks=0)",
    "attention of a prompt": f"FLASH_ATTN_EXT(n_head=32,n_head_kv=8,hd=128,n_ctx=4096,pos=[{TOKENS}],y=F32,window=0,sinks=0)",
    "norm": "RMS_NORM(ne=[1,4096])",
    **{f"{quant} {n} tokens": f"MUL_MAT(type_a={quant},m=4096,n={n},k=4096)" for n in (2, 4, 8, 16, 24, 512) for quant in ("Q4_K", "Q6_K")},
    **{f"{quant} {n} tokens": f"MUL_MAT(type_a={quant},m=4096,n={n},k=4096)" for n in (8, 16) for quant in ("Q8_0", "F16")},
    **{f"gate and up of {n} tokens": f"LINEAR(type_a=Q4_K,m=28672,n={n},k=4096,glu=1,out={{glu_out}})" for n in (2, 4, 8, 16)},
    "Q4_K 24 tokens MUL_MAT_ID": "MUL_MAT_ID(type_a=Q4_K,m=768,n=24,k=2048,n_mats=128,n_used=8)",
}
"""Of these, every kernel. glu_out: type of what the GLU makes, as the next product's kernel reads it."""

K_QUANTS = frozenset({"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})


def ours(device: Device, ctx: LowerContext, case: str) -> dict[str, Any]:
    """Figures of the last kernel of a case, the one that does the work."""
    node = node_of(case)
    return compiled(device, [OPS[node.op].lower(node, ctx)[-1]])[0].as_data()


def all_of(device: Device, ctx: LowerContext, case: str) -> dict[str, dict[str, Any]]:
    """Figures of all kernels of a case, by the name of their file."""
    node = node_of(case)
    return {f"({Path(f.source).stem})": f.as_data() for f in compiled(device, OPS[node.op].lower(node, ctx), code=False)}


def ggml_rows(caps: Capabilities, quant: str, path: str, experts: bool) -> int:
    """Rows of a workgroup."""
    gcn, rdna3 = caps.architecture.startswith("gcn"), caps.architecture in ("rdna3", "rdna3_5")
    intel = caps.vendor == "intel"
    if path == "int":
        base = 1 if quant in K_QUANTS else 4 if gcn else 2 if intel else 1
        rows = 2 * base if quant in ("Q2_K", "MXFP4") else base
        return 4 if rdna3 and experts else rows
    if quant in K_QUANTS:
        return 4 if gcn else 2
    return (8 if gcn else 4) if quant in ("MXFP4", "IQ4_XS") else 2 if gcn or intel else 1


def ggml_weights(quant: str, path: str) -> int:
    """Weights of a row that a thread takes in a turn of the inner loop."""
    if path == "int":
        return 4 * (16 if quant in K_QUANTS else 32 if quant == "IQ4_XS" else 8)
    return 16 if quant in K_QUANTS else 32


def ggml_spec(caps: Capabilities, folder: Path, quant: str, path: str, experts: bool) -> tuple[KernelSpec, int]:
    """A kernel of ggml, and its rows."""
    size = 64 if caps.architecture == "rdna1" else 32 if caps.architecture == "rdna2" else caps.subgroup_size
    size = size if caps.subgroup_required_size else caps.subgroup_size
    large = caps.vendor == "nvidia" and caps.architecture not in ("pascal", "unknown") and not (quant == "Q6_K" and not experts)
    name = f"mul_mat_vec_{'id_' if experts else ''}{quant.lower()}_{'q8_1' if path == 'int' else 'f32'}_f32_subgroup"
    spirv = (folder / f"{name}{'' if large else '_no_shmem'}.spv").read_bytes()
    rows = ggml_rows(caps, quant, path, experts)
    spec = ((0, 4 * size if large else size), (1, rows), (2, 1))
    bindings = max(inspect(spirv).bindings) + 1
    return KernelSpec(spirv, name, bindings, 64, spec, size if caps.subgroup_required_size else None), rows


def ggml(device: Device, folder: Path, quant: str, path: str, experts: bool) -> dict[str, Any]:
    """Figures of a kernel of ggml; `per_32` where the compiler's listing shows its loop."""
    spec, rows = ggml_spec(device.caps, folder, quant, path, experts)
    with kernel_figures.stderr_caught(device.caps):
        statistics = device.kernel_statistics(spec)
    listing = kernel_figures.listing_of(device, spec)
    loop = listing.largest_loop() if listing else None
    per_32 = None
    if listing and loop:
        per_32 = 32 * total(listing.inside(loop)) / (rows * ggml_weights(quant, path))
    return {
        "rows": rows,
        "registers": kernel_figures.first_of(statistics, kernel_figures.REGISTERS),
        "spills": kernel_figures.spilled(statistics),
        "scratch": kernel_figures.first_of(statistics, kernel_figures.SCRATCH),
        "waves": kernel_figures.first_of(statistics, kernel_figures.WAVES),
        "per_32": per_32,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default=",".join(QUANTS), help="types, with commas")
    args = parser.parse_args()
    kernel_figures.print_machine_code()
    rows: list[dict[str, Any]] = []
    with Device.open(statistics=True, compile_only=True) as device:
        caps, tables = device.caps, Tuning.for_device(device.caps)
        for quant in args.only.split(","):
            for experts in (False, True):
                for path in ("float", "int"):
                    if path == "int" and quant not in INT_QUANTS:
                        continue
                    act: Act = "q8_1" if path == "int" else "f32"
                    try:
                        made = ours(device, LowerContext(caps, tables, act), (EXPERTS if experts else DENSE).format(quant))
                    except PlanError as e:  # more than the device binds at once
                        made = {"error": str(e)}
                    row = {"quant": quant, "experts": experts, "path": path, "ours": made, "peer": None}
                    if args.peer:
                        try:
                            row["peer"] = ggml(device, args.peer, quant, path, experts)
                        except (OSError, DeviceError) as e:
                            row["peer"] = {"error": str(e)}
                    rows.append(row)
        for name, case in OTHERS.items():
            try:
                found = all_of(device, LowerContext(caps, tables), case.replace("{glu_out}", "Q8_1" if caps.int_dot_accelerated else "F32"))
            except PlanError as e:
                found = {"": {"error": str(e)}}
            for kernel, made in found.items():
                rows.append({"quant": f"{name} {kernel}".strip(), "experts": False, "path": "", "ours": made, "peer": None})
        about = {"device": caps.name, "architecture": caps.architecture, "int_dot": caps.int_dot_accelerated, "driver": caps.driver_info}
    json.dump({**about, "rows": rows}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
