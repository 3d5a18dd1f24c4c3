"""vkback plan --diff: what differs between tables, builds and devices, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vkback.cli import main as cli
from vkback.cli import plan_diff
from vkback.paths import tuning_root

H200 = ("--profile", "nvidia_h200_linux")


def printed(*arguments: str) -> str:
    ran = CliRunner().invoke(cli.app, ["plan", "--diff", *arguments])
    assert ran.exit_code == 0, (ran.output, ran.exception)
    return ran.output


def test_a_row_for_one_type_changes_that_type_alone() -> None:
    text = printed("this", "gemv quant=Q4_K n=1 : wg=256", *H200)
    assert text.startswith("this -> gemv quant=Q4_K n=1 : wg=256: 1 device, ")
    lines = text.splitlines()
    assert lines[2].split() == ["Q4_K"] and lines[3].split()[0] == "nvidia_h200_linux" and int(lines[3].split()[1]) >= 4
    assert "Q4_K: wg 1024 -> 256" in lines
    assert any(line.startswith("    LINEAR(type_a=Q4_K,m=4096,n=1,k=4096") for line in lines)


def test_a_vendors_table_stands_in_for_the_one_of_its_name(tmp_path: Path) -> None:
    mine = tmp_path / "nvidia.toml"
    mine.write_text(
        '[[gemv]]\narchitecture = "hopper"\nquant = "Q6_K"\nn = 1\nset = { wg = 64, lanes = 32 }\nmeasured = "planted"\n\n'
        + (tuning_root() / "nvidia.toml").read_text()
    )
    found = json.loads(printed("this", str(mine), *H200, "--json"))
    assert found["devices"] == 1 and found["differences"]
    assert {d["type"] for d in found["differences"]} == {"Q6_K"}
    assert any("-> 64" in d["change"] for d in found["differences"])


def test_equal_sides_have_no_difference_over_a_models_nodes() -> None:
    text = printed("this", str(tuning_root()), *H200, "--shape", "tiny-llama-Q8_0")
    assert text.splitlines()[-1] == "none"


def test_two_devices_are_compared_with_one_another() -> None:
    text = printed("nvidia_h200_linux", "nvidia_rtx_2070_linux", "--shape", "tiny-llama-Q8_0")
    assert "nvidia_h200_linux -> nvidia_rtx_2070_linux" in text and "sync sentinel -> barrier" in text


def test_a_table_over_all_devices_is_one_table_of_devices_and_types(monkeypatch: pytest.MonkeyPatch) -> None:
    def choices(side: plan_diff.Side) -> dict[str, object]:
        wg = 64 if side.spec.get("overrides") else 128

        def one(quant: str, own: int) -> dict[str, object]:
            kernel = {"kernel": "gemv/gemv", "defines": {"WG": own}, "subgroup": None}
            return {"type": quant, "case": f"{quant} case", "tables": {"gemv": {"wg": own}}, "kernels": [kernel]}

        return {
            "devices": {
                "a": {"choices": [one("Q4_K", wg), one("Q8_0", 32)]},
                "b": {"choices": [one("Q4_K", wg), one("Q8_0", wg)]},
                "c": {"choices": [one("Q4_K", 16), one("Q8_0", 16)]},
            }
        }

    monkeypatch.setattr(plan_diff, "choices", choices)
    lines = printed("this", "gemv : wg=64").splitlines()
    assert [line.split() for line in lines[2:5]] == [["Q4_K", "Q8_0"], ["a", "1", "."], ["b", "1", "1"]]
    assert lines[5] == "1 device without a difference"
    assert "Q4_K: wg 128 -> 64" in lines and "    on a, b" in lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("this", "no-such-thing"),
            "--diff no-such-thing: expected 'this', a folder with a build, a commit of this checkout, tuning tables",
        ),
        (("nvidia_h200_linux", "this"), "a recorded device is compared with another one, not with this"),
        (("this", "gemv : wgg=4"), "wgg"),
        (("this", "this", "--measure"), "--diff excludes --device and --measure"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: tuple[str, ...], said: str) -> None:
    ran = CliRunner().invoke(cli.app, ["plan", "--diff", *arguments])
    assert said in str(ran.exception)


def test_a_table_that_no_device_reads_says_so(tmp_path: Path) -> None:
    table = tmp_path / "device_my_card.toml"
    table.write_text('[[gemv]]\nset = { wg = 64 }\nmeasured = "x"\n')
    ran = CliRunner().invoke(cli.app, ["plan", "--diff", "this", str(table), *H200])
    assert "never read: that of nvidia_h200_linux is called device_nvidia_h200.toml" in str(ran.exception)


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "vkback").mkdir()
    (tmp_path / "vkback" / "__init__.py").write_text("")
    ran = CliRunner().invoke(cli.app, ["plan", "--diff", "this", str(tmp_path), *H200, "--shape", "tiny-llama-Q8_0"])
    assert "this build may be older than what --diff asks of it" in str(ran.exception)
