"""Options of how a model is loaded: each declared once, and gathered for those commands that have many of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vkback.cli.gathered import Declared, gathered
from vkback.cli.shell import ACTS, UsageError, flash_attn_of

if TYPE_CHECKING:
    from vkback.engine.load_options import LoadOptions
    from vkback.models.adapter import Given

ContextOption = Annotated[
    int | None,
    typer.Option("-c", "--ctx", "--ctx-size", min=0, help="Context in tokens; 0: as trained [default: as trained, at most 4096]."),
]
RowsOption = Annotated[
    int | None,
    typer.Option("-c", "--ctx", "--ctx-size", min=0, help="Rows of the KV cache; 0: as trained [default: as trained, at most 4096]."),
]
UbatchOption = Annotated[
    int | None,
    typer.Option("-ub", "--ubatch", "--ubatch-size", min=1, help="Prompt tokens processed at once [default: 512, on CPU drivers 64]."),
]
ActOption = Annotated[str, typer.Option("--act", help=f"Activations: {', '.join(ACTS)}.")]
CacheTypeKOption = Annotated[str, typer.Option("--cache-type-k", "-ctk", help="What keys are kept as: f16, f32, q8_0 or q4_0.")]
CacheTypeVOption = Annotated[str, typer.Option("--cache-type-v", "-ctv", help="The same for values.")]
ExactOption = Annotated[
    bool, typer.Option("--exact", help="Logits of a token have the same bits however many tokens went with it; slower.")
]
ExactRequestsOption = Annotated[
    bool, typer.Option("--exact", help="A request's text has the same bits whoever else is served; slower where few are.")
]
FlashAttnOption = Annotated[
    str,
    typer.Option("-fa", "--flash-attn", metavar="on|off|auto", help="off, or 0: attention as nodes kq, kq_soft_max, kqv; to look into it."),
]
TensorSplitOption = Annotated[
    str | None,
    typer.Option(
        "--tensor-split",
        "-ts",
        metavar="SHARES",
        help="Shares of the layers of several devices, as 3,1 [default: by their memory and how fast they read it].",
    ),
]
GpuLayersOption = Annotated[
    str | None,
    typer.Option(
        "--n-gpu-layers",
        "--gpu-layers",
        "-ngl",
        metavar="N|auto|all",
        help="N layers, the output layer and the last ones, have their weights on the device, others in host memory [default: auto].",
    ),
]
CpuMoeLayersOption = Annotated[
    int | None,
    typer.Option(
        "--n-cpu-moe",
        "-ncmoe",
        min=0,
        metavar="N",
        help="Experts of the first N layers lie in host memory, where kernels read them [default: as many as must].",
    ),
]
CpuMoeOption = Annotated[bool, typer.Option("--cpu-moe", "-cmoe", help="Experts of all layers lie in host memory.")]
ExpertCacheOption = Annotated[
    int,
    typer.Option(
        "--expert-cache",
        min=0,
        metavar="N",
        help="N experts of each layer in host memory are kept on the device, those that were used last [default: none].",
        show_default=False,
    ),
]
LoraOption = Annotated[
    list[str] | None, typer.Option("--lora", metavar="FILE", help="An adapter file (vkback finetune) beside the weights; may be repeated.")
]
LoraScaledOption = Annotated[
    list[str] | None, typer.Option("--lora-scaled", metavar="FILE:SCALE", help="The same, multiplied by a number; may be repeated.")
]
LoraScaleOption = Annotated[
    list[float] | None,
    typer.Option("--lora-scale", metavar="SCALE", help="What those of --lora are multiplied by; repeat to give each its own [default: 1]."),
]
SpecTypeOption = Annotated[
    str | None,
    typer.Option(
        "--spec-type",
        help="Drafts of the next tokens: ngram-simple (copies in the text), draft-simple (-md), draft-eagle3 (-md, a head), draft-mtp (the "
        "file's own block for them), none [default: as the file of -md is, else the first; on a CPU, none].",
    ),
]
ModelDraftOption = Annotated[
    str | None,
    typer.Option(
        "--model-draft",
        "-md",
        "--spec-draft-model",
        metavar="FILE",
        help="What drafts tokens: a smaller model of the same vocabulary, or an EAGLE-3 head for the model.",
    ),
]
DraftMaxOption = Annotated[
    int | None,
    typer.Option(
        "--spec-draft-n-max", "--draft-max", "--draft", "--draft-n", min=0, help="Drafts of a step at most [default: as pays, 15]."
    ),
]
DraftMinOption = Annotated[
    int, typer.Option("--spec-draft-n-min", "--draft-min", "--draft-n-min", min=0, help="Fewer drafts than so many are not tried.")
]
DraftPMinOption = Annotated[
    float,
    typer.Option(
        "--spec-draft-p-min", "--draft-p-min", min=0.0, max=1.0, help="A draft model's drafts end before one with less probability."
    ),
]
SpecPinnedOption = Annotated[
    int, typer.Option("--spec-pinned", min=0, help="4, 8 or 16 tokens in every step: the same bits whatever is drafted; slower.")
]
SpecEarlierOption = Annotated[bool, typer.Option("--spec-earlier", help="Draft from earlier texts, too.")]

LOADING: Mapping[str, Declared] = {
    "ctx": (ContextOption, None),
    "ubatch": (UbatchOption, None),
    "act": (ActOption, "auto"),
    "cache_type_k": (CacheTypeKOption, "f16"),
    "cache_type_v": (CacheTypeVOption, "f16"),
    "exact": (ExactOption, False),
    "flash_attn": (FlashAttnOption, "auto"),
    "tensor_split": (TensorSplitOption, None),
    "n_gpu_layers": (GpuLayersOption, None),
    "n_cpu_moe": (CpuMoeLayersOption, None),
    "cpu_moe": (CpuMoeOption, False),
    "expert_cache": (ExpertCacheOption, 0),
    "lora": (LoraOption, None),
    "lora_scaled": (LoraScaledOption, None),
    "lora_scale": (LoraScaleOption, None),
    "spec_type": (SpecTypeOption, None),
    "model_draft": (ModelDraftOption, None),
    "draft_max": (DraftMaxOption, None),
    "draft_min": (DraftMinOption, 0),
    "draft_p_min": (DraftPMinOption, 0.0),
    "spec_pinned": (SpecPinnedOption, 0),
    "spec_earlier": (SpecEarlierOption, False),
}
"""By the fields of LoadOptions; `lora` takes all three options of adapters."""

ARITHMETIC = ("ubatch", "act", "cache_type_k", "cache_type_v", "flash_attn")
ADAPTERS = ("lora", "lora_scaled", "lora_scale")
PLACES = ("tensor_split", "n_gpu_layers", "n_cpu_moe", "cpu_moe", "expert_cache")
"""Where weights lie."""
DRAFTS = ("spec_type", "model_draft", "draft_max", "draft_min", "draft_p_min")


def with_loading(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the command has these options of LOADING, too, and gets them as `loading`, a mapping that `load_options` takes."""
    return gathered("loading", {name: LOADING[name] for name in names}, _fields)


