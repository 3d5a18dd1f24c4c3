"""Drafts behind the server: a request that runs alone has them, and is told."""

from __future__ import annotations

from typing import Any

import pytest
from test_server import Served

from vkback.device import Device
from vkback.engine.drafts import Drafts, StepTimes
from vkback.server.app import Limits


@pytest.mark.vulkan
@pytest.mark.parametrize("parallel", [1, 4])
def test_a_request_that_runs_alone_drafts(parallel: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimes, "of_seconds", lambda plain, by_class: StepTimes(dict.fromkeys(by_class, 1.2)))  # on a busy machine, too
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
