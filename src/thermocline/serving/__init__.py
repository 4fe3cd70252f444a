"""Serving: versions of trained rows, published by training and read by other processes.

`open(path)` reads the current version of a publication, without torch and without a GPU; `Publication(path)` writes
versions; `connect(location)` reads through a server (`server.py`). Importing this package loads only the C++ core,
NumPy and small utilities, so that it starts fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thermocline.serving.changes import sort_by_hash
from thermocline.serving.publication import Publication, TableRows
from thermocline.serving.served_rows import ServedRows
from thermocline.serving.snapshot import Snapshot, consumers, open
from thermocline.serving.version import TableFile, Version

if TYPE_CHECKING:
    from thermocline.serving.client import Client

__all__ = [
    "Publication",
    "ServedRows",
    "Snapshot",
    "TableFile",
    "TableRows",
    "Version",
    "connect",
    "consumers",
    "open",
    "sort_by_hash",
]


def connect(location: str, **options: Any) -> Client:
    """Connect to a server; see `client.connect`. Loads pyarrow."""
    from thermocline.serving import client

    return client.connect(location, **options)
