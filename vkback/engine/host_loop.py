"""The loop of generation with the choice on the host: Python functions change the logits of each token.

It is the slow way: every token waits for its logits to come from the device, and is picked by numpy. The rules are those of the loop on the
device (vkback/ops/sampling), so functions that change nothing give the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy as np
import numpy.typing as npt

from vkback.engine.constraint import Constraint
from vkback.engine.engine import Engine
from vkback.engine.sampler import RING, Sampler, SamplerError, loop_state
from vkback.ops.sampling.dry import dried
from vkback.ops.sampling.penalties import penalized
from vkback.ops.sampling.sample import LOOP_RING, STATUS_EOS, Sample

Floats = npt.NDArray[np.float32]

LogitsProcessor = Callable[[npt.NDArray[np.int64], Floats], Floats | None]
"""Takes the tokens of the text so far and the logits of the next one, float32 [n_vocab], as the model made them; gives others, or changes
them in place. -inf bans a token."""


def generate_on_host(
    engine: Engine,
    text: Sequence[int],
    n: int,
    processors: Sequence[LogitsProcessor],
    *,
    sampler: Sampler,
    stop_at_eos: bool = True,
    on_logits: Callable[[Floats], object] | None = None,
    constraint: Constraint | None = None,
) -> Generator[int, None, None]:
    """As `Engine.generate` after the last token of a text of which the engine has taken the others: at most n tokens, as they are picked.

    Raises SamplerError for logits that a processor made and that cannot be chosen from.
    """
    vocab = engine.model.hp.n_vocab
    eos = sorted(engine.model.tokenizer.eos_ids) if stop_at_eos and engine.model.has_text else []
    loop, pick = loop_state(sampler, eos), Sample()
    so_far = list(text)
    bias = sampler.bias(vocab)
    chain = sampler.chain.words()
    dry = engine.dry_words(sampler, engine.n_ctx) if sampler.dries else None
    seen = sampler.penalties(engine.n_ctx).words(so_far[:-1], vocab, engine.n_ctx)
    for step in range(n):
        pos = engine.n_past
        logits = engine.decode_logits(so_far[-1])
        if on_logits is not None:
            on_logits(logits)
        logits = _processed(processors, np.array(so_far, np.int64), logits.copy())
        x: npt.NDArray[np.float64] = logits.astype(np.float64)
        if sampler.penalizes or constraint is not None:
            mask = None if constraint is None else constraint.mask()
            x = penalized(logits, bias, seen, so_far[-1], pos, mask)
        if dry is not None:
            x = dried(x, so_far, dry)
        if not (x > -np.inf).any():
            raise SamplerError("[sampler] no token is left after logits_processor, logit_bias and json_schema; let one be possible")
        state = [loop, np.array(so_far[-1:]), np.array([pos]), chain]
        loop, _, _, chain = pick.reference([x[None].astype(np.float32), *state], {"capacity": RING})
        token = int(loop[LOOP_RING + step % RING])
        so_far.append(token)
        if constraint is not None:
            constraint.take(token)
        yield token
        if loop[1] == STATUS_EOS or (constraint is not None and constraint.ended):
            return


def _processed(processors: Sequence[LogitsProcessor], ids: npt.NDArray[np.int64], logits: Floats) -> Floats:
    """Raises SamplerError naming the function that gave no logits."""
    for processor in processors:
        given = processor(ids, logits)
        found = logits if given is None else np.asarray(given)
        name = getattr(processor, "__name__", type(processor).__name__)
        if found.shape != logits.shape or not np.issubdtype(found.dtype, np.floating):
            raise SamplerError(f"[sampler] {name} gave {found.dtype} {list(found.shape)}, expected float32 [{len(logits)}] or None")
        if np.isnan(found).any() or np.isposinf(found).any():
            raise SamplerError(f"[sampler] {name} gave logits that are NaN or infinite; -inf alone may be, to ban a token")
        logits = found.astype(np.float32)
    return logits
