"""vkback cache, and the bound on what is kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vkback import kept
from vkback.cli import main
from vkback.paths import cache_dir
from vkback.shader import ShaderLibrary, Variant

FILL = "#version 450\nlayout(local_size_x = 64) in;\nlayout(set = 0, binding = 0) buffer A { uint a[]; };\nvoid main() { a[0] = VALUE; }\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VKBACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VKBACK_CACHE_MB", raising=False)
    return tmp_path / "cache"


def fill(part: str, name: str, size: int, used_s: float) -> Path:
    file = cache_dir() / part / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))
    os.utime(file, (used_s, used_s))
    if file.stat().st_atime != used_s:
        pytest.skip("this system says of each file that it was used just now")  # Wine
    return file


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str, code: int = 0) -> str:
    monkeypatch.setattr("sys.argv", ["vkback", "cache", *args])
    with pytest.raises(SystemExit) as end:
        main.main()
    out, err = capsys.readouterr()
    assert end.value.code == code, err
    return out if code == 0 else err


def test_what_is_kept_is_shown_and_removed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert "0 files" in printed(capsys, monkeypatch)
    pipeline, lock = fill("pipelines", "a.bin", 3 << 20, 1), fill("locks", "a.lock", 0, 1)
    shaders = [fill(f"shaders/{n}", "a.spv", 1 << 20, n) for n in range(2)]
    lines = printed(capsys, monkeypatch).splitlines()
    assert str(folder) in lines[0] and "1.91 GiB" in lines[0]
    assert [" ".join(line.split()[:5]) for line in lines[1:3]] == ["shaders 2 files 2.00 MiB", "pipelines 1 file 3.00 MiB"]
    told = json.loads(printed(capsys, monkeypatch, "--json"))
    assert told["parts"]["shaders"] == {"files": 2, "bytes": 2 << 20} and told["limit_bytes"] == 2048 * 10**6
    assert "removed 1 file, 3.00 MiB" in printed(capsys, monkeypatch, "--clear", "--part", "pipelines")
    assert not pipeline.exists() and all(s.exists() for s in shaders)
    assert json.loads(printed(capsys, monkeypatch, "--clear", "--json"))["removed"] == 2
    assert lock.exists() and not any(s.parent.exists() for s in shaders)


def test_an_unknown_part_and_a_limit_that_is_none_are_errors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--part locks: no part of the cache is called so" in printed(capsys, monkeypatch, "--clear", "--part", "locks", code=2)
    monkeypatch.setenv("VKBACK_CACHE_MB", "much")
    assert "VKBACK_CACHE_MB is 'much'; expected a number" in printed(capsys, monkeypatch, code=2)


def test_the_files_used_the_longest_ago_go_first_and_once_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACK_CACHE_MB", "4")
    files = [fill("shaders" if n % 2 else "pipelines", f"{n}", 1_000_000, 100 - n) for n in range(6)]
    assert kept.bound() == (3, 3_000_000)
    assert [f.exists() for f in files] == [True] * 3 + [False] * 3
    more = [fill("shaders", f"more{n}", 1_000_000, 200) for n in range(3)]
    assert kept.bound() == (0, 0)
    later = (cache_dir() / kept.STAMP).stat().st_mtime + kept.DAY_S + 1
    assert kept.bound(lambda: later) == (3, 3_000_000)
    assert not any(f.exists() for f in files) and all(f.exists() for f in more)


def test_no_limit_and_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("VKBACK_CACHE_MB", "0")
    file = fill("shaders", "a", 10, 1)
    assert kept.bound() == (0, 0) and file.exists()
    monkeypatch.setenv("VKBACK_CACHE", "/proc/none")
    assert kept.bound() == (0, 0)


def test_compiling_bounds_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACK_CACHE_MB", "30")  # 12 of them are vkback's own compiler where that is used
    old = fill("shaders/old", "a.spv", 40_000_000, 1)
    (tmp_path / "shaders").mkdir()
    (tmp_path / "shaders" / "fill.comp").write_text(FILL)
    ShaderLibrary(tmp_path / "shaders", tmp_path / "own").spirv(Variant("fill.comp", (("VALUE", 1),)))
    assert old.exists(), "a caller's own folder was compiled into"
    ShaderLibrary(tmp_path / "shaders").spirv(Variant("fill.comp", (("VALUE", 2),)))
    assert not old.exists() and list((cache_dir() / "shaders").rglob("*.spv"))
