"""GGUF files: tensors, metadata, tokenizer."""
