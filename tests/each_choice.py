"""Which tests are marked `exhaustive`: those that only cross what others run, too. `make test` leaves them out.

Of a test on a device (marked `vulkan`) that is parametrized, the others are chosen by each-choice coverage: as few as hold each value of
each of its parameters, once without cooperative matrices, which many devices lack, and once with them where the test has both. A
`parametrize` row counts as one value, so a test with a single parametrize is never reduced. An op's case has as its values the parameters
of its line, of whole numbers their class (`class_of`). A type of weights counts for each kernel and activation type (KERNELS), and there
once for a token and once for several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any, get_args

import pytest

from vkback.ops.attention import prompt as attention_prompt
from vkback.ops.case import Case
from vkback.ops.lowering import Act
from vkback.ops.matmul import gemm_problem

KERNELS = frozenset[str]({*get_args(Act), *get_args(gemm_problem.GemmKernel), *get_args(attention_prompt.PromptKernel)})
"""Words by which a parameter chooses how to compute."""
MATRICES = KERNELS & {"coop_mat", "coop_reg", "matrix"}
"""Those that need cooperative matrices. Whether a device has them is known when the test runs, not before."""


def mark_exhaustive(items: Iterable[pytest.Item]) -> None:
    """Mark those of the collected tests that each-choice coverage has no need of."""
    tests: dict[tuple[Any, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("vulkan"):
            tests.setdefault((item.parent, item.originalname), []).append(item)
    for same in tests.values():
        needed = cover([frozenset(values_of(item)) for item in same])
        for i in set(range(len(same))) - needed:
            same[i].add_marker(pytest.mark.exhaustive)


def values_of(item: pytest.Function) -> Iterator[Hashable]:
    """What an item of a parametrized test has of the values that must be run."""
    params = item.callspec.params
    kernels = frozenset(kernel for value in params.values() for kernel in kernels_in(value))
    matrices = bool(kernels & MATRICES)
    marks = [m.args[0] for m in item.iter_markers("parametrize")]
    together = [tuple(n.strip() for n in m.split(",")) if isinstance(m, str) else tuple(m) for m in marks]
    named = {name for names in together for name in names}
    for names in (*together, *((name,) for name in params if name not in named)):
        row = [params[name] for name in names if name in params]
        for case in (value for value in row if isinstance(value, Case)):
            yield from ((names, part, matrices) for part in parts(case))
            if "type_a" in case.params:
                yield case.params["type_a"], case.params.get("n") == 1, kernels
        if rest := tuple(id(value) for value in row if not isinstance(value, Case)):
            yield names, rest, matrices


def kernels_in(value: object) -> Iterator[str]:
    if isinstance(value, tuple):
        for part in value:
            yield from kernels_in(part)
    elif isinstance(value, str) and value in KERNELS:
        yield value


def parts(case: Case) -> Iterator[Hashable]:
    """Parameters of a case with their values, all of its op."""
    for name, value in case.params.items():
        if name != "seed":
            yield case.op, name, class_of(value)


def class_of(value: object) -> Hashable:
    """Of equivalence classes of whole numbers: below 0, 0, 1, multiples of 32, of 4, others. Of a tuple the classes in it, each once."""
    if isinstance(value, tuple):
        return tuple(dict.fromkeys(map(class_of, value)))
    if isinstance(value, bool) or not isinstance(value, int):
        return repr(value)
    return "below 0" if value < 0 else str(value) if value < 2 else "of 32" if value % 32 == 0 else "of 4" if value % 4 == 0 else "other"


def cover(rows: Sequence[frozenset[Hashable]]) -> set[int]:
    """Few of the rows, which hold every value of all: time and again the one with the most values that none has so far, of several the one
    whose values are the rarest among those, of several the first.

    Both only get worse while rows are chosen, so that a row that still is what it was when it comes to the top is the best there is.
    """
    chosen: set[int] = set()
    seen: Counter[Hashable] = Counter()

    def rank(i: int) -> tuple[int, int, int]:
        return -sum(value not in seen for value in rows[i]), sum(seen[value] for value in rows[i]), i

    heap = [rank(i) for i in range(len(rows))]
    heapify(heap)
    while heap and heap[0][0] < 0:
        top = heap[0]
        if (now := rank(top[2])) != top:
            heapreplace(heap, now)
            continue
        heappop(heap)
        chosen.add(top[2])
        seen.update(rows[top[2]])
    return chosen
