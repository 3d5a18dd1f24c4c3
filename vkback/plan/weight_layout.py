"""How weights lie on a device, for those that bring them there or read them back. Kernels ask the same tables (vkback/ops/codebooks.py)."""

from __future__ import annotations

from vkback import quants
from vkback.device import Capabilities
from vkback.ops.codebooks import in_pairs
from vkback.tuning.lookup import Tuning


def stored_type(quant: str, k: int, caps: Capabilities) -> str:
    """The name that `quants.repack` and `quants.unpack` have for a type in the layout that a weight of k columns has on a device."""
    if quant not in quants.PAIRED:
        return quant
    return quants.PAIRED[quant] if in_pairs(quant, k, Tuning.for_device(caps)) else quant
