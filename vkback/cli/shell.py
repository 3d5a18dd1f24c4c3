"""What all commands share: the one place that turns an error into a line on stderr, and how a model is opened."""

from __future__ import annotations

import codecs
import errno
import gc
import math
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from io import TextIOWrapper, UnsupportedOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Protocol, TextIO, TypeVar, cast

import typer
from typer.core import TyperCommand

from vkback import paths
from vkback.cli.interrupts import interruptible
from vkback.cli.log_lines import log_lines
from vkback.cli.start import INTERRUPTED
from vkback.errors import VkbackError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from vkback.api import LoadedModel
    from vkback.engine.engine import Engine
    from vkback.engine.load_options import LoadOptions
    from vkback.events import Report
    from vkback.models.registry import Model
    from vkback.ops.lowering import Act, Sync
    from vkback.ops.matmul.gemm_problem import GemmKernel
    from vkback.program import CompileTotals

Loaded = TypeVar("Loaded")

ACTS: tuple[Act, ...] = ("auto", "f32", "q8_1")
"""Those of vkback/ops/lowering.py, which a command does not import before it needs it."""

ModelOption = Annotated[
    str | None,
    typer.Option(
        "-m", "--model", "-hf", "--hf-repo", help="GGUF file, built-in model, or with -hf USER/REPO[:TYPE] [default: demo-dense]."
    ),
]
ShapeOption = Annotated[
    str | None, typer.Option("--shape", metavar="NAME", help="A name of vkback synth --list in place of a model: no file is needed.")
]
DeviceOption = Annotated[str | None, typer.Option("--device", "-dev", help="Device by index, part of its name, or UUID.")]
DevicesOption = Annotated[
    str | None,
    typer.Option("--device", "-dev", help="Device by index, part of its name, or UUID; with commas several, each with some of the layers."),
]


CompileOnlyOption = Annotated[
    bool, typer.Option("--compile-only", help="Run nothing on the device. By default so where the driver has no hardware.")
]

JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


HUB, HUB_OPTIONS = "hf:", ("-hf", "--hf-repo")
"""What marks a model as that of a repository of Hugging Face."""

PICTURES = ("png", "svg", "pdf")
"""What matplotlib draws without anything else."""

WrongCommandLine: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for an unknown option, a missing one, or a value that is none: the UsageError of its click."""


class UsageError(VkbackError):
    """A command was given something it cannot act on, with what would do."""

    exit_code = 2


class OutputError(VkbackError):
    """A file that could be written when the command began, and no more at its end."""


class StreamDecoderLike(Protocol):
    """Turns ids into text as they come, holding back characters that are not whole yet; `flush` gives what is held."""

    def feed(self, id: int) -> str: ...

    def flush(self) -> str: ...


class TokenizerLike(Protocol):
    """What commands need of a tokenizer. `encode` puts the beginning-of-text token first where the model wants it."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def stream(self) -> StreamDecoderLike: ...


class CapabilitiesLike(Protocol):
    """What commands name of a device."""

    @property
    def name(self) -> str: ...

    @property
    def driver_name(self) -> str: ...

    @property
    def driver_info(self) -> str: ...

    @property
    def device_type(self) -> str: ...

    def summary_line(self, index: int = 0) -> str: ...


class DeviceLike(Protocol):
    @property
    def caps(self) -> CapabilitiesLike: ...


