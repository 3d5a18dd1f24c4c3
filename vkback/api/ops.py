"""Ops by name, for those who run one by itself: what it takes, shown by an example that the suite runs, and its numpy reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from vkback.api.errors import ModelError
from vkback.errors import nearest
from vkback.graph import Tensor
from vkback.ops.op import OPS, Op


def op_called(name: str) -> Op:
    """Raises ModelError that lists the ops there are."""
    found = OPS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ModelError(
            f"[device] no op is called {name}; of {len(OPS)} the nearest are {nearest(str(name), OPS)}. "
            "`vkback test-ops --list-ops` shows all"
        )
    return found


@cache
def signature(name: str) -> str:
    """How an op is run, by an example: `dev.run_op("RMS_NORM", F32 [1, 64], eps=1e-05) -> F32 [1, 64]`."""
    node = next(iter(op_called(name).cases())).build().node
    given = [repr(name), *map(_shown, node.inputs), *(f"{key}={value!r}" for key, value in node.params.items())]
    return f"dev.run_op({', '.join(given)}) -> {', '.join(map(_shown, node.outputs))}"


def _shown(tensor: Tensor) -> str:
    return f"{tensor.type}{' weights' if tensor.kind == 'weight' else ''} {list(tensor.shape)}"


class Params(dict[str, Any]):
    """Parameters of a node, which remember what was read. unread: names that nobody has."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.unread = set(given)

    def __getitem__(self, key: str) -> Any:
        self.unread.discard(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.unread.discard(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.unread.discard(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.unread.clear()
        return super().__iter__()

    def keys(self) -> Any:
        self.unread.clear()
        return super().keys()

    def items(self) -> Any:
        self.unread.clear()
        return super().items()

    def values(self) -> Any:
        self.unread.clear()
        return super().values()


WRONG = (KeyError, ValueError, IndexError, TypeError, AttributeError, AssertionError, ArithmeticError, StopIteration)
"""What an op's rules raise for operands and parameters that they were not written for."""


def misuse(name: str, error: Exception) -> ModelError:
    """The error to raise in the place of one of WRONG."""
    why = f"the parameter {error} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
    return ModelError(f"[device] {name}: {why}. An example: {signature(name)}")
