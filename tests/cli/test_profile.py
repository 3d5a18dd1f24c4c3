"""vkback profile: what kernels count for, that their times add up, and the pictures."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for
from processes import run_program
from typer.testing import CliRunner

from vkback.cli import main as cli
from vkback.device import Device
from vkback.engine import engine as engine_module
from vkback.engine.engine import Engine
from vkback.engine.sampler import add_sampler
from vkback.models import Model
from vkback.ops.dispatch import Dispatch
from vkback.paths import builtin_model
from vkback.plan.cost.forecast import Costs
from vkback.plan.planner import plan
from vkback.report import profile_text as text
from vkback.report.profile_page import _numbers, page
from vkback.shader import Variant
from vkback.timing import profile_model
from vkback.timing.math_rate import MathRate
from vkback.timing.modules import Module, Share, label_parts, node_path, shares, weight_path
from vkback.timing.profile import CLOCKS, KernelCost, Phase
from vkback.timing.profile_model import Profile, ProfileError, Speeds, profile
from vkback.tuning.lookup import Overrides, Tuning


def test_weights_and_nodes_have_modules() -> None:
    assert weight_path("blk.3.attn_q.weight") == ("blk", "3", "attn", "q")
    assert weight_path("blk.3.attn_q.bias") == ("blk", "3", "attn", "q")
    assert weight_path("blk.3.attn_norm.weight") == ("blk", "3", "attn_norm")
    assert weight_path("blk.0.attn_q_norm.weight") == ("blk", "0", "attn", "q_norm")
    assert weight_path("blk.11.ffn_gate_exps.weight") == ("blk", "11", "ffn", "gate_exps")
    assert weight_path("blk.2.post_attention_norm.weight") == ("blk", "2", "post_attention_norm")
    assert weight_path("output_norm.weight") == ("output_norm",)
    assert node_path("kqv_out-5") == ("blk", "5", "attn") and node_path("Qcur_rope-1.qkv") == ("blk", "1", "attn")
    assert node_path("ffn_moe_topk-2") == ("blk", "2", "ffn") and node_path("l_out-7") == ("blk", "7")
    assert node_path("rope_angles.0") == ("rope_angles",) and node_path("inp_embd") == ("token_embd",)
    assert label_parts("ffn_moe_swiglu-12.q8_1") == ("ffn_moe_swiglu.q8_1", "12")


@pytest.mark.parametrize("name", ["demo-dense", "demo-moe"])
def test_every_kernel_of_a_token_counts_once(name: str) -> None:
    """On a planned H200: parts sum to one, every matrix of the file is there, no module is called after a whole layer's kernels."""
    model = Model.open(builtin_model(name))
    graph = model.graph(1, 128, head="last")
    add_sampler(graph, greedy=True)
    sizes = {n: t.nbytes for n, t in model.file.tensors.items()}
    found = [shares(d, sizes) for d in plan(graph, planned_for("nvidia_h200_linux")).dispatches()]
    assert all(sum(s.part for s in some) == pytest.approx(1.0) for some, _ in found)
    matrices = {s.matrix for some, _ in found for s in some}
    assert {n for n, t in model.file.tensors.items() if len(t.shape) > 1} <= matrices
    (qkv,) = [some for some, _ in found if any(s.matrix == "blk.0.attn_q.weight" for s in some)]
    assert [s.path[-1] for s in qkv] == ["q", "k", "v"]
    assert qkv[0].part == pytest.approx(sizes["blk.0.attn_q.weight"] / sum(sizes[f"blk.0.attn_{x}.weight"] for x in "qkv"))
    tops = {s.path[0] for some, _ in found for s in some}
    assert {"blk", "token_embd", "output", "sample"} <= tops


def cost(name: str, layer: int, gpu_us: float, start_us: float, nbytes: int = 1000, flops: int = 4000) -> KernelCost:
    dispatch = Dispatch(Variant("gemv/gemv.comp"), (), b"", (1, 1, 1), "LINEAR", f"{name}-{layer}", "a row", nbytes, flops)
    share = Share(("blk", str(layer), "ffn", name), 1.0, f"blk.{layer}.ffn_{name}.weight")
    fused = (f"blk.{layer}.ffn_norm.weight",)
    return KernelCost(
        layer, dispatch.label, "LINEAR", dispatch, (share,), fused, 2, gpu_us, 5.0, nbytes, flops, gpu_us / 2, start_us, gpu_us / 2
    )


