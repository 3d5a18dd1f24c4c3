"""Weights as a file has them: the tensors that a recipe combines, their rows and values, and what is wrong with them."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from vkback import quants
from vkback.gguf.file import GgufError, GgufFile
from vkback.graph import Tensor

Bytes = npt.NDArray[np.uint8]


def sources(weight: Tensor) -> tuple[str, ...]:
    """Names of the tensors that make a weight."""
    return weight.recipe.sources if weight.recipe else (weight.name,)


def file_bytes(file: GgufFile, weight: Tensor) -> int:
    return sum(file.tensors[s].nbytes for s in sources(weight))


def vector_values(file: GgufFile, weight: Tensor) -> npt.NDArray[np.float32] | npt.NDArray[np.int32]:
    """The values of a weight of one axis; what has more in the file (the experts' biases) lies end to end. Whole numbers are no decoded
    weights."""
    found = [file.tensors[s] for s in sources(weight)]
    if weight.type == "I32":
        return np.concatenate([np.asarray(t.data).reshape(-1).view(np.int32) for t in found])
    parts = [np.asarray(quants.decode(t.type, np.asarray(t.data).reshape(-1)), np.float32).ravel() for t in found]
    if not all(np.isfinite(part).all() for part in parts):
        raise not_numbers(file, weight)
    if weight.recipe is not None and weight.recipe.how == "interleave":
        return np.stack(parts, axis=-1).ravel()
    whole = np.concatenate(parts)
    return whole if weight.recipe is None else whole * np.float32(weight.recipe.scale)


def not_numbers(file: GgufFile, weight: Tensor) -> GgufError:
    """Which tensor of a weight holds something else than numbers."""
    for source in sources(weight):
        t = file.tensors[source]
        row = quants.unsound_row(t.type, t.data)
        if row is not None:
            where = f"row {t.row0 + row}" if len(t.shape) > 1 else "it"
            return GgufError(
                f"[gguf] {file.where(source)}: tensor {t.name} ({t.type} {list(t.shape)}): {where} holds weights that are NaN or infinite. "
                "The file is damaged, or was made from a damaged model: fetch it again, or convert the model anew"
            )
    return GgufError(
        f"[gguf] {file.path}: weights of {weight.name} came to the device as NaN or infinite, in the file they are numbers. The file has "
        "changed meanwhile, or a kernel is wrong on this device: load it again, and if that fails too, run `vkback doctor`"
    )


def decoded(file: GgufFile, weight: Tensor) -> bool:
    """Whether a weight is F32 where the file has another type (a weight that is trained)."""
    names = sources(weight)
    return weight.type == "F32" and len(names) == 1 and file.tensors[names[0]].type != "F32"


def gather_rows(file: GgufFile, weight: Tensor, a: int, b: int) -> Bytes:
    """Rows a..b (experts flattened) of a weight as its recipe combines them, in file bytes [b - a, row_bytes]; a weight that is F32 where
    the file has another type is decoded."""
    recipe = weight.recipe
    names = sources(weight)
    if decoded(file, weight):
        t = file.tensors[names[0]]
        return np.ascontiguousarray(quants.decode(t.type, t.data[a:b]), np.float32).view(np.uint8)
    data = [file.tensors[n].data for n in names]
    if recipe is None or len(names) == 1:
        return np.ascontiguousarray(data[0][a:b])
    if recipe.how == "interleave":
        count = len(data)
        out = np.empty((b - a, data[0].shape[1]), np.uint8)
        for s, source in enumerate(data):
            first = -(-(a - s) // count)
            last = -(-(b - s) // count)
            out[first * count + s - a :: count] = source[first:last]
        return out
    if len(weight.shape) > 2:
        raise ValueError(f"{weight}: experts are not stacked by rows")
    parts: list[Bytes] = []
    start = 0
    for source in data:
        end = start + prod(source.shape[:1])
        if max(a, start) < min(b, end):
            parts.append(source[max(a, start) - start : min(b, end) - start])
        start = end
    return np.concatenate(parts)
