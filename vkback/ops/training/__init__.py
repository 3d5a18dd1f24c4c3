"""Ops of training: gradients, losses, optimizers."""
