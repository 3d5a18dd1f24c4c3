"""A server on several cards: one process a card with an engine and endpoints of its own, and this in front of them, with the queue.

A request waits here until a card has room for it, goes to the card whose KV cache knows its beginning (vkback/server/balance.py), and its
reply is handed on byte by byte. Processes, since the steps of two engines in one would wait for each other's Python. Where a card is lost,
what it has not begun to answer is run again on another; a stream that has begun ends with an error. The others go on.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from vkback.api.at_once import Queues
from vkback.server.balance import Balance, prompt_blocks
from vkback.server.errors import BodyTooLarge, LostDevice, QueueFull, ServerError, Unauthorized, Unavailable
from vkback.server.processes import CardProcess
from vkback.server.replies import DONE, WAITING, error_body
from vkback.server.upstream import CardGone, Reply, ask, error_code

log = logging.getLogger("vkback.server")

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
AHEAD = 1
"""Requests that a card has beside those that run, so that its next step need not wait for the next one."""
KEEP_ALIVE_S = 5.0
"""A stream for which nothing has come so long, since it waits for its turn, gets its head and then comments."""
END = DONE.encode()
"""Of most streams."""
REAP_S = 0.5
"""In which a process that was killed is known to have ended, after its connections have."""
ASK_S = 5.0
"""How long a card may take to tell of itself."""

QUEUED = frozenset(
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/completion",
        "/infill",
        "/v1/embeddings",
        "/embeddings",
        "/v1/rerank",
        "/rerank",
        "/v1/reranking",
        "/reranking",
    )
)
"""Paths whose POST takes a place of a card. All else goes to any card at once."""


@dataclass(eq=False)
class Waiting:
    """A request without a card. found: gets the card's number."""

    client: str
    blocks: Sequence[bytes]
    without: frozenset[int]
    only: int | None
    found: asyncio.Future[int]


@dataclass
class FrontCounts:
    """refused: for a full queue; rerun: on another card, since theirs was lost; cut: ended with an error, likewise."""

    refused: int = 0
    rerun: int = 0
    cut: int = 0
    lost: list[int] = field(default_factory=list)


