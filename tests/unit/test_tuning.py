"""Tuning tables: what wins, what is refused and in which words, and that the tables vkback comes with are sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import vkback.plan.schedule_choice  # noqa: F401  declares every family
from vkback.device import Capabilities, profile_ids
from vkback.device.architecture import BY_ID, BY_NAME, DRIVERS, driver_class, known_class
from vkback.ops.family import FAMILIES, Chooser
from vkback.ops.lowering import LowerContext
from vkback.paths import tuning_root, user_tuning_root
from vkback.plan.exact import exact_context
from vkback.tuning.lookup import Overrides, Tuning, device_table, identity, slug, tables_text, with_overrides
from vkback.tuning.overrides import override_rows
from vkback.tuning.row import TuningError
from vkback.tuning.table import load_table, parse_table

CARD = Capabilities.from_profile("amd_rx_7900_xtx_radv")
WHY = 'measured = "test"'
ROW = "[tuning] default.toml [[gemv]] row 1: "
DEFAULT = f"""
[[gemv]]
{WHY}
[gemv.set]
wg = 128
lanes = 32
rows = 2
unroll = 2
prefetch = "weights"
lane_order = "strided"
scales = "weights"
x_in_shared = false
pairs_in_shared = false
groups = "per_tile"
subgroup = "default"
"""


def row(*lines: str, family: str = "gemv") -> str:
    return "\n".join([f"[[{family}]]", *lines, WHY, ""])


def tables(folder: Path, **files: str) -> Tuning:
    (folder / "default.toml").write_text(DEFAULT)
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return Tuning.for_device(CARD, folder)


def query(**changed: object) -> dict[str, object]:
    fused = {"experts": "none", "glu": False, "y": "F32", "prologue": "none"}
    return {"quant": "Q4_K", "decoder": "bits", "path": "int", "m": 4096, "k": 4096, "n": 1, **fused, **changed}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[gemv]", "[tuning] default.toml: not valid TOML: Expected ']]' at the end of an array declaration (at line 1, column 7)"),
        ("[[matvec]]", "[tuning] default.toml: unknown family 'matvec', expected one of argmax, attention"),
        ("[[mat_vec]]", "[tuning] default.toml: unknown family 'mat_vec'; it is called [[gemv]] now, expected one of argmax"),
        (
            row('set = { way = "plain" }', family="attention"),
            "[tuning] default.toml [[attention]] row 1: unknown parameter 'way'; it is called kernel now, expected one of groups",
        ),
        ("[gemv]", "[tuning] default.toml: gemv must be rows, written [[gemv]]"),
        (row("set = { rows = 2 }", 'qant = "Q4_K"'), ROW + "unknown key 'qant', expected one of decoder, experts, glu, k, m, n,"),
        (row('quant = "Q4_K"'), ROW + "has no `set = { ... }`"),
        ("[[gemv]]\nset = { rows = 2 }", ROW + 'has no evidence; add `measured = "..."` with date, device,'),
        ('[[gemv]]\nset = { rows = 2 }\nmeasured = " "', ROW + "has no evidence"),
        (row("set = { row = 2 }"), ROW + "unknown parameter 'row', expected one of groups, lane_order, lanes, pairs_in_shared,"),
        (row('set = { rows = "2" }'), ROW + 'rows = "2" in quotes is a text and is not legal, expected one of 1, 2, 4, 8, 16, 32'),
        (row('set = { groups = "8" }'), ROW + """groups = "8" in quotes is a text, expected an integer from 1, or 'per_tile'"""),
        (
            row("set = { rows = 2 }", 'when = { quant = "Q4_K" }'),
            ROW + "unknown key 'when' (keys stand in the row itself, as quant = \"Q4_K\"), expected one of",
        ),
        (row("set = { rows = 3 }"), ROW + "rows = 3 is not legal, expected one of 1, 2, 4, 8, 16, 32"),
        (row("set = { prefetch = true }"), ROW + "prefetch = true is not legal, expected one of none, weights, weights+x"),
        (row("set = { groups = -1 }"), ROW + "groups = -1, expected an integer from 1, or 'per_tile'"),
        (
            row("set = { groups = 0 }", family="attention"),
            "[tuning] default.toml [[attention]] row 1: groups = 0, expected an integer from 1",
        ),
        (
            row("set = { rows = 2 }", "m = { min = 4096, max = 1024 }"),
            ROW + "m = {'min': 4096, 'max': 1024} is not a range; write { min = .., max = .. }, whole numbers,",
        ),
        (row("set = { rows = 2 }", "m = { least = 4096 }"), ROW + "m = {'least': 4096} is not a range"),
        (row("set = { rows = 2 }", 'm = "4096"'), ROW + "m must be a whole number or a range"),
        (row("set = { rows = 2 }", "quant = { min = 4 }"), ROW + "quant must be a word or a list of words,"),
        (
            row("set = { rows = 2 }", 'quant = ["Q4_K", "Q4K"]'),
            ROW + "matches nothing: quant = 'Q4K', expected one of F32, F16, BF16, Q4_0,",
        ),
        (row("set = { rows = 2 }", "quant = []"), ROW + "matches nothing: quant = [], expected one of F32,"),
        (row("set = { rows = 2 }", "experts = 3"), ROW + "matches nothing: experts = 3, expected one of none, each, summed"),
        (row("set = { rows = 2 }", "glu = { min = 2 }"), ROW + "glu must be true or false, got {'min': 2}"),
        (row("set = { rows = 2 }", "glu = 1"), ROW + "matches nothing: glu = 1, expected one of false, true"),
        (row("set = { x_in_shared = 1 }"), ROW + "x_in_shared = 1 is not legal, expected one of false, true"),
        (
            row("set = { rows = 2 }", 'quant = ["F16", "F32"]', 'path = "int"'),
            ROW + "matches nothing: there is no gemv with quant = F16|F32 and path = int",
        ),
        (row("set = { rows = 2 }", 'architecture = "rdna2"'), ROW + "architecture belongs in a vendor's table:"),
    ],
)
def test_a_broken_table_is_refused_with_file_row_and_reason(text: str, said: str) -> None:
    with pytest.raises(TuningError) as error:
        parse_table(text, "default.toml")
    assert str(error.value).startswith(said)


def test_a_table_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "default.toml").write_bytes(b"[[gemv]]\xff")
    with pytest.raises(TuningError, match=r"^\[tuning\] .*default\.toml: not UTF-8 text: invalid start byte at byte 8$"):
        load_table(tmp_path / "default.toml")


def test_an_architecture_that_a_vendor_does_not_have_is_refused() -> None:
    text = row("set = { rows = 2 }") + row("set = { rows = 4 }", 'architecture = ["rdna2", "ampere"]')
    with pytest.raises(TuningError) as error:
        parse_table(text, "amd.toml")
    said = "[tuning] amd.toml [[gemv]] row 2: matches nothing: amd has no architecture 'ampere', expected one of gcn4, gcn5, rdna1,"
    assert str(error.value).startswith(said)


def test_a_table_that_no_device_has_is_refused() -> None:
    with pytest.raises(TuningError) as error:
        parse_table(DEFAULT, "nvidea.toml")
    assert str(error.value).startswith("[tuning] nvidea.toml: no device has this table; expected default, device_NAME or one of amd,")


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (
            ("m = { max = 4096 }",),
            ("m = { min = 4096 }",),
            "[tuning] amd.toml [[gemv]] row 2 (m >= 4096): overlaps row 1 (m <= 4096), and they disagree on rows (2 and 4); "
            "name a further key in one of them, or ranges that do not meet",
        ),
        (
            ('quant = ["Q4_K", "Q5_K"]',),
            ('quant = ["Q5_K", "Q6_K"]',),
            "[tuning] amd.toml [[gemv]] row 2 (quant = Q5_K|Q6_K): overlaps row 1 (quant = Q4_K|Q5_K), and they disagree on rows",
        ),
        (
            ("glu = true", "m = { max = 4096 }"),
            ("glu = true", "m = { min = 1024, max = 8192 }"),
            "[tuning] amd.toml [[gemv]] row 2 (glu = true, 1024 <= m <= 8192): overlaps row 1 (glu = true, m <= 4096), and they",
        ),
        ((), (), "[tuning] amd.toml [[gemv]] row 2 (anything): overlaps row 1 (anything), and they disagree on rows (2 and 4);"),
    ],
)
def test_rows_of_one_table_that_overlap_and_disagree_are_refused(a: tuple[str, ...], b: tuple[str, ...], said: str) -> None:
    with pytest.raises(TuningError) as error:
        parse_table(row("set = { rows = 2 }", *a) + row("set = { rows = 4 }", *b), "amd.toml")
    assert str(error.value).startswith(said)


def test_rows_that_overlap_may_agree_or_leave_the_decision_to_a_third(tmp_path: Path) -> None:
    halves = row("set = { rows = 2, lanes = 16 }", "m = { max = 4096 }") + row("set = { rows = 4, lanes = 16 }", "m = { min = 2048 }")
    with pytest.raises(TuningError, match=r"disagree on rows \(2 and 4\);"):
        parse_table(halves, "amd.toml")
    found = tables(tmp_path, amd=halves + row("set = { rows = 8 }", "m = { min = 2048, max = 4096 }"))
    assert [found.pick("gemv", **query(m=m)).params["rows"] for m in (2047, 2048, 4096, 4097)] == [2, 8, 8, 4]
    assert found.pick("gemv", **query(m=4096)).params["lanes"] == 16


def test_rows_of_different_architectures_do_not_meet(tmp_path: Path) -> None:
    text = row("set = { rows = 2 }", 'architecture = ["gcn4", "gcn5"]') + row("set = { rows = 8 }", 'architecture = "rdna3"')
    assert tables(tmp_path, amd=text).pick("gemv", **query()).params["rows"] == 8


def test_rows_for_a_driver_stand_beside_those_for_an_architecture(tmp_path: Path) -> None:
    driver = row("set = { rows = 4 }", 'driver = "mesa_radv"', 'experts = "none"')
    text = row("set = { rows = 8, lanes = 8 }", 'architecture = "rdna3"') + driver
    choice = tables(tmp_path, amd=text).pick("gemv", **query())
    assert (choice.params["rows"], choice.params["lanes"]) == (4, 8)
    assert tables(tmp_path, amd=text.replace("mesa_radv", "amd_proprietary")).pick("gemv", **query()).params["rows"] == 8
    with pytest.raises(TuningError, match=r"row 2 \(driver = mesa_radv\): overlaps row 1 \(architecture = rdna3\), and they"):
        parse_table(text.replace('\nexperts = "none"', ""), "amd.toml")
    with pytest.raises(TuningError, match="row 1: matches nothing: amd has no driver 'radv', expected one of amd_proprietary, "):
        parse_table(row("set = { rows = 8 }", 'driver = "radv"'), "amd.toml")


def test_a_row_that_never_wins_is_refused() -> None:
    text = row("set = { rows = 2 }", "n = { max = 1 }") + row("set = { rows = 4, lanes = 16 }", "n = { min = 0 }", "m = { min = 0 }")
    with pytest.raises(TuningError) as error:
        parse_table(text, "amd.toml")
    assert str(error.value) == "[tuning] amd.toml [[gemv]] row 1: never wins: row 2 (n >= 0, m >= 0) comes first wherever it matches"


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
    assert tables(tmp_path).pick("gemv", **query()).params["rows"] == 2
    assert tables(tmp_path, amd=levels["vendor"]).pick("gemv", **query()).params["rows"] == 4
    assert tables(tmp_path, amd=levels["vendor"] + levels["architecture"]).pick("gemv", **query()).params["rows"] == 8
    found = tables(tmp_path, device_amd_radeon_rx_7900_xtx_radv_navi31=levels["device"])
    choice = found.pick("gemv", **query())
    assert (choice.params["rows"], choice.params["lanes"], choice.params["wg"]) == (16, 16, 128)
    assert choice.source == "device_amd_radeon_rx_7900_xtx_radv_navi31.toml [[gemv]] row 1"
    assert found.pick("gemv", **query(path="float")).params["rows"] == 8
    (mine / device_table(CARD)).write_text(row("set = { rows = 32 }", 'quant = "Q4_K"'))
    yours = Tuning.for_device(CARD, tmp_path, user=mine).pick("gemv", **query())
    assert yours.params["rows"] == 32
    assert yours.source == f"{mine / device_table(CARD)} [[gemv]] row 1"


def test_within_a_table_more_keys_win_then_the_narrower_range_whatever_the_order(tmp_path: Path) -> None:
    rows = [
        row("set = { rows = 1 }"),
        row("set = { rows = 32 }", 'prologue = "norm"'),
        row("set = { lanes = 8 }", 'y = "Q8_1"'),
        row("set = { rows = 2 }", 'quant = ["Q4_K", "Q6_K"]'),
        row("set = { rows = 4 }", 'quant = "Q4_K"'),
        row("set = { rows = 8 }", 'quant = "Q4_K"', "m = { min = 8192 }"),
        row("set = { rows = 16 }", 'quant = "Q4_K"', "m = { min = 16384, max = 32768 }"),
    ]
    for order in (rows, rows[::-1]):
        found = tables(tmp_path, amd="".join(order))
        picked = [
            found.pick("gemv", **query(quant=q, m=m)).params["rows"]
            for q, m in (("Q5_K", 8192), ("Q6_K", 8192), ("Q4_K", 8191), ("Q4_K", 8192), ("Q4_K", 32768), ("Q4_K", 32769))
        ]
        assert picked == [1, 2, 4, 8, 16, 8]
        normed = found.pick("gemv", **query(prologue="norm", y="Q8_1"))
        assert (normed.params["rows"], normed.params["lanes"]) == (32, 8)
        assert [r.about for r in found.rows("gemv", query(prologue="norm", y="Q8_1"))[:2]] == ["y = Q8_1", "prologue = norm"]


def test_every_parameter_knows_its_row(tmp_path: Path) -> None:
    found = tables(tmp_path, amd=row("set = { rows = 4 }", 'quant = "Q4_K"'))
    origins = found.origins("gemv", query())
    assert origins["rows"].where == "amd.toml [[gemv]] row 1"
    assert origins["rows"].about == "quant = Q4_K"
    assert origins["wg"].where == "default.toml [[gemv]] row 1"


def test_default_must_set_everything(tmp_path: Path) -> None:
    (tmp_path / "default.toml").write_text(row("set = { rows = 2 }"))
    with pytest.raises(TuningError, match=r"no row of family 'gemv' sets \['wg', 'lanes', .*: default.toml must have one"):
        Tuning.for_device(CARD, tmp_path).pick("gemv", **query())


def test_an_edited_table_is_read_again(tmp_path: Path) -> None:
    assert tables(tmp_path, amd=row("set = { rows = 4 }")).pick("gemv", **query()).params["rows"] == 4
    assert tables(tmp_path, amd=row("set = { rows = 16 }")).pick("gemv", **query()).params["rows"] == 16


def test_overrides_answer_what_they_are_told_to(tmp_path: Path) -> None:
    overrides = Overrides(tables(tmp_path), {"gemv": {"rows": 8}}, "sweep")
    choice = overrides.pick("gemv", **query())
    assert (choice.params["rows"], choice.params["wg"], choice.source) == (8, 128, "sweep")


def test_overrides_everywhere_answer_in_the_families_that_have_a_parameter(tmp_path: Path) -> None:
    (tmp_path / "default.toml").write_text(DEFAULT + row('set = { path = "int" }', family="gemv_path"))
    overrides = Overrides.everywhere(Tuning.for_device(CARD, tmp_path), {"rows": 8}, "test")
    assert overrides.pick("gemv", **query()).params["rows"] == 8
    other = overrides.pick("gemv_path")
    assert (dict(other.params), other.source) == ({"path": "int"}, "default.toml [[gemv_path]] row 1")


@pytest.mark.parametrize(
    ("params", "match", "says"),
    [
        ({"gemvs": {"rows": 8}}, {}, r"\[tuning\] sweep: gemvs: no such family, expected one of .*gemv"),
        ({"gemv": {"row": 8}}, {}, r"\[tuning\] sweep: gemv: unknown parameter 'row', expected one of .*rows"),
        ({"gemv": {"rows": 3}}, {}, r"\[tuning\] sweep: gemv: rows = 3 is not legal, expected one of 1, 2"),
        ({"schedule": {"router": "product"}}, {}, r"router = product is not legal, expected one of gemv, experts, stage"),
        ({"weight_layout": {"codes": "pairs"}}, {}, r"weight_layout: only tables set it: weights lie on the device as they were loaded"),
        ({"gemv": {"rows": 8}}, {"cols": 4}, r"\[tuning\] sweep: gemv: unknown key 'cols', expected one of .*quant"),
        ({"gemv": {"rows": 8}}, {"quant": "Q9_K"}, r"gemv: matches nothing: quant = 'Q9_K', expected one of .*Q8_0"),
    ],
)
def test_overrides_refuse_what_no_table_could_say(params: dict[str, Any], match: dict[str, Any], says: str) -> None:
    with pytest.raises(TuningError, match=says):
        Overrides(Tuning.for_device(CARD), params, "sweep", match)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"codes": "pairs"}, "test: codes=pairs: no parameter is called codes"),
        ({"way": "plain"}, "test: way=plain: no parameter is called way; it is called kernel now"),
        ({"kernel": "plane"}, "kernel=plane: plane is not legal, expected one of .*decode, decode_matrix, plain, matrix.*"),
        ({"kernel": "plane"}, "kernel=plane: plane is not legal, expected one of .*gemv, coop_mat, coop_reg, int_dot, f32"),
        ({"none_has_this": 1}, "test: none_has_this=1: no parameter is called none_has_this"),
        ({"lane_order": "zigzag"}, "test: lane_order=zigzag: zigzag is not legal"),
    ],
)
def test_overrides_everywhere_refuse_what_no_family_takes(params: dict[str, Any], says: str) -> None:
    with pytest.raises(TuningError, match=says):
        Overrides.everywhere(Tuning.for_device(CARD), params, "test")


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


GROUP = """
[[gemv]]
architecture = "rdna3"
experts = "none"
set = { unroll = 4, rows = 2 }

