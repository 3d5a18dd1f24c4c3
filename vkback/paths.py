"""Where the files that are not Python live: shader sources, tuning tables, built-in models.

A wheel carries the top-level folders `shaders/` and `tuning/` as `vkback/_shaders` and `vkback/_tuning`; a checkout has them
beside the package.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from vkback.errors import VkbackError
from vkback.events import TO_MEND, log

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
    """The folder of the shader families: `shader_root() / "gemv"`."""
    return _data_root("shaders")


def tuning_root() -> Path:
    """The folder of the tuning tables: `tuning_root() / "default.toml"`."""
    return _data_root("tuning")


def home_dir() -> Path:
    """The user's home folder. A container's user whom the system does not know may have none, or HOME may be empty: then a place in which
    nothing can be kept, so that no file lands in the root or in the current folder."""
    if os.environ.get("HOME", "set"):
        try:
            return Path.home()
        except RuntimeError:
            pass
    return Path(os.devnull)


def user_tuning_root() -> Path:
    """The user's own device tables: the folder VKBACK_TUNING, else `vkback/tuning` in the platform's settings folder. It need not exist."""
    if chosen := os.environ.get("VKBACK_TUNING"):
        return Path(chosen)
    if sys.platform == "win32":
        base = Path(os.environ.get("APPDATA") or home_dir() / "AppData" / "Roaming")
    elif sys.platform == "darwin":
        base = home_dir() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or home_dir() / ".config")
    return base / "vkback" / "tuning"


def on_path(program: str) -> str | None:
    """Where a program lies in the folders of PATH. Not shutil.which: on Windows that takes a file of the current folder before those, and
    anybody may have left one there."""
    name = f"{program}.exe" if sys.platform == "win32" else program
    files = (Path(folder) / name for folder in os.get_exec_path() if folder)
    return next((str(file) for file in files if os.access(file, os.X_OK) and file.is_file()), None)


def builtin_models() -> list[Path]:
    """The models that come with vkback, dense before mixture of experts."""
    return sorted((_PACKAGE / "models" / "builtin").glob("*.gguf"))


def builtin_model(name: str) -> Path:
    """A built-in model by its whole name, with or without the type: "demo-dense", "demo-dense-Q4_K_M". What one such name alone begins with
    does, too; then a line of the log says which it is.

    Raises MissingFileError naming the models there are, or those that the name may mean.
    """
    stems = {p.stem: p for p in builtin_models()}
    names = {stem.rpartition("-")[0]: p for stem, p in reversed(stems.items())} | stems
    asked = name.removesuffix(".gguf")
    if asked in names:
        return names[asked]
    meant = [known for known in names if asked and known.startswith(asked)]
    short = [known for known in meant if known not in stems] or meant
    if len(short) == 1:
        log.info("%s is the built-in model %s", name, names[short[0]].stem)
        return names[short[0]]
    if meant:
        raise MissingFileError(f"{name!r} may be any of the built-in models {', '.join(p for p in meant if p in stems)}; give a whole name")
    raise MissingFileError(f"no built-in model is called {name!r}; there are: {', '.join(stems) or 'none'}")


def cache_dir() -> Path:
    """Where compiled shaders and pipelines are kept: VKBACK_CACHE, else `vkback` in the platform's cache folder. It need not exist."""
    if chosen := os.environ.get("VKBACK_CACHE"):
        return Path(chosen)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home_dir() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home_dir() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home_dir() / ".cache")
    return base / "vkback"


def unwritable(path: Path) -> str:
    """Why no file can be written under a name, "" where one can: asked before hours of work whose result should go there.

    A folder that is missing is not made: a name that was mistyped would leave gigabytes where nobody looks for them.
    """
    folder = path.parent
    try:
        if path.is_dir():
            return "is a folder; give the name of the file to write"
        if not folder.is_dir():
            return f"{folder} is no folder" if folder.exists() else f"there is no folder {folder}; make it, or give another name"
        if path.exists() and not os.access(path, os.W_OK):
            return "may not be overwritten; give another name"
        if not path.exists() or path.is_file():  # else a pipe or a device
            probe = _beside(path)
            probe.touch()
            probe.unlink()
    except OSError as e:
        return f"nothing can be written there: {reason(e)}"
    return ""