class Front:
    """An ASGI application on the processes of cards.

    devices   a name for each
    commands  of their processes, and env what these get beside this one's environment
    max_queue, max_time_s, max_body, api_key  as of a server on one card
    """

    def __init__(
        self,
        devices: Sequence[str],
        commands: Sequence[Sequence[str]],
        env: Mapping[str, str],
        *,
        max_queue: int = 32,
        max_time_s: float = 600.0,
        max_body: int = 4 << 20,
        api_key: str | None = None,
    ) -> None:
        self.balance = Balance(len(devices))
        self.processes = [
            CardProcess(i, f"card {name}", command, env, self._up, self._down)
            for i, (name, command) in enumerate(zip(devices, commands, strict=True))
        ]
        self.devices = list(devices)
        self.counts = FrontCounts(lost=[0] * len(devices))
        self._max_queue, self._max_time_s, self._max_body, self._key = max_queue, max_time_s, max_body, api_key
        self._waiting: Queues[Waiting] = Queues()
        self._tasks: list[asyncio.Task[None]] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._ending = False
        self._scales: bytes | None = None  # what was last asked of all cards for their adapters

    # -- cards

    async def start(self) -> None:
        """Start all processes; comes back when each listens. Raises Unavailable where one ends before it does."""
        self._tasks = [asyncio.create_task(process.run()) for process in self.processes]
        while not all(card.places for card in self.balance.cards):
            for process in self.processes:
                if process.starts > 1 and not self.balance.cards[process.index].places:
                    raise Unavailable(f"[server] {process.name} does not start: {process.said or 'it says nothing'}")
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        self._ending = True
        for waiting in self._waiting.take_all():
            if not waiting.found.done():
                waiting.found.set_exception(Unavailable("[server] the server is ending"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _up(self, index: int) -> None:
        task = asyncio.get_running_loop().create_task(self._count_places(index))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _count_places(self, index: int) -> None:
        try:
            if self._scales is not None and self.processes[index].starts > 1:
                await self._get(index, b"/lora-adapters", self._scales)
            slots = json.loads(await self._get(index, b"/slots"))
        except (CardGone, ValueError, TimeoutError) as e:
            log.error("%s does not say how many requests it runs: %s", self.processes[index].name, e)
            return
        self.balance.cards[index].places = len(slots) + AHEAD
        if self.processes[index].starts > 1:
            log.info("%s is there again", self.processes[index].name)
        self._deal()

    def _down(self, index: int, why: str) -> None:
        if self._ending:
            return
        self.balance.lose(index)
        self.counts.lost[index] += 1
        others = sum(card.places > 0 for card in self.balance.cards)
        log.error("%s is lost: %s; it is started again, %d of %d cards go on", self.processes[index].name, why, others, len(self.processes))

    async def _get(self, index: int, target: bytes, body: bytes | None = None) -> bytes:
        """What a card answers to a GET, or to a POST of a body. Raises CardGone and TimeoutError."""
        port = self.processes[index].port
        if port is None:
            raise CardGone("it does not listen")
        key = [] if self._key is None else [(b"authorization", b"Bearer " + self._key.encode())]
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), *key]
        method = "GET" if body is None else "POST"
        reply = await asyncio.wait_for(ask(port, method, target, headers, body or b"", "127.0.0.1"), ASK_S)
        try:
            body = await asyncio.wait_for(reply.body(), ASK_S)
        finally:
            reply.close()
        if reply.status not in (200, 503):
            raise CardGone(f"it answers {reply.status}")
        return body

    # -- the queue

    async def _card_for(self, asked: _Call, without: frozenset[int], only: int | None) -> int:
        """The card that a request may run on, in turn with other clients. Raises QueueFull, Unavailable and _Left."""
        if len(self._waiting) == 0 and (at_once := self.balance.pick(asked.blocks, without, only)) is not None:
            return at_once
        if len(self._waiting) >= self._max_queue:
            self.counts.refused += 1
            raise QueueFull(f"[server] {self._max_queue} requests wait already, which is the limit; try again later", retry_after_s=2)
        waiting = Waiting(asked.client, asked.blocks, without, only, asyncio.get_running_loop().create_future())
        self._waiting.put(asked.client, waiting)
        self._deal()
        try:
            while not waiting.found.done():
                late = asked.deadline - time.monotonic()
                both: set[asyncio.Future[Any]] = {waiting.found, asked.left}
                done, _ = await asyncio.wait(both, timeout=max(0.0, min(late, KEEP_ALIVE_S)), return_when=asyncio.FIRST_COMPLETED)
                if asked.left in done:
                    raise _Left
                if not done and late < KEEP_ALIVE_S:
                    raise Unavailable("[server] the request waited for its turn until its time was over; try again later", retry_after_s=5)
                if not done:
                    await asked.out.keep_alive()
            return waiting.found.result()
        except BaseException:
            if waiting.found.done() and waiting.found.exception() is None:
                self._release(waiting.found.result())
            waiting.found.cancel()
            raise
        finally:
            self._waiting.remove(asked.client, waiting)

    def _deal(self) -> None:
        """Give waiting requests to cards that have room; one that must wait for its own card lets others pass."""
        held: list[Waiting] = []
        while len(self._waiting) and any(card.room for card in self.balance.cards):
            (waiting,) = self._waiting.take(1)
            if waiting.found.done():
                continue
            index = self.balance.pick(waiting.blocks, waiting.without, waiting.only)
            if index is None:
                held.append(waiting)
            else:
                waiting.found.set_result(index)
        for waiting in held:
            self._waiting.put(waiting.client, waiting)

    def _release(self, index: int) -> None:
        self.balance.release(index)
        self._deal()

    # -- requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._answer(scope, receive, send)
        except ServerError as e:
            await _send_json(send, error_body(e), e.status, _retry(e))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if method == "GET" and path in ("/health", "/v1/health"):
            await _send_json(send, *await self._health())
            return
        if method == "GET" and path in ("/metrics", "/slots"):
            self._authorize(scope)
            await self._of_all(path, send)
            return
        body = await self._body(receive)
        if method == "POST" and path == "/lora-adapters":
            await self._to_all(scope, send, body)
        elif path.startswith("/v1/responses/"):
            await self._of_its_card(scope, receive, send, body)
        elif method == "POST" and path in QUEUED:
            self._authorize(scope)
            await self._queued(scope, receive, send, body)
        else:
            await self._any(scope, receive, send, body)

    def _authorize(self, scope: Scope) -> None:
        if self._key is None:
            return
        headers = dict(scope["headers"])
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(given.strip(), self._key.encode()):
            raise Unauthorized("[server] the API key is missing or wrong; send the header Authorization: Bearer KEY, or X-Api-Key: KEY")

    async def _body(self, receive: Receive) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Unavailable("[server] the client has left")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                raise BodyTooLarge(
                    f"[server] the body has more than {self._max_body} bytes, the limit; send less, or give the server a larger --max-body"
                )
            if not message.get("more_body"):
                return b"".join(parts)

    async def _any(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        """A request that any card answers: the first that is there."""
        for index, card in enumerate(self.balance.cards):
            if card.places:
                with suppress(CardGone):
                    await self._hand_on(index, scope, receive, send, body)
                    return
        raise LostDevice("[server] no card is there; the server's log says why", retry_after_s=5)

    async def _to_all(self, scope: Scope, send: Send, body: bytes) -> None:
        """A request that changes what every card does; the reply is the first that is an error, else the first. Raises LostDevice where no
        card is there."""
        ports = [process.port for process in self.processes if process.port is not None]
        client = (scope.get("client") or ("127.0.0.1",))[0]
        asked = (ask(port, "POST", scope["raw_path"], scope["headers"], body, client) for port in ports)
        replies = [each for each in await asyncio.gather(*asked, return_exceptions=True) if isinstance(each, Reply)]
        try:
            said = [(reply, await reply.body()) for reply in replies]
        finally:
            for reply in replies:
                reply.close()
        if not said:
            raise LostDevice("[server] no card is there; the server's log says why", retry_after_s=5)
        if all(reply.status == 200 for reply, _ in said):
            self._scales = body
        await _Out(send, False).whole(*min(said, key=lambda each: each[0].status == 200))

    async def _of_its_card(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        """A response that one card keeps."""
        for index, card in enumerate(self.balance.cards):
            if card.places and await self._keeps(index, scope["path"]):
                await self._hand_on(index, scope, receive, send, body)
                return
        await self._any(scope, receive, send, body)

    async def _keeps(self, index: int, path: str) -> bool:
        try:
            return "error" not in json.loads(await self._get(index, path.encode()))
        except (CardGone, TimeoutError, ValueError):
            return False

    async def _queued(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        try:
            fields = json.loads(body)
        except ValueError:
            fields = {}
        fields = fields if isinstance(fields, dict) else {}
        only = await self._card_of_response(fields.get("previous_response_id"))
        left = asyncio.ensure_future(_leaves(receive))
        asked = _Call(
            (scope.get("client") or ("",))[0],
            prompt_blocks(fields),
            time.monotonic() + self._max_time_s,
            left,
            _Out(send, bool(fields.get("stream"))),
        )
        tried = frozenset[int]()
        try:
            while True:
                index = await self._card_for(asked, tried, only)
                last = len(tried) + 1 >= len(self.processes) or only is not None
                try:
                    if await self._answered(index, scope, asked, body, keep_lost=not last):
                        return
                    why = "its device was lost"
                except CardGone as e:
                    why = str(e)
                    if last:
                        lost = f"[server] {self.processes[index].name} was lost while this request ran: try again. {e}"
                        raise LostDevice(lost, retry_after_s=5) from e
                finally:
                    self._release(index)
                tried |= {index}
                self.counts.rerun += 1
                log.error("%s: %s; a request that it had is run again on another card", self.processes[index].name, why)
        except _Left:
            return
        except ServerError as e:
            await asked.out.fail(e)
        finally:
            left.cancel()

    async def _card_of_response(self, id: Any) -> int | None:
        if not isinstance(id, str) or not id.isascii() or "/" in id:
            return None
        for index, card in enumerate(self.balance.cards):
            if card.places and await self._keeps(index, f"/v1/responses/{id}"):
                return index
        return None

    async def _hand_on(self, index: int, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        """Ask a card and send its reply on. Raises CardGone where it is gone before anything was sent."""
        left = asyncio.ensure_future(_leaves(receive))
        try:
            asked = _Call("", (), time.monotonic() + self._max_time_s, left, _Out(send, False))
            await self._answered(index, scope, asked, body)
        except _Left:
            return
        finally:
            left.cancel()

    async def _answered(self, index: int, scope: Scope, asked: _Call, body: bytes, *, keep_lost: bool = False) -> bool:
        """Ask a card and send its reply on. False, with nothing sent, where it answers that its device was lost and keep_lost is wanted.

        Raises CardGone where it is gone before anything was sent, _Left when the client has left.
        """
        port = self.processes[index].port
        if port is None:
            raise CardGone("its process does not listen")
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        client = (scope.get("client") or ("127.0.0.1",))[0]
        asking = asyncio.ensure_future(ask(port, scope["method"], target, scope["headers"], body, client))
        try:
            while not asking.done():
                both: set[asyncio.Future[Any]] = {asked.left, asking}
                await asyncio.wait(both, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if asked.left.done():
                    raise _Left  # that its connection is closed cancels the request
                if not asking.done():
                    await asked.out.keep_alive()
            reply = asking.result()
        finally:
            asking.cancel()
        asked.left.add_done_callback(lambda _: reply.close())
        try:
            if reply.status == 503 and keep_lost:
                said = await reply.body()
                if error_code(said) == LostDevice.code:
                    return False
                await asked.out.whole(reply, said)
            elif reply.is_stream:
                await self._pass(index, reply, asked)
            else:
                await asked.out.whole(reply, await reply.body())
            return True
        finally:
            reply.close()

    async def _pass(self, index: int, reply: Reply, asked: _Call) -> None:
        """A stream, as it comes. Where its card goes, it ends with an error."""
        await asked.out.begin(reply)
        last, process = b"", self.processes[index].process
        with suppress(CardGone):
            async for piece in reply.pieces():
                if asked.left.done():
                    raise _Left
                last = (last + piece)[-len(END) :]
                await asked.out.piece(piece)
        if asked.left.done():
            raise _Left
        if last != END and await _ends(process):
            self.counts.cut += 1
            lost = LostDevice(f"[server] {self.processes[index].name} was lost while this request ran: try again")
            await asked.out.piece(b"\n\ndata: " + json.dumps(error_body(lost)).encode() + b"\n\n")
        await asked.out.end()

    # -- what all cards tell

    async def _all(self, target: bytes) -> list[bytes | None]:
        found = await asyncio.gather(*(self._get(i, target) for i in range(len(self.processes))), return_exceptions=True)
        return [each if isinstance(each, bytes) else None for each in found]

    async def _health(self) -> tuple[dict[str, Any], int]:
        cards: list[dict[str, Any]] = []
        for name, process, text, lost in zip(self.devices, self.processes, await self._all(b"/health"), self.counts.lost, strict=True):
            told: dict[str, Any] = json.loads(text) if text else {"status": "device_lost"}
            cards.append(
                {**told, "card": name, "pid": process.process.pid if process.process else None, "lost": told.get("lost", 0) + lost}
            )
        states = [card["status"] for card in cards]
        state = next((s for s in ("busy", "idle") if s in states), states[0])
        model = next((card["model"] for card in cards if "model" in card), None)
        body = {
            "status": state,
            "model": model,
            "device": ", ".join(dict.fromkeys(str(card["device"]) for card in cards if "device" in card)),
            "queued": len(self._waiting) + sum(card.get("queued", 0) for card in cards),
            "step_s": max(card.get("step_s", 0.0) for card in cards),
            "lost": sum(card["lost"] for card in cards),
            "cards": cards,
        }
        return body, 200 if state in ("idle", "busy") else 503

    async def _of_all(self, path: str, send: Send) -> None:
        if path == "/metrics":
            await self._metrics(send)
        else:
            await self._slots(send)

    async def _slots(self, send: Send) -> None:
        found: list[dict[str, Any]] = []
        for name, text in zip(self.devices, await self._all(b"/slots"), strict=True):
            found += [{**slot, "id": len(found) + i, "card": name} for i, slot in enumerate(json.loads(text) if text else [])]
        await _send_json(send, found)

    async def _metrics(self, send: Send) -> None:
        registry = CollectorRegistry()
        registry.register(_Merged(self, await self._all(b"/metrics")))
        headers = [(b"content-type", METRICS_TYPE.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": generate_latest(registry)})

    @property
    def queued(self) -> int:
        return len(self._waiting)


class _Merged(Collector):
    """Metrics of all cards, each sample with a label `card`, and those of the front."""

    def __init__(self, front: Front, texts: Sequence[bytes | None]) -> None:
        self._front, self._texts = front, texts

    def collect(self) -> list[Metric]:
        merged: dict[str, Metric] = {}
        for name, text in zip(self._front.devices, self._texts, strict=True):
            for family in text_string_to_metric_families((text or b"").decode()):
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    into.add_sample(sample.name, {**sample.labels, "card": name}, sample.value)
        counts, front = self._front.counts, self._front
        up = GaugeMetricFamily("vkback_card_up", "0 while the card's process is not there", labels=["card"])
        lost = CounterMetricFamily("vkback_card_processes_lost", "How often the card's process has ended", labels=["card"])
        for name, card, times in zip(front.devices, front.balance.cards, counts.lost, strict=True):
            up.add_metric([name], float(card.places > 0))
            lost.add_metric([name], times)
        return [
            *merged.values(),
            up,
            lost,
            GaugeMetricFamily("vkback_front_queued_requests", "Requests that wait for a card", front.queued),
            CounterMetricFamily("vkback_front_refused_requests", "Requests that the queue had no place for", counts.refused),
            CounterMetricFamily(
                "vkback_front_prefix_hits", "Requests that went to a card for what its cache knows", front.balance.by_prefix
            ),
            CounterMetricFamily("vkback_front_rerun_requests", "Requests that were run again, since their card was lost", counts.rerun),
            CounterMetricFamily("vkback_front_cut_streams", "Streams that ended with an error, since their card was lost", counts.cut),
        ]


async def _ends(process: asyncio.subprocess.Process | None) -> bool:
    """Whether a process whose connection has ended does so, too: a reply ends with its connection, and does not say that it is whole."""
    if process is None:
        return True
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), REAP_S)
    return process.returncode is not None


class _Left(Exception):  # noqa: N818  the name of a condition
    """The client has."""


@dataclass(eq=False)
class _Call:
    """A request on its way. left: done when its client has left."""

    client: str
    blocks: Sequence[bytes]
    deadline: float
    left: asyncio.Future[None]
    out: _Out


class _Out:
    """The reply to a client. stream: it asked for events, so that it may get comments before the first one."""

    def __init__(self, send: Send, stream: bool) -> None:
        self._send, self._stream, self._begun = send, stream, False

    async def keep_alive(self) -> None:
        """Nothing has come for KEEP_ALIVE_S."""
        if self._stream:
            if not self._begun:
                await self._head(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
            await self.piece(WAITING.encode())

    async def _head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def begin(self, reply: Reply) -> None:
        if not self._begun:
            await self._head(reply.status, reply.headers)

    async def piece(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def whole(self, reply: Reply, body: bytes) -> None:
        """A reply that is no stream; behind comments, an event."""
        if self._begun:
            await self.piece(b"data: " + body.replace(b"\n", b" ") + b"\n\n")
            await self.end()
            return
        await self._head(reply.status, [*reply.headers, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: ServerError) -> None:
        if self._begun:
            await self.piece(b"data: " + json.dumps(error_body(error)).encode() + b"\n\n")
            await self.end()
        else:
            await _send_json(self._send, error_body(error), error.status, _retry(error))


def _retry(error: ServerError) -> dict[str, str]:
    return {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}


async def _leaves(receive: Receive) -> None:
    """Until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(send: Send, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
    data = json.dumps(body).encode()
    more = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data)), *more]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": data})


class _Server(uvicorn.Server):
    """Says when it listens. On a request to end, requests end first."""

    def __init__(self, config: uvicorn.Config, ends: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._ends = ends

    async def shutdown(self, sockets: Any = None) -> None:
        await self._ends()
        await super().shutdown(sockets)


def run_front(
    front: Front, wrapped: Callable[[ASGIApp], ASGIApp], host: str, port: int, ready: Callable[[], None], *, colours: bool = False
) -> None:
    """Start the cards, and serve until SIGINT or SIGTERM comes. wrapped: the application with what checks requests before; ready: called
    when all cards listen. Raises Unavailable where a card does not start."""

    async def serve() -> None:
        try:
            await front.start()
            ready()
            config = uvicorn.Config(
                wrapped(front),
                host=host,
                port=port,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_graceful_shutdown=5,
                use_colors=colours,
            )
            await _Server(config, front.close).serve()
        finally:
            await front.close()

    asyncio.run(serve())
