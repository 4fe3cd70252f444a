"""`CollectiveRunner`: runs work on every rank between collectives and raises on all ranks if it fails on one.

Thread     the training thread, between steps
Blocks     until every rank has called the same method, at most `dist.timeout` seconds
Raises     the local exception on the rank that failed, `RankError` with its text on all others
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from thermocline.errors import RankError

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Communicator
    from thermocline.embedding.table import Table

T = TypeVar("T")


class CollectiveRunner:
    """Collective calls with error propagation. With one process nothing is sent.

    `doing` names the work for error messages, as a participle: "committing tables".
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self._comm = comm
        self.rank, self.world = (0, 1) if comm is None else (comm.topology.rank, comm.topology.world)
        self.is_rank0 = self.rank == 0

    @classmethod
    def of(cls, tables: Sequence[Table]) -> CollectiveRunner:
        """Return the runner for the ranks that share the tables."""
        groups = [table.groups for table in tables]
        if all(group is None for group in groups):
            return cls()
        if groups[0] is None or any(group is not groups[0] for group in groups):
            raise ValueError("tables must all be sharded over one tc.Groups, or all be local: they are mixed")
        return cls(groups[0].train)

    def gather(self, doing: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results, by rank."""
        if self._comm is None:
            return [work()]
        error: Exception | None = None
        value: Any = None
        try:
            with self._comm.busy():
                value = work()
        except Exception as failure:
            error = failure
        results = self._comm.all_gather_object((value, None if error is None else _describe(error)), doing)
        if error is not None:
            raise error
        for rank, (_, message) in enumerate(results):
            if message is not None:
                raise RankError(f"rank {rank} failed while {doing}: {message}")
        return [value for value, _ in results]

    def run_all(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return the local result, which need not be picklable."""
        local: list[T] = []
        self.gather(doing, lambda: local.append(work()))
        return local[0]

    def broadcast(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 only and return its result on every rank."""
        return self.gather(doing, lambda: work() if self.is_rank0 else None)[0]  # type: ignore[return-value]

    def barrier(self, doing: str) -> None:
        """Wait until every rank has called it."""
        if self._comm is not None:
            self._comm.barrier(doing)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
