"""The worker's numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector as Base

from vkback.engine.batch.batch import Batch
from vkback.server.worker import Worker


class Collector(Base):
    """Reads the worker whenever it is asked."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        worker, counts = self._worker, self._worker.counts
        requests = CounterMetricFamily("vkback_requests", "Requests by how they ended", labels=["end"])
        for end in ("finished", "cancelled", "failed", "refused"):
            requests.add_metric([end], getattr(counts, end))
        yield requests
        yield CounterMetricFamily("vkback_prompt_tokens", "Tokens of prompts that were read", counts.prompt_tokens)
        yield CounterMetricFamily("vkback_reused_tokens", "Tokens of prompts that were in the KV cache", counts.reused_tokens)
        yield CounterMetricFamily("vkback_generated_tokens", "Tokens generated", counts.generated_tokens)
        yield CounterMetricFamily("vkback_busy_seconds", "Time that requests ran", counts.seconds)
        yield CounterMetricFamily("vkback_lost_devices", "How often the device was lost", counts.lost)
        yield GaugeMetricFamily("vkback_queued_requests", "Requests that wait", worker.queued)
        yield GaugeMetricFamily("vkback_running_requests", "Requests that run", worker.running)
        yield GaugeMetricFamily("vkback_parallel_requests", "Requests that run at most", worker.parallel)
        yield from worker.latencies.first.collect()
        yield from worker.latencies.between.collect()
        if (batch := worker.batch) is not None:
            yield from _of_batch(batch)
        if (experts := worker.experts) is not None:
            yield CounterMetricFamily("vkback_experts_wanted", "Experts that steps wanted, of layers with a cache of them", experts.wanted)
            yield CounterMetricFamily("vkback_experts_found", "Those of them that lay in the cache", experts.found)
        yield GaugeMetricFamily("vkback_busy", "1 while a request runs", float(worker.state == "busy"))
        yield GaugeMetricFamily("vkback_device_up", "0 while the device is lost", float(worker.state in ("idle", "busy")))


def _of_batch(batch: Batch) -> Iterator[Metric]:
    """Sequences, pages and steps of requests that run at once. They begin anew where the device was lost."""
    sequences = GaugeMetricFamily("vkback_sequences", "Sequences by where they are", labels=["state"])
    for state in ("waiting", "running", "kept"):
        sequences.add_metric([state], getattr(batch.scheduler, state))
    yield sequences
    pool, prefixes, counters = batch.pool, batch.prefixes, batch.counters
    pages = GaugeMetricFamily(
        "vkback_cache_pages", "Pages of the KV cache; known: of past texts, free where others need them", labels=["state"]
    )
    for state, count in (("used", pool.n_pages - pool.available), ("known", prefixes.idle), ("free", pool.free)):
        pages.add_metric([state], count)
    yield pages
    yield GaugeMetricFamily("vkback_cache_page_rows", "Rows of a page", pool.page)
    yield CounterMetricFamily("vkback_preemptions", "Sequences that made room for others", batch.scheduler.preemptions)
    yield CounterMetricFamily("vkback_prefix_lookups", "Prompts that were looked up among past texts", prefixes.lookups)
    yield CounterMetricFamily("vkback_prefix_hits", "Prompts whose beginning was known", prefixes.hits)
    yield CounterMetricFamily("vkback_prefix_evictions", "Pages of past texts that made room", prefixes.evictions)
    yield CounterMetricFamily("vkback_steps", "Steps of all sequences at once", counters.steps)
    yield CounterMetricFamily("vkback_step_columns", "Tokens that steps took; by vkback_steps: the size of a batch", counters.columns)
    drafts = counters.drafts
    yield CounterMetricFamily("vkback_spec_decode_num_drafts", "Steps with drafts", drafts.steps)
    yield CounterMetricFamily("vkback_spec_decode_num_draft_tokens", "Drafts that went through the model", drafts.drafted)
    yield CounterMetricFamily("vkback_spec_decode_num_accepted_tokens", "Drafts that the model picked itself", drafts.accepted)
    by_place = CounterMetricFamily("vkback_spec_decode_num_accepted_tokens_per_pos", "The same by place in a step", labels=["position"])
    for place, (_, accepted) in enumerate(drafts.by_place):
        by_place.add_metric([str(place)], accepted)
    yield by_place
    for what in ("steps", "prompts"):
        yield CounterMetricFamily(f"vkback_{what}_seconds", f"Time of {what}", counters.seconds[what])
