"""Pipelines of several ranks, side by side: window by window they agree who still has batches.

Every pipeline does the same collectives in the same order, whenever its threads come to them. A rank whose loop is left
early still owes the others those that its stages were allowed to begin: `leave` makes up for them, with empty windows.
All ranks leave at the same batch, so all owe as many, and none waits for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from thermocline.batch import Batch
from thermocline.embedding.table import Table
from thermocline.errors import RankError

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Communicator
    from thermocline.distributed.sharded_backend import Ranks

_NO_KEYS = np.empty(0, np.uint64)


class WindowSync:
    """The pipelines of all ranks, as one of them sees them. `meet` runs on one thread, in window order."""

    def __init__(
        self, tables: Sequence[Table], ranks: Sequence[Ranks], training: bool, flags_fn: Callable[[], int]
    ) -> None:
        self._tables = tables
        self._ranks = ranks
        self._training = training
        self._flags_fn = flags_fn
        groups = ranks[0].groups
        self._comm: Communicator = groups.ahead if training else groups.read
        self._comm.claim()
        self._met = 0
        self._ended = self._left = False
        self._fit = True
        """Whether this rank stands where the others believe it to."""
        self._last: Batch | None = None

    def seen(self, batch: Batch) -> None:
        """The last batch so far: empty ones take after it."""
        self._last = batch

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All that the ranks do about one window. If it fails here, this rank can keep nobody sync any more."""
        self._fit, self._comm.user = False, threading.get_ident()
        yield
        self._fit, self._comm.user = True, -1

    def agree(self, batches: int) -> tuple[int, int]:
        """The most batches that any rank's next window has, and what the ranks say together."""
        if self._ended:
            return 0, 0
        found = self._comm.all_gather(np.array([batches, self._flags_fn()], np.int64), "agreeing on the next window")
        self._met += 1
        most = int(found[:, 0].max())
        self._ended = most == 0
        return most, int(np.bitwise_or.reduce(found[:, 1]))

    def drain(self, windows: int) -> None:
        """The pipeline ends: the others may count on this rank for so many windows in all."""
        if self._left:
            return
        with contextlib.suppress(RankError):  # they are gone, too
            while self._met < windows and not self._ended and self._fit:
                with self.together():
                    most, _ = self.agree(0)
                    self._take_part(most)
        self._left, self._comm.user = True, None

    def _take_part(self, batches: int) -> None:
        """In what the others do about a window, asking for nothing: in the order in which the stages do it."""
        if self._training:
            for ranks in self._ranks if batches else ():
                ranks.plan_nothing(batches)
        else:
            for _, ranks in itertools.product(range(batches), self._ranks):
                ranks.read_nothing()

    def empty_batch(self) -> Batch:
        """Of no examples: for a rank that has run out of data."""
        like = self._last
        fields = like.fields if like is not None else max(table.fields_read for table in self._tables)
        empty = Batch(_NO_KEYS, np.zeros(1, np.int64), fields)
        if like is not None:
            empty.weights = None if like.weights is None else like.weights[:0]
            empty.dense = None if like.dense is None else like.dense[:0]
            empty.label = None if like.label is None else like.label[:0]
            empty.position = like.position
        return empty


def window_sync_for(tables: Sequence[Table], training: bool, flags_fn: Callable[[], int]) -> WindowSync | None:
    """None: the tables are this process's alone."""
    over = [table.ranks for table in dict.fromkeys(tables) if table.ranks is not None]
    if not over:
        return None
    if len(over) < len(set(tables)) or any(ranks.groups is not over[0].groups for ranks in over):
        raise ValueError("tables over several ranks need a pipeline without others, and the same groups")
    return WindowSync(tables, over, training, flags_fn)
