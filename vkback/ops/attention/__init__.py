"""Attention: FLASH_ATTN_EXT over a KV cache, of prompts and of training."""
