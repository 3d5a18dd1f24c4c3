"""The journal of sweeps: what it remembers of a run that was cut short, of other kernels, and of a point that ended a run."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from vkback.autotune.journal import Journal
from vkback.autotune.search import SweepError
from vkback.autotune.share import share
from vkback.device import Capabilities
from vkback.tuning.lookup import device_table

IDENTITY = {"device": "Card", "driver": "1", "kernels": "k1"}
A, B = (64, 2), (128, 1)


def test_a_journal_survives_being_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "card.journal"
    journal = Journal(file, IDENTITY)
    with journal.trying("key", A):
        pass
    with suppress(KeyboardInterrupt), journal.trying("key", B):
        raise KeyboardInterrupt
    file.write_text(file.read_text() + '{"trying": "x", "po')
    again = Journal(file, IDENTITY)
    assert again.suspected("key", B) and not again.suspected("key", A) and not again.suspected("other", B)
    assert not again.finished("key")
    again.finish("gemv", "key", {"us": 7.5})
    third = Journal(file, IDENTITY)
    assert third.finished("key") and third.suspected("key", B)
    assert third.results("gemv") == {"key": {"us": 7.5}} and third.results("attention") == {}


def test_a_full_disk_names_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j", IDENTITY)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(SweepError, match=r"[/\\]j: cannot be written: the disk is full; --resume goes on once it can be$"):
        journal.finish("gemv", "key", {"us": 1})


def test_a_journal_of_junk_is_begun_anew(tmp_path: Path) -> None:
    for junk in (bytes(range(256)), b"[1]\n3\nnull\n", b'{"a": 1}\n'):
        (tmp_path / "j").write_bytes(junk)
        assert Journal(tmp_path / "j", IDENTITY).results("gemv") == {}


def test_families_are_kept_apart(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", IDENTITY)
    journal.finish("gemv", "a", {"us": 1})
    journal.finish("attention", "b", {"us": 2})
    journal.finish("gemv", "a", {"us": 3})
    for read in (journal, Journal(tmp_path / "j", IDENTITY)):
        assert read.results("gemv") == {"a": {"us": 3}} and read.results("attention") == {"b": {"us": 2}}


def test_a_journal_of_other_kernels_keeps_its_results_but_nothing_is_finished(tmp_path: Path) -> None:
    Journal(tmp_path / "j", IDENTITY).finish("gemv", "key", {"us": 1})
    other = Journal(tmp_path / "j", {**IDENTITY, "kernels": "k2"})
    assert not other.finished("key")
    assert set(other.results("gemv")) == {"key"}
    assert not Journal(tmp_path / "j", {**IDENTITY, "driver": "2"}).results("gemv")


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SweepError, match=r"\[tune\] .*card.journal cannot be written: choose another folder with VKBACK_TUNING"):
        Journal(tmp_path / "file" / "card.journal", IDENTITY)


def test_what_tuning_found_goes_into_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: PurePosixPath("/home/ann"))
    caps = Capabilities.from_profile("amd_rx_7900_xtx_radv")
    with pytest.raises(SweepError, match=r"nothing to share: .*\.journal is missing\. Run vkback tune on .*7900 XTX.* first"):
        share(caps, "report", tmp_path, tmp_path / "out.json")
    table = tmp_path / device_table(caps)
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("[[gemv]]\n")
    table.with_suffix(".journal").write_text('{"format": 7}\n{"result": {"key": 1}}\n{"cut sho')
    share(caps, "cache /home/ann/.cache\nhome /home/ann\n/home/anna/bin", tmp_path, tmp_path / "out.json")
    held = json.loads((tmp_path / "out.json").read_text())
    assert Capabilities.from_dict(held["device"]) == replace(caps, uuid="", driver_uuid="")
    assert held["report"] == "cache ~/.cache\nhome ~\n~", "home folders, of others whole"
    assert held["journal"] == [{"format": 7}, {"result": {"key": 1}}] and held["table"] == "[[gemv]]\n"
