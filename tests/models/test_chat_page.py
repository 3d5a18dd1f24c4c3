"""The chat page of `vkback serve`, used in a headless browser. VKBACK_PICTURES=FOLDER keeps pictures of it, to be looked at."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_browser
from waiting import PATIENCE_S

from vkback.api import LoadedModel
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.paths import builtin_model

pytest.importorskip("starlette", reason="vkback[serve] is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="vkback[serve] is not installed")

from vkback.server.app import Limits, build_app  # noqa: E402  these need the packages above
from vkback.server.worker import Worker  # noqa: E402

pytestmark = pytest.mark.vulkan

QUESTION = "Who goes there, in this <b>dark</b> and stormy night?"


@pytest.fixture(scope="module")
def port(device: Device) -> Iterator[int]:
    worker = Worker(lambda: LoadedModel(Engine.load(builtin_model("demo-dense"), device, n_ctx=128, act="f32", progress=False)))
    app = build_app(worker, limits=Limits(tokens=120), template="plain", hosts=["127.0.0.1"])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def page(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium here to use the page: apt install chromium")
    with Browser(program, tmp_path_factory.mktemp("profile")) as browser:
        browser.size(900, 700)
        browser.open(f"http://127.0.0.1:{port}/")
        yield browser
        refused = "Failed to load resource: the server responded with a status of 400 (Bad Request)"
        assert browser.problems == [refused], "the console has nothing but the request that was too long"


def picture(page: Browser, name: str) -> None:
    if folder := os.environ.get("VKBACK_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.picture(Path(folder) / f"{name}.png")


def texts(page: Browser, kind: str) -> list[str]:
    found: list[str] = page.run(f"[...document.querySelectorAll('.{kind}')].map(e => e.textContent)")
    return found


def state(page: Browser) -> Any:
    return page.run("document.querySelector('#state').textContent")


def test_the_chat_page_in_a_browser(page: Browser) -> None:
    page.wait_for("document.querySelector('#about').textContent.includes('demo-dense-Q4_K_M on ')")
    picture(page, "empty")
    assert page.run("document.activeElement.id") == "text"
    page.run("document.querySelector('#tokens').value = 8")
    page.write(QUESTION)
    page.press_enter(shift=True)
    page.press_enter()
    page.wait_for("document.querySelector('#state').textContent.startsWith('8 tokens in ')")
    assert texts(page, "user") == [QUESTION], "sent by Enter, shown as it was typed, not as HTML"
    assert len(texts(page, "assistant")) == 1 and texts(page, "assistant")[0]

    page.run("document.querySelector('#tokens').value = 60")
    page.write("And who else?")
    page.click("#send")
    page.wait_for("(document.querySelectorAll('.assistant')[1]?.textContent ?? '').length > 3")
    picture(page, "running")
    page.click("#stop")
    page.wait_for("document.querySelector('#state').textContent === 'stopped'")
    assert len(texts(page, "assistant")) == 2 and page.run("messages.length") == 4 and page.run("document.querySelector('#stop').disabled")
    picture(page, "stopped")

    page.run("document.querySelector('#tokens').value = 500")
    page.write("Too long" * 300)
    page.press_enter()
    page.wait_for("document.querySelector('.error')")
    assert "This model's maximum context length is 128 tokens" in texts(page, "error")[0]
    assert page.run("document.querySelector('#text').value") == "Too long" * 300, "it may be sent again"
    assert page.run("messages.length") == 4
    for name, width, dark in (("error", 900, False), ("dark", 900, True), ("narrow", 380, False)):
        page.size(width, 700, dark=dark)
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off at the side"
        picture(page, name)
    page.size(900, 700)

    under = "document.querySelector('#form').getBoundingClientRect().top - [...document.querySelectorAll('.message')].at(-1)"
    under += ".getBoundingClientRect().bottom"
    page.size(900, 420)
    assert page.run("document.documentElement.scrollHeight > innerHeight"), "there is something to scroll"
    page.run("document.querySelector('#text').value = ''; messages.splice(0)")
    for _ in range(2):
        page.run("document.querySelector('#tokens').value = 12")
        page.write("More")
        page.press_enter()
        page.wait_for("document.querySelector('#state').textContent.startsWith('12 tokens in ')")
        page.run("document.querySelector('#state').textContent = ''")
        assert page.run(under) >= 0, "the newest message is above the form, and not under it"
    picture(page, "scrolled")
    page.run("document.querySelector('#tokens').value = 40")
    page.write("On")
    page.press_enter()
    page.wait_for("running && [...document.querySelectorAll('.message')].at(-1).textContent.length > 3")
    page.run("scrollTo(0, 0)")
    page.wait_for("running === null")
    assert page.run("scrollY") == 0, "who has scrolled up stays there while text comes"
    page.size(900, 700)

    page.click("#reset")
    page.wait_for("!document.querySelector('.message')")
    assert page.run("messages.length") == 0 and state(page) == ""


SAYING = """
var own = window.fetch, events = PIECES.map(delta => "data: " + JSON.stringify({choices: [{delta}]}) + "\\n\\n");
window.fetch = async () => { window.fetch = own; return new Response(events.join("") + "data: [DONE]\\n\\n"); };
"""


def test_the_page_shows_thoughts_apart(page: Browser) -> None:
    pieces = '[{content: ""}, {reasoning_content: "We "}, {reasoning_content: "add <b>."}, {content: "4"}, {content: " it is"}]'
    page.run("document.querySelector('#state').textContent = ''")
    page.run(SAYING.replace("PIECES", pieces))
    page.write("2+2")
    page.press_enter()
    page.wait_for("running === null && document.querySelector('.thoughts')")
    assert texts(page, "thoughts span") == ["We add <b>."] and texts(page, "assistant > span") == ["4 it is"]
    assert not page.run("document.querySelector('.thoughts').open"), "closed once the answer comes; a click opens it"
    picture(page, "thoughts")
    assert page.run("messages.at(-1)") == {"role": "assistant", "content": "4 it is", "reasoning_content": "We add <b>."}
    page.run(SAYING.replace("PIECES", '[{reasoning_content: "We"}]'))
    page.write("2+2")
    page.press_enter()
    page.wait_for("running === null && document.querySelectorAll('.thoughts').length === 2")
    assert page.run("messages.length") == 4 and page.run("[...document.querySelectorAll('.thoughts')].at(-1).open")
    page.click("#reset")
    page.wait_for("!document.querySelector('.message')")


MARKDOWN = """# Title

