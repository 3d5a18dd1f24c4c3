"""Tuning tables: what wins, what is refused and in which words, and that the tables vkback comes with are sound."""

from __future__ import annotations

from pathlib import Path

import pytest

import vkback.plan.fuse  # noqa: F401  declares every family
from vkback.device import Capabilities, profile_ids
from vkback.device.architecture import BY_ID, BY_NAME, DRIVERS, driver_class, known_class
from vkback.ops.base import FAMILIES
from vkback.paths import tuning_root, user_tuning_root
from vkback.plan.tuning import Overrides, Tuning, TuningError, device_table, load_table, parse_table, slug

CARD = Capabilities.from_profile("amd_rx_7900_xtx_radv")
WHY = 'measured = "test"'
ROW = "[tuning] default.toml [[mat_vec]] row 1: "
DEFAULT = f"""
[[mat_vec]]
set = {{ wg = 128, lanes = 32, rows = 2, unroll = 2, prefetch = 1, adjoin = 0, stage = 0, groups = 0, subgroup = 0 }}
{WHY}
"""


def row(*lines: str, family: str = "mat_vec") -> str:
    return "\n".join([f"[[{family}]]", *lines, WHY, ""])


def tables(folder: Path, **files: str) -> Tuning:
    (folder / "default.toml").write_text(DEFAULT)
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return Tuning.for_device(CARD, folder)


def query(**changed: object) -> dict[str, object]:
    return {"quant": "Q4_K", "path": "int", "m": 4096, "k": 4096, "n": 1, "ids": 0, "glu": 0, "y": "F32", "prologue": 0, **changed}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[mat_vec]", "[tuning] default.toml: not valid TOML: Expected ']]' at the end of an array declaration (at line 1, column 10)"),
        ("[[matvec]]", "[tuning] default.toml: unknown family 'matvec', expected one of argmax, attention"),
        ("[mat_vec]", "[tuning] default.toml: mat_vec must be rows, written [[mat_vec]]"),
        (row("set = { rows = 2 }", 'qant = "Q4_K"'), ROW + "unknown key 'qant', expected one of glu, ids, k, m, n,"),
        (row('quant = "Q4_K"'), ROW + "has no `set = { ... }`"),
        ("[[mat_vec]]\nset = { rows = 2 }", ROW + 'has no evidence; add `measured = "..."` with date, device,'),
        ('[[mat_vec]]\nset = { rows = 2 }\nmeasured = " "', ROW + "has no evidence"),
        (row("set = { row = 2 }"), ROW + "unknown parameter 'row', expected one of adjoin, groups, lanes, prefetch,"),
        (row("set = { rows = 3 }"), ROW + "rows = 3 is not legal, expected one of 1, 2, 4, 8, 16, 32"),
        (row("set = { prefetch = true }"), ROW + "prefetch = True is not legal, expected one of 0, 1"),
        (row("set = { groups = -1 }"), ROW + "groups = -1, expected an integer from 0"),
        (row("set = { groups = 0 }", family="attention"),
         "[tuning] default.toml [[attention]] row 1: groups = 0, expected an integer from 1"),
        (row("set = { rows = 2 }", "m = { min = 4096, max = 1024 }"),
         ROW + "m = {'min': 4096, 'max': 1024} is not a range; write { min = .., max = .. }, whole numbers,"),
        (row("set = { rows = 2 }", "m = { least = 4096 }"), ROW + "m = {'least': 4096} is not a range"),
        (row("set = { rows = 2 }", 'm = "4096"'), ROW + "m must be a whole number or a range"),
        (row("set = { rows = 2 }", "quant = { min = 4 }"), ROW + "quant must be a word or a list of words,"),
        (row("set = { rows = 2 }", 'quant = ["Q4_K", "Q4K"]'),
         ROW + "matches nothing: quant = 'Q4K', expected one of F32, F16, BF16, Q4_0,"),
        (row("set = { rows = 2 }", "quant = []"), ROW + "matches nothing: quant = [], expected one of F32,"),
        (row("set = { rows = 2 }", "ids = 3"), ROW + "matches nothing: ids = 3, expected one of 0, 1, 2"),
        (row("set = { rows = 2 }", "glu = { min = 2 }"), ROW + "matches nothing: glu >= 2, expected one of 0, 1"),
        (row("set = { rows = 2 }", 'quant = ["F16", "F32"]', 'path = "int"'),
         ROW + "matches nothing: there is no mat_vec with quant = F16|F32 and path = int"),
        (row("set = { rows = 2 }", 'architecture = "rdna2"'), ROW + "architecture belongs in a vendor's table:"),
    ],
)  # fmt: skip
def test_a_broken_table_is_refused_with_file_row_and_reason(text: str, said: str) -> None:
    with pytest.raises(TuningError) as error:
        parse_table(text, "default.toml")
    assert str(error.value).startswith(said)


