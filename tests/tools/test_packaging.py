"""What a wheel carries, where its files are found, and that the set-up script says what it lacks."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from processes import run_program

import vkback
from vkback import paths

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (REPOSITORY / "pyproject.toml").is_file(), reason="needs a checkout, not an installed package")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("sdist", tmp_path_factory.mktemp("sdist"))


def built(target: str, out: Path) -> Path:
    """A wheel or an sdist, made in an empty folder."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    run_program(build, cwd=REPOSITORY, check=True)
    (path,) = out.iterdir()
    return path


def files_under(folder: str) -> set[str]:
    return {p.relative_to(REPOSITORY / folder).as_posix() for p in (REPOSITORY / folder).rglob("*") if p.is_file()}


@pytest.mark.parametrize(("folder", "inside"), [("shaders", "vkback/_shaders"), ("tuning", "vkback/_tuning")])
def test_a_wheel_has_every_data_file(wheel: Path, folder: str, inside: str) -> None:
    names = {n.removeprefix(inside + "/") for n in zipfile.ZipFile(wheel).namelist() if n.startswith(inside + "/")}
    assert names == files_under(folder)


def test_a_wheel_has_models_profiles_and_license(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"vkback/models/builtin/demo-dense-Q4_K_M.gguf", "vkback/models/builtin/demo-moe-MXFP4_MOE.gguf"} <= set(names)
    json_files = {p.relative_to(REPOSITORY).as_posix() for p in (REPOSITORY / "vkback").rglob("*.json")}
    assert json_files <= set(names)
    assert any(n.endswith("dist-info/licenses/LICENSE") for n in names) and "vkback/py.typed" in names


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


CLIENT = """
import numpy as np
import numpy.typing as npt

import vkback
from vkback import Device, GenerateOptions, LoadedModel, Message, Result

def talk(model: LoadedModel) -> str:
    options: GenerateOptions = {"max_tokens": 8, "temperature": 0.0, "stop": ["\\n"]}
    result: Result = model.generate("It was", **options)
    messages: list[Message] = [{"role": "user", "content": result.text}]
    for piece in model.stream_chat(messages, template="plain", seed=1):
        print(piece.text.upper(), piece.tokens[0] + 1)
    return model.chat(messages, template="plain").finish_reason

def run(dev: Device) -> npt.NDArray[np.float32]:
    scale = dev.compile("scale.comp", {"WG_SIZE": 64})
    scale(dev.empty(64), push=[64, 2.0], groups=1)
    return dev.run_op("SQR", np.ones((1, 4), np.float32)).numpy()

talk(vkback.load("demo-dense", ctx=256))
print(vkback.devices()[0].name.upper())
"""

WRONG = {
    'model.session().stream("x", max_new_tokens=8)': 'Unexpected keyword argument "max_new_tokens"',
    'model.session().stream("x", max_tokens="8")': 'Argument "max_tokens" to "stream"',
    'vkback.load(act="f64")': 'Argument "act" to "load"',
    "vkback.lod()": 'Module has no attribute "lod"',
    "vkback.Device().tensor([1.0]).nunpy()": '"DeviceTensor" has no attribute "nunpy"',
}
"""What a client has wrong, and what mypy says of it."""


def test_users_have_types(wheel: Path, tmp_path: Path) -> None:
    """mypy --strict of a client, in an environment of its own that the wheel was installed into."""
    pytest.importorskip("mypy", reason="mypy is not installed: pip install 'vkback[dev]'")
    run_program([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run_program([python, "-c", purelib], check=True).stdout.strip())
    with zipfile.ZipFile(wheel) as z:
        z.extractall(site)
    (site / "needs.pth").write_text(sysconfig.get_path("purelib"))  # numpy, and what else vkback needs
    good, wrong = tmp_path / "good.py", tmp_path / "wrong.py"
    good.write_text(CLIENT)
    wrong.write_text("import vkback\n\ndef wrong(model: vkback.LoadedModel) -> None:\n" + "".join(f"    {line}\n" for line in WRONG))
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "--cache-dir", str(tmp_path / "cache")]
    done = run_program([*mypy, "good.py", "wrong.py"], cwd=tmp_path)
    assert not any(line.startswith("good.py") for line in done.stdout.splitlines()), done.stdout
    told = [line.partition(" error: ")[2] for line in done.stdout.splitlines() if " error: " in line]
    assert all(any(line.startswith(said) for line in told) for said in WRONG.values()), done.stdout
    assert len(told) == len(WRONG)


def test_an_sdist_has_what_a_wheel_is_made_of(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"vkback/py.typed", "vkback/__init__.py", "shaders/gemv/gemv.comp", "pyproject.toml"} <= names


def test_an_installed_package_knows_its_commit(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    """A wheel that is made of a checkout, and one of an sdist, which has no commits of its own; bug reports name it."""
    if not (REPOSITORY / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs a checkout with its commits, and git")
    described = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*"]
    wanted = run_program(described, check=True).stdout.strip()
    count = run_program(["git", "-C", str(REPOSITORY), "rev-list", "--count", "HEAD"], check=True).stdout.strip()
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    of_sdist = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "second")]
    run_program(of_sdist, cwd=source, check=True)
    for number, made in enumerate([wheel, *(tmp_path / "second").iterdir()]):
        site = tmp_path / f"site{number}"
        with zipfile.ZipFile(made) as z:
            z.extractall(site)
        code = "from vkback.report.build import build_info; print(*build_info())"
        done = run_program([sys.executable, "-c", code], cwd=site, env={**os.environ, "PYTHONPATH": str(site)}, check=True)
        assert done.stdout.split() == [wanted, count]


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
    with pytest.raises(
        paths.MissingFileError, match=re.escape(f"vkback's shaders folder is missing: neither {tmp_path / 'vkback' / '_shaders'}")
    ):
        paths.shader_root()


def test_one_version() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["version"] == vkback.__version__
    first = re.search(r"^## .*", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert first and first[0].startswith(f"## [{vkback.__version__}]")


def test_line_ends_of_a_checkout_are_those_of_unix() -> None:
    """With git's autocrlf, too: a shell script with others does not run."""
    if not (REPOSITORY / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git checkout, or no git")
    asked = ["tools/setup.sh", ".ci/run", "shaders/norm/norm.comp", "vkback/paths.py"]
    said = run_program(["git", "-C", REPOSITORY, "check-attr", "eol", "text", "--", *asked, "model.gguf"], check=True).stdout
    assert all(f"{file}: eol: lf" in said for file in asked)
    assert "model.gguf: text: unset" in said
