"""Damaged model files: what tools/fuzz_gguf.py makes of them, and that it notices what must not happen."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tools import fuzz_gguf
from tools.fuzz_gguf import Limits, Tables, damaged, fuzz, judge
from vkback.errors import VkbackError
from vkback.models import Model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Tables]:
    return fuzz_gguf.sources(tmp_path_factory.mktemp("sources"))


def test_what_it_damages_is_sound_before(files: list[Tables], tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    for tables in files:
        tables.encode().write(path)
        assert Tables.read(path) == Tables(path.name, tables.keys, tables.infos, tables.data_bytes)
        Model.open(path)


def test_damaged_files_load_or_are_refused(files: list[Tables], tmp_path: Path) -> None:
    """The first 300 of `tools/fuzz_gguf.py`, in this process. Whatever raises anything else than a VkbackError of the right form fails."""
    path = tmp_path / "damaged.gguf"
    fates = Counter[bool]()
    for number in range(300):
        damaged(files, 0, number).encoded.write(path)
        fates[judge(path, number) == ""] += 1
    assert min(fates.values()) >= 15, "damage that never or always matters tests nothing"


def test_a_number_is_always_the_same_file(files: list[Tables], tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, number in zip(paths, (7, 7, 26), strict=True):
        damaged(files, 5, number).encoded.write(path)
    first, same, other = (path.read_bytes() for path in paths)
    assert first == same != other


def bad_judge(path: Path, number: int) -> str:
    """Every way in which a file must not end."""
    if number == 1:
        time.sleep(60)
    if number == 2:
        os.abort()
    if number == 3:
        np.ones(1 << 26)
    if number == 4:
        raise KeyError("blk.0")
    if number == 5:
        os._exit(0)
    return "refused" if number == 6 else ""


def test_what_must_not_happen_is_noticed_and_the_rest_goes_on(files: list[Tables]) -> None:
    found = {r.number: r for r in fuzz(files, 0, range(8), processes=2, judge=bad_judge, limits=Limits(2.0, 64 << 20))}
    assert sorted(found) == list(range(8))
    defects = {number: r.defect for number, r in found.items() if r.defect}
    assert sorted(defects) == [1, 2, 3, 4, 5]
    assert defects[1].startswith("more than 2 s") and "bad_judge" in defects[1]
    assert "exit code -6" in defects[2] and "bad_judge" in defects[2]
    assert defects[3].startswith("more than 64 MiB of memory") and "bad_judge" in defects[3]
    assert "KeyError: 'blk.0'" in defects[4] and "exit code 0" in defects[5]
    assert found[6].refusal == "refused" and found[3].mutations == damaged(files, 0, 3).mutations


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[gguf] {path}: two\nlines", "not one line"),
        ("[gguf] {path}: " + 2000 * "x", "not one line of at most 1200 characters"),
        ("[gguf] something is wrong", "does not name the file"),
    ],
)
def test_an_error_of_the_wrong_form_is_a_defect(text: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(path: Path, profile: str) -> None:
        raise VkbackError(text.format(path=path))

    monkeypatch.setattr(fuzz_gguf, "load", load)
    with pytest.raises(fuzz_gguf.Defect, match=says):
        judge(tmp_path / "m.gguf", 0)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert fuzz_gguf.main(["--count", "20", "-j", "1", "-v"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"20 damaged copies of \d+ files, seed 0: 0 defects", out) and " times     as  refusal" in out
    assert fuzz_gguf.main(["--only", "0", "--keep", str(tmp_path / "kept.gguf")]) == 0
    assert (tmp_path / "kept.gguf").exists() and capsys.readouterr().out.startswith(f"{tmp_path}/kept.gguf, from demo-")
