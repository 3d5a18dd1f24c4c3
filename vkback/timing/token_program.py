"""A model's token as one program: loaded once, replayed with other schedules, and timed as a whole by the device's clock."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

import numpy as np

from vkback.device import Device
from vkback.engine.generation import TOKENS_PER_SUBMIT
from vkback.engine.sampler import add_sampler
from vkback.graph import Graph, Tensor
from vkback.models.registry import Model
from vkback.ops.case import Array
from vkback.ops.lowering import LowerContext
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule
from vkback.program import Program
from vkback.program.values import decoded
from vkback.shader import ShaderLibrary
from vkback.timing.launches import span_us, stamp
from vkback.timing.stages import loaded, zeroed

DEPTH = 128
"""Rows of the cache in use while a token is timed."""

INPUTS = ("tokens", "pos", "loop")

LOGITS = "result_output"


def token_graph(model: Model, n_ctx: int | None = None) -> Graph:
    """One token and the choice of the next, as generation runs it."""
    graph = model.graph(1, model.context(n_ctx), head="last")
    add_sampler(graph, greedy=True)
    return graph


def is_barrier_free(model: Model, ctx: LowerContext) -> bool:
    """Whether the tables make stages of a model's token barrier-free."""
    return bool(plan(token_graph(model), ctx).barrier_free)


def fitting_depth(model: Model, n_ctx: int | None, depth: int) -> int:
    """The depth at which tokens are timed: as requested, with room left in the cache for those that are timed."""
    return min(depth, model.context(n_ctx) - 2 * TOKENS_PER_SUBMIT)


class Tokens:
    """A model's weights, cache and inputs on a device, for one program of its token after another. Use as a context manager.

    n_ctx  rows of the cache, by default as many as the engine makes
    depth  tokens before those that are timed, as far as they fit; DEPTH of them are real, rows beyond are zeros
    """

    def __init__(
        self, model: Model, device: Device, library: ShaderLibrary, ctx: LowerContext, *, n_ctx: int | None = None, depth: int = DEPTH
    ) -> None:
        self.model, self.device, self.library = model, device, library
        self.graph = token_graph(model, n_ctx)
        self._stack = ExitStack()
        tensors = plan(self.graph, ctx).tensors()
        try:
            self.weights, self.ranges = loaded(model, tensors, device, self._stack)
            first = zeroed(device, [tensors[name] for name in INPUTS], self._stack)
            depth = self.depth = fitting_depth(model, n_ctx, depth)
            device.upload(first["pos"], np.array([depth], np.int32))
            self._first_token = first["tokens"]
            self.begin = [(first[name], self.ranges[name]) for name in INPUTS]
            self.start, self.end = (stamp(device, label) for label in ("start", "end"))
            self._stack.callback(self.start.destroy)
            self._stack.callback(self.end.destroy)
            self._fill_cache(ctx, min(depth, DEPTH))
        except BaseException:
            self._stack.close()
            raise

    def begin_with(self, token: int) -> None:
        """The token that runs begin with."""
        self.device.upload(self._first_token, np.array([token], np.int32))

    def _fill_cache(self, ctx: LowerContext, depth: int) -> None:
        """Make the tokens that the cache holds while a token is timed: with zeros there, next to nothing would come out of attention."""
        program = Program(self.device, self.library, plan(self.graph, ctx), self.ranges, self.weights)
        token, last = program.record("token"), program.record("last token", copies=self.begin)
        for _ in range(depth):
            self.device.submit(token).wait()
        self.device.submit(last).wait()
        program.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class TokenProgram:
    """A program of a model's token, recorded so that each run begins where the last began."""

    def __init__(self, tokens: Tokens, schedule: Schedule) -> None:
        self._tokens, self.schedule = tokens, schedule
        self.nbytes = schedule.weight_bytes
        self._program = Program(tokens.device, tokens.library, schedule, tokens.ranges, tokens.weights)
        self.commands = self._program.record("tokens", repeat=TOKENS_PER_SUBMIT, copies=tokens.begin)
        self._one = self._program.record("token", copies=tokens.begin)

    def time_us(self) -> float:
        """Microseconds a token, by the device's clock."""
        return span_us(self._tokens.device, self._tokens.start, self.commands, self._tokens.end) / TOKENS_PER_SUBMIT

    def run(self, token: int) -> Array:
        """The logits of a token, F32 [vocabulary], after a whole recording that has to leave everything as it was."""
        tokens = self._tokens
        tokens.begin_with(token % tokens.model.hp.n_vocab)
        tokens.device.submit([self.commands, self._one]).wait()
        tokens.begin_with(0)
        return self.download(LOGITS, np.float32)[: self.schedule.tensors()[LOGITS].elements]  # its memory may be longer

    def logits(self, tokens: Sequence[int]) -> Array:
        """Of some tokens, each by itself: F32 [tokens, vocabulary]."""
        return np.stack([self.run(token) for token in tokens])

    def experts(self) -> list[Array]:
        """Which experts the last token chose, layer by layer, as far as the program keeps that to the end."""
        return [self.output(t) for t in self.schedule.tensors().values() if t.type == "I32" and t.name in self.schedule.sentinel_tensors]

    def output(self, tensor: Tensor) -> Array:
        """What a tensor with sentinels held at the end of the last run."""
        return decoded(tensor, self.download(tensor.name, np.uint8), self._tokens.device.caps)

    def download(self, name: str, dtype: type[np.generic]) -> Array:
        """What a tensor of the program holds, as a row of values."""
        return self._tokens.device.download(self._program.range(name), dtype)

    @property
    def timed_out(self) -> bool:
        """Whether a wait of any run so far took too long."""
        return self._program.timed_out

    def close(self) -> None:
        self._program.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
