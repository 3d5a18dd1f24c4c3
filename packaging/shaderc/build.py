"""Builds the GLSL compiler that comes with vkback: libshaderc as a WebAssembly module, from Debian's sources, by the Zig that pip brings.

    python packaging/shaderc/build.py [--work DIR] [--parallel N]    make vkback/shader/shaderc/shaderc.wasm.xz and its manifest
    python packaging/shaderc/build.py --check                    make it and compare with the one that is there, byte for byte

Needs Debian or Ubuntu (apt fetches the sources of Debian 12 by the names of their packages, root is not needed), Python with venv, and
some 15 minutes of a processor. SOURCES has the digest of each file; another one is refused. vkback/shader/shaderc/README.md says
why it is these versions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "vkback" / "shader" / "shaderc"
SUITE = "bookworm"
TOOLS = ("ziglang==0.17.1", "cmake==4.4.5", "ninja==1.13.2")
TARGET = ("-target", "wasm32-wasi", "-mcpu=generic+bulk_memory+sign_ext+nontrapping_fptoint")
COMPILER = "shaderc 2023.2, glslang 12.0.0, spirv-tools 2023.1"

SOURCES = {
    "shaderc_2023.2.orig.tar.gz": "06c4e2fdd63d62b73450d7011b72e7720b416182fb883fb0aac0afe6db2df3f6",
    "glslang_12.0.0.orig.tar.gz": "7cb45842ec1d4b6ea775d624c3d2d8ba9450aa416b0482b0cc7e4fdd399c3d75",
    "spirv-tools_2023.1.orig.tar.gz": "f3d8245aeb89f098c01dddaa566f9c0f2aab4a3d62a9020afaeb676b5e7e64d4",
    "spirv-headers_1.6.1+1.3.239.0-1_all.deb": "0af7d53fb033dbcf0a35a2f27e5a4a609e1e2755477d4188743f3e4e3a62c760",
}
"""SHA-256 by file. The headers are text, so that Debian's binary package is as good as its source."""


class BuildError(Exception):
    """What failed."""


def run(*argv: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(a) for a in argv], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-20:])
        raise BuildError(f"{argv[0]} ended with {done.returncode}:\n{last}")
    return done.stdout


