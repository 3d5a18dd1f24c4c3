"""The front of a server on several cards: where requests go, what all cards tell, and what happens when one goes. The cards are made up."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import PATIENCE_S

from vkback.cli.serve import card_arguments
from vkback.server.balance import BLOCK, Balance, prompt_blocks
from vkback.server.front import Front

CARD = """
import asyncio, json, os, sys

name, places = sys.argv[1], int(sys.argv[2])
here, scales = 0, []

async def serve(reader, writer):
    global here, scales
    head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode().lower()
    method, path = head.split()[:2]
    length = int(head.partition("content-length: ")[2].split()[0])
    body = json.loads(await reader.readexactly(length) or b"{}")
    def send(status, data, kind="application/json"):
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        head = f"HTTP/1.1 {status} X\\r\\ncontent-type: {kind}\\r\\ncontent-length: {len(data)}\\r\\n\\r\\n"
        writer.write(head.encode() + data)
    if path == "/slots":
        send(200, [{"id": i, "n_ctx": 64, "is_processing": i < here} for i in range(places)])
    elif path == "/health":
        send(200, {"status": "busy" if here else "idle", "model": "m", "device": "Made up", "queued": 0, "step_s": 0.0, "lost": 0})
    elif path == "/metrics":
        text = "# HELP vkback_requests_total Requests\\n# TYPE vkback_requests_total counter\\n"
        text += f"vkback_requests_total{{end=\\"finished\\"}} {int(name) + 1}\\n"
        send(200, text.encode(), "text/plain")
    elif path.startswith("/v1/responses/"):
        found = path.endswith("/resp_" + name)
        send(200 if found else 404, {"card": name} if found else {"error": {"code": "x"}})
    elif path == "/lora-adapters":
        scales = body if method == "post" else scales
        send(400 if scales == ["wrong for " + name] else 200, scales)
    elif method == "get":
        send(200, {"card": name})
    else:
        here += 1
        prompt = body.get("prompt", "")
        if prompt.startswith("lose " + name):
            send(503, {"error": {"message": "lost", "type": "server_error", "param": None, "code": "device_lost"}})
        elif prompt.startswith("die " + name):
            os._exit(1)
        elif prompt.startswith("after "):
            while not os.path.exists(prompt[6:]):
                await asyncio.sleep(0.01)
            send(200, {"card": name})
        elif body.get("stream"):
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream; charset=utf-8\\r\\nconnection: close\\r\\n\\r\\n")
            for i in range(body["max_tokens"]):
                writer.write(b"data: " + json.dumps({"card": name, "i": i}).encode() + b"\\n\\n")
                await writer.drain()
                await asyncio.sleep(0.02)
                if prompt.startswith("die in " + name) and i == 2:
                    os._exit(1)
            writer.write(b"data: [DONE]\\n\\n")
        else:
            await asyncio.sleep(body.get("max_tokens", 0) * 0.02)
            send(200, {"card": name, "client": head.partition("x-forwarded-for: ")[2].split()[0]})
        here -= 1
    await writer.drain()
    writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(f"Uvicorn running on http://127.0.0.1:{server.sockets[0].getsockname()[1]} (x)", file=sys.stderr, flush=True)
    await server.serve_forever()

import threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
asyncio.run(main())
"""


def commands(count: int, places: int) -> list[list[str]]:
    return [[sys.executable, "-c", CARD, str(i), str(places)] for i in range(count)]


@asynccontextmanager
async def served(count: int = 2, places: int = 2, **options: Any) -> AsyncIterator[tuple[Front, httpx.AsyncClient]]:
    front = Front([str(i) for i in range(count)], commands(count, places), {}, **options)
    try:
        await front.start()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://127.0.0.1", timeout=PATIENCE_S) as client:
            yield front, client
    finally:
        await front.close()


def run(test: Callable[[Front, httpx.AsyncClient], Awaitable[None]], **how: Any) -> None:
    async def whole() -> None:
        async with served(**how) as (front, client):
            await test(front, client)

    asyncio.run(whole())


async def until(happened: Callable[[], object], what: str) -> None:
    """`wait_until` for what runs in this event loop."""
    ends = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < ends, f"{what}: not within {PATIENCE_S:g} s"
        await asyncio.sleep(0.005)


def ask(client: httpx.AsyncClient, prompt: str, **fields: Any) -> Awaitable[httpx.Response]:
    return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5, **fields})


def events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


# -- where requests go


def test_blocks_of_prompts_that_begin_alike_are_the_same() -> None:
    chat = [{"role": "user", "content": "x" * 3 * BLOCK}]
    more = [*chat, {"role": "assistant", "content": "y" * BLOCK}]
    first, second = prompt_blocks({"messages": chat}), prompt_blocks({"messages": more, "temperature": 1.0})
    assert len(first) == 3 and second[:3] == first and len(second) > 3
    assert prompt_blocks({"messages": [{"role": "user", "content": "z" * 3 * BLOCK}]})[0] != first[0]
    ids = list(range(1000))
    assert prompt_blocks({"prompt": ids})[:3] == prompt_blocks({"prompt": [*ids, 5, 6]})[:3]
    assert prompt_blocks({}) == [] and prompt_blocks({"prompt": "short"}) == []


def balance(*places: int) -> Balance:
    made = Balance(len(places))
    for card, count in zip(made.cards, places, strict=True):
        card.places = count
    return made


def test_a_prompt_goes_to_the_card_that_knows_its_beginning() -> None:
    made = balance(8, 8)
    assert made.pick([b"a", b"b"]) == 0
    assert made.pick([b"c"]) == 1
    assert made.pick([b"a", b"b", b"d"]) == 0
    assert made.pick([b"c", b"e"]) == 1
    assert made.by_prefix == 2


def test_unless_more_run_there() -> None:
    made = balance(8, 8)
    assert [made.pick([b"a"]) for _ in range(4)] == [0, 0, 0, 1], "two more than there may be: a quarter of its places"
    assert made.pick([b"a"]) in (0, 1)
    assert made.cards[1].knows([b"a"]) == 1, "the other has read it, too"


def test_a_full_card_is_passed_over_and_so_is_one_that_is_gone() -> None:
    made = balance(1, 1)
    assert made.pick([b"a"]) == 0 and made.pick([b"a"]) == 1 and made.pick([b"a"]) is None
    made.release(0)
    made.lose(0)
    assert made.pick([b"a"]) is None and made.cards[0].knows([b"a"]) == 0
    made.release(1)
    assert made.pick([b"a"], without={1}) is None and made.pick([b"a"], only=0) is None and made.pick([b"a"]) == 1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkback.server.balance.MAX_BLOCKS", 3)
    made = balance(9)
    made.pick([b"a", b"b", b"c"])
    made.pick([b"d"])
    assert made.cards[0].knows([b"a"]) == 0 and made.cards[0].knows([b"d"]) == 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("serve -m x --device 0,1 --host 0.0.0.0 --port 9 --temp 0", "serve -m x --temp 0"),
        ("serve --device=0,1 --port=9 --max-queue=4 -c 64 --allowed-hosts a", "serve -c 64"),
        ("serve -dev 0,1 --api-key k", "serve"),
    ],
)
def test_a_card_gets_the_other_options(given: str, kept: str) -> None:
    made = card_arguments(given.split())
    assert made[: len(kept.split())] == kept.split()
    assert made[len(kept.split()) :] == ["--host", "127.0.0.1", "--port", "0", "--max-queue", "1024", "--allowed-hosts", "*"]


# -- with processes


def test_requests_are_dealt_out_and_wait_in_one_queue(tmp_path: Path) -> None:
    async def test(front: Front, client: httpx.AsyncClient) -> None:
        asked = [asyncio.ensure_future(ask(client, f"after {tmp_path / 'go'}")) for _ in range(12)]
        await until(lambda: front.queued == 6, "the queue has six")
        assert [card.running for card in front.balance.cards] == [3, 3], "two places and one ahead of each"
        (tmp_path / "go").touch()
        found = await asyncio.gather(*asked)
        assert [r.status_code for r in found] == [200] * 12
        cards = [r.json()["card"] for r in found]
        assert cards.count("0") + cards.count("1") == 12 and min(cards.count("0"), cards.count("1")) >= 3
        assert all(card.running == 0 for card in front.balance.cards) and front.queued == 0
        health = (await client.get("/health")).json()
        assert health["status"] == "idle" and [c["card"] for c in health["cards"]] == ["0", "1"]
        slots = (await client.get("/slots")).json()
        assert [(s["id"], s["card"]) for s in slots] == [(0, "0"), (1, "0"), (2, "1"), (3, "1")]
        text = (await client.get("/metrics")).text
        assert 'vkback_requests_total{card="0",end="finished"} 1.0' in text and 'vkback_requests_total{card="1",end="finished"} 2.0' in text
        assert text.count("# TYPE vkback_requests_total counter") == 1 and 'vkback_card_up{card="1"} 1.0' in text
        assert (await client.get("/v1/models")).json() == {"card": "0"}

    run(test)


async def scales_of(front: Front) -> list[Any]:
    """What each card was told."""
    async with httpx.AsyncClient(headers={"content-length": "0", "connection": "close"}, timeout=PATIENCE_S) as client:
        return [(await client.get(f"http://127.0.0.1:{process.port}/lora-adapters")).json() for process in front.processes]


def test_scales_of_adapters_reach_every_card() -> None:
    async def test(front: Front, client: httpx.AsyncClient) -> None:
        wanted = [{"id": 0, "scale": 0.5}]
        assert (await client.post("/lora-adapters", json=wanted)).json() == wanted
        assert await scales_of(front) == [wanted, wanted]
        await asyncio.gather(*(ask(client, "die 1") for _ in range(4)))
        await until(lambda: front.processes[1].starts == 2 and front.balance.cards[1].places, "it is started again")
        assert await scales_of(front) == [wanted, wanted], "a card that is started again has them, too"
        reply = await client.post("/lora-adapters", json=["wrong for 1"])
        assert reply.status_code == 400, "one of them refuses"

    run(test)


def test_a_full_queue_refuses(tmp_path: Path) -> None:
    async def test(front: Front, client: httpx.AsyncClient) -> None:
        asked = [asyncio.ensure_future(ask(client, f"after {tmp_path / 'go'}")) for _ in range(8)]
        await until(lambda: sum(each.done() for each in asked) == 2, "two are refused")
        (tmp_path / "go").touch()
        found = await asyncio.gather(*asked)
        assert sorted(r.status_code for r in found) == [200] * 6 + [429] * 2  # two places and one ahead of each card, two wait
        assert all("retry-after" in r.headers for r in found if r.status_code == 429)

    run(test, places=1, max_queue=2)


def test_a_stream_comes_as_it_is_made() -> None:
    async def test(front: Front, client: httpx.AsyncClient) -> None:
        reply = await ask(client, "p", stream=True)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert [e["i"] for e in events(reply.text)] == [0, 1, 2, 3, 4] and reply.text.endswith("data: [DONE]\n\n")

    run(test)


def test_a_lost_device_costs_no_request_that_was_not_begun() -> None:
    async def test(front: Front, client: httpx.AsyncClient) -> None:
        reply = await ask(client, "lose 0")
        assert (reply.status_code, reply.json()["card"]) == (200, "1")
        assert front.counts.rerun == 1
        assert (await ask(client, "q")).status_code == 200

    run(test)


def test_a_process_that_dies_costs_no_request_that_was_not_begun(caplog: pytest.LogCaptureFixture) -> None:
    async def test(front: Front, client: httpx.AsyncClient) -> None:
        reply = await ask(client, "die 0")
        assert (reply.status_code, reply.json()["card"]) == (200, "1")
        await until(lambda: front.balance.cards[0].places and front.counts.lost[0], "it is started again")
        assert (await client.get("/health")).json()["lost"] == 1
        text = (await client.get("/metrics")).text
        assert "vkback_front_rerun_requests_total 1.0" in text and 'vkback_card_processes_lost_total{card="0"} 1.0' in text

    run(test)


def test_a_stream_whose_card_dies_ends_with_one_error() -> None:
    async def test(front: Front, client: httpx.AsyncClient) -> None:
        lost, other = await asyncio.gather(
            ask(client, "die in 0", stream=True, max_tokens=50), ask(client, "p", stream=True, max_tokens=50)
        )
        *pieces, error = events(lost.text)
        assert [p["i"] for p in pieces] == [0, 1, 2] and error["error"]["code"] == "device_lost"
        assert "card 0 was lost" in error["error"]["message"]
        assert [e["i"] for e in events(other.text)] == list(range(50)), "the other card's stream goes on"
        assert front.counts.cut == 1 and (await ask(client, "q")).status_code == 200

    run(test)


def test_a_response_is_asked_of_the_card_that_keeps_it() -> None:
    async def test(front: Front, client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/responses/resp_1")).json() == {"card": "1"}
        assert (await client.get("/v1/responses/resp_9")).status_code == 404
        for card in "0110":
            reply = await client.post("/v1/responses", json={"input": "x", "previous_response_id": f"resp_{card}"})
            assert reply.json()["card"] == card

    run(test)


def test_a_wrong_key_does_not_wait() -> None:
    async def test(front: Front, client: httpx.AsyncClient) -> None:
        assert (await ask(client, "p")).status_code == 401
        assert (await client.get("/metrics")).status_code == 401
        right = {"authorization": "Bearer k"}
        assert (await client.post("/v1/completions", json={"prompt": "p"}, headers=right)).status_code == 200

    run(test, api_key="k")


def test_a_card_that_does_not_start_is_one_clear_error() -> None:
    async def whole() -> None:
        front = Front(["0"], [[sys.executable, "-c", "import sys; sys.exit('no such model')"]], {})
        try:
            with pytest.raises(Exception, match="card 0 does not start: no such model"):
                await front.start()
        finally:
            await front.close()

    asyncio.run(whole())
