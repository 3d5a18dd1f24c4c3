"""The generation (architecture class) that a GPU belongs to, from what its driver reports.

The PCI id decides if the table knows it, then the product name. For other devices, properties in which generations differ decide, as far
as they do (Ampere and Ada report the same).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Traits:
    """The reported facts that the rules look at.

    hints  raw numbers: "shaderWarpsPerSM" (NVIDIA), "wavefrontsPerSimd" (AMD), whichever the driver has
    """

    vendor: str
    name: str
    device_id: int
    subgroup_min: int
    subgroup_max: int
    dot_signed_accelerated: bool
    dot_mixed_accelerated: bool
    cooperative_matrix: bool
    extensions: frozenset[str]
    hints: Mapping[str, int] = field(default_factory=dict)


BY_ID: Mapping[str, Sequence[tuple[range, str]]] = {
    "nvidia": (
        (range(0x1500, 0x1600), "pascal"),  # GP100
        (range(0x1B00, 0x1D00), "pascal"),  # GP102..GP106
        (range(0x1D00, 0x1D80), "pascal"),  # GP107, GP108
        (range(0x1D80, 0x1E00), "volta"),
        (range(0x1E00, 0x1F80), "turing"),
        (range(0x1F80, 0x2000), "turing_no_tensor"),  # TU117
        (range(0x2000, 0x2100), "ampere"),  # GA100
        (range(0x2180, 0x2200), "turing_no_tensor"),  # TU116
        (range(0x2200, 0x2300), "ampere"),
        (range(0x2300, 0x2400), "hopper"),
        (range(0x2400, 0x2600), "ampere"),
        (range(0x2600, 0x2900), "ada"),
        (range(0x2900, 0x3000), "blackwell"),
    ),
    "intel": (
        (range(0x1900, 0x1A00), "gen9"),
        (range(0x3E90, 0x3EB0), "gen9"),
        (range(0x5900, 0x5A00), "gen9"),
        (range(0x9BC0, 0x9BD0), "gen9"),
        (range(0x4680, 0x46E0), "xe_lp"),
        (range(0x4900, 0x4910), "xe_lp"),
        (range(0x9A40, 0x9A80), "xe_lp"),
        (range(0xA780, 0xA7B0), "xe_lp"),
        (range(0x4F80, 0x4F90), "xe_hpg"),
        (range(0x5690, 0x56C2), "xe_hpg"),
        (range(0x7D51, 0x7D52), "xe_lpg_plus"),
        (range(0x7DD1, 0x7DD2), "xe_lpg_plus"),
        (range(0xE200, 0xE230), "xe2_hpg"),
    ),
}
"""PCI ids by chip, as the public PCI id list groups them."""

BY_NAME: Mapping[str, Sequence[tuple[str, str]]] = {
    "nvidia": (
        (r"\b(H100|H200|H800|H20|GH200)\b", "hopper"),
        (r"\bRTX 50\d\d|\b(B100|B200|B300|GB10|GB200|GB300)\b", "blackwell"),
        (r"\bRTX 40\d\d|\b(L4|L40S?)\b|\bAda\b", "ada"),
        (r"\bRTX 30\d\d|\b(A100|A800|A10|A30|A40|A2)\b|\bRTX A\d", "ampere"),
        (r"\bRTX 20\d\d|\bT4\b|\bTITAN RTX\b", "turing"),
        (r"\bGTX 16\d\d|\bT(400|600|1000)\b", "turing_no_tensor"),
        (r"\bGTX 10\d\d|\bGT 1030|\bP(4|40|100)\b", "pascal"),
    ),
    "amd": (
        (r"\b(8050S|8060S|8[48]0M|890M|GFX115[0-9])\b", "rdna3_5"),
        (r"\bRX 9\d\d\d|\bGFX120[0-9]\b|\bR9700\b", "rdna4"),
        (r"\bRX 7\d\d\d|\b7[48]0M\b|\bGFX110[0-9]\b|\bNAVI3", "rdna3"),
        (r"\bRX 5\d\d\b|\bRX 4\d\d\b|POLARIS", "gcn4"),
        (r"\bVEGA|\bRAVEN|\bRENOIR|\bRadeon VII\b", "gcn5"),
    ),
    "intel": (
        (r"\bB[3-7]\d0\b|\bBMG\b", "xe2_hpg"),
        (r"\bA(3[158]0|5[58]0|7[357]0)M?\b|\bDG2\b", "xe_hpg"),
        (r"\b1[34]0T\b", "xe_lpg_plus"),
        (r"\bIris\(R\) Xe\b|\bTGL\b|\bADL\b|\bRPL\b", "xe_lp"),
        (r"\bHD Graphics (5|6)\d\d\b|\bUHD Graphics 6\d\d\b|\bKBL\b|\bSKL\b|\bCFL\b", "gen9"),
    ),
    "apple": ((r"\bM1\b", "apple_g13"), (r"\bM5\b", "apple_m5"), (r"\bM(\d+)\b", r"apple_m\1")),
    "qualcomm": ((r"\b8\d\d\b", "adreno_a8xx"), (r"\b750\b", "adreno_a7xx_gen3"), (r"\b7[34]\d\b", "adreno_a7xx_gen2")),
    "arm": ((r"-G(57|68|77|78|310|510|610|615|710|715)\b", "mali_valhall"), (r"-G(620|625|720|725|925)\b", "mali_5thgen")),
    "broadcom": ((r"V3D 4\.", "videocore6"), (r"V3D 7\.", "videocore7")),
    "software": ((r"llvmpipe", "cpu_llvmpipe"),),
}


CLASSES: Mapping[str, Sequence[str]] = {
    "nvidia": ("pascal", "volta", "turing_no_tensor", "turing", "ampere", "ada", "hopper", "blackwell"),
    "amd": ("gcn4", "gcn5", "rdna1", "rdna2", "rdna3", "rdna3_5", "rdna4"),
    "intel": ("gen9", "xe_lp", "xe_lpg_plus", "xe_hpg", "xe2_hpg"),
    "apple": ("apple_g13", "apple_m5"),
    "qualcomm": ("adreno_a7xx_gen2", "adreno_a7xx_gen3", "adreno_a8xx"),
    "arm": ("mali_valhall", "mali_5thgen"),
    "broadcom": ("videocore6", "videocore7"),
    "imagination": (),
    "software": ("cpu_llvmpipe",),
    "other": (),
}
"""Every vendor with the classes that `classify` can return, oldest first; Apple's continue as apple_m2, apple_m3 and so on."""


