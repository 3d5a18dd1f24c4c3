"""How long clients wait for tokens, as histograms of Prometheus."""

from __future__ import annotations

from prometheus_client import Histogram

FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Upper bounds of their buckets, in seconds."""


class Latencies:
    """first: seconds from a request to its first piece of text, waiting included (TTFT). between: seconds a token, from one piece to the
    next (ITL)."""

    def __init__(self) -> None:
        self.first = Histogram(
            "vkback_time_to_first_token_seconds", "From a request to its first piece of text", buckets=FIRST_S, registry=None
        )
        self.between = Histogram("vkback_inter_token_latency_seconds", "Between two tokens of a text", buckets=BETWEEN_S, registry=None)
