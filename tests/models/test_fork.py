"""A process forked from one that has a model: a clear error for whatever it does with it, and an end like any other's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import run_program

pytestmark = [
    pytest.mark.vulkan,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems start processes anew, or end a forked one otherwise"),
]

PROGRAM = """
import json, os, signal, sys, threading
import numpy as np
import vkback
model = vkback.load("demo-dense", ctx=64, act="f32")
session = model.session()
session.generate("It was", max_tokens=1)
want = model.generate("It was", max_tokens=2).text
stream = model.stream("It was", max_tokens=9)
next(stream)
dev = vkback.Device(act="f32")
x = dev.tensor(np.ones(4, np.float32))
child = os.fork()
if not child:
    signal.alarm(50)  # it must not hang
    calls = {
        "generate": lambda: model.generate("x"), "logits": lambda: model.logits([1]), "session": model.session,
        "next": lambda: next(stream),
        "session.generate": lambda: session.generate("x"), "save": lambda: session.save("state"), "fork": session.fork,
        "with": model.__enter__, "numpy": x.numpy, "tensor": lambda: dev.tensor([1.0]), "run_op": lambda: dev.run_op("SQR", x),
        "explain": model.explain, "free_memory": dev.raw.free_memory, "wait": dev.raw.wait_idle, "item": lambda: x[0],
        "close of a stream": stream.close, "close of a model": model.close, "close of a device": dev.close,
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = ""
        except vkback.VkbackError as error:
            said[name] = str(error)
    print(json.dumps(said), flush=True)
    if sys.argv[1] == "anew":
        with vkback.load("demo-dense", ctx=64, act="f32") as own:
            print(json.dumps(own.generate("It was", max_tokens=2).text == want), flush=True)
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert model.generate("It was", max_tokens=2).text == want and dev.run_op("SQR", x).numpy().tolist() == [1.0] * 4
live = dev.raw.live_objects()
assert live["Device"] == 1 and live["Arena"] >= 1
dev.close()
model.close()
assert not dev.raw.live_objects()
"""


@pytest.mark.parametrize("then", ["nothing", "anew"])
def test_a_forked_process_is_told_and_ends(then: str, tmp_path: Path) -> None:
    done = run_program([sys.executable, "-c", PROGRAM, then], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    said, *more = map(json.loads, done.stdout.splitlines())
    assert more == ([True] if then == "anew" else [])
    for name, text in said.items():
        if name.startswith("close"):
            assert text == "", f"{name}: what is closed is the other process's"
        else:
            assert "was forked" in text and "Open the device and load the model in this process" in text, name
    assert list(tmp_path.iterdir()) == []