@pytest.fixture
def made() -> Profile:
    """Two layers, two runs, by hand."""
    kernels = tuple(
        cost(name, layer, 10.0 * (1 + layer), 30.0 * layer + 5 * n) for layer in (0, 1) for n, name in enumerate(("gate", "down"))
    )
    phase = Phase("decode (2 tokens)", 1, 2, kernels, 100.0, 50.0, "timestamps", ("a note",), 12.0, 30.0)
    speeds = Speeds(2.0, 0.5, 4, 1, 9, 256, 0.308, 0.192, 40.47)
    return Profile(
        "llama ?B <Q8_0>", "GPU & co", "driver 1", 2, 64, 128, "auto", 4 << 30, speeds, (phase,), Costs(1.0, 2.0, 1.0, "made up"), None
    )


def test_the_report_by_hand(made: Profile) -> None:
    lines = list(text.report(made))
    assert max(map(len, lines)) <= 80
    at = lines.index("GPU Profile Report")
    assert lines[at + 2].split() == ["Kernel", "Time", "(ms)", "%"]
    assert lines[at + 4].split() == ["gemv:ffn.gate:L1", "0.020", "33.3"]
    assert lines[at + 9].split() == ["TOTAL", "0.060", "100.0"]
    rates = next(line for line in lines if line.startswith("gemv:ffn.gate:L1") and line.split()[1] != "0.020")
    # 1000 bytes twice in 20 us: 0.1 GB/s, a tenth of the read rate; 4000 operations twice: 0.4 GFLOPS; forecast half
    assert rates.split()[1:] == ["0.10", "10.0", "0.4", "0.010", "2.00"]
    joined = " ".join(" ".join(lines).split())
    # 40 us of two runs are no stage's; replays without stages take 30 us, of which 12 in the call
    assert "GPU 0.060 ms of 0.100 ms wall of the same replays: 40.0% is the gap, 20 us a replay: 15 us before the first stage" in joined
    assert "(submit, of it 6 us in the host's call;" in joined and "of the end); 5 us unexplained" in joined
    assert "overhead of timestamps: +20.0% of 25.0 us a run without them" in joined
    assert lines[-1] == "[metrics] tok/s total=6.28 prefill=46.88 decode=6.33"
    assert "[metrics] ttft=308.0ms prefill=192.0ms decode=40470.0ms total=40778.0ms" in lines
    assert "load 2000 ms: 4096.0 MiB at 2.15 GB/s" in lines


def test_a_cost_of_measuring_below_zero_is_none(made: Profile) -> None:
    """Under load the runs without timestamps were the slower ones: "-31.5%" said nothing."""
    (phase,) = made.phases
    said = text.overhead_text(replace(phase, plain_us=90.0))
    assert said.startswith("overhead of timestamps: not measurable (45.0 us a run without them") and "-" not in said


def test_products_of_several_tokens_say_that_they_are() -> None:
    for source, name in (("gemm/f32.comp", "gemm"), ("gemm/coop_mat.comp", "gemm"), ("gemm/pack_f16.comp", "pack_f16")):
        one = cost("down", 0, 1.0, 0.0)
        assert replace(one, dispatch=replace(one.dispatch, kernel=Variant(source))).kind == f"{name}:ffn.down"


def test_the_tree_s_columns_stay_straight_beyond_a_second(made: Profile) -> None:
    (phase,) = made.phases
    slow = replace(phase, kernels=tuple(replace(k, gpu_us=k.gpu_us * 1e6) for k in phase.kernels))
    lines = list(text.tree(slow.tree("llama")))
    places = [[at for at, c in enumerate(line) if c == "|"] for line in lines if "ms" in line or line.startswith("Module")]
    assert any("60000.000ms" in line for line in lines) and all(p == places[0] for p in places)


def test_the_tree_by_hand(made: Profile) -> None:
    top = made.phases[0].tree("llama")
    assert top.total_gpu_us == pytest.approx(60.0) and top.calls == 2 and top.parts["blk"].parts["1"].total_gpu_us == pytest.approx(40.0)
    lines = list(text.tree(top))
    assert lines[2].split("|")[0] == "llama          " and lines[2].split("|")[4].strip() == "0.060ms"
    assert [line.split("|", 1)[0].rstrip() if "|" not in line[:6] else line.split(" | ")[0].rstrip() for line in lines[3:]] == [
        "└── blk",
        " ├── 0",
        " │├── ffn_norm",
        " │└── ffn",
        " │ ├── gate",
        " │ └── down",
        " └── 1",
        "  ├── ffn_norm",
        "  └── ffn",
        "   ├── gate",
        "   └── down",
    ]
    many = Module("m")
    for i in range(12):
        many.at(("blk", str(i), "ffn", "up")).own_calls = 1
    assert any("... 8 more" in line for line in text.tree(many)) and not any("more" in line for line in text.tree(many, True))


