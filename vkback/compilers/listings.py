"""Machine code as drivers print it, read far enough to count: instructions by class, and the loops they stand in.

One small reader a compiler: ACO (AMD), ir3 (Adreno), NAK (NVIDIA through NVK); for NVIDIA's own driver vkback/compilers/machine_code.py has
the listing. Apple's AGX prints nothing in Debian's build: its kernels are known by their totals alone. Seen with Mesa 22.3 and 26.2.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

CLASSES = ("dot", "fma", "vector", "scalar", "load", "store", "shared", "shuffle", "convert", "multiply", "branch", "wait")
"""What instructions are counted as.

dot: of packed integers; fma: multiply-adds of floats; vector: other arithmetic of a lane; scalar: of a subgroup; load, store: of memory;
shared: memory of the workgroup; convert: between number types; multiply: 32-bit integer products, a quarter of the rate on AMD; wait: what
only waits or hints, and is in no sum
"""

IDLE = frozenset({"wait"})


@dataclass(frozen=True)
class Instruction:
    """opcode: as printed, without modifiers; kind: one of CLASSES; times: how often its repeat count issues it."""

    opcode: str
    kind: str
    times: int = 1


@dataclass(frozen=True)
class Listing:
    """A kernel's machine code.

    loops  (first, last) numbers of the instructions of each loop, ends included
    """

    instructions: tuple[Instruction, ...]
    loops: tuple[tuple[int, int], ...]

    def executed(self, loop: tuple[int, int] | None = None, trips: int = 1) -> Counter[str]:
        """Instructions by class that a thread issues, those of `loop` `trips` times; other loops count once."""
        found: Counter[str] = Counter()
        for number, i in enumerate(self.instructions):
            found[i.kind] += i.times * (trips if loop and loop[0] <= number <= loop[1] else 1)
        return found

    def largest_loop(self) -> tuple[int, int] | None:
        """The loop with most loads among those that have some and contain no other such loop."""
        loading = [loop for loop in self.loops if self._loads(loop)]
        inner = [a for a in loading if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loading)]
        return max(inner, key=self._loads, default=None)

    def inside(self, loop: tuple[int, int]) -> Counter[str]:
        """Instructions by class of one turn of a loop."""
        found: Counter[str] = Counter()
        for i in self.instructions[loop[0] : loop[1] + 1]:
            found[i.kind] += i.times
        return found

    def _loads(self, loop: tuple[int, int]) -> int:
        return self.inside(loop)["load"]


def total(counts: Counter[str]) -> int:
    """All that issues: without what only waits."""
    return sum(n for kind, n in counts.items() if kind not in IDLE)


Rules = Sequence[tuple[str, str]]
"""(regular expression that matches an opcode from its beginning, class), the first that matches."""

ACO: Rules = (
    (r"s_(waitcnt|wait|delay_alu|nop|clause|sleep|inst_prefetch|endpgm|code_end|sendmsg|set_inst_prefetch|icache|version)", "wait"),
    (r"s_c?branch|s_barrier|s_setpc|s_swappc", "branch"),
    (r"s_", "scalar"),
    (r"v_dot[48]", "dot"),
    (r"v_(pk_|dual_)?(fma|mad|mac|fmac|fmaak|fmamk)(_|ak|mk|c)?(mix|f32|f16|legacy)?.*f(16|32)|v_fma_mix|v_dot2", "fma"),
    (r"v_mul_(lo|hi)_[iu]32|v_mad_[iu]64_[iu]32", "multiply"),
    (r"v_cvt_", "convert"),
    (r"(buffer|global|flat|scratch|tbuffer)_(load|atomic)|image_", "load"),
    (r"(buffer|global|flat|scratch|tbuffer)_store", "store"),
    (r"ds_(swizzle|permute|bpermute)|v_(permlane|readlane|readfirstlane|writelane)", "shuffle"),
    (r"ds_", "shared"),
    (r"v_", "vector"),
)
IR3: Rules = (
    (r"nop|end|\.|sync", "wait"),
    (r"br|jump|bar|bany|ball|kill|predt|predf|prede|call|ret|getone|getlast|fence|shps|shpe|elect", "branch"),
    (r"dp[24]acc", "dot"),
    (r"mad\.f|sad\.f", "fma"),
    (r"mul\.[us]24|mull|madsh|mad\.[us]|mul\.[us]", "multiply"),
    (r"cov", "convert"),
    (r"ldib|ldg|isam|ldc|ldp|resinfo|atomic\.[bg]", "load"),
    (r"stib|stg|stp|stc", "store"),
    (r"ldl|stl|atomic", "shared"),
    (r"shfl|brcst|quad_shuffle|swz|getfiberid|readlane", "shuffle"),
    (r"\w", "vector"),
)
NAK: Rules = (
    (r"nop|b[s]?sync|bssy|bclear|bmov|warpsync|membar|depbar|ccctl|yld|exit|break|annotate", "wait"),
    (r"bra|brx|bar|kill|call|ret|cont|brk|pcnt|pbk|ssy|sync", "branch"),
    (r"idp4|idp", "dot"),
    (r"ffma|hfma2|dfma", "fma"),
    (r"imad|imul|xmad", "multiply"),
    (r"[if]2[if]|i2f|f2i|f2f|frnd", "convert"),
    (r"ldc", "scalar"),
    (r"lds|sts|atoms", "shared"),
    (r"ld|atom|suld|tex|tld", "load"),
    (r"st|red|sust", "store"),
    (r"shfl|vote|match|redux", "shuffle"),
    (r"\w", "vector"),
)
SASS: Rules = (
    (r"NOP|BSYNC|BSSY|BCLEAR|BMOV|WARPSYNC|MEMBAR|DEPBAR|CCTL|YIELD|EXIT|ERRBAR|CGAERRBAR|LDGDEPBAR|NANOSLEEP", "wait"),
    (r"BRA|BRX|BAR|KILL|CALL|RET|JMP", "branch"),
    (r"IDP", "dot"),
    (r"FFMA|HFMA2|DFMA", "fma"),
    (r"U?IMAD|U?IMUL|XMAD", "multiply"),
    (r"[IF]2[IF]|FRND", "convert"),
    (r"U[A-Z0-9]+|LDC|ULDC|S2UR|R2UR", "scalar"),
    (r"LDS|STS|ATOMS", "shared"),
    (r"LD|ATOM|TEX|TLD", "load"),
    (r"ST|RED", "store"),
    (r"SHFL|VOTE|MATCH|REDUX", "shuffle"),
    (r"\w", "vector"),
)


def _classed(rules: Rules) -> Callable[[str], str]:
    known = [(re.compile(pattern), kind) for pattern, kind in rules]
    return lambda opcode: next((kind for pattern, kind in known if pattern.match(opcode)), "vector")


def read_aco(text: str) -> Listing:
    """RADV's "Assembly": blocks BB0, BB1 .. and a branch that names one. With LLVM's disassembler or CLRX's."""
    kind = _classed(ACO)
    instructions: list[Instruction] = []
    places: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for raw in text.splitlines():
        line = raw.partition(";")[0].strip()
        if label := re.match(r"(BB\d+|L\d+)\s*:", line):
            places[label[1]] = len(instructions)
            continue
        found = re.match(r"([a-z][a-z0-9_]+)(\s|$)(.*)", line)
        if not found:
            continue
        instructions.append(Instruction(found[1], kind(found[1])))
        if "branch" in found[1] and (target := re.search(r"\b(BB\d+|L\d+)\b", found[3])):
            branches.append((len(instructions) - 1, target[1]))
    return Listing(tuple(instructions), _backward((at, places.get(name)) for at, name in branches))


