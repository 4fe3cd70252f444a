"""Routes of keys from workers to owners: computed once per step, used for its rows and its gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from thermocline.arrays import Floats, Keys, Slots
from thermocline.batch import WorkingSet
from thermocline.distributed.key_sharding import owner_of

Counts = npt.NDArray[np.int64]


class Buffer:
    """Reusable memory: a new array of this size would cost a page fault per 4 KB in every step."""

    def __init__(self, dtype: Any) -> None:
        self._array: npt.NDArray[Any] = np.empty(0, dtype)

    def take(self, *shape: int) -> npt.NDArray[Any]:
        """Array of `shape`; overwrites the array of the previous call."""
        size = int(np.prod(shape))
        if len(self._array) < size:
            self._array = np.empty(size + size // 4, self._array.dtype)
        return self._array[:size].reshape(shape)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Exchange pattern of one step."""

    examples: Counts
    """Examples per rank."""
    reply_index: Slots
    """Per unique key of this worker: index of its row in the reply, which is ordered by owner."""
    send_counts: Counts
    """Per rank: keys that this worker requests from it."""
    recv_counts: Counts
    """Per rank: keys that it requests from this owner."""
    requested: WorkingSet
    """The keys requested from this owner, in rank order: occurrences of a key are its requesting ranks, ascending."""


class Router:
    """Computes routes on a separate communicator. Collective: every rank computes the same number of routes."""

    def __init__(self, comm: MPI.Comm, threads: int) -> None:
        self._comm = comm
        self._threads = threads
        self._keys = Buffer(np.uint64)

    def route(self, keys: Keys, examples: int) -> Route:
        """Route of the unique keys of this rank, in any order."""
        ranks = self._comm.size
        order, send_counts = np.arange(len(keys)), np.array([len(keys)])
        if ranks > 1:
            owner = owner_of(keys, ranks).astype(np.uint16)
            order = np.argsort(owner, kind="stable")  # radix sort of 16-bit integers
            send_counts = np.bincount(owner, minlength=ranks)
        reply_index = np.empty(len(keys), np.uint32)
        reply_index[order] = np.arange(len(keys), dtype=np.uint32)
        to_ranks = np.stack([send_counts, np.full(ranks, examples)], 1).astype(np.int64)
        from_ranks = np.empty_like(to_ranks)
        self._comm.Alltoall(to_ranks, from_ranks)
        recv_counts, examples_of_ranks = from_ranks[:, 0], from_ranks[:, 1]
        received_keys = self._keys.take(int(recv_counts.sum()))
        exchange(self._comm, keys[order], send_counts, received_keys, recv_counts)
        requested = WorkingSet.of(received_keys, threads=self._threads)
        return Route(examples_of_ranks, reply_index, send_counts, recv_counts, requested)


def exchange(
    comm: MPI.Comm, source: Floats | Keys, send_counts: Counts, target: Floats | Keys, recv_counts: Counts
) -> None:
    """Alltoallv of rows: `send_counts[r]` rows of `source` to rank r, `recv_counts[r]` rows of `target` from it."""
    width = source.shape[1] if source.ndim == 2 else 1
    kind = MPI.FLOAT if source.dtype == np.float32 else MPI.UINT64_T

    def message(array: Any, counts: Counts) -> Any:
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        return [array, counts * width, starts * width, kind]

    comm.Alltoallv(message(source, send_counts), message(target, recv_counts))