class Checker(HTMLParser):
    """Counts elements, and notes what is opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_the_page_stands_alone(made: Profile) -> None:
    html = page(made)
    checker = Checker()
    checker.feed(html)
    assert not checker.wrong and not checker.open
    assert checker.count["svg"] == 1 and checker.count["circle"] == 2 and checker.count["section"] == 1 and checker.count["tr"] == 3
    assert not re.search(r"(src|href)=|https?://|@import|url\(", html), "it must need no network"
    assert "llama ?B &lt;Q8_0&gt;" in html and "GPU &amp; co" in html and "<Q8_0>" not in html


def test_the_page_holds_its_figures_once(made: Profile) -> None:
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', page(made))
    assert held is not None
    data = json.loads(held[1])
    assert data["first"] == 0 and data["rate"] == made.costs.read_gb_s
    (phase,) = data["phases"]
    strings = data["strings"]
    # two runs: half of 10 and 20 us each; 5 and 10 us in the last
    assert [[strings[k[1]], strings[k[2]], strings[k[3]], *k[4:]] for k in phase["kernels"]] == [
        ["gate-0", "gemv:ffn.gate:L0", "a row", "ffn", 5.0, 2.5, 1000, 4000, 0.0, 5.0],
        ["down-0", "gemv:ffn.down:L0", "a row", "ffn", 5.0, 2.5, 1000, 4000, 5.0, 5.0],
        ["gate-1", "gemv:ffn.gate:L1", "a row", "ffn", 10.0, 5.0, 1000, 4000, 30.0, 10.0],
        ["down-1", "gemv:ffn.down:L1", "a row", "ffn", 10.0, 5.0, 1000, 4000, 35.0, 10.0],
    ]
    assert phase["layers"] == {"ffn.gate": [5.0, 10.0], "ffn.down": [5.0, 10.0]}
    name, own, whole, _, cpu, calls, fused, (blk,) = phase["tree"]
    assert (name, own, whole, cpu, calls, fused, blk[0], len(blk[7])) == ("llama", None, 60.0, 20.0, 2, -1, "blk", 2)
    norm = next(part for part in blk[7][0][7] if part[0] == "ffn_norm")
    assert norm[1] is None and strings[norm[6]] == "gemv:ffn.down:L0", "fused into the kernel that came last"


def test_the_page_s_tree_has_the_digits_that_were_measured(made: Profile) -> None:
    """11694.000 ms stood where the text said 11693.529."""
    (phase,) = made.phases
    slow = replace(phase, kernels=tuple(replace(k, gpu_us=11_693_529.4 / len(phase.kernels)) for k in phase.kernels))
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', page(replace(made, phases=(slow,))))
    assert held is not None and json.loads(held[1])["phases"][0]["tree"][2] == 11_693_529.0
    assert "11693.529ms" in "\n".join(text.tree(slow.tree("llama")))


def test_numbers_of_circles_do_not_cover_each_other() -> None:
    found = _numbers([(100.0, 100.0, 9.0)] * 5 + [(300.0, 100.0, 4.0)])
    assert found[0] == (100.0, 100.0) and found[5] == (300.0, 100.0)
    assert all(abs(a[0] - b[0]) > 15 or abs(a[1] - b[1]) > 12 for i, a in enumerate(found) for b in found[:i])


def test_the_page_in_a_browser(made: Profile, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here to draw the page: apt install chromium")
    (tmp_path / "page.html").write_text(page(made), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    drawn = run_program([*command, str(tmp_path / "page.html")])
    assert drawn.returncode == 0, drawn.stderr
    checker = Checker()
    checker.feed(drawn.stdout)
    assert checker.count["svg"] == 3 and checker.count["tr"] == 8 and checker.count["details"] == 6
    assert drawn.stdout.count("us, 0.2 GB/s") == drawn.stdout.count("us, 0.1 GB/s") == 2, "of four bars: 1000 bytes in 5 and 10 us"
    assert '<section class="on">' in drawn.stdout and '<button class="on">decode (2 tokens)' in drawn.stdout, "its script ran"


def test_the_trace_has_complete_events(made: Profile) -> None:
    events = text.trace(made)["traceEvents"]
    kernels = [e for e in events if e["ph"] == "X" and e.get("cat") == "gemv"]
    assert [e["name"] for e in kernels] == [k.name for k in made.phases[0].kernels]
    assert all(e["dur"] > 0 and e["args"]["bytes"] == 1000 for e in kernels)
    (phase,) = [e for e in events if e.get("cat") == "phase"]
    assert kernels[-1]["ts"] + kernels[-1]["dur"] == pytest.approx(phase["ts"] + phase["dur"]) and phase["ts"] == pytest.approx(2e6)


@pytest.fixture(scope="module")
def sentinel() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        schedule = {"sync": "sentinel", "router": "experts", "quantize": "attention"}
        params = {"schedule": schedule, "attention": {"kernel": "decode"}}  # the kernels of prompts have no marks
        tables = SimpleNamespace(for_device=lambda caps: Overrides(Tuning.for_device(caps), params, "test"))
        patch.setattr(engine_module, "Tuning", tables)
        yield


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stated in the place of measured: what they are does not matter here."""
    monkeypatch.setattr(profile_model, "device_costs", lambda device, library: Costs(1.0, 2.0, 1.0, "made up"))
    monkeypatch.setattr(profile_model, "measure_math_rate", lambda device, library, kernel: MathRate(kernel, 1e11, "made up"))


