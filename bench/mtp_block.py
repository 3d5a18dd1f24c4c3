"""What a step with the drafts of an MTP block or an EAGLE-3 head costs, at made acceptance: models of random weights with such.

    python bench/mtp_block.py FOLDER [SHAPE-TYPE ...] [--stages]

SHAPE: with -eagle3 behind it, as llama-8b-eagle3, a model of `vkback synth` with its head beside it. Else one with a block: dense-8b (llama
8B, but for the pairs that RoPE turns, in a file of glm4moe), or a shape of `vkback synth` with attention in block LIKE, whose weights the
block has a copy of. Block or head drafts in each step; what counts as right is made by a first run of the same text, as `vkbench spec`
does. So a step costs what it costs, and makes as many tokens as it is said to make. Plain steps keep what block or head need, too.

With --stages the time of a draft and of the model's step, by kind of stage: microseconds with a barrier behind every one, and of the whole
without.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from vkback.engine.drafts import Drafts
from vkback.engine.engine import Engine
from vkback.engine.load_options import LoadOptions
from vkback.engine.sampler import Sampler
from vkback.models import synth
from vkback.models.architectures.glm4moe import Glm4Moe
from vkback.models.keys import MTP
from vkback.models.shape import ModelShape
from vkback.program import Program
from vkback.timing.launches import span_us, stamp, warm_up

PROMPT, TOKENS, REPEATED = 64, 192, 3
REPEAT = 8

DENSE = ModelShape(
    "glm4moe",
    32,
    4096,
    14336,
    32,
    8,
    128,
    128256,
    131072,
    500000.0,
    n_expert=16,
    n_expert_used=2,
    n_ff_expert=1408,
    metadata={"expert_shared_count": 1, "expert_weights_scale": 1.0, "expert_weights_norm": True, "leading_dense_block_count": 33},
)
LIKE = {"qwen35": 3, "qwen35moe": 3, "qwen3next": 3, "glm4moe": 2}
"""A block with attention of each architecture."""


def write(name: str, path: Path) -> None:
    """The model `SHAPE-TYPE` with one more block, which predicts the token after the next one."""
    shape_name, _, type = name.rpartition("-")
    base = DENSE if shape_name == "dense-8b" else synth.SHAPES[shape_name]
    like = min(LIKE[base.arch], base.n_layer - 1)
    shape = replace(base, metadata={**base.metadata, "block_count": base.n_layer + 1, MTP: 1})
    all_shapes = synth._shapes  # the only way to a file with tensors that no shape has

    def shapes(s: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
        plain = shape_name != "dense-8b"
        return ((t, dims) for t, dims in all_shapes(s) if plain or not t.endswith((".bias", "attn_q_norm.weight", "attn_k_norm.weight")))

    def with_block(s: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
        il, begin = s.n_layer, f"blk.{like}."
        for tensor, dims in shapes(s):
            yield tensor, dims
        for tensor, dims in shapes(s):
            if tensor.startswith(begin):
                yield f"blk.{il}.{tensor.removeprefix(begin)}", dims
        yield f"blk.{il}.nextn.eh_proj.weight", (s.n_embd, 2 * s.n_embd)
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            yield f"blk.{il}.nextn.{norm}.weight", (s.n_embd,)

    tiny = "tiny-" if shape_name.startswith("tiny-") else ""
    with patch.object(synth, "_shapes", with_block), patch.dict(synth.SHAPES, {f"{tiny}with-block": shape}):
        synth.synthesize(f"{tiny}with-block-{type}", path)


def made(name: str, folder: Path) -> tuple[list[Path], LoadOptions]:
    """Files of a model and what drafts for it, and how they are loaded."""
    path, how = folder / f"{name}.gguf", LoadOptions(ctx=512, spec_type="draft-mtp", spec_pinned=4)
    if f"{synth.HEAD}-" not in name:
        write(name, path)
        return [path], how
    head = folder / f"{name}-head.gguf"
    synth.synthesize(name.replace(f"{synth.HEAD}-", "-"), path)
    synth.synthesize(name, head)
    return [path, head], replace(how, spec_type="draft-eagle3", model_draft=head)


def rate(engine: Engine, prompt: Sequence[int], drafts: Drafts | None) -> tuple[float, list[int]]:
    """Tokens a second of the text without compiling, the best of several; the text."""
    best, text = 0.0, list[int]()
    for _ in range(REPEATED + 1):
        engine.reset()
        engine.prompt(prompt[:-1])
        engine.prepare(sampler=Sampler())
        tokens = engine.generate(prompt[-1], TOKENS, sampler=Sampler(), stop_at_eos=False, drafts=drafts)
        begun, compiled = time.perf_counter(), engine.compiled.seconds
        text = list(tokens)
        best = max(best, TOKENS / (time.perf_counter() - begun - (engine.compiled.seconds - compiled)))
    return best, text


def by_kind(engine: Engine, what: str, program: Program) -> Iterator[str]:
    """Lines of a program's stages, those of all layers together, and of its whole."""
    device = engine.device
    stamped, whole = program.record(what, timestamps=True), program.record(what, repeat=REPEAT)
    start, end = stamp(device, "start"), stamp(device, "end")
    warm_up(device, stamped, 0.1)
    runs = []
    for _ in range(5):
        device.submit(stamped).wait()
        runs.append(np.diff([ns for _, ns in stamped.timestamps()]) / 1e3)
    kinds: dict[str, tuple[float, int]] = {}
    for us, stage in zip(np.median(runs, axis=0).tolist(), program.schedule.stages, strict=True):
        parts = sorted({f"{re.sub('-[0-9]+', '', d.label)} [{Path(d.kernel.source).stem}]" for d in stage})
        total, count = kinds.get(", ".join(parts), (0.0, 0))
        kinds[", ".join(parts)] = total + us, count + 1
    times = [span_us(device, start, whole, end) / REPEAT for _ in range(5)]
    stages, free = len(program.schedule.stages), len(program.schedule.barrier_free)
    yield f"{what}: {np.median(times):.1f} us, {stages} stages, {free} of them barrier-free; with a barrier behind each:"
    for kind, (us, count) in kinds.items():
        yield f"    {us:8.1f} us {count:4} x {us / count:7.2f}  {kind[:150]}"
    yield f"    {sum(us for us, _ in kinds.values()):8.1f} us together"


