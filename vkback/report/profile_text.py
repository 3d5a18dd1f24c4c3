"""A profile as text, at most 80 columns wide: kernels by time, their rates, the tree of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from vkback.ops.dispatch import Dispatch
from vkback.report import profile_course
from vkback.report.roles import totals
from vkback.terminal import columns
from vkback.timing.modules import Module
from vkback.timing.profile import CLOCKS, KernelCost, Phase
from vkback.timing.profile_model import Memory, Profile
from vkback.units import counted, size_text

TOP = 24
"""Lines of a table, unless all are requested."""

ROLES = 10
"""The same of kernels of all layers together."""

RULE = "─" * 50

NAME = 35

SIZES = ("WG", "WG_SIZE", "LANES", "ROWS", "WIDTH", "HEADS", "SPLITS", "TILE_M", "TILE_N")
"""Defines that variants of one kernel mostly differ in."""


def report(profile: Profile, everything: bool = False, every: int = 0) -> Iterator[str]:
    """All of it. everything: no table is cut short; every: tokens of a part of the course of decode, 0: no course."""
    s = profile.speeds
    yield from _cut(f"{profile.model} on {profile.device}")
    yield f"{profile.n_layer}L/{profile.n_embd}H, {profile.n_ctx} rows of cache, act {profile.act}"
    if s.load_s > 0:
        yield f"load {1e3 * s.load_s:.0f} ms: {profile.model_bytes / 2**20:.1f} MiB at {profile.model_bytes / s.load_s / 1e9:.2f} GB/s"
        yield from _cut("  " + "; ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in s.load.items()))
    yield f"{s.kernels} kernels ready in {s.compile_s:.1f} s, {s.compiled} of them compiled from GLSL"
    if profile.memory:
        yield from memory_text(profile.memory)
    yield ""
    yield "Kernels chosen"
    yield from _chosen(profile)
    for phase in profile.phases:
        yield ""
        yield from phase_report(phase, profile, everything)
    yield ""
    decode = decoding(profile)
    if every and (found := profile_course.course(decode, every)):
        yield from profile_course.text(found, decode.name)
        yield ""
    yield from _cut(f"Modules, {decode.name}. CPU: recording, once a program; a replay costs the host its submit alone")
    yield from tree(decode.tree(profile.model.split()[0]), everything)
    yield ""
    yield from metrics(profile)


def decoding(profile: Profile) -> Phase:
    """The phase of the tokens behind the prompt, else the last."""
    return next((p for p in profile.phases if p.name.startswith("decode")), profile.phases[-1])


def memory_text(memory: Memory) -> Iterator[str]:
    """What the device's memory holds, and what was free before and after."""
    use = memory.use
    before = (
        "" if memory.free_before is None else f"; free {size_text(memory.free_before)} before the load, {size_text(memory.free_after)} now"
    )
    peak, total = size_text(use.peak), size_text(memory.total)
    yield from _cut(f"memory {size_text(use.nbytes)} in {counted(use.buffers, 'buffer')}, at most {peak} at once, of {total}{before}")
    parts = sorted(use.purposes.items(), key=lambda each: -each[1][0])
    yield from _cut(
        "  " + "; ".join(f"{purpose} {size_text(size)}" + f" ({count} buffers)" * (count > 1) for purpose, (size, count) in parts)
    )


def variant_text(d: Dispatch) -> str:
    """A kernel's name with the size of its workgroup and of what it takes at once: "gemv WG=64 LANES=8 ROWS=4"."""
    defines = dict(d.kernel.defines)
    sizes = [f"{key}={defines[key]}" for key in SIZES if key in defines]
    return " ".join([d.kernel.source.removesuffix(".comp").rpartition("/")[2], *sizes])


def _chosen(profile: Profile) -> Iterator[str]:
    """Variant and reason of each kind of kernel, a phase after another."""
    for phase in profile.phases:
        seen = Counter((variant_text(k.dispatch), k.dispatch.reason) for k in phase.kernels)
        yield f"  {phase.name}:"
        for (kernel, reason), count in seen.items():
            yield from _cut(f"    {kernel} x{count}: {reason or 'nothing to choose'}")


