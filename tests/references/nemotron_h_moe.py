"""`nemotron_h_moe` by NemotronHForCausalLM."""

from __future__ import annotations

from references.nemotron_h import logits

__all__ = ["logits"]
