"""The worker's numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector as Base

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
        yield GaugeMetricFamily("vkback_busy", "1 while a request runs", float(worker.state == "busy"))
        yield GaugeMetricFamily("vkback_device_up", "0 while the device is lost", float(worker.state in ("idle", "busy")))