class EngineLike(Protocol):
    """What commands need of `vkback.engine.engine.Engine`; `prompt` returns once the device has done the work."""

    @property
    def devices(self) -> Any: ...

    @property
    def model(self) -> Any: ...

    @property
    def description(self) -> str: ...

    @property
    def host_weights(self) -> Any: ...

    @property
    def tuning(self) -> str: ...

    @property
    def tables(self) -> str: ...

    @property
    def fusion(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def n_params(self) -> int: ...

    @property
    def bytes_per_token(self) -> int: ...

    def prompt_flops(self, tokens: int, n_past: int = 0) -> int: ...

    def prompt_kernel(self, tokens: int) -> GemmKernel | None: ...

    @property
    def ubatch(self) -> int: ...

    @property
    def n_ctx(self) -> int: ...

    @property
    def compiled(self) -> CompileTotals: ...

    @property
    def device(self) -> DeviceLike: ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    def reset(self) -> None: ...

    def check_caches(self) -> None: ...

    def resize(self, n_ctx: int) -> None: ...

    def compile(self, *, prompt: int | Sequence[int] = 0, logits: bool = False, sampler: Any = None) -> None: ...

    def prepare(self, *, prompt: int | Sequence[int] = 0, logits: bool = False, sampler: Any = None) -> None: ...

    def prompt(self, tokens: Sequence[int]) -> None: ...

    def generate(self, first: int, n: int, *, sampler: Any, stop_at_eos: bool) -> Generator[int, None, None]: ...

    def decode_logits(self, token: int) -> npt.NDArray[np.float32]: ...


READER_GONE = {errno.EPIPE, errno.EINVAL} if sys.platform == "win32" else {errno.EPIPE}
"""What a system says to who writes into a pipe that nobody reads any more."""

SELDOM, OFTEN = (200_000, 10, 10), gc.get_threshold()
"""When garbage is collected until a model is loaded, and then. Modules, tables and plans are made to stay; at Python's own thresholds they
are looked through 240 times before the first token, a sixth of the main thread's time."""


def _loaded(model: Loaded) -> Loaded:
    """Collect garbage as usual from here on, but look through nothing that is there now."""
    if gc.get_threshold() == SELDOM:
        gc.freeze()
        gc.set_threshold(*OFTEN)
    return model


def run(app: Callable[..., Any], prog: str) -> NoReturn:
    """Run a command line. Errors become one line `prog: error: ...` and their exit code; wrong usage 2; Ctrl-C 130, other signals that end
    a process likewise; a reader of the output that is gone 1, without a word."""
    gc.set_threshold(*SELDOM)
    open_streams()
    code: Any = 0
    said = ""
    with interruptible() as came, log_lines():
        try:
            code = app(prog_name=prog, standalone_mode=False)
            sys.stdout.flush()  # what could not be written is an error now, and not when the interpreter ends
        except VkbackError as e:
            code, said = e.exit_code, str(e)
        except WrongCommandLine as e:
            code, said = UsageError.exit_code, wrong_command_line(e)
        except OSError as e:
            held = not flushed(sys.stdout) or e.errno == errno.ENOSPC  # what a full disk has refused may be dropped already
            where = e.filename or ("stdout" if held else "")
            code = VkbackError.exit_code
            gone = e.errno in READER_GONE and not e.filename
            said = "" if gone else f"{where}: {paths.reason(e)}".removeprefix(": ")
        except MemoryError as e:
            code, said = VkbackError.exit_code, f"the memory of this machine does not suffice: {e}".removesuffix(": ")
        except typer.Abort:  # what typer makes of an EOFError
            code, said = VkbackError.exit_code, "an input ends before it is whole"
        except KeyboardInterrupt:
            code = INTERRUPTED
        if code == INTERRUPTED and came:
            code = 128 + came[0]
        with suppress(OSError):
            if said:
                print(f"{prog}: error: {said}", file=sys.stderr)
        flushed(sys.stdout)
        flushed(sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def open_streams() -> None:
    """Make stdin, stdout and stderr streams that any text can go through. Those that the caller has closed are opened as if they led
    nowhere: else files that are opened next would get their numbers, and what anybody prints.

    A pipe or a file holds UTF-8, whatever the system's encoding is (cp1252 on Windows): that is what vkback's own readers expect. A
    terminal keeps its encoding. A character that it lacks is written as \\u2500; a byte of stdin that is none becomes a lone surrogate,
    which `unicode_text` refuses, and a line of it ends at \\r\\n, too, as one of a file does.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  as long as the process
        elif isinstance(stream, TextIOWrapper):
            foreign = not stream.isatty() and codecs.lookup(stream.encoding).name != "utf-8"
            with suppress(UnsupportedOperation):  # something was read of it already
                stream.reconfigure(
                    encoding="utf-8" if foreign else None, errors="surrogateescape" if name == "stdin" else "backslashreplace"
                )
                if name == "stdin":
                    stream.reconfigure(newline=None)


def unicode_text(text: str, named: str) -> str:
    """`text`, if all of it is characters, or UTF-8 in an encoding of the system that lacks them (LC_ALL=POSIX). Raises UsageError where
    bytes of a command line or of stdin were none."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        shown = text.encode("utf-8", "surrogateescape")
        with suppress(UnicodeDecodeError):
            return shown.decode("utf-8")
        raise UsageError(f"{named} {shown[:60]!r}{' ...' * (len(shown) > 60)}: not UTF-8 text; convert it, as with iconv -t UTF-8")
    return text


def flushed(stream: TextIO) -> bool:
    """Write what a stream still holds. Where that fails it is dropped, for the interpreter would try again at its end."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True


def wrong_command_line(error: Any) -> str:
    """What typer says of a command line, and which --help tells more."""
    said = " ".join(error.format_message().split()).rstrip(".")
    return f"{said}{'' if said.endswith('?') else ';'} {error.ctx.command_path} --help tells more" if error.ctx else said


CONTEXT = {"help_option_names": ["-h", "--help"]}


class Command(TyperCommand):
    """A command that understands options as they were meant, or refuses them: -ngl is not -n with the value gl, an option that holds one
    value, or none, is not given twice (of two values one would be dropped), nan and inf are no numbers to work with, and what is spelled
    almost right is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = hub_marked(args)
        if not ctx.resilient_parsing:
            self._check(ctx, args)
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            for param in order:
                times = sum(other is param for other in order)
                if times > 1 and not getattr(param, "multiple", False) and not param.is_eager:
                    name = "/".join(param.opts)
                    raise UsageError(f"{name} is given {times} times, expected once; {ctx.command_path} --help tells more")
        rest = super().parse_args(ctx, args)
        for param in [] if ctx.resilient_parsing else self.get_params(ctx):
            value = ctx.params.get(param.name or "")
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, float) and not math.isfinite(each):
                    ctx.fail(f"Invalid value for '{param.opts[0]}': {each}, expected a finite number")
        return rest

    def _check(self, ctx: Any, args: Sequence[str]) -> None:
        """Raises what typer raises of an option that there is not."""
        params = {name: param for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}
        words = iter(args)
        for word in words:
            if word == "--":
                return
            if not word.startswith("-") or not word.lstrip("-")[:1].isalpha():
                continue
            name, attached, _ = word.partition("=")
            if name not in params and word[1] != "-":
                name, attached = word[:2], word[2:]  # of one letter, with its value behind it
                if attached[:1].isalpha() and not takes_nothing(params, word):
                    refuse_option(ctx, word.partition("=")[0], params)
            if name not in params:
                refuse_option(ctx, name, params)
            if takes_value(params[name]) and not attached:
                next(words, None)


def hub_marked(args: Sequence[str]) -> list[str]:
    """Words of a command line with what follows -hf or --hf-repo marked as the name of a repository, for `model_path`."""
    marked, of_hub, ended = [], False, False
    for word in args:
        name, equals, value = word.partition("=")
        marked.append(f"{name}={HUB}{value}" if equals and name in HUB_OPTIONS and not ended else f"{HUB}{word}" if of_hub else word)
        ended = ended or word == "--"
        of_hub = word in HUB_OPTIONS and not ended
    return marked


def takes_value(param: Any) -> bool:
    return not (getattr(param, "is_flag", False) or getattr(param, "count", False))


def takes_nothing(params: Mapping[str, Any], word: str) -> bool:
    """Whether a word is several options of one letter that take no value, as -vj."""
    return all(f"-{letter}" in params and not takes_value(params[f"-{letter}"]) for letter in word[1:])


def refuse_option(ctx: Any, name: str, known: Iterable[str]) -> None:
    """Raises what typer raises of an option that there is not, with the one that was meant."""
    short = f"; a value stands apart from it: {name[:2]} {name[2:]}" if name[:2] in known and not name[2:].isalpha() else ""
    near = "" if short else did_you_mean(name, known)
    ctx.fail(f"No such option: {name}{near and '.'}{near}{short}")


def new_app(summary: str) -> typer.Typer:
    """A command line without commands yet: see `add_command`."""
    return typer.Typer(help=summary, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=CONTEXT)


def add_command(
    app: typer.Typer, function: Callable[..., object], name: str | None = None, summary: str | None = None, cls: type[Command] = Command
) -> None:
    app.command(name, cls=cls, short_help=summary, context_settings=CONTEXT)(function)


def asked_for(line: Sequence[str], program: str) -> str:
    """The command that a line asks for, also one that a shell wants to complete; "" where it names none."""
    typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS")
    words = line if f"_{program.upper()}_COMPLETE" not in os.environ or typed is None else typed.split()
    return next((word for word in words[1:] if word != "--"), "")  # the options that may stand before a command end there


def print_version(wanted: bool) -> None:
    """Version and build, and nothing else, where the option was given."""
    if not wanted:
        return
    import vkback
    from vkback.report.build import build_info

    commit, number = build_info()
    print(f"vkback {vkback.__version__}" + (f", build {commit} ({number})" if number else ""))
    raise typer.Exit


VersionOption = Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print version and build, and end.")]


def model_path(model: str | None) -> Path:
    """A path the user gave, a built-in model by its name, or of Hugging Face "hf:USER/REPO[:TYPE]", which is fetched; without any, the
    built-in dense one."""
    if model is None:
        return paths.builtin_model("demo-dense")
    if model.startswith(HUB):
        from vkback.gguf.hub import fetched

        return fetched(model.removeprefix(HUB))
    path = Path(model)
    if path.is_file():
        return path
    if model and path.parent == Path() and any(p.name.startswith(model) for p in paths.builtin_models()):
        try:
            return paths.builtin_model(model)
        except paths.MissingFileError as e:
            raise UsageError(f"model {model}: {e}") from e
    known = [p.stem for p in paths.builtin_models()]
    wrong = "the name is empty" if not model else paths.no_file(path)
    near = did_you_mean(model, [*known, *(stem.rpartition("-")[0] for stem in known)])
    if model and path.is_dir():
        near = f" `vkback convert {model} model.gguf` writes a folder of safetensors as a GGUF file."
    elif "://" in model or model.startswith("hf:"):
        near = " Download the file first, or give -hf USER/REPO[:TYPE] for a model of Hugging Face."
    raise UsageError(f"model {model}: {wrong}.{near} Give the path of a GGUF file, or a built-in model: {', '.join(known)}")


@contextmanager
def described_model(model: str | None, shape: str | None) -> Iterator[tuple[Model, str]]:
    """A model to plan, and what to call it: that of a file or, of a name of vkback synth --list, one whose file has no weights."""
    from vkback.models.registry import Model
    from vkback.models.synth import outline

    if shape is None:
        path = model_path(model)
        yield Model.open(path), str(path)
        return
    if model is not None:
        raise UsageError("--shape and --model exclude each other: one is the shape of a model, the other a file")
    yield Model.of(outline(shape)), shape


def cache_rows(model: Model, ctx: int | None, tokens: int, depth: int) -> int:
    """Rows of the KV cache: as asked, else as the model was trained. Raises UsageError where a batch behind others does not fit."""
    n_ctx = max(model.default_n_ctx, depth + tokens) if ctx is None else model.context(ctx)
    if depth + tokens > n_ctx:
        raise UsageError(f"--ctx {n_ctx}: {tokens} tokens behind {depth} others need {depth + tokens} rows")
    return n_ctx


def one_of(value: str, known: Sequence[str], option: str) -> str:
    """`value`, if it is one of those known; else UsageError naming them."""
    if value not in known:
        raise UsageError(f"{option} {value}: expected one of {', '.join(known)}")
    return value


FLASH_ATTN = {"auto": -1, "-1": -1, "on": 1, "1": 1, "off": 0, "0": 0}
"""What -fa may say, and what llama-bench's results say of it."""


def flash_attn_of(text: str) -> int:
    """1, 0 or -1 (auto) by what -fa says. Raises UsageError."""
    return FLASH_ATTN[one_of(text.strip().lower(), ("on", "off", "auto", "1", "0", "-1"), "-fa")]


def read_text(path: Path, option: str) -> str:
    """The UTF-8 text of a file the user named by an option. Raises UsageError saying why it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise UsageError(f"{option} {path}: cannot be read: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"{option} {path}: not UTF-8 text: {e.reason} at byte {e.start}") from e


def act_of(value: str) -> Act:
    """How activations enter a GEMV, as the user named it."""
    return cast("Act", one_of(value, ACTS, "--act"))


def sync_of(value: str) -> Sync:
    """What orders the stages of a token, as the user named it."""
    return cast("Sync", one_of(value, ("barrier", "sentinel"), "--sync"))


def output_file(path: Path, option: str, *inputs: Path) -> Path:
    """A file the user named to be written. Raises UsageError, before any work is done for it, saying why it cannot be written; an input
    is not overwritten, nor another file of a split model."""
    from vkback.gguf.file import files_beside

    if why := paths.unwritable(path):
        raise UsageError(f"{option} {path}: {why}")
    for given in (file for named in inputs for file in files_beside(named)):
        if path.exists() and given.exists() and path.samefile(given):
            raise UsageError(f"{option} {path}: is an input, which is not overwritten; give another name")
    return path


def picture_file(path: Path, option: str) -> Path:
    """The same of a picture. Raises UsageError, too, where none can be drawn."""
    one_of(path.suffix.lstrip("."), PICTURES, f"{option} {path}, ending")
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise UsageError(f"{option} needs matplotlib: pip install 'vkback[pictures]'") from e
    return output_file(path, option)


def write_output(path: Path, option: str, text: str) -> None:
    """Write such a file, whole or not at all. Raises OutputError."""
    with paths.new_file_or(OutputError, f"{option} {path}:", path) as part:
        part.write_text(text, encoding="utf-8")


def bars(wanted: bool = True, *, prompts: bool = False) -> Report | None:
    """What draws how far loads and compiles are, and long prompts where they count, too."""
    from vkback.report.bars import Bars

    return Bars(prompts=prompts) if wanted else None


def load_engine(path: Path, device: str | None, options: LoadOptions) -> AbstractContextManager[EngineLike]:
    """Open a model on a device, for tokens rather than text."""
    from vkback.api.model import host_rates, read_rates
    from vkback.engine.engine import Engine

    return _loaded(Engine.open(path, device, options, rates=read_rates, host_rates=host_rates))


def measured_read_rate(device: Any) -> float:
    """GB/s at which an open `vkback.device.Device` was just measured to read."""
    from vkback.shader import ShaderLibrary
    from vkback.timing.read_rate import measure_read_rate

    return measure_read_rate(device, ShaderLibrary()).gb_s


def measured_math_rate(device: Any, kernel: GemmKernel) -> float:
    """TFLOPS at which an open `vkback.device.Device` was just measured to multiply in registers, with a kernel's arithmetic."""
    from vkback.shader import ShaderLibrary
    from vkback.timing.math_rate import measure_math_rate

    return measure_math_rate(device, ShaderLibrary(), kernel).tflops


def make_sampler(*, temp: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0, **params: Any) -> Any:
    """How the next token is chosen; without arguments, the most likely one. params: the other parameters of `Sampler`."""
    from vkback.engine.sampler import Sampler

    return Sampler(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, **params)


def load_model(path: Path, device: str | None, options: LoadOptions, *, meanwhile: Callable[[Engine], object] | None = None) -> LoadedModel:
    """Open a model on a device, for text. meanwhile: as of `Engine.open`."""
    from vkback.api.model import open_model

    return _loaded(open_model(path, device, options, meanwhile=meanwhile))
