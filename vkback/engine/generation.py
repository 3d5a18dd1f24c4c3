"""The generation loop: tokens of one text, picked on the device, as the host reads them.

A text is made in runs. Within a run programs and what is asked for stay the same; between two runs something changes: a spin-wait timed out
and all is planned with barriers, drafts begin to pay or no longer do, a step with drafts is beyond the range of f16. `generate` goes from
run to run. A run goes by one of two loops:

- `_submits` where the device goes on alone. It keeps several submits in flight, and each makes several tokens: the sampler's token is the
  next one's input without the host.
- `_steps_with_host` where the host is needed between two steps (a callback for logits, a constraint) and there may be drafts. It looks
  drafts up, gives each drafted token its mask, and waits for each step.

When a loop ends or is left, `TokenHistory` has the tokens that went through the model. The caches may have more rows, which the next token
writes over. Recurrent states cannot go back: `catch_up` makes them anew.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vkback.device import BufferRange, Device, DeviceLost
from vkback.engine.barrier_trial import TIMED_OUT, BarrierTrial
from vkback.engine.checkpoint import Checkpoint
from vkback.engine.constraint import Ahead, Constraint
from vkback.engine.draft_model import Drafter
from vkback.engine.drafting import Drafting
from vkback.engine.drafts import DraftCounts, Drafts, HostPace, ModelPace, Pace, Probe, StepTimes
from vkback.engine.kernels import KernelCompiler
from vkback.engine.readback import Readback
from vkback.engine.sampler import RING, Sampler, loop_kind, loop_state
from vkback.engine.token_history import TokenHistory
from vkback.engine.token_programs import SUBMITS_IN_FLIGHT, TokenPrograms, Waits
from vkback.errors import VkbackError
from vkback.models.registry import Model
from vkback.ops.sampling.lookup import LOOP_LIMIT
from vkback.ops.sampling.penalties import mask_words
from vkback.ops.sampling.sample import LOOP_RING, STATUS_EOS, STATUS_NAN, STATUS_RUNNING
from vkback.program import Program

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

TOKENS_PER_SUBMIT = 8
"""A submit and its wait cost about as much as a twentieth of a fast token; eight tokens make that disappear. Slow devices take fewer:
`TokenPrograms.most_at_once`."""

MEASURED_ROWS = 64
"""That steps which are measured may need; plain ones do not know where to end."""

PLAIN_TOKENS = 64
"""Tokens after which a draft model that did not pay is tried again; then twice as many, and so on."""


class LoopEngine(Protocol):
    """What the loop needs of a loaded model."""

    @property
    def model(self) -> Model: ...

    @property
    def device(self) -> Device: ...

    @property
    def n_ctx(self) -> int: ...

    @property
    def history(self) -> TokenHistory: ...

    @property
    def checkpoints(self) -> Sequence[Checkpoint]:
        """Of recurrent states, of all devices; none of a model without."""

    def quiet(self) -> None:
        """What runs next, and is waited for at once, must not stand behind a token of another text."""

    def settle(self) -> None:
        """Nothing of another text is in the way, and recurrent states are those of the history (`Generation.catch_up`)."""

    def ready(self) -> None:
        """As `settle`, and barrier-free stages have been tried."""

    def decode_logits(self, token: int) -> Floats:
        """One token through the model."""

    def use_barriers(self, why: str) -> None:
        """Plan everything anew with a barrier between all stages."""

    def end_ids(self, stop_at_eos: bool) -> list[int]:
        """Token ids that end a text on the device."""

    def dry_words(self, sampler: Sampler, n_ctx: int) -> npt.NDArray[np.int32]:
        """What DRY goes by."""

    def values_error(self, where: str, rows: int) -> VkbackError:
        """The error of logits that are not numbers, when so many rows of the caches are in use."""


def times_key(kind: str, drafts: Drafts) -> str:
    """By which times of steps are known."""
    return f"{kind}, draft model" if drafts.model else kind


@dataclass
class Run:
    """Tokens that are made without a change of programs: what is asked for, and how far it is.

    first   the last token of the text
    n       tokens to make
    kind    as of `loop_kind`
    eos     ids that end the text
    ended   why it came to an end before that: "timed out" (a spin-wait), "overflow" (of f16), "wants drafts" (which are not ready),
            "wants plain steps" (drafts do not pay)
    drafting  steps with drafts may run; else they only could
    before  drafts of the text before this run
    """

    first: int
    n: int
    sampler: Sampler
    kind: str
    eos: Sequence[int]
    on_logits: Callable[[Floats], object] | None = None
    constraint: Constraint | None = None
    drafts: Drafts | None = None
    probe: Probe | None = None
    drafting: bool = False
    constrained: bool = False
    made: int = 0
    ended: str = ""
    before: DraftCounts = field(default_factory=DraftCounts)

    def __post_init__(self) -> None:
        self.constrained |= self.constraint is not None

    @property
    def needs_host(self) -> bool:
        """Whether the host is needed between two tokens."""
        return self.on_logits is not None or self.constraint is not None

    @property
    def by_model(self) -> bool:
        """Whether a draft model has a part in its steps."""
        return self.drafting and self.drafts is not None and self.drafts.model

    def read(self, back: Readback) -> tuple[int, int, list[int]]:
        """Of a submit: tokens of the run so far, the loop's status, and the tokens that are new."""
        words = back.result.map().view(np.int32)
        step, status = int(words[0]), int(words[1])
        return step, status, [int(words[LOOP_RING + i % RING]) for i in range(self.made, min(step, self.n))]


