"""A Debian root in a folder, made with debootstrap and entered with chroot: what tools/lab.py, windows.py and arm.py run in."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

PROJECT = Path(__file__).resolve().parent.parent
SOURCE = "/vkback"
"""Where the checkout is seen inside the root."""


class RootError(Exception):
    """What cannot be built or run, and what to do."""


def said(*argv: str, **kwargs: Any) -> str:
    """A command's output. Raises RootError with its last lines."""
    done = subprocess.run(argv, capture_output=True, encoding="utf-8", **kwargs)
    output: str = done.stdout
    if done.returncode:
        last = "\n".join((output + done.stderr).splitlines()[-5:])
        raise RootError(f"{' '.join(argv[:4])} ... failed with {done.returncode}:\n{last}")
    return output


def pip(*argv: str) -> None:
    """By name, with this Python's pip. Raises RootError."""
    said(sys.executable, "-m", "pip", argv[0], "--quiet", "--disable-pip-version-check", *argv[1:])


def built_wheel(folder: Path) -> Path:
    """That of the checkout, alone in a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    said(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder), cwd=PROJECT)
    return next(folder.glob("*.whl"))


def is_mounted(place: Path, mounts: str | None = None) -> bool:
    """Whether something is mounted at a place. os.path.ismount does not see a folder that is bound from the same file system.

    mounts  text as of /proc/self/mounts, which is read without it
    """
    lines = (Path("/proc/self/mounts").read_text(encoding="utf-8") if mounts is None else mounts).splitlines()
    places = (re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split(" ")[1]) for line in lines)
    return os.path.realpath(place) in places


def stamp_of(wheel: Path) -> str:
    """What tells whether this very wheel is installed: another commit's has the same name."""
    return f"{wheel.name} {hashlib.sha256(wheel.read_bytes()).hexdigest()}"


class DebianRoot:
    """A root with packages; its mounts last until `close`."""

    def __init__(self, folder: Path, suite: str, packages: str, arch: str = "amd64") -> None:
        self.folder, self.suite, self.packages, self.arch = folder, suite, packages, arch
        self._mounted: list[Path] = []
        if os.geteuid() != 0:
            raise RootError("this needs root: it builds a Debian root with debootstrap and mounts into it")

    def build(self, then: str = "") -> None:
        """Make what is missing: the base, the packages, and what the shell script `then` does once."""
        made = self.folder / "opt/made"
        if not made.exists():
            minutes = 5 if self.arch == "amd64" else 15  # emulated
            print(f"== root: Debian {self.suite} in {self.folder}, about {minutes} min", file=sys.stderr)
            if shutil.which("debootstrap") is None:
                said("apt-get", "-qq", "update")
                said("apt-get", "-qq", "install", "-y", "debootstrap")
            if any(is_mounted(self.folder / name) for name in ("proc", "dev", SOURCE.lstrip("/"))):
                raise RootError(f"{self.folder}: half made, and still mounted into; expected no mounts; umount proc, dev and vkback in it")
            shutil.rmtree(self.folder, ignore_errors=True)
            base = ("--variant=minbase", "--include=ca-certificates", f"--arch={self.arch}")
            said("debootstrap", *base, self.suite, str(self.folder))
            for path in ("etc/resolv.conf", "etc/hosts", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt"):
                if Path("/", path).exists():
                    (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(Path("/", path), self.folder / path)
            for proxy in Path("/etc/apt/apt.conf.d").glob("*prox*"):
                shutil.copy(proxy, self.folder / "etc/apt/apt.conf.d")
        self.mount("/proc", "proc")
        self.mount("/dev", "dev")
        self.mount(str(PROJECT), SOURCE.lstrip("/"))
        if not made.exists():
            self.shell(
                "export DEBIAN_FRONTEND=noninteractive; "
                "apt-get -qq -o Acquire::Check-Valid-Until=false update; "  # mirrors may be snapshots
                f"apt-get -qq install -y --no-install-recommends {self.packages}; {then}"
            )
            made.touch()

    def make(self) -> None:
        """Build it, and what a program needs in it."""
        self.build()

    def mount(self, source: str, target: str) -> None:
        place = self.folder / target
        place.mkdir(parents=True, exist_ok=True)
        if source == str(PROJECT) or not is_mounted(place):  # another checkout may be there still
            said("mount", "--bind", source, str(place))
            self._mounted.append(place)

    def inside(self, *argv: str) -> list[str]:
        """A command line in the root, with nothing of this process's environment."""
        return ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8", "chroot", str(self.folder), *argv]

    def shell(self, script: str) -> None:
        kept = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_", "REQUESTS_")) or k.lower().endswith("_proxy")}
        env = {**kept, "HOME": "/root", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        said("chroot", str(self.folder), "bash", "-ec", script, env=env)

    def close(self) -> None:
        for place in reversed(self._mounted):
            lazily = ("--lazy",) if place == self.folder / SOURCE.lstrip("/") else ()  # else Wine's server, which stays a while, keeps it
            subprocess.run(("umount", *lazily, str(place)), capture_output=True, check=False)  # busy: another run has it, too


R = TypeVar("R", bound=DebianRoot)


def work_in(name: str, opened: Callable[[], R], work: Callable[[R], int]) -> int:
    """The status of what a program of this name does in its root, which is made where it is missing. A RootError is one line and 1."""
    try:
        root = opened()
        try:
            root.make()
            return work(root)
        finally:
            root.close()
    except RootError as e:
        print(f"{name}: error: {e}", file=sys.stderr)
        return 1
