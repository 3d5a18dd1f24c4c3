"""vkback on 64-bit Arm, emulated on another Linux: `make arm`. Shows what differs by processor, without an Arm machine.

    python tools/arm.py [--root DIR] [--only devices|tests|ops|start]    build what is missing, then all four, or one
    python tools/arm.py --tests tests/unit/test_gguf.py                  pytest of these
    python tools/arm.py --run -m vkback devices                          what stands behind it goes to python3

devices  `vkback devices`, and `vkback plan` for a recorded device: the package without a kernel
tests    pytest of TESTS: what needs no device
ops      cases of the suite on Mesa's driver on the CPU, whose machine code is Arm's, too
start    the first start of the wheel with empty caches (tools/first_start.py)

As root on Debian or Ubuntu with qemu-user-static, whose emulator Linux must know (/proc/sys/fs/binfmt_misc/qemu-aarch64). Debian 13 for
arm64 goes into a folder, 15 minutes and 2 GB; its Python runs the checkout, with the packages of PyPI for aarch64. Everything takes 10 to
30 times as long as on a real one, LLVM most of all: `ops` compiles a kernel in seconds to minutes.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from debian_root import SOURCE, DebianRoot, RootError, built_wheel, pip, stamp_of, work_in

PACKAGES = "python3 libvulkan1 mesa-vulkan-drivers"
VERSION = "3.13"
HANDLER = Path("/proc/sys/fs/binfmt_misc/qemu-aarch64")
SITE = "/opt/site"

TESTS = (
    "tests/unit/test_constants.py::test_tables_are_as_recorded",  # the others start processes, minutes each here
    "tests/unit/test_gbnf.py",
    "tests/unit/test_gguf.py",
    "tests/unit/test_home.py",
    "tests/unit/test_kl.py",
    "tests/unit/test_quant_facts.py",
    "tests/unit/test_quants_codecs.py",
    "tests/unit/test_quants_layout.py",
    "tests/unit/test_own_compiler.py",
    "tests/unit/test_systems.py",
    "tests/unit/test_tokenizer.py",
    "tests/plan/test_plan.py",
    "tests/plan/test_null_device.py",
)
"""Bytes, tables, tokenizers, plans and the compiler that comes with vkback."""

OPS = ("MUL_MAT(type_a=q8_0,m=16,n=1,k=256)", "RMS_NORM", "ROPE")


class ArmRoot(DebianRoot):
    """Debian 13 for arm64, with the packages that the tests need in SITE."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "trixie", PACKAGES, "arm64")

    def make(self) -> None:
        if not HANDLER.exists():
            raise RootError(f"{HANDLER} is not there: Linux does not start programs of arm64; apt install qemu-user-static binfmt-support")
        self.build()
        wheel = built_wheel(self.folder / "opt/dist")
        stamp = self.folder / "opt/installed"
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != stamp_of(wheel):
            print("== packages", file=sys.stderr)
            shutil.rmtree(self.folder / SITE.lstrip("/"), ignore_errors=True)
            platforms = [word for glibc in ("2_17", "2_28", "2_34") for word in ("--platform", f"manylinux_{glibc}_aarch64")]
            wanted = ["--platform", "manylinux2014_aarch64", *platforms, "--python-version", VERSION, "--only-binary=:all:"]
            pip("install", "--no-compile", "--target", str(self.folder / SITE.lstrip("/")), *wanted, f"{wheel}[test]")
            stamp.write_text(stamp_of(wheel), encoding="utf-8")

    def run(self, *argv: str, folder: str = SOURCE, path: str = f"{SOURCE}:{SITE}") -> bool:
        """Whether a command of python3 ended with 0; what it prints is shown. path: PYTHONPATH."""
        print(f"== {' '.join(argv)}", flush=True)
        settings = {
            "PYTHONPATH": path,
            "PYTHONPYCACHEPREFIX": "/tmp/pyc",
            "XDG_RUNTIME_DIR": "/tmp",
            "GALLIVM_PERF": "nopt",
            "OPENBLAS_NUM_THREADS": "1",
        }
        words = ("env", "-C", folder, *(f"{name}={value}" for name, value in settings.items()), "python3", *argv)
        return subprocess.run(self.inside(*words)).returncode == 0

    def devices(self) -> bool:
        planned = ("-m", "vkback", "plan", "--shape", "llama-8b-Q4_K_M", "--profile", "nvidia_h200_linux")
        return self.run("-m", "vkback", "devices") and self.run(*planned)

    def ops(self) -> bool:
        return self.run("-m", "vkback", "test-ops", "-j", "1", *OPS)

    def start(self) -> bool:
        """Of the wheel, as pip has installed it."""
        return self.run(f"{SOURCE}/tools/first_start.py", "--installed", folder="/tmp", path=SITE)

    def tests(self, *paths: str) -> bool:
        return self.run("-m", "pytest", "-m", "not exhaustive", "-p", "no:cacheprovider", "-rs", *(paths or TESTS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("/var/tmp/vkback-arm"))
    parser.add_argument("--only", choices=("devices", "tests", "ops", "start"))
    parser.add_argument("--tests", nargs="+", metavar="PATH")
    parser.add_argument("--run", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    args = parser.parse_args()

    def work(root: ArmRoot) -> int:
        if args.run:
            return 0 if root.run(*args.run) else 1
        if args.tests:
            return 0 if root.tests(*args.tests) else 1
        steps = {"devices": root.devices, "tests": root.tests, "ops": root.ops, "start": root.start}
        failed = [name for name, step in steps.items() if args.only in (None, name) and not step()]
        print(f"arm: {'failed: ' + ', '.join(failed) if failed else 'passed'}")
        return 1 if failed else 0

    return work_in("arm", lambda: ArmRoot(args.root), work)


if __name__ == "__main__":
    sys.exit(main())
