"""What callers of the Python interface give, checked by its name and kind: vkback/checks.py, and what is of models and devices."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from vkback.api.errors import ModelError
from vkback.checks import choice, flag, number, path, whole, wrong
from vkback.device import Device as VulkanDevice
from vkback.errors import did_you_mean

__all__ = ["Prompt", "Prompts", "choice", "device", "flag", "number", "only_known", "path", "several", "token_ids", "whole", "wrong"]

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]
"""A text, or the ids of its tokens."""

Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Sequence[npt.NDArray[np.integer[Any]]]
"""Several of them."""


Function = TypeVar("Function", bound=Callable[..., Any])


def only_known(who: str, elsewhere: Mapping[str, str], needless: Mapping[str, str]) -> Callable[[Function], Function]:
    """Decorator: a keyword that the function has not is a ModelError which names the one that was meant. elsewhere: what other libraries
    call them; needless: what those have and there is no need of here, with the reason."""

    def decorated(function: Function) -> Function:
        known = [*inspect.signature(function).parameters]

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            for name in options:
                if name in needless:
                    raise ModelError(f"[model] {who} has no {name}, expected none: {needless[name]}. Leave it out")
                if name not in known:
                    near = f" Did you mean {elsewhere[name]}?" if name in elsewhere else did_you_mean(name, known)
                    raise ModelError(f"[model] {who} has no {name}.{near} It has {', '.join(known)}")
            return function(*args, **options)

        return cast(Function, checked)

    return decorated


def several(value: Prompt | Prompts) -> list[Prompt] | None:
    """The texts, where these are several: a list of texts, or of lists of ids. None: one text, or what is none."""
    found: list[Any] = list(value) if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 1) else []
    return found if found and all(isinstance(each, str | list | tuple | np.ndarray) for each in found) else None


def device(name: str, value: Any, who: str = "model") -> VulkanDevice | str | int | None:
    """What `vkback.device.Device.open` takes, or such a device."""
    if value is None or isinstance(value, str | VulkanDevice):
        return value
    return whole(name, value, "an index, part of a name, a UUID, a vkback.Device, or None", who=who)


def token_ids(name: str, value: Any, n_vocab: int) -> list[int]:
    """Ids of a vocabulary, given as a list, a tuple or an array of one axis."""
    expected = "a text, or token ids"
    if isinstance(value, bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise wrong(name, value, expected)
    ids = []
    for i, token in enumerate(value):
        if isinstance(token, str):
            raise wrong(name, value, f"{expected}; this is a list of texts, and this call goes on from one: `batch` takes several")
        id = whole(f"{name}[{i}]", token, f"a token id in 0..{n_vocab - 1}")
        if not 0 <= id < n_vocab:
            raise ModelError(f"[model] {name}: token {i} is {id}, expected an id in 0..{n_vocab - 1}")
        ids.append(id)
    return ids
