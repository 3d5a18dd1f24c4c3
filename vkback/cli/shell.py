"""What all commands share: the one place that turns an error into a line on stderr, and how a model is opened."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol, Self, TextIO

import numpy as np
import numpy.typing as npt
import typer

from vkback import paths
from vkback.errors import VkbackError

DeviceOption = Annotated[str | None, typer.Option("--device", "-dev", help="Device by index, part of its name, or UUID.")]


class UsageError(VkbackError):
    """A command was given something it cannot act on, with what would do."""


class TokenizerLike(Protocol):
    """What commands need of a tokenizer. `encode` puts the beginning-of-text token first where the model wants it."""

    n_vocab: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class CapabilitiesLike(Protocol):
    """What commands name of a device."""

    @property
    def name(self) -> str: ...

    @property
    def driver_name(self) -> str: ...

    @property
    def driver_info(self) -> str: ...


class DeviceLike(Protocol):
    @property
    def caps(self) -> CapabilitiesLike: ...


class EngineLike(Protocol):
    """What commands need of `vkback.models.engine.Engine`; `prompt` returns once the device has done the work."""

    description: str
    size_bytes: int
    n_params: int
    bytes_per_token: int
    device: DeviceLike
    tokenizer: TokenizerLike
    n_past: int

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def reset(self) -> None: ...

    def prompt(self, tokens: Sequence[int]) -> None: ...

    def generate(self, first: int, n: int, *, sampler: Any, stop_at_eos: bool) -> Iterator[int]: ...

    def decode_logits(self, token: int) -> npt.NDArray[np.float32]: ...


def run(app: typer.Typer, prog: str) -> NoReturn:
    """Run a command line. Errors of ours become `prog: error: ...` and exit code 1; Ctrl-C exits with 130; wrong usage with 2."""
    try:
        app(prog_name=prog)
    except VkbackError as e:
        print(f"{prog}: error: {e}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def new_app(summary: str) -> typer.Typer:
    return typer.Typer(help=summary, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def model_path(model: str | None) -> Path:
    """A path the user gave, or a built-in model by its name; without any, the built-in dense one."""
    if model is None:
        return paths.builtin_model("demo-dense")
    path = Path(model)
    if path.is_file():
        return path
    if path.parent == Path() and any(p.name.startswith(model) for p in paths.builtin_models()):
        return paths.builtin_model(model)
    known = ", ".join(p.stem for p in paths.builtin_models())
    raise UsageError(f"model {model}: no such file. Give the path of a GGUF file, or a built-in model: {known}")


def one_of(value: str, known: Sequence[str], option: str) -> str:
    """`value`, if it is one of those known; else UsageError naming them."""
    if value not in known:
        raise UsageError(f"{option} {value}: expected one of {', '.join(known)}")
    return value


def open_for_writing(path: Path) -> TextIO:
    """Open a text file the user named. Raises UsageError saying why it cannot be written."""
    try:
        return path.open("w", encoding="utf-8")
    except OSError as e:
        raise UsageError(f"{path}: cannot be written: {e.strerror}") from e


def load_engine(path: Path, device: str | None, *, n_ctx: int | None, act: str = "auto", progress: bool = True) -> EngineLike:
    """Open a model on a device; see `Engine.load`."""
    from vkback.models.engine import Engine

    engine: EngineLike = Engine.load(path, device, n_ctx=n_ctx, act=act, progress=progress)
    return engine


def device_line(device: DeviceLike) -> str:
    """A device in one line, as llama-bench puts it above a table."""
    from vkback.device import summary_line

    return f"vkback: 0 = {summary_line(device.caps)}"


def make_sampler(*, temp: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0) -> Any:
    """How the next token is chosen; without arguments, the most likely one."""
    from vkback.models.engine import Sampler

    return Sampler(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
