"""A server on two cards, which are the CPU driver twice: texts are those of one, and a killed process costs its streams alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import PATIENCE_S

from vkback.api import load
from vkback.device import Device
from vkback.paths import builtin_model

pytestmark = [pytest.mark.vulkan, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def url(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    said = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "vkback", "serve", "-m", "demo-dense", "-c", "512", "--parallel", "4", "--port", "0", "--temp", "0"]
    with said.open("w") as out:
        command += ["--device", f"{device.index},{device.index}"]
        process = subprocess.Popen(command, stderr=out, env={**os.environ, "LP_NUM_THREADS": "1"})
    try:
        until = time.monotonic() + PATIENCE_S
        while "Uvicorn running on " not in said.read_text():
            assert process.poll() is None and time.monotonic() < until, said.read_text()
            time.sleep(0.1)
        yield said.read_text().partition("Uvicorn running on ")[2].split()[0]
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()


def get(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=PATIENCE_S) as reply:
        return json.load(reply)


def text(url: str, prompt: str) -> str:
    return str(get(f"{url}/v1/completions", {"prompt": prompt, "max_tokens": 12, "temperature": 0})["choices"][0]["text"])


def test_texts_are_those_of_one_card_and_both_work(url: str, device: Device) -> None:
    async def all_of(prompts: list[str]) -> list[str]:
        return await asyncio.gather(*(asyncio.to_thread(text, url, prompt) for prompt in prompts))

    prompts = [f"The story of number {i}" for i in range(6)]
    with load(builtin_model("demo-dense"), device=device.index, ctx=512) as model:
        want = [model.generate(prompt, max_tokens=12, temperature=0).text for prompt in prompts]
    assert asyncio.run(all_of(prompts)) == want
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = [
            line for line in reply.read().decode().splitlines() if line.startswith("vkback_requests_total") and 'end="finished"' in line
        ]
    assert len(lines) == 2 and all(float(line.split()[-1]) > 0 for line in lines), lines


def test_a_killed_process_ends_its_stream_with_an_error_and_comes_back(url: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 400, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as stream:
        first = stream.readline()
        assert first.startswith(b"data: ")
        busy = next(card for card in get(f"{url}/health")["cards"] if card["status"] == "busy")
        os.kill(busy["pid"], signal.SIGKILL)
        events = [json.loads(line[6:]) for line in stream.read().decode().splitlines() if line.startswith("data: {")]
    assert events[-1]["error"]["code"] == "device_lost"
    assert all("error" not in event for event in events[:-1])
    assert text(url, "Once upon a time"), "the other card goes on"
    until = time.monotonic() + PATIENCE_S
    while any(card["status"] == "device_lost" for card in get(f"{url}/health")["cards"]):
        assert time.monotonic() < until
        time.sleep(0.2)
    assert get(f"{url}/health")["lost"] == 1
