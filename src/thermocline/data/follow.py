"""`FollowReader`: reads the files of a growing folder or glob once, in the order of their names (`data.follow`).

Each file is read by a `Reader` of its own, and a batch never spans two files: the batches are a function of the files
and their order, whenever they appear. A position names the files taken, and the position inside the current one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Self

from thermocline.batch import Batch
from thermocline.config.data import Data
from thermocline.data.features import FeatureCounts, Features
from thermocline.data.files import NoExamples, Source
from thermocline.data.new_files import NewFiles, Taken
from thermocline.data.reader import Reader, Skipped
from thermocline.data.text_blocks import Malformed
from thermocline.errors import ConfigError, DataError
from thermocline.utils.text_format import parse_duration

_POLL_SECONDS = 0.2


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
    ) -> None:
        """Open the folder or glob data.train. Without `features`, wait for the first file and take them from it."""
        if len(data.train) != 1:
            raise ConfigError(
                f"data.train has {len(data.train)} paths: data.follow = true reads one folder or glob; give one path"
            )
        self.data = data
        self.path = data.train[0]
        self._options: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "labelled": labelled, "tensors": tensors}
        self._options["batch_size"] = batch_size
        self._idle = None if data.follow_idle is None else parse_duration(data.follow_idle)
        self._files = self._new_listing()
        self.while_waiting: Callable[[], None] | None = None
        """Called about every 0.2 s on the iterating thread while it waits; may raise."""
        self.waiting = False
        """Whether the iteration waits for a file."""
        self._stopping = False
        self._skipped = 0
        self._malformed: list[Malformed] = []
        self._start: tuple[Taken, Any] = (Taken(), None)
        """Files taken, and the position inside the last one; None: it was read to its end."""
        self.features = self._first_features() if features is None else features
        self._identity = {
            "reader": "follow",
            "features": hashlib.blake2b(
                json.dumps([self.features.to_json(), seed, shuffle, batch_size]).encode(), digest_size=8
            ).hexdigest(),
        }

    def _new_listing(self) -> NewFiles:
        return NewFiles(self.path, marker=self.data.follow_complete == "_SUCCESS")

    def _first_features(self) -> Features:
        for taken, source in self._new_files(Taken()):
            with contextlib.suppress(NoExamples):
                return self._open(source, None, taken.count).features
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
        for name, expected in self._identity.items():
            actual = position.get(name) if isinstance(position, Mapping) else position
            if actual != expected:
                raise DataError(
                    f"this position belongs to other data or settings: its {name} is {actual!r}, but this reader's is "
                    f"{expected!r} (features: columns, their roles and statistics, seed, shuffle, batch size)"
                )
        try:
            recent = [(str(name), int(size)) for name, size in position["files"]]
            taken = Taken(int(position["taken"]), recent)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"this position is damaged: {type(error).__name__}: {error}") from None
        self._start = (taken, position.get("within"))
        return self

    # ---- batches

    def __iter__(self) -> Iterator[Batch]:
        (taken, within), self._start = self._start, (Taken(), None)
        self._stopping, self._files = False, self._new_listing()
        self._skipped, self._malformed = 0, []
        return self._batches(taken, within)

    def _batches(self, taken: Taken, within: Any) -> Iterator[Batch]:
        if within is not None:
            yield from self._file(self._files.find(*taken.recent[-1]), taken, within)
        for with_file, source in self._new_files(taken):
            yield from self._file(source, with_file, None)

    def _new_files(self, taken: Taken) -> Iterator[tuple[Taken, Source]]:
        """Yield new files as they appear, each with the files taken up to it."""
        while not self._stopping:
            found = self._files.next(taken) or self._wait(taken)
            if found is None:
                return
            name, source = found
            taken = taken.add(name, source.size)
            yield taken, source

    def _wait(self, taken: Taken) -> tuple[str, Source] | None:
        """Wait for the next file. None: data.follow_idle has passed, or `stop_waiting` was called."""
        start = time.monotonic()
        self.waiting = True
        try:
            while not self._stopping and (self._idle is None or time.monotonic() - start < self._idle):
                until = time.monotonic() + max(_POLL_SECONDS, 10 * self._files.list_seconds)
                while not self._stopping and (left := until - time.monotonic()) > 0:
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

    def _file(self, source: Source, taken: Taken, within: Any) -> Iterator[Batch]:
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

    def _open(self, source: Source, features: Features | None, number: int) -> Reader:
        settings = dataclasses.replace(self.data, train=(), follow=False, follow_idle=None)
        reader = Reader([source], settings, features=features, **self._options)
        reader.set_epoch(number)
        return reader


def _generator(reader: Reader) -> Generator[Batch, None, None]:
    """Iterate over a reader; closing the generator ends its threads."""
    yield from reader
