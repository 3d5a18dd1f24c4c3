"""What llama-quantize says and writes, for tests/unit/test_quantized_files.py.

`python tests/peer_quantize.py PROGRAM` runs it and compares with tests/data/llama_quantize.json; --write makes that anew; --kl compares
the KL divergences of files whose types have a search. PROGRAM is llama-quantize, or a script that runs it.
Stored is what llama.cpp 0.7.0 says (Debian's llama.cpp-tools).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from make_gguf import llama_metadata, llama_tensors, write_gguf

from vkback import paths
from vkback.api.model import open_model
from vkback.engine.load_options import LoadOptions
from vkback.evaluate.kl import BaseReader, BaseWriter, Divergences, describe_text
from vkback.evaluate.text import text_of_novel
from vkback.gguf.file import GgufFile
from vkback.gguf.imatrix import Imatrix, Sums, write_imatrix
from vkback.models.quantize import Recipe, plan_quantize, quantize
from vkback.models.synth import write_outline
from vkback.models.type_choice import BASE, is_matrix

STORED = Path(__file__).parent / "data" / "llama_quantize.json"

SHAPES = (
    "llama-8b",
    "llama2-7b",
    "smollm-135m",
    "mixtral-8x7b",
    "mistral-large-123b",
    "qwen3moe-30b-a3b",
    "llama4-scout",
    "ernie-4.5-21b-a3b",
    "phi3-3b",
    "gemma2-9b",
    "gpt-oss-20b",
)
WITH_IMPORTANCES = ("llama-8b", "mixtral-8x7b")
EXACT = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16")
"""Types whose rule has no search: files are equal to the byte, with --pure."""

EXACT_WIDE = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "MXFP4_MOE")
"""The same, of a model whose rows are whole blocks; MXFP4_MOE as it is mixed."""

SEARCHED = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS")


def digest(types: Iterable[tuple[str, str]]) -> str:
    """Of names and types in the order of a file."""
    return hashlib.sha256("\n".join(f"{name} {type}" for name, type in types).encode()).hexdigest()[:16]


def dry_run(program: str, path: Path, type: str, *options: str) -> list[tuple[str, str]]:
    """Names and types that llama-quantize would write; empty where it refuses."""
    done = subprocess.run([program, "--dry-run", *options, str(path), type], capture_output=True, encoding="utf-8", check=False)
    found = []
    for line in (done.stdout + done.stderr).splitlines():
        tensor = re.match(r"\[ *\d+/ *\d+\] (\S+) +- \[.*\], type = +(\S+), size = (.*)", line)
        if tensor:
            new = re.search(r"-> +[\d.]+ MiB \((\S+)\)", tensor[3])
            found.append((tensor[1], (new[1] if new else tensor[2]).upper()))
    return found


def importances(f: GgufFile, path: Path) -> Imatrix:
    """Ones for every matrix, as a file. The model may have no weights."""
    names = {t.name: t.shape for t in f.tensors.values() if is_matrix(t.name, t.shape) and t.name != "token_embd.weight"}
    sums = {
        name: Sums(np.ones((int(np.prod(shape[:-2])), shape[-1]), np.float32), np.ones(int(np.prod(shape[:-2])), np.float32))
        for name, shape in names.items()
    }
    found = Imatrix(path, sums, ("text",), 1, 512, 2 * len(sums))
    write_imatrix(path, found)
    return found


def planned(f: GgufFile, type: str, imatrix: Imatrix | None = None) -> list[tuple[str, str]]:
    """Names and types that vkback would write."""
    return [(step.source.name, step.type) for step in plan_quantize(f, Recipe(type), imatrix).steps]


def small_model(folder: Path) -> Path:
    """Two layers of F32 whose matrices have rows of 32, 64 and 96 weights."""
    metadata = llama_metadata() | {"tokenizer.ggml.model": "no_vocab"}
    return write_gguf(folder / "small.gguf", "llama", metadata, llama_tensors(tied=False))


def wide_model(folder: Path, experts: int = 0) -> Path:
    """The same with rows of 256 weights."""
    more = {"expert_count": experts, "expert_used_count": 2} if experts else {}
    metadata = llama_metadata(embedding_length=256, feed_forward_length=512, **more) | {"tokenizer.ggml.model": "no_vocab"}
    rng = np.random.default_rng(5)
    tensors = {
        name: (kind, rng.standard_normal((*(8 * n if n > 32 else n for n in array.shape[:-1]), 256), np.float32))
        for name, (kind, array) in llama_tensors(tied=False, experts=experts).items()
        if array.ndim > 1
    }
    return write_gguf(folder / "wide.gguf", "llama", metadata, tensors)


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def said(program: str, folder: Path) -> dict[str, Any]:
    """Everything of STORED."""
    types: dict[str, dict[str, str]] = {}
    for shape in SHAPES:
        outline = folder / "outline.gguf"
        write_outline(f"{shape}-F32", outline)
        f = GgufFile.open(outline)
        options: dict[str, list[str]] = {"": []}
        if shape in WITH_IMPORTANCES:
            importances(f, folder / "imatrix.gguf")
            options[" with importances"] = ["--imatrix", str(folder / "imatrix.gguf")]
        for how, words in options.items():
            runs = {type: dry_run(program, outline, type, *words) for type in BASE}
            types[shape + how] = {type: digest(run) for type, run in runs.items() if run}
        outline.unlink()
    files = {}
    small = small_model(folder)
    for type in EXACT:
        subprocess.run([program, "--pure", str(small), str(folder / "peer.gguf"), type, "1"], capture_output=True, check=True)
        files[type] = file_digest(folder / "peer.gguf")
    wide = wide_model(folder, experts=4)
    for type in EXACT_WIDE:
        pure = [] if type == "MXFP4_MOE" else ["--pure"]
        subprocess.run([program, *pure, str(wide), str(folder / "peer.gguf"), type, "1"], capture_output=True, check=True)
        files[type] = file_digest(folder / "peer.gguf")
    return {"types": types, "files": files}


def divergences(base: Path, made: Mapping[str, Path], folder: Path) -> dict[str, float]:
    """Mean KL divergence of files against a base, on the text that comes with vkback."""
    options = LoadOptions(ctx=256)
    with open_model(base, None, options) as model:
        ids = model.ids(text_of_novel(), start=True)
        same = describe_text(ids, 256, 8, model.n_vocab)
        with BaseWriter(folder / "base.kl", same, {}) as writer:
            model.perplexity(ids, chunk=256, n_chunks=8, on_scored=lambda logits, _: writer.add(logits))
    found = {}
    for name, path in made.items():
        gathered = Divergences()
        with BaseReader(folder / "base.kl") as reader, open_model(path, None, options) as model:
            model.perplexity(
                ids,
                chunk=256,
                n_chunks=8,
                on_scored=lambda logits, targets, reader=reader, to=gathered: to.add(reader.rows(len(targets)), logits, targets),  # type: ignore[misc]
            )
        found[name] = gathered.result().mean
    return found


def compare_kl(program: str, source: Path, folder: Path) -> bool:
    """Prints the KL of files of either, and says whether none of vkback's is worse."""
    f, good = GgufFile.open(source), True
    for type in SEARCHED:
        mine, peer = folder / "mine.gguf", folder / "peer.gguf"
        quantize(plan_quantize(f, Recipe(type, requantize=True)), mine)
        subprocess.run([program, "--allow-requantize", str(source), str(peer), type], capture_output=True, check=True)
        kl = divergences(source, {"mine": mine, "peer": peer}, folder)
        sizes = mine.stat().st_size, peer.stat().st_size
        good = good and kl["mine"] <= kl["peer"] and sizes[0] == sizes[1]
        print(
            f"{type:8} {sizes[0]} bytes, {sizes[1]} of llama-quantize; KL {kl['mine']:.6f}, {kl['peer']:.6f} of llama-quantize", flush=True
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", help="llama-quantize")
    parser.add_argument("--write", action="store_true", help="write what it says")
    parser.add_argument("--kl", nargs="?", const="", help="compare KL divergences on a trained model [demo-dense]")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.kl is not None:
            source = Path(given.kl) if given.kl else paths.builtin_model("demo-dense")
            return 0 if compare_kl(given.program, source, Path(folder)) else 1
        found = said(given.program, Path(folder))
    if given.write:
        STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    same = found == json.loads(STORED.read_text(encoding="utf-8"))
    print("the same as stored" if same else "not what is stored: --write it, and run tests/unit/test_quantized_files.py")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
