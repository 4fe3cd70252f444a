"""What ranks do side by side, between collectives: if it fails on one, it fails on all, with that one's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from thermocline.errors import RankError

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Communicator
    from thermocline.embedding.table import Table

T = TypeVar("T")


class CollectiveRunner:
    """The ranks of a job, or this process alone: then nothing is sent."""

    def __init__(self, comm: Communicator | None = None) -> None:
        self._comm = comm
        self.rank, self.world = (0, 1) if comm is None else (comm.topology.rank, comm.topology.world)
        self.is_rank0 = self.rank == 0
        """Whether this is the rank that writes what is written once."""

    @classmethod
    def of(cls, tables: Sequence[Table]) -> CollectiveRunner:
        """Of the tables' ranks. Called from the training thread, between steps."""
        groups = [table.groups for table in tables]
        if all(group is None for group in groups):
            return cls()
        if groups[0] is None or any(group is not groups[0] for group in groups):
            raise ValueError("either all tables are shared by the ranks of one job, or none is")
        return cls(groups[0].train)

    def gather(self, what: str, work: Callable[[], T]) -> list[T]:
        """What `work()` gave on every rank, by rank. Raises on every rank if it raised on any."""
        if self._comm is None:
            return [work()]
        error: Exception | None = None
        value: Any = None
        try:
            value = work()
        except Exception as failure:
            error = failure
        found = self._comm.all_gather_object((value, None if error is None else _words(error)), what)
        if error is not None:
            raise error
        for rank, (_, words) in enumerate(found):
            if words is not None:
                raise RankError(f"rank {rank} failed while it {what}: {words}")
        return [value for value, _ in found]

    def run_all(self, what: str, work: Callable[[], T]) -> T:
        """What `work()` gives here. Raises on every rank if it raises on any."""
        kept: list[T] = []
        self.gather(what, lambda: kept.append(work()))
        return kept[0]

    def broadcast(self, what: str, work: Callable[[], T]) -> T:
        """What `work()` gave on rank 0, the only one that does it."""
        return self.gather(what, lambda: work() if self.is_rank0 else None)[0]  # type: ignore[return-value]

    def barrier(self, what: str) -> None:
        """Returns once every rank has come here."""
        if self._comm is not None:
            self._comm.barrier(what)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
