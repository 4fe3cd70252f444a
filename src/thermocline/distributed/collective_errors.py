"""`CollectiveRunner`: runs work on every rank between collectives and raises on all ranks if it fails on one.

An error is sent as the name of its type and its text, and re-created as `RankError` only: a rank whose own work
succeeded never raises the type of another rank's error.

Thread     the training thread, between steps
Blocks     until every rank has called the same method, at most `dist.timeout` seconds; `broadcast` on rank 0 may return
           before the other ranks have called it
Raises     the local exception on the rank that failed, `RankError` with its text on all others
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from thermocline.errors import RankError

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Communicator
    from thermocline.distributed.messages import Buffer
    from thermocline.embedding.table import Table

T = TypeVar("T")
_MAX_ERROR_TEXT = 10_000


class CollectiveRunner:
    """Collective calls with error propagation. With one process nothing is sent.

    `doing` names the work for error messages, as a participle: "committing tables". Results that are sent to another
    rank must be values of `messages.encode`.
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
        """Run `work` on every rank and return all results on every rank, by rank."""
        if self._comm is None:
            return [work()]
        return _decoded(self._comm.all_gather_message(self.run_all(doing, lambda: _encoded(work())), doing))

    def gather_to_rank0(self, doing: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all results on rank 0, by rank; [] on the others."""
        if self._comm is None:
            return [work()]
        return _decoded(self._comm.gather_message(self.run_all(doing, lambda: _encoded(work())), doing))

    def run_all(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return the local result, which is not sent."""
        if self._comm is None:
            return work()
        error: Exception | None = None
        try:
            with self._comm.busy():
                result = work()
        except Exception as failure:
            error = failure
        failed = self._comm.all_gather(np.array([error is not None]), doing)[:, 0]
        if not failed.any():
            return result
        errors = _decoded(self._comm.all_gather_message(_encoded(None if error is None else _describe(error)), doing))
        if error is not None:
            raise error
        rank = int(failed.argmax())
        raise _rank_error(rank, doing, errors[rank])

    def broadcast(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 only and return its result on every rank. Every other rank receives it once."""
        if self._comm is None:
            return work()
        if not self.is_rank0:
            (received,) = _decoded([self._comm.broadcast_message(None, doing)])
            match received:
                case (value, None):
                    return value  # type: ignore[no-any-return]
                case (None, error):
                    raise _rank_error(0, doing, error)
            raise RankError(
                f"rank 0 sent a {type(received).__name__} while {doing}: ranks called different collectives"
            )
        error = None
        try:
            with self._comm.busy():
                result = work()
                message = _encoded((result, None))
        except Exception as failure:
            error, message = failure, _encoded((None, _describe(failure)))
        self._comm.broadcast_message(message, doing)
        if error is not None:
            raise error
        return result

    def barrier(self, doing: str) -> None:
        """Wait until every rank has called it."""
        if self._comm is not None:
            self._comm.barrier(doing)


def _encoded(value: Any) -> bytearray:
    from thermocline.distributed.messages import encode

    return encode(value)


def _decoded(received: Sequence[Buffer]) -> list[Any]:
    from thermocline.distributed.messages import decode

    return [decode(message) for message in received]


def _describe(error: Exception) -> tuple[str, str]:
    """Return type name and text."""
    return type(error).__name__, str(error)[:_MAX_ERROR_TEXT]


def _rank_error(rank: int, doing: str, error: Any) -> RankError:
    match error:
        case (str(kind), str(text)):
            return sent_error(rank, doing, f"{kind}: {text}")
    return RankError(f"rank {rank} failed while {doing}")


def sent_error(rank: int, doing: str, text: str) -> RankError:
    """Return the error of another rank, which has sent it: all ranks can continue."""
    error = RankError(f"rank {rank} failed while {doing}: {text}")
    error.all_connected = True
    return error
