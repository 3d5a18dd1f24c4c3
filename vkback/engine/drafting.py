"""Drafts of one model: which it can have, what makes them, and the programs that verify them (docs/drafts.md).

The generation loop (vkback/engine/generation.py) decides from step to step which of this it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from vkback.device import BufferRange, Device
from vkback.engine.compile_ahead import CompileAhead
from vkback.engine.draft_model import ROOM, DraftEngine, Drafter, DraftHead, DraftModel
from vkback.engine.draft_programs import DraftPrograms
from vkback.engine.drafts import CLASSES, DraftError, Drafts
from vkback.engine.plans import HeadPlans, Plans
from vkback.engine.sampler import Sampler, loop_kind
from vkback.engine.token_programs import TokenPrograms
from vkback.events import log
from vkback.models.registry import Model
from vkback.plan.schedule import Schedule
from vkback.program import Program
from vkback.shader import ShaderLibrary


class Drafting:
    """What an engine has for drafts. Takes no memory before something is used.

    programs  of steps with drafts
    drafter   a draft model, the file's own MTP block, or an EAGLE-3 head; None: drafts come from the text
    """

    def __init__(
        self,
        model: Model,
        device: Device,
        library: ShaderLibrary,
        plans: Plans,
        tokens: TokenPrograms,
        bind: Callable[[Schedule, dict[str, BufferRange]], Program],
        use_barriers: Callable[[str], None],
        *,
        why_none: str = "",
    ) -> None:
        """bind, use_barriers: the engine's. why_none: why the model cannot have drafts at all."""
        self.programs = DraftPrograms(device, plans, tokens, bind)
        self.drafter: Drafter | None = None
        self._model, self._device, self._library, self._plans, self._tokens = model, device, library, plans, tokens
        self._bind, self._use_barriers = bind, use_barriers
        self._why_none = why_none
        self._ahead: CompileAhead | None = None

    def possible(self, drafts: Drafts | None, needs_plain_steps: bool = False) -> Drafts | None:
        """Drafts as they are possible here. Raises DraftError where they were asked for in a way that leaves no choice."""
        if drafts is None or not drafts.classes:
            return None
        if not drafts.most:  # pinned steps without drafts: a draft model has no part
            drafts = drafts.of_text()
        if self._why_none and drafts.pinned:
            raise DraftError(f"[drafts] {self._model.file.path}: no drafts for this model, {self._why_none}; expected drafts 0")
        if self._model.architecture.recurrent:
            columns = self.max_columns
            if drafts.pinned > columns:
                raise DraftError(
                    f"[drafts] {self._model.file.path}: steps of {drafts.pinned} columns, but recurrent states are kept for {columns}; "
                    f"expected a load with --spec-pinned {drafts.pinned} (spec_pinned={drafts.pinned})"
                )
            drafts = drafts.at_most(columns - 1 if columns >= CLASSES[0] else 0)
            if not drafts.classes:
                return None
        if drafts.model and self.drafter is None:
            raise DraftError(f"[drafts] {self._model.file.path.name}: has no draft model; expected one by attach_draft_model")
        return None if self._why_none or needs_plain_steps else drafts

    @property
    def max_columns(self) -> int:
        """Of a step; of a recurrent model as many as it keeps states for."""
        return self._plans.slots - 1 if self._model.architecture.recurrent else CLASSES[-1]

    def rule_out(self, why: str) -> None:
        """No text has drafts from here on."""
        self._why_none = why
        log.warning("going on without drafts: %s", why)

    def attach(self, draft: DraftEngine) -> None:
        """As `Engine.attach_draft_model`."""
        n_ctx = self._plans.n_ctx
        if self._why_none:
            raise DraftError(
                f"[drafts] {self._model.file.path.name}: no drafts for this model, {self._why_none}; leave the draft model out"
            )
        if draft.n_ctx < n_ctx + ROOM or draft.device is not self._device:
            raise DraftError(
                f"[drafts] {draft.model.file.path.name}: a context of {draft.n_ctx} on {draft.device.caps.name}; expected at least "
                f"{n_ctx + ROOM} on the target's device"
            )
        self.drafter = DraftModel(draft, self._tokens, lambda: self.programs.inputs()["text"])

    def use_head(self) -> None:
        """Take drafts from the file's own MTP block, or an EAGLE-3 head."""
        own = TokenPrograms(self._device, self._model.hp.n_vocab, HeadPlans(self._plans), self._bind)
        own.allocate()
        self.drafter = DraftHead(self._device, own, self._tokens, lambda: self.programs.inputs()["text"], self._use_barriers)

    def compile_ahead(self, drafts: Drafts | None, samplers: Sequence[Sampler]) -> CompileAhead | None:
        """As `Engine.compile_drafts_ahead`."""
        if self._ahead is None and (possible := self.possible(drafts)) is not None:
            kinds = dict.fromkeys(loop_kind(sampler) for sampler in samplers)
            made = [partial(self._plans.drafts, columns, kind) for kind in kinds for columns in possible.classes]
            self._ahead = CompileAhead(self._device, self._library, made)
        return self._ahead

    def wait_for_kernels(self) -> None:
        """Until those are compiled that `compile_ahead` has begun."""
        if self._ahead is not None:
            self._ahead.wait()

    def stop_compiling(self) -> None:
        """Leave what `compile_ahead` has not begun."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def resize(self, n_ctx: int) -> None:
        """The context has so many rows from here on."""
        if self.drafter is not None:
            self.drafter.resize(n_ctx)
        self.programs.close()

    def forget_programs(self) -> None:
        """Make those of this model anew when they are next used."""
        self.programs.forget_programs()
        if isinstance(self.drafter, DraftHead):
            self.drafter.forget_programs()

    def close(self) -> None:
        """Give everything back; twice is once."""
        self.stop_compiling()
        if self.drafter is not None:
            self.drafter.close()
            self.drafter = None
        self.programs.close()
