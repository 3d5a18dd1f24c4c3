"""vkback serve: a model behind the endpoints of OpenAI's API."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkback.cli.chat import TemplateKwargsOption, TemplateOption, template_text, template_variables, told_format
from vkback.cli.embed import PoolingOption, pooling_named
from vkback.cli.hosts import device_list
from vkback.cli.interrupts import own_interrupts
from vkback.cli.loading import ADAPTERS, ARITHMETIC, DRAFTS, PLACES, ExactRequestsOption, load_options, with_loading
from vkback.cli.sampling import MinPOption, TempOption, TopKOption, TopPOption, generate_options, with_samplers
from vkback.cli.shell import DevicesOption, ModelOption, UsageError, bars, load_model, model_path
from vkback.terminal import colours_wanted

if TYPE_CHECKING:
    from vkback.server.app import Limits

PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance")
LOCAL = ("127.0.0.1", "::1", "localhost")
LOCAL_NAMES = ("127.0.0.1", "[::1]", "localhost")
"""As Host headers have them."""


@with_samplers
@with_loading("ctx", *ARITHMETIC, *PLACES, *ADAPTERS, *DRAFTS, "spec_earlier")
def serve(
    model: ModelOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8080,
    api_key: Annotated[
        str | None, typer.Option(envvar="VKBACK_API_KEY", help="What clients must send; better by the variable, which `ps` does not show.")
    ] = None,
    template: TemplateOption = None,
    template_kwargs: TemplateKwargsOption = None,
    alias: Annotated[str | None, typer.Option("-a", "--alias", help="What clients call the model [default: its file's name].")] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that the Host header may have beside those of this machine, or *.NAME, or * for any; may be repeated. "
            "[default: none beside; any with another --host than this machine's]"
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="An origin of pages that may use the server through a browser, as https://example.com, or *; may be repeated."),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            "-np",
            "--parallel",
            min=-1,
            max=64,
            help="Requests at once, at most [default: as memory allows, up to 64, on CPU drivers and with --exact 8].",
        ),
    ] = None,
    ctx_per_sequence: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that the KV cache holds for each of these; one may take more, up to --ctx, while others take fewer "
            "[default: half of the free memory, for all]",
        ),
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are refused with 429.")] = 32,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens that a request may ask for [default: the context].")] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request's body.")] = 4 << 20,
    max_time: Annotated[
        float, typer.Option("--max-time", "-to", "--timeout", min=0.1, help="Seconds of a request, waiting included.")
    ] = 600.0,
    strict: Annotated[bool, typer.Option(help="Refuse fields of requests that there are not.")] = False,
    strict_model: Annotated[bool, typer.Option(help="Refuse other names of a model than this one's.")] = False,
    pooling: PoolingOption = None,
    temp: TempOption = 0.8,
    top_k: TopKOption = 40,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.05,
    reuse: Annotated[
        bool, typer.Option("--reuse/--no-reuse", "--cache-prompt/--no-cache-prompt", help="Keep what a prompt shares with those before it.")
    ] = True,
    device: DevicesOption = None,
    exact: ExactRequestsOption = False,
    lora_init_without_apply: Annotated[
        bool, typer.Option("--lora-init-without-apply", help="Adapters are off until POST /lora-adapters or a request turns them on.")
    ] = False,
    *,
    loading: Mapping[str, Any],
    samplers: Mapping[str, Any],
) -> None:
    """Serve a model to OpenAI's clients: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/rerank, /v1/models, /health, /metrics,
    and a chat page at /."""
    require_packages()
    parallel = None if parallel is not None and parallel < 1 else parallel
    from vkback.server.app import Limits, build_app
    from vkback.server.run import log_to_stderr, run_app
    from vkback.server.worker import Worker

    for option, given in (("--api-key", api_key), ("--alias", alias)):
        if given is not None and not given:
            raise UsageError(f"{option} is empty; give one, or leave it out")
    if ctx_per_sequence is not None and parallel == 1:
        raise UsageError("--ctx-per-sequence is for several requests at once, --parallel is 1; give a larger one, or --ctx alone")
    check_address(host, port)
    defaults = generate_options({"temperature": temp, "top_k": top_k, "top_p": top_p, "min_p": min_p, **samplers})
    chosen, variables = template_text(template), template_variables(template_kwargs)
    path = model_path(model)
    adapters = loading["lora"]
    if lora_init_without_apply:
        adapters = tuple(replace(each, scale=0.0) for each in adapters)
    log_to_stderr()
    listed = device_list(device)
    if listed is not None and loading["tensor_split"] is None:
        hosts = hosts_of(host, allowed_hosts or [])
        limits = Limits(max_body, max_tokens, max_time)
        serve_cards(listed, host, port, hosts, limits, max_queue, api_key)
        return
    how = load_options(**{**loading, "lora": adapters}, exact=exact and "requests", lora_switched=True, progress=bars())
    worker = Worker(
        lambda: load_model(path, device, how),
        parallel=parallel,
        max_queue=max_queue,
        reuse=reuse,
        alias=alias,
        ctx_per_sequence=ctx_per_sequence,
    )
    try:
        if (wrong := worker.chat_problem(chosen)) and template is not None:
            raise UsageError(f"--chat-template {template}: {wrong}")
        if not worker.makes_text:
            told = "a model of vectors: /v1/embeddings, and /v1/rerank if it has a classifier"
        elif wrong:
            told = f"warning: {wrong}. Without it /v1/chat/completions and the chat page answer with that error"
        else:
            told = told_format(worker.model, chosen)
        if told:
            print(f"vkback: {told}", file=sys.stderr)
        if host not in LOCAL and api_key is None:
            print(f"vkback: warning: anybody who reaches {host} may use the model; --api-key asks for a key", file=sys.stderr)
        print(
            f"{worker.title} on {worker.device_name}, {worker.n_ctx} tokens of context, {told_parallel(worker.parallel)}", file=sys.stderr
        )
        hosts = hosts_of(host, allowed_hosts or [])
        limits = Limits(max_body, max_tokens, max_time)
        app = build_app(
            worker,
            api_key=api_key,
            limits=limits,
            template=chosen,
            template_kwargs=variables,
            hosts=hosts,
            strict=strict,
            strict_model=strict_model,
            cors=cors or (),
            pooling=pooling_named(pooling),
            defaults=defaults,
        )
        with own_interrupts():  # the server has its own handlers
            run_app(app, worker, host, port, colours=colours_wanted(sys.stderr))
    finally:
        worker.close()


def serve_cards(
    devices: Sequence[str], host: str, port: int, hosts: Sequence[str], limits: Limits, max_queue: int, api_key: str | None
) -> None:
    """An engine a card, each in a process of its own, behind one queue (vkback/server/front.py)."""
    from vkback.device import devices_for
    from vkback.server.app import HostCheck
    from vkback.server.front import Front, run_front

    found = devices_for(devices)
    names = [f"{index}" + (f"/{again}" if again > 1 else "") for index, again in counted(index for index, _ in found)]
    same = card_arguments(sys.argv[1:])
    commands = [[sys.executable, "-m", "vkback.cli.serve_card", *same, "--device", str(index)] for index, _ in found]
    share = max(1, (os.cpu_count() or 1) // len(found))
    env = {"LP_NUM_THREADS": str(share)} if any(caps.software for _, caps in found) and not os.environ.get("LP_NUM_THREADS") else {}
    if api_key is not None:
        env["VKBACK_API_KEY"] = api_key
    front = Front(names, commands, env, max_queue=max_queue, max_time_s=limits.request_s, max_body=limits.body_bytes, api_key=api_key)

    def ready() -> None:
        places = ", ".join(str(card.places) for card in front.balance.cards)
        what = ", ".join(dict.fromkeys(caps.name for _, caps in found))
        print(f"{len(found)} cards: {what}; up to {places} requests on each", file=sys.stderr, flush=True)
        if host not in LOCAL and api_key is None:
            print(f"vkback: warning: anybody who reaches {host} may use the model; --api-key asks for a key", file=sys.stderr)

    with own_interrupts():
        run_front(front, lambda app: HostCheck(app, hosts), host, port, ready, colours=colours_wanted(sys.stderr))


def counted(indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Each index with how often it has come so far."""
    seen: dict[int, int] = {}
    for index in indices:
        seen[index] = seen.get(index, 0) + 1
        yield index, seen[index]


