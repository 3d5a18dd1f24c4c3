"""SPIR-V that comes with the shaders, for kernels that common GLSL compilers are too old for.

`shaders/prebuilt/manifest.json` names the compiler and lists the modules, each by the hash of its expanded source with all defines, without
comments and blank lines. So a module whose code has changed since is not used, and `tools/prebuilt.py --check` finds it. Specialization
constants do not enter a module.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vkback.shader.compiler import TARGET
from vkback.shader.source import Variant, expand

if TYPE_CHECKING:
    from vkback.shader.library import ShaderLibrary

FOLDER = "prebuilt"
MANIFEST = "manifest.json"


def source_hash(text: str) -> str:
    """What a module is known by: its expanded source and what it is compiled for."""
    return hashlib.sha256(f"{TARGET}\0{text}".encode()).hexdigest()[:40]


@dataclass(frozen=True)
class Prebuilt:
    """The modules of a shaders folder. files: file names by hash."""

    root: Path
    compiler: str
    files: dict[str, str]

    @classmethod
    def read(cls, shaders: Path) -> Prebuilt:
        """Of a folder without a manifest: no modules."""
        root = shaders / FOLDER
        try:
            manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        except OSError:
            return cls(root, "", {})
        return cls(root, manifest["compiler"], {m["hash"]: m["file"] for m in manifest["modules"]})

    def module(self, text: str) -> bytes | None:
        """SPIR-V of an expanded source, or None where there is none of exactly this source, or its file is missing."""
        name = self.files.get(source_hash(text))
        try:
            return (self.root / name).read_bytes() if name else None
        except FileNotFoundError:
            return None


def module_name(variant: Variant) -> str:
    """A file name for a variant: its source and the values of its defines."""
    values = [Path(str(v).strip('"')).stem for _, v in variant.defines]
    return "-".join([variant.source.removesuffix(".comp").replace("/", "-"), *values]) + ".spv"


def write(shaders: Path, variants: list[Variant], library: ShaderLibrary) -> None:
    """Compile variants and write them with their manifest; other modules of the folder are removed."""
    made = library.compile_many(variants)
    root = shaders / FOLDER
    root.mkdir(exist_ok=True)
    modules = []
    text = ""
    for variant in sorted(variants, key=module_name):
        file = module_name(variant)
        (root / file).write_bytes(made[variant])
        text = expand(shaders, variant).text
        modules.append({"file": file, "source": variant.source, "defines": dict(variant.defines), "hash": source_hash(text)})
    for old in root.glob("*.spv"):
        if old.name not in {m["file"] for m in modules}:
            old.unlink()
    manifest = {"compiler": library.compiler_of(text).identity, "target": TARGET, "modules": modules}
    (root / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def stale(shaders: Path, variants: list[Variant]) -> list[str]:
    """Names of variants whose module is missing or was made of another source."""
    found = Prebuilt.read(shaders)
    return [v.name for v in variants if found.module(expand(shaders, v).text) is None]
