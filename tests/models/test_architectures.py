"""Facts of architectures, a row each: names and stages of published models, plans of the tiny ones, files that are refused, bits without
barriers. tests/models/test_references.py compares logits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_paths import planned_for
from make_gguf import write_gguf
from tiny_models import OF_A_KIND, TINY, changed

from vkback.device import Device
from vkback.engine.engine import Engine
from vkback.engine.sampler import add_sampler
from vkback.models import GgufError, GgufFile, Model
from vkback.models.naming import model_description
from vkback.plan.planner import plan
from vkback.plan.schedule import Schedule

H200 = "nvidia_h200_linux"
PROFILES = ("llvmpipe_mesa_22_debian12", "broadcom_v3d_7_1_pi5", "apple_m1_honeykrisp", H200)


def token_plan(model: Model, profile: str, n_ctx: int = 4096, fusion: str = "all") -> Schedule:
    """The schedule of one greedy token."""
    graph = model.graph(1, min(n_ctx, model.hp.n_ctx_train), head="last")
    add_sampler(graph, greedy=True)
    return plan(graph, planned_for(profile), fusion=fusion)


def ops(schedule: Schedule) -> Counter[str]:
    return Counter(d.op for d in schedule.dispatches())


# --- published models ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Token:
    """What a token of a published model takes on an H200.

    stages    before, in and after the layers
    first     the ops before the layers
    barriers  stages that begin with one: the first of a program, the sampler's, and what cannot run barrier-free
    layer     labels of the dispatches of layer 1, one stage after the other
    ops       how many of each there are; given those that matter, or with `all_ops` every one
    """

    name: str
    description: str
    stages: int
    first: str = "GET_ROWS ROPE_ANGLES"
    barriers: int = 3
    layer: str = ""
    ops: dict[str, int] = field(default_factory=dict)
    all_ops: bool = False


DENSE = "Qcur_rope-1.qkv Qcur_rope-1.qkv | kqv_out-1 | ffn_inp-1 | ffn_swiglu-1 | l_out-1"
ALIKE = DENSE.replace(" Qcur_rope-1.qkv |", " |")
"""Q, K and V of one type are one dispatch."""
EXPERTS = DENSE.replace("ffn_swiglu-1", "ffn_moe_logits-1 | ffn_moe_swiglu-1 | ffn_moe_swiglu-1.q8_1")
GPT2 = "Qcur_bias-1.heads.qkv | kqv_out-1 | ffn_inp-1 | ffn_gelu-1 | l_out-1"
GEMMA3 = "Qcur_rope-1.qkv Qcur_rope-1.qkv | kqv_out-1 | attn_out-1 | ffn_geglu-1 | ffn_out-1"
"""Norms behind products and what is added to them are in the prologues of the next products."""
GEMMA4 = "Qcur_rope-1.qkv Qcur_rope-1.qkv Qcur_rope-1.qkv | kqv_out-1 | attn_out-1 | ffn_geglu-1 | ffn_out-1"
GPT_OSS = "Qcur_rope-1.qkv | kqv_out-1 | ffn_inp-1 | ffn_moe_logits_bias-1 | ffn_moe_swiglu_oai-1 | ffn_moe_swiglu_oai-1.q8_1 | l_out-1"
"""As many as of any other model with experts: biases, sinks, window and clamp cost no stage, and no buffer but their own."""
DEEPSEEK2 = (
    "q-1 kv_cmpr_pe-1 | q_nope_absorbed-1 q_pe_rope-1 | kqv_out-1 | kqv_decompressed-1 | ffn_inp-1 | ffn_shexp_swiglu-1 ffn_moe_logits-1"
    " | ffn_shexp_swiglu-1.q8_1 ffn_moe_swiglu-1 | ffn_shexp_out-1 ffn_moe_swiglu-1.q8_1 | l_out-1"
)
"""Two more than other models with experts: Q goes through k_b before attention, what comes out through v_b. The shared
expert costs none."""
SHARED = "Qcur_rope-1.qkv | kqv_out-1 | ffn_inp-1 | ffn_shexp_swiglu-1 ffn_moe_logits-1 | ffn_shared-1 ffn_moe_swiglu-1 | l_out-1"
"""Products with room for it leave their result as Q8_1."""
WHOLE_NORMS = "Qcur_rope-1.qkv Qcur_rope-1.qkv Qcur_rope-1.qkv | kqv_out-1"
"""Q and K normed over all heads, in attention. Their products stay apart: those of a prompt are."""
POST_NORMS = "attn_out-1 | ffn_swiglu-1 | ffn_out-1"
"""Norms behind products are in the prologue of the products that read the sum."""
PARALLEL = "Qcur_rope-1.qkv ffn_swiglu-1 | kqv_out-1 | attn_residual-1 | l_out-1"
"""A stage less than in turn."""
HUNYUAN = (
    "Qcur-1 Kcur-1 Vcur-1 | Kcur_rope-1 Qcur_rope-1 | Qcur_normed-1.heads | kqv_out-1 | ffn_inp-1 | ffn_shexp_swiglu-1 ffn_moe_logits-1"
    " | ffn_shexp_swiglu-1.q8_1 ffn_moe_swiglu-1 | ffn_shared-1 ffn_moe_swiglu-1.q8_1 | l_out-1"
)
MAMBA = "zxBCdt-1 | ssm_scan-1 | ffn_inp-1 | ffn_swiglu-1 | l_out-1"
MAMBA_EXPERTS = (
    "zxBCdt-1 | ssm_scan-1 | ffn_inp-1 | ffn_shexp_swiglu-1 ffn_moe_logits-1 | ffn_shexp_swiglu-1.q8_1 ffn_moe_swiglu-1"
    " | ffn_shared-1 ffn_moe_swiglu-1.q8_1 | l_out-1"
)

DELTA_NET = "linear_attn_qkv_mixed-1.z linear_attn_qkv_mixed-1.z | final_output-1 | attn_residual-1"
"""Of the products those of one type are one, convolution, delta rule and gated norm are one dispatch."""
GATED_EXPERTS = "ffn_shexp_swiglu-1 shared_expert_gate_sigmoid-1 ffn_moe_weights-1 | ffn_shared-1 ffn_moe_swiglu-1 | l_out-1"
"""The gate of the shared expert costs no stage."""


def gpt2(name: str, description: str, layers: int) -> Token:
    """Both embeddings, their sum, then the layers, norms in prologues, GELU in an epilogue. No RoPE."""
    counts = {"GET_ROWS": 2, "ADD": 1, "LINEAR": 4 * layers + 1, "ATTN_DECODE": layers, "SAMPLE": 1}
    return Token(name, description, 2 + 5 * layers + 2, "GET_ROWS GET_ROWS ADD", 3, GPT2, counts, True)


def gemma3(name: str, description: str, layers: int) -> Token:
    """Two kinds of angles; GEGLU and the norms behind products are dispatches of their own nowhere."""
    counts = {"GET_ROWS": 1, "ROPE_ANGLES": 2, "LINEAR": ANY, "ATTN_DECODE": layers, "SAMPLE": 1}
    return Token(name, description, 1 + 5 * layers + 2, "GET_ROWS ROPE_ANGLES ROPE_ANGLES", 3, GEMMA3, counts, True)


ANY = -1
"""A count that depends on which weights have one type."""

GPT_OSS_OPS = {"GET_ROWS": 1, "ROPE_ANGLES": 1, "LINEAR": 5 * 24 + 1, "ATTN_DECODE": 24, "QUANTIZE_Q8_1": 24, "SAMPLE": 1}
DEEPSEEK2_OPS = {"LINEAR_HEADS": 2 * 27, "MLA_ROPE_SET_ROWS": 27, "FLASH_ATTN_EXT": 27}
DEEPSEEK2_OPS |= dict.fromkeys(("CONT", "CONCAT", "PERMUTE", "MUL_MAT", "ROPE", "SET_ROWS"), 0)
DELTA_NET_OPS = {"CONV_DELTA_NET": 30, "ATTN_DECODE": 10, "SIGMOID_GLU": 0, "TOPK_MOE": 0}
RECURRENT_OPS = {"SSM_CONV_SCAN": 36, "ATTN_DECODE": 4}

TOKENS = [
    Token("mistral-small-24b-Q5_K_S:4", "", 1 + 5 * 4 + 2),
    Token("mistral-large-123b-Q2_K:4", "", 1 + 5 * 4 + 2),
    Token("mixtral-8x7b-Q4_K_M", "llama 8x7B Q4_K - Medium", 1 + 7 * 32 + 2, layer=EXPERTS),
    Token("smollm-135m-Q8_0", "llama 256M Q8_0", 1 + 5 * 30 + 2, layer=ALIKE),
    Token("qwen2-7b-Q4_K_M", "qwen2 7B Q4_K - Medium", 1 + 5 * 28 + 2),
    Token("qwen2-14b-Q4_K_M:4", "", 1 + 5 * 4 + 2),
    Token("qwen3-0.6b-Q8_0", "qwen3 0.6B Q8_0", 1 + 5 * 28 + 2),
    Token("phi3-3b-Q4_K_S", "phi3 3B Q4_K - Small", 1 + 5 * 32 + 2),
    Token("smollm3-3b-Q4_K_M", "smollm3 3B Q4_K - Medium", 1 + 5 * 36 + 2),
    gpt2("gpt2-F16", "gpt2 0.1B F16", 12),
    gpt2("gpt2-xl-F16", "gpt2 1.5B F16", 48),
    gpt2("gpt2-xl-Q8_0", "gpt2 1.5B Q8_0", 48),
    gemma3("gemma3-1b-Q4_K_M", "gemma3 1B Q4_K - Medium", 26),
    gemma3("gemma3-4b-Q4_K_M", "gemma3 4B Q4_K - Medium", 34),
    # The product of the logits caps them.
    Token("gemma2-2b-Q8_0", "gemma2 2B Q8_0", 1 + 5 * 26 + 2, layer=GEMMA3.replace("Qcur_rope-1.qkv Qcur_rope-1.qkv", "Qcur_rope-1.qkv")),
    # The norm of V is in attention, the scale of a layer's output in the norms.
    Token("gemma4-31b-Q8_0:6", "", 1 + 5 * 6 + 2, "GET_ROWS ROPE_ANGLES ROPE_ANGLES", 3, GEMMA4, {"LINEAR": 37, "ATTN_DECODE": 6}),
    # With per-layer embeddings a layer takes two stages more. The last 18 of 42 read K and V of layers before, which one barrier orders.
    Token(
        "gemma4-e4b-Q4_K_M",
        "gemma4 E4B Q4_K - Medium",
        3 + 7 * 42 + 1,
        "GET_ROWS GET_ROWS LINEAR ROPE_ANGLES ROPE_ANGLES SCALE",
        4,
        ops={"LINEAR": 302, "ATTN_DECODE": 42},
    ),
    # Nine stages a layer, norms and routers in those of the streams; one more where the gate is sparse, in the first ten.
    Token(
        "gemma3n-e4b-Q4_K_M",
        "gemma3n E4B Q4_K - Medium",
        6 + 9 * 35 + 10 + 9 + 1,
        "GET_ROWS GET_ROWS LINEAR LINEAR MEAN MUL RMS_NORM RMS_NORM_MUL_ADD ROPE_ANGLES ROPE_ANGLES SCALE SQR SQRT",
        8,
        "altup_predicted-1 | laurel_l-1 Qcur_rope-1.qkv Qcur_rope-1.qkv Qcur_rope-1.qkv | laurel_r-1 kqv_out-1 | laurel_out-1 attn_out-1 | "
        "ffn_gate-1 ffn_up-1 | ffn_geglu-1 | ffn_out-1 | altup_corrected-1 | per_layer_geglu-1 | per_layer_out-1",
        {"ATTN_DECODE": 35, "ALTUP_PREDICT_ROUTED": 35, "ALTUP_CORRECT_ROUTED": 35, "RMS_NORM_SUM": 35, "GAUSSIAN_GEGLU": 10},
    ),
    Token(
        "gemma4-26b-a4b-Q8_0:6",
        "",
        1 + 10 * 6 + 2,
        "GET_ROWS ROPE_ANGLES ROPE_ANGLES",
        33,
        GEMMA4.partition("ffn_geglu")[0]
        + "ffn_geglu-1 ffn_moe_logits-1 | ffn_out-1 ffn_moe_weights-1 | ffn_moe_gate_up-1 ffn_moe_scales-1"
        + " | ffn_moe_geglu-1 ffn_moe_weights_scaled-1 | ffn_moe_out-1 | ffn_moe-1 | ffn_moe_combined-1",
    ),
    # 31 of 80 layers have no attention.
    Token("deci-49b-Q4_K_S", "deci 70B Q4_K - Small", 1 + 5 * 49 + 2 * 31 + 2, layer=DENSE, ops={"ATTN_DECODE": 49}),
    Token("gpt-oss-20b-MXFP4", "gpt-oss 20B MXFP4 MoE", 1 + 7 * 24 + 2, layer=GPT_OSS, ops=GPT_OSS_OPS, all_ops=True),
    # The first layer is dense.
    Token("deepseek2-16b-Q4_K_M", "deepseek2 16B Q4_K - Medium", 1 + 8 + 9 * 26 + 2, "GET_ROWS ROPE_ANGLES", 57, DEEPSEEK2, DEEPSEEK2_OPS),
    Token("granite-4-h-1b-Q4_K_S", "granitehybrid 1B Q4_K - Small", 1 + 5 * 40 + 2, "GET_ROWS", 3, MAMBA, RECURRENT_OPS),
    Token("granite-3.3-2b-Q8_0", "granite 3B Q8_0", 1 + 5 * 40 + 2, layer=ALIKE),
    Token("granite-3.1-3b-a800m-Q8_0", "granitemoe 3B Q8_0", 1 + 7 * 32 + 2),
    Token("ministral-3-8b-Q8_0", "mistral3 8B Q8_0", 1 + 5 * 34 + 2, layer=ALIKE),
    Token("seed-oss-36b-Q8_0:4", "", 1 + 5 * 4 + 2, layer=ALIKE),
    Token("qwen3vl-4b-Q8_0", "qwen3vl 4B Q8_0", 1 + 5 * 36 + 2, layer=ALIKE),
    Token("qwen3vlmoe-30b-a3b-Q8_0", "qwen3vlmoe 30B.A3B Q8_0", 1 + 6 * 48 + 2),
    Token("ernie-4.5-0.3b-Q8_0", "ernie4_5 0.3B Q8_0", 1 + 5 * 18 + 2, layer=ALIKE),
    # The first layer is dense.
    Token(
        "ernie-4.5-21b-a3b-Q8_0:4",
        "",
        1 + 6 + 7 * 3 + 2,
        layer=f"{ALIKE.partition(' | ffn_swiglu')[0]} | ffn_shexp_swiglu-1 ffn_moe_logits-1 | ffn_shexp_swiglu-1.q8_1 ffn_moe_swiglu-1"
        " | ffn_shared-1 ffn_moe_swiglu-1.q8_1 | l_out-1",
    ),
    Token("glm-4.5-air-Q8_0:4", "", 1 + 5 + 6 * 3 + 2, layer=SHARED),
    Token(
        "minimax-m2-230b-a10b-Q8_0:4",
        "",
        1 + 6 * 4 + 2,
        "GET_ROWS ROPE_ANGLES",
        3,
        f"{WHOLE_NORMS} | ffn_inp-1 | ffn_moe_weights-1 | ffn_moe_swiglu-1 | l_out-1",
    ),
    Token(
        "glm4-9b-Q8_0",
        "glm4 9B Q8_0",
        1 + 5 * 40 + 2,
        layer=GEMMA3.replace("Qcur_rope-1.qkv Qcur_rope-1.qkv", "Qcur_rope-1.qkv").replace("geglu", "swiglu"),
    ),
    Token("olmo2-7b-Q8_0:4", "", 2 + 5 * 4 + 2, "GET_ROWS ROPE_ANGLES QUANTIZE_Q8_1", 3, f"{WHOLE_NORMS} | {POST_NORMS}"),
    Token(
        "exaone4-1.2b-Q8_0",
        "exaone4 1.2B Q8_0",
        2 + 5 * 30 + 2,
        "GET_ROWS ROPE_ANGLES QUANTIZE_Q8_1",
        3,
        f"Qcur_rope-1.qkv | kqv_out-1 | {POST_NORMS}",
    ),
    Token("exaone4-32b-Q8_0:4", "", 2 + 5 * 4 + 2, "GET_ROWS ROPE_ANGLES QUANTIZE_Q8_1", 3),
    # Heads of 80 are not whole units of 32.
    Token(
        "phi2-3b-Q8_0",
        "phi2 3B Q8_0",
        1 + 5 * 32 + 2,
        layer="Qcur_rope-1.qkv ffn_gelu-1 | kqv_out-1 | kqv_out-1.q8_1 | attn_residual-1 | l_out-1",
    ),
    Token("starcoder2-3b-Q8_0", "starcoder2 3B Q8_0", 1 + 5 * 30 + 2, layer=ALIKE.replace("swiglu", "gelu")),
    Token("command-r-35b-Q8_0:4", "", 1 + 4 * 4 + 2, layer=PARALLEL),
    Token("command-r7b-Q8_0", "cohere2 8B Q8_0", 1 + 4 * 32 + 2, layer=PARALLEL),
    Token("hunyuan-a13b-Q8_0:4", "", 1 + 9 * 4 + 2, layer=HUNYUAN),
    # Both halves side by side; the sum of one with the stream is a stage before the other's.
    Token(
        "falcon-h1-0.5b-Q8_0",
        "falcon-h1 0.5B Q8_0",
        1 + 7 * 36 + 2,
        layer="zxBCdt-1 Qcur_rope-1.qkv | ssm_scan-1 kqv_out-1 | ssm_scan-1.q8_1 | ssm_residual-1 | ffn_inp-1 | ffn_swiglu-1 | l_out-1",
        ops={"SSM_CONV_SCAN": 36, "ATTN_DECODE": 36},
    ),
    Token("mamba2-130m-Q8_0", "mamba2 0.1B Q8_0", 1 + 3 * 24 + 2, "GET_ROWS", 3, "zxBCdt-1 | ssm_scan-1 | l_out-1", {"ATTN_DECODE": 0}),
    # Of four layers the last has attention, which takes its gate in.
    Token("qwen35-9b-Q4_K_M", "qwen35 9B Q4_K - Medium", 1 + 5 * 32 + 2, layer=f"{DELTA_NET} | ffn_swiglu-1 | l_out-1"),
    Token(
        "qwen35moe-35b-a3b-Q4_K_M",
        "qwen35moe 35B.A3B Q4_K - Medium",
        1 + 6 * 40 + 2,
        layer=f"{DELTA_NET} | {GATED_EXPERTS}",
        ops=DELTA_NET_OPS,
    ),
    Token("qwen3next-80b-a3b-Q4_K_M:4", "", 1 + 6 * 4 + 2, layer=f"{DELTA_NET} | {GATED_EXPERTS}"),
    Token(
        "lfm2-1.2b-Q8_0",
        "lfm2 1.2B Q8_0",
        1 + 5 * 10 + 5 * 6 + 2,
        layer="bcx-1 | conv_gated-1 | ffn_inp-1 | ffn_swiglu-1 | l_out-1",
        ops={"SHORT_CONV": 10, "ATTN_DECODE": 6},
    ),
    Token("lfm2-8b-a1b-Q8_0:4", "", 1 + 6 * 2 + 7 + 7 + 2),
    Token("granite-4-h-tiny-Q4_K_S", "granitehybrid 7B.A1B Q4_K - Small", 1 + 7 * 40 + 2, "GET_ROWS", 3, MAMBA_EXPERTS, RECURRENT_OPS),
]


@pytest.mark.parametrize("token", TOKENS, ids=lambda t: t.name)
def test_stages_of_a_token(token: Token, models: Callable[[str], Model]) -> None:
    model = models(token.name)
    assert token.description in ("", model.description)
    s = token_plan(model, H200)
    assert len(s.stages) == token.stages
    assert len(s.stages) - len(s.barrier_free) == token.barriers
    found = [[d.label for d in stage] for stage in s.stages]
    begin = next(i for i, stage in enumerate(found) if any(label.split(".")[0].endswith("-0") for label in stage))
    assert sorted(d.op for stage in s.stages[:begin] for d in stage) == sorted(token.first.split())
    if token.layer:
        assert [stage for stage in found if any(re.search(r"-1(\.|$)", label) for label in stage)] == [
            stage.split() for stage in token.layer.split(" | ")
        ]
    counts = ops(s)
    assert {op: counts[op] for op in token.ops if token.ops[op] != ANY} == {op: n for op, n in token.ops.items() if n != ANY}
    assert not token.all_ops or counts.keys() == token.ops.keys()


@pytest.mark.parametrize(
    ("arch", "keys", "size"),
    [
        ("qwen2", {"block_count": 24, "embedding_length": 1024}, "0.5B"),
        ("qwen2", {"block_count": 24, "embedding_length": 896}, "1B"),
        ("qwen2", {"block_count": 28, "embedding_length": 1536}, "1.5B"),
        ("qwen2", {"block_count": 28, "embedding_length": 3584}, "7B"),
        ("qwen2", {"block_count": 40, "attention.head_count": 20}, "4B"),
        ("qwen2", {"block_count": 40, "attention.head_count": 40}, "13B"),
        ("qwen2", {"block_count": 36}, "3B"),
        ("qwen2", {"block_count": 64}, "32B"),
        ("qwen2", {"block_count": 29}, "?B"),
        ("qwen3", {"block_count": 28, "embedding_length": 1024}, "0.6B"),
        ("qwen3", {"block_count": 28, "embedding_length": 2048}, "1.7B"),
        ("qwen3", {"block_count": 36, "embedding_length": 2560}, "4B"),
        ("qwen3", {"block_count": 36, "embedding_length": 4096}, "8B"),
        ("qwen3", {"block_count": 64}, "32B"),
        ("phi3", {"block_count": 40}, "14B"),
        ("smollm3", {"block_count": 36}, "3B"),
        ("llama", {"block_count": 56, "expert_count": 8}, "8x22B"),
        ("llama", {"block_count": 88}, "?B"),
        ("gemma2", {"block_count": 42}, "9B"),
        ("gemma3n", {"block_count": 30}, "E2B"),
        ("jina-bert-v2", {"block_count": 4}, "33M"),
        ("gemma3n", {"block_count": 35}, "E4B"),
        ("gemma4", {"block_count": 30}, "26B.A4B"),
        ("gemma4", {"block_count": 35}, "E2B"),
        ("llama4", {"expert_count": 16}, "17Bx16E (Scout)"),
        ("granite", {"block_count": 40}, "3B"),
        ("granitemoe", {"block_count": 24}, "?B"),
        ("mistral3", {"block_count": 26}, "3B"),
        ("mistral3", {"block_count": 40}, "14B"),
        ("seed_oss", {"block_count": 64}, "36B"),
        ("qwen3vl", {"block_count": 28, "embedding_length": 2048}, "1.7B"),
        ("qwen3vl", {"block_count": 36, "embedding_length": 4096}, "8B"),
        ("qwen3vl", {"block_count": 40}, "?B"),
        ("qwen3vlmoe", {"block_count": 94}, "235B.A22B"),
        ("ernie4_5-moe", {"block_count": 54}, "300B.A47B"),
        ("glm4", {"block_count": 61}, "32B"),
        ("glm4moe", {"block_count": 47, "nextn_predict_layers": 1}, "106B.A12B"),
        ("glm4moe", {"block_count": 93, "nextn_predict_layers": 1}, "355B.A32B"),
        ("minimax-m2", {"block_count": 62}, "230B.A10B"),
        ("olmo2", {"block_count": 16}, "1B"),
        ("exaone4", {"block_count": 64}, "32B"),
        ("phi2", {"block_count": 24}, "1B"),
        ("starcoder2", {"block_count": 52}, "20B"),
        ("command-r", {"block_count": 40}, "35B"),
        ("hunyuan-moe", {"block_count": 32}, "A13B"),
        ("falcon-h1", {"block_count": 72}, "34B"),
        ("mamba2", {"block_count": 48, "embedding_length": 2048}, "1.5B"),
        ("mamba2", {"block_count": 64, "embedding_length": 4096}, "7B"),
        ("qwen35", {"block_count": 24, "embedding_length": 1024}, "0.8B"),
        ("qwen35", {"block_count": 25, "embedding_length": 2048, "nextn_predict_layers": 1}, "2B"),
        ("qwen35", {"block_count": 32, "embedding_length": 2560}, "4B"),
        ("qwen35", {"block_count": 65, "nextn_predict_layers": 1}, "27B"),
        ("qwen35moe", {"block_count": 41, "nextn_predict_layers": 1}, "35B.A3B"),
        ("qwen35moe", {"block_count": 60}, "397B.A17B"),
        ("qwen3next", {"block_count": 48}, "80B.A3B"),
        ("lfm2", {"feed_forward_length": 2560}, "230M"),
        ("lfm2", {"feed_forward_length": 4608}, "350M"),
        ("lfm2", {"feed_forward_length": 10752}, "2.6B"),
        ("lfm2moe", {"block_count": 24}, "8B.A1B"),
        ("granitehybrid", {"embedding_length": 768, "feed_forward_length": 2048}, "350M"),
        ("granitehybrid", {"embedding_length": 1536, "feed_forward_length": 4096}, "1B"),
        ("granitehybrid", {"embedding_length": 1536, "feed_forward_length": 512}, "7B.A1B"),
        ("granitehybrid", {"embedding_length": 2048, "feed_forward_length": 8192}, "3B"),
        ("granitehybrid", {"embedding_length": 4096, "feed_forward_length": 768}, "32B.A9B"),
    ],
)
def test_sizes_are_llama_bench_s(arch: str, keys: dict[str, Any], size: str, tmp_path: Path) -> None:
    metadata = {f"{arch}.{key}": value for key, value in keys.items()} | {"general.file_type": 7}
    f = GgufFile.open(write_gguf(tmp_path / "m.gguf", arch, metadata, {"x": ("F32", np.ones(1, np.float32))}))
    assert model_description(f) == f"{arch} {size} Q8_0"


# --- plans of the tiny models -------------------------------------------------------------------------------------------------------

UNFUSED = {
    "tiny-mistral4": {"CONCAT", "ROPE", "SET_ROWS", "FLASH_ATTN_EXT", "TOPK_MOE"},
    "tiny-deepseek2": {"CONCAT", "ROPE", "SET_ROWS", "FLASH_ATTN_EXT", "TOPK_MOE"},
    "tiny-gpt-oss": {"ADD_ID", "SWIGLU_OAI", "FLASH_ATTN_EXT"},
    "tiny-gpt2": {"NORM", "GELU"},
    "tiny-phi2": {"NORM", "GELU", "ROPE"},
    "tiny-starcoder2": {"NORM", "GELU", "ROPE"},
    "tiny-co": {"NORM", "SWIGLU", "ROPE"},
    "tiny-granitehybrid": {"SSM_SCAN"},
    "tiny-falcon-h1": {"SSM_SCAN", "FLASH_ATTN_EXT"},
    "tiny-mamba2": {"SSM_SCAN"},
    "tiny-qwen35": {"SSM_CONV", "DELTA_NET", "SIGMOID_GLU"},
    "tiny-qwen35moe": {"DELTA_NET", "SIGMOID"},
    "tiny-qwen3next": {"DELTA_NET", "SIGMOID"},
    "tiny-lfm2": {"SHORT_CONV", "FLASH_ATTN_EXT"},
    "tiny-gemma3n": {"ALTUP_PREDICT", "ALTUP_CORRECT", "GAUSSIAN_TOPK", "FLASH_ATTN_EXT"},
}
"""Ops of an architecture's own, which its tiny models run where nothing is fused."""

