"""vkback graph: costs, lifetimes, and the two printed documents that the listing and the IR are held against, line by line."""

from __future__ import annotations

import json
import lzma
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cli_kit import call
from tiny_models import ALL_TINY

from vkback.cli import main
from vkback.graph import Graph, Node, Tensor
from vkback.models.registry import Model
from vkback.models.synth import write_outline
from vkback.ops.attention.chain import padded
from vkback.ops.cost import total
from vkback.ops.glu import GLU
from vkback.ops.lowering import PlanError
from vkback.ops.op import OPS, cost_rule
from vkback.paths import builtin_model
from vkback.plan.cost.elementary import elementary
from vkback.plan.cost.liveness import Listing, listing
from vkback.report import graph_ir, graph_text

DATA = Path(__file__).parents[1] / "data"

NAMES = (
    (r"\b(attn_rms|ffn_rms)-", "norm-"),
    (r"\bresult_rms\b", "norm"),
    (r"cur-N \(reshaped\)", "cur-N"),
    (r"cur_rope-", "cur-"),
    (r"\bkqv_out-", "kqv_merged_cont-"),
    (r"\battn_out-", "kqv_out-"),
    (r"\bffn_swiglu-", "ffn_gate_par-"),
    (r"\bcache_([kv])_lN \(view\)", r"\1_cache_view-N"),
    (r"\bcache_([kv])_lN: x->y", r"\1_cache_view-N: x->y"),
    (r"\btokens\b", "inp_tokens"),
    (r"\bpos\b", "inp_pos"),
)
"""Our names of values, each a name of its own, and the document's, which are ggml's and serve for several."""

WORDS = ((r"\(MUL_MAT\)", "(MAT_MUL)"), (r"\(CPY\)", "(STORE)"), (r"x\+y \(ADD\)", "x+y"), (r"silu\(x\)", "unary(x) (SILU?)"))
"""Our words for ops, which are ggml's, and the document's."""

CACHE = "our caches are [heads, rows, head size], the document's one long row, and that of V is transposed"
STORE = "a store writes the F16 values: 2 bytes each; the document has 16, four times the F32 values' bytes"
EMBEDDING = "a row of the embedding is read as it lies in the file, in Q4_K, not as the floats that it becomes"
EXACT = "we print the bytes, too"
NO_GATHER = "with one token there is no row to pick in the last layer, and our graph has no node that would"
EXPLAINED = {
    ("2048, [1024, 1]", "2048, [128, 1, 8]"): CACHE,
    ("2048, [1, 1024]", "2048, [128, 1, 8]"): CACHE,
    ("x: cache_k_lN, 67108864, [33554432, 1]", "x: cache_k_lN, 67108864, [128, 32768, 8]"): CACHE,
    ("x: cache_v_lN, 67108864, [33554432, 1]", "x: cache_v_lN, 67108864, [128, 32768, 8]"): CACHE,
    ("y: k_cache_view-N, 2048, [1024, 1]", "y: k_cache_view-N, 2048, [128, 1, 8]"): CACHE,
    ("y: v_cache_view-N, 2048, [1, 1024]", "y: v_cache_view-N, 2048, [128, 1, 8]"): CACHE,
    ("Vcur-N: transpose(x)", "Vcur-N: reshape(x)"): CACHE,
    ("4096, [1, 1024]", "4096, [128, 8]"): CACHE,
    ("x: Vcur-N, 4096, [1, 1024]", "x: Vcur-N, 4096, [128, 8]"): CACHE,
    ("costs: {'write': 16384, 'tempsize': 106496}", "costs: {'write': 2048, 'tempsize': 106496}"): STORE,
    ("costs: {'write': 16384, 'tempsize': 102400}", "costs: {'write': 2048, 'tempsize': 102400}"): STORE,
    ("costs: {'read': 49156, 'tempsize': 49152}", "costs: {'read': 6916, 'tempsize': 49152}"): EMBEDDING,
    ("x: node_2808, 49152, [12288, 1]", "x: kqv_out-N, 49152, [12288, 1]"): NO_GATHER,
    ("y: node_2809, 49152, [12288, 1]", "y: l_out-N, 49152, [12288, 1]"): NO_GATHER,
}
"""Lines that differ, the document's and ours, after names and words: without margin, layers' numbers as N."""


def stored(name: str) -> list[str]:
    return lzma.decompress((DATA / name).read_bytes()).decode().splitlines()


