"""RoPE, its angles, and what is stored with it."""
