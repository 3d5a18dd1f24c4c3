"""Runs every vkback and vkbench command of README and docs/ once, each cut down to seconds, as `make windows` and the hosted runs do.

    python tools/smoke.py                                 all, in a folder of its own, on the first device
    python tools/smoke.py run serve "vkback tune"         commands that have one of these words
    python tools/smoke.py --encoding cp1252               streams in another encoding; what goes into pipes must be UTF-8 all the same
    python tools/smoke.py --strict                        any Python warning is an error, also files opened without an encoding

Each command's stdin, stdout and stderr are pipes. It is right if its exit code is 0, no traceback is printed, and stdout is UTF-8. A line
for each command, the last ones for the failures; status 1 if there are any. It runs the package of the checkout that it is in.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(here), str(here / "tests")]

from hf_folder import trained_tokenizer, write_folder
from hf_hub import hub_environment, served_hub

from tools.documents import ROOT, commands, words
from vkback.models.synth import synthesize

CUTS: Mapping[str, Sequence[str]] = {
    "vkback run": ("-n", "4"),
    "vkback chat": ("-n", "4", "--chat-template", "plain"),
    "vkback perplexity": ("-c", "16", "--chunks", "2"),
    "vkback profile": ("--prompt-tokens", "4", "-n", "2", "-b", "0"),
    "vkback plan --diff": ("--shape", "tiny-llama-Q8_0"),
    "vkback compare": ("-p", "It was"),
    "vkback embed": ("--pooling", "mean"),
    "vkback imatrix -m": ("-c", "16", "--chunks", "2"),
    "vkback doctor": ("--prompt", "It was"),
    "vkback finetune": ("--steps", "2", "-c", "16", "-b", "1", "--held-back", "0.01", "--eval-every", "0"),
    "vkback tune --op": ("--budget", "1", "--quant", "Q8_0", "--shape", "256x256", "-t", "2"),
    "vkback tune --workers": ("--op", "gemm", "--budget", "1", "--quant", "Q8_0", "--shape", "256x256", "-t", "2"),
    "vkback tune -m": ("--budget", "1", "--op", "gemv"),
    "vkback test-ops perf": ("-o", "ADD", "-p", "type=f32,ne=\\[4096"),
    "vkback test-ops": ("-o", "ADD"),
    "vkbench": ("-r", "1", "--read-rate", "0"),
    "vkbench batch": ("-npp", "8", "-ntg", "4", "-npl", "1,2"),
    "vkbench spec": ("-n", "32", "-r", "1", "-p", "8"),
    "vkbench serve": ("--clients", "1,2", "--requests", "2", "--prompt-tokens", "8", "--max-tokens", "4"),
}
"""By the beginning of a command, options that stand in the place of the same ones of a document, or behind them."""

SMALLER: Mapping[str, str] = {
    "llama-1b-Q4_K_S": "tiny-llama-Q8_0",
    "smollm-135m-F32": "tiny-llama-F32",
    "pp512": "pp8",
    "tg128": "tg4",
    "tg128@d4096": "tg4@d16",
    "512,4096": "16",
    "MUL_MAT(type_a=q4_K,m=4096,n=1,k=14336)": "MUL_MAT(type_a=q4_K,m=256,n=1,k=256)",
    "COMMIT": "--act f32",
    "$name.json": "before.json",
    "$name.md": "before.md",
    "after.json": "before.json",
    "after.md": "before.md",
    "ROCm=rocm.md": "ROCm=before.md",
    "first.gguf": "model.imatrix.gguf",
    "bench/results/OLD.json": "before.json",
    "bench/results/NEW.json": "before.json",
}
"""Words of a document, and what is run in their place."""

MODELS = ("model.gguf", "MODEL.gguf", "MODEL", "bge-m3.gguf", "nomic-embed-text.gguf")
"""Names that documents give to a user's model: the built-in one."""

