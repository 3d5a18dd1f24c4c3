"""Many sequences at once over the weights of one engine: pages of the KV cache, the prefix cache, the scheduler."""
