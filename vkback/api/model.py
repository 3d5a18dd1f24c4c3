"""A loaded model: text in, text out, and the numbers behind it."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from vkback import paths
from vkback.api import chat_template, given
from vkback.api.adapters import LoadedAdapter, LoraChoice, chosen, scale_of, scales_of
from vkback.api.batch_stream import BatchStream
from vkback.api.batched import BatchedTexts
from vkback.api.best_of import BestOf
from vkback.api.chat_template import GIVE_ONE, ChatFormat, ChatTemplateWarning
from vkback.api.errors import ContextLengthError, ModelError, too_long
from vkback.api.given import Prompt, Prompts
from vkback.api.message import MessageReader
from vkback.api.options import GenerateOptions, Options, with_keywords
from vkback.api.reasoning import NO_MARKS, Marks, marks_of
from vkback.api.result import Result
from vkback.api.score import Score
from vkback.api.score import score as score_of
from vkback.api.session import Session
from vkback.api.shared import SharedTexts, TextRequest
from vkback.api.stream import EngineText, Stream
from vkback.api.tools.known import GENERAL, format_of
from vkback.api.tools.use import ToolLike, ToolUse, tool_use
from vkback.api.turns import Turns
from vkback.api.vectors import EMBEDS, Pair, Vectors, pair_of, ranked, vectors, width
from vkback.device import Device as VulkanDevice
from vkback.engine.batch.batch import SEQUENCES, Batch
from vkback.engine.batch.steps import class_of
from vkback.engine.constraint import Constraint, Gbnf, JsonGrammar
from vkback.engine.draft_model import ROOM, check_draft_model
from vkback.engine.drafts import Drafts
from vkback.engine.engine import Engine
from vkback.engine.host_weights import LayersOnDevice, guessed_rates
from vkback.engine.load_options import Exact, LoadOptions
from vkback.engine.sampler import Sampler
from vkback.engine.split.side_by_side import ManyTexts, SideBySide
from vkback.evaluate.perplexity import OnScored, Perplexity
from vkback.evaluate.perplexity import perplexity as perplexity_of
from vkback.events import Report
from vkback.gguf.fingerprint import fingerprint
from vkback.gguf.tokenizer import Tokenizer
from vkback.models.adapter import Given, LoraLike, without_adapters
from vkback.models.adapter import given as adapters_given
from vkback.models.eagle3 import is_head
from vkback.models.naming import model_title
from vkback.models.registry import Model
from vkback.models.texts import Pooling
from vkback.ops.lowering import Act
from vkback.report.bars import Bars
from vkback.shader import ShaderLibrary
from vkback.timing.read_rate import HOST_BYTES, measure_read_rate

if TYPE_CHECKING:
    from vkback.api.device import Device
    from vkback.api.profile import Profile

CPU_SEQUENCES = 8
"""Texts of a batch that run at once on a CPU driver, unless somebody asks for others: more columns take as much longer there."""

COLUMNS_OF_DRAFTS = 4
"""Columns of a step for each text of a batch on a CPU driver where drafts were asked for; without them one."""

PINNED_SEQUENCES = 8
"""The same where texts keep their bits whoever is served: one alone takes as long as so many."""

TEMPLATE_KEY = "tokenizer.chat_template"

Devices: TypeAlias = "Device | str | int | Sequence[Device | str | int] | None"
"""One device, or several."""

Conversation = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Messages, one of them, or the text of one of the user."""
Conversations = Sequence[str | Sequence[Mapping[str, Any]]]
"""Several. A message is none of them, for a list of messages is one conversation."""


class ChatOptions(GenerateOptions, total=False):
    """Keywords of `chat`: those of `generate`, and those that `Session.stream_chat` explains."""

    template: str | None
    template_kwargs: Mapping[str, Any] | None
    tools: Iterable[ToolLike] | None
    tool_choice: str | Mapping[str, Any]


@given.only_known(
    who="load",
    elsewhere={"n_ctx": "ctx", "model_path": "model", "path": "model", "n_batch": "ubatch", "n_ubatch": "ubatch", "main_gpu": "device"}
    | {"lora_path": "lora", "type_k": "cache_type_k", "type_v": "cache_type_v", "n_parallel": "sequences", "draft_model": "model_draft"},
    needless={"n_threads": "the host computes nothing", "use_mmap": "files are mapped"}
    | {"flash_attn": "attention is fused wherever it can be", "verbose": "lines go to the logger vkback", "seed": "each call takes one"},
)
def load(
    model: str | Path = "demo-dense",
    device: Devices = None,
    ctx: int | None = None,
    *,
    act: Act = "auto",
    ubatch: int | None = None,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    exact: Exact = False,
    sequences: int | None = None,
    spec_type: str | None = None,
    model_draft: str | Path | None = None,
    draft_max: int | None = None,
    draft_min: int = 0,
    draft_p_min: float = 0.0,
    spec_pinned: int = 0,
    spec_earlier: bool = False,
    lora: LoraLike | Sequence[Given] | None = None,
    lora_scale: float | Sequence[float] = 1.0,
    tensor_split: Sequence[float] | None = None,
    n_gpu_layers: LayersOnDevice | None = None,
    n_cpu_moe: int | None = None,
    cpu_moe: bool = False,
    expert_cache: int = 0,
    progress: bool | Report = False,
) -> LoadedModel:
    """Open a GGUF file, or a built-in model by its name, on a device.

    device    a `vkback.Device`; index, part of the name, or UUID; None: VKBACK_DEVICE, else the best GPU; a list of these, or a text with
              commas between them: each has some of the layers, in this order (docs/several_devices.md)
    ctx       tokens of the context; 0: as trained; default: as trained, at most 4096
    act       "auto", "f32" (float path) or "q8_1" (integer dot wherever there is a kernel)
    ubatch    tokens of a prompt processed at once, at most
    cache_type_k, cache_type_v  "f16", "f32", "q8_0" or "q4_0": what keys and values are kept as
    exact     "requests": texts of a batch have the same bits whoever else is served; True: the logits of a token have, however many tokens
              went with it, which is slower
    sequences  texts of a batch that run at once, at most; default: 8 on CPU drivers and with exact="requests", else 64
    spec_type  "ngram-simple": tokens are drafted from copies in the text, and those accepted that the model picks itself; "draft-mtp": by
              the file's own block for further tokens; "draft-simple", "draft-eagle3": by model_draft; "none"; default: as model_draft is,
              else the first, but none on CPU drivers. docs/drafts.md tells when a text has the same bits
    model_draft  a smaller model with the same vocabulary, whose tokens are the drafts, or an EAGLE-3 head for the model
    draft_max, draft_min  drafts of a step, at most and at least
    draft_p_min  probability that a draft model must give to a draft; those of a step end before one that has less
    spec_pinned  4, 8 or 16 tokens in every step: the text has the same bits whatever is drafted
    spec_earlier  drafts from earlier texts, too
    lora      an adapter file (`vkback finetune`), (file, scale), or a list of these: what several add to a weight is added up
    lora_scale  a number that multiplies all adapters, or one for each
    tensor_split  shares of the layers, one for each of several devices; None: by their memory and how fast they read it
    n_gpu_layers  layers that keep their weights on the device: the output layer first, then from the last on; kernels read the others' in
              memory of the host, for models that are larger than the device's; "all", or "auto": as many as fit; default: "auto", but
              "all" with n_cpu_moe or cpu_moe (docs/host_memory.md)
    n_cpu_moe  layers, from the first on, whose experts lie in memory of the host; 0: none; default: as many as must
    cpu_moe   those of all layers
    expert_cache  experts of each such layer that the device keeps in its own memory, those that were used last; 0: none
    progress  bars on a terminal while weights load and kernels compile; or a function that is called with each `vkback.Progress`
    Raises VkbackError for a missing or broken file, no device, or too little memory.
    """
    options = LoadOptions(
        ctx=ctx,
        act=act,
        ubatch=ubatch,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        exact=exact,
        sequences=sequences,
        spec_type=spec_type,
        model_draft=model_draft,
        draft_max=draft_max,
        draft_min=draft_min,
        draft_p_min=draft_p_min,
        spec_pinned=spec_pinned,
        spec_earlier=spec_earlier,
        lora=adapters_given(lora, lora_scale),
        tensor_split=None if tensor_split is None else tuple(tensor_split),
        n_gpu_layers=n_gpu_layers,
        n_cpu_moe=n_cpu_moe,
        cpu_moe=cpu_moe,
        expert_cache=expert_cache,
        progress=reported(progress),
    )
    loaded = open_model(model, device, options)
    if loaded.template_problem:
        said = f"[chat] {loaded.name}: its chat template is broken, chat needs another: {loaded.template_problem}; {GIVE_ONE}"
        warnings.warn(said, ChatTemplateWarning, stacklevel=2)
    return loaded


