"""The architectures, a file each. Importing the package registers them (vkback.models.architecture.ARCHITECTURES)."""

from importlib import import_module

NAMES = (
    "llama",
    "bert",
    "llama4",
    "cohere2",
    "command_r",
    "deci",
    "deepseek2",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma_embedding",
    "glm4moe",
    "gpt2",
    "gpt_oss",
    "granite",
    "granitehybrid",
    "granitemoe",
    "hunyuan_moe",
    "mamba2",
    "minimax_m2",
    "mistral3",
    "mistral4",
    "modern_bert",
    "nemotron_h",
    "nemotron_h_moe",
    "nomic_bert",
    "olmo2",
    "phi2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen35",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
    "qwen3vl",
    "qwen3vlmoe",
    "seed_oss",
    "smollm3",
    "starcoder2",
)
"""Modules of this package, in the order in which architectures are listed: the one that most models have comes first."""

for _name in NAMES:
    import_module(f"{__name__}.{_name}")
