"""What a sweep needs of a family of kernels. GEMVs in chains of launches, GEMVs in a token's program and attention implement it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from vkback.autotune.search import Tried
from vkback.ops.lowering import LowerContext
from vkback.tuning.lookup import Tuning
from vkback.tuning.row import Row

if TYPE_CHECKING:
    import pandas as pd


class Setting(Protocol):
    """A setting of every parameter of a family, in their order: a NamedTuple."""

    @property
    def text(self) -> str:
        """In words."""

    def _asdict(self) -> dict[str, Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Tuned(Protocol):
    """A task: something to find the best point for."""

    @property
    def key(self) -> str:
        """The journal's key. Tasks with equal keys are the same to the tables."""

    @property
    def line(self) -> str:
        """In words."""

    @property
    def match(self) -> Mapping[str, Any]:
        """What a row about the task matches beside its sizes."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """What a row about the task gives a range for, around these values."""


S = TypeVar("S", bound=Setting)
S_contra = TypeVar("S_contra", bound=Setting, contravariant=True)
J = TypeVar("J", bound=Tuned)
J_contra = TypeVar("J_contra", bound=Tuned, contravariant=True)


class Trial(Tried[S_contra], Protocol[S_contra]):
    """A task on the device, ready for points to be tried, as long as the block lasts."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def throughput(self, point: S_contra) -> float:
        """Microseconds without waiting for the launch before."""

    def nbytes(self, point: S_contra) -> int:
        """Bytes that are read in that time."""


@dataclass(frozen=True)
class Chosen(Generic[S]):
    """What the tables say of a task.

    incumbent  the point that a challenger has to beat, and the row that it comes from
    present    the point that the tables lead to now, the device's own among them
    """

    incumbent: S
    source: str
    present: S


@dataclass(frozen=True)
class TuneResult(Generic[S]):
    """What a task came to. Times are microseconds a launch: `latency` of one that waits for the one before, `throughput` back to back. Of a
    task in a token's program both are microseconds a token, and `nbytes` is what a token reads.

    match, sizes            as the task has them
    before, after           the incumbent and the point to use; the same where nothing beats it
    source                  the row that the first came from
    noise                   microseconds within which two latencies count as equal
    read_rate               of the device, GB/s
    refused, wrong, tried   how many points were not compiled, gave wrong results, were timed
    timed                   every point that was timed: the values of its parameters, latency and spread in microseconds
    """

    key: str
    line: str
    match: Mapping[str, Any]
    sizes: Mapping[str, int]
    before: S
    source: str
    latency_before: float
    throughput_before: float
    after: S
    latency: float
    throughput: float
    noise: float
    nbytes: int
    read_rate: float
    tried: int
    refused: int
    wrong: tuple[str, ...]
    date: str
    timed: tuple[tuple[tuple[Any, ...], float, float], ...] = ()

    @property
    def kept(self) -> bool:
        return self.after != self.before

    @property
    def percent(self) -> float:
        """Change of the latency."""
        return 100 * (self.latency / self.latency_before - 1)

    @property
    def read_share(self) -> float:
        """Bytes a second back to back over the device's read rate."""
        return self.nbytes / self.throughput / 1e3 / self.read_rate

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], point: Callable[[Iterable[Any]], S]) -> TuneResult[S]:
        """point: makes a setting of its values."""
        before, after = point(values["before"]), point(values["after"])
        timed = tuple((tuple(at), us, spread) for at, us, spread in values.get("timed", ()))
        return cls(**{**values, "before": before, "after": after, "wrong": tuple(values["wrong"]), "timed": timed})


def results_table(results: Sequence[TuneResult[S]]) -> pd.DataFrame:
    """A row a result: what its task matches, its sizes, `result` itself, and `read_share`."""
    import pandas as pd

    return pd.DataFrame([{**r.match, **r.sizes, "read_share": r.read_share, "result": r} for r in results])


class RowMaker(Protocol[S]):
    """What of a family its results need to become rows of a table; a tunable's class will do, without a device.

    journal         the journal's name for the results
    families        of the rows that `rows` makes
    """

    @property
    def journal(self) -> str: ...

    @property
    def families(self) -> tuple[str, ...]: ...

    def point(self, values: Iterable[Any]) -> S:
        """A setting from its values, as a journal has them."""

    def rows(self, results: Sequence[TuneResult[S]], present: Sequence[Row], card: str) -> list[list[str]]:
        """Rows for the device's own table, the lines of each.

        results  all that the journal has, newest last
        present  rows of the families that the table has now
        card     device and driver, for the evidence
        """


class Tunable(RowMaker[S], Protocol[J_contra, S]):
    """A family of kernels on a device.

    ctx             device and tables
    relative_noise  differences of a latency below this share of it are noise whatever the spread says
    """

    @property
    def ctx(self) -> LowerContext: ...

    @property
    def relative_noise(self) -> float: ...

    def opened(self) -> AbstractContextManager[None]:
        """Around all tasks: memory that they share."""

    def chosen(self, task: J_contra) -> Chosen[S]: ...

    def starts(self, task: J_contra) -> list[S]:
        """Points that the search begins at, the incumbent among them."""

    def neighbours(self, point: S) -> Iterable[S]: ...

    def refusal(self, task: J_contra, point: S, *, chosen: bool) -> str:
        """Why a point is not worth compiling; "" when it is. chosen: the tables lead to it."""

    def prepare(self, task: J_contra) -> Callable[[], Trial[S]]:
        """What a task needs beside the device's memory; then its trial can be opened. May run in a thread of its own."""

    def learn(self, tables: Tuning) -> None:
        """Told of the tables after each task that changed them."""