HUB_FILES = ("gemma-3-1b-it-Q4_K_M.gguf", "gemma-3-1b-it-Q8_0.gguf")
"""What a repository is taken to have, whichever it is: the built-in model under these names."""

THREAD = """RTX 3090

| model          |       size |     params | backend    | ngl |   test |   t/s (before) |    t/s (after) |
| -------------- | ---------: | ---------: | ---------- | --: | -----: | -------------: | -------------: |
| llama 8B Q4_0  |   4.33 GiB |     8.03 B | Vulkan     |  99 |  pp512 | 4141.08 \u00b1 7.46 | 4291.05 \u00b1 7.11 |
| llama 8B Q4_0  |   4.33 GiB |     8.03 B | Vulkan     |  99 |  tg128 |  131.95 \u00b1 0.22 |  139.33 \u00b1 0.30 |
"""

TEXT = "It was a dark and stormy night; Gr\u00fc\u00dfe. " * 40
ENDS_S = 600.0


LACKING = re.compile(r"error: (\[device\] .* needs? VK_\w+), which .* does not offer")
"""What a driver without an extension ends a command with that is about this extension."""


class FailedError(Exception):
    """What is wrong with a command's end or output."""


class LeftOutError(Exception):
    """Why a command cannot run here."""


@dataclass(frozen=True)
class Step:
    """A command as the documents have it, the words that run, and its standard input."""

    shown: str
    argv: tuple[str, ...]
    given: str = ""


def steps(found: Sequence[tuple[str, str]]) -> list[Step]:
    """Each command once, in an order in which files are written before they are read."""
    made: dict[tuple[str, ...], Step] = {}
    for _, command in found:
        program, *args = words(command)
        program = Path(program).name
        if program not in ("vkback", "vkbench"):
            continue
        typed = " ".join([program, *args, ""])
        name = max((name for name in CUTS if typed.startswith(f"{name} ")), key=len, default="")
        args = [SMALLER.get(arg, arg) for arg in args]
        argv = (program, *(args if any("MUL_MAT(" in arg for arg in args) else cut(args, CUTS.get(name, ()))))
        made.setdefault(argv, Step(command, argv, "Hello\n/stats\n/exit\n" if argv[1] == "chat" else ""))
    return sorted(made.values(), key=order)


def cut(args: Sequence[str], options: Sequence[str]) -> list[str]:
    """Arguments with options, each of which has a value, in the place of the same ones."""
    kept: list[str] = []
    for i, arg in enumerate(args):
        if arg not in options[::2] and not (i and args[i - 1] in options[::2]):
            kept.append(arg)
    return [*kept, *options]


def order(step: Step) -> tuple[int, str]:
    """Writers first: a saved run, a table, an adapter, a model; the cache is cleared at the end."""
    argv = step.argv
    writes = any(word in argv for word in ("--save", "--save-kl-base", "--store", "synth", "finetune", "convert"))
    writes |= argv[1] == "imatrix" and "-m" in argv
    return (0 if writes else 2 if argv[1] == "cache" else 1), step.shown


def prepare(folder: Path) -> None:
    """Files that the commands read: models, texts, results from a thread, importances, a model as its makers publish one."""
    model = next((ROOT / "vkback/models/builtin").glob("demo-dense*.gguf"))
    for name in MODELS:
        if not (folder / name).exists():  # MODEL.gguf is model.gguf where names differ in case alone
            shutil.copy(model, folder / name)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "texts.txt").write_text("one text\nanother text\n", encoding="utf-8")
    (folder / "prompts.txt").write_text("It was\nThe planner\n", encoding="utf-8")
    (folder / "thread.txt").write_text(THREAD, encoding="utf-8")
    name = b"blk.9.ffn_up.weight"  # of the older format: entries; name, calls, values and their sums
    (folder / "second.dat").write_bytes(struct.pack(f"<ii{len(name)}sii32f", 1, len(name), name, 1, 32, *[1.0] * 32))
    synthesize("tiny-llama-F32", folder / "published.gguf")
    published = write_folder("llama", folder / "published.gguf", folder / "folder")
    trained_tokenizer(folder / "folder", published.tensors["token_embd.weight"].shape[0])


