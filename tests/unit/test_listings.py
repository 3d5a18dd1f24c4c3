"""Readers of machine code: instructions by class, loops, and what a GEMV's thread issues for 32 weights."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kernel_paths import planned_for
from shapes import product
from typer.testing import CliRunner

from vkback.autotune.problem import LinearProblem
from vkback.cli import kernels as kernels_cli
from vkback.cli import main as cli
from vkback.compilers.chips import chip_of
from vkback.compilers.kernel_figures import Figures, executed_by, predicted, walked
from vkback.compilers.listings import Instruction, Listing, read_aco, read_ir3, read_nak, read_sass, total
from vkback.device import Capabilities
from vkback.ops.matmul.gemv import GemvConfig
from vkback.ops.op import OPS

ACO = """\
BB0:
\ts_load_b256 s[16:23], s[0:1], null                          ; f40c0400 f8000000
\tv_mul_lo_u32 v1, v2, v3                                     ; d72c0001
BB1:
\ts_clause 0x1                                                ; bf850001
\tbuffer_load_b128 v[8:11], v1, s[16:19], 0 offen             ; e05c0000 80440801
\ts_waitcnt vmcnt(0)                                          ; bf8927f7
\tv_dot4_i32_iu8 v24, v24, v29, 0 neg_lo:[1,1,0]              ; cc164018 7a023b18
\tv_fma_mix_f32 v2, v1, v3, neg(0) op_sel_hi:[1,0,0]          ; cc20001f
\tv_cvt_f32_i32_e32 v31, v31                                  ; 7e3e0b1f
\ts_cbranch_scc1 BB1                                          ; bfa102fb
BB2:
\tv_add_f32_dpp v1, v1, v1 row_ror:8                          ; 0602
\tv_permlanex16_b32 v1, v1, s0, s0                            ; d65c
\tbuffer_store_b32 v1, v2, s[20:23], 0 offen                  ; e068
\ts_endpgm                                                    ; bfb00000
"""
IR3 = """\
MESA: info: Native code for unnamed CL shader (null) with blake3 04:
MESA: info: ; num_ubos:           0
MESA: info: @in(r0.x)	in0 (wrmask=0x7)
MESA: info: (rpt1)add.u r51.y, (r)r48.y, (r)c9.y
MESA: info: l78:
MESA: info: (ss)(nop3) isam.v.base0 (u32)(xyzw)r1.x, r2.x, s#0, t#0
MESA: info: (rpt3)mad.f32 r26.y, (r)(last)r26.y, r1.x, (neg)r0.z
MESA: info: (sy)dp4acc.mixed.low r1.x, r2.x, r3.x, r4.x
MESA: info: (ss)br p0.x, #l90
MESA: info: jump #l78
MESA: info: l90:
MESA: info: (sy)shfl.xor.u32 r0.x, r1.x, 1
MESA: info: stib.b.untyped.1d.u32.1.imm.base0 r0.x, r1.x, 2
MESA: info: end
"""
NAK = """\
block.u 0 L2 [] -> {
      r0      = s2r sr[0x21]                                 // delay=1 wr:0
} -> [1]
block 1 L5 [0, 1] -> {
      r12..16 = ld.global.a64.constant.b128 [r9+ur4..6], pT  // delay=1 wt=000011
      r3      = idp4.s8.s8 r1 r2 r3                          // delay=1
      r9      = imad r8 0x1c0 r2                             // delay=5
      r0 p0   = iadd3 r0 c[0x1][0x20] rZ                     // delay=4
@!p0            bra pT L5                                    // delay=1
} -> [1, 2]
block 2 L6 [1] -> {
                st.global.a64.strong.gpu.b32 [r0..2+rZ] r2   // delay=2 rd:0
                exit                                         // delay=1
} -> []
"""
MAXWELL = """\
block.u 1 L4 [0, 3] -> {
      r48     = iadd2 r48 0x1                                // delay=6
                ssy L6                                       // delay=13
@!p0            bra pT L7                                    // delay=13
} -> [2, 3]
block 2 L7 [1] -> {
                sync L6                                      // delay=13
} -> [3]
block.u 3 L6 [2] -> {
                cont L4                                      // delay=13
} -> [1]
"""
SASS = [
    "/*0000*/ S2R R0, SR_TID.X ;",
    "/*0010*/ LDG.E.128 R4, [R0] ;",
    "/*0020*/ IDP.4A.S8.S8 R1, R2, R3, R1 ;",
    "/*0030*/ @!P2 BRA 0x10 ;",
]


def kinds(listing: Listing) -> dict[str, int]:
    return {kind: n for kind, n in listing.executed().items() if kind != "wait"}


def test_aco() -> None:
    found = read_aco(ACO)
    assert kinds(found) == {
        "scalar": 1,
        "multiply": 1,
        "load": 1,
        "dot": 1,
        "fma": 1,
        "convert": 1,
        "branch": 1,
        "vector": 1,
        "shuffle": 1,
        "store": 1,
    }
    (loop,) = found.loops
    assert found.largest_loop() == loop and found.inside(loop)["dot"] == 1
    assert found.executed(loop, 5)["dot"] == 5 and found.executed(loop, 5)["multiply"] == 1
    assert total(found.executed()) == 10, "what only waits is in no sum"


def test_ir3_repeats_count_as_often_as_they_issue() -> None:
    found = read_ir3(IR3.partition("\n")[2])
    assert kinds(found) == {"vector": 2, "load": 1, "fma": 4, "dot": 1, "branch": 2, "shuffle": 1, "store": 1}
    assert found.loops == ((1, 5),)


def test_nak_and_nvidia() -> None:
    nak = read_nak(NAK)
    assert kinds(nak) == {"vector": 2, "load": 1, "dot": 1, "multiply": 1, "branch": 1, "store": 1}
    assert nak.loops == ((1, 5),)
    assert read_nak(MAXWELL).loops == ((0, 4),), "before Volta a loop ends in cont"
    sass = read_sass(SASS)
    assert kinds(sass) == {"vector": 1, "load": 1, "dot": 1, "branch": 1} and sass.loops == ((1, 3),)


DOWN = product("llama-8b", "down", "Q4_K", roles=())


def gemv(problem: LinearProblem, profile: str) -> GemvConfig:
    dispatch = OPS["LINEAR"].lower(problem.node(), planned_for(profile))[-1]
    assert isinstance(dispatch.config, GemvConfig)
    return dispatch.config


def listing(*counts: tuple[int, str], loop: tuple[int, int] | None = None) -> Listing:
    made = tuple(Instruction(kind, kind) for n, kind in counts for _ in range(n))
    return Listing(made, (loop,) if loop else ())


def test_how_often_a_walk_turns_follows_from_its_dot_products() -> None:
    config = dataclasses.replace(gemv(DOWN, "amd_rx_7900_xtx_radv"), lanes=64, unroll=1, rows=2)
    units, chunks = walked(config)
    assert (units, chunks) == (14, 7)
    unrolled = listing((112, "dot"), (10, "load"), (100, "vector"))
    assert executed_by(unrolled, config) == Counter(dot=112, load=10, vector=100)
    # 16 products before the loop, 32 a turn: (112 - 16) / 32 turns.
    looped = listing((16, "dot"), (32, "dot"), (2, "load"), (6, "vector"), loop=(16, 49))
    assert executed_by(looped, config) == Counter(dot=16 + 3 * 32, load=3 * 2, vector=6)
    by_floats = dataclasses.replace(config, path="float", prefetch="none")
    assert executed_by(looped, by_floats)["load"] == 7 * 2


def test_the_bound_follows_from_published_facts() -> None:
    caps = Capabilities.from_profile("amd_rx_7900_xtx_radv")
    chip = chip_of(dataclasses.replace(caps, name="AMD Radeon RX 7900 XTX (RADV NAVI31)"))
    assert chip is not None and chip.discrete and chip_of(dataclasses.replace(caps, name="another")) is None
    config = gemv(DOWN, "amd_rx_7900_xtx_radv")
    # 96 units of 64 lanes at 2.499 GHz start 1.535e13 operations a second; 960 GB/s are 5.33e10 times 18 bytes: 288 for each.
    bound, arithmetic, share = predicted(144.0, 18.0, config, 2048, chip)
    assert (bound, share) == ("memory", 1.0) and arithmetic == pytest.approx(0.5, rel=0.01)
    bound, arithmetic, share = predicted(576.0, 18.0, config, 2048, chip)
    assert bound == "arithmetic" and share == pytest.approx(0.5, rel=0.01)
    assert predicted(144.0, 18.0, config, 2048, None) == ("", None, None)


def figure(**changes: Any) -> Figures:
    made = Figures("ffn_out-0", "gemv/gemv.comp", "Q4_K", "int", "gemv[...]", 40, 0, 0, 16, 20, 2048, 500, 1, {"dot": 8}, 60.25)
    return dataclasses.replace(made, **changes)


def test_kernels_that_spill_are_named_and_changes_shown(tmp_path: Path) -> None:
    spilling = figure(spills=3, scratch=64, per_32=80.0)
    lines = list(kernels_cli.table([figure(), spilling]))
    assert lines[1].split()[:3] == ["ffn_out-0", "gemv", "Q4_K"] and "16/20" in lines[1] and "60.2" in lines[1]
    assert lines[-1] == "2 kernels, 1 with spills or scratch memory: ffn_out-0 (gemv Q4_K int)"
    before = tmp_path / "before.json"
    before.write_text(json.dumps({"kernels": [figure().as_data()]}))
    told = kernels_cli.changes([spilling], kernels_cli._read(before))
    assert list(told) == ["ffn_out-0: spills 0 -> 3, scratch 0 -> 64, per_32 60.25 -> 80.0"]


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    for options, said in (
        (("--all", "-m", "demo-moe"), "--all excludes --case, --model and --shape"),
        (("--against", str(tmp_path / "x.json")), "expected what vkback kernels --json wrote"),
    ):
        ran = CliRunner().invoke(cli.app, ["kernels", *options])
        assert ran.exit_code == 1 and said in str(ran.exception)
