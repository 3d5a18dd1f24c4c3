"""Mixture of experts: the choice of experts, their biases, their weighted sum."""
