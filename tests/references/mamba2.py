"""`mamba2` by Mamba2ForCausalLM."""

from __future__ import annotations

from pathlib import Path

from transformers import Mamba2Config, Mamba2ForCausalLM

from references.common import Checkpoint, Logits, fill, mamba, outer, run


def logits(path: Path, tokens: list[int]) -> Logits:
    """Logits [len(tokens), n_vocab]."""
    f = Checkpoint(path)
    inner, heads, width = f.get("ssm.inner_size"), f.get("ssm.time_step_rank"), f.get("embedding_length")
    given = Mamba2Config(
        vocab_size=f.get("vocab_size"),
        hidden_size=width,
        num_hidden_layers=f.get("block_count"),
        num_heads=heads,
        head_dim=inner // heads,
        state_size=f.get("ssm.state_size"),
        n_groups=f.get("ssm.group_count"),
        conv_kernel=f.get("ssm.conv_kernel"),
        expand=inner // width,
        chunk_size=8,  # several chunks in a short text
        layer_norm_epsilon=f.get("attention.layer_norm_rms_epsilon"),
        residual_in_fp32=False,
        tie_word_embeddings="output.weight" not in f,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    state = outer(f)
    state["backbone.embeddings.weight"] = state.pop("model.embed_tokens.weight")
    state["backbone.norm_f.weight"] = state.pop("model.norm.weight")
    for il in range(f.get("block_count")):
        mamba(f, state, il, f"backbone.layers.{il}.mixer")
        state[f"backbone.layers.{il}.norm.weight"] = f[f"blk.{il}.attn_norm.weight"]
    return run(fill(Mamba2ForCausalLM(given), f, state), tokens)
