"""vkback serve: a model behind the endpoints of OpenAI's API."""

from __future__ import annotations

import importlib.util
import socket
import sys
from typing import Annotated

import typer

from vkback.cli.chat import template_text
from vkback.cli.interrupts import own_interrupts
from vkback.cli.shell import (
    ActOption,
    CacheTypeKOption,
    CacheTypeVOption,
    ContextOption,
    DeviceOption,
    ExactOption,
    LoraOption,
    LoraScaledOption,
    LoraScaleOption,
    ModelOption,
    UbatchOption,
    UsageError,
    adapters_of,
    load_model,
    model_path,
)
from vkback.terminal import colours_wanted

PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance")
LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(
    model: ModelOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8080,
    api_key: Annotated[
        str | None, typer.Option(envvar="VKBACK_API_KEY", help="What clients must send; better by the variable, which `ps` does not show.")
    ] = None,
    template: Annotated[
        str | None, typer.Option("--chat-template", help="plain, chatml, or a file with a jinja2 template, for the model's own.")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are refused with 429.")] = 32,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens that a request may ask for [default: the context].")] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request's body.")] = 4 << 20,
    max_time: Annotated[float, typer.Option(min=0.1, help="Seconds of a request, waiting included.")] = 600.0,
    reuse: Annotated[bool, typer.Option(help="Keep what a prompt shares with the one before it.")] = True,
    device: DeviceOption = None,
    ctx: ContextOption = None,
    ubatch: UbatchOption = None,
    act: ActOption = "auto",
    cache_type_k: CacheTypeKOption = "f16",
    cache_type_v: CacheTypeVOption = "f16",
    exact: ExactOption = False,
    lora: LoraOption = None,
    lora_scaled: LoraScaledOption = None,
    lora_scale: LoraScaleOption = None,
) -> None:
    """Serve a model to OpenAI's clients: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, and a chat page at /."""
    require_packages()
    import uvicorn

    from vkback.server.app import Limits, build_app
    from vkback.server.worker import Worker

    if api_key is not None and not api_key:
        raise UsageError("--api-key is empty; give a key, or leave it out")
    check_address(host, port)
    chosen = template_text(template)
    path = model_path(model)
    adapters = adapters_of(lora, lora_scaled, lora_scale)
    worker = Worker(
        lambda: load_model(path, device, n_ctx=ctx, act=act, ubatch=ubatch, cache=(cache_type_k, cache_type_v), exact=exact, lora=adapters),
        max_queue=max_queue,
        reuse=reuse,
    )
    if host not in LOCAL and api_key is None:
        print(f"vkback: warning: anybody who reaches {host} may use the model; --api-key asks for a key", file=sys.stderr)
    print(f"{worker.title} on {worker.device_name}, {worker.n_ctx} tokens of context", file=sys.stderr)
    hosts = ("127.0.0.1", "localhost") if host in ("127.0.0.1", "localhost") else ("*",)
    app = build_app(worker, api_key=api_key, limits=Limits(max_body, max_tokens, max_time), template=chosen, hosts=hosts)
    try:
        with own_interrupts():  # uvicorn has its own handlers, and gives requests that run some seconds
            uvicorn.run(
                app,
                host=host,
                port=port,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=5,
                use_colors=colours_wanted(sys.stderr),
            )
    finally:
        worker.close()


def check_address(host: str, port: int) -> None:
    """Raises UsageError, before a model is loaded, where nobody can listen there."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as e:
        raise UsageError(f"--host {host} --port {port}: {e.strerror}; give another") from e


def require_packages() -> None:
    """Raises UsageError with the command that installs what is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"serve needs {', '.join(missing)}, which is not installed. Install it with: pip install 'vkback[serve]'")
