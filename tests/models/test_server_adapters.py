"""Adapters of the server: listed, switched by /lora-adapters, chosen by a request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_adapters_switched import made_up
from test_server import Served

import vkback
from vkback.device import Device
from vkback.server.app import Limits

PROMPT = "It was a dark and stormy night"
GREEDY: dict[str, Any] = {"prompt": PROMPT, "n_predict": 12, "temperature": 0}
pytestmark = pytest.mark.vulkan


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [made_up(folder / "a.gguf", 4, 1), made_up(folder / "b.gguf", 6, 2)]


@pytest.fixture(scope="module")
def wanted_texts(files: list[Path]) -> list[str]:
    """Texts without an adapter, and with each alone."""
    found = []
    for lora in (None, *files):
        with vkback.load("demo-dense", ctx=128, act="f32", lora=lora) as model:
            found.append(model.generate(PROMPT, max_tokens=12, temperature=0).text)
    return found


@pytest.fixture(scope="module", params=[1, 4])
def served(request: pytest.FixtureRequest, device: Device, files: list[Path]) -> Iterator[Served]:
    server = Served(device, Limits(), parallel=request.param, lora=files)
    yield server
    server.close()


def test_adapters_are_listed_and_switched(served: Served, wanted_texts: list[str], files: list[Path]) -> None:
    listed = served.client.get("/lora-adapters").json()
    assert [(each["id"], each["path"]) for each in listed] == [(0, str(files[0])), (1, str(files[1]))]
    assert set(listed[0]) == {"id", "path", "scale", "task_name", "prompt_prefix"}

    def with_scales(*scales: dict[str, float]) -> str:
        reply = served.client.post("/lora-adapters", json=list(scales))
        assert reply.status_code == 200 and reply.json() == {"success": True}, reply.text
        return str(served.post("/completion", **GREEDY).json()["content"])

    assert with_scales({"id": 0, "scale": 1}) == wanted_texts[1]
    assert with_scales({"id": 1, "scale": 1}) == wanted_texts[2], "those left out are off"
    assert with_scales() == wanted_texts[0]
    assert [each["scale"] for each in served.client.get("/lora-adapters").json()] == [0, 0]


def test_each_request_has_its_own(served: Served, wanted_texts: list[str]) -> None:
    served.client.post("/lora-adapters", json=[])
    wanted = [0, 1, 2, 1, 0, 2]

    def ask(which: int) -> str:
        lora = [{"id": which - 1, "scale": 1.0}] if which else []
        return str(served.post("/completion", **GREEDY, lora=lora).json()["content"])

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, wanted)) == [wanted_texts[which] for which in wanted]
    body = served.post("/v1/completions", prompt=PROMPT, max_tokens=12, temperature=0, lora=[{"id": 1}])
    assert body.json()["choices"][0]["text"] == wanted_texts[2]


@pytest.mark.parametrize(
    "lora,said",
    [
        ([{"id": 9, "scale": 1.0}], "has no adapter 9; there are: 0 (a.gguf), 1 (b.gguf)"),
        ([{"id": 0, "scale": "x"}], "lora.0.scale: "),
        ({"id": 0}, 'lora: expected a list of adapters, as [{"id": 0, "scale": 0.5}]'),
    ],
)
def test_wrong_ones_are_400(served: Served, lora: Any, said: str) -> None:
    reply = served.post("/completion", **GREEDY, lora=lora)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


def test_wrong_scales_are_400(served: Served) -> None:
    for body, said in (([{"id": 2, "scale": 1}], "there is no adapter 2; expected a number below 2"), ({"x": 1}, "expected a list of")):
        reply = served.client.post("/lora-adapters", json=body)
        assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


def test_scales_are_kept_where_the_device_is_lost(served: Served, wanted_texts: list[str]) -> None:
    served.client.post("/lora-adapters", json=[{"id": 0, "scale": 1}])
    served.worker.lose([], RuntimeError("the device stopped"))
    assert served.post("/completion", **GREEDY).json()["content"] == wanted_texts[1]
