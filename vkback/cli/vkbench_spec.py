"""vkbench spec: what drafts gain, by kind of task, and at acceptance that is made."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from vkback.cli.bench_output import AsJsonOption
from vkback.cli.hosts import device_list
from vkback.cli.loading import (
    ActOption,
    CacheTypeKOption,
    CacheTypeVOption,
    DraftMaxOption,
    ExactOption,
    ModelDraftOption,
    SpecTypeOption,
    load_options,
)
from vkback.cli.shell import DeviceOption, ModelOption, UsageError, act_of, bars, load_model, make_sampler, model_path, one_of
from vkback.cli.vkbench_run import WARMUP_NS, exhaust
from vkback.cli.vkbench_tests import parse_values

if TYPE_CHECKING:
    from vkback.api import LoadedModel
    from vkback.engine.drafts import Drafts
    from vkback.engine.engine import Engine
    from vkback.engine.sampler import Sampler

ARTICLE = """\
The harbour of Lindow was built in 1862 by the engineer Martha Quill, who had seen the stone piers of Genoa and wanted the same for her
town. The work took eleven years and cost 48,000 pounds. In the winter of 1868 a storm broke the outer wall, and two divers, John Farrow and
Peter Lane, repaired it under water. The first steamer, the Halcyon, landed on 3 May 1873 with grain from Odessa. Today the harbour serves
fishing boats, a ferry to the islands and a small museum in the old custom house."""

CODE = """\
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance
"""

TASKS = {
    "code": f"Here is a class in Python:\n\n{CODE}\nWrite the whole class again with type hints added to every method.",
    "extraction": f"{ARTICLE}\n\nList every person, year, ship and sum of money in the text, each with the words around it, as JSON.",
    "summary": f"{ARTICLE}\n\nSummarize this text in three sentences.",
    "chat": "I have a free weekend and rainy weather. What could I do at home that is fun and does not cost much?",
    "copy": f"{ARTICLE}\n\nRepeat the text above word for word.\n\n{ARTICLE}\n\nOnce more, word for word:\n\n",
}

FORMATS = ("md", "json")


@dataclass(frozen=True)
class SpecResult:
    """A row: tokens per second with drafts, and of the same text's plain steps.

    test     a task, or what was made of the drafts
    columns  of every step; 0: as pays
    steps, drafted, accepted  of steps with drafts in the last repetition; steps without are not among them
    """

    test: str
    columns: int
    tokens: int
    t_s: tuple[float, ...]
    base_t_s: tuple[float, ...]
    steps: int
    drafted: int
    accepted: int
    by_place: tuple[tuple[int, int], ...] = ()

    @property
    def rate(self) -> float:
        return max(self.t_s)

    @property
    def base(self) -> float:
        return max(self.base_t_s)

    @property
    def gain(self) -> float:
        return self.rate / self.base

    @property
    def tokens_per_step(self) -> float:
        """Of steps with drafts."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