ALONE = {
    "tiny-granitehybrid": {"RMS_NORM"},
    "tiny-granitehybrid-moe": {"RMS_NORM"},
    "tiny-falcon-h1-normed": {"RMS_NORM"},
    "tiny-mamba2": {"RMS_NORM"},
    "tiny-nemotron_h": {"RMS_NORM"},
    "tiny-nemotron_h_moe": {"RMS_NORM"},
    "tiny-nemotron_h_moe-latent": {"RMS_NORM"},
    "tiny-command-r-plus": {"NORM"},
    "tiny-hunyuan-moe": {"ROPE"},
    "tiny-gemma4": {"RMS_NORM"},
    "tiny-gemma4-moe": {"RMS_NORM"},
    "tiny-gemma4-ple": {"RMS_NORM", "ROPE"},
    "tiny-gemma3n": {"RMS_NORM", "ROPE"},
}
"""Ops that stay nodes of their own: the norm of groups behind a recurrence, norms of heads with weights for each, RoPE before norms,
norms of V, and, where the tables leave RoPE to a stage, that of Q where K is another layer's."""


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        pytest.param(profile, name, marks=() if profile == H200 or name in OF_A_KIND else pytest.mark.exhaustive)
        for profile in PROFILES
        for name in TINY
    ],
)
def test_tiny_models_plan_for_any_device(profile: str, name: str, tiny: Callable[[str], Path]) -> None:
    model, ctx = Model.open(tiny(name)), planned_for(profile)
    s = token_plan(model, profile)
    fused = ops(s)
    plain = ops(token_plan(model, profile, fusion="none"))
    assert sum(fused.values()) < sum(plain.values())
    assert not fused.keys() & {"CONCAT", "ROPE", "SET_ROWS", "NORM", "RMS_NORM", "ADD_ID", "GELU", "SWIGLU_OAI"} - ALONE.get(name, set())
    wanted = next((found for start, found in UNFUSED.items() if name.startswith(start)), {"FLASH_ATTN_EXT"})
    assert wanted <= plain.keys()
    match model.file.arch:
        case "deepseek2" | "mistral4":
            assert fused["MLA_ROPE_SET_ROWS"] == model.hp.n_layer
        case "granitehybrid":
            recurrent = {"tiny-granitehybrid": 3, "tiny-granitehybrid-moe": 2}[name]
            assert fused["SSM_CONV_SCAN" if ctx.caps.max_storage_bindings > 8 else "SSM_SCAN"] == recurrent
        case "falcon-h1" | "mamba2":
            assert fused["SSM_CONV_SCAN" if ctx.caps.max_storage_bindings > 8 else "SSM_SCAN"] == model.hp.n_layer
        case "qwen35" | "qwen35moe" | "qwen3next":
            assert fused["CONV_DELTA_NET" if ctx.caps.max_storage_bindings > 12 else "DELTA_NET"] == 1
        case "gpt-oss":
            alone = ctx.tuning.pick("schedule", n=1, n_expert=model.hp.n_expert)["router"] == "stage"
            # No head of 40 is whole units of 32: attention's result is rounded by a stage, as the experts' may be.
            assert len(s.stages) == 1 + (6 + alone) * model.hp.n_layer + fused["QUANTIZE_Q8_1"] + 2
    assert plan(model.graph(40, 64, head="all"), ctx).stages


