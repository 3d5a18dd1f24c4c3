"""The architectures, a file each. Importing the package registers them (vkback.models.architecture.ARCHITECTURES)."""

from importlib import import_module

NAMES = ("llama", "deci", "deepseek2", "gemma3", "gpt2", "gpt_oss", "granitehybrid", "phi3", "qwen2", "qwen3", "qwen3moe", "smollm3")
"""Modules of this package, in the order in which architectures are listed: the one that most models have comes first."""

for _name in NAMES:
    import_module(f"{__name__}.{_name}")