def outline(name: str, tmp_path: Path, layers: int | None = None) -> Model:
    write_outline(name, tmp_path / "outline.gguf", layers=layers)
    return Model.open(tmp_path / "outline.gguf")


def listed(model: Model, tokens: int = 1, n_ctx: int = 32768, *, built: bool = False) -> Listing:
    graph, n_kv = model.graph(tokens, n_ctx, head="last"), min(n_ctx, padded(tokens))
    return listing(graph if built else elementary(graph, n_kv), n_kv)


@cache
def in_their_words(line: str) -> str:
    """A line of ours, layers' numbers as N, with the document's names and words; types of weights, which only we print, left out."""
    for pattern, text in (*NAMES, *WORDS, (r", (Q4_K|Q6_K|F32)$", "")):
        line = re.sub(pattern, text, line)
    return line


LAYER = re.compile(r"(?<=[a-z]-)\d+\b|(?<=cache_[kv]_l)\d+\b|(?<=blk\.)\d+\b")


def margin_and_text(line: str, width: int) -> tuple[str, str]:
    return line[:width], LAYER.sub("N", line[width:].strip())


def test_the_listing_of_mistral_large_is_the_documents_line_by_line(tmp_path: Path) -> None:
    theirs = [re.sub(r"(\d)\.0\b", r"\1", line) for line in stored("listing_mistral_large.txt.xz")]  # it prints bytes as floats
    whole = listed(outline("mistral-large-123b-Q4_K", tmp_path))
    ours = list(graph_text.text(whole))

    def totals(lines: list[str]) -> tuple[dict[str, str], list[str]]:
        """Totals by kind, and the lines behind them."""
        end = next(i for i, line in enumerate(lines) if i > 1 and ": " not in line)
        return {kind: figure for kind, _, figure in (line.strip().partition(": ") for line in lines[2:end])}, lines[end:]

    assert theirs[:2] == ours[:2] == ["Size of temporary storage is up to 393216 bytes.", "Total cost:"]
    (their_sums, theirs), (our_sums, ours) = totals(theirs), totals(ours)
    assert our_sums.pop("read").split(" (") == [their_sums.pop("read"), "68864502536 bytes)"] and EXACT
    assert (their_sums.pop("write"), our_sums.pop("write")) == ("0.003 GiB", "352.000 KiB (360448 bytes)") and STORE
    assert their_sums == our_sums
    assert our_sums["fmul"] == "1.22288e+11"

    gather = next(i for i, line in enumerate(theirs) if "node_2808: get_rows" in line)
    after = next(i for i, line in enumerate(theirs) if "ffn_inp-87: x+y" in line)
    width, seen = 2 * whole.n_lanes, set()
    for number, (their, our) in enumerate(zip(theirs[:gather] + theirs[after:], ours, strict=True)):
        (their_margin, their_text), (our_margin, our_text) = margin_and_text(their, width), margin_and_text(our, width)
        our_text = in_their_words(our_text)
        if number < gather:  # behind it, without two values, other lanes are free
            assert their_margin == our_margin, f"line {number}: {their!r}, ours {our!r}"
        if their_text != our_text:
            assert (their_text, our_text) in EXPLAINED, f"line {number}: {their!r}, ours {our!r}"
            seen.add((their_text, our_text))
    assert seen == set(EXPLAINED)


def test_the_forward_ir_of_smollm_is_the_documents(tmp_path: Path) -> None:
    model = outline("smollm-135m-Q8_0", tmp_path)
    theirs = [line.replace("CKIRGraph:", "Graph:") for line in stored("forward_ir_smollm_135m.txt.xz")]  # the type of that program
    assert list(graph_ir.forward(model.hp, model.graph(1, 2, head="last"), 2)) == theirs


@pytest.mark.parametrize("shape", ["tiny-gpt2", "tiny-granitehybrid", "tiny-deepseek2", "tiny-gpt-oss", "tiny-qwen3moe", "tiny-gemma3"])
def test_every_value_of_the_ir_is_made_before_it_is_read(shape: str, tmp_path: Path) -> None:
    model = outline(f"{shape}-Q8_0", tmp_path)
    lines = list(graph_ir.forward(model.hp, model.graph(2, 64, head="last"), 64))[2:]
    made: set[str] = set()
    for line in lines:
        assert set(re.search(r"inputs=\[(.*)\]", line)[1].split(",")) <= made | {"IN"}, line  # type: ignore[index]
        made.add(":".join(line.split()[:2]))
    assert len({line.split()[0] for line in lines}) == model.hp.n_layer


