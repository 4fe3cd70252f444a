"""The folder that benchmarks delete is never the one that a user names."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("common")


def test_other_files_beside_the_data_stay(common: Any, tmp_path: Path) -> None:
    other = tmp_path / "record.json"
    other.write_text("{}")
    folder = common.data_folder(str(tmp_path))
    assert common.data_folder(str(tmp_path)) == folder  # --keep finds the data again
    shutil.rmtree(folder)
    assert other.read_text() == "{}"


def test_without_a_name_every_folder_is_new(common: Any) -> None:
    folders = [common.data_folder(None), common.data_folder(None)]
    assert folders[0] != folders[1]
    for folder in folders:
        folder.rmdir()
