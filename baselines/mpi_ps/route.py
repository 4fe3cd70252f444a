"""Who asks whom for which keys: a step's route, made once, used by its rows and its gradients."""

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
    """Memory that is used again: a fresh array of this size costs a page fault per 4 KB, every step."""

    def __init__(self, dtype: Any) -> None:
        self._array: npt.NDArray[Any] = np.empty(0, dtype)

    def take(self, *shape: int) -> npt.NDArray[Any]:
        """An array of that shape; the one before it is overwritten."""
        size = int(np.prod(shape))
        if len(self._array) < size:
            self._array = np.empty(size + size // 4, self._array.dtype)
        return self._array[:size].reshape(shape)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The keys of one step on their way from workers to owners."""

    examples: Counts
    """Of every rank."""
    places: Slots
    """Per unique key of this worker: its row among those that come back, which are in the order of the owners."""
    sent: Counts
    """Keys this worker asks of each rank."""
    received: Counts
    """Keys each rank asks of this owner."""
    asked: WorkingSet
    """Those, in rank order: a key's occurrences are its askers, ascending."""


class Router:
    """Makes routes on a communicator of its own: every rank makes the same number of them."""

    def __init__(self, comm: MPI.Comm, threads: int) -> None:
        self._comm = comm
        self._threads = threads
        self._keys = Buffer(np.uint64)

    def route(self, keys: Keys, examples: int) -> Route:
        """For the unique keys of this rank's share, in any order."""
        ranks = self._comm.size
        order, sent = np.arange(len(keys)), np.array([len(keys)])
        if ranks > 1:
            owner = owner_of(keys, ranks).astype(np.uint16)
            order = np.argsort(owner, kind="stable")  # of 16 bits: a radix sort
            sent = np.bincount(owner, minlength=ranks)
        places = np.empty(len(keys), np.uint32)
        places[order] = np.arange(len(keys), dtype=np.uint32)
        told = np.stack([sent, np.full(ranks, examples)], 1).astype(np.int64)
        heard = np.empty_like(told)
        self._comm.Alltoall(told, heard)
        received = heard[:, 0]
        keys_in = self._keys.take(int(received.sum()))
        exchange(self._comm, keys[order], sent, keys_in, received)
        asked = WorkingSet.of(keys_in, threads=self._threads)
        return Route(heard[:, 1], places, sent, received, asked)


def exchange(comm: MPI.Comm, out: Floats | Keys, sent: Counts, into: Floats | Keys, received: Counts) -> None:
    """Rows of `out`, `sent` of them for each rank in turn, arrive in `into`, `received` from each rank in turn."""
    width = out.shape[1] if out.ndim == 2 else 1
    kind = MPI.FLOAT if out.dtype == np.float32 else MPI.UINT64_T

    def message(array: Any, counts: Counts) -> Any:
        firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        return [array, counts * width, firsts * width, kind]

    comm.Alltoallv(message(out, sent), message(into, received))
