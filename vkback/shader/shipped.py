"""Ordinary kernels as SPIR-V that comes with vkback, so that the first start needs no GLSL compiler and does not wait for one.

`shaders/prebuilt/ordinary/` has an archive for each shader file and weight type: an edit of one decoder rewrites one archive. An archive
is an xz stream of a JSON line, which names compiler and modules, and the modules one after the other in its order. Each has the hash of
its expanded source with all defines. A module whose source has changed since is passed over: its kernel comes from the cache or is
compiled, as any other. `tools/prebuilt.py` makes the archives and chooses what goes in.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from vkback.shader.compiler import TARGET
from vkback.shader.prebuilt import FOLDER, source_hash
from vkback.shader.source import Variant

ORDINARY = "ordinary"
SUFFIX = ".xz"
ARCHIVES_OPEN = 64


@dataclass(frozen=True)
class Archive:
    """The modules of one group. variants: in the order of the file; spirv: by hash of the source."""

    compiler: str
    hashes: dict[Variant, str]
    spirv: dict[str, bytes]


class Shipped:
    """The archives of a shaders folder, each read at the first request for a kernel of its group."""

    def __init__(self, shaders: Path) -> None:
        self._folder = shaders / FOLDER / ORDINARY

    def module(self, variant: Variant, text: str) -> bytes | None:
        """SPIR-V of a variant whose expanded source is `text`; None where there is none of exactly this source."""
        archive = read_archive(self._folder / group_file(variant))
        return archive.spirv.get(source_hash(text)) if archive else None

    def read_ahead(self, variants: Iterable[Variant]) -> None:
        """Unpack the archives of variants at once, each in a thread."""
        files = list(dict.fromkeys(self._folder / group_file(v) for v in variants))
        if len(files) > 1:
            with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1)) as pool:
                list(pool.map(read_archive, files))


def group_file(variant: Variant) -> str:
    """The archive that a variant belongs to: its source file and, where it has one, its weight type."""
    quant = dict(variant.defines).get("QUANT_FILE")
    parts = [variant.source.removesuffix(".comp").replace("/", "-"), *([Path(str(quant).strip('"')).stem] if quant else [])]
    return "-".join(parts) + SUFFIX


def read_archive(file: Path) -> Archive | None:
    """An archive; None where the file is missing, or damaged: its kernels are then compiled."""
    try:
        return _read(file, file.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(ARCHIVES_OPEN)
def _read(file: Path, changed_ns: int) -> Archive | None:
    try:
        head, _, modules = lzma.decompress(file.read_bytes(), lzma.FORMAT_XZ).partition(b"\n")
        listed = json.loads(head)
        at, spirv, hashes = 0, {}, {}
        for m in listed["modules"]:
            hashes[Variant(m["source"], tuple((k, v) for k, v in m["defines"]))] = m["hash"]
            spirv[m["hash"]] = modules[at : at + m["size"]]
            at += m["size"]
    except (lzma.LZMAError, EOFError, ValueError, KeyError, TypeError):
        return None
    return Archive(listed["compiler"], hashes, spirv) if at == len(modules) else None


def pack(compiler: str, modules: Mapping[Variant, tuple[str, bytes]]) -> bytes:
    """An archive of variants with the hash of their source and their SPIR-V. The same modules give the same bytes."""
    ordered = sorted(modules, key=lambda v: (v.source, repr(v.defines)))
    listed = [
        {"source": v.source, "defines": [list(d) for d in v.defines], "hash": modules[v][0], "size": len(modules[v][1])} for v in ordered
    ]
    head = json.dumps({"compiler": compiler, "target": TARGET, "modules": listed}, separators=(",", ":")).encode()
    raw = b"\n".join((head, b"".join(modules[v][1] for v in ordered)))
    return lzma.compress(raw, lzma.FORMAT_XZ, lzma.CHECK_CRC32, preset=9 | lzma.PRESET_EXTREME)


def groups(variants: Iterable[Variant]) -> dict[str, list[Variant]]:
    """Variants by the archive they belong to."""
    found: dict[str, list[Variant]] = {}
    for variant in variants:
        found.setdefault(group_file(variant), []).append(variant)
    return found


def shipped_variants(shaders: Path) -> dict[Variant, str]:
    """Every variant in the archives, with the hash of the source that its module was made of."""
    found: dict[Variant, str] = {}
    for file in sorted((shaders / FOLDER / ORDINARY).glob(f"*{SUFFIX}")):
        archive = read_archive(file)
        found |= archive.hashes if archive else {}
    return found
