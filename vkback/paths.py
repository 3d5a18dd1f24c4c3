"""Where the files that are not Python live: shader sources, tuning tables, built-in models.

A wheel carries the top-level folders `shaders/` and `tuning/` as `vkback/_shaders` and `vkback/_tuning`; a checkout has them
beside the package.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

from vkback.errors import VkbackError

_PACKAGE = Path(__file__).resolve().parent


class MissingFileError(VkbackError):
    """A file that belongs to vkback itself is not where this installation should have it."""


def _data_root(name: str) -> Path:
    packaged = _PACKAGE / f"_{name}"
    root = packaged if packaged.is_dir() else _PACKAGE.parent / name
    if not root.is_dir():
        raise MissingFileError(f"vkback's {name} folder is missing: neither {packaged} nor {root} exists. Reinstall with pip install .")
    return root


def shader_root() -> Path:
    """The folder of the shader families: `shader_root() / "mat_vec"`."""
    return _data_root("shaders")


def tuning_root() -> Path:
    """The folder of the tuning tables: `tuning_root() / "default.toml"`."""
    return _data_root("tuning")


def user_tuning_root() -> Path:
    """The user's own device tables: the folder VKBACK_TUNING, else `vkback/tuning` in the platform's settings folder. It need not exist."""
    if chosen := os.environ.get("VKBACK_TUNING"):
        return Path(chosen)
    if sys.platform == "win32":
        base = Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return base / "vkback" / "tuning"


def builtin_models() -> list[Path]:
    """The models that come with vkback, dense before mixture of experts."""
    return sorted((_PACKAGE / "models" / "builtin").glob("*.gguf"))


def builtin_model(name: str) -> Path:
    """A built-in model by its file name or the start of it: `builtin_model("demo-dense")`.

    Raises MissingFileError naming the models there are.
    """
    models = builtin_models()
    for path in models:
        if path.name.startswith(name):
            return path
    known = ", ".join(p.stem for p in models) or "none"
    raise MissingFileError(f"no built-in model is called {name!r}; there are: {known}")


def cache_dir() -> Path:
    """Where compiled shaders and pipelines are kept: VKBACK_CACHE, else `vkback` in the platform's cache folder. It need not exist."""
    if chosen := os.environ.get("VKBACK_CACHE"):
        return Path(chosen)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "vkback"


def write_atomic(path: Path, data: bytes, *, durable: bool = False) -> bool:
    """Write a file so that readers see the old content or the new, never a part. False when the disk refuses: a cache may be lost.

    durable  the data is on the disk before the file takes its place, so that this holds when the power fails, too
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True