def spec(
    model: ModelOption = None,
    tasks: Annotated[
        str | None, typer.Option("--task", help=f"Kinds of tasks: {', '.join(TASKS)}; none [default: all, of a model with a vocabulary].")
    ] = None,
    n: Annotated[int, typer.Option("-n", "--n-predict", min=32, help="Tokens of each text.")] = 256,
    prompt: Annotated[int, typer.Option("-p", "--n-prompt", min=2, help="Tokens before a text of made acceptance.")] = 64,
    columns: Annotated[list[str] | None, typer.Option("--columns", help="Tokens of a step at made acceptance: 4, 8, 16.")] = None,
    accept_len: Annotated[
        list[str] | None, typer.Option("--accept-len", "--spec-synth-len", help="Made acceptance: tokens of a step, as 2, 4 or 4,8.")
    ] = None,
    accept: Annotated[
        list[float] | None, typer.Option("--accept", min=0.0, max=1.0, help="Made acceptance: how often a draft is right; may be repeated.")
    ] = None,
    spec_type: SpecTypeOption = None,
    model_draft: ModelDraftOption = None,
    draft_max: DraftMaxOption = None,
    temp: Annotated[float, typer.Option("--temp", min=0.0, help="Temperature of the tasks.")] = 0.0,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Times that each text is made; the fastest counts.")] = 3,
    output: Annotated[str, typer.Option("-o", "--output", help=f"On stdout: {', '.join(FORMATS)}.")] = "md",
    as_json: AsJsonOption = False,
    device: DeviceOption = None,
    act: ActOption = "auto",
    cache_type_k: CacheTypeKOption = "f16",
    cache_type_v: CacheTypeVOption = "f16",
    exact: ExactOption = False,
    progress: Annotated[bool, typer.Option("--progress", help="Say on stderr what is being run.")] = False,
) -> None:
    """Measure drafts: each kind of task with and without, then steps of each class at made acceptance. Drafts are then made right or wrong
    by a first run of the same text, so that models with random weights do as well as others."""
    form = "json" if as_json else one_of(output, FORMATS, "-o")
    if wrong := [t for t in (tasks or "none").split(",") if t not in (*TASKS, "none")]:
        raise UsageError(f"--task {wrong[0]}: expected {', '.join(TASKS)} or none")
    widths = parse_values(columns or ["4", "8", "16"], "--columns")
    if bad := [w for w in widths if w not in (4, 8, 16)]:
        raise UsageError(f"--columns {bad[0]}: expected 4, 8 or 16")
    lengths = parse_values(accept_len, "--accept-len") if accept_len else []
    if 0 in lengths:
        raise UsageError("--accept-len 0: expected 1 and more: a step makes a token at least")
    if device_list(device) is not None:
        raise UsageError(f"--device {device}: drafts are made on one device, so spec measures one; name it alone")
    how = load_options(
        ctx=max(prompt, 1024) + 2 * n,
        act=act_of(act),
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        exact=exact,
        spec_type=spec_type or (None if model_draft else "ngram-simple"),
        model_draft=model_draft,
        draft_max=draft_max,
        progress=bars(progress or sys.stderr.isatty()),
    )
    found: list[SpecResult] = []
    with load_model(model_path(model), device, how) as loaded:
        if form == "md":
            print(f"{loaded.engine.device.caps.summary_line()}\n{loaded.engine.model.heading}, {n} tokens of each text\n")
            print("| test | columns | t/s | plain t/s | gain | tokens a step | drafts | accepted |")
            print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        bench = Bench(loaded, n, repetitions, lambda text: print(f"vkbench: {text}", file=sys.stderr, flush=True) if progress else None)
        chosen = (tasks or ",".join(TASKS)).split(",") if loaded.engine.model.has_text else []
        if tasks and tasks != "none" and not chosen:
            raise UsageError(f"--task {tasks}: {loaded.name} has no vocabulary; made acceptance needs none")
        for row in bench.rows([t for t in chosen if t != "none"], temp, prompt, widths, lengths, accept or []):
            found.append(row)
            if form == "md":
                print(
                    f"| {row.test} | {row.columns or 'as pays'} | {row.rate:.2f} | {row.base:.2f} | {row.gain:.3f} | "
                    f"{row.tokens_per_step:.2f} | {row.drafted} | {row.accepted} |",
                    flush=True,
                )
    if form == "json":
        print(json.dumps([asdict(row) for row in found], indent=1))