OF_FRONT = ("--device", "-dev", "--host", "--port", "--max-queue", "--allowed-hosts", "--api-key")
"""Options that a card's process does not get as they are."""


def card_arguments(words: Sequence[str]) -> list[str]:
    """The command line of a card's process, from that of the server: it listens on this machine alone, and the front has the queue."""
    kept, skip = [], False
    for word in words:
        name = word.partition("=")[0]
        if not skip and name not in OF_FRONT:
            kept.append(word)
        skip = not skip and word in OF_FRONT
    return [*kept, "--host", "127.0.0.1", "--port", "0", "--max-queue", str(CARD_QUEUE), "--allowed-hosts", "*"]


CARD_QUEUE = 1024
"""What waits in a card's process is a text of several prompts or choices, which takes one place of the front's queue."""


def told_parallel(count: int) -> str:
    return "one request at a time" if count == 1 else f"{count} requests at once"


def hosts_of(host: str, given: Sequence[str]) -> list[str]:
    """Names that the Host header may have: those of this machine and those given; any, where others may connect and none is given."""
    return [*LOCAL_NAMES, *given] if host in LOCAL or given else ["*"]


def check_address(host: str, port: int) -> None:
    """Raises UsageError, before a model is loaded, where nobody can listen there."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as e:
        why = "it is in use" if e.errno == errno.EADDRINUSE else e.strerror  # of which Windows has other words
        raise UsageError(f"--host {host} --port {port}: {why}; give another") from e


def require_packages() -> None:
    """Raises UsageError with the command that installs what is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"serve needs what is not installed: {', '.join(missing)}. Install it with: pip install 'vkback[serve]'")
