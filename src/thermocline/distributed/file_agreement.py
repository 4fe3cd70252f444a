"""`RankFiles`: agreement of the ranks of a job about the files that they follow (`data.follow`).

Rank 0 lists files, and publishes each in the rendezvous store under its number; the other ranks read it there. Ranks
have different numbers of batches of a file: each announces its batches, and one that has no more adds empty ones as
long as another rank has a batch. Nothing here is a collective, so that readers of ranks may run ahead of each other.

No rank leaves a file before all ranks have announced the end of their parts. So ranks are in the same file or in two
that follow each other, and the store has two files and one value per rank, however long the stream is.

Thread     the thread that reads; `request_end` on any. Does not block
Raises     `RankError` if the process that hosts the store has exited, or the reader of another rank has failed
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from thermocline.distributed.communicator import Groups
from thermocline.distributed.rendezvous import store_errors
from thermocline.errors import RankError

_LOST = (
    "the rendezvous store of the job does not answer while files are followed. See the error of the rank that exited "
    "first; a restart resumes from the last checkpoint"
)


class _Announced(NamedTuple):
    """Announcement of a rank."""

    file: int = 0
    """Number of its current file; 0: none yet."""
    batches: int = 0
    """Batches of its part that it has read."""
    ended: bool = False
    """Whether its part has no more."""
    before: int = 0
    """Batches of the file before it, with empty ones: equal on all ranks."""


class RankFiles:
    """See `data.follow.FileAgreement`."""

    def __init__(self, groups: Groups) -> None:
        self.rank, self.world = groups.topology.rank, groups.topology.world
        self._store = groups.store.clone()
        self._listing = 0
        self._own = _Announced()
        self._left = 0

    def begin(self) -> None:
        """Begin to read the files from the start or a position. Every rank does so in the same order."""
        self._listing += 1
        self._own, self._left = _Announced(), 0

    # ---- files

    def publish(self, number: int, name: str, size: int) -> None:
        """Make a file the next one of all ranks; an empty name: there is none any more. Rank 0."""
        self._set(f"file/{number % 2}", [number, name, size])

    def published(self, number: int) -> tuple[str, int] | None:
        """Return name and size of a file; None: rank 0 has not published it yet."""
        (found,) = self._get([f"file/{number % 2}"])
        if found is None or found[0] != number:
            return None
        return str(found[1]), int(found[2])

    def request_end(self) -> None:
        """Request rank 0 to publish the end."""
        self._set("end", True)

    def end_requested(self) -> bool:
        """Whether any rank has requested the end."""
        return self._get(["end"])[0] is not None

    # ---- batches

    def announce(self, number: int, batches: int, *, ended: bool = False) -> None:
        """Announce how many batches of a file this rank has read, and whether there are no more."""
        self._own = _Announced(number, batches, ended, self._own.before if self._own.file == number else self._left)
        self._set(f"rank/{self.rank}", self._own)

    def has_batch(self, number: int, batch: int) -> bool | None:
        """Return whether any rank has this batch of a file, from 1; None: not known yet."""
        ranks = [_Announced(*found) for found in self._get([f"rank/{r}" for r in range(self.world)]) if found]
        counts = [rank.batches if rank.file == number else rank.before for rank in ranks if rank.file >= number]
        if max(counts, default=0) >= batch:
            return True
        ended = [rank.file > number or (rank.file == number and rank.ended) for rank in ranks]
        return False if len(ended) == self.world and all(ended) else None

    def leave(self, batches: int) -> None:
        """Note the number of batches of the current file, with empty ones."""
        self._left = batches

    # ---- failures

    def fail(self, error: str) -> None:
        """Announce that the reader of this rank has failed."""
        self._set("failed", [self.rank, error])

    def check(self) -> None:
        """Raise `RankError` if the reader of another rank has failed."""
        (failed,) = self._get(["failed"])
        if failed is not None and failed[0] != self.rank:
            raise RankError(f"rank {failed[0]} failed while following files: {failed[1]}")

    # ---- store

    def _key(self, name: str) -> str:
        return f"follow/{self._listing}/{name}"

    def _set(self, name: str, value: Any) -> None:
        with store_errors(_LOST):
            self._store.set(self._key(name), json.dumps(value))

    def _get(self, names: Sequence[str]) -> list[Any]:
        """Return the values that are set, None for others."""
        keys = [self._key(name) for name in names]
        with store_errors(_LOST):
            if len(keys) > 1 and self._store.has_extended_api() and self._store.check(keys):
                return [json.loads(value) for value in self._store.multi_get(keys)]
            return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]