def no_file(path: Path) -> str:
    """What is there in place of a file."""
    with contextlib.suppress(OSError, ValueError):
        if path.is_dir():
            return "a folder"
        if path.exists():
            return "a pipe or a device, expected a file, which is read from several places at once"
        if path.is_symlink():
            return f"a link to {os.readlink(path)}, which is no file"  # noqa: PTH115  as the link has it
    return "no such file"


def reason(e: OSError) -> str:
    """Why a file could not be written, in words. numpy says of a full disk only how much of an array was written."""
    return "the disk is full" if e.errno == errno.ENOSPC else e.strerror or f"{e}, is the disk full?"


def _beside(path: Path) -> Path:
    """The name of a file while it is written."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")


@contextlib.contextmanager
def new_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """The name under which to write a file. It is renamed to `path` when the block ends, and removed where that ends by an error, so that
    readers see the old content or the new, never a part. What is no regular file (a pipe, /dev/null) is written itself.

    durable  the data is on the disk before the file takes its place, so that this holds when the power fails, too
    Raises OSError.
    """
    target = Path(os.path.realpath(path))  # a link stays, and its file is replaced
    if target.exists() and not target.is_file():
        yield target
        return
    part = _beside(target)
    _parts.add(part)
    try:
        yield part
        if durable:
            with part.open("rb+") as file:
                os.fsync(file.fileno())
        if target.exists():
            part.chmod(target.stat().st_mode & 0o7777)
        part.replace(target)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        _parts.discard(part)


_parts: set[Path] = set()
"""Files that are being written."""


@contextlib.contextmanager
def new_file_or(error: Callable[[str], Exception], named: str, path: Path, *, durable: bool = False) -> Iterator[Path]:
    """`new_file`, but what the disk refuses is raised as `error`: "NAMED cannot be written: the disk is full"."""
    try:
        with new_file(path, durable=durable) as part:
            yield part
    except OSError as e:
        raise error(f"{named} cannot be written: {reason(e)}") from e


def remove_parts() -> None:
    """Remove the files that `new_file` has begun, for a process that ends without leaving its blocks."""
    for part in tuple(_parts):
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def exclusive(lock: Path, busy: Callable[[], object]) -> Iterator[None]:
    """Hold a lock that one process has at a time, and that goes with it, however it ends.

    lock  its file, which is made with its folder
    busy  called where another process has the lock: it may raise an error; else the lock is waited for
    Raises OSError where there can be no such file.
    """
    from filelock import FileLock, Timeout

    lock.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        busy()
        held.acquire()
    except NotImplementedError as e:  # a file system without locks
        raise OSError(errno.ENOTSUP, str(e)) from e
    try:
        yield
    finally:
        held.release()


@contextlib.contextmanager
def only_writer(path: Path, busy: Callable[[], object]) -> Iterator[None]:
    """`alone` with a file that is written again and again. The lock is in the cache folder; where that cannot be written there is none."""
    name = hashlib.sha256(os.path.realpath(path).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(exclusive(cache_dir() / "locks" / f"{name}.lock", busy))
        yield


def write_atomic(path: Path, data: bytes) -> bool:
    """Write a file of vkback's own, as `new_file` does, its folder with it. False when the disk refuses."""
    return _refusal(path, data) is None


def write_cache(path: Path, data: bytes) -> None:
    """Write a file of a cache, which may be lost: that is logged once, since what it saves is then made anew on every run."""
    error = _refusal(path, data)
    if error is None or warned_of_cache:
        return
    warned_of_cache.append(True)
    folder = cache_dir()
    where = folder if path.is_relative_to(folder) else path.parent
    log.warning(
        "nothing can be kept in the cache %s: %s; kernels are made anew on every run. Give a folder that can be written by VKBACK_CACHE",
        where,
        reason(error),
        extra=TO_MEND,
    )


def try_cache() -> None:
    """Log now what `write_cache` would later, for the processes of a command, whose warnings nobody sees."""
    probe = _beside(cache_dir() / "probe")
    write_cache(probe, b"")
    with contextlib.suppress(OSError):
        probe.unlink()


warned_of_cache: list[bool] = []
"""Not empty once the warning of `write_cache` is logged."""


def _refusal(path: Path, data: bytes) -> OSError | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as part:
            part.write_bytes(data)
    except OSError as e:
        return None if isinstance(e, PermissionError) and _holds(path, data) else e
    return None


def _holds(path: Path, data: bytes) -> bool:
    """Whether a file has this content already. Windows replaces no file that another process reads, as it does one of the cache."""
    with contextlib.suppress(OSError):
        return path.read_bytes() == data
    return False
