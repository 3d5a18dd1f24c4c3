"""vkbench serve: what many clients see of a server of OpenAI's API, whoever made it."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import typer

from vkback.cli.bench_output import AsJsonOption, OutputErrOption, OutputOption, Outputs, SaveOption
from vkback.cli.shell import UsageError, read_text
from vkback.cli.terminal import StatusLine
from vkback.cli.vkbench_client import Client, Reply, RequestFailed, address_of
from vkback.cli.vkbench_run import cpu_name
from vkback.cli.vkbench_tests import parse_values
from vkback.errors import VkbackError
from vkback.report.build import build_info
from vkback.report.serve_table import SERVE, ServeResult

PER_CLIENT = 4
"""Requests of a client, without --requests."""

WARMUP_TOKENS = 8

SHOWN_REASONS = 4
"""Why requests of a row failed, by the reasons that most have."""

WORD_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place case "
    "week company system program question work government number night point home water room mother area money story fact month lot "
    "right study book eye word business issue side kind head house service friend father power hour game line end member law car city"
)
WORDS = tuple(WORD_TEXT.split())
"""What random prompts are made of: words that most vocabularies have as a token each."""


@dataclass
class Load:
    """What is sent, and where.

    extra   fields of every request
    words   of a random prompt; prompts: texts of a file, in the place of these
    """

    client: Client
    chat: bool
    n_gen: int
    words: int
    prompts: Sequence[str]
    rng: random.Random
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def texts(self) -> Iterator[str]:
        if self.prompts:
            yield from cycle(self.prompts)
        while True:
            yield self.random_text(self.words)

    def random_text(self, words: int) -> str:
        """All WORDS in a random order, then all in another one, up to so many: so long prompts have nearly the same number of tokens."""
        rounds = -(-words // len(WORDS))
        return " ".join([word for _ in range(rounds) for word in self.rng.sample(WORDS, len(WORDS))][:words])

    async def send(self, text: str, n_gen: int) -> Reply:
        """Raises RequestFailed."""
        prompt = {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        asked = {"max_tokens": n_gen, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        return await self.client.stream(self.path, {**self.extra, **prompt, **asked})


@dataclass
class Level:
    """How the requests of so many clients ended. duration_s: from the beginning of the first to the end of the last."""

    clients: int
    replies: list[Reply]
    failures: Counter[str]
    duration_s: float

    @property
    def requests(self) -> int:
        return len(self.replies) + self.failures.total()

    def failure_lines(self) -> Iterator[str]:
        """How many requests failed for each reason; reasons beyond SHOWN_REASONS, which may differ in a number, together."""
        shown = self.failures.most_common(SHOWN_REASONS)
        others = self.failures.total() - sum(times for _, times in shown)
        for said, times in [*shown, *([("for other reasons", others)] if others else [])]:
            yield f"{clients_text(self.clients)}: {times} of {self.requests} requests failed: {said}"


def serve(
    url: Annotated[str, typer.Option(help="Of a server of OpenAI's API, as vkback serve or llama-server.")] = "http://127.0.0.1:8080",
    clients: Annotated[list[str] | None, typer.Option("--clients", help="Requests at once: 8, 1,8,32 or 1-64*2.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help=f"For each number of clients [default: {PER_CLIENT} a client].")] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Of a random prompt, nearly.")] = 512,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens that a request asks for.")] = 128,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with a prompt a line, in the place of random ones; .jsonl: objects with a field prompt.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="/v1/chat/completions in the place of /v1/completions.")] = False,
    model: Annotated[str | None, typer.Option("-m", "--model", help="As the server calls it [default: its first].")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="VKBACK_API_KEY", help="What the server asks for.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds of a request.")] = 600.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of random prompts [default: other ones each time, which no cache of the server has].")
    ] = None,
    warmup: Annotated[bool, typer.Option("--warmup/--no-warmup", help="Send a short request from every client first.")] = True,
    output: OutputOption = "md",
    as_json: AsJsonOption = False,
    output_err: OutputErrOption = "none",
    save: SaveOption = None,
    progress: Annotated[bool, typer.Option("--progress", help="Say on stderr what is being run.")] = False,
) -> None:
    """Measure a server with many clients, each of which sends its next request when the one before is done.

    Shown are tokens per second, time to first token (TTFT), time per output token (TPOT), and time between tokens (ITL).
    """
    counts = parse_values(clients or ["1,8,32,64"], "--clients")
    if 0 in counts:
        raise UsageError("--clients 0: expected at least 1")
    texts = prompts_of(prompts) if prompts is not None else []
    seed = secrets.randbits(31) if seed is None else seed
    load = Load(Client(address_of(url), api_key, timeout), chat, max_tokens, prompt_tokens, texts, random.Random(seed))
    build = build_info()
    command = shlex.join(["vkbench", *sys.argv[1:]])
    with Outputs(SERVE, output, as_json, output_err, save, None, extra=(), build=build, inputs=[prompts] if prompts else []) as outputs:
        served, device = asyncio.run(prepare(load, model, url))
        what = f"prompts of {prompts}" if prompts else f"random prompts of {prompt_tokens} tokens"
        outputs.begin(f"{url}: {', '.join(filter(None, (served, device)))}; {what}, {max_tokens} tokens to generate", command, url)
        nothing_done: list[int] = []
        for count in counts:
            begun = datetime.now(UTC)
            with StatusLine(wanted=not progress and output_err == "none") as status:
                note = _noting(progress, status)
                level = asyncio.run(run_level(load, count, requests or PER_CLIENT * count, warmup=warmup, note=note))
            for line in level.failure_lines():
                print(f"vkbench: {line}", file=sys.stderr, flush=True)
            if not level.replies:
                nothing_done.append(count)
            outputs.row(
                ServeResult(
                    url=url,
                    model=served,
                    device=device,
                    clients=count,
                    requests=level.requests,
                    errors=level.failures.total(),
                    n_prompt=0 if prompts else prompt_tokens,
                    n_gen=max_tokens,
                    prompt_tokens=sum(reply.prompt_tokens or 0 for reply in level.replies),
                    output_tokens=sum(reply.tokens for reply in level.replies),
                    duration_s=level.duration_s,
                    samples_ttft_ms=tuple(1e3 * reply.ttft_s for reply in level.replies),
                    samples_tpot_ms=tuple(1e3 * reply.tpot_s for reply in level.replies if reply.tpot_s is not None),
                    itl_ms=tuple(1e3 * gap for reply in level.replies for gap in reply.gaps_s),
                    chat=chat,
                    ignore_eos="ignore_eos" in load.extra,
                    prompts=str(prompts or ""),
                    seed=seed,
                    build_commit=build[0],
                    build_number=build[1],
                    cpu_info=cpu_name(),
                    test_time=begun.strftime("%Y-%m-%dT%H:%M:%SZ"),
                    command=command,
                )
            )
    if nothing_done:
        raise VkbackError(f"{', '.join(map(clients_text, nothing_done))}: no request was done")


def clients_text(count: int) -> str:
    return f"{count} client{'s' * (count != 1)}"


def prompts_of(path: Path) -> list[str]:
    """Raises UsageError for a file without prompts, naming the line that is none."""
    lines = [(number, line) for number, line in enumerate(read_text(path, "--prompts").splitlines(), start=1) if line.strip()]
    if not lines:
        raise UsageError(f"--prompts {path}: has no prompt; expected one a line")
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    found = []
    for number, line in lines:
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            raise UsageError(f"--prompts {path}: line {number}: expected an object with a text as its field prompt")
        found.append(prompt)
    return found


async def prepare(load: Load, model: str | None, url: str) -> tuple[str, str]:
    """Find out what the server calls its model and which fields it takes, and of how many words a prompt must be. What the model is called,
    and its device, where the server says so. Raises VkbackError where no request is answered."""
    try:
        models = await _known(load.client, "/v1/models")
        name = model or (models.get("data") or [{}])[0].get("id") or ""
    except (AttributeError, TypeError, IndexError):
        name = model or ""
    health = await _known(load.client, "/health")
    load.extra = {"model": name} if name else {}
    try:
        await _fit_fields(load)
        if not load.prompts:
            await _fit_words(load)
    except RequestFailed as e:
        what = "start a server there, or give another address as --url" if "connection" in str(e) else "a first request has to succeed"
        raise VkbackError(f"{url}: {e}; {what}") from e
    device = health.get("device")
    return name, device if isinstance(device, str) else ""


async def _known(client: Client, path: str) -> dict[str, Any]:
    """What a server says there; nothing where it has no such page."""
    try:
        found = await client.get(path)
    except RequestFailed:
        return {}
    return found if isinstance(found, dict) else {}


async def _fit_fields(load: Load) -> None:
    """Ask for texts that do not end early, if the server knows how."""
    load.extra["ignore_eos"] = True
    try:
        await load.send(next(load.texts()) if load.prompts else load.random_text(1), 1)
    except RequestFailed as e:
        if "ignore_eos" not in str(e):
            raise
        del load.extra["ignore_eos"]
        print("vkbench: the server does not take ignore_eos: texts may end before --max-tokens", file=sys.stderr, flush=True)


async def _fit_words(load: Load) -> None:
    """Words that make the tokens that a prompt is to have, by what the server counts for two prompts."""
    wanted = load.words
    few, many = 1, max(2, wanted // 2)
    counts = [(await load.send(load.random_text(words), 1)).prompt_tokens for words in (few, many)]
    if None in counts or counts[0] == counts[1]:
        print("vkbench: the server does not count prompts: --prompt-tokens is taken for words", file=sys.stderr, flush=True)
        return
    a, b = (count or 0 for count in counts)
    load.words = max(1, round(few + (wanted - a) * (many - few) / (b - a)))


async def run_level(
    load: Load, clients: int, requests: int, *, warmup: bool = True, note: Callable[[str], None] = lambda text: None
) -> Level:
    """Requests of so many clients at once. Before the time begins, each of them sends a short one."""
    texts = load.texts()
    level = Level(clients, [], Counter(), 0.0)
    if warmup:
        note(f"{clients_text(clients)}: warm-up")
        await asyncio.gather(*(load.send(next(texts), min(load.n_gen, WARMUP_TOKENS)) for _ in range(clients)), return_exceptions=True)
    numbers = iter(range(requests))

    async def one_client() -> None:
        for _ in numbers:
            try:
                level.replies.append(await load.send(next(texts), load.n_gen))
            except RequestFailed as e:
                level.failures[str(e)] += 1
            note(f"{clients_text(clients)}: {level.requests} of {requests} requests")

    begun = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(clients)))
    level.duration_s = time.perf_counter() - begun
    return level


def _noting(progress: bool, status: StatusLine) -> Callable[[str], None]:
    def note(text: str) -> None:
        if progress:
            print(f"vkbench: {text}", file=sys.stderr, flush=True)
        else:
            status.say(f"vkbench: {text}")

    return note
