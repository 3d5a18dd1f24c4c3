"""A model on a device: prompt reading, generation with the token loop on the device, logits to the host.

The graph of one token and the graph of PROMPT_TOKENS tokens are planned and recorded once. Tokens, positions and the loop's state live in
device memory; a generated token goes from the sampler to the next embedding without the host. Several tokens go per submit, two submits are
in flight, and the host reads the ids as submits finish.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vkback.device import Arena, BufferRange, Commands, Device, DeviceLost, Ticket
from vkback.errors import VkbackError
from vkback.graph import Graph, Tensor
from vkback.models.kernels import KernelCompiler
from vkback.models.readback import Readback, TokenLoop
from vkback.models.registry import Model
from vkback.models.tokenizer import Tokenizer
from vkback.models.weights import load_weights
from vkback.ops.base import LowerContext, nbytes
from vkback.ops.sample import LOOP_EOS, LOOP_PARAMS, LOOP_RING, STATUS_EOS, STATUS_NAN
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule, aligned
from vkback.plan.tuning import Overrides, Tuning
from vkback.program import CompileTotals, Program
from vkback.shader import ShaderLibrary

Floats = npt.NDArray[np.float32]

PROMPT_TOKENS = 16
"""Tokens of a prompt that go through the weights at once."""

TOKENS_PER_SUBMIT = 8
"""A submit and its wait cost about as much as a twentieth of a fast token; eight tokens make that disappear."""

INPUT_BYTES = aligned(4 * PROMPT_TOKENS)
"""From tokens to their positions in memory, at most PROMPT_TOKENS of I32 each."""

RING = 4096
"""Token ids the loop state keeps: more than all submits in flight can make."""

SUBMITS_IN_FLIGHT = 2

TIMED_OUT = "a spin-wait timed out"

SPIN_S = 0.005
"""How long the host stays awake for the logits of one token: longer than a fast GPU takes for them."""


class EngineError(VkbackError):
    """A request the engine cannot carry out, or a model whose numbers went bad."""


@dataclass(frozen=True)
class Sampler:
    """How the next token is picked. temp 0: the largest logit. top_k 0, top_p 1 and min_p 0 switch the filters off."""

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temp <= 0.0


class Engine:
    """A loaded model. Use as a context manager; `load` opens everything."""

    def __init__(
        self, model: Model, device: Device, *, n_ctx: int, act: Literal["auto", "f32", "q8_1"], fusion: str, progress: bool
    ) -> None:
        self.model = model
        self.device = device
        self.n_ctx = n_ctx
        self.n_past = 0
        self.library = ShaderLibrary()
        self.ctx = LowerContext(device.caps, Tuning.for_device(device.caps), act)
        self.fusion = fusion
        self._owns_device = False
        self._programs: dict[str, Program] = {}
        self._loops: dict[tuple[bool, int], TokenLoop] = {}
        self._recordings: dict[str, Commands] = {}
        self._arenas: list[Arena] = []
        self._schedules: dict[tuple[int, str], Schedule] = {}  # by rows of the cache, too: vkbench comes back to a size
        self._sync_tried = False
        self._kernels = KernelCompiler(device, self.library, progress=progress)
        first = [self._schedule(kind) for kind in ("logits", "prompt")]
        weights = {t.name: t for s in first for t in s.tensors().values() if t.kind == "weight"}
        try:
            # The cache before the weights: a context that does not fit is to be said before minutes of loading.
            self._state = self._allocate_state()
            self._inputs = self._allocate_inputs()
            self._logits_back, self._loop_backs = self._allocate_readbacks()
            arena, self.weights = load_weights(model.file, weights, device, progress=progress)
            self._arenas.append(arena)
        except BaseException:
            self.close()
            raise

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: Device | str | int | None = None,
        *,
        n_ctx: int | None = None,
        act: Literal["auto", "f32", "q8_1"] = "auto",
        fusion: str = "all",
        progress: bool = True,
    ) -> Engine:
        """Open a GGUF file and bring it to a device.

        device  an open device, or what `Device.open` takes
        n_ctx   rows of the KV cache; default: the trained context, at most 4096
        act     "auto", "f32" (float path) or "q8_1" (integer dot wherever there is a kernel)
        Raises VkbackError for a broken file, an unknown architecture, no device, too little memory.
        """
        if n_ctx is not None and n_ctx < 1:
            raise EngineError(f"[engine] n_ctx is {n_ctx}, expected at least 1")
        model = Model.open(path)
        rows = n_ctx or model.default_n_ctx
        opened = device if isinstance(device, Device) else Device.open(device)
        try:
            engine = cls(model, opened, n_ctx=rows, act=act, fusion=fusion, progress=progress)
        except BaseException:
            if opened is not device:
                opened.close()
            raise
        engine._owns_device = opened is not device
        return engine

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Destroy everything the engine made, and the device if the engine opened it."""
        for program in self._programs.values():
            program.close()
        for arena in reversed(self._arenas):
            arena.destroy()
        self._programs.clear()
        self._arenas.clear()
        if self._owns_device:
            self.device.close()

    @property
    def description(self) -> str:
        return self.model.description

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
    def compiled(self) -> CompileTotals:
        """Kernels made ready so far, and the time that took: to be left out of every speed."""
        return self._kernels.totals

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weight matrices that a generated token must read: each matrix once, of the embedding one row, of experts those used."""
        return self._schedule("logits").weight_bytes

    def _allocate_state(self) -> dict[str, BufferRange]:
        schedules = [self._schedule(kind) for kind in ("logits", "prompt")]
        caches = {t.name: t for s in schedules for t in s.tensors().values() if t.kind == "state"}
        self._cache = self.device.arena("KV cache", sum(aligned(nbytes(t)) for t in caches.values()), "device")
        self._arenas.append(self._cache)
        return {t.name: self._cache.alloc(nbytes(t), t.name) for t in caches.values()}

    def _allocate_inputs(self) -> dict[str, BufferRange]:
        """Inputs of the programs, in memory of the device."""
        sizes = {"one": 2 * INPUT_BYTES, "prompt": 2 * INPUT_BYTES, "loop": 4 * (LOOP_RING + RING)}
        caps = self.device.caps
        device = self.device.arena(
            "inputs", sum(map(aligned, sizes.values())), "host_visible_device" if caps.rebar or caps.uma else "device"
        )
        self._arenas.append(device)
        return {n: device.alloc(s, n) for n, s in sizes.items()}

    def _allocate_readbacks(self) -> tuple[Readback, list[Readback]]:
        """Memory of the host for the logits of a prompt's tokens, and for the loop's state after each submit in flight."""
        loops = [self._inputs["loop"].size] * (SUBMITS_IN_FLIGHT + 1)
        sizes = [4 * self.model.hp.n_vocab * PROMPT_TOKENS, *loops]
        arena = self.device.arena("readback", sum(aligned(size) + aligned(4) for size in sizes), "readback")
        self._arenas.append(arena)
        logits, *rest = (Readback(arena.alloc(size, "readback"), arena.alloc(4, "state of spin-waits")) for size in sizes)
        for back in (logits, *rest):
            back.forget()
        return logits, rest

    def prepare(self, *, prompt: int = 0, logits: bool = False, sampler: Sampler | None = None) -> None:
        """Compile and record what later calls need, and run each recording once, so that their time holds no compile time.

        prompt   tokens of the prompt, 0 for none
        logits   for `decode_logits`
        sampler  for `generate` with it
        The runs, which some drivers need to compile a kernel, store into the first free row of the KV cache at most. Raises EngineError
        when the prompt does not fit the context.
        """
        self._check_room(prompt, "prompt")
        decode = (["logits"] if logits else []) + ([_loop_kind(sampler.greedy)] if sampler else [])
        room = self.n_past < self.n_ctx
        try_sync = bool(decode) and room and not self._sync_tried and bool(self._schedule("logits").barrier_free)
        kinds = [*(["prompt"] if prompt else []), *(["logits"] if try_sync and not logits else []), *decode]
        with self._kernels.preparing(d for kind in kinds for d in self._schedule(kind).dispatches()):
            tickets = []
            if try_sync:
                self._try_sync()
            if prompt:
                self._set_input([0] * PROMPT_TOKENS, [-1] * PROMPT_TOKENS)
                tickets.append(self.device.submit(self._recording("prompt")))
            for kind in decode:
                self._program(kind)  # while the driver may be compiling the prompt's kernels
            if logits and room:
                self._decode(0, self._recording("logits"))
            if sampler:
                self._loop(sampler.greedy, TOKENS_PER_SUBMIT)
                if room:
                    self._begin_loop(0, sampler, [])
                    tickets.append(self._loop(sampler.greedy, 1).submit(self.device)[0])
            for ticket in tickets:
                ticket.wait()

    def _program(self, kind: str) -> Program:
        """The program of a kind, bound on first use: "prompt", "logits", "greedy", "sample", "all logits"."""
        if kind not in self._programs:
            prompt = kind in ("prompt", "all logits")
            ranges = dict(self._state)
            for name in ("tokens", "pos"):
                ranges[name] = self._input(name, PROMPT_TOKENS if prompt else 1)
            ranges["loop"] = self._inputs["loop"]
            self._kernels.compile(self._schedule(kind).dispatches())
            self._programs[kind] = Program(self.device, self.library, self._schedule(kind), ranges, self.weights)
        return self._programs[kind]

    def _schedule(self, kind: str) -> Schedule:
        key = (self.n_ctx, kind)
        if key not in self._schedules:
            if kind in ("prompt", "all logits"):
                graph = self.model.graph(PROMPT_TOKENS, self.n_ctx, head="all" if kind == "all logits" else "none")
            else:
                graph = self.model.graph(1, self.n_ctx, head="last")
                if kind != "logits":
                    add_sampler(graph, greedy=kind == "greedy")
            self._schedules[key] = plan(graph, self.ctx, fusion=self.fusion)
        return self._schedules[key]

    def schedule(self, kind: Literal["decode", "prompt", "greedy"] = "greedy") -> Schedule:
        """The schedule of one generated token, of a bare token with its logits, or of a piece of a prompt."""
        return self._schedule("logits" if kind == "decode" else kind)

    def resize(self, n_ctx: int) -> None:
        """A KV cache of so many rows, empty, and programs for it; weights stay where they are. Raises VkbackError where it does not fit;
        the engine is then of no more use."""
        self.reset()
        if n_ctx == self.n_ctx:
            return
        self._forget_programs()
        self._arenas.remove(self._cache)
        self._cache.destroy()
        self.n_ctx = n_ctx
        self._sync_tried = False
        self._state = self._allocate_state()

    def reset(self) -> None:
        """Forget all tokens. Rows of the KV cache beyond n_past are never read, so nothing needs clearing."""
        self.n_past = 0

    def prompt(self, tokens: Sequence[int]) -> None:
        """Run tokens through the model, appending to the KV cache. Raises EngineError when they do not fit the context."""
        self._check_room(len(tokens), "prompt")
        self._check_ids(tokens)
        for start in range(0, len(tokens), PROMPT_TOKENS):
            self._prompt_piece("prompt", tokens[start : start + PROMPT_TOKENS])

    def prompt_logits(self, tokens: Sequence[int]) -> Floats:
        """As `prompt`, and the logits after every token: float32 [len(tokens), n_vocab]."""
        self._check_room(len(tokens), "prompt")
        self._check_ids(tokens)
        out = np.empty((len(tokens), self.model.hp.n_vocab), np.float32)
        for start in range(0, len(tokens), PROMPT_TOKENS):
            piece = tokens[start : start + PROMPT_TOKENS]
            self._prompt_piece("all logits", piece)
            out[start : start + len(piece)] = self._read_logits(PROMPT_TOKENS)[: len(piece)]
        return self._finite(out)

    def _prompt_piece(self, kind: str, piece: Sequence[int]) -> None:
        missing = PROMPT_TOKENS - len(piece)
        self._set_input([*piece] + [0] * missing, [*range(self.n_past, self.n_past + len(piece))] + [-1] * missing)
        self.device.submit(self._recording(kind)).wait()
        self.n_past += len(piece)

    def decode_logits(self, token: int) -> Floats:
        """One token through the model in one submit; its logits, float32 [n_vocab]."""
        self._check_room(1, "token")
        self._check_ids([token])
        self._try_sync()
        logits, timed_out = self._decode(token, self._recording("logits"))
        if timed_out:
            self._use_barriers(TIMED_OUT)
            logits, _ = self._decode(token, self._recording("logits"))
        self.n_past += 1
        return self._finite(logits)

    def _decode(self, token: int, commands: Commands) -> tuple[Floats, bool]:
        """Logits of a token at n_past, and whether they are worth nothing because a spin-wait timed out."""
        self._set_input([token], [self.n_past])
        # A driver on the CPU needs the cores itself.
        self.device.submit(commands).wait(spin_s=0.0 if self.device.caps.software else SPIN_S)
        return self._read_logits(1)[0], self._logits_back.timed_out

    def _try_sync(self) -> None:
        """Before the first token goes through a schedule with barrier-free stages: see that it gives the same bits as with all barriers."""
        if self._sync_tried or not self._schedule("logits").barrier_free:
            return
        self._sync_tried = True
        found, timed_out = self._decode(0, self._recording("logits"))
        if not timed_out:
            program = self._program("logits")
            copies = self._logits_back.copies(program, program.range("result_output"))
            want, _ = self._decode(0, program.record("logits, all barriers", barriers=True, copies=copies))
        if timed_out or not np.array_equal(found.view(np.uint32), want.view(np.uint32)):
            self._use_barriers(TIMED_OUT if timed_out else "logits differ from those with barriers")

    def _use_barriers(self, why: str) -> None:
        """Plan everything anew with a barrier between all stages."""
        print(
            f"vkback: {self.device.caps.name}: stages cannot run barrier-free ({why}), going on with barriers. "
            'To have them from the start: [[schedule]] with sync = "barrier" in a tuning table',
            file=sys.stderr,
        )
        self._forget_programs()
        self._schedules.clear()
        self.ctx = replace(self.ctx, tuning=Overrides(self.ctx.tuning, {"schedule": {"sync": "barrier"}}, "barrier-free stages failed"))
        for back in (self._logits_back, *self._loop_backs):
            back.forget()

    def _forget_programs(self) -> None:
        for program in self._programs.values():
            program.close()
        for cache in (self._programs, self._loops, self._recordings):
            cache.clear()

    def _recording(self, kind: str) -> Commands:
        if kind not in self._recordings:
            program = self._program(kind)
            copies = []
            if kind in ("logits", "all logits"):
                copies = self._logits_back.copies(program, program.range("result_output"))
            self._recordings[kind] = program.record(kind, copies=copies)
        return self._recordings[kind]

    def _read_logits(self, rows: int) -> Floats:
        vocab = self.model.hp.n_vocab
        view = self._logits_back.result.map()[: 4 * rows * vocab].view(np.float32)
        return np.array(view.reshape(rows, vocab))

    def generate(self, first: int, n: int, *, sampler: Sampler | None = None, stop_at_eos: bool = True) -> Generator[int, None, None]:
        """Generate n tokens after token `first` (which goes through the model first), as they come from the device.

        Ends early at an end-of-text token, which is yielded, if stop_at_eos.
        Raises EngineError when the context is full or the logits are not numbers.
        """
        sampler = sampler or Sampler()
        self._check_room(n, "generation")
        self._check_ids([first])
        self._try_sync()
        eos = sorted(self.model.tokenizer.eos_ids) if stop_at_eos and self.model.has_text else []
        self._begin_loop(first, sampler, eos)
        start = self.n_past
        made = submitted = 0
        timed_out = False
        flying: deque[tuple[Ticket, Readback, int]] = deque()
        try:
            while made < n:
                while submitted < n and len(flying) < SUBMITS_IN_FLIGHT:
                    size = TOKENS_PER_SUBMIT if n - submitted >= TOKENS_PER_SUBMIT else 1
                    ticket, back = self._loop(sampler.greedy, size).submit(self.device)
                    submitted += size
                    flying.append((ticket, back, submitted))
                ticket, back, upto = flying.popleft()
                ticket.wait()
                if timed_out := back.timed_out:
                    break
                words = back.result.map().view(np.int32)
                step, status = int(words[0]), int(words[1])
                ids = [int(words[LOOP_RING + i % RING]) for i in range(made, min(step, upto))]
                for token in ids:
                    made += 1
                    self.n_past = start + made
                    first = token
                    yield token
                if status == STATUS_NAN:
                    raise EngineError(
                        f"[engine] {self.model.file.path}: logits are not numbers at position {self.n_past}; "
                        "the file is damaged or a kernel is wrong on this device: run `vkback test-ops`"
                    )
                if status == STATUS_EOS:
                    return
        finally:
            with contextlib.suppress(DeviceLost):  # of which the wait above has told
                for ticket, _, _ in flying:
                    ticket.wait()
        if timed_out:
            self._use_barriers(TIMED_OUT)
            yield from self.generate(first, n - made, sampler=sampler, stop_at_eos=stop_at_eos)

    def _begin_loop(self, first: int, sampler: Sampler, eos: Sequence[int]) -> None:
        self._set_input([first], [self.n_past])
        self.device.upload(self._inputs["loop"], loop_state(sampler, eos))

    def _loop(self, greedy: bool, size: int) -> TokenLoop:
        key = (greedy, size)
        if key not in self._loops:
            kind = _loop_kind(greedy)
            self._loops[key] = TokenLoop(self._program(kind), kind, size, self._inputs["loop"], self._loop_backs)
        return self._loops[key]

    def _input(self, name: Literal["tokens", "pos"], count: int) -> BufferRange:
        """Where a program of so many tokens reads them or their positions."""
        block = self._inputs["one" if count == 1 else "prompt"]
        return block.slice(INPUT_BYTES if name == "pos" else 0, 4 * count)

    def _set_input(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Tokens and positions of the next submit, in one upload."""
        words = np.zeros((2, INPUT_BYTES // 4), np.int32)
        words[0, : len(tokens)] = tokens
        words[1, : len(positions)] = positions
        self.device.upload(self._inputs["one" if len(tokens) == 1 else "prompt"], words)

    def _check_room(self, count: int, what: str) -> None:
        if self.n_past + count > self.n_ctx:
            raise EngineError(
                f"[engine] {what} of {count} tokens after {self.n_past} does not fit the context of {self.n_ctx}; "
                "load with a larger n_ctx (--ctx) or shorten it"
            )

    def _check_ids(self, tokens: Sequence[int]) -> None:
        vocab = self.model.hp.n_vocab
        for i, token in enumerate(tokens):
            if not 0 <= token < vocab:
                raise EngineError(f"[engine] token {i} is {token}, expected an id in 0..{vocab - 1}")

    def _finite(self, logits: Floats) -> Floats:
        # One pass without an array of truths: the sum of squares of numbers below 10^16 is a number.
        flat = logits.reshape(-1)
        if not np.isfinite(np.dot(flat, flat)) and not np.isfinite(flat).all():
            raise EngineError(
                f"[engine] {self.model.file.path}: logits are not numbers before position {self.n_past}; "
                "the file is damaged or a kernel is wrong on this device: run `vkback test-ops`"
            )
        return logits


def add_sampler(graph: Graph, *, greedy: bool) -> None:
    """Append the SAMPLE node: it picks the next token from the logits and advances tokens, pos and loop in place."""
    logits = graph.outputs[0]
    tokens, pos = Tensor("tokens", "I32", (1,), "input"), Tensor("pos", "I32", (1,), "input")
    loop = Tensor("loop", "I32", (LOOP_RING + RING,), "input")
    graph.add("SAMPLE", (logits, loop, tokens, pos), (loop, tokens, pos), capacity=RING, greedy=greedy)


def _loop_kind(greedy: bool) -> str:
    return "greedy" if greedy else "sample"


def loop_state(sampler: Sampler, eos: Sequence[int]) -> npt.NDArray[np.int32]:
    """The generation loop's state before its first token."""
    if len(eos) > LOOP_RING - LOOP_EOS:
        raise EngineError(f"[engine] {len(eos)} end-of-text ids, at most {LOOP_RING - LOOP_EOS} are supported")
    words = np.zeros(LOOP_RING + RING, np.int32)
    params: tuple[Any, ...] = (sampler.temp, sampler.top_k, sampler.top_p, sampler.min_p, sampler.seed & 0xFFFFFFFF, len(eos))
    words[LOOP_PARAMS : LOOP_PARAMS + 6] = np.frombuffer(struct.pack("<fiffIi", *params), np.int32)
    words[LOOP_EOS : LOOP_EOS + len(eos)] = eos
    return words
