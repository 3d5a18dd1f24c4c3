"""What a wheel carries, where its files are found, and that the set-up script says what it lacks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from processes import run_program

import vkback
from vkback import paths

REPOSITORY = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not (REPOSITORY / "pyproject.toml").is_file(), reason="needs a checkout, not an installed package")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    run_program(build, cwd=REPOSITORY, check=True, timeout=120)
    (path,) = out.glob("*.whl")
    return path


def files_under(folder: str) -> set[str]:
    return {str(p.relative_to(REPOSITORY / folder)) for p in (REPOSITORY / folder).rglob("*") if p.is_file()}


@pytest.mark.parametrize(("folder", "inside"), [("shaders", "vkback/_shaders"), ("tuning", "vkback/_tuning")])
def test_a_wheel_has_every_data_file(wheel: Path, folder: str, inside: str) -> None:
    names = {n.removeprefix(inside + "/") for n in zipfile.ZipFile(wheel).namelist() if n.startswith(inside + "/")}
    assert names == files_under(folder)


def test_a_wheel_has_models_profiles_and_license(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"vkback/models/builtin/demo-dense-Q4_K_M.gguf", "vkback/models/builtin/demo-moe-MXFP4_MOE.gguf"} <= set(names)
    json_files = {str(p.relative_to(REPOSITORY)) for p in (REPOSITORY / "vkback").rglob("*.json")}
    assert json_files <= set(names)
    assert any(n.endswith("dist-info/licenses/LICENSE") for n in names)


def test_a_wheel_has_both_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as z:
        (name,) = (n for n in z.namelist() if n.endswith("entry_points.txt"))
        text = z.read(name).decode()
    assert "vkback = vkback.cli.start:vkback" in text
    assert "vkbench = vkback.cli.start:vkbench" in text


def test_an_installed_wheel_finds_its_own_files(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as z:
        z.extractall(tmp_path)
    code = "from vkback import paths; print(paths.shader_root(), paths.tuning_root(), paths.builtin_model('demo-dense'), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run_program([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert done.stdout.splitlines() == [
        str(tmp_path / "vkback" / "_shaders"),
        str(tmp_path / "vkback" / "_tuning"),
        str(tmp_path / "vkback" / "models" / "builtin" / "demo-dense-Q4_K_M.gguf"),
    ]


def test_a_checkout_uses_the_folders_one_edits() -> None:
    assert paths.shader_root() == REPOSITORY / "shaders"
    assert paths.tuning_root() == REPOSITORY / "tuning"


def test_built_in_models_are_found_by_the_start_of_their_names() -> None:
    assert [p.name for p in paths.builtin_models()] == ["demo-dense-Q4_K_M.gguf", "demo-moe-MXFP4_MOE.gguf"]
    assert paths.builtin_model("demo-moe").read_bytes()[:4] == b"GGUF"
    with pytest.raises(paths.MissingFileError, match="no built-in model is called 'x'; there are: demo-dense-Q4_K_M, demo-moe-MXFP4_MOE"):
        paths.builtin_model("x")


def test_a_missing_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "vkback")
    with pytest.raises(paths.MissingFileError, match=re.escape(f"vkback's shaders folder is missing: neither {tmp_path}/vkback/_shaders")):
        paths.shader_root()


def test_one_version() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["version"] == vkback.__version__
    assert "## [Unreleased]" in (REPOSITORY / "CHANGELOG.md").read_text()


def setup(goal: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = str(REPOSITORY / "tools" / "setup.sh")
    return run_program(["bash", script, goal], env={**os.environ, **environment})


def test_setup_refuses_an_unknown_goal() -> None:
    done = setup("everything")
    assert done.returncode == 1
    assert done.stderr == "setup: unknown goal 'everything': expected bench, test or dev\n"


def test_setup_says_that_python_is_missing() -> None:
    done = setup("bench", PYTHON="python-not-there")
    assert done.returncode == 1
    assert done.stderr == "setup: python-not-there not found: vkback needs Python 3.11 or newer\n"


@pytest.mark.parametrize("script", ["tools/setup.sh", ".ci/run"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    path = REPOSITORY / script
    assert os.access(path, os.X_OK)
    assert run_program(["bash", "-n", str(path)]).returncode == 0