class Generation:
    """Makes the tokens of an engine's text.

    counts  drafts of the last text
    """

    def __init__(self, engine: LoopEngine, tokens: TokenPrograms, drafting: Drafting, trial: BarrierTrial, kernels: KernelCompiler) -> None:
        """tokens, drafting, trial, kernels: the engine's, which closes them."""
        self.counts = DraftCounts()
        self._engine, self._device, self._tokens, self._drafting = engine, engine.device, tokens, drafting
        self._trial, self._kernels = trial, kernels
        self._left: Run | None = None  # left with recurrent states ahead of the history

    def at_once(self, kind: str) -> int:
        """Tokens of a submit."""
        return self._tokens.most_at_once(kind, TOKENS_PER_SUBMIT)

    def generate(
        self,
        first: int,
        n: int,
        sampler: Sampler,
        *,
        stop_at_eos: bool,
        on_logits: Callable[[Floats], object] | None,
        constraint: Constraint | None,
        drafts: Drafts | None,
    ) -> Generator[int, None, None]:
        """As `Engine.generate`, of arguments that are checked."""
        history, constrained = self._engine.history, constraint is not None
        kind = loop_kind(sampler, constrained)
        self.counts = DraftCounts()
        # A callback or a constraint needs the host between two tokens; without them submits run ahead of it.
        needs_host = on_logits is not None or constrained
        if needs_host and drafts is not None and drafts.model:
            drafts = drafts.of_text() if drafts.pinned else None
        drafts = self._drafting.possible(drafts, sampler.moves)
        probe: Probe | None = None
        if drafts is not None and drafts.pinned:
            self.prepare_drafts(first, sampler, drafts, constrained)
        if drafts is not None and not drafts.model and (needs_host or not drafts.pinned):
            probe = Probe([*history.tokens, first], history.earlier if drafts.earlier else ())
        made, drafting, rest, times = 0, drafts is not None and drafts.model, n, self._drafting.programs.times
        while made < n:
            if drafting and drafts is not None and drafts.model and times_key(kind, drafts) not in times:
                self.prepare_drafts(first, sampler, drafts)
            run = Run(
                first,
                n - made if drafting else min(n - made, rest),
                sampler,
                kind,
                self._engine.end_ids(stop_at_eos),
                on_logits,
                constraint,
                drafts,
                probe,
                drafting,
                before=self.counts,
            )
            yield from self._steps_with_host(run) if needs_host and drafts is not None else self._submits(run)
            made, first = made + run.made, run.first
            if run.ended == "timed out":
                self._engine.use_barriers(TIMED_OUT)
                if drafts is not None and drafts.pinned:
                    self.prepare_drafts(first, sampler, drafts, constrained)
            elif run.ended == "overflow":
                self._drafting.rule_out("activations are beyond the range of f16 in a step of several tokens")
                drafts = probe = None
            elif run.ended == "wants plain steps":
                drafting, rest = False, PLAIN_TOKENS if rest == n else 2 * rest
            elif drafts is not None and drafts.model and not drafting and run.made == run.n:
                drafting = True
            elif run.ended == "wants drafts" and drafts is not None:
                drafting = True
                if kind not in times:
                    self.prepare_drafts(first, sampler, drafts, constrained)
            else:
                return

    def _submits(self, run: Run) -> Generator[int, None, None]:
        """Tokens of a run, to its end; the device goes on alone."""
        engine, tokens, programs = self._engine, self._tokens, self._drafting.programs
        engine.ready()
        for checkpoint in engine.checkpoints:
            checkpoint.save(engine.history.n_past)
        self._begin(run)
        pace, drafter = self._pace(run)
        in_flight = 1 if run.needs_host else SUBMITS_IN_FLIGHT
        step, status = 0, STATUS_RUNNING
        flying: deque[tuple[Waits, int, int]] = deque()
        try:
            while run.made < run.n:
                # Keep the queue full: the next submit starts when one ends.
                run.ended = "wants drafts" if pace.wants_drafts else ""
                if isinstance(pace, ModelPace) and pace.lost:
                    run.ended = "wants plain steps"
                while not run.ended and len(flying) < in_flight and (size := pace.next()) is not None:
                    if run.constraint is not None:
                        engine.quiet()
                        self._device.upload(tokens.inputs["mask"], run.constraint.mask())
                    if size.columns > 1:
                        loop = programs.loop(size.columns, run.kind, size.steps, drafter=drafter)
                    else:
                        loop = tokens.loop(run.kind, size.steps, logits=run.on_logits is not None)
                    flying.append((*tokens.submit(loop), size.columns))
                if not flying:
                    return
                ticket, number, columns = flying.popleft()
                ticket.wait()
                # The results of this submit, and of those behind it, are undefined.
                run.ended = "timed out" if tokens.timed_out(number) else run.ended
                if columns > 1 and programs.overflowed(number):
                    run.ended = run.ended or "overflow"
                if run.ended in ("timed out", "overflow"):
                    return
                if drafter is not None and drafter.timed_out(number):
                    drafter.use_barriers(TIMED_OUT)
                    run.ended = "wants plain steps"
                if columns > 1:
                    self.counts = run.before + programs.counts(number)
                step, status, ids = run.read(tokens.back(number))
                pace.take(ids)
                for token in ids:
                    if run.on_logits is not None:
                        run.on_logits(tokens.logits())
                    if drafter is not None:
                        drafter.accepted([run.first])
                    self._take(run, token)
                    yield token
                if status == STATUS_NAN:
                    raise engine.values_error("at", engine.history.n_past + 1)
                if status == STATUS_EOS or (run.constraint is not None and run.constraint.ended):
                    run.ended = ""
                    return
        finally:
            submitted = run.made + sum(f.steps for f in pace.flying)
            with contextlib.suppress(DeviceLost):  # which the wait above has reported
                for ticket, *_ in flying:
                    ticket.wait()
            if run.made < step or (status == STATUS_RUNNING and run.made < submitted):
                self._leave(run)

    def _pace(self, run: Run) -> tuple[Pace, Drafter | None]:
        """What sizes its submits, and the draft model that has a part in them."""
        drafts = run.drafts
        times = self._drafting.programs.times.get(times_key(run.kind, drafts)) if run.drafting and drafts is not None else None
        if run.by_model and drafts is not None and self._drafting.drafter is not None:
            columns = drafts.classes[0]
            if drafts.pinned or (times is not None and columns in times.of):
                return ModelPace(drafts, run.n, self.at_once(run.kind), columns, times), self._drafting.drafter
        return Pace(drafts, run.n, 1 if run.needs_host else self.at_once(run.kind), run.probe, times), None

    def _steps_with_host(self, run: Run) -> Generator[int, None, None]:
        """Tokens of a run between whose steps the host is needed, to its end. It looks drafts up, and gives each drafted place its mask, so
        that the device verifies them as it does others."""
        assert run.drafts is not None
        engine, tokens, programs, constraint = self._engine, self._tokens, self._drafting.programs, run.constraint
        engine.ready()
        for checkpoint in engine.checkpoints:
            checkpoint.save(engine.history.n_past)
        self._begin(run)
        times: StepTimes | None = programs.times.get(run.kind) if run.drafting else None
        pace, most, wants_logits = HostPace(run.drafts, times), run.drafts.most, run.on_logits is not None
        step, status = 0, STATUS_RUNNING
        try:
            while run.made < run.n:
                room = min(most, run.n - run.made - 1)
                ahead = self._looked_up(run, room, guess=constraint is None or pace.rest.over())
                if pace.wants_drafts(len(ahead.tokens), run.n - run.made):
                    run.ended = "wants drafts"
                    return
                columns = pace.columns(len(ahead.tokens))
                if columns > 1:
                    drafts = ahead.tokens[: columns - 1]
                    programs.give(engine.history.n_past, drafts, columns, ahead.masks)
                    loop = programs.loop(columns, run.kind, 1, logits=wants_logits)
                else:
                    drafts = ahead.tokens
                    if constraint is not None:
                        self._device.upload(tokens.inputs["mask"], ahead.masks[0])
                    loop = tokens.loop(run.kind, 1, logits=wants_logits)
                ticket, number = tokens.submit(loop)
                ticket.wait()
                back = tokens.back(number)
                if back.timed_out:
                    run.ended = "timed out"
                    return
                if columns > 1 and programs.overflowed(number):
                    run.ended = "overflow"
                    return
                if columns > 1:
                    self.counts = run.before + programs.counts(number)
                step, status, ids = run.read(back)
                pace.take(drafts, ids, columns)
                logits = programs.logits(columns) if wants_logits and columns > 1 else None
                for i, token in enumerate(ids):
                    if run.on_logits is not None:
                        run.on_logits(tokens.logits() if logits is None else logits[i])
                    if run.probe is not None:
                        run.probe.take(token)
                    self._take(run, token)
                    yield token
                    if constraint is not None and constraint.ended:
                        return
                if status == STATUS_NAN:
                    raise engine.values_error("at", engine.history.n_past + 1)
                if status == STATUS_EOS:
                    return
        finally:
            if run.made < step:
                self._leave(run)

    def _looked_up(self, run: Run, most: int, *, guess: bool) -> Ahead:
        """Drafts of the next tokens as far as its constraint lets them come; without a guess those that alone may come."""
        if not guess:
            found = []
        elif run.drafts is not None and run.drafts.known is not None:
            row = run.drafts.known[self._engine.history.n_past + 1 :][:most]
            found = [*row[: next((i for i, t in enumerate(row) if t < 0), len(row))]]
        else:
            found = run.probe.ahead(most) if run.probe is not None else []
        if run.constraint is None:
            return Ahead(found)
        return run.constraint.ahead(found, most)

    def _take(self, run: Run, token: int) -> None:
        """A token was picked. The caches hold the one that went in; the new one is in none."""
        self._engine.history.advance([run.first])
        run.made, run.first = run.made + 1, token
        if run.constraint is not None:
            run.constraint.take(token)

    def _begin(self, run: Run) -> None:
        """Write what the device goes by: the token, the loop's state, what samplers and drafts need."""
        engine, tokens, sampler, drafts = self._engine, self._tokens, run.sampler, run.drafts
        history, n_ctx = engine.history, engine.n_ctx
        loop = loop_state(sampler, run.eos)
        loop[LOOP_LIMIT] = run.n
        tokens.set_input(run.first, history.n_past)
        self._device.upload(tokens.inputs["loop"], loop)
        if sampler.chained:
            self._device.upload(tokens.inputs["chain"], sampler.chain.words())
        if sampler.dries:
            self._device.upload(tokens.dry_input(), engine.dry_words(sampler, n_ctx))
        if sampler.penalizes or run.constrained or sampler.dries:
            vocab, inputs = engine.model.hp.n_vocab, tokens.penalty_inputs()
            self._device.upload(inputs["bias"], sampler.bias(vocab))
            self._device.upload(inputs["seen"], sampler.penalties(n_ctx).words(history.tokens, vocab, n_ctx))
        if run.by_model and drafts is not None and self._drafting.drafter is not None:
            self._drafting.drafter.begin([*history.tokens, run.first], min(drafts.most, drafts.classes[0] - 1), drafts.p_min)
        if drafts is not None and (drafts.pinned or drafts.known or run.drafting):
            given = replace(drafts, known=(-1,), least=0) if run.needs_host else drafts  # the host gives them step by step
            self._drafting.programs.begin([*history.tokens, run.first], given, history.earlier if drafts.earlier else ())

    def try_step(self, sampler: Sampler, *, constrained: bool) -> Waits:
        """Run a step behind the text, which has no other effect than that it has been run: some drivers compile a kernel then."""
        kind = loop_kind(sampler, constrained)
        self._begin(Run(0, 1, sampler, kind, [], constrained=constrained))
        return self._tokens.submit(self._tokens.loop(kind, 1))[0]

    def forget(self) -> None:
        """The text begins anew, and with it recurrent states."""
        self._left = None

    def _leave(self, run: Run) -> None:
        """Recurrent states cannot go back: note that the device is ahead of what was yielded."""
        if self._engine.model.architecture.recurrent:
            self._left = run

    def catch_up(self) -> None:
        """Recurrent states hold all tokens that the device has seen, and no fewer: where those are more than the history has (a generation
        that was left before its end), go back to those before that generation and make its tokens once more, one by one, which gives their
        bits: of pinned steps in such steps."""
        run, self._left = self._left, None
        checkpoints = self._engine.checkpoints
        if run is None or not checkpoints:
            return
        for checkpoint in checkpoints:
            checkpoint.restore()
        for token in self._engine.history.go_back(checkpoints[0].at):
            if run.drafts is not None and run.drafts.pinned:
                self._step_alone(token, replace(run, drafts=replace(run.drafts, known=(-1,), model=False)))
            else:
                self._engine.decode_logits(token)

    def _step_alone(self, token: int, how: Run) -> None:
        """A token through a pinned step without drafts."""
        assert how.drafts is not None
        run = replace(how, first=token, n=1, eos=[])
        for _ in range(2):
            self._begin(run)
            ticket, back = self._tokens.submit(self._drafting.programs.loop(how.drafts.pinned, how.kind, 1))
            ticket.wait()
            if not self._tokens.timed_out(back):
                break
            self._engine.use_barriers(TIMED_OUT)
        self._engine.history.advance([token])

    def prepare_drafts(self, first: int, sampler: Sampler, drafts: Drafts, constrained: bool = False) -> None:
        """Compile, record, try and measure the steps with drafts of a text whose last token is `first`."""
        engine, tokens, programs = self._engine, self._tokens, self._drafting.programs
        kind, n_past, n_ctx = loop_kind(sampler, constrained), engine.history.n_past, engine.n_ctx
        if constrained:
            programs.give_no_masks()
            self._device.upload(tokens.inputs["mask"], np.full(mask_words(engine.model.hp.n_vocab), -1, np.int32))
        engine.settle()
        for checkpoint in engine.checkpoints:
            checkpoint.save(n_past)
        classes = [c for c in drafts.classes if n_past + MEASURED_ROWS <= n_ctx]
        known = replace(drafts, known=(first,) * n_ctx, model=False)

        def begin(how: Drafts = known) -> None:
            self._begin(Run(first, n_ctx - n_past, sampler, kind, [], drafts=how, drafting=True, constrained=constrained))

        def run(columns: int, steps: int) -> float:
            drafter = self._drafting.drafter if drafts.model and columns > 1 else None
            begin(known if drafter is None else drafts)
            loop = programs.loop(columns, kind, steps, drafter=drafter) if columns > 1 else tokens.loop(kind, steps)
            # As steps run: one submit behind the other. From the end of the first on, so that nobody waits for the host.
            tickets = [tokens.submit(loop)[0] for _ in range(SUBMITS_IN_FLIGHT)]
            tickets[0].wait()
            begun = time.perf_counter()
            tickets.append(tokens.submit(loop)[0])
            for ticket in tickets[1:]:
                ticket.wait()
            return (time.perf_counter() - begun) / SUBMITS_IN_FLIGHT

        with self._kernels.preparing([]):
            self._drafting.wait_for_kernels()
            for columns in classes:
                program = programs.program(columns, kind)
                begin()
                tokens.submit(programs.loop(columns, kind, 1))[0].wait()  # one step: the one that is made again below
                if (made := program.last_waited_for) is None:
                    continue

                def found(made: BufferRange = made) -> Words:
                    return self._device.download(made, np.uint32)

                def with_barriers(program: Program = program, found: Callable[[], Words] = found) -> Words:
                    for checkpoint in engine.checkpoints:
                        checkpoint.restore()
                    begin()
                    self._device.submit(program.record("drafts, all barriers", barriers=True)).wait()
                    return found()

                what = "the values of a step with drafts"
                if why := self._trial.fault((columns, kind), what, timed_out=program.timed_out, found=found, with_barriers=with_barriers):
                    engine.use_barriers(why)
                    break
            if not drafts.pinned:
                programs.measure(times_key(kind, drafts), classes, self.at_once(kind), run)
        for checkpoint in engine.checkpoints:
            checkpoint.restore()
