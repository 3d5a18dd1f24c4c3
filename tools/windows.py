"""vkback on CPython for Windows, under Wine on Linux: `make windows`. Shows faults that only Windows has, without a Windows machine.

    python tools/windows.py [--root DIR]                                     build what is missing, then the short list
    python tools/windows.py --all                                            all commands, the first start and all tests, too: over an hour
    python tools/windows.py --only smoke|start|ops|tests                     one of these, whole
    python tools/windows.py --tests tests/cli tests/unit/test_gguf.py        pytest of these
    python tools/windows.py --run -m vkback devices                          what stands behind it goes to python.exe

smoke   every command of the documents, cut down to seconds (tools/smoke.py); of the short list those of COMMANDS: devices, run, chat,
        serve, vkbench, tune
start   the first start of the wheel with empty caches (tools/first_start.py)
tests   pytest of tests/unit, tests/cli and tests/tools, without the tests marked exhaustive; of the short list KEY_TESTS, about what
        Windows does otherwise; what is skipped is printed with its reason
ops     the quick suite of the ops

As root on Debian or Ubuntu; the first time takes about 5 minutes and 2.5 GB. Debian 13 goes into a folder, with its Wine 10, Mesa and
MinGW. CPython's signed DLLs and modules for Windows come from the wheel of panda3d, which has them, the rest of its library from Debian's
python3.13; python.exe is a program of four lines. The wheel of vkback is built from the checkout, its dependencies are those for
win_amd64. The driver is Mesa's on the CPU, through Wine's winevulkan. The compiler is the one that comes with vkback.

Not Windows' own: the C library, the file system, the graphics drivers and their watchdog, the console.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from debian_root import SOURCE, DebianRoot, built_wheel, pip, said, stamp_of, work_in

PACKAGES = (
    "wine wine64 mesa-vulkan-drivers libvulkan1 gcc-mingw-w64-x86-64 python3.13 libpython3.13-stdlib git ca-certificates"  # libpython: Lib
)
PANDA3D = "panda3d==1.10.16"
VERSION = "3.13"
NUMPY = "numpy==2.2.6"
"""A version whose imports from the C library are known; PATCHED makes up for those that Wine lacks."""
FOR_WINDOWS = ("colorama", "tzdata")
"""Dependencies by a marker that pip reads as of the system that it runs on."""

HOME = "/opt/windows"
TESTS = ("tests/unit", "tests/cli", "tests/tools")
KEY_TESTS = ("tests/unit/test_systems.py", "tests/unit/test_home.py", "tests/cli/test_streams.py", "tests/cli/test_hub.py")
"""Systems' names and hints, folders, streams in a code page, a cache without symbolic links."""
COMMANDS = (
    "vkback devices",
    "vkback run -p It was a dark and stormy night -n",
    "vkback run -hf",
    "vkback chat -m model.gguf -n",
    "vkback serve -m model.gguf --port",
    "vkbench tg4 pp8 -m MODEL --save",
    "vkback tune --op gemm",
)
"""Of the documents' commands, as tools/smoke.py cuts them down, those of the short list."""

PYTHON_EXE = """
#include <windows.h>
int wmain(int argc, wchar_t **argv) {
    HMODULE python = LoadLibraryW(L"python313.dll");
    return python ? ((int (*)(int, wchar_t **))(void *)GetProcAddress(python, "Py_Main"))(argc, argv) : 99;
}
"""

THEIRS, PATCHED = b"api-ms-win-crt-math-l1-1-0.dll", b"our-ms-win-crt-math-l1-1-0.dll"
"""numpy's modules import functions of complex numbers that Wine 10 does not have. A library of the second name, as long as the first, has
these and hands all others on."""
COMPLEX = re.compile(r"c(?:abs|arg|imag|real|cosh?|sinh?|tanh?|acosh?|asinh?|atanh?|exp|pow|log|sqrt)[fl]?")
NOT_COMPLEX = ("cosh", "coshf")