# --- files that are refused ---------------------------------------------------------------------------------------------------------

Refused = tuple[str, dict[str, Any], str]
"""Tiny model; what `changed` makes of its file, "key": value of the metadata, or without, cut; the error."""


def lacking(name: str, *tensors: str) -> list[Refused]:
    return [(name, {"without": [t]}, rf"tensor {re.escape(t)} is missing") for t in tensors]


def cut(name: str, tensor: str, found: str, wanted: str) -> Refused:
    said = f"tensor {tensor} has shape [{found}], the hyperparameters say [{wanted}]"
    return name, {"cut": tensor}, re.escape(said)


def keys(name: str, said: str, **metadata: Any) -> Refused:
    return name, {"metadata": {key.replace("__", "."): value for key, value in metadata.items()}}, said


DECI_FF = [160, 96, 224, 0, 0, 64, 0, 32]
REFUSED = [
    keys("gpt2", r"gpt2\.attention\.layer_norm_epsilon", attention__layer_norm_epsilon=None),
    *lacking("gpt2", "position_embd.weight", "blk.1.attn_norm.bias", "blk.2.attn_qkv.weight", "output_norm.bias"),
    cut("gpt2", "blk.0.attn_qkv.bias", "287", "288"),
    cut("gpt2", "position_embd.weight", "127, 96", "128, 96"),
    keys("gemma3", r"gemma3\.attention\.sliding_window is 0 or missing", attention__sliding_window=None),
    *lacking("gemma3", "blk.2.post_ffw_norm.weight"),
    cut("gemma3", "blk.1.attn_q.weight", "159, 96", "160, 96"),
    *lacking("gemma2", "blk.4.post_attention_norm.weight"),
    keys("gemma2", r"attn_logit_softcapping is -1\.0, expected a positive number", attn_logit_softcapping=-1.0),
    keys(
        "gemma3", r"sliding_window_pattern is 2 values, expected one for each of 7 layers", attention__sliding_window_pattern=[True, False]
    ),
    keys(
        "deci",
        r"deci\.attention\.head_count_kv is 3 for layer 0, expected 0 or a divisor of its 4 heads",
        attention__head_count_kv=[3, 0, 0, 4, 0, 1, 0, 0],
    ),
    keys(
        "deci",
        r"deci\.attention\.head_count_kv is 1 for layer 1, expected 0 or a divisor of its 0 heads",
        attention__head_count_kv=[2, 1, 0, 4, 0, 1, 0, 0],
    ),
    keys("deci", r"deci\.attention\.head_count_kv is 2 values", attention__head_count_kv=[2, 4]),
    keys("deci", r"tensor blk\.1\.attn_norm\.weight is missing", attention__head_count=[4] * 8),
    keys("deci", r"ffn_gate\.weight has shape \[160, 96\], the hyperparameters say \[96, 96\]", feed_forward_length=[96, *DECI_FF[1:]]),
    keys("deci", r"tensor blk\.7\.ffn_norm\.weight has no place", feed_forward_length=[*DECI_FF[:7], 0]),
    keys("gpt-oss", r"gpt-oss\.expert_count is 0 or missing, expected at least 1", expert_count=None, expert_used_count=None),
    keys("gpt-oss", r"gpt-oss\.attention\.sliding_window is 0 or missing, expected at least 1", attention__sliding_window=None),
    keys("deepseek2", r"deepseek2\.attention\.kv_lora_rank is 0 or missing", attention__kv_lora_rank=None),
    keys("deepseek2", r"key_length is 96 \(attention\.value_length 64\), expected .* = 64", attention__kv_lora_rank=32),
    keys("deepseek2", r"attention\.key_length_mla", attention__key_length_mla=None),
    keys("deepseek2", r"attention\.key_length_mla is 32, expected more than the 32 rotated", attention__key_length_mla=32),
    keys("deepseek2", r"attention\.head_count_kv is 3, expected 1", attention__head_count_kv=3),
    keys("deepseek2", r"expert_gating_func is 3, expected 1 \(softmax\) or 2 \(sigmoid\)", expert_gating_func=3),
    keys("deepseek2", r"expert_group_count and expert_group_used_count: 1 of 3 groups of 7 experts", expert_group_count=3),
    keys("deepseek2", r"expert_weights_scale is -1\.0, expected a positive number", expert_weights_scale=-1.0),
    keys("deepseek2-legacy", r"attention\.head_count_kv is 1, expected 3, as many as heads", attention__head_count_kv=1),
    *lacking("deepseek2", "blk.1.attn_v_b.weight"),
    keys("granite", r"logit_scale is -1\.0, expected a positive number", logit_scale=-1.0),
    *lacking("granitemoe", "blk.1.ffn_up_shexp.weight"),
    keys("mistral3", r"temperature_length is 0, expected at least 1", rope__scaling__original_context_length=None),
    keys(
        "qwen3vl",
        r"dimension_sections is \[8, 6, 5, 0\], expected integers whose sum is the 20 pairs",
        rope__dimension_sections=[8, 6, 5, 0],
    ),
    keys("mistral4", r"temperature_length is 0, expected at least 1", rope__scaling__original_context_length=None),
    (
        "mistral4",
        {"without": ["blk.1.ffn_gate_up_exps.weight"]},
        r"tensor blk\.1\.ffn_gate_up_exps\.weight is missing, and so are ffn_gate_exps\.weight and ffn_up_exps\.weight in its place",
    ),
    keys("llama4", r"expert_used_count is 2, expected 1: the weight of an expert is in what it reads", expert_used_count=2),
    *lacking("llama4", "blk.1.ffn_down_shexp.weight", "blk.0.ffn_gate.weight"),
    *lacking("mistral4", "blk.1.ffn_up_shexp.weight"),
    *lacking("glm4", "blk.1.ffn_up.weight", "blk.2.post_ffw_norm.weight"),
    keys("glm4moe", r"nextn_predict_layers is 3, expected less than the 3 blocks of the file", nextn_predict_layers=3),
    keys("glm4moe", r"expert_count is 0 or missing", expert_count=None, expert_used_count=None),
    *lacking("glm4moe-large", "blk.1.attn_q_norm.weight", "blk.2.exp_probs_b.bias", "blk.1.attn_k.bias"),
    keys("gemma4", r"head_count_kv is 3 for layer 1, expected a divisor of the 4 heads", attention__head_count_kv=[4, 3, 1, 2, 2, 1]),
    keys("gemma4", r"rope\.dimension_count_swa is 32, expected an even number, at most the head size 24", rope__dimension_count_swa=32),
    keys("gemma4-ple", r"shared_kv_layers is 5, expected so few that both kinds of attention", attention__shared_kv_layers=5),
    *lacking("gemma4-ple", "per_layer_token_embd.weight", "blk.5.inp_gate.weight", "blk.2.attn_k.weight"),
    keys("gemma3n", r"altup\.num_inputs is 9, expected at most 8", altup__num_inputs=9),
    keys("gemma3n", r"altup_unembd_proj\.weight has shape \[288, 96\], the hyperparameters say \[192, 96\]", altup__num_inputs=3),
    keys("gemma3n", r"altup\.active_idx \(1\)", altup__active_idx=1),
    keys(
        "gemma3n",
        r"activation_sparsity_scale is 2 values, expected a number up to 100, or -inf, for each",
        activation_sparsity_scale=[1.0, 0.5],
    ),
    keys("gemma3n", r"embedding_length_per_layer_input is 0 or missing", embedding_length_per_layer_input=None),
    *lacking("gemma3n", "altup_proj.weight", "altup_unembd_proj.weight", "blk.1.laurel_r.weight", "blk.5.altup_router.weight"),
    *lacking("jina-bert-v2", "blk.1.ffn_down.bias", "blk.2.attn_output_norm.bias", "token_embd_norm.weight"),
    *lacking("gemma4-moe", "blk.1.ffn_gate_inp.scale", "blk.3.ffn_down_exps.weight"),
    *lacking("ernie4-5-moe", "blk.1.ffn_up_shexp.weight", "blk.0.ffn_up.weight"),
    *lacking("minimax-m2", "blk.1.exp_probs_b.bias", "blk.0.attn_k_norm.weight"),
    cut("minimax-m2", "blk.1.attn_q_norm.weight", "159", "160"),
    keys("olmo2", r"tensor blk\.0\.attn_q\.weight has shape \[96, 96\], the hyperparameters say \[192, 96\]", attention__key_length=64),
    *lacking("phi2", "output_norm.bias", "blk.2.attn_output.bias"),
    *lacking("starcoder2", "blk.1.ffn_norm.bias", "blk.1.ffn_up.bias"),
    *lacking("command-r-plus", "blk.2.attn_k_norm.weight"),
    keys("cohere2", r"cohere2\.attention\.sliding_window is 0 or missing", attention__sliding_window=None),
    *lacking("hunyuan-moe", "blk.1.ffn_down_shexp.weight"),
    *lacking("falcon-h1-normed", "blk.1.ssm_norm.weight"),
    keys("mamba2", r"mamba2\.ssm\.group_count is 5, expected a divisor of the 12 heads", ssm__group_count=5),
    *lacking("mamba2", "blk.3.ssm_out.weight"),
    keys("qwen35", r"ssm\.time_step_rank is 5, expected a number of heads that divides ssm\.inner_size, 96", ssm__time_step_rank=5),
    keys("qwen35", r"ssm\.group_count is 4, expected a divisor of the 6 heads", ssm__group_count=4),
    keys("qwen35", r"ssm\.state_size is 22, expected a multiple of 4", ssm__state_size=22),
    keys(
        "qwen35",
        r"rope\.dimension_sections is \[4, 3, 2, 0\], expected integers whose sum is the 10 pairs",
        rope__dimension_sections=[4, 3, 2, 0],
    ),
    keys("qwen35", r"full_attention_interval is 0, expected at least 1", full_attention_interval=0),
    keys("qwen35", r"recurrent_layers is 1 values of \w+, expected one boolean for each of 2 blocks", attention__recurrent_layers=[True]),
    keys("qwen35", r"tensor blk\.0\.attn_q\.weight is missing", full_attention_interval=1),
    keys("qwen35", r"nextn_predict_layers is 2, expected less than the 2 blocks of the file", nextn_predict_layers=2),
    *lacking("qwen35", "blk.0.ssm_norm.weight"),
    *lacking("qwen35moe", "blk.1.ffn_gate_inp_shexp.weight"),
    *lacking("qwen3next", "blk.0.ssm_ba.weight"),
    keys("lfm2", r"lfm2\.shortconv\.l_cache is 0 or missing", shortconv__l_cache=None),
    keys("lfm2", r"shortconv\.l_cache is 1, expected at least 2", shortconv__l_cache=1),
    keys("lfm2", r"tensor blk\.0\.attn_q\.weight is missing", attention__head_count_kv=[1, 1, 1, 1]),
    *lacking("lfm2", "blk.2.shortconv.conv.weight", "blk.1.attn_k_norm.weight", "token_embd_norm.weight"),
    *lacking("lfm2moe", "blk.1.exp_probs_b.bias", "blk.0.ffn_up.weight"),
    keys("granitehybrid", r"time_step_rank is 7, expected a number of heads that divides ssm\.inner_size, 192", ssm__time_step_rank=7),
    keys("granitehybrid", r"ssm\.group_count is 5, expected a divisor of the 12 heads", ssm__group_count=5),
    keys("granitehybrid", r"ssm\.state_size is 18, expected a multiple of 4", ssm__state_size=18),
    keys("granitehybrid", r"ssm\.state_size is missing", ssm__state_size=None),
    keys("granitehybrid", r"ssm\.conv_kernel is 1, expected at least 2", ssm__conv_kernel=1),
    keys("granitehybrid", r"residual_scale is -1\.0, expected a positive number", residual_scale=-1.0),
    keys("granitehybrid", r"head_count_kv is 3 values of int\d+ from 0, expected 4 integers", attention__head_count_kv=[0, 0, 1]),
    keys("granitehybrid", r"tensor blk\.3\.attn_q\.weight is missing", attention__head_count_kv=[0, 0, 1, 1]),
    keys("granitehybrid", r"tensor blk\.0\.ssm_in\.weight has shape \[476, 96\], the hyperparameters say \[492, 96\]", ssm__state_size=24),
]


