"""`RowVersion`: identifies the content of a table, and records it in the note of a store's commit.

A history is one uninterrupted training of a table: a random token, drawn at the first step after the table was opened
on a commit or loaded. History and step count together identify all rows: a table that is opened on a commit again has
the version of that commit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any, NamedTuple

from thermocline.embedding.step_rates import RateRuns, parse_runs

_PREFIX = b'{"history": '


class RowVersion(NamedTuple):
    """Identity of the rows of a table. Tables of equal layout and version have equal rows."""

    history: str
    """Token of the training; empty: no row was trained."""
    step: int
    """Steps applied."""

    def append_to(self, note: bytes, rates: RateRuns | None = None) -> bytes:
        """Append a line with the version to the note of a commit, and the rates of its steps if rows catch up."""
        line: dict[str, Any] = {"history": self.history, "step": self.step}
        if rates is not None:
            line["rates"] = rates
        return note + b"\n" + json.dumps(line).encode()

    @classmethod
    def of_commit(cls, note: bytes, epoch: int) -> RowVersion:
        """Return the version of a commit. Commits before 0.1.0 do not record it: the note and the epoch replace it."""
        for line in note.split(b"\n")[-2:]:
            with contextlib.suppress(ValueError, RecursionError):
                match json.loads(line):
                    case {"history": str(history), "step": int(step)} if step >= 0:
                        return cls(history, step)
        return cls(hashlib.blake2b(b"%d %b" % (epoch, note), digest_size=8).hexdigest(), 0)


def rates_of_commit(note: bytes) -> RateRuns:
    """Return the rates that `append_to` added to a note; empty if there are none."""
    for line in note.split(b"\n")[-2:]:
        if line.startswith(_PREFIX):
            with contextlib.suppress(ValueError, RecursionError):
                return parse_runs(json.loads(line).get("rates"))
    return ()


def user_note(note: bytes) -> bytes:
    """Return the note of a commit without the lines that a table appends."""
    lines = note.split(b"\n")
    while len(lines) > 1 and lines[-1].startswith((_PREFIX, b'{"precision": ', b'{"statistics": ')):
        lines.pop()
    return b"\n".join(lines)
