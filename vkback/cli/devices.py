"""vkback devices: what Vulkan offers here."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def devices(
    report: Annotated[bool, typer.Option("--report", help="All that a bug report needs; with --json as JSON.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Every capability of every device.")] = False,
) -> None:
    """List the Vulkan devices with the index that --device takes."""
    if report:
        print(json.dumps(report_data(), indent=1) if as_json else bug_report(), end="\n" if as_json else "")
        return
    from vkback.device import list_devices
    from vkback.device.instance import free_memory
    from vkback.units import size_text

    if as_json:
        print(json.dumps([{"index": index, **caps.to_dict()} for index, caps in enumerate(list_devices())], indent=1))
        return
    for index, (caps, free) in enumerate(zip(list_devices(), free_memory(), strict=True)):
        print(caps.summary_line(index))
        own = max((heap.size for heap in caps.heaps if heap.device_local), default=0)
        left = "" if free is None else f", {size_text(free)} free"
        emulated = "; integer dot products are emulated" if caps.int_dot and not caps.int_dot_accelerated else ""
        print(f"    memory: {size_text(own)}{left}; a buffer holds at most {size_text(caps.largest_buffer)}{emulated}")


def report_data() -> dict[str, Any]:
    """What `bug_report` says, as plain values."""
    from vkback.device.report import data
    from vkback.report.build import build_info
    from vkback.shader import find_compiler

    commit, number = build_info()
    compiler = find_compiler()
    return {"build": commit, "build_number": number, **data(compiler.identity if compiler else "none found")}


def bug_report() -> str:
    """Commit, versions, shader compiler and every capability of every device."""
    from vkback.device.report import report
    from vkback.report.build import build_info
    from vkback.shader import find_compiler

    commit, number = build_info()
    compiler = find_compiler()
    return f"build: {commit} ({number})\n" + report(compiler.identity if compiler else "none found")
