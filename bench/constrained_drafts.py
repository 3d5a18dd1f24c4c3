"""What drafts gain requests with a grammar that `vkback serve` answers at once: JSON of a schema, and calls of tools.

    python bench/constrained_drafts.py MODEL.gguf [--clients N] [--pairs N] [--serve OPTION ...]

One server is asked by N clients at the same time, in turn with drafts and without (speculative.n_max 0), several times. Every client has a
prompt and a seed of its own, the same in each round. Without a GPU the server's option --spec-type ngram-simple asks for drafts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_UP = 2

PEOPLE = (
    "Ada Byron, 36, of London, wrote programs for the analytical engine. ada@example.org",
    "Grace Hopper, 85, of Arlington, made the first compiler. grace@example.org",
    "Emmy Noether, 53, of Erlangen, proved theorems about symmetry. emmy@example.org",
    "Sofia Kovalevskaya, 41, of Moscow, studied the motion of tops. sofia@example.org",
    "Mary Somerville, 91, of Jedburgh, explained the mechanism of the heavens. mary@example.org",
    "Hypatia, 60, of Alexandria, taught astronomy. hypatia@example.org",
    "Sophie Germain, 55, of Paris, worked on elastic plates. sophie@example.org",
    "Katherine Johnson, 101, of Hampton, computed orbits. katherine@example.org",
)

SHORT = {"type": "string", "maxLength": 24}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "full_name": SHORT,
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
        "place_of_residence": SHORT,
        "field_of_work": {"enum": ["mathematics", "astronomy", "computing", "physics", "engineering"]},
        "email_address": SHORT,
        "is_still_alive": {"type": "boolean"},
    },
}
PERSON["required"] = list(PERSON["properties"])

TOOL = {"type": "function", "function": {"name": "store_person_in_database", "description": "Stores a person.", "parameters": PERSON}}

TASKS: dict[str, dict[str, Any]] = {
    "JSON schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
    "tool call": {"tools": [TOOL], "tool_choice": "required"},
}


def ask(url: str, task: str, client: int, drafts: bool, max_tokens: int) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": f"Extract this person as JSON. {PEOPLE[client % len(PEOPLE)]}"}],
        "max_tokens": max_tokens,
        "temperature": 0.5,
        "seed": 100 + client,
        **TASKS[task],
    }
    if not drafts:
        body["speculative.n_max"] = 0
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=900) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


def steps(url: str) -> int:
    """That the server has run so far, each a submit that the host waited for."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        found = re.search(rb"^vkback_steps_total (\S+)$", reply.read(), re.M)
    return int(float(found[1])) if found else 0


def cpu_seconds(process: int) -> float:
    """Of a process and its threads, where the system tells; other work on the machine makes it no longer."""
    stat = Path(f"/proc/{process}/stat")
    if not stat.exists():
        return 0.0
    user, system = stat.read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Round:
    """Of all clients together: tokens a second, milliseconds of the server's processor a token, steps a token, drafts, those that were
    right, and what was said."""

    rate: float
    cpu: float
    steps: float
    drafted: int
    right: int
    said: list[str]


def said_in(reply: dict[str, Any]) -> str:
    messages = [choice["message"] for choice in reply["choices"]]
    return json.dumps([(m.get("content"), [call["function"] for call in m.get("tool_calls") or ()]) for m in messages])


def round_of(url: str, process: int, task: str, clients: int, drafts: bool, max_tokens: int) -> Round:
    before, spent, begun = steps(url), cpu_seconds(process), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        replies = list(pool.map(lambda client: ask(url, task, client, drafts, max_tokens), range(clients)))
    seconds = time.perf_counter() - begun
    tokens = sum(reply["usage"]["completion_tokens"] for reply in replies)
    spent = cpu_seconds(process) - spent
    told = [reply.get("timings", {}) for reply in replies]
    drafted, right = (sum(t.get(name, 0) for t in told) for name in ("draft_n", "draft_n_accepted"))
    return Round(tokens / seconds, 1e3 * spent / tokens, (steps(url) - before) / tokens, drafted, right, [*map(said_in, replies)])


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit("the server ended")


def main(model: str, clients: Sequence[int], pairs: int, max_tokens: int, options: Sequence[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = ["-m", "vkback", "serve", "-m", model, "--port", str(port), "--parallel", str(max(clients)), "--ctx", "2048", *options]
    server = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL)
    rows = ["| task | clients | plain t/s | drafts t/s | gain | CPU gain | steps a token | with drafts | drafted | right | texts alike |"]
    rows.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    try:
        wait_for(url, server)
        for task, count in ((task, count) for task in TASKS for count in clients):
            both = []
            for i in range(WARM_UP + pairs):  # drivers compile in the first ones, and the scheduler learns what steps take
                both.append([round_of(url, server.pid, task, count, drafts, max_tokens) for drafts in (False, True)[:: 1 if i % 2 else -1]])
                both[-1].sort(key=lambda r: r.drafted)
            both = both[WARM_UP:]
            plain, drafted = (statistics.median(pair[i].rate for pair in both) for i in (0, 1))
            gain = statistics.median(b.rate / a.rate for a, b in both)
            cpu = statistics.median(a.cpu / b.cpu if b.cpu else 0.0 for a, b in both)
            a, b = both[-1]
            alike = sum(x == y for x, y in zip(a.said, b.said, strict=True))
            told = (
                f"{plain:.0f} | {drafted:.0f} | {gain:.2f} | {cpu:.2f} | {a.steps:.2f} | {b.steps:.2f} | {b.drafted} | {b.right} | {alike}"
            )
            rows.append(f"| {task} | {count} | {told} |")
            ratios = " ".join(f"{b.rate / a.rate:.2f}" for a, b in both), " ".join(f"{a.cpu / b.cpu:.2f}" for a, b in both if b.cpu)
            print(rows[-1], "pairs", ratios[0], "CPU", ratios[1], flush=True)
    finally:
        server.terminate()
        server.wait()
    print("\n".join(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a file, or the name of a built-in model")
    parser.add_argument("--clients", type=int, nargs="+", default=[4])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="what else the server is started with")
    given = parser.parse_args()
    main(given.model, given.clients, given.pairs, given.max_tokens, given.serve)
