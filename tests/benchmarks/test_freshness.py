"""benchmarks/freshness.py: every file changes the number of rows that the benchmark states, and files share keys."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thermocline.config.schema import Config

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def freshness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("freshness")


def test_files_change_equal_numbers_of_rows_and_their_keys_return(freshness: Any, tmp_path: Path) -> None:
    keys = []
    for number in range(freshness.SHARES + 1):
        batch = freshness.read(freshness.write(tmp_path, number, 50))
        keys.append(set(batch.tolist()))
        assert len(batch) == len(keys[-1]) == 50 * freshness.FIELDS  # each key once: a row per id
    assert keys[0] == keys[-1]
    assert not keys[0] & keys[1]
    assert len(freshness.sample(np.arange(10**5))) == 1000
    megabytes = freshness.EXAMPLES * freshness.FIELDS * (64 + 8) / 1e6
    assert megabytes == pytest.approx(100, rel=0.02)


def test_a_version_is_due_after_each_file(freshness: Any, tmp_path: Path) -> None:
    text = freshness.CONFIG.format(folder=tmp_path, batch=freshness.EXAMPLES // freshness.STEPS, steps=freshness.STEPS)
    (tmp_path / "stream.toml").write_text(text)
    config = Config.load(tmp_path / "stream.toml")
    assert config.publish is not None
    assert config.publish.every_steps * config.train.batch_size == freshness.EXAMPLES
    assert config.model.dim + 1 == 16  # with the linear weight: rows of 64 bytes