class Shell:
    """Runs steps in a folder. `python` starts the interpreter, with its options."""

    def __init__(self, folder: Path, python: Sequence[str], env: Mapping[str, str]) -> None:
        self.folder, self.python, self.env = folder, list(python), dict(env)
        self._devices: list[str] = []

    def argv(self, argv: Sequence[str]) -> list[str]:
        return [*self.python, "-m", "vkback", *(["bench"] if argv[0] == "vkbench" else []), *argv[1:]]

    def output(self, argv: Sequence[str], given: str = "") -> str:
        """What a command writes to stdout. Raises FailedError."""
        done = subprocess.run(
            self.argv(argv), cwd=self.folder, env=self.env, input=given.encode(), capture_output=True, timeout=ENDS_S, check=False
        )
        return judged(done.returncode, done.stdout, done.stderr)

    def run(self, step: Step) -> None:
        """Raises FailedError, or LeftOutError."""
        if "torch" in step.argv and importlib.util.find_spec("torch") is None:
            raise LeftOutError("torch is not installed")
        if step.argv[1] == "serve" and importlib.util.find_spec("uvicorn") is None:
            raise LeftOutError("vkback[serve] is not installed")
        if built := next((word.split()[0] for word in step.argv if word.startswith("./")), None):
            raise LeftOutError(f"{built} of a build of llama.cpp is not here")
        if commit := next((word for word in step.argv if re.fullmatch("[0-9a-f]{7,}", word)), None):
            git = shutil.which("git")
            if git is None or subprocess.run([git, "-C", str(ROOT), "cat-file", "-e", commit], capture_output=True).returncode:
                raise LeftOutError(f"this checkout has no commit {commit}")
        if far := next((word for word in step.argv if word in ("--scheduler", "--hosts")), None):
            raise LeftOutError(f"{far} is about other machines")
        if "0,1" in step.argv and len(self.devices()) < 2:
            raise LeftOutError("there is one device")
        if "--workers" in step.argv and importlib.util.find_spec("distributed") is None:
            raise LeftOutError("vkback[hosts] is not installed")
        if ("-hf" in step.argv or step.argv[1] == "pull") and importlib.util.find_spec("huggingface_hub") is None:
            raise LeftOutError("vkback[hub] is not installed")
        argv = [self.devices()[0] if word == "llvmpipe" else word for word in step.argv]
        if argv[:2] == ["vkback", "serve"]:
            with self.served(argv) as url:
                ask(url)
        elif argv[:2] == ["vkbench", "serve"]:
            with self.served(["vkback", "serve", "-m", "model.gguf", "--chat-template", "plain"]) as url:
                self.output(cut(argv, ("--url", url)))
        elif argv[1] == "pull" or "-hf" in argv:
            repository = next(word for word in argv if word.startswith("ggml-org/")).partition(":")[0]
            files = dict.fromkeys(HUB_FILES, (self.folder / "model.gguf").read_bytes())
            with served_hub({repository: files}) as hub:
                env = self.env | hub_environment(hub.url, self.folder / "hub")
                env.pop("PYTHONWARNDEFAULTENCODING", None)  # huggingface_hub opens files of its own without one
                Shell(self.folder, self.python, env).output(argv, step.given)
        else:
            self.output(argv, step.given)

    def devices(self) -> list[str]:
        """Names of all, by number."""
        self._devices = self._devices or [str(d["name"]) for d in json.loads(self.output(["vkback", "devices", "--json"]))]
        return self._devices

    @contextmanager
    def served(self, argv: Sequence[str]) -> Iterator[str]:
        """The address of a server of the words `argv`, which is ended afterwards."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = self.argv(cut(argv, ("--port", str(port))))
        server = subprocess.Popen(words, cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            url = f"http://127.0.0.1:{port}"
            self._wait(server, url)
            yield url
        finally:
            if sys.platform == "win32":
                server.terminate()
            else:
                server.send_signal(signal.SIGINT)
            out, err = server.communicate(timeout=60)
        judged(0 if server.returncode in (0, 1, 130) else server.returncode, out, err)  # 1: terminated, on Windows

    def _wait(self, server: subprocess.Popen[bytes], url: str) -> None:
        begun = time.monotonic()
        while server.poll() is None and time.monotonic() - begun < ENDS_S:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                time.sleep(0.2)
        server.kill()
        out, err = server.communicate()
        judged(server.returncode or 1, out, err)


def ask(url: str) -> None:
    """A short text of a server. Raises FailedError."""
    body = json.dumps({"prompt": "It was", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ENDS_S) as reply:
        if not json.load(reply)["choices"][0]["text"]:
            raise FailedError("the server sent no text")


def judged(status: int, out: bytes, err: bytes) -> str:
    """stdout as text. Raises FailedError, or LeftOutError where the driver lacks what the command is about."""
    said = err.decode("utf-8", "replace")
    last = "\n".join(said.splitlines()[-15:])
    if lacks := LACKING.search(said):
        raise LeftOutError(lacks[1])
    if status or "Traceback (most recent call last)" in said:
        raise FailedError(f"status {status}\n{last}")
    try:
        return out.decode()
    except UnicodeDecodeError as e:
        raise FailedError(f"stdout is not UTF-8: {e}\n{last}") from e


def environment(folder: Path, encoding: str | None, strict: bool) -> dict[str, str]:
    """Tables and caches of the user are neither read nor written, but for compiled kernels."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    made = kept | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH", "")))),
        "VKBACK_TUNING": str(folder / "tuning"),
    }
    made["GALLIVM_PERF"] = kept.get("GALLIVM_PERF", "nopt")  # Mesa's CPU driver compiles in 0.6 of the time
    if encoding:
        made |= {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    if strict:
        made |= {"PYTHONWARNDEFAULTENCODING": "1"}
    return made


def chosen(step: Step, asked: Sequence[str]) -> bool:
    """Whether one of the words is in the command."""
    return not asked or any(re.search(rf"(?:^|\s){re.escape(word)}(?:\s|$)", " ".join(step.argv)) for word in asked)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--encoding")
    parser.add_argument("--strict", action="store_true")
    args = parser.parse_args(arguments)
    python = [sys.executable, *(["-W", "error"] if args.strict else [])]
    failed: list[tuple[Step, FailedError]] = []
    number = 0
    with tempfile.TemporaryDirectory(prefix="vkback-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        prepare(folder)
        env = environment(folder, args.encoding, args.strict)
        for step in (step for step in steps(commands()) if chosen(step, args.words)):
            own = {"VKBACK_CACHE": str(folder / "cache")} if step.argv[1] == "cache" else {}
            begun = time.monotonic()
            number += 1
            try:
                Shell(folder, python, env | own).run(step)
                ended = "right"
            except LeftOutError as e:
                number -= 1
                ended = f"left out ({e})"
            except (FailedError, OSError, subprocess.TimeoutExpired) as e:
                failed.append((step, e if isinstance(e, FailedError) else FailedError(str(e))))
                ended = "FAILED"
            print(f"  {time.monotonic() - begun:6.1f} s  {ended:6} {' '.join(step.argv)}", flush=True)
    for step, error in failed:
        print(f"\n{step.shown}\n  as {' '.join(step.argv)}: {error}")
    print(f"{number - len(failed)} passed, {len(failed)} failed")
    return 1 if failed or not number else 0


if __name__ == "__main__":
    sys.exit(main())
