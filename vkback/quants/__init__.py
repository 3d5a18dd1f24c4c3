"""Quantized types: registry, decode, encode, random blocks, and the layout weights and activations have on the device. No GPU needed.

decode("Q4_K", raw)         blocks of a GGUF file, uint8 [..., row_bytes], to float32
encode("Q4_K", x)           float32 [rows, k] to blocks
to_device("Q4_K", raw, k)   blocks to the bytes the shaders read; layout() says where each plane lies
q8_1_quantize(x)            activations to the bytes the integer-dot shaders read
"""

from vkback.quants.codebooks import EVEN_SIGNS
from vkback.quants.device_layout import DeviceLayout, PlaneLayout, layout, repack, to_device, unpack
from vkback.quants.q8_1 import q8_1_dequantize, q8_1_quantize, q8_1_stride, q8_1_wrong_sums
from vkback.quants.quant_type import UNIT, Codebook, Decoder, NoEncoder, Plane, QuantRangeError, QuantShapeError, QuantType, UnknownQuant
from vkback.quants.registry import (
    PAIRED,
    QUANTS,
    WEIGHT_TYPES,
    beyond_f16,
    coarse,
    codebook,
    decode,
    encode,
    encode_weights,
    quant,
    random_blocks,
    row_bytes,
    unsound_row,
)

__all__ = [
    "EVEN_SIGNS",
    "PAIRED",
    "QUANTS",
    "UNIT",
    "WEIGHT_TYPES",
    "Codebook",
    "Decoder",
    "DeviceLayout",
    "NoEncoder",
    "Plane",
    "PlaneLayout",
    "QuantRangeError",
    "QuantShapeError",
    "QuantType",
    "UnknownQuant",
    "beyond_f16",
    "coarse",
    "codebook",
    "decode",
    "encode",
    "encode_weights",
    "layout",
    "q8_1_dequantize",
    "q8_1_quantize",
    "q8_1_stride",
    "q8_1_wrong_sums",
    "quant",
    "random_blocks",
    "repack",
    "row_bytes",
    "to_device",
    "unpack",
    "unsound_row",
]