def _fields(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of LoadOptions of what the command line has. Raises UsageError."""
    found = {name: value for name, value in asked.items() if name not in ADAPTERS}
    if "flash_attn" in found:
        found["flash_attn"] = bool(flash_attn_of(found["flash_attn"]))
    if "tensor_split" in found:
        found["tensor_split"] = shares(found["tensor_split"])
    if "lora" in asked:
        found["lora"] = adapters_of(*(asked[name] for name in ADAPTERS))
    return found


def load_options(**given: Any) -> LoadOptions:
    """How a model is loaded, as the user named it. given: fields of LoadOptions. Raises UsageError."""
    from vkback.checks import OptionError
    from vkback.engine.load_options import LoadOptions

    try:
        return LoadOptions(**given)
    except OptionError as e:
        raise UsageError(f"--{e.name.replace('_', '-')} {e.value}: expected {e.expected}") from e


def shares(given: str | None) -> tuple[float, ...] | None:
    """Those of --tensor-split. Raises UsageError."""
    if given is None:
        return None
    try:
        found = tuple(float(share) for share in re.split("[,/]", given))
    except ValueError:
        found = ()
    if not found or not all(0 < share < math.inf for share in found):
        raise UsageError(f"--tensor-split {given}: expected a share greater than 0 for each device, as 3,1")
    return found


def adapters_of(lora: Sequence[str] | None, scaled: Sequence[str] | None, scale: Sequence[float] | None) -> tuple[Given, ...]:
    """The adapter files of --lora, --lora-scaled and --lora-scale. Raises UsageError for one that is not there."""
    from vkback.models.adapter import Given

    files = [Path(name) for text in lora or () for name in _listed(text)]
    scales = list(scale or (1.0,))
    if scale and len(scales) not in (1, len(files)):
        raise UsageError(f"--lora-scale is given {len(scales)} times, --lora {len(files)} times; expected it once, or once for each")
    found = [("--lora", Given(path, times)) for path, times in zip(files, scales * len(files) if len(scales) == 1 else scales, strict=True)]
    for text in (part for each in scaled or () for part in each.split(",")):
        name, _, number = text.rpartition(":")
        try:
            found.append(("--lora-scaled", Given(Path(name), float(number))))
        except ValueError:
            raise UsageError(f"--lora-scaled {text}: expected a file and a number, as adapter.gguf:0.5") from None
        if not name:
            raise UsageError(f"--lora-scaled {text}: expected a file and a number, as adapter.gguf:0.5")
    for option, one in found:
        if not one.path.is_file():
            wrong = "is a folder" if one.path.is_dir() else "no regular file" if one.path.exists() else "no such file"
            raise UsageError(f"{option} {one.path}: {wrong}; expected an adapter file")
        if not math.isfinite(one.scale):
            raise UsageError(f"{option} {one.path}: times {one.scale}, expected a number")
    return tuple(one for _, one in found)


def _listed(text: str) -> list[str]:
    """Files with commas between them, as llama.cpp takes them; a file whose name has a comma is one."""
    return [text] if Path(text).exists() else text.split(",")
