"""Drafts behind the server: a request that runs alone has them, and is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from test_server import Served

from vkback.device import Device
from vkback.engine.batch import scheduler
from vkback.engine.batch.shares import best_share
from vkback.engine.drafts import Drafts
from vkback.server.app import Limits


def always_shared(
    gains: Sequence[Sequence[float]], seconds: Mapping[int, float], plain: tuple[int, float], *, going: bool
) -> tuple[int, list[int]] | None:
    """On a machine that others use, too, drafts would pay at times and at times not."""
    return best_share(gains, dict.fromkeys(seconds, 1.0), (plain[0], 1.0), going=True)


@pytest.mark.vulkan
@pytest.mark.parametrize("parallel", [pytest.param(1, marks=pytest.mark.exhaustive), 4])
def test_a_request_that_runs_alone_drafts(parallel: int, device: Device, drafts_pay: None) -> None:
    served = Served(device, Limits(), parallel=parallel, n_ctx=384, drafts=Drafts(3))
    try:
        prompt = 3 * "the old man went down to the river with his horse and his dog, and "
        asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 90, "temperature": 0, "ignore_eos": True}
        drafted = served.text(**asked)
        plain = served.text(**asked, **{"speculative.n_max": 0})
        assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
        assert drafted["timings"]["draft_n"] >= drafted["timings"]["draft_n_accepted"] > 9
        assert "draft_n" not in plain["timings"]
        if parallel > 1:
            lines = served.client.get("/metrics").text.splitlines()
            told = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}
            name = "vkback_spec_decode_num_accepted_tokens"
            assert told[f"{name}_total"] == drafted["timings"]["draft_n_accepted"]
            assert sum(told[key] for key in told if key.startswith(f"{name}_per_pos_total")) == told[f"{name}_total"]
        assert served.post("/v1/completions", **asked, **{"speculative.n_max": -1}).status_code == 400
    finally:
        served.close()


@pytest.mark.vulkan
def test_requests_with_a_schema_have_drafts_beside_others(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reply tells of its own drafts, and /metrics of all, by their place in a step."""
    pytest.importorskip("llguidance", reason="JSON by a schema needs llguidance")
    monkeypatch.setattr(scheduler, "best_share", always_shared)
    monkeypatch.setattr(scheduler, "LOST_STEPS", 1e9)
    served = Served(device, Limits(), parallel=2, n_ctx=256, drafts=Drafts(7))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a_long_name_of_a_property": {"enum": ["one", "another"]}, "and_of_another_property": {"type": "boolean"}},
        "required": ["a_long_name_of_a_property", "and_of_another_property"],
    }

    asked = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}

    def reply(prompt: str) -> Any:
        return served.text(prompt=prompt, max_tokens=90, response_format=asked, logprobs=1)

    try:
        with ThreadPoolExecutor(2) as pool:
            replies = list(pool.map(reply, ("A thing: ", "Another thing: ")))
        for found in replies:
            assert len(found["choices"][0]["logprobs"]["tokens"]) == found["usage"]["completion_tokens"]
            assert found["timings"]["draft_n"] >= found["timings"]["draft_n_accepted"] > 9, "what alone may come is drafted"
        lines = [line.rsplit(" ", 1) for line in served.client.get("/metrics").text.splitlines() if not line.startswith("#")]
        told = {name: float(value) for name, value in lines}
        name = "vkback_spec_decode_num"
        for total, key in (("draft_tokens", "draft_n"), ("accepted_tokens", "draft_n_accepted")):
            assert told[f"{name}_{total}_total"] == sum(found["timings"][key] for found in replies)
        places = [told[key] for key in told if key.startswith(f"{name}_accepted_tokens_per_pos_total")]
        assert sum(places) == told[f"{name}_accepted_tokens_total"] and places == sorted(places, reverse=True)
        assert told["vkback_steps_total"] < sum(found["usage"]["completion_tokens"] for found in replies)
    finally:
        served.close()