@pytest.mark.parametrize(("name", "change", "said"), REFUSED, ids=[f"{name}-{change}" for name, change, _ in REFUSED])
def test_a_file_that_does_not_fit_is_refused(name: str, change: dict[str, Any], said: str, tiny: Callable[[str], Path]) -> None:
    broken = changed(tiny(f"tiny-{name}"), **change)
    with pytest.raises(GgufError, match=said):
        Model.open(broken).graph(1, 8, head="all")


# --- barrier-free stages ------------------------------------------------------------------------------------------------------------


@pytest.mark.vulkan
@pytest.mark.parametrize(
    ("name", "act", "barrier_free", "at_least"),
    [
        ("gpt2", "f32", None, 5 * 3 - 1),  # activations are spun on as floats, too
        ("gpt2", "q8_1", None, 5 * 3 - 1),
        pytest.param("gemma3", "q8_1", None, 1, marks=pytest.mark.exhaustive),
        pytest.param("deci", "q8_1", None, 1, marks=pytest.mark.exhaustive),
        ("granitehybrid", "f32", "gemv", 1),
        ("qwen35", "f32", None, 1),
        ("lfm2", "q8_1", "gemv", 1),
        pytest.param("qwen35moe", "q8_1", "gemv", 1, marks=pytest.mark.exhaustive),
        # Sinks, windows, biases, and experts chosen by the router's product or by their own.
        pytest.param("gpt-oss-MXFP4", "q8_1", "gemv", 1, marks=pytest.mark.exhaustive),
        ("gpt-oss-MXFP4", "q8_1", "experts", 1),
        # Sigmoids, a bias and groups in the router's product and in the experts'.
        pytest.param("deepseek2-sigmoid", "q8_1", "gemv", 1, marks=pytest.mark.exhaustive),
        ("deepseek2-sigmoid", "q8_1", "experts", 1),
        ("deepseek2", "f32", "gemv", 1),  # a head reads its own part of what attention makes
        # Rows of a layer that others read, too.
        ("gemma4-ple", "q8_1", "gemv", 1),
        pytest.param("gemma3n", "q8_1", "gemv", 1, marks=pytest.mark.exhaustive),
        ("gemma2", "q8_1", None, 5 * 5),
        # A softmax over all and a bias.
        pytest.param("ernie4-5-moe", "q8_1", "gemv", 1, marks=pytest.mark.exhaustive),
        ("ernie4-5-moe", "q8_1", "experts", 1),
    ],
    indirect=["barrier_free"],
)
def test_barrier_free_stages_change_no_bit(
    name: str, act: Any, barrier_free: None, at_least: int, tiny: Callable[[str], Path], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [int(t) for t in np.random.default_rng(0).integers(0, 160, 20)]

    def decoded() -> tuple[np.ndarray, int]:
        with Engine.load(tiny(f"tiny-{name}"), device, n_ctx=64, act=act, progress=False) as engine:
            before = len(engine.schedule().barrier_free)
            logits = np.stack([engine.decode_logits(t) for t in ids])
            assert len(engine.schedule().barrier_free) == before, "the check of the first run found another result"
            return logits, before

    found, stages = decoded()
    assert stages >= at_least
    monkeypatch.undo()  # what the tables of this device choose: barriers, and experts chosen by a stage of their own
    want, stages = decoded()
    assert stages == 0
    assert np.array_equal(found, want)
