"""A text of a batch that runs alone, with drafts, until another comes."""

from __future__ import annotations

import pytest

import vkback
from vkback.device import Device
from vkback.engine.batch.batch import Batch, Request, Update
from vkback.engine.drafts import Drafts
from vkback.engine.engine import Engine
from vkback.engine.sampler import Sampler
from vkback.models.synth import synthesize

N_CTX, PAGE = 256, 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Engine:
    path = tmp_path_factory.mktemp("solo") / "model.gguf"
    synthesize("tiny-llama-Q8_0", path)
    return Engine.load(path, device, n_ctx=N_CTX, act="f32")


def texts_of(made: list[Update]) -> dict[int, list[int]]:
    texts: dict[int, list[int]] = {}
    for update in made:
        texts.setdefault(update.id, []).extend(update.tokens)
    return texts


SAMPLED = Sampler(temp=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=3)
PENALIZED = Sampler(repeat_penalty=1.3, presence_penalty=0.2, penalty_last_n=20)


@pytest.mark.vulkan
@pytest.mark.parametrize("sampler", [SAMPLED, PENALIZED], ids=["sampled", "penalized"])
def test_a_text_alone_drafts_and_goes_on_beside_others(llama: Engine, sampler: Sampler) -> None:
    prompt = tuple(range(40, 75))
    with Batch(llama, sequences=4, page=PAGE, rows=40 * PAGE) as batch:
        plain = texts_of([*(batch.add(Request(prompt, 100, sampler, stop_at_eos=False)), batch.run())[1]])[0]
        batch.prefixes.clear()
        drafts = Drafts(pinned=4, known=(*prompt, *plain))
        request = Request(prompt, 100, sampler, stop_at_eos=False, drafts=drafts)
        other = Request((5, 6, 7), 30, stop_at_eos=False)
        alone = batch.add(request)
        made = batch.run()
        assert texts_of(made)[alone] == plain
        counts = made[-1].took.drafts
        assert counts.accepted == counts.drafted > 50 and batch.counters.drafts == counts
        batch.prefixes.clear()

        first = batch.add(request)
        made = []
        while sum(len(update.tokens) for update in made) < 37:  # not at the end of a page
            made += batch.advance()
        second = batch.add(other)
        made += batch.run()
        assert texts_of(made)[first] == plain
        assert len(texts_of(made)[second]) == 30
        assert [update.reason for update in made if update.reason] == ["length", "length"]
        batch.prefixes.clear()
        assert batch.pool.free == batch.pool.n_pages


@pytest.mark.vulkan
def test_pages_of_a_text_that_ran_alone_are_known_to_the_next(llama: Engine) -> None:
    prompt = tuple(range(20))
    with Batch(llama, sequences=2, page=PAGE, rows=40 * PAGE) as batch:
        batch.add(Request(prompt, 60, SAMPLED, stop_at_eos=False, drafts=Drafts()))
        (text,) = texts_of(batch.run()).values()
        read = batch.counters.read
        longer = batch.add(Request((*prompt, *text, 3), 20, stop_at_eos=False))
        known = texts_of(batch.run())[longer]
        assert batch.counters.read - read <= PAGE, "all but the last page"
        batch.prefixes.clear()
        anew = batch.add(Request((*prompt, *text, 3), 20, stop_at_eos=False))
        assert texts_of(batch.run())[anew] == known


@pytest.mark.vulkan
def test_a_text_alone_ends_where_it_is_cancelled(llama: Engine) -> None:
    with Batch(llama, sequences=2, page=PAGE, rows=40 * PAGE) as batch:
        id = batch.add(Request((1, 2, 3), 200, SAMPLED, stop_at_eos=False, drafts=Drafts()))
        while not batch.advance():
            pass
        batch.cancel(id)
        assert [update.reason for update in batch.run()] == ["cancelled"]
        batch.prefixes.clear()
        assert batch.pool.free == batch.pool.n_pages and not batch.busy


@pytest.mark.vulkan
def test_drafts_of_a_batch_from_python(device: Device, drafts_pay: None) -> None:
    prompt = 3 * "the old man went down to the river with his horse and his dog, and "
    with vkback.load("demo-dense", device.index, 512, act="f32", spec_type="ngram-simple") as model:
        alone = model.batch([prompt], max_tokens=90, temperature=0, ignore_eos=True)[0]
        assert alone.timings.draft_accepted > 30
        plain = model.batch([prompt], max_tokens=90, temperature=0, ignore_eos=True, draft_max=0)[0]
        assert alone.tokens == plain.tokens and plain.timings.draft_tokens == 0