ATTENTION_SHAPES = ((1, 3, 1, 0), (3, 4, 2, 0), (5, 2, 2, 3))


@pytest.mark.parametrize(("n", "n_head", "n_kv_heads", "window"), ATTENTION_SHAPES)
def test_the_chain_of_attention_computes_what_it_stands_for(n: int, n_head: int, n_kv_heads: int, window: int) -> None:
    rng = np.random.default_rng(1)
    q = Tensor("q_rope-0", "F32", (n, n_head, 8))
    cache_k, cache_v = (Tensor(f"cache_{name}_l0", "F16", (n_kv_heads, 40, dim), "state") for name, dim in (("k", 8), ("v", 16)))
    params = {"scale": 0.3} | ({"window": window} if window else {})
    node = Node(
        "FLASH_ATTN_EXT",
        (q, cache_k, cache_v, Tensor("pos", "I32", (n,), "input")),
        (Tensor("kqv_out-0", "F32", (n, n_head * 16)),),
        params,
    )
    pos = np.arange(n)
    values = {t.name: rng.normal(size=t.shape) for t in (q, cache_k, cache_v)}
    chain = cost_rule(node).elementary(node, 32)
    rows = chain[3].outputs[0].shape[-1]
    hidden = (np.arange(rows) > pos[:, None]) | (np.arange(rows) <= pos[:, None] - (window or rows))
    values["KQ_mask" if rows == 32 else "KQ_mask_swa"] = np.where(hidden, -np.inf, 0.0)  # the mask's padding left out
    for step in chain:
        x = [values[t.name] for t in step.inputs]
        result = step.params["view"].of(x[0]) if step.op == "VIEW" else OPS[step.op].reference(x, step.params)[0]
        values[step.name] = result.reshape(step.outputs[0].shape)
    expected = OPS[node.op].reference([values["q_rope-0"], values["cache_k_l0"], values["cache_v_l0"], pos], params)[0]
    np.testing.assert_allclose(values["kqv_out-0"], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", sorted(GLU))
def test_a_gated_unit_is_its_activation_and_a_product(name: str) -> None:
    gate, up = Tensor("ffn_gate-3", "F32", (2, 6)), Tensor("ffn_up-3", "F32", (2, 6))
    node = Node(name, (gate, up), (Tensor(f"ffn_{name.lower()}-3", "F32", (2, 6)),), {})
    chain = OPS[name].elementary(node, 32)
    if name in ("SWIGLU_OAI", "SWIGLU_CLAMP"):  # they clamp; ggml has no op of one operand for its gate
        assert chain == []
        return
    rng = np.random.default_rng(2)
    values = {t.name: rng.normal(size=t.shape) for t in (gate, up)}
    for step in chain:
        values[step.name] = OPS[step.op].reference([values[t.name] for t in step.inputs], step.params)[0]
    expected = OPS[name].reference([values["ffn_gate-3"], values["ffn_up-3"]], {})[0]
    np.testing.assert_allclose(values[node.name], expected, rtol=1e-13)
    assert OPS[name].arithmetic(node, 32) == total(OPS[s.op].arithmetic(s, 32) for s in chain)


def test_every_op_of_a_model_has_a_rule_of_costs(tmp_path: Path) -> None:
    """And so has what fusion makes of them; ops beside any model's graph may do without."""
    used = {"LINEAR", "ATTN_DECODE", "QKV_ROPE_SET_ROWS", "RMS_NORM_MUL", "ADD_RMS_NORM_MUL", "MOE_ROUTER", "QUANTIZE_Q8_1", "ROPE_ANGLES"}
    for shape in ALL_TINY:
        model = outline(f"{shape}-Q8_0", tmp_path)
        graph = model.graph(2, 64, head="last") if model.architecture.causal else model.text_graph(2, 64, model.text_kinds()[-1])
        used |= {node.op for form in (graph, elementary(graph, 32)) for node in form.nodes} - {"VIEW"}
    for name in used:
        node = next(iter(OPS[name].cases())).build().node
        assert all(n >= 0 for n in OPS[name].arithmetic(node, 32).values()), name
    with pytest.raises(PlanError, match="no rule says what it costs; expected a method `arithmetic` on its op"):
        OPS["SAMPLE"].arithmetic(next(iter(OPS["SAMPLE"].cases())).build().node, 32)


def test_costs_by_hand(tmp_path: Path) -> None:
    """demo-dense, one token: every figure from the sizes alone."""
    model = Model.open(builtin_model("demo-dense"))
    hp = model.hp
    whole = listed(model, n_ctx=64)
    q, kv = hp.n_head * hp.head_dim_k, hp.n_head_kv * hp.head_dim_k
    matrices = hp.n_layer * hp.n_embd * (2 * q + 2 * kv + 3 * hp.n_ff) + hp.n_vocab * hp.n_embd
    attention = hp.n_layer * (2 * 32 * q + 3 * 32 * hp.n_head)
    norms = (2 * hp.n_layer + 1) * 3 * hp.n_embd
    assert whole.cost["fmul"] == matrices + attention + norms + hp.n_layer * (3 * (q + kv) + hp.n_ff)
    assert whole.cost["fadd"] == hp.n_layer * (2 * hp.n_embd + 3 * 32 * hp.n_head + 2 * hp.n_ff)
    assert whole.cost["fsin"] == hp.n_layer * (q + kv)
    assert whole.cost["sqrt"] == 2 * hp.n_layer + 1
    assert whole.cost["write"] == hp.n_layer * 2 * 2 * kv
    tables = sum(t.nbytes for name, t in model.file.tensors.items() if name != "token_embd.weight")
    tied = "output.weight" not in model.file.tensors
    table = model.file.tensors["token_embd.weight"].nbytes
    caches_and_inputs = hp.n_layer * 2 * 32 * kv * 2 + 4 * 32 * 32 + 4 + 4  # F16 rows; the mask, pos and tokens once
    assert whole.cost["read"] == tables + table * tied + table // hp.n_vocab + caches_and_inputs


def test_costs_of_experts_by_hand() -> None:
    """demo-moe, one token, as above: a router, and of every expert layer the experts used."""
    model = Model.open(builtin_model("demo-moe"))
    hp = model.hp
    whole = listed(model, n_ctx=64)
    q, kv, used = hp.n_head * hp.head_dim_k, hp.n_head_kv * hp.head_dim_k, hp.n_expert_used
    experts = used * hp.n_ff_expert
    matrices = hp.n_embd * (2 * q + 2 * kv + hp.n_expert + 3 * experts)
    head_norms = 3 * (q + kv) if "blk.0.attn_q_norm.weight" in model.file.tensors else 0
    router = hp.n_expert + used  # softmax over all, times the scale
    layer = matrices + 2 * 32 * q + 3 * 32 * hp.n_head + 2 * 3 * hp.n_embd + head_norms + 3 * (q + kv) + router + experts + used * hp.n_embd
    assert whole.cost["fmul"] == hp.n_layer * layer + 3 * hp.n_embd + hp.n_vocab * hp.n_embd
    assert whole.cost["fexp"] == hp.n_layer * (32 * hp.n_head + hp.n_expert + experts)
    read = {line.node.name: line.cost["read"] for line in whole.lines if line.node.op == "MUL_MAT_ID"}
    for kind in ("gate", "up", "down"):
        whole_tensor = model.file.tensors[f"blk.0.ffn_{kind}_exps.weight"].nbytes
        assert read[f"ffn_moe_{kind}-0"] == whole_tensor // hp.n_expert * used


@pytest.mark.parametrize("shape", [f"tiny-{a}" for a in ("llama", "mixtral", "gpt-oss", "gemma3", "deepseek2", "granitehybrid")])
@pytest.mark.parametrize("tokens", [1, 3])
def test_both_granularities_cost_the_same(shape: str, tokens: int, tmp_path: Path) -> None:
    """But for the mask, which only the elementary form reads, and positions, which it reads less often or not at all."""
    model = outline(f"{shape}-Q8_0", tmp_path)
    costs = [listed(model, tokens, 64, built=built).cost for built in (False, True)]
    reads = [cost.pop("read") for cost in costs]
    assert costs[0] == costs[1]
    assert -4 * tokens <= reads[0] - reads[1] <= 2 * 4 * 32 * 64


def test_experts_count_as_far_as_they_are_used(tmp_path: Path) -> None:
    model = outline("tiny-mixtral-Q8_0", tmp_path)
    size = model.file.tensors["blk.0.ffn_gate_exps.weight"].nbytes // 5
    for tokens, experts in ((1, 2), (2, 4), (8, 5)):
        first = next(line for line in listed(model, tokens, 64).lines if line.node.op == "MUL_MAT_ID")
        assert first.cost["read"] == experts * size


def test_lifelines_follow_values_to_their_last_use() -> None:
    graph = Graph()
    x = Tensor("x", "F32", (1, 4), "input")
    w = Tensor("w", "F32", (4,), "weight")
    a = graph.emit("MUL", "a-0", "F32", (1, 4), (x, w))
    b = graph.emit("SILU", "b-0", "F32", (1, 4), (a,))
    c = graph.emit("ADD", "c-1", "F32", (1, 4), (a, a))
    graph.outputs = (graph.emit("ADD", "d", "F32", (1, 4), (c, b)),)
    found = listing(graph, 32)
    assert [line.alive for line in found.lines] == [16, 32, 48, 32]
    assert list(graph_text.nodes(found)) == [
        "      ",
        "      == layer 0 ==",
        "      ",
        "<-----a-0: x*y (MUL)",
        "|       16, [4, 1]",
        "|       costs: {'fmul': 4, 'read': 32, 'tempsize': 16}",
        "|       x: x, 16, [4, 1]",
        "|       y: w, 16, [4, 1], F32",
        "|     ",
        "| <---b-0: silu(x)",
        "| |     16, [4, 1]",
        "| |     costs: {'fadd': 8, 'fdiv': 4, 'fexp': 4, 'tempsize': 32}",
        ">-----  x: a-0, 16, [4, 1]",
        "| |   ",
        "| |   == layer 1 ==",
        "| |   ",
        "| | <-c-1: x+y (ADD)",
        "| | |   16, [4, 1]",
        "| | |   costs: {'fadd': 4, 'tempsize': 48}",
        ">-----  x: a-0, 16, [4, 1]",
        ">-----  y: a-0, 16, [4, 1]",
        "  | | ",
        "  | | d: x+y (ADD)",
        "  | |   16, [4, 1]",
        "  | |   costs: {'fadd': 4, 'tempsize': 32}",
        "  | |   not used by other computations",
        "  | >-  x: c-1, 16, [4, 1]",
        "  >---  y: b-0, 16, [4, 1]",
    ]


def test_formats_and_layers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def out(*options: str) -> str:
        assert call(monkeypatch, main.main, "graph", "--shape", "tiny-qwen3moe-Q8_0", "-c", "64", *options) == 0
        return capsys.readouterr().out

    data = json.loads(out("--json", "--n-tokens", "2"))
    assert data["n_kv"] == 32 and data["total"]["fmul"] == sum(n["cost"].get("fmul", 0) for n in data["nodes"])
    assert data["peak_temporary_bytes"] == max(n["temporary_bytes"] for n in data["nodes"])
    experts = next(n for n in data["nodes"] if n["name"] == "ffn_moe_topk-0" or n["op"] == "TOPK_MOE")
    assert [t["name"] for t in experts["outputs"]] == ["ffn_moe_weights-0", "ffn_moe_topk-0"]
    text = out("--layers", "1:2")
    assert "Listed are layers 1 to 1:" in text and "== layer 1 ==" in text and "== layer 0 ==" not in text
    assert "topk_moe(x), output 1" in text
    assert out("--layers", ":1", "-f", "list").splitlines()[0].split()[1] == "RMS_NORM"
    page = out("-f", "html")
    assert page.count("<details") == 1 + 3 and "http" not in page and "<svg" in page
    picture = out("-f", "dot")
    assert picture.count("{") == picture.count("}") and picture.count("subgraph cluster_") == 3
    defined = set(re.findall(r"^\s*(n\d+) \[", picture, re.M))
    assert {n for pair in re.findall(r"(n\d+) -> (n\d+)", picture) for n in pair} <= defined
    assert len(out("--nodes", "built").splitlines()) < len(out().splitlines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layers", "2:1"), "--layers 2:1: expected A:B with 0 <= A < B <= 6"),
        (("--layers", "one"), "--layers one: expected A:B"),
        (("-f", "xml"), "--format xml: expected one of text, list, ir, dot, json, html"),
        (("--shape", "tiny-llama-Q8_0", "-m", "demo-dense"), "--shape and --model exclude each other"),
        (("-c", "8", "-d", "8"), "--ctx 8: 1 tokens behind 8 others need 9 rows"),
    ],
)
def test_what_cannot_be_listed_is_an_error(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, main.main, "graph", *options) == 2
    assert capsys.readouterr().err.startswith(f"vkback: error: {message}")
