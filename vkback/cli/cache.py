"""vkback cache: what is kept between runs, and its removal."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from vkback.cli.shell import JsonOption, UsageError


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove it all; kernels are then made anew.")] = False,
    part: Annotated[list[str] | None, typer.Option("--part", metavar="NAME", help="Only this part; may be repeated.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is kept between runs and how much it is, or remove it."""
    from vkback.kept import PARTS, files_of, limit_bytes, remove
    from vkback.paths import cache_dir, user_tuning_root
    from vkback.units import counted, size_text

    parts = part or list(PARTS)
    for name in parts:
        if name not in PARTS:
            raise UsageError(f"--part {name}: no part of the cache is called so; there are {', '.join(PARTS)}")
    kept = {name: files_of(name) for name in parts}
    if clear:
        number, size = remove(file for files in kept.values() for file in files)
        if as_json:
            print(json.dumps({"folder": str(cache_dir()), "removed": number, "bytes": size}, indent=1))
            return
        print(f"removed {counted(number, 'file')}, {size_text(size)}, from {cache_dir()}")
        return
    limit = limit_bytes()
    if as_json:
        sizes = {name: {"files": len(files), "bytes": sum(f.size for f in files)} for name, files in kept.items()}
        print(json.dumps({"folder": str(cache_dir()), "limit_bytes": limit, "parts": sizes, "tuning": str(user_tuning_root())}, indent=1))
        return
    print(f"{cache_dir()}, kept under {size_text(limit) if limit else 'no limit'}")
    for name, files in kept.items():
        print(f"  {name:10} {counted(len(files), 'file'):>12} {size_text(sum(f.size for f in files)):>12}  {PARTS[name]}")
    print(f"{user_tuning_root()}: your own tuning tables; --clear leaves them")
