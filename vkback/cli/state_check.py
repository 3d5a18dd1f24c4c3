"""vkback state-check: does a text go on with the same bits after its state was saved and restored, and else from which node on not?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkback.cli.loading import ActOption, CacheTypeKOption, CacheTypeVOption, RowsOption, load_options
from vkback.cli.shell import DeviceOption, JsonOption, ModelOption, UsageError, act_of, load_engine, model_path
from vkback.cli.terminal import StatusLine

if TYPE_CHECKING:
    from vkback.engine.engine import Engine
    from vkback.engine.snapshot import Snapshot


def state_check(
    model: ModelOption = None,
    device: DeviceOption = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=2, help="Random tokens before the save.")] = 64,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=4, help="Tokens generated, the state being saved in their middle.")] = 32,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the prompt and of the sampler.")] = 1,
    ctx: RowsOption = None,
    act: ActOption = "auto",
    cache_type_k: CacheTypeKOption = "f16",
    cache_type_v: CacheTypeVOption = "f16",
    as_json: JsonOption = False,
) -> None:
    """Generate a text, and once more with its state saved to a file in the middle, other text run, and the state restored. Tokens, logits
    and all that the device keeps must have the same bits; else the first node that differs is named, and the exit code is 1."""
    import numpy as np

    path = model_path(model)
    options = load_options(ctx=ctx, act=act_of(act), cache_type_k=cache_type_k, cache_type_v=cache_type_v)
    with load_engine(path, device, options) as opened, StatusLine(wanted=not as_json) as status:
        engine: Any = opened
        if prompt_tokens + tokens + 1 > engine.n_ctx:
            raise UsageError(
                f"--ctx {engine.n_ctx}: {prompt_tokens} tokens and {tokens} behind them do not fit; give fewer, or raise --ctx"
            )
        ids = np.random.default_rng(seed).integers(engine.model.hp.n_vocab, size=prompt_tokens).tolist()
        found = checked(engine, ids, tokens, seed, status.say)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{found['model']} on {found['device']}:\n  {found['verdict']}")
    if found["first"]:
        raise typer.Exit(1)


def checked(engine: Engine, ids: list[int], n: int, seed: int, tell: Any = lambda text: None) -> dict[str, Any]:
    """Run both, and compare: after the restore, and at the end."""
    import tempfile
    from pathlib import Path

    import numpy as np

    from vkback.engine.sampler import Sampler
    from vkback.engine.snapshot import read_state, write_state

    sampler = Sampler(temp=0.8, seed=seed, repeat_penalty=1.1)

    def to_the_end(first: int, count: int) -> tuple[list[int], Snapshot, Any]:
        made = list(engine.generate(first, count, sampler=sampler, stop_at_eos=False))
        return made, engine.snapshot(), engine.decode_logits(made[-1])

    tell("vkback: a text without a break")
    engine.prompt(ids[:-1])
    whole, ended, logits = to_the_end(ids[-1], n)
    tell("vkback: the same with its state saved and restored")
    engine.reset()
    engine.prompt(ids[:-1])
    text = engine.generate(ids[-1], n, sampler=sampler, stop_at_eos=False)
    begun = [next(text) for _ in range(n // 2)]
    text.close()
    saved = engine.snapshot()
    with tempfile.TemporaryDirectory() as folder:
        write_state(Path(folder) / "state", saved, {}, {})
        read, _, _ = read_state(Path(folder) / "state")
    engine.reset()
    engine.prompt(ids[::-1][: max(2, len(ids) // 2)])
    engine.restore(read)
    first = where_different(engine, saved, engine.snapshot(), "right after the restore")
    rest, at_end, last = to_the_end(begun[-1], n - len(begun))
    if not first and begun + rest != whole:
        place = next(i for i, (a, b) in enumerate(zip(whole, begun + rest, strict=True)) if a != b)
        first = where_different(engine, ended, at_end, "in what came after it") or f"token {place} of the text is another one"
    first = first or where_different(engine, ended, at_end, "in what came after it")
    if not first and not np.array_equal(logits.view(np.uint32), last.view(np.uint32)):
        first = "the logits of the last token (result_output) are other bits, all caches and states are the same"
    size = f"{len(saved.tokens)} tokens, {saved.nbytes / 2**20:.1f} MiB"
    return {
        "model": engine.model.heading,
        "device": engine.device.caps.name,
        "tokens": len(whole),
        "state_bytes": saved.nbytes,
        "first": first,
        "verdict": f"OTHER BITS: {first}" if first else f"the same bits after save and restore ({size})",
    }


def where_different(engine: Engine, want: Snapshot, got: Snapshot, when: str) -> str:
    """The first node, in the order of the model, whose rows of a cache or state have other bits; "" where none has."""
    import numpy as np

    makers = {
        t.name: node.name for node in engine.model.graph(1, engine.n_ctx, head="last").nodes for t in node.outputs if t.kind == "state"
    }
    order = {name: place for place, name in enumerate(makers)}
    for name in sorted(want.arrays, key=lambda each: order.get(each, len(order))):
        a, b = (np.ascontiguousarray(side.arrays[name]) for side in (want, got))
        if a.shape != b.shape:
            return f"{name} has the shape {b.shape}, expected {a.shape}, {when}"
        differs = a.view(np.uint8).reshape(*a.shape[:-1], -1) != b.view(np.uint8).reshape(*b.shape[:-1], -1)
        if differs.any():
            row = f", first in row {int(np.argwhere(differs.any(axis=(0, 2)))[0, 0])}" if differs.ndim == 3 else ""
            return f"{makers.get(name, name)} ({name}{row}), {when}"
    return ""