def test_an_architecture_that_a_vendor_does_not_have_is_refused() -> None:
    text = row("set = { rows = 2 }") + row("set = { rows = 4 }", 'architecture = ["rdna2", "ampere"]')
    with pytest.raises(TuningError) as error:
        parse_table(text, "amd.toml")
    said = "[tuning] amd.toml [[mat_vec]] row 2: matches nothing: amd has no architecture 'ampere', expected one of gcn4, gcn5, rdna1,"
    assert str(error.value).startswith(said)


def test_a_table_that_no_device_has_is_refused() -> None:
    with pytest.raises(TuningError) as error:
        parse_table(DEFAULT, "nvidea.toml")
    assert str(error.value).startswith("[tuning] nvidea.toml: no device has this table; expected default, device_NAME or one of amd,")


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (("m = { max = 4096 }",), ("m = { min = 4096 }",),
         "[tuning] amd.toml [[mat_vec]] row 2 (m >= 4096): overlaps row 1 (m <= 4096), and they disagree on rows (2 and 4); "
         "name a further key in one of them, or ranges that do not meet"),
        (('quant = ["Q4_K", "Q5_K"]',), ('quant = ["Q5_K", "Q6_K"]',),
         "[tuning] amd.toml [[mat_vec]] row 2 (quant = Q5_K|Q6_K): overlaps row 1 (quant = Q4_K|Q5_K), and they disagree on rows"),
        (("glu = 1", "m = { max = 4096 }"), ("glu = 1", "m = { min = 1024, max = 8192 }"),
         "[tuning] amd.toml [[mat_vec]] row 2 (glu = 1, 1024 <= m <= 8192): overlaps row 1 (glu = 1, m <= 4096), and they disagree on"),
        ((), (), "[tuning] amd.toml [[mat_vec]] row 2 (anything): overlaps row 1 (anything), and they disagree on rows (2 and 4);"),
    ],
)  # fmt: skip
def test_rows_of_one_table_that_overlap_and_disagree_are_refused(a: tuple[str, ...], b: tuple[str, ...], said: str) -> None:
    with pytest.raises(TuningError) as error:
        parse_table(row("set = { rows = 2 }", *a) + row("set = { rows = 4 }", *b), "amd.toml")
    assert str(error.value).startswith(said)


def test_rows_that_overlap_may_agree_or_leave_the_decision_to_a_third(tmp_path: Path) -> None:
    halves = row("set = { rows = 2, lanes = 16 }", "m = { max = 4096 }") + row("set = { rows = 4, lanes = 16 }", "m = { min = 2048 }")
    with pytest.raises(TuningError, match=r"disagree on rows \(2 and 4\);"):
        parse_table(halves, "amd.toml")
    found = tables(tmp_path, amd=halves + row("set = { rows = 8 }", "m = { min = 2048, max = 4096 }"))
    assert [found.pick("mat_vec", **query(m=m)).params["rows"] for m in (2047, 2048, 4096, 4097)] == [2, 8, 8, 4]
    assert found.pick("mat_vec", **query(m=4096)).params["lanes"] == 16


def test_rows_of_different_architectures_do_not_meet(tmp_path: Path) -> None:
    text = row("set = { rows = 2 }", 'architecture = ["gcn4", "gcn5"]') + row("set = { rows = 8 }", 'architecture = "rdna3"')
    assert tables(tmp_path, amd=text).pick("mat_vec", **query()).params["rows"] == 8


