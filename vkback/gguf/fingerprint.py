"""What tells model files apart."""

from __future__ import annotations

import hashlib

import numpy as np

from vkback.gguf.file import GgufFile

SAMPLED_BYTES = 4096
"""Of the beginning and the end of each tensor, what enters a model's fingerprint: all of a large file takes minutes to read."""


def fingerprint(f: GgufFile) -> str:
    """Tells models apart: a hash of the metadata, of every tensor's name, type and shape, and of some bytes of each."""
    digest = hashlib.sha256()
    for key, value in sorted(f.metadata.items()):
        shown = hashlib.sha256(repr(value.tolist() if isinstance(value, np.ndarray) else value).encode("utf-8", "surrogatepass")).digest()
        digest.update(key.encode() + b"\0" + shown)
    for name, t in sorted(f.tensors.items()):
        raw = np.asarray(t.data).reshape(-1).view(np.uint8)
        digest.update(f"{name}\0{t.type}\0{t.shape}\0".encode())
        digest.update(raw[:SAMPLED_BYTES].tobytes() + raw[-SAMPLED_BYTES:].tobytes())
    return digest.hexdigest()
