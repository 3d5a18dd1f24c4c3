"""Schedules of a model on a device: planned at the first request, and anew where the device or a text turns out to need others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock

from vkback.engine.prompts import PromptHead, with_barriers
from vkback.engine.sampler import CHAINED, CONSTRAINED, DRIED, PENALIZED, add_drafts, add_sampler, least_probability
from vkback.events import log
from vkback.graph import Graph, Part
from vkback.models.builder import CacheTypes, Head, StateSlots
from vkback.models.registry import Model
from vkback.models.texts import Texts
from vkback.ops.cooperative_matrix import matrix_shape
from vkback.ops.f16_range import rescaled
from vkback.ops.lowering import LowerContext
from vkback.plan.exact import without_logits
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule


class Plans:
    """Schedules of a model's programs.

    ctx    what lowering depends on; what is found out on the way changes it
    n_ctx  rows of the cache that schedules are for
    slots  of recurrent states
    head   whether what the model's MTP block or EAGLE-3 head needs is kept
    part   the layers of the device, where others have others; one without the last layer makes no logits and picks no tokens
    """

    def __init__(
        self,
        model: Model,
        ctx: LowerContext,
        n_ctx: int,
        *,
        fusion: str,
        cache: CacheTypes,
        slots: int = 2,
        head: bool = False,
        part: Part | None = None,
    ) -> None:
        self.part = part
        self.ctx, self.n_ctx, self.slots, self.head = ctx, n_ctx, slots, head
        self._model, self._fusion, self._cache = model, fusion, cache
        self._lock = Lock()  # of the schedules and what they depend on: those of drafts may be planned by another thread
        self._schedules: dict[tuple[int, str, int], Schedule] = {}  # by rows of the cache, too: vkbench comes back to a size
        # Why prompts have them between all stages: to compare both ways a prompt runs twice, which recurrent states do not survive.
        self._prompt_barriers = "recurrent states" if model.architecture.recurrent else ""

    def use_model(self, model: Model) -> None:
        """Plan everything anew, for the same model with other adapters."""
        with self._lock:
            self._model = model
            self._schedules.clear()

    def use_context(self, ctx: LowerContext) -> None:
        """Plan everything anew, as for another text of the same model on the same device."""
        with self._lock:
            self.ctx = ctx
            self._schedules.clear()

    def cache_experts(self, layers: int, slots: int) -> None:
        """Plan everything anew, with slots for experts of the first layers, which lie in memory of the host."""
        with self._lock:
            self.ctx = replace(self.ctx, host_layers=layers, expert_slots=slots)
            self._schedules.clear()

    def graph(self, n_tokens: int, head: Head, *, keep: bool = False) -> Graph:
        """The graph of so many tokens. keep: recurrent states after each of them are kept."""
        kept = StateSlots(self.slots, keep)
        if self.part is not None and not self.part.ends:
            head = "all"  # else what only queries of the last layer read would not cross
        graph = self._model.graph(n_tokens, self.n_ctx, head=head, cache=self._cache, kept=kept, with_head=self.head)
        return graph if self.part is None else self.part.of(graph)

    def _crossing(self) -> list[str]:
        """Names of what a token reads of layers on other devices, and of what those read of these."""
        if self.part is None:
            return []
        graph = self._model.graph(1, self.n_ctx, head="all", cache=self._cache)
        return [t.name for t in (*self.part.given(graph), *self.part.taken(graph))]

    def token(self, kind: str) -> Schedule:
        """The schedule of one token: "logits", or one of `loop_kind` (vkback/engine/sampler.py)."""
        key = self.n_ctx, kind, 1
        if key not in self._schedules:
            graph = self.graph(1, "last")
            if kind != "logits":
                penalties_ctx = self.n_ctx if PENALIZED in kind else None
                add_sampler(
                    graph,
                    greedy=kind.startswith("greedy"),
                    penalties_ctx=penalties_ctx,
                    masked=CONSTRAINED in kind,
                    dried=DRIED in kind,
                    chained=CHAINED in kind,
                    p_min=least_probability(kind),
                )
            self._schedules[key] = plan(graph, self.ctx, fusion=self._fusion, crossing=self._crossing())
        return self._schedules[key]

    def head_token(self, kind: str) -> Schedule:
        """The schedule of one token of the MTP block or EAGLE-3 head, greedy."""
        key = self.n_ctx, f"head, {kind}", 1
        if key not in self._schedules:
            graph, head = self._model.head_graph(self.n_ctx, self._cache), self._model.architecture.head
            add_sampler(graph, greedy=True, p_min=least_probability(kind), ids=head.ids if head is not None else None)
            self._schedules[key] = plan(graph, self.ctx, fusion=self._fusion)
        return self._schedules[key]

    def drafts(self, columns: int, kind: str) -> Schedule:
        """The schedule of a step of so many columns: the text's last token, and drafts. kind: as of `token`. Any thread may
        call it."""
        key = self.n_ctx, f"drafts, {kind}", columns
        with self._lock:
            found, ctx, n_ctx = self._schedules.get(key), self.ctx, self.n_ctx
        if found is None:
            graph = self.graph(columns, "all", keep=True)
            add_drafts(
                graph,
                columns,
                greedy=kind.startswith("greedy"),
                n_ctx=n_ctx,
                penalties=PENALIZED in kind,
                masked=CONSTRAINED in kind,
                dried=DRIED in kind,
                chained=CHAINED in kind,
            )
            found = plan(graph, ctx, fusion=self._fusion)
            with self._lock:
                if (self.ctx, self.n_ctx) == (ctx, n_ctx):
                    self._schedules[key] = found
        return found

    def prompt(self, tokens: int, head: PromptHead) -> Schedule:
        """The schedule of a prompt's program of so many tokens."""
        key = self.n_ctx, f"prompt, head {head}", tokens
        if key not in self._schedules:
            ends = self.part is None or self.part.ends
            exact = self.ctx.exact and head == "none" and ends
            graph = without_logits(self.graph(tokens, "all")) if exact else self.graph(tokens, head)
            ctx = with_barriers(self.ctx, self._prompt_barriers) if self._prompt_barriers else self.ctx
            self._schedules[key] = plan(graph, ctx, fusion=self._fusion)
        return self._schedules[key]

    def texts(self, graph: Graph) -> Schedule:
        """The schedule of whole texts, with barriers: a token's stages read rows of tokens after it."""
        return plan(graph, with_barriers(self.ctx, "whole texts"), fusion=self._fusion)

    def text_graph(self, n_tokens: int, texts: Texts) -> Graph:
        """The graph of whole texts of so many tokens together."""
        return self._model.text_graph(n_tokens, self.n_ctx, texts, self._cache)

    def use_barriers(self, why: str) -> None:
        """Plan everything anew with a barrier between all stages."""
        self._say_barriers("stages", why)
        with self._lock:
            self._schedules.clear()
            self.ctx = with_barriers(self.ctx, "barrier-free stages failed")

    def use_prompt_barriers(self, why: str) -> None:
        """Plan prompts anew with a barrier between all stages."""
        self._say_barriers("a prompt's stages", why)
        self._prompt_barriers = "barrier-free stages of a prompt failed"
        self._forget_prompts()

    def keep_out_of_f16(self, weights: frozenset[str], coarse: frozenset[str] = frozenset()) -> None:
        """Plan prompts anew, with other kernels for weights that f16 cannot hold, or that are too coarse for subnormal f16."""
        self.ctx = replace(self.ctx, beyond_f16=weights, coarse=coarse)
        self._forget_prompts()
        if weights and matrix_shape(self.ctx.caps) is not None and self.ctx.act == "auto":
            log.warning("weights are beyond the range of f16: prompts take no matrices for them (%s)", _few(sorted(weights)))

    def rescale(self, overflowed: dict[str, float]) -> None:
        """Plan prompts anew, with scales that bring activations back into the range of f16. Raises F16RangeError where there are none."""
        before = self.ctx.f16_scales
        self.ctx = replace(self.ctx, f16_scales=rescaled(before, overflowed))
        changed = [f"{name}: {scale:g}" for name, scale in self.ctx.f16_scales.items() if before.get(name) != scale]
        log.warning("activations are beyond the range of f16: from now on they are scaled (%s)", _few(changed))
        self._forget_prompts()

    def _forget_prompts(self) -> None:
        with self._lock:
            self._schedules = {key: s for key, s in self._schedules.items() if not key[1].startswith("prompt")}

    def _say_barriers(self, what: str, why: str) -> None:
        log.warning(
            "%s: %s cannot run barrier-free (%s), going on with barriers. "
            'To have them from the start: [[schedule]] with sync = "barrier" in a tuning table',
            self.ctx.caps.name,
            what,
            why,
        )


def _few(names: Sequence[str]) -> str:
    """The first four, and how many more."""
    return ", ".join(names[:4]) + (f", {len(names) - 4} more" if len(names) > 4 else "")


class HeadPlans:
    """Schedules of a token of the MTP block or EAGLE-3 head, as `TokenPrograms` asks for them."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans

    @property
    def n_ctx(self) -> int:
        return self._plans.n_ctx

    def token(self, kind: str) -> Schedule:
        return self._plans.head_token(kind)
