"""A model on a device: loading, programs, the token loop, prompts, sampling, snapshots."""