def read_ir3(text: str) -> Listing:
    """What IR3_SHADER_DEBUG=disasm prints of one kernel: labels l1:, branches that name them (#l1), repeats as (rpt3)."""
    kind = _classed(IR3)
    instructions: list[Instruction] = []
    places: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for raw in text.splitlines():
        line = raw.removeprefix("MESA: info: ").strip()
        if label := re.fullmatch(r"(l\d+):", line):
            places[label[1]] = len(instructions)
            continue
        found = re.match(r"((?:\([a-z]+\d*\)\s*)*)([a-z][a-z0-9_.]*)(\s.*|$)", line)
        if not found:
            continue
        repeated = re.search(r"\(rpt(\d)\)", found[1])
        instructions.append(Instruction(found[2], kind(found[2]), 1 + int(repeated[1]) if repeated else 1))
        if found[2].startswith(("br", "jump")) and (target := re.search(r"#(l\d+)", found[3])):
            branches.append((len(instructions) - 1, target[1]))
    return Listing(tuple(instructions), _backward((at, places.get(name)) for at, name in branches))


def read_nak(text: str) -> Listing:
    """NVK's "NAK assembly": blocks with a number, a label and their predecessors. Loops end in `bra`, before Volta in `cont`."""
    kind = _classed(NAK)
    instructions: list[Instruction] = []
    places: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for raw in text.splitlines():
        line = raw.partition("//")[0]
        if label := re.match(r"block(?:\.u)?\s+\d+\s+(L\d+)", line.strip()):
            places[label[1]] = len(instructions)
            continue
        body = re.sub(r"^(@!?u?p\w+)", "", line.strip()).strip()
        body = body.rpartition(" = ")[2].strip()
        found = re.match(r"([a-z][a-z0-9_]*)", body)
        if not found or line.startswith("}") or line.startswith("block"):
            continue
        instructions.append(Instruction(found[1], kind(found[1])))
        if found[1] in ("bra", "cont") and (target := re.search(r"\b(L\d+)\b", body)):
            branches.append((len(instructions) - 1, target[1]))
    return Listing(tuple(instructions), _backward((at, places.get(name)) for at, name in branches))


def read_sass(lines: Sequence[str]) -> Listing:
    """Lines of `vkback.compilers.machine_code.disassembled`."""
    from vkback.compilers.machine_code import BRANCH_TARGET, INSTRUCTION_LINE

    kind = _classed(SASS)
    parsed = [m for m in map(INSTRUCTION_LINE.search, lines) if m]
    places = {int(m["address"], 16): number for number, m in enumerate(parsed)}
    targets = ((number, BRANCH_TARGET.search(m["rest"])) for number, m in enumerate(parsed) if m["opcode"] == "BRA")
    backward = _backward((at, places.get(int(target[1], 16))) for at, target in targets if target)
    return Listing(tuple(Instruction(m["opcode"], kind(m["opcode"])) for m in parsed), backward)


def _backward(branches: Iterable[tuple[int, int | None]]) -> tuple[tuple[int, int], ...]:
    """Loops: a branch back is their end. Of several back to one place (continue) the last counts; one to itself is the padding."""
    ends: dict[int, int] = {}
    for at, target in branches:
        if target is not None and target < at:
            ends[target] = max(at, ends.get(target, 0))
    return tuple(sorted(ends.items()))


READERS: dict[str, tuple[str, Callable[[str], Listing]]] = {
    "VK_DRIVER_ID_MESA_RADV": ("Assembly", read_aco),
    "VK_DRIVER_ID_MESA_NVK": ("NAK assembly", read_nak),
}
"""By driver the name of the text that is machine code, and its reader."""
