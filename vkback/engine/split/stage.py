"""A device that has some of a model's layers, but not the last ones: their weights and caches, and programs that give rows to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vkback.device import Arena, BufferRange, Commands, Device
from vkback.engine.checkpoint import Checkpoint
from vkback.engine.device_state import DeviceState
from vkback.engine.expert_cache import ExpertCache, expert_cache
from vkback.engine.host_weights import HostRule, host_weights, lookup_tables
from vkback.engine.kernels import KernelCompiler
from vkback.engine.load_options import LoadOptions
from vkback.engine.plans import Plans
from vkback.engine.prompts import Prompts
from vkback.engine.split.border import Border, Copies
from vkback.engine.split.layers import SplitError
from vkback.engine.token_programs import INPUT_BYTES
from vkback.engine.weights import WeightLoad
from vkback.events import Report, Reported, progress_log
from vkback.graph import Tensor
from vkback.models.registry import Model
from vkback.ops.dispatch import Dispatch
from vkback.plan.passes.experts import is_cache
from vkback.plan.schedule import Schedule
from vkback.program import Program, WeightRanges
from vkback.shader import ShaderLibrary

TOKEN_SLOT = 2
"""Of a border, behind the two that pieces of prompts take in turn."""


MAX_RECORDED = 64
"""Recordings of copies that are kept: a prompt of another length needs others."""


@dataclass
class Slots:
    """Which slots of the borders a prompt's piece goes through now, as `Crossing` of a device's programs. before_it, behind: borders of the
    device, None at the model's ends."""

    device: Device
    before_it: Border | None
    behind: Border | None
    slot: int = 0

    def __post_init__(self) -> None:
        self._recorded: dict[tuple[object, ...], Commands] = {}

    def inputs(self, size: int) -> Mapping[str, BufferRange]:
        """As of `Crossing`."""
        return self.before_it.inputs(size) if self.before_it is not None else {}

    def before(self, at: int, rows: int) -> Sequence[Commands]:
        """As of `Crossing`."""
        return [self._copies("load", self.before_it.loads(self.slot, at, rows), loads=True)] if self.before_it is not None else []

    def after(self, program: Program, at: int, rows: int) -> Sequence[Commands]:
        """As of `Crossing`."""
        return [self._copies("store", self.behind.stores(program, self.slot, at, rows))] if self.behind is not None else []

    def _copies(self, name: str, copies: Copies, *, loads: bool = False) -> Commands:
        """A recording of copies, made once for the same memory."""
        key = (name, *((r.key, r.offset, r.size, id(r.arena)) for pair in copies for r in pair))
        found = self._recorded.get(key)
        if found is None and len(self._recorded) >= MAX_RECORDED:
            self.close()
        if found is None or not all(r.arena.alive for pair in copies for r in pair):
            rec = self.device.recorder(f"{name} hidden rows")
            if loads:
                rec.host_writes()
            for source, target in copies:
                rec.copy(source, target)
            rec.host_barrier()
            if found is not None:
                found.destroy()
            found = self._recorded[key] = rec.finish()
        return found

    def close(self) -> None:
        """Destroy the recordings."""
        for commands in self._recorded.values():
            commands.destroy()
        self._recorded.clear()


