"""Published facts of chips, for predictions of kernels that nobody could run: units, clock, lanes, memory rate.

From the vendors' product pages, as TechPowerUp's GPU database repeats them; boost or game clock where two are given. NVK's shim stands for
a family, which the card named here represents. Where nothing is published a chip is not here, and nothing is predicted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vkback.device import Capabilities


@dataclass(frozen=True)
class Chip:
    """units: compute units, multiprocessors, cores; lanes: 32-bit operations that a unit starts in a clock; mhz; gb_s: peak memory rate.

    discrete  memory of its own
    """

    name: str
    units: int
    lanes: int
    mhz: int
    gb_s: float
    discrete: bool


CHIPS: tuple[tuple[str, Chip], ...] = (
    (r"POLARIS10", Chip("RX 580", 36, 64, 1340, 256.0, True)),
    (r"POLARIS12", Chip("RX 550", 8, 64, 1183, 112.0, True)),
    (r"VEGA10", Chip("RX Vega 64", 64, 64, 1546, 483.8, True)),
    (r"VEGA20", Chip("Radeon VII", 60, 64, 1750, 1024.0, True)),
    (r"RAVEN2", Chip("Vega 3", 3, 64, 1200, 38.4, False)),
    (r"RAVEN", Chip("Vega 10", 10, 64, 1300, 38.4, False)),
    (r"RENOIR", Chip("Vega 7", 7, 64, 1600, 51.2, False)),
    (r"NAVI10", Chip("RX 5700 XT", 40, 64, 1905, 448.0, True)),
    (r"NAVI21", Chip("RX 6800", 60, 64, 2105, 512.0, True)),
    (r"VANGOGH", Chip("Steam Deck", 8, 64, 1600, 88.0, False)),
    (r"REMBRANDT", Chip("Radeon 680M", 12, 64, 2400, 76.8, False)),
    (r"NAVI31|GFX1100", Chip("RX 7900 XTX", 96, 64, 2499, 960.0, True)),
    (r"NAVI33", Chip("RX 7600", 32, 64, 2655, 288.0, True)),
    (r"PHOENIX", Chip("Radeon 780M", 12, 64, 2700, 89.6, False)),
    (r"STRIX1", Chip("Radeon 890M", 16, 64, 2900, 120.0, False)),
    (r"GFX1201", Chip("RX 9070 XT", 64, 64, 2970, 640.0, True)),
    (r"Apple M1 ", Chip("M1", 8, 128, 1278, 68.3, False)),
)
"""By part of the device's name."""

NVK_FAMILIES: dict[str, Chip] = {
    "120": Chip("GTX 980 Ti", 22, 128, 1076, 336.6, True),
    "140": Chip("Tesla V100", 80, 64, 1530, 897.0, True),
    "160": Chip("RTX 2080 Ti", 68, 64, 1545, 616.0, True),
    "170": Chip("RTX 3090", 82, 128, 1695, 936.2, True),
    "190": Chip("RTX 4090", 128, 128, 2520, 1008.0, True),
}
"""By NOUVEAU_CHIPSET of Mesa's shim."""

QUARTER_RATE = frozenset({"multiply"})
"""Classes of instructions that take four turns of the lanes (AMD: v_mul_lo_u32; convert and dot are full rate there)."""


def chip_of(caps: Capabilities, chipset: str = "") -> Chip | None:
    """What is published of a device. chipset: NOUVEAU_CHIPSET, which stands for a family where a shim gives no name."""
    if caps.name.startswith("NVK"):
        return NVK_FAMILIES.get(chipset)
    return next((chip for pattern, chip in CHIPS if re.search(pattern, caps.name)), None)
