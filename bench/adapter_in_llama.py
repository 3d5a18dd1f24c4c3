"""Whether llama.cpp loads the adapters that `vkback finetune` writes, and computes the same with them.

    python bench/adapter_in_llama.py --include DIR [--include DIR] --lib DIR [MODEL...] [--device NAME]

DIRs are those with llama.h and ggml.h, and with libllama.so. MODEL is a file, a built-in model or a name for `vkback synth`; by default
demo-dense and a tiny model of each architecture that can be trained. An adapter of each is trained for some steps and written; then logits
are compared, with NMSE:

    without    vkback and llama.cpp, both without the adapter: what the two differ by anyway
    with       both with the adapter
    merged     llama.cpp with the adapter, and llama.cpp with the model that `vkback merge` writes
    changes    llama.cpp with the adapter and without: how much there was to get wrong

llama.cpp runs on the CPU, by bench/adapter_logits.c. It rounds activations to 8 bits where weights are quantized; F32 differs by rounding.
Status 1 where "with" is more than BAND times "without", or more than half of "changes".
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

from vkback.cli.shell import model_path
from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.errors import VkbackError
from vkback.evaluate.judge import nmse
from vkback.models import Model
from vkback.models.adapter import Given, merge
from vkback.models.synth import synthesize
from vkback.train.finetune import FineTune, Plan

MODELS = ("demo-dense", *(f"tiny-{arch}-F32" for arch in ("llama", "qwen2", "qwen3", "gemma3", "gpt2", "phi3", "smollm3")))
TEXT = Path(__file__).parents[1] / "tests/data/war_of_the_worlds.txt"
TOKENS = 40
PLAN = Plan(rank=4, alpha=8.0, ctx=16, batch=4, steps=12, lr=2e-2, warmup=2, eval_every=0)
BAND, FLOOR = 4.0, 1e-9
"""The adapter's products are two more roundings in each matrix product: they may add some of what both differ by anyway. Below FLOOR, which
is F32's rounding through all layers, nothing is asked."""

Logits = npt.NDArray[np.floating[Any]]


def built(includes: list[Path], lib: Path, folder: Path) -> Path:
    """The program that asks llama.cpp."""
    out = folder / "adapter_logits"
    source = Path(__file__).with_name("adapter_logits.c")
    headers = [f"-I{path}" for path in includes]
    libraries = [f"-L{lib}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{lib.resolve()}"]
    subprocess.run(["cc", "-O1", "-o", str(out), str(source), *headers, *libraries], check=True)
    return out


def by_llama(program: Path, model: Path, adapter: Path | None, ids: list[int]) -> Logits:
    """Logits [tokens, vocabulary] by llama.cpp."""
    asked = subprocess.run([program, model, adapter or "-"], input=np.array(ids, np.int32).tobytes(), stdout=subprocess.PIPE, check=True)
    return np.frombuffer(asked.stdout, np.float32).reshape(len(ids), -1)


def by_vkback(device: Device, model: Path, adapter: Path | None, ids: list[int]) -> Logits:
    """The same by a device."""
    with Engine.load(model, device, n_ctx=2 * len(ids), act="f32", lora=adapter, progress=False) as engine:
        return np.stack([engine.decode_logits(token) for token in ids])


def made_for_both(name: str, path: Path) -> None:
    """Write a synthetic model that means the same to both: whatever the file says, llama.cpp takes gemma3's attention scale from the width
    of a head, and phi3 without its sliding window."""
    synthesize(name, path)
    values = {"gemma3.attention.scale": Model.open(path).hp.head_dim_k ** -0.5, "phi3.attention.sliding_window": 1 << 18}
    reader = GGUFReader(path, "r+")
    for key, value in values.items():
        if (field := reader.get_field(key)) is not None:
            field.parts[field.data[0]][0] = value


def tokens_of(model: Model) -> list[int]:
    """Something that can be learned: a novel, or, for a model without a vocabulary, tokens that mostly follow one another by a rule."""
    n_vocab = model.hp.n_vocab
    if model.has_text:
        return model.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    rng = np.random.default_rng(0)
    follows = rng.permutation(n_vocab)
    ids = [0]
    while len(ids) < 1000:
        ids.append(int(follows[ids[-1]] if rng.random() < 0.9 else rng.integers(n_vocab)))
    return ids


def trained(device: Device, model: Model, ids: list[int], out: Path) -> float:
    """Train an adapter and write it; gives by what part the held-back loss fell."""
    run = FineTune(model, device, ids, replace(PLAN, lr=3e-3) if model.has_text else PLAN)
    try:
        record = run.run()
        run.write(out)
    finally:
        run.close()
    return record.gain


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS))
    parser.add_argument("--include", type=Path, action="append", required=True)
    parser.add_argument("--lib", type=Path, required=True)
    parser.add_argument("--device")
    args = parser.parse_args()
    wrong = []
    with tempfile.TemporaryDirectory() as made, Device.open(args.device) as device:
        folder = Path(made)
        program = built(args.include, args.lib, folder)
        print(f"{device.caps.name}, driver {device.caps.driver_info}; {TOKENS} tokens, adapters of rank {PLAN.rank}, {PLAN.steps} steps\n")
        print("| model | loss falls by | without | with | merged | changes |\n|---|---:|---:|---:|---:|---:|")
        for name in args.models:
            try:
                path = model_path(name)
            except VkbackError:
                path = folder / f"{name}.gguf"
                made_for_both(name, path)
            adapter, sum_of_both = folder / "adapter.gguf", folder / "merged.gguf"
            model = Model.open(path)
            text = tokens_of(model)
            gain, ids = trained(device, model, text, adapter), text[-TOKENS:]
            merge(path, [Given(adapter)], sum_of_both)
            base, tuned = by_llama(program, path, None, ids), by_llama(program, path, adapter, ids)
            without = nmse(by_vkback(device, path, None, ids), base)
            beside = nmse(by_vkback(device, path, adapter, ids), tuned)
            merged, changes = nmse(by_llama(program, sum_of_both, None, ids), tuned), nmse(base, tuned)
            if beside > max(BAND * without, FLOOR) or beside > 0.5 * changes:
                wrong.append(name)
            print(f"| {name} | {100 * gain:.1f} % | {without:.1e} | {beside:.1e} | {merged:.1e} | {changes:.1e} |", flush=True)
    print(f"\nnot the same with the adapter: {', '.join(wrong)}" if wrong else "\nall the same with the adapter")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
