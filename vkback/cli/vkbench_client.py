"""A client of OpenAI's API that notes when each piece of a streamed reply comes.

It speaks HTTP by asyncio's streams: at 64 streams httpx takes 90 to 110 us of a core for each event, which alone would hold a server below
10 000 tokens per second; this takes 20 to 25.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from vkback.cli.shell import UsageError

LINE_BYTES = 1 << 20
"""The longest line of a reply that is read."""

SHOWN_CHARS = 200
"""Of what a server says, in an error."""

DONE = "[DONE]"


class RequestFailed(Exception):  # noqa: N818  what it says is enough
    """A request without a whole reply, with the reason in a few words."""


@dataclass(frozen=True)
class Address:
    """Where a server is. path: before /v1."""

    host: str
    port: int
    secure: bool
    path: str

    @property
    def header(self) -> str:
        """As a Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_of(url: str) -> Address:
    """Of http://HOST:PORT, with or without /v1 behind it. Raises UsageError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"--url {url}: expected the address of a server, as http://127.0.0.1:8080")
    secure = parts.scheme == "https"
    return Address(parts.hostname, port or (443 if secure else 80), secure, parts.path.rstrip("/").removesuffix("/v1"))


@dataclass
class Reply:
    """A streamed reply, whole.

    began    when the request began, before the connection was made, in seconds of time.perf_counter
    pieces   when each piece of text came; a piece may be several tokens
    ended    when the stream was over
    prompt_tokens, output_tokens   as the server counts them; None where it does not say
    """

    began: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Generated ones: without a count, a piece is one."""
        return len(self.pieces) if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.pieces[0] - self.began

    @property
    def tpot_s(self) -> float | None:
        """Time per output token, from the first to the last; None of a single one."""
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1) if self.tokens > 1 and len(self.pieces) > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Between one piece and the next: inter-token latencies."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]


@dataclass(frozen=True)
class Client:
    """timeout_s: from the beginning of a request to its end."""

    address: Address
    api_key: str | None = None
    timeout_s: float = 600.0

    async def get(self, path: str) -> Any:
        """The JSON of a reply. Raises RequestFailed."""
        found: Any = None
        async with _whole_or_failed(self.timeout_s):
            found = json.loads(b"".join([part async for part in self._parts("GET", path, b"", "")]))
        return found

    async def stream(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Send a request with stream: true and take its reply. Raises RequestFailed."""
        reply = Reply(time.perf_counter())
        done = False
        sent = json.dumps(body).encode()
        async with _whole_or_failed(self.timeout_s), aclosing(self._parts("POST", path, sent, "text/event-stream")) as parts:
            async for data in _events(parts):
                now = time.perf_counter()
                if data == DONE:
                    done = True
                    break
                if _takes(reply, json.loads(data)):
                    reply.pieces.append(now)
        if not done:
            raise RequestFailed(f"the stream ended before {DONE}")
        if not reply.pieces:
            raise RequestFailed("the reply has no token")
        reply.ended = time.perf_counter()
        return reply

    async def _parts(self, method: str, path: str, body: bytes, kind: str) -> AsyncGenerator[bytes, None]:
        """The body of a reply as it comes. kind: the content type that it must have."""
        to = self.address
        secure = ssl.create_default_context() if to.secure else None
        reader, writer = await asyncio.open_connection(to.host, to.port, ssl=secure, limit=LINE_BYTES)
        try:
            key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
            head = (
                f"{method} {to.path}{path} HTTP/1.1\r\nHost: {to.header}\r\nConnection: close\r\nAccept: */*\r\n{key}"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            status, headers = await _head(reader)
            parts = _body(reader, headers)
            if status != 200:
                raise RequestFailed(f"HTTP {status}: {_message(b''.join([part async for part in parts]))}")
            if not headers.get("content-type", "").startswith(kind):
                raise RequestFailed(f"the reply is {headers.get('content-type') or 'of no type'}, expected {kind}")
            async for part in parts:
                yield part
        finally:
            writer.close()


@asynccontextmanager
async def _whole_or_failed(timeout_s: float) -> AsyncIterator[None]:
    """Turns what may happen to a connection, and what may come over it, into RequestFailed."""
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            yield
    except (asyncio.IncompleteReadError, EOFError) as e:
        raise RequestFailed("the connection was closed before the reply was whole") from e
    except OSError as e:  # TimeoutError among them
        raise RequestFailed(f"no end within {timeout_s:g} s" if timeout.expired() else _reason(e)) from e
    except (ValueError, RecursionError, asyncio.LimitOverrunError) as e:
        raise RequestFailed(f"the reply is none of OpenAI's API: {str(e)[:SHOWN_CHARS]}") from e


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return "the connection was refused"
    return "the connection was reset" if isinstance(error, ConnectionError) else f"no connection: {error.strerror or error}"


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, names in lower case."""
    while True:
        line = await _line(reader)
        version, _, rest = line.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ValueError(f"its first line is {line!r}")
        headers: dict[str, str] = {}
        while line := await _line(reader):
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        if not rest.startswith("1"):  # 1xx comes before another
            return int(rest[:3]), headers


async def _line(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line.rstrip(b"\r\n").decode("latin-1")


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Raises EOFError, or IncompleteReadError, where it is cut."""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await _line(reader)).partition(";")[0], 16):
            yield (await reader.readexactly(size + 2))[:size]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(1 << 16):
            yield part


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each event of a stream; OpenAI's have one line. An error that llama-server sends as a field is one, too."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data":
                yield value.decode().strip()
            elif name == b"error":
                raise RequestFailed(f"an error in the stream: {_message(value)}")


def _takes(reply: Reply, event: Any) -> bool:
    """Whether an event has text. Notes what it counts. Raises RequestFailed for an error, ValueError for what is no event."""
    if not isinstance(event, dict):
        raise ValueError(f"an event is {str(event)[:SHOWN_CHARS]}, expected an object")
    if event.get("error"):
        raise RequestFailed(f"an error in the stream: {_message(json.dumps(event).encode())}")
    usage = event.get("usage")
    if isinstance(usage, dict):
        reply.prompt_tokens, reply.output_tokens = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    try:
        pieces = [choice.get("delta") or choice for choice in event.get("choices") or ()]
        return any(piece.get(name) for piece in pieces for name in ("content", "reasoning_content", "text", "token_ids"))
    except (AttributeError, TypeError) as e:
        raise ValueError(f"its choices are {str(event['choices'])[:SHOWN_CHARS]}, expected a list of objects") from e


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _message(body: bytes) -> str:
    """What a server says of an error."""
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(text)
        error = error.get("error", error)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    shown = " ".join(text.split())
    return shown[:SHOWN_CHARS] + " ..." * (len(shown) > SHOWN_CHARS) or "without a reason"
