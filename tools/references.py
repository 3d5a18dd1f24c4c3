#!/usr/bin/env python3
"""Logits of the architectures' tiny models by the references of tests/references, stored in tests/references/data.

    tools/references.py [ARCH]...      of these architectures, or tiny shapes (tiny-mixtral); default all that have a reference
    tools/references.py --check        compute nothing: say which stored files are missing or of another model file; exit code 1 if any

For each shape called `tiny-NAME`, `vkback synth tiny-NAME-Q8_0` makes the model. NAME.npz (`-` is `_`) holds
    tokens   int32 [24], the prompt; logits float32 [24, n_vocab] after each of its tokens, computed in float64
    greedy   int32 [64], the most likely tokens after it, one after another; margins float32 [64], of their logits over the second best
    source   JSON: model, sha256 of its file, class and versions that made it
of a model that makes vectors of texts
    tokens   int32 [31], two texts of 24 and 7 tokens; segments int32 [31], of their tokens
    hidden   float32 [31, n_embd], what each token comes out as; vectors float32 [2, width], of the texts, pooled as the file says
    source   the same
Needs torch and transformers (`pip install vkback[references]`).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from vkback.models.architecture import ARCHITECTURES  # noqa: E402
from vkback.models.synth import SHAPES, synthesize  # noqa: E402

DATA = ROOT / "tests" / "references" / "data"
TYPE = "Q8_0"
PROMPT, GREEDY = 24, 64
TEXTS = (24, 7)


def module_of(shape: str) -> str:
    """Module of the reference for a tiny shape."""
    return f"references.{SHAPES[shape].arch.replace('-', '_')}"


def data_of(shape: str) -> Path:
    """File of the stored logits of a tiny shape."""
    return DATA / f"{shape.removeprefix('tiny-').replace('-', '_')}.npz"


def tiny_shapes() -> list[str]:
    """Tiny shapes of architectures that have a reference."""
    return [s for s in SHAPES if s.startswith("tiny-") and importlib.util.find_spec(module_of(s))]


def source_of(shape: str, path: Path) -> Any:
    """What made a stored file, and of which model."""
    import torch
    import transformers

    source = {
        "model": f"{shape}-{TYPE}",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "reference": module_of(shape),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return np.array(json.dumps(source))


def compute_vectors(shape: str, path: Path) -> dict[str, Any]:
    """The same of a model that makes vectors of texts. The last third of a text is another segment."""
    reference = importlib.import_module(module_of(shape))
    texts = np.split(np.random.default_rng(0).integers(0, SHAPES[shape].n_vocab, sum(TEXTS)), TEXTS[:1])
    segments = [np.arange(len(text)) >= 2 * len(text) // 3 for text in texts]
    made = [reference.vectors(path, text.tolist(), own.astype(int).tolist()) for text, own in zip(texts, segments, strict=True)]
    return {
        "tokens": np.concatenate(texts).astype(np.int32),
        "segments": np.concatenate(segments).astype(np.int32),
        "hidden": np.concatenate([hidden for hidden, _ in made]).astype(np.float32),
        "vectors": np.stack([vector for _, vector in made]).astype(np.float32),
        "source": source_of(shape, path),
    }


def compute(shape: str, path: Path) -> dict[str, Any]:
    """What the stored file of a shape holds, of the model at `path`."""
    reference = importlib.import_module(module_of(shape))
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, SHAPES[shape].n_vocab, PROMPT)]
    logits = reference.logits(path, tokens)
    fed, margins = list(tokens), []
    for _ in range(GREEDY):
        last = logits[-1] if len(fed) == PROMPT else reference.logits(path, fed)[-1]
        second, best = np.partition(last, -2)[-2:]
        margins.append(best - second)
        fed.append(int(last.argmax()))
    return {
        "tokens": np.array(tokens, np.int32),
        "logits": logits.astype(np.float32),
        "greedy": np.array(fed[PROMPT:], np.int32),
        "margins": np.array(margins, np.float32),
        "source": source_of(shape, path),
    }


def stale(shape: str, path: Path) -> bool:
    """Whether the stored file of a shape is missing, or of another model than the one at `path`."""
    if not data_of(shape).exists():
        return True
    with np.load(data_of(shape)) as stored:
        return bool(json.loads(str(stored["source"]))["sha256"] != hashlib.sha256(path.read_bytes()).hexdigest())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", nargs="*", help="architecture or tiny shape; default all")
    parser.add_argument("--check", action="store_true", help="only say which stored files are missing or of another model")
    args = parser.parse_args()
    known = tiny_shapes()
    for name in args.arch:
        if not any(name in (s, SHAPES[s].arch) for s in known):
            parser.error(f"no reference is called {name!r}; there are {', '.join(dict.fromkeys(SHAPES[s].arch for s in known))}")
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        for shape in known:
            if args.arch and not {shape, SHAPES[shape].arch} & set(args.arch):
                continue
            path = Path(folder) / f"{shape}.gguf"
            synthesize(f"{shape}-{TYPE}", path)
            if args.check:
                if stale(shape, path):
                    print(f"{data_of(shape).relative_to(ROOT)}: missing or of another model; run tools/references.py {shape}")
                    code = 1
                continue
            DATA.mkdir(exist_ok=True)
            if not ARCHITECTURES[SHAPES[shape].arch].causal:
                np.savez_compressed(data_of(shape), **compute_vectors(shape, path))
                print(f"{data_of(shape).relative_to(ROOT)}: {data_of(shape).stat().st_size} bytes")
                continue
            found = compute(shape, path)
            np.savez_compressed(data_of(shape), **found)
            wide = np.median(found["margins"]) / np.sqrt(np.mean(np.square(found["logits"])))
            print(f"{data_of(shape).relative_to(ROOT)}: {data_of(shape).stat().st_size} bytes, median margin {wide:.3f} of the rms")
    return code


if __name__ == "__main__":
    sys.exit(main())