def test_rows_for_a_driver_stand_beside_those_for_an_architecture(tmp_path: Path) -> None:
    text = row("set = { rows = 8, lanes = 8 }", 'architecture = "rdna3"') + row("set = { rows = 4 }", 'driver = "mesa_radv"', "ids = 0")
    choice = tables(tmp_path, amd=text).pick("mat_vec", **query())
    assert (choice.params["rows"], choice.params["lanes"]) == (4, 8)
    assert tables(tmp_path, amd=text.replace("mesa_radv", "amd_proprietary")).pick("mat_vec", **query()).params["rows"] == 8
    with pytest.raises(TuningError, match=r"row 2 \(driver = mesa_radv\): overlaps row 1 \(architecture = rdna3\), and they"):
        parse_table(text.replace("\nids = 0", ""), "amd.toml")
    with pytest.raises(TuningError, match="row 1: matches nothing: amd has no driver 'radv', expected one of amd_proprietary, "):
        parse_table(row("set = { rows = 8 }", 'driver = "radv"'), "amd.toml")


def test_a_row_that_never_wins_is_refused() -> None:
    text = row("set = { rows = 2 }", "ids = { max = 1 }") + row("set = { rows = 4, lanes = 16 }", "ids = { min = 0 }", "m = { min = 0 }")
    with pytest.raises(TuningError) as error:
        parse_table(text, "amd.toml")
    assert str(error.value) == "[tuning] amd.toml [[mat_vec]] row 1: never wins: row 2 (ids >= 0, m >= 0) comes first wherever it matches"