DRIVERS = (
    "amd_proprietary",
    "amd_open_source",
    "mesa_radv",
    "nvidia_proprietary",
    "mesa_nvk",
    "intel_proprietary_windows",
    "intel_open_source_mesa",
    "moltenvk",
    "mesa_honeykrisp",
    "mesa_kosmickrisp",
    "qualcomm_proprietary",
    "mesa_turnip",
    "arm_proprietary",
    "mesa_panvk",
    "broadcom_proprietary",
    "mesa_v3dv",
    "imagination_proprietary",
    "imagination_open_source_mesa",
    "samsung_proprietary",
    "mesa_llvmpipe",
    "google_swiftshader",
    "mesa_venus",
    "mesa_dozen",
)
"""VkDriverId names as tuning tables use them."""


def driver_class(driver_id: str) -> str:
    """ "VK_DRIVER_ID_MESA_RADV" -> "mesa_radv"."""
    return driver_id.removeprefix("VK_DRIVER_ID_").removesuffix("_KHR").lower()


def mesa_series(driver_info: str) -> str:
    """ "Mesa 22.3.6" -> "22": a row of a table may be for the compilers of one series. "" for drivers other than Mesa's."""
    found = re.match(r"Mesa (\d+)\.", driver_info)
    return found[1] if found else ""


def known_class(vendor: str, name: str) -> bool:
    """Whether `classify` can give a device of this vendor this class."""
    return name in CLASSES.get(vendor, ()) or (vendor == "apple" and re.fullmatch(r"apple_m\d+", name) is not None)


def classify(t: Traits) -> str:
    """The class name of docs/device_profiles.md, or "unknown"."""
    by_id = next((name for ids, name in BY_ID.get(t.vendor, ()) if t.device_id in ids), "")
    by_properties = {"nvidia": _nvidia, "amd": _amd, "intel": _intel}.get(t.vendor, lambda _: "unknown")
    return by_id or _by_name(t) or by_properties(t)


def _by_name(t: Traits) -> str:
    for pattern, name in BY_NAME.get(t.vendor, ()):
        if match := re.search(pattern, t.name, re.IGNORECASE):
            return match.expand(name)
    return ""


def _nvidia(t: Traits) -> str:
    if t.hints.get("shaderWarpsPerSM") == 32:
        return "turing" if t.cooperative_matrix else "turing_no_tensor"
    return "unknown"


def _amd(t: Traits) -> str:
    if t.subgroup_min == t.subgroup_max == 64:
        return "gcn5" if t.dot_signed_accelerated else "gcn4"
    if not (t.subgroup_min == 32 and t.subgroup_max == 64):
        return "unknown"
    if t.hints.get("wavefrontsPerSimd") == 20:
        return "rdna1"
    if "VK_EXT_shader_float8" in t.extensions:
        return "rdna4"
    if t.dot_mixed_accelerated:
        return "rdna3"
    return "rdna2" if t.dot_signed_accelerated else "rdna1"


def _intel(t: Traits) -> str:
    if t.subgroup_min == 16:
        return "xe2_hpg"
    if t.subgroup_min == 8 and t.dot_signed_accelerated:
        return "xe_hpg" if t.cooperative_matrix else "xe_lp"
    return "gen9" if t.subgroup_min == 8 else "unknown"
