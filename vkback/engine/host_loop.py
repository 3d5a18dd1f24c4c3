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
    picker = HostPicker(engine, text, processors, sampler, stop_at_eos=stop_at_eos)
    for _ in range(n):
        logits = engine.decode_logits(picker.text[-1])
        if on_logits is not None:
            on_logits(logits)
        token = picker.pick(logits, None if constraint is None else constraint.mask())
        if constraint is not None:
            constraint.take(token)
        yield token
        if picker.at_end or (constraint is not None and constraint.ended):
            return


class HostPicker:
    """Picks the tokens of one text.

    text    all so far
    at_end  whether the last one ends it
    """

    def __init__(
        self, engine: Engine, text: Sequence[int], processors: Sequence[LogitsProcessor], sampler: Sampler, *, stop_at_eos: bool = True
    ) -> None:
        self.text, self.at_end = list(text), False
        self._processors, self._sampler, self._op = processors, sampler, Sample()
        vocab = engine.model.hp.n_vocab
        self._loop = loop_state(sampler, engine.end_ids(stop_at_eos))
        self._bias, self._chain = sampler.bias(vocab), sampler.chain.words()
        self._dry = engine.dry_words(sampler, engine.n_ctx) if sampler.dries else None
        self._seen = sampler.penalties(engine.n_ctx).words(self.text[:-1], vocab, engine.n_ctx)
        self._made = 0

    def pick(self, logits: Floats, mask: npt.NDArray[np.int32] | None = None) -> int:
        """The next token of the text, which then has it. logits: as the model made them, float32 [n_vocab]. mask: of a constraint. Raises
        SamplerError as `generate_on_host`."""
        sampler, last, pos = self._sampler, self.text[-1], len(self.text) - 1
        logits = _processed(self._processors, np.array(self.text, np.int64), logits.copy())
        x: npt.NDArray[np.float64] = logits.astype(np.float64)
        if sampler.penalizes or mask is not None:
            x = penalized(logits, self._bias, self._seen, last, pos, mask)
        if self._dry is not None:
            x = dried(x, self.text, self._dry)
        if not (x > -np.inf).any():
            raise SamplerError("[sampler] no token is left after logits_processor, logit_bias and json_schema; let one be possible")
        state = [self._loop, np.array([last]), np.array([pos]), self._chain]
        self._loop, _, _, self._chain = self._op.reference([x[None].astype(np.float32), *state], {"capacity": RING})
        token = int(self._loop[LOOP_RING + self._made % RING])
        self._made += 1
        self.text.append(token)
        self.at_end = bool(self._loop[1] == STATUS_EOS)
        return token


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
