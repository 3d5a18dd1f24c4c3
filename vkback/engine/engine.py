"""A model on a device: what is loaded, planned and held, prompts, and logits to the host.

The graph of one token is planned and recorded once (vkback/engine/token_programs.py); vkback/engine/prompts.py has the programs of prompts,
vkback/engine/plans.py the schedules of both. The loop that makes tokens is vkback/engine/generation.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.device import Arena, BufferRange, Device, OutOfDeviceMemory, selectors
from vkback.engine.adapter_scales import AdapterScales, whole_scales
from vkback.engine.barrier_trial import TIMED_OUT, BarrierTrial
from vkback.engine.checkpoint import Checkpoint
from vkback.engine.compile_ahead import CompileAhead
from vkback.engine.constraint import Constraint
from vkback.engine.device_state import DeviceState
from vkback.engine.draft_model import DraftEngine
from vkback.engine.drafting import Drafting
from vkback.engine.drafts import DraftCounts, DraftError, Drafts, kept_slots
from vkback.engine.expert_cache import ExpertCache, ExpertCounts, expert_cache
from vkback.engine.generation import Generation
from vkback.engine.host_weights import (
    Forecast,
    HostRates,
    HostRule,
    HostWeights,
    fitting,
    forecast_line,
    guessed_rates,
    host_weights,
    lookup_tables,
)
from vkback.engine.kernels import KernelCompiler
from vkback.engine.load_options import HEADS, Exact, LoadOptions
from vkback.engine.memory_watch import MemoryWatch
from vkback.engine.plans import Plans
from vkback.engine.prompts import SMALLEST, Prompts
from vkback.engine.sampler import Sampler, loop_kind
from vkback.engine.sequence_breakers import SequenceBreakers
from vkback.engine.snapshot import Snapshot
from vkback.engine.split.layers import Rates, SplitError, layer_parts
from vkback.engine.split.split import Split
from vkback.engine.split.stage import Stage
from vkback.engine.text_vectors import TextVectors
from vkback.engine.token_history import TokenHistory
from vkback.engine.token_programs import TokenPrograms, Waits
from vkback.engine.weights import LoadedWeights, Repack, WeightLoad
from vkback.errors import VkbackError
from vkback.events import Report, Reported, log, progress_log
from vkback.gguf.tokenizer import Tokenizer
from vkback.graph import Graph, Part, Tensor
from vkback.models.adapter import Given, LoraLike, given, with_adapters, without_adapters
from vkback.models.builder import F16_CACHE, CacheTypes
from vkback.models.cache_range import overflow_message
from vkback.models.eagle3 import with_head
from vkback.models.registry import Model, text_inputs
from vkback.models.texts import Pooling
from vkback.ops.cache import QUANTIZED
from vkback.ops.dispatch import Dispatch
from vkback.ops.f16_range import F16RangeError
from vkback.ops.lowering import Act, LowerContext
from vkback.ops.matmul.gemm_problem import GemmKernel
from vkback.plan.cost.flops import main_kernel, prompt_flops
from vkback.plan.exact import exact_context
from vkback.plan.passes.experts import is_cache
from vkback.plan.passes.lora import is_adapter_tensor
from vkback.plan.schedule import Schedule
from vkback.program import CompileTotals, Program, WeightRanges
from vkback.program.fragments import fragments_hold, row_lanes_found
from vkback.shader import ShaderLibrary
from vkback.tuning.lookup import Tuning, identity, tables_text
from vkback.units import size_text

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

SIDE_BY_SIDE = 2048
"""Tokens of texts whose logits are wanted that go through the weights together: four chunks of 512, as llama-perplexity takes them."""

SCORED_BYTES = 1 << 30
"""Most memory for their logits: a vocabulary of 151936 takes 156 MB for the second half of a chunk of 512."""


def lower_context(device: Device, library: ShaderLibrary, options: LoadOptions) -> LowerContext:
    """What lowering depends on, of a device and how a model is loaded."""
    ctx = LowerContext(
        device.caps,
        Tuning.for_device(device.caps),
        options.act,
        fragments=fragments_hold(device, library),
        row_lanes=row_lanes_found(device, library),
        flash=options.flash_attn,
    )
    return exact_context(ctx) if options.exact is True else ctx


class EngineError(VkbackError):
    """A request the engine cannot carry out, or a model whose numbers went bad."""


class Engine:
    """A loaded model. Use as a context manager; `load` opens everything."""

    def __init__(
        self,
        model: Model,
        device: Device,
        options: LoadOptions,
        *,
        meanwhile: Callable[[Engine], object] | None = None,
        before: Sequence[tuple[Device, Part]] = (),
        part: Part | None = None,
        weights_of: Engine | None = None,
        host_rates: HostRates | None = None,
    ) -> None:
        """Use `load`. meanwhile: as there; host_rates: as of `open`. before: devices that have the layers before those of `part`, which are
        this one's, in order. weights_of: nothing is loaded, this engine's are used."""
        self.model = model
        self._options = options
        self.cache_types = cache = cache_types(model, options)
        n_ctx = model.context(options.ctx)
        self.device = device
        self.history = TokenHistory()
        """Which tokens the rows of the caches are of."""
        self.library = ShaderLibrary()
        self.fusion = options.fusion
        self.pinned = options.exact == "requests"
        """Texts of a batch have the same bits whoever else is served."""
        slots = kept_slots(options.drafts(software=device.caps.software), model.recurrent_bytes) if model.architecture.recurrent else 2
        plans = partial(Plans, model, n_ctx=n_ctx, fusion=options.fusion, cache=cache, slots=slots, head=options.spec_type in HEADS)
        self._plans = plans(lower_context(device, self.library, options), part=part)
        self._split: Split | None = None
        if before:
            stages = []
            for other, layers in before:
                library = ShaderLibrary()
                theirs = plans(lower_context(other, library, options), part=layers)
                stages.append(Stage(other, model, theirs, library, options.ubatch, options.progress))
            self._split = Split(model, stages, device, options.progress, weights_of._split if weights_of is not None else None)
        if options.spec_type == "draft-mtp" and model.architecture.mtp_block is None:
            raise DraftError(
                f"[drafts] {model.file.path}: {model.architecture.name} without a block of nextn tensors; expected a file with one for "
                "draft-mtp, or ngram-simple or draft-simple"
            )
        self._owned: list[Device] = []
        self._arenas: list[Arena] = []
        self.host_weights = HostWeights(HostRule(model.hp.n_layer))
        """Which weights lie in memory of the host."""
        self.expert_counts = ExpertCounts()
        """What the cache of experts had counted when `count_experts` was called last."""
        self._expert_cache: ExpertCache | None = None
        self._memory = [MemoryWatch(each, model.file.path.name) for each in dict.fromkeys([*(other for other, _ in before), device])]
        self._adapters = AdapterScales(device, model)
        self._base: dict[str, tuple[Tensor, WeightRanges]] = {}  # weights that stay whatever adapters there are
        self._token_programs = TokenPrograms(device, model.hp.n_vocab, self._plans, self._bind, self._split)
        why_none = "its layers are on several devices" if self._split is not None else ""
        programs = self._plans, self._token_programs, self._bind
        self._drafting = Drafting(model, device, self.library, *programs, self.use_barriers, why_none=why_none)
        self._report = options.progress
        self._prompts = Prompts(
            device,
            model.hp.n_vocab,
            options.ubatch,
            self._plans.prompt,
            self._bind,
            self._rescale,
            self._plans.use_prompt_barriers,
            self._report if self._split is None else None,
            self._split.crossing() if self._split is not None else None,
        )
        self._texts = TextVectors(
            device,
            graph=self._plans.text_graph,
            plan=self._plans.texts,
            bind=self._bind,
            inputs=partial(text_inputs, model.architecture),
            rescale=self._rescale,
        )
        self._trial = BarrierTrial()
        self._checkpoint: Checkpoint | None = None
        self._breakers = SequenceBreakers(model)
        self._kernels = KernelCompiler(device, self.library, self._report)
        self._generation = Generation(self, self._token_programs, self._drafting, self._trial, self._kernels)
        self._prompts.attach(n_ctx)
        others = {name: model.hp.weights[name] for name in model.architecture.by_context if model.hp.has_weight(name)}
        weights = others | self._tensors("weight")
        try:
            # The cache before the weights: a context that does not fit is reported before minutes of loading.
            self._allocate_state()
            self._token_programs.allocate()
            if self._plans.head:
                self._drafting.use_head()
            if weights_of is not None:
                self._share_weights(weights_of)
                return
            for stage in self._split.stages if self._split is not None else ():
                stage.load(options)
            self.host_weights = self._place_weights(weights, host_rates)
            slots, name = options.expert_cache, str(model.file.path)
            self._expert_cache = expert_cache(device, self._plans, self.host_weights, slots, self._schedules, name)
            self._arenas += self._expert_cache.arenas if self._expert_cache is not None else []
            self._adapters.allocate()
            loaded = self._load(weights, meanwhile, options.repack)
            self._base = {name: (t, loaded.ranges[name]) for name, t in weights.items() if not is_adapter_tensor(name)}
            self._repack = options.repack
            if loaded.beyond_f16 or loaded.coarse:
                self._prompts.close()
                self._plans.keep_out_of_f16(loaded.beyond_f16, loaded.coarse)
        except BaseException:
            self.close()
            raise
        if n_ctx > model.hp.n_ctx_train:
            log.warning(
                "a context of %d tokens, but the model was trained on %d: expect nothing of text beyond", n_ctx, model.hp.n_ctx_train
            )

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: Device | str | int | None = None,
        *,
        n_ctx: int | None = None,
        act: Act = "auto",
        fusion: str = "all",
        progress: Report | Literal[False] = False,
        ubatch: int | None = None,
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
        exact: Exact = False,
        lora: LoraLike | Sequence[Given] | None = None,
        lora_scale: float | Sequence[float] = 1.0,
        lora_switched: bool = False,
        meanwhile: Callable[[Engine], object] | None = None,
        repack: Repack | None = None,
    ) -> Engine:
        """Open a GGUF file and bring it to a device: `open` with the LoadOptions of these keywords.

        n_ctx       their ctx
        lora        adapter files, each alone or as (file, scale); lora_scale multiplies all, or has one for each
        """
        options = LoadOptions(
            ctx=n_ctx,
            act=act,
            ubatch=ubatch,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            exact=exact,
            lora=given(lora, lora_scale),
            lora_switched=lora_switched,
            fusion=fusion,
            repack=repack,
            progress=progress or None,
        )
        return cls.open(path, device, options, meanwhile=meanwhile)

    @classmethod
    def open(
        cls,
        path: str | Path,
        device: Device | str | int | Sequence[Device | str | int] | None,
        options: LoadOptions,
        *,
        meanwhile: Callable[[Engine], object] | None = None,
        rates: Rates | None = None,
        host_rates: HostRates | None = None,
    ) -> Engine:
        """Open a GGUF file and bring it to a device, or layer by layer to several.

        device     an open device, or what `Device.open` takes; several of these, or a text with commas between them: each gets some of the
                   layers, in this order (vkback/engine/split/layers.py)
        rates      measures how fast devices read their memory; without it a guess
        host_rates  measures that of a device's own memory and of the host's, where experts must lie there; without it a guess
        meanwhile  called with the engine while its weights are on their way; it may `compile` what it is going to use, but run nothing
        Raises VkbackError for a broken file, an unknown architecture, no device, too little memory.
        """
        asked = selectors(device)
        with contextlib.ExitStack() as opened, ThreadPoolExecutor(1) as pool:  # a driver takes tenths of a second, as does a vocabulary
            opening = pool.submit(lambda: [each if isinstance(each, Device) else _opened(each, opened) for each in asked])
            try:
                model = Model.open(path)
                if options.lora:
                    model = with_adapters(model, options.lora, switched=options.lora_switched and len(asked) == 1)
                if options.spec_type == "draft-eagle3" and options.model_draft is not None:
                    model = with_head(model, Path(options.model_draft))
                    if len(asked) > 1:
                        raise SplitError(
                            f"[split] {model.file.path.name}: an EAGLE-3 head needs all layers on one device, {len(asked)} are given; "
                            "leave the head out, or load with one --device"
                        )
                cache_types(model, options)
            finally:
                opening.exception()  # what it has opened is closed with the others
            devices = opening.result()
            if unused := model.architecture.unused_keys:
                log.warning("%s: metadata without a part in the text is not used: %s", model.file.path, ", ".join(unused))
            if len(devices) > 1:
                parts = layer_parts(model, devices, options, cache_types(model, options), rates)
                others = list(zip(devices[:-1], parts[:-1], strict=True))
                engine = cls(model, devices[-1], options, meanwhile=meanwhile, before=others, part=parts[-1], host_rates=host_rates)
            else:
                if options.tensor_split is not None:
                    raise SplitError(
                        "[split] -ts is for several devices (tensor_split in Python); name them with --device 0,1, or leave it out"
                    )
                engine = cls(model, devices[0], options, meanwhile=meanwhile, host_rates=host_rates)
            opened.pop_all()
        engine._owned = [each for each, given in zip(devices, asked, strict=True) if each is not given]
        return engine

    def _load(self, weights: Mapping[str, Tensor], meanwhile: Callable[[Engine], object] | None, repack: Repack | None) -> LoadedWeights:
        """Bring weights to the device, and meanwhile do other things."""
        there = self.host_weights.names
        try:
            taken = WeightLoad(self.model.file, weights, self.device, self.library, repack=repack, in_host=there)
        except OutOfDeviceMemory as error:
            if not error.call or self._options.placement.n_gpu_layers == "auto":
                raise
            way = "-ngl N keeps the weights of N layers there, and -ngl auto as many as fit; kernels read the others in host memory"
            raise OutOfDeviceMemory(f"{error}. {way}", call=error.call, result=error.result) from error
        with taken as load:
            self.weights = load.ranges
            progress_log.info("loading %s: %.0f MB", self.model.file.path, load.total_bytes / 1e6)
            with Reported(self._report, "load", load.total_bytes, "reading") as work:
                if meanwhile is None:
                    load.run(work.advance, work.waits_for)
                else:
                    with load.running(work):
                        meanwhile(self)
            self.load_times = load.times
            loaded = load.loaded()
        self._arenas += loaded.arenas
        for watch in self._memory:
            watch.loaded()
        return loaded

    def _place_weights(self, weights: Mapping[str, Tensor], rates: HostRates | None) -> HostWeights:
        """Decide which weights lie in memory of the host, and tell the user where nobody asked for it."""
        asked, causal = self._options.placement, self.model.architecture.causal
        rule = HostRule(self.model.hp.n_layer, lookup_tables(self.model.whole_graphs()))
        by_request = host_weights(weights, asked.rule(rule), self.device.caps)
        if self._split is not None or not causal:
            return by_request
        token = self._plans.token("logits")
        used = [token, self._plans.prompt(self._prompts.sizes()[-1], "none")]
        caps, free, caches = self.device.caps, self.device.free_memory(), self._state.arena.nbytes
        found = fitting(weights, rule, asked, caps, free, used, caches, self._options.expert_cache)
        if found != by_request:
            own, host = rates(self.device) if rates is not None else guessed_rates(caps)
            why = f"{self.model.file.path.name} does not fit the {size_text(free)} that {caps.name} has left"
            log.warning(forecast_line(found, Forecast.of(token, found.names, own, host), why))
        return found

    @property
    def caches_experts(self) -> bool:
        """Whether there is a cache of experts, on any device."""
        return bool(self._expert_caches)

    @property
    def _expert_caches(self) -> list[ExpertCache]:
        """Those of all devices."""
        others = [stage.expert_cache for stage in self._split.stages] if self._split is not None else []
        return [each for each in (*others, self._expert_cache) if each is not None]

    def after_text(self) -> None:
        """What is looked at when a text has ended: memory that other programs took, and counts of the cache of experts."""
        for watch in self._memory:
            watch.look()
        self.count_experts()

    def count_experts(self) -> ExpertCounts:
        """How many experts steps have wanted so far, and how many of them lay in the cache, on all devices and of all texts on them. Reads
        the devices, once for each layer."""
        if caches := self._expert_caches:
            self.quiet()
            self.expert_counts = sum((cache.counts() for cache in caches), ExpertCounts())
        return self.expert_counts

    def beside(self) -> Engine:
        """Another text over the devices and weights of this engine, which is closed later: while one device works for this text, another
        does for that one. Of layers on several devices. Call it where nothing runs."""
        assert self._split is not None
        others = [(stage.device, stage.plans.part) for stage in self._split.stages]
        before = [(device, part) for device, part in others if part is not None]
        options = replace(self._options, ctx=self.n_ctx, ubatch=self.ubatch)
        return Engine(self.model, self.device, options, before=before, part=self._plans.part, weights_of=self)

    def _share_weights(self, other: Engine) -> None:
        self.weights, self.host_weights, self._expert_cache = other.weights, other.host_weights, other._expert_cache
        self._plans.use_context(other._plans.ctx)
        if self._split is not None and other._split is not None:
            for stage, theirs in zip(self._split.stages, other._split.stages, strict=True):
                stage.share(theirs)

    def quiet(self) -> None:
        """What runs next, and is waited for at once, must not stand behind a token of another text."""
        if self._split is not None:
            self._split.quiet()

    def settle(self) -> None:
        """Nothing of another text is in the way, and recurrent states are those of the tokens so far."""
        self.quiet()
        self._generation.catch_up()

    def ready(self) -> None:
        """As `settle`, and barrier-free stages have been tried: a token can go through the model."""
        self.settle()
        self._try_sync()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Destroy everything the engine made, and the device if the engine opened it."""
        self._drafting.stop_compiling()
        self._prompts.close()
        self._texts.close()
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None
        self._drafting.close()
        self._token_programs.close()
        if self._split is not None:
            self._split.close()
        self._adapters.close()
        for arena in reversed(self._arenas):
            arena.destroy()
        self._arenas.clear()
        for device in self._owned:
            device.close()

    @property
    def n_ctx(self) -> int:
        """Rows of the KV cache."""
        return self._plans.n_ctx

    @property
    def ctx(self) -> LowerContext:
        """What the kernels that run depend on."""
        return self._plans.ctx

    @property
    def description(self) -> str:
        return self.model.description

    @property
    def tuning(self) -> str:
        """What identifies the tuning tables of this engine and what overrides them."""
        return identity(self.ctx.tuning)

    @property
    def tables(self) -> str:
        """These tables by name, the strongest first, and the rows that override them."""
        return tables_text(self.ctx.tuning)

    @property
    def size_bytes(self) -> int:
        return self.model.file.size_bytes

    @property
    def n_params(self) -> int:
        return self.model.file.n_params

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def ubatch(self) -> int:
        """Tokens of a prompt that go through the weights at once, at most, were the context as large."""
        return self._prompts.ubatch

    @property
    def prompts(self) -> Prompts:
        """Programs of several tokens: which there are, how they are recorded, what memory they take."""
        return self._prompts

    @property
    def state(self) -> Mapping[str, BufferRange]:
        """Memory of caches and recurrent states, by the names of their tensors."""
        return self._state.ranges

    @property
    def longest_submit_s(self) -> float:
        """Seconds of the longest submit of a prompt so far, by the host's clock."""
        return self._prompts.longest_submit_s

    @property
    def compiled(self) -> CompileTotals:
        """Kernels made ready so far, and the time that took: to be left out of every speed."""
        totals = self._kernels.totals
        for other in (stage.kernels.totals for stage in self._split.stages) if self._split is not None else ():
            totals = CompileTotals(totals.kernels + other.kernels, totals.compiled + other.compiled, max(totals.seconds, other.seconds))
        return totals

    @property
    def devices(self) -> list[Device]:
        """All that have layers, in their order; `device` is the last one."""
        return self._split.devices if self._split is not None else [self.device]

    @property
    def parts(self) -> list[Part]:
        """The layers of each of `devices`."""
        found = [*(stage.plans.part for stage in self._split.stages), self._plans.part] if self._split is not None else []
        return [part for part in found if part is not None] or [Part(0, self.model.hp.n_layer, self.model.hp.n_layer)]

    def require_one_device(self, what: str) -> None:
        """Raises SplitError where layers are on several devices, for what needs all of them on one."""
        if self._split is not None:
            raise SplitError(
                f"[split] {self.model.file.path.name}: {what} needs all layers on one device, they are on {len(self.devices)}; load "
                "with one --device"
            )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weight matrices that a generated token must read: each matrix once, of the embedding one row, of experts those used."""
        others = self._split.stages if self._split is not None else ()
        return sum(plans.token("logits").weight_bytes for plans in (self._plans, *(stage.plans for stage in others)))

    def prompt_flops(self, tokens: int, n_past: int = 0) -> int:
        """Operations of a prompt of `tokens` tokens after `n_past` others: products with weights, attention (vkback/plan/cost/flops.py)."""
        return prompt_flops(self.model.graph(1, self.n_ctx, head="none", cache=self.cache_types), tokens, n_past)

    def prompt_kernel(self, tokens: int) -> GemmKernel | None:
        """How the kernels of a prompt multiply that make most of its operations."""
        return main_kernel(self._prompts.dispatches([tokens]))

    def _tensors(self, kind: str) -> dict[str, Tensor]:
        """Tensors of a kind that programs of one and of several tokens use.

        Weights are loaded before larger programs are planned. So passes may combine weights otherwise for several tokens than for one, but
        alike for any number above one (tests/plan/test_weights_of_plans.py).
        """
        schedules = [self._plans.texts(graph) for graph in self._text_graphs()] if kind == "weight" else []
        schedules += self._schedules()
        return {t.name: t for s in schedules for t in s.tensors().values() if t.kind == kind and not is_cache(t)}

    def _schedules(self) -> list[Schedule]:
        """Of one token, of a prompt, and of the draft head: between them they have all weights of a model that makes text."""
        if not self.model.architecture.causal:
            return []
        found = [self._plans.token("logits"), self._plans.prompt(self._prompts.sizes()[-1], "none")]
        return [*found, *([self._plans.head_token("greedy")] if self._plans.head else [])]

    def _allocate_state(self) -> None:
        """Memory for the caches and recurrent states of a context."""
        causal = self.model.architecture.causal
        nodes = self._plans.graph(1, "none").nodes if causal else []
        caches = {node.outputs[0].name for node in nodes if node.op == "SET_ROWS"}
        self._state = DeviceState(self.device, self._tensors("state").values(), caches, self._plans.slots)
        self._arenas.append(self._state.arena)
        if self._state.recurs:
            self._checkpoint = Checkpoint(self.device, self._state.recurrent)
        if self._split is not None:
            self._split.allocate(self._prompts.ubatch)

    def _text_graphs(self) -> list[Graph]:
        """Those that read all that texts may: of a model that makes text none, unless it has weights for them alone."""
        return [self._plans.text_graph(SMALLEST, texts) for texts in self.model.text_kinds()]

    def vectors(
        self, texts: Sequence[Sequence[int]], pooling: Pooling, segments: Sequence[Sequence[int]] | None = None
    ) -> Iterator[Floats]:
        """Vectors of whole texts, one after the other, as `TextVectors.run` gives them. The text so far stays as it is. segments: of their
        tokens.

        Raises EngineError for a text without a token, one that is longer than the context, and vectors that are no numbers; GgufError where
        the model cannot make them; SplitError over several devices.
        """
        self.require_one_device("a vector of a text")
        for i, text in enumerate(texts):
            if not 0 < len(text) <= self.n_ctx:
                raise EngineError(f"[engine] text {i} has {len(text)} tokens, expected 1 to {self.n_ctx}; load with a larger n_ctx (--ctx)")
            self.check_ids(text)
        at_once = max(self.ubatch, SMALLEST)
        found = self._texts.run(texts, pooling, ubatch=at_once, n_ctx=self.n_ctx, alone=self.ctx.exact, segments=segments)
        for i, vector in enumerate(found):
            if not np.isfinite(vector).all():
                raise EngineError(
                    f"[engine] {self.model.file.path}: the vector of text {i} is not all numbers. Keys or values may be beyond the range "
                    "of f16: load with --cache-type-k f32 --cache-type-v f32; or the file is damaged, or a kernel wrong: `vkback test-ops`"
                )
            yield vector

    def logits_side_by_side(self, texts: Sequence[Sequence[int]], first: int, *, at_once: int | None = None) -> Iterator[Floats]:
        """Logits of tokens first.. of each text in a context of its own, float32 [length - first, n_vocab]; the texts are equally long.

        at_once  texts that go through the weights together, default: as many as fill a program of SIDE_BY_SIDE tokens (on CPU drivers of
                 `ubatch`) and fit into memory. One after another, through the cache of one text, which forgets what it holds, go those of
                 recurrent models, and with `exact`, so that a text has its bits whatever is beside it
        Raises EngineError as `prompt_logits` does.
        """
        if not texts:
            return
        width = 1 if self._one_by_one else at_once
        width = self._side_by_side(len(texts[0]), first) if width is None else width
        width = -(-len(texts) // -(-len(texts) // width))  # no emptier last program than need be
        if width == 1:
            yield from (self._logits_alone(text, first) for text in texts)
            return
        for text in texts:
            self.check_ids(text)
        found = self._texts.logits(texts, first, at_once=width, ubatch=max(self.ubatch, SMALLEST))
        for text, logits in zip(texts, found, strict=True):
            flat = logits.reshape(-1)
            # A text whose numbers went bad is read once more alone, which says what is wrong.
            yield logits if np.isfinite(np.dot(flat, flat)) else self._logits_alone(text, first)

    @property
    def _one_by_one(self) -> bool:
        """Whether whole texts are read one after another."""
        return self.ctx.exact or self.pinned or self.model.architecture.recurrent or self._split is not None

    def _logits_alone(self, text: Sequence[int], first: int) -> Floats:
        self.reset()
        self.prompt(text[:first])
        return self.prompt_logits(text[first:])

    def _side_by_side(self, length: int, first: int) -> int:
        """Texts of so many tokens that go through the weights together, at least 1."""
        ubatch = max(self.ubatch, SMALLEST)
        width = max(1, (ubatch if self.device.caps.software else max(SIDE_BY_SIDE, ubatch)) // length)
        while width > 1:
            on_device, for_host = self._texts.bytes_of(*self._texts.kind_of_logits(length, first, width, ubatch))
            if on_device <= self.device.free_memory() // 2 and for_host <= SCORED_BYTES:
                break
            width //= 2
        return width

    def prepare(
        self, *, prompt: int | Sequence[int] = 0, logits: bool = False, sampler: Sampler | None = None, constrained: bool = False
    ) -> None:
        """Compile and record what later calls need, and run each recording once, so that their time holds no compile time.

        prompt   tokens of the prompt, 0 for none; or of each of several
        logits   for `decode_logits`
        sampler  for `generate` with it
        constrained  and with a constraint
        The runs, which some drivers need to compile a kernel, store into the first free row of the KV cache at most. Raises EngineError
        when the prompt does not fit the context.
        """
        prompts, decode = self._asked(prompt, logits, sampler, constrained)
        self.quiet()
        loop = loop_kind(sampler, constrained) if sampler else ""
        self.check_ids([id for id, _ in sampler.logit_bias] if sampler else [])
        room = self.n_past < self.n_ctx
        try_sync = bool(decode) and room and self._trial.due("logits") and self._barrier_free
        kinds = [*(["logits"] if try_sync and not logits else []), *decode]
        dispatches = (d for kind in kinds for d in self._plans.token(kind).dispatches())
        with self._preparing(chain(self._prompts.dispatches(prompts), dispatches), prompts):
            if try_sync:
                self._try_sync()
            tickets: list[Waits] = [*self._prompts.prepare(prompts)]
            for stage in self._split.stages if self._split is not None else ():
                tickets += stage.prompts.prepare(prompts)
            for kind in decode:
                self._token_programs.program(kind)  # while the driver may be compiling the prompt's kernels
            if logits and room:
                self._decode(0)
            if sampler:
                self._token_programs.loop(loop, 1 if constrained else self._generation.at_once(loop))
                if room:
                    tickets.append(self._generation.try_step(sampler, constrained=constrained))
            for ticket in tickets:
                ticket.wait()

    def compile(self, *, prompt: int | Sequence[int] = 0, logits: bool = False, sampler: Sampler | None = None) -> None:
        """Plan, compile and record what `prepare` runs with the same arguments, and run nothing: weights may still be on their way."""
        prompts, decode = self._asked(prompt, logits, sampler)
        kinds = list(dict.fromkeys([*(["logits"] if decode and self._barrier_free else []), *decode]))
        dispatches = (d for kind in kinds for d in self._plans.token(kind).dispatches())
        with self._preparing(chain(self._prompts.dispatches(prompts), dispatches), prompts):
            self._prompts.record(prompts)
            for kind in kinds:
                self._token_programs.program(kind)
            if "logits" in kinds:
                self._token_programs.recording("logits")
            if sampler:
                for size in (self._generation.at_once(loop_kind(sampler)), 1):
                    self._token_programs.loop(loop_kind(sampler), size)

    @contextlib.contextmanager
    def _preparing(self, dispatches: Iterable[Dispatch], prompts: Sequence[int]) -> Iterator[None]:
        """The kernels of these dispatches, and those of other devices for prompts and tokens, are compiled meanwhile."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._kernels.preparing(dispatches))
            for stage in self._split.stages if self._split is not None else ():
                stage.kernels.compile(stage.dispatches(prompts))
            yield

    def compile_drafts_ahead(self, drafts: Drafts | None, samplers: Sequence[Sampler]) -> CompileAhead | None:
        """Plan and compile steps with such drafts beside what runs from here on, so that a text need not wait for them when it first has
        drafts. For texts with one of these samplers. None where there are no such steps."""
        return self._drafting.compile_ahead(drafts, samplers)

    def _asked(
        self, prompt: int | Sequence[int], logits: bool, sampler: Sampler | None, constrained: bool = False
    ) -> tuple[Sequence[int], list[str]]:
        """Tokens of each prompt, and kinds of programs of one token."""
        prompts = [prompt] if isinstance(prompt, int) else prompt
        self._check_room(max(prompts, default=0), "prompt")
        return prompts, (["logits"] if logits else []) + ([loop_kind(sampler, constrained)] if sampler else [])

    def _bind(self, schedule: Schedule, inputs: dict[str, BufferRange], activations: BufferRange | None = None) -> Program:
        self._kernels.compile(schedule.dispatches())
        if self._split is not None:
            inputs = self._split.inputs(1) | inputs
        given, weights = self._state.ranges | self._adapters.inputs | inputs, self.weights
        if self._expert_cache is not None:
            given, weights = given | self._expert_cache.tables, weights | self._expert_cache.slots
        return Program(self.device, self.library, schedule, given, weights, activations)

    def _rescale(self, overflowed: dict[str, float], rows: int) -> Sequence[int]:
        """Bring activations back into the range of f16. Gives the tokens so far if recurrent states, which the bad run has changed, have to
        be made anew from them. rows: of the caches that the run has filled."""
        if self._split is not None and self.model.architecture.recurrent:
            raise EngineError(
                f"[split] {self.model.file.path}: activations are beyond the range of f16, and recurrent states of several devices cannot "
                'be made anew; load with act "f32" (--act f32), or on one device'
            )
        try:
            self._plans.rescale(overflowed)
        except F16RangeError as error:
            raise self._beyond_range(rows) or error from None
        return self.tokens if self.model.architecture.recurrent else ()

    def schedule(self, kind: Literal["decode", "prompt", "greedy"] = "greedy") -> Schedule:
        """The schedule of one generated token, of a bare token with its logits, or of the largest piece of a prompt."""
        return self._prompts.schedule() if kind == "prompt" else self._plans.token("logits" if kind == "decode" else kind)

    def prompt_schedules(self, tokens: int) -> list[tuple[int, Schedule]]:
        """Tokens and schedule of each program that a prompt of so many tokens runs, in order."""
        return [(size, self._plans.prompt(size, "none")) for size in self._prompts.pieces(tokens)]

    def bind(self, schedule: Schedule, inputs: dict[str, BufferRange], activations: BufferRange | None = None) -> Program:
        """Another program over this engine's weights and caches, which the caller closes. inputs: memory by name."""
        return self._bind(schedule, inputs, activations)

    def resize(self, n_ctx: int, *, ubatch: int | None = None) -> None:
        """A KV cache of so many rows, empty, and programs for it; weights stay where they are. ubatch: tokens of a prompt at once from here
        on, None: as before. Raises VkbackError where it does not fit; the engine is then of no more use."""
        self.reset()
        if ubatch is not None:
            self._prompts.limit(ubatch)
        if n_ctx == self.n_ctx and (ubatch is None or self._split is None):
            return
        self._drafting.resize(n_ctx)
        self._token_programs.forget_programs()
        self._arenas.remove(self._state.arena)
        self._state.arena.destroy()
        self._token_programs.forget_penalties()
        self._texts.close()
        if self._checkpoint:
            self._checkpoint.close()
        self._plans.n_ctx = n_ctx
        for stage in self._split.stages if self._split is not None else ():
            stage.plans.n_ctx, stage.ubatch = n_ctx, ubatch or stage.ubatch
        self._trial.forget()
        self._prompts.attach(n_ctx)
        self._allocate_state()

    def load_adapters(self, files: Sequence[Given]) -> None:
        """Run these adapters beside the weights, and no others: of each the given scale, until `use_adapters` switches them. Weights stay
        where they are; programs are made anew, and the text so far is forgotten. Nothing else may use the engine meanwhile.

        Raises AdapterError for a file that does not fit, VkbackError where memory is short; the engine is then as it was.
        """
        self.require_one_device("adapters that are switched")
        before, adapters = self.model, self._adapters
        model = with_adapters(without_adapters(before), files, switched=True)
        self.reset()
        self._drafting.stop_compiling()
        self._forget_all_programs()
        self._plans.use_model(model)
        self.model = model
        made = AdapterScales(self.device, model)
        try:
            made.allocate()
            wanted = self._tensors("weight")
            missing = {name: t for name, t in wanted.items() if self._base.get(name, (None,))[0] != t}
            there = self.host_weights.names
            with WeightLoad(model.file, missing, self.device, self.library, repack=self._repack, in_host=there) as load:
                with Reported(self._report, "load", load.total_bytes, "reading") as work:
                    load.run(work.advance, work.waits_for)
                loaded = load.loaded()
            made.arenas += loaded.arenas
        except BaseException:
            made.close()
            self.model = before
            self._plans.use_model(before)
            raise
        self._adapters = made
        self.weights = {name: ranges for name, (_, ranges) in self._base.items()} | loaded.ranges
        adapters.close()
        ctx = self._plans.ctx
        if loaded.beyond_f16 - ctx.beyond_f16 or loaded.coarse - ctx.coarse:
            self._plans.keep_out_of_f16(ctx.beyond_f16 | loaded.beyond_f16, ctx.coarse | loaded.coarse)
        self._trial.forget()

    def _forget_all_programs(self) -> None:
        self._drafting.forget_programs()
        self._token_programs.forget_programs()
        self._prompts.close()
        self._texts.close()

    @property
    def adapter_scales(self) -> tuple[float, ...]:
        """What each adapter is multiplied by now, the last that is off and those behind it left out."""
        return self._adapters.current

    def use_adapters(self, scales: Sequence[float]) -> None:
        """Multiply each adapter by a number from here on, 0: it is off; those behind the last number are off. Where that changes anything,
        the text so far is forgotten: it was read with others. Nothing is in flight. Raises AdapterScaleError where adapters cannot be
        switched."""
        if whole_scales(scales) != self.adapter_scales:
            self.reset()
            self.put_adapters(scales)

    def put_adapters(self, scales: Sequence[float]) -> None:
        """As `use_adapters`, for whoever leaves the text so far alone."""
        self._adapters.put(scales)

    def check_adapters(self, scales: Sequence[float]) -> None:
        """Raises AdapterScaleError where there are not so many adapters that can be switched."""
        self._adapters.check(scales)

    def reset(self) -> None:
        """Forget all tokens. Rows of the KV cache beyond n_past are never read, and recurrent states begin anew at position 0, so nothing
        needs clearing."""
        self.history.leave(0)
        self._generation.forget()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those that have gone through the model since `reset`, n_past of them."""
        return tuple(self.history.tokens)

    @property
    def n_past(self) -> int:
        """How many these are, and the position of the next one."""
        return self.history.n_past

    def rewind(self, n: int) -> bool:
        """Keep the first n tokens. False, and nothing is changed, where that cannot be: recurrent states hold all tokens so far."""
        if n == self.n_past:
            return True
        if n > self.n_past or (self.model.architecture.recurrent and n):
            return False
        self.history.leave(n)
        if not n:
            self._generation.forget()
        return True

    def snapshot(self) -> Snapshot:
        """The text so far and all that the device keeps of it. Tokens after `restore` have the bits that they would have had without."""
        self.settle()
        arrays = [state.download(self.n_past) for state in self._states]
        return Snapshot(self.tokens, {name: array for of_one in arrays for name, array in of_one.items()})

    @property
    def _states(self) -> list[DeviceState]:
        """Those of all devices, in the order of the layers."""
        return [*(stage.state for stage in self._split.stages), self._state] if self._split is not None else [self._state]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Of recurrent states, of all devices; none of a model without."""
        others = [stage.checkpoint for stage in self._split.stages] if self._split is not None else []
        return [each for each in (*others, self._checkpoint) if each is not None]

    def restore(self, snapshot: Snapshot) -> None:
        """Make a text's state that of the device. Raises EngineError where it does not fit the context or is not of this model."""
        self.quiet()
        rows = len(snapshot.tokens)
        if rows > self.n_ctx:
            raise EngineError(f"[engine] the state holds {rows} tokens, the context has {self.n_ctx}; load with a larger n_ctx (--ctx)")
        self.check_ids(snapshot.tokens)
        arrays = [{name: snapshot.arrays[name] for name in state.ranges if name in snapshot.arrays} for state in self._states]
        unknown = {name: a for name, a in snapshot.arrays.items() if not any(name in state.ranges for state in self._states)}
        for state, own in zip(self._states, arrays, strict=True):
            if wrong := state.misfit(own | unknown, rows):
                raise EngineError(f"[engine] the state is of another model or type of cache: {wrong}")
        self.reset()
        for state, own in zip(self._states, arrays, strict=True):
            state.upload(own, rows)
        self.history.advance(snapshot.tokens)

    def assume(self, tokens: Sequence[int]) -> None:
        """The first rows of the caches hold these tokens: somebody has put them there. After `reset`; not for recurrent models."""
        self.check_ids(tokens)
        self.history.advance(tokens)

    def prompt(self, tokens: Sequence[int], meanwhile: Callable[[], object] | None = None) -> None:
        """Run tokens through the model, appending to the KV cache. meanwhile: called while each program of them runs; what it raises
        ends the call. Raises EngineError when they do not fit the context."""
        self._check_room(len(tokens), "prompt")
        self.check_ids(tokens)
        self.settle()
        at = 0
        through = self._prompts.run if self._split is None else partial(self._split.prompt, last=self._prompts)
        for done in through(tokens, self.n_past, meanwhile=meanwhile):
            self.history.advance(tokens[at : at + done])
            at += done

    def prompt_logits(self, tokens: Sequence[int]) -> Floats:
        """As `prompt`, and the logits after every token: float32 [len(tokens), n_vocab]."""
        self._check_room(len(tokens), "prompt")
        self.check_ids(tokens)
        self.settle()
        out, first = np.empty((len(tokens), self.model.hp.n_vocab), np.float32), self.n_past
        through = self._prompts.logits if self._split is None else partial(self._split.logits, last=self._prompts)
        for rows in through(tokens, first):
            at = self.n_past - first
            out[at:][: len(rows)] = rows
            self.history.advance(tokens[at : at + len(rows)])
        return self._finite(out)

    def decode_logits(self, token: int) -> Floats:
        """One token through the model in one submit; its logits, float32 [n_vocab]."""
        self._check_room(1, "token")
        self.check_ids([token])
        self.ready()
        logits, timed_out = self._decode(token)
        if timed_out:
            self.use_barriers(TIMED_OUT)
            logits, _ = self._decode(token)
        self.history.advance([token])
        return self._finite(logits)

    def _decode(self, token: int) -> tuple[Floats, bool]:
        """Logits of a token at n_past, and whether they are worth nothing because a spin-wait timed out."""
        return self._token_programs.decode(token, self.n_past, self._token_programs.recording("logits"))

    def _try_sync(self) -> None:
        """Before the first token goes through a schedule with barrier-free stages: see that it gives the same bits as with all barriers."""
        if not self._trial.due("logits") or not self._barrier_free:
            return
        logits, timed_out = self._decode(0)

        def with_barriers() -> Floats:
            return self._token_programs.decode(0, self.n_past, self._token_programs.with_barriers(), barriers=True)[0]

        if why := self._trial.fault("logits", "logits", timed_out=timed_out, found=lambda: logits, with_barriers=with_barriers):
            self.use_barriers(why)

    @property
    def _barrier_free(self) -> bool:
        """Whether a token has stages without barriers between them, on any device."""
        others = self._split.stages if self._split is not None else ()
        return any(plans.token("logits").barrier_free for plans in (self._plans, *(stage.plans for stage in others)))

    def use_barriers(self, why: str) -> None:
        """Plan everything anew with a barrier between all stages; why: for the log."""
        self._drafting.forget_programs()
        self._token_programs.forget_programs()
        self._plans.use_barriers(why)
        if self._split is not None:
            self._split.use_barriers(why)
        self._token_programs.forget_timeouts()

    def generate(
        self,
        first: int,
        n: int,
        *,
        sampler: Sampler | None = None,
        stop_at_eos: bool = True,
        on_logits: Callable[[Floats], object] | None = None,
        constraint: Constraint | None = None,
        drafts: Drafts | None = None,
    ) -> Generator[int, None, None]:
        """Generate n tokens after token `first` (which goes through the model first), as they come from the device.

        Ends early at an end-of-text token, which is yielded, if stop_at_eos.
        on_logits  called before each token with the logits of the model that it was picked from, float32 [n_vocab]; then a submit makes one
                   token, which changes no token and costs speed
        constraint  gives before each token which may come, and takes the one that came; ends the text when it has ended. A submit makes one
        token
        drafts     tokens may be drafted, which makes several in a step where that pays; `draft_counts` tells how it went. With on_logits or
                   a constraint the host looks them up between two steps, and a draft model has no part; with mirostat there are none
        Raises EngineError when the context is full or the logits are not numbers, DraftError for drafts that the model cannot have.
        """
        sampler = sampler or Sampler()
        self._check_room(n, "generation")
        self.check_ids([first])
        self.check_ids([id for id, _ in sampler.logit_bias])
        yield from self._generation.generate(
            first, n, sampler, stop_at_eos=stop_at_eos, on_logits=on_logits, constraint=constraint, drafts=drafts
        )

    @property
    def draft_counts(self) -> DraftCounts:
        """Drafts of the text that `generate` made last, or is making."""
        return self._generation.counts

    def prepare_drafts(self, first: int, sampler: Sampler, drafts: Drafts) -> None:
        """Compile, record, try and measure the steps with drafts of a text whose last token is `first`."""
        self._generation.prepare_drafts(first, sampler, drafts)

    def attach_draft_model(self, draft: DraftEngine) -> None:
        """Take the drafts of `Drafts(model=True)` from this model, which `check_draft_model` has let pass and which is closed with the
        engine. Raises DraftError where this one has no drafts, or the cache of the other is too small."""
        self._drafting.attach(draft)

    @property
    def has_draft_head(self) -> bool:
        """Whether the file's own MTP block, or an EAGLE-3 head, makes drafts."""
        return self._plans.head

    @property
    def token_programs(self) -> TokenPrograms:
        """Programs of one token, and what they share."""
        return self._token_programs

    @property
    def drafting(self) -> Drafting:
        """What it has for drafts."""
        return self._drafting

    @property
    def max_columns(self) -> int:
        """Of a step with drafts; of a recurrent model as many as it keeps states for."""
        return self._drafting.max_columns

    def possible_drafts(self, drafts: Drafts | None) -> Drafts | None:
        """Drafts as they are possible here. Raises DraftError where they were asked for in a way that leaves no choice."""
        return self._drafting.possible(drafts)

    def dry_words(self, sampler: Sampler, n_ctx: int) -> npt.NDArray[np.int32]:
        """What DRY goes by, in a context of so many tokens. Raises SamplerError for breakers that it cannot hold."""
        return sampler.dry(n_ctx).words(self._breakers.of(sampler.dry_sequence_breakers))

    def _check_room(self, count: int, what: str) -> None:
        if self.n_past + count > self.n_ctx:
            raise EngineError(
                f"[engine] {what} of {count} tokens after {self.n_past} does not fit the context of {self.n_ctx}; "
                "load with a larger n_ctx (--ctx) or shorten it"
            )

    def end_ids(self, stop_at_eos: bool) -> list[int]:
        """Token ids that end a text on the device; none unless stop_at_eos, or of a model without a vocabulary."""
        return sorted(self.model.tokenizer.eos_ids) if stop_at_eos and self.model.has_text else []

    def check_ids(self, tokens: Sequence[int]) -> None:
        """Raises EngineError for an id that the vocabulary does not have."""
        vocab = self.model.hp.n_vocab
        for i, token in enumerate(tokens):
            if not 0 <= token < vocab:
                raise EngineError(f"[engine] token {i} is {token}, expected an id in 0..{vocab - 1}")

    def _finite(self, logits: Floats) -> Floats:
        # One pass without an array of truths: the sum of squares of numbers below 10^16 is a number.
        flat = logits.reshape(-1)
        if not np.isfinite(np.dot(flat, flat)) and not np.isfinite(flat).all():
            raise self.values_error("before", self.n_past)
        return logits

    def check_caches(self) -> None:
        """Raises EngineError where keys or values of the tokens so far are beyond the range of their cache's type. Reads the caches: logits
        tell as well, at no cost."""
        if (error := self._beyond_range(self.n_past)) is not None:
            raise error

    def _beyond_range(self, rows: int) -> EngineError | None:
        """Why what was made of the first rows of the caches is worth nothing, if that is the range of their types."""
        self.quiet()
        found = [each for state in self._states for each in state.beyond_range(min(rows, self.n_ctx))]
        return EngineError(f"[engine] {self.model.file.path}: {overflow_message(found)}") if found else None

    def values_error(self, where: str, rows: int) -> EngineError:
        """The error of logits that are not numbers, and why they are none where that is known. rows: of the caches that are in use."""
        return self._beyond_range(rows) or self.not_numbers(self.n_past, where)

    def not_numbers(self, position: int, where: str = "at") -> EngineError:
        """The error of logits that are not numbers."""
        return EngineError(
            f"[engine] {self.model.file.path}: logits are not numbers {where} position {position}; "
            "the file is damaged or a kernel is wrong on this device: run `vkback test-ops`"
        )


def _opened(selector: str | int | None, undo: contextlib.ExitStack) -> Device:
    device = Device.open(selector)
    undo.callback(device.close)
    return device


def cache_types(model: Model, options: LoadOptions) -> CacheTypes:
    """What keys and values are kept as. Raises EngineError for a type that the model cannot have."""
    types = CacheTypes(options.cache_type_k.upper(), options.cache_type_v.upper())
    if types == F16_CACHE:
        return types
    for node in (node for graph in model.whole_graphs() for node in graph.nodes):
        cache = node.outputs[0]
        type = types.v if cache.name.startswith("cache_v") else types.k
        if node.op == "SET_ROWS" and type in QUANTIZED and cache.shape[2] % quants.UNIT:
            raise EngineError(
                f"[engine] {model.file.path}: heads of {cache.shape[2]} values are no multiple of {quants.UNIT}, which a {type.lower()} "
                "cache needs; use f16"
            )
    return types