def _cut(line: str) -> Iterator[str]:
    """A line in pieces that fit the terminal, between words."""
    import textwrap

    begin = " " * (len(line) - len(line.lstrip()))
    yield from textwrap.wrap(line.strip(), columns(), initial_indent=begin, subsequent_indent=f"{begin}    ")


def phase_report(phase: Phase, profile: Profile, everything: bool = False) -> Iterator[str]:
    """The GPU Profile Report of a phase, then what each kernel reaches of the read rate and of its prediction."""
    found = totals(phase.kernels)
    shown = found if everything else found[:TOP]
    total = phase.gpu_us
    yield f"{phase.name}, {phase.runs} runs, by {phase.method}"
    yield "GPU Profile Report"
    yield RULE
    yield f"{'Kernel':{NAME}} {'Time (ms)':>9} {'%':>7}"
    yield RULE
    for t in shown:
        yield f"{_fitted(t.name):{NAME}} {t.gpu_us / 1e3:9.3f} {100 * t.gpu_us / total:7.1f}"
    if len(found) > len(shown):
        rest = sum(t.gpu_us for t in found[len(shown) :])
        yield f"{f'{len(found) - len(shown)} others':{NAME}} {rest / 1e3:9.3f} {100 * rest / total:7.1f}"
    yield RULE
    yield f"{'TOTAL':{NAME}} {total / 1e3:9.3f} {100.0:7.1f}"
    roles = totals(phase.kernels, layers=False)
    if len(roles) < len(found):
        yield ""
        yield f"{'All layers together':{NAME}} {'Time (ms)':>9} {'%':>7} {'launches':>9}"
        for t in roles if everything else roles[:ROLES]:
            yield f"{_fitted(t.name):{NAME}} {t.gpu_us / 1e3:9.3f} {100 * t.gpu_us / total:7.1f} {t.launches:9}"
    yield ""
    yield f"{'Kernel':{NAME}} {'GB/s':>8} {'% rate':>6} {'GFLOPS':>8} {'forecast':>8} {'x':>6}"
    for t in shown:
        share = 100 * t.gb_s / profile.costs.read_gb_s
        ratio = t.gpu_us / t.predicted_us if t.predicted_us else 0.0
        gflops = t.flops / t.gpu_us / 1e3 if t.gpu_us else 0.0
        yield f"{_fitted(t.name):{NAME}} {t.gb_s:8.2f} {share:6.1f} {gflops:8.1f} {t.predicted_us / 1e3:8.3f} {ratio:6.2f}"
    yield from _cut(
        f"forecast: ms by {profile.costs.read_gb_s:.1f} GB/s and {profile.costs.stage_us:.2f} us a stage; x: measured over forecast, "
        f"of the whole {total / phase.predicted_us:.2f}"
    )
    yield from _cut(f"GPU {total / 1e3:.3f} ms of {phase.wall_us / 1e3:.3f} ms wall of the same replays: {gap_text(phase)}")
    yield from _cut(overhead_text(phase))
    for note in phase.notes:
        yield from _cut(f"note: {note}")
    if phase.method not in ("timestamps", CLOCKS):
        yield from _cut(
            "note: stages of this phase are barrier-free, but its kernels do not read the device's clock: barriers are put back"
        )


def _fitted(name: str) -> str:
    """A kernel's name of at most NAME characters, its end kept, which tells layers apart."""
    keep = NAME // 2
    return name if len(name) <= NAME else f"{name[: NAME - keep - 1]}~{name[-keep:]}"


NEAR = 0.03
"""Of the wall time, what the GPU's times may miss without a word."""


def gap_text(phase: Phase) -> str:
    """How far the GPU's times are from the wall time, and what the rest is: what a replay costs that has nothing in it, and what that does
    not explain."""
    share = phase.gap_us / phase.wall_us
    if abs(share) <= NEAR:
        return f"within {NEAR:.0%} ({share:+.1%})"
    if share < 0:
        return f"{-share:.1%} more than that: clocks and timestamps disagree"
    gap, empty, submit = (us / phase.runs for us in (phase.gap_us, phase.empty_us, phase.submit_us))
    known = min(gap, empty)
    return (
        f"{share:.1%} is the gap, {gap:.0f} us a replay: {known:.0f} us before the first stage and after the last, as a replay without "
        f"stages has them (submit, of it {min(submit, known):.0f} us in the host's call; the device's start; the host's learning of the "
        f"end); {gap - known:.0f} us unexplained"
    )


