"""The compilers of AMD, Qualcomm, Apple and NVIDIA (NVK) at the bench, without their cards: `make lab`.

    python tools/lab.py [--root DIR] [--peer FOLDER] [--chips amd:navi31,apple] [--only table|suite] [--out FILE.md] [--stop-after MINUTES]
    python tools/lab.py --run amd:gfx1201 vkback kernels -m MODEL          one command on one chip
    python tools/lab.py --render FOLDER                                    the table of JSON files that an earlier run left

Builds a Debian sid root with the newest Mesa, its no-op kernel shims, glslc and SwiftShader (as root, Debian or Ubuntu; a few minutes the
first time), prints what the compilers make of our GEMV kernels for every chip (bench/vendor_kernels.py), llama.cpp's beside them with
--peer, and runs the quick suite and the built-in models on lavapipe and SwiftShader, which execute, with a summary at the end. What was
done is kept in the root: called again, it goes on where it was stopped, and repeats nothing as long as code, shaders and tables are the
same. Exit code 1 where a case fails, a kernel of ours spills, or something is left to do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from debian_root import PROJECT, SOURCE, DebianRoot, RootError, said, work_in
from lab_suite import Result, minutes, run_suite, sources_digest, summary

PACKAGES = (
    "mesa-drm-shim mesa-vulkan-drivers vulkan-tools libvulkan1 glslc libgomp1 python3 python3-venv ca-certificates vulkan-validationlayers"
)
LIBRARIES, DRIVERS = "/usr/lib/x86_64-linux-gnu", "/usr/share/vulkan/icd.d"
SWIFTSHADER = "/opt/swiftshader/usr/lib/chromium/vk_swiftshader_icd.json"
PYTHON = "/opt/venv/bin/python"
GGML_FOLDER = "/opt/ggml"

SHIMS = {
    "amd": ("amdgpu", "radeon", "AMDGPU_GPU_ID"),
    "adreno": ("freedreno", "freedreno", "FD_GPU_ID"),
    "nvk": ("nouveau", "nouveau", "NOUVEAU_CHIPSET"),
    "apple": ("asahi", "asahi", ""),
}
"""By family the shim, the driver, and the variable that names the chip."""

CHIPS = (
    *(
        f"amd:{chip}"
        for chip in (
            "polaris10",
            "polaris12",
            "vega10",
            "vega20",
            "raven",
            "raven2",
            "renoir",
            "navi10",
            "navi21",
            "vangogh",
            "rembrandt",
            "navi31",
            "navi33",
            "phoenix",
            "strix1",
            "gfx1201",
        )
    ),
    *(f"adreno:{chip}" for chip in (730, 740, 750, 830)),
    *(f"nvk:{chip}" for chip in (120, 140, 160, 170, 190)),
    "apple",
)
EXECUTORS = ("lavapipe", "swiftshader")

CHIP_SECONDS = 20.0
"""Of a chip's table on a core, without ggml."""


class LabRoot(DebianRoot):
    """Debian sid with the newest Mesa, SwiftShader and the tests' packages."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "sid", PACKAGES)

    def make(self) -> None:
        self.build(
            "cd /tmp && apt-get -qq download chromium-common; dpkg-deb -x chromium-common_*.deb /opt/swiftshader; "
            f"python3 -m venv /opt/venv && {PYTHON} -m pip install -q {SOURCE}[test] && {PYTHON} -m pip uninstall -q -y vkback"
        )

    def command(self, target: str, argv: Sequence[str]) -> list[str]:
        """A command line that runs inside, on a chip or an executor, in the checkout."""
        env = {"HOME": "/root", "TERM": "dumb", "XDG_RUNTIME_DIR": "/tmp", "PATH": "/opt/venv/bin:/usr/bin:/bin", "PYTHONPATH": SOURCE}
        argv = [PYTHON, "-m", "vkback.cli.main", *argv[1:]] if argv[0] == "vkback" else list(argv)
        pairs = [f"{k}={v}" for k, v in {**env, **driver(target)}.items()]
        return ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "chroot", str(self.folder), "env", "-C", SOURCE, *pairs, *argv]


def driver(target: str) -> dict[str, str]:
    """Environment variables that choose a driver. Raises RootError for an unknown target."""
    if target == "lavapipe":
        return {"VK_DRIVER_FILES": f"{DRIVERS}/lvp_icd.json"}
    if target == "swiftshader":
        return {"VK_DRIVER_FILES": SWIFTSHADER}
    family, _, chip = target.partition(":")
    if family not in SHIMS:
        raise RootError(f"{target}: expected one of {', '.join((*CHIPS, *EXECUTORS))}")
    shim, name, variable = SHIMS[family]
    chosen = {variable: chip} if variable else {}
    return {"LD_PRELOAD": f"{LIBRARIES}/lib{shim}_noop_drm_shim.so", "VK_DRIVER_FILES": f"{DRIVERS}/{name}_icd.json", **chosen}


def kernels(root: LabRoot, chips: Sequence[str], ggml: bool, folder: Path, sources: str) -> None:
    """A JSON file a chip, two chips at a time; those that an earlier run made of the same sources stay."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = ["python", "bench/vendor_kernels.py", *(["--peer", GGML_FOLDER] if ggml else [])]
    mark = {"sources": sources, "with_peer": ggml}

    def made(chip: str) -> bool:
        path = folder / f"{chip.replace(':', '-')}.json"
        return path.exists() and mark.items() <= json.loads(path.read_text(encoding="utf-8")).items()

    missing = [chip for chip in chips if not made(chip)]
    print(
        f"== table: {len(chips)} chips, {len(chips) - len(missing)} made before; the rest take about "
        f"{minutes(len(missing) * CHIP_SECONDS / 2)} on two idle cores",
        file=sys.stderr,
    )
    begun, done = time.monotonic(), 0

    def one(chip: str) -> None:
        nonlocal done
        found = json.loads(said(*root.command(chip, argv)))
        (folder / f"{chip.replace(':', '-')}.json").write_text(json.dumps(mark | found, indent=1), encoding="utf-8")
        done += 1
        left = (time.monotonic() - begun) / done * (len(missing) - done)
        print(f"  {chip} done, {done} of {len(missing)}, about {minutes(left)} left", file=sys.stderr)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, missing))


