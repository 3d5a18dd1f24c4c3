"""Measures the first start of a wheel in a fresh virtual environment: rows of the table in docs/install.md.

    python tools/first_start.py WHEEL [--python python3.12 ...] [--plain] [--no-compiler] [--user NAME] [--label TEXT]
    python tools/first_start.py --installed [--label TEXT]        of the vkback that this Python has, without pip

For each Python: pip installs the wheel and nothing else, then a model that comes with vkback writes a text, and one whose kernels do not
ship (tiny-granitehybrid-Q8_0) writes another, both with an empty cache. Prints a row with the seconds of each, those of processors behind
them in parentheses (Windows does not say), for a busy machine; status 1 where one fails.

--plain         as on a processor without AVX: numpy takes no code that it chooses by processor, Mesa's driver vectors of 128 bits
--no-compiler   PATH has no glslc; a libshaderc of the system is found all the same, so take it from a root without one
--user          as this user (as root only)
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MODELS = ("demo-dense", "tiny-granitehybrid-Q8_0")


class StartError(Exception):
    """A step that failed, with the last lines that it said."""


@dataclass(frozen=True)
class Seconds:
    """What commands took: by the clock, and of processors, 0 where the system does not say."""

    clock: float = 0.0
    processors: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.clock + other.clock, self.processors + other.processors)

    def __str__(self) -> str:
        return f"{self.clock:.1f}" + (f" ({self.processors:.1f})" if self.processors else "")


def run(argv: list[str], env: dict[str, str], user: str | None) -> Seconds:
    """What a command took."""
    begun, before = time.monotonic(), os.times()
    done = subprocess.run(argv, env=env, user=user, cwd=env["HOME"], capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise StartError(f"{' '.join(argv[:4])} ended with {done.returncode}:\n{last}")
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return Seconds(time.monotonic() - begun, used)


def measure(wheel: Path, python: str, args: argparse.Namespace) -> str:
    """A row: Python, compiler, numpy, seconds to install, to the first text, to that of a model whose kernels are compiled."""
    with tempfile.TemporaryDirectory(prefix="vkback-") as name:
        home = Path(name)
        env = environment(home, "PYTHONPATH", "VIRTUAL_ENV")
        if args.no_compiler:
            env["PATH"] = str(home / "programs")
            (home / "programs").mkdir()
            for program in ("env", "sh", "uname"):
                (home / "programs" / program).symlink_to(shutil.which(program) or program)
        if args.user:
            shutil.chown(home, args.user)
        install = run([python, "-m", "venv", str(home / "venv")], env, args.user)
        folder = home / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
        install += run([str(folder / "pip"), "install", "--quiet", "--disable-pip-version-check", str(wheel)], env, args.user)
        return row(str(folder / "python"), str(install), home, env, args)


def environment(home: Path, *without: str) -> dict[str, str]:
    """That of this process, with a home of its own and empty caches, also of Mesa's driver, which asks the system where the home is."""
    kept = {k: v for k, v in os.environ.items() if k not in (*without, "XDG_CONFIG_HOME", "MESA_SHADER_CACHE_DIR")}
    return kept | {"HOME": str(home), "VKBACK_CACHE": str(home / "cache"), "XDG_CACHE_HOME": str(home / "others")}


def row(python: str, install: str, home: Path, env: dict[str, str], args: argparse.Namespace) -> str:
    """The row of the vkback that `python` imports."""

    def said(*argv: str) -> str:
        return subprocess.run([python, *argv], env=env, cwd=home, capture_output=True, text=True, encoding="utf-8").stdout

    if args.plain:
        env["NPY_DISABLE_CPU_FEATURES"] = said("-c", "import numpy._core._multiarray_umath as m; print(*m.__cpu_dispatch__)").strip()
        env["LP_NATIVE_VECTOR_WIDTH"] = "128"
    vkback = [python, "-m", "vkback"]
    other = home / "other.gguf"
    run([*vkback, "synth", MODELS[1], str(other)], env, args.user)
    times = [run([*vkback, "run", "-m", model, "-p", "It was", "-n", "8"], env, args.user) for model in (MODELS[0], str(other))]
    report = said("-m", "vkback", "devices", "--report")
    compiler = next((line.removeprefix("shader compiler ") for line in report.splitlines() if line.startswith("shader compiler ")), "?")
    name = "own" if "with vkback" in compiler else compiler.split("-")[0]
    about = args.label or f"{platform.system()} {platform.machine()}"
    extra = [*(["no AVX in numpy and Mesa"] if args.plain else []), *([f"as {args.user}"] if args.user else [])]
    version = said("-c", "import platform; print(platform.python_version())").strip()
    return f"| {', '.join([about, *extra])} | {version} | {name} | {install} | {times[0]} | {times[1]} |"


def measure_installed(args: argparse.Namespace) -> str:
    """The row of this Python's own vkback, with empty caches."""
    with tempfile.TemporaryDirectory(prefix="vkback-", ignore_cleanup_errors=True) as name:
        return row(sys.executable, "", Path(name), environment(Path(name)), args)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, nargs="?")
    parser.add_argument("--installed", action="store_true")
    parser.add_argument("--python", action="append")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--no-compiler", action="store_true")
    parser.add_argument("--user")
    parser.add_argument("--label")
    args = parser.parse_args()
    if args.installed == bool(args.wheel):
        parser.error("expected a wheel, or --installed")
    failed = 0
    if args.installed:
        try:
            print(measure_installed(args))
        except StartError as error:
            print(error, file=sys.stderr)
            failed = 1
        return failed
    for python in args.python or [sys.executable]:
        try:
            print(measure(args.wheel.resolve(), python, args), flush=True)
        except StartError as error:
            print(f"{python}: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
