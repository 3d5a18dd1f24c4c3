"""Training on a device: steps, their comparison with PyTorch, low-rank adapters of quantized models."""
