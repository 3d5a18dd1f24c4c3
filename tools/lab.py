"""The compilers of AMD, Qualcomm, Apple and NVIDIA (NVK) at the bench, without their cards: `make lab`.

    python tools/lab.py [--root DIR] [--peer FOLDER] [--chips amd:navi31,apple] [--only table|suite] [--out FILE.md]
    python tools/lab.py --run amd:gfx1201 vkback kernels -m MODEL          one command on one chip
    python tools/lab.py --render FOLDER                                    the table of JSON files that an earlier run left

Builds a Debian sid root with the newest Mesa, its no-op kernel shims, glslc and SwiftShader (as root, Debian or Ubuntu; a few minutes the
first time), prints what the compilers make of our mat-vec kernels for every chip (bench/vendor_kernels.py), llama.cpp's beside them with
--peer, and runs the quick suite and the built-in models on lavapipe and SwiftShader, which execute. Exit code 1 where a case fails or a
kernel of ours spills.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
SOURCE = "/vkback"
"""Where the checkout is seen inside the root."""
PACKAGES = (
    "mesa-drm-shim mesa-vulkan-drivers vulkan-tools libvulkan1 glslc libgomp1 python3 python3-venv ca-certificates vulkan-validationlayers"
)
LIBRARIES, DRIVERS = "/usr/lib/x86_64-linux-gnu", "/usr/share/vulkan/icd.d"
SWIFTSHADER = "/opt/swiftshader/usr/lib/chromium/vk_swiftshader_icd.json"
PYTHON = "/opt/venv/bin/python"
PEER = "/opt/peer"

SHIMS = {
    "amd": ("amdgpu", "radeon", "AMDGPU_GPU_ID"),
    "adreno": ("freedreno", "freedreno", "FD_GPU_ID"),
    "nvk": ("nouveau", "nouveau", "NOUVEAU_CHIPSET"),
    "apple": ("asahi", "asahi", ""),
}
"""By family the shim, the driver, and the variable that names the chip."""

CHIPS = (
    *(f"amd:{chip}" for chip in (
        "polaris10", "polaris12", "vega10", "vega20", "raven", "raven2", "renoir", "navi10", "navi21", "vangogh", "rembrandt", "navi31",
        "navi33", "phoenix", "strix1", "gfx1201",
    )),
    *(f"adreno:{chip}" for chip in (730, 740, 750, 830)),
    *(f"nvk:{chip}" for chip in (120, 140, 160, 170, 190)),
    "apple",
)  # fmt: skip
EXECUTORS = ("lavapipe", "swiftshader")


class LabError(Exception):
    """What cannot be built or run, and what to do."""


def said(*argv: str, **kwargs: Any) -> str:
    """A command's output. Raises LabError with its last lines."""
    done = subprocess.run(argv, capture_output=True, text=True, **kwargs)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
        raise LabError(f"{' '.join(argv[:4])} ... failed with {done.returncode}:\n{last}")
    return done.stdout


class Root:
    """The Debian root; its mounts last until `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mounted: list[Path] = []
        if os.geteuid() != 0:
            raise LabError("the lab needs root: it builds a Debian root with debootstrap and mounts into it")

    def build(self) -> None:
        """Make what is missing."""
        made = self.folder / "opt/made"
        if not made.exists():
            print(f"building a Debian sid root in {self.folder}", file=sys.stderr)
            if shutil.which("debootstrap") is None:
                said("apt-get", "-qq", "install", "-y", "debootstrap")
            shutil.rmtree(self.folder, ignore_errors=True)
            said("debootstrap", "--variant=minbase", "--include=ca-certificates", "sid", str(self.folder))
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
                f"apt-get -qq install -y --no-install-recommends {PACKAGES}; "
                "cd /tmp && apt-get -qq download chromium-common; dpkg-deb -x chromium-common_*.deb /opt/swiftshader; "
                f"python3 -m venv /opt/venv && {PYTHON} -m pip install -q {SOURCE}[test] && {PYTHON} -m pip uninstall -q -y vkback"
            )
            made.write_text("")

    def mount(self, source: str, target: str) -> None:
        place = self.folder / target
        place.mkdir(parents=True, exist_ok=True)
        if not os.path.ismount(place):
            said("mount", "--bind", source, str(place))
            self._mounted.append(place)

    def shell(self, script: str) -> None:
        kept = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_", "REQUESTS_")) or k.lower().endswith("_proxy")}
        env = {**kept, "HOME": "/root", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        said("chroot", str(self.folder), "bash", "-ec", script, env=env)

    def command(self, target: str, argv: Sequence[str]) -> list[str]:
        """A command line that runs inside, on a chip or an executor, in the checkout."""
        env = {"HOME": "/root", "TERM": "dumb", "XDG_RUNTIME_DIR": "/tmp", "PATH": "/opt/venv/bin:/usr/bin:/bin", "PYTHONPATH": SOURCE}
        argv = [PYTHON, "-m", "vkback.cli.main", *argv[1:]] if argv[0] == "vkback" else list(argv)
        pairs = [f"{k}={v}" for k, v in {**env, **driver(target)}.items()]
        return ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "chroot", str(self.folder), "env", "-C", SOURCE, *pairs, *argv]

    def close(self) -> None:
        for place in reversed(self._mounted):
            subprocess.run(("umount", str(place)), check=False)


def driver(target: str) -> dict[str, str]:
    """Environment variables that choose a driver. Raises LabError for an unknown target."""
    if target == "lavapipe":
        return {"VK_DRIVER_FILES": f"{DRIVERS}/lvp_icd.json"}
    if target == "swiftshader":
        return {"VK_DRIVER_FILES": SWIFTSHADER}
    family, _, chip = target.partition(":")
    if family not in SHIMS:
        raise LabError(f"{target}: expected one of {', '.join((*CHIPS, *EXECUTORS))}")
    shim, name, variable = SHIMS[family]
    chosen = {variable: chip} if variable else {}
    return {"LD_PRELOAD": f"{LIBRARIES}/lib{shim}_noop_drm_shim.so", "VK_DRIVER_FILES": f"{DRIVERS}/{name}_icd.json", **chosen}


def kernels(root: Root, chips: Sequence[str], peer: bool, folder: Path) -> None:
    """A JSON file a chip, two chips at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = ["python", "bench/vendor_kernels.py", *(["--peer", PEER] if peer else [])]

    def one(chip: str) -> None:
        (folder / f"{chip.replace(':', '-')}.json").write_text(said(*root.command(chip, argv)))
        print(f"  {chip} done", file=sys.stderr)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, chips))


