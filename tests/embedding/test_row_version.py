"""The version of a table's rows in the note of a commit."""

from __future__ import annotations

import pytest

from thermocline.embedding.precision import Precision, append_precision, parse_precision
from thermocline.embedding.row_version import RowVersion, user_note

VERSION = RowVersion("abc", 7)


@pytest.mark.parametrize("note", [b"", b"a note", b'{"thermocline": "save", "step": 3}', b"two\nlines", b"\xff\0"])
@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_note_has_version_and_precision(note: bytes, kind: str) -> None:
    precision = Precision(kind)  # type: ignore[arg-type]
    full = append_precision(VERSION.append_to(note), precision, None)
    assert RowVersion.of_commit(full, epoch=3) == VERSION
    assert parse_precision(full) == (precision.layout, None)
    assert user_note(full) == note


def test_commits_of_earlier_builds_have_a_version_each() -> None:
    wrong = (b'{"history": 1, "step": 2}', b'{"history": "a", "step": -1}', b'{"history": "a"}', b'{"history": ')
    assert all(RowVersion.of_commit(note, 1).step == 0 for note in wrong)
    notes = [(b"", 1), (b"", 2), (b"a", 1), (append_precision(b"", Precision("int8"), None), 1)]
    versions = [RowVersion.of_commit(note, epoch) for note, epoch in notes]
    assert len(set(versions)) == len(notes)
    assert versions == [RowVersion.of_commit(note, epoch) for note, epoch in notes]
    assert all(version.history and version.step == 0 for version in versions)
