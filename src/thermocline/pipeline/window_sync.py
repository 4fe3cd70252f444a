"""Keeps the pipelines of several ranks in step: per window, the ranks agree on the number of batches.

Every pipeline makes the same collective calls in the same order, each when its own threads reach them. A rank whose
loop is left early still has to take part in the collectives that the other ranks' stages may already have begun:
`drain` does so with empty windows. All ranks leave at the same batch, so each drains the same number and none blocks
for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from thermocline.batch import Batch
from thermocline.embedding.batch_plan import required_fields
from thermocline.embedding.table import Table
from thermocline.errors import RankError

if TYPE_CHECKING:
    from thermocline.distributed.communicator import Communicator, Groups

_NO_KEYS = np.empty(0, np.uint64)


class WindowSync:
    """One rank's side of the agreement. `agree` runs on one thread, in window order."""

    def __init__(self, tables: Sequence[Table], groups: Groups, training: bool, flags_fn: Callable[[], int]) -> None:
        self._tables = tables
        self._training = training
        self._flags_fn = flags_fn
        self._groups = groups
        self._comm: Communicator = groups.open_pipeline(training)
        self._agreed = 0
        self._ended = self._drained = False
        self._in_step = True
        """False while a collective part is under way, and for ever if it failed: this rank must skip later ones."""
        self.template: Batch | None = None
        """The last batch of the loader: empty batches get its fields, weights, dense features and position."""

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Mark the collective calls of one window. If they fail, this rank skips all later ones."""
        self._in_step, self._comm.user = False, threading.get_ident()
        yield
        self._in_step, self._comm.user = True, -1

    def agree(self, batches: int) -> tuple[int, int]:
        """Return the largest number of batches in any rank's next window, and the ranks' combined flags. Collective."""
        if self._ended:
            return 0, 0
        gathered = self._comm.all_gather(np.array([batches, self._flags_fn()], np.int64), "agreeing on the next window")
        self._agreed += 1
        most = int(gathered[:, 0].max())
        self._ended = most == 0
        return most, int(np.bitwise_or.reduce(gathered[:, 1]))

    def drain(self, windows: int) -> None:
        """Take part in collectives until `windows` were agreed on in all, then free the communicator."""
        if self._drained:
            return
        with contextlib.suppress(RankError):  # the other ranks have ended as well
            while self._agreed < windows and not self._ended and self._in_step:
                with self.collective():
                    most, _ = self.agree(0)
                    self._join_empty(most)
        self._groups.close_pipeline(self._training)
        self._drained = True

    def _join_empty(self, batches: int) -> None:
        """Take part in one window's exchange without any key, in the order in which the stages call."""
        empty = self.empty_batch()
        if self._training:
            for table in self._tables if batches else ():
                table.backend.exchange(table.stage([]), [table.inputs(empty)] * batches)
        else:
            for _, table in itertools.product(range(batches), self._tables):
                table.prepare_read(empty)

    def empty_batch(self) -> Batch:
        """Make a batch without examples, for a rank whose data has ended."""
        like = self.template
        if like is None:  # no data at all on this rank
            fields, names = required_fields(spec for table in self._tables for spec in table.registered)
            return Batch(_NO_KEYS, np.zeros(1, np.int64), fields, names=names)
        empty = Batch(_NO_KEYS, np.zeros(1, np.int64), like.fields, names=like.names)
        empty.weights = None if like.weights is None else like.weights[:0]
        empty.dense = None if like.dense is None else like.dense[:0]
        empty.label = None if like.label is None else like.label[:0]
        empty.time = None if like.time is None else like.time[:0]
        empty.position = like.position
        return empty


def window_sync_for(tables: Sequence[Table], training: bool, flags_fn: Callable[[], int]) -> WindowSync | None:
    """Return the agreement of the ranks that share the tables; None: this process alone has them."""
    groups = [table.groups for table in tables]
    if any(group is not groups[0] for group in groups):
        raise ValueError("all tables of a pipeline must be shared by the same ranks: give every table the same groups")
    return None if groups[0] is None else WindowSync(list(dict.fromkeys(tables)), groups[0], training, flags_fn)
