from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.ssd import ROW, SMALL

import thermocline as tc


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[tc.SsdStore]:
    with tc.SsdStore.open(folder, row_bytes=ROW, **SMALL) as opened:
        yield opened