def fetch(work: Path) -> None:
    """The files of SOURCES, through an apt of its own beside the system's: the same mirror, but Debian 12's sources."""
    if all((work / name).is_file() for name in SOURCES):
        return
    sites = run("apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages").split()
    site = next((s for s in sites if s.rstrip("/").endswith("/debian")), None)
    if site is None:
        raise BuildError(f"apt knows no mirror of Debian; put these files into {work}: {', '.join(SOURCES)}")
    apt = work / "apt"
    for folder in ("lists/partial", "cache/archives/partial", "parts"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    (apt / "sources.list").write_text("".join(f"{kind} {signed} {site} {SUITE} main\n" for kind in ("deb", "deb-src")))
    places = {"Dir::Etc::SourceList": apt / "sources.list", "Dir::Etc::SourceParts": apt / "parts", "Dir::State::Lists": apt / "lists"}
    options = [f"-o{key}={value}" for key, value in (places | {"Dir::Cache": apt / "cache", "APT::Sandbox::User": "root"}).items()]
    run("apt-get", *options, "-qq", "update")
    for package in ("shaderc", "glslang", "spirv-tools"):
        run("apt-get", *options, "-qq", "source", "--download-only", package, cwd=work)
    run("apt-get", *options, "-qq", "download", "spirv-headers", cwd=work)


def unpack(work: Path) -> Path:
    """The sources by name of their project. Raises BuildError for a file that is not the recorded one."""
    into = work / "sources"
    if into.exists():
        shutil.rmtree(into)
    for name, digest in SOURCES.items():
        found = hashlib.sha256((work / name).read_bytes()).hexdigest()
        if found != digest:
            raise BuildError(f"{work / name} has the digest {found}, expected {digest}; remove it")
        folder = into / name.partition("_")[0]
        folder.mkdir(parents=True)
        if name.endswith(".deb"):
            run("dpkg-deb", "-x", work / name, folder / "deb")
            (folder / "deb" / "usr" / "include").rename(folder / "include")
        else:
            run("tar", "-xf", work / name, "--strip-components=1", "-C", folder)
    return into


def tools(work: Path) -> Path:
    """Zig, CMake and Ninja from pip; the folder with them and with Zig's wrappers, which CMake takes for compilers."""
    home = work / "tools"
    if not (home / "made").exists():
        venv.create(home, with_pip=True, clear=True)
        run(home / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS)
        zig = run(home / "bin" / "python", "-c", "import ziglang, pathlib; print(pathlib.Path(ziglang.__file__).parent / 'zig')").strip()
        for name, command in (("cc", "cc"), ("cxx", "c++"), ("ar", "ar"), ("ranlib", "ranlib")):
            target = f" {' '.join(TARGET)}" if name in ("cc", "cxx") else ""
            wrapper = home / "bin" / f"wasm-{name}"
            wrapper.write_text(f'#!/bin/sh\nexec {zig} {command}{target} "$@"\n')
            wrapper.chmod(0o755)
        (home / "made").touch()
    return home / "bin"


def build(work: Path, parallel: int) -> bytes:
    """The module. Paths of this machine do not enter it."""
    fetch(work)
    sources, programs, into = unpack(work), tools(work), work / "build"
    env = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "ZIG_GLOBAL_CACHE_DIR": str(work / "zig"),
        "SOURCE_DATE_EPOCH": "0",
    }
    names = {"C_COMPILER": "cc", "CXX_COMPILER": "cxx", "AR": "ar", "RANLIB": "ranlib"}
    defined = {f"CMAKE_{key}": str(programs / f"wasm-{name}") for key, name in names.items()}
    flags = f"-O2 -DNDEBUG -ffile-prefix-map={work}=/"
    defined |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "wasm32", "CMAKE_TRY_COMPILE_TARGET_TYPE": "STATIC_LIBRARY"}
    defined |= {"CMAKE_BUILD_TYPE": "Release", "CMAKE_CXX_FLAGS_RELEASE": flags, "CMAKE_C_FLAGS_RELEASE": flags, "SOURCES": str(sources)}
    run("cmake", "-S", HERE, "-B", into, "-G", "Ninja", *(f"-D{key}={value}" for key, value in defined.items()), env=env)
    run("ninja", "-C", into, f"-j{parallel}", "shaderc_wasm", env=env)
    return (into / "shaderc.wasm").read_bytes()


def licenses(sources: Path) -> str:
    """Of all that is in the module."""
    files = {name: next((sources / name).glob("LICENSE*")) for name in ("shaderc", "glslang", "spirv-tools")}
    files["spirv-headers"] = sources / "spirv-headers" / "deb" / "usr" / "share" / "doc" / "spirv-headers" / "copyright"
    return "\n\n".join(f"===== {name} =====\n\n{file.read_text(encoding='utf-8').strip()}" for name, file in files.items()) + "\n"


def write(module: bytes, sources: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    packed = lzma.compress(module, lzma.FORMAT_XZ, lzma.CHECK_CRC32, preset=9 | lzma.PRESET_EXTREME)
    (out / "shaderc.wasm.xz").write_bytes(packed)
    (out / "LICENSES").write_text(licenses(sources), encoding="utf-8")
    manifest = {
        "compiler": COMPILER,
        "sha256": hashlib.sha256(module).hexdigest(),
        "bytes": len(module),
        "made_with": list(TOOLS),
        "target": list(TARGET),
        "sources": SOURCES,
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    print(f"shaderc.wasm: {len(module) / 1e6:.2f} MB, packed {len(packed) / 1e6:.2f} MB, {manifest['sha256']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE.parents[1] / "build" / "shaderc")
    parser.add_argument("--parallel", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    module = build(work, args.parallel)
    if not args.check:
        write(module, work / "sources", OUT)
        return 0
    made, there = hashlib.sha256(module).hexdigest(), json.loads((OUT / "manifest.json").read_text(encoding="utf-8"))["sha256"]
    print(f"made {made}, there is {there}: {'the same' if made == there else 'ANOTHER ONE'}")
    return int(made != there)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BuildError, OSError) as error:
        sys.exit(f"build: {error}")
