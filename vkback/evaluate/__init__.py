"""How right a model's numbers are: the float64 twin, nodes side by side, perplexity, KL divergence."""
