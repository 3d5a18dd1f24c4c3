"""Requests that a front hands on to the processes of its cards, over HTTP/1.0 on this machine: a reply has no frames of its own then, and
ends with its connection, so that its bytes go on as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"expect")
)
"""Headers of one connection, which are not handed on."""

CHUNK = 1 << 16

Headers = Sequence[tuple[bytes, bytes]]


class CardGone(Exception):  # noqa: N818  the name of a condition
    """The connection to a card's process ended before its reply did, or could not be made."""


@dataclass
class Reply:
    """The head of a reply, and its body as it comes."""

    status: int
    headers: list[tuple[bytes, bytes]]
    length: int | None
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    @property
    def is_stream(self) -> bool:
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body. Raises CardGone where it ends before it is whole, as far as its length is known."""
        left = self.length
        while left is None or left > 0:
            try:
                piece = await self._reader.read(CHUNK)
            except OSError as e:
                raise CardGone(str(e)) from e
            if not piece:
                if left:
                    raise CardGone("the reply ends before it is whole")
                return
            left = None if left is None else left - len(piece)
            yield piece

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        with suppress(Exception):
            self._writer.close()


async def ask(port: int, method: str, target: bytes, headers: Headers, body: bytes, client: str) -> Reply:
    """Send a request to a card's process and wait for the head of the reply. client: the address that it is from. Raises CardGone."""
    head = [b"%s %s HTTP/1.0" % (method.encode(), target)]
    head += [name + b": " + value for name, value in headers if name.lower() not in HOP_BY_HOP and name.lower() != b"x-forwarded-for"]
    head += [b"x-forwarded-for: " + client.encode(), b"content-length: %d" % len(body), b"", b""]
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=CHUNK)
        writer.write(b"\r\n".join(head) + body)
        await writer.drain()
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as e:
        if writer is not None:
            writer.close()
        raise CardGone(str(e)) from e
    except BaseException:
        if writer is not None:
            writer.close()
        raise
    found = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines if line)]
    length = next((int(value) for name, value in found if name == b"content-length"), None)
    return Reply(int(first.split()[1]), [(n, v) for n, v in found if n not in HOP_BY_HOP], length, reader, writer)


def error_code(body: bytes) -> str:
    """`code` of an error of OpenAI's form; "" where it is none."""
    try:
        data: Any = json.loads(body)
        return str(data["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""