def open_model(
    model: str | Path, device: Devices, options: LoadOptions, *, meanwhile: Callable[[Engine], object] | None = None
) -> LoadedModel:
    """As `load`, without its warning of a broken chat template: commands that need one tell of it.

    meanwhile: as of `Engine.open`; by default it compiles what nearly every use needs.
    """
    path = path_of(model)
    where = _devices_given(device)
    begun = time.perf_counter()
    if options.model_draft is not None:
        draft = path_of(options.model_draft)
        kind = options.spec_type or ("draft-eagle3" if is_head(draft) else "draft-simple")
        options = replace(options, model_draft=draft, spec_type=kind)
    draft_model = options.model_draft if options.spec_type == "draft-simple" else None

    def while_weights_come(engine: Engine) -> None:
        if draft_model is not None:
            check_draft_model(engine.model, Model.open(draft_model))
        (meanwhile or _compile_ahead)(engine)

    engine = Engine.open(path, where, options, meanwhile=while_weights_come, rates=read_rates, host_rates=host_rates)
    if draft_model is not None:
        try:
            _attach_draft_model(engine, Path(draft_model), options)
        except BaseException:
            engine.close()
            raise
    sequences = options.sequences or (PINNED_SEQUENCES if engine.pinned else None)
    drafts = options.drafts(software=engine.device.caps.software)
    if not engine.device.caps.software and engine.model.architecture.causal:  # a CPU driver needs the cores for what runs
        engine.compile_drafts_ahead(drafts, [Options().sampler, Sampler()])
    return LoadedModel(engine, time.perf_counter() - begun, sequences, drafts)


def _devices_given(device: Devices) -> VulkanDevice | str | int | Sequence[VulkanDevice | str | int] | None:
    from vkback.api.device import Device as ApiDevice

    def one(each: Device | str | int | None) -> VulkanDevice | str | int | None:
        return each.raw if isinstance(each, ApiDevice) else given.device("device", each)

    if not isinstance(device, list | tuple):
        return one(cast("Device | str | int | None", device))
    found = [checked for each in device if (checked := one(each)) is not None]
    if not found or len(found) < len(device):
        raise given.wrong("device", device, "one device, or a list of some")
    return found


def read_rates(devices: Sequence[VulkanDevice]) -> list[float]:
    """GB/s at which each was just measured to read; of the same chip once."""
    found: dict[str, float] = {}
    for device in devices:
        if device.caps.name not in found:
            found[device.caps.name] = measure_read_rate(device, ShaderLibrary()).gb_s
    return [found[device.caps.name] for device in devices]


MIN_MEASURED = 64 << 20
"""Bytes that must be free to measure a rate."""


def host_rates(device: VulkanDevice) -> tuple[float, float]:
    """GB/s at which a device was just measured to read its own memory, and that of the host; guesses for a CPU driver, whose memory is one,
    and where little is free."""
    if device.caps.software or device.free_memory() < MIN_MEASURED:
        return guessed_rates(device.caps)
    library = ShaderLibrary()
    return measure_read_rate(device, library).gb_s, measure_read_rate(device, library, HOST_BYTES, "host").gb_s


WHERE_FITS: dict[str, Any] = {"n_gpu_layers": None, "n_cpu_moe": None, "cpu_moe": False, "expert_cache": 0}
"""What is asked of a target is not asked of its draft model, which is small and runs more often."""


def _attach_draft_model(engine: Engine, path: Path, options: LoadOptions) -> None:
    """Open a draft model beside its target, which closes it."""
    how = replace(options, ctx=engine.n_ctx + ROOM, model_draft=None, spec_type="none", lora=(), **WHERE_FITS)
    draft = Engine.open(path, engine.device, how)
    try:
        engine.attach_draft_model(draft)
    except BaseException:
        draft.close()
        raise


def reported(progress: bool | Report, who: str = "model") -> Report | None:
    """The function that `progress=` stands for: True draws bars."""
    if callable(progress):
        return progress
    return Bars() if given.flag("progress", progress, who) else None