def loaded(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Chips and what was found of them, in the order of CHIPS."""
    files = {p.stem: p for p in folder.glob("*.json")}
    for chip in CHIPS:
        if path := files.get(chip.replace(":", "-")):
            yield chip, json.loads(path.read_text(encoding="utf-8"))


def rendered(found: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """Markdown: a row a chip, type and kernel that the tables choose for it."""
    head = "| chip | type | kernel | registers | waves | in32 | ggml in32 | ratio | arithmetic | bound | spills (ggml) |"
    yield head
    yield "|---" * (head.count("|") - 1) + "|"
    for chip, data in found:
        for row in data["rows"]:
            ours, ggml = row["ours"], row["peer"] or {}
            if row["path"] and not chosen(row, data):
                continue
            what = f"{row['quant']} {'MUL_MAT_ID' if row['experts'] else ''}".strip()
            if "error" in ours:
                yield f"| {chip} | {what} | {row['path']} | refused: {ours['error'].split(': ', 1)[-1]} |" + " |" * 7
                continue
            in32, theirs = ours["per_32"], ggml.get("per_32")
            waves = "" if ours["waves"] is None else f"{ours['waves']}" + (f"/{ours['most_waves']}" if ours["most_waves"] else "")
            cells = (
                chip,
                what,
                row["path"],
                ours["registers"],
                waves,
                _figure(in32),
                _figure(theirs),
                f"{in32 / theirs:.2f}" if in32 and theirs else "",
                f"{ours['arithmetic']:.0%}" if ours["arithmetic"] is not None else "",
                ours["bound"],
                f"{(ours['spills'] or 0) + (ours['scratch'] or 0)} ({ggml.get('spills', '')})",
            )
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


def limited(argv: Sequence[str]) -> list[str]:
    """Under half of the machine's memory: SwiftShader's compiler may ask for more than there is."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return ["prlimit", f"--as={half}", *argv]


def suite(
    root: LabRoot, target: str, folder: Path, sources: str, stop_after: float | None, other: bool
) -> tuple[list[Result | None], bool | None]:
    """The quick suite and, when all of it has run, the built-in models on a driver that executes."""
    results = run_suite(
        target,
        lambda argv: limited(root.command(target, argv)),
        folder / f"suite-{target}.jsonl",
        sources,
        stop_after=stop_after,
        other_sources=other,
    )
    if None in results:
        return results, None
    return results, subprocess.run(limited(root.command(target, ["python", "bench/text_against_twin.py"]))).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("/var/tmp/vkback-lab"))
    parser.add_argument("--peer", type=Path, metavar="FOLDER", help="llama.cpp's vulkan-shaders.spv of ggml 0.25.3")
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--only", choices=("table", "suite"))
    parser.add_argument("--executors", default=",".join(EXECUTORS), help="drivers that run the suite")
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="of a driver's suite; called again, it goes on")
    parser.add_argument("--any-sources", action="store_true", help="count results of the suite from before code, shaders or tables changed")
    parser.add_argument("--out", type=Path, help="the table, beside printing it")
    parser.add_argument("--render", type=Path, metavar="FOLDER")
    parser.add_argument("--run", nargs=argparse.REMAINDER, metavar="TARGET COMMAND")
    args = parser.parse_args()
    if args.render:
        print("\n".join(rendered(loaded(args.render))))
        return 0

    def work(root: LabRoot) -> int:
        if args.peer:
            root.mount(str(args.peer.resolve()), GGML_FOLDER.lstrip("/"))
        if args.run:
            return subprocess.run(root.command(args.run[0], args.run[1:])).returncode
        passed = True
        folder, sources = args.root / "opt/found", sources_digest(PROJECT)
        if args.only != "suite":
            kernels(root, args.chips.split(","), bool(args.peer), folder, sources)
            lines = list(rendered(loaded(folder)))
            print("\n".join(lines))
            if args.out:
                args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
            spills = spilling(loaded(folder))
            print(f"kernels with spills or scratch memory: {', '.join(spills) or 'none'}")
            passed = not spills
        if args.only != "table":
            stop = args.stop_after and 60 * args.stop_after
            ran = [(t, *suite(root, t, folder, sources, stop, args.any_sources)) for t in args.executors.split(",")]
            print("\n".join(summary(ran)))
            if left := [t for t, results, _ in ran if None in results]:
                print(f"not finished: {', '.join(left)}; the same command goes on from here")
            passed &= all(texts and all(r and r.fine for r in results) for _, results, texts in ran)
        return 0 if passed else 1

    return work_in("lab", lambda: LabRoot(args.root), work)


if __name__ == "__main__":
    sys.exit(main())
