"""Looks for the setting that cures failing cases: integer dot, fusion, subgroup operations, row counts and so on, switched one by one.

A switch changes the context that cases are lowered in (capabilities held back, parameters of the tuning tables fixed) and so the kernels. A
case whose kernels stay the same is not run again. Fusion is switched by running the chain of plain ops that a fused op stands for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vkback.device import Capabilities, Device
from vkback.device.errors import DeviceLost
from vkback.errors import VkbackError
from vkback.evaluate.judge import judge
from vkback.harness.cases import context_of
from vkback.harness.common import common_lines
from vkback.harness.runner import Workbench, prepare, reference
from vkback.harness.suite import Suite
from vkback.harness.unfused import unfused_tolerance
from vkback.ops.case import Case
from vkback.ops.lowering import LowerContext, PlanError
from vkback.ops.op import OPS
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Overrides

EXAMINED = 40
"""Most failing cases that are run again under each switch, spread over the ops."""

SHOWN = 10


@dataclass(frozen=True)
class Switch:
    """One setting put to its cautious side.

    change  the context with the setting changed; fusion is None here and handled apart
    remedy  what a user can do meanwhile
    """

    name: str
    change: Callable[[LowerContext], LowerContext] | None
    remedy: str


def held(**params: Any) -> Callable[[LowerContext], LowerContext]:
    return lambda ctx: dataclasses.replace(ctx, tuning=Overrides.everywhere(ctx.tuning, params, f"held at {params}"))


def held_in(family: str, **params: Any) -> Callable[[LowerContext], LowerContext]:
    """In one family: others may have a parameter of this name."""
    return lambda ctx: dataclasses.replace(ctx, tuning=Overrides(ctx.tuning, {family: params}, f"held at {params}"))


def without(**caps: Any) -> Callable[[LowerContext], LowerContext]:
    return lambda ctx: dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, **caps))


def single_subgroups(ctx: LowerContext) -> LowerContext:
    """Workgroups of one subgroup, where kernels allow that."""
    size = ctx.caps.subgroup_size
    return held(wg=size, lanes=size, wg_size=size)(ctx)


def table_row(params: str) -> str:
    return f"a row [[gemv]] with set = {{ {params} }} in the device's own tuning table"


SWITCHES: tuple[Switch, ...] = (
    Switch("prefetch off", held(prefetch="none"), table_row('prefetch = "none"')),
    Switch("x read from memory", held(x_in_shared=False), table_row("x_in_shared = false")),
    Switch("no table of pairs", held(pairs_in_shared=False), table_row("pairs_in_shared = false")),
    Switch("lanes strided", held(lane_order="strided"), table_row('lane_order = "strided"')),
    Switch("one unit at a time", held(unroll=1), table_row("unroll = 1")),
    Switch("one tile a workgroup", held_in("gemv", groups="per_tile"), table_row('groups = "per_tile"')),
    Switch("one row a row group", held(rows=1), table_row("rows = 1")),
    Switch("fusion off", None, "Engine.load(..., fusion='none')"),
    Switch("integer dot off", without(int_dot=False, int_dot_accelerated=False), "--act f32"),
    Switch("16-bit floats off", without(fp16=False), "none: report it"),
    Switch("8-bit and 16-bit storage off", without(storage_8bit=False, storage_16bit=False, int8=False, int16=False), "none: report it"),
    Switch("subgroup size left to the driver", without(subgroup_required_size=False), "none: report it"),
    Switch("workgroups of one subgroup", single_subgroups, table_row("wg = SIZE, lanes = SIZE")),
    Switch("subgroup operations off", without(subgroup_ops=("basic",), subgroup_required_size=False), "none: report it"),
)
"""The narrowest first: of several that cure the same cases the first says most."""


@dataclass
class Tally:
    """What a switch did to the failing cases that were examined."""

    cured: list[str] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)
    untouched: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """What came of it. failures: (case line, what was wrong); lost: the device stopped, with the case; common: what the wrong ones share;
    tallies by switch."""

    ran: int
    unsupported: int
    failures: tuple[tuple[str, str], ...]
    examined: int
    tallies: dict[str, Tally]
    lost: str = ""
    common: str = ""

    @property
    def healthy(self) -> bool:
        return not self.failures and not self.lost

    @property
    def cures(self) -> list[Switch]:
        """Switches that cure most of what was examined, and as many each; the narrowest first."""
        most = max((len(t.cured) for t in self.tallies.values()), default=0)
        return [s for s in SWITCHES if most and len(self.tallies[s.name].cured) == most]

    @property
    def verdict(self) -> str:
        if self.lost:
            return f"the device stopped: {self.lost}"
        if self.healthy:
            return f"all {self.ran} cases right"
        if not self.cures:
            return f"{len(self.failures)} of {self.ran} cases wrong; no setting cures any of them"
        first = self.cures[0]
        share = f"{len(self.tallies[first.name].cured)} of {self.examined}"
        names = " or ".join(f'"{s.name}"' for s in self.cures)
        return f"{len(self.failures)} of {self.ran} cases wrong; {names} cures {share} examined. Meanwhile: {first.remedy}"

    def as_data(self) -> dict[str, Any]:
        """All of it as plain values."""
        cures = [{"setting": s.name, "remedy": s.remedy} for s in self.cures]
        failures = [{"case": line, "message": message} for line, message in self.failures]
        switches = {name: dataclasses.asdict(tally) for name, tally in self.tallies.items()}
        return {
            "in_common": self.common,
            "ran": self.ran,
            "unsupported": self.unsupported,
            "failures": failures,
            "examined": self.examined,
            "switches": switches,
            "cures": cures,
            "device_lost": self.lost,
            "verdict": self.verdict,
        }


def spread(cases: Iterable[Case], per_op: int) -> list[Case]:
    """At most `per_op` cases of each op, evenly over its list."""
    by_op: dict[str, list[Case]] = {}
    for case in cases:
        by_op.setdefault(case.op, []).append(case)
    return [c for some in by_op.values() for c in some[:: max(1, -(-len(some) // per_op))]]


def examine(
    device: Device,
    library: ShaderLibrary,
    ctx: LowerContext,
    cases: Sequence[Case],
    tell: Callable[[str], None],
    progress: Callable[[str], object] = lambda _: None,
) -> Diagnosis:
    """Run the cases; when some fail, run those again under each switch. `tell` gets a line an event, `progress` a line a case."""
    failures: list[tuple[str, str]] = []
    failing: list[Case] = []
    judged: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    ran = unsupported = 0
    try:
        with Suite(device, library, ctx) as suite:
            for number, (case, result) in enumerate(zip(cases, suite.run(cases), strict=True), 1):
                progress(f"vkback: {number} of {len(cases)} cases, {len(failing)} wrong")
                ran += result.supported
                unsupported += not result.supported
                if result.passed is not None:
                    judged[result.passed].append((case.line, result.kernel))
                if result.passed is False:
                    failing.append(case)
                    failures.append((case.line, result.message))
                    tell(f"{case.line}: WRONG\n  {result.message}")
        common = common_lines(*judged)
        if common:
            tell(f"in common: {common}")
        some = _some(failing)
        tallies = {}
        for switch in SWITCHES if some else ():
            progress(f"vkback: {switch.name}")
            tallies[switch.name] = tally = _switched(device, library, ctx, switch, some)
            tell(f"{switch.name}: {_line(tally)}")
    except DeviceLost as e:
        return Diagnosis(ran, unsupported, tuple(failures), 0, {}, str(e))
    return Diagnosis(ran, unsupported, tuple(failures), len(some), tallies, common=common)


def _some(cases: Sequence[Case]) -> list[Case]:
    """EXAMINED cases at most, each op in turn."""
    by_op: dict[str, list[Case]] = {}
    for case in cases:
        by_op.setdefault(case.op, []).append(case)
    out: list[Case] = []
    while len(out) < EXAMINED and any(by_op.values()):
        out += [some.pop(0) for some in by_op.values() if some]
    return out[:EXAMINED]


def _line(tally: Tally) -> str:
    parts = [f"cures {len(tally.cured)}" if tally.cured else "", f"{len(tally.failing)} still wrong" if tally.failing else ""]
    parts.append(f"{tally.untouched} with the same kernels" if tally.untouched else "")
    return ", ".join(p for p in parts if p)


def _switched(device: Device, library: ShaderLibrary, ctx: LowerContext, switch: Switch, cases: Sequence[Case]) -> Tally:
    tally = Tally()
    if switch.change is None:
        with Workbench(device, library) as bench:
            for case in cases:
                right = _chain_is_right(bench, case, ctx)
                if right is None:
                    tally.untouched += 1
                else:
                    (tally.cured if right else tally.failing).append(case.line)
        return tally
    other = switch.change(ctx)
    changed = [c for c in cases if _kernels(c, other) not in (None, _kernels(c, ctx))]
    tally.untouched = len(cases) - len(changed)
    with Suite(device, library, other) as suite:
        for case, result in zip(changed, suite.run(changed), strict=True):
            (tally.failing if result.passed is False else tally.cured).append(case.line)
    return tally


def _kernels(case: Case, ctx: LowerContext) -> list[Any] | None:
    """The kernels and grids that a case leads to; None when it cannot be run so."""
    try:
        dispatches = OPS[case.op].lower(case.build().node, context_of(case, ctx))
    except PlanError:
        return None
    return [(d.kernel, d.groups) for d in dispatches]


def _chain_is_right(bench: Workbench, case: Case, ctx: LowerContext) -> bool | None:
    """Whether the plain ops that a fused case stands for give the right result; None for a case that is no fusion."""
    problem, own = case.build(), context_of(case, ctx)
    chain = OPS[case.op].unfused(problem.node)
    if not chain:
        return None
    try:
        got = bench.run(prepare(problem, own, chain))
    except VkbackError:
        return False
    tolerance = unfused_tolerance(problem.node, chain, own)
    return all(judge(got[name], want, tolerance).ok for name, want in reference(problem).items())


def report(diagnosis: Diagnosis, caps: Capabilities, about: str) -> Iterator[str]:
    """A text for a bug report. about: versions of what stands between device and vkback."""
    yield "---- vkback doctor ----"
    yield about.strip()
    yield f"{caps.name}, driver {caps.driver_name} {caps.driver_info}, Vulkan {caps.api_version}, {caps.vendor} {caps.architecture}"
    yield (
        f"subgroups {caps.subgroup_min}-{caps.subgroup_max} ({caps.subgroup_size}), {' '.join(caps.subgroup_ops)}; "
        f"integer dot {caps.int_dot:d}, fast {caps.int_dot_accelerated:d}; fp16 {caps.fp16:d}; shared memory {caps.max_shared_memory}"
    )
    unsupported = f", {diagnosis.unsupported} not supported" if diagnosis.unsupported else ""
    yield f"{diagnosis.ran - len(diagnosis.failures)}/{diagnosis.ran} cases right{unsupported}"
    for name, tally in diagnosis.tallies.items():
        yield f"  {name:34} {_line(tally)}"
    for line, message in diagnosis.failures[:SHOWN]:
        yield f"  {line}"
        yield from (f"    {part}" for part in message.splitlines()[:3])
    if len(diagnosis.failures) > SHOWN:
        yield f"  and {len(diagnosis.failures) - SHOWN} more"
    if diagnosis.common:
        yield f"in common: {diagnosis.common}"
    yield f"verdict: {diagnosis.verdict}"
    yield "-----------------------"