def _compile_ahead(engine: Engine) -> None:
    """What nearly every use needs, while weights are on their way. A CPU driver needs the cores for those, and seconds for each kernel."""
    if not engine.device.caps.software and engine.model.has_text and engine.model.architecture.causal:
        engine.compile(sampler=Options().sampler)


def path_of(model: str | Path) -> Path:
    """A GGUF file, or that of a built-in model by its name. Raises ModelError."""
    path = given.path("model", model)
    if path.is_file():
        return path
    named = path.parent == Path() and not path.suffix  # as a built-in model is
    if not named or ((path.exists() or path.is_symlink()) and not any(p.name.startswith(path.name) for p in paths.builtin_models())):
        near = ""
        if path.is_dir():
            near = f" `vkback convert {path} model.gguf` writes a folder of safetensors as a GGUF file."
        elif not path.exists() and not path.is_absolute() and len(path.parts) == 2 and not path.suffix:
            repository = str(model).removeprefix("hf:").removeprefix("hf.co/")
            near = f" `vkback pull {repository}` fetches a model of Hugging Face and prints its path."
        raise ModelError(f"[model] {path}: {paths.no_file(path)}.{near} Give the path of a GGUF file, or a built-in model: {_builtin()}")
    return paths.builtin_model(str(model))


def _builtin() -> str:
    return ", ".join(p.stem for p in paths.builtin_models())


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation, for the assistant to go on with.

    ids           its tokens
    text          what they are of
    stops         strings that end the reply beside those requested
    marks         how to tell thoughts and answer apart
    moved_system  the system message stands in the user's, since the template has no place for it
    use           the tools that the reply may call
    """

    ids: list[int]
    text: str
    stops: tuple[str, ...]
    marks: Marks
    moved_system: bool = False
    use: ToolUse | None = None

    def reader(self, *, thoughts: bool = True) -> MessageReader:
        """Of a reply. thoughts: whether it tells them from the answer."""
        marks = self.marks if thoughts else NO_MARKS
        return MessageReader(marks) if self.use is None else self.use.reader(marks)

    def reader_for(self, options: Options) -> MessageReader:
        """Of a reply with these options: JSON by schema alone, or a text by grammar, is all answer."""
        return self.reader(thoughts=options.form is None or self.use is not None)


MOVED_SYSTEM = "the chat template has no place for a system message; it stands before the first message of the user"


def _listed(prompt: Prompt | Prompts) -> Prompts:
    """The same as a list of texts."""
    return cast(Prompts, prompt if given.several(prompt) is not None else [prompt])


def _conversations(messages: Conversation | Conversations) -> list[Conversation] | None:
    """The conversations, where these are several: a list of lists of messages, or of texts. None: one, or what is none."""
    found: list[Any] = list(messages) if isinstance(messages, list | tuple) else []
    return found if found and all(isinstance(each, str | list | tuple) for each in found) else None


class LoadedModel:
    """A model on a device. Use as a context manager, or call `close`.

    Any thread may call it: calls take turns, and texts of a batch, or all texts where it was loaded for several sequences, run beside each
    other. `generate`, `stream`, `chat` and `stream_chat` begin with an empty context, so the same call gives the same text whatever ran
    before; a `session` keeps its text.
    """

    def __init__(self, engine: Engine, load_s: float = 0.0, sequences: int | None = None, drafts: Drafts | None = None) -> None:
        """Use `vkback.load`. load_s: seconds that it took. sequences: as there. drafts: those that texts may have."""
        self.engine = engine
        self._sequences, self._drafts = sequences, drafts
        self.load_s = load_s
        self._turns = Turns()
        self._closed = False
        found = engine.model.adapters if self._switched else ()
        self._adapters = [LoadedAdapter(i, adapter.path, adapter.scale) for i, adapter in enumerate(found)]
        self._on_device: weakref.ref[Session] | None = None
        self._running: EngineText | None = None
        self._batched: BatchedTexts | None = None
        self.texts = SharedTexts(self)
        self._told_of_system = False
        self.warm: set[str] = set()

    def __reduce__(self) -> NoReturn:
        raise ModelError(f"[model] {self.name} cannot be copied or sent to another process: load it in each process that uses it")

    # -- facts

    @property
    def name(self) -> str:
        """File name."""
        return self.engine.model.file.path.name

    @property
    def description(self) -> str:
        """As llama-bench prints it: `llama 8B Q4_K - Medium`."""
        return self.engine.description

    @property
    def title(self) -> str:
        """The name in the file, the number of parameters, and the description."""
        return model_title(self.engine.model.file)

    @property
    def n_ctx(self) -> int:
        return self.engine.n_ctx

    @property
    def n_vocab(self) -> int:
        return self.engine.model.hp.n_vocab

    @property
    def tokenizer(self) -> Tokenizer:
        """Of a file without vocabulary one that refuses text, and for which every id is an empty text."""
        return self.engine.tokenizer

    @property
    def template(self) -> str | None:
        """The file's own chat template."""
        found = self.engine.model.file.metadata.get(TEMPLATE_KEY)
        return found if isinstance(found, str) else None

    @cached_property
    def template_problem(self) -> str:
        """What is wrong with how that is written; "" if nothing is, or if there is none."""
        return chat_template.problem(self.template) if self.template is not None else ""

    def chat_format(self, template: str | None = None, *, tools: bool = False) -> ChatFormat:
        """How a conversation becomes text: by a template, given by name or as text; without one by the file's own; the built-in models have
        `plain`, and stop at "User:". tools: by the file's own for tools, if it has one. Raises ChatTemplateError where there is none."""
        own = self.template
        if tools:
            found = self.engine.model.file.metadata.get(f"{TEMPLATE_KEY}.tool_use")
            own = found if isinstance(found, str) else own
        return chat_template.format_of(template, own, model=self.name, builtin=self._builtin)

    @cached_property
    def _builtin(self) -> bool:
        path = self.engine.model.file.path
        return any(path.name == other.name and path.samefile(other) for other in paths.builtin_models())

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(without_adapters(self.engine.model).file)

    def _adapter_names(self, scales: Sequence[float]) -> str:
        """Which adapter files are beside the weights, and what they are multiplied by."""
        found = self.engine.model.adapters
        if self._switched:
            found = tuple(replace(adapter, scale=scale) for adapter, scale in zip(found, scales, strict=False) if scale)
        return ", ".join(adapter.name for adapter in found)

    # -- adapters

    @property
    def _switched(self) -> bool:
        lora = self.engine.model.lora
        return lora is not None and lora.switched

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Those of `load_adapter`, by their numbers. Those of `load(lora=...)` are part of the model until another is loaded, and then are
        among these."""
        return tuple(self._adapters)

    def load_adapter(self, path: str | Path, scale: float = 1.0) -> LoadedAdapter:
        """Bring an adapter file beside the weights, which stay where they are. From then on texts choose adapters and their scales (`lora=`
        of `generate`, `chat`, `session` and the others), and texts of a batch each their own.

        scale  what texts multiply it by that do not choose; 0: they are made without it. `scale` of the adapter may be set at any time

        Programs are made anew, and each product that an adapter has a part in takes more work from then on, also while it is off. Raises
        AdapterError for a file that is no adapter of this model, ModelError while texts of a batch run.
        """
        file, times = given.path("path", path), scale_of("scale", scale)
        with self.using("load_adapter") as engine:
            if self._batched is not None and self._batched.busy:
                raise ModelError(f"[lora] {self.name}: texts of a batch run; load {file.name} before they begin, or when they have ended")
            known = self._adapters or [LoadedAdapter(i, each.path, each.scale) for i, each in enumerate(engine.model.adapters)]
            self.close_batch()
            engine.load_adapters([Given(each.path, each.scale) for each in known] + [Given(file, times)])
            self._adapters = [*known, LoadedAdapter(len(known), file, times)]
            self.warm.clear()
        return self._adapters[-1]

    def adapter_scales(self, options: Options) -> tuple[float, ...]:
        """What each adapter is multiplied by in a text of these options. Raises ModelError for adapters that there are not."""
        if options.lora and self.engine.model.adapters and not self._switched:
            raise ModelError(f"[lora] {self.name}: its adapters came with load(lora=...) and stay as they are; bring them by load_adapter")
        return scales_of(options.lora, self._adapters, self.name)

    @property
    def settings(self) -> Mapping[str, Any]:
        """All that the bits of a state depend on: model, device, driver, and how the model was loaded."""
        return self.settings_of(self.adapter_scales(Options()))

    def settings_of(self, scales: Sequence[float]) -> Mapping[str, Any]:
        """The same of a state that was read with these scales of adapters that are switched."""
        caps, devices = self.engine.device.caps, self.engine.devices
        adapters = self._adapter_names(scales)
        return {
            "model": self._fingerprint + (f" with {adapters}" if adapters else ""),
            "name": self.name,
            "ctx": self.engine.n_ctx,
            "act": self.engine.ctx.act,
            "cache": f"{self.engine.cache_types.k}, {self.engine.cache_types.v}",
            "fusion": self.engine.fusion,
            "exact": self.engine.ctx.exact,
            "device": caps.name if len({d.caps.name for d in devices}) == 1 else ", ".join(d.caps.name for d in devices),
            "driver": f"{caps.driver_name} {caps.driver_info}",
            **({"lora": adapters} if adapters else {}),
        }

    @property
    def sequences(self) -> int:
        """Texts of a batch that run at once, at most."""
        if (several := len(self.engine.devices)) > 1:
            return min(self._sequences or several, several)
        return self._sequences or (CPU_SEQUENCES if self.engine.device.caps.software else SEQUENCES)

    @property
    def shared(self) -> bool:
        """Whether it was loaded for several sequences, so that all texts share the steps of a batch."""
        return self._sequences is not None and self._sequences > 1

    def drafts(self, options: Options) -> Drafts | None:
        """Those that a text of these options may have."""
        return None if self._drafts is None else self._drafts.at_most(options.draft_max)

    # -- text

    @overload
    def generate(self, prompt: Prompt, *, best_of: int | None = None, **options: Unpack[GenerateOptions]) -> Result: ...

    @overload
    def generate(self, prompt: Prompt, *, n: int, best_of: int | None = None, **options: Unpack[GenerateOptions]) -> list[Result]: ...

    @overload
    def generate(
        self, prompt: Prompts, *, n: int | None = None, best_of: int | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Result]: ...

    @with_keywords
    def generate(
        self, prompt: Prompt | Prompts, *, n: int | None = None, best_of: int | None = None, **options: Unpack[GenerateOptions]
    ) -> Result | list[Result]:
        """Continue a text, given as text or token ids; or each of a list of them, or one n times, all at once, as `batch` does. best_of:
        make so many of each, and give the n (default: one) whose tokens are the likeliest on average."""
        single = n is None and given.several(prompt) is None
        if single and best_of is None:
            return Session(self, lasting=False).generate(cast(Prompt, prompt), **options)
        found = self.batch(_listed(prompt), n=1 if n is None else n, best_of=best_of, **options)
        return found[0] if single else found

    @overload
    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream: ...

    @overload
    def stream(self, prompt: Prompts, **options: Unpack[GenerateOptions]) -> BatchStream: ...

    @with_keywords
    def stream(self, prompt: Prompt | Prompts, **options: Unpack[GenerateOptions]) -> Stream | BatchStream:
        """As `generate`, piece by piece: `for piece in model.stream(...): print(piece.text, end="", flush=True)`."""
        if given.several(prompt) is not None:
            return self.batch_stream(cast(Prompts, prompt), **options)
        return Session(self, lasting=False).stream(cast(Prompt, prompt), **options)

    @with_keywords
    def batch(
        self, prompts: Prompts, *, sequences: int | None = None, n: int = 1, best_of: int | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Result]:
        """Continue many texts at once, each given as text or token ids: one step of the model makes a token of each.

        sequences  texts that run at once, at most; the others wait. None: as the model was loaded
        n          texts for each prompt, with seeds seed, seed + 1, ...: results 0 to n - 1 are of the first prompt
        best_of    texts that are made for each prompt: results are the n whose tokens are the likeliest on average, the best first

        A text is what `generate` gives, up to rounding: sums of steps with more columns are added in another order. Raises the error of a
        text that fails; what cannot be asked for is found before any begins.
        """
        best = BestOf.of(n, best_of, options)
        stream: BatchStream = self.batch_stream(prompts, sequences=sequences, n=best.made, **best.options)
        return best.chosen(stream.finished())

    @with_keywords
    def batch_stream(
        self, prompts: Prompts, *, sequences: int | None = None, n: int = 1, **options: Unpack[GenerateOptions]
    ) -> BatchStream:
        """As `batch`, piece by piece: `for index, piece in model.batch_stream(...)`, index being that of the result."""
        checked = self._for_batch(options)
        found = given.several(prompts)
        if found is None and not (isinstance(prompts, list | tuple) and not prompts):
            raise given.wrong("prompts", prompts, "a list of texts, or of lists of token ids; generate takes one")
        asked = []
        for i, prompt in enumerate(found or []):
            self.require_room(prompt, f"prompts[{i}]: ")
            ids = self.ids(prompt, start=True, name=f"prompts[{i}]")
            asked.append(TextRequest(ids, checked, partial(self.constraint, checked.form)))
        return self._batch_of(asked, sequences, n, "prompts")

    def _for_batch(self, options: Mapping[str, Any]) -> Options:
        checked = Options.of(options, self.n_vocab)
        self.adapter_scales(checked)
        self.constraint(checked.form)  # whether there is one is known before anything runs
        return checked

    def _batch_of(self, asked: Sequence[TextRequest], sequences: int | None, n: int, name: str) -> BatchStream:
        """n texts of each, with seeds that follow each other. name: of what they were given as, for errors."""
        n = given.whole("n", n, "a whole number, 1 or more", 1)
        if sequences is not None:
            sequences = given.whole("sequences", sequences, "a whole number, 1 or more, or None", 1)
        for i, each in enumerate(asked):
            if len(each.prompt) > self.n_ctx:
                raise too_long(len(each.prompt), self.n_ctx, f"{name}[{i}]: ")
        self.require_open("batch")
        texts = [
            replace(each, options=replace(each.options, seed=each.options.seed + i), sequences=sequences, left=threading.Event())
            for each in asked
            for i in range(n)
        ]
        return BatchStream(self.texts, texts, sequences or self.sequences)

    @overload
    def chat(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self, messages: Conversation, *, max_rounds: int = 0, **options: Unpack[ChatOptions]
    ) -> Result: ...

    @overload
    def chat(self, messages: Conversation, *, n: int, **options: Unpack[ChatOptions]) -> list[Result]: ...

    @overload
    def chat(self, messages: Conversations, *, n: int | None = None, **options: Unpack[ChatOptions]) -> list[Result]: ...

    @with_keywords
    def chat(
        self, messages: Conversation | Conversations, *, n: int | None = None, max_rounds: int = 0, **options: Unpack[ChatOptions]
    ) -> Result | list[Result]:
        """Answer a conversation, [{"role": "user", "content": ...}, ...], by the file's template. `Session.stream_chat` and `Session.chat`
        have the rest. A list of conversations, or n answers to one, are made all at once, as `batch` makes texts."""
        if n is None and _conversations(messages) is None:
            return Session(self, lasting=False).chat(cast(Conversation, messages), max_rounds=max_rounds, **options)
        if max_rounds:
            raise given.wrong("max_rounds", max_rounds, "0 for several conversations, or n replies: their calls are given back")
        return self._chats(messages, 1 if n is None else n, **options).finished()

    @overload
    def stream_chat(self, messages: Conversation, **options: Unpack[ChatOptions]) -> Stream: ...  # type: ignore[overload-overlap]

    @overload
    def stream_chat(self, messages: Conversations, **options: Unpack[ChatOptions]) -> BatchStream: ...

    @with_keywords
    def stream_chat(self, messages: Conversation | Conversations, **options: Unpack[ChatOptions]) -> Stream | BatchStream:
        """As `chat`, piece by piece."""
        if _conversations(messages) is not None:
            return self._chats(messages, 1, **options)
        return Session(self, lasting=False).stream_chat(cast(Conversation, messages), **options)

    def _chats(
        self,
        messages: Conversation | Conversations,
        n: int,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Iterable[ToolLike] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        **options: Unpack[GenerateOptions],
    ) -> BatchStream:
        checked, use = self._for_batch(options), tool_use(tools, tool_choice)
        asked = []
        for i, each in enumerate(_conversations(messages) or [cast(Conversation, messages)]):
            try:
                prompt, own = self.chat_asked(each, template, template_kwargs, use, checked)
            except ContextLengthError as e:
                raise too_long(e.tokens, e.n_ctx, f"messages[{i}]: at least ") from e
            asked.append(TextRequest(prompt.ids, own, partial(self.constraint_of, prompt, own), partial(prompt.reader_for, own)))
        return self._batch_of(asked, None, n, "messages")

    # -- text, in tasks of an event loop

    @overload
    def astream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream: ...

    @overload
    def astream(self, prompt: Prompts, **options: Unpack[GenerateOptions]) -> BatchStream: ...

    @with_keywords
    def astream(self, prompt: Prompt | Prompts, **options: Unpack[GenerateOptions]) -> Stream | BatchStream:
        """`async for piece in model.astream(prompt)`, or `async for index, piece in model.astream(prompts)`: texts of all tasks share the
        steps of the model's batch."""
        if given.several(prompt) is not None:
            return self.batch_stream(cast(Prompts, prompt), **options)
        self._for_batch(options)
        return Session(self, lasting=False, shared=True).stream(cast(Prompt, prompt), **options)

    @overload
    async def agenerate(self, prompt: Prompt, *, best_of: int | None = None, **options: Unpack[GenerateOptions]) -> Result: ...

    @overload
    async def agenerate(
        self, prompt: Prompt, *, n: int, best_of: int | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Result]: ...

    @overload
    async def agenerate(
        self, prompt: Prompts, *, n: int | None = None, best_of: int | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Result]: ...

    @with_keywords
    async def agenerate(
        self, prompt: Prompt | Prompts, *, n: int | None = None, best_of: int | None = None, **options: Unpack[GenerateOptions]
    ) -> Result | list[Result]:
        """`await model.agenerate(prompt)`: as `generate`, and as `astream` beside the texts of other tasks."""
        single = n is None and given.several(prompt) is None
        if single and best_of is None:
            return await self.astream(cast(Prompt, prompt), **options).afinished()
        best = BestOf.of(1 if n is None else n, best_of, options)
        stream: BatchStream = self.batch_stream(_listed(prompt), n=best.made, **best.options)
        found = best.chosen(await stream.afinished())
        return found[0] if single else found

    @with_keywords
    def astream_chat(self, messages: Conversation, **options: Unpack[ChatOptions]) -> Stream:
        """`async for piece in model.astream_chat(messages)`: as `chat`, and as `astream` beside the texts of other tasks."""
        return Session(self, lasting=False, shared=True).stream_chat(messages, **options)

    @with_keywords
    async def achat(self, messages: Conversation, **options: Unpack[ChatOptions]) -> Result:
        """`await model.achat(messages)`: as `chat`, and as `astream` beside the texts of other tasks."""
        return await self.astream_chat(messages, **options).afinished()

    def session(self, *, lora: LoraChoice = None) -> Session:
        """An empty text that grows, may be saved, loaded and forked. lora: adapters of its calls that choose none, as of `generate`."""
        self.require_open("session")
        wanted = chosen("lora", lora)
        self.adapter_scales(Options(lora=wanted))
        return Session(self, lora=wanted)

    # -- vectors

    def embed(self, texts: Prompt | Prompts, *, normalize: bool = True, pooling: Pooling | None = None) -> Vectors:
        """A vector for each text, given as text or token ids: float32 [n, n_embd], n_embd being `embedding_width`; of one text [n_embd].

        normalize  scale every vector to length 1, so that the dot product of two is their cosine
        pooling    "mean", "cls" (the first token's), "last" (the last token's); None: what the file says, of an encoder that says nothing
                   "mean"

        As many texts go through at once as have room. What a session or a stream holds stays. Raises ModelError for a text without a token,
        for a file that does not say how to pool and a call that does not either; ContextLengthError for a text longer than the context.
        """
        one = given.several(texts) is None and not (isinstance(texts, list | tuple) and not texts)
        prompts: list[Prompt] = [cast(Prompt, texts)] if one else [cast(Prompt, text) for text in texts]
        with self._whole_texts("embed") as engine:
            if pooling is not None:
                pooling = given.choice("pooling", pooling, EMBEDS)
            found = list(vectors(engine, self.text_ids(prompts), pooling, given.flag("normalize", normalize)))
        rows = np.stack(found) if found else np.zeros((0, self.embedding_width), np.float32)
        return rows[0] if one else rows

    def embed_tokens(self, text: Prompt, *, normalize: bool = False) -> Vectors:
        """What each token of a text comes out as: float32 [tokens, n_embd], before any pooling."""
        with self._whole_texts("embed_tokens") as engine:
            (found,) = vectors(engine, self.text_ids([text]), "none", normalize)
        return found

    def rank(self, query: str, documents: Sequence[str]) -> Vectors:
        """How well each document answers a query, by a reranker's classifier: float32 [n], the more the better. Scores are what the
        classifier gives (logits), of Qwen3's probabilities. Raises ModelError where the file has no classifier."""
        if isinstance(documents, str) or not all(isinstance(each, str) for each in documents):
            raise given.wrong("documents", documents, "a list of texts")
        with self._whole_texts("rank") as engine:
            pairs = [self.pair_ids(query, document, i) for i, document in enumerate(documents)]
            return ranked(engine, pairs)

    @property
    def embedding_width(self) -> int:
        """Values of a vector that `embed` gives."""
        return width(self.engine.model)

    def text_ids(self, texts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of whole texts, with what the model wants at their beginning and end. Raises ModelError, ContextLengthError."""
        found = []
        for i, text in enumerate(texts):
            self.require_room(text)
            ids = self.tokenizer.encode(text) if isinstance(text, str) else given.token_ids(f"texts[{i}]", text, self.n_vocab)
            found.append(self._fitting(ids, i))
        return found

    def pair_ids(self, query: str, document: str, i: int = 0) -> Pair:
        """Token ids of a query and a document, as the model wants two texts, and the segment of each. Raises ModelError,
        ContextLengthError."""
        for text in (query, document):
            self.require_room(text)
        f = self.engine.model.file
        template = f.metadata.get(f"{TEMPLATE_KEY}.rerank")
        two_ends = f.arch == "bert" and f.metadata.get("tokenizer.ggml.model") != "bert"  # of BERT's shape, but not of its vocabulary
        own = template if isinstance(template, str) else None
        pair = pair_of(self.tokenizer, query, document, template=own, two_ends=two_ends)
        self._fitting(pair[0], i)
        return pair

    def _fitting(self, ids: list[int], i: int) -> list[int]:
        if not ids:
            raise ModelError(f"[model] {self.name}: text {i} has no token; give another text")
        if len(ids) > self.n_ctx:
            raise too_long(len(ids), self.n_ctx, f"texts[{i}]: ")
        return ids

    # -- numbers

    @overload
    def logits(self, tokens: Prompt) -> npt.NDArray[np.float32]: ...

    @overload
    def logits(self, tokens: Prompts) -> list[npt.NDArray[np.float32]]: ...

    def logits(self, tokens: Prompt | Prompts) -> npt.NDArray[np.float32] | list[npt.NDArray[np.float32]]:
        """Logits after each token, from an empty context: float32 [n, n_vocab]; of a list of texts one for each."""
        if (several := given.several(tokens)) is not None:
            return [self.logits(each) for each in several]
        with self.using("logits") as engine:
            ids = self.ids(cast(Prompt, tokens), start=True)
            return engine.prompt_logits(ids)

    @overload
    def score(self, text: Prompt, *, after: Prompt = "") -> Score: ...

    @overload
    def score(self, text: Prompts, *, after: Prompt = "") -> list[Score]: ...

    def score(self, text: Prompt | Prompts, *, after: Prompt = "") -> Score | list[Score]:
        """How likely a given text is, token by token, from an empty context; of a list of texts one for each.

        after  what stands before it, which is not scored

        Raises ContextLengthError where both are longer than the context, ModelError for a text without a token.
        """
        if (several := given.several(text)) is not None:
            return [self.score(each, after=after) for each in several]
        with self.using("score") as engine:
            nothing = isinstance(after, Sized) and not len(after)
            before = self._start if nothing else self.ids(after, start=True)
            ids = [*before, *self.ids(cast(Prompt, text), start=not before)]
            if len(ids) > self.n_ctx:
                raise too_long(len(ids), self.n_ctx)
            return score_of(engine, ids, max(len(before), 1))

    @property
    def _start(self) -> list[int]:
        """What a text begins with."""
        tokenizer = self.tokenizer
        return [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []

    @overload
    def perplexity(
        self,
        text: Prompt,
        *,
        chunk: int = 512,
        n_chunks: int | None = None,
        sequences: int | None = None,
        on_chunk: Callable[[float], None] | None = None,
        on_scored: OnScored | None = None,
    ) -> Perplexity: ...

    @overload
    def perplexity(
        self,
        text: Prompts,
        *,
        chunk: int = 512,
        n_chunks: int | None = None,
        sequences: int | None = None,
        on_chunk: Callable[[float], None] | None = None,
        on_scored: OnScored | None = None,
    ) -> list[Perplexity]: ...

    def perplexity(
        self,
        text: Prompt | Prompts,
        *,
        chunk: int = 512,
        n_chunks: int | None = None,
        sequences: int | None = None,
        on_chunk: Callable[[float], None] | None = None,
        on_scored: OnScored | None = None,
    ) -> Perplexity | list[Perplexity]:
        """Perplexity of a text by llama-perplexity's rule: of chunks of `chunk` tokens (at most the context) the second half is scored; of
        a list of texts one for each.

        sequences  chunks that are read side by side, default: as many as pay on the device and fit into its memory; with `exact`, and of
                   recurrent models, one. Programs of other sizes round otherwise, which moves the last digits of the value
        on_chunk, on_scored  as in vkback/evaluate/perplexity.py
        """
        if (several := given.several(text)) is not None:
            how = {"chunk": chunk, "n_chunks": n_chunks, "sequences": sequences, "on_chunk": on_chunk, "on_scored": on_scored}
            return [self.perplexity(each, **cast(Any, how)) for each in several]
        size = min(given.whole("chunk", chunk, "a whole number, 1 or more", 1), self.n_ctx)
        if n_chunks is not None:
            n_chunks = given.whole("n_chunks", n_chunks, "a whole number, 1 or more, or None", 1)
        if sequences is not None:
            sequences = given.whole("sequences", sequences, "a whole number, 1 or more, or None", 1)
        with self.using("perplexity") as engine:
            logits = partial(engine.logits_side_by_side, at_once=sequences)
            ids = self.ids(cast(Prompt, text), start=True)
            bos = self.tokenizer.bos if self.tokenizer.add_bos else None
            return perplexity_of(ids, logits, bos=bos, n_ctx=size, n_chunks=n_chunks, on_chunk=on_chunk, on_scored=on_scored)

    def explain(self) -> str:
        """What runs for a generated token: stages, and each dispatch with its kernel and the reason for it."""
        with self.using("explain", keep=True) as engine:
            schedule = engine.schedule("greedy")
        lines = [f"{self.description} on {self.engine.device.caps.name}: {len(schedule.stages)} stages"]
        for number, stage in enumerate(schedule.stages):
            lines += [f"{number:4} {d.op:16} {d.label:24} {d.kernel.name}" + (f"  ({d.reason})" if d.reason else "") for d in stage]
        return "\n".join(lines)

    def profile(self, prompt: Prompt, tokens: int = 16, batch: int = 0) -> Profile:
        """Where the time of a prompt goes, of `tokens` tokens behind it, and of a batch of tokens at once (0: none), kernel by kernel, as
        `vkback profile` shows it: print it. Raises ProfileError where they do not fit the context."""
        from vkback.api.profile import Profile
        from vkback.timing.profile_model import profile

        tokens = given.whole("tokens", tokens, "a whole number, 1 or more", 1)
        batch = given.whole("batch", batch, "a whole number, 0 or more", 0)
        self.engine.require_one_device("a profile")
        with self.using("profile") as engine:
            return Profile.of(profile(engine, self.load_s, self.ids(prompt, start=True), tokens, batch, lambda _: None))

    # -- end

    def close(self) -> None:
        """Give everything back to the device. A second call does nothing."""
        if self.engine.device.forked:  # the objects are the other process's
            self._closed = True
        if not self._closed:
            self.texts.stop()
            with self.using("close", keep=True):
                if self._running is not None:
                    self._running.pause()
                self._closed = True
                self.close_batch()
                self.engine.close()

    def __enter__(self) -> Self:
        self.require_open("with")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<vkback model {self.description}, {self.name}{', closed' if self._closed else ''}>"

    # -- for sessions and streams

    def batched(self, sequences: int | None = None, *, rows: int | None = None, reuse: bool = True) -> BatchedTexts:
        """Texts at once, for a caller that has the model's turn: opened on first use, and anew where more sequences are asked for. rows,
        reuse: as of `Batch`."""
        sequences = self.sequences if len(self.engine.devices) > 1 else max(sequences or self.sequences, self._sequences or 1)
        if self._batched is not None and sequences > self._batched.sequences:
            self.close_batch()
        if self._batched is None:
            n_ctx = self.engine.n_ctx
            several = len(self.engine.devices) > 1
            if several:
                batch: ManyTexts = SideBySide(self.engine, sequences)
            else:
                batch = Batch(self.engine, sequences=sequences, rows=rows, reuse=reuse, max_step_tokens=self._step_tokens(sequences))
            self._batched = BatchedTexts(batch, self._drafts)
            if self.engine.n_ctx != n_ctx:
                self.warm.clear()
        return self._batched

    def _step_tokens(self, sequences: int) -> int | None:
        """Columns of a step of `batched`, None for as many as a batch has by itself, which on a CPU driver are one for each text: more of
        them where drafts were asked for."""
        drafting = self._drafts is not None and self._drafts.most and not self._drafts.model
        wide = drafting and self.engine.device.caps.software and not self.engine.pinned
        return class_of(COLUMNS_OF_DRAFTS * sequences) if wide else None

    @property
    def opened(self) -> BatchedTexts | None:
        """What `batched` has opened."""
        return self._batched

    def close_batch(self) -> None:
        """Give the memory of `batched` back."""
        if self._batched is not None:
            self._batched.close()
            self._batched = None

    def ids(self, text: Prompt, *, start: bool, name: str = "the prompt") -> list[int]:
        """Token ids of a text, with the beginning-of-text token where the model wants it at the start; ids as they are. name: in errors."""
        if isinstance(text, str):
            ids = self.tokenizer.encode(text, add_bos=None if start else False, add_end=False)  # for it goes on
        else:
            ids = given.token_ids(name, text, self.n_vocab)
        if not ids:
            raise ModelError(f"[model] {self.name}: {text!r} has no token; give another text")
        return ids

    def chat_prompt(
        self, messages: Conversation, template: str | None = None, variables: Mapping[str, Any] | None = None, use: ToolUse | None = None
    ) -> ChatPrompt:
        """A conversation, or one message of the user, as tokens, up to where the assistant goes on: with its next message, or with the last
        one where that is its own. variables: of the template, as {"enable_thinking": False}. use: tools that the reply may call.

        Nothing here needs the device, and any thread may call it. Raises ChatTemplateError, and ContextLengthError where it cannot fit.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        elif isinstance(messages, Mapping):
            messages = [messages]
        variables = chat_template.variables_given(variables)
        chosen = self.chat_format(template, tools=use is not None or bool(variables.get("tools")))
        bos, eos = self._spelled_ends
        tools = tuple(use.tools.values()) if use is not None else ()
        prompt = chat_template.compose(chosen.template, messages, model=self.name, bos=bos, eos=eos, variables=variables, tools=tools)
        self.require_room(prompt.text)
        ids = self.tokenizer.encode(
            prompt.text, add_bos=False if bos and prompt.text.startswith(bos) else None, add_end=False, parse_special=True
        )
        marks = marks_of(chosen.template, prompt.text, prompt.prefill)
        if use is not None:
            format = format_of(chosen.template) if chat_template.takes_of(chosen.template).tools else GENERAL
            begun = next((mark for mark in format.begun if prompt.text.rstrip().endswith(mark)), "")
            marks, use = replace(marks, calls=True), replace(use, format=format, begun=begun)
        return ChatPrompt(ids, prompt.text, chosen.stops, marks, prompt.moved_system, use)

    def chat_asked(
        self, messages: Conversation, template: str | None, variables: Mapping[str, Any] | None, use: ToolUse | None, checked: Options
    ) -> tuple[ChatPrompt, Options]:
        """A conversation, and options with what ends its reply. Warns once of a system message that the template has no place for. Raises
        what `chat_prompt` raises."""
        prompt = self.chat_prompt(messages, template, variables, use)
        if prompt.moved_system and not self._told_of_system:
            self._told_of_system = True
            warnings.warn(f"[chat] {self.name}: {MOVED_SYSTEM}", ChatTemplateWarning, stacklevel=4)
        if prompt.stops:
            checked = replace(checked, stop=(*checked.stop, *prompt.stops))
        return prompt, checked

    def chat_ids(self, messages: Conversation | ChatPrompt, template: str | None) -> list[int]:
        """The tokens of `chat_prompt`, or of what it has given."""
        return messages.ids if isinstance(messages, ChatPrompt) else self.chat_prompt(messages, template).ids

    @property
    def _spelled_ends(self) -> tuple[str, str]:
        """Texts of the tokens that begin and end a text, for templates."""
        tokenizer = self.tokenizer
        bos, eos = (
            "" if token is None else tokenizer.token_bytes(token, special=True).decode("utf-8", "replace")
            for token in (tokenizer.bos, tokenizer.eos_id)
        )
        return bos, eos

    def require_room(self, text: Prompt, name: str = "") -> None:
        """Raises ContextLengthError for a text that is longer than the context whatever its tokens are: it need not be tokenized."""
        if isinstance(text, str) and (least := -(-len(text) // self.tokenizer.longest)) > self.n_ctx:
            raise too_long(least, self.n_ctx, f"{name}at least ")

    @cached_property
    def _grammar(self) -> JsonGrammar:
        return JsonGrammar(self.tokenizer, self.n_vocab)

    def constraint(self, form: Mapping[str, Any] | str | None) -> Constraint | None:
        """What a text of a JSON schema, or of a Gbnf, is held to; None without one. Raises ConstraintError for one that cannot be
        compiled."""
        if form is None:
            return None
        return self._grammar.of_gbnf(form) if isinstance(form, Gbnf) else self._grammar.constraint(form)

    def constraint_of(self, prompt: Prompt | ChatPrompt, options: Options) -> Constraint | None:
        """What a reply to a prompt is held to, by its schema and its tools. Raises ConstraintError."""
        if isinstance(prompt, ChatPrompt) and prompt.use is not None:
            if options.grammar is not None:
                raise ModelError("[model] grammar and tools exclude each other: each says what a reply is; leave one of them out")
            return prompt.use.constraint(lambda: self._grammar, prompt.marks, options.json_schema)
        return self.constraint(options.form)

    @contextmanager
    def using(self, what: str, session: Session | None = None, *, keep: bool = False, text: EngineText | None = None) -> Iterator[Engine]:
        """The engine, for one call and this thread alone, with a session's state on the device, without one with an empty context. Waits
        for its turn.

        what  the call, for errors
        keep  the call needs no state: the device keeps what it has
        text  the call is for pieces of this text of the session; others end the one that the session has
        Raises ModelError where the model is closed, or this thread has the engine already.
        """
        self.require_open(what)
        with self._turns.take(what, piece=text is not None):
            self.require_open(what)  # it may have been closed meanwhile
            if self._running is not None and self._running is not text:
                self._running.pause()
                self._running = None
            if not keep:
                if session is not None and text is None:
                    session.end_stream(what)
                self._bring(session, text)
            yield self.engine

    @contextmanager
    def _whole_texts(self, what: str) -> Iterator[Engine]:
        """The engine for whole texts, which leave its state alone."""
        with self.using(what, keep=True) as engine, self.own_adapters():
            yield engine

    @contextmanager
    def own_adapters(self) -> Iterator[None]:
        """The model's own choice of adapters, for a caller that has its turn and leaves the engine's state alone."""
        before = self.engine.adapter_scales
        self.engine.put_adapters(self.adapter_scales(Options()))
        try:
            yield
        finally:
            self.engine.put_adapters(before)

    @contextmanager
    def stepping(self, what: str) -> Iterator[Engine]:
        """The engine, for steps of a batch: as `using` without a session, but where no session has the engine's own cache, that is left as
        it is."""
        self.require_open(what)
        with self._turns.take(what):
            self.require_open(what)
            if self._running is not None or self._on_device is not None:
                self._bring(None, None)
            yield self.engine

    @property
    def waiting(self) -> int:
        """How many other threads wait for their turn."""
        return self._turns.waiting

    def _bring(self, session: Session | None, text: EngineText | None) -> None:
        """The state of a session onto the device, that of the one before to the host."""
        if self._running is not None and self._running is not text:
            self._running.pause()
        self._running = text
        before = self._on_device() if self._on_device else None
        if session is not None and before is session:
            return
        if before is not None and before.keeps_state:
            before.keep_on_host(self.engine.snapshot())
        self._on_device = None if session is None else weakref.ref(session)
        self.engine.reset()
        self.engine.use_adapters(self.adapter_scales(Options()) if session is None else session.adapters)
        if session is not None and (kept := session.from_host()) is not None:
            self.engine.restore(kept)

    def require_open(self, what: str) -> None:
        """Raises ModelError where the model is closed."""
        self.engine.device.require_own_process()
        if self._closed:
            raise ModelError(f"[model] {self.name} is closed: {what} needs an open one; load it again")
