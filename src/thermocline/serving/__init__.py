"""Serving: versions of trained rows, published by training and read by other processes.

`open(path)` reads the current version of a publication, without torch and without a GPU; `Publication(path)` writes
versions. This package imports only the C++ core, NumPy and small utilities, so that it starts fast.
"""

from thermocline.serving.changes import sort_by_hash
from thermocline.serving.publication import Publication, TableRows
from thermocline.serving.snapshot import Snapshot, open
from thermocline.serving.version import TableFile, Version

__all__ = ["Publication", "Snapshot", "TableFile", "TableRows", "Version", "open", "sort_by_hash"]
