"""`RankRows`: the rows of a table over ranks as one stream on rank 0, in hash order, for a publication.

Rank 0 reads and writes; the other ranks answer its requests (`answer`) for the next piece of their own rows. A piece
crosses once, and memory holds two pieces per rank. An error of any rank ends the publication on all ranks, and nothing
becomes visible: rank 0 alone writes, and renames at the end.

Thread     the training thread, between steps; collective
Raises     the local exception on the rank that failed, `RankError` on all others
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from thermocline.distributed.collective_errors import CollectiveRunner, sent_error
from thermocline.embedding.table import Table
from thermocline.serving.changes import merge_by_hash
from thermocline.serving.served_rows import ServedRows
from thermocline.serving.version import ExtraFile, TableFile, Version
from thermocline.training.row_source import Change, Piece, RowSource, merge_changes

_DOING = "publishing rows"


class RankRows(RowSource):
    """The rows of all ranks. Rank 0 calls `rows` and `changes`, then `end`; the others call `answer`."""

    def __init__(self, table: Table, advance: Callable[[int], object] = lambda rows: None) -> None:
        self._runner = CollectiveRunner.of([table])
        self.is_rank0 = self._runner.is_rank0
        self._runner.run_all(_DOING, lambda: super(RankRows, self).__init__(table, advance))
        by_rank = self._runner.gather(_DOING, lambda: list(self.positions))
        self.positions = tuple(itertools.chain.from_iterable(by_rank)) if all(by_rank) else ()
        """Position of each rank's store, by rank; empty: the ranks have none."""
        self._stream: Iterator[Any] = iter(())
        """Pieces that this rank sends."""
        self._streams = 0
        self._failed = False
        """Whether a collective has failed: the other ranks have left it, too."""

    # ---- rank 0

    def packed(self, served: ServedRows) -> Iterator[Piece]:
        self._request({"do": "rows", "served": dataclasses.asdict(served)})
        return merge_by_hash(self._all_streams())

    def logged(self, since: Sequence[str], decays: int | None, served: ServedRows) -> Iterator[Change] | str:
        world = self._runner.world
        if since and len(since) != world:
            return f"the rows are in the stores of {world} ranks, those of the version before in {len(since)} stores"
        rule = dataclasses.asdict(served)
        causes = self._request({"do": "changes", "since": list(since), "decays": decays, "served": rule})
        if any(causes):
            return str(next(cause for cause in causes if cause))
        return merge_changes(self._all_streams())

    def _all_streams(self) -> list[Iterator[Any]]:
        self._streams += 1
        held: list[deque[Any]] = [deque() for _ in range(self._runner.world)]
        return [self._stream, *(self._pieces(rank, held) for rank in range(1, self._runner.world))]

    def _pieces(self, rank: int, held: list[deque[Any]]) -> Iterator[Any]:
        """Yield the pieces of another rank. Ranks whose last piece is in use send the next one, too."""
        stream = self._streams
        while True:
            if not held[rank]:
                assert stream == self._streams, "another stream of the ranks was begun"
                wanted = [other for other in range(1, self._runner.world) if not held[other]]
                for other, piece in enumerate(self._request({"do": "next", "ranks": wanted})):
                    if other in wanted:
                        held[other].append(piece)
            if held[rank][0] is None:  # it stays: the stream has ended
                return
            yield tuple(held[rank].popleft())

    def end(self, version: Version | None, error: Exception | None = None) -> None:
        """Let the other ranks return the version, or raise the error."""
        if self._failed:
            return  # they have raised
        text = "" if error is None else f"{type(error).__name__}: {error}"
        made = None if version is None else dataclasses.asdict(version)
        self._runner.broadcast(_DOING, lambda: {"do": "end", "error": text, "version": made})

    def _request(self, command: dict[str, Any]) -> list[Any]:
        """Send a command to all ranks; return their results, by rank."""
        try:
            self._runner.broadcast(_DOING, lambda: command)
            return self._perform(command)
        except BaseException:
            self._failed = True
            raise

    # ---- every rank

    def answer(self) -> Version:
        """Serve the requests of rank 0 until it has published; return the version. On the other ranks."""
        while True:
            command: dict[str, Any] = self._runner.broadcast(_DOING, dict)
            if command["do"] == "end":
                break
            self._perform(command)
        if command["error"]:
            raise sent_error(0, _DOING, command["error"])
        self.keep_log()
        return _version(command["version"])

    def _perform(self, command: dict[str, Any]) -> list[Any]:
        return self._runner.gather_to_rank0(_DOING, lambda: self._result(command))

    def _result(self, command: dict[str, Any]) -> Any:
        rank = self._runner.rank
        match command["do"]:
            case "rows":
                self._stream = super().packed(ServedRows(**command["served"]))
                return ""
            case "changes":
                served, since = ServedRows(**command["served"]), command["since"][rank : rank + 1]
                found = super().logged(since, command["decays"], served)
                if isinstance(found, str):
                    return found
                self._stream = found
                return ""
            case _:
                piece = next(self._stream, None) if rank in command["ranks"] else None
                return None if piece is None else list(piece)


def _version(fields: dict[str, Any]) -> Version:
    tables = tuple(TableFile(**table) for table in fields["tables"])
    return Version(**{**fields, "tables": tables, "files": tuple(ExtraFile(**file) for file in fields["files"])})