[[gemv.row]]
quant = "Q4_K"
set = { rows = 4 }
measured = "four"

[[gemv.row]]
quant = "Q5_K"
m = { max = 1024 }
measured = "two"
"""


def test_rows_of_a_group_have_its_keys_and_parameters(tmp_path: Path) -> None:
    first, second = sorted(parse_table(GROUP, "amd.toml"), key=lambda r: r.number)
    assert [r.label for r in (first, second)] == ["1.1", "1.2"]
    assert first.match == {"experts": "none", "quant": "Q4_K"}
    assert (first.set, first.measured, first.about) == (
        {"unroll": 4, "rows": 4},
        "four",
        "architecture = rdna3, experts = none, quant = Q4_K",
    )
    assert (second.set, second.match["m"]) == ({"unroll": 4, "rows": 2}, {"max": 1024})
    choice = tables(tmp_path, amd=GROUP).pick("gemv", **query())
    assert (choice["rows"], choice["unroll"], choice.source) == (4, 4, "amd.toml [[gemv]] row 1.1")


def test_a_group_with_evidence_is_a_row_too() -> None:
    text = GROUP.replace("rows = 2 }", 'rows = 2 }\nmeasured = "all"', 1)
    assert [r.label for r in sorted(parse_table(text, "amd.toml"), key=lambda r: r.number)] == ["1", "1.1", "1.2"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("set = { rows = 4 }", "set = { rows = 3 }", "row 1.1: rows = 3 is not legal"),
        ('measured = "two"', "", "row 1.2: has no evidence"),
        ('quant = "Q4_K"', 'experts = "each"', "row 1.1: experts is among what its group says already; leave it out here or there"),
        ('measured = "four"', 'measured = "four"\n[[gemv.row.row]]', "row 1.1: a row of a group has no rows of its own"),
        ("set = { unroll = 4, rows = 2 }", "", "row 1.2: has no `set = { ... }`"),
        ("set = { unroll = 4, rows = 2 }", "row = 1", "row 1: the rows of a group are written [[gemv.row]]"),
    ],
)
def test_a_broken_row_of_a_group_is_refused(old: str, new: str, said: str) -> None:
    text = GROUP.replace(old, new) if not new.startswith("row =") else "[[gemv]]\nrow = 1\n"
    with pytest.raises(TuningError) as error:
        parse_table(text, "amd.toml")
    assert str(error.value).startswith(f"[tuning] amd.toml [[gemv]] {said}")


def test_no_number_stands_for_a_word() -> None:
    """What a row matches or sets is a word, a boolean, or a quantity."""
    for name, family in FAMILIES.items():
        for key, kind in family.match.items():
            assert kind == "number" or kind == "word" or all(isinstance(v, (str, bool)) for v in kind), (name, key)
        for key, legal in family.set.items():
            assert not isinstance(legal, tuple) or all(isinstance(v, (str, bool)) or v > 0 for v in legal), (name, key)


def test_overrides_from_a_command_line_take_words_booleans_and_numbers() -> None:
    rows = override_rows("gemv experts=each glu=true n=1 : wg=512 x_in_shared=true prefetch=weights+x; schedule : sync=barrier")
    assert (rows[0].match, rows[0].set) == (
        {"experts": "each", "glu": True, "n": 1},
        {"wg": 512, "x_in_shared": True, "prefetch": "weights+x"},
    )
    assert rows[1].set == {"sync": "barrier"}
    with pytest.raises(TuningError, match=r"x_in_shared = 1 is not legal, expected one of false, true"):
        override_rows("gemv : x_in_shared=1")


def test_tables_that_may_choose_otherwise_are_told_apart() -> None:
    whole = Tuning.for_device(CARD)
    assert identity(whole) == identity(Tuning.for_device(CARD)) and len(identity(whole)) == 12
    overridden = with_overrides(whole, "gemv : rows=4")
    others: list[Chooser] = [overridden, Overrides(whole, {"gemv": {"rows": 4}}, "test"), Tuning(whole.tables[1:])]
    assert len({identity(whole), *map(identity, others)}) == 4
    evidence = with_overrides(whole, "gemv : rows=4")
    assert identity(evidence) == identity(overridden)


def test_a_table_that_is_never_read_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("VKBACK_TUNING", str(tmp_path))
    for name in ("mycard.toml", "device_another_card.toml", "notes.txt"):
        (tmp_path / name).write_text("")
    for _ in range(2):
        Tuning.for_device(CARD)
    said = f"{tmp_path / 'mycard.toml'} is never read: the table of this device is called {device_table(CARD)}"
    assert caplog.messages == [said]


def test_overrides_of_the_environment_come_before_all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Tuning.for_device(CARD)
    monkeypatch.setenv("VKBACK_OVERRIDES", "gemv quant=Q4_K : rows=8; schedule : sync=barrier")
    changed = Tuning.for_device(CARD)
    assert identity(changed) != identity(plain)
    assert tables_text(plain) == "amd.toml, default.toml"
    assert tables_text(changed) == "gemv quant=Q4_K : rows=8, schedule : sync=barrier, amd.toml, default.toml"
    monkeypatch.setenv("VKBACK_OVERRIDES", "gemv : row=8")
    with pytest.raises(TuningError, match="row"):
        Tuning.for_device(CARD)


def test_batch_invariant_plans_tell_their_tables_apart() -> None:
    """They said "", so that a store took results of any tables together."""
    contexts = [
        exact_context(LowerContext(CARD, tables))
        for tables in (Tuning.for_device(CARD), with_overrides(Tuning.for_device(CARD), "gemv : rows=8"))
    ]
    names = [identity(ctx.tuning) for ctx in contexts]
    assert all(names) and names[0] != names[1] and names[0] != identity(Tuning.for_device(CARD))
    assert tables_text(contexts[1].tuning) == "gemv : rows=8, amd.toml, default.toml"
