"""Quantized types: registry, decode, encode, random blocks, and the layout weights and activations have on the device. No GPU needed.

    decode("Q4_K", raw)         blocks of a GGUF file, uint8 [..., row_bytes], to float32
    encode("Q4_K", x)           float32 [rows, k] to blocks
    to_device("Q4_K", raw, k)   blocks to the bytes the shaders read; layout() says where each plane lies
    q8_1_quantize(x)            activations to the bytes the integer-dot shaders read
"""

from vkback.quants.device_layout import DeviceLayout, PlaneLayout, layout, repack, to_device, unpack
from vkback.quants.q8_1 import q8_1_dequantize, q8_1_quantize, q8_1_stride
from vkback.quants.registry import QUANTS, decode, encode, quant, random_blocks, row_bytes
from vkback.quants.types import UNIT, Plane, QuantShapeError, QuantType, UnknownQuant

__all__ = [
    "QUANTS",
    "UNIT",
    "DeviceLayout",
    "Plane",
    "PlaneLayout",
    "QuantShapeError",
    "QuantType",
    "UnknownQuant",
    "decode",
    "encode",
    "layout",
    "q8_1_dequantize",
    "q8_1_quantize",
    "q8_1_stride",
    "quant",
    "random_blocks",
    "repack",
    "row_bytes",
    "to_device",
    "unpack",
]
