"""Seconds from a file to its first token, and where they go. Every start is a process of its own.

    python bench/load.py MODEL.gguf [--starts 3] [--prompt 12] [--repack device|host] [--save FILE.json]

The first start has empty caches of shaders, pipelines and Python's bytecode (the driver may keep one of its own); the others find what it
left, as an installed package has bytecode from the beginning. Columns:

    import   from the start of the process to the interpreter's having vkback
    plan     opening the driver beside reading the file's tables; hyperparameters, plans, memory
    weights  reading, uploading, repacking; (read, upload: how long that waited for the file and for the device)
    beside   compiling and recording what the first token needs, while weights come
    prepare  what is left of that, and the driver's own compiling at a kernel's first run
    first    the prompt and the first token
    total    from the start of the process to the first token
    peak     MiB of memory of the process at most; above: what is in no file, which staging memory is
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def one_start(args: argparse.Namespace) -> None:
    """In the child: load, make a token, print a line of JSON."""
    from vkback.engine.engine import Engine
    from vkback.engine.sampler import Sampler

    marks = {"start": args.begun, "import": time.time()}
    sampler = Sampler(temp=0.8)

    def meanwhile(engine: Engine) -> None:
        marks["plan"] = time.time()
        engine.compile(prompt=args.prompt, sampler=sampler)
        marks["beside"] = time.time()

    with Engine.load(args.model, n_ctx=args.ctx, progress=False, repack=args.repack, meanwhile=meanwhile) as engine:
        marks["loaded"] = time.time()
        engine.prepare(prompt=args.prompt, sampler=sampler)
        marks["prepared"] = time.time()
        engine.prompt(list(range(1, args.prompt + 1)))
        tokens = engine.generate(1, 8, sampler=sampler, stop_at_eos=False)
        next(tokens)
        marks["first"] = time.time()
        tokens.close()
        times = engine.load_times
        status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        memory = dict(line.split(":") for line in status if line.startswith(("VmHWM", "RssAnon")))
        print(
            json.dumps(
                {
                    "import": marks["import"] - marks["start"],
                    "plan": marks["plan"] - marks["import"],
                    "weights": marks["loaded"] - marks["plan"],
                    "read": times.read_s,
                    "upload": times.upload_s,
                    "beside": marks["beside"] - marks["plan"],
                    "prepare": marks["prepared"] - marks["loaded"],
                    "first": marks["first"] - marks["prepared"],
                    "total": marks["first"] - marks["start"],
                    "peak": int(memory["VmHWM"].split()[0]) / 1024,
                    "above": int(memory["RssAnon"].split()[0]) / 1024,
                    "kernels": str(engine.compiled),
                    "gb": engine.size_bytes / 1e9,
                    "device_name": engine.device.caps.name,
                }
            )
        )


COLUMNS = ("import", "plan", "weights", "read", "upload", "beside", "prepare", "first", "total")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=12, help="tokens of the prompt")
    parser.add_argument("--ctx", type=int, default=None)
    parser.add_argument("--repack", choices=("device", "host"), help="which of them repacks, default: the faster one")
    parser.add_argument("--save", type=Path, help="write what was measured as JSON")
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.begun is not None:
        one_start(args)
        return
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "VKBACK_CACHE": cache, "PYTHONPYCACHEPREFIX": f"{cache}/bytecode"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for i in range(args.starts):
            begun = time.time()
            command = [sys.executable, *sys.argv, "--begun", repr(begun)]
            ran = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", check=False)
            if ran.returncode:
                sys.exit(ran.stderr)
            found.append({**json.loads(ran.stdout.splitlines()[-1]), "exit": time.time() - begun})
            if i == 0:
                print(f"{args.model.name}, {found[0]['gb']:.2f} GB, {found[0]['device_name']}, repack {args.repack or 'by default'}")
                print("start " + "".join(f"{c:>9}" for c in COLUMNS) + f"{'exit':>9}{'GB/s':>7}{'peak':>7}{'above':>7}")
            s = found[-1]
            rate = s["gb"] / s["weights"]
            print(
                f"{i + 1:5} " + "".join(f"{s[c]:9.3f}" for c in COLUMNS) + f"{s['exit']:9.3f}{rate:7.1f}{s['peak']:7.0f}{s['above']:7.0f}"
                f"  {s['kernels']}",
                flush=True,
            )
    if args.save:
        args.save.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