@pytest.mark.vulkan
def test_barrier_free_stages_are_timed_by_clocks(device: Device, sentinel: None, rates: None) -> None:
    if not device.caps.shader_clock:
        pytest.skip(f"kernels of {device.caps.name} cannot read its clock")
    with Engine.load(builtin_model("demo-moe"), device, n_ctx=64, progress=False, ubatch=16) as engine:
        found = profile(engine, 1.0, list(range(1, 17)), 2, 0)
        with pytest.raises(ProfileError, match="need 80 rows; raise --ctx"):
            profile(engine, 1.0, list(range(1, 60)), 4, 0)
    prefill, decode = found.phases
    # Of the prompt's 16 tokens kernels have marks, too.
    assert prefill.method == decode.method == CLOCKS
    assert all("stages by clocks that their kernels read" in phase.notes[0] for phase in found.phases)
    for phase in found.phases:
        assert all(k.gpu_us >= 0 and k.predicted_us > 0 and k.cpu_us > 0 for k in phase.kernels)
        assert phase.gpu_us <= 1.001 * phase.wall_us, "the stages add up to no more than the replays took"
        assert phase.tree("m").total_gpu_us == pytest.approx(phase.gpu_us)
    assert {k.runs for k in decode.kernels} == {2} and decode.tokens == 1 and prefill.tokens == 16
    assert sum(k.label == "result_output" for k in decode.kernels) == 1
    assert found.speeds.tokens == 2 and found.speeds.ttft_s > 0 and np.isfinite(found.speeds.decode_rate)
    lines = list(text.report(found))
    assert max(map(len, lines)) <= 80 and any(line.startswith("├── blk") for line in lines)
    # Without a clock barriers are put back, and the report says so.
    blind = dataclasses.replace(decode, method="timestamps with barriers", notes=())
    assert "its kernels do not read the device's clock" in " ".join(" ".join(text.phase_report(blind, found)).split())


@pytest.mark.vulkan
def test_the_command(made: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    loads: list[dict[str, Any]] = []

    def measured(engine: Engine, load_s: float, prompt: list[int], n: int, batch: int, tell: object, **more: object) -> Profile:
        asked.append((len(prompt), n, batch))
        loads.append(more)
        return made

    monkeypatch.setattr(profile_model, "profile", measured)
    trace, html = tmp_path / "trace.json", tmp_path / "page.html"
    options = ["--prompt-tokens", "16", "-n", "2", "-b", "0", "-c", "64"]
    kept = [tmp_path / f"kept.{ending}" for ending in ("html", "json", "txt")]
    saves = [word for path in kept for word in ("--save", str(path))]
    result = CliRunner().invoke(cli.app, ["profile", *options, "--trace", str(trace), "--html", str(html), *saves])
    assert result.exit_code == 0, result.output
    assert asked == [(16, 2, 0)]
    parts = loads[0]["load"]
    assert list(parts)[:3] == ["driver", "file, plans, memory", "weights"] and all(seconds >= 0 for seconds in parts.values())
    assert loads[0]["free_before"] > 1 << 20
    assert "GPU Profile Report" in result.stdout and "gemv:ffn.gate:L0" in result.stdout and "└── blk" in result.stdout
    assert sum(e.get("cat") == "phase" for e in json.loads(trace.read_text())["traceEvents"]) == 1
    assert html.read_text() == kept[0].read_text() == page(made)
    assert json.loads(kept[1].read_text()) == text.as_data(made) and kept[2].read_text().splitlines() == list(text.report(made, True))
    refused = CliRunner().invoke(cli.app, ["profile", "--save", str(tmp_path / "kept.doc")])
    assert "expected one of html, json, txt" in str(refused.exception)
    data = json.loads(CliRunner().invoke(cli.app, ["profile", "-c", "64", "--json"]).stdout)
    assert data["phases"][0]["gpu_us"] == pytest.approx(60.0) and data["phases"][0]["kernels"][0]["bytes"] == 1000