def test_device_beats_architecture_beats_vendor_beats_default(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    levels = {
        "vendor": row("set = { rows = 4, lanes = 16 }", 'quant = "Q4_K"', "m = { min = 1 }"),
        "architecture": row("set = { rows = 8 }", 'architecture = "rdna3"'),
        "device": row("set = { rows = 16 }", 'path = "int"'),
    }
    default = Tuning.for_device(CARD, tmp_path)
    assert not default.tables
    assert tables(tmp_path).pick("mat_vec", **query()).params["rows"] == 2
    assert tables(tmp_path, amd=levels["vendor"]).pick("mat_vec", **query()).params["rows"] == 4
    assert tables(tmp_path, amd=levels["vendor"] + levels["architecture"]).pick("mat_vec", **query()).params["rows"] == 8
    found = tables(tmp_path, device_amd_radeon_rx_7900_xtx_radv_navi31=levels["device"])
    choice = found.pick("mat_vec", **query())
    assert (choice.params["rows"], choice.params["lanes"], choice.params["wg"]) == (16, 16, 128)
    assert choice.source == "device_amd_radeon_rx_7900_xtx_radv_navi31.toml [[mat_vec]] row 1"
    assert found.pick("mat_vec", **query(path="float")).params["rows"] == 8
    (mine / device_table(CARD)).write_text(row("set = { rows = 32 }", 'quant = "Q4_K"'))
    yours = Tuning.for_device(CARD, tmp_path, user=mine).pick("mat_vec", **query())
    assert yours.params["rows"] == 32
    assert yours.source == f"{mine / device_table(CARD)} [[mat_vec]] row 1"


def test_within_a_table_more_keys_win_then_the_narrower_range_whatever_the_order(tmp_path: Path) -> None:
    rows = [
        row("set = { rows = 1 }"),
        row("set = { rows = 32 }", "prologue = 2"),
        row("set = { lanes = 8 }", 'y = "Q8_1"'),
        row("set = { rows = 2 }", 'quant = ["Q4_K", "Q6_K"]'),
        row("set = { rows = 4 }", 'quant = "Q4_K"'),
        row("set = { rows = 8 }", 'quant = "Q4_K"', "m = { min = 8192 }"),
        row("set = { rows = 16 }", 'quant = "Q4_K"', "m = { min = 16384, max = 32768 }"),
    ]
    for order in (rows, rows[::-1]):
        found = tables(tmp_path, amd="".join(order))
        picked = [found.pick("mat_vec", **query(quant=q, m=m)).params["rows"] for q, m in
                  (("Q5_K", 8192), ("Q6_K", 8192), ("Q4_K", 8191), ("Q4_K", 8192), ("Q4_K", 32768), ("Q4_K", 32769))]  # fmt: skip
        assert picked == [1, 2, 4, 8, 16, 8]
        normed = found.pick("mat_vec", **query(prologue=2, y="Q8_1"))
        assert (normed.params["rows"], normed.params["lanes"]) == (32, 8)
        assert [r.about for r in found.rows("mat_vec", query(prologue=2, y="Q8_1"))[:2]] == ["y = Q8_1", "prologue = 2"]


def test_every_parameter_knows_its_row(tmp_path: Path) -> None:
    found = tables(tmp_path, amd=row("set = { rows = 4 }", 'quant = "Q4_K"'))
    origins = found.origins("mat_vec", query())
    assert origins["rows"].where == "amd.toml [[mat_vec]] row 1"
    assert origins["rows"].about == "quant = Q4_K"
    assert origins["wg"].where == "default.toml [[mat_vec]] row 1"


def test_default_must_set_everything(tmp_path: Path) -> None:
    (tmp_path / "default.toml").write_text(row("set = { rows = 2 }"))
    with pytest.raises(TuningError, match=r"no row of family 'mat_vec' sets \['wg', 'lanes', .*: default.toml must have one"):
        Tuning.for_device(CARD, tmp_path).pick("mat_vec", **query())


def test_an_edited_table_is_read_again(tmp_path: Path) -> None:
    assert tables(tmp_path, amd=row("set = { rows = 4 }")).pick("mat_vec", **query()).params["rows"] == 4
    assert tables(tmp_path, amd=row("set = { rows = 16 }")).pick("mat_vec", **query()).params["rows"] == 16


def test_fixed_answers_by_hand_what_it_is_told_to(tmp_path: Path) -> None:
    fixed = Overrides(tables(tmp_path), {"mat_vec": {"rows": 8}}, "sweep")
    choice = fixed.pick("mat_vec", **query())
    assert (choice.params["rows"], choice.params["wg"], choice.source) == (8, 128, "sweep")


def test_fixed_everywhere_answers_in_the_families_that_have_a_parameter(tmp_path: Path) -> None:
    (tmp_path / "default.toml").write_text(DEFAULT + row('set = { path = "int" }', family="mat_vec_path"))
    fixed = Overrides.everywhere(Tuning.for_device(CARD, tmp_path), {"rows": 8, "none_has_this": 1}, "test")
    assert fixed.pick("mat_vec", **query()).params["rows"] == 8
    other = fixed.pick("mat_vec_path")
    assert (dict(other.params), other.source) == ({"path": "int"}, "default.toml [[mat_vec_path]] row 1")


def test_slugs() -> None:
    assert slug("AMD Radeon VII / Radeon Pro VII (RADV VEGA20)") == "amd_radeon_vii_radeon_pro_vii_radv_vega20"


def test_user_tables_have_a_folder_one_can_choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    assert user_tuning_root() == tmp_path
    monkeypatch.delenv("VKBACK_TUNING")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("sys.platform", "linux")
    assert user_tuning_root() == tmp_path / "config" / "vkback" / "tuning"


SHIPPED = sorted(tuning_root().glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=[p.stem for p in SHIPPED])
def test_the_tables_that_come_with_vkback_are_sound(path: Path) -> None:
    assert load_table(path)


def test_default_sets_every_parameter_of_every_family() -> None:
    rows = [r for r in load_table(tuning_root() / "default.toml") if not r.match]
    assert {r.family: set(r.set) for r in rows} == {name: set(family.set) for name, family in FAMILIES.items()}


def test_every_class_is_one_that_tables_may_name() -> None:
    for profile in profile_ids():
        caps = Capabilities.from_profile(profile)
        assert known_class(caps.vendor, caps.architecture), profile
        assert not caps.driver_id or driver_class(caps.driver_id) in DRIVERS, profile
    for vendor, rules in {**BY_ID, **BY_NAME}.items():
        assert all(known_class(vendor, name.replace(r"\1", "2")) for _, name in rules)
