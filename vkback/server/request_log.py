"""One line of log for each request: who asked what, the status, tokens, seconds, and why it was refused."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vkback.api import Result
from vkback.server.errors import ServerError
from vkback.server.replies import finish_reason, usage

log = logging.getLogger("vkback.server")

PROBES = ("/health", "/metrics")
"""Requested every few seconds by machines: logged at level DEBUG while they are answered with 200."""

KEY = "vkback.told"


@dataclass
class LoggedRequest:
    """What the endpoints know of a request at its end. texts: of each prompt."""

    results: list[Result] = field(default_factory=list)
    texts: int = 1
    error: ServerError | None = None


def of(request: Request) -> LoggedRequest:
    """That of a request."""
    logged: LoggedRequest = request.scope.setdefault(KEY, LoggedRequest())
    return logged


class RequestLog:
    """Writes the line when the last byte of the answer is sent, or the client has left."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        logged: LoggedRequest = scope.setdefault(KEY, LoggedRequest())
        begun, status, ended = time.monotonic(), 500, False

        async def watched(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, watched)
        finally:
            probe = scope["path"] in PROBES and status == 200
            log.log(logging.DEBUG if probe else logging.INFO, "%s", _line(scope, status, logged, time.monotonic() - begun, ended))


def _line(scope: Scope, status: int, logged: LoggedRequest, seconds: float, ended: bool) -> str:
    client = scope["client"][0] if scope.get("client") else "-"
    path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")  # as it came: it cannot break the line
    parts = [f"{client} {scope['method']} {path} {status}", f"{seconds:.2f} s"]
    if logged.results:
        used = usage(logged.results, logged.texts)
        known = used["prompt_tokens_details"]["cached_tokens"]
        reasons = ", ".join(finish_reason(result) for result in logged.results)
        parts.append(f"prompt {used['prompt_tokens']} tokens, {known} known; reply {used['completion_tokens']}, {reasons}")
    if logged.error is not None:
        parts.append(f"{logged.error.code}: {' '.join(str(logged.error).split())}")
    elif not ended:
        parts.append("the client has left")
    return ", ".join(parts)
