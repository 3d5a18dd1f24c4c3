"""vkback explain: what it says about choices, rows, limits and kernels, for devices that are not here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from kernel_paths import planned_for, with_params
from tiny_models import of_a_kind
from typer.testing import CliRunner

from vkback.cli import main as cli
from vkback.cli.explain import node_of
from vkback.cli.terminal import CONTINUED, WIDTH
from vkback.device import Capabilities, profile_ids
from vkback.device.capabilities import PROFILE_DIR
from vkback.ops.lowering import LowerContext
from vkback.ops.op import OPS


def explain(*arguments: str) -> tuple[int, str]:
    """Exit code and text, what did not fit a line put back into it."""
    ran = CliRunner().invoke(cli.app, ["explain", *arguments])
    told = ran.output.partition("a rule of your own goes to ")[0]  # rows of a table are to be copied
    assert all(len(line) <= WIDTH for line in told.splitlines())
    code = getattr(ran.exception, "exit_code", ran.exit_code)
    return code, ran.output.replace("\n" + CONTINUED, " ") + ("" if ran.exception is None else str(ran.exception))


def test_a_product_is_explained_from_path_to_kernel() -> None:
    code, text = explain("MUL_MAT(type_a=q4_K,m=4096,n=1,k=14336)", "--profile", "amd_rx_7900_xtx_radv")
    assert code == 0, text
    lines = text.splitlines()
    assert lines[0] == "MUL_MAT(type_a=q4_K,m=4096,n=1,k=14336) on AMD Radeon RX 7900 XTX (RADV NAVI31) (amd rdna3)"
    assert "gemv_path for accelerated = true, experts = none, n = 1, quant = Q4_K, m = 4096, k = 14336:" in lines
    assert "  path = int" in lines
    assert "  1. amd.toml [[gemv]] row 1 (anything): gives wg, lanes, rows, unroll, prefetch, scales, subgroup" in lines
    behind = "wg 128, lanes 32, rows 2, unroll 2, prefetch weights, scales weights, subgroup default"
    given = "lane_order, x_in_shared, pairs_in_shared, groups"
    assert f"  2. default.toml [[gemv]] row 1 (anything): gives {given}; behind: {behind}" in lines
    assert any(line.startswith("     2026-11-22 ACO, in32 of Q4_K") for line in lines)
    assert "kernel gemv 64 threads 64 lanes 2 rows" in lines
    assert "LANES=64" not in text
    verbose = explain("MUL_MAT(type_a=q4_K,m=4096,n=1,k=14336)", "--profile", "amd_rx_7900_xtx_radv", "-v")[1].splitlines()
    (defines,) = (line for line in verbose if "LANES=64" in line)
    assert defines.startswith("  defines: ")
    assert defines.endswith(", subgroup size 64")
    assert "  grid 2048x1x1 workgroups of 64x1x1 threads, subgroups of 64, 0 of 65536 bytes of shared memory" in lines
    assert "  3 buffers, 64 of 256 bytes of push constants, 33.064 MB to move" in lines
    assert "  shape as the tables say" in lines


def test_a_product_of_a_token_without_barriers_has_rows_and_a_kernel_of_its_own() -> None:
    case = "LINEAR(type_a=Q4_K,m=4096,n=1,k=14336,fused=residual,type_b=q8_1)"
    code, text = explain(case, "--profile", "nvidia_h200_linux", "--sync", "sentinel")
    assert code == 0, text
    assert "experts = none, glu = false, y = F32, prologue = none, sync = sentinel:" in text
    verbose = explain(case, "--profile", "nvidia_h200_linux", "--sync", "sentinel", "--verbose")[1]
    assert "SPINS=1" in verbose and "BIND_SYNC_STATE=4" in verbose
    assert "SPINS" not in explain(case, "--profile", "nvidia_h200_linux", "-v")[1]


def test_a_rule_of_ones_own_says_where_it_goes_and_is_read_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    arguments = ("MUL_MAT(type_a=q4_K,m=4096,n=1,k=14336)", "--profile", "nvidia_h200_linux")
    (tmp_path / "device_nvidia_h100.toml").write_text('[[gemv]]\nset = { wg = 64 }\nmeasured = "x"\n')
    text = explain(*arguments)[1]
    file = tmp_path / "device_nvidia_h200.toml"
    assert f"a rule of your own goes to {file}:" in text
    assert "this device does not read device_nvidia_h100.toml beside it" in text
    rows = [
        line.strip() for line in text.partition("a rule of your own goes to ")[2].splitlines()[1:] if not line.startswith("this device")
    ]
    file.write_text("\n".join(rows).replace("wg = 1024", "wg = 256"))
    told = json.loads(CliRunner().invoke(cli.app, ["explain", *arguments, "--json"]).output)
    chosen = next(c for c in told["choices"] if c["family"] == "gemv")
    assert chosen["chosen"]["wg"] == "256" and chosen["rows"][0]["where"].startswith(str(file))
    assert told["own_rule"]["file"] == str(file)


def test_lines_are_whole_where_no_terminal_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ["explain", "MUL_MAT(type_a=q4_K,m=4096,n=1,k=14336)", "--profile", "nvidia_h200_linux"]
    for columns, widest in (("80", 80), ("120", 120), ("", 1000)):
        monkeypatch.setenv("COLUMNS", columns)
        lines = CliRunner().invoke(cli.app, case).output.partition("a rule of your own")[0].splitlines()
        assert max(map(len, lines)) <= widest
        assert any(line.startswith(CONTINUED) for line in lines) == bool(columns)


def refused(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


PRODUCTS = tuple(f"MUL_MAT(type_a=q4_K,m=4096,n={n},k=14336)" for n in (1, 512))


@pytest.mark.parametrize("profile", of_a_kind(profile_ids(), profile_ids()[::3]))
def test_every_recorded_device_is_explained_and_planned_as_json(profile: str) -> None:
    """The limits of 13 of them change a shape, which JSON tells in words."""
    caps = Capabilities.from_profile(profile)
    for case in PRODUCTS:
        ran = CliRunner().invoke(cli.app, ["explain", case, "--profile", profile, "--json"])
        assert ran.exit_code == 0, ran.exception
        told = json.loads(ran.output, parse_constant=refused)
        assert told["device"] == caps.name and list(told["unknown"]) == list(caps.unknown) and told["dispatches"]
        text = explain(case, "--profile", profile)[1]
        assert all(f"adjusted: {each}" in text for d in told["dispatches"] for each in d["adjusted"])
    ran = CliRunner().invoke(cli.app, ["plan", "--shape", "tiny-llama-Q8_0", "--profile", profile, "--json"])
    assert ran.exit_code == 0, ran.exception
    assert list(json.loads(ran.output, parse_constant=refused)["unknown"]) == list(caps.unknown)


def test_what_is_not_known_of_a_recorded_device_is_named() -> None:
    """Of a partial profile nearly all; of the others what their reports lack."""
    for command in (("explain", PRODUCTS[0]), ("plan", "--shape", "tiny-llama-Q8_0")):
        ran = CliRunner().invoke(cli.app, [*command, "--profile", "nvidia_rtx_3090_partial"])
        text = ran.output.replace("\n" + CONTINUED, " ")
        assert (
            "not known of this device, so that it may itself choose other kernels (29 facts; a feature counts as absent, a limit as" in text
        )
        assert "shaderIntegerDotProduct, accelerated integer dot products: decides whether products take 8-bit activations" in text
        assert "shapes of cooperative matrices: decides whether GEMMs and attention take cooperative matrices" in text
        assert (
            "maxComputeWorkgroupSubgroups: decides threads of a workgroup" in text
            and "minStorageBufferOffsetAlignment: decides no kernel" in text
        )
        told = json.loads(CliRunner().invoke(cli.app, [*command, "--profile", "nvidia_rtx_3090_partial", "--json"]).output)
        assert told["unknown"]["maxComputeWorkGroupInvocations"] == "threads of a workgroup" and told["unknown"]["shaderInt64"] is None
        assert "not known" not in CliRunner().invoke(cli.app, [*command, "--profile", "nvidia_h200_linux"]).output
    partial = {name for name in profile_ids() if len(Capabilities.from_profile(name).unknown) > 15}
    evidence = {name: json.loads((PROFILE_DIR / f"{name}.json").read_text())["evidence"] for name in profile_ids()}
    assert partial >= {name for name, given in evidence.items() if given == "partial"}


def test_the_reason_for_the_float_path_is_shown() -> None:
    code, text = explain("MUL_MAT(type_a=q4_K,m=4096,n=1,k=14336)", "--profile", "apple_m1_moltenvk")
    assert code == 0, text
    assert "  1. default.toml [[gemv_path]] row 1 (accelerated = false): gives path" in text
    assert "  adjusted: sums shuffles -> shared memory: its subgroup size is not known beforehand" in text
    forced = explain("MUL_MAT(type_a=q4_K,m=4096,n=1,k=14336)", "--profile", "apple_m1_moltenvk", "--act", "q8_1", "-v")[1]
    assert "PATH_INT=1" in forced
    assert "gemv_path for" not in forced


def test_cases_of_other_ops_are_explained_too() -> None:
    case = next(iter(OPS["RMS_NORM"].cases())).line
    code, text = explain(case, "--profile", "nvidia_h200_linux")
    assert code == 0, text
    assert "norm for dim = " in text
    assert "kernel norm " in text


def test_what_the_line_of_a_case_says_of_path_and_tables_holds() -> None:
    text = explain("MUL_MAT(type_a=q4_K,m=64,n=1,k=512,act=f32,tuning=[lanes:16,rows:4])", "--profile", "nvidia_h200_linux", "-v")[1]
    assert "PATH_INT=0" in text
    assert "LANES=16" in text
    sync = "LINEAR(type_a=Q4_K,m=64,n=1,k=512,fused=residual,sync=sentinel)"
    assert "SPINS=1" in explain(sync, "--profile", "nvidia_h200_linux", "-v")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("NOPE(m=1)",), "NOPE: no such op; of "),
        (("ROPE(m=1)",), "ROPE: no parameter is called m; known are mode, ne, n_dims, pos, ff, seed, freq_base, "),
        (("MUL_MAT(type_a=q4_K,m=1)",), "MUL_MAT: parameter k is missing"),
        (("MUL_MAT(type_a=q4_K,m=1,k=256)", "--device", "0", "--profile", "x"), "--device and --profile exclude each other"),
    ],
)
def test_what_cannot_be_explained_is_refused(arguments: tuple[str, ...], said: str) -> None:
    code, text = explain(*arguments)
    assert code == 2
    assert said in text


def adjusted(ctx: LowerContext, case: str, **params: int | str) -> list[str]:
    base = {
        "wg": 128,
        "lanes": 32,
        "rows": 2,
        "unroll": 1,
        "prefetch": "none",
        "lane_order": "strided",
        "groups": "per_tile",
        "subgroup": "default",
    }
    node = node_of(case)
    dispatch = OPS[node.op].lower(node, with_params(ctx, **(base | params)))[-1]
    assert dispatch.config is not None
    return list(map(str, dispatch.config.adjustments))


def test_every_adjustment_names_its_limit_or_need() -> None:
    plain, glu = "MUL_MAT(type_a=Q4_K,m=512,n=1,k=1024)", "LINEAR(type_a=Q4_K,m=512,n=1,k=1024,glu=1)"
    quantized = "LINEAR(type_a=Q4_K,m=512,n=1,k=1024,glu=1,out=Q8_1)"
    ctx = planned_for("nvidia_h200_linux")
    assert adjusted(ctx, plain) == []
    assert adjusted(ctx, glu, rows=1) == ["rows 1 -> 2: GLU takes rows in pairs"]
    assert adjusted(ctx, quantized) == ["rows 2 -> 16: a Q8_1 output takes tiles of 64 rows"]
    ahead = "x is prefetched where it is one token's Q8_1, in memory, and a row takes several chunks"
    assert adjusted(ctx, plain, prefetch="weights+x") == [f"prefetch weights+x -> weights: {ahead}"]
    assert adjusted(ctx, plain, prefetch="weights+x", lanes=16) == []
    assert adjusted(ctx, plain, unroll=4) == ["unroll 4 -> 1: 32 units of 32 weights are spread over 32 lanes"]
    blocked = "lane_order blocked -> strided: "
    three = adjusted(ctx, plain, lanes=8, unroll=3, lane_order="blocked")
    assert three == [blocked + "a lane takes 3 units at once, no power of two above 1"]
    assert adjusted(ctx, plain, lanes=16, unroll=2, lane_order="blocked") == []
    odd = "MUL_MAT(type_a=Q8_0,m=512,n=1,k=1440)"
    uneven = adjusted(ctx, odd, lanes=16, unroll=2, lane_order="blocked")
    assert uneven == [blocked + "a row's 45 units of 32 weights are no multiple of 32"]
    assert adjusted(ctx, plain, groups=1000) == ["groups 1000 -> per_tile: there are no more tiles than that"]
    assert adjusted(ctx, plain, subgroup=16) == ["subgroup 16 -> 32: NVIDIA H200 has sizes from 32 to 32"]
    assert adjusted(ctx, plain, wg=32, lanes=64) == ["lanes 64 -> 32: the workgroup has 32 threads"]
    assert adjusted(ctx, plain, lanes=128) == ["lanes 128 -> 32: a row has 32 units of 32 weights"]
    small = dataclasses.replace(ctx, caps=dataclasses.replace(ctx.caps, max_workgroup_invocations=64))
    assert adjusted(small, plain) == ["wg 128 -> 64: maxComputeWorkGroupInvocations is 64"]
    few = planned_for("llvmpipe_mesa_22_debian12")
    assert adjusted(few, plain, wg=1024) == ["wg 1024 -> 256: 32 subgroups of 8 at most (maxComputeWorkgroupSubgroups)"]
    v3d = adjusted(planned_for("broadcom_v3d_4_2_pi4"), "LINEAR(type_a=Q4_0,m=512,n=16,k=1024)", rows=4)
    assert v3d[0] == "sums shuffles -> shared memory: it has no shuffles"
    assert v3d[1] == "tokens 16 -> 8: 16384 bytes of shared memory hold the sums of no more"


@pytest.mark.vulkan
def test_without_a_profile_it_is_about_the_device_that_is_here() -> None:
    code, text = explain("MUL_MAT(type_a=q8_0,m=64,n=1,k=256)")
    assert code == 0, text
    assert "kernel gemv " in text