class Bench:
    """Measures rows on one model."""

    def __init__(self, model: LoadedModel, n: int, repetitions: int, note: Callable[[str], object]) -> None:
        from vkback.engine.drafts import Drafts

        self._model, self._n, self._repetitions, self._note = model, n, repetitions, note
        self._engine: Engine = model.engine
        self._drafts = Drafts

    def rows(
        self, tasks: Sequence[str], temp: float, prompt: int, widths: Sequence[int], lengths: Sequence[int], rates: Sequence[float]
    ) -> Iterator[SpecResult]:
        """Those of the tasks, and those of made acceptance. prompt: tokens of the latter's prompt."""
        import numpy as np

        from vkback.api.options import Options

        most = self._engine.possible_drafts(self._model.drafts(Options()))
        if most is None:
            raise UsageError(f"-m {self._model.name}: no drafts for this model: its recurrent states are too large to keep one for each")
        for task in tasks:
            ids = self._task_ids(TASKS[task])
            sampler = make_sampler(temp=temp, top_k=40 if temp else 0)
            yield self._row(task, ids, sampler, most, self._plain(ids, sampler))
        rng = np.random.default_rng(1)
        vocab = self._engine.model.hp.n_vocab
        ids = rng.integers(vocab, size=prompt).tolist()
        noise = make_sampler(temp=3.0)
        yield self._row("nothing to draft", ids, noise, most, self._plain(ids, noise))
        # A token that every logit gives way to: a text that copies itself whatever the weights are.
        same = make_sampler(logit_bias=((7 % vocab, 1e6),))
        plain = self._plain(ids, same)
        yield self._row("one token again and again", ids, same, most, plain)
        wrong = (8 % vocab,) * (len(ids) + self._n)
        yield self._row("as if copied, none right", ids, same, replace(most, known=wrong), plain)
        greedy = make_sampler()
        base = self._plain(ids, greedy)
        for width in (w for w in widths if w <= self._engine.max_columns):
            none = self._drafts(width - 1, pinned=width, known=(-1,))
            yield self._row("no drafts", ids, greedy, none, base)
            text = self._made(ids, greedy, none)
            for length in [length for length in lengths or (2, 4) if length < width]:
                known = [(t + 1) % vocab if i % length == length - 1 else t for i, t in enumerate(text)]
                yield self._known_row(f"{length} tokens a step", ids, known, width, base)
            for rate in rates:
                known = [t if right else (t + 1) % vocab for t, right in zip(text, rng.random(len(text)) < rate, strict=True)]
                yield self._known_row(f"a draft is right at {rate:g}", ids, known, width, base)
            yield self._known_row("all drafts right", ids, text, width, base)

    def _known_row(self, test: str, ids: Sequence[int], known: Sequence[int], width: int, base: tuple[float, ...]) -> SpecResult:
        return self._row(test, ids, make_sampler(), self._drafts(width - 1, pinned=width, known=(*ids, *known)), base)

    def _task_ids(self, text: str) -> list[int]:
        model = self._model
        chat = model.template is not None and not model.template_problem
        ids = model.chat_prompt([{"role": "user", "content": text}], None, None).ids if chat else model.tokenizer.encode(text)
        room = self._engine.n_ctx - self._n
        return ids[-room:]

    def _plain(self, ids: Sequence[int], sampler: Sampler) -> tuple[float, ...]:
        return tuple(self._times(ids, sampler, None))

    def _row(self, test: str, ids: Sequence[int], sampler: Sampler, drafts: Drafts, base: tuple[float, ...]) -> SpecResult:
        self._note(f"{test}, {drafts.pinned or 'as pays'}")
        rates = tuple(self._times(ids, sampler, drafts))
        counts = self._engine.draft_counts
        return SpecResult(test, drafts.pinned, self._n, rates, base, counts.steps, counts.drafted, counts.accepted, counts.by_place)

    def _times(self, ids: Sequence[int], sampler: Sampler, drafts: Drafts | None) -> Iterator[float]:
        """Tokens per second of each repetition. The first run may compile, and a GPU has to wake up: these do not count."""
        begun = time.perf_counter_ns()
        self._timed(ids, sampler, drafts)
        while not self._engine.device.caps.software and time.perf_counter_ns() - begun < WARMUP_NS:
            self._timed(ids, sampler, drafts)
        for _ in range(self._repetitions):
            yield self._n / self._timed(ids, sampler, drafts)

    def _timed(self, ids: Sequence[int], sampler: Sampler, drafts: Drafts | None) -> float:
        """Seconds of the text, without those of compiling."""
        tokens = self._begun(ids, sampler, drafts)
        before, compiled = time.perf_counter(), self._engine.compiled.seconds
        exhaust(tokens)
        return time.perf_counter() - before - (self._engine.compiled.seconds - compiled)

    def _made(self, ids: Sequence[int], sampler: Sampler, drafts: Drafts) -> list[int]:
        return list(self._begun(ids, sampler, drafts))

    def _begun(self, ids: Sequence[int], sampler: Sampler, drafts: Drafts | None) -> Iterator[int]:
        engine = self._engine
        engine.reset()
        engine.prompt(ids[:-1])
        engine.prepare(sampler=sampler)
        return engine.generate(ids[-1], self._n, sampler=sampler, stop_at_eos=False, drafts=drafts)
