"""Names and sizes of models in llama-bench's spelling, so that tables can be put side by side."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from vkback.gguf.file import MAX_QUOTED, GgufFile
from vkback.gguf.hparams import Metadata
from vkback.models.architecture import ARCHITECTURES
from vkback.units import UNKNOWN_SIZE, params_text, with_size

if TYPE_CHECKING:
    from gguf import LlamaFileType

FILE_TYPES = {
    0: "all F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K - Medium",
    11: "Q3_K - Small",
    12: "Q3_K - Medium",
    13: "Q3_K - Large",
    14: "Q4_K - Small",
    15: "Q4_K - Medium",
    16: "Q5_K - Small",
    17: "Q5_K - Medium",
    18: "Q6_K",
    19: "IQ2_XXS - 2.0625 bpw",
    20: "IQ2_XS - 2.3125 bpw",
    21: "Q2_K - Small",
    22: "IQ3_XS - 3.3 bpw",
    23: "IQ3_XXS - 3.0625 bpw",
    24: "IQ1_S - 1.5625 bpw",
    25: "IQ4_NL - 4.5 bpw",
    26: "IQ3_S - 3.4375 bpw",
    27: "IQ3_S mix - 3.66 bpw",
    28: "IQ2_S - 2.5 bpw",
    29: "IQ2_M - 2.7 bpw",
    30: "IQ4_XS - 4.25 bpw",
    31: "IQ1_M - 1.75 bpw",
    32: "BF16",
    36: "TQ1_0 - 1.69 bpw ternary",
    37: "TQ2_0 - 2.06 bpw ternary",
    38: "MXFP4 MoE",
    39: "NVFP4",
    40: "Q1_0",
    41: "Q2_0",
}
"""`general.file_type` to its name."""

_FORMS = ("MOSTLY_{}", "MOSTLY_{}_M", "MOSTLY_{}_MOE", "ALL_{}")


def file_type(name: str) -> LlamaFileType | None:
    """The file type of a mix ("Q4_K_S"), or of files whose most frequent tensor type is `name` ("Q4_K": Q4_K_M); None: there is none."""
    from gguf import LlamaFileType  # 29 modules, which files that state their type do without

    found = (LlamaFileType.__members__.get(form.format(name)) for form in _FORMS)
    return next((t for t in found if t is not None), None)


def model_description(f: GgufFile) -> str:
    """Architecture, size class and file type: `llama 8B Q4_K - Medium`. The size class follows layers, not parameters, oddities included
    (40 layers are `13B` whatever their width)."""
    known = ARCHITECTURES.get(f.arch)
    size = known.size_class(Metadata(f)) if known else UNKNOWN_SIZE
    return f"{f.arch} {size} {file_type_name(f)}"


def model_heading(f: GgufFile) -> str:
    """The same for people: where llama-bench's label has no size class, the number of parameters, as `llama 122.61B Q4_K - Medium`."""
    return with_size(model_description(f), f.n_params)


def model_title(f: GgufFile) -> str:
    """What the file calls itself, its true number of parameters, and llama-bench's label, which may say little of either."""
    name = f.metadata.get("general.name")
    named = [" ".join(name.split())[:MAX_QUOTED]] if isinstance(name, str) and name.strip() and name.isprintable() else []
    return ", ".join([*named, f"{params_text(f.n_params)} parameters", model_heading(f)])


def file_type_name(f: GgufFile) -> str:
    """`Q4_K - Medium`; `(guessed) ...` from the tensors when the file does not say."""
    stated = f.metadata.get("general.file_type")
    if isinstance(stated, int):
        return FILE_TYPES.get(stated, "unknown, may not work")
    types = Counter(t.type for t in f.tensors.values())
    guess = file_type(types.most_common(1)[0][0]) if types else None
    return "unknown, may not work" if guess is None else f"(guessed) {FILE_TYPES[guess]}"