class WindowsRoot(DebianRoot):
    """Debian 13 with a Python for Windows in HOME."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "trixie", PACKAGES)
        self.home = folder / HOME.lstrip("/")
        self.python = self.home / "python"
        self.packages_folder = self.python / "Lib/site-packages"

    def make(self) -> None:
        self.build()
        if not (self.python / "python.exe").exists():
            self.make_python()
        wheel = built_wheel(self.home / "dist")
        stamp = self.home / "installed"
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != stamp_of(wheel):
            self.install(wheel)
            stamp.write_text(stamp_of(wheel), encoding="utf-8")

    def make_python(self) -> None:
        """python.exe, the DLLs beside it, Lib."""
        print("== Python for Windows", file=sys.stderr)
        parts = self.home / "parts"
        shutil.rmtree(self.python, ignore_errors=True)
        for folder in (parts, self.python / "DLLs"):
            folder.mkdir(parents=True, exist_ok=True)
        pip("download", "--no-deps", "--dest", str(parts), *for_windows(), PANDA3D)
        with zipfile.ZipFile(next(parts.glob("panda3d-*.whl"))) as wheel:
            for member in wheel.namelist():
                name = member.rpartition("/")[2]
                if member.startswith("deploy_libs/") and not re.match(r"api-ms|tcl|tk|_tk", name) and "313t" not in name:
                    (self.python / ("" if name.lower().endswith(".dll") else "DLLs") / name).write_bytes(wheel.read(member))
        ignore = shutil.ignore_patterns("lib-dynload", "config-*", "__pycache__", "EXTERNALLY-MANAGED", "sitecustomize.py")
        shutil.copytree(self.folder / f"usr/lib/python{VERSION}", self.python / "Lib", ignore=ignore)
        self.packages_folder.mkdir(exist_ok=True)
        exported = said(*self.inside("x86_64-w64-mingw32-objdump", "-p", f"{HOME}/python/python313.dll"))
        names = sorted(set(re.findall(r"\b_?Py\w+$", exported.partition("[Ordinal/Name Pointer] Table")[2], re.M)))
        (parts / "python3.def").write_text(
            "\n".join(("LIBRARY python3", "EXPORTS", *(f"{name}=python313.{name}" for name in names))) + "\n", encoding="utf-8"
        )
        (parts / "python.c").write_text(PYTHON_EXE, encoding="utf-8")
        self.shell(
            f"cd {HOME}/parts; gcc=x86_64-w64-mingw32-gcc; $gcc -shared -nostdlib -Wl,--entry=0 -o ../python/python3.dll python3.def; "
            "$gcc -O1 -municode -o ../python/python.exe python.c"
        )
        subprocess.run(self.wine("wineboot", "-i"), capture_output=True, check=False)

    def install(self, wheel: Path) -> None:
        """The wheel and the packages that the tests need."""
        print("== packages", file=sys.stderr)
        shutil.rmtree(self.packages_folder)
        pip("install", "--no-compile", "--target", str(self.packages_folder), *for_windows(), f"{wheel}[test]", NUMPY, *FOR_WINDOWS)
        self.patch(sorted(self.packages_folder.glob("numpy/**/*.pyd")))

    def patch(self, modules: Sequence[Path]) -> None:
        """Have numpy's modules import from a library that has what Wine's lacks."""
        modules = [module for module in modules if THEIRS in module.read_bytes()]
        names: set[str] = set()
        for module in modules:
            listed = said(*self.inside("x86_64-w64-mingw32-objdump", "-p", f"/{module.relative_to(self.folder)}"))
            (table,) = re.findall(rf"DLL Name: {re.escape(THEIRS.decode())}\n(.*?)\n\n", listed, re.S)
            names |= set(re.findall(r"\b([A-Za-z_]\w+)$", table, re.M)) - {"Bound-To"}
        own = sorted(name for name in names if COMPLEX.fullmatch(name) and name not in NOT_COMPLEX)
        forwards = [f"{name}=our_{name}" if name in own else f"{name}=ucrtbase.{name}" for name in sorted(names - {"Name"})]
        parts = self.home / "parts"
        (parts / "math.c").write_text("\n".join(("#include <complex.h>", *map(definition, own))) + "\n", encoding="utf-8")
        library = PATCHED.decode().removesuffix(".dll")
        (parts / "math.def").write_text("\n".join((f"LIBRARY {library}", "EXPORTS", *forwards)) + "\n", encoding="utf-8")
        self.shell(
            f"cd {HOME}/parts; x86_64-w64-mingw32-gcc -shared -static -O1 -fno-builtin -o ../python/{PATCHED.decode()} math.c math.def"
        )
        for module in modules:
            module.write_bytes(module.read_bytes().replace(THEIRS, PATCHED))

    def wine(self, *argv: str, folder: str = SOURCE, **environment: str) -> list[str]:
        settings = {
            "WINEPREFIX": f"{HOME}/prefix",
            "WINEDEBUG": "-all",
            "XDG_RUNTIME_DIR": "/tmp",
            "VK_DRIVER_FILES": "/usr/share/vulkan/icd.d/lvp_icd.json",
            "GALLIVM_PERF": "nopt",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPYCACHEPREFIX": r"Z:\tmp\pyc",
        } | environment
        return self.inside("env", "-C", folder, *(f"{name}={value}" for name, value in settings.items()), "wine", *argv)

    def run(self, *argv: str, folder: str = SOURCE, **environment: str) -> bool:
        """Whether a command of python.exe ended with 0; what it prints is shown."""
        print(f"== {' '.join(argv)}", flush=True)
        return subprocess.run(self.wine(f"{HOME}/python/python.exe", *argv, folder=folder, **environment)).returncode == 0

    def start(self) -> bool:
        """The first start of the wheel. The driver is not Windows' and takes its cache's place from where Wine is started."""
        shutil.rmtree(self.folder / "tmp/others", ignore_errors=True)
        return self.run(f"{SOURCE}/tools/first_start.py", "--installed", folder="/tmp", XDG_CACHE_HOME="/tmp/others")


def definition(name: str) -> str:
    """A C function of a complex number. long double is double on Windows."""
    same = name if name == "creal" or not name.endswith("l") else name[:-1]
    kind = "float" if name.endswith("f") else "double"
    result = kind if re.match("c(abs|arg|imag|real)", name) else f"{kind} _Complex"
    taken = ("a", "b") if "pow" in name else ("a",)
    return f"{result} our_{name}({', '.join(f'{kind} _Complex {a}' for a in taken)}) {{ return {same}({', '.join(taken)}); }}"


def for_windows() -> list[str]:
    return ["--platform", "win_amd64", "--python-version", VERSION, "--implementation", "cp", "--only-binary=:all:"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("/var/tmp/vkback-windows"))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true")
    which.add_argument("--only", choices=("smoke", "start", "ops", "tests"))
    which.add_argument("--tests", nargs="+", metavar="PATH")
    parser.add_argument("--run", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    args = parser.parse_args()

    def work(root: WindowsRoot) -> int:
        if args.run:
            return 0 if root.run(*args.run) else 1
        only = "tests" if args.tests else args.only
        short = only is None and not args.all
        failed = []
        if only in (None, "smoke") and not root.run("tools/smoke.py", *(COMMANDS if short else ())):
            failed.append("smoke")
        if (args.all or only == "start") and not root.start():
            failed.append("start")
        if only in (None, "tests") and not root.run(
            "-m", "pytest", "-m", "not exhaustive", "-p", "no:cacheprovider", "-rs", *(args.tests or (KEY_TESTS if short else TESTS))
        ):
            failed.append("tests")
        if only in (None, "ops") and not root.run("-m", "vkback", "test-ops", "-j", "2"):
            failed.append("ops")
        print(f"windows: {'failed: ' + ', '.join(failed) if failed else 'passed'}")
        return 1 if failed else 0

    return work_in("windows", lambda: WindowsRoot(args.root), work)


if __name__ == "__main__":
    sys.exit(main())