Some **bold**, *slanted* and `code` <b>not HTML</b>, [a link](https://example.com) and [none](javascript:alert(1)).

- one
- two
  1. inner

| a | b |
|---|---|
| 1 | 2 |

> quoted

```python
def f(x):
    return "<i>" + x
```
"""


def test_markdown_code_and_copy(page: Browser) -> None:
    page.run("document.querySelector('#state').textContent = ''")
    page.run(SAYING.replace("PIECES", json.dumps([{"content": piece} for piece in (MARKDOWN[:40], MARKDOWN[40:200], MARKDOWN[200:])])))
    page.write("Show me")
    page.press_enter()
    page.wait_for("running === null && document.querySelector('.code')")
    answer = "document.querySelector('.assistant > span')"
    kinds = page.run(f"[...{answer}.children].map(e => e.tagName)")
    assert kinds == ["H2", "P", "UL", "TABLE", "BLOCKQUOTE", "DIV"]
    assert page.run(f"{answer}.querySelector('.code pre').textContent") == 'def f(x):\n    return "<i>" + x'
    assert page.run(f"[...{answer}.querySelectorAll('a')].map(e => e.href)") == ["https://example.com/"]
    assert page.run(f"[{answer}.querySelectorAll('b, i, script').length, {answer}.querySelectorAll('ul > li').length]") == [0, 2]
    page.run("document.execCommand = () => true")
    page.run("document.querySelector('.code button').click()")
    page.wait_for("document.querySelector('.code button').textContent === 'Copied'")
    for name, width in (("markdown-360", 360), ("markdown-1400", 1400)):
        page.size(width, 900)
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off at the side"
        picture(page, name)
    page.size(900, 700)


def test_regenerate_edit_system_prompt_and_history(page: Browser) -> None:
    page.run("document.querySelector('#tokens').value = 6; document.querySelector('#system').value = 'Be brief.'")
    page.run("var bodies = [], real = window.fetch")
    page.run("window.fetch = (to, how) => { if (how) bodies.push(JSON.parse(how.body)); return real(to, how); }")
    page.run("[...document.querySelectorAll('.acts button')].find(b => b.textContent === 'Regenerate').click()")
    page.wait_for("running === null && document.querySelector('#state').textContent.startsWith('6 tokens in ')")
    assert page.run("messages.map(m => m.role)") == ["user", "assistant"] and not page.run("document.querySelector('.code')")
    assert page.run("bodies[0].messages") == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Show me"}]
    page.run("[...document.querySelectorAll('.acts button')].find(b => b.textContent === 'Edit').click()")
    assert page.run("[messages.length, document.querySelector('#text').value]") == [0, "Show me"]
    page.run("document.querySelector('#state').textContent = ''")
    page.press_enter()
    page.wait_for("running === null && document.querySelector('#state').textContent.startsWith('6 tokens in ')")
    said = page.run("messages")
    page.run("window.old = true; location.reload()")
    page.wait_for("!window.old && document.querySelectorAll('.message').length === 2")
    page.wait_for("document.querySelector('#about').textContent.includes('demo-dense')")
    assert page.run("messages") == said and page.run("document.querySelector('#system').value") == "Be brief.", "kept over a reload"
    assert page.run("document.querySelector('#asks').hidden"), "a key is asked for where the server wants one"
    page.click("#reset")
    page.wait_for("!document.querySelector('.message')")
    page.run("document.querySelector('#chats').selectedIndex = 1; document.querySelector('#chats').dispatchEvent(new Event('change'))")
    page.wait_for("document.querySelectorAll('.message').length === 2")
    page.run("document.querySelector('#chats').value = '-'; document.querySelector('#chats').dispatchEvent(new Event('change'))")
    page.wait_for("!document.querySelector('.message')")
    page.run("document.querySelector('#system').value = ''")