def loaded(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Chips and what was found of them, in the order of CHIPS."""
    files = {p.stem: p for p in folder.glob("*.json")}
    for chip in CHIPS:
        if path := files.get(chip.replace(":", "-")):
            yield chip, json.loads(path.read_text())


def rendered(found: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Markdown: a row a chip, type and way that the tables choose for it."""
    head = "| chip | type | way | registers | waves | in32 | peer in32 | ratio | arithmetic | bound | spills (peer) |"
    yield head
    yield "|---" * (head.count("|") - 1) + "|"
    for chip, data in found:
        for row in data["rows"]:
            ours, peer = row["ours"], row["peer"] or {}
            if row["path"] and not chosen(row, data):
                continue
            what = f"{row['quant']} {'MUL_MAT_ID' if row['experts'] else ''}".strip()
            if "error" in ours:
                yield f"| {chip} | {what} | {row['path']} | refused: {ours['error'].split(': ', 1)[-1]} |" + " |" * 7
                continue
            in32, theirs = ours["per_32"], peer.get("per_32")
            waves = "" if ours["waves"] is None else f"{ours['waves']}" + (f"/{ours['most_waves']}" if ours["most_waves"] else "")
            cells = (
                chip, what, row["path"], ours["registers"], waves, _figure(in32), _figure(theirs),
                f"{in32 / theirs:.2f}" if in32 and theirs else "", f"{ours['arithmetic']:.0%}" if ours["arithmetic"] is not None else "",
                ours["bound"], f"{(ours['spills'] or 0) + (ours['scratch'] or 0)} ({peer.get('spills', '')})",
            )  # fmt: skip
            yield "| " + " | ".join("" if c is None else str(c) for c in cells) + " |"


def chosen(row: dict[str, Any], data: dict[str, Any]) -> bool:
    """Whether a way is one that the tables may choose on the chip: integer dot products where they are accelerated."""
    return bool(row["path"] == "float" or data["int_dot"])


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def spilling(found: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """Kernels of ours that spill or use scratch memory."""
    return [
        f"{chip} {row['quant']} {row['path']}{' MUL_MAT_ID' if row['experts'] else ''}"
        for chip, data in found
        for row in data["rows"]
        if row["ours"].get("spills") or row["ours"].get("scratch")
    ]


def suite(root: Root, target: str) -> bool:
    """The quick suite and the built-in models on a driver that executes."""
    print(f"== {target}: quick suite", flush=True)
    passed = subprocess.run(root.command(target, ["vkback", "test-ops"])).returncode == 0
    for model in ("demo-dense", "demo-moe"):
        print(f"== {target}: {model}", flush=True)
        passed &= subprocess.run(root.command(target, ["vkback", "run", "-m", model, "-p", "It was a dark", "-n", "8"])).returncode == 0
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("/var/tmp/vkback-lab"))
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="llama.cpp's vulkan-shaders.spv of ggml 0.25.3")
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--only", choices=("table", "suite"))
    parser.add_argument("--out", type=Path, help="the table, beside printing it")
    parser.add_argument("--render", type=Path, metavar="FOLDER")
    parser.add_argument("--run", nargs=argparse.REMAINDER, metavar="TARGET COMMAND")
    args = parser.parse_args()
    if args.render:
        print("\n".join(rendered(loaded(args.render))))
        return 0
    root = Root(args.root)
    try:
        root.build()
        if args.peer:
            root.mount(str(args.peer.resolve()), PEER.lstrip("/"))
        if args.run:
            return subprocess.run(root.command(args.run[0], args.run[1:])).returncode
        passed = True
        if args.only != "suite":
            folder = args.root / "opt/found"
            kernels(root, args.chips.split(","), bool(args.peer), folder)
            lines = list(rendered(loaded(folder)))
            print("\n".join(lines))
            if args.out:
                args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
            spills = spilling(loaded(folder))
            print(f"kernels with spills or scratch memory: {', '.join(spills) or 'none'}")
            passed = not spills
        if args.only != "table":
            passed = all([suite(root, target) for target in EXECUTORS]) and passed
        return 0 if passed else 1
    except LabError as e:
        print(f"lab: error: {e}", file=sys.stderr)
        return 1
    finally:
        root.close()


if __name__ == "__main__":
    sys.exit(main())