class Stage:
    """Layers of a model on a device, for one text at a time.

    plans     schedules of these layers alone
    ubatch    tokens of the largest of these, None for the device's default
    prompts   their programs of several tokens
    state     their caches
    expert_cache  of those of its layers whose experts lie in memory of the host; None: there is none
    """

    def __init__(
        self, device: Device, model: Model, plans: Plans, library: ShaderLibrary, ubatch: int | None, report: Report | None
    ) -> None:
        """Takes no memory yet."""
        self.device, self.plans = device, plans
        self._model, self._library, self._report = model, library, report
        self.kernels = KernelCompiler(device, library, report)
        self.weights: dict[str, WeightRanges] = {}
        self.checkpoint: Checkpoint | None = None
        self.expert_cache: ExpertCache | None = None
        self.ubatch = ubatch
        self._arenas: list[Arena] = []
        self._state: DeviceState | None = None
        self._inputs: Arena | None = None
        self._back: Arena
        self._program: Program | None = None
        self._recorded: dict[tuple[int, bool], Commands] = {}
        self._slots: Slots | None = None
        self._prompts: Prompts | None = None

    def allocate(self, before_it: Border | None, behind: Border) -> None:
        """Memory for caches and inputs, of a context of plans.n_ctx rows; programs that use it are made when they are first used."""
        self.release()
        self._slots = Slots(self.device, before_it, behind)
        self._prompts = Prompts(
            self.device,
            self._model.hp.n_vocab,
            self.ubatch,
            self.plans.prompt,
            self._bind,
            self._rescale,
            self.plans.use_prompt_barriers,
            crossing=self._slots,
        )
        self._prompts.attach(self.plans.n_ctx)
        caches = {node.outputs[0].name for node in self.plans.graph(1, "none").nodes if node.op == "SET_ROWS"}
        self._state = DeviceState(self.device, self._tensors("state").values(), caches, self.plans.slots)
        if self._state.recurs:
            self.checkpoint = Checkpoint(self.device, self._state.recurrent)
        self._inputs = self.device.arena("inputs", 2 * INPUT_BYTES, "device")
        self._one = self._inputs.alloc(2 * INPUT_BYTES, "one")
        self._back = self.device.arena("state of spin-waits", 4, "readback")
        self._timed_out = self._back.alloc(4, "state of spin-waits")
        self.forget_timeouts()

    @property
    def state(self) -> DeviceState:
        assert self._state is not None
        return self._state

    @property
    def prompts(self) -> Prompts:
        assert self._prompts is not None
        return self._prompts

    @property
    def slots(self) -> Slots:
        assert self._slots is not None
        return self._slots

    def share(self, other: Stage) -> None:
        """Use the weights of another text's stage."""
        self.weights, self.expert_cache = other.weights, other.expert_cache
        self.plans.use_context(other.plans.ctx)

    def load(self, options: LoadOptions) -> None:
        """Bring its weights to the device, and those that are asked for to memory of the host."""
        known = self._model.architecture.by_context
        weights = {name: self._model.hp.weights[name] for name in known if self._model.hp.has_weight(name)} | self._tensors("weight")
        rule = options.placement.rule(HostRule(self._model.hp.n_layer, lookup_tables(self._model.whole_graphs())))
        there, file = host_weights(weights, rule, self.device.caps), self._model.file
        self.expert_cache = expert_cache(self.device, self.plans, there, options.expert_cache, self._schedules, str(file.path))
        self._arenas += self.expert_cache.arenas if self.expert_cache is not None else []
        with WeightLoad(file, weights, self.device, self._library, repack=options.repack, in_host=there.names) as load:
            progress_log.info("loading %s: %.0f MB, for %s", file.path, load.total_bytes / 1e6, self.device.caps.name)
            with Reported(self._report, "load", load.total_bytes, "reading") as work:
                load.run(work.advance, work.waits_for)
            loaded = load.loaded()
        self.weights = loaded.ranges
        self._arenas += loaded.arenas
        if loaded.beyond_f16 or loaded.coarse:
            self.prompts.close()
            self.plans.keep_out_of_f16(loaded.beyond_f16, loaded.coarse)

    def dispatches(self, prompts: Iterable[int]) -> list[Dispatch]:
        """What prompts of so many tokens, and a token, run here."""
        return [*self.prompts.dispatches(prompts), *self.plans.token("logits").dispatches()]

    def token(self, number: int, feed: BufferRange, mark: tuple[BufferRange, int], *, barriers: bool = False) -> Commands:
        """One token through these layers: a recording for each number, so that so many may be in flight. feed: where the token and its
        position lie in host memory. mark: what it ends with."""
        key = number, barriers
        if key not in self._recorded:
            if self._program is None:
                inputs = {"tokens": self._one.slice(0, 4), "pos": self._one.slice(INPUT_BYTES, 4)}
                self._program = self._bind(self.plans.token("logits"), inputs | dict(self.slots.inputs(1)))
            loads = [(feed, self._one)]
            if self.slots.before_it is not None:
                loads += self.slots.before_it.loads(TOKEN_SLOT, 0, 1)
            assert self.slots.behind is not None
            copies = self.slots.behind.stores(self._program, TOKEN_SLOT, 0, 1)
            if self._program.state is not None:
                copies.append((self._program.state, self._timed_out))
            self._recorded[key] = self._program.record(
                f"layers of a token {number}", barriers=barriers, loads=loads, copies=copies, mark=mark
            )
        return self._recorded[key]

    @property
    def timed_out(self) -> bool:
        """Whether a spin-wait of a token has timed out."""
        return bool(self._timed_out.map().any())

    def forget_timeouts(self) -> None:
        """As if none had."""
        self._timed_out.map()[:] = 0

    def use_barriers(self, why: str) -> None:
        """Plan everything anew with a barrier between all stages."""
        self.forget_programs()
        self.plans.use_barriers(why)
        self.forget_timeouts()

    def forget_programs(self) -> None:
        """Make the programs of a token anew when they are next used."""
        if self._program is not None:
            self._program.close()
        self._program = None
        self._recorded.clear()

    def release(self) -> None:
        """Give back all but the weights."""
        self.forget_programs()
        if self._prompts is not None:
            self._prompts.close()
            self._prompts = None
        if self._slots is not None:
            self._slots.close()
            self._slots = None
        if self.checkpoint is not None:
            self.checkpoint.close()
            self.checkpoint = None
        if self._inputs is not None:
            self._inputs.destroy()
            self._back.destroy()
            self._inputs = None
        if self._state is not None:
            self._state.arena.destroy()
            self._state = None

    def close(self) -> None:
        """Destroy everything but the device."""
        self.release()
        for arena in self._arenas:
            arena.destroy()
        self._arenas = []

    def _tensors(self, kind: str) -> dict[str, Tensor]:
        """Those that programs of one and of several tokens use."""
        return {t.name: t for s in self._schedules() for t in s.tensors().values() if t.kind == kind and not is_cache(t)}

    def _schedules(self) -> list[Schedule]:
        return [self.plans.token("logits"), self.plans.prompt(self.prompts.sizes()[-1], "none")]

    def _bind(self, schedule: Schedule, inputs: dict[str, BufferRange], activations: BufferRange | None = None) -> Program:
        self.kernels.compile(schedule.dispatches())
        given, weights = self.state.ranges | inputs, self.weights
        if self.expert_cache is not None:
            given, weights = given | self.expert_cache.tables, weights | self.expert_cache.slots
        return Program(self.device, self._library, schedule, given, weights, activations)

    def _rescale(self, overflowed: dict[str, float], rows: int) -> Sequence[int]:
        """Bring activations back into the range of f16. rows: as of `Prompts`."""
        if self.checkpoint is not None:
            raise SplitError(
                f"[split] {self._model.file.path}: activations are beyond the range of f16, and recurrent states of several devices cannot "
                'be made anew; load with act "f32" (--act f32), or on one device'
            )
        self.plans.rescale(overflowed)
        return ()