def main(folder: Path, names: Sequence[str], stages: bool = False) -> None:
    rows = ["| model | drafts a step | tokens a step | t/s | plain t/s | gain | ms a step |", "|---|---:|---:|---:|---:|---:|---:|"]
    for name in names:
        begun = time.perf_counter()
        files, how = made(name, folder)
        print(f"{name}: written in {time.perf_counter() - begun:.1f} s", flush=True)
        with Engine.open(files[0], None, how) as engine:
            print(f"{engine.device.caps.summary_line()}, {engine.description}: {time.perf_counter() - begun:.1f} s", flush=True)
            vocab = engine.model.hp.n_vocab
            prompt = np.random.default_rng(1).integers(vocab, size=PROMPT).tolist()
            plain, _ = rate(engine, prompt, None)
            _, text = rate(engine, prompt, Drafts(3, pinned=4, known=(-1,)))
            for most, length in ((2, 3), (3, 3), (3, 2), (3, 4)):
                known = [(t + 1) % vocab if i % length == length - 1 else t for i, t in enumerate(text)]
                found, again = rate(engine, prompt, Drafts(most, pinned=4, model=True, known=(*prompt, *known)))
                assert again == text, "drafts change no text"
                counts = engine.draft_counts
                tokens = TOKENS / counts.steps
                rows.append(
                    f"| {name} | {most} | {tokens:.2f} | {found:.0f} | {plain:.0f} | {found / plain:.2f} | {1000 * tokens / found:.3f} |"
                )
                print(rows[-1], flush=True)
            found, _ = rate(engine, prompt, Drafts(2, pinned=4, known=(*prompt, *text)))
            tokens = TOKENS / engine.draft_counts.steps
            ends = f"{tokens:.2f} | {found:.0f} | {plain:.0f} | {found / plain:.2f} | {1000 * tokens / found:.3f} |"
            rows.append(f"| {name}, block or head not run | 2 | {ends}")
            print(rows[-1], flush=True)
            drafter = engine.drafting.drafter  # what makes a text, as it was planned and bound for it
            assert drafter is not None
            for what, program in (
                ("a draft", drafter.programs.program("greedy")),
                ("the model's step", engine.drafting.programs.program(4, "greedy")),
            ):
                for line in by_kind(engine, what, program) if stages else ():
                    print(line, flush=True)
        for path in files:
            path.unlink()
    print("\n".join(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where files are written, and removed again")
    parser.add_argument("names", nargs="*", default=["dense-8b-Q4_K_S"], metavar="SHAPE-TYPE")
    parser.add_argument("--stages", action="store_true")
    given = parser.parse_args()
    with patch.object(Glm4Moe, "biases", ()):  # dense-8b has none
        main(given.folder, given.names, given.stages)