def overhead_text(phase: Phase) -> str:
    """What measuring costs."""
    what = "clocks in kernels" if phase.method == CLOCKS else "timestamps"
    plain = phase.plain_us / phase.runs
    if phase.overhead < 0:
        return f"overhead of {what}: not measurable ({plain:.1f} us a run without them, which other load made slower)"
    return f"overhead of {what}: {phase.overhead:+.1%} of {plain:.1f} us a run without them"


def tree(top: Module, everything: bool = False, layers: int = 4) -> Iterator[str]:
    """The tree of modules. Without `everything` layers in the middle are left out."""
    rows = list(_walk(top, "", "", everything, layers))
    width = max(len("Module"), *(len(name) for name, _ in rows))
    heads = ("Self CPU", "CPU total", "Self GPU", "GPU total", "Calls")
    cells = [["", "", "", "", ""] if module is None else _cells(module) for _, module in rows]
    widths = [max(9, *(len(row[column]) for row in cells)) for column in range(len(heads))]
    yield f"{'Module':{width}} | " + " | ".join(f"{h:{w}}" for h, w in zip(heads, widths, strict=True)).rstrip()
    yield f"{'-' * (width + 1)}|" + "|".join("-" * (w + 2) for w in widths)
    for (name, _), row in zip(rows, cells, strict=True):
        yield (f"{name:{width}} | " + " | ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True))).rstrip()


def _cells(m: Module) -> list[str]:
    own = m.own_calls > 0
    if not own and not m.parts:
        return ["", "", "fused", "", ""]
    return [_ms(m.cpu_us) if own else "", _ms(m.total_cpu_us), _ms(m.gpu_us) if own else "", _ms(m.total_gpu_us), str(m.calls)]


def _ms(us: float) -> str:
    return f"{us / 1e3:.3f}ms"


def _walk(module: Module, name: str, indent: str, everything: bool, layers: int) -> Iterator[tuple[str, Module | None]]:
    yield name or module.name, module
    parts = list(module.parts.values())
    hidden = range(0)
    if not everything and module.name == "blk" and len(parts) > layers + 1:
        hidden = range(layers - 1, len(parts) - 1)
    for i, part in enumerate(parts):
        if i in hidden:
            if i == hidden.start:
                yield f"{indent}├── ... {len(hidden)} more", None
            continue
        last = i == len(parts) - 1
        yield from _walk(part, f"{indent}{'└' if last else '├'}── {part.name}", indent + (" " if last else "│"), everything, layers)


def metrics(profile: Profile) -> Iterator[str]:
    """What the model does in use, without stamps."""
    s = profile.speeds
    total = s.ttft_s + s.decode_s
    times = {"ttft": s.ttft_s, "prefill": s.prefill_s, "decode": s.decode_s, "total": total}
    yield f"[metrics] load={1e3 * s.load_s:.1f}ms prefillTokens={s.prompt_tokens} decodeTokens={s.tokens}"
    yield "[metrics] " + " ".join(f"{name}={1e3 * value:.1f}ms" for name, value in times.items())
    yield f"[metrics] tok/s total={s.tokens / total:.2f} prefill={s.prefill_rate:.2f} decode={s.decode_rate:.2f}"


def as_data(profile: Profile, every: int = 0) -> dict[str, Any]:
    """The profile as plain values; times in microseconds, memory in bytes. every: as of `report`."""

    def kernel(k: KernelCost) -> dict[str, Any]:
        return {
            "stage": k.stage,
            "name": k.name,
            "node": k.label,
            "op": k.op,
            "kernel": variant_text(k.dispatch),
            "reason": k.dispatch.reason,
            "modules": [{"path": list(s.path), "part": s.part} for s in k.modules],
            "fused": list(k.fused),
            "runs": k.runs,
            "gpu_us": k.gpu_us,
            "record_us": k.cpu_us,
            "bytes": k.nbytes,
            "flops": k.flops,
            "gb_s": k.gb_s,
            "predicted_us": k.predicted_us,
            "start_us": k.start_us,
            "took_us": k.took_us,
            "each_us": [round(us, 3) for us in k.each_us],
        }

    found = profile_course.course(decoding(profile), every) if every else None
    memory = profile.memory

    return {
        "model": profile.model,
        "device": profile.device,
        "driver": profile.driver,
        "n_ctx": profile.n_ctx,
        "act": profile.act,
        "tuning": profile.tuning,
        "read_gb_s": profile.costs.read_gb_s,
        "stage_us": profile.costs.stage_us,
        "math": {"way": profile.math.kernel, "tflops": profile.math.tflops} if profile.math else None,
        "speeds": {**vars(profile.speeds), "load": dict(profile.speeds.load)},
        "memory": {
            "bytes": memory.use.nbytes,
            "peak": memory.use.peak,
            "buffers": memory.use.buffers,
            "total": memory.total,
            "free_before": memory.free_before,
            "free_after": memory.free_after,
            "purposes": {name: {"bytes": size, "buffers": count} for name, (size, count) in memory.use.purposes.items()},
        }
        if memory
        else None,
        "course": profile_course.as_data(found) if found else None,
        "phases": [
            {
                "name": p.name,
                "tokens": p.tokens,
                "runs": p.runs,
                "method": p.method,
                "gpu_us": p.gpu_us,
                "wall_us": p.wall_us,
                "plain_us": p.plain_us,
                "overhead": p.overhead,
                "predicted_us": p.predicted_us,
                "gap": gap_text(p),
                "rows": list(p.rows),
                "roles": {t.name: t.gpu_us for t in totals(p.kernels, layers=False)},
                "notes": list(p.notes),
                "kernels": [kernel(k) for k in p.kernels],
            }
            for p in profile.phases
        ],
    }


def trace(profile: Profile) -> dict[str, Any]:
    """Chrome trace events, for Perfetto or chrome://tracing: of each phase the last run, its kernels, and the stages they belong to."""
    events: list[dict[str, Any]] = [_meta("process_name", 1, 0, f"{profile.device}: {profile.model}"), _meta("thread_name", 1, 1, "phases")]
    lanes = 1 + max((sum(1 for k in p.kernels if k.stage == s) for p in profile.phases for s in {k.stage for k in p.kernels}), default=1)
    events += [_meta("thread_name", 1, 1 + lane, f"kernels {lane}") for lane in range(1, lanes)]
    events += [{"name": "load", "ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": 1e6 * profile.speeds.load_s, "args": {}}]
    at = 1e6 * profile.speeds.load_s
    for phase in profile.phases:
        width = max((k.start_us + k.took_us for k in phase.kernels), default=0.0)
        args = {"method": phase.method, "runs": phase.runs, "gpu_ms": phase.gpu_us / 1e3, "wall_ms": phase.wall_us / 1e3}
        events.append({"name": phase.name, "cat": "phase", "ph": "X", "pid": 1, "tid": 1, "ts": at, "dur": width, "args": args})
        lane: dict[int, int] = {}
        for k in phase.kernels:
            lane[k.stage] = lane.get(k.stage, 0) + 1
            events.append(
                {
                    "name": k.name,
                    "cat": k.kernel,
                    "ph": "X",
                    "pid": 1,
                    "tid": 1 + lane[k.stage],
                    "ts": at + k.start_us,
                    "dur": k.took_us,
                    "args": {
                        "node": k.label,
                        "op": k.op,
                        "stage": k.stage,
                        "bytes": k.nbytes,
                        "flops": k.flops,
                        "GB/s": round(k.nbytes / k.took_us / 1e3, 3) if k.took_us else 0.0,
                        "reason": k.dispatch.reason,
                    },
                }
            )
        at += width
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"device": profile.device, "model": profile.model}}


def _meta(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": value}}
