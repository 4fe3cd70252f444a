"""`FollowReader`: reads the files of a growing folder or glob once, in the order of their names (`data.follow`).

Each file is read by a `Reader` of its own, and a batch never spans two files: the batches are a function of the files
and their order, whenever they appear. A position names the files taken, and the position inside the current one.

Over ranks, rank 0 lists the files, and every rank reads a part of each file (`FileAgreement`). All ranks have the same
number of batches of a file: a rank with fewer adds empty ones. So the batches of all ranks are a function of the files,
their order and the number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Protocol, Self

import numpy as np

from thermocline.batch import Batch
from thermocline.config.data import Data
from thermocline.data.feature_hashing import make_hasher
from thermocline.data.features import FeatureCounts, Features
from thermocline.data.files import NoExamples, Source
from thermocline.data.formats import even_block_bytes
from thermocline.data.new_files import NewFiles, Taken
from thermocline.data.reader import Reader, Skipped
from thermocline.data.text_blocks import Malformed
from thermocline.errors import ConfigError, DataError, RankError
from thermocline.utils.text_format import parse_duration

_POLL_SECONDS = 0.2
_AGREE_SECONDS = 0.01
_VISIBLE_SECONDS = 30.0
"""Time after which a file that rank 0 has listed must be visible to the other ranks."""
_BLOCKS_PER_RANK = 4


class FileAgreement(Protocol):
    """Agreement of ranks about the files: `distributed/file_agreement.py`."""

    rank: int
    world: int

    def begin(self) -> None:
        """Begin to read files, from the start or a position."""

    def publish(self, number: int, name: str, size: int) -> None:
        """Make a file the next one of all ranks; an empty name: there is none any more. Rank 0."""

    def published(self, number: int) -> tuple[str, int] | None:
        """Return name and size of a file; None: rank 0 has not published it yet."""

    def request_end(self) -> None:
        """Request rank 0 to publish the end. Any thread."""

    def end_requested(self) -> bool:
        """Whether any rank has requested the end."""

    def announce(self, number: int, batches: int, *, ended: bool = False) -> None:
        """Announce how many batches of a file this rank has read, and whether there are no more."""

    def has_batch(self, number: int, batch: int) -> bool | None:
        """Return whether any rank has this batch of a file, from 1; None: not known yet."""

    def leave(self, batches: int) -> None:
        """Note that the current file had so many batches, with empty ones."""

    def fail(self, error: str) -> None:
        """Announce that the reader of this rank has failed."""

    def check(self) -> None:
        """Raise `RankError` if the reader of another rank has failed."""


class FollowReader(FeatureCounts):
    """An iterable of batches that waits for new files; it ends after `data.follow_idle` without one.

    Thread safety: one thread iterates; `stop_waiting` may be called and `waiting` read on others.
    """

    def __init__(
        self,
        data: Data,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = False,
        features: Features | None = None,
        labelled: bool | None = True,
        tensors: bool = True,
        agreement: FileAgreement | None = None,
    ) -> None:
        """Open the folder or glob data.train. Without `features`, wait for the first file and take them from it.

        agreement   of the ranks that read the files together; None: this process reads all
        """
        if len(data.train) != 1:
            raise ConfigError(
                f"data.train has {len(data.train)} paths: data.follow = true reads one folder or glob; give one path"
            )
        self.data = data
        self.path = data.train[0]
        self._options: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "labelled": labelled, "tensors": tensors}
        self._options["batch_size"] = batch_size
        self._agreement = agreement
        self._idle = None if data.follow_idle is None else parse_duration(data.follow_idle)
        self._files = self._new_listing()
        self.while_waiting: Callable[[], None] | None = None
        """Called about every 0.2 s on the iterating thread while it waits; may raise."""
        self.waiting = False
        """Whether the iteration waits for a file."""
        self._stopping = False
        self._skipped = 0
        self._malformed: list[Malformed] = []
        self._start: tuple[Taken, Any, int] = (Taken(), None, 0)
        """Files taken, and the position inside the last one; None: it was read to its end, or, over ranks, this rank
        has read nothing of it. Over ranks, the batches read of the last one, empty ones too: equal on all ranks."""
        self.features = self._first_features() if features is None else features
        self._identity = {
            "reader": "follow",
            "features": hashlib.blake2b(
                json.dumps([self.features.to_json(), seed, shuffle, batch_size]).encode(), digest_size=8
            ).hexdigest(),
            **({} if agreement is None else {"shards": agreement.world}),
        }

    def _new_listing(self) -> NewFiles:
        if self._agreement is not None:
            self._agreement.begin()
        return NewFiles(self.path, marker=self.data.follow_complete == "_SUCCESS")

    def _first_features(self) -> Features:
        for taken, source in self._new_files(Taken()):
            try:
                return self._open(source, None, taken.count).features
            except NoExamples:
                self._skip(taken.count)
        raise DataError(
            f"{self._files.shown} has had no file with examples for {self._idle:g} s (data.follow_idle): nothing to "
            "train on"
        )

    # ---- properties

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that determine the batches, together with the files."""
        return dict(self._identity)

    @property
    def skipped(self) -> Skipped:
        """Malformed lines that the latest iteration has skipped so far."""
        return Skipped(self._skipped, tuple(self._malformed))

    def __repr__(self) -> str:
        return f"FollowReader({self._files.shown!r}, {self.fields} fields, {self.dense} dense)"

    # ---- positions

    def seek(self, position: Mapping[str, Any]) -> Self:
        """Start the next iteration after the batch with this `position`."""
        for name in (*self._identity, "shards"):  # also of ranks, in one process
            expected = self._identity.get(name)
            actual = position.get(name) if isinstance(position, Mapping) else position
            if actual != expected:
                raise DataError(
                    f"this position belongs to other data or settings: its {name} is {actual!r}, but this reader's is "
                    f"{expected!r} (features: columns, their roles and statistics, seed, shuffle, batch size)"
                )
        try:
            recent = [(str(name), int(size)) for name, size in position["files"]]
            taken, batches = Taken(int(position["taken"]), recent), int(position.get("batches", 0))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"this position is damaged: {type(error).__name__}: {error}") from None
        self._start = (taken, position.get("within"), batches)
        return self

    # ---- batches

    def __iter__(self) -> Iterator[Batch]:
        (taken, within, batches), self._start = self._start, (Taken(), None, 0)
        self._stopping, self._files = False, self._new_listing()
        self._skipped, self._malformed = 0, []
        return (
            self._batches(taken, within, batches)
            if self._agreement is None
            else self._agreed(self._agreement, self._batches(taken, within, batches))
        )

    @staticmethod
    def _agreed(ranks: FileAgreement, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches; let other ranks, which may wait for this one outside of any collective, know of an error."""
        try:
            yield from batches
        except RankError:  # another rank knows of it
            raise
        except Exception as error:
            with contextlib.suppress(RankError):
                ranks.fail(f"{type(error).__name__}: {error}")
            raise

    def _batches(self, taken: Taken, within: Any, batches: int) -> Iterator[Batch]:
        if within is not None or batches:
            yield from self._file(self._files.find(*taken.recent[-1]), taken, within, batches)
        for with_file, source in self._new_files(taken):
            yield from self._file(source, with_file, None, 0)

    def _new_files(self, taken: Taken) -> Iterator[tuple[Taken, Source]]:
        """Yield new files as they appear, each with the files taken up to it."""
        while not self._stopping:
            found = self._next_file(taken)
            if found is None:
                return
            name, source = found
            taken = taken.add(name, source.size)
            yield taken, source

    def _next_file(self, taken: Taken) -> tuple[str, Source] | None:
        """Return the next file, over ranks that of rank 0; None: there is none any more."""
        agreement = self._agreement
        if agreement is None:
            return self._files.next(taken) or self._wait(taken)
        if agreement.rank == 0:
            found = self._files.next(taken) or self._wait(taken)
            name, size = ("", 0) if found is None else (found[0], found[1].size)
            if found is not None or not self._stopping:  # a pipeline that closes says nothing: it may be resumed
                agreement.publish(taken.count + 1, name, size)
            return found
        self.waiting = True
        try:
            published = self._poll(lambda: agreement.published(taken.count + 1), _POLL_SECONDS / 4)
        finally:
            self.waiting = False
        if published is None or not published[0]:
            return None
        return published[0], self._visible_file(*published)

    def _poll(self, read: Callable[[], Any], seconds: float) -> Any:
        """Wait until `read` returns something else than None. None: `stop_waiting` was called."""
        answer = read()
        while answer is None and not self._stopping:
            if self._agreement is not None:
                self._agreement.check()
            if self.while_waiting is not None:
                self.while_waiting()
            time.sleep(seconds)
            answer = read()
        return answer

    def _visible_file(self, name: str, size: int) -> Source:
        """Return a file that rank 0 has listed: on a file system of several machines it may be visible here later."""
        until = time.monotonic() + _VISIBLE_SECONDS
        while True:
            try:
                return self._files.find(name, size)
            except DataError:
                if time.monotonic() > until or self._stopping:
                    raise
                time.sleep(_POLL_SECONDS)

    def _wait(self, taken: Taken) -> tuple[str, Source] | None:
        """Wait for the next file. None: data.follow_idle has passed, or `stop_waiting` was called."""
        start = time.monotonic()
        self.waiting = True
        try:
            while not self._stopping and (self._idle is None or time.monotonic() - start < self._idle):
                until = time.monotonic() + max(_POLL_SECONDS, 10 * self._files.list_seconds)
                while not self._stopping and (left := until - time.monotonic()) > 0:
                    if self._agreement is not None:
                        self._agreement.check()
                        if self._agreement.end_requested():
                            return None
                    if self.while_waiting is not None:
                        self.while_waiting()
                    time.sleep(min(left, _POLL_SECONDS))
                found = None if self._stopping else self._files.next(taken)
                if found is not None:
                    return found
            return None
        finally:
            self.waiting = False

    def stop_waiting(self) -> None:
        """End the iteration soon: at its next wait, or file."""
        self._stopping = True

    def request_end(self) -> None:
        """End the iteration of all ranks at the next wait of rank 0 for a file. Any thread."""
        if self._agreement is None:
            self.stop_waiting()
        else:
            self._agreement.request_end()

    def _file(self, source: Source, taken: Taken, within: Any, batches: int) -> Iterator[Batch]:
        if self._agreement is None:
            return self._whole_file(source, taken, within)
        return self._part(self._agreement, source, taken, within, batches)

    def _whole_file(self, source: Source, taken: Taken, within: Any) -> Iterator[Batch]:
        """Yield the batches of one file. The position of the last one is that of a file read to its end."""
        try:
            reader = self._open(source, self.features, taken.count)
        except NoExamples:
            return
        taken_files = [list(file) for file in taken.recent]
        # Stored in checkpoints: keep the names.
        position = {**self._identity, "taken": taken.count, "files": taken_files}
        last: Batch | None = None
        try:
            with contextlib.closing(_generator(reader if within is None else reader.seek(within))) as batches:
                for batch in batches:
                    if last is not None:
                        yield last
                    batch.position = {**position, "within": batch.position}
                    last = batch
        except NoExamples:
            return
        finally:
            self._skipped += reader.skipped.count
            self._malformed += reader.skipped.malformed[: 10 - len(self._malformed)]
        source.check_unchanged()
        if last is not None:
            last.position = {**position, "within": None}
            yield last

    def _part(self, ranks: FileAgreement, source: Source, taken: Taken, within: Any, batches: int) -> Iterator[Batch]:
        """Yield this rank's batches of one file, and empty ones while another rank has more."""
        number = taken.count
        position = {**self._identity, "taken": number, "files": [list(file) for file in taken.recent]}

        def placed(batch: Batch) -> Batch:
            batch.position = {**position, "within": within, "batches": batches}
            return batch

        try:
            reader = self._open(source, self.features, number)
        except NoExamples:
            return self._skip(number)
        own = 0
        try:
            with contextlib.closing(_generator(reader if within is None else reader.seek(within))) as read:
                for batch in read:
                    batches, within = batches + 1, batch.position
                    own = batches
                    ranks.announce(number, own)
                    yield placed(batch)
        finally:
            self._skipped += reader.skipped.count
            self._malformed += reader.skipped.malformed[: 10 - len(self._malformed)]
        source.check_unchanged()
        ranks.announce(number, own, ended=True)
        while self._poll(functools.partial(ranks.has_batch, number, batches + 1), _AGREE_SECONDS):
            batches += 1
            yield placed(self._empty())
        ranks.leave(batches)

    def _skip(self, number: int) -> None:
        """Leave a file without examples, over ranks when all have opened it."""
        if self._agreement is not None:
            self._agreement.announce(number, 0, ended=True)
            self._poll(functools.partial(self._agreement.has_batch, number, 1), _AGREE_SECONDS)
            self._agreement.leave(0)

    def _empty(self) -> Batch:
        """Make a batch without examples."""
        label: Any = np.empty(0, np.float32)
        dense: Any = np.empty((0, self.dense), np.float32) if self.dense else None
        if self._options["tensors"]:
            import torch

            label, dense = torch.from_numpy(label), None if dense is None else torch.from_numpy(dense)
        ids, fields = np.empty(0, np.uint64), len(self.features.fields)
        time = None if self.data.time is None else np.empty(0, np.int64)
        batch = Batch(ids, np.zeros(1, np.int64), fields, None, dense, label, names=self.features.fields, time=time)
        hasher = make_hasher(self.data.hashing, self.data.threads)
        return batch if hasher is None else hasher(batch)

    def _open(self, source: Source, features: Features | None, number: int) -> Reader:
        settings = dataclasses.replace(self.data, train=(), follow=False, follow_idle=None)
        reader = Reader([source], settings, features=features, **self._options, **self._shard(source, number))
        reader.set_epoch(number)
        return reader

    def _shard(self, source: Source, number: int) -> dict[str, Any]:
        """Return the part of a file that this rank reads, as arguments of `Reader`. A file that cannot be divided is
        read by another rank each time."""
        ranks = self._agreement
        if ranks is None:
            return {}
        block_bytes = even_block_bytes([source], _BLOCKS_PER_RANK * ranks.world)
        shard = (ranks.rank + number) % ranks.world, ranks.world
        return {"shard": shard, "contiguous": True, "block_bytes": block_bytes}


def _generator(reader: Reader) -> Generator[Batch, None, None]:
    """Iterate over a reader; closing the generator ends its threads."""
    yield from reader
