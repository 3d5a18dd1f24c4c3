"""The facts of a quantized type against its shader and its codec."""

from __future__ import annotations

import re

import pytest

import vkback.ops  # makes the codebooks  # noqa: F401
from vkback import quants
from vkback.paths import shader_root
from vkback.quants.codec import Codec, DecodeOnly
from vkback.quants.registry import codec
from vkback.shader.source import Variant, expand


def source(name: str) -> str:
    return (shader_root() / quants.quant(name).shader).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", quants.WEIGHT_TYPES)
def test_a_shader_has_the_paths_that_its_type_says(name: str) -> None:
    t = quants.quant(name)
    stated = re.findall(r"^#define UNIT_INTS (\d)$", source(name), re.M)
    assert stated == [str(int(t.int_dot))]


@pytest.mark.parametrize("name", quants.WEIGHT_TYPES)
def test_codebooks_and_decoders_belong_together(name: str) -> None:
    t = quants.quant(name)
    expanded = expand(shader_root(), Variant("rows/get_rows.comp", (("QUANT_FILE", f'"{t.shader}"'),)))
    included = {file for file, _ in expanded.origins if file.startswith("generated/")}
    assert included == ({f"generated/{t.codebook.name.lower()}_codes.glsl"} if t.codebook else set())
    assert (t.decoder == "codebook") == (t.codebook is not None)
    assert (t.decoder == "float") == (t.block_values == 1)


@pytest.mark.parametrize("name", quants.WEIGHT_TYPES)
def test_a_codec_encodes_or_says_that_it_does_not(name: str) -> None:
    c = codec(name)
    assert (type(c).encode is DecodeOnly.encode) == isinstance(c, DecodeOnly)
    assert type(c).encode is not Codec.encode
